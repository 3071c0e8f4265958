/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on symmetric memory: what every rank of a group can read and write where it lies.
 *
 *     tt_tensor *x = tt_symm_empty(world, tt_shape(1024), TUTTI_F32, NULL);   (local: no other rank is involved)
 *     tt_fill_(x, rank);
 *     tt_tensor *sum = tt_one_shot_all_reduce(x, TUTTI_SUM, group);           (the first use meets the other ranks)
 *     tt_tensor *theirs = tt_peer_tensor(x, 1, group);                        (rank 1's x, without a copy)
 *
 * Such a tensor is a tensor like any other: views of it are symmetric too, and it works with every operator. Its
 * storage cannot be resized. Memory goes with the last tensor on it; a block that a peer still has mapped stays for the
 * peer.
 *
 * What plain reads and writes of a peer's memory order, and what not, is written in tutti/peers.h.
 */
#ifndef TUTTI_SYMMETRIC_H
#define TUTTI_SYMMETRIC_H

#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/pool.h>
#include <tutti/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- making them ---- */

typedef struct tt_symm_options {
    size_t size;
    tutti_group *group; /* default group of a rendezvous */
    bool persistent;    /* the memory belongs to persistent_id: see tutti/memory.h */
    uint64_t persistent_id;
    bool requires_grad;
    tutti_device device; /* where the memory is; 0: as of all tensors (tt_default_device) */
} tt_symm_options;
#define TT_SYMM_OPTIONS_INIT TUTTI_DEFAULTS(tt_symm_options)
/* TT_SYMM_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tt_symm_options_init(tt_symm_options *options, size_t size);

/* A zeroed tensor on symmetric memory, which collectives use where it lies once it is rendezvoused. */
TUTTI_API tt_tensor *tt_symm_empty(tutti_world *world, tt_dims shape, tutti_dtype dtype,
                                   const tt_symm_options *options);
/* The same with strides, in elements. */
TUTTI_API tt_tensor *tt_symm_empty_strided(tutti_world *world, tt_dims shape, tt_dims strides, tutti_dtype dtype,
                                           const tt_symm_options *options);
/* The block under x; lent, NULL and no error where x is not symmetric. */
TUTTI_API tutti_memory *tt_symm_memory(const tt_tensor *x);

/* From here to the matching tt_symm_pool_end every tensor on the pool's device that this thread makes lies in symmetric
 * memory of the pool, results of operators and gradients too; so anything can be given to the operations below. Tensors
 * live on after the end, and their memory goes back to the pool with the last of them. Scopes nest, the innermost
 * counts, and each thread has its own.
 *
 * All ranks must make the same tensors, in the same order, or their blocks do not match: with a group the end compares,
 * and a difference is TUTTI_ERROR_MISMATCH on every rank, which ends nothing. Without one (NULL) a difference shows
 * where blocks of different sizes meet. False with the error pending. */
TUTTI_API bool tt_symm_pool_begin(tutti_pool *pool, tutti_group *group);
/* Ends the innermost pool scope of this thread, also with an error pending. With a group it is a collective: reached
 * with an error pending it ends the group with this rank's message. Without a scope it is TUTTI_ERROR_STATE. */
TUTTI_API bool tt_symm_pool_end(void);

/* ---- a peer's ---- */

/* The tensor at rank `rank` of the group that corresponds to x: where x lies in its block, with its sizes, strides and
 * dtype. x must be symmetric; its first use with the group is a rendezvous of all members.
 *
 * It can be read, written and viewed like any tensor. It holds the block, so that the memory stays when the peer has
 * released its own. Its storage and its version are this rank's view of that memory: the version counts what this rank
 * writes through it, and not what the peer or anybody else writes. So a gradient that saved it cannot be told that the
 * peer changed it; who may write when is agreed by signals and barriers. It has no gradient, and does not require one.
 * This rank's own is x's storage itself, with its version. In a fake world every rank's is x's own. */
TUTTI_API tt_tensor *tt_peer_tensor(tt_tensor *x, int rank, tutti_group *group);

/* ---- operations with names of their own ----
 *
 * They are the collectives of tutti/named.h: one algorithm each, every dtype, every reduction but premul_sum, any
 * number of ranks, the same bits as ever. What has to be symmetric must lie in symmetric memory and be contiguous; it
 * is rendezvoused with the group at its first use. Results are asynchronous as those of all collectives; a tensor
 * without elements is done at once. On meta they tell shapes, and in a fake world a result is made of this rank's own
 * x.
 *
 * one_shot_all_reduce, multimem_one_shot_all_reduce, the low-contention forms and reduce_scatter_split can be
 * differentiated, with sum and avg; in-place and out forms cannot. */

/* The reduction of all ranks' x, which is symmetric and unchanged. Every rank reads all of them: best for small ones.
 */
TUTTI_API tt_tensor *tt_one_shot_all_reduce(tt_tensor *x, tutti_reduction reduction, tutti_group *group);
/* The same into out, any memory, of x's sizes. */
TUTTI_API tt_tensor *tt_one_shot_all_reduce_out(tt_tensor *out, tt_tensor *x, tutti_reduction reduction,
                                                tutti_group *group);
/* The same with an x of any memory, which is copied into buffer: symmetric, with as many elements at least. */
TUTTI_API tt_tensor *tt_one_shot_all_reduce_copy(tt_tensor *buffer, tt_tensor *x, tutti_reduction reduction,
                                                 tutti_group *group);
/* And that into out. */
TUTTI_API tt_tensor *tt_one_shot_all_reduce_copy_out(tt_tensor *out, tt_tensor *buffer, tt_tensor *x,
                                                     tutti_reduction reduction, tutti_group *group);
/* The reduction of all ranks' x, symmetric, into each of them: every rank reduces a part and stores it everywhere. */
TUTTI_API tt_tensor *tt_two_shot_all_reduce_(tt_tensor *x, tutti_reduction reduction, tutti_group *group);
/* The same into out, any memory; x stays as it was. */
TUTTI_API tt_tensor *tt_two_shot_all_reduce_out(tt_tensor *out, tt_tensor *x, tutti_reduction reduction,
                                                tutti_group *group);

/* By multicast. On the CPU there is none: TUTTI_ERROR_UNSUPPORTED, unless TUTTI_MULTICAST=software asks for a form in
 * which the processors write every copy. In place; x is symmetric. */
TUTTI_API tt_tensor *tt_multimem_all_reduce_(tt_tensor *x, tutti_reduction reduction, tutti_group *group);
/* x is symmetric and unchanged. */
TUTTI_API tt_tensor *tt_multimem_one_shot_all_reduce(tt_tensor *x, tutti_reduction reduction, tutti_group *group);
/* The same into out, any memory. */
TUTTI_API tt_tensor *tt_multimem_one_shot_all_reduce_out(tt_tensor *out, tt_tensor *x, tutti_reduction reduction,
                                                         tutti_group *group);
/* Into the out of the root alone; elsewhere out may be NULL, is not touched, and is what is returned. */
TUTTI_API tt_tensor *tt_multimem_one_shot_reduce_out(tt_tensor *out, tt_tensor *x, tutti_reduction reduction, int root,
                                                     tutti_group *group);
/* All ranks' x, any memory, along dimension 0 into out, which is symmetric. */
TUTTI_API tt_tensor *tt_multimem_all_gather_out(tt_tensor *out, tt_tensor *x, tutti_group *group);

/* All ranks' x along dimension 0, one peer after the other, each rank beginning with another. Any memory. A 0-dim x
 * gives one element per rank. */
TUTTI_API tt_tensor *tt_low_contention_all_gather(tt_tensor *x, tutti_group *group);
/* This rank's part, along dimension 0, of the reduction, in the same way. Any memory. */
TUTTI_API tt_tensor *tt_low_contention_reduce_scatter(tt_tensor *x, tutti_reduction reduction, tutti_group *group);
/* This rank's part, along the last dimension, of the reduction of x, which is symmetric and unchanged: columns of every
 * row, or a piece of one dimension. Its size must be divisible by the ranks. */
TUTTI_API tt_tensor *tt_reduce_scatter_split(tt_tensor *x, tutti_reduction reduction, tutti_group *group);
/* The same into out, any memory. */
TUTTI_API tt_tensor *tt_reduce_scatter_split_out(tt_tensor *out, tt_tensor *x, tutti_reduction reduction,
                                                 tutti_group *group);

/* All-to-all whose splits are data. All four tensors are symmetric; rows are those of dimension 0; splits and offsets
 * are i64 and count rows. in_splits[r] rows of x go to rank r, one after the other. Afterwards out_splits_offsets[0][r]
 * is how many came from rank r and [1][r] where they begin in out. Returns out. More rows than x or out has end the
 * group. */
TUTTI_API tt_tensor *tt_all_to_all_vdev(tt_tensor *out, tt_tensor *out_splits_offsets, tt_tensor *x,
                                        tt_tensor *in_splits, tutti_group *group);
/* With experts: in_splits[ranks * experts] is rank-major, out and out_splits_offsets[2][experts * ranks] are
 * expert-major. Each expert's rows begin at a multiple of major_align (0: 1) and take at least as many. */
TUTTI_API tt_tensor *tt_all_to_all_vdev_2d(tt_tensor *out, tt_tensor *out_splits_offsets, tt_tensor *x,
                                           tt_tensor *in_splits, int64_t major_align, tutti_group *group);
/* The way back: in_splits_offsets[2][experts * ranks] is expert-major with offsets, whose gaps are not sent; out is
 * rank-major, without gaps. */
TUTTI_API tt_tensor *tt_all_to_all_vdev_2d_offset(tt_tensor *out, tt_tensor *out_splits_offsets, tt_tensor *x,
                                                  tt_tensor *in_splits_offsets, tutti_group *group);

/* ---- whether it can be used ---- */

/* Whether operations on symmetric memory are on for the group of that name: true for every group of the world that this
 * rank is a member of, false for an unknown name. Nothing has to be switched on; that memory cannot be mapped between
 * hosts shows at the rendezvous. In test mode true for the names that it was begun with, and for no others. */
TUTTI_API bool tt_symm_enabled(tutti_world *world, const char *group);
/* Test mode of this thread, until the matching tt_symm_test_end: tt_symm_enabled says yes for these groups alone, with
 * no names for all, whatever the machine can do; and fused operations take their reference paths. Nests. */
TUTTI_API bool tt_symm_test_begin(size_t count, const char *const *groups);
/* Ends the innermost test mode of this thread; TUTTI_ERROR_STATE where there is none. */
TUTTI_API void tt_symm_test_end(void);

#ifdef __cplusplus
}
#endif
#endif
