/* SPDX-License-Identifier: Apache-2.0
 *
 * The history of tensors: recording what an operator did, views and their bases, and what in-place changes do to both.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/node.h"

tu_history *tu_history_of(tt_tensor *x) {
    if (x->history == NULL) {
        x->history = calloc(1, sizeof *x->history);
        if (x->history == NULL)
            tu_error_memory("a tensor's history", sizeof *x->history);
    }
    return x->history;
}

/* The node forgets a tensor that wanted its gradient kept. */
static void unretain(tu_history *history) {
    if (history->retains_grad && history->node != NULL && history->node->hooks != NULL)
        history->node->hooks->retained[history->output] = NULL;
}

void tu_history_free(tt_tensor *x) {
    tu_history *history = x->history;
    x->history = NULL;
    unretain(history);
    tu_tensor_drop(history->grad);
    tu_node_drop(history->node);
    tu_tensor_drop(history->base);
    tu_hook_list_free(&history->tensor_hooks);
    tu_hook_list_free(&history->accumulate_hooks);
    free(history);
}

tutti_status tu_history_set(tt_tensor *x, tu_node *node, int output) {
    tu_history *history = tu_history_of(x);
    if (history == NULL)
        return TUTTI_ERROR_MEMORY;
    bool retains = history->retains_grad;
    if (retains) { /* moves to the new node */
        tu_node_hooks *hooks = tu_node_hooks_of(node);
        if (hooks == NULL)
            return TUTTI_ERROR_MEMORY;
        unretain(history);
        hooks->retained[output] = x;
    }
    tu_node_hold(node);
    tu_node_drop(history->node);
    history->node = node;
    history->output = output;
    history->node_version = tu_version(x);
    x->flags |= TU_REQUIRES_GRAD;
    return TUTTI_OK;
}

/* ---- views ---- */

static tutti_status set_base(tt_tensor *view, tt_tensor *of, uint8_t mark) {
    tu_history *history = tu_history_of(view);
    if (history == NULL)
        return TUTTI_ERROR_MEMORY;
    tt_tensor *base = tu_base_of(of);
    history->base = tu_tensor_hold(base != NULL ? base : of);
    history->mark = base != NULL && of->history->mark != TU_MARK_NORMAL ? of->history->mark : mark;
    history->node_version = tu_version(view);
    return TUTTI_OK;
}

tutti_status tu_history_note_view(tt_tensor *base, tt_tensor *view) {
    if (!tu_is_float(view->dtype) && !tu_is_complex(view->dtype))
        return TUTTI_OK; /* never differentiable */
    return set_base(view, base, tt_grad_enabled() ? TU_MARK_NORMAL : TU_MARK_NO_GRAD);
}

/* The part of `whole`, a tensor laid out like the base, that the view shows. */
static tt_tensor *part_of(tt_tensor *whole, const tu_shape *view, const tu_shape *base) {
    return tt_as_strided(whole, tt_dims_of(view->ndim, view->sizes), tt_dims_of(view->ndim, view->strides),
                         view->offset - base->offset);
}

static tt_tensor *like_base(const tu_shape *base, tutti_dtype dtype) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = base->device;
    return tt_empty_strided(tt_dims_of(base->ndim, base->sizes), tt_dims_of(base->ndim, base->strides), dtype,
                            &options);
}

/* The gradient of a view that was made anew: its shape and strides are outputs[0], the base's inputs[0]. */
static void view_run(tu_node *node, tt_tensor *const *grads, tt_tensor **results) {
    tu_shape *view = &node->outputs[0], *base = &node->inputs[0];
    tt_tensor *g = grads[0];
    if (g == NULL)
        return;
    /* What an expanded view repeats adds up. */
    tt_dims once = tt_dims_of(view->ndim, view->sizes);
    for (int i = 0; i < view->ndim; i++)
        if (view->strides[i] == 0)
            once.at[i] = 1;
    tt_tensor *whole = tt_zero_(like_base(base, g->dtype));
    tu_shape single = *view;
    memcpy(single.sizes, once.at, sizeof once.at);
    tt_copy_(part_of(whole, &single, base), tt_sum_to(g, once));
    results[0] = whole;
}

static tutti_status renew_view(tt_tensor *x) {
    tt_tensor *base = x->history->base;
    tu_node *node = tu_node_new("view", 1, 1, 0);
    if (node == NULL)
        return TUTTI_ERROR_MEMORY;
    node->run = view_run;
    node->inputs[0] = tu_shape_of(base);
    node->outputs[0] = tu_shape_of(x);
    node->needs[0] = true;
    tutti_status status = tu_edge_to(base, &node->next[0]);
    if (status == TUTTI_OK)
        status = tu_history_set(x, node, 0);
    tu_node_drop(node);
    return status;
}

