/* SPDX-License-Identifier: Apache-2.0
 *
 * Programs that do things in the wrong order, on each backend (tests/backends.h): open it twice, release a group and a
 * block before the peers that use them, let it grow meanwhile, close the world before all of them, go on using what is
 * closed, or use it in a forked child. What is wrong is told, what is there goes on, and the next world works.
 */
#include <sys/wait.h>

#include "../backends.h"

static tutti_device device(void) {
    return backends_name() == NULL ? TUTTI_CPU : TUTTI_CUDA_AT(0);
}

static tutti_world *open_named(const char *name) {
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    tutti_world *world;
    options.name = name;
    CHECK_OK(tutti_world_open(&options, &world));
    if (backends_name() == NULL)
        return world;
    CHECK_OK(tutti_backend_open(world, backends_name(), NULL));
    CHECK_OK(tutti_backend_open(world, backends_name(), NULL)); /* once more: it is open */
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, backends_name()));
    return world;
}

static tutti_memory *allocate(tutti_world *world, size_t bytes) {
    tutti_memory *memory;
    CHECK_OK(tutti_memory_alloc(world, bytes, TUTTI_OPTIONS(tutti_memory_options, .device = device()), &memory));
    return memory;
}

/* Everybody puts a number to the next, who finds it. */
static void use(tutti_peers *peers, uint32_t number) {
    int rank = tutti_peers_rank(peers), size = tutti_peers_size(peers), before = (rank + size - 1) % size;
    uint32_t mine = number + (uint32_t)rank, found = 0;
    bool arrived;
    CHECK_OK(tutti_peers_put(peers, (rank + 1) % size, 128, &mine, sizeof mine, NULL));
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    CHECK_OK(tutti_peers_get(peers, rank, 128, &found, sizeof found, NULL));
    CHECK_OK(tutti_peers_barrier(peers, 0, NULL));
    CHECK_OK(tutti_peers_test_signal(peers, before, 1, &arrived)); /* waits for the device */
    CHECK_EQ(found, number + (uint32_t)before);
}

static tutti_peers *meet_in_group(tutti_world *world, tutti_memory **memory, tutti_group **group) {
    int ranks[64], size = tutti_world_size(world);
    tutti_peers *peers;
    for (int i = 0; i < size; i++)
        ranks[i] = i;
    CHECK_OK(tutti_group_new(world, ranks, size, NULL, group));
    *memory = allocate(world, 4096);
    CHECK_OK(tutti_memory_rendezvous(*memory, *group, &peers));
    return peers;
}

static void close_too_soon(tutti_world *outer, void *argument) {
    tutti_world *world = open_named("first");
    tutti_memory *memory, *more;
    tutti_group *group;
    uint32_t word = 1;
    (void)argument;
    tutti_peers *peers = meet_in_group(world, &memory, &group);
    use(peers, 100);
    if (backends_name() != NULL && strcmp(backends_name(), "nvshmem") == 0)
        CHECK_OK(tutti_backend_grow(world, "nvshmem", 1 << 20, NULL));
    more = allocate(world, 8192);
    tutti_group_release(group); /* the peers have both */
    tutti_memory_release(memory);
    use(peers, 200);
    CHECK_OK(tutti_barrier(tutti_world_group(outer), NULL));
    CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("peers");
    CHECK_STATUS(tutti_peers_put(peers, 0, 0, &word, sizeof word, NULL), TUTTI_ERROR_STATE);
    CHECK_STATUS(tutti_peers_signal(peers, 0, 0, NULL), TUTTI_ERROR_STATE);
    CHECK_STATUS(tutti_peers_barrier(peers, 0, NULL), TUTTI_ERROR_STATE);
    CHECK_STATUS(tutti_memory_alloc(world, 64, NULL, &memory), TUTTI_ERROR_STATE);
    if (backends_name() != NULL)
        CHECK_STATUS(tutti_backend_open(world, backends_name(), NULL), TUTTI_ERROR_STATE);
    CHECK_OK(tutti_barrier(tutti_world_group(outer), NULL));
    tutti_memory_release(more);
    tutti_peers_release(peers); /* the last of them: the world goes too */
    CHECK_OK(tutti_barrier(tutti_world_group(outer), NULL));
    world = open_named("second");
    peers = meet_in_group(world, &memory, &group);
    use(peers, 300);
    tutti_peers_release(peers);
    tutti_group_release(group);
    tutti_memory_release(memory);
    CHECK_OK(tutti_world_finish(world, 0));
}

TEST(handles_go_in_any_order_also_after_their_world_as_threads) {
    backends_need(backends_name(), true);
    if (backends_name() != NULL && !backends_standin())
        SKIP("ranks that are threads share the default stream of their GPU, which this program uses: they would wait "
             "in it "
             "for each other");
    test_threads(backends_ranks(), close_too_soon, NULL);
}

TEST(handles_go_in_any_order_also_after_their_world_as_processes) {
    backends_need(backends_name(), false);
    test_processes(backends_ranks(), close_too_soon, NULL);
}

/* In a child nothing of it works, and nothing breaks for the parent. */
static void fork_and_go_on(tutti_world *outer, void *argument) {
    tutti_world *world = open_named("parents");
    tutti_memory *memory, *other;
    tutti_group *group;
    uint32_t word = 1;
    int ended = 0;
    (void)argument;
    tutti_peers *peers = meet_in_group(world, &memory, &group);
    use(peers, 100);
    pid_t child = fork();
    if (child == 0) {
        bool refused =
            tutti_peers_put(peers, 0, 0, &word, sizeof word, NULL) == TUTTI_ERROR_FORKED &&
            tutti_peers_barrier(peers, 0, NULL) == TUTTI_ERROR_FORKED &&
            tutti_memory_alloc(world, 64, NULL, &other) == TUTTI_ERROR_FORKED &&
            (backends_name() == NULL || tutti_backend_open(world, backends_name(), NULL) == TUTTI_ERROR_FORKED);
        tutti_peers_release(peers);
        tutti_memory_release(memory);
        tutti_group_release(group);
        refused = refused && tutti_world_close(world) == TUTTI_ERROR_FORKED;
        _exit(refused ? 0 : 1);
    }
    CHECK_EQ(waitpid(child, &ended, 0), child);
    CHECK_EQ(ended, 0);
    use(peers, 200);
    tutti_peers_release(peers);
    tutti_group_release(group);
    tutti_memory_release(memory);
    CHECK_OK(tutti_world_finish(world, 0));
    CHECK_OK(tutti_barrier(tutti_world_group(outer), NULL));
}

TEST(a_forked_child_is_refused_and_its_parent_goes_on) {
    backends_need(backends_name(), false);
    test_processes(backends_ranks(), fork_and_go_on, NULL);
}
