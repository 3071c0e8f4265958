/* SPDX-License-Identifier: Apache-2.0
 *
 * Shrink and agree: what still works when a rank has died.
 *
 * A shrink goes in rounds. A vote says who survives and what all of them have completed; the survivors make the new
 * group, whose page goes round in an exchange; a second vote says whether all of them have it. One that dies in between
 * costs another round, without it; one that cannot fails all alike; one that does not come is named at the deadline.
 * The exchange fails at a death, so whoever fails in it sets the page's `abandoned` word, which ends it for the others
 * too.
 *
 * Across hosts the votes go through the store (vote_hosts.c), and pages only round among the members of each host.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "world/fault.h"
#include "world/group.h"
#include "world/sha1.h"
#include "world/vote_inner.h"

/* ---- entering ---- */

typedef struct call {
    tutti_group *group;
    const char *function;
    tu_operation_info info;
    int64_t deadline;
    uint64_t ticket;
    bool *awaited; /* by member: those that are not excluded. On the stack: nobody must fail for want of memory before
                      it has voted. */
    bool *members; /* by member: of the decision */
    uint64_t digest;
} call;

static tutti_status check_group(tutti_group *group, const char *function) {
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s needs a group of which this rank is a member", function);
    tutti_status status = tu_world_check(group->world);
    if (status != TUTTI_OK)
        return status;
    if (atomic_load_explicit(&group->destroyed, memory_order_relaxed))
        return tu_error(TUTTI_ERROR_STATE, "%s: group %s is already destroyed", function, group->name);
    return TUTTI_OK;
}

/* Everything but the lock. The record begins here. */
static tutti_status enter(call *this, tu_operation operation, int64_t timeout_ns) {
    tutti_group *group = this->group;
    this->info = (tu_operation_info){ .operation = (uint8_t)operation,
                                      .root = -1,
                                      .group_key = group->key,
                                      .group_index = group->recorder_index,
                                      .sequence = group->attempts + 1 };
    tutti_status status = tu_timeout_choose(this->function, timeout_ns, group->timeout_ns, group->world->timeout_ns,
                                            &this->info.timeout_ns);
    if (status == TUTTI_OK && group->world->faults != NULL)
        status = tu_fault_meet(group, &this->info);
    if (status != TUTTI_OK)
        return status;
    this->deadline = tu_deadline(this->info.timeout_ns);
    for (int member = 0; member < group->size; member++)
        this->awaited[member] = this->members[member] = true;
    this->ticket = tu_group_record(group, &this->info);
    return TUTTI_OK;
}

static tutti_status leave(call *this, tutti_status status) {
    tutti_group *group = this->group;
    if (status != TUTTI_OK)
        (void)tu_error_where(group->name, tu_operation_name((tu_operation)this->info.operation), this->info.sequence,
                             group->rank);
    if (!group->world->fake)
        (void)tu_group_leave_agreement(group, this->ticket, status);
    if (status != TUTTI_OK)
        tu_trace_failure(group->world);
    return status;
}

static tutti_status lock(call *this) {
    if (tu_mutex_lock_until(&this->group->vote_lock, this->deadline))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_TIMEOUT,
                    "timeout: %s waited %s for another thread of this rank that shrinks or agrees on the same group",
                    this->function, tu_duration_of(this->info.timeout_ns).text);
}

/* ---- what a decision that is no success means ---- */

static tutti_status late_error(const call *this) {
    tutti_group *group = this->group;
    const char *what = tu_operation_name((tu_operation)this->info.operation);
    tu_error(TUTTI_ERROR_TIMEOUT, "timeout: %s of group %s waited %s for ranks that live but do not come", what,
             group->name, tu_duration_of(this->info.timeout_ns).text);
    int missing[TUTTI_ERROR_RANKS], count = 0;
    for (int member = 0; member < group->size; member++) {
        if (!this->members[member])
            continue;
        if (count < TUTTI_ERROR_RANKS) {
            missing[count] = member;
            tu_error_at_fault(member);
        }
        count++;
    }
    tu_group_append_missing(group, missing, count);
    if (tu_operation_row_of(this->info.operation)->excludes_late)
        tu_error_append(". Let them call tutti_group_shrink too, or exclude them (tutti_shrink_options.exclude)");
    return TUTTI_ERROR_TIMEOUT;
}

