/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes that move collectives: starts up, waits down, what waits to the end, neighbours into one. What they decide
 * comes from the graph alone, which is the same on all ranks, and the order of starts never changes, so that ranks stay
 * together.
 */
#include <stdlib.h>
#include <string.h>

#include "functional/operators.h"
#include "graph/passes.h"

static bool is_start(const tu_vertex *vertex) {
    return (vertex->entry->flags & TU_STARTS) != 0;
}

static bool is_wait(const tu_vertex *vertex) {
    return vertex->entry == &tu_operator_wait;
}

/* Whether a vertex reads or writes this memory. */
static bool touches(const tu_vertex *vertex, int storage, bool only_writes) {
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value != NULL && value->storage == storage && (!only_writes || tu_vertex_writes(vertex, i)))
            return true;
    }
    for (int i = 0; i < vertex->result_count; i++)
        if (vertex->results[i]->storage == storage)
            return true;
    return false;
}

static bool uses_result_of(const tu_vertex *user, const tu_vertex *maker) {
    for (int i = 0; i < user->operand_count; i++)
        if (user->operands[i].value != NULL && user->operands[i].value->maker == maker)
            return true;
    return false;
}

/* The start that a wait ends: the last before it that makes or writes the memory. NULL where it is no collective's. */
static const tu_vertex *start_of(const tu_vertex *wait) {
    const tu_value *value = wait->operands[0].value;
    for (const tu_vertex *vertex = value != NULL ? wait->before : NULL; vertex != NULL; vertex = vertex->before)
        if (touches(vertex, value->storage, true) && !(vertex->entry->flags & TU_VIEW))
            return is_start(vertex) ? vertex : NULL;
    return NULL;
}

/* ---- waits down ---- */

/* A wait stands before the first vertex that looks at what is waited for, or writes what the collective still reads. A
 * view looks at nothing. */
static bool holds_up(const tu_vertex *vertex, const tu_vertex *wait, const tu_vertex *start) {
    bool looks = !(vertex->entry->flags & TU_VIEW) || !tu_vertex_is_pure(vertex);
    if (looks && touches(vertex, wait->operands[0].value->storage, false))
        return true;
    for (int i = 0; i < start->operand_count; i++)
        if (start->operands[i].value != NULL && touches(vertex, start->operands[i].value->storage, true))
            return true;
    return false;
}

tutti_status tu_pass_sink(tt_graph *graph, size_t bytes) {
    (void)bytes;
    for (tu_vertex *vertex = graph->last, *before; vertex != NULL; vertex = before) {
        before = vertex->before;
        const tu_vertex *start = is_wait(vertex) ? start_of(vertex) : NULL;
        if (start == NULL)
            continue;
        tu_vertex *place = vertex->next;
        while (place != NULL && !holds_up(place, vertex, start))
            place = place->next;
        for (tu_vertex *above = place != NULL ? place->before : graph->last; is_wait(above) && above != vertex;
             above = above->before)
            place = above; /* waits that sank before keep their order */
        tu_vertex_move(graph, vertex, place);
    }
    return TUTTI_OK;
}

/* ---- what waits, behind what does not ---- */

/* Vertices that have to stay behind a wait, as they are found one after the other: what they touch. */
typedef struct late {
    bool *reads, *writes; /* by the number of the storage */
    bool acts;            /* one of them does more than compute: those that do keep their order */
} late;

/* Random numbers, gradients that are set, and the like. Those that say what they write are known by that. */
static bool acts(const tu_vertex *vertex) {
    return vertex->entry->flags & TU_IMPURE && !(vertex->entry->flags & TU_NO_KERNEL) && vertex->entry->written == 0 &&
           !vertex->in_place && !is_wait(vertex);
}

static bool is_late(const late *of, const tu_vertex *vertex) {
    bool found = of->acts && acts(vertex);
    for (int i = 0; i < vertex->operand_count && !found; i++) {
        const tu_value *value = vertex->operands[i].value;
        found = value != NULL && (value->mark != 0 || of->writes[value->storage] ||
                                  (of->reads[value->storage] && tu_vertex_writes(vertex, i)));
    }
    return found;
}

static void add_late(late *of, const tu_vertex *vertex) {
    of->acts = of->acts || acts(vertex);
    for (int i = 0; i < vertex->operand_count; i++)
        if (vertex->operands[i].value != NULL)
            (tu_vertex_writes(vertex, i) ? of->writes : of->reads)[vertex->operands[i].value->storage] = true;
    for (int i = 0; i < vertex->result_count; i++)
        vertex->results[i]->mark = 1;
}

