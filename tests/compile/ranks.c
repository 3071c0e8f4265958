/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled functions with collectives, on real ranks: values, gradients, and what ranks agree on before they run.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <tutti/tensors.h>
#include <tutti/tutti.h>

#include "quick.h"

static tt_tensor *leaf(tutti_group *group, int64_t rows, int64_t columns, double step) {
    tt_tensor *x = tt_arange(1, (double)(rows * columns) + 1, 1, TUTTI_F32, NULL);
    x = tt_add_scalar(tt_mul_scalar(x, step), tutti_group_rank(group));
    return tt_require_grad(tt_detach(tt_reshape(x, tt_shape(rows, columns))), true);
}

static tt_tensor *twin_of(tt_tensor *x) {
    return tt_require_grad(tt_clone(tt_detach(x)), true);
}

/* ---- values ---- */

/* A layer in which each rank has some rows of the weight: gathered, used, and its gradient scattered again. */
static int sharded_layer(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *group = user;
    tt_tensor *weight = tt_all_gather(inputs.at[1], 0, group);
    tt_tensor *y = tt_tanh(tt_matmul(inputs.at[0], tt_t(weight)));
    outputs[0] = tt_sum(tt_all_reduce(tt_square(y), TUTTI_SUM, group));
    outputs[1] = tt_reduce_scatter(y, TUTTI_SUM, 1, group);
    return 2;
}

static void check_layer(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast;
        CHECK(tt_compile(sharded_layer, group,
                         TUTTI_OPTIONS(tt_compile_options, .mode = modes[mode], .full = true, .strict = true), &fast));
        for (int i = 0; i < 3; i++) {
            tt_tensor *x = leaf(group, 2, 4, 0.01), *w = leaf(group, 3, 4, 0.02), *x2 = twin_of(x), *w2 = twin_of(w);
            tt_tensor *expected[2];
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x, w));
            sharded_layer(tt_tensors(x2, w2), expected, group);
            CHECK_EQ(results.count, 2);
            CHECK(tt_equal(tt_detach(results.at[0]), tt_detach(expected[0])));
            CHECK(tt_equal(tt_detach(results.at[1]), tt_detach(expected[1])));
            CHECK(tt_backward(tt_add(results.at[0], tt_sum(tt_square(results.at[1]))), NULL));
            CHECK(tt_backward(tt_add(expected[0], tt_sum(tt_square(expected[1]))), NULL));
            CHECK(tt_equal(tt_grad(x), tt_grad(x2)) && tt_equal(tt_grad(w), tt_grad(w2)));
        }
        CHECK(counts_of(fast).captures == 1 && counts_of(fast).eager == 0);
        /* The gathered weight is not kept: the backward gathers it again from the shard. */
        CHECK(tt_graph_count_of(tt_compiled_graph(fast, TT_BACKWARD), "all_gather") >= 1);
        tt_compiled_release(&fast);
        CHECK_OK(tt_scope_close(&scope));
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD(collectives_and_their_gradients_are_those_of_eager_code_on_two_ranks, 2) {
    check_layer(world);
}

TEST_WORLD(collectives_and_their_gradients_are_those_of_eager_code_on_four_ranks, 4) {
    check_layer(world);
}

/* ---- a whole step ---- */

typedef struct trained {
    tt_module *module;
    tt_optimizer *optimizer;
    tutti_group *group;
} trained;

static int data_parallel_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    trained *of = user;
    tt_tensor *loss = tt_mse_loss(tt_module_call(of->module, inputs.at[0]), inputs.at[1]);
    tt_backward(loss, NULL);
    tt_named_list parameters = tt_module_parameters(of->module);
    for (size_t i = 0; i < parameters.count; i++)
        tt_all_reduce_(tt_grad(parameters.at[i]), TUTTI_AVG, of->group);
    tt_clip_grad_norm(tt_tensors_of(parameters.count, parameters.at), 0.5, NULL);
    tt_optimizer_step(of->optimizer);
    tt_optimizer_zero_grad(of->optimizer);
    outputs[0] = tt_detach(loss);
    return 1;
}

