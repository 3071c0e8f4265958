/* SPDX-License-Identifier: Apache-2.0
 *
 * What happens to a unit: it is cut, gathered, freed, and its gradients are reduced. Each parameter is gathered
 * straight to where it lies whole, in one work per unit, so nothing is copied a second time; gradients go the same way
 * back. The design of units, states and prefetching is that of PyTorch's fully_shard.
 */
#include "parallel/shard.h"

#include <stdlib.h>

#include <tutti/symmetric.h>

#include "autograd/node.h"
#include "autograd/operators.h"
#include "functional/registry.h"

#define LINE 64 /* bytes; parts of a flat shard begin at multiples of it */

static void tell(const tu_shard_unit *unit, tt_shard_event event) {
    const tt_fully_sharded_options *options = &unit->all->options;
    if (options->watch != NULL)
        options->watch(options->user, event, unit->name);
}

/* ---- cutting ---- */

static void measure(tu_shard_unit *unit, tu_shard_member *member) {
    int ranks = tutti_group_size(unit->all->group), rank = tutti_group_rank(unit->all->group);
    const tt_tensor *x = member->original;
    member->shape = tu_shape_of(x);
    member->rows = x->ndim > 0 ? x->sizes[0] : 1;
    member->width = member->rows > 0 ? x->numel / member->rows : 0;
    member->part = (member->rows + ranks - 1) / ranks;
    int64_t left = member->rows - rank * member->part;
    member->own = left < 0 ? 0 : left < member->part ? left : member->part;
    member->offset = unit->elements;
    int64_t line = LINE / (int64_t)tu_dtype_bytes[unit->dtype];
    unit->elements += (member->part * member->width + line - 1) / line * line;
}

/* The sizes of `rows` rows of a parameter; of a number: one element or none. */
static tt_dims sizes_of(const tu_shard_member *member, int64_t rows) {
    int ndim = member->shape.ndim > 0 ? member->shape.ndim : 1;
    int64_t sizes[TT_MAX_DIMS];
    for (int i = 1; i < ndim; i++)
        sizes[i] = member->shape.sizes[i];
    sizes[0] = rows;
    return tt_dims_of(ndim, sizes);
}

static tt_tensor *part_of(tt_tensor *flat, int64_t offset, int64_t elements) {
    return tt_narrow(flat, 0, offset, elements);
}

tt_tensor *tu_shard_rows(tt_tensor *flat, const tu_shard_member *member) {
    return tt_view(part_of(flat, member->offset, member->own * member->width), sizes_of(member, member->own));
}

tt_tensor **tu_shard_peers(tt_tensor *x, tutti_group *group) {
    int count = tutti_group_size(group);
    tt_tensor **peers = calloc((size_t)count, sizeof(tt_tensor *));
    if (peers == NULL)
        tu_pending_take(tu_error_memory("the shards of peers", (size_t)count * sizeof(tt_tensor *)));
    for (int i = 0; peers != NULL && i < count; i++)
        peers[i] = tu_tensor_hold(tt_peer_tensor(x, i, group));
    return peers;
}

void tu_shard_peers_free(tt_tensor **peers, int count) {
    for (int i = 0; peers != NULL && i < count; i++)
        tu_tensor_drop(peers[i]);
    free(peers);
}

void tu_shard_clear(tu_shard_unit *unit) {
    int ranks = tutti_group_size(unit->all->group);
    for (int i = 0; i < unit->count; i++) {
        tu_shard_member *member = &unit->members[i];
        tt_tensor **held[] = { &member->shard, &member->whole, &member->sent, &member->landing };
        tt_hook_remove(&member->hook);
        for (size_t k = 0; k < sizeof held / sizeof *held; k++) {
            tu_tensor_drop(*held[k]);
            *held[k] = NULL;
        }
        member->arrived = false;
    }
    for (int i = 0; i < TU_STEP_STATES; i++) {
        tu_tensor_drop(unit->states[i].own);
        tu_shard_peers_free(unit->states[i].peers, ranks);
        unit->states[i] = (tu_shard_state){ NULL, NULL };
    }
    tu_shard_peers_free(unit->peers, ranks);
    unit->peers = NULL;
    tt_tensor **held[] = { &unit->shard, &unit->sent, &unit->whole, &unit->reduction };
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) {
        tu_tensor_drop(*held[i]);
        *held[i] = NULL;
    }
    free(unit->in_reduction);
    unit->in_reduction = NULL;
    unit->elements = 0;
    unit->arrivals = 0;
    unit->gathered = unit->reduced = false;
}

