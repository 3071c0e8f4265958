/* SPDX-License-Identifier: Apache-2.0
 *
 * NEON of arm64: what vector.h leaves to the instruction set.
 */
#ifndef TU_TENSOR_KERNEL_NEON_H
#define TU_TENSOR_KERNEL_NEON_H

#include <arm_neon.h>

#define VECTOR 16
#include "tensor/kernel/vector.h"

TU_LANE bool tu_any_f32(vec_i32 mask) {
    return vmaxvq_u32((uint32x4_t)mask) != 0;
}
TU_LANE bool tu_any_f64(vec_i64 mask) {
    return vmaxvq_u32((uint32x4_t)mask) != 0;
}

/* The first `count` lanes, 0 to all; the others are zero, or left alone in memory. */
#define TU_NEON_PARTS(suffix, type)                                                \
    TU_LANE vec_##suffix tu_load_part_##suffix(const type *from, int64_t count) {  \
        vec_##suffix x = { 0 };                                                    \
        memcpy(&x, from, (size_t)count * sizeof *from);                            \
        return x;                                                                  \
    }                                                                              \
    TU_LANE void tu_store_part_##suffix(type *to, vec_##suffix x, int64_t count) { \
        memcpy(to, &x, (size_t)count * sizeof *to);                                \
    }
TU_NEON_PARTS(f32, float)
TU_NEON_PARTS(f64, double)
#undef TU_NEON_PARTS

#define TU_NEON_FUNCTIONS(suffix, type)                                                                \
    TU_LANE vec_##suffix tu_fma_##suffix(vec_##suffix left, vec_##suffix right, vec_##suffix addend) { \
        return (vec_##suffix)vfmaq_##suffix((type)addend, (type)left, (type)right);                    \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_sqrt_##suffix(vec_##suffix x) {                                            \
        return (vec_##suffix)vsqrtq_##suffix((type)x);                                                 \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_floor_##suffix(vec_##suffix x) {                                           \
        return (vec_##suffix)vrndmq_##suffix((type)x);                                                 \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_ceil_##suffix(vec_##suffix x) {                                            \
        return (vec_##suffix)vrndpq_##suffix((type)x);                                                 \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_round_##suffix(vec_##suffix x) {                                           \
        return (vec_##suffix)vrndnq_##suffix((type)x);                                                 \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_trunc_##suffix(vec_##suffix x) {                                           \
        return (vec_##suffix)vrndq_##suffix((type)x);                                                  \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_lesser_##suffix(vec_##suffix left, vec_##suffix right) {                   \
        return TU_SELECT(left < right, left, right);                                                   \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_greater_##suffix(vec_##suffix left, vec_##suffix right) {                  \
        return TU_SELECT(left > right, left, right);                                                   \
    }
TU_NEON_FUNCTIONS(f32, float32x4_t)
TU_NEON_FUNCTIONS(f64, float64x2_t)
#undef TU_NEON_FUNCTIONS

TU_LANE void tu_widen(vec_f32 x, vec_f64 *half) {
    half[0] = (vec_f64)vcvt_f64_f32(vget_low_f32((float32x4_t)x));
    half[1] = (vec_f64)vcvt_high_f64_f32((float32x4_t)x);
}
TU_LANE vec_f32 tu_narrow(const vec_f64 *half) {
    return (vec_f32)vcvt_high_f32_f64(vcvt_f32_f64((float64x2_t)half[0]), (float64x2_t)half[1]);
}

/* All lanes of a register in one number, halves first: lane l with lane l + n/2, and so on. */
TU_LANE float tu_fold_add_f32(vec_f32 x) {
    return (x[0] + x[2]) + (x[1] + x[3]);
}
TU_LANE float tu_fold_greater_f32(vec_f32 x) {
    float even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
    return even > odd ? even : odd;
}
TU_LANE double tu_fold_add_f64(vec_f64 x) {
    return x[0] + x[1];
}
TU_LANE double tu_fold_greater_f64(vec_f64 x) {
    return x[0] > x[1] ? x[0] : x[1];
}

#define TU_SCALE_BY_PARTS 1

/* A register of f32 to and from as many f16 in memory: to nearest even, a NaN stays one. */
TU_LANE void tu_narrow_f16(const float *from, uint16_t *to) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from))));
}
TU_LANE void tu_widen_f16(const uint16_t *from, float *to) {
    vst1q_f32(to, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))));
}

/* A store past the caches where the level has one. */
TU_LANE void tu_stream_f32(float *to, vec_f32 x) {
    tu_store_f32(to, x);
}
TU_LANE void tu_stream_f64(double *to, vec_f64 x) {
    tu_store_f64(to, x);
}
#define TU_STREAM_END() ((void)0)

/* The product of the low halves of 64-bit lanes with a number. */
TU_LANE vec_u64 tu_wide_product(vec_u64 x, uint32_t factor) {
    return (vec_u64)vmull_u32(vmovn_u64((uint64x2_t)x), vdup_n_u32(factor));
}

/* In each 32-bit lane the sum of the products of its 16-bit halves: exact for halves that were i8. */
TU_LANE vec_i32 tu_dot_halves(vec_i32 left, vec_i32 right) {
    int16x8_t x = (int16x8_t)left, y = (int16x8_t)right;
    return (vec_i32)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}

/* Rows of a tile of a matrix product: as many as the registers hold, two each. */
#define TU_TILE_ROWS 8

#endif
