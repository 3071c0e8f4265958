/* SPDX-License-Identifier: Apache-2.0
 *
 * From a call to its result: check, enter, choose, run, leave. Blocking calls run here, on the caller's thread; those
 * with a work go to work.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "collective/batch.h"
#include "collective/check.h"
#include "collective/device.h"
#include "collective/engine.h"
#include "world/group.h"

/* ---- running a task that has been entered, with the lock held ---- */

static tutti_status run_algorithm(tu_collective *state, tu_task *task, tutti_algorithm algorithm) {
    switch (algorithm) {
    case TUTTI_ALGORITHM_TWO_SHOT:
        return tu_two_shot(state, task);
    case TUTTI_ALGORITHM_PIPELINED:
        return tu_pipelined(state, task);
    case TUTTI_ALGORITHM_TREE:
        return tu_tree(state, task);
    default:
        return tu_one_shot(state, task, algorithm);
    }
}

tutti_status tu_task_choose(tu_collective *state, tu_task *task) {
    tutti_status status = tu_choose(state, task, &state->choice);
    if (status != TUTTI_OK)
        return status;
    task->info.algorithm = (uint8_t)state->choice.algorithm;
    task->signature = tu_signature(task);
    return TUTTI_OK;
}

/* Parts that move to places of other sizes in the same buffer: no order of copies is right, so they start from a
 * copy. */
static tutti_status run_from_copy(tu_collective *state, tu_task *task) {
    size_t bytes = tu_in_bytes(task, state->rank, state->size);
    void *copy = malloc(bytes);
    if (copy == NULL)
        return tu_error_memory("all_to_all_v in place", bytes);
    task->in = memcpy(copy, task->in, bytes);
    tutti_status status = run_algorithm(state, task, (tutti_algorithm)task->info.algorithm);
    free(copy);
    return status;
}

tutti_status tu_task_run(tu_collective *state, tu_task *task) {
    state->ran = task->info;
    state->direct_inputs = state->direct_outputs = 0;
    if (task->custom != NULL)
        return task->custom(state, task);
    if (task->shape == TU_OPERATION_ALL_TO_ALL_V && task->in == task->out && task->in != NULL)
        return run_from_copy(state, task);
    return run_algorithm(state, task, (tutti_algorithm)task->info.algorithm);
}

tutti_status tu_task_leave(tu_task *task, tutti_status status) {
    if (__builtin_expect(status == TUTTI_OK, 1))
        return tu_group_leave(task->group, &task->info, task->ticket, TUTTI_OK);
    if (task->agreed)
        return tu_group_leave_agreement(task->group, task->ticket, status);
    /* An interrupted operation has left this rank out of step with the others: nothing can follow it. */
    if (status == TUTTI_ERROR_INTERRUPTED)
        tu_group_end(task->group, &task->info);
    return tu_group_leave(task->group, &task->info, task->ticket, status);
}

/* The first operation of a group: its pieces are exchanged before an algorithm can be chosen. */
static tutti_status run_first(tu_collective *state, tu_task *task) {
    tutti_status status = tu_engine_enter(state, task);
    if (status != TUTTI_OK)
        return status;
    status = tu_collective_setup(state, task);
    if (status == TUTTI_OK) {
        status = tu_task_choose(state, task);
        task->agreed = status != TUTTI_OK;
        const tutti_world *world = task->group->world;
        tu_record_algorithm(tu_job_recorder(world->job, world->local_rank), task->ticket, task->info.algorithm);
    }
    if (status == TUTTI_OK)
        status = tu_task_run(state, task);
    return tu_task_leave(task, status);
}

static tutti_status run_locked(tu_collective *state, tu_task *task) {
    tu_engine_drain(state);
    if (__builtin_expect(!state->ready, 0))
        return run_first(state, task);
    tutti_status status = tu_task_choose(state, task);
    if (status == TUTTI_OK)
        status = tu_engine_enter(state, task);
    if (status != TUTTI_OK)
        return status;
    return tu_task_leave(task, tu_task_run(state, task));
}

/* For tutti_group_ran. */
static void note_alone(const tu_task *task) {
    tu_collective *state;
    if (tu_collective_get(task->group, &state) != TUTTI_OK || !tu_collective_try_lock(state))
        return;
    state->ran = task->info;
    state->choice = (tu_choice){ .from = "alone" };
    tu_collective_unlock(state);
}

tutti_status tu_task_run_alone(tu_task *task) {
    tutti_status status = tu_group_enter(task->group, task->timeout_ns, &task->info, &task->deadline, &task->ticket);
    if (status != TUTTI_OK)
        return status;
    if (task->group->world->fake) {
        tu_fake(task);
    } else {
        status = tu_alone(task);
        note_alone(task);
    }
    return tu_group_leave(task->group, &task->info, task->ticket, status);
}