tutti_status tu_history_node(tt_tensor *x, tu_node **node) {
    tu_history *history = x->history;
    *node = NULL;
    if (history == NULL)
        return TUTTI_OK;
    if (history->base != NULL && history->node_version != tu_version(x) && history->base->flags & TU_REQUIRES_GRAD &&
        history->base->history != NULL && history->base->history->node != NULL) {
        tutti_status status = renew_view(x);
        if (status != TUTTI_OK)
            return status;
    }
    *node = x->history->node;
    return TUTTI_OK;
}

void tu_history_refresh(tt_tensor *x) {
    const tu_history *history = x->history;
    if (history->base != NULL && history->mark == TU_MARK_NORMAL && history->base->history != NULL &&
        history->base->history->node != NULL && history->node_version != tu_version(x))
        x->flags |= TU_REQUIRES_GRAD;
}

tutti_status tu_edge_to(tt_tensor *x, tu_edge *edge) {
    *edge = (tu_edge){ NULL, NULL, 0 };
    if (!(x->flags & TU_REQUIRES_GRAD))
        return TUTTI_OK;
    tu_node *node;
    tutti_status status = tu_history_node(x, &node);
    if (status != TUTTI_OK)
        return status;
    if (node != NULL)
        *edge = (tu_edge){ tu_node_hold(node), NULL, x->history->output };
    else
        edge->leaf = tu_tensor_hold(x);
    return TUTTI_OK;
}

/* ---- in place ---- */

tutti_status tu_history_check_write(const char *who, tt_tensor *x) {
    tt_tensor *base = tu_base_of(x);
    const char *reason = NULL;
    if (base == NULL) {
        if (x->flags & TU_REQUIRES_GRAD && (x->history == NULL || x->history->node == NULL))
            return tu_error(TUTTI_ERROR_STATE,
                            "%s: a leaf tensor that requires grad, %s, is being used in an in-place operation. Switch "
                            "gradient mode off "
                            "(tt_grad_mode) to change a parameter",
                            who, tu_describe(x));
        return TUTTI_OK;
    }
    if (base->flags & TU_REQUIRES_GRAD && (base->history == NULL || base->history->node == NULL))
        return tu_error(TUTTI_ERROR_STATE,
                        "%s: a view of a leaf tensor that requires grad, %s, is being used in an in-place operation. "
                        "Switch gradient mode off "
                        "(tt_grad_mode) to change a parameter",
                        who, tu_describe(base));
    if (x->history->mark == TU_MARK_NO_GRAD)
        reason = "it was made with gradient mode off, and gradient mode is on now";
    else if (x->history->mark == TU_MARK_CUSTOM)
        reason = "it was made inside a custom function or by a module's backward hooks, whose gradient does not know "
                 "of the change";
    if (reason != NULL)
        return tu_error(TUTTI_ERROR_STATE, "%s: the view %s cannot be modified in place: %s. Clone it first", who,
                        tu_describe(x), reason);
    return TUTTI_OK;
}

tutti_status tu_history_check_in_place(const tu_call *call) {
    char who[64];
    snprintf(who, sizeof who, "%s_", call->operator->name);
    return tu_history_check_write(who, call->inputs[0]);
}

/* A change of a view, seen from its base: the gradient of the part goes through the operator's own node, the rest
 * passes. `inner` is that node. */
static void slice_run(tu_node *node, tt_tensor *const *grads, tt_tensor **results) {
    tu_node *inner = node->inner;
    tu_shape *base = &node->inputs[0], *view = &inner->outputs[0];
    if (grads[0] == NULL)
        return;
    tt_tensor *whole = tt_copy_(like_base(base, grads[0]->dtype), grads[0]);
    tt_tensor *part = part_of(whole, view, base);
    tt_tensor *of_part = tt_clone(part);
    inner->run(inner, &of_part, results);
    if (tu_self()->pending != TUTTI_OK)
        return;
    if (results[0] != NULL)
        tt_copy_(part, tt_sum_to(results[0], tt_dims_of(view->ndim, view->sizes)));
    else
        tt_zero_(part);
    results[0] = whole;
}

static tutti_status rebase_view(tt_tensor *x, tu_node *inner) {
    tt_tensor *base = x->history->base;
    tu_node *node = tu_node_new(inner->name, inner->input_count, 1, 0);
    if (node == NULL)
        return TUTTI_ERROR_MEMORY;
    node->run = slice_run;
    node->inner = tu_node_hold(inner);
    node->outputs[0] = tu_shape_of(base);
    for (int i = 1; i < inner->input_count; i++) {
        node->needs[i] = inner->needs[i];
        node->inputs[i] = inner->inputs[i];
        node->next[i] = inner->next[i]; /* moved */
        inner->next[i] = (tu_edge){ NULL, NULL, 0 };
    }
    node->inputs[0] = tu_shape_of(base);
    node->needs[0] = (base->flags & TU_REQUIRES_GRAD) != 0;
    tu_edge_drop(&inner->next[0]);
    tutti_status status = tu_edge_to(base, &node->next[0]);
    if (status == TUTTI_OK)
        status = tu_history_set(base, node, 0);
    if (status == TUTTI_OK) {
        x->flags |= TU_REQUIRES_GRAD;
        x->history->node_version = tu_version(x) - 1; /* out of date: made anew from the base when it is asked for */
    }
    tu_node_drop(node);
    return status;
}

