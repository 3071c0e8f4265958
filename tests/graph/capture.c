/* SPDX-License-Identifier: Apache-2.0
 *
 * Capturing functions as graphs: what the graph says, that it does what the function does, and that the capture itself
 * changes nothing.
 */
#include <math.h>

#include "support.h"

static const tt_tensor_list none = { 0, NULL };

/* ---- pure functions ---- */

static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    int *calls = user;
    tt_tensor *x = inputs.at[0];
    (*calls)++;
    outputs[0] = tt_relu(tt_sub(tt_tanh(tt_add_scalar(tt_mul_scalar(x, 2), 1)), x));
    outputs[1] = tt_sum_dims(tt_transpose(outputs[0], 0, 1), tt_shape(1), false);
    return 2;
}

TEST(a_function_becomes_a_list_of_operators) {
    tt_scope scope = tt_scope_open();
    int calls = 0;
    tt_tensor *x = values("x", tt_shape(2, 3));
    tt_graph *graph;
    CHECK(tt_capture(chain, &calls, tt_tensors(x), &graph));
    check_text(graph, "graph(x: f32 [2, 3]):\n"
                      "    mul_scalar: f32 [2, 3] = mul_scalar(x, number=2)\n"
                      "    add_scalar: f32 [2, 3] = add_scalar(mul_scalar, number=1)\n"
                      "    tanh: f32 [2, 3] = tanh(add_scalar)\n"
                      "    sub: f32 [2, 3] = sub(tanh, x)\n"
                      "    relu: f32 [2, 3] = relu(sub)\n"
                      "    transpose: f32 [3, 2] strides [1, 3] = transpose(relu, a=0, b=1)\n"
                      "    sum_dims: f32 [3] = sum_dims(transpose, dims=[1], keep_dims=false)\n"
                      "    return (relu, sum_dims)\n");
    tt_tensor *y = tt_neg(x), *expected[2];
    chain(tt_tensors(y), expected, &calls);
    tt_tensor_list results = tt_graph_run(graph, tt_tensors(y));
    CHECK_EQ(calls, 2);
    CHECK_EQ(results.count, 2);
    CHECK(tt_equal(results.at[0], expected[0]) && tt_equal(results.at[1], expected[1]));
    tt_graph_counts counts = TT_GRAPH_COUNTS_INIT;
    CHECK(tt_graph_count(graph, &counts));
    CHECK(counts.vertices == 7 && counts.inputs == 1 && counts.constants == 0 && counts.outputs == 2);
    CHECK_EQ(tt_graph_count_of(graph, "relu"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "relu_"), 0);
    CHECK(tt_graph_check(graph));
    tt_graph_release(&graph);
    CHECK(graph == NULL);
    CHECK_OK(tt_scope_close(&scope));
}

static int with_constants(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_tensor *weight = user;
    tt_tensor *positive = tt_gt(inputs.at[0], tt_number(0));
    outputs[0] = tt_where(positive, tt_mul(inputs.at[0], weight), tt_number(-0.5));
    outputs[1] = weight;
    outputs[2] = NULL;
    return 3;
}

TEST(tensors_met_on_the_way_are_constants_and_numbers_stay_numbers) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(4)), *weight = values("layers.0.weight", tt_shape(4));
    tt_graph *graph;
    CHECK(tt_capture(with_constants, weight, tt_tensors(x), &graph));
    check_text(graph, "graph(x: f32 [4], layers.0.weight: f32 [4] constant):\n"
                      "    gt: bool [4] = gt(x, 0)\n"
                      "    mul: f32 [4] = mul(x, layers.0.weight)\n"
                      "    where: f32 [4] = where(gt, mul, -0.5)\n"
                      "    return (where, layers.0.weight, none)\n");
    tt_tensor_list results = tt_graph_run(graph, tt_tensors(tt_neg(x)));
    CHECK(results.count == 3 && results.at[1] == weight && results.at[2] == NULL);
    CHECK(tt_equal(results.at[0], tt_full(tt_shape(4), -0.5, TUTTI_F32, NULL)));
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- effects ---- */

static int shrink(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *y = tt_sin(inputs.at[0]);
    tt_storage_resize(inputs.at[0], 0);
    CHECK_EQ(tt_storage_bytes(inputs.at[0]), 0);
    outputs[0] = tt_cos(y);
    return 1;
}

TEST(a_storage_is_freed_when_the_graph_runs_and_not_before) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(10)), *expected = tt_cos(tt_sin(x));
    tt_graph *graph;
    CHECK(tt_capture(shrink, NULL, tt_tensors(x), &graph));
    CHECK_EQ(tt_storage_bytes(x), 40);
    check_text(graph, "graph(x: f32 [10]):\n"
                      "    sin: f32 [10] = sin(x)\n"
                      "    storage_resize(x, bytes=0)\n"
                      "    cos: f32 [10] = cos(sin)\n"
                      "    return (cos)\n");
    tt_tensor_list results = tt_graph_run(graph, tt_tensors(x));
    CHECK(results.count == 1 && tt_equal(results.at[0], expected));
    CHECK_EQ(tt_storage_bytes(x), 0);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

