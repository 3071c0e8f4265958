/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimizers over modules, clipping of gradients, schedules.
 */
#include <cblas.h>
#include <math.h>

#include <tutti/dlpack.h>
#include <tutti/functional.h>
#include <tutti/optimizer.h>

#include "support.h"

static tt_module *net_of(tutti_dtype dtype) {
    tt_module *layers[] = { tt_linear_module(4, 6, true, dtype), tt_function_module("Tanh", tt_tanh),
                            tt_linear_module(6, 3, true, dtype) };
    return tt_sequential_module(3, layers);
}

static void backward(tt_module *net, tt_tensor *x) {
    tt_backward(tt_sum(tt_square(tt_module_call(net, x))), NULL);
}

static bool near(double value, double expected) {
    return fabs(value - expected) <= 1e-9 * fmax(1, fabs(expected));
}

/* ---- optimizers ---- */

/* The same steps with tt_adamw_step and tt_sgd_step on a copy of the parameters. */
TEST(an_optimizer_makes_the_steps_of_its_operators) {
    for (int kind = 0; kind < 3; kind++) {
        tt_scope scope = tt_scope_open();
        tt_seed(1, 0);
        tt_module *net = net_of(kind == 2 ? TUTTI_BF16 : TUTTI_F32);
        tt_sgd sgd = { sizeof sgd, .learning_rate = 0.05, .momentum = kind == 0 ? 0.9 : 0, .weight_decay = 0.1 };
        tt_adamw adamw = { sizeof adamw, .learning_rate = 0.02 };
        tt_optimizer *optimizer = kind < 2 ? tt_sgd_optimizer(net, &sgd) : tt_adamw_optimizer(net, &adamw);
        CHECK(optimizer != NULL);
        tt_named_list parameters = tt_module_parameters(net);
        tt_tensor *copies[4], *first[4], *second[4];
        CHECK_EQ(parameters.count, 4);
        for (int i = 0; i < 4; i++) {
            copies[i] = tt_detach(tt_clone(parameters.at[i]));
            first[i] = tt_zeros_like(copies[i]);
            second[i] = tt_zeros_like(copies[i]);
        }
        tt_tensor *x = tt_randn(tt_shape(5, 4), tt_dtype(copies[0]), NULL);
        for (int step = 1; step <= 4; step++) {
            backward(net, x);
            for (int i = 0; i < 4; i++)
                CHECK(kind < 2
                          ? tt_sgd_step(copies[i], tt_grad(parameters.at[i]), first[i], &sgd)
                          : tt_adamw_step(copies[i], tt_grad(parameters.at[i]), first[i], second[i], step, &adamw));
            CHECK(tt_optimizer_step(optimizer));
            tt_optimizer_zero_grad(optimizer);
            CHECK(tt_grad(parameters.at[0]) == NULL);
            CHECK_EQ(tt_item(tt_optimizer_steps(optimizer)), step);
            for (int i = 0; i < 4; i++)
                CHECK(tt_equal(tt_detach(parameters.at[i]), copies[i]));
        }
        tt_named_list state = tt_optimizer_state(optimizer);
        CHECK_EQ(state.count, kind == 0 ? 6 : kind == 1 ? 2 : 10);
        CHECK_TEXT(state.names[0], "step");
        CHECK_TEXT(state.names[1], "learning_rate.0");
        if (kind == 2)
            CHECK(tt_equal(tt_named(state, "v.2.weight"), second[2]));
        tt_optimizer_release(optimizer);
        tt_module_release(net);
        done(&scope);
    }
}

TEST(what_is_written_to_the_learning_rate_counts_from_the_next_step_on) {
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(TUTTI_F64);
    tt_optimizer *optimizer = tt_sgd_optimizer(net, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.5));
    tt_tensor *bias = tt_module_parameter(tt_module_child(net, "2"), "bias");
    tt_tensor *before = tt_clone(tt_detach(bias));
    backward(net, tt_ones(tt_shape(1, 4), TUTTI_F64, NULL));
    tt_fill_(tt_optimizer_learning_rate(optimizer, 0), 0.25);
    CHECK(tt_optimizer_step(optimizer));
    CHECK(tt_allclose(tt_detach(bias), tt_add_scaled(before, tt_grad(bias), -0.25), 1e-14, 1e-14));
    tt_optimizer_zero_grad(optimizer);
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    done(&scope);
}

