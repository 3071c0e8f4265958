/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside votes: what those of one host (vote.c) and those across hosts (vote_hosts.c) share.
 */
#ifndef TU_WORLD_VOTE_INNER_H
#define TU_WORLD_VOTE_INNER_H

#include "world/vote.h"

/* Whom this rank has seen in an operation that it has not begun itself, at its last look; member -1: nobody. */
typedef struct tu_vote_suspect {
    int member;
    uint64_t sequence;
} tu_vote_suspect;

/* In a group that lives and whose members live, a member that waits in an operation which this rank has not begun waits
 * for this rank, which is in a vote. True when it did so at the last look already: then no other thread of this rank is
 * about to begin it, and the error is written. *found: it does so now. */
bool tu_vote_elsewhere(tutti_group *group, const tu_vote *vote, int member, tu_vote_suspect *suspect, bool *found);

/* Whether a member's ballot settles that the vote fails: then *outcome and *culprit. */
void tu_vote_weigh(const tu_vote *vote, uint32_t kind, uint64_t digest, tutti_status status, int member,
                   tu_vote_outcome *outcome, int *culprit);

/* Ends the exchange that follows a shrink's vote, where that has this number or a smaller one, for the members on this
 * host. */
void tu_shrink_abandon(const tutti_group *group, uint64_t attempt);

/* tu_vote_hold for members on several hosts. */
tutti_status tu_vote_hold_hosts(tutti_group *group, tu_vote *vote);

#endif
