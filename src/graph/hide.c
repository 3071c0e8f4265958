/* SPDX-License-Identifier: Apache-2.0
 *
 * Which collectives need no fusing: a matrix product that neither leads to a collective nor comes from it can be
 * computed while that is under way, and so hides it. Each product hides one; collectives are served in their order.
 * This looks at the graph alone, so all ranks decide alike.
 */
#include <stdlib.h>

#include "graph/passes.h"
#include "tensor/operators.h"

static bool touches(const tu_vertex *vertex, const bool *tainted) {
    for (int i = 0; i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL && tainted[vertex->operands[i].value->storage])
            return true;
    return false;
}

static void taint(const tu_vertex *vertex, bool *tainted) {
    for (int i = 0; i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL && tu_vertex_writes(vertex, i))
            tainted[vertex->operands[i].value->storage] = true;
    for (int i = 0; i < vertex->result_count; i++)
        tainted[vertex->results[i]->storage] = true;
}

/* Whether what the first makes flows into the second; memory counts as a whole. */
static bool leads_to(const tt_graph *graph, const tu_vertex *first, const tu_vertex *second, bool *tainted) {
    for (int i = 0; i < graph->storage_count; i++)
        tainted[i] = false;
    taint(first, tainted);
    for (const tu_vertex *vertex = first->next; vertex != NULL; vertex = vertex->next) {
        if (!touches(vertex, tainted))
            continue;
        if (vertex == second)
            return true;
        taint(vertex, tainted);
    }
    return false;
}

static bool is_product(const tu_vertex *vertex) {
    return vertex->entry == &tu_operator_matmul || vertex->entry == &tu_operator_linear ||
           vertex->entry == &tu_operator_scaled_matmul;
}

/* The first product that is still free and has nothing to do with the collective, taken; NULL: there is none. */
static const tu_vertex *take_product(const tt_graph *graph, const tu_vertex *start, bool *taken, bool *tainted) {
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next) {
        if (!is_product(vertex) || taken[vertex->position] || leads_to(graph, vertex, start, tainted) ||
            leads_to(graph, start, vertex, tainted))
            continue;
        taken[vertex->position] = true;
        return vertex;
    }
    return NULL;
}

tutti_status tu_pass_hide(tt_graph *graph, size_t bytes) {
    (void)bytes;
    tu_graph_number(graph);
    bool *taken = calloc((size_t)graph->vertex_count + 1, sizeof *taken);
    bool *tainted = calloc((size_t)graph->storage_count + 1, sizeof *tainted);
    bool made = taken != NULL && tainted != NULL;
    for (tu_vertex *vertex = graph->first; vertex != NULL && made; vertex = vertex->next)
        if (vertex->entry->flags & TU_STARTS)
            vertex->hidden = take_product(graph, vertex, taken, tainted) != NULL;
    free(taken);
    free(tainted);
    return made ? TUTTI_OK : tu_error_memory("a pass", (size_t)graph->vertex_count);
}
