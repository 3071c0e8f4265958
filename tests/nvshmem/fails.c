/* SPDX-License-Identifier: Apache-2.0
 *
 * The NVSHMEM backend, of which any one call fails on one of two ranks: of NVSHMEM, of the driver, or an allocation on
 * the host; with ranks that are mapped and with ranks that are not. Both hear of it, nobody waits until a deadline,
 * nothing is left behind, and the next world of the same processes works; or, where NVSHMEM was left behind inside of a
 * call, both say that the processes must end first. NVSHMEM and the driver are stand-ins.
 */
#include "../failing_memory.h"

/* Those of mapped ranks are the CUDA backend's, whose calls fail in tests/memory/driver_fails.c. */
static tutti_status collectives(tutti_group *group, char *data) {
    float *numbers = (float *)(void *)data;
    tutti_status status = tutti_all_reduce(group, numbers, numbers, 64, TUTTI_F32, TUTTI_SUM, NULL);
    return status == TUTTI_OK ? tutti_all_gather(group, data, data + 32768, 4096, TUTTI_U8, NULL) : status;
}

/* Who fails here does so alone: it is up to the program to tell the others. */
static tutti_status puts_and_signals(tutti_group *group, tutti_peers *peers) {
    int other = 1 - tutti_group_rank(group);
    uint64_t word = 7;
    tutti_status status = tutti_peers_put(peers, other, 0, &word, sizeof word, NULL);
    if (status == TUTTI_OK)
        status = tutti_peers_signal(peers, other, 1, NULL);
    if (status == TUTTI_OK)
        status = tutti_peers_wait_signal(peers, other, 1, NULL);
    if (status != TUTTI_OK)
        CHECK_OK(tutti_group_abort(group, tutti_error_message()));
    return status == TUTTI_OK ? tutti_peers_barrier(peers, 0, NULL) : status;
}

/* Of each rank alone: the group of all has NVSHMEM's own. */
static tutti_status make_team(tutti_world *world) {
    static const int first[] = { 0 }, second[] = { 1 }, counts[] = { 1, 1 };
    static const int *const lists[] = { first, second };
    tutti_group *group = NULL;
    int32_t team;
    tutti_status status = tutti_group_split(tutti_world_group(world), lists, counts, 2, NULL, &group);
    if (status != TUTTI_OK)
        return status;
    status = tutti_backend_team(group, "nvshmem", NULL, &team);
    tutti_group_release(group);
    return status;
}

static tutti_status work(tutti_world *world, tutti_memory **memory, tutti_peers **peers) {
    tutti_group *group = tutti_world_group(world);
    tutti_status status = failing_begin(world, "nvshmem", memory, peers);
    if (status == TUTTI_OK)
        status = puts_and_signals(group, *peers);
    if (status == TUTTI_OK && strcmp(getenv("TUTTI_NVSHMEM_MAP"), "0") == 0)
        status = collectives(group, tutti_memory_data(*memory));
    if (status == TUTTI_OK)
        status = make_team(world);
    if (status == TUTTI_OK)
        status = tutti_backend_grow(world, "nvshmem", 1 << 20, NULL);
    return status == TUTTI_OK ? failing_end(group) : status;
}

typedef struct trial {
    const failing *calls;
    failing_attempt *attempt;
} trial;

static tutti_world *open_named(const char *name) {
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    tutti_world *world;
    options.name = name;
    CHECK_OK(tutti_world_open(&options, &world));
    return world;
}

/* In a world of their own the ranks fail, and in the next one they try again. */
static void try(tutti_world *outer, void *argument) {
    const trial *trial = argument;
    failing_attempt *attempt = trial->attempt;
    int rank = tutti_world_rank(outer);
    tutti_memory *memory = NULL;
    tutti_peers *peers = NULL;
    tutti_world *first = open_named("first");
    (void)failing_run(first, trial->calls, attempt, work);
    (void)!tutti_world_close(first);
    tutti_world *second = open_named("second");
    attempt->again[rank] = work(second, &memory, &peers);
    if (attempt->again[rank] != TUTTI_OK)
        snprintf(attempt->words_again[rank], sizeof attempt->words_again[rank], "%s", tutti_error_message());
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    (void)!tutti_world_close(second);
    if (rank == attempt->victim)
        failing_count(attempt->left, NULL);
}

