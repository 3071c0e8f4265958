/* SPDX-License-Identifier: Apache-2.0
 *
 * Exchanges: a bounded all-gather of small records among the members of a group. On one host through the job; across
 * hosts through the world's store, under keys that are deleted once everybody has gone on.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "job/liveness.h"
#include "world/group.h"
#include "world/world.h"

#define SLICE (50 * TU_MILLISECOND) /* of a wait on the store, between looks at everything else */

static bool on_this_host(const tutti_world *world, const int *ranks, int count) {
    for (int i = 0; i < count; i++)
        if (world->job_rank_of[ranks[i]] < 0)
            return false;
    return true;
}

static tutti_status through_job(tutti_world *world, const tu_meeting *meeting, const void *payload, size_t bytes,
                                const tu_piece *piece, int64_t deadline, void *payloads, tu_mapping **mappings) {
    int *ranks = malloc(sizeof(int) * (size_t)meeting->count);
    if (ranks == NULL)
        return tu_error_memory("an exchange", sizeof(int) * (size_t)meeting->count);
    for (int i = 0; i < meeting->count; i++)
        ranks[i] = world->job_rank_of[meeting->ranks[i]];
    tu_exchange exchange = {
        .ranks = ranks,
        .count = meeting->count,
        .me = meeting->me,
        .key = meeting->key,
        .sequence = meeting->sequence,
        .purpose = meeting->purpose,
        .payload = payload,
        .bytes = bytes,
        .piece = piece,
        .descriptor = meeting->descriptor,
        .descriptors = meeting->descriptors,
        .complete = meeting->complete,
        .deadline = deadline,
        .ended = meeting->ended,
        .ended_above = meeting->ended_above,
        .compare = meeting->compare,
        .argument = meeting->argument,
    };
    tutti_status status = tu_job_exchange(world->job, &exchange, payloads, mappings);
    if (status == TUTTI_ERROR_INTERRUPTED)
        status = tu_world_interrupted(world, meeting->what);
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    if ((status == TUTTI_ERROR_DEAD || status == TUTTI_ERROR_GONE) && tutti_error_detail(&info) == TUTTI_OK &&
        info.at_fault_count > 0) {
        /* The same in the words of whoever called for the exchange. */
        char doing[192];
        snprintf(doing, sizeof doing, "in %s", meeting->what);
        status = tu_death_error(world->job, ranks[info.at_fault[0]], doing);
        tu_error_at_fault(info.at_fault[0]);
    }
    free(ranks);
    return status;
}

/* ---- across hosts ---- */

typedef struct record {
    char purpose[32];
    uint64_t bytes;
    unsigned char payload[TU_EXCHANGE_BYTES];
} record;

static void record_key(const tu_meeting *meeting, uint64_t sequence, int member, char key[96]) {
    snprintf(key, 96, "exchange/%016llx/%llu/%d", (unsigned long long)meeting->key, (unsigned long long)sequence,
             member);
}

static void cause_key(uint64_t group_key, char key[96]) {
    snprintf(key, 96, "ended/%016llx", (unsigned long long)group_key);
}

void tu_group_tell_hosts(tutti_group *group, const tu_cause *cause) {
    if (group->local || group->world->store == NULL)
        return;
    /* Pairs with the release of whoever opened the network. */
    void (*tell)(tutti_group *, const tu_cause *) =
        atomic_load_explicit(&group->world->tell_hosts, memory_order_acquire);
    if (tell != NULL)
        tell(group, cause);
    char key[96];
    cause_key(group->key, key);
    tutti_error_copy error;
    tu_error_save(&error); /* what the store says here is of no interest */
    tu_watch *before = tu_watch_thread(group->world->asking, false);
    tutti_status status = tutti_store_set(group->world->store, key, cause, sizeof *cause);
    tu_watch_thread_back(before);
    if (status != TUTTI_OK)
        TU_LOG(TUTTI_LOG_WARN, group->world->log, "world", "other hosts could not be told that group %s ended: %s",
               group->name, tutti_error_message());
    tu_error_restore(&error);
}

