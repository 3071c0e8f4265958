/* SPDX-License-Identifier: Apache-2.0
 *
 * Small all-reduces: 8 bytes of data and a flag arrive together, as one store of 16 bytes, so nobody waits for anything
 * but the data, and nobody has to be waited for before a buffer is used again: what peers read are copies.
 *
 * In one step, everybody sends everything to everybody and reduces it. In two, rank r gets everybody's slice r, reduces
 * it and sends the result to all. Every element is added in rank order in the accumulator of tutti/dtype.h: the same
 * bits as the CPU's serial loop.
 *
 * Budget: besides the launch, one load of the epoch (together with the data's), and one store and one polled load per
 * peer and step. Twice the bytes travel; that pays as long as they are few.
 */
#include "device.cuh"

#define TOGETHER 8 /* sources whose packets are polled together */

struct packet_call {
    uint32_t epoch;
    uint64_t flag;
    uint64_t chunks; /* of 8 bytes, the last perhaps not full */
    uint64_t slice;  /* chunks of one rank's slice */
    uint64_t lane, lanes;
    bool aligned_in, aligned_out;
};

/* ---- chunks of 8 bytes ---- */

template <class Type>
static __device__ __forceinline__ uint64_t load_chunk(const tu_cuda_packet_args &args, const packet_call &call,
                                                      uint64_t chunk) {
    typedef typename Type::storage storage;
    constexpr int lanes = 8 / sizeof(storage);
    const uint8_t *at = (const uint8_t *)args.in + chunk * 8;
    if (call.aligned_in && (chunk + 1) * lanes <= args.count)
        return *(const uint64_t *)at;
    union {
        uint64_t chunk;
        storage elements[lanes];
    } in;
    in.chunk = 0;
#pragma unroll
    for (int lane = 0; lane < lanes; lane++)
        if (chunk * lanes + lane < args.count)
            in.elements[lane] = ((const storage *)at)[lane];
    return in.chunk;
}

template <class Type>
static __device__ __forceinline__ void store_chunk(const tu_cuda_packet_args &args, const packet_call &call,
                                                   uint64_t chunk, uint64_t value) {
    typedef typename Type::storage storage;
    constexpr int lanes = 8 / sizeof(storage);
    uint8_t *at = (uint8_t *)args.out + chunk * 8;
    if (call.aligned_out && (chunk + 1) * lanes <= args.count) {
        *(uint64_t *)at = value;
        return;
    }
    union {
        uint64_t chunk;
        storage elements[lanes];
    } out;
    out.chunk = value;
#pragma unroll
    for (int lane = 0; lane < lanes; lane++)
        if (chunk * lanes + lane < args.count)
            ((storage *)at)[lane] = out.elements[lane];
}

template <class Type>
static __device__ __forceinline__ void
unpack_chunk(uint64_t chunk, typename Type::accumulator (&x)[8 / sizeof(typename Type::storage)]) {
    constexpr int lanes = 8 / sizeof(typename Type::storage);
    union {
        uint64_t chunk;
        typename Type::storage elements[lanes];
    } in;
    in.chunk = chunk;
#pragma unroll
    for (int lane = 0; lane < lanes; lane++)
        x[lane] = Type::load(in.elements[lane]);
}

/* ---- packets ---- */

static __device__ __forceinline__ void send_packet(const tu_cuda_meeting &meeting, const packet_call &call, int to,
                                                   int step, uint64_t index, uint64_t data) {
    tu_cuda_packet *packet = packets_at(meeting, to, meeting.rank, call.epoch, step) + index;
    store_relaxed128(&packet->data, data, call.flag);
}

/* Whether a wait may go on: no fault, time left, and the peer has not begun another operation that needs this rank. */
static __device__ __noinline__ bool may_wait(const tu_cuda_meeting &meeting, const tu_cuda_packet *missing, int peer,
                                             uint32_t epoch, uint64_t *deadline) {
    if (has_fault(meeting.group))
        return false;
    uint64_t now = global_time(), data, flag, plan;
    if (*deadline == 0)
        *deadline = now + meeting.timeout_ns;
    if (now > *deadline) {
        raise_fault(meeting.group, { TU_CUDA_FAULT_TIMEOUT, (uint32_t)peer, meeting.signature, 0, meeting.operation, 0,
                                     meeting.sequence });
        return false;
    }
    load_entry(meeting, inbox_at(meeting, 0, meeting.rank, peer), flag, plan);
    if ((uint32_t)(flag >> 32) != load_relaxed32((const uint32_t *)meeting.epochs) + 1)
        return true;
    uint32_t theirs = (uint32_t)flag;
    load_relaxed128(missing, data, flag);
    if ((uint32_t)(flag >> 32) == epoch) /* it came meanwhile, and its sender went on */
        return true;
    raise_fault(meeting.group, { TU_CUDA_FAULT_MISMATCH, (uint32_t)peer, meeting.signature, theirs, meeting.operation,
                                 0, meeting.sequence });
    return false;
}

