/* SPDX-License-Identifier: Apache-2.0
 *
 * Sizes that change. When a call differs from an entry in one size alone, the function is captured a second time, and
 * the two graphs are compared: where they are the same but for numbers that follow that size, the second one is a
 * pattern. For a third size no function runs: the pattern is copied, its numbers follow, and the operators' own rules
 * say all shapes anew.
 *
 * This is sound because the function never asked for a size (a capture notes that), so all it does with one goes
 * through the library, and the library's numbers are a size, a multiple of it, or one divided by that. Sizes 0 and 1,
 * which broadcast or are empty, are never variable. Whatever does not fit is captured as ever.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compile/entry.h"

/* A number in a vertex that follows the size: factor * size, or 1 / (factor * size). */
typedef struct follower {
    int vertex; /* counted from 0 */
    int argument, index;
    int64_t factor;
} follower;

struct tu_pattern {
    int place_count; /* where the size stands */
    struct {
        int guard, dim;
    } * places;
    int follower_count, follower_capacity;
    follower *followers;
};

void tu_pattern_end(tu_pattern *pattern) {
    if (pattern == NULL)
        return;
    free(pattern->places);
    free(pattern->followers);
    free(pattern);
}

/* ---- the size ---- */

typedef struct change {
    int64_t before, after;
} change;

/* Where arguments differ from what the guards know, and whether it is one number everywhere. `inputs` are the tensors
 * of the guards. */
static tutti_status find_places(const tu_guards *guards, tt_tensor *const *inputs, tu_pattern *pattern, change *size,
                                bool *fits) {
    size_t most = 1;
    for (int i = 0; i < guards->count; i++)
        most += guards->list[i].dim_count;
    pattern->places = calloc(most, sizeof *pattern->places);
    if (pattern->places == NULL)
        return tu_error_memory("a pattern of a graph", most * sizeof *pattern->places);
    *size = (change){ 0, 0 };
    *fits = true;
    for (int i = 0; i < guards->count; i++)
        for (int k = 0; k < guards->list[i].dim_count; k++) {
            change here = { guards->list[i].dims[k], inputs[i]->sizes[k] };
            if (here.before == here.after)
                continue;
            if (size->before == 0)
                *size = here;
            *fits = *fits && here.before == size->before && here.after == size->after;
            pattern->places[pattern->place_count].guard = i;
            pattern->places[pattern->place_count++].dim = k;
        }
    *fits = *fits && size->before > 1 && size->after > 1;
    return TUTTI_OK;
}

/* ---- comparing two graphs ---- */

static tutti_status add_follower(tu_pattern *pattern, follower one) {
    if (pattern->follower_count == pattern->follower_capacity) {
        int capacity = pattern->follower_capacity * 2 + 16;
        follower *followers = realloc(pattern->followers, (size_t)capacity * sizeof *followers);
        if (followers == NULL)
            return tu_error_memory("a pattern of a graph", (size_t)capacity * sizeof *followers);
        pattern->followers = followers;
        pattern->follower_capacity = capacity;
    }
    pattern->followers[pattern->follower_count++] = one;
    return TUTTI_OK;
}

/* How often the size is in a number that was `before` and is `after`; 0: in no way that is known. */
static int64_t factor_of(change size, int64_t before, int64_t after) {
    if (after <= 0 || before <= 0 || after % size.after != 0 || before % size.before != 0)
        return 0;
    return after / size.after == before / size.before ? after / size.after : 0;
}

static int64_t inverse_factor_of(change size, double before, double after) {
    if (!(before > 0 && after > 0 && before <= 1 && after <= 1))
        return 0;
    double of_before = nearbyint(1 / before), of_after = nearbyint(1 / after);
    if (of_before > 1e15 || of_after > 1e15 || 1.0 / of_before != before || 1.0 / of_after != after)
        return 0;
    return factor_of(size, (int64_t)of_before, (int64_t)of_after);
}

