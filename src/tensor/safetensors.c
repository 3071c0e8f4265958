/* SPDX-License-Identifier: Apache-2.0
 *
 * safetensors: named tensors and texts in one file. Tensors of larger elements lie first, so that each is aligned to
 * its elements.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/io.h>

#include "tensor/file.h"
#include "tensor/tensor.h"
#include "tensor/thread.h"

#define WHO "save_safetensors"

/* By dtype; C128 is not part of the format. */
static const char *const dtype_names[] = {
    [TUTTI_F64] = "F64",         [TUTTI_F32] = "F32",         [TUTTI_F16] = "F16",   [TUTTI_BF16] = "BF16",
    [TUTTI_F8_E4M3] = "F8_E4M3", [TUTTI_F8_E5M2] = "F8_E5M2", [TUTTI_I8] = "I8",     [TUTTI_I16] = "I16",
    [TUTTI_I32] = "I32",         [TUTTI_I64] = "I64",         [TUTTI_U8] = "U8",     [TUTTI_U16] = "U16",
    [TUTTI_U32] = "U32",         [TUTTI_U64] = "U64",         [TUTTI_BOOL] = "BOOL", [TUTTI_C64] = "C64",
    [TUTTI_C128] = NULL
};

/* ---- writing ---- */

typedef struct text {
    char *at;
    size_t used, room;
    bool failed;
} text;

static void add(text *json, const char *piece, size_t bytes) {
    if (json->failed)
        return;
    if (json->room - json->used < bytes) {
        size_t larger = (json->used + bytes) * 2 + 256;
        char *moved = realloc(json->at, larger);
        if (moved == NULL) {
            json->failed = true;
            return;
        }
        json->at = moved;
        json->room = larger;
    }
    memcpy(json->at + json->used, piece, bytes);
    json->used += bytes;
}

static void add_text(text *json, const char *piece) {
    add(json, piece, strlen(piece));
}

static void add_string(text *json, const char *string) {
    add(json, "\"", 1);
    for (; *string != 0; string++) {
        char escaped[8];
        if (*string == '"' || *string == '\\')
            add(json, "\\", 1);
        if ((unsigned char)*string >= 32) {
            add(json, string, 1);
        } else {
            snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned char)*string);
            add_text(json, escaped);
        }
    }
    add(json, "\"", 1);
}

static void add_metadata(text *json, tt_metadata metadata) {
    add_text(json, "\"__metadata__\":{");
    for (size_t i = 0; i < metadata.count; i++) {
        add_text(json, i > 0 ? "," : "");
        add_string(json, metadata.keys[i]);
        add(json, ":", 1);
        add_string(json, metadata.values[i]);
    }
    add(json, "}", 1);
}

static void add_tensor(text *json, const char *name, const tt_tensor *x, uint64_t offset) {
    char number[64];
    add_string(json, name);
    add_text(json, ":{\"dtype\":\"");
    add_text(json, dtype_names[x->dtype]);
    add_text(json, "\",\"shape\":[");
    for (int i = 0; i < x->ndim; i++) {
        snprintf(number, sizeof number, "%s%lld", i > 0 ? "," : "", (long long)x->sizes[i]);
        add_text(json, number);
    }
    uint64_t bytes = (uint64_t)x->numel * tu_dtype_bytes[x->dtype];
    snprintf(number, sizeof number, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)offset,
             (unsigned long long)(offset + bytes));
    add_text(json, number);
}

static tutti_status make_header(tt_tensor_list tensors, const char *const *names, tt_metadata metadata, text *json) {
    uint64_t next = 0, *offsets = malloc((tensors.count + 1) * sizeof *offsets);
    if (offsets == NULL)
        return tu_error_memory("the header of a safetensors file", (tensors.count + 1) * sizeof *offsets);
    for (unsigned width = 8; width > 0; width /= 2) {
        for (size_t i = 0; i < tensors.count; i++) {
            if (tu_dtype_bytes[tensors.at[i]->dtype] != width)
                continue;
            offsets[i] = next;
            next += (uint64_t)tensors.at[i]->numel * width;
        }
    }
    add(json, "{", 1);
    if (metadata.count > 0)
        add_metadata(json, metadata);
    for (size_t i = 0; i < tensors.count; i++) {
        add_text(json, i > 0 || metadata.count > 0 ? "," : "");
        add_tensor(json, names[i], tensors.at[i], offsets[i]);
    }
    free(offsets);
    add(json, "}", 1);
    while (!json->failed && json->used % 8 != 0)
        add(json, " ", 1);
    return json->failed ? tu_error_memory("the header of a safetensors file", json->room * 2) : TUTTI_OK;
}

