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
#include "functional/symmetric.h"

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
    member->rows = x->ndim > 0 ? x->sizes[member->dim] : 1;
    member->width = member->rows > 0 ? x->numel / member->rows : 0;
    member->part = (member->rows + ranks - 1) / ranks;
    int64_t left = member->rows - rank * member->part;
    member->own = left < 0 ? 0 : left < member->part ? left : member->part;
    member->offset = unit->elements;
    int64_t line = LINE / (int64_t)tu_dtype_bytes[unit->dtype];
    unit->elements += (member->part * member->width + line - 1) / line * line;
}

static tt_tensor *part_of(tt_tensor *flat, int64_t offset, int64_t elements) {
    return tt_narrow(flat, 0, offset, elements);
}

/* Of a number: one element or none. */
tt_tensor *tu_shard_shaped(tt_tensor *flat, const tu_shard_member *member, int64_t rows) {
    int ndim = member->shape.ndim > 0 ? member->shape.ndim : 1, dim = member->dim;
    int64_t sizes[TT_MAX_DIMS] = { rows }, order[TT_MAX_DIMS];
    for (int i = 0; i < ndim; i++) {
        if (i != dim)
            sizes[i < dim ? i + 1 : i] = member->shape.sizes[i];
        order[i] = i < dim ? i + 1 : i == dim ? 0 : i;
    }
    tt_tensor *rows_first = tt_view(flat, tt_dims_of(ndim, sizes));
    return dim == 0 ? rows_first : tt_permute(rows_first, tt_dims_of(ndim, order));
}

/* The other way: a whole parameter or gradient, its rows one after the other. */
static tt_tensor *flattened(const tu_shard_member *member, tt_tensor *x) {
    int64_t order[TT_MAX_DIMS] = { member->dim };
    for (int i = 0, at = 1; i < member->shape.ndim; i++)
        if (i != member->dim)
            order[at++] = i;
    tt_tensor *rows_first = member->dim == 0 ? x : tt_permute(x, tt_dims_of(member->shape.ndim, order));
    return tt_view(tt_contiguous(rows_first), tt_shape(x->numel));
}

tt_tensor *tu_shard_rows(tt_tensor *flat, const tu_shard_member *member) {
    return tu_shard_shaped(part_of(flat, member->offset, member->own * member->width), member, member->own);
}

tt_tensor *tu_shard_own(tt_tensor *whole, const tu_shard_member *member) {
    int64_t first = member->own > 0 ? tutti_group_rank(member->unit->all->group) * member->part : 0;
    tt_tensor *rows = member->shape.ndim > 0 ? whole : tt_view(whole, tt_shape(1));
    return tt_narrow(rows, member->dim, first, member->own);
}

/* Says whose memory this rank has mapped; NULL: all of it, in a fake world, or with the error pending. */
static tutti_peers *meet(const tt_tensor *x, tutti_group *group) {
    tu_symm_place place;
    tutti_peers *peers = NULL;
    if (tu_self()->pending == TUTTI_OK && !tu_group_is_fake(group) && x->device != TUTTI_META && !x->storage->fake)
        tu_pending_take(tu_symm_meet("fully_shard", "a flat shard", x, group, &place, &peers));
    return peers;
}

tt_tensor **tu_shard_peers(tt_tensor *x, tutti_group *group) {
    int count = tutti_group_size(group);
    tt_tensor **peers = calloc((size_t)count, sizeof(tt_tensor *));
    if (peers == NULL)
        tu_pending_take(tu_error_memory("the shards of peers", (size_t)count * sizeof(tt_tensor *)));
    tutti_peers *mapped = peers != NULL ? meet(x, group) : NULL;
    for (int i = 0; peers != NULL && i < count && tu_self()->pending == TUTTI_OK; i++)
        if (mapped == NULL || tutti_peers_buffer(mapped, i) != NULL)
            peers[i] = tu_tensor_hold(tt_peer_tensor(x, i, group));
    tutti_peers_release(mapped);
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
    tt_tensor **held[] = { &unit->shard,     &unit->sent,    &unit->whole, &unit->kept,
                           &unit->reduction, &unit->partial, &unit->home };
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) {
        tu_tensor_drop(*held[i]);
        *held[i] = NULL;
    }
    free(unit->in_reduction);
    free(unit->in_partial);
    unit->in_reduction = unit->in_partial = NULL;
    unit->elements = 0;
    unit->arrivals = 0;
    unit->gathered = unit->hidden = unit->reduced = unit->comes_home = false;
}

