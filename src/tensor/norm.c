/* SPDX-License-Identifier: Apache-2.0
 *
 * Layer norm and RMS norm. The mean and the reciprocal deviation of each row are kept for the gradient, in the compute
 * type.
 */
#include <string.h>

#include "tensor/kernel/kernels.h"
#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/stage.h"

/* The kernels over a range of rows or columns. */
typedef struct job {
    tu_norm_rows rows;
    tu_norm_kernel *kernel;
} job;

static void run_job(void *context, int64_t begin, int64_t end) {
    const job *each = context;
    each->kernel(&each->rows, begin, end);
}
static void run_kernel(tu_norm_kernel *const *kernels, const tu_norm_rows *rows, tutti_dtype dtype, int64_t count,
                       int64_t grain) {
    job each = { *rows, kernels[tu_float_index(dtype)] };
    tu_parallel(count, grain, run_job, &each);
}

static void run_forward(const tu_norm_rows *rows, tutti_dtype dtype) {
    if (rows->count > 0)
        run_kernel(tu_tensor_kernels_get()->norm, rows, dtype, rows->count, 16384 / rows->size + 1);
}

static void run_backward(const tu_norm_rows *rows, tutti_dtype dtype) {
    if (rows->count > 0)
        run_kernel(tu_tensor_kernels_get()->norm_backward, rows, dtype, rows->count, 8192 / rows->size + 1);
    if (rows->size > 0)
        run_kernel(tu_tensor_kernels_get()->norm_columns, rows, dtype, rows->size, 16384 / (rows->count + 1) + 64);
}

/* ---- shapes ---- */

/* A weight or bias has the last sizes of x, and its dtype or the one that rows are computed in. */
static tutti_status check_weight(const tu_call *call, int input) {
    const tt_tensor *x = call->inputs[0], *weight = call->inputs[input];
    if (weight == NULL)
        return TUTTI_OK;
    bool fits = weight->ndim >= 1 && weight->ndim <= x->ndim &&
                (weight->dtype == x->dtype || weight->dtype == tu_stage_dtype(x));
    for (int i = 0; fits && i < weight->ndim; i++)
        fits = weight->sizes[i] == x->sizes[x->ndim - weight->ndim + i];
    if (fits)
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s, %s, must have the last sizes of x, %s, and its dtype or %s",
                         tu_argument_name(call->entry, input), tu_describe(weight), tu_describe(x),
                         tutti_dtype_name(tu_stage_dtype(x)));
}

/* How many trailing dimensions of x are normalized: those of weight or bias, else one. */
static int trailing_of(const tt_tensor *weight, const tt_tensor *bias) {
    return weight != NULL ? weight->ndim : bias != NULL ? bias->ndim : 1;
}

static tutti_status norm_shape(tu_call *call, const tt_tensor *weight, const tt_tensor *bias) {
    const tt_tensor *x = call->inputs[0];
    tutti_status status = TUTTI_OK;
    if (!tu_is_float(x->dtype) || x->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tu_describe(x));
    for (int i = 1; i < call->input_count && status == TUTTI_OK; i++)
        status = check_weight(call, i);
    if (status != TUTTI_OK)
        return status;
    if (weight != NULL && bias != NULL && weight->ndim != bias->ndim)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "weight, %s, and bias, %s, differ in shape",
                             tu_describe(weight), tu_describe(bias));
    for (int i = 0; i < 3 && status == TUTTI_OK; i++) {
        call->results[i] = tu_shape_of(x);
        if (i > 0) {
            call->results[i].ndim = x->ndim - trailing_of(weight, bias);
            call->results[i].dtype = tu_stage_dtype(x);
        }
        status = tu_shape_contiguous(call->entry->name, &call->results[i]);
    }
    return status;
}

tutti_status tu_layer_norm_shape(tu_call *call) {
    return norm_shape(call, call->inputs[1], call->inputs[2]);
}

tutti_status tu_rms_norm_shape(tu_call *call) {
    return norm_shape(call, call->inputs[1], NULL);
}

static void set_sizes(tu_norm_rows *job, const tt_tensor *x, int trailing) {
    job->size = 1;
    for (int i = x->ndim - trailing; i < x->ndim; i++)
        job->size *= x->sizes[i];
    job->count = job->size == 0 ? 0 : x->numel / job->size;
}

/* ---- on a device: rows as they lie ---- */

