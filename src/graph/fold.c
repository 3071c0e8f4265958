/* SPDX-License-Identifier: Apache-2.0
 *
 * The pass that computes what depends on no input: masks, tables of angles, ranges. The results become constants of the
 * graph. A tensor of one value alone stays a vertex, since to fill is cheaper than to load.
 */
#include <stdlib.h>

#include <tutti/autograd.h>

#include "graph/passes.h"

typedef struct folding {
    tt_graph *graph;
    bool *known;         /* by the number of the value */
    tt_tensor **tensors; /* likewise: what was computed; held */
    bool *fixed;         /* by storage: written, or kept by somebody outside */
    size_t limit;        /* of bytes that one vertex makes */
} folding;

static void fix(folding *of, const tu_value *value) {
    if (value != NULL)
        of->fixed[value->storage] = true;
}

static void find_fixed(folding *of) {
    const tt_graph *graph = of->graph;
    for (int i = 0; i < graph->input_count; i++)
        fix(of, graph->inputs[i].value);
    for (int i = 0; i < graph->output_count; i++)
        fix(of, graph->outputs[i].value);
    for (int i = 0; i < graph->effect_count; i++)
        fix(of, graph->effects[i].value);
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        for (int i = 0; i < vertex->operand_count; i++)
            if (vertex->operands[i].value != NULL && tu_vertex_writes(vertex, i))
                fix(of, vertex->operands[i].value);
}

static size_t bytes_of(const tu_vertex *vertex) {
    size_t bytes = 0;
    for (int i = 0; i < vertex->result_count; i++)
        bytes += (size_t)tu_shape_numel(&vertex->results[i]->shape) * tu_dtype_bytes[vertex->results[i]->shape.dtype];
    return bytes;
}

/* Also what lies between is computed, so none of it may be large. */
static bool is_known(const folding *of, const tu_vertex *vertex) {
    if (!tu_vertex_is_pure(vertex) || vertex->entry->flags & (TU_IMPURE | TU_NO_KERNEL) || bytes_of(vertex) > of->limit)
        return false;
    for (int i = 0; i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL && !of->known[vertex->operands[i].value->number])
            return false;
    for (int i = 0; i < vertex->result_count; i++)
        if (of->fixed[vertex->results[i]->storage] || vertex->results[i]->shape.device != TUTTI_CPU)
            return false;
    return true;
}

/* Somebody who is not known takes one of the results, or a view of it. */
static bool is_wanted(const folding *of, const tu_vertex *vertex) {
    for (const tu_vertex *user = vertex->next; user != NULL; user = user->next)
        for (int i = 0; i < user->operand_count; i++) {
            if (user->operands[i].value == NULL || user->operands[i].value->maker != vertex)
                continue;
            bool known = user->result_count > 0 && of->known[user->results[0]->number];
            if (!known || (user->entry->flags & TU_VIEW && is_wanted(of, user)))
                return true;
        }
    return false;
}

/* ---- computing ---- */

static tutti_status compute(folding *of, const tu_vertex *vertex) {
    if (of->tensors[vertex->results[0]->number] != NULL)
        return TUTTI_OK;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < vertex->operand_count && status == TUTTI_OK; i++)
        if (vertex->operands[i].value != NULL)
            status = compute(of, vertex->operands[i].value->maker);
    tu_call call;
    if (status == TUTTI_OK)
        status = tu_vertex_run(vertex, of->tensors, &call);
    for (int i = 0; i < vertex->result_count && status == TUTTI_OK; i++)
        of->tensors[vertex->results[i]->number] = tu_tensor_hold(call.outputs[i]);
    return status;
}

/* The results of the vertex are constants from now on. */
static tutti_status make_constant(folding *of, tu_vertex *vertex) {
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    tutti_status status = compute(of, vertex);
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    for (int i = 0; i < vertex->result_count && status == TUTTI_OK; i++) {
        tu_value *value = vertex->results[i];
        tu_graph_input *input = tu_graph_input_add(of->graph, TU_INPUT_CONSTANT, value);
        if (input == NULL)
            return TUTTI_ERROR_MEMORY;
        input->tensor = tu_tensor_hold(of->tensors[value->number]);
        value->maker = NULL;
    }
    return status;
}

static tutti_status fold(folding *of) {
    tutti_status status = TUTTI_OK;
    find_fixed(of);
    for (const tu_vertex *vertex = of->graph->first; vertex != NULL; vertex = vertex->next)
        for (int i = 0; i < vertex->result_count && is_known(of, vertex); i++)
            of->known[vertex->results[i]->number] = true;
    for (tu_vertex *vertex = of->graph->last, *before; vertex != NULL && status == TUTTI_OK; vertex = before) {
        before = vertex->before;
        bool computes = vertex->operand_count > 0 && !(vertex->entry->flags & TU_VIEW);
        if (vertex->result_count == 0 || !of->known[vertex->results[0]->number] || !computes || !is_wanted(of, vertex))
            continue;
        status = make_constant(of, vertex);
        if (status == TUTTI_OK)
            tu_vertex_erase(of->graph, vertex);
    }
    return status;
}

tutti_status tu_pass_fold(tt_graph *graph, size_t bytes) {
    folding of = { .graph = graph,
                   .known = calloc((size_t)graph->value_count + 1, sizeof *of.known),
                   .tensors = calloc((size_t)graph->value_count + 1, sizeof(tt_tensor *)),
                   .fixed = calloc((size_t)graph->storage_count + 1, sizeof *of.fixed),
                   .limit = bytes };
    tutti_status status = of.known != NULL && of.tensors != NULL && of.fixed != NULL
                              ? fold(&of)
                              : tu_error_memory("a pass", (size_t)graph->value_count);
    for (int i = 0; of.tensors != NULL && i < graph->value_count; i++)
        tu_tensor_drop(of.tensors[i]);
    free(of.known);
    free(of.tensors);
    free(of.fixed);
    return status == TUTTI_OK ? tu_pass_dead(graph, 0) : status; /* what only the constants were made of */
}
