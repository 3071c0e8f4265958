/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening and growing a backend by all ranks of the world together: tutti/backend.h.
 *
 * Libraries that wait for every process of a job wait for ever when one does not come, and some end the process when
 * they do not like what they find. So nobody enters one before a bounded exchange has shown that every rank is there,
 * means the same, and was able to load and begin the backend; and a second one shows how it went, so that all ranks
 * have it or none does.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/backend.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "memory/tables.h"
#include "world/group.h"

#define RECORD_VERSION 1

/* What a rank tells in each of the two exchanges. */
typedef struct joint_record {
    uint32_t version;
    int32_t status;
    uint64_t bytes;    /* of a growth */
    uint64_t opened;   /* whether the backend can be used here already */
    uint64_t together; /* whether the plug-in there wants to be joined */
    char name[64];
    char message[400];
} joint_record;

/* One opening or growth under way on this rank. */
typedef struct joint {
    tutti_group *group; /* the world's */
    tu_memory_world *tables;
    const char *name;
    size_t bytes;
    bool grows;
    tu_operation_info info;
    int64_t deadline;
    bool agreed; /* the failure is the same on all ranks: it ends nothing */
    joint_record *records;
    tu_backend_entry *entry;
    bool opened;
} joint;

static const char *operation_of(const joint *joint) {
    return joint->grows ? "backend_grow" : "backend_open";
}

static tutti_status agreed(joint *joint) {
    joint->agreed = true;
    return tu_error_where(joint->group->name, operation_of(joint), joint->info.sequence, joint->group->rank);
}

/* Tells all how it went here, and hears how it went there. */
static tutti_status exchange(joint *joint, const char *purpose, tutti_status own) {
    joint_record record = { .version = RECORD_VERSION,
                            .status = (int32_t)own,
                            .bytes = joint->bytes,
                            .opened = joint->opened,
                            .together = own == TUTTI_OK && joint->entry->table.join != NULL };
    snprintf(record.name, sizeof record.name, "%s", joint->name);
    if (own != TUTTI_OK)
        tu_error_shorten(record.message, sizeof record.message, tutti_error_message());
    return tu_group_exchange_descriptors(joint->group, &joint->info, purpose, &record, sizeof record, -1,
                                         joint->deadline, joint->records, NULL);
}

/* Whether all mean the same. */
static tutti_status compare(joint *joint) {
    const joint_record *first = &joint->records[0];
    for (int rank = 1; rank < joint->group->size; rank++) {
        const joint_record *record = &joint->records[rank];
        if (record->version != first->version)
            tu_error(TUTTI_ERROR_PROTOCOL,
                     "rank %d opens backends by version %u, rank 0 by version %u: the ranks run "
                     "different versions of Tutti",
                     rank, record->version, first->version);
        else if (strncmp(record->name, first->name, sizeof first->name) != 0)
            tu_error(TUTTI_ERROR_MISMATCH, "the ranks mean different backends: rank 0 %.63s, rank %d %.63s",
                     first->name, rank, record->name);
        else if (record->bytes != first->bytes)
            tu_error(TUTTI_ERROR_MISMATCH, "backend %s cannot grow by %llu bytes on rank 0 and by %llu on rank %d",
                     joint->name, (unsigned long long)first->bytes, (unsigned long long)record->bytes, rank);
        else
            continue;
        tu_error_at_fault(rank);
        return agreed(joint);
    }
    return TUTTI_OK;
}

/* The first rank that failed fails all: with its own words there, and by its name elsewhere. */
static tutti_status agree(joint *joint, tutti_status own) {
    for (int rank = 0; rank < joint->group->size; rank++) {
        const joint_record *record = &joint->records[rank];
        if (record->status == TUTTI_OK)
            continue;
        joint->agreed = true;
        if (own != TUTTI_OK)
            return own; /* its message stands */
        tu_error((tutti_status)record->status, "rank %d cannot %s backend %s: %.399s", rank,
                 joint->grows ? "grow" : "open", joint->name, record->message);
        tu_error_at_fault(rank);
        return agreed(joint);
    }
    return TUTTI_OK;
}

