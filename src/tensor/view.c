/* SPDX-License-Identifier: Apache-2.0
 *
 * Views: other sizes and strides over the same storage. Making one never reads data, so that views of freed storage are
 * legal; only using them is an error.
 */
#include <string.h>

#include "tensor/history.h"
#include "tensor/operators.h"

/* The result as x is, for the rule to change. */
static tu_shape *same(tu_call *call) {
    call->results[0] = tu_shape_of(call->inputs[0]);
    return &call->results[0];
}

static tutti_status dim_of(const tu_call *call, int64_t dim, int *wrapped) {
    return tu_wrap_dim(call->entry->name, dim, call->inputs[0]->ndim, wrapped);
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
    if (unknown >= 0 && known == 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "the size -1 in shape %s can be anything, since another is 0",
                             tu_dims_text(shape->count, shape->at));
    if (unknown >= 0 && x->numel % known == 0)
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

tutti_status tu_view_shape(tu_call *call) {
    const tu_view_attributes *attributes = call->attributes;
    tu_shape *result = same(call);
    tt_dims shape = attributes->shape;
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
tt_tensor *tt_reshape(tt_tensor *x, tt_dims shape) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("reshape", "x", x)) != TUTTI_OK)
        return NULL;
    tu_call call;
    tu_call_init(&call, &tu_operator_view, 1, &x, NULL);
    int64_t strides[TT_MAX_DIMS];
    if (infer_sizes(&call, &shape) == TUTTI_OK && !view_strides(x, &shape, strides))
        return tu_historian_table.own(tt_view(tt_contiguous(x), shape));
    return tt_view(x, shape);
}

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
    for (int i = 0, dim = 0; dim < x->ndim; dim++) {
        if (dim > from && dim <= to) {
            shape.at[i - 1] *= x->sizes[dim];
            continue;
        }
        shape.at[i++] = x->sizes[dim];
    }
    return tt_reshape(x, shape);
}

/* ---- permute, transpose ---- */

tutti_status tu_permute_shape(tu_call *call) {
    const tu_permute_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    tu_shape *result = same(call);
    const tt_dims *order = &attributes->order;
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
void tu_permute_gradient(tu_gradient *gradient) {
    const tu_permute_attributes *attributes = gradient->attributes;
    const tt_dims *order = &attributes->order;
    tt_dims inverse = { .count = order->count };
    for (int i = 0; i < order->count; i++)
        inverse.at[order->at[i] < 0 ? order->at[i] + order->count : order->at[i]] = i;
    gradient->results[0] = tt_permute(gradient->grads[0], inverse);
}

tutti_status tu_transpose_shape(tu_call *call) {
    const tu_transpose_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    tu_shape *result = same(call);
    int first, second;
    tutti_status status = dim_of(call, attributes->a, &first);
    if (status == TUTTI_OK)
        status = dim_of(call, attributes->b, &second);
    if (status != TUTTI_OK || x->ndim == 0)
        return status;
    result->sizes[first] = x->sizes[second];
    result->sizes[second] = x->sizes[first];
    result->strides[first] = x->strides[second];
    result->strides[second] = x->strides[first];
    return TUTTI_OK;
}
tt_tensor *tt_t(tt_tensor *x) {
    if (tu_self()->pending == TUTTI_OK && x != NULL && x->magic == TU_MAGIC_ALIVE && x->ndim != 2) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "t: %s is no matrix", tu_describe(x));
        return NULL;
    }
    return tt_transpose(x, 0, 1);
}

/* ---- expand ---- */

