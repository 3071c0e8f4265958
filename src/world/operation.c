/* SPDX-License-Identifier: Apache-2.0
 *
 * The protocol that every operation of a group follows: enter, wait, leave; and how a group ends.
 *
 * A group ends once. The rank that sees the first cause wins the state word by compare-and-swap, writes the cause
 * beside it, marks it as told and rings the others; everybody else returns that cause, from then on and for ever.
 *
 * Budget of enter and leave together: no lock, no system call, no shared line written but the recorder's.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/bare.h"
#include "base/clock.h"
#include "base/error.h"
#include "job/liveness.h"
#include "world/fault.h"
#include "world/group.h"
#include "world/world.h"

void tu_operation_text(const tutti_group *group, const tu_operation_info *info, char *text, size_t bytes) {
    snprintf(text, bytes, "%s %llu of group %s", tu_operation_name((tu_operation)info->operation),
             (unsigned long long)info->sequence, group->name);
}

/* "rank 1", and where a group numbers differently than the world "rank 1 (world rank 5)". */
static const char *rank_text(const tutti_group *group, int member, char text[48]) {
    if (group->ranks[member] == member)
        snprintf(text, 48, "rank %d", member);
    else
        snprintf(text, 48, "rank %d (world rank %d)", member, group->ranks[member]);
    return text;
}

/* ---- the end of a group ---- */

/* Waits, bounded, for the winner to finish writing the cause: it does so without blocking, unless it died in
 * between. */
static bool told(const tutti_group *group) {
    int64_t deadline = tu_deadline(200 * TU_MILLISECOND);
    for (int i = 0;; i++) {
        if (atomic_load_explicit(&group->page->state, memory_order_acquire) & TU_GROUP_TOLD)
            return true;
        if (tu_clock_now() > deadline)
            return false;
        if (i < 100)
            tu_pause();
        else
            usleep(100);
    }
}

/* Where the cause is. Members on one host end a group across hosts in the page that they share, that of their part:
 * each takes it over from there, unless who began to write it has died. */
static tutti_group *find_cause(tutti_group *group) {
    tutti_group *known = tu_group_known(group);
    tutti_group *here = atomic_load_explicit(&known->here, memory_order_acquire);
    bool elsewhere = here != NULL && !tu_group_ended(known) && !(told(here) && tu_group_overhear(known));
    return elsewhere ? here : known;
}

tutti_status tu_group_cause(tutti_group *group) {
    char who[48];
    tutti_group *page_of = find_cause(group);
    group = tu_group_known(group);
    if (page_of != group || !told(group)) {
        uint64_t state = atomic_load_explicit(&page_of->page->state, memory_order_acquire);
        int origin = tu_group_known_rank(page_of, (int)(state & 0xffffffff) - 1);
        tu_error(TUTTI_ERROR_DEAD, "group %s was ended by %s, which died before it could say why", group->name,
                 rank_text(group, origin, who));
        tu_error_at_fault(origin);
        return tu_error_where(group->name, "", 0, group->rank);
    }
    const tu_cause *cause = &group->page->cause;
    if (cause->status == TUTTI_ERROR_ABORTED) /* it names who did */
        tu_error(TUTTI_ERROR_ABORTED, "group %s has ended: %s", group->name, cause->message);
    else if (cause->origin == group->rank)
        tu_error((tutti_status)cause->status, "group %s has ended, by what this rank saw first: %s", group->name,
                 cause->message);
    else
        tu_error((tutti_status)cause->status, "group %s has ended, by what %s saw first: %s", group->name,
                 rank_text(group, cause->origin, who), cause->message);
    for (int i = 0; i < cause->at_fault_count; i++)
        tu_error_at_fault(cause->at_fault[i]);
    return tu_error_where(group->name, cause->operation, cause->sequence, group->rank);
}

static void ring_members(tutti_group *group) {
    if (group->world->job == NULL)
        return;
    for (int member = 0; member < group->size; member++)
        if (group->job_ranks[member] >= 0)
            tu_job_ring(group->world->job, group->job_ranks[member]);
}