/* Of a group across hosts. */
static tutti_status few_error(const call *this) {
    tutti_group *group = this->group;
    int left = 0, awaited = 0;
    for (int member = 0; member < group->size; member++) {
        left += this->members[member];
        awaited += this->awaited[member];
    }
    tu_error(TUTTI_ERROR_DEAD,
             "shrink of group %s: only %d of %d ranks are left, and more than that are out of reach without anybody "
             "knowing that they are dead: they may go on as another part of the job, so this one ends",
             group->name, left, awaited);
    for (int member = 0, told = 0; member < group->size && told < TUTTI_ERROR_RANKS; member++)
        if (this->awaited[member] && !this->members[member]) {
            tu_error_at_fault(member);
            told++;
        }
    return TUTTI_ERROR_DEAD;
}

static tutti_status verdict(const call *this, const tu_vote *vote) {
    tutti_group *group = this->group;
    switch (vote->outcome) {
    case TU_VOTE_LATE:
        return late_error(this);
    case TU_VOTE_MISMATCH:
        if (tu_group_ended(group)) {
            tutti_error_info first = TUTTI_ERROR_INFO_INIT;
            if (tu_group_cause(group) == TUTTI_ERROR_MISMATCH && tutti_error_detail(&first) == TUTTI_OK &&
                first.at_fault_count > 0 && first.at_fault[0] == vote->culprit)
                return TUTTI_ERROR_MISMATCH;
        }
        tu_error(
            TUTTI_ERROR_MISMATCH,
            "the ranks disagree: rank %d of group %s does not do the same as the others. In a group all ranks call "
            "tutti_group_shrink with the same exclusions, or all call tutti_group_agree",
            vote->culprit, group->name);
        tu_error_at_fault(vote->culprit);
        return TUTTI_ERROR_MISMATCH;
    case TU_VOTE_FAILED:
        tu_error(vote->culprit_status, "no group was made, because rank %d cannot: %s", group->ranks[vote->culprit],
                 vote->culprit_text);
        tu_error_at_fault(vote->culprit);
        return vote->culprit_status;
    case TU_VOTE_FEW:
        return few_error(this);
    default:
        return TUTTI_OK;
    }
}

/* ---- agree ---- */

tutti_status tutti_group_agree(tutti_group *group, bool mine, bool *all) {
    return tu_group_agree(group, mine, 0, all);
}

