/* SPDX-License-Identifier: Apache-2.0
 *
 * Works of an executor that takes turns. A small operation is published by the thread that starts it; if everybody else
 * has arrived already it is finished on the spot, else it stays OPEN and is finished by whoever comes first: a test or
 * a wait on it, the group's next operation, or the helper. Everything else is QUEUED for the helper thread; a thread
 * that waits, or that has a blocking operation to run, takes works from the queue itself rather than stand by.
 *
 * A work is run in the group's turn (with the state's lock held), and taken from the queue only then: so works run in
 * order, whoever runs them. It gets its number when it is started, so numbers too are in the order of the calls.
 */
#include "collective/works.h"
#include "base/thread.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "collective/arrival.h"
#include "collective/batch.h"
#include "collective/parts.h"
#include "collective/work.h"
#include "job/liveness.h"

#define LOOK_INTERVAL (20 * TU_MILLISECOND) /* between two looks for the dead by tests of an open work */

struct tu_works {
    tu_collective *state;
    pthread_mutex_t lock;
    pthread_cond_t wanted; /* the helper has something to do, or shall end: it alone waits for that */
    pthread_cond_t
        finished; /* a work was; apart from the above, so that no work wakes a helper that has nothing to do */
    pthread_t thread;
    bool running, ending, finish_open;
    _Atomic bool orphan; /* set by the helper's own thread alone */
    tutti_work *first, *last;
};

/* ---- running, with the state's lock held ---- */

static bool is_orphan(const tu_works *works) {
    return atomic_load_explicit(&works->orphan, memory_order_relaxed);
}

static void tell(tu_works *works) {
    pthread_mutex_lock(&works->lock);
    pthread_cond_broadcast(&works->finished);
    pthread_mutex_unlock(&works->lock);
}

static void finish_open(tu_collective *state) {
    tutti_work *work = state->open;
    if (work == NULL)
        return;
    state->open = NULL;
    tu_task *task = &work->task;
    tutti_error_copy before;
    tu_error_save(&before);
    tutti_status status = tu_one_shot_finish(state, task, (tutti_algorithm)task->info.algorithm);
    tu_work_finish(work, tu_task_leave(task, status));
    tu_error_restore(&before);
    tu_works *works = atomic_load_explicit(&state->works, memory_order_acquire);
    if (works != NULL)
        tell(works);
    tu_work_drop(work);
}

static void run_work(tutti_work *work) {
    tutti_error_copy before;
    tu_error_save(&before);
    tu_work_finish(work, work->batch != NULL ? tu_batch_run_in_turn(work->batch) : tu_task_run_in_turn(&work->task));
    tu_error_restore(&before);
}

static tutti_work *take_first(tu_works *works) {
    pthread_mutex_lock(&works->lock);
    tutti_work *work = works->first;
    if (work != NULL) {
        works->first = work->next;
        if (works->first == NULL)
            works->last = NULL;
    }
    pthread_mutex_unlock(&works->lock);
    return work;
}

/* Dropping a work may end its group, and the state with it: on the helper's thread alone, since every other thread that
 * runs works is in a call on the group. The helper then finds itself an orphan and touches the state no more. The queue
 * is run to its end, or until that work is done, where one is named: whoever waits for a work has better things to do
 * than what was started behind it, and the helper, which was woken up for all of them, is there for that. */
static void run_queue(tu_collective *state, const tutti_work *until) {
    tu_works *works = atomic_load_explicit(&state->works, memory_order_acquire);
    for (tutti_work *work; works != NULL && !is_orphan(works) && !(until != NULL && tu_work_done(until)) &&
                           (work = take_first(works)) != NULL;) {
        run_work(work);
        tell(works);
        tu_work_drop(work);
    }
}

/* Finishes the open work and runs the queue, as above. */
static void run_all(tu_collective *state, const tutti_work *until) {
    tu_works *works = atomic_load_explicit(&state->works, memory_order_acquire);
    finish_open(state);
    if (works != NULL && !is_orphan(works))
        run_queue(state, until);
}