/* The thread's error as a cause. */
static void write_cause(const tutti_group *group, const tu_operation_info *info, tu_cause *cause) {
    tutti_error_copy error;
    tu_error_save(&error);
    cause->status = (int32_t)error.info.status;
    cause->origin = group->rank;
    cause->time = tu_clock_now();
    cause->sequence = info != NULL ? info->sequence : 0;
    snprintf(cause->operation, sizeof cause->operation, "%s",
             info != NULL ? tu_operation_name((tu_operation)info->operation) : error.info.operation);
    cause->at_fault_count = error.info.at_fault_count;
    memcpy(cause->at_fault, error.info.at_fault, sizeof cause->at_fault);
    tu_error_shorten(cause->message, sizeof cause->message, error.message);
}

/* The members on this host of a group across hosts: which of them is first is decided in the page that they share. */
static bool first_here(tutti_group *group, const tu_operation_info *info) {
    tutti_group *here = atomic_load_explicit(&group->here, memory_order_acquire);
    if (here == NULL)
        return true;
    tu_cause cause = { 0 };
    write_cause(group, info, &cause);
    return tu_group_pass_on(group, &cause) || !told(here) || !tu_group_overhear(group);
}

/* Whether this call is the one that ended the group. */
static bool end_group(tutti_group *of, const tu_operation_info *info) {
    tutti_group *group = tu_group_known(of);
    uint64_t lives = 0;
    uint64_t mine = (uint64_t)group->rank + 1;
    if (tu_group_ended(group) || !first_here(group, info) ||
        !atomic_compare_exchange_strong_explicit(&group->page->state, &lives, mine, memory_order_acq_rel,
                                                 memory_order_acquire))
        return false;
    tu_cause *cause = &group->page->cause;
    write_cause(group, info, cause);
    /* Pairs with the acquire loads in told() and in waits. */
    atomic_store_explicit(&group->page->state, mine | TU_GROUP_TOLD, memory_order_release);
    tu_group_tell_hosts(group, cause);
    ring_members(group);
    TU_LOG(TUTTI_LOG_INFO, group->world->log, "world", "group %s ends: %s", group->name, cause->message);
    return true;
}

void tu_group_end(tutti_group *group, const tu_operation_info *info) {
    (void)end_group(group, info);
}

/* ---- departures ---- */

/* Writes the error of a departed member, with group ranks in its detail. info NULL: nobody was in an operation. */
static tutti_status departed_error(tutti_group *of, int place, const tu_operation_info *info) {
    tutti_group *group = tu_group_known(of);
    int member = tu_group_known_rank(of, place);
    char doing[160] = "by a look at the group";
    if (info != NULL) {
        int at = snprintf(doing, sizeof doing, "in ");
        tu_operation_text(group, info, doing + at, sizeof doing - (size_t)at);
    }
    tutti_status status = tu_world_departed_error(group->world, group->ranks[member], doing);
    tutti_error_copy error;
    tu_error_save(&error);
    error.info.at_fault_count = 1;
    error.info.at_fault[0] = member;
    tu_error_restore(&error);
    (void)tu_error_where(group->name, info != NULL ? tu_operation_name((tu_operation)info->operation) : "",
                         info != NULL ? info->sequence : 0, group->rank);
    return status;
}

/* A member that is dead, as far as is known; with `probe` the kernel is asked. -1: none. */
static int find_dead(const tutti_group *group, bool probe) {
    return tu_world_first_dead(group->world, group->ranks, group->size, NULL, probe);
}

/* The death of a member ends the group, whoever was needed for what. One that closed its world is no death: who waits
 * for it finds out. */
static tutti_status end_by_death(tutti_group *group, int member, const tu_operation_info *info) {
    tutti_status status = departed_error(group, member, info);
    return end_group(group, info) ? status : tu_group_cause(group);
}

/* How many ranks departed, of those who may concern the group. */
static uint32_t departures_of(const tutti_group *group) {
    const tutti_world *world = group->world;
    bool others = !group->local && world->news != NULL;
    return tu_job_departures(world->job) + (others ? tu_news_departures(world->news) : 0);
}

/* Somebody departed since this group last looked: did one of ours die? */
static tutti_status look_at_departures(tutti_group *group, uint32_t departures, const tu_operation_info *info) {
    int dead = find_dead(group, false);
    if (dead >= 0)
        return end_by_death(group, dead, info);
    atomic_store_explicit(&group->departures, departures, memory_order_relaxed); /* own memory, a hint */
    return TUTTI_OK;
}