static int grow(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user, (void)outputs;
    tt_tensor *y = tt_sin(inputs.at[0]), *out = inputs.at[1];
    CHECK_EQ(tt_storage_bytes(out), 0);
    tt_storage_resize(out, tt_storage_bytes(inputs.at[0]));
    tt_copy_(out, tt_cos(y));
    return 0;
}

TEST(a_storage_grows_and_is_filled) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(10)), *out = values("out", tt_shape(10)), *expected = tt_cos(tt_sin(x));
    tt_storage_resize(out, 0);
    tt_graph *graph;
    CHECK(tt_capture(grow, NULL, tt_tensors(x, out), &graph));
    check_text(graph, "graph(x: f32 [10], out: f32 [10]):\n"
                      "    sin: f32 [10] = sin(x)\n"
                      "    storage_resize(out, bytes=40)\n"
                      "    cos: f32 [10] = cos(sin)\n"
                      "    copy_(out, cos)\n"
                      "    return ()\n");
    CHECK_EQ(tt_storage_bytes(out), 0);
    CHECK_EQ(tt_graph_run(graph, tt_tensors(x, out)).count, 0);
    CHECK(tt_storage_bytes(out) == 40 && tt_equal(out, expected));
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

static int set_back(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *w = inputs.at[0], *x = tt_sin(inputs.at[1]);
    int64_t version = tt_version(w);
    tt_copy_(w, tt_add_scalar(x, 1));
    tt_set_version(tt_tensors(w), 1, &version);
    outputs[0] = w;
    return 1;
}

static int preserve(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *w = inputs.at[0], *x = tt_sin(inputs.at[1]);
    tt_preserve *kept = tt_preserve_begin(tt_tensors(w));
    tt_copy_(w, tt_add_scalar(x, 1));
    tt_preserve_end(kept);
    outputs[0] = w;
    return 1;
}

/* The version is what it was before the call, whatever it was at the capture. */
static void check_versions(tt_compile_function *function) {
    tt_scope scope = tt_scope_open();
    tt_tensor *w = values("w", tt_shape(16)), *x = values("x", tt_shape(16));
    tt_graph *graph;
    CHECK(tt_capture(function, NULL, tt_tensors(w, x), &graph));
    for (int i = 0; i < 3; i++) {
        tt_tensor *fresh = tt_randn(tt_shape(16), TUTTI_F32, NULL);
        uint32_t begin = tt_version(fresh);
        for (int k = 0; k < 3 - i; k++)
            tt_fill_(fresh, k);
        tt_tensor_list results = tt_graph_run(graph, tt_tensors(fresh, x));
        CHECK(results.count == 1 && results.at[0] == fresh);
        CHECK(tt_equal(fresh, tt_add_scalar(tt_sin(x), 1)));
        CHECK_EQ(tt_version(fresh), begin + 3 - i);
    }
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(versions_that_are_set_back_are_those_of_the_run) {
    check_versions(set_back);
    check_versions(preserve);
}

static int in_place(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *row = tt_select(x, 0, 1);
    tt_mul_(row, tt_number(3));
    tt_add_(tt_select(x, 1, 0), tt_select(x, 1, 2));
    outputs[0] = tt_add(x, row);
    return 1;
}

TEST(what_is_written_in_place_is_seen_through_every_view) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(2, 3)), *twin = tt_clone(x), *expected;
    tt_graph *graph;
    CHECK(tt_capture(in_place, NULL, tt_tensors(x), &graph));
    CHECK(tt_equal(x, twin));
    in_place(tt_tensors(twin), &expected, NULL);
    tt_tensor_list results = tt_graph_run(graph, tt_tensors(x));
    CHECK(results.count == 1 && tt_equal(results.at[0], expected) && tt_equal(x, twin));
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

static int draw(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_dropout(tt_add(inputs.at[0], tt_randn(tt_shape(64), TUTTI_F32, NULL)), 0.5);
    return 1;
}

TEST(random_numbers_are_new_at_each_run_and_those_that_eager_code_would_draw) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(64)), *expected[2];
    tt_graph *graph;
    tt_seed(5, 0);
    for (int i = 0; i < 2; i++)
        draw(tt_tensors(x), &expected[i], NULL);
    tt_seed(5, 0);
    CHECK(tt_capture(draw, NULL, tt_tensors(x), &graph));
    for (int i = 0; i < 2; i++)
        CHECK(tt_equal(tt_graph_run(graph, tt_tensors(x)).at[0], expected[i]));
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- gradients ---- */

typedef struct model {
    tt_tensor *weight, *bias;
} model;

static int step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    model *of = user;
    tt_tensor *loss = tt_mse_loss(tt_linear(inputs.at[0], of->weight, of->bias), inputs.at[1]);
    tt_backward(loss, NULL);
    outputs[0] = tt_detach(loss);
    tt_sgd_step(of->weight, tt_grad(of->weight), NULL, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.1));
    tt_sgd_step(of->bias, tt_grad(of->bias), NULL, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.1));
    tt_set_grad(of->weight, NULL);
    tt_set_grad(of->bias, NULL);
    return 1;
}

