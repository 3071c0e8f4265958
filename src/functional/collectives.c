/* SPDX-License-Identifier: Apache-2.0
 *
 * The functional collectives as operators: shape rule, start, gradient. They all work along dimension 0; other
 * dimensions are rearranged around them by ordinary operators, whose gradients rearrange back.
 */
#include <string.h>

#include "functional/flight.h"
#include "tensor/stage.h"

#define FAMILY "collectives"

static int ranks_of(const tu_params *params) {
    return tutti_group_size(params->group);
}

/* A dense tensor to send from: x itself, held, or a copy. */
static tt_tensor *dense(const tt_tensor *x) {
    return tu_stage_in(x, x->dtype);
}

static tutti_status no_memory(void) {
    return TUTTI_ERROR_MEMORY;
}

static tutti_status no_gradient_in_place(const tu_call *call) {
    if (!call->wants_grad)
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_UNSUPPORTED,
                         "has no gradient; use the form that returns a new tensor, or switch gradient mode off");
}

static tutti_status must_be_dense(const tu_call *call, const tt_tensor *x) {
    if (x->flags & TU_CONTIGUOUS)
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s is not contiguous, and this form does not copy",
                         tu_describe(x));
}

static tutti_status other_reduction(tu_gradient *gradient) {
    return tu_fail(TUTTI_ERROR_UNSUPPORTED, "%s: the gradient is defined for sum and avg only, not for %s",
                   gradient->operator->name, tutti_reduction_name((tutti_reduction)gradient->params->integer[0]));
}

/* ---- all_reduce ---- */

static tutti_status all_reduce_shape(tu_call *call) {
    tutti_reduction reduction = (tutti_reduction)call->params.integer[0];
    const tt_tensor *x = call->inputs[0];
    if (!tutti_reduction_applies(reduction, x->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "the reduction %s is not defined for %s",
                             tutti_reduction_name(reduction), tu_describe(x));
    if (call->in_place) {
        tutti_status status = no_gradient_in_place(call);
        call->results[0] = tu_shape_of(x);
        return status == TUTTI_OK ? must_be_dense(call, x) : status;
    }
    return tu_shape_like_first(call);
}

static tutti_status all_reduce_cpu(tu_call *call) {
    tt_tensor *x = call->inputs[0], *out = call->outputs[0], *from;
    tutti_work *work;
    tutti_call options;
    _Alignas(16) char factor[16];
    tutti_dtype real = x->dtype == TUTTI_C64 ? TUTTI_F32 : x->dtype == TUTTI_C128 ? TUTTI_F64 : (tutti_dtype)x->dtype;
    tutti_status status = tutti_convert(&call->params.number[0], TUTTI_F64, factor, real, 1);
    if (status != TUTTI_OK)
        return status;
    if (!(x->flags & TU_CONTIGUOUS)) { /* copied to where the result goes, and reduced there */
        tu_copy_tensor(out, x);
        from = tu_tensor_hold(out);
    } else {
        from = tu_tensor_hold(x);
    }
    tu_flight_call(&options, &work);
    options.factor = call->params.integer[0] == TUTTI_PREMUL_SUM ? factor : NULL;
    status = tutti_all_reduce(call->params.group, tu_pointer(from), tu_pointer(out), (size_t)out->numel, out->dtype,
                              (tutti_reduction)call->params.integer[0], &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(call->params.group, work, out->storage,
                                 from->storage == out->storage ? NULL : from->storage);
    tu_tensor_drop(from);
    return status;
}

static void all_reduce_gradient(tu_gradient *gradient) {
    tutti_reduction reduction = (tutti_reduction)gradient->params->integer[0];
    tt_tensor *grad = tt_contiguous(gradient->grads[0]);
    if (reduction == TUTTI_SUM || reduction == TUTTI_AVG)
        gradient->results[0] = tt_wait(tt_all_reduce(grad, reduction, gradient->params->group));
    else if (reduction == TUTTI_PREMUL_SUM)
        gradient->results[0] =
            tt_mul_scalar(tt_all_reduce(grad, TUTTI_SUM, gradient->params->group), gradient->params->number[0]);
    else
        other_reduction(gradient);
}
static tt_tensor *all_reduce_sample(tu_sampler *s) {
    return tt_all_reduce(tu_normal(s, tt_shape(s->n, 3)), TUTTI_SUM, s->group);
}
TU_OPERATOR(all_reduce) = { .name = "all_reduce",
                            .schema = "all_reduce(x, op, group) -> tensor",
                            .summary = "the reduction over all ranks, on each of them",
                            .family = FAMILY,
                            .flags = TU_IMPURE | TU_HAS_IN_PLACE,
                            .shape = all_reduce_shape,
                            .cpu = all_reduce_cpu,
                            .gradient = all_reduce_gradient,
                            .sample = all_reduce_sample };

static bool on_meta(const tt_tensor *x) {
    return x != NULL && x->magic == TU_MAGIC_ALIVE && x->device == TUTTI_META;
}

static tt_tensor *all_reduce(tt_tensor *x, tutti_reduction reduction, double factor, tutti_group *group,
                             bool in_place) {
    if (!tu_flight_check("all_reduce", group, on_meta(x)))
        return NULL;
    tu_call call;
    tu_call_init(&call, &tu_operator_all_reduce, 1, &x);
    call.params.integer[0] = reduction;
    call.params.number[0] = factor;
    call.params.group = group;
    call.in_place = in_place;
    return tu_run(&call);
}

tt_tensor *tt_all_reduce(tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    if (reduction == TUTTI_PREMUL_SUM && tu_self()->pending == TUTTI_OK) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "all_reduce: premul_sum needs a factor: use tt_all_reduce_premul");
        return NULL;
    }
    return all_reduce(x, reduction, 1, group, false);
}
tt_tensor *tt_all_reduce_premul(tt_tensor *x, double factor, tutti_group *group) {
    return all_reduce(x, TUTTI_PREMUL_SUM, factor, group, false);
}
tt_tensor *tt_all_reduce_(tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    return all_reduce(x, reduction, 1, group, true);
}

