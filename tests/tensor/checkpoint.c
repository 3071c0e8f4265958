/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints give the same gradients with less memory; anomaly mode names the operator that made the first NaN.
 */
#include <math.h>

#include <tutti/module.h>
#include <tutti/ops.h>

#include "support.h"

static tt_module *block_of(int64_t width) {
    tt_module *layers[] = { tt_linear_module(width, width, true, TUTTI_F32), tt_function_module("Gelu", tt_gelu),
                            tt_dropout_module(0.5), tt_layer_norm_module(width, 1e-5, TUTTI_F32),
                            tt_function_module("Exp", tt_exp) };
    return tt_sequential_module(5, layers);
}

/* Loss and all gradients of two blocks, the random numbers that follow, and how many storages the graph held. */
static tt_tensor_list gradients(tt_module *first, tt_module *second, tt_tensor *x, bool checkpointed, int64_t *held) {
    tt_tensor **found = malloc(16 * sizeof *found);
    tt_scope scope = tt_scope_open();
    tt_seed(21, 0);
    tt_tensor *(*call)(tt_module *, tt_tensor *) = checkpointed ? tt_module_call_checkpointed : tt_module_call;
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    *held = -counts.storages;
    tt_scope forward = tt_scope_open();
    tt_tensor *loss = tt_scope_return(tt_mean(call(second, call(first, x))));
    CHECK_OK(tt_scope_close(&forward));
    CHECK_OK(tt_count(&counts));
    *held += counts.storages;
    if (!tt_backward(loss, NULL))
        FAIL("%s", tutti_error_message());
    size_t count = 0;
    found[count++] = tt_detach(loss);
    found[count++] = tt_rand(tt_shape(3), TUTTI_F32, NULL);
    tt_module *modules[] = { first, second };
    for (int i = 0; i < 2; i++) {
        tt_named_list parameters = tt_module_parameters(modules[i]);
        for (size_t k = 0; k < parameters.count; k++)
            found[count++] = tt_clone(tt_grad(parameters.at[k]));
        tt_module_zero_grad(modules[i]);
    }
    for (size_t i = 0; i < count; i++)
        tt_scope_return(found[i]);
    CHECK_OK(tt_scope_close(&scope));
    return tt_tensors_of(count, found);
}

TEST(a_checkpoint_gives_the_same_bits_and_holds_less) {
    tt_scope scope = tt_scope_open();
    tt_seed(2, 0);
    tt_module *first = block_of(6), *second = block_of(6);
    for (int round = 0; round < 2; round++) { /* the first input requires no grad, or does */
        tt_tensor *x = tt_randn(tt_shape(4, 6), TUTTI_F32, NULL), *plain_grad = NULL;
        int64_t plain_held, held;
        if (round == 1)
            tt_require_grad(x, true);
        tt_tensor_list plain = gradients(first, second, x, false, &plain_held);
        if (round == 1)
            plain_grad = tt_clone(tt_grad(x));
        tt_set_grad(x, NULL);
        tt_tensor_list again = gradients(first, second, x, true, &held);
        CHECK_EQ(plain.count, again.count);
        for (size_t i = 0; i < plain.count; i++)
            CHECK(tt_equal(plain.at[i], again.at[i]));
        CHECK(round == 0 || tt_equal(tt_grad(x), plain_grad));
        CHECK(held < plain_held - 5);
        free((void *)plain.at);
        free((void *)again.at);
    }
    tt_module_release(first);
    tt_module_release(second);
    done(&scope);
}

static int runs;

static int square_region(void *user, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_tensor *weight = user;
    runs++;
    outputs[0] = tt_mul(tt_square(inputs.at[0]), weight);
    outputs[1] = tt_exp(inputs.at[0]);
    return 2;
}

