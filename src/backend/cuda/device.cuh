/* SPDX-License-Identifier: Apache-2.0
 *
 * What all kernels share: meeting the peers inside a kernel, deadlines and faults, and element arithmetic.
 *
 * Budget of a meeting: one store and one polled load per peer, in device memory; nothing of the host's is read.
 */
#ifndef TU_CUDA_DEVICE_CUH
#define TU_CUDA_DEVICE_CUH

#include <stdint.h>

#include <cuda_fp16.h>

#include "base/float16.h"
#include "params.h"
#include "ptx.cuh"

/* ---- sharing work ---- */

#define THREADS 512 /* of a thread block; two fit a multiprocessor */

/* Where part `part` of `parts` of [0, count) begins: at a multiple of `grain`. */
static __device__ __forceinline__ uint64_t cut(uint64_t count, uint64_t part, uint64_t parts, uint64_t grain) {
    uint64_t begin = (count + grain - 1) / grain * part / parts * grain;
    return begin < count ? begin : count;
}

/* A block's part of the first `count` of `share` elements. Cut by `share`, not by `count`: staging is reused round
 * after round, and a block must never touch what another block number has in the round before. */
struct piece {
    uint64_t from, to;
};
static __device__ __forceinline__ piece piece_of(uint64_t share, uint64_t count, uint64_t grain) {
    uint64_t from = cut(share, blockIdx.x, gridDim.x, grain), to = cut(share, blockIdx.x + 1, gridDim.x, grain);
    return { from < count ? from : count, to < count ? to : count };
}

/* How much of each part goes through the stage in one round, where `most` has room there and the longest part has
 * `longest`: rounds of one length, so that a short operation too is cut among all blocks. `most` consists of grains. */
static __device__ __forceinline__ uint64_t share_of(uint64_t longest, uint64_t most, uint64_t grain) {
    uint64_t rounds = longest > most ? (longest + most - 1) / most : 1;
    uint64_t share = (longest + rounds - 1) / rounds;
    return share == 0 ? grain : (share + grain - 1) / grain * grain;
}

/* By all threads of the block together. */
static __device__ void copy_bytes(uint8_t *to, const uint8_t *from, uint64_t bytes) {
    uint64_t done = 0;
    if ((((uint64_t)to | (uint64_t)from) & 15) == 0) {
        done = bytes / 16 * 16;
        uint64_t step = (uint64_t)blockDim.x * 16, i = threadIdx.x * 16;
        for (; i + 3 * step < done; i += 4 * step) { /* four loads in flight */
            uint4 vector[4];
#pragma unroll
            for (int part = 0; part < 4; part++)
                vector[part] = load_vector(from + i + part * step);
#pragma unroll
            for (int part = 0; part < 4; part++)
                store_vector(to + i + part * step, vector[part]);
        }
        for (; i < done; i += step)
            store_vector(to + i, load_vector(from + i));
    }
    for (uint64_t i = done + threadIdx.x; i < bytes; i += blockDim.x)
        to[i] = from[i];
}

/* ---- faults: the first one wins, stays, and is told to the host ---- */

static __device__ __forceinline__ bool has_fault(const tu_cuda_group_words &group) {
    return load_relaxed32(&((const tu_cuda_words *)group.words)->fault) != 0;
}

static __device__ __noinline__ void tell_host(tu_cuda_fault *host, const tu_cuda_fault &what) {
    host->peer = what.peer;
    host->mine = what.mine;
    host->theirs = what.theirs;
    host->operation = what.operation;
    host->channel = what.channel;
    host->sequence = what.sequence;
    __threadfence_system();
    store_release32(&host->code, what.code); /* pairs with the host's acquire load in tu_cuda_check */
}

static __device__ __noinline__ void raise_fault(const tu_cuda_group_words &group, const tu_cuda_fault &what) {
    if (atomicCAS(&((tu_cuda_words *)group.words)->fault, 0u, what.code) == 0)
        tell_host(&((tu_cuda_report *)group.report)->fault, what);
}

