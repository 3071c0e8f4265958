/* SPDX-License-Identifier: Apache-2.0
 *
 * Ordinary memory goes through slots and rings: many messages of many lengths one after the other, in many rounds, by
 * ordinary stores and past the cache, arrive whole; and how staging learns which of the two is quicker.
 */
#include <tutti/collective.h>
#include <unistd.h>

#include "collective/compute.h"
#include "values.h"

/* Every rank can compute what every rank has. */
static int32_t value_of(int rank, int call, size_t index) {
    return rank * 100003 + call * 7919 + (int32_t)(index * 31);
}

static void fill(int32_t *values, size_t count, int rank, int call) {
    for (size_t i = 0; i < count; i++)
        values[i] = value_of(rank, call, i);
}

typedef struct buffers {
    tutti_group *group;
    int rank, size, call;
    size_t count;
    int32_t *in, *out;
} buffers;

static void check_all_reduce(const buffers *data) {
    fill(data->in, data->count, data->rank, data->call);
    CHECK_OK(tutti_all_reduce(data->group, data->in, data->out, data->count, TUTTI_I32, TUTTI_MAX, NULL));
    for (size_t i = 0; i < data->count; i++)
        CHECK_EQ(data->out[i], value_of(data->size - 1, data->call, i));
}

static void check_all_reduce_in_place(const buffers *data) {
    fill(data->out, data->count, data->rank, data->call);
    CHECK_OK(tutti_all_reduce(data->group, data->out, data->out, data->count, TUTTI_I32, TUTTI_MIN, NULL));
    for (size_t i = 0; i < data->count; i++)
        CHECK_EQ(data->out[i], value_of(0, data->call, i));
}

static void check_reduce(const buffers *data) {
    int root = data->call % data->size;
    fill(data->in, data->count, data->rank, data->call);
    CHECK_OK(tutti_reduce(data->group, data->in, data->out, data->count, TUTTI_I32, TUTTI_MAX, root, NULL));
    for (size_t i = 0; i < data->count && data->rank == root; i++)
        CHECK_EQ(data->out[i], value_of(data->size - 1, data->call, i));
}

static void check_reduce_scatter(const buffers *data) {
    size_t share = data->count / (size_t)data->size;
    fill(data->in, share * (size_t)data->size, data->rank, data->call);
    CHECK_OK(tutti_reduce_scatter(data->group, data->in, data->out, share, TUTTI_I32, TUTTI_MAX, NULL));
    for (size_t i = 0; i < share; i++)
        CHECK_EQ(data->out[i], value_of(data->size - 1, data->call, (size_t)data->rank * share + i));
}

static void check_all_gather(const buffers *data) {
    size_t share = data->count / (size_t)data->size;
    fill(data->in, share, data->rank, data->call);
    CHECK_OK(tutti_all_gather(data->group, data->in, data->out, share, TUTTI_I32, NULL));
    for (int source = 0; source < data->size; source++)
        for (size_t i = 0; i < share; i++)
            CHECK_EQ(data->out[(size_t)source * share + i], value_of(source, data->call, i));
}

static void check_all_to_all(const buffers *data) {
    size_t share = data->count / (size_t)data->size;
    fill(data->in, share * (size_t)data->size, data->rank, data->call);
    CHECK_OK(tutti_all_to_all(data->group, data->in, data->out, share, TUTTI_I32, NULL));
    for (int source = 0; source < data->size; source++)
        for (size_t i = 0; i < share; i++)
            CHECK_EQ(data->out[(size_t)source * share + i],
                     value_of(source, data->call, (size_t)data->rank * share + i));
}

static void check_broadcast(const buffers *data) {
    int root = data->call % data->size;
    fill(data->out, data->count, data->rank, data->call);
    CHECK_OK(tutti_broadcast(data->group, data->out, data->out, data->count, TUTTI_I32, root, NULL));
    for (size_t i = 0; i < data->count; i++)
        CHECK_EQ(data->out[i], value_of(root, data->call, i));
}

/* Lengths change from call to call, so that slots of the ring begin everywhere and wrap around at all times. */
static void many_messages(tutti_world *world, void *argument) {
    static void (*const checks[])(
        const buffers *) = { check_all_reduce,     check_all_gather,          check_all_to_all, check_broadcast,
                             check_reduce_scatter, check_all_reduce_in_place, check_reduce };
    enum {
        CHECKS = sizeof checks / sizeof checks[0]
    };
    size_t most = test_sanitized() ? 20000 : 120000;
    buffers data = { .group = tutti_world_group(world),
                     .rank = tutti_world_rank(world),
                     .size = tutti_world_size(world),
                     .in = malloc(most * sizeof(int32_t)),
                     .out = malloc(most * sizeof(int32_t)) };
    CHECK(data.in != NULL && data.out != NULL);
    uint64_t random = 5;
    for (data.call = 0; data.call < *(const int *)argument; data.call++) {
        uint64_t word = values_random(&random);
        data.count = word % 4 == 0 ? 1 + (word >> 8) % most : 1 + (word >> 8) % (most / 8);
        checks[(word >> 4) % CHECKS](&data);
        if (word % 8 == 1)
            CHECK_OK(tutti_barrier(data.group, NULL));
    }
    free(data.in);
    free(data.out);
}