#define LOOK_INTERVAL (10 * TU_MILLISECOND) /* between two questions to the kernel by whoever only asks */

tutti_status tu_group_look(tutti_group *group, const tu_operation_info *info) {
    uint32_t departures = departures_of(group);
    if (departures != atomic_load_explicit(&group->departures, memory_order_relaxed)) {
        tutti_status status = look_at_departures(group, departures, info);
        if (status != TUTTI_OK)
            return status;
    }
    int64_t now = tu_clock_now();
    if (now < atomic_load_explicit(&group->next_look, memory_order_relaxed))
        return TUTTI_OK;
    atomic_store_explicit(&group->next_look, now + LOOK_INTERVAL, memory_order_relaxed);
    int dead = find_dead(group, true);
    return dead >= 0 ? end_by_death(group, dead, info) : TUTTI_OK;
}

/* ---- abort and check ---- */

tutti_status tutti_group_abort(tutti_group *group, const char *reason) {
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_abort needs a group of which this rank is a member");
    TU_INSIDE(group->world);
    tutti_status status = tu_world_check(group->world);
    if (status != TUTTI_OK)
        return status;
    tutti_error_copy before;
    tu_error_save(&before);
    char who[48];
    tu_error(TUTTI_ERROR_ABORTED, "%s aborted group %s: %s", rank_text(group, group->rank, who), group->name,
             reason != NULL && reason[0] != 0 ? reason : "no reason given");
    tu_error_at_fault(group->rank);
    (void)tu_error_where(group->name, "group_abort", 0, group->rank);
    (void)end_group(group, NULL); /* already ended is as good */
    tu_error_restore(&before);    /* a success leaves the last error as it was */
    return TUTTI_OK;
}

tutti_status tutti_group_check(tutti_group *group) {
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_check needs a group of which this rank is a member");
    TU_INSIDE(group->world);
    tutti_status status = tu_world_check(group->world);
    if (status == TUTTI_OK && tu_group_overhear(group))
        status = tu_group_cause(group);
    if (status == TUTTI_OK && !group->world->fake)
        status = tu_group_look(group, NULL);
    tutti_status (*devices)(tutti_group *) = atomic_load_explicit(&group->world->devices, memory_order_acquire);
    return status == TUTTI_OK && devices != NULL ? devices(group) : status;
}

/* ---- enter and leave ---- */

static tutti_status refuse(tutti_group *group, const tu_operation_info *info) {
    if (group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the group is NULL",
                        tu_operation_name((tu_operation)info->operation));
    if (group == TUTTI_NON_GROUP_MEMBER)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: this rank is no member of the group (TUTTI_NON_GROUP_MEMBER)",
                        tu_operation_name((tu_operation)info->operation));
    tutti_status status = tu_world_check(group->world);
    if (status != TUTTI_OK)
        return status;
    if (atomic_load_explicit(&group->destroyed, memory_order_relaxed))
        return tu_error(TUTTI_ERROR_STATE, "%s: group %s is already destroyed",
                        tu_operation_name((tu_operation)info->operation), group->name);
    return TUTTI_OK;
}

/* A fake world: arguments are checked, nothing happens. */
static tutti_status enter_fake(tutti_group *group, tu_operation_info *info) {
    const tu_operation_row *row = tu_operation_row_of(info->operation);
    if (group->world->fake_error && !row->own_number && !row->makes_group) {
        tu_error(TUTTI_ERROR_STATE,
                 "FakeProcessGroup collective operation error: the fake world was opened with error_on_collective");
        return tu_error_where(group->name, tu_operation_name((tu_operation)info->operation), info->sequence,
                              group->rank);
    }
    return TUTTI_OK;
}

/* On the way of every operation, so for long timeouts by the clock that is cheaper to read and at most a tick (10 ms)
 * behind. */
static int64_t deadline_after(int64_t timeout_ns) {
    if (timeout_ns < 2 * TU_SECOND)
        return tu_deadline(timeout_ns);
    struct timespec now;
    int64_t deadline;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return __builtin_add_overflow(now.tv_sec * TU_SECOND + now.tv_nsec, timeout_ns, &deadline) ? INT64_MAX : deadline;
}

