/* SPDX-License-Identifier: Apache-2.0
 *
 * Exchanges between single ranks: all_to_all by splits, permutation, change of the sharded dimension, sends and
 * receives.
 */
#include <string.h>

#include "functional/operators.h"
#include "functional/registry.h"
#include "functional/rules.h"
#include "tensor/create.h"
#include "tensor/on_device.h"
#include "tensor/stage.h"

/* ---- all_to_all_single ---- */

static tutti_status check_splits(const tu_call *call, const char *what, tu_ints splits, int64_t rows, int64_t *total) {
    int64_t sum = 0;
    for (size_t i = 0; i < splits.count; i++) {
        if (splits.at[i] < 0)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s has the negative entry %lld for rank %zu", what,
                                 (long long)splits.at[i], i);
        sum += splits.at[i];
    }
    if (rows >= 0 && sum != rows)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s adds up to %lld, but dimension 0 of x has size %lld", what,
                             (long long)sum, (long long)rows);
    *total = sum;
    return TUTTI_OK;
}

/* What comes: the rows of out_splits, each like one of x. */
static tutti_status exchanged(const tu_call *call, const tt_tensor *x, tu_ints out_splits, tu_ints in_splits,
                              tu_shape *result) {
    int64_t goes, comes;
    if (x->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "a 0-dim tensor has no rows to exchange");
    tutti_status status = check_splits(call, "in_splits", in_splits, x->sizes[0], &goes);
    if (status == TUTTI_OK)
        status = check_splits(call, "out_splits", out_splits, -1, &comes);
    if (status != TUTTI_OK)
        return status;
    *result = tu_shape_of(x);
    result->sizes[0] = comes;
    return tu_shape_contiguous(call->entry->name, result);
}

static size_t row_elements(const tt_tensor *x) {
    size_t row = 1;
    for (int i = 1; i < x->ndim; i++)
        row *= (size_t)x->sizes[i];
    return row;
}

/* In a fake world nothing comes: the input as far as it goes, then zeros. */
static void fake_exchange(tt_tensor *out, const tt_tensor *from) {
    if (out->numel > from->numel)
        tu_fill(out, 0);
    tu_fake_copy(out, 0, from, 0, from->numel < out->numel ? from->numel : out->numel);
}

static tutti_status start_exchange(const tt_tensor *x, tt_tensor *out, tu_ints out_splits, tu_ints in_splits,
                                   tutti_group *group) {
    tt_tensor *from = tu_stage_in(x, x->dtype);
    size_t ranks = out_splits.count, row = row_elements(x);
    size_t bytes = 2 * ranks * sizeof(size_t), *counts = tu_block_alloc(tu_self(), bytes);
    if (from == NULL || counts == NULL) {
        tu_tensor_drop(from);
        tu_block_free(tu_self(), counts, bytes);
        return tu_error_memory("splits", bytes);
    }
    for (size_t i = 0; i < ranks; i++) {
        counts[i] = (size_t)out_splits.at[i] * row;
        counts[ranks + i] = (size_t)in_splits.at[i] * row;
    }
    if (tu_group_is_fake(group))
        fake_exchange(out, from);
    tu_flight_plan plan = { "all_to_all_single", group, .writes = out, .reads = from };
    tutti_status status = tutti_all_to_all_v(group, tu_pointer(from), counts + ranks, NULL, tu_pointer(out), counts,
                                             NULL, x->dtype, tu_flight_call(&plan));
    status = tu_flight_begin(status, &plan);
    tu_block_free(tu_self(), counts, bytes);
    tu_tensor_drop(from);
    return status;
}

tutti_status tu_all_to_all_single_shape(tu_call *call) {
    const tu_all_to_all_single_attributes *attributes = call->attributes;
    return exchanged(call, call->inputs[0], attributes->out_splits, attributes->in_splits, &call->results[0]);
}

tutti_status tu_all_to_all_single_everywhere(tu_call *call) {
    const tu_all_to_all_single_attributes *attributes = call->attributes;
    return start_exchange(call->inputs[0], call->outputs[0], attributes->out_splits, attributes->in_splits,
                          attributes->group);
}

