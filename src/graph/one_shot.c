/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes that choose another algorithm of symmetric memory for a collective.
 *
 * one_shot: a small sum over all ranks is written into a symmetric buffer, and every rank reads all buffers. Buffers
 * are constants of the graph, so each run uses the same ones, and the peers meet them once. One that is free again,
 * because its collective has been waited for, serves the next of the same size, dtype and group; ordinary memory is
 * never taken for one, nor one for ordinary memory. Explicit calls of the named operations get a buffer too where their
 * input is not symmetric.
 *
 * low_contention: large gathers and scatters that run beside computation touch one peer after the other.
 */
#include <stdlib.h>
#include <string.h>

#include <tutti/symmetric.h>

#include "functional/operators.h"
#include "functional/symmetric.h"
#include "graph/passes.h"

static bool is_enabled(tutti_group *group) {
    return group != NULL && tt_symm_enabled(tutti_group_world(group), tutti_group_name(group));
}

static size_t bytes_of(const tu_shape *shape) {
    return (size_t)tu_shape_numel(shape) * tu_dtype_bytes[shape->dtype];
}

/* ---- buffers ---- */

typedef struct buffer {
    struct buffer *next;
    tu_value *value; /* one-dimensional */
    tutti_group *group;
    int waits_for; /* the storage whose wait frees it; -1: it is free */
} buffer;

typedef struct planning {
    tt_graph *graph;
    buffer *buffers; /* the one that was used last is first */
} planning;

static buffer *new_buffer(planning *of, const tu_shape *like, tutti_group *group) {
    buffer *made = calloc(1, sizeof *made);
    tt_scope scope = tt_scope_open();
    tt_symm_options options = TT_SYMM_OPTIONS_INIT;
    options.group = group;
    tt_tensor *memory =
        made != NULL ? tt_symm_empty(tutti_group_world(group), tt_shape(tu_shape_numel(like)), like->dtype, &options)
                     : NULL;
    tu_shape shape = memory != NULL ? tu_shape_of(memory) : *like;
    tu_value *value = memory != NULL ? tu_graph_value(of->graph, "buffer", &shape, -1) : NULL;
    tu_graph_input *input = value != NULL ? tu_graph_input_add(of->graph, TU_INPUT_CONSTANT, value) : NULL;
    if (input != NULL)
        input->tensor = tu_tensor_hold(memory);
    tu_scope_leave(&scope);
    if (input == NULL) {
        free(made);
        if (tu_self()->pending == TUTTI_OK)
            tu_error_memory("a symmetric buffer", bytes_of(like));
        return NULL;
    }
    *made = (buffer){ of->buffers, value, group, -1 };
    of->buffers = made;
    return made;
}

/* The buffer that was freed last, of the same kind; or a new one. */
static buffer *take_buffer(planning *of, const tu_shape *like, tutti_group *group) {
    for (buffer **link = &of->buffers; *link != NULL; link = &(*link)->next) {
        buffer *one = *link;
        if (one->waits_for < 0 && one->group == group && one->value->shape.dtype == like->dtype &&
            one->value->shape.sizes[0] == tu_shape_numel(like))
            return one;
    }
    return new_buffer(of, like, group);
}

static void free_buffers(planning *of, const tu_vertex *vertex) {
    for (buffer **link = &of->buffers; *link != NULL; link = &(*link)->next) {
        buffer *one = *link;
        if (one->waits_for < 0 || !tu_vertex_waits_for(vertex, one->waits_for))
            continue;
        one->waits_for = -1;
        *link = one->next; /* to the front: the last freed is the first to be used again */
        one->next = of->buffers;
        of->buffers = one;
        return;
    }
}

/* ---- one-shot ---- */

/* The value under the views: what somebody made, or an input. */
static const tu_value *root_of(const tu_value *value) {
    while (value->maker != NULL && value->maker->entry->flags & TU_VIEW && value->maker->operands[0].value != NULL)
        value = value->maker->operands[0].value;
    return value;
}

/* Memory that the graph makes by computing; inputs and what a collective or a copy of memory from outside brings are
 * somebody else's. */
static bool can_be_planned(const tu_value *value) {
    const tu_vertex *maker = root_of(value)->maker;
    return maker != NULL && !tu_vertex_communicates(maker) && !(maker->entry->flags & TU_BRINGS);
}