/* A cause from another host, into this rank's private page. */
static bool take_over(tu_group_page *page, int size, tu_cause *cause) {
    uint64_t lives = 0;
    if (cause->origin < 0 || cause->origin >= size || cause->at_fault_count < 0 ||
        cause->at_fault_count > TUTTI_ERROR_RANKS || cause->status == TUTTI_OK ||
        !atomic_compare_exchange_strong_explicit(&page->state, &lives, (uint64_t)cause->origin + 1,
                                                 memory_order_acq_rel, memory_order_acquire))
        return false;
    cause->message[sizeof cause->message - 1] = 0;
    cause->operation[sizeof cause->operation - 1] = 0;
    page->cause = *cause;
    atomic_store_explicit(&page->state, ((uint64_t)cause->origin + 1) | TU_GROUP_TOLD, memory_order_release);
    return true;
}

/* Looks whether another host published the end of the group. */
static void hear(tutti_world *world, const tu_meeting *meeting) {
    char key[96];
    const char *keys[1] = { key };
    bool present = false;
    cause_key(meeting->key, key);
    void *value;
    size_t bytes;
    tu_watch *before = tu_watch_thread(world->asking, false);
    tutti_status status = tutti_store_check(world->store, keys, 1, &present);
    if (status == TUTTI_OK && present)
        status = tutti_store_get(world->store, key, TU_SECOND, &value, &bytes);
    tu_watch_thread_back(before);
    if (status != TUTTI_OK || !present)
        return;
    if (bytes == sizeof(tu_cause))
        (void)take_over(meeting->page, meeting->count, value);
    free(value);
}

bool tu_group_ask_store(tutti_group *group) {
    tu_meeting meeting = { .key = group->key, .count = group->size, .page = group->page };
    tutti_error_copy error;
    tu_error_save(&error); /* what the store says here is of no interest */
    if (!group->local && group->world->store != NULL && !tu_group_ended(group))
        hear(group->world, &meeting);
    tu_error_restore(&error);
    if (tu_group_ended(group))
        (void)tu_group_pass_on(group, &group->page->cause);
    return tu_group_ended(group);
}

bool tu_group_hear(tutti_group *group, tu_cause *cause) {
    bool first = take_over(group->page, group->size, cause);
    if (first)
        (void)tu_group_pass_on(group, cause);
    return first;
}

/* ---- between a group across hosts and its part on this one ---- */

bool tu_group_pass_on(tutti_group *group, const tu_cause *cause) {
    tutti_group *here = atomic_load_explicit(&group->here, memory_order_acquire);
    if (here == NULL)
        return true;
    uint64_t lives = 0, mine = (uint64_t)here->rank + 1;
    if (!atomic_compare_exchange_strong_explicit(&here->page->state, &lives, mine, memory_order_acq_rel,
                                                 memory_order_acquire))
        return false;
    here->page->cause = *cause;
    atomic_store_explicit(&here->page->state, mine | TU_GROUP_TOLD, memory_order_release); /* pairs with its readers */
    for (int member = 0; member < here->size; member++)
        tu_job_ring(here->world->job, here->job_ranks[member]);
    return true;
}

bool tu_group_overhear(tutti_group *group) {
    if (tu_group_ended(group))
        return true;
    tutti_group *here = atomic_load_explicit(&group->here, memory_order_acquire);
    if (here == NULL || (atomic_load_explicit(&here->page->state, memory_order_acquire) & TU_GROUP_TOLD) == 0)
        return false;
    tu_cause cause = here->page->cause;
    if (take_over(group->page, group->size, &cause))
        tu_group_tell_hosts(group, &cause);
    return tu_group_ended(group);
}

static bool came(tutti_world *world, const tu_meeting *meeting, int member) {
    char key[96];
    const char *keys[1] = { key };
    bool present = false;
    record_key(meeting, meeting->sequence, member, key);
    tu_watch *before = tu_watch_thread(world->asking, false);
    tutti_status status = tutti_store_check(world->store, keys, 1, &present);
    tu_watch_thread_back(before);
    return status == TUTTI_OK && present;
}

