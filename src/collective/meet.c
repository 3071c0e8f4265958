/* SPDX-License-Identifier: Apache-2.0
 *
 * Meeting on the host before a task is given to a library that cannot be trusted with a mistake: one that hangs when a
 * rank does not come, or writes where it should not when counts differ. After the meeting all members have come to the
 * task and call the same. Deadlines, deaths and mismatches are told as in any collective of the host's.
 */
#include <stdlib.h>

#include "collective/hosts.h"

/* ---- on one host: a hand-over without data ---- */

/* What this rank sends to each, and what it expects from each. */
static void tell_splits(const tu_collective *state, const tu_task *task, uint64_t epoch) {
    uint64_t(*splits)[2] = tu_splits(state, state->rank, epoch);
    for (int i = 0; i < state->size; i++) {
        splits[i][0] = task->in_counts[i];
        splits[i][1] = task->out_counts[i];
    }
}

/* Every pair, so that all members find the same, and nobody goes on alone. */
static tutti_status compare_splits(tu_collective *state, tu_task *task, uint64_t epoch) {
    for (int from = 0; from < state->size; from++) {
        for (int to = 0; to < state->size; to++) {
            uint64_t sent = tu_splits(state, from, epoch)[to][0], expected = tu_splits(state, to, epoch)[from][1];
            if (sent != expected)
                return tu_mismatch_split(state, task, from, to, sent, expected);
        }
    }
    return TUTTI_OK;
}

static tutti_status meet_here(tu_task *task) {
    tu_collective *state = task->state;
    bool splits = task->row->in == TU_EXTENT_SPLITS;
    uint64_t epoch;
    tutti_status status = tu_collective_setup(state, task);
    task->signature = tu_signature(task);
    if (status == TUTTI_OK)
        status = tu_epoch_enter(state, task, &epoch);
    if (status != TUTTI_OK)
        return status;
    if (splits)
        tell_splits(state, task, epoch);
    tu_epoch_arrive(state, task, epoch);
    status = tu_epoch_await_all(state, task, epoch);
    return status == TUTTI_OK && splits ? compare_splits(state, task, epoch) : status;
}

/* ---- between hosts: another operation in its place, which says that it is this one ---- */

/* Everybody tells everybody how much it sends. */
static tutti_status exchange_splits(tu_task *task, tu_task *shadow) {
    size_t size = (size_t)task->group->size;
    uint64_t *told = malloc(2 * size * sizeof *told);
    if (told == NULL)
        return tu_error_memory("the splits of a collective", 2 * size * sizeof *told);
    uint64_t *heard = told + size;
    for (size_t i = 0; i < size; i++)
        told[i] = task->in_counts[i];
    shadow->row = &tu_operations[TU_OPERATION_ALL_TO_ALL];
    shadow->in = told;
    shadow->out = heard;
    shadow->element = sizeof *told;
    shadow->info.count = 1;
    tutti_status status = shadow->executor->run(shadow);
    for (int source = 0; status == TUTTI_OK && source < task->group->size; source++)
        if (heard[source] != task->out_counts[source])
            status = tu_mismatch_split(task->state, task, source, task->group->rank, heard[source],
                                       task->out_counts[source]);
    free(told);
    return status;
}

static tutti_status meet_there(tu_task *task) {
    tu_task shadow = *task;
    shadow.executor = &tu_executor_hosts;
    shadow.custom = NULL;
    tutti_status status = shadow.executor->prepare(&shadow);
    if (status == TUTTI_OK && task->row->in == TU_EXTENT_SPLITS) {
        status = exchange_splits(task, &shadow);
    } else if (status == TUTTI_OK) {
        shadow.row = &tu_operations[TU_OPERATION_BARRIER];
        status = shadow.executor->run(&shadow);
    }
    task->ticket = shadow.ticket;
    task->ended = shadow.ended;
    return status;
}

tutti_status tu_task_meet(tu_task *task) {
    if (task->met || task->group->size == 1)
        return TUTTI_OK;
    tu_task_record(task);
    tutti_status status = task->group->local ? meet_here(task) : meet_there(task);
    task->met = status == TUTTI_OK;
    return status;
}
