/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes that plan memory and work ahead: constants that are computed once, symmetric buffers that a graph keeps, and
 * collectives that take another algorithm.
 */
#include "support.h"

/* Captures, runs the pass, and runs the graph several times beside the function. */
static tt_graph *check_pass(tt_compile_function *function, void *user, tt_tensor *x, const char *pass) {
    tt_graph *graph;
    CHECK(tt_capture(function, user, tt_tensors(x), &graph));
    if (!tt_graph_pass(graph, pass) || !tt_graph_pass(graph, "sink") || !tt_graph_check(graph))
        FAIL("%s: %s", pass, tutti_error_message());
    for (int round = 0; round < 3; round++)
        check_run(graph, function, user, tt_mul_scalar(x, round + 1));
    return graph;
}

/* ---- what depends on no input ---- */

static int masked(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *mask = tt_tril(tt_ones(tt_shape(4, 4), TUTTI_F32, NULL), 0);
    tt_tensor *angles = tt_exp(tt_mul_scalar(tt_arange(0, 4, 1, TUTTI_F32, NULL), -0.5));
    outputs[0] = tt_add(tt_mul(inputs.at[0], mask), tt_reshape(angles, tt_shape(4, 1)));
    outputs[1] = tt_mul(tt_full(tt_shape(4), 2, TUTTI_F32, NULL), inputs.at[0]); /* one value alone stays */
    outputs[2] = tt_neg(tt_arange(0, 4, 1, TUTTI_F32, NULL));                    /* returned: new at each run */
    tt_tensor *counter = tt_neg(tt_ones(tt_shape(4), TUTTI_F32, NULL));
    tt_add_(counter, tt_select(inputs.at[0], 0, 0));
    outputs[3] = counter;
    outputs[4] = tt_rand(tt_shape(0), TUTTI_F32, NULL);
    return 5;
}

TEST(what_depends_on_no_input_is_computed_once) {
    tt_scope scope = tt_scope_open();
    tt_graph *graph = check_pass(masked, NULL, values("x", tt_shape(4, 4)), "fold");
    CHECK_EQ(counts_of_graph(graph).constants, 2);
    CHECK(tt_graph_count_of(graph, "tril") == 0 && tt_graph_count_of(graph, "exp") == 0);
    CHECK(tt_graph_count_of(graph, "full") == 2 && tt_graph_count_of(graph, "neg") == 2);
    CHECK_EQ(tt_graph_count_of(graph, "random_state"), 1);
    tt_graph_release(&graph);
    graph = check_pass(masked, NULL, values("x", tt_shape(4, 4)), "fold=16"); /* the mask is larger than that */
    CHECK(counts_of_graph(graph).constants == 1 && tt_graph_count_of(graph, "tril") == 1);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_limit_stands_behind_the_name_of_a_pass_that_has_one) {
    tt_scope scope = tt_scope_open();
    tt_graph *graph = tt_graph_parse("graph(x: f32 [4]):\n    return (x)\n", NULL);
    CHECK(graph != NULL && tt_graph_pass(graph, "bucket=0") && tt_graph_pass(graph, "raise=100"));
    CHECK(tt_pass_summary("bucket=5") != NULL);
    static const char *const wrong[] = { "bucket=",   "bucket=x",  "bucket=5 ",
                                         "bucket=-1", "bucket=+1", "bucket=99999999999999999999999" };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(!tt_graph_pass(graph, wrong[i]) && fails(TUTTI_ERROR_ARGUMENT, "behind the pass bucket is no number"));
    static const char *const nothing[] = { "buck", "=5", "", NULL };
    for (size_t i = 0; i < sizeof nothing / sizeof *nothing; i++)
        CHECK(!tt_graph_pass(graph, nothing[i]) && fails(TUTTI_ERROR_NOT_FOUND, "there is no pass"));
    CHECK(!tt_graph_pass(graph, "dead=5") && fails(TUTTI_ERROR_ARGUMENT, "a limit to the pass dead, which has none"));
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- one-shot ---- */

static int four_sums(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0];
    outputs[0] = tt_relu(tt_all_reduce(tt_add_scalar(x, 1), TUTTI_SUM, group));
    outputs[1] = tt_relu(tt_all_reduce(tt_narrow(tt_add_scalar(x, 1), 0, 2, 2), TUTTI_SUM, group));
    outputs[2] = tt_relu(tt_all_reduce(x, TUTTI_SUM, group));
    outputs[3] = tt_relu(tt_all_reduce(tt_matmul(x, x), TUTTI_SUM, group));
    outputs[4] = tt_relu(tt_all_reduce(tt_add_scalar(x, 1), TUTTI_MAX, group)); /* no sum */
    tt_tensor *own = tt_neg(x);
    tt_all_reduce_(own, TUTTI_SUM, group);
    outputs[5] = own;
    outputs[6] = tt_all_reduce(tt_all_gather(x, 0, group), TUTTI_SUM, group); /* memory of another collective */
    return 7;
}

