/* SPDX-License-Identifier: Apache-2.0
 *
 * The shape rule and the driver of pointwise operators.
 */
#include "tensor/pointwise.h"

#include <string.h>

#include "tensor/convert.h"

static tutti_dtype float_of(tutti_dtype dtype) {
    return tu_is_integer(dtype) || dtype == TUTTI_BOOL ? TUTTI_F32 : dtype;
}

static tutti_dtype compute_dtype(const tu_call *call) {
    const tu_pointwise *detail = call->operator->detail;
    tutti_dtype dtype = tu_promote(call, detail->condition ? 1 : 0);
    return tu_compute_dtype(detail->to_float ? float_of(dtype) : dtype);
}

static tu_kernel *kernel_for(const tu_pointwise *detail, tutti_dtype compute) {
    switch (compute) {
    case TUTTI_F32:
        return detail->f32;
    case TUTTI_F64:
        return detail->f64;
    case TUTTI_U64:
        return detail->u64 != NULL ? detail->u64 : detail->i64;
    case TUTTI_I64:
        return detail->i64;
    default:
        return detail->c128;
    }
}

/* Where all inputs lie in memory alike, dense but not row-major, the result does too: nothing is shuffled. */
static bool keep_strides(const tu_call *call, tu_shape *result) {
    const tt_tensor *first = call->inputs[0];
    if (first->flags & TU_CONTIGUOUS || first->ndim != result->ndim)
        return false;
    for (int i = 0; i < call->input_count; i++) {
        const tt_tensor *x = call->inputs[i];
        if (x->ndim == 0)
            continue;
        if (!tu_same_sizes(x, first) || memcmp(x->strides, first->strides, (size_t)x->ndim * sizeof x->strides[0]) != 0)
            return false;
    }
    if (!tu_is_dense(first))
        return false;
    memcpy(result->strides, first->strides, sizeof result->strides);
    result->offset = 0;
    return true;
}

tutti_status tu_pointwise_shape(tu_call *call) {
    const tu_pointwise *detail = call->operator->detail;
    tu_shape *result = &call->results[0];
    tutti_status status = tu_broadcast(call, 0, result);
    if (status != TUTTI_OK)
        return status;
    if (detail->condition && call->inputs[0]->dtype != TUTTI_BOOL && !tu_is_integer(call->inputs[0]->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "the condition must be bool, not %s",
                             tu_describe(call->inputs[0]));
    tutti_dtype dtype = tu_promote(call, detail->condition ? 1 : 0);
    tutti_dtype computed = detail->to_float ? float_of(dtype) : dtype;
    if (kernel_for(detail, tu_compute_dtype(computed)) == NULL)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tutti_dtype_name(dtype));
    result->dtype = detail->to_bool ? TUTTI_BOOL : computed;
    if (detail->to_real && tu_is_complex(computed))
        result->dtype = computed == TUTTI_C64 ? TUTTI_F32 : TUTTI_F64;
    if (keep_strides(call, result))
        return TUTTI_OK;
    return tu_shape_contiguous(call->operator->name, result);
}

/* Tiny dense tensors of the compute type need none of the loop's machinery. */
static bool run_tiny(tu_call *call, tu_kernel *kernel, tutti_dtype compute) {
    const tt_tensor *out = call->outputs[0];
    const void *in[TU_OPERANDS];
    if (out->numel > 4096 || out->dtype != compute || !(out->flags & TU_CONTIGUOUS))
        return false;
    for (int i = 0; i < call->input_count; i++) {
        const tt_tensor *x = call->inputs[i];
        if (x->dtype != compute || x->numel != out->numel || !(x->flags & TU_CONTIGUOUS))
            return false;
        in[i] = tu_pointer(x);
    }
    if (out->numel > 0)
        kernel(in, tu_pointer(out), out->numel, &call->params);
    return true;
}

tutti_status tu_pointwise_cpu(tu_call *call) {
    tutti_dtype compute = compute_dtype(call);
    tu_kernel *kernel = kernel_for(call->operator->detail, compute);
    if (run_tiny(call, kernel, compute))
        return TUTTI_OK;
    tu_loop loop;
    tu_loop_init(&loop, call->outputs[0], call->input_count, call->inputs);
    tu_loop_run(&loop, kernel, compute, &call->params);
    return TUTTI_OK;
}
