/* SPDX-License-Identifier: Apache-2.0
 *
 * The works of a group: one that is open, those that are queued, and the helper thread that runs what the starting
 * threads could not finish, in order.
 */
#ifndef TU_COLLECTIVE_WORKS_H
#define TU_COLLECTIVE_WORKS_H

#include "collective/collective.h"

/* Starts a work of an executor that takes turns: at once where that needs no waiting, else through the queue. */
tutti_status tu_works_start(tutti_work *work);
/* Always through the queue: for executors other than shm. */
tutti_status tu_works_queue(tutti_work *work);
/* Moves an open work on, where nothing has to be waited for. */
void tu_works_test(tutti_work *work);
/* Waits for a work, and takes part in what is queued before it. TUTTI_ERROR_TIMEOUT without a message when the deadline
 * comes first. */
tutti_status tu_works_wait(tutti_work *work, int64_t deadline);
/* The program has released an unfinished work: it is left to the helper. */
void tu_works_adopt(tutti_work *work);

/* Ends the helper thread and frees the queue. */
void tu_works_stop(tu_works *works);

tu_works *tu_works_drain_slowly(tu_collective *state);
/* In a turn: finishes what was started before, so that the caller's operation comes after it. Their errors are theirs.
 * Until tu_works_resume nothing else is started, so that the next number belongs to the caller. */
static inline tu_works *tu_works_drain(tu_collective *state) {
    if (__builtin_expect(state->open == NULL && atomic_load_explicit(&state->works, memory_order_acquire) == NULL, 1))
        return NULL;
    return tu_works_drain_slowly(state);
}
void tu_works_resume(tu_works *works);

#endif
