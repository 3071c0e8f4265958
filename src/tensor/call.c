/* SPDX-License-Identifier: Apache-2.0
 *
 * A call as data: its attributes kept, printed and hashed, by the types that the row gives them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/device.h>
#include <tutti/dtype.h>
#include <tutti/group.h>

#include "tensor/operator.h"

/* ---- keeping ---- */

tutti_status tu_attributes_copy(const tu_operator *entry, const void *attributes, void *copy) {
    tutti_status status = TUTTI_OK;
    memcpy(copy, attributes, entry->attribute_bytes);
    for (int i = 0; i < entry->argument_count; i++) {
        char *at = (char *)copy + entry->arguments[i].offset;
        if (entry->arguments[i].type == TT_ARGUMENT_GROUP) {
            tutti_group_keep(*(tutti_group **)at);
        } else if (entry->arguments[i].type == TT_ARGUMENT_INTS) {
            tu_ints *list = (tu_ints *)at;
            size_t bytes = list->count * sizeof *list->at;
            int64_t *own = malloc(bytes + 1);
            if (own != NULL)
                memcpy(own, list->at, bytes);
            else
                status = tu_error_memory("a list among an operator's attributes", bytes);
            list->at = own;
        }
    }
    if (status != TUTTI_OK)
        tu_attributes_end(entry, copy);
    return status;
}

void tu_attributes_end(const tu_operator *entry, void *copy) {
    for (int i = 0; i < entry->argument_count; i++) {
        char *at = (char *)copy + entry->arguments[i].offset;
        if (entry->arguments[i].type == TT_ARGUMENT_GROUP)
            tutti_group_release(*(tutti_group **)at);
        else if (entry->arguments[i].type == TT_ARGUMENT_INTS)
            free((int64_t *)((tu_ints *)at)->at);
    }
}

/* ---- printing ---- */

static void print_list(FILE *to, size_t count, const int64_t *at) {
    fprintf(to, "[");
    for (size_t i = 0; i < count; i++)
        fprintf(to, "%s%" PRId64, i > 0 ? ", " : "", at[i]);
    fprintf(to, "]");
}

void tu_number_print(FILE *to, double number) {
    char text[40];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, number);
        if (strtod(text, NULL) == number)
            break;
    }
    fputs(text, to);
}

void tu_attribute_print(FILE *to, const tu_argument *argument, const void *at) {
    fprintf(to, "%s=", argument->name);
    switch (argument->type) {
    case TT_ARGUMENT_INT:
        fprintf(to, "%d", *(const int *)at);
        break;
    case TT_ARGUMENT_INT64:
        fprintf(to, "%" PRId64, *(const int64_t *)at);
        break;
    case TT_ARGUMENT_DOUBLE:
        tu_number_print(to, *(const double *)at);
        break;
    case TT_ARGUMENT_BOOL:
        fprintf(to, "%s", *(const bool *)at ? "true" : "false");
        break;
    case TT_ARGUMENT_DIMS:
        if (((const tt_dims *)at)->count < 0)
            fprintf(to, "none");
        else
            print_list(to, (size_t)((const tt_dims *)at)->count, ((const tt_dims *)at)->at);
        break;
    case TT_ARGUMENT_INTS:
        print_list(to, ((const tu_ints *)at)->count, ((const tu_ints *)at)->at);
        break;
    case TT_ARGUMENT_DTYPE:
        fprintf(to, "%s", tutti_dtype_name(*(const tutti_dtype *)at));
        break;
    case TT_ARGUMENT_DEVICE:
        fprintf(to, "%s", tutti_device_name(*(const tutti_device *)at));
        break;
    case TT_ARGUMENT_REDUCTION:
        fprintf(to, "%s", tutti_reduction_name(*(const tutti_reduction *)at));
        break;
    case TT_ARGUMENT_GROUP:
        fprintf(to, "%s", *(tutti_group *const *)at != NULL ? tutti_group_name(*(tutti_group *const *)at) : "none");
        break;
    case TT_ARGUMENT_TENSOR:
    case TT_ARGUMENT_TENSORS:
        break;
    }
}

