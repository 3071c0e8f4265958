/* SPDX-License-Identifier: Apache-2.0 */
#include "world/vote_inner.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "job/liveness.h"
#include "world/group.h"

/* What a member says in one attempt. By the member. Words that a slow reader may still look at are atomic; `text` is
 * read only when it was the decision's culprit. */
typedef struct ballot {
    _Atomic uint64_t completed, digest;
    _Atomic uint32_t kind, yes;
    _Atomic int32_t status;
    char text[TU_VOTE_TEXT];
} ballot;

/* What a member would decide. By the member; `attempt` is 0 while it is being written. */
typedef struct proposal {
    _Atomic uint64_t attempt, settled;
    _Atomic uint32_t outcome, all;
    _Atomic int32_t culprit;
    _Atomic uint64_t members[]; /* a bit each */
} proposal;

typedef struct slot {
    _Alignas(128) _Atomic uint64_t arrived; /* last attempt that the member has a ballot in. By the member; release. */
    ballot ballots[2];                      /* by the parity of the attempt; then follow two proposals */
} slot;

/* ---- where things lie ---- */

static size_t words_of(int size) {
    return ((size_t)size + 63) / 64;
}

static size_t proposal_bytes(int size) {
    return sizeof(proposal) + words_of(size) * sizeof(uint64_t);
}

static size_t slot_bytes(int size) {
    return (sizeof(slot) + 2 * proposal_bytes(size) + 127) & ~(size_t)127;
}

size_t tu_votes_bytes(int size) {
    return (size_t)size * slot_bytes(size);
}

static slot *slot_of(const tutti_group *group, int member) {
    char *first = (char *)(group->page + 1) + tu_area_bytes(group->size);
    return (slot *)(void *)(first + (size_t)member * slot_bytes(group->size));
}

static ballot *ballot_of(const tutti_group *group, int member, uint64_t attempt) {
    return &slot_of(group, member)->ballots[attempt & 1];
}

static proposal *proposal_of(const tutti_group *group, int member, uint64_t attempt) {
    return (proposal *)(void *)((char *)(slot_of(group, member) + 1) + (attempt & 1) * proposal_bytes(group->size));
}

static uint64_t decided_attempt(const tutti_group *group) {
    /* Acquire pairs with the swap in decide(). */
    return atomic_load_explicit(&group->page->decided, memory_order_acquire) >> 32;
}

static bool has_arrived(const tutti_group *group, int member, uint64_t attempt) {
    /* Acquire pairs with the release in arrive(). */
    return atomic_load_explicit(&slot_of(group, member)->arrived, memory_order_acquire) >= attempt;
}

static bool is_gone(tu_rank_state state) {
    return state == TU_RANK_DEAD || state == TU_RANK_CLOSED;
}

static void ring(tutti_group *group, const tu_vote *vote) {
    for (int member = 0; member < group->size; member++)
        if (vote->awaited[member] && member != group->rank)
            tu_job_ring(group->world->job, group->job_ranks[member]);
}

/* ---- voting ---- */

static void arrive(tutti_group *group, const tu_vote *vote) {
    ballot *mine = ballot_of(group, group->rank, vote->attempt);
    atomic_store_explicit(&mine->completed, tutti_group_completed(group), memory_order_relaxed);
    atomic_store_explicit(&mine->digest, vote->digest, memory_order_relaxed);
    atomic_store_explicit(&mine->kind, vote->kind, memory_order_relaxed);
    atomic_store_explicit(&mine->yes, vote->yes, memory_order_relaxed);
    atomic_store_explicit(&mine->status, (int32_t)vote->status, memory_order_relaxed);
    tu_error_shorten(mine->text, sizeof mine->text, vote->text != NULL ? vote->text : "");
    atomic_store_explicit(&slot_of(group, group->rank)->arrived, vote->attempt,
                          memory_order_release); /* pairs with has_arrived */
    ring(group, vote);
}

