/* SPDX-License-Identifier: Apache-2.0
 *
 * Exchanges between single ranks: all_to_all by splits, permutation, change of the sharded dimension, sends and
 * receives.
 */
#include <string.h>

#include "functional/flight.h"
#include "tensor/stage.h"

#define FAMILY "collectives"

/* ---- all_to_all_single ---- */

/* Splits travel as an i64 tensor of (2, ranks): what comes, and what goes. It belongs to either device. */
static const int64_t *splits_of(const tt_tensor *splits) {
    return tu_pointer(splits);
}

static tutti_status check_splits(const tu_call *call, const char *what, const int64_t *splits, int ranks,
                                 int64_t rows) {
    int64_t sum = 0;
    for (int i = 0; i < ranks; i++) {
        if (splits[i] < 0)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s has the negative entry %lld for rank %d", what,
                                 (long long)splits[i], i);
        sum += splits[i];
    }
    if (rows >= 0 && sum != rows)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s adds up to %lld, but dimension 0 of x has size %lld", what,
                             (long long)sum, (long long)rows);
    return TUTTI_OK;
}

static tutti_status all_to_all_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0], *splits = call->inputs[1];
    int ranks = tutti_group_size(call->params.group);
    if (x->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "a 0-dim tensor has no rows to exchange");
    const int64_t *out = splits_of(splits), *in = out + ranks;
    tutti_status status = check_splits(call, "in_splits", in, ranks, x->sizes[0]);
    if (status == TUTTI_OK)
        status = check_splits(call, "out_splits", out, ranks, -1);
    if (status != TUTTI_OK)
        return status;
    call->results[0] = tu_shape_of(x);
    call->results[0].sizes[0] = 0;
    for (int i = 0; i < ranks; i++)
        call->results[0].sizes[0] += out[i];
    return tu_shape_contiguous("all_to_all_single", &call->results[0]);
}