/* Ranks of which only some have the backend open cannot go on together: one of them is new in the world. */
static tutti_status compare_progress(joint *joint) {
    for (int rank = 1; rank < joint->group->size; rank++) {
        const joint_record *record = &joint->records[rank];
        if (record->opened == joint->records[0].opened && record->together == joint->records[0].together)
            continue;
        tu_error(TUTTI_ERROR_STATE,
                 "backend %s is %s on rank 0 and %s on rank %d: it can only be opened by all at once", joint->name,
                 joint->records[0].opened ? "open" : "closed", record->opened ? "open" : "closed", rank);
        tu_error_at_fault(rank);
        return agreed(joint);
    }
    return TUTTI_OK;
}

/* What this rank can find out alone. */
static tutti_status begin_here(joint *joint) {
    tutti_status status = tu_backend_begin(joint->tables, joint->name, &joint->entry, &joint->opened);
    if (status != TUTTI_OK || !joint->grows)
        return status;
    if (!joint->opened)
        return tu_error(TUTTI_ERROR_STATE, "backend %s is not open: call tutti_backend_open first", joint->name);
    if (joint->entry->table.grow == NULL)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s allocates as it goes: there is nothing to grow",
                        joint->name);
    return TUTTI_OK;
}

static tutti_status act(joint *joint) {
    const tu_backend *table = &joint->entry->table;
    if (joint->grows)
        return table->grow(joint->entry->state, joint->group, joint->bytes, joint->deadline);
    return table->join(joint->entry->state, joint->group, joint->deadline);
}

static tutti_status meet(joint *joint) {
    tutti_status own = begin_here(joint);
    tutti_status status = exchange(joint, "to open or grow a backend", own);
    if (status == TUTTI_OK)
        status = compare(joint);
    if (status == TUTTI_OK)
        status = agree(joint, own);
    if (status == TUTTI_OK)
        status = compare_progress(joint);
    if (status != TUTTI_OK || (!joint->grows && joint->opened))
        return status;
    own = act(joint);
    status = exchange(joint, "after a backend was entered", own);
    if (status == TUTTI_OK)
        status = agree(joint, own);
    if (status == TUTTI_OK && !joint->grows)
        tu_backend_opens(joint->tables, joint->entry);
    return status;
}

static tutti_status run(joint *joint) {
    joint->records = calloc((size_t)joint->group->size, sizeof *joint->records);
    if (joint->records == NULL)
        return tu_error_memory("opening a backend", (size_t)joint->group->size * sizeof *joint->records);
    tutti_status status;
    if (tu_mutex_lock_until(&joint->tables->joining, joint->deadline)) {
        status = meet(joint);
        pthread_mutex_unlock(&joint->tables->joining);
    } else {
        status = tu_error(TUTTI_ERROR_TIMEOUT, "timeout: this rank opens or grows a backend in another thread");
    }
    free(joint->records);
    return status;
}

/* Checks what a program gave. */
static tutti_status begin_call(tutti_world *world, const char *function, const char *name, const tutti_call *call,
                               int64_t *timeout_ns) {
    tutti_call full = TUTTI_CALL_INIT;
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK && call != NULL)
        status = tu_options_copy("tutti_call", call, &full, sizeof full);
    if (status != TUTTI_OK)
        return status;
    if (name == NULL || name[0] == 0 || strlen(name) > 63)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s needs the name of a backend, such as \"nvshmem\"", function);
    if (full.timeout_ns < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: timeout_ns must not be negative (%lld)", function,
                        (long long)full.timeout_ns);
    if (full.work != NULL || full.batch != NULL)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s is complete when it returns: it takes no work handle and no batch",
                        function);
    if (world->fake)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s: the ranks of a fake world cannot meet", function);
    *timeout_ns = full.timeout_ns;
    return TUTTI_OK;
}

static tutti_status together(tutti_world *world, bool grows, const char *name, size_t bytes, int64_t timeout_ns) {
    joint joint = { .group = tutti_world_group(world), .name = name, .bytes = bytes, .grows = grows };
    joint.info =
        (tu_operation_info){ .operation = grows ? TU_OPERATION_BACKEND_GROW : TU_OPERATION_BACKEND_OPEN, .root = -1 };
    tutti_status status = tu_memory_world_get(world, &joint.tables);
    uint64_t ticket;
    if (status == TUTTI_OK)
        status = tu_group_enter(joint.group, timeout_ns, &joint.info, &joint.deadline, &ticket);
    if (status == TU_FAULT_SKIP) /* there is no backend to go on with */
        return tu_error(TUTTI_ERROR_FAULT, "an injected fault made this rank skip %s %llu", operation_of(&joint),
                        (unsigned long long)joint.info.sequence);
    if (status != TUTTI_OK)
        return status;
    status = run(&joint);
    if (joint.agreed)
        return tu_group_leave_agreement(joint.group, ticket, status);
    return tu_group_leave(joint.group, &joint.info, ticket, status);
}

