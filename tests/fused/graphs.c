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
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group), runs = is_gpu() ? RUNS : 5;
    int64_t width = is_gpu() ? 1024 : 64; /* the stand-in is slow by itself */
    driver graph = graphs();
    void *stream = tt_stream(test_device()), *captured, *executable;
    tt_dims shape = tt_shape(256, 64), tall = tt_shape(256 * ranks, 64);
    tt_tensor *x = there(whole(shape, dtype, 0)), *y = there(whole(tall, dtype, 0)), *gathered[RUNS], *parts[RUNS],
              *right = there(whole(tt_shape(64, 512), dtype, 3)),
              *slow = there(whole(tt_shape(width, width), dtype, 5));
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
    for (int i = 0; i < runs; i++) {
        xs[i] = there(whole(shape, dtype, rank + 10 * i));
        ys[i] = there(whole(tall, dtype, rank + 10 * i));
    }
    for (int i = 0; i < runs; i++) {
        for (int j = 0; i % ranks == rank && j < 8; j++)
            (void)tt_matmul(slow, slow);
        tt_copy_(x, xs[i]);
        tt_copy_(y, ys[i]);
        CHECK_EQ(graph.launch(executable, stream), 0);
        gathered[i] = tt_clone(all);
        parts[i] = tt_clone(part);
    }
    CHECK(tt_synchronize(test_device()));
    for (int i = 0; i < runs; i++) {
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

TEST_RANKS(runs_of_a_graph_that_follow_each_other_do_not_disturb_each_other) {
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
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group), calls = 0, turns = is_gpu() ? TURNS : 3;
    driver graph = graphs();
    void *stream = tt_stream(test_device()), *captured, *executable;
    tt_dims shape = tt_shape(256, 64), tall = tt_shape(256 * ranks, 64);
    tt_tensor *shards[2 * TURNS], *talls[2 * TURNS], *gathered[2 * TURNS], *parts[2 * TURNS],
        *x = there(whole(shape, dtype, 0)), *y = there(whole(tall, dtype, 0)),
        *right = there(whole(tt_shape(64, 512), dtype, 3)),
        *wide = there(whole(tt_shape(64, rank != 0  ? 256
                                         : is_gpu() ? 16384
                                                    : 1024),
                            dtype, 3));
    for (int i = 0; i < 2 * turns; i++) {
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
    for (int i = 0; i < turns; i++) {
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
    CHECK_EQ(calls, 2 * turns);
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

TEST_RANKS(calls_and_runs_of_a_graph_do_not_overwrite_what_a_slower_rank_still_reads) {
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

/* ---- every form ---- */

typedef struct form {
    const char *name;
    tutti_dtype dtype;
    bool scatters, scaled, by_rows; /* `by_rows`: a scale for each row and column */
    bool symmetric;                 /* the shard */
    bool native, multimem;
} form;

enum {
    FORM_ROWS = 16, /* of a shard, or of a rank's block */
    FORM_DEPTH = 64,
    FORM_COLUMNS = 32
};

typedef struct form_tensors {
    tt_tensor *left, *right, *of_left, *of_right; /* the last two are scales */
} form_tensors;

/* What rank `from` has in that turn, of the CPU. */
static form_tensors form_tensors_of(const form *of, int from, int ranks, int turn, int64_t rows) {
    int64_t all = of->scatters ? rows * ranks : rows;
    form_tensors made = { .left = whole(tt_shape(all, FORM_DEPTH), of->dtype, from + 10 * turn),
                          .right = whole(tt_shape(FORM_DEPTH, FORM_COLUMNS), of->dtype, 3) };
    if (!of->scaled)
        return made;
    made.right = tt_transpose(whole(tt_shape(FORM_COLUMNS, FORM_DEPTH), of->dtype, 3), 0, 1);
    made.of_left = positive(whole(of->by_rows ? tt_shape(all, 1) : tt_shape(1), TUTTI_F32, of->by_rows ? from : 7));
    made.of_right = positive(whole(of->by_rows ? tt_shape(1, FORM_COLUMNS) : tt_shape(1), TUTTI_F32, 8));
    return made;
}

static tt_tensor *call_form(const form *of, const form_tensors *with, tutti_group *group) {
    tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
    tt_tensor_list made = { 0, NULL };
    options.out_dtypes = &(tutti_dtype){ TUTTI_F32 };
    options.out_dtype_count = 1;
    if (of->scatters && of->scaled)
        return tt_fused_scaled_matmul_reduce_scatter(with->left, with->right, with->of_left, with->of_right, TUTTI_SUM,
                                                     0, 0, tt_shape(tt_size(with->left, 0), FORM_COLUMNS), NULL, NULL,
                                                     TUTTI_F32, false, group);
    if (of->scatters)
        return tt_fused_matmul_reduce_scatter(with->left, with->right, TUTTI_SUM, 0, group);
    if (of->native)
        return tt_fused_all_gather_matmul_native(with->left, with->right, group, NULL);
    if (of->multimem)
        made = tt_fused_all_gather_matmul_multimem(with->left, tt_tensors(with->right), group);
    else if (of->scaled)
        made = tt_fused_all_gather_scaled_matmul(with->left, tt_tensors(with->right), with->of_left,
                                                 tt_tensors(with->of_right), 0, group, &options, NULL);
    else
        made = tt_fused_all_gather_matmul(with->left, tt_tensors(with->right), 0, group, NULL);
    return made.count == 1 ? made.at[0] : NULL;
}

static tt_tensor *product_of(const form *of, const form_tensors *with) {
    return of->scaled
               ? tt_scaled_matmul(with->left, with->right, with->of_left, with->of_right, NULL, NULL, TUTTI_F32, false)
               : tt_matmul(with->left, with->right);
}

/* What the form gives on that rank, by the CPU. */
static tt_tensor *expected_of(const form *of, int rank, int ranks, int turn) {
    tt_tensor *products[64], *sum = NULL;
    for (int from = 0; from < ranks; from++) {
        form_tensors theirs = form_tensors_of(of, from, ranks, turn, FORM_ROWS);
        products[from] = product_of(of, &theirs);
        tt_tensor *wide = tt_to(products[from], TUTTI_F32);
        sum = from == 0 ? wide : tt_add(sum, wide);
    }
    return of->scatters ? tt_to(part_of(sum, 0, rank, ranks), tt_dtype(products[0]))
                        : tt_cat(tt_tensors_of((size_t)ranks, products), 0);
}

/* On the device. */
static form_tensors placed(const form *of, tutti_world *world, form_tensors with) {
    with.left = of->symmetric ? symmetric_there(world, with.left) : there(with.left);
    with.right = of->scaled ? by_columns_there(with.right) : there(with.right);
    with.of_left = of->scaled ? there(with.of_left) : NULL;
    with.of_right = of->scaled ? there(with.of_right) : NULL;
    return with;
}

/* A call inside of a capture that needs a larger workspace: an error with the size that there is, and that it wants. */
static void check_refused(const form *of, const form_tensors *larger, tutti_group *group) {
    char message[1024] = { 0 };
    CHECK(call_form(of, larger, group) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("make the same call once before the capture");
    snprintf(message, sizeof message, "%s", tutti_error_message());
    tt_error_clear();
    const char *had = strstr(message, "\" has "), *needed = strstr(message, "would have to grow to ");
    CHECK(had != NULL && needed != NULL);
    size_t bytes = strtoull(had + strlen("\" has "), NULL, 10),
           wanted = strtoull(needed + strlen("would have to grow to "), NULL, 10);
    if (bytes == 0 || bytes > tt_fused_workspace_bytes(group) || wanted <= bytes)
        FAIL("%s: %s", of->name, message);
}

static void check_form(const form *of, tutti_world *world) {
    tutti_group *group; /* which has no workspace yet */
    CHECK_OK(tutti_group_new(world, NULL, tutti_group_size(tutti_world_group(world)), NULL, &group));
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    driver graph = graphs();
    void *stream = tt_stream(test_device()), *captured, *executable;
    form_tensors here = form_tensors_of(of, rank, ranks, 0, FORM_ROWS), with = placed(of, world, here);
    tt_tensor *made = call_form(of, &with, group); /* once, and no more */
    if (made == NULL || !tt_equal(back(made), expected_of(of, rank, ranks, 0)))
        FAIL("%s: the call gives something else: %s", of->name, tutti_error_message());
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(graph.begin(stream, 1), 0);
    made = call_form(of, &with, group);
    CHECK_EQ(graph.end(stream, &captured), 0);
    if (made == NULL)
        FAIL("%s cannot be captured: %s", of->name, tutti_error_message());
    CHECK_EQ(graph.instantiate(&executable, captured, 0), 0);
    for (int turn = 1; turn < 4; turn++) {
        here = form_tensors_of(of, rank, ranks, turn, FORM_ROWS);
        tt_copy_(with.left, there(here.left));
        CHECK_EQ(graph.launch(executable, stream), 0);
        if (!tt_equal(back(made), expected_of(of, rank, ranks, turn)))
            FAIL("%s: run %d gives something else", of->name, turn);
    }
    if (!of->symmetric) { /* else it needs none */
        form_tensors larger = placed(of, world, form_tensors_of(of, rank, ranks, 0, 2048));
        CHECK(tt_synchronize(test_device()));
        CHECK_OK(tutti_barrier(group, NULL));
        CHECK_EQ(graph.begin(stream, 1), 0);
        check_refused(of, &larger, group);
        CHECK_EQ(graph.end(stream, &captured), 0);
    }
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_group_check(group));
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(group);
}

TEST_RANKS(every_form_is_captured_after_one_call_and_says_what_it_lacks_when_its_workspace_would_grow) {
    BEGIN;
    static const form forms[] = {
        { .name = "gather of f32", .dtype = TUTTI_F32 },
        { .name = "gather of bf16", .dtype = TUTTI_BF16 },
        { .name = "gather of symmetric f32", .dtype = TUTTI_F32, .symmetric = true },
        { .name = "gather of symmetric bf16", .dtype = TUTTI_BF16, .symmetric = true },
        { .name = "native gather of f32", .dtype = TUTTI_F32, .native = true },
        { .name = "native gather of bf16", .dtype = TUTTI_BF16, .native = true },
        { .name = "native gather of symmetric bf16", .dtype = TUTTI_BF16, .native = true, .symmetric = true },
        { .name = "scatter of f32", .dtype = TUTTI_F32, .scatters = true },
        { .name = "scatter of bf16", .dtype = TUTTI_BF16, .scatters = true },
        { .name = "gather of f8, one scale", .dtype = TUTTI_F8_E4M3, .scaled = true },
        { .name = "gather of f8, scales of rows", .dtype = TUTTI_F8_E4M3, .scaled = true, .by_rows = true },
        { .name = "scatter of f8, one scale", .dtype = TUTTI_F8_E4M3, .scatters = true, .scaled = true },
        { .name = "scatter of f8, scales of rows",
          .dtype = TUTTI_F8_E4M3,
          .scatters = true,
          .scaled = true,
          .by_rows = true },
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        check_form(&forms[i], world);
    CHECK_OK(tutti_group_check(group));
    END;
}

static void check_multimem(tutti_world *world, void *unused) {
    (void)unused;
    tt_scope outer = tt_scope_open();
    void *stream = tt_stream_new(test_device());
    CHECK(tt_stream_set(test_device(), stream));
    BEGIN;
    check_form(&(form){ .name = "multimem gather of f32", .dtype = TUTTI_F32, .multimem = true }, world);
    check_form(&(form){ .name = "multimem gather of bf16", .dtype = TUTTI_BF16, .multimem = true }, world);
    END;
    tt_stream_release(test_device(), stream);
    CHECK_OK(tt_scope_close(&outer));
}

TEST_LIMIT(the_multimem_form_is_captured_too, 60) {
    device_needed();
    setenv("TUTTI_MULTICAST", "software", 1);
    test_threads(gpu_ranks(), check_multimem, NULL);
    unsetenv("TUTTI_MULTICAST");
    test_device_leave();
}

/* The products of what every rank has made of (16, 32) and of (16 * ranks, 32). */
static void check_both(tt_tensor *all, tt_tensor *part, tt_tensor *right, int rank, int ranks) {
    tt_tensor *sum = NULL;
    for (int from = 0; from < ranks; from++) {
        tt_tensor *one = tt_matmul(whole(tt_shape(16 * ranks, 32), TUTTI_F32, from), back(right));
        sum = from == 0 ? one : tt_add(sum, one);
        CHECK(tt_equal(back(tt_narrow(all, 0, from * 16, 16)),
                       tt_matmul(whole(tt_shape(16, 32), TUTTI_F32, from), back(right))));
    }
    CHECK(tt_equal(back(part), part_of(sum, 0, rank, ranks)));
}

TEST_RANKS(test_mode_is_captured_too_and_a_mismatch_in_it_ends_nothing) {
    BEGIN;
    const char *name = tutti_group_name(group);
    tt_tensor *x = there(whole(tt_shape(16, 32), TUTTI_F32, rank)),
              *y = there(whole(tt_shape(16 * ranks, 32), TUTTI_F32, rank)),
              *right = there(whole(tt_shape(32, 8), TUTTI_F32, 3)), *all, *part;
    CHECK(tt_symm_test_begin(1, &name));
    for (int round = 0; round < 3; round++) {
        tt_replay *replay = NULL;
        if (round == 2)
            CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
        all = tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0];
        part = tt_fused_matmul_reduce_scatter(y, right, TUTTI_SUM, 0, group);
        if (round == 2)
            CHECK((replay = tt_replay_end(test_device())) != NULL && tt_replay_run(replay) && tt_replay_run(replay));
        CHECK(tt_synchronize(test_device()));
        tt_replay_release(replay);
    }
    check_both(all, part, right, rank, ranks);
    FAILS(tt_fused_matmul_reduce_scatter(y, right, rank == 0 ? TUTTI_AVG : TUTTI_SUM, 0, group), TUTTI_ERROR_MISMATCH,
          "make different calls");
    tt_symm_test_end();
    CHECK_OK(tutti_group_check(group));
    END;
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
                      *part = tt_fused_matmul_reduce_scatter(y, right, TUTTI_SUM, 0, group);
            check_both(all, part, right, rank, ranks);
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
