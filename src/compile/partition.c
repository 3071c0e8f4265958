/* SPDX-License-Identifier: Apache-2.0
 *
 * Cutting a captured function and its backward in two graphs. What the backward uses of the function's values is what
 * eager code would have saved. A value need not be saved where it can be computed again from others that are: views
 * always, cheap operators where that is wanted, and a gathered copy of a shard. Which values to save is a minimum cut:
 * from what can only be saved to what the backward uses, each value weighs its bytes.
 *
 * Rules that keep this the same as eager code:
 * - An input is read when the backward runs, as eager code reads it, and its version is checked then. So only inputs
 *   that eager code would have kept (they, or a tensor on their memory, are used by the backward) are computed from.
 * - Nothing is computed again from memory that is written or resized after the function first read it.
 * - Random numbers, and collectives other than gathers, are never computed again.
 * - All of this is decided from the graph alone, so that ranks decide alike.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "compile/entry.h"
#include "functional/operators.h"
#include "graph/passes.h"

typedef struct split {
    tu_entry *entry;
    const tt_graph *graph; /* of both */
    bool recompute;
    const tu_vertex *first_backward;
    int value_count;
    bool *forward;    /* by value: an input of the function, or made by it */
    bool *used;       /* by value of the forward: the backward uses it */
    bool *repeatable; /* by value of the forward: its vertex may run again */
    bool *saved;      /* by value of the forward: handed over */
    bool *source;     /* by storage: eager code keeps this memory */
    int *written;     /* by storage: position of the last vertex that writes it, or -1 */
    int *position;    /* by value: of its vertex; inputs -1 */
} split;

static bool is_wait(const tu_vertex *vertex) {
    return vertex->entry == &tu_operator_wait;
}

/* ---- what is known of the graph ---- */

static void note_uses(split *of) {
    bool backward = false;
    int position = 0;
    for (int i = 0; i < of->graph->storage_count; i++)
        of->written[i] = -1;
    for (int i = 0; i < of->entry->captured.input_count; i++) {
        int number = of->graph->inputs[i].value->number;
        of->forward[number] = true;
        of->position[number] = -1;
    }
    for (const tu_vertex *vertex = of->graph->first; vertex != NULL; vertex = vertex->next, position++) {
        backward = backward || vertex == of->first_backward;
        for (int i = 0; i < vertex->operand_count; i++) {
            const tu_value *value = vertex->operands[i].value;
            if (value == NULL)
                continue;
            if (!is_wait(vertex) && tu_vertex_writes(vertex, i))
                of->written[value->storage] = position;
            if (backward && of->forward[value->number])
                of->used[value->number] = true;
        }
        for (int i = 0; i < vertex->result_count; i++) {
            of->forward[vertex->results[i]->number] = !backward;
            of->position[vertex->results[i]->number] = position;
        }
    }
    for (int i = of->entry->captured.result_count; i < of->graph->output_count; i++)
        if (of->graph->outputs[i].value != NULL && of->forward[of->graph->outputs[i].value->number])
            of->used[of->graph->outputs[i].value->number] = true;
    for (int i = of->entry->captured.effect_count; i < of->graph->effect_count; i++)
        if (of->graph->effects[i].value != NULL && of->forward[of->graph->effects[i].value->number])
            of->used[of->graph->effects[i].value->number] = true;
    for (const tu_value *value = of->graph->values; value != NULL; value = value->next)
        if (of->used[value->number])
            of->source[value->storage] = true;
}

static bool is_gather(const tu_vertex *vertex) {
    return vertex->entry == &tu_operator_all_gather && !vertex->in_place;
}

/* Whether eager code keeps what an operand needs, or it can be had from what it keeps. */
static bool is_at_hand(const split *of, const tu_value *value, bool gathers) {
    if (value->maker != NULL)
        return true;
    bool kept = of->source[value->storage] || of->graph->inputs[value->place].kind == TU_INPUT_CONSTANT;
    return kept || (gathers && value->flags & (TU_IS_PARAMETER | TU_REQUIRES_GRAD));
}