/* The splits of a call: the caller's, or equal ones. False with the error pending. */
static bool find_splits(const char *who, const tt_tensor *x, const int64_t *out_splits, const int64_t *in_splits,
                        tutti_group *group, tu_ints *comes, tu_ints *goes) {
    int ranks = tutti_group_size(group);
    if (tu_pending_take(tu_tensor_check(who, "x", x)) != TUTTI_OK)
        return false;
    if ((out_splits == NULL) != (in_splits == NULL)) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: out_splits and in_splits are given together, or neither", who);
        return false;
    }
    if (x->ndim == 0 || (out_splits == NULL && x->sizes[0] % ranks != 0)) {
        tu_fail(x->ndim == 0 ? TUTTI_ERROR_RANGE : TUTTI_ERROR_ARGUMENT,
                "%s: dimension 0 of %s cannot be cut in %d equal parts", who, tu_describe(x), ranks);
        return false;
    }
    int64_t *equal = out_splits == NULL ? tu_scope_memory((size_t)ranks * sizeof *equal) : NULL;
    if (out_splits == NULL && equal == NULL)
        return false;
    for (int i = 0; equal != NULL && i < ranks; i++)
        equal[i] = x->sizes[0] / ranks;
    *comes = (tu_ints){ (size_t)ranks, out_splits != NULL ? out_splits : equal };
    *goes = (tu_ints){ (size_t)ranks, in_splits != NULL ? in_splits : equal };
    return true;
}

tt_tensor *tt_all_to_all_single(tt_tensor *x, const int64_t *out_splits, const int64_t *in_splits, tutti_group *group) {
    static const char who[] = "all_to_all_single";
    tu_ints comes, goes;
    return tu_flight_check(who, group, false) && find_splits(who, x, out_splits, in_splits, group, &comes, &goes)
               ? tu_all_to_all_single(x, comes, goes, group)
               : NULL;
}

/* ---- into a given tensor ---- */

tutti_status tu_all_to_all_out_shape(tu_call *call) {
    const tu_all_to_all_out_attributes *attributes = call->attributes;
    tu_shape wanted;
    tutti_status status = exchanged(call, call->inputs[1], attributes->out_splits, attributes->in_splits, &wanted);
    return status == TUTTI_OK ? tu_rule_out(call, &wanted, attributes->group) : status;
}

tutti_status tu_all_to_all_out_everywhere(tu_call *call) {
    const tu_all_to_all_out_attributes *attributes = call->attributes;
    return start_exchange(call->inputs[1], call->inputs[0], attributes->out_splits, attributes->in_splits,
                          attributes->group);
}

tt_tensor *tt_all_to_all_out(tt_tensor *out, tt_tensor *x, const int64_t *out_splits, const int64_t *in_splits,
                             tutti_group *group) {
    static const char who[] = "all_to_all_out";
    tu_ints comes, goes;
    return tu_flight_check(who, group, false) && find_splits(who, x, out_splits, in_splits, group, &comes, &goes) &&
                   tu_all_to_all_out(out, x, comes, goes, group, NULL)
               ? out
               : NULL;
}

tt_tensor *tu_all_to_all_out_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0));
    return tt_all_to_all_out(tt_zeros_like(x), x, NULL, NULL, sampler->group);
}

/* ---- a tensor from each rank, of as many rows as it has ---- */

tutti_status tu_all_gather_list_shape(tu_call *call) {
    const tu_all_gather_list_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    int me = tutti_group_rank(attributes->group);
    int64_t total;
    tutti_status status = check_splits(call, "rows", attributes->rows, -1, &total);
    if (status != TUTTI_OK)
        return status;
    if (x->ndim == 0 || x->sizes[0] != attributes->rows.at[me])
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "x is %s and must have the %lld rows that rows[%d] says",
                             tu_describe(x), (long long)attributes->rows.at[me], me);
    call->results[0] = tu_shape_of(x);
    call->results[0].sizes[0] = total;
    return tu_shape_contiguous("all_gather_list", &call->results[0]);
}

