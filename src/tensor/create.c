/* SPDX-License-Identifier: Apache-2.0
 *
 * Making tensors.
 */
#include <math.h>
#include <string.h>

#include <tutti/autograd.h>

#include "tensor/convert.h"
#include "tensor/create.h"
#include "tensor/loop.h"
#include "tensor/operator.h"

#define FAMILY "creation"

tutti_status tu_create_shape(tu_call *call) {
    const tu_params *p = &call->params;
    call->device = (tutti_device)p->integer[1];
    return tu_shape_from(call->operator->name, p->dims[0], (tutti_dtype)p->integer[0], call->device, &call->results[0]);
}

tt_tensor *tu_create(tu_call *call, tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    tt_options full = TT_OPTIONS_INIT;
    if (tu_pending_take(tu_options_copy("tt_options", options, &full, sizeof full)) != TUTTI_OK)
        return NULL;
    if (full.device == 0)
        full.device = TUTTI_CPU;
    call->params.dims[0] = shape;
    call->params.integer[0] = dtype;
    call->params.integer[1] = full.device;
    tt_tensor *x = tu_run(call);
    if (x != NULL && full.name != NULL)
        tt_set_name(x, full.name);
    if (x != NULL && full.requires_grad)
        tt_require_grad(x, true);
    return tu_self()->pending == TUTTI_OK ? x : NULL;
}

/* ---- empty, full ---- */

static tt_tensor *empty_sample(tu_sampler *s) {
    return tt_fill_(tt_empty_like(tu_normal(s, tt_shape(s->n, 3))), 1);
}
TU_OPERATOR(empty) = { .name = "empty",
                       .schema = "empty(shape, dtype, options) -> tensor",
                       .summary = "contents undefined",
                       .family = FAMILY,
                       .flags = TU_IMPURE,
                       .shape = tu_create_shape,
                       .sample = empty_sample };

tt_tensor *tt_empty(tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    tu_call call;
    tu_call_init(&call, &tu_operator_empty, 0, NULL);
    return tu_create(&call, shape, dtype, options);
}

static tutti_status empty_strided_shape(tu_call *call) {
    tutti_status status = tu_create_shape(call);
    const tt_dims *strides = &call->params.dims[1];
    tu_shape *result = &call->results[0];
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
static tt_tensor *empty_strided_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n, 3));
    tt_options options = TT_OPTIONS_INIT;
    options.device = tt_device_of(x);
    return tt_zero_(tt_empty_strided(tt_shape(s->n, 3), tt_shape(1, 4), TUTTI_F64, &options));
}
TU_OPERATOR(empty_strided) = { .name = "empty_strided",
                               .schema = "empty_strided(shape, strides, dtype, options) -> tensor",
                               .summary = "contents undefined, strides as given",
                               .family = FAMILY,
                               .flags = TU_IMPURE,
                               .shape = empty_strided_shape,
                               .sample = empty_strided_sample };
tt_tensor *tt_empty_strided(tt_dims shape, tt_dims strides, tutti_dtype dtype, const tt_options *options) {
    tu_call call;
    tu_call_init(&call, &tu_operator_empty_strided, 0, NULL);
    call.params.dims[1] = strides;
    return tu_create(&call, shape, dtype, options);
}

void tu_fill(tt_tensor *x, double value) {
    /* A stride-0 tensor of one element, copied. */
    tu_storage storage = { .data = &value };
    tt_tensor number = { .dtype = TUTTI_F64, .flags = TU_CONTIGUOUS, .numel = 1, .storage = &storage };
    if (value == 0 && x->flags & TU_CONTIGUOUS && x->numel > 0 && !signbit(value))
        memset(tu_pointer(x), 0, (size_t)x->numel * tu_dtype_bytes[x->dtype]);
    else
        tu_copy_tensor(x, &number);
}

static tutti_status full_cpu(tu_call *call) {
    tu_fill(call->outputs[0], call->params.number[0]);
    return TUTTI_OK;
}
static tt_tensor *full_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n, 3));
    tt_options options = TT_OPTIONS_INIT;
    options.device = tt_device_of(x);
    return tt_full(tt_shape(s->n, 2), 1.5, tt_dtype(x), &options);
}
TU_OPERATOR(full) = { .name = "full",
                      .schema = "full(shape, value, dtype, options) -> tensor",
                      .summary = "one value everywhere",
                      .family = FAMILY,
                      .shape = tu_create_shape,
                      .cpu = full_cpu,
                      .sample = full_sample };

tt_tensor *tt_full(tt_dims shape, double value, tutti_dtype dtype, const tt_options *options) {
    tu_call call;
    tu_call_init(&call, &tu_operator_full, 0, NULL);
    call.params.number[0] = value;
    return tu_create(&call, shape, dtype, options);
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
    return like("empty_like", x, &options) ? tt_empty(tt_sizes(x), x->dtype, &options) : NULL;
}

