/* SPDX-License-Identifier: Apache-2.0
 *
 * A group's collective state: made locally on first need, completed by one exchange of shared memory at the first
 * collective, ended with the group.
 */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "collective/collective.h"
#include "collective/compute.h"
#include "collective/domain.h"
#include "collective/message.h"
#include "collective/tuning.h"
#include "collective/works.h"

#define LAYOUT_VERSION 2

/* ---- layout ---- */

static size_t aligned(size_t bytes, size_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

/* Small groups get slots that serve the usual message in one go; large ones less, because every member has one. */
static size_t slot_bytes(int size) {
    if (size <= 8)
        return (size_t)64 << 10;
    size_t share = ((size_t)512 << 10) / (size_t)size;
    return aligned(share < ((size_t)16 << 10) ? (size_t)16 << 10 : share, 4096);
}

static tu_layout layout_of(int size) {
    tu_layout layout = { .slot_bytes = slot_bytes(size) };
    layout.splits = aligned(sizeof(tu_member), TU_LINE);
    layout.slots = aligned(layout.splits + (size_t)size * 2 * 16, 4096);
    layout.bytes = layout.slots + 2 * layout.slot_bytes;
    return layout;
}

/* ---- local part ---- */

static void release_mappings(tu_mapping **mappings, int size) {
    if (mappings == NULL)
        return;
    for (int member = 0; member < size; member++)
        if (mappings[member] != NULL)
            tu_mapping_release(mappings[member]);
    free(mappings);
}

static void free_state(void *argument) {
    tu_collective *state = argument;
    release_mappings(state->mappings, state->size);
    release_mappings(state->ring_mappings, state->size);
    tu_job *job = state->group->world->job;
    if (state->piece.address != NULL)
        tu_piece_free(job, &state->piece);
    if (state->ring_piece.address != NULL)
        tu_piece_free(job, &state->ring_piece);
    tu_messages_end(state->messages);
    free(atomic_load_explicit(&state->spare_batch, memory_order_acquire));
    tu_domains_free(state->domains);
    free(state->members);
    free(state->rings);
    free(state->bells);
    free(state->sources);
    free(state->targets);
    free(state->factors);
    free(state->taken);
    free(state->put);
    free(state->references);
    free(state);
}

static void end_state(void *argument) {
    tu_collective *state = argument;
    tu_works_stop(atomic_load_explicit(&state->works, memory_order_acquire));
    free_state(state);
}

static void find_bells(tu_collective *state) {
    tu_job *job = state->group->world->job;
    for (int member = 0; member < state->size; member++)
        if (state->group->job_ranks[member] >= 0)
            state->bells[member] = tu_job_bell(job, state->group->job_ranks[member]);
    state->sleepers = tu_job_sleepers(job);
    tu_wait ladder;
    tu_job_wait_init(job, 0, &ladder);
    state->spins = ladder.spins;
    state->helpers = tu_compute_threads(state->group->world);
}

static tutti_status make_state(void *owner, void **made) {
    tutti_group *group = owner;
    size_t size = (size_t)group->size;
    tu_collective *state = calloc(1, sizeof *state);
    if (state == NULL)
        return tu_error_memory("a group's collective state", sizeof *state);
    state->group = group;
    state->rank = group->rank;
    state->size = group->size;
    state->layout = layout_of(group->size);
    state->cleared = UINT64_MAX;
    state->executors = tu_executors_cpu(group);
    if (state->executors.count == 1 && (group->local || group->world->fake))
        state->only = state->executors.list[0];
    state->members = calloc(size, sizeof *state->members);
    state->bells = calloc(size, sizeof *state->bells);
    state->sources = calloc(size, sizeof *state->sources);
    state->targets = calloc(size + 1, sizeof *state->targets);
    state->factors = calloc(size, sizeof *state->factors);
    state->taken = calloc(size, sizeof *state->taken);
    state->put = calloc(size, sizeof *state->put);
    state->references = calloc(size, sizeof *state->references);
    if (state->members == NULL || state->bells == NULL || state->sources == NULL || state->targets == NULL ||
        state->factors == NULL || state->taken == NULL || state->put == NULL || state->references == NULL) {
        free_state(state);
        return tu_error_memory("a group's collective state", size * 96);
    }
    if (!group->world->fake)
        find_bells(state);
    tutti_status status = tu_tuning_apply(state);
    if (status != TUTTI_OK) {
        free_state(state);
        return status;
    }
    *made = state;
    return TUTTI_OK;
}

const tu_attachment tu_collective_attachment = { .make = make_state, .end = end_state };

tutti_status tu_collective_get(tutti_group *group, tu_collective **state) {
    void *found = tu_attachment_find(&group->attachments, &tu_collective_attachment);
    tu_memory_group *memory; /* attached before, so that it outlives the helpers of this state */
    tutti_status status = found != NULL ? TUTTI_OK : tu_memory_group_get(group, &memory);
    if (status == TUTTI_OK)
        status = tu_attachment_get(&group->attachments, &tu_collective_attachment, &found);
    *state = found;
    return status;
}

/* ---- the exchange ---- */

typedef struct hello {
    uint32_t version;
    int32_t status;
    uint64_t slot_bytes;
    tu_locality place;
    int32_t crowded; /* ranks outnumber the cores, as far as this one knows */
    char message[512];
} hello;

/* Waits for all members' pieces. A member that could not get memory says so, and then all fail alike. */
static tutti_status exchange_pieces(tu_collective *state, tu_task *task, const char *purpose, const tu_piece *piece,
                                    const hello *mine, hello *theirs, tu_mapping **mappings) {
    tutti_status status = tu_group_exchange(state->group, &tu_task_called(task)->info, purpose, mine, sizeof *mine,
                                            piece, tu_task_deadline(task), theirs, mappings);
    if (status != TUTTI_OK)
        return status;
    for (int member = 0; member < state->size && status == TUTTI_OK; member++) {
        int rank = tu_group_known_rank(state->group, member);
        if (theirs[member].version != LAYOUT_VERSION || theirs[member].slot_bytes != mine->slot_bytes) {
            status = tu_error(
                TUTTI_ERROR_PROTOCOL,
                "rank %d of group %s has another version of Tutti's collectives (layout %u, "
                "slots of %llu bytes) than rank %d (layout %u, %llu bytes); install one version everywhere",
                rank, state->group->name, theirs[member].version, (unsigned long long)theirs[member].slot_bytes,
                tu_group_known_rank(state->group, state->rank), LAYOUT_VERSION, (unsigned long long)mine->slot_bytes);
        } else if (theirs[member].status != TUTTI_OK) {
            theirs[member].message[sizeof theirs[member].message - 1] = 0;
            status = tu_error((tutti_status)theirs[member].status,
                              "rank %d of group %s could not get shared memory for %s: %s", rank, state->group->name,
                              purpose, theirs[member].message);
            task->agreed = true;
            tu_error_at_fault(rank);
        }
    }
    if (status != TUTTI_OK)
        for (int member = 0; member < state->size; member++)
            if (mappings[member] != NULL)
                tu_mapping_release(mappings[member]);
    return status;
}

static tutti_status share_piece(tu_collective *state, tu_task *task, const char *purpose, size_t bytes, tu_piece *piece,
                                hello *theirs, tu_mapping ***kept) {
    tu_job *job = state->group->world->job;
    tu_task_record(task);
    tu_mapping **mappings = calloc((size_t)state->size, sizeof(tu_mapping *));
    if (mappings == NULL)
        return tu_error_memory("mappings of a group", (size_t)state->size * sizeof(tu_mapping *));
    hello mine = { .version = LAYOUT_VERSION,
                   .slot_bytes = bytes,
                   .place = tu_locality_here(state->group->world->local_rank),
                   .crowded = state->spins == 0 };
    tutti_error_copy before;
    tu_error_save(&before);
    tutti_status mine_status = tu_piece_alloc(job, purpose, bytes, 4096, -1, piece);
    if (mine_status != TUTTI_OK) {
        mine.status = mine_status;
        tu_error_shorten(mine.message, sizeof mine.message, tutti_error_message());
        tu_error_restore(&before);
    }
    tutti_status status =
        exchange_pieces(state, task, purpose, mine_status == TUTTI_OK ? piece : NULL, &mine, theirs, mappings);
    if (status != TUTTI_OK) {
        if (mine_status == TUTTI_OK)
            tu_piece_free(job, piece);
        free(mappings);
        return status;
    }
    *kept = mappings;
    return TUTTI_OK;
}

/* How long a hand-over takes decides how to stage: between cores that share a cache ordinary stores are quicker up to
 * 16 KiB, between distant ones streaming stores are from 4 KiB on. Measured by a few barriers, of which the quickest
 * counts; each rank decides for itself. */
#define MEASURED_HANDOVERS 8
#define NEAR_NANOSECONDS 110
#define NEAR_STAGE_BYTES ((uint64_t)16 << 10)
#define FAR_STAGE_BYTES ((uint64_t)4 << 10)

static tutti_status measure_handover(tu_collective *state, tu_task *task) {
    int64_t quickest = INT64_MAX;
    uint64_t signature = task->signature;
    task->signature = LAYOUT_VERSION; /* the same on all, whatever they call: that is compared later */
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < MEASURED_HANDOVERS && status == TUTTI_OK; i++) {
        uint64_t epoch;
        int64_t begin = tu_clock_now();
        status = tu_epoch_enter(state, task, &epoch);
        if (status == TUTTI_OK) {
            tu_epoch_arrive(state, task, epoch);
            status = tu_epoch_await_all(state, task, epoch);
        }
        int64_t taken = tu_clock_now() - begin;
        quickest = taken < quickest ? taken : quickest;
    }
    task->signature = signature;
    state->near = quickest < NEAR_NANOSECONDS + 15 * (state->size - 2);
    state->watch.far = !state->near;
    state->watch.watched = state->stage_stream == 0; /* no file says it */
    if (state->stage_stream == 0)
        state->stage_stream = state->near ? NEAR_STAGE_BYTES : FAR_STAGE_BYTES;
    TU_LOG(TUTTI_LOG_DEBUG, state->group->world->log, "collective",
           "group %s: a hand-over takes %lld ns; parts of %llu bytes are staged past the cache", state->group->name,
           (long long)quickest, (unsigned long long)state->stage_stream);
    return status;
}

