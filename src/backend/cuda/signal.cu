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

static __device__ __forceinline__ tu_cuda_signal *signal_at(const tu_cuda_signal_args &args, int owner, int peer) {
    return (tu_cuda_signal *)(args.areas + (uint64_t)owner * args.stride) + (uint64_t)args.channel * args.size + peer;
}

static __device__ __forceinline__ uint32_t *barrier_at(const tu_cuda_signal_args &args, int owner, int peer) {
    uint32_t *words = (uint32_t *)((tu_cuda_signal *)(args.areas + (uint64_t)owner * args.stride) +
                                   (uint64_t)args.channels * args.size);
    return words + (uint64_t)args.channel * args.size + peer;
}

/* Waits until *word has reached `value`; false: a fault, or no more time. */
static __device__ bool await(const tu_cuda_signal_args &args, const uint32_t *word, uint32_t value, int peer) {
    uint64_t deadline = 0;
    for (uint32_t spins = 0;; spins++) {
        if ((int32_t)(load_acquire32(word) - value) >= 0)
            return true;
        if ((spins & 63) != 63)
            continue;
        if (has_fault(args.group))
            return false;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + args.timeout_ns;
        if (now > deadline) {
            tu_cuda_fault what = { TU_CUDA_FAULT_TIMEOUT, (uint32_t)peer,         0, 0,
                                   args.operation,        (uint32_t)args.channel, 0 };
            if (args.kind == TU_CUDA_SIGNAL_BARRIER)
                raise_fault(args.group, what);
            else
                raise_expired(args.group, what); /* ends this wait alone */
            return false;
        }
    }
}

static __device__ void put_signal(const tu_cuda_signal_args &args, tu_cuda_signal *mine) {
    if (await(args, &signal_at(args, args.rank, args.peer)->taken, mine->sent, args.peer)) { /* the slot is free */
        __threadfence_system(); /* everything that earlier kernels of this stream stored comes before the signal */
        store_release32(&signal_at(args, args.peer, args.rank)->sent, ++mine->sent);
    }
}

static __device__ void take_signal(const tu_cuda_signal_args &args, tu_cuda_signal *mine) {
    store_release32(&signal_at(args, args.peer, args.rank)->taken, ++mine->taken);
    __threadfence_system();
}

static __device__ void test_signal(const tu_cuda_signal_args &args, tu_cuda_signal *mine) {
    bool there = (int32_t)(load_acquire32(&signal_at(args, args.rank, args.peer)->sent) - mine->taken) > 0;
    if (there)
        take_signal(args, mine);
    store_release32((uint32_t *)args.answer, there);
}

static __device__ void barrier(const tu_cuda_signal_args &args) {
    uint32_t *epochs = (uint32_t *)((tu_cuda_signal *)args.local + (uint64_t)args.channels * args.size);
    uint32_t epoch = epochs[args.channel] + 1;
    __syncthreads();
    for (int member = threadIdx.x; member < args.size; member += blockDim.x) {
        __threadfence_system();
        store_release32(barrier_at(args, member, args.rank), epoch);
        await(args, barrier_at(args, args.rank, member), epoch, member);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        epochs[args.channel] = epoch;
    __threadfence_system();
}

extern "C" __global__ void tutti_signal(const __grid_constant__ tu_cuda_signal_args args) {
    if (!has_fault(args.group)) {
        tu_cuda_signal *mine =
            (tu_cuda_signal *)args.local + (uint64_t)args.channel * args.size + (args.peer < 0 ? 0 : args.peer);
        if (args.kind == TU_CUDA_SIGNAL_PUT)
            put_signal(args, mine);
        else if (args.kind == TU_CUDA_SIGNAL_TEST)
            test_signal(args, mine);
        else if (args.kind == TU_CUDA_SIGNAL_BARRIER)
            barrier(args);
        else if (await(args, &signal_at(args, args.rank, args.peer)->sent, mine->taken + 1, args.peer))
            take_signal(args, mine);
    } else if (args.kind == TU_CUDA_SIGNAL_TEST) {
        store_release32((uint32_t *)args.answer, 0);
    }
    if (threadIdx.x == 0)
        count_end(args.group);
}
