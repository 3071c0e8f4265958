/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of parts. The gradient of a part of a tensor is that part among zeros, and where several parts were used, such
 * as the chunks of a projection, their gradients are added up: full, copy_ into a part, full, copy_ into another, add.
 * Where the parts do not overlap all of them are written into one tensor, and nothing is added; where they are all of
 * it, it needs no zeros either.
 *
 * A sum with zero has the bits of the element, but for -0, which becomes 0. So each part is copied with 0 added.
 */
#include <math.h>

#include "graph/passes.h"
#include "tensor/operators.h"

#define PARTS 16

/* Zeros with parts that are written once each, which one sum reads as a whole and nobody else. */
typedef struct assembly {
    tu_value *value;
    tu_vertex *sum;
    int count;
    const tu_vertex *views[PARTS];
    tu_vertex *copies[PARTS];
} assembly;

static bool is_zeros(const tu_value *value) {
    if (value == NULL || value->maker == NULL || value->maker->entry != &tu_operator_full ||
        !tu_is_float(value->shape.dtype))
        return false;
    double number = ((const tu_full_attributes *)value->maker->attributes)->value;
    return number == 0 && !signbit(number);
}

static const tu_narrow_attributes *part_of(const tu_vertex *view) {
    return view->attributes;
}

static int dim_of(const tu_vertex *view) {
    int dim = part_of(view)->dim;
    return dim < 0 ? dim + view->operands[0].value->shape.ndim : dim;
}

/* Counted from the front: a part may have been asked for from the end. */
static int64_t start_of(const tu_vertex *view) {
    int64_t start = part_of(view)->start;
    return start < 0 ? start + view->operands[0].value->shape.sizes[dim_of(view)] : start;
}

/* The part that this vertex writes with all of an equal tensor; -1: none. */
static int written_part(const assembly *of, const tu_vertex *vertex) {
    if (vertex->entry != &tu_operator_copy || !vertex->in_place || vertex->operands[1].value == NULL ||
        vertex->operands[1].value->storage == of->value->storage ||
        vertex->operands[1].value->shape.dtype != of->value->shape.dtype)
        return -1;
    for (int i = 0; i < of->count; i++)
        if (of->views[i]->results[0] == vertex->operands[0].value)
            return of->copies[i] == NULL ? i : -1;
    return -1;
}

/* Takes in one more vertex that touches the memory; false where it is none that belongs to an assembly. */
static bool take_in(assembly *of, tu_vertex *vertex) {
    if (vertex == of->value->maker)
        return true;
    if (of->sum != NULL) /* which is the last */
        return false;
    int part = written_part(of, vertex);
    if (part >= 0) {
        of->copies[part] = vertex;
        return true;
    }
    if (vertex->entry == &tu_operator_narrow && vertex->operands[0].value == of->value && of->count < PARTS) {
        of->views[of->count++] = vertex;
        return true;
    }
    bool first = vertex->operand_count == 2 && vertex->operands[0].value == of->value,
         second = vertex->operand_count == 2 && vertex->operands[1].value == of->value;
    if (vertex->entry != &tu_operator_add || vertex->in_place || first == second)
        return false;
    of->sum = vertex;
    return true;
}

static bool touches(const tu_vertex *vertex, int storage) {
    bool found = false;
    for (int i = 0; i < vertex->operand_count && !found; i++)
        found = vertex->operands[i].value != NULL && vertex->operands[i].value->storage == storage;
    for (int i = 0; i < vertex->result_count && !found; i++)
        found = vertex->results[i]->storage == storage;
    return found;
}

/* Whether the memory leaves the graph. */
static bool leaves(const tt_graph *graph, int storage) {
    bool found = false;
    for (int i = 0; i < graph->output_count && !found; i++)
        found = graph->outputs[i].value != NULL && graph->outputs[i].value->storage == storage;
    for (int i = 0; i < graph->effect_count && !found; i++)
        found = graph->effects[i].value != NULL && graph->effects[i].value->storage == storage;
    return found;
}

static bool parts_overlap(const tu_vertex *left, const tu_vertex *right) {
    int64_t one = start_of(left), other = start_of(right);
    return one < other + part_of(right)->length && other < one + part_of(left)->length;
}

static bool is_assembly(const tt_graph *graph, tu_value *value, assembly *of) {
    *of = (assembly){ .value = value };
    if (!is_zeros(value) || leaves(graph, value->storage))
        return false;
    for (tu_vertex *vertex = value->maker; vertex != NULL; vertex = vertex->next)
        if (touches(vertex, value->storage) && !take_in(of, vertex))
            return false;
    bool whole = of->sum != NULL && of->count > 0;
    for (int i = 0; i < of->count && whole; i++) {
        whole = of->copies[i] != NULL && dim_of(of->views[i]) == dim_of(of->views[0]);
        for (int k = 0; k < i && whole; k++) /* else their lengths would not say what they cover */
            whole = !parts_overlap(of->views[i], of->views[k]);
    }
    return whole;
}

