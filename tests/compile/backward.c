/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled backwards: hooks of every kind, the order of the engine, two graphs over four steps, and what runs as ever.
 */
#include <math.h>

#include "quick.h"

static bool is_near(double left, double right) {
    return fabs(left - right) <= 1e-5 + 1.3e-6 * fabs(right) * 10;
}

static double at(tt_tensor *x, int64_t row, int64_t column) {
    return tt_item(tt_select(tt_select(tt_detach(x), 0, row), 0, column));
}

static tt_backward_counts counts_of_cache(const tt_backward_cache *cache) {
    tt_backward_counts counts = TT_BACKWARD_COUNTS_INIT;
    CHECK(tt_backward_cache_count(cache, &counts));
    return counts;
}

static tt_backward_cache *new_cache(bool full) {
    tt_backward_cache *cache;
    CHECK(tt_backward_cache_new(TUTTI_OPTIONS(tt_backward_cache_options, .full = full), &cache));
    return cache;
}

/* The backward itself where there is no cache, or a compiled one. */
static void backward(tt_tensor *loss, tt_backward_cache *cache) {
    if (cache != NULL)
        CHECK(tt_backward_compiled_begin(cache));
    if (!tt_backward(loss, NULL))
        FAIL("%s", tutti_error_message());
    if (cache != NULL)
        CHECK(tt_backward_compiled_end());
}

/* first + step * i, in that shape. */
static tt_tensor *ramp(double first, double step, tt_dims shape) {
    int64_t count = 1;
    for (int i = 0; i < shape.count; i++)
        count *= shape.at[i];
    return tt_reshape(tt_add_scalar(tt_mul_scalar(tt_arange(0, count, 1, TUTTI_F32, NULL), step), first), shape);
}

/* ---- a hook with a closure ---- */

static tt_tensor *add_captured(const tt_hook_context *context, tt_tensor *grad) {
    return tt_add(tt_add(grad, context->captured.at[0]), context->captured.at[1]);
}

static tt_tensor *intermediate(tt_tensor *x, tt_tensor *value) {
    tt_tensor *y = tt_sin(x), *closure = tt_add_scalar(y, 1);
    CHECK(tt_hook_tensor(y, add_captured, NULL, TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(value, closure)),
                         NULL));
    return tt_sum(tt_sin(y));
}

