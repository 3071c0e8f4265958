/* SPDX-License-Identifier: Apache-2.0
 *
 * The agreement by which groups come about. Those who take part compare what they are about to make, and fail alike
 * when they differ or when one of them cannot; whatever a rank needs for the group it has before it agrees. Then the
 * vote of commit.c: a rank that dies between its messages leaves nobody with half a group.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "world/create.h"
#include "world/sha1.h"

void tu_agreement_describe(tu_agreement *mine, const char *name, const char *tag, const int *ranks, int count,
                           int64_t timeout_ns) {
    char list[128];
    tu_ranks_text(ranks, count, list, sizeof list);
    int used = snprintf(mine->text, sizeof mine->text, "group %s of ranks [%s]", name, list);
    if (tag[0] != 0 && used > 0 && (size_t)used < sizeof mine->text)
        snprintf(mine->text + used, sizeof mine->text - (size_t)used, " with tag \"%.48s\"", tag);
    size_t bytes = sizeof(int) * (size_t)count;
    char *all = malloc(bytes + 256);
    if (all == NULL) {
        mine->status = (int32_t)tu_error_memory("an agreement", bytes + 256);
        return;
    }
    memcpy(all, ranks, bytes);
    int more = snprintf(all + bytes, 256, "|%s|%s|%lld", name, tag, (long long)timeout_ns);
    tu_sha1(all, bytes + (size_t)more, mine->digest);
    free(all);
}

void tu_agreement_refuse(tu_agreement *mine, tutti_status status) {
    mine->status = (int32_t)status;
    tu_error_shorten(mine->text, sizeof mine->text, tutti_error_message());
}

/* Compares what all sent. *exists: all members have it already. `ranks` are for messages. */
static tutti_status compare(const tu_agreement *all, const int *ranks, int count, int me, bool *exists) {
    for (int i = 0; i < count; i++)
        if (all[i].status != TUTTI_OK) {
            tu_error((tutti_status)all[i].status, "no group was made, because rank %d cannot: %.*s", ranks[i],
                     (int)sizeof all[i].text, all[i].text);
            tu_error_at_fault(i);
            return (tutti_status)all[i].status;
        }
    int with = -1, without = -1;
    for (int i = 0; i < count; i++) {
        if (memcmp(all[i].digest, all[me].digest, sizeof all[i].digest) != 0) {
            tu_error(TUTTI_ERROR_MISMATCH,
                     "the ranks disagree on the group to make: rank %d makes %.*s, rank %d makes %.*s. All must pass "
                     "the same ranks, name, tag and timeout, in the same order of calls",
                     ranks[me], (int)sizeof all[me].text, all[me].text, ranks[i], (int)sizeof all[i].text, all[i].text);
            tu_error_at_fault(i);
            return TUTTI_ERROR_MISMATCH;
        }
        if (all[i].member)
            *(all[i].exists ? &with : &without) = i;
    }
    if (with >= 0 && without >= 0) {
        tu_error(TUTTI_ERROR_MISMATCH,
                 "the ranks disagree: rank %d has %.*s already, rank %d has not; make and destroy "
                 "groups with tags alike on all ranks",
                 ranks[with], (int)sizeof all[with].text, all[with].text, ranks[without]);
        tu_error_at_fault(without);
        return TUTTI_ERROR_MISMATCH;
    }
    *exists = with >= 0;
    return TUTTI_OK;
}

/* ---- what the exchange hands over ---- */

static void release_mappings(tu_mapping **mappings, int count) {
    for (int i = 0; i < count; i++)
        if (mappings[i] != NULL)
            tu_mapping_release(mappings[i]);
}