/* The next attempt works, and nothing of the first is left; but for NVSHMEM that somebody is still inside of. */
static void judge_again(const failing_attempt *one, const failing_attempt *whole) {
    bool inside = one->again[0] == TUTTI_ERROR_STATE && one->again[1] == TUTTI_ERROR_STATE &&
                  strstr(one->words_again[0], "must end first") != NULL &&
                  strstr(one->words_again[1], "must end first") != NULL;
    for (int rank = 0; rank < 2; rank++)
        if (one->again[rank] != TUTTI_OK && !inside)
            FAIL("call %d (%s), '%s': the next attempt of rank %d fails: %s", one->nth, failing_name(one),
                 one->words[one->victim], rank, one->words_again[rank]);
    if (!inside)
        failing_compare(one, whole->left, one->left);
}

/* Returns how many attempts failed. */
static int try_each(const failing *calls, int victim) {
    failing_attempt *whole = failing_new(victim), *one = failing_new(victim);
    int failed = 0;
    test_processes(2, try, &(trial){ calls, whole });
    CHECK_OK(whole->status[victim]);
    CHECK(whole->calls < FAILING_CALLS);
    judge_again(whole, whole);
    for (int nth = 1; nth <= whole->calls; nth++) {
        if (failing_skips(whole, nth))
            continue;
        *one = (failing_attempt){ .victim = victim, .nth = nth };
        test_processes(2, try, &(trial){ calls, one });
        failing_judge(one);
        judge_again(one, whole);
        failed += one->failed && one->status[victim] != TUTTI_OK;
    }
    return failed;
}

static void begin(const char *mapped) {
    backends_need("nvshmem", false);
    if (!backends_standin())
        SKIP("only a stand-in fails when it is told to");
    setenv("TUTTI_NVSHMEM_MAP", mapped, 1);
    setenv("TUTTI_NVSHMEM_HEAP", "16M", 1);
}

TEST_LIMIT(any_call_of_nvshmem_may_fail_on_one_rank, 240) {
    begin("1");
    failing calls = failing_calls("libnvshmem_host.so.3", "standin_nvshmem");
    for (int victim = 0; victim < 2; victim++)
        CHECK(try_each(&calls, victim) > 4);
    _exit(0);
}

TEST_LIMIT(any_call_of_nvshmem_may_fail_on_one_rank_that_is_not_mapped, 240) {
    begin("0");
    failing calls = failing_calls("libnvshmem_host.so.3", "standin_nvshmem");
    for (int victim = 0; victim < 2; victim++)
        CHECK(try_each(&calls, victim) > 4);
    _exit(0);
}

TEST_LIMIT(any_call_of_the_driver_may_fail_on_one_rank_that_uses_nvshmem, 240) {
    begin("1");
    failing calls = failing_calls("libcuda.so.1", "standin");
    CHECK(try_each(&calls, 1) > 20);
    _exit(0);
}

TEST_LIMIT(any_call_of_the_driver_may_fail_on_one_rank_that_is_not_mapped, 240) {
    begin("0");
    failing calls = failing_calls("libcuda.so.1", "standin");
    CHECK(try_each(&calls, 1) > 20);
    _exit(0);
}

static void without_memory(const char *mapped) {
    begin(mapped);
#ifdef FAILING_HAS_MEMORY
    failing calls = failing_memory("libtutti-nvshmem.so");
    CHECK(try_each(&calls, 1) > 5);
    _exit(0);
#else
    SKIP("the sanitizer has the allocations of this program");
#endif
}

TEST_LIMIT(any_allocation_of_the_nvshmem_backend_may_fail_on_one_rank, 240) {
    without_memory("1");
}

TEST_LIMIT(any_allocation_of_the_nvshmem_backend_may_fail_on_one_rank_that_is_not_mapped, 240) {
    without_memory("0");
}
