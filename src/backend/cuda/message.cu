/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives: the sender puts a chunk into its own stage for that receiver and announces it, the receiver
 * copies it out and says so. A message that fits one chunk is on its way when the sender's kernel ends, whether or not
 * the receiver has come; a longer one waits for its receiver.
 *
 * Thread block b of the sender serves thread block b of the receiver: both cut chunks alike, so blocks need not wait
 * for each other. Each (thread block, direction, peer) counts its chunks in the owner's memory.
 */
#include "device.cuh"

static __device__ __forceinline__ tu_cuda_message *message_at(const tu_cuda_message_args &args, uint64_t offset,
                                                              int owner, int peer) {
    tu_cuda_message *entries =
        (tu_cuda_message *)(args.meeting.control + (uint64_t)owner * args.meeting.stride + offset);
    return entries + (uint64_t)blockIdx.x * args.meeting.size + peer;
}

static __device__ __forceinline__ uint8_t *stage_at(const tu_cuda_message_args &args, int sender, int receiver) {
    return (uint8_t *)(args.meeting.control + (uint64_t)sender * args.meeting.stride + args.stage_offset +
                       (uint64_t)receiver * args.share);
}

/* By all threads; one of them waits until *word is `value`. False: a fault. */
static __device__ bool await_count(const tu_cuda_message_args &args, const uint32_t *word, uint32_t value) {
    const tu_cuda_meeting &meeting = args.meeting;
    int good = 1;
    uint64_t deadline = 0;
    for (uint32_t spins = 0; threadIdx.x == 0 && good && load_acquire32(word) != value; spins++) {
        if ((spins & 63) != 63)
            continue;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + meeting.timeout_ns;
        good = !has_fault(meeting.group) && now <= deadline;
        if (now > deadline)
            raise_fault(meeting.group, { TU_CUDA_FAULT_TIMEOUT, (uint32_t)args.peer, meeting.signature, 0,
                                         meeting.operation, 0, meeting.sequence });
    }
    return __syncthreads_and(good) != 0;
}

/* Between the stage and elements that lie apart: bytes [first, first + bytes) of the message. */
template <class Unit>
static __device__ void copy_apart(const tu_cuda_message_args &args, uint8_t *stage, uint64_t first, uint64_t bytes) {
    for (uint64_t i = threadIdx.x * sizeof(Unit); i < bytes; i += blockDim.x * sizeof(Unit)) {
        uint64_t byte = first + i, at = byte / args.block_bytes * args.stride_bytes + byte % args.block_bytes;
        Unit *element = (Unit *)(args.buffer + at);
        if (args.is_send)
            *(Unit *)(stage + i) = *element;
        else
            *element = *(const Unit *)(stage + i);
    }
}

/* Bytes [first, first + bytes) of the message, between the stage and this rank's buffer, by all threads together. */
static __device__ void copy_part(const tu_cuda_message_args &args, uint8_t *stage, uint64_t first, uint64_t bytes) {
    uint8_t *buffer = (uint8_t *)args.buffer + first;
    uint64_t bits = args.block_bytes | args.stride_bytes | args.buffer; /* pieces are cut at multiples of 16 */
    if (args.stride_bytes == 0 && args.is_send)
        copy_bytes(stage, buffer, bytes);
    else if (args.stride_bytes == 0)
        copy_bytes(buffer, stage, bytes);
    else if ((bits & 7) == 0)
        copy_apart<uint64_t>(args, stage, first, bytes);
    else if ((bits & 3) == 0)
        copy_apart<uint32_t>(args, stage, first, bytes);
    else
        copy_apart<uint8_t>(args, stage, first, bytes);
}

static __device__ bool send_chunk(const tu_cuda_message_args &args, uint32_t *sent, uint64_t done) {
    const tu_cuda_meeting &meeting = args.meeting;
    if (!await_count(args, &message_at(args, args.taken_offset, meeting.rank, args.peer)->count,
                     *sent)) /* the stage is free */
        return false;
    piece mine = piece_of(args.share, min(args.share, args.bytes - done), 16);
    copy_part(args, stage_at(args, meeting.rank, args.peer) + mine.from, done + mine.from, mine.to - mine.from);
    __syncthreads();
    if (threadIdx.x == 0) {
        tu_cuda_message *entry = message_at(args, args.sent_offset, args.peer, meeting.rank);
        entry->tag = args.tag;
        entry->bytes = args.bytes;
        __threadfence_system();
        store_release32(&entry->count, ++*sent);
    }
    __syncthreads();
    return true;
}

static __device__ bool receive_chunk(const tu_cuda_message_args &args, uint32_t *taken, uint64_t done) {
    const tu_cuda_meeting &meeting = args.meeting;
    const tu_cuda_message *entry = message_at(args, args.sent_offset, meeting.rank, args.peer);
    if (!await_count(args, &entry->count, *taken + 1))
        return false;
    if (entry->tag != args.tag || entry->bytes != args.bytes) {
        if (threadIdx.x == 0)
            raise_fault(meeting.group, { TU_CUDA_FAULT_MISMATCH, (uint32_t)args.peer, (uint32_t)args.tag,
                                         (uint32_t)entry->tag, meeting.operation, 0, meeting.sequence });
        return false;
    }
    piece mine = piece_of(args.share, min(args.share, args.bytes - done), 16);
    copy_part(args, stage_at(args, args.peer, meeting.rank) + mine.from, done + mine.from, mine.to - mine.from);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        store_release32(&message_at(args, args.taken_offset, args.peer, meeting.rank)->count, ++*taken);
    }
    __syncthreads();
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    tutti_message(const __grid_constant__ tu_cuda_message_args args) {
    const tu_cuda_meeting &meeting = args.meeting;
    uint32_t *counter = (uint32_t *)args.counters +
                        ((uint64_t)(args.is_send ? 0 : TU_CUDA_MESSAGE_BLOCKS) + blockIdx.x) * meeting.size + args.peer;
    await_order(meeting.group, meeting.timeout_ns);
    bool good = !has_fault(meeting.group);
    good = __syncthreads_and(good);
    uint64_t done = 0;
    do { /* a message without bytes is one chunk */
        good = good && (args.is_send ? send_chunk(args, counter, done) : receive_chunk(args, counter, done));
        done += args.share;
    } while (good && done < args.bytes);
    __syncthreads();
    if (threadIdx.x == 0)
        count_end(meeting.group);
}