static void cut_member(tu_shard_unit *unit, tu_shard_member *member) {
    int ranks = tutti_group_size(unit->all->group), rank = tutti_group_rank(unit->all->group);
    int64_t elements = member->part * member->width;
    tt_tensor *shard = tu_shard_rows(unit->shard, member);
    tt_tensor *rows = tt_view(tt_contiguous(member->original), sizes_of(member, member->rows));
    tt_copy_(shard, tt_narrow(rows, 0, member->own > 0 ? rank * member->part : 0, member->own));
    member->shard = tu_tensor_hold(tt_parameter(shard, member->trained));
    member->sent = tu_tensor_hold(part_of(unit->sent, member->offset, elements));
    member->landing = tu_tensor_hold(part_of(unit->whole, ranks * member->offset, ranks * elements));
    tt_tensor *whole = tt_view(part_of(member->landing, 0, member->rows * member->width),
                               tt_dims_of(member->shape.ndim, member->shape.sizes));
    member->whole = tu_tensor_hold(tt_parameter(whole, member->trained));
}

tutti_status tu_shard_cut(tu_shard_unit *unit) {
    tt_fully_sharded *all = unit->all;
    tutti_world *world = tutti_group_world(all->group);
    for (int i = 0; i < unit->count; i++)
        measure(unit, &unit->members[i]);
    if (unit->count == 0)
        return TUTTI_OK;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    unit->in_reduction = calloc((size_t)unit->count, sizeof *unit->in_reduction);
    if (unit->in_reduction == NULL)
        tu_pending_take(tu_error_memory("a unit of parameters", (size_t)unit->count));
    unit->shard = tu_tensor_hold(tt_symm_empty(world, tt_shape(unit->elements), unit->dtype, NULL));
    unit->sent = unit->gathered_dtype == unit->dtype
                     ? tu_tensor_hold(unit->shard)
                     : tu_tensor_hold(tt_symm_empty(world, tt_shape(unit->elements), unit->gathered_dtype, NULL));
    unit->whole =
        tu_tensor_hold(tt_empty(tt_shape(tutti_group_size(all->group) * unit->elements), unit->gathered_dtype, NULL));
    unit->peers = tu_shard_peers(unit->shard, all->group);
    if (unit->sent != unit->shard)
        tt_peer_tensor(unit->sent, 0, all->group); /* gathers read it where it lies from now on */
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++)
        cut_member(unit, &unit->members[i]);
    if (tu_self()->pending == TUTTI_OK)
        tt_storage_resize(unit->whole, 0);
    all->cuts++;
    all->counts.shard_bytes += unit->elements * (int64_t)tu_dtype_bytes[unit->dtype];
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
    return tu_self()->pending;
}

/* ---- gathering and freeing ---- */

static void put_in_slots(const tu_shard_unit *unit, bool whole) {
    for (int i = 0; i < unit->count; i++) {
        const tu_shard_member *member = &unit->members[i];
        for (int k = 0; k < member->slot_count; k++)
            tt_module_set_parameter(member->slots[k].module, member->slots[k].name,
                                    whole ? member->whole : member->shard);
    }
}

static size_t whole_bytes(const tu_shard_unit *unit) {
    return (size_t)unit->whole->numel * tu_dtype_bytes[unit->gathered_dtype];
}

