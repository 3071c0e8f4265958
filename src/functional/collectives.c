/* SPDX-License-Identifier: Apache-2.0
 *
 * The functional collectives: shape rules, starts and gradients of their rows, and the public functions. Ranks gather
 * and scatter blocks that lie one after the other; where a call asks for another dimension than the first, the parts
 * are put in place when the collective lands, or gathered together before it starts.
 */
#include <string.h>

#include "functional/operators.h"
#include "functional/registry.h"
#include "functional/rules.h"
#include "tensor/stage.h"

tutti_status tu_rule_no_gradient(const tu_call *call) {
    if (!call->wants_grad)
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_UNSUPPORTED,
                         "has no gradient; use the form that returns a new tensor, or switch gradient mode off");
}

tutti_status tu_rule_dense(const tu_call *call, const tt_tensor *x) {
    if (x->flags & TU_CONTIGUOUS)
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s is not contiguous, and this form does not copy",
                         tu_describe(x));
}

/* The result is like the first input, which the in-place form writes where it lies. */
tutti_status tu_rule_same_shape(tu_call *call) {
    if (!call->in_place)
        return tu_shape_like_first(call);
    tutti_status status = tu_rule_no_gradient(call);
    if (status == TUTTI_OK)
        status = tu_rule_dense(call, call->inputs[0]);
    return status == TUTTI_OK ? tu_shape_of_first(call) : status;
}

tutti_status tu_rule_reduction(const tu_call *call, tutti_reduction reduction, const tt_tensor *x) {
    if (tutti_reduction_applies(reduction, x->dtype))
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_TYPE, "the reduction %s is not defined for %s",
                         tutti_reduction_name(reduction), tu_describe(x));
}

bool tu_rule_has_gradient(const tu_gradient *gradient, tutti_reduction reduction) {
    if (reduction == TUTTI_SUM || reduction == TUTTI_AVG)
        return true;
    tu_fail(TUTTI_ERROR_UNSUPPORTED, "%s: the gradient is defined for sum and avg only, not for %s",
            gradient->entry->name, tutti_reduction_name(reduction));
    return false;
}

bool tu_rule_needs_factor(const char *who, tutti_reduction reduction) {
    if (reduction != TUTTI_PREMUL_SUM || tu_self()->pending != TUTTI_OK)
        return false;
    tu_fail(TUTTI_ERROR_ARGUMENT,
            "%s: premul_sum needs a factor: use tt_all_reduce_premul, tt_reduce_scatter_premul or their sisters", who);
    return true;
}

/* ---- all_reduce ---- */

/* A factor of premul_sum in the type that the collective wants: x's, or that of its parts. */
typedef struct premul {
    _Alignas(16) char factor[16];
} premul;

static tutti_status set_factor(tutti_call *options, tutti_reduction reduction, double number, tutti_dtype dtype,
                               premul *kept) {
    tutti_dtype real = dtype == TUTTI_C64 ? TUTTI_F32 : dtype == TUTTI_C128 ? TUTTI_F64 : dtype;
    options->factor = reduction == TUTTI_PREMUL_SUM ? kept->factor : NULL;
    return tutti_convert(&number, TUTTI_F64, kept->factor, real, 1);
}

