/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of tensors are written with. A kernel is written once and compiled by nvcc for GPUs, and by a C++
 * compiler for the stand-in of the driver with which the tests run without a GPU. For that, what the threads of a block
 * do together is written in phases: EACH_THREAD(self) { … } is what every one does, SYNC() stands between two phases,
 * and what lives longer than a phase is SHARED.
 *
 *     KERNEL(name, arguments)      a kernel; its argument, a struct, is `args`
 *     EACH_ELEMENT(i, total)       a loop in which all threads of all blocks share the numbers below total
 *     BLOCK, BLOCKS, THREADS       the number of this block, of blocks, of threads in a block
 *     SYNC_TEAM()                  a SYNC() of at most 32 neighbours, who are of one warp
 */
#ifndef TU_TENSOR_CUDA_KERNEL_CUH
#define TU_TENSOR_CUDA_KERNEL_CUH

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define HERE static __device__ __forceinline__
#define MEMBER static __device__ __forceinline__
#define APART static __device__ __noinline__
#define SHARED __shared__
#define KERNEL(name, arguments) extern "C" __global__ void kernel_##name(const __grid_constant__ arguments args)
#define BLOCK ((int64_t)blockIdx.x)
#define BLOCKS ((int64_t)gridDim.x)
#define THREADS ((int)blockDim.x)
#define EACH_ELEMENT(i, total) for (int64_t i = BLOCK * THREADS + threadIdx.x; i < (total); i += BLOCKS * THREADS)
#define EACH_THREAD(self) if (const int self = (int)threadIdx.x; true)
#define SYNC() __syncthreads()
#define SYNC_TEAM() __syncwarp()
#define FENCE() __threadfence_system()
/* Whether this thread is the one that changed the word from 0. */
#define FIRST_TO_SET(word, value) (atomicCAS((int *)(word), 0, value) == 0)
/* Adds to a word that other threads add to as well; what it was before. */
#define ADD_TO(word, value) atomicAdd(word, value)
#define UNROLL _Pragma("unroll")
#define UNROLL_BY_4 _Pragma("unroll 4")
#define UNROLL_BY_16 _Pragma("unroll 16")
#else
#include "emulate.hpp"
#endif

#include "base/element.h"
#include "tensor/launch.h"

/* ---- floats as they lie in memory ---- */

struct lying_f32 {
    float bits;
    MEMBER float widen(lying_f32 x) {
        return x.bits;
    }
    MEMBER lying_f32 narrow(float x) {
        return { x };
    }
};
struct lying_f64 {
    double bits;
    MEMBER double widen(lying_f64 x) {
        return x.bits;
    }
    MEMBER lying_f64 narrow(double x) {
        return { x };
    }
};
struct lying_bf16 {
    uint16_t bits;
    MEMBER float widen(lying_bf16 x) {
        return tu_bf16_to_f32(x.bits);
    }
    /* The processor rounds as tu_f32_to_bf16 does, two numbers as fast as one; every NaN becomes one NaN. */
    MEMBER lying_bf16 narrow(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        uint32_t pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(0.0f));
        return { (uint16_t)(pair >> 16) };
#else
        return { tu_f32_to_bf16(x) };
#endif
    }
};
struct lying_f16 {
    uint16_t bits;
    MEMBER float widen(lying_f16 x) {
#ifdef __CUDACC__
        return __half2float(__ushort_as_half(x.bits));
#else
        return tu_f16_to_f32(x.bits);
#endif
    }
    MEMBER lying_f16 narrow(float x) {
#ifdef __CUDACC__
        return { __half_as_ushort(__float2half_rn(x)) };
#else
        return { tu_f32_to_f16(x) };
#endif
    }
};

/* Eight elements of two bytes, as words. They may lie anywhere: whole words are read, and put together where the first
 * element is the second half of one. */