TEST(groups_have_a_learning_rate_and_a_decay_of_their_own) {
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(TUTTI_F64);
    tt_optimizer *optimizer = tt_sgd_optimizer(net, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.5, .weight_decay = 0.1));
    tt_tensor *weight = tt_module_parameter(tt_module_child(net, "0"), "weight");
    tt_tensor *bias = tt_module_parameter(tt_module_child(net, "0"), "bias");
    CHECK_EQ(
        tt_optimizer_add_group(optimizer, tt_tensors(bias),
                               TUTTI_OPTIONS(tt_parameter_group, .learning_rate = 0.125, .weight_decay = TUTTI_ZERO)),
        1);
    CHECK_EQ(tt_optimizer_group_count(optimizer), 2);
    tt_tensor *weight_before = tt_clone(tt_detach(weight)), *bias_before = tt_clone(tt_detach(bias));
    tt_set_grad(weight, tt_ones_like(weight_before));
    tt_set_grad(bias, tt_ones_like(bias_before));
    CHECK(tt_optimizer_step(optimizer)); /* the other layer has no gradient and is left alone */
    CHECK(tt_allclose(tt_detach(weight), tt_add_scalar(tt_mul_scalar(weight_before, 0.95), -0.5), 1e-14, 1e-14));
    CHECK(tt_allclose(tt_detach(bias), tt_add_scalar(bias_before, -0.125), 1e-14, 1e-14));
    CHECK(tt_optimizer_learning_rate(optimizer, 2) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    CHECK_EQ(tt_optimizer_add_group(optimizer, tt_tensors(bias, weight_before), NULL), TUTTI_NONE);
    expect_error(TUTTI_ERROR_NOT_FOUND, "does not have the parameter");
    CHECK_EQ(tt_optimizer_group_count(optimizer), 2);
    tt_optimizer_zero_grad(optimizer);
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    done(&scope);
}