/* What a compiled function gathers or frees it does to the storage alone, so the storage tells; a capture learns that
 * it was asked. */
bool tu_shard_is_gathered(const tu_shard_unit *unit) {
    if (unit->whole == NULL || whole_bytes(unit) == 0)
        return unit->gathered;
    tt_tensor *whole = tu_stand_in(unit->whole);
    return whole != NULL && (tu_self()->pending != TUTTI_OK || tu_note_asked(whole, TU_ASKED_BYTES)) &&
           whole->storage->bytes > 0;
}

static int64_t gathered_bytes(const tt_fully_sharded *all) {
    int64_t bytes = 0;
    for (int i = 0; i < all->unit_count; i++)
        bytes += tu_shard_is_gathered(&all->units[i]) ? (int64_t)whole_bytes(&all->units[i]) : 0;
    return bytes;
}

void tu_shard_count(const tt_fully_sharded *all, tt_fully_sharded_counts *counts) {
    *counts = all->counts;
    for (int i = 0; i < all->unit_count; i++)
        counts->gathered += tu_shard_is_gathered(&all->units[i]);
    counts->gathered_bytes = gathered_bytes(all);
}

/* Collectives between begin and end are one work; a graph that is captured has them one by one. */
static bool batch_begin(const char *operation, tutti_group *group) {
    return tu_self()->pending == TUTTI_OK &&
           (tu_is_capturing() || tu_pending_take(tu_batch_open(operation, group)) == TUTTI_OK);
}

static void batch_end(tutti_group *group) {
    if (!tu_is_capturing())
        tu_pending_take(tu_batch_close(group, tu_self()->pending == TUTTI_OK));
}

/* Makes the shards inputs of a graph: gradients of a compiled function leave it there. */
static void show_shards(const tu_shard_unit *unit) {
    for (int i = 0; tu_is_capturing() && i < unit->count && tu_self()->pending == TUTTI_OK; i++)
        tt_storage_bytes(unit->members[i].shard);
}

static void start_gathers(tu_shard_unit *unit) {
    tutti_group *group = unit->all->group;
    show_shards(unit);
    if (unit->sent != unit->shard)
        tt_copy_(unit->sent, unit->shard);
    tt_preserve *preserve = tt_preserve_begin(tt_tensors(unit->whole)); /* autograd may have saved what is refilled */
    if (batch_begin("all_gather", group)) {
        for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++)
            if (unit->members[i].sent->numel > 0)
                tt_all_gather_out(unit->members[i].landing, unit->members[i].sent, group);
        batch_end(group);
    }
    tt_preserve_end(preserve);
}

void tu_shard_gather(tu_shard_unit *unit) {
    if (unit->count == 0 || tu_self()->pending != TUTTI_OK || tu_shard_is_gathered(unit))
        return;
    tt_fully_sharded_counts *counts = &unit->all->counts;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    tell(unit, TT_SHARD_GATHER);
    if (tt_storage_resize(unit->whole, whole_bytes(unit))) {
        unit->gathered = true;
        unit->pass = unit->all->pass;
        counts->gathers++;
        int64_t bytes = gathered_bytes(unit->all);
        if (bytes > counts->most_gathered_bytes)
            counts->most_gathered_bytes = bytes;
        start_gathers(unit);
        put_in_slots(unit, true);
    }
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
}

void tu_shard_free(tu_shard_unit *unit) {
    tu_pending_copy error;
    if (!tu_shard_is_gathered(unit))
        return;
    tu_pending_save(&error);
    tt_scope scope = tt_scope_open();
    tell(unit, TT_SHARD_FREE);
    put_in_slots(unit, false);
    tt_storage_resize(unit->whole, 0);
    unit->gathered = false;
    tu_scope_leave(&scope);
    if (error.status != TUTTI_OK) {
        tt_error_clear();
        tu_pending_restore(&error);
    }
}

/* ---- gradients ---- */

