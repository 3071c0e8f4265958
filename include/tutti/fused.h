/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products fused with communication: the two halves of tensor parallelism, where a rank computes while the
 * others' data is on its way.
 *
 *     tt_tensor_list h = tt_fused_all_gather_matmul(x, tt_tensors(up), 0, group, NULL);         (rows of x gathered)
 *     tt_tensor *y = tt_fused_matmul_reduce_scatter(tt_gelu(h.at[0]), down, TUTTI_SUM, 0, group); (rows of y scattered)
 *
 * is tt_matmul(tt_all_gather(x, 0, group), up) and tt_reduce_scatter(tt_matmul(…, down), TUTTI_SUM, 0, group), without
 * the gathered x and without the unreduced product.
 *
 * WHERE INPUTS LIE. A shard in symmetric memory (tutti/memory.h) that all ranks pass from one rendezvous is read by all
 * where it lies; the first call does the rendezvous. Other shards are copied once, into a workspace of the group, which
 * grows to what the largest call needed, is used again, and goes with the group. tt_restride(x, dim) brings x into the
 * order that is read without another copy: its dim moved to the front is contiguous.
 *
 * NUMBERS. A product of gathered rows is tt_matmul's. Where a library multiplies and a rank has fewer than 512 rows,
 * those of neighbouring ranks are put together and multiplied at once; which ones follows from the sizes alone, so that
 * a program gives the same bits whenever it runs. A gather along the last dimension adds the shards' products in rank
 * order, in the accumulator of the dtype, on every rank alike. A scattered product is rounded to the dtype on each
 * rank, then added in rank order and rounded once, as tt_reduce_scatter does; avg divides before that rounding.
 *
 * ORDER AND ERRORS are those of collectives (tutti/functional.h): all ranks make the same calls in the same order.
 * Shards whose shape, dtype or scales differ between ranks are TUTTI_ERROR_MISMATCH on every rank, with both sides in
 * the message; that ends nothing by itself: the error is pending, as any of a tt_ function, and the next collective
 * that is reached with it pending ends the group. To go on, clear it first (tt_error_pending, tt_error_clear). B may
 * differ from rank to rank. A death, a deadline or an abort ends the group. The calls are complete when they return,
 * and use no more than the calling thread and those that compute for it: where there are such, one thread communicates
 * while the others multiply. Calls of several threads on one group take turns; one that does not get its turn by the
 * group's deadline ends the group with TUTTI_ERROR_TIMEOUT.
 *
 * BATCHES (tutti_batch_begin) are a rank's own list until they end. A call while one is open on the group runs at once,
 * and so do its gradients: it comes before the batch, which is left as it is, also where the call fails; one behind
 * tutti_batch_end comes behind the batch, which may be a work on its way. Other ranks need not have a batch open. Where
 * its end is in the order of calls must be the same on all ranks, else that is TUTTI_ERROR_MISMATCH.
 *
 * ON A GPU a call agrees with the other ranks' hosts, enqueues on the current stream and returns; ranks that are
 * threads need a stream each. What goes wrong on the device later, a deadline or a death, ends the group: the next call
 * on it and tutti_group_check say so. Calls can be captured into a CUDA graph after one of the same sizes, by all ranks
 * alike; a workspace that would grow meanwhile is TUTTI_ERROR_STATE with both sizes, and one that grows later leaves
 * the graph its memory. Values of scales are not compared there. Callbacks of pipelines are called on the host, before
 * the call returns, with tensors on the device: operators that they call go to the current stream, which they leave as
 * it is, behind what makes those tensors ready. A callback that waits for the stream waits for the other ranks'
 * streams. In a graph is what the callbacks have enqueued while it was captured; they are not called when it runs.
 *
 * TEST MODE (tt_symm_test_begin) takes the plain collectives and then multiplies: what the fused ways are compared
 * with.
 *
 * GRADIENTS of the forms without scales are fused forms again, and can be differentiated again. The scaled forms have
 * none, like tt_scaled_matmul. On the device meta, and in fake worlds, shapes and strides are those of the real ones.
 */
#ifndef TUTTI_FUSED_H
#define TUTTI_FUSED_H

#include <tutti/functional.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- all-gather, then matmul ---- */

/* The products A b for each b (k, n) of `bs`, where A is all ranks' a_shard (…, k) one after the other along
 * gather_dim, which is counted from 0. `a`, unless NULL, receives A itself: that costs its copy, no more. Where
 * gather_dim is not the last, memory of the results goes by gather_dim first, whatever its place. Where it is the
 * last, each b has the rows of all ranks: (ranks × k, n). */
TUTTI_API tt_tensor_list tt_fused_all_gather_matmul(tt_tensor *a_shard, tt_tensor_list bs, int gather_dim,
                                                    tutti_group *group, tt_tensor **a);

/* The same for one b and rows (gather_dim 0) of a contiguous a_shard: a product over A, this rank's rows
 * first, the others' as they become ready. `a` as above. */
TUTTI_API tt_tensor *tt_fused_all_gather_matmul_native(tt_tensor *a_shard, tt_tensor *b, tutti_group *group,
                                                       tt_tensor **a);

/* The same for rows of a contiguous a_shard: every rank writes its rows to all at once by multicast, then multiplies.
 * Without multicast it is TUTTI_ERROR_UNSUPPORTED; TUTTI_MULTICAST=software has the processors write every copy. */
TUTTI_API tt_tensor_list tt_fused_all_gather_matmul_multimem(tt_tensor *a_shard, tt_tensor_list bs, tutti_group *group);

