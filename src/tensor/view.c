/* SPDX-License-Identifier: Apache-2.0
 *
 * Views: other sizes and strides over the same storage. Making one never reads data, so that views of freed storage are
 * legal; only using them is an error.
 */
#include <string.h>

#include "tensor/operator.h"

#define FAMILY "views"

static tu_call begin(const tu_operator *operator, tt_tensor ** x) {
    tu_call call;
    tu_call_init(&call, operator, 1, x);
    return call;
}

/* The result as x is, for the rule to change. */
static tu_shape *same(tu_call *call) {
    call->results[0] = tu_shape_of(call->inputs[0]);
    return &call->results[0];
}

static tutti_status dim_of(const tu_call *call, int64_t dim, int *wrapped) {
    return tu_wrap_dim(call->operator->name, dim, call->inputs[0]->ndim, wrapped);
}

/* ---- view, reshape ---- */

/* Fills in a -1 and checks the number of elements. */
static tutti_status infer_sizes(const tu_call *call, tt_dims *shape) {
    const tt_tensor *x = call->inputs[0];
    int64_t known = 1;
    int unknown = -1;
    if (shape->count < 0 || shape->count > TT_MAX_DIMS)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "a shape has 0 to %d dimensions, not %d", TT_MAX_DIMS,
                             shape->count);
    for (int i = 0; i < shape->count; i++) {
        if (shape->at[i] == -1 && unknown < 0)
            unknown = i;
        else if (shape->at[i] < 0)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "invalid shape %s", tu_dims_text(shape->count, shape->at));
        else if (__builtin_mul_overflow(known, shape->at[i], &known))
            return tu_call_error(call, TUTTI_ERROR_RANGE, "shape %s is too large",
                                 tu_dims_text(shape->count, shape->at));
    }
    if (unknown >= 0 && known > 0 && x->numel % known == 0)
        known *= shape->at[unknown] = x->numel / known;
    if (known != x->numel)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "shape %s is invalid for %s of %lld elements",
                             tu_dims_text(shape->count, shape->at), tu_describe(x), (long long)x->numel);
    return TUTTI_OK;
}

/* Strides of `shape` over x's memory: old dimensions that lie one behind the other form runs, and each run is cut
 * anew. */
static bool view_strides(const tt_tensor *x, const tt_dims *shape, int64_t *strides) {
    if (x->numel == 0) {
        int64_t stride = 1;
        for (int i = shape->count - 1; i >= 0; i--) {
            strides[i] = stride;
            stride *= shape->at[i] > 0 ? shape->at[i] : 1;
        }
        return true;
    }
    int next = shape->count - 1;
    int64_t run = 1, base = x->ndim > 0 ? x->strides[x->ndim - 1] : 1;
    for (int i = x->ndim - 1; i >= 0; i--) {
        run *= x->sizes[i];
        bool ends = i == 0 || (x->sizes[i - 1] != 1 && x->strides[i - 1] != run * base);
        if (!ends)
            continue;
        int64_t cut = 1;
        while (next >= 0 && (cut < run || shape->at[next] == 1)) {
            strides[next] = cut * base;
            cut *= shape->at[next--];
        }
        if (cut != run)
            return false;
        if (i > 0) {
            base = x->strides[i - 1];
            run = 1;
        }
    }
    for (; next >= 0; next--) /* leading ones of a 0-dim tensor */
        strides[next] = 1;
    return true;
}

static tutti_status view_shape(tu_call *call) {
    tu_shape *result = same(call);
    tt_dims shape = call->params.dims[0];
    tutti_status status = infer_sizes(call, &shape);
    if (status != TUTTI_OK)
        return status;
    if (!view_strides(call->inputs[0], &shape, result->strides))
        return tu_call_error(
            call, TUTTI_ERROR_ARGUMENT,
            "view size is not compatible with the strides %s of %s: it would need a copy; use tt_reshape",
            tu_dims_text(call->inputs[0]->ndim, call->inputs[0]->strides), tu_describe(call->inputs[0]));
    result->ndim = shape.count;
    memcpy(result->sizes, shape.at, sizeof shape.at);
    return TUTTI_OK;
}
static void view_gradient(tu_gradient *gradient) {
    gradient->results[0] = tt_reshape(gradient->grads[0], tu_input_dims(gradient, 0));
}
/* The test makes inputs that are not contiguous, which a view of other sizes refuses: hence the split of one dimension
 * only. */
