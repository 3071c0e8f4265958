/* SPDX-License-Identifier: Apache-2.0
 *
 * NEON, as every 64-bit Arm has it: conversions of f16 are there, its arithmetic in f16 is not used.
 */
#include <arm_neon.h>

#define VECTOR 16
#include "kernel/vector.h"

INLINE vector load(const char *from, size_t bytes) {
    vector value = { 0 };
    __builtin_memcpy(&value, from, bytes);
    return value;
}

INLINE void store(char *to, vector value, size_t bytes) {
    __builtin_memcpy(to, &value, bytes);
}

/* Ordinary stores: a release orders them, and cores of this kind leave write-allocation by themselves on long runs. */
INLINE void store_stream(char *to, vector value, size_t bytes) {
    store(to, value, bytes);
}

INLINE vector load_partial(const char *from, size_t bytes) {
    return load_partial_by_parts(from, bytes);
}

INLINE void store_partial(char *to, vector value, size_t bytes) {
    store_partial_by_parts(to, value, bytes);
}

INLINE vector_f32 widen_f16(vector packed) {
    return (vector_f32)vcvt_f32_f16(vreinterpret_f16_u8(vget_low_u8((uint8x16_t)packed)));
}

INLINE vector narrow_f16(vector_f32 wide) {
    uint8x8_t half = vreinterpret_u8_f16(vcvt_f16_f32((float32x4_t)wide));
    return (vector)vcombine_u8(half, half);
}

INLINE vector_u32 widen_u16(vector packed) {
    return (vector_u32)vmovl_u16(vreinterpret_u16_u8(vget_low_u8((uint8x16_t)packed)));
}

INLINE vector narrow_u32_to_u16(vector_u32 wide) {
    uint8x8_t half = vreinterpret_u8_u16(vmovn_u32((uint32x4_t)wide));
    return (vector)vcombine_u8(half, half);
}

INLINE vector_u32 widen_u8(vector packed) {
    uint16x8_t pairs = vmovl_u8(vget_low_u8((uint8x16_t)packed));
    return (vector_u32)vmovl_u16(vget_low_u16(pairs));
}

INLINE vector narrow_u32_to_u8(vector_u32 wide) {
    uint16x4_t pairs = vmovn_u32((uint32x4_t)wide);
    uint8x8_t bytes = vmovn_u16(vcombine_u16(pairs, pairs));
    return (vector)vcombine_u8(bytes, bytes);
}

DEFINE_TABLE(tu_kernels_neon, "neon");
