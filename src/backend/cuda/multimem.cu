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
            uint4 vector;                                                                              \
            asm volatile("multimem.ld_reduce.relaxed.sys.global.add" format " {%0, %1, %2, %3}, [%4];" \
                         : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)              \
                         : "l"(address)                                                                \
                         : "memory");                                                                  \
            return vector;                                                                             \
        }                                                                                              \
    };
SWITCH_ACCESS(as_f16, ".acc::f32.v4.f16x2")
SWITCH_ACCESS(as_bf16, ".acc::f32.v4.bf16x2")
template <> struct switch_access<as_f32> {
    static __device__ __forceinline__ uint4 load(uint64_t address) {
        float first, second, third, fourth;
        asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(first), "=f"(second), "=f"(third), "=f"(fourth)
                     : "l"(address)
                     : "memory");
        return make_uint4(__float_as_uint(first), __float_as_uint(second), __float_as_uint(third),
                          __float_as_uint(fourth));
    }
};
static __device__ __forceinline__ void switch_store(uint64_t address, uint4 vector) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
                 "f"(__uint_as_float(vector.x)), "f"(__uint_as_float(vector.y)), "f"(__uint_as_float(vector.z)),
                 "f"(__uint_as_float(vector.w))
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
template <class Type> static __device__ __forceinline__ uint4 finish_vector(uint4 vector, int reduction, int ranks) {
    constexpr int lanes = 16 / sizeof(typename Type::storage);
    if (reduction != OP_AVG)
        return vector;
    typename Type::accumulator x[lanes];
    unpack<Type>(vector, x);
    return pack<Type>(x, reduction, ranks);
}

struct by_switch {
    template <class Type>
    static __device__ __forceinline__ uint4 load(const tu_cuda_reduce_args &args, const sources &, uint64_t byte) {
        return finish_vector<Type>(switch_access<Type>::load(args.source_multicast + byte), args.reduction,
                                   args.meeting.size);
    }
    static __device__ __forceinline__ void store(uint64_t multicast, uint8_t *const *, int, uint64_t byte,
                                                 uint4 vector) {
        switch_store(multicast + byte, vector);
    }
    static __device__ __forceinline__ uint64_t alignment(uint64_t source, uint64_t target) {
        return source | target;
    }
};

struct by_members {
    template <class Type>
    static __device__ __forceinline__ uint4 load(const tu_cuda_reduce_args &args, const sources &from, uint64_t byte) {
        return reduce_vector<Type, 0>(from, args.meeting.size, args.reduction, byte);
    }
    static __device__ __forceinline__ void store(uint64_t, uint8_t *const *targets, int ranks, uint64_t byte,
                                                 uint4 vector) {
        for (int rank = 0; rank < ranks; rank++)
            store_vector(targets[rank] + byte, vector);
    }
    static __device__ __forceinline__ uint64_t alignment(uint64_t, uint64_t) {
        return 0;
    }
};

/* Bytes [first, last) of the sources, 16 at a time: to everybody's target with push, else to `out` (which points at
 * `first`). */
template <class Type, class Access>
static __device__ void multimem_range(const tu_cuda_reduce_args &args, const sources &from, uint64_t first,
                                      uint64_t last, uint8_t *out, bool push) {
    for (uint64_t byte = first + threadIdx.x * 16; byte < last; byte += (uint64_t)blockDim.x * 16) {
        uint4 vector = Access::template load<Type>(args, from, byte);
        if (push)
            Access::store(args.target_multicast, from.target, args.meeting.size, byte, vector);
        else
            store_vector(out + (byte - first), vector);
    }
}

/* The whole operation where the data lies: as reduce_direct, with loads and stores of the access. The last elements
 * that fill no vector, and everything where something is not aligned, go member by member. */
template <class Type, class Access> struct multimem_direct {
    static __device__ void run(const tu_cuda_reduce_args &args, sources &given, meeting_epoch &epoch) {
        typedef typename Type::storage storage;
        const tu_cuda_meeting &meeting = args.meeting;
        const uint64_t grain = 16 / sizeof(storage);
        const bool push = args.mode == TU_CUDA_TWO_SHOT;
        range part = part_of(args, meeting.rank, meeting.size, grain);
        uint64_t from = part.first + cut(part.count, blockIdx.x, gridDim.x, grain);
        uint64_t to = part.first + cut(part.count, blockIdx.x + 1, gridDim.x, grain);
        uint8_t *out = (uint8_t *)args.out + from * sizeof(storage);
        uint64_t bits = Access::alignment(args.source_multicast, push ? args.target_multicast : 0);
        for (int rank = 0; rank < meeting.size; rank++)
            bits |= (uint64_t)given.address[rank] | (push ? (uint64_t)given.target[rank] : 0);
        bits |= push ? 0 : (uint64_t)out;
        uint64_t vectors = (bits & 15) == 0 ? (to - from) * sizeof(storage) / 16 * 16 : 0;
        if (push || args.out != 0) {
            multimem_range<Type, Access>(args, given, from * sizeof(storage), from * sizeof(storage) + vectors, out,
                                         push);
            uint64_t done = vectors / sizeof(storage);
            reduce_range<Type, 0>(given, meeting.size, args.reduction, from + done, to, out + vectors, push,
                                  block_team());
        }
        meet(meeting, epoch);
    }
};

