/* SPDX-License-Identifier: Apache-2.0
 *
 * How the slots of an all_to_all_vdev are numbered, and where rows begin: for every kernel that plans one.
 */
#ifndef TU_CUDA_VDEV_CUH
#define TU_CUDA_VDEV_CUH

#include "device.cuh"

/* The sender's slot number for (peer, expert), and the receiver's for (source, expert). */
static __device__ __forceinline__ int send_slot(int form, int size, int experts, int peer, int expert) {
    return form == 2 ? expert * size + peer : peer * experts + expert;
}
static __device__ __forceinline__ int receive_slot(int form, int size, int experts, int source, int expert) {
    return form == 1 ? expert * size + source : source * experts + expert;
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

/* Reads this rank's splits, and finds where the rows of each slot begin in its input. False: some lie outside of it; by
 * all threads of the block, which agree. */
static __device__ bool plan_input(const int64_t *given, int form, int slots, uint64_t in_rows, int64_t *rows,
                                  int64_t *offsets, int64_t *sums) {
    int good = 1;
    for (int i = threadIdx.x; i < slots; i += blockDim.x) {
        rows[i] = given[i];
        offsets[i] = form == 2 ? given[slots + i] : 0;
    }
    __syncthreads();
    if (form != 2)
        sum_before(rows, offsets, 0, slots, 0, sums);
    __syncthreads();
    for (int i = threadIdx.x; i < slots; i += blockDim.x)
        if (rows[i] < 0 || offsets[i] < 0 || (uint64_t)(offsets[i] + rows[i]) > in_rows)
            good = 0;
    return __syncthreads_and(good) != 0;
}

/* Where the rows of each slot go in this rank's output, by how many there are. False: some lie outside of it. */
static __device__ bool plan_output(int form, int size, int slots, int64_t major_align, uint64_t out_rows,
                                   const int64_t *rows, int64_t *offsets, int64_t *sums) {
    int64_t at = 0;
    int good = 1, group = form == 1 ? size : slots; /* slots that are aligned together */
    for (int first = 0; first < slots; first += group) {
        int64_t end = sum_before(rows, offsets, first, first + group, at, sums);
        if (form == 1) { /* at least one unit, also for an expert that got nothing */
            int64_t total = (end - at + major_align - 1) / major_align * major_align;
            end = at + (total > 0 ? total : major_align);
        }
        at = end;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < slots; i += blockDim.x)
        if (rows[i] < 0 || (uint64_t)(offsets[i] + rows[i]) > out_rows)
            good = 0;
    return __syncthreads_and(good) != 0;
}

#endif
