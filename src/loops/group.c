/* SPDX-License-Identifier: Apache-2.0
 *
 * Which vertices become one loop. Vertices are looked at in program order, and groups stay open as long as their
 * members could all run later, at the place of the next one: until another vertex uses what they make, or writes what
 * they read. A vertex joins the open groups of its shape that it has data in common with; a group that it can neither
 * join nor pass is closed. So a group runs where its last member stands, and nothing overtakes what it depends on.
 */
#include "loops/group.h"

#include <stdlib.h>
#include <string.h>

#include "loops/target.h"
#include "tensor/operators.h"
#include "tensor/pointwise.h"

typedef enum kind {
    CALLED, /* as an operator */
    POINTWISE,
    COPY,
    FOLD
} kind;

typedef struct group {
    struct group *next;
    bool open;
    int ndim, split;
    bool is_long; /* see tu_nest */
    int64_t sizes[TT_MAX_DIMS], count;
    int member_count, last; /* indices of vertices */
    int members[TU_NEST_MEMBERS];
    int read_count, made_count, written_count;
    const tu_value *read[TU_NEST_TENSORS], *written[TU_NEST_TENSORS]; /* values from outside */
    const tu_value *made[TU_NEST_MEMBERS];
} group;

typedef struct grouping {
    const tu_vertex **vertices;
    group **of; /* the group of each vertex, or NULL */
    group *groups;
    int vertex_count;
    bool fuse;
    tutti_status status;
} grouping;

/* ---- what a vertex is ---- */

/* Elements that a loop may have, all of them on one device that loops are written for: *device, -1 until it is known.
 */
static bool can_walk(const tu_value *value, int *device) {
    if (value == NULL)
        return true;
    bool good = (*device < 0 || *device == (int)value->shape.device) && tu_target_number(value->shape.device) >= 0 &&
                !tu_is_complex(value->shape.dtype) && tu_shape_numel(&value->shape) > 0;
    *device = (int)value->shape.device;
    return good;
}

static bool same_layout(const tu_shape *left, const tu_shape *right) {
    for (int i = 0; i < left->ndim; i++)
        if (left->sizes[i] != right->sizes[i] || (left->sizes[i] != 1 && left->strides[i] != right->strides[i]))
            return false;
    return left->ndim == right->ndim;
}

/* Dense rows in their order, however far apart: all of a tensor, or a part of one. */
static bool has_rows_in_order(const tu_shape *shape) {
    int64_t inner = 1;
    for (int i = shape->ndim - 1; i >= 0; i--) {
        if (shape->sizes[i] == 1)
            continue;
        if (i == shape->ndim - 1 ? shape->strides[i] != 1 : shape->strides[i] < inner)
            return false;
        inner = shape->strides[i];
    }
    return true;
}

static bool same_sizes(const tu_shape *left, const tu_shape *right) {
    return left->ndim == right->ndim &&
           memcmp(left->sizes, right->sizes, (size_t)left->ndim * sizeof *left->sizes) == 0;
}

/* Elements of its own in each place. */
static bool is_expanded(const tu_shape *shape) {
    for (int i = 0; i < shape->ndim; i++)
        if (shape->strides[i] == 0 && shape->sizes[i] > 1)
            return true;
    return false;
}

/* A copy is worth a line of a loop where it does not turn dimensions: that the operator does better, in squares. */
static bool is_plain_copy(const tu_vertex *vertex) {
    const tu_value *from = vertex->operands[vertex->in_place ? 1 : 0].value;
    const tu_value *to = vertex->in_place ? vertex->operands[0].value : vertex->results[0];
    return from == NULL || same_layout(&from->shape, &to->shape) ||
           (same_sizes(&from->shape, &to->shape) && has_rows_in_order(&from->shape) && has_rows_in_order(&to->shape));
}

static kind kind_of(const tu_vertex *vertex) {
    int split, fold, device = -1;
    bool mean, good = vertex->operand_count > 0 && vertex->operand_count < TU_OPERANDS;
    for (int i = 0; i < vertex->operand_count && good; i++)
        good = can_walk(vertex->operands[i].value, &device) &&
               (vertex->operands[i].value != NULL || vertex->operands[i].number != 0);
    for (int i = 0; i < vertex->result_count && good; i++)
        good = can_walk(vertex->results[i], &device);
    if (!good || (vertex->in_place ? vertex->operands[0].value == NULL : vertex->result_count != 1))
        return CALLED;
    for (int i = 1; i < vertex->operand_count && vertex->in_place; i++) { /* what is written is read as itself alone */
        const tu_value *value = vertex->operands[i].value, *written = vertex->operands[0].value;
        if (value != NULL && value != written && value->storage == written->storage)
            return CALLED;
    }
    if (vertex->in_place && is_expanded(&vertex->operands[0].value->shape))
        return CALLED;
    if (vertex->entry->kernels[TU_ON_CPU] == tu_pointwise_cpu)
        return POINTWISE;
    if (tu_nest_copies(vertex) && is_plain_copy(vertex))
        return COPY;
    return !vertex->in_place && tu_nest_fold(vertex, &split, &fold, &mean) && split >= 0 ? FOLD : CALLED;
}

