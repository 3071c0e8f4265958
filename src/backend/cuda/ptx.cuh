/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory operations that CUDA C has no words for. tests/cuda/emulated/ptx.cuh has the same for kernels that run on the
 * CPU.
 */
#ifndef TU_CUDA_PTX_CUH
#define TU_CUDA_PTX_CUH

#include <stdint.h>

/* ---- loads and stores with an order, at the scope of the whole system ---- */

static __device__ __forceinline__ uint32_t load_acquire32(const uint32_t *word) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

static __device__ __forceinline__ uint32_t load_relaxed32(const uint32_t *word) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

static __device__ __forceinline__ void store_release64(uint64_t *word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

static __device__ __forceinline__ void store_release32(uint32_t *word, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

static __device__ __forceinline__ void add_release64(uint64_t *word, uint64_t value) {
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

static __device__ __forceinline__ uint64_t load_acquire64(const uint64_t *word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

static __device__ __forceinline__ uint64_t load_acquire64_gpu(const uint64_t *word) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

/* 16 bytes at once. */
static __device__ __forceinline__ void load_acquire128(const uint64_t *words, uint64_t &first, uint64_t &second) {
    asm volatile("{.reg .b128 v; ld.acquire.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v;}"
                 : "=l"(first), "=l"(second)
                 : "l"(words)
                 : "memory");
}

/* The same for words that only threads of this device look at: a release waits for the device's own memory alone. */
static __device__ __forceinline__ void store_release64_gpu(uint64_t *word, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

static __device__ __forceinline__ void load_acquire128_gpu(const uint64_t *words, uint64_t &first, uint64_t &second) {
    asm volatile("{.reg .b128 v; ld.acquire.gpu.global.b128 v, [%2]; mov.b128 {%0, %1}, v;}"
                 : "=l"(first), "=l"(second)
                 : "l"(words)
                 : "memory");
}

static __device__ __forceinline__ void load_relaxed128(const void *words, uint64_t &first, uint64_t &second) {
    asm volatile("{.reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v;}"
                 : "=l"(first), "=l"(second)
                 : "l"(words)
                 : "memory");
}

static __device__ __forceinline__ uint64_t load_relaxed64_gpu(const uint64_t *word) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

static __device__ __forceinline__ void store_relaxed128(uint64_t *words, uint64_t first, uint64_t second) {
    asm volatile("{.reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v;}" ::"l"(words), "l"(first),
                 "l"(second)
                 : "memory");
}

static __device__ __forceinline__ uint64_t global_time(void) {
    uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

/* ---- launches that overlap ---- */

/* Returns when the kernel before this one on the stream has ended, and all that it stored is visible. */
static __device__ __forceinline__ void await_kernel_before(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* When all thread blocks have said this, the kernel after this one may be brought onto the device, where it waits for
 * this one's end. */
static __device__ __forceinline__ void let_next_kernel_come(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* 16 bytes past L1: peers' data is read once. */
static __device__ __forceinline__ uint4 load_vector(const void *address) {
    uint4 vector;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "l"(address)
                 : "memory");
    return vector;
}

static __device__ __forceinline__ void store_vector(void *address, uint4 vector) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(vector.x), "r"(vector.y), "r"(vector.z),
                 "r"(vector.w)
                 : "memory");
}

static __device__ __forceinline__ void add_release32(uint32_t *word, uint32_t value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

#endif
