/* SPDX-License-Identifier: Apache-2.0
 *
 * AVX2 with F16C.
 */
#include <immintrin.h>

#define VECTOR 32
#include "kernel/vector.h"

INLINE vector load(const char *from, size_t bytes) {
    if (bytes == 8)
        return (vector)_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)from));
    if (bytes == 16)
        return (vector)_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)from));
    return (vector)_mm256_loadu_si256((const __m256i *)from);
}

INLINE void store(char *to, vector value, size_t bytes) {
    if (bytes == 8)
        _mm_storel_epi64((__m128i *)to, _mm256_castsi256_si128((__m256i)value));
    else if (bytes == 16)
        _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128((__m256i)value));
    else
        _mm256_storeu_si256((__m256i *)to, (__m256i)value);
}

INLINE void store_stream(char *to, vector value, size_t bytes) {
    if (bytes == 8)
        _mm_stream_si64((long long *)to, _mm_cvtsi128_si64(_mm256_castsi256_si128((__m256i)value)));
    else if (bytes == 16)
        _mm_stream_si128((__m128i *)to, _mm256_castsi256_si128((__m256i)value));
    else
        _mm256_stream_si256((__m256i *)to, (__m256i)value);
}

INLINE vector load_partial(const char *from, size_t bytes) {
    return load_partial_by_parts(from, bytes);
}

INLINE void store_partial(char *to, vector value, size_t bytes) {
    store_partial_by_parts(to, value, bytes);
}

INLINE vector_f32 widen_f16(vector packed) {
    return (vector_f32)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)packed));
}

INLINE vector narrow_f16(vector_f32 wide) {
    return (vector)_mm256_castsi128_si256(_mm256_cvtps_ph((__m256)wide, _MM_FROUND_TO_NEAREST_INT));
}

INLINE vector_u32 widen_u16(vector packed) {
    return (vector_u32)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)packed));
}

INLINE vector narrow_u32_to_u16(vector_u32 wide) {
    __m256i value = (__m256i)wide;
    return (vector)_mm256_permute4x64_epi64(_mm256_packus_epi32(value, value), 0x08); /* front halves of both lanes */
}

INLINE vector_u32 widen_u8(vector packed) {
    return (vector_u32)_mm256_cvtepu8_epi32(_mm256_castsi256_si128((__m256i)packed));
}

INLINE vector narrow_u32_to_u8(vector_u32 wide) {
    __m256i pairs = (__m256i)narrow_u32_to_u16(wide);
    return (vector)_mm256_packus_epi16(pairs, pairs);
}

DEFINE_TABLE(tu_kernels_avx2, "avx2");