/* Layers of many sizes, large ones among them, each with a gradient. */
enum {
    LAYERS = 24
};
static tt_module *wide_net(void) {
    tt_module *layers[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        layers[i] = tt_linear_module(1 + 13 * i, i % 5 == 0 ? 301 : 1 + 3 * i, i % 2 == 0, TUTTI_F32);
    tt_module *net = tt_sequential_module(LAYERS, layers);
    tt_named_list parameters = tt_module_parameters(net);
    for (size_t i = 0; i < parameters.count; i++)
        tt_set_grad(parameters.at[i], tt_randn(tt_sizes(parameters.at[i]), TUTTI_F32, NULL));
    return net;
}

TEST(a_step_over_many_parameters_has_the_bits_of_single_steps_with_any_number_of_threads) {
    for (int threads = 1; threads <= 3; threads++) {
        openblas_set_num_threads(threads);
        tt_scope scope = tt_scope_open();
        tt_seed(5, 0);
        tt_module *net = wide_net();
        tt_optimizer *optimizer = tt_adamw_optimizer(net, NULL);
        tt_named_list parameters = tt_module_parameters(net);
        tt_tensor *copies[2 * LAYERS];
        for (size_t i = 0; i < parameters.count; i++) {
            copies[i] = tt_detach(tt_clone(parameters.at[i]));
            CHECK(tt_adamw_step(copies[i], tt_grad(parameters.at[i]), tt_zeros_like(copies[i]),
                                tt_zeros_like(copies[i]), 1, NULL));
        }
        CHECK(tt_optimizer_step(optimizer));
        for (size_t i = 0; i < parameters.count; i++)
            CHECK(tt_equal(copies[i], tt_detach(parameters.at[i])));
        tt_optimizer_zero_grad(optimizer);
        tt_optimizer_release(optimizer);
        tt_module_release(net);
        done(&scope);
    }
}

/* Two parameters of 256 x 256: 0 the same memory twice, 1 one the transpose of the other, 2 one the gradient of the
 * other, 3 the memory of one imported as the other. Returns a module of them. */
enum {
    SHARED_KINDS = 4
};
static tt_module *sharing_net(int kind, tt_tensor **a, tt_tensor **b) {
    tt_seed(6, 0);
    tt_tensor *base = tt_randn(tt_shape(256, 256), TUTTI_F32, NULL), *other = base;
    if (kind == 1)
        other = tt_transpose(base, 0, 1);
    else if (kind == 2)
        other = tt_randn(tt_shape(256, 256), TUTTI_F32, NULL);
    else if (kind == 3)
        other = tt_from_dlpack(tt_to_dlpack(base));
    *a = tt_require_grad(tt_detach(base), true);
    *b = tt_require_grad(tt_detach(other), true);
    tt_set_grad(*a, tt_randn(tt_shape(256, 256), TUTTI_F32, NULL));
    tt_set_grad(*b, kind == 2 ? tt_detach(*a) : tt_randn(tt_shape(256, 256), TUTTI_F32, NULL));
    tt_module *net = tt_function_module("Sharing", tt_relu);
    tt_module_set_parameter(net, "a", *a);
    tt_module_set_parameter(net, "b", *b);
    return net;
}

TEST(a_step_over_parameters_that_share_memory_is_that_of_single_steps_in_order) {
    for (int kind = 0; kind < SHARED_KINDS; kind++) {
        tt_scope scope = tt_scope_open();
        tt_sgd options = { sizeof options, .learning_rate = 0.5, .momentum = 0.9, .weight_decay = 0.1 };
        tt_tensor *a, *b, *single_a, *single_b;
        tt_module *net = sharing_net(kind, &a, &b), *single = sharing_net(kind, &single_a, &single_b);
        tt_optimizer *optimizer = tt_sgd_optimizer(net, &options);
        tt_tensor *velocity_a = tt_zeros_like(tt_detach(a)), *velocity_b = tt_zeros_like(tt_detach(a));
        bool recording = tt_grad_mode(false);
        for (int step = 0; step < 3; step++) {
            CHECK(tt_optimizer_step(optimizer));
            CHECK(tt_sgd_step(single_a, tt_grad(single_a), velocity_a, &options));
            CHECK(tt_sgd_step(single_b, tt_grad(single_b), velocity_b, &options));
        }
        tt_grad_mode(recording);
        CHECK(tt_equal(tt_detach(a), tt_detach(single_a)));
        CHECK(tt_equal(tt_detach(b), tt_detach(single_b)));
        tt_optimizer_release(optimizer);
        tt_module_release(net);
        tt_module_release(single);
        done(&scope);
    }
}

/* One step while the allocation of that number fails; whether it did. */
static bool step_without_memory(int kind, long number) {
    tt_scope scope = tt_scope_open();
    tt_sgd options = { sizeof options, .learning_rate = 0.5 };
    tt_tensor *a, *b, *single_a, *single_b;
    tt_module *net = sharing_net(kind, &a, &b), *single = sharing_net(kind, &single_a, &single_b);
    tt_optimizer *optimizer = tt_sgd_optimizer(net, &options);
    CHECK(tt_sgd_step(single_a, tt_grad(single_a), NULL, &options));
    CHECK(tt_sgd_step(single_b, tt_grad(single_b), NULL, &options));
    test_fail_arm("malloc,calloc,realloc", number);
    bool stepped = tt_optimizer_step(optimizer), failed = test_fail_disarm();
    if (stepped) {
        CHECK(tt_equal(tt_detach(a), tt_detach(single_a)) && tt_equal(tt_detach(b), tt_detach(single_b)));
    } else {
        CHECK(failed);
        CHECK_EQ(tt_error_show(), TUTTI_ERROR_MEMORY);
        tt_error_clear();
    }
    CHECK_EQ(tt_item(tt_optimizer_steps(optimizer)), stepped ? 1 : 0);
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    tt_module_release(single);
    done(&scope);
    return failed;
}

TEST(a_step_without_memory_for_its_lists_is_still_right) {
    for (int kind = 0; kind < SHARED_KINDS; kind++) {
        long number = 1;
        while (step_without_memory(kind, number))
            number++;
        CHECK(number > 2); /* both lists were asked for */
    }
}

TEST(a_step_that_fails_at_one_parameter_changes_none) {
    tt_scope scope = tt_scope_open();
    tt_module *net = wide_net();
    tt_optimizer *optimizer = tt_adamw_optimizer(net, NULL);
    tt_named_list parameters = tt_module_parameters(net), state = tt_optimizer_state(optimizer);
    tt_tensor *copies[2 * LAYERS];
    for (size_t i = 0; i < parameters.count; i++)
        copies[i] = tt_detach(tt_clone(parameters.at[i]));
    CHECK(tt_storage_resize(state.at[state.count - 1], 0)); /* the last parameter's */
    CHECK(!tt_optimizer_step(optimizer));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_FREED);
    tt_error_clear();
    for (size_t i = 0; i < parameters.count; i++)
        CHECK(tt_equal(copies[i], tt_detach(parameters.at[i])));
    tt_optimizer_zero_grad(optimizer);
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    done(&scope);
}

