/* SPDX-License-Identifier: Apache-2.0
 *
 * Works. A small operation is published by the thread that starts it; if everybody else has arrived already it is
 * finished on the spot, else it stays OPEN and is finished by whoever comes first: a test or a wait on it, the group's
 * next operation, or the helper. Everything else is QUEUED for the helper thread; a thread that waits, or that has a
 * blocking operation to run, takes works from the queue itself rather than stand by.
 *
 * A work is run with the state's lock held, and taken from the queue only then: so works run in order, whoever runs
 * them.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "collective/batch.h"
#include "collective/check.h"
#include "collective/device.h"
#include "collective/engine.h"
#include "collective/parts.h"
#include "collective/point.h"
#include "collective/work.h"
#include "job/liveness.h"

#define LOOK_INTERVAL (20 * TU_MILLISECOND) /* between two looks for the dead by tests of an open work */

struct tu_engine {
    tu_collective *state;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a work was queued or finished, or the thread shall end */
    pthread_t thread;
    bool running, ending, finish_open;
    _Atomic bool orphan; /* set by the helper's own thread alone */
    tutti_work *first, *last;
};

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

void tu_work_free(tutti_work *work) {
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
    atomic_store_explicit(&work->done, 1, memory_order_release); /* pairs with is_done */
}

static bool is_done(const tutti_work *work) {
    return atomic_load_explicit(&work->done, memory_order_acquire) != 0;
}

static tutti_status result(const tutti_work *work) {
    if (work->status == TUTTI_OK)
        return TUTTI_OK;
    if (work->error != NULL)
        return tu_error_restore(work->error);
    return tu_error(work->status, "%s %llu of group %s failed (there was no memory to keep its message)",
                    tu_operation_name((tu_operation)work->task.info.operation),
                    (unsigned long long)work->task.info.sequence, work->group->name);
}

/* ---- running, with the state's lock held ---- */

static bool is_orphan(const tu_engine *engine) {
    return atomic_load_explicit(&engine->orphan, memory_order_relaxed);
}

static void tell(tu_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
}

static void finish_open(tu_collective *state) {
    tutti_work *work = state->open;
    if (work == NULL)
        return;
    state->open = NULL;
    tu_task *task = &work->task;
    tu_error_copy before;
    tu_error_save(&before);
    tutti_status status = tu_one_shot_finish(state, task, (tutti_algorithm)task->info.algorithm);
    tu_work_finish(work, tu_task_leave(task, status));
    tu_error_restore(&before);
    tu_engine *engine = atomic_load_explicit(&state->engine, memory_order_acquire);
    if (engine != NULL)
        tell(engine);
    tu_work_drop(work);
}

static void run_work(tu_collective *state, tutti_work *work) {
    tu_task *task = &work->task;
    tu_error_copy before;
    tu_error_save(&before);
    tutti_status status;
    if (work->batch != NULL) {
        status = tu_batch_run(state, work->batch);
    } else {
        status = state->ready ? TUTTI_OK : tu_collective_setup(state, task);
        if (status == TUTTI_OK) {
            status = tu_task_choose(state, task);
            task->agreed = status != TUTTI_OK;
        }
        if (status == TUTTI_OK)
            status = tu_task_run(state, task);
        status = tu_task_leave(task, status);
    }
    tu_work_finish(work, status);
    tu_error_restore(&before);
}

static tutti_work *take_first(tu_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    tutti_work *work = engine->first;
    if (work != NULL) {
        engine->first = work->next;
        if (engine->first == NULL)
            engine->last = NULL;
    }
    pthread_mutex_unlock(&engine->lock);
    return work;
}

/* Dropping a work may end its group, and the state with it: on the helper's thread alone, since every other thread that
 * runs works is in a call on the group. The helper then finds itself an orphan and touches the state no more. */
static void run_queue(tu_collective *state) {
    tu_engine *engine = atomic_load_explicit(&state->engine, memory_order_acquire);
    for (tutti_work *work; engine != NULL && !is_orphan(engine) && (work = take_first(engine)) != NULL;) {
        run_work(state, work);
        tell(engine);
        tu_work_drop(work);
    }
}

