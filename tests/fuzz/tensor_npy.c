/* SPDX-License-Identifier: Apache-2.0
 *
 * What may stand in a .npy file, and in a .npz file around it.
 * rooms: base
 */
#include "tensor/file_read.c"
#include "tensor/npy_parse.c"
#include "tensor/zip_parse.c"

#include "fuzz.h"
#include "reader.h"

static void fuzz_one(const uint8_t *data, size_t bytes) {
    tu_reader reader;
    tu_file_array array;
    tu_zip_list list;
    reader_of(data, bytes, &reader);
    if (tu_npy_parse(&reader, reader.where, 0, bytes, &array) == TUTTI_OK) {
        FUZZ_CHECK(array.offset <= bytes && array.bytes <= bytes - array.offset);
        FUZZ_CHECK(array.ndim >= 0 && array.ndim <= TT_MAX_DIMS && tutti_dtype_size(array.dtype) > 0);
    } else {
        FUZZ_CHECK(tutti_error_message()[0] != 0);
    }
    if (tu_zip_parse(&reader, &list) == TUTTI_OK) {
        for (size_t i = 0; i < list.count; i++) {
            const tu_zip_entry *entry = &list.entries[i];
            FUZZ_CHECK(entry->offset <= bytes && entry->bytes <= bytes - entry->offset);
            FUZZ_CHECK(tu_utf8(entry->name, strlen(entry->name)));
            if (tu_npy_parse(&reader, "entry", entry->offset, entry->bytes, &array) == TUTTI_OK)
                FUZZ_CHECK(array.offset + array.bytes <= entry->offset + entry->bytes);
            (void)tu_crc32(0, data + entry->offset, entry->bytes);
        }
        tu_zip_free(&list);
    } else {
        FUZZ_CHECK(tutti_error_message()[0] != 0);
    }
    tu_reader_close(&reader);
}

FUZZ_TARGET(tensor_npy)
