/* SPDX-License-Identifier: Apache-2.0
 *
 * A close while other threads are in calls (src/world/world.h, world.c). A caller stores in a word of its own in which world it is, without a
 * fence, and looks whether the world is closed; that store may sit in its store buffer. The close marks the world as closed, drains the buffers of
 * all threads (membarrier), and frees the world when nobody is inside.
 *
 * Proved: nobody uses the world after it was freed, and the close does not wait for ever. With -DNO_MEMBARRIER the model must fail.
 */
#define CALLERS 2
#define CALLS 2

bool closed, freed;
bool inside[CALLERS];   /* in memory */
bool pending[CALLERS];  /* a store of "inside" that is not in memory yet */

proctype store_buffer(byte who) {
end_idle:
    do
    :: atomic { pending[who] -> inside[who] = true; pending[who] = false }
    od
}

proctype caller(byte me) {
    byte call = 0;
    do
    :: call < CALLS ->
        pending[me] = true;             /* the store, which may lag */
        if
        :: !closed ->
            assert(!freed); /* it uses the world */
            assert(!freed)
        :: else                         /* an error: its bare struct is all that was looked at */
        fi;
        /* A release store: after all that the call did, and after the store before. */
        atomic { pending[me] = false; inside[me] = false };
        call++
    :: else -> break
    od
}

proctype close_world() {
    closed = true;
#ifndef NO_MEMBARRIER
    atomic {
        byte who = 0;
        do
        :: who < CALLERS -> if :: pending[who] -> inside[who] = true; pending[who] = false :: else fi; who++
        :: else -> break
        od
    }
#endif
    !inside[0];
    !inside[1];
    freed = true
}

init {
    atomic { run store_buffer(0); run store_buffer(1); run caller(0); run caller(1); run close_world() }
    (_nr_pr == 3) /* the store buffers are left */
}