static bool is_cheap(const split *of, const tu_vertex *vertex) {
    unsigned flags = vertex->entry->flags;
    if (flags & TU_VIEW || is_gather(vertex))
        return true;
    if (!tu_vertex_is_pure(vertex) || flags & (TU_IMPURE | TU_STARTS | TU_NO_KERNEL | TU_BRINGS))
        return false;
    return of->recompute && (vertex->entry->expression != NULL || vertex->operand_count == 0);
}

static bool is_repeatable(const split *of, const tu_vertex *vertex, int position) {
    if (!is_cheap(of, vertex) || vertex->in_place || vertex->result_count != 1)
        return false;
    bool view = vertex->entry->flags & TU_VIEW;
    if (!view && of->written[vertex->results[0]->storage] >= 0)
        return false;
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value == NULL)
            continue;
        if (!is_at_hand(of, value, is_gather(vertex)) || (!view && of->written[value->storage] >= position))
            return false;
    }
    return true;
}

static void find_repeatable(split *of) {
    int position = 0;
    for (const tu_vertex *vertex = of->graph->first; vertex != of->first_backward && vertex != NULL;
         vertex = vertex->next, position++)
        for (int i = 0; i < vertex->result_count; i++)
            of->repeatable[vertex->results[i]->number] = is_repeatable(of, vertex, position);
}

/* ---- the minimum cut ---- */

/* Two nodes per value: where it comes in and where it goes out, with its bytes between. Edges in pairs: 2 * k and its
 * way back, 2 * k + 1. */
typedef struct flow {
    int node_count, edge_count, edge_capacity;
    int *head, *next, *to, *level, *at, *queue;
    int64_t *room;
} flow;

enum {
    SOURCE,
    SINK,
    FIRST
};
#define WITHOUT_LIMIT (INT64_MAX / 4)

static int in_of(int value) {
    return FIRST + 2 * value;
}
static int out_of(int value) {
    return FIRST + 2 * value + 1;
}

static void flow_end(flow *of) {
    free(of->head);
    free(of->next);
    free(of->to);
    free(of->level);
    free(of->at);
    free(of->queue);
    free(of->room);
}

static tutti_status flow_begin(flow *of, int value_count, int edges) {
    *of = (flow){ .node_count = FIRST + 2 * value_count, .edge_capacity = 2 * edges };
    size_t nodes = (size_t)of->node_count, room = (size_t)of->edge_capacity + 1;
    of->head = malloc(nodes * sizeof *of->head);
    of->level = malloc(nodes * sizeof *of->level);
    of->at = malloc(nodes * sizeof *of->at);
    of->queue = malloc(nodes * sizeof *of->queue);
    of->next = malloc(room * sizeof *of->next);
    of->to = malloc(room * sizeof *of->to);
    of->room = malloc(room * sizeof *of->room);
    if (of->head == NULL || of->level == NULL || of->at == NULL || of->queue == NULL || of->next == NULL ||
        of->to == NULL || of->room == NULL) {
        flow_end(of);
        return tu_error_memory("a minimum cut", room * sizeof *of->room);
    }
    for (size_t i = 0; i < nodes; i++)
        of->head[i] = -1;
    return TUTTI_OK;
}

static void connect(flow *of, int from, int to, int64_t room) {
    for (int way = 0; way < 2; way++) {
        int edge = of->edge_count++;
        of->to[edge] = way == 0 ? to : from;
        of->room[edge] = way == 0 ? room : 0;
        of->next[edge] = of->head[way == 0 ? from : to];
        of->head[way == 0 ? from : to] = edge;
    }
}

/* How far every node is from `start` through edges that have room, or, where turned is 1, whose opposites have; -1 for
 * those that are not reached. */