tutti_status tu_expand_shape(tu_call *call) {
    const tu_expand_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    tu_shape *result = same(call);
    const tt_dims *shape = &attributes->shape;
    int pad = shape->count - x->ndim;
    if (pad < 0 || shape->count > TT_MAX_DIMS)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s cannot be expanded to %d dimensions", tu_describe(x),
                             shape->count);
    int64_t numel = 1;
    result->ndim = shape->count;
    for (int i = shape->count - 1; i >= 0; i--) {
        int64_t size = i < pad ? 1 : x->sizes[i - pad], wanted = shape->at[i] == -1 && i >= pad ? size : shape->at[i];
        if (wanted < 0 || (wanted != size && size != 1))
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s cannot be expanded to %s", tu_describe(x),
                                 tu_dims_text(shape->count, shape->at));
        result->sizes[i] = wanted;
        result->strides[i] = i < pad || wanted != size ? 0 : x->strides[i - pad];
        if (wanted > 0 && __builtin_mul_overflow(numel, wanted, &numel))
            return tu_call_error(call, TUTTI_ERROR_RANGE, "%s has more elements than can be counted",
                                 tu_dims_text(shape->count, shape->at));
    }
    return TUTTI_OK;
}

/* ---- squeeze, unsqueeze ---- */

static void remove_dim(tu_shape *shape, int dim) {
    shape->ndim--;
    memmove(shape->sizes + dim, shape->sizes + dim + 1, (size_t)(shape->ndim - dim) * sizeof shape->sizes[0]);
    memmove(shape->strides + dim, shape->strides + dim + 1, (size_t)(shape->ndim - dim) * sizeof shape->strides[0]);
}

tutti_status tu_squeeze_shape(tu_call *call) {
    const tu_squeeze_attributes *attributes = call->attributes;
    int dim;
    tu_shape *result = same(call);
    tutti_status status = dim_of(call, attributes->dim, &dim);
    if (status == TUTTI_OK && result->ndim > 0 && result->sizes[dim] == 1)
        remove_dim(result, dim);
    return status;
}

tutti_status tu_unsqueeze_shape(tu_call *call) {
    const tu_unsqueeze_attributes *attributes = call->attributes;
    int dim;
    tu_shape *result = same(call);
    if (result->ndim == TT_MAX_DIMS)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s has no room for another dimension",
                             tu_describe(call->inputs[0]));
    tutti_status status = tu_wrap_dim(call->entry->name, attributes->dim, result->ndim + 1, &dim);
    if (status != TUTTI_OK)
        return status;
    memmove(result->sizes + dim + 1, result->sizes + dim, (size_t)(result->ndim - dim) * sizeof result->sizes[0]);
    memmove(result->strides + dim + 1, result->strides + dim, (size_t)(result->ndim - dim) * sizeof result->strides[0]);
    result->strides[dim] = dim == result->ndim ? 1 : result->sizes[dim + 1] * result->strides[dim + 1];
    result->sizes[dim] = 1;
    result->ndim++;
    return TUTTI_OK;
}

/* ---- narrow, slice, select ---- */

/* What x is, to be cut along dim. */
static tutti_status cut_along(tu_call *call, int64_t dim, tu_shape **result, int *at) {
    *result = same(call);
    tutti_status status = dim_of(call, dim, at);
    return status == TUTTI_OK && (*result)->ndim == 0
               ? tu_call_error(call, TUTTI_ERROR_RANGE, "a 0-dim tensor cannot be cut: it has no dimension")
               : status;
}

