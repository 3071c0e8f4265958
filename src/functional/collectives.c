/* SPDX-License-Identifier: Apache-2.0
 *
 * The functional collectives: shape rules, starts and gradients of their rows, and the public functions. The rows work
 * along dimension 0; other dimensions are rearranged around them by ordinary operators, whose gradients rearrange back.
 */
#include <string.h>

#include "functional/operators.h"
#include "functional/registry.h"
#include "tensor/stage.h"

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

/* The result is like the first input, which the in-place form writes where it lies. */
static tutti_status same_shape(tu_call *call) {
    if (!call->in_place)
        return tu_shape_like_first(call);
    tutti_status status = no_gradient_in_place(call);
    if (status == TUTTI_OK)
        status = must_be_dense(call, call->inputs[0]);
    return status == TUTTI_OK ? tu_shape_of_first(call) : status;
}

static tutti_status check_reduction(const tu_call *call, tutti_reduction reduction, const tt_tensor *x) {
    if (tutti_reduction_applies(reduction, x->dtype))
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_TYPE, "the reduction %s is not defined for %s",
                         tutti_reduction_name(reduction), tu_describe(x));
}

static bool has_gradient(const tu_gradient *gradient, tutti_reduction reduction) {
    if (reduction == TUTTI_SUM || reduction == TUTTI_AVG)
        return true;
    tu_fail(TUTTI_ERROR_UNSUPPORTED, "%s: the gradient is defined for sum and avg only, not for %s",
            gradient->entry->name, tutti_reduction_name(reduction));
    return false;
}

static bool needs_factor(const char *who, tutti_reduction reduction) {
    if (reduction != TUTTI_PREMUL_SUM || tu_self()->pending != TUTTI_OK)
        return false;
    tu_fail(TUTTI_ERROR_ARGUMENT, "%s: premul_sum needs a factor: use tt_all_reduce_premul", who);
    return true;
}

static bool on_meta(const tt_tensor *x) {
    return x != NULL && x->magic == TU_MAGIC_ALIVE && x->device == TUTTI_META;
}

/* A fake group moves no data: a result that has the shape of the input is a copy of it. */
static bool is_fake(tutti_group *group) {
    return strcmp(tutti_world_launcher(tutti_group_world(group)), "fake") == 0;
}

/* ---- all_reduce ---- */