TEST(a_region_runs_once_more_for_a_backward_and_not_for_each_tensor) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_require_grad(tt_full(tt_shape(2), 3, TUTTI_F64, NULL), true);
    tt_tensor *weight = tt_require_grad(tt_full(tt_shape(2), 2, TUTTI_F64, NULL), true);
    tt_tensor_list results = tt_checkpoint(square_region, tt_mul_scalar(weight, 1), NULL, tt_tensors(x));
    CHECK_EQ(results.count, 2);
    CHECK_EQ(runs, 1);
    tt_tensor *loss = tt_add(tt_sum(results.at[0]), tt_sum(results.at[1]));
    tt_tensor_list none = { 0, NULL };
    CHECK(tt_backward_from(tt_tensors(loss), none, TUTTI_OPTIONS(tt_backward_options, .retain_graph = true)));
    CHECK_EQ(runs, 2);
    CHECK(fabs(tt_at(tt_grad(x), tt_shape(0)) - (12 + exp(3))) < 1e-9);
    CHECK(tt_at(tt_grad(weight), tt_shape(1)) == 9); /* through a tensor that is no input of the region */
    tt_tensor_list asked = tt_gradients(tt_tensors(loss), tt_tensors(x), none, NULL);
    CHECK(asked.count == 1 && fabs(tt_at(asked.at[0], tt_shape(1)) - (12 + exp(3))) < 1e-9);
    CHECK(tt_at(tt_grad(weight), tt_shape(1)) == 9); /* only x was asked for */
    tt_set_grad(x, NULL);
    tt_set_grad(weight, NULL);

    /* Without recording it is a call. */
    bool recording = tt_grad_mode(false);
    runs = 0;
    CHECK_EQ(tt_checkpoint(square_region, weight, NULL, tt_tensors(x)).count, 2);
    CHECK_EQ(runs, 1);
    tt_grad_mode(recording);
    done(&scope);
}

static int changing_region(void *user, tt_tensor_list inputs, tt_tensor **outputs) {
    int *round = user;
    tt_tensor *x = inputs.at[0];
    outputs[0] = (*round)++ == 0 ? tt_exp(x) : tt_exp(tt_exp(x));
    return 1;
}

static int failing_region(void *user, tt_tensor_list inputs, tt_tensor **outputs) {
    (void)user, (void)inputs, (void)outputs;
    tt_error_set(TUTTI_ERROR_LIMIT, "no more");
    return 0;
}

static int ended;

static void end(void *user) {
    (void)user;
    ended++;
}

static void refused(tutti_status status, const char *message) {
    CHECK_EQ(tt_error_show(), status);
    CHECK_MESSAGE(message);
    tt_error_clear();
}

TEST(a_checkpoint_that_cannot_be_right_is_an_error) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_require_grad(tt_ones(tt_shape(2), TUTTI_F64, NULL), true), *weight = tt_ones_like(x);
    int round = 0;
    CHECK(!tt_backward(tt_sum(tt_checkpoint(changing_region, &round, end, tt_tensors(x)).at[0]), NULL));
    refused(TUTTI_ERROR_STATE, "computed something else");

    tt_tensor *y = tt_mul_scalar(x, 2);
    tt_tensor *loss = tt_sum(tt_checkpoint(square_region, weight, end, tt_tensors(y)).at[0]);
    bool recording = tt_grad_mode(false);
    tt_fill_(y, 5);
    tt_grad_mode(recording);
    CHECK(!tt_backward(loss, NULL));
    refused(TUTTI_ERROR_VERSION, "its input 0");

    tt_tensor_list none = { 0, NULL };
    loss = tt_sum(tt_checkpoint(square_region, weight, end, tt_tensors(x)).at[0]);
    CHECK(!tt_backward_from(tt_tensors(loss), none, TUTTI_OPTIONS(tt_backward_options, .create_graph = true)));
    refused(TUTTI_ERROR_UNSUPPORTED, "create_graph");

    CHECK_EQ(tt_checkpoint(failing_region, NULL, end, tt_tensors(x)).count, 0);
    refused(TUTTI_ERROR_LIMIT, "no more");
    CHECK_EQ(tt_checkpoint(NULL, NULL, end, tt_tensors(x)).count, 0);
    refused(TUTTI_ERROR_ARGUMENT, "region is NULL");
    CHECK(tt_module_call_checkpointed(NULL, x) == NULL);
    refused(TUTTI_ERROR_ARGUMENT, "module is NULL");
    done(&scope);
    CHECK_EQ(ended, 5);
}

