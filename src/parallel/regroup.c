/* SPDX-License-Identifier: Apache-2.0
 *
 * Going on after a death: shards and optimizer states lie in memory that every rank of the host has mapped, so the
 * survivors read those of the dead, too, and cut everything anew. A group that spans hosts goes on from a checkpoint.
 *
 * All is made beside what there is, which nobody touches. Then the ranks agree whether all of them have made it, and
 * either all take the new parts or all keep the old ones: another death, wherever it comes, loses nothing.
 */
#include <stdlib.h>
#include <string.h>

#include <tutti/streams.h>
#include <tutti/symmetric.h>

#include "functional/registry.h"
#include "parallel/shard.h"
#include "tensor/create.h"

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

/* A block for one state of all members of a unit. */
static void make_state(tu_shard_unit *unit, int which) {
    tutti_group *group = unit->all->group;
    tu_shard_state *state = &unit->states[which];
    state->own = tu_tensor_hold(tt_symm_empty(tutti_group_world(group), tt_shape(unit->elements), unit->dtype,
                                              TUTTI_OPTIONS(tt_symm_options, .device = unit->device)));
    state->peers = tu_shard_peers(state->own, group);
}

/* Puts one state of all members of a unit into one block, with the values that they have. */
static void move_state(tu_shard_unit *unit, tt_optimizer *optimizer, int which) {
    bool any = false;
    for (int i = 0; i < unit->count; i++) {
        const tu_member *entry = entry_of(optimizer, unit->members[i].shard);
        any = any || (entry != NULL && entry->states[which] != NULL);
    }
    if (!any || tu_self()->pending != TUTTI_OK)
        return;
    make_state(unit, which);
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        tu_member *entry = entry_of(optimizer, unit->members[i].shard);
        if (entry == NULL || entry->states[which] == NULL)
            continue;
        tt_tensor *rows = tu_shard_rows(unit->states[which].own, &unit->members[i]);
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
        sharded->optimizer = tu_optimizer_keep(optimizer);
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

/* Parts of ranks on other hosts cannot be read where they lie; the error says whose. */
static tutti_status all_mapped(const tt_fully_sharded *sharded) {
    for (int unit = 0; unit < sharded->unit_count; unit++)
        for (int i = 0; sharded->units[unit].peers != NULL && i < tutti_group_size(sharded->group); i++)
            if (sharded->units[unit].peers[i] == NULL)
                return tu_error(TUTTI_ERROR_STATE,
                                "fully_sharded_regroup: the parts of rank %d are in memory of another host, which this "
                                "rank cannot read: make the module anew and load a checkpoint",
                                i);
    return TUTTI_OK;
}

/* Whether all ranks of the old group stand behind the same step; else the error says who does not. */
static tutti_status same_step(const tt_fully_sharded *sharded) {
    if (sharded->lost)
        return tu_error(TUTTI_ERROR_STATE, "fully_sharded_regroup: the last call ended without an agreement, and other "
                                           "ranks may have other parts: make the module anew and load a checkpoint");
    tutti_status status = all_mapped(sharded);
    if (status != TUTTI_OK)
        return status;
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

/* A member on its way from one group to the other. */
typedef struct passage {
    tu_member *entry;                  /* NULL: the optimizer does not know it */
    tt_tensor *states[TU_STEP_STATES]; /* whole; of the scope */
    tt_tensor *rows[TU_STEP_STATES];   /* this rank's new ones; held */
} passage;

/* A unit as it was, while it is made anew in its place. */
typedef struct former {
    bool begun;
    tu_shard_unit unit; /* its members are copies */
    passage *passages;  /* per member; of the scope */
} former;

/* Everything that is made anew. */
typedef struct regrouping {
    tt_fully_sharded *sharded;
    tutti_group *old, *group, *near;
    former *formers; /* per unit; of the scope */
    tt_tensor *marks, **at_peers;
    int64_t shard_bytes;
} regrouping;

/* Sets a unit aside, and leaves it as if it had never been cut. */
static bool set_aside(tu_shard_unit *unit, former *was) {
    size_t count = (size_t)unit->count;
    tu_shard_member *members = calloc(count + 1, sizeof *members);
    if (members == NULL) {
        tu_pending_take(tu_error_memory("a unit that is cut anew", (count + 1) * sizeof *members));
        return false;
    }
    memcpy(members, unit->members, count * sizeof *members);
    was->unit = *unit;
    was->unit.members = members;
    was->begun = true;
    for (size_t i = 0; i < count; i++) {
        tu_shard_member *member = &unit->members[i];
        member->shard = member->whole = member->sent = member->landing = NULL;
        member->hook = NULL;
        member->arrived = false;
    }
    unit->shard = unit->sent = unit->whole = unit->kept = unit->reduction = unit->partial = unit->home = NULL;
    unit->peers = NULL;
    unit->in_reduction = unit->in_partial = NULL;
    memset(unit->states, 0, sizeof unit->states);
    unit->elements = 0;
    unit->arrivals = 0;
    unit->gathered = unit->hidden = unit->reduced = unit->comes_home = false;
    return true;
}

/* Puts the parts of all ranks of the old group together. */
static void assemble_unit(tu_shard_unit *unit, const former *was, int ranks) {
    const tt_optimizer *optimizer = unit->all->optimizer;
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        const tu_shard_member *had = &was->unit.members[i];
        passage *way = &was->passages[i];
        unit->members[i].original = tu_tensor_hold(assemble(had, was->unit.peers, ranks));
        way->entry = optimizer != NULL ? entry_of(optimizer, had->shard) : NULL;
        for (int which = 0; which < TU_STEP_STATES && way->entry != NULL; which++)
            if (was->unit.states[which].own != NULL && way->entry->states[which] != NULL)
                way->states[which] = assemble(had, was->unit.states[which].peers, ranks);
    }
}

/* This rank's rows of one state, in a new block. */
static void cut_state(tu_shard_unit *unit, passage *passages, int which) {
    bool any = false;
    for (int i = 0; i < unit->count; i++)
        any = any || passages[i].states[which] != NULL;
    if (!any || tu_self()->pending != TUTTI_OK)
        return;
    make_state(unit, which);
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        if (passages[i].states[which] == NULL)
            continue;
        tt_tensor *rows = tu_shard_rows(unit->states[which].own, &unit->members[i]);
        tt_copy_(rows, tu_shard_own(passages[i].states[which], &unit->members[i]));
        passages[i].rows[which] = tu_tensor_hold(rows);
    }
}

