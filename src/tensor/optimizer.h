/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of optimizer steps, for the rows in nn/.
 */
#ifndef TU_TENSOR_OPTIMIZER_H
#define TU_TENSOR_OPTIMIZER_H

#include "tensor/operator.h"

/* Inputs: the parameter, its gradient, then the optimizer's state (entries may be NULL). All have one shape and one
 * floating dtype. */
tutti_status tu_step_shape(tu_call *call);
/* Numbers: learning rate, momentum, weight decay. State: velocity or NULL. */
tutti_status tu_sgd_cpu(tu_call *call);
/* Numbers: learning rate, beta1, beta2, epsilon. Integers: step, and the bits of the weight decay. State: both
 * moments. */
tutti_status tu_adamw_cpu(tu_call *call);

#endif
