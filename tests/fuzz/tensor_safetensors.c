/* SPDX-License-Identifier: Apache-2.0
 *
 * What may stand in a safetensors file.
 * rooms: base
 */
#include "tensor/file_read.c"
#include "tensor/safetensors_parse.c"

#include "fuzz.h"
#include "reader.h"

static void parse(const tu_reader *reader, const uint8_t *data, size_t bytes) {
    tu_safe_list list;
    if (tu_safe_parse(reader, &list) != TUTTI_OK) {
        FUZZ_CHECK(tutti_error_message()[0] != 0);
        return;
    }
    uint64_t covered = 8 + tu_load_little(data, 8);
    for (size_t i = 0; i < list.count; i++) {
        const tu_file_array *array = &list.entries[i].array;
        FUZZ_CHECK(array->offset <= bytes && array->bytes <= bytes - array->offset);
        FUZZ_CHECK(array->ndim >= 0 && array->ndim <= TT_MAX_DIMS && tutti_dtype_size(array->dtype) > 0);
        FUZZ_CHECK(tu_utf8(list.entries[i].name, strlen(list.entries[i].name)));
        covered += array->bytes;
    }
    FUZZ_CHECK(covered == bytes);
    for (size_t i = 0; i < 2 * list.pair_count; i++)
        FUZZ_CHECK(tu_utf8(list.pairs[i], strlen(list.pairs[i])));
    tu_safe_free(&list);
}

static void fuzz_one(const uint8_t *data, size_t bytes) {
    tu_reader reader;
    reader_of(data, bytes, &reader);
    parse(&reader, data, bytes);
    tu_reader_close(&reader);
}

FUZZ_TARGET(tensor_safetensors)
