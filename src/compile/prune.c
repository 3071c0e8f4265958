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

typedef struct prune {
    const tu_entry *entry;
    tu_graph_copy copy;
    fate *fates; /* by value */
} prune;

/* Of all operands together: whether one is there, and whether one is absent. */
static void look(const prune *of, const tu_vertex *vertex, bool *there, bool *absent) {
    *there = *absent = false;
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        fate one = value != NULL ? of->fates[value->number] : APART;
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
    tt_tensor *zeros =
        tt_zero_(tt_empty_strided(tt_dims_of(value->shape.ndim, value->shape.sizes),
                                  tt_dims_of(value->shape.ndim, value->shape.strides), value->shape.dtype, &options));
    tt_grad_mode(recording);
    tutti_status status = zeros != NULL ? tu_graph_copy_as(&of->copy, value, TU_INPUT_CONSTANT) : tu_self()->pending;
    if (status == TUTTI_OK) {
        of->copy.to->inputs[of->copy.to->input_count - 1].tensor = tu_tensor_hold(zeros);
        of->fates[value->number] = THERE;
    }
    tu_scope_leave(&scope);
    return status;
}

/* add(gradient, absent): its result is the gradient itself, where that has the shape of the sum. */
static bool is_sum(const prune *of, const tu_vertex *vertex, const tu_value **rest) {
    if (vertex->entry != &tu_operator_add || vertex->in_place)
        return false;
    const tu_value *left = vertex->operands[0].value, *right = vertex->operands[1].value;
    if (left == NULL || right == NULL)
        return false;
    *rest = of->fates[left->number] == ABSENT ? right : left;
    return tu_shape_equal(&(*rest)->shape, &vertex->results[0]->shape);
}

static tutti_status copy_vertex(prune *of, const tu_vertex *vertex, bool there) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < vertex->operand_count && status == TUTTI_OK; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value != NULL && of->fates[value->number] == ABSENT)
            status = bring_zeros(of, value);
    }
    if (status == TUTTI_OK)
        status = tu_graph_copy_vertex(&of->copy, vertex);
    for (int i = 0; i < vertex->result_count; i++)
        of->fates[vertex->results[i]->number] = there ? THERE : APART;
    return status;
}

/* What hooks do besides computing gradients cannot be told from what they do with an absent one. */
static tutti_status check_effect(const prune *of, const tu_vertex *vertex, bool there) {
    bool effect = vertex->in_place || (vertex->result_count == 0 && vertex->entry != &tu_operator_wait);
    if (!effect || there)
        return TUTTI_OK;
    return tu_error(
        TUTTI_ERROR_UNSUPPORTED,
        "the compiled backward of %s has hooks that change something (%s), and not all of its results got a "
        "gradient; use them all, or call the function itself",
        of->entry->name, vertex->entry->name);
}

static tutti_status take_vertex(prune *of, const tu_vertex *vertex) {
    bool there, absent;
    const tu_value *rest;
    look(of, vertex, &there, &absent);
    if (!absent) {
        tutti_status status = check_effect(of, vertex, there);
        return status == TUTTI_OK ? copy_vertex(of, vertex, there) : status;
    }
    if (!there) {
        for (int i = 0; i < vertex->result_count; i++)
            of->fates[vertex->results[i]->number] = ABSENT;
        return TUTTI_OK;
    }
    if (!is_sum(of, vertex, &rest))
        return copy_vertex(of, vertex, true);
    of->copy.values[vertex->results[0]->number] = of->copy.values[rest->number];
    of->fates[vertex->results[0]->number] = THERE;
    return TUTTI_OK;
}

static tutti_status take_all(prune *of, const bool *arrived) {
    const tt_graph *from = of->entry->whole_backward;
    tutti_status status = TUTTI_OK;
    for (int i = 0, tangent = 0; i < from->input_count && status == TUTTI_OK; i++) {
        status = tu_graph_copy_input(&of->copy, &from->inputs[i]);
        if (from->inputs[i].kind == TU_INPUT_TANGENT)
            of->fates[from->inputs[i].value->number] = arrived[tangent++] ? THERE : ABSENT;
    }
    /* Tangents that are absent stay inputs, so that places are the same, and are used by nobody: zeros, where a vertex
     * needs them, are another input. */
    for (const tu_vertex *vertex = from->first; vertex != NULL && status == TUTTI_OK; vertex = vertex->next)
        status = take_vertex(of, vertex);
    for (int i = 0; i < from->output_count && status == TUTTI_OK; i++) {
        const tu_operand *output = &from->outputs[i];
        bool absent = output->value != NULL && of->fates[output->value->number] == ABSENT;
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
    of.fates = calloc((size_t)entry->whole_backward->value_count + 1, sizeof *of.fates);
    status = of.fates != NULL ? take_all(&of, arrived) : tu_error_memory("a backward", sizeof *of.fates);
    free(of.fates);
    return tu_graph_copy_end(&of.copy, status, made);
}
