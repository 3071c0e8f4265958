/* SPDX-License-Identifier: Apache-2.0
 *
 * AVX2 with FMA: what vector.h leaves to the instruction set.
 */
#ifndef TU_TENSOR_KERNEL_AVX2_H
#define TU_TENSOR_KERNEL_AVX2_H

#include <immintrin.h>

#define VECTOR 32
#include "tensor/kernel/vector.h"

TU_LANE bool tu_any_f32(vec_i32 mask) {
    return _mm256_movemask_ps((__m256)mask) != 0;
}
TU_LANE bool tu_any_f64(vec_i64 mask) {
    return _mm256_movemask_pd((__m256d)mask) != 0;
}

/* The first `count` lanes, 0 to all; the others are zero, or left alone in memory. */
TU_LANE __m256i tu_part_f32(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TU_LANE __m256i tu_part_f64(int64_t count) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
}
TU_LANE vec_f32 tu_load_part_f32(const float *from, int64_t count) {
    return (vec_f32)_mm256_maskload_ps(from, tu_part_f32(count));
}
TU_LANE void tu_store_part_f32(float *to, vec_f32 x, int64_t count) {
    _mm256_maskstore_ps(to, tu_part_f32(count), (__m256)x);
}
TU_LANE vec_f64 tu_load_part_f64(const double *from, int64_t count) {
    return (vec_f64)_mm256_maskload_pd(from, tu_part_f64(count));
}
TU_LANE void tu_store_part_f64(double *to, vec_f64 x, int64_t count) {
    _mm256_maskstore_pd(to, tu_part_f64(count), (__m256d)x);
}

#define TU_AVX2_FUNCTIONS(suffix, type, letters)                                                       \
    TU_LANE vec_##suffix tu_fma_##suffix(vec_##suffix left, vec_##suffix right, vec_##suffix addend) { \
        return (vec_##suffix)_mm256_fmadd_##letters((type)left, (type)right, (type)addend);            \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_sqrt_##suffix(vec_##suffix x) {                                            \
        return (vec_##suffix)_mm256_sqrt_##letters((type)x);                                           \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_floor_##suffix(vec_##suffix x) {                                           \
        return (vec_##suffix)_mm256_floor_##letters((type)x);                                          \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_ceil_##suffix(vec_##suffix x) {                                            \
        return (vec_##suffix)_mm256_ceil_##letters((type)x);                                           \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_round_##suffix(vec_##suffix x) {                                           \
        return (vec_##suffix)_mm256_round_##letters((type)x, _MM_FROUND_TO_NEAREST_INT);               \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_trunc_##suffix(vec_##suffix x) {                                           \
        return (vec_##suffix)_mm256_round_##letters((type)x, _MM_FROUND_TO_ZERO);                      \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_lesser_##suffix(vec_##suffix left, vec_##suffix right) {                   \
        return (vec_##suffix)_mm256_min_##letters((type)left, (type)right);                            \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_greater_##suffix(vec_##suffix left, vec_##suffix right) {                  \
        return (vec_##suffix)_mm256_max_##letters((type)left, (type)right);                            \
    }
TU_AVX2_FUNCTIONS(f32, __m256, ps)
TU_AVX2_FUNCTIONS(f64, __m256d, pd)
#undef TU_AVX2_FUNCTIONS

TU_LANE void tu_widen(vec_f32 x, vec_f64 *half) {
    half[0] = (vec_f64)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
    half[1] = (vec_f64)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
}
TU_LANE vec_f32 tu_narrow(const vec_f64 *half) {
    return (vec_f32)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)half[1]), _mm256_cvtpd_ps((__m256d)half[0]));
}

/* All lanes of a register in one number, halves first: lane l with lane l + n/2, and so on. */
TU_LANE float tu_fold_add_f32(vec_f32 x) {
    __m256 whole = (__m256)x;
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(whole), _mm256_extractf128_ps(whole, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
TU_LANE float tu_fold_greater_f32(vec_f32 x) {
    __m256 whole = (__m256)x;
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(whole), _mm256_extractf128_ps(whole, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
TU_LANE double tu_fold_add_f64(vec_f64 x) {
    __m256d whole = (__m256d)x;
    __m128d half = _mm_add_pd(_mm256_castpd256_pd128(whole), _mm256_extractf128_pd(whole, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}
TU_LANE double tu_fold_greater_f64(vec_f64 x) {
    __m256d whole = (__m256d)x;
    __m128d half = _mm_max_pd(_mm256_castpd256_pd128(whole), _mm256_extractf128_pd(whole, 1));
    return _mm_cvtsd_f64(_mm_max_sd(half, _mm_unpackhi_pd(half, half)));
}

#define TU_SCALE_BY_PARTS 1

/* A register of f32 to and from as many f16 in memory: to nearest even, a NaN stays one. */
TU_LANE void tu_narrow_f16(const float *from, uint16_t *to) {
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
TU_LANE void tu_widen_f16(const uint16_t *from, float *to) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from)));
}

/* A store past the caches, to an aligned place; TU_STREAM_END comes before others may read what was stored. */
TU_LANE void tu_stream_f32(float *to, vec_f32 x) {
    _mm256_stream_ps(to, (__m256)x);
}
TU_LANE void tu_stream_f64(double *to, vec_f64 x) {
    _mm256_stream_pd(to, (__m256d)x);
}
#define TU_STREAM_END() _mm_sfence()

/* The product of the low halves of 64-bit lanes with a number. */
TU_LANE vec_u64 tu_wide_product(vec_u64 x, uint32_t factor) {
    return (vec_u64)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
}

/* In each 32-bit lane the sum of the products of its 16-bit halves: exact for halves that were i8. */
TU_LANE vec_i32 tu_dot_halves(vec_i32 left, vec_i32 right) {
    return (vec_i32)_mm256_madd_epi16((__m256i)left, (__m256i)right);
}

/* Rows of a tile of a matrix product: as many as the registers hold, two each. */
#define TU_TILE_ROWS 6

#endif
