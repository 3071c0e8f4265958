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

/* From here to the matching tt_symm_pool_end every tensor on the CPU that this thread makes lies in symmetric memory of
 * the pool, results of operators and gradients too; so anything can be given to the operations below. Tensors live on
 * after the end, and their memory goes back to the pool with the last of them. Scopes nest, the innermost counts, and
 * each thread has its own. The pool must be one of the CPU.
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