tutti_status tu_slice_shape(tu_call *call) {
    const tu_slice_attributes *attributes = call->attributes;
    int dim;
    tu_shape *result;
    tutti_status status = cut_along(call, attributes->dim, &result, &dim);
    if (status != TUTTI_OK)
        return status;
    int64_t size = result->sizes[dim], start = attributes->start < 0 ? attributes->start + size : attributes->start,
            end = attributes->end < 0 ? attributes->end + size : attributes->end;
    if (attributes->step < 1)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "step %lld must be positive", (long long)attributes->step);
    start = start < 0 ? 0 : start > size ? size : start;
    end = end < start ? start : end > size ? size : end;
    result->offset += start * result->strides[dim];
    result->sizes[dim] = (end - start + attributes->step - 1) / attributes->step;
    result->strides[dim] *= attributes->step;
    return TUTTI_OK;
}
tutti_status tu_narrow_shape(tu_call *call) {
    const tu_narrow_attributes *attributes = call->attributes;
    int dim;
    tu_shape *result;
    tutti_status status = cut_along(call, attributes->dim, &result, &dim);
    if (status != TUTTI_OK)
        return status;
    int64_t size = result->sizes[dim], start = attributes->start < 0 ? attributes->start + size : attributes->start;
    if (start < 0 || attributes->length < 0 || start > size || attributes->length > size - start)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "start %lld and length %lld exceed dimension %d of %s",
                             (long long)attributes->start, (long long)attributes->length, dim,
                             tu_describe(call->inputs[0]));
    result->offset += start * result->strides[dim];
    result->sizes[dim] = attributes->length;
    return TUTTI_OK;
}
tutti_status tu_select_shape(tu_call *call) {
    const tu_select_attributes *attributes = call->attributes;
    int dim;
    tu_shape *result;
    tutti_status status = cut_along(call, attributes->dim, &result, &dim);
    if (status != TUTTI_OK)
        return status;
    int64_t size = result->sizes[dim], index = attributes->index < 0 ? attributes->index + size : attributes->index;
    if (index < 0 || index >= size)
        return tu_call_error(call, TUTTI_ERROR_RANGE, "index %lld is out of range for dimension %d of %s",
                             (long long)attributes->index, dim, tu_describe(call->inputs[0]));
    result->offset += index * result->strides[dim];
    remove_dim(result, dim);
    return TUTTI_OK;
}

void tu_slice_gradient(tu_gradient *gradient) {
    const tu_slice_attributes *attributes = gradient->attributes;
    tt_tensor *whole = gradient->results[0] = tu_gradient_zeros(gradient);
    tt_copy_(tt_slice(whole, attributes->dim, attributes->start, attributes->end, attributes->step),
             gradient->grads[0]);
}

void tu_narrow_gradient(tu_gradient *gradient) {
    const tu_narrow_attributes *attributes = gradient->attributes;
    tt_tensor *whole = gradient->results[0] = tu_gradient_zeros(gradient);
    tt_copy_(tt_narrow(whole, attributes->dim, attributes->start, attributes->length), gradient->grads[0]);
}

void tu_select_gradient(tu_gradient *gradient) {
    const tu_select_attributes *attributes = gradient->attributes;
    tt_tensor *whole = gradient->results[0] = tu_gradient_zeros(gradient);
    tt_copy_(tt_select(whole, attributes->dim, attributes->index), gradient->grads[0]);
}

/* ---- as_strided ---- */

void tu_as_strided_gradient(tu_gradient *gradient) {
    tu_historian_table.of_view(gradient);
}

/* Checked against the storage, or against the extent of x where that is larger: a storage that was freed, or is not
 * large enough now, may be resized before the view is read. */
tutti_status tu_as_strided_shape(tu_call *call) {
    const tu_as_strided_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    const tt_dims *sizes = &attributes->shape, *strides = &attributes->strides;
    tu_shape *result = same(call);
    if (sizes->count != strides->count || sizes->count < 0 || sizes->count > TT_MAX_DIMS)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%d sizes and %d strides", sizes->count, strides->count);
    int64_t last = attributes->offset, reach, end = 0;
    bool empty = false, far = false;
    for (int i = 0; i < sizes->count; i++) {
        if (sizes->at[i] < 0 || strides->at[i] < 0)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "sizes %s and strides %s must not be negative",
                                 tu_dims_text(sizes->count, sizes->at), tu_dims_text(strides->count, strides->at));
        empty = empty || sizes->at[i] == 0;
        far = far || __builtin_mul_overflow(sizes->at[i] > 0 ? sizes->at[i] - 1 : 0, strides->at[i], &reach) ||
              __builtin_add_overflow(last, reach, &last);
    }
    far = far || __builtin_add_overflow(last, 1, &end) || __builtin_mul_overflow(end, tu_dtype_bytes[x->dtype], &end);
    size_t extent = tu_tensor_need(x) > x->storage->bytes ? tu_tensor_need(x) : x->storage->bytes;
    if (attributes->offset < 0 || (!empty && (far || (size_t)end > extent)))
        return tu_call_error(call, TUTTI_ERROR_RANGE,
                             "sizes %s, strides %s and offset %lld reach beyond the storage of %s",
                             tu_dims_text(sizes->count, sizes->at), tu_dims_text(strides->count, strides->at),
                             (long long)attributes->offset, tu_describe(x));
    result->ndim = sizes->count;
    memcpy(result->sizes, sizes->at, sizeof sizes->at);
    memcpy(result->strides, strides->at, sizeof strides->at);
    result->offset = attributes->offset;
    return TUTTI_OK;
}
/* ---- complex and real ---- */

