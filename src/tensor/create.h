/* SPDX-License-Identifier: Apache-2.0
 *
 * What making tensors shares with random numbers.
 */
#ifndef TU_TENSOR_CREATE_H
#define TU_TENSOR_CREATE_H

#include "tensor/operator.h"

/* What the shape rules of creation share. */
tutti_status tu_create_shape(tu_call *call, tt_dims shape, tutti_dtype dtype, tutti_device device);
/* Around the call: the options with defaults filled in, false with the pending error set; and the options other than
 * the device put into effect. */
bool tu_create_begin(const tt_options *options, tt_options *full);
tt_tensor *tu_create_end(tt_tensor *x, const tt_options *full);
/* Fills a tensor that is ready; no version, no history. Cannot fail on the CPU. */
tutti_status tu_fill(tt_tensor *x, double value);
/* Options of what the host reads and writes itself. */
#define TU_OF_HOST (&(tt_options){ .size = sizeof(tt_options), .device = TUTTI_CPU })

#endif
