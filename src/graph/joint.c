/* SPDX-License-Identifier: Apache-2.0
 *
 * The backward of a captured function. When the function has ended, the engine runs on the stand-ins, from gradients
 * that are inputs of the graph; what it calls becomes vertices behind those of the function, in the engine's order and
 * with the bodies of hooks in their places. Where a gradient reaches an input of the function it leaves the graph.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/operators.h"
#include "graph/capture.h"

/* ---- what goes in ---- */

/* A result whose gradient may arrive: computed here, by something with a gradient, and not twice in the list. */
static bool is_root(tu_capture *to, int result) {
    tt_tensor *x = to->results[result];
    if (x == NULL || x->flags & TU_LITERAL || tu_map_get(&to->by_fake, x) != NULL || !tu_history_has_node(x))
        return false;
    for (int i = 0; i < result; i++)
        if (to->results[i] == x)
            return false;
    return true;
}

/* An input that has another history than it came with. */
static bool is_rewritten(const tu_meeting *met) {
    return tu_history_has_node(met->fake) && tu_history_at(met->fake)->node != met->entrance;
}

static tutti_status check_rewritten(tu_capture *to, const tu_meeting *met) {
    bool shared = false;
    for (const tu_meeting *other = to->meetings; other != NULL; other = other->next)
        shared = shared || (other != met && other->fake->storage == met->fake->storage);
    if (met->kind != TU_INPUT_GRADIENT && !shared && tu_base_of(met->real) == NULL)
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_CAPTURE,
                    "%s: the function writes %s in place with something that has a gradient, and other tensors share "
                    "its memory; clone it before",
                    to->who, tu_describe(met->real));
}

/* A new input of the graph: the gradient of x. */
static tt_tensor *make_tangent(tu_capture *to, tt_tensor *x) {
    tu_shape shape = tu_shape_of(x);
    shape.offset = 0;
    if (tu_shape_contiguous(to->who, &shape) != TUTTI_OK)
        return NULL;
    tt_tensor *tangent = tu_tensor_new_fake(&shape);
    tu_fake_storage *storage = tangent != NULL ? tu_capture_storage(to, tangent->storage, 0) : NULL;
    tu_value *value = storage != NULL ? tu_graph_value(to->graph, "tangent", &shape, storage->number) : NULL;
    bool made = value != NULL && tu_graph_input_add(to->graph, TU_INPUT_TANGENT, value) != NULL &&
                tu_capture_bind(to, tangent, value) == TUTTI_OK;
    if (made)
        return tu_scope_own(tangent);
    tu_tensor_drop(tangent);
    return NULL;
}

typedef struct roots {
    size_t count;
    tt_tensor **at, **tangents;
} roots;

static tutti_status add_root(tu_capture *to, roots *list, tt_tensor *x, tu_tangent_source source) {
    list->at[list->count] = x;
    list->tangents[list->count] = make_tangent(to, x);
    if (list->tangents[list->count++] == NULL)
        return TUTTI_ERROR_MEMORY;
    to->made->tangents[to->made->tangent_count++] = source;
    return TUTTI_OK;
}

static tutti_status find_roots(tu_capture *to, roots *list) {
    size_t most = (size_t)to->result_count + 1;
    for (const tu_meeting *met = to->meetings; met != NULL; met = met->next)
        most++;
    list->at = tu_scope_memory(most * sizeof(tt_tensor *));
    list->tangents = tu_scope_memory(most * sizeof(tt_tensor *));
    to->made->tangents = calloc(most, sizeof *to->made->tangents);
    if (list->at == NULL || list->tangents == NULL || to->made->tangents == NULL)
        return tu_error_memory("the results of a function", most * sizeof(tt_tensor *));
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < to->result_count && status == TUTTI_OK; i++)
        if (is_root(to, i))
            status = add_root(to, list, to->results[i], (tu_tangent_source){ .input = -1, .result = i });
    for (const tu_meeting *met = to->meetings; met != NULL && status == TUTTI_OK; met = met->next) {
        if (met->input < 0 || !is_rewritten(met))
            continue;
        status = check_rewritten(to, met);
        if (status == TUTTI_OK)
            status = add_root(to, list, met->fake, (tu_tangent_source){ .input = met->input, .result = -1 });
    }
    return status;
}