int64_t tu_shard_part_elements(const tu_shard_member *member) {
    return member->part * member->width;
}

static void cut_member(tu_shard_unit *unit, tu_shard_member *member) {
    int ranks = tutti_group_size(unit->all->group);
    int64_t elements = tu_shard_part_elements(member);
    tt_tensor *shard = tu_shard_rows(unit->shard, member);
    tt_copy_(shard, tu_shard_own(member->original, member));
    member->shard = tu_tensor_hold(tt_parameter(shard, member->trained));
    if (member->shard != NULL)
        member->shard->flags |= TU_SHARD;
    if (unit->sent != NULL)
        member->sent = tu_tensor_hold(part_of(unit->sent, member->offset, elements));
    member->landing = tu_tensor_hold(part_of(unit->whole, ranks * member->offset, ranks * elements));
    tt_tensor *rows = part_of(member->landing, 0, member->rows * member->width);
    tt_tensor *whole = member->shape.ndim > 0 ? tu_shard_shaped(rows, member, member->rows) : tt_view(rows, tt_shape());
    member->whole = tu_tensor_hold(tt_parameter(whole, member->trained));
}

static tt_tensor *symmetric_flat(const tu_shard_unit *unit, tutti_dtype dtype) {
    if (tu_offload_is_pinned(unit))
        return tu_offload_shard(unit, dtype);
    return tt_symm_empty(tutti_group_world(unit->all->group), tt_shape(unit->elements), dtype,
                         TUTTI_OPTIONS(tt_symm_options, .device = unit->device));
}

/* Flat, where it is computed, for the parts of so many ranks. */
static tt_tensor *plain_flat(const tu_shard_unit *unit, int64_t ranks, tutti_dtype dtype) {
    return tt_empty(tt_shape(ranks * unit->elements), dtype,
                    TUTTI_OPTIONS(tt_options, .device = unit->gathered_device));
}

/* The parts of how many ranks a rank keeps after a forward. */
static int kept_parts(const tt_fully_sharded *all) {
    return all->near != NULL ? tutti_group_size(all->group) / tutti_group_size(all->near) : 0;
}

static void make_tensors(tu_shard_unit *unit) {
    tt_fully_sharded *all = unit->all;
    unit->shard = tu_tensor_hold(symmetric_flat(unit, unit->dtype));
    if (!tu_shard_is_offloaded(unit))
        unit->sent = tu_tensor_hold(unit->gathered_dtype == unit->dtype ? unit->shard
                                                                        : symmetric_flat(unit, unit->gathered_dtype));
    unit->whole = tu_tensor_hold(plain_flat(unit, tutti_group_size(all->group), unit->gathered_dtype));
    unit->peers = tu_shard_peers(unit->shard, all->group);
    if (unit->sent != NULL && unit->sent != unit->shard)
        tt_peer_tensor(unit->sent, tutti_group_rank(all->group),
                       all->group); /* gathers read it where it lies from now on */
    if (all->near != NULL)
        unit->kept = tu_tensor_hold(plain_flat(unit, kept_parts(all), unit->gathered_dtype));
}

tutti_status tu_shard_cut(tu_shard_unit *unit) {
    tt_fully_sharded *all = unit->all;
    for (int i = 0; i < unit->count; i++)
        measure(unit, &unit->members[i]);
    if (unit->count == 0)
        return TUTTI_OK;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    unit->in_reduction = calloc((size_t)unit->count, sizeof *unit->in_reduction);
    unit->in_partial = calloc((size_t)unit->count, sizeof *unit->in_partial);
    if (unit->in_reduction == NULL || unit->in_partial == NULL)
        tu_pending_take(tu_error_memory("a unit of parameters", (size_t)unit->count));
    make_tensors(unit);
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++)
        cut_member(unit, &unit->members[i]);
    if (tu_self()->pending == TUTTI_OK && tt_storage_resize(unit->whole, 0) && unit->kept != NULL)
        tt_storage_resize(unit->kept, 0);
    all->changes++;
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

