/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps of the host that are done again before each run of a graph: see again.h.
 */
#include "loops/again.h"

#include <stdlib.h>
#include <string.h>

#include "loops/target.h"
#include "tensor/loop.h"
#include "tensor/operators.h"

/* ---- calls ---- */

static bool is_of_host(const tu_value *value) {
    return value->shape.device == TUTTI_CPU;
}

bool tu_vertex_is_of_host(const tu_vertex *vertex) {
    int values = 0;
    if (vertex->entry == &tu_operator_random_state || vertex->entry == &tu_operator_seed)
        return false; /* they are acts by themselves */
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value != NULL && !is_of_host(value))
            return false;
        values += value != NULL;
    }
    for (int i = 0; i < vertex->result_count; i++, values++)
        if (!is_of_host(vertex->results[i]))
            return false;
    return values > 0;
}

tutti_status tu_again_guard_vertex(const tu_graph_run *now, const tu_vertex *vertex) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < vertex->operand_count && status == TUTTI_OK; i++)
        if (vertex->operands[i].value != NULL && tu_vertex_writes(vertex, i))
            status = tu_noted_guard(tu_noting_here(), now->tensors[vertex->operands[i].value->number]);
    return status;
}

typedef struct called_again {
    tu_noted_act act; /* first */
    const tu_vertex *vertex;
    int count;
    tt_tensor *tensors[]; /* by the number of the value, held; NULL where it is not the vertex's */
} called_again;

/* Results go where those of the first time are: who reads them has those. */
static tutti_status call_again(tu_noted_act *act) {
    const called_again *again = (const called_again *)act;
    const tu_vertex *vertex = again->vertex;
    tt_scope scope = tt_scope_open();
    tu_call call;
    tutti_status status = tu_vertex_run(vertex, again->tensors, &call);
    for (int i = 0; i < vertex->result_count && status == TUTTI_OK; i++) {
        tt_tensor *first = again->tensors[vertex->results[i]->number];
        if (first != NULL && first->storage != call.outputs[i]->storage) /* a view sees what it looks at */
            status = tu_copy_tensor(first, call.outputs[i]);
    }
    tu_scope_leave(&scope);
    return status;
}

static void end_call(tu_noted_act *act) {
    called_again *again = (called_again *)act;
    for (int i = 0; i < again->count; i++)
        tu_tensor_drop(again->tensors[i]);
    free(again);
}

tutti_status tu_again_vertex(const tu_graph_run *now, const tu_vertex *vertex) {
    size_t bytes = sizeof(called_again) + (size_t)now->value_count * sizeof(tt_tensor *);
    called_again *made = calloc(1, bytes);
    if (made == NULL)
        return tu_error_memory("a call of a replay", bytes);
    made->act = (tu_noted_act){ .run = call_again, .end = end_call };
    made->vertex = vertex;
    made->count = now->value_count;
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value != NULL && made->tensors[value->number] == NULL)
            made->tensors[value->number] = tu_tensor_hold(now->tensors[value->number]);
    }
    for (int i = 0; i < vertex->result_count; i++) {
        int number = vertex->results[i]->number;
        if (made->tensors[number] == NULL)
            made->tensors[number] = tu_tensor_hold(now->tensors[number]);
    }
    tu_noted_add(tu_noting_here(), &made->act);
    return TUTTI_OK;
}

/* ---- loops ---- */

typedef struct looped_again {
    tu_noted_act act; /* first */
    const tu_nest *nest;
    tt_tensor *tensors[TU_NEST_TENSORS]; /* held */
} looped_again;

static tutti_status loop_again(tu_noted_act *act) {
    looped_again *again = (looped_again *)act;
    tutti_status status = tu_target_of(again->nest)->run(again->nest, again->tensors);
    for (int i = 0; i < again->nest->tensor_count && status == TUTTI_OK; i++)
        if (again->nest->tensors[i].written)
            tu_bump(again->tensors[i]);
    return status;
}

static void end_loop(tu_noted_act *act) {
    looped_again *again = (looped_again *)act;
    for (int i = 0; i < again->nest->tensor_count; i++)
        tu_tensor_drop(again->tensors[i]);
    free(again);
}

tutti_status tu_again_guard_nest(const tu_nest *nest, tt_tensor *const *tensors) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < nest->tensor_count && status == TUTTI_OK; i++)
        if (nest->tensors[i].written && !nest->tensors[i].fresh)
            status = tu_noted_guard(tu_noting_here(), tensors[i]);
    return status;
}

tutti_status tu_again_nest(const tu_nest *nest, tt_tensor *const *tensors) {
    looped_again *made = calloc(1, sizeof *made);
    if (made == NULL)
        return tu_error_memory("a loop of a replay", sizeof *made);
    made->act = (tu_noted_act){ .run = loop_again, .end = end_loop };
    made->nest = nest;
    for (int i = 0; i < nest->tensor_count; i++)
        made->tensors[i] = tu_tensor_hold(tensors[i]);
    tu_noted_add(tu_noting_here(), &made->act);
    return TUTTI_OK;
}