/* A list of whole numbers as an attribute: where they are, and how many. */
static int list_of(const tu_argument *argument, const void *attributes, const int64_t **at) {
    const char *place = (const char *)attributes + argument->offset;
    if (argument->type == TT_ARGUMENT_DIMS) {
        *at = ((const tt_dims *)place)->at;
        return ((const tt_dims *)place)->count;
    }
    if (argument->type == TT_ARGUMENT_INTS) {
        *at = ((const tu_ints *)place)->at;
        return (int)((const tu_ints *)place)->count;
    }
    *at = (const int64_t *)place;
    return argument->type == TT_ARGUMENT_INT64 ? 1 : 0;
}

static tutti_status compare_list(tu_pattern *pattern, change size, follower where, int count, const int64_t *before,
                                 const int64_t *after, bool *fits) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < count && *fits && status == TUTTI_OK; i++) {
        if (before[i] == after[i])
            continue;
        where.index = i;
        where.factor = factor_of(size, before[i], after[i]);
        *fits = where.factor > 0;
        if (*fits)
            status = add_follower(pattern, where);
    }
    return status;
}

static size_t bytes_of(tt_argument_type type) {
    switch (type) {
    case TT_ARGUMENT_INT:
        return sizeof(int);
    case TT_ARGUMENT_BOOL:
        return sizeof(bool);
    case TT_ARGUMENT_DTYPE:
        return sizeof(tutti_dtype);
    case TT_ARGUMENT_DEVICE:
        return sizeof(tutti_device);
    case TT_ARGUMENT_REDUCTION:
        return sizeof(tutti_reduction);
    case TT_ARGUMENT_GROUP:
        return sizeof(tutti_group *);
    default:
        return 0; /* tensors are operands */
    }
}

static tutti_status compare_attribute(tu_pattern *pattern, change size, follower where, const tu_vertex *before,
                                      const tu_vertex *after, bool *fits) {
    const tu_argument *argument = &before->entry->arguments[where.argument];
    const char *left = (const char *)before->attributes + argument->offset;
    const char *right = (const char *)after->attributes + argument->offset;
    if (argument->type == TT_ARGUMENT_DOUBLE) {
        double first, second;
        memcpy(&first, left, sizeof first);
        memcpy(&second, right, sizeof second);
        if (memcmp(&first, &second, sizeof first) == 0)
            return TUTTI_OK;
        where.factor = inverse_factor_of(size, first, second);
        *fits = where.factor > 0;
        return *fits ? add_follower(pattern, where) : TUTTI_OK;
    }
    const int64_t *lefts, *rights;
    int count = list_of(argument, before->attributes, &lefts), other = list_of(argument, after->attributes, &rights);
    if (count > 0 || other > 0) {
        *fits = count == other;
        return *fits ? compare_list(pattern, size, where, count, lefts, rights, fits) : TUTTI_OK;
    }
    *fits = memcmp(left, right, bytes_of(argument->type)) == 0;
    return TUTTI_OK;
}

static bool same_operand(const tu_operand *before, const tu_operand *after) {
    if ((before->value == NULL) != (after->value == NULL) || before->number != after->number)
        return false;
    if (before->value != NULL)
        return before->value->number == after->value->number;
    return before->number == 0 || memcmp(&before->at, &after->at, sizeof before->at) == 0;
}

static tutti_status compare_vertices(tu_pattern *pattern, change size, int index, const tu_vertex *before,
                                     const tu_vertex *after, bool *fits) {
    *fits = before->entry == after->entry && before->in_place == after->in_place &&
            before->operand_count == after->operand_count && before->result_count == after->result_count;
    for (int i = 0; *fits && i < before->operand_count; i++)
        *fits = same_operand(&before->operands[i], &after->operands[i]);
    for (int i = 0; *fits && i < before->result_count; i++)
        *fits = before->results[i]->number == after->results[i]->number &&
                before->results[i]->storage == after->results[i]->storage;
    tutti_status status = TUTTI_OK;
    for (int i = 0; *fits && i < before->entry->argument_count && status == TUTTI_OK; i++)
        status = compare_attribute(pattern, size, (follower){ .vertex = index, .argument = i }, before, after, fits);
    return status;
}

