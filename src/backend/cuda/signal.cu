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

static __device__ __forceinline__ uint64_t counter_offset(const tu_cuda_signal_args &args) {
    uint64_t words = (uint64_t)args.channels * args.size;
    return words * (sizeof(tu_cuda_signal) + sizeof(uint32_t)) + args.channel * sizeof(uint32_t);
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

/* ---- numbers of the pad ---- */

static __device__ void set_word(const tu_cuda_signal_args &args) {
    __threadfence_system(); /* everything that earlier kernels of this stream stored comes before the number */
    store_release64((uint64_t *)args.word, args.value); /* pairs with the load in await_word, on another rank */
}

static __device__ void await_word(const tu_cuda_signal_args &args) {
    uint64_t deadline = 0;
    for (uint32_t spins = 0;; spins++) {
        uint64_t found = load_acquire64((const uint64_t *)args.word);
        if (args.kind == TU_CUDA_SIGNAL_AWAIT_EQUAL ? found == args.value : found >= args.value)
            break;
        if ((spins & 63) != 63)
            continue;
        if (has_fault(args.group))
            return;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + args.timeout_ns;
        if (now > deadline) {
            raise_expired(args.group, { TU_CUDA_FAULT_TIMEOUT, TU_CUDA_NOBODY, (uint32_t)args.value, (uint32_t)found,
                                        args.operation, (uint32_t)args.channel, 0 });
            return;
        }
    }
    __threadfence_system();
}

extern "C" __global__ void tutti_signal(const __grid_constant__ tu_cuda_signal_args args) {
    await_order(args.group, args.timeout_ns);
    /* The host may say at any moment that the group has ended. All threads go one way, since those of a barrier wait
     * for each other. */
    if (__syncthreads_and(!has_fault(args.group))) {
        tu_cuda_signal *mine =
            (tu_cuda_signal *)args.local + (uint64_t)args.channel * args.size + (args.peer < 0 ? 0 : args.peer);
        if (args.kind >= TU_CUDA_SIGNAL_AWAIT_EQUAL)
            await_word(args);
        else if (args.kind == TU_CUDA_SIGNAL_SET_WORD)
            set_word(args);
        else if (args.kind == TU_CUDA_SIGNAL_PUT)
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

/* ---- the multicast barrier: one addition reaches the counters of all members ---- */

struct adds_by_switch {
    static __device__ __forceinline__ void add(const tu_cuda_signal_args &args) {
#if __CUDA_ARCH__ >= 900
        asm volatile("multimem.red.release.sys.global.add.u32 [%0], %1;" ::"l"(args.multicast + counter_offset(args)),
                     "r"(1)
                     : "memory");
#else
        __trap(); /* such devices have no multicast: the host never launches this instance there */
#endif
    }
};

struct adds_by_members {
    static __device__ __forceinline__ void add(const tu_cuda_signal_args &args) {
        for (int member = 0; member < args.size; member++) {
            uint64_t counter = args.areas + (uint64_t)member * args.stride + counter_offset(args);
            add_release32((uint32_t *)counter, 1);
        }
    }
};

/* One thread. The counter only grows: barrier number e is over when it has reached e * size, and those who come early
 * to the next one do no harm. */
template <class Access> static __device__ void multicast_barrier(const tu_cuda_signal_args &args) {
    uint32_t *epochs = (uint32_t *)((tu_cuda_signal *)args.local + (uint64_t)args.channels * args.size);
    await_order(args.group, args.timeout_ns);
    if (!has_fault(args.group)) {
        uint32_t epoch = epochs[args.channel] + 1;
        const uint32_t *mine =
            (const uint32_t *)(args.areas + (uint64_t)args.rank * args.stride + counter_offset(args));
        __threadfence_system(); /* everything that earlier kernels of this stream stored comes before the addition */
        Access::add(args);
        await(args, mine, epoch * (uint32_t)args.size, (int)TU_CUDA_NOBODY);
        epochs[args.channel] = epoch;
        __threadfence_system();
    }
    count_end(args.group);
}

extern "C" __global__ void tutti_multimem_barrier_by_switch(const __grid_constant__ tu_cuda_signal_args args) {
    multicast_barrier<adds_by_switch>(args);
}

extern "C" __global__ void tutti_multimem_barrier_by_members(const __grid_constant__ tu_cuda_signal_args args) {
    multicast_barrier<adds_by_members>(args);
}
