/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether the results of every vertex are what its operator says: the shape rules are asked anew, on fakes.
 */
#include <stdlib.h>
#include <string.h>

#include "fused/operators.h"
#include "graph/graph.h"

static tutti_status fake_of(tt_tensor **tensors, const tu_value *value) {
    tt_tensor **place = &tensors[value->number];
    if (*place == NULL)
        *place = tu_tensor_new_fake(&value->shape);
    return *place != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}

static tutti_status compare(const char *who, const tu_vertex *vertex, const tu_call *call) {
    for (int i = 0; i < vertex->result_count; i++)
        if (!tu_shape_equal(&vertex->results[i]->shape, &call->results[i]))
            return tu_error(TUTTI_ERROR_STATE, "%s: %s is said to be %s %s, and %s gives %s %s", who,
                            vertex->results[i]->name, tutti_dtype_name(vertex->results[i]->shape.dtype),
                            tu_dims_text(vertex->results[i]->shape.ndim, vertex->results[i]->shape.sizes),
                            vertex->entry->name, tutti_dtype_name(call->results[i].dtype),
                            tu_dims_text(call->results[i].ndim, call->results[i].sizes));
    return TUTTI_OK;
}

int tu_result_count(const tu_operator *entry, bool in_place, int operands, const void *attributes) {
    if (in_place)
        return 0;
    if (entry == &tu_operator_fused_all_gather_scaled_matmul) /* its matrices come with their scales */
        return (int)((const tu_fused_all_gather_scaled_matmul_attributes *)attributes)->present.count + 1;
    return entry->flags & TU_EACH_INPUT ? operands : entry->results + entry->saved;
}

static tutti_status take_operands(const char *who, const tu_vertex *vertex, tt_tensor **tensors, tt_tensor **inputs) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < vertex->operand_count && status == TUTTI_OK; i++) {
        const tu_operand *operand = &vertex->operands[i];
        inputs[i] = NULL;
        if (operand->value != NULL) {
            status = fake_of(tensors, operand->value);
            inputs[i] = tensors[operand->value->number];
        } else if (operand->number != 0) {
            inputs[i] = tt_number(operand->number == TUTTI_I64 ? (double)operand->at.whole : operand->at.real);
        } else if (i >= TU_INPUTS || !(vertex->entry->optional & TU_INPUT(i))) {
            return tu_error(TUTTI_ERROR_STATE, "%s: %s needs %s, and is given none", who, vertex->entry->name,
                            tu_argument_name(vertex->entry, i));
        }
    }
    return status != TUTTI_OK ? status : tu_self()->pending;
}

/* Asks the shape rule; what it says is in the call, whose memory belongs to the scope. */
static tutti_status ask(const char *who, const tu_vertex *vertex, tt_tensor **tensors, tu_call *call) {
    tt_tensor **inputs = tu_scope_memory(((size_t)vertex->operand_count + 1) * sizeof *inputs);
    if (inputs == NULL)
        return TUTTI_ERROR_MEMORY;
    tutti_status status = take_operands(who, vertex, tensors, inputs);
    if (status != TUTTI_OK)
        return status;
    tu_call_init(call, vertex->entry, vertex->operand_count, inputs, vertex->attributes);
    call->in_place = vertex->in_place;
    call->device = TUTTI_CPU;
    call->placed = call->wants_grad = false;
    for (int i = 0; i < vertex->operand_count && !call->placed; i++)
        if (inputs[i] != NULL && !(inputs[i]->flags & TU_NUMBER)) {
            call->placed = true;
            call->device = inputs[i]->device;
        }
    if (vertex->entry->flags & TU_EACH_INPUT) {
        call->output_count = tu_result_count(vertex->entry, false, vertex->operand_count, vertex->attributes);
        call->results = tu_scope_memory(((size_t)call->output_count + 1) * sizeof *call->results);
        if (call->results == NULL)
            return TUTTI_ERROR_MEMORY;
    }
    return vertex->entry->shape(call);
}

