/* SPDX-License-Identifier: Apache-2.0
 *
 * Exchanges between members that are not mapped: the protocol is in params.h. A part of kernels.cu.
 *
 * Step s of an exchange is one between this rank and member (s - rank) mod size, who is in it with this rank: both send
 * a chunk, then take one. A thread block does one step after the other, and on all ranks the same block does the same
 * steps, so nobody waits for somebody who waits for another. Whoever has one buffer for both gets nothing over what it
 * has not sent yet.
 */
#include "backend/cuda/vdev.cuh"

/* ---- where things lie ---- */

static __device__ __forceinline__ const tu_nvshmem_member &member_of(const tu_nvshmem_exchange_args &args, int member) {
    return ((const tu_nvshmem_member *)args.members)[member];
}

/* Slot of the inbox, the outbox or the words of arrival that belongs to a chunk of a member's. */
static __device__ __forceinline__ uint64_t slot_of(int member, uint32_t number) {
    return (uint64_t)member * 2 + (number & 1);
}

static __device__ __forceinline__ uint32_t *counter_of(const tu_nvshmem_exchange_args &args, int member, int taken) {
    return (uint32_t *)args.boxes.counters + member * 2 + taken;
}

static __device__ __forceinline__ const tu_nvshmem_piece *pieces_of(const tu_nvshmem_exchange_args &args, int side,
                                                                    int member) {
    if (args.peer >= 0)
        return &args.list[side][0];
    return args.more != 0 ? (const tu_nvshmem_piece *)args.more + ((uint64_t)side * args.size + member) * args.pieces
                          : &args.list[side][member];
}

static __device__ uint64_t bytes_of(const tu_nvshmem_exchange_args &args, int side, int member) {
    const tu_nvshmem_piece *pieces = pieces_of(args, side, member);
    uint64_t bytes = 0;
    for (int i = 0; i < args.pieces; i++)
        bytes += pieces[i].bytes;
    return bytes;
}

/* What a message of so many bytes is known by. */
static __device__ __forceinline__ uint32_t signature_of(const tu_nvshmem_exchange_args &args, uint64_t bytes) {
    uint64_t hash = (bytes + 1) * 0x9e3779b97f4a7c15ull;
    return args.signature ^ (uint32_t)(hash >> 32);
}

/* ---- bytes ---- */

/* Bytes [begin, end) of a piece to or from a chunk, by all threads of the block. */
static __device__ void copy_piece(const tu_nvshmem_side &side, uint64_t offset, uint64_t begin, uint64_t end,
                                  uint8_t *chunk, bool out_of_chunk) {
    uint8_t *base = (uint8_t *)side.base + offset;
    if (side.row == 0) {
        if (out_of_chunk)
            copy_bytes(base + begin, chunk, end - begin);
        else
            copy_bytes(chunk, base + begin, end - begin);
        return;
    }
    if (side.row < 64) { /* rows of a few bytes, as numbers that lie apart: a thread for each byte */
        for (uint64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
            uint8_t *byte = base + (side.skip + i) / side.row * side.pitch + (side.skip + i) % side.row;
            if (out_of_chunk)
                *byte = chunk[i - begin];
            else
                chunk[i - begin] = *byte;
        }
        return;
    }
    for (uint64_t at = begin, bytes; at < end; at += bytes) {
        uint64_t row = (side.skip + at) / side.row, column = (side.skip + at) % side.row;
        uint8_t *here = base + row * side.pitch + column;
        bytes = min(side.row - column, end - at);
        if (out_of_chunk)
            copy_bytes(here, chunk + (at - begin), bytes);
        else
            copy_bytes(chunk + (at - begin), here, bytes);
    }
}

