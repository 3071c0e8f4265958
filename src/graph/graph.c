/* SPDX-License-Identifier: Apache-2.0
 *
 * Building graphs and taking them apart.
 */
#include "graph/graph.h"
#include "base/result.h"

#include <stdlib.h>
#include <string.h>

/* ---- names: every one that was given, so that the next of its kind is found at once ---- */

typedef struct name {
    struct name *next;
    int count; /* how many values were named after it */
    char text[];
} name;

#define NAME_BINS 256

struct tu_names {
    name *bins[NAME_BINS];
};

static name *find_name(struct tu_names *names, const char *text) {
    uint32_t hash = 2166136261u;
    for (const char *at = text; *at != 0; at++)
        hash = (hash ^ (unsigned char)*at) * 16777619u;
    name **bin = &names->bins[hash % NAME_BINS];
    for (name *one = *bin; one != NULL; one = one->next)
        if (strcmp(one->text, text) == 0)
            return one;
    name *one = malloc(sizeof *one + strlen(text) + 1);
    if (one == NULL)
        return NULL;
    one->count = 0;
    strcpy(one->text, text);
    one->next = *bin;
    *bin = one;
    return one;
}

/* "sin", "sin_1", "sin_2" …; one that somebody has already is passed over. */
static char *new_name(struct tu_names *names, const char *base) {
    name *one = find_name(names, base);
    if (one == NULL)
        return NULL;
    if (one->count++ == 0)
        return strdup(base);
    size_t bytes = strlen(base) + 16;
    char *text = malloc(bytes);
    for (; text != NULL; one->count++) {
        snprintf(text, bytes, "%s_%d", base, one->count - 1);
        name *other = find_name(names, text);
        if (other == NULL) {
            free(text);
            return NULL;
        }
        if (other->count++ == 0)
            break;
    }
    return text;
}

static void free_names(struct tu_names *names) {
    for (int i = 0; names != NULL && i < NAME_BINS; i++)
        for (name *one = names->bins[i], *next; one != NULL; one = next) {
            next = one->next;
            free(one);
        }
    free(names);
}

/* ---- graphs ---- */

tt_graph *tu_graph_new(void) {
    tt_graph *graph = calloc(1, sizeof *graph);
    if (graph != NULL && (graph->names = calloc(1, sizeof *graph->names)) == NULL) {
        free(graph);
        graph = NULL;
    }
    if (graph == NULL) {
        tu_error_memory("a graph", sizeof *graph);
        return NULL;
    }
    atomic_init(&graph->references, 1);
    return graph;
}

static void free_vertex(tu_vertex *vertex) {
    if (vertex->attributes != NULL)
        tu_attributes_end(vertex->entry, vertex->attributes);
    free(vertex->attributes);
    free(vertex->operands);
    free(vertex->results);
    free(vertex);
}

void tt_graph_release(tt_graph **place) {
    tt_graph *graph = place != NULL ? *place : NULL;
    if (place != NULL)
        *place = NULL;
    if (graph == NULL || atomic_fetch_sub_explicit(&graph->references, 1, memory_order_acq_rel) != 1)
        return;
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL; vertex = next) {
        next = vertex->next;
        free_vertex(vertex);
    }
    for (tu_value *value = graph->values, *next; value != NULL; value = next) {
        next = value->next;
        free(value->name);
        free(value);
    }
    for (int i = 0; i < graph->input_count; i++) {
        tu_tensor_drop(graph->inputs[i].tensor);
        if (graph->inputs[i].kind == TU_INPUT_HELD)
            graph->inputs[i].holder.release(graph->inputs[i].holder.owner);
    }
    for (int i = 0; i < graph->effect_count; i++)
        graph->effects[i].holder.release(graph->effects[i].holder.owner);
    free(graph->inputs);
    free(graph->outputs);
    free(graph->effects);
    free_names(graph->names);
    free(graph);
}

tu_value *tu_graph_value(tt_graph *graph, const char *base, const tu_shape *shape, int storage) {
    tu_value *value = calloc(1, sizeof *value);
    if (value == NULL || (value->name = new_name(graph->names, base)) == NULL) {
        free(value);
        tu_error_memory("a value of a graph", sizeof *value);
        return NULL;
    }
    value->number = graph->value_count++;
    value->shape = *shape;
    value->storage = storage >= 0 ? storage : graph->storage_count++;
    value->next = graph->values;
    graph->values = value;
    return value;
}

