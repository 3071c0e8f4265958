/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused products in graphs (TEST_DEVICE=cuda): what is captured and replayed, and what runs and calls leave of each
 * other's workspace. Most of it needs a GPU, on which all ranks are.
 */
#include "gpu.h"

TEST_RANKS(calls_are_captured_and_replayed_and_a_workspace_that_would_grow_is_an_error) {
    BEGIN;
    driver graph = graphs();
    void *stream = tt_stream(test_device()), *captured, *executable;
    tt_tensor *x = there(whole(tt_shape(64, 64), TUTTI_F32, rank)),
              *right = there(whole(tt_shape(64, 32), TUTTI_F32, 3)),
              *large = there(whole(tt_shape(256, 64), TUTTI_F32, rank)),
              *tall = there(whole(tt_shape(64 * ranks, 64), TUTTI_F32, rank)),
              *narrow = there(whole(tt_shape(512 * ranks, 64), TUTTI_BF16, rank)),
              *wide = there(whole(tt_shape(64, 512), TUTTI_BF16, 3));
    for (int round = 0; round < 2; round++) { /* both halves, and everything that is made on first use */
        CHECK(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).count == 1);
        CHECK(tt_fused_matmul_reduce_scatter(tall, right, TUTTI_SUM, 0, group) != NULL);
    }
    tt_synchronize(test_device());
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(graph.begin(stream, 1), 0);
    tt_tensor *y = tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
              *part = tt_fused_matmul_reduce_scatter(tall, right, TUTTI_SUM, 0, group);
    FAILS(tt_fused_all_gather_matmul(large, tt_tensors(right), 0, group, NULL), TUTTI_ERROR_STATE,
          "would have to grow to");
    FAILS(tt_fused_matmul_reduce_scatter(narrow, wide, TUTTI_SUM, 0, group), TUTTI_ERROR_STATE,
          "bytes on the device and would have to grow to"); /* what is made in one kernel too */
    CHECK_EQ(graph.end(stream, &captured), 0);
    CHECK(y != NULL && part != NULL);
    CHECK_EQ(graph.instantiate(&executable, captured, 0), 0);
    for (int round = 0; round < 3; round++) {
        tt_copy_(x, there(whole(tt_shape(64, 64), TUTTI_F32, rank + 100 * round)));
        CHECK_EQ(graph.launch(executable, stream), 0);
        CHECK(tt_synchronize(test_device()));
        for (int from = 0; from < ranks; from++)
            CHECK(tt_equal(back(tt_narrow(y, 0, from * 64, 64)),
                           tt_matmul(whole(tt_shape(64, 64), TUTTI_F32, from + 100 * round), back(right))));
    }
    tt_tensor *sum = NULL;
    for (int from = 0; from < ranks; from++) {
        tt_tensor *one = tt_matmul(whole(tt_shape(64 * ranks, 64), TUTTI_F32, from), back(right));
        sum = from == 0 ? one : tt_add(sum, one);
    }
    CHECK(tt_equal(back(part), part_of(sum, 0, rank, ranks)));
    CHECK_OK(tutti_group_check(group));
    END;
}

/* Runs of a graph behind each other, on ranks of which one is late: every run has its own inputs and results. */
static void check_runs(tutti_group *group, tutti_dtype dtype) {
    enum {
        RUNS = 24
    };
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    driver graph = graphs();
    void *stream = tt_stream(test_device()), *captured, *executable;
    tt_dims shape = tt_shape(256, 64), tall = tt_shape(256 * ranks, 64);
    tt_tensor *x = there(whole(shape, dtype, 0)), *y = there(whole(tall, dtype, 0)), *gathered[RUNS], *parts[RUNS],
              *right = there(whole(tt_shape(64, 512), dtype, 3)), *slow = there(whole(tt_shape(1024, 1024), dtype, 5));
    for (int round = 0; round < 2; round++) {
        CHECK(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).count == 1);
        CHECK(tt_fused_matmul_reduce_scatter(y, right, TUTTI_SUM, 0, group) != NULL);
    }
    (void)tt_matmul(slow, slow);
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(graph.begin(stream, 1), 0);
    tt_tensor *all = tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
              *part = tt_fused_matmul_reduce_scatter(y, right, TUTTI_SUM, 0, group);
    CHECK_EQ(graph.end(stream, &captured), 0);
    CHECK(all != NULL && part != NULL);
    CHECK_EQ(graph.instantiate(&executable, captured, 0), 0);
    tt_tensor *xs[RUNS], *ys[RUNS];
    for (int i = 0; i < RUNS; i++) {
        xs[i] = there(whole(shape, dtype, rank + 10 * i));
        ys[i] = there(whole(tall, dtype, rank + 10 * i));
    }
    for (int i = 0; i < RUNS; i++) {
        for (int j = 0; i % ranks == rank && j < 8; j++)
            (void)tt_matmul(slow, slow);
        tt_copy_(x, xs[i]);
        tt_copy_(y, ys[i]);
        CHECK_EQ(graph.launch(executable, stream), 0);
        gathered[i] = tt_clone(all);
        parts[i] = tt_clone(part);
    }
    CHECK(tt_synchronize(test_device()));
    for (int i = 0; i < RUNS; i++) {
        tt_tensor *sum = NULL;
        for (int from = 0; from < ranks; from++) {
            tt_tensor *one = part_of(tt_matmul(whole(tall, dtype, from + 10 * i), back(right)), 0, rank, ranks);
            sum = from == 0 ? tt_to(one, TUTTI_F32) : tt_add(sum, tt_to(one, TUTTI_F32));
            CHECK(tt_equal(back(tt_narrow(gathered[i], 0, from * 256, 256)),
                           tt_matmul(whole(shape, dtype, from + 10 * i), back(right))));
        }
        CHECK(tt_equal(back(parts[i]), tt_to(sum, dtype)));
    }
    CHECK_OK(tutti_group_check(group));
}