static tutti_status start_reduce(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, double number,
                                 tutti_group *group) {
    tutti_work *work;
    tutti_call options;
    _Alignas(16) char factor[16];
    tutti_dtype real = x->dtype == TUTTI_C64 ? TUTTI_F32 : x->dtype == TUTTI_C128 ? TUTTI_F64 : (tutti_dtype)x->dtype;
    tutti_status status = tutti_convert(&number, TUTTI_F64, factor, real, 1);
    if (status != TUTTI_OK)
        return status;
    const tt_tensor *from = x;
    if (x != out && (!(x->flags & TU_CONTIGUOUS) || is_fake(group))) {
        tu_copy_tensor(out, x); /* to where the result goes, and reduced there */
        from = out;
    }
    tu_flight_call(&options, &work);
    options.factor = reduction == TUTTI_PREMUL_SUM ? factor : NULL;
    status =
        tutti_all_reduce(group, tu_pointer(from), tu_pointer(out), (size_t)out->numel, out->dtype, reduction, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(&(tu_flight_plan){ "all_reduce", group, work, out, from == out ? NULL : from, NULL });
    return status;
}

tutti_status tu_all_reduce_shape(tu_call *call) {
    const tu_all_reduce_attributes *attributes = call->attributes;
    tutti_status status = check_reduction(call, attributes->reduction, call->inputs[0]);
    return status == TUTTI_OK ? same_shape(call) : status;
}

tutti_status tu_all_reduce_cpu(tu_call *call) {
    const tu_all_reduce_attributes *attributes = call->attributes;
    return start_reduce(call->inputs[0], call->outputs[0], attributes->reduction, attributes->factor,
                        attributes->group);
}

void tu_all_reduce_gradient(tu_gradient *gradient) {
    const tu_all_reduce_attributes *attributes = gradient->attributes;
    tt_tensor *grad = tt_contiguous(gradient->grads[0]);
    if (attributes->reduction == TUTTI_PREMUL_SUM)
        gradient->results[0] = tt_mul_scalar(tt_all_reduce(grad, TUTTI_SUM, attributes->group), attributes->factor);
    else if (has_gradient(gradient, attributes->reduction))
        gradient->results[0] = tt_all_reduce(grad, attributes->reduction, attributes->group);
}

tt_tensor *tt_all_reduce(tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    if (needs_factor("all_reduce", reduction) || !tu_flight_check("all_reduce", group, on_meta(x)))
        return NULL;
    return tu_all_reduce(x, reduction, 1, group);
}

tt_tensor *tt_all_reduce_premul(tt_tensor *x, double factor, tutti_group *group) {
    if (!tu_flight_check("all_reduce_premul", group, on_meta(x)))
        return NULL;
    return tu_all_reduce(x, TUTTI_PREMUL_SUM, factor, group);
}

tt_tensor *tt_all_reduce_(tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    if (needs_factor("all_reduce_", reduction) || !tu_flight_check("all_reduce_", group, on_meta(x)))
        return NULL;
    return tu_all_reduce_(x, reduction, 1, group);
}

/* ---- all_gather along dimension 0 ---- */

static tutti_status gathered(const tu_call *call, const tt_tensor *x, tutti_group *group, tu_shape *result) {
    *result = tu_shape_of(x);
    result->ndim = x->ndim == 0 ? 1 : x->ndim;
    if (x->ndim == 0)
        result->sizes[0] = 1;
    if (__builtin_mul_overflow(result->sizes[0], tutti_group_size(group), &result->sizes[0]))
        return tu_call_error(call, TUTTI_ERROR_RANGE, "%s from all ranks is too large", tu_describe(x));
    return tu_shape_contiguous(call->entry->name, result);
}

static tutti_status start_gather(const tt_tensor *x, tt_tensor *out, tutti_group *group) {
    tutti_work *work;
    tutti_call options;
    tt_tensor *from = tu_stage_in(x, x->dtype);
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_flight_call(&options, &work);
    tutti_status status =
        tutti_all_gather(group, tu_pointer(from), tu_pointer(out), (size_t)x->numel, x->dtype, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(&(tu_flight_plan){ "all_gather", group, work, out, from, NULL });
    tu_tensor_drop(from);
    return status;
}

tutti_status tu_all_gather_shape(tu_call *call) {
    const tu_all_gather_attributes *attributes = call->attributes;
    return gathered(call, call->inputs[0], attributes->group, &call->results[0]);
}

tutti_status tu_all_gather_cpu(tu_call *call) {
    const tu_all_gather_attributes *attributes = call->attributes;
    return start_gather(call->inputs[0], call->outputs[0], attributes->group);
}

static tt_tensor *gather_rows(tt_tensor *x, tutti_group *group) {
    return tu_flight_check("all_gather", group, false) ? tu_all_gather(x, group) : NULL;
}

static tt_tensor *scatter_rows(tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    return tu_flight_check("reduce_scatter", group, false) ? tu_reduce_scatter(x, reduction, group) : NULL;
}

/* The gradient of one gathered tensor, whose input had `ndim` dimensions. */
static tt_tensor *ungather(tt_tensor *grad, int ndim, tutti_group *group) {
    tt_tensor *part = scatter_rows(tt_contiguous(grad), TUTTI_SUM, group);
    return ndim == 0 ? tt_view(part, tt_shape()) : part;
}

void tu_all_gather_gradient(tu_gradient *gradient) {
    const tu_all_gather_attributes *attributes = gradient->attributes;
    gradient->results[0] = ungather(gradient->grads[0], tu_input_shape(gradient, 0)->ndim, attributes->group);
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

/* Into a tensor that the caller has: of the wanted dtype and number of elements. */
static tutti_status check_out(tu_call *call, const tu_shape *wanted, tutti_group *group) {
    const tt_tensor *out = call->inputs[0];
    tutti_status status = no_gradient_in_place(call);
    if (status == TUTTI_OK)
        status = must_be_dense(call, out);
    if (status == TUTTI_OK && (out->dtype != wanted->dtype || out->numel != tu_shape_numel(wanted)))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "out is %s and must hold %s as %s, from %s on each of %d ranks", tu_describe(out),
                             tutti_dtype_name(wanted->dtype), tu_dims_text(wanted->ndim, wanted->sizes),
                             tu_describe(call->inputs[1]), tutti_group_size(group));
    return status;
}

tutti_status tu_all_gather_out_shape(tu_call *call) {
    const tu_all_gather_out_attributes *attributes = call->attributes;
    tu_shape wanted;
    tutti_status status = gathered(call, call->inputs[1], attributes->group, &wanted);
    return status == TUTTI_OK ? check_out(call, &wanted, attributes->group) : status;
}

tutti_status tu_all_gather_out_cpu(tu_call *call) {
    const tu_all_gather_out_attributes *attributes = call->attributes;
    return start_gather(call->inputs[1], call->inputs[0], attributes->group);
}

tt_tensor *tt_all_gather_out(tt_tensor *out, tt_tensor *x, tutti_group *group) {
    return tu_flight_check("all_gather_out", group, false) && tu_all_gather_out(out, x, group, NULL) ? out : NULL;
}

/* ---- reduce_scatter along dimension 0 ---- */

static tutti_status scattered(const tu_call *call, const tt_tensor *x, tutti_reduction reduction, tutti_group *group,
                              tu_shape *result) {
    int ranks = tutti_group_size(group);
    tutti_status status = check_reduction(call, reduction, x);
    if (status != TUTTI_OK)
        return status;
    if (x->ndim == 0 || x->sizes[0] % ranks != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "the size of the dimension to scatter of %s is not divisible by the %d ranks of the group",
                             tu_describe(x), ranks);
    *result = tu_shape_of(x);
    result->sizes[0] /= ranks;
    return tu_shape_contiguous(call->entry->name, result);
}

static tutti_status start_scatter(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, tutti_group *group) {
    tutti_work *work;
    tutti_call options;
    tt_tensor *from = tu_stage_in(x, x->dtype);
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_flight_call(&options, &work);
    tutti_status status = tutti_reduce_scatter(group, tu_pointer(from), tu_pointer(out), (size_t)out->numel, x->dtype,
                                               reduction, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(&(tu_flight_plan){ "reduce_scatter", group, work, out, from, NULL });
    tu_tensor_drop(from);
    return status;
}

tutti_status tu_reduce_scatter_shape(tu_call *call) {
    const tu_reduce_scatter_attributes *attributes = call->attributes;
    return scattered(call, call->inputs[0], attributes->reduction, attributes->group, &call->results[0]);
}

tutti_status tu_reduce_scatter_cpu(tu_call *call) {
    const tu_reduce_scatter_attributes *attributes = call->attributes;
    return start_scatter(call->inputs[0], call->outputs[0], attributes->reduction, attributes->group);
}

/* The gradient of one scattered sum or average. */
static tt_tensor *unscatter(tt_tensor *grad, tutti_reduction reduction, tutti_group *group) {
    tt_tensor *part = reduction == TUTTI_AVG ? tt_div_scalar(grad, tutti_group_size(group)) : grad;
    return gather_rows(tt_contiguous(part), group); /* the division comes first, so that nothing waits here */
}

void tu_reduce_scatter_gradient(tu_gradient *gradient) {
    const tu_reduce_scatter_attributes *attributes = gradient->attributes;
    if (has_gradient(gradient, attributes->reduction))
        gradient->results[0] = unscatter(gradient->grads[0], attributes->reduction, attributes->group);
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

tutti_status tu_reduce_scatter_out_shape(tu_call *call) {
    const tu_reduce_scatter_out_attributes *attributes = call->attributes;
    tu_shape wanted;
    tutti_status status = scattered(call, call->inputs[1], attributes->reduction, attributes->group, &wanted);
    return status == TUTTI_OK ? check_out(call, &wanted, attributes->group) : status;
}

tutti_status tu_reduce_scatter_out_cpu(tu_call *call) {
    const tu_reduce_scatter_out_attributes *attributes = call->attributes;
    return start_scatter(call->inputs[1], call->inputs[0], attributes->reduction, attributes->group);
}

tt_tensor *tt_reduce_scatter_out(tt_tensor *out, tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    if (needs_factor("reduce_scatter_out", reduction) || !tu_flight_check("reduce_scatter_out", group, false))
        return NULL;
    return tu_reduce_scatter_out(out, x, reduction, group, NULL) ? out : NULL;
}

/* ---- broadcast ---- */

tutti_status tu_broadcast_shape(tu_call *call) {
    const tu_broadcast_attributes *attributes = call->attributes;
    int ranks = attributes->group != NULL ? tutti_group_size(attributes->group) : 0;
    if (attributes->group != NULL && (attributes->root < 0 || attributes->root >= ranks))
        return tu_call_error(call, TUTTI_ERROR_RANGE, "root %d is no rank of the group, which has %d", attributes->root,
                             ranks);
    return same_shape(call);
}

tutti_status tu_broadcast_cpu(tu_call *call) {
    const tu_broadcast_attributes *attributes = call->attributes;
    tt_tensor *out = call->outputs[0], *from = tu_stage_in(call->inputs[0], call->inputs[0]->dtype);
    tutti_work *work;
    tutti_call options;
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    if (is_fake(attributes->group) && from != out && out->numel > 0)
        tu_copy_tensor(out, from);
    tu_flight_call(&options, &work);
    tutti_status status = tutti_broadcast(attributes->group, tu_pointer(from), tu_pointer(out), (size_t)out->numel,
                                          out->dtype, attributes->root, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(&(tu_flight_plan){ "broadcast", attributes->group, work, out,
                                                    from->storage == out->storage ? NULL : from, NULL });
    tu_tensor_drop(from);
    return status;
}

tt_tensor *tt_broadcast(tt_tensor *x, int root, tutti_group *group) {
    return tu_flight_check("broadcast", group, on_meta(x)) ? tu_broadcast(x, root, group) : NULL;
}

tt_tensor *tt_broadcast_(tt_tensor *x, int root, tutti_group *group) {
    return tu_flight_check("broadcast_", group, on_meta(x)) ? tu_broadcast_(x, root, group) : NULL;
}

/* ---- tensor-parallel regions ---- */

tutti_status tu_reduce_from_group_shape(tu_call *call) {
    tutti_status status = check_reduction(call, TUTTI_SUM, call->inputs[0]);
    return status == TUTTI_OK ? tu_shape_like_first(call) : status;
}

tutti_status tu_reduce_from_group_cpu(tu_call *call) {
    const tu_reduce_from_group_attributes *attributes = call->attributes;
    return start_reduce(call->inputs[0], call->outputs[0], TUTTI_SUM, 1, attributes->group);
}

tt_tensor *tt_copy_to_group(tt_tensor *x, tutti_group *group) {
    return tu_flight_check("copy_to_group", group, on_meta(x)) ? tu_copy_to_group(x, group) : NULL;
}

tt_tensor *tt_reduce_from_group(tt_tensor *x, tutti_group *group) {
    return tu_flight_check("reduce_from_group", group, on_meta(x)) ? tu_reduce_from_group(x, group) : NULL;
}

/* ---- coalesced: the calls of one batch, which runs as one work. The runner has waited for all inputs, since inside a
 * batch nothing may wait. ---- */

tutti_status tu_all_reduce_coalesced_shape(tu_call *call) {
    const tu_all_reduce_coalesced_attributes *attributes = call->attributes;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++) {
        call->results[i] = tu_shape_of(call->inputs[i]);
        status = check_reduction(call, attributes->reduction, call->inputs[i]);
        if (status == TUTTI_OK)
            status = tu_shape_contiguous(call->entry->name, &call->results[i]);
    }
    return status;
}

tutti_status tu_all_gather_coalesced_shape(tu_call *call) {
    const tu_all_gather_coalesced_attributes *attributes = call->attributes;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++)
        status = gathered(call, call->inputs[i], attributes->group, &call->results[i]);
    return status;
}

tutti_status tu_reduce_scatter_coalesced_shape(tu_call *call) {
    const tu_reduce_scatter_coalesced_attributes *attributes = call->attributes;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++)
        status = scattered(call, call->inputs[i], attributes->reduction, attributes->group, &call->results[i]);
    return status;
}

/* Starts one call of the batch for every input, and closes it. */
typedef tutti_status start_one(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, tutti_group *group);
static tutti_status start_all(tu_call *call, start_one *start, tutti_reduction reduction, tutti_group *group) {
    tutti_status status = tu_batch_open(call->entry->name, group);
    if (status != TUTTI_OK)
        return status;
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++)
        status = start(call->inputs[i], call->outputs[i], reduction, group);
    tutti_status closed = tu_batch_close(group, status == TUTTI_OK);
    return status == TUTTI_OK ? closed : status;
}

static tutti_status reduce_one(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, tutti_group *group) {
    return start_reduce(x, out, reduction, 1, group);
}

static tutti_status gather_one(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, tutti_group *group) {
    (void)reduction;
    return start_gather(x, out, group);
}

tutti_status tu_all_reduce_coalesced_cpu(tu_call *call) {
    const tu_all_reduce_coalesced_attributes *attributes = call->attributes;
    return start_all(call, reduce_one, attributes->reduction, attributes->group);
}

tutti_status tu_all_gather_coalesced_cpu(tu_call *call) {
    const tu_all_gather_coalesced_attributes *attributes = call->attributes;
    return start_all(call, gather_one, TUTTI_SUM, attributes->group);
}

tutti_status tu_reduce_scatter_coalesced_cpu(tu_call *call) {
    const tu_reduce_scatter_coalesced_attributes *attributes = call->attributes;
    return start_all(call, start_scatter, attributes->reduction, attributes->group);
}

/* Gradients: one collective for each result that a gradient arrived at, in order. */
void tu_all_reduce_coalesced_gradient(tu_gradient *gradient) {
    const tu_all_reduce_coalesced_attributes *attributes = gradient->attributes;
    for (int i = 0; i < gradient->input_count && has_gradient(gradient, attributes->reduction); i++)
        if (gradient->grads[i] != NULL)
            gradient->results[i] =
                tt_all_reduce(tt_contiguous(gradient->grads[i]), attributes->reduction, attributes->group);
}

void tu_all_gather_coalesced_gradient(tu_gradient *gradient) {
    const tu_all_gather_coalesced_attributes *attributes = gradient->attributes;
    for (int i = 0; i < gradient->input_count; i++)
        if (gradient->grads[i] != NULL)
            gradient->results[i] = ungather(gradient->grads[i], tu_input_shape(gradient, i)->ndim, attributes->group);
}

void tu_reduce_scatter_coalesced_gradient(tu_gradient *gradient) {
    const tu_reduce_scatter_coalesced_attributes *attributes = gradient->attributes;
    for (int i = 0; i < gradient->input_count && has_gradient(gradient, attributes->reduction); i++)
        if (gradient->grads[i] != NULL)
            gradient->results[i] = unscatter(gradient->grads[i], attributes->reduction, attributes->group);
}

/* Whether a coalesced call may begin; a list of none is no call. */
static bool may_begin(const char *who, tt_tensor_list list, tutti_reduction reduction, tutti_group *group) {
    return !needs_factor(who, reduction) && tu_flight_check(who, group, false) && list.count > 0;
}

tt_tensor_list tt_all_reduce_coalesced(tt_tensor_list list, tutti_reduction reduction, tutti_group *group) {
    if (!may_begin("all_reduce_coalesced", list, reduction, group))
        return tt_tensors_of(0, NULL);
    return tu_all_reduce_coalesced(list, reduction, group);
}

tt_tensor_list tt_all_gather_coalesced(tt_tensor_list list, tutti_group *group) {
    if (!may_begin("all_gather_coalesced", list, TUTTI_SUM, group))
        return tt_tensors_of(0, NULL);
    return tu_all_gather_coalesced(list, group);
}

tt_tensor_list tt_reduce_scatter_coalesced(tt_tensor_list list, tutti_reduction reduction, size_t dim_count,
                                           const int *dims, tutti_group *group) {
    tt_tensor_list none = { 0, NULL };
    if (!may_begin("reduce_scatter_coalesced", list, reduction, group))
        return none;
    if (dim_count != list.count) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "reduce_scatter_coalesced: %zu dimensions given for %zu tensors", dim_count,
                list.count);
        return none;
    }
    tt_tensor **rows = tu_scope_memory(list.count * sizeof *rows);
    for (size_t i = 0; rows != NULL && i < list.count; i++) {
        int at;
        if (tu_pending_take(tu_tensor_check("reduce_scatter_coalesced", "list", list.at[i])) != TUTTI_OK ||
            tu_pending_take(tu_wrap_dim("reduce_scatter_coalesced", dims[i], list.at[i]->ndim, &at)) != TUTTI_OK)
            return none;
        rows[i] = tt_contiguous(rows_of_parts(list.at[i], at, tutti_group_size(group)));
    }
    if (tu_self()->pending != TUTTI_OK)
        return none;
    return tu_reduce_scatter_coalesced(tt_tensors_of(list.count, rows), reduction, group);
}

