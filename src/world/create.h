/* SPDX-License-Identifier: Apache-2.0
 *
 * What the ways to make a group share: the arguments that are checked, the agreement, the steps after it. agreement.c
 * has the agreement, commit.c the vote that closes it, create.c, family.c and split.c the public ways.
 */
#ifndef TU_WORLD_CREATE_H
#define TU_WORLD_CREATE_H

#include "world/group.h"

/* What the ranks compare. */
typedef struct tu_agreement {
    uint8_t digest[20]; /* of everything that must be equal */
    uint8_t exists;     /* this rank has a group of that tag and those ranks already */
    uint8_t member;
    int32_t status; /* not TUTTI_OK: this rank cannot, and `text` says why */
    char text[228]; /* what it is about to make, for the message */
} tu_agreement;

/* ---- arguments (create.c) ---- */

/* Over the defaults that *options holds. */
tutti_status tu_group_options_take(const tutti_group_options *given, tutti_group_options *options);

/* What calls on a parent group begin with: the parent, the place for the result, the options. */
tutti_status tu_group_check_parent(const char *who, const tutti_group *parent, const void *out,
                                   const tutti_group_options *given, tutti_group_options *options);

/* No rank in two lists, none outside of [0, size); `what` names the ranks in messages. */
tutti_status tu_rank_lists_check(const int *const *lists, const int *counts, int list_count, int size,
                                 const char *what);

/* "0, 1, 2, …": as much of the list as fits. */
void tu_ranks_text(const int *ranks, int count, char *text, size_t bytes);

/* For qsort of ints. */
int tu_ranks_ascending(const void *left, const void *right);

/* ---- steps (create.c) ---- */

/* The name of a group that its members make alone: SHA-1 of "r0_r1_…_C", where C counts the living groups of just these
 * ranks, or the next number whose name is free: members know the same groups of these ranks, whatever else each has
 * done. Under world->lock. */
tutti_status tu_group_hashed_name(tutti_world *world, const int *ranks, int count, char name[64], uint64_t *key);

/* tutti_group_new with arguments that were checked. */
tutti_status tu_group_new(tutti_world *world, const int *ranks, int count, const tutti_group_options *options,
                          tutti_group **group);

/* ---- the agreement (agreement.c) ---- */

/* Says in *mine which group this rank is about to make, or that it cannot, with the thread's message. */
void tu_agreement_describe(tu_agreement *mine, const char *name, const char *tag, const int *ranks, int count,
                           int64_t timeout_ns);
void tu_agreement_refuse(tu_agreement *mine, tutti_status status);

/* An agreement of the parent's members: what is agreed on, and what comes of it. */
typedef struct tu_undertaking {
    tu_operation operation;
    const char *purpose;
    tu_agreement mine;
    int64_t timeout_ns;
    tutti_group *group;    /* prepared; NULL where this rank is no member */
    const tu_piece *piece; /* with its page */
    const char *tag;
    bool exists; /* the members have it already */
} tu_undertaking;

/* All of it: exchange, comparison, page, registry, vote. A member that gets TUTTI_OK knows that every member does. */
tutti_status tu_undertake(tutti_group *parent, tu_undertaking *task);

/* The same among the ranks of `plan` alone, which are no group yet. */
tutti_status tu_undertake_alone(tutti_world *world, const tu_group_plan *plan, tu_undertaking *task);

#endif
