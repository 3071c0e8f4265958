/* SPDX-License-Identifier: Apache-2.0
 *
 * The history of tensors: the node that computed one, and how operators record it. Views are in view.c.
 */
#include <stdlib.h>
#include <string.h>

#include <tutti/group.h>

#include "autograd/node.h"
#include "tensor/loop.h"

tu_history *tu_history_of(tt_tensor *x) {
    if (x->history != NULL)
        return x->history;
    tu_history *history = malloc(sizeof *history);
    if (history == NULL) {
        tu_error_memory("a tensor's history", sizeof *history);
        return NULL;
    }
    *history = (tu_history){ .grad_lock = PTHREAD_MUTEX_INITIALIZER };
    x->history = history;
    return history;
}

/* The node forgets a tensor that wanted its gradient kept. */
static void unretain(tu_history *history) {
    if (history->retains_grad && history->node != NULL && history->node->hooks != NULL)
        history->node->hooks->retained[history->output] = NULL;
}

static void history_end(tt_tensor *x) {
    tu_history *history = x->history;
    x->history = NULL;
    unretain(history);
    tu_tensor_drop(history->grad);
    tu_node_drop(history->node);
    tu_tensor_drop(history->base);
    tu_hook_list_free(&history->tensor_hooks);
    tu_hook_list_free(&history->accumulate_hooks);
    pthread_mutex_destroy(&history->grad_lock);
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
    history->generation++;
    tu_view_is_current(x);
    x->flags |= TU_REQUIRES_GRAD;
    return TUTTI_OK;
}

/* ---- edges ---- */

tutti_status tu_edge_to(tt_tensor *x, tu_edge *edge) {
    *edge = (tu_edge){ NULL, NULL, 0 };
    tu_history_refresh(x);
    if (!(x->flags & TU_REQUIRES_GRAD))
        return TUTTI_OK;
    tu_node *node;
    tutti_status status = tu_history_node(x, &node);
    if (status != TUTTI_OK)
        return status;
    if (node != NULL)
        *edge = (tu_edge){ tu_node_hold(node), NULL, tu_history_at(x)->output };
    else
        edge->leaf = tu_tensor_hold(x);
    return TUTTI_OK;
}

/* ---- in place ---- */

tutti_status tu_history_check_write(const char *who, tt_tensor *x) {
    tt_tensor *base = tu_base_of(x);
    const char *reason = NULL;
    if (base == NULL) {
        if (x->flags & TU_REQUIRES_GRAD && (x->history == NULL || tu_history_at(x)->node == NULL))
            return tu_error(TUTTI_ERROR_STATE,
                            "%s: a leaf tensor that requires grad, %s, is being used in an in-place operation. Switch "
                            "gradient mode off "
                            "(tt_grad_mode) to change a parameter",
                            who, tu_describe(x));
        return TUTTI_OK;
    }
    if (base->flags & TU_REQUIRES_GRAD && (base->history == NULL || tu_history_at(base)->node == NULL))
        return tu_error(TUTTI_ERROR_STATE,
                        "%s: a view of a leaf tensor that requires grad, %s, is being used in an in-place operation. "
                        "Switch gradient mode off "
                        "(tt_grad_mode) to change a parameter",
                        who, tu_describe(base));
    if (tu_history_at(x)->mark == TU_MARK_NO_GRAD)
        reason = "it was made with gradient mode off, and gradient mode is on now";
    else if (tu_history_at(x)->mark == TU_MARK_CUSTOM)
        reason = "it was made inside a custom function or by a module's backward hooks, whose gradient does not know "
                 "of the change";
    if (reason != NULL)
        return tu_error(TUTTI_ERROR_STATE, "%s: the view %s cannot be modified in place: %s. Clone it first", who,
                        tu_describe(x), reason);
    return TUTTI_OK;
}

static tutti_status check_in_place(const tu_call *call) {
    char who[64];
    snprintf(who, sizeof who, "%s_", call->entry->name);
    return tu_history_check_write(who, call->inputs[0]);
}