tutti_status tu_collective_setup(tu_collective *state, tu_task *task) {
    if (state->ready)
        return TUTTI_OK;
    tutti_status status = tu_memory_group_get(state->group, &state->memory);
    if (status != TUTTI_OK)
        return status;
    hello *theirs = calloc((size_t)state->size, sizeof *theirs);
    tu_locality *places = calloc((size_t)state->size, sizeof *places);
    if (theirs == NULL || places == NULL) {
        free(theirs);
        free(places);
        return tu_error_memory("the set-up of a group", (size_t)state->size * sizeof *theirs);
    }
    tu_mapping **mappings = NULL;
    status = share_piece(state, task, "collectives", state->layout.bytes, &state->piece, theirs, &mappings);
    if (status == TUTTI_OK) {
        state->mappings = mappings;
        for (int member = 0; member < state->size; member++)
            state->members[member] = mappings[member]->address;
        for (int member = 0; member < state->size; member++)
            places[member] = theirs[member].place;
        state->domains = tu_domains_make(places, state->size);
        state->ready = state->domains != NULL;
        if (!state->ready)
            status = tu_error_memory("the domains of a group", (size_t)state->size * 2 * sizeof(int));
    }
    free(places);
    free(theirs);
    return status == TUTTI_OK ? measure_handover(state, task) : status;
}

