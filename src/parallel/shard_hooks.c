/* SPDX-License-Identifier: Apache-2.0
 *
 * When things happen to units: around the forwards of their modules, before the first gradient enters them, when their
 * gradients are complete, and at the end of a backward.
 */
#include <stdlib.h>

#include "autograd/node.h"
#include "parallel/shard.h"

#define FORWARDS 64 /* whose backwards may be still to come, with the next one known */

/* Whether a checkpoint computes a part of the forward again. */
static bool in_backward(void) {
    return tu_self()->backward != NULL;
}

/* ---- what compiled functions depend on ---- */

static void keep_all(void *owner) {
    tt_fully_sharded *all = owner;
    atomic_fetch_add_explicit(&all->references, 1, memory_order_relaxed);
}

static uint64_t stamp_of(void *owner) {
    const tt_fully_sharded *all = owner;
    return (uint64_t)all->changes << 2 | (uint64_t)all->local << 1 | all->released;
}

static void drop_all(void *owner);

static void note_look(tt_fully_sharded *all) {
    tu_note_state(&(tu_witness){ all, stamp_of, keep_all, drop_all });
}

static tutti_status append(tu_shard_unit ***list, size_t *count, size_t *capacity, tu_shard_unit *unit) {
    if (*count == *capacity) {
        size_t more = *capacity > 0 ? 2 * *capacity : 16;
        tu_shard_unit **grown = realloc(*list, more * sizeof(tu_shard_unit *));
        if (grown == NULL)
            return tu_error_memory("the order of units", more * sizeof(tu_shard_unit *));
        *list = grown;
        *capacity = more;
    }
    (*list)[(*count)++] = unit;
    return TUTTI_OK;
}

/* ---- forward ---- */

/* The unit that came next in the last forward. The first one writes the order down; where it is another one now, or the
 * unit is called by itself, there is none. */
static tu_shard_unit *next_in_order(tu_shard_unit *unit) {
    tt_fully_sharded *all = unit->all;
    if (!all->inside)
        return NULL;
    if (!all->order_known)
        tu_pending_take(append(&all->order, &all->order_count, &all->order_capacity, unit));
    else if (all->next < all->order_count && all->order[all->next] == unit && ++all->next < all->order_count)
        return all->order[all->next];
    return NULL;
}

/* Begins to gather those that the program has told to come with this one, or the one that comes by itself. */
static void gather_ahead(const tu_shard_unit *unit, tt_shard_pass pass, tu_shard_unit *next) {
    const tu_shard_ahead *ahead = &unit->ahead[pass - TT_PASS_FORWARD];
    void (*begin)(tu_shard_unit *) = pass == TT_PASS_FORWARD ? tu_shard_gather : tu_shard_gather_back;
    for (size_t i = 0; i < ahead->count; i++)
        begin(ahead->units[i]);
    if (!ahead->told && next != NULL && !unit->all->options.no_prefetch)
        begin(next);
}

static void cast_all(size_t count, tt_tensor **tensors, tutti_dtype dtype) {
    for (size_t i = 0; dtype != 0 && i < count; i++)
        if (tensors[i] != NULL && tu_is_float(tt_dtype(tensors[i])) && tt_dtype(tensors[i]) != dtype)
            tensors[i] = tt_to(tensors[i], dtype);
}

/* The last backward failed on its way: what it left is dropped, since its end will not come. */
static void abandon_backward(tt_fully_sharded *all) {
    for (int i = 0; i < all->unit_count; i++) {
        tu_shard_unit *unit = &all->units[i];
        tu_shard_free(unit);
        if (unit->reduction != NULL && !unit->reduction->storage->fake)
            tt_wait(unit->reduction); /* nobody else may ever read it */
        tu_tensor_drop(unit->reduction);
        unit->reduction = NULL;
        unit->reduced = unit->comes_home = false;
        unit->arrivals = 0;
        for (int k = 0; k < unit->count; k++) {
            tt_set_grad(unit->members[k].whole, NULL);
            unit->members[k].arrived = false;
        }
    }
    all->ended_count = all->back = 0;
    all->callback = false;
}