static model new_model(void) {
    model made = { tt_parameter(values("", tt_shape(3, 4)), true), tt_parameter(values("", tt_shape(3)), true) };
    tt_set_name(made.weight, "weight");
    tt_set_name(made.bias, "bias");
    return made;
}

TEST(a_training_step_with_its_backward_is_one_graph) {
    tt_scope scope = tt_scope_open();
    model eager = new_model(), captured = new_model();
    tt_tensor *x = values("x", tt_shape(2, 4));
    tt_tensor *target = values("target", tt_shape(2, 3)), *loss;
    tt_graph *graph;
    CHECK(tt_capture(step, &captured, tt_tensors(x, target), &graph));
    CHECK(tt_equal(captured.weight, eager.weight) && tt_grad(captured.weight) == NULL);
    for (int i = 0; i < 4; i++) {
        step(tt_tensors(x, target), &loss, &eager);
        tt_tensor_list results = tt_graph_run(graph, tt_tensors(x, target));
        CHECK(results.count == 1 && tt_equal(results.at[0], loss));
        CHECK(tt_equal(captured.weight, eager.weight) && tt_equal(captured.bias, eager.bias));
        CHECK(tt_grad(captured.weight) == NULL);
    }
    CHECK_EQ(tt_graph_count_of(graph, "full"), 3); /* the loss's own gradient, and two learning rates */
    CHECK(tt_graph_pass(graph, "common"));
    CHECK_EQ(tt_graph_count_of(graph, "full"), 2);
    step(tt_tensors(x, target), &loss, &eager);
    tt_tensor_list results = tt_graph_run(graph, tt_tensors(x, target));
    CHECK(results.count == 1 && tt_equal(results.at[0], loss) && tt_equal(captured.weight, eager.weight));
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

typedef struct trained {
    tt_module *module;
    tt_optimizer *optimizer;
} trained;

static int optimizer_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    trained *of = user;
    tt_tensor *loss = tt_mse_loss(tt_module_call(of->module, inputs.at[0]), inputs.at[1]);
    tt_backward(loss, NULL);
    tt_optimizer_step(of->optimizer);
    tt_optimizer_zero_grad(of->optimizer);
    outputs[0] = tt_detach(loss);
    return 1;
}

static trained new_trained(void) {
    tt_seed(7, 0);
    tt_module *module = tt_linear_module(4, 3, true, TUTTI_F32);
    return (trained){ module, tt_adamw_optimizer(module, NULL) };
}

TEST(a_captured_optimizer_counts_its_steps_and_follows_a_schedule) {
    tt_scope scope = tt_scope_open();
    trained eager = new_trained(), captured = new_trained();
    tt_tensor *x = values("x", tt_shape(2, 4));
    tt_tensor *target = values("target", tt_shape(2, 3)), *loss;
    tt_graph *graph;
    CHECK(tt_capture(optimizer_step, &captured, tt_tensors(x, target), &graph));
    CHECK_EQ((int)tt_item(tt_optimizer_steps(captured.optimizer)), 0);
    for (int i = 0; i < 4; i++) {
        tt_fill_(tt_optimizer_learning_rate(eager.optimizer, 0), 0.1 / (i + 1));
        tt_fill_(tt_optimizer_learning_rate(captured.optimizer, 0), 0.1 / (i + 1));
        optimizer_step(tt_tensors(x, target), &loss, &eager);
        tt_tensor_list results = tt_graph_run(graph, tt_tensors(x, target));
        CHECK(results.count == 1 && tt_equal(results.at[0], loss));
        CHECK(tt_equal(tt_module_parameter(captured.module, "weight"), tt_module_parameter(eager.module, "weight")));
        CHECK(tt_equal(tt_module_parameter(captured.module, "bias"), tt_module_parameter(eager.module, "bias")));
        CHECK_EQ((int)tt_item(tt_optimizer_steps(captured.optimizer)), i + 1);
    }
    tt_graph_release(&graph);
    tt_optimizer_release(eager.optimizer);
    tt_optimizer_release(captured.optimizer);
    tt_module_release(eager.module);
    tt_module_release(captured.module);
    CHECK_OK(tt_scope_close(&scope));
}

static int only_backward(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    model *of = user;
    tt_backward(tt_sum(tt_sin(tt_linear(inputs.at[0], of->weight, of->bias))), NULL);
    outputs[0] = tt_grad(of->weight);
    return 1;
}