TEST(a_hook_on_an_intermediate_sees_the_tensors_of_its_own_step) {
    tt_scope scope = tt_scope_open();
    static const double expected[] = { 48.9015934, 54.8449188 };
    tt_tensor *kept[] = { tt_full(tt_shape(), 88, TUTTI_I64, NULL), tt_full(tt_shape(), 99, TUTTI_I64, NULL) };
    tt_backward_cache *cache = new_cache(true);
    for (int i = 0; i < 4; i++) {
        tt_tensor *x = tt_require_grad(tt_ones(tt_shape(4), TUTTI_F32, NULL), true);
        tt_tensor *twin = tt_require_grad(tt_ones(tt_shape(4), TUTTI_F32, NULL), true);
        backward(intermediate(x, kept[i % 2]), NULL);
        backward(intermediate(twin, kept[i % 2]), cache);
        CHECK(tt_equal(tt_grad(x), tt_grad(twin)));
        CHECK(is_near(tt_item(tt_select(tt_grad(twin), 0, 3)), expected[i % 2]));
    }
    tt_backward_counts counts = counts_of_cache(cache);
    CHECK(counts.captures == 1 && counts.hits == 3 && counts.eager == 0);
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- hooks of modules ---- */

typedef struct hooked {
    tt_module *module;
    tt_tensor *before, *after; /* how often the hooks ran, counted in the graph */
    int calls;                 /* and on the host */
} hooked;

static void count_and_turn(tt_tensor *counter, double number, tt_tensor **grad) {
    tt_add_(counter, tt_number(1));
    *grad = tt_sin(tt_add_scalar(*grad, number));
}

static void before_module(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grads) {
    hooked *of = context->user;
    CHECK(count == 1 && tt_size(tt_module_parameter(module, "weight"), 0) == 10);
    of->calls++;
    count_and_turn(of->before, 1.2, &grads[0]);
}

static void after_module(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grads,
                         tt_tensor_list grad_outputs) {
    hooked *of = context->user;
    (void)grad_outputs;
    CHECK(count == 1 && tt_size(tt_module_parameter(module, "weight"), 1) == 10);
    of->calls++;
    count_and_turn(of->after, 3.4, &grads[0]);
}

static void hooked_init(hooked *of) {
    *of = (hooked){ tt_linear_module(10, 10, true, TUTTI_F32), tt_keep(tt_zeros(tt_shape(), TUTTI_I64, NULL)),
                    tt_keep(tt_zeros(tt_shape(), TUTTI_I64, NULL)), 0 };
    bool recording = tt_grad_mode(false);
    tt_copy_(tt_module_parameter(of->module, "weight"), ramp(-0.5, 0.01, tt_shape(10, 10)));
    tt_copy_(tt_module_parameter(of->module, "bias"), ramp(0, 0.1, tt_shape(10)));
    tt_grad_mode(recording);
    CHECK(tt_hook_backward_pre(of->module, before_module, of, NULL, NULL));
    CHECK(tt_hook_backward(of->module, after_module, of, NULL, NULL));
}

static void hooked_end(hooked *of) {
    tt_module_release(of->module);
    tt_release(of->before);
    tt_release(of->after);
}

static void check_same_grads(const hooked *left, const hooked *right) {
    static const char *const names[] = { "weight", "bias" };
    for (int i = 0; i < 2; i++)
        CHECK(tt_equal(tt_grad(tt_module_parameter(left->module, names[i])),
                       tt_grad(tt_module_parameter(right->module, names[i]))));
    CHECK(tt_equal(left->before, right->before) && tt_equal(left->after, right->after));
}

TEST(hooks_of_a_module_are_two_graphs_over_four_steps) {
    tt_scope scope = tt_scope_open();
    hooked eager, compiled;
    hooked_init(&eager);
    hooked_init(&compiled);
    tt_tensor *inputs[2];
    for (int i = 0; i < 2; i++)
        inputs[i] = tt_require_grad(ramp(0, 0.05, tt_shape(2, 10)), true);
    tt_backward_cache *cache = new_cache(true);
    for (int i = 0; i < 4; i++) {
        backward(tt_sum(tt_module_call(eager.module, inputs[0])), NULL);
        backward(tt_sum(tt_module_call(compiled.module, inputs[1])), cache);
        check_same_grads(&eager, &compiled);
        CHECK(tt_equal(tt_grad(inputs[0]), tt_grad(inputs[1])));
    }
    CHECK(tt_item(compiled.before) == 4 && tt_item(compiled.after) == 4);
    CHECK_EQ(compiled.calls, 4); /* both hooks, once for each of two graphs */
    tt_backward_counts counts = counts_of_cache(cache);
    CHECK(counts.captures == 2 && counts.hits == 2 && counts.eager == 0);
    CHECK(counts.misses[TT_BACKWARD_MISS_FIRST] == 1 && counts.misses[TT_BACKWARD_MISS_GRADIENTS] == 1);
    /* Of the two one is of constants, and folded where these are numbers of the host. */
    CHECK_EQ(tt_graph_count_of(tt_backward_cache_graph(cache), "sin"), test_on_device() ? 2 : 1);
    tt_tensor *weight = tt_grad(tt_module_parameter(compiled.module, "weight"));
    CHECK(is_near(at(weight, 0, 0), 1.61699281) && is_near(at(weight, 3, 7), 3.88078274));
    CHECK(is_near(tt_item(tt_select(tt_grad(tt_module_parameter(compiled.module, "bias")), 0, 5)), 6.46797123));
    CHECK(is_near(at(tt_grad(inputs[1]), 0, 0), 0.58129764) && is_near(at(tt_grad(inputs[1]), 1, 9), -2.19813447));
    tt_backward_cache_release(&cache);
    hooked_end(&eager);
    hooked_end(&compiled);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(hooks_of_several_layers_are_compiled_together) {
    tt_scope scope = tt_scope_open();
    hooked eager[2], compiled[2];
    tt_tensor *inputs[2];
    for (int i = 0; i < 2; i++) {
        hooked_init(&eager[i]);
        hooked_init(&compiled[i]);
        inputs[i] = tt_require_grad(ramp(0, 0.05, tt_shape(2, 10)), true);
    }
    tt_backward_cache *cache = new_cache(true);
    for (int i = 0; i < 4; i++) {
        backward(tt_sum(tt_module_call(eager[1].module, tt_module_call(eager[0].module, inputs[0]))), NULL);
        backward(tt_sum(tt_module_call(compiled[1].module, tt_module_call(compiled[0].module, inputs[1]))), cache);
    }
    for (int i = 0; i < 2; i++)
        check_same_grads(&eager[i], &compiled[i]);
    CHECK(tt_equal(tt_grad(inputs[0]), tt_grad(inputs[1])));
    CHECK(is_near(at(tt_grad(inputs[1]), 0, 0), 1.89506403) && is_near(at(tt_grad(inputs[1]), 1, 9), -0.95070847));
    CHECK(is_near(at(tt_grad(tt_module_parameter(compiled[1].module, "weight")), 0, 0), -13.71209901));
    CHECK(is_near(tt_item(tt_select(tt_grad(tt_module_parameter(compiled[0].module, "bias")), 0, 9)), 4.84446096));
    CHECK(counts_of_cache(cache).captures == 2 && counts_of_cache(cache).hits == 2);
    tt_backward_cache_release(&cache);
    for (int i = 0; i < 2; i++) {
        hooked_end(&eager[i]);
        hooked_end(&compiled[i]);
    }
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- the order of hooks ---- */

typedef struct logbook {
    int events[64], count;
} logbook;

static void note(const tt_hook_context *context, int event) {
    logbook *to = context->user;
    CHECK(to->count < 64);
    to->events[to->count++] = event;
}

static tt_tensor *note_first(const tt_hook_context *context, tt_tensor *grad) {
    note(context, 1);
    return tt_mul_scalar(grad, 2);
}

static tt_tensor *note_second(const tt_hook_context *context, tt_tensor *grad) {
    (void)grad;
    note(context, 2);
    return NULL;
}

static void note_accumulated(const tt_hook_context *context, tt_tensor *leaf) {
    note(context, 3);
    tt_mul_(tt_grad(leaf), tt_number(0.5)); /* sees the gradient as it is now */
}

static void note_before(const tt_hook_context *context, size_t count, tt_tensor **grads) {
    CHECK_EQ(count, 1);
    note(context, 4);
    grads[0] = tt_add_scalar(grads[0], 1);
}

static void note_after(const tt_hook_context *context, size_t result_count, tt_tensor **results, size_t grad_count,
                       tt_tensor *const *grads) {
    (void)grads;
    CHECK(result_count == 2 && grad_count == 1);
    note(context, 5);
    results[0] = tt_neg(results[0]);
}

static void note_end(void *user) {
    note(&(tt_hook_context){ user, { 0, NULL } }, 6);
}

static tt_tensor *queue_end(const tt_hook_context *context, tt_tensor *grad) {
    (void)grad;
    note(context, 7);
    CHECK(tt_backward_callback(note_end, context->user));
    return NULL;
}

static tt_tensor *many_hooks(tt_tensor *a, tt_tensor *b, logbook *to) {
    tt_tensor *product = tt_mul(a, b), *sum = tt_add(product, a);
    CHECK(tt_hook_tensor(product, note_first, to, NULL, NULL) && tt_hook_tensor(product, note_second, to, NULL, NULL));
    CHECK(tt_hook_node_pre(tt_grad_fn(product), note_before, to, NULL, NULL));
    CHECK(tt_hook_node_post(tt_grad_fn(product), note_after, to, NULL, NULL));
    CHECK(tt_hook_tensor(sum, queue_end, to, NULL, NULL));
    return tt_sum(tt_exp(sum));
}

TEST(hooks_of_every_kind_run_in_the_order_of_the_engine) {
    tt_scope scope = tt_scope_open();
    logbook logs[2] = { { .count = 0 }, { .count = 0 } };
    tt_tensor *leaves[2][2];
    tt_backward_cache *cache = new_cache(true);
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 2; k++) {
            leaves[i][k] = tt_require_grad(ramp(0.1 + k, 0.2, tt_shape(5)), true);
            CHECK(tt_hook_accumulate(leaves[i][k], note_accumulated, &logs[i], NULL, NULL));
            CHECK(tt_hook_tensor(leaves[i][k], note_second, &logs[i], NULL, NULL));
        }
    for (int step = 0; step < 4; step++) {
        logs[0].count = 0;
        int before = logs[1].count = 0;
        backward(many_hooks(leaves[0][0], leaves[0][1], &logs[0]), NULL);
        backward(many_hooks(leaves[1][0], leaves[1][1], &logs[1]), cache);
        for (int k = 0; k < 2; k++)
            CHECK(tt_equal(tt_grad(leaves[0][k]), tt_grad(leaves[1][k])));
        CHECK_EQ(logs[1].count, step < 2 ? logs[0].count : before); /* they ran while they were traced */
        CHECK(memcmp(logs[0].events, logs[1].events, (size_t)logs[1].count * sizeof(int)) == 0);
    }
    CHECK(counts_of_cache(cache).captures == 2 && counts_of_cache(cache).hits == 2);
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- the fully sharded step, without ranks ---- */

typedef struct fake_sharded {
    tt_module *module;
    tt_tensor *shard, *whole;
} fake_sharded;

static void unshard(fake_sharded *of) {
    bool recording = tt_grad_mode(false);
    tt_storage_resize(of->whole, 800);
    tt_preserve *kept = tt_preserve_begin(tt_tensors(of->whole));
    tt_copy_(of->whole, tt_cat(tt_tensors(of->shard, of->shard), 0));
    tt_preserve_end(kept);
    CHECK(tt_module_set_parameter(of->module, "weight", of->whole));
    tt_grad_mode(recording);
}

static void shard_again(fake_sharded *of) {
    CHECK(tt_module_set_parameter(of->module, "weight", of->shard));
    tt_storage_resize(of->whole, 0);
}

static void forward_pre(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **inputs) {
    (void)module, (void)count, (void)inputs;
    unshard(context->user);
}

static void forward_post(const tt_hook_context *context, tt_module *module, tt_tensor_list inputs, size_t count,
                         tt_tensor **outputs) {
    (void)module, (void)inputs, (void)count, (void)outputs;
    shard_again(context->user);
}

static void backward_pre(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grads) {
    (void)module, (void)count, (void)grads;
    unshard(context->user);
}

static void backward_post(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grads,
                          tt_tensor_list grad_outputs) {
    fake_sharded *of = context->user;
    (void)count, (void)grads, (void)grad_outputs;
    tt_tensor *part = tt_clone(tt_narrow(tt_grad(tt_module_parameter(module, "weight")), 0, 0, 5));
    CHECK(tt_module_set_parameter(of->module, "weight", of->shard));
    tt_set_grad(of->shard, part);
    tt_storage_resize(of->whole, 0);
}

static void sharded_init(fake_sharded *of) {
    of->module = tt_linear_module(20, 10, false, TUTTI_F32);
    of->shard = tt_parameter(ramp(-1, 0.01, tt_shape(5, 20)), true);
    of->whole = tt_parameter(tt_zeros(tt_shape(10, 20), TUTTI_F32, NULL), true);
    tt_storage_resize(of->whole, 0);
    CHECK(tt_hook_backward_pre(of->module, backward_pre, of, NULL, NULL));
    CHECK(tt_hook_backward(of->module, backward_post, of, NULL, NULL));
    CHECK(tt_hook_forward_pre(of->module, forward_pre, of, NULL, NULL));
    CHECK(tt_hook_forward(of->module, forward_post, of, NULL, NULL));
}

TEST(the_fake_sharded_step_is_two_graphs_with_the_values_of_eager_code) {
    tt_scope scope = tt_scope_open();
    fake_sharded eager, compiled;
    sharded_init(&eager);
    sharded_init(&compiled);
    tt_tensor *inputs[2], *out = NULL;
    for (int i = 0; i < 2; i++)
        inputs[i] = tt_require_grad(ramp(0, 0.02, tt_shape(2, 20)), true);
    tt_backward_cache *cache = new_cache(true);
    for (int i = 0; i < 4; i++) {
        tt_tensor *expected = tt_module_call(eager.module, inputs[0]);
        out = tt_module_call(compiled.module, inputs[1]);
        CHECK(tt_equal(out, expected));
        backward(tt_sum(expected), NULL);
        backward(tt_sum(out), cache);
        CHECK(tt_equal(tt_grad(eager.shard), tt_grad(compiled.shard)) && tt_storage_bytes(compiled.whole) == 0);
        CHECK(tt_equal(tt_grad(inputs[0]), tt_grad(inputs[1])));
        CHECK(tt_module_parameter(compiled.module, "weight") == compiled.shard);
        CHECK_EQ(tt_version(eager.whole), tt_version(compiled.whole));
    }
    CHECK(counts_of_cache(cache).captures == 2 && counts_of_cache(cache).hits == 2);
    CHECK(tt_graph_count_of(tt_backward_cache_graph(cache), "storage_resize") == 0); /* by the pass unshard */
    CHECK(is_near(at(out, 0, 0), -3.306) && is_near(at(out, 1, 9), -1.106));
    CHECK(is_near(at(tt_grad(compiled.shard), 2, 0), 1.6) && is_near(at(tt_grad(compiled.shard), 4, 19), 4.64));
    CHECK(is_near(at(tt_grad(inputs[1]), 1, 0), -24.0) && is_near(at(tt_grad(inputs[1]), 0, 19), -16.4));
    tt_backward_cache_release(&cache);
    tt_module_release(eager.module);
    tt_module_release(compiled.module);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- a compiled forward ---- */

static int hooked_forward(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_sum(tt_module_call(((hooked *)user)->module, inputs.at[0]));
    return 1;
}

static int other_forward(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_sum(tt_mul_scalar(inputs.at[0], 3));
    return 1;
}

static int another_forward(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_sum(tt_mul_scalar(inputs.at[0], 5));
    return 1;
}

TEST(the_backward_of_a_compiled_function_is_part_of_the_graph) {
    tt_scope scope = tt_scope_open();
    hooked eager, compiled;
    hooked_init(&eager);
    hooked_init(&compiled);
    tt_tensor *inputs[2];
    for (int i = 0; i < 2; i++)
        inputs[i] = tt_require_grad(ramp(0, 0.05, tt_shape(2, 10)), true);
    tt_compiled *fast;
    CHECK(tt_compile(hooked_forward, &compiled, TUTTI_OPTIONS(tt_compile_options, .full = true), &fast));
    tt_backward_cache *cache = new_cache(true);
    for (int i = 0; i < 4; i++) {
        backward(tt_sum(tt_module_call(eager.module, inputs[0])), NULL);
        tt_tensor_list loss = tt_compiled_call(fast, tt_tensors(inputs[1]));
        if (loss.count != 1)
            FAIL("%s", tutti_error_message());
        backward(loss.at[0], cache);
        check_same_grads(&eager, &compiled);
        CHECK(tt_equal(tt_grad(inputs[0]), tt_grad(inputs[1])));
    }
    CHECK(counts_of_cache(cache).captures == 2 && counts_of_cache(cache).hits == 2);
    tt_backward_cache_release(&cache);
    tt_compiled_release(&fast);
    hooked_end(&eager);
    hooked_end(&compiled);
    CHECK_OK(tt_scope_close(&scope));
}

/* Two functions whose backwards look alike from outside: each has a graph of its own, also when one took the place of
 * the other in memory. */
TEST(backwards_of_different_compiled_functions_are_told_apart) {
    tt_scope scope = tt_scope_open();
    tt_backward_cache *cache = new_cache(true);
    for (int i = 0; i < 6; i++) {
        tt_compiled *fast;
        CHECK(tt_compile(i % 2 == 0 ? other_forward : another_forward, NULL, NULL, &fast));
        tt_tensor *x = tt_require_grad(ramp(0, 0.3, tt_shape(4)), true);
        tt_tensor_list loss = tt_compiled_call(fast, tt_tensors(x));
        CHECK_EQ(loss.count, 1);
        backward(loss.at[0], cache);
        CHECK_EQ((int)tt_item(tt_select(tt_grad(x), 0, 2)), i % 2 == 0 ? 3 : 5);
        tt_compiled_release(&fast);
    }
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- several graphs ---- */

static tt_tensor *loss_of(tt_tensor *x, int kind) {
    return kind == 0 ? tt_sum(tt_sin(x)) : kind == 1 ? tt_sum(tt_mul_scalar(x, 3)) : tt_sum(tt_mul_scalar(x, 4));
}

TEST(alternating_backwards_have_each_their_graph_and_sizes_are_part_of_it) {
    tt_scope scope = tt_scope_open();
    tt_backward_cache *cache = new_cache(true);
    for (int i = 0; i < 9; i++) {
        tt_tensor *x = tt_require_grad(ramp(0, 0.3, tt_shape(4)), true), *twin = tt_require_grad(tt_clone(x), true);
        twin = tt_require_grad(tt_detach(twin), true);
        backward(loss_of(x, i % 3), NULL);
        backward(loss_of(twin, i % 3), cache);
        CHECK(tt_equal(tt_grad(x), tt_grad(twin)));
    }
    tt_backward_counts counts = counts_of_cache(cache);
    CHECK(counts.captures == 3 && counts.hits == 6 && counts.misses[TT_BACKWARD_MISS_NODES] == 2);
    tt_tensor *other = tt_require_grad(ramp(0, 0.3, tt_shape(5)), true);
    backward(loss_of(other, 2), cache);
    CHECK_EQ(counts_of_cache(cache).misses[TT_BACKWARD_MISS_SIZES], 1);
    for (int size = 6; size < 6 + TT_BACKWARD_ENTRIES - 4; size++)
        backward(loss_of(tt_require_grad(ramp(0, 0.3, tt_shape(size)), true), 0), cache);
    CHECK(tt_backward_compiled_begin(cache));
    other = tt_require_grad(ramp(0, 0.3, tt_shape(77)), true);
    CHECK(!tt_backward(loss_of(other, 0), NULL) && fails(TUTTI_ERROR_CAPTURE, "the cache is full"));
    CHECK(tt_backward_compiled_end());
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(gradients_that_share_memory_have_a_graph_of_their_own) {
    tt_scope scope = tt_scope_open();
    tt_backward_cache *cache = new_cache(true);
    tt_tensor *leaves[2][2];
    for (int i = 0; i < 4; i++)
        leaves[i / 2][i % 2] = tt_require_grad(ramp(0.1 * (i % 2), 0.3, tt_shape(4)), true);
    for (int step = 0; step < 4; step++)
        for (int i = 0; i < 2; i++) {
            tt_tensor *const *pair = leaves[i];
            if (step == 2)
                tt_set_grad(pair[1], tt_grad(pair[0]));
            backward(tt_sum(tt_mul(tt_sin(pair[0]), pair[1])), i == 0 ? NULL : cache);
            for (int k = 0; k < 2 && i == 1; k++)
                CHECK(tt_equal(tt_grad(leaves[0][k]), tt_grad(leaves[1][k])));
        }
    CHECK(counts_of_cache(cache).captures == 3 && counts_of_cache(cache).hits == 1 &&
          counts_of_cache(cache).eager == 0);
    CHECK_EQ(counts_of_cache(cache).misses[TT_BACKWARD_MISS_GRADIENTS], 2);
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- functions of the user's own, checkpoints, kept graphs ---- */

static int cube_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_save_for_backward(context, tt_tensors(inputs.at[0]));
    outputs[0] = tt_mul(inputs.at[0], tt_mul(inputs.at[0], inputs.at[0]));
    return 1;
}

static int cube_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    tt_tensor *x = tt_saved_tensors(context).at[0];
    results[0] = tt_mul(grads.at[0], tt_mul_scalar(tt_mul(x, x), 3));
    return 1;
}

static int drop_region(void *user, tt_tensor_list inputs, tt_tensor **outputs) {
    (void)user;
    outputs[0] = tt_mul(tt_dropout(tt_sin(inputs.at[0]), 0.5), inputs.at[0]);
    return 1;
}

static tt_tensor *mixture(tt_tensor *x) {
    tt_function cube = { sizeof cube, .name = "cube", .forward = cube_forward, .backward = cube_backward };
    tt_tensor *y = tt_apply(&cube, tt_tensors(x), NULL).at[0];
    tt_tensor *row = tt_select(tt_mul_(y, tt_number(2)), 0, 1);
    tt_add_(row, tt_number(1)); /* a part, in place */
    return tt_sum(tt_mul(y, tt_checkpoint(drop_region, NULL, NULL, tt_tensors(x)).at[0]));
}

TEST(functions_checkpoints_and_writes_are_compiled_too) {
    tt_scope scope = tt_scope_open();
    tt_backward_cache *cache = new_cache(true);
    for (int i = 0; i < 3; i++) {
        tt_tensor *x = tt_require_grad(ramp(0.1 * i, 0.3, tt_shape(2, 3)), true);
        tt_tensor *twin = tt_require_grad(tt_detach(tt_clone(x)), true);
        tt_seed((uint64_t)i, 0);
        backward(mixture(x), NULL);
        tt_seed((uint64_t)i, 0);
        backward(mixture(twin), cache);
        CHECK(tt_equal(tt_grad(x), tt_grad(twin)));
    }
    CHECK(counts_of_cache(cache).captures == 1 && counts_of_cache(cache).hits == 2);
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_graph_that_is_kept_can_run_again_and_one_that_is_not_says_so) {
    tt_scope scope = tt_scope_open();
    tt_backward_cache *cache = new_cache(false);
    tt_tensor *x = tt_require_grad(ramp(0, 0.3, tt_shape(4)), true), *loss = tt_sum(tt_sin(x));
    CHECK(tt_backward_compiled_begin(cache));
    for (int i = 0; i < 3; i++)
        CHECK(tt_backward_from(tt_tensors(loss), (tt_tensor_list){ 0, NULL },
                               TUTTI_OPTIONS(tt_backward_options, .retain_graph = i < 2)));
    CHECK(tt_equal(tt_grad(x), tt_add(tt_add(tt_cos(x), tt_cos(x)), tt_cos(x))));
    CHECK(!tt_backward(loss, NULL) && fails(TUTTI_ERROR_GRAPH, "a second time"));
    tt_tensor *y = tt_mul_scalar(x, 2);
    CHECK(!tt_backward(tt_detach(x), NULL) && tt_error_show() == TUTTI_ERROR_STATE);
    tt_error_clear();
    loss = tt_sum(tt_mul(y, y));
    bool recording = tt_grad_mode(false);
    tt_mul_(y, tt_number(2));
    tt_grad_mode(recording);
    CHECK(!tt_backward(loss, NULL) && fails(TUTTI_ERROR_VERSION, "modified by an inplace operation"));
    CHECK(tt_backward_compiled_end());
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- what runs as ever ---- */

static tt_tensor *read_on_host(const tt_hook_context *context, tt_tensor *grad) {
    (void)context;
    return tt_mul_scalar(grad, tt_item(tt_sum(grad)) > 0 ? 2 : 3);
}

TEST(what_cannot_be_captured_runs_as_ever_or_is_an_error) {
    tt_scope scope = tt_scope_open();
    tt_backward_cache *cache = new_cache(false), *full = new_cache(true);
    tt_tensor *x = tt_require_grad(ramp(0, 0.3, tt_shape(4)), true), *y = tt_sin(x);
    CHECK(tt_hook_tensor(y, read_on_host, NULL, NULL, NULL));
    backward(tt_sum(y), cache);
    CHECK(tt_equal(tt_grad(x), tt_mul_scalar(tt_cos(x), 2)));
    CHECK(strstr(tt_backward_cache_reason(cache), "item") != NULL && counts_of_cache(cache).eager == 1);
    y = tt_sin(x);
    CHECK(tt_hook_tensor(y, read_on_host, NULL, NULL, NULL));
    CHECK(tt_backward_compiled_begin(full));
    CHECK(!tt_backward(tt_sum(y), NULL) && fails(TUTTI_ERROR_CAPTURE, "item"));
    tt_tensor *kept = tt_mul_scalar(x, 2), *seen = tt_mul_scalar(x, 2);
    tt_retain_grad(kept);
    CHECK(!tt_backward(tt_sum(kept), NULL) && fails(TUTTI_ERROR_CAPTURE, "tt_retain_grad"));
    CHECK(tt_hook_tensor(seen, add_captured, NULL, TUTTI_OPTIONS(tt_hook_options, .opaque = true), NULL));
    CHECK(!tt_backward(tt_sum(seen), NULL) && fails(TUTTI_ERROR_CAPTURE, "opaque"));
    CHECK_EQ(tt_gradients(tt_tensors(tt_sum(tt_sin(x))), tt_tensors(x), (tt_tensor_list){ 0, NULL }, NULL).count, 1);
    CHECK(tt_backward_compiled_end());
    tt_backward_cache_release(&cache);
    tt_backward_cache_release(&full);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(regions_end_as_they_begin) {
    tt_scope scope = tt_scope_open();
    tt_backward_cache *outer = new_cache(true), *inner = new_cache(true);
    CHECK(!tt_backward_compiled_end() && fails(TUTTI_ERROR_STATE, "no region is open"));
    CHECK(!tt_backward_compiled_begin(NULL) && fails(TUTTI_ERROR_ARGUMENT, "cache is NULL"));
    CHECK(!tt_backward_cache_new(NULL, NULL) && fails(TUTTI_ERROR_ARGUMENT, "cache is NULL"));
    CHECK(tt_backward_cache_graph(outer) == NULL && tt_backward_cache_reason(outer)[0] == 0);
    CHECK(tt_backward_compiled_begin(outer) && tt_backward_compiled_begin(inner));
    CHECK(!tt_backward_compiled_begin(outer) && fails(TUTTI_ERROR_STATE, "another region"));
    tt_backward_cache_release(&inner);
    CHECK(inner != NULL && fails(TUTTI_ERROR_STATE, "a region uses it"));
    tt_tensor *x = tt_require_grad(ramp(0, 0.3, tt_shape(4)), true);
    CHECK(tt_backward(tt_sum(x), NULL) && tt_backward_compiled_end());
    CHECK(tt_backward(tt_sum(x), NULL) && tt_backward_compiled_end());
    CHECK(counts_of_cache(outer).captures == 1 && counts_of_cache(inner).captures == 1);
    tt_backward_cache_release(&outer);
    tt_backward_cache_release(&inner);
    tt_backward_cache_release(&inner);
    CHECK_OK(tt_scope_close(&scope));
}

static tutti_status two_steps(__attribute__((unused)) void *argument) {
    tt_scope scope = tt_scope_open();
    tt_backward_cache *cache = NULL;
    tt_tensor *x = tt_require_grad(ramp(0, 0.3, tt_shape(4)), true), *value = tt_full(tt_shape(), 2, TUTTI_F32, NULL);
    bool begun = tt_backward_cache_new(NULL, &cache) && tt_backward_compiled_begin(cache);
    for (int i = 0; i < 2 && tt_error_show() == TUTTI_OK; i++) {
        tt_tensor *y = tt_sin(x);
        tt_hook_tensor(y, add_captured, NULL, TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(value, x)), NULL);
        tt_backward(tt_sum(y), NULL);
    }
    if (begun)
        (void)tt_backward_compiled_end();
    tt_backward_cache_release(&cache);
    return tt_scope_close(&scope);
}

TEST(an_allocation_that_fails_ends_a_compiled_backward_and_leaves_nothing) {
    tt_counts before = TT_COUNTS_INIT, after = TT_COUNTS_INIT;
    CHECK_OK(two_steps(NULL)); /* a device is open then */
    CHECK_OK(tt_count(&before));
    test_fail_each("malloc,calloc,realloc,strdup", two_steps, NULL);
    CHECK_OK(tt_count(&after));
    CHECK(after.tensors == before.tensors && after.storages == before.storages && after.nodes == before.nodes);
}

/* ---- ranks ---- */

static void average(const tt_hook_context *context, tt_tensor *leaf) {
    tt_all_reduce_(tt_grad(leaf), TUTTI_AVG, context->user);
}

TEST_WORLD(hooks_that_communicate_are_part_of_the_graph, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    tt_tensor *weights[2];
    for (int i = 0; i < 2; i++) {
        weights[i] = tt_parameter(ramp(0.1, 0.05, tt_shape(3, 4)), true);
        CHECK(tt_hook_accumulate(weights[i], average, group, NULL, NULL));
    }
    tt_backward_cache *cache = new_cache(true);
    for (int step = 0; step < 4; step++) {
        tt_tensor *x = ramp(rank + step, 0.3, tt_shape(2, 4));
        for (int i = 0; i < 2; i++) {
            tt_set_grad(weights[i], NULL);
            backward(tt_sum(tt_sin(tt_linear(x, weights[i], NULL))), i == 0 ? NULL : cache);
        }
        CHECK(tt_equal(tt_grad(weights[0]), tt_grad(weights[1])));
    }
    CHECK(counts_of_cache(cache).captures == 1 && counts_of_cache(cache).hits == 3);
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static void sum_often(const tt_hook_context *context, tt_tensor *leaf) {
    tutti_group *group = context->user;
    for (int i = 0; i <= tutti_group_rank(group); i++)
        tt_all_reduce_(tt_grad(leaf), TUTTI_SUM, group);
}

TEST_WORLD(ranks_whose_backwards_communicate_differently_fail_before_they_run, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_tensor *weight = tt_parameter(ramp(0.1, 0.05, tt_shape(3, 4)), true);
    CHECK(tt_hook_accumulate(weight, sum_often, group, NULL, NULL));
    tt_backward_cache *cache = new_cache(false);
    CHECK(tt_backward_compiled_begin(cache));
    CHECK(!tt_backward(tt_sum(tt_sin(weight)), NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("compiled backward: collective 1 of group");
    tt_error_clear();
    CHECK(tt_backward_compiled_end());
    CHECK(tt_grad(weight) == NULL);
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

static void read_on_one(const tt_hook_context *context, tt_tensor *leaf) {
    tutti_group *group = context->user;
    tt_tensor *grad = tt_grad(leaf);
    tt_all_reduce_(grad, TUTTI_SUM, group);
    if (tutti_group_rank(group) == 1)
        tt_item(tt_sum(grad));
}

TEST_WORLD(a_rank_whose_backward_cannot_be_captured_fails_it_on_all, 2) {
    tt_scope scope = tt_scope_open();
    tutti_group *group = tutti_world_group(world);
    tt_tensor *weight = tt_parameter(ramp(0.1, 0.05, tt_shape(3, 4)), true);
    CHECK(tt_hook_accumulate(weight, read_on_one, group, NULL, NULL));
    tt_backward_cache *cache = new_cache(false);
    CHECK(tt_backward_compiled_begin(cache));
    CHECK(!tt_backward(tt_sum(tt_sin(weight)), NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("runs the function itself (item: argument x");
    tt_error_clear();
    CHECK(tt_backward_compiled_end());
    tt_backward_cache_release(&cache);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}
