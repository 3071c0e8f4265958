/* SPDX-License-Identifier: Apache-2.0
 *
 * Backwards for which some results got no gradient. Eager code runs no node that nothing arrives at; to compute with
 * zeros instead would cost time, and be wrong where a derivative is infinite. So the backward is copied without what
 * depends on absent gradients alone. A sum of a gradient and an absent one is the gradient.
 */
#include <stdlib.h>
#include <string.h>

#include "compile/entry.h"
#include "functional/operators.h"
#include "tensor/operators.h"

typedef enum fate {
    APART,  /* depends on no gradient */
    THERE,  /* on one that arrived */
    ABSENT, /* on those alone that did not */
} fate;

/* Memory has a fate, and not a value: what is written through one view is read through another. */
typedef struct prune {
    const tu_entry *entry;
    tu_graph_copy copy;
    fate *fates; /* by storage */
    bool *given; /* by storage: it is an input's */
} prune;

static fate fate_of(const prune *of, const tu_value *value) {
    return value != NULL ? of->fates[value->storage] : APART;
}

/* Whether the copy has it. What is absent may be there nevertheless: zeros, into which nothing was written. */
static bool is_there(const prune *of, const tu_value *value) {
    return of->copy.values[value->number] != NULL;
}

/* Of all operands together: whether one is there, and whether one is absent. */
static void look(const prune *of, const tu_vertex *vertex, bool *there, bool *absent) {
    *there = *absent = false;
    for (int i = 0; i < vertex->operand_count; i++) {
        fate one = fate_of(of, vertex->operands[i].value);
        *there = *there || one == THERE;
        *absent = *absent || one == ABSENT;
    }
}

/* An absent gradient that a vertex needs beside others: zeros, which the graph keeps. */
static tutti_status bring_zeros(prune *of, const tu_value *value) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = value->shape.device;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    int64_t count = (int64_t)(tu_shape_bytes(&value->shape) / tu_dtype_bytes[value->shape.dtype]);
    tt_tensor *zeros = tt_as_strided(tt_zeros(tt_shape(count), value->shape.dtype, &options),
                                     tt_dims_of(value->shape.ndim, value->shape.sizes),
                                     tt_dims_of(value->shape.ndim, value->shape.strides), 0); /* it may be expanded */
    tt_grad_mode(recording);
    tutti_status status = zeros != NULL ? tu_graph_copy_as(&of->copy, value, TU_INPUT_CONSTANT) : tu_self()->pending;
    if (status == TUTTI_OK)
        of->copy.to->inputs[of->copy.to->input_count - 1].tensor = tu_tensor_hold(zeros);
    tu_scope_leave(&scope);
    return status;
}

/* add(gradient, absent): its result is the gradient, where that has the shape of the sum. */
static bool is_sum(const prune *of, const tu_vertex *vertex, const tu_value **rest) {
    if (vertex->entry != &tu_operator_add || vertex->in_place)
        return false;
    const tu_value *left = vertex->operands[0].value, *right = vertex->operands[1].value;
    if (left == NULL || right == NULL)
        return false;
    *rest = fate_of(of, left) == ABSENT ? right : left;
    return tu_shape_equal(&(*rest)->shape, &vertex->results[0]->shape);
}

/* The gradient in memory of the sum's own: a pass leaves the copy out where nobody can tell. */
static tutti_status take_rest(prune *of, const tu_vertex *vertex, const tu_value *rest) {
    static const char nothing[1];
    const tu_value *sum = vertex->results[0];
    tu_vertex *made = tu_graph_vertex(of->copy.to, &tu_operator_clone, 1, 1, nothing, NULL);
    tu_value *result = made != NULL ? tu_graph_value(of->copy.to, sum->name, &sum->shape, sum->storage) : NULL;
    if (result == NULL)
        return TUTTI_ERROR_MEMORY;
    made->operands[0].value = of->copy.values[rest->number];
    tu_vertex_adopt(made, 0, result);
    of->copy.values[sum->number] = result;
    of->fates[sum->storage] = THERE;
    return TUTTI_OK;
}

/* What hooks do besides computing gradients cannot be told from what they do with an absent one. */
static tutti_status refuse(const prune *of, const tu_vertex *vertex) {
    return tu_error(
        TUTTI_ERROR_UNSUPPORTED,
        "the compiled backward of %s has hooks that change something (%s), and not all of its results got a "
        "gradient; use them all, or call the function itself",
        of->entry->name, vertex->entry->name);
}

