/* SPDX-License-Identifier: Apache-2.0
 *
 * Second derivatives of the operators whose backward is one kernel, against finite differences of the first in f64.
 */
#include <math.h>
#include <stdio.h>

#include <tutti/autograd.h>
#include <tutti/ops.h>

#include "../harness.h"

static const tt_tensor_list none = { 0, NULL };

enum {
    MOST_INPUTS = 3
};

/* A loss of up to three tensors. */
typedef tt_tensor *loss_of(tt_tensor *const *inputs);

/* Weights that differ everywhere, so that no sum hides an error. */
static tt_tensor *weighed(tt_tensor *x) {
    int64_t count = tt_numel(x);
    tt_tensor *weights = tt_sin(tt_arange(1, (double)count + 1, 1, TUTTI_F64, NULL));
    return tt_sum(tt_mul(tt_reshape(x, tt_shape(-1)), weights));
}

/* The sum over all inputs of their weighed gradients: a number that depends on the inputs again. */
static tt_tensor *slope_of(loss_of *loss, int count, tt_tensor *const *inputs, bool create_graph) {
    tt_tensor *value = loss(inputs), *sum = NULL;
    tt_tensor_list grads = tt_gradients(tt_tensors(value), tt_tensors_of((size_t)count, inputs), none,
                                        TUTTI_OPTIONS(tt_backward_options, .create_graph = create_graph));
    for (size_t i = 0; i < grads.count; i++)
        sum = sum == NULL ? weighed(grads.at[i]) : tt_add(sum, weighed(grads.at[i]));
    return sum;
}

static double slope_moved(loss_of *loss, int count, tt_tensor *const *inputs, int which, int64_t element, double by) {
    tt_scope scope = tt_scope_open();
    tt_tensor *moved[MOST_INPUTS];
    for (int i = 0; i < count; i++) {
        moved[i] = tt_clone(tt_detach(inputs[i]));
        if (i == which) {
            double *data = tt_data_mut(moved[i]);
            data[element] += by;
        }
        tt_require_grad(moved[i], true);
    }
    double value = tt_item(slope_of(loss, count, moved, false));
    CHECK_OK(tt_scope_close(&scope));
    return value;
}

static void check(loss_of *loss, int count, tt_tensor *const *inputs) {
    const double step = 1e-5;
    tt_tensor *slope = slope_of(loss, count, inputs, true);
    CHECK(slope != NULL && tt_requires_grad(slope));
    tt_tensor_list second = tt_gradients(tt_tensors(slope), tt_tensors_of((size_t)count, inputs), none, NULL);
    CHECK_EQ(second.count, count);
    for (int i = 0; i < (int)second.count; i++)
        for (int64_t k = 0; k < tt_numel(inputs[i]); k++) {
            double expected =
                (slope_moved(loss, count, inputs, i, k, step) - slope_moved(loss, count, inputs, i, k, -step)) /
                (2 * step);
            double found = second.at[i] == NULL ? 0 : ((const double *)tt_data(tt_contiguous(second.at[i])))[k];
            if (fabs(found - expected) > 1e-6 * (1 + fabs(expected)))
                fprintf(stderr, "input %d, element %d: %g, and by differences %g\n", i, (int)k, found, expected);
            CHECK(fabs(found - expected) <= 1e-6 * (1 + fabs(expected)));
        }
}

static tt_tensor *random_leaf(tt_dims shape) {
    return tt_randn(shape, TUTTI_F64, TUTTI_OPTIONS(tt_options, .requires_grad = true));
}

static void check_one(loss_of *loss, tt_dims shape) {
    tt_scope scope = tt_scope_open();
    tt_seed(7, 0);
    tt_tensor *inputs[] = { random_leaf(shape) };
    check(loss, 1, inputs);
    CHECK_OK(tt_scope_close(&scope));
}

static tt_tensor *of_silu(tt_tensor *const *inputs) {
    return weighed(tt_silu(inputs[0]));
}
static tt_tensor *of_gelu(tt_tensor *const *inputs) {
    return weighed(tt_gelu(inputs[0]));
}
static tt_tensor *of_gelu_tanh(tt_tensor *const *inputs) {
    return weighed(tt_gelu_tanh(inputs[0]));
}
static tt_tensor *of_softmax(tt_tensor *const *inputs) {
    return weighed(tt_softmax(inputs[0], 1));
}
static tt_tensor *of_log_softmax(tt_tensor *const *inputs) {
    return weighed(tt_log_softmax(inputs[0], 1));
}
static tt_tensor *of_cross_entropy(tt_tensor *const *inputs) {
    return tt_cross_entropy(inputs[0], tt_from((int64_t[]){ 2, -100, 0 }, tt_shape(3), TUTTI_I64, NULL), -100);
}
static tt_tensor *of_layer_norm(tt_tensor *const *inputs) {
    return weighed(tt_layer_norm(inputs[0], inputs[1], inputs[2], 1e-5));
}
static tt_tensor *of_rms_norm(tt_tensor *const *inputs) {
    return weighed(tt_rms_norm(inputs[0], inputs[1], 1e-5));
}
static tt_tensor *of_attention(tt_tensor *const *inputs) {
    return weighed(tt_attention(inputs[0], inputs[1], inputs[2], true, 0));
}
static tt_tensor *of_plain_attention(tt_tensor *const *inputs) {
    return weighed(tt_attention(inputs[0], inputs[1], inputs[2], false, 0.7));
}