tu_works *tu_works_drain_slowly(tu_collective *state) {
    run_all(state, NULL);
    tu_works *works = atomic_load_explicit(&state->works, memory_order_acquire);
    for (; works != NULL; run_queue(state, NULL)) {
        pthread_mutex_lock(&works->lock);
        if (works->first == NULL)
            break;
        pthread_mutex_unlock(&works->lock);
    }
    return works;
}

void tu_works_resume(tu_works *works) {
    if (__builtin_expect(works != NULL, 0))
        pthread_mutex_unlock(&works->lock);
}

/* ---- the helper ---- */

static void free_works(tu_works *works) {
    pthread_mutex_destroy(&works->lock);
    pthread_cond_destroy(&works->wanted);
    pthread_cond_destroy(&works->finished);
    free(works);
}

_Thread_local bool tu_on_helper;

static void *help(void *argument) {
    tu_works *works = argument;
    tu_on_helper = true;
    tu_collective *state = works->state;
    pthread_mutex_lock(&works->lock);
    while (!works->ending) {
        if (works->first == NULL && !works->finish_open) {
            pthread_cond_wait(&works->wanted, &works->lock);
            continue;
        }
        works->finish_open = false;
        pthread_mutex_unlock(&works->lock);
        if (tu_collective_lock(state, INT64_MAX) == TUTTI_OK) {
            state->helping = true;
            run_all(state, NULL);
            if (!is_orphan(works)) {
                state->helping = false;
                tu_collective_unlock(state);
            }
        }
        pthread_mutex_lock(&works->lock);
    }
    bool orphan = is_orphan(works);
    pthread_mutex_unlock(&works->lock);
    if (orphan)
        free_works(works);
    return NULL;
}

tutti_status tu_helper_start(pthread_t *thread, const char *name, void *(*body)(void *), void *argument) {
    int error = tu_thread_start(name, body, argument, thread);
    if (error == 0)
        return TUTTI_OK;
    return tu_error_system(error,
                           "cannot start a helper thread for asynchronous works (threads of a user are limited by "
                           "RLIMIT_NPROC, and by the cgroup's pids.max)");
}

/* Makes the works on first need. Callers race: the loser's is freed. */
/* Before an operation of another kind: the queue's works may exchange records with the members when they run, and must
 * have done so on every rank. */
static tutti_status settle(tutti_group *group, int64_t timeout_ns) {
    tu_collective *state;
    tutti_status status = tu_collective_get(group, &state);
    if (status == TUTTI_OK)
        status = tu_turn_take(state, timeout_ns);
    if (status != TUTTI_OK)
        return status;
    tutti_error_copy before;
    tu_error_save(&before);
    tu_works_resume(tu_works_drain(state));
    tu_error_restore(&before);
    tu_collective_unlock(state);
    return TUTTI_OK;
}

static tutti_status get_works(tu_collective *state, tu_works **found) {
    tu_works *works = atomic_load_explicit(&state->works, memory_order_acquire);
    if (works == NULL) {
        works = calloc(1, sizeof *works);
        if (works == NULL)
            return tu_error_memory("a queue of works", sizeof *works);
        works->state = state;
        pthread_mutex_init(&works->lock, NULL);
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(&works->wanted, NULL);
        pthread_cond_init(&works->finished, &attributes);
        pthread_condattr_destroy(&attributes);
        tu_works *none = NULL;
        if (!atomic_compare_exchange_strong_explicit(&state->works, &none, works, memory_order_acq_rel,
                                                     memory_order_acquire)) {
            free_works(works);
            works = none;
        }
        atomic_store_explicit(&state->group->settle, settle, memory_order_release); /* pairs with tu_group_enter */
    }
    *found = works;
    return TUTTI_OK;
}

/* With the works's lock held. */
static tutti_status ensure_thread(tu_works *works) {
    if (works->running)
        return TUTTI_OK;
    tutti_status status = tu_helper_start(&works->thread, "tutti-works", help, works);
    works->running = status == TUTTI_OK;
    return status;
}

void tu_works_stop(tu_works *works) {
    if (works == NULL)
        return;
    pthread_mutex_lock(&works->lock);
    works->ending = true;
    /* The group may go with a work that the helper itself drops: then it frees the works as its last act, and touches
     * the state no more. */
    bool running = works->running, orphan = running && pthread_equal(works->thread, pthread_self());
    if (orphan)
        atomic_store_explicit(&works->orphan, true, memory_order_relaxed);
    pthread_t thread = works->thread;
    pthread_cond_signal(&works->wanted);
    pthread_mutex_unlock(&works->lock);
    if (orphan) {
        pthread_detach(thread);
        return;
    }
    if (running)
        pthread_join(thread, NULL);
    free_works(works);
}

