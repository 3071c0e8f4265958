/* SPDX-License-Identifier: Apache-2.0
 *
 * Patterns of distributed training in eager form: hooks with closures, storage that comes and goes, versions that are
 * hidden, module hooks, a fully sharded step, parameters made inside functions. All values are exact.
 */
#include "patterns.h"

#include "autograd/node.h"

/* ---- hooks that close over arguments and intermediates ---- */

static tt_tensor *closure_hook(const tt_hook_context *context, tt_tensor *grad) {
    CHECK(!tt_grad_enabled());
    return tt_add(tt_add(grad, context->captured.at[0]), context->captured.at[1]);
}

static tt_tensor *with_closure(tt_tensor *x, tt_tensor *val) {
    tt_tensor *y = tt_sin(x);
    tt_hook_tensor(y, closure_hook, NULL,
                   TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(val, tt_add_scalar(y, 1))), NULL);
    return tt_sin(y);
}

TEST(a_hook_on_an_intermediate_sees_what_it_closes_over) {
    tt_scope scope = tt_scope_open();
    for (int i = 0; i < 2; i++) {
        tt_tensor *x = tt_ones(tt_shape(4), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
        tt_backward(tt_sum(with_closure(x, tt_full(tt_shape(), i == 0 ? 88 : 99, TUTTI_I64, NULL))), NULL);
        for (int k = 0; k < 4; k++)
            CHECK(near(tt_at(tt_grad(x), tt_shape(k)), i == 0 ? 48.9015934 : 54.8449188));
        CHECK_EQ(tt_dtype(tt_grad(x)), TUTTI_F32);
    }
    done(&scope);
}

/* ---- storage ---- */

TEST(a_tensor_freed_in_the_middle_leaves_what_was_computed_from_it) {
    tt_scope scope = tt_scope_open();
    tt_grad_mode(false);
    tt_tensor *x = tt_randn(tt_shape(10), TUTTI_F32, NULL), *expected = tt_cos(tt_sin(x));
    tt_tensor *y = tt_sin(x);
    tt_storage_resize(x, 0);
    CHECK(tt_equal(tt_cos(y), expected) && tt_storage_bytes(x) == 0);
    tt_grad_mode(true);
    done(&scope);
}

TEST(a_freed_output_is_grown_and_filled) {
    tt_scope scope = tt_scope_open();
    tt_grad_mode(false);
    tt_tensor *x = tt_randn(tt_shape(10), TUTTI_F32, NULL), *out = tt_randn(tt_shape(10), TUTTI_F32, NULL);
    tt_storage_resize(out, 0);
    tt_tensor *y = tt_sin(x);
    CHECK_EQ(tt_storage_bytes(out), 0);
    tt_storage_resize(out, tt_storage_bytes(x));
    tt_copy_(out, tt_cos(y));
    CHECK(tt_storage_bytes(out) == 40 && tt_equal(out, tt_cos(tt_sin(x))));
    tt_grad_mode(true);
    done(&scope);
}

/* ---- versions ---- */

TEST(a_version_that_is_set_back_hides_the_copy) {
    tt_scope scope = tt_scope_open();
    static const int counts[] = { 3, 0, 1 };
    tt_grad_mode(false);
    for (int i = 0; i < 3; i++) {
        tt_tensor *w = tt_randn(tt_shape(16), TUTTI_F32, NULL), *x = tt_randn(tt_shape(16), TUTTI_F32, NULL);
        for (int k = 0; k < counts[i]; k++)
            tt_fill_(w, k);
        CHECK_EQ(tt_version(w), counts[i]);
        int64_t version = tt_version(w);
        tt_tensor *returned = tt_copy_(w, tt_add_scalar(tt_sin(x), 1));
        tt_set_version(tt_tensors(w), 1, &version);
        CHECK(returned == w && tt_equal(w, tt_add_scalar(tt_sin(x), 1)) && (int)tt_version(w) == counts[i]);
    }
    tt_grad_mode(true);
    done(&scope);
}

/* The derivative is taken at the new w; with the version shown it must fail. */
static void refill(bool preserve_scope, bool hide) {
    tt_scope scope = tt_scope_open();
    tt_tensor *w = tt_full(tt_shape(1), 0.3, TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
    tt_tensor *x = tt_full(tt_shape(1), 1.1, TUTTI_F32, NULL), *r = tt_sin(w);
    bool was = tt_grad_mode(false);
    int64_t version = tt_version(w);
    tt_preserve *preserve = preserve_scope ? tt_preserve_begin(tt_tensors(w)) : NULL;
    tt_copy_(w, x);
    tt_preserve_end(preserve);
    if (hide && !preserve_scope)
        tt_set_version(tt_tensors(w), 1, &version);
    tt_grad_mode(was);
    CHECK(near(tt_item(r), sin(0.3)) && tt_equal(tt_detach(w), x));
    bool ran = tt_backward(r, NULL);
    CHECK(ran == hide);
    if (hide) {
        CHECK(near(tt_item(tt_grad(w)), cos(1.1)));
    } else {
        expect_error(TUTTI_ERROR_VERSION, "is at version 1; expected version 0");
    }
    done(&scope);
}
TEST(a_refilled_weight_gives_the_derivative_at_its_new_content) {
    refill(false, true);
}
TEST(a_preserving_scope_does_the_same) {
    refill(true, true);
}
TEST(without_hiding_the_version_backward_refuses) {
    refill(false, false);
}

TEST(a_preserving_scope_leaves_the_version_as_it_was) {
    tt_scope scope = tt_scope_open();
    tt_tensor *w = tt_fill_(tt_fill_(tt_randn(tt_shape(16), TUTTI_F32, NULL), 0), 1),
              *x = tt_randn(tt_shape(16), TUTTI_F32, NULL);
    tt_preserve *preserve = tt_preserve_begin(tt_tensors(w));
    tt_copy_(w, tt_add_scalar(tt_sin(x), 1));
    tt_preserve_end(preserve);
    CHECK(tt_version(w) == 2 && tt_equal(w, tt_add_scalar(tt_sin(x), 1)));
    done(&scope);
}

/* ---- module hooks ---- */

static tt_tensor *steps(tt_module *module, tt_tensor *input) {
    tt_tensor *out = NULL;
    for (int i = 0; i < 4; i++) {
        out = tt_module_call(module, input);
        tt_backward(tt_sum(out), NULL);
    }
    return out;
}

TEST(module_backward_hooks_see_and_replace_gradients) {
    tt_scope scope = tt_scope_open();
    counted c = { 0 };
    make_counted(&c);
    tt_tensor *input = ramp(2, 10, 0.05), *out = steps(c.module, input);
    check_counted(&c, input, out);
    tt_module_release(c.module);
    done(&scope);
}

TEST(module_hooks_of_two_layers_run_in_order) {
    char log[64] = { 0 }, *at = log;
    tt_scope scope = tt_scope_open();
    counted a = { .letters = "aA", .log = &at }, b = { .letters = "bB", .log = &at };
    make_counted(&a);
    make_counted(&b);
    tt_module *layers[] = { tt_module_keep(a.module), tt_module_keep(b.module) };
    tt_module *both = tt_sequential_module(2, layers);
    tt_tensor *input = ramp(2, 10, 0.05), *out = steps(both, input);
    CHECK_TEXT(log, "bBaAbBaAbBaAbBaA");
    check_layers(&a, &b, input, out);
    tt_named_list parameters = tt_module_parameters(both);
    CHECK(parameters.count == 4);
    CHECK_TEXT(parameters.names[3], "1.bias");
    tt_module_zero_grad(both);
    CHECK(tt_grad(parameters.at[0]) == NULL);
    tt_module_release(both);
    tt_module_release(a.module);
    tt_module_release(b.module);
    done(&scope);
}

static int order_calls;
static void on_forward_pre(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **inputs) {
    (void)module, (void)count;
    order_calls = order_calls * 10 + *(int *)context->user;
    inputs[0] = tt_mul_scalar(inputs[0], 2);
}
static void on_forward(const tt_hook_context *context, tt_module *module, tt_tensor_list inputs, size_t count,
                       tt_tensor **outputs) {
    (void)module, (void)inputs;
    order_calls = order_calls * 10 + *(int *)context->user;
    if (count > 0)
        outputs[0] = tt_add_scalar(outputs[0], 100);
}
static void all_absent(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grads,
                       tt_tensor_list outputs) {
    (void)module;
    CHECK(count == 1 && grads[0] == NULL && outputs.at[0] != NULL);
    order_calls = order_calls * 10 + *(int *)context->user;
}

TEST(forward_hooks_replace_arguments_and_results_and_can_come_first) {
    static int one = 1, two = 2, three = 3, four = 4, five = 5;
    tt_scope scope = tt_scope_open();
    tt_module *module = tt_linear_module(2, 1, false, TUTTI_F32);
    bool was = tt_grad_mode(false);
    tt_fill_(tt_module_parameter(module, "weight"), 1);
    tt_grad_mode(was);
    tt_hook_forward_pre(module, on_forward_pre, &two, NULL, NULL);
    tt_hook_forward_pre(module, on_forward_pre, &one, TUTTI_OPTIONS(tt_hook_options, .first = true), NULL);
    tt_hook_forward(module, on_forward, &three, NULL, NULL);
    tt_hook_forward(module, on_forward, &four, TUTTI_OPTIONS(tt_hook_options, .always = true), NULL);
    tt_hook_backward(module, all_absent, &five, NULL, NULL);
    tt_tensor *y = tt_module_call(module, tt_ones(tt_shape(1, 2), TUTTI_F32, NULL));
    CHECK(tt_item(y) == 208 && order_calls == 1234); /* 2 * 4 + 100 + 100 */
    order_calls = 0;
    tt_backward(y, NULL);
    CHECK_EQ(order_calls, 5); /* no input requires grad: called from the outputs */
    order_calls = 0;
    CHECK(tt_module_call(module, tt_ones(tt_shape(1, 3), TUTTI_F32, NULL)) == NULL);
    CHECK_EQ(order_calls, 124); /* the one that is always called came, too */
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    tt_module_release(module);
    done(&scope);
}

TEST(wrapped_inputs_and_outputs_cannot_be_changed_in_place) {
    tt_scope scope = tt_scope_open();
    counted c = { 0 };
    make_counted(&c);
    tt_tensor *out = tt_module_call(c.module, ramp(2, 10, 0.05));
    CHECK(tt_mul_scalar_(out, 2) == NULL);
    expect_error(TUTTI_ERROR_STATE, "module's backward hooks");
    tt_module_release(c.module);
    done(&scope);
}

/* ---- a fully sharded step, with the communication replaced by copies ---- */

/* Nothing in the data flow says that the weight's gradient must be there before the module's hook looks for it
 * (found_gradient): the order of the engine does. */
TEST(a_fully_sharded_step_gives_exact_values_and_keeps_its_invariants) {
    tt_scope scope = tt_scope_open();
    sharded s;
    make_sharded(&s);
    tt_tensor *input = ramp(2, 20, 0.02), *out = NULL;
    for (int step = 1; step <= 4; step++) {
        out = tt_module_call(s.module, input);
        CHECK(tt_module_parameter(s.module, "weight") == s.shard && tt_storage_bytes(s.whole) == 0);
        tt_backward(tt_sum(out), NULL);
        CHECK(found_gradient && tt_module_parameter(s.module, "weight") == s.shard && tt_storage_bytes(s.whole) == 0);
        CHECK(near(tt_at(tt_grad(s.shard), tt_shape(0, 0)),
                   0.4 * step)); /* assigned each time, from a gradient that grows */
    }
    check_sharded(&s, input, out);
    tt_module_release(s.module);
    done(&scope);
}

/* ---- parameters made inside functions ---- */

TEST(a_parameter_made_in_a_function_is_a_leaf_that_collects_its_gradient) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_randn(tt_shape(16), TUTTI_F32, NULL);
    tt_tensor *p = tt_parameter(x, true), *q = tt_parameter(tt_add_scalar(x, 123), true), *r = tt_parameter(x, false);
    tt_backward(tt_sum(tt_sin(p)), NULL);
    tt_backward(tt_sum(tt_sin(q)), NULL);
    CHECK(tt_is_parameter(p) && tt_is_leaf(p) && tt_requires_grad(p) && tt_same_storage(p, x));
    CHECK(tt_allclose(tt_grad(p), tt_cos(x), 1.3e-6, 1e-5) &&
          tt_allclose(tt_grad(q), tt_cos(tt_add_scalar(x, 123)), 1.3e-6, 1e-5));
    CHECK(tt_is_parameter(r) && !tt_requires_grad(r) && tt_grad(r) == NULL && !tt_is_parameter(tt_add_scalar(x, 1)));
    done(&scope);
}
