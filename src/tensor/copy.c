/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies: clone, contiguous, conversions, and writing into a tensor.
 */
#include <math.h>
#include <string.h>

#include "tensor/create.h"
#include "tensor/loop.h"
#include "tensor/operators.h"

tutti_status tu_copy_everywhere(tu_call *call) {
    return tu_copy_tensor(call->outputs[0], call->inputs[0]);
}

/* ---- clone ---- */

tutti_status tu_clone_shape(tu_call *call) {
    call->results[0] = tu_shape_of(call->inputs[0]);
    call->results[0].offset = 0;
    return tu_is_dense(call->inputs[0]) ? TUTTI_OK : tu_shape_contiguous(call->entry->name, &call->results[0]);
}

tt_tensor *tt_contiguous(tt_tensor *x) {
    if (tu_self()->pending == TUTTI_OK && x != NULL && x->magic == TU_MAGIC_ALIVE && x->flags & TU_CONTIGUOUS)
        return x;
    return tu_contiguous(x);
}

/* ---- to ---- */

tutti_status tu_to_shape(tu_call *call) {
    const tu_to_attributes *attributes = call->attributes;
    tutti_dtype dtype = attributes->dtype;
    if (!tu_dtype_valid(dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "%d is no dtype", (int)dtype);
    tutti_status status = tu_clone_shape(call);
    call->results[0].dtype = dtype;
    return status;
}
tt_tensor *tt_to(tt_tensor *x, tutti_dtype dtype) {
    if (tu_self()->pending == TUTTI_OK && x != NULL && x->magic == TU_MAGIC_ALIVE && x->dtype == dtype &&
        !(x->flags & TU_NUMBER))
        return x;
    return tu_to(x, dtype);
}

/* ---- copy_, fill_ ---- */

tutti_status tu_copy_into_shape(tu_call *call) {
    const tt_tensor *to = call->inputs[0], *from = call->inputs[1];
    tu_shape result;
    tutti_status status = tu_broadcast_sizes(call, 0, &result);
    if (status != TUTTI_OK)
        return status;
    if (result.ndim != to->ndim || memcmp(result.sizes, to->sizes, (size_t)to->ndim * sizeof to->sizes[0]) != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s does not fit into %s", tu_describe(from), tu_describe(to));
    return tu_shape_of_first(call);
}
tutti_status tu_copy_into_everywhere(tu_call *call) {
    return tu_copy_tensor(call->outputs[0], call->inputs[1]);
}

tutti_status tu_fill_everywhere(tu_call *call) {
    const tu_fill_attributes *attributes = call->attributes;
    return tu_fill(call->outputs[0], attributes->value);
}
tt_tensor *tt_zero_(tt_tensor *x) {
    return tt_fill_(x, 0);
}

/* ---- restride ---- */

tutti_status tu_restride_shape(tu_call *call) {
    const tu_restride_attributes *attributes = call->attributes;
    int dim;
    tu_shape *result = &call->results[0];
    tutti_status status = tu_wrap_dim("restride", attributes->dim, call->inputs[0]->ndim, &dim);
    if (status == TUTTI_OK)
        status = tu_shape_like_first(call);
    if (status != TUTTI_OK || result->ndim == 0)
        return status;
    int64_t stride = 1;
    for (int i = result->ndim - 1; i >= 0; i--) {
        if (i == dim)
            continue;
        result->strides[i] = stride;
        stride *= result->sizes[i] > 0 ? result->sizes[i] : 1;
    }
    result->strides[dim] = stride;
    return TUTTI_OK;
}
