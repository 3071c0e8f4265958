/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels in which ranks multiply together share of words for the CPU: a thread block is a thread of the
 * system and its threads are fibers, as with the kernels of the backends. Included once in a program of its own, before
 * the kernels.
 */
#ifndef TUTTI_TESTS_CUDA_TOGETHER_HPP
#define TUTTI_TESTS_CUDA_TOGETHER_HPP

#include "words.hpp"

#include "emulate.hpp"

#undef HERE
#undef KERNEL
#undef THREADS
#undef __shared__
#define __shared__ thread_local

#define TU_TENSOR_CUDA_TOGETHER_WORDS_CUH /* all of them are here */

#include <cuda_fp16.h>

#include "base/float16.h"
#include "together.h"

#define HERE static inline

enum kind {
    BF16 = TU_TOGETHER_BF16,
    F16 = TU_TOGETHER_F16,
    F32 = TU_TOGETHER_F32,
    E4M3,
    E5M2
};

/* ---- words of CUDA C ---- */

struct float2 {
    float x, y;
};
HERE float2 make_float2(float x, float y) {
    return { x, y };
}
HERE void __nanosleep(unsigned) {
    emulated_yield();
}
HERE float __ldg(const float *address) {
    return *address;
}

/* The lanes of a warp come to each of these together. */
struct warp {
    int arrived;
    unsigned generation;
    uint32_t given[32], last[32];
};
static thread_local warp warps[TU_TOGETHER_THREADS / 32]; /* of this thread block */
HERE const uint32_t *exchange_in_warp(uint32_t value) {
    warp &mine = warps[threadIdx.x / 32];
    unsigned generation = mine.generation;
    mine.given[threadIdx.x % 32] = value;
    if (++mine.arrived == 32) {
        memcpy(mine.last, mine.given, sizeof mine.last);
        mine.arrived = 0;
        mine.generation++;
        emulated_went_on();
    }
    while (mine.generation == generation)
        emulated_yield();
    return mine.last;
}
HERE void __syncwarp(void) {
    (void)exchange_in_warp(0);
}
HERE int __all_sync(unsigned, int value) {
    const uint32_t *all = exchange_in_warp(value != 0);
    for (int lane = 0; lane < 32; lane++)
        if (!all[lane])
            return 0;
    return 1;
}
HERE int __shfl_sync(unsigned, int value, int lane) {
    return (int)exchange_in_warp((uint32_t)value)[lane];
}

/* ---- words in memory ---- */

HERE uint32_t add_ordered(uint32_t *word, uint32_t value) {
    return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}
HERE void store_relaxed32(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
HERE void fence_system(void) {
    __threadfence_system();
}

/* So many threads, of whole warps: a barrier of that number. */
struct meeting_of_threads {
    int arrived;
    unsigned generation;
};
static thread_local meeting_of_threads meetings[16]; /* of this thread block */
HERE void barrier_of_threads(int number, int count) {
    meeting_of_threads &mine = meetings[number];
    unsigned generation = mine.generation;
    if (++mine.arrived == count) {
        mine.arrived = 0;
        mine.generation++;
        emulated_went_on();
    }
    while (mine.generation == generation)
        emulated_yield();
}

HERE int anew(int value) {
    return value;
}

/* ---- narrow floats ---- */

/* All values of a type of 16 bits or less, which take long to work out one by one. */
template <int Kind> struct values {
    float of[Kind == E4M3 || Kind == E5M2 ? 1 << 8 : 1 << 16];
    values() {
        for (uint32_t bits = 0; bits < sizeof of / sizeof of[0]; bits++)
            of[bits] = Kind == BF16   ? __uint_as_float(bits << 16)
                       : Kind == E4M3 ? tu_e4m3_to_f32((uint8_t)bits)
                                      : tu_f16_to_f32((uint16_t)(Kind == E5M2 ? bits << 8 : bits));
    }
};
template <int Kind> HERE float value_of(uint32_t bits) {
    static const values<Kind> all;
    return all.of[bits];
}

template <int Kind> HERE uint32_t narrow_one(float x) {
    return Kind == BF16 ? tu_f32_to_bf16(x) : tu_f32_to_f16(x);
}
template <int Kind> HERE uint32_t narrow(float x, float y) {
    return narrow_one<Kind>(x) | narrow_one<Kind>(y) << 16;
}
template <int Kind> HERE float2 widen(uint32_t both) {
    if (Kind == BF16)
        return { __uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u) };
    return { tu_f16_to_f32((uint16_t)both), tu_f16_to_f32((uint16_t)(both >> 16)) };
}

template <void (*Kernel)(tu_together_args)> static void enter_kernel(const void *args) {
    Kernel(*(const tu_together_args *)args);
}
#define KERNEL_OF(name)                                                                                          \
    static const emulated::entry entry_of_##name("kernel_together_" #name, enter_kernel<kernel_together_##name>, \
                                                 sizeof(tu_together_args), true);

#endif
