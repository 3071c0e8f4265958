/* SPDX-License-Identifier: Apache-2.0
 *
 * Words that kernels in which ranks multiply together use, and CUDA C has none for, from compute capability 8.0 on.
 * What only Hopper has is in together_ptx.cuh.
 */
#ifndef TU_TENSOR_CUDA_TOGETHER_WORDS_CUH
#define TU_TENSOR_CUDA_TOGETHER_WORDS_CUH

#include <stdint.h>

#include <cuda_fp16.h>

#include "together.h"

#define HERE static __device__ __forceinline__

/* Of elements. */
enum kind {
    BF16 = TU_TOGETHER_BF16,
    F16 = TU_TOGETHER_F16,
    F32 = TU_TOGETHER_F32,
    E4M3,
    E5M2
};

/* ---- words in memory ---- */

/* What was before it on both sides is ordered: of this rank's thread blocks. Returns what was there. */
HERE uint32_t add_ordered(uint32_t *word, uint32_t value) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
}
HERE void store_relaxed32(uint32_t *word, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
/* What comes behind it is seen by any rank after all that came before. */
HERE void fence_system(void) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

/* ---- warps that meet ---- */

/* So many threads are here, of whole warps, by a barrier of that number: not all of the thread block, for which there
 * is __syncthreads. */
HERE void barrier_of_threads(int number, int count) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(count) : "memory");
}

/* The value, of which the compiler keeps nothing worked out from one use to the next: registers are rarer. */
HERE int anew(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

/* ---- narrow floats ---- */

template <int Kind> HERE uint32_t narrow(float x, float y) {
    uint32_t both;
    if (Kind == BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}
template <int Kind> HERE float2 widen(uint32_t both) {
    if (Kind == BF16)
        return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
    return __half22float2(*(const __half2 *)&both);
}

#endif
