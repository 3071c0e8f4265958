/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules: each parameter once, buffers, the training flag, attention, and messages that say where in the tree
 * something went wrong.
 */
#include <tutti/module.h>
#include <tutti/ops.h>

#include "support.h"

static tt_module *linear(int64_t in, int64_t out) {
    return tt_linear_module(in, out, true, TUTTI_F32);
}

/* A net of two layers in a block: "block.0" and "block.1". */
static tt_module *net_of(int64_t in, int64_t middle, int64_t out) {
    tt_module *layers[] = { linear(in, middle), linear(middle, out) };
    tt_module *block[] = { tt_sequential_module(2, layers) };
    return tt_sequential_module(1, block);
}

TEST(a_shared_parameter_is_listed_once) {
    tt_scope scope = tt_scope_open();
    tt_module *first = linear(4, 4), *second = linear(4, 4);
    CHECK(tt_module_set_parameter(second, "weight", tt_module_parameter(first, "weight")));
    tt_module *layers[] = { first, second }, *net = tt_sequential_module(2, layers);
    tt_named_list parameters = tt_module_parameters(net);
    CHECK_EQ(parameters.count, 3);
    CHECK_TEXT(parameters.names[0], "0.weight");
    CHECK_TEXT(parameters.names[1], "0.bias");
    CHECK_TEXT(parameters.names[2], "1.bias");
    tt_module_release(net);
    done(&scope);
}

TEST(two_children_of_one_name_are_refused) {
    tt_scope scope = tt_scope_open();
    tt_module *net = tt_sequential_module(0, NULL);
    CHECK(tt_module_add_child(net, "head", linear(2, 2)));
    CHECK(!tt_module_add_child(net, "head", linear(2, 2)));
    expect_error(TUTTI_ERROR_EXISTS, "\"head\"");
    tt_module *head = tt_module_child(net, "head");
    CHECK(!tt_module_add_child(head, "weight", linear(2, 2))); /* the name of a parameter */
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_EXISTS);
    tt_error_clear();
    CHECK(!tt_module_add_child(head, "up", tt_module_keep(net))); /* a circle */
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    tt_module_release(net);
    done(&scope);
}

TEST(an_error_in_a_forward_names_the_module_and_the_parameter) {
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(4, 3, 2);
    tt_module *last = tt_module_child(tt_module_child(net, "0"), "1");
    CHECK(tt_module_set_parameter(last, "weight", tt_ones(tt_shape(2, 7), TUTTI_F32, NULL)));
    CHECK(tt_module_call(net, tt_ones(tt_shape(1, 4), TUTTI_F32, NULL)) == NULL);
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("\"0.1.weight\" f32 [2, 7]");
    CHECK_MESSAGE("in module \"0.1\" (Linear)");
    tt_module_release(net);
}

TEST(an_error_in_a_backward_names_the_module) {
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(4, 3, 2);
    tt_tensor *loss = tt_sum(tt_module_call(net, tt_ones(tt_shape(1, 4), TUTTI_F32, NULL)));
    bool recording = tt_grad_mode(false);
    tt_fill_(tt_module_parameter(tt_module_child(tt_module_child(net, "0"), "1"), "weight"), 0);
    tt_grad_mode(recording);
    CHECK(!tt_backward(loss, NULL));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_VERSION);
    CHECK_MESSAGE("\"0.1.weight\"");
    CHECK_MESSAGE("of module \"0.1\" (Linear)");
    tt_module_release(net);
}

TEST(a_step_without_a_gradient_names_the_parameter) {
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(2, 2, 2);
    tt_named_list parameters = tt_module_parameters(net);
    CHECK(!tt_sgd_step(parameters.at[2], tt_grad(parameters.at[2]), NULL, NULL));
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("\"0.1.weight\"");
    CHECK_MESSAGE("no backward has reached it");
    tt_module_release(net);
}

TEST(a_name_that_the_user_gave_stays) {
    tt_scope scope = tt_scope_open();
    tt_module *layer = linear(2, 2);
    tt_tensor *weight = tt_parameter(tt_ones(tt_shape(2, 2), TUTTI_F32, NULL), true);
    tt_set_name(weight, "tied");
    CHECK(tt_module_set_parameter(layer, "weight", weight));
    tt_module *layers[] = { layer }, *net = tt_sequential_module(1, layers);
    CHECK_TEXT(tt_name(weight), "tied");
    CHECK_TEXT(tt_name(tt_module_parameter(layer, "bias")), "0.bias");
    tt_module_release(net);
    done(&scope);
}