void tu_engine_drain(tu_collective *state) {
    tu_engine *engine = atomic_load_explicit(&state->engine, memory_order_acquire);
    if (__builtin_expect(state->open != NULL, 0))
        finish_open(state);
    if (__builtin_expect(engine != NULL, 0) && !is_orphan(engine))
        run_queue(state);
}

static tutti_status enter(tu_task *task) {
    return tu_group_enter(task->group, task->timeout_ns, &task->info, &task->deadline, &task->ticket);
}

tutti_status tu_engine_enter(tu_collective *state, tu_task *task) {
    tu_engine *engine = atomic_load_explicit(&state->engine, memory_order_acquire);
    if (__builtin_expect(engine == NULL, 1))
        return tu_group_admit(task->group, task->timeout_ns, &task->info);
    for (;;) {
        pthread_mutex_lock(&engine->lock);
        bool empty = engine->first == NULL;
        tutti_status status = empty ? enter(task) : TUTTI_OK;
        pthread_mutex_unlock(&engine->lock);
        if (empty)
            return status;
        run_queue(state);
    }
}

/* ---- the helper ---- */

static void free_engine(tu_engine *engine) {
    pthread_mutex_destroy(&engine->lock);
    pthread_cond_destroy(&engine->changed);
    free(engine);
}

static void *help(void *argument) {
    tu_engine *engine = argument;
    tu_collective *state = engine->state;
    pthread_mutex_lock(&engine->lock);
    while (!engine->ending) {
        if (engine->first == NULL && !engine->finish_open) {
            pthread_cond_wait(&engine->changed, &engine->lock);
            continue;
        }
        engine->finish_open = false;
        pthread_mutex_unlock(&engine->lock);
        if (tu_collective_lock(state, INT64_MAX) == TUTTI_OK) {
            state->helping = true;
            tu_engine_drain(state);
            if (!is_orphan(engine)) {
                state->helping = false;
                tu_collective_unlock(state);
            }
        }
        pthread_mutex_lock(&engine->lock);
    }
    bool orphan = is_orphan(engine);
    pthread_mutex_unlock(&engine->lock);
    if (orphan)
        free_engine(engine);
    return NULL;
}

tutti_status tu_helper_start(pthread_t *thread, const char *name, void *(*body)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return tu_error_system(error,
                               "cannot start a helper thread for asynchronous works (threads of a user are limited by "
                               "RLIMIT_NPROC, and by the cgroup's pids.max)");
    pthread_setname_np(*thread, name);
    return TUTTI_OK;
}

/* Makes the engine on first need. Callers race: the loser's is freed. */
static tutti_status get_engine(tu_collective *state, tu_engine **found) {
    tu_engine *engine = atomic_load_explicit(&state->engine, memory_order_acquire);
    if (engine == NULL) {
        engine = calloc(1, sizeof *engine);
        if (engine == NULL)
            return tu_error_memory("a queue of works", sizeof *engine);
        engine->state = state;
        pthread_mutex_init(&engine->lock, NULL);
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(&engine->changed, &attributes);
        pthread_condattr_destroy(&attributes);
        tu_engine *none = NULL;
        if (!atomic_compare_exchange_strong_explicit(&state->engine, &none, engine, memory_order_acq_rel,
                                                     memory_order_acquire)) {
            free_engine(engine);
            engine = none;
        }
    }
    *found = engine;
    return TUTTI_OK;
}

/* With the engine's lock held. */
static tutti_status ensure_thread(tu_engine *engine) {
    if (engine->running)
        return TUTTI_OK;
    tutti_status status = tu_helper_start(&engine->thread, "tutti-works", help, engine);
    engine->running = status == TUTTI_OK;
    return status;
}

void tu_engine_stop(tu_engine *engine) {
    if (engine == NULL)
        return;
    pthread_mutex_lock(&engine->lock);
    engine->ending = true;
    /* The group may go with a work that the helper itself drops: then it frees the engine as its last act, and touches
     * the state no more. */
    bool running = engine->running, orphan = running && pthread_equal(engine->thread, pthread_self());
    if (orphan)
        atomic_store_explicit(&engine->orphan, true, memory_order_relaxed);
    pthread_t thread = engine->thread;
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
    if (orphan) {
        pthread_detach(thread);
        return;
    }
    if (running)
        pthread_join(thread, NULL);
    free_engine(engine);
}

