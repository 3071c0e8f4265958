/* SPDX-License-Identifier: Apache-2.0
 *
 * Jobs for tests: the body runs once per rank, on an open job that is closed afterwards; as threads, as processes, or
 * both. Processes meet in a real store, served by the test on an abstract socket.
 */
#ifndef TUTTI_TESTS_JOB_H
#define TUTTI_TESTS_JOB_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../harness.h"
#include "base/clock.h"
#include "base/error.h"
#include "job/inner.h"

/* What all ranks have reserved, by the ledger. */
static inline int64_t job_reserved(const tu_job *job) {
    int64_t sum = 0;
    for (int rank = 0; rank < job->size; rank++)
        sum += atomic_load_explicit(&tu_page_slot(job->page, rank)->reserved, memory_order_relaxed);
    return sum;
}

#define JOB_RANKS 64

typedef void job_body(tu_job *job);

#define JOB_TEST(sentence, ranks)              \
    static void body_##sentence(tu_job *job);  \
    TEST(sentence##_as_threads) {              \
        job_threads(ranks, body_##sentence);   \
    }                                          \
    TEST(sentence##_as_processes) {            \
        job_processes(ranks, body_##sentence); \
    }                                          \
    static void body_##sentence(tu_job *job)

static inline tu_job_options job_options(tutti_store *store, int rank, int size) {
    return (tu_job_options){ .store = store,
                             .name = "test",
                             .world_rank = rank,
                             .world_size = size,
                             .deadline = tu_deadline(60 * TU_SECOND),
                             .spin = -1 };
}

/* ---- a meeting place for processes, served by a process of its own ---- */

typedef struct job_place {
    pid_t server;
    char address[64];
} job_place;

static inline void job_place_open(job_place *place) {
    static int count;
    int ready[2];
    char byte;
    snprintf(place->address, sizeof place->address, "unix:@tutti-test-%d-%d", (int)getpid(), ++count);
    CHECK_EQ(pipe(ready), 0);
    fflush(NULL);
    place->server = fork();
    CHECK(place->server >= 0);
    if (place->server == 0) {
        tutti_store *server;
        close(ready[0]);
        CHECK_OK(tutti_store_serve(place->address, 0, NULL, &server));
        CHECK_EQ(write(ready[1], "x", 1), 1);
        for (;;)
            pause();
    }
    close(ready[1]);
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
}

static inline void job_place_close(job_place *place) {
    kill(place->server, SIGKILL);
    CHECK_EQ(waitpid(place->server, NULL, 0), place->server);
}

static inline tutti_store *job_place_enter(const job_place *place) {
    tutti_store *store;
    CHECK_OK(tutti_store_open_tcp(place->address, 0, NULL, &store));
    return store;
}

/* ---- ranks ---- */

static inline void job_run(tutti_store *store, int rank, int size, job_body *body) {
    tu_job_options options = job_options(store, rank, size);
    tu_job *job;
    CHECK_OK(tu_job_open(&options, &job));
    body(job);
    tu_job_close(job);
}

/* A child process that runs one rank and must leave nothing behind. */
static inline pid_t job_start_process(const job_place *place, int rank, int size, job_body *body) {
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child != 0)
        return child;
    test_fail_disarm();
    tutti_store *store = job_place_enter(place);
    int descriptors = test_count_descriptors();
    job_run(store, rank, size, body);
    CHECK_EQ(test_count_descriptors(), descriptors);
    CHECK_EQ(test_count_mappings(), 0);
    tutti_store_release(store);
    exit(0);
}

static inline int job_wait_process(pid_t child) {
    int status;
    while (waitpid(child, &status, 0) < 0)
        CHECK_EQ(errno, EINTR);
    return status;
}

static inline void job_processes(int size, job_body *body) {
    job_place place;
    pid_t children[JOB_RANKS];
    job_place_open(&place);
    for (int rank = 0; rank < size; rank++)
        children[rank] = job_start_process(&place, rank, size, body);
    for (int rank = 0; rank < size; rank++) {
        int status = job_wait_process(children[rank]);
        if (status != 0)
            FAIL("rank %d ended with wait status %d", rank, status);
    }
    job_place_close(&place);
}

typedef struct job_thread {
    tutti_store *store;
    job_body *body;
    int rank, size;
    pthread_t thread;
} job_thread;

static inline void *job_run_thread(void *argument) {
    job_thread *self = argument;
    job_run(self->store, self->rank, self->size, self->body);
    return NULL;
}

static inline void job_threads(int size, job_body *body) {
    job_thread threads[JOB_RANKS];
    tutti_store *store;
    CHECK_OK(tutti_store_open_memory(&store));
    for (int rank = 0; rank < size; rank++) {
        threads[rank] = (job_thread){ .store = store, .body = body, .rank = rank, .size = size };
        CHECK_EQ(pthread_create(&threads[rank].thread, NULL, job_run_thread, &threads[rank]), 0);
    }
    for (int rank = 0; rank < size; rank++)
        pthread_join(threads[rank].thread, NULL);
    tutti_store_release(store);
}

/* ---- exchanges among all ranks of a job ---- */

typedef struct job_exchange {
    int ranks[JOB_RANKS];
    tu_exchange exchange;
} job_exchange;

static inline tu_exchange *job_exchange_all(job_exchange *space, tu_job *job, uint64_t key, uint64_t sequence,
                                            const void *payload, size_t bytes, const tu_piece *piece) {
    for (int i = 0; i < tu_job_size(job); i++)
        space->ranks[i] = i;
    space->exchange = (tu_exchange){ .ranks = space->ranks,
                                     .count = tu_job_size(job),
                                     .me = tu_job_rank(job),
                                     .key = key,
                                     .sequence = sequence,
                                     .purpose = "test",
                                     .payload = payload,
                                     .bytes = bytes,
                                     .piece = piece,
                                     .deadline = tu_deadline(60 * TU_SECOND) };
    return &space->exchange;
}

/* Everybody waits for everybody. */
static inline void job_meet(tu_job *job, uint64_t sequence) {
    job_exchange space;
    CHECK_OK(tu_job_exchange(job, job_exchange_all(&space, job, UINT64_MAX, sequence, NULL, 0, NULL), NULL, NULL));
}

#endif
