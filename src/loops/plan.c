/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan of a program's memory.
 */
#include "loops/plan.h"

#include <stdlib.h>
#include <string.h>

#include "tensor/operators.h"

#define ALIGNMENT 64

/* ---- lives ---- */

typedef struct planning {
    const tt_graph *graph;
    const tu_step_of_program *steps;
    int step_count;
    tu_plan *plan;
} planning;

/* Optimizer steps change what they are given, and keep nothing of it. */
static bool keeps_nothing(const tu_operator *entry) {
    unsigned special = TU_IMPURE | TU_STARTS | TU_BRINGS | TU_EACH_INPUT | TU_APART | TU_ANY_DEVICE;
    return !(entry->flags & special) || entry == &tu_operator_adamw_step || entry == &tu_operator_sgd_step;
}

static void live_at(tu_planned *own, int step) {
    if (own->first < 0 || step < own->first)
        own->first = step;
    if (step > own->last)
        own->last = step;
}

static void see_vertex(const planning *now, const tu_vertex *vertex, int step, bool called) {
    tu_planned *storages = now->plan->storages;
    bool keeps = called && !keeps_nothing(vertex->entry);
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (value == NULL)
            continue;
        live_at(&storages[value->storage], step);
        if (keeps)
            storages[value->storage].here = false;
    }
    for (int i = 0; i < vertex->result_count; i++) {
        const tu_value *value = vertex->results[i];
        tu_planned *own = &storages[value->storage];
        bool new = own->value == NULL;
        live_at(own, step);
        if (new) {
            own->value = value;
            own->bytes = tu_shape_bytes(&value->shape);
            own->here =
                own->here && own->bytes > 0 && value->shape.device == TUTTI_CPU && !(vertex->entry->flags & TU_VIEW);
        }
        if (keeps)
            own->here = false;
    }
}

/* What a nest makes only for itself is never in memory. */
static void see_nest(const planning *now, const tu_nest *nest, int step) {
    tu_planned *storages = now->plan->storages;
    for (int i = 0; i < nest->member_count; i++)
        see_vertex(now, nest->members[i], step, false);
    for (int i = 0; i < nest->member_count; i++)
        for (int k = 0; k < nest->members[i]->result_count; k++) {
            const tu_value *value = nest->members[i]->results[k];
            bool stored = false;
            for (int j = 0; j < nest->tensor_count && !stored; j++)
                stored = nest->tensors[j].fresh && nest->tensors[j].value == value;
            storages[value->storage].here = storages[value->storage].here && stored;
        }
}

static void set_lives(const planning *now) {
    const tt_graph *graph = now->graph;
    tu_planned *storages = now->plan->storages;
    for (int i = 0; i < now->plan->storage_count; i++)
        storages[i] = (tu_planned){ .here = true, .first = -1, .last = -1, .over = -1 };
    for (int i = 0; i < graph->input_count; i++) {
        storages[graph->inputs[i].value->storage].here = false;
        storages[graph->inputs[i].value->storage].value = graph->inputs[i].value;
    }
    for (int i = 0; i < now->step_count; i++) {
        if (now->steps[i].vertex != NULL)
            see_vertex(now, now->steps[i].vertex, i, true);
        if (now->steps[i].nest != NULL)
            see_nest(now, now->steps[i].nest, i);
    }
    for (int i = 0; i < graph->output_count; i++)
        if (graph->outputs[i].value != NULL)
            storages[graph->outputs[i].value->storage].here = false;
    for (int i = 0; i < graph->effect_count; i++)
        if (graph->effects[i].value != NULL)
            storages[graph->effects[i].value->storage].here = false;
    for (int i = 0; i < now->plan->storage_count; i++)
        storages[i].here = storages[i].here && storages[i].value != NULL && storages[i].first >= 0;
}

/* ---- results over inputs ---- */

static bool action_reads(const tu_nest *nest, int action, int slot) {
    const tu_action *own = &nest->actions[action];
    for (int line = own->line; line < own->end; line++)
        for (int i = 0; i < nest->lines[line].in_count; i++)
            if (nest->lines[line].in[i] == slot)
                return true;
    return false;
}

static bool action_writes(const tu_nest *nest, int action, int slot) {
    const tu_action *own = &nest->actions[action];
    for (int line = own->line; line < own->end; line++)
        if (nest->lines[line].out == slot)
            return true;
    return false;
}

