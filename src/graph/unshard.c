/* SPDX-License-Identifier: Apache-2.0
 *
 * The pass for fully sharded parameters. Around each use of such a parameter its storage grows, is filled with what was
 * gathered, and shrinks to nothing again:
 *
 *     storage_resize(weight, bytes=800)
 *     copy_(weight, gathered)                  (or all_gather_out(weight, shard))
 *     linear: … = linear(x, weight, none)
 *     storage_resize(weight, bytes=0)
 *
 * Afterwards the gathered tensor is used itself, dies after its last use, and the parameter's memory is never there.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/operators.h"
#include "functional/operators.h"
#include "graph/passes.h"

typedef enum event {
    NOTHING, /* does not concern the parameter, or only its handle */
    GROWS,
    SHRINKS,
    FILLS,
    VIEWS,
    USES,
    WAITS,
    SETS_VERSION,
    OTHER
} event;

/* A parameter, and the graph around it. */
typedef struct sharded {
    tt_graph *graph;
    tu_value *whole;
    int filled; /* how many times */
} sharded;

static bool concerns(const tu_vertex *vertex, int operand, const sharded *of) {
    return vertex->operands[operand].value != NULL && vertex->operands[operand].value->storage == of->whole->storage;
}

static bool is_fill(const tu_vertex *vertex, const sharded *of) {
    if (vertex->operand_count < 2 || vertex->operands[0].value != of->whole || vertex->operands[1].value == NULL ||
        concerns(vertex, 1, of))
        return false;
    if (vertex->entry == &tu_operator_all_gather_out)
        return true;
    const tu_value *from = vertex->operands[1].value;
    return vertex->entry == &tu_operator_copy && tu_shape_equal(&from->shape, &of->whole->shape) &&
           from->shape.offset == of->whole->shape.offset;
}

static event event_of(const tu_vertex *vertex, const sharded *of) {
    bool any = false, writes = false, views = true;
    for (int i = 0; i < vertex->operand_count; i++)
        if (concerns(vertex, i, of)) {
            any = true;
            writes = writes || tu_vertex_writes(vertex, i);
            views = views && tu_value_is_view_of(vertex->operands[i].value, of->whole);
        }
    if (!any)
        return NOTHING;
    if (!views)
        return OTHER;
    if (vertex->entry == &tu_operator_storage_resize)
        return ((const tu_storage_resize_attributes *)vertex->attributes)->bytes == 0 ? SHRINKS : GROWS;
    if (vertex->entry == &tu_operator_version_set)
        return SETS_VERSION;
    if (vertex->entry == &tu_operator_wait)
        return WAITS;
    if ((vertex->entry == &tu_operator_set_grad && !concerns(vertex, 1, of)) ||
        vertex->entry == &tu_operator_require_grad)
        return vertex->operands[0].value == of->whole ? NOTHING : OTHER;
    if (is_fill(vertex, of))
        return FILLS;
    if (vertex->entry->flags & TU_VIEW && tu_vertex_is_pure(vertex))
        return VIEWS;
    return writes ? OTHER : USES;
}

/* A version that is set back to what it was at the beginning: without the writes it is that anyway. */
static bool sets_version_back(const tu_vertex *vertex, const sharded *of) {
    const tu_version_set_attributes *attributes = vertex->attributes;
    for (int i = 0; i < vertex->operand_count; i++)
        if (concerns(vertex, i, of) && attributes->versions.at[i] != -1)
            return false;
    return true;
}

/* What fills it must stay as it is until the parameter is gone. */
static bool stays(const tu_vertex *fill) {
    if (fill->entry != &tu_operator_copy)
        return true;
    for (const tu_vertex *vertex = fill->next; vertex != NULL; vertex = vertex->next)
        for (int i = 0; i < vertex->operand_count; i++)
            if (vertex->operands[i].value != NULL &&
                vertex->operands[i].value->storage == fill->operands[1].value->storage && tu_vertex_writes(vertex, i) &&
                vertex->entry != &tu_operator_wait)
                return false;
    return true;
}

/* Every use stands between a fill and a shrink, and as often as it grows it shrinks. */
static bool is_sharded(sharded *of) {
    bool grown = false, filled = false;
    for (const tu_vertex *vertex = of->graph->first; vertex != NULL; vertex = vertex->next) {
        switch (event_of(vertex, of)) {
        case NOTHING:
        case VIEWS:
            break;
        case GROWS:
            if (grown)
                return false;
            grown = true;
            break;
        case SHRINKS:
            if (!grown)
                return false;
            grown = filled = false;
            break;
        case FILLS:
            if (!grown || !stays(vertex))
                return false;
            filled = true;
            of->filled++;
            break;
        case USES:
        case WAITS:
            if (!filled)
                return false;
            break;
        case SETS_VERSION:
            if (!sets_version_back(vertex, of))
                return false;
            break;
        case OTHER:
            return false;
        }
    }
    return !grown && of->filled > 0;
}