/* Others learn by this operation, whoever its members are, of what this rank did before: puts to other hosts too. */
static tutti_status fence_hosts(tutti_group *group, const tu_operation_info *info) {
    /* Pairs with the release of whoever opened the network. */
    tutti_status (*fence)(tutti_group *, const tu_operation_info *) =
        atomic_load_explicit(&group->world->fence_hosts, memory_order_acquire);
    return fence != NULL ? fence(group, info) : TUTTI_OK;
}

/* A put of another thread that is not counted yet is not before this; nor is a part's operation, but that of the
 * whole. That one has met faults and looked for the dead, too. */
static inline bool has_unfenced(const tutti_group *group) {
    return atomic_load_explicit(&group->world->unfenced, memory_order_relaxed) != 0 && group->whole == NULL;
}

static tutti_status check_and_number(tutti_group *group, int64_t call_timeout_ns, tu_operation_info *info,
                                     int64_t *deadline) {
    if (TUTTI_BARE) {
        info->sequence = atomic_fetch_add_explicit(&group->sequence, 1, memory_order_relaxed) + 1;
        info->timeout_ns = group->world->timeout_ns;
        if (deadline != NULL)
            *deadline = INT64_MAX;
        return has_unfenced(group) ? fence_hosts(group, info) : TUTTI_OK;
    }
    tutti_status status = refuse(group, info);
    if (status != TUTTI_OK)
        return status;
    tutti_world *world = group->world;
    if (call_timeout_ns == TUTTI_UNTIL_EVENT && tu_receives(tu_operation_row_of(info->operation)))
        info->timeout_ns = INT64_MAX; /* a deadline that never comes */
    else
        status = tu_timeout_choose(NULL, call_timeout_ns, group->timeout_ns, world->timeout_ns, &info->timeout_ns);
    if (status != TUTTI_OK)
        return status;
    if (tu_group_ended(group) || (!group->local && tu_group_overhear(group)))
        return tu_group_cause(group);
    if (__builtin_expect(has_unfenced(group), 0))
        status = fence_hosts(group, info);
    if (status != TUTTI_OK)
        return status;
    _Atomic uint64_t *counter =
        tu_operation_sequenced((tu_operation)info->operation) ? &group->sequence : &group->messages;
    if (__builtin_expect(world->faults != NULL, 0) && group->whole == NULL) {
        info->sequence =
            atomic_load_explicit(counter, memory_order_relaxed) + 1; /* for messages: a skipped call takes no number */
        status = tu_fault_meet(group, info);
        if (status != TUTTI_OK)
            return status;
    }
    tu_group_number(group, counter, info);
    if (deadline != NULL)
        *deadline = deadline_after(info->timeout_ns);
    if (world->fake)
        return enter_fake(group, info);
    uint32_t departures = departures_of(group);
    if (__builtin_expect(departures != atomic_load_explicit(&group->departures, memory_order_relaxed), 0) &&
        group->whole == NULL)
        return look_at_departures(group, departures, info);
    return TUTTI_OK;
}

tutti_status tu_group_enter_unrecorded(tutti_group *group, int64_t call_timeout_ns, tu_operation_info *info) {
    return check_and_number(group, call_timeout_ns, info, NULL);
}

uint64_t tu_group_record(tutti_group *group, const tu_operation_info *info) {
    tutti_world *world = group->world;
    return world->fake ? 0 : tu_record_begin(tu_job_recorder(world->job, world->local_rank), info);
}

static tutti_status settle(tutti_group *group, int64_t timeout_ns) {
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER)
        return TUTTI_OK;
    /* Pairs with the release of whoever has started something. */
    tu_group_settle *finish = atomic_load_explicit(&group->settle, memory_order_acquire);
    return finish != NULL ? finish(group, timeout_ns) : TUTTI_OK;
}

tutti_status tu_group_enter(tutti_group *group, int64_t call_timeout_ns, tu_operation_info *info, int64_t *deadline,
                            uint64_t *ticket) {
    tutti_status status = settle(group, call_timeout_ns);
    if (status == TUTTI_OK)
        status = check_and_number(group, call_timeout_ns, info, deadline);
    *ticket = status == TUTTI_OK ? tu_group_record(group, info) : 0;
    return status;
}

