/* SPDX-License-Identifier: Apache-2.0
 *
 * What tensors and the operator runner ask of autograd: declared here, below, and implemented in autograd/.
 */
#ifndef TU_TENSOR_HISTORY_H
#define TU_TENSOR_HISTORY_H

#include "tensor/operator.h"

/* Frees a tensor's history with the tensor. */
void tu_history_free(tt_tensor *x);

/* Before an in-place operation on call->inputs[0] in gradient mode: may it be written? */
tutti_status tu_history_check_in_place(const tu_call *call);

/* After the kernel: hangs a node on the outputs. `view` and in-place forms are told by call. The outputs are given with
 * fresh handles, except in place. */
tutti_status tu_history_record(tu_call *call);

/* A view made without recording (no gradient wanted): remembers the base where later in-place operations need it. */
tutti_status tu_history_note_view(tt_tensor *base, tt_tensor *view);

/* A view whose base was changed in place by something that requires grad since requires grad too. */
void tu_history_refresh(tt_tensor *x);

#endif
