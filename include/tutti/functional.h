/* SPDX-License-Identifier: Apache-2.0
 *
 * Functional collectives: they leave their inputs alone and return new tensors, which can be differentiated.
 *
 *     tt_tensor *y = tt_all_gather(tt_linear(x, w, NULL), 1, group);     (starts; waits when first used)
 *     tt_backward(tt_sum(y), NULL);                                      (reduce-scatters the gradient)
 *
 * ASYNCHRONOUS. A result is there at once, and its data follow: the first operator that reads them waits, a view does
 * not. Inputs may be freed, and written: a write waits until the collective has read them. tt_wait waits by hand.
 *
 * ORDER. All ranks of the group make the same calls in the same order; their backward does, too, since the engine's
 * order is fixed.
 *
 * ERRORS. A collective that is reached with an error pending ends the group with this rank's message, so that the
 * others fail at once instead of waiting. A wait that fails leaves its error pending.
 *
 * GROUPS. Every way to name a group goes through tt_group, from a form that a tutti_form_ function has filled in:
 * tt_all_reduce(x, TUTTI_SUM, tt_group(world, tutti_form_mesh_dim(&form, mesh, 1), NULL)). A graph holds its groups
 * until its backward has run. On the device meta nothing is sent; a group tells the number of ranks, and may be NULL
 * where that does not matter: all_reduce and its coalesced form, broadcast, sends and receives.
 *
 * FAKE WORLDS move no data, and every result is defined all the same: all_reduce and broadcast give the input, gathers
 * this rank's x in every place, reduce_scatter this rank's part of its own x, all_to_all the input as far as it goes.
 *
 * GRADIENTS. all_reduce sum: all_reduce sum, avg: avg. all_gather: reduce_scatter sum. reduce_scatter sum: all_gather,
 * avg: divided by the ranks. premul_sum: as sum, times this rank's factor. all_to_all: back. Other reductions and
 * broadcast: an error in backward. In-place and out forms: none.
 */
#ifndef TUTTI_FUNCTIONAL_H
#define TUTTI_FUNCTIONAL_H

#include <tutti/collective.h>
#include <tutti/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The group that a form means for this rank; lent. An unknown one is an error. `tag` says which of several groups of
 * the same ranks a list of ranks means; NULL: the first that has none. */
TUTTI_API tutti_group *tt_group(tutti_world *world, const tutti_group_form *form, const char *tag);

/* ---- collectives ---- */

/* The reduction of all ranks' x, on every rank. */
TUTTI_API tt_tensor *tt_all_reduce(tt_tensor *x, tutti_reduction reduction, tutti_group *group);
/* The sum of each rank's x times its own factor. */
TUTTI_API tt_tensor *tt_all_reduce_premul(tt_tensor *x, double factor, tutti_group *group);
/* The same into x. */
TUTTI_API tt_tensor *tt_all_reduce_premul_(tt_tensor *x, double factor, tutti_group *group);
/* All ranks' x, one after the other along `dim`. A 0-dim x gives one element per rank. */
TUTTI_API tt_tensor *tt_all_gather(tt_tensor *x, int dim, tutti_group *group);
/* This rank's part, along `dim`, of the reduction; dim's size must be divisible by the ranks. */
TUTTI_API tt_tensor *tt_reduce_scatter(tt_tensor *x, tutti_reduction reduction, int dim, tutti_group *group);
/* This rank's part, along `dim`, of the sum of each rank's x times its own factor. */
TUTTI_API tt_tensor *tt_reduce_scatter_premul(tt_tensor *x, double factor, int dim, tutti_group *group);
/* in_splits[r] rows go to rank r, out_splits[r] rows come from it: one entry per rank, counted in rows of dimension 0.
 * Both NULL: equal parts. */
TUTTI_API tt_tensor *tt_all_to_all_single(tt_tensor *x, const int64_t *out_splits, const int64_t *in_splits,
                                          tutti_group *group);
/* Each rank's x, as a list in rank order: views of one tensor, none of which waits. rows[r] is how many rows (of
 * dimension 0) rank r has, the same list on all ranks; NULL: all have as many as x. The other dimensions are x's. */
TUTTI_API tt_tensor_list tt_all_gather_list(tt_tensor *x, const int64_t *rows, tutti_group *group);
/* `root` is a rank of the group. */
TUTTI_API tt_tensor *tt_broadcast(tt_tensor *x, int root, tutti_group *group);
/* Rank r's x goes to rank to[r] (-1: to nobody). A rank nobody sends to gets no rows; one that several send to gets
 * them in rank order. */
TUTTI_API tt_tensor *tt_permute_ranks(tt_tensor *x, const int *to, tutti_group *group);
/* From "sharded along gather_dim" to "sharded along shard_dim". Waits. */
TUTTI_API tt_tensor *tt_shard_dim_all_to_all(tt_tensor *x, int gather_dim, int shard_dim, tutti_group *group);