tt_tensor *tt_zeros_like(tt_tensor *x) {
    tt_options options;
    return like("zeros_like", x, &options) ? tt_zeros(tt_sizes(x), x->dtype, &options) : NULL;
}

tt_tensor *tt_ones_like(tt_tensor *x) {
    tt_options options;
    return like("ones_like", x, &options) ? tt_ones(tt_sizes(x), x->dtype, &options) : NULL;
}

/* ---- arange, eye ---- */

static tutti_status arange_shape(tu_call *call) {
    const double *p = call->params.number;
    double count = ceil((p[1] - p[0]) / p[2]);
    if (!(p[2] != 0) || !isfinite(count) || (p[1] - p[0]) / p[2] < 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "no steps of %g lead from %g to %g", p[2], p[0], p[1]);
    if (count > 1e15)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "%g elements are too many", count);
    call->params.dims[0] = tt_shape((int64_t)count);
    return tu_create_shape(call);
}
static tutti_status arange_cpu(tu_call *call) {
    tt_tensor *x = call->outputs[0];
    double start = call->params.number[0], step = call->params.number[2];
    char *data = tu_pointer(x);
    for (int64_t i = 0; i < x->numel; i += 256) {
        double values[256];
        int64_t count = x->numel - i < 256 ? x->numel - i : 256;
        for (int64_t j = 0; j < count; j++)
            values[j] = start + (double)(i + j) * step;
        tutti_status status =
            tutti_convert(values, TUTTI_F64, data + i * tu_dtype_bytes[x->dtype], x->dtype, (size_t)count);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}
static tt_tensor *arange_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n));
    tt_options options = TT_OPTIONS_INIT;
    options.device = tt_device_of(x);
    return tt_arange(1, 1 + 2 * (double)s->n, 2, tt_dtype(x), &options);
}
TU_OPERATOR(arange) = { .name = "arange",
                        .schema = "arange(start, end, step, dtype, options) -> tensor",
                        .summary = "start, start + step, … below end",
                        .family = FAMILY,
                        .shape = arange_shape,
                        .cpu = arange_cpu,
                        .sample = arange_sample };
tt_tensor *tt_arange(double start, double end, double step, tutti_dtype dtype, const tt_options *options) {
    tu_call call;
    tu_call_init(&call, &tu_operator_arange, 0, NULL);
    call.params.number[0] = start;
    call.params.number[1] = end;
    call.params.number[2] = step;
    return tu_create(&call, tt_no_dims(), dtype, options);
}

static tutti_status eye_cpu(tu_call *call) {
    tt_tensor *x = call->outputs[0];
    tu_fill(x, 0);
    tt_tensor diagonal = *x; /* a strided look at the same memory */
    diagonal.ndim = 1;
    diagonal.numel = x->sizes[0];
    diagonal.sizes[0] = x->sizes[0];
    diagonal.strides[0] = x->sizes[0] + 1;
    diagonal.flags = 0;
    tu_fill(&diagonal, 1);
    return TUTTI_OK;
}
static tt_tensor *eye_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n));
    tt_options options = TT_OPTIONS_INIT;
    options.device = tt_device_of(x);
    return tt_eye(s->n, tt_dtype(x), &options);
}
TU_OPERATOR(eye) = { .name = "eye",
                     .schema = "eye(rows, dtype, options) -> tensor",
                     .summary = "ones on the diagonal, zeros elsewhere",
                     .family = FAMILY,
                     .shape = tu_create_shape,
                     .cpu = eye_cpu,
                     .sample = eye_sample };
tt_tensor *tt_eye(int64_t rows, tutti_dtype dtype, const tt_options *options) {
    tu_call call;
    tu_call_init(&call, &tu_operator_eye, 0, NULL);
    return tu_create(&call, tt_shape(rows, rows), dtype, options);
}

/* ---- from memory ---- */

tt_tensor *tt_from(const void *data, tt_dims shape, tutti_dtype dtype, const tt_options *options) {
    tt_options full = TT_OPTIONS_INIT;
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_options_copy("tt_options", options, &full, sizeof full)) != TUTTI_OK)
        return NULL;
    bool requires_grad = full.requires_grad;
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
    if (requires_grad)
        tt_require_grad(x, true);
    return tu_self()->pending == TUTTI_OK ? x : NULL;
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
    x->flags |= TU_NUMBER;
    if (whole)
        *(int64_t *)x->storage->data = (int64_t)value;
    else
        *(double *)x->storage->data = value;
    return tu_scope_own(x);
}
