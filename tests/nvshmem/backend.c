/* SPDX-License-Identifier: Apache-2.0
 *
 * What only the NVSHMEM backend has: a heap that is made by all and carved by each, groups that meet alone, and
 * libraries that are ill. tests/memory/every_backend.c has what it shares with the others. Runs with stand-ins for
 * NVSHMEM and the driver (TEST_STANDIN), and on a GPU, where collectives are compared with the CPU's.
 */
#include <dlfcn.h>
#include <signal.h>
#include <tutti/named.h>

#include "../backends.h"

static const tutti_memory_options on_gpu = { .size = sizeof on_gpu, .device = TUTTI_CUDA };

static void need(void) {
    backends_need("nvshmem", false);
    if (dlopen("libnvshmem_host.so.3", RTLD_LAZY) == NULL)
        SKIP("NVSHMEM is not installed");
}

static void open_backend(tutti_world *world) {
    CHECK_OK(tutti_backend_open(world, "nvshmem", NULL));
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "nvshmem"));
}

/* Everybody puts its number to everybody, and finds all of them; also after a signal. */
static void use(tutti_memory *memory, tutti_group *group) {
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    int rank = tutti_peers_rank(peers), size = tutti_peers_size(peers), next = (rank + 1) % size;
    uint32_t number = 100 + (uint32_t)rank, got[64] = { 0 };
    for (int i = 0; i < size; i++)
        CHECK_OK(tutti_peers_put(peers, i, 4 * (size_t)rank, &number, sizeof number, NULL));
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    CHECK_OK(tutti_peers_get(peers, rank, 0, got, 4 * (size_t)size, NULL));
    CHECK_OK(tutti_peers_signal(peers, next, 1, NULL));
    CHECK_OK(tutti_peers_wait_signal(peers, (rank + size - 1) % size, 1, NULL));
    CHECK_OK(tutti_peers_get(peers, next, 0, got + 32, 4 * (size_t)size, NULL));
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    CHECK_OK(tutti_barrier(group, NULL));
    bool arrived = true; /* a question that waits for the device: what was enqueued before is over */
    CHECK_OK(tutti_peers_test_signal(peers, next, 2, &arrived));
    CHECK(!arrived);
    CHECK_OK(tutti_group_check(group));
    for (int i = 0; i < size; i++) {
        CHECK_EQ(got[i], 100 + (uint32_t)i);
        CHECK_EQ(got[32 + i], 100 + (uint32_t)i);
    }
    tutti_peers_release(peers);
}

/* ---- the heap ---- */

static void carve_alone(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory *first = NULL, *second, *third = NULL;
    open_backend(world);
    if (tutti_world_rank(world) == 0) /* nobody else allocates: the offsets of what follows differ */
        CHECK_OK(tutti_memory_alloc(world, 100000, &on_gpu, &first));
    CHECK_OK(tutti_memory_alloc(world, 4096, &on_gpu, &second));
    use(second, tutti_world_group(world));
    if (tutti_world_rank(world) == 1) { /* nobody else frees */
        tutti_memory_release(second);
        CHECK_OK(tutti_memory_alloc(world, 5000, &on_gpu, &third));
    }
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    if (tutti_world_rank(world) != 1)
        tutti_memory_release(second);
    tutti_memory_release(first);
    tutti_memory_release(third);
    CHECK_OK(tutti_memory_alloc(world, 4096, &on_gpu, &second));
    use(second, tutti_world_group(world));
    tutti_memory_release(second);
}

/* A gap that is too small stays, and what lies behind it stays whole. */
static void carve_behind_a_gap(tutti_world *world, void *argument) {
    (void)argument;
    static unsigned char bytes[40000];
    tutti_memory *first, *second, *third, *small;
    open_backend(world);
    CHECK_OK(tutti_memory_alloc(world, 10000, &on_gpu, &first));
    CHECK_OK(tutti_memory_alloc(world, 10000, &on_gpu, &second));
    char *gap = tutti_memory_data(first), *kept = tutti_memory_data(second);
    tutti_memory_release(first);
    CHECK_OK(tutti_memory_alloc(world, sizeof bytes, &on_gpu, &third));
    char *behind = tutti_memory_data(third);
    CHECK(behind >= kept + 10000 || behind + sizeof bytes <= kept);
    CHECK_OK(tutti_memory_alloc(world, 4096, &on_gpu, &small));
    CHECK((char *)tutti_memory_data(small) == gap);
    use(third, tutti_world_group(world));
    use(small, tutti_world_group(world));
    tutti_memory_release(second);
    tutti_memory_release(third);
    tutti_memory_release(small);
}

TEST(a_block_that_is_too_large_for_a_gap_goes_behind_what_follows_it) {
    need();
    test_processes(2, carve_behind_a_gap, NULL);
}

