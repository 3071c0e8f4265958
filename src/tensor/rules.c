/* SPDX-License-Identifier: Apache-2.0
 *
 * Rules that many operators share: broadcasting, type promotion, results like the first input.
 */
#include <string.h>

#include "tensor/operator.h"

/* The usual case: no input has to be repeated. */
static bool all_alike(const tu_call *call, int first) {
    const tt_tensor *one = call->inputs[first];
    for (int i = first + 1; i < call->input_count; i++) {
        const tt_tensor *x = call->inputs[i];
        if (x == NULL || x->ndim != one->ndim)
            return false;
        for (int j = 0; j < one->ndim; j++)
            if (x->sizes[j] != one->sizes[j])
                return false;
    }
    return true;
}

tutti_status tu_broadcast_sizes(const tu_call *call, int first, tu_shape *result) {
    result->device = call->device;
    if (all_alike(call, first)) {
        result->ndim = call->inputs[first]->ndim;
        memcpy(result->sizes, call->inputs[first]->sizes, sizeof result->sizes);
        return TUTTI_OK;
    }
    int ndim = 0;
    for (int i = first; i < call->input_count; i++)
        if (call->inputs[i] != NULL && call->inputs[i]->ndim > ndim)
            ndim = call->inputs[i]->ndim;
    for (int dim = 0; dim < ndim; dim++)
        result->sizes[dim] = 1;
    for (int i = first; i < call->input_count; i++) {
        const tt_tensor *x = call->inputs[i];
        for (int dim = 0; x != NULL && dim < x->ndim; dim++) {
            int64_t *size = &result->sizes[ndim - x->ndim + dim];
            if (x->sizes[dim] == *size || x->sizes[dim] == 1)
                continue;
            if (*size != 1)
                return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                                     "shapes do not broadcast: %s and %s differ in dimension %d, and neither size is 1",
                                     tu_describe(call->inputs[first]), tu_describe(x), dim - x->ndim);
            *size = x->sizes[dim];
        }
    }
    result->ndim = ndim;
    return TUTTI_OK;
}

/* bool < integers < floats < complex */
static int category(tutti_dtype dtype) {
    if (dtype == TUTTI_BOOL)
        return 0;
    return tu_is_integer(dtype) ? 1 : tu_is_float(dtype) ? 2 : 3;
}

static bool is_signed(tutti_dtype dtype) {
    return dtype <= TUTTI_I64;
}

static tutti_dtype wider_integer(tutti_dtype left, tutti_dtype right) {
    if (is_signed(left) == is_signed(right))
        return tu_dtype_bytes[left] >= tu_dtype_bytes[right] ? left : right;
    tutti_dtype with_sign = is_signed(left) ? left : right, without = is_signed(left) ? right : left;
    if (tu_dtype_bytes[with_sign] > tu_dtype_bytes[without])
        return with_sign;
    switch (tu_dtype_bytes[without]) { /* the signed type that holds both */
    case 1:
        return TUTTI_I16;
    case 2:
        return TUTTI_I32;
    default:
        return TUTTI_I64;
    }
}

tutti_dtype tu_promote_pair(tutti_dtype left, tutti_dtype right) {
    if (left == right)
        return left;
    int of_left = category(left), of_right = category(right);
    if (of_left == 3 || of_right == 3)
        return left == TUTTI_C128 || right == TUTTI_C128 || left == TUTTI_F64 || right == TUTTI_F64 ? TUTTI_C128
                                                                                                    : TUTTI_C64;
    if (of_left != of_right)
        return of_left > of_right ? left : right;
    if (of_left == 1)
        return wider_integer(left, right);
    if (tu_dtype_bytes[left] != tu_dtype_bytes[right])
        return tu_dtype_bytes[left] > tu_dtype_bytes[right] ? left : right;
    return TUTTI_F32; /* f16 with bf16, e4m3 with e5m2: neither holds the other */
}

/* Three classes, each counting only where it raises the category of the ones before: tensors with dimensions, 0-dim
 * tensors, numbers. A number that is not whole gives f32 against integers, and a whole one i64 against bool,
 * as literals do. */
tutti_dtype tu_promote(const tu_call *call, int first) {
    int same = first + 1;
    while (same < call->input_count && call->inputs[same] != NULL &&
           call->inputs[same]->dtype == call->inputs[first]->dtype)
        same++;
    if (same >= call->input_count)
        return call->inputs[first]->dtype; /* whatever their classes */
    tutti_dtype found[3] = { 0, 0, 0 };
    for (int i = first; i < call->input_count; i++) {
        const tt_tensor *x = call->inputs[i];
        if (x == NULL)
            continue;
        int rank = x->flags & TU_NUMBER ? 2 : x->ndim == 0 ? 1 : 0;
        found[rank] = found[rank] == 0 ? (tutti_dtype)x->dtype : tu_promote_pair(found[rank], x->dtype);
    }
    tutti_dtype result = found[0];
    if (found[1] != 0 && (result == 0 || category(found[1]) > category(result)))
        result = result != 0 && category(found[1]) == 3 && category(result) == 2 ? tu_promote_pair(result, TUTTI_C64)
                                                                                 : found[1];
    if (found[2] != 0 && result == 0)
        return found[2];
    if (found[2] != 0 && category(found[2]) > category(result))
        result = category(found[2]) == 1 ? TUTTI_I64 : TUTTI_F32;
    return result;
}