/* Whether each element of the input is read before the result's is written: in earlier actions, or in the same one
 * where that goes element by element. */
static bool is_read_before(const tu_nest *nest, int input, int result) {
    int last = -1, writer = -1;
    for (int i = 0; i < nest->action_count; i++) {
        if (action_reads(nest, i, input))
            last = i;
        if (action_writes(nest, i, result))
            writer = i;
    }
    if (last < writer)
        return true;
    const tu_action *own = &nest->actions[writer];
    return last == writer && (own->stage >= 0 || nest->lines[own->line].kind == TU_LINE_POINTWISE);
}

static bool same_layout(const tu_nest_tensor *left, const tu_nest_tensor *right, int outer_ndim) {
    return left->narrow == right->narrow && left->row == right->row && left->column == right->column &&
           memcmp(left->outer, right->outer, (size_t)outer_ndim * sizeof left->outer[0]) == 0 &&
           tu_dtype_bytes[left->value->shape.dtype] == tu_dtype_bytes[right->value->shape.dtype];
}

/* Whether the product of the step reads the storage, to its end. */
static bool is_factor(const tu_vertex *product, int storage) {
    for (int i = 0; product != NULL && i < product->operand_count; i++)
        if (product->operands[i].value != NULL && product->operands[i].value->storage == storage)
            return true;
    return false;
}

static bool can_take_over(const planning *now, const tu_nest *nest, int step, int input, int result) {
    const tu_nest_tensor *from = &nest->tensors[input], *to = &nest->tensors[result];
    const tu_planned *old = &now->plan->storages[from->value->storage], *new = &now->plan->storages[to->value->storage];
    if (from->written || !old->here || !new->here || old->last != step || old->bytes != new->bytes || new->over >= 0 ||
        old == new || !same_layout(from, to, nest->outer_ndim) ||
        is_factor(now->steps[step].vertex, from->value->storage) ||
        tu_shape_bytes(&from->value->shape) != old->bytes) /* all of it, from its beginning */
        return false;
    for (int i = 0; i < nest->tensor_count; i++) {
        if (i != input && nest->tensors[i].value->storage == from->value->storage)
            return false; /* it is also read otherwise */
        if (nest->tensors[i].fresh && now->plan->storages[nest->tensors[i].value->storage].over == from->value->storage)
            return false; /* another result has it */
    }
    return is_read_before(nest, from->slot, to->slot);
}

static void take_over_one(const planning *now, int step, int result, const tu_value *only) {
    const tu_nest *nest = now->steps[step].nest;
    for (int input = 0; nest->tensors[result].fresh && input < nest->tensor_count; input++)
        if ((only == NULL || nest->tensors[input].value == only) && can_take_over(now, nest, step, input, result)) {
            now->plan->storages[nest->tensors[result].value->storage].over = nest->tensors[input].value->storage;
            return;
        }
}

/* What is made from a product goes over that where it can: it is in the cache. */
static void take_over(const planning *now) {
    for (int step = 0; step < now->step_count; step++) {
        const tu_nest *nest = now->steps[step].nest;
        const tu_vertex *product = now->steps[step].vertex;
        for (int result = 0; nest != NULL && product != NULL && result < nest->tensor_count; result++)
            take_over_one(now, step, result, product->results[0]);
        for (int result = 0; nest != NULL && result < nest->tensor_count; result++)
            take_over_one(now, step, result, NULL);
    }
}

/* ---- places ---- */

/* The first storage of a row of take-overs, and how long the last one lives. */
static int root_of(const tu_plan *plan, int storage) {
    while (plan->storages[storage].over >= 0)
        storage = plan->storages[storage].over;
    return storage;
}

typedef struct place {
    int storage, first, last;
    size_t bytes, at;
} place;

static int by_bytes(const void *left, const void *right) {
    const place *one = left, *other = right;
    return one->bytes != other->bytes ? (one->bytes < other->bytes ? 1 : -1) : one->storage - other->storage;
}

static int by_address(const void *left, const void *right) {
    const place *one = *(const place *const *)left, *other = *(const place *const *)right;
    return one->at < other->at ? -1 : one->at > other->at;
}

