/* SPDX-License-Identifier: Apache-2.0
 *
 * Exchanges between single ranks: all_to_all by splits, permutation, change of the sharded dimension, sends and
 * receives.
 */
#include <string.h>

#include "functional/operators.h"
#include "functional/registry.h"
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

tutti_status tu_all_to_all_single_shape(tu_call *call) {
    const tu_all_to_all_single_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    int64_t goes, comes;
    if (x->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "a 0-dim tensor has no rows to exchange");
    tutti_status status = check_splits(call, "in_splits", attributes->in_splits, x->sizes[0], &goes);
    if (status == TUTTI_OK)
        status = check_splits(call, "out_splits", attributes->out_splits, -1, &comes);
    if (status != TUTTI_OK)
        return status;
    call->results[0] = tu_shape_of(x);
    call->results[0].sizes[0] = comes;
    return tu_shape_contiguous("all_to_all_single", &call->results[0]);
}

tutti_status tu_all_to_all_single_cpu(tu_call *call) {
    const tu_all_to_all_single_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    tt_tensor *out = call->outputs[0], *from = tu_stage_in(x, x->dtype);
    size_t ranks = attributes->out_splits.count;
    size_t row = 1, bytes = 2 * ranks * sizeof(size_t), *counts = tu_block_alloc(tu_self(), bytes);
    for (int i = 1; i < x->ndim; i++)
        row *= (size_t)x->sizes[i];
    if (from == NULL || counts == NULL) {
        tu_tensor_drop(from);
        tu_block_free(tu_self(), counts, bytes);
        return tu_error_memory("splits", bytes);
    }
    for (size_t i = 0; i < ranks; i++) {
        counts[i] = (size_t)attributes->out_splits.at[i] * row;
        counts[ranks + i] = (size_t)attributes->in_splits.at[i] * row;
    }
    tutti_work *work;
    tutti_call options;
    tu_flight_call(&options, &work);
    tutti_status status = tutti_all_to_all_v(attributes->group, tu_pointer(from), counts + ranks, NULL, tu_pointer(out),
                                             counts, NULL, x->dtype, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(&(tu_flight_plan){ "all_to_all_single", attributes->group, work, out, from, NULL });
    tu_block_free(tu_self(), counts, bytes);
    tu_tensor_drop(from);
    return status;
}

tt_tensor *tt_all_to_all_single(tt_tensor *x, const int64_t *out_splits, const int64_t *in_splits, tutti_group *group) {
    if (!tu_flight_check("all_to_all_single", group, false) ||
        tu_pending_take(tu_tensor_check("all_to_all_single", "x", x)) != TUTTI_OK)
        return NULL;
    int ranks = tutti_group_size(group);
    if ((out_splits == NULL) != (in_splits == NULL)) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "all_to_all_single: out_splits and in_splits are given together, or neither");
        return NULL;
    }
    if (x->ndim == 0 || (out_splits == NULL && x->sizes[0] % ranks != 0)) {
        tu_fail(x->ndim == 0 ? TUTTI_ERROR_RANGE : TUTTI_ERROR_ARGUMENT,
                "all_to_all_single: dimension 0 of %s cannot be cut in %d equal parts", tu_describe(x), ranks);
        return NULL;
    }
    int64_t *equal = out_splits == NULL ? tu_scope_memory((size_t)ranks * sizeof *equal) : NULL;
    if (out_splits == NULL && equal == NULL)
        return NULL;
    for (int i = 0; equal != NULL && i < ranks; i++)
        equal[i] = x->sizes[0] / ranks;
    tu_ints comes = { (size_t)ranks, out_splits != NULL ? out_splits : equal };
    tu_ints goes = { (size_t)ranks, in_splits != NULL ? in_splits : equal };
    return tu_all_to_all_single(x, comes, goes, group);
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

tutti_status tu_isend_cpu(tu_call *call) {
    const tu_isend_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    tt_tensor *from = tu_stage_in(x, x->dtype);
    tutti_work *work;
    tutti_call options;
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_flight_call(&options, &work);
    tutti_status status = tutti_send(attributes->group, tu_pointer(from), (size_t)x->numel, x->dtype, attributes->to,
                                     attributes->tag, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(
            &(tu_flight_plan){ "isend", attributes->group, work, call->outputs[0], from, call->inputs[0] });
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

tutti_status tu_irecv_cpu(tu_call *call) {
    const tu_irecv_attributes *attributes = call->attributes;
    tt_tensor *x = call->inputs[0];
    tutti_work *work;
    tutti_call options;
    tu_flight_call(&options, &work);
    tutti_status status = tutti_recv(attributes->group, tu_pointer(x), (size_t)x->numel, x->dtype, attributes->from,
                                     attributes->tag, &options);
    return status == TUTTI_OK ? tu_flight_begin(&(tu_flight_plan){ "irecv", attributes->group, work, x, NULL, NULL })
                              : status;
}

tt_tensor *tt_isend(tt_tensor *x, int to, int tag, tutti_group *group) {
    return tu_flight_check("isend", group, false) ? tu_isend(x, to, tag, group) : NULL;
}

tt_tensor *tt_irecv(tt_tensor *x, int from, int tag, tutti_group *group) {
    return tu_flight_check("irecv", group, false) && tu_irecv(x, from, tag, group, NULL) ? x : NULL;
}

/* A message to oneself, and back: both sides of it are samples. */
static tt_tensor *to_oneself(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0));
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
    if (x->device == TUTTI_META)
        return true;
    return tu_pending_take(tu_tensor_ready("batch_p2p", "x", x)) == TUTTI_OK &&
           (operation->kind != TT_P2P_RECV || tu_pending_take(tu_storage_wait_write(x->storage)) == TUTTI_OK);
}

tt_tensor_list tt_batch_p2p(size_t count, const tt_p2p *operations, tutti_group *group) {
    tt_tensor_list none = { 0, NULL };
    bool real = false;
    if (!tu_flight_check("batch_p2p", group, false))
        return none;
    tt_tensor **results = tu_scope_memory((count + 1) * sizeof *results);
    for (size_t i = 0; results != NULL && i < count; i++) {
        if (operations[i].kind != TT_P2P_SEND && operations[i].kind != TT_P2P_RECV)
            tu_fail(TUTTI_ERROR_ARGUMENT, "batch_p2p: operation %zu is neither a send nor a receive", i);
        if (tu_self()->pending != TUTTI_OK || !ready(&operations[i]))
            return none;
        real = real || operations[i].tensor->device == TUTTI_CPU;
    }
    if (results == NULL || (real && tu_pending_take(tu_batch_open("batch_p2p", group)) != TUTTI_OK))
        return none;
    for (size_t i = 0; i < count && tu_self()->pending == TUTTI_OK; i++) {
        const tt_p2p *one = &operations[i];
        results[i] = one->tensor;
        if (one->kind == TT_P2P_SEND)
            results[i] = tu_isend(one->tensor, one->peer, one->tag, group);
        else
            tu_irecv(one->tensor, one->peer, one->tag, group, NULL);
    }
    if (real)
        tu_pending_take(tu_batch_close(group, tu_self()->pending == TUTTI_OK));
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of(count, results) : none;
}