static tutti_status start_reduce(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, double factor,
                                 tutti_group *group) {
    tutti_work *work;
    tutti_call options;
    premul kept;
    const tt_tensor *from = x;
    tu_flight_call(&options, &work);
    tutti_status status = set_factor(&options, reduction, factor, x->dtype, &kept);
    if (status != TUTTI_OK)
        return status;
    if (x != out && (!(x->flags & TU_CONTIGUOUS) || tu_group_is_fake(group))) {
        tu_copy_tensor(out, x); /* to where the result goes, and reduced there */
        from = out;
    }
    status =
        tutti_all_reduce(group, tu_pointer(from), tu_pointer(out), (size_t)out->numel, out->dtype, reduction, &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(&(tu_flight_plan){ "all_reduce", group, work, out, from == out ? NULL : from, NULL });
    return status;
}

tutti_status tu_all_reduce_shape(tu_call *call) {
    const tu_all_reduce_attributes *attributes = call->attributes;
    tutti_status status = tu_rule_reduction(call, attributes->reduction, call->inputs[0]);
    return status == TUTTI_OK ? tu_rule_same_shape(call) : status;
}

tutti_status tu_all_reduce_cpu(tu_call *call) {
    const tu_all_reduce_attributes *attributes = call->attributes;
    return start_reduce(call->inputs[0], call->outputs[0], attributes->reduction, 1, attributes->group);
}

void tu_all_reduce_gradient(tu_gradient *gradient) {
    const tu_all_reduce_attributes *attributes = gradient->attributes;
    if (tu_rule_has_gradient(gradient, attributes->reduction))
        gradient->results[0] =
            tt_all_reduce(tt_contiguous(gradient->grads[0]), attributes->reduction, attributes->group);
}

tutti_status tu_all_reduce_premul_shape(tu_call *call) {
    tutti_status status = tu_rule_reduction(call, TUTTI_PREMUL_SUM, call->inputs[0]);
    return status == TUTTI_OK ? tu_rule_same_shape(call) : status;
}

tutti_status tu_all_reduce_premul_cpu(tu_call *call) {
    const tu_all_reduce_premul_attributes *attributes = call->attributes;
    return start_reduce(call->inputs[0], call->outputs[0], TUTTI_PREMUL_SUM, attributes->factor, attributes->group);
}

tt_tensor *tt_all_reduce(tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    if (tu_rule_needs_factor("all_reduce", reduction) || !tu_flight_check("all_reduce", group, tu_is_meta(x)))
        return NULL;
    return tu_all_reduce(x, reduction, group);
}

tt_tensor *tt_all_reduce_premul(tt_tensor *x, double factor, tutti_group *group) {
    if (!tu_flight_check("all_reduce_premul", group, tu_is_meta(x)))
        return NULL;
    return tu_all_reduce_premul(x, factor, group);
}

tt_tensor *tt_all_reduce_premul_(tt_tensor *x, double factor, tutti_group *group) {
    if (!tu_flight_check("all_reduce_premul_", group, tu_is_meta(x)))
        return NULL;
    return tu_all_reduce_premul_(x, factor, group);
}

tt_tensor *tt_all_reduce_(tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    if (tu_rule_needs_factor("all_reduce_", reduction) || !tu_flight_check("all_reduce_", group, tu_is_meta(x)))
        return NULL;
    return tu_all_reduce_(x, reduction, group);
}

/* ---- all_gather ---- */

/* A 0-dim x counts as one row. */
tutti_status tu_rule_gathered(const tu_call *call, const tt_tensor *x, int dim, tutti_group *group, tu_shape *result) {
    int at;
    tutti_status status = tu_wrap_dim(call->entry->name, dim, x->ndim, &at);
    if (status != TUTTI_OK)
        return status;
    *result = tu_shape_of(x);
    result->ndim = x->ndim == 0 ? 1 : x->ndim;
    if (x->ndim == 0)
        result->sizes[0] = 1;
    if (__builtin_mul_overflow(result->sizes[at], tutti_group_size(group), &result->sizes[at]))
        return tu_call_error(call, TUTTI_ERROR_RANGE, "%s from all ranks is too large", tu_describe(x));
    return tu_shape_contiguous(call->entry->name, result);
}

/* How many rows there are before dim: where there is more than one, the ranks' parts of a tensor do not lie one after
 * the other. */
static int64_t rows_before(const tt_tensor *x, int dim) {
    int64_t rows = 1;
    for (int i = 0; i < dim; i++)
        rows *= x->sizes[i];
    return rows;
}

/* Memory for the parts of all ranks, one after the other, each in the shape of `part`. */
static tt_tensor *block_of_parts(const char *who, const tu_shape *part, int ranks) {
    tu_shape shape = *part;
    shape.sizes[0] *= ranks; /* dim is another one; the product is no larger than the whole tensor */
    shape.offset = 0;
    return tu_shape_contiguous(who, &shape) == TUTTI_OK ? tu_tensor_new(&shape) : NULL;
}

static tutti_status start_gather(const tt_tensor *x, tt_tensor *out, int dim, tutti_group *group) {
    tutti_work *work;
    tutti_call options;
    bool apart = x->numel > 0 && rows_before(x, dim) > 1;
    tu_shape part = tu_shape_of(x);
    tt_tensor *from = tu_stage_in(x, x->dtype);
    tt_tensor *to = apart ? block_of_parts("all_gather", &part, tutti_group_size(group)) : tu_tensor_hold(out);
    tutti_status status = from == NULL || to == NULL ? TUTTI_ERROR_MEMORY : TUTTI_OK;
    if (status == TUTTI_OK) {
        tu_flight_call(&options, &work);
        status = tutti_all_gather(group, tu_pointer(from), tu_pointer(to), (size_t)x->numel, x->dtype, &options);
    }
    if (status == TUTTI_OK)
        status = tu_flight_begin(&(tu_flight_plan){ "all_gather", group, work, .writes = out, .reads = from,
                                                    .lands = apart ? to : NULL, .dim = dim });
    tu_tensor_drop(from);
    tu_tensor_drop(to);
    return status;
}

tutti_status tu_all_gather_shape(tu_call *call) {
    const tu_all_gather_attributes *attributes = call->attributes;
    return tu_rule_gathered(call, call->inputs[0], attributes->dim, attributes->group, &call->results[0]);
}

tutti_status tu_all_gather_cpu(tu_call *call) {
    const tu_all_gather_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    return start_gather(x, call->outputs[0], tu_dim(attributes->dim, x->ndim), attributes->group);
}

/* The gradient of one gathered tensor, whose input had `ndim` dimensions. */
static tt_tensor *ungather(tt_tensor *grad, int ndim, int dim, tutti_group *group) {
    tt_tensor *part = tt_reduce_scatter(tt_contiguous(grad), TUTTI_SUM, dim, group);
    return ndim == 0 ? tt_view(part, tt_shape()) : part;
}

void tu_all_gather_gradient(tu_gradient *gradient) {
    const tu_all_gather_attributes *attributes = gradient->attributes;
    int ndim = tu_input_shape(gradient, 0)->ndim;
    gradient->results[0] = ungather(gradient->grads[0], ndim, attributes->dim, attributes->group);
}

tt_tensor *tt_all_gather(tt_tensor *x, int dim, tutti_group *group) {
    return tu_flight_check("all_gather", group, false) ? tu_all_gather(x, dim, group) : NULL;
}

/* Into a tensor that the caller has: of the wanted dtype and number of elements. */
tutti_status tu_rule_out(tu_call *call, const tu_shape *wanted, tutti_group *group) {
    const tt_tensor *out = call->inputs[0];
    tutti_status status = tu_rule_no_gradient(call);
    if (status == TUTTI_OK)
        status = tu_rule_dense(call, out);
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
    tutti_status status = tu_rule_gathered(call, call->inputs[1], 0, attributes->group, &wanted);
    return status == TUTTI_OK ? tu_rule_out(call, &wanted, attributes->group) : status;
}

tutti_status tu_all_gather_out_cpu(tu_call *call) {
    const tu_all_gather_out_attributes *attributes = call->attributes;
    return start_gather(call->inputs[1], call->inputs[0], 0, attributes->group);
}

tt_tensor *tt_all_gather_out(tt_tensor *out, tt_tensor *x, tutti_group *group) {
    return tu_flight_check("all_gather_out", group, false) && tu_all_gather_out(out, x, group, NULL) ? out : NULL;
}

/* ---- reduce_scatter ---- */

tutti_status tu_rule_scattered(const tu_call *call, const tt_tensor *x, tutti_reduction reduction, int dim,
                               tutti_group *group, tu_shape *result) {
    int ranks = tutti_group_size(group), at;
    tutti_status status = tu_rule_reduction(call, reduction, x);
    if (status == TUTTI_OK)
        status = tu_wrap_dim(call->entry->name, dim, x->ndim, &at);
    if (status != TUTTI_OK)
        return status;
    if (x->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s has no dimension to scatter", tu_describe(x));
    if (x->sizes[at] % ranks != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "dimension %d of %s is not divisible by the %d ranks of the group", at, tu_describe(x),
                             ranks);
    *result = tu_shape_of(x);
    result->sizes[at] /= ranks;
    return tu_shape_contiguous(call->entry->name, result);
}

/* The parts of x along dim, one after the other: x itself, held, where they lie so; else a copy. */
static tt_tensor *stage_parts(const tt_tensor *x, const tt_tensor *out, int dim, int ranks) {
    if (x->numel == 0 || rows_before(x, dim) == 1)
        return tu_stage_in(x, x->dtype);
    tu_shape part = tu_shape_of(out);
    tt_tensor *block = block_of_parts("reduce_scatter", &part, ranks);
    if (block != NULL)
        tu_move_parts(block, x, dim, ranks, TU_PARTS_TO_BLOCK);
    return block;
}

void tu_fake_part(tutti_group *group, tt_tensor *out, const tt_tensor *x) {
    size_t bytes = (size_t)out->numel * tu_dtype_bytes[out->dtype];
    if (bytes > 0 && tu_group_is_fake(group))
        memcpy(tu_pointer(out), (const char *)tu_pointer(x) + (size_t)tutti_group_rank(group) * bytes, bytes);
}

static tutti_status start_scatter(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, double factor, int dim,
                                  tutti_group *group) {
    tutti_work *work;
    tutti_call options;
    premul kept;
    tt_tensor *from = stage_parts(x, out, dim, tutti_group_size(group));
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_fake_part(group, out, from);
    tu_flight_call(&options, &work);
    tutti_status status = set_factor(&options, reduction, factor, x->dtype, &kept);
    if (status == TUTTI_OK)
        status = tutti_reduce_scatter(group, tu_pointer(from), tu_pointer(out), (size_t)out->numel, x->dtype, reduction,
                                      &options);
    if (status == TUTTI_OK)
        status = tu_flight_begin(&(tu_flight_plan){ "reduce_scatter", group, work, .writes = out, .reads = from });
    tu_tensor_drop(from);
    return status;
}

tutti_status tu_reduce_scatter_shape(tu_call *call) {
    const tu_reduce_scatter_attributes *attributes = call->attributes;
    return tu_rule_scattered(call, call->inputs[0], attributes->reduction, attributes->dim, attributes->group,
                             &call->results[0]);
}

tutti_status tu_reduce_scatter_cpu(tu_call *call) {
    const tu_reduce_scatter_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    return start_scatter(x, call->outputs[0], attributes->reduction, 1, tu_dim(attributes->dim, x->ndim),
                         attributes->group);
}

/* The gradient of one scattered sum or average. */
static tt_tensor *unscatter(tt_tensor *grad, tutti_reduction reduction, int dim, tutti_group *group) {
    tt_tensor *part = reduction == TUTTI_AVG ? tt_div_scalar(grad, tutti_group_size(group)) : grad;
    return tt_all_gather(tt_contiguous(part), dim, group); /* the division comes first, so that nothing waits here */
}

void tu_reduce_scatter_gradient(tu_gradient *gradient) {
    const tu_reduce_scatter_attributes *attributes = gradient->attributes;
    if (tu_rule_has_gradient(gradient, attributes->reduction))
        gradient->results[0] = unscatter(gradient->grads[0], attributes->reduction, attributes->dim, attributes->group);
}

tt_tensor *tt_reduce_scatter(tt_tensor *x, tutti_reduction reduction, int dim, tutti_group *group) {
    if (tu_rule_needs_factor("reduce_scatter", reduction) || !tu_flight_check("reduce_scatter", group, false))
        return NULL;
    return tu_reduce_scatter(x, reduction, dim, group);
}

tutti_status tu_reduce_scatter_out_shape(tu_call *call) {
    const tu_reduce_scatter_out_attributes *attributes = call->attributes;
    tu_shape wanted;
    tutti_status status =
        tu_rule_scattered(call, call->inputs[1], attributes->reduction, 0, attributes->group, &wanted);
    return status == TUTTI_OK ? tu_rule_out(call, &wanted, attributes->group) : status;
}

tutti_status tu_reduce_scatter_out_cpu(tu_call *call) {
    const tu_reduce_scatter_out_attributes *attributes = call->attributes;
    return start_scatter(call->inputs[1], call->inputs[0], attributes->reduction, 1, 0, attributes->group);
}

tt_tensor *tt_reduce_scatter_out(tt_tensor *out, tt_tensor *x, tutti_reduction reduction, tutti_group *group) {
    if (tu_rule_needs_factor("reduce_scatter_out", reduction) || !tu_flight_check("reduce_scatter_out", group, false))
        return NULL;
    return tu_reduce_scatter_out(out, x, reduction, group, NULL) ? out : NULL;
}

/* ---- reduce_scatter by premul_sum ---- */

tutti_status tu_reduce_scatter_premul_shape(tu_call *call) {
    const tu_reduce_scatter_premul_attributes *attributes = call->attributes;
    return tu_rule_scattered(call, call->inputs[0], TUTTI_PREMUL_SUM, attributes->dim, attributes->group,
                             &call->results[0]);
}

tutti_status tu_reduce_scatter_premul_cpu(tu_call *call) {
    const tu_reduce_scatter_premul_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    return start_scatter(x, call->outputs[0], TUTTI_PREMUL_SUM, attributes->factor, tu_dim(attributes->dim, x->ndim),
                         attributes->group);
}

tt_tensor *tt_reduce_scatter_premul(tt_tensor *x, double factor, int dim, tutti_group *group) {
    return tu_flight_check("reduce_scatter_premul", group, false) ? tu_reduce_scatter_premul(x, factor, dim, group)
                                                                  : NULL;
}

tutti_status tu_reduce_scatter_premul_out_shape(tu_call *call) {
    const tu_reduce_scatter_premul_out_attributes *attributes = call->attributes;
    tu_shape wanted;
    tutti_status status = tu_rule_scattered(call, call->inputs[1], TUTTI_PREMUL_SUM, 0, attributes->group, &wanted);
    return status == TUTTI_OK ? tu_rule_out(call, &wanted, attributes->group) : status;
}

tutti_status tu_reduce_scatter_premul_out_cpu(tu_call *call) {
    const tu_reduce_scatter_premul_out_attributes *attributes = call->attributes;
    return start_scatter(call->inputs[1], call->inputs[0], TUTTI_PREMUL_SUM, attributes->factor, 0, attributes->group);
}

tt_tensor *tt_reduce_scatter_premul_out(tt_tensor *out, tt_tensor *x, double factor, tutti_group *group) {
    return tu_flight_check("reduce_scatter_premul_out", group, false) &&
                   tu_reduce_scatter_premul_out(out, x, factor, group, NULL)
               ? out
               : NULL;
}

/* ---- broadcast ---- */

tutti_status tu_broadcast_shape(tu_call *call) {
    const tu_broadcast_attributes *attributes = call->attributes;
    int ranks = attributes->group != NULL ? tutti_group_size(attributes->group) : 0;
    if (attributes->group != NULL && (attributes->root < 0 || attributes->root >= ranks))
        return tu_call_error(call, TUTTI_ERROR_RANGE, "root %d is no rank of the group, which has %d", attributes->root,
                             ranks);
    return tu_rule_same_shape(call);
}

tutti_status tu_broadcast_cpu(tu_call *call) {
    const tu_broadcast_attributes *attributes = call->attributes;
    tt_tensor *out = call->outputs[0], *from = tu_stage_in(call->inputs[0], call->inputs[0]->dtype);
    tutti_work *work;
    tutti_call options;
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    if (tu_group_is_fake(attributes->group) && from != out && out->numel > 0)
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
    return tu_flight_check("broadcast", group, tu_is_meta(x)) ? tu_broadcast(x, root, group) : NULL;
}

tt_tensor *tt_broadcast_(tt_tensor *x, int root, tutti_group *group) {
    return tu_flight_check("broadcast_", group, tu_is_meta(x)) ? tu_broadcast_(x, root, group) : NULL;
}

/* ---- tensor-parallel regions ---- */

tutti_status tu_reduce_from_group_shape(tu_call *call) {
    tutti_status status = tu_rule_reduction(call, TUTTI_SUM, call->inputs[0]);
    return status == TUTTI_OK ? tu_shape_like_first(call) : status;
}

tutti_status tu_reduce_from_group_cpu(tu_call *call) {
    const tu_reduce_from_group_attributes *attributes = call->attributes;
    return start_reduce(call->inputs[0], call->outputs[0], TUTTI_SUM, 1, attributes->group);
}

tt_tensor *tt_copy_to_group(tt_tensor *x, tutti_group *group) {
    return tu_flight_check("copy_to_group", group, tu_is_meta(x)) ? tu_copy_to_group(x, group) : NULL;
}

tt_tensor *tt_reduce_from_group(tt_tensor *x, tutti_group *group) {
    return tu_flight_check("reduce_from_group", group, tu_is_meta(x)) ? tu_reduce_from_group(x, group) : NULL;
}

/* ---- coalesced: the calls of one batch, which runs as one work. The runner has waited for all inputs, since inside a
 * batch nothing may wait. ---- */

/* What the calls of a batch share. */
typedef struct coalesced {
    tutti_reduction reduction;
    double factor;
    tu_ints dims; /* one for each tensor; none: dimension 0 */
    tutti_group *group;
} coalesced;
typedef tutti_status start_one(const tt_tensor *x, tt_tensor *out, const coalesced *how, int dim);

/* Starts one call of the batch for every input, and closes it. */
static tutti_status start_all(tu_call *call, start_one *start, const coalesced *how) {
    tutti_status status = tu_batch_open(call->entry->name, how->group);
    if (status != TUTTI_OK)
        return status;
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++) {
        int dim = how->dims.count > 0 ? tu_dim(how->dims.at[i], call->inputs[i]->ndim) : 0;
        status = start(call->inputs[i], call->outputs[i], how, dim);
    }
    tutti_status closed = tu_batch_close(how->group, status == TUTTI_OK);
    return status == TUTTI_OK ? closed : status;
}

static tutti_status reduce_one(const tt_tensor *x, tt_tensor *out, const coalesced *how, int dim) {
    (void)dim;
    return start_reduce(x, out, how->reduction, how->factor, how->group);
}

static tutti_status gather_one(const tt_tensor *x, tt_tensor *out, const coalesced *how, int dim) {
    return start_gather(x, out, dim, how->group);
}

static tutti_status scatter_one(const tt_tensor *x, tt_tensor *out, const coalesced *how, int dim) {
    return start_scatter(x, out, how->reduction, how->factor, dim, how->group);
}

/* Whether two dense tensors lie in one another; on meta by their places in the storage. */
static bool overlap(const tt_tensor *left, const tt_tensor *right) {
    int64_t begin = left->offset * tu_dtype_bytes[left->dtype], other = right->offset * tu_dtype_bytes[right->dtype];
    return left->storage == right->storage && left->numel > 0 && right->numel > 0 &&
           begin < other + right->numel * tu_dtype_bytes[right->dtype] &&
           other < begin + left->numel * tu_dtype_bytes[left->dtype];
}

/* In place every tensor is written, in an order that nobody promises. */
static tutti_status check_list_in_place(const tu_call *call) {
    tutti_status status = tu_rule_no_gradient(call);
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++) {
        status = tu_rule_dense(call, call->inputs[i]);
        for (int j = 0; j < i && status == TUTTI_OK; j++)
            if (overlap(call->inputs[i], call->inputs[j]))
                return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                                     "tensors %d, %s, and %d, %s, of the list share memory, and both are written", j,
                                     tu_describe(call->inputs[j]), i, tu_describe(call->inputs[i]));
    }
    return status;
}

