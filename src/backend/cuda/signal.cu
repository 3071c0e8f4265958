/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals and barriers of a (block, group) on a stream: tiny kernels.
 *
 * A signal is a one-slot mailbox per (channel, sender, receiver) of two single-writer counters: `sent`, in the
 * receiver's area, written by the sender; `taken`, in the sender's area, written by the receiver. Full means sent ==
 * taken + 1. Each side keeps the counter that it writes in its own memory as well, so that nobody reads across the link
 * to know its own state.
 */
#include "device.cuh"

static __device__ __forceinline__ tu_cuda_signal *signal_at(const tu_cuda_signal_args &a, int owner, int peer) {
    return (tu_cuda_signal *)(a.areas + (uint64_t)owner * a.stride) + (uint64_t)a.channel * a.size + peer;
}

static __device__ __forceinline__ uint32_t *barrier_at(const tu_cuda_signal_args &a, int owner, int peer) {
    uint32_t *words =
        (uint32_t *)((tu_cuda_signal *)(a.areas + (uint64_t)owner * a.stride) + (uint64_t)a.channels * a.size);
    return words + (uint64_t)a.channel * a.size + peer;
}

/* Waits until *word has reached `value`; false: a fault, or no more time. */
static __device__ bool await(const tu_cuda_signal_args &a, const uint32_t *word, uint32_t value, int peer) {
    uint64_t deadline = 0;
    for (uint32_t spins = 0;; spins++) {
        if ((int32_t)(load_acquire32(word) - value) >= 0)
            return true;
        if ((spins & 63) != 63)
            continue;
        if (has_fault(a.group))
            return false;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + a.timeout_ns;
        if (now > deadline) {
            tu_cuda_fault what = { TU_CUDA_FAULT_TIMEOUT, (uint32_t)peer, 0, 0, a.operation, (uint32_t)a.channel, 0 };
            if (a.kind == TU_CUDA_SIGNAL_BARRIER)
                raise_fault(a.group, what);
            else
                raise_expired(a.group, what); /* ends this wait alone */
            return false;
        }
    }
}

static __device__ void put_signal(const tu_cuda_signal_args &a, tu_cuda_signal *mine) {
    if (await(a, &signal_at(a, a.rank, a.peer)->taken, mine->sent, a.peer)) { /* the slot is free */
        __threadfence_system(); /* everything that earlier kernels of this stream stored comes before the signal */
        store_release32(&signal_at(a, a.peer, a.rank)->sent, ++mine->sent);
    }
}

static __device__ void take_signal(const tu_cuda_signal_args &a, tu_cuda_signal *mine) {
    store_release32(&signal_at(a, a.peer, a.rank)->taken, ++mine->taken);
    __threadfence_system();
}

static __device__ void test_signal(const tu_cuda_signal_args &a, tu_cuda_signal *mine) {
    bool there = (int32_t)(load_acquire32(&signal_at(a, a.rank, a.peer)->sent) - mine->taken) > 0;
    if (there)
        take_signal(a, mine);
    store_release32((uint32_t *)a.answer, there);
}

static __device__ void barrier(const tu_cuda_signal_args &a) {
    uint32_t *epochs = (uint32_t *)((tu_cuda_signal *)a.local + (uint64_t)a.channels * a.size);
    uint32_t epoch = epochs[a.channel] + 1;
    __syncthreads();
    for (int member = threadIdx.x; member < a.size; member += blockDim.x) {
        __threadfence_system();
        store_release32(barrier_at(a, member, a.rank), epoch);
        await(a, barrier_at(a, a.rank, member), epoch, member);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        epochs[a.channel] = epoch;
    __threadfence_system();
}

extern "C" __global__ void tutti_signal(const __grid_constant__ tu_cuda_signal_args a) {
    if (!has_fault(a.group)) {
        tu_cuda_signal *mine = (tu_cuda_signal *)a.local + (uint64_t)a.channel * a.size + (a.peer < 0 ? 0 : a.peer);
        if (a.kind == TU_CUDA_SIGNAL_PUT)
            put_signal(a, mine);
        else if (a.kind == TU_CUDA_SIGNAL_TEST)
            test_signal(a, mine);
        else if (a.kind == TU_CUDA_SIGNAL_BARRIER)
            barrier(a);
        else if (await(a, &signal_at(a, a.rank, a.peer)->sent, mine->taken + 1, a.peer))
            take_signal(a, mine);
    } else if (a.kind == TU_CUDA_SIGNAL_TEST) {
        store_release32((uint32_t *)a.answer, 0);
    }
    if (threadIdx.x == 0)
        count_end(a.group);
}
