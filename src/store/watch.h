/* SPDX-License-Identifier: Apache-2.0
 *
 * Somebody who looks around while a store call waits: who lives, whether to go on. The kinds of store sleep in slices
 * of at most 20 ms when the calling thread is watched, and look after each.
 *
 * A store of a world has a watch, which its clones share; it outlives the world, and then says that the world is
 * closed. A thread that opens a world is watched itself, whatever store it uses.
 */
#ifndef TU_STORE_WATCH_H
#define TU_STORE_WATCH_H

#include <stdbool.h>
#include <stdint.h>

#include <tutti/status.h>

typedef struct tu_watch tu_watch;

/* One reference. look(argument) returns TUTTI_OK, or why the wait ends, with its message. strict: it also ends the wait
 * for a reply that the server owes at once, which costs the connection. */
tutti_status tu_watch_new(tutti_status (*look)(void *argument), void *argument, bool strict, tu_watch **watch);
tu_watch *tu_watch_keep(tu_watch *watch); /* NULL is allowed */
void tu_watch_release(tu_watch *watch);   /* NULL is allowed */
/* What it looked after is no more: from now on a look is TUTTI_ERROR_STATE. Returns when nobody looks any more. */
void tu_watch_end(tu_watch *watch);

/* Watches this thread's store calls, until it is given what this returned. The outermost watch counts. endless: the
 * call has no deadline of its own. */
tu_watch *tu_watch_thread(tu_watch *watch, bool endless);
void tu_watch_thread_back(tu_watch *before);

/* Suspends a watch that is not strict until this thread is given back what this returned. */
tu_watch *tu_watch_rest(void);

bool tu_watched(void); /* whether this thread is */
/* The time until which a wait may sleep: `deadline`, or the next look. */
int64_t tu_watch_slice(int64_t deadline);
/* For looks: whether something that happened at `time` concerns the call that waits. It does when it came during the
 * call, and always when the call has no deadline: nothing else might ever end it. */
bool tu_watch_concerns(int64_t time);
/* TUTTI_OK, also when nobody watches. */
tutti_status tu_watch_look(void);

#endif
