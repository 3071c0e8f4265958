/* SPDX-License-Identifier: Apache-2.0
 *
 * Arithmetic on two and three tensors, and on a tensor and a number.
 */
#include "tensor/pointwise.h"

#define FAMILY "arithmetic"
#define EACH(kernel, name, ...) kernel(name##_f32, float, __VA_ARGS__) kernel(name##_f64, double, __VA_ARGS__)
#define EACH_INT(kernel, name, ...) kernel(name##_i64, uint64_t, __VA_ARGS__) /* wraps */
#define EACH_COMPLEX(kernel, name, ...) kernel(name##_c128, tu_c128, __VA_ARGS__)

static tt_tensor *pair_sample(tu_sampler *s, tt_tensor *(*f)(tt_tensor *, tt_tensor *)) {
    tt_tensor *a = tu_normal(s, tt_shape(s->n, 3));
    return f(a, tu_positive(s, tt_shape(3)));
}
#define PAIR_SAMPLE(name)                            \
    static tt_tensor *name##_sample(tu_sampler *s) { \
        return pair_sample(s, tt_##name);            \
    }
#define PUBLIC2(name)                                  \
    tt_tensor *tt_##name(tt_tensor *a, tt_tensor *b) { \
        return tu_run2(&tu_operator_##name, a, b);     \
    }
#define PUBLIC2_(name)                                    \
    tt_tensor *tt_##name##_(tt_tensor *a, tt_tensor *b) { \
        return tu_run2_(&tu_operator_##name, a, b);       \
    }

/* conj for complex gradients, the tensor itself else */
static tt_tensor *conjugate(tt_tensor *x) {
    return x != NULL && tu_is_complex(x->dtype) ? tt_conj(x) : x;
}

/* ---- add, sub ---- */

EACH(TU_KERNEL2, add, x + y)
EACH_INT(TU_KERNEL2, add, x + y)
EACH_COMPLEX(TU_KERNEL2, add, x + y)
static void add_gradient(tu_gradient *g) {
    g->results[0] = g->grads[0];
    g->results[1] = g->grads[0];
}
PAIR_SAMPLE(add)
TU_OPERATOR(add) = { .name = "add",
                     .schema = "add(a, b) -> tensor",
                     .summary = "a + b",
                     .family = FAMILY,
                     .flags = TU_HAS_IN_PLACE,
                     TU_POINTWISE,
                     .detail = &(const tu_pointwise){ add_f32, add_f64, add_i64, NULL, add_c128 },
                     .gradient = add_gradient,
                     .sample = add_sample };
PUBLIC2(add)
PUBLIC2_(add)

EACH(TU_KERNEL2, sub, x - y)
EACH_INT(TU_KERNEL2, sub, x - y)
EACH_COMPLEX(TU_KERNEL2, sub, x - y)
static void sub_gradient(tu_gradient *g) {
    g->results[0] = g->grads[0];
    if (g->needs[1])
        g->results[1] = tt_neg(g->grads[0]);
}
PAIR_SAMPLE(sub)
TU_OPERATOR(sub) = { .name = "sub",
                     .schema = "sub(a, b) -> tensor",
                     .summary = "a - b",
                     .family = FAMILY,
                     .flags = TU_HAS_IN_PLACE,
                     TU_POINTWISE,
                     .detail = &(const tu_pointwise){ sub_f32, sub_f64, sub_i64, NULL, sub_c128 },
                     .gradient = sub_gradient,
                     .sample = sub_sample };
PUBLIC2(sub)
PUBLIC2_(sub)

/* ---- mul, div ---- */