/* Everything that can end the wait for `member` besides its record. */
static tutti_status look_around(tutti_world *world, const tu_meeting *meeting, int member, int64_t deadline) {
    if (atomic_load_explicit(&world->interrupt, memory_order_acquire) != 0)
        return tu_world_interrupted(world, meeting->what);
    if (meeting->page != NULL)
        hear(world, meeting);
    if (meeting->ended != NULL && atomic_load_explicit(meeting->ended, memory_order_acquire) > meeting->ended_above)
        return TUTTI_ERROR_STATE;
    for (int i = 0; i < meeting->count; i++) {
        tu_rank_state state = i != meeting->me ? tu_world_rank_state(world, meeting->ranks[i], true) : TU_RANK_ALIVE;
        /* Asked after it departed: one that closed may have done its part before. */
        if (state == TU_RANK_DEAD || (state == TU_RANK_CLOSED && i == member && !came(world, meeting, i))) {
            char doing[192];
            snprintf(doing, sizeof doing, "in %s", meeting->what);
            tutti_status status = tu_world_departed_error(world, meeting->ranks[i], doing);
            tu_error_at_fault(i);
            return status;
        }
    }
    return tu_clock_now() < deadline ? TUTTI_OK : TUTTI_ERROR_TIMEOUT;
}

/* Whether one of those that are awaited, `member` and whoever follows, is in something else. Asked last whether it has
 * come: then it was so before. */
static tutti_status look_at_calls(tutti_world *world, const tu_meeting *meeting, int member) {
    tutti_error_copy before;
    tu_error_save(&before);
    for (int i = member; i < meeting->count && meeting->compare != NULL; i++) {
        tutti_status status = i != meeting->me ? meeting->compare(meeting->argument, i) : TUTTI_OK;
        if (status != TUTTI_OK && !came(world, meeting, i))
            return status;
    }
    tu_error_restore(&before);
    return TUTTI_OK;
}

static tutti_status timeout_error(tutti_world *world, const tu_meeting *meeting, int member) {
    char arrived[512] = "", missing[512] = "";
    int absent[TUTTI_ERROR_RANKS], absent_count = 0;
    for (int i = 0; i < meeting->count; i++) {
        char *list = i < member || came(world, meeting, i) ? arrived : missing;
        if (list == missing && absent_count < TUTTI_ERROR_RANKS)
            absent[absent_count++] = i;
        size_t used = strlen(list);
        snprintf(list + used, sizeof arrived - used, "%s%d on %s", used > 0 ? ", " : "", meeting->ranks[i],
                 tu_job_host(world->job, meeting->ranks[i]));
    }
    tu_error(TUTTI_ERROR_TIMEOUT, "timeout in %s across hosts: ranks that did not come: %s; that came: %s",
             meeting->what, missing, arrived[0] != 0 ? arrived : "none");
    for (int i = 0; i < absent_count; i++)
        tu_error_at_fault(absent[i]);
    return TUTTI_ERROR_TIMEOUT;
}

static tutti_status check_record(const tu_meeting *meeting, int member, const record *mine, const record *theirs,
                                 size_t bytes) {
    size_t least = offsetof(record, payload);
    if (bytes < least || bytes != least + theirs->bytes || theirs->purpose[sizeof theirs->purpose - 1] != 0)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "%s: the record of rank %d in the store is garbage (%zu bytes); do two versions of Tutti "
                        "meet?",
                        meeting->what, meeting->ranks[member], bytes);
    if (strcmp(theirs->purpose, mine->purpose) != 0 || theirs->bytes != mine->bytes) {
        tu_error(TUTTI_ERROR_MISMATCH,
                 "the ranks disagree: rank %d is in \"%s\" (%llu bytes), rank %d in \"%s\" (%llu bytes)",
                 meeting->ranks[meeting->me], mine->purpose, (unsigned long long)mine->bytes, meeting->ranks[member],
                 theirs->purpose, (unsigned long long)theirs->bytes);
        tu_error_at_fault(member);
        return TUTTI_ERROR_MISMATCH;
    }
    return TUTTI_OK;
}