TEST(a_gradient_that_is_there_is_added_to_and_one_that_is_not_is_set) {
    tt_scope scope = tt_scope_open();
    model eager = new_model(), captured = new_model();
    tt_tensor *x = values("x", tt_shape(2, 4)), *gradient;
    tt_graph *first, *second;
    CHECK(tt_capture(only_backward, &captured, tt_tensors(x), &first));
    CHECK_EQ(tt_graph_count_of(first, "set_grad"), 2);
    CHECK_EQ(tt_graph_count_of(first, "add_"), 0);
    CHECK(tt_graph_run(first, tt_tensors(x)).count == 1);
    CHECK(tt_capture(only_backward, &captured, tt_tensors(x), &second));
    CHECK_EQ(tt_graph_count_of(second, "set_grad"), 0);
    CHECK_EQ(tt_graph_count_of(second, "add_"), 2);
    CHECK(tt_graph_run(second, tt_tensors(x)).count == 1);
    tt_tensor_list results = tt_graph_run(second, tt_tensors(x));
    for (int i = 0; i < 3; i++)
        only_backward(tt_tensors(x), &gradient, &eager);
    CHECK(results.count == 1 && results.at[0] == tt_grad(captured.weight));
    CHECK(tt_equal(tt_grad(captured.weight), tt_grad(eager.weight)));
    CHECK(tt_equal(tt_grad(captured.bias), tt_grad(eager.bias)));
    /* A graph that adds needs something to add to. */
    tt_set_grad(captured.bias, NULL);
    CHECK(tt_graph_run(second, tt_tensors(x)).count == 0);
    CHECK(fails(TUTTI_ERROR_STATE, "there is no bias.grad"));
    tt_graph_release(&first);
    tt_graph_release(&second);
    CHECK_OK(tt_scope_close(&scope));
}

static int host_calls;
static tt_tensor *change(const tt_hook_context *context, tt_tensor *grad) {
    host_calls++;
    return tt_add(tt_add(grad, context->captured.at[0]), context->captured.at[1]);
}

static int with_hook(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *y = tt_sin(x), *closed = tt_add_scalar(y, 1);
    tt_hook_tensor(y, change, NULL, TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(inputs.at[1], closed)), NULL);
    tt_backward(tt_sum(tt_sin(y)), NULL);
    outputs[0] = tt_grad(x);
    tt_set_grad(x, NULL);
    return 1;
}

TEST(hooks_are_part_of_the_graph_and_run_on_the_host_once) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_require_grad(named(tt_ones(tt_shape(4), TUTTI_F32, NULL), "x"), true);
    tt_tensor *value = tt_full(tt_shape(), 88, TUTTI_I64, NULL), *other = tt_full(tt_shape(), 99, TUTTI_I64, NULL);
    tt_graph *graph;
    host_calls = 0;
    CHECK(tt_capture(with_hook, NULL, tt_tensors(x, value), &graph));
    CHECK_EQ(host_calls, 1);
    tt_tensor *first = tt_graph_run(graph, tt_tensors(x, value)).at[0];
    tt_tensor *second = tt_graph_run(graph, tt_tensors(x, other)).at[0];
    CHECK_EQ(host_calls, 1);
    CHECK(tt_allclose(first, tt_full(tt_shape(4), 48.9015934, TUTTI_F32, NULL), 1e-6, 1e-5));
    CHECK(tt_allclose(second, tt_full(tt_shape(4), 54.8449188, TUTTI_F32, NULL), 1e-6, 1e-5));
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

static void count_leaf(const tt_hook_context *context, tt_tensor *leaf) {
    host_calls++;
    tt_mul_(tt_grad(leaf), tt_number(2));
    tt_add_(context->captured.at[0], tt_number(1));
}

TEST(hooks_on_leaves_that_stand_outside_are_part_of_it_too) {
    tt_scope scope = tt_scope_open();
    model of = new_model();
    tt_tensor *count = tt_zeros(tt_shape(), TUTTI_F32, NULL), *x = values("x", tt_shape(2, 4));
    tt_hook_accumulate(of.weight, count_leaf, NULL, TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(count)),
                       NULL);
    tt_graph *graph;
    host_calls = 0;
    CHECK(tt_capture(only_backward, &of, tt_tensors(x), &graph));
    CHECK_EQ(host_calls, 1);
    CHECK_EQ((int)tt_item(count), 0);
    tt_tensor *doubled = tt_graph_run(graph, tt_tensors(x)).at[0];
    model plain = new_model();
    tt_tensor *once;
    only_backward(tt_tensors(x), &once, &plain);
    CHECK(tt_equal(doubled, tt_mul_scalar(once, 2)));
    CHECK_EQ(host_calls, 1);
    CHECK_EQ((int)tt_item(count), 1);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- modules ---- */

static int call_module(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_module_call(user, inputs.at[0]);
    return 1;
}

TEST(a_graph_uses_what_a_modules_slot_holds_when_it_runs) {
    tt_scope scope = tt_scope_open();
    tt_module *module = tt_linear_module(4, 3, false, TUTTI_F32);
    tt_tensor *x = values("x", tt_shape(2, 4)), *expected;
    tt_graph *graph;
    CHECK(tt_capture(call_module, module, tt_tensors(x), &graph));
    check_text(graph, "graph(x: f32 [2, 4], weight: f32 [3, 4] slot parameter grad):\n"
                      "    linear: f32 [2, 3] = linear(x, weight, none)\n"
                      "    return (linear)\n");
    tt_module_set_parameter(module, "weight", tt_parameter(tt_ones(tt_shape(3, 4), TUTTI_F32, NULL), true));
    call_module(tt_tensors(x), &expected, module);
    CHECK(tt_equal(tt_graph_run(graph, tt_tensors(x)).at[0], expected));
    tt_module_set_parameter(module, "weight", NULL);
    CHECK(tt_graph_run(graph, tt_tensors(x)).count == 0);
    CHECK(fails(TUTTI_ERROR_STATE, "there is no weight"));
    tt_graph_release(&graph);
    tt_module_release(module);
    CHECK_OK(tt_scope_close(&scope));
}