static size_t bytes_of(const tt_tensor *flat) {
    return (size_t)flat->numel * tu_dtype_bytes[flat->dtype];
}

static size_t whole_bytes(const tu_shard_unit *unit) {
    return bytes_of(unit->whole);
}

/* What a compiled function gathers or frees it does to the storage alone, so the storage tells; a capture learns that
 * it was asked. */
static bool has_memory(tt_tensor *flat) {
    tt_tensor *asked = tu_stand_in(flat);
    return asked != NULL && (tu_self()->pending != TUTTI_OK || tu_note_asked(asked, TU_ASKED_BYTES)) &&
           asked->storage->bytes > 0;
}

bool tu_shard_is_gathered(const tu_shard_unit *unit) {
    return unit->whole == NULL || whole_bytes(unit) == 0 ? unit->gathered : has_memory(unit->whole);
}

static bool is_kept(const tu_shard_unit *unit) {
    return unit->kept != NULL && bytes_of(unit->kept) > 0 && has_memory(unit->kept);
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

/* Flat, of the type and on the device that are computed with: this rank's parts. */
static tt_tensor *to_be_sent(tu_shard_unit *unit) {
    if (unit->sent == unit->shard)
        return unit->shard;
    return unit->sent != NULL ? tt_copy_(unit->sent, unit->shard) : tu_offload_up(unit);
}

/* A member's part of what is kept, and where it lies in the whole. */
static tt_tensor *kept_part(const tu_shard_unit *unit, const tu_shard_member *member) {
    int parts = kept_parts(unit->all);
    return part_of(unit->kept, parts * member->offset, parts * tu_shard_part_elements(member));
}

/* What a unit sends, without its tensors. */
static tt_shard_transfer transfer_of(const tu_shard_unit *unit, tutti_group *group, size_t count, tt_tensor **parts,
                                     tt_tensor **wholes) {
    return (tt_shard_transfer){
        .size = sizeof(tt_shard_transfer),
        .unit = unit->name,
        .parts = tt_tensors_of(count, parts),
        .wholes = tt_tensors_of(count, wholes),
        .group = group,
        .divisor = unit->all->options.divisor,
    };
}

static bool is_whole_transfer(const char *who, const tt_shard_transfer *transfer) {
    if (tu_self()->pending == TUTTI_OK && (transfer == NULL || transfer->parts.count != transfer->wholes.count))
        tu_fail(TUTTI_ERROR_ARGUMENT,
                transfer == NULL ? "%s: transfer is NULL" : "%s: there are not as many parts as wholes", who);
    return tu_self()->pending == TUTTI_OK;
}

void tt_shard_gather(void *user, const tt_shard_transfer *transfer) {
    (void)user;
    if (!is_whole_transfer("shard_gather", transfer) || transfer->parts.count == 0 ||
        !batch_begin("all_gather", transfer->group))
        return;
    for (size_t i = 0; i < transfer->parts.count && tu_self()->pending == TUTTI_OK; i++)
        tt_all_gather_out(transfer->wholes.at[i], transfer->parts.at[i], transfer->group);
    batch_end(transfer->group);
}

static void start_gathers(tu_shard_unit *unit, bool from_near) {
    const tt_fully_sharded_options *options = &unit->all->options;
    size_t count = 0;
    tt_tensor **parts = tu_scope_memory(((size_t)unit->count + 1) * sizeof *parts);
    tt_tensor **wholes = tu_scope_memory(((size_t)unit->count + 1) * sizeof *wholes);
    show_shards(unit);
    tt_tensor *sent = from_near ? NULL : to_be_sent(unit);
    for (int i = 0; wholes != NULL && parts != NULL && i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        const tu_shard_member *member = &unit->members[i];
        int64_t elements = tu_shard_part_elements(member);
        if (elements == 0)
            continue;
        parts[count] = from_near              ? kept_part(unit, member)
                       : member->sent != NULL ? member->sent
                                              : part_of(sent, member->offset, elements);
        wholes[count++] = member->landing;
    }
    if (tu_self()->pending != TUTTI_OK)
        return;
    tt_shard_transfer transfer =
        transfer_of(unit, from_near ? unit->all->near : unit->all->group, count, parts, wholes);
    tt_preserve *preserve = tt_preserve_begin(tt_tensors(unit->whole)); /* autograd may have saved what is refilled */
    (options->gather != NULL ? options->gather : tt_shard_gather)(options->user, &transfer);
    tt_preserve_end(preserve);
}

/* Rises with every write to a shard. */
static uint64_t versions_of(const tu_shard_unit *unit) {
    uint64_t versions = 0;
    for (int i = 0; i < unit->count; i++)
        versions += tt_version(unit->members[i].shard);
    return versions;
}

/* What a backward left whole is used again where shards are still what it was made of. */
static void take_up(tu_shard_unit *unit) {
    if (!unit->hidden || tu_self()->pending != TUTTI_OK)
        return;
    unit->hidden = false;
    unit->pass = unit->all->pass;
    if (tu_is_capturing() || !tu_shard_is_gathered(unit) || versions_of(unit) != unit->versions)
        tu_shard_free(unit);
    else
        put_in_slots(unit, true);
}

static void gather(tu_shard_unit *unit, bool back) {
    take_up(unit);
    if (unit->count == 0 || tu_self()->pending != TUTTI_OK || tu_shard_is_gathered(unit))
        return;
    tt_fully_sharded_counts *counts = &unit->all->counts;
    void *before;
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
        unit->versions = versions_of(unit);
        bool copied = tu_offload_begin(unit, TU_OFFLOAD_UP, &before);
        start_gathers(unit, back && is_kept(unit));
        if (copied)
            tu_offload_end(unit, before, unit->all->options.gather != NULL);
        put_in_slots(unit, true);
    }
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
}

