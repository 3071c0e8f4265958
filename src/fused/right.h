/* SPDX-License-Identifier: Apache-2.0
 *
 * The right matrix of a fused product, which several left ones are multiplied with, each of few rows: one after the
 * other they would spend up to a tenth of their time on packing it. It is packed once where the product is our own.
 */
#ifndef TU_FUSED_RIGHT_H
#define TU_FUSED_RIGHT_H

#include "tensor/gemm.h"

typedef struct tu_right {
    tutti_dtype dtype;
    int64_t columns, depth;
    tu_matrix matrix;
    void *packed; /* NULL: every product packs it for itself */
    size_t bytes; /* of it */
} tu_right;

/* Whether it is packed once for several products of `rows` rows each: our own, and not too large for that. The fields
 * before `packed` are set. */
bool tu_right_pays(const tu_right *right, int64_t rows);
/* Reserves memory where that pays; tu_right_pack fills it, before the first product. */
tutti_status tu_right_open(tu_right *right, int64_t rows);
void tu_right_pack(const tu_right *right);
void tu_right_close(tu_right *right);

/* out = left (rows, depth) right. */
tutti_status tu_right_multiply(const tu_right *right, int64_t rows, tu_matrix left, void *out, int64_t out_stride);

#endif