static tutti_status shapes_of_reduced(tu_call *call, tutti_reduction reduction) {
    tutti_status status = call->in_place ? check_list_in_place(call) : TUTTI_OK;
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++) {
        call->results[i] = tu_shape_of(call->inputs[i]);
        status = tu_rule_reduction(call, reduction, call->inputs[i]);
        if (status == TUTTI_OK)
            status = tu_shape_contiguous(call->entry->name, &call->results[i]);
    }
    return status;
}

tutti_status tu_all_reduce_coalesced_shape(tu_call *call) {
    const tu_all_reduce_coalesced_attributes *attributes = call->attributes;
    return shapes_of_reduced(call, attributes->reduction);
}

tutti_status tu_all_reduce_coalesced_cpu(tu_call *call) {
    const tu_all_reduce_coalesced_attributes *attributes = call->attributes;
    return start_all(call, reduce_one, &(coalesced){ attributes->reduction, 1, .group = attributes->group });
}

tutti_status tu_all_reduce_coalesced_premul_shape(tu_call *call) {
    return shapes_of_reduced(call, TUTTI_PREMUL_SUM);
}

tutti_status tu_all_reduce_coalesced_premul_cpu(tu_call *call) {
    const tu_all_reduce_coalesced_premul_attributes *attributes = call->attributes;
    return start_all(call, reduce_one,
                     &(coalesced){ TUTTI_PREMUL_SUM, attributes->factor, .group = attributes->group });
}

