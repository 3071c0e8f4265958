/* SPDX-License-Identifier: Apache-2.0
 *
 * Running a graph one operator after the other. A tensor is let go after its last use.
 */
#include <stdlib.h>
#include <string.h>

#include <tutti/autograd.h>

#include "autograd/operators.h"
#include "graph/graph.h"

/* ---- inputs ---- */

static tutti_status check_input(const char *who, const tt_graph *graph, int place, tt_tensor *x) {
    const tu_value *value = graph->inputs[place].value;
    tu_shape shape = tu_shape_of(x);
    if (tu_shape_equal(&shape, &value->shape))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_ARGUMENT,
                    "%s: input %s is %s of strides %s; the graph was captured with %s %s of "
                    "strides %s",
                    who, value->name, tu_describe(x), tu_dims_text(shape.ndim, shape.strides),
                    tutti_dtype_name(value->shape.dtype), tu_dims_text(value->shape.ndim, value->shape.sizes),
                    tu_dims_text(value->shape.ndim, value->shape.strides));
}

/* Which inputs share memory is part of what was captured. */
static tutti_status check_sharing(const char *who, const tt_graph *graph, tt_tensor *const *inputs) {
    for (int i = 0; i < graph->input_count; i++)
        for (int k = 0; k < i; k++) {
            const tu_value *first = graph->inputs[k].value, *second = graph->inputs[i].value;
            if ((inputs[i]->storage == inputs[k]->storage) != (first->storage == second->storage))
                return tu_error(TUTTI_ERROR_ARGUMENT,
                                "%s: inputs %s and %s %s memory; when the graph was captured they %s", who, first->name,
                                second->name, inputs[i]->storage == inputs[k]->storage ? "share" : "share no",
                                first->storage == second->storage ? "did" : "did not");
        }
    return TUTTI_OK;
}

static tt_tensor *fetch(const tu_graph_input *input, tt_tensor_list arguments, tt_tensor *const *inputs) {
    switch (input->kind) {
    case TU_INPUT_ARGUMENT:
        return tu_tensor_hold(arguments.at[input->index]);
    case TU_INPUT_CONSTANT:
        return tu_tensor_hold(input->tensor);
    case TU_INPUT_HELD:
        return tu_tensor_hold(input->holder.get(input->holder.owner, input->holder.index));
    case TU_INPUT_GRADIENT:
        return tu_tensor_hold(tt_grad(inputs[input->index]));
    case TU_INPUT_SAVED:
    case TU_INPUT_TANGENT:
        break; /* a compiled function has them */
    }
    return NULL;
}

tutti_status tu_graph_gather(const char *who, const tt_graph *graph, tt_tensor_list arguments, tt_tensor **inputs) {
    if (arguments.count != (size_t)graph->argument_count)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %zu inputs are given, and the graph has %d", who, arguments.count,
                        graph->argument_count);
    if (arguments.count > 0 && arguments.at == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the list of inputs is NULL", who);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < graph->input_count && status == TUTTI_OK; i++) {
        if (graph->inputs[i].kind == TU_INPUT_ARGUMENT)
            status = tu_tensor_check(who, "inputs", arguments.at[graph->inputs[i].index]);
        if (status == TUTTI_OK)
            inputs[i] = fetch(&graph->inputs[i], arguments, inputs);
        if (status == TUTTI_OK && inputs[i] == NULL)
            status = tu_error(TUTTI_ERROR_STATE, "%s: there is no %s, which there was when the graph was captured", who,
                              graph->inputs[i].value->name);
        if (status == TUTTI_OK)
            status = check_input(who, graph, i, inputs[i]);
    }
    return status == TUTTI_OK ? check_sharing(who, graph, inputs) : status;
}

/* ---- vertices ---- */

static tt_tensor *number_of(const tu_operand *operand) {
    return tt_number(operand->number == TUTTI_I64 ? (double)operand->at.whole : operand->at.real);
}

