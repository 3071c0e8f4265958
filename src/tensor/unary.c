/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions of one tensor.
 */
#include "tensor/pointwise.h"

#define FAMILY "functions"

#define ENTRY(identifier, text, input, ...)                            \
    static tt_tensor *identifier##_sample(tu_sampler *s) {             \
        return tt_##identifier(tu_##input(s, tt_shape(s->n, 3)));      \
    }                                                                  \
    TU_OPERATOR(identifier) = { .name = #identifier,                   \
                                .schema = #identifier "(x) -> tensor", \
                                .summary = text,                       \
                                .family = FAMILY,                      \
                                TU_POINTWISE,                          \
                                .sample = identifier##_sample,         \
                                __VA_ARGS__ };                         \
    tt_tensor *tt_##identifier(tt_tensor *x) {                         \
        return tu_run1(&tu_operator_##identifier, x);                  \
    }
#define DETAIL(...)                   \
    .detail = &(const tu_pointwise) { \
        __VA_ARGS__                   \
    }
#define IN_PLACE(identifier)                           \
    tt_tensor *tt_##identifier##_(tt_tensor *x) {      \
        return tu_run1_(&tu_operator_##identifier, x); \
    }
#define GRADIENT(identifier, ...)                              \
    static void identifier##_gradient(tu_gradient *gradient) { \
        tt_tensor *g = gradient->grads[0];                     \
        gradient->results[0] = __VA_ARGS__;                    \
    }
#define X tu_saved(gradient, TU_INPUT(0))
#define Y tu_saved(gradient, TU_OUTPUT(0))

TU_KERNEL1(neg_f32, float, -x)
TU_KERNEL1(neg_f64, double, -x)
TU_KERNEL1(neg_i64, uint64_t, -x)
TU_KERNEL1(neg_c128, tu_c128, -x)
GRADIENT(neg, tt_neg(g))
ENTRY(neg, "-x", normal, .flags = TU_HAS_IN_PLACE, DETAIL(neg_f32, neg_f64, neg_i64, NULL, neg_c128),
      .gradient = neg_gradient)
IN_PLACE(neg)

TU_KERNEL1(abs_f32, float, fabsf(x))
TU_KERNEL1(abs_f64, double, fabs(x))
TU_KERNEL1(abs_i64, int64_t, x < 0 ? (int64_t) - (uint64_t)x : x)
TU_KERNEL1(abs_u64, uint64_t, x)
TU_KERNEL1(abs_c128, tu_c128, cabs(x))
/* Of complex x: g times the unit number in x's direction. */
static void abs_gradient(tu_gradient *gradient) {
    tt_tensor *g = gradient->grads[0], *x = X;
    if (x != NULL && tu_is_complex(x->dtype))
        gradient->results[0] = tt_mul(g, tt_div(x, tt_abs(x)));
    else
        gradient->results[0] = tt_mul(g, tt_sign(x));
}
ENTRY(abs, "the magnitude of x; of complex x a real tensor", normal,
      DETAIL(abs_f32, abs_f64, abs_i64, abs_u64, abs_c128, .to_real = true), .gradient = abs_gradient,
      .saves = { TU_INPUT(0) })

TU_KERNEL1(sign_f32, float, x > 0 ? 1.0f : x < 0 ? -1.0f : x != x ? x : 0.0f)
TU_KERNEL1(sign_f64, double, x > 0 ? 1.0 : x < 0 ? -1.0 : x != x ? x : 0.0)
TU_KERNEL1(sign_i64, int64_t, (x > 0) - (x < 0))
TU_KERNEL1(sign_u64, uint64_t, x > 0)
GRADIENT(sign, tt_zeros_like(g))
ENTRY(sign, "-1, 0 or 1", normal, DETAIL(sign_f32, sign_f64, sign_i64, sign_u64), .gradient = sign_gradient)

TU_KERNEL1(square_f32, float, x *x)
TU_KERNEL1(square_f64, double, x *x)
TU_KERNEL1(square_i64, uint64_t, x *x)
TU_KERNEL1(square_c128, tu_c128, x *x)
GRADIENT(square, tt_mul(g, tt_mul_scalar(tu_is_complex(gradient->grads[0]->dtype) ? tt_conj(X) : X, 2)))
ENTRY(square, "x * x", normal, DETAIL(square_f32, square_f64, square_i64, NULL, square_c128),
      .gradient = square_gradient, .saves = { TU_INPUT(0) })