/* Puts a wait, and all that has to stay behind it, to the end. */
static void put_late(tt_graph *graph, tu_vertex *wait, const tu_vertex *start, late *of) {
    memset(of->reads, 0, (size_t)graph->storage_count * sizeof *of->reads);
    memset(of->writes, 0, (size_t)graph->storage_count * sizeof *of->writes);
    of->acts = false;
    for (tu_value *value = graph->values; value != NULL; value = value->next)
        value->mark = 0;
    for (int i = 0; i < start->operand_count; i++) /* which the collective reads until then */
        if (start->operands[i].value != NULL)
            of->reads[start->operands[i].value->storage] = true;
    tu_vertex *last = graph->last, *next;
    for (tu_vertex *vertex = wait; vertex != NULL; vertex = next) {
        next = vertex != last ? vertex->next : NULL;
        if (vertex != wait && !is_late(of, vertex))
            continue;
        add_late(of, vertex);
        tu_vertex_move(graph, vertex, NULL);
    }
}

static tu_vertex *behind_starts(const tt_graph *graph) {
    tu_vertex *vertex = graph->last;
    while (vertex != NULL && !tu_vertex_communicates(vertex))
        vertex = vertex->before;
    return vertex != NULL ? vertex->next : NULL;
}

/* Behind the last start only: before it memory that is in flight would be held for longer. */
tutti_status tu_pass_late(tt_graph *graph, size_t bytes) {
    (void)bytes;
    size_t count = 0, room = (size_t)graph->vertex_count + 1, storages = (size_t)graph->storage_count + 1;
    tu_vertex **waits = malloc(room * sizeof(tu_vertex *));
    const tu_vertex **starts = malloc(room * sizeof(tu_vertex *));
    late of = { malloc(storages * sizeof(bool)), malloc(storages * sizeof(bool)), false };
    bool made = waits != NULL && starts != NULL && of.reads != NULL && of.writes != NULL;
    tu_graph_number(graph);
    for (tu_vertex *vertex = made ? behind_starts(graph) : NULL; vertex != NULL; vertex = vertex->next) {
        const tu_vertex *start = is_wait(vertex) ? start_of(vertex) : NULL;
        size_t place = count;
        if (start == NULL)
            continue;
        for (; place > 0 && starts[place - 1]->position > start->position; place--) {
            starts[place] = starts[place - 1];
            waits[place] = waits[place - 1];
        }
        starts[place] = start;
        waits[place] = vertex;
        count++;
    }
    for (size_t i = 0; made && i < count; i++)
        put_late(graph, waits[i], starts[i], &of);
    free(waits);
    free(starts);
    free(of.reads);
    free(of.writes);
    return made ? TUTTI_OK : tu_error_memory("a pass", room * sizeof *waits);
}

/* ---- starts up ---- */

/* Not above another collective, nor what makes or writes its input, nor what touches what it writes. */
static bool holds_down(const tu_vertex *vertex, const tu_vertex *start) {
    if (tu_vertex_communicates(vertex) || uses_result_of(start, vertex))
        return true;
    for (int i = 0; i < start->operand_count; i++)
        if (start->operands[i].value != NULL &&
            touches(vertex, start->operands[i].value->storage, !tu_vertex_writes(start, i)))
            return true;
    return false;
}

static size_t bytes_of(const tu_shape *shape) {
    return (size_t)tu_shape_numel(shape) * tu_dtype_bytes[shape->dtype];
}

static size_t result_bytes(const tu_vertex *vertex) {
    size_t bytes = 0;
    for (int i = 0; i < vertex->result_count; i++)
        bytes += bytes_of(&vertex->results[i]->shape);
    return bytes;
}

/* A gather that starts early holds its memory longer: starts rise only while that is below `bytes`, all together. */
tutti_status tu_pass_raise(tt_graph *graph, size_t bytes) {
    size_t raised = 0;
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL; vertex = next) {
        next = vertex->next;
        if (!is_start(vertex) || raised + result_bytes(vertex) > bytes)
            continue;
        tu_vertex *place = vertex;
        while (place->before != NULL && !holds_down(place->before, vertex))
            place = place->before;
        if (place == vertex)
            continue;
        raised += result_bytes(vertex);
        tu_vertex_move(graph, vertex, place);
    }
    return TUTTI_OK;
}

/* ---- neighbours into one ---- */

/* Collectives that have a form on lists. */
static const struct {
    const tu_operator *one, *list;
    bool in_place;
} forms[] = {
    { &tu_operator_all_reduce, &tu_operator_all_reduce_coalesced, false },
    { &tu_operator_all_reduce, &tu_operator_all_reduce_coalesced, true },
    { &tu_operator_all_gather, &tu_operator_all_gather_coalesced_dims, false },
    { &tu_operator_reduce_scatter, &tu_operator_reduce_scatter_coalesced, false },
};

