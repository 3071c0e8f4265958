/* SPDX-License-Identifier: Apache-2.0
 *
 * The primitives of elementary.h for single numbers: a "vector" of one lane. It is what the reference kernels, compiled
 * graphs in C and GPU kernels in CUDA C use; the vector levels give the same bits in every lane.
 *
 * A compiler must not contract a * b + c by itself: -ffp-contract=off for C, -fmad=false for CUDA.
 */
#ifndef TU_TENSOR_KERNEL_SCALAR_H
#define TU_TENSOR_KERNEL_SCALAR_H

#ifdef __CUDACC__
#define TU_LANE static __device__ __forceinline__
#define TU_RARE static __device__ __noinline__
#else
#define TU_LANE static inline __attribute__((always_inline, unused))
#define TU_RARE static __attribute__((noinline, unused))
#endif

#if !defined(__CUDACC_RTC__)
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#endif

#define TU_LANES_F32 1
#define TU_LANES_F64 1

typedef float vec_f32;
typedef int32_t vec_i32;
typedef double vec_f64;
typedef int64_t vec_i64;
typedef uint32_t vec_u32;
typedef uint64_t vec_u64;

/* The bits of a number, and the number with these bits. */
TU_LANE vec_i32 tu_bits_f32(vec_f32 x) {
    vec_i32 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
TU_LANE vec_f32 tu_float_f32(vec_i32 bits) {
    vec_f32 x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
TU_LANE vec_i64 tu_bits_f64(vec_f64 x) {
    vec_i64 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
TU_LANE vec_f64 tu_float_f64(vec_i64 bits) {
    vec_f64 x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A comparison gives a mask; these work on masks. */
#define TU_SELECT(mask, yes, no) ((mask) ? (yes) : (no))
#define TU_NOT(mask) (!(mask))
TU_LANE bool tu_any_f32(int mask) {
    return mask != 0;
}
TU_LANE bool tu_any_f64(int mask) {
    return mask != 0;
}

/* bits << count without the sign's undefined behaviour */
TU_LANE vec_i32 tu_left_f32(vec_i32 bits, int count) {
    return (vec_i32)((uint32_t)bits << count);
}
TU_LANE vec_i64 tu_left_f64(vec_i64 bits, int count) {
    return (vec_i64)((uint64_t)bits << count);
}
/* bits of a positive number >> count */
TU_LANE vec_i64 tu_right_f64(vec_i64 bits, int count) {
    return bits >> count;
}

#define TU_SCALAR_PRIMITIVES(suffix, type, letter)                               \
    TU_LANE type tu_splat_##suffix(type x) {                                     \
        return x;                                                                \
    }                                                                            \
    TU_LANE type tu_load_##suffix(const type *from) {                            \
        return *from;                                                            \
    }                                                                            \
    TU_LANE void tu_store_##suffix(type *to, type x) {                           \
        *to = x;                                                                 \
    }                                                                            \
    TU_LANE type tu_load_part_##suffix(const type *from, int64_t count) {        \
        return count > 0 ? *from : 0;                                            \
    }                                                                            \
    TU_LANE void tu_store_part_##suffix(type *to, type x, int64_t count) {       \
        if (count > 0)                                                           \
            *to = x;                                                             \
    }                                                                            \
    TU_LANE type tu_first_##suffix(type x) {                                     \
        return x;                                                                \
    }                                                                            \
    TU_LANE type tu_fma_##suffix(type left, type right, type addend) {           \
        return TU_C_FUNCTION(fma, letter)(left, right, addend);                  \
    }                                                                            \
    TU_LANE type tu_sqrt_##suffix(type x) {                                      \
        return TU_C_FUNCTION(sqrt, letter)(x);                                   \
    }                                                                            \
    TU_LANE type tu_floor_##suffix(type x) {                                     \
        return TU_C_FUNCTION(floor, letter)(x);                                  \
    }                                                                            \
    TU_LANE type tu_ceil_##suffix(type x) {                                      \
        return TU_C_FUNCTION(ceil, letter)(x);                                   \
    }                                                                            \
    TU_LANE type tu_round_##suffix(type x) {                                     \
        return TU_C_FUNCTION(rint, letter)(x);                                   \
    }                                                                            \
    TU_LANE type tu_trunc_##suffix(type x) {                                     \
        return TU_C_FUNCTION(trunc, letter)(x);                                  \
    }                                                                            \
    /* The lesser and the greater: `right` where either is NaN or both equal. */ \
    TU_LANE type tu_lesser_##suffix(type left, type right) {                     \
        return left < right ? left : right;                                      \
    }                                                                            \
    TU_LANE type tu_greater_##suffix(type left, type right) {                    \
        return left > right ? left : right;                                      \
    }

/* All lanes of a register in one number, halves first: lane l with lane l + n/2, and so on. */
#define TU_SCALAR_FOLDS(suffix, type)               \
    TU_LANE type tu_fold_add_##suffix(type x) {     \
        return x;                                   \
    }                                               \
    TU_LANE type tu_fold_greater_##suffix(type x) { \
        return x;                                   \
    }                                               \
    /* The mask of the first `count` lanes. */      \
    TU_LANE int tu_below_##suffix(int64_t count) {  \
        return count > 0;                           \
    }
TU_SCALAR_FOLDS(f32, float)
TU_SCALAR_FOLDS(f64, double)
#undef TU_SCALAR_FOLDS

#ifdef __CUDACC__
#define TU_C_FUNCTION(name, letter) name##letter
#else
#define TU_C_FUNCTION(name, letter) __builtin_##name##letter
#endif
TU_SCALAR_PRIMITIVES(f32, float, f)
TU_SCALAR_PRIMITIVES(f64, double, )
#undef TU_C_FUNCTION
#undef TU_SCALAR_PRIMITIVES

/* f32 as f64 and back, by halves of a register; one lane is its own half. */
#define TU_HALVES 1
TU_LANE void tu_widen(vec_f32 x, vec_f64 *half) {
    half[0] = x;
}
TU_LANE vec_f32 tu_narrow(const vec_f64 *half) {
    return (vec_f32)half[0];
}

#define TU_SCALE_BY_PARTS 1

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
    return (uint64_t)(uint32_t)x * factor;
}

/* In each 32-bit lane the sum of the products of its 16-bit halves: exact for halves that were i8. */
TU_LANE vec_i32 tu_dot_halves(vec_i32 left, vec_i32 right) {
    return (int16_t)left * (int16_t)right + (left >> 16) * (right >> 16);
}

/* Rows of a tile of a matrix product: as many as the registers hold, two each. */
#define TU_TILE_ROWS 4

#endif
