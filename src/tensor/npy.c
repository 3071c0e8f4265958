/* SPDX-License-Identifier: Apache-2.0
 *
 * NumPy's .npy: one tensor in a file.
 */
#include <tutti/io.h>

#include <stdio.h>
#include <string.h>

#include "tensor/file.h"
#include "tensor/tensor.h"
#include "tensor/thread.h"

tutti_status tu_npy_header(const char *who, const tt_tensor *x, char header[TU_NPY_HEADER], size_t *bytes) {
    static const char *const kinds[] = {
        [TUTTI_F64] = "<f8", [TUTTI_F32] = "<f4",  [TUTTI_F16] = "<f2", [TUTTI_I8] = "|i1",   [TUTTI_I16] = "<i2",
        [TUTTI_I32] = "<i4", [TUTTI_I64] = "<i8",  [TUTTI_U8] = "|u1",  [TUTTI_U16] = "<u2",  [TUTTI_U32] = "<u4",
        [TUTTI_U64] = "<u8", [TUTTI_BOOL] = "|b1", [TUTTI_C64] = "<c8", [TUTTI_C128] = "<c16"
    };
    const char *kind = kinds[x->dtype];
    if (kind == NULL)
        return tu_error(TUTTI_ERROR_TYPE,
                        "%s: NumPy has no type for %s; convert it with tt_to, or use tt_save_safetensors", who,
                        tu_describe(x));
    /* At most 10 + 61 + 8 * 21 characters. */
    int used =
        10 + snprintf(header + 10, TU_NPY_HEADER - 10, "{'descr': '%s', 'fortran_order': False, 'shape': (", kind);
    for (int i = 0; i < x->ndim; i++)
        used += snprintf(header + used, TU_NPY_HEADER - (size_t)used, "%s%lld%s", i > 0 ? " " : "",
                         (long long)x->sizes[i], i + 1 < x->ndim || x->ndim == 1 ? "," : "");
    used += snprintf(header + used, TU_NPY_HEADER - (size_t)used, "), }");
    size_t whole = ((size_t)used + 1 + 63) / 64 * 64;
    memset(header + used, ' ', whole - (size_t)used - 1);
    header[whole - 1] = '\n';
    memcpy(header, "\x93NUMPY\1\0", 8);
    tu_store_little((uint8_t *)header + 8, whole - 10, 2);
    *bytes = whole;
    return TUTTI_OK;
}

bool tt_save_npy(tt_tensor *x, const char *path) {
    char header[TU_NPY_HEADER];
    size_t bytes;
    tu_writer writer;
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_save_check("save_npy", tt_tensors_of(1, &x), NULL)) != TUTTI_OK ||
        tu_pending_take(tu_npy_header("save_npy", x, header, &bytes)) != TUTTI_OK ||
        tu_pending_take(tu_writer_open("save_npy", path, &writer)) != TUTTI_OK)
        return false;
    tutti_status status = tu_writer_put(&writer, header, bytes);
    if (status == TUTTI_OK)
        status = tu_writer_put_tensor(&writer, x);
    return tu_pending_take(tu_writer_close(&writer, status)) == TUTTI_OK;
}

tt_tensor *tu_npy_tensor(const tu_reader *reader, const char *where, uint64_t offset, uint64_t bytes, uint32_t *crc) {
    tu_file_array array;
    if (tu_pending_take(tu_npy_parse(reader, where, offset, bytes, &array)) != TUTTI_OK)
        return NULL;
    for (uint64_t at = offset; crc != NULL && at < array.offset;) { /* the checksum counts the header too */
        uint8_t piece[256];
        size_t now = array.offset - at < sizeof piece ? (size_t)(array.offset - at) : sizeof piece;
        if (tu_pending_take(tu_reader_get(reader, at, piece, now)) != TUTTI_OK)
            return NULL;
        *crc = tu_crc32(*crc, piece, now);
        at += now;
    }
    if (crc != NULL && array.offset + array.bytes != offset + bytes) {
        tu_fail(TUTTI_ERROR_PROTOCOL, "%s is damaged: %llu bytes follow its elements", where,
                (unsigned long long)(offset + bytes - array.offset - array.bytes));
        return NULL;
    }
    return tu_reader_tensor(reader, &array, crc);
}

/* What follows the elements is left alone: NumPy writes several arrays behind one another into one file. */
tt_tensor *tt_load_npy(const char *path) {
    tu_reader reader;
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check() ||
        tu_pending_take(tu_reader_open("load_npy", path, &reader)) != TUTTI_OK)
        return NULL;
    tt_tensor *x = tu_npy_tensor(&reader, reader.where, 0, reader.bytes, NULL);
    tu_reader_close(&reader);
    return x;
}