/* ---- starting ---- */

/* Publishes the operation without waiting, when that is possible. Sets *started; an error is the call's. */
static tutti_status try_at_once(tu_collective *state, tutti_work *work, bool *started) {
    *started = false;
    if (work->batch != NULL || work->task.custom != NULL || !state->ready)
        return TUTTI_OK;
    tu_task *task = &work->task;
    tu_engine *engine = atomic_load_explicit(&state->engine, memory_order_acquire);
    if (state->open != NULL && tu_epoch_complete(state, state->open->task.open_epoch))
        finish_open(state);
    if (state->open != NULL)
        return TUTTI_OK;
    tutti_status status = tu_task_choose(state, task);
    if (status != TUTTI_OK || !tu_one_shot_can_start(state, task, (tutti_algorithm)task->info.algorithm))
        return status;
    if (engine != NULL) {
        pthread_mutex_lock(&engine->lock);
        bool empty = engine->first == NULL;
        status = empty ? enter(task) : TUTTI_OK;
        pthread_mutex_unlock(&engine->lock);
        if (!empty)
            return TUTTI_OK;
    } else {
        status = enter(task);
    }
    if (status != TUTTI_OK)
        return status;
    *started = true;
    task->entered = true;
    state->ran = task->info;
    status = tu_one_shot_start(state, task, (tutti_algorithm)task->info.algorithm);
    if (status != TUTTI_OK) {
        tu_work_finish(work, tu_task_leave(task, status));
        return TUTTI_OK;
    }
    state->open = tu_work_hold(work);
    if (tu_epoch_complete(state, task->open_epoch))
        finish_open(state);
    return TUTTI_OK;
}

static tutti_status enqueue(tu_collective *state, tutti_work *work) {
    tu_engine *engine;
    tutti_status status = get_engine(state, &engine);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&engine->lock);
    status = ensure_thread(engine);
    if (status == TUTTI_OK && work->batch == NULL)
        status = enter(&work->task);
    if (status == TUTTI_OK) {
        tu_work_hold(work);
        if (engine->last != NULL)
            engine->last->next = work;
        else
            engine->first = work;
        engine->last = work;
        pthread_cond_broadcast(&engine->changed);
    }
    pthread_mutex_unlock(&engine->lock);
    return status;
}

static tutti_status start(tutti_work *work) {
    tutti_group *group = work->group;
    bool point = work->task.info.operation == TU_OPERATION_SEND || work->task.info.operation == TU_OPERATION_RECV;
    if (group->world->fake || (group->size == 1 && !point)) {
        tu_error_copy before;
        tu_error_save(&before);
        tutti_status status = work->batch != NULL ? tu_batch_run(NULL, work->batch) : tu_task_run_alone(&work->task);
        tu_work_finish(work, status);
        tu_error_restore(&before);
        return TUTTI_OK;
    }
    tutti_status status = tu_check_local(group, &work->task);
    tu_collective *state = NULL;
    if (status == TUTTI_OK)
        status = tu_collective_get(group, &state);
    if (status != TUTTI_OK)
        return status;
    work->state = state;
    if (point)
        return tu_point_start(state, work);
    bool started = false;
    if (tu_collective_try_lock(state)) {
        status = try_at_once(state, work, &started);
        tu_collective_unlock(state);
    }
    return status != TUTTI_OK || started ? status : enqueue(state, work);
}

