/* SPDX-License-Identifier: Apache-2.0
 *
 * Going on after a death: shards and optimizer states lie in memory that every rank has mapped, so the survivors read
 * those of the dead, too, and cut everything anew.
 */
#include <string.h>

#include <tutti/streams.h>
#include <tutti/symmetric.h>

#include "parallel/shard.h"

static tutti_device computed_on(const tt_fully_sharded *sharded) {
    return sharded->options.device != 0 ? sharded->options.device : sharded->device;
}

/* On a GPU errors of works are told when the host next waits for it. After a death they are old news, and are heard
 * out, so that what is read there next is not refused for them. */
static void hear_out(const tt_fully_sharded *sharded) {
    const int most = 8; /* a device that fails by itself would never be done */
    if (tutti_device_kind(computed_on(sharded)) != TUTTI_CUDA)
        return;
    for (int i = 0; i < most && tu_self()->pending == TUTTI_OK && !tt_synchronize(computed_on(sharded)); i++)
        tt_error_clear();
}

/* ---- protecting ---- */

/* The optimizer's entry for a shard, or NULL. */
static tu_member *entry_of(const tt_optimizer *optimizer, const tt_tensor *shard) {
    for (size_t i = 0; i < optimizer->member_count; i++)
        if (optimizer->members[i].parameter == shard)
            return &optimizer->members[i];
    return NULL;
}

/* Puts one state of all members of a unit into one block, with the values that they have. */
static void move_state(tu_shard_unit *unit, tt_optimizer *optimizer, int which) {
    tutti_group *group = unit->all->group;
    tu_shard_state *state = &unit->states[which];
    bool any = false;
    for (int i = 0; i < unit->count; i++) {
        const tu_member *entry = entry_of(optimizer, unit->members[i].shard);
        any = any || (entry != NULL && entry->states[which] != NULL);
    }
    if (!any || tu_self()->pending != TUTTI_OK)
        return;
    state->own = tu_tensor_hold(tt_symm_empty(tutti_group_world(group), tt_shape(unit->elements), unit->dtype,
                                              TUTTI_OPTIONS(tt_symm_options, .device = unit->device)));
    state->peers = tu_shard_peers(state->own, group);
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        tu_member *entry = entry_of(optimizer, unit->members[i].shard);
        if (entry == NULL || entry->states[which] == NULL)
            continue;
        tt_tensor *rows = tu_shard_rows(state->own, &unit->members[i]);
        tt_copy_(rows, entry->states[which]);
        if (tu_self()->pending != TUTTI_OK)
            continue;
        tu_tensor_drop(entry->states[which]);
        entry->states[which] = tu_tensor_hold(rows);
    }
}

/* Where the shards are: on a GPU a mark is written behind the step that it tells of by the same stream. */
static void make_marks(tt_fully_sharded *sharded, double steps) {
    sharded->marks = tu_tensor_hold(tt_symm_empty(tutti_group_world(sharded->group), tt_shape(2), TUTTI_F64,
                                                  TUTTI_OPTIONS(tt_symm_options, .device = sharded->device)));
    tt_fill_(sharded->marks, steps);
    sharded->at_peers = tu_shard_peers(sharded->marks, sharded->group);
}

static bool usable(const char *who, const tt_fully_sharded *sharded) {
    if (tu_self()->pending == TUTTI_OK && sharded == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: sharded is NULL", who);
    return tu_self()->pending == TUTTI_OK;
}

bool tt_fully_sharded_protect(tt_fully_sharded *sharded, tt_optimizer *optimizer) {
    if (!usable("fully_sharded_protect", sharded) || !tu_optimizer_usable("fully_sharded_protect", optimizer))
        return false;
    if (sharded->optimizer != NULL) {
        tu_fail(TUTTI_ERROR_STATE, "fully_sharded_protect: an optimizer is protected already");
        return false;
    }
    bool knows = sharded->member_count == 0;
    for (int i = 0; i < sharded->member_count; i++)
        knows = knows || entry_of(optimizer, sharded->members[i]->shard) != NULL;
    if (!knows) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "fully_sharded_protect: the optimizer has none of the shards; make it after "
                                      "tt_fully_shard");
        return false;
    }
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    for (int i = 0; i < sharded->unit_count; i++)
        for (int which = 0; which < TU_STEP_STATES; which++)
            move_state(&sharded->units[i], optimizer, which);
    make_marks(sharded, tt_item(tt_optimizer_steps(optimizer)));
    if (tu_self()->pending == TUTTI_OK)
        sharded->optimizer = optimizer;
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK;
}