/* Tensor-parallel regions. A replicated x enters sharded work: forward x itself, backward all-reduce. */
TUTTI_API tt_tensor *tt_copy_to_group(tt_tensor *x, tutti_group *group);
/* Partial results leave it: forward all-reduce sum, backward the gradient itself. */
TUTTI_API tt_tensor *tt_reduce_from_group(tt_tensor *x, tutti_group *group);

/* Several all-reduces as one work. Its gradient is one work, too, as are those below. */
TUTTI_API tt_tensor_list tt_all_reduce_coalesced(tt_tensor_list list, tutti_reduction reduction, tutti_group *group);
/* The same by premul_sum, with one factor for all. */
TUTTI_API tt_tensor_list tt_all_reduce_coalesced_premul(tt_tensor_list list, double factor, tutti_group *group);
/* Several all-gathers along dimension 0 as one work. */
TUTTI_API tt_tensor_list tt_all_gather_coalesced(tt_tensor_list list, tutti_group *group);
/* Several reduce-scatters as one work; dims has one entry per tensor. */
TUTTI_API tt_tensor_list tt_reduce_scatter_coalesced(tt_tensor_list list, tutti_reduction reduction, size_t dim_count,
                                                     const int *dims, tutti_group *group);
/* The same by premul_sum, with one factor for all. */
TUTTI_API tt_tensor_list tt_reduce_scatter_coalesced_premul(tt_tensor_list list, double factor, size_t dim_count,
                                                            const int *dims, tutti_group *group);

/* ---- into given tensors; these must be contiguous, and are bumped when the collective starts ---- */

/* The reduction of all ranks' x, into x. */
TUTTI_API tt_tensor *tt_all_reduce_(tt_tensor *x, tutti_reduction reduction, tutti_group *group);
/* Several, as one work; no two of them may share memory. Returns them. */
TUTTI_API tt_tensor_list tt_all_reduce_coalesced_(tt_tensor_list list, tutti_reduction reduction, tutti_group *group);
/* The same by premul_sum, with one factor for all. */
TUTTI_API tt_tensor_list tt_all_reduce_coalesced_premul_(tt_tensor_list list, double factor, tutti_group *group);
/* x of the root, into every rank's x. */
TUTTI_API tt_tensor *tt_broadcast_(tt_tensor *x, int root, tutti_group *group);
TUTTI_API tt_tensor *tt_all_gather_out(tt_tensor *out, tt_tensor *x, tutti_group *group); /* along dimension 0 */
/* This rank's part, along dimension 0, of the reduction. */
TUTTI_API tt_tensor *tt_reduce_scatter_out(tt_tensor *out, tt_tensor *x, tutti_reduction reduction, tutti_group *group);
/* The same by premul_sum. */
TUTTI_API tt_tensor *tt_reduce_scatter_premul_out(tt_tensor *out, tt_tensor *x, double factor, tutti_group *group);
/* tt_all_to_all_single into out. */
TUTTI_API tt_tensor *tt_all_to_all_out(tt_tensor *out, tt_tensor *x, const int64_t *out_splits,
                                       const int64_t *in_splits, tutti_group *group);

/* ---- from one rank to another ---- */

/* Returns an empty placeholder to wait for. */
TUTTI_API tt_tensor *tt_isend(tt_tensor *x, int to, int tag, tutti_group *group);
/* Receives into x and returns it. */
TUTTI_API tt_tensor *tt_irecv(tt_tensor *x, int from, int tag, tutti_group *group);

typedef enum tt_p2p_kind {
    TT_P2P_SEND = 1,
    TT_P2P_RECV = 2
} tt_p2p_kind;
typedef struct tt_p2p {
    tt_p2p_kind kind;
    tt_tensor *tensor;
    int peer, tag;
} tt_p2p;
/* All at once, as one work: a placeholder per send, the tensor itself per receive. */
TUTTI_API tt_tensor_list tt_batch_p2p(size_t count, const tt_p2p *operations, tutti_group *group);

/* ---- waiting ---- */

/* Waits for all collectives that write x's storage, and returns x. Nothing to wait for is no error. */
TUTTI_API tt_tensor *tt_wait(tt_tensor *x);
/* Whether collectives still write x's storage, for all anyone has waited. */
TUTTI_API bool tt_is_async(const tt_tensor *x);
/* Collectives of this world that nobody has waited for. Closing the world with such works is an error that lists
 * them. */
TUTTI_API int tt_pending_works(tutti_world *world);
/* Nanoseconds that this rank's threads have waited for collectives of the world so far: what communication costs a
 * program, while the rest of it is hidden behind computations. */
TUTTI_API int64_t tt_waited_ns(tutti_world *world);
/* Waits for all of them; false with the error pending when one has failed. */
TUTTI_API bool tt_wait_all(tutti_world *world);

#ifdef __cplusplus
}
#endif
#endif
