/* SPDX-License-Identifier: Apache-2.0
 *
 * A pool of threads for loops. One loop runs at a time: its owner publishes it, the threads take pieces off a shared
 * counter, and the owner works along. A thread that comes late, because the machine is busy with something else, finds
 * the loop closed and is not waited for. Threads look for the next loop for a short while, then sleep.
 */
#include "tensor/parallel.h"

#include <cblas.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define THREADS 64
#define LOOKS                                                                                               \
    4000 /* at the word before going to sleep: some microseconds, the gap between the operators of one step \
          */

typedef struct tu_loop_job {
    tu_parallel_body *body;
    void *context;
    int64_t count, piece;
    _Atomic int64_t next; /* the first item that nobody has taken */
} tu_loop_job;

static struct {
    pthread_mutex_t lock;      /* held by the owner of the running loop, from start to end */
    int threads;               /* started; under lock */
    pid_t process;             /* that started them; a forked child has none */
    tu_loop_job *job;          /* written under lock while the gate is closed; read by those inside the gate */
    _Atomic uint32_t round;    /* futex word; the owner adds 1 per loop (release), threads read it (acquire) */
    _Atomic uint32_t sleeping; /* threads in or near the futex */
    /* How many threads are inside, and whether more may enter. A thread adds 1 (acquire: pairs with the owner's
     * opening), turns back where the gate is closed, and subtracts 1 when done (release: pairs with the owner's wait
     * for 0). */
    _Atomic uint32_t gate;
} pool = { .lock = PTHREAD_MUTEX_INITIALIZER, .gate = 0x80000000u };

#define GATE_CLOSED 0x80000000u

static _Thread_local bool inside;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_pieces(tu_loop_job *job) {
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&job->next, job->piece, memory_order_relaxed);
        if (begin >= job->count)
            return;
        int64_t end = begin + job->piece < job->count ? begin + job->piece : job->count;
        job->body(job->context, begin, end);
    }
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

static void *worker(void *argument) {
    uint32_t seen = (uint32_t)(uintptr_t)argument;
    inside = true;
    for (;;) {
        wait_for_round(seen);
        seen = atomic_load_explicit(&pool.round, memory_order_acquire);
        if (!(atomic_fetch_add_explicit(&pool.gate, 1, memory_order_acquire) & GATE_CLOSED))
            take_pieces(pool.job);
        atomic_fetch_sub_explicit(&pool.gate, 1, memory_order_release);
    }
    return NULL;
}

int tu_parallel_threads(void) {
    int threads = 1;
#ifdef OPENBLAS_VERSION
    threads = openblas_get_num_threads();
#else
    threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
#endif
    return threads < 1 ? 1 : threads > THREADS ? THREADS : threads;
}

/* Under the lock. Fewer threads than wanted is no error: the loop runs on those there are. */
static void start_threads(int wanted) {
    if (pool.process != getpid()) { /* first use, or a forked child, where only the calling thread lives on */
        pool.process = getpid();
        pool.threads = 0;
        atomic_store(&pool.sleeping, 0);
        atomic_store(&pool.gate, GATE_CLOSED);
    }
    while (pool.threads < wanted) {
        sigset_t all, old;
        sigfillset(&all);
        pthread_attr_t attributes;
        pthread_t thread;
        if (pthread_attr_init(&attributes) != 0)
            return;
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        uint32_t round = atomic_load(&pool.round);
        int error = pthread_create(&thread, &attributes, worker, (void *)(uintptr_t)round);
        if (error == 0)
            pthread_setname_np(thread, "tutti-tensor");
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        pthread_attr_destroy(&attributes);
        if (error != 0)
            return;
        pool.threads++;
    }
}

static void run_together(tu_loop_job *job, int wanted) {
    start_threads(wanted - 1);
    pool.job = job;
    atomic_fetch_and_explicit(&pool.gate, ~GATE_CLOSED, memory_order_release);
    atomic_fetch_add(&pool.round, 1); /* pairs with the load in wait_for_round */
    if (atomic_load(&pool.sleeping) > 0)
        syscall(SYS_futex, &pool.round, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    inside = true;
    take_pieces(job);
    inside = false;
    /* All pieces are taken; what is left is the tail of the pieces that threads inside hold. */
    atomic_fetch_or_explicit(&pool.gate, GATE_CLOSED, memory_order_acq_rel);
    for (int looks = 0; atomic_load_explicit(&pool.gate, memory_order_acquire) != GATE_CLOSED; looks++) {
        if (looks < LOOKS)
            relax();
        else
            sched_yield();
    }
}

void tu_parallel(int64_t count, int64_t grain, tu_parallel_body *body, void *context) {
    if (count <= 0)
        return;
    int threads = count > grain ? tu_parallel_threads() : 1;
    if (threads == 1 || inside || pthread_mutex_trylock(&pool.lock) != 0) {
        body(context, 0, count);
        return;
    }
    int64_t pieces = count / (grain > 0 ? grain : 1);
    if (pieces > threads * 4)
        pieces = threads * 4;
    if (pieces < 2)
        pieces = 2;
    tu_loop_job job = { .body = body, .context = context, .count = count, .piece = (count + pieces - 1) / pieces };
    run_together(&job, threads);
    pthread_mutex_unlock(&pool.lock);
}