/* A signal ran out of time: the host hears of it, and nothing ends. */
static __device__ __noinline__ void raise_expired(const tu_cuda_group_words &group, tu_cuda_fault what) {
    what.code = atomicAdd(&((tu_cuda_words *)group.words)->expired, 1u) + 1;
    tell_host(&((tu_cuda_report *)group.report)->expired, what);
}

/* The last thing a thread block does, by one of its threads after the others are done: streams that follow this one
 * wait for it. */
static __device__ __forceinline__ void count_end(const tu_cuda_group_words &group) {
    if (group.place != 0)
        add_release64(&((tu_cuda_words *)group.words)->ended, 1); /* pairs with the acquire in tutti_follow */
}

/* The first thing that a kernel of a group does, before it looks at any memory. Where its launch overlaps it waits
 * until the kernel in front of it on the stream has ended. Its stream is behind what the group launched before, so it
 * finds all of that ended, which costs one load, on its way together with the epoch's. Only where the program gave a
 * stream back, and got another with the same handle, may there be something to wait for. */
static __device__ __forceinline__ void await_order(const tu_cuda_group_words &group, uint64_t timeout_ns) {
    await_kernel_before();
    const uint64_t *ended = &((const tu_cuda_words *)group.words)->ended;
    if (group.place == 0 || load_relaxed64_gpu(ended) >= group.place - 1)
        return;
    uint64_t deadline = global_time() + timeout_ns;
    while (load_acquire64_gpu(ended) < group.place - 1 && !has_fault(group) && global_time() < deadline)
        ;
}

/* ---- meeting ---- */

static __device__ __forceinline__ tu_cuda_inbox *inbox_at(const tu_cuda_meeting &meeting, uint32_t block, int owner,
                                                          int sender) {
    tu_cuda_inbox *inbox = (tu_cuda_inbox *)(meeting.control + (uint64_t)owner * meeting.stride + meeting.inbox_offset);
    return inbox + (uint64_t)block * meeting.size + sender;
}

static __device__ __forceinline__ tu_cuda_inbox *inbox_of(const tu_cuda_meeting &meeting, int owner, int sender) {
    return inbox_at(meeting, blockIdx.x, owner, sender);
}

/* The first packet from `source` to `owner` in a step of the operation with this epoch. */
static __device__ __forceinline__ tu_cuda_packet *packets_at(const tu_cuda_meeting &meeting, int owner, int source,
                                                             uint32_t epoch, int step) {
    tu_cuda_packet *packets = (tu_cuda_packet *)(meeting.control + (uint64_t)owner * meeting.stride + meeting.packets);
    uint64_t row = ((epoch & 1) * TU_CUDA_PACKET_STEPS + step) * meeting.size + source;
    return packets + row * meeting.packet_room;
}

static __device__ __forceinline__ uint8_t *resolve(const tu_cuda_meeting &meeting, int member, uint64_t code) {
    const tu_cuda_mapping *mapping = (const tu_cuda_mapping *)meeting.table + TU_CUDA_CODE_INDEX(code);
    return (uint8_t *)(mapping->base + (uint64_t)member * mapping->stride + TU_CUDA_CODE_OFFSET(code));
}

/* A thread block's place in its sequence of barriers, kept in device memory between kernels. */
struct meeting_epoch {
    tu_cuda_epoch *word;
    uint32_t value;
    bool whole; /* the thread block has left no operation on the way; all its threads say the same */

    __device__ explicit meeting_epoch(const tu_cuda_meeting &meeting)
        : word((tu_cuda_epoch *)meeting.epochs + blockIdx.x) {
        await_order(meeting.group, meeting.timeout_ns);
        uint64_t found = load_relaxed64_gpu((const uint64_t *)word);
        value = (uint32_t)found;
        whole = found >> 32 == 0;
    }
    /* Ends the thread block's part of the operation. */
    __device__ void keep(const tu_cuda_meeting &meeting) {
        __syncthreads();
        if (threadIdx.x != 0)
            return;
        word->value = value;
        if (!whole)
            word->left = ((tu_cuda_epoch *)meeting.packet_epochs + blockIdx.x)->left = 1;
        count_end(meeting.group);
    }
};