tu_graph_input *tu_graph_input_add(tt_graph *graph, tu_input_kind kind, tu_value *value) {
    if (graph->input_count == graph->input_capacity) {
        int capacity = graph->input_capacity == 0 ? 16 : graph->input_capacity * 2;
        tu_graph_input *inputs = realloc(graph->inputs, (size_t)capacity * sizeof *inputs);
        if (inputs == NULL) {
            tu_error_memory("inputs of a graph", (size_t)capacity * sizeof *inputs);
            return NULL;
        }
        graph->inputs = inputs;
        graph->input_capacity = capacity;
    }
    tu_graph_input *input = &graph->inputs[graph->input_count];
    *input = (tu_graph_input){ .value = value, .kind = kind, .index = graph->input_count };
    value->place = graph->input_count++;
    graph->argument_count += kind == TU_INPUT_ARGUMENT;
    return input;
}

/* ---- vertices ---- */

static void link_before(tt_graph *graph, tu_vertex *vertex, tu_vertex *place) {
    vertex->next = place;
    vertex->before = place != NULL ? place->before : graph->last;
    *(vertex->before != NULL ? &vertex->before->next : &graph->first) = vertex;
    *(place != NULL ? &place->before : &graph->last) = vertex;
}

static void unlink_vertex(tt_graph *graph, tu_vertex *vertex) {
    *(vertex->before != NULL ? &vertex->before->next : &graph->first) = vertex->next;
    *(vertex->next != NULL ? &vertex->next->before : &graph->last) = vertex->before;
}

tu_vertex *tu_graph_vertex(tt_graph *graph, const tu_operator *entry, int operands, int results, const void *attributes,
                           tu_vertex *place) {
    tu_vertex *vertex = calloc(1, sizeof *vertex);
    if (vertex != NULL) {
        vertex->operands = calloc((size_t)operands + 1, sizeof *vertex->operands);
        vertex->results = calloc((size_t)results + 1, sizeof(tu_value *));
        void *copy = malloc(entry->attribute_bytes + 1);
        if (copy != NULL && tu_attributes_copy(entry, attributes, copy) == TUTTI_OK) {
            vertex->attributes = copy;
        } else {
            free(copy);
        }
    }
    if (vertex == NULL || vertex->operands == NULL || vertex->results == NULL || vertex->attributes == NULL) {
        tu_error_memory("a vertex of a graph", sizeof *vertex);
        if (vertex != NULL) {
            vertex->entry = entry;
            free_vertex(vertex);
        }
        return NULL;
    }
    vertex->entry = entry;
    vertex->operand_count = operands;
    vertex->result_count = results;
    link_before(graph, vertex, place);
    graph->vertex_count++;
    return vertex;
}

/* Values stay in the graph's list, unused: passes may hold on to them. */
void tu_vertex_erase(tt_graph *graph, tu_vertex *vertex) {
    unlink_vertex(graph, vertex);
    graph->vertex_count--;
    for (int i = 0; i < vertex->result_count; i++)
        if (vertex->results[i] != NULL && vertex->results[i]->maker == vertex) /* no other vertex has adopted it */
            vertex->results[i]->maker = NULL;
    free_vertex(vertex);
}

void tu_vertex_move(tt_graph *graph, tu_vertex *vertex, tu_vertex *place) {
    if (vertex == place)
        return;
    unlink_vertex(graph, vertex);
    link_before(graph, vertex, place);
}

void tu_vertex_adopt(tu_vertex *vertex, int place, tu_value *value) {
    if (vertex->results[place] != NULL)
        vertex->results[place]->maker = NULL;
    vertex->results[place] = value;
    value->maker = vertex;
    value->place = place;
}

