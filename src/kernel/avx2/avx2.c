/* SPDX-License-Identifier: Apache-2.0
 *
 * AVX2 with F16C.
 */
#include <immintrin.h>

#define VECTOR 32
#include "kernel/vector.h"

INLINE vector load(const char *from) {
    return (vector)_mm256_loadu_si256((const __m256i *)from);
}

INLINE void store(char *to, vector value) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)value);
}

INLINE void store_stream(char *to, vector value) {
    _mm256_stream_si256((__m256i *)to, (__m256i)value);
}

/* Whole words by mask; what is left of the last word, one to three bytes, by hand. */
INLINE vector load_partial(const char *from, size_t bytes) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), words = _mm256_set1_epi32((int)(bytes / 4));
    __m256i value = _mm256_maskload_epi32((const int *)from, _mm256_cmpgt_epi32(words, index));
    if (bytes % 4 != 0) {
        uint32_t last = 0;
        from += bytes & ~(size_t)3;
        if (bytes & 2)
            __builtin_memcpy(&last, from, 2);
        if (bytes & 1)
            last |= (uint32_t)(uint8_t)from[bytes & 2] << (bytes & 2) * 8;
        value =
            _mm256_or_si256(value, _mm256_and_si256(_mm256_cmpeq_epi32(words, index), _mm256_set1_epi32((int)last)));
    }
    return (vector)value;
}

INLINE void store_partial(char *to, vector value, size_t bytes) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), words = _mm256_set1_epi32((int)(bytes / 4));
    _mm256_maskstore_epi32((int *)to, _mm256_cmpgt_epi32(words, index), (__m256i)value);
    if (bytes % 4 != 0) {
        __m256i moved = _mm256_permutevar8x32_epi32((__m256i)value, words);
        uint32_t last = (uint32_t)_mm_cvtsi128_si32(_mm256_castsi256_si128(moved));
        to += bytes & ~(size_t)3;
        if (bytes & 2)
            __builtin_memcpy(to, &last, 2);
        if (bytes & 1)
            to[bytes & 2] = (char)(last >> (bytes & 2) * 8);
    }
}

INLINE void widen_f16(const char *from, vector *wide) {
    wide[0] = (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    wide[1] = (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + 1));
}

INLINE vector narrow_f16(const vector *wide) {
    __m128i low = _mm256_cvtps_ph((__m256)wide[0], _MM_FROUND_TO_NEAREST_INT);
    __m128i high = _mm256_cvtps_ph((__m256)wide[1], _MM_FROUND_TO_NEAREST_INT);
    return (vector)_mm256_set_m128i(high, low);
}

/* MINPS and MAXPS return the second operand for equal zeros and for NaN. Done both ways round, the two results differ
 * only then: "and" of the bits takes +0, "or" takes -0; a NaN is set explicitly. */
INLINE vector_f32 extreme_f32(vector_f32 a, vector_f32 b, bool largest) {
    __m256 x = (__m256)a, y = (__m256)b, quiet = (__m256)_mm256_set1_epi32((int)0xffc00000);
    __m256 result = largest ? _mm256_and_ps(_mm256_max_ps(x, y), _mm256_max_ps(y, x))
                            : _mm256_or_ps(_mm256_min_ps(x, y), _mm256_min_ps(y, x));
    return (vector_f32)_mm256_or_ps(result, _mm256_and_ps(_mm256_cmp_ps(x, y, _CMP_UNORD_Q), quiet));
}

INLINE vector_f64 extreme_f64(vector_f64 a, vector_f64 b, bool largest) {
    __m256d x = (__m256d)a, y = (__m256d)b;
    __m256d result = largest ? _mm256_and_pd(_mm256_max_pd(x, y), _mm256_max_pd(y, x))
                             : _mm256_or_pd(_mm256_min_pd(x, y), _mm256_min_pd(y, x));
    return (vector_f64)_mm256_or_pd(result, _mm256_cmp_pd(x, y, _CMP_UNORD_Q));
}

DEFINE_TABLE(tu_kernels_avx2, "avx2");