static tutti_status run_one(__attribute__((unused)) void *argument) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_require_grad(tt_ones(tt_shape(2), TUTTI_F64, NULL), true);
    tt_tensor_list results = tt_checkpoint(square_region, tt_ones_like(x), NULL, tt_tensors(x));
    if (results.count == 2)
        tt_backward(tt_sum(results.at[0]), NULL);
    tt_set_grad(x, NULL);
    return tt_scope_close(&scope);
}

TEST(a_checkpoint_without_memory_fails_and_leaves_nothing_behind) {
    test_fail_each("malloc,calloc,realloc", run_one, NULL);
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    CHECK(counts.tensors == 0 && counts.nodes == 0);
}

/* ---- anomaly mode ---- */

TEST(anomaly_mode_names_the_operator_of_the_first_nan) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_from((float[]){ 1, -1 }, tt_shape(2), TUTTI_F32, NULL);
    CHECK(tt_log(x) != NULL); /* off: nothing happens */
    CHECK(!tt_anomaly_mode(true));
    tt_empty(tt_shape(1000), TUTTI_F32, NULL);
    CHECK(tt_error_pending() == TUTTI_OK);
    tt_sum(tt_log(x));
    refused(TUTTI_ERROR_STATE, "log: it made the first NaN");
    tt_sqrt_(tt_clone(x));
    refused(TUTTI_ERROR_STATE, "sqrt_: it made the first NaN");
    bool was = tt_anomaly_mode(false);
    CHECK(was);
    tt_tensor *bad = tt_log(x);
    tt_anomaly_mode(true);
    tt_add(x, bad);
    refused(TUTTI_ERROR_STATE, "came in with b");
    tt_tensor *half = tt_sqrt(tt_transpose(tt_to(tt_full(tt_shape(2, 3), -1, TUTTI_F32, NULL), TUTTI_BF16), 0, 1));
    CHECK(half == NULL);
    refused(TUTTI_ERROR_STATE, "sqrt: it made the first NaN");
    for (int i = 0; i < 2; i++) { /* in one part of a complex number, the other, or both */
        tt_tensor *none = tt_zeros(tt_shape(3), i == 0 ? TUTTI_C64 : TUTTI_C128, NULL);
        tt_div(none, none);
        refused(TUTTI_ERROR_STATE, "div: it made the first NaN");
        CHECK(tt_add(none, none) != NULL);
    }
    tt_anomaly_mode(false);
    done(&scope);
}

TEST(anomaly_mode_names_the_node_and_the_module_in_a_backward) {
    tt_scope scope = tt_scope_open();
    tt_module *layers[] = { tt_function_module("Abs", tt_abs), tt_function_module("Root", tt_sqrt) };
    tt_module *net = tt_sequential_module(2, layers);
    tt_tensor *x = tt_require_grad(tt_zeros(tt_shape(1), TUTTI_F32, NULL), true);
    tt_anomaly_mode(true);
    tt_tensor *y = tt_mul_scalar(tt_module_call(net, x), 0);
    CHECK(!tt_backward(tt_sum(y), NULL)); /* 0 times infinity */
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("it made the first NaN");
    CHECK_MESSAGE("in the backward of sqrt");
    CHECK_MESSAGE("(Root)");
    tt_error_clear();
    tt_anomaly_mode(false);
    tt_module_release(net);
    done(&scope);
}