/* ---- hooks of inputs ---- */

/* Whether hooks of the leaf want to run inside. */
static bool wants_inside(const tu_history *history) {
    for (int i = 0; i < tu_hook_count(&history->accumulate_hooks); i++)
        if (history->accumulate_hooks.at[i]->inside)
            return true;
    return false;
}

/* Those that were there run in the real backward, when the gradient has left the graph, unless they want to run inside
 * of it. One that the function adds would be lost. */
static tutti_status drop_hooks(tu_capture *to) {
    for (tu_meeting *met = to->meetings; met != NULL; met = met->next) {
        tu_history *history = met->fake->history;
        if (history == NULL)
            continue;
        int count = tu_hook_count(&history->tensor_hooks) + tu_hook_count(&history->accumulate_hooks);
        if (met->entrance != NULL && met->entrance->hooks != NULL)
            count += tu_hook_count(&met->entrance->hooks->tensor[0]);
        if (count != met->hooks)
            return tu_error(TUTTI_ERROR_CAPTURE,
                            "%s: the function hangs a hook on its input %s, where it would stay; hang it before the "
                            "call, or on what is computed from it",
                            to->who, tu_describe(met->real));
        met->inside = wants_inside(history);
        if (met->inside)
            continue;
        tu_hook_list_free(&history->tensor_hooks);
        tu_hook_list_free(&history->accumulate_hooks);
    }
    return TUTTI_OK;
}

/* ---- what comes out ---- */

static tutti_status add_inside(tu_capture *to, tu_meeting *met);

tutti_status tu_capture_arrival(tu_capture *to, tt_tensor *leaf, tt_tensor *grad) {
    tu_meeting *met = tu_map_get(&to->by_fake, leaf);
    tt_tensor **place = met != NULL ? &met->gradient : NULL;
    for (int i = 0; place == NULL && i < to->result_count; i++)
        if (to->results[i] == leaf)
            place = &to->gradients[i];
    if (place == NULL)
        return tu_error(TUTTI_ERROR_CAPTURE,
                        "%s: the function makes a leaf, %s, whose gradient nobody could find; return it", to->who,
                        tu_describe(leaf));
    if (*place != NULL)
        return tu_error(TUTTI_ERROR_STATE, "%s: two gradients for %s", to->who, tu_describe(leaf));
    if (tu_history_of(leaf) == NULL)
        return TUTTI_ERROR_MEMORY;
    *place = tu_tensor_hold(grad);
    return met != NULL && met->inside ? add_inside(to, met) : TUTTI_OK;
}

/* A vertex that adds the gradient to the leaf's own, when the backward runs. */
static tutti_status record_addition(tu_capture *to, tu_meeting *met) {
    tu_value *leaf, *gradient;
    tutti_status status = tu_capture_value(to, met->fake, &leaf);
    if (status == TUTTI_OK)
        status = tu_capture_value(to, met->gradient, &gradient);
    if (status != TUTTI_OK)
        return status;
    tu_accumulate_grad_attributes none;
    memset(&none, 0, sizeof none);
    tu_vertex *vertex = tu_graph_vertex(to->graph, &tu_operator_accumulate_grad, 2, 0, &none, NULL);
    if (vertex == NULL)
        return TUTTI_ERROR_MEMORY;
    vertex->operands[0].value = leaf;
    vertex->operands[1].value = gradient;
    return TUTTI_OK;
}

/* A hook asks for the gradient of an input while the backward runs. Where it has arrived, it is added to the input's
 * own inside the graph, and the hook sees the sum. */
tutti_status tu_capture_question(tu_capture *to, tu_meeting *met) {
    if (met->accumulated)
        return TUTTI_OK;
    if (met->inside) { /* none has arrived: there is the one that was there, or none, and guards look for that */
        met->asks_gradient = true;
        return TUTTI_OK;
    }
    if (met->gradient == NULL || met->entrance != NULL || met->hooks > 0)
        return tu_error(TUTTI_ERROR_CAPTURE, "%s: a hook asks for the gradient of %s %s", to->who,
                        tu_describe(met->real),
                        met->gradient == NULL ? "before it has arrived" : "which has hooks, or was computed outside");
    to->made->inner_backward = true; /* its hooks are part of the graph, since there are none */
    return add_inside(to, met);
}