/* Which failures leave the members out of step with each other, so that the group cannot go on. */
static bool ends_group(const tu_operation_info *info, tutti_status status) {
    const tu_operation_row *row = tu_operation_row_of(info->operation);
    switch (status) {
    case TUTTI_ERROR_TIMEOUT:
        return !row->timeout_ends_call;
    case TUTTI_ERROR_GONE: /* a message or signal to or from one that closed its world concerns no other rank */
        return !row->own_number;
    case TUTTI_ERROR_DEAD:
    case TUTTI_ERROR_MISMATCH:
    case TUTTI_ERROR_ABORTED:
    case TUTTI_ERROR_FAULT:
        return true;
    case TUTTI_ERROR_MEMORY: /* in the middle of it: the others would wait for this rank until their deadline */
    case TUTTI_ERROR_LIMIT:
    case TUTTI_ERROR_SYSTEM:
    case TUTTI_ERROR_NETWORK:
    case TUTTI_ERROR_PROTOCOL:
    case TUTTI_ERROR_BACKEND:
        return !row->own_number;
    default:
        return false;
    }
}

static void end_record(tutti_group *group, uint64_t ticket, tutti_status status) {
    if (ticket != 0 && group->world->job != NULL)
        tu_record_end(tu_job_recorder(group->world->job, group->world->local_rank), ticket, status);
}

bool tu_group_fail(tutti_group *group, const tu_operation_info *info, tutti_status *status) {
    if (!ends_group(info, *status))
        return false;
    if (!end_group(group, info))
        *status = tu_group_cause(group);
    return true;
}

tutti_status tu_group_leave(tutti_group *group, const tu_operation_info *info, uint64_t ticket, tutti_status status) {
    if (__builtin_expect(status == TUTTI_OK, 1)) {
        end_record(group, ticket, status);
        if (tu_operation_sequenced((tu_operation)info->operation))
            tu_group_completed(group, info->sequence);
        return TUTTI_OK;
    }
    (void)tu_group_fail(group, info, &status);
    end_record(group, ticket, status);
    tu_trace_failure(group->world);
    return status;
}

tutti_status tu_group_leave_agreement(tutti_group *group, uint64_t ticket, tutti_status status) {
    end_record(group, ticket, status);
    return status;
}

bool tu_group_absent(const tutti_group *group, const char *operation) {
    if (group != TUTTI_NON_GROUP_MEMBER)
        return false;
    TU_LOG(TUTTI_LOG_WARN, NULL, "world",
           "%s on TUTTI_NON_GROUP_MEMBER does nothing: this rank is no member of that group", operation);
    return true;
}

/* ---- waiting for members ---- */

static bool awaited(const tu_group_wait *wait, int member) {
    if (member == wait->group->rank)
        return false;
    return wait->missing == NULL || wait->missing(wait->argument, member);
}

/* What `member` recorded under a sequence number of the group of that key, running or ended: this group, or the one
 * across hosts that it is a part of. */
static bool recorded(const tutti_group *group, uint64_t key, int member, uint64_t sequence, tu_record_view *view) {
    const tu_recorder *recorder = tu_job_recorder(group->world->job, group->job_ranks[member]);
    for (uint64_t back = 0, seen = 0; seen < 64 && back < 1024; back++) {
        if (!tu_recorder_entry(recorder, back, view))
            return false;
        bool sequenced = tu_operation_sequenced((tu_operation)view->info.operation);
        seen += sequenced; /* others come in any number */
        if (view->info.group_key != key || !sequenced)
            continue;
        if (view->info.sequence == sequence)
            return true;
        if (view->info.sequence < sequence)
            return false;
    }
    return false;
}

static void name_executor(const tu_operation_info *info, char *text, size_t bytes) {
    size_t used = strlen(text);
    snprintf(text + used, bytes - used, " by executor %.8s", (const char *)&info->executor);
}