static int swap(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_module_set_parameter(user, "weight", tt_mul_scalar(tt_module_parameter(user, "weight"), 2));
    outputs[0] = tt_module_call(user, inputs.at[0]);
    return 1;
}

TEST(what_a_function_leaves_in_a_slot_is_there_after_a_run_and_not_after_a_capture) {
    tt_scope scope = tt_scope_open();
    tt_module *module = tt_linear_module(4, 3, false, TUTTI_F32);
    tt_tensor *x = values("x", tt_shape(2, 4)), *before = tt_module_parameter(module, "weight");
    tt_graph *graph;
    CHECK(tt_capture(swap, module, tt_tensors(x), &graph));
    CHECK(tt_module_parameter(module, "weight") == before);
    tt_tensor *result = tt_graph_run(graph, tt_tensors(x)).at[0];
    CHECK(tt_equal(tt_module_parameter(module, "weight"), tt_mul_scalar(before, 2)));
    CHECK(tt_equal(result, tt_linear(x, tt_mul_scalar(before, 2), NULL)));
    tt_graph_release(&graph);
    tt_module_release(module);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- collectives ---- */

static int communicate(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *group = user;
    outputs[0] = tt_all_reduce(tt_mul_scalar(inputs.at[0], 2), TUTTI_SUM, group);
    outputs[1] = tt_add_scalar(tt_all_gather(inputs.at[0], 0, group), 1);
    tt_all_reduce_(inputs.at[0], TUTTI_MAX, group);
    return 2;
}

TEST_WORLD(a_collective_is_a_start_and_a_wait, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = named(tt_add_scalar(values("", tt_shape(4)), tutti_group_rank(group)), "x"), *twin = tt_clone(x),
              *expected[2];
    tt_graph *graph;
    CHECK(tt_capture(communicate, group, tt_tensors(x), &graph));
    check_text(graph, "graph(x: f32 [4]):\n"
                      "    mul_scalar: f32 [4] = mul_scalar(x, number=2)\n"
                      "    all_reduce: f32 [4] = all_reduce(mul_scalar, reduction=sum, group=0)\n"
                      "    all_gather: f32 [8] = all_gather(x, dim=0, group=0)\n"
                      "    wait(all_gather)\n"
                      "    add_scalar: f32 [8] = add_scalar(all_gather, number=1)\n"
                      "    all_reduce_(x, reduction=max, group=0)\n"
                      "    wait(all_reduce)\n"
                      "    wait(x)\n"
                      "    return (all_reduce, add_scalar)\n");
    tt_graph_counts counts = TT_GRAPH_COUNTS_INIT;
    CHECK(tt_graph_count(graph, &counts) && counts.collectives == 3);
    communicate(tt_tensors(twin), expected, group);
    tt_tensor_list results = tt_graph_run(graph, tt_tensors(x));
    CHECK(results.count == 2 && tt_equal(results.at[0], expected[0]) && tt_equal(results.at[1], expected[1]));
    CHECK(tt_equal(x, twin));
    check_read_back(graph, world);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- what cannot be captured ---- */

static int reads(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_item(tt_sum(inputs.at[0])) > 0 ? inputs.at[0] : tt_neg(inputs.at[0]);
    return 1;
}

static tt_tensor *kept;
static int keeps(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    kept = tt_keep(tt_neg(inputs.at[0]));
    outputs[0] = kept;
    return 1;
}

static int fails_inside(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_module_set_parameter(user, "weight", tt_neg(tt_module_parameter(user, "weight")));
    outputs[0] = tt_add(inputs.at[0], tt_ones(tt_shape(7), TUTTI_F32, NULL));
    return 1;
}

static int captures(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_graph *inner;
    (void)outputs;
    return tt_capture(chain, user, inputs, &inner) ? 0 : 0;
}

static int too_many(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)inputs, (void)outputs, (void)user;
    return TT_GRAPH_OUTPUTS + 1;
}

TEST(what_no_graph_can_repeat_is_an_error_in_words) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(4)), *half;
    tt_graph *graph;
    int calls = 0;
    tt_module *module = tt_linear_module(4, 3, false, TUTTI_F32);
    tt_tensor *before = tt_module_parameter(module, "weight");
    CHECK(!tt_capture(reads, NULL, tt_tensors(x), &graph) && graph == NULL);
    CHECK(fails(TUTTI_ERROR_CAPTURE, "item: argument x, f32 [], has no data yet"));
    CHECK(!tt_capture(fails_inside, module, tt_tensors(x), &graph));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "add"));
    CHECK(tt_module_parameter(module, "weight") == before);
    CHECK(!tt_capture(captures, &calls, tt_tensors(x), &graph));
    CHECK(fails(TUTTI_ERROR_CAPTURE, "capturing a function already"));
    CHECK(!tt_capture(too_many, NULL, tt_tensors(x), &graph));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "257 results"));
    CHECK(!tt_capture(NULL, NULL, tt_tensors(x), &graph));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "function is NULL"));
    CHECK(!tt_capture(chain, &calls, tt_tensors(x, x), &graph));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "given twice"));
    CHECK(tt_capture(keeps, NULL, tt_tensors(x), &graph));
    CHECK(!tt_storage_resize(kept, 64) && fails(TUTTI_ERROR_CAPTURE, "stood for a tensor"));
    half = tt_mul_scalar(kept, 0.5);
    CHECK(half == NULL && fails(TUTTI_ERROR_CAPTURE, "stood for a tensor while a function was captured"));
    tt_release(kept);
    CHECK(!tt_capture(chain, &calls, (tt_tensor_list){ 2, NULL }, &(tt_graph *){ NULL }));
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "list is NULL"));
    CHECK(tt_graph_run(graph, (tt_tensor_list){ 1, NULL }).count == 0);
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "list of inputs is NULL"));
    CHECK(tt_graph_run(graph, none).count == 0);
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "0 inputs are given, and the graph has 1"));
    CHECK(tt_graph_run(graph, tt_tensors(tt_ones(tt_shape(5), TUTTI_F32, NULL))).count == 0);
    CHECK(fails(TUTTI_ERROR_ARGUMENT, "input x is f32 [5]"));
    CHECK(!tt_graph_pass(graph, "magic") && fails(TUTTI_ERROR_NOT_FOUND, "no pass \"magic\""));
    tt_graph_release(&graph);
    tt_module_release(module);
    CHECK_OK(tt_scope_close(&scope));
}