/* What an earlier forward left whole, which no backward freed, may be older than the shards: it is not used again. */
static void begin_forward(tu_shard_unit *unit) {
    tt_fully_sharded *all = unit->all;
    if (all->callback)
        abandon_backward(all);
    if (unit == &all->units[all->unit_count - 1]) {
        if (all->ended_count >= (size_t)all->unit_count * FORWARDS) /* compiled backwards take nothing off the list */
            all->ended_count = all->back = 0;
        all->pass++;
        all->inside = true;
        all->next = 0;
    }
    if ((!all->inside || unit->pass != all->pass) && !unit->hidden)
        tu_shard_free(unit);
}

static void before_forward(const tt_hook_context *context, tt_module *module, size_t count, tt_tensor **inputs) {
    tu_shard_unit *unit = context->user;
    (void)module;
    note_look(unit->all);
    if (!in_backward())
        begin_forward(unit);
    tu_shard_gather(unit);
    if (!in_backward())
        gather_ahead(unit, TT_PASS_FORWARD, next_in_order(unit));
    if (!unit->all->options.keep_inputs)
        cast_all(count, inputs, unit->all->options.param_dtype);
}

static tt_tensor *before_backward(const tt_hook_context *context, tt_tensor *grad);

/* Whether a gradient will come; then it is waited for at each result that one can reach. */
static bool await_backward(tu_shard_unit *unit, size_t count, tt_tensor **outputs) {
    bool any = false;
    for (size_t i = 0; i < count && tt_grad_enabled(); i++) {
        tt_hook *hook = NULL;
        if (outputs[i] == NULL || !tt_requires_grad(outputs[i]))
            continue;
        any = true;
        if (!tt_hook_tensor(outputs[i], before_backward, unit, NULL, &hook))
            break;
        hook->release = tu_shard_drop; /* is given the unit */
        atomic_fetch_add_explicit(&unit->all->references, 1, memory_order_relaxed);
        tt_hook_release(&hook);
    }
    return any;
}

/* Also after a forward that failed: then there are no results. */
static void after_forward(const tt_hook_context *context, tt_module *module, tt_tensor_list inputs, size_t count,
                          tt_tensor **outputs) {
    tu_shard_unit *unit = context->user;
    tt_fully_sharded *all = unit->all;
    bool is_root = unit == &all->units[all->unit_count - 1];
    (void)module, (void)inputs;
    if (in_backward())
        return;
    if (is_root) {
        all->inside = false;
        cast_all(count, outputs, all->options.output_dtype);
    }
    bool awaited = await_backward(unit, count, outputs);
    if (awaited)
        tu_pending_take(append(&all->ended, &all->ended_count, &all->ended_capacity, unit));
    all->back = all->ended_count;
    all->order_known = all->order_known || (is_root && count > 0 && tu_self()->pending == TUTTI_OK);
    if (!awaited)
        tu_shard_free(unit);
    else if (!unit->keep_forward)
        tu_shard_shrink(unit);
    if (is_root && !awaited) /* a unit that was gathered ahead and not used */
        for (int i = 0; i < all->unit_count; i++)
            tu_shard_free(&all->units[i]);
}

/* ---- backward ---- */

/* The whole backward is done. */
static void finish(void *user) {
    tt_fully_sharded *all = user;
    for (int i = all->unit_count - 1; i >= 0; i--) {
        tu_shard_unit *unit = &all->units[i];
        if (!all->local)
            tu_shard_reduce(unit);
        tu_shard_leave(unit);
    }
    for (int i = all->unit_count - 1; i >= 0; i--) {
        tu_shard_unit *unit = &all->units[i];
        tu_shard_settle(unit);
        unit->reduced = false;
        unit->arrivals = 0;
        for (int k = 0; k < unit->count; k++)
            unit->members[k].arrived = false;
    }
    all->ended_count = all->back = 0;
    all->callback = false;
}

/* Begins to gather what comes behind this unit on the way back, once: by itself the unit whose forward ended before
 * this one's. */
