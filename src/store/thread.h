/* SPDX-License-Identifier: Apache-2.0
 *
 * Starting a helper thread: named, all signals blocked, so that a program's handlers run in the program's own threads.
 */
#ifndef TU_STORE_THREAD_H
#define TU_STORE_THREAD_H

#include <pthread.h>

/* `name` has at most 15 bytes. Returns 0 or an errno. */
int tu_thread_start(const char *name, void *(*body)(void *), void *argument, pthread_t *thread);

#endif