/* Elements of each rank, in memory of the thread; NULL with the error written. */
static size_t *counts_of(tu_ints rows, size_t row) {
    size_t bytes = rows.count * sizeof(size_t), *counts = tu_block_alloc(tu_self(), bytes);
    if (counts == NULL)
        tu_error_memory("the rows of each rank", bytes);
    for (size_t i = 0; counts != NULL && i < rows.count; i++)
        counts[i] = (size_t)rows.at[i] * row;
    return counts;
}

/* Every rank of a fake group has what this one has; where that is less than its part, zeros follow. */
static void fake_gather_rows(tt_tensor *out, const tt_tensor *from, size_t ranks, const size_t *counts) {
    int64_t at = 0;
    tu_fill(out, 0);
    for (size_t i = 0; i < ranks; at += (int64_t)counts[i++])
        tu_fake_copy(out, at, from, 0, (int64_t)counts[i] < from->numel ? (int64_t)counts[i] : from->numel);
}

/* Gathers as many rows from each rank as it has, or scatters the sum of them. */
static tutti_status start_rows(tu_call *call, tu_ints rows, tutti_group *group, bool gathers) {
    tt_tensor *out = call->outputs[0], *from = tu_stage_in(call->inputs[0], call->inputs[0]->dtype);
    size_t *counts = from != NULL ? counts_of(rows, row_elements(from)) : NULL;
    tutti_status status = counts == NULL ? TUTTI_ERROR_MEMORY : TUTTI_OK;
    tu_flight_plan plan = { call->entry->name, group, .writes = out, .reads = from };
    const tutti_call *options = tu_flight_call(&plan);
    if (status == TUTTI_OK && gathers) {
        if (tu_group_is_fake(group))
            fake_gather_rows(out, from, rows.count, counts);
        else
            status = tutti_all_gather_v(group, tu_pointer(from), tu_pointer(out), counts, NULL, out->dtype, options);
    } else if (status == TUTTI_OK) {
        if (tu_group_is_fake(group))
            fake_exchange(out, from);
        status =
            tutti_reduce_scatter_v(group, tu_pointer(from), tu_pointer(out), counts, out->dtype, TUTTI_SUM, options);
    }
    status = tu_flight_begin(status, &plan);
    tu_block_free(tu_self(), counts, rows.count * sizeof(size_t));
    tu_tensor_drop(from);
    return status;
}

tutti_status tu_all_gather_list_everywhere(tu_call *call) {
    const tu_all_gather_list_attributes *attributes = call->attributes;
    return start_rows(call, attributes->rows, attributes->group, true);
}

/* The way back of its gradient: the sum of this rank's rows. */
tutti_status tu_reduce_scatter_rows_shape(tu_call *call) {
    const tu_reduce_scatter_rows_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    int64_t total;
    tutti_status status = check_splits(call, "rows", attributes->rows, x->ndim == 0 ? 0 : x->sizes[0], &total);
    if (status != TUTTI_OK)
        return status;
    call->results[0] = tu_shape_of(x);
    call->results[0].sizes[0] = attributes->rows.at[tutti_group_rank(attributes->group)];
    return tu_shape_contiguous("reduce_scatter_rows", &call->results[0]);
}

tutti_status tu_reduce_scatter_rows_everywhere(tu_call *call) {
    const tu_reduce_scatter_rows_attributes *attributes = call->attributes;
    return start_rows(call, attributes->rows, attributes->group, false);
}

/* A gradient's collective is told like any other that a rank reaches with an error pending. */
tt_tensor *tu_scatter_rows_back(tt_tensor *grad, tu_ints rows, tutti_group *group) {
    return tu_flight_check("reduce_scatter_rows", group, false) ? tu_reduce_scatter_rows(grad, rows, group) : NULL;
}

tt_tensor *tu_gather_rows_back(tt_tensor *grad, tu_ints rows, tutti_group *group) {
    return tu_flight_check("all_gather_list", group, false) ? tu_all_gather_list(grad, rows, group) : NULL;
}