static bool is_small_sum(const tu_vertex *vertex, size_t limit) {
    const tu_value *in = vertex->operand_count > 0 ? vertex->operands[0].value : NULL;
    if (vertex->entry != &tu_operator_all_reduce ||
        (!vertex->in_place && !tu_shape_is_row_major(&vertex->results[0]->shape)))
        return false;
    return in != NULL && tu_vertex_reduction(vertex) == TUTTI_SUM && in->shape.device == TUTTI_CPU &&
           bytes_of(&in->shape) > 0 && bytes_of(&in->shape) <= limit && is_enabled(tu_vertex_group(vertex)) &&
           can_be_planned(in);
}

/* Copies `in` into a buffer before `place`; the buffer in the sizes of `in`, or NULL with the error written. */
static tu_value *into_buffer(planning *of, tu_value *in, tutti_group *group, tu_vertex *place, buffer **used) {
    static const char nothing[1];
    *used = take_buffer(of, &in->shape, group);
    if (*used == NULL)
        return NULL;
    tu_operand operand = { .value = (*used)->value };
    tu_view_attributes sizes = { .shape = tt_dims_of(in->shape.ndim, in->shape.sizes) };
    tu_vertex *view = tu_graph_call(of->graph, &tu_operator_view, 1, &operand, &sizes, place);
    tu_vertex *copy = view != NULL ? tu_graph_vertex(of->graph, &tu_operator_copy, 2, 0, nothing, place) : NULL;
    if (copy == NULL)
        return NULL;
    copy->in_place = true;
    copy->operands[0].value = view->results[0];
    copy->operands[1].value = in;
    return view->results[0];
}

static tu_vertex *add_effect(planning *of, const tu_operator *entry, tu_value *first, tu_value *second,
                             tu_vertex *place) {
    static const char nothing[1];
    tu_vertex *made = tu_graph_vertex(of->graph, entry, second != NULL ? 2 : 1, 0, nothing, place);
    if (made == NULL)
        return NULL;
    made->operands[0].value = first;
    if (second != NULL)
        made->operands[1].value = second;
    return made;
}

/* The form in place: its result is copied back, and it is complete then. */
static tutti_status copy_back(planning *of, tu_vertex *vertex, tu_value *sum) {
    tu_value *in = vertex->operands[0].value;
    for (tu_vertex *one = vertex->next; one != NULL; one = one->next)
        if (tu_vertex_waits_for(one, in->storage)) {
            tu_vertex_erase(of->graph, one);
            break;
        }
    tu_vertex *wait = add_effect(of, &tu_operator_wait, sum, NULL, vertex);
    tu_vertex *copy = wait != NULL ? add_effect(of, &tu_operator_copy, in, sum, vertex) : NULL;
    if (copy == NULL)
        return TUTTI_ERROR_MEMORY;
    copy->in_place = true;
    return TUTTI_OK;
}