static tutti_status fetch(tutti_world *world, const tu_meeting *meeting, int member, int64_t deadline,
                          const record *mine, void *payloads) {
    char key[96];
    record_key(meeting, meeting->sequence, member, key);
    for (;;) {
        tutti_status status = look_around(world, meeting, member, deadline);
        if (status == TUTTI_ERROR_TIMEOUT)
            return timeout_error(world, meeting, member);
        if (status != TUTTI_OK)
            return status;
        int64_t left = tu_deadline_left(deadline);
        void *value;
        size_t bytes;
        tu_watch *before = tu_watch_thread(world->calm, false);
        status = tutti_store_get(world->store, key, left < SLICE ? (left > 0 ? left : 1) : SLICE, &value, &bytes);
        tu_watch_thread_back(before);
        if (status == TUTTI_ERROR_TIMEOUT) {
            status = look_at_calls(world, meeting, member);
            if (status != TUTTI_OK)
                return status;
            continue;
        }
        if (status != TUTTI_OK)
            return status;
        status = check_record(meeting, member, mine, value, bytes);
        if (status == TUTTI_OK && payloads != NULL)
            memcpy((char *)payloads + (size_t)member * mine->bytes, ((record *)value)->payload, mine->bytes);
        free(value);
        return status;
    }
}

static tutti_status through_store(tutti_world *world, const tu_meeting *meeting, const void *payload, size_t bytes,
                                  const tu_piece *piece, int64_t deadline, void *payloads, tu_mapping **mappings) {
    if (piece != NULL || mappings != NULL)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "%s: shared memory needs all ranks on one host, and these span several", meeting->what);
    if (bytes > TU_EXCHANGE_BYTES)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: a record of %zu bytes is more than %d", meeting->what, bytes,
                        TU_EXCHANGE_BYTES);
    tutti_status status = tu_world_follow(world);
    if (status != TUTTI_OK)
        return status;
    record mine = { .bytes = bytes };
    snprintf(mine.purpose, sizeof mine.purpose, "%s", meeting->purpose);
    if (bytes > 0)
        memcpy(mine.payload, payload, bytes);
    char key[96];
    tutti_error_copy before;
    tu_error_save(&before);
    record_key(meeting, meeting->sequence, meeting->me, key);
    status = tutti_store_set(world->store, key, &mine, offsetof(record, payload) + bytes);
    for (int member = 0; member < meeting->count && status == TUTTI_OK; member++)
        status = fetch(world, meeting, member, deadline, &mine, payloads);
    if (status == TUTTI_OK && meeting->sequence > 0) {
        /* Everybody is in this exchange, so everybody has left the one before. */
        bool existed;
        record_key(meeting, meeting->sequence - 1, meeting->me, key);
        tu_watch *watched = tu_watch_thread(world->asking, false);
        status = tutti_store_delete(world->store, key, &existed);
        tu_watch_thread_back(watched);
    }
    if (status == TUTTI_OK) /* slices of waits ran out on the way; what this rank tells of may be its own error */
        (void)tu_error_restore(&before);
    return status;
}

/* ---- both ---- */

tutti_status tu_meet(tutti_world *world, const tu_meeting *meeting, const void *payload, size_t bytes,
                     const tu_piece *piece, int64_t deadline, void *payloads, tu_mapping **mappings) {
    if (world->fake) { /* everybody sends what this rank sends */
        for (int i = 0; i < meeting->count && payloads != NULL; i++)
            memcpy((char *)payloads + (size_t)i * bytes, payload, bytes);
        for (int i = 0; i < meeting->count && mappings != NULL; i++)
            mappings[i] = NULL;
        for (int i = 0; i < meeting->count && meeting->descriptors != NULL; i++)
            meeting->descriptors[i] = -1;
        if (meeting->complete != NULL)
            *meeting->complete = true;
        return TUTTI_OK;
    }
    if (on_this_host(world, meeting->ranks, meeting->count))
        return through_job(world, meeting, payload, bytes, piece, deadline, payloads, mappings);
    if (meeting->complete != NULL)
        *meeting->complete = false;
    if (meeting->descriptors != NULL)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "%s: its ranks are on several hosts, where no descriptor can be passed", meeting->what);
    return through_store(world, meeting, payload, bytes, piece, deadline, payloads, mappings);
}