/* Views of what was gathered, none of which waits. */
static tt_tensor_list parts_of_list(tt_tensor *whole, tu_ints rows, bool single) {
    tt_tensor **parts = tu_scope_memory(rows.count * sizeof *parts);
    int64_t start = 0;
    for (size_t i = 0; parts != NULL && i < rows.count; start += rows.at[i++])
        parts[i] = single ? tt_select(whole, 0, start) : tt_narrow(whole, 0, start, rows.at[i]);
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of(rows.count, parts) : (tt_tensor_list){ 0, tu_nothing };
}

tt_tensor_list tt_all_gather_list(tt_tensor *x, const int64_t *rows, tutti_group *group) {
    tt_tensor_list none = { 0, tu_nothing };
    if (!tu_flight_check("all_gather_list", group, false) ||
        tu_pending_take(tu_tensor_check("all_gather_list", "x", x)) != TUTTI_OK)
        return none;
    size_t ranks = (size_t)tutti_group_size(group);
    bool single = x->ndim == 0;
    tt_tensor *lying = single ? tt_view(x, tt_shape(1)) : x;
    int64_t *equal = lying != NULL && rows == NULL ? tu_scope_memory(ranks * sizeof *equal) : NULL;
    for (size_t i = 0; equal != NULL && i < ranks; i++)
        equal[i] = lying->sizes[0];
    tu_ints wanted = { ranks, rows != NULL ? rows : equal };
    tt_tensor *whole = lying != NULL && wanted.at != NULL ? tu_all_gather_list(lying, wanted, group) : NULL;
    return whole != NULL ? parts_of_list(whole, wanted, single) : none;
}

tt_tensor *tu_all_gather_list_sample(tu_sampler *sampler) {
    tt_tensor *x = sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0);
    tt_tensor_list list = tt_all_gather_list(x, NULL, sampler->group);
    return list.count == 1 ? list.at[0] : NULL;
}

/* ---- permutation ---- */

tt_tensor *tt_permute_ranks(tt_tensor *x, const int *to, tutti_group *group) {
    if (!tu_flight_check("permute_ranks", group, false) ||
        tu_pending_take(tu_tensor_check("permute_ranks", "x", x)) != TUTTI_OK)
        return NULL;
    int ranks = tutti_group_size(group), me = tutti_group_rank(group), sources = 0;
    bool single = x->ndim == 0;
    tt_tensor *rows = single ? tt_view(x, tt_shape(1)) : x;
    int64_t *splits = tu_scope_memory(2 * (size_t)ranks * sizeof *splits);
    if (rows == NULL || splits == NULL)
        return NULL;
    for (int i = 0; i < ranks; i++) {
        if (to == NULL || to[i] < -1 || to[i] >= ranks) {
            tu_fail(TUTTI_ERROR_RANGE, "permute_ranks: rank %d is sent to %d, which is no rank of the group of %d", i,
                    to != NULL ? to[i] : 0, ranks);
            return NULL;
        }
        splits[i] = to[i] == me ? rows->sizes[0] : 0;
        splits[ranks + i] = to[me] == i ? rows->sizes[0] : 0;
        sources += to[i] == me;
    }
    if (to[me] < 0 && (rows = tt_narrow(rows, 0, 0, 0)) == NULL)
        return NULL;
    tt_tensor *result = tt_all_to_all_single(rows, splits, splits + ranks, group);
    return single && sources == 1 ? tt_view(result, tt_shape()) : result;
}

/* ---- another dimension sharded ---- */