/* Whether a peer that does not come has begun a reduction by packets instead: then its signature is *theirs. */
static __device__ __noinline__ bool sends_packets(const tu_cuda_meeting &meeting, int peer, uint32_t *theirs) {
    uint64_t data, flag;
    uint32_t next = load_relaxed32((const uint32_t *)meeting.packet_epochs) + 1;
    for (int step = 0; step < TU_CUDA_PACKET_STEPS; step++) {
        load_relaxed128(packets_at(meeting, meeting.rank, peer, next, step), data, flag);
        *theirs = (uint32_t)flag;
        if ((uint32_t)(flag >> 32) == next)
            return true;
    }
    return false;
}

static __device__ __forceinline__ void load_entry(const tu_cuda_meeting &meeting, const tu_cuda_inbox *entry,
                                                  uint64_t &flag, uint64_t &plan) {
    if (meeting.together)
        load_acquire128_gpu(&entry->flag, flag, plan);
    else
        load_acquire128(&entry->flag, flag, plan);
}

/* Waits until peer's entry has reached the epoch; 0: a fault. */
static __device__ __forceinline__ int await_peer(const tu_cuda_meeting &meeting, uint32_t epoch, int peer,
                                                 uint64_t *plan) {
    const tu_cuda_inbox *mine = inbox_of(meeting, meeting.rank, peer);
    uint64_t flag, deadline = 0;
    for (uint32_t spins = 0;; spins++) {
        load_entry(meeting, mine, flag, *plan);
        if ((int32_t)((uint32_t)(flag >> 32) - epoch) >= 0)
            break;
        if ((spins & 63) != 63)
            continue;
        if (has_fault(meeting.group))
            return 0;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + meeting.timeout_ns;
        if (now > deadline) {
            raise_fault(meeting.group, { TU_CUDA_FAULT_TIMEOUT, (uint32_t)peer, meeting.signature, 0, meeting.operation,
                                         0, meeting.sequence });
            return 0;
        }
        uint32_t theirs;
        if (!sends_packets(meeting, peer, &theirs))
            continue;
        load_entry(meeting, mine, flag, *plan); /* it may have come meanwhile, and gone on */
        if ((int32_t)((uint32_t)(flag >> 32) - epoch) >= 0)
            break;
        raise_fault(meeting.group, { TU_CUDA_FAULT_MISMATCH, (uint32_t)peer, meeting.signature, theirs,
                                     meeting.operation, 0, meeting.sequence });
        return 0;
    }
    if ((uint32_t)(flag >> 32) == epoch && (uint32_t)flag != meeting.signature) {
        raise_fault(meeting.group, { TU_CUDA_FAULT_MISMATCH, (uint32_t)peer, meeting.signature, (uint32_t)flag,
                                     meeting.operation, 0, meeting.sequence });
        return 0;
    }
    return 1;
}

/* The first meeting of a kernel, by all threads of the block: nothing was stored by this kernel yet, so nothing has to
 * be released; what earlier kernels of the stream stored is visible since they ended. 0: a fault; leave the kernel. 1:
 * met; 2: met, and all have the same plan as this rank. */
static __device__ int meet_first(const tu_cuda_meeting &meeting, meeting_epoch &epoch) {
    epoch.value++;
    int good = epoch.whole, same = 1;
    if (good && (int)threadIdx.x < meeting.size) {
        uint64_t plan;
        store_relaxed128(&inbox_of(meeting, threadIdx.x, meeting.rank)->flag,
                         (uint64_t)epoch.value << 32 | meeting.signature, meeting.plan);
        good = await_peer(meeting, epoch.value, threadIdx.x, &plan);
        same = plan == meeting.plan && plan != 0;
    }
    /* After this the thread block of this number is on the device everywhere. When all say so, the next kernel takes no
     * place that one of this operation would need. */
    same = __syncthreads_and(good & same);
    let_next_kernel_come();
    if (same)
        return 2;
    epoch.whole = __syncthreads_and(good) != 0;
    return epoch.whole;
}

