/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise operators: the shape rule and the driver that all of them share, and the kernels made from their
 * expressions.
 */
#ifndef TU_TENSOR_POINTWISE_H
#define TU_TENSOR_POINTWISE_H

#include "tensor/loop.h"
#include "tensor/operators.h"

/* One operator's kernels for integers and complex numbers; NULL: not defined for them. Those for floats, which every
 * operator has, are in the table of the process's level (tensor/kernel/kernels.h). */
typedef struct tu_pointwise_kernels {
    tu_kernel *i64, *u64, *c128;
} tu_pointwise_kernels;

extern const tu_pointwise_kernels tu_pointwise_table[TU_POINTWISE_COUNT];

tu_shape_rule tu_pointwise_shape;
tu_device_kernel tu_pointwise_cpu, tu_pointwise_cuda;
/* The type that the call is computed in. */
tutti_dtype tu_pointwise_compute(const tu_call *call);

/* The type that a call computes in, after its shape rule; and an operator's kernel for such a type, NULL where it is
 * not defined for it. */
tutti_dtype tu_pointwise_compute(const tu_call *call);
tu_kernel *tu_pointwise_kernel(const tu_operator *entry, tutti_dtype compute);

#endif