TEST(blocks_are_carved_and_freed_by_each_rank_alone_and_meet_at_any_offset) {
    need();
    test_processes(backends_ranks(), carve_alone, NULL);
    _exit(0); /* the driver keeps descriptors and threads of its own */
}

static void fill_and_grow(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory *large, *more;
    open_backend(world);
    CHECK_OK(tutti_memory_alloc(world, (size_t)12 << 20, &on_gpu, &large));
    CHECK_STATUS(tutti_memory_alloc(world, (size_t)12 << 20, &on_gpu, &more), TUTTI_ERROR_MEMORY);
    CHECK_MESSAGE("TUTTI_NVSHMEM_HEAP");
    CHECK_MESSAGE("tutti_backend_grow");
    CHECK_OK(tutti_backend_grow(world, "nvshmem", (size_t)16 << 20, NULL));
    CHECK_OK(tutti_memory_alloc(world, (size_t)12 << 20, &on_gpu, &more));
    use(more, tutti_world_group(world));
    tutti_memory_release(large);
    CHECK_OK(tutti_memory_alloc(world, (size_t)12 << 20, &on_gpu, &large)); /* what was freed is there again */
    tutti_memory_release(more);
    tutti_memory_release(large);
}

TEST(a_full_heap_is_out_of_memory_that_names_the_setting_and_it_grows) {
    need();
    setenv("TUTTI_NVSHMEM_HEAP", "16M", 1);
    test_processes(backends_ranks(), fill_and_grow, NULL);
    _exit(0);
}

static void meet_in_parts(tutti_world *world, void *argument) {
    (void)argument;
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    int even[32], odd[32], counts[2] = { 0, 0 };
    const int *lists[2] = { even, odd };
    tutti_group *group;
    open_backend(world);
    for (int i = 0; i < size; i++)
        (i % 2 == 0 ? even : odd)[counts[i % 2]++] = i;
    CHECK_OK(tutti_group_split(tutti_world_group(world), lists, counts, 2, NULL, &group));
    tutti_memory *memory;
    for (int round = 0; round < (rank % 2 == 0 ? 3 : 1); round++) { /* the others do not come as often */
        CHECK_OK(tutti_memory_alloc(world, 8192, &on_gpu, &memory));
        use(memory, group);
        tutti_memory_release(memory);
    }
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    tutti_group_release(group);
}

TEST(sub_groups_meet_alone_as_often_as_they_like) {
    need();
    test_processes(backends_ranks(), meet_in_parts, NULL);
    _exit(0);
}

