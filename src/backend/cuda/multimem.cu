/* SPDX-License-Identifier: Apache-2.0
 *
 * Multicast: one address for all members. A load from it is the sum over all of them, a store to it reaches all of
 * them.
 *
 * Each kernel is one template in two instances: `by_switch`, where the switch adds and copies (multimem instructions),
 * and `by_members`, where the processors do, over every member's mapping. What the switch adds, it adds in an order of
 * its own: only there the bits may differ from the serial loop.
 */
#include "device.cuh"

/* Sums and copies of 16 bytes by the switch. */
template <class Type> struct switch_access;

#if __CUDA_ARCH__ >= 900
#define SWITCH_ACCESS(type, format)                                                                    \
    template <> struct switch_access<type> {                                                           \
        static __device__ __forceinline__ uint4 load(uint64_t address) {                               \
            uint4 v;                                                                                   \
            asm volatile("multimem.ld_reduce.relaxed.sys.global.add" format " {%0, %1, %2, %3}, [%4];" \
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)                                  \
                         : "l"(address)                                                                \
                         : "memory");                                                                  \
            return v;                                                                                  \
        }                                                                                              \
    };
SWITCH_ACCESS(as_f16, ".acc::f32.v4.f16x2")
SWITCH_ACCESS(as_bf16, ".acc::f32.v4.bf16x2")
template <> struct switch_access<as_f32> {
    static __device__ __forceinline__ uint4 load(uint64_t address) {
        float x, y, z, w;
        asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x), "=f"(y), "=f"(z), "=f"(w)
                     : "l"(address)
                     : "memory");
        return make_uint4(__float_as_uint(x), __float_as_uint(y), __float_as_uint(z), __float_as_uint(w));
    }
};
static __device__ __forceinline__ void switch_store(uint64_t address, uint4 v) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
                 "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)),
                 "f"(__uint_as_float(v.w))
                 : "memory");
}
#else /* such devices have no multicast: the host never launches these instances there */
template <class Type> struct switch_access {
    static __device__ __forceinline__ uint4 load(uint64_t) {
        __trap();
        return make_uint4(0, 0, 0, 0);
    }
};
static __device__ __forceinline__ void switch_store(uint64_t, uint4) {
    __trap();
}
#endif

/* What the switch added, made a result: avg divides. */
template <class Type> static __device__ __forceinline__ uint4 finish_vector(uint4 v, int reduction, int n) {
    constexpr int lanes = 16 / sizeof(typename Type::storage);
    if (reduction != OP_AVG)
        return v;
    typename Type::accumulator x[lanes];
    unpack<Type>(v, x);
    return pack<Type>(x, reduction, n);
}

struct by_switch {
    template <class Type>
    static __device__ __forceinline__ uint4 load(const tu_cuda_reduce_args &args, const sources &, uint64_t byte) {
        return finish_vector<Type>(switch_access<Type>::load(args.source_multicast + byte), args.reduction,
                                   args.meeting.size);
    }
    static __device__ __forceinline__ void store(uint64_t multicast, uint8_t *const *, int, uint64_t byte, uint4 v) {
        switch_store(multicast + byte, v);
    }
    static __device__ __forceinline__ uint64_t alignment(uint64_t source, uint64_t target) {
        return source | target;
    }
};

struct by_members {
    template <class Type>
    static __device__ __forceinline__ uint4 load(const tu_cuda_reduce_args &args, const sources &s, uint64_t byte) {
        return reduce_vector<Type, 0>(s, args.meeting.size, args.reduction, byte);
    }
    static __device__ __forceinline__ void store(uint64_t, uint8_t *const *targets, int n, uint64_t byte, uint4 v) {
        for (int r = 0; r < n; r++)
            store_vector(targets[r] + byte, v);
    }
    static __device__ __forceinline__ uint64_t alignment(uint64_t, uint64_t) {
        return 0;
    }
};

/* Bytes [first, last) of the sources, 16 at a time: to everybody's target with push, else to `out` (which points at
 * `first`). */
template <class Type, class Access>
static __device__ void multimem_range(const tu_cuda_reduce_args &args, const sources &s, uint64_t first, uint64_t last,
                                      uint8_t *out, bool push) {
    for (uint64_t byte = first + threadIdx.x * 16; byte < last; byte += (uint64_t)blockDim.x * 16) {
        uint4 v = Access::template load<Type>(args, s, byte);
        if (push)
            Access::store(args.target_multicast, s.target, args.meeting.size, byte, v);
        else
            store_vector(out + (byte - first), v);
    }
}

/* The whole operation where the data lies: as reduce_direct, with loads and stores of the access. The last elements
 * that fill no vector, and everything where something is not aligned, go member by member. */
