/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax and log_softmax. The kernels work on rows without gaps: another dimension than the last changes places with
 * it, in the inputs, which are copied, and in the result, which is made so that the elements of a row are neighbours.
 */
#include <string.h>

#include "tensor/kernel/kernels.h"
#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/stage.h"

typedef struct rows {
    tu_row_kernel *kernel;
    const char *in[2];
    char *out;
    int64_t size;
    size_t element;
} rows;

static void run_rows(void *context, int64_t begin, int64_t end) {
    const rows *job = context;
    size_t offset = (size_t)(begin * job->size) * job->element;
    const void *in[2] = { job->in[0] + offset, job->in[1] != NULL ? job->in[1] + offset : NULL };
    job->kernel(in, job->out + offset, end - begin, job->size);
}

/* Where the table of kernels has an operator's pair. */
struct tu_row_kernels {
    size_t at;
    const char *name; /* on devices */
};

/* The attributes of all rows of this file are one dim. */
static int row_dim(const tu_call *call) {
    return ((const tu_softmax_attributes *)call->attributes)->dim;
}

static void swap(int64_t *list, int left, int right) {
    int64_t kept = list[left];
    list[left] = list[right];
    list[right] = kept;
}

tutti_status tu_rows_shape(tu_call *call) {
    int ndim = call->inputs[0]->ndim, dim;
    tu_shape *result = &call->results[0];
    for (int i = 0; i < call->input_count; i++)
        if (!tu_is_float(call->inputs[i]->dtype))
            return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tu_describe(call->inputs[i]));
    if (call->input_count == 2 &&
        (!tu_same_sizes(call->inputs[0], call->inputs[1]) || call->inputs[0]->dtype != call->inputs[1]->dtype))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s and %s differ", tu_describe(call->inputs[0]),
                             tu_describe(call->inputs[1]));
    tutti_status status = tu_wrap_dim(call->entry->name, row_dim(call), ndim, &dim);
    if (status != TUTTI_OK || dim >= ndim - 1)
        return status == TUTTI_OK ? tu_shape_like_first(call) : status;
    *result = tu_shape_of(call->inputs[0]);
    swap(result->sizes, dim, ndim - 1);
    status = tu_shape_contiguous(call->entry->name, result);
    swap(result->sizes, dim, ndim - 1);
    swap(result->strides, dim, ndim - 1);
    return status;
}

/* A look at x with dim and the last dimension exchanged. */
static tt_tensor turned(const tt_tensor *x, int dim) {
    tu_shape shape = tu_shape_of(x);
    if (dim < x->ndim - 1) {
        swap(shape.sizes, dim, x->ndim - 1);
        swap(shape.strides, dim, x->ndim - 1);
    }
    return tu_tensor_look(x, &shape);
}

/* Large results are stored past the caches where their rows are as the kernel needs them. */
static void choose_stream(const tu_call *call, rows *job, int type, int64_t count) {
    size_t row = (size_t)job->size * job->element;
    if (call->entry == &tu_operator_softmax && (size_t)count * row >= TU_STREAM_BYTES && row <= TU_STREAM_ROW &&
        row % 64 == 0 && (uintptr_t)job->out % 64 == 0)
        job->kernel = tu_tensor_kernels_get()->softmax_stream[type];
}

tutti_status tu_rows_everywhere(tu_call *call) {
    const struct tu_row_kernels *place = call->entry->detail;
    tu_row_kernel *const *kernels = (tu_row_kernel *const *)((const char *)tu_tensor_kernels_get() + place->at);
    int dim = tu_dim(row_dim(call), call->inputs[0]->ndim);
    tt_tensor out = turned(call->outputs[0], dim), in[2], *staged[2] = { NULL, NULL }, *result = NULL;
    tutti_dtype dtype = tu_stage_dtype(call->inputs[0]);
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (out.numel == 0)
        return TUTTI_OK;
    for (int i = 0; i < call->input_count; i++) {
        in[i] = turned(call->inputs[i], dim);
        if ((staged[i] = tu_stage_in(&in[i], dtype)) == NULL)
            goto drop;
    }
    if ((result = tu_stage_out(&out, dtype)) == NULL)
        goto drop;
    int64_t size = out.ndim == 0 ? 1 : out.sizes[out.ndim - 1];
    if (tu_on_device(&out)) {
        tu_launch_rows flat = { .x = tu_place_of(tu_pointer(staged[0])),
                                .other = staged[1] != NULL ? tu_place_of(tu_pointer(staged[1])) : 0,
                                .out = tu_place_of(tu_pointer(result)),
                                .count = out.numel / size,
                                .size = size };
        bool kept = dtype == TUTTI_F32 && size <= 2048 && strcmp(place->name, "softmax") == 0; /* reads a row once */
        status = kept && size <= TU_HELD_MOST && size % 256 == 0
                     ? tu_device_launch_held(tu_device_of(&out), "softmax", dtype, &flat)
                     : tu_device_launch_rows(tu_device_of(&out), kept ? "softmax_kept" : place->name, dtype, &flat);
        if (status == TUTTI_OK)
            status = tu_stage_done(&out, result);
        else
            tu_tensor_drop(result);
        goto drop;
    }
    rows job = { kernels[tu_float_index(dtype)],
                 { tu_pointer(staged[0]), staged[1] != NULL ? tu_pointer(staged[1]) : NULL },
                 tu_pointer(result),
                 size,
                 tu_dtype_bytes[dtype] };
    choose_stream(call, &job, tu_float_index(dtype), out.numel / size);
    tu_parallel(out.numel / size, 8192 / size + 1, run_rows, &job);
    status = tu_stage_done(&out, result);
drop:
    tu_tensor_drop(staged[0]);
    tu_tensor_drop(staged[1]);
    return status;
}

const struct tu_row_kernels tu_softmax_detail = { offsetof(tu_tensor_kernels, softmax), "softmax" };
const struct tu_row_kernels tu_log_softmax_detail = { offsetof(tu_tensor_kernels, log_softmax), "log_softmax" };
const struct tu_row_kernels tu_softmax_backward_detail = { offsetof(tu_tensor_kernels, softmax_backward),
                                                           "softmax_backward" };
const struct tu_row_kernels tu_log_softmax_backward_detail = { offsetof(tu_tensor_kernels, log_softmax_backward),
                                                               "log_softmax_backward" };
