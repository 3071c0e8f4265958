/* SPDX-License-Identifier: Apache-2.0
 *
 * Activations. Their gradients are kernels of their own, entries "…_backward", so that a training step walks each
 * tensor once.
 */
#include "tensor/pointwise.h"

#define FAMILY "activations"
#define DETAIL(...)                   \
    .detail = &(const tu_pointwise) { \
        __VA_ARGS__                   \
    }

/* An activation y = f(x), and its backward from (g, x) or (g, y). */
#define ACTIVATION(identifier, text, kept, ...)                                                     \
    static tt_tensor *identifier##_sample(tu_sampler *s) {                                          \
        return tt_##identifier(tu_normal(s, tt_shape(s->n, 3)));                                    \
    }                                                                                               \
    static tt_tensor *identifier##_backward(tt_tensor *g, tt_tensor *x);                            \
    static void identifier##_gradient(tu_gradient *gradient) {                                      \
        gradient->results[0] = identifier##_backward(gradient->grads[0], tu_saved(gradient, kept)); \
    }                                                                                               \
    TU_OPERATOR(identifier) = { .name = #identifier,                                                \
                                .schema = #identifier "(x) -> tensor",                              \
                                .summary = text,                                                    \
                                .family = FAMILY,                                                   \
                                TU_POINTWISE,                                                       \
                                DETAIL(identifier##_f32, identifier##_f64, .to_float = true),       \
                                .gradient = identifier##_gradient,                                  \
                                .saves = { kept },                                                  \
                                .sample = identifier##_sample,                                      \
                                __VA_ARGS__ };                                                      \
    tt_tensor *tt_##identifier(tt_tensor *x) {                                                      \
        return tu_run1(&tu_operator_##identifier, x);                                               \
    }
#define BACKWARD(identifier, second, ...)                                                                \
    static tt_tensor *identifier##_backward_sample(tu_sampler *s) {                                      \
        tt_tensor *g = tu_normal(s, tt_shape(s->n, 3));                                                  \
        return identifier##_backward(g, tu_normal(s, tt_shape(s->n, 3)));                                \
    }                                                                                                    \
    TU_OPERATOR(identifier##_backward) = { .name = #identifier "_backward",                              \
                                           .schema = #identifier "_backward(g, " second ") -> tensor",   \
                                           .summary = "g times the derivative of " #identifier,          \
                                           .family = FAMILY,                                             \
                                           TU_POINTWISE,                                                 \
                                           DETAIL(identifier##_backward_f32, identifier##_backward_f64), \
                                           .sample = identifier##_backward_sample,                       \
                                           __VA_ARGS__ };                                                \
    static tt_tensor *identifier##_backward(tt_tensor *g, tt_tensor *x) {                                \
        return tu_run2(&tu_operator_##identifier##_backward, g, x);                                      \
    }

/* ---- relu: needs its result only, so that it can run in place ---- */

TU_KERNEL1(relu_f32, float, x > 0 ? x : x != x ? x : 0.0f)
TU_KERNEL1(relu_f64, double, x > 0 ? x : x != x ? x : 0.0)
ACTIVATION(relu, "x where it is positive, else 0", TU_OUTPUT(0), .flags = TU_HAS_IN_PLACE)
tt_tensor *tt_relu_(tt_tensor *x) {
    return tu_run1_(&tu_operator_relu, x);
}
TU_KERNEL2(relu_backward_f32, float, y > 0 ? x : 0.0f)
TU_KERNEL2(relu_backward_f64, double, y > 0 ? x : 0.0)
static void relu_backward_gradient(tu_gradient *gradient) {
    gradient->results[0] = relu_backward(gradient->grads[0], tu_saved(gradient, TU_INPUT(1)));
}
BACKWARD(relu, "y", .gradient = relu_backward_gradient, .saves = { TU_INPUT(1) })

/* ---- sigmoid ---- */

TU_INLINE double sigmoid(double x) {
    return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}
TU_KERNEL1(sigmoid_f32, float, tu_sigmoidf(x))
TU_KERNEL1(sigmoid_f64, double, sigmoid(x))
ACTIVATION(sigmoid, "1 / (1 + exp(-x))", TU_OUTPUT(0), .flags = TU_HAS_IN_PLACE)
tt_tensor *tt_sigmoid_(tt_tensor *x) {
    return tu_run1_(&tu_operator_sigmoid, x);
}
TU_KERNEL2(sigmoid_backward_f32, float, x *y *(1.0f - y))
TU_KERNEL2(sigmoid_backward_f64, double, x *y *(1.0 - y))
static void sigmoid_backward_gradient(tu_gradient *gradient) {
    tt_tensor *g = gradient->grads[0], *y = tu_saved(gradient, TU_INPUT(1));
    if (gradient->needs[0])
        gradient->results[0] = sigmoid_backward(g, y);
    if (gradient->needs[1])
        gradient->results[1] =
            tt_mul(tt_mul(g, tu_saved(gradient, TU_INPUT(0))), tt_add_scalar(tt_mul_scalar(y, -2), 1));
}
BACKWARD(sigmoid, "y", .gradient = sigmoid_backward_gradient, .saves = { TU_INPUT(1), TU_INPUT(0) | TU_INPUT(1) })

/* ---- silu ---- */

TU_KERNEL1(silu_f32, float, x *tu_sigmoidf(x))
TU_KERNEL1(silu_f64, double, x *sigmoid(x))
ACTIVATION(silu, "x * sigmoid(x)", TU_INPUT(0))
TU_INLINE float silu_slopef(float x) {
    float s = tu_sigmoidf(x);
    return s * (1.0f + x * (1.0f - s));
}
TU_INLINE double silu_slope(double x) {
    double s = sigmoid(x);
    return s * (1.0 + x * (1.0 - s));
}
TU_KERNEL2(silu_backward_f32, float, x *silu_slopef(y))
TU_KERNEL2(silu_backward_f64, double, x *silu_slope(y))
BACKWARD(silu, "x", .outputs = 1)

/* ---- gelu ---- */

#define INV_SQRT_2PI 0.39894228040143267794
TU_KERNEL1(gelu_f32, float, x *tu_normal_cdff(x))
TU_KERNEL1(gelu_f64, double, 0.5 * x * erfc(-x * M_SQRT1_2))
ACTIVATION(gelu, "x * Phi(x), exact", TU_INPUT(0))
TU_KERNEL2(gelu_backward_f32, float, x *(tu_normal_cdff(y) + y * (float)INV_SQRT_2PI * tu_expf(-0.5f * y * y)))
TU_KERNEL2(gelu_backward_f64, double, x *(0.5 * erfc(-y * M_SQRT1_2) + y * INV_SQRT_2PI * exp(-0.5 * y * y)))
BACKWARD(gelu, "x", .outputs = 1)

#define GELU_A 0.7978845608028654 /* sqrt(2 / pi) */
#define GELU_B 0.044715
TU_KERNEL1(gelu_tanh_f32, float, 0.5f * x * (1.0f + tu_tanhf((float)GELU_A * (x + (float)GELU_B * x * x * x))))
TU_KERNEL1(gelu_tanh_f64, double, 0.5 * x * (1.0 + tanh(GELU_A * (x + GELU_B * x * x * x))))
ACTIVATION(gelu_tanh, "gelu by its tanh form", TU_INPUT(0))
TU_INLINE float gelu_tanh_slopef(float x) {
    float t = tu_tanhf((float)GELU_A * (x + (float)GELU_B * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * (float)GELU_A * (1.0f + 3.0f * (float)GELU_B * x * x);
}
TU_INLINE double gelu_tanh_slope(double x) {
    double t = tanh(GELU_A * (x + GELU_B * x * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * GELU_A * (1.0 + 3.0 * GELU_B * x * x);
}
TU_KERNEL2(gelu_tanh_backward_f32, float, x *gelu_tanh_slopef(y))
TU_KERNEL2(gelu_tanh_backward_f64, double, x *gelu_tanh_slope(y))
BACKWARD(gelu_tanh, "x", .outputs = 1)
