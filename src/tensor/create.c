/* SPDX-License-Identifier: Apache-2.0
 *
 * Making tensors.
 */
#include <tutti/streams.h>

#include <math.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/create.h"
#include "tensor/history.h"
#include "tensor/loop.h"
#include "tensor/on_device.h"
#include "tensor/operators.h"

tutti_status tu_create_shape(tu_call *call, tt_dims shape, tutti_dtype dtype, tutti_device device) {
    return tu_shape_from(call->entry->name, shape, dtype, device, &call->results[0]);
}

bool tu_create_begin(const tt_options *options, tt_options *full) {
    *full = (tt_options)TT_OPTIONS_INIT;
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_options_copy("tt_options", options, full, sizeof *full)) != TUTTI_OK)
        return false;
    if (full->device == 0)
        full->device = tt_default_device();
    return true;
}

tt_tensor *tu_create_end(tt_tensor *x, const tt_options *full) {
    if (x != NULL && full->name != NULL)
        tt_set_name(x, full->name);
    if (x != NULL && full->requires_grad)
        tu_pending_take(tu_historian_table.require(x));
    return tu_self()->pending == TUTTI_OK ? x : NULL;
}

/* ---- empty, full ---- */

tutti_status tu_empty_shape(tu_call *call) {
    const tu_empty_attributes *attributes = call->attributes;
    return tu_create_shape(call, attributes->shape, attributes->dtype, attributes->device);
}

tt_tensor *tt_empty(tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    tt_options full;
    return tu_create_begin(options, &full) ? tu_create_end(tu_empty(shape, dtype, full.device), &full) : NULL;
}

tutti_status tu_empty_strided_shape(tu_call *call) {
    const tu_empty_strided_attributes *attributes = call->attributes;
    const tt_dims *strides = &attributes->strides;
    tu_shape *result = &call->results[0];
    tutti_status status = tu_create_shape(call, attributes->shape, attributes->dtype, attributes->device);
    if (status != TUTTI_OK)
        return status;
    if (strides->count != result->ndim)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%d strides given for %d dimensions", strides->count,
                             result->ndim);
    for (int i = 0; i < result->ndim; i++) {
        if (strides->at[i] < 0)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "stride %lld is negative", (long long)strides->at[i]);
        int64_t extent;
        if (__builtin_mul_overflow(strides->at[i], result->sizes[i], &extent) || extent > PTRDIFF_MAX / 256)
            return tu_call_error(call, TUTTI_ERROR_RANGE, "stride %lld is too large to address",
                                 (long long)strides->at[i]);
        result->strides[i] = strides->at[i];
    }
    return TUTTI_OK;
}

tt_tensor *tt_empty_strided(tt_dims shape, tt_dims strides, tutti_dtype dtype, const tt_options *options) {
    tt_options full;
    return tu_create_begin(options, &full) ? tu_create_end(tu_empty_strided(shape, strides, dtype, full.device), &full)
                                           : NULL;
}

tutti_status tu_fill(tt_tensor *x, double value) {
    if (tu_on_device(x))
        return tu_device_fill(x, value);
    /* A stride-0 tensor of one element, copied. */
    tu_storage storage = { .data = &value };
    tt_tensor number = { .dtype = TUTTI_F64, .flags = TU_CONTIGUOUS, .numel = 1, .storage = &storage };
    if (value == 0 && x->flags & TU_CONTIGUOUS && x->numel > 0 && !signbit(value))
        memset(tu_pointer(x), 0, (size_t)x->numel * tu_dtype_bytes[x->dtype]);
    else
        return tu_copy_tensor(x, &number);
    return TUTTI_OK;
}

tutti_status tu_full_shape(tu_call *call) {
    const tu_full_attributes *attributes = call->attributes;
    return tu_create_shape(call, attributes->shape, attributes->dtype, attributes->device);
}

tutti_status tu_full_everywhere(tu_call *call) {
    const tu_full_attributes *attributes = call->attributes;
    return tu_fill(call->outputs[0], attributes->value);
}

tt_tensor *tt_full(tt_dims shape, double value, tutti_dtype dtype, const tt_options *options) {
    tt_options full;
    return tu_create_begin(options, &full) ? tu_create_end(tu_full(shape, value, dtype, full.device), &full) : NULL;
}

tt_tensor *tt_zeros(tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    return tt_full(shape, 0, dtype, options);
}

tt_tensor *tt_ones(tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    return tt_full(shape, 1, dtype, options);
}

/* ---- like another ---- */

static bool like(const char *who, const tt_tensor *x, tt_options *options) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check(who, "x", x)) != TUTTI_OK)
        return false;
    *options = (tt_options)TT_OPTIONS_INIT;
    options->device = x->device;
    return true;
}

tt_tensor *tt_empty_like(tt_tensor *x) {
    tt_options options;
    return like("empty_like", x, &options) ? tt_empty(tu_sizes(x), x->dtype, &options) : NULL;
}

tt_tensor *tt_zeros_like(tt_tensor *x) {
    tt_options options;
    return like("zeros_like", x, &options) ? tt_zeros(tu_sizes(x), x->dtype, &options) : NULL;
}

tt_tensor *tt_ones_like(tt_tensor *x) {
    tt_options options;
    return like("ones_like", x, &options) ? tt_ones(tu_sizes(x), x->dtype, &options) : NULL;
}

/* ---- arange, eye ---- */