tutti_status tu_all_gather_coalesced_shape(tu_call *call) {
    const tu_all_gather_coalesced_attributes *attributes = call->attributes;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++)
        status = tu_rule_gathered(call, call->inputs[i], 0, attributes->group, &call->results[i]);
    return status;
}

tutti_status tu_all_gather_coalesced_cpu(tu_call *call) {
    const tu_all_gather_coalesced_attributes *attributes = call->attributes;
    return start_all(call, gather_one, &(coalesced){ .group = attributes->group });
}

tutti_status tu_all_gather_coalesced_dims_shape(tu_call *call) {
    const tu_all_gather_coalesced_dims_attributes *attributes = call->attributes;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++)
        status =
            tu_rule_gathered(call, call->inputs[i], (int)attributes->dims.at[i], attributes->group, &call->results[i]);
    return status;
}

tutti_status tu_all_gather_coalesced_dims_cpu(tu_call *call) {
    const tu_all_gather_coalesced_dims_attributes *attributes = call->attributes;
    return start_all(call, gather_one, &(coalesced){ .dims = attributes->dims, .group = attributes->group });
}

static tutti_status shapes_of_scattered(tu_call *call, tutti_reduction reduction, tu_ints dims, tutti_group *group) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++)
        status = tu_rule_scattered(call, call->inputs[i], reduction, (int)dims.at[i], group, &call->results[i]);
    return status;
}