static tutti_status capture_and_run(__attribute__((unused)) void *argument) {
    tt_scope scope = tt_scope_open();
    model of = new_model();
    tt_tensor *x = values("x", tt_shape(2, 4));
    tt_graph *graph = NULL;
    if (tt_capture(only_backward, &of, tt_tensors(x), &graph))
        tt_graph_run(graph, tt_tensors(x));
    tt_graph_release(&graph);
    return tt_scope_close(&scope);
}

TEST(an_allocation_that_fails_ends_a_capture_and_leaves_nothing) {
    tt_counts before = TT_COUNTS_INIT, after = TT_COUNTS_INIT;
    CHECK_OK(tt_count(&before));
    test_fail_each("malloc,calloc,realloc,strdup", capture_and_run, NULL);
    CHECK_OK(tt_count(&after));
    CHECK(after.tensors == before.tensors && after.storages == before.storages && after.nodes == before.nodes);
}

/* ---- text ---- */

static int strange_numbers(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *lowest = tt_maximum(inputs.at[0], tt_number(-INFINITY));
    outputs[0] = tt_where(tt_isnan(inputs.at[0]), tt_number(NAN), tt_minimum(lowest, tt_number(INFINITY)));
    outputs[1] = tt_mul(inputs.at[0], tt_number(0.1));
    return 2;
}

