/* SPDX-License-Identifier: Apache-2.0
 *
 * The words of CUDA C, for kernels that run on the CPU. A thread block is a thread of the system, and its threads are
 * fibers of that one, which take turns at every barrier and at every look at memory that another block may write.
 */
#ifndef TUTTI_TESTS_CUDA_EMULATED_WORDS_HPP
#define TUTTI_TESTS_CUDA_EMULATED_WORDS_HPP

#include <emmintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local /* a block is a thread of the system */

struct emulated_index {
    unsigned x;
};
extern thread_local emulated_index threadIdx, blockIdx, blockDim, gridDim;

void emulated_yield(void);       /* another fiber of the block goes on */
int emulated_barrier(int value); /* all fibers of the block; the conjunction of their values */
void emulated_went_on(void);     /* the block waits for no other one: its fibers get on by themselves */

static inline void __syncthreads(void) {
    (void)emulated_barrier(1);
}
static inline int __syncthreads_and(int value) {
    return emulated_barrier(value);
}
static inline int __syncthreads_or(int value) {
    return !emulated_barrier(!value);
}
static inline void __threadfence_system(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
[[noreturn]] static inline void __trap(void) {
    abort();
}

struct uint4 {
    unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return { x, y, z, w };
}
static inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float __fadd_rn(float x, float y) {
    return x + y;
}
static inline float __fmul_rn(float x, float y) {
    return x * y;
}
static inline float __fdiv_rn(float x, float y) {
    return x / y;
}
static inline double __dadd_rn(double x, double y) {
    return x + y;
}
static inline double __dmul_rn(double x, double y) {
    return x * y;
}
static inline double __ddiv_rn(double x, double y) {
    return x / y;
}
static inline int __ffs(uint32_t bits) {
    return __builtin_ffs((int)bits);
}
template <class First, class Second> static inline auto min(First first, Second second) {
    return first < second ? first : second;
}
template <class First, class Second> static inline auto max(First first, Second second) {
    return first > second ? first : second;
}

template <class Word> static inline Word atomicAdd(Word *word, Word value) {
    return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}
template <class Word> static inline Word atomicCAS(Word *word, Word expected, Word value) {
    __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class Word> static inline Word atomicMax(Word *word, Word value) {
    Word old = *word; /* fibers of one block: nobody comes between */
    *word = old > value ? old : value;
    return old;
}

/* ---- what backend/cuda/ptx.cuh has ---- */

#define TU_CUDA_PTX_CUH

static inline uint32_t load_acquire32(const uint32_t *word) {
    emulated_yield();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
static inline uint32_t load_relaxed32(const uint32_t *word) {
    emulated_yield();
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
static inline uint64_t load_relaxed64_gpu(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
static inline uint64_t load_acquire64(const uint64_t *word) {
    emulated_yield();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
static inline uint64_t load_acquire64_gpu(const uint64_t *word) {
    emulated_yield();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
static inline void store_release64(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
static inline void store_release32(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
static inline void add_release64(uint64_t *word, uint64_t value) {
    __atomic_fetch_add(word, value, __ATOMIC_RELEASE);
}
static inline void add_release32(uint32_t *word, uint32_t value) {
    __atomic_fetch_add(word, value, __ATOMIC_RELEASE);
}
/* 16 aligned bytes are one access on processors with AVX. */
static inline void load_relaxed128(const void *words, uint64_t &first, uint64_t &second) {
    emulated_yield();
    __m128i value = _mm_load_si128((const __m128i *)words);
    first = (uint64_t)_mm_cvtsi128_si64(value);
    second = (uint64_t)_mm_cvtsi128_si64(_mm_unpackhi_epi64(value, value));
}
static inline void load_acquire128(const uint64_t *words, uint64_t &first, uint64_t &second) {
    load_relaxed128(words, first, second);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}
static inline void load_acquire128_gpu(const uint64_t *words, uint64_t &first, uint64_t &second) {
    load_acquire128(words, first, second);
}
static inline void store_release64_gpu(uint64_t *word, uint64_t value) {
    store_release64(word, value);
}
static inline void await_kernel_before(void) {}
static inline void let_next_kernel_come(void) {}
static inline void store_relaxed128(uint64_t *words, uint64_t first, uint64_t second) {
    _mm_store_si128((__m128i *)words, _mm_set_epi64x((long long)second, (long long)first));
}
static inline uint64_t global_time(void) {
    struct timespec now;
    emulated_yield();
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
static inline uint4 load_vector(const void *address) {
    uint4 vector;
    memcpy(&vector, address, sizeof vector);
    return vector;
}
static inline void store_vector(void *address, uint4 vector) {
    memcpy(address, &vector, sizeof vector);
}

#endif
