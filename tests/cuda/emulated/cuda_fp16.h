/* SPDX-License-Identifier: Apache-2.0
 *
 * For kernels that run on the CPU: the four words of CUDA's cuda_fp16.h that they use.
 */
#ifndef TUTTI_TESTS_CUDA_EMULATED_FP16_H
#define TUTTI_TESTS_CUDA_EMULATED_FP16_H

#include "base/float16.h"

struct __half {
    uint16_t bits;
};

static inline __half __ushort_as_half(uint16_t bits) {
    return { bits };
}
static inline uint16_t __half_as_ushort(__half half) {
    return half.bits;
}
static inline float __half2float(__half half) {
    return tu_f16_to_f32(half.bits);
}
static inline __half __float2half_rn(float value) {
    return { tu_f32_to_f16(value) };
}

#endif