tutti_status tu_group_share_page(tutti_group *group, const tu_piece *piece, int64_t deadline, _Atomic uint64_t *ended,
                                 uint64_t above) {
    tu_mapping **mappings = calloc((size_t)group->size, sizeof *mappings);
    if (mappings == NULL)
        return tu_error_memory("an exchange", (size_t)group->size * sizeof *mappings);
    char what[96];
    snprintf(what, sizeof what, "making group %s", group->name);
    tu_meeting meeting = { .ranks = group->ranks,
                           .count = group->size,
                           .me = group->rank,
                           .key = group->key,
                           .purpose = "group_page",
                           .what = what,
                           .ended = ended,
                           .ended_above = above };
    uint8_t nothing = 0;
    uint8_t *nothings = malloc((size_t)group->size);
    tutti_status status = nothings != NULL ? TUTTI_OK : tu_error_memory("an exchange", (size_t)group->size);
    if (status == TUTTI_OK)
        status = tu_meet(group->world, &meeting, &nothing, 1, piece, deadline, nothings, mappings);
    if (status == TUTTI_OK) {
        tu_group_page_set(group, mappings[0]);
        mappings[0] = NULL;
        release_mappings(mappings, group->size);
    }
    free(nothings);
    free(mappings);
    return status;
}

/* ---- by agreement of a parent ---- */

/* How far an undertaking came on this rank. */
typedef struct stage {
    bool complete; /* all records went their ways: whatever fails from here on, the others do not wait for this rank */
    bool differ;   /* the records disagree, or one cannot: all know, and nobody votes */
    bool registered;
} stage;

static tutti_status register_group(tutti_group *group, const char *tag, stage *stage) {
    tutti_status status = tu_group_register(group, tag);
    stage->registered = status == TUTTI_OK;
    return status;
}

/* The exchange over the parent; gives the new group its page, and enters it into the registry. */
static tutti_status exchange_agreements(tutti_group *parent, const tu_operation_info *info, int64_t deadline,
                                        tu_undertaking *task, stage *stage) {
    tu_agreement *all = calloc((size_t)parent->size, sizeof *all + sizeof(tu_mapping *));
    if (all == NULL)
        return tu_error_memory("an agreement", (size_t)parent->size * sizeof *all);
    tu_mapping **mappings = (tu_mapping **)(void *)(all + parent->size);
    bool one_host = parent->local && !parent->world->fake;
    tu_group_cargo cargo = { .piece = one_host ? task->piece : NULL,
                             .mappings = one_host ? mappings : NULL,
                             .descriptor = -1,
                             .complete = &stage->complete };
    tutti_status status =
        tu_group_exchange_with(parent, info, task->purpose, &task->mine, sizeof task->mine, &cargo, deadline, all);
    if (status != TUTTI_OK) {
        free(all);
        return status;
    }
    status = compare(all, parent->ranks, parent->size, parent->rank, &task->exists);
    stage->complete = true;
    stage->differ = status != TUTTI_OK;
    tutti_group *group = task->exists ? NULL : task->group;
    if (status == TUTTI_OK && group != NULL && group->page == NULL) {
        if (one_host) {
            int first = tu_rank_index(parent->ranks, parent->size, group->ranks[0]);
            tu_group_page_set(group, mappings[first]);
            mappings[first] = NULL;
        } else {
            status = tu_group_share_page(group, task->piece, deadline, NULL, 0);
        }
    }
    if (status == TUTTI_OK && group != NULL)
        status = tu_group_make_part(group, deadline, NULL, 0);
    release_mappings(mappings, parent->size);
    free(all);
    return status == TUTTI_OK && group != NULL ? register_group(group, task->tag, stage) : status;
}

/* Failures of which all know alike, and which leave nobody waiting, end nothing. */
static bool ends_nothing(const stage *stage, tutti_status status) {
    return stage->differ || (stage->complete && (status == TUTTI_ERROR_MEMORY || status == TUTTI_ERROR_LIMIT ||
                                                 status == TUTTI_ERROR_EXISTS || status == TUTTI_ERROR_SYSTEM));
}