TEST(a_step_that_fails_is_not_counted) {
    for (int kind = 0; kind < 2; kind++) {
        tt_scope scope = tt_scope_open();
        tt_module *net = net_of(TUTTI_F64);
        tt_optimizer *optimizer = kind == 0 ? tt_sgd_optimizer(net, NULL) : tt_adamw_optimizer(net, NULL);
        tt_named_list parameters = tt_module_parameters(net);
        backward(net, tt_ones(tt_shape(1, 4), TUTTI_F64, NULL));
        CHECK(tt_optimizer_step(optimizer));
        uint32_t version = tt_version(parameters.at[0]);
        tt_tensor *last = parameters.at[parameters.count - 1];
        CHECK(tt_storage_resize(tt_grad(last), 0));
        CHECK(!tt_optimizer_step(optimizer));
        expect_error(TUTTI_ERROR_FREED, "argument gradient");
        CHECK_EQ(tt_item(tt_optimizer_steps(optimizer)), 1);
        CHECK_EQ(tt_version(parameters.at[0]), version);
        tt_set_grad(last, NULL);
        CHECK(tt_optimizer_step(optimizer));
        CHECK_EQ(tt_item(tt_optimizer_steps(optimizer)), 2);
        tt_optimizer_zero_grad(optimizer);
        tt_optimizer_release(optimizer);
        tt_module_release(net);
        done(&scope);
    }
}

TEST(freed_memory_is_found_before_a_parameter_changes_that_is_not_dense) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = tt_require_grad(tt_transpose(tt_randn(tt_shape(4, 3), TUTTI_F32, NULL), 0, 1), true);
    tt_tensor *b = tt_require_grad(tt_randn(tt_shape(4), TUTTI_BF16, NULL), true);
    tt_tensor *c = tt_require_grad(tt_randn(tt_shape(4), TUTTI_F32, NULL), true);
    tt_module *net = tt_function_module("Apart", tt_relu);
    tt_module_set_parameter(net, "a", a);
    tt_module_set_parameter(net, "b", b);
    tt_module_set_parameter(net, "c", c);
    tt_set_grad(a, tt_ones(tt_shape(3, 4), TUTTI_F32, NULL));
    tt_set_grad(b, tt_ones(tt_shape(4), TUTTI_BF16, NULL));
    tt_set_grad(c, tt_ones(tt_shape(4), TUTTI_F32, NULL));
    tt_tensor *a_before = tt_clone(tt_detach(a)), *b_before = tt_clone(tt_detach(b));
    tt_optimizer *optimizer = tt_sgd_optimizer(net, NULL);
    CHECK(tt_storage_resize(tt_grad(c), 0));
    CHECK(!tt_optimizer_step(optimizer));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_FREED);
    tt_error_clear();
    CHECK(tt_equal(tt_detach(a), a_before) && tt_equal(tt_detach(b), b_before));
    tt_set_grad(c, NULL);
    CHECK(tt_optimizer_step(optimizer));
    CHECK(!tt_equal(tt_detach(a), a_before) && !tt_equal(tt_detach(b), b_before));
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    done(&scope);
}

