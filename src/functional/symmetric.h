/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a tensor lies in symmetric memory, and where its peers have theirs: for the operations on symmetric memory in
 * this room and for the rooms above.
 */
#ifndef TU_FUNCTIONAL_SYMMETRIC_H
#define TU_FUNCTIONAL_SYMMETRIC_H

#include <tutti/memory.h>
#include <tutti/peers.h>

#include "tensor/operator.h"

typedef struct tu_symm_place {
    tutti_memory *memory; /* the block; lent: it lives while the tensor's storage does */
    size_t offset;        /* of the tensor's first element, in bytes from the start of the block's data */
} tu_symm_place;

/* Whether x lies in symmetric memory of `world`; *place is written only then. Local: waits for nothing, communicates
 * with nobody, and is no error either way. */
bool tu_symm_find(const tt_tensor *x, tutti_world *world, tu_symm_place *place);

/* The same as a demand: TUTTI_ERROR_ARGUMENT in the words of the named operations where x lies elsewhere. `who` and
 * `what` are for the message. */
tutti_status tu_symm_require(const char *who, const char *what, const tt_tensor *x, tutti_world *world,
                             tu_symm_place *place);

/* tu_symm_require, and the handle on the block's peers in the group, one reference of the caller's. The first call for
 * a block and a group is a rendezvous: collective, and bounded by the group's deadline. The element of rank r that
 * corresponds to x's first is at (char *)tutti_peers_buffer(peers, r) + place->offset. */
tutti_status tu_symm_meet(const char *who, const char *what, const tt_tensor *x, tutti_group *group,
                          tu_symm_place *place, tutti_peers **peers);

/* Whether this thread is in test mode: fused operations take their reference paths then. */
bool tu_symm_test_mode(void);

/* A storage of `bytes` bytes at the start of a block; takes over the reference, also on failure. */
tu_storage *tu_symm_storage(tutti_memory *memory, size_t bytes);

/* For the table test: a copy of x on symmetric memory, or x itself on meta. */
tt_tensor *tu_symm_sample(tu_sampler *sampler, tt_tensor *x);

#endif