TEST(strange_numbers_and_names_are_read_back) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("none", tt_shape(4));
    tt_graph *graph;
    CHECK(tt_capture(strange_numbers, NULL, tt_tensors(x), &graph));
    char *text = tt_graph_text(graph);
    CHECK(strstr(text, "graph(none_: f32 [4])") != NULL && strstr(text, "mul(none_, 0.1)") != NULL);
    tt_graph *read = tt_graph_parse(text, NULL);
    CHECK(read != NULL);
    check_text(read, text);
    CHECK(tt_equal(tt_graph_run(read, tt_tensors(x)).at[0], x));
    tutti_free(text);
    tt_graph_release(&read);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_text_is_read_back_and_runs) {
    tt_scope scope = tt_scope_open();
    model of = new_model();
    tt_tensor *x = values("x", tt_shape(2, 4));
    tt_tensor *target = values("target", tt_shape(2, 3));
    tt_graph *graph;
    int calls = 0;
    CHECK(tt_capture(step, &of, tt_tensors(x, target), &graph));
    char *text = tt_graph_text(graph);
    tt_graph *read = tt_graph_parse(text, NULL);
    CHECK(read != NULL);
    char *again = tt_graph_text(read);
    tt_graph *twice = tt_graph_parse(again, NULL);
    CHECK(twice != NULL);
    check_text(twice, again);
    CHECK_EQ(tt_graph_count_of(read, "linear"), 1);
    tutti_free(again);
    tutti_free(text);
    tt_graph_release(&twice);
    tt_graph_release(&read);
    tt_graph_release(&graph);
    tt_tensor *square = values("x", tt_shape(2, 3)), *expected[2];
    CHECK(tt_capture(chain, &calls, tt_tensors(square), &graph));
    text = tt_graph_text(graph);
    read = tt_graph_parse(text, NULL);
    CHECK(read != NULL);
    check_text(read, text);
    chain(tt_tensors(square), expected, &calls);
    CHECK(tt_equal(tt_graph_run(read, tt_tensors(square)).at[1], expected[1]));
    tutti_free(text);
    tt_graph_release(&read);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_wrong_text_is_an_error_that_names_the_line) {
    static const struct {
        const char *text, *message;
    } wrong[] = {
        { "", "line 1: 'graph' expected" },
        { "graph(x: f32 [4]):\n    return (y)\n", "line 2: nothing is called y" },
        { "graph(x: f33 [4]):\n    return (x)\n", "line 1: \"f33\" is no dtype" },
        { "graph(x: f32 [4], x: f32 [4]):\n    return (x)\n", "line 1: two values are called x" },
        { "graph(x: f32 [4]):\n    y: f32 [5] = neg(x)\n    return (y)\n",
          "graph_parse: line 2: y is said to be f32 [5], and neg gives f32 [4]" },
        { "graph(x: f32 [4], w: f32 [3]):\n    y: f32 [4] = neg(x)\n\n    z: f32 [4] = add(y, w)\n    return (z)\n",
          "graph_parse: line 4: add: " },
        { "graph(x: f32 [4],\n    y: f32 [4611686018427387904, 8]):\n    return (x)\n", "graph_parse: line 2: " },
        { "graph(x: f32 [4]):\n    y: f32 [4] = nag(x)\n    return (y)\n", "line 2: there is no operator nag" },
        { "graph(x: f32 [4]):\n    y: f32 [4] = add(x, none)\n    return (y)\n",
          "line 2: add needs b, and is given none" },
        { "graph(x: f32 [4]):\n    y: f32 [4]; z: f32 [4] = neg(x)\n    return (y)\n", "another number of results" },
        { "graph(x: f32 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]):\n return ()",
          "dimensions; at most" },
        { "graph(x: f32 [-4]):\n    return (x)\n", "-4 is no size" },
        { "graph(x: f32 [4]):\n    y: f32 [4] = all_reduce(x, reduction=sum, group=0)\n    return (y)\n",
          "there is no group \"0\", since no world is given" },
        { "graph(x: f32 [4]):\n    return (x)\n    return (x)\n", "line 3: nothing may follow the return" },
        { "graph(x: f32 [4]):\n    y: f32 [4] = mul_scalar(x, number=two)\n    return (y)\n", "\"two\" is no number" },
        { "graph(x: f32 [4]):\n    y: f32 [4] = neg(x\n", "')' expected" },
        { "graph(x: f32 [4]):\n    y: f32 [4] = all_reduce(x, reduction=sum, group=none)\n    return (y)\n",
          "there is no group \"none\"" },
        { "graph(x: f32 [4]):\n    relu_(5)\n    return (x)\n",
          "line 2: relu_ writes x, which is a number and no value" },
        { "graph(x: f32 [4]):\n    all_gather_out(5, x, group=0)\n    return (x)\n", "no world is given" },
        { "graph(x: f32 [4]):\n    version_set([x, x], versions=[1])\n    return (x)\n",
          "line 2: version_set has 1 versions for 2 tensors" },
    };
    tt_scope scope = tt_scope_open();
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        tt_graph *graph = tt_graph_parse(wrong[i].text, NULL);
        if (graph != NULL || tt_error_show() == TUTTI_OK || strstr(tutti_error_message(), wrong[i].message) == NULL)
            FAIL("text %zu: the error is \"%s\", and not \"%s\"", i, tutti_error_message(), wrong[i].message);
        tt_error_clear();
    }
    CHECK_OK(tt_scope_close(&scope));
}

/* Every tag that opens closes, in order, and every value stands in quotes. */
static bool is_well_formed(const char *at) {
    char open[16][32];
    int depth = 0;
    while ((at = strchr(at, '<')) != NULL) {
        bool closes = *++at == '/';
        char name[32] = "";
        if (sscanf(at + closes, "%31[a-z]", name) != 1)
            return false;
        bool quoted = false;
        for (; *at != 0 && (quoted || *at != '>'); at++) {
            quoted = quoted != (*at == '"');
            if (*at == '<' || (*at == '=' && at[1] != '"' && !quoted))
                return false;
        }
        if (*at == 0 || (closes && (depth == 0 || strcmp(open[--depth], name) != 0)))
            return false;
        if (!closes && at[-1] != '/') {
            if (depth == 16)
                return false;
            strcpy(open[depth++], name);
        }
        for (; at[1] != 0 && at[1] != '<'; at++)
            if (at[1] == '>' || (at[1] == '&' && strncmp(at + 1, "&amp;", 5) != 0 && strncmp(at + 1, "&lt;", 4) != 0 &&
                                 strncmp(at + 1, "&gt;", 4) != 0 && strncmp(at + 1, "&quot;", 6) != 0))
                return false;
    }
    return depth == 0;
}

static size_t count_of(const char *text, const char *part) {
    size_t count = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at++)
        count++;
    return count;
}

static char *picture_of(const tt_graph *graph, bool (*print)(const tt_graph *, FILE *)) {
    char *text = NULL;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    CHECK(file != NULL && print(graph, file));
    fclose(file);
    return text;
}