static int form_of(const tu_vertex *vertex) {
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (forms[i].one == vertex->entry && forms[i].in_place == vertex->in_place &&
            vertex->operands[0].value != NULL) /* not of a number */
            return (int)i;
    return -1;
}

static bool same_kind(const tu_vertex *left, const tu_vertex *right) {
    return form_of(left) == form_of(right) && tu_vertex_group(left) == tu_vertex_group(right) &&
           tu_vertex_reduction(left) == tu_vertex_reduction(right) &&
           left->operands[0].value->shape.dtype == right->operands[0].value->shape.dtype;
}

/* Collects starts into `members`, from `first` on: each is moved down to the last one, so nothing between may look at
 * what an earlier one makes or write what it reads. Another kind of collective ends the bucket. Returns how many. */
static int collect(tu_vertex *first, size_t limit, tu_vertex **members) {
    int count = 0;
    size_t bytes = 0;
    for (tu_vertex *vertex = first; vertex != NULL; vertex = vertex->next) {
        for (int i = 0; i < count; i++) {
            const tu_value *input = members[i]->operands[0].value;
            if (vertex != members[i] && (uses_result_of(vertex, members[i]) ||
                                         touches(vertex, input->storage, !tu_vertex_writes(members[i], 0))))
                return count;
        }
        if (!is_start(vertex))
            continue;
        size_t more = bytes_of(&vertex->operands[0].value->shape) + result_bytes(vertex);
        if (!same_kind(first, vertex) || bytes + more > limit)
            return count;
        bytes += more;
        members[count++] = vertex;
    }
    return count;
}

/* The attributes of the form on lists; the vertex copies them. */
static tu_vertex *new_list(tt_graph *graph, tu_vertex *const *members, int count) {
    const tu_vertex *last = members[count - 1];
    int form = form_of(last);
    const tu_operator *list = forms[form].list;
    tu_vertex *place = last->next;
    if (list == &tu_operator_all_reduce_coalesced) {
        tu_all_reduce_coalesced_attributes attributes = { .reduction = tu_vertex_reduction(last),
                                                          .group = tu_vertex_group(last) };
        return tu_graph_vertex(graph, list, count, forms[form].in_place ? 0 : count, &attributes, place);
    }
    int64_t *dims = malloc((size_t)count * sizeof *dims);
    for (int i = 0; dims != NULL && i < count; i++)
        dims[i] = tu_vertex_dim(members[i]);
    tu_ints along = { (size_t)count, dims };
    tu_all_gather_coalesced_dims_attributes gather = { .dims = along, .group = tu_vertex_group(last) };
    tu_reduce_scatter_coalesced_attributes scatter = { .reduction = tu_vertex_reduction(last),
                                                       .dims = along,
                                                       .group = tu_vertex_group(last) };
    const void *attributes = list == &tu_operator_all_gather_coalesced_dims ? (const void *)&gather : &scatter;
    tu_vertex *made = dims != NULL ? tu_graph_vertex(graph, list, count, count, attributes, place) : NULL;
    free(dims);
    return made;
}

static tutti_status merge(tt_graph *graph, tu_vertex **members, int count) {
    tu_vertex *made = new_list(graph, members, count);
    if (made == NULL)
        return tu_error_memory("a pass", sizeof *made);
    made->in_place = members[0]->in_place;
    for (int i = 0; i < count; i++) {
        made->operands[i] = members[i]->operands[0];
        if (made->in_place)
            continue;
        made->results[i] = members[i]->results[0]; /* the very values, so that nothing else changes */
        made->results[i]->maker = made;
        made->results[i]->place = i;
        members[i]->result_count = 0;
    }
    for (int i = 0; i < count; i++)
        tu_vertex_erase(graph, members[i]);
    return TUTTI_OK;
}

/* One operation moves `bytes` at most. */
tutti_status tu_pass_bucket(tt_graph *graph, size_t bytes) {
    tu_vertex **members = malloc(((size_t)graph->vertex_count + 1) * sizeof(tu_vertex *));
    if (members == NULL)
        return tu_error_memory("a pass", (size_t)graph->vertex_count * sizeof *members);
    tutti_status status = TUTTI_OK;
    for (tu_vertex *vertex = graph->first, *next; vertex != NULL && status == TUTTI_OK; vertex = next) {
        next = vertex->next;
        int count = is_start(vertex) && form_of(vertex) >= 0 ? collect(vertex, bytes, members) : 0;
        if (count < 2)
            continue;
        while (next != NULL && next != members[count - 1]) /* go on behind the last member */
            next = next->next;
        next = next != NULL ? next->next : NULL;
        status = merge(graph, members, count);
    }
    free(members);
    return status;
}
