/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside votes: what those of one host (vote.c) and those across hosts (vote_hosts.c) share.
 */
#ifndef TU_WORLD_VOTE_INNER_H
#define TU_WORLD_VOTE_INNER_H

#include "world/vote.h"

/* Whether a member's ballot settles that the vote fails: then *outcome and *culprit. */
void tu_vote_weigh(const tu_vote *vote, uint32_t kind, uint64_t digest, tutti_status status, int member,
                   tu_vote_outcome *outcome, int *culprit);

/* tu_vote_hold for members on several hosts. */
tutti_status tu_vote_hold_hosts(tutti_group *group, tu_vote *vote);

#endif
