/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes that rewrite what is written in place: writes become values, values become writes where that is cheaper, and
 * sharded parameters are never put together.
 */
#include "support.h"

static tt_graph *capture(tt_compile_function *function, void *user, tt_tensor *x, const char *const *passes) {
    tt_graph *graph;
    CHECK(tt_capture(function, user, tt_tensors(x), &graph));
    for (; *passes != NULL; passes++)
        if (!tt_graph_pass(graph, *passes) || !tt_graph_check(graph))
            FAIL("%s: %s", *passes, tutti_error_message());
    return graph;
}

#define PASSES(...)       \
    (const char *[]) {    \
        __VA_ARGS__, NULL \
    }

/* ---- writes become values ---- */

static int writes_all(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *row = tt_select(x, 0, 1), *y = tt_sin(x);
    tt_mul_(y, tt_number(3));
    tt_add_(x, y);
    outputs[0] = tt_mul(row, tt_select(y, 0, 0)); /* through a view that was made before */
    tt_relu_(x);
    outputs[1] = x;
    outputs[2] = y;
    return 3;
}

TEST(what_is_written_becomes_a_value_and_inputs_are_written_once) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(2, 3));
    tt_graph *graph = capture(writes_all, NULL, x, PASSES("functional"));
    check_text(graph, "graph(x: f32 [2, 3]):\n"
                      "    sin: f32 [2, 3] = sin(x)\n"
                      "    mul_1: f32 [2, 3] = mul(sin, 3)\n"
                      "    add: f32 [2, 3] = add(x, mul_1)\n"
                      "    select_2: f32 [3] offset 3 = select(add, dim=0, index=1)\n"
                      "    select_3: f32 [3] = select(mul_1, dim=0, index=0)\n"
                      "    mul: f32 [3] = mul(select_2, select_3)\n"
                      "    relu: f32 [2, 3] = relu(add)\n"
                      "    copy_(x, relu)\n"
                      "    return (mul, x, mul_1)\n");
    for (int i = 0; i < 2; i++)
        check_run(graph, writes_all, NULL, x);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

static int writes_parts(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *y = tt_zeros_like(x);
    tt_mul_(tt_select(x, 0, 1), tt_number(3)); /* a part: the memory stays as it is */
    tt_fill_(y, 2);
    tt_add_(y, x);
    tt_copy_(y, tt_exp(y));
    outputs[0] = y;
    outputs[1] = tt_neg(x);
    tt_storage_resize(tt_clone(x), 0);
    return 2;
}

TEST(memory_that_is_written_in_parts_or_resized_stays_as_it_is) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(2, 3));
    tt_graph *graph = capture(writes_parts, NULL, x, PASSES("functional", "dead"));
    CHECK(tt_graph_count_of(graph, "mul_") == 1 && tt_graph_count_of(graph, "storage_resize") == 1);
    CHECK(tt_graph_count_of(graph, "add_") == 0 && tt_graph_count_of(graph, "fill_") == 0);
    CHECK(tt_graph_count_of(graph, "copy_") == 0);
    check_run(graph, writes_parts, NULL, x);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

static int ordinary(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0], *all = tt_empty(tt_shape(8), TUTTI_F32, NULL);
    tt_tensor *part = tt_empty(tt_shape(2), TUTTI_F32, NULL), *moved = tt_empty(tt_shape(4), TUTTI_F32, NULL);
    tt_all_gather_out(all, x, group);
    tt_reduce_scatter_out(part, x, TUTTI_SUM, group);
    tt_all_to_all_out(moved, x, NULL, NULL, group);
    tt_all_reduce_(x, TUTTI_SUM, group);
    tt_broadcast_(moved, 0, group);
    outputs[0] = tt_neg(all);
    outputs[1] = part;
    outputs[2] = moved;
    return 3;
}