void tu_vote_weigh(const tu_vote *vote, uint32_t kind, uint64_t digest, tutti_status status, int member,
                   tu_vote_outcome *outcome, int *culprit) {
    tu_vote_outcome found = TU_VOTE_DONE;
    if (kind != (uint32_t)vote->kind || digest != vote->digest)
        found = TU_VOTE_MISMATCH;
    else if (status == TUTTI_ERROR_DEAD || status == TUTTI_ERROR_GONE || status == TUTTI_ERROR_STATE)
        found = TU_VOTE_RETRY;
    else if (status != TUTTI_OK)
        found = TU_VOTE_FAILED;
    if (found == TU_VOTE_DONE || *outcome == TU_VOTE_MISMATCH || (*outcome == TU_VOTE_FAILED && found == TU_VOTE_RETRY))
        return;
    *outcome = found;
    *culprit = member;
}

static void weigh(const ballot *theirs, int member, const tu_vote *vote, tu_vote_outcome *outcome, int *culprit) {
    tu_vote_weigh(vote, atomic_load_explicit(&theirs->kind, memory_order_relaxed),
                  atomic_load_explicit(&theirs->digest, memory_order_relaxed),
                  (tutti_status)atomic_load_explicit(&theirs->status, memory_order_relaxed), member, outcome, culprit);
}

static bool has_refused(const tutti_group *group, int member, const tu_vote *vote) {
    return vote->refusal != 0 && tu_job_refused(group->world->job, group->job_ranks[member], vote->refusal);
}

static bool everybody_came(tutti_group *group, const tu_vote *vote) {
    for (int member = 0; member < group->size; member++)
        if (vote->awaited[member] && !has_arrived(group, member, vote->attempt) &&
            !is_gone(tu_rank_state_of(group->world->job, group->job_ranks[member])) &&
            !has_refused(group, member, vote))
            return false;
    return true;
}

/* Writes this member's proposal from what lies there. `late`: the deadline has passed; `mismatch`: a member that is
 * elsewhere. */
static void propose(tutti_group *group, const tu_vote *vote, bool late, int mismatch) {
    late = late && !everybody_came(group, vote); /* in the very last moment */
    proposal *mine = proposal_of(group, group->rank, vote->attempt);
    atomic_store_explicit(&mine->attempt, 0, memory_order_relaxed);
    atomic_thread_fence(
        memory_order_release); /* nobody takes the words below for the old attempt's: pairs with read_decision */
    tu_vote_outcome outcome = TU_VOTE_DONE;
    uint64_t settled = UINT64_MAX, bits[words_of(group->size)];
    memset(bits, 0, sizeof bits);
    int culprit = -1;
    bool all = true;
    for (int member = 0; member < group->size; member++) {
        if (!vote->awaited[member])
            continue;
        /* First whether it departed, then whether it came: what it did before it departed counts. */
        bool gone = is_gone(tu_rank_probe(group->world->job, group->job_ranks[member]));
        bool came = has_arrived(group, member, vote->attempt);
        if (came) {
            const ballot *theirs = ballot_of(group, member, vote->attempt);
            uint64_t completed = atomic_load_explicit(&theirs->completed, memory_order_relaxed);
            weigh(theirs, member, vote, &outcome, &culprit);
            all = all && atomic_load_explicit(&theirs->yes, memory_order_relaxed) != 0;
            if (!gone && completed < settled)
                settled = completed;
        } else if ((gone || has_refused(group, member, vote)) && vote->kind == TU_VOTE_COMMIT &&
                   outcome == TU_VOTE_DONE) {
            outcome = TU_VOTE_RETRY;
        }
        if (!gone && came != late)
            bits[member / 64] |= UINT64_C(1) << (member % 64);
    }
    if (mismatch >= 0)
        outcome = TU_VOTE_MISMATCH, culprit = mismatch;
    else if (late)
        outcome = TU_VOTE_LATE;
    atomic_store_explicit(&mine->settled, settled, memory_order_relaxed);
    atomic_store_explicit(&mine->outcome, outcome, memory_order_relaxed);
    atomic_store_explicit(&mine->all, all, memory_order_relaxed);
    atomic_store_explicit(&mine->culprit, culprit, memory_order_relaxed);
    for (size_t i = 0; i < words_of(group->size); i++)
        atomic_store_explicit(&mine->members[i], bits[i], memory_order_relaxed);
    atomic_store_explicit(&mine->attempt, vote->attempt, memory_order_release);
}

