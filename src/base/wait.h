/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting for another rank, on memory that it writes.
 *
 * The ladder: pause a while, yield a while, then sleep on this rank's bell. No call waits for ever: each wait ends by
 * its condition, its deadline, an interrupt, the end of its group, or the liveness check, which runs at least every 20
 * ms, and at once when a rank has departed.
 *
 * Yielding is quick among ranks: whoever gets the core does its part and yields, too. Beside somebody who computes it
 * is not: the kernel gives that one a whole slice (2 ms), while whom a bell wakes up runs within 40 us. So a thread
 * that finds a yield to take long leaves that rung out for a while.
 *
 * The bell. A rank that is about to sleep counts itself in `asleep` (its own bell) and in `sleepers` (one word for the
 * whole job), makes that visible to all processes with membarrier(2), looks at its condition once more, and sleeps on
 * `ring` (futex). Whoever changes a word that others may wait for then calls tu_bell_ring: one load of `sleepers`,
 * which stays in cache while nobody sleeps; no fence is needed on that side. Where membarrier is missing, sleeps are
 * cut to 1 ms, so that a missed ring costs that much and never a hang.
 */
#ifndef TU_BASE_WAIT_H
#define TU_BASE_WAIT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <tutti/status.h>

/* In shared memory, one per rank, on a line of its own. */
typedef struct tu_bell {
    _Alignas(128) _Atomic uint32_t ring; /* any rank increments; futex word */
    _Atomic uint32_t asleep;             /* threads of the owning rank that sleep or are about to */
} tu_bell;

typedef struct tu_wait {
    int64_t deadline;                  /* absolute, on tu_clock_now */
    tu_bell *bell;                     /* this rank's; NULL: sleep in slices of at most 1 ms instead */
    _Atomic uint32_t *sleepers;        /* the job's; NULL when bell is */
    const _Atomic uint32_t *interrupt; /* nonzero ends the wait with TUTTI_ERROR_INTERRUPTED; may be NULL */
    const _Atomic uint64_t *ended;     /* nonzero ends the wait with TUTTI_ERROR_STATE; may be NULL */
    tutti_status (*check)(
        void *argument); /* liveness, at least every 20 ms; a failure ends the wait with it; may be NULL */
    const _Atomic uint32_t *departures; /* ranks that are gone: another number than at the last look, or than 0 at the
                                           first, calls for a look at once; may be NULL */
    void *argument;
    void (*sleeping)(void *argument, bool begins); /* around every sleep, for those who have something else to look
                                                      after while they look; may be NULL */
    uint32_t spins;                                /* pauses before the first yield; 0 when ranks outnumber cores */
    uint32_t yields;                               /* yields before the first sleep */
    int home; /* CPU + 1 to which the waiting thread returns, see home.h; 0: it stays where it is */
} tu_wait;

/* The rungs for this machine: `runnable` ranks and engine threads on `cores` cores. */
void tu_wait_ladder(tu_wait *wait, int runnable, int cores);

/* Yields the core; false, at once, where yields of this thread took long just before: sleep instead. */
bool tu_give_way(void);

/* Waits until ready(argument) is true; ready only looks, for it may be asked again after it said yes. Returns TUTTI_OK,
 * TUTTI_ERROR_TIMEOUT, TUTTI_ERROR_INTERRUPTED, TUTTI_ERROR_STATE (the group ended) or what `check` returned. Writes no
 * message, except that `check` may have: the caller knows what it waited for. When the condition is true it is
 * TUTTI_OK, whatever else is true too. */
tutti_status tu_wait_until(const tu_wait *wait, bool (*ready)(void *argument), void *argument);

/* The same for "the word has reached `value`", by signed distance, so that counters may wrap. Acquire. */
tutti_status tu_wait_reached(const tu_wait *wait, const _Atomic uint32_t *word, uint32_t value);

/* Once per process before its first ring: membarrier reaches only processes that have registered. Harmless when
 * repeated. */
void tu_bell_prepare(void);

/* The slow side of an asymmetric fence: on return every running thread of every process that called tu_bell_prepare has
 * passed a full fence. The quick side is a compiler barrier. False where the kernel has none. */
bool tu_fence_all(void);
bool tu_fence_known(void); /* whether the kernel has it */

/* Wakes the rank that owns `bell`, if it sleeps. To be called after the release store that it may wait for. */
void tu_bell_ring_slow(tu_bell *bell);
static inline void tu_bell_ring(const _Atomic uint32_t *sleepers, tu_bell *bell) {
    atomic_signal_fence(memory_order_seq_cst); /* pairs with the sleeper's membarrier */
    if (atomic_load_explicit(sleepers, memory_order_relaxed) != 0)
        tu_bell_ring_slow(bell);
}

/* Fetches a line ahead, to be written: other processors lose it. A hint, without an effect on what is read. */
static inline void tu_prefetch_for_write(const void *line) {
#if defined(__x86_64__)
    /* The builtin fetches it for reading, unless the compiler may use the extension; processors that lack that take
     * the instruction for none. */
    __asm__ __volatile__("prefetchw %0" ::"m"(*(const char *)line));
#else
    __builtin_prefetch(line, 1, 3);
#endif
}

/* One pause of the processor inside a spin. */
static inline void tu_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#endif
