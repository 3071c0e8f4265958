/* SPDX-License-Identifier: Apache-2.0
 *
 * Losses.
 */
#include <string.h>

#include "tensor/kernel/kernels.h"
#include "tensor/launch_slopes.h"
#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/stage.h"

/* ---- cross entropy: (logits, targets) to (loss, log of the sum of exponentials per row, in two numbers) ---- */

typedef struct job {
    tu_entropy_rows rows;
    tu_entropy_kernel *kernel;
} job;

static void run_job(void *context, int64_t begin, int64_t end) {
    const job *each = context;
    each->kernel(&each->rows, begin, end);
}

static tutti_status check_targets(const tu_call *call, const tt_tensor *logits, const tt_tensor *targets) {
    if (!tu_is_float(logits->dtype) || logits->ndim != 2)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "logits is %s and must be a matrix of floats",
                             tu_describe(logits));
    if (!tu_is_integer(targets->dtype) || targets->ndim != 1 || targets->sizes[0] != logits->sizes[0])
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "targets is %s and must have one integer per row of logits, %s", tu_describe(targets),
                             tu_describe(logits));
    return TUTTI_OK;
}

tutti_status tu_cross_entropy_shape(tu_call *call) {
    const tt_tensor *logits = call->inputs[0];
    tutti_status status = check_targets(call, logits, call->inputs[1]);
    if (status != TUTTI_OK)
        return status;
    call->results[0] = (tu_shape){ .dtype = logits->dtype, .device = call->device };
    call->results[1] = (tu_shape){ .dtype = tu_stage_dtype(logits),
                                   .device = call->device,
                                   .ndim = 2,
                                   .sizes = { logits->sizes[0], 2 },
                                   .strides = { 2, 1 } };
    return TUTTI_OK;
}

/* Targets as i64, each a class or `ignore`; how many count. */
static tutti_status read_targets(const tu_call *call, const tt_tensor *targets, int64_t classes, int64_t ignore,
                                 tt_tensor **dense, int64_t *count) {
    *dense = tu_stage_in(targets, TUTTI_I64);
    if (*dense == NULL)
        return TUTTI_ERROR_MEMORY;
    const int64_t *at = tu_pointer(*dense);
    *count = 0;
    for (int64_t i = 0; i < targets->numel; i++) {
        if (at[i] == ignore)
            continue;
        ++*count;
        if (at[i] < 0 || at[i] >= classes) {
            tutti_status status =
                tu_call_error(call, TUTTI_ERROR_RANGE, "target %lld of row %lld is out of range for %lld classes",
                              (long long)at[i], (long long)i, (long long)classes);
            tu_tensor_drop(*dense);
            return status;
        }
    }
    return TUTTI_OK;
}

/* Parts of TU_LOSS_PART rows, and these in order: so the threads of a device can add at once. */
static double sum_losses(const tu_entropy_rows *job, tutti_dtype dtype, int64_t rows) {
    double sum = 0, before = 0;
    for (int64_t i = 0; i < rows; i++) {
        if (i % TU_LOSS_PART == 0) {
            before += sum;
            sum = 0;
        }
        if (job->targets[i] == job->ignore)
            continue;
        int64_t at = i * job->classes + job->targets[i];
        if (dtype == TUTTI_F32) {
            const float *sums = (const float *)job->sums + 2 * i;
            sum += (double)sums[0] - (double)((const float *)job->logits)[at] + (double)sums[1];
        } else {
            const double *sums = (const double *)job->sums + 2 * i;
            sum += sums[0] - ((const double *)job->logits)[at] + sums[1];
        }
    }
    return before + sum;
}

/* On a device: each row's loss, then their mean, in the order of the rows. A target that is no class is told by the
 * next wait. */