/* ---- all_gather along dimension 0 ---- */

static tutti_status gathered(const tu_call *call, const tt_tensor *x, tu_shape *result) {
    *result = tu_shape_of(x);
    result->ndim = x->ndim == 0 ? 1 : x->ndim;
    if (x->ndim == 0)
        result->sizes[0] = 1;
    if (__builtin_mul_overflow(result->sizes[0], ranks_of(&call->params), &result->sizes[0]))
        return tu_call_error(call, TUTTI_ERROR_RANGE, "%s from all ranks is too large", tu_describe(x));
    return tu_shape_contiguous(call->operator->name, result);
}

static tutti_status all_gather_shape(tu_call *call) {
    return gathered(call, call->inputs[0], &call->results[0]);
}

static tutti_status start_gather(const tu_call *call, const tt_tensor *x, tt_tensor *out) {
    tutti_work *work;
    tutti_call options;
    tt_tensor *from = dense(x);
    if (from == NULL)
        return no_memory();
    tu_flight_call(&options, &work);
    tutti_status status =
        tutti_all_gather(call->params.group, tu_pointer(from), tu_pointer(out), (size_t)x->numel, x->dtype, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(call->params.group, work, out->storage, from->storage);
    tu_tensor_drop(from);
    return status;
}
static tutti_status all_gather_cpu(tu_call *call) {
    return start_gather(call, call->inputs[0], call->outputs[0]);
}

static tt_tensor *scatter_rows(tt_tensor *x, tutti_reduction reduction, tutti_group *group);
static tt_tensor *gather_rows(tt_tensor *x, tutti_group *group);

static void all_gather_gradient(tu_gradient *gradient) {
    tt_tensor *part = tt_wait(scatter_rows(tt_contiguous(gradient->grads[0]), TUTTI_SUM, gradient->params->group));
    gradient->results[0] = tu_input_shape(gradient, 0)->ndim == 0 ? tt_view(part, tt_shape()) : part;
}
static tt_tensor *all_gather_sample(tu_sampler *s) {
    return tt_all_gather(tu_normal(s, tt_shape(s->n, 3)), 1, s->group);
}
TU_OPERATOR(all_gather) = { .name = "all_gather",
                            .schema = "all_gather(x, dim, group) -> tensor",
                            .summary = "all ranks' x, one after the other along dim",
                            .family = FAMILY,
                            .flags = TU_IMPURE,
                            .shape = all_gather_shape,
                            .cpu = all_gather_cpu,
                            .gradient = all_gather_gradient,
                            .sample = all_gather_sample };
static tt_tensor *gather_rows(tt_tensor *x, tutti_group *group) {
    if (!tu_flight_check("all_gather", group, false))
        return NULL;
    tu_call call;
    tu_call_init(&call, &tu_operator_all_gather, 1, &x);
    call.params.group = group;
    return tu_run(&call);
}

/* Along another dimension: a reshape where dimension 0 has one row and nothing lies between, which does not wait; else
 * the parts side by side. */
tt_tensor *tt_all_gather(tt_tensor *x, int dim, tutti_group *group) {
    int at;
    if (!tu_flight_check("all_gather", group, false) ||
        tu_pending_take(tu_tensor_check("all_gather", "x", x)) != TUTTI_OK ||
        tu_pending_take(tu_wrap_dim("all_gather", dim, x->ndim, &at)) != TUTTI_OK)
        return NULL;
    tt_tensor *rows = gather_rows(x, group);
    if (at == 0 || rows == NULL)
        return rows;
    int64_t between = x->sizes[0];
    for (int i = 1; i < at; i++)
        between *= x->sizes[i];
    if (between == 1) {
        tt_dims shape = tt_sizes(x);
        shape.at[at] *= tutti_group_size(group);
        return tt_view(rows, shape);
    }
    tt_tensor_list parts = tt_chunk(rows, tutti_group_size(group), 0);
    return tt_cat(parts, at);
}

static tutti_status all_gather_out_shape(tu_call *call) {
    tu_shape wanted;
    tutti_status status = gathered(call, call->inputs[1], &wanted);
    const tt_tensor *out = call->inputs[0];
    if (status == TUTTI_OK)
        status = no_gradient_in_place(call);
    if (status == TUTTI_OK)
        status = must_be_dense(call, out);
    if (status == TUTTI_OK && (out->dtype != wanted.dtype || out->numel != tu_shape_numel(&wanted)))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "out is %s and must hold %s of %d ranks", tu_describe(out),
                             tu_describe(call->inputs[1]), ranks_of(&call->params));
    call->results[0] = (tu_shape){ .dtype = out->dtype, .device = call->device, .ndim = 1, .strides = { 1 } };
    return status;
}
static tutti_status all_gather_out_cpu(tu_call *call) {
    return start_gather(call, call->inputs[1], call->inputs[0]);
}
static tt_tensor *all_gather_out_sample(tu_sampler *s) {
    tt_tensor *x = tt_detach(tu_normal(s, tt_shape(s->n, 3)));
    return tt_all_gather_out(tt_zeros_like(x), x, s->group);
}
TU_OPERATOR(all_gather_out) = { .name = "all_gather_out",
                                .schema = "all_gather_out(out, x, group) -> tensor",
                                .summary = "all_gather along dimension 0, into out",
                                .family = FAMILY,
                                .flags = TU_WRITES | TU_IMPURE,
                                .written = TU_INPUT(0),
                                .shape = all_gather_out_shape,
                                .cpu = all_gather_out_cpu,
                                .sample = all_gather_out_sample };

