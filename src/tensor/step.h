/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps of many parameters as one loop. While a batch is open, the step operators of its thread check their arguments
 * and leave their arithmetic to it; the batch then walks over all parameters at once, in equal shares for the threads,
 * however small each of them is. What does not lie dense in f32 or f64, or on a device in bf16 or f16, is computed at
 * once, as without a batch.
 *
 * The result is that of the steps one after the other, also where parameters share memory: a step that reads what the
 * batch is to write, or writes what it is to read or write, waits until that is computed. So that this costs little
 * with any number of parameters, the batch knows of each storage the span that is read and the span that is written.
 */
#ifndef TU_TENSOR_STEP_H
#define TU_TENSOR_STEP_H

#include "tensor/kernel/kernels.h"
#include "tensor/tensor.h"

typedef struct tu_batched_step {
    tu_step step;
    tu_step_kernel *kernel;
    struct tu_device *device; /* NULL: the CPU */
    bool adamw;
    tutti_dtype dtype;
    int64_t first;           /* number of its first element among all */
    tt_tensor *rate, *count; /* the numbers that `step` was made with, lent; count NULL: it takes none */
    double weight_decay;
} tu_batched_step;

/* Addresses [begin, end). */
typedef struct tu_step_span {
    uintptr_t begin, end;
} tu_step_span;

typedef struct tu_step_memory {
    const tu_storage *storage; /* NULL: all those whose memory may be that of others, too */
    uint64_t round;            /* it is a free place of the table where this is not the batch's */
    tu_step_span read, written;
} tu_step_memory;

/* What the bias correction of AdamW makes of a step's number: alike for all parameters of a group. */
typedef struct tu_step_correction {
    double beta1, beta2, count;
    double rate, root; /* the rate's divisor, the root's factor */
} tu_step_correction;

/* Zeroes at first. It keeps its memory from one opening to the next. */
typedef struct tu_step_batch {
    tu_batched_step *steps;
    size_t count, capacity;
    int64_t elements;
    tu_step_correction correction; /* the last one */
    /* A hash table over the storages. A new round, after what was collected has run, empties it. */
    tu_step_memory *memories;
    size_t memory_count, memory_capacity; /* the capacity is a power of 2 */
    uint64_t round;
} tu_step_batch;

/* Collects the steps of this thread from now on. What they work on must live until the batch has run. */
void tu_step_batch_open(tu_step_batch *batch);
/* Collects no more, and computes what was collected, or drops it: then no dense parameter of these types has
 * changed that shares no memory with others. */
tutti_status tu_step_batch_close(tu_step_batch *batch, bool compute);
/* Gives its memory back. */
void tu_step_batch_free(tu_step_batch *batch);

#endif