tutti_status tu_undertake(tutti_group *parent, tu_undertaking *task) {
    tu_operation_info info = { .operation = (uint8_t)task->operation, .root = -1 };
    int64_t deadline;
    uint64_t ticket;
    tutti_status status = tu_group_enter(parent, task->timeout_ns, &info, &deadline, &ticket);
    if (status != TUTTI_OK)
        return status;
    char what[160];
    tu_operation_text(parent, &info, what, sizeof what);
    stage stage = { .complete = false };
    status = exchange_agreements(parent, &info, deadline, task, &stage);
    if (task->group != NULL && !task->exists && !stage.differ)
        status = tu_group_commit(task->group, parent, deadline, what, status);
    if (status != TUTTI_OK && stage.registered)
        tu_group_unmake(task->group);
    return status != TUTTI_OK && ends_nothing(&stage, status) ? tu_group_leave_agreement(parent, ticket, status)
                                                              : tu_group_leave(parent, &info, ticket, status);
}

/* ---- by agreement of the members alone ---- */

/* A person knows the call, not the exchange inside it: who did not come, and what each of them does instead. */
static tutti_status late_members(tutti_world *world, const tu_group_plan *plan, const char *what, int64_t timeout_ns) {
    tutti_error_info missing = TUTTI_ERROR_INFO_INIT;
    (void)!tutti_error_detail(&missing);
    if (missing.at_fault_count == 0) /* it was the store */
        return TUTTI_ERROR_TIMEOUT;
    tu_error(TUTTI_ERROR_TIMEOUT, "timeout: %s: rank %d waited %s", what, world->rank, tu_duration_of(timeout_ns).text);
    int ranks[TUTTI_ERROR_RANKS];
    for (int i = 0; i < missing.at_fault_count && i < TUTTI_ERROR_RANKS; i++) {
        tu_error_at_fault(missing.at_fault[i]);
        ranks[i] = plan->ranks[missing.at_fault[i]];
    }
    tutti_group *group = world->group; /* of all ranks, wherever they are */
    tu_group_append_missing(group, ranks, missing.at_fault_count);
    tu_group_append_remedy(group);
    return TUTTI_ERROR_TIMEOUT;
}

tutti_status tu_undertake_alone(tutti_world *world, const tu_group_plan *plan, tu_undertaking *task) {
    int count = plan->count;
    tu_agreement *all = calloc((size_t)count, sizeof *all + sizeof(tu_mapping *));
    if (all == NULL)
        return tu_error_memory("an agreement", (size_t)count * (sizeof *all + sizeof(tu_mapping *)));
    tu_mapping **mappings = (tu_mapping **)(void *)(all + count);
    char what[96];
    snprintf(what, sizeof what, "making group %s", plan->name);
    tu_meeting meeting = { .ranks = plan->ranks,
                           .count = count,
                           .me = tu_rank_index(plan->ranks, count, world->rank),
                           .key = plan->key,
                           .purpose = task->purpose,
                           .what = what };
    bool shared = !world->fake && count > 1;
    for (int i = 0; i < count && shared; i++)
        shared = world->job_rank_of[plan->ranks[i]] >= 0;
    int64_t timeout_ns = task->timeout_ns != 0 ? task->timeout_ns : world->timeout_ns,
            deadline = tu_deadline(timeout_ns);
    stage stage = { .complete = false };
    tutti_group *group = task->group;
    tutti_status status =
        tu_meet(world, &meeting, &task->mine, sizeof task->mine, task->piece, deadline, all, shared ? mappings : NULL);
    if (status == TUTTI_ERROR_TIMEOUT && !world->fake)
        status = late_members(world, plan, what, timeout_ns);
    if (status == TUTTI_OK) {
        status = compare(all, plan->ranks, count, meeting.me, &task->exists);
        stage.differ = status != TUTTI_OK;
        if (status == TUTTI_OK && shared) {
            tu_group_page_set(group, mappings[0]);
            mappings[0] = NULL;
        }
        release_mappings(mappings, count);
    }
    free(all);
    if (status == TUTTI_OK)
        status = tu_group_make_part(group, deadline, NULL, 0);
    if (status == TUTTI_OK)
        status = register_group(group, task->tag, &stage);
    if (group != NULL && !stage.differ)
        status = tu_group_commit(group, group, deadline, what, status);
    if (status != TUTTI_OK && stage.registered)
        tu_group_unmake(group);
    return status;
}