tutti_status tu_group_agree(tutti_group *group, bool mine, int64_t timeout_ns, bool *all) {
    TU_INSIDE_GROUP(group);
    call this = { .group = group, .function = "tutti_group_agree" };
    tutti_status status = check_group(group, this.function);
    if (status == TUTTI_OK && all == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_agree: where the answer goes is NULL");
    if (status != TUTTI_OK)
        return status;
    bool awaited[group->size], members[group->size];
    this.awaited = awaited;
    this.members = members;
    status = enter(&this, TU_OPERATION_AGREE, timeout_ns);
    if (status != TUTTI_OK)
        return status;
    tu_vote vote = { .kind = TU_VOTE_AGREE,
                     .yes = mine,
                     .awaited = this.awaited,
                     .members = this.members,
                     .info = &this.info,
                     .ticket = this.ticket,
                     .deadline = this.deadline,
                     .all = mine };
    if (!group->world->fake) {
        status = lock(&this);
        if (status == TUTTI_OK) {
            status = tu_vote_hold(group, &vote);
            pthread_mutex_unlock(&group->vote_lock);
        }
        if (status == TUTTI_OK)
            status = verdict(&this, &vote);
    }
    status = leave(&this, status);
    if (status == TUTTI_OK)
        *all = vote.all;
    return status;
}

/* ---- making the new group ---- */

typedef struct rest {
    tutti_group *group;
    int *ranks; /* world ranks of the survivors */
    int count;
} rest;

/* "0:shrink:3": the third vote of group 0. A name that would become too long is shortened to its hash. */
static void name_rest(const tutti_group *group, uint64_t attempt, char name[64]) {
    char full[96];
    int length = snprintf(full, sizeof full, "%s:shrink:%llu", group->name, (unsigned long long)attempt);
    if (length < 64)
        memcpy(name, full, (size_t)length + 1);
    else
        tu_sha1_text(full, (size_t)length, name);
}

/* The object and, on its member 0, memory for its page. */
static tutti_status prepare(const call *this, const tu_vote *vote, rest *made, const tu_piece **piece) {
    tutti_group *group = this->group;
    char name[64], description[64];
    name_rest(group, vote->attempt, name);
    snprintf(description, sizeof description, "%.44s:shrink:%llu", group->description,
             (unsigned long long)vote->attempt);
    made->count = 0;
    for (int member = 0; member < group->size; member++)
        if (vote->members[member])
            made->ranks[made->count++] = group->ranks[member];
    tu_group_plan plan = { .name = name,
                           .description = description,
                           .key = tu_group_key("shrink %016llx %llu", (unsigned long long)group->key,
                                               (unsigned long long)vote->attempt),
                           .ranks = made->ranks,
                           .count = made->count,
                           .timeout_ns = group->timeout_ns };
    tutti_status status = tu_group_make(group->world, &plan, &made->group);
    return status == TUTTI_OK ? tu_group_page_reserve(made->group, piece) : status;
}

/* Of the members on this host: those of other hosts are in no exchange with them. */
static _Atomic uint64_t *abandoned_word(const tutti_group *group) {
    const tutti_group *here = atomic_load_explicit(&group->here, memory_order_acquire);
    return &(here != NULL ? here : group)->page->abandoned;
}

void tu_shrink_abandon(const tutti_group *group, uint64_t attempt) {
    _Atomic uint64_t *word = abandoned_word(group);
    uint64_t before = atomic_load_explicit(word, memory_order_relaxed);
    while (before < attempt && /* release: pairs with the exchange's look at it */
           !atomic_compare_exchange_weak_explicit(word, &before, attempt, memory_order_release, memory_order_relaxed))
        continue;
}

/* The page goes from the new member 0 to all. */
static tutti_status share_page(const call *this, const tu_vote *vote, tutti_group *made, const tu_piece *piece) {
    size_t count = (size_t)made->size;
    tu_mapping **mappings = calloc(count, sizeof *mappings + 1);
    if (mappings == NULL)
        return tu_error_memory("an exchange", count * (sizeof *mappings + 1));
    uint8_t nothing = 0;
    char what[160];
    tu_operation_text(this->group, &this->info, what, sizeof what);
    tu_meeting meeting = { .ranks = made->ranks,
                           .count = made->size,
                           .me = made->rank,
                           .key = made->key,
                           .purpose = "shrink",
                           .what = what,
                           .ended = abandoned_word(this->group),
                           .ended_above = vote->attempt - 1 };
    tutti_status status =
        tu_meet(made->world, &meeting, &nothing, 1, piece, this->deadline, mappings + count, mappings);
    if (status == TUTTI_OK) {
        tu_group_page_set(made, mappings[0]);
        for (size_t i = 1; i < count; i++)
            if (mappings[i] != NULL)
                tu_mapping_release(mappings[i]);
    }
    free(mappings);
    return status;
}

/* Everything that the new group needs, up to its entry in the registry. */
static tutti_status make_rest(const call *this, const tu_vote *vote, rest *made) {
    const tu_piece *piece = NULL;
    tutti_status status = prepare(this, vote, made, &piece);
    if (status == TUTTI_OK && made->group->page == NULL)
        status = share_page(this, vote, made->group, piece);
    if (status == TUTTI_OK)
        status = tu_group_make_part(made->group, this->deadline, abandoned_word(this->group), vote->attempt - 1);
    if (status == TUTTI_OK) {
        atomic_store_explicit(&made->group->settled, vote->settled, memory_order_relaxed);
        status = tu_group_register(made->group, NULL);
    }
    if (status != TUTTI_OK) {
        tu_shrink_abandon(this->group, vote->attempt);
        tutti_group_release(made->group);
        made->group = NULL;
    }
    return status;
}

static void unmake_rest(rest *made) {
    if (made->group == NULL)
        return;
    tutti_error_copy error;
    tu_error_save(&error);
    if (tutti_group_destroy(made->group) != TUTTI_OK)
        TU_LOG(TUTTI_LOG_WARN, made->group->world->log, "world", "%s", tutti_error_message());
    (void)tu_error_restore(&error);
    tutti_group_release(made->group);
    made->group = NULL;
}

/* ---- shrink ---- */

/* The deaths of those that are left out end no wait on the store any more: whoever goes on knows of them. */
static void mourn(const call *this, const bool *survivors) {
    const tutti_group *group = this->group;
    tutti_world *world = group->world;
    for (int member = 0; member < group->size; member++)
        if (!survivors[member] && this->awaited[member] && world->mourned != NULL)
            atomic_store_explicit(&world->mourned[group->ranks[member]], true, memory_order_relaxed);
}

/* One round; *done when the new group stands. */
static tutti_status one_round(call *this, rest *made, bool *done) {
    tutti_group *group = this->group;
    tu_vote vote = { .kind = TU_VOTE_SHRINK,
                     .digest = this->digest,
                     .awaited = this->awaited,
                     .members = this->members,
                     .info = &this->info,
                     .ticket = this->ticket,
                     .deadline = this->deadline };
    tutti_status status = tu_vote_hold(group, &vote);
    if (status == TUTTI_OK)
        status = verdict(this, &vote);
    if (status == TUTTI_OK && !this->members[group->rank])
        status = tu_error(TUTTI_ERROR_STATE,
                          "shrink of group %s: the others took this rank, %d, for dead, and go on without it",
                          group->name, group->rank);
    if (status != TUTTI_OK)
        return status;
    bool survivors[group->size];
    memcpy(survivors, this->members, sizeof survivors);
    tutti_status result = make_rest(this, &vote, made);
    tu_vote commit = { .kind = TU_VOTE_COMMIT,
                       .status = result,
                       .text = result != TUTTI_OK ? tutti_error_message() : NULL,
                       .digest = this->digest,
                       .awaited = survivors,
                       .members = this->members,
                       .info = &this->info,
                       .ticket = this->ticket,
                       .deadline = this->deadline,
                       .attempt = vote.attempt + 1 };
    /* Where a member did not come to the exchange, the votes of the others come with its deadline: give them the
     * time. */
    if (result == TUTTI_ERROR_TIMEOUT)
        commit.deadline = tu_deadline(TU_SECOND);
    status = tu_vote_hold(group, &commit);
    if (status == TUTTI_OK)
        status = verdict(this, &commit);
    *done = status == TUTTI_OK && commit.outcome == TU_VOTE_DONE;
    if (*done)
        mourn(this, survivors);
    else
        unmake_rest(made);
    return status;
}

static tutti_status exclude(call *this, const tutti_shrink_options *options) {
    tutti_group *group = this->group;
    if (options->exclude == NULL && options->exclude_count == 0)
        return TUTTI_OK;
    if (options->exclude == NULL || options->exclude_count <= 0)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "tutti_group_shrink: the list of ranks to exclude is empty (exclude_count is %d); leave both NULL and 0 to "
            "exclude the dead alone",
            options->exclude_count);
    this->digest = 1;
    for (int i = 0; i < options->exclude_count; i++) {
        int member = options->exclude[i];
        if (member < 0 || member >= group->size)
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            "tutti_group_shrink: exclude[%d] is rank %d, but group %s has the ranks 0 to %d", i, member,
                            group->name, group->size - 1);
        if (!this->awaited[member])
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            "tutti_group_shrink: rank %d is twice in the list of ranks to exclude", member);
        this->awaited[member] = false;
    }
    if (options->exclude_count == group->size)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_group_shrink: all %d ranks of group %s are excluded; one must remain", group->size,
                        group->name);
    if (!this->awaited[group->rank])
        return tu_error(TUTTI_ERROR_STATE,
                        "tutti_group_shrink: this rank, %d, is excluded itself; only those that remain call it",
                        group->rank);
    for (int member = 0; member < group->size; member++) /* any order of the list gives the same digest */
        this->digest = this->digest * 31 + this->awaited[member];
    return TUTTI_OK;
}