/* Elements [begin, end) of a tile: whole vectors by the access where they are aligned, the rest member by member. */
template <class Type, class Access> struct multimem_local {
    static __device__ void run(const tu_cuda_reduce_args &args, const sources &given, uint64_t begin, uint64_t end,
                               uint8_t *out, team team) {
        typedef typename Type::storage storage;
        uint64_t first = begin * sizeof(storage);
        uint64_t bits = Access::alignment(args.source_multicast, 0) | first | (uint64_t)out;
        for (int rank = 0; rank < args.meeting.size; rank++)
            bits |= (uint64_t)given.address[rank];
        uint64_t vectors = (bits & 15) == 0 ? (end - begin) * sizeof(storage) / 16 * 16 : 0;
        for (uint64_t byte = team.lane * 16; byte < vectors; byte += team.lanes * 16)
            store_vector(out + byte, Access::template load<Type>(args, given, first + byte));
        reduce_range<Type, 0>(given, args.meeting.size, args.reduction, begin + vectors / sizeof(storage), end,
                              out + vectors, false, team);
    }
};

#define MULTIMEM(name, type, access)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                 \
        tutti_multimem_##name##_##access(const __grid_constant__ tu_cuda_reduce_args args) {                 \
        __shared__ sources given;                                                                            \
        if (args.mode == TU_CUDA_LOCAL)                                                                      \
            return reduce_local<type, multimem_local<type, access>>(args, given);                            \
        reduce_body<type, 0, multimem_direct<type, access>, multimem_direct<type, by_members>>(args, given); \
    }
MULTIMEM(f32, as_f32, by_switch)
MULTIMEM(f16, as_f16, by_switch)
MULTIMEM(bf16, as_bf16, by_switch)
MULTIMEM(f32, as_f32, by_members)
MULTIMEM(f16, as_f16, by_members)
MULTIMEM(bf16, as_bf16, by_members)

/* Everybody stores its part into everybody's output: all_gather. */
template <class Access> static __device__ void store_part(const tu_cuda_gather_args &args, uint8_t *const *targets) {
    const tu_cuda_meeting &meeting = args.meeting;
    const uint8_t *in = (const uint8_t *)args.in;
    uint64_t from = cut(args.bytes, blockIdx.x, gridDim.x, 16), to = cut(args.bytes, blockIdx.x + 1, gridDim.x, 16);
    uint64_t multicast = args.multicast + meeting.rank * args.bytes,
             bits = (uint64_t)in | Access::alignment(multicast, 0);
    for (int rank = 0; rank < meeting.size; rank++)
        bits |= (uint64_t)targets[rank];
    uint64_t vectors = from + ((bits & 15) == 0 ? (to - from) / 16 * 16 : 0);
    for (uint64_t byte = from + threadIdx.x * 16; byte < vectors; byte += (uint64_t)blockDim.x * 16)
        Access::store(multicast, targets, meeting.size, byte, load_vector(in + byte));
    for (uint64_t byte = vectors + threadIdx.x; byte < to; byte += blockDim.x)
        for (int rank = 0; rank < meeting.size; rank++)
            targets[rank][byte] = in[byte];
}

template <class Access> static __device__ void gather_body(const tu_cuda_gather_args &args) {
    __shared__ uint8_t *targets[TU_CUDA_RANKS];
    const tu_cuda_meeting &meeting = args.meeting;
    meeting_epoch epoch(meeting);
    int met = meet_first(meeting, epoch);
    const bool same = met == 2; /* all outputs lie at the same place of the same block */
    if (met == 1)
        met = meet(meeting, epoch, [&](tu_cuda_inbox *inbox, int) { inbox->target = args.target; });
    if (met != 0) {
        if ((int)threadIdx.x < meeting.size) {
            int rank = threadIdx.x;
            targets[rank] = (same ? (uint8_t *)(args.target_base + rank * args.target_stride)
                                  : resolve(meeting, rank, inbox_of(meeting, meeting.rank, rank)->target)) +
                            meeting.rank * args.bytes;
        }
        __syncthreads();
        if (same)
            store_part<Access>(args, targets);
        else
            store_part<by_members>(args, targets);
        meet(meeting, epoch);
    }
    epoch.keep(meeting);
}

#define MULTIMEM_GATHER(access)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                               \
        tutti_multimem_gather_##access(const __grid_constant__ tu_cuda_gather_args args) { \
        gather_body<access>(args);                                                         \
    }
MULTIMEM_GATHER(by_switch)
MULTIMEM_GATHER(by_members)
