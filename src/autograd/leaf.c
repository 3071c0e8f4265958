/* SPDX-License-Identifier: Apache-2.0
 *
 * Leaves: asking for gradients, parameters, the gradient itself, and gradient mode.
 */
#include <string.h>

#include "autograd/node.h"
#include "autograd/operators.h"

/* The tensor to ask, which is x or stands for it; NULL with the pending error set. A view learns here that its base has
 * joined the graph. */
static tt_tensor *live(const char *who, const tt_tensor *x) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check(who, "x", x)) != TUTTI_OK)
        return NULL;
    tt_tensor *asked = tu_stand_in(x);
    if (asked == NULL)
        tu_pending_take(TUTTI_ERROR_MEMORY);
    else
        tu_history_refresh(asked);
    return asked;
}

bool tt_grad_mode(bool on) {
    tu_thread *self = tu_self();
    bool was = !self->grad_disabled;
    self->grad_disabled = !on;
    return was;
}

bool tt_grad_enabled(void) {
    return !tu_self()->grad_disabled;
}

bool tt_requires_grad(const tt_tensor *x) {
    return (x = live("requires_grad", x)) != NULL && (x->flags & TU_REQUIRES_GRAD) != 0;
}

bool tt_is_leaf(const tt_tensor *x) {
    return (x = live("is_leaf", x)) != NULL && !tu_history_has_node(x);
}

/* Only floats and complex numbers have gradients. */
static tutti_status check_dtype(const tu_call *call, bool wants_gradient) {
    const tt_tensor *x = call->inputs[0];
    if (!wants_gradient || tu_is_float(x->dtype) || tu_is_complex(x->dtype))
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_TYPE,
                         "only tensors of floating point and complex dtype can require gradients, not %s",
                         tu_describe(x));
}

tutti_status tu_require_grad_shape(tu_call *call) {
    const tu_require_grad_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    if (!attributes->on && x->history != NULL && tu_history_at(x)->node != NULL)
        return tu_call_error(call, TUTTI_ERROR_STATE,
                             "%s was computed and has a history; only a leaf can be told not to require grad. "
                             "tt_detach gives one without",
                             tu_describe(x));
    return check_dtype(call, attributes->on);
}

tutti_status tu_require_grad_cpu(tu_call *call) {
    const tu_require_grad_attributes *attributes = call->attributes;
    tt_tensor *x = call->inputs[0];
    if (attributes->on)
        return tu_history_require(x);
    x->flags = (uint8_t)(x->flags & ~TU_REQUIRES_GRAD);
    return TUTTI_OK;
}

tt_tensor *tu_require_grad_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0));
    return tt_detach(tt_require_grad(x, true));
}

tt_tensor *tt_require_grad(tt_tensor *x, bool on) {
    return tu_require_grad(x, on, NULL) ? x : NULL;
}

tutti_status tu_parameter_shape(tu_call *call) {
    const tu_parameter_attributes *attributes = call->attributes;
    tutti_status status = check_dtype(call, attributes->requires_grad);
    return status == TUTTI_OK ? tu_shape_of_first(call) : status;
}

tutti_status tu_parameter_cpu(tu_call *call) {
    const tu_parameter_attributes *attributes = call->attributes;
    call->outputs[0]->flags |= TU_IS_PARAMETER | (attributes->requires_grad ? TU_REQUIRES_GRAD : 0);
    return TUTTI_OK;
}

tt_tensor *tt_parameter(tt_tensor *x, bool requires_grad) {
    return tu_parameter(x, requires_grad);
}

bool tt_is_parameter(const tt_tensor *x) {
    return (x = live("is_parameter", x)) != NULL && (x->flags & TU_IS_PARAMETER) != 0;
}

tt_tensor *tt_grad(const tt_tensor *x) {
    tt_tensor *asked = live("grad", x);
    if (asked == NULL || !tu_note_asked(asked, TU_ASKED_GRADIENT) || asked->history == NULL)
        return NULL;
    pthread_mutex_lock(&tu_history_at(asked)->grad_lock);
    tt_tensor *grad = tu_tensor_hold(tu_history_at(asked)->grad);
    pthread_mutex_unlock(&tu_history_at(asked)->grad_lock);
    return tu_scope_own(grad);
}