static tt_tensor *view_sample(tu_sampler *s) {
    return tt_view(tu_normal(s, tt_shape(s->n, 4)), tt_shape(s->n, 2, 2));
}
TU_OPERATOR(view) = { .name = "view",
                      .schema = "view(x, shape) -> view",
                      .summary = "another shape; an error where a copy would be needed",
                      .family = FAMILY,
                      .flags = TU_VIEW,
                      .shape = view_shape,
                      .gradient = view_gradient,
                      .sample = view_sample };
tt_tensor *tt_view(tt_tensor *x, tt_dims shape) {
    tu_call call = begin(&tu_operator_view, &x);
    call.params.dims[0] = shape;
    return tu_run(&call);
}

static tt_tensor *reshape_sample(tu_sampler *s) {
    return tt_reshape(tu_normal(s, tt_shape(s->n, 4)), tt_shape(4, s->n));
}
TU_OPERATOR(reshape) = { .name = "reshape",
                         .schema = "reshape(x, shape) -> view or tensor",
                         .summary = "another shape; a view where possible",
                         .family = FAMILY,
                         .flags = TU_COMPOSITE,
                         .sample = reshape_sample };
tt_tensor *tt_reshape(tt_tensor *x, tt_dims shape) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("reshape", "x", x)) != TUTTI_OK)
        return NULL;
    tu_call call = begin(&tu_operator_view, &x);
    int64_t strides[TT_MAX_DIMS];
    if (infer_sizes(&call, &shape) == TUTTI_OK && !view_strides(x, &shape, strides))
        x = tt_contiguous(x);
    return tt_view(x, shape);
}

static tt_tensor *flatten_sample(tu_sampler *s) {
    return tt_flatten(tu_normal(s, tt_shape(2, s->n, 3)), 1, 2);
}
TU_OPERATOR(flatten) = { .name = "flatten",
                         .schema = "flatten(x, first, last) -> view or tensor",
                         .summary = "merges dimensions first to last",
                         .family = FAMILY,
                         .flags = TU_COMPOSITE,
                         .sample = flatten_sample };
tt_tensor *tt_flatten(tt_tensor *x, int first, int last) {
    int from, to;
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("flatten", "x", x)) != TUTTI_OK ||
        tu_pending_take(tu_wrap_dim("flatten", first, x->ndim, &from)) != TUTTI_OK ||
        tu_pending_take(tu_wrap_dim("flatten", last, x->ndim, &to)) != TUTTI_OK)
        return NULL;
    if (x->ndim == 0)
        return tt_view(x, tt_shape(1));
    if (from > to) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "flatten: dimension %d comes after %d", from, to);
        return NULL;
    }
    tt_dims shape = { .count = x->ndim - (to - from) };
    for (int i = 0, d = 0; d < x->ndim; d++) {
        if (d > from && d <= to) {
            shape.at[i - 1] *= x->sizes[d];
            continue;
        }
        shape.at[i++] = x->sizes[d];
    }
    return tt_reshape(x, shape);
}

/* ---- permute, transpose ---- */

static tutti_status permute_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    tu_shape *result = same(call);
    const tt_dims *order = &call->params.dims[0];
    unsigned seen = 0;
    if (order->count != x->ndim)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%d dimensions given for %s", order->count, tu_describe(x));
    for (int i = 0; i < x->ndim; i++) {
        int from;
        tutti_status status = dim_of(call, order->at[i], &from);
        if (status != TUTTI_OK)
            return status;
        if (seen & 1u << from)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "dimension %d appears twice", from);
        seen |= 1u << from;
        result->sizes[i] = x->sizes[from];
        result->strides[i] = x->strides[from];
    }
    return TUTTI_OK;
}
static void permute_gradient(tu_gradient *gradient) {
    const tt_dims *order = &gradient->params->dims[0];
    tt_dims inverse = { .count = order->count };
    for (int i = 0; i < order->count; i++)
        inverse.at[order->at[i] < 0 ? order->at[i] + order->count : order->at[i]] = i;
    gradient->results[0] = tt_permute(gradient->grads[0], inverse);
}
static tt_tensor *permute_sample(tu_sampler *s) {
    return tt_permute(tu_normal(s, tt_shape(s->n, 3, 2)), tt_shape(2, 0, -2));
}
TU_OPERATOR(permute) = { .name = "permute",
                         .schema = "permute(x, order) -> view",
                         .summary = "dimensions in another order",
                         .family = FAMILY,
                         .flags = TU_VIEW,
                         .shape = permute_shape,
                         .gradient = permute_gradient,
                         .sample = permute_sample };
