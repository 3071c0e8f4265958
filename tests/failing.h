/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything that a backend calls, failing once in turn, on one of two ranks: calls of the driver's stand-in or of a
 * library's, or allocations on the host. Each time both ranks hear of it, with words, and nobody waits until a
 * deadline; nothing is left behind, and the next attempt works.
 */
#ifndef TUTTI_TESTS_FAILING_H
#define TUTTI_TESTS_FAILING_H

#include <dirent.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include "backends.h"

#define FAILING_CALLS 4096
#define FAILING_NEVER (1 << 30)

/* What can be made to fail. */
typedef struct failing {
    void (*fail)(int nth);        /* the nth call from now on; 0: none any more */
    int (*left)(void);            /* calls until then; 0: it has failed */
    const char *(*made)(int nth); /* what was called the nth time since; NULL: there were no more */
} failing;

static inline void *failing_find(void *library, const char *prefix, const char *name) {
    char full[64];
    snprintf(full, sizeof full, "%s_%s", prefix, name);
    void *found = dlsym(library, full);
    CHECK(found != NULL);
    return found;
}

/* Of a stand-in. */
static inline failing failing_calls(const char *library_name, const char *prefix) {
    failing calls;
    void *library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    *(void **)&calls.fail = failing_find(library, prefix, "fail_call");
    *(void **)&calls.left = failing_find(library, prefix, "calls_left");
    *(void **)&calls.made = failing_find(library, prefix, "call_made");
    return calls;
}

/* ---- one attempt ---- */

/* In memory that processes share. */
typedef struct failing_attempt {
    int victim;  /* the rank that fails … */
    int nth;     /* … in this call of its own */
    bool failed; /* it was made, before what was made is given back: */
    int calls;   /* as many as this were made until then */
    char names[FAILING_CALLS][48];
    tutti_status status[2], again[2]; /* of each rank; and of the attempt after it, where there was one */
    char words[2][512], words_again[2][512];
    int left[5]; /* of that rank, as failing_count tells */
} failing_attempt;

/* What a rank does: everything that it makes it leaves in *memory and *peers. */
typedef tutti_status failing_work(tutti_world *world, tutti_memory **memory, tutti_peers **peers);

/* What most works begin with: the backend, 64 KiB of its memory on the device, which meets with all ranks. */
static inline tutti_status failing_begin(tutti_world *world, const char *backend, tutti_memory **memory,
                                         tutti_peers **peers) {
    tutti_status status = tutti_backend_open(world, backend, NULL);
    if (status == TUTTI_OK)
        status = tutti_memory_set_backend(world, TUTTI_CUDA, backend);
    if (status == TUTTI_OK)
        status =
            tutti_memory_alloc(world, 65536, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA_AT(0)), memory);
    return status == TUTTI_OK ? tutti_memory_rendezvous(*memory, tutti_world_group(world), peers) : status;
}

/* And what they end with, so that one who is through hears of one who is not. */
static inline tutti_status failing_end(tutti_group *group) {
    tutti_status status = tutti_barrier(group, NULL);
    return status == TUTTI_OK ? tutti_group_check(group) : status;
}

static const char *const failing_kinds[] = { "objects", "mappings", "bytes", "descriptors", "things of the library" };

/* What there is, besides what the process always has. `library`: how much a library has, which is asked first, so that
 * it may give back what it keeps; NULL: nothing. */
static inline void failing_count(int counts[5], int (*library)(void)) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*objects)(void), (*mappings)(void);
    size_t (*bytes)(void);
    *(void **)&objects = failing_find(driver, "standin", "objects");
    *(void **)&mappings = failing_find(driver, "standin", "mappings");
    *(void **)&bytes = failing_find(driver, "standin", "bytes_in_use");
    counts[4] = library != NULL ? library() : 0;
    counts[0] = objects();
    counts[1] = mappings();
    counts[2] = (int)bytes();
    counts[3] = test_count_descriptors();
}

/* One rank fails where the attempt says. */
static inline tutti_status failing_run(tutti_world *world, const failing *calls, failing_attempt *attempt,
                                       failing_work *work) {
    tutti_memory *memory = NULL;
    tutti_peers *peers = NULL;
    int rank = tutti_world_rank(world);
    if (rank == attempt->victim)
        calls->fail(attempt->nth);
    tutti_status status = attempt->status[rank] = work(world, &memory, &peers);
    if (status != TUTTI_OK)
        snprintf(attempt->words[rank], sizeof attempt->words[rank], "%s", tutti_error_message());
    if (rank == attempt->victim) {
        const char *name;
        attempt->failed = calls->left() == 0;
        for (int i = 0; i < FAILING_CALLS && (name = calls->made(i + 1)) != NULL; i++)
            snprintf(attempt->names[attempt->calls++], sizeof attempt->names[0], "%s", name);
        calls->fail(0); /* who cannot enter a context cannot give back what is there */
    }
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    return status;
}