TEST(activations_have_second_derivatives) {
    check_one(of_silu, tt_shape(6));
    check_one(of_gelu, tt_shape(6));
    check_one(of_gelu_tanh, tt_shape(6));
}

TEST(softmax_and_its_logarithm_have_second_derivatives) {
    check_one(of_softmax, tt_shape(2, 3));
    check_one(of_log_softmax, tt_shape(2, 3));
}

TEST(cross_entropy_has_second_derivatives) {
    check_one(of_cross_entropy, tt_shape(3, 4));
}

TEST(norms_have_second_derivatives) {
    tt_scope scope = tt_scope_open();
    tt_seed(8, 0);
    tt_tensor *inputs[] = { random_leaf(tt_shape(2, 4)), random_leaf(tt_shape(4)), random_leaf(tt_shape(4)) };
    check(of_layer_norm, 3, inputs);
    check(of_rms_norm, 2, inputs);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(attention_has_second_derivatives) {
    tt_scope scope = tt_scope_open();
    tt_seed(9, 0);
    tt_tensor *inputs[] = { random_leaf(tt_shape(2, 3, 2)), random_leaf(tt_shape(2, 3, 2)),
                            random_leaf(tt_shape(2, 3, 2)) };
    check(of_attention, 3, inputs);
    check(of_plain_attention, 3, inputs);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- at zeros, where quotients and signs would lose something ---- */

static tt_tensor *all_products(tt_tensor *const *in) {
    return weighed(tt_prod(in[0], tt_shape(0, -1), false));
}
static tt_tensor *norm_of(tt_tensor *const *in) {
    return tt_norm(in[0]);
}
static tt_tensor *complex_norm(tt_tensor *const *in) {
    return tt_norm(tt_view_as_complex(tt_reshape(in[0], tt_shape(-1, 2))));
}

TEST(second_derivatives_of_products_and_norms_are_right_at_zeros) {
    tt_scope scope = tt_scope_open();
    double values[2 * 3 * 3] = { 0, 2, 3, -1, 0, 0.5, 4, 1, 0, 2, 0, 0, 3, -2, 1, 0, 5, 2 };
    tt_tensor *x = tt_require_grad(tt_from(values, tt_shape(2, 3, 3), TUTTI_F64, NULL), true);
    check(all_products, 1, &x);
    check(norm_of, 1, &x);
    check(complex_norm, 1, &x);
    CHECK_OK(tt_scope_close(&scope));
}

TEST(the_magnitude_of_complex_zero_has_second_derivatives_of_zero) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_require_grad(tt_zeros(tt_shape(2, 2), TUTTI_F64, NULL), true);
    tt_tensor_list first = tt_gradients(tt_tensors(tt_sum(tt_abs(tt_view_as_complex(x)))), tt_tensors(x), none,
                                        TUTTI_OPTIONS(tt_backward_options, .create_graph = true));
    tt_tensor_list second = tt_gradients(tt_tensors(weighed(first.at[0])), tt_tensors(x), none, NULL);
    CHECK(second.count == 1 && tt_equal(second.at[0], tt_zeros_like(x)));
    CHECK_OK(tt_scope_close(&scope));
}

static tt_tensor *masked_exponents(tt_tensor *const *in) {
    return weighed(tt_pow(in[0], tt_triu(in[0], 0)));
}

/* The logarithm of the negative base below the diagonal is not a number; the exponent there is 0 and stays it. */
TEST(a_power_whose_exponent_is_masked_has_second_derivatives_of_zero_there) {
    tt_scope scope = tt_scope_open();
    double values[4] = { 1.5, 0.5, -2, 3 };
    tt_tensor *x = tt_require_grad(tt_from(values, tt_shape(2, 2), TUTTI_F64, NULL), true);
    check(masked_exponents, 1, &x);
    CHECK_OK(tt_scope_close(&scope));
}