static void refuse_threads(tutti_world *world, void *argument) {
    (void)argument;
    CHECK_STATUS(tutti_backend_open(world, "nvshmem", NULL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("one process for each rank");
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(ranks_that_are_threads_are_told_that_nvshmem_takes_processes) {
    need();
    test_threads(2, refuse_threads, NULL);
    _exit(0);
}

static void open_twice(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory *memory;
    open_backend(world);
    CHECK_OK(tutti_memory_alloc(world, 4096, &on_gpu, &memory));
    use(memory, tutti_world_group(world));
    tutti_memory_release(memory);
}

/* The heap and the kernels stay with the process: 24 of 32 MiB would not be there a second time. */
static void open_worlds(tutti_world *first, void *argument) {
    (void)argument;
    for (int round = 0; round < 3; round++) {
        tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
        tutti_world *world;
        tutti_memory *memory;
        options.name = round % 2 == 0 ? "even" : "odd";
        CHECK_OK(tutti_world_open(&options, &world));
        open_backend(world);
        CHECK_OK(tutti_memory_alloc(world, (size_t)24 << 20, &on_gpu, &memory));
        use(memory, tutti_world_group(world));
        if (round == 0)
            CHECK_STATUS(tutti_backend_open(first, "nvshmem", NULL), TUTTI_ERROR_UNSUPPORTED);
        tutti_memory_release(memory);
        CHECK_OK(tutti_world_finish(world, 0));
    }
    open_twice(first, argument);
}

TEST(worlds_one_after_the_other_have_the_heap_of_the_first) {
    need();
    setenv("TUTTI_NVSHMEM_HEAP", "32M", 1);
    test_processes(2, open_worlds, NULL);
    _exit(0);
}

TEST(heap_and_peers_of_two_ranks) {
    need();
    test_processes(2, open_twice, NULL);
    _exit(0);
}

/* ---- teams ---- */

/* With four ranks one of the groups is no arithmetic progression. */
static tutti_group *make_group(tutti_world *world, const int *ranks, int count) {
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, ranks, count, NULL, &group));
    return group;
}

static void make_teams(tutti_world *world, void *argument) {
    (void)argument;
    int size = tutti_world_size(world);
    tutti_group *all = tutti_world_group(world), *pair = make_group(world, (int[]){ 0, 1 }, 2);
    tutti_group *ends =
        size > 3 ? make_group(world, (int[]){ 0, 1, 3 }, 3) : make_group(world, (int[]){ 0, size - 1 }, 2);
    int32_t team = -1, again = -1;
    open_backend(world);
    CHECK_OK(tutti_backend_team(all, "nvshmem", NULL, &team));
    CHECK_EQ(team, 0); /* NVSHMEM_TEAM_WORLD */
    if (pair != TUTTI_NON_GROUP_MEMBER && size > 2) {
        CHECK_OK(tutti_backend_team(pair, "nvshmem", NULL, &team));
        CHECK(team > 0);
        CHECK_OK(tutti_backend_team(pair, "nvshmem", NULL, &again));
        CHECK_EQ(again, team);
    }
    if (pair != TUTTI_NON_GROUP_MEMBER)
        tutti_group_release(pair);
    pair = make_group(world, (int[]){ 0, 1 }, 2); /* the same members: the same team */
    if (pair != TUTTI_NON_GROUP_MEMBER && size > 2) {
        CHECK_OK(tutti_backend_team(pair, "nvshmem", NULL, &again));
        CHECK_EQ(again, team);
    }
    CHECK_OK(tutti_barrier(all, NULL));
    if (ends != TUTTI_NON_GROUP_MEMBER && size > 2) {
        CHECK_STATUS(tutti_backend_team(ends, "nvshmem", NULL, &team), TUTTI_ERROR_LIMIT); /* one is all */
        if (pair != TUTTI_NON_GROUP_MEMBER) /* who has one already says why */
            CHECK_MESSAGE("TUTTI_NVSHMEM_TEAMS");
        CHECK_OK(tutti_barrier(ends, NULL));
    }
    CHECK_STATUS(tutti_backend_team(all, "shm", NULL, &team), TUTTI_ERROR_UNSUPPORTED);
    CHECK_STATUS(tutti_backend_team(NULL, "nvshmem", NULL, &team), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(all, NULL));
    if (pair != TUTTI_NON_GROUP_MEMBER)
        tutti_group_release(pair);
    if (ends != TUTTI_NON_GROUP_MEMBER)
        tutti_group_release(ends);
}

TEST(any_group_has_a_team_that_is_kept_until_there_are_too_many) {
    need();
    setenv("TUTTI_NVSHMEM_TEAMS", "1", 1);
    test_processes(backends_ranks(), make_teams, NULL);
    _exit(0);
}

/* ---- libraries that are ill: by the stand-in alone ---- */

typedef struct illness {
    const char *name;
    tutti_status status;
    const char *words;
} illness;

static void open_ill(tutti_world *world, void *argument) {
    const illness *illness = argument;
    tutti_call soon = TUTTI_CALL_INIT;
    soon.timeout_ns = strcmp(illness->name, "hangs") == 0 ? 300000000 : 0;
    tutti_status status = tutti_backend_open(world, "nvshmem", &soon);
    if (status != illness->status)
        FAIL("%s: %s (%s)", illness->name, tutti_status_name(status), tutti_error_message());
    CHECK_MESSAGE(illness->words);
    if (illness->status != TUTTI_ERROR_TIMEOUT)
        CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

static void be_ill(illness illness) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in can be made ill");
    setenv("STANDIN_NVSHMEM", illness.name, 1);
    test_processes(3, open_ill, &illness);
    _exit(0);
}

TEST(a_library_that_is_too_old_is_refused_by_its_version) {
    be_ill((illness){ "old", TUTTI_ERROR_BACKEND, "NVSHMEM 3.2.5 is too old" });
}

TEST(a_library_that_does_not_start_says_what_to_look_at) {
    be_ill((illness){ "refuses", TUTTI_ERROR_BACKEND, "NVSHMEM_DEBUG=INFO" });
}

/* The others wait for rank 1 inside of NVSHMEM: they hear of it at once, long before their deadline. */
static void open_without_one(tutti_world *world, void *argument) {
    (void)argument;
    tutti_call patient = TUTTI_CALL_INIT;
    patient.timeout_ns = INT64_C(600000000000);
    CHECK_STATUS(tutti_backend_open(world, "nvshmem", &patient), TUTTI_ERROR_BACKEND);
    CHECK_MESSAGE("does not start on rank 1");
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));           /* the world goes on without */
    CHECK(tutti_backend_open(world, "nvshmem", &patient) != TUTTI_OK); /* and all say so alike */
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(a_library_that_does_not_start_on_one_rank_is_told_to_all_at_once) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in can be made ill");
    setenv("STANDIN_NVSHMEM", "refuses one", 1);
    test_processes(3, open_without_one, NULL);
    _exit(0);
}

