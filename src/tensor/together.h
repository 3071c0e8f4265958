/* SPDX-License-Identifier: Apache-2.0
 *
 * A product that the ranks of a group make together, in one kernel on each rank's device: it reads the others' shards
 * where they lie, or hands tiles of the result to the ranks that own them, which add them. The device's side is
 * `together` of tensor/device.h; who calls it is fused/device.c.
 */
#ifndef TU_TENSOR_TOGETHER_H
#define TU_TENSOR_TOGETHER_H

#include <stdint.h>

#ifndef __CUDACC__
#include "tensor/device.h"
#endif

#define TU_TOGETHER_RANKS 8 /* at most: each has a descriptor in the kernel's arguments */

/* What a rank has in symmetric memory for the others to write to, and counts for itself; zeroed at first. Numbers of
 * calls go up: a word that is behind the call's number says that it is not so yet. */
typedef struct tu_together_board {
    uint32_t calls; /* so far, of this rank's */
    /* Of a call, in this rank's thread blocks: pieces of sums that were taken, parts of the shard that were copied,
     * thread blocks that have ended. Whoever counts the last one sets them to 0 again. */
    uint32_t taken, copied, finished;
    /* Written by that rank: it has begun the call. The number is the upper half; the lower one says which call it is,
     * and is the same on all ranks. */
    uint64_t entered[TU_TOGETHER_RANKS];
    uint32_t ready[TU_TOGETHER_RANKS]; /* likewise: its shard may be read */
    uint32_t left[TU_TOGETHER_RANKS];  /* it has read all shards */
    uint32_t begun, read;              /* of a call: thread blocks that know its number; that have read all shards */
    uint32_t reserved[10];
    /* Behind it, of scatters: for each half tile of this rank's block a word for each rank, which that rank writes. */
} tu_together_board;

#ifndef __CUDACC__
/* Which kernel makes it: Hopper's, or the plain one for any GPU of compute capability 8.0 or newer. */
typedef enum tu_together_kernel {
    TU_TOGETHER_NONE,
    TU_TOGETHER_HOPPER,
    TU_TOGETHER_PLAIN
} tu_together_kernel;

/* One rank's part of it. Matrices are dense, with the depth (left) and the columns (out) next to each other. */
typedef struct tu_device_together {
    bool scatters, average;
    tu_together_kernel kernel; /* that shall make it; TU_TOGETHER_NONE, of can_together alone: the device's best */
    bool leaves_together;      /* of a gather: nobody goes on before all have read */
    int rank, size;
    int64_t rows, columns, depth;           /* of a rank's shard, or of its block of the result */
    tutti_dtype dtype, right_dtype, result; /* the last two are the first but where that is f8 */
    const void *left[TU_TOGETHER_RANKS];    /* of a gather: the ranks' shards; of a scatter: the first has all rows */
    int64_t left_row;                       /* elements between rows of it */
    tu_device_matrix right;                 /* by rows or by columns */
    void *out[TU_TOGETHER_RANKS]; /* of a gather: where each shard's rows of the result go; of a scatter: each rank's
                                     place for this rank's products */
    tu_together_board *boards;    /* rank 0's */
    size_t step;                  /* from one rank's board to the next */
    /* Of a gather whose shards are staged: where this rank's goes for the others; NULL: all can be read. */
    void *half;
    size_t shard_bytes;
    /* Of a scatter: what all ranks have made for this one, `part_bytes` apart, and the sums. */
    void *stage, *sums;
    size_t part_bytes;
    /* Of f8, in f32: the scales of the rows of each shard, of the columns, a bias and a scale of the result; the
     * last two may be NULL. */
    const void *row_scales[TU_TOGETHER_RANKS], *column_scales, *bias, *whole;
    bool scales_rows, scales_columns; /* there is one per row, per column; else one */
    bool fast;                        /* as of tu_device_product */
    void *scales_half;                /* where this rank's scales of rows go for the others; NULL: all can be read */
} tu_device_together;
#endif

#endif
