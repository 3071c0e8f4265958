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

static tutti_dtype compute_dtype(const tu_args *args) {
    const tu_pointwise *detail = args->op->detail;
    tutti_dtype dtype = tu_promote(args, detail->condition ? 1 : 0);
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
static bool keep_strides(const tu_args *args, tu_shape *result) {
    const tt_tensor *first = args->inputs[0];
    if (first->flags & TU_CONTIGUOUS || first->ndim != result->ndim)
        return false;
    for (int i = 0; i < args->input_count; i++) {
        const tt_tensor *x = args->inputs[i];
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

tutti_status tu_pointwise_shape(tu_args *args) {
    const tu_pointwise *detail = args->op->detail;
    tu_shape *result = &args->results[0];
    tutti_status status = tu_broadcast(args, 0, result);
    if (status != TUTTI_OK)
        return status;
    if (detail->condition && args->inputs[0]->dtype != TUTTI_BOOL && !tu_is_integer(args->inputs[0]->dtype))
        return tu_args_error(args, TUTTI_ERROR_TYPE, "the condition must be bool, not %s",
                             tu_describe(args->inputs[0]));
    tutti_dtype dtype = tu_promote(args, detail->condition ? 1 : 0);
    tutti_dtype computed = detail->to_float ? float_of(dtype) : dtype;
    if (kernel_for(detail, tu_compute_dtype(computed)) == NULL)
        return tu_args_error(args, TUTTI_ERROR_TYPE, "not defined for %s", tutti_dtype_name(dtype));
    result->dtype = detail->to_bool ? TUTTI_BOOL : computed;
    if (detail->to_real && tu_is_complex(computed))
        result->dtype = computed == TUTTI_C64 ? TUTTI_F32 : TUTTI_F64;
    if (keep_strides(args, result))
        return TUTTI_OK;
    return tu_shape_contiguous(args->op->name, result);
}

/* Tiny dense tensors of the compute type need none of the loop's machinery. */
static bool run_tiny(tu_args *args, tu_kernel *kernel, tutti_dtype compute) {
    const tt_tensor *out = args->outputs[0];
    const void *in[TU_OPERANDS];
    if (out->numel > 4096 || out->dtype != compute || !(out->flags & TU_CONTIGUOUS))
        return false;
    for (int i = 0; i < args->input_count; i++) {
        const tt_tensor *x = args->inputs[i];
        if (x->dtype != compute || x->numel != out->numel || !(x->flags & TU_CONTIGUOUS))
            return false;
        in[i] = tu_pointer(x);
    }
    if (out->numel > 0)
        kernel(in, tu_pointer(out), out->numel, &args->params);
    return true;
}

tutti_status tu_pointwise_cpu(tu_args *args) {
    tutti_dtype compute = compute_dtype(args);
    tu_kernel *kernel = kernel_for(args->op->detail, compute);
    if (run_tiny(args, kernel, compute))
        return TUTTI_OK;
    tu_loop loop;
    tu_loop_init(&loop, args->outputs[0], args->input_count, args->inputs);
    tu_loop_run(&loop, kernel, compute, &args->params);
    return TUTTI_OK;
}
