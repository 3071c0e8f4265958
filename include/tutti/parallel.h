/* SPDX-License-Identifier: Apache-2.0
 *
 * Training in parallel: modules whose work several ranks share.
 *
 *     tt_data_parallel *parallel = tt_data_parallel_new(net, group, NULL);    (rank 0's weights, on every rank)
 *     tt_optimizer *optimizer = tt_adamw_optimizer(net, NULL);
 *     for (…) {
 *         tt_tensor *loss = tt_cross_entropy(tt_module_call(net, x), y, -100);     (x, y: this rank's rows)
 *         tt_backward(loss, NULL);                             (averages gradients over the ranks while it runs)
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
#include <tutti/optimizer.h>

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
 * of rank 0. NULL with the error pending. options may be NULL. A parameter that is data parallel already is
 * TUTTI_ERROR_STATE.
 *
 * A backward in which a parameter gets no gradient is TUTTI_ERROR_STATE that names it, unless find_unused or
 * static_graph is set. With them it counts as zeros, and where no rank has one its gradient stays as it was. With
 * find_unused all forwards since the last backward count, also one whose result meets none: run that with
 * tt_grad_mode(false). */
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

/* ---- fully sharded: every rank has a part of the batch, and a part of every parameter ----
 *
 *     tt_fully_sharded *sharded = tt_fully_shard(net, block_count, blocks, group, NULL);
 *     tt_optimizer *optimizer = tt_adamw_optimizer(net, NULL);      (over the shards: made after)
 *
 * Training goes on as with one rank. The modules that are listed are units, and what is left of the root is one more.
 * The parameters of a unit are cut along dimension 0, and a rank keeps its rows. A unit is gathered before its forward
 * and freed behind it, gathered again before its backward, while the unit that comes next is on its way already; its
 * gradients are reduced to the shards as soon as they are complete. The root stays gathered from forward to backward.
 *
 * A parameter of n rows on w ranks is cut into parts of ceil(n / w) rows; the last ranks may have fewer, or none. In
 * the slots of modules are shards, except while a unit is gathered. Shards lie in symmetric memory of the parameters'
 * device: release the module before the world is closed. Averages have the bits of one rank that adds in order and
 * divides. On a GPU gathers and reductions run on a stream of their own, and no call waits for them on the host. */

typedef struct tt_fully_sharded tt_fully_sharded;

/* When a unit's whole parameters are freed after its forward. */
typedef enum tt_reshard {
    TT_RESHARD_UNITS = 0,  /* those of units, and not the root's */
    TT_RESHARD_ALWAYS = 1, /* the root's too */
    TT_RESHARD_NEVER = 2   /* kept until the backward: fewer gathers, more memory */
} tt_reshard;

typedef enum tt_shard_event {
    TT_SHARD_GATHER = 1, /* begins */
    TT_SHARD_FREE = 2,
    TT_SHARD_REDUCE = 3, /* begins */
    TT_SHARD_SHRINK = 4  /* freed after a forward but for the part that near_ranks leaves */
} tt_shard_event;
/* Is told what happens to which unit: its path in the root, "" for the root itself. */
typedef void tt_shard_watcher(void *user, tt_shard_event event, const char *unit);
/* Says along which dimension a parameter, named as in the root, is cut. */
typedef int tt_shard_dimension(void *user, const char *name, const tt_tensor *parameter);

/* What a unit sends: its parameters as flat tensors, one per parameter. A gather brings to `wholes` the parts of all
 * ranks of the group, one after the other; a reduction brings to `parts` the sums over the ranks, divided, of what
 * `wholes` have for this rank. All are where parameters are computed with. */
typedef struct tt_shard_transfer {
    size_t size;
    const char *unit; /* its path in the root, "" for the root itself */
    tt_tensor_list parts, wholes;
    tutti_group *group;
    double divisor; /* of a reduction; 0: the number of ranks */
} tt_shard_transfer;
#define TT_SHARD_TRANSFER_INIT TUTTI_DEFAULTS(tt_shard_transfer)
/* TT_SHARD_TRANSFER_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_shard_transfer_init(tt_shard_transfer *transfer, size_t size);
/* May return before the results are there, as collectives do. Failed with an error pending. */
typedef void tt_shard_function(void *user, const tt_shard_transfer *transfer);
/* What is done when no other function is given: tt_all_gather_out of all, as one work. */
TUTTI_API void tt_shard_gather(void *user, const tt_shard_transfer *transfer);
/* The same for gradients: tt_reduce_scatter_out of all, as one work. */
TUTTI_API void tt_shard_reduce(void *user, const tt_shard_transfer *transfer);

