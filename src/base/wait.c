/* SPDX-License-Identifier: Apache-2.0 */
#include "base/wait.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/home.h"

/* The longest sleep between two looks at liveness. */
#define LOOK_INTERVAL (20 * TU_MILLISECOND)
/* The longest sleep when nobody can be relied on to ring. */
#define BLIND_INTERVAL (1 * TU_MILLISECOND)
/* A yield that took this long gave its core to somebody who computes, for a whole slice of time. */
#define LONG_YIELD (TU_MILLISECOND / 2)
/* How long nobody yields then. It doubles with every try that finds the same, and a try costs a slice. */
#define LEAST_ABSTINENCE (5 * TU_MILLISECOND)
#define MOST_ABSTINENCE (40 * TU_MILLISECOND)
/* After so long without another such yield all is as if there had been none. */
#define FORGOTTEN (20 * TU_MILLISECOND)
/* Then one yield in so many is timed: reading the clock twice is a tenth of one. */
#define YIELDS_PER_LOOK 16

void tu_wait_ladder(tu_wait *wait, int runnable, int cores) {
    if (runnable <= cores) {
        wait->spins = 20000;
        wait->yields = 50;
    } else {
        /* The rank we wait for may need our core: give it away at once, and a little longer before sleeping, because a
         * wake-up costs more than a yield. */
        wait->spins = 0;
        wait->yields = 200;
    }
}

bool tu_give_way(void) {
    static _Thread_local struct {
        int64_t until, interval; /* an interval of 0: no yield took long of late */
        uint32_t yields;
    } abstinence;
    if (abstinence.interval == 0 && ++abstinence.yields % YIELDS_PER_LOOK != 0) {
        sched_yield();
        return true;
    }
    int64_t begin = tu_clock_now();
    if (begin < abstinence.until)
        return false;
    sched_yield();
    int64_t end = tu_clock_now();
    if (end - begin >= LONG_YIELD) {
        abstinence.interval *= 2;
        if (abstinence.interval < LEAST_ABSTINENCE)
            abstinence.interval = LEAST_ABSTINENCE;
        if (abstinence.interval > MOST_ABSTINENCE)
            abstinence.interval = MOST_ABSTINENCE;
        abstinence.until = end + abstinence.interval;
    } else if (end - abstinence.until > FORGOTTEN) {
        abstinence.interval = 0;
    }
    return true;
}

static int futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t nanoseconds) {
    struct timespec time = { .tv_sec = nanoseconds / TU_SECOND, .tv_nsec = nanoseconds % TU_SECOND };
    return (int)syscall(SYS_futex, word, FUTEX_WAIT, expected, &time, NULL, 0);
}

void tu_bell_prepare(void) {
    (void)syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0);
}

bool tu_fence_all(void) {
    return syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) == 0;
}

bool tu_fence_known(void) {
    long commands = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
    return commands > 0 && (commands & MEMBARRIER_CMD_GLOBAL_EXPEDITED) != 0;
}