tutti_status tu_work_start_made(tutti_work *work, tutti_work **result_pointer) {
    tutti_status status = start(work);
    if (status == TU_FAULT_SKIP) { /* skipped on purpose: done, and never begun */
        tu_work_finish(work, status);
        status = TUTTI_OK;
    }
    if (status != TUTTI_OK) {
        tu_work_free(work);
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

/* ---- the public side ---- */

static bool is_open(tu_collective *state, const tutti_work *work) {
    return state->open == work;
}

/* Whether a member has died, or one that this rank still waits for has closed its world. */
static bool lost_somebody(tu_collective *state, const tu_task *task) {
    const tutti_group *group = state->group;
    for (int member = 0; member < state->size; member++) {
        if (member == state->rank)
            continue;
        tu_rank_state its_state = tu_rank_probe(group->world->job, group->job_ranks[member]);
        if (its_state == TU_RANK_DEAD)
            return true;
        if (its_state == TU_RANK_CLOSED && tu_listens(task, state->rank, member) &&
            !tu_epoch_reached(state, task->open_epoch, member))
            return true;
    }
    return false;
}

/* Whether an open work can be finished, well or not, without waiting. While it is only tested, nobody else looks at its
 * deadline and at who lives. */
static bool can_finish(tu_collective *state, const tu_task *task) {
    if (tu_epoch_complete(state, task->open_epoch) || tu_group_ended(state->group))
        return true;
    int64_t now = tu_clock_now();
    if (now >= task->deadline)
        return true;
    if (now < state->next_look)
        return false;
    state->next_look = now + LOOK_INTERVAL;
    return lost_somebody(state, task);
}

tutti_status tutti_work_test(tutti_work *work, bool *finished) {
    if (work == NULL || finished == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_work_test needs a work and a place for the result");
    if (!is_done(work) && work->event != NULL)
        return tu_device_work_test(work, finished);
    if (!is_done(work) && work->request != NULL)
        tu_points_poll(work->state);
    else if (!is_done(work) && work->state != NULL && tu_collective_try_lock(work->state)) {
        if (is_open(work->state, work) && can_finish(work->state, &work->task))
            finish_open(work->state);
        tu_collective_unlock(work->state);
    }
    *finished = is_done(work);
    return TUTTI_OK;
}

static tutti_status too_late(const tutti_work *work, int64_t timeout) {
    tu_error(TUTTI_ERROR_TIMEOUT, "Operation timed out! Waited %.3f s for %s %llu of group %s; it goes on",
             (double)timeout / 1e9, tu_operation_name((tu_operation)work->task.info.operation),
             (unsigned long long)work->task.info.sequence, work->group->name);
    return tu_error_where(work->group->name, tu_operation_name((tu_operation)work->task.info.operation),
                          work->task.info.sequence, work->group->rank);
}

typedef struct open_wait {
    tu_collective *state;
    tutti_work *work;
} open_wait;

static bool open_missing(void *argument, int member) {
    const open_wait *wait = argument;
    return !tu_epoch_reached(wait->state, wait->work->task.open_epoch, member);
}

static bool open_ready(void *argument) {
    const open_wait *wait = argument;
    return tu_epoch_complete(wait->state, wait->work->task.open_epoch);
}

/* Finishes an open work on this thread, unless the wait's own deadline comes first. With the lock held. */
static tutti_status finish_by(tu_collective *state, tutti_work *work, int64_t deadline) {
    if (deadline < work->task.deadline) {
        open_wait awaited = { state, work };
        tu_group_wait wait;
        tu_group_wait_init(&wait, state->group, &work->task.info, work->task.ticket, deadline, open_missing, &awaited);
        /* Whatever else ends this wait is found, and told, when the work is finished. */
        if (tu_wait_until(&wait.wait, open_ready, &awaited) == TUTTI_ERROR_TIMEOUT)
            return TUTTI_ERROR_TIMEOUT;
    }
    finish_open(state);
    return TUTTI_OK;
}

/* Waits for the helper, or for another thread that runs works. */
static bool stand_by(tutti_work *work, int64_t deadline) {
    tu_engine *engine = atomic_load_explicit(&work->state->engine, memory_order_acquire);
    int64_t until = tu_clock_now() + 20 * TU_MILLISECOND;
    until = until < deadline ? until : deadline;
    struct timespec time = { .tv_sec = until / TU_SECOND, .tv_nsec = until % TU_SECOND };
    pthread_mutex_lock(&engine->lock);
    while (!is_done(work) && pthread_cond_timedwait(&engine->changed, &engine->lock, &time) == 0)
        ;
    pthread_mutex_unlock(&engine->lock);
    return is_done(work);
}

static tutti_status wait_collective(tutti_work *work, int64_t timeout) {
    tu_collective *state = work->state;
    int64_t deadline = tu_deadline(timeout);
    while (!is_done(work)) {
        if (tu_collective_try_lock(state)) {
            tutti_status status = TUTTI_OK;
            if (is_open(state, work))
                status = finish_by(state, work, deadline);
            else if (!is_done(work) && deadline >= work->task.deadline)
                tu_engine_drain(state);
            tu_collective_unlock(state);
            if (status == TUTTI_ERROR_TIMEOUT)
                return too_late(work, timeout);
            if (is_done(work))
                break;
        }
        if (atomic_load_explicit(&state->engine, memory_order_acquire) != NULL)
            (void)stand_by(work, deadline);
        else
            sched_yield();
        if (!is_done(work) && tu_clock_now() >= deadline)
            return too_late(work, timeout);
    }
    return result(work);
}

/* Looks now and then: a host that sits in the driver could see neither deadline nor death. */
static tutti_status wait_device(tutti_work *work, int64_t timeout) {
    int64_t deadline = tu_deadline(timeout), pause = 1000;
    for (;;) {
        bool finished;
        tutti_status status = tu_device_work_test(work, &finished);
        if (status != TUTTI_OK || finished)
            return status != TUTTI_OK ? status : result(work);
        if (tu_clock_now() >= deadline)
            return too_late(work, timeout);
        if (atomic_load_explicit(&work->group->world->interrupt, memory_order_relaxed) != 0)
            return tu_error(TUTTI_ERROR_INTERRUPTED, "a wait for %s was interrupted by tutti_world_interrupt",
                            tu_operation_name((tu_operation)work->task.info.operation));
        struct timespec time = { .tv_nsec = pause };
        nanosleep(&time, NULL);
        if (pause < TU_MILLISECOND)
            pause *= 2;
    }
}

tutti_status tutti_work_wait(tutti_work *work, int64_t timeout_ns) {
    if (work == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_work_wait: the work is NULL");
    if (is_done(work))
        return result(work);
    int64_t timeout;
    tutti_status status =
        tu_timeout_choose("timeout_ns", timeout_ns, work->group->timeout_ns, work->group->world->timeout_ns, &timeout);
    if (status != TUTTI_OK)
        return status;
    if (work->event != NULL)
        return wait_device(work, timeout);
    if (work->request == NULL)
        return wait_collective(work, timeout);
    status = tu_points_wait(work->state, work, tu_deadline(timeout));
    if (status == TUTTI_ERROR_TIMEOUT && !is_done(work))
        return too_late(work, timeout);
    return is_done(work) ? result(work) : status;
}

uint64_t tutti_work_sequence(const tutti_work *work) {
    return work != NULL ? work->task.info.sequence : 0;
}

/* An open work that nobody will wait for is left to the helper. */
static void leave_to_helper(tutti_work *work) {
    tu_engine *engine;
    if (get_engine(work->state, &engine) != TUTTI_OK)
        return; /* the group's next operation finishes it */
    pthread_mutex_lock(&engine->lock);
    if (ensure_thread(engine) == TUTTI_OK) {
        engine->finish_open = true;
        pthread_cond_broadcast(&engine->changed);
    }
    pthread_mutex_unlock(&engine->lock);
}

void tutti_work_release(tutti_work *work) {
    if (work == NULL || atomic_fetch_sub_explicit(&work->users, 1, memory_order_acq_rel) != 1)
        return;
    bool nobody_runs_it = work->event != NULL;
    if (nobody_runs_it)
        tu_device_work_end(work);
    else if (!is_done(work) && work->state != NULL && work->request == NULL)
        leave_to_helper(work);
    uint32_t before = atomic_fetch_or_explicit(&work->ends, TU_WORK_RELEASED, memory_order_acq_rel);
    if (nobody_runs_it || (before & TU_WORK_DONE) != 0)
        let_go(work);
    drop_memory(work);
}
