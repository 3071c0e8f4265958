/* SPDX-License-Identifier: Apache-2.0
 *
 * The pool of threads that compute. A loop is published in one of a few places; threads enter through the place's gate,
 * take pieces off the loop's counter and leave; the owner works along and then closes the gate. A thread that comes
 * late, because the machine is busy with something else, finds the gate closed and is not waited for. Threads look for
 * the next loop for a short while, then sleep.
 */
#include "base/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/thread.h"

#define MOST_THREADS 63 /* besides the caller's */
#define PLACES 8        /* loops of different threads that can run at once; more run on their own thread alone */
#define LOOKS 4000      /* for a loop before sleeping: some microseconds, the gap between the operators of one step */
#define PIECES 16       /* per thread, so that one that is held up does not hold up all */
#define LONELY 100000   /* nanoseconds in which a thread that was woken up should have come */
#define MOST_SENT 4     /* threads; where there are more some always come */
#define CLOSED 0x80000000u

typedef struct work {
    tu_pool_loop loop;
    int64_t piece;
    _Atomic int64_t next; /* the first item that nobody has taken */
    _Atomic bool joined;  /* a thread came; written by those inside the gate, read by the owner once it is closed */
} work;

typedef struct place {
    _Atomic bool owned; /* by the thread whose loop is here */
    work *work;         /* written by the owner while the gate is closed; read by those inside the gate */
    int helpers;        /* that may be inside; likewise */
    /* How many threads are inside, and CLOSED. A thread adds 1 (acquire: pairs with the owner's opening), turns back
     * where the gate is closed or enough are inside, and subtracts 1 (release: pairs with the owner's wait for 0). */
    _Atomic uint32_t gate;
} place;

static struct {
    pthread_mutex_t lock; /* starting and ending of threads, `users` */
    int users;
    bool prepared;             /* for a fork */
    _Atomic int started;       /* threads; changed under lock */
    _Atomic bool ending;       /* told to the threads by a new round */
    _Atomic uint32_t round;    /* futex word: a loop was published (release), threads look again (acquire) */
    _Atomic uint32_t sleeping; /* threads in or near the futex */
    pthread_t threads[MOST_THREADS];
    place places[PLACES];
    _Atomic bool sending; /* a thread is sent elsewhere: another would take the CPUs of that moment for its own */
} pool = { .lock = PTHREAD_MUTEX_INITIALIZER };

static _Thread_local bool inside;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- the threads ---- */

static void take_pieces(work *work) {
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&work->next, work->piece, memory_order_relaxed);
        if (begin >= work->loop.count)
            return;
        int64_t end = begin + work->piece < work->loop.count ? begin + work->piece : work->loop.count;
        work->loop.body(work->loop.context, begin, end);
    }
}

static void visit(place *place) {
    if (atomic_load_explicit(&place->gate, memory_order_relaxed) & CLOSED)
        return;
    uint32_t before = atomic_fetch_add_explicit(&place->gate, 1, memory_order_acquire);
    if (!(before & CLOSED) && before < (uint32_t)place->helpers) {
        atomic_store_explicit(&place->work->joined, true, memory_order_relaxed);
        take_pieces(place->work);
    }
    atomic_fetch_sub_explicit(&place->gate, 1, memory_order_release);
}

static void wait_for_round(uint32_t seen) {
    for (int i = 0; i < LOOKS; i++) {
        if (atomic_load_explicit(&pool.round, memory_order_acquire) != seen)
            return;
        relax();
    }
    atomic_fetch_add(&pool.sleeping, 1);
    while (atomic_load(&pool.round) == seen)
        syscall(SYS_futex, &pool.round, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&pool.sleeping, 1);
}

static void *compute(void *argument) {
    (void)argument;
    inside = true;
    while (!atomic_load_explicit(&pool.ending, memory_order_acquire)) {
        uint32_t seen = atomic_load_explicit(&pool.round, memory_order_acquire);
        for (int i = 0; i < PLACES; i++)
            visit(&pool.places[i]);
        wait_for_round(seen);
    }
    return NULL;
}

static void next_round(int wake) {
    atomic_fetch_add(&pool.round, 1); /* pairs with the loads in wait_for_round */
    if (atomic_load(&pool.sleeping) > 0)
        syscall(SYS_futex, &pool.round, FUTEX_WAKE_PRIVATE, wake, NULL, NULL, 0);
}

/* A forked child has the calling thread only. */
static void reset_in_child(void) {
    pthread_mutex_init(&pool.lock, NULL);
    atomic_store(&pool.started, 0);
    atomic_store(&pool.ending, false);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.sending, false);
    for (int i = 0; i < PLACES; i++) {
        atomic_store(&pool.places[i].gate, CLOSED);
        atomic_store(&pool.places[i].owned, false);
    }
}

/* Fewer threads than wanted is no error: the loop runs on those there are. */
static void start_threads(int wanted) {
    if (wanted > MOST_THREADS)
        wanted = MOST_THREADS;
    if (atomic_load_explicit(&pool.started, memory_order_relaxed) >= wanted)
        return;
    pthread_mutex_lock(&pool.lock);
    int started = pool.users > 0 ? atomic_load(&pool.started) : wanted;
    while (started < wanted && tu_thread_start("tutti-compute", compute, NULL, &pool.threads[started]) == 0)
        atomic_store(&pool.started, ++started);
    pthread_mutex_unlock(&pool.lock);
}

/* ---- loops ---- */