bool tt_fully_sharded_step(tt_fully_sharded *sharded) {
    if (!usable("fully_sharded_step", sharded))
        return false;
    if (sharded->optimizer == NULL) {
        tu_fail(TUTTI_ERROR_STATE, "fully_sharded_step: no optimizer is protected (tt_fully_sharded_protect)");
        return false;
    }
    tt_scope scope = tt_scope_open();
    for (int i = 0; i < sharded->member_count; i++)
        if (tt_grad(sharded->members[i]->shard) != NULL)
            tt_wait(tt_grad(sharded->members[i]->shard)); /* what fails here has not begun */
    if (tutti_device_kind(computed_on(sharded)) == TUTTI_CUDA)
        tt_synchronize(computed_on(sharded));
    double steps = tt_item(tt_optimizer_steps(sharded->optimizer)) + 1;
    if (tu_self()->pending == TUTTI_OK)
        tt_fill_(tt_narrow(sharded->marks, 0, 0, 1), steps);
    atomic_thread_fence(memory_order_release); /* pairs with the one in same_step: first the mark, then the step */
    if (tt_optimizer_step(sharded->optimizer)) {
        atomic_thread_fence(memory_order_release); /* pairs with the one in same_step: first the step, then its mark */
        tt_fill_(tt_narrow(sharded->marks, 0, 1, 1), steps);
    }
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK;
}

/* ---- may it go on from memory ---- */

/* Whether all ranks of the old group stand behind the same step; else the error says who does not. */
static tutti_status same_step(const tt_fully_sharded *sharded) {
    if (sharded->lost)
        return tu_error(TUTTI_ERROR_STATE, "fully_sharded_regroup: a rank died while parameters were cut anew, and not "
                                           "all are there: make the module anew and load a checkpoint");
    double own = sharded->optimizer != NULL ? tt_item(tt_optimizer_steps(sharded->optimizer)) : 0;
    for (int i = 0; sharded->marks != NULL && i < tutti_group_size(sharded->group); i++) {
        double marks[2] = { 0, 0 };
        tt_read(sharded->at_peers[i], marks, TUTTI_F64, 2);
        atomic_thread_fence(memory_order_acquire);
        if (tu_self()->pending != TUTTI_OK)
            return tu_self()->pending;
        if (marks[0] != marks[1])
            return tu_error(TUTTI_ERROR_STATE,
                            "fully_sharded_regroup: rank %d stopped in the middle of step %g: load a checkpoint", i,
                            marks[0]);
        if (marks[1] != own)
            return tu_error(TUTTI_ERROR_STATE,
                            "fully_sharded_regroup: rank %d has made %g steps and this rank %g: load a checkpoint", i,
                            marks[1], own);
    }
    return TUTTI_OK;
}

/* ---- cutting anew ---- */

/* A parameter, or a state of it, whole, from the flat parts of all ranks. */
static tt_tensor *assemble(const tu_shard_member *member, tt_tensor *const *peers, int ranks) {
    tt_tensor **parts = tu_scope_memory((size_t)ranks * sizeof *parts);
    for (int i = 0; parts != NULL && i < ranks; i++) {
        int64_t left = member->rows - i * member->part;
        int64_t own = left < 0 ? 0 : left < member->part ? left : member->part;
        parts[i] = tt_narrow(peers[i], 0, member->offset, own * member->width);
    }
    tt_tensor *rows = parts != NULL ? tt_cat(tt_tensors_of((size_t)ranks, parts), 0) : NULL;
    return member->shape.ndim > 0 ? tu_shard_shaped(rows, member, member->rows) : tt_view(rows, tt_shape());
}

/* What a member had, whole: itself and the optimizer's states of it. */
typedef struct remains {
    tu_member *entry; /* NULL: the optimizer does not know it */
    tt_tensor *states[TU_STEP_STATES];
} remains;

static void gather_remains(tu_shard_unit *unit, remains *all) {
    int ranks = tutti_group_size(unit->all->group);
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        tu_shard_member *member = &unit->members[i];
        member->original = tu_tensor_hold(assemble(member, unit->peers, ranks));
        all[i] =
            (remains){ .entry = unit->all->optimizer != NULL ? entry_of(unit->all->optimizer, member->shard) : NULL };
        for (int which = 0; which < TU_STEP_STATES && all[i].entry != NULL; which++)
            if (unit->states[which].own != NULL && all[i].entry->states[which] != NULL)
                all[i].states[which] = assemble(member, unit->states[which].peers, ranks);
    }
}

