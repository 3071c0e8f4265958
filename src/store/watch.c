/* SPDX-License-Identifier: Apache-2.0 */
#include "store/watch.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"

#define LOOK_INTERVAL (20 * TU_MILLISECOND)

struct tu_watch {
    _Atomic int references;
    pthread_mutex_t lock; /* held during a look, so that the end waits for it */
    tutti_status (*look)(void *argument);
    void *argument;
    bool strict;
    bool ended;
};

static _Thread_local tu_watch *watching; /* of the call that this thread is in; lent */
static _Thread_local int64_t since;      /* when that call began; 0 when it has no deadline */

tutti_status tu_watch_new(tutti_status (*look)(void *argument), void *argument, bool strict, tu_watch **made) {
    tu_watch *watch = calloc(1, sizeof *watch);
    if (watch == NULL)
        return tu_error_memory("a watch over store calls", sizeof *watch);
    atomic_init(&watch->references, 1);
    pthread_mutex_init(&watch->lock, NULL);
    watch->look = look;
    watch->argument = argument;
    watch->strict = strict;
    *made = watch;
    return TUTTI_OK;
}

tu_watch *tu_watch_keep(tu_watch *watch) {
    if (watch != NULL)
        atomic_fetch_add_explicit(&watch->references, 1, memory_order_relaxed); /* the caller holds one already */
    return watch;
}

void tu_watch_release(tu_watch *watch) {
    /* Release and acquire pair with each other: all use is over before it goes. */
    if (watch == NULL || atomic_fetch_sub_explicit(&watch->references, 1, memory_order_acq_rel) != 1)
        return;
    pthread_mutex_destroy(&watch->lock);
    free(watch);
}

void tu_watch_end(tu_watch *watch) {
    if (watch == NULL)
        return;
    pthread_mutex_lock(&watch->lock);
    watch->ended = true;
    pthread_mutex_unlock(&watch->lock);
}

tu_watch *tu_watch_thread(tu_watch *watch, bool endless) {
    tu_watch *before = watching;
    if (before == NULL && watch != NULL) {
        watching = watch;
        since = endless ? 0 : tu_clock_now();
    }
    return before;
}

bool tu_watch_concerns(int64_t time) {
    return time >= since;
}

void tu_watch_thread_back(tu_watch *before) {
    watching = before;
}

tu_watch *tu_watch_rest(void) {
    tu_watch *before = watching;
    if (before != NULL && !before->strict)
        watching = NULL;
    return before;
}

bool tu_watched(void) {
    return watching != NULL;
}

int64_t tu_watch_slice(int64_t deadline) {
    if (watching == NULL)
        return deadline;
    int64_t slice = tu_deadline(LOOK_INTERVAL);
    return slice < deadline ? slice : deadline;
}

tutti_status tu_watch_look(void) {
    tu_watch *watch = watching;
    if (watch == NULL)
        return TUTTI_OK;
    pthread_mutex_lock(&watch->lock);
    tutti_status status = watch->ended ? tu_error(TUTTI_ERROR_STATE, "the world whose store this is has been closed")
                                       : watch->look(watch->argument);
    pthread_mutex_unlock(&watch->lock);
    return status;
}