TEST_GPU(runs_of_a_graph_that_follow_each_other_do_not_disturb_each_other) {
    BEGIN;
    check_runs(group, TUTTI_BF16);
    check_runs(group, TUTTI_F32);
    END;
}

/* Runs of a graph and calls in turns, none to two calls at a time: each writes a half or a stage that one before it has
 * used. Rank 0's product is so wide that it still reads the others' shards when they have gone on. */
static void check_turns(tutti_group *group, tutti_dtype dtype) {
    enum {
        TURNS = 9
    };
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group), calls = 0;
    driver graph = graphs();
    void *stream = tt_stream(test_device()), *captured, *executable;
    tt_dims shape = tt_shape(256, 64), tall = tt_shape(256 * ranks, 64);
    tt_tensor *shards[2 * TURNS], *talls[2 * TURNS], *gathered[2 * TURNS], *parts[2 * TURNS],
        *x = there(whole(shape, dtype, 0)), *y = there(whole(tall, dtype, 0)),
        *right = there(whole(tt_shape(64, 512), dtype, 3)),
        *wide = there(whole(tt_shape(64, rank == 0 ? 16384 : 256), dtype, 3));
    for (int i = 0; i < 2 * TURNS; i++) {
        shards[i] = there(whole(shape, dtype, rank + 10 * i));
        talls[i] = there(whole(tall, dtype, rank + 10 * i));
    }
    for (int round = 0; round < 2; round++) {
        CHECK(tt_fused_all_gather_matmul(x, tt_tensors(wide), 0, group, NULL).count == 1);
        CHECK(tt_fused_matmul_reduce_scatter(y, right, TUTTI_SUM, 0, group) != NULL);
    }
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(graph.begin(stream, 1), 0);
    tt_tensor *all = tt_fused_all_gather_matmul(x, tt_tensors(wide), 0, group, NULL).at[0],
              *part = tt_fused_matmul_reduce_scatter(y, right, TUTTI_SUM, 0, group);
    CHECK_EQ(graph.end(stream, &captured), 0);
    CHECK_EQ(graph.instantiate(&executable, captured, 0), 0);
    for (int i = 0; i < TURNS; i++) {
        tt_copy_(x, shards[calls]);
        tt_copy_(y, talls[calls]);
        CHECK_EQ(graph.launch(executable, stream), 0);
        gathered[calls] = tt_clone(all);
        parts[calls++] = tt_clone(part);
        for (int j = 0; j < i % 3; j++, calls++) {
            gathered[calls] = tt_fused_all_gather_matmul(shards[calls], tt_tensors(wide), 0, group, NULL).at[0];
            parts[calls] = tt_fused_matmul_reduce_scatter(talls[calls], right, TUTTI_SUM, 0, group);
        }
    }
    CHECK_EQ(calls, 2 * TURNS);
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_group_check(group));
    for (int i = 0; i < calls; i++) {
        tt_tensor *sum = NULL;
        for (int from = 0; from < ranks; from++) {
            tt_tensor *one = part_of(tt_matmul(there(whole(tall, dtype, from + 10 * i)), right), 0, rank, ranks);
            sum = from == 0 ? tt_to(one, TUTTI_F32) : tt_add(sum, tt_to(one, TUTTI_F32));
            CHECK(tt_equal(tt_narrow(gathered[i], 0, from * 256, 256),
                           tt_matmul(there(whole(shape, dtype, from + 10 * i)), wide)));
        }
        CHECK(tt_equal(parts[i], tt_to(sum, dtype)));
    }
}

TEST_GPU(calls_and_runs_of_a_graph_do_not_overwrite_what_a_slower_rank_still_reads) {
    BEGIN;
    check_turns(group, TUTTI_BF16);
    check_turns(group, TUTTI_F32); /* by several kernels */
    END;
}

