/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise operators on f32, and on narrower floats, which are computed in it.
 */
#define SUFFIX f32
#include "pointwise.cuh"

#define TYPE float
#define ATTRIBUTE(number) ((float)(number))
#define OPERATOR(...)
#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    EXPRESSION(name, f32, arguments, expression)                                         \
    ANY_KERNEL(name, f32)                                                                \
    DENSE_KERNEL(name, f32, f32)                                                         \
    DENSE_KERNEL(name, f32, bf16)                                                        \
    DENSE_KERNEL(name, f32, f16)
#include "tensor/operators.def"
