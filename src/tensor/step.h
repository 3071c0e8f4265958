/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps of many parameters as one loop. While a batch is open, the step operators of its thread check their arguments
 * and leave their arithmetic to it; the batch then walks over all parameters at once, in equal shares for the threads,
 * however small each of them is. What does not lie dense in f32 or f64 is computed at once, as without a batch.
 */
#ifndef TU_TENSOR_STEP_H
#define TU_TENSOR_STEP_H

#include "tensor/kernel/kernels.h"

typedef struct tu_batched_step {
    tu_step step;
    tu_step_kernel *kernel;
    int64_t first; /* number of its first element among all */
} tu_batched_step;

typedef struct tu_step_batch {
    tu_batched_step *steps;
    size_t count, capacity;
    int64_t elements;
} tu_step_batch;

/* Collects the steps of this thread from now on. What they work on must live until the batch has run. */
void tu_step_batch_open(tu_step_batch *batch);
/* Collects no more, and computes what was collected, or drops it: then no parameter has changed. */
void tu_step_batch_close(tu_step_batch *batch, bool compute);

#endif
