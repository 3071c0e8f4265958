/* SPDX-License-Identifier: Apache-2.0
 *
 * Layer norm and RMS norm. The mean and the reciprocal deviation of each row are kept for the gradient, in the compute
 * type.
 */
#include <string.h>

#include "tensor/parallel.h"
#include "tensor/stage.h"
#include "tensor/vector_math.h"

#define FAMILY "networks"

/* One call's rows of `size` elements. Backward has g; forward has not. NULL weight: ones. */
typedef struct rows {
    const void *x, *g, *weight, *bias;
    void *mean, *scale, *y, *of_weight, *of_bias;
    int64_t count, size;
    double epsilon;
    bool centred; /* layer norm; else RMS norm */
} rows;

#define NORM_KERNELS(suffix, type, root)                                                                    \
    TU_INLINE type sum_##suffix(const type *x, int64_t size, type shift, bool squared) {                    \
        type lanes[16] = { 0 }, sum = 0;                                                                    \
        int64_t i = 0;                                                                                      \
        for (; i + 16 <= size; i += 16)                                                                     \
            for (int l = 0; l < 16; l++) {                                                                  \
                type d = x[i + l] - shift;                                                                  \
                lanes[l] += squared ? d * d : d;                                                            \
            }                                                                                               \
        for (; i < size; i++) {                                                                             \
            type d = x[i] - shift;                                                                          \
            sum += squared ? d * d : d;                                                                     \
        }                                                                                                   \
        for (int l = 0; l < 16; l++)                                                                        \
            sum += lanes[l];                                                                                \
        return sum;                                                                                         \
    }                                                                                                       \
    TU_CLONES static void forward_##suffix(void *context, int64_t begin, int64_t end) {                     \
        const rows *r = context;                                                                            \
        const type *weight = r->weight, *bias = r->bias;                                                    \
        for (int64_t row = begin; row < end; row++) {                                                       \
            const type *x = (const type *)r->x + row * r->size;                                             \
            type *y = (type *)r->y + row * r->size;                                                         \
            type mean = r->centred ? sum_##suffix(x, r->size, 0, false) / (type)r->size : 0;                \
            type scale = 1 / root(sum_##suffix(x, r->size, mean, true) / (type)r->size + (type)r->epsilon); \
            if (weight != NULL && bias != NULL)                                                             \
                for (int64_t i = 0; i < r->size; i++)                                                       \
                    y[i] = (x[i] - mean) * scale * weight[i] + bias[i];                                     \
            else if (weight != NULL)                                                                        \
                for (int64_t i = 0; i < r->size; i++)                                                       \
                    y[i] = (x[i] - mean) * scale * weight[i];                                               \
            else                                                                                            \
                for (int64_t i = 0; i < r->size; i++)                                                       \
                    y[i] = (x[i] - mean) * scale;                                                           \
            ((type *)r->mean)[row] = mean;                                                                  \
            ((type *)r->scale)[row] = scale;                                                                \
        }                                                                                                   \
    }                                                                                                       \
    /* dx = scale (gw - mean(gw) - xh mean(gw xh)), without the first mean for RMS */                       \
    TU_CLONES static void backward_##suffix(void *context, int64_t begin, int64_t end) {                    \
        const rows *r = context;                                                                            \
        const type *weight = r->weight;                                                                     \
        for (int64_t row = begin; row < end; row++) {                                                       \
            const type *x = (const type *)r->x + row * r->size, *g = (const type *)r->g + row * r->size;    \
            type *o = (type *)r->y + row * r->size;                                                         \
            type mean = ((type *)r->mean)[row], scale = ((type *)r->scale)[row];                            \
            type plain[16] = { 0 }, crossed[16] = { 0 }, of_g = 0, of_gx = 0;                               \
            int64_t i = 0;                                                                                  \
            for (; i + 16 <= r->size; i += 16)                                                              \
                for (int l = 0; l < 16; l++) {                                                              \
                    type gw = weight != NULL ? g[i + l] * weight[i + l] : g[i + l];                         \
                    plain[l] += gw;                                                                         \
                    crossed[l] += gw * (x[i + l] - mean);                                                   \
                }                                                                                           \
            for (; i < r->size; i++) {                                                                      \
                type gw = weight != NULL ? g[i] * weight[i] : g[i];                                         \
                of_g += gw;                                                                                 \
                of_gx += gw * (x[i] - mean);                                                                \
            }                                                                                               \
            for (int l = 0; l < 16; l++) {                                                                  \
                of_g += plain[l];                                                                           \
                of_gx += crossed[l];                                                                        \
            }                                                                                               \
            of_g = r->centred ? of_g / (type)r->size : 0;                                                   \
            of_gx = of_gx * scale * scale / (type)r->size;                                                  \
            if (weight != NULL)                                                                             \
                for (i = 0; i < r->size; i++)                                                               \
                    o[i] = scale * (g[i] * weight[i] - of_g - (x[i] - mean) * of_gx);                       \
            else                                                                                            \
                for (i = 0; i < r->size; i++)                                                               \
                    o[i] = scale * (g[i] - of_g - (x[i] - mean) * of_gx);                                   \
        }                                                                                                   \
    }                                                                                                       \
    /* Columns [begin, end) of the weight's and the bias's gradients. */                                    \
    TU_CLONES static void columns_##suffix(void *context, int64_t begin, int64_t end) {                     \
        const rows *r = context;                                                                            \
        type *of_weight = r->of_weight, *of_bias = r->of_bias;                                              \
        for (int64_t i = begin; i < end; i++)                                                               \
            of_weight[i] = of_bias[i] = 0;                                                                  \
        for (int64_t row = 0; row < r->count; row++) {                                                      \
            const type *x = (const type *)r->x + row * r->size, *g = (const type *)r->g + row * r->size;    \
            type mean = ((type *)r->mean)[row], scale = ((type *)r->scale)[row];                            \
            for (int64_t i = begin; i < end; i++) {                                                         \
                of_weight[i] += g[i] * (x[i] - mean) * scale;                                               \
                of_bias[i] += g[i];                                                                         \
            }                                                                                               \
        }                                                                                                   \
    }
