/* SPDX-License-Identifier: Apache-2.0
 *
 * The shape rule and the driver of pointwise operators.
 */
#include "tensor/pointwise.h"

#include <math.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/kernel/kernels.h"

static bool is_whole(tutti_dtype dtype) {
    return tu_is_integer(dtype) || dtype == TUTTI_BOOL;
}

/* Numbers among the attributes: 0 none, 1 whole ones, 2 one that is not. */
static int numbers_in(const tu_call *call) {
    int found = 0;
    for (int i = 0; i < call->entry->argument_count; i++) {
        const tu_argument *argument = &call->entry->arguments[i];
        if (argument->type != TT_ARGUMENT_DOUBLE)
            continue;
        double number = *(const double *)((const char *)call->attributes + argument->offset);
        if (number != rint(number))
            return 2;
        found = 1;
    }
    return found;
}

/* The dtype that the inputs promote to, and numbers with them; integers become f32 where the operator says so. */
static tutti_dtype promoted(const tu_call *call) {
    tutti_dtype dtype = tu_promote(call, call->entry->flags & TU_CONDITION ? 1 : 0);
    if (!is_whole(dtype))
        return dtype;
    if (call->entry->flags & TU_TO_FLOAT)
        return TUTTI_F32;
    int numbers = numbers_in(call);
    return numbers == 2 ? TUTTI_F32 : numbers == 1 && dtype == TUTTI_BOOL ? TUTTI_I64 : dtype;
}

tu_kernel *tu_pointwise_kernel(const tu_operator *entry, tutti_dtype compute) {
    const tu_pointwise_kernels *kernels = &tu_pointwise_table[entry->pointwise];
    switch (compute) {
    case TUTTI_F32:
    case TUTTI_F64:
        return tu_tensor_kernels_get()->pointwise[tu_float_index(compute)][entry->pointwise];
    case TUTTI_U64:
        return kernels->u64;
    case TUTTI_I64:
        return kernels->i64;
    default:
        return kernels->c128;
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
    unsigned flags = call->entry->flags;
    tu_shape *result = &call->results[0];
    tutti_status status = tu_broadcast_sizes(call, 0, result);
    if (status != TUTTI_OK)
        return status;
    if (flags & TU_CONDITION && !is_whole(call->inputs[0]->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "the condition must be bool, not %s",
                             tu_describe(call->inputs[0]));
    tutti_dtype dtype = promoted(call);
    if (tu_pointwise_kernel(call->entry, tu_compute_dtype(dtype)) == NULL)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tutti_dtype_name(dtype));
    result->dtype = flags & TU_TO_BOOL ? TUTTI_BOOL : dtype;
    if (flags & TU_TO_REAL && tu_is_complex(dtype))
        result->dtype = dtype == TUTTI_C64 ? TUTTI_F32 : TUTTI_F64;
    return keep_strides(call, result) ? TUTTI_OK : tu_shape_contiguous(call->entry->name, result);
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
        kernel(in, tu_pointer(out), out->numel, call->attributes);
    return true;
}

tutti_dtype tu_pointwise_compute(const tu_call *call) {
    bool other_type = call->entry->flags & (TU_TO_BOOL | TU_TO_REAL); /* than the result's */
    return tu_compute_dtype(other_type ? promoted(call) : call->results[0].dtype);
}

tutti_status tu_pointwise_cpu(tu_call *call) {
    tutti_dtype compute = tu_pointwise_compute(call);
    tu_kernel *kernel = tu_pointwise_kernel(call->entry, compute);
    if (run_tiny(call, kernel, compute))
        return TUTTI_OK;
    tu_loop loop;
    tu_loop_init(&loop, call->outputs[0], call->input_count, call->inputs);
    tu_loop_run(&loop, kernel, compute, call->attributes);
    return TUTTI_OK;
}