static tutti_status mismatch_error(tutti_group *of, const tu_record_view *mine, int place,
                                   const tu_record_view *theirs) {
    tutti_group *group = tu_group_known(of);
    int member = tu_group_known_rank(of, place);
    tu_job *job = group->world->job;
    char their_text[192], my_text[192], who[48], me[48];
    tu_record_text(tu_job_recorder(job, group->job_ranks[member]), theirs, their_text, sizeof their_text);
    tu_record_text(tu_job_recorder(job, group->world->local_rank), mine, my_text, sizeof my_text);
    bool same = tu_operations_meet(mine->info.operation, theirs->info.operation);
    if (same) {
        name_executor(&mine->info, my_text, sizeof my_text);
        name_executor(&theirs->info, their_text, sizeof their_text);
    }
    tu_error(TUTTI_ERROR_MISMATCH, "the ranks disagree: %s called %s, %s called %s. All ranks of a group must %s",
             rank_text(group, group->rank, me), my_text, rank_text(group, member, who), their_text,
             same ? "have a call run by the same executor" : "call the same operations in the same order");
    tu_error_at_fault(member);
    return tu_error_where(group->name, tu_operation_name((tu_operation)mine->info.operation), mine->info.sequence,
                          group->rank);
}

/* Two that run one call would wait for each other: nobody knows of the other's flags. */
static bool differ(const tu_operation_info *mine, const tu_operation_info *theirs) {
    return !tu_operations_meet(mine->operation, theirs->operation) ||
           (mine->executor != theirs->executor && mine->executor != 0 && theirs->executor != 0);
}

/* Whether a member called something else than this rank under one number; then what each of them called. */
static bool disagrees(const tutti_group *group, const tu_operation_info *info, int member, tu_record_view *mine,
                      tu_record_view *theirs) {
    if (group->job_ranks[member] < 0 || !tu_operation_sequenced((tu_operation)info->operation))
        return false;
    *mine = (tu_record_view){ .info = *info };
    if (recorded(group, info->group_key, member, info->sequence, theirs))
        return differ(info, &theirs->info);
    /* It may still be where this rank has been: in something else than this rank was. */
    return tu_recorder_current(tu_job_recorder(group->world->job, group->job_ranks[member]), info->group_key, theirs) &&
           tu_operation_sequenced((tu_operation)theirs->info.operation) && theirs->info.sequence < info->sequence &&
           recorded(group, info->group_key, group->rank, theirs->info.sequence, mine) &&
           differ(&mine->info, &theirs->info);
}

tutti_status tu_group_compare(tutti_group *group, const tu_operation_info *info, int member) {
    tu_record_view mine, theirs;
    if (!disagrees(group, info, member, &mine, &theirs))
        return TUTTI_OK;
    /* Collectives set themselves up alike, whichever they are, and compare themselves afterwards. */
    bool later = !tu_operations_meet(mine.info.operation, theirs.info.operation) &&
                 tu_operation_row_of(info->operation)->kind != TU_KIND_OTHER;
    return later ? TUTTI_OK : mismatch_error(group, &mine, member, &theirs);
}

static tutti_status check_members(void *argument) {
    tu_group_wait *wait = argument;
    tutti_group *group = wait->group;
    tu_job *job = group->world->job;
    int first = -1, closed = -1;
    for (int member = 0; member < group->size; member++) {
        if (member == group->rank)
            continue;
        tu_rank_state state = tu_world_rank_state(group->world, group->ranks[member], true);
        if (state == TU_RANK_DEAD) /* awaited or not, arrived or not */
            return departed_error(group, find_dead(group, false), wait->info);
        /* One that closed may have done its part before: asked now that its last store is visible. */
        if (!awaited(wait, member))
            continue;
        if (state == TU_RANK_CLOSED) {
            if (!wait->any)
                return departed_error(group, member, wait->info);
            closed = member;
            continue;
        }
        if (first < 0)
            first = member;
        tu_record_view mine, theirs;
        if (disagrees(group, wait->info, member, &mine, &theirs) && awaited(wait, member))
            return mismatch_error(group, &mine, member, &theirs);
    }
    if (closed >= 0 && first < 0)
        return departed_error(group, closed, wait->info);
    tu_record_waiting(tu_job_recorder(job, group->world->local_rank), wait->ticket,
                      first < 0 ? -1 : group->ranks[first]);
    return TUTTI_OK;
}

void tu_group_wait_init(tu_group_wait *wait, tutti_group *group, const tu_operation_info *info, uint64_t ticket,
                        int64_t deadline, bool (*missing)(void *argument, int member), void *argument) {
    *wait = (tu_group_wait){ .group = group, .info = info, .ticket = ticket, .missing = missing, .argument = argument };
    tu_job_wait_init(group->world->job, deadline, &wait->wait);
    wait->wait.ended = &group->page->state;
    wait->wait.check = check_members;
    wait->wait.argument = wait;
}

