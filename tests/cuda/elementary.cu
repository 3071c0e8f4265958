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
