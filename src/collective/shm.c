/* SPDX-License-Identifier: Apache-2.0
 *
 * The executor shm: collectives and messages of ranks that share the memory of a host.
 */
#include <stdlib.h>
#include <string.h>

#include "collective/collective.h"
#include "collective/message.h"
#include "collective/works.h"

static bool serves(const tutti_group *group, const tu_task *task) {
    (void)task;
    return group->local;
}

static tutti_status check(tu_task *task) {
    bool open = task->forced == TUTTI_ALGORITHM_AUTO && task->state->forced[task->row->form] == TUTTI_ALGORITHM_AUTO;
    return __builtin_expect(open, 1) || task->row->kind == TU_KIND_MESSAGE ? TUTTI_OK
                                                                           : tu_choose_check(task->state, task);
}

/* The group's first collective exchanges the pieces of shared memory. Messages need none, and must not look: they do
 * not take turns with it. */
static tutti_status prepare(tu_task *task) {
    if (task->row->kind == TU_KIND_MESSAGE)
        return TUTTI_OK;
    task->outer = task->state->outer;
    if (__builtin_expect(task->state->ready, 1))
        return TUTTI_OK;
    return tu_collective_setup(task->state, task);
}

/* ---- running ---- */

void tu_shm_choose(tu_task *task) {
    tu_collective *state = task->state;
    tu_choose(state, task, &state->choice);
    task->info.algorithm = (uint8_t)state->choice.algorithm;
    task->signature = tu_signature(task);
    if (__builtin_expect(task->outer != NULL, 0)) /* the same part of another call, or of the next one, is another */
        task->signature = tu_mix(tu_mix(task->signature, tu_signature(task->outer)), task->outer->info.sequence);
    if (__builtin_expect(task->ticket != 0, 0)) { /* it was recorded before its algorithm was known */
        const tutti_world *world = task->group->world;
        tu_record_algorithm(tu_job_recorder(world->job, world->local_rank), task->ticket, task->info.algorithm);
    }
}

static tutti_status run_algorithm(tu_collective *state, tu_task *task) {
    tutti_algorithm algorithm = (tutti_algorithm)task->info.algorithm;
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

/* Parts that move to places of other sizes in the same buffer: no order of copies is right, so they start from a
 * copy. */
static tutti_status run_from_copy(tu_collective *state, tu_task *task) {
    size_t bytes = tu_in_bytes(task, state->rank, state->size);
    void *copy = malloc(bytes);
    if (copy == NULL)
        return tu_error_memory("a collective in place", bytes);
    task->in = memcpy(copy, task->in, bytes);
    tutti_status status = run_algorithm(state, task);
    free(copy);
    return status;
}

static tutti_status run(tu_task *task) {
    tu_collective *state = task->state;
    if (__builtin_expect(task->row->kind == TU_KIND_MESSAGE, 0))
        return tu_message_run(task);
    tu_shm_choose(task);
    tu_shm_note(state, task->executor, &task->info);
    if (task->custom != NULL)
        return task->custom(state, task);
    if (task->row->in_place == TU_IN_PLACE_COPIES && task->in == task->out && task->in != NULL)
        return run_from_copy(state, task);
    return run_algorithm(state, task);
}

/* ---- works ---- */

static tutti_status start(tutti_work *work) {
    return work->task.row->kind == TU_KIND_MESSAGE ? tu_message_start(work) : tu_works_start(work);
}

static tutti_status test(tutti_work *work, bool *finished) {
    if (work->request != NULL)
        tu_messages_poll(work->task.state);
    else
        tu_works_test(work);
    *finished = tu_work_done(work);
    return TUTTI_OK;
}

static tutti_status wait(tutti_work *work, int64_t deadline) {
    return work->request != NULL ? tu_messages_wait(work, deadline) : tu_works_wait(work, deadline);
}

static void release(tutti_work *work) {
    if (work->request == NULL)
        tu_works_adopt(work);
}

const tu_executor tu_executor_shm = { .name = "shm",
                                      .takes_turns = true,
                                      .serves = serves,
                                      .check = check,
                                      .prepare = prepare,
                                      .run = run,
                                      .start = start,
                                      .test = test,
                                      .wait = wait,
                                      .release = release };