tutti_status tu_reduce_scatter_coalesced_shape(tu_call *call) {
    const tu_reduce_scatter_coalesced_attributes *attributes = call->attributes;
    return shapes_of_scattered(call, attributes->reduction, attributes->dims, attributes->group);
}

tutti_status tu_reduce_scatter_coalesced_cpu(tu_call *call) {
    const tu_reduce_scatter_coalesced_attributes *attributes = call->attributes;
    return start_all(call, scatter_one, &(coalesced){ attributes->reduction, 1, attributes->dims, attributes->group });
}

tutti_status tu_reduce_scatter_coalesced_premul_shape(tu_call *call) {
    const tu_reduce_scatter_coalesced_premul_attributes *attributes = call->attributes;
    return shapes_of_scattered(call, TUTTI_PREMUL_SUM, attributes->dims, attributes->group);
}

tutti_status tu_reduce_scatter_coalesced_premul_cpu(tu_call *call) {
    const tu_reduce_scatter_coalesced_premul_attributes *attributes = call->attributes;
    return start_all(call, scatter_one,
                     &(coalesced){ TUTTI_PREMUL_SUM, attributes->factor, attributes->dims, attributes->group });
}

/* ---- gradients of coalesced calls: one operation for all results that a gradient arrived at ---- */

/* The gradients that are there, dense, and which inputs they belong to. */
typedef struct arrived {
    size_t count;
    tt_tensor **grads;
    int *inputs;
} arrived;