static tutti_status check_vertex(const char *who, const tu_vertex *vertex, tt_tensor **tensors) {
    tu_call call;
    tutti_status status = ask(who, vertex, tensors, &call);
    return status == TUTTI_OK ? compare(who, vertex, &call) : status;
}

tutti_status tu_vertex_reshape(const char *who, tu_vertex *vertex, tt_tensor **tensors) {
    tu_call call;
    tt_scope scope = tt_scope_open();
    tutti_status status = ask(who, vertex, tensors, &call);
    for (int i = 0; i < vertex->result_count && status == TUTTI_OK; i++)
        vertex->results[i]->shape = call.results[i];
    tu_scope_leave(&scope);
    return status;
}

/* ---- a vertex from its operands ---- */

static tutti_status make_results(tt_graph *graph, tu_vertex *vertex, const tu_call *call) {
    for (int i = 0; i < vertex->result_count; i++) {
        const tu_value *first = vertex->operand_count > 0 ? vertex->operands[0].value : NULL;
        bool view = (vertex->entry->flags & TU_VIEW) && first != NULL;
        tu_value *value = tu_graph_value(graph, vertex->entry->name, &call->results[i], view ? first->storage : -1);
        if (value == NULL)
            return TUTTI_ERROR_MEMORY;
        tu_vertex_adopt(vertex, i, value);
    }
    return TUTTI_OK;
}

tu_vertex *tu_graph_call(tt_graph *graph, const tu_operator *entry, int operand_count, const tu_operand *operands,
                         const void *attributes, tu_vertex *place) {
    int results = tu_result_count(entry, false, operand_count, attributes), count = graph->value_count;
    static const char nothing[1]; /* where a row has no attributes */
    tu_vertex *vertex =
        tu_graph_vertex(graph, entry, operand_count, results, attributes != NULL ? attributes : nothing, place);
    tt_tensor **tensors = vertex != NULL ? calloc((size_t)count + 1, sizeof(tt_tensor *)) : NULL;
    if (tensors == NULL) {
        if (vertex != NULL)
            tu_vertex_erase(graph, vertex);
        tu_error_memory("a vertex of a graph", (size_t)count * sizeof(tt_tensor *));
        return NULL;
    }
    if (operand_count > 0)
        memcpy(vertex->operands, operands, (size_t)operand_count * sizeof *operands);
    tt_scope scope = tt_scope_open();
    tu_call call;
    tutti_status status = ask("graph", vertex, tensors, &call);
    if (status == TUTTI_OK)
        status = make_results(graph, vertex, &call);
    tu_scope_leave(&scope);
    for (int i = 0; i < count; i++)
        tu_tensor_drop(tensors[i]);
    free(tensors);
    if (status != TUTTI_OK)
        tu_vertex_erase(graph, vertex);
    return status == TUTTI_OK ? vertex : NULL;
}

tutti_status tu_vertex_infer(const tt_graph *graph, const tu_vertex *vertex, tu_shape *first) {
    tt_tensor **tensors = calloc((size_t)graph->value_count + 1, sizeof(tt_tensor *));
    if (tensors == NULL)
        return tu_error_memory("a shape", (size_t)graph->value_count * sizeof(tt_tensor *));
    tu_vertex pure = *vertex;
    pure.in_place = false;
    tt_scope scope = tt_scope_open();
    tu_call call;
    tutti_status status = ask("graph", &pure, tensors, &call);
    if (status == TUTTI_OK)
        *first = call.results[0];
    tu_scope_leave(&scope);
    for (int i = 0; i < graph->value_count; i++)
        tu_tensor_drop(tensors[i]);
    free(tensors);
    return status;
}

/* ---- what else must hold ---- */

