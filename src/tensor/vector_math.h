/* SPDX-License-Identifier: Apache-2.0
 *
 * Elementary functions in f32, written so that a compiler can run them in vector registers: no branches, no calls.
 * Errors are within about two units in the last place. The polynomials were fitted for these intervals.
 */
#ifndef TU_TENSOR_VECTOR_MATH_H
#define TU_TENSOR_VECTOR_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* A function compiled for several instruction sets; the loader picks one. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(TUTTI_SANITIZED) && !defined(__clang__)
#define TU_CLONES __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define TU_CLONES
#endif

#define TU_INLINE static inline __attribute__((always_inline))

TU_INLINE float tu_bits_float(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

TU_INLINE int32_t tu_float_bits(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* 2^n for n in [-126, 127]; anything else gives some number. */
TU_INLINE float tu_power_of_two(int32_t n) {
    return tu_bits_float((int32_t)(((uint32_t)n + 127u) << 23));
}

/* e^x = 2^n e^r with |r| <= ln 2 / 2. Two factors of 2 reach the denormals. */
TU_INLINE float tu_expf(float x) {
    float clamped = x > 88.8f ? 88.8f : x;
    clamped = clamped < -104.0f ? -104.0f : clamped;
    float shifted = clamped * 1.44269504088896f + 12582912.0f; /* rounds to an integer in the low bits */
    int32_t n = tu_float_bits(shifted) - 0x4b400000;
    float whole = shifted - 12582912.0f;
    float r = clamped - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    float p = 0.0013836842f;
    p = p * r + 0.0083748158f;
    p = p * r + 0.0416682256f;
    p = p * r + 0.1666642017f;
    p = p * r + 0.4999999208f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t half = n >> 1;
    float result = p * tu_power_of_two(half) * tu_power_of_two(n - half);
    return x != x ? x : result;
}

TU_INLINE float tu_tanhf(float x) {
    float magnitude = fabsf(x), u = x * x;
    float p = -0.0056724217f;
    p = p * u + 0.0206031471f;
    p = p * u - 0.0537252316f;
    p = p * u + 0.1333118577f;
    p = p * u - 0.3333326338f;
    p = p * u + 1.0f;
    float far = 1.0f - 2.0f / (tu_expf(2.0f * magnitude) + 1.0f);
    return magnitude < 0.625f ? x * p : copysignf(far, x);
}

TU_INLINE float tu_sigmoidf(float x) {
    float e = tu_expf(-fabsf(x));
    float low = e / (1.0f + e), high = 1.0f / (1.0f + e);
    return x >= 0.0f ? high : x != x ? x : low;
}

/* The upper tail of the normal distribution's complement: erfc(z) for z >= 0. */
TU_INLINE float tu_erfcf_positive(float z) {
    float t = 1.0f / (1.0f + 0.5f * z);
    float p = -0.10253280659957437f;
    p = p * t + 0.7421617464915942f;
    p = p * t - 2.2016293573602628f;
    p = p * t + 3.380372184382185f;
    p = p * t - 2.7579105188992816f;
    p = p * t + 1.1825198780379322f;
    p = p * t - 0.5147114418108132f;
    p = p * t + 0.17308614723939295f;
    p = p * t + 0.3633322265208323f;
    p = p * t + 1.0008504621013343f;
    p = p * t - 1.265538504855969f;
    return t * tu_expf(p - z * z);
}

/* Phi(x), the share of a normal distribution below x. */
TU_INLINE float tu_normal_cdff(float x) {
    float tail = 0.5f * tu_erfcf_positive(fabsf(x) * 0.70710678118654752f);
    return x >= 0.0f ? 1.0f - tail : tail;
}

/* sin and cos of |x| < 8192: x = n pi/2 + r. `quarter` 0 gives sin, 1 gives cos. */
TU_INLINE float tu_sincosf(float x, int32_t quarter) {
    float shifted = x * 0.636619772367581f + 12582912.0f;
    int32_t n = tu_float_bits(shifted) + quarter;
    float whole = shifted - 12582912.0f;
    float r = x - whole * 1.5703125f;
    r = r - whole * 4.8351287841796875e-4f;
    r = r - whole * 3.13855707645416259765625e-7f;
    r = r - whole * 6.077100628276710e-11f;
    float u = r * r;
    float s = 2.7173532796e-6f;
    s = s * u - 0.000198392031492f;
    s = s * u + 0.008333328786071f;
    s = s * u - 0.166666666316358f;
    s = r + r * u * s;
    float c = 2.43799293562e-5f;
    c = c * u - 0.0013886619209974f;
    c = c * u + 0.0416666167391951f;
    c = c * u - 0.4999999961543328f;
    c = c * u + 1.0f;
    float value = n & 1 ? c : s;
    return n & 2 ? -value : value;
}

/* log x for normal positive x; the caller sends the others elsewhere. */
TU_INLINE float tu_logf_normal(float x) {
    int32_t bits = tu_float_bits(x) - 0x3f3504f3; /* so that the mantissa lies in [sqrt 1/2, sqrt 2) */
    int32_t exponent = bits >> 23;
    float m = tu_bits_float((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    float p = -0.0783071634f;
    p = p * m + 0.1301909962f;
    p = p * m - 0.1321227881f;
    p = p * m + 0.1416073102f;
    p = p * m - 0.1661034129f;
    p = p * m + 0.2000320609f;
    p = p * m - 0.2500157098f;
    p = p * m + 0.3333330241f;
    p = p * m - 0.4999998832f;
    float n = (float)exponent;
    return m + (m * m * p + n * -2.12194440e-4f) + n * 0.693359375f;
}

#endif
