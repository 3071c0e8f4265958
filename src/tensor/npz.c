/* SPDX-License-Identifier: Apache-2.0
 *
 * NumPy's .npz: a zip archive of .npy files, stored. Sizes are known before an entry is written; its checksum is put
 * into its header afterwards. Dates are those of NumPy, 1980-01-01, so that equal tensors make equal files.
 */
#include <tutti/io.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/file.h"
#include "tensor/tensor.h"
#include "tensor/thread.h"

#define WHO "save_npz"
#define DATE 0x21u /* 1980-01-01 */
#define NARROW 20u /* version of the format that readers need: 2.0 */
#define WIDE 45u   /* 4.5, with 64-bit fields */
#define UTF8 0x800u
#define LONGEST_NAME 65000u

typedef struct piece {
    uint64_t header, bytes; /* where its header is, and how long it is stored */
    uint32_t crc;
} piece;

static bool ascii(const char *name) {
    for (; *name != 0; name++)
        if ((unsigned char)*name >= 0x80)
            return false;
    return true;
}

static uint32_t narrow(uint64_t value) {
    return value < UINT32_MAX ? (uint32_t)value : UINT32_MAX;
}

/* What both headers of an entry have in common: version, flags, method, time, date, checksum, sizes, name length. */
static uint8_t *put_common(uint8_t *at, const char *name, const piece *entry, bool wide) {
    at = tu_store_little(at, wide ? WIDE : NARROW, 2);
    at = tu_store_little(at, ascii(name) ? 0 : UTF8, 2);
    at = tu_store_little(at, 0, 2);
    at = tu_store_little(at, 0, 2);
    at = tu_store_little(at, DATE, 2);
    at = tu_store_little(at, entry->crc, 4);
    at = tu_store_little(at, narrow(entry->bytes), 4);
    at = tu_store_little(at, narrow(entry->bytes), 4);
    return tu_store_little(at, strlen(name) + 4, 2);
}

static tutti_status put_name(tu_writer *writer, const char *name) {
    tutti_status status = tu_writer_put(writer, name, strlen(name));
    return status == TUTTI_OK ? tu_writer_put(writer, ".npy", 4) : status;
}

static tutti_status put_entry(tu_writer *writer, const char *name, const tt_tensor *x, piece *entry) {
    char npy[TU_NPY_HEADER];
    uint8_t local[30] = "PK\3\4", extra[20] = { 0 };
    size_t npy_bytes;
    tutti_status status = tu_npy_header(WHO, x, npy, &npy_bytes);
    if (status != TUTTI_OK)
        return status;
    *entry = (piece){ .header = writer->written, .bytes = npy_bytes + (uint64_t)x->numel * tu_dtype_bytes[x->dtype] };
    bool wide = entry->bytes >= UINT32_MAX;
    tu_store_little(put_common(local + 4, name, entry, wide), wide ? sizeof extra : 0, 2);
    status = tu_writer_put(writer, local, sizeof local);
    if (status == TUTTI_OK)
        status = put_name(writer, name);
    tu_store_little(tu_store_little(tu_store_little(tu_store_little(extra, 1, 2), 16, 2), entry->bytes, 8),
                    entry->bytes, 8);
    if (status == TUTTI_OK && wide)
        status = tu_writer_put(writer, extra, sizeof extra);
    writer->crc = 0;
    writer->counts_crc = true;
    if (status == TUTTI_OK)
        status = tu_writer_put(writer, npy, npy_bytes);
    if (status == TUTTI_OK)
        status = tu_writer_put_tensor(writer, x);
    writer->counts_crc = false;
    entry->crc = writer->crc;
    uint8_t crc[4];
    tu_store_little(crc, entry->crc, 4);
    return status == TUTTI_OK ? tu_writer_put_at(writer, entry->header + 14, crc, sizeof crc) : status;
}

static tutti_status put_directory_entry(tu_writer *writer, const char *name, const piece *entry) {
    uint8_t central[46] = "PK\1\2", extra[28], *end = extra + 4;
    bool wide = entry->bytes >= UINT32_MAX, far = entry->header >= UINT32_MAX;
    if (wide)
        end = tu_store_little(tu_store_little(end, entry->bytes, 8), entry->bytes, 8);
    if (far)
        end = tu_store_little(end, entry->header, 8);
    size_t extra_bytes = wide || far ? (size_t)(end - extra) : 0;
    tu_store_little(tu_store_little(extra, 1, 2), extra_bytes - 4, 2);
    uint8_t *at = tu_store_little(central + 4, 3u << 8 | (wide || far ? WIDE : NARROW),
                                  2); /* made on Unix, which means the mode below */
    at = put_common(at, name, entry, wide || far);
    at = tu_store_little(at, extra_bytes, 2);
    at = tu_store_little(at, 0, 2 + 2 + 2);
    at = tu_store_little(at, (uint64_t)0100644 << 16, 4);
    tu_store_little(at, narrow(entry->header), 4);
    tutti_status status = tu_writer_put(writer, central, sizeof central);
    if (status == TUTTI_OK)
        status = put_name(writer, name);
    return status == TUTTI_OK ? tu_writer_put(writer, extra, extra_bytes) : status;
}