tutti_status tutti_backend_open(tutti_world *world, const char *name, const tutti_call *call) {
    int64_t timeout_ns;
    TU_INSIDE(world);
    tutti_status status = begin_call(world, "tutti_backend_open", name, call, &timeout_ns);
    return status == TUTTI_OK ? together(world, false, name, 0, timeout_ns) : status;
}

tutti_status tutti_backend_grow(tutti_world *world, const char *name, size_t bytes, const tutti_call *call) {
    int64_t timeout_ns;
    TU_INSIDE(world);
    tutti_status status = begin_call(world, "tutti_backend_grow", name, call, &timeout_ns);
    if (status == TUTTI_OK && bytes == 0)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_backend_grow: a backend cannot grow by no bytes");
    return status == TUTTI_OK ? together(world, true, name, bytes, timeout_ns) : status;
}

tutti_status tutti_backend_module(tutti_world *world, const char *name, void *module) {
    int64_t timeout_ns;
    TU_INSIDE(world);
    tutti_status status = begin_call(world, "tutti_backend_module", name, NULL, &timeout_ns);
    if (status == TUTTI_OK && module == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_backend_module needs a module");
    const tu_backend *backend = NULL;
    void *state = NULL;
    if (status == TUTTI_OK)
        status = tu_backend_open(world, name, &backend, &state);
    if (status == TUTTI_OK && backend->module == NULL)
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s has no functions for the kernels of programs", name);
    return status == TUTTI_OK ? backend->module(state, module) : status;
}

tutti_status tutti_backend_communicator(tutti_group *group, const char *name, void *communicator) {
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_backend_communicator needs a group that this rank is in");
    int64_t timeout_ns;
    TU_INSIDE(group->world);
    tutti_status status = begin_call(group->world, "tutti_backend_communicator", name, NULL, &timeout_ns);
    if (status == TUTTI_OK && communicator == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "tutti_backend_communicator needs a communicator");
    const tu_backend *backend = NULL;
    void *state = NULL;
    if (status == TUTTI_OK)
        status = tu_backend_open(group->world, name, &backend, &state);
    if (status == TUTTI_OK && backend->communicator == NULL)
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s takes no communicators of programs", name);
    return status == TUTTI_OK ? backend->communicator(state, group, communicator) : status;
}

static tutti_status make_team(const tu_backend *backend, void *state, tutti_group *group, int64_t timeout_ns,
                              int32_t *team) {
    tu_operation_info info = { .operation = TU_OPERATION_BACKEND_TEAM, .root = -1 };
    int64_t deadline;
    uint64_t ticket;
    tutti_status status = tu_group_enter(group, timeout_ns, &info, &deadline, &ticket);
    if (status == TU_FAULT_SKIP)
        return tu_error(TUTTI_ERROR_FAULT, "an injected fault made this rank skip backend_team %llu of group %s",
                        (unsigned long long)info.sequence, group->name);
    if (status != TUTTI_OK)
        return status;
    status = backend->team(state, group, deadline, team);
    return status == TUTTI_ERROR_UNSUPPORTED || status == TUTTI_ERROR_LIMIT
               ? tu_group_leave_agreement(group, ticket, status)
               : tu_group_leave(group, &info, ticket, status);
}

tutti_status tutti_backend_team(tutti_group *group, const char *name, const tutti_call *call, int32_t *team) {
    int64_t timeout_ns;
    TU_INSIDE_GROUP(group);
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER || team == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_backend_team needs a group that this rank is a member of, and a "
                                              "place for its result");
    tutti_status status = begin_call(group->world, "tutti_backend_team", name, call, &timeout_ns);
    const tu_backend *backend = NULL;
    void *state = NULL;
    tu_memory_group *attached; /* with it, backends are told when the group goes away */
    if (status == TUTTI_OK)
        status = tu_memory_group_get(group, &attached);
    if (status == TUTTI_OK)
        status = tu_backend_open(group->world, name, &backend, &state);
    if (status == TUTTI_OK && backend->team == NULL)
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s has no teams", name);
    return status == TUTTI_OK ? make_team(backend, state, group, timeout_ns, team) : status;
}