/* A graph of a gather and a scatter, and behind its capture calls that need a larger workspace. */
static void check_growing(tutti_world *world, int ranks, tutti_dtype dtype) {
    tutti_group *group; /* whose workspace is small yet */
    CHECK_OK(tutti_group_new(world, NULL, ranks, NULL, &group));
    int rank = tutti_group_rank(group);
    tt_dims shape = tt_shape(16, 32), tall = tt_shape(16 * ranks, 32);
    tt_tensor *x = there(whole(shape, dtype, rank)), *y = there(whole(tall, dtype, rank)),
              *right = there(whole(tt_shape(32, 32), dtype, 3));
    for (int round = 0; round < 2; round++) {
        CHECK(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).count == 1);
        CHECK(tt_fused_matmul_reduce_scatter(y, right, TUTTI_SUM, 0, group) != NULL);
    }
    CHECK(tt_synchronize(test_device()));
    size_t before = tt_fused_workspace_bytes(group);
    for (int64_t rows = 4096; rows <= 16384; rows *= 4) {
        CHECK_OK(tutti_barrier(group, NULL));
        CHECK(tt_replay_begin(test_device()));
        tt_tensor *all = tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
                  *part = tt_fused_matmul_reduce_scatter(y, right, TUTTI_SUM, 0, group);
        tt_replay *replay = tt_replay_end(test_device());
        CHECK(replay != NULL);
        tt_tensor *large = there(tt_ones(tt_shape(rows, 32), dtype, NULL)),
                  *column = there(tt_ones(tt_shape(32, 1), dtype, NULL)),
                  *sums = tt_fused_all_gather_matmul(large, tt_tensors(column), 0, group, NULL).at[0];
        for (int run = 0; run < 2; run++) {
            tt_copy_(x, there(whole(shape, dtype, rank + 10 * run)));
            tt_copy_(y, there(whole(tall, dtype, rank + 10 * run)));
            CHECK(tt_replay_run(replay) && tt_synchronize(test_device()));
            tt_tensor *sum = NULL;
            for (int from = 0; from < ranks; from++) {
                tt_tensor *one = tt_to(tt_matmul(whole(tall, dtype, from + 10 * run), back(right)), TUTTI_F32);
                sum = from == 0 ? one : tt_add(sum, one);
                CHECK(tt_equal(back(tt_narrow(all, 0, from * 16, 16)),
                               tt_matmul(whole(shape, dtype, from + 10 * run), back(right))));
            }
            CHECK(tt_equal(back(part), tt_to(part_of(sum, 0, rank, ranks), dtype)));
        }
        CHECK(tt_equal(back(sums), tt_full(tt_shape(rows * ranks, 1), 32, dtype, NULL)));
        CHECK_OK(tutti_group_check(group));
        tt_replay_release(replay);
    }
    CHECK(tt_fused_workspace_bytes(group) > before);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(group);
}

TEST_RANKS(a_graph_runs_on_when_the_workspace_has_grown_behind_its_capture) {
    BEGIN;
    check_growing(world, ranks, TUTTI_F32);
    check_growing(world, ranks, TUTTI_BF16);
    CHECK_OK(tutti_group_check(group));
    END;
}

TEST_RANKS(a_call_that_one_rank_captures_and_another_makes_is_a_mismatch) {
    BEGIN;
    tt_tensor *x = there(whole(tt_shape(16, 32), TUTTI_F32, rank)),
              *y = there(whole(tt_shape(16 * ranks, 32), TUTTI_F32, rank)),
              *right = there(whole(tt_shape(32, 8), TUTTI_F32, 3));
    for (int round = 0; round < 4; round++) {
        tt_replay *replay = NULL;
        if (round % 2 == 1 && rank == 0)
            CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
        if (round % 2 == 0) {
            tt_tensor *all = tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
                      *part = tt_fused_matmul_reduce_scatter(y, right, TUTTI_SUM, 0, group), *sum = NULL;
            for (int from = 0; from < ranks; from++) {
                tt_tensor *one = tt_matmul(whole(tt_shape(16 * ranks, 32), TUTTI_F32, from), back(right));
                sum = from == 0 ? one : tt_add(sum, one);
                CHECK(tt_equal(back(tt_narrow(all, 0, from * 16, 16)),
                               tt_matmul(whole(tt_shape(16, 32), TUTTI_F32, from), back(right))));
            }
            CHECK(tt_equal(back(part), part_of(sum, 0, rank, ranks)));
            continue;
        }
        FAILS(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL), TUTTI_ERROR_MISMATCH, "for a graph");
        FAILS(tt_fused_matmul_reduce_scatter(y, right, TUTTI_SUM, 0, group), TUTTI_ERROR_MISMATCH, "for a graph");
        if (rank == 0)
            CHECK((replay = tt_replay_end(test_device())) != NULL);
        tt_replay_release(replay);
    }
    CHECK_OK(tutti_group_check(group));
    END;
}