TEST(buffers_are_listed_apart_from_parameters) {
    tt_scope scope = tt_scope_open();
    tt_module *layer = linear(2, 2);
    CHECK(tt_module_set_buffer(layer, "mean", tt_zeros(tt_shape(2), TUTTI_F32, NULL)));
    CHECK(tt_module_set_buffer(layer, "empty", NULL));
    tt_module *layers[] = { layer }, *net = tt_sequential_module(1, layers);
    tt_named_list buffers = tt_module_buffers(net);
    CHECK_EQ(buffers.count, 1);
    CHECK_TEXT(buffers.names[0], "0.mean");
    CHECK_TEXT(tt_name(buffers.at[0]), "0.mean");
    CHECK_EQ(tt_module_parameters(net).count, 2);
    CHECK(tt_module_buffer(layer, "empty") == NULL);
    CHECK_EQ(tt_error_pending(), TUTTI_OK);
    CHECK(tt_module_buffer(layer, "weight") == NULL); /* that is a parameter */
    expect_error(TUTTI_ERROR_NOT_FOUND, "no buffer \"weight\"");
    tt_module_release(net);
    done(&scope);
}

TEST(a_name_has_one_use_in_a_module) {
    tt_scope scope = tt_scope_open();
    tt_module *layer = linear(2, 2);
    tt_tensor *x = tt_zeros(tt_shape(2), TUTTI_F32, NULL);
    CHECK(tt_module_set_buffer(layer, "mean", x));
    CHECK(tt_module_add_child(layer, "inner", linear(2, 2)));
    CHECK(!tt_module_set_buffer(layer, "bias", x));
    expect_error(TUTTI_ERROR_EXISTS, "has a parameter \"bias\" already");
    CHECK(!tt_module_set_parameter(layer, "mean", x));
    expect_error(TUTTI_ERROR_EXISTS, "has a buffer \"mean\" already");
    CHECK(!tt_module_set_buffer(layer, "inner", x));
    expect_error(TUTTI_ERROR_EXISTS, "has a child \"inner\" already");
    CHECK(!tt_module_add_child(layer, "mean", linear(2, 2)));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_EXISTS);
    tt_error_clear();
    tt_module_release(layer);
    done(&scope);
}

TEST(dropout_obeys_the_training_flag_of_the_tree) {
    tt_scope scope = tt_scope_open();
    tt_seed(5, 0);
    tt_module *inner[] = { tt_dropout_module(0.5) };
    tt_module *layers[] = { tt_sequential_module(1, inner) }, *net = tt_sequential_module(1, layers);
    tt_module *dropout = tt_module_child(tt_module_child(net, "0"), "0");
    tt_tensor *x = tt_require_grad(tt_ones(tt_shape(1000), TUTTI_F32, NULL), true);
    CHECK(tt_module_training(net) && tt_module_training(dropout));
    tt_tensor *y = tt_module_call(net, x);
    double kept = tt_item(tt_sum(tt_to(tt_gt(y, tt_number(0)), TUTTI_F32)));
    CHECK(kept > 400 && kept < 600);
    CHECK(tt_item(tt_amax(y, TT_ALL_DIMS, false)) == 2);
    CHECK(tt_backward(tt_sum(y), NULL));
    CHECK(tt_equal(tt_grad(x), tt_detach(y))); /* the same mask */
    CHECK(tt_module_set_training(net, false));
    CHECK(!tt_module_training(net) && !tt_module_training(dropout));
    CHECK(tt_equal(tt_module_call(net, x), x));
    CHECK(tt_module_set_training(net, true));
    CHECK(!tt_equal(tt_module_call(net, x), x));
    CHECK(tt_dropout_module(1) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "must be in [0, 1)");
    CHECK(!tt_module_set_training(NULL, true));
    tt_error_clear();
    tt_module_release(net);
    done(&scope);
}