/* Bytes [from, from + bytes) of a message to or from a chunk. */
static __device__ void copy_message(const tu_nvshmem_exchange_args &args, int side, int member, uint64_t from,
                                    uint64_t bytes, uint8_t *chunk) {
    const tu_nvshmem_piece *pieces = pieces_of(args, side, member);
    const tu_nvshmem_side &here = side == 0 ? args.in : args.out;
    uint64_t at = 0; /* where the piece begins in the message */
    if (side == 0 && here.base == 0) {
        if (threadIdx.x == 0)
            *(uint64_t *)chunk = args.value;
        return;
    }
    for (int i = 0; i < args.pieces && at < from + bytes; at += pieces[i++].bytes) {
        uint64_t begin = max(at, from), end = min(at + pieces[i].bytes, from + bytes);
        if (begin < end)
            copy_piece(here, pieces[i].offset, begin - at, end - at, chunk + (begin - from), side == 1);
    }
}

/* ---- waiting ---- */

static __device__ __forceinline__ bool has_come(const uint64_t *word, int shift, uint32_t number) {
    return (int32_t)((uint32_t)(load_acquire64(word) >> shift) - number) >= 0;
}

/* By one thread: until the number in *word, above `shift`, has reached `number`. False: a fault, or no more time. */
static __device__ bool await_number(const tu_nvshmem_exchange_args &args, uint64_t *word, int shift, uint32_t number,
                                    int peer) {
    uint64_t deadline = 0;
    for (uint32_t spins = 0; !has_come(word, shift, number); spins++) {
        if ((spins & 63) != 63)
            continue;
        if (has_fault(args.group))
            return false;
        uint64_t now = global_time();
        if (deadline == 0)
            deadline = now + args.timeout_ns;
        if (now > deadline) {
            raise_fault(args.group,
                        { TU_CUDA_FAULT_TIMEOUT, (uint32_t)peer, args.signature, 0, args.operation, 0, args.sequence });
            return false;
        }
    }
    return true;
}

/* By all threads: whether the first one's wait went well. */
static __device__ __forceinline__ bool agree(bool good) {
    return __syncthreads_and(threadIdx.x != 0 || good) != 0;
}

/* ---- chunks ---- */

/* Until so many chunks of this rank's were taken by the peer. */
static __device__ bool await_taken(const tu_nvshmem_exchange_args &args, int peer, uint32_t number) {
    uint64_t *taken = (uint64_t *)(args.own + args.boxes.taken) + slot_of(peer, number);
    return agree(threadIdx.x != 0 || await_number(args, taken, 0, number, peer));
}

/* Puts bytes [from, from + bytes) of a message of `total` as chunk `number`. */
static __device__ bool send_chunk(const tu_nvshmem_exchange_args &args, int peer, uint32_t number, uint64_t from,
                                  uint64_t total) {
    const tu_nvshmem_member &to = member_of(args, peer);
    uint64_t bytes = min(args.chunk, total - from), slot = slot_of(args.rank, number);
    uint64_t value = (uint64_t)number << 32 | signature_of(args, total);
    uint64_t *word = (uint64_t *)(to.place + args.boxes.arrived) + slot;
    uint8_t *inbox = (uint8_t *)to.place + args.boxes.inbox + slot * args.chunk;
    if (!await_taken(args, peer, number - 2)) /* the inbox there is free, and so is the outbox here */
        return false;
    if (bytes == 0) {
        if (threadIdx.x == 0) {
            __threadfence_system();
            nvshmemx_signal_op(word, value, NVSHMEM_SIGNAL_SET, to.pe);
        }
        return true;
    }
    uint8_t *source = (uint8_t *)args.in.base + pieces_of(args, 0, peer)->offset + from;
    if (!args.in_heap) {
        source = (uint8_t *)args.own + args.boxes.outbox + slot_of(peer, number) * args.chunk;
        copy_message(args, 0, peer, from, bytes, source);
    }
    __threadfence_system(); /* what the threads wrote comes before the put of all of them */
    __syncthreads();
    nvshmemx_putmem_signal_nbi_block(inbox, source, bytes, word, value, NVSHMEM_SIGNAL_SET, to.pe);
    return true;
}

