/* SPDX-License-Identifier: Apache-2.0
 *
 * The process-wide object: see process.h.
 */
#include "tensor/process.h"

#include <cblas.h>
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "base/result.h"
#include "tensor/handle.h"
#include "tensor/large.h"

#define STORAGE_LOCKS 32 /* a power of two, below the 64 that sanitizers bear; a storage uses that of its address */

typedef struct tallies {
    int64_t tensors, storages, scopes, nodes;
} tallies;

typedef struct numbered {
    struct numbered *next;
    int count;
    char name[];
} numbered;

static struct {
    pthread_mutex_t lock; /* guards what is above `handles` */
    bool prepared;        /* for threads that end, and for a fork */
    pthread_key_t exit_key;
    tu_thread *threads;
    tallies gone; /* of threads that have ended, or that nobody lists */
    bool holds_pool;
    numbered *names;
    atomic_flag told[TU_WARNINGS];
    _Atomic int limit; /* of threads that compute, the caller's included; 0: not known yet */
    _Atomic int share; /* of the CPUs that it was found with */
    tu_handle_window handles;
    tu_large large;
    tu_process_devices devices;
    pthread_mutex_t hooks;
    pthread_mutex_t storages[STORAGE_LOCKS];
} process = { .lock = PTHREAD_MUTEX_INITIALIZER,
              .told = { [0 ... TU_WARNINGS - 1] = ATOMIC_FLAG_INIT },
              .handles = { .lock = PTHREAD_MUTEX_INITIALIZER },
              .large = { .lock = PTHREAD_MUTEX_INITIALIZER },
              .devices = { .lock = PTHREAD_MUTEX_INITIALIZER },
              .hooks = PTHREAD_MUTEX_INITIALIZER,
              .storages = { [0 ... STORAGE_LOCKS - 1] = PTHREAD_MUTEX_INITIALIZER } };

pthread_mutex_t *tu_process_hooks_lock(void) {
    return &process.hooks;
}

pthread_mutex_t *tu_process_storage_lock(const tu_storage *storage) {
    return &process.storages[((uintptr_t)storage >> 6) & (STORAGE_LOCKS - 1)];
}

bool tu_process_tell_once(tu_warning warning) {
    return !atomic_flag_test_and_set_explicit(&process.told[warning], memory_order_relaxed);
}

int tu_process_number(const char *name) {
    pthread_mutex_lock(&process.lock);
    numbered *one = process.names;
    while (one != NULL && strcmp(one->name, name) != 0)
        one = one->next;
    size_t bytes = sizeof *one + strlen(name) + 1;
    if (one == NULL && (one = calloc(1, bytes)) != NULL) {
        strcpy(one->name, name);
        one->next = process.names;
        process.names = one;
    }
    int count = one != NULL ? ++one->count : 1;
    pthread_mutex_unlock(&process.lock);
    return count;
}

static void free_names(numbered *list) {
    for (numbered *one = list, *next; one != NULL; one = next) {
        next = one->next;
        free(one);
    }
}

tu_handle_window *tu_process_handles(void) {
    return &process.handles;
}

tu_large *tu_process_large(void) {
    return &process.large;
}

tu_process_devices *tu_process_devices_get(void) {
    return &process.devices;
}

/* ---- threads ---- */

static int64_t tally(_Atomic int64_t *value) {
    return atomic_load_explicit(value, memory_order_relaxed);
}

static void add_tallies(tallies *sum, tu_thread *thread) {
    sum->tensors += tally(&thread->tensors);
    sum->storages += tally(&thread->storages);
    sum->scopes += tally(&thread->open_scopes);
    sum->nodes += tally(&thread->nodes);
}

void tu_process_collect(tu_thread *self) {
    pthread_mutex_lock(&process.lock);
    add_tallies(&process.gone, self);
    pthread_mutex_unlock(&process.lock);
    _Atomic int64_t *const all[] = { &self->tensors, &self->storages, &self->open_scopes, &self->nodes };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        atomic_store_explicit(all[i], 0, memory_order_relaxed);
}

static void thread_exit(void *argument) {
    tu_thread *self = argument;
    tu_thread_end(self);
    pthread_mutex_lock(&process.lock);
    *self->link = self->next;
    if (self->next != NULL)
        self->next->link = self->link;
    add_tallies(&process.gone, self);
    pthread_mutex_unlock(&process.lock);
    *self = (tu_thread){ 0 };
}

static void enlist(tu_thread *self) {
    self->next = process.threads;
    self->link = &process.threads;
    if (process.threads != NULL)
        process.threads->link = &self->next;
    process.threads = self;
}