static tt_tensor **inputs_of(const tu_vertex *vertex, tt_tensor *const *tensors) {
    tt_tensor **inputs = tu_scope_memory(((size_t)vertex->operand_count + 1) * sizeof *inputs);
    for (int i = 0; inputs != NULL && i < vertex->operand_count; i++) {
        const tu_operand *operand = &vertex->operands[i];
        inputs[i] = operand->value != NULL ? tensors[operand->value->number]
                    : operand->number != 0 ? number_of(operand)
                                           : NULL;
    }
    return inputs;
}

tutti_status tu_vertex_run(const tu_vertex *vertex, tt_tensor *const *tensors, tu_call *call) {
    tt_tensor **inputs = inputs_of(vertex, tensors);
    if (inputs == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_call_init(call, vertex->entry, vertex->operand_count, inputs, vertex->attributes);
    call->in_place = vertex->in_place;
    if (vertex->entry->flags & TU_EACH_INPUT) {
        call->output_count = vertex->in_place ? call->input_count : vertex->result_count;
        call->results = tu_scope_memory((size_t)call->output_count * sizeof *call->results);
        call->outputs = tu_scope_memory((size_t)call->output_count * sizeof(tt_tensor *));
        if (call->results == NULL || call->outputs == NULL)
            return TUTTI_ERROR_MEMORY;
    }
    return tu_run(call) ? TUTTI_OK : tu_self()->pending;
}

/* Versions below zero count from what the version was when the graph began: -1 is that. */
static tutti_status set_versions(const tu_graph_run *now, const tu_vertex *vertex) {
    const tu_version_set_attributes *attributes = vertex->attributes;
    tt_tensor **inputs = inputs_of(vertex, now->tensors);
    int64_t *versions = tu_scope_memory((size_t)vertex->operand_count * sizeof *versions);
    if (inputs == NULL || versions == NULL)
        return TUTTI_ERROR_MEMORY;
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        versions[i] = attributes->versions.at[i];
        if (versions[i] < 0)
            versions[i] = -versions[i] - 1 + (value->maker == NULL ? now->versions[value->number] : 0);
    }
    tt_set_version(tt_tensors_of((size_t)vertex->operand_count, inputs), (size_t)vertex->operand_count, versions);
    return tu_self()->pending;
}

tutti_status tu_graph_run_vertex(tu_graph_run *now, const tu_vertex *vertex) {
    if (vertex->entry == &tu_operator_version_set)
        return set_versions(now, vertex);
    tu_call call;
    tutti_status status = tu_vertex_run(vertex, now->tensors, &call);
    for (int i = 0; i < vertex->result_count && status == TUTTI_OK; i++)
        if (now->uses[vertex->results[i]->number] > 0)
            now->tensors[vertex->results[i]->number] = tu_tensor_hold(call.outputs[i]);
    return status;
}

void tu_graph_run_let_go(tu_graph_run *now, const tu_vertex *vertex) {
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value == NULL || --now->uses[value->number] > 0)
            continue;
        tu_tensor_drop(now->tensors[value->number]);
        now->tensors[value->number] = NULL;
    }
}

tutti_status tu_graph_run_begin(tu_graph_run *now, const tt_graph *graph, tt_tensor *const *inputs) {
    *now = (tu_graph_run){ .graph = graph };
    now->value_count = graph->value_count;
    size_t count = (size_t)now->value_count + 1;
    now->tensors = calloc(count, sizeof(tt_tensor *));
    now->versions = calloc(count, sizeof *now->versions);
    now->uses = calloc(count, sizeof *now->uses);
    if (now->tensors == NULL || now->versions == NULL || now->uses == NULL)
        return tu_error_memory("a run of a graph", count * sizeof(tt_tensor *));
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        for (int i = 0; i < vertex->operand_count; i++)
            if (vertex->operands[i].value != NULL)
                now->uses[vertex->operands[i].value->number]++;
    for (int i = 0; i < graph->output_count; i++)
        if (graph->outputs[i].value != NULL)
            now->uses[graph->outputs[i].value->number]++;
    for (int i = 0; i < graph->effect_count; i++)
        if (graph->effects[i].value != NULL)
            now->uses[graph->effects[i].value->number]++;
    for (int i = 0; i < graph->input_count; i++) {
        int number = graph->inputs[i].value->number;
        now->versions[number] = tu_version(inputs[i]);
        if (now->uses[number] > 0)
            now->tensors[number] = tu_tensor_hold(inputs[i]);
    }
    return TUTTI_OK;
}

