/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups: ordered subsets of a world's ranks, in which collectives run.
 *
 * Concurrent calls on one group are safe; their order is the caller's business, and the mismatch check says when it
 * differs between ranks. Rank arguments are ranks of the group unless a name says world_rank.
 *
 * WHAT AN ERROR ENDS. A wrong argument ends nothing. An agreement that fails alike for all ends nothing. An operation of a
 * group that fails by death, mismatch, abort or its deadline ends that group on every rank with the first cause: later
 * calls on it return that cause at once; only queries, abort, shrink and release still work.
 */
#ifndef TUTTI_GROUP_H
#define TUTTI_GROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/status.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

TUTTI_API int tutti_group_rank(const tutti_group *group);
TUTTI_API int tutti_group_size(const tutti_group *group);
TUTTI_API const char *tutti_group_name(const tutti_group *group);
TUTTI_API tutti_world *tutti_group_world(const tutti_group *group);

/* World ranks in group order, tutti_group_size entries; lent. */
TUTTI_API const int *tutti_group_ranks(const tutti_group *group);

/* Another reference to the group. */
TUTTI_API tutti_group *tutti_group_keep(tutti_group *group);
TUTTI_API void tutti_group_release(tutti_group *group);

#ifdef __cplusplus
}
#endif
#endif
