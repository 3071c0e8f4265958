/* SPDX-License-Identifier: Apache-2.0
 *
 * What the fused forms of tt_scaled_matmul have in common on the CPU and on a device: how the inputs of a call lie.
 */
#ifndef TU_FUSED_SCALED_PARTS_H
#define TU_FUSED_SCALED_PARTS_H

#include "fused/operators.h"

/* Scales of the left matrix of an all-gather. */
typedef enum tu_scale_mode {
    TU_SCALES_SHARDED = 1, /* one for every row of the shard: gathered with it */
    TU_SCALE_WHOLE,        /* one */
    TU_SCALES_REPLICATED,  /* one for every row of the gathered matrix */
    TU_NO_SCALE_MODE
} tu_scale_mode;

tu_scale_mode tu_scale_mode_of(const tt_tensor *scale, const tt_tensor *shard, const tu_shape *all);
/* The scales as the rows of A go in memory. */
tt_tensor *tu_front_scales(const tt_tensor *scale, tu_scale_mode mode, int dim);

/* One right matrix of an all-gather, with what belongs to it. */
typedef struct tu_scaled_right {
    const tt_tensor *rhs, *scale, *bias, *result_scale;
} tu_scaled_right;
/* The next one of a call; `at`, 2 at first, goes on behind it. `present` is the call's entry for it. */
tu_scaled_right tu_scaled_next(const tu_call *call, int64_t present, int *at);

/* Of a reduce-scatter: all rows of x (…, width) in the order in which blocks go: x is
 * looked at as (before, scattered, behind, width), and the scattered dimension comes first. A dense tensor, or x's own
 * memory where that is the order already. */
tt_tensor *tu_rows_by_blocks(const tt_tensor *x, const tu_fused_block *block);

#endif
