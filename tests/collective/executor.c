/* SPDX-License-Identifier: Apache-2.0
 *
 * Who runs a collective: by itself the first executor that serves it, by name the one that was asked for.
 */
#include <string.h>
#include <tutti/collective.h>
#include <unistd.h>

#include "../harness.h"

static tutti_ran ran_of(tutti_group *group) {
    tutti_ran ran = TUTTI_RAN_INIT;
    CHECK_OK(tutti_group_ran(group, &ran));
    return ran;
}

TEST_WORLD(ranks_of_a_host_use_shm, 2) {
    tutti_group *group = tutti_world_group(world);
    int value = 1;
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_TEXT(ran_of(group).executor, "shm");
    CHECK_OK(
        tutti_all_reduce(group, &value, &value, 1, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .executor = "shm")));
    CHECK_EQ(value, 2);
    CHECK_TEXT(ran_of(group).executor, "shm");
}

TEST(a_group_of_one_is_alone) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    tutti_group *group = tutti_world_group(world);
    int in = 7, out = 0;
    CHECK_OK(tutti_all_reduce(group, &in, &out, 1, TUTTI_I32, TUTTI_SUM, NULL));
    CHECK_TEXT(ran_of(group).executor, "alone");
    CHECK_EQ(out, 7);
    /* It has shm too: its messages to itself go that way. */
    CHECK_STATUS(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .executor = "cuda")), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("alone, shm");
    CHECK_STATUS(tutti_send(group, &in, 1, TUTTI_I32, 0, 0, TUTTI_OPTIONS(tutti_call, .executor = "alone")),
                 TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("does not serve");
    CHECK_OK(tutti_world_close(world));
}

TEST(a_fake_world_is_run_by_fake) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(0, 4, NULL, &world));
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_TEXT(ran_of(group).executor, "fake");
    CHECK_STATUS(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .executor = "shm")), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("there are: fake");
    CHECK_OK(tutti_world_close(world));
}

TEST_WORLD(an_executor_that_is_not_there_is_refused_with_a_list_and_takes_no_number, 2) {
    tutti_group *group = tutti_world_group(world);
    tutti_work *work = NULL;
    uint64_t before = tutti_group_sequence(group);
    CHECK_STATUS(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .executor = "nccl")), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("\"nccl\"");
    CHECK_MESSAGE("there are: shm");
    CHECK_STATUS(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .executor = "nccl", .work = &work)),
                 TUTTI_ERROR_NOT_FOUND);
    CHECK(work == NULL);
    CHECK_EQ(tutti_group_sequence(group), before);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(a_device_that_is_told_is_believed, 2) {
    tutti_group *group = tutti_world_group(world);
    int value = 1;
    CHECK_OK(tutti_all_reduce(group, &value, &value, 1, TUTTI_I32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .device = TUTTI_CPU)));
    CHECK_EQ(value, 2);
    CHECK_STATUS(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .device = TUTTI_META)), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("meta");
    CHECK_STATUS(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .device = 77)), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(group, NULL));
}

/* The number that a call of one rank gets must be that of the others, whatever way it took. */
static void refuse(tutti_group *group, bool as_work) {
    static _Thread_local float large[4096];
    tutti_work *work = NULL;
    const tutti_call *call = as_work ? TUTTI_OPTIONS(tutti_call, .algorithm = TUTTI_ALGORITHM_INLINE, .work = &work)
                                     : TUTTI_OPTIONS(tutti_call, .algorithm = TUTTI_ALGORITHM_INLINE);
    tutti_status status = tutti_all_reduce(group, large, large, 4096, TUTTI_F32, TUTTI_SUM, call);
    if (status == TUTTI_OK && work != NULL)
        status = tutti_work_wait(work, 0);
    tutti_work_release(work);
    CHECK_EQ(status, TUTTI_ERROR_ARGUMENT);
}

TEST_WORLD(a_refused_call_takes_no_number_whether_it_blocks_or_not, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    float value = 1, small = 1;
    tutti_work *work;
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == 0) /* the other's work stays open meanwhile: what it starts next is queued */
        usleep(100000);
    CHECK_OK(
        tutti_all_reduce(group, &small, &small, 1, TUTTI_F32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &work)));
    refuse(group, rank == 1);
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == 1) /* the other waits, and looks at what this rank did under the same number */
        usleep(100000);
    CHECK_OK(tutti_all_reduce(group, &value, &value, 1, TUTTI_F32, TUTTI_SUM, NULL));
    CHECK_EQ(value, 2);
    uint64_t mine = tutti_group_sequence(group), all[2];
    CHECK_OK(tutti_all_gather(group, &mine, all, 1, TUTTI_U64, NULL));
    CHECK_EQ(all[0], all[1]);
}

TEST_WORLD(a_refused_call_in_a_batch_is_refused_when_it_is_noted, 2) {
    tutti_group *group = tutti_world_group(world);
    float large[256] = { 0 };
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    CHECK_STATUS(tutti_all_reduce(group, large, large, 256, TUTTI_F32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .batch = batch, .algorithm = TUTTI_ALGORITHM_INLINE)),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .batch = batch, .executor = "none")),
                 TUTTI_ERROR_NOT_FOUND);
    CHECK_OK(tutti_batch_end(batch, NULL));
    CHECK_OK(tutti_barrier(group, NULL));
}
