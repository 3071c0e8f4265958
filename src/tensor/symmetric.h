/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a tensor lies in symmetric memory of this rank: for functions that want their inputs there, and for operations
 * that meet peers.
 */
#ifndef TU_TENSOR_SYMMETRIC_H
#define TU_TENSOR_SYMMETRIC_H

#include <tutti/memory.h>

#include "tensor/tensor.h"

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

/* A storage of `bytes` bytes at the start of a block; takes over the reference, also on failure. */
tu_storage *tu_symm_storage(tutti_memory *memory, size_t bytes);

/* x where it lies in symmetric memory of the group's world; else, and always while a graph is captured, a copy of it
 * that does, in a block that the group's members make together. Belongs to the scope; NULL with a pending error. */
tt_tensor *tu_symm_input(tt_tensor *x, tutti_group *group);

#endif