/* The lowest gap among those that are alive at the same time. */
static size_t find_gap(const place *own, place *const *busy, int busy_count) {
    size_t at = 0;
    for (int i = 0; i < busy_count; i++) {
        if (busy[i]->at >= at + own->bytes)
            break;
        if (busy[i]->at + busy[i]->bytes > at)
            at = busy[i]->at + busy[i]->bytes;
    }
    return at;
}

static tutti_status set_places(tu_plan *plan) {
    size_t room = (size_t)plan->storage_count + 1;
    place *places = calloc(room, sizeof *places), **busy = calloc(room, sizeof *busy);
    int count = 0, *place_of = calloc(room, sizeof *place_of);
    if (places == NULL || busy == NULL || place_of == NULL) {
        free(places);
        free(busy);
        free(place_of);
        return tu_error_memory("a plan of memory", room * sizeof *places);
    }
    for (int i = 0; i < plan->storage_count; i++) {
        const tu_planned *own = &plan->storages[i];
        if (!own->here || own->over >= 0)
            continue;
        place_of[i] = count;
        places[count++] = (place){ i, own->first, own->last, (own->bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, 0 };
    }
    for (int i = 0; i < plan->storage_count; i++) {
        place *own = plan->storages[i].here ? &places[place_of[root_of(plan, i)]] : NULL;
        if (own != NULL && plan->storages[i].last > own->last)
            own->last = plan->storages[i].last;
    }
    qsort(places, (size_t)count, sizeof *places, by_bytes);
    for (int i = 0; i < count; i++) {
        int busy_count = 0;
        for (int k = 0; k < i; k++)
            if (places[k].first <= places[i].last && places[i].first <= places[k].last)
                busy[busy_count++] = &places[k];
        qsort(busy, (size_t)busy_count, sizeof *busy, by_address);
        places[i].at = find_gap(&places[i], busy, busy_count);
        plan->storages[places[i].storage].at = places[i].at;
        if (places[i].at + places[i].bytes > plan->bytes)
            plan->bytes = places[i].at + places[i].bytes;
    }
    for (int i = 0; i < plan->storage_count; i++)
        if (plan->storages[i].here)
            plan->storages[i].at = plan->storages[root_of(plan, i)].at;
    free(places);
    free(busy);
    free(place_of);
    return TUTTI_OK;
}

static void count_bytes(tu_plan *plan, int step_count) {
    for (int step = 0; step < step_count; step++) {
        size_t live = 0;
        for (int i = 0; i < plan->storage_count; i++)
            if (plan->storages[i].here && plan->storages[i].first <= step && step <= plan->storages[i].last)
                live += plan->storages[i].bytes;
        plan->live = live > plan->live ? live : plan->live;
    }
    for (int i = 0; i < plan->storage_count; i++)
        plan->total += plan->storages[i].here ? plan->storages[i].bytes : 0;
}

tutti_status tu_plan_make(const tt_graph *graph, const tu_step_of_program *steps, int step_count, tu_plan *plan) {
    *plan = (tu_plan){ .storage_count = graph->storage_count };
    plan->storages = calloc((size_t)graph->storage_count + 1, sizeof *plan->storages);
    if (plan->storages == NULL)
        return tu_error_memory("a plan of memory", (size_t)graph->storage_count * sizeof *plan->storages);
    planning now = { graph, steps, step_count, plan };
    set_lives(&now);
    take_over(&now);
    tutti_status status = set_places(plan);
    if (status == TUTTI_OK)
        count_bytes(plan, step_count);
    return status;
}

void tu_plan_free(tu_plan *plan) {
    free(plan->storages);
    plan->storages = NULL;
}

void tu_plan_print(FILE *to, const tu_plan *plan) {
    fprintf(to, "arena of %zu bytes; at most %zu are alive at once, of %zu in all\n", plan->bytes, plan->live,
            plan->total);
    for (int i = 0; i < plan->storage_count; i++) {
        const tu_planned *own = &plan->storages[i];
        if (!own->here)
            continue;
        fprintf(to, "%10zu + %-10zu steps %d to %d: %s", own->at, own->bytes, own->first, own->last, own->value->name);
        if (own->over >= 0)
            fprintf(to, " over %s", plan->storages[own->over].value->name);
        fprintf(to, "\n");
    }
}