static trained new_trained(tutti_group *group) {
    tt_seed(7, 0);
    tt_module *layers[] = { tt_linear_module(4, 8, true, TUTTI_F32), tt_linear_module(8, 3, true, TUTTI_F32) };
    tt_module *module = tt_sequential_module(2, layers);
    return (trained){ module, tt_adamw_optimizer(module, NULL), group };
}

static void end_trained(trained *of) {
    tt_optimizer_release(of->optimizer);
    tt_module_release(of->module);
}

TEST_WORLD(a_data_parallel_step_is_one_graph, 2) {
    tutti_group *group = tutti_world_group(world);
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        trained eager = new_trained(group), compiled = new_trained(group);
        tt_compiled *fast;
        CHECK(tt_compile(data_parallel_step, &compiled,
                         TUTTI_OPTIONS(tt_compile_options, .mode = modes[mode], .full = true), &fast));
        tt_tensor *x = tt_detach(leaf(group, 2, 4, 0.2)), *target = tt_detach(leaf(group, 2, 3, 0.1)), *loss;
        for (int i = 0; i < 4; i++) {
            tt_fill_(tt_optimizer_learning_rate(eager.optimizer, 0), 0.1 / (i + 1));
            tt_fill_(tt_optimizer_learning_rate(compiled.optimizer, 0), 0.1 / (i + 1));
            data_parallel_step(tt_tensors(x, target), &loss, &eager);
            tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x, target));
            CHECK(results.count == 1 && tt_equal(results.at[0], loss));
            tt_named_list left = tt_module_parameters(eager.module), right = tt_module_parameters(compiled.module);
            for (size_t k = 0; k < left.count; k++)
                CHECK(tt_equal(tt_detach(left.at[k]), tt_detach(right.at[k])));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        tt_compiled_release(&fast);
        end_trained(&eager);
        end_trained(&compiled);
        CHECK_OK(tt_scope_close(&scope));
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- agreement ---- */

typedef struct reader {
    tutti_group *group;
    bool reads;
} reader;

static int sum_then_max(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *x = inputs.at[0];
    x = tt_all_reduce(tt_mul_scalar(x, 2), TUTTI_SUM, user);
    outputs[0] = tt_all_reduce(tt_add_scalar(x, 1), TUTTI_MAX, user);
    return 1;
}

static int max_then_sum(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *x = inputs.at[0];
    x = tt_all_reduce(tt_mul_scalar(x, 2), TUTTI_MAX, user);
    outputs[0] = tt_all_reduce(tt_add_scalar(x, 1), TUTTI_SUM, user);
    return 1;
}

TEST_WORLD(ranks_that_compiled_different_collectives_fail_before_they_run, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(rank == 0 ? sum_then_max : max_then_sum, group, NULL, &fast));
    tt_tensor *x = tt_detach(leaf(group, 2, 2, 1));
    CHECK(tt_compiled_call(fast, tt_tensors(x)).count == 0);
    expect_error(TUTTI_ERROR_MISMATCH, rank == 0 ? "is all_reduce of f32 [2, 2], max on rank 1, and on this rank, 0, "
                                                   "all_reduce of f32 [2, 2], sum"
                                                 : "is all_reduce of f32 [2, 2], sum on rank 0, and on this rank, 1, "
                                                   "all_reduce of f32 [2, 2], max");
    tt_compiled_release(&fast);
    CHECK(tt_compile(sum_then_max, group, NULL, &fast)); /* the group lives on */
    CHECK_EQ(tt_compiled_call(fast, tt_tensors(x)).count, 1);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static int sums(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    reader *of = user;
    outputs[0] = inputs.at[0];
    for (int i = 0; i < (of->reads ? 3 : 2); i++)
        outputs[0] = tt_all_reduce(tt_add_scalar(outputs[0], 1), TUTTI_SUM, of->group);
    return 1;
}

