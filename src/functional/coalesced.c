/* SPDX-License-Identifier: Apache-2.0
 *
 * Coalesced collectives: the calls of one batch, which runs as one work. The runner has waited for all inputs, since
 * inside a batch nothing may wait.
 */
#include "functional/operators.h"
#include "functional/registry.h"
#include "functional/rules.h"

static const tt_tensor_list none = { 0, tu_nothing };

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
    return tu_start_reduce(x, out, how->reduction, how->factor, how->group);
}

static tutti_status gather_one(const tt_tensor *x, tt_tensor *out, const coalesced *how, int dim) {
    return tu_start_gather(x, out, dim, how->group);
}

static tutti_status scatter_one(const tt_tensor *x, tt_tensor *out, const coalesced *how, int dim) {
    return tu_start_scatter(x, out, how->reduction, how->factor, dim, how->group);
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

tutti_status tu_all_reduce_coalesced_everywhere(tu_call *call) {
    const tu_all_reduce_coalesced_attributes *attributes = call->attributes;
    return start_all(call, reduce_one, &(coalesced){ attributes->reduction, 1, .group = attributes->group });
}

tutti_status tu_all_reduce_coalesced_premul_shape(tu_call *call) {
    return shapes_of_reduced(call, TUTTI_PREMUL_SUM);
}

tutti_status tu_all_reduce_coalesced_premul_everywhere(tu_call *call) {
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

tutti_status tu_all_gather_coalesced_everywhere(tu_call *call) {
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

tutti_status tu_all_gather_coalesced_dims_everywhere(tu_call *call) {
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

tutti_status tu_reduce_scatter_coalesced_everywhere(tu_call *call) {
    const tu_reduce_scatter_coalesced_attributes *attributes = call->attributes;
    return start_all(call, scatter_one, &(coalesced){ attributes->reduction, 1, attributes->dims, attributes->group });
}

tutti_status tu_reduce_scatter_coalesced_premul_shape(tu_call *call) {
    const tu_reduce_scatter_coalesced_premul_attributes *attributes = call->attributes;
    return shapes_of_scattered(call, TUTTI_PREMUL_SUM, attributes->dims, attributes->group);
}

tutti_status tu_reduce_scatter_coalesced_premul_everywhere(tu_call *call) {
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

/* Whether a coalesced call may begin; a list of none is no call. */
static bool may_begin(const char *who, tt_tensor_list list, tutti_group *group, bool group_optional) {
    return tu_flight_check(who, group, group_optional && list.count > 0 && list.at != NULL && tu_is_meta(list.at[0])) &&
           list.count > 0;
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