/* Waits for packet `index` of those of the sources from..from + 7 that `wanted` has a bit for. */
static __device__ __forceinline__ bool take_packets(const tu_cuda_meeting &meeting, const packet_call &call, int from,
                                                    uint32_t wanted, int step, uint64_t index,
                                                    uint64_t (&data)[TOGETHER]) {
    const tu_cuda_packet *first = packets_at(meeting, meeting.rank, from, call.epoch, step) + index;
    uint64_t flag[TOGETHER], deadline = 0;
    uint32_t missing = wanted;
    for (uint32_t spins = 0; missing != 0; spins++) {
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if ((wanted >> i & 1) != 0)
                load_relaxed128(first + i * meeting.packet_room, data[i], flag[i]);
        missing = 0;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if ((wanted >> i & 1) != 0 && (uint32_t)(flag[i] >> 32) != call.epoch)
                missing |= 1u << i;
        if (missing == 0 || (spins & 63) != 63)
            continue;
        int late = __ffs(missing) - 1;
        if (!may_wait(meeting, first + late * meeting.packet_room, from + late, call.epoch, &deadline))
            return false;
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
        if ((wanted >> i & 1) == 0 || flag[i] == call.flag)
            continue;
        raise_fault(meeting.group, { TU_CUDA_FAULT_MISMATCH, (uint32_t)(from + i), meeting.signature, (uint32_t)flag[i],
                                     meeting.operation, 0, meeting.sequence });
        return false;
    }
    return true;
}

/* Adds packet `index` of all sources in their order; this rank's own is `mine`. */
template <class Type>
static __device__ __forceinline__ bool reduce_packets(const tu_cuda_packet_args &args, const packet_call &call,
                                                      uint64_t index, uint64_t mine, uint64_t *result) {
    typedef typename Type::storage storage;
    typedef typename arithmetic_of<Type>::type arithmetic;
    constexpr int lanes = 8 / sizeof(storage);
    const tu_cuda_meeting &meeting = args.meeting;
    typename Type::accumulator sum[lanes], x[lanes];
    for (int from = 0; from < meeting.size; from += TOGETHER) {
        uint64_t data[TOGETHER];
        int count = min(TOGETHER, meeting.size - from);
        uint32_t all = (1u << count) - 1, own = (uint32_t)(meeting.rank - from);
        if (!take_packets(meeting, call, from, own < TOGETHER ? all & ~(1u << own) : all, 0, index, data))
            return false;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            if (i >= count)
                continue;
            unpack_chunk<Type>(i == (int)own ? mine : data[i], x);
#pragma unroll
            for (int lane = 0; lane < lanes; lane++)
                sum[lane] = from + i == 0 ? x[lane] : combine(arithmetic(), OP_SUM, sum[lane], x[lane]);
        }
    }
    union {
        uint64_t chunk;
        storage elements[lanes];
    } out;
#pragma unroll
    for (int lane = 0; lane < lanes; lane++)
        out.elements[lane] = Type::store(finish(arithmetic(), args.reduction, sum[lane], meeting.size));
    *result = out.chunk;
    return true;
}

/* ---- one step and two ---- */

template <class Type> static __device__ bool in_one_step(const tu_cuda_packet_args &args, const packet_call &call) {
    const tu_cuda_meeting &meeting = args.meeting;
    for (uint64_t chunk = call.lane; chunk < call.chunks; chunk += call.lanes) {
        uint64_t mine = load_chunk<Type>(args, call, chunk);
        for (int i = 1; i < meeting.size; i++) { /* each rank begins with another peer */
            int peer = meeting.rank + i < meeting.size ? meeting.rank + i : meeting.rank + i - meeting.size;
            send_packet(meeting, call, peer, 0, chunk, mine);
        }
    }
    for (uint64_t chunk = call.lane; chunk < call.chunks; chunk += call.lanes) {
        uint64_t result;
        if (!reduce_packets<Type>(args, call, chunk, load_chunk<Type>(args, call, chunk), &result))
            return false;
        store_chunk<Type>(args, call, chunk, result);
        let_next_kernel_come(); /* the thread block of this number is on the device everywhere: it sent this chunk */
    }
    return true;
}

