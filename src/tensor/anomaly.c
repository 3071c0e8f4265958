/* SPDX-License-Identifier: Apache-2.0
 *
 * Anomaly mode: the operator that makes the first NaN is an error.
 */
#include <tutti/autograd.h>

#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/stage.h"

bool tt_anomaly_mode(bool on) {
    tu_thread *self = tu_self();
    bool was = self->anomaly;
    self->anomaly = on;
    return was;
}

/* Whether x holds a NaN, as far as it can be looked at without waiting. */
static bool has_nan(const tt_tensor *x) {
    if (x == NULL || !(tu_is_float(x->dtype) || tu_is_complex(x->dtype)) || x->device == TUTTI_META ||
        x->storage->fake || x->numel == 0 || atomic_load_explicit(&x->storage->waiter, memory_order_acquire) != NULL ||
        tu_tensor_need(x) > x->storage->bytes)
        return false;
    bool parts = tu_is_complex(x->dtype); /* two numbers each */
    tutti_dtype dtype = parts ? (tutti_dtype)x->dtype : tu_stage_dtype(x);
    tt_tensor *here = tu_on_host(x), *dense = here != NULL ? tu_stage_in(here, dtype) : NULL;
    tu_tensor_drop(here);
    if (dense == NULL)
        return false;
    const float *floats = tu_pointer(dense);
    const double *doubles = tu_pointer(dense);
    bool found = false, wide = dtype == TUTTI_F64 || dtype == TUTTI_C128;
    for (int64_t i = 0; i < (parts ? 2 * x->numel : x->numel); i++)
        found |= wide ? doubles[i] != doubles[i] : floats[i] != floats[i];
    tu_tensor_drop(dense);
    return found;
}

static bool is_written(const tu_call *call, int input) {
    return (call->in_place && input < call->output_count) ||
           (input < TU_INPUTS && call->entry->written & TU_INPUT(input));
}

/* What the call wrote: a result, or an input. */
static const tt_tensor *bad_result(const tu_call *call) {
    for (int i = 0; i < call->output_count; i++)
        if (has_nan(call->outputs[i]))
            return call->outputs[i];
    for (int i = 0; i < call->input_count; i++)
        if (is_written(call, i) && has_nan(call->inputs[i]))
            return call->inputs[i];
    return NULL;
}

tutti_status tu_anomaly_check(const tu_call *call) {
    const tu_operator *entry = call->entry;
    if (entry->flags & TU_VIEW || entry == &tu_operator_empty || entry == &tu_operator_empty_strided)
        return TUTTI_OK;
    const tt_tensor *bad = bad_result(call);
    if (bad == NULL)
        return TUTTI_OK;
    char text[512];
    tu_call_text(call, text, sizeof text);
    for (int i = 0; i < call->input_count; i++)
        if (!is_written(call, i) && has_nan(call->inputs[i]))
            return tu_call_error(call, TUTTI_ERROR_STATE, "its result %s holds a NaN, which came in with %s: %s",
                                 tu_describe(bad), tu_argument_name(entry, i), text);
    return tu_call_error(call, TUTTI_ERROR_STATE, "it made the first NaN, in %s: %s", tu_describe(bad), text);
}
