/* SPDX-License-Identifier: Apache-2.0
 *
 * Tests of operations on symmetric memory, whichever backend it has: that of the CPU, or the one that TEST_BACKEND
 * names (cuda, nvshmem, nccl), on a GPU or on the stand-in of the driver (TEST_STANDIN). The number of ranks is
 * TEST_GPU_RANKS, else 3. Ranks are threads and processes, as far as the backend takes them: NVSHMEM takes processes;
 * NCCL's stand-in takes threads.
 */
#ifndef TUTTI_TESTS_BACKENDS_H
#define TUTTI_TESTS_BACKENDS_H

#include <sched.h>
#include <string.h>
#include <unistd.h>

#include <tutti/backend.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "harness.h"
#include "memory/backend.h"

/* NULL: the CPU's own. */
static inline const char *backends_name(void) {
    return getenv("TEST_BACKEND");
}

static inline bool backends_standin(void) {
    return getenv("TEST_STANDIN") != NULL;
}

static inline int backends_ranks(void) {
    const char *ranks = getenv("TEST_GPU_RANKS");
    return ranks != NULL ? atoi(ranks) : 3;
}

/* Skips what the machine, the build or the backend does not have. */
static inline void backends_need(const char *name, bool threads) {
    const char *folder = getenv("TUTTI_PLUGIN_PATH");
    char path[4096];
    if (name == NULL)
        return;
    snprintf(path, sizeof path, "%s/libtutti-%s.so", folder != NULL ? folder : ".", name);
    if (!backends_standin() && access("/dev/nvidiactl", F_OK) != 0)
        SKIP("no GPU on this machine");
    if (access(path, F_OK) != 0)
        SKIP("the backend was not built");
    if (strcmp(name, "nvshmem") == 0 && threads)
        SKIP("NVSHMEM takes a process for each rank");
    if (strcmp(name, "nccl") == 0 && backends_standin() != threads)
        SKIP("the stand-in of NCCL takes threads, and NCCL a host for each rank");
}

static _Thread_local tutti_call backends_options;
static _Thread_local const tu_backend *backends_table;
static _Thread_local void *backends_state;

static inline const tutti_call *backends_call(void) {
    return &backends_options;
}

/* In each rank: opens the backend, makes its memory that of GPUs, and has a stream of the rank's own. */
static inline void backends_begin(tutti_world *world) {
    const char *name = backends_name();
    tutti_memory *first;
    backends_options = (tutti_call)TUTTI_CALL_INIT;
    backends_table = NULL;
    if (name == NULL)
        return;
    CHECK_OK(tutti_backend_open(world, name, NULL));
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, name));
    CHECK_OK(tutti_memory_alloc(world, 1, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA_AT(0)), &first));
    tutti_memory_release(first);
    CHECK_OK(tu_backend_get(world, TUTTI_CUDA, &backends_table, &backends_state));
    CHECK_OK(backends_table->streams->create(backends_state, 0, &backends_options.stream));
}

static inline tutti_peers *backends_meet(tutti_world *world, tutti_group *group, size_t bytes, tutti_memory **memory) {
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    tutti_peers *peers;
    options.device = backends_name() == NULL ? TUTTI_CPU : TUTTI_CUDA_AT(0);
    CHECK_OK(tutti_memory_alloc(world, bytes, &options, memory));
    CHECK_OK(tutti_memory_rendezvous(*memory, group, &peers));
    return peers;
}

/* Waits until everything on this rank's stream is over. */
static inline void backends_settle(void) {
    void *event;
    bool over = false;
    if (backends_table == NULL)
        return;
    CHECK_OK(backends_table->streams->mark(backends_state, 0, backends_options.stream, &event));
    while (!over) {
        CHECK_OK(backends_table->streams->test(backends_state, 0, event, &over));
        sched_yield();
    }
    backends_table->streams->unmark(backends_state, 0, event);
}

/* A test on every rank, as threads and as processes. */
#define TEST_BACKENDS(sentence, body)                                           \
    TEST(sentence##_as_threads) {                                               \
        backends_need(backends_name(), true);                                   \
        test_threads(backends_ranks(), body, NULL);                             \
        if (backends_name() != NULL)                                            \
            _exit(0); /* the driver keeps descriptors and threads of its own */ \
    }                                                                           \
    TEST(sentence##_as_processes) {                                             \
        backends_need(backends_name(), false);                                  \
        test_processes(backends_ranks(), body, NULL);                           \
    }

#endif
