/* SPDX-License-Identifier: Apache-2.0
 *
 * The rows of this room's operators.def, as entries of the table and as public functions.
 */
#include "tensor/operators.h"

#include <tutti/autograd.h>

#include "tensor/pointwise.h"

#define TU_DTYPES_FLOATS "floats"
#define TU_DTYPES_NUMBERS "numbers"
#define TU_DTYPES_ALL "numbers, complex"
#define TU_DTYPES_FLOATS_COMPLEX "floats, complex"

#define OPERATOR(form, name, family, summary, arguments, properties) \
    TU_ROW(form, name, family, summary, arguments, properties)
#define POINTWISE(form, name, family, summary, arguments, types, formula, properties)                               \
    TU_ROW(form, name, family, summary, arguments, properties, .dtypes = TU_DTYPES_##types, .expression = #formula, \
           .pointwise = TU_POINTWISE_##name, .shape = tu_pointwise_shape,                                           \
           .kernels = { tu_pointwise_cpu, tu_pointwise_cuda })
#include "tensor/operators.def"
