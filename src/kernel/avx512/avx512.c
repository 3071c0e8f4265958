/* SPDX-License-Identifier: Apache-2.0
 *
 * AVX-512 (F, BW, VL, DQ). The conversion of AVX512-BF16 flushes denormals and the arithmetic of AVX512-FP16 rounds
 * each step to f16, so neither is used.
 */
#include <immintrin.h>

#define VECTOR 64
#include "kernel/vector.h"

INLINE vector load(const char *from) {
    return (vector)_mm512_loadu_si512(from);
}

INLINE void store(char *to, vector value) {
    _mm512_storeu_si512(to, (__m512i)value);
}

INLINE void store_stream(char *to, vector value) {
    _mm512_stream_si512((void *)to, (__m512i)value);
}

INLINE vector load_partial(const char *from, size_t bytes) {
    return (vector)_mm512_maskz_loadu_epi8((UINT64_C(1) << bytes) - 1, from);
}

INLINE void store_partial(char *to, vector value, size_t bytes) {
    _mm512_mask_storeu_epi8(to, (UINT64_C(1) << bytes) - 1, (__m512i)value);
}

INLINE void widen_f16(const char *from, vector *wide) {
    wide[0] = (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
    wide[1] = (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from + 1));
}

INLINE vector narrow_f16(const vector *wide) {
    __m256i low = _mm512_cvtps_ph((__m512)wide[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i high = _mm512_cvtps_ph((__m512)wide[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (vector)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* VRANGE orders zeros but drops a NaN when the other side is a number; the sum brings it back. */
INLINE vector_f32 extreme_f32(vector_f32 a, vector_f32 b, bool largest) {
    __m512 x = (__m512)a, y = (__m512)b;
    __m512 result = largest ? _mm512_range_ps(x, y, 0x05) : _mm512_range_ps(x, y, 0x04);
    return (vector_f32)_mm512_mask_add_ps(result, _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q), x, y);
}

INLINE vector_f64 extreme_f64(vector_f64 a, vector_f64 b, bool largest) {
    __m512d x = (__m512d)a, y = (__m512d)b;
    __m512d result = largest ? _mm512_range_pd(x, y, 0x05) : _mm512_range_pd(x, y, 0x04);
    return (vector_f64)_mm512_mask_add_pd(result, _mm512_cmp_pd_mask(x, y, _CMP_UNORD_Q), x, y);
}

DEFINE_TABLE(tu_kernels_avx512, "avx512");