/* Makes this member's proposal the decision, unless there is one. */
static void decide(tutti_group *group, const tu_vote *vote) {
    uint64_t seen = atomic_load_explicit(&group->page->decided, memory_order_acquire);
    uint64_t mine = vote->attempt << 32 | ((uint64_t)group->rank + 1);
    while (seen >> 32 < vote->attempt &&
           !atomic_compare_exchange_weak_explicit(&group->page->decided, &seen, mine, memory_order_acq_rel,
                                                  memory_order_acquire))
        ;
    ring(group, vote);
}

/* False: the others have gone on so far that it cannot be read any more. */
static bool read_decision(tutti_group *group, tu_vote *vote) {
    uint64_t decided = atomic_load_explicit(&group->page->decided, memory_order_acquire);
    if (decided >> 32 != vote->attempt)
        return false;
    const proposal *chosen = proposal_of(group, (int)(decided & 0xffffffff) - 1, vote->attempt);
    vote->outcome = (tu_vote_outcome)atomic_load_explicit(&chosen->outcome, memory_order_relaxed);
    vote->all = atomic_load_explicit(&chosen->all, memory_order_relaxed) != 0;
    vote->settled = atomic_load_explicit(&chosen->settled, memory_order_relaxed);
    vote->culprit = atomic_load_explicit(&chosen->culprit, memory_order_relaxed);
    for (int member = 0; member < group->size; member++)
        vote->members[member] =
            atomic_load_explicit(&chosen->members[member / 64], memory_order_relaxed) >> (member % 64) & 1;
    vote->culprit_status = TUTTI_OK;
    if (vote->outcome == TU_VOTE_FAILED || (vote->outcome == TU_VOTE_RETRY && vote->culprit >= 0)) {
        const ballot *theirs = ballot_of(group, vote->culprit, vote->attempt);
        vote->culprit_status = (tutti_status)atomic_load_explicit(&theirs->status, memory_order_relaxed);
        memcpy(vote->culprit_text, theirs->text, sizeof vote->culprit_text);
        vote->culprit_text[sizeof vote->culprit_text - 1] = 0;
    }
    atomic_thread_fence(memory_order_acquire); /* pairs with the fence in propose() */
    return atomic_load_explicit(&chosen->attempt, memory_order_relaxed) == vote->attempt;
}

/* ---- waiting ---- */

typedef struct watch {
    tutti_group *group;
    const tu_vote *vote;
    tu_vote_suspect suspect;
    bool elsewhere; /* the suspect is in another operation than this one */
} watch;

/* Members that wait for a dead one find that out themselves, in a moment. */
static bool lost_a_member(tutti_group *group) {
    for (int member = 0; member < group->size; member++)
        if (is_gone(tu_rank_probe(group->world->job, group->job_ranks[member])))
            return true;
    return false;
}

static bool complete(void *argument) {
    const watch *state = argument;
    return decided_attempt(state->group) >= state->vote->attempt || everybody_came(state->group, state->vote);
}

/* The sequenced operation that a member waits in: on this host its recorder tells, elsewhere what it has asked this
 * rank. */
static bool current_operation(tutti_group *group, int member, uint64_t *sequence, char *text, size_t bytes) {
    tutti_world *world = group->world;
    tu_record_view view;
    if (group->job_ranks[member] < 0) {
        /* Pairs with the release of whoever opened the network. */
        bool (*asked)(tutti_group *, int, uint64_t *, char *, size_t) =
            atomic_load_explicit(&world->asked_by_hosts, memory_order_acquire);
        return asked != NULL && asked(group, member, sequence, text, bytes);
    }
    const tu_recorder *recorder = tu_job_recorder(world->job, group->job_ranks[member]);
    if (!tu_recorder_current(recorder, group->key, &view) || !tu_operation_sequenced((tu_operation)view.info.operation))
        return false;
    *sequence = view.info.sequence;
    tu_record_text(recorder, &view, text, bytes);
    return true;
}