TU_KERNEL1(reciprocal_f32, float, 1.0f / x)
TU_KERNEL1(reciprocal_f64, double, 1.0 / x)
GRADIENT(reciprocal, tt_neg(tt_mul(g, tt_square(Y))))
ENTRY(reciprocal, "1 / x", positive, DETAIL(reciprocal_f32, reciprocal_f64, .to_float = true),
      .gradient = reciprocal_gradient, .saves = { TU_OUTPUT(0) })

TU_KERNEL1(sqrt_f32, float, sqrtf(x))
TU_KERNEL1(sqrt_f64, double, sqrt(x))
GRADIENT(sqrt, tt_div(g, tt_mul_scalar(Y, 2)))
ENTRY(sqrt, "square root", positive, .flags = TU_HAS_IN_PLACE, DETAIL(sqrt_f32, sqrt_f64, .to_float = true),
      .gradient = sqrt_gradient, .saves = { TU_OUTPUT(0) })
IN_PLACE(sqrt)

TU_KERNEL1(rsqrt_f32, float, 1.0f / sqrtf(x))
TU_KERNEL1(rsqrt_f64, double, 1.0 / sqrt(x))
GRADIENT(rsqrt, tt_mul_scalar(tt_mul(g, tt_mul(Y, tt_square(Y))), -0.5))
ENTRY(rsqrt, "1 / square root", positive, DETAIL(rsqrt_f32, rsqrt_f64, .to_float = true), .gradient = rsqrt_gradient,
      .saves = { TU_OUTPUT(0) })

TU_KERNEL1(exp_f32, float, tu_expf(x))
TU_KERNEL1(exp_f64, double, exp(x))
GRADIENT(exp, tt_mul(g, Y))
ENTRY(exp, "e to the power x", normal, .flags = TU_HAS_IN_PLACE, DETAIL(exp_f32, exp_f64, .to_float = true),
      .gradient = exp_gradient, .saves = { TU_OUTPUT(0) })
IN_PLACE(exp)

/* In vectors where all of a stretch is normal and positive, else one by one. */
TU_CLONES static void log_f32(const void *const *in, void *out, int64_t count, const tu_params *p) {
    const float *a = in[0];
    float *o = out;
    (void)p;
    for (int64_t first = 0; first < count; first += 256) {
        int64_t end = first + 256 < count ? first + 256 : count;
        int odd = 0;
        for (int64_t i = first; i < end; i++)
            odd |= !(a[i] >= 1.17549435e-38f && a[i] <= 3.4e38f);
        if (odd) {
            for (int64_t i = first; i < end; i++)
                o[i] = logf(a[i]);
        } else {
            for (int64_t i = first; i < end; i++)
                o[i] = tu_logf_normal(a[i]);
        }
    }
}
TU_KERNEL1(log_f64, double, log(x))
GRADIENT(log, tt_div(g, X))
ENTRY(log, "natural logarithm", positive, DETAIL(log_f32, log_f64, .to_float = true), .gradient = log_gradient,
      .saves = { TU_INPUT(0) })

#define SIN_KERNEL(name, quarter, exact)                                                              \
    TU_CLONES static void name(const void *const *in, void *out, int64_t count, const tu_params *p) { \
        const float *a = in[0];                                                                       \
        float *o = out;                                                                               \
        (void)p;                                                                                      \
        for (int64_t first = 0; first < count; first += 256) {                                        \
            int64_t end = first + 256 < count ? first + 256 : count;                                  \
            int odd = 0;                                                                              \
            for (int64_t i = first; i < end; i++)                                                     \
                odd |= !(fabsf(a[i]) < 8192.0f);                                                      \
            if (odd) {                                                                                \
                for (int64_t i = first; i < end; i++)                                                 \
                    o[i] = exact(a[i]);                                                               \
            } else {                                                                                  \
                for (int64_t i = first; i < end; i++)                                                 \
                    o[i] = tu_sincosf(a[i], quarter);                                                 \
            }                                                                                         \
        }                                                                                             \
    }
SIN_KERNEL(sin_f32, 0, sinf)
SIN_KERNEL(cos_f32, 1, cosf)
TU_KERNEL1(sin_f64, double, sin(x))
TU_KERNEL1(cos_f64, double, cos(x))
GRADIENT(sin, tt_mul(g, tt_cos(X)))
GRADIENT(cos, tt_neg(tt_mul(g, tt_sin(X))))
ENTRY(sin, "sine", normal, DETAIL(sin_f32, sin_f64, .to_float = true), .gradient = sin_gradient,
      .saves = { TU_INPUT(0) })