static void team_without_one(tutti_world *world, void *argument) {
    (void)argument;
    tutti_call patient = TUTTI_CALL_INIT;
    tutti_group *pair = make_group(world, (int[]){ 0, 1 }, 2);
    int32_t team;
    patient.timeout_ns = INT64_C(600000000000);
    open_backend(world);
    if (pair != TUTTI_NON_GROUP_MEMBER) {
        CHECK_STATUS(tutti_backend_team(pair, "nvshmem", &patient, &team), TUTTI_ERROR_BACKEND);
        CHECK_MESSAGE("no team for member 1");
        tutti_group_release(pair);
    }
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(a_team_that_one_member_does_not_get_is_told_to_all_at_once) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in can be made ill");
    setenv("STANDIN_NVSHMEM", "no team", 1);
    test_processes(3, team_without_one, NULL);
    _exit(0);
}

TEST(a_library_without_memory_on_one_rank_fails_all) {
    be_ill((illness){ "full", TUTTI_ERROR_MEMORY, "TUTTI_NVSHMEM_HEAP" });
}

TEST(a_library_that_does_not_come_back_is_left_at_the_deadline) {
    be_ill((illness){ "hangs", TUTTI_ERROR_TIMEOUT, "timeout" });
}

static void grow_unevenly(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory *memory;
    open_backend(world);
    CHECK_STATUS(tutti_backend_grow(world, "nvshmem", 1 << 20, NULL), TUTTI_ERROR_MEMORY);
    CHECK_MESSAGE("on rank 1");
    CHECK_OK(tutti_memory_alloc(world, 4096, &on_gpu, &memory)); /* the heap is what it was, on all ranks */
    use(memory, tutti_world_group(world));
    tutti_memory_release(memory);
}

TEST(a_heap_that_cannot_grow_on_one_rank_stays_as_it_was_on_all) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in can be made so");
    setenv("STANDIN_NVSHMEM", "small", 1);
    test_processes(3, grow_unevenly, NULL);
    _exit(0);
}

static void open_limited(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory *memory;
    open_backend(world);
    CHECK_OK(tutti_memory_alloc(world, 4096, &on_gpu, &memory));
    use(memory, tutti_world_group(world));
    tutti_memory_release(memory);
    int32_t team;
    CHECK_STATUS(tutti_backend_team(tutti_world_group(world), "nvshmem", NULL, &team), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

/* What the driver's stand-in can be told and asked. */
static void (*fail)(const char *function, int nth);
static int (*mappings)(void), (*modules)(void);

static void need_driver(void) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in fails when it is told to");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(driver != NULL);
    *(void **)&fail = dlsym(driver, "standin_fail");
    *(void **)&mappings = dlsym(driver, "standin_mappings");
    *(void **)&modules = dlsym(driver, "standin_modules");
    CHECK(fail != NULL && mappings != NULL && modules != NULL);
}

static void load_unevenly(tutti_world *world, void *argument) {
    tutti_memory *memory;
    (void)argument;
    if (tutti_world_rank(world) == 1)
        fail("tutti_nvshmem_signal", 1);
    CHECK_STATUS(tutti_backend_open(world, "nvshmem", NULL), TUTTI_ERROR_BACKEND);
    CHECK_MESSAGE("loading the kernels that use NVSHMEM");
    open_backend(world);
    int32_t mine = modules(), most;
    CHECK_OK(tutti_all_reduce(tutti_world_group(world), &mine, &most, 1, TUTTI_I32, TUTTI_MAX, NULL));
    CHECK_EQ(mine, most); /* rank 1 had given back what it could not use, and has no more than the others */
    CHECK_OK(tutti_memory_alloc(world, 4096, &on_gpu, &memory));
    use(memory, tutti_world_group(world));
    tutti_memory_release(memory);
}

TEST(kernels_that_one_rank_cannot_load_fail_all_and_the_next_attempt_works) {
    need_driver();
    test_processes(3, load_unevenly, NULL);
    _exit(0);
}

static void map_unevenly(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    tutti_peers *peers;
    (void)argument;
    open_backend(world);
    CHECK_OK(tutti_memory_alloc(world, 4096, &on_gpu, &memory));
    for (int member = 0; member < tutti_group_size(group); member++) { /* whose heap cannot be mapped */
        int before = mappings();
        if (tutti_group_rank(group) == 1)
            fail("cuMemMap", member + 1);
        tutti_status status = tutti_memory_rendezvous(memory, group, &peers);
        CHECK_EQ(status, TUTTI_ERROR_MEMORY);
        CHECK_MESSAGE("NVSHMEM's heap in the order of a group");
        if (tutti_group_rank(group) == 1)
            CHECK_EQ(mappings(), before);
        CHECK_OK(tutti_barrier(group, NULL));
    }
    use(memory, group);
    tutti_memory_release(memory);
}

TEST(a_heap_that_one_rank_cannot_map_fails_all_leaves_nothing_and_is_met_again) {
    need_driver();
    test_processes(3, map_unevenly, NULL);
    _exit(0);
}

TEST(processes_that_share_a_gpu_without_mps_have_memory_and_signals_but_no_teams) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in can be made so");
    setenv("STANDIN_NVSHMEM", "limited", 1);
    test_processes(3, open_limited, NULL);
    _exit(0);
}

