/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise operators on integers and bool: computed in i64, or in u64.
 */
#define SUFFIX i64
#include "pointwise.cuh"

#define ATTRIBUTE(number) ((TYPE)whole_number(number))
#define OPERATOR(...)
#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    WHOLE_##types(EXPRESSION_WITH(name, SUFFIX, arguments, expression) ANY_KERNEL_WITH(name, SUFFIX))
#define WHOLE_FLOATS(...)
#define WHOLE_FLOATS_COMPLEX(...)
#define WHOLE_NUMBERS(...) __VA_ARGS__
#define WHOLE_ALL(...) __VA_ARGS__
#define TYPE int64_t
#include "tensor/operators.def"
#undef TYPE
#undef SUFFIX
#define TYPE uint64_t
#define SUFFIX u64
#include "tensor/operators.def"
