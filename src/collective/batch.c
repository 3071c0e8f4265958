/* SPDX-License-Identifier: Apache-2.0
 *
 * Batches. Sends and receives are posted first, so that they run side by side; then the collectives run in the order in
 * which they were noted; then the sends and receives are awaited. Neighbouring small all-reduces of one dtype and
 * reduction are packed and run as one: element by element it is the same sum.
 */
#include "collective/batch.h"

#include <stdlib.h>
#include <string.h>

#include "collective/engine.h"
#include "collective/point.h"
#include "collective/work.h"
#include "world/group.h"

#define PACK_BYTES ((size_t)32 << 10) /* all-reduces are packed up to this size together */

struct tutti_batch {
    tutti_group *group;
    int count, room;
    tu_task *tasks;
};

static tutti_status refuse(const char *function) {
    return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the batch or the group is NULL", function);
}

tutti_status tutti_batch_begin(tutti_group *group, tutti_batch **batch) {
    if (group == NULL || batch == NULL)
        return refuse("tutti_batch_begin");
    if (tu_group_absent(group, "batch"))
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_batch_begin: this rank is no member of the group");
    tutti_status status = tu_world_check(group->world);
    if (status != TUTTI_OK)
        return status;
    tutti_batch *made = calloc(1, sizeof *made);
    if (made == NULL)
        return tu_error_memory("a batch", sizeof *made);
    made->group = tutti_group_keep(group);
    *batch = made;
    return TUTTI_OK;
}

void tu_batch_free(tutti_batch *batch) {
    if (batch == NULL)
        return;
    tutti_group_release(batch->group);
    free(batch->tasks);
    free(batch);
}

void tutti_batch_cancel(tutti_batch *batch) {
    tu_batch_free(batch);
}

tutti_status tu_batch_note(tutti_batch *batch, const tu_task *task, const tutti_call *call) {
    const char *name = tu_operation_name((tu_operation)task->info.operation);
    if (batch->group != task->group)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the batch belongs to group %s, the call to group %s", name,
                        batch->group->name, task->group->name);
    if (call->work != NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s: a call in a batch has no work of its own; give one to tutti_batch_end", name);
    if (batch->count == batch->room) {
        int room = batch->room == 0 ? 8 : batch->room * 2;
        tu_task *more = realloc(batch->tasks, (size_t)room * sizeof *more);
        if (more == NULL)
            return tu_error_memory("a batch", (size_t)room * sizeof *more);
        batch->tasks = more;
        batch->room = room;
    }
    batch->tasks[batch->count++] = *task;
    return TUTTI_OK;
}

/* ---- packing ---- */

static bool packs_with(const tu_task *first, const tu_task *task) {
    return first->custom == NULL && first->shape == TU_OPERATION_ALL_REDUCE && task->shape == TU_OPERATION_ALL_REDUCE &&
           first->info.operation == task->info.operation && first->info.dtype == task->info.dtype &&
           first->info.reduction == task->info.reduction && first->forced == task->forced &&
           first->factor == task->factor;
}

/* How many tasks from `begin` on run as one, and their bytes. */
static int pack_length(const tutti_batch *batch, int begin, size_t *bytes) {
    const tu_task *first = &batch->tasks[begin];
    int end = begin;
    *bytes = 0;
    while (end < batch->count && packs_with(first, &batch->tasks[end])) {
        size_t more = batch->tasks[end].info.count * batch->tasks[end].element;
        if (*bytes + more > PACK_BYTES)
            break;
        *bytes += more;
        end++;
    }
    return end - begin;
}

/* ---- running ---- */

static tutti_status run_entered(tu_collective *state, tu_task *task) {
    if (state == NULL)
        return tu_task_run_alone(task);
    tutti_status status = tu_group_enter(task->group, task->timeout_ns, &task->info, &task->deadline, &task->ticket);
    if (status != TUTTI_OK)
        return tu_not_entered(status);
    status = tu_collective_setup(state, task);
    if (status == TUTTI_OK) {
        status = tu_task_choose(state, task);
        task->agreed = status != TUTTI_OK;
    }
    if (status == TUTTI_OK)
        status = tu_task_run(state, task);
    return tu_task_leave(task, status);
}

