/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting with a bell: src/base/wait.h. A rank that is about to sleep says so in two words (sleepers, asleep), makes that visible everywhere
 * with membarrier, looks at its condition once more, and sleeps on the word `ring`. The ringer stores the condition and then
 * looks at `sleepers` with an ordinary load: the processor may hold its store back while the load goes ahead. That store buffer is modelled;
 * membarrier drains it.
 *
 * The ringer may die at any step. A sleeper's timeout (20 ms) is only for noticing that: it is allowed to fire only after a
 * death, so that a model in which a live ringer's wake-up gets lost would not end, and Spin would say so.
 *
 * Proved: a waiter whose condition comes true returns; a waiter whose ringer died returns that, or the condition if it was visible
 * before; nobody sleeps for ever. Compiled with -DNO_MEMBARRIER the model must fail: the test runs that too.
 */
#define ROUNDS 2
#define WAITERS 2    /* threads of one rank, on one bell */

byte flag;           /* the condition: how many rounds the ringer has done; in memory */
byte buffered;       /* the ringer's store that is not in memory yet */
bool pending;        /* there is one */
byte sleepers, asleep, ring;
bool dead;           /* the ringer */
byte finished;       /* waiters that returned the condition */
byte bereaved;       /* waiters that returned the death */

/* What is in the store buffer reaches memory at some time, also when its writer has died since. */
active proctype store_buffer() {
end_idle:
    do
    :: atomic { pending -> flag = buffered; pending = false }
    od
}

inline drain() {
#ifndef NO_MEMBARRIER
    atomic { if :: pending -> flag = buffered; pending = false :: else fi }
#else
    skip
#endif
}

proctype waiter(byte round) {
    byte seen;
    do
    :: flag >= round -> finished++; break
    :: else ->
        if
        :: dead -> /* check(): the death; then the condition once more */
            drain();
            if :: flag >= round -> finished++ :: else -> bereaved++ fi;
            break
        :: true -> /* go to sleep */
            seen = ring;
            sleepers++;
            asleep++;
            drain();
            if
            :: flag >= round -> skip
            :: else ->
                /* futex: sleeps only while ring is what was seen; woken by a change, or after a death by its timeout */
                if
                :: ring != seen -> skip
                :: ring == seen -> (ring != seen || dead)
                fi
            fi;
            asleep--;
            sleepers--
        fi
    od
}

proctype ringer() {
    byte round = 0;
    do
    :: round < ROUNDS ->
        if
        :: atomic { !pending -> buffered = round + 1; pending = true } /* the store, into the buffer */
        :: dead = true; goto end
        fi;
        if
        :: sleepers == 0 -> skip /* an ordinary load: may see what was before the store is in memory */
        :: sleepers != 0 ->
            if
            :: dead = true; goto end
            :: asleep == 0 -> skip   /* an ordinary load, too */
            :: asleep != 0 ->
                /* a locked increment: drains the buffer first */
                atomic { if :: pending -> flag = buffered; pending = false :: else fi; ring++ }
            fi
        fi;
        round++
    :: round == ROUNDS -> break
    :: dead = true; goto end
    od;
end:
    skip
}

init {
    byte i = 1;
    atomic {
        run ringer();
        do
        :: i <= WAITERS -> run waiter(i); i++
        :: else -> break
        od
    }
    (_nr_pr == 2); /* the store buffer is left */
    assert(finished + bereaved == WAITERS);
    assert(dead || bereaved == 0);
    assert(sleepers == 0 && asleep == 0)
}