void tu_graph_number(tt_graph *graph) {
    int position = 0;
    for (tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        vertex->position = position++;
}

void tu_value_replace(tt_graph *graph, tu_value *from, tu_value *to) {
    for (tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        for (int i = 0; i < vertex->operand_count; i++)
            if (vertex->operands[i].value == from)
                vertex->operands[i].value = to;
    for (int i = 0; i < graph->output_count; i++)
        if (graph->outputs[i].value == from)
            graph->outputs[i].value = to;
    for (int i = 0; i < graph->effect_count; i++)
        if (graph->effects[i].value == from)
            graph->effects[i].value = to;
}

void tu_value_become(tt_graph *graph, tu_value *from, tu_value *to) {
    int storage = from->storage;
    for (tu_value *value = graph->values; value != NULL; value = value->next)
        if (value->storage == storage)
            value->storage = to->storage;
    tu_value_replace(graph, from, to);
}

bool tu_value_is_view_of(const tu_value *value, const tu_value *base) {
    while (value != base) {
        const tu_vertex *maker = value->maker;
        if (maker == NULL || !(maker->entry->flags & TU_VIEW) || !tu_vertex_is_pure(maker))
            return false;
        value = maker->operands[0].value;
        if (value == NULL)
            return false;
    }
    return true;
}

tu_value *tu_value_view_again(tt_graph *graph, tu_value *value, const tu_value *base, tu_value *now, tu_vertex *place) {
    if (value == base)
        return now;
    const tu_vertex *maker = value->maker;
    tu_operand first = { .value = tu_value_view_again(graph, maker->operands[0].value, base, now, place) };
    if (first.value == NULL)
        return NULL;
    tu_vertex *made = tu_graph_call(graph, maker->entry, 1, &first, maker->attributes, place);
    return made != NULL ? made->results[0] : NULL;
}

void tu_graph_count_uses(tt_graph *graph) {
    for (tu_value *value = graph->values; value != NULL; value = value->next)
        value->mark = 0;
    for (tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        for (int i = 0; i < vertex->operand_count; i++)
            if (vertex->operands[i].value != NULL)
                vertex->operands[i].value->mark++;
    for (int i = 0; i < graph->output_count; i++)
        if (graph->outputs[i].value != NULL)
            graph->outputs[i].value->mark++;
    for (int i = 0; i < graph->effect_count; i++)
        if (graph->effects[i].value != NULL)
            graph->effects[i].value->mark++;
}

bool tu_shape_equal(const tu_shape *left, const tu_shape *right) {
    size_t bytes = (size_t)left->ndim * sizeof left->sizes[0];
    return left->dtype == right->dtype && left->device == right->device && left->ndim == right->ndim &&
           memcmp(left->sizes, right->sizes, bytes) == 0 && memcmp(left->strides, right->strides, bytes) == 0;
}

bool tu_shape_is_row_major(const tu_shape *shape) {
    int64_t stride = 1;
    for (int i = shape->ndim - 1; i >= 0; i--) {
        if (shape->strides[i] != stride)
            return false;
        stride *= shape->sizes[i];
    }
    return true;
}

bool tu_vertex_writes(const tu_vertex *vertex, int operand) {
    if (vertex->in_place && (operand == 0 || vertex->entry->flags & TU_EACH_INPUT))
        return true;
    if (vertex->result_count == 0 && !vertex->in_place && vertex->entry->written == 0)
        return true;
    return operand < TU_INPUTS && (vertex->entry->written & TU_INPUT(operand)) != 0;
}

/* An `empty` is impure, since its contents differ from call to call, but nobody misses it. */
bool tu_vertex_is_pure(const tu_vertex *vertex) {
    if (vertex->in_place || vertex->entry->written != 0 || vertex->result_count == 0)
        return false;
    return !(vertex->entry->flags & TU_IMPURE) || vertex->entry->flags & TU_NO_KERNEL;
}

/* ---- checks ---- */

static tutti_status check_operand(const char *who, const tu_vertex *vertex, const tu_operand *operand,
                                  const bool *made) {
    if (operand->value == NULL || made[operand->value->number])
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_STATE, "%s: %s uses %s, which is not made before", who, vertex->entry->name,
                    operand->value->name);
}

static int compare_names(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static tutti_status check_names(const char *who, const tt_graph *graph) {
    size_t count = 0;
    for (const tu_value *value = graph->values; value != NULL; value = value->next)
        count++;
    const char **names = malloc((count + 1) * sizeof *names);
    if (names == NULL)
        return tu_error_memory("the names of a graph", count * sizeof *names);
    count = 0;
    for (const tu_value *value = graph->values; value != NULL; value = value->next)
        names[count++] = value->name;
    qsort(names, count, sizeof *names, compare_names);
    tutti_status status = TUTTI_OK;
    for (size_t i = 1; i < count && status == TUTTI_OK; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            status = tu_error(TUTTI_ERROR_STATE, "%s: two values are called %s", who, names[i]);
    free(names);
    return status;
}

static tutti_status check_vertex(const char *who, const tu_vertex *vertex, bool *made) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < vertex->operand_count && status == TUTTI_OK; i++)
        status = check_operand(who, vertex, &vertex->operands[i], made);
    for (int i = 0; i < vertex->result_count && status == TUTTI_OK; i++) {
        const tu_value *result = vertex->results[i];
        if (made[result->number] || result->maker != vertex)
            return tu_error(TUTTI_ERROR_STATE, "%s: %s is made twice", who, result->name);
        made[result->number] = true;
        const tu_value *base = vertex->entry->flags & TU_VIEW ? vertex->operands[0].value : NULL;
        if (base != NULL && result->storage != base->storage)
            return tu_error(TUTTI_ERROR_STATE, "%s: %s looks at %s, and is said to have memory of its own", who,
                            result->name, base->name);
    }
    return status;
}

static tutti_status check_uses(const char *who, const tt_graph *graph, bool *made) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < graph->input_count; i++)
        made[graph->inputs[i].value->number] = true;
    for (const tu_vertex *vertex = graph->first; vertex != NULL && status == TUTTI_OK; vertex = vertex->next)
        status = check_vertex(who, vertex, made);
    for (int i = 0; i < graph->output_count && status == TUTTI_OK; i++)
        if (graph->outputs[i].value != NULL && !made[graph->outputs[i].value->number])
            status = tu_error(TUTTI_ERROR_STATE, "%s: %s is returned, and nothing makes it", who,
                              graph->outputs[i].value->name);
    for (int i = 0; i < graph->effect_count && status == TUTTI_OK; i++)
        if (graph->effects[i].value != NULL && !made[graph->effects[i].value->number])
            status = tu_error(TUTTI_ERROR_STATE, "%s: %s is left in a module, and nothing makes it", who,
                              graph->effects[i].value->name);
    return status;
}