NORM_KERNELS(f32, float, sqrtf)
NORM_KERNELS(f64, double, sqrt)

/* ---- shapes ---- */

/* How many trailing dimensions of x are normalized: those of weight, else one. */
static tutti_status check_weight(const tu_call *call, const tt_tensor *x, const tt_tensor *weight, const char *what,
                                 int *trailing) {
    if (weight == NULL)
        return TUTTI_OK;
    bool fits = weight->ndim >= 1 && weight->ndim <= x->ndim && weight->dtype == x->dtype;
    for (int i = 0; fits && i < weight->ndim; i++)
        fits = weight->sizes[i] == x->sizes[x->ndim - weight->ndim + i];
    if (!fits)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s, %s, must have the dtype and the last sizes of x, %s",
                             what, tu_describe(weight), tu_describe(x));
    *trailing = weight->ndim;
    return TUTTI_OK;
}

static tutti_status norm_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0], *weight = call->inputs[1],
                    *bias = call->input_count > 2 ? call->inputs[2] : NULL;
    int trailing = 1, of_bias = 1;
    if (!tu_is_float(x->dtype) || x->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tu_describe(x));
    tutti_status status = check_weight(call, x, weight, "weight", &trailing);
    if (status == TUTTI_OK)
        status = check_weight(call, x, bias, "bias", &of_bias);
    if (status != TUTTI_OK)
        return status;
    if (bias != NULL && (weight == NULL || of_bias != trailing))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "weight is NULL or of another shape, and a bias needs a weight of its own shape");
    call->params.integer[0] = trailing;
    for (int i = 0; i < 3; i++) {
        call->results[i] = tu_shape_of(x);
        if (i > 0) {
            call->results[i].ndim = x->ndim - trailing;
            call->results[i].dtype = tu_stage_dtype(x);
        }
        if ((status = tu_shape_contiguous(call->operator->name, &call->results[i])) != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

static void set_sizes(rows *r, const tt_tensor *x, int trailing) {
    r->size = 1;
    for (int i = x->ndim - trailing; i < x->ndim; i++)
        r->size *= x->sizes[i];
    r->count = r->size == 0 ? 0 : x->numel / r->size;
}

static tutti_status norm_cpu(tu_call *call) {
    tutti_dtype dtype = tu_stage_dtype(call->inputs[0]);
    tt_tensor *x = tu_stage_in(call->inputs[0], dtype), *weight = tu_stage_in(call->inputs[1], dtype);
    tt_tensor *bias = call->input_count > 2 ? tu_stage_in(call->inputs[2], dtype) : NULL,
              *y = tu_stage_out(call->outputs[0], dtype);
    bool centred = call->input_count > 2;
    bool staged = x != NULL && y != NULL && (weight != NULL || call->inputs[1] == NULL) &&
                  (bias != NULL || !centred || call->inputs[2] == NULL);
    if (staged) {
        rows r = { .x = tu_pointer(x),
                   .weight = weight != NULL ? tu_pointer(weight) : NULL,
                   .bias = bias != NULL ? tu_pointer(bias) : NULL,
                   .y = tu_pointer(y),
                   .mean = tu_pointer(call->outputs[1]),
                   .scale = tu_pointer(call->outputs[2]),
                   .epsilon = call->params.number[0],
                   .centred = centred };
        set_sizes(&r, x, (int)call->params.integer[0]);
        if (r.count > 0)
            tu_parallel(r.count, 16384 / r.size + 1, dtype == TUTTI_F32 ? forward_f32 : forward_f64, &r);
        tu_stage_done(call->outputs[0], y);
        y = NULL;
    }
    tu_tensor_drop(x);
    tu_tensor_drop(weight);
    tu_tensor_drop(bias);
    tu_tensor_drop(y);
    return staged ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}

/* ---- backward: (g, x, mean, scale, weight) to (dx, dweight, dbias) ---- */

static tutti_status backward_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[1];
    int trailing = (int)call->params.integer[0];
    if (!tu_same_sizes(call->inputs[0], x))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "g, %s, and x, %s, differ in shape",
                             tu_describe(call->inputs[0]), tu_describe(x));
    call->results[0] = call->results[1] = call->results[2] = tu_shape_of(x);
    for (int i = 1; i < 3; i++) {
        call->results[i].ndim = trailing;
        memmove(call->results[i].sizes, x->sizes + x->ndim - trailing, (size_t)trailing * sizeof x->sizes[0]);
    }
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 3 && status == TUTTI_OK; i++)
        status = tu_shape_contiguous(call->operator->name, &call->results[i]);
    return status;
}

