/* SPDX-License-Identifier: Apache-2.0
 *
 * all_to_all_vdev and its 2d forms: all-to-alls whose splits lie on the device, so that the host never waits for them.
 * The mixture-of-experts shuffle: out with all_to_all_vdev_2d, back with all_to_all_vdev_2d_offset.
 *
 * Slots: a rank has `slots` = size * experts parts. Sending side, flat and 2d: slot (peer, expert), rank-major.
 * Receiving side of 2d: slot (expert, source), expert-major, each expert's total rounded up to major_align. 2d_offset
 * is the way back: it sends expert-major slots from given offsets and receives rank-major.
 *
 * Two kernels: `plan`, one thread block, exchanges counts and offsets and writes out_splits; `pull`, many blocks, moves
 * the data. Between them lies a kernel boundary, so every block of `pull` sees the whole plan.
 */
#include "device.cuh"

/* Where the receiver keeps what its peers told it: per slot of the receiver, rows and the sender's row offset. */
struct told {
    int64_t rows, offset;
};

/* The sender's slot number for (peer, expert), and the receiver's for (source, expert). */
static __device__ __forceinline__ int send_slot(const tu_cuda_vdev_args &args, int peer, int expert) {
    return args.form == 2 ? expert * args.meeting.size + peer : peer * args.experts + expert;
}
static __device__ __forceinline__ int receive_slot(const tu_cuda_vdev_args &args, int source, int expert) {
    return args.form == 1 ? expert * args.meeting.size + source : source * args.experts + expert;
}

/* offsets[i] = start + the sum of rows[first] … rows[i - 1] (negative ones count as none), for i from first to end - 1;
 * returns the whole sum plus start. By all threads of the block: each sums a run, then adds what lies before it. */
static __device__ int64_t sum_before(const int64_t *rows, int64_t *offsets, int first, int end, int64_t start,
                                     int64_t *sums) {
    int run = (end - first + (int)blockDim.x - 1) / (int)blockDim.x;
    int from = min(first + (int)threadIdx.x * run, end), to = min(from + run, end);
    int64_t sum = 0;
    for (int i = from; i < to; i++)
        sum += rows[i] > 0 ? rows[i] : 0;
    __syncthreads(); /* everybody is done with the sums of the call before */
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        int64_t at = start;
        for (int i = 0; i < (int)blockDim.x; i++) {
            int64_t next = at + sums[i];
            sums[i] = at;
            at = next;
        }
    }
    __syncthreads();
    int64_t at = sums[threadIdx.x], own = at + sum;
    for (int i = from; i < to; i++) {
        offsets[i] = at;
        at += rows[i] > 0 ? rows[i] : 0;
    }
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1)
        sums[0] = own; /* the last run ends where everything ends */
    __syncthreads();
    return sums[0];
}

