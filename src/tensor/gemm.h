/* SPDX-License-Identifier: Apache-2.0
 *
 * One matrix product, on whatever library does it best.
 */
#ifndef TU_TENSOR_GEMM_H
#define TU_TENSOR_GEMM_H

#include "tensor/tensor.h"

/* A matrix in memory: element (i, j) at data[i * row + j * column]. */
typedef struct tu_matrix {
    const void *data;
    int64_t row, column;
} tu_matrix;

/* c (m, n), rows `ldc` apart, = a (m, k) b (k, n) + beta c; beta 0 or 1. All of `dtype`. 16- and 8-bit floats
 * accumulate in f32 and round once; integers wrap. */
tutti_status tu_gemm(tutti_dtype dtype, int64_t m, int64_t n, int64_t k, tu_matrix a, tu_matrix b, double beta, void *c,
                     int64_t ldc);

/* c (m, n) of i32, dense, = a (m, k) b (k, n) of i8, exact but that i32 wraps. */
tutti_status tu_int8_gemm(int64_t m, int64_t n, int64_t k, tu_matrix a, tu_matrix b, int32_t *c);

/* The same with c of another type: f32 for bf16. False where this build or machine has no such kernel;
 * nothing was done then. */
bool tu_dnnl_gemm(tutti_dtype dtype, tutti_dtype result, int64_t m, int64_t n, int64_t k, tu_matrix a, tu_matrix b,
                  void *c, int64_t ldc);

#endif