void tu_shard_gather(tu_shard_unit *unit) {
    gather(unit, false);
}

void tu_shard_gather_back(tu_shard_unit *unit) {
    if (!unit->not_back)
        gather(unit, true);
}

void tu_shard_free(tu_shard_unit *unit) {
    tu_pending_copy error;
    bool gathered = tu_shard_is_gathered(unit), kept = is_kept(unit);
    if (!gathered && !kept)
        return;
    tu_pending_save(&error);
    tt_scope scope = tt_scope_open();
    tell(unit, TT_SHARD_FREE);
    if (gathered)
        put_in_slots(unit, false);
    if (gathered)
        tt_storage_resize(unit->whole, 0);
    if (kept)
        tt_storage_resize(unit->kept, 0);
    unit->gathered = unit->hidden = false;
    tu_scope_leave(&scope);
    if (error.status != TUTTI_OK) {
        tt_error_clear();
        tu_pending_restore(&error);
    }
}

void tu_shard_leave(tu_shard_unit *unit) {
    bool stays = unit->keep_backward && !tu_is_capturing() && tu_self()->pending == TUTTI_OK && !unit->hidden;
    if (!stays || !tu_shard_is_gathered(unit)) {
        if (!unit->hidden)
            tu_shard_free(unit);
        return;
    }
    put_in_slots(unit, false);
    unit->hidden = true;
    if (is_kept(unit))
        tt_storage_resize(unit->kept, 0);
}

void tu_shard_shrink(tu_shard_unit *unit) {
    if (unit->kept == NULL || tu_self()->pending != TUTTI_OK || !tu_shard_is_gathered(unit)) {
        tu_shard_free(unit);
        return;
    }
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    tell(unit, TT_SHARD_SHRINK);
    tt_storage_resize(unit->kept, bytes_of(unit->kept));
    for (int i = 0; i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        const tu_shard_member *member = &unit->members[i];
        int64_t elements = kept_parts(unit->all) * tu_shard_part_elements(member);
        if (elements > 0)
            tt_copy_(kept_part(unit, member),
                     part_of(member->landing, tutti_group_rank(unit->all->near) * elements, elements));
    }
    put_in_slots(unit, false);
    tt_storage_resize(unit->whole, 0);
    unit->gathered = false;
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
}