extern "C" __global__ void __launch_bounds__(THREADS) tutti_vdev_plan(const __grid_constant__ tu_cuda_vdev_args args) {
    __shared__ int64_t sums[THREADS];
    __shared__ int bad;
    int64_t *rows = (int64_t *)args.scratch, *offsets = rows + TU_CUDA_SLOTS;
    const tu_cuda_meeting &meeting = args.meeting;
    const int ranks = meeting.size, slots = ranks * args.experts;
    const int64_t *given = (const int64_t *)args.in_splits;
    meeting_epoch epoch(meeting);
    if (threadIdx.x == 0)
        bad = 0;
    /* A first meeting: nobody's scratch is overwritten while it still pulls from the call before. */
    if (!meet(meeting, epoch)) {
        epoch.keep(meeting);
        return;
    }
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        rows[i] = given[i];
        offsets[i] = args.form == 2 ? given[slots + i] : 0;
    }
    __syncthreads();
    if (args.form != 2)
        sum_before(rows, offsets, 0, slots, 0, sums);
    __syncthreads();
    for (int i = threadIdx.x; i < slots; i += blockDim.x)
        if (rows[i] < 0 || offsets[i] < 0 || (uint64_t)(offsets[i] + rows[i]) > args.in_rows)
            bad = 1;
    __syncthreads();
    if (bad) {
        if (threadIdx.x == 0)
            raise_fault(meeting.group,
                        { TU_CUDA_FAULT_RANGE, (uint32_t)meeting.rank, 0, 0, meeting.operation, 0, meeting.sequence });
        epoch.keep(meeting);
        return;
    }
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        int peer = i / args.experts, expert = i % args.experts, slot = send_slot(args, peer, expert);
        told *inbox = (told *)resolve(meeting, peer, args.splits_code) + receive_slot(args, meeting.rank, expert);
        inbox->rows = rows[slot];
        inbox->offset = offsets[slot];
    }
    if (!meet(meeting, epoch)) {
        epoch.keep(meeting);
        return;
    }
    const told *mine = (const told *)resolve(meeting, meeting.rank, args.splits_code);
    int64_t *out_rows = (int64_t *)args.out_splits, *out_offsets = out_rows + slots;
    for (int i = threadIdx.x; i < slots; i += blockDim.x)
        rows[i] = mine[i].rows;
    __syncthreads();
    int64_t at = 0;
    int group = args.form == 1 ? ranks : slots; /* slots that are aligned together */
    for (int first = 0; first < slots; first += group) {
        int64_t end = sum_before(rows, offsets, first, first + group, at, sums);
        if (args.form == 1) { /* at least one unit, also for an expert that got nothing */
            int64_t total = (end - at + args.major_align - 1) / args.major_align * args.major_align;
            end = at + (total > 0 ? total : args.major_align);
        }
        at = end;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < slots; i += blockDim.x)
        if ((uint64_t)(offsets[i] + rows[i]) > args.out_rows)
            bad = 1;
    __syncthreads();
    if (bad) {
        if (threadIdx.x == 0)
            raise_fault(meeting.group,
                        { TU_CUDA_FAULT_RANGE, (uint32_t)meeting.rank, 1, 0, meeting.operation, 0, meeting.sequence });
        epoch.keep(meeting);
        return;
    }
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        out_rows[i] = rows[i];
        out_offsets[i] = offsets[i];
    }
    epoch.keep(meeting);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    tutti_vdev_pull(const __grid_constant__ tu_cuda_vdev_args args) {
    const tu_cuda_meeting &meeting = args.meeting;
    const int ranks = meeting.size, slots = ranks * args.experts;
    meeting_epoch epoch(meeting);
    if (!meet(meeting, epoch, [&](tu_cuda_inbox *inbox, int) { inbox->source = args.source; })) {
        epoch.keep(meeting);
        return;
    }
    const told *mine = (const told *)resolve(meeting, meeting.rank, args.splits_code);
    const int64_t *out_offsets = (const int64_t *)args.out_splits + slots;
    for (int step = 0; step < slots; step++) {
        int slot = (meeting.rank * args.experts + step) % slots;
        int source = args.form == 1 ? slot % ranks : slot / args.experts;
        uint64_t bytes = (uint64_t)mine[slot].rows * args.row_bytes;
        const uint8_t *from = resolve(meeting, source, inbox_of(meeting, meeting.rank, source)->source) +
                              (uint64_t)mine[slot].offset * args.row_bytes;
        uint8_t *to = (uint8_t *)args.out + (uint64_t)out_offsets[slot] * args.row_bytes;
        uint64_t thread = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (uint64_t)gridDim.x * blockDim.x,
                 done = 0;
        if ((((uint64_t)from | (uint64_t)to) & 15) == 0) {
            done = bytes / 16 * 16;
            for (uint64_t i = thread * 16; i < done; i += threads * 16)
                store_vector(to + i, load_vector(from + i));
        }
        for (uint64_t i = done + thread; i < bytes; i += threads)
            to[i] = from[i];
    }
    meet(meeting, epoch);
    epoch.keep(meeting);
}
