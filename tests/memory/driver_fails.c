/* SPDX-License-Identifier: Apache-2.0
 *
 * A driver of which any one call fails, on one of two ranks: opening, allocating, meeting, collectives and signals on
 * the stand-in of the driver. Nobody waits until a deadline, nothing is left behind, and the next world works.
 */
#include <dirent.h>
#include <dlfcn.h>

#include "../backends.h"

static void (*fail_call)(int nth);
static int (*calls_left)(void), (*objects)(void), (*mappings)(void);
static size_t (*bytes_in_use)(void);
static const char *(*call_made)(int nth);

#define CALLS 2048

typedef struct attempt {
    int nth;     /* the call of rank 1 that fails */
    bool failed; /* it was made, before what was made is given back: */
    int calls;   /* as many as this were made until then */
    const char *names[CALLS];
    tutti_status status[2];
    char words[2][512];
} attempt;

static tutti_status work(tutti_world *world, tutti_memory **memory, tutti_peers **peers) {
    tutti_group *group = tutti_world_group(world);
    tutti_status status = tutti_backend_open(world, "cuda", NULL);
    if (status == TUTTI_OK)
        status =
            tutti_memory_alloc(world, 65536, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA_AT(0)), memory);
    if (status == TUTTI_OK)
        status = tutti_memory_rendezvous(*memory, group, peers);
    char *data = *memory != NULL ? tutti_memory_data(*memory) : NULL;
    if (status == TUTTI_OK)
        status = tutti_all_reduce(group, data, data, 64, TUTTI_F32, TUTTI_SUM, NULL);
    if (status == TUTTI_OK)
        status = tutti_all_gather(group, data, data + 32768, 4096, TUTTI_U8, NULL);
    if (status == TUTTI_OK)
        status = tutti_peers_barrier(*peers, 0, NULL);
    if (status == TUTTI_OK)
        status = tutti_group_check(group);
    return status;
}

static tutti_status be_failed(tutti_world *world, void *argument) {
    attempt *attempt = argument;
    tutti_memory *memory = NULL;
    tutti_peers *peers = NULL;
    int rank = tutti_world_rank(world);
    if (rank == 1)
        fail_call(attempt->nth);
    attempt->status[rank] = work(world, &memory, &peers);
    if (attempt->status[rank] != TUTTI_OK)
        snprintf(attempt->words[rank], sizeof attempt->words[rank], "%s", tutti_error_message());
    if (rank == 1) {
        attempt->failed = calls_left() == 0;
        while (attempt->calls < CALLS && (attempt->names[attempt->calls] = call_made(attempt->calls + 1)) != NULL)
            attempt->calls++;
    }
    fail_call(0); /* who cannot enter a context cannot give back what is there */
    if (peers != NULL)
        tutti_peers_release(peers);
    if (memory != NULL)
        tutti_memory_release(memory);
    return attempt->status[rank];
}

static int descriptors(void) {
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;
    while (readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count;
}

/* What is there, besides what the process always has. */
static void count(int counts[4]) {
    counts[0] = objects();
    counts[1] = mappings();
    counts[2] = (int)bytes_in_use();
    counts[3] = descriptors();
}

static void try(int nth, const int before[4], attempt *one) {
    static const char *const kinds[] = { "objects", "mappings", "bytes", "descriptors" };
    int after[4];
    *one = (attempt){ .nth = nth };
    tutti_status status = tutti_spawn(TUTTI_SPAWN_THREADS, 2, be_failed, one);
    const char *name = nth <= one->calls ? one->names[nth - 1] : "nothing";
    if ((status == TUTTI_OK) != (one->status[0] == TUTTI_OK && one->status[1] == TUTTI_OK))
        FAIL("call %d (%s): the world ends with %d", nth, name, status);
    if ((one->status[0] == TUTTI_OK) != (one->status[1] == TUTTI_OK))
        FAIL("call %d (%s): %d '%s' on rank 0, %d '%s' on rank 1", nth, name, one->status[0], one->words[0],
             one->status[1], one->words[1]);
    for (int rank = 0; rank < 2; rank++)
        if (one->status[rank] == TUTTI_ERROR_TIMEOUT)
            FAIL("call %d (%s): rank %d waited until its deadline: %s", nth, name, rank, one->words[rank]);
    count(after);
    for (int i = 0; i < 4; i++)
        if (after[i] != before[i])
            FAIL("call %d (%s): %d %s are left, and %d were before", nth, name, after[i], kinds[i], before[i]);
}

TEST_LIMIT(any_call_of_the_driver_may_fail_on_one_rank, 240) {
    backends_need("cuda", true);
    if (!backends_standin())
        SKIP("only a stand-in fails when it is told to");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(driver != NULL);
    fail_call = (__typeof__(fail_call))(uintptr_t)dlsym(driver, "standin_fail_call");
    calls_left = (__typeof__(calls_left))(uintptr_t)dlsym(driver, "standin_calls_left");
    call_made = (__typeof__(call_made))(uintptr_t)dlsym(driver, "standin_call_made");
    objects = (__typeof__(objects))(uintptr_t)dlsym(driver, "standin_objects");
    mappings = (__typeof__(mappings))(uintptr_t)dlsym(driver, "standin_mappings");
    bytes_in_use = (__typeof__(bytes_in_use))(uintptr_t)dlsym(driver, "standin_bytes_in_use");
    static attempt whole, one;
    whole.nth = 1 << 30; /* none */
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, be_failed, &whole));
    int before[4], failed = 0;
    count(before);
    CHECK(whole.calls > 50 && whole.calls < CALLS);
    for (int nth = 1; nth <= whole.calls;
         nth++) { /* of calls of one kind in a row, as for each kernel, the first two */
        if (nth > 2 && whole.names[nth - 1] == whole.names[nth - 2] && whole.names[nth - 1] == whole.names[nth - 3])
            continue;
        try(nth, before, &one);
        failed += one.failed && one.status[1] != TUTTI_OK;
    }
    CHECK(failed > 20);
}
