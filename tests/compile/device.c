/* SPDX-License-Identifier: Apache-2.0
 *
 * Compiled functions on the device that TEST_DEVICE names: what only a device has, streams and replays as a graph.
 */
#include "quick.h"

#include <tutti/module.h>
#include <tutti/optimizer.h>
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
    outputs[1] = tt_randn(tt_shape(5), TUTTI_F32, NULL);
    return 2;
}

TEST(random_numbers_of_a_replay_are_those_of_calls) {
    begin();
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_randn(tt_shape(64), TUTTI_F32, NULL), *expected[7][2];
    tt_compiled *fast = replayed(dropped, NULL, true);
    tt_seed(3, 0);
    for (int i = 0; i < 7; i++)
        dropped(tt_tensors(x), expected[i], NULL);
    tt_seed(3, 0);
    for (int i = 0; i < 7; i++) {
        tt_tensor_list got = tt_compiled_call(fast, tt_tensors(x));
        CHECK_OK(tt_error_show());
        CHECK(same_bits(got.at[0], expected[i][0]) && same_bits(got.at[1], expected[i][1]));
    }
    CHECK_EQ(counts_of(fast).replays, 5);
    tt_compiled_release(&fast);
    CHECK_OK(tt_scope_close(&scope));
}

static int shrinks(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    (void)user;
    outputs[0] = tt_sin(inputs.at[0]);
    tt_tensor *inner = tt_cos(inputs.at[0]);
    tt_storage_resize(inner, 0);
    return 1;
}

TEST(what_changes_what_others_have_is_not_replayed_and_says_so) {
    begin();
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_randn(tt_shape(64), TUTTI_F32, NULL), *expected[1];
    tt_compiled *fast = replayed(shrinks, NULL, true);
    tt_compiled_call(fast, tt_tensors(x));
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_CAPTURE);
    CHECK(strstr(tutti_error_message(), "storage_resize depends on the host") != NULL);
    tt_error_clear();
    tt_compiled_release(&fast);
    fast = replayed(shrinks, NULL, false);
    for (int i = 0; i < 5; i++) {
        tt_tensor_list got = tt_compiled_call(fast, tt_tensors(x));
        shrinks(tt_tensors(x), expected, NULL);
        CHECK(same_bits(got.at[0], expected[0]));
    }
    CHECK_EQ(counts_of(fast).replays, 0);
    tt_compiled_release(&fast);
    tt_compiled *trained = replayed(chain, NULL, true); /* results that require grad */
    tt_compiled_call(trained, tt_tensors(tt_require_grad(tt_randn(tt_shape(9, 20), TUTTI_F32, NULL), true), x));
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_ARGUMENT); /* x is of another shape */
    tt_error_clear();
    tt_compiled_call(trained, tt_tensors(tt_require_grad(tt_randn(tt_shape(9, 20), TUTTI_F32, NULL), true),
                                         tt_randn(tt_shape(20), TUTTI_F32, NULL)));
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_CAPTURE);
    CHECK(strstr(tutti_error_message(), "its results require grad") != NULL);
    tt_error_clear();
    tt_compiled_release(&trained);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- whole steps ---- */

typedef struct trained {
    tt_module *module;
    tt_optimizer *optimizer;
    tutti_group *group; /* whose gradients are averaged; NULL: nobody's */
    bool keeps;         /* gradients stay */
} trained;

static int step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    const trained *one = user;
    tt_tensor *loss = tt_mean(tt_square(tt_dropout(tt_module_call(one->module, inputs.at[0]), 0.25)));
    tt_backward(loss, NULL);
    tt_tensor *weight = tt_module_parameter(one->module, "weight");
    if (one->group != NULL)
        tt_set_grad(weight, tt_wait(tt_all_reduce(tt_grad(weight), TUTTI_AVG, one->group)));
    if (one->optimizer != NULL)
        tt_optimizer_step(one->optimizer);
    if (!one->keeps)
        tt_optimizer_zero_grad(one->optimizer);
    outputs[0] = tt_detach(loss);
    return 1;
}

static trained new_trained(tutti_group *group) {
    tt_seed(6, 0);
    tt_module *module = tt_linear_module(10, 7, true, TUTTI_F32);
    return (trained){ module, tt_adamw_optimizer(module, TUTTI_OPTIONS(tt_adamw, .learning_rate = 0.02)), group,
                      false };
}

static void end_trained(trained one) {
    tt_optimizer_release(one.optimizer);
    tt_module_release(one.module);
}