static void find_levels(flow *of, int start, int turned) {
    int first = 0, last = 0;
    memset(of->level, -1, (size_t)of->node_count * sizeof *of->level);
    of->level[start] = 0;
    of->queue[last++] = start;
    while (first < last) {
        int node = of->queue[first++];
        for (int edge = of->head[node]; edge >= 0; edge = of->next[edge])
            if (of->room[edge ^ turned] > 0 && of->level[of->to[edge]] < 0) {
                of->level[of->to[edge]] = of->level[node] + 1;
                of->queue[last++] = of->to[edge];
            }
    }
}

/* One way to the sink along the levels, without recursion: graphs may be long. `queue` holds its edges. */
static int64_t push_along(flow *of) {
    int depth = 0, node = SOURCE;
    for (;;) {
        if (node == SINK) {
            int64_t most = WITHOUT_LIMIT;
            for (int i = 0; i < depth; i++)
                if (of->room[of->queue[i]] < most)
                    most = of->room[of->queue[i]];
            for (int i = 0; i < depth; i++) {
                of->room[of->queue[i]] -= most;
                of->room[of->queue[i] ^ 1] += most;
            }
            return most;
        }
        int edge = of->at[node];
        while (edge >= 0 && (of->room[edge] == 0 || of->level[of->to[edge]] != of->level[node] + 1))
            edge = of->next[edge];
        of->at[node] = edge;
        if (edge >= 0) {
            of->queue[depth++] = edge;
            node = of->to[edge];
        } else if (depth == 0) {
            return 0;
        } else {
            node = of->to[of->queue[--depth] ^ 1];
            of->at[node] = of->next[of->at[node]];
        }
    }
}

static void maximise(flow *of) {
    for (find_levels(of, SOURCE, 0); of->level[SINK] >= 0; find_levels(of, SOURCE, 0)) {
        memcpy(of->at, of->head, (size_t)of->node_count * sizeof *of->at);
        while (push_along(of) > 0)
            ;
    }
}

/* Which nodes reach the sink through edges that have room. Of the cuts that weigh the same, the one nearest to the sink
 * computes least again. */
static void find_reaching(flow *of) {
    find_levels(of, SINK, 1);
}

/* Views are never saved where what they look at can be: a parameter that is refilled comes back through it. */
static int64_t weight_of(const split *of, const tu_value *value) {
    if (value->maker == NULL)
        return 1; /* it is there anyway */
    if (of->repeatable[value->number] && value->maker->entry->flags & TU_VIEW)
        return WITHOUT_LIMIT / 1024;
    int64_t bytes = tu_shape_numel(&value->shape) * tu_dtype_bytes[value->shape.dtype];
    return bytes + 2;
}

static int count_edges(const split *of) {
    int count = 4 * of->value_count + 4;
    for (const tu_vertex *vertex = of->graph->first; vertex != of->first_backward && vertex != NULL;
         vertex = vertex->next)
        count += vertex->operand_count;
    return count;
}

static void connect_value(const split *of, flow *cut, const tu_value *value) {
    int number = value->number;
    connect(cut, in_of(number), out_of(number), weight_of(of, value));
    if (of->used[number])
        connect(cut, out_of(number), SINK, WITHOUT_LIMIT);
    if (!of->repeatable[number]) {
        connect(cut, SOURCE, in_of(number), WITHOUT_LIMIT);
        return;
    }
    for (int i = 0; i < value->maker->operand_count; i++)
        if (value->maker->operands[i].value != NULL)
            connect(cut, out_of(value->maker->operands[i].value->number), in_of(number), WITHOUT_LIMIT);
}

static tutti_status cut_values(split *of) {
    flow cut;
    tutti_status status = flow_begin(&cut, of->value_count, count_edges(of));
    if (status != TUTTI_OK)
        return status;
    for (const tu_value *value = of->graph->values; value != NULL; value = value->next)
        if (of->forward[value->number])
            connect_value(of, &cut, value);
    maximise(&cut);
    find_reaching(&cut);
    for (const tu_value *value = of->graph->values; value != NULL; value = value->next)
        if (of->forward[value->number])
            of->saved[value->number] = cut.level[in_of(value->number)] < 0 && cut.level[out_of(value->number)] >= 0;
    flow_end(&cut);
    return TUTTI_OK;
}