static tutti_status run_packed(tu_collective *state, tutti_batch *batch, int begin, int count, size_t bytes) {
    unsigned char *packed = malloc(bytes == 0 ? 1 : bytes);
    if (packed == NULL)
        return tu_error_memory("packing a batch", bytes);
    size_t at = 0;
    uint64_t detail = 1;
    for (int i = begin; i < begin + count; i++) {
        const tu_task *task = &batch->tasks[i];
        size_t more = task->info.count * task->element;
        if (more != 0)
            memcpy(packed + at, task->in, more);
        at += more;
        detail = detail * UINT64_C(0x9e3779b97f4a7c15) + task->info.count;
    }
    tu_task whole = batch->tasks[begin];
    whole.in = whole.out = packed;
    whole.info.count = bytes / whole.element;
    whole.detail = detail;
    tutti_status status = run_entered(state, &whole);
    at = 0;
    for (int i = begin; i < begin + count && status == TUTTI_OK; i++) {
        const tu_task *task = &batch->tasks[i];
        size_t more = task->info.count * task->element;
        if (more != 0)
            memcpy(task->out, packed + at, more);
        at += more;
    }
    free(packed);
    return status;
}

static bool is_point(const tu_task *task) {
    return task->shape == TU_OPERATION_SEND || task->shape == TU_OPERATION_RECV;
}

static tutti_status run_collectives(tu_collective *state, tutti_batch *batch) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < batch->count && status == TUTTI_OK;) {
        if (is_point(&batch->tasks[i]) && !batch->group->world->fake) {
            i++;
            continue;
        }
        size_t bytes;
        int together = pack_length(batch, i, &bytes);
        if (together > 1)
            status = run_packed(state, batch, i, together, bytes);
        else
            status = run_entered(state, &batch->tasks[i]);
        i += together > 1 ? together : 1;
    }
    return status;
}

tutti_status tu_batch_run(tu_collective *state, tutti_batch *batch) {
    int points = 0;
    for (int i = 0; i < batch->count && !batch->group->world->fake; i++)
        points += is_point(&batch->tasks[i]);
    if (points == 0)
        return run_collectives(state, batch);
    tu_collective *peers;
    tutti_status status = tu_collective_get(batch->group, &peers);
    if (status != TUTTI_OK)
        return status;
    tu_request **requests = calloc((size_t)points, sizeof *requests);
    if (requests == NULL)
        return tu_error_memory("a batch", (size_t)points * sizeof *requests);
    int posted = 0;
    for (int i = 0; i < batch->count && status == TUTTI_OK; i++)
        if (is_point(&batch->tasks[i])) {
            status = tu_point_post(peers, &batch->tasks[i], &requests[posted]);
            posted += status == TUTTI_OK;
        }
    if (status == TUTTI_OK)
        status = run_collectives(state, batch);
    /* All are awaited, also after a failure: their buffers are the caller's again afterwards. The first error
     * counts. */
    tu_error_copy first;
    if (status != TUTTI_OK)
        tu_error_save(&first);
    for (int i = 0; i < posted; i++) {
        tutti_status one = tu_point_await(peers, requests[i]);
        if (one != TUTTI_OK && status == TUTTI_OK) {
            status = one;
            tu_error_save(&first);
        }
    }
    free(requests);
    return status == TUTTI_OK ? TUTTI_OK : tu_error_restore(&first);
}

static tutti_status run_blocking(tutti_batch *batch, int64_t timeout_ns) {
    tutti_group *group = batch->group;
    if (group->size == 1 || group->world->fake)
        return tu_batch_run(NULL, batch);
    tu_collective *state;
    int64_t timeout;
    tutti_status status = tu_collective_get(group, &state);
    if (status == TUTTI_OK)
        status = tu_timeout_choose("timeout_ns", timeout_ns, group->timeout_ns, group->world->timeout_ns, &timeout);
    if (status == TUTTI_OK)
        status = tu_collective_lock(state, tu_deadline(timeout));
    if (status != TUTTI_OK)
        return status;
    tu_engine_drain(state);
    status = tu_batch_run(state, batch);
    tu_collective_unlock(state);
    return status;
}

tutti_status tutti_batch_end(tutti_batch *batch, const tutti_call *call) {
    if (batch == NULL)
        return refuse("tutti_batch_end");
    tutti_call full = TUTTI_CALL_INIT;
    tutti_status status = call == NULL ? TUTTI_OK : tu_options_copy("tutti_call", call, &full, sizeof full);
    for (int i = 0; i < batch->count; i++)
        if (full.timeout_ns != 0)
            batch->tasks[i].timeout_ns = full.timeout_ns;
    if (status == TUTTI_OK && full.work != NULL) {
        tu_task task = { .group = batch->group,
                         .shape = TU_OPERATION_BATCH,
                         .info = { .operation = TU_OPERATION_BATCH, .root = -1 } };
        tutti_work *work;
        status = tu_work_make(&task, &work);
        if (status == TUTTI_OK) {
            work->batch = batch;
            return tu_work_start_made(work, full.work);
        }
    } else if (status == TUTTI_OK) {
        status = run_blocking(batch, full.timeout_ns);
    }
    tu_batch_free(batch);
    return status;
}