static tutti_status copy_vertex(prune *of, const tu_vertex *vertex, bool there) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < vertex->operand_count && status == TUTTI_OK; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value != NULL && !is_there(of, value)) /* zeros that are written would not be zeros at the next run */
            status = tu_vertex_writes(vertex, i) ? refuse(of, vertex) : bring_zeros(of, value);
    }
    if (status == TUTTI_OK)
        status = tu_graph_copy_vertex(&of->copy, vertex);
    for (int i = 0; i < vertex->operand_count && there; i++)
        if (vertex->operands[i].value != NULL && tu_vertex_writes(vertex, i))
            of->fates[vertex->operands[i].value->storage] = THERE;
    for (int i = 0; i < vertex->result_count && there; i++)
        of->fates[vertex->results[i]->storage] = THERE;
    return status;
}

/* Nothing of it is in the copy, and memory that it would have written waits for what arrives. */
static tutti_status leave_out(prune *of, const tu_vertex *vertex) {
    for (int i = 0; i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL && tu_vertex_writes(vertex, i)) {
            if (of->given[vertex->operands[i].value->storage] && fate_of(of, vertex->operands[i].value) == APART)
                return refuse(of, vertex);
            of->fates[vertex->operands[i].value->storage] = ABSENT;
        }
    for (int i = 0; i < vertex->result_count; i++)
        of->fates[vertex->results[i]->storage] = ABSENT;
    return TUTTI_OK;
}

/* Whether it changes memory that is not the backward's own. */
static bool has_effect(const prune *of, const tu_vertex *vertex) {
    if (vertex->entry == &tu_operator_wait)
        return false;
    for (int i = 0; i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL && tu_vertex_writes(vertex, i) &&
            of->given[vertex->operands[i].value->storage])
            return true;
    return vertex->result_count == 0 && !vertex->in_place;
}

static tutti_status take_vertex(prune *of, const tu_vertex *vertex) {
    bool there, absent;
    const tu_value *rest;
    look(of, vertex, &there, &absent);
    bool view = vertex->entry->flags & TU_VIEW && vertex->operands[0].value != NULL;
    if (view && is_there(of, vertex->operands[0].value)) /* it costs nothing, and somebody may write through it */
        return tu_graph_copy_vertex(&of->copy, vertex);
    if (!absent)
        return has_effect(of, vertex) && !there ? refuse(of, vertex) : copy_vertex(of, vertex, there);
    if (!there)
        return leave_out(of, vertex);
    return is_sum(of, vertex, &rest) ? take_rest(of, vertex, rest) : copy_vertex(of, vertex, true);
}

static tutti_status take_all(prune *of, const bool *arrived) {
    const tt_graph *from = of->entry->whole_backward;
    tutti_status status = TUTTI_OK;
    for (int i = 0, tangent = 0; i < from->input_count && status == TUTTI_OK; i++) {
        const tu_value *value = from->inputs[i].value;
        status = tu_graph_copy_input(&of->copy, &from->inputs[i]);
        of->given[value->storage] = true;
        if (from->inputs[i].kind != TU_INPUT_TANGENT)
            continue;
        /* Tangents that are absent stay inputs, so that places are the same, and are used by nobody: zeros, where a
         * vertex needs them, are another input. */
        if (!arrived[tangent])
            of->copy.values[value->number] = NULL;
        of->fates[value->storage] = arrived[tangent++] ? THERE : ABSENT;
    }
    for (const tu_vertex *vertex = from->first; vertex != NULL && status == TUTTI_OK; vertex = vertex->next)
        status = take_vertex(of, vertex);
    for (int i = 0; i < from->output_count && status == TUTTI_OK; i++) {
        const tu_operand *output = &from->outputs[i];
        bool absent = fate_of(of, output->value) == ABSENT;
        status = tu_graph_copy_output(&of->copy, absent ? &(tu_operand){ .value = NULL } : output);
    }
    for (int i = 0; i < from->effect_count && status == TUTTI_OK; i++)
        status = tu_graph_copy_effect(&of->copy, &from->effects[i]);
    return status;
}

tutti_status tu_prune(const tu_entry *entry, const bool *arrived, tt_graph **made) {
    prune of = { .entry = entry };
    tutti_status status = tu_graph_copy_begin(&of.copy, entry->whole_backward);
    if (status != TUTTI_OK)
        return status;
    size_t storages = (size_t)entry->whole_backward->storage_count + 1;
    of.fates = calloc(storages, sizeof *of.fates);
    of.given = calloc(storages, sizeof *of.given);
    status = of.fates != NULL && of.given != NULL ? take_all(&of, arrived)
                                                  : tu_error_memory("a backward", storages * sizeof *of.fates);
    free(of.fates);
    free(of.given);
    return tu_graph_copy_end(&of.copy, status, made);
}