static tutti_status check_save(tt_tensor_list tensors, const char *const *names, tt_metadata metadata) {
    if (names == NULL && tensors.count > 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, WHO ": names is NULL");
    tutti_status status = tu_save_check(WHO, tensors, names);
    if (status != TUTTI_OK)
        return status;
    for (size_t i = 0; i < tensors.count; i++) {
        if (strcmp(names[i], "__metadata__") == 0)
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            WHO ": names[%zu]: the format keeps the name \"__metadata__\" for itself", i);
        if (dtype_names[tensors.at[i]->dtype] == NULL)
            return tu_error(TUTTI_ERROR_TYPE,
                            WHO
                            ": the format has no type for tensors[%zu], %s; save its real and imaginary part, or use "
                            "tt_save_npz",
                            i, tu_describe(tensors.at[i]));
    }
    if (metadata.count > 0 && (metadata.keys == NULL || metadata.values == NULL))
        return tu_error(TUTTI_ERROR_ARGUMENT, WHO ": the %s of the metadata are NULL",
                        metadata.keys == NULL ? "keys" : "values");
    for (size_t i = 0; i < metadata.count; i++) {
        const char *key = metadata.keys[i], *value = metadata.values[i];
        if (key == NULL || value == NULL || !tu_utf8(key, strlen(key)) || !tu_utf8(value, strlen(value)))
            return tu_error(TUTTI_ERROR_ARGUMENT, WHO ": entry %zu of the metadata is NULL or not UTF-8", i);
    }
    return tu_names_differ(WHO ": metadata", metadata.count, metadata.keys);
}

static tutti_status save(tt_tensor_list tensors, const char *const *names, tt_metadata metadata, const char *path) {
    text json = { 0 };
    tu_writer writer;
    uint8_t length[8];
    tutti_status status = make_header(tensors, names, metadata, &json);
    if (status == TUTTI_OK)
        status = tu_writer_open(WHO, path, &writer);
    if (status != TUTTI_OK)
        goto free_header;
    tu_store_little(length, json.used, 8);
    status = tu_writer_put(&writer, length, sizeof length);
    if (status == TUTTI_OK)
        status = tu_writer_put(&writer, json.at, json.used);
    for (unsigned width = 8; width > 0; width /= 2)
        for (size_t i = 0; i < tensors.count && status == TUTTI_OK; i++)
            if (tu_dtype_bytes[tensors.at[i]->dtype] == width)
                status = tu_writer_put_tensor(&writer, tensors.at[i]);
    status = tu_writer_close(&writer, status);
free_header:
    free(json.at);
    return status;
}

bool tt_save_safetensors_with(tt_tensor_list tensors, const char *const *names, tt_metadata metadata,
                              const char *path) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(check_save(tensors, names, metadata)) != TUTTI_OK)
        return false;
    return tu_pending_take(save(tensors, names, metadata, path)) == TUTTI_OK;
}

bool tt_save_safetensors(tt_tensor_list tensors, const char *const *names, const char *path) {
    return tt_save_safetensors_with(tensors, names, (tt_metadata){ 0 }, path);
}

/* ---- reading ---- */

static bool open_list(const char *who, const char *path, tu_reader *reader, tu_safe_list *list) {
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check() ||
        tu_pending_take(tu_reader_open(who, path, reader)) != TUTTI_OK)
        return false;
    if (tu_pending_take(tu_safe_parse(reader, list)) == TUTTI_OK)
        return true;
    tu_reader_close(reader);
    return false;
}

static char *copy_text(char **to, const char *from) {
    size_t bytes = strlen(from) + 1;
    char *copy = memcpy(*to, from, bytes);
    *to += bytes;
    return copy;
}

tt_named_list tt_load_safetensors(const char *path) {
    tu_reader reader;
    tu_safe_list list;
    tu_list_room room;
    tt_named_list result = { 0, tu_nothing, tu_no_names };
    if (!open_list("load_safetensors", path, &reader, &list))
        return result;
    size_t text_bytes = 0;
    for (size_t i = 0; i < list.count; i++)
        text_bytes += strlen(list.entries[i].name) + 1;
    if (!tu_list_room_make(list.count, text_bytes, &room))
        goto free_list;
    for (size_t i = 0; i < list.count; i++) {
        room.names[i] = copy_text(&room.text, list.entries[i].name);
        room.tensors[i] = tu_reader_tensor(&reader, &list.entries[i].array, NULL);
        if (room.tensors[i] == NULL)
            goto free_list;
    }
    result = (tt_named_list){ list.count, room.tensors, (const char *const *)room.names };
free_list:
    tu_safe_free(&list);
    tu_reader_close(&reader);
    return result;
}

tt_metadata tt_load_metadata(const char *path) {
    tu_reader reader;
    tu_safe_list list;
    tt_metadata result = { 0 };
    if (!open_list("load_metadata", path, &reader, &list))
        return result;
    size_t bytes = 2 * list.pair_count * sizeof(char *) + 1;
    for (size_t i = 0; i < 2 * list.pair_count; i++)
        bytes += strlen(list.pairs[i]) + 1;
    const char **keys = tu_scope_memory(bytes), **values = keys == NULL ? NULL : keys + list.pair_count;
    if (keys != NULL) {
        char *text_at = (char *)(values + list.pair_count);
        for (size_t i = 0; i < list.pair_count; i++) {
            keys[i] = copy_text(&text_at, list.pairs[2 * i]);
            values[i] = copy_text(&text_at, list.pairs[2 * i + 1]);
        }
        result = (tt_metadata){ list.pair_count, keys, values };
    }
    tu_safe_free(&list);
    tu_reader_close(&reader);
    return result;
}

const char *tt_metadata_get(tt_metadata metadata, const char *key) {
    for (size_t i = 0; key != NULL && i < metadata.count; i++)
        if (strcmp(metadata.keys[i], key) == 0)
            return metadata.values[i];
    return NULL;
}
