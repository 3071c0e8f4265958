/* SPDX-License-Identifier: Apache-2.0
 *
 * Hooks and gradients leave nothing behind, and threads may share leaves.
 */
#include <pthread.h>

#include <tutti/autograd.h>
#include <tutti/module.h>
#include <tutti/ops.h>

#include "support.h"

static const tt_tensor_list none = { 0, NULL };

static tt_tensor *leaf(float value) {
    return tt_from(&value, tt_shape(1), TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
}

static tt_counts alive(void) {
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    return counts;
}

static int calls;
static tt_tensor *count_calls(const tt_hook_context *context, tt_tensor *grad) {
    (void)context, (void)grad;
    calls++;
    return NULL;
}

TEST(a_removed_hook_lets_go_of_what_it_captured) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1);
    for (int i = 0; i < 1000; i++) {
        tt_scope inner = tt_scope_open();
        tt_hook *hook = NULL;
        CHECK(tt_hook_tensor(
            x, count_calls, NULL,
            TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(tt_zeros(tt_shape(1), TUTTI_F32, NULL))), &hook));
        tt_hook_remove(&hook);
        CHECK(hook == NULL);
        CHECK_OK(tt_scope_close(&inner));
    }
    CHECK_EQ(alive().tensors, 1);
    tt_backward(tt_mul(x, x), NULL);
    CHECK_EQ(calls, 0);
    done(&scope);
}

static size_t freed;
static void take_gradient(const tt_hook_context *context, tt_tensor *x) {
    (void)context;
    size_t before = (size_t)alive().storages;
    tt_set_grad(x, NULL);
    freed += before - (size_t)alive().storages;
}

TEST(a_gradient_that_a_hook_takes_off_its_leaf_goes_while_the_backward_runs) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1), *y = leaf(2);
    CHECK(tt_hook_accumulate(x, take_gradient, NULL, NULL, NULL));
    CHECK(tt_hook_accumulate(y, take_gradient, NULL, NULL, NULL));
    CHECK(tt_backward(tt_exp(tt_mul(tt_exp(x), y)), NULL));
    CHECK_EQ(freed, 2);
    CHECK(tt_grad(x) == NULL && tt_grad(y) == NULL);
    done(&scope);
}

TEST(a_handle_may_outlive_the_tensor_that_its_hook_hung_on) {
    tt_hook *hook = NULL;
    tt_scope scope = tt_scope_open();
    CHECK(tt_hook_tensor(leaf(1), count_calls, NULL, NULL, &hook));
    CHECK_OK(tt_scope_close(&scope));
    tt_hook_remove(&hook);
    CHECK_EQ(alive().tensors, 0);
}

/* ---- dead tensors that hooks and functions give ---- */

static tt_tensor *give_user(const tt_hook_context *context, tt_tensor *grad) {
    (void)grad;
    return context->user;
}

static void put_before(const tt_hook_context *context, size_t count, tt_tensor **grads) {
    CHECK_EQ(count, 1);
    grads[0] = context->user;
}

static void put_after(const tt_hook_context *context, size_t result_count, tt_tensor **results, size_t grad_count,
                      tt_tensor *const *grads) {
    (void)grad_count, (void)grads;
    CHECK_EQ(result_count, 1);
    results[0] = context->user;
}

static int twice_forward(tt_function_context *context, tt_tensor_list inputs, tt_tensor **outputs) {
    (void)context;
    outputs[0] = tt_mul_scalar(inputs.at[0], 2);
    return 1;
}

static int user_backward(tt_function_context *context, tt_tensor_list grads, tt_tensor **results) {
    (void)grads;
    results[0] = tt_function_user(context);
    return 1;
}

static void expect_dead(tt_tensor *root) {
    CHECK(!tt_backward(root, NULL));
    expect_error(TUTTI_ERROR_HANDLE, "is no live tensor");
}

TEST(a_dead_tensor_as_a_gradient_is_refused) {
    tt_scope scope = tt_scope_open(), inner = tt_scope_open();
    tt_tensor *dead = tt_ones(tt_shape(1), TUTTI_F32, NULL);
    CHECK_OK(tt_scope_close(&inner));
    tt_tensor *x = leaf(1), *y = leaf(1), *before = tt_mul_scalar(leaf(1), 2), *after = tt_mul_scalar(leaf(1), 2);
    CHECK(tt_hook_tensor(x, give_user, dead, NULL, NULL));
    expect_dead(tt_mul_scalar(x, 2));
    CHECK(tt_hook_node_pre(tt_grad_fn(before), put_before, dead, NULL, NULL));
    expect_dead(before);
    CHECK(tt_hook_node_post(tt_grad_fn(after), put_after, dead, NULL, NULL));
    expect_dead(after);
    tt_function twice = TT_FUNCTION_INIT;
    twice.name = "twice";
    twice.forward = twice_forward;
    twice.backward = user_backward;
    expect_dead(tt_apply(&twice, tt_tensors(y), dead).at[0]);
    done(&scope);
}

TEST(a_hook_needs_a_function) {
    tt_scope scope = tt_scope_open();
    CHECK(!tt_hook_tensor(leaf(1), NULL, NULL, NULL, NULL));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("function is NULL");
}

