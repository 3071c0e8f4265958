/* SPDX-License-Identifier: Apache-2.0
 *
 * The watcher: a host that waits for a stream sits in the driver and sees nothing. So a thread of the backend's own
 * looks, every 20 ms while the GPU is in use, at the liveness of the ranks and at what kernels reported, ends groups,
 * and lets kernels go that wait for somebody who will not come.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "cuda.h"

static void look(tu_cuda *cuda) {
    /* Groups end by their own business under their own locks: take copies of the list, 64 at a time, and look without
     * the lock. They stay, since tu_cuda_forget waits for watch_lock. */
    tu_cuda_group *groups[64];
    for (int skip = 0, count = 64; count == 64; skip += count) {
        int seen = 0;
        count = 0;
        pthread_mutex_lock(&cuda->lock);
        for (tu_cuda_group *group = cuda->groups; group != NULL && count < 64; group = group->next) {
            if (seen++ >= skip)
                groups[count++] = group;
        }
        pthread_mutex_unlock(&cuda->lock);
        for (int i = 0; i < count; i++) {
            if (atomic_load_explicit(&groups[i]->end_passed_on, memory_order_relaxed))
                continue;
            (void)cuda->host->group_look(groups[i]->group);
            (void)tu_cuda_group_check(groups[i]);
        }
    }
}

static void *watch(void *argument) {
    tu_cuda *cuda = argument;
    pthread_mutex_lock(&cuda->watch_lock);
    while (!cuda->watch_stop) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += 20000000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&cuda->watch_wake, &cuda->watch_lock, &until);
        if (cuda->watch_stop)
            break;
        look(cuda); /* with watch_lock held: tu_cuda_forget waits for it, so no group goes away meanwhile */
    }
    pthread_mutex_unlock(&cuda->watch_lock);
    return NULL;
}

void tu_cuda_watch(tu_cuda *cuda) {
    if (atomic_load_explicit(&cuda->watched, memory_order_relaxed))
        return;
    pthread_mutex_lock(&cuda->watch_lock);
    if (!atomic_load_explicit(&cuda->watched, memory_order_relaxed)) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        if (pthread_create(&cuda->watcher, NULL, watch, cuda) == 0) {
            pthread_setname_np(cuda->watcher, "tutti-gpu-watch");
            atomic_store_explicit(&cuda->watched, true, memory_order_relaxed);
        } else {
            cuda->host->log(cuda->world, TUTTI_LOG_WARN, "cuda",
                            "no thread for watching the GPU; deaths are seen at the next call only");
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_mutex_unlock(&cuda->watch_lock);
}

void tu_cuda_watch_start(tu_cuda *cuda) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&cuda->watch_wake, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&cuda->watch_lock, NULL);
}

void tu_cuda_watch_stop(tu_cuda *cuda) {
    pthread_mutex_lock(&cuda->watch_lock);
    cuda->watch_stop = true;
    pthread_cond_signal(&cuda->watch_wake);
    pthread_mutex_unlock(&cuda->watch_lock);
    if (atomic_load_explicit(&cuda->watched, memory_order_relaxed))
        pthread_join(cuda->watcher, NULL);
    pthread_cond_destroy(&cuda->watch_wake);
    pthread_mutex_destroy(&cuda->watch_lock);
}