EACH(TU_KERNEL2, mul, x *y)
EACH_INT(TU_KERNEL2, mul, x *y)
EACH_COMPLEX(TU_KERNEL2, mul, x *y)
static void mul_gradient(tu_gradient *g) {
    if (g->needs[0])
        g->results[0] = tt_mul(g->grads[0], conjugate(tu_saved(g, TU_INPUT(1))));
    if (g->needs[1])
        g->results[1] = tt_mul(g->grads[0], conjugate(tu_saved(g, TU_INPUT(0))));
}
PAIR_SAMPLE(mul)
TU_OPERATOR(mul) = { .name = "mul",
                     .schema = "mul(a, b) -> tensor",
                     .summary = "a * b",
                     .family = FAMILY,
                     .flags = TU_HAS_IN_PLACE,
                     TU_POINTWISE,
                     .detail = &(const tu_pointwise){ mul_f32, mul_f64, mul_i64, NULL, mul_c128 },
                     .gradient = mul_gradient,
                     .saves = { TU_INPUT(1), TU_INPUT(0) },
                     .sample = mul_sample };
PUBLIC2(mul)
PUBLIC2_(mul)

EACH(TU_KERNEL2, div, x / y)
EACH_COMPLEX(TU_KERNEL2, div, x / y)
static void div_gradient(tu_gradient *g) {
    tt_tensor *quotient = tt_div(g->grads[0], conjugate(tu_saved(g, TU_INPUT(1))));
    g->results[0] = quotient;
    if (g->needs[1])
        g->results[1] = tt_neg(tt_mul(quotient, conjugate(tt_div(tu_saved(g, TU_INPUT(0)), tu_saved(g, TU_INPUT(1))))));
}
PAIR_SAMPLE(div)
TU_OPERATOR(div) = { .name = "div",
                     .schema = "div(a, b) -> tensor",
                     .summary = "a / b; integers give f32",
                     .family = FAMILY,
                     .flags = TU_HAS_IN_PLACE,
                     TU_POINTWISE,
                     .detail = &(const tu_pointwise){ div_f32, div_f64, NULL, NULL, div_c128, .to_float = true },
                     .gradient = div_gradient,
                     .saves = { TU_INPUT(1), TU_INPUT(0) | TU_INPUT(1) },
                     .sample = div_sample };
PUBLIC2(div)
PUBLIC2_(div)

/* ---- maximum, minimum, pow ---- */

EACH(TU_KERNEL2, maximum, x != x ? x : y != y ? y : x > y ? x : y)
TU_KERNEL2(maximum_i64, int64_t, x > y ? x : y)
TU_KERNEL2(maximum_u64, uint64_t, x > y ? x : y)
EACH(TU_KERNEL2, minimum, x != x ? x : y != y ? y : x < y ? x : y)
TU_KERNEL2(minimum_i64, int64_t, x < y ? x : y)
TU_KERNEL2(minimum_u64, uint64_t, x < y ? x : y)
/* The gradient goes to the chosen one; equal ones share it. */
static void extremum_gradient(tu_gradient *g, tt_tensor *(*beats)(tt_tensor *, tt_tensor *)) {
    tt_tensor *a = tu_saved(g, TU_INPUT(0)), *b = tu_saved(g, TU_INPUT(1));
    tt_tensor *half = tt_mul_scalar(g->grads[0], 0.5), *none = tt_number(0);
    tt_tensor *tied = tt_where(tt_eq(a, b), half, none);
    if (g->needs[0])
        g->results[0] = tt_add(tt_where(beats(a, b), g->grads[0], none), tied);
    if (g->needs[1])
        g->results[1] = tt_add(tt_where(beats(b, a), g->grads[0], none), tied);
}
static void maximum_gradient(tu_gradient *g) {
    extremum_gradient(g, tt_gt);
}
static void minimum_gradient(tu_gradient *g) {
    extremum_gradient(g, tt_lt);
}
PAIR_SAMPLE(maximum)
PAIR_SAMPLE(minimum)
TU_OPERATOR(maximum) = { .name = "maximum",
                         .schema = "maximum(a, b) -> tensor",
                         .summary = "the larger of a and b; passes a NaN on",
                         .family = FAMILY,
                         TU_POINTWISE,
                         .detail = &(const tu_pointwise){ maximum_f32, maximum_f64, maximum_i64, maximum_u64, NULL },
                         .gradient = maximum_gradient,
                         .saves = { TU_INPUT(0) | TU_INPUT(1), TU_INPUT(0) | TU_INPUT(1) },
                         .sample = maximum_sample };
