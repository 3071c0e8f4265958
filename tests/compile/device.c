/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled functions on the device that TEST_DEVICE names: what only a device has, streams and replays as a graph.
 */
#include "quick.h"

#include <tutti/module.h>
#include <tutti/streams.h>

#include "../loops/programs.h"

static void begin(void) {
    if (!use_device())
        SKIP("TEST_DEVICE names no device");
}

static int chain(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    tt_tensor *x = inputs.at[0];
    outputs[0] = tt_mul(tt_relu(tt_sub(tt_tanh(x), inputs.at[1])), tt_sigmoid(x));
    outputs[1] = tt_sum_dims(outputs[0], tt_shape(0), false);
    return 2;
}

static tt_compiled *replayed(tt_compile_function *function, void *user, bool full) {
    tt_compiled *compiled;
    CHECK(tt_compile(function, user, TUTTI_OPTIONS(tt_compile_options, .replay = true, .full = full), &compiled));
    return compiled;
}

enum {
    CALLS = 7
};

static void compare_calls(bool named) {
    tt_scope scope = tt_scope_open();
    void *stream = named ? tt_stream_new(TUTTI_CUDA) : NULL;
    CHECK(tt_stream_set(TUTTI_CUDA, stream));
    tt_compiled *fast = replayed(chain, NULL, true);
    tt_tensor *results[CALLS][2], *expected[CALLS][2];
    for (int i = 0; i < CALLS; i++) {
        tt_tensor *x = tt_randn(tt_shape(33, 20), TUTTI_F32, NULL), *y = tt_randn(tt_shape(20), TUTTI_F32, NULL);
        tt_tensor_list got = tt_compiled_call(fast, tt_tensors(x, y));
        CHECK_OK(tt_error_show());
        CHECK_EQ(got.count, 2u);
        results[i][0] = got.at[0];
        results[i][1] = got.at[1];
        chain(tt_tensors(x, y), expected[i], NULL);
    }
    for (int i = 0; i < CALLS; i++) /* each call has results of its own */
        CHECK(same_bits(results[i][0], expected[i][0]) && same_bits(results[i][1], expected[i][1]));
    CHECK_EQ(counts_of(fast).replays, CALLS - 2);
    tt_compiled_release(&fast);
    CHECK(same_bits(results[CALLS - 1][0], expected[CALLS - 1][0])); /* also when the function is gone */
    CHECK(tt_stream_set(TUTTI_CUDA, NULL));
    if (named)
        tt_stream_release(TUTTI_CUDA, stream);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_replayed_function_gives_every_call_results_of_its_own) {
    begin();
    compare_calls(true);
}

TEST(a_function_on_the_default_stream_is_replayed_too) {
    begin();
    compare_calls(false);
}

static int through_module(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_gelu(tt_module_call(user, inputs.at[0]));
    return 1;
}

TEST(a_replay_follows_parameters_that_change_and_that_move) {
    begin();
    tt_scope scope = tt_scope_open();
    tt_module *module = tt_linear_module(12, 8, true, TUTTI_F32);
    tt_compiled *fast = replayed(through_module, module, true);
    bool recording = tt_grad_mode(false);
    for (int i = 0; i < 9; i++) {
        tt_tensor *x = tt_randn(tt_shape(5, 12), TUTTI_F32, NULL), *expected[1];
        if (i == 4) /* in place */
            tt_mul_scalar_(tt_module_parameter(module, "weight"), 3);
        if (i == 6) /* elsewhere */
            tt_module_set_parameter(module, "weight", tt_parameter(tt_randn(tt_shape(8, 12), TUTTI_F32, NULL), true));
        tt_tensor_list got = tt_compiled_call(fast, tt_tensors(x));
        through_module(tt_tensors(x), expected, module);
        CHECK_OK(tt_error_show());
        if (!same_bits(got.at[0], expected[0]))
            FAIL("call %d differs", i);
    }
    tt_grad_mode(recording);
    CHECK_EQ(counts_of(fast).replays, 7);
    tt_compiled_release(&fast);
    tt_module_release(module);
    CHECK_OK(tt_scope_close(&scope));
}

static int dropped(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_dropout(tt_add_scalar(inputs.at[0], 1), 0.5);
    return 1;
}

