/* SPDX-License-Identifier: Apache-2.0
 *
 * The end of a reduction: what ranks have reduced is averaged over the replicas, and becomes the gradient of the
 * shards.
 */
#include <string.h>

#include "autograd/node.h"
#include "autograd/operators.h"
#include "parallel/shard.h"

static tt_tensor *part_of(tt_tensor *flat, const tu_shard_member *member) {
    return tt_narrow(flat, 0, member->offset, tu_shard_part_elements(member));
}

/* As the engine gives a leaf its gradient: hooks of the shard first. In a function that is compiled with its backward
 * what stands for the shard has none: the gradient leaves the graph there, and the shard's run outside. */
static void settle_member(tu_shard_unit *unit, tu_shard_member *member, tt_tensor *reduced) {
    tt_tensor *shard = tu_stand_in(member->shard);
    tt_tensor *grad = tu_tensor_hold(tt_to(tu_shard_rows(reduced, member), unit->dtype));
    if (grad != NULL && shard != NULL && shard->history != NULL)
        tu_pending_take(tu_run_tensor_hooks(member->name, &tu_history_at(shard)->tensor_hooks, &grad));
    if (tu_is_capturing())
        tu_accumulate_grad(shard, grad, NULL);
    else if (tt_grad(shard) != NULL)
        tt_add_(tt_grad(shard), grad);
    else
        tt_set_grad(shard, grad);
    tu_tensor_drop(grad);
    if (tu_self()->pending == TUTTI_OK && shard->history != NULL)
        tu_pending_take(tu_run_accumulate_hooks(shard));
}

/* ---- replicas ---- */

/* Adds what one flat tensor has to another, member by member; where the other has nothing, it takes it. */
static void add_members(const tu_shard_unit *unit, tt_tensor *to, bool *in_to, tt_tensor *from, const bool *in_from) {
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        const tu_shard_member *member = &unit->members[i];
        if (!in_from[i])
            continue;
        if (in_to[i])
            tt_add_(part_of(to, member), part_of(from, member));
        else
            tt_copy_(part_of(to, member), part_of(from, member));
        in_to[i] = true;
    }
}

/* The reduction is not averaged now: it waits, with those before it, for one that is. */
static void hold_back(tu_shard_unit *unit) {
    if (tu_is_capturing()) {
        tu_fail(TUTTI_ERROR_CAPTURE,
                "fully sharded: a backward whose gradients add up without the replicas (TT_SWITCH_REPLICAS) cannot be "
                "compiled");
        return;
    }
    if (unit->partial == NULL) {
        unit->partial = unit->reduction;
        unit->reduction = NULL;
        memcpy(unit->in_partial, unit->in_reduction, (size_t)unit->count * sizeof *unit->in_partial);
        return;
    }
    add_members(unit, unit->partial, unit->in_partial, unit->reduction, unit->in_reduction);
    tu_tensor_drop(unit->reduction);
    unit->reduction = NULL;
}

/* What was held back comes to this reduction, or is it, where this backward had none. */
static void join_partial(tu_shard_unit *unit) {
    tt_tensor *partial = unit->partial;
    if (partial == NULL)
        return;
    if (unit->reduction == NULL) {
        unit->reduction = partial;
        memcpy(unit->in_reduction, unit->in_partial, (size_t)unit->count * sizeof *unit->in_reduction);
    } else {
        add_members(unit, unit->reduction, unit->in_reduction, partial, unit->in_partial);
        tu_tensor_drop(partial);
    }
    unit->partial = NULL;
}

static void average_over_replicas(const tu_shard_unit *unit) {
    const tt_fully_sharded_options *options = &unit->all->options;
    for (int i = 0; options->replicas != NULL && i < unit->count; i++)
        if (unit->in_reduction[i])
            tt_all_reduce_(part_of(unit->reduction, &unit->members[i]), options->divisor != 0 ? TUTTI_SUM : TUTTI_AVG,
                           options->replicas);
}

static void hand_out(tu_shard_unit *unit) {
    tt_tensor *reduction = unit->reduction;
    average_over_replicas(unit);
    tt_tensor *reduced = tu_shard_is_offloaded(unit) ? tu_offload_down(unit, reduction) : reduction;
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++)
        if (unit->in_reduction[i])
            settle_member(unit, &unit->members[i], reduced);
    unit->reduction = NULL;
    tu_tensor_drop(reduction);
}

void tu_shard_settle(tu_shard_unit *unit) {
    bool alone = unit->no_replicas && unit->all->options.replicas != NULL;
    if (unit->reduction == NULL && (unit->partial == NULL || alone || unit->all->local))
        return;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    if (alone) {
        hold_back(unit);
    } else {
        join_partial(unit);
        hand_out(unit);
    }
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
}