static tutti_status backward_cpu(tu_call *call) {
    enum {
        G,
        X,
        MEAN,
        SCALE,
        WEIGHT,
        INPUTS
    };
    tutti_dtype dtype = tu_stage_dtype(call->inputs[X]);
    tt_tensor *in[INPUTS] = { NULL }, *out[3] = { NULL };
    bool staged = true;
    for (int i = 0; i < INPUTS; i++)
        staged = ((in[i] = tu_stage_in(call->inputs[i], dtype)) != NULL || call->inputs[i] == NULL) && staged;
    for (int i = 0; i < 3; i++)
        staged = (out[i] = tu_stage_out(call->outputs[i], dtype)) != NULL && staged;
    if (staged) {
        rows r = { .x = tu_pointer(in[X]),
                   .g = tu_pointer(in[G]),
                   .weight = in[WEIGHT] != NULL ? tu_pointer(in[WEIGHT]) : NULL,
                   .mean = tu_pointer(in[MEAN]),
                   .scale = tu_pointer(in[SCALE]),
                   .y = tu_pointer(out[0]),
                   .of_weight = tu_pointer(out[1]),
                   .of_bias = tu_pointer(out[2]),
                   .centred = call->params.integer[1] != 0 };
        set_sizes(&r, call->inputs[X], (int)call->params.integer[0]);
        if (r.count > 0)
            tu_parallel(r.count, 8192 / r.size + 1, dtype == TUTTI_F32 ? backward_f32 : backward_f64, &r);
        if (r.size > 0)
            tu_parallel(r.size, 16384 / (r.count + 1) + 64, dtype == TUTTI_F32 ? columns_f32 : columns_f64, &r);
    }
    for (int i = 0; i < INPUTS; i++)
        tu_tensor_drop(in[i]);
    for (int i = 0; i < 3; i++) {
        if (staged)
            tu_stage_done(call->outputs[i], out[i]);
        else
            tu_tensor_drop(out[i]);
    }
    return staged ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}
static tt_tensor *norm_backward_sample(tu_sampler *s);
TU_OPERATOR(norm_backward) = { .name = "norm_backward",
                               .schema = "norm_backward(g, x, mean, scale, weight=NULL) -> tensors",
                               .summary = "gradients of layer_norm and rms_norm: of x, weight and bias",
                               .family = FAMILY,
                               .outputs = 3,
                               .optional = TU_INPUT(4),
                               .shape = backward_shape,
                               .cpu = backward_cpu,
                               .sample = norm_backward_sample };