/* A whole gradient as the ranks' parts one after the other, padded with zeros, in the dtype that is reduced. */
static tt_tensor *parts_of(const tu_shard_member *member, tt_tensor *grad, tutti_dtype dtype) {
    int64_t elements = member->landing->numel;
    if (grad->numel == elements)
        return tt_view(tt_contiguous(tt_to(grad, dtype)), tt_shape(elements));
    tt_tensor *padded = tt_zeros(tt_shape(elements), dtype, NULL);
    tt_copy_(part_of(padded, 0, grad->numel), tt_view(tt_contiguous(grad), tt_shape(grad->numel)));
    return padded;
}

static void start_reductions(tu_shard_unit *unit, tt_tensor **parts) {
    tt_fully_sharded *all = unit->all;
    double divisor = all->options.divisor;
    if (!batch_begin("reduce_scatter", all->group))
        return;
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        const tu_shard_member *member = &unit->members[i];
        if (parts[i] == NULL || member->sent->numel == 0)
            continue;
        tt_tensor *out = part_of(unit->reduction, member->offset, member->sent->numel);
        if (divisor != 0)
            tt_reduce_scatter_premul_out(out, parts[i], 1 / divisor, all->group);
        else
            tt_reduce_scatter_out(out, parts[i], TUTTI_AVG, all->group);
    }
    batch_end(all->group);
}

/* Takes the gradients of the whole parameters; false where there are none. */
static bool take_gradients(tu_shard_unit *unit, tt_tensor **parts, tutti_dtype *dtype) {
    bool any = false;
    for (int i = 0; i < unit->count; i++) {
        tu_shard_member *member = &unit->members[i];
        tt_tensor *grad = tt_grad(member->whole);
        unit->in_reduction[i] = grad != NULL;
        if (grad == NULL)
            continue;
        any = true;
        *dtype = unit->all->options.reduce_dtype != 0 ? unit->all->options.reduce_dtype : tt_dtype(grad);
        parts[i] = parts_of(member, grad, *dtype);
        tt_set_grad(member->whole, NULL);
    }
    return any && tu_self()->pending == TUTTI_OK;
}

void tu_shard_reduce(tu_shard_unit *unit) {
    if (unit->reduced || unit->count == 0 || tu_self()->pending != TUTTI_OK)
        return;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    tutti_dtype dtype = 0;
    tt_tensor **parts = tu_scope_memory((size_t)unit->count * sizeof *parts);
    for (int i = 0; parts != NULL && i < unit->count; i++)
        parts[i] = NULL;
    if (parts != NULL && take_gradients(unit, parts, &dtype)) {
        tell(unit, TT_SHARD_REDUCE);
        unit->reduction = tu_tensor_hold(tt_empty(tt_shape(unit->elements), dtype, NULL));
        start_reductions(unit, parts);
        unit->all->counts.reductions++;
    }
    unit->reduced = true;
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
}

/* As the engine gives a leaf its gradient: hooks of the shard first. In a function that is compiled with its backward
 * what stands for the shard has none: the gradient leaves the graph there, and the shard's run outside. */
static void settle_member(tu_shard_unit *unit, tu_shard_member *member) {
    tt_tensor *shard = tu_stand_in(member->shard);
    tt_tensor *grad = tu_tensor_hold(tt_to(tu_shard_rows(unit->reduction, member), unit->dtype));
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

void tu_shard_settle(tu_shard_unit *unit) {
    tt_tensor *reduction = unit->reduction;
    if (reduction == NULL)
        return;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    if (unit->all->options.replicas != NULL)
        for (int i = 0; i < unit->count; i++)
            if (unit->in_reduction[i])
                tt_all_reduce_(part_of(reduction, unit->members[i].offset, unit->members[i].sent->numel),
                               unit->all->options.divisor != 0 ? TUTTI_SUM : TUTTI_AVG, unit->all->options.replicas);
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++)
        if (unit->in_reduction[i])
            settle_member(unit, &unit->members[i]);
    unit->reduction = NULL;
    tu_tensor_drop(reduction);
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
}