static void watch_backward(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **grad_inputs,
                           tt_tensor_list grad_outputs) {
    (void)context, (void)module, (void)count, (void)grad_inputs, (void)grad_outputs;
    calls++;
}

TEST(a_module_without_backward_hooks_any_more_does_not_wrap_its_output) {
    tt_scope scope = tt_scope_open();
    tt_module *module = tt_function_module("twice", tt_neg);
    tt_hook *hook = NULL;
    CHECK(tt_hook_backward(module, watch_backward, NULL, NULL, &hook));
    tt_tensor *x = leaf(1);
    CHECK_TEXT(tt_node_name(tt_grad_fn(tt_module_call(module, x))), "module_outputs");
    tt_hook_remove(&hook);
    CHECK_TEXT(tt_node_name(tt_grad_fn(tt_module_call(module, x))), "neg");
    tt_module_release(module);
    done(&scope);
}

/* ---- circles ---- */

TEST(leaves_whose_hooks_would_capture_each_other_are_refused) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = leaf(1), *b = leaf(2), *c = leaf(3);
    CHECK(tt_hook_tensor(a, count_calls, NULL, TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(b)), NULL));
    CHECK(tt_hook_tensor(b, count_calls, NULL, TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(c)), NULL));
    CHECK(!tt_hook_tensor(c, count_calls, NULL, TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(a)), NULL));
    expect_error(TUTTI_ERROR_ARGUMENT, "alive for ever");
    tt_tensor *d = leaf(4);
    CHECK(tt_hook_tensor(d, count_calls, NULL, TUTTI_OPTIONS(tt_hook_options, .captured = tt_tensors(a)),
                         NULL)); /* no circle */
    done(&scope);
}

TEST(a_tensor_cannot_be_its_own_gradient) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1), *y = leaf(2);
    tt_set_grad(x, x);
    expect_error(TUTTI_ERROR_ARGUMENT, "set_grad");
    tt_set_grad(x, y);
    tt_set_grad(y, x);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    done(&scope);
}

static void *pack(void *user, tt_tensor *tensor) {
    (void)user;
    return tt_keep(tensor);
}
static tt_tensor *unpack(void *user, void *packed) {
    (void)user;
    return packed;
}
static void release_packed(void *user, void *packed) {
    (void)user;
    tt_release(packed);
}

TEST(a_pack_hook_may_keep_a_saved_result) {
    tt_saved_hooks hooks = { sizeof hooks, pack, unpack, release_packed, NULL };
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1);
    CHECK(tt_saved_hooks_push(&hooks));
    tt_tensor *y = tt_exp(x); /* saves its result */
    tt_saved_hooks_pop();
    tt_tensor_list first =
        tt_gradients(tt_tensors(y), tt_tensors(x), none, TUTTI_OPTIONS(tt_backward_options, .create_graph = true));
    tt_tensor_list second = tt_gradients(first, tt_tensors(x), none, NULL);
    CHECK(second.count == 1 && tt_item(second.at[0]) > 2.718 && tt_item(second.at[0]) < 2.719);
    tt_exp(x); /* and never runs backward */
    done(&scope);
}

/* ---- threads ---- */

enum {
    THREADS = 4
};

static void *run_backwards(void *argument) {
    tt_tensor *shared = argument;
    int rounds = test_sanitized() ? 200 : 3000;
    for (int i = 0; i < rounds; i++) {
        tt_scope scope = tt_scope_open();
        tt_backward(tt_mul_scalar(shared, 1), NULL);
        CHECK_OK(tt_scope_close(&scope));
    }
    return NULL;
}

static tt_tensor *add_digit(const tt_hook_context *context, tt_tensor *grad) {
    return tt_add_scalar(tt_mul_scalar(grad, 10), *(const double *)context->user);
}

TEST(a_hook_runs_before_those_that_are_there_when_its_options_say_so) {
    static double two = 2, three = 3;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(1);
    CHECK(tt_hook_tensor(x, add_digit, &three, NULL, NULL));
    CHECK(tt_hook_tensor(x, add_digit, &two, TUTTI_OPTIONS(tt_hook_options, .first = true), NULL));
    CHECK(tt_backward(tt_sum(x), NULL));
    CHECK_EQ((int)tt_item(tt_grad(x)), 123);
    done(&scope);
}

TEST(options_of_a_hook_that_mean_nothing_there_are_refused) {
    tt_scope scope = tt_scope_open();
    CHECK(!tt_hook_tensor(leaf(1), add_digit, NULL, TUTTI_OPTIONS(tt_hook_options, .always = true), NULL));
    CHECK_STATUS(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("tt_hook_options.always is for tt_hook_forward alone");
    tt_error_clear();
    CHECK(!tt_hook_tensor(leaf(1), add_digit, NULL, &(tt_hook_options){ 0 }, NULL));
    CHECK_STATUS(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("tt_hook_options.size is 0");
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
}

TEST(threads_that_end_in_one_leaf_lose_no_gradient) {
    pthread_t threads[THREADS];
    tt_scope scope = tt_scope_open();
    tt_tensor *shared = leaf(1);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, run_backwards, shared), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ((int)tt_item(tt_grad(shared)), THREADS * (test_sanitized() ? 200 : 3000));
    done(&scope);
}
