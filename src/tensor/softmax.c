/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax and log_softmax. The kernels work on the last dimension; others are turned there and back.
 */
#include "tensor/kernel/kernels.h"
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
};

tutti_status tu_rows_shape(tu_call *call) {
    for (int i = 0; i < call->input_count; i++)
        if (!tu_is_float(call->inputs[i]->dtype))
            return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tu_describe(call->inputs[i]));
    if (call->input_count == 2 &&
        (!tu_same_sizes(call->inputs[0], call->inputs[1]) || call->inputs[0]->dtype != call->inputs[1]->dtype))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s and %s differ", tu_describe(call->inputs[0]),
                             tu_describe(call->inputs[1]));
    return tu_shape_like_first(call);
}

tutti_status tu_rows_cpu(tu_call *call) {
    const struct tu_row_kernels *place = call->entry->detail;
    tu_row_kernel *const *kernels = (tu_row_kernel *const *)((const char *)tu_tensor_kernels_get() + place->at);
    tt_tensor *out = call->outputs[0], *staged[2] = { NULL, NULL }, *result = NULL;
    tutti_dtype dtype = tu_stage_dtype(call->inputs[0]);
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (out->numel == 0)
        return TUTTI_OK;
    for (int i = 0; i < call->input_count; i++)
        if ((staged[i] = tu_stage_in(call->inputs[i], dtype)) == NULL)
            goto drop;
    if ((result = tu_stage_out(out, dtype)) == NULL)
        goto drop;
    int64_t size = out->ndim == 0 ? 1 : out->sizes[out->ndim - 1];
    rows job = { kernels[tu_float_index(dtype)],
                 { tu_pointer(staged[0]), staged[1] != NULL ? tu_pointer(staged[1]) : NULL },
                 tu_pointer(result),
                 size,
                 tu_dtype_bytes[dtype] };
    tu_parallel(out->numel / size, 8192 / size + 1, run_rows, &job);
    tu_stage_done(out, result);
    status = TUTTI_OK;
drop:
    tu_tensor_drop(staged[0]);
    tu_tensor_drop(staged[1]);
    return status;
}

const struct tu_row_kernels tu_softmax_detail = { offsetof(tu_tensor_kernels, softmax) };
const struct tu_row_kernels tu_log_softmax_detail = { offsetof(tu_tensor_kernels, log_softmax) };
const struct tu_row_kernels tu_softmax_backward_detail = { offsetof(tu_tensor_kernels, softmax_backward) };
const struct tu_row_kernels tu_log_softmax_backward_detail = { offsetof(tu_tensor_kernels, log_softmax_backward) };

/* ---- any dimension: turned to the last, and back ---- */

static tt_tensor *along(const char *who, tt_tensor *(*function)(tt_tensor *), tt_tensor *x, int dim) {
    int at;
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check(who, "x", x)) != TUTTI_OK ||
        tu_pending_take(tu_wrap_dim(who, dim, x->ndim, &at)) != TUTTI_OK)
        return NULL;
    if (at >= x->ndim - 1)
        return function(x);
    return tt_transpose(function(tt_transpose(x, at, -1)), at, -1);
}

tt_tensor *tt_softmax(tt_tensor *x, int dim) {
    return along("softmax", tu_softmax, x, dim);
}

tt_tensor *tt_log_softmax(tt_tensor *x, int dim) {
    return along("log_softmax", tu_log_softmax, x, dim);
}
