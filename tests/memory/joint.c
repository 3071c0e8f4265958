/* SPDX-License-Identifier: Apache-2.0
 *
 * Backends that all ranks open together (tests/memory/plugin/memfd.c with JOINS 1): everybody has it or nobody does,
 * and nobody waits for ever for a rank that cannot, does not come, dies or means another one.
 */
#include <signal.h>
#include <tutti/backend.h>
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>
#include <unistd.h>

#include "../harness.h"
#include "memory/backend.h"
#include "plugin/compile.h"

#define RANKS 3
#define VICTIM 1

static const tutti_memory_options on_device = { .size = sizeof on_device, .device = TUTTI_CUDA };

static void everywhere(const char *flags, void (*body)(tutti_world *, void *), void *argument) {
    plugin_compile("abacus", flags);
    test_threads(RANKS, body, argument);
    test_processes(RANKS, body, argument);
    plugin_remove();
}

static void at_fault(int rank) {
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.at_fault_count, 1);
    CHECK_EQ(info.at_fault[0], rank);
}

/* ---- it goes well ---- */

static void open_and_use(tutti_world *world, void *argument) {
    (void)argument;
    tutti_memory *memory;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "abacus"));
    CHECK_STATUS(tutti_memory_alloc(world, 64, &on_device, &memory), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("tutti_backend_open(world, \"abacus\", NULL)");
    CHECK_STATUS(tutti_backend_grow(world, "abacus", 64, NULL), TUTTI_ERROR_STATE);
    CHECK_OK(tutti_backend_open(world, "abacus", NULL));
    CHECK_OK(tutti_backend_open(world, "abacus", NULL)); /* no change, and nobody enters it again */
    CHECK_OK(tutti_memory_alloc(world, 64, &on_device, &memory));
    CHECK_OK(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST(a_backend_for_all_ranks_is_opened_by_all_and_by_no_other_call) {
    everywhere("-DJOINS=1", open_and_use, NULL);
}

static void open_ordinary_ones(tutti_world *world, void *argument) {
    (void)argument;
    CHECK_OK(tutti_backend_open(world, "shm", NULL));
    CHECK_OK(tutti_backend_open(world, "abacus", NULL));
    CHECK_STATUS(tutti_backend_grow(world, "abacus", 64, NULL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("allocates as it goes");
    CHECK_STATUS(tutti_backend_module(world, "abacus", world), TUTTI_ERROR_UNSUPPORTED);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(a_backend_that_needs_nobody_can_be_opened_by_all_as_well) {
    everywhere("", open_ordinary_ones, NULL);
}

static void grow_it(tutti_world *world, void *argument) {
    (void)argument;
    int rank = tutti_world_rank(world), module = 42;
    CHECK_OK(tutti_backend_open(world, "abacus", NULL));
    CHECK_OK(tutti_backend_grow(world, "abacus", 1000, NULL));
    CHECK_STATUS(tutti_backend_grow(world, "abacus", rank == VICTIM ? 2000 : 1000, NULL), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("by 1000 bytes on rank 0 and by 2000 on rank 1");
    at_fault(VICTIM);
    CHECK_STATUS(tutti_backend_grow(world, "abacus", 1000001, NULL), TUTTI_ERROR_MEMORY);
    CHECK_MESSAGE("there are not so many beads");
    CHECK_STATUS(tutti_backend_grow(world, "abacus", 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_backend_grow(world, "abacus", 1000, NULL)); /* none of this ended anything */
    CHECK_OK(tutti_backend_module(world, "abacus", &module));
    module = 1;
    CHECK_STATUS(tutti_backend_module(world, "abacus", &module), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_backend_module(world, "abacus", NULL), TUTTI_ERROR_ARGUMENT);
}

TEST(a_backend_grows_by_the_same_on_all_ranks_or_not_at_all) {
    everywhere("-DJOINS=1", grow_it, NULL);
}

/* ---- somebody cannot ---- */

static void one_cannot(tutti_world *world, void *argument) {
    (void)argument;
    CHECK_STATUS(tutti_backend_open(world, "abacus", NULL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("this rank has no abacus");
    if (tutti_world_rank(world) != VICTIM) {
        CHECK_MESSAGE("rank 1 cannot open backend abacus");
        at_fault(VICTIM);
    }
    tutti_memory *memory;
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "abacus"));
    CHECK_STATUS(tutti_memory_alloc(world, 64, &on_device, &memory), TUTTI_ERROR_STATE);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(a_rank_that_cannot_fails_all_with_its_words_before_anybody_enters) {
    everywhere("-DJOINS=1 -DOPEN_FAILS_ON=1", one_cannot, NULL);
}

static void one_fails_inside(tutti_world *world, void *argument) {
    (void)argument;
    for (int time = 0; time < 2; time++) {
        CHECK_STATUS(tutti_backend_open(world, "abacus", NULL), TUTTI_ERROR_MEMORY);
        CHECK_MESSAGE("no beads left");
    }
    CHECK_STATUS(tutti_backend_grow(world, "abacus", 64, NULL), TUTTI_ERROR_STATE);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(a_rank_that_fails_inside_leaves_it_closed_on_all) {
    everywhere("-DJOINS=1 -DJOIN_FAILS_ON=1", one_fails_inside, NULL);
}

static void nobody_has_it(tutti_world *world, void *argument) {
    (void)argument;
    CHECK_STATUS(tutti_backend_open(world, "sundial", NULL), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("libtutti-sundial.so");
    CHECK_STATUS(tutti_backend_open(world, NULL, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_backend_open(world, "", NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_backend_open(NULL, "abacus", NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_backend_open(world, "abacus", TUTTI_OPTIONS(tutti_call, .timeout_ns = -5)),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST(a_plug_in_that_is_not_there_and_wrong_arguments_end_nothing) {
    everywhere("-DJOINS=1", nobody_has_it, NULL);
}

static void different_names(tutti_world *world, void *argument) {
    (void)argument;
    bool other = tutti_world_rank(world) == VICTIM;
    CHECK_STATUS(tutti_backend_open(world, other ? "shm" : "abacus", NULL), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("rank 0 abacus, rank 1 shm");
    at_fault(VICTIM);
    CHECK_OK(tutti_backend_open(world, "abacus", NULL));
}

TEST(different_names_are_a_mismatch_on_all_and_end_nothing) {
    everywhere("-DJOINS=1", different_names, NULL);
}

/* ---- somebody does not come ---- */

static void one_does_not_come(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    if (tutti_world_rank(world) == VICTIM) { /* it is there, and does nothing, until the others have given up */
        while (tutti_group_check(group) == TUTTI_OK)
            usleep(1000);
        return;
    }
    CHECK_STATUS(tutti_backend_open(world, "abacus", TUTTI_OPTIONS(tutti_call, .timeout_ns = 50000000)),
                 TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("backend_open");
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_TIMEOUT); /* the group ended with it */
}

TEST(a_rank_that_does_not_come_is_a_timeout_of_the_others) {
    everywhere("-DJOINS=1", one_does_not_come, NULL);
}

static tutti_status one_dies(tutti_world *world, void *argument) {
    (void)argument;
    if (tutti_world_rank(world) == VICTIM)
        raise(SIGKILL);
    CHECK_STATUS(tutti_backend_open(world, "abacus", TUTTI_OPTIONS(tutti_call, .timeout_ns = 60000000000)),
                 TUTTI_ERROR_DEAD);
    at_fault(VICTIM);
    return TUTTI_OK;
}

TEST(a_death_is_the_error_of_the_others_and_not_their_deadline) {
    plugin_compile("abacus", "-DJOINS=1");
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, RANKS, one_dies, NULL), TUTTI_ERROR_DEAD);
    plugin_remove();
}
