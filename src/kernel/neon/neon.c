/* SPDX-License-Identifier: Apache-2.0
 *
 * NEON, as every 64-bit Arm has it: conversions of f16 are there, its arithmetic in f16 is not used.
 */
#include <arm_neon.h>

#define VECTOR 16
#include "kernel/vector.h"

INLINE vector load(const char *from) {
    return (vector)vld1q_u8((const uint8_t *)from);
}

INLINE void store(char *to, vector value) {
    vst1q_u8((uint8_t *)to, (uint8x16_t)value);
}

/* Ordinary stores: a release orders them, and such cores stop allocating lines by themselves on long runs of stores. */
INLINE void store_stream(char *to, vector value) {
    store(to, value);
}

/* The binary digits of `bytes` say which parts there are. */
INLINE vector load_partial(const char *from, size_t bytes) {
    vector value = { 0 };
    char *at = (char *)&value;
    UNROLL for (size_t part = VECTOR / 2; part >= 1; part /= 2) {
        if (bytes & part) {
            __builtin_memcpy(at, from, part);
            at += part;
            from += part;
        }
    }
    return value;
}

INLINE void store_partial(char *to, vector value, size_t bytes) {
    const char *at = (const char *)&value;
    UNROLL for (size_t part = VECTOR / 2; part >= 1; part /= 2) {
        if (bytes & part) {
            __builtin_memcpy(to, at, part);
            at += part;
            to += part;
        }
    }
}

INLINE void widen_f16(const char *from, vector *wide) {
    float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8((const uint8_t *)from));
    wide[0] = (vector)vcvt_f32_f16(vget_low_f16(halves));
    wide[1] = (vector)vcvt_high_f32_f16(halves);
}

INLINE vector narrow_f16(const vector *wide) {
    float16x4_t low = vcvt_f16_f32((float32x4_t)wide[0]);
    return (vector)vcvt_high_f16_f32(low, (float32x4_t)wide[1]);
}

/* FMIN and FMAX do just what is promised. */
INLINE vector_f32 extreme_f32(vector_f32 a, vector_f32 b, bool largest) {
    float32x4_t x = (float32x4_t)a, y = (float32x4_t)b;
    return (vector_f32)(largest ? vmaxq_f32(x, y) : vminq_f32(x, y));
}

INLINE vector_f64 extreme_f64(vector_f64 a, vector_f64 b, bool largest) {
    float64x2_t x = (float64x2_t)a, y = (float64x2_t)b;
    return (vector_f64)(largest ? vmaxq_f64(x, y) : vminq_f64(x, y));
}

DEFINE_TABLE(tu_kernels_neon, "neon");