static tutti_status lock_until(pthread_mutex_t *lock, int64_t deadline, const char *what) {
    if (tu_mutex_lock_until(lock, deadline))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_TIMEOUT,
                    "timeout: %s waited for another thread of this rank that is in an agreement on the same group",
                    what);
}

typedef struct comparison {
    tutti_group *group;
    const tu_operation_info *info;
    bool differs;
} comparison;

static tutti_status differ_error(tutti_group *group, const tu_operation_info *info, int member, const char *theirs) {
    char mine[160];
    tu_operation_text(group, info, mine, sizeof mine);
    tu_error(
        TUTTI_ERROR_MISMATCH,
        "the ranks disagree: rank %d called %s, rank %d called %s. All ranks of a group must call the same operations "
        "in the same order",
        group->rank, mine, member, theirs);
    tu_error_at_fault(member);
    return tu_error_where(group->name, tu_operation_name((tu_operation)info->operation), info->sequence, group->rank);
}

/* A member on another host that waits for this rank in a collective has told so: under this number, or a later one, it
 * will not come to the exchange. */
static tutti_status compare_far(tutti_group *group, const tu_operation_info *info, int member) {
    char mine[160], theirs[160];
    uint64_t sequence;
    /* Pairs with the release of whoever opened the network. */
    bool (*asked)(tutti_group *, int, uint64_t *, char *, size_t) =
        atomic_load_explicit(&group->world->asked_by_hosts, memory_order_acquire);
    if (asked == NULL || !tu_operation_sequenced((tu_operation)info->operation) ||
        !asked(group, member, &sequence, theirs, sizeof theirs) || sequence < info->sequence)
        return TUTTI_OK;
    tu_operation_text(group, info, mine, sizeof mine);
    return strcmp(mine, theirs) == 0 ? TUTTI_OK : differ_error(group, info, member, theirs);
}

static tutti_status compare_member(void *argument, int member) {
    comparison *with = argument;
    tutti_status status =
        (with->group->job_ranks[member] < 0 ? compare_far : tu_group_compare)(with->group, with->info, member);
    with->differs = status != TUTTI_OK;
    return status;
}

/* The job knows of members by their places in the list that it was given. */
static void name_known_ranks(const tutti_group *group) {
    tutti_error_copy error;
    tu_error_save(&error);
    for (int i = 0; i < error.info.at_fault_count; i++)
        error.info.at_fault[i] = tu_group_known_rank(group, error.info.at_fault[i]);
    tu_error_restore(&error);
}