/* The first half of a meeting, by all threads of the block after a barrier of theirs: what they stored and loaded
 * before it comes before what any peer does after the meeting. With `publish`, thread t also hands something to peer t.
 */
template <class Publish>
static __device__ void arrive(const tu_cuda_meeting &meeting, meeting_epoch &epoch, Publish publish) {
    epoch.value++;
    if (!epoch.whole || (int)threadIdx.x >= meeting.size)
        return;
    tu_cuda_inbox *theirs = inbox_of(meeting, threadIdx.x, meeting.rank);
    uint64_t flag = (uint64_t)epoch.value << 32 | meeting.signature;
    publish(theirs, (int)threadIdx.x);
    if (meeting.together)
        store_release64_gpu(&theirs->flag, flag);
    else
        store_release64(&theirs->flag, flag);
}

/* The second half. False: a fault; leave the kernel. */
static __device__ bool await_all(const tu_cuda_meeting &meeting, meeting_epoch &epoch) {
    int good = epoch.whole;
    uint64_t plan;
    if (good && (int)threadIdx.x < meeting.size)
        good = await_peer(meeting, epoch.value, threadIdx.x, &plan);
    epoch.whole = __syncthreads_and(good) != 0;
    return epoch.whole;
}

template <class Publish>
static __device__ bool meet(const tu_cuda_meeting &meeting, meeting_epoch &epoch, Publish publish) {
    __syncthreads(); /* all of the block's loads and stores come before the flag */
    arrive(meeting, epoch, publish);
    return await_all(meeting, epoch);
}

static __device__ bool meet(const tu_cuda_meeting &meeting, meeting_epoch &epoch) {
    return meet(meeting, epoch, [](tu_cuda_inbox *, int) {});
}

/* ---- element types: storage, accumulator, and the way between them; exactly the arithmetic of tutti/dtype.h ---- */

template <class Storage> struct plain {
    typedef Storage storage;
    typedef Storage accumulator;
    static __device__ Storage load(Storage x) {
        return x;
    }
    static __device__ Storage store(Storage x) {
        return x;
    }
};
struct as_f64 : plain<double> {};
struct as_f32 : plain<float> {};
struct as_f16 {
    typedef uint16_t storage;
    typedef float accumulator;
    static __device__ float load(uint16_t x) {
        return __half2float(__ushort_as_half(x));
    }
    static __device__ uint16_t store(float x) {
        return __half_as_ushort(__float2half_rn(x));
    }
};
struct as_bf16 {
    typedef uint16_t storage;
    typedef float accumulator;
    static __device__ float load(uint16_t x) {
        return __uint_as_float((uint32_t)x << 16);
    }
    static __device__ uint16_t store(float x) {
        return tu_f32_to_bf16(x);
    }
};
struct as_e4m3 {
    typedef uint8_t storage;
    typedef float accumulator;
    static __device__ float load(uint8_t x) {
        return tu_e4m3_to_f32(x);
    }
    static __device__ uint8_t store(float x) {
        return tu_f32_to_e4m3(x);
    }
};
struct as_e5m2 {
    typedef uint8_t storage;
    typedef float accumulator;
    static __device__ float load(uint8_t x) {
        return __half2float(__ushort_as_half((unsigned short)(x << 8)));
    }
    static __device__ uint8_t store(float x) {
        return tu_f32_to_e5m2(x);
    }
};
struct as_bool {
    typedef uint8_t storage;
    typedef uint8_t accumulator;
    static __device__ uint8_t load(uint8_t x) {
        return x != 0;
    }
    static __device__ uint8_t store(uint8_t x) {
        return x;
    }
};

template <class Float> static __device__ __forceinline__ Float min_float(Float first, Float second) {
    if (first != first || second != second)
        return first + second;
    if (first == second) /* only zeros differ in bits */
        return signbit(first) ? first : second;
    return first < second ? first : second;
}