/* ---- what a missing rank does instead ---- */

static void append(char *text, size_t bytes, const char *format, ...) TUTTI_PRINTF(3, 4);
static void append(char *text, size_t bytes, const char *format, ...) {
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, bytes - used, format, arguments);
    va_end(arguments);
}

/* 'T' for a process that is stopped, 0 when it cannot be known. */
static char process_state(int pid) {
    char path[32], line[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, line, sizeof line - 1);
    close(fd);
    if (length <= 0)
        return 0;
    line[length] = 0;
    const char *after_name = strrchr(line, ')');
    return after_name != NULL && after_name[1] == ' ' ? after_name[2] : 0;
}

/* rank: of the job. */
static void append_doing(tu_job *job, int rank, uint64_t group_key, char *text, size_t bytes) {
    const tu_recorder *recorder = tu_job_recorder(job, rank);
    tu_death who_it_is;
    tu_death_describe(job, rank, &who_it_is);
    append(text, bytes, "pid %d", who_it_is.pid);
    char state = who_it_is.pid != getpid() ? process_state(who_it_is.pid) : 0;
    if (state == 'T' || state == 't')
        append(text, bytes, ", stopped by a signal or a debugger");
    tu_record_view view;
    if (tu_recorder_last(recorder, group_key, &view)) {
        append(text, bytes, ", last completed %s %llu here", tu_operation_name((tu_operation)view.info.operation),
               (unsigned long long)view.info.sequence);
    } else {
        append(text, bytes, ", has completed nothing in this group");
    }
    if (tu_recorder_current(recorder, 0, &view)) {
        char doing[160];
        tu_record_text(recorder, &view, doing, sizeof doing);
        append(text, bytes, ", now in %s for %.1f s", doing, (double)(tu_clock_now() - view.created_ns) / 1e9);
    } else {
        append(text, bytes, ", now in no call of Tutti");
    }
}

void tu_world_doing(const tutti_world *world, uint64_t group_key, char *text, size_t bytes) {
    text[0] = 0;
    append_doing(world->job, world->local_rank, group_key, text, bytes);
}

#define DESCRIBED 8
#define DESCRIPTION 448

/* Those of the members that are on other hosts are asked what they do. */
static void ask_hosts(tutti_group *group, const int *members, int count, tu_doing doings[DESCRIBED]) {
    int asked = 0;
    for (int i = 0; i < count; i++) {
        if (group->job_ranks[members[i]] >= 0)
            continue;
        doings[asked].rank = group->ranks[members[i]];
        snprintf(doings[asked++].text, TU_DOING_BYTES,
                 "this rank has no connection to other hosts yet, so it cannot be asked what it does");
    }
    /* Pairs with the release of whoever opened the network. */
    void (*inquire)(tutti_group *, tu_doing *, int) =
        atomic_load_explicit(&group->world->inquire_hosts, memory_order_acquire);
    if (asked > 0 && inquire != NULL)
        inquire(group, doings, asked);
}

/* At most DESCRIBED members: "rank 3 (pid 71, last completed all_reduce 4 here, now in barrier 2 of group 1 for 0.3 s);
 * rank 5 (on host b, pid …)". */
static void describe(tutti_group *group, const int *members, int count, char text[DESCRIBED * DESCRIPTION]) {
    tu_job *job = group->world->job;
    tu_doing doings[DESCRIBED];
    int at = 0;
    ask_hosts(group, members, count, doings);
    text[0] = 0;
    for (int i = 0; i < count; i++) {
        char who[48], one[DESCRIPTION];
        int rank = group->job_ranks[members[i]];
        snprintf(one, sizeof one, "%s%s (", i > 0 ? "; " : "", rank_text(group, members[i], who));
        if (rank >= 0)
            append_doing(job, rank, group->key, one, sizeof one - 1);
        else
            append(one, sizeof one - 1, "on host %s, %s", tu_job_host(job, group->ranks[members[i]]),
                   doings[at++].text);
        append(text, DESCRIBED * DESCRIPTION, "%s)", one);
    }
}