/* ---- starting ---- */

/* Gives the work its number, its record and its deadline. With the lock of the works held, where there are any. */
static tutti_status enter(tutti_work *work) {
    if (work->batch != NULL)
        return tu_batch_enter(work->batch);
    tu_task *task = &work->task;
    tutti_status status = tu_task_enter(task);
    if (status == TUTTI_OK) {
        (void)tu_task_deadline(task);
        tu_task_record(task);
    }
    return status;
}

/* Enters the work unless others are queued before it. */
static tutti_status enter_if_first(tu_works *works, tutti_work *work, bool *entered) {
    if (works != NULL)
        pthread_mutex_lock(&works->lock);
    bool first = works == NULL || works->first == NULL;
    tutti_status status = first ? enter(work) : TUTTI_OK;
    if (works != NULL)
        pthread_mutex_unlock(&works->lock);
    *entered = first && status == TUTTI_OK;
    return status;
}

/* In a turn: publishes the operation without waiting, when that is possible. Sets *started; an error is the call's. */
static tutti_status try_at_once(tu_collective *state, tutti_work *work, bool *started) {
    *started = false;
    if (work->batch != NULL || work->task.custom != NULL || !state->ready)
        return TUTTI_OK;
    tu_task *task = &work->task;
    if (state->open != NULL && tu_epoch_complete(state, state->open->task.open_epoch))
        finish_open(state);
    if (state->open != NULL)
        return TUTTI_OK;
    tu_shm_choose(task);
    if (!tu_one_shot_can_start(state, task, (tutti_algorithm)task->info.algorithm))
        return TUTTI_OK;
    tutti_status status = enter_if_first(atomic_load_explicit(&state->works, memory_order_acquire), work, started);
    if (status != TUTTI_OK || !*started)
        return status;
    tu_shm_note(state, task->executor, &task->info);
    if (task->source != NULL)
        status = tu_task_fill(task);
    if (status == TUTTI_OK)
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

tutti_status tu_works_queue(tutti_work *work) {
    tu_works *works;
    tutti_status status = get_works(work->task.state, &works);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&works->lock);
    status = ensure_thread(works);
    if (status == TUTTI_OK)
        status = enter(work);
    if (status == TUTTI_OK) {
        tu_work_hold(work);
        if (works->last != NULL)
            works->last->next = work;
        else
            works->first = work;
        works->last = work;
        pthread_cond_signal(&works->wanted);
    }
    pthread_mutex_unlock(&works->lock);
    return status;
}

tutti_status tu_works_start(tutti_work *work) {
    tu_collective *state = work->task.state;
    tutti_status status = TUTTI_OK;
    bool started = false;
    if (tu_collective_try_lock(state)) {
        status = try_at_once(state, work, &started);
        tu_collective_unlock(state);
    }
    return status != TUTTI_OK || started ? status : tu_works_queue(work);
}

/* ---- testing and waiting ---- */

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

void tu_works_test(tutti_work *work) {
    tu_collective *state = work->task.state;
    if (!tu_collective_try_lock(state))
        return;
    if (is_open(state, work) && can_finish(state, &work->task))
        finish_open(state);
    tu_collective_unlock(state);
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
    tu_works *works = atomic_load_explicit(&work->task.state->works, memory_order_acquire);
    int64_t until = tu_clock_now() + 20 * TU_MILLISECOND;
    until = until < deadline ? until : deadline;
    struct timespec time = { .tv_sec = until / TU_SECOND, .tv_nsec = until % TU_SECOND };
    pthread_mutex_lock(&works->lock);
    while (!tu_work_done(work) && pthread_cond_timedwait(&works->finished, &works->lock, &time) == 0)
        ;
    pthread_mutex_unlock(&works->lock);
    return tu_work_done(work);
}