static void compare_steps(tutti_group *group) {
    trained called = new_trained(group), again = new_trained(group);
    tt_compiled *fast = replayed(step, &again, true);
    tt_tensor *x[CALLS], *losses[CALLS][1];
    int rank = group != NULL ? tutti_group_rank(group) : 0;
    for (int i = 0; i < CALLS; i++)
        x[i] = tt_add_scalar(tt_randn(tt_shape(5, 10), TUTTI_F32, NULL), rank);
    tt_seed(8, rank);
    for (int i = 0; i < CALLS; i++) {
        tt_fill_(tt_optimizer_learning_rate(called.optimizer, 0), 0.02 / (i + 1));
        step(tt_tensors(x[i]), losses[i], &called);
    }
    tt_seed(8, rank);
    for (int i = 0; i < CALLS; i++) {
        tt_fill_(tt_optimizer_learning_rate(again.optimizer, 0), 0.02 / (i + 1));
        if (group != NULL) { /* ranks that are threads launch together */
            CHECK(tt_synchronize(TUTTI_CUDA));
            CHECK_OK(tutti_barrier(group, NULL));
        }
        tt_tensor_list got = tt_compiled_call(fast, tt_tensors(x[i]));
        CHECK_OK(tt_error_show());
        if (!same_bits(got.at[0], losses[i][0]))
            FAIL("the loss of call %d differs", i);
        CHECK(tt_grad(tt_module_parameter(again.module, "weight")) == NULL);
    }
    CHECK(tt_item(tt_optimizer_steps(again.optimizer)) == CALLS);
    CHECK(same_bits(tt_module_parameter(called.module, "weight"), tt_module_parameter(again.module, "weight")));
    CHECK(same_bits(tt_module_parameter(called.module, "bias"), tt_module_parameter(again.module, "bias")));
    CHECK_EQ(counts_of(fast).replays, CALLS - 2);
    tt_compiled_release(&fast);
    end_trained(called);
    end_trained(again);
}

TEST(a_whole_step_with_an_optimizer_and_dropout_is_replayed_with_the_bits_of_calls) {
    begin();
    tt_scope scope = tt_scope_open();
    compare_steps(NULL);
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD(a_whole_step_with_a_collective_is_replayed_on_all_ranks, 2) {
    if (!use_device())
        return; /* replays are of GPUs */
    tt_scope scope = tt_scope_open();
    void *stream = tt_stream_new(TUTTI_CUDA);
    CHECK(tt_stream_set(TUTTI_CUDA, stream));
    compare_steps(tutti_world_group(world));
    CHECK(tt_synchronize(TUTTI_CUDA));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    CHECK(tt_stream_set(TUTTI_CUDA, NULL));
    tt_stream_release(TUTTI_CUDA, stream);
}

TEST(gradients_that_a_replay_leaves_and_adds_to_are_those_of_calls) {
    begin();
    tt_scope scope = tt_scope_open();
    trained called = new_trained(NULL), again = new_trained(NULL);
    tt_optimizer *optimizers[] = { called.optimizer, again.optimizer };
    called.keeps = again.keeps = true;
    called.optimizer = again.optimizer = NULL;
    tt_compiled *fast = replayed(step, &again, true);
    tt_tensor *before = NULL;
    for (int i = 0; i < 12; i++) {
        tt_tensor *x = tt_randn(tt_shape(5, 10), TUTTI_F32, NULL), *loss[1];
        for (int k = 0; k < 2 && i % 6 == 0; k++) /* anew, then to what is there */
            tt_optimizer_zero_grad(optimizers[k]);
        tt_seed(20 + (uint64_t)i, 0);
        step(tt_tensors(x), loss, &called);
        tt_seed(20 + (uint64_t)i, 0);
        tt_tensor_list got = tt_compiled_call(fast, tt_tensors(x));
        CHECK_OK(tt_error_show());
        CHECK(same_bits(got.at[0], loss[0]));
        tt_tensor *weight = tt_module_parameter(called.module, "weight"),
                  *other = tt_module_parameter(again.module, "weight");
        if (!same_bits(tt_grad(weight), tt_grad(other)))
            FAIL("the gradient of call %d differs", i);
        CHECK(before == NULL || i % 6 != 0 || tt_grad(other) != before);
        before = tt_grad(other);
    }
    CHECK(counts_of(fast).replays > 0);
    tt_compiled_release(&fast);
    called.optimizer = optimizers[0], again.optimizer = optimizers[1];
    end_trained(called);
    end_trained(again);
    CHECK_OK(tt_scope_close(&scope));
}

static int counts_up(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tt_add_(inputs.at[0], inputs.at[1]);
    tt_add_scalar_(user, 1);
    outputs[0] = tt_mul(inputs.at[0], user);
    return 1;
}

TEST(what_a_replay_writes_into_arguments_and_others_is_there) {
    begin();
    tt_scope scope = tt_scope_open();
    tt_tensor *mine = tt_zeros(tt_shape(4), TUTTI_F32, NULL), *twin = tt_zeros(tt_shape(4), TUTTI_F32, NULL);
    tt_compiled *fast = replayed(counts_up, mine, true);
    for (int i = 0; i < 7; i++) {
        tt_tensor *x = tt_randn(tt_shape(4), TUTTI_F32, NULL), *y = tt_clone(x),
                  *one = tt_ones(tt_shape(4), TUTTI_F32, NULL);
        tt_tensor *expected[1];
        uint32_t version = tt_version(x), of_mine = tt_version(mine);
        tt_tensor_list got = tt_compiled_call(fast, tt_tensors(x, one));
        counts_up(tt_tensors(y, one), expected, twin);
        CHECK_OK(tt_error_show());
        CHECK(same_bits(got.at[0], expected[0]) && same_bits(x, y) && same_bits(mine, twin));
        CHECK(tt_version(x) > version && tt_version(mine) > of_mine);
    }
    CHECK_EQ(counts_of(fast).replays, 5);
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