TEST(the_rms_norm_module_is_the_operator_with_a_weight) {
    tt_scope scope = tt_scope_open();
    tt_module *norm = tt_rms_norm_module(4, 1e-5, TUTTI_F32);
    tt_tensor *x = tt_randn(tt_shape(3, 4), TUTTI_F32, NULL);
    CHECK(tt_equal(tt_module_call(norm, x), tt_rms_norm(x, tt_module_parameter(norm, "weight"), 1e-5)));
    CHECK_EQ(tt_module_parameters(norm).count, 1);
    tt_module_release(norm);
    done(&scope);
}

TEST(the_embedding_module_looks_up_rows_and_trains_those_it_used) {
    tt_scope scope = tt_scope_open();
    tt_module *words = tt_embedding_module(6, 3, TUTTI_F32);
    tt_tensor *weight = tt_module_parameter(words, "weight");
    CHECK_EQ(tt_module_parameters(words).count, 1);
    CHECK(tt_size(weight, 0) == 6 && tt_size(weight, 1) == 3 && tt_requires_grad(weight));
    int64_t at[4] = { 5, 1, 5, 0 };
    tt_tensor *index = tt_from(at, tt_shape(2, 2), TUTTI_I64, NULL), *rows = tt_module_call(words, index);
    CHECK(tt_dim_count(rows) == 3 && tt_numel(rows) == 2 * 2 * 3);
    for (int i = 0; i < 4; i++)
        CHECK(tt_equal(tt_select(tt_select(rows, 0, i / 2), 0, i % 2), tt_select(weight, 0, at[i])));
    CHECK(tt_backward(tt_sum(rows), NULL));
    static const float used[6] = { 1, 1, 0, 0, 0, 2 };
    tt_tensor *expected = tt_expand(tt_from(used, tt_shape(6, 1), TUTTI_F32, NULL), tt_shape(6, 3));
    CHECK(tt_equal(tt_grad(weight), expected));
    tt_module_zero_grad(words);
    CHECK(tt_grad(weight) == NULL);

    /* A word that is not in the table is an error with the module's name, and nothing is read. */
    int64_t beyond[1] = { 6 };
    tt_tensor *none = tt_module_call(words, tt_from(beyond, tt_shape(1), TUTTI_I64, NULL));
    if (test_device() == TUTTI_CPU) {
        CHECK(none == NULL);
        CHECK_MESSAGE("Embedding");
    } else { /* found by the kernel, and told by the next wait */
        CHECK(none != NULL && !tt_synchronize(test_device()));
        CHECK_MESSAGE("embedding: index 6");
    }
    CHECK_MESSAGE("6");
    tt_error_clear();
    tt_module_release(words);
    done(&scope);
}

static tt_tensor *twice(tt_tensor *x) {
    return tt_mul_scalar(x, 2);
}
static tt_tensor *plus_one(tt_tensor *x) {
    return tt_add_scalar(x, 1);
}

TEST(a_sequence_applies_its_modules_in_order_and_numbers_them) {
    tt_scope scope = tt_scope_open();
    tt_module *inner[] = { tt_function_module("twice", twice), tt_linear_module(2, 2, false, TUTTI_F32) };
    tt_module *outer[] = { tt_function_module("plus one", plus_one), tt_sequential_module(2, inner),
                           tt_rms_norm_module(2, 1e-5, TUTTI_F32) };
    tt_module *net = tt_sequential_module(3, outer);
    tt_named_list named = tt_module_parameters(net);
    CHECK_EQ(named.count, 2);
    CHECK_TEXT(named.names[0], "1.1.weight");
    CHECK_TEXT(named.names[1], "2.weight");
    CHECK(tt_module_child(net, "1") == outer[1] && tt_module_child(outer[1], "0") == inner[0]);
    tt_tensor *x = tt_from((float[]){ 3, -1 }, tt_shape(1, 2), TUTTI_F32, NULL);
    tt_tensor *expected = tt_rms_norm(tt_linear(twice(plus_one(x)), named.at[0], NULL), named.at[1], 1e-5);
    CHECK(tt_equal(tt_module_call(net, x), expected));
    CHECK(tt_backward(tt_sum(tt_module_call(net, x)), NULL) && tt_grad(named.at[0]) != NULL);
    tt_module_release(net);
    done(&scope);
}