void tu_bell_ring_slow(tu_bell *bell) {
    if (atomic_load_explicit(&bell->asleep, memory_order_seq_cst) == 0)
        return;
    atomic_fetch_add_explicit(&bell->ring, 1, memory_order_release);
    syscall(SYS_futex, &bell->ring, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void nap(int64_t nanoseconds) {
    struct timespec time = { .tv_sec = nanoseconds / TU_SECOND, .tv_nsec = nanoseconds % TU_SECOND };
    nanosleep(&time, NULL);
}

/* Sleeps until rung, at most `longest`. */
static void sleep_once(const tu_wait *wait, bool (*ready)(void *), void *argument, int64_t longest) {
    if (wait->bell == NULL) {
        nap(longest < BLIND_INTERVAL ? longest : BLIND_INTERVAL);
        return;
    }
    uint32_t ring = atomic_load_explicit(&wait->bell->ring, memory_order_acquire);
    atomic_fetch_add_explicit(wait->sleepers, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&wait->bell->asleep, 1, memory_order_seq_cst);
    /* Pairs with tu_bell_ring: either the ringer sees us asleep, or we see its store below. */
    if (!tu_fence_all() && longest > BLIND_INTERVAL)
        longest = BLIND_INTERVAL;
    if (!ready(argument))
        futex_wait(&wait->bell->ring, ring, longest);
    atomic_fetch_sub_explicit(&wait->bell->asleep, 1, memory_order_seq_cst);
    atomic_fetch_sub_explicit(wait->sleepers, 1, memory_order_seq_cst);
}

/* When to look at who lives, and what the last look knew. */
typedef struct looking {
    int64_t next;
    uint32_t departures;
} looking;

static bool is_time(const tu_wait *wait, int64_t now, looking *looking) {
    /* A relaxed look at the count is enough: what `check` reads it acquires itself. */
    uint32_t departures =
        wait->departures != NULL ? atomic_load_explicit(wait->departures, memory_order_relaxed) : looking->departures;
    /* At the deadline too: a death is told rather than the time it took. */
    if (now < looking->next && now < wait->deadline && departures == looking->departures)
        return false;
    looking->next = now + LOOK_INTERVAL;
    looking->departures = departures;
    return true;
}

/* What else may end the wait. The condition is looked at once more by the caller before a failure counts. */
static tutti_status look_around(const tu_wait *wait, int64_t now, looking *looking) {
    if (wait->interrupt != NULL && atomic_load_explicit(wait->interrupt, memory_order_relaxed) != 0)
        return TUTTI_ERROR_INTERRUPTED;
    if (wait->ended != NULL && atomic_load_explicit(wait->ended, memory_order_acquire) != 0)
        return TUTTI_ERROR_STATE;
    if (wait->check != NULL && is_time(wait, now, looking)) {
        tutti_status status = wait->check(wait->argument);
        if (status != TUTTI_OK)
            return status;
    }
    return now >= wait->deadline ? TUTTI_ERROR_TIMEOUT : TUTTI_OK;
}

tutti_status tu_wait_until(const tu_wait *wait, bool (*ready)(void *), void *argument) {
    for (uint32_t i = 0; i <= wait->spins; i++) {
        if (ready(argument))
            return TUTTI_OK;
        tu_pause();
    }
    /* Before the first yield: of three ranks on one core each finds what it waits for when its turn comes again, and
     * the fourth, alone on another core, waits for all of them. */
    if (wait->home != 0)
        tu_home_return(wait->home - 1);
    /* Where ranks share a core, the first yield most often brings what is awaited: it comes before any look at the
     * clock and at who lives, which cost more than half of it. */
    if (wait->spins == 0 && wait->yields != 0 && tu_give_way() && ready(argument))
        return TUTTI_OK;
    looking looking = { .next = tu_clock_now() + LOOK_INTERVAL / 4 };
    for (uint32_t i = 0;; i++) {
        if (ready(argument))
            return TUTTI_OK;
        int64_t now = tu_clock_now();
        tutti_status status = look_around(wait, now, &looking);
        if (status != TUTTI_OK)
            return ready(argument) ? TUTTI_OK : status;
        if (i < wait->yields && tu_give_way())
            continue;
        int64_t longest = wait->deadline - now;
        if (wait->check != NULL && looking.next - now < longest)
            longest = looking.next - now;
        if (longest > LOOK_INTERVAL)
            longest = LOOK_INTERVAL;
        if (longest <= 0)
            continue;
        if (wait->sleeping != NULL)
            wait->sleeping(wait->argument, true);
        sleep_once(wait, ready, argument, longest);
        if (wait->sleeping != NULL)
            wait->sleeping(wait->argument, false);
    }
}

struct target {
    const _Atomic uint32_t *word;
    uint32_t value;
};

static bool reached(void *argument) {
    const struct target *target = argument;
    return (int32_t)(atomic_load_explicit(target->word, memory_order_acquire) - target->value) >= 0;
}

tutti_status tu_wait_reached(const tu_wait *wait, const _Atomic uint32_t *word, uint32_t value) {
    struct target target = { word, value };
    return tu_wait_until(wait, reached, &target);
}