tutti_status tu_graph_check(const char *who, const tt_graph *graph) {
    bool *made = calloc((size_t)graph->value_count + 1, sizeof *made);
    if (made == NULL)
        return tu_error_memory("a check of a graph", (size_t)graph->value_count);
    tutti_status status = check_uses(who, graph, made);
    free(made);
    return status == TUTTI_OK ? check_names(who, graph) : status;
}

static bool is_there(const char *who, const tt_graph *graph) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (graph == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: graph is NULL", who);
    return graph != NULL;
}

bool tt_graph_check(const tt_graph *graph) {
    return is_there("graph_check", graph) && tu_pending_take(tu_graph_check("graph_check", graph)) == TUTTI_OK &&
           tu_pending_take(tu_graph_check_shapes("graph_check", graph)) == TUTTI_OK;
}

/* ---- counts ---- */

bool tt_graph_count(const tt_graph *graph, tt_graph_counts *counts) {
    if (!is_there("graph_count", graph))
        return false;
    tt_graph_counts own = { .vertices = graph->vertex_count, .outputs = graph->output_count };
    for (int i = 0; i < graph->input_count; i++)
        *(graph->inputs[i].kind == TU_INPUT_CONSTANT ? &own.constants : &own.inputs) += 1;
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        own.collectives += (vertex->entry->flags & TU_STARTS) != 0;
    return tu_pending_take(tu_result_copy("tt_graph_counts", &own, sizeof own, counts)) == TUTTI_OK;
}

int tt_graph_count_of(const tt_graph *graph, const char *name) {
    int count = 0;
    if (!is_there("graph_count_of", graph))
        return 0;
    if (name == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "graph_count_of: name is NULL");
        return 0;
    }
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next) {
        size_t length = strlen(vertex->entry->name);
        count +=
            strncmp(name, vertex->entry->name, length) == 0 && strcmp(name + length, vertex->in_place ? "_" : "") == 0;
    }
    return count;
}
