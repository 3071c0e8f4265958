/* SPDX-License-Identifier: Apache-2.0
 *
 * What only the NVSHMEM backend has: a heap that is made by all and carved by each, groups that meet alone, and
 * libraries that are ill. tests/memory/every_backend.c has what it shares with the others. Runs with stand-ins for
 * NVSHMEM and the driver (TEST_STANDIN), and on a GPU, where collectives are compared with the CPU's.
 */
#include <dlfcn.h>
#include <tutti/backend.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/named.h>
#include <tutti/peers.h>
#include <unistd.h>

#include "../harness.h"

static const tutti_memory_options on_gpu = { .size = sizeof on_gpu, .device = TUTTI_CUDA };

static bool is_standin(void) {
    return getenv("TEST_STANDIN") != NULL;
}

static int rank_count(void) {
    const char *ranks = getenv("TEST_GPU_RANKS");
    return ranks != NULL ? atoi(ranks) : 3;
}

static void need(bool gpu) {
    const char *folder = getenv("TUTTI_PLUGIN_PATH");
    char path[4096];
    snprintf(path, sizeof path, "%s/libtutti-nvshmem.so", folder != NULL ? folder : ".");
    if (gpu && is_standin())
        SKIP("the stand-in of the driver knows no collectives");
    if (!is_standin() && access("/dev/nvidiactl", F_OK) != 0)
        SKIP("no GPU on this machine");
    if (access(path, F_OK) != 0)
        SKIP("the backend nvshmem was not built");
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

TEST(blocks_are_carved_and_freed_by_each_rank_alone_and_meet_at_any_offset) {
    need(false);
    test_processes(rank_count(), carve_alone, NULL);
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
    need(false);
    setenv("TUTTI_NVSHMEM_HEAP", "16M", 1);
    test_processes(rank_count(), fill_and_grow, NULL);
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
    need(false);
    test_processes(rank_count(), meet_in_parts, NULL);
    _exit(0);
}

static void refuse_threads(tutti_world *world, void *argument) {
    (void)argument;
    CHECK_STATUS(tutti_backend_open(world, "nvshmem", NULL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("one process for each rank");
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(ranks_that_are_threads_are_told_that_nvshmem_takes_processes) {
    need(false);
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

TEST(heap_and_peers_of_two_ranks) {
    need(false);
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
    need(false);
    setenv("TUTTI_NVSHMEM_TEAMS", "1", 1);
    test_processes(rank_count(), make_teams, NULL);
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
    need(false);
    if (!is_standin())
        SKIP("only a stand-in can be made ill");
    setenv("STANDIN_NVSHMEM", illness.name, 1);
    test_processes(3, open_ill, &illness);
    _exit(0);
}

TEST(a_library_that_is_too_old_is_refused_by_its_version) {
    be_ill((illness){ "old", TUTTI_ERROR_UNSUPPORTED, "NVSHMEM 3.2.5 is too old" });
}

TEST(a_library_that_does_not_start_says_what_to_look_at) {
    be_ill((illness){ "refuses", TUTTI_ERROR_BACKEND, "NVSHMEM_DEBUG=INFO" });
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
    need(false);
    if (!is_standin())
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

TEST(processes_that_share_a_gpu_without_mps_have_memory_and_signals_but_no_teams) {
    need(false);
    if (!is_standin())
        SKIP("only a stand-in can be made so");
    setenv("STANDIN_NVSHMEM", "limited", 1);
    test_processes(3, open_limited, NULL);
    _exit(0);
}

/* ---- collectives, on a GPU ---- */

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
    need(true);
    test_processes(rank_count(), reduce_and_gather, &(bool){ false });
    _exit(0);
}

TEST(collectives_have_the_bits_of_the_cpu_where_blocks_lie_apart) {
    need(true);
    test_processes(rank_count(), reduce_and_gather, &(bool){ true });
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
    need(true);
    const char *path = getenv("TEST_NVSHMEM_MODULE");
    if (path == NULL || access(path, R_OK) != 0)
        SKIP("no kernels that are linked with NVSHMEM's device library");
    test_processes(2, give_module, (void *)(uintptr_t)path);
    _exit(0);
}

static void exchange_rows(tutti_world *world, void *argument) {
    const bool apart = *(const bool *)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    tutti_memory *memory, *other = NULL;
    tutti_peers *peers;
    size_t rows = 64, splits_at = 2 * rows * sizeof(float);
    open_backend(world);
    if (apart && rank == 0)
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
    tutti_status status =
        tutti_all_to_all_vdev(group, &layout, (int64_t *)(data + splits_at), (int64_t *)(data + splits_at + 512), NULL);
    if (apart) { /* peers pull from where the input lies, and cannot */
        CHECK_EQ(status, TUTTI_ERROR_UNSUPPORTED);
        CHECK_MESSAGE("same offset");
        tutti_peers_release(peers);
        tutti_memory_release(memory);
        tutti_memory_release(other);
        return;
    }
    CHECK_OK(status);
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
}

TEST(rows_whose_splits_are_data_go_where_the_splits_say) {
    need(true);
    test_processes(rank_count(), exchange_rows, &(bool){ false });
    _exit(0);
}

TEST(rows_that_peers_cannot_pull_are_refused_with_the_reason) {
    need(true);
    test_processes(rank_count(), exchange_rows, &(bool){ true });
    _exit(0);
}