/* Whether the chunk that came is of the same call as this rank's. */
static __device__ bool is_expected(const tu_nvshmem_exchange_args &args, int peer, uint64_t *word, uint64_t total) {
    uint64_t found = load_acquire64(word);
    uint32_t mine = signature_of(args, total);
    if ((uint32_t)found == mine) {
        nvshmem_uint64_test(word, NVSHMEM_CMP_EQ, found); /* what came with the word is there, over a network too */
        return true;
    }
    raise_fault(args.group,
                { TU_CUDA_FAULT_MISMATCH, (uint32_t)peer, mine, (uint32_t)found, args.operation, 0, args.sequence });
    return false;
}

/* Takes chunk `number` of the peer's, bytes [from, …) of a message of `total`, and tells so. */
static __device__ bool take_chunk(const tu_nvshmem_exchange_args &args, int peer, uint32_t number, uint64_t from,
                                  uint64_t total) {
    const tu_nvshmem_member &sender = member_of(args, peer);
    uint64_t bytes = min(args.chunk, total - from), slot = slot_of(peer, number);
    uint64_t *word = (uint64_t *)(args.own + args.boxes.arrived) + slot;
    if (!agree(threadIdx.x != 0 ||
               (await_number(args, word, 32, number, peer) && is_expected(args, peer, word, total))))
        return false;
    copy_message(args, 1, peer, from, bytes, (uint8_t *)args.own + args.boxes.inbox + slot * args.chunk);
    __syncthreads(); /* everything was read */
    if (threadIdx.x == 0) {
        __threadfence_system();
        nvshmemx_signal_op((uint64_t *)(sender.place + args.boxes.taken) + slot_of(args.rank, number), number,
                           NVSHMEM_SIGNAL_SET, sender.pe);
    }
    return true;
}

/* What this rank put into other members' blocks before has arrived before anybody hears of it by a word of this
 * exchange. By all threads. */
static __device__ void settle_puts(void) {
    if (threadIdx.x == 0) {
        __threadfence_system();
        nvshmem_quiet();
    }
    __syncthreads();
}

/* ---- messages ---- */

/* What this rank has for itself goes through its outbox, which no other step uses. */
static __device__ void copy_own(const tu_nvshmem_exchange_args &args) {
    uint64_t total = min(bytes_of(args, 0, args.rank), bytes_of(args, 1, args.rank));
    uint8_t *chunk = (uint8_t *)args.own + args.boxes.outbox + slot_of(args.rank, 0) * args.chunk;
    for (uint64_t from = 0; from < total; from += args.chunk) {
        uint64_t bytes = min(args.chunk, total - from);
        copy_message(args, 0, args.rank, from, bytes, chunk);
        __syncthreads();
        copy_message(args, 1, args.rank, from, bytes, chunk);
        __syncthreads();
    }
}