/* ---- the environment ---- */

static void expect_variable(const char *name, const char *expected) {
    const char *found = getenv(name);
    if (expected == NULL ? found != NULL : found == NULL || strcmp(found, expected) != 0)
        FAIL("%s is %s, not %s", name, found != NULL ? found : "unset", expected != NULL ? expected : "unset");
}

static void open_mapped(tutti_world *world, void *argument) {
    const char *const(*expected)[2] = argument;
    open_backend(world);
    for (int i = 0; expected[i][0] != NULL; i++)
        expect_variable(expected[i][0], expected[i][1]);
}

static void map_environment(const char *const (*given)[2], const char *const (*expected)[2]) {
    static const char *const known[] = { "NCCL_SOCKET_IFNAME",  "NCCL_IB_HCA",
                                         "NCCL_IB_GID_INDEX",   "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
                                         "NVSHMEM_HCA_LIST",    "NVSHMEM_ENABLE_NIC_PE_MAPPING",
                                         "NVSHMEM_IB_GID_INDEX" };
    need();
    if (!backends_standin())
        SKIP("the interfaces of the test are none of this machine's");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        unsetenv(known[i]);
    for (int i = 0; given[i][0] != NULL; i++)
        setenv(given[i][0], given[i][1], 1);
    test_processes(2, open_mapped, (void *)(uintptr_t)expected);
    _exit(0);
}

TEST(what_nccl_was_told_about_the_network_is_told_to_nvshmem) {
    static const char *const given[][2] = { { "NCCL_SOCKET_IFNAME", "=eth7" },
                                            { "NCCL_IB_HCA", "mlx5_0,mlx5_1" },
                                            { "NCCL_IB_GID_INDEX", "3" },
                                            { NULL, NULL } };
    static const char *const expected[][2] = { { "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "eth7" },
                                               { "NVSHMEM_HCA_LIST", "mlx5_0,mlx5_1" },
                                               { "NVSHMEM_ENABLE_NIC_PE_MAPPING", "1" },
                                               { "NVSHMEM_IB_GID_INDEX", "3" },
                                               { NULL, NULL } };
    map_environment(given, expected);
}

TEST(what_nvshmem_was_told_itself_stays_and_what_it_cannot_be_told_is_left_out) {
    static const char *const given[][2] = { { "NCCL_SOCKET_IFNAME", "eth7" },
                                            { "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "eth8" },
                                            { "NCCL_IB_HCA", "^mlx5_3" },
                                            { NULL, NULL } };
    static const char *const expected[][2] = { { "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "eth8" },
                                               { "NVSHMEM_HCA_LIST", NULL },
                                               { "NVSHMEM_ENABLE_NIC_PE_MAPPING", NULL },
                                               { "NVSHMEM_IB_GID_INDEX", NULL },
                                               { NULL, NULL } };
    map_environment(given, expected);
}

/* ---- a rank that dies inside of NVSHMEM ---- */

/* The stand-in kills PE 1 in the call that the test names; the others wait there for it. */
static tutti_status open_and_grow(tutti_world *world, void *argument) {
    const char *where = argument;
    tutti_call patient = TUTTI_CALL_INIT;
    patient.timeout_ns = INT64_C(600000000000); /* it is the death that ends the wait */
    tutti_status status = tutti_backend_open(world, "nvshmem", &patient);
    if (status == TUTTI_OK && strcmp(where, "dies growing") == 0)
        status = tutti_backend_grow(world, "nvshmem", 1 << 20, &patient);
    else if (status == TUTTI_OK) {
        int32_t team;
        static const int ranks[] = { 0, 1 };
        tutti_group *pair;
        CHECK_OK(tutti_group_new(world, ranks, 2, NULL, &pair));
        if (pair != TUTTI_NON_GROUP_MEMBER)
            status = tutti_backend_team(pair, "nvshmem", &patient, &team);
        if (pair == TUTTI_NON_GROUP_MEMBER)
            _exit(0);
    }
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    tutti_memory *memory; /* and nothing more is asked of it */
    CHECK(tutti_backend_open(world, "nvshmem", NULL) != TUTTI_OK);
    if (strcmp(where, "dies opening") == 0)
        CHECK(tutti_memory_set_backend(world, TUTTI_CUDA, "nvshmem") != TUTTI_OK ||
              tutti_memory_alloc(world, 4096, &on_gpu, &memory) != TUTTI_OK);
    _exit(0);
}

static void die(const char *where) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in dies where it is told to");
    setenv("STANDIN_NVSHMEM", where, 1);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, open_and_grow, (void *)(uintptr_t)where), TUTTI_ERROR_DEAD);
    _exit(0);
}