tutti_status tu_arange_shape(tu_call *call) {
    const tu_arange_attributes *attributes = call->attributes;
    double steps = (attributes->end - attributes->start) / attributes->step, count = ceil(steps);
    if (!(attributes->step != 0) || !isfinite(count) || steps < 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "no steps of %g lead from %g to %g", attributes->step,
                             attributes->start, attributes->end);
    if (count > 1e15)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "%g elements are too many", count);
    return tu_create_shape(call, tt_shape((int64_t)count), attributes->dtype, attributes->device);
}

tutti_status tu_arange_everywhere(tu_call *call) {
    const tu_arange_attributes *attributes = call->attributes;
    tt_tensor *x = call->outputs[0];
    if (tu_on_device(x)) {
        tu_launch_line line = { tu_place_of(tu_pointer(x)), x->numel, attributes->start, attributes->step, x->dtype };
        return tu_device_launch(tu_device_of(x), "kernel_arange", x->numel, TU_DEVICE_THREADS, &line);
    }
    char *data = tu_pointer(x);
    for (int64_t i = 0; i < x->numel; i += 256) {
        double values[256];
        int64_t count = x->numel - i < 256 ? x->numel - i : 256;
        for (int64_t j = 0; j < count; j++)
            values[j] = attributes->start + (double)(i + j) * attributes->step;
        tutti_status status =
            tutti_convert(values, TUTTI_F64, data + i * tu_dtype_bytes[x->dtype], x->dtype, (size_t)count);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

tt_tensor *tt_arange(double start, double end, double step, tutti_dtype dtype, const tt_options *options) {
    tt_options full;
    return tu_create_begin(options, &full) ? tu_create_end(tu_arange(start, end, step, dtype, full.device), &full)
                                           : NULL;
}

tutti_status tu_eye_shape(tu_call *call) {
    const tu_eye_attributes *attributes = call->attributes;
    return tu_create_shape(call, tt_shape(attributes->rows, attributes->rows), attributes->dtype, attributes->device);
}

tutti_status tu_eye_everywhere(tu_call *call) {
    tt_tensor *x = call->outputs[0];
    tutti_status status = tu_fill(x, 0);
    tu_shape shape = { .dtype = x->dtype, .device = x->device, .ndim = 1, .offset = x->offset };
    shape.sizes[0] = x->sizes[0];
    shape.strides[0] = x->sizes[0] + 1;
    tt_tensor diagonal = tu_tensor_look(x, &shape);
    return status == TUTTI_OK ? tu_fill(&diagonal, 1) : status;
}

tt_tensor *tt_eye(int64_t rows, tutti_dtype dtype, const tt_options *options) {
    tt_options full;
    return tu_create_begin(options, &full) ? tu_create_end(tu_eye(rows, dtype, full.device), &full) : NULL;
}

/* ---- from memory ---- */

tt_tensor *tt_from(const void *data, tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    tt_options full = TT_OPTIONS_INIT;
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_options_copy("tt_options", options, &full, sizeof full)) != TUTTI_OK)
        return NULL;
    tt_options rest = full; /* comes into effect when the data are there */
    full.requires_grad = false;
    tt_tensor *x = tt_empty(shape, dtype, &full);
    if (x == NULL)
        return NULL;
    if (data == NULL && x->numel > 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "from: data is NULL for %s", tu_describe(x));
        return NULL;
    }
    if (x->numel > 0 && x->device == TUTTI_CPU)
        memcpy(tu_pointer(x), data, (size_t)x->numel * tu_dtype_bytes[dtype]);
    if (x->numel > 0 && tu_on_device(x) &&
        tu_pending_take(tu_device_write(tu_device_of(x), tu_pointer(x), data,
                                        (size_t)x->numel * tu_dtype_bytes[dtype])) != TUTTI_OK)
        return NULL;
    return tu_create_end(x, &rest);
}

tt_tensor *tt_wrap(void *data, tt_dims shape, tutti_dtype dtype, void (*release)(void *owner), void *owner) {
    tu_shape described = { 0 };
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check() ||
        tu_pending_take(tu_shape_from("wrap", shape, dtype, TUTTI_CPU, &described)) != TUTTI_OK)
        return NULL;
    int64_t numel = tu_shape_numel(&described);
    if (data == NULL && numel > 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "wrap: data is NULL for %lld elements", (long long)numel);
        return NULL;
    }
    tu_storage *storage = tu_storage_wrap(data, (size_t)numel * tu_dtype_bytes[dtype], NULL, NULL);
    tt_tensor *x = tu_tensor_on(storage, &described);
    if (x == NULL) {
        tu_pending_take(TUTTI_ERROR_MEMORY);
        return NULL;
    }
    tt_tensor *owned = tu_scope_own(x);
    if (owned != NULL) { /* only now, so that a failure leaves the memory with the caller */
        storage->release = release;
        storage->owner = owner;
    }
    return owned;
}

tt_tensor *tt_number(double value) {
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check())
        return NULL;
    bool whole = value == rint(value) && fabs(value) < 9e15 && !(value == 0 && signbit(value));
    tu_shape shape = { .dtype = whole ? TUTTI_I64 : TUTTI_F64, .device = TUTTI_CPU };
    tt_tensor *x = tu_tensor_new(&shape);
    if (x == NULL) {
        tu_pending_take(TUTTI_ERROR_MEMORY);
        return NULL;
    }
    x->flags |= TU_NUMBER | TU_LITERAL;
    if (whole)
        *(int64_t *)x->storage->data = (int64_t)value;
    else
        *(double *)x->storage->data = value;
    return tu_scope_own(x);
}