/* *next is the vertex to go on with: a wait behind this one may go with it. */
static tutti_status lower(planning *of, tu_vertex *vertex, tu_vertex **next) {
    buffer *used;
    tutti_group *group = tu_vertex_group(vertex);
    tu_operand operand = { .value = into_buffer(of, vertex->operands[0].value, group, vertex, &used) };
    tu_one_shot_all_reduce_attributes attributes = { .reduction = TUTTI_SUM, .group = group };
    tu_vertex *made = operand.value != NULL
                          ? tu_graph_call(of->graph, &tu_operator_one_shot_all_reduce, 1, &operand, &attributes, vertex)
                          : NULL;
    if (made == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_value *sum = made->results[0];
    tutti_status status = TUTTI_OK;
    if (vertex->in_place) {
        status = copy_back(of, vertex, sum); /* it waits: the buffer stays free */
    } else {
        used->waits_for = sum->storage;
        tu_value_become(of->graph, vertex->results[0], sum);
    }
    *next = vertex->next;
    if (status == TUTTI_OK)
        tu_vertex_erase(of->graph, vertex);
    return status;
}

/* ---- named operations whose input is not symmetric ---- */

/* Which operand must be symmetric and is only read. */
static int symmetric_operand(const tu_vertex *vertex) {
    static const struct {
        const tu_operator *entry;
        int operand;
    } rows[] = {
        { &tu_operator_one_shot_all_reduce, 0 },
        { &tu_operator_one_shot_all_reduce_out, 1 },
        { &tu_operator_two_shot_all_reduce_out, 1 },
        { &tu_operator_multimem_one_shot_all_reduce, 0 },
        { &tu_operator_multimem_one_shot_all_reduce_out, 1 },
        { &tu_operator_reduce_scatter_split, 0 },
        { &tu_operator_reduce_scatter_split_out, 1 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (vertex->entry == rows[i].entry)
            return rows[i].operand;
    return -1;
}

static const tu_graph_input *input_of(const tt_graph *graph, const tu_value *value) {
    for (int i = 0; i < graph->input_count; i++)
        if (graph->inputs[i].value == value)
            return &graph->inputs[i];
    return NULL;
}

/* Constants can be looked at; of other inputs nobody knows where they will lie, so they are copied. */
static bool is_symmetric(const planning *of, const tu_value *value, tutti_group *group) {
    const tu_value *root = root_of(value);
    const tu_graph_input *input = root->maker == NULL ? input_of(of->graph, root) : NULL;
    tu_symm_place place;
    if (input != NULL && input->tensor != NULL)
        return tu_symm_find(input->tensor, tutti_group_world(group), &place);
    return root->maker != NULL && root->maker->entry->flags & TU_BRINGS;
}

static tutti_status plan_operand(planning *of, tu_vertex *vertex, int operand) {
    tu_value *in = vertex->operands[operand].value;
    tutti_group *group = tu_vertex_group(vertex);
    buffer *used;
    if (in == NULL || bytes_of(&in->shape) == 0 || in->shape.device != TUTTI_CPU || !is_enabled(group) ||
        is_symmetric(of, in, group))
        return TUTTI_OK;
    tu_value *copy = into_buffer(of, in, group, vertex, &used);
    if (copy == NULL)
        return TUTTI_ERROR_MEMORY;
    vertex->operands[operand].value = copy;
    used->waits_for = operand == 0 ? vertex->results[0]->storage : vertex->operands[0].value->storage;
    return TUTTI_OK;
}

tutti_status tu_pass_one_shot(tt_graph *graph, size_t bytes) {
    planning of = { .graph = graph };
    tutti_status status = TUTTI_OK;
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL && status == TUTTI_OK; vertex = next) {
        free_buffers(&of, vertex);
        int operand = symmetric_operand(vertex);
        if (operand >= 0)
            status = plan_operand(&of, vertex, operand);
        next = vertex->next;
        if (status == TUTTI_OK && is_small_sum(vertex, bytes))
            status = lower(&of, vertex, &next);
    }
    for (buffer *one = of.buffers, *next; one != NULL; one = next) {
        next = one->next;
        free(one);
    }
    return status == TUTTI_OK ? tu_self()->pending : status;
}

/* ---- low contention ---- */

/* Something is computed between the start and its wait, and no other group's collective is started there. */
static bool runs_beside_computation(const tu_vertex *start) {
    bool computes = false;
    for (const tu_vertex *vertex = start->next; vertex != NULL; vertex = vertex->next) {
        if (tu_vertex_waits_for(vertex, start->results[0]->storage))
            return computes;
        if (tu_vertex_communicates(vertex) && tu_vertex_group(vertex) != tu_vertex_group(start))
            return false;
        computes = computes || (tu_vertex_is_pure(vertex) && !(vertex->entry->flags & (TU_VIEW | TU_NO_KERNEL)));
    }
    return false;
}

/* The forms along dimension 0 that return a tensor: one that the caller gave keeps its collective. */
static tutti_status lower_contention(tt_graph *graph, tu_vertex *vertex) {
    tutti_group *group = tu_vertex_group(vertex);
    tu_low_contention_all_gather_attributes gather = { .group = group };
    tu_low_contention_reduce_scatter_attributes scatter = { .reduction = tu_vertex_reduction(vertex), .group = group };
    bool gathers = vertex->entry == &tu_operator_all_gather;
    tu_vertex *made = tu_graph_call(
        graph, gathers ? &tu_operator_low_contention_all_gather : &tu_operator_low_contention_reduce_scatter, 1,
        vertex->operands, gathers ? (const void *)&gather : &scatter, vertex);
    if (made == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_value_become(graph, vertex->results[0], made->results[0]);
    tu_vertex_erase(graph, vertex);
    return TUTTI_OK;
}

tutti_status tu_pass_low_contention(tt_graph *graph, size_t bytes) {
    tutti_status status = TUTTI_OK;
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL && status == TUTTI_OK; vertex = next) {
        next = vertex->next;
        bool known = vertex->entry == &tu_operator_all_gather || vertex->entry == &tu_operator_reduce_scatter;
        const tu_value *in = known ? vertex->operands[0].value : NULL;
        if (in == NULL || in->shape.ndim == 0 || tu_vertex_dim(vertex) != 0 || !is_enabled(tu_vertex_group(vertex)))
            continue;
        const tu_value *share = vertex->entry == &tu_operator_all_gather ? in : vertex->results[0];
        if (bytes_of(&share->shape) >= bytes && runs_beside_computation(vertex))
            status = lower_contention(graph, vertex);
    }
    return status;
}
