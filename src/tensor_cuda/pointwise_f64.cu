/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise operators on f64.
 */
#define SUFFIX f64
#include "pointwise.cuh"

#define TYPE double
#define ATTRIBUTE(number) (number)
#define OPERATOR(...)
#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    EXPRESSION(name, f64, arguments, expression)                                         \
    ANY_KERNEL(name, f64)                                                                \
    DENSE_KERNEL(name, f64, f64)
#include "tensor/operators.def"