ENTRY(cos, "cosine", normal, DETAIL(cos_f32, cos_f64, .to_float = true), .gradient = cos_gradient,
      .saves = { TU_INPUT(0) })

TU_KERNEL1(tanh_f32, float, tu_tanhf(x))
TU_KERNEL1(tanh_f64, double, tanh(x))
GRADIENT(tanh, tt_sub(g, tt_mul(g, tt_square(Y))))
ENTRY(tanh, "hyperbolic tangent", normal, .flags = TU_HAS_IN_PLACE, DETAIL(tanh_f32, tanh_f64, .to_float = true),
      .gradient = tanh_gradient, .saves = { TU_OUTPUT(0) })
IN_PLACE(tanh)

TU_KERNEL1(erf_f32, float, erff(x))
TU_KERNEL1(erf_f64, double, erf(x))
GRADIENT(erf, tt_mul(g, tt_mul_scalar(tt_exp(tt_neg(tt_square(X))), 1.12837916709551257)))
ENTRY(erf, "error function", normal, DETAIL(erf_f32, erf_f64, .to_float = true), .gradient = erf_gradient,
      .saves = { TU_INPUT(0) })

#define ROUNDING(identifier, text)                                                                \
    TU_KERNEL1(identifier##_i64, int64_t, x)                                                      \
    GRADIENT(identifier, tt_zeros_like(g))                                                        \
    ENTRY(identifier, text, normal, DETAIL(identifier##_f32, identifier##_f64, identifier##_i64), \
          .gradient = identifier##_gradient)
TU_KERNEL1(floor_f32, float, floorf(x))
TU_KERNEL1(floor_f64, double, floor(x))
ROUNDING(floor, "the next integer below")
TU_KERNEL1(ceil_f32, float, ceilf(x))
TU_KERNEL1(ceil_f64, double, ceil(x))
ROUNDING(ceil, "the next integer above")
TU_KERNEL1(round_f32, float, rintf(x))
TU_KERNEL1(round_f64, double, rint(x))
ROUNDING(round, "the nearest integer, halves to even")

TU_KERNEL1(conj_f32, float, x)
TU_KERNEL1(conj_f64, double, x)
TU_KERNEL1(conj_i64, int64_t, x)
TU_KERNEL1(conj_c128, tu_c128, conj(x))
GRADIENT(conj, tt_conj(g))
ENTRY(conj, "complex conjugate", normal, DETAIL(conj_f32, conj_f64, conj_i64, NULL, conj_c128),
      .gradient = conj_gradient)

/* ---- clamp ---- */

TU_KERNEL1(clamp_f32, float,
           x<(float)p->number[0] ? (float)p->number[0] : x>(float) p->number[1] ? (float)p->number[1] : x)
TU_KERNEL1(clamp_f64, double, x<p->number[0] ? p->number[0] : x> p->number[1] ? p->number[1] : x)
TU_KERNEL1(clamp_i64, int64_t,
           (double)x<p->number[0] ? (int64_t)p->number[0] : (double)x> p->number[1] ? (int64_t)p->number[1] : x)
static void clamp_gradient(tu_gradient *gradient) {
    tt_tensor *x = X;
    tt_tensor *inside = tt_logical_and(tt_ge(x, tt_number(gradient->params->number[0])),
                                       tt_le(x, tt_number(gradient->params->number[1])));
    gradient->results[0] = tt_where(inside, gradient->grads[0], tt_number(0));
}
static tt_tensor *clamp_sample(tu_sampler *s) {
    return tt_clamp(tu_normal(s, tt_shape(s->n, 3)), -0.7, 0.9);
}
TU_OPERATOR(clamp) = { .name = "clamp",
                       .schema = "clamp(x, low, high) -> tensor",
                       .summary = "x, kept within [low, high]",
                       .family = FAMILY,
                       .flags = TU_HAS_IN_PLACE,
                       TU_POINTWISE,
                       DETAIL(clamp_f32, clamp_f64, clamp_i64),
                       .gradient = clamp_gradient,
                       .saves = { TU_INPUT(0) },
                       .sample = clamp_sample };
static tt_tensor *clamp(tt_tensor *x, double low, double high, bool in_place) {
    tu_call call;
    tu_call_init(&call, &tu_operator_clamp, 1, &x);
    call.params.number[0] = low;
    call.params.number[1] = high;
    call.in_place = in_place;
    return tu_run(&call);
}
tt_tensor *tt_clamp(tt_tensor *x, double low, double high) {
    return clamp(x, low, high, false);
}
tt_tensor *tt_clamp_(tt_tensor *x, double low, double high) {
    return clamp(x, low, high, true);
}
