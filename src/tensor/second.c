/* SPDX-License-Identifier: Apache-2.0
 *
 * Derivatives of gradients: what the rows of backward operators name, and the forwards of fused operators written out,
 * through which their gradients are taken where these are differentiated again.
 */
#include <math.h>

#include "tensor/operators.h"

/* number - x. */
static tt_tensor *from_number(double number, tt_tensor *x) {
    return tt_add_scalar(tt_neg(x), number);
}

/* ---- pointwise ---- */

/* With s the sigmoid: s (1 - s) (2 + x (1 - 2 s)). */
tt_tensor *tu_silu_second(tt_tensor *x) {
    tt_tensor *sigmoid = tt_sigmoid(x), *rest = from_number(1, sigmoid);
    tt_tensor *bend = tt_add_scalar(tt_mul(x, tt_sub(rest, sigmoid)), 2);
    return tt_mul(tt_mul(sigmoid, rest), bend);
}

/* The density of the normal distribution times (2 - x^2). */
tt_tensor *tu_gelu_second(tt_tensor *x) {
    tt_tensor *square = tt_mul(x, x), *density = tt_exp(tt_mul_scalar(square, -0.5));
    return tt_mul(tt_mul_scalar(density, 0.39894228040143267794), from_number(2, square));
}

/* With t = tanh(u), u = c (x + a x^3): (1 - t^2) (u' + x / 2 (u'' - 2 t u'^2)). */
tt_tensor *tu_gelu_tanh_second(tt_tensor *x) {
    const double root = 0.7978845608028654, cubic = 0.044715;
    tt_tensor *square = tt_mul(x, x);
    tt_tensor *tanh = tt_tanh(tt_mul(tt_mul_scalar(x, root), tt_add_scalar(tt_mul_scalar(square, cubic), 1)));
    tt_tensor *slope = tt_mul_scalar(tt_add_scalar(tt_mul_scalar(square, 3 * cubic), 1), root);
    tt_tensor *bend = tt_mul_scalar(x, 6 * cubic * root);
    tt_tensor *inner = tt_sub(bend, tt_mul_scalar(tt_mul(tanh, tt_mul(slope, slope)), 2));
    return tt_mul(from_number(1, tt_mul(tanh, tanh)), tt_add(slope, tt_mul(tt_mul_scalar(x, 0.5), inner)));
}

/* ---- softmax: y (grad - sum(grad y)), and grad - exp(y) sum(grad) ---- */

static tt_tensor *sum_along(tt_tensor *x, int dim) {
    return tt_sum_dims(x, tt_shape(dim), true);
}

tt_tensor *tu_softmax_backward_of_y(tt_tensor *upper, tt_tensor *grad, tt_tensor *y, int dim) {
    tt_tensor *centred = tt_sub(grad, sum_along(tt_mul(grad, y), dim));
    return tt_sub(tt_mul(upper, centred), tt_mul(grad, sum_along(tt_mul(upper, y), dim)));
}

tt_tensor *tu_log_softmax_backward_of_grad(tt_tensor *upper, tt_tensor *y, int dim) {
    return tt_sub(upper, sum_along(tt_mul(upper, tt_exp(y)), dim));
}

tt_tensor *tu_log_softmax_backward_of_y(tt_tensor *upper, tt_tensor *grad, tt_tensor *y, int dim) {
    return tt_neg(tt_mul(tt_mul(upper, tt_exp(y)), sum_along(grad, dim)));
}

/* ---- fused operators, written out ---- */

/* Narrow floats are computed in f32, as the kernels do. */
static tt_tensor *widened(tt_tensor *x) {
    return x == NULL || x->dtype == TUTTI_F64 || x->dtype == TUTTI_F32 ? x : tt_to(x, TUTTI_F32);
}

void tu_norm_gradient_again(tu_gradient *gradient, bool centred, double epsilon) {
    tt_tensor *inputs[] = { tu_gradient_input(gradient, 0), tu_gradient_input(gradient, 1) };
    const tt_tensor *rows = tu_saved(gradient, TU_OUTPUT(1));
    if (rows == NULL || inputs[0] == NULL)
        return;
    tt_dims dims = { .count = inputs[0]->ndim - rows->ndim };
    for (int i = 0; i < dims.count; i++)
        dims.at[i] = rows->ndim + i;
    tt_tensor *x = widened(inputs[0]), *weight = widened(inputs[1]);
    if (centred)
        x = tt_sub(x, tt_mean_dims(x, dims, true));
    tt_tensor *scale = tt_rsqrt(tt_add_scalar(tt_mean_dims(tt_mul(x, x), dims, true), epsilon));
    tt_tensor *y = tt_mul(x, scale);
    tu_gradient_through(gradient, weight != NULL ? tt_mul(y, weight) : y, 2, inputs);
    if (gradient->input_count > 2 && gradient->needs[2])
        gradient->results[2] = gradient->grads[0]; /* the bias: the engine sums it down */
}

void tu_attention_gradient_again(tu_gradient *gradient, bool causal, double scale) {
    tt_tensor *inputs[3];
    for (int i = 0; i < 3; i++)
        inputs[i] = tu_gradient_input(gradient, i);
    tt_tensor *query = widened(inputs[0]), *key = widened(inputs[1]), *value = widened(inputs[2]);
    if (query == NULL || key == NULL || value == NULL)
        return;
    int64_t queries = tu_size(query, -2), keys = tu_size(key, -2), depth = tu_size(query, -1);
    double factor = scale != 0 ? scale : depth > 0 ? 1 / sqrt((double)depth) : 1;
    tt_tensor *scores = tt_mul_scalar(tt_matmul(query, tt_transpose(key, -2, -1)), factor);
    if (causal) {
        tt_options options = TT_OPTIONS_INIT;
        options.device = query->device;
        tt_tensor *later = tt_triu(tt_ones(tt_shape(queries, keys), TUTTI_F32, &options), 1);
        scores = tt_masked_fill(scores, tt_ne(later, tt_number(0)), -INFINITY);
    }
    tu_gradient_through(gradient, tt_matmul(tt_softmax(scores, -1), value), 3, inputs);
}

void tu_cross_entropy_gradient_again(tu_gradient *gradient, int64_t ignore) {
    tt_tensor *inputs[] = { tu_gradient_input(gradient, 0) }, *targets = tu_saved(gradient, TU_INPUT(1));
    tt_tensor *logits = widened(inputs[0]);
    if (logits == NULL || targets == NULL)
        return;
    tt_tensor *counted = tt_ne(targets, tt_number((double)ignore)), *none = tt_number(0);
    tt_tensor *index = tt_unsqueeze(tt_to(tt_where(counted, targets, none), TUTTI_I64), -1);
    tt_tensor *chosen = tt_squeeze(tt_gather_dim(tt_log_softmax(logits, -1), -1, index), -1);
    tt_tensor *count = tt_to(tt_sum(counted), logits->dtype);
    tt_tensor *loss = tt_neg(tt_div(tt_sum(tt_where(counted, chosen, none)), count));
    tu_gradient_through(gradient, loss, 1, inputs);
}