static inline const char *failing_name(const failing_attempt *attempt) {
    return attempt->nth <= attempt->calls ? attempt->names[attempt->nth - 1] : "nothing";
}

/* Both ranks have heard of it, and neither waited. */
static inline void failing_judge(const failing_attempt *one) {
    if ((one->status[0] == TUTTI_OK) != (one->status[1] == TUTTI_OK))
        FAIL("call %d (%s): %d '%s' on rank 0, %d '%s' on rank 1", one->nth, failing_name(one), one->status[0],
             one->words[0], one->status[1], one->words[1]);
    for (int rank = 0; rank < 2; rank++) {
        if (one->status[rank] == TUTTI_ERROR_TIMEOUT)
            FAIL("call %d (%s): rank %d waited until its deadline: %s", one->nth, failing_name(one), rank,
                 one->words[rank]);
        if (one->status[rank] != TUTTI_OK && one->words[rank][0] == 0)
            FAIL("call %d (%s): rank %d fails without words", one->nth, failing_name(one), rank);
    }
}

static inline void failing_compare(const failing_attempt *one, const int before[5], const int after[5]) {
    for (int i = 0; i < 5; i++)
        if (after[i] != before[i])
            FAIL("call %d (%s): %d %s are left, and %d were before", one->nth, failing_name(one), after[i],
                 failing_kinds[i], before[i]);
}

/* Of calls that come again and again, as two for each kernel, the first ones fail in turn. */
static inline bool failing_skips(const failing_attempt *whole, int nth) {
    bool again = false;
    for (int period = 1; period <= 2 && !again; period++)
        again = nth > 2 * period && strcmp(whole->names[nth - 1], whole->names[nth - 1 - period]) == 0 &&
                strcmp(whole->names[nth - 1], whole->names[nth - 1 - 2 * period]) == 0;
    return again;
}

static inline failing_attempt *failing_new(int victim) {
    failing_attempt *made = mmap(NULL, sizeof *made, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(made != MAP_FAILED);
    made->victim = victim;
    made->nth = FAILING_NEVER;
    return made;
}

/* ---- ranks that are threads ---- */

typedef struct failing_threads {
    const failing *calls;
    failing_work *work;
    failing_attempt *attempt;
} failing_threads;

static inline tutti_status failing_thread(tutti_world *world, void *argument) {
    const failing_threads *threads = argument;
    return failing_run(world, threads->calls, threads->attempt, threads->work);
}

/* Who cannot enter a context, or wait for what runs there, cannot tell whether memory is still used, and keeps it. */
static inline bool failing_keeps(const failing_attempt *one) {
    const char *name = failing_name(one);
    return strcmp(name, "cuCtxPushCurrent") == 0 || strstr(name, "Synchronize") != NULL;
}

/* Which calls fail in turn. */
typedef struct failing_choice {
    int first, step;
    bool releases; /* the work itself gives back what it made */
} failing_choice;

/* Returns how many attempts failed. */
static inline int failing_some(const failing *calls, int victim, failing_work *work, int (*library)(void),
                               failing_choice choice) {
    failing_attempt *whole = failing_new(victim), *one = failing_new(victim);
    int before[5], after[5], failed = 0;
    /* What the process does once, such as loading kernels, is done by one rank or the other. */
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, failing_thread, &(failing_threads){ calls, work, one }));
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, failing_thread, &(failing_threads){ calls, work, whole }));
    CHECK(whole->calls < FAILING_CALLS);
    failing_count(before, library);
    for (int nth = choice.first; nth <= whole->calls; nth += choice.step) {
        if (failing_skips(whole, nth))
            continue;
        *one = (failing_attempt){ .victim = victim, .nth = nth };
        tutti_status status =
            tutti_spawn(TUTTI_SPAWN_THREADS, 2, failing_thread, &(failing_threads){ calls, work, one });
        if ((status == TUTTI_OK) != (one->status[0] == TUTTI_OK && one->status[1] == TUTTI_OK))
            FAIL("call %d (%s): the world ends with %d", nth, failing_name(one), status);
        failing_judge(one);
        failing_count(after, library);
        if (choice.releases && failing_keeps(one))
            memcpy(before, after, sizeof before);
        failing_compare(one, before, after);
        failed += one->failed && one->status[victim] != TUTTI_OK;
    }
    *one = (failing_attempt){ .victim = victim, .nth = FAILING_NEVER };
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, failing_thread, &(failing_threads){ calls, work, one }));
    munmap(whole, sizeof *whole);
    munmap(one, sizeof *one);
    return failed;
}

static inline int failing_each(const failing *calls, int victim, failing_work *work, int (*library)(void)) {
    return failing_some(calls, victim, work, library, (failing_choice){ 1, 1, false });
}

#endif
