/* SPDX-License-Identifier: Apache-2.0
 *
 * Starting a helper thread. A new thread inherits the signal mask, so all signals are blocked around the start.
 */
#include "store/thread.h"

#include <signal.h>

int tu_thread_start(const char *name, void *(*body)(void *), void *argument, pthread_t *thread) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, body, argument);
    if (error == 0)
        pthread_setname_np(*thread, name);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}