/* shares: what each is divided by before it is sent; 1 for nothing. */
static bool find_arrived(const tu_gradient *gradient, int shares, arrived *found) {
    size_t room = (size_t)gradient->input_count;
    *found = (arrived){ 0, tu_scope_memory(room * sizeof *found->grads), NULL };
    if (found->grads != NULL)
        found->inputs = tu_scope_memory(room * sizeof *found->inputs);
    for (int i = 0; found->inputs != NULL && i < gradient->input_count; i++)
        if (gradient->grads[i] != NULL) {
            tt_tensor *grad = shares != 1 ? tt_div_scalar(gradient->grads[i], shares) : gradient->grads[i];
            found->grads[found->count] = tt_contiguous(grad);
            found->inputs[found->count++] = i;
        }
    return found->inputs != NULL && found->count > 0 && tu_self()->pending == TUTTI_OK;
}

/* factor: what each result is multiplied by; 1 for nothing, and then nobody waits for it here. */
static void set_results(tu_gradient *gradient, const arrived *found, tt_tensor_list results, double factor) {
    for (size_t i = 0; i < results.count; i++) {
        tt_tensor *result = results.at[i];
        if (tu_input_shape(gradient, found->inputs[i])->ndim == 0)
            result = tt_view(result, tt_shape());
        gradient->results[found->inputs[i]] = factor != 1 ? tt_mul_scalar(result, factor) : result;
    }
}

