/* SPDX-License-Identifier: Apache-2.0
 *
 * The last word on a new group: all have it, or nobody.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "job/liveness.h"
#include "world/group.h"
#include "world/vote.h"

/* The rank in `group` of a world rank that is in it. */
static int rank_in(const tutti_group *group, int world_rank) {
    return tu_rank_index(group->ranks, group->size, world_rank);
}

/* A member that died or closed; -1 where all live. */
static int find_dead(const tutti_group *group) {
    for (int member = 0; member < group->size; member++) {
        tu_rank_state state = tu_rank_probe(group->world->job, group->job_ranks[member]);
        if (state == TU_RANK_DEAD || state == TU_RANK_CLOSED)
            return member;
    }
    return -1;
}

/* Another member may have seen a death a moment before this one can, by a socket that closed: twice as long as deaths
 * take to be seen it is looked for. */
#define SEEN_WITHIN (200 * TU_MILLISECOND)

/* A dead member of the new group, else of its parent; *of is the one. -1: all live. */
static int find_lost(const tutti_group *group, const tutti_group *parent, bool patient, const tutti_group **of) {
    int64_t deadline = tu_deadline(SEEN_WITHIN);
    for (;;) {
        *of = group;
        int dead = find_dead(group);
        if (dead < 0) {
            *of = parent;
            dead = find_dead(parent);
        }
        if (dead >= 0 || !patient || tu_deadline_left(deadline) <= 0)
            return dead;
        nanosleep(&(struct timespec){ .tv_nsec = TU_MILLISECOND }, NULL);
    }
}

/* Some member died, or gave up because another member of the parent did, and so nobody gets the group. Tells who died,
 * in words of this rank or of `vote->culprit`. */
static tutti_status died_meanwhile(tutti_group *group, const tutti_group *parent, const tu_vote *vote,
                                   const char *what) {
    tu_job *job = group->world->job;
    const tutti_group *of;
    int dead = find_lost(group, parent, vote->culprit < 0, &of);
    if (dead >= 0) {
        char doing[160];
        snprintf(doing, sizeof doing, "in %s", what);
        tutti_status status = tu_death_error(job, of->job_ranks[dead], doing);
        tu_error_at_fault(rank_in(parent, of->ranks[dead]));
        return status;
    }
    if (vote->culprit < 0)
        return tu_error(TUTTI_ERROR_STATE, "%s: a member gave up, and so no group was made", what);
    tu_error(vote->culprit_status, "no group was made, because rank %d says: %s", group->ranks[vote->culprit],
             vote->culprit_text);
    tu_error_at_fault(rank_in(parent, group->ranks[vote->culprit]));
    return vote->culprit_status;
}

static tutti_status judge(tutti_group *group, const tutti_group *parent, const tu_vote *vote, const char *what) {
    switch (vote->outcome) {
    case TU_VOTE_DONE:
        return TUTTI_OK;
    case TU_VOTE_FAILED:
        tu_error(vote->culprit_status, "no group was made, because rank %d cannot: %s", group->ranks[vote->culprit],
                 vote->culprit_text);
        tu_error_at_fault(rank_in(parent, group->ranks[vote->culprit]));
        return vote->culprit_status;
    case TU_VOTE_LATE:
        return tu_error(TUTTI_ERROR_TIMEOUT, "timeout: %s: not all ranks said in time that they have it", what);
    case TU_VOTE_MISMATCH:
        return tu_error(TUTTI_ERROR_MISMATCH, "the ranks disagree in %s: rank %d votes on something else", what,
                        vote->culprit);
    default:
        return died_meanwhile(group, parent, vote, what);
    }
}

tutti_status tu_group_commit(tutti_group *group, const tutti_group *parent, int64_t deadline, const char *what,
                             tutti_status mine) {
    tutti_world *world = group->world;
    if (world->fake || !group->local || group->size == 1)
        return mine;
    bool *flags = group->page_mapping != NULL ? malloc(2 * (size_t)group->size) : NULL;
    if (flags == NULL) {
        tu_job_refuse(world->job, group->key);
        return mine != TUTTI_OK ? mine : tu_error_memory("an agreement", 2 * (size_t)group->size);
    }
    tu_operation_info info = { .operation = TU_OPERATION_GROUP_NEW, .root = -1, .group_key = group->key };
    tu_vote vote = { .kind = TU_VOTE_COMMIT,
                     .status = mine,
                     .text = mine != TUTTI_OK ? tutti_error_message() : NULL,
                     .awaited = flags,
                     .members = flags + group->size,
                     .refusal = group->key,
                     .info = &info,
                     .deadline = deadline };
    memset(flags, true, (size_t)group->size);
    pthread_mutex_lock(&group->vote_lock);
    if (mine != TUTTI_OK)
        tu_vote_cast(group, &vote);
    else
        mine = tu_vote_hold(group, &vote);
    pthread_mutex_unlock(&group->vote_lock);
    if (vote.status == TUTTI_OK && mine == TUTTI_OK)
        mine = judge(group, parent, &vote, what);
    free(flags);
    return mine;
}

void tu_group_unmake(tutti_group *group) {
    tutti_error_copy error;
    tu_error_save(&error);
    if (tutti_group_destroy(group) != TUTTI_OK &&
        atomic_load_explicit(&group->world->closed, memory_order_relaxed) == 0)
        TU_LOG(TUTTI_LOG_WARN, group->world->log, "world", "%s", tutti_error_message());
    (void)tu_error_restore(&error);
}
