/* SPDX-License-Identifier: Apache-2.0
 *
 * The lock of src/backend/shm/turn.h: free of charge for the one thread that uses it, until a second one comes. The owner's store "I am inside" may
 * sit in its store buffer while it looks whether it still owns the turn; the other thread's fence drains that buffer.
 *
 * Proved: two threads are never inside together, and nobody waits for ever. Compiled with -DNO_MEMBARRIER the model must fail.
 */
#define THREADS 3
#define ROUNDS 2
#define NOBODY 0
#define SHARED 255

byte owner = NOBODY; /* 1 + thread, or SHARED */
bool inside;         /* in memory */
bool held;
byte within;         /* threads in the guarded part: for the proof */
/* The owner's store buffer: one store to `inside` that is not in memory yet. Whoever owns writes; one owner only, ever. */
bool pending, buffered;
byte writer;         /* the thread whose buffer it is */

active proctype store_buffer() {
end_idle:
    do
    :: atomic { pending -> inside = buffered; pending = false }
    od
}

/* A second store pushes the first one out. */
inline store_inside(value) {
    atomic { if :: pending -> inside = buffered :: else fi; buffered = value; pending = true; writer = me }
}

inline drain() {
#ifndef NO_MEMBARRIER
    atomic { if :: pending -> inside = buffered; pending = false :: else fi }
#else
    skip
#endif
}

proctype thread(byte me) {
    byte round = 0;
    bool mine;
    do
    :: round < ROUNDS ->
        mine = false;
        atomic { if :: owner == NOBODY -> owner = me :: else fi }; /* compare-and-swap */
        if
        :: owner == me ->
            store_inside(true);
            if
            :: owner == me -> mine = true
            :: else -> store_inside(false)
            fi
        :: else -> skip
        fi;
        if
        :: !mine ->
            atomic { !held -> held = true; if :: pending && writer == me -> inside = buffered; pending = false :: else fi }; /* a locked instruction drains one's own buffer */
            if
            :: owner != SHARED ->
                owner = SHARED;
                drain();
                !inside
            :: else -> skip
            fi
        :: else -> skip
        fi;
        within++;
        assert(within == 1);
        within--;
        if
        :: mine -> store_inside(false)
        :: else -> held = false
        fi;
        round++
    :: else -> break
    od
}

init {
    atomic {
        byte i = 1;
        do
        :: i <= THREADS -> run thread(i); i++
        :: else -> break
        od
    }
    (_nr_pr == 2) /* the store buffer is left */
}