/* ---- gradients ---- */

/* A whole gradient as the ranks' parts one after the other, padded with zeros, in the dtype that is reduced. */
static tt_tensor *parts_of(const tu_shard_member *member, tt_tensor *grad, tutti_dtype dtype) {
    int64_t elements = member->landing->numel;
    tt_tensor *rows = flattened(member, grad);
    if (grad->numel == elements)
        return tt_to(rows, dtype);
    tt_tensor *padded = tt_zeros(tt_shape(elements), dtype, TUTTI_OPTIONS(tt_options, .device = tt_device_of(grad)));
    tt_copy_(part_of(padded, 0, grad->numel), rows);
    return padded;
}

void tt_shard_reduce(void *user, const tt_shard_transfer *transfer) {
    (void)user;
    if (!is_whole_transfer("shard_reduce", transfer) || transfer->parts.count == 0 ||
        !batch_begin("reduce_scatter", transfer->group))
        return;
    for (size_t i = 0; i < transfer->parts.count && tu_self()->pending == TUTTI_OK; i++) {
        tt_tensor *out = transfer->parts.at[i], *whole = transfer->wholes.at[i];
        if (transfer->divisor != 0)
            tt_reduce_scatter_premul_out(out, whole, 1 / transfer->divisor, transfer->group);
        else
            tt_reduce_scatter_out(out, whole, TUTTI_AVG, transfer->group);
    }
    batch_end(transfer->group);
}

static void start_reductions(tu_shard_unit *unit, tt_tensor **gradients) {
    const tt_fully_sharded_options *options = &unit->all->options;
    size_t count = 0;
    tt_tensor **parts = tu_scope_memory(((size_t)unit->count + 1) * sizeof *parts);
    tt_tensor **wholes = tu_scope_memory(((size_t)unit->count + 1) * sizeof *wholes);
    for (int i = 0; parts != NULL && wholes != NULL && i < unit->count && tu_self()->pending == TUTTI_OK; i++) {
        const tu_shard_member *member = &unit->members[i];
        if (gradients[i] == NULL || tu_shard_part_elements(member) == 0)
            continue;
        parts[count] = part_of(unit->reduction, member->offset, tu_shard_part_elements(member));
        wholes[count++] = gradients[i];
    }
    if (tu_self()->pending != TUTTI_OK)
        return;
    tt_shard_transfer transfer = transfer_of(unit, unit->all->group, count, parts, wholes);
    (options->reduce != NULL ? options->reduce : tt_shard_reduce)(options->user, &transfer);
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

/* A reduction keeps the whole gradients until somebody waits for it: those of one unit at a time. */
static void end_previous_reduction(tt_fully_sharded *all) {
    tu_shard_unit *before = all->reducing;
    if (before != NULL && before->reduction != NULL && !tu_is_capturing() && !before->reduction->storage->fake) {
        tt_wait(before->reduction);
        tu_offload_down_early(before);
    }
    all->reducing = NULL;
}

void tu_shard_reduce(tu_shard_unit *unit) {
    if (unit->reduced || unit->count == 0 || tu_self()->pending != TUTTI_OK)
        return;
    tt_scope scope = tt_scope_open();
    bool recording = tt_grad_mode(false);
    end_previous_reduction(unit->all);
    tutti_dtype dtype = 0;
    tt_tensor **parts = tu_scope_memory((size_t)unit->count * sizeof *parts);
    for (int i = 0; parts != NULL && i < unit->count; i++)
        parts[i] = NULL;
    if (parts != NULL && take_gradients(unit, parts, &dtype)) {
        tell(unit, TT_SHARD_REDUCE);
        unit->reduction = tu_tensor_hold(plain_flat(unit, 1, dtype));
        start_reductions(unit, parts);
        unit->all->reducing = unit;
        unit->all->counts.reductions++;
    }
    unit->reduced = true;
    tt_grad_mode(recording);
    tu_scope_leave(&scope);
}