TU_OPERATOR(minimum) = { .name = "minimum",
                         .schema = "minimum(a, b) -> tensor",
                         .summary = "the smaller of a and b; passes a NaN on",
                         .family = FAMILY,
                         TU_POINTWISE,
                         .detail = &(const tu_pointwise){ minimum_f32, minimum_f64, minimum_i64, minimum_u64, NULL },
                         .gradient = minimum_gradient,
                         .saves = { TU_INPUT(0) | TU_INPUT(1), TU_INPUT(0) | TU_INPUT(1) },
                         .sample = minimum_sample };
PUBLIC2(maximum)
PUBLIC2(minimum)

TU_KERNEL2(pow_f32, float, powf(x, y))
TU_KERNEL2(pow_f64, double, pow(x, y))
static void pow_gradient(tu_gradient *g) {
    tt_tensor *a = tu_saved(g, TU_INPUT(0)), *b = tu_saved(g, TU_INPUT(1));
    if (g->needs[0])
        g->results[0] = tt_mul(g->grads[0], tt_mul(b, tt_pow(a, tt_add_scalar(b, -1))));
    if (g->needs[1])
        g->results[1] = tt_mul(g->grads[0], tt_mul(tu_saved(g, TU_OUTPUT(0)), tt_log(a)));
}
static tt_tensor *pow_sample(tu_sampler *s) {
    tt_tensor *a = tu_positive(s, tt_shape(s->n, 3));
    return tt_pow(a, tu_normal(s, tt_shape(3)));
}
TU_OPERATOR(pow) = { .name = "pow",
                     .schema = "pow(a, b) -> tensor",
                     .summary = "a to the power b",
                     .family = FAMILY,
                     TU_POINTWISE,
                     .detail = &(const tu_pointwise){ pow_f32, pow_f64, .to_float = true },
                     .gradient = pow_gradient,
                     .saves = { TU_INPUT(0) | TU_INPUT(1), TU_INPUT(0) | TU_INPUT(1) | TU_OUTPUT(0) },
                     .sample = pow_sample };
PUBLIC2(pow)

/* ---- with a factor ---- */

static tt_tensor *run_with(const tu_operator *operator, int count, tt_tensor *const *inputs, double number,
                           bool in_place) {
    tu_call call;
    tu_call_init(&call, operator, count, inputs);
    call.params.number[0] = number;
    call.in_place = in_place;
    return tu_run(&call);
}

TU_KERNEL2(add_scaled_f32, float, x + (float)p->number[0] * y)
TU_KERNEL2(add_scaled_f64, double, x + p->number[0] * y)
TU_KERNEL2(add_scaled_i64, int64_t, (int64_t)((uint64_t)x + (uint64_t)(int64_t)p->number[0] * (uint64_t)y))
TU_KERNEL2(add_scaled_c128, tu_c128, x + p->number[0] * y)
static void add_scaled_gradient(tu_gradient *g) {
    g->results[0] = g->grads[0];
    if (g->needs[1])
        g->results[1] = tt_mul_scalar(g->grads[0], g->params->number[0]);
}
static tt_tensor *add_scaled_sample(tu_sampler *s) {
    tt_tensor *a = tu_normal(s, tt_shape(s->n, 3));
    return tt_add_scaled(a, tu_normal(s, tt_shape(3)), 3);
}
TU_OPERATOR(add_scaled) = { .name = "add_scaled",
                            .schema = "add_scaled(a, b, factor) -> tensor",
                            .summary = "a + factor * b",
                            .family = FAMILY,
                            .flags = TU_HAS_IN_PLACE,
                            TU_POINTWISE,
                            .detail = &(const tu_pointwise){ add_scaled_f32, add_scaled_f64, add_scaled_i64, NULL,
                                                             add_scaled_c128 },
                            .gradient = add_scaled_gradient,
                            .sample = add_scaled_sample };