static void print_tensor(FILE *to, const tt_tensor *x) {
    if (x == NULL)
        fprintf(to, "none");
    else
        fprintf(to, "%s", tu_describe(x));
}

const char *tu_call_text(const tu_call *call, char *buffer, size_t size) {
    const tu_operator *entry = call->entry;
    FILE *to = fmemopen(buffer, size, "w");
    int input = 0;
    snprintf(buffer, size, "%s", entry->name); /* what stands there where memory has run out */
    if (to == NULL)
        return buffer;
    setvbuf(to, NULL, _IONBF, 0);
    fprintf(to, "%s%s(", entry->name, call->in_place ? "_" : "");
    for (int i = 0; i < entry->argument_count; i++) {
        const tu_argument *argument = &entry->arguments[i];
        fprintf(to, "%s", i > 0 ? ", " : "");
        if (argument->type == TT_ARGUMENT_TENSOR) {
            fprintf(to, "%s ", argument->name);
            print_tensor(to, call->inputs[input++]);
        } else if (argument->type == TT_ARGUMENT_TENSORS) {
            fprintf(to, "%s ", argument->name);
            for (int j = 0; j < call->input_count; j++) {
                fprintf(to, "%s", j > 0 ? " and " : "");
                print_tensor(to, call->inputs[j]);
            }
        } else {
            tu_attribute_print(to, argument, (const char *)call->attributes + argument->offset);
        }
    }
    fprintf(to, ")");
    fclose(to);
    buffer[size - 1] = 0;
    return buffer;
}

/* ---- hashing: FNV-1a over what the text of the attributes depends on ---- */

static uint64_t mix(uint64_t hash, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t mix_list(uint64_t hash, int64_t count, const int64_t *at) {
    hash = mix(hash, &count, sizeof count);
    return count > 0 ? mix(hash, at, (size_t)count * sizeof *at) : hash;
}

/* Members only, never a struct's padding; a group by its name, which is the same in every rank and every run. */
static uint64_t mix_attribute(uint64_t hash, tt_argument_type type, const void *at) {
    switch (type) {
    case TT_ARGUMENT_INT:
    case TT_ARGUMENT_DEVICE:
        return mix(hash, at, sizeof(int));
    case TT_ARGUMENT_INT64:
    case TT_ARGUMENT_DOUBLE:
        return mix(hash, at, sizeof(int64_t));
    case TT_ARGUMENT_BOOL:
        return mix(hash, at, sizeof(bool));
    case TT_ARGUMENT_DTYPE:
        return mix(hash, at, sizeof(tutti_dtype));
    case TT_ARGUMENT_REDUCTION:
        return mix(hash, at, sizeof(tutti_reduction));
    case TT_ARGUMENT_DIMS:
        return mix_list(hash, ((const tt_dims *)at)->count, ((const tt_dims *)at)->at);
    case TT_ARGUMENT_INTS:
        return mix_list(hash, (int64_t)((const tu_ints *)at)->count, ((const tu_ints *)at)->at);
    case TT_ARGUMENT_GROUP: {
        const char *name = *(tutti_group *const *)at != NULL ? tutti_group_name(*(tutti_group *const *)at) : "";
        return mix(hash, name, strlen(name) + 1);
    }
    case TT_ARGUMENT_TENSOR:
    case TT_ARGUMENT_TENSORS:
        break;
    }
    return hash;
}

uint64_t tu_attributes_hash(const tu_operator *entry, const void *attributes) {
    uint64_t hash = mix(0xcbf29ce484222325u, entry->name, strlen(entry->name) + 1);
    for (int i = 0; i < entry->argument_count; i++)
        hash = mix_attribute(hash, entry->arguments[i].type, (const char *)attributes + entry->arguments[i].offset);
    return hash;
}