static void drop_originals(tu_shard_unit *unit) {
    for (int i = 0; i < unit->count; i++) {
        tu_tensor_drop(unit->members[i].original);
        unit->members[i].original = NULL;
    }
}

/* Makes a unit anew. One is whole at a time. */
static void recut(tu_shard_unit *unit, former *was, int ranks) {
    size_t bytes = ((size_t)unit->count + 1) * sizeof *was->passages;
    was->passages = tu_scope_memory(bytes);
    if (was->passages == NULL || !set_aside(unit, was))
        return;
    memset(was->passages, 0, bytes);
    tt_scope scope = tt_scope_open();
    assemble_unit(unit, was, ranks);
    if (tu_self()->pending == TUTTI_OK)
        tu_pending_take(tu_shard_cut(unit));
    for (int which = 0; which < TU_STEP_STATES; which++)
        cut_state(unit, was->passages, which);
    if (tu_self()->pending == TUTTI_OK)
        tu_shard_hang_members(unit);
    drop_originals(unit);
    for (int i = 0; i < unit->count; i++)
        memset(was->passages[i].states, 0, sizeof was->passages[i].states);
    tu_scope_leave(&scope);
}

/* The new parts count: slots and optimizer get them, and the old ones go. Nothing here can fail. */
static void take_new(tu_shard_unit *unit, former *was) {
    for (int i = 0; i < unit->count; i++) {
        const tu_shard_member *member = &unit->members[i];
        const passage *way = &was->passages[i];
        for (int k = 0; k < member->slot_count; k++)
            tt_module_set_parameter(member->slots[k].module, member->slots[k].name, member->shard);
        if (way->entry == NULL)
            continue;
        tu_tensor_drop(way->entry->parameter);
        way->entry->parameter = tu_tensor_hold(member->shard);
        for (int which = 0; which < TU_STEP_STATES; which++)
            if (way->rows[which] != NULL) {
                tu_tensor_drop(way->entry->states[which]);
                way->entry->states[which] = way->rows[which];
            }
    }
    tu_shard_clear(&was->unit);
    free(was->unit.members);
}