/* Reductions as the kernels switch on them; numbers are those of tutti_reduction. */
enum {
    OP_SUM = 65,
    OP_AVG = 66,
    OP_PRODUCT = 67,
    OP_MIN = 68,
    OP_MAX = 69,
    OP_BAND = 70,
    OP_BOR = 71,
    OP_BXOR = 72,
    OP_PREMUL_SUM = 73
};

static __device__ __forceinline__ float combine(as_f32, int reduction, float sum, float x) {
    switch (reduction) {
    case OP_PRODUCT:
        return __fmul_rn(sum, x);
    case OP_MIN:
        return min_float(sum, x);
    case OP_MAX:
        return -min_float(-sum, -x);
    default:
        return __fadd_rn(sum, x);
    }
}

static __device__ __forceinline__ double combine(as_f64, int reduction, double sum, double x) {
    switch (reduction) {
    case OP_PRODUCT:
        return __dmul_rn(sum, x);
    case OP_MIN:
        return min_float(sum, x);
    case OP_MAX:
        return -min_float(-sum, -x);
    default:
        return __dadd_rn(sum, x);
    }
}

static __device__ __forceinline__ uint8_t combine(as_bool, int reduction, uint8_t sum, uint8_t x) {
    switch (reduction) {
    case OP_PRODUCT:
    case OP_MIN:
    case OP_BAND:
        return sum & x;
    case OP_BXOR:
        return sum ^ x;
    default:
        return sum | x;
    }
}

template <class Integer>
static __device__ __forceinline__ Integer combine(plain<Integer>, int reduction, Integer sum, Integer x) {
    switch (reduction) {
    case OP_PRODUCT:
        return (Integer)((uint64_t)sum * (uint64_t)x);
    case OP_MIN:
        return sum < x ? sum : x;
    case OP_MAX:
        return sum > x ? sum : x;
    case OP_BAND:
        return sum & x;
    case OP_BOR:
        return sum | x;
    case OP_BXOR:
        return sum ^ x;
    default:
        return (Integer)((uint64_t)sum + (uint64_t)x);
    }
}

static __device__ __forceinline__ float finish(as_f32, int reduction, float sum, int ranks) {
    return reduction == OP_AVG ? __fdiv_rn(sum, (float)ranks) : sum;
}
static __device__ __forceinline__ double finish(as_f64, int reduction, double sum, int ranks) {
    return reduction == OP_AVG ? __ddiv_rn(sum, (double)ranks) : sum;
}
static __device__ __forceinline__ uint8_t finish(as_bool, int, uint8_t sum, int) {
    return sum;
}
template <class Integer>
static __device__ __forceinline__ Integer finish(plain<Integer>, int reduction, Integer sum, int ranks) {
    return reduction == OP_AVG ? (Integer)(sum / (Integer)ranks) : sum;
}

static __device__ __forceinline__ float scale(as_f32, float x, double factor) {
    return __fmul_rn(x, (float)factor);
}
static __device__ __forceinline__ double scale(as_f64, double x, double factor) {
    return __dmul_rn(x, factor);
}

/* KERNEL(name, type) for each element type. */
/* clang-format off */
#define TU_CUDA_EACH_TYPE(KERNEL) \
    KERNEL(f64, as_f64)          \
    KERNEL(f32, as_f32)          \
    KERNEL(f16, as_f16)          \
    KERNEL(bf16, as_bf16)        \
    KERNEL(e4m3, as_e4m3)        \
    KERNEL(e5m2, as_e5m2)        \
    KERNEL(i8, plain<int8_t>)    \
    KERNEL(i16, plain<int16_t>)  \
    KERNEL(i32, plain<int32_t>)  \
    KERNEL(i64, plain<int64_t>)  \
    KERNEL(u8, plain<uint8_t>)   \
    KERNEL(u16, plain<uint16_t>) \
    KERNEL(u32, plain<uint32_t>) \
    KERNEL(u64, plain<uint64_t>) \
    KERNEL(boolean, as_bool)
/* clang-format on */

#endif