static tutti_status entropy_on_device(tu_call *call, int64_t ignore) {
    tutti_dtype dtype = tu_device_rows_dtype(call->inputs[0]);
    tu_device *device = tu_device_of(call->inputs[0]);
    int64_t rows = call->inputs[0]->sizes[0];
    tu_shape of_losses = { .dtype = TUTTI_F64, .device = call->device, .ndim = 1, .sizes = { rows }, .strides = { 1 } };
    tt_tensor *logits = tu_stage_in(call->inputs[0], dtype), *targets = tu_stage_in(call->inputs[1], TUTTI_I64);
    tt_tensor *losses = tu_tensor_new(&of_losses);
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (logits != NULL && targets != NULL && losses != NULL) {
        tu_launch_rows flat = { .x = tu_place_of(tu_pointer(logits)),
                                .out = tu_place_of(tu_pointer(call->outputs[0])),
                                .count = rows,
                                .size = call->inputs[0]->sizes[1],
                                .sums = tu_place_of(tu_pointer(call->outputs[1])),
                                .targets = tu_place_of(tu_pointer(targets)),
                                .losses = tu_place_of(tu_pointer(losses)),
                                .fault = tu_device_fault_place(device),
                                .ignore = ignore,
                                .dtype = call->outputs[0]->dtype };
        status = tu_device_launch_rows(device, "entropy", dtype, &flat);
        if (status == TUTTI_OK)
            status = tu_device_launch_blocks(device, "kernel_entropy_mean", 1, 128, &flat);
    }
    tu_tensor_drop(logits);
    tu_tensor_drop(targets);
    tu_tensor_drop(losses);
    return status;
}

tutti_status tu_cross_entropy_everywhere(tu_call *call) {
    const tu_cross_entropy_attributes *attributes = call->attributes;
    if (tu_is_remote(call->device))
        return entropy_on_device(call, attributes->ignore);
    tutti_dtype dtype = tu_stage_dtype(call->inputs[0]);
    int64_t count, rows = call->inputs[0]->sizes[0], classes = call->inputs[0]->sizes[1];
    tt_tensor *targets;
    tutti_status status = read_targets(call, call->inputs[1], classes, attributes->ignore, &targets, &count);
    if (status != TUTTI_OK)
        return status;
    tt_tensor *logits = tu_stage_in(call->inputs[0], dtype);
    if (logits != NULL) {
        job each = { { .logits = tu_pointer(logits),
                       .targets = tu_pointer(targets),
                       .sums = tu_pointer(call->outputs[1]),
                       .classes = classes,
                       .ignore = attributes->ignore },
                     tu_tensor_kernels_get()->entropy[tu_float_index(dtype)] };
        tu_parallel(rows, 8192 / (classes + 1) + 1, run_job, &each);
        double loss = sum_losses(&each.rows, dtype, rows) / (double)count; /* of no targets: not a number */
        status = tutti_convert(&loss, TUTTI_F64, tu_pointer(call->outputs[0]), call->outputs[0]->dtype, 1);
    } else {
        status = TUTTI_ERROR_MEMORY;
    }
    tu_tensor_drop(logits);
    tu_tensor_drop(targets);
    return status;
}

/* On a GPU the rows of a large gradient of narrow floats begin at multiples of 16 bytes, with zeros between them: so
 * the products of the layer before take it as it lies (tu_device_multiply would copy it so, twice). */
static bool wants_distance(const tu_shape *shape) {
    return tu_is_remote(shape->device) && (shape->dtype == TUTTI_BF16 || shape->dtype == TUTTI_F16) &&
           shape->sizes[0] >= 512 && shape->sizes[1] >= 512 && shape->sizes[1] % 8 != 0;
}

/* (logits, targets, sums, g) to the gradient of logits: (softmax - one at the target) g / count */
tutti_status tu_cross_entropy_backward_shape(tu_call *call) {
    tutti_status status = check_targets(call, call->inputs[0], call->inputs[1]);
    const tt_tensor *logits = call->inputs[0], *sums = call->inputs[2];
    if (status == TUTTI_OK && (sums->ndim != 2 || sums->sizes[0] != logits->sizes[0] || sums->sizes[1] != 2))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "sums is %s and must have two numbers per row of logits, %s",
                             tu_describe(sums), tu_describe(logits));
    status = status == TUTTI_OK ? tu_shape_like_first(call) : status;
    if (status == TUTTI_OK && wants_distance(&call->results[0]))
        call->results[0].strides[0] = (logits->sizes[1] + 7) / 8 * 8;
    return status;
}