/* ---- samples ---- */

static tt_tensor *made(tu_sampler *sampler) {
    return sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0);
}

tt_tensor *tu_all_gather_out_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(made(sampler));
    return tt_all_gather_out(tt_zeros_like(x), x, sampler->group);
}

tt_tensor *tu_reduce_scatter_out_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(made(sampler));
    return tt_reduce_scatter_out(tt_zeros_like(x), x, TUTTI_SUM, sampler->group);
}

static tt_tensor *sum_of_two(tt_tensor_list list) {
    return list.count == 2 ? tt_add(list.at[0], list.at[1]) : NULL;
}

tt_tensor *tu_all_reduce_coalesced_sample(tu_sampler *sampler) {
    tt_tensor *first = made(sampler);
    return sum_of_two(tt_all_reduce_coalesced(tt_tensors(first, made(sampler)), TUTTI_SUM, sampler->group));
}

tt_tensor *tu_all_gather_coalesced_sample(tu_sampler *sampler) {
    tt_tensor *first = made(sampler);
    return sum_of_two(tt_all_gather_coalesced(tt_tensors(first, made(sampler)), sampler->group));
}

tt_tensor *tu_reduce_scatter_coalesced_sample(tu_sampler *sampler) {
    tt_tensor *first = made(sampler);
    return sum_of_two(
        tt_reduce_scatter_coalesced(tt_tensors(first, made(sampler)), TUTTI_AVG, 2, (int[]){ 0, 1 }, sampler->group));
}
