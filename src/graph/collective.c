/* SPDX-License-Identifier: Apache-2.0
 *
 * What passes ask about vertices that communicate.
 */
#include "functional/operators.h"
#include "graph/graph.h"

static const void *attribute_of(const tu_vertex *vertex, tt_argument_type type) {
    for (int i = 0; i < vertex->entry->argument_count; i++)
        if (vertex->entry->arguments[i].type == type)
            return (const char *)vertex->attributes + vertex->entry->arguments[i].offset;
    return NULL;
}

tutti_group *tu_vertex_group(const tu_vertex *vertex) {
    tutti_group *const *group = attribute_of(vertex, TT_ARGUMENT_GROUP);
    return group != NULL ? *group : NULL;
}

tutti_reduction tu_vertex_reduction(const tu_vertex *vertex) {
    const tutti_reduction *reduction = attribute_of(vertex, TT_ARGUMENT_REDUCTION);
    return reduction != NULL ? *reduction : (tutti_reduction)0;
}

int tu_vertex_dim(const tu_vertex *vertex) {
    const tu_value *x = vertex->operand_count > 0 ? vertex->operands[0].value : NULL;
    int ndim = x != NULL && x->shape.ndim > 0 ? x->shape.ndim : 1;
    if (vertex->entry == &tu_operator_all_gather)
        return tu_dim(((const tu_all_gather_attributes *)vertex->attributes)->dim, ndim);
    if (vertex->entry == &tu_operator_reduce_scatter)
        return tu_dim(((const tu_reduce_scatter_attributes *)vertex->attributes)->dim, ndim);
    return -1;
}

bool tu_vertex_communicates(const tu_vertex *vertex) {
    return vertex->entry->flags & TU_STARTS || (vertex->entry->flags & TU_IMPURE && tu_vertex_group(vertex) != NULL);
}

bool tu_vertex_waits_for(const tu_vertex *vertex, int storage) {
    return vertex->entry == &tu_operator_wait && vertex->operands[0].value != NULL &&
           vertex->operands[0].value->storage == storage;
}
