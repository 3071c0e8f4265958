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

tutti_status tu_start_reduce(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, double factor,
                             tutti_group *group) {
    premul kept;
    tu_flight_plan plan = { "all_reduce", group, .writes = out };
    const tt_tensor *from = x;
    tutti_status status = set_factor(tu_flight_call(&plan), reduction, factor, x->dtype, &kept);
    if (status != TUTTI_OK)
        return status;
    if (x != out && (!(x->flags & TU_CONTIGUOUS) || tu_group_is_fake(group))) {
        tu_copy_tensor(out, x); /* to where the result goes, and reduced there */
        from = out;
    }
    plan.reads = from == out ? NULL : from;
    status = tutti_all_reduce(group, tu_pointer(from), tu_pointer(out), (size_t)out->numel, out->dtype, reduction,
                              &plan.call);
    return tu_flight_begin(status, &plan);
}

tutti_status tu_all_reduce_shape(tu_call *call) {
    const tu_all_reduce_attributes *attributes = call->attributes;
    tutti_status status = tu_rule_reduction(call, attributes->reduction, call->inputs[0]);
    return status == TUTTI_OK ? tu_rule_same_shape(call) : status;
}

tutti_status tu_all_reduce_everywhere(tu_call *call) {
    const tu_all_reduce_attributes *attributes = call->attributes;
    return tu_start_reduce(call->inputs[0], call->outputs[0], attributes->reduction, 1, attributes->group);
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

tutti_status tu_all_reduce_premul_everywhere(tu_call *call) {
    const tu_all_reduce_premul_attributes *attributes = call->attributes;
    return tu_start_reduce(call->inputs[0], call->outputs[0], TUTTI_PREMUL_SUM, attributes->factor, attributes->group);
}

/* ---- all_gather ---- */

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

void tu_fake_copy(const tt_tensor *out, int64_t to, const tt_tensor *x, int64_t from, int64_t count) {
    tu_shape there = { .dtype = out->dtype, .ndim = 1, .sizes = { count }, .strides = { 1 } }, here = there;
    there.device = out->device;
    there.offset = out->offset + to;
    here.device = x->device;
    here.offset = x->offset + from;
    tt_tensor target = tu_tensor_look(out, &there), source = tu_tensor_look(x, &here);
    if (count > 0)
        tu_copy_tensor(&target, &source);
}

void tu_fake_part(tutti_group *group, tt_tensor *out, const tt_tensor *x) {
    if (tu_group_is_fake(group))
        tu_fake_copy(out, 0, x, tutti_group_rank(group) * out->numel, out->numel);
}

bool tu_fake_gather(tutti_group *group, const tt_tensor *out, const tt_tensor *x) {
    if (!tu_group_is_fake(group))
        return false;
    for (int i = 0; i < tutti_group_size(group); i++)
        tu_fake_copy(out, i * x->numel, x, 0, x->numel);
    return true;
}

tutti_status tu_start_gather(const tt_tensor *x, tt_tensor *out, int dim, tutti_group *group) {
    bool apart = x->numel > 0 && rows_before(x, dim) > 1;
    tu_shape part = tu_shape_of(x);
    tt_tensor *from = tu_stage_in(x, x->dtype);
    tt_tensor *to = apart ? block_of_parts("all_gather", &part, tutti_group_size(group)) : tu_tensor_hold(out);
    tutti_status status = from == NULL || to == NULL ? TUTTI_ERROR_MEMORY : TUTTI_OK;
    tu_flight_plan plan = { "all_gather", group, .writes = out, .reads = from, .lands = apart ? to : NULL, .dim = dim };
    if (status == TUTTI_OK && tu_fake_gather(group, to, from)) {
        if (apart)
            tu_move_parts(to, out, dim, tutti_group_size(group), TU_PARTS_FROM_BLOCK);
    } else if (status == TUTTI_OK) {
        status = tu_flight_begin(tutti_all_gather(group, tu_pointer(from), tu_pointer(to), (size_t)x->numel, x->dtype,
                                                  tu_flight_call(&plan)),
                                 &plan);
    }
    tu_tensor_drop(from);
    tu_tensor_drop(to);
    return status;
}

tutti_status tu_all_gather_shape(tu_call *call) {
    const tu_all_gather_attributes *attributes = call->attributes;
    return tu_rule_gathered(call, call->inputs[0], attributes->dim, attributes->group, &call->results[0]);
}

tutti_status tu_all_gather_everywhere(tu_call *call) {
    const tu_all_gather_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    return tu_start_gather(x, call->outputs[0], tu_dim(attributes->dim, x->ndim), attributes->group);
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

tutti_status tu_all_gather_out_shape(tu_call *call) {
    const tu_all_gather_out_attributes *attributes = call->attributes;
    tu_shape wanted;
    tutti_status status = tu_rule_gathered(call, call->inputs[1], 0, attributes->group, &wanted);
    return status == TUTTI_OK ? tu_rule_out(call, &wanted, attributes->group) : status;
}

tutti_status tu_all_gather_out_everywhere(tu_call *call) {
    const tu_all_gather_out_attributes *attributes = call->attributes;
    return tu_start_gather(call->inputs[1], call->inputs[0], 0, attributes->group);
}

/* ---- reduce_scatter ---- */

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

tutti_status tu_start_scatter(const tt_tensor *x, tt_tensor *out, tutti_reduction reduction, double factor, int dim,
                              tutti_group *group) {
    premul kept;
    tt_tensor *from = stage_parts(x, out, dim, tutti_group_size(group));
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_fake_part(group, out, from);
    tu_flight_plan plan = { "reduce_scatter", group, .writes = out, .reads = from };
    tutti_status status = set_factor(tu_flight_call(&plan), reduction, factor, x->dtype, &kept);
    if (status == TUTTI_OK)
        status = tutti_reduce_scatter(group, tu_pointer(from), tu_pointer(out), (size_t)out->numel, x->dtype, reduction,
                                      &plan.call);
    status = tu_flight_begin(status, &plan);
    tu_tensor_drop(from);
    return status;
}

tutti_status tu_reduce_scatter_shape(tu_call *call) {
    const tu_reduce_scatter_attributes *attributes = call->attributes;
    return tu_rule_scattered(call, call->inputs[0], attributes->reduction, attributes->dim, attributes->group,
                             &call->results[0]);
}

tutti_status tu_reduce_scatter_everywhere(tu_call *call) {
    const tu_reduce_scatter_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    return tu_start_scatter(x, call->outputs[0], attributes->reduction, 1, tu_dim(attributes->dim, x->ndim),
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

tutti_status tu_reduce_scatter_out_shape(tu_call *call) {
    const tu_reduce_scatter_out_attributes *attributes = call->attributes;
    tu_shape wanted;
    tutti_status status =
        tu_rule_scattered(call, call->inputs[1], attributes->reduction, 0, attributes->group, &wanted);
    return status == TUTTI_OK ? tu_rule_out(call, &wanted, attributes->group) : status;
}

tutti_status tu_reduce_scatter_out_everywhere(tu_call *call) {
    const tu_reduce_scatter_out_attributes *attributes = call->attributes;
    return tu_start_scatter(call->inputs[1], call->inputs[0], attributes->reduction, 1, 0, attributes->group);
}

/* ---- reduce_scatter by premul_sum ---- */

tutti_status tu_reduce_scatter_premul_shape(tu_call *call) {
    const tu_reduce_scatter_premul_attributes *attributes = call->attributes;
    return tu_rule_scattered(call, call->inputs[0], TUTTI_PREMUL_SUM, attributes->dim, attributes->group,
                             &call->results[0]);
}

tutti_status tu_reduce_scatter_premul_everywhere(tu_call *call) {
    const tu_reduce_scatter_premul_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    return tu_start_scatter(x, call->outputs[0], TUTTI_PREMUL_SUM, attributes->factor, tu_dim(attributes->dim, x->ndim),
                            attributes->group);
}

tutti_status tu_reduce_scatter_premul_out_shape(tu_call *call) {
    const tu_reduce_scatter_premul_out_attributes *attributes = call->attributes;
    tu_shape wanted;
    tutti_status status = tu_rule_scattered(call, call->inputs[1], TUTTI_PREMUL_SUM, 0, attributes->group, &wanted);
    return status == TUTTI_OK ? tu_rule_out(call, &wanted, attributes->group) : status;
}

tutti_status tu_reduce_scatter_premul_out_everywhere(tu_call *call) {
    const tu_reduce_scatter_premul_out_attributes *attributes = call->attributes;
    return tu_start_scatter(call->inputs[1], call->inputs[0], TUTTI_PREMUL_SUM, attributes->factor, 0,
                            attributes->group);
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

tutti_status tu_broadcast_everywhere(tu_call *call) {
    const tu_broadcast_attributes *attributes = call->attributes;
    tt_tensor *out = call->outputs[0], *from = tu_stage_in(call->inputs[0], call->inputs[0]->dtype);
    if (from == NULL)
        return TUTTI_ERROR_MEMORY;
    if (tu_group_is_fake(attributes->group) && from != out && out->numel > 0)
        tu_copy_tensor(out, from);
    tu_flight_plan plan = { "broadcast", attributes->group, .writes = out,
                            .reads = from->storage == out->storage ? NULL : from };
    tutti_status status = tutti_broadcast(attributes->group, tu_pointer(from), tu_pointer(out), (size_t)out->numel,
                                          out->dtype, attributes->root, tu_flight_call(&plan));
    status = tu_flight_begin(status, &plan);
    tu_tensor_drop(from);
    return status;
}

/* ---- tensor-parallel regions ---- */

tutti_status tu_reduce_from_group_shape(tu_call *call) {
    tutti_status status = tu_rule_reduction(call, TUTTI_SUM, call->inputs[0]);
    return status == TUTTI_OK ? tu_shape_like_first(call) : status;
}

tutti_status tu_reduce_from_group_everywhere(tu_call *call) {
    const tu_reduce_from_group_attributes *attributes = call->attributes;
    return tu_start_reduce(call->inputs[0], call->outputs[0], TUTTI_SUM, 1, attributes->group);
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

tt_tensor *tu_reduce_scatter_premul_out_sample(tu_sampler *sampler) {
    tt_tensor *x = tt_detach(made(sampler));
    return tt_reduce_scatter_premul_out(tt_zeros_like(x), x, 2, sampler->group);
}