static tutti_status all_to_all_cpu(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    tt_tensor *out = call->outputs[0], *from = tu_stage_in(x, x->dtype);
    int ranks = tutti_group_size(call->params.group);
    const int64_t *splits = splits_of(call->inputs[1]);
    size_t row = 1, bytes = 2 * (size_t)ranks * sizeof(size_t), *counts = tu_block_alloc(tu_self(), bytes);
    for (int i = 1; i < x->ndim; i++)
        row *= (size_t)x->sizes[i];
    if (from == NULL || counts == NULL) {
        tu_tensor_drop(from);
        tu_block_free(tu_self(), counts, bytes);
        return tu_error_memory("splits", bytes);
    }
    for (int i = 0; i < 2 * ranks; i++)
        counts[i] = (size_t)splits[i] * row;
    tutti_work *work;
    tutti_call options;
    tu_flight_call(&options, &work);
    tutti_status status = tutti_all_to_all_v(call->params.group, tu_pointer(from), counts + ranks, NULL,
                                             tu_pointer(out), counts, NULL, x->dtype, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(call->params.group, work, out->storage, from->storage);
    tu_block_free(tu_self(), counts, bytes);
    tu_tensor_drop(from);
    return status;
}

static tt_tensor *exchange(tt_tensor *x, tt_tensor *splits, tutti_group *group);

/* Back: what came goes, and what went comes. */
static void all_to_all_gradient(tu_gradient *gradient) {
    tt_tensor *splits = tu_saved(gradient, TU_INPUT(1));
    if (splits == NULL)
        return;
    tt_tensor *turned = tt_contiguous(tt_cat(tt_tensors(tt_select(splits, 0, 1), tt_select(splits, 0, 0)), 0));
    turned = tt_view(turned, tt_sizes(splits));
    if (turned != NULL)
        turned->flags |= TU_NUMBER;
    gradient->results[0] = tt_wait(exchange(tt_contiguous(gradient->grads[0]), turned, gradient->params->group));
}
static tt_tensor *all_to_all_sample(tu_sampler *s) {
    return tt_all_to_all_single(tu_normal(s, tt_shape(s->n, 3)), (int64_t[]){ s->n }, (int64_t[]){ s->n }, s->group);
}
TU_OPERATOR(all_to_all_single) = { .name = "all_to_all_single",
                                   .schema = "all_to_all_single(x, splits, group) -> tensor",
                                   .summary = "rows to and from each rank, by splits",
                                   .family = FAMILY,
                                   .flags = TU_IMPURE,
                                   .shape = all_to_all_shape,
                                   .cpu = all_to_all_cpu,
                                   .gradient = all_to_all_gradient,
                                   .saves = { TU_INPUT(1) },
                                   .sample = all_to_all_sample };
static tt_tensor *exchange(tt_tensor *x, tt_tensor *splits, tutti_group *group) {
    if (!tu_flight_check("all_to_all_single", group, false))
        return NULL;
    tt_tensor *inputs[] = { x, splits };
    tu_call call;
    tu_call_init(&call, &tu_operator_all_to_all_single, 2, inputs);
    call.params.group = group;
    return tu_run(&call);
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
    tt_tensor *splits = tt_empty(tt_shape(2, ranks), TUTTI_I64, NULL);
    if (splits == NULL)
        return NULL;
    int64_t *at = tu_pointer(splits);
    for (int i = 0; i < ranks; i++) {
        at[i] = out_splits != NULL ? out_splits[i] : x->sizes[0] / ranks;
        at[ranks + i] = in_splits != NULL ? in_splits[i] : x->sizes[0] / ranks;
    }
    splits->flags |= TU_NUMBER;
    return exchange(x, splits, group);
}

/* ---- permutation ---- */

static tt_tensor *permute_ranks_sample(tu_sampler *s) {
    return tt_permute_ranks(tu_normal(s, tt_shape(s->n, 3)), (int[]){ 0 }, s->group);
}
TU_OPERATOR(permute_ranks) = { .name = "permute_ranks",
                               .schema = "permute_ranks(x, to, group) -> tensor",
                               .summary = "rank r's x goes to rank to[r]",
                               .family = FAMILY,
                               .flags = TU_IMPURE | TU_COMPOSITE,
                               .sample = permute_ranks_sample };
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

static tt_tensor *shard_dim_sample(tu_sampler *s) {
    return tt_shard_dim_all_to_all(tu_normal(s, tt_shape(s->n, 4)), 0, 1, s->group);
}
TU_OPERATOR(shard_dim_all_to_all) = { .name = "shard_dim_all_to_all",
                                      .schema = "shard_dim_all_to_all(x, gather_dim, shard_dim, group) -> tensor",
                                      .summary = "from sharded along gather_dim to sharded along shard_dim",
                                      .family = FAMILY,
                                      .flags = TU_IMPURE | TU_COMPOSITE,
                                      .sample = shard_dim_sample };
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

static tt_tensor *placeholder(const tt_tensor *x) {
    tt_options options = TT_OPTIONS_INIT;
    options.device = x->device;
    return tt_empty(tt_shape(0), x->dtype, &options);
}

static bool usable(const char *who, tt_tensor *x, bool writes) {
    if (tu_pending_take(tu_tensor_check(who, "x", x)) != TUTTI_OK)
        return false;
    if (x->device == TUTTI_META)
        return true;
    if (tu_pending_take(tu_tensor_ready(who, "x", x)) != TUTTI_OK ||
        (writes && tu_pending_take(tu_storage_wait_write(x->storage)) != TUTTI_OK))
        return false;
    if (writes && !(x->flags & TU_CONTIGUOUS))
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: %s is not contiguous, and receiving does not copy", who, tu_describe(x));
    return tu_self()->pending == TUTTI_OK;
}

static tt_tensor *start_send(tt_tensor *x, int to, int tag, tutti_group *group) {
    tt_tensor *mark = placeholder(x);
    if (x->device == TUTTI_META || mark == NULL)
        return mark;
    tt_tensor *from = tu_stage_in(x, x->dtype);
    if (from == NULL) {
        tu_pending_take(TUTTI_ERROR_MEMORY);
        return NULL;
    }
    tutti_work *work;
    tutti_call options;
    tu_flight_call(&options, &work);
    tutti_status status = tutti_send(group, tu_pointer(from), (size_t)x->numel, x->dtype, to, tag, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(group, work, mark->storage, from->storage);
    tu_tensor_drop(from);
    return tu_pending_take(status) == TUTTI_OK ? mark : NULL;
}

static tt_tensor *start_recv(tt_tensor *x, int source, int tag, tutti_group *group) {
    if (x->device == TUTTI_META)
        return x;
    tutti_work *work;
    tutti_call options;
    tu_flight_call(&options, &work);
    tutti_status status = tutti_recv(group, tu_pointer(x), (size_t)x->numel, x->dtype, source, tag, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(group, work, x->storage, NULL);
    if (status == TUTTI_OK)
        tu_bump(x);
    return tu_pending_take(status) == TUTTI_OK ? x : NULL;
}

tt_tensor *tt_isend(tt_tensor *x, int to, int tag, tutti_group *group) {
    return tu_flight_check("isend", group, false) && usable("isend", x, false) ? start_send(x, to, tag, group) : NULL;
}

tt_tensor *tt_irecv(tt_tensor *x, int from, int tag, tutti_group *group) {
    return tu_flight_check("irecv", group, false) && usable("irecv", x, true) ? start_recv(x, from, tag, group) : NULL;
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
        if (tu_self()->pending != TUTTI_OK ||
            !usable("batch_p2p", operations[i].tensor, operations[i].kind == TT_P2P_RECV))
            return none;
        real = real || operations[i].tensor->device == TUTTI_CPU;
    }
    if (results == NULL || (real && tu_pending_take(tu_batch_open(group)) != TUTTI_OK))
        return none;
    for (size_t i = 0; i < count && tu_self()->pending == TUTTI_OK; i++) {
        const tt_p2p *o = &operations[i];
        results[i] = o->kind == TT_P2P_SEND ? start_send(o->tensor, o->peer, o->tag, group)
                                            : start_recv(o->tensor, o->peer, o->tag, group);
    }
    if (real)
        tu_pending_take(tu_batch_close(group, tu_self()->pending == TUTTI_OK));
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of(count, results) : none;
}