static tt_tensor *into(const tu_operator *operator, tt_tensor * out, tt_tensor *x, int64_t number, tutti_group *group) {
    tt_tensor *inputs[] = { out, x };
    tu_call call;
    if (!tu_flight_check(operator->name, group, false))
        return NULL;
    tu_call_init(&call, operator, 2, inputs);
    call.params.integer[0] = number;
    call.params.group = group;
    return tu_run(&call) != NULL ? out : NULL;
}
tt_tensor *tt_all_gather_out(tt_tensor *out, tt_tensor *x, tutti_group *group) {
    return into(&tu_operator_all_gather_out, out, x, 0, group);
}

/* ---- reduce_scatter along dimension 0 ---- */

static tutti_status scattered(const tu_call *call, const tt_tensor *x, tu_shape *result) {
    int ranks = ranks_of(&call->params);
    tutti_reduction reduction = (tutti_reduction)call->params.integer[0];
    if (!tutti_reduction_applies(reduction, x->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "the reduction %s is not defined for %s",
                             tutti_reduction_name(reduction), tu_describe(x));
    if (x->ndim == 0 || x->sizes[0] % ranks != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "the size of the dimension to scatter of %s is not divisible by the %d ranks of the group",
                             tu_describe(x), ranks);
    *result = tu_shape_of(x);
    result->sizes[0] /= ranks;
    return tu_shape_contiguous(call->operator->name, result);
}
static tutti_status reduce_scatter_shape(tu_call *call) {
    return scattered(call, call->inputs[0], &call->results[0]);
}

static tutti_status start_scatter(const tu_call *call, const tt_tensor *x, tt_tensor *out) {
    tutti_work *work;
    tutti_call options;
    tt_tensor *from = dense(x);
    if (from == NULL)
        return no_memory();
    tu_flight_call(&options, &work);
    tutti_status status =
        tutti_reduce_scatter(call->params.group, tu_pointer(from), tu_pointer(out), (size_t)out->numel, x->dtype,
                             (tutti_reduction)call->params.integer[0], &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(call->params.group, work, out->storage, from->storage);
    tu_tensor_drop(from);
    return status;
}
static tutti_status reduce_scatter_cpu(tu_call *call) {
    return start_scatter(call, call->inputs[0], call->outputs[0]);
}

static void reduce_scatter_gradient(tu_gradient *gradient) {
    tutti_reduction reduction = (tutti_reduction)gradient->params->integer[0];
    if (reduction != TUTTI_SUM && reduction != TUTTI_AVG) {
        other_reduction(gradient);
        return;
    }
    tt_tensor *rows = tt_wait(gather_rows(tt_contiguous(gradient->grads[0]), gradient->params->group));
    gradient->results[0] = reduction == TUTTI_AVG ? tt_div_scalar(rows, ranks_of(gradient->params)) : rows;
}
static tt_tensor *reduce_scatter_sample(tu_sampler *s) {
    return tt_reduce_scatter(tu_normal(s, tt_shape(s->n, 3)), TUTTI_AVG, 1, s->group);
}
TU_OPERATOR(reduce_scatter) = { .name = "reduce_scatter",
                                .schema = "reduce_scatter(x, op, dim, group) -> tensor",
                                .summary = "this rank's part, along dim, of the reduction",
                                .family = FAMILY,
                                .flags = TU_IMPURE,
                                .shape = reduce_scatter_shape,
                                .cpu = reduce_scatter_cpu,
                                .gradient = reduce_scatter_gradient,
                                .sample = reduce_scatter_sample };
static tt_tensor *scatter_rows(tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    if (!tu_flight_check("reduce_scatter", group, false))
        return NULL;
    tu_call call;
    tu_call_init(&call, &tu_operator_reduce_scatter, 1, &x);
    call.params.integer[0] = reduction;
    call.params.group = group;
    return tu_run(&call);
}

/* The parts along dim, one after the other along dimension 0. */
static tt_tensor *rows_of_parts(tt_tensor *x, int dim, int ranks) {
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (x->sizes[dim] % ranks != 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "reduce_scatter: dimension %d of %s is not divisible by the %d ranks of the group", dim, tu_describe(x),
                ranks);
        return NULL;
    }
    return dim == 0 ? x : tt_cat(tt_chunk(x, ranks, dim), 0);
}

tt_tensor *tt_reduce_scatter(tt_tensor *x, tutti_reduction reduction, int dim, tutti_group *group) {
    int at;
    if (!tu_flight_check("reduce_scatter", group, false) ||
        tu_pending_take(tu_tensor_check("reduce_scatter", "x", x)) != TUTTI_OK ||
        tu_pending_take(tu_wrap_dim("reduce_scatter", dim, x->ndim, &at)) != TUTTI_OK)
        return NULL;
    if (x->ndim == 0 || reduction == TUTTI_PREMUL_SUM) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "reduce_scatter: %s cannot be scattered by %s", tu_describe(x),
                tutti_reduction_name(reduction));
        return NULL;
    }
    tt_tensor *rows = rows_of_parts(x, at, tutti_group_size(group));
    return rows != NULL ? scatter_rows(rows, reduction, group) : NULL; /* a wrong argument ends nothing */
}

