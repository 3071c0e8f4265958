/* SPDX-License-Identifier: Apache-2.0
 *
 * The product that ranks make together in one kernel: its arguments, and what the ranks write for each other. See
 * together.cu.
 */
#ifndef TU_TENSOR_CUDA_TOGETHER_H
#define TU_TENSOR_CUDA_TOGETHER_H

#include <stdint.h>

#include "../backend/cuda/params.h"
#include "tensor/together.h"

/* Of a tile, in rows and columns of the result, and of what is loaded at a time, in bytes of the depth. */
#define TU_TILE_ROWS 128
#define TU_TILE_COLUMNS 256
#define TU_TILE_BYTES 128
/* Of the right matrix by columns, in one box: thread blocks in pairs read a half of a tile's each. */
#define TU_RIGHT_COLUMNS 128
#ifndef TU_TILE_STAGES
#define TU_TILE_STAGES 4
#endif
#define TU_TOGETHER_STAGE_BYTES ((TU_TILE_ROWS + TU_TILE_COLUMNS) * TU_TILE_BYTES)
/* A part of the result on its way out: 64 rows of 128 bytes; so many for each of the two teams that multiply. */
#define TU_TOGETHER_BOX_BYTES (64 * 128)
#ifndef TU_TOGETHER_BOXES
#define TU_TOGETHER_BOXES 2
#endif
/* What the tensor cores read, the boxes, and the barriers. */
#define TU_TOGETHER_SHARED \
    (TU_TILE_STAGES * TU_TOGETHER_STAGE_BYTES + 2 * TU_TOGETHER_BOXES * TU_TOGETHER_BOX_BYTES + 1024 + 256)
#define TU_TOGETHER_THREADS 384

/* The same of the plain kernel (together_plain.cu), which makes tiles of the same size: elements of the depth that are
 * loaded at a time, and in how many places, which fit into the least memory of a processor from 8.0 on (99 KiB). */
#define TU_PLAIN_DEPTH 32
#define TU_PLAIN_STAGES 3
#define TU_PLAIN_STAGE_BYTES ((TU_TILE_ROWS + TU_TILE_COLUMNS) * (TU_PLAIN_DEPTH + 8) * 2)
#define TU_PLAIN_SHARED (TU_PLAIN_STAGES * TU_PLAIN_STAGE_BYTES)
#define TU_PLAIN_THREADS 384

/* Of the driver: where a matrix lies and how it is cut. */
typedef struct tu_tensor_map {
#ifdef __cplusplus
    alignas(64)
#else
    _Alignas(64)
#endif
        uint64_t opaque[16];
} tu_tensor_map;

/* Of elements of the result. */
enum {
    TU_TOGETHER_BF16,
    TU_TOGETHER_F16,
    TU_TOGETHER_F32
};

typedef struct tu_together_args {
    tu_tensor_map left[TU_TOGETHER_RANKS]; /* of a gather: the ranks' shards; of a scatter: the first is all rows */
    tu_tensor_map out[TU_TOGETHER_RANKS];  /* of a scatter: the place in each rank's stage for this rank's products */
    tu_tensor_map right;
    tu_cuda_group_words group;
    uint64_t timeout_ns;
    uint64_t boards, stride; /* rank 0's board, and how far apart they are */
    /* Of a gather whose shards are staged: this rank's, and where it goes; 0: others read it where it is. */
    uint64_t shard, half, shard_bytes;
    /* Likewise its scales: one for each row of the shard. */
    uint64_t scales, scales_half;
    /* Of a scatter: this rank's stage, with a part for each rank, and the sums. */
    uint64_t stage, part_bytes, sums;
    /* Of f8, in f32: the scales of the rows of each shard, of the columns, the bias and the result's scale; the last
     * two may be 0. With a step of 0 there is one scale. */
    uint64_t row_scales[TU_TOGETHER_RANKS], column_scales, bias, whole;
    uint64_t results; /* of a gather: rank 0's rows; the other ranks' follow */
    int32_t row_step, column_step;
    int32_t rank, size, rows, columns, depth; /* rows of a shard or of a rank's block */
    int32_t scatters;
    int32_t result;
    float factor;            /* of a scatter: what sums are multiplied with, a power of two */
    int32_t leaves_together; /* of a gather: nobody goes on before all have read */
    uint32_t operation, signature;
    /* Of the plain kernel, in place of descriptors: where matrices begin, and elements from one row to the next, or of
     * a right matrix by columns from one column to the next. */
    uint64_t left_at[TU_TOGETHER_RANKS], out_at[TU_TOGETHER_RANKS], right_at;
    int64_t left_row, right_row;
} tu_together_args;

#endif