TEST_WORLD(small_sums_of_what_the_graph_makes_become_one_shot, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_tensor *x = tt_add_scalar(values("x", tt_shape(4, 4)), tutti_group_rank(group));
    tt_graph *graph = check_pass(four_sums, group, x, "one_shot");
    CHECK_EQ(tt_graph_count_of(graph, "one_shot_all_reduce"), 4);
    CHECK_EQ(tt_graph_count_of(graph, "all_reduce"), 3);
    CHECK_EQ(tt_graph_count_of(graph, "all_reduce_"), 0);
    CHECK_EQ(counts_of_graph(graph).constants, 2); /* of 16 elements, and of 8 */
    tt_graph_release(&graph);
    graph = check_pass(four_sums, group, x, "one_shot=32"); /* only the part is that small */
    CHECK_EQ(tt_graph_count_of(graph, "one_shot_all_reduce"), 1);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static int together(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *first = tt_all_reduce(tt_add_scalar(inputs.at[0], 1), TUTTI_SUM, group);
    tt_tensor *second = tt_all_reduce(tt_add_scalar(inputs.at[0], 2), TUTTI_SUM, group);
    outputs[0] = tt_add(first, second);
    return 1;
}

static int one_after_the_other(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0];
    for (int i = 0; i < 5; i++)
        x = tt_mul_scalar(tt_all_reduce(tt_sin(x), TUTTI_SUM, group), 0.5);
    outputs[0] = x;
    return 1;
}

/* Buffers live from the copy into them to the wait; one that is free is used again. */
TEST_WORLD(buffers_are_used_again_when_their_sum_is_complete, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_tensor *x = tt_add_scalar(values("x", tt_shape(6)), tutti_group_rank(group));
    tt_graph *two = check_pass(together, group, x, "one_shot");
    CHECK(counts_of_graph(two).constants == 2 && tt_graph_count_of(two, "one_shot_all_reduce") == 2);
    tt_seed(1234, 0);
    tt_graph *one = check_pass(one_after_the_other, group, x, "one_shot");
    CHECK(counts_of_graph(one).constants == 1 && tt_graph_count_of(one, "one_shot_all_reduce") == 5);
    tt_seed(1234, 0); /* buffers have no numbers that a seed could bring back */
    tt_tensor *larger = tt_add_scalar(values("x", tt_shape(9)), tutti_group_rank(group));
    tt_graph *other = check_pass(one_after_the_other, group, larger, "one_shot");
    CHECK_EQ(tt_graph_run(one, tt_tensors(x)).count, 1);
    CHECK_EQ(tt_graph_run(other, tt_tensors(larger)).count, 1);
    tt_graph_release(&one);
    tt_graph_release(&two);
    tt_graph_release(&other);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* Written out, on memory that is not symmetric: the graph finds it a buffer. */
static int explicit_call(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    outputs[0] = tt_one_shot_all_reduce(tt_add_scalar(inputs.at[0], 1), TUTTI_SUM, group);
    outputs[1] = tt_one_shot_all_reduce(inputs.at[0], TUTTI_MAX, group);
    tt_tensor *out = tt_empty(tt_shape(6), TUTTI_F32, NULL);
    tt_one_shot_all_reduce_out(out, tt_neg(inputs.at[0]), TUTTI_SUM, group);
    outputs[2] = out;
    return 3;
}

static int plain_call(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    outputs[0] = tt_all_reduce(tt_add_scalar(inputs.at[0], 1), TUTTI_SUM, group);
    outputs[1] = tt_all_reduce(inputs.at[0], TUTTI_MAX, group);
    outputs[2] = tt_all_reduce(tt_neg(inputs.at[0]), TUTTI_SUM, group);
    return 3;
}

TEST_WORLD(named_operations_on_ordinary_memory_get_a_buffer, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_tensor *x = tt_add_scalar(values("x", tt_shape(6)), tutti_group_rank(group)), *expected[3];
    tt_graph *graph;
    CHECK(tt_capture(explicit_call, group, tt_tensors(x), &graph));
    CHECK_EQ(tt_graph_run(graph, tt_tensors(x)).count, 0);
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "lies in ordinary memory"));
    CHECK(tt_graph_pass(graph, "one_shot") && tt_graph_check(graph));
    CHECK_EQ(tt_graph_count_of(graph, "copy_"), 3);
    plain_call(tt_tensors(x), expected, group);
    for (int round = 0; round < 2; round++) {
        tt_tensor_list results = tt_graph_run(graph, tt_tensors(x));
        CHECK_EQ(results.count, 3);
        for (int i = 0; i < 3; i++)
            CHECK(tt_equal(results.at[i], expected[i]));
    }
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- low contention ---- */