/* A fake world: everybody but the excluded survives. */
static tutti_status shrink_fake(call *this, rest *made) {
    tu_vote vote = { .members = this->awaited,
                     .attempt = ++this->group->attempts,
                     .settled = tutti_group_completed(this->group) };
    return make_rest(this, &vote, made);
}

tutti_status tutti_group_shrink(tutti_group *group, const tutti_shrink_options *given, tutti_group **out) {
    TU_INSIDE_GROUP(group);
    call this = { .group = group, .function = "tutti_group_shrink" };
    tutti_shrink_options options = TUTTI_SHRINK_OPTIONS_INIT;
    tutti_status status = check_group(group, this.function);
    if (status == TUTTI_OK)
        status = tu_options_copy("tutti_shrink_options", given, &options, sizeof options);
    if (status == TUTTI_OK && out == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_shrink: where the group goes is NULL");
    if (status != TUTTI_OK)
        return status;
    bool awaited[group->size], members[group->size];
    int ranks[group->size];
    this.awaited = awaited;
    this.members = members;
    rest made = { .ranks = ranks };
    status = enter(&this, TU_OPERATION_SHRINK, options.timeout_ns);
    if (status != TUTTI_OK)
        return status;
    status = exclude(&this, &options);
    if (status == TUTTI_OK && group->world->fake) {
        status = shrink_fake(&this, &made);
    } else if (status == TUTTI_OK) {
        status = lock(&this);
        if (status == TUTTI_OK) {
            for (bool done = false; status == TUTTI_OK && !done;)
                status = one_round(&this, &made, &done);
            pthread_mutex_unlock(&group->vote_lock);
        }
    }
    status = leave(&this, status);
    if (status == TUTTI_OK)
        *out = made.group;
    return status;
}
