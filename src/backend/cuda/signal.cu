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

/* Waits until *word has reached `value`; false: a fault. */
static __device__ bool await(const tu_cuda_signal_args &a, const uint32_t *word, uint32_t value, int peer) {
    uint64_t deadline = 0;
    for (uint32_t spins = 0;; spins++) {
        if ((int32_t)(load_acquire32(word) - value) >= 0)
            return true;
        if ((spins & 63) != 63)
            continue;
        if (load_relaxed32(&((const tu_cuda_fault *)a.fault)->code) != 0)
            return false;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + a.timeout_ns;
        if (now > deadline) {
            raise_fault(a.fault, a.host_fault, TU_CUDA_FAULT_TIMEOUT, peer, 0, 0, a.operation, a.channel, 0);
            return false;
        }
    }
}

extern "C" __global__ void tutti_signal(const __grid_constant__ tu_cuda_signal_args a) {
    if (load_relaxed32(&((const tu_cuda_fault *)a.fault)->code) != 0)
        return;
    tu_cuda_signal *local = (tu_cuda_signal *)a.local + (uint64_t)a.channel * a.size;
    if (a.kind == TU_CUDA_SIGNAL_PUT) {
        tu_cuda_signal *mine = local + a.peer;
        if (await(a, &signal_at(a, a.rank, a.peer)->taken, mine->sent, a.peer)) { /* the slot is free */
            __threadfence_system(); /* everything that earlier kernels of this stream stored comes before the signal */
            store_release32(&signal_at(a, a.peer, a.rank)->sent, ++mine->sent);
        }
    } else if (a.kind == TU_CUDA_SIGNAL_WAIT) {
        tu_cuda_signal *mine = local + a.peer;
        if (await(a, &signal_at(a, a.rank, a.peer)->sent, mine->taken + 1, a.peer)) {
            store_release32(&signal_at(a, a.peer, a.rank)->taken, ++mine->taken);
            __threadfence_system();
        }
    } else {
        uint32_t *epochs = (uint32_t *)((tu_cuda_signal *)a.local + (uint64_t)a.channels * a.size);
        uint32_t epoch = epochs[a.channel] + 1;
        __syncthreads();
        if (threadIdx.x < (unsigned)a.size) {
            __threadfence_system();
            store_release32(barrier_at(a, threadIdx.x, a.rank), epoch);
            await(a, barrier_at(a, a.rank, threadIdx.x), epoch, threadIdx.x);
        }
        __syncthreads();
        if (threadIdx.x == 0)
            epochs[a.channel] = epoch;
        __threadfence_system();
    }
}