tt_tensor *tt_permute(tt_tensor *x, tt_dims order) {
    tu_call call = begin(&tu_operator_permute, &x);
    call.params.dims[0] = order;
    return tu_run(&call);
}

static tutti_status transpose_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    tu_shape *result = same(call);
    int a, b;
    tutti_status status = dim_of(call, call->params.integer[0], &a);
    if (status == TUTTI_OK)
        status = dim_of(call, call->params.integer[1], &b);
    if (status != TUTTI_OK || x->ndim == 0)
        return status;
    result->sizes[a] = x->sizes[b];
    result->sizes[b] = x->sizes[a];
    result->strides[a] = x->strides[b];
    result->strides[b] = x->strides[a];
    return TUTTI_OK;
}
static void transpose_gradient(tu_gradient *gradient) {
    gradient->results[0] =
        tt_transpose(gradient->grads[0], (int)gradient->params->integer[0], (int)gradient->params->integer[1]);
}
static tt_tensor *transpose_sample(tu_sampler *s) {
    return tt_transpose(tu_normal(s, tt_shape(s->n, 3, 2)), 0, -1);
}
TU_OPERATOR(transpose) = { .name = "transpose",
                           .schema = "transpose(x, a, b) -> view",
                           .summary = "swaps two dimensions",
                           .family = FAMILY,
                           .flags = TU_VIEW,
                           .shape = transpose_shape,
                           .gradient = transpose_gradient,
                           .sample = transpose_sample };
tt_tensor *tt_transpose(tt_tensor *x, int a, int b) {
    tu_call call = begin(&tu_operator_transpose, &x);
    call.params.integer[0] = a;
    call.params.integer[1] = b;
    return tu_run(&call);
}
tt_tensor *tt_t(tt_tensor *x) {
    if (tu_self()->pending == TUTTI_OK && x != NULL && x->magic == TU_MAGIC_ALIVE && x->ndim != 2) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "t: %s is no matrix", tu_describe(x));
        return NULL;
    }
    return tt_transpose(x, 0, 1);
}

/* ---- expand ---- */

static tutti_status expand_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    tu_shape *result = same(call);
    const tt_dims *shape = &call->params.dims[0];
    int pad = shape->count - x->ndim;
    if (pad < 0 || shape->count > TT_MAX_DIMS)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s cannot be expanded to %d dimensions", tu_describe(x),
                             shape->count);
    result->ndim = shape->count;
    for (int i = shape->count - 1; i >= 0; i--) {
        int64_t size = i < pad ? 1 : x->sizes[i - pad], wanted = shape->at[i] == -1 && i >= pad ? size : shape->at[i];
        if (wanted < 0 || (wanted != size && size != 1))
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s cannot be expanded to %s", tu_describe(x),
                                 tu_dims_text(shape->count, shape->at));
        result->sizes[i] = wanted;
        result->strides[i] = i < pad || wanted != size ? 0 : x->strides[i - pad];
    }
    return TUTTI_OK;
}
static void expand_gradient(tu_gradient *gradient) {
    gradient->results[0] = tt_sum_to(gradient->grads[0], tu_input_dims(gradient, 0));
}
static tt_tensor *expand_sample(tu_sampler *s) {
    return tt_expand(tu_normal(s, tt_shape(s->n, 1)), tt_shape(2, -1, 3));
}
TU_OPERATOR(expand) = { .name = "expand",
                        .schema = "expand(x, shape) -> view",
                        .summary = "repeats dimensions of size 1 without copying",
                        .family = FAMILY,
                        .flags = TU_VIEW,
                        .shape = expand_shape,
                        .gradient = expand_gradient,
                        .sample = expand_sample };
tt_tensor *tt_expand(tt_tensor *x, tt_dims shape) {
    tu_call call = begin(&tu_operator_expand, &x);
    call.params.dims[0] = shape;
    return tu_run(&call);
}

/* ---- squeeze, unsqueeze ---- */