/* A message each way, or one. */
static __device__ bool exchange_with(const tu_nvshmem_exchange_args &args, int peer, bool sends, bool takes) {
    uint64_t to = sends ? bytes_of(args, 0, peer) : 0, from = takes ? bytes_of(args, 1, peer) : 0;
    uint64_t send_count = !sends ? 0 : to == 0 ? 1 : (to + args.chunk - 1) / args.chunk;
    uint64_t take_count = !takes ? 0 : from == 0 ? 1 : (from + args.chunk - 1) / args.chunk;
    uint32_t sent = *counter_of(args, peer, 0), taken = *counter_of(args, peer, 1);
    bool good = true;
    __syncthreads(); /* all have read the counters */
    for (uint64_t i = 0; good && i < max(send_count, take_count); i++) {
        if (i < send_count)
            good = send_chunk(args, peer, ++sent, i * args.chunk, to);
        if (good && i < take_count)
            good = take_chunk(args, peer, ++taken, i * args.chunk, from);
    }
    if (good && sends && args.in_heap) /* the caller may write to its input when this is over */
        good = await_taken(args, peer, sent);
    if (threadIdx.x == 0) {
        *counter_of(args, peer, 0) = sent;
        *counter_of(args, peer, 1) = taken;
    }
    return good;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    tutti_nvshmem_exchange(const __grid_constant__ tu_nvshmem_exchange_args args) {
    await_order(args.group, args.timeout_ns);
    bool good = agree(!has_fault(args.group));
    if (good)
        settle_puts();
    if (args.peer >= 0 && good)
        exchange_with(args, args.peer, args.is_send, !args.is_send);
    for (int step = blockIdx.x; args.peer < 0 && good && step < args.size; step += gridDim.x) {
        int peer = (step - args.rank + args.size) % args.size;
        if (peer == args.rank)
            copy_own(args);
        else
            good = exchange_with(args, peer, true, true);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        count_end(args.group);
}

/* ---- all_to_all_vdev ---- */

/* The pieces that go to each member, and those that come; one thread block. */
static __device__ bool plan_rows(const tu_nvshmem_plan_args &args, int64_t *sums, uint32_t *side) {
    int64_t *rows = (int64_t *)args.scratch, *offsets = rows + TU_CUDA_SLOTS;
    const int slots = args.size * args.experts;
    tu_nvshmem_piece *to = (tu_nvshmem_piece *)args.list, *from = to + slots;
    *side = 0;
    if (!plan_input((const int64_t *)args.in_splits, args.form, slots, args.in_rows, rows, offsets, sums))
        return false;
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        int slot = send_slot(args.form, args.size, args.experts, i / args.experts, i % args.experts);
        to[i] = { (uint64_t)offsets[slot] * args.row_bytes, (uint64_t)rows[slot] * args.row_bytes };
    }
    __syncthreads();
    *side = 1;
    for (int i = threadIdx.x; i < slots; i += blockDim.x)
        rows[receive_slot(args.form, args.size, args.experts, i / args.experts, i % args.experts)] =
            ((const int64_t *)args.told)[i];
    __syncthreads();
    if (!plan_output(args.form, args.size, slots, args.major_align, args.out_rows, rows, offsets, sums))
        return false;
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        int slot = receive_slot(args.form, args.size, args.experts, i / args.experts, i % args.experts);
        from[i] = { (uint64_t)offsets[slot] * args.row_bytes, (uint64_t)rows[slot] * args.row_bytes };
        ((int64_t *)args.out_splits)[i] = rows[i];
        ((int64_t *)args.out_splits)[slots + i] = offsets[i];
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    tutti_nvshmem_plan(const __grid_constant__ tu_nvshmem_plan_args args) {
    __shared__ int64_t sums[THREADS];
    uint32_t side;
    await_order(args.group, args.timeout_ns);
    bool good = agree(!has_fault(args.group));
    if (good && !plan_rows(args, sums, &side) && threadIdx.x == 0)
        raise_fault(args.group,
                    { TU_CUDA_FAULT_RANGE, (uint32_t)args.rank, side, 0, args.operation, 0, args.sequence });
    __syncthreads();
    if (threadIdx.x == 0)
        count_end(args.group);
}

/* ---- parts of matrices, between two exchanges that only meet ---- */

extern "C" __global__ void __launch_bounds__(THREADS)
    tutti_nvshmem_take(const __grid_constant__ tu_nvshmem_take_args args) {
    await_order(args.group, args.timeout_ns);
    uint64_t count = agree(!has_fault(args.group)) ? args.count * args.rows : 0;
    for (uint64_t i = blockIdx.x; i < count; i += gridDim.x) {
        const tu_nvshmem_member &member = args.from[i / args.rows];
        uint64_t row = i % args.rows;
        nvshmemx_getmem_nbi_block((void *)(args.to + i / args.rows * args.stride + row * args.bytes),
                                  (const void *)(member.place + row * args.pitch), args.bytes, member.pe);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        nvshmem_quiet();
        count_end(args.group);
    }
}
