/* SPDX-License-Identifier: Apache-2.0
 *
 * What the rows of operators.def declare: attributes, private functions, and the numbers of pointwise operators.
 */
#ifndef TU_TENSOR_OPERATORS_H
#define TU_TENSOR_OPERATORS_H

#include "tensor/rows.h"

/* What a reduction computes; see reduce.c. */
struct tu_reduction;
extern const struct tu_reduction tu_sum_detail, tu_mean_detail, tu_prod_detail, tu_amax_detail, tu_amin_detail,
    tu_any_detail, tu_all_detail;

/* Kernels on rows; see softmax.c. */
struct tu_row_kernels;
extern const struct tu_row_kernels tu_softmax_detail, tu_log_softmax_detail, tu_softmax_backward_detail,
    tu_log_softmax_backward_detail;

#define OPERATOR(form, name, family, summary, arguments, properties) TU_ROW_TYPES(form, name, arguments, properties)
#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    TU_ROW_TYPES(form, name, arguments, properties)
#include "tensor/operators.def"
#undef OPERATOR
#undef POINTWISE

#define OPERATOR(...)
#define POINTWISE(form, name, ...) TU_POINTWISE_##name,
enum {
#include "tensor/operators.def"
    TU_POINTWISE_COUNT
};
#undef OPERATOR
#undef POINTWISE

/* The conjugate of complex tensors, x itself else; NULL stays NULL. */
tt_tensor *tu_conjugate(tt_tensor *x);
/* The state of a fresh generator, for samples. */
tt_tensor *tu_sample_state(void);
/* Formulas that are more than a line. */
tt_tensor *tu_pow_scalar_slope(tt_tensor *grad, tt_tensor *x, double exponent);
tt_tensor *tu_clamp_slope(tt_tensor *grad, tt_tensor *x, double low, double high);
tt_tensor *tu_abs_slope(tt_tensor *grad, tt_tensor *x);
/* Derivatives of gradients; see second.c. */
tt_tensor *tu_silu_second(tt_tensor *x);
tt_tensor *tu_gelu_second(tt_tensor *x);
tt_tensor *tu_gelu_tanh_second(tt_tensor *x);
tt_tensor *tu_softmax_backward_of_y(tt_tensor *upper, tt_tensor *grad, tt_tensor *y, int dim);
tt_tensor *tu_log_softmax_backward_of_grad(tt_tensor *upper, tt_tensor *y, int dim);
tt_tensor *tu_log_softmax_backward_of_y(tt_tensor *upper, tt_tensor *grad, tt_tensor *y, int dim);
void tu_norm_gradient_again(tu_gradient *gradient, bool centred, double epsilon);
void tu_attention_gradient_again(tu_gradient *gradient, bool causal, double scale);
void tu_cross_entropy_gradient_again(tu_gradient *gradient, int64_t ignore);

#endif
