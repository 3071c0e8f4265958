/* SPDX-License-Identifier: Apache-2.0
 *
 * What the rows of collectives share: the rules of their shapes and gradients, and how their public functions run.
 */
#include "functional/rules.h"

#include <string.h>

#include "functional/operators.h"
#include "functional/registry.h"

static const tt_tensor_list none = { 0, tu_nothing };

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

/* ---- the public functions of rows ---- */

/* Whether the collective of a row may start here: its group is there, and its reduction needs no factor. */
static bool may_start(const tu_operator *entry, bool in_place, const tt_tensor *first, const void *attributes) {
    char who[64];
    tutti_group *group = NULL;
    strcpy(stpcpy(who, entry->name), in_place ? "_" : "");
    for (int i = 0; i < entry->argument_count; i++) {
        const void *value = (const char *)attributes + entry->arguments[i].offset;
        if (entry->arguments[i].type == TT_ARGUMENT_GROUP)
            group = *(tutti_group *const *)value;
        else if (entry->arguments[i].type == TT_ARGUMENT_REDUCTION &&
                 tu_rule_needs_factor(who, *(const tutti_reduction *)value))
            return false;
    }
    return tu_flight_check(who, group, (entry->flags & TU_GROUP_FREE) != 0 && tu_is_meta(first));
}

tt_tensor *tu_collective_new(const tu_operator *entry, int input_count, tt_tensor *const *inputs,
                             const void *attributes) {
    return may_start(entry, false, inputs[0], attributes) ? tu_run_new(entry, input_count, inputs, attributes) : NULL;
}

tt_tensor *tu_collective_in_place(const tu_operator *entry, int input_count, tt_tensor *const *inputs,
                                  const void *attributes) {
    return may_start(entry, true, inputs[0], attributes) ? tu_run_in_place(entry, input_count, inputs, attributes)
                                                         : NULL;
}

tt_tensor *tu_collective_out(const tu_operator *entry, int input_count, tt_tensor *const *inputs,
                             const void *attributes) {
    return may_start(entry, false, inputs[input_count - 1], attributes) &&
                   tu_run_many(entry, input_count, inputs, attributes, NULL)
               ? inputs[0]
               : NULL;
}

/* A list of none is no call. */
static bool may_start_list(const tu_operator *entry, bool in_place, tt_tensor_list list, const void *attributes) {
    return may_start(entry, in_place, list.count > 0 && list.at != NULL ? list.at[0] : NULL, attributes) &&
           list.count > 0;
}

tt_tensor_list tu_collective_each(const tu_operator *entry, tt_tensor_list list, const void *attributes) {
    return may_start_list(entry, false, list, attributes) ? tu_run_each(entry, list, attributes) : none;
}

tt_tensor_list tu_collective_each_in_place(const tu_operator *entry, tt_tensor_list list, const void *attributes) {
    return may_start_list(entry, true, list, attributes) ? tu_run_each_in_place(entry, list, attributes) : none;
}
