/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes that make a graph smaller and nothing else: dead code, common expressions, copies, and results of collectives
 * that can lie where their input lay.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/operators.h"
#include "functional/operators.h"
#include "graph/passes.h"

/* ---- dead code ---- */

/* Backwards, so that chains go in one pass. A wait is an effect and stays, and with it the collective that it ends: the
 * other ranks count on it. What was computed only to be written to, and is not seen afterwards, stays too: rare. */
tutti_status tu_pass_dead(tt_graph *graph, size_t bytes) {
    (void)bytes;
    tu_graph_count_uses(graph);
    for (tu_vertex *vertex = graph->last, *before; vertex != NULL; vertex = before) {
        before = vertex->before;
        bool used = !tu_vertex_is_pure(vertex);
        for (int i = 0; i < vertex->result_count; i++)
            used = used || vertex->results[i]->mark > 0;
        if (used)
            continue;
        for (int i = 0; i < vertex->operand_count; i++)
            if (vertex->operands[i].value != NULL)
                vertex->operands[i].value->mark--;
        tu_vertex_erase(graph, vertex);
    }
    return TUTTI_OK;
}

/* ---- which memory is written ---- */

/* By the number of the storage: whether something writes it, resizes it, keeps a handle on it beyond the graph, or
 * still reads it after the vertex has run. */
typedef struct traces {
    bool *written, *kept;
    int *sent; /* by how many vertices */
} traces;

static void mark_kept(traces *of, const tu_operand *operand) {
    if (operand->value != NULL)
        of->kept[operand->value->storage] = true;
}

static tutti_status trace(const tt_graph *graph, traces *of) {
    size_t count = (size_t)graph->storage_count + 1;
    of->written = calloc(count, sizeof *of->written);
    of->kept = calloc(count, sizeof *of->kept);
    of->sent = calloc(count, sizeof *of->sent);
    if (of->written == NULL || of->kept == NULL || of->sent == NULL)
        return tu_error_memory("a pass", count);
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next) {
        bool effect = vertex->result_count == 0 && !vertex->in_place;
        for (int i = 0; i < vertex->operand_count; i++) {
            const tu_value *value = vertex->operands[i].value;
            if (value != NULL && (vertex->entry->flags & TU_STARTS || vertex->entry == &tu_operator_isend))
                of->sent[value->storage]++;
            if (value == NULL || !tu_vertex_writes(vertex, i))
                continue;
            of->written[value->storage] = true;
            if (effect)
                mark_kept(of, &vertex->operands[i]);
        }
        for (int i = 0; i < vertex->result_count; i++)
            if (vertex->entry->flags & TU_BRINGS) /* memory that others write, too */
                of->written[vertex->results[i]->storage] = of->kept[vertex->results[i]->storage] = true;
    }
    for (int i = 0; i < graph->input_count; i++)
        of->kept[graph->inputs[i].value->storage] = true;
    for (int i = 0; i < graph->output_count; i++)
        mark_kept(of, &graph->outputs[i]);
    for (int i = 0; i < graph->effect_count; i++)
        if (graph->effects[i].value != NULL)
            of->kept[graph->effects[i].value->storage] = true;
    return TUTTI_OK;
}

static void trace_end(traces *of) {
    free(of->written);
    free(of->kept);
    free(of->sent);
}

/* ---- common expressions ---- */

static bool same_operand(const tu_operand *left, const tu_operand *right) {
    if (left->value != right->value || left->number != right->number)
        return false;
    return left->number == 0 || memcmp(&left->at, &right->at, sizeof left->at) == 0;
}

static bool same_attributes(const tu_vertex *left, const tu_vertex *right) {
    tu_text texts[2] = { 0 };
    const tu_vertex *of[2] = { left, right };
    char *made[2] = { NULL, NULL };
    for (int k = 0; k < 2 && tu_text_begin(&texts[k]) == TUTTI_OK; k++) {
        const tu_operator *entry = of[k]->entry;
        for (int i = 0; i < entry->argument_count; i++)
            tu_attribute_print(texts[k].to, &entry->arguments[i],
                               (const char *)of[k]->attributes + entry->arguments[i].offset);
        made[k] = tu_text_end(&texts[k]);
    }
    bool same = made[0] != NULL && made[1] != NULL && strcmp(made[0], made[1]) == 0;
    free(made[0]);
    free(made[1]);
    return same;
}

/* Pure, on memory that nothing writes, with results that nothing writes: it gives the same wherever it stands. */
static bool can_share(const tu_vertex *vertex, const traces *of) {
    if (!tu_vertex_is_pure(vertex) || vertex->entry->flags & (TU_IMPURE | TU_NO_READ | TU_STARTS))
        return false;
    for (int i = 0; i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL && of->written[vertex->operands[i].value->storage])
            return false;
    for (int i = 0; i < vertex->result_count; i++)
        if (of->written[vertex->results[i]->storage] || of->kept[vertex->results[i]->storage])
            return false;
    return true;
}

static bool same_call(const tu_vertex *left, const tu_vertex *right) {
    if (left->entry != right->entry || left->operand_count != right->operand_count ||
        left->result_count != right->result_count)
        return false;
    for (int i = 0; i < left->operand_count; i++)
        if (!same_operand(&left->operands[i], &right->operands[i]))
            return false;
    return same_attributes(left, right);
}

static size_t bin_of(const tu_vertex *vertex, size_t bins) {
    size_t hash = (size_t)tu_attributes_hash(vertex->entry, vertex->attributes);
    for (int i = 0; i < vertex->operand_count; i++)
        hash = hash * 31 + (vertex->operands[i].value != NULL ? (size_t)vertex->operands[i].value->number : 7);
    return hash % bins;
}

