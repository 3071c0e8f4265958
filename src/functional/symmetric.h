/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the peers of a tensor on symmetric memory have theirs: for the operations on symmetric memory in this room and
 * for the rooms above.
 */
#ifndef TU_FUNCTIONAL_SYMMETRIC_H
#define TU_FUNCTIONAL_SYMMETRIC_H

#include <tutti/peers.h>

#include "tensor/operator.h"
#include "tensor/symmetric.h"

/* tu_symm_require, and the handle on the block's peers in the group, one reference of the caller's. The first call for
 * a block and a group is a rendezvous: collective, and bounded by the group's deadline. The element of rank r that
 * corresponds to x's first is at (char *)tutti_peers_buffer(peers, r) + place->offset. */
tutti_status tu_symm_meet(const char *who, const char *what, const tt_tensor *x, tutti_group *group,
                          tu_symm_place *place, tutti_peers **peers);

/* Whether this thread is in test mode: fused operations take their reference paths then. */
bool tu_symm_test_mode(void);

/* For the table test: a copy of x on symmetric memory, or x itself on meta. */
tt_tensor *tu_symm_sample(tu_sampler *sampler, tt_tensor *x);

#endif