/* The old parts stay, and the new ones go. */
static void take_back(tu_shard_unit *unit, former *was) {
    tu_shard_member *members = unit->members;
    for (int i = 0; i < unit->count; i++)
        for (int which = 0; which < TU_STEP_STATES; which++)
            tu_tensor_drop(was->passages[i].rows[which]);
    tu_shard_clear(unit);
    memcpy(members, was->unit.members, (size_t)unit->count * sizeof *members);
    free(was->unit.members);
    *unit = was->unit;
    unit->members = members;
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

/* Makes everything for the new group. Failed with an error pending; then some of it is there. */
static void make_all(regrouping *all) {
    tt_fully_sharded *sharded = all->sharded;
    all->formers = tu_scope_memory((size_t)sharded->unit_count * sizeof *all->formers);
    if (all->formers != NULL)
        memset(all->formers, 0, (size_t)sharded->unit_count * sizeof *all->formers);
    for (int i = 0; i < sharded->unit_count && tu_self()->pending == TUTTI_OK; i++)
        recut(&sharded->units[i], &all->formers[i], tutti_group_size(all->old));
    sharded->marks = NULL;
    sharded->at_peers = NULL;
    if (sharded->optimizer != NULL && tu_self()->pending == TUTTI_OK)
        make_marks(sharded, tt_item(tt_optimizer_steps(sharded->optimizer)));
}

/* Whether no error is pending on any rank that lives, the same answer for all of them: deaths do not disturb it. Else
 * one is pending; *unknown: there was no answer. */
static bool all_are_good(const char *others, tutti_group *group, bool *unknown) {
    bool every = false;
    tu_pending_copy error;
    tu_pending_save(&error);
    tutti_status voted = tutti_group_agree(group, error.status == TUTTI_OK, &every);
    *unknown = voted != TUTTI_OK;
    if (error.status != TUTTI_OK)
        tu_pending_restore(&error);
    else if (voted != TUTTI_OK)
        tu_pending_take(voted);
    else if (!every && tu_pending_take(tutti_group_check(group)) == TUTTI_OK)
        tu_fail(TUTTI_ERROR_STATE, "%s", others);
    return tu_self()->pending == TUTTI_OK;
}

/* Each says that its parts are written: a rank that died before has left nothing that the others may use. Where
 * this one failed it ends the group, so that nobody waits for its parts. */
static void tell_written(const regrouping *all) {
    if (tutti_device_kind(all->sharded->device) == TUTTI_CUDA && tu_self()->pending == TUTTI_OK)
        tt_synchronize(all->sharded->device);
    if (tu_self()->pending == TUTTI_OK)
        tt_wait(tt_all_reduce(tt_full(tt_shape(), 1, TUTTI_I32, TU_OF_HOST), TUTTI_SUM, all->group));
    (void)tu_flight_check("fully_sharded_regroup", all->group, false);
}

/* Takes what is new, or what is old. */
static void settle(regrouping *all, bool is_new) {
    tt_fully_sharded *sharded = all->sharded;
    tt_tensor *marks = is_new ? all->marks : sharded->marks, **at_peers = is_new ? all->at_peers : sharded->at_peers;
    sharded->group = is_new ? all->old : all->group; /* of what goes */
    for (int i = 0; all->formers != NULL && i < sharded->unit_count; i++)
        if (all->formers[i].begun)
            (is_new ? take_new : take_back)(&sharded->units[i], &all->formers[i]);
    tu_shard_peers_free(at_peers, tutti_group_size(sharded->group));
    tu_tensor_drop(marks);
    if (is_new) {
        sharded->group = tutti_group_keep(all->group);
        tutti_group_release(all->old);
        tutti_group_release(all->near); /* its ranks may be dead */
        return;
    }
    sharded->group = all->old;
    sharded->near = all->near;
    sharded->marks = all->marks;
    sharded->at_peers = all->at_peers;
    sharded->counts.shard_bytes = all->shard_bytes;
}

static void regroup(tt_fully_sharded *sharded, tutti_group *group) {
    bool unknown;
    hear_out(sharded);
    tu_pending_take(same_step(sharded));
    if (!all_are_good("fully_sharded_regroup: another rank cannot go on from memory: load a checkpoint", group,
                      &unknown))
        return;
    drop_what_was_under_way(sharded);
    regrouping all = { .sharded = sharded,
                       .old = sharded->group,
                       .group = group,
                       .near = sharded->near,
                       .marks = sharded->marks,
                       .at_peers = sharded->at_peers,
                       .shard_bytes = sharded->counts.shard_bytes };
    sharded->group = group;
    sharded->near = NULL;
    sharded->counts.shard_bytes = 0;
    make_all(&all);
    tell_written(&all);
    bool is_new = all_are_good("fully_sharded_regroup: another rank could not cut its parts anew", group, &unknown);
    sharded->lost = unknown; /* nobody knows what the others have taken */
    settle(&all, is_new);
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
