/* SPDX-License-Identifier: Apache-2.0
 *
 * Bringing whole tensors to a kernel that knows dense f32 and f64 only, and its results back.
 */
#ifndef TU_TENSOR_STAGE_H
#define TU_TENSOR_STAGE_H

#include "tensor/convert.h"
#include "tensor/loop.h"

/* x as a dense tensor of `dtype`: x itself, held, where it is one; else a copy. NULL, with the error written, without
 * memory. NULL for NULL. */
tt_tensor *tu_stage_in(const tt_tensor *x, tutti_dtype dtype);
/* A tensor of `dtype` to compute `out` in: out itself, held, where it is of that type (results are dense). */
tt_tensor *tu_stage_out(tt_tensor *out, tutti_dtype dtype);
/* The same where out may lie otherwise: dense in any case. */
tt_tensor *tu_stage_out_dense(tt_tensor *out, tutti_dtype dtype);
/* Copies a staged result into `out` where it is another tensor, and drops it. Cannot fail on the CPU. */
tutti_status tu_stage_done(tt_tensor *out, tt_tensor *staged);
/* The same for several where `status` is OK, else drops them; returns the first failure. */
tutti_status tu_stage_end(int count, tt_tensor *const *outs, tt_tensor *const *staged, tutti_status status);

/* f64 for f64, f32 for narrower floats. */
static inline tutti_dtype tu_stage_dtype(const tt_tensor *x) {
    return x->dtype == TUTTI_F64 ? TUTTI_F64 : TUTTI_F32;
}

#endif