tutti_status tu_view_as_real_shape(tu_call *call) {
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
tutti_status tu_view_as_complex_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0];
    tu_shape *result = same(call);
    if ((x->dtype != TUTTI_F32 && x->dtype != TUTTI_F64) || x->ndim == 0 || x->sizes[x->ndim - 1] != 2 ||
        ((x->strides[x->ndim - 1] != 1 || x->offset % 2 != 0) && x->numel > 0))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s is not f32 or f64 with a dense last dimension of 2",
                             tu_describe(x));
    result->dtype = x->dtype == TUTTI_F32 ? TUTTI_C64 : TUTTI_C128;
    result->ndim--;
    result->offset /= 2;
    for (int i = 0; i < result->ndim; i++) {
        if (result->strides[i] % 2 != 0 && result->sizes[i] > 1 && x->numel > 0)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "strides of %s are not multiples of 2", tu_describe(x));
        result->strides[i] /= 2;
    }
    return TUTTI_OK;
}

/* ---- several at once ---- */

tt_tensor *tu_split_sample(tu_sampler *sampler) {
    tt_tensor *x = sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 5), 0);
    tt_tensor_list parts = tt_split(x, 2, (int64_t[]){ 2, 3 }, 1);
    return parts.count == 2 ? tt_add(tt_sum_dims(parts.at[0], tt_shape(1), true), parts.at[1]) : NULL;
}

tt_tensor *tu_chunk_sample(tu_sampler *sampler) {
    tt_tensor *x = sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 4), 0);
    tt_tensor_list parts = tt_chunk(x, 2, 1);
    return parts.count == 2 ? tt_mul(parts.at[0], parts.at[1]) : NULL;
}

static tt_tensor_list parts_of(tt_tensor *x, size_t count, const int64_t *sizes, int dim) {
    tt_tensor **parts = tu_scope_memory(count * sizeof *parts);
    int64_t start = 0;
    for (size_t i = 0; parts != NULL && i < count; i++) {
        parts[i] = tt_narrow(x, dim, start, sizes[i]);
        start += sizes[i];
    }
    return tu_self()->pending == TUTTI_OK ? tt_tensors_of(count, parts) : (tt_tensor_list){ 0, tu_nothing };
}

tt_tensor_list tt_split(tt_tensor *x, size_t part_count, const int64_t *sizes, int dim) {
    int at;
    tt_tensor_list none = { 0, tu_nothing };
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("split", "x", x)) != TUTTI_OK ||
        tu_pending_take(tu_wrap_dim("split", dim, x->ndim, &at)) != TUTTI_OK)
        return none;
    int64_t rest = x->ndim == 0 ? -1 : x->sizes[at]; /* what is left for the parts to come */
    if (part_count == 0 || sizes == NULL || x->ndim == 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "split: %s cannot be cut in %zu parts", tu_describe(x),
                sizes == NULL ? (size_t)0 : part_count);
        return none;
    }
    for (size_t i = 0; i < part_count; rest -= sizes[i++])
        if (sizes[i] < 0 || sizes[i] > rest) {
            tu_fail(TUTTI_ERROR_ARGUMENT, "split: part %zu of %lld rows does not fit: dimension %d of %s has %lld left",
                    i, (long long)sizes[i], at, tu_describe(x), (long long)rest);
            return none;
        }
    if (rest != 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "split: the sizes of %zu parts do not add up to dimension %d of %s: %lld are left", part_count, at,
                tu_describe(x), (long long)rest);
        return none;
    }
    return parts_of(x, part_count, sizes, at);
}

tt_tensor_list tt_chunk(tt_tensor *x, int64_t parts, int dim) {
    int at;
    tt_tensor_list none = { 0, tu_nothing };
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
