/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax and log_softmax. The kernels work on the last dimension; others are turned there and back.
 */
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/stage.h"
#include "tensor/vector_math.h"

typedef void row_kernel(const void *const *in, void *out, int64_t rows, int64_t size);

typedef struct rows {
    row_kernel *kernel;
    const char *in[2];
    char *out;
    int64_t size;
    size_t element;
} rows;

static void run_rows(void *context, int64_t begin, int64_t end) {
    const rows *r = context;
    size_t offset = (size_t)(begin * r->size) * r->element;
    const void *in[2] = { r->in[0] + offset, r->in[1] != NULL ? r->in[1] + offset : NULL };
    r->kernel(in, r->out + offset, end - begin, r->size);
}

/* ---- kernels: log of a sum of exponentials, around the largest element ---- */

#define ROW_KERNELS(suffix, type, exp_function, log_function)                                                       \
    TU_INLINE type top_##suffix(const type *x, int64_t size) {                                                      \
        type lanes[16];                                                                                             \
        int64_t i = 0;                                                                                              \
        for (int l = 0; l < 16; l++)                                                                                \
            lanes[l] = -INFINITY;                                                                                   \
        for (; i + 16 <= size; i += 16)                                                                             \
            for (int l = 0; l < 16; l++)                                                                            \
                lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];                                               \
        type top = -INFINITY;                                                                                       \
        for (int l = 0; l < 16; l++)                                                                                \
            top = lanes[l] > top ? lanes[l] : top;                                                                  \
        for (; i < size; i++)                                                                                       \
            top = x[i] > top ? x[i] : top;                                                                          \
        return top;                                                                                                 \
    }                                                                                                               \
    TU_INLINE type sum_##suffix(const type *x, int64_t size) {                                                      \
        type lanes[16] = { 0 };                                                                                     \
        int64_t i = 0;                                                                                              \
        for (; i + 16 <= size; i += 16)                                                                             \
            for (int l = 0; l < 16; l++)                                                                            \
                lanes[l] += x[i + l];                                                                               \
        type sum = 0;                                                                                               \
        for (int l = 0; l < 16; l++)                                                                                \
            sum += lanes[l];                                                                                        \
        for (; i < size; i++)                                                                                       \
            sum += x[i];                                                                                            \
        return sum;                                                                                                 \
    }                                                                                                               \
    /* y = exp(x - top); returns the sum */                                                                         \
    TU_INLINE type exps_##suffix(type *y, const type *x, int64_t size, type top) {                                  \
        type lanes[16] = { 0 }, sum = 0;                                                                            \
        int64_t i = 0;                                                                                              \
        for (; i + 16 <= size; i += 16)                                                                             \
            for (int l = 0; l < 16; l++) {                                                                          \
                type e = exp_function(x[i + l] - top);                                                              \
                y[i + l] = e;                                                                                       \
                lanes[l] += e;                                                                                      \
            }                                                                                                       \
        for (; i < size; i++)                                                                                       \
            sum += y[i] = exp_function(x[i] - top);                                                                 \
        for (int l = 0; l < 16; l++)                                                                                \
            sum += lanes[l];                                                                                        \
        return sum;                                                                                                 \
    }                                                                                                               \
    TU_CLONES static void softmax_##suffix(const void *const *in, void *out, int64_t rows, int64_t size) {          \
        for (int64_t r = 0; r < rows; r++) {                                                                        \
            const type *x = (const type *)in[0] + r * size;                                                         \
            type *y = (type *)out + r * size, top = top_##suffix(x, size);                                          \
            if (top == -INFINITY) /* all hidden: not a number, as 0 / 0 is */                                       \
                top = 0;                                                                                            \
            type scale = 1 / exps_##suffix(y, x, size, top);                                                        \
            for (int64_t i = 0; i < size; i++)                                                                      \
                y[i] *= scale;                                                                                      \
        }                                                                                                           \
    }                                                                                                               \
    TU_CLONES static void log_softmax_##suffix(const void *const *in, void *out, int64_t rows, int64_t size) {      \
        for (int64_t r = 0; r < rows; r++) {                                                                        \
            const type *x = (const type *)in[0] + r * size;                                                         \
            type *y = (type *)out + r * size, top = top_##suffix(x, size);                                          \
            if (top == -INFINITY)                                                                                   \
                top = 0;                                                                                            \
            type lse = top + log_function(exps_##suffix(y, x, size, top));                                          \
            for (int64_t i = 0; i < size; i++)                                                                      \
                y[i] = x[i] - lse;                                                                                  \
        }                                                                                                           \
    }                                                                                                               \
    /* from (g, y): y * (g - sum(g * y)) */                                                                         \
    TU_CLONES static void softmax_backward_##suffix(const void *const *in, void *out, int64_t rows, int64_t size) { \
        for (int64_t r = 0; r < rows; r++) {                                                                        \
            const type *g = (const type *)in[0] + r * size, *y = (const type *)in[1] + r * size;                    \
            type *o = (type *)out + r * size;                                                                       \
            for (int64_t i = 0; i < size; i++)                                                                      \
                o[i] = g[i] * y[i];                                                                                 \
            type dot = sum_##suffix(o, size);                                                                       \
            for (int64_t i = 0; i < size; i++)                                                                      \
                o[i] -= y[i] * dot;                                                                                 \
        }                                                                                                           \
    }                                                                                                               \
    /* from (g, y): g - exp(y) * sum(g) */                                                                          \
    TU_CLONES static void log_softmax_backward_##suffix(const void *const *in, void *out, int64_t rows,             \
                                                        int64_t size) {                                             \
        for (int64_t r = 0; r < rows; r++) {                                                                        \
            const type *g = (const type *)in[0] + r * size, *y = (const type *)in[1] + r * size;                    \
            type *o = (type *)out + r * size, sum = sum_##suffix(g, size);                                          \
            for (int64_t i = 0; i < size; i++)                                                                      \
                o[i] = g[i] - exp_function(y[i]) * sum;                                                             \
        }                                                                                                           \
    }
ROW_KERNELS(f32, float, tu_expf, logf)
ROW_KERNELS(f64, double, exp, log)

struct tu_row_kernels {
    row_kernel *f32, *f64;
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
    const struct tu_row_kernels *kernels = call->entry->detail;
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
    rows r = { dtype == TUTTI_F32 ? kernels->f32 : kernels->f64,
               { tu_pointer(staged[0]), staged[1] != NULL ? tu_pointer(staged[1]) : NULL },
               tu_pointer(result),
               size,
               tu_dtype_bytes[dtype] };
    tu_parallel(out->numel / size, 8192 / size + 1, run_rows, &r);
    tu_stage_done(out, result);
    status = TUTTI_OK;
drop:
    tu_tensor_drop(staged[0]);
    tu_tensor_drop(staged[1]);
    return status;
}

const struct tu_row_kernels tu_softmax_detail = { softmax_f32, softmax_f64 };
const struct tu_row_kernels tu_log_softmax_detail = { log_softmax_f32, log_softmax_f64 };
const struct tu_row_kernels tu_softmax_backward_detail = { softmax_backward_f32, softmax_backward_f64 };
const struct tu_row_kernels tu_log_softmax_backward_detail = { log_softmax_backward_f32, log_softmax_backward_f64 };

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