tutti_status tu_works_wait(tutti_work *work, int64_t deadline) {
    tu_collective *state = work->task.state;
    while (!tu_work_done(work)) {
        if (tu_collective_try_lock(state)) {
            tutti_status status = TUTTI_OK;
            if (is_open(state, work))
                status = finish_by(state, work, deadline);
            else if (!tu_work_done(work) && deadline >= work->task.deadline)
                run_all(state, work);
            tu_collective_unlock(state);
            if (status == TUTTI_ERROR_TIMEOUT)
                return status;
            if (tu_work_done(work))
                break;
        }
        if (atomic_load_explicit(&state->works, memory_order_acquire) != NULL)
            (void)stand_by(work, deadline);
        else
            sched_yield();
        if (!tu_work_done(work) && tu_clock_now() >= deadline)
            return TUTTI_ERROR_TIMEOUT;
    }
    return TUTTI_OK;
}

/* ---- who has come, before all have ---- */

static bool has_come(const tu_collective *state, const tu_task *task, int member) {
    return tu_epoch_reached(state, task->open_epoch, member) &&
           state->members[member]->arrive[task->open_epoch & 1].signature == task->signature;
}

bool tu_work_peek(tutti_work *work, int member, void *part) {
    tu_collective *state = work->task.state;
    size_t bytes = work->task.info.count * work->task.element;
    bool told = false;
    if (!tu_work_done(work)) {
        if (state == NULL || !tu_collective_try_lock(state))
            return false;
        told = is_open(state, work) && has_come(state, &work->task, member);
        if (told)
            tu_one_shot_peek(state, &work->task, member, part);
        tu_collective_unlock(state);
    }
    if (told || !tu_work_done(work) || work->status != TUTTI_OK)
        return told;
    memcpy(part, (const char *)work->task.out + (size_t)member * bytes, bytes);
    return true;
}

typedef struct arrival {
    open_wait open; /* first: open_missing looks at it */
    const bool *seen;
} arrival;

/* The first member that has come and has not been seen; -1: none. */
static int newcomer(const arrival *awaited) {
    const tu_collective *state = awaited->open.state;
    for (int member = 0; member < state->size; member++)
        if (!awaited->seen[member] && tu_epoch_reached(state, awaited->open.work->task.open_epoch, member))
            return member;
    return -1;
}

static bool somebody_new(void *argument) {
    return newcomer(argument) >= 0;
}

bool tu_work_await_arrival(tutti_work *work, const bool *seen) {
    tu_collective *state = work->task.state;
    arrival awaited = { { state, work }, seen };
    bool came = false;
    if (state == NULL || tu_work_done(work) || !tu_collective_try_lock(state))
        return false;
    if (is_open(state, work)) {
        tu_group_wait wait;
        tu_group_wait_init(&wait, state->group, &work->task.info, work->task.ticket, work->task.deadline, open_missing,
                           &awaited);
        came = tu_wait_until(&wait.wait, somebody_new, &awaited) == TUTTI_OK &&
               has_come(state, &work->task, newcomer(&awaited)); /* else its call is another one */
    }
    tu_collective_unlock(state);
    return came;
}

static const tu_recorder *recorder_of(const tutti_group *group) {
    return tu_job_recorder(group->world->job, group->world->local_rank);
}

uint64_t tu_fused_span_begin(tutti_group *group) {
    return tu_record_time(recorder_of(group));
}

void tu_fused_span_end(tutti_group *group, uint64_t began, int jobs) {
    tu_operation operation = jobs > 0 ? TU_OPERATION_FUSED_PRODUCT : TU_OPERATION_FUSED_EXCHANGE;
    tu_operation_info info = { .operation = (uint8_t)operation, .root = -1, .tag = jobs };
    tu_group_number(group, &group->messages, &info);
    tu_record_past(recorder_of(group), &info, began, tu_record_time(recorder_of(group)), 0);
}

void tu_works_adopt(tutti_work *work) {
    tu_works *works;
    if (tu_work_done(work) || get_works(work->task.state, &works) != TUTTI_OK)
        return; /* without a helper the group's next operation finishes it */
    pthread_mutex_lock(&works->lock);
    if (ensure_thread(works) == TUTTI_OK) {
        works->finish_open = true;
        pthread_cond_signal(&works->wanted);
    }
    pthread_mutex_unlock(&works->lock);
}
