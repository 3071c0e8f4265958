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

/* Seconds of PEAK_STEPS times PEAK_CHAINS fma, each chain in a register of its own. */
#define PEAK_FMA(chain) "vfmadd231ps %12, %12, %" #chain "\n\t"
#define PEAK_FUNCTION(name, type, instructions, place)                                                           \
    __attribute__((target(instructions))) static inline double name(void) {                                      \
        type half = { 0 };                                                                                       \
        half += 0.5f;                                                                                            \
        type c0 = half, c1 = half, c2 = half, c3 = half, c4 = half, c5 = half, c6 = half, c7 = half, c8 = half,  \
             c9 = half, c10 = half, c11 = half;                                                                  \
        double start = now();                                                                                    \
        for (int step = 0; step < PEAK_STEPS; step++)                                                            \
            __asm__ volatile(PEAK_FMA(0) PEAK_FMA(1) PEAK_FMA(2) PEAK_FMA(3) PEAK_FMA(4) PEAK_FMA(5) PEAK_FMA(6) \
                                 PEAK_FMA(7) PEAK_FMA(8) PEAK_FMA(9) PEAK_FMA(10) PEAK_FMA(11)                   \
                             : "+" place(c0), "+" place(c1), "+" place(c2), "+" place(c3), "+" place(c4),        \
                               "+" place(c5), "+" place(c6), "+" place(c7), "+" place(c8), "+" place(c9),        \
                               "+" place(c10), "+" place(c11)                                                    \
                             : place(half));                                                                     \
        return now() - start;                                                                                    \
    }
PEAK_FUNCTION(peak_of_eight, eight_floats, "avx2,fma", "x")
PEAK_FUNCTION(peak_of_sixteen, sixteen_floats, "avx512f", "v")

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
#undef PEAK_FMA
#else
static inline double fma_peak(void) {
    return 0;
}
#endif

#endif