tt_tensor *tt_shard_dim_all_to_all(tt_tensor *x, int gather_dim, int shard_dim, tutti_group *group) {
    int gather, shard;
    if (!tu_flight_check("shard_dim_all_to_all", group, false) ||
        tu_pending_take(tu_tensor_check("shard_dim_all_to_all", "x", x)) != TUTTI_OK ||
        tu_pending_take(tu_wrap_dim("shard_dim_all_to_all", gather_dim, x->ndim, &gather)) != TUTTI_OK ||
        tu_pending_take(tu_wrap_dim("shard_dim_all_to_all", shard_dim, x->ndim, &shard)) != TUTTI_OK)
        return NULL;
    int ranks = tutti_group_size(group);
    if (x->ndim == 0 || x->ndim == TT_MAX_DIMS || x->sizes[shard] % ranks != 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "shard_dim_all_to_all: dimension %d of %s is not divisible by the %d ranks of the group", shard,
                tu_describe(x), ranks);
        return NULL;
    }
    /* The n parts of shard_dim become rows, are exchanged, and are joined along gather_dim. */
    tt_tensor *rows = tt_stack(tt_chunk(x, ranks, shard), 0);
    tt_tensor *exchanged = tt_wait(tt_all_to_all_single(rows, NULL, NULL, group));
    tt_tensor_list parts = tt_chunk(exchanged, ranks, 0);
    tt_tensor **single = tu_scope_memory(((size_t)ranks + 1) * sizeof *single);
    for (size_t i = 0; single != NULL && i < parts.count; i++)
        single[i] = tt_squeeze(parts.at[i], 0);
    return tu_self()->pending == TUTTI_OK ? tt_cat(tt_tensors_of(parts.count, single), gather) : NULL;
}

/* ---- sends and receives ---- */

/* The result is an empty tensor, which is complete when x has been sent. */
tutti_status tu_isend_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    call->results[0] =
        (tu_shape){ .dtype = x->dtype, .device = call->device, .ndim = 1, .sizes = { 0 }, .strides = { 1 } };
    return TUTTI_OK;
}

tutti_status tu_isend_everywhere(tu_call *call) {
    const tu_isend_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    tt_tensor *from = tu_stage_in(x, x->dtype);
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_flight_plan plan = { "isend", attributes->group, .writes = call->outputs[0], .reads = from, .sends = x };
    tutti_status status = tutti_send(attributes->group, tu_pointer(from), (size_t)x->numel, x->dtype, attributes->to,
                                     attributes->tag, tu_flight_call(&plan));
    status = tu_flight_begin(status, &plan);
    tu_tensor_drop(from);
    return status;
}

tutti_status tu_irecv_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    if (call->device != TUTTI_META && !(x->flags & TU_CONTIGUOUS))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s is not contiguous, and receiving does not copy",
                             tu_describe(x));
    return TUTTI_OK;
}

tutti_status tu_irecv_everywhere(tu_call *call) {
    const tu_irecv_attributes *attributes = call->attributes;
    tt_tensor *x = call->inputs[0];
    tu_flight_plan plan = { "irecv", attributes->group, .writes = x };
    tutti_status status = tutti_recv(attributes->group, tu_pointer(x), (size_t)x->numel, x->dtype, attributes->from,
                                     attributes->tag, tu_flight_call(&plan));
    return tu_flight_begin(status, &plan);
}

tt_tensor *tt_isend(tt_tensor *x, int to, int tag, tutti_group *group) {
    return tu_flight_check("isend", group, tu_is_meta(x)) ? tu_isend(x, to, tag, group) : NULL;
}

tt_tensor *tt_irecv(tt_tensor *x, int from, int tag, tutti_group *group) {
    return tu_flight_check("irecv", group, tu_is_meta(x)) && tu_irecv(x, from, tag, group, NULL) ? x : NULL;
}

/* A message to oneself, and back: both sides of it are samples. */
static tt_tensor *to_oneself(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0));
    if (x != NULL && tu_on_device(x)) /* where a group meets before its ranks exchange messages */
        tt_wait(tt_all_reduce(x, TUTTI_SUM, sampler->group));
    tt_p2p both[] = { { TT_P2P_SEND, x, 0, 1 }, { TT_P2P_RECV, tt_zeros_like(x), 0, 1 } };
    tt_tensor_list done = tt_batch_p2p(2, both, sampler->group);
    return done.count == 2 ? tt_wait(done.at[1]) : NULL;
}

tt_tensor *tu_isend_sample(tu_sampler *sampler) {
    return to_oneself(sampler);
}

tt_tensor *tu_irecv_sample(tu_sampler *sampler) {
    return to_oneself(sampler);
}