typedef struct tt_fused_scaled_options {
    size_t size;
    tt_tensor_list biases;         /* one for each b, NULL for none; an empty list: none at all */
    tt_tensor_list result_scales;  /* likewise */
    const tutti_dtype *out_dtypes; /* likewise; 0, and NULL for all: the dtype of b */
    size_t out_dtype_count;
    const bool *use_fast_accum; /* for each b, as tt_scaled_matmul has it; NULL: none */
    size_t use_fast_accum_count;
} tt_fused_scaled_options;
#define TT_FUSED_SCALED_OPTIONS_INIT TUTTI_DEFAULTS(tt_fused_scaled_options)
/* TT_FUSED_SCALED_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_fused_scaled_options_init(tt_fused_scaled_options *options, size_t size);

/* tt_scaled_matmul of A and each b, with scales of f32. a_scale has one element for every row of a_shard (its leading
 * sizes, then 1), and is gathered with it; or one element, the same on all ranks; or one for every row of A, the same
 * on all ranks. b_scales has one for each b: one element, or one per column (1, n). gather_dim is not the last. */
TUTTI_API tt_tensor_list tt_fused_all_gather_scaled_matmul(tt_tensor *a_shard, tt_tensor_list bs, tt_tensor *a_scale,
                                                           tt_tensor_list b_scales, int gather_dim, tutti_group *group,
                                                           const tt_fused_scaled_options *options, tt_tensor **a);

/* ---- matmul, then reduce-scatter ---- */

/* This rank's part, along scatter_dim, of the sum or average (TUTTI_SUM, TUTTI_AVG) of all ranks' a (…, k) b (k, n);
 * contiguous. scatter_dim is counted from 0, and its size is divisible by the ranks. */
TUTTI_API tt_tensor *tt_fused_matmul_reduce_scatter(tt_tensor *a, tt_tensor *b, tutti_reduction reduction,
                                                    int scatter_dim, tutti_group *group);

/* The same of tt_scaled_matmul. a_scale is one element, or one for every row of a. The product is looked at in
 * output_shape (its rows are a's), and scattered along orig_scatter_dim of that; scatter_dim is where that dimension is
 * in a: equal to it where a was not reshaped. Neither is the last. bias and result_scale may be NULL; each rank's
 * product has them, as without fusing. dtype 0: that of b. use_fast_accum is tt_scaled_matmul's. */
TUTTI_API tt_tensor *tt_fused_scaled_matmul_reduce_scatter(tt_tensor *a, tt_tensor *b, tt_tensor *a_scale,
                                                           tt_tensor *b_scale, tutti_reduction reduction,
                                                           int orig_scatter_dim, int scatter_dim, tt_dims output_shape,
                                                           tt_tensor *bias, tt_tensor *result_scale, tutti_dtype dtype,
                                                           bool use_fast_accum, tutti_group *group);

/* ---- the two pipelines, for work of one's own ---- */

/* Works on one rank's shards, which belong to the caller and are read only; `rank` is whose they are. The tensors live
 * until it returns; what it has enqueued by then on a device may read them. It returns TUTTI_OK, or a failure that the
 * call then returns; an error that it leaves pending counts as one. Fused operations and pipelines on the same group
 * are TUTTI_ERROR_STATE inside it; it must not wait for another thread's either, which would end the group at its
 * deadline. Other collectives, and batches that end, have their place among those of the pipeline itself, and that can
 * differ from rank to rank: make them on another group. To note calls in a batch is allowed. */
typedef tutti_status tt_shard_consumer(void *argument, tt_tensor_list shards, int rank);

/* Gathers several contiguous tensors along dimension 0 and hands each rank's to `consume`, this rank's first, then the
 * others' as they become ready, each once; on a device the stream waits until all are. All tensors are on one device.
 * ag_out, one contiguous tensor (ranks × d0, …) for each of `shards`, receives what is gathered; an empty list: nobody
 * wants it. A shard may lie in this rank's place of its ag_out; else no ag_out overlaps a shard or another one. A
 * consumer that fails fails its own call alone. No gradient. */
TUTTI_API TUTTI_CHECKED tutti_status tt_pipelined_all_gather_and_consume(tt_tensor_list shards,
                                                                         tt_shard_consumer *consume, void *argument,
                                                                         tt_tensor_list ag_out, tutti_group *group);

/* Writes the chunk that goes to `rank` into `out`, a contiguous tensor of the shape of one chunk. As a consumer. */
typedef tutti_status tt_chunk_producer(void *argument, int rank, tt_tensor *out);

/* Every rank makes one chunk for each rank, the others' first, and receives those made for it: `output`, contiguous, is
 * cut in as many chunks as there are ranks along chunk_dim, and chunk r comes from rank r. A producer that fails ends
 * the group; ranks whose call on a device has returned by then hear of it as of what goes wrong there. No gradient. */
TUTTI_API TUTTI_CHECKED tutti_status tt_pipelined_produce_and_all_to_all(tt_chunk_producer *produce, void *argument,
                                                                         tt_tensor *output, int chunk_dim,
                                                                         tutti_group *group);

/* ---- the workspace ---- */

/* Bytes of symmetric memory that fused operations of this rank keep for the group, on the CPU and on a device. It waits
 * for nobody, and may be called from a consumer or producer. */
TUTTI_API size_t tt_fused_workspace_bytes(tutti_group *group);

#ifdef __cplusplus
}
#endif
#endif