static void reduce_gradients(tu_gradient *gradient, tutti_reduction reduction, double factor, tutti_group *group) {
    arrived found;
    if (find_arrived(gradient, 1, &found))
        set_results(gradient, &found,
                    tt_all_reduce_coalesced(tt_tensors_of(found.count, found.grads), reduction, group), factor);
}

void tu_all_reduce_coalesced_gradient(tu_gradient *gradient) {
    const tu_all_reduce_coalesced_attributes *attributes = gradient->attributes;
    if (tu_rule_has_gradient(gradient, attributes->reduction))
        reduce_gradients(gradient, attributes->reduction, 1, attributes->group);
}

void tu_all_reduce_coalesced_premul_gradient(tu_gradient *gradient) {
    const tu_all_reduce_coalesced_premul_attributes *attributes = gradient->attributes;
    reduce_gradients(gradient, TUTTI_SUM, attributes->factor, attributes->group);
}

/* The dims of those that arrived; zeros where the call had none. */
static bool dims_of_arrived(const arrived *found, tu_ints dims, tu_ints *result) {
    int64_t *at = tu_scope_memory(found->count * sizeof *at);
    for (size_t i = 0; at != NULL && i < found->count; i++)
        at[i] = dims.count > 0 ? dims.at[found->inputs[i]] : 0;
    *result = (tu_ints){ found->count, at };
    return at != NULL;
}

static void scatter_gradients(tu_gradient *gradient, tu_ints dims, tutti_group *group) {
    arrived found;
    tu_ints along;
    if (find_arrived(gradient, 1, &found) && dims_of_arrived(&found, dims, &along) &&
        tu_flight_check("reduce_scatter_coalesced", group, false))
        set_results(gradient, &found,
                    tu_reduce_scatter_coalesced(tt_tensors_of(found.count, found.grads), TUTTI_SUM, along, group), 1);
}

void tu_all_gather_coalesced_gradient(tu_gradient *gradient) {
    const tu_all_gather_coalesced_attributes *attributes = gradient->attributes;
    scatter_gradients(gradient, (tu_ints){ 0, NULL }, attributes->group);
}

void tu_all_gather_coalesced_dims_gradient(tu_gradient *gradient) {
    const tu_all_gather_coalesced_dims_attributes *attributes = gradient->attributes;
    scatter_gradients(gradient, attributes->dims, attributes->group);
}

static void gather_gradients(tu_gradient *gradient, int shares, double factor, tu_ints dims, tutti_group *group) {
    arrived found;
    tu_ints along;
    if (find_arrived(gradient, shares, &found) && dims_of_arrived(&found, dims, &along) &&
        tu_flight_check("all_gather_coalesced", group, false))
        set_results(gradient, &found,
                    tu_all_gather_coalesced_dims(tt_tensors_of(found.count, found.grads), along, group), factor);
}

void tu_reduce_scatter_coalesced_gradient(tu_gradient *gradient) {
    const tu_reduce_scatter_coalesced_attributes *attributes = gradient->attributes;
    int shares = attributes->reduction == TUTTI_AVG ? tutti_group_size(attributes->group) : 1;
    if (tu_rule_has_gradient(gradient, attributes->reduction))
        gather_gradients(gradient, shares, 1, attributes->dims, attributes->group);
}

void tu_reduce_scatter_coalesced_premul_gradient(tu_gradient *gradient) {
    const tu_reduce_scatter_coalesced_premul_attributes *attributes = gradient->attributes;
    gather_gradients(gradient, 1, attributes->factor, attributes->dims, attributes->group);
}