bool tu_is_pointwise_step(const tu_vertex *vertex) {
    return kind_of(vertex) == POINTWISE;
}

static const tu_shape *result_of(const tu_vertex *vertex) {
    return vertex->in_place ? &vertex->operands[0].value->shape : &vertex->results[0]->shape;
}

/* ---- groups ---- */

static bool has(const tu_value *const *list, int count, const tu_value *value) {
    for (int i = 0; i < count; i++)
        if (list[i] == value)
            return true;
    return false;
}

static bool has_storage(const tu_value *const *list, int count, int storage, const tu_value *except) {
    for (int i = 0; i < count; i++)
        if (list[i] != except && list[i]->storage == storage)
            return true;
    return false;
}

/* Whether the vertex cannot run before the group: it needs what the group makes or writes, or writes what it reads. */
static bool conflicts(const group *own, const tu_vertex *vertex) {
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value == NULL)
            continue;
        if (has_storage(own->made, own->made_count, value->storage, NULL) ||
            has_storage(own->written, own->written_count, value->storage, NULL))
            return true;
        if (tu_vertex_writes(vertex, i) && has_storage(own->read, own->read_count, value->storage, NULL))
            return true;
    }
    return false;
}

static bool is_wide(const group *own, const tu_shape *shape) {
    return shape->ndim == own->ndim && memcmp(shape->sizes, own->sizes, (size_t)own->ndim * sizeof *own->sizes) == 0;
}

/* One element per row, with the reduced dimensions kept. */
static bool is_narrow(const group *own, const tu_shape *shape) {
    if (own->split < 0 || own->is_long || shape->ndim != own->ndim)
        return false;
    for (int i = 0; i < own->ndim; i++)
        if (shape->sizes[i] != (i < own->split ? own->sizes[i] : 1))
            return false;
    return true;
}

/* Whether a reduction takes the rows of the group. */
static bool fits_rows(const group *own, const tu_vertex *vertex) {
    int split, fold;
    bool mean;
    if (!tu_nest_fold(vertex, &split, &fold, &mean) || split < 0 || (own->split >= 0 && own->split != split))
        return false;
    int64_t columns = 1;
    for (int i = split; i < own->ndim; i++)
        columns *= own->sizes[i];
    if (columns < 2)
        return false;
    for (int i = 0; i < own->read_count; i++)
        if (!tu_nest_row_is_even(&own->read[i]->shape, own->ndim, own->sizes, split))
            return false;
    for (int i = 0; i < own->made_count; i++)
        if (!tu_nest_row_is_even(&own->made[i]->shape, own->ndim, own->sizes, split))
            return false;
    for (int i = 0; i < own->written_count; i++)
        if (!tu_nest_row_is_even(&own->written[i]->shape, own->ndim, own->sizes, split))
            return false;
    return true;
}

static bool operand_fits(const group *own, const tu_vertex *vertex, int operand, bool wide) {
    const tu_value *value = vertex->operands[operand].value;
    if (value == NULL)
        return true;
    if (has(own->made, own->made_count, value))
        return is_wide(own, &value->shape) ? wide : is_narrow(own, &value->shape);
    if (has_storage(own->made, own->made_count, value->storage, NULL) ||
        has_storage(own->written, own->written_count, value->storage, value))
        return false;
    if (tu_vertex_writes(vertex, operand) &&
        (has_storage(own->read, own->read_count, value->storage, value) || !is_wide(own, &value->shape)))
        return false;
    return own->split < 0 || !wide || tu_nest_row_is_even(&value->shape, own->ndim, own->sizes, own->split);
}

static bool fits(const group *own, const tu_vertex *vertex, kind what) {
    if (own->member_count == TU_NEST_MEMBERS)
        return false;
    int more = vertex->operand_count + 1;
    if (own->read_count + own->written_count + more >= TU_NEST_TENSORS - 4)
        return false;
    if (what == FOLD)
        return is_wide(own, &vertex->operands[0].value->shape) && fits_rows(own, vertex) &&
               operand_fits(own, vertex, 0, true);
    bool wide = is_wide(own, result_of(vertex));
    if (!wide && !is_narrow(own, result_of(vertex)))
        return false;
    for (int i = 0; i < vertex->operand_count; i++)
        if (!operand_fits(own, vertex, i, wide))
            return false;
    return own->split < 0 || !wide || tu_nest_row_is_even(result_of(vertex), own->ndim, own->sizes, own->split);
}