TEST(a_rank_that_dies_while_nvshmem_starts_is_told_to_the_others) {
    die("dies starting");
}

TEST(a_rank_that_dies_while_the_heap_is_made_is_told_to_the_others) {
    die("dies opening");
}

TEST(a_rank_that_dies_while_the_heap_grows_is_told_to_the_others) {
    die("dies growing");
}

TEST(a_rank_that_dies_while_a_team_is_made_is_told_to_its_members) {
    die("dies teaming");
}

/* ---- collectives ---- */

static void read_back(tutti_peers *peers, size_t offset, void *to, size_t bytes) {
    CHECK_OK(tutti_peers_get(peers, tutti_peers_rank(peers), offset, to, bytes, NULL));
    bool arrived;
    CHECK_OK(tutti_peers_test_signal(peers, tutti_peers_rank(peers), 5, &arrived));
}

static void reduce_and_gather(tutti_world *world, void *argument) {
    const bool apart = *(const bool *)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    tutti_memory *memory, *other = NULL;
    tutti_peers *peers;
    size_t count = 5000, bytes = (size_t)(size + 1) * count * sizeof(float);
    open_backend(world);
    if (apart && rank == 0)
        CHECK_OK(tutti_memory_alloc(world, 1 << 20, &on_gpu, &other)); /* so that offsets differ */
    CHECK_OK(tutti_memory_alloc(world, bytes, &on_gpu, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    float *values = malloc(bytes), *data = tutti_memory_data(memory);
    for (size_t i = 0; i < count; i++)
        values[i] = (float)(rank + 1) * 0.1f + (float)i;
    CHECK_OK(tutti_peers_put(peers, rank, 0, values, count * sizeof(float), NULL));
    CHECK_OK(tutti_all_gather(group, data, data + count, count, TUTTI_F32, NULL));
    CHECK_OK(tutti_all_reduce(group, data, data, count, TUTTI_F32, TUTTI_SUM, NULL));
    read_back(peers, 0, values, bytes);
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (int member = 0; member < size; member++) {
            float one = (float)(member + 1) * 0.1f + (float)i;
            CHECK(values[((size_t)member + 1) * count + i] == one);
            sum = member == 0 ? one : sum + one; /* in rank order: the same bits */
        }
        CHECK(values[i] == sum);
    }
    free(values);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    tutti_memory_release(other);
}

TEST(collectives_have_the_bits_of_the_cpu_where_blocks_lie_alike) {
    need();
    test_processes(backends_ranks(), reduce_and_gather, &(bool){ false });
    _exit(0);
}

TEST(collectives_have_the_bits_of_the_cpu_where_blocks_lie_apart) {
    need();
    test_processes(backends_ranks(), reduce_and_gather, &(bool){ true });
    _exit(0);
}

/* The kernels of the program's own are those of the plug-in: the build has no others that are linked with NVSHMEM. */
static void give_module(tutti_world *world, void *argument) {
    const char *path = argument;
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    CHECK_EQ(fseek(file, 0, SEEK_END), 0);
    long bytes = ftell(file);
    rewind(file);
    char *image = malloc((size_t)bytes + 1);
    CHECK_EQ(fread(image, 1, (size_t)bytes, file), (size_t)bytes);
    fclose(file);
    open_backend(world);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *module = NULL, *context = NULL;
    int (*retain)(void **, int) = (int (*)(void **, int))(uintptr_t)dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*push)(void *) = (int (*)(void *))(uintptr_t)dlsym(driver, "cuCtxPushCurrent_v2");
    int (*load)(void **, const void *) = (int (*)(void **, const void *))(uintptr_t)dlsym(driver, "cuModuleLoadData");
    CHECK_EQ(retain(&context, 0), 0);
    CHECK_EQ(push(context), 0);
    CHECK_EQ(load(&module, image), 0);
    CHECK_OK(tutti_backend_module(world, "nvshmem", module));
    CHECK_STATUS(tutti_backend_module(world, "nvshmem", NULL), TUTTI_ERROR_ARGUMENT);
    free(image);
}

TEST(a_module_of_the_program_is_made_ready_for_the_functions_of_nvshmem) {
    need();
    const char *path = getenv("TEST_NVSHMEM_MODULE");
    if (path == NULL || access(path, R_OK) != 0)
        SKIP("no kernels that are linked with NVSHMEM's device library");
    test_processes(2, give_module, (void *)(uintptr_t)path);
    _exit(0);
}

/* Where the blocks of the ranks lie. */
enum {
    ALIKE,
    APART,     /* at different offsets */
    NOT_MAPPED /* and nobody can load from them */
};