static char path[64];

static void with_table(const char *text) {
    snprintf(path, sizeof path, "/tmp/tutti-staging-%d", (int)getpid());
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
    setenv("TUTTI_TUNING", path, 1);
}

static void run_many(const char *table) {
    int calls = test_sanitized() ? 40 : 150;
    if (table != NULL)
        with_table(table);
    test_threads(2, many_messages, &calls);
    test_threads(3, many_messages, &calls);
    test_processes(4, many_messages, &calls);
    if (table != NULL)
        unlink(path);
}

TEST_LIMIT(messages_of_all_lengths_arrive_whole, 120) {
    run_many(NULL);
}

TEST_LIMIT(messages_in_many_rounds_arrive_whole_by_ordinary_stores, 120) {
    run_many("chunk 16K\nstage 1G\n");
}

TEST_LIMIT(messages_in_many_rounds_arrive_whole_past_the_cache, 120) {
    run_many("chunk 16K\nstage 1\nstream 1\n");
}

TEST_LIMIT(outputs_past_the_cache_and_staging_through_it_go_together, 120) {
    run_many("stage 1G\nstream 1\n");
}

/* Longer than a ring, and of no round number, so that the last round is a short one. */
static void long_messages(tutti_world *world, void *argument) {
    static void (*const checks[])(const buffers *) = { check_all_reduce_in_place, check_all_to_all, check_broadcast };
    size_t most = test_sanitized() ? 800003 : 2400003;
    buffers data = { .group = tutti_world_group(world),
                     .rank = tutti_world_rank(world),
                     .size = tutti_world_size(world),
                     .count = most,
                     .in = malloc(most * sizeof(int32_t)),
                     .out = malloc(most * sizeof(int32_t)) };
    (void)argument;
    CHECK(data.in != NULL && data.out != NULL);
    for (data.call = 0; data.call < 6; data.call++)
        checks[data.call % 3](&data);
    free(data.in);
    free(data.out);
}

TEST_LIMIT(messages_longer_than_the_ring_arrive_whole_where_ranks_outnumber_the_cores, 120) {
    setenv("TUTTI_SPIN", "0", 1); /* as if they did */
    test_processes(4, long_messages, NULL);
    test_threads(3, long_messages, NULL);
}

/* ---- which stores ---- */

TEST(staging_that_was_slow_twice_goes_past_the_cache_until_two_trials_are_quick) {
    tu_collective state = { .watch.watched = true };
    tu_stage_judge(&state.watch, 65536, 3000);
    CHECK_EQ(tu_ring_flags(&state, 65536), 0);
    tu_stage_judge(&state.watch, 65536, 30000); /* once: it may have been interrupted */
    CHECK_EQ(tu_ring_flags(&state, 65536), 0);
    tu_stage_judge(&state.watch, 65536, 3000);
    tu_stage_judge(&state.watch, 65536, 30000);
    CHECK_EQ(tu_ring_flags(&state, 65536), 0);
    tu_stage_judge(&state.watch, 65536, 30000);
    CHECK_EQ(tu_ring_flags(&state, 65536), TU_KERNEL_STREAM);
    tu_stage_judge(&state.watch, 16384, 7000); /* a trial that fails changes nothing */
    CHECK_EQ(tu_ring_flags(&state, 65536), TU_KERNEL_STREAM);
    tu_stage_judge(&state.watch, 16384, 800); /* one that is quick may have been lucky */
    CHECK_EQ(tu_ring_flags(&state, 65536), TU_KERNEL_STREAM);
    tu_stage_judge(&state.watch, 16384, 7000);
    tu_stage_judge(&state.watch, 16384, 800);
    CHECK_EQ(tu_ring_flags(&state, 65536), TU_KERNEL_STREAM);
    tu_stage_judge(&state.watch, 16384, 800);
    CHECK_EQ(tu_ring_flags(&state, 65536), 0);
    int interval = state.watch.trial_interval; /* trials become rarer with every time that they have misled */
    tu_stage_judge(&state.watch, 65536, 30000);
    tu_stage_judge(&state.watch, 65536, 30000);
    CHECK(tu_ring_flags(&state, 65536) == TU_KERNEL_STREAM && state.watch.trial_interval > interval);
}

TEST(a_tuning_file_that_says_how_to_stage_is_obeyed) {
    tu_collective state = { .stage_stream = 1000, .watch.far = true };
    CHECK_EQ(tu_ring_flags(&state, 999), 0);
    CHECK_EQ(tu_ring_flags(&state, 1000), TU_KERNEL_STREAM);
}