/* Whether they have data in common that is worth being read once. */
static bool is_related(const group *own, const tu_vertex *vertex) {
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value != NULL && (has(own->made, own->made_count, value) || has(own->written, own->written_count, value) ||
                              (has(own->read, own->read_count, value) && is_wide(own, &value->shape))))
            return true;
    }
    return false;
}

static void note(const tu_value **list, int *count, const tu_value *value) {
    if (!has(list, *count, value))
        list[(*count)++] = value;
}

static void set_split(group *own, int split) {
    int64_t columns = 1;
    own->split = split;
    for (int i = split; i < own->ndim; i++)
        columns *= own->sizes[i];
    own->is_long = tu_nest_is_long(columns, own->count);
}

static void add_member(grouping *now, group *own, int index) {
    const tu_vertex *vertex = now->vertices[index];
    int split, fold;
    bool mean;
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value == NULL || has(own->made, own->made_count, value))
            continue;
        note(own->read, &own->read_count, value);
        if (tu_vertex_writes(vertex, i))
            note(own->written, &own->written_count, value);
    }
    if (!vertex->in_place)
        note(own->made, &own->made_count, vertex->results[0]);
    if (tu_nest_fold(vertex, &split, &fold, &mean))
        set_split(own, split);
    own->members[own->member_count++] = index;
    own->last = index;
    now->of[index] = own;
}

/* Two open groups become one, with members in program order. */
static bool can_merge(const group *left, const group *right) {
    return left->member_count + right->member_count < TU_NEST_MEMBERS && left->ndim == right->ndim &&
           memcmp(left->sizes, right->sizes, (size_t)left->ndim * sizeof *left->sizes) == 0 &&
           left->split == right->split &&
           left->read_count + right->read_count + left->written_count + right->written_count < TU_NEST_TENSORS - 8;
}

static void merge(grouping *now, group *into, group *from) {
    int members[TU_NEST_MEMBERS], count = 0, left = 0, right = 0, left_count = into->member_count;
    memcpy(members, into->members, sizeof members);
    group old = *into;
    into->member_count = into->read_count = into->made_count = into->written_count = 0;
    while (left < left_count || right < from->member_count) {
        bool take_left = right == from->member_count || (left < left_count && members[left] < from->members[right]);
        add_member(now, into, take_left ? members[left++] : from->members[right++]);
        count++;
    }
    into->split = old.split;
    from->member_count = 0;
    from->open = false;
}

static group *new_group(grouping *now, const tu_vertex *vertex, kind what) {
    group *made = calloc(1, sizeof *made);
    if (made == NULL) {
        now->status = tu_error_memory("a group of operators", sizeof *made);
        return NULL;
    }
    const tu_shape *space = what == FOLD ? &vertex->operands[0].value->shape : result_of(vertex);
    made->ndim = space->ndim;
    made->split = -1;
    memcpy(made->sizes, space->sizes, sizeof made->sizes);
    made->count = tu_shape_numel(space);
    made->open = true;
    if (!fits(made, vertex, what)) {
        free(made);
        return NULL;
    }
    made->next = now->groups;
    now->groups = made;
    return made;
}

static void place(grouping *now, int index) {
    const tu_vertex *vertex = now->vertices[index];
    kind what = kind_of(vertex);
    group *own = NULL;
    for (group *each = now->groups; each != NULL && what != CALLED && now->fuse; each = each->next) {
        if (!each->open || !is_related(each, vertex) || !fits(each, vertex, what))
            continue;
        if (own == NULL)
            own = each;
        else if (can_merge(own, each))
            merge(now, own, each);
    }
    for (group *each = now->groups; each != NULL; each = each->next)
        if (each != own && each->open && (!now->fuse || conflicts(each, vertex)))
            each->open = false;
    if (what != CALLED && own == NULL)
        own = new_group(now, vertex, what);
    if (own != NULL)
        add_member(now, own, index);
}

/* ---- steps ---- */

int *tu_uses_of(const tt_graph *graph) {
    int *uses = calloc((size_t)graph->value_count + 1, sizeof *uses);
    if (uses == NULL) {
        (void)tu_error_memory("a program", (size_t)graph->value_count * sizeof *uses);
        return NULL;
    }
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next)
        for (int i = 0; i < vertex->operand_count; i++)
            if (vertex->operands[i].value != NULL)
                uses[vertex->operands[i].value->number]++;
    for (int i = 0; i < graph->output_count; i++)
        if (graph->outputs[i].value != NULL)
            uses[graph->outputs[i].value->number]++;
    for (int i = 0; i < graph->effect_count; i++)
        if (graph->effects[i].value != NULL)
            uses[graph->effects[i].value->number]++;
    return uses;
}

