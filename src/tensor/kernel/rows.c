/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels on rows and products of matrices, of one instruction set: see kernels.h.
 */
#include <string.h>

#include TU_LEVEL_HEADER
#include "tensor/kernel/elementary.h"
#include "tensor/kernel/fold.h"
#include "tensor/kernel/kernels.h"

#if defined(__clang__) || !defined(__OPTIMIZE__) || defined(TUTTI_SANITIZED)
#define TU_UNROLL_TILE
#else
#define TU_UNROLL_TILE _Pragma("GCC unroll 16")
#endif

#define T float
#define SUFFIX f32
#include "tensor/kernel/product_body.h"
#include "tensor/kernel/rows_body.h"
#undef T
#undef SUFFIX
#define T double
#define SUFFIX f64
#include "tensor/kernel/product_body.h"
#include "tensor/kernel/rows_body.h"

#include "tensor/kernel/int8_body.h"

#define PAIR(name) \
    { name##_f32, name##_f64 }
#define SCORES(suffix) \
    { largest_##suffix, exponentials_##suffix, multiply_##suffix, slopes_##suffix, dot_##suffix, log_##suffix }

extern const tu_tensor_kernels TU_JOIN(tu_tensor_kernels_, TU_LEVEL);
const tu_tensor_kernels TU_JOIN(tu_tensor_kernels_, TU_LEVEL) = {
    .softmax = PAIR(softmax),
    .log_softmax = PAIR(log_softmax),
    .softmax_backward = PAIR(softmax_backward),
    .log_softmax_backward = PAIR(log_softmax_backward),
    .norm = PAIR(norm),
    .norm_backward = PAIR(norm_backward),
    .norm_columns = PAIR(norm_columns),
    .entropy = PAIR(entropy),
    .entropy_backward = PAIR(entropy_backward),
    .sgd = PAIR(sgd),
    .adamw = PAIR(adamw),
    .product = PAIR(product),
    .pack = PAIR(pack),
    .int8_product = int8_product,
    .panel = { 2 * TU_LANES_F32, 2 * TU_LANES_F64 },
    .scores = { SCORES(f32), SCORES(f64) },
};
