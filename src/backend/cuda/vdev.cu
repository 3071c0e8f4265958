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
#include "vdev.cuh"

/* Where the receiver keeps what its peers told it: per slot of the receiver, rows and the sender's row offset. */
struct told {
    int64_t rows, offset;
};

extern "C" __global__ void __launch_bounds__(THREADS) tutti_vdev_plan(const __grid_constant__ tu_cuda_vdev_args args) {
    __shared__ int64_t sums[THREADS];
    int64_t *rows = (int64_t *)args.scratch, *offsets = rows + TU_CUDA_SLOTS;
    const tu_cuda_meeting &meeting = args.meeting;
    const int ranks = meeting.size, slots = ranks * args.experts;
    const int64_t *given = (const int64_t *)args.in_splits;
    meeting_epoch epoch(meeting);
    /* A first meeting: nobody's scratch is overwritten while it still pulls from the call before. */
    if (!meet(meeting, epoch)) {
        epoch.keep(meeting);
        return;
    }
    if (!plan_input(given, args.form, slots, args.in_rows, rows, offsets, sums)) {
        if (threadIdx.x == 0)
            raise_fault(meeting.group,
                        { TU_CUDA_FAULT_RANGE, (uint32_t)meeting.rank, 0, 0, meeting.operation, 0, meeting.sequence });
        epoch.whole = false;
        epoch.keep(meeting);
        return;
    }
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        int peer = i / args.experts, expert = i % args.experts,
            slot = send_slot(args.form, ranks, args.experts, peer, expert);
        told *inbox = (told *)resolve(meeting, peer, args.splits_code) +
                      receive_slot(args.form, ranks, args.experts, meeting.rank, expert);
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
    if (!plan_output(args.form, ranks, slots, args.major_align, args.out_rows, rows, offsets, sums)) {
        if (threadIdx.x == 0)
            raise_fault(meeting.group,
                        { TU_CUDA_FAULT_RANGE, (uint32_t)meeting.rank, 1, 0, meeting.operation, 0, meeting.sequence });
        epoch.whole = false;
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
