/* SPDX-License-Identifier: Apache-2.0
 *
 * Jobs for tests: the body runs once per rank, on an open job that is closed afterwards; as threads or as processes.
 */
#ifndef TUTTI_TESTS_JOB_H
#define TUTTI_TESTS_JOB_H

#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "../harness.h"
#include "job/inner.h"

typedef void job_body(tu_job *job);

static inline tu_job_options job_options(tutti_store *store, int rank, int size) {
    return (tu_job_options){ .store = store, .name = "test", .world_rank = rank, .world_size = size,
                             .deadline = tu_deadline(30 * TU_SECOND), .spin = -1 };
}

typedef struct job_thread {
    tutti_store *store;
    job_body *body;
    int rank, size;
    pthread_t thread;
} job_thread;

static inline void *job_run_thread(void *argument) {
    job_thread *self = argument;
    tu_job_options options = job_options(self->store, self->rank, self->size);
    tu_job *job;
    CHECK_OK(tu_job_open(&options, &job));
    self->body(job);
    tu_job_close(job);
    return NULL;
}

static inline void job_threads(int size, job_body *body) {
    job_thread threads[64];
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

#endif