static void exchange_rows(tutti_world *world, void *argument) {
    const int where = *(const int *)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    tutti_memory *memory, *other = NULL;
    tutti_peers *peers;
    size_t rows = 64, splits_at = 2 * rows * sizeof(float);
    open_backend(world);
    if (where == APART && rank == 0)
        CHECK_OK(tutti_memory_alloc(world, 1 << 20, &on_gpu, &other)); /* so that offsets differ */
    CHECK_OK(tutti_memory_alloc(world, 65536, &on_gpu, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    char *data = tutti_memory_data(memory);
    float in[64], out[64];
    int64_t splits[16], got[32];
    for (int i = 0; i < 64; i++)
        in[i] = (float)(rank * 1000 + i);
    for (int i = 0; i < size; i++)
        splits[i] = 1 + (rank + i) % 3;
    CHECK_OK(tutti_peers_put(peers, rank, 0, in, sizeof in, NULL));
    CHECK_OK(tutti_peers_put(peers, rank, splits_at, splits, sizeof(int64_t) * (size_t)size, NULL));
    tutti_rows layout = TUTTI_ROWS_INIT;
    layout.in = data;
    layout.in_rows = rows;
    layout.out = data + rows * sizeof(float);
    layout.out_rows = rows;
    layout.dtype = TUTTI_F32;
    CHECK_OK(tutti_all_to_all_vdev(group, &layout, (int64_t *)(data + splits_at), (int64_t *)(data + splits_at + 512),
                                   NULL));
    read_back(peers, rows * sizeof(float), out, sizeof out);
    read_back(peers, splits_at + 512, got, sizeof(int64_t) * 2 * (size_t)size);
    CHECK_OK(tutti_group_check(group));
    int64_t offset = 0;
    for (int from = 0; from < size; from++) {
        int64_t there = 0, rows_here = 1 + (from + rank) % 3;
        for (int i = 0; i < rank; i++)
            there += 1 + (from + i) % 3;
        CHECK_EQ(got[from], rows_here);
        CHECK_EQ(got[size + from], offset);
        for (int64_t i = 0; i < rows_here; i++)
            CHECK(out[offset + i] == (float)(from * 1000 + there + i));
        offset += rows_here;
    }
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    tutti_memory_release(other);
}

TEST(rows_whose_splits_are_data_go_where_the_splits_say) {
    need();
    test_processes(backends_ranks(), exchange_rows, &(int){ ALIKE });
    _exit(0);
}

TEST(rows_are_pulled_from_blocks_at_different_offsets) {
    need();
    test_processes(backends_ranks(), exchange_rows, &(int){ APART });
    _exit(0);
}

TEST(rows_whose_splits_are_data_go_to_ranks_that_are_not_mapped) {
    need();
    setenv("TUTTI_NVSHMEM_MAP", "0", 1);
    test_processes(backends_ranks(), exchange_rows, &(int){ NOT_MAPPED });
    _exit(0);
}

/* Rows to experts and back: what comes back is what went out. */
static void shuffle_to_experts_and_back(tutti_world *world, void *argument) {
    const int where = *(const int *)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world), experts = 3, slots = size * experts;
    tutti_memory *memory, *other = NULL;
    tutti_peers *peers;
    enum {
        ROWS = 256,
        SPLITS = 3 * ROWS * (int)sizeof(int32_t)
    };
    open_backend(world);
    if (where == APART && rank == 0)
        CHECK_OK(tutti_memory_alloc(world, 1 << 20, &on_gpu, &other));
    CHECK_OK(tutti_memory_alloc(world, 65536, &on_gpu, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    char *data = tutti_memory_data(memory);
    int32_t in[ROWS], out[3 * ROWS];
    int64_t splits[3 * 16], got[2 * 3 * 16], back[2 * 3 * 16], total = 0;
    for (int i = 0; i < ROWS; i++)
        in[i] = rank * 1000 + i;
    for (int i = 0; i < slots; i++) { /* slot (target, expert); some are empty */
        splits[i] = (rank + i) % 4;
        total += splits[i];
    }
    CHECK_OK(tutti_peers_put(peers, rank, 0, in, sizeof in, NULL));
    CHECK_OK(tutti_peers_put(peers, rank, SPLITS, splits, sizeof(int64_t) * (size_t)slots, NULL));
    tutti_rows forth = TUTTI_ROWS_INIT, again;
    forth.in = data;
    forth.in_rows = ROWS;
    forth.out = data + ROWS * sizeof(int32_t);
    forth.out_rows = ROWS;
    forth.dtype = TUTTI_I32;
    int64_t *there = (int64_t *)(void *)(data + SPLITS + 4096), *home = (int64_t *)(void *)(data + SPLITS + 8192);
    CHECK_OK(tutti_all_to_all_vdev_2d(group, &forth, experts, 8, (int64_t *)(void *)(data + SPLITS), there, NULL));
    again = forth;
    again.in = forth.out;
    again.out = data + 2 * ROWS * sizeof(int32_t);
    CHECK_OK(tutti_all_to_all_vdev_2d_offset(group, &again, experts, there, home, NULL));
    read_back(peers, 0, out, sizeof out);
    read_back(peers, SPLITS + 4096, got, sizeof(int64_t) * 2 * (size_t)slots);
    read_back(peers, SPLITS + 8192, back, sizeof(int64_t) * 2 * (size_t)slots);
    CHECK_OK(tutti_group_check(group));
    for (int expert = 0; expert < experts; expert++) {
        CHECK_EQ(got[slots + expert * size] % 8, 0); /* each expert begins aligned */
        for (int source = 0; source < size; source++) {
            int slot = expert * size + source, theirs = rank * experts + expert;
            int64_t before = 0;
            for (int i = 0; i < theirs; i++)
                before += (source + i) % 4;
            CHECK_EQ(got[slot], (source + theirs) % 4);
            for (int64_t i = 0; i < got[slot]; i++)
                CHECK_EQ(out[ROWS + got[slots + slot] + i], source * 1000 + before + i);
        }
    }
    for (int i = 0; i < slots; i++)
        CHECK_EQ(back[i], splits[i]);
    for (int64_t i = 0; i < total; i++)
        CHECK_EQ(out[2 * ROWS + i], in[i]);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    tutti_memory_release(other);
}

TEST(rows_go_to_experts_by_aligned_places_and_back) {
    need();
    test_processes(backends_ranks(), shuffle_to_experts_and_back, &(int){ ALIKE });
    _exit(0);
}

TEST(rows_go_to_experts_and_back_from_blocks_at_different_offsets) {
    need();
    test_processes(backends_ranks(), shuffle_to_experts_and_back, &(int){ APART });
    _exit(0);
}

TEST(rows_go_to_experts_and_back_among_ranks_that_are_not_mapped) {
    need();
    setenv("TUTTI_NVSHMEM_MAP", "0", 1);
    test_processes(backends_ranks(), shuffle_to_experts_and_back, &(int){ NOT_MAPPED });
    _exit(0);
}

/* Rank 0 says that it has more rows than it has: nobody writes beyond anything, and all hear of it. */
static void exceed(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    tutti_memory *memory;
    tutti_peers *peers;
    open_backend(world);
    CHECK_OK(tutti_memory_alloc(world, 65536, &on_gpu, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    char *data = tutti_memory_data(memory);
    int64_t splits[16];
    for (int i = 0; i < size; i++)
        splits[i] = rank == 0 ? 40 : 1;
    CHECK_OK(tutti_peers_put(peers, rank, 4096, splits, sizeof(int64_t) * (size_t)size, NULL));
    tutti_rows layout = TUTTI_ROWS_INIT;
    layout.in = data;
    layout.in_rows = layout.out_rows = 64;
    layout.out = data + 1024;
    layout.dtype = TUTTI_F32;
    tutti_status status =
        tutti_all_to_all_vdev(group, &layout, (int64_t *)(data + 4096), (int64_t *)(data + 8192), NULL);
    while (status == TUTTI_OK) {
        usleep(500);
        status = tutti_group_check(group);
    }
    CHECK_EQ(status, TUTTI_ERROR_RANGE);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST(rows_beyond_the_input_are_out_of_range_on_all_ranks) {
    need();
    for (int mapped = 0; mapped < 2; mapped++) {
        setenv("TUTTI_NVSHMEM_MAP", mapped ? "1" : "0", 1);
        test_processes(2, exceed, NULL);
    }
    _exit(0);
}

/* Rank 1 dies while rank 0 waits for its signal, in the first operation of both on the GPU. */
static tutti_status wait_for_the_dead(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    tutti_peers *peers;
    tutti_call patient = TUTTI_CALL_INIT;
    patient.timeout_ns = INT64_C(600000000000); /* it is the death that ends the wait */
    open_backend(world);
    CHECK_OK(tutti_memory_alloc(world, 4096, &on_gpu, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1)
        raise(SIGKILL);
    tutti_status status = tutti_peers_wait_signal(peers, 1, 0, &patient);
    while (status == TUTTI_OK) {
        usleep(500);
        status = tutti_group_check(group);
    }
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    _exit(0);
}

TEST(a_rank_that_dies_before_its_first_signal_is_told_to_the_one_that_waits) {
    need();
    for (int mapped = 0; mapped < 2; mapped++) {
        setenv("TUTTI_NVSHMEM_MAP", mapped ? "1" : "0", 1);
        CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, wait_for_the_dead, NULL), TUTTI_ERROR_DEAD);
    }
    _exit(0);
}
