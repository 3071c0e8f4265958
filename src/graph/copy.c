/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies of graphs, whole or in parts: values keep their names, shapes and numbers of storages.
 */
#include <stdlib.h>
#include <string.h>

#include "graph/graph.h"

tutti_status tu_graph_copy_begin(tu_graph_copy *copy, const tt_graph *from) {
    *copy = (tu_graph_copy){ .from = from };
    copy->to = tu_graph_new();
    copy->values = calloc((size_t)from->value_count + 1, sizeof(tu_value *));
    if (copy->to == NULL || copy->values == NULL) {
        tutti_status status = tu_error_memory("a copy of a graph", (size_t)from->value_count * sizeof(tu_value *));
        return tu_graph_copy_end(copy, status, NULL);
    }
    copy->to->storage_count = from->storage_count;
    return TUTTI_OK;
}

static tutti_status copy_value(tu_graph_copy *copy, const tu_value *value, tu_value **made) {
    *made = tu_graph_value(copy->to, value->name, &value->shape, value->storage);
    if (*made == NULL)
        return TUTTI_ERROR_MEMORY;
    (*made)->flags = value->flags;
    copy->values[value->number] = *made;
    return TUTTI_OK;
}

tutti_status tu_graph_copy_input(tu_graph_copy *copy, const tu_graph_input *input) {
    tu_value *value;
    tutti_status status = copy_value(copy, input->value, &value);
    tu_graph_input *made = status == TUTTI_OK ? tu_graph_input_add(copy->to, input->kind, value) : NULL;
    if (made == NULL)
        return TUTTI_ERROR_MEMORY;
    *made = *input;
    made->value = value;
    made->tensor = tu_tensor_hold(input->tensor);
    if (input->kind == TU_INPUT_HELD)
        input->holder.keep(input->holder.owner);
    return TUTTI_OK;
}

tutti_status tu_graph_copy_as(tu_graph_copy *copy, const tu_value *value, tu_input_kind kind) {
    tu_value *made;
    tutti_status status = copy_value(copy, value, &made);
    if (status == TUTTI_OK && tu_graph_input_add(copy->to, kind, made) == NULL)
        status = TUTTI_ERROR_MEMORY;
    return status;
}

static tu_operand map_operand(const tu_graph_copy *copy, const tu_operand *operand) {
    tu_operand made = *operand;
    if (operand->value != NULL)
        made.value = copy->values[operand->value->number];
    return made;
}

tutti_status tu_graph_copy_vertex(tu_graph_copy *copy, const tu_vertex *vertex) {
    tu_vertex *made =
        tu_graph_vertex(copy->to, vertex->entry, vertex->operand_count, vertex->result_count, vertex->attributes, NULL);
    if (made == NULL)
        return TUTTI_ERROR_MEMORY;
    made->in_place = vertex->in_place;
    for (int i = 0; i < vertex->operand_count; i++)
        made->operands[i] = map_operand(copy, &vertex->operands[i]);
    for (int i = 0; i < vertex->result_count; i++) {
        tutti_status status = copy_value(copy, vertex->results[i], &made->results[i]);
        if (status != TUTTI_OK) {
            made->result_count = i;
            return status;
        }
        made->results[i]->maker = made;
        made->results[i]->place = i;
    }
    return TUTTI_OK;
}

tutti_status tu_graph_copy_output(tu_graph_copy *copy, const tu_operand *output) {
    tt_graph *to = copy->to;
    tu_operand *outputs = realloc(to->outputs, ((size_t)to->output_count + 1) * sizeof *outputs);
    if (outputs == NULL)
        return tu_error_memory("outputs of a graph", ((size_t)to->output_count + 1) * sizeof *outputs);
    to->outputs = outputs;
    outputs[to->output_count++] = map_operand(copy, output);
    return TUTTI_OK;
}

tutti_status tu_graph_copy_effect(tu_graph_copy *copy, const tu_graph_effect *effect) {
    tt_graph *to = copy->to;
    tu_graph_effect *effects = realloc(to->effects, ((size_t)to->effect_count + 1) * sizeof *effects);
    if (effects == NULL)
        return tu_error_memory("effects of a graph", ((size_t)to->effect_count + 1) * sizeof *effects);
    to->effects = effects;
    effects[to->effect_count++] =
        (tu_graph_effect){ effect->holder, effect->value != NULL ? copy->values[effect->value->number] : NULL };
    effect->holder.keep(effect->holder.owner);
    return TUTTI_OK;
}

tutti_status tu_graph_copy_first(tu_graph_copy *copy, int inputs, const tu_vertex *end, int outputs, int effects) {
    const tt_graph *from = copy->from;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < inputs && status == TUTTI_OK; i++)
        status = tu_graph_copy_input(copy, &from->inputs[i]);
    for (const tu_vertex *vertex = from->first; vertex != end && status == TUTTI_OK; vertex = vertex->next)
        status = tu_graph_copy_vertex(copy, vertex);
    for (int i = 0; i < outputs && status == TUTTI_OK; i++)
        status = tu_graph_copy_output(copy, &from->outputs[i]);
    for (int i = 0; i < effects && status == TUTTI_OK; i++)
        status = tu_graph_copy_effect(copy, &from->effects[i]);
    return status;
}

tutti_status tu_graph_copy_end(tu_graph_copy *copy, tutti_status status, tt_graph **made) {
    free(copy->values);
    copy->values = NULL;
    if (status == TUTTI_OK)
        *made = copy->to;
    else
        tt_graph_release(&copy->to);
    return status;
}

tutti_status tu_graph_clone(const tt_graph *from, tt_graph **made) {
    tu_graph_copy copy;
    tutti_status status = tu_graph_copy_begin(&copy, from);
    if (status != TUTTI_OK)
        return status;
    status = tu_graph_copy_first(&copy, from->input_count, NULL, from->output_count, from->effect_count);
    return tu_graph_copy_end(&copy, status, made);
}