/* ---- the coalesced calls ---- */

static const tt_tensor_list none = { 0, NULL };

/* Whether a coalesced call may begin; a list of none is no call. */
static bool may_begin(const char *who, tt_tensor_list list, tutti_group *group, bool group_optional) {
    return tu_flight_check(who, group, group_optional && list.count > 0 && list.at != NULL && tu_is_meta(list.at[0])) &&
           list.count > 0;
}

tt_tensor_list tt_all_reduce_coalesced(tt_tensor_list list, tutti_reduction reduction, tutti_group *group) {
    bool begins = !tu_rule_needs_factor("all_reduce_coalesced", reduction) &&
                  may_begin("all_reduce_coalesced", list, group, true);
    return begins ? tu_all_reduce_coalesced(list, reduction, group) : none;
}

tt_tensor_list tt_all_reduce_coalesced_(tt_tensor_list list, tutti_reduction reduction, tutti_group *group) {
    bool begins = !tu_rule_needs_factor("all_reduce_coalesced_", reduction) &&
                  may_begin("all_reduce_coalesced_", list, group, true);
    return begins ? tu_all_reduce_coalesced_(list, reduction, group) : none;
}

tt_tensor_list tt_all_reduce_coalesced_premul(tt_tensor_list list, double factor, tutti_group *group) {
    return may_begin("all_reduce_coalesced_premul", list, group, true)
               ? tu_all_reduce_coalesced_premul(list, factor, group)
               : none;
}

tt_tensor_list tt_all_reduce_coalesced_premul_(tt_tensor_list list, double factor, tutti_group *group) {
    return may_begin("all_reduce_coalesced_premul_", list, group, true)
               ? tu_all_reduce_coalesced_premul_(list, factor, group)
               : none;
}

tt_tensor_list tt_all_gather_coalesced(tt_tensor_list list, tutti_group *group) {
    return may_begin("all_gather_coalesced", list, group, false) ? tu_all_gather_coalesced(list, group) : none;
}

/* A dimension for each tensor, in memory of the scope; without a list, and the error pending, where they do not fit. */
static tu_ints wide_dims(const char *who, tt_tensor_list list, size_t dim_count, const int *dims) {
    tu_ints wide = { 0, NULL };
    if (dim_count != list.count || dims == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: %zu dimensions given for %zu tensors", who, dims == NULL ? 0 : dim_count,
                list.count);
        return wide;
    }
    int64_t *at = tu_scope_memory(dim_count * sizeof *at);
    for (size_t i = 0; at != NULL && i < dim_count; i++)
        at[i] = dims[i];
    return (tu_ints){ dim_count, at };
}

tt_tensor_list tt_reduce_scatter_coalesced(tt_tensor_list list, tutti_reduction reduction, size_t dim_count,
                                           const int *dims, tutti_group *group) {
    static const char who[] = "reduce_scatter_coalesced";
    if (tu_rule_needs_factor(who, reduction) || !may_begin(who, list, group, false))
        return none;
    tu_ints wide = wide_dims(who, list, dim_count, dims);
    return wide.at != NULL ? tu_reduce_scatter_coalesced(list, reduction, wide, group) : none;
}

tt_tensor_list tt_reduce_scatter_coalesced_premul(tt_tensor_list list, double factor, size_t dim_count, const int *dims,
                                                  tutti_group *group) {
    static const char who[] = "reduce_scatter_coalesced_premul";
    if (!may_begin(who, list, group, false))
        return none;
    tu_ints wide = wide_dims(who, list, dim_count, dims);
    return wide.at != NULL ? tu_reduce_scatter_coalesced_premul(list, factor, wide, group) : none;
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

tt_tensor *tu_reduce_scatter_premul_out_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(made(sampler));
    return tt_reduce_scatter_premul_out(tt_zeros_like(x), x, 2, sampler->group);
}

tt_tensor *tu_all_reduce_coalesced_premul_sample(tu_sampler *sampler) {
    tt_tensor *first = made(sampler);
    return sum_of_two(tt_all_reduce_coalesced_premul(tt_tensors(first, made(sampler)), 2, sampler->group));
}

tt_tensor *tu_reduce_scatter_coalesced_premul_sample(tu_sampler *sampler) {
    tt_tensor *first = made(sampler);
    return sum_of_two(
        tt_reduce_scatter_coalesced_premul(tt_tensors(first, made(sampler)), 2, 2, (int[]){ 0, 1 }, sampler->group));
}

tt_tensor *tu_all_gather_coalesced_dims_sample(tu_sampler *sampler) {
    tt_tensor *first = made(sampler);
    tu_ints dims = { 2, (int64_t[]){ 0, 1 } };
    return sum_of_two(tu_all_gather_coalesced_dims(tt_tensors(first, made(sampler)), dims, sampler->group));
}