void tu_group_append_missing(tutti_group *group, const int *members, int count) {
    char text[DESCRIBED * DESCRIPTION];
    int shown = count < DESCRIBED ? count : DESCRIBED;
    describe(group, members, shown, text);
    if (count > 0)
        tu_error_append(". Missing: %s", text);
    if (count > shown)
        tu_error_append("; and %d more", count - shown);
}

void tu_group_append_remedy(const tutti_group *group) {
    tu_error_append(". `tutti ps%s` shows all ranks while they hang; a longer timeout of the call or group, or else "
                    "TUTTI_TIMEOUT, gives them more time",
                    group->local ? "" : " --hosts A,B");
}

/* Of a send or receive: it concerns its peer alone, or anybody. */
static tutti_status message_timeout(const tu_group_wait *wait) {
    tutti_group *group = wait->group;
    const tu_operation_info *info = wait->info;
    char operation[160], me[48];
    tu_operation_info_text(info, group->name, operation, sizeof operation);
    tu_error(TUTTI_ERROR_TIMEOUT, "timeout: %s gave up %s after %s", rank_text(group, group->rank, me), operation,
             tu_duration_of(info->timeout_ns).text);
    if (info->root >= 0 && info->root < group->size && info->root != group->rank) {
        char text[DESCRIBED * DESCRIPTION];
        describe(group, &info->root, 1, text);
        tu_error_append("; it waited for %s", text);
        tu_error_at_fault(info->root);
    } else if (info->root < 0) {
        tu_error_append("; no rank sent it a message with such a tag");
    }
    return tu_error_where(group->name, tu_operation_name((tu_operation)info->operation), info->sequence, group->rank);
}

static tutti_status timeout_error(const tu_group_wait *wait) {
    tutti_group *of = wait->group, *group = tu_group_known(of);
    char operation[160], me[48];
    tu_operation_text(group, wait->info, operation, sizeof operation);
    char arrived[256] = "";
    int arrived_count = 1, missing_count = 0;
    int missing_ranks[TUTTI_ERROR_RANKS];
    append(arrived, sizeof arrived, "%d", group->rank);
    for (int place = 0; place < of->size; place++) {
        int member = tu_group_known_rank(of, place);
        if (place == of->rank)
            continue;
        if (!awaited(wait, place)) {
            arrived_count++;
            append(arrived, sizeof arrived, ", %d", member);
            continue;
        }
        if (missing_count < TUTTI_ERROR_RANKS)
            missing_ranks[missing_count] = member;
        missing_count++;
    }
    tu_error(TUTTI_ERROR_TIMEOUT, "timeout: %s: %s waited %s", operation, rank_text(group, group->rank, me),
             tu_duration_of(wait->info->timeout_ns).text);
    tu_group_append_missing(group, missing_ranks, missing_count);
    /* A signal concerns its two ranks alone. Of ranks on other hosts nobody knows that they have come. */
    if (!tu_operation_row_of(wait->info->operation)->timeout_ends_call && group->local)
        tu_error_append(". %d of %d ranks have come (%s)", arrived_count, group->size, arrived);
    tu_group_append_remedy(group);
    for (int i = 0; i < missing_count && i < TUTTI_ERROR_RANKS; i++)
        tu_error_at_fault(missing_ranks[i]);
    return tu_error_where(group->name, tu_operation_name((tu_operation)wait->info->operation), wait->info->sequence,
                          group->rank);
}

tutti_status tu_group_wait_error(const tu_group_wait *wait, tutti_status status) {
    tutti_group *group = tu_group_known(wait->group);
    switch (status) {
    case TUTTI_ERROR_TIMEOUT:
        return tu_operation_row_of(wait->info->operation)->kind == TU_KIND_MESSAGE ? message_timeout(wait)
                                                                                   : timeout_error(wait);
    case TUTTI_ERROR_STATE:
        return tu_group_cause(group);
    case TUTTI_ERROR_INTERRUPTED: {
        char operation[160];
        tu_operation_text(group, wait->info, operation, sizeof operation);
        (void)tu_world_interrupted(group->world, operation);
        return tu_error_where(group->name, tu_operation_name((tu_operation)wait->info->operation), wait->info->sequence,
                              group->rank);
    }
    default:
        return status;
    }
}
