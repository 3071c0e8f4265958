/* SPDX-License-Identifier: Apache-2.0
 *
 * What one core can do at most: f32 operations per second of products, measured with chains of fma that wait for
 * nothing but themselves.
 */
#ifndef BENCH_PEAK_H
#define BENCH_PEAK_H

#include "measure.h"

#if defined __x86_64__
typedef float eight_floats __attribute__((vector_size(32)));
typedef float sixteen_floats __attribute__((vector_size(64)));

#define PEAK_CHAINS 12
#define PEAK_STEPS 200000

/* Seconds of PEAK_STEPS times PEAK_CHAINS fma; a compiler may neither leave them out nor join them. */
#define PEAK_FUNCTION(name, type, instructions, fma, place)                                                \
    __attribute__((target(instructions))) static inline double name(void) {                                \
        type chains[PEAK_CHAINS], half = { 0 };                                                            \
        half += 0.5f;                                                                                      \
        for (int i = 0; i < PEAK_CHAINS; i++)                                                              \
            chains[i] = half;                                                                              \
        double start = now();                                                                              \
        for (int step = 0; step < PEAK_STEPS; step++)                                                      \
            _Pragma("GCC unroll 12") for (int i = 0; i < PEAK_CHAINS;                                      \
                                          i++) __asm__ volatile(fma : "+" place(chains[i]) : place(half)); \
        return now() - start;                                                                              \
    }
PEAK_FUNCTION(peak_of_eight, eight_floats, "avx2,fma", "vfmadd231ps %1, %1, %0", "x")
PEAK_FUNCTION(peak_of_sixteen, sixteen_floats, "avx512f", "vfmadd231ps %1, %1, %0", "v")

/* 0 where this machine has no fma. */
static inline double fma_peak(void) {
    double best = 0;
    for (int i = 0; i < 40; i++) {
        double operations = 2.0 * PEAK_STEPS * PEAK_CHAINS;
        double eight = __builtin_cpu_supports("fma") ? 8 * operations / peak_of_eight() : 0;
        double sixteen = __builtin_cpu_supports("avx512f") ? 16 * operations / peak_of_sixteen() : 0;
        best = eight > best ? eight : best;
        best = sixteen > best ? sixteen : best;
    }
    return best;
}
#undef PEAK_FUNCTION
#else
static inline double fma_peak(void) {
    return 0;
}
#endif

#endif