TEST(what_depends_on_the_host_is_not_replayed_and_says_so) {
    begin();
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_randn(tt_shape(64), TUTTI_F32, NULL), *expected[1];
    tt_compiled *fast = replayed(dropped, NULL, true);
    tt_compiled_call(fast, tt_tensors(x));
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_CAPTURE);
    CHECK(strstr(tutti_error_message(), "random_state") != NULL);
    tt_error_clear();
    tt_compiled_release(&fast);
    fast = replayed(dropped, NULL, false);
    for (int i = 0; i < 5; i++) {
        tt_seed(3 + (uint64_t)i, 0);
        tt_tensor_list got = tt_compiled_call(fast, tt_tensors(x));
        tt_seed(3 + (uint64_t)i, 0);
        dropped(tt_tensors(x), expected, NULL);
        CHECK(same_bits(got.at[0], expected[0]));
    }
    CHECK_EQ(counts_of(fast).replays, 0);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(on_another_stream_a_replayed_function_runs_as_ever) {
    begin();
    tt_scope scope = tt_scope_open();
    tt_compiled *fast = replayed(chain, NULL, true);
    tt_tensor *x = tt_randn(tt_shape(9, 20), TUTTI_F32, NULL), *y = tt_randn(tt_shape(20), TUTTI_F32, NULL);
    tt_tensor *expected[2];
    for (int i = 0; i < 4; i++)
        tt_compiled_call(fast, tt_tensors(x, y));
    CHECK_EQ(counts_of(fast).replays, 2);
    CHECK(tt_synchronize(TUTTI_CUDA));
    void *stream = tt_stream_new(TUTTI_CUDA);
    CHECK(tt_stream_set(TUTTI_CUDA, stream));
    tt_tensor_list got = tt_compiled_call(fast, tt_tensors(x, y));
    chain(tt_tensors(x, y), expected, NULL);
    CHECK(same_bits(got.at[0], expected[0]));
    CHECK_EQ(counts_of(fast).replays, 2);
    tt_compiled_release(&fast);
    CHECK(tt_synchronize(TUTTI_CUDA) && tt_stream_set(TUTTI_CUDA, NULL));
    tt_stream_release(TUTTI_CUDA, stream);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(arguments_whose_elements_share_memory_are_replayed) {
    begin();
    tt_scope scope = tt_scope_open();
    tt_compiled *fast = replayed(chain, NULL, true);
    for (int i = 0; i < 10; i++) {
        tt_tensor *from = tt_randn(tt_shape(1, 100), TUTTI_F32, NULL), *expected[2];
        tt_tensor *x = i < 5 ? tt_expand(tt_narrow(from, 1, 7, 20), tt_shape(33, 20))
                             : tt_as_strided(from, tt_shape(8, 20), tt_shape(3, 1), 4 + i);
        tt_tensor *y = tt_expand(tt_randn(tt_shape(1), TUTTI_F32, NULL), tt_shape(20));
        tt_tensor_list got = tt_compiled_call(fast, tt_tensors(x, y));
        CHECK_OK(tt_error_show());
        chain(tt_tensors(x, y), expected, NULL);
        CHECK(same_bits(got.at[0], expected[0]) && same_bits(got.at[1], expected[1]));
    }
    CHECK_EQ(counts_of(fast).replays, 6);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

static int with_a_view(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_exp(inputs.at[0]);
    outputs[1] = tt_narrow(outputs[0], 0, 1, 2);
    outputs[2] = outputs[0];
    return 3;
}

TEST(results_that_share_memory_do_so_at_every_call) {
    begin();
    tt_scope scope = tt_scope_open();
    tt_compiled *fast = replayed(with_a_view, NULL, false);
    for (int i = 0; i < 5; i++) {
        tt_tensor_list got = tt_compiled_call(fast, tt_tensors(tt_randn(tt_shape(5, 4), TUTTI_F32, NULL)));
        CHECK_OK(tt_error_show());
        tt_zero_(got.at[0]);
        CHECK(same_bits(got.at[1], tt_zeros(tt_shape(2, 4), TUTTI_F32, NULL)));
        CHECK(got.at[2] == got.at[0]);
    }
    tt_compiled_release(&fast);
    fast = replayed(with_a_view, NULL, true);
    tt_compiled_call(fast, tt_tensors(tt_randn(tt_shape(5, 4), TUTTI_F32, NULL)));
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_CAPTURE);
    CHECK(strstr(tutti_error_message(), "share memory") != NULL);
    tt_error_clear();
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(where_calls_are_compared_none_is_replayed) {
    begin();
    setenv("TUTTI_COMPILE_COMPARE", "1", 1);
    tt_scope scope = tt_scope_open();
    tt_compiled *fast = replayed(chain, NULL, true);
    tt_tensor *x = tt_randn(tt_shape(9, 20), TUTTI_F32, NULL), *y = tt_randn(tt_shape(20), TUTTI_F32, NULL);
    for (int i = 0; i < 5; i++)
        tt_compiled_call(fast, tt_tensors(x, y));
    CHECK_OK(tt_error_show());
    CHECK_EQ(counts_of(fast).replays, 0);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}
