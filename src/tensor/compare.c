/* SPDX-License-Identifier: Apache-2.0
 *
 * Comparisons, logic, and choosing by a condition.
 */
#include "tensor/pointwise.h"

#define FAMILY "comparison"

#define COMPARISON(identifier, text, operator, complex_kernel)                                                         \
    TU_KERNEL2(identifier##_f32, float, (float)(x operator y))                                                         \
    TU_KERNEL2(identifier##_f64, double, (double)(x operator y))                                                       \
    TU_KERNEL2(identifier##_i64, int64_t, x operator y)                                                                \
    TU_KERNEL2(identifier##_u64, uint64_t, x operator y)                                                               \
    static tt_tensor *identifier##_sample(tu_sampler *s) {                                                             \
        tt_tensor *a = tu_normal(s, tt_shape(s->n, 3));                                                                \
        return tt_##identifier(a, tu_normal(s, tt_shape(3)));                                                          \
    }                                                                                                                  \
    TU_OPERATOR(identifier) = { .name = #identifier,                                                                   \
                                .schema = #identifier "(a, b) -> bool tensor",                                         \
                                .summary = text,                                                                       \
                                .family = FAMILY,                                                                      \
                                TU_POINTWISE,                                                                          \
                                .detail = &(const tu_pointwise){ identifier##_f32, identifier##_f64, identifier##_i64, \
                                                                 identifier##_u64, complex_kernel, .to_bool = true },  \
                                .sample = identifier##_sample };                                                       \
    tt_tensor *tt_##identifier(tt_tensor *a, tt_tensor *b) {                                                           \
        return tu_run2(&tu_operator_##identifier, a, b);                                                               \
    }

TU_KERNEL2(eq_c128, tu_c128, (double)(x == y))
TU_KERNEL2(ne_c128, tu_c128, (double)(x != y))
COMPARISON(eq, "a == b", ==, eq_c128)
COMPARISON(ne, "a != b", !=, ne_c128)
COMPARISON(lt, "a < b", <, NULL)
COMPARISON(le, "a <= b", <=, NULL)
COMPARISON(gt, "a > b", >, NULL)
COMPARISON(ge, "a >= b", >=, NULL)
COMPARISON(logical_and, "both are not zero", &&, NULL)
COMPARISON(logical_or, "one of them is not zero", ||, NULL)

#define TEST1(identifier, text, expression, integer)                                                                   \
    TU_KERNEL1(identifier##_f32, float, (float)(expression))                                                           \
    TU_KERNEL1(identifier##_f64, double, (double)(expression))                                                         \
    TU_KERNEL1(identifier##_i64, int64_t, (int64_t)(integer))                                                          \
    static tt_tensor *identifier##_sample(tu_sampler *s) {                                                             \
        return tt_##identifier(tu_normal(s, tt_shape(s->n, 3)));                                                       \
    }                                                                                                                  \
    TU_OPERATOR(identifier) = { .name = #identifier,                                                                   \
                                .schema = #identifier "(x) -> bool tensor",                                            \
                                .summary = text,                                                                       \
                                .family = FAMILY,                                                                      \
                                TU_POINTWISE,                                                                          \
                                .detail = &(const tu_pointwise){ identifier##_f32, identifier##_f64, identifier##_i64, \
                                                                 .to_bool = true },                                    \
                                .sample = identifier##_sample };                                                       \
    tt_tensor *tt_##identifier(tt_tensor *x) {                                                                         \
        return tu_run1(&tu_operator_##identifier, x);                                                                  \
    }
TEST1(logical_not, "x is zero", x == 0, x == 0)
TEST1(isnan, "x is not a number", x != x, x != x)

/* ---- where ---- */

TU_KERNEL3(where_f32, float, x != 0 ? y : z)
TU_KERNEL3(where_f64, double, x != 0 ? y : z)
TU_KERNEL3(where_i64, int64_t, x != 0 ? y : z)
TU_KERNEL3(where_c128, tu_c128, x != 0 ? y : z)
static void where_gradient(tu_gradient *g) {
    tt_tensor *condition = tu_saved(g, TU_INPUT(0)), *none = tt_number(0);
    if (g->needs[1])
        g->results[1] = tt_where(condition, g->grads[0], none);
    if (g->needs[2])
        g->results[2] = tt_where(condition, none, g->grads[0]);
}
static tt_tensor *where_sample(tu_sampler *s) {
    tt_tensor *condition = tu_mask(s, tt_shape(s->n, 3)), *a = tu_normal(s, tt_shape(3));
    return tt_where(condition, a, tu_normal(s, tt_shape(s->n, 1)));
}
TU_OPERATOR(where) = { .name = "where",
                       .schema = "where(condition, a, b) -> tensor",
                       .summary = "a where the condition is not zero, else b",
                       .family = FAMILY,
                       TU_POINTWISE,
                       .detail = &(const tu_pointwise){ where_f32, where_f64, where_i64, NULL, where_c128,
                                                        .condition = true },
                       .gradient = where_gradient,
                       .saves = { 0, TU_INPUT(0), TU_INPUT(0) },
                       .sample = where_sample };
tt_tensor *tt_where(tt_tensor *condition, tt_tensor *a, tt_tensor *b) {
    tt_tensor *inputs[] = { condition, a, b };
    tu_call call;
    tu_call_init(&call, &tu_operator_where, 3, inputs);
    return tu_run(&call);
}

static tt_tensor *masked_fill_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n, 3));
    return tt_masked_fill(x, tu_mask(s, tt_shape(3)), 7);
}
TU_OPERATOR(masked_fill) = { .name = "masked_fill",
                             .schema = "masked_fill(x, mask, value) -> tensor",
                             .summary = "value where the mask is set, else x",
                             .family = FAMILY,
                             .flags = TU_COMPOSITE,
                             .sample = masked_fill_sample };
tt_tensor *tt_masked_fill(tt_tensor *x, tt_tensor *mask, double value) {
    return tt_where(mask, tt_number(value), x);
}
