/* SPDX-License-Identifier: Apache-2.0
 *
 * Random words by a counter: Philox-4x32 with ten rounds (Salmon and others, "Parallel random numbers: as easy as 1, 2,
 * 3", 2011), for the CPU and for kernels of GPUs.
 */
#ifndef TU_TENSOR_PHILOX_H
#define TU_TENSOR_PHILOX_H

#include <math.h>

#include <tutti/dtype.h>

#include "base/float16.h"

typedef struct tu_words {
    uint32_t at[4];
} tu_words;

TU_PORTABLE tu_words tu_philox(uint64_t seed, uint32_t rank, uint64_t block) {
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = rank, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    tu_words words = { { c0, c1, c2, c3 } };
    return words;
}

/* Two 64-bit words make two elements; element i uses half i % 2 of block i / 2. In [0, 1). */
TU_PORTABLE double tu_unit(const tu_words *block, int64_t i) {
    uint64_t bits = (uint64_t)block->at[(i & 1) * 2] << 32 | block->at[(i & 1) * 2 + 1];
    return (double)(bits >> 11) * 0x1p-53;
}

/* The step between neighbours in [0.5, 1): a share rounded down to it does not reach 1 in the narrow type. */
TU_PORTABLE double tu_random_step(int dtype) {
    return dtype == TUTTI_F32 ? 0x1p-24 : dtype == TUTTI_F16 ? 0x1p-11 : dtype == TUTTI_BF16 ? 0x1p-8 : 0x1p-3;
}

typedef enum tu_distribution {
    TU_UNIFORM, /* in [first, second) */
    TU_NORMAL,  /* mean first, deviation second */
    TU_WHOLE    /* in [first, second), rounded down */
} tu_distribution;

/* From a uniform or normal number to one of the distribution, in a tensor of that dtype. */
TU_PORTABLE double tu_distribute(double value, int distribution, double first, double second, int dtype) {
    double width = second - first, step = tu_random_step(dtype);
    if (distribution == TU_NORMAL)
        return first + second * value;
    if (distribution == TU_WHOLE)
        return floor(first + width * value);
    return first + width * (dtype != TUTTI_F64 ? floor(value / step) * step : value);
}

#endif
