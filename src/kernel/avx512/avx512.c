/* SPDX-License-Identifier: Apache-2.0
 *
 * AVX-512 (F, BW, VL, DQ). The conversion of AVX512-BF16 flushes denormals and the arithmetic of AVX512-FP16 rounds each
 * step to f16, so neither is used.
 */
#include <immintrin.h>

#define VECTOR 64
#include "kernel/vector.h"

INLINE vector load(const char *from, size_t bytes) {
    if (bytes == 16)
        return (vector)_mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from));
    if (bytes == 32)
        return (vector)_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)from));
    return (vector)_mm512_loadu_si512(from);
}

INLINE void store(char *to, vector value, size_t bytes) {
    if (bytes == 16)
        _mm_storeu_si128((__m128i *)to, _mm512_castsi512_si128((__m512i)value));
    else if (bytes == 32)
        _mm256_storeu_si256((__m256i *)to, _mm512_castsi512_si256((__m512i)value));
    else
        _mm512_storeu_si512(to, (__m512i)value);
}

INLINE void store_stream(char *to, vector value, size_t bytes) {
    if (bytes == 16)
        _mm_stream_si128((__m128i *)to, _mm512_castsi512_si128((__m512i)value));
    else if (bytes == 32)
        _mm256_stream_si256((__m256i *)to, _mm512_castsi512_si256((__m512i)value));
    else
        _mm512_stream_si512((void *)to, (__m512i)value);
}

INLINE vector load_partial(const char *from, size_t bytes) {
    return (vector)_mm512_maskz_loadu_epi8((UINT64_C(1) << bytes) - 1, from);
}

INLINE void store_partial(char *to, vector value, size_t bytes) {
    _mm512_mask_storeu_epi8(to, (UINT64_C(1) << bytes) - 1, (__m512i)value);
}

INLINE vector_f32 widen_f16(vector packed) {
    return (vector_f32)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)packed));
}

INLINE vector narrow_f16(vector_f32 wide) {
    return (vector)_mm512_castsi256_si512(_mm512_cvtps_ph((__m512)wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

INLINE vector_u32 widen_u16(vector packed) {
    return (vector_u32)_mm512_cvtepu16_epi32(_mm512_castsi512_si256((__m512i)packed));
}

INLINE vector narrow_u32_to_u16(vector_u32 wide) {
    return (vector)_mm512_castsi256_si512(_mm512_cvtepi32_epi16((__m512i)wide));
}

INLINE vector_u32 widen_u8(vector packed) {
    return (vector_u32)_mm512_cvtepu8_epi32(_mm512_castsi512_si128((__m512i)packed));
}

INLINE vector narrow_u32_to_u8(vector_u32 wide) {
    return (vector)_mm512_castsi128_si512(_mm512_cvtepi32_epi8((__m512i)wide));
}

DEFINE_TABLE(tu_kernels_avx512, "avx512");
