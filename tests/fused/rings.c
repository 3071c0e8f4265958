/* SPDX-License-Identifier: Apache-2.0
 *
 * The rings through which tiles of a scatter go: where tiles lie, and that every way of copying them gives the bits of
 * the unfused pair, whatever calls follow each other and whoever is late.
 */
#include <unistd.h>

#include "../collective/values.h"
#include "fused/workspace.h"
#include "support.h"

/* ---- places ---- */

static bool meet(size_t place, size_t bytes, size_t other, size_t other_bytes) {
    return place < other + other_bytes && other < place + bytes;
}

TEST(a_tile_never_lies_on_one_of_the_two_before_it) {
    uint64_t random = 3;
    for (int run = 0; run < 200; run++) {
        tu_fused state = { .size = 2 + run % 3 };
        size_t most = 1 + values_random(&random) % 4000;
        state.ring_bytes = tu_fused_ring_for(&state, most, most);
        size_t places[2] = { 0, 0 }, bytes[2] = { 0, 0 };
        for (int call = 0; call < 50; call++) {
            size_t each = call % 7 == 0 ? most : 1 + values_random(&random) % most;
            uint64_t tiles = 1 + values_random(&random) % 9;
            for (uint64_t i = 0; i < tiles; i++) {
                size_t place = tu_fused_tile_place(&state, each, i);
                CHECK(place % TU_FUSED_ALIGN == 0 && place + each <= state.ring_bytes);
                CHECK(!meet(place, each, places[0], bytes[0]) && !meet(place, each, places[1], bytes[1]));
                places[0] = places[1], bytes[0] = bytes[1];
                places[1] = place, bytes[1] = each;
            }
            state.ring_at = tu_fused_tile_place(&state, each, tiles);
        }
    }
}

/* As many tiles as there are channels, and one more, may not have been read yet. */
TEST(a_tile_never_lies_on_one_that_may_not_have_been_read) {
    uint64_t random = 5;
    for (int run = 0; run < 400; run++) {
        tu_fused state = { .size = 2 };
        size_t most = 1 + values_random(&random) % 4000, each = 1 + values_random(&random) % most;
        state.ring_bytes = tu_fused_ring_for(&state, run % 3 == 0 ? most : (size_t)run % 3 << 21, most);
        state.ring_at = values_random(&random) % (state.ring_bytes / TU_FUSED_ALIGN + 1) * TU_FUSED_ALIGN;
        int channels = tu_fused_channels(&state, each);
        CHECK(channels >= 1 && channels <= TU_FUSED_CHANNELS);
        for (uint64_t i = 0; i < 200; i++)
            for (uint64_t back = 1; back <= (uint64_t)channels + 1 && back <= i; back++)
                CHECK(!meet(tu_fused_tile_place(&state, each, i), each, tu_fused_tile_place(&state, each, i - back),
                            each));
    }
    tu_fused state = { .size = 2, .ring_bytes = 4 * 128 };
    CHECK_EQ(tu_fused_channels(&state, 128), 1);
    state.ring_bytes = (size_t)2 << 20;
    CHECK_EQ(tu_fused_channels(&state, (size_t)1 << 17), 13);
}

TEST(rings_are_larger_than_a_cache_only_where_blocks_are_worth_it) {
    tu_fused two = { .size = 2 }, five = { .size = 5 };
    CHECK_EQ(tu_fused_ring_for(&two, 100, 100), 4 * 128);
    CHECK_EQ(tu_fused_ring_for(&two, (size_t)1 << 20, (size_t)1 << 18), (size_t)2 << 20);
    CHECK_EQ(tu_fused_ring_for(&five, (size_t)1 << 20, (size_t)1 << 16), (size_t)1 << 19);
    CHECK_EQ(tu_fused_ring_for(&five, (size_t)1 << 20, (size_t)1 << 18), (size_t)1 << 20);
    CHECK_EQ(tu_fused_ring_for(&two, (size_t)2 << 20, (size_t)1 << 17), (size_t)2 << 20);
    CHECK_EQ(tu_fused_ring_for(&two, ((size_t)2 << 20) + 1, (size_t)1 << 17), (size_t)5 << 20);
    CHECK_EQ(tu_fused_ring_for(&five, (size_t)8 << 20, (size_t)1 << 17), (size_t)5 << 18);
}

/* ---- bits ---- */

/* Blocks of less than a tile, of some tiles, and of several chunks; the last tile has fewer rows. A late rank finds
 * tiles of the next call beside those that it has not read. */