static bool overlap(const assembly *left, const assembly *right) {
    for (int i = 0; i < left->count; i++)
        for (int j = 0; j < right->count; j++)
            if (parts_overlap(left->views[i], right->views[j]))
                return true;
    return false;
}

/* Two assemblies that can be one. */
static bool fit(const tt_graph *graph, const tu_vertex *sum, assembly *left, assembly *right) {
    return sum->entry == &tu_operator_add && !sum->in_place && sum->operand_count == 2 &&
           is_assembly(graph, sum->operands[0].value, left) && is_assembly(graph, sum->operands[1].value, right) &&
           tu_shape_equal(&left->value->shape, &right->value->shape) &&
           tu_shape_equal(&left->value->shape, &sum->results[0]->shape) &&
           dim_of(left->views[0]) == dim_of(right->views[0]) && left->count + right->count <= PARTS &&
           !overlap(left, right);
}

static bool is_sum_with_zero(const tu_vertex *vertex) {
    if (vertex->entry != &tu_operator_add_scalar || vertex->in_place)
        return false;
    double number = ((const tu_add_scalar_attributes *)vertex->attributes)->number;
    return number == 0 && !signbit(number);
}

/* What is copied into the parts, with 0 added, once: right before the copy, so that nobody writes it in between. -0
 * would be no 0 here. */
static tutti_status add_zero(tt_graph *graph, const assembly *of) {
    for (int i = 0; i < of->count; i++) {
        tu_operand *from = &of->copies[i]->operands[1];
        const tu_vertex *maker = from->value->maker;
        if (maker != NULL && maker == of->copies[i]->before && is_sum_with_zero(maker))
            continue;
        tu_add_scalar_attributes nothing = { .number = 0 };
        tu_vertex *sum = tu_graph_call(graph, &tu_operator_add_scalar, 1, from, &nothing, of->copies[i]);
        if (sum == NULL)
            return TUTTI_ERROR_MEMORY;
        from->value = sum->results[0];
    }
    return TUTTI_OK;
}

/* The parts of both are all of it: what is around them needs no zeros. */
static tutti_status leave_out_zeros(tt_graph *graph, tu_value *value) {
    tu_empty_attributes attributes = { .shape = tt_dims_of(value->shape.ndim, value->shape.sizes),
                                       .dtype = value->shape.dtype,
                                       .device = value->shape.device };
    tu_vertex *zeros = value->maker, *empty = tu_graph_call(graph, &tu_operator_empty, 0, NULL, &attributes, zeros);
    if (empty == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_value_become(graph, value, empty->results[0]);
    tu_vertex_erase(graph, zeros);
    return TUTTI_OK;
}

static int64_t length_of(const assembly *of) {
    int64_t length = 0;
    for (int i = 0; i < of->count; i++)
        length += part_of(of->views[i])->length;
    return length;
}

static bool is_behind(const tu_vertex *vertex, const tu_vertex *other) {
    while (other != NULL && other != vertex)
        other = other->next;
    return other != NULL;
}

static tutti_status merge(tt_graph *graph, tu_vertex *sum, const assembly *left, const assembly *right) {
    int64_t size = left->value->shape.sizes[dim_of(left->views[0])], covered = length_of(left) + length_of(right);
    tu_vertex *zeros = right->value->maker;
    tutti_status status = add_zero(graph, left);
    if (status == TUTTI_OK)
        status = add_zero(graph, right);
    if (status != TUTTI_OK)
        return status;
    if (is_behind(left->value->maker, zeros)) /* it has to be there for the first part */
        tu_vertex_move(graph, left->value->maker, zeros);
    tu_value_become(graph, right->value, left->value);
    tu_vertex_erase(graph, zeros);
    tu_value_become(graph, sum->results[0], left->value);
    tu_vertex_erase(graph, sum);
    return covered == size ? leave_out_zeros(graph, left->value) : TUTTI_OK;
}

tutti_status tu_pass_parts(tt_graph *graph, size_t bytes) {
    (void)bytes;
    tutti_status status = TUTTI_OK;
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL && status == TUTTI_OK; vertex = next) {
        assembly left, right;
        next = vertex->next;
        if (fit(graph, vertex, &left, &right))
            status = merge(graph, vertex, &left, &right);
    }
    return status;
}