/* What a vertex writes is a value: a number or nothing cannot be written. */
static tutti_status check_written(const char *who, const tu_vertex *vertex) {
    for (int i = 0; i < vertex->operand_count; i++) {
        bool optional = i < TU_INPUTS && (vertex->entry->optional & TU_INPUT(i)) && vertex->operands[i].number == 0;
        bool writes = (vertex->in_place && (i == 0 || vertex->entry->flags & TU_EACH_INPUT)) ||
                      (i < TU_INPUTS && vertex->entry->written & TU_INPUT(i));
        if (writes && !optional && vertex->operands[i].value == NULL)
            return tu_error(TUTTI_ERROR_STATE, "%s: %s%s writes %s, which is a number and no value", who,
                            vertex->entry->name, vertex->in_place ? "_" : "", tu_argument_name(vertex->entry, i));
    }
    return TUTTI_OK;
}

/* premul_sum needs a factor, which only the rows of that name have. */
static tutti_status check_reduction(const char *who, const tu_vertex *vertex) {
    const tu_operator *entry = vertex->entry;
    for (int i = 0; i < entry->argument_count; i++)
        if (entry->arguments[i].type == TT_ARGUMENT_REDUCTION &&
            *(const tutti_reduction *)((const char *)vertex->attributes + entry->arguments[i].offset) ==
                TUTTI_PREMUL_SUM)
            return tu_error(TUTTI_ERROR_STATE, "%s: %s by premul_sum has no factor; %s_premul has one", who,
                            entry->name, entry->name);
    return TUTTI_OK;
}

/* Rows on a list that have a number for each of it. */
static tutti_status check_lists(const char *who, const tu_vertex *vertex) {
    const tu_operator *entry = vertex->entry;
    if (entry->argument_count == 0 || entry->arguments[0].type != TT_ARGUMENT_TENSORS ||
        (entry != &tu_operator_version_set && strstr(entry->name, "coalesced") == NULL))
        return TUTTI_OK;
    for (int i = 1; i < entry->argument_count; i++) {
        const tu_ints *list = (const tu_ints *)((const char *)vertex->attributes + entry->arguments[i].offset);
        if (entry->arguments[i].type == TT_ARGUMENT_INTS && list->count != (size_t)vertex->operand_count)
            return tu_error(TUTTI_ERROR_STATE, "%s: %s has %zu %s for %d tensors", who, entry->name, list->count,
                            entry->arguments[i].name, vertex->operand_count);
    }
    return TUTTI_OK;
}

/* The rule of version_set would refuse a version that is counted from the beginning; that of storage_resize asks about
 * the storage, and not about shapes. */
static bool has_rule(const tu_vertex *vertex) {
    return vertex->entry != &tu_operator_version_set && vertex->entry != &tu_operator_storage_resize;
}

tutti_status tu_vertex_check_shapes(const char *who, const tu_vertex *vertex, tt_tensor **tensors) {
    tt_scope scope = tt_scope_open();
    tutti_status status = check_lists(who, vertex);
    if (status == TUTTI_OK)
        status = check_written(who, vertex);
    if (status == TUTTI_OK)
        status = check_reduction(who, vertex);
    if (status == TUTTI_OK && has_rule(vertex))
        status = check_vertex(who, vertex, tensors);
    tu_scope_leave(&scope);
    return status;
}

tutti_status tu_graph_check_shapes(const char *who, const tt_graph *graph) {
    tt_tensor **tensors = calloc((size_t)graph->value_count + 1, sizeof(tt_tensor *));
    tutti_status status = tensors != NULL ? TUTTI_OK : tu_error_memory("a check of a graph", sizeof *tensors);
    for (const tu_vertex *vertex = graph->first; vertex != NULL && status == TUTTI_OK; vertex = vertex->next)
        status = tu_vertex_check_shapes(who, vertex, tensors);
    for (int i = 0; tensors != NULL && i < graph->value_count; i++)
        tu_tensor_drop(tensors[i]);
    free(tensors);
    return status;
}