tutti_status tu_history_rebase(tt_tensor *x, tu_node *node, int changed, int output) {
    if (tu_base_of(x) == NULL)
        return tu_history_set(x, node, output);
    return tu_view_rebase(x, node, changed);
}

/* ---- recording ---- */

static void operator_run(tu_node *node, tt_tensor *const *grads, tt_tensor **results) {
    if (node->entry->gradient == NULL) {
        tu_fail(TUTTI_ERROR_UNSUPPORTED, "%s has no gradient of its own", node->name);
        return;
    }
    tu_gradient gradient = { .entry = node->entry,
                             .attributes = node->attributes,
                             .grads = grads,
                             .needs = node->needs,
                             .input_count = node->input_count,
                             .results = results,
                             .record = node };
    node->entry->gradient(&gradient);
}

static bool differentiable(tutti_dtype dtype) {
    return tu_is_float(dtype) || tu_is_complex(dtype);
}

static uint32_t saves_of(const tu_call *call, const bool *needs) {
    uint32_t saves = 0;
    for (int i = 0; i < call->input_count; i++)
        if (needs[i])
            saves |= call->entry->saves[i < TU_INPUTS ? i : TU_INPUTS - 1];
    return saves;
}

static tt_tensor *plain_copy(const tt_tensor *x) {
    tu_shape shape = tu_shape_of(x);
    if (tu_shape_contiguous("an in-place change", &shape) != TUTTI_OK)
        return NULL;
    tt_tensor *copy = tu_tensor_new(&shape);
    if (copy == NULL || x->device == TUTTI_META || x->numel == 0 || tu_copy_tensor(copy, x) == TUTTI_OK)
        return copy;
    tu_tensor_drop(copy);
    return NULL;
}

/* Of a stand-in, while a function is captured: the graph has to make the copy. */
static tt_tensor *recorded_copy(tt_tensor *x) {
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    tt_tensor *copy = tu_tensor_hold(tt_clone(x));
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return copy;
}

/* The value that an in-place operator is about to overwrite, with its history: the gradient of another input needs it.
 */
static tt_tensor *copy_of_overwritten(tt_tensor *x) {
    tt_tensor *copy = x->storage->fake ? recorded_copy(x) : plain_copy(x);
    if (copy == NULL)
        return NULL;
    tu_edge edge;
    tutti_status status = tu_edge_to(x, &edge);
    if (status == TUTTI_OK && edge.node != NULL)
        status = tu_history_set(copy, edge.node, edge.slot);
    tu_edge_drop(&edge);
    if (status == TUTTI_OK)
        return copy;
    tu_tensor_drop(copy);
    return NULL;
}

static tutti_status save_inputs(tu_node *node, const tu_call *call, uint32_t saves) {
    int at = 0;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < call->input_count && i < 16 && status == TUTTI_OK; i++) {
        if (!(saves & TU_INPUT(i)))
            continue;
        tt_tensor *input = call->inputs[i], *copy = NULL;
        if (call->in_place && i == 0 && (input = copy = copy_of_overwritten(input)) == NULL)
            return TUTTI_ERROR_MEMORY;
        status = tu_save(&node->saved[at++], input, TU_NO_OUTPUT, TU_INPUT(i));
        tu_tensor_drop(copy);
    }
    return status;
}

static tutti_status save_outputs(tu_node *node, const tu_call *call) {
    int at = __builtin_popcount(node->saves & 0xffff);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < call->output_count && status == TUTTI_OK; i++)
        if (node->saves & TU_OUTPUT(i))
            status = tu_save(&node->saved[at++], call->outputs[i], i, TU_OUTPUT(i));
    return status;
}