/* What fills the parameter, as a value of its own. */
static tu_value *source_of(const sharded *of, tu_vertex *fill) {
    if (fill->entry == &tu_operator_copy)
        return fill->operands[1].value;
    tu_all_gather_attributes attributes = { .dim = 0, .group = tu_vertex_group(fill) };
    tu_vertex *made = tu_graph_call(of->graph, &tu_operator_all_gather, 1, &fill->operands[1], &attributes, fill);
    tu_value *all = made != NULL ? made->results[0] : NULL;
    if (all == NULL || tu_shape_equal(&all->shape, &of->whole->shape))
        return all;
    tu_view_attributes view = { .shape = tt_dims_of(of->whole->shape.ndim, of->whole->shape.sizes) };
    tu_operand operand = { .value = all };
    made = tu_graph_call(of->graph, &tu_operator_view, 1, &operand, &view, fill);
    return made != NULL ? made->results[0] : NULL;
}

static tutti_status use_source(const sharded *of, tu_vertex *vertex, tu_value *source) {
    for (int i = 0; i < vertex->operand_count; i++) {
        if (!concerns(vertex, i, of))
            continue;
        tu_value *now = tu_value_view_again(of->graph, vertex->operands[i].value, of->whole, source, vertex);
        if (now == NULL)
            return TUTTI_ERROR_MEMORY;
        vertex->operands[i].value = now;
    }
    return TUTTI_OK;
}

/* The vertex without the parameter; with nothing left it goes. */
static tutti_status forget_version(const sharded *of, tu_vertex *vertex) {
    const tu_version_set_attributes *attributes = vertex->attributes;
    int64_t *versions = malloc((size_t)vertex->operand_count * sizeof *versions);
    if (versions == NULL)
        return tu_error_memory("a pass", (size_t)vertex->operand_count * sizeof *versions);
    int count = 0;
    for (int i = 0; i < vertex->operand_count; i++)
        versions[count] = attributes->versions.at[i], count += !concerns(vertex, i, of);
    tu_version_set_attributes fewer = { .versions = { (size_t)count, versions } };
    tu_vertex *made = count > 0 ? tu_graph_vertex(of->graph, vertex->entry, count, 0, &fewer, vertex) : NULL;
    tutti_status status = count > 0 && made == NULL ? TUTTI_ERROR_MEMORY : TUTTI_OK;
    count = 0;
    for (int i = 0; made != NULL && i < vertex->operand_count; i++)
        if (!concerns(vertex, i, of))
            made->operands[count++] = vertex->operands[i];
    free(versions);
    tu_vertex_erase(of->graph, vertex);
    return status;
}

static tutti_status rewrite(const sharded *of) {
    tu_value *source = NULL;
    tutti_status status = TUTTI_OK;
    for (tu_vertex *vertex = of->graph->first, *next; vertex != NULL && status == TUTTI_OK; vertex = next) {
        next = vertex->next;
        switch (event_of(vertex, of)) {
        case FILLS:
            source = source_of(of, vertex);
            if (source == NULL)
                return TUTTI_ERROR_MEMORY;
            tu_vertex_erase(of->graph, vertex);
            break;
        case GROWS:
        case SHRINKS:
            tu_vertex_erase(of->graph, vertex);
            break;
        case USES:
        case WAITS:
            status = use_source(of, vertex, source);
            break;
        case SETS_VERSION:
            status = forget_version(of, vertex);
            break;
        case NOTHING:
        case VIEWS:
        case OTHER:
            break;
        }
    }
    return status;
}

tutti_status tu_pass_unshard(tt_graph *graph, size_t bytes) {
    (void)bytes;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < graph->input_count && status == TUTTI_OK; i++) {
        sharded of = { .graph = graph, .whole = graph->inputs[i].value };
        bool alone = true; /* no other input shares its memory */
        for (int k = 0; k < graph->input_count; k++)
            alone = alone && (k == i || graph->inputs[k].value->storage != of.whole->storage);
        if (alone && is_sharded(&of))
            status = rewrite(&of);
    }
    return status == TUTTI_OK ? tu_pass_dead(graph, 0) : status; /* views that were made again */
}