tt_tensor *tt_add_scaled(tt_tensor *a, tt_tensor *b, double factor) {
    return run_with(&tu_operator_add_scaled, 2, (tt_tensor *[]){ a, b }, factor, false);
}
tt_tensor *tt_add_scaled_(tt_tensor *a, tt_tensor *b, double factor) {
    return run_with(&tu_operator_add_scaled, 2, (tt_tensor *[]){ a, b }, factor, true);
}

TU_KERNEL2(lerp_f32, float, x + (float)p->number[0] * (y - x))
TU_KERNEL2(lerp_f64, double, x + p->number[0] * (y - x))
static void lerp_gradient(tu_gradient *g) {
    if (g->needs[0])
        g->results[0] = tt_mul_scalar(g->grads[0], 1 - g->params->number[0]);
    if (g->needs[1])
        g->results[1] = tt_mul_scalar(g->grads[0], g->params->number[0]);
}
static tt_tensor *lerp_sample(tu_sampler *s) {
    tt_tensor *a = tu_normal(s, tt_shape(s->n, 3));
    return tt_lerp(a, tu_normal(s, tt_shape(3)), 0.25);
}
TU_OPERATOR(lerp) = { .name = "lerp",
                      .schema = "lerp(a, b, weight) -> tensor",
                      .summary = "a + weight * (b - a)",
                      .family = FAMILY,
                      .flags = TU_HAS_IN_PLACE,
                      TU_POINTWISE,
                      .detail = &(const tu_pointwise){ lerp_f32, lerp_f64, .to_float = true },
                      .gradient = lerp_gradient,
                      .sample = lerp_sample };
tt_tensor *tt_lerp(tt_tensor *a, tt_tensor *b, double weight) {
    return run_with(&tu_operator_lerp, 2, (tt_tensor *[]){ a, b }, weight, false);
}
tt_tensor *tt_lerp_(tt_tensor *a, tt_tensor *b, double weight) {
    return run_with(&tu_operator_lerp, 2, (tt_tensor *[]){ a, b }, weight, true);
}

TU_KERNEL3(addcmul_f32, float, x + (float)p->number[0] * y * z)
TU_KERNEL3(addcmul_f64, double, x + p->number[0] * y * z)
static void addcmul_gradient(tu_gradient *g) {
    g->results[0] = g->grads[0];
    if (g->needs[1])
        g->results[1] = tt_mul_scalar(tt_mul(g->grads[0], tu_saved(g, TU_INPUT(2))), g->params->number[0]);
    if (g->needs[2])
        g->results[2] = tt_mul_scalar(tt_mul(g->grads[0], tu_saved(g, TU_INPUT(1))), g->params->number[0]);
}
static tt_tensor *addcmul_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n, 3)), *a = tu_normal(s, tt_shape(3));
    return tt_addcmul(x, a, tu_normal(s, tt_shape(s->n, 1)), 2);
}
TU_OPERATOR(addcmul) = { .name = "addcmul",
                         .schema = "addcmul(x, a, b, factor) -> tensor",
                         .summary = "x + factor * a * b",
                         .family = FAMILY,
                         .flags = TU_HAS_IN_PLACE,
                         TU_POINTWISE,
                         .detail = &(const tu_pointwise){ addcmul_f32, addcmul_f64, .to_float = true },
                         .gradient = addcmul_gradient,
                         .saves = { 0, TU_INPUT(2), TU_INPUT(1) },
                         .sample = addcmul_sample };
tt_tensor *tt_addcmul(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor) {
    return run_with(&tu_operator_addcmul, 3, (tt_tensor *[]){ x, a, b }, factor, false);
}
tt_tensor *tt_addcmul_(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor) {
    return run_with(&tu_operator_addcmul, 3, (tt_tensor *[]){ x, a, b }, factor, true);
}

