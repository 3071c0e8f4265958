/* SPDX-License-Identifier: Apache-2.0
 *
 * What making tensors shares with random numbers.
 */
#ifndef TU_TENSOR_CREATE_H
#define TU_TENSOR_CREATE_H

#include "tensor/operator.h"

/* The shape rule of creation: dims[0], integer[0] the dtype, integer[1] the device. */
tutti_status tu_create_shape(tu_call *call);
/* Sets those, runs, and applies the other options. */
tt_tensor *tu_create(tu_call *call, tt_dims shape, tutti_dtype dtype, const tt_options *options);
/* Fills a cpu tensor that is ready; no version, no history. */
void tu_fill(tt_tensor *x, double value);

#endif