static bool same_frame(const tu_captured *before, const tu_captured *after) {
    const tt_graph *first = before->graph, *second = after->graph;
    if (before->asks_sizes || after->asks_sizes || before->result_count != after->result_count ||
        before->input_count != after->input_count || before->effect_count != after->effect_count ||
        before->tangent_count != after->tangent_count || before->target_count != after->target_count ||
        first->vertex_count != second->vertex_count || first->input_count != second->input_count ||
        first->output_count != second->output_count || first->effect_count != second->effect_count)
        return false;
    for (int i = 0; i < first->input_count; i++)
        if (first->inputs[i].kind != second->inputs[i].kind || first->inputs[i].tensor != second->inputs[i].tensor ||
            second->inputs[i].asks_bytes)
            return false;
    for (int i = 0; i < first->output_count; i++)
        if (!same_operand(&first->outputs[i], &second->outputs[i]))
            return false;
    return true;
}

tutti_status tu_pattern_find(const tu_guards *guards, const tu_captured *before, const tu_captured *after,
                             tt_tensor *const *inputs, tu_pattern **made) {
    *made = NULL;
    tu_pattern *pattern = calloc(1, sizeof *pattern);
    if (pattern == NULL)
        return tu_error_memory("a pattern of a graph", sizeof *pattern);
    change size;
    bool fits = false;
    tutti_status status = find_places(guards, inputs, pattern, &size, &fits);
    fits = fits && same_frame(before, after);
    const tu_vertex *first = before->graph->first, *second = after->graph->first;
    for (int i = 0; status == TUTTI_OK && fits && first != NULL; i++, first = first->next, second = second->next)
        status = compare_vertices(pattern, size, i, first, second, &fits);
    if (status == TUTTI_OK && fits)
        *made = pattern;
    else
        tu_pattern_end(pattern);
    return status;
}

/* ---- another size ---- */

/* The size in all its places; 0: they differ, or it cannot be variable, or something else has changed. */
int64_t tu_pattern_size(const tu_pattern *pattern, const tu_guards *guards, tt_tensor *const *inputs) {
    int64_t size = inputs[pattern->places[0].guard]->sizes[pattern->places[0].dim];
    int differences = 0;
    for (int i = 0; i < pattern->place_count; i++)
        if (inputs[pattern->places[i].guard]->sizes[pattern->places[i].dim] != size)
            return 0;
    for (int i = 0; i < guards->count; i++)
        for (int k = 0; k < guards->list[i].dim_count; k++)
            differences += inputs[i]->sizes[k] != guards->list[i].dims[k];
    return differences == pattern->place_count && size > 1 ? size : 0;
}

static void follow(const tu_pattern *pattern, int64_t size, int index, tu_vertex *vertex) {
    for (int i = 0; i < pattern->follower_count; i++) {
        const follower *one = &pattern->followers[i];
        if (one->vertex != index)
            continue;
        const tu_argument *argument = &vertex->entry->arguments[one->argument];
        if (argument->type == TT_ARGUMENT_DOUBLE) {
            double number = 1.0 / (double)(one->factor * size);
            memcpy((char *)vertex->attributes + argument->offset, &number, sizeof number);
            continue;
        }
        const int64_t *at;
        list_of(argument, vertex->attributes, &at);
        ((int64_t *)at)[one->index] = one->factor * size; /* the vertex owns its attributes */
    }
}

static tutti_status copy_arrays(const tu_captured *from, tu_captured *to) {
    size_t tangents = (size_t)from->tangent_count, targets = (size_t)from->target_count;
    to->tangents = calloc(tangents + 1, sizeof *to->tangents);
    to->targets = calloc(targets + 1, sizeof *to->targets);
    if (to->tangents == NULL || to->targets == NULL)
        return tu_error_memory("a copy of a capture", targets * sizeof *to->targets);
    if (tangents > 0)
        memcpy(to->tangents, from->tangents, tangents * sizeof *to->tangents);
    if (targets > 0)
        memcpy(to->targets, from->targets, targets * sizeof *to->targets);
    return TUTTI_OK;
}