TU_KERNEL3(addcdiv_f32, float, x + (float)p->number[0] * y / z)
TU_KERNEL3(addcdiv_f64, double, x + p->number[0] * y / z)
static void addcdiv_gradient(tu_gradient *g) {
    g->results[0] = g->grads[0];
    if (!g->needs[1] && !g->needs[2])
        return;
    tt_tensor *b = tu_saved(g, TU_INPUT(2));
    tt_tensor *quotient = tt_mul_scalar(tt_div(g->grads[0], b), g->params->number[0]);
    g->results[1] = quotient;
    if (g->needs[2])
        g->results[2] = tt_neg(tt_mul(quotient, tt_div(tu_saved(g, TU_INPUT(1)), b)));
}
static tt_tensor *addcdiv_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n, 3)), *a = tu_normal(s, tt_shape(3));
    return tt_addcdiv(x, a, tu_positive(s, tt_shape(s->n, 1)), 2);
}
TU_OPERATOR(addcdiv) = { .name = "addcdiv",
                         .schema = "addcdiv(x, a, b, factor) -> tensor",
                         .summary = "x + factor * a / b",
                         .family = FAMILY,
                         .flags = TU_HAS_IN_PLACE,
                         TU_POINTWISE,
                         .detail = &(const tu_pointwise){ addcdiv_f32, addcdiv_f64, .to_float = true },
                         .gradient = addcdiv_gradient,
                         .saves = { 0, TU_INPUT(2), TU_INPUT(1) | TU_INPUT(2) },
                         .sample = addcdiv_sample };
tt_tensor *tt_addcdiv(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor) {
    return run_with(&tu_operator_addcdiv, 3, (tt_tensor *[]){ x, a, b }, factor, false);
}
tt_tensor *tt_addcdiv_(tt_tensor *x, tt_tensor *a, tt_tensor *b, double factor) {
    return run_with(&tu_operator_addcdiv, 3, (tt_tensor *[]){ x, a, b }, factor, true);
}

/* ---- with a number ---- */

/* An integer tensor stays one where the number is whole; else the sum or product is f32. */
static tt_tensor *with_number(const tu_operator *operator, tt_tensor * a, double number, bool in_place) {
    if (a != NULL && a->magic == TU_MAGIC_ALIVE && !tu_is_float(a->dtype) && !tu_is_complex(a->dtype) &&
        number != rint(number) && !in_place)
        a = tt_to(a, TUTTI_F32);
    return run_with(operator, 1, &a, number, in_place);
}

TU_KERNEL1(add_scalar_f32, float, x + (float)p->number[0])
TU_KERNEL1(add_scalar_f64, double, x + p->number[0])
TU_KERNEL1(add_scalar_i64, int64_t, (int64_t)((uint64_t)x + (uint64_t)(int64_t)p->number[0]))
TU_KERNEL1(add_scalar_c128, tu_c128, x + p->number[0])
static void add_scalar_gradient(tu_gradient *g) {
    g->results[0] = g->grads[0];
}
static tt_tensor *add_scalar_sample(tu_sampler *s) {
    return tt_add_scalar(tu_normal(s, tt_shape(s->n, 3)), 2);
}
TU_OPERATOR(add_scalar) = { .name = "add_scalar",
                            .schema = "add_scalar(a, number) -> tensor",
                            .summary = "a + number",
                            .family = FAMILY,
                            .flags = TU_HAS_IN_PLACE,
                            TU_POINTWISE,
                            .detail = &(const tu_pointwise){ add_scalar_f32, add_scalar_f64, add_scalar_i64, NULL,
                                                             add_scalar_c128 },
                            .gradient = add_scalar_gradient,
                            .sample = add_scalar_sample };
tt_tensor *tt_add_scalar(tt_tensor *a, double number) {
    return with_number(&tu_operator_add_scalar, a, number, false);
}
tt_tensor *tt_add_scalar_(tt_tensor *a, double number) {
    return with_number(&tu_operator_add_scalar, a, number, true);
}

