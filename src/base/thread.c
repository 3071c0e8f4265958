/* SPDX-License-Identifier: Apache-2.0
 *
 * A new thread inherits the signal mask, so all signals are blocked around the start.
 */
#include "base/thread.h"

#include <errno.h>
#include <signal.h>
#include <time.h>

#include "base/clock.h"

int tu_thread_start_small(const char *name, size_t stack_bytes, void *(*body)(void *), void *argument,
                          pthread_t *thread) {
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error != 0)
        return error;
    if (stack_bytes != 0)
        pthread_attr_setstacksize(&attributes, stack_bytes);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(thread, &attributes, body, argument);
    if (error == EINVAL && stack_bytes != 0)
        error = pthread_create(thread, NULL, body, argument);
    if (error == 0)
        pthread_setname_np(*thread, name);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

int tu_thread_start(const char *name, void *(*body)(void *), void *argument, pthread_t *thread) {
    return tu_thread_start_small(name, 0, body, argument, thread);
}

/* pthread_mutex_timedlock takes the wall clock, which may jump: so in slices of at most a second, each measured
 * anew. */
bool tu_mutex_lock_until(pthread_mutex_t *mutex, int64_t deadline) {
    if (pthread_mutex_trylock(mutex) == 0)
        return true;
    for (int64_t left; (left = tu_deadline_left(deadline)) > 0;) {
        int64_t until = tu_clock_wall() + (left < TU_SECOND ? left : TU_SECOND);
        struct timespec time = { .tv_sec = until / TU_SECOND, .tv_nsec = until % TU_SECOND };
        if (pthread_mutex_timedlock(mutex, &time) == 0)
            return true;
    }
    return false;
}

void *tu_thread_spare(void) {
    static _Thread_local _Alignas(64) char spare[TU_THREAD_SPARE];
    return spare;
}
