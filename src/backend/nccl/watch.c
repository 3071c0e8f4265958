/* SPDX-License-Identifier: Apache-2.0
 *
 * The watcher: NCCL's kernels know no deadline. So a thread looks every 20 ms at every group that has a communicator:
 * whether a member died, whether the group ended, whether NCCL reports an error, and how long the stream has been in
 * one operation. Then it ends the group and aborts the communicator, which makes the kernels leave.
 *
 * A deadline starts when the stream comes to the operation: kernels before and behind it count up two words.
 */
#include <signal.h>
#include <string.h>
#include <time.h>

#include "nccl.h"

#define LOOK_NS 20000000

static tu_nccl_passed read_passed(const tu_nccl_passed *passed) {
    return (tu_nccl_passed){ .begun = __atomic_load_n(&passed->begun, __ATOMIC_ACQUIRE), /* pairs with tutti_mark */
                             .ended = __atomic_load_n(&passed->ended, __ATOMIC_ACQUIRE) };
}

/* What the stream is in. Of a graph that is replayed nobody knows: then the group's own timeout counts. */
static tu_nccl_said said_of(const tu_nccl_group *on, uint64_t number) {
    tu_nccl_said said = on->said[number % TU_NCCL_REMEMBERED];
    if (number == 0 || said.number != number)
        said = (tu_nccl_said){ .timeout_ns = on->nccl->cuda.host->timeout(on->group, 0) };
    return said;
}

/* Whether a stream has been in one operation since the last look; since when it has. */
static bool is_inside(tu_nccl_passed now, tu_nccl_passed *seen, int64_t time, int64_t *since) {
    bool inside = now.begun != now.ended && memcmp(&now, seen, sizeof now) == 0;
    if (!inside)
        *since = time;
    *seen = now;
    return inside;
}

static tutti_status too_long(const tu_nccl_group *on, int64_t time, const tu_nccl_said *said) {
    const tu_backend_host *host = on->nccl->cuda.host;
    if (time < said->timeout_ns)
        return TUTTI_OK;
    return host->error(TUTTI_ERROR_TIMEOUT,
                       "%s %llu of group %s by NCCL: the stream of rank %d was in it until the deadline, although all "
                       "ranks had called it; is the stream of another rank stuck behind other work?",
                       said->number != 0 ? host->operation_name(said->operation) : "an operation of a graph,",
                       (unsigned long long)said->sequence, on->name, on->rank);
}

/* A stream has been in an operation for too long. */
static tutti_status look_at_streams(tu_nccl_group *on) {
    int64_t now = on->nccl->cuda.host->now();
    tu_nccl_passed eager = read_passed(&on->marks->eager), graphs = read_passed(&on->marks->graphs);
    tutti_status status = TUTTI_OK;
    if (is_inside(eager, &on->seen.eager, now, &on->eager_since)) {
        tu_nccl_said said = said_of(on, eager.begun);
        status = too_long(on, now - on->eager_since, &said);
    }
    if (is_inside(graphs, &on->seen.graphs, now, &on->graphs_since) && status == TUTTI_OK) {
        tu_nccl_said said = said_of(on, 0);
        status = too_long(on, now - on->graphs_since, &said);
    }
    return status;
}

static tutti_status look_at_communicator(const tu_nccl_group *on) {
    ncclResult_t error = ncclSuccess;
    if (on->nccl->library.ncclCommGetAsyncError(on->comm, &error) != ncclSuccess || error == ncclSuccess ||
        error == ncclInProgress)
        return TUTTI_OK;
    return tu_nccl_error(on, error, "an operation");
}

static bool has_ended(const tu_nccl_group *on) {
    const _Atomic uint64_t *state = on->nccl->cuda.host->group_state(on->group);
    return state != NULL && atomic_load_explicit(state, memory_order_acquire) != 0;
}

static void look_at(tu_nccl_group *on) {
    const tu_backend_host *host = on->nccl->cuda.host;
    (void)host->group_look(on->group);
    if (pthread_mutex_trylock(&on->lock) != 0) { /* somebody is in a call of NCCL */
        int64_t until = atomic_load_explicit(&on->inside_until, memory_order_acquire);
        if (until != 0 && (has_ended(on) || host->now() > until))
            tu_nccl_stop(on, until);
        return;
    }
    if (on->comm != NULL) {
        tutti_status status = has_ended(on) ? TUTTI_ERROR_ABORTED : look_at_streams(on);
        if (status == TUTTI_OK)
            status = look_at_communicator(on);
        if (status != TUTTI_OK && !has_ended(on))
            host->group_end(on->group);
        if (status != TUTTI_OK)
            tu_nccl_abort(on);
    }
    pthread_mutex_unlock(&on->lock);
}

/* The next group behind `on` that is made; the first for NULL. */
static tu_nccl_group *next_made(tu_nccl *nccl, const tu_nccl_group *on) {
    pthread_mutex_lock(&nccl->lock);
    tu_nccl_group *next = on == NULL ? nccl->groups : on->next;
    while (next != NULL && !next->made)
        next = next->next;
    pthread_mutex_unlock(&nccl->lock);
    return next;
}

/* With watch_lock held: groups that are made do not go away meanwhile. */
static void look(tu_nccl *nccl) {
    for (tu_nccl_group *on = next_made(nccl, NULL); on != NULL; on = next_made(nccl, on))
        look_at(on);
}

static void *watch(void *argument) {
    tu_nccl *nccl = argument;
    pthread_mutex_lock(&nccl->watch_lock);
    while (!nccl->watch_stop) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += LOOK_NS;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&nccl->watch_wake, &nccl->watch_lock, &until);
        if (!nccl->watch_stop)
            look(nccl);
    }
    pthread_mutex_unlock(&nccl->watch_lock);
    return NULL;
}

void tu_nccl_watch(tu_nccl *nccl) {
    pthread_mutex_lock(&nccl->watch_lock);
    if (!nccl->watched) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        nccl->watched = pthread_create(&nccl->watcher, NULL, watch, nccl) == 0;
        if (nccl->watched)
            pthread_setname_np(nccl->watcher, "tutti-nccl");
        else
            nccl->cuda.host->log(nccl->cuda.world, TUTTI_LOG_WARN, "nccl",
                                 "no thread for watching NCCL; what hangs on the GPU is not ended");
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_mutex_unlock(&nccl->watch_lock);
}

void tu_nccl_watch_start(tu_nccl *nccl) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&nccl->watch_wake, &attributes);
    pthread_cond_init(&nccl->lock_change, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&nccl->watch_lock, NULL);
}

void tu_nccl_watch_stop(tu_nccl *nccl) {
    pthread_mutex_lock(&nccl->watch_lock);
    nccl->watch_stop = true;
    pthread_cond_signal(&nccl->watch_wake);
    bool watched = nccl->watched;
    pthread_mutex_unlock(&nccl->watch_lock);
    if (watched)
        pthread_join(nccl->watcher, NULL);
    pthread_cond_destroy(&nccl->watch_wake);
    pthread_cond_destroy(&nccl->lock_change);
    pthread_mutex_destroy(&nccl->watch_lock);
}
