/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of pointwise operators for floats, of one instruction set: each row's expression of operators.def on
 * registers, and once more on the part of a register that is left at the end. And several operators at once, with what
 * lies between them in registers.
 */
#include TU_LEVEL_HEADER
#include "tensor/dialect.h"
#include "tensor/kernel/kernels.h"
#include "tensor/operators.h"

/* The variables of an expression: an input's elements, from memory or given; an attribute in all lanes. */
#define TU_VARIABLE(name)                                                                   \
    const VEC name = given != NULL ? given[input] : GET((const TYPE *)in[input] + i, part); \
    input++;
#define TU_CONSTANT(name) const VEC name = NUMBER(own->name);

#define GET TU_MEANING(get)
#define PUT TU_MEANING(put)
#define DEFINE_GET_PUT(suffix, type, lanes)                                                \
    TU_LANE vec_##suffix tu_get_##suffix(const type *from, int64_t part) {                 \
        return part == lanes ? tu_load_##suffix(from) : tu_load_part_##suffix(from, part); \
    }                                                                                      \
    TU_LANE void tu_put_##suffix(type *to, vec_##suffix x, int64_t part) {                 \
        if (part == lanes)                                                                 \
            tu_store_##suffix(to, x);                                                      \
        else                                                                               \
            tu_store_part_##suffix(to, x, part);                                           \
    }
DEFINE_GET_PUT(f32, float, TU_LANES_F32)
DEFINE_GET_PUT(f64, double, TU_LANES_F64)

/* A name for the whole library: of a float and this file's level. */
#define TU_OF_LEVEL(name, suffix) TU_OF_LEVEL_WITH(name, suffix, TU_LEVEL)
#define TU_OF_LEVEL_WITH(name, suffix, level) TU_OF_LEVEL_JOIN(name, suffix, level)
#define TU_OF_LEVEL_JOIN(name, suffix, level) name##_##suffix##_##level

#define KERNEL(suffix, name, arguments, expression)                                                        \
    TU_LANE VEC name##_value_##suffix(const void *const *in, int64_t i, int64_t part, const VEC *given,    \
                                      const tu_##name##_attributes *own) {                                 \
        int input = 0;                                                                                     \
        (void)own;                                                                                         \
        TU_EACH(TU_LOAD, , TU_NOTHING, arguments)                                                          \
        (void)input;                                                                                       \
        return expression;                                                                                 \
    }                                                                                                      \
    static void name##_##suffix(const void *const *in, void *out, int64_t count, const void *attributes) { \
        const tu_##name##_attributes own = *(const tu_##name##_attributes *)attributes;                    \
        TYPE *to = out;                                                                                    \
        int64_t i = 0;                                                                                     \
        for (; i + LANES <= count; i += LANES)                                                             \
            PUT(to + i, name##_value_##suffix(in, i, LANES, NULL, &own), LANES);                           \
        if (i < count)                                                                                     \
            PUT(to + i, name##_value_##suffix(in, i, count - i, NULL, &own), count - i);                   \
    }
#define KERNEL_WITH(...) KERNEL(__VA_ARGS__)
#define OPERATOR(...)
#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    KERNEL_WITH(SUFFIX, name, arguments, expression)

#define TYPE float
#define VEC vec_f32
#define LANES TU_LANES_F32
#define SUFFIX f32
#include "tensor/operators.def"
/* behind them */
#include "tensor/kernel/joined_body.h"
#undef TYPE
#undef VEC
#undef LANES
#undef SUFFIX
#define TYPE double
#define VEC vec_f64
#define LANES TU_LANES_F64
#define SUFFIX f64
#include "tensor/operators.def"
/* behind them */
#include "tensor/kernel/joined_body.h"
#undef POINTWISE

/* The tables, by number. */
#define TABLE(suffix) TU_OF_LEVEL(tu_pointwise, suffix)
extern tu_float_kernel *const TABLE(f32)[TU_POINTWISE_COUNT], *const TABLE(f64)[TU_POINTWISE_COUNT];

#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    [TU_POINTWISE_##name] = name##_f32,
tu_float_kernel *const TABLE(f32)[TU_POINTWISE_COUNT] = {
#include "tensor/operators.def"
};
#undef POINTWISE
#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    [TU_POINTWISE_##name] = name##_f64,
tu_float_kernel *const TABLE(f64)[TU_POINTWISE_COUNT] = {
#include "tensor/operators.def"
};