template <class Type, class Access> struct multimem_direct {
    static __device__ void run(const tu_cuda_reduce_args &args, sources &s, meeting_epoch &epoch) {
        typedef typename Type::storage storage;
        const tu_cuda_meeting &m = args.meeting;
        const uint64_t grain = 16 / sizeof(storage);
        const bool push = args.mode == TU_CUDA_TWO_SHOT;
        range part = part_of(args, m.rank, m.size, grain);
        uint64_t from = part.first + cut(part.count, blockIdx.x, gridDim.x, grain);
        uint64_t to = part.first + cut(part.count, blockIdx.x + 1, gridDim.x, grain);
        uint8_t *out = (uint8_t *)args.out + from * sizeof(storage);
        uint64_t bits = Access::alignment(args.source_multicast, push ? args.target_multicast : 0);
        for (int r = 0; r < m.size; r++)
            bits |= (uint64_t)s.address[r] | (push ? (uint64_t)s.target[r] : 0);
        bits |= push ? 0 : (uint64_t)out;
        uint64_t vectors = (bits & 15) == 0 ? (to - from) * sizeof(storage) / 16 * 16 : 0;
        if (push || args.out != 0) {
            multimem_range<Type, Access>(args, s, from * sizeof(storage), from * sizeof(storage) + vectors, out, push);
            uint64_t done = vectors / sizeof(storage);
            reduce_range<Type, 0>(s, m.size, args.reduction, from + done, to, out + vectors, push);
        }
        meet(m, epoch);
    }
};

#define MULTIMEM(name, type, access)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                          \
        tutti_multimem_##name##_##access(const __grid_constant__ tu_cuda_reduce_args args) {          \
        reduce_body<type, 0, multimem_direct<type, access>, multimem_direct<type, by_members>>(args); \
    }
MULTIMEM(f32, as_f32, by_switch)
MULTIMEM(f16, as_f16, by_switch)
MULTIMEM(bf16, as_bf16, by_switch)
MULTIMEM(f32, as_f32, by_members)
MULTIMEM(f16, as_f16, by_members)
MULTIMEM(bf16, as_bf16, by_members)

/* Everybody stores its part into everybody's output: all_gather. */
template <class Access> static __device__ void store_part(const tu_cuda_gather_args &args, uint8_t *const *targets) {
    const tu_cuda_meeting &m = args.meeting;
    const uint8_t *in = (const uint8_t *)args.in;
    uint64_t from = cut(args.bytes, blockIdx.x, gridDim.x, 16), to = cut(args.bytes, blockIdx.x + 1, gridDim.x, 16);
    uint64_t multicast = args.multicast + m.rank * args.bytes, bits = (uint64_t)in | Access::alignment(multicast, 0);
    for (int r = 0; r < m.size; r++)
        bits |= (uint64_t)targets[r];
    uint64_t vectors = from + ((bits & 15) == 0 ? (to - from) / 16 * 16 : 0);
    for (uint64_t byte = from + threadIdx.x * 16; byte < vectors; byte += (uint64_t)blockDim.x * 16)
        Access::store(multicast, targets, m.size, byte, load_vector(in + byte));
    for (uint64_t byte = vectors + threadIdx.x; byte < to; byte += blockDim.x)
        for (int r = 0; r < m.size; r++)
            targets[r][byte] = in[byte];
}

template <class Access> static __device__ void gather_body(const tu_cuda_gather_args &args) {
    __shared__ uint8_t *targets[TU_CUDA_RANKS];
    const tu_cuda_meeting &m = args.meeting;
    meeting_epoch epoch(m);
    int met = meet_first(m, epoch);
    const bool same = met == 2; /* all outputs lie at the same place of the same block */
    if (met == 1)
        met = meet(m, epoch, [&](tu_cuda_inbox *inbox, int) { inbox->target = args.target; });
    if (met != 0) {
        if ((int)threadIdx.x < m.size) {
            int r = threadIdx.x;
            targets[r] = (same ? (uint8_t *)(args.target_base + r * args.target_stride)
                               : resolve(m, r, inbox_of(m, m.rank, r)->target)) +
                         m.rank * args.bytes;
        }
        __syncthreads();
        if (same)
            store_part<Access>(args, targets);
        else
            store_part<by_members>(args, targets);
        meet(m, epoch);
    }
    epoch.keep(m);
}

#define MULTIMEM_GATHER(access)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                               \
        tutti_multimem_gather_##access(const __grid_constant__ tu_cuda_gather_args args) { \
        gather_body<access>(args);                                                         \
    }
MULTIMEM_GATHER(by_switch)
MULTIMEM_GATHER(by_members)
