/* SPDX-License-Identifier: Apache-2.0
 *
 * A right matrix, packed once: see right.h.
 */
#include "fused/right.h"

#include "tensor/process.h"

/* Of a larger one a copy costs more than it saves. Few rows save less than it costs to write, and read again, what does
 * not stay in the caches of one core; and of what does not stay in the last one, as many rows as it has columns save
 * that, about. */
#define MOST_BYTES ((size_t)16 << 20)
#define MOST_BYTES_OF_SOME_ROWS ((size_t)8 << 20)
#define MOST_BYTES_OF_FEW_ROWS ((size_t)1 << 20)
#define FEW_ROWS 512

static size_t most_bytes(const tu_right *right, int64_t rows) {
    if (rows < FEW_ROWS && tu_process_compute_threads() == 1)
        return MOST_BYTES_OF_FEW_ROWS;
    return 2 * rows < right->columns ? MOST_BYTES_OF_SOME_ROWS : MOST_BYTES;
}

bool tu_right_pays(const tu_right *right, int64_t rows) {
    return right->columns > 0 && right->depth > 0 && tu_product_is_ours(right->dtype) &&
           tu_product_packed_bytes(right->dtype, right->columns, right->depth) <= most_bytes(right, rows);
}

tutti_status tu_right_open(tu_right *right, int64_t rows) {
    right->packed = NULL;
    right->bytes = 0;
    if (!tu_right_pays(right, rows))
        return TUTTI_OK;
    size_t bytes = tu_product_packed_bytes(right->dtype, right->columns, right->depth);
    right->packed = tu_block_alloc(tu_self(), bytes);
    if (right->packed == NULL)
        return tu_error_memory("a packed matrix", bytes);
    right->bytes = bytes;
    return TUTTI_OK;
}

void tu_right_pack(const tu_right *right) {
    if (right->packed != NULL)
        tu_product_pack(right->dtype, right->columns, right->depth, right->matrix, right->packed);
}

void tu_right_close(tu_right *right) {
    tu_block_free(tu_self(), right->packed, right->bytes);
    right->packed = NULL;
}

tutti_status tu_right_multiply(const tu_right *right, int64_t rows, tu_matrix left, void *out, int64_t out_stride) {
    if (rows == 0 || right->packed == NULL)
        return tu_gemm(right->dtype, rows, right->columns, right->depth, left, right->matrix, 0, out, out_stride, NULL);
    return tu_product_packed(right->dtype, rows, right->columns, right->depth, left, right->packed, out, out_stride);
}