static void remove_dim(tu_shape *shape, int dim) {
    shape->ndim--;
    memmove(shape->sizes + dim, shape->sizes + dim + 1, (size_t)(shape->ndim - dim) * sizeof shape->sizes[0]);
    memmove(shape->strides + dim, shape->strides + dim + 1, (size_t)(shape->ndim - dim) * sizeof shape->strides[0]);
}

static tutti_status squeeze_shape(tu_call *call) {
    int dim;
    tu_shape *result = same(call);
    tutti_status status = dim_of(call, call->params.integer[0], &dim);
    if (status == TUTTI_OK && result->ndim > 0 && result->sizes[dim] == 1)
        remove_dim(result, dim);
    return status;
}
static tt_tensor *squeeze_sample(tu_sampler *s) {
    return tt_squeeze(tu_normal(s, tt_shape(s->n, 1, 3)), 1);
}
TU_OPERATOR(squeeze) = { .name = "squeeze",
                         .schema = "squeeze(x, dim) -> view",
                         .summary = "drops a dimension of size 1; else x as it is",
                         .family = FAMILY,
                         .flags = TU_VIEW,
                         .shape = squeeze_shape,
                         .gradient = view_gradient,
                         .sample = squeeze_sample };
tt_tensor *tt_squeeze(tt_tensor *x, int dim) {
    tu_call call = begin(&tu_operator_squeeze, &x);
    call.params.integer[0] = dim;
    return tu_run(&call);
}

static tutti_status unsqueeze_shape(tu_call *call) {
    int dim;
    tu_shape *result = same(call);
    if (result->ndim == TT_MAX_DIMS)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s has no room for another dimension",
                             tu_describe(call->inputs[0]));
    tutti_status status = tu_wrap_dim(call->operator->name, call->params.integer[0], result->ndim + 1, &dim);
    if (status != TUTTI_OK)
        return status;
    memmove(result->sizes + dim + 1, result->sizes + dim, (size_t)(result->ndim - dim) * sizeof result->sizes[0]);
    memmove(result->strides + dim + 1, result->strides + dim, (size_t)(result->ndim - dim) * sizeof result->strides[0]);
    result->strides[dim] = dim == result->ndim ? 1 : result->sizes[dim + 1] * result->strides[dim + 1];
    result->sizes[dim] = 1;
    result->ndim++;
    return TUTTI_OK;
}
static tt_tensor *unsqueeze_sample(tu_sampler *s) {
    return tt_unsqueeze(tu_normal(s, tt_shape(s->n, 3)), 1);
}
TU_OPERATOR(unsqueeze) = { .name = "unsqueeze",
                           .schema = "unsqueeze(x, dim) -> view",
                           .summary = "a new dimension of size 1",
                           .family = FAMILY,
                           .flags = TU_VIEW,
                           .shape = unsqueeze_shape,
                           .gradient = view_gradient,
                           .sample = unsqueeze_sample };
tt_tensor *tt_unsqueeze(tt_tensor *x, int dim) {
    tu_call call = begin(&tu_operator_unsqueeze, &x);
    call.params.integer[0] = dim;
    return tu_run(&call);
}

/* ---- narrow, slice, select ---- */

static tutti_status slice_shape(tu_call *call) {
    const int64_t *p = call->params.integer; /* dim, start, end, step */
    int dim;
    tu_shape *result = same(call);
    tutti_status status = dim_of(call, p[0], &dim);
    if (status != TUTTI_OK)
        return status;
    if (result->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "a 0-dim tensor cannot be sliced");
    int64_t size = result->sizes[dim], start = p[1] < 0 ? p[1] + size : p[1], end = p[2] < 0 ? p[2] + size : p[2];
    if (p[3] < 1)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "step %lld must be positive", (long long)p[3]);
    start = start < 0 ? 0 : start > size ? size : start;
    end = end < start ? start : end > size ? size : end;
    result->offset += start * result->strides[dim];
    result->sizes[dim] = (end - start + p[3] - 1) / p[3];
    result->strides[dim] *= p[3];
    return TUTTI_OK;
}
static tutti_status narrow_shape(tu_call *call) {
    const int64_t *p = call->params.integer; /* dim, start, length */
    int dim;
    tu_shape *result = same(call);
    tutti_status status = dim_of(call, p[0], &dim);
    if (status != TUTTI_OK)
        return status;
    if (result->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "a 0-dim tensor cannot be narrowed");
    int64_t size = result->sizes[dim], start = p[1] < 0 ? p[1] + size : p[1];
    if (start < 0 || p[2] < 0 || start > size || p[2] > size - start)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "start %lld and length %lld exceed dimension %d of %s",
                             (long long)p[1], (long long)p[2], dim, tu_describe(call->inputs[0]));
    result->offset += start * result->strides[dim];
    result->sizes[dim] = p[2];
    return TUTTI_OK;
}
static tutti_status select_shape(tu_call *call) {
    const int64_t *p = call->params.integer; /* dim, index */
    int dim;
    tu_shape *result = same(call);
    tutti_status status = dim_of(call, p[0], &dim);
    if (status != TUTTI_OK)
        return status;
    if (result->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "a 0-dim tensor has nothing to select");
    int64_t size = result->sizes[dim], index = p[1] < 0 ? p[1] + size : p[1];
    if (index < 0 || index >= size)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "index %lld is out of range for dimension %d of %s",
                             (long long)p[1], dim, tu_describe(call->inputs[0]));
    result->offset += index * result->strides[dim];
    remove_dim(result, dim);
    return TUTTI_OK;
}