static tutti_status reduce_scatter_out_shape(tu_call *call) {
    tu_shape wanted;
    tutti_status status = scattered(call, call->inputs[1], &wanted);
    const tt_tensor *out = call->inputs[0];
    if (status == TUTTI_OK)
        status = no_gradient_in_place(call);
    if (status == TUTTI_OK)
        status = must_be_dense(call, out);
    if (status == TUTTI_OK && (out->dtype != wanted.dtype || out->numel != tu_shape_numel(&wanted)))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "out is %s and must hold the part of one of %d ranks of %s",
                             tu_describe(out), ranks_of(&call->params), tu_describe(call->inputs[1]));
    call->results[0] = (tu_shape){ .dtype = out->dtype, .device = call->device, .ndim = 1, .strides = { 1 } };
    return status;
}
static tutti_status reduce_scatter_out_cpu(tu_call *call) {
    return start_scatter(call, call->inputs[1], call->inputs[0]);
}
static tt_tensor *reduce_scatter_out_sample(tu_sampler *s) {
    tt_tensor *x = tt_detach(tu_normal(s, tt_shape(s->n, 3)));
    return tt_reduce_scatter_out(tt_zeros_like(x), x, TUTTI_SUM, s->group);
}
TU_OPERATOR(reduce_scatter_out) = { .name = "reduce_scatter_out",
                                    .schema = "reduce_scatter_out(out, x, op, group) -> tensor",
                                    .summary = "reduce_scatter along dimension 0, into out",
                                    .family = FAMILY,
                                    .flags = TU_WRITES | TU_IMPURE,
                                    .written = TU_INPUT(0),
                                    .shape = reduce_scatter_out_shape,
                                    .cpu = reduce_scatter_out_cpu,
                                    .sample = reduce_scatter_out_sample };