TEST_WORLD(ordinary_collectives_become_functional_ones_with_a_copy, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_tensor *x = named(tt_add_scalar(values("", tt_shape(4)), tutti_group_rank(group)), "x");
    tt_graph *graph = capture(ordinary, group, x, PASSES("functional", "sink"));
    check_text(graph, "graph(x: f32 [4]):\n"
                      "    all_gather: f32 [8] = all_gather(x, dim=0, group=0)\n"
                      "    reduce_scatter: f32 [2] = reduce_scatter(x, reduction=sum, dim=0, group=0)\n"
                      "    all_to_all_single: f32 [4] = all_to_all_single(x, out_splits=[2, 2], in_splits=[2, 2], "
                      "group=0)\n"
                      "    all_reduce: f32 [4] = all_reduce(x, reduction=sum, group=0)\n"
                      "    wait(all_to_all_single)\n"
                      "    broadcast: f32 [4] = broadcast(all_to_all_single, root=0, group=0)\n"
                      "    wait(all_gather)\n"
                      "    neg: f32 [8] = neg(all_gather)\n"
                      "    wait(reduce_scatter)\n"
                      "    wait(all_reduce)\n"
                      "    copy_(x, all_reduce)\n"
                      "    wait(broadcast)\n"
                      "    return (neg, reduce_scatter, broadcast)\n");
    check_run(graph, ordinary, group, x);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- sums of parts ---- */

static tt_tensor *among_zeros(tt_tensor *part, int64_t start) {
    tt_tensor *whole = tt_zeros(tt_shape(2, 9), TUTTI_F32, NULL);
    tt_copy_(tt_narrow(whole, 1, start, 3), part);
    return whole;
}

/* Signs of zeros are seen in what they divide. */
static int all_parts(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *last = among_zeros(tt_neg(x), 6), *middle = among_zeros(x, 3);
    outputs[0] = tt_reciprocal(tt_add(tt_add(last, middle), among_zeros(tt_relu(tt_neg(x)), 0)));
    return 1;
}

static int some_parts(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0];
    outputs[0] = tt_add(among_zeros(x, 0), among_zeros(tt_neg(x), 5));
    return 1;
}

TEST(parts_among_zeros_are_written_into_one_tensor_and_not_added) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = named(tt_sub(values("", tt_shape(2, 3)), tt_number(0.5)), "x");
    tt_graph *graph = capture(all_parts, NULL, x, PASSES("parts"));
    check_text(graph, "graph(x: f32 [2, 3]):\n"
                      "    neg: f32 [2, 3] = neg(x)\n"
                      "    empty: f32 [2, 9] = empty(shape=[2, 9], dtype=f32, device=cpu)\n"
                      "    narrow: f32 [2, 3] strides [9, 1] offset 6 = narrow(empty, dim=1, start=6, length=3)\n"
                      "    add_scalar: f32 [2, 3] = add_scalar(neg, number=0)\n"
                      "    copy_(narrow, add_scalar)\n"
                      "    narrow_1: f32 [2, 3] strides [9, 1] offset 3 = narrow(empty, dim=1, start=3, length=3)\n"
                      "    add_scalar_1: f32 [2, 3] = add_scalar(x, number=0)\n"
                      "    copy_(narrow_1, add_scalar_1)\n"
                      "    neg_1: f32 [2, 3] = neg(x)\n"
                      "    relu: f32 [2, 3] = relu(neg_1)\n"
                      "    narrow_2: f32 [2, 3] strides [9, 1] = narrow(empty, dim=1, start=0, length=3)\n"
                      "    add_scalar_2: f32 [2, 3] = add_scalar(relu, number=0)\n"
                      "    copy_(narrow_2, add_scalar_2)\n"
                      "    reciprocal: f32 [2, 9] = reciprocal(empty)\n"
                      "    return (reciprocal)\n");
    check_run(graph, all_parts, NULL, x);
    tt_graph_release(&graph);
    graph = capture(some_parts, NULL, x, PASSES("parts"));
    CHECK_EQ(tt_graph_count_of(graph, "full"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "add"), 0);
    check_run(graph, some_parts, NULL, x);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

static int overlapping_parts(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_add(among_zeros(inputs.at[0], 0), among_zeros(tt_neg(inputs.at[0]), 2));
    return 1;
}

