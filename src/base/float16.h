/* SPDX-License-Identifier: Apache-2.0
 *
 * Conversions between f32 and the 16-bit and 8-bit floats, one element at a time.
 *
 * To a narrower type they round to nearest, ties to even, and keep denormals. They work on bits with integers, so that
 * no setting of the floating-point unit changes them. A NaN stays a NaN. What is too large becomes infinity; e4m3fn
 * has none, so there it becomes the largest number, 448 (as in PyTorch 2.13).
 */
#ifndef TU_BASE_FLOAT16_H
#define TU_BASE_FLOAT16_H

#include <stdint.h>
#include <string.h>

/* The GPU kernels use the same conversions. */
#ifdef __CUDACC__
#define TU_PORTABLE static inline __host__ __device__
#else
#define TU_PORTABLE static inline
#endif

TU_PORTABLE uint32_t tu_f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

TU_PORTABLE float tu_f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

TU_PORTABLE float tu_bf16_to_f32(uint16_t bits) {
    return tu_f32_from_bits((uint32_t)bits << 16);
}

TU_PORTABLE uint16_t tu_f32_to_bf16(float value) {
    uint32_t bits = tu_f32_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40); /* quiet, so that dropping low bits cannot leave infinity */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Widens a small float with `exponent_bits` and `mantissa_bits`, given without its sign. The pattern of infinity, where
 * there is one, has all exponent bits set and is handled by the caller. */
TU_PORTABLE uint32_t tu_small_to_f32_bits(uint32_t magnitude, int exponent_bits, int mantissa_bits) {
    int bias = (1 << (exponent_bits - 1)) - 1;
    uint32_t exponent = magnitude >> mantissa_bits;
    uint32_t mantissa = magnitude & ((1u << mantissa_bits) - 1);
    if (exponent == 0) {
        if (mantissa == 0)
            return 0;
        int shift = 0; /* brings the leading one to the implicit place */
        while ((mantissa << shift >> mantissa_bits) == 0)
            shift++;
        mantissa = mantissa << shift & ((1u << mantissa_bits) - 1);
        return (uint32_t)(127 - bias + 1 - shift) << 23 | mantissa << (23 - mantissa_bits);
    }
    return (exponent + (uint32_t)(127 - bias)) << 23 | mantissa << (23 - mantissa_bits);
}

/* Rounds the magnitude bits of a finite f32 to a small float. The result may exceed the largest finite pattern; the
 * caller decides what that means. */
TU_PORTABLE uint32_t tu_small_from_f32_bits(uint32_t magnitude, int exponent_bits, int mantissa_bits) {
    int bias = (1 << (exponent_bits - 1)) - 1;
    int drop = 23 - mantissa_bits;
    int exponent = (int)(magnitude >> 23) - 127 + bias;
    uint32_t kept;
    if (exponent >= 1) {
        kept = magnitude - ((uint32_t)(127 - bias) << 23);
    } else { /* denormal there, or zero: the implicit one becomes explicit and moves right */
        drop += 1 - exponent;
        if (drop > 24)
            return 0; /* below half of the smallest denormal */
        kept = (magnitude & 0x7fffff) | 0x800000;
    }
    uint32_t half = (1u << (drop - 1)) - 1 + (kept >> drop & 1);
    return (kept + half) >> drop;
}

TU_PORTABLE float tu_f16_to_f32(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00) /* infinity, or NaN with its payload, made quiet */
        return tu_f32_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13 | (magnitude > 0x7c00 ? 0x400000 : 0));
    return tu_f32_from_bits(sign | tu_small_to_f32_bits(magnitude, 5, 10));
}

TU_PORTABLE uint16_t tu_f32_to_f16(float value) {
    uint32_t bits = tu_f32_bits(value);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x47800000) /* 65536 and above */
        return sign | 0x7c00;
    return (uint16_t)(sign | tu_small_from_f32_bits(magnitude, 5, 10)); /* 65520 and above round up to 0x7c00 */
}

TU_PORTABLE float tu_e5m2_to_f32(uint8_t bits) {
    return tu_f16_to_f32((uint16_t)(bits << 8)); /* the upper byte of an f16 */
}

TU_PORTABLE uint8_t tu_f32_to_e5m2(float value) {
    uint32_t bits = tu_f32_bits(value);
    uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return sign | 0x7f;
    if (magnitude >= 0x47800000)
        return sign | 0x7c;
    return (uint8_t)(sign | tu_small_from_f32_bits(magnitude, 5, 2)); /* 61440 and above round up to 0x7c */
}

TU_PORTABLE float tu_e4m3_to_f32(uint8_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x80) << 24;
    uint32_t magnitude = bits & 0x7f;
    if (magnitude == 0x7f)
        return tu_f32_from_bits(sign | 0x7fc00000);
    return tu_f32_from_bits(sign | tu_small_to_f32_bits(magnitude, 4, 3));
}

TU_PORTABLE uint8_t tu_f32_to_e4m3(float value) {
    uint32_t bits = tu_f32_bits(value);
    uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return sign | 0x7f;
    if (magnitude >= 0x43e00000) /* 448 and above, and infinity */
        return sign | 0x7e;
    return (uint8_t)(sign | tu_small_from_f32_bits(magnitude, 4, 3));
}

/* f64 to f32 by rounding to odd: exact, or the neighbour whose last bit is one. Rounding that once more to a type with
 * at most 22 bits of mantissa gives what rounding the f64 directly would. */
TU_PORTABLE float tu_f64_to_f32_odd(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = (uint32_t)(bits >> 32 & 0x80000000);
    uint64_t magnitude = bits & INT64_MAX;
    if (magnitude > UINT64_C(0x7ff0000000000000))
        return tu_f32_from_bits(sign | 0x7fc00000);
    if (magnitude == UINT64_C(0x7ff0000000000000))
        return tu_f32_from_bits(sign | 0x7f800000);
    int exponent = (int)(magnitude >> 52) - 1023 + 127;
    if (exponent >= 255)
        return tu_f32_from_bits(sign | 0x7f7fffff); /* the largest f32, which is odd; rounds on to infinity or NaN */
    int drop = 29;
    uint64_t kept = (uint64_t)exponent << 52 | (magnitude & UINT64_C(0xfffffffffffff));
    if (exponent < 1) {
        drop += 1 - exponent;
        kept = (magnitude & UINT64_C(0xfffffffffffff)) | (magnitude >> 52 != 0 ? UINT64_C(1) << 52 : 0);
        if (drop > 62)
            drop = 62;
    }
    uint32_t odd = (kept & ((UINT64_C(1) << drop) - 1)) != 0;
    return tu_f32_from_bits(sign | (uint32_t)(kept >> drop) | odd);
}

#endif