struct alignas(16) eight_halves {
    uint32_t at[4];
};
HERE eight_halves read_eight(const void *from) {
    if (((uintptr_t)from & 15) == 0)
        return *(const eight_halves *)from;
    bool odd = ((uintptr_t)from & 2) != 0;
    const uint32_t *words = (const uint32_t *)((const char *)from - (odd ? 2 : 0));
    eight_halves found;
    uint32_t before = words[0];
    UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t next = k < 3 || odd ? words[k + 1] : 0;
        found.at[k] = odd ? before >> 16 | next << 16 : before;
        before = next;
    }
    return found;
}

/* ---- elements of any type ---- */

template <class T> struct computed; /* the compute types */
template <> struct computed<float> {
    MEMBER float from(const tu_element &element) {
        return (float)tu_element_real(&element, TUTTI_F32);
    }
    MEMBER tu_element wide(float x) {
        return { (double)x, 0, 0, false, false };
    }
    MEMBER float of_bits(uint64_t bits) {
        return tu_f32_from_bits((uint32_t)bits);
    }
};
template <> struct computed<double> {
    MEMBER double from(const tu_element &element) {
        return tu_element_real(&element, TUTTI_F64);
    }
    MEMBER tu_element wide(double x) {
        return { x, 0, 0, false, false };
    }
    MEMBER double of_bits(uint64_t bits) {
        double x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
};
template <> struct computed<int64_t> {
    MEMBER int64_t from(const tu_element &element) {
        return element.whole ? element.integer : tu_saturate_signed(element.real, 64);
    }
    MEMBER tu_element wide(int64_t x) {
        return { 0, 0, x, true, false };
    }
    MEMBER int64_t of_bits(uint64_t bits) {
        return (int64_t)bits;
    }
};
template <> struct computed<uint64_t> {
    MEMBER uint64_t from(const tu_element &element) {
        return element.whole ? (uint64_t)element.integer : tu_saturate_unsigned(element.real, 64);
    }
    MEMBER tu_element wide(uint64_t x) {
        return { 0, 0, (int64_t)x, true, true };
    }
    MEMBER uint64_t of_bits(uint64_t bits) {
        return bits;
    }
};

/* Not inlined: a switch over all types is long, and every generic kernel has several. */
template <class T> APART T load_as(const void *from, int dtype) {
    return computed<T>::from(tu_element_load(from, dtype));
}
template <class T> APART void store_as(T x, void *to, int dtype) {
    tu_element_store(computed<T>::wide(x), to, dtype);
}

HERE int bytes_of(int dtype) {
    return dtype == TUTTI_F64 || dtype == TUTTI_I64 || dtype == TUTTI_U64 || dtype == TUTTI_C64    ? 8
           : dtype == TUTTI_F32 || dtype == TUTTI_I32 || dtype == TUTTI_U32                        ? 4
           : dtype == TUTTI_F16 || dtype == TUTTI_BF16 || dtype == TUTTI_I16 || dtype == TUTTI_U16 ? 2
           : dtype == TUTTI_C128                                                                   ? 16
                                                                                                   : 1;
}

/* ---- places of elements in a loop ---- */

struct places {
    int64_t at[TU_LAUNCH_OPERANDS]; /* in elements */
};

/* Of element i, the last dimension first. 32-bit division where the numbers fit, which is much quicker. */
HERE places places_of(const tu_launch_loop &loop, int64_t i) {
    places found = { { 0, 0, 0, 0 } };
    bool small = loop.total <= INT32_MAX;
    for (int dim = loop.ndim - 1; dim >= 0; dim--) {
        int64_t size = loop.sizes[dim], index;
        if (dim == 0) {
            index = i;
        } else if (small) {
            index = (uint32_t)i % (uint32_t)size;
            i = (uint32_t)i / (uint32_t)size;
        } else {
            index = i % size;
            i /= size;
        }
        UNROLL
        for (int k = 0; k < TU_LAUNCH_OPERANDS; k++)
            if (k < loop.operands)
                found.at[k] += index * loop.at[k].strides[dim];
    }
    return found;
}

HERE char *place_of(const tu_launch_loop &loop, int operand, const places &at) {
    return (char *)(uintptr_t)loop.at[operand].data + at.at[operand] * bytes_of(loop.at[operand].dtype);
}

#endif
