/* SPDX-License-Identifier: Apache-2.0
 *
 * Who remembers calls, so that gradients can be computed: a table of functions that a room above fills in. This room
 * knows of a record of a call nothing but its address, and of the history of a tensor only whether there is one.
 */
#ifndef TU_TENSOR_HISTORY_H
#define TU_TENSOR_HISTORY_H

#include "tensor/operator.h"

typedef struct tu_historian {
    /* Ends the history of a tensor that goes. */
    void (*end)(tt_tensor *x);
    /* A new tensor shall get a gradient. */
    tutti_status (*require)(tt_tensor *x);

    /* Before an in-place operation on call->inputs[0] in gradient mode: may it be written? */
    tutti_status (*check_in_place)(const tu_call *call);
    /* Before the kernel, where a gradient may be wanted: a record of this call, with the inputs that its gradient needs
     * as they are now. NULL where no result can be differentiated. Follow with attach, or cancel. */
    tutti_status (*prepare)(const tu_call *call, void **record);
    /* After the kernel, and after the new version of what was written in place: hangs the record on the outputs. */
    tutti_status (*attach)(tu_call *call, void *record);
    void (*cancel)(void *record); /* NULL is none */

    /* A view made without recording (no gradient wanted): remembers the base where later in-place operations need
     * it. */
    tutti_status (*note_view)(tt_tensor *base, tt_tensor *view);
    /* A view whose base was changed in place by something that requires grad since requires grad too. Nothing happens
     * to other tensors. */
    void (*refresh)(tt_tensor *x);
    /* Makes a view whose base nobody else has a tensor of its own, and returns it. NULL is passed through. */
    tt_tensor *(*own)(tt_tensor *view);
    /* Whether x is a view of something that requires grad. */
    bool (*guards)(const tt_tensor *x);

    /* For gradient formulas: see tensor/operator.h. */
    tt_tensor *(*saved)(tu_gradient *gradient, uint32_t which);
    const tu_shape *(*input_shape)(const tu_gradient *gradient, int input);
    tt_tensor *(*input)(tu_gradient *gradient, int input);
    void (*through)(tu_gradient *gradient, tt_tensor *output, int count, tt_tensor *const *inputs);
    /* The gradient of a view, by where it lies in the memory of its base. */
    void (*of_view)(tu_gradient *gradient);
} tu_historian;

/* The one of this library. */
extern const tu_historian tu_historian_table;

#endif
