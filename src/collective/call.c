/* SPDX-License-Identifier: Apache-2.0
 *
 * From a public call to a task: check, choose who runs it, then run it, start it as a work or note it in a batch; and
 * what tutti_group_ran tells about the last one.
 */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/result.h"
#include "collective/batch.h"
#include "collective/check.h"
#include "collective/work.h"

/* Everything that this rank alone can refuse is refused here, before the call has a number. */
tutti_status tu_submit_checked(tu_task *task, const tutti_call *call) {
    task->stream = call->stream;
    tutti_status status = TUTTI_OK;
    task->state = tu_collective_find(task->group);
    if (__builtin_expect(task->state == NULL, 0))
        status = tu_collective_get(task->group, &task->state);
    if (status != TUTTI_OK)
        return status;
    task->executor = task->state->only;
    if (__builtin_expect(
            call->executor != NULL || task->executor == NULL || tu_device_possible(task->group->world, call), 0))
        status = tu_executor_choose(task, call);
    if (status == TUTTI_OK && task->executor->check != NULL)
        status = task->executor->check(task);
    if (status == TUTTI_OK && call->batch != NULL)
        status = tu_batch_check(task->row->name, call);
    if (status != TUTTI_OK)
        return status;
    if (call->batch != NULL && !task->executor->enqueues)
        return tu_batch_note(call->batch, task);
    return call->work != NULL ? tu_work_start(task, call->work) : tu_task_run(task);
}

static tutti_status submit(tu_task *task, const tutti_call *call) {
    tutti_status status = tu_check_task(task, call);
    return status == TUTTI_OK ? tu_submit_checked(task, call) : status;
}

static tutti_status absent(const tu_task *task) {
    if (task->group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the group is NULL", task->row->name);
    (void)tu_group_absent(task->group, task->row->name);
    return TUTTI_OK;
}

tutti_status tu_submit(tu_task *task, const tutti_call *call) {
    static const tutti_call defaults = TUTTI_CALL_INIT;
    if (__builtin_expect(task->group == NULL || task->group == TUTTI_NON_GROUP_MEMBER, 0))
        return absent(task);
    TU_INSIDE(task->group->world);
    tutti_status status = tu_world_check(task->group->world);
    if (status != TUTTI_OK)
        return status;
    if (call == NULL)
        return tu_not_entered(submit(task, &defaults));
    tutti_call full = TUTTI_CALL_INIT;
    status = tu_options_copy("tutti_call", call, &full, sizeof full);
    return status == TUTTI_OK ? tu_not_entered(submit(task, &full)) : status;
}

tutti_status tu_submit_nothing(tutti_group *group, const tutti_call *call) {
    tutti_call full = TUTTI_CALL_INIT;
    tutti_status status = call == NULL ? TUTTI_OK : tu_options_copy("tutti_call", call, &full, sizeof full);
    if (status == TUTTI_OK)
        status = tu_batch_check("a call that moves nothing", &full);
    if (status != TUTTI_OK || full.work == NULL || group == TUTTI_NON_GROUP_MEMBER)
        return status;
    tutti_batch *nothing;
    status = tutti_batch_begin(group, &nothing);
    return status != TUTTI_OK ? status : tutti_batch_end(nothing, TUTTI_OPTIONS(tutti_call, .work = full.work));
}

/* ---- which algorithm ran, and why ---- */

static void explain(const tu_collective *state, tutti_ran *ran) {
    const tu_choice *choice = &state->choice;
    const char *name = tutti_algorithm_name(choice->algorithm);
    char *text = ran->why;
    size_t bytes = sizeof ran->why;
    if (choice->from == state->ran_by->name)
        snprintf(text, bytes, "%s: chosen by executor %s%s", name, choice->from,
                 choice->any_order ? ", in any order as the call allowed: not the same bits as ever"
                 : state->ran_by->own_order && state->ran.reduction != 0
                     ? ", which adds in an order of its own: not the same bits as ever"
                     : "");
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
    if (group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_group_ran: group is NULL");
    tutti_ran full = TUTTI_RAN_INIT;
    tu_collective *state = tu_collective_find(group);
    if (state == NULL)
        return tu_error(TUTTI_ERROR_EMPTY, "no collective has run in group %s on this rank", group->name);
    tutti_status status = tu_collective_lock(state, tu_deadline(state->group->world->timeout_ns));
    if (status != TUTTI_OK)
        return status;
    bool any = state->ran_by != NULL;
    full.algorithm = (tutti_algorithm)state->ran.algorithm;
    full.sequence = state->ran.sequence;
    full.direct_inputs = state->direct_inputs;
    full.direct_outputs = state->direct_outputs;
    snprintf(full.operation, sizeof full.operation, "%s", tu_operation_name((tu_operation)state->ran.operation));
    if (any) {
        snprintf(full.executor, sizeof full.executor, "%s", state->ran_by->name);
        explain(state, &full);
    }
    tu_collective_unlock(state);
    if (!any)
        return tu_error(TUTTI_ERROR_EMPTY, "no collective has run in group %s on this rank", group->name);
    return tu_result_copy("tutti_ran", &full, sizeof full, ran);
}
