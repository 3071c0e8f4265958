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

static __device__ __forceinline__ tu_cuda_message *message_at(const tu_cuda_message_args &a, uint64_t offset, int owner,
                                                              int peer) {
    tu_cuda_message *entries = (tu_cuda_message *)(a.meeting.control + (uint64_t)owner * a.meeting.stride + offset);
    return entries + (uint64_t)blockIdx.x * a.meeting.size + peer;
}

static __device__ __forceinline__ uint8_t *stage_at(const tu_cuda_message_args &a, int sender, int receiver) {
    return (uint8_t *)(a.meeting.control + (uint64_t)sender * a.meeting.stride + a.stage_offset +
                       (uint64_t)receiver * a.share);
}

/* By all threads; one of them waits until *word is `value`. False: a fault. */
static __device__ bool await_count(const tu_cuda_message_args &a, const uint32_t *word, uint32_t value) {
    const tu_cuda_meeting &m = a.meeting;
    int good = 1;
    uint64_t deadline = 0;
    for (uint32_t spins = 0; threadIdx.x == 0 && good && load_acquire32(word) != value; spins++) {
        if ((spins & 63) != 63)
            continue;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + m.timeout_ns;
        good = !has_fault(m.group) && now <= deadline;
        if (now > deadline)
            raise_fault(m.group,
                        { TU_CUDA_FAULT_TIMEOUT, (uint32_t)a.peer, m.signature, 0, m.operation, 0, m.sequence });
    }
    return __syncthreads_and(good) != 0;
}

static __device__ bool send_chunk(const tu_cuda_message_args &a, uint32_t *sent, uint64_t done) {
    const tu_cuda_meeting &m = a.meeting;
    if (!await_count(a, &message_at(a, a.taken_offset, m.rank, a.peer)->count, *sent)) /* the stage is free */
        return false;
    piece mine = piece_of(a.share, min(a.share, a.bytes - done), 16);
    copy_bytes(stage_at(a, m.rank, a.peer) + mine.from, (const uint8_t *)a.buffer + done + mine.from,
               mine.to - mine.from);
    __syncthreads();
    if (threadIdx.x == 0) {
        tu_cuda_message *entry = message_at(a, a.sent_offset, a.peer, m.rank);
        entry->tag = a.tag;
        entry->bytes = a.bytes;
        __threadfence_system();
        store_release32(&entry->count, ++*sent);
    }
    __syncthreads();
    return true;
}

static __device__ bool receive_chunk(const tu_cuda_message_args &a, uint32_t *taken, uint64_t done) {
    const tu_cuda_meeting &m = a.meeting;
    const tu_cuda_message *entry = message_at(a, a.sent_offset, m.rank, a.peer);
    if (!await_count(a, &entry->count, *taken + 1))
        return false;
    if (entry->tag != a.tag || entry->bytes != a.bytes) {
        if (threadIdx.x == 0)
            raise_fault(m.group, { TU_CUDA_FAULT_MISMATCH, (uint32_t)a.peer, (uint32_t)a.tag, (uint32_t)entry->tag,
                                   m.operation, 0, m.sequence });
        return false;
    }
    piece mine = piece_of(a.share, min(a.share, a.bytes - done), 16);
    copy_bytes((uint8_t *)a.buffer + done + mine.from, stage_at(a, a.peer, m.rank) + mine.from, mine.to - mine.from);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        store_release32(&message_at(a, a.taken_offset, a.peer, m.rank)->count, ++*taken);
    }
    __syncthreads();
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) tutti_message(const __grid_constant__ tu_cuda_message_args a) {
    const tu_cuda_meeting &m = a.meeting;
    uint32_t *counter =
        (uint32_t *)a.counters + ((uint64_t)(a.is_send ? 0 : TU_CUDA_MESSAGE_BLOCKS) + blockIdx.x) * m.size + a.peer;
    bool good = !has_fault(m.group);
    good = __syncthreads_and(good);
    uint64_t done = 0;
    do { /* a message without bytes is one chunk */
        good = good && (a.is_send ? send_chunk(a, counter, done) : receive_chunk(a, counter, done));
        done += a.share;
    } while (good && done < a.bytes);
    __syncthreads();
    if (threadIdx.x == 0)
        count_end(m.group);
}