/* Vertices with one hash are chained through `next`, by their positions in `kept`. */
tutti_status tu_pass_common(tt_graph *graph, size_t bytes) {
    (void)bytes;
    traces of = { NULL, NULL, NULL };
    size_t bins = (size_t)graph->vertex_count * 2 + 1, count = 0;
    tu_vertex **kept = calloc((size_t)graph->vertex_count + 1, sizeof(tu_vertex *));
    size_t *first = calloc(bins, sizeof *first), *next = calloc((size_t)graph->vertex_count + 1, sizeof *next);
    tutti_status status =
        kept != NULL && first != NULL && next != NULL ? trace(graph, &of) : tu_error_memory("a pass", bins);
    for (tu_vertex *vertex = graph->first, *after; status == TUTTI_OK && vertex != NULL; vertex = after) {
        after = vertex->next;
        if (!can_share(vertex, &of))
            continue;
        size_t bin = bin_of(vertex, bins), at = first[bin];
        while (at != 0 && !same_call(kept[at - 1], vertex))
            at = next[at - 1];
        if (at == 0) {
            kept[count] = vertex;
            next[count] = first[bin];
            first[bin] = ++count;
            continue;
        }
        for (int i = 0; i < vertex->result_count; i++)
            tu_value_become(graph, vertex->results[i], kept[at - 1]->results[i]);
        tu_vertex_erase(graph, vertex);
    }
    trace_end(&of);
    free(kept);
    free(first);
    free(next);
    return status;
}

/* ---- copies ---- */

/* Whether `storage` is used behind the vertex. */
static bool used_after(const tu_vertex *vertex, int storage) {
    for (const tu_vertex *one = vertex->next; one != NULL; one = one->next)
        for (int i = 0; i < one->operand_count; i++)
            if (one->operands[i].value != NULL && one->operands[i].value->storage == storage)
                return true;
    return false;
}

/* A copy of the whole of what this graph made, which nobody looks at again: the copy may be the original. */
static bool is_idle(const tu_vertex *vertex, const traces *of) {
    if (vertex->entry != &tu_operator_clone && vertex->entry != &tu_operator_contiguous)
        return false;
    const tu_value *from = vertex->operands[0].value, *to = vertex->results[0];
    return from != NULL && from->maker != NULL && !(from->maker->entry->flags & TU_VIEW) && from->shape.offset == 0 &&
           !of->kept[from->storage] && of->sent[from->storage] == 0 && tu_shape_equal(&from->shape, &to->shape) &&
           !used_after(vertex, from->storage);
}

tutti_status tu_pass_copies(tt_graph *graph, size_t bytes) {
    (void)bytes;
    traces of = { NULL, NULL, NULL };
    tutti_status status = trace(graph, &of);
    for (tu_vertex *vertex = graph->first, *after; status == TUTTI_OK && vertex != NULL; vertex = after) {
        after = vertex->next;
        if (!is_idle(vertex, &of))
            continue;
        tu_value *from = vertex->operands[0].value, *to = vertex->results[0];
        of.kept[from->storage] = of.kept[to->storage];
        of.written[from->storage] = of.written[from->storage] || of.written[to->storage];
        tu_value_become(graph, to, from);
        tu_vertex_erase(graph, vertex);
    }
    trace_end(&of);
    return status;
}

/* ---- collectives in place ---- */

/* Collectives that can write their input. */
static bool has_in_place_form(const tu_vertex *vertex) {
    static const tu_operator *const forms[] = { &tu_operator_all_reduce, &tu_operator_all_reduce_premul,
                                                &tu_operator_broadcast, &tu_operator_all_reduce_coalesced,
                                                &tu_operator_all_reduce_coalesced_premul };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (vertex->entry == forms[i])
            return !vertex->in_place;
    return false;
}

/* The input is memory of this graph that nobody looks at again, and nobody else sends. */
static bool may_be_overwritten(const tu_vertex *vertex, int operand, const traces *of) {
    const tu_value *from = vertex->operands[operand].value, *to = vertex->results[operand];
    if (from == NULL || from->maker == NULL || of->kept[from->storage] || of->sent[from->storage] != 1 ||
        !tu_shape_is_row_major(&from->shape) || !tu_shape_equal(&from->shape, &to->shape) ||
        used_after(vertex, from->storage))
        return false;
    for (int i = 0; i < operand; i++)
        if (vertex->operands[i].value->storage == from->storage)
            return false;
    return true;
}

tutti_status tu_pass_in_place(tt_graph *graph, size_t bytes) {
    (void)bytes;
    traces of = { NULL, NULL, NULL };
    tutti_status status = trace(graph, &of);
    for (tu_vertex *vertex = graph->first; status == TUTTI_OK && vertex != NULL; vertex = vertex->next) {
        bool possible = has_in_place_form(vertex);
        for (int i = 0; i < vertex->result_count && possible; i++)
            possible = may_be_overwritten(vertex, i, &of);
        if (!possible)
            continue;
        for (int i = 0; i < vertex->result_count; i++) {
            tu_value *from = vertex->operands[i].value, *to = vertex->results[i];
            of.kept[from->storage] = of.kept[to->storage];
            of.sent[from->storage] += of.sent[to->storage];
            to->maker = NULL;
            tu_value_become(graph, to, from);
        }
        vertex->in_place = true;
        vertex->result_count = 0;
    }
    trace_end(&of);
    return status;
}