/* ---- rings ---- */

tutti_status tu_collective_attach_rings(tu_collective *state, tu_task *task) {
    if (state->rings != NULL)
        return TUTTI_OK;
    hello *theirs = calloc((size_t)state->size, sizeof *theirs);
    unsigned char **rings = calloc((size_t)state->size, sizeof *rings);
    tutti_status status = TUTTI_OK;
    if (theirs == NULL || rings == NULL)
        status = tu_error_memory("the set-up of a group", (size_t)state->size * sizeof *theirs);
    tu_mapping **mappings = NULL;
    if (status == TUTTI_OK)
        status = share_piece(state, task, "staging", state->ring_bytes, &state->ring_piece, theirs, &mappings);
    if (status == TUTTI_OK) {
        for (int member = 0; member < state->size; member++) {
            rings[member] = mappings[member]->address;
            state->crowded = state->crowded || theirs[member].crowded != 0;
        }
        state->ring_mappings = mappings;
        state->rings = rings;
    } else {
        free(rings);
    }
    free(theirs);
    return status;
}

/* ---- the lock ---- */

/* A futex of this process. Giving it back is a plain store: no thread of the rank waits for it as a rule. A waiter that
 * came at that very moment and was not seen sleeps for LOCK_SLICE at most. */
#define LOCK_SLICE (1 * TU_MILLISECOND)

tutti_status tu_collective_lock(tu_collective *state, int64_t deadline) {
    if (tu_collective_try_lock(state))
        return TUTTI_OK;
    tutti_status status = TUTTI_OK;
    atomic_fetch_add_explicit(&state->waiters, 1, memory_order_seq_cst);
    while (!tu_collective_try_lock(state)) {
        int64_t left = tu_deadline_left(deadline);
        if (left == 0) {
            status = tu_error(TUTTI_ERROR_TIMEOUT,
                              "another thread of rank %d has been in an operation of group %s all the time that this "
                              "call was given",
                              state->rank, state->group->name);
            break;
        }
        struct timespec time = { .tv_nsec = left < LOCK_SLICE ? left : LOCK_SLICE };
        syscall(SYS_futex, &state->busy, FUTEX_WAIT_PRIVATE, 1, &time, NULL, 0);
    }
    atomic_fetch_sub_explicit(&state->waiters, 1, memory_order_relaxed);
    return status;
}

void tu_collective_unlock(tu_collective *state) {
    atomic_store_explicit(&state->busy, 0, memory_order_release); /* pairs with the acquire of try_lock */
    if (__builtin_expect(atomic_load_explicit(&state->waiters, memory_order_relaxed) != 0, 0))
        syscall(SYS_futex, &state->busy, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