static int a_part_that_is_read_again(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *first = among_zeros(inputs.at[0], 0);
    outputs[0] = tt_add(first, among_zeros(inputs.at[0], 3));
    outputs[1] = tt_neg(first);
    return 2;
}

static int a_part_that_is_returned(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[1] = among_zeros(inputs.at[0], 6);
    outputs[0] = tt_add(among_zeros(inputs.at[0], 3), outputs[1]);
    return 2;
}

static int a_part_that_is_written_behind_the_sum(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *first = among_zeros(inputs.at[0], 0);
    outputs[0] = tt_add(first, among_zeros(inputs.at[0], 3));
    tt_copy_(tt_narrow(first, 1, 0, 3), tt_neg(inputs.at[0]));
    outputs[1] = tt_neg(first);
    return 2;
}

static int other_dimensions(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *row = tt_zeros(tt_shape(2, 9), TUTTI_F32, NULL);
    tt_copy_(tt_narrow(row, 0, 1, 1), tt_number(3));
    outputs[0] = tt_add(among_zeros(x, 0), row);
    return 1;
}

static int ones_around(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *ones = tt_full(tt_shape(2, 9), 1, TUTTI_F32, NULL);
    tt_copy_(tt_narrow(ones, 1, 0, 3), inputs.at[0]);
    outputs[0] = tt_add(ones, among_zeros(inputs.at[0], 3));
    return 1;
}

TEST(parts_that_somebody_else_needs_or_that_overlap_are_added) {
    static tt_compile_function *const functions[] = { overlapping_parts,       a_part_that_is_read_again,
                                                      a_part_that_is_returned, a_part_that_is_written_behind_the_sum,
                                                      other_dimensions,        ones_around };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        tt_scope scope = tt_scope_open();
        tt_tensor *x = values("x", tt_shape(2, 3));
        tt_graph *graph = capture(functions[i], NULL, x, PASSES("parts"));
        CHECK_EQ(tt_graph_count_of(graph, "add"), 1);
        CHECK_EQ(tt_graph_count_of(graph, "full"), 2);
        check_run(graph, functions[i], NULL, x);
        tt_graph_release(&graph);
        CHECK_OK(tt_scope_close(&scope));
    }
}

/* Parts of one tensor that lie over each other, with a gap behind them: the lengths of all parts add up to the size. */
static int parts_of_one_that_overlap(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *whole = among_zeros(x, 0);
    tt_copy_(tt_narrow(whole, 1, 1, 3), tt_neg(x));
    outputs[0] = tt_add(whole, among_zeros(x, 6));
    return 1;
}

/* One is counted from the end. */
static int the_same_part_twice(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_add(among_zeros(inputs.at[0], 6), among_zeros(tt_exp(inputs.at[0]), -3));
    return 1;
}

/* The part is written between the sum with 0 and the copy. */
static int a_part_that_is_negated_in_place(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *part = tt_add_scalar(tt_mul_scalar(x, 0), 0);
    outputs[0] = tt_reciprocal(tt_add(among_zeros(tt_neg_(part), 0), among_zeros(x, 3)));
    return 1;
}

/* -0 stays what it is where -0 is added, and becomes 0 in a sum with 0. */
static int a_part_with_minus_zero_added(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *zero = tt_mul_scalar(x, -0.0);
    outputs[0] = tt_reciprocal(tt_add(among_zeros(tt_add_scalar(zero, -0.0), 0), among_zeros(x, 3)));
    return 1;
}

TEST(parts_that_lie_over_each_other_or_are_minus_zero_give_what_a_sum_gives) {
    static tt_compile_function *const functions[] = { parts_of_one_that_overlap, the_same_part_twice,
                                                      a_part_with_minus_zero_added, a_part_that_is_negated_in_place };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        tt_scope scope = tt_scope_open();
        tt_tensor *x = values("x", tt_shape(2, 3));
        tt_graph *graph = capture(functions[i], NULL, x, PASSES("parts"));
        CHECK_EQ(tt_graph_count_of(graph, "empty"), 0); /* there are gaps */
        check_run(graph, functions[i], NULL, x);
        tt_graph_release(&graph);
        CHECK_OK(tt_scope_close(&scope));
    }
}