TU_KERNEL1(mul_scalar_f32, float, x *(float)p->number[0])
TU_KERNEL1(mul_scalar_f64, double, x * p->number[0])
TU_KERNEL1(mul_scalar_i64, int64_t, (int64_t)((uint64_t)x *(uint64_t)(int64_t)p->number[0]))
TU_KERNEL1(mul_scalar_c128, tu_c128, x * p->number[0])
static void mul_scalar_gradient(tu_gradient *g) {
    g->results[0] = tt_mul_scalar(g->grads[0], g->params->number[0]);
}
static tt_tensor *mul_scalar_sample(tu_sampler *s) {
    return tt_mul_scalar(tu_normal(s, tt_shape(s->n, 3)), 3);
}
TU_OPERATOR(mul_scalar) = { .name = "mul_scalar",
                            .schema = "mul_scalar(a, number) -> tensor",
                            .summary = "a * number",
                            .family = FAMILY,
                            .flags = TU_HAS_IN_PLACE,
                            TU_POINTWISE,
                            .detail = &(const tu_pointwise){ mul_scalar_f32, mul_scalar_f64, mul_scalar_i64, NULL,
                                                             mul_scalar_c128 },
                            .gradient = mul_scalar_gradient,
                            .sample = mul_scalar_sample };
tt_tensor *tt_mul_scalar(tt_tensor *a, double number) {
    return with_number(&tu_operator_mul_scalar, a, number, false);
}
tt_tensor *tt_mul_scalar_(tt_tensor *a, double number) {
    return with_number(&tu_operator_mul_scalar, a, number, true);
}

TU_KERNEL1(div_scalar_f32, float, x / (float)p->number[0])
TU_KERNEL1(div_scalar_f64, double, x / p->number[0])
TU_KERNEL1(div_scalar_c128, tu_c128, x / p->number[0])
static void div_scalar_gradient(tu_gradient *g) {
    g->results[0] = tt_div_scalar(g->grads[0], g->params->number[0]);
}
static tt_tensor *div_scalar_sample(tu_sampler *s) {
    return tt_div_scalar(tu_normal(s, tt_shape(s->n, 3)), 3);
}
TU_OPERATOR(div_scalar) = { .name = "div_scalar",
                            .schema = "div_scalar(a, number) -> tensor",
                            .summary = "a / number; integers give f32",
                            .family = FAMILY,
                            .flags = TU_HAS_IN_PLACE,
                            TU_POINTWISE,
                            .detail = &(const tu_pointwise){ div_scalar_f32, div_scalar_f64, NULL, NULL,
                                                             div_scalar_c128, .to_float = true },
                            .gradient = div_scalar_gradient,
                            .sample = div_scalar_sample };
tt_tensor *tt_div_scalar(tt_tensor *a, double number) {
    return run_with(&tu_operator_div_scalar, 1, &a, number, false);
}
tt_tensor *tt_div_scalar_(tt_tensor *a, double number) {
    return run_with(&tu_operator_div_scalar, 1, &a, number, true);
}

TU_KERNEL1(pow_scalar_f32, float, powf(x, (float)p->number[0]))
TU_KERNEL1(pow_scalar_f64, double, pow(x, p->number[0]))
static void pow_scalar_gradient(tu_gradient *g) {
    double exponent = g->params->number[0];
    tt_tensor *x = tu_saved(g, TU_INPUT(0));
    g->results[0] =
        exponent == 0 ? tt_zeros_like(x) : tt_mul(g->grads[0], tt_mul_scalar(tt_pow_scalar(x, exponent - 1), exponent));
}
static tt_tensor *pow_scalar_sample(tu_sampler *s) {
    return tt_pow_scalar(tu_positive(s, tt_shape(s->n, 3)), 2.5);
}
TU_OPERATOR(pow_scalar) = { .name = "pow_scalar",
                            .schema = "pow_scalar(a, exponent) -> tensor",
                            .summary = "a to the power of a number",
                            .family = FAMILY,
                            TU_POINTWISE,
                            .detail = &(const tu_pointwise){ pow_scalar_f32, pow_scalar_f64, .to_float = true },
                            .gradient = pow_scalar_gradient,
                            .saves = { TU_INPUT(0) },
                            .sample = pow_scalar_sample };
tt_tensor *tt_pow_scalar(tt_tensor *a, double exponent) {
    if (exponent == 2)
        return tt_square(a);
    return run_with(&tu_operator_pow_scalar, 1, &a, exponent, false);
}