/* ---- the two graphs ---- */

static tutti_status add_source(tu_entry *entry, tu_source_kind kind, int index) {
    tu_backward_source *sources = realloc(entry->sources, ((size_t)entry->source_count + 1) * sizeof *sources);
    if (sources == NULL)
        return tu_error_memory("inputs of a backward", sizeof *sources);
    entry->sources = sources;
    sources[entry->source_count++] = (tu_backward_source){ kind, index };
    return TUTTI_OK;
}

/* The function's own vertices; its outputs, and behind them what it saves of its own. */
static tutti_status make_forward(split *of) {
    const tu_captured *captured = &of->entry->captured;
    tu_graph_copy copy;
    tutti_status status = tu_graph_copy_begin(&copy, of->graph);
    if (status != TUTTI_OK)
        return status;
    status = tu_graph_copy_first(&copy, captured->input_count, of->first_backward, captured->result_count,
                                 captured->effect_count);
    for (const tu_vertex *vertex = of->graph->first; vertex != of->first_backward && status == TUTTI_OK;
         vertex = vertex->next)
        for (int i = 0; i < vertex->result_count && status == TUTTI_OK; i++)
            if (of->saved[vertex->results[i]->number])
                status = tu_graph_copy_output(&copy, &(tu_operand){ .value = vertex->results[i] });
    return tu_graph_copy_end(&copy, status, &of->entry->forward);
}

/* Saved inputs, then what the forward computed and saved, then gradients, then what the backward alone has met. */
static tutti_status add_inputs(split *of, tu_graph_copy *copy) {
    const tu_captured *captured = &of->entry->captured;
    const tt_graph *graph = of->graph;
    tutti_status status = TUTTI_OK;
    int output = captured->result_count, tangent = 0;
    for (int i = 0; i < captured->input_count && status == TUTTI_OK; i++) {
        bool named = false; /* a gradient that the backward reads needs its leaf */
        for (int k = captured->input_count; k < graph->input_count; k++)
            named = named || (graph->inputs[k].kind == TU_INPUT_GRADIENT && graph->inputs[k].index == i);
        if (!of->saved[graph->inputs[i].value->number] && !named)
            continue;
        status = tu_graph_copy_as(copy, graph->inputs[i].value, TU_INPUT_SAVED);
        if (status == TUTTI_OK)
            status = add_source(of->entry, TU_FROM_INPUT, i);
    }
    for (const tu_vertex *vertex = graph->first; vertex != of->first_backward && status == TUTTI_OK;
         vertex = vertex->next)
        for (int i = 0; i < vertex->result_count && status == TUTTI_OK; i++) {
            if (!of->saved[vertex->results[i]->number])
                continue;
            status = tu_graph_copy_as(copy, vertex->results[i], TU_INPUT_SAVED);
            if (status == TUTTI_OK)
                status = add_source(of->entry, TU_FROM_OUTPUT, output++);
        }
    for (int i = captured->input_count; i < graph->input_count && status == TUTTI_OK; i++) {
        const tu_graph_input *input = &graph->inputs[i];
        bool is_tangent = input->kind == TU_INPUT_TANGENT;
        status = tu_graph_copy_input(copy, input);
        if (status == TUTTI_OK && input->kind == TU_INPUT_GRADIENT)
            copy->to->inputs[copy->to->input_count - 1].index =
                copy->values[graph->inputs[input->index].value->number]->place;
        if (status == TUTTI_OK)
            status = add_source(of->entry, is_tangent ? TU_FROM_TANGENT : TU_FROM_ITSELF, is_tangent ? tangent++ : i);
    }
    return status;
}

