/* SPDX-License-Identifier: Apache-2.0
 *
 * The one way to run a task, for blocking calls, works and batches: drain, enter, prepare, run, leave.
 */
#include <string.h>

#include "base/error.h"
#include "collective/collective.h"
#include "collective/message.h"
#include "collective/works.h"
#include "world/group.h"

/* The only place where a collective gets its number. Everything that this rank alone could refuse has been refused:
 * a number that one rank takes and another does not would make the two call each other's operations wrong. */
tutti_status tu_task_enter(tu_task *task) {
    tutti_status status = tu_group_enter_unrecorded(task->group, task->timeout_ns, &task->info);
    task->entered = status == TUTTI_OK;
    return status;
}

/* Two executors take each other's records for garbage; what really differs is who runs the call. */
static void look_for_other_executors(const tu_task *task) {
    for (int member = 0; member < task->group->size; member++)
        if (member != task->group->rank && tu_group_compare(task->group, &task->info, member) != TUTTI_OK)
            return;
}

/* The others on this host may wait for this rank in a part of the call: they are told before the call ends, which has
 * messages between hosts to see to. What ends no group is left to the call. */
static tutti_status leave_part(const tu_task *task, tutti_status status) {
    if (!task->agreed)
        task->outer->ended = tu_group_fail(task->group, &task->outer->info, &status);
    return status;
}

tutti_status tu_task_leave(tu_task *task, tutti_status status) {
    if (__builtin_expect(status == TUTTI_OK, 1))
        return tu_group_leave(task->group, &task->info, task->ticket, TUTTI_OK);
    if (task->outer != NULL)
        return leave_part(task, status);
    tu_task_record(task);
    if (task->ended) {
        (void)tu_group_leave_agreement(task->group, task->ticket, status);
        tu_trace_failure(task->group->world);
        return status;
    }
    if (status == TUTTI_ERROR_MISMATCH)
        look_for_other_executors(task);
    if (task->agreed)
        return tu_group_leave_agreement(task->group, task->ticket, status);
    /* An interrupted operation has left this rank out of step with the others: nothing can follow it. */
    if (status == TUTTI_ERROR_INTERRUPTED && !task->row->own_number)
        tu_group_end(task->group, &task->info);
    status = tu_group_leave(task->group, &task->info, task->ticket, status);
    if (task->row->kind == TU_KIND_MESSAGE)
        tu_message_failed(task, status);
    return status;
}

tutti_status tu_task_fill(tu_task *task) {
    size_t bytes = task->info.count * task->element;
    const tutti_memory *memory = tutti_memory_find(task->group->world, task->in);
    if (memory->device == TUTTI_CPU) {
        memmove((void *)(uintptr_t)task->in, task->source, bytes);
        return TUTTI_OK;
    }
    tu_backend_call copy = { .stream = task->stream };
    return memory->backend->memory->copy(memory->backend_state, memory->block.device_index, (void *)(uintptr_t)task->in,
                                         task->source, bytes, &copy);
}

static bool takes_turns(const tu_task *task) {
    return task->executor->takes_turns && task->row->kind != TU_KIND_MESSAGE;
}

/* What follows after a task was entered. */
static inline tutti_status run_entered(tu_task *task) {
    const tu_executor *executor = task->executor;
    tutti_status status = TUTTI_OK;
    if (executor->prepare != NULL)
        status = executor->prepare(task);
    if (__builtin_expect(task->source != NULL, 0) && status == TUTTI_OK)
        status = tu_task_fill(task);
    if (status == TUTTI_OK)
        status = executor->run(task);
    return tu_task_leave(task, status);
}

tutti_status tu_task_run_in_turn(tu_task *task) {
    tutti_status status = task->entered ? TUTTI_OK : tu_task_enter(task);
    return status == TUTTI_OK ? run_entered(task) : status;
}

tutti_status tu_turn_take(tu_collective *state, int64_t timeout_ns) {
    if (__builtin_expect(tu_collective_try_lock(state), 1))
        return TUTTI_OK;
    tutti_group *group = state->group;
    int64_t timeout;
    tutti_status status = tu_timeout_choose(NULL, timeout_ns, group->timeout_ns, group->world->timeout_ns, &timeout);
    return status == TUTTI_OK ? tu_collective_lock(state, tu_deadline(timeout)) : status;
}

tutti_status tu_task_run(tu_task *task) {
    if (!takes_turns(task))
        return tu_task_run_in_turn(task);
    tu_collective *state = task->state;
    tutti_status status = TUTTI_OK;
    if (__builtin_expect(!tu_collective_try_lock(state), 0))
        status = tu_turn_take(state, task->timeout_ns);
    if (status != TUTTI_OK)
        return status;
    tu_works *works = tu_works_drain(state);
    status = tu_task_enter(task);
    if (__builtin_expect(works != NULL, 0))
        tu_works_resume(works);
    if (status == TUTTI_OK)
        status = run_entered(task);
    tu_collective_unlock(state);
    return status;
}