/* Puts `grad`, whose reference goes with it, in the place of the gradient that was there. */
static void replace_grad(tu_history *history, tt_tensor *grad) {
    pthread_mutex_lock(&history->grad_lock);
    tt_tensor *before = history->grad;
    history->grad = grad;
    pthread_mutex_unlock(&history->grad_lock);
    tu_tensor_drop(before);
}

static tutti_status check_grad(tt_tensor *x, tt_tensor *grad) {
    tutti_status status = tu_tensor_check("set_grad", "grad", grad);
    if (status != TUTTI_OK)
        return status;
    if (!tu_same_sizes(x, grad) || x->dtype != grad->dtype || x->device != grad->device)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "set_grad: %s cannot be the gradient of %s: shape, dtype and device must be the same",
                        tu_describe(grad), tu_describe(x));
    if (tu_keeps_alive(grad, x))
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "set_grad: %s is, or holds, the tensor whose gradient it would be; they would keep each other "
                        "alive for ever. Give a tt_clone of it",
                        tu_describe(grad));
    return TUTTI_OK;
}

tutti_status tu_set_grad_shape(tu_call *call) {
    return call->inputs[1] != NULL ? check_grad(call->inputs[0], call->inputs[1]) : TUTTI_OK;
}

tutti_status tu_set_grad_cpu(tu_call *call) {
    tt_tensor *x = call->inputs[0], *grad = call->inputs[1];
    tu_history *history = grad != NULL ? tu_history_of(x) : x->history;
    if (history != NULL)
        replace_grad(history, tu_tensor_hold(grad));
    return history != NULL || grad == NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}

tt_tensor *tu_set_grad_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0));
    tt_set_grad(x, tt_mul_scalar(x, 2));
    return tt_mul(x, tt_grad(x));
}

void tt_set_grad(tt_tensor *x, tt_tensor *grad) {
    tu_set_grad(x, grad, NULL);
}

/* A gradient lies as its leaf does, where that is dense. */
tutti_status tu_grad_of_shape(tu_call *call) {
    tu_shape *result = &call->results[0];
    *result = tu_shape_of(call->inputs[0]);
    result->offset = 0;
    return tu_is_dense(call->inputs[0]) ? TUTTI_OK : tu_shape_contiguous("grad_of", result);
}

tutti_status tu_grad_of_everywhere(tu_call *call) {
    tt_tensor *x = call->inputs[0], *made = call->outputs[0];
    tu_history *history = x->history;
    tt_tensor *grad = NULL;
    if (history != NULL) {
        pthread_mutex_lock(&history->grad_lock);
        grad = tu_tensor_hold(history->grad);
        pthread_mutex_unlock(&history->grad_lock);
    }
    if (grad == NULL)
        return tu_call_error(call, TUTTI_ERROR_STATE, "%s has no gradient", tu_describe(x));
    bool same = grad->offset == 0 && memcmp(grad->strides, made->strides, (size_t)x->ndim * sizeof x->strides[0]) == 0;
    if (same)
        tu_tensor_move(made, tu_storage_hold(grad->storage));
    tu_tensor_drop(grad);
    return same ? TUTTI_OK
                : tu_call_error(call, TUTTI_ERROR_STATE, "the gradient of %s has another layout than it",
                                tu_describe(x));
}

tt_tensor *tu_grad_of_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0));
    tt_set_grad(x, tt_contiguous(tt_mul_scalar(x, 2)));
    return tt_mul(x, tt_grad(x));
}

void tt_retain_grad(tt_tensor *x) {
    if ((x = live("retain_grad", x)) == NULL)
        return;
    if (!(x->flags & TU_REQUIRES_GRAD)) {
        tu_fail(TUTTI_ERROR_STATE, "retain_grad: %s does not require grad, so there is none to keep", tu_describe(x));
        return;
    }
    tu_node *node;
    if (tu_pending_take(tu_history_node(x, &node)) != TUTTI_OK || node == NULL)
        return; /* a leaf keeps its gradient anyway */
    tu_node_hooks *hooks = tu_node_hooks_of(node);
    if (hooks == NULL) {
        tu_pending_take(TUTTI_ERROR_MEMORY);
        return;
    }
    hooks->retained[tu_history_at(x)->output] = x;
    tu_history_at(x)->retains_grad = true;
}

tt_node *tt_grad_fn(tt_tensor *x) {
    tu_node *node;
    if ((x = live("grad_fn", x)) == NULL || tu_pending_take(tu_history_node(x, &node)) != TUTTI_OK)
        return NULL;
    return (tt_node *)(void *)node;
}
