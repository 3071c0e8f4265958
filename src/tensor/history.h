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

/* Before the kernel, where a gradient may be wanted: the node of this call, with the inputs that its gradient needs as
 * they are now. NULL where no result can be differentiated. Follow with tu_history_attach, or tu_history_cancel. */
struct tu_node;
tutti_status tu_history_prepare(const tu_call *call, struct tu_node **node);
/* After the kernel, and after the new version of what was written in place: hangs the node on the outputs. */
tutti_status tu_history_attach(tu_call *call, struct tu_node *node);
void tu_history_cancel(struct tu_node *node);

/* A view made without recording (no gradient wanted): remembers the base where later in-place operations need it. */
tutti_status tu_history_note_view(tt_tensor *base, tt_tensor *view);

/* A view whose base was changed in place by something that requires grad since requires grad too. Nothing happens to
 * other tensors. */
void tu_history_refresh(tt_tensor *x);

#endif