static bool norm_backward(tu_call *call, tt_tensor *const *inputs, int trailing, bool centred) {
    tu_call_init(call, &tu_operator_norm_backward, 5, inputs);
    call->params.integer[0] = trailing;
    call->params.integer[1] = centred;
    return tu_run_call(call);
}
static tt_tensor *norm_backward_sample(tu_sampler *s) {
    tt_tensor *g = tu_normal(s, tt_shape(s->n, 4)), *x = tu_normal(s, tt_shape(s->n, 4));
    tt_tensor *inputs[] = { g, x, tu_normal(s, tt_shape(s->n)), tu_positive(s, tt_shape(s->n)),
                            tu_normal(s, tt_shape(4)) };
    tu_call call;
    return norm_backward(&call, inputs, 1, true) ? tt_add(call.outputs[0], call.outputs[1]) : NULL;
}

static void norm_gradient(tu_gradient *gradient, bool centred) {
    tt_tensor *inputs[] = { gradient->grads[0], tu_saved(gradient, TU_INPUT(0)), tu_saved(gradient, TU_OUTPUT(1)),
                            tu_saved(gradient, TU_OUTPUT(2)), tu_saved(gradient, TU_INPUT(1)) };
    tu_call call;
    if (!norm_backward(&call, inputs, (int)gradient->params->integer[0], centred))
        return;
    gradient->results[0] = call.outputs[0];
    gradient->results[1] = call.outputs[1];
    if (centred)
        gradient->results[2] = call.outputs[2];
}
#define SAVES (TU_INPUT(0) | TU_INPUT(1) | TU_OUTPUT(1) | TU_OUTPUT(2))

/* ---- entries ---- */

static void layer_norm_gradient(tu_gradient *gradient) {
    norm_gradient(gradient, true);
}
static void rms_norm_gradient(tu_gradient *gradient) {
    norm_gradient(gradient, false);
}
static tt_tensor *layer_norm_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(2, s->n, 4)), *weight = tu_normal(s, tt_shape(4));
    return tt_layer_norm(x, weight, tu_normal(s, tt_shape(4)), 1e-5);
}
static tt_tensor *rms_norm_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(2, s->n, 4));
    return tt_rms_norm(x, tu_normal(s, tt_shape(4)), 1e-5);
}
TU_OPERATOR(layer_norm) = { .name = "layer_norm",
                            .schema = "layer_norm(x, weight=NULL, bias=NULL, epsilon) -> tensor",
                            .summary = "(x - mean) / deviation over the last dimensions, times weight, plus bias",
                            .family = FAMILY,
                            .outputs = 3,
                            .visible = 1,
                            .optional = TU_INPUT(1) | TU_INPUT(2),
                            .shape = norm_shape,
                            .cpu = norm_cpu,
                            .gradient = layer_norm_gradient,
                            .saves = { SAVES, SAVES, SAVES },
                            .sample = layer_norm_sample };
TU_OPERATOR(rms_norm) = { .name = "rms_norm",
                          .schema = "rms_norm(x, weight=NULL, epsilon) -> tensor",
                          .summary = "x over the root of its mean square, times weight",
                          .family = FAMILY,
                          .outputs = 3,
                          .visible = 1,
                          .optional = TU_INPUT(1),
                          .shape = norm_shape,
                          .cpu = norm_cpu,
                          .gradient = rms_norm_gradient,
                          .saves = { SAVES, SAVES },
                          .sample = rms_norm_sample };
tt_tensor *tt_layer_norm(tt_tensor *x, tt_tensor *weight, tt_tensor *bias, double epsilon) {
    tt_tensor *inputs[] = { x, weight, bias };
    tu_call call;
    tu_call_init(&call, &tu_operator_layer_norm, 3, inputs);
    call.params.number[0] = epsilon;
    return tu_run(&call);
}
tt_tensor *tt_rms_norm(tt_tensor *x, tt_tensor *weight, double epsilon) {
    tt_tensor *inputs[] = { x, weight };
    tu_call call;
    tu_call_init(&call, &tu_operator_rms_norm, 2, inputs);
    call.params.number[0] = epsilon;
    return tu_run(&call);
}
