/* SPDX-License-Identifier: Apache-2.0
 *
 * Training in parallel: modules whose work several ranks share.
 *
 *     tt_data_parallel *parallel = tt_data_parallel_new(net, group, NULL);    (rank 0's weights, on every rank)
 *     tt_optimizer *optimizer = tt_adamw_optimizer(net, NULL);
 *     for (…) {
 *         tt_tensor *loss = tt_cross_entropy(tt_module_call(net, x), y, -100);  (x and y: this rank's part of the
 * batch) tt_backward(loss, NULL);                          (gradients are averaged over the ranks while it runs)
 *         tt_optimizer_step(optimizer);
 *         tt_optimizer_zero_grad(optimizer);
 *     }
 *     tt_data_parallel_release(parallel);
 *
 * The functions follow the tt_ conventions: an error stays pending. All ranks of the group make the same calls in the
 * same order. An object belongs to the thread that made it.
 *
 * Pipelines, in which ranks hold different layers, are not offered.
 */
#ifndef TUTTI_PARALLEL_H
#define TUTTI_PARALLEL_H

#include <tutti/functional.h>
#include <tutti/module.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- data parallel: every rank has the whole module, and a part of the batch ----
 *
 * Gradients are collected in buckets, flat tensors on symmetric memory, in the reverse order of the parameters, which
 * is about the order in which a backward makes them. A bucket that is full is reduced while the backward goes on;
 * buckets are reduced in one order on all ranks. After the first backward buckets are made anew, once, in the order in
 * which gradients came on rank 0.
 *
 * A gradient is a part of its bucket afterwards: the first that reads it waits for its bucket. The average is the sum
 * in the order of the ranks, divided once: the bits of one rank that adds the gradients of all and divides. */

typedef struct tt_data_parallel tt_data_parallel;

/* A bucket as it is reduced. */
typedef struct tt_bucket {
    size_t size;
    int index, count;         /* which, of how many */
    tt_tensor *values;        /* flat; this rank's gradients */
    tt_tensor_list gradients; /* the parts of it, one per parameter */
    tutti_group *group;
} tt_bucket;
#define TT_BUCKET_INIT TUTTI_DEFAULTS(tt_bucket)
/* TT_BUCKET_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_bucket_init(tt_bucket *bucket, size_t size);
/* Brings the bucket's values to what all ranks shall have, in place; may return before they are there, as collectives
 * do. Failed with an error pending. */
typedef void tt_bucket_function(void *user, const tt_bucket *bucket);
/* What is done when no other function is given: tt_all_reduce_ with TUTTI_AVG. */
TUTTI_API void tt_bucket_average(void *user, const tt_bucket *bucket);

typedef struct tt_data_parallel_options {
    size_t size;
    int64_t bucket_bytes;       /* of a bucket, about; 0: 25 MiB. A parameter is never cut */
    int64_t first_bucket_bytes; /* of the first, whose reduction begins the sooner; 0: 1 MiB */
    bool find_unused;           /* some parameters have no part in some results: looked for after every forward */
    bool static_graph;          /* the same parameters have a part in every step: found out in the first */
    bool own_buffers;           /* buffers are not rank 0's at every forward */
    tt_bucket_function *reduce; /* NULL: tt_bucket_average */
    void *user;                 /* of `reduce` */
} tt_data_parallel_options;
#define TT_DATA_PARALLEL_OPTIONS_INIT TUTTI_DEFAULTS(tt_data_parallel_options)
/* TT_DATA_PARALLEL_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_data_parallel_options_init(tt_data_parallel_options *options, size_t size);

/* Makes the module's parameters that require grad data parallel, from now on. A collective: all ranks compare names,
 * shapes and dtypes, and a difference is TUTTI_ERROR_MISMATCH on every rank; then parameters and buffers become those
 * of rank 0. NULL with the error pending. options may be NULL.
 *
 * A backward in which a parameter gets no gradient is TUTTI_ERROR_STATE that names it, unless find_unused or
 * static_graph is set. With them it counts as zeros, and where no rank has one its gradient stays as it was. */
TUTTI_API tt_data_parallel *tt_data_parallel_new(tt_module *module, tutti_group *group,
                                                 const tt_data_parallel_options *options);
/* Gradients are this rank's alone again. Waits for reductions that are under way; gradients stay. NULL is allowed. */
TUTTI_API void tt_data_parallel_release(tt_data_parallel *parallel);

/* Whether backwards reduce, which they do at first. Switched off, gradients add up on this rank, for batches that are
 * computed in pieces; the next backward with it on reduces the sum. Returns what it was. All ranks do the same. */
TUTTI_API bool tt_data_parallel_sync(tt_data_parallel *parallel, bool on);

typedef struct tt_data_parallel_counts {
    size_t size;
    int buckets;        /* there are now */
    int64_t backwards;  /* that reduced */
    int64_t reductions; /* buckets that were reduced */
    int64_t early;      /* of those, while gradients were still to come: their time is hidden */
    int64_t bytes;      /* in them */
} tt_data_parallel_counts;
#define TT_DATA_PARALLEL_COUNTS_INIT TUTTI_DEFAULTS(tt_data_parallel_counts)
/* TT_DATA_PARALLEL_COUNTS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_data_parallel_counts_init(tt_data_parallel_counts *counts, size_t size);
/* What was done so far, on this rank. */
TUTTI_API bool tt_data_parallel_count(const tt_data_parallel *parallel, tt_data_parallel_counts *counts);

#ifdef __cplusplus
}
#endif

#endif