/* ---- forks ---- */

/* Nobody is in the middle of a change while a child is made. The order does not matter, since whoever holds one of
 * these locks takes no other. That of the devices is not among them: a driver that is opened under it may fork. */
static void for_each_lock(int (*act)(pthread_mutex_t *)) {
    act(&process.lock);
    act(&process.handles.lock);
    act(&process.large.lock);
    act(&process.hooks);
    for (int i = 0; i < STORAGE_LOCKS; i++)
        act(&process.storages[i]);
}

static void lock_for_fork(void) {
    for_each_lock(pthread_mutex_lock);
}

static void unlock_after_fork(void) {
    for_each_lock(pthread_mutex_unlock);
}

/* The calling thread is the only one that lives on; what the others had counts as left behind. */
static void reset_in_child(void) {
    tu_thread *self = tu_self();
    unlock_after_fork();
    pthread_mutex_init(&process.devices.lock, NULL);
    for (tu_thread *thread = process.threads; thread != NULL; thread = thread->next)
        if (thread != self)
            add_tallies(&process.gone, thread);
    process.threads = NULL;
    if (self->registered)
        enlist(self);
}

int tu_process_add_thread(tu_thread *self) {
    int error = 0;
    pthread_mutex_lock(&process.lock);
    if (!process.prepared) {
        error = pthread_key_create(&process.exit_key, thread_exit);
        if (error == 0 && (error = pthread_atfork(lock_for_fork, unlock_after_fork, reset_in_child)) != 0)
            pthread_key_delete(process.exit_key);
        process.prepared = error == 0;
    }
    if (error == 0)
        error = pthread_setspecific(process.exit_key, self);
    if (error == 0)
        enlist(self);
    pthread_mutex_unlock(&process.lock);
    return error;
}

tutti_status tt_count(tt_counts *counts) {
    pthread_mutex_lock(&process.lock);
    tallies sum = process.gone;
    for (tu_thread *thread = process.threads; thread != NULL; thread = thread->next)
        add_tallies(&sum, thread);
    pthread_mutex_unlock(&process.lock);
    tt_counts full = { .tensors = sum.tensors, .storages = sum.storages, .scopes = sum.scopes, .nodes = sum.nodes };
    return tu_result_copy("tt_counts", &full, sizeof full, counts);
}

/* ---- threads that compute ---- */

/* The pool is held and released without the lock: it has one of its own, and the C library's, which a fork holds while
 * it waits for this one. */
static int find_limit(void) {
    tu_pool_hold();
    pthread_mutex_lock(&process.lock);
    bool held = process.holds_pool;
    process.holds_pool = true;
    int limit = tu_pool_limit() + 1;
    atomic_store_explicit(&process.share, tu_pool_shared(), memory_order_relaxed);
    atomic_store_explicit(&process.limit, limit, memory_order_relaxed);
    pthread_mutex_unlock(&process.lock);
    if (held)
        tu_pool_release();
    return limit;
}

int tu_process_compute_threads(void) {
    int threads = atomic_load_explicit(&process.limit, memory_order_relaxed);
    if (threads == 0 || atomic_load_explicit(&process.share, memory_order_relaxed) != tu_pool_shared())
        threads = find_limit(); /* the first time, and after a world was opened */
#ifdef OPENBLAS_VERSION
    int of_blas = openblas_get_num_threads(); /* a program that limits its BLAS means our loops too */
    threads = of_blas < threads ? of_blas : threads;
#endif
    return threads;
}

/* ---- the end ---- */

tutti_status tt_finalize(void) {
    tt_counts counts = { .size = sizeof counts };
    tutti_status status = tt_count(&counts);
    if (status != TUTTI_OK)
        return status;
    tt_memory_trim();
    pthread_mutex_lock(&process.lock);
    bool held = process.holds_pool;
    process.holds_pool = false;
    atomic_store_explicit(&process.limit, 0, memory_order_relaxed);
    free_names(process.names);
    process.names = NULL;
    pthread_mutex_unlock(&process.lock);
    if (held)
        tu_pool_release();
    if (counts.storages == 0)
        tu_devices_close(&process.devices);
    if (counts.tensors + counts.storages + counts.scopes + counts.nodes == 0)
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_STATE,
                    "tt_finalize: %lld tensors, %lld storages, %lld nodes and %lld scopes are still alive; close the "
                    "scopes and release what tt_keep gave",
                    (long long)counts.tensors, (long long)counts.storages, (long long)counts.nodes,
                    (long long)counts.scopes);
}
