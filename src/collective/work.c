/* SPDX-License-Identifier: Apache-2.0
 *
 * A work: an operation that was started. What it is, who holds it, and the public calls; how it runs is its executor's
 * business.
 *
 * The program's references are counted apart from the runner's: the group is let go when the work is over and released,
 * the memory when nobody refers to it.
 */
#include "collective/work.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "collective/batch.h"

/* ---- one work ---- */

tutti_work *tutti_work_keep(tutti_work *work) {
    if (work != NULL)
        atomic_fetch_add_explicit(&work->users, 1, memory_order_relaxed);
    return work;
}

tutti_work *tu_work_hold(tutti_work *work) {
    atomic_fetch_add_explicit(&work->references, 1, memory_order_relaxed);
    return work;
}

/* Over and released: the world may be closed now. Once, by whoever came second. */
static void let_go(tutti_work *work) {
    tutti_group *group = work->group;
    tu_batch_free(work->batch);
    work->batch = NULL;
    tu_world_handle(group->world, "work", -1);
    tutti_group_release(group);
}

static void drop_memory(tutti_work *work) {
    if (atomic_fetch_sub_explicit(&work->references, 1, memory_order_acq_rel) != 1)
        return;
    free(work->arrays);
    free(work->error);
    free(work->request);
    free(work);
}

void tu_work_drop(tutti_work *work) {
    if (work->last)
        let_go(work);
    drop_memory(work);
}

/* Copies the arrays that the caller may take back after the call. */
static tutti_status copy_arrays(tutti_work *work, int size) {
    tu_task *task = &work->task;
    const size_t **lists[] = { &task->in_counts, &task->in_offsets, &task->out_counts, &task->out_offsets };
    if (task->tiles.count != 0) {
        size_t list_bytes = task->tiles.count * sizeof *task->tiles.list;
        work->arrays = malloc(list_bytes);
        if (work->arrays == NULL)
            return tu_error_memory("the tiles of a work", list_bytes);
        task->tiles.list = memcpy(work->arrays, task->tiles.list, list_bytes);
    }
    if (task->in_counts == NULL && task->to == NULL)
        return TUTTI_OK;
    size_t bytes = (size_t)size * sizeof(size_t);
    size_t *copy = malloc(5 * bytes);
    if (copy == NULL)
        return tu_error_memory("the counts of a work", 5 * bytes);
    work->arrays = copy;
    for (size_t i = 0; i < 4; i++) {
        if (*lists[i] != NULL)
            *lists[i] = memcpy(copy + i * (size_t)size, *lists[i], bytes);
    }
    if (task->to != NULL)
        task->to = memcpy(copy + 4 * (size_t)size, task->to, (size_t)size * sizeof(int));
    return TUTTI_OK;
}

tutti_status tu_work_make(const tu_task *task, tutti_work **made) {
    tutti_work *work = calloc(1, sizeof *work);
    if (work == NULL)
        return tu_error_memory("a work", sizeof *work);
    atomic_init(&work->users, 1);
    atomic_init(&work->references, 1);
    work->task = *task;
    tutti_status status = copy_arrays(work, task->group->size);
    if (status != TUTTI_OK) {
        free(work);
        return status;
    }
    work->group = tutti_group_keep(task->group);
    tu_world_handle(work->group->world, "work", 1);
    *made = work;
    return TUTTI_OK;
}

/* Of one that could not be started. */
static void work_free(tutti_work *work) {
    let_go(work);
    drop_memory(work);
}

/* Keeps the error of the thread that ran it, for the thread that will wait. */
void tu_work_finish(tutti_work *work, tutti_status status) {
    status = tu_not_entered(status);
    work->status = status;
    if (status != TUTTI_OK) {
        work->error = malloc(sizeof *work->error);
        if (work->error != NULL)
            tu_error_save(work->error);
    }
    /* Before the flag, so that a user who sees the work done finds that it may let go of the group. */
    uint32_t before = atomic_fetch_or_explicit(&work->ends, TU_WORK_DONE, memory_order_acq_rel);
    work->last = (before & TU_WORK_RELEASED) != 0;
    atomic_store_explicit(&work->done, 1, memory_order_release); /* pairs with tu_work_done */
}

static tutti_status result(const tutti_work *work) {
    if (work->status == TUTTI_OK)
        return TUTTI_OK;
    if (work->error != NULL)
        return tu_error_restore(work->error);
    return tu_error(work->status, "%s %llu of group %s failed (there was no memory to keep its message)",
                    work->task.row->name, (unsigned long long)work->task.info.sequence, work->group->name);
}

/* ---- starting ---- */

tutti_status tu_work_start_made(tutti_work *work, tutti_work **result_pointer) {
    tutti_status status = work->task.executor->start(work);
    if (status == TU_FAULT_SKIP) { /* skipped on purpose: done, and never begun */
        tu_work_finish(work, status);
        status = TUTTI_OK;
    }
    if (status != TUTTI_OK) {
        work_free(work);
        return status;
    }
    *result_pointer = work;
    return TUTTI_OK;
}