typedef struct tt_fully_sharded_options {
    size_t size;
    tt_reshard reshard;
    tutti_group *replicas;    /* ranks that hold the same shards as this one, and average with it; NULL: none */
    tutti_dtype param_dtype;  /* of gathered parameters and what is computed with them; 0: the parameters' own */
    tutti_dtype reduce_dtype; /* in which gradients are reduced; 0: their own */
    tutti_dtype output_dtype; /* of the root's results that are floats; 0: as they are */
    bool keep_inputs;         /* float inputs of units do not become param_dtype */
    bool own_values;          /* each rank cuts its own values, which must be alike; else those of rank 0 */
    bool no_prefetch;         /* a unit is gathered when it is needed, not before */
    double divisor;           /* of summed gradients; 0: the number of ranks, replicas counted */
    tt_shard_watcher *watch;  /* NULL: none */
    void *user;               /* of all these functions */
    /* NULL: all along dimension 0. Along another one a size must be divisible by the ranks. */
    tt_shard_dimension *dimension;
    /* Where parameters are gathered to and computed with; 0: where they are. Another device than theirs offloads:
     * shards, their gradients and the optimizer stay where the parameters are, and take no memory of the device. On the
     * host they are pinned where the driver can, and copied on streams of their own: `gather` is called with one of
     * them current. */
    tutti_device device;
    /* Where a unit is freed after its forward, so many consecutive ranks keep it among them, cut over these alone, and
     * the backward gathers from these: more memory, and less to send far. Divides the ranks, and is neither 1 nor all
     * of them; 0: nothing is kept. */
    int near_ranks;
    tt_shard_function *gather; /* NULL: tt_shard_gather */
    tt_shard_function *reduce; /* NULL: tt_shard_reduce */
} tt_fully_sharded_options;
#define TT_FULLY_SHARDED_OPTIONS_INIT TUTTI_DEFAULTS(tt_fully_sharded_options)
/* TT_FULLY_SHARDED_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_fully_sharded_options_init(tt_fully_sharded_options *options, size_t size);

/* Shards the parameters of `root`, in units: `count` modules below it, and the root with what is left. A collective, in
 * which ranks compare what they have. A parameter that two units share, and units of mixed dtypes, are errors that name
 * them. NULL with the error pending; then the module is as it was. options may be NULL. */
TUTTI_API tt_fully_sharded *tt_fully_shard(tt_module *root, size_t count, tt_module *const *units, tutti_group *group,
                                           const tt_fully_sharded_options *options);
/* Ends it. The module keeps its shards as parameters, and gathers nothing any more. Waits for reductions that are under
 * way; gradients stay. NULL is allowed. */
TUTTI_API void tt_fully_sharded_release(tt_fully_sharded *sharded);

/* Whether backwards reduce, which they do at first. Switched off, whole gradients add up on each rank, for batches that
 * are computed in pieces; the next backward with it on reduces the sum. Returns what it was. */
TUTTI_API bool tt_fully_sharded_sync(tt_fully_sharded *sharded, bool on);
/* Gathers the unit of that module by hand (NULL: all), until tt_fully_sharded_free or the next forward or backward of
 * it frees it. A collective. What is written to whole parameters is lost. */
TUTTI_API bool tt_fully_sharded_gather(tt_fully_sharded *sharded, const tt_module *unit);
/* Frees what was gathered. */
TUTTI_API bool tt_fully_sharded_free(tt_fully_sharded *sharded, const tt_module *unit);

/* What can be switched while training goes on. All are on at first, but that FREE_FORWARD is as `reshard` says. Without
 * FREE_BACKWARD the next forward gathers only what was written to since, which for batches in pieces is nothing; a
 * compiled function frees in any case. Without GATHER_BACKWARD a backward that reads parameters is TUTTI_ERROR_FREED:
 * that of an embedding reads none. Without REPLICAS what was reduced adds up, and shards get no gradient: that comes
 * with the next backward with it on. All ranks do the same. */
typedef enum tt_shard_switch {
    TT_SWITCH_FREE_FORWARD = 1,    /* whole parameters are freed behind the forward */
    TT_SWITCH_FREE_BACKWARD = 2,   /* and behind the backward */
    TT_SWITCH_GATHER_BACKWARD = 3, /* they are gathered for the backward */
    TT_SWITCH_REPLICAS = 4         /* gradients are averaged over `replicas` */
} tt_shard_switch;
/* Switches the unit of that module; NULL: all. */
TUTTI_API bool tt_fully_sharded_switch(tt_fully_sharded *sharded, const tt_module *unit, tt_shard_switch which,
                                       bool on);