static tutti_status copy_witnesses(const tu_guards *from, tu_captured *to) {
    size_t count = (size_t)from->witness_count;
    to->witnesses = calloc(count + 1, sizeof *to->witnesses);
    to->stamps = calloc(count + 1, sizeof *to->stamps);
    if (to->witnesses == NULL || to->stamps == NULL)
        return tu_error_memory("a copy of a capture", count * sizeof *to->witnesses);
    for (size_t i = 0; i < count; i++) {
        to->witnesses[i] = from->witnesses[i];
        to->stamps[i] = from->stamps[i];
        to->witnesses[i].keep(to->witnesses[i].owner);
        to->witness_count++;
    }
    return TUTTI_OK;
}

/* Gradients of results have their shapes, row by row. */
static tutti_status shape_tangents(const char *who, tu_captured *captured) {
    tt_graph *graph = captured->graph;
    int tangent = 0;
    for (int i = captured->input_count; i < graph->input_count; i++) {
        if (graph->inputs[i].kind != TU_INPUT_TANGENT)
            continue;
        const tu_tangent_source *source = &captured->tangents[tangent++];
        const tu_value *of =
            source->input >= 0 ? graph->inputs[source->input].value : graph->outputs[source->result].value;
        tu_shape *shape = &graph->inputs[i].value->shape;
        *shape = of->shape;
        shape->offset = 0;
        tutti_status status = tu_shape_contiguous(who, shape);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

static tutti_status reshape_all(const char *who, const tu_pattern *pattern, int64_t size, tu_captured *captured,
                                int forward_count, tt_tensor **tensors) {
    tutti_status status = forward_count == 0 ? shape_tangents(who, captured) : TUTTI_OK;
    int index = 0;
    for (tu_vertex *vertex = captured->graph->first; vertex != NULL && status == TUTTI_OK;
         vertex = vertex->next, index++) {
        follow(pattern, size, index, vertex);
        status = tu_vertex_reshape(who, vertex, tensors);
        if (index + 1 == forward_count) {
            captured->last = vertex;
            if (status == TUTTI_OK)
                status = shape_tangents(who, captured);
        }
    }
    return status;
}

static int count_forward(const tu_captured *captured) {
    int count = 0;
    for (const tu_vertex *vertex = captured->graph->first; captured->last != NULL && vertex != NULL;
         vertex = vertex->next) {
        count++;
        if (vertex == captured->last)
            break;
    }
    return count;
}

tutti_status tu_pattern_apply(const char *who, const tu_pattern *pattern, const tu_entry *entry,
                              tt_tensor *const *inputs, int64_t size, tu_captured *made) {
    const tu_captured *from = &entry->captured;
    *made = *from;
    made->graph = NULL;
    made->tangents = NULL;
    made->targets = NULL;
    made->last = NULL;
    made->witness_count = 0;
    made->witnesses = NULL;
    made->stamps = NULL;
    tutti_status status = tu_graph_clone(from->graph, &made->graph);
    if (status == TUTTI_OK)
        status = copy_arrays(from, made);
    if (status == TUTTI_OK)
        status = copy_witnesses(&entry->guards, made);
    if (status != TUTTI_OK)
        return status;
    for (int i = 0; i < made->input_count; i++) {
        made->graph->inputs[i].value->shape = tu_shape_of(inputs[i]);
        made->graph->inputs[i].bytes = inputs[i]->storage->bytes;
    }
    tt_tensor **tensors = calloc((size_t)made->graph->value_count + 1, sizeof(tt_tensor *));
    if (tensors == NULL)
        return tu_error_memory("a copy of a capture", (size_t)made->graph->value_count * sizeof(tt_tensor *));
    status = reshape_all(who, pattern, size, made, count_forward(from), tensors);
    for (int i = 0; i < made->graph->value_count; i++)
        tu_tensor_drop(tensors[i]);
    free(tensors);
    return status;
}