/* Whether out's rows, which lie apart, have all of the memory between them to themselves. */
static bool owns_gaps(const tt_tensor *out) {
    const tu_storage *storage = out->storage;
    size_t whole = (size_t)(out->sizes[0] * out->strides[0]) * tu_dtype_bytes[out->dtype];
    size_t room = (storage->bytes + TU_DEVICE_GRAIN - 1) / TU_DEVICE_GRAIN * TU_DEVICE_GRAIN;
    return out->offset == 0 && !storage->fixed && out->strides[1] == 1 && out->strides[0] > out->sizes[1] &&
           whole <= room;
}

static tutti_status entropy_backward_on_device(tu_call *call, int64_t ignore) {
    tutti_dtype dtype = tu_device_rows_dtype(call->inputs[0]);
    tu_device *device = tu_device_of(call->inputs[0]);
    tu_shape of_share = { .dtype = TUTTI_F64, .device = call->device };
    tt_tensor *logits = tu_stage_in(call->inputs[0], dtype), *targets = tu_stage_in(call->inputs[1], TUTTI_I64);
    tt_tensor *sums = tu_stage_in(call->inputs[2], tu_stage_dtype(call->inputs[0])), *share = tu_tensor_new(&of_share);
    tt_tensor *grad = tu_stage_in(call->inputs[3], TUTTI_F64), *out = tu_stage_out(call->outputs[0], dtype);
    bool whole = owns_gaps(call->outputs[0]);
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (logits != NULL && targets != NULL && sums != NULL && share != NULL && grad != NULL && out != NULL) {
        char name[TU_KERNEL_NAME];
        tu_launch_rows flat = { .x = tu_place_of(tu_pointer(logits)),
                                .other = tu_place_of(tu_pointer(grad)),
                                .out = tu_place_of(tu_pointer(out)),
                                .count = logits->sizes[0],
                                .size = logits->sizes[1],
                                .sums = tu_place_of(tu_pointer(sums)),
                                .targets = tu_place_of(tu_pointer(targets)),
                                .counted = tu_place_of(tu_pointer(share)),
                                .fault = tu_device_fault_place(device),
                                .ignore = ignore,
                                .dtype = TUTTI_F64 };
        status = tu_device_launch_blocks(device, "kernel_entropy_share", 1, 128, &flat);
        tu_launch_slopes slopes = { flat, out->strides[0], whole };
        if (status == TUTTI_OK)
            status = tu_device_launch_blocks(device, tu_kernel_name(name, "entropy_backward", dtype), flat.count,
                                             TU_DEVICE_THREADS, &slopes);
        if (status == TUTTI_OK && whole)
            out->storage->zero_gaps = true;
    }
    tu_tensor_drop(logits);
    tu_tensor_drop(targets);
    tu_tensor_drop(sums);
    tu_tensor_drop(share);
    tu_tensor_drop(grad);
    return tu_stage_end(1, call->outputs, &out, status);
}