typedef enum tt_shard_pass {
    TT_PASS_FORWARD = 1,
    TT_PASS_BACKWARD = 2
} tt_shard_pass;
/* From now on these units begin to be gathered when the forward, or the backward, of `unit` begins; before that it is
 * the one that came next in the last one, or none with no_prefetch. `count` may be 0. */
TUTTI_API bool tt_fully_sharded_prefetch(tt_fully_sharded *sharded, tt_shard_pass pass, const tt_module *unit,
                                         size_t count, tt_module *const *ahead);

/* All parameters whole, by their names in the root, on every rank: copies. A collective. */
TUTTI_API tt_named_list tt_fully_sharded_parameters(tt_fully_sharded *sharded);
/* Takes this rank's rows of whole parameters: all of them, with the names and shapes that tt_fully_sharded_parameters
 * gives. Nothing is changed where one does not fit. */
TUTTI_API bool tt_fully_sharded_set_parameters(tt_fully_sharded *sharded, tt_named_list parameters);

/* ---- when a rank dies ----
 *
 *     tt_fully_sharded_protect(sharded, optimizer);
 *     …
 *     if (tt_scope_close(&step) == TUTTI_ERROR_DEAD) {                   (no error is pending behind it)
 *         tutti_group_shrink(group, NULL, &smaller);
 *         tt_fully_sharded_regroup(sharded, smaller);                    (goes on from memory)
 *     }
 *
 * Shards lie in memory that every rank has mapped, and that stays when its rank dies. So survivors cut what all ranks
 * had anew, without a file, and go on with the same parameters. */

/* Puts what the optimizer remembers of the shards into symmetric memory, too, and counts its steps there. A collective.
 * The sharding keeps the optimizer. */
TUTTI_API bool tt_fully_sharded_protect(tt_fully_sharded *sharded, tt_optimizer *optimizer);
/* tt_optimizer_step of the protected optimizer. Others can see whether it was made, or a rank died in the middle. On a
 * GPU it waits for the gradients on the host, so that no step is made of what a death left of them. */
TUTTI_API bool tt_fully_sharded_step(tt_fully_sharded *sharded);
/* Cuts parameters and protected optimizer states anew, over `group`: ranks of the old one, in its order. A collective
 * of that group. The old one may have ended, and ranks that are left out may be dead. Gradients, and what was gathered,
 * are dropped; near_ranks counts no longer. Where ranks are not at the same step, one died in the middle of one, or the
 * old group has ranks on several hosts, whose memory cannot be read, it is TUTTI_ERROR_STATE on all, and nothing has
 * changed: load a checkpoint then. Where another rank dies meanwhile, or one has no memory, either all that live have
 * their new parts or all have an error and their old ones: shrink once more, and call it again. While it runs old and
 * new parts are there. With `replicas` it is TUTTI_ERROR_UNSUPPORTED. */
TUTTI_API bool tt_fully_sharded_regroup(tt_fully_sharded *sharded, tutti_group *group);

/* ---- checkpoints ----
 *
 * All ranks write at once, each its shards and what the optimizer remembers of them, to a file of its own in one
 * folder; when all are there, the checkpoint takes the place of the one before. A run that goes on from it with as many
 * ranks computes the same bits; it can also be loaded with any other number of ranks. */

/* Writes the state of the root, of the optimizer (NULL: none) and of the random generators, all or nothing. A
 * collective, outside of forwards and backwards. The folder is made where there is none; what it holds besides is left
 * alone. */
TUTTI_API bool tt_fully_sharded_save(tt_fully_sharded *sharded, const tt_optimizer *optimizer, const char *folder);
/* Reads it into what the root and the optimizer have. A collective. Where it does not fit it is an error, and nothing
 * has changed on this rank. TUTTI_ERROR_NOT_FOUND where the folder holds no checkpoint. */
TUTTI_API bool tt_fully_sharded_load(tt_fully_sharded *sharded, tt_optimizer *optimizer, const char *folder);