/* Computes a value of the forward again, and before it what it needs, unless it is there. A gather waits at once. */
static tutti_status repeat(split *of, tu_graph_copy *copy, const tu_value *value) {
    if (value == NULL || copy->values[value->number] != NULL)
        return TUTTI_OK;
    const tu_vertex *vertex = value->maker;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < vertex->operand_count && status == TUTTI_OK; i++)
        status = repeat(of, copy, vertex->operands[i].value);
    if (status == TUTTI_OK)
        status = tu_graph_copy_vertex(copy, vertex);
    const tu_vertex *wait = is_gather(vertex) ? vertex->next : NULL;
    while (wait != NULL && !(is_wait(wait) && wait->operands[0].value == value))
        wait = wait->next;
    return status == TUTTI_OK && wait != NULL ? tu_graph_copy_vertex(copy, wait) : status;
}

static tutti_status make_backward(split *of) {
    const tu_captured *captured = &of->entry->captured;
    tu_graph_copy copy;
    tutti_status status = tu_graph_copy_begin(&copy, of->graph);
    if (status != TUTTI_OK)
        return status;
    status = add_inputs(of, &copy);
    for (const tu_vertex *vertex = of->first_backward; vertex != NULL && status == TUTTI_OK; vertex = vertex->next) {
        for (int i = 0; i < vertex->operand_count && status == TUTTI_OK; i++)
            status = repeat(of, &copy, vertex->operands[i].value);
        if (status == TUTTI_OK)
            status = tu_graph_copy_vertex(&copy, vertex);
    }
    for (int i = captured->result_count; i < of->graph->output_count && status == TUTTI_OK; i++) {
        status = repeat(of, &copy, of->graph->outputs[i].value);
        if (status == TUTTI_OK)
            status = tu_graph_copy_output(&copy, &of->graph->outputs[i]);
    }
    for (int i = captured->effect_count; i < of->graph->effect_count && status == TUTTI_OK; i++) {
        status = repeat(of, &copy, of->graph->effects[i].value);
        if (status == TUTTI_OK)
            status = tu_graph_copy_effect(&copy, &of->graph->effects[i]);
    }
    return tu_graph_copy_end(&copy, status, &of->entry->backward);
}

/* ---- all of it ---- */

static tutti_status begin(split *of) {
    size_t values = (size_t)of->value_count + 1, storages = (size_t)of->graph->storage_count + 1;
    of->forward = calloc(values, sizeof *of->forward);
    of->used = calloc(values, sizeof *of->used);
    of->repeatable = calloc(values, sizeof *of->repeatable);
    of->saved = calloc(values, sizeof *of->saved);
    of->position = calloc(values, sizeof *of->position);
    of->source = calloc(storages, sizeof *of->source);
    of->written = calloc(storages, sizeof *of->written);
    if (of->forward == NULL || of->used == NULL || of->repeatable == NULL || of->saved == NULL ||
        of->position == NULL || of->source == NULL || of->written == NULL)
        return tu_error_memory("a split of a graph", values);
    return TUTTI_OK;
}

static void end(split *of) {
    free(of->forward);
    free(of->used);
    free(of->repeatable);
    free(of->saved);
    free(of->position);
    free(of->source);
    free(of->written);
}

tutti_status tu_partition(tu_entry *entry, bool recompute) {
    const tu_captured *captured = &entry->captured;
    if (captured->tangent_count == 0)
        return tu_graph_clone(captured->graph, &entry->forward);
    split of = { .entry = entry, .graph = captured->graph, .recompute = recompute };
    of.first_backward = captured->last != NULL ? captured->last->next : captured->graph->first;
    of.value_count = captured->graph->value_count;
    tutti_status status = begin(&of);
    if (status == TUTTI_OK) {
        note_uses(&of);
        find_repeatable(&of);
        status = cut_values(&of);
    }
    if (status == TUTTI_OK)
        status = make_forward(&of);
    if (status == TUTTI_OK)
        status = make_backward(&of);
    end(&of);
    return status;
}
