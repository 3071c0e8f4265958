/* SPDX-License-Identifier: Apache-2.0
 *
 * The executors of groups in which nobody else is there: alone, for groups of one rank, and fake, for fake worlds.
 */
#include <string.h>

#include "collective/collective.h"
#include "collective/work.h"

/* For tutti_group_ran. Another thread that is at it notes its own. */
static void note(const tu_task *task) {
    tu_collective *state = task->state;
    if (!tu_collective_try_lock(state))
        return;
    state->ran = task->info;
    state->ran_by = task->executor;
    state->choice = (tu_choice){ .from = task->executor->name };
    tu_collective_unlock(state);
}

/* Works of these executors are over when they have been started. */
static tutti_status test(tutti_work *work, bool *finished) {
    *finished = tu_work_done(work);
    return TUTTI_OK;
}

/* ---- a group of one ---- */

static bool serves_one(const tutti_group *group, const tu_task *task) {
    return group->size == 1 && task->row->kind != TU_KIND_MESSAGE;
}

static tutti_status move_to_itself(tu_task *task) {
    if (task->row->in == TU_EXTENT_SPLITS && task->in_counts[0] != task->out_counts[0])
        return tu_error(TUTTI_ERROR_MISMATCH, "%s: rank 0 sends %zu element%s to itself and expects %zu",
                        task->row->name, task->in_counts[0], task->in_counts[0] == 1 ? "" : "s", task->out_counts[0]);
    tu_part part = tu_part_of(task, 0, 0, 0);
    if (part.bytes != 0)
        memmove((unsigned char *)task->out + part.out_offset, (const unsigned char *)task->in + part.in_offset,
                part.bytes);
    return TUTTI_OK;
}

static tutti_status run_alone(tu_task *task) {
    tutti_status status = TUTTI_OK;
    tu_task_record(task);
    switch (task->row->kind) {
    case TU_KIND_ROWS:
    case TU_KIND_TILES:
        status = task->custom(NULL, task);
        break;
    case TU_KIND_REDUCTION:
        if (task->info.count != 0)
            tu_reduce(task->out, &task->in, 1, task->info.count, (tutti_dtype)task->info.dtype,
                      (tutti_reduction)task->info.reduction, &task->factor, 0);
        break;
    case TU_KIND_MOVE:
        status = move_to_itself(task);
        break;
    default:
        break;
    }
    note(task);
    return status;
}

const tu_executor tu_executor_alone = {
    .name = "alone", .serves = serves_one, .run = run_alone, .start = tu_work_run_now, .test = test
};

/* ---- a fake world ---- */

static bool serves_fake(const tutti_group *group, const tu_task *task) {
    (void)task;
    return group->world->fake;
}

/* All-gather copies the input into every part of the output; every other operation leaves its output as it was. */
static tutti_status run_fake(tu_task *task) {
    note(task);
    if (!tu_gathers(task->row) || task->row->flow != TU_FLOW_ALL)
        return TUTTI_OK;
    int rank = task->group->rank, size = task->group->size;
    size_t bytes = tu_in_bytes(task, rank, size);
    for (int i = 0; i < size && bytes != 0; i++) {
        tu_part part = tu_part_of(task, rank, i, rank);
        memmove((unsigned char *)task->out + part.out_offset, task->in, part.bytes < bytes ? part.bytes : bytes);
    }
    return TUTTI_OK;
}

const tu_executor tu_executor_fake = {
    .name = "fake", .serves = serves_fake, .run = run_fake, .start = tu_work_run_now, .test = test
};
