/* SPDX-License-Identifier: Apache-2.0
 *
 * Each elementary function as a kernel: name_f32 and name_f64, of `count` elements.
 */
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tensor/kernel/elementary.h"

#define KERNEL(name, type, suffix, call)                                                                     \
    extern "C" __global__ void name##_##suffix(const type *x, const type *y, type *result, uint64_t count) { \
        uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;                                        \
        (void)y;                                                                                             \
        if (i < count)                                                                                       \
            result[i] = call;                                                                                \
    }
#define ONE(name)                                   \
    KERNEL(name, float, f32, tu_##name##_f32(x[i])) \
    KERNEL(name, double, f64, tu_##name##_f64(x[i]))
#define TWO(name)                                         \
    KERNEL(name, float, f32, tu_##name##_f32(x[i], y[i])) \
    KERNEL(name, double, f64, tu_##name##_f64(x[i], y[i]))
#include "elementary.def"

/* The same functions with ratios that need no trying. */
#undef TU_TENSOR_KERNEL_ELEMENTARY_H
#define TU_RATIOS_UNTRIED 1
namespace untried {
#include "tensor/kernel/elementary.h"
}

/* Of all numbers, each thread tries its share, and gives how many have other bits than with a ratio as it is proven. */
#define TRIED(name)                                                                                              \
    extern "C" __global__ void tried_##name##_f32(const float *, const float *, float *result, uint64_t count) { \
        uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;                                            \
        int differing = 0;                                                                                       \
        for (uint64_t bits = i; bits < (uint64_t)1 << 32; bits += count) {                                       \
            float x = tu_float_f32((int32_t)(uint32_t)bits), quick = tu_##name##_f32(x);                         \
            differing += tu_bits_f32(quick) != tu_bits_f32(untried::tu_##name##_f32(x)) && quick == quick;       \
        }                                                                                                        \
        if (i < count)                                                                                           \
            result[i] = (float)differing;                                                                        \
    }
TRIED(tanh)
TRIED(sigmoid)
