/* SPDX-License-Identifier: Apache-2.0
 *
 * The pass that takes operators on rows apart: softmax and the norms become reductions and elementwise operators, which
 * a compiler of loops can fuse with their neighbours. The last bits may differ from those of the operator, so somebody
 * must ask for it; narrow floats stay, since each step would round.
 */
#include <string.h>

#include "graph/passes.h"
#include "tensor/operators.h"

/* New vertices before one that is taken apart. Values are NULL once there was no memory. */
typedef struct builder {
    tt_graph *graph;
    tu_vertex *place;
    tt_dims dims; /* of the rows */
} builder;

static tu_value *call(const builder *to, const tu_operator *entry, tu_value *left, const tu_operand *right,
                      const void *attributes) {
    tu_operand operands[2] = { { .value = left } };
    if (right != NULL)
        operands[1] = *right;
    if (left == NULL || (right != NULL && right->value == NULL))
        return NULL;
    tu_vertex *made = tu_graph_call(to->graph, entry, right != NULL ? 2 : 1, operands, attributes, to->place);
    return made != NULL ? made->results[0] : NULL;
}

static tu_value *both(const builder *to, const tu_operator *entry, tu_value *left, tu_value *right) {
    return call(to, entry, left, &(tu_operand){ .value = right }, NULL);
}

static tu_value *largest(const builder *to, tu_value *x) {
    return call(to, &tu_operator_amax, x, NULL, &(tu_amax_attributes){ .dims = to->dims, .keep_dims = true });
}

static tu_value *sum(const builder *to, tu_value *x) {
    return call(to, &tu_operator_sum_dims, x, NULL, &(tu_sum_dims_attributes){ .dims = to->dims, .keep_dims = true });
}

static tu_value *mean(const builder *to, tu_value *x) {
    return call(to, &tu_operator_mean_dims, x, NULL, &(tu_mean_dims_attributes){ .dims = to->dims, .keep_dims = true });
}

/* 1 over the root of the mean square. */
static tu_value *inverse_deviation(const builder *to, tu_value *x, double epsilon) {
    tu_value *square = mean(to, both(to, &tu_operator_mul, x, x));
    square = call(to, &tu_operator_add_scalar, square, NULL, &(tu_add_scalar_attributes){ .number = epsilon });
    return call(to, &tu_operator_rsqrt, square, NULL, NULL);
}

/* ---- the operators ---- */

static tu_value *softmax(const builder *to, const tu_vertex *vertex) {
    tu_value *x = vertex->operands[0].value, *apart = both(to, &tu_operator_sub, x, largest(to, x));
    tu_value *raised = call(to, &tu_operator_exp, apart, NULL, NULL), *total = sum(to, raised);
    return vertex->entry == &tu_operator_softmax
               ? both(to, &tu_operator_div, raised, total)
               : both(to, &tu_operator_sub, apart, call(to, &tu_operator_log, total, NULL, NULL));
}

static tu_value *norm(const builder *to, const tu_vertex *vertex) {
    bool centred = vertex->entry == &tu_operator_layer_norm;
    tu_value *x = vertex->operands[0].value, *weight = vertex->operands[1].value;
    tu_value *bias = centred ? vertex->operands[2].value : NULL;
    double epsilon = centred ? ((const tu_layer_norm_attributes *)vertex->attributes)->epsilon
                             : ((const tu_rms_norm_attributes *)vertex->attributes)->epsilon;
    tu_value *apart = centred ? both(to, &tu_operator_sub, x, mean(to, x)) : x;
    tu_value *made = both(to, &tu_operator_mul, apart, inverse_deviation(to, apart, epsilon));
    if (weight != NULL)
        made = both(to, &tu_operator_mul, made, weight);
    return bias != NULL ? both(to, &tu_operator_add, made, bias) : made;
}

/* ---- which vertices ---- */

static bool is_wide(const tu_vertex *vertex) {
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (vertex->operands[i].number != 0 || (value == NULL && i == 0) ||
            (value != NULL && value->shape.dtype != vertex->operands[0].value->shape.dtype))
            return false;
    }
    tutti_dtype dtype = vertex->operands[0].value->shape.dtype;
    return dtype == TUTTI_F32 || dtype == TUTTI_F64;
}

/* The last dimensions that the weight or the bias has; else one. */
static tt_dims rows_of(const tu_vertex *vertex) {
    int64_t dims[TT_MAX_DIMS];
    int ndim = vertex->operands[0].value->shape.ndim, count = 1;
    for (int i = 1; i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL)
            count = vertex->operands[i].value->shape.ndim;
    for (int i = 0; i < count; i++)
        dims[i] = ndim - count + i;
    return tt_dims_of(count, dims);
}

static bool has_alone_its_result(const tu_vertex *vertex) {
    for (int i = 1; i < vertex->result_count; i++)
        if (vertex->results[i]->mark > 0)
            return false;
    return true;
}

static tutti_status take_apart(tt_graph *graph, tu_vertex *vertex) {
    bool softmaxes = vertex->entry == &tu_operator_softmax || vertex->entry == &tu_operator_log_softmax;
    bool norms = vertex->entry == &tu_operator_layer_norm || vertex->entry == &tu_operator_rms_norm;
    if ((!softmaxes && !norms) || !is_wide(vertex) || vertex->operands[0].value->shape.ndim == 0 ||
        !has_alone_its_result(vertex))
        return TUTTI_OK;
    builder to = { .graph = graph, .place = vertex };
    if (softmaxes) {
        int64_t dim =
            tu_dim(((const tu_softmax_attributes *)vertex->attributes)->dim, vertex->operands[0].value->shape.ndim);
        to.dims = tt_dims_of(1, &dim);
    } else {
        to.dims = rows_of(vertex);
    }
    tu_value *made = softmaxes ? softmax(&to, vertex) : norm(&to, vertex);
    if (made == NULL)
        return TUTTI_ERROR_MEMORY;
    if (!tu_shape_equal(&made->shape, &vertex->results[0]->shape)) /* another layout: the operator stays */
        return TUTTI_OK;
    tu_value_become(graph, vertex->results[0], made);
    tu_vertex_erase(graph, vertex);
    return TUTTI_OK;
}

tutti_status tu_pass_decompose(tt_graph *graph, size_t bytes) {
    tutti_status status = TUTTI_OK;
    (void)bytes;
    tu_graph_count_uses(graph);
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL && status == TUTTI_OK; vertex = next) {
        next = vertex->next;
        status = take_apart(graph, vertex);
    }
    return status == TUTTI_OK ? tu_pass_dead(graph, 0) : status; /* what was made for an operator that stays */
}