/* ---- collectives in place ---- */

static int steals(tt_tensor_list inputs, tt_tensor **outputs, void *group) {
    tt_tensor *x = inputs.at[0], *buffer = tt_add_scalar(x, 42), *kept = tt_add_scalar(x, 10), *shared = tt_neg(x);
    outputs[0] = tt_all_reduce(buffer, TUTTI_SUM, group);                        /* in its memory */
    outputs[1] = tt_all_reduce(x, TUTTI_SUM, group);                             /* an input: not */
    outputs[2] = tt_all_reduce(kept, TUTTI_MAX, group);                          /* read later: not */
    outputs[3] = tt_relu(kept);                                                  /* (here) */
    outputs[4] = tt_all_reduce(tt_narrow(tt_exp(x), 0, 0, 2), TUTTI_SUM, group); /* the part of a temporary */
    outputs[5] = tt_all_reduce(shared, TUTTI_SUM, group);                        /* sent twice: not */
    outputs[6] = tt_all_gather(shared, 0, group);
    outputs[7] = tt_broadcast(tt_mul_scalar(x, 2), 1, group);
    tt_tensor_list two = tt_all_reduce_coalesced(tt_tensors(tt_sin(x), tt_cos(x)), TUTTI_SUM, group);
    outputs[8] = two.at[0];
    outputs[9] = two.at[1];
    return 10;
}

TEST_WORLD(a_collective_takes_the_memory_of_an_input_that_dies, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_tensor *x = named(tt_add_scalar(values("", tt_shape(4)), tutti_group_rank(group)), "x");
    tt_graph *graph = capture(steals, group, x, PASSES("in_place"));
    CHECK_EQ(tt_graph_count_of(graph, "all_reduce_"), 2);
    CHECK_EQ(tt_graph_count_of(graph, "all_reduce"), 3);
    CHECK_EQ(tt_graph_count_of(graph, "broadcast_"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "all_reduce_coalesced_"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "wait"), 9);
    check_run(graph, steals, group, x);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- sharded parameters ---- */

typedef struct sharded {
    tutti_group *group;
    tt_tensor *shard, *whole;
    bool out, late; /* filled by all_gather_out; used once more when it is gone */
} sharded;

static void fill(const sharded *of) {
    tt_storage_resize(of->whole, 4 * 10 * 20);
    bool recording = tt_grad_mode(false);
    tt_preserve *kept = tt_preserve_begin(tt_tensors(of->whole));
    if (of->out)
        tt_wait(tt_all_gather_out(of->whole, of->shard, of->group));
    else
        tt_copy_(of->whole, tt_all_gather(of->shard, 0, of->group));
    tt_preserve_end(kept);
    tt_grad_mode(recording);
}

/* Forward and backward of a layer, each with its own gather; the backward looks at a view that the forward made. */
static int sharded_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const sharded *of = user;
    fill(of);
    tt_tensor *y = tt_matmul(inputs.at[0], tt_transpose(of->whole, 0, 1));
    tt_storage_resize(of->whole, 0);
    tt_tensor *loss = tt_sum(tt_mul(y, y));
    fill(of);
    tt_backward(loss, NULL);
    tt_tensor *grad = tt_reduce_scatter(tt_grad(of->whole), TUTTI_AVG, 0, of->group);
    tt_set_grad(of->whole, NULL);
    tt_storage_resize(of->whole, 0);
    outputs[0] = tt_detach(loss);
    outputs[1] = grad;
    if (of->late) {
        tt_storage_resize(of->whole, 4 * 10 * 20);
        bool recording = tt_grad_mode(false);
        tt_fill_(of->whole, 1); /* something else than a gather fills it */
        outputs[1] = tt_add(grad, tt_sum(of->whole));
        tt_grad_mode(recording);
        tt_storage_resize(of->whole, 0);
    }
    return 2;
}