static void many_calls(tutti_world *world, void *argument) {
    static const tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F64, TUTTI_C64 };
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    uint64_t random = 7; /* the same on all ranks */
    for (int call = 0; call < *(const int *)argument; call++) {
        tt_scope scope = tt_scope_open();
        uint64_t word = values_random(&random);
        int64_t rows = 1 + (int64_t)(word % (call % 4 == 0 ? 700 : 90)), columns = 1 + (int64_t)(word >> 16) % 700;
        tutti_dtype dtype = dtypes[(word >> 32) % 4];
        int dim = (int)(word >> 40) % 2;
        tt_tensor *left = whole(tt_shape(dim == 0 ? ranks * rows : rows, 5), dtype, rank + call),
                  *right = whole(tt_shape(5, dim == 0 ? columns : ranks * columns), dtype, call);
        tt_tensor *expected = tt_reduce_scatter(tt_matmul(left, right), TUTTI_SUM, dim, group);
        if ((int)(word >> 48) % ranks == rank)
            usleep(500);
        tt_tensor *first = tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, dim, group),
                  *second = tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, dim, group);
        CHECK(tt_equal(first, expected) && tt_equal(second, expected));
        CHECK_OK(tt_scope_close(&scope));
    }
}

/* Blocks of one to five chunks, in which ranks run ahead of each other: the last chunk has many tiles, one, or one row
 * of one; among many ranks, chunks of bf16 are larger than a ring. A short call, whose tiles are smaller, follows
 * each. */
static void long_calls(tutti_world *world, void *argument) {
    static const int64_t rests[] = { 32, 33, 0, 1, 64, 200 };
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    for (int call = 0; call < *(const int *)argument; call++) {
        tt_scope scope = tt_scope_open();
        int64_t rows = (call % 2 == 0 ? 1024 : 256) + rests[call / 2 % 6];
        tutti_dtype dtype = call % 4 == 3 ? TUTTI_BF16 : TUTTI_F32;
        tt_tensor *left = whole(tt_shape(ranks * rows, 2), dtype, rank + call),
                  *right = whole(tt_shape(2, dtype == TUTTI_F32 ? 1024 : 4096), dtype, call),
                  *few = tt_narrow(left, 0, 0, ranks * 3);
        tt_tensor *expected = tt_reduce_scatter(tt_matmul(left, right), TUTTI_SUM, 0, group),
                  *expected_few = tt_reduce_scatter(tt_matmul(few, right), TUTTI_SUM, 0, group);
        if (call % ranks == rank)
            usleep(500);
        tt_tensor *scattered = tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, 0, group),
                  *scattered_few = tt_fused_matmul_reduce_scatter(few, right, TUTTI_SUM, 0, group);
        CHECK(tt_equal(scattered, expected) && tt_equal(scattered_few, expected_few));
        CHECK_OK(tt_scope_close(&scope));
    }
}

TEST_LIMIT(long_scatters_in_which_ranks_run_ahead_arrive_whole, 300) {
    int calls = test_sanitized() ? 2 : 12;
    CHECK_EQ(setenv("TUTTI_THREADS", "1", 1), 0);
    test_threads(2, long_calls, &calls);
    test_threads(3, long_calls, &calls);
}

TEST_LIMIT(long_scatters_of_processes_in_which_ranks_run_ahead_arrive_whole, 300) {
    int calls = test_sanitized() ? 2 : 6;
    CHECK_EQ(setenv("TUTTI_THREADS", "1", 1), 0);
    test_processes(4, long_calls, &calls);
}

static char path[64];

static void with_table(const char *text) {
    snprintf(path, sizeof path, "/tmp/tutti-rings-%d", (int)getpid());
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
    setenv("TUTTI_TUNING", path, 1);
}

static void run_many(const char *table, const char *threads, bool as_processes) {
    int calls = test_sanitized() ? 8 : 24;
    CHECK_EQ(setenv("TUTTI_THREADS", threads, 1), 0);
    if (table != NULL)
        with_table(table);
    if (as_processes) {
        test_processes(4, many_calls, &calls);
    } else {
        test_threads(2, many_calls, &calls);
        test_threads(3, many_calls, &calls);
    }
    if (table != NULL)
        unlink(path);
}

TEST_LIMIT(tiles_arrive_whole_in_the_way_that_is_measured, 120) {
    run_many(NULL, "1", false);
}

TEST_LIMIT(tiles_arrive_whole_beside_the_sum_of_the_ones_before, 120) {
    run_many("stage 1G\n", "1", false);
}

TEST_LIMIT(tiles_of_processes_arrive_whole_beside_the_sum_of_the_ones_before, 120) {
    run_many("stage 1G\n", "1", true);
}

TEST_LIMIT(tiles_arrive_whole_past_the_caches, 120) {
    run_many("stage 1\n", "1", false);
}

TEST_LIMIT(tiles_of_processes_arrive_whole_past_the_caches, 120) {
    run_many("stage 1\n", "1", true);
}

TEST_LIMIT(tiles_arrive_whole_from_ranks_with_two_threads, 120) {
    run_many("stage 1G\n", "2", false);
}

TEST_LIMIT(tiles_of_processes_arrive_whole_in_the_way_that_is_measured, 120) {
    run_many(NULL, "2", true);
}
