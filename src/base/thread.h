/* SPDX-License-Identifier: Apache-2.0
 *
 * Starting a helper thread: named, all signals blocked, so that a program's handlers run in the program's own threads.
 * Memory of a thread, and a lock with a deadline.
 */
#ifndef TU_BASE_THREAD_H
#define TU_BASE_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

/* `name` has at most 15 bytes. Returns 0 or an errno. */
int tu_thread_start(const char *name, void *(*body)(void *), void *argument, pthread_t *thread);
/* The same with a stack of this size, where the thread-local data of the program's libraries leaves room for it; with
 * an ordinary one where it does not, and for 0. */
int tu_thread_start_small(const char *name, size_t stack_bytes, void *(*body)(void *), void *argument,
                          pthread_t *thread);

/* Memory of the calling thread for a library that stands on this one, zero at the thread's start. Such a library may be
 * loaded late, as Python does it, and then has only some hundred bytes for thread-local variables of its own. */
#define TU_THREAD_SPARE 4096
TU_SHARED void *tu_thread_spare(void);

/* False: the deadline (tu_clock_now) has passed. */
bool tu_mutex_lock_until(pthread_mutex_t *mutex, int64_t deadline);

#endif