static tu_launch_rows flat_rows(const tt_tensor *x, int trailing) {
    tu_norm_rows sizes = { 0 };
    set_sizes(&sizes, x, trailing);
    return (tu_launch_rows){ .x = tu_place_of(tu_pointer(x)), .count = sizes.count, .size = sizes.size };
}

/* A weight or bias, dense, as it lies where that is how the rows lie, else in the type of computing: `wide` is set. */
static tt_tensor *stage_weight(const tt_tensor *weight, const tt_tensor *x, int32_t *wide) {
    tutti_dtype rows = tu_device_rows_dtype(x);
    *wide = weight == NULL || weight->dtype != rows;
    return tu_stage_in(weight, *wide ? tu_stage_dtype(x) : rows);
}

static tutti_status norm_on_device(tu_call *call, const tt_tensor *weight, const tt_tensor *bias, double epsilon,
                                   bool centred) {
    tutti_dtype dtype = tu_device_rows_dtype(call->inputs[0]);
    int32_t wide_weight, wide_bias;
    tt_tensor *x = tu_stage_in(call->inputs[0], dtype), *y = tu_stage_out(call->outputs[0], dtype);
    tt_tensor *dense_weight = stage_weight(weight, call->inputs[0], &wide_weight),
              *dense_bias = stage_weight(bias, call->inputs[0], &wide_bias);
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (x != NULL && y != NULL && (dense_weight != NULL || weight == NULL) && (dense_bias != NULL || bias == NULL)) {
        tu_launch_rows flat = flat_rows(x, trailing_of(weight, bias));
        flat.out = tu_place_of(tu_pointer(y));
        flat.weight = weight != NULL ? tu_place_of(tu_pointer(dense_weight)) : 0;
        flat.bias = bias != NULL ? tu_place_of(tu_pointer(dense_bias)) : 0;
        flat.mean = tu_place_of(tu_pointer(call->outputs[1]));
        flat.scale = tu_place_of(tu_pointer(call->outputs[2]));
        flat.epsilon = epsilon;
        flat.centred = centred;
        flat.wide_weight = wide_weight;
        flat.wide_bias = wide_bias;
        status = tu_device_launch_held(tu_device_of(x), "norm", dtype, &flat);
    }
    tu_tensor_drop(x);
    tu_tensor_drop(dense_weight);
    tu_tensor_drop(dense_bias);
    return tu_stage_end(1, call->outputs, &y, status);
}

static tutti_status norm_cpu(tu_call *call, const tt_tensor *weight, const tt_tensor *bias, double epsilon,
                             bool centred) {
    tutti_dtype dtype = tu_stage_dtype(call->inputs[0]);
    tt_tensor *x = tu_stage_in(call->inputs[0], dtype), *y = tu_stage_out(call->outputs[0], dtype);
    tt_tensor *dense_weight = tu_stage_in(weight, dtype), *dense_bias = tu_stage_in(bias, dtype);
    tutti_status status = TUTTI_ERROR_MEMORY;
    bool staged =
        x != NULL && y != NULL && (dense_weight != NULL || weight == NULL) && (dense_bias != NULL || bias == NULL);
    if (staged) {
        tu_norm_rows job = { .x = tu_pointer(x),
                             .weight = weight != NULL ? tu_pointer(dense_weight) : NULL,
                             .bias = bias != NULL ? tu_pointer(dense_bias) : NULL,
                             .y = tu_pointer(y),
                             .mean = tu_pointer(call->outputs[1]),
                             .scale = tu_pointer(call->outputs[2]),
                             .epsilon = epsilon,
                             .centred = centred,
                             .stream = (size_t)y->numel * tu_dtype_bytes[dtype] >= TU_STREAM_BYTES };
        set_sizes(&job, x, trailing_of(weight, bias));
        run_forward(&job, dtype);
        status = tu_stage_done(call->outputs[0], y);
        y = NULL;
    }
    tu_tensor_drop(x);
    tu_tensor_drop(dense_weight);
    tu_tensor_drop(dense_bias);
    tu_tensor_drop(y);
    return status;
}

tutti_status tu_layer_norm_everywhere(tu_call *call) {
    const tu_layer_norm_attributes *attributes = call->attributes;
    if (tu_is_remote(call->device))
        return norm_on_device(call, call->inputs[1], call->inputs[2], attributes->epsilon, true);
    return norm_cpu(call, call->inputs[1], call->inputs[2], attributes->epsilon, true);
}

