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
    for (int d = 0; d < ndim; d++)
        result->sizes[d] = 1;
    for (int i = first; i < call->input_count; i++) {
        const tt_tensor *x = call->inputs[i];
        for (int d = 0; x != NULL && d < x->ndim; d++) {
            int64_t *size = &result->sizes[ndim - x->ndim + d];
            if (x->sizes[d] == *size || x->sizes[d] == 1)
                continue;
            if (*size != 1)
                return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                                     "shapes do not broadcast: %s and %s differ in dimension %d, and neither size is 1",
                                     tu_describe(call->inputs[first]), tu_describe(x), d - x->ndim);
            *size = x->sizes[d];
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

static tutti_dtype wider_integer(tutti_dtype a, tutti_dtype b) {
    if (is_signed(a) == is_signed(b))
        return tu_dtype_bytes[a] >= tu_dtype_bytes[b] ? a : b;
    tutti_dtype with_sign = is_signed(a) ? a : b, without = is_signed(a) ? b : a;
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

tutti_dtype tu_promote_pair(tutti_dtype a, tutti_dtype b) {
    if (a == b)
        return a;
    int of_a = category(a), of_b = category(b);
    if (of_a == 3 || of_b == 3)
        return a == TUTTI_C128 || b == TUTTI_C128 || a == TUTTI_F64 || b == TUTTI_F64 ? TUTTI_C128 : TUTTI_C64;
    if (of_a != of_b)
        return of_a > of_b ? a : b;
    if (of_a == 1)
        return wider_integer(a, b);
    if (tu_dtype_bytes[a] != tu_dtype_bytes[b])
        return tu_dtype_bytes[a] > tu_dtype_bytes[b] ? a : b;
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

static bool same_layout(const tt_tensor *a, const tt_tensor *b) {
    size_t bytes = (size_t)a->ndim * sizeof a->sizes[0];
    return a->ndim == b->ndim && a->dtype == b->dtype && memcmp(a->sizes, b->sizes, bytes) == 0 &&
           memcmp(a->strides, b->strides, bytes) == 0;
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

bool tu_partly_overlaps(const tt_tensor *a, const tt_tensor *b) {
    if (a->storage != b->storage || a->numel == 0 || b->numel == 0)
        return false;
    if (same_layout(a, b))
        return a->offset != b->offset && reaches(a, b->offset - a->offset, 0);
    if (!tu_is_dense(a) || !tu_is_dense(b))
        return false;
    int64_t size_a = tu_dtype_bytes[a->dtype], size_b = tu_dtype_bytes[b->dtype];
    return a->offset * size_a < (b->offset + b->numel) * size_b && b->offset * size_b < (a->offset + a->numel) * size_a;
}