TEST(a_step_without_any_gradient_is_an_error_with_a_name) {
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(TUTTI_F32);
    tt_optimizer *optimizer = tt_adamw_optimizer(net, NULL);
    CHECK(!tt_optimizer_step(optimizer));
    expect_error(TUTTI_ERROR_STATE, "\"0.weight\"");
    CHECK_EQ(tt_item(tt_optimizer_steps(optimizer)), 0);
    CHECK(tt_adamw_optimizer(net, TUTTI_OPTIONS(tt_adamw, .beta1 = 1)) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    tt_module *empty = tt_sequential_module(0, NULL);
    CHECK(tt_sgd_optimizer(empty, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "no parameter that requires grad");
    CHECK(!tt_optimizer_step(NULL));
    tt_error_clear();
    tt_optimizer_release(NULL);
    tt_module_release(empty);
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    done(&scope);
}

static tutti_status make_one(void *argument) {
    tt_scope scope = tt_scope_open();
    tt_optimizer *optimizer = tt_adamw_optimizer(argument, NULL);
    tt_optimizer_add_group(optimizer, tt_tensors(tt_module_parameter(tt_module_child(argument, "0"), "bias")), NULL);
    tt_optimizer_release(optimizer);
    return tt_scope_close(&scope);
}

TEST(an_optimizer_that_cannot_be_made_leaves_nothing_behind) {
    tt_module *net = net_of(TUTTI_F32);
    test_fail_each("malloc,calloc,realloc,strdup", make_one, net);
    tt_module_release(net);
}

/* ---- clipping ---- */

static tt_tensor *leaf_with_grad(tt_tensor *grad) {
    tt_tensor *leaf = tt_parameter(tt_zeros_like(grad), true);
    tt_set_grad(leaf, grad);
    return leaf;
}

TEST(clipping_by_norm_scales_all_gradients_alike) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = leaf_with_grad(tt_full(tt_shape(1), 3, TUTTI_F32, NULL));
    tt_tensor *b = leaf_with_grad(tt_full(tt_shape(1, 1), 4, TUTTI_F16, NULL));
    tt_tensor *none = tt_parameter(tt_zeros(tt_shape(2), TUTTI_F32, NULL), true);
    tt_tensor *norm = tt_clip_grad_norm(tt_tensors(a, none, b), 10, NULL);
    CHECK(near(tt_item(norm), 5) && tt_dim_count(norm) == 0);
    CHECK(tt_item(tt_grad(a)) == 3 && tt_item(tt_grad(b)) == 4); /* below the limit: the same bits */
    CHECK(near(tt_item(tt_clip_grad_norm(tt_tensors(a, none, b), 1, NULL)), 5));
    CHECK(fabs(tt_item(tt_grad(a)) - 0.6) < 1e-5 && fabs(tt_item(tt_grad(b)) - 0.8) < 1e-3);
    CHECK(tt_grad(none) == NULL);
    CHECK_EQ(tt_item(tt_clip_grad_norm(tt_tensors(none), 1, NULL)), 0);
    tt_set_grad(a, tt_full(tt_shape(1), INFINITY, TUTTI_F32, NULL));
    CHECK(isinf(tt_item(tt_clip_grad_norm(tt_tensors(a, b), 1, NULL))));
    CHECK(tt_clip_grad_norm(tt_tensors(a), 0, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "must be above 0");
    done(&scope);
}

TEST(clipping_by_other_norms_scales_to_the_limit_of_that_norm) {
    static const double norms[] = { 1, 3, 0.5, INFINITY };
    tt_scope scope = tt_scope_open();
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++) {
        double p = norms[i], expected = isinf(p) ? 4 : pow(pow(3, p) + pow(4, p) + pow(2, p), 1 / p);
        tt_clip_options options = { sizeof options, .p = p };
        tt_tensor *a = leaf_with_grad(tt_from((double[]){ 3, 0 }, tt_shape(2), TUTTI_F64, NULL));
        tt_tensor *b = leaf_with_grad(tt_full(tt_shape(1, 1), -4, TUTTI_F16, NULL));
        tt_tensor *c = leaf_with_grad(tt_from((float[]){ 2, 0 }, tt_shape(2), TUTTI_F32, NULL));
        tt_tensor *nothing = leaf_with_grad(tt_zeros(tt_shape(0), TUTTI_F32, NULL));
        tt_tensor_list all = tt_tensors(a, nothing, b, c);
        CHECK(near(tt_item(tt_clip_grad_norm_by(all, 100, NULL, &options)), expected));
        CHECK(near(tt_item(tt_clip_grad_norm_by(all, 2, NULL, &options)), expected));
        CHECK(fabs(tt_item(tt_select(tt_grad(a), 0, 0)) - 6 / expected) < 1e-5);
        CHECK(fabs(tt_item(tt_clip_grad_norm_by(all, 2, NULL, &options)) - 2) < 1e-2); /* -4 is an f16 */
    }
    done(&scope);
}

TEST(a_norm_that_must_be_finite_and_is_not_leaves_the_gradients) {
    tt_scope scope = tt_scope_open();
    tt_clip_options options = { sizeof options, .finite = true };
    tt_tensor *a = leaf_with_grad(tt_full(tt_shape(1), 3, TUTTI_F32, NULL));
    tt_tensor *b = leaf_with_grad(tt_full(tt_shape(1), NAN, TUTTI_F32, NULL));
    CHECK(near(tt_item(tt_clip_grad_norm_by(tt_tensors(a), 4, NULL, &options)), 3));
    for (int i = 0; i < 2; i++, options.p = INFINITY) {
        CHECK(tt_clip_grad_norm_by(tt_tensors(a, b), 1, NULL, &options) == NULL);
        expect_error(TUTTI_ERROR_STATE, "the norm of all gradients is");
        CHECK(tt_item(tt_grad(a)) == 3);
    }
    options.p = -1;
    CHECK(tt_clip_grad_norm_by(tt_tensors(a), 1, NULL, &options) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "tt_clip_options.p is -1");
    done(&scope);
}

TEST(clipping_by_value_bounds_every_element) {
    tt_scope scope = tt_scope_open();
    tt_tensor *a = leaf_with_grad(tt_from((float[]){ -3, 0.5, 3 }, tt_shape(3), TUTTI_F32, NULL));
    CHECK(tt_clip_grad_value(tt_tensors(a), 1));
    CHECK(tt_equal(tt_grad(a), tt_from((float[]){ -1, 0.5, 1 }, tt_shape(3), TUTTI_F32, NULL)));
    CHECK(!tt_clip_grad_value(tt_tensors(a), NAN));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    done(&scope);
}

static void list_is_refused(bool done) {
    CHECK(!done);
    expect_error(TUTTI_ERROR_ARGUMENT, "the list of 2 parameters is NULL");
}

TEST(a_list_of_parameters_that_is_nowhere_is_refused) {
    tt_scope scope = tt_scope_open();
    tt_tensor_list nowhere = { 2, NULL };
    tt_module *net = net_of(TUTTI_F32);
    tt_optimizer *optimizer = tt_sgd_optimizer(net, NULL);
    list_is_refused(tt_clip_grad_norm(nowhere, 1, NULL) != NULL);
    list_is_refused(tt_clip_grad_value(nowhere, 1));
    list_is_refused(tt_optimizer_add_group(optimizer, nowhere, NULL) != TUTTI_NONE);
    CHECK_EQ(tt_item(tt_clip_grad_norm((tt_tensor_list){ 0, NULL }, 1, NULL)), 0);
    CHECK(tt_clip_grad_value((tt_tensor_list){ 0, NULL }, 1));
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    done(&scope);
}

TEST_WORLD(clipping_over_a_group_takes_the_norm_of_all_shards, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    int rank = tutti_group_rank(group);
    tt_tensor *shard = leaf_with_grad(tt_full(tt_shape(1), rank == 0 ? 3 : 4, TUTTI_F64, NULL));
    CHECK(near(tt_item(tt_clip_grad_norm(tt_tensors(shard), 1, group)), 5));
    CHECK(fabs(tt_item(tt_grad(shard)) - (rank == 0 ? 0.6 : 0.8)) < 1e-6);
    /* One rank has nothing, and still takes part. */
    if (rank == 1)
        tt_set_grad(shard, NULL);
    CHECK(fabs(tt_item(tt_clip_grad_norm(tt_tensors(shard), 1, group)) - 0.6) < 1e-6);
    shard = leaf_with_grad(tt_full(tt_shape(2), rank == 0 ? -3 : 4, TUTTI_F64, NULL));
    tt_clip_options options = { sizeof options, .p = INFINITY };
    CHECK_EQ(tt_item(tt_clip_grad_norm_by(tt_tensors(shard), 9, group, &options)), 4);
    options.p = 1;
    CHECK(near(tt_item(tt_clip_grad_norm_by(tt_tensors(shard), 9, group, &options)), 14));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- schedules ---- */

TEST(schedules_warm_up_and_fall_as_they_say) {
    tt_schedule cosine = { sizeof cosine, TT_SCHEDULE_COSINE, .warm_up = 4, .steps = 14, .last = 0.1 };
    CHECK(near(tt_schedule_factor(&cosine, 0), 0.25) && near(tt_schedule_factor(&cosine, 3), 1));
    CHECK(near(tt_schedule_factor(&cosine, 4), 1) && near(tt_schedule_factor(&cosine, 9), 0.55));
    CHECK(near(tt_schedule_factor(&cosine, 14), 0.1) && near(tt_schedule_factor(&cosine, 1000), 0.1));
    tt_schedule linear = { sizeof linear, TT_SCHEDULE_LINEAR, .steps = 10 };
    CHECK(near(tt_schedule_factor(&linear, 0), 1) && near(tt_schedule_factor(&linear, 5), 0.5));
    CHECK(near(tt_schedule_factor(&linear, 10), 0));
    tt_schedule step = { sizeof step, TT_SCHEDULE_STEP, .every = 3 };
    CHECK(near(tt_schedule_factor(&step, 2), 1) && near(tt_schedule_factor(&step, 3), 0.1));
    step.factor = 0.5;
    CHECK(near(tt_schedule_factor(&step, 8), 0.25));
    CHECK(near(tt_schedule_factor(NULL, 77), 1)); /* constant */
}

TEST(a_schedule_writes_the_rate_of_every_group) {
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(TUTTI_F32);
    tt_optimizer *optimizer = tt_adamw_optimizer(net, TUTTI_OPTIONS(tt_adamw, .learning_rate = 0.5));
    tt_tensor *bias = tt_module_parameter(tt_module_child(net, "0"), "bias");
    tt_optimizer_add_group(optimizer, tt_tensors(bias), TUTTI_OPTIONS(tt_parameter_group, .learning_rate = 0.25));
    tt_schedule schedule = { sizeof schedule, TT_SCHEDULE_LINEAR, .steps = 4 };
    for (int i = 0; i < 6; i++) {
        CHECK(tt_schedule_apply(&schedule, optimizer));
        double left = i < 4 ? 1 - i / 4.0 : 0;
        CHECK(near(tt_item(tt_optimizer_learning_rate(optimizer, 0)), 0.5 * left));
        CHECK(near(tt_item(tt_optimizer_learning_rate(optimizer, 1)), 0.25 * left));
        backward(net, tt_ones(tt_shape(1, 4), TUTTI_F32, NULL));
        CHECK(tt_optimizer_step(optimizer));
    }
    tt_optimizer_zero_grad(optimizer);
    tt_optimizer_release(optimizer);
    tt_module_release(net);
    done(&scope);
}

static void refused(const tt_schedule *schedule, const char *message) {
    CHECK(isnan(tt_schedule_factor(schedule, 0)));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE(message);
    tt_error_clear();
}

TEST(a_schedule_that_cannot_be_is_refused) {
    refused(TUTTI_OPTIONS(tt_schedule, .kind = TT_SCHEDULE_COSINE), "tt_schedule.steps is 0");
    refused(TUTTI_OPTIONS(tt_schedule, .kind = TT_SCHEDULE_LINEAR, .steps = 5, .warm_up = 5), "more than the 5 steps");
    refused(TUTTI_OPTIONS(tt_schedule, .kind = TT_SCHEDULE_STEP), "tt_schedule.every is 0");
    refused(TUTTI_OPTIONS(tt_schedule, .kind = (tt_schedule_kind)9), "none of the kinds");
    refused(TUTTI_OPTIONS(tt_schedule, .warm_up = -1), "must not be negative");
    refused(TUTTI_OPTIONS(tt_schedule, .last = NAN), "must be finite");
    CHECK(isnan(tt_schedule_factor(NULL, -1)));
    tt_error_clear();
}