static void gather_previous(const tu_shard_unit *unit) {
    tt_fully_sharded *all = unit->all;
    size_t at = all->back;
    while (at > 0 && all->ended[at - 1] != unit)
        at--;
    if (at == 0)
        return;
    all->back = at - 1;
    gather_ahead(unit, TT_PASS_BACKWARD, at > 1 ? all->ended[at - 2] : NULL);
}

static tt_tensor *before_backward(const tt_hook_context *context, tt_tensor *grad) {
    tu_shard_unit *unit = context->user;
    tt_fully_sharded *all = unit->all;
    (void)grad;
    note_look(all);
    if (all->released) {
        tu_fail(TUTTI_ERROR_STATE, "fully sharded: a backward of unit \"%s\", whose sharding was released", unit->name);
        return NULL;
    }
    if (tt_grad_enabled()) {
        tu_fail(TUTTI_ERROR_UNSUPPORTED,
                "fully sharded: gradients that are reduced cannot be differentiated (create_graph)");
        return NULL;
    }
    if (all->callback && all->backward != tu_backward_number())
        abandon_backward(all);
    if (!all->callback)
        all->callback = tt_backward_callback(finish, all);
    all->backward = tu_backward_number();
    tu_shard_gather_back(unit);
    gather_previous(unit);
    return NULL;
}

static bool has_frozen(const tu_shard_unit *unit) {
    return unit->trained < unit->count;
}

/* The gradient of one whole parameter is complete. With the last one all that uses the unit has run, unless some of its
 * parameters get no gradient: those are kept to the end. */
static void accumulated(const tt_hook_context *context, tt_tensor *whole) {
    tu_shard_member *member = context->user;
    tu_shard_unit *unit = member->unit;
    (void)whole;
    if (member->arrived)
        return;
    member->arrived = true;
    if (++unit->arrivals < unit->trained)
        return;
    if (!unit->all->local)
        tu_shard_reduce(unit);
    if (!has_frozen(unit))
        tu_shard_leave(unit);
}

/* ---- hanging them ---- */

void tu_shard_hang_members(tu_shard_unit *unit) {
    for (int i = 0; i < unit->count; i++)
        if (unit->members[i].trained &&
            tt_hook_accumulate(unit->members[i].whole, accumulated, &unit->members[i], NULL, &unit->members[i].hook))
            unit->members[i].hook->inside = true;
}

void tu_shard_hang(tt_fully_sharded *all) {
    tt_hook_options always = TT_HOOK_OPTIONS_INIT, first = TT_HOOK_OPTIONS_INIT;
    always.always = true;
    first.first = true;
    for (int i = 0; i < all->unit_count; i++) {
        tu_shard_unit *unit = &all->units[i];
        tt_hook_forward_pre(unit->module, before_forward, unit, &first, &unit->before);
        tt_hook_forward(unit->module, after_forward, unit, &always, &unit->after);
        tu_shard_hang_members(unit);
    }
}

static void forget(tu_shard_unit *unit) {
    tu_shard_clear(unit);
    for (int i = 0; i < unit->count; i++) {
        tu_tensor_drop(unit->members[i].original);
        free(unit->members[i].slots);
        free(unit->members[i].name);
    }
    for (size_t i = 0; i < sizeof unit->ahead / sizeof *unit->ahead; i++)
        free(unit->ahead[i].units);
    free(unit->members);
    free(unit->name);
}

void tu_shard_drop(void *user) {
    drop_all(((tu_shard_unit *)user)->all);
}

static void drop_all(void *owner) {
    tt_fully_sharded *all = owner;
    if (atomic_fetch_sub_explicit(&all->references, 1, memory_order_acq_rel) != 1)
        return;
    for (int i = 0; i < all->unit_count; i++)
        forget(&all->units[i]);
    tu_shard_peers_free(all->at_peers, tutti_group_size(all->group));
    tu_tensor_drop(all->marks);
    tu_offload_release(all);
    tt_optimizer_release(all->optimizer);
    tt_module_release(all->root);
    tutti_group_release(all->group);
    tutti_group_release(all->near);
    tutti_group_release(all->options.replicas);
    free(all->order);
    free(all->ended);
    free(all->members);
    free(all->units);
    free(all);
}