tutti_status tu_cross_entropy_backward_everywhere(tu_call *call) {
    const tu_cross_entropy_backward_attributes *attributes = call->attributes;
    if (tu_is_remote(call->device))
        return entropy_backward_on_device(call, attributes->ignore);
    tutti_dtype dtype = tu_stage_dtype(call->inputs[0]);
    int64_t count, rows = call->inputs[0]->sizes[0], classes = call->inputs[0]->sizes[1];
    double grad;
    tt_tensor *targets;
    tutti_status status = read_targets(call, call->inputs[1], classes, attributes->ignore, &targets, &count);
    if (status != TUTTI_OK)
        return status;
    tt_tensor *logits = tu_stage_in(call->inputs[0], dtype), *sums = tu_stage_in(call->inputs[2], dtype);
    tt_tensor *out = tu_stage_out(call->outputs[0], dtype);
    status = tutti_convert(tu_pointer(call->inputs[3]), call->inputs[3]->dtype, &grad, TUTTI_F64, 1);
    if (logits == NULL || sums == NULL || out == NULL)
        status = TUTTI_ERROR_MEMORY;
    if (status == TUTTI_OK) {
        job each = { { tu_pointer(logits), tu_pointer(targets), tu_pointer(sums), tu_pointer(out), classes,
                       attributes->ignore, grad / (double)count },
                     tu_tensor_kernels_get()->entropy_backward[tu_float_index(dtype)] };
        tu_parallel(rows, 8192 / (classes + 1) + 1, run_job, &each);
        status = tu_stage_done(call->outputs[0], out);
    } else {
        tu_tensor_drop(out);
    }
    tu_tensor_drop(logits);
    tu_tensor_drop(sums);
    tu_tensor_drop(targets);
    return status;
}

tt_tensor *tt_mse_loss(tt_tensor *x, tt_tensor *target) {
    return tt_mean(tt_square(tt_sub(x, target)));
}

void tu_cross_entropy_gradient(tu_gradient *gradient) {
    const tu_cross_entropy_attributes *attributes = gradient->attributes;
    if (tu_gradient_is_recorded())
        tu_cross_entropy_gradient_again(gradient, attributes->ignore);
    else
        gradient->results[0] =
            tu_cross_entropy_backward(tu_saved(gradient, TU_INPUT(0)), tu_saved(gradient, TU_INPUT(1)),
                                      tu_saved(gradient, TU_OUTPUT(1)), gradient->grads[0], attributes->ignore);
}

/* ---- logits of other shapes: the classes are dimension 1, or all there is ---- */

/* (n, classes, ...) as rows of classes, one for each target. */
static tt_tensor *rows_of_classes(tt_tensor *logits) {
    tt_dims order = tu_sizes(logits);
    int64_t rows = logits->sizes[0];
    for (int i = 0, at = 0; i < logits->ndim; i++)
        if (i != 1)
            order.at[at++] = i;
    order.at[logits->ndim - 1] = 1;
    for (int i = 2; i < logits->ndim; i++)
        rows *= logits->sizes[i];
    return tt_reshape(tt_permute(logits, order), tt_shape(rows, logits->sizes[1]));
}

static bool targets_fit(const tt_tensor *logits, const tt_tensor *targets) {
    bool fits = targets->ndim == logits->ndim - 1;
    for (int i = 0; i < targets->ndim && fits; i++)
        fits = targets->sizes[i] == logits->sizes[i == 0 ? 0 : i + 1];
    return fits;
}

tt_tensor *tt_cross_entropy(tt_tensor *logits, tt_tensor *targets, int64_t ignore) {
    static const char who[] = "cross_entropy";
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check(who, "logits", logits)) != TUTTI_OK ||
        tu_pending_take(tu_tensor_check(who, "targets", targets)) != TUTTI_OK)
        return NULL;
    if (logits->ndim == 2)
        return tu_cross_entropy(logits, targets, ignore);
    if (logits->ndim == 0 || !targets_fit(logits, targets)) {
        tu_fail(
            TUTTI_ERROR_ARGUMENT,
            "cross_entropy: logits is %s, of which dimension 1 (or the only one) are the classes; targets is %s and "
            "must have the others",
            tu_describe(logits), tu_describe(targets));
        return NULL;
    }
    tt_tensor *rows = logits->ndim == 1 ? tt_view(logits, tt_shape(1, logits->sizes[0])) : rows_of_classes(logits);
    return tu_cross_entropy(rows, tt_reshape(targets, tt_shape(targets->numel)), ignore);
}