tutti_status tu_rms_norm_everywhere(tu_call *call) {
    const tu_rms_norm_attributes *attributes = call->attributes;
    if (tu_is_remote(call->device))
        return norm_on_device(call, call->inputs[1], NULL, attributes->epsilon, false);
    return norm_cpu(call, call->inputs[1], NULL, attributes->epsilon, false);
}

/* ---- backward: (grad, x, mean, scale, weight) to (dx, dweight, dbias) ---- */

tutti_status tu_norm_backward_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[1], *weight = call->inputs[4];
    int trailing = x->ndim - call->inputs[2]->ndim; /* there is one mean per row */
    if (trailing < 1)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "mean, %s, must have fewer dimensions than x, %s",
                             tu_describe(call->inputs[2]), tu_describe(x));
    if (!tu_same_sizes(call->inputs[0], x))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "grad, %s, and x, %s, differ in shape",
                             tu_describe(call->inputs[0]), tu_describe(x));
    call->results[0] = call->results[1] = call->results[2] = tu_shape_of(x);
    for (int i = 1; i < 3; i++) {
        call->results[i].ndim = trailing;
        call->results[i].dtype = weight != NULL ? weight->dtype : x->dtype;
        memmove(call->results[i].sizes, x->sizes + x->ndim - trailing, (size_t)trailing * sizeof x->sizes[0]);
    }
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 3 && status == TUTTI_OK; i++)
        status = tu_shape_contiguous(call->entry->name, &call->results[i]);
    return status;
}

enum {
    GRADIENT,
    X,
    MEAN,
    SCALE,
    WEIGHT,
    INPUTS
};

/* The gradient of the rows, and those of weight and bias in two steps. */
static tutti_status launch_backward(tu_device *device, tutti_dtype dtype, const tu_launch_rows *flat) {
    char name[TU_KERNEL_NAME];
    int64_t parts = (flat->count + TU_NORM_PART - 1) / TU_NORM_PART;
    tutti_status status = tu_device_launch_held(device, "norm_backward", dtype, flat);
    if (status == TUTTI_OK)
        status = tu_device_launch(device, tu_kernel_name(name, "norm_parts", dtype), /* a thread has 8 bytes of a row */
                                  parts * (flat->size * tu_dtype_bytes[dtype] / 8 + 1), TU_DEVICE_THREADS, flat);
    return status == TUTTI_OK
               ? tu_device_launch_blocks(device, tu_kernel_name(name, "norm_columns", dtype),
                                         (2 * flat->size + 31) / 32, TU_NORM_THREADS, flat) /* a block has 32 columns */
               : status;
}

static tutti_status norm_backward_on_device(tu_call *call, bool centred) {
    const tt_tensor *x = call->inputs[X], *weight = call->inputs[WEIGHT];
    tutti_dtype dtype = tu_device_rows_dtype(x), compute = tu_stage_dtype(x);
    tu_launch_rows flat = flat_rows(x, x->ndim - call->inputs[MEAN]->ndim);
    int32_t wide = call->outputs[1]->dtype != dtype;
    tt_tensor *in[INPUTS] = { NULL }, *out[3] = { NULL };
    bool staged = true;
    for (int i = 0; i < INPUTS; i++) {
        tutti_dtype wanted = i == MEAN || i == SCALE || (i == WEIGHT && wide) ? compute : dtype;
        staged = ((in[i] = tu_stage_in(call->inputs[i], wanted)) != NULL || call->inputs[i] == NULL) && staged;
    }
    for (int i = 0; i < 3; i++)
        staged = (out[i] = tu_stage_out(call->outputs[i], i > 0 && wide ? compute : dtype)) != NULL && staged;
    tu_shape shape = { .dtype = compute, .device = call->device, .ndim = 1, .strides = { 1 } };
    shape.sizes[0] = 2 * flat.size * ((flat.count + TU_NORM_PART - 1) / TU_NORM_PART);
    tt_tensor *parts = staged ? tu_tensor_new(&shape) : NULL;
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (parts != NULL) {
        flat.x = tu_place_of(tu_pointer(in[X]));
        flat.other = tu_place_of(tu_pointer(in[GRADIENT]));
        flat.weight = weight != NULL ? tu_place_of(tu_pointer(in[WEIGHT])) : 0;
        flat.mean = tu_place_of(tu_pointer(in[MEAN]));
        flat.scale = tu_place_of(tu_pointer(in[SCALE]));
        flat.out = tu_place_of(tu_pointer(out[0]));
        flat.of_weight = tu_place_of(tu_pointer(out[1]));
        flat.of_bias = tu_place_of(tu_pointer(out[2]));
        flat.parts = tu_place_of(tu_pointer(parts));
        flat.centred = centred;
        flat.wide_weight = wide;
        status = launch_backward(tu_device_of(x), dtype, &flat);
    }
    for (int i = 0; i < INPUTS; i++)
        tu_tensor_drop(in[i]);
    tu_tensor_drop(parts);
    return tu_stage_end(3, call->outputs, out, status);
}