/* Gives the optimizer the new shard, and its rows of the states. */
static void follow(tu_shard_member *member, remains *had) {
    if (had->entry == NULL)
        return;
    tu_tensor_drop(had->entry->parameter);
    had->entry->parameter = tu_tensor_hold(member->shard);
    for (int i = 0; i < TU_STEP_STATES && tu_self()->pending == TUTTI_OK; i++)
        if (had->states[i] != NULL) {
            tu_tensor_drop(had->entry->states[i]);
            had->entry->states[i] = tu_tensor_hold(tt_clone(tu_shard_own(had->states[i], member)));
        }
}

static void recut(tu_shard_unit *unit, tutti_group *old, tutti_group *group) {
    remains *had = tu_scope_memory(((size_t)unit->count + 1) * sizeof *had);
    if (had == NULL || unit->count == 0)
        return;
    memset(had, 0, ((size_t)unit->count + 1) * sizeof *had);
    gather_remains(unit, had);
    if (tu_self()->pending != TUTTI_OK)
        return;
    unit->all->group = old;
    tu_shard_clear(unit);
    unit->all->group = group;
    tu_pending_take(tu_shard_cut(unit));
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        tu_shard_member *member = &unit->members[i];
        for (int k = 0; k < member->slot_count; k++)
            tt_module_set_parameter(member->slots[k].module, member->slots[k].name, member->shard);
        follow(member, &had[i]);
        tu_tensor_drop(member->original);
        member->original = NULL;
    }
    tu_shard_hang_members(unit);
    for (int which = 0; which < TU_STEP_STATES && unit->all->optimizer != NULL; which++)
        move_state(unit, unit->all->optimizer, which);
}

/* ---- the call ---- */

static void drop_what_was_under_way(tt_fully_sharded *sharded) {
    for (int i = 0; i < sharded->unit_count; i++) {
        tu_shard_unit *unit = &sharded->units[i];
        tu_shard_free(unit);
        for (int k = 0; k < unit->count; k++) {
            tt_set_grad(unit->members[k].whole, NULL);
            tt_set_grad(unit->members[k].shard, NULL);
        }
        tt_error_clear(); /* of collectives that the death ended */
    }
    if (!tt_wait_all(tutti_group_world(sharded->group))) /* the others that were under way */
        tt_error_clear();
    hear_out(sharded);
    sharded->order_count = sharded->next = sharded->ended_count = sharded->back = 0;
    sharded->order_known = sharded->callback = false;
}

static void regroup(tt_fully_sharded *sharded, tutti_group *group) {
    tutti_group *old = sharded->group;
    hear_out(sharded);
    tutti_status status = tu_parallel_all(
        same_step(sharded), "fully_sharded_regroup: another rank cannot go on from memory: load a checkpoint", group);
    if (tu_pending_take(status) != TUTTI_OK)
        return;
    drop_what_was_under_way(sharded);
    tutti_group_release(sharded->near); /* its ranks may be dead */
    sharded->near = NULL;
    sharded->counts.shard_bytes = 0;
    for (int i = 0; i < sharded->unit_count && tu_self()->pending == TUTTI_OK; i++) {
        sharded->group = old;
        recut(&sharded->units[i], old, group);
    }
    sharded->group = tutti_group_keep(group);
    if (sharded->optimizer != NULL) {
        tu_shard_peers_free(sharded->at_peers, tutti_group_size(old));
        tu_tensor_drop(sharded->marks);
        make_marks(sharded, tt_item(tt_optimizer_steps(sharded->optimizer)));
    }
    sharded->lost = tu_self()->pending != TUTTI_OK;
    tutti_group_release(old);
}

bool tt_fully_sharded_regroup(tt_fully_sharded *sharded, tutti_group *group) {
    if (!usable("fully_sharded_regroup", sharded))
        return false;
    if (group == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "fully_sharded_regroup: group is NULL");
        return false;
    }
    if (sharded->options.replicas != NULL) {
        tu_fail(TUTTI_ERROR_UNSUPPORTED, "fully_sharded_regroup: shards with replicas cannot be cut anew");
        return false;
    }
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    regroup(sharded, group);
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return tu_self()->pending == TUTTI_OK;
}
