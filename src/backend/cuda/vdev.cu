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
static __device__ __forceinline__ int send_slot(const tu_cuda_vdev_args &a, int peer, int expert) {
    return a.form == 2 ? expert * a.meeting.size + peer : peer * a.experts + expert;
}
static __device__ __forceinline__ int receive_slot(const tu_cuda_vdev_args &a, int source, int expert) {
    return a.form == 1 ? expert * a.meeting.size + source : source * a.experts + expert;
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

extern "C" __global__ void __launch_bounds__(THREADS) tutti_vdev_plan(const __grid_constant__ tu_cuda_vdev_args a) {
    __shared__ int64_t sums[THREADS];
    __shared__ int bad;
    int64_t *rows = (int64_t *)a.scratch, *offsets = rows + TU_CUDA_SLOTS;
    const tu_cuda_meeting &m = a.meeting;
    const int n = m.size, slots = n * a.experts;
    const int64_t *given = (const int64_t *)a.in_splits;
    meeting_epoch epoch(m);
    if (threadIdx.x == 0)
        bad = 0;
    /* A first meeting: nobody's scratch is overwritten while it still pulls from the call before. */
    if (!meet(m, epoch)) {
        epoch.keep(m);
        return;
    }
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        rows[i] = given[i];
        offsets[i] = a.form == 2 ? given[slots + i] : 0;
    }
    __syncthreads();
    if (a.form != 2)
        sum_before(rows, offsets, 0, slots, 0, sums);
    __syncthreads();
    for (int i = threadIdx.x; i < slots; i += blockDim.x)
        if (rows[i] < 0 || offsets[i] < 0 || (uint64_t)(offsets[i] + rows[i]) > a.in_rows)
            bad = 1;
    __syncthreads();
    if (bad) {
        if (threadIdx.x == 0)
            raise_fault(m.group, { TU_CUDA_FAULT_RANGE, (uint32_t)m.rank, 0, 0, m.operation, 0, m.sequence });
        epoch.keep(m);
        return;
    }
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        int peer = i / a.experts, expert = i % a.experts, slot = send_slot(a, peer, expert);
        told *inbox = (told *)resolve(m, peer, a.splits_code) + receive_slot(a, m.rank, expert);
        inbox->rows = rows[slot];
        inbox->offset = offsets[slot];
    }
    if (!meet(m, epoch)) {
        epoch.keep(m);
        return;
    }
    const told *mine = (const told *)resolve(m, m.rank, a.splits_code);
    int64_t *out_rows = (int64_t *)a.out_splits, *out_offsets = out_rows + slots;
    for (int i = threadIdx.x; i < slots; i += blockDim.x)
        rows[i] = mine[i].rows;
    __syncthreads();
    int64_t at = 0;
    int group = a.form == 1 ? n : slots; /* slots that are aligned together */
    for (int first = 0; first < slots; first += group) {
        int64_t end = sum_before(rows, offsets, first, first + group, at, sums);
        if (a.form == 1) { /* at least one unit, also for an expert that got nothing */
            int64_t total = (end - at + a.major_align - 1) / a.major_align * a.major_align;
            end = at + (total > 0 ? total : a.major_align);
        }
        at = end;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < slots; i += blockDim.x)
        if ((uint64_t)(offsets[i] + rows[i]) > a.out_rows)
            bad = 1;
    __syncthreads();
    if (bad) {
        if (threadIdx.x == 0)
            raise_fault(m.group, { TU_CUDA_FAULT_RANGE, (uint32_t)m.rank, 1, 0, m.operation, 0, m.sequence });
        epoch.keep(m);
        return;
    }
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        out_rows[i] = rows[i];
        out_offsets[i] = offsets[i];
    }
    epoch.keep(m);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) tutti_vdev_pull(const __grid_constant__ tu_cuda_vdev_args a) {
    const tu_cuda_meeting &m = a.meeting;
    const int n = m.size, slots = n * a.experts;
    meeting_epoch epoch(m);
    if (!meet(m, epoch, [&](tu_cuda_inbox *inbox, int) { inbox->source = a.source; })) {
        epoch.keep(m);
        return;
    }
    const told *mine = (const told *)resolve(m, m.rank, a.splits_code);
    const int64_t *out_offsets = (const int64_t *)a.out_splits + slots;
    for (int step = 0; step < slots; step++) {
        int slot = (m.rank * a.experts + step) % slots;
        int source = a.form == 1 ? slot % n : slot / a.experts;
        uint64_t bytes = (uint64_t)mine[slot].rows * a.row_bytes;
        const uint8_t *from =
            resolve(m, source, inbox_of(m, m.rank, source)->source) + (uint64_t)mine[slot].offset * a.row_bytes;
        uint8_t *to = (uint8_t *)a.out + (uint64_t)out_offsets[slot] * a.row_bytes;
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
    meet(m, epoch);
    epoch.keep(m);
}