static tutti_status put_end(tu_writer *writer, uint64_t count, uint64_t directory) {
    uint64_t bytes = writer->written - directory, end64 = writer->written;
    uint8_t record[56 + 20 + 22], *at = record;
    if (count >= UINT16_MAX || bytes >= UINT32_MAX || directory >= UINT32_MAX) {
        memcpy(at, "PK\6\6", 4);
        at = tu_store_little(at + 4, 56 - 12, 8);
        at = tu_store_little(at, 3u << 8 | WIDE, 2);
        at = tu_store_little(at, WIDE, 2);
        at = tu_store_little(at, 0, 8);
        at = tu_store_little(tu_store_little(at, count, 8), count, 8);
        at = tu_store_little(tu_store_little(at, bytes, 8), directory, 8);
        memcpy(at, "PK\6\7", 4);
        at = tu_store_little(at + 4, 0, 4);
        at = tu_store_little(tu_store_little(at, end64, 8), 1, 4);
    }
    uint64_t few = count < UINT16_MAX ? count : UINT16_MAX;
    memcpy(at, "PK\5\6", 4);
    at = tu_store_little(at + 4, 0, 4);
    at = tu_store_little(tu_store_little(at, few, 2), few, 2);
    at = tu_store_little(tu_store_little(at, narrow(bytes), 4), narrow(directory), 4);
    at = tu_store_little(at, 0, 2);
    return tu_writer_put(writer, record, (size_t)(at - record));
}

static tutti_status check_save(tt_tensor_list tensors, const char *const *names) {
    char header[TU_NPY_HEADER];
    size_t bytes;
    if (names == NULL && tensors.count > 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, WHO ": names is NULL");
    tutti_status status = tu_save_check(WHO, tensors, names);
    for (size_t i = 0; i < tensors.count && status == TUTTI_OK; i++) {
        if (strlen(names[i]) > LONGEST_NAME)
            return tu_error(TUTTI_ERROR_ARGUMENT, WHO ": names[%zu] is longer than %u bytes", i, LONGEST_NAME);
        status = tu_npy_header(WHO, tensors.at[i], header, &bytes); /* before a file is begun */
    }
    return status;
}

bool tt_save_npz(tt_tensor_list tensors, const char *const *names, const char *path) {
    tu_writer writer;
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(check_save(tensors, names)) != TUTTI_OK)
        return false;
    piece *entries = calloc(tensors.count + 1, sizeof *entries);
    if (entries == NULL) {
        tu_pending_take(tu_error_memory("the directory of a .npz file", (tensors.count + 1) * sizeof *entries));
        return false;
    }
    tutti_status status = tu_writer_open(WHO, path, &writer);
    if (status == TUTTI_OK) {
        for (size_t i = 0; i < tensors.count && status == TUTTI_OK; i++)
            status = put_entry(&writer, names[i], tensors.at[i], &entries[i]);
        uint64_t directory = writer.written;
        for (size_t i = 0; i < tensors.count && status == TUTTI_OK; i++)
            status = put_directory_entry(&writer, names[i], &entries[i]);
        if (status == TUTTI_OK)
            status = put_end(&writer, tensors.count, directory);
        status = tu_writer_close(&writer, status);
    }
    free(entries);
    return tu_pending_take(status) == TUTTI_OK;
}

/* ---- reading ---- */

static tt_tensor *load_entry(const tu_reader *reader, const tu_zip_entry *entry) {
    char where[640];
    uint32_t crc = 0;
    size_t length = strlen(entry->name);
    snprintf(where, sizeof where, "%s, entry %s,", reader->where, tu_quote(entry->name, length).text);
    if (length < 4 || strcmp(entry->name + length - 4, ".npy") != 0) {
        tu_fail(TUTTI_ERROR_UNSUPPORTED, "%s is no .npy file", where);
        return NULL;
    }
    tt_tensor *x = tu_npy_tensor(reader, where, entry->offset, entry->bytes, &crc);
    if (x != NULL && crc != entry->crc) {
        tu_fail(TUTTI_ERROR_PROTOCOL, "%s is damaged: its checksum is %08x and should be %08x", where, crc, entry->crc);
        return NULL;
    }
    return x;
}

tt_named_list tt_load_npz(const char *path) {
    tu_reader reader;
    tu_zip_list list;
    tu_list_room room;
    tt_named_list result = { 0, tu_nothing, tu_no_names };
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check() ||
        tu_pending_take(tu_reader_open("load_npz", path, &reader)) != TUTTI_OK)
        return result;
    if (tu_pending_take(tu_zip_parse(&reader, &list)) != TUTTI_OK)
        goto close_reader;
    size_t text = 0;
    for (size_t i = 0; i < list.count; i++)
        text += strlen(list.entries[i].name) + 1;
    if (!tu_list_room_make(list.count, text, &room))
        goto free_list;
    for (size_t i = 0; i < list.count; i++) {
        room.tensors[i] = load_entry(&reader, &list.entries[i]);
        if (room.tensors[i] == NULL)
            goto free_list;
        size_t length = strlen(list.entries[i].name) - 4;
        room.names[i] = memcpy(room.text, list.entries[i].name, length);
        room.text[length] = 0;
        room.text += length + 1;
    }
    result = (tt_named_list){ list.count, room.tensors, (const char *const *)room.names };
free_list:
    tu_zip_free(&list);
close_reader:
    tu_reader_close(&reader);
    return result;
}