/* zeros of the input's shape, with g in the part that the view showed: one operator, so that it can be differentiated
 * again */
static tt_tensor *put_back(const tu_gradient *gradient, tt_tensor *(*part)(tt_tensor *, const int64_t *)) {
    const tu_shape *shape = tu_input_shape(gradient, 0);
    tt_options options = TT_OPTIONS_INIT;
    options.device = shape->device;
    tt_tensor *whole = tt_zeros(tt_dims_of(shape->ndim, shape->sizes), gradient->grads[0]->dtype, &options);
    tt_copy_(part(whole, gradient->params->integer), gradient->grads[0]);
    return whole;
}
static tt_tensor *slice_part(tt_tensor *x, const int64_t *p) {
    return tt_slice(x, (int)p[0], p[1], p[2], p[3]);
}
static tt_tensor *narrow_part(tt_tensor *x, const int64_t *p) {
    return tt_narrow(x, (int)p[0], p[1], p[2]);
}
static tt_tensor *select_part(tt_tensor *x, const int64_t *p) {
    return tt_select(x, (int)p[0], p[1]);
}
static void slice_gradient(tu_gradient *gradient) {
    gradient->results[0] = put_back(gradient, slice_part);
}
static void narrow_gradient(tu_gradient *gradient) {
    gradient->results[0] = put_back(gradient, narrow_part);
}
static void select_gradient(tu_gradient *gradient) {
    gradient->results[0] = put_back(gradient, select_part);
}

static tt_tensor *with_integers(const tu_operator *operator, tt_tensor * x, int64_t a, int64_t b, int64_t c,
                                int64_t d) {
    tu_call call = begin(operator, & x);
    call.params.integer[0] = a;
    call.params.integer[1] = b;
    call.params.integer[2] = c;
    call.params.integer[3] = d;
    return tu_run(&call);
}
static tt_tensor *slice_sample(tu_sampler *s) {
    return tt_slice(tu_normal(s, tt_shape(s->n, 7)), -1, 1, -1, 2);
}
static tt_tensor *narrow_sample(tu_sampler *s) {
    return tt_narrow(tu_normal(s, tt_shape(s->n, 5)), 1, 1, 3);
}
static tt_tensor *select_sample(tu_sampler *s) {
    return tt_select(tu_normal(s, tt_shape(s->n, 5)), 1, -2);
}
TU_OPERATOR(slice) = { .name = "slice",
                       .schema = "slice(x, dim, start, end, step) -> view",
                       .summary = "every step-th of start to end, cut to what is there",
                       .family = FAMILY,
                       .flags = TU_VIEW,
                       .shape = slice_shape,
                       .gradient = slice_gradient,
                       .sample = slice_sample };
TU_OPERATOR(narrow) = { .name = "narrow",
                        .schema = "narrow(x, dim, start, length) -> view",
                        .summary = "a part of one dimension",
                        .family = FAMILY,
                        .flags = TU_VIEW,
                        .shape = narrow_shape,
                        .gradient = narrow_gradient,
                        .sample = narrow_sample };
TU_OPERATOR(select) = { .name = "select",
                        .schema = "select(x, dim, index) -> view",
                        .summary = "one entry of a dimension, which goes",
                        .family = FAMILY,
                        .flags = TU_VIEW,
                        .shape = select_shape,
                        .gradient = select_gradient,
                        .sample = select_sample };