static place *claim_place(void) {
    for (int i = 0; i < PLACES; i++) {
        place *place = &pool.places[i];
        bool owned = atomic_load_explicit(&place->owned, memory_order_relaxed);
        /* Acquire pairs with the release of the owner before. */
        if (!owned && atomic_compare_exchange_strong_explicit(&place->owned, &owned, true, memory_order_acquire,
                                                              memory_order_relaxed))
            return place;
    }
    return NULL;
}

/* A thread that was woken up while every CPU was busy may wait behind its owner, who does not sleep and so would keep
 * it there for milliseconds: it is sent to another CPU, and may go where it likes from there. */
static void send_elsewhere(int threads) {
    if (atomic_exchange_explicit(&pool.sending, true, memory_order_acquire))
        return;
    int here = sched_getcpu();
    for (int i = 0; i < threads && i < MOST_SENT && here >= 0 && here < CPU_SETSIZE; i++) {
        cpu_set_t allowed, others;
        if (pthread_getaffinity_np(pool.threads[i], sizeof allowed, &allowed) != 0)
            break;
        others = allowed;
        CPU_CLR(here, &others);
        if (CPU_COUNT(&others) > 0 && pthread_setaffinity_np(pool.threads[i], sizeof others, &others) == 0)
            pthread_setaffinity_np(pool.threads[i], sizeof allowed, &allowed);
    }
    atomic_store_explicit(&pool.sending, false, memory_order_release);
}

static void run_together(place *place, work *work, int helpers) {
    int64_t start = tu_clock_now();
    place->work = work;
    place->helpers = helpers;
    atomic_fetch_and_explicit(&place->gate, ~CLOSED, memory_order_release);
    next_round(helpers);
    inside = true;
    take_pieces(work);
    inside = false;
    /* All pieces are taken; what is left is the tail of the pieces that threads inside hold. */
    atomic_fetch_or_explicit(&place->gate, CLOSED, memory_order_acq_rel);
    for (int looks = 0; atomic_load_explicit(&place->gate, memory_order_acquire) != CLOSED; looks++) {
        if (looks < LOOKS)
            relax();
        else
            sched_yield();
    }
    atomic_store_explicit(&place->owned, false, memory_order_release);
    if (!atomic_load_explicit(&work->joined, memory_order_relaxed) && tu_clock_now() - start > LONELY)
        send_elsewhere(tu_pool_threads());
}

void tu_pool_run(const tu_pool_loop *loop) {
    if (loop->count <= 0)
        return;
    int64_t grain = loop->grain > 0 ? loop->grain : 1, pieces = (loop->count + grain - 1) / grain;
    int threads = pieces < loop->threads ? (int)pieces : loop->threads;
    place *place = NULL;
    if (threads > 1 && !inside) {
        start_threads(threads - 1);
        if (tu_pool_threads() > 0)
            place = claim_place();
    }
    if (place == NULL) {
        loop->body(loop->context, 0, loop->count);
        return;
    }
    if (pieces > (int64_t)threads * PIECES)
        pieces = (int64_t)threads * PIECES;
    work work = { .loop = *loop, .piece = (loop->count + pieces - 1) / pieces };
    run_together(place, &work, threads - 1);
}

/* ---- life ---- */

void tu_pool_hold(void) {
    pthread_mutex_lock(&pool.lock);
    if (!pool.prepared) {
        for (int i = 0; i < PLACES; i++)
            atomic_store(&pool.places[i].gate, CLOSED);
        pool.prepared = pthread_atfork(NULL, NULL, reset_in_child) == 0;
    }
    pool.users++;
    pthread_mutex_unlock(&pool.lock);
}

void tu_pool_release(void) {
    pthread_mutex_lock(&pool.lock);
    int count = --pool.users == 0 ? atomic_load(&pool.started) : 0;
    if (count > 0) {
        atomic_store(&pool.ending, true);
        next_round(INT_MAX);
        for (int i = 0; i < count; i++)
            pthread_join(pool.threads[i], NULL);
        atomic_store(&pool.started, 0);
        atomic_store(&pool.ending, false);
    }
    pthread_mutex_unlock(&pool.lock);
}

int tu_pool_threads(void) {
    return atomic_load_explicit(&pool.started, memory_order_relaxed);
}

static atomic_int share = INT_MAX; /* CPUs for one rank, as worlds say */
static atomic_int worlds;          /* that say so */

void tu_pool_share(int cpus) {
    cpus = cpus > 1 ? cpus : 1;
    atomic_fetch_add_explicit(&worlds, 1, memory_order_relaxed);
    if (cpus < atomic_load_explicit(&share, memory_order_relaxed))
        atomic_store_explicit(&share, cpus, memory_order_relaxed);
}

void tu_pool_unshare(void) {
    if (atomic_fetch_sub_explicit(&worlds, 1, memory_order_relaxed) == 1)
        atomic_store_explicit(&share, INT_MAX, memory_order_relaxed);
}

int tu_pool_shared(void) {
    return atomic_load_explicit(&share, memory_order_relaxed);
}

int tu_pool_worlds(void) {
    return atomic_load_explicit(&worlds, memory_order_relaxed);
}

int tu_pool_limit(void) {
    const char *text = secure_getenv("TUTTI_THREADS");
    char *end = NULL;
    long wanted = text != NULL && text[0] != 0 ? strtol(text, &end, 10) : -1;
    if (end != NULL && *end == 0 && wanted >= 0)
        return wanted < MOST_THREADS ? (int)wanted : MOST_THREADS;
    cpu_set_t set;
    int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    int limit = (cpus < tu_pool_shared() ? cpus : tu_pool_shared()) - 1;
    return limit < MOST_THREADS ? limit : MOST_THREADS;
}