/* Adds the gradient that has arrived to the leaf's own inside of the graph, which is what others see from now on. Once
 * for each leaf: the engine brings a leaf all of its gradient at once, and a second value of the same memory would be
 * one that passes take for another. */
static tutti_status add_inside(tu_capture *to, tu_meeting *met) {
    if (met->accumulated)
        return tu_error(TUTTI_ERROR_CAPTURE, "%s: the gradient of %s arrives twice in one backward", to->who,
                        tu_describe(met->real));
    tutti_status status = record_addition(to, met);
    tt_tensor *sum = status == TUTTI_OK ? tu_grad_of(met->fake) : NULL;
    tu_history *history = sum != NULL ? tu_history_of(met->fake) : NULL;
    if (history == NULL)
        return status != TUTTI_OK ? status : tu_self()->pending != TUTTI_OK ? tu_self()->pending : TUTTI_ERROR_MEMORY;
    tu_tensor_drop(history->grad);
    history->grad = tu_tensor_hold(sum);
    tu_tensor_drop(met->gradient);
    met->gradient = NULL;
    met->accumulated = true;
    return TUTTI_OK;
}

static tutti_status add_target(tu_capture *to, tt_tensor *gradient, tu_gradient_target target) {
    tu_value *value;
    tutti_status status = tu_capture_value(to, gradient, &value);
    if (status != TUTTI_OK)
        return status;
    to->graph->outputs[to->graph->output_count++] = (tu_operand){ .value = value };
    to->made->targets[to->made->target_count++] = target;
    return TUTTI_OK;
}

/* In the order of the inputs, then of the results, whatever the order of the engine. */
static tutti_status take_gradients(tu_capture *to) {
    size_t most = (size_t)to->graph->input_count + (size_t)to->result_count + 1;
    tu_operand *outputs = realloc(to->graph->outputs, ((size_t)to->graph->output_count + most) * sizeof *outputs);
    if (outputs != NULL)
        to->graph->outputs = outputs;
    to->made->targets = calloc(most, sizeof *to->made->targets);
    if (outputs == NULL || to->made->targets == NULL)
        return tu_error_memory("gradients of a graph", most * sizeof *outputs);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < to->made->input_count && status == TUTTI_OK; i++)
        for (const tu_meeting *met = to->meetings; met != NULL && status == TUTTI_OK; met = met->next)
            if (met->input == i && met->gradient != NULL)
                status = add_target(to, met->gradient, (tu_gradient_target){ .input = i, .result = -1 });
    for (int i = 0; i < to->result_count && status == TUTTI_OK; i++)
        if (to->gradients[i] != NULL)
            status = add_target(to, to->gradients[i], (tu_gradient_target){ .input = -1, .result = i });
    return status;
}

tutti_status tu_capture_backward(tu_capture *to) {
    roots list = { .count = 0 };
    to->made->in_backward = true;
    tutti_status status = drop_hooks(to);
    if (status == TUTTI_OK)
        status = find_roots(to, &list);
    if (status != TUTTI_OK || list.count == 0) {
        to->made->in_backward = status != TUTTI_OK;
        return status;
    }
    to->gradients = tu_scope_memory(((size_t)to->result_count + 1) * sizeof(tt_tensor *));
    if (to->gradients == NULL)
        return TUTTI_ERROR_MEMORY;
    memset(to->gradients, 0, ((size_t)to->result_count + 1) * sizeof(tt_tensor *));
    to->backward = true;
    tt_backward_from(tt_tensors_of(list.count, list.at), tt_tensors_of(list.count, list.tangents), NULL);
    status = tu_self()->pending;
    if (status == TUTTI_OK)
        status = take_gradients(to);
    for (int i = 0; i < to->result_count; i++)
        tu_tensor_drop(to->gradients[i]);
    to->made->in_backward = status != TUTTI_OK;
    return status;
}