tutti_status tu_norm_backward_everywhere(tu_call *call) {
    const tu_norm_backward_attributes *attributes = call->attributes;
    if (tu_is_remote(call->device))
        return norm_backward_on_device(call, attributes->centred);
    tutti_dtype dtype = tu_stage_dtype(call->inputs[X]);
    tt_tensor *in[INPUTS] = { NULL }, *out[3] = { NULL };
    tutti_status status = TUTTI_ERROR_MEMORY;
    bool staged = true;
    for (int i = 0; i < INPUTS; i++)
        staged = ((in[i] = tu_stage_in(call->inputs[i], dtype)) != NULL || call->inputs[i] == NULL) && staged;
    for (int i = 0; i < 3; i++)
        staged = (out[i] = tu_stage_out(call->outputs[i], dtype)) != NULL && staged;
    if (staged) {
        tu_norm_rows job = { .x = tu_pointer(in[X]),
                             .grad = tu_pointer(in[GRADIENT]),
                             .weight = in[WEIGHT] != NULL ? tu_pointer(in[WEIGHT]) : NULL,
                             .mean = tu_pointer(in[MEAN]),
                             .scale = tu_pointer(in[SCALE]),
                             .y = tu_pointer(out[0]),
                             .of_weight = tu_pointer(out[1]),
                             .of_bias = tu_pointer(out[2]),
                             .centred = attributes->centred };
        set_sizes(&job, call->inputs[X], call->inputs[X]->ndim - call->inputs[MEAN]->ndim);
        run_backward(&job, dtype);
        status = TUTTI_OK;
    }
    for (int i = 0; i < INPUTS; i++)
        tu_tensor_drop(in[i]);
    return tu_stage_end(3, call->outputs, out, status);
}

tt_tensor *tu_norm_backward_sample(tu_sampler *sampler) {
    tt_dims rows = tt_shape(sampler->size), shape = tt_shape(sampler->size, 4);
    tt_tensor *grad = sampler->make(sampler, TU_SAMPLE_NORMAL, shape, 0);
    tt_tensor *x = sampler->make(sampler, TU_SAMPLE_NORMAL, shape, 0);
    tt_tensor *mean = sampler->make(sampler, TU_SAMPLE_NORMAL, rows, 0);
    tt_tensor *scale = sampler->make(sampler, TU_SAMPLE_POSITIVE, rows, 0);
    tt_tensor *weight = sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(4), 0), *results[3];
    return tu_norm_backward(grad, x, mean, scale, weight, true, results) ? tt_add(results[0], results[1]) : NULL;
}

static void norm_gradient(tu_gradient *gradient, bool centred, double epsilon) {
    if (tu_gradient_is_recorded()) {
        tu_norm_gradient_again(gradient, centred, epsilon);
        return;
    }
    tt_tensor *results[3];
    if (!tu_norm_backward(gradient->grads[0], tu_saved(gradient, TU_INPUT(0)), tu_saved(gradient, TU_OUTPUT(1)),
                          tu_saved(gradient, TU_OUTPUT(2)), tu_saved(gradient, TU_INPUT(1)), centred, results))
        return;
    for (int i = 0; i < gradient->input_count; i++)
        gradient->results[i] = results[i];
}

void tu_layer_norm_gradient(tu_gradient *gradient) {
    const tu_layer_norm_attributes *attributes = gradient->attributes;
    norm_gradient(gradient, true, attributes->epsilon);
}

void tu_rms_norm_gradient(tu_gradient *gradient) {
    const tu_rms_norm_attributes *attributes = gradient->attributes;
    norm_gradient(gradient, false, attributes->epsilon);
}