static int beside_computation(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0], *out = tt_empty(tt_shape(8, 4), TUTTI_F32, NULL);
    tt_tensor *all = tt_all_gather(x, 0, group), *part = tt_reduce_scatter(tt_neg(x), TUTTI_SUM, 0, group);
    outputs[0] = tt_exp(tt_sin(x));
    outputs[1] = tt_relu(all);
    outputs[2] = tt_relu(part);
    outputs[3] = tt_relu(tt_all_gather(x, 0, group)); /* nothing beside it */
    tt_all_gather_out(out, x, group);                 /* keeps the memory that it was given */
    outputs[4] = tt_mul(x, x);
    outputs[5] = out;
    return 6;
}

TEST_WORLD(large_gathers_beside_computation_touch_one_peer_after_the_other, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_tensor *x = tt_add_scalar(values("x", tt_shape(4, 4)), tutti_group_rank(group));
    tt_graph *graph = check_pass(beside_computation, group, x, "low_contention=32");
    CHECK_EQ(tt_graph_count_of(graph, "low_contention_all_gather"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "low_contention_reduce_scatter"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "all_gather"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "all_gather_out"), 1);
    tt_graph_release(&graph);
    graph = check_pass(beside_computation, group, x, "low_contention"); /* too small */
    CHECK_EQ(tt_graph_count_of(graph, "low_contention_all_gather"), 0);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- without memory ---- */

static int some_of_everything(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0], *all = tt_all_gather(x, 0, group);
    outputs[0] = tt_matmul(all, tt_tril(tt_ones(tt_shape(4, 4), TUTTI_F32, NULL), 0));
    outputs[1] = tt_reduce_scatter(tt_matmul(x, x), TUTTI_SUM, 0, group);
    outputs[2] = tt_all_reduce(tt_add_scalar(x, 1), TUTTI_SUM, group);
    outputs[3] = tt_all_reduce(tt_neg(x), TUTTI_SUM, group);
    tt_all_reduce_(x, TUTTI_MAX, group);
    tt_mul_(tt_select(x, 0, 1), tt_number(2));
    tt_tensor *whole = tt_clone(x);
    tt_relu_(whole);
    outputs[4] = tt_transpose(whole, 0, 1);
    return 5;
}

static tutti_status rewrite_all(void *group) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(4, 4));
    tt_graph *graph = NULL;
    if (tt_capture(some_of_everything, group, tt_tensors(x), &graph))
        for (int i = 0; tt_pass_name(i) != NULL && tt_error_show() == TUTTI_OK; i++)
            (void)tt_graph_pass(graph, tt_pass_name(i));
    tt_graph_release(&graph);
    return tt_scope_close(&scope);
}

TEST(an_allocation_that_fails_ends_a_pass_and_leaves_nothing) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(0, 2, NULL, &world));
    tt_counts before = TT_COUNTS_INIT, after = TT_COUNTS_INIT;
    CHECK_OK(tt_count(&before));
    test_fail_each("malloc,calloc,realloc,strdup", rewrite_all, tutti_world_group(world));
    CHECK_OK(tt_count(&after));
    CHECK(after.tensors == before.tensors && after.storages == before.storages && after.nodes == before.nodes);
    CHECK_OK(tutti_world_close(world));
}