TEST_WORLD_THREADS(ranks_are_told_at_which_place_their_collectives_differ, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tt_scope scope = tt_scope_open();
    reader of = { group, rank == 1 };
    tt_compiled *fast;
    CHECK(tt_compile(sums, &of, NULL, &fast));
    CHECK(tt_compiled_call(fast, tt_tensors(tt_ones(tt_shape(3), TUTTI_F32, NULL))).count == 0);
    expect_error(TUTTI_ERROR_MISMATCH,
                 rank == 0 ? "is all_reduce of f32 [3], sum on rank 1, and on this rank, 0, there is none any more"
                           : "is there is none any more on rank 0, and on this rank, 1, all_reduce of f32 [3], sum");
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static int gather_then_reduce(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *group = user;
    int rank = tutti_group_rank(group);
    outputs[0] = tt_all_gather(inputs.at[0], rank == 2 ? 1 : 0, group);
    outputs[0] = tt_all_reduce(outputs[0], rank == 1 ? TUTTI_MAX : TUTTI_SUM, group);
    return 1;
}

/* Ranks 0 and 1 differ as well, but behind the place that is told of. */
TEST_WORLD_THREADS(ranks_are_told_of_one_that_differs_at_that_very_place, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    char words[200];
    CHECK(tt_compile(gather_then_reduce, group, NULL, &fast));
    CHECK(tt_compiled_call(fast, tt_tensors(tt_ones(tt_shape(2, 2), TUTTI_F32, NULL))).count == 0);
    snprintf(words, sizeof words,
             "is all_gather of f32 [2, 2], dimension %d on rank %d, and on this rank, "
             "%d, all_gather of f32 [2, 2], dimension %d",
             rank == 2 ? 0 : 1, rank == 2 ? 0 : 2, rank, rank == 2 ? 1 : 0);
    expect_error(TUTTI_ERROR_MISMATCH, words);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static int reads_on_the_last(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *group = user;
    int rank = tutti_group_rank(group);
    outputs[0] = tt_all_reduce(inputs.at[0], rank == 1 ? TUTTI_MAX : TUTTI_SUM, group);
    if (rank == 2 && tt_item(tt_sum(inputs.at[0])) > 0)
        outputs[0] = tt_neg(outputs[0]);
    return 1;
}

TEST_WORLD_THREADS(ranks_are_told_of_one_that_does_something_else, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(reads_on_the_last, group, NULL, &fast));
    CHECK(tt_compiled_call(fast, tt_tensors(tt_ones(tt_shape(3), TUTTI_F32, NULL))).count == 0);
    expect_error(TUTTI_ERROR_MISMATCH,
                 rank == 2 ? "rank 0 runs what it compiled" : "rank 2 runs the function itself (item: argument x");
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD_THREADS(a_rank_that_alone_captures_anew_is_told_of_on_all, 2) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tt_scope scope = tt_scope_open();
    reader of = { group, false };
    tt_compiled *fast;
    CHECK(tt_compile(sums, &of, NULL, &fast));
    CHECK_EQ(tt_compiled_call(fast, tt_tensors(tt_ones(tt_shape(3), TUTTI_F32, NULL))).count, 1);
    CHECK(tt_compiled_call(fast, tt_tensors(tt_ones(tt_shape(rank == 1 ? 5 : 3), TUTTI_F32, NULL))).count == 0);
    expect_error(TUTTI_ERROR_MISMATCH, rank == 1 ? "this rank, 1, has captured it anew"
                                                 : "is that of a rank which had to capture the function anew");
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

/* A capture that one rank alone needs, with a schedule that was agreed on, asks nobody. */
static int rows_of_one_rank(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_all_reduce(tt_sum_dims(inputs.at[0], tt_shape(0), false), TUTTI_SUM, user);
    return 1;
}

TEST_WORLD(a_rank_that_captures_anew_with_the_same_collectives_disturbs_nobody, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    CHECK(tt_compile(rows_of_one_rank, group, NULL, &fast));
    for (int i = 0; i < 3; i++) {
        int64_t rows = tutti_group_rank(group) == 0 ? 2 + i : 2;
        tt_tensor *x = tt_ones(tt_shape(rows, 3), TUTTI_F32, NULL);
        tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
        CHECK(results.count == 1 && tt_at(results.at[0], tt_shape(1)) == 4 + i);
    }
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static int reads_after(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    reader *of = user;
    outputs[0] = tt_all_reduce(inputs.at[0], TUTTI_SUM, of->group);
    if (of->reads && tt_item(tt_sum(inputs.at[0])) > 0)
        outputs[0] = tt_neg(outputs[0]);
    return 1;
}

TEST_WORLD(a_rank_that_cannot_compile_fails_the_call_on_all, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    reader of = { group, tutti_group_rank(group) == 1 };
    tt_compiled *fast;
    CHECK(tt_compile(reads_after, &of, NULL, &fast));
    tt_tensor *x = tt_ones(tt_shape(3), TUTTI_F32, NULL);
    CHECK(tt_compiled_call(fast, tt_tensors(x)).count == 0);
    expect_error(TUTTI_ERROR_MISMATCH, "runs the function itself (item: argument x"); /* the reason, on both */
    tt_compiled_release(&fast);
    of.reads = true; /* where none can, all run the function itself */
    CHECK(tt_compile(reads_after, &of, NULL, &fast));
    tt_tensor_list results = tt_compiled_call(fast, tt_tensors(x));
    CHECK(results.count == 1 && tt_at(results.at[0], tt_shape(1)) == -2 && counts_of(fast).eager == 1);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static int dies(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    reader *of = user;
    outputs[0] = tt_all_reduce(inputs.at[0], TUTTI_SUM, of->group);
    if (of->reads)
        raise(SIGKILL);
    return 1;
}

static tutti_status die_while_building(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    reader of = { group, tutti_group_rank(group) == 1 };
    tt_compiled *fast;
    CHECK(tt_compile(dies, &of, NULL, &fast));
    CHECK(tt_compiled_call(fast, tt_tensors(tt_ones(tt_shape(3), TUTTI_F32, NULL))).count == 0);
    expect_error(TUTTI_ERROR_DEAD, "rank 1");
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
    return TUTTI_OK;
}

TEST(a_rank_that_dies_while_it_builds_ends_the_call_of_the_others) {
    CHECK_EQ(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, die_while_building, NULL), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("killed by signal 9");
}

/* ---- functions that cannot be captured ---- */

/* Reads data in the middle, so that a capture ends there, before a collective. */
static int reads_then_reduces(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    double sum = tt_item(tt_sum(inputs.at[0]));
    outputs[0] = tt_all_reduce(tt_mul_scalar(inputs.at[0], sum), TUTTI_SUM, user);
    return 1;
}

TEST_WORLD(a_capture_that_fails_before_a_collective_ends_no_group, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    tt_graph *graph;
    tt_tensor *x = tt_ones(tt_shape(4), TUTTI_F32, NULL);
    CHECK(!tt_capture(reads_then_reduces, group, tt_tensors(x), &graph));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_CAPTURE);
    tt_error_clear();
    CHECK(tt_compile(reads_then_reduces, group, NULL, &fast));
    for (int i = 0; i < 2; i++)
        CHECK(tt_equal(tt_compiled_call(fast, tt_tensors(x)).at[0], tt_full(tt_shape(4), 8, TUTTI_F32, NULL)));
    tt_compiled_release(&fast);
    CHECK(tt_compile(reads_then_reduces, group, TUTTI_OPTIONS(tt_compile_options, .full = true), &fast));
    CHECK(tt_compiled_call(fast, tt_tensors(x)).at[0] == NULL); /* an element of a failed call's list */
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_CAPTURE);
    tt_error_clear();
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- ranks that are threads ---- */

static _Thread_local tutti_group *group_here;

static int sums_here(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_all_reduce(tt_mul_scalar(inputs.at[0], 2), TUTTI_SUM, group_here);
    return 1;
}

static int doubles(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_mul_scalar(inputs.at[0], 2);
    return 1;
}

typedef struct shared {
    tt_compiled *sums, *doubles;
    atomic_int refused, ended;
} shared;

/* Whoever comes second is told so, instead of waiting for the first, who waits for it. */
static void share_one(tutti_world *world, void *argument) {
    shared *of = argument;
    tutti_group *group = group_here = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_full(tt_shape(3), 1 + tutti_group_rank(group), TUTTI_F32, NULL);
    CHECK(tt_equal(tt_compiled_call(of->doubles, tt_tensors(x)).at[0], tt_mul_scalar(x, 2)));
    CHECK(tt_compiled_call(of->sums, tt_tensors(x)).count == 0);
    tutti_status status = tt_error_show();
    if (status == TUTTI_ERROR_STATE) {
        CHECK_MESSAGE("has collectives of another rank that is a thread of this process");
        atomic_fetch_add(&of->refused, 1);
        CHECK_OK(tutti_group_abort(group, "one function for two ranks"));
    } else {
        CHECK_EQ(status, TUTTI_ERROR_ABORTED);
        atomic_fetch_add(&of->ended, 1);
    }
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
}

TEST(ranks_that_are_threads_share_no_function_with_collectives) {
    shared of = { .sums = NULL };
    tt_scope scope = tt_scope_open();
    CHECK(tt_compile(sums_here, NULL, NULL, &of.sums) && tt_compile(doubles, NULL, NULL, &of.doubles));
    CHECK_OK(tt_scope_close(&scope));
    test_threads(2, share_one, &of);
    CHECK_EQ(atomic_load(&of.refused), 1);
    CHECK_EQ(atomic_load(&of.ended), 1);
    tt_compiled_release(&of.sums);
    tt_compiled_release(&of.doubles);
}

/* ---- files ---- */

static bool is_file(const char *folder, const char *name, int rank, const char *rest) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s.rank%d.%s", folder, name, rank, rest);
    return unlink(path) == 0;
}

static void write_files(tutti_world *world, void *argument) {
    const char *folder = argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tt_scope scope = tt_scope_open();
    tt_compiled *fast;
    tt_backward_cache *cache;
    tt_tensor *x = tt_require_grad(tt_ones(tt_shape(3), TUTTI_F32, NULL), true);
    CHECK(tt_compile(doubles, NULL, TUTTI_OPTIONS(tt_compile_options, .name = "twice"), &fast));
    CHECK(tt_compiled_call(fast, tt_tensors(x)).count == 1);
    CHECK(tt_backward_cache_new(NULL, &cache) && tt_backward_compiled_begin(cache));
    CHECK(tt_backward(tt_sum(tt_all_reduce(x, TUTTI_SUM, group)), NULL) && tt_backward_compiled_end());
    CHECK(is_file(folder, "twice", rank, "1.forward.00-captured.graph"));
    CHECK(is_file(folder, "twice", rank, "1.backward.00-captured.graph"));
    CHECK(is_file(folder, "twice", rank, "1.forward.plan") && is_file(folder, "twice", rank, "1.forward.loops"));
    CHECK(is_file(folder, "backward", rank, "1.traced.00-captured.graph"));
    tt_compiled_release(&fast);
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(ranks_write_graphs_to_files_of_their_own) {
    char folder[] = "/tmp/tutti-compile-XXXXXX", command[64];
    CHECK(mkdtemp(folder) != NULL);
    setenv("TUTTI_COMPILE_DIR", folder, 1);
    test_processes(2, write_files, folder); /* before threads: a child goes on counting functions of one name */
    test_threads(2, write_files, folder);
    unsetenv("TUTTI_COMPILE_DIR");
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQ(system(command), 0);
}

/* ---- exchanges ---- */

static int exchange(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *group = user;
    tt_tensor *there = tt_all_to_all_single(tt_mul_scalar(inputs.at[0], 2), NULL, NULL, group);
    outputs[0] = tt_add_scalar(tt_all_to_all_single(tt_sin(there), NULL, NULL, group), 1);
    return 1;
}

TEST_WORLD(gradients_of_exchanges_are_compiled, 2) {
    tutti_group *group = tutti_world_group(world);
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast;
        tt_tensor *x = leaf(group, 4, 3, 0.1), *other = leaf(group, 4, 3, 0.1), *expected;
        CHECK(tt_compile(exchange, group, TUTTI_OPTIONS(tt_compile_options, .mode = modes[mode], .full = true), &fast));
        for (int step = 0; step < 2; step++) {
            tt_tensor *result = tt_compiled_call(fast, tt_tensors(x)).at[0];
            exchange(tt_tensors(other), &expected, group);
            CHECK(tt_equal(tt_detach(result), tt_detach(expected)));
            CHECK(tt_backward(tt_sum(tt_square(result)), NULL) && tt_backward(tt_sum(tt_square(expected)), NULL));
            CHECK(tt_equal(tt_grad(x), tt_grad(other)));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        CHECK_EQ(tt_graph_count_of(tt_compiled_graph(fast, TT_FORWARD), "all_to_all_single"), 2);
        CHECK_EQ(tt_graph_count_of(tt_compiled_graph(fast, TT_BACKWARD), "all_to_all_single"), 2);
        tt_compiled_release(&fast);
        CHECK_OK(tt_scope_close(&scope));
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- functions that want symmetric memory ---- */

static int sum_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    outputs[0] = tt_one_shot_all_reduce(inputs.at[1], TUTTI_SUM, tt_function_user(context));
    outputs[0] = tt_mul(outputs[0], inputs.at[0]);
    return tt_save_for_backward(context, tt_tensors(inputs.at[0])) ? 1 : -1;
}

static int sum_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    tt_tensor_list saved = tt_saved_tensors(context);
    results[0] = NULL;
    results[1] = tt_all_reduce(tt_mul(grads.at[0], saved.at[0]), TUTTI_SUM, tt_function_user(context));
    return 2;
}

typedef struct wish {
    tutti_group *group;
    uint64_t symmetric;
} wish;

static int apply_sum(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const wish *of = user;
    tt_function function = { .size = sizeof function,
                             .name = "sum",
                             .forward = sum_forward,
                             .backward = sum_backward,
                             .symmetric = of->symmetric,
                             .group = of->symmetric != 0 ? of->group : NULL };
    tt_tensor_list results = tt_apply(&function, tt_tensors(inputs.at[0], tt_sin(inputs.at[1])), of->group);
    outputs[0] = results.count == 1 ? tt_sum(tt_square(results.at[0])) : NULL;
    return 1;
}

static tt_tensor *plain_sum(tt_tensor *factor, tt_tensor *x, tutti_group *group) {
    tt_tensor *sum = tt_all_reduce(tt_sin(x), TUTTI_SUM, group);
    return tt_sum(tt_square(tt_mul(sum, factor)));
}

TEST_WORLD(functions_say_which_inputs_they_want_in_symmetric_memory, 2) {
    tutti_group *group = tutti_world_group(world);
    wish of = { group, 2 };
    EACH_MODE {
        tt_scope scope = tt_scope_open();
        tt_compiled *fast;
        tt_tensor *x = leaf(group, 4, 3, 0.1), *other = twin_of(x), *third = twin_of(x), *eager;
        CHECK(tt_compile(apply_sum, &of, TUTTI_OPTIONS(tt_compile_options, .mode = modes[mode], .full = true), &fast));
        for (int step = 0; step < 3; step++) {
            tt_tensor *factor = tt_full(tt_shape(4, 3), 0.5 + step, TUTTI_F32, NULL);
            tt_tensor *result = tt_compiled_call(fast, tt_tensors(factor, x)).at[0];
            apply_sum(tt_tensors(factor, other), &eager, &of);
            tt_tensor *expected = plain_sum(factor, third, group);
            CHECK(tt_equal(tt_detach(result), tt_detach(expected)) && tt_equal(tt_detach(eager), tt_detach(expected)));
            CHECK(tt_backward(result, NULL) && tt_backward(eager, NULL) && tt_backward(expected, NULL));
            CHECK(tt_equal(tt_grad(x), tt_grad(other)));
        }
        CHECK_EQ(counts_of(fast).captures, 1);
        CHECK_EQ(tt_graph_count_of(tt_compiled_graph(fast, TT_FORWARD), "one_shot_all_reduce"), 1);
        tt_graph_counts counts = TT_GRAPH_COUNTS_INIT;
        CHECK(tt_graph_count(tt_compiled_graph(fast, TT_FORWARD), &counts) && counts.constants == 1); /* the buffer */
        tt_compiled_release(&fast);
        CHECK_OK(tt_scope_close(&scope));
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD_THREADS(wishes_for_symmetric_memory_that_cannot_be_met_are_told, 1) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(group, 4, 3, 0.1), *outputs[1];
    apply_sum(tt_tensors(x, x), outputs, &(wish){ group, 0 });
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("lies in ordinary memory");
    tt_error_clear();
    apply_sum(tt_tensors(x, x), outputs, &(wish){ group, 4 });
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("that there is not: there are 2");
    tt_error_clear();
    apply_sum(tt_tensors(x, x), outputs, &(wish){ NULL, 2 });
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("has no group");
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
}