tutti_status tu_group_exchange_with(tutti_group *group, const tu_operation_info *info, const char *purpose,
                                    const void *payload, size_t bytes, const tu_group_cargo *cargo, int64_t deadline,
                                    void *payloads) {
    char what[160];
    comparison comparison = { group, info, false };
    tu_operation_text(group, info, what, sizeof what);
    tutti_status status = lock_until(&group->exchange_lock, deadline, what);
    bool met = status == TUTTI_OK;
    if (met) {
        tu_meeting meeting = {
            .ranks = group->ranks,
            .count = group->size,
            .me = group->rank,
            .key = group->key,
            .sequence = ++group->exchanges,
            .purpose = purpose,
            .what = what,
            .ended = &group->page->state,
            .page = group->page,
            .descriptor = cargo->descriptor >= 0 ? &cargo->descriptor : NULL,
            .descriptors = cargo->descriptors,
            .complete = cargo->complete,
            .compare = compare_member,
            .argument = &comparison,
        };
        status = tu_meet(group->world, &meeting, payload, bytes, cargo->piece, deadline, payloads, cargo->mappings);
        pthread_mutex_unlock(&group->exchange_lock);
    }
    if (status == TUTTI_ERROR_STATE && tu_group_ended(group))
        return tu_group_cause(group);
    if (status != TUTTI_OK && met && group->whole != NULL && !comparison.differs)
        name_known_ranks(group);
    group = tu_group_known(group);
    tutti_error_info missing = TUTTI_ERROR_INFO_INIT;
    (void)!tutti_error_detail(&missing);
    if (status == TUTTI_ERROR_TIMEOUT && met && missing.at_fault_count > 0) { /* else it was the store */
        /* A person knows the call, not the exchange inside it. */
        tu_error(TUTTI_ERROR_TIMEOUT, "timeout: %s: rank %d waited %s", what, group->rank,
                 tu_duration_of(info->timeout_ns).text);
        for (int i = 0; i < missing.at_fault_count && i < TUTTI_ERROR_RANKS; i++)
            tu_error_at_fault(missing.at_fault[i]);
        tu_group_append_missing(group, missing.at_fault, missing.at_fault_count);
        tu_group_append_remedy(group);
    }
    if (status != TUTTI_OK)
        (void)tu_error_where(group->name, tu_operation_name((tu_operation)info->operation), info->sequence,
                             group->rank);
    return status;
}

/* What a member is in, by its record. */
static bool read_purpose(tutti_world *world, const tu_meeting *meeting, int member, char purpose[32]) {
    char key[96];
    void *value;
    size_t bytes;
    record_key(meeting, meeting->sequence, member, key);
    if (!came(world, meeting, member) || tutti_store_get(world->store, key, TU_SECOND, &value, &bytes) != TUTTI_OK)
        return false;
    bool whole = bytes >= offsetof(record, payload);
    if (whole) {
        snprintf(purpose, 32, "%.31s", ((const record *)value)->purpose);
        purpose[strcspn(purpose, ":")] = 0; /* a person knows the call, not the exchange inside it */
    }
    free(value);
    return whole;
}

bool tu_exchange_object(tutti_group *group, const tu_operation_info *info, int member, uint64_t *seen) {
    if (group->local || group->world->store == NULL || tu_group_ended(group) ||
        pthread_mutex_trylock(&group->exchange_lock) != 0) /* a thread of this rank is in the exchange itself */
        return false;
    tu_meeting meeting = { .key = group->key, .sequence = group->exchanges + 1 };
    char purpose[32];
    tutti_error_copy before_it;
    tu_error_save(&before_it); /* what the store says here is of no interest */
    tu_watch *before = tu_watch_thread(group->world->calm, false);
    bool there = read_purpose(group->world, &meeting, member, purpose);
    tu_watch_thread_back(before);
    tu_error_restore(&before_it);
    bool again = there && *seen == meeting.sequence;
    *seen = there ? meeting.sequence : 0;
    if (again) {
        (void)differ_error(group, info, member, purpose);
        tu_group_end(group, info);
    }
    pthread_mutex_unlock(&group->exchange_lock);
    return again;
}

tutti_status tu_group_exchange(tutti_group *group, const tu_operation_info *info, const char *purpose,
                               const void *payload, size_t bytes, const tu_piece *piece, int64_t deadline,
                               void *payloads, tu_mapping **mappings) {
    tu_group_cargo cargo = { .piece = piece, .mappings = mappings, .descriptor = -1 };
    return tu_group_exchange_with(group, info, purpose, payload, bytes, &cargo, deadline, payloads);
}

tutti_status tu_group_exchange_descriptors(tutti_group *group, const tu_operation_info *info, const char *purpose,
                                           const void *payload, size_t bytes, int descriptor, int64_t deadline,
                                           void *payloads, int *descriptors) {
    tu_group_cargo cargo = { .descriptor = descriptor, .descriptors = descriptors };
    return tu_group_exchange_with(group, info, purpose, payload, bytes, &cargo, deadline, payloads);
}