tt_tensor *tt_slice(tt_tensor *x, int dim, int64_t start, int64_t end, int64_t step) {
    return with_integers(&tu_operator_slice, x, dim, start, end, step);
}
tt_tensor *tt_narrow(tt_tensor *x, int dim, int64_t start, int64_t length) {
    return with_integers(&tu_operator_narrow, x, dim, start, length, 0);
}
tt_tensor *tt_select(tt_tensor *x, int dim, int64_t index) {
    return with_integers(&tu_operator_select, x, dim, index, 0, 0);
}

/* ---- as_strided ---- */

/* Checked against the extent of x itself, not against the bytes there are now. */
static tutti_status as_strided_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    const tt_dims *sizes = &call->params.dims[0], *strides = &call->params.dims[1];
    tu_shape *result = same(call);
    if (sizes->count != strides->count || sizes->count < 0 || sizes->count > TT_MAX_DIMS)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%d sizes and %d strides", sizes->count, strides->count);
    int64_t last = call->params.integer[0];
    bool empty = false;
    for (int i = 0; i < sizes->count; i++) {
        if (sizes->at[i] < 0 || strides->at[i] < 0)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "sizes %s and strides %s must not be negative",
                                 tu_dims_text(sizes->count, sizes->at), tu_dims_text(strides->count, strides->at));
        empty = empty || sizes->at[i] == 0;
        last += (sizes->at[i] - 1) * strides->at[i];
    }
    size_t extent = tu_tensor_need(x) > x->storage->bytes ? tu_tensor_need(x) : x->storage->bytes;
    if (call->params.integer[0] < 0 || (!empty && (size_t)(last + 1) * tu_dtype_bytes[x->dtype] > extent))
        return tu_call_error(call, TUTTI_ERROR_RANGE,
                             "sizes %s, strides %s and offset %lld reach beyond the storage of %s",
                             tu_dims_text(sizes->count, sizes->at), tu_dims_text(strides->count, strides->at),
                             (long long)call->params.integer[0], tu_describe(x));
    result->ndim = sizes->count;
    memcpy(result->sizes, sizes->at, sizeof sizes->at);
    memcpy(result->strides, strides->at, sizeof strides->at);
    result->offset = call->params.integer[0];
    return TUTTI_OK;
}
/* Positions in the input's own row-major order; several elements of the view may share one. Only for contiguous inputs,
 * where position and memory agree. */
static void as_strided_gradient(tu_gradient *gradient) {
    const tu_shape *shape = tu_input_shape(gradient, 0);
    const tt_dims *sizes = &gradient->params->dims[0], *strides = &gradient->params->dims[1];
    int64_t numel = tu_shape_numel(shape), dense = 1;
    for (int i = shape->ndim - 1; i >= 0; dense *= shape->sizes[i--])
        if (shape->strides[i] != dense && shape->sizes[i] > 1) {
            tu_fail(TUTTI_ERROR_UNSUPPORTED,
                    "as_strided: its gradient is defined for contiguous inputs only, not for strides %s",
                    tu_dims_text(shape->ndim, shape->strides));
            return;
        }
    tt_options options = TT_OPTIONS_INIT;
    options.device = shape->device;
    tt_tensor *positions = tt_arange(0, (double)numel, 1, TUTTI_I64, &options);
    tt_tensor *index = tt_as_strided(positions, *sizes, *strides, gradient->params->integer[0] - shape->offset);
    tt_tensor *flat = tt_zeros(tt_shape(numel), gradient->grads[0]->dtype, &options);
    flat = tt_index_add(flat, 0, tt_reshape(index, tt_shape(-1)), tt_reshape(gradient->grads[0], tt_shape(-1)));
    gradient->results[0] = tt_view(flat, tt_dims_of(shape->ndim, shape->sizes));
}
static tt_tensor *as_strided_sample(tu_sampler *s) {
    return tt_as_strided(tt_contiguous(tu_normal(s, tt_shape(4, 3))), tt_shape(s->n, 2), tt_shape(2, 1), 3);
}
TU_OPERATOR(as_strided) = { .name = "as_strided",
                            .schema = "as_strided(x, shape, strides, offset) -> view",
                            .summary = "any sizes and strides over x's storage; differentiable where x is contiguous",
                            .family = FAMILY,
                            .flags = TU_VIEW,
                            .shape = as_strided_shape,
                            .gradient = as_strided_gradient,
                            .sample = as_strided_sample };
