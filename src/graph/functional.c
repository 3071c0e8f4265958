/* SPDX-License-Identifier: Apache-2.0
 *
 * The pass that leaves no writes but at the end. What is written in place becomes a new value, and whoever looks at
 * that memory later, also through a view, looks at the new value; inputs that were written get their contents by one
 * copy_ at the end. Collectives that write (all_reduce_, all_gather_out …) become those that return a new tensor.
 *
 * Memory is left as it is where this cannot be said: a part of it is written through a view, its size, version or
 * gradient is changed, two inputs share it, or an operator that has no other form writes it.
 */
#include <stdlib.h>
#include <string.h>

#include "functional/operators.h"
#include "graph/passes.h"

/* By the number of the storage. */
typedef struct memory {
    tu_value *base; /* what it was made as */
    tu_value *now;  /* what it is at the vertex that is looked at; NULL: the base */
    bool written, fixed;
} memory;

/* ---- which vertices have another form ---- */

/* The same call with a new result; `dim` where that form has one and this has not. */
static const tu_operator *other_form(const tu_vertex *vertex) {
    static const struct {
        const tu_operator *writes, *returns;
    } forms[] = {
        { &tu_operator_all_gather_out, &tu_operator_all_gather },
        { &tu_operator_reduce_scatter_out, &tu_operator_reduce_scatter },
        { &tu_operator_reduce_scatter_premul_out, &tu_operator_reduce_scatter_premul },
        { &tu_operator_all_to_all_out, &tu_operator_all_to_all_single },
        { &tu_operator_all_reduce, &tu_operator_all_reduce },
        { &tu_operator_all_reduce_premul, &tu_operator_all_reduce_premul },
        { &tu_operator_broadcast, &tu_operator_broadcast },
        { &tu_operator_fill, &tu_operator_full },
        { &tu_operator_copy, &tu_operator_clone },
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (vertex->entry == forms[i].writes)
            return forms[i].returns;
    return vertex->in_place && !(vertex->entry->flags & (TU_IMPURE | TU_EACH_INPUT)) && vertex->entry->results == 1 &&
                   vertex->entry->saved == 0
               ? vertex->entry
               : NULL;
}

/* Whether the vertex writes the whole of its first operand and nothing else, and its other form gives the same. */
static bool can_return(const tt_graph *graph, const tu_vertex *vertex) {
    const tu_value *to = vertex->operand_count > 0 ? vertex->operands[0].value : NULL;
    const tu_operator *form = other_form(vertex);
    if (form == NULL || to == NULL)
        return false;
    for (int i = 1; i < vertex->operand_count; i++)
        if (tu_vertex_writes(vertex, i))
            return false;
    if (form == &tu_operator_clone && vertex->operands[1].value != NULL)
        return tu_shape_equal(&vertex->operands[1].value->shape, &to->shape);
    if (!vertex->in_place || form == &tu_operator_full || form == &tu_operator_clone)
        return tu_shape_is_row_major(&to->shape); /* the new one is, too */
    tu_shape made;
    tutti_status status = tu_vertex_infer(graph, vertex, &made);
    tt_error_clear(); /* a form that does not exist is no error */
    return status == TUTTI_OK && tu_shape_equal(&made, &to->shape);
}

/* ---- which memory ---- */

static void find_bases(const tt_graph *graph, memory *all) {
    for (int i = 0; i < graph->input_count; i++) {
        memory *of = &all[graph->inputs[i].value->storage];
        of->fixed = of->fixed || of->base != NULL; /* two inputs share it */
        of->base = graph->inputs[i].value;
    }
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        for (int i = 0; i < vertex->result_count; i++) {
            memory *of = &all[vertex->results[i]->storage];
            if (of->base == NULL)
                of->base = vertex->results[i];
            of->fixed = of->fixed || vertex->entry->flags & TU_BRINGS;
        }
    for (int i = 0; i < graph->effect_count; i++)
        if (graph->effects[i].value != NULL)
            all[graph->effects[i].value->storage].fixed = true;
}

static void find_writes(const tt_graph *graph, memory *all) {
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next) {
        /* Operations on symmetric memory need the very memory that they are given. */
        bool symmetric = strcmp(vertex->entry->family, "symmetric memory") == 0;
        for (int i = 0; i < vertex->operand_count; i++) {
            const tu_value *value = vertex->operands[i].value;
            if (value == NULL)
                continue;
            memory *of = &all[value->storage];
            of->fixed = of->fixed || symmetric || !tu_value_is_view_of(value, of->base);
            if (!tu_vertex_writes(vertex, i) || vertex->entry == &tu_operator_wait)
                continue;
            of->written = true;
            of->fixed = of->fixed || i != 0 || !tu_shape_equal(&value->shape, &of->base->shape) ||
                        value->shape.offset != of->base->shape.offset || !can_return(graph, vertex);
        }
    }
}

