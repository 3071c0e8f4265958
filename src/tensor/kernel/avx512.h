/* SPDX-License-Identifier: Apache-2.0
 *
 * AVX-512 (F, BW, VL, DQ): what vector.h leaves to the instruction set.
 */
#ifndef TU_TENSOR_KERNEL_AVX512_H
#define TU_TENSOR_KERNEL_AVX512_H

#include <immintrin.h>

#define VECTOR 64
#include "tensor/kernel/vector.h"

TU_LANE bool tu_any_f32(vec_i32 mask) {
    return _mm512_movepi32_mask((__m512i)mask) != 0;
}
TU_LANE bool tu_any_f64(vec_i64 mask) {
    return _mm512_movepi64_mask((__m512i)mask) != 0;
}

/* The first `count` lanes, 0 to all; the others are zero, or left alone in memory. */
TU_LANE vec_f32 tu_load_part_f32(const float *from, int64_t count) {
    return (vec_f32)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}
TU_LANE void tu_store_part_f32(float *to, vec_f32 x, int64_t count) {
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)x);
}
TU_LANE vec_f64 tu_load_part_f64(const double *from, int64_t count) {
    return (vec_f64)_mm512_maskz_loadu_pd((__mmask8)((1u << count) - 1), from);
}
TU_LANE void tu_store_part_f64(double *to, vec_f64 x, int64_t count) {
    _mm512_mask_storeu_pd(to, (__mmask8)((1u << count) - 1), (__m512d)x);
}

#define TU_AVX512_FUNCTIONS(suffix, type, letters)                                                     \
    TU_LANE vec_##suffix tu_fma_##suffix(vec_##suffix left, vec_##suffix right, vec_##suffix addend) { \
        return (vec_##suffix)_mm512_fmadd_##letters((type)left, (type)right, (type)addend);            \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_sqrt_##suffix(vec_##suffix x) {                                            \
        return (vec_##suffix)_mm512_sqrt_##letters((type)x);                                           \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_floor_##suffix(vec_##suffix x) {                                           \
        return (vec_##suffix)_mm512_roundscale_##letters((type)x, _MM_FROUND_TO_NEG_INF);              \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_ceil_##suffix(vec_##suffix x) {                                            \
        return (vec_##suffix)_mm512_roundscale_##letters((type)x, _MM_FROUND_TO_POS_INF);              \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_round_##suffix(vec_##suffix x) {                                           \
        return (vec_##suffix)_mm512_roundscale_##letters((type)x, _MM_FROUND_TO_NEAREST_INT);          \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_trunc_##suffix(vec_##suffix x) {                                           \
        return (vec_##suffix)_mm512_roundscale_##letters((type)x, _MM_FROUND_TO_ZERO);                 \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_lesser_##suffix(vec_##suffix left, vec_##suffix right) {                   \
        return (vec_##suffix)_mm512_min_##letters((type)left, (type)right);                            \
    }                                                                                                  \
    TU_LANE vec_##suffix tu_greater_##suffix(vec_##suffix left, vec_##suffix right) {                  \
        return (vec_##suffix)_mm512_max_##letters((type)left, (type)right);                            \
    }                                                                                                  \
    /* x * 2^n, rounded once: what other levels do in two steps */                                     \
    TU_LANE vec_##suffix tu_scale_##suffix(vec_##suffix x, vec_##suffix n) {                           \
        return (vec_##suffix)_mm512_scalef_##letters((type)x, (type)n);                                \
    }
TU_AVX512_FUNCTIONS(f32, __m512, ps)
TU_AVX512_FUNCTIONS(f64, __m512d, pd)
#undef TU_AVX512_FUNCTIONS

TU_LANE void tu_widen(vec_f32 x, vec_f64 *half) {
    half[0] = (vec_f64)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
    half[1] = (vec_f64)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
}
TU_LANE vec_f32 tu_narrow(const vec_f64 *half) {
    return (vec_f32)_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)half[0])),
                                       _mm512_cvtpd_ps((__m512d)half[1]), 1);
}

/* All lanes of a register in one number, halves first: lane l with lane l + n/2, and so on. */
TU_LANE float tu_fold_add_f32(vec_f32 x) {
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
TU_LANE float tu_fold_greater_f32(vec_f32 x) {
    __m256 half = _mm256_max_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
    __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
TU_LANE double tu_fold_add_f64(vec_f64 x) {
    __m256d half = _mm256_add_pd(_mm512_castpd512_pd256((__m512d)x), _mm512_extractf64x4_pd((__m512d)x, 1));
    __m128d quarter = _mm_add_pd(_mm256_castpd256_pd128(half), _mm256_extractf128_pd(half, 1));
    return _mm_cvtsd_f64(_mm_add_sd(quarter, _mm_unpackhi_pd(quarter, quarter)));
}
TU_LANE double tu_fold_greater_f64(vec_f64 x) {
    __m256d half = _mm256_max_pd(_mm512_castpd512_pd256((__m512d)x), _mm512_extractf64x4_pd((__m512d)x, 1));
    __m128d quarter = _mm_max_pd(_mm256_castpd256_pd128(half), _mm256_extractf128_pd(half, 1));
    return _mm_cvtsd_f64(_mm_max_sd(quarter, _mm_unpackhi_pd(quarter, quarter)));
}

/* A register of f32 to and from as many f16 in memory: to nearest even, a NaN stays one. */
TU_LANE void tu_narrow_f16(const float *from, uint16_t *to) {
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
TU_LANE void tu_widen_f16(const uint16_t *from, float *to) {
    _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from)));
}

/* A store past the caches, to an aligned place; TU_STREAM_END comes before others may read what was stored. */
TU_LANE void tu_stream_f32(float *to, vec_f32 x) {
    _mm512_stream_ps(to, (__m512)x);
}
TU_LANE void tu_stream_f64(double *to, vec_f64 x) {
    _mm512_stream_pd(to, (__m512d)x);
}
#define TU_STREAM_END() _mm_sfence()

/* The product of the low halves of 64-bit lanes with a number. */
TU_LANE vec_u64 tu_wide_product(vec_u64 x, uint32_t factor) {
    return (vec_u64)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
}

/* In each 32-bit lane the sum of the products of its 16-bit halves: exact for halves that were i8. */
TU_LANE vec_i32 tu_dot_halves(vec_i32 left, vec_i32 right) {
    return (vec_i32)_mm512_madd_epi16((__m512i)left, (__m512i)right);
}

/* Rows of a tile of a matrix product: as many as the registers hold, two each. */
#define TU_TILE_ROWS 12

#endif
