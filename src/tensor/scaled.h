/* SPDX-License-Identifier: Apache-2.0
 *
 * The product of narrow matrices with scales, for one right matrix and any number of left ones.
 */
#ifndef TU_TENSOR_SCALED_H
#define TU_TENSOR_SCALED_H

#include "tensor/gemm.h"

/* A right matrix with all that belongs to it, in f32. */
typedef struct tu_scaled {
    int64_t depth, columns;
    float *right;       /* (depth, columns) */
    float *scales;      /* one, or one per column */
    float *bias;        /* one per column; NULL: none */
    float whole;        /* the result's scale; 1 without one */
    int64_t scale_step; /* 0: one for all columns; 1: one per column */
} tu_scaled;

/* b (depth, columns), its scale (one element or one per column), bias and result_scale, which may be NULL; as
 * tt_scaled_matmul takes them, and checked. */
tutti_status tu_scaled_open(tu_scaled *scaled, const tt_tensor *b, const tt_tensor *scale_b, const tt_tensor *bias,
                            const tt_tensor *result_scale);
void tu_scaled_close(tu_scaled *scaled);

/* out (rows, columns) of `out_dtype`, dense, from left (rows, depth) of `dtype`; its scales are scale_step apart: 0 is
 * one for all rows. Accumulated in f32, rounded once. */
tutti_status tu_scaled_rows(const tu_scaled *scaled, int64_t rows, tu_matrix left, tutti_dtype dtype,
                            const float *scales, int64_t scale_step, void *out, tutti_dtype out_dtype);

/* Whether a scale is f32 and has one element or the shape (rows, columns); the message names it. */
tutti_status tu_scaled_check(const char *who, const char *what, const tt_tensor *scale, int64_t rows, int64_t columns);

#endif