tutti_status tu_task_run_blocking(tu_task *task) {
    tu_collective *state;
    tutti_status status = tu_collective_get(task->group, &state);
    if (status != TUTTI_OK)
        return status;
    if (__builtin_expect(!tu_collective_try_lock(state), 0)) {
        int64_t timeout;
        status = tu_timeout_choose("timeout_ns", task->timeout_ns, task->group->timeout_ns,
                                   task->group->world->timeout_ns, &timeout);
        if (status == TUTTI_OK)
            status = tu_collective_lock(state, tu_deadline(timeout));
        if (status != TUTTI_OK)
            return status;
    }
    status = run_locked(state, task);
    tu_collective_unlock(state);
    return status;
}

/* ---- the way in ---- */

static tutti_status submit(tu_task *task, const tutti_call *call) {
    tutti_group *group = task->group;
    tutti_status status = tu_check_task(task, call);
    if (status != TUTTI_OK)
        return status;
    if (__builtin_expect(tu_device_task_wanted(task, call), 0))
        return tu_device_submit(task, call);
    if (call->batch != NULL)
        return tu_batch_note(call->batch, task, call);
    if (call->work != NULL)
        return tu_work_start(task, call->work);
    if (group->size == 1 || group->world->fake)
        return tu_task_run_alone(task);
    status = tu_check_local(group, task);
    return status == TUTTI_OK ? tu_task_run_blocking(task) : status;
}

static tutti_status absent(const tu_task *task) {
    const char *operation = tu_operation_name((tu_operation)task->info.operation);
    if (task->group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the group is NULL", operation);
    (void)tu_group_absent(task->group, operation);
    return TUTTI_OK;
}

tutti_status tu_submit(tu_task *task, const tutti_call *call) {
    static const tutti_call defaults = TUTTI_CALL_INIT;
    if (__builtin_expect(task->group == NULL || task->group == TUTTI_NON_GROUP_MEMBER, 0))
        return absent(task);
    if (call == NULL)
        return tu_not_entered(submit(task, &defaults));
    tutti_call full = TUTTI_CALL_INIT;
    tutti_status status = tu_options_copy("tutti_call", call, &full, sizeof full);
    return status == TUTTI_OK ? tu_not_entered(submit(task, &full)) : status;
}

/* ---- which algorithm ran, and why ---- */

static void explain(const tu_collective *state, tutti_ran *ran) {
    const tu_choice *choice = &state->choice;
    const char *name = tutti_algorithm_name(choice->algorithm);
    char *text = ran->why;
    size_t bytes = sizeof ran->why;
    if (state->size == 1)
        snprintf(text, bytes, "%s: nobody else is in the group", name);
    else if (choice->replaced)
        snprintf(text, bytes, "%s: what the %s names for %llu bytes and %d ranks does not serve this call", name,
                 choice->from, (unsigned long long)choice->bytes, state->size);
    else if (choice->from == state->rules_from)
        snprintf(text, bytes, "%s: %llu bytes, at or above %llu for %d ranks (%s)", name,
                 (unsigned long long)choice->bytes, (unsigned long long)choice->limit, state->size, choice->from);
    else
        snprintf(text, bytes, "%s: forced by %s", name, choice->from);
}

tutti_status tutti_group_ran(tutti_group *group, tutti_ran *ran) {
    if (group == NULL || ran == NULL || ran->size == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_ran needs a group and a tutti_ran whose size is set");
    tutti_ran full = TUTTI_RAN_INIT;
    tu_collective *state = tu_attached(&group->rooms[TU_ROOM_COLLECTIVE]);
    if (state == NULL)
        return tu_error(TUTTI_ERROR_EMPTY, "no collective has run in group %s on this rank", group->name);
    tutti_status status = tu_collective_lock(state, tu_deadline(state->group->world->timeout_ns));
    if (status != TUTTI_OK)
        return status;
    bool any = state->ran.operation != TU_OPERATION_NONE;
    full.algorithm = (tutti_algorithm)state->ran.algorithm;
    full.sequence = state->ran.sequence;
    full.direct_inputs = state->direct_inputs;
    full.direct_outputs = state->direct_outputs;
    snprintf(full.operation, sizeof full.operation, "%s", tu_operation_name((tu_operation)state->ran.operation));
    explain(state, &full);
    tu_collective_unlock(state);
    if (!any)
        return tu_error(TUTTI_ERROR_EMPTY, "no collective has run in group %s on this rank", group->name);
    size_t size = ran->size;
    memcpy(ran, &full, size < sizeof full ? size : sizeof full);
    ran->size = size;
    return TUTTI_OK;
}