/* Waiting inside a batch would never end, so that everything is ready before it opens. */
static bool ready(const tt_p2p *operation) {
    const tt_tensor *x = operation->tensor;
    if (tu_pending_take(tu_tensor_check("batch_p2p", "x", x)) != TUTTI_OK)
        return false;
    if (x->device == TUTTI_META || tu_is_capturing())
        return true;
    return tu_pending_take(tu_tensor_ready("batch_p2p", "x", x)) == TUTTI_OK &&
           (operation->kind != TT_P2P_RECV || tu_pending_take(tu_storage_wait_write(x->storage)) == TUTTI_OK);
}

/* Nothing is sent where all tensors are on meta. */
static bool all_on_meta(size_t count, const tt_p2p *operations) {
    for (size_t i = 0; i < count; i++)
        if (!tu_is_meta(operations[i].tensor))
            return false;
    return count > 0;
}

/* Whether every operation can begin; else the error is pending. */
static bool check_batch(size_t count, const tt_p2p *operations) {
    for (size_t i = 0; i < count && tu_self()->pending == TUTTI_OK; i++) {
        if (operations[i].kind != TT_P2P_SEND && operations[i].kind != TT_P2P_RECV)
            tu_fail(TUTTI_ERROR_ARGUMENT, "batch_p2p: operation %zu is neither a send nor a receive", i);
        else
            ready(&operations[i]);
    }
    return tu_self()->pending == TUTTI_OK;
}

/* On a device messages are enqueued one after the other, and a long one waits for its receiver. So that nobody waits in
 * a circle, every rank goes through its pairs in the same order, the lower rank of a pair sends first, and the higher
 * one receives first. */
static int64_t place_of(const tt_p2p *operation, int rank, int ranks) {
    int low = operation->peer < rank ? operation->peer : rank, high = operation->peer < rank ? rank : operation->peer;
    bool first = (operation->kind == TT_P2P_SEND) == (rank == low);
    return ((int64_t)low * ranks + high) * 2 + !first;
}

static void order_messages(size_t count, const tt_p2p *operations, tutti_group *group, size_t *order) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    for (size_t i = 0; i < count; i++) { /* those of one place stay in the order in which they were given */
        size_t at = i;
        int64_t place = place_of(&operations[i], rank, ranks);
        while (at > 0 && tu_on_device(operations[i].tensor) &&
               place_of(&operations[order[at - 1]], rank, ranks) > place) {
            order[at] = order[at - 1];
            at--;
        }
        order[at] = i;
    }
}

tt_tensor_list tt_batch_p2p(size_t count, const tt_p2p *operations, tutti_group *group) {
    tt_tensor_list none = { 0, tu_nothing };
    bool listed = count == 0 || operations != NULL, shapes_only = listed && all_on_meta(count, operations);
    if (!tu_flight_check("batch_p2p", group, shapes_only))
        return none;
    if (!listed)
        tu_fail(TUTTI_ERROR_ARGUMENT, "batch_p2p: %zu operations, and the list of them is NULL", count);
    tt_tensor **results = listed ? tu_scope_memory((count + 1) * sizeof *results) : NULL;
    size_t *order = listed ? tu_scope_memory((count + 1) * sizeof *order) : NULL;
    bool moves = !shapes_only && !tu_is_capturing(); /* a graph has the operations one by one */
    if (results == NULL || order == NULL || !check_batch(count, operations) ||
        (moves && tu_pending_take(tu_batch_open("batch_p2p", group)) != TUTTI_OK))
        return none;
    if (moves)
        order_messages(count, operations, group, order);
    for (size_t i = 0; !moves && i < count; i++)
        order[i] = i;
    for (size_t k = 0; k < count && tu_self()->pending == TUTTI_OK; k++) {
        size_t i = order[k];
        const tt_p2p *one = &operations[i];
        results[i] = one->tensor;
        if (one->kind == TT_P2P_SEND)
            results[i] = tu_isend(one->tensor, one->peer, one->tag, group);
        else
            tu_irecv(one->tensor, one->peer, one->tag, group, NULL);
    }
    if (moves)
        tu_pending_take(tu_batch_close(group, tu_self()->pending == TUTTI_OK));
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of(count, results) : none;
}
