/* SPDX-License-Identifier: Apache-2.0
 *
 * Who runs a collective: by itself the first executor that serves it, by name the one that was asked for.
 */
#include <string.h>
#include <tutti/collective.h>
#include <unistd.h>

#include "../harness.h"
#include "../memory/plugin/compile.h"

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

/* ---- a second executor for memory of the CPU (plugin/exchange.c) ---- */

#define BY(name) TUTTI_OPTIONS(tutti_call, .executor = name)

static void two_executors(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    float in[3] = { 1, (float)rank, 0.1f }, out[3], same[3];
    for (int round = 0; round < 3; round++) { /* in turns: the order of calls is the group's, whoever runs them */
        CHECK_OK(tutti_all_reduce(group, in, out, 3, TUTTI_F32, TUTTI_SUM, BY("exchange")));
        CHECK_TEXT(ran_of(group).executor, "exchange");
        CHECK_TEXT(ran_of(group).operation, "all_reduce");
        CHECK_OK(tutti_all_reduce(group, in, same, 3, TUTTI_F32, TUTTI_SUM, NULL)); /* nobody is named: shm again */
        CHECK_TEXT(ran_of(group).executor, "shm");
        CHECK(memcmp(out, same, sizeof out) == 0);
        CHECK_OK(tutti_barrier(group, BY("exchange")));
        CHECK_TEXT(ran_of(group).executor, "exchange");
        CHECK_OK(tutti_barrier(group, BY("shm")));
        CHECK_TEXT(ran_of(group).executor, "shm");
    }
    CHECK(out[0] == (float)size);
}

static void works_and_batches(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    float one = 1, sums[4] = { 0 }, size = (float)tutti_group_size(group);
    tutti_work *works[4];
    for (int i = 0; i < 4; i++) /* by both, one after the other */
        CHECK_OK(tutti_all_reduce(
            group, &one, &sums[i], 1, TUTTI_F32, TUTTI_SUM,
            TUTTI_OPTIONS(tutti_call, .executor = i % 2 == 0 ? "exchange" : "shm", .work = &works[i])));
    for (int i = 3; i >= 0; i--) {
        CHECK_OK(tutti_work_wait(works[i], 0));
        tutti_work_release(works[i]);
        CHECK(sums[i] == size);
    }
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    for (int i = 0; i < 4; i++)
        CHECK_OK(tutti_all_reduce(group, &size, &sums[i], 1, TUTTI_F32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .executor = i < 2 ? "exchange" : "shm", .batch = batch)));
    CHECK_OK(tutti_batch_end(batch, NULL));
    for (int i = 0; i < 4; i++)
        CHECK(sums[i] == size * size);
    /* One that nobody waits for is run by the helper. */
    CHECK_OK(tutti_all_reduce(group, &one, &sums[0], 1, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .executor = "exchange", .work = &works[0])));
    tutti_work_release(works[0]);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK(sums[0] == size);
}

/* The message of this rank is the message of all. */
static void same_everywhere(tutti_group *group) {
    char mine[256] = { 0 }, all[4][256];
    snprintf(mine, sizeof mine, "%s", tutti_error_message());
    CHECK_OK(tutti_all_gather(group, mine, all[0], sizeof mine, TUTTI_U8, NULL));
    for (int member = 0; member < tutti_group_size(group); member++)
        CHECK_TEXT(all[member], mine);
}

static void refusals(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    float many[2000] = { 0 };
    int whole = 1;
    uint64_t before;
    CHECK_OK(tutti_barrier(group, NULL));
    before = tutti_group_sequence(group);
    CHECK_STATUS(tutti_all_reduce(group, &whole, &whole, 1, TUTTI_I32, TUTTI_SUM, BY("exchange")),
                 TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("all_reduce on group");
    CHECK_MESSAGE("executor exchange does not serve this call; for this memory there are: shm");
    CHECK_EQ(tutti_group_sequence(group), before); /* it took no number */
    same_everywhere(group);
    CHECK_STATUS(tutti_all_reduce(group, many, many, 2000, TUTTI_F32, TUTTI_SUM, BY("exchange")),
                 TUTTI_ERROR_UNSUPPORTED);
    same_everywhere(group);
    CHECK_STATUS(tutti_send(group, many, 1, TUTTI_F32, 0, 0, BY("exchange")), TUTTI_ERROR_UNSUPPORTED);
    CHECK_STATUS(tutti_barrier(group, BY("nobody")), TUTTI_ERROR_NOT_FOUND);
    CHECK_MESSAGE("no executor is called \"nobody\" here; for this memory there are: shm");
    same_everywhere(group);
    /* There are backends of these names: one serves another device, the other has no executor. */
    CHECK_STATUS(tutti_barrier(group, BY("elsewhere")), TUTTI_ERROR_NOT_FOUND);
    same_everywhere(group);
    CHECK_STATUS(tutti_barrier(group, BY("memfd")), TUTTI_ERROR_NOT_FOUND);
    CHECK_OK(tutti_barrier(group, BY("exchange")));
}

/* Ranks that name different executors wait in different places: they are told, whoever comes first. */
static void differ(tutti_world *world, bool in_use) {
    tutti_group *group = tutti_world_group(world);
    int last = tutti_group_size(group) - 1;
    bool other = tutti_group_rank(group) == last;
    float one = 1, sum;
    if (in_use) {
        CHECK_OK(tutti_barrier(group, BY("exchange")));
        CHECK_OK(tutti_barrier(group, BY("shm")));
    }
    CHECK_STATUS(tutti_all_reduce(group, &one, &sum, 1, TUTTI_F32, TUTTI_SUM, other ? BY("exchange") : BY("shm")),
                 TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("by executor exchange");
    CHECK_MESSAGE("by executor shm");
    CHECK_MESSAGE("have a call run by the same executor");
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_MISMATCH); /* it has ended */
}

static void differ_at_first(tutti_world *world, void *argument) {
    (void)argument;
    differ(world, false);
}

static void differ_later(tutti_world *world, void *argument) {
    (void)argument;
    differ(world, true);
}

static void with_plugins(void (*body)(tutti_world *, void *), bool processes) {
    plugin_compile_file("collective/plugin/exchange.c", "exchange", "");
    plugin_compile_file("collective/plugin/exchange.c", "elsewhere", "-DPLUGIN_DEVICE=TUTTI_CUDA");
    plugin_compile("memfd", "-DPLUGIN_DEVICE=TUTTI_CPU");
    if (processes)
        test_processes(3, body, NULL);
    else
        test_threads(3, body, NULL);
    plugin_remove();
}

#define WITH_PLUGINS(sentence, body) \
    TEST(sentence##_as_threads) {    \
        with_plugins(body, false);   \
    }                                \
    TEST(sentence##_as_processes) {  \
        with_plugins(body, true);    \
    }
WITH_PLUGINS(a_backend_brings_a_second_executor_which_a_call_forces_by_its_name, two_executors)
WITH_PLUGINS(works_and_batches_go_to_the_executor_that_each_call_names, works_and_batches)
WITH_PLUGINS(what_an_executor_does_not_serve_is_refused_alike_on_all_ranks, refusals)
WITH_PLUGINS(ranks_whose_first_call_names_different_executors_are_told, differ_at_first)
WITH_PLUGINS(ranks_that_name_different_executors_later_are_told, differ_later)