typedef struct tt_fully_sharded_counts {
    size_t size;
    int units;                   /* the root's counted */
    int gathered;                /* units whose parameters are whole now */
    int64_t gathers;             /* so far */
    int64_t reductions;          /* so far */
    int64_t shard_bytes;         /* of this rank's parts */
    int64_t gathered_bytes;      /* of whole parameters now */
    int64_t most_gathered_bytes; /* at any time so far */
} tt_fully_sharded_counts;
#define TT_FULLY_SHARDED_COUNTS_INIT TUTTI_DEFAULTS(tt_fully_sharded_counts)
/* TT_FULLY_SHARDED_COUNTS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_fully_sharded_counts_init(tt_fully_sharded_counts *counts, size_t size);
/* What was done so far, on this rank. */
TUTTI_API bool tt_fully_sharded_count(const tt_fully_sharded *sharded, tt_fully_sharded_counts *counts);

/* ---- tensor parallel: every rank has a part of each layer, and the whole batch ----
 *
 *     tt_tensor_parallel_options how = { .size = sizeof how, .group = group };
 *     tt_module *layers[] = { tt_column_linear_module(width, 4 * width, true, &how),     (cuts outputs)
 *                             tt_function_module("gelu", tt_gelu),
 *                             tt_row_linear_module(4 * width, width, true, &how) };      (cuts inputs, adds up)
 *
 * A column-wise layer gives this rank's part of its outputs, a row-wise one takes parts and gives the whole: one
 * all-reduce for the two, and one in the backward. With `sequence` activations outside of such a pair (…, length,
 * width) are cut along the length, so that norms and the like are computed once: a column-wise layer gathers while it
 * multiplies, and a row-wise one scatters while it does (tutti/fused.h).
 *
 * Ranks draw whole weights from one state of the random generator and keep their parts: the layers together are the
 * layer that one rank would have made. Making one is a collective, in which they compare that state: a difference is
 * TUTTI_ERROR_MISMATCH on all. Sizes must be divisible by the ranks. */

typedef struct tt_tensor_parallel_options {
    size_t size;
    tutti_group *group; /* who shares the layer; held by the module */
    tutti_dtype dtype;  /* 0: TUTTI_F32 */
    bool sequence;      /* activations outside are cut along the last dimension but one */
} tt_tensor_parallel_options;
#define TT_TENSOR_PARALLEL_OPTIONS_INIT TUTTI_DEFAULTS(tt_tensor_parallel_options)
/* TT_TENSOR_PARALLEL_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_tensor_parallel_options_init(tt_tensor_parallel_options *options, size_t size);

/* tt_linear_module of which each rank has rows of "weight" (out / ranks, in) and elements of "bias" (out / ranks). */
TUTTI_API tt_module *tt_column_linear_module(int64_t in, int64_t out, bool bias,
                                             const tt_tensor_parallel_options *options);
/* tt_linear_module of which each rank has columns of "weight" (out, in / ranks), and the whole "bias". */
TUTTI_API tt_module *tt_row_linear_module(int64_t in, int64_t out, bool bias,
                                          const tt_tensor_parallel_options *options);
/* tt_embedding_module of which each rank has rows of "weight" (count / ranks, size). With `sequence` the result is cut
 * along the length; the indices are not. */
TUTTI_API tt_module *tt_vocabulary_embedding_module(int64_t count, int64_t size,
                                                    const tt_tensor_parallel_options *options);
/* tt_attention_module of which each rank has some of the heads; `attention` (may be NULL) gives their number. */
TUTTI_API tt_module *tt_heads_attention_module(int64_t width, const tt_attention_options *attention,
                                               const tt_tensor_parallel_options *options);

/* tt_cross_entropy of logits of which each rank has columns (n, classes / ranks), without gathering them. targets (n),
 * integers below `classes`, are the same on all ranks. */
TUTTI_API tt_tensor *tt_vocabulary_cross_entropy(tt_tensor *logits, tt_tensor *targets, int64_t ignore,
                                                 tutti_group *group);
/* tt_clip_grad_norm of all parameters below a module that is cut in one way or in two: those of tensor parallel layers
 * are parts over their group, and what every rank of it has counts once; `shards` is the group over which the module is
 * fully sharded besides, or NULL. A collective of all these groups. Layers must be cut over one group. */
TUTTI_API tt_tensor *tt_module_clip_grad_norm(tt_module *module, double limit, tutti_group *shards);
/* The same by other norms; options may be NULL. */
TUTTI_API tt_tensor *tt_module_clip_grad_norm_by(tt_module *module, double limit, tutti_group *shards,
                                                 const tt_clip_options *options);
/* From now on gradients of the module's parameters are summed over the group: for parameters that every rank has, and
 * that see a part of the sequence on each. */
TUTTI_API bool tt_sum_gradients(tt_module *module, tutti_group *group);

#ifdef __cplusplus
}
#endif

#endif
