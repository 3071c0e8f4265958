/* SPDX-License-Identifier: Apache-2.0
 *
 * Refill: what it refuses, and what it does when nobody comes. That a pool becomes whole again is shown by
 * tests/tool/server.py, under tutti run --refill.
 */
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <tutti/tutti.h>
#include <unistd.h>

#include "../harness.h"

static _Atomic int *content;

static tutti_status wait_in_vain(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world), *whole, *rest;
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1)
        raise(SIGKILL);
    while (tutti_group_check(group) == TUTTI_OK)
        usleep(1000);
    CHECK_STATUS(tutti_group_refill(group, 300000000, &whole), TUTTI_ERROR_TIMEOUT);
    if (tutti_world_rank(world) == 0) {
        CHECK_MESSAGE("rank 1");
        CHECK_MESSAGE("tutti run --refill");
    }
    /* Nothing is spoilt: the survivors go on without it. */
    int64_t one = 1, sum;
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    CHECK_OK(tutti_all_reduce(rest, &one, &sum, 1, TUTTI_I64, TUTTI_SUM, NULL));
    CHECK_EQ(sum, 2);
    tutti_group_release(rest);
    atomic_fetch_add(content, 1);
    return TUTTI_OK;
}

TEST(a_refill_for_which_nobody_comes_names_the_rank_and_spoils_nothing) {
    content = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(content != MAP_FAILED);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, wait_in_vain, NULL), TUTTI_ERROR_DEAD);
    CHECK_EQ(atomic_load(content), 2);
    munmap(content, 4096);
}

TEST_WORLD_PROCESSES(a_refill_of_a_group_whose_ranks_all_live_is_refused, 2) {
    tutti_group *group = tutti_world_group(world), *whole, *other;
    CHECK_STATUS(tutti_group_refill(group, 0, &whole), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("live");
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &other));
    CHECK_STATUS(tutti_group_refill(other, 0, &whole), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("tutti_world_group");
    CHECK_STATUS(tutti_group_refill(group, -1, &whole), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_refill(group, 0, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_refill(NULL, 0, &whole), TUTTI_ERROR_ARGUMENT);
    tutti_group_release(other);
}

TEST_WORLD_THREADS(ranks_that_are_threads_cannot_be_replaced, 2) {
    tutti_group *whole;
    CHECK_STATUS(tutti_group_refill(tutti_world_group(world), 0, &whole), TUTTI_ERROR_UNSUPPORTED);
}