/* ---- rewriting ---- */

static tu_value *current(tt_graph *graph, const memory *all, tu_value *value, tu_vertex *place) {
    const memory *of = &all[value->storage];
    return of->now != NULL ? tu_value_view_again(graph, value, of->base, of->now, place) : value;
}

static tutti_status refresh(tt_graph *graph, const memory *all, tu_vertex *vertex, int storages) {
    for (int i = 0; i < vertex->operand_count; i++) {
        tu_value *value = vertex->operands[i].value;
        if (value == NULL || value->storage >= storages)
            continue;
        vertex->operands[i].value = current(graph, all, value, vertex);
        if (vertex->operands[i].value == NULL)
            return TUTTI_ERROR_MEMORY;
    }
    return TUTTI_OK;
}

static tu_vertex *call_full(tt_graph *graph, const tu_shape *like, double number, tu_vertex *place) {
    tu_full_attributes attributes = {
        .shape = tt_dims_of(like->ndim, like->sizes), .value = number, .dtype = like->dtype, .device = like->device
    };
    return tu_graph_call(graph, &tu_operator_full, 0, NULL, &attributes, place);
}

/* The same without the tensor that is written. */
static tu_vertex *call_collective(tt_graph *graph, tu_vertex *vertex) {
    const tu_operator *form = other_form(vertex);
    tutti_group *group = tu_vertex_group(vertex);
    tu_all_gather_attributes gather = { .dim = 0, .group = group };
    tu_reduce_scatter_attributes scatter = { .reduction = tu_vertex_reduction(vertex), .dim = 0, .group = group };
    tu_reduce_scatter_premul_attributes premul = { .dim = 0, .group = group };
    tu_all_to_all_single_attributes exchange = { .group = group };
    const void *attributes = form == &tu_operator_all_gather       ? (const void *)&gather
                             : form == &tu_operator_reduce_scatter ? (const void *)&scatter
                                                                   : NULL;
    if (form == &tu_operator_reduce_scatter_premul) {
        premul.factor = ((const tu_reduce_scatter_premul_out_attributes *)vertex->attributes)->factor;
        attributes = &premul;
    }
    if (form == &tu_operator_all_to_all_single) {
        const tu_all_to_all_out_attributes *own = vertex->attributes;
        exchange.out_splits = own->out_splits;
        exchange.in_splits = own->in_splits;
        attributes = &exchange;
    }
    return tu_graph_call(graph, form, vertex->operand_count - 1, vertex->operands + 1, attributes, vertex);
}

static tu_vertex *call_other_form(tt_graph *graph, tu_vertex *vertex, const tu_shape *like) {
    const tu_operator *form = other_form(vertex);
    if (form == &tu_operator_full)
        return call_full(graph, like, ((const tu_fill_attributes *)vertex->attributes)->value, vertex);
    if (form == &tu_operator_clone) {
        const tu_operand *from = &vertex->operands[1];
        return from->value != NULL
                   ? tu_graph_call(graph, form, 1, from, NULL, vertex)
                   : call_full(graph, like, from->number == TUTTI_I64 ? (double)from->at.whole : from->at.real, vertex);
    }
    return vertex->in_place
               ? tu_graph_call(graph, form, vertex->operand_count, vertex->operands, vertex->attributes, vertex)
               : call_collective(graph, vertex);
}