/* The results of the other ranks' slices. */
template <class Type>
static __device__ bool collect(const tu_cuda_packet_args &args, const packet_call &call, uint64_t index) {
    const tu_cuda_meeting &meeting = args.meeting;
    for (int from = 0; from < meeting.size; from += TOGETHER) {
        uint64_t data[TOGETHER];
        uint32_t wanted = 0;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (from + i < meeting.size && from + i != meeting.rank && (from + i) * call.slice + index < call.chunks)
                wanted |= 1u << i;
        if (!take_packets(meeting, call, from, wanted, 1, index, data))
            return false;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if ((wanted >> i & 1) != 0)
                store_chunk<Type>(args, call, (from + i) * call.slice + index, data[i]);
    }
    return true;
}

/* Sending is shared out by (peer, chunk): a thread that had a chunk of every peer would load them one after the other,
 * which takes half a microsecond each. In and out may be the same: a result can only come for a chunk that was loaded
 * and sent before. */
template <class Type> static __device__ bool in_two_steps(const tu_cuda_packet_args &args, const packet_call &call) {
    const tu_cuda_meeting &meeting = args.meeting;
    const uint64_t own = meeting.rank * call.slice;
    const uint32_t slice = (uint32_t)call.slice, packets = slice * (uint32_t)(meeting.size - 1);
    for (uint32_t packet = (uint32_t)call.lane; packet < packets; packet += (uint32_t)call.lanes) {
        uint32_t ahead = packet / slice, index = packet - ahead * slice;
        int next = meeting.rank + 1 + (int)ahead, peer = next < meeting.size ? next : next - meeting.size;
        uint64_t chunk = peer * call.slice + index;
        if (chunk < call.chunks)
            send_packet(meeting, call, peer, 0, index, load_chunk<Type>(args, call, chunk));
    }
    for (uint64_t index = call.lane; index < call.slice && own + index < call.chunks; index += call.lanes) {
        uint64_t result;
        if (!reduce_packets<Type>(args, call, index, load_chunk<Type>(args, call, own + index), &result))
            return false;
        for (int i = 1; i < meeting.size; i++) {
            int peer = meeting.rank + i < meeting.size ? meeting.rank + i : meeting.rank + i - meeting.size;
            send_packet(meeting, call, peer, 1, index, result);
        }
        store_chunk<Type>(args, call, own + index, result);
    }
    for (uint64_t index = call.lane; index < call.slice; index += call.lanes)
        if (!collect<Type>(args, call, index))
            return false;
    return true;
}

template <class Type> static __device__ void packets_body(const tu_cuda_packet_args &args) {
    constexpr uint64_t lanes = 8 / sizeof(typename Type::storage);
    const tu_cuda_meeting &meeting = args.meeting;
    tu_cuda_epoch *epochs = (tu_cuda_epoch *)meeting.packet_epochs, *meetings = (tu_cuda_epoch *)meeting.epochs;
    await_order(meeting.group, meeting.timeout_ns);
    packet_call call;
    const uint64_t found = load_relaxed64_gpu((const uint64_t *)(epochs + blockIdx.x));
    bool whole = found >> 32 == 0;
    call.epoch = (uint32_t)found + 1;
    call.flag = (uint64_t)call.epoch << 32 | meeting.signature;
    call.chunks = (args.count + lanes - 1) / lanes;
    call.slice = (call.chunks + meeting.size - 1) / meeting.size;
    call.lane = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    call.lanes = (uint64_t)gridDim.x * blockDim.x;
    call.aligned_in = (args.in & 7) == 0;
    call.aligned_out = (args.out & 7) == 0;
    if (whole)
        whole = args.steps == 1 ? in_one_step<Type>(args, call) : in_two_steps<Type>(args, call);
    whole = __syncthreads_and(whole) != 0; /* all have read the epoch, and are done */
    let_next_kernel_come();                /* everything came, so everybody's thread blocks are on the device */
    /* Each word is one block's to write, whatever the number of blocks, and only that block reads it before. */
    for (uint32_t block = blockIdx.x + threadIdx.x * gridDim.x; block < TU_CUDA_PACKET_BLOCKS;
         block += blockDim.x * gridDim.x) {
        epochs[block].value = call.epoch;
        if (!whole)
            epochs[block].left = meetings[block].left = 1;
    }
    if (meeting.group.place != 0) {
        __syncthreads();
        if (threadIdx.x == 0)
            count_end(meeting.group);
    }
}

#define PACKETS(name, type)                                                      \
    extern "C" __global__ void __launch_bounds__(TU_CUDA_PACKET_THREADS, 2)      \
        tutti_packets_##name(const __grid_constant__ tu_cuda_packet_args args) { \
        packets_body<type>(args);                                                \
    }
TU_CUDA_EACH_TYPE(PACKETS)