bool tu_vote_elsewhere(tutti_group *group, const tu_vote *vote, int member, tu_vote_suspect *suspect, bool *found) {
    char theirs[160];
    uint64_t sequence;
    if (tu_group_ended(group) || !current_operation(group, member, &sequence, theirs, sizeof theirs) ||
        sequence <= tutti_group_sequence(group))
        return false;
    *found = true;
    bool again = suspect->member == member && suspect->sequence == sequence;
    *suspect = (tu_vote_suspect){ member, sequence };
    if (!again)
        return false;
    const char *operation = tu_operation_name((tu_operation)vote->info->operation);
    tu_error(
        TUTTI_ERROR_MISMATCH,
        "the ranks disagree: rank %d called %s, rank %d called %s. All ranks of a group must call the same operations "
        "in the same order",
        group->rank, operation, member, theirs);
    tu_error_at_fault(member);
    (void)tu_error_where(group->name, operation, vote->info->sequence, group->rank);
    return true;
}

static tutti_status look(void *argument) {
    watch *state = argument;
    tutti_group *group = state->group;
    int first = -1;
    bool lost = lost_a_member(group), found = false;
    for (int member = 0; member < group->size; member++) {
        if (!state->vote->awaited[member] || member == group->rank || has_arrived(group, member, state->vote->attempt))
            continue;
        if (is_gone(tu_rank_probe(group->world->job, group->job_ranks[member])))
            continue;
        if (first < 0)
            first = member;
        if (!lost && !found && tu_vote_elsewhere(group, state->vote, member, &state->suspect, &found)) {
            state->elsewhere = true;
            return TUTTI_ERROR_MISMATCH;
        }
    }
    if (!found)
        state->suspect.member = -1;
    tu_record_waiting(tu_job_recorder(group->world->job, group->world->local_rank), state->vote->ticket,
                      first < 0 ? -1 : group->ranks[first]);
    return TUTTI_OK;
}

static void number(tutti_group *group, tu_vote *vote) {
    if (vote->attempt == 0) {
        /* One that others gave up waiting for, or left out, joins them at their next vote. */
        uint64_t decided = decided_attempt(group);
        vote->attempt = (decided > group->attempts ? decided : group->attempts) + 1;
    }
    group->attempts = vote->attempt;
}

void tu_vote_cast(tutti_group *group, tu_vote *vote) {
    number(group, vote);
    arrive(group, vote);
}

tutti_status tu_vote_hold(tutti_group *group, tu_vote *vote) {
    if (!group->local)
        return tu_vote_hold_hosts(group, vote);
    number(group, vote);
    watch state = { .group = group, .vote = vote, .suspect.member = -1 };
    tu_wait wait;
    tu_job_wait_init(group->world->job, vote->deadline, &wait);
    wait.check = look;
    wait.argument = &state;
    arrive(group, vote);
    tutti_status status = tu_wait_until(&wait, complete, &state);
    if (status == TUTTI_ERROR_INTERRUPTED) {
        char what[160];
        snprintf(what, sizeof what, "%s of group %s", tu_operation_name((tu_operation)vote->info->operation),
                 group->name);
        return tu_world_interrupted(group->world, what);
    }
    if (status == TUTTI_ERROR_MISMATCH)
        tu_group_end(group, vote->info);
    if (decided_attempt(group) < vote->attempt) {
        propose(group, vote, status == TUTTI_ERROR_TIMEOUT, state.elsewhere ? state.suspect.member : -1);
        decide(group, vote);
    }
    if (read_decision(group, vote))
        return TUTTI_OK;
    return tu_error(
        TUTTI_ERROR_TIMEOUT,
        "%s of group %s: rank %d came too late, the others have gone on without it; call it again to meet them",
        tu_operation_name((tu_operation)vote->info->operation), group->name, group->rank);
}