TEST(a_sequence_of_nothing_gives_its_input_and_a_missing_module_is_an_error) {
    tt_scope scope = tt_scope_open();
    tt_module *empty = tt_sequential_module(0, NULL);
    tt_tensor *x = tt_ones(tt_shape(2), TUTTI_F32, NULL);
    CHECK(tt_equal(tt_module_call(empty, x), x) && tt_module_parameters(empty).count == 0);
    tt_module_release(empty);
    tt_module *some[] = { tt_function_module("twice", twice), NULL };
    CHECK(tt_sequential_module(2, some) == NULL && tt_error_show() != TUTTI_OK);
    tt_error_clear();
    CHECK(tt_function_module("nothing", NULL) == NULL && tt_error_show() != TUTTI_OK);
    tt_error_clear();
    done(&scope);
}

/* What a position may see of others, found by changing the last one. */
static bool first_depends_on_last(tt_module *attention, tt_tensor *x) {
    tt_tensor *other = tt_clone(x);
    tt_fill_(tt_select(other, 1, -1), 3);
    tt_tensor *first = tt_select(tt_module_call(attention, x), 1, 0);
    return !tt_equal(first, tt_select(tt_module_call(attention, other), 1, 0));
}

TEST(the_attention_module_splits_heads_and_hides_what_comes_later) {
    tt_scope scope = tt_scope_open();
    tt_seed(3, 0);
    tt_module *causal = tt_attention_module(
        8, TUTTI_OPTIONS(tt_attention_options, .heads = 2, .bias = true, .rope_base = 10000, .dropout = 0.5));
    tt_module *open = tt_attention_module(8, TUTTI_OPTIONS(tt_attention_options, .heads = 4, .sees_all = true));
    CHECK(tt_module_set_training(causal, false));
    tt_tensor *x = tt_randn(tt_shape(3, 5, 8), TUTTI_F32, NULL);
    CHECK(!first_depends_on_last(causal, x));
    CHECK(first_depends_on_last(open, x));

    /* By hand, head by head. */
    tt_named_list weights = tt_module_parameters(causal);
    CHECK_EQ(weights.count, 4);
    CHECK_TEXT(weights.names[0], "qkv.weight");
    tt_tensor *qkv = tt_linear(x, weights.at[0], weights.at[1]), *heads[2];
    tt_tensor *position = tt_arange(0, 5, 1, TUTTI_I64, NULL);
    for (int i = 0; i < 2; i++)
        heads[i] = tt_attention(tt_rope(tt_narrow(qkv, 2, 4 * i, 4), position, 10000),
                                tt_rope(tt_narrow(qkv, 2, 8 + 4 * i, 4), position, 10000),
                                tt_narrow(qkv, 2, 16 + 4 * i, 4), true, 0);
    tt_tensor *expected = tt_linear(tt_cat(tt_tensors_of(2, heads), 2), weights.at[2], weights.at[3]);
    CHECK(tt_allclose(tt_module_call(causal, x), expected, 1e-5, 1e-6));
    tt_module_set_training(causal, true);
    CHECK(!tt_allclose(tt_module_call(causal, x), expected, 1e-5, 1e-6)); /* its dropout works */
    CHECK(tt_backward(tt_sum(tt_module_call(causal, x)), NULL));
    CHECK(tt_grad(weights.at[0]) != NULL && tt_grad(weights.at[3]) != NULL);
    tt_module_zero_grad(causal);
    tt_module_release(causal);
    tt_module_release(open);
    done(&scope);
}

TEST(an_attention_module_refuses_what_cannot_be) {
    tt_scope scope = tt_scope_open();
    CHECK(tt_attention_module(8, TUTTI_OPTIONS(tt_attention_options, .heads = 3)) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "3 heads do not divide the width 8");
    CHECK(tt_attention_module(6, TUTTI_OPTIONS(tt_attention_options, .heads = 2, .rope_base = 10000)) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    CHECK(tt_attention_module(6, TUTTI_OPTIONS(tt_attention_options, .dropout = 2)) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    tt_module *attention = tt_attention_module(4, NULL);
    CHECK(tt_module_call(attention, tt_ones(tt_shape(4), TUTTI_F32, NULL)) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "in module Attention");
    tt_module_release(attention);
    done(&scope);
}