TEST(pictures_have_a_box_for_every_vertex) {
    tt_scope scope = tt_scope_open();
    int calls = 0;
    tt_tensor *x = values("x", tt_shape(2, 3));
    tt_graph *graph;
    CHECK(tt_capture(chain, &calls, tt_tensors(x), &graph));
    char *dot = picture_of(graph, tt_graph_print_dot), *svg = picture_of(graph, tt_graph_print_svg);
    CHECK_EQ(count_of(dot, "label=\""), 9); /* an input, seven vertices, and the return */
    CHECK_EQ(count_of(svg, "<g>"), 9);
    CHECK_EQ(count_of(svg, "marker-end"), 10); /* sub takes two, and two are returned */
    CHECK(is_well_formed(svg) && strstr(svg, "viewBox") != NULL);
    CHECK(strstr(svg, ">starts a collective<") != NULL && strstr(svg, ">return<") != NULL);
    CHECK(strstr(svg, ">sub: f32 [2, 3]<") != NULL && strstr(svg, ">sub(tanh, x)<") != NULL);
    free(dot);
    free(svg);
    tt_graph_release(&graph);
    graph = tt_graph_parse("graph():\n    return ()\n", NULL); /* nothing but a return */
    CHECK(graph != NULL);
    svg = picture_of(graph, tt_graph_print_svg);
    CHECK(is_well_formed(svg) && count_of(svg, "<g>") == 1);
    free(svg);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- passes ---- */

static int wasteful(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0], *y = tt_sin(x), *z = tt_sin(x);
    tt_exp(tt_cos(x));
    tt_tensor *scratch = tt_clone(tt_add(y, z));
    tt_mul_(scratch, tt_sin(tt_neg(x)));
    outputs[0] = scratch;
    return 1;
}

TEST(passes_make_the_graph_smaller_and_leave_the_result) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = values("x", tt_shape(9)), *expected;
    tt_graph *graph;
    CHECK(tt_capture(wasteful, NULL, tt_tensors(x), &graph));
    wasteful(tt_tensors(x), &expected, NULL);
    CHECK(tt_graph_pass(graph, "dead"));
    CHECK(tt_graph_count_of(graph, "exp") == 0 && tt_graph_count_of(graph, "cos") == 0);
    CHECK(tt_equal(tt_graph_run(graph, tt_tensors(x)).at[0], expected));
    CHECK_EQ(tt_graph_count_of(graph, "sin"), 3);
    CHECK(tt_graph_pass(graph, "common"));
    CHECK_EQ(tt_graph_count_of(graph, "sin"), 2);
    CHECK(tt_equal(tt_graph_run(graph, tt_tensors(x)).at[0], expected));
    CHECK(tt_graph_pass(graph, "copies"));
    CHECK_EQ(tt_graph_count_of(graph, "clone"), 0);
    CHECK(tt_equal(tt_graph_run(graph, tt_tensors(x)).at[0], expected));
    for (int i = 0; tt_pass_name(i) != NULL; i++)
        CHECK(tt_pass_summary(tt_pass_name(i)) != NULL && tt_graph_pass(graph, tt_pass_name(i)));
    CHECK(tt_pass_name(-1) == NULL && tt_pass_summary("magic") == NULL);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- damaged texts ---- */

TEST(a_damaged_text_is_an_error_or_another_graph_that_is_well_formed) {
    tt_scope scope = tt_scope_open();
    model of = new_model();
    tt_tensor *x = values("x", tt_shape(2, 4));
    tt_tensor *target = values("target", tt_shape(2, 3));
    tt_graph *graph;
    CHECK(tt_capture(step, &of, tt_tensors(x, target), &graph));
    char *text = tt_graph_text(graph);
    size_t length = strlen(text);
    char *damaged = malloc(length + 2);
    uint32_t random = 12345;
    int read = 0, rounds = test_sanitized() ? 300 : 3000;
    static const char signs[] = "()[],:;=0123456789abcdefx_.#\n -";
    for (int i = 0; i < rounds; i++) {
        memcpy(damaged, text, length + 1);
        for (int k = 0; k < 1 + i % 3; k++) {
            random = random * 1664525u + 1013904223u;
            size_t at = (random >> 8) % length;
            random = random * 1664525u + 1013904223u;
            if (random >> 31)
                damaged[at] = signs[(random >> 8) % (sizeof signs - 1)];
            else
                memmove(damaged + at, damaged + at + 1, strlen(damaged + at));
        }
        tt_graph *other = tt_graph_parse(damaged, NULL);
        read += other != NULL;
        if (other == NULL)
            CHECK(tt_error_show() != TUTTI_OK && tutti_error_message()[0] != 0);
        else
            CHECK(tt_graph_check(other));
        tt_graph_release(&other);
        tt_error_clear();
    }
    CHECK(read > 0 && read < rounds);
    free(damaged);
    tutti_free(text);
    tt_graph_release(&graph);
    CHECK_OK(tt_scope_close(&scope));
}
