/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals and barriers with members that are not mapped: the protocol of backend/cuda/signal.cu, with the words of
 * others written by NVSHMEM. What others wrote lies in this rank's own area, and is read with plain acquiring loads, so
 * that every wait has a deadline; NVSHMEM's own waits have none.
 */
#include <nvshmem.h>
#include <nvshmemx.h>

#include "backend/cuda/device.cuh"
#include "params.h"

enum row {
    SENT,
    TAKEN,
    ARRIVED
};

/* Word [channel][member] of a row, in an area that begins at `area`. */
static __device__ __forceinline__ uint64_t *word_at(const tu_nvshmem_signal_args &args, uint64_t area, row row,
                                                    int member) {
    return (uint64_t *)area + ((uint64_t)row * args.channels + args.channel) * args.size + member;
}

/* This rank's own counters: {sent, taken} for each (channel, member), then a barrier for each channel. */
static __device__ __forceinline__ uint64_t *counter_at(const tu_nvshmem_signal_args &args, int member, int which) {
    uint64_t *counters = (uint64_t *)args.own + 3ull * args.channels * args.size;
    return counters + ((uint64_t)args.channel * args.size + member) * 2 + which;
}

static __device__ __forceinline__ uint64_t *barrier_counter(const tu_nvshmem_signal_args &args) {
    return (uint64_t *)args.own + 5ull * args.channels * args.size + args.channel;
}

/* Tells one member; after everything that this rank put there before. */
static __device__ void tell(const tu_nvshmem_signal_args &args, int member, row row, uint64_t value) {
    const tu_nvshmem_member *to = (const tu_nvshmem_member *)args.members + member;
    uint64_t *word = word_at(args, to->place, row, args.rank);
    nvshmemx_signal_op(word, value, NVSHMEM_SIGNAL_SET, to->pe);
}

/* Waits until *word has reached `value`; false: a fault, or no more time. */
static __device__ bool await(const tu_nvshmem_signal_args &args, const uint64_t *word, uint64_t value, int peer) {
    uint64_t deadline = global_time() + args.timeout_ns;
    for (uint32_t spins = 0; (int64_t)(load_acquire64(word) - value) < 0; spins++) {
        if ((spins & 63) != 63)
            continue;
        if (has_fault(args.group))
            return false;
        if (global_time() > deadline) {
            tu_cuda_fault what = { TU_CUDA_FAULT_TIMEOUT, (uint32_t)peer,         0, 0,
                                   args.operation,        (uint32_t)args.channel, 0 };
            if (args.kind == TU_CUDA_SIGNAL_BARRIER)
                raise_fault(args.group, what);
            else
                raise_expired(args.group, what); /* ends this wait alone */
            return false;
        }
    }
    return true;
}

static __device__ void put_signal(const tu_nvshmem_signal_args &args) {
    uint64_t *sent = counter_at(args, args.peer, 0);
    if (!await(args, word_at(args, args.own, TAKEN, args.peer), *sent, args.peer)) /* until the slot is free */
        return;
    __threadfence_system();
    nvshmem_quiet();
    tell(args, args.peer, SENT, ++*sent);
}

static __device__ void take_signal(const tu_nvshmem_signal_args &args) {
    __threadfence_system();
    tell(args, args.peer, TAKEN, ++*counter_at(args, args.peer, 1));
}

static __device__ void wait_signal(const tu_nvshmem_signal_args &args) {
    if (await(args, word_at(args, args.own, SENT, args.peer), *counter_at(args, args.peer, 1) + 1, args.peer))
        take_signal(args);
}

static __device__ void test_signal(const tu_nvshmem_signal_args &args) {
    bool there = load_acquire64(word_at(args, args.own, SENT, args.peer)) > *counter_at(args, args.peer, 1) &&
                 !has_fault(args.group);
    if (there)
        take_signal(args);
    __threadfence_system();
    store_release32((uint32_t *)args.answer, there);
}

static __device__ void barrier(const tu_nvshmem_signal_args &args) {
    uint64_t epoch = *barrier_counter(args) + 1;
    if (threadIdx.x == 0) {
        __threadfence_system();
        nvshmem_quiet();
    }
    __syncthreads();
    for (int member = threadIdx.x; member < args.size; member += blockDim.x)
        tell(args, member, ARRIVED, epoch);
    for (int member = threadIdx.x; member < args.size; member += blockDim.x)
        await(args, word_at(args, args.own, ARRIVED, member), epoch, member);
    __syncthreads();
    if (threadIdx.x == 0)
        *barrier_counter(args) = epoch;
    __threadfence_system();
}

/* After everything that this rank put before. */
static __device__ void set_word(const tu_nvshmem_signal_args &args) {
    __threadfence_system();
    nvshmem_quiet();
    nvshmemx_signal_op((uint64_t *)args.word, args.value, NVSHMEM_SIGNAL_SET, args.pe);
}

static __device__ void await_word(const tu_nvshmem_signal_args &args) {
    uint64_t found, deadline = global_time() + args.timeout_ns;
    for (uint32_t spins = 0;; spins++) {
        found = load_acquire64((const uint64_t *)args.word);
        if (args.kind == TU_CUDA_SIGNAL_AWAIT_EQUAL ? found == args.value : found >= args.value)
            return;
        if ((spins & 63) != 63)
            continue;
        if (has_fault(args.group))
            return;
        if (global_time() > deadline) {
            raise_expired(args.group, { TU_CUDA_FAULT_TIMEOUT, TU_CUDA_NOBODY, (uint32_t)args.value, (uint32_t)found,
                                        args.operation, 0, 0 });
            return;
        }
    }
}

extern "C" __global__ void tutti_nvshmem_signal(const __grid_constant__ tu_nvshmem_signal_args args) {
    await_order(args.group, args.timeout_ns);
    /* The host may say at any moment that the group has ended. All threads go one way, since those of a barrier wait
     * for each other. */
    const bool ended = __syncthreads_or(has_fault(args.group)) != 0;
    if (args.kind == TU_CUDA_SIGNAL_TEST)
        test_signal(args);
    else if (ended)
        ;
    else if (args.kind >= TU_CUDA_SIGNAL_AWAIT_EQUAL)
        await_word(args);
    else if (args.kind == TU_CUDA_SIGNAL_SET_WORD)
        set_word(args);
    else if (args.kind == TU_CUDA_SIGNAL_PUT)
        put_signal(args);
    else if (args.kind == TU_CUDA_SIGNAL_WAIT)
        wait_signal(args);
    else
        barrier(args);
    if (threadIdx.x == 0)
        count_end(args.group);
}

#include "exchange.cu"