static tu_value *with_sizes(tt_graph *graph, tu_value *x, const tu_shape *like, tu_vertex *place) {
    if (tu_shape_equal(&x->shape, like))
        return x;
    tu_view_attributes view = { .shape = tt_dims_of(like->ndim, like->sizes) };
    tu_operand operand = { .value = x };
    tu_vertex *made = tu_graph_call(graph, &tu_operator_view, 1, &operand, &view, place);
    return made != NULL ? made->results[0] : NULL;
}

static bool writes_memory(const tu_vertex *vertex) {
    return vertex->operand_count > 0 && vertex->operands[0].value != NULL && tu_vertex_writes(vertex, 0) &&
           vertex->entry != &tu_operator_wait;
}

static tutti_status rewrite(tt_graph *graph, memory *all, int storages) {
    tutti_status status = TUTTI_OK;
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL && status == TUTTI_OK; vertex = next) {
        next = vertex->next;
        int storage = writes_memory(vertex) ? vertex->operands[0].value->storage : -1;
        bool view = vertex->entry->flags & TU_VIEW && tu_vertex_is_pure(vertex); /* is made again where it is used */
        if (!view)
            status = refresh(graph, all, vertex, storages);
        if (status != TUTTI_OK || storage < 0 || storage >= storages || all[storage].fixed)
            continue;
        const tu_shape *like = &all[storage].base->shape;
        tu_vertex *made = call_other_form(graph, vertex, like);
        tu_value *now = made != NULL ? with_sizes(graph, made->results[0], like, vertex) : NULL;
        if (now == NULL)
            return TUTTI_ERROR_MEMORY;
        all[storage].now = now;
        tu_vertex_erase(graph, vertex);
    }
    return status;
}

/* Outputs are what their memory has become; one value that is returned twice stays one. */
static tutti_status renew_outputs(tt_graph *graph, const memory *all, int storages) {
    tu_value **before = malloc(((size_t)graph->output_count + 1) * sizeof *before);
    tutti_status status = before != NULL ? TUTTI_OK : tu_error_memory("a pass", sizeof *before);
    for (int i = 0; i < graph->output_count && status == TUTTI_OK; i++) {
        tu_operand *output = &graph->outputs[i];
        before[i] = output->value;
        if (before[i] == NULL || before[i]->storage >= storages || all[before[i]->storage].base->maker == NULL)
            continue;
        int first = 0;
        while (before[first] != before[i])
            first++;
        output->value = first < i ? graph->outputs[first].value : current(graph, all, before[i], NULL);
        if (output->value == NULL)
            status = TUTTI_ERROR_MEMORY;
    }
    free(before);
    return status;
}

/* An input that was written gets its new contents, and is itself returned. */
static tutti_status write_back(tt_graph *graph, const memory *all) {
    for (int i = 0; i < graph->input_count; i++) {
        const memory *of = &all[graph->inputs[i].value->storage];
        if (of->now == NULL)
            continue;
        static const char nothing[1];
        tu_vertex *copy = tu_graph_vertex(graph, &tu_operator_copy, 2, 0, nothing, NULL);
        if (copy == NULL)
            return TUTTI_ERROR_MEMORY;
        copy->in_place = true;
        copy->operands[0].value = of->base;
        copy->operands[1].value = of->now;
    }
    return TUTTI_OK;
}

tutti_status tu_pass_functional(tt_graph *graph, size_t bytes) {
    (void)bytes;
    int storages = graph->storage_count;
    memory *all = calloc((size_t)storages + 1, sizeof *all);
    if (all == NULL)
        return tu_error_memory("a pass", (size_t)storages * sizeof *all);
    find_bases(graph, all);
    find_writes(graph, all);
    tutti_status status = rewrite(graph, all, storages);
    if (status == TUTTI_OK)
        status = renew_outputs(graph, all, storages);
    if (status == TUTTI_OK)
        status = write_back(graph, all);
    free(all);
    return status == TUTTI_OK ? tu_pass_dead(graph, 0) : status; /* views that were made again */
}
