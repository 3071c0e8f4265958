/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of pointwise operators for integers and complex numbers: each row's expression, once per compute type
 * that it is defined for. Those for floats are in tensor/kernel/pointwise.c.
 */
#include "tensor/pointwise.h"

#include "tensor/dialect.h"

/* A whole number in reach of an i64; what is beyond goes to the ends, and NaN to 0. */
TU_LANE int64_t whole(double number) {
    return number >= 0x1p63 ? INT64_MAX : number < -0x1p63 ? INT64_MIN : number != number ? 0 : (int64_t)number;
}

/* The variables of an expression: an input's element; an attribute, which is real also among complex numbers. */
#define TU_VARIABLE(name) const TYPE name = ((const TYPE *)in[input++])[i];
#define TU_CONSTANT(name) const REAL name = TU_AS_REAL(own.name);

#define KERNEL(suffix, name, arguments, expression)                                                        \
    static void name##_##suffix(const void *const *in, void *out, int64_t count, const void *attributes) { \
        const tu_##name##_attributes own = *(const tu_##name##_attributes *)attributes;                    \
        TYPE *to = out;                                                                                    \
        (void)own;                                                                                         \
        for (int64_t i = 0; i < count; i++) {                                                              \
            int input = 0;                                                                                 \
            TU_EACH(TU_LOAD, , TU_NOTHING, arguments)                                                      \
            (void)input;                                                                                   \
            to[i] = expression;                                                                            \
        }                                                                                                  \
    }
#define OPERATOR(...)
#define KERNEL_WITH(...) KERNEL(__VA_ARGS__)

#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    COMPLEX_##types(KERNEL_WITH(SUFFIX, name, arguments, expression))
#define COMPLEX_FLOATS(...)
#define COMPLEX_NUMBERS(...)
#define COMPLEX_ALL(...) __VA_ARGS__
#define COMPLEX_FLOATS_COMPLEX(...) __VA_ARGS__
#define TU_AS_REAL(number) ((REAL)(number))
#define TYPE tu_c128
#define REAL double
#define SUFFIX c128
#include "tensor/operators.def"
#undef TYPE
#undef REAL
#undef SUFFIX
#undef POINTWISE
#undef TU_AS_REAL

#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    INTEGER_##types(KERNEL_WITH(SUFFIX, name, arguments, expression))
#define INTEGER_FLOATS(...)
#define INTEGER_NUMBERS(...) __VA_ARGS__
#define INTEGER_ALL(...) __VA_ARGS__
#define INTEGER_FLOATS_COMPLEX(...)
#define TU_AS_REAL(number) ((REAL)whole(number))
#define TYPE int64_t
#define REAL int64_t
#define SUFFIX i64
#include "tensor/operators.def"
#undef TYPE
#undef REAL
#undef SUFFIX
#define TYPE uint64_t
#define REAL uint64_t
#define SUFFIX u64
#include "tensor/operators.def"
#undef POINTWISE

#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    [TU_POINTWISE_##name] = { INTEGER_##types(name##_i64, name##_u64, ) COMPLEX_##types(.c128 = name##_c128) },
const tu_pointwise_kernels tu_pointwise_table[TU_POINTWISE_COUNT] = {
#include "tensor/operators.def"
};