tutti_status tu_history_rebase(tt_tensor *x, tu_node *node) {
    return tu_base_of(x) != NULL ? rebase_view(x, node) : tu_history_set(x, node, 0);
}

/* ---- recording ---- */

static void op_run(tu_node *node, tt_tensor *const *grads, tt_tensor **results) {
    if (node->operator->gradient == NULL) {
        tu_fail(TUTTI_ERROR_UNSUPPORTED, "%s has no gradient of its own", node->name);
        return;
    }
    tu_gradient gradient = { .operator= node->operator,
                             .params = & node->params,
                             .grads = grads,
                             .needs = node->needs,
                             .input_count = node->input_count,
                             .results = results,
                             .node = node };
    node->operator->gradient(&gradient);
}

static uint32_t saves_of(const tu_call *call, const bool *needs) {
    uint32_t saves = 0;
    for (int i = 0; i < call->input_count; i++)
        if (needs[i])
            saves |= call->operator->saves[i < TU_INPUTS ? i : TU_INPUTS - 1];
    return saves;
}

static tutti_status save_all(tu_node *node, const tu_call *call, uint32_t saves) {
    int at = 0;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < call->input_count && i < 16 && status == TUTTI_OK; i++) {
        if (!(saves & TU_INPUT(i)))
            continue;
        /* The value from before an in-place change is gone: saved with the old version, it fails when it is used. */
        bool overwritten = call->in_place && call->inputs[i] == call->inputs[0];
        status = tu_save(&node->saved[at], call->inputs[i], overwritten, TU_INPUT(i));
        if (overwritten)
            node->saved[at].version--;
        node->saved[at++].is_output = false;
    }
    for (int i = 0; i < call->output_count && status == TUTTI_OK; i++)
        if (saves & TU_OUTPUT(i))
            status = tu_save(&node->saved[at++], call->outputs[i], true, TU_OUTPUT(i));
    return status;
}

static bool differentiable(const tt_tensor *x) {
    return tu_is_float(x->dtype) || tu_is_complex(x->dtype);
}

/* The in-place form writes a tensor that the caller has: it must be right even if this fails half-way, so that the
 * history is set last. */
static tutti_status attach(tu_call *call, tu_node *node) {
    if (call->in_place)
        return tu_history_rebase(call->outputs[0], node);
    int visible = call->operator->visible == 0 ? call->output_count : call->operator->visible;
    for (int i = 0; i < visible; i++) {
        tt_tensor *output = call->outputs[i];
        tutti_status status = TUTTI_OK;
        if (!differentiable(output))
            continue;
        if (call->operator->flags & TU_VIEW)
            status = set_base(output, call->inputs[0], TU_MARK_NORMAL);
        if (status == TUTTI_OK)
            status = tu_history_set(output, node, i);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

tutti_status tu_history_record(tu_call *call) {
    bool any = false;
    for (int i = 0; i < call->output_count; i++)
        any = any || differentiable(call->outputs[i]);
    if (!any)
        return TUTTI_OK;
    bool needs[64] = { false };
    bool *wanted = call->input_count <= 64 ? needs : calloc((size_t)call->input_count, sizeof *wanted);
    if (wanted == NULL)
        return tu_error_memory("a node's flags", (size_t)call->input_count);
    for (int i = 0; i < call->input_count; i++)
        wanted[i] = call->inputs[i] != NULL && call->inputs[i]->flags & TU_REQUIRES_GRAD;
    uint32_t saves = saves_of(call, wanted);
    tutti_status status = TUTTI_OK;
    tu_node *node = tu_node_new(call->operator->name, call->input_count, call->output_count, __builtin_popcount(saves));
    if (node == NULL) {
        status = TUTTI_ERROR_MEMORY;
        goto free_wanted;
    }
    node->operator= call->operator;
    node->run = op_run;
    node->params = call->params;
    memcpy(node->needs, wanted, (size_t)call->input_count * sizeof *wanted);
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++) {
        if (call->inputs[i] == NULL)
            continue;
        node->inputs[i] = tu_shape_of(call->inputs[i]);
        if (wanted[i])
            status = tu_edge_to(call->inputs[i], &node->next[i]);
    }
    for (int i = 0; i < call->output_count; i++)
        node->outputs[i] = tu_shape_of(call->outputs[i]);
    if (status == TUTTI_OK)
        status = save_all(node, call, saves);
    if (status == TUTTI_OK)
        status = attach(call, node);
    tu_node_drop(node);
free_wanted:
    if (wanted != needs)
        free(wanted);
    return status;
}
