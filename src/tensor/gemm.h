/* SPDX-License-Identifier: Apache-2.0
 *
 * One matrix product, on whatever library does it best.
 */
#ifndef TU_TENSOR_GEMM_H
#define TU_TENSOR_GEMM_H

#include "tensor/tensor.h"
#include "tensor/thread.h"

/* A matrix in memory: element (i, j) at data[i * row + j * column]. */
typedef struct tu_matrix {
    const void *data;
    int64_t row, column;
} tu_matrix;

/* What is done with a product's elements as soon as they are final, while they are in the cache of the core that made
 * them: an epilogue. Whoever runs a product operator for its sake puts it into tu_thread.epilogue; the operator takes
 * it from there with tu_epilogue_take and hands it to the product. A product that cannot serve it part by part never
 * calls `begin`, and then its owner does that work afterwards. */
typedef struct tu_epilogue {
    void (*begin)(struct tu_epilogue *own, void *out); /* once, before the first part */
    /* Rows and columns of `out` that are final, each element once; from any of the threads that compute. */
    void (*part)(struct tu_epilogue *own, int64_t row, int64_t rows, int64_t column, int64_t columns);
} tu_epilogue;

/* The thread's epilogue, which it has no longer then; NULL: none. */
static inline tu_epilogue *tu_epilogue_take(void) {
    tu_epilogue *taken = tu_self()->epilogue;
    tu_self()->epilogue = NULL;
    return taken;
}

/* out (rows, columns), its rows `out_stride` apart, = left (rows, depth) right (depth, columns) + beta out; beta 0
 * or 1. All of `dtype`. 16- and 8-bit floats accumulate in f32 and round once; integers wrap. `epilogue` may be NULL.
 */
tutti_status tu_gemm(tutti_dtype dtype, int64_t rows, int64_t columns, int64_t depth, tu_matrix left, tu_matrix right,
                     double beta, void *out, int64_t out_stride, tu_epilogue *epilogue);

/* Whether that is a library's product with threads of its own, which belong to the calling thread. Of the others rows
 * of a product are the product of rows, bit by bit. */
bool tu_gemm_is_of_library(tutti_dtype dtype);

/* The same by our own kernels, of f32 or f64, where the level has vectors (the reference has no fma of its own); sizes
 * above 0. Elements begin with those of `start`, where that is not NULL: its rows are start_stride apart, 0 for one row
 * that all begin with, as a bias; it may be `out`. The bits are those of one order: see product.c. */
#define TU_PRODUCT_DEPTH 384
bool tu_product_is_ours(tutti_dtype dtype);
tutti_status tu_product(tutti_dtype dtype, int64_t rows, int64_t columns, int64_t depth, tu_matrix left,
                        tu_matrix right, const void *start, int64_t start_stride, void *out, int64_t out_stride,
                        tu_epilogue *epilogue);

/* A left matrix in parts of `part_rows` rows that lie apart, each where it likes: rows [first, first + rows) of all of
 * them, one part behind the other. The bits of tu_product. Sizes above 0. */
tutti_status tu_product_of_parts(tutti_dtype dtype, const tu_matrix *parts, int64_t part_rows, int64_t first,
                                 int64_t rows, int64_t columns, int64_t depth, tu_matrix right, void *out,
                                 int64_t out_stride);

/* One right matrix for several products, each of few rows, which would spend much of their time on packing it: packed
 * once, into memory of the caller's. Products with it have the bits of tu_product. Sizes above 0. */
size_t tu_product_packed_bytes(tutti_dtype dtype, int64_t columns, int64_t depth);
void tu_product_pack(tutti_dtype dtype, int64_t columns, int64_t depth, tu_matrix right, void *packed);
tutti_status tu_product_packed(tutti_dtype dtype, int64_t rows, int64_t columns, int64_t depth, tu_matrix left,
                               const void *packed, void *out, int64_t out_stride);

/* out (rows, columns) of i32, dense, = left (rows, depth) right (depth, columns) of i8, exact but that i32 wraps. */
tutti_status tu_int8_gemm(int64_t rows, int64_t columns, int64_t depth, tu_matrix left, tu_matrix right, int32_t *out);

/* The same with `out` of another type: f32 for bf16. False where this build or machine has no such kernel;
 * nothing was done then. */
bool tu_dnnl_gemm(tutti_dtype dtype, tutti_dtype result, int64_t rows, int64_t columns, int64_t depth, tu_matrix left,
                  tu_matrix right, void *out, int64_t out_stride);
/* Whether it has such a kernel, as far as that can be told beforehand. */
bool tu_dnnl_takes(tutti_dtype dtype);
/* Ends what a thread keeps for it. */
void tu_dnnl_end(tu_thread *self);

#endif