tutti_status tu_work_start(tu_task *task, tutti_work **result_pointer) {
    tutti_work *work;
    tutti_status status = tu_work_make(task, &work);
    return status == TUTTI_OK ? tu_work_start_made(work, result_pointer) : status;
}

tutti_status tu_work_run_now(tutti_work *work) {
    tutti_error_copy before;
    tu_error_save(&before);
    tu_work_finish(work, work->batch != NULL ? tu_batch_run(work->batch) : tu_task_run(&work->task));
    tu_error_restore(&before);
    return TUTTI_OK;
}

/* ---- the public calls ---- */

/* A forked child has none of the threads that would end a work. */
static tutti_status check_process(const tutti_work *work) {
    const tutti_world *world = work->group->world;
    return tu_world_forked(world) ? tu_world_check(world) : TUTTI_OK;
}

tutti_status tutti_work_test(tutti_work *work, bool *finished) {
    if (work == NULL || finished == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_work_test needs a work and a place for the result");
    bool done = tu_work_done(work);
    tutti_status status = done ? TUTTI_OK : check_process(work);
    if (status != TUTTI_OK)
        return status;
    *finished = done;
    return done ? TUTTI_OK : work->task.executor->test(work, finished);
}

static tutti_status too_late(const tutti_work *work, int64_t timeout) {
    const char *name = work->task.row->name;
    tu_error(TUTTI_ERROR_TIMEOUT, "Operation timed out! Waited %.3f s for %s %llu of group %s; it goes on",
             (double)timeout / 1e9, name, (unsigned long long)work->task.info.sequence, work->group->name);
    return tu_error_where(work->group->name, name, work->task.info.sequence, work->group->rank);
}

/* Looks now and then: a host that sits in a driver could see neither deadline nor death. */
static tutti_status wait_by_testing(tutti_work *work, int64_t deadline) {
    const tutti_world *world = work->group->world;
    for (int64_t pause = 1000;; pause = pause < TU_MILLISECOND ? pause * 2 : pause) {
        bool finished;
        tutti_status status = work->task.executor->test(work, &finished);
        if (status != TUTTI_OK || finished)
            return status;
        if (tu_clock_now() >= deadline)
            return TUTTI_ERROR_TIMEOUT;
        if (atomic_load_explicit(&world->interrupt, memory_order_relaxed) != 0)
            return tu_error(TUTTI_ERROR_INTERRUPTED, "a wait for %s was interrupted by tutti_world_interrupt",
                            work->task.row->name);
        struct timespec time = { .tv_nsec = pause };
        nanosleep(&time, NULL);
    }
}

tutti_status tutti_work_wait(tutti_work *work, int64_t timeout_ns) {
    if (work == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_work_wait: the work is NULL");
    if (tu_work_done(work))
        return result(work);
    tutti_status status = check_process(work);
    if (status != TUTTI_OK)
        return status;
    int64_t timeout;
    status = tu_timeout_choose("tutti_work_wait", timeout_ns, work->group->timeout_ns, work->group->world->timeout_ns,
                               &timeout);
    if (status != TUTTI_OK)
        return status;
    const tu_executor *executor = work->task.executor;
    /* Without a time of its own the wait lasts as long as the work, which has a deadline and knows who is missing. */
    int64_t deadline = timeout_ns == 0 && executor->wait != NULL ? INT64_MAX : tu_deadline(timeout);
    status = (executor->wait != NULL ? executor->wait : wait_by_testing)(work, deadline);
    if (tu_work_done(work))
        return result(work);
    return status == TUTTI_ERROR_TIMEOUT ? too_late(work, timeout) : status;
}

tutti_status tutti_work_join(tutti_work *work, void *stream) {
    if (work == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_work_join: the work is NULL");
    const tu_executor *executor = work->task.executor;
    if (tu_work_done(work) || executor->join == NULL)
        return tutti_work_wait(work, 0);
    tutti_status status = check_process(work);
    return status != TUTTI_OK ? status : executor->join(work, stream);
}

uint64_t tutti_work_sequence(const tutti_work *work) {
    return work != NULL ? work->task.info.sequence : 0;
}

void tutti_work_release(tutti_work *work) {
    if (work == NULL || tu_world_forked(work->group->world) ||
        atomic_fetch_sub_explicit(&work->users, 1, memory_order_acq_rel) != 1)
        return;
    const tu_executor *executor = work->task.executor;
    if (executor->release != NULL)
        executor->release(work);
    uint32_t before = atomic_fetch_or_explicit(&work->ends, TU_WORK_RELEASED, memory_order_acq_rel);
    if (executor->enqueues || (before & TU_WORK_DONE) != 0)
        let_go(work);
    drop_memory(work);
}
