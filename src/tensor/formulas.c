/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradients of pointwise operators that are more than one formula.
 */
#include "tensor/operators.h"

tt_tensor *tu_conjugate(tt_tensor *x) {
    return x != NULL && tu_is_complex(x->dtype) ? tt_conj(x) : x;
}

/* The gradient goes to the chosen one; equal ones share it. */
static void extremum_gradient(tu_gradient *gradient, tt_tensor *(*beats)(tt_tensor *, tt_tensor *)) {
    tt_tensor *left = tu_saved(gradient, TU_INPUT(0)), *right = tu_saved(gradient, TU_INPUT(1)),
              *grad = gradient->grads[0];
    tt_tensor *none = tt_number(0), *tied = tt_where(tt_eq(left, right), tt_mul_scalar(grad, 0.5), none);
    if (gradient->needs[0])
        gradient->results[0] = tt_add(tt_where(beats(left, right), grad, none), tied);
    if (gradient->needs[1])
        gradient->results[1] = tt_add(tt_where(beats(right, left), grad, none), tied);
}

void tu_maximum_gradient(tu_gradient *gradient) {
    extremum_gradient(gradient, tt_gt);
}

void tu_minimum_gradient(tu_gradient *gradient) {
    extremum_gradient(gradient, tt_lt);
}

/* At base 0 the power 0 has the slope 0, and so has the exponent of any power that is 0. A power with the exponent 0
 * does not depend on its base, whatever the gradient is: it is not a number where the exponent of a negative base is
 * masked and the gradient is differentiated once more. The inner choice keeps infinite slopes from that. */
void tu_pow_gradient(tu_gradient *gradient) {
    tt_tensor *left = tu_saved(gradient, TU_INPUT(0)), *right = tu_saved(gradient, TU_INPUT(1)),
              *grad = gradient->grads[0];
    tt_tensor *none = tt_number(0);
    if (gradient->needs[0]) {
        tt_tensor *constant = tt_eq(right, none), *slope = tt_mul(right, tt_pow(left, tt_add_scalar(right, -1)));
        gradient->results[0] = tt_where(constant, none, tt_mul(grad, tt_where(constant, none, slope)));
    }
    if (gradient->needs[1]) {
        tt_tensor *power = tu_saved(gradient, TU_OUTPUT(0));
        tt_tensor *flat = tt_logical_and(tt_eq(left, none), tt_ge(right, none));
        if (power == NULL || left == NULL)
            return;
        tt_tensor *base = tu_is_integer(left->dtype) || left->dtype == TUTTI_BOOL ? tt_to(left, power->dtype) : left;
        gradient->results[1] = tt_mul(grad, tt_where(flat, none, tt_mul(power, tt_log(base))));
    }
}

tt_tensor *tu_pow_scalar_slope(tt_tensor *grad, tt_tensor *x, double exponent) {
    if (exponent == 0)
        return tt_zeros_like(x);
    return tt_mul(grad, tt_mul_scalar(tt_pow_scalar(x, exponent - 1), exponent));
}

/* grad where x is its own result, so that bounds count as they are in the dtype of x. */
tt_tensor *tu_clamp_slope(tt_tensor *grad, tt_tensor *x, double low, double high) {
    if (!(low <= high))
        return tt_zeros_like(grad);
    return tt_where(tt_eq(x, tt_clamp(x, low, high)), grad, tt_number(0));
}

/* Of complex x: grad times the unit number in x's direction, which 0 has not. */
tt_tensor *tu_abs_slope(tt_tensor *grad, tt_tensor *x) {
    if (x == NULL || !tu_is_complex(x->dtype))
        return tt_mul(grad, tt_sign(x));
    tt_tensor *size = tt_abs(x), *none = tt_number(0), *is_zero = tt_eq(size, none);
    return tt_mul(grad, tt_where(is_zero, none, tt_div(x, tt_where(is_zero, tt_ones_like(size), size))));
}

tt_tensor *tt_masked_fill(tt_tensor *x, tt_tensor *mask, double value) {
    return tt_where(mask, tt_number(value), x);
}