void tu_graph_run_end(tu_graph_run *now) {
    for (int i = 0; now->tensors != NULL && i < now->value_count; i++)
        tu_tensor_drop(now->tensors[i]);
    free(now->tensors);
    free(now->versions);
    free(now->uses);
}

tutti_status tu_graph_run_finish(tu_graph_run *now, tt_tensor **outputs) {
    const tt_graph *graph = now->graph;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < graph->effect_count && status == TUTTI_OK; i++) {
        const tu_graph_effect *effect = &graph->effects[i];
        status = effect->holder.set(effect->holder.owner, effect->holder.index,
                                    effect->value != NULL ? now->tensors[effect->value->number] : NULL);
    }
    for (int i = 0; i < graph->output_count && status == TUTTI_OK; i++) {
        const tu_operand *output = &graph->outputs[i];
        if (output->number != 0)
            outputs[i] = tu_tensor_hold(number_of(output));
        else if (output->value != NULL)
            outputs[i] = tu_tensor_hold(now->tensors[output->value->number]);
    }
    return status == TUTTI_OK ? tu_self()->pending : status;
}

tutti_status tu_graph_interpret(const tt_graph *graph, tt_tensor *const *inputs, tt_tensor **outputs) {
    tu_graph_run now;
    bool recording = tt_grad_mode(false);
    tutti_status status = tu_graph_run_begin(&now, graph, inputs);
    for (const tu_vertex *vertex = graph->first; vertex != NULL && status == TUTTI_OK; vertex = vertex->next) {
        tt_scope scope = tt_scope_open();
        status = tu_graph_run_vertex(&now, vertex);
        tu_scope_leave(&scope);
        if (status == TUTTI_OK)
            tu_graph_run_let_go(&now, vertex);
    }
    if (status == TUTTI_OK)
        status = tu_graph_run_finish(&now, outputs);
    tu_graph_run_end(&now);
    tt_grad_mode(recording);
    return status;
}

tt_tensor_list tt_graph_run(tt_graph *graph, tt_tensor_list arguments) {
    tt_tensor_list none = { 0, tu_nothing };
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check())
        return none;
    if (graph == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "graph_run: graph is NULL");
        return none;
    }
    tt_tensor **inputs = calloc((size_t)graph->input_count + 1, sizeof(tt_tensor *));
    tt_tensor **outputs = tu_scope_memory(((size_t)graph->output_count + 1) * sizeof(tt_tensor *));
    tutti_status status = inputs != NULL && outputs != NULL ? TUTTI_OK : tu_error_memory("a run of a graph", 1);
    if (outputs != NULL)
        memset(outputs, 0, ((size_t)graph->output_count + 1) * sizeof(tt_tensor *));
    if (status == TUTTI_OK)
        status = tu_graph_gather("graph_run", graph, arguments, inputs);
    if (status == TUTTI_OK)
        status = tu_graph_interpret(graph, inputs, outputs);
    for (int i = 0; inputs != NULL && i < graph->input_count; i++)
        tu_tensor_drop(inputs[i]);
    free(inputs);
    for (int i = 0; outputs != NULL && i < graph->output_count; i++)
        if (outputs[i] != NULL)
            outputs[i] = tu_scope_own(outputs[i]);
    tu_pending_take(status);
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of((size_t)graph->output_count, outputs) : none;
}