tt_tensor *tt_as_strided(tt_tensor *x, tt_dims shape, tt_dims strides, int64_t offset) {
    tu_call call = begin(&tu_operator_as_strided, &x);
    call.params.dims[0] = shape;
    call.params.dims[1] = strides;
    call.params.integer[0] = offset;
    return tu_run(&call);
}

/* ---- complex and real ---- */

static tutti_status view_as_real_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    tu_shape *result = same(call);
    if (!tu_is_complex(x->dtype) || x->ndim == TT_MAX_DIMS)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "%s is not complex, or has no room for another dimension",
                             tu_describe(x));
    result->dtype = x->dtype == TUTTI_C64 ? TUTTI_F32 : TUTTI_F64;
    for (int i = 0; i < x->ndim; i++)
        result->strides[i] *= 2;
    result->offset *= 2;
    result->sizes[result->ndim] = 2;
    result->strides[result->ndim++] = 1;
    return TUTTI_OK;
}
static tutti_status view_as_complex_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    tu_shape *result = same(call);
    if ((x->dtype != TUTTI_F32 && x->dtype != TUTTI_F64) || x->ndim == 0 || x->sizes[x->ndim - 1] != 2 ||
        x->strides[x->ndim - 1] != 1 || x->offset % 2 != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s is not f32 or f64 with a dense last dimension of 2",
                             tu_describe(x));
    result->dtype = x->dtype == TUTTI_F32 ? TUTTI_C64 : TUTTI_C128;
    result->ndim--;
    result->offset /= 2;
    for (int i = 0; i < result->ndim; i++) {
        if (result->strides[i] % 2 != 0)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "strides of %s are not multiples of 2", tu_describe(x));
        result->strides[i] /= 2;
    }
    return TUTTI_OK;
}
static void view_as_real_gradient(tu_gradient *gradient) {
    gradient->results[0] = tt_view_as_complex(tt_contiguous(gradient->grads[0]));
}
static void view_as_complex_gradient(tu_gradient *gradient) {
    gradient->results[0] = tt_view_as_real(gradient->grads[0]);
}
static tt_tensor *view_as_real_sample(tu_sampler *s) {
    return tt_view_as_real(tt_to(tu_normal(s, tt_shape(s->n, 3)), TUTTI_C128));
}
static tt_tensor *view_as_complex_sample(tu_sampler *s) {
    return tt_view_as_complex(tt_contiguous(tt_to(tu_normal(s, tt_shape(s->n, 2)), TUTTI_F64)));
}
TU_OPERATOR(view_as_real) = { .name = "view_as_real",
                              .schema = "view_as_real(x) -> view",
                              .summary = "real and imaginary part as a last dimension",
                              .family = FAMILY,
                              .flags = TU_VIEW,
                              .shape = view_as_real_shape,
                              .gradient = view_as_real_gradient,
                              .sample = view_as_real_sample };
TU_OPERATOR(view_as_complex) = { .name = "view_as_complex",
                                 .schema = "view_as_complex(x) -> view",
                                 .summary = "a last dimension of 2 as complex numbers",
                                 .family = FAMILY,
                                 .flags = TU_VIEW,
                                 .shape = view_as_complex_shape,
                                 .gradient = view_as_complex_gradient,
                                 .sample = view_as_complex_sample };
tt_tensor *tt_view_as_real(tt_tensor *x) {
    tu_call call = begin(&tu_operator_view_as_real, &x);
    return tu_run(&call);
}
tt_tensor *tt_view_as_complex(tt_tensor *x) {
    tu_call call = begin(&tu_operator_view_as_complex, &x);
    return tu_run(&call);
}

/* ---- alias ---- */

static tutti_status alias_shape(tu_call *call) {
    same(call);
    return TUTTI_OK;
}
static void alias_gradient(tu_gradient *gradient) {
    gradient->results[0] = gradient->grads[0];
}
static tt_tensor *alias_sample(tu_sampler *s) {
    return tt_alias(tu_normal(s, tt_shape(s->n, 3)));
}
TU_OPERATOR(alias) = { .name = "alias",
                       .schema = "alias(x) -> view",
                       .summary = "x under another handle",
                       .family = FAMILY,
                       .flags = TU_VIEW,
                       .shape = alias_shape,
                       .gradient = alias_gradient,
                       .sample = alias_sample };