tutti_status tu_shape_like_first(tu_call *call) {
    call->results[0] = tu_shape_of(call->inputs[0]);
    return tu_shape_contiguous(call->entry->name, &call->results[0]);
}

tutti_status tu_shape_of_first(tu_call *call) {
    call->results[0] = tu_shape_of(call->inputs[0]);
    return TUTTI_OK;
}

tutti_status tu_no_results(tu_call *call) {
    (void)call;
    return TUTTI_OK;
}

/* ---- overlap ---- */

/* Strides of dimensions with one element say nothing. */
static bool same_layout(const tt_tensor *left, const tt_tensor *right) {
    if (left->ndim != right->ndim || left->dtype != right->dtype)
        return false;
    for (int i = 0; i < left->ndim; i++)
        if (left->sizes[i] != right->sizes[i] || (left->sizes[i] > 1 && left->strides[i] != right->strides[i]))
            return false;
    return true;
}

/* Whether `distance` elements lead from one element of x to another: a step of each stride, fewer than its size, from
 * the widest to the narrowest, of which two counts can fit. */
static bool reaches(const tt_tensor *x, int64_t distance, unsigned used) {
    int widest = -1;
    for (int i = 0; i < x->ndim; i++)
        if (!(used & 1u << i) && x->sizes[i] > 1 && (widest < 0 || x->strides[i] > x->strides[widest]))
            widest = i;
    if (widest < 0 || x->strides[widest] == 0)
        return distance == 0;
    int64_t stride = x->strides[widest], steps = distance / stride;
    if (distance % stride < 0)
        steps--; /* rounded down, so that what is left is not negative */
    for (int64_t count = steps; count <= steps + 1; count++)
        if (count > -x->sizes[widest] && count < x->sizes[widest] &&
            reaches(x, distance - count * stride, used | 1u << widest))
            return true;
    return false;
}

/* Whether steps of the dimensions order[0..count), each fewer than its size, lead from `distance` back to 0. `moved`:
 * one step was made already, so that none at all counts too. The widest stride goes first, and only as far as the
 * others can lead back. */
static bool returns(const tt_tensor *x, const int *order, int count, int64_t distance, bool moved) {
    if (count == 0)
        return distance == 0 && moved;
    int64_t stride = x->strides[order[count - 1]], last = x->sizes[order[count - 1]] - 1, span = 0;
    for (int i = 0; i < count - 1; i++)
        span += (x->sizes[order[i]] - 1) * x->strides[order[i]];
    /* Before the first step one direction is enough: the other one mirrors it. */
    int64_t from = moved ? -last : 0, short_by = -span - distance;
    int64_t least = short_by > 0 ? (short_by + stride - 1) / stride : short_by / stride; /* where left >= -span */
    for (int64_t step = least > from ? least : from; step <= last; step++) {
        int64_t left = distance + step * stride;
        if (left > span)
            return false;
        if (returns(x, order, count - 1, left, moved || step != 0))
            return true;
    }
    return false;
}

bool tu_overlaps_itself(const tt_tensor *x) {
    if (x->flags & TU_CONTIGUOUS || x->numel <= 1)
        return false;
    int order[TT_MAX_DIMS], count = tu_stride_order(x->ndim, x->sizes, x->strides, order);
    int64_t span = 0; /* of the narrower dimensions */
    bool apart = true;
    for (int i = 0; i < count; i++) {
        apart = apart && x->strides[order[i]] > span;
        span += (x->sizes[order[i]] - 1) * x->strides[order[i]];
    }
    if (apart)
        return false;
    /* Where elements are more than locations, or a stride is 0, some meet: nobody need search for them. */
    return x->numel > span + 1 || x->strides[order[0]] == 0 || returns(x, order, count, 0, false);
}

bool tu_partly_overlaps(const tt_tensor *left, const tt_tensor *right) {
    if (left->storage != right->storage || left->numel == 0 || right->numel == 0)
        return false;
    if (same_layout(left, right))
        return left->offset != right->offset && reaches(left, right->offset - left->offset, 0);
    if (!tu_is_dense(left) || !tu_is_dense(right))
        return false;
    int64_t size_left = tu_dtype_bytes[left->dtype], size_right = tu_dtype_bytes[right->dtype];
    return left->offset * size_left < (right->offset + right->numel) * size_right &&
           right->offset * size_right < (left->offset + left->numel) * size_left;
}
