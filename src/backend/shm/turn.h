/* SPDX-License-Identifier: Apache-2.0
 *
 * A lock that costs the one thread that uses it nothing: no locked instruction, so that the stores before it (a put,
 * the last signal) are not waited for. The first thread that comes owns it and only says that it is inside. A second
 * thread takes that away, once and for all: it marks the turn as shared, makes sure by an asymmetric fence that the
 * owner either sees this or is seen inside, waits until it is out, and from then on everybody takes the ordinary lock.
 * models/turn.pml is this file as a Spin model.
 */
#ifndef TU_BACKEND_SHM_TURN_H
#define TU_BACKEND_SHM_TURN_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

#include "base/wait.h"

typedef struct tu_turn {
    _Atomic(const void *) owner; /* NULL: nobody came yet; TU_TURN_SHARED; else the mark of the thread that owns it */
    _Atomic bool inside;         /* the owner is; written by it alone */
    _Atomic bool held;           /* the ordinary lock */
} tu_turn;

#define TU_TURN_SHARED ((const void *)1)

/* Whoever is inside is there for a few instructions, unless it lost its processor: to a thread of higher priority that
 * only yielded it would never get it back, so that a wait that lasts sleeps. */
static inline void tu_turn_rest(unsigned tries) {
    if (tries % 64 != 0)
        tu_pause();
    else if (tries < 64 * 64)
        sched_yield();
    else
        (void)nanosleep(&(struct timespec){ .tv_nsec = 50000 }, NULL);
}

static inline void tu_turn_lock(tu_turn *turn) {
    for (unsigned tries = 1; atomic_exchange_explicit(&turn->held, true, memory_order_acquire);
         tries++) { /* pairs with tu_turn_leave */
        tu_turn_rest(tries);
    }
}

/* Shared from the start where the kernel has no asymmetric fence. */
static inline void tu_turn_init(tu_turn *turn) {
    atomic_init(&turn->owner, tu_fence_known() ? NULL : TU_TURN_SHARED);
    atomic_init(&turn->inside, false);
    atomic_init(&turn->held, false);
}

/* Takes the ordinary lock, and the turn away from its owner when it has one. */
static inline void tu_turn_share(tu_turn *turn) {
    tu_turn_lock(turn);
    if (atomic_load_explicit(&turn->owner, memory_order_relaxed) == TU_TURN_SHARED)
        return;
    atomic_store_explicit(&turn->owner, TU_TURN_SHARED, memory_order_seq_cst);
    (void)tu_fence_all(); /* pairs with the compiler barrier in tu_turn_enter */
    /* Pairs with the release in tu_turn_leave. */
    for (unsigned tries = 1; atomic_load_explicit(&turn->inside, memory_order_acquire); tries++)
        tu_turn_rest(tries);
}

/* True when the thread owns the turn; to be handed to tu_turn_leave. */
static inline bool tu_turn_enter(tu_turn *turn) {
    const void *mark = (const void *)pthread_self(); /* tells living threads apart */
    const void *owner = atomic_load_explicit(&turn->owner, memory_order_relaxed);
    if (owner == NULL &&
        atomic_compare_exchange_strong_explicit(&turn->owner, &owner, mark, memory_order_acq_rel, memory_order_relaxed))
        owner = mark;
    if (__builtin_expect(owner == mark, 1)) {
        atomic_store_explicit(&turn->inside, true, memory_order_relaxed);
        atomic_signal_fence(
            memory_order_seq_cst); /* pairs with the fence in tu_turn_share: it sees us inside, or we see it */
        if (__builtin_expect(atomic_load_explicit(&turn->owner, memory_order_relaxed) == mark, 1))
            return true;
        atomic_store_explicit(&turn->inside, false, memory_order_release);
    }
    tu_turn_share(turn);
    return false;
}

static inline void tu_turn_leave(tu_turn *turn, bool owned) {
    atomic_store_explicit(owned ? &turn->inside : &turn->held, false, memory_order_release);
}

#endif