tt_tensor *tt_reduce_scatter_out(tt_tensor *out, tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    return into(&tu_operator_reduce_scatter_out, out, x, reduction, group);
}

/* ---- broadcast ---- */

static tutti_status broadcast_shape(tu_call *call) {
    int root = (int)call->params.integer[0];
    if (call->params.group != NULL && (root < 0 || root >= ranks_of(&call->params)))
        return tu_call_error(call, TUTTI_ERROR_RANGE, "root %d is no rank of the group, which has %d", root,
                             ranks_of(&call->params));
    if (call->in_place) {
        tutti_status status = no_gradient_in_place(call);
        call->results[0] = tu_shape_of(call->inputs[0]);
        return status == TUTTI_OK ? must_be_dense(call, call->inputs[0]) : status;
    }
    return tu_shape_like_first(call);
}
static tutti_status broadcast_cpu(tu_call *call) {
    tt_tensor *out = call->outputs[0], *from = dense(call->inputs[0]);
    tutti_work *work;
    tutti_call options;
    if (from == NULL)
        return no_memory();
    tu_flight_call(&options, &work);
    tutti_status status = tutti_broadcast(call->params.group, tu_pointer(from), tu_pointer(out), (size_t)out->numel,
                                          out->dtype, (int)call->params.integer[0], &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(call->params.group, work, out->storage,
                                 from->storage == out->storage ? NULL : from->storage);
    tu_tensor_drop(from);
    return status;
}
static tt_tensor *broadcast_sample(tu_sampler *s) {
    return tt_broadcast(tu_normal(s, tt_shape(s->n, 3)), 0, s->group);
}
TU_OPERATOR(broadcast) = { .name = "broadcast",
                           .schema = "broadcast(x, root, group) -> tensor",
                           .summary = "the root's x on every rank",
                           .family = FAMILY,
                           .flags = TU_IMPURE | TU_HAS_IN_PLACE,
                           .shape = broadcast_shape,
                           .cpu = broadcast_cpu,
                           .sample = broadcast_sample };
static tt_tensor *broadcast(tt_tensor *x, int root, tutti_group *group, bool in_place) {
    if (!tu_flight_check("broadcast", group, on_meta(x)))
        return NULL;
    tu_call call;
    tu_call_init(&call, &tu_operator_broadcast, 1, &x);
    call.params.integer[0] = root;
    call.params.group = group;
    call.in_place = in_place;
    return tu_run(&call);
}
tt_tensor *tt_broadcast(tt_tensor *x, int root, tutti_group *group) {
    return broadcast(x, root, group, false);
}
tt_tensor *tt_broadcast_(tt_tensor *x, int root, tutti_group *group) {
    return broadcast(x, root, group, true);
}

/* ---- tensor-parallel regions ---- */

static tutti_status copy_to_shape(tu_call *call) {
    call->results[0] = tu_shape_of(call->inputs[0]);
    return TUTTI_OK;
}
static void copy_to_gradient(tu_gradient *gradient) {
    gradient->results[0] = tt_all_reduce(tt_contiguous(gradient->grads[0]), TUTTI_SUM, gradient->params->group);
}
static tt_tensor *copy_to_sample(tu_sampler *s) {
    return tt_copy_to_group(tu_normal(s, tt_shape(s->n, 3)), s->group);
}
TU_OPERATOR(copy_to_group) = { .name = "copy_to_group",
                               .schema = "copy_to_group(x, group) -> view",
                               .summary = "x itself; its gradient is summed over the ranks",
                               .family = FAMILY,
                               .flags = TU_VIEW,
                               .shape = copy_to_shape,
                               .gradient = copy_to_gradient,
                               .sample = copy_to_sample };
static void pass_on(tu_gradient *gradient) {
    gradient->results[0] = gradient->grads[0];
}
static tt_tensor *reduce_from_sample(tu_sampler *s) {
    return tt_reduce_from_group(tu_normal(s, tt_shape(s->n, 3)), s->group);
}
TU_OPERATOR(reduce_from_group) = { .name = "reduce_from_group",
                                   .schema = "reduce_from_group(x, group) -> tensor",
                                   .summary = "the sum over the ranks; its gradient is passed on",
                                   .family = FAMILY,
                                   .flags = TU_IMPURE,
                                   .shape = all_reduce_shape,
                                   .cpu = all_reduce_cpu,
                                   .gradient = pass_on,
                                   .sample = reduce_from_sample };
static tt_tensor *region(const tu_operator *operator, tt_tensor * x, tutti_group *group) {
    if (!tu_flight_check(operator->name, group, on_meta(x)))
        return NULL;
    tu_call call;
    tu_call_init(&call, operator, 1, &x);
    call.params.integer[0] = TUTTI_SUM;
    call.params.number[0] = 1;
    call.params.group = group;
    return tu_run(&call);
}
tt_tensor *tt_copy_to_group(tt_tensor *x, tutti_group *group) {
    return region(&tu_operator_copy_to_group, x, group);
}
tt_tensor *tt_reduce_from_group(tt_tensor *x, tutti_group *group) {
    return region(&tu_operator_reduce_from_group, x, group);
}

/* ---- coalesced ---- */

typedef tt_tensor *one_of(tt_tensor *x, tutti_reduction reduction, tutti_group *group);
static tt_tensor *gather_one(tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    (void)reduction;
    return gather_rows(x, group);
}

/* The inputs are waited for first: inside the batch nothing may wait. */
static tt_tensor_list together(const char *who, tt_tensor_list list, one_of *start, tutti_reduction reduction,
                               tutti_group *group) {
    tt_tensor_list none = { 0, NULL };
    if (!tu_flight_check(who, group, false))
        return none;
    bool real = false;
    for (size_t i = 0; i < list.count; i++) {
        if (tu_pending_take(tu_tensor_check(who, "list", list.at[i])) != TUTTI_OK)
            return none;
        real = real || list.at[i]->device == TUTTI_CPU;
        tt_wait(list.at[i]);
    }
    tt_tensor **results = tu_scope_memory((list.count + 1) * sizeof *results);
    if (results == NULL || tu_self()->pending != TUTTI_OK)
        return none;
    if (list.count == 0)
        return tt_tensors_of(0, results);
    if (real && tu_pending_take(tu_batch_open(group)) != TUTTI_OK)
        return none;
    for (size_t i = 0; i < list.count; i++)
        results[i] = start(list.at[i], reduction, group);
    if (real)
        tu_pending_take(tu_batch_close(group, tu_self()->pending == TUTTI_OK));
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of(list.count, results) : none;
}

tt_tensor_list tt_all_reduce_coalesced(tt_tensor_list list, tutti_reduction reduction, tutti_group *group) {
    return together("all_reduce_coalesced", list, tt_all_reduce, reduction, group);
}
tt_tensor_list tt_all_gather_coalesced(tt_tensor_list list, tutti_group *group) {
    return together("all_gather_coalesced", list, gather_one, TUTTI_SUM, group);
}

tt_tensor_list tt_reduce_scatter_coalesced(tt_tensor_list list, tutti_reduction reduction, size_t dim_count,
                                           const int *dims, tutti_group *group) {
    tt_tensor_list none = { 0, NULL };
    if (!tu_flight_check("reduce_scatter_coalesced", group, false))
        return none;
    if (dim_count != list.count) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "reduce_scatter_coalesced: %zu dimensions given for %zu tensors", dim_count,
                list.count);
        return none;
    }
    tt_tensor **rows = tu_scope_memory((list.count + 1) * sizeof *rows);
    for (size_t i = 0; rows != NULL && i < list.count; i++) {
        int at;
        if (tu_pending_take(tu_tensor_check("reduce_scatter_coalesced", "list", list.at[i])) != TUTTI_OK ||
            tu_pending_take(tu_wrap_dim("reduce_scatter_coalesced", dims[i], list.at[i]->ndim, &at)) != TUTTI_OK)
            return none;
        rows[i] = tt_contiguous(rows_of_parts(list.at[i], at, tutti_group_size(group)));
    }
    if (tu_self()->pending != TUTTI_OK)
        return none;
    return together("reduce_scatter_coalesced", tt_tensors_of(list.count, rows), scatter_rows, reduction, group);
}
