/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels on rows and products of matrices, of one instruction set: see kernels.h.
 */
#include <string.h>

#include TU_LEVEL_HEADER
#include "base/float16.h"
#include "tensor/kernel/elementary.h"
#include "tensor/kernel/fold.h"
#include "tensor/kernel/kernels.h"
#include "tensor/kernel/square.h"
#include "tensor/launch.h"

#if defined(__clang__) || !defined(__OPTIMIZE__) || defined(TUTTI_SANITIZED)
#define TU_UNROLL_TILE
#else
#define TU_UNROLL_TILE _Pragma("GCC unroll 16")
#endif

#define TU_STRETCH 64 /* of the depth, while matrices are packed */

/* Lines of `depth` neighbours, `line` apart, become columns: as many at once as TURNED says, by squares. */
static void turn_lines_f32(int64_t depth, const float *from, int64_t line, float *to, int64_t apart) {
    int64_t inner = 0;
    for (; inner + 4 <= depth; inner += 4)
        tu_turn_square(from + inner, line, to + inner * apart, apart);
    for (; inner < depth; inner++)
        for (int i = 0; i < 4; i++)
            to[inner * apart + i] = from[i * line + inner];
}

static void turn_lines_f64(int64_t depth, const double *from, int64_t line, double *to, int64_t apart) {
    for (int64_t inner = 0; inner < depth; inner++) {
        to[inner * apart] = from[inner];
        to[inner * apart + 1] = from[line + inner];
    }
}

#define TYPE float
#define SUFFIX f32
#define TURNED 4
#include "tensor/kernel/product_body.h"
#undef TURNED
#include "tensor/kernel/rows_body.h"

#include "tensor/kernel/reduce_body.h"
#undef TYPE
#undef SUFFIX
#define TYPE double
#define SUFFIX f64
#define TURNED 2
#include "tensor/kernel/product_body.h"
#undef TURNED
#include "tensor/kernel/rows_body.h"

#include "tensor/kernel/reduce_body.h"

#include "tensor/kernel/int8_body.h"

#include "tensor/kernel/random_body.h"

#include "tensor/kernel/convert_body.h"

/* ---- f64 alone ---- */

static void normals(double *first, double *second, int64_t count) {
    for (int64_t i = 0; i < count; i += TU_LANES_F64) {
        int64_t part = count - i < TU_LANES_F64 ? count - i : TU_LANES_F64;
        vec_f64 u = tu_load_part_f64(first + i, part),
                angle = tu_load_part_f64(second + i, part) * TU_K64(0x1.921fb54442d18p+2);
        vec_f64 radius = tu_sqrt_f64(TU_K64(-2.0) * tu_log_f64(TU_K64(1.0) - u));
        tu_store_part_f64(first + i, radius * tu_cos_f64(angle), part);
        tu_store_part_f64(second + i, radius * tu_sin_f64(angle), part);
    }
}

static void waves(double factor, const double *x, double *cosines, double *sines, int64_t count) {
    for (int64_t i = 0; i < count; i += TU_LANES_F64) {
        int64_t part = count - i < TU_LANES_F64 ? count - i : TU_LANES_F64;
        vec_f64 angle = tu_splat_f64(factor) * tu_load_part_f64(x + i, part);
        tu_store_part_f64(cosines + i, tu_cos_f64(angle), part);
        tu_store_part_f64(sines + i, tu_sin_f64(angle), part);
    }
}

#include "tensor/kernel/turn_body.h"

#define PAIR(name) \
    { name##_f32, name##_f64 }
#define FOLD(name, suffix) \
    { name##_row_##suffix, name##_column_##suffix, name##_start_##suffix }
#define FOLDS(suffix) \
    { FOLD(sum, suffix), FOLD(prod, suffix), FOLD(amax, suffix), FOLD(amin, suffix) }
#define SCORES(suffix) \
    { largest_##suffix, exponentials_##suffix, multiply_##suffix, slopes_##suffix, dot_##suffix, log_##suffix }

extern tu_float_kernel *const TU_JOIN(tu_pointwise_f32_, TU_LEVEL)[], *const TU_JOIN(tu_pointwise_f64_, TU_LEVEL)[];

tu_joined_kernel TU_JOIN(tu_joined_f32_, TU_LEVEL), TU_JOIN(tu_joined_f64_, TU_LEVEL);

extern const tu_tensor_kernels TU_JOIN(tu_tensor_kernels_, TU_LEVEL);
const tu_tensor_kernels TU_JOIN(tu_tensor_kernels_, TU_LEVEL) = {
    .pointwise = { TU_JOIN(tu_pointwise_f32_, TU_LEVEL), TU_JOIN(tu_pointwise_f64_, TU_LEVEL) },
    .joined = { TU_JOIN(tu_joined_f32_, TU_LEVEL), TU_JOIN(tu_joined_f64_, TU_LEVEL) },
    .folds = { FOLDS(f32), FOLDS(f64) },
    .softmax = PAIR(softmax),
    .softmax_stream = PAIR(softmax_stream),
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
    .dropout = PAIR(dropout),
    .narrow_bf16 = narrow_bf16,
    .widen_bf16 = widen_bf16,
    .narrow_f16 = narrow_f16,
    .widen_f16 = widen_f16,
    .product = PAIR(product),
    .pack = PAIR(pack),
    .pack_left = PAIR(pack_left),
    .packed_product = PAIR(packed_product),
    .int8_product = int8_product,
    .turn = turn_squares,
    .normals = normals,
    .waves = waves,
    .panel = { 2 * TU_LANES_F32, 2 * TU_LANES_F64 },
    .tile_rows = TU_TILE_ROWS,
    .scores = { SCORES(f32), SCORES(f64) },
};