/* The node of a call, with its edges and the inputs it saves. */
static tutti_status make_node(const tu_call *call, const bool *needs, tu_node **made) {
    uint32_t saves = saves_of(call, needs);
    tu_node *node = tu_node_new_with(call->entry->name, call->input_count, call->output_count,
                                     __builtin_popcount(saves), call->entry->attribute_bytes);
    if (node == NULL)
        return TUTTI_ERROR_MEMORY;
    node->run = operator_run;
    node->saves = saves;
    memcpy(node->needs, needs, (size_t)call->input_count * sizeof *needs);
    tutti_status status = tu_attributes_copy(call->entry, call->attributes, node->attributes);
    if (status == TUTTI_OK)
        node->entry = call->entry; /* from here on the attributes end with the node */
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++) {
        if (call->inputs[i] == NULL) {
            tu_shape_absent(&node->inputs[i]);
            continue;
        }
        node->inputs[i] = tu_shape_of(call->inputs[i]);
        if (needs[i])
            status = tu_edge_to(call->inputs[i], &node->next[i]);
    }
    if (status == TUTTI_OK)
        status = save_inputs(node, call, saves);
    if (status == TUTTI_OK)
        *made = node;
    else
        tu_node_drop(node);
    return status;
}

/* Before the kernel runs, since an in-place operator changes both the values and the versions of what is saved. */
static tutti_status prepare(const tu_call *call, void **record) {
    bool any = false;
    tu_node *node = NULL;
    *record = NULL;
    for (int i = 0; i < call->output_count; i++)
        any = any || differentiable(call->results[i].dtype);
    if (!any)
        return TUTTI_OK;
    bool few[64] = { false };
    bool *needs = call->input_count <= 64 ? few : calloc((size_t)call->input_count, sizeof *needs);
    if (needs == NULL)
        return tu_error_memory("a node's flags", (size_t)call->input_count);
    for (int i = 0; i < call->input_count; i++)
        needs[i] = call->inputs[i] != NULL && call->inputs[i]->flags & TU_REQUIRES_GRAD;
    tutti_status status = make_node(call, needs, &node);
    if (needs != few)
        free(needs);
    *record = node;
    return status;
}

/* The in-place form writes a tensor that the caller has: it must be right even if this fails half-way, so that the
 * history is set last. */
static tutti_status hang(tu_call *call, tu_node *node) {
    if (call->in_place)
        return tu_history_rebase(call->outputs[0], node, 0, 0);
    for (int i = 0; i < call->output_count - call->entry->saved; i++) {
        tt_tensor *output = call->outputs[i];
        tutti_status status = TUTTI_OK;
        if (!differentiable(output->dtype))
            continue;
        if (call->entry->flags & TU_VIEW)
            status = tu_view_set_base(output, call->inputs[0], TU_MARK_NORMAL);
        if (status == TUTTI_OK)
            status = tu_history_set(output, node, i);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

static tutti_status attach(tu_call *call, void *record) {
    tu_node *node = record;
    for (int i = 0; i < call->output_count; i++)
        node->outputs[i] = tu_shape_of(call->outputs[i]);
    tutti_status status = save_outputs(node, call);
    if (status == TUTTI_OK)
        status = hang(call, node);
    tu_node_drop(node);
    return status;
}

static void cancel(void *record) {
    tu_node_drop(record);
}

/* From the start, so that threads that add gradients find its lock. */
tutti_status tu_history_require(tt_tensor *x) {
    if (!differentiable(x->dtype))
        return tu_error(TUTTI_ERROR_TYPE,
                        "require_grad: only tensors of floating point and complex dtype can require gradients, not %s",
                        tu_describe(x));
    if (tu_history_of(x) == NULL)
        return TUTTI_ERROR_MEMORY;
    x->flags |= TU_REQUIRES_GRAD;
    return TUTTI_OK;
}

const tu_historian tu_historian_table = { .end = history_end,
                                          .require = tu_history_require,
                                          .check_in_place = check_in_place,
                                          .prepare = prepare,
                                          .attach = attach,
                                          .cancel = cancel,
                                          .note_view = tu_history_note_view,
                                          .refresh = tu_history_refresh,
                                          .own = tu_history_own,
                                          .guards = tu_history_guards,
                                          .saved = tu_node_saved,
                                          .input_shape = tu_node_input_shape,
                                          .input = tu_node_input,
                                          .through = tu_node_through,
                                          .of_view = tu_view_gradient };