tt_tensor *tt_alias(tt_tensor *x) {
    tu_call call = begin(&tu_operator_alias, &x);
    return tu_run(&call);
}

/* Without history, and unknown to it: not recorded as a view either. */
tt_tensor *tt_detach(tt_tensor *x) {
    if (tu_self()->pending != TUTTI_OK || !tu_scope_check() ||
        tu_pending_take(tu_tensor_check("detach", "x", x)) != TUTTI_OK)
        return NULL;
    tu_shape shape = tu_shape_of(x);
    tt_tensor *alias = tu_tensor_alias(x, &shape);
    if (alias == NULL) {
        tu_pending_take(TUTTI_ERROR_MEMORY);
        return NULL;
    }
    return tu_scope_own(alias);
}

/* ---- several at once ---- */

static tt_tensor *split_sample(tu_sampler *s) {
    tt_tensor_list parts = tt_split(tu_normal(s, tt_shape(s->n, 5)), tt_shape(2, 3), 1);
    return parts.count == 2 ? tt_add(tt_sum_dims(parts.at[0], tt_shape(1), true), parts.at[1]) : NULL;
}
TU_OPERATOR(split) = { .name = "split",
                       .schema = "split(x, sizes, dim) -> list of views",
                       .summary = "parts of the given sizes",
                       .family = FAMILY,
                       .flags = TU_COMPOSITE,
                       .sample = split_sample };

static tt_tensor_list parts_of(tt_tensor *x, size_t count, const int64_t *sizes, int dim) {
    tt_tensor **parts = tu_scope_memory(count * sizeof *parts);
    int64_t start = 0;
    for (size_t i = 0; parts != NULL && i < count; i++) {
        parts[i] = tt_narrow(x, dim, start, sizes[i]);
        start += sizes[i];
    }
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of(count, parts) : (tt_tensor_list){ 0, NULL };
}

tt_tensor_list tt_split(tt_tensor *x, tt_dims sizes, int dim) {
    int at;
    int64_t sum = 0;
    tt_tensor_list none = { 0, NULL };
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("split", "x", x)) != TUTTI_OK ||
        tu_pending_take(tu_wrap_dim("split", dim, x->ndim, &at)) != TUTTI_OK)
        return none;
    for (int i = 0; i < sizes.count && i < TT_MAX_DIMS; i++)
        sum += sizes.at[i];
    if (sizes.count < 1 || sizes.count > TT_MAX_DIMS || x->ndim == 0 || sum != x->sizes[at]) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "split: sizes %s do not add up to dimension %d of %s",
                tu_dims_text(sizes.count, sizes.at), at, tu_describe(x));
        return none;
    }
    return parts_of(x, (size_t)sizes.count, sizes.at, at);
}

static tt_tensor *chunk_sample(tu_sampler *s) {
    tt_tensor_list parts = tt_chunk(tu_normal(s, tt_shape(s->n, 4)), 2, 1);
    return parts.count == 2 ? tt_mul(parts.at[0], parts.at[1]) : NULL;
}
TU_OPERATOR(chunk) = { .name = "chunk",
                       .schema = "chunk(x, parts, dim) -> list of views",
                       .summary = "equal parts; the last may be smaller",
                       .family = FAMILY,
                       .flags = TU_COMPOSITE,
                       .sample = chunk_sample };
tt_tensor_list tt_chunk(tt_tensor *x, int64_t parts, int dim) {
    int at;
    tt_tensor_list none = { 0, NULL };
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("chunk", "x", x)) != TUTTI_OK ||
        tu_pending_take(tu_wrap_dim("chunk", dim, x->ndim, &at)) != TUTTI_OK)
        return none;
    if (parts < 1 || x->ndim == 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "chunk: %s cannot be cut in %lld parts", tu_describe(x), (long long)parts);
        return none;
    }
    int64_t size = (x->sizes[at] + parts - 1) / parts;
    int64_t count = size == 0 ? parts : (x->sizes[at] + size - 1) / size;
    int64_t *sizes = tu_scope_memory((size_t)count * sizeof *sizes);
    for (int64_t i = 0; sizes != NULL && i < count; i++)
        sizes[i] = i < count - 1 ? size : x->sizes[at] - size * (count - 1);
    return sizes != NULL ? parts_of(x, (size_t)count, sizes, at) : none;
}