/* The nest of a group, or none where its members are better called: one operator alone is a loop already. */
static tutti_status lower(grouping *now, group *own, const int *uses, tu_nest **nest) {
    const tu_vertex *members[TU_NEST_MEMBERS];
    *nest = NULL;
    if (own->member_count < 2 && now->fuse)
        return TUTTI_OK;
    for (int i = 0; i < own->member_count; i++)
        members[i] = now->vertices[own->members[i]];
    return tu_nest_make(members, own->member_count, own->ndim, own->sizes, own->split, false, uses, nest);
}

static tutti_status collect(grouping *now, const int *uses, tu_step_of_program *steps, int *step_count) {
    tutti_status status = TUTTI_OK;
    tu_nest **nests = calloc((size_t)now->vertex_count + 1, sizeof *nests); /* by the index of the last member */
    if (nests == NULL)
        return tu_error_memory("a program", (size_t)now->vertex_count * sizeof *nests);
    for (group *each = now->groups; each != NULL && status == TUTTI_OK; each = each->next) {
        if (each->member_count == 0)
            continue;
        status = lower(now, each, uses, &nests[each->last]);
        for (int i = 0; nests[each->last] == NULL && i < each->member_count; i++)
            now->of[each->members[i]] = NULL; /* called */
    }
    int count = 0;
    for (int i = 0; i < now->vertex_count; i++) {
        if (nests[i] != NULL) {
            nests[i]->number = count;
            steps[count++] = (tu_step_of_program){ .nest = nests[i] };
        } else if (now->of[i] == NULL) {
            steps[count++] = (tu_step_of_program){ .vertex = now->vertices[i] };
        }
    }
    *step_count = count;
    free(nests);
    return status;
}

tutti_status tu_steps_make(const tt_graph *graph, bool fuse, tu_step_of_program **steps, int *step_count) {
    size_t count = (size_t)graph->vertex_count + 1;
    grouping now = { .fuse = fuse };
    now.vertices = calloc(count, sizeof *now.vertices);
    now.of = calloc(count, sizeof *now.of);
    *steps = calloc(count, sizeof **steps);
    *step_count = 0;
    int *uses = tu_uses_of(graph);
    if (now.vertices == NULL || now.of == NULL || *steps == NULL || uses == NULL)
        now.status = tu_error_memory("a program", count * sizeof **steps);
    for (const tu_vertex *vertex = graph->first; vertex != NULL && now.status == TUTTI_OK; vertex = vertex->next)
        now.vertices[now.vertex_count++] = vertex;
    for (int i = 0; i < now.vertex_count && now.status == TUTTI_OK; i++)
        place(&now, i);
    if (now.status == TUTTI_OK)
        now.status = collect(&now, uses, *steps, step_count);
    if (now.status == TUTTI_OK && fuse)
        now.status = tu_steps_join_products(uses, *steps, step_count);
    for (group *each = now.groups, *next; each != NULL; each = next) {
        next = each->next;
        free(each);
    }
    free(now.vertices);
    free(now.of);
    free(uses);
    if (now.status != TUTTI_OK) {
        tu_steps_free(*steps, *step_count);
        *steps = NULL;
        *step_count = 0;
    }
    return now.status;
}

tutti_status tu_steps_call_members(tu_step_of_program **steps, int *step_count) {
    size_t count = 1;
    for (int i = 0; i < *step_count; i++)
        count += (*steps)[i].nest != NULL ? (size_t)(*steps)[i].nest->member_count + 1 : 1;
    tu_step_of_program *more = calloc(count, sizeof *more);
    if (more == NULL)
        return tu_error_memory("a program", count * sizeof *more);
    int made = 0;
    for (int i = 0; i < *step_count; i++) {
        tu_nest *nest = (*steps)[i].nest;
        if (nest == NULL || tu_target_of(nest)->runs_without_code || tu_target_of(nest)->has_code(nest)) {
            more[made++] = (*steps)[i];
            continue;
        }
        for (int k = 0; k < nest->member_count; k++)
            more[made++] = (tu_step_of_program){ .vertex = nest->members[k] };
        tu_nest_free(nest);
    }
    free(*steps);
    *steps = more;
    *step_count = made;
    return TUTTI_OK;
}

void tu_steps_free(tu_step_of_program *steps, int step_count) {
    for (int i = 0; i < step_count; i++)
        tu_nest_free(steps[i].nest);
    free(steps);
}