TEST_WORLD(a_sharded_parameter_is_never_put_together, 2) {
    for (int form = 0; form < 3; form++) {
        tt_scope scope = tt_scope_open();
        tutti_group *group = tutti_world_group(world);
        int rank = tutti_group_rank(group);
        tt_tensor *x = tt_add_scalar(values("x", tt_shape(2, 20)), rank), *loss[2];
        tt_tensor *shard = named(tt_mul_scalar(values("", tt_shape(5, 20)), 0.01 * (rank + 1)), "shard");
        tt_tensor *whole = named(tt_parameter(tt_zeros(tt_shape(10, 20), TUTTI_F32, NULL), true), "whole");
        tt_storage_resize(whole, 0);
        sharded of = { group, shard, whole, form == 1, form == 2 };
        tt_graph *graph = capture(sharded_step, &of, x, PASSES("dead", "unshard"));
        CHECK_EQ(tt_graph_count_of(graph, "storage_resize"), form == 2 ? 6 : 0);
        char *text = tt_graph_text(graph);
        CHECK((strstr(text, "copy_(whole") != NULL) == (form == 2) && strstr(text, "all_gather_out") == NULL);
        tutti_free(text);
        CHECK_EQ(tt_graph_count_of(graph, "version_set"), form == 2 ? 2 : 0);
        CHECK_EQ(tt_graph_count_of(graph, "all_gather"), 2);
        sharded_step(tt_tensors(x), loss, &of);
        for (int i = 0; i < 2; i++) {
            uint32_t version = tt_version(whole);
            tt_tensor_list results = tt_graph_run(graph, tt_tensors(x));
            if (results.count != 2)
                FAIL("%s", tutti_error_message());
            CHECK(tt_equal(results.at[0], loss[0]) && tt_equal(results.at[1], loss[1]));
            CHECK(tt_storage_bytes(whole) == 0 && (form == 2 || tt_version(whole) == version));
        }
        tt_graph_release(&graph);
        CHECK_OK(tt_scope_close(&scope));
        CHECK_OK(tutti_barrier(group, NULL));
    }
}

/* ---- operators taken apart ---- */

static int rows(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *x = inputs.at[0], *const *weights = user;
    outputs[0] = tt_softmax(x, -1);
    outputs[1] = tt_log_softmax(x, 1);
    outputs[2] = tt_layer_norm(x, weights[0], weights[1], 1e-5);
    outputs[3] = tt_layer_norm(x, NULL, NULL, 1e-5);
    outputs[4] = tt_rms_norm(x, weights[0], 1e-6);
    outputs[5] = tt_softmax(tt_to(x, TUTTI_BF16), 1); /* each step would round */
    outputs[6] = tt_log_softmax(x, 0);                /* lies in memory by columns */
    return 7;
}

TEST(softmax_and_norms_become_reductions_and_elementwise_operators) {
    tt_scope scope = tt_scope_open();
    tt_tensor *weights[] = { values("weight", tt_shape(5)), values("bias", tt_shape(5)) }, *expected[7];
    tt_tensor *x = tt_sin(values("x", tt_shape(3, 5)));
    tt_graph *graph = capture(rows, weights, x, PASSES("decompose"));
    CHECK(tt_graph_count_of(graph, "softmax") == 1 && tt_graph_count_of(graph, "log_softmax") == 1);
    CHECK(tt_graph_count_of(graph, "layer_norm") == 0 && tt_graph_count_of(graph, "rms_norm") == 0);
    CHECK(tt_graph_count_of(graph, "amax") == 2 && tt_graph_count_of(graph, "rsqrt") == 3);
    rows(tt_tensors(x), expected, weights);
    tt_tensor_list results = tt_graph_run(graph, tt_tensors(x));
    CHECK_EQ(results.count, 7);
    for (int i = 0; i < 7; i++)
        CHECK(tt_allclose(results.at[i], expected[i], 1e-5, 1e-6));
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}
