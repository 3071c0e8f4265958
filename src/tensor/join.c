/* SPDX-License-Identifier: Apache-2.0
 *
 * Joining tensors, and choosing elements of one by the integers of another.
 */
#include <stdlib.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/create.h"
#include "tensor/kernel/kernels.h"
#include "tensor/loop.h"
#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/stage.h"

/* ---- cat ---- */

tutti_status tu_cat_shape(tu_call *call) {
    const tu_cat_attributes *attributes = call->attributes;
    const tt_tensor *first = call->inputs[0];
    int dim;
    if (call->input_count == 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "expected a non-empty list of tensors");
    tutti_status status = tu_wrap_dim("cat", attributes->dim, first->ndim, &dim);
    if (status != TUTTI_OK)
        return status;
    tu_shape *result = &call->results[0];
    *result = tu_shape_of(first);
    result->device = call->device;
    if (first->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "0-dim tensors cannot be joined; use tt_stack");
    for (int i = 1; i < call->input_count; i++) {
        const tt_tensor *x = call->inputs[i];
        bool fits = x->ndim == first->ndim;
        for (int axis = 0; fits && axis < x->ndim; axis++)
            fits = axis == dim || x->sizes[axis] == first->sizes[axis];
        if (!fits)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                                 "sizes of tensors must match except in dimension %d, but got %s and %s", dim,
                                 tu_describe(first), tu_describe(x));
        result->sizes[dim] += x->sizes[dim];
    }
    result->dtype = tu_promote(call, 0);
    return tu_shape_contiguous("cat", result);
}

typedef struct cat_rows {
    const tu_call *call;
    int64_t inner; /* bytes of one step along the dimension */
    int dim;
    bool stream; /* the result is large, and all pieces are aligned in it */
} cat_rows;

/* Row by row through the result, so that it is written from its begin to its end. */
static void join_rows(void *context, int64_t begin, int64_t end) {
    const cat_rows *job = context;
    const tu_call *call = job->call;
    char *to = (char *)tu_pointer(call->outputs[0]) + begin * call->outputs[0]->sizes[job->dim] * job->inner;
    for (int64_t row = begin; row < end; row++)
        for (int i = 0; i < call->input_count; i++) {
            int64_t bytes = call->inputs[i]->sizes[job->dim] * job->inner;
            const char *from = bytes > 0 ? (const char *)tu_pointer(call->inputs[i]) + row * bytes : NULL;
            if (job->stream)
                tu_stream_copy(to, from, bytes);
            else if (bytes > 0)
                memcpy(to, from, (size_t)bytes);
            to += bytes;
        }
    if (job->stream)
        tu_stream_end();
}

/* Whether the parts lie dense and need no conversion: then they are moved as bytes. */
static bool join_dense(const tu_call *call, int dim) {
    const tt_tensor *out = call->outputs[0];
    cat_rows job = { call, tu_dtype_bytes[out->dtype], dim, false };
    int64_t rows = 1;
    for (int i = 0; i < call->input_count; i++)
        if (!(call->inputs[i]->flags & TU_CONTIGUOUS) || call->inputs[i]->dtype != out->dtype)
            return false;
    for (int axis = 0; axis < out->ndim; axis++) {
        rows *= axis < dim ? out->sizes[axis] : 1;
        job.inner *= axis > dim ? out->sizes[axis] : 1;
    }
    int64_t row = out->sizes[dim] * job.inner;
    job.stream = (size_t)(rows * row) >= TU_STREAM_BYTES && (uintptr_t)tu_pointer(out) % 16 == 0;
    for (int i = 0; i < call->input_count; i++)
        job.stream = job.stream && call->inputs[i]->sizes[dim] * job.inner % 16 == 0;
    if (row > 0)
        tu_parallel(rows, 1 + 131072 / row, join_rows, &job);
    return true;
}

tutti_status tu_cat_everywhere(tu_call *call) {
    const tu_cat_attributes *attributes = call->attributes;
    int dim = tu_dim(attributes->dim, call->inputs[0]->ndim);
    int64_t start = 0;
    tutti_status status = TUTTI_OK;
    if (dim > 0 && !tu_is_remote(call->device) && join_dense(call, dim))
        return TUTTI_OK;
    for (int i = 0; i < call->input_count && status == TUTTI_OK; i++) {
        tt_tensor part = *call->outputs[0]; /* a look at the part that x fills */
        const tt_tensor *x = call->inputs[i];
        part.sizes[dim] = x->sizes[dim];
        part.offset += start * part.strides[dim];
        part.numel = x->numel;
        part.flags = 0;
        start += x->sizes[dim];
        if (x->numel > 0)
            status = tu_copy_tensor(&part, x);
    }
    return status;
}
void tu_cat_gradient(tu_gradient *gradient) {
    const tu_cat_attributes *attributes = gradient->attributes;
    int dim = tu_dim(attributes->dim, tu_input_shape(gradient, 0)->ndim);
    int64_t start = 0;
    for (int i = 0; i < gradient->input_count; i++) {
        int64_t size = tu_input_shape(gradient, i)->sizes[dim];
        if (gradient->needs[i])
            gradient->results[i] = tt_narrow(gradient->grads[0], dim, start, size);
        start += size;
    }
}

tt_tensor *tt_stack(tt_tensor_list tensors, int dim) {
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    tt_tensor **wide = tu_scope_memory((tensors.count + 1) * sizeof *wide);
    for (size_t i = 0; wide != NULL && i < tensors.count; i++)
        wide[i] = tt_unsqueeze(tensors.at[i], dim);
    return wide == NULL || tu_self()->pending != TUTTI_OK ? NULL : tt_cat(tt_tensors_of(tensors.count, wide), dim);
}

/* ---- indices ---- */

/* A dense i64 copy of an index tensor, checked against [0, limit): negative ones count from the end. The caller frees
 * it. */
static tutti_status read_index(const tu_call *call, const tt_tensor *index, int64_t limit, int64_t **out) {
    size_t bytes = (size_t)index->numel * sizeof **out;
    int64_t *copy = tu_block_alloc(tu_self(), bytes);
    if (copy == NULL)
        return tu_error_memory("indices", bytes);
    tutti_status status = index->numel > 0 ? tu_copy_out(index, copy, TUTTI_I64) : TUTTI_OK;
    for (int64_t i = 0; i < index->numel && status == TUTTI_OK; i++) {
        int64_t at = copy[i] < 0 ? copy[i] + limit : copy[i];
        if (at < 0 || at >= limit)
            status = tu_call_error(call, TUTTI_ERROR_RANGE, "index %lld at position %lld is out of range for size %lld",
                                   (long long)copy[i], (long long)i, (long long)limit);
        copy[i] = at;
    }
    if (status != TUTTI_OK) {
        tu_block_free(tu_self(), copy, bytes);
        return status;
    }
    *out = copy;
    return TUTTI_OK;
}
static void free_index(int64_t *copy, const tt_tensor *index) {
    tu_block_free(tu_self(), copy, (size_t)index->numel * sizeof *copy);
}

static tutti_status check_index(const tu_call *call, const tt_tensor *index) {
    if (!tu_is_integer(index->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "indices must be of an integer type, not %s", tu_describe(index));
    return TUTTI_OK;
}

/* sizes before and after `dim` */
static void around(const tt_tensor *x, int dim, int64_t *outer, int64_t *inner) {
    *outer = *inner = 1;
    for (int i = 0; i < x->ndim; i++)
        if (i != dim)
            *(i < dim ? outer : inner) *= x->sizes[i];
}

/* ---- on a device ----
 *
 * Indices are looked at by the kernel; what is out of range is told by the next wait. */

static tutti_status select_on_device(tu_call *call, const tt_tensor *x, int dim, int32_t operation) {
    tu_device *device = tu_device_of(x);
    tt_tensor *from = tu_stage_in(x, x->dtype), *index = tu_stage_in(call->inputs[1], TUTTI_I64);
    tutti_status status = TUTTI_ERROR_MEMORY;
    if (from != NULL && index != NULL) {
        tu_launch_index flat = { .from = tu_place_of(tu_pointer(from)),
                                 .to = tu_place_of(tu_pointer(call->outputs[0])),
                                 .index = tu_place_of(tu_pointer(index)),
                                 .fault = tu_device_fault_place(device),
                                 .size = x->sizes[dim],
                                 .count = index->numel,
                                 .bytes = tu_dtype_bytes[x->dtype],
                                 .operation = operation };
        around(x, dim, &flat.outer, &flat.inner);
        if (((flat.from | flat.to | (uint64_t)(flat.inner * flat.bytes)) & 15) == 0) { /* sixteen bytes at once */
            flat.inner = flat.inner * flat.bytes / 16;
            flat.bytes = 16;
        }
        status = tu_device_launch(device, "kernel_index_select", flat.outer * flat.count * flat.inner,
                                  TU_DEVICE_THREADS, &flat);
    }
    tu_tensor_drop(from);
    tu_tensor_drop(index);
    return status;
}

/* All dimensions of index but `dim` as a loop: where they lie in x, and in index. */
static tu_launch_loop walk_along(const tt_tensor *x, const tt_tensor *index, int dim, bool with_dim) {
    tu_launch_loop loop = { .total = 1, .operands = 2 };
    for (int i = 0; i < index->ndim; i++) {
        if (i == dim && !with_dim)
            continue;
        loop.sizes[loop.ndim] = index->sizes[i];
        loop.at[0].strides[loop.ndim] = i == dim ? 0 : x->strides[i];
        loop.at[1].strides[loop.ndim++] = index->strides[i];
        loop.total *= index->sizes[i];
    }
    return loop;
}

static tutti_status gather_on_device(tu_call *call, int dim) {
    const tt_tensor *x = call->inputs[0];
    tu_device *device = tu_device_of(x);
    tt_tensor *index = tu_stage_in(call->inputs[1], TUTTI_I64);
    if (index == NULL)
        return TUTTI_ERROR_MEMORY;
    tu_launch_index flat = { .from = tu_place_of(tu_pointer(x)),
                             .to = tu_place_of(tu_pointer(call->outputs[0])),
                             .index = tu_place_of(tu_pointer(index)),
                             .fault = tu_device_fault_place(device),
                             .size = x->sizes[dim],
                             .bytes = tu_dtype_bytes[x->dtype],
                             .operation = TU_INDEX_GATHER,
                             .along = x->strides[dim],
                             .loop = walk_along(x, index, dim, true) };
    tutti_status status = tu_device_launch(device, "kernel_gather", index->numel, TU_DEVICE_THREADS, &flat);
    tu_tensor_drop(index);
    return status;
}

/* Entries of one place are brought together first, in their order; then places are summed side by side. */
static tutti_status add_places(tu_device *device, const char *name, tu_launch_index *flat) {
    static const char *const steps[] = { "kernel_index_count", "kernel_index_room", "kernel_index_gather",
                                         "kernel_index_order" };
    void *stream = tu_device_stream(device);
    tu_device_block words = { 0 };
    if (flat->count == 0 || flat->outer * flat->inner == 0)
        return TUTTI_OK;
    size_t of_places = (size_t)flat->size + 1, of_entries = (size_t)flat->count;
    tutti_status status = device->table->allocate(device->state, device->index, stream,
                                                  sizeof(int32_t) * (2 * of_places + 3 * of_entries), &words);
    if (status != TUTTI_OK)
        return status;
    flat->counts = tu_place_of(words.data);
    flat->rooms = flat->counts + sizeof(int32_t) * of_places;
    flat->drawn = flat->rooms + sizeof(int32_t) * of_places;
    flat->together = flat->drawn + sizeof(int32_t) * of_entries;
    status = device->table->clear(device->state, device->index, stream, words.data, sizeof(int32_t) * of_places);
    for (size_t i = 0; i < sizeof steps / sizeof steps[0] && status == TUTTI_OK; i++)
        status = tu_device_launch(device, steps[i], flat->count, TU_INDEX_THREADS, flat);
    if (status == TUTTI_OK)
        status = tu_device_launch_blocks(device, name, flat->outer * flat->count, TU_INDEX_THREADS, flat);
    device->table->release(device->state, device->index, &words);
    return status;
}

/* index_add and scatter_add: sums in the compute type, each by one thread, in the order of the indices. */
static tutti_status add_on_device(tu_call *call, int dim, bool scatters) {
    const tt_tensor *x = call->inputs[0];
    tutti_dtype compute = tu_compute_dtype(x->dtype);
    int64_t outer, inner;
    around(x, dim, &outer, &inner);
    int64_t entries = call->inputs[1]->numel;
    bool together = !scatters && outer * entries <= INT32_MAX && x->sizes[dim] < INT32_MAX;
    if (together && (x->dtype == TUTTI_BF16 || x->dtype == TUTTI_F16))
        compute = (tutti_dtype)x->dtype; /* the kernel widens them, and rounds once */
    tu_device *device = tu_device_of(x);
    tt_tensor *index = tu_stage_in(call->inputs[1], TUTTI_I64), *source = tu_stage_in(call->inputs[2], compute);
    tt_tensor *sum = tu_stage_out(call->outputs[0], compute);
    tutti_status status = index != NULL && source != NULL && sum != NULL ? tu_copy_tensor(sum, x) : TUTTI_ERROR_MEMORY;
    if (status == TUTTI_OK) {
        char name[TU_KERNEL_NAME];
        tu_launch_index flat = { .from = tu_place_of(tu_pointer(source)),
                                 .to = tu_place_of(tu_pointer(sum)),
                                 .index = tu_place_of(tu_pointer(index)),
                                 .fault = tu_device_fault_place(device),
                                 .size = x->sizes[dim],
                                 .count = scatters ? index->sizes[dim] : index->numel,
                                 .operation = scatters ? TU_INDEX_SCATTER : TU_INDEX_ADD,
                                 .along = sum->strides[dim] };
        flat.outer = outer;
        flat.inner = inner;
        if (scatters) {
            flat.inner = index->strides[dim];
            flat.loop = walk_along(sum, index, dim, false);
        }
        tutti_dtype type = compute == TUTTI_U64 ? TUTTI_I64 : compute;
        if (together)
            status = add_places(device, tu_kernel_name(name, "ordered_add", type), &flat);
        else
            status = tu_device_launch(device, tu_kernel_name(name, scatters ? "scatter_add" : "index_add", type),
                                      scatters ? flat.loop.total : flat.outer * flat.inner, TU_DEVICE_THREADS, &flat);
    }
    tu_tensor_drop(index);
    tu_tensor_drop(source);
    return tu_stage_end(1, call->outputs, &sum, status);
}

/* ---- index_select ---- */

/* The dimension of input 0 that input 1, the index, is for. */
static tutti_status find_indexed_dim(const tu_call *call, int given, int *dim) {
    tutti_status status = tu_wrap_dim(call->entry->name, given, call->inputs[0]->ndim, dim);
    return status == TUTTI_OK ? check_index(call, call->inputs[1]) : status;
}

tutti_status tu_index_select_shape(tu_call *call) {
    const tu_index_select_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1];
    int dim;
    tutti_status status = find_indexed_dim(call, attributes->dim, &dim);
    if (status != TUTTI_OK)
        return status;
    if (index->ndim > 1 || x->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "index is %s and x %s: index has one dimension, x at least one", tu_describe(index),
                             tu_describe(x));
    call->results[0] = tu_shape_of(x);
    call->results[0].sizes[dim] = index->numel;
    return tu_shape_contiguous(call->entry->name, &call->results[0]);
}

typedef struct row_copy {
    const char *from;
    char *to;
    const int64_t *index;
    int64_t count, size, inner; /* rows chosen, rows there are, bytes of one */
} row_copy;

static void copy_rows(void *context, int64_t begin, int64_t end) {
    const row_copy *copy = context;
    for (int64_t i = begin; i < end; i++) {
        int64_t outer = i / copy->count, row = i % copy->count;
        memcpy(copy->to + i * copy->inner, copy->from + (outer * copy->size + copy->index[row]) * copy->inner,
               (size_t)copy->inner);
    }
}

tutti_status tu_index_select_everywhere(tu_call *call) {
    const tu_index_select_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1];
    tt_tensor *out = call->outputs[0];
    int dim = tu_dim(attributes->dim, call->inputs[0]->ndim);
    int64_t *at, outer, inner;
    if (tu_on_device(x))
        return select_on_device(call, x, dim, TU_INDEX_SELECT);
    tutti_status status = read_index(call, index, x->sizes[dim], &at);
    if (status != TUTTI_OK)
        return status;
    tt_tensor *from = tu_stage_in(x, x->dtype);
    if (from == NULL) {
        free_index(at, index);
        return TUTTI_ERROR_MEMORY;
    }
    around(x, dim, &outer, &inner);
    row_copy copy = { tu_pointer(from), tu_pointer(out), at,
                      index->numel,     x->sizes[dim],   inner * tu_dtype_bytes[x->dtype] };
    if (out->numel > 0)
        tu_parallel(outer * index->numel, 65536 / (copy.inner + 1) + 1, copy_rows, &copy);
    tu_tensor_drop(from);
    free_index(at, index);
    return TUTTI_OK;
}
void tu_index_select_gradient(tu_gradient *gradient) {
    const tu_index_select_attributes *attributes = gradient->attributes;
    gradient->results[0] =
        tt_index_add(tu_gradient_zeros(gradient), attributes->dim, tu_saved(gradient, TU_INPUT(1)), gradient->grads[0]);
}

/* ---- adding rows: index_add ---- */

/* to[i] += from[i], of a compute type */
static void add_row(tutti_dtype compute, void *to, const void *from, int64_t count) {
    if (compute == TUTTI_F32)
        tu_tensor_kernels_get()->folds[TU_F32][TU_FOLD_SUM].column(to, from, count);
    else if (compute == TUTTI_F64 || compute == TUTTI_C128)
        tu_tensor_kernels_get()->folds[TU_F64][TU_FOLD_SUM].column(to, from, count * (compute == TUTTI_C128 ? 2 : 1));
    else
        for (int64_t i = 0; i < count; i++)
            ((uint64_t *)to)[i] += ((const uint64_t *)from)[i];
}

/* The operands of index_add and scatter_add, whose sums are made in the compute type and rounded once at the end. */
typedef struct addition {
    tutti_dtype compute;
    size_t element;
    tt_tensor *sum, *source;
    int64_t *index;
} addition;

static void addition_end(const tu_call *call, addition *add, bool good) {
    if (good)
        tu_stage_done(call->outputs[0], add->sum);
    else
        tu_tensor_drop(add->sum);
    tu_tensor_drop(add->source);
    free_index(add->index, call->inputs[1]);
}

static tutti_status addition_begin(const tu_call *call, int64_t size, addition *add) {
    *add = (addition){ .compute = tu_compute_dtype(call->inputs[0]->dtype) };
    add->element = tu_dtype_bytes[add->compute];
    tutti_status status = read_index(call, call->inputs[1], size, &add->index);
    if (status != TUTTI_OK)
        return status;
    add->source = tu_stage_in(call->inputs[2], add->compute);
    add->sum = tu_stage_out(call->outputs[0], add->compute);
    if (add->source == NULL || add->sum == NULL) {
        addition_end(call, add, false);
        return TUTTI_ERROR_MEMORY;
    }
    tu_copy_tensor(add->sum, call->inputs[0]);
    return TUTTI_OK;
}

tutti_status tu_index_add_shape(tu_call *call) {
    const tu_index_add_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1], *source = call->inputs[2];
    int dim;
    tutti_status status = find_indexed_dim(call, attributes->dim, &dim);
    if (status != TUTTI_OK)
        return status;
    bool fits = index->ndim <= 1 && x->ndim > 0 && source->ndim == x->ndim && source->dtype == x->dtype &&
                source->sizes[dim] == index->numel;
    for (int axis = 0; fits && axis < x->ndim; axis++)
        fits = axis == dim || source->sizes[axis] == x->sizes[axis];
    if (!fits)
        return tu_call_error(
            call, TUTTI_ERROR_ARGUMENT,
            "x is %s, index %s and source %s: source must be like x, with one entry per index in dimension %d",
            tu_describe(x), tu_describe(index), tu_describe(source), dim);
    return tu_shape_like_first(call);
}
tutti_status tu_index_add_everywhere(tu_call *call) {
    const tu_index_add_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    int dim = tu_dim(attributes->dim, x->ndim);
    int64_t outer, inner, size = x->sizes[dim], count = call->inputs[1]->numel;
    addition add;
    if (tu_on_device(x))
        return add_on_device(call, dim, false);
    tutti_status status = addition_begin(call, size, &add);
    if (status != TUTTI_OK)
        return status;
    around(x, dim, &outer, &inner);
    size_t bytes = (size_t)inner * add.element;
    for (int64_t block = 0; block < outer && inner > 0; block++)
        for (int64_t i = 0; i < count; i++)
            add_row(add.compute, (char *)tu_pointer(add.sum) + (size_t)(block * size + add.index[i]) * bytes,
                    (const char *)tu_pointer(add.source) + (size_t)(block * count + i) * bytes, inner);
    addition_end(call, &add, true);
    return TUTTI_OK;
}

/* What was added gets the gradient of where it went. */
static void addition_gradient(tu_gradient *gradient, int dim, tt_tensor *(*pick)(tt_tensor *, int, tt_tensor *)) {
    gradient->results[0] = gradient->grads[0];
    if (gradient->needs[2])
        gradient->results[2] = pick(gradient->grads[0], dim, tu_saved(gradient, TU_INPUT(1)));
}

void tu_index_add_gradient(tu_gradient *gradient) {
    addition_gradient(gradient, ((const tu_index_add_attributes *)gradient->attributes)->dim, tt_index_select);
}

/* ---- embedding ---- */

tutti_status tu_embedding_shape(tu_call *call) {
    const tt_tensor *weight = call->inputs[0], *index = call->inputs[1];
    tutti_status status = check_index(call, index);
    if (status != TUTTI_OK)
        return status;
    if (weight->ndim != 2 || index->ndim >= TT_MAX_DIMS)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "weight is %s and must be a matrix; index is %s",
                             tu_describe(weight), tu_describe(index));
    call->results[0] = tu_shape_of(index);
    call->results[0].dtype = weight->dtype;
    call->results[0].sizes[index->ndim] = weight->sizes[1];
    call->results[0].ndim = index->ndim + 1;
    return tu_shape_contiguous("embedding", &call->results[0]);
}
tutti_status tu_embedding_everywhere(tu_call *call) {
    const tt_tensor *index = call->inputs[1];
    tt_tensor *out = call->outputs[0];
    int64_t *at;
    if (tu_on_device(out))
        return select_on_device(call, call->inputs[0], 0, TU_INDEX_EMBEDDING);
    tutti_status status = read_index(call, index, call->inputs[0]->sizes[0], &at);
    if (status != TUTTI_OK)
        return status;
    tt_tensor *weight = tu_stage_in(call->inputs[0], call->inputs[0]->dtype);
    if (weight != NULL && out->numel > 0) {
        row_copy copy = { tu_pointer(weight), tu_pointer(out),  at,
                          index->numel,       weight->sizes[0], weight->sizes[1] * tu_dtype_bytes[weight->dtype] };
        tu_parallel(index->numel, 65536 / (copy.inner + 1) + 1, copy_rows, &copy);
    }
    tu_tensor_drop(weight);
    free_index(at, index);
    return weight != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}
void tu_embedding_gradient(tu_gradient *gradient) {
    const tu_shape *shape = tu_input_shape(gradient, 0);
    tt_options options = TT_OPTIONS_INIT;
    options.device = shape->device;
    tt_tensor *zeros = tt_zeros(tt_dims_of(2, shape->sizes), gradient->grads[0]->dtype, &options);
    tt_tensor *index = tt_reshape(tu_saved(gradient, TU_INPUT(1)), tt_shape(-1));
    if (index != NULL)
        gradient->results[0] =
            tt_index_add(zeros, 0, index, tt_reshape(gradient->grads[0], tt_shape(index->numel, shape->sizes[1])));
}

/* ---- gather and scatter_add along a dimension ---- */

static tutti_status check_along(tu_call *call, const tt_tensor *x, const tt_tensor *index, int *dim) {
    const tu_gather_dim_attributes *attributes = call->attributes;
    tutti_status status = tu_wrap_dim(call->entry->name, attributes->dim, x->ndim, dim);
    if (status == TUTTI_OK)
        status = check_index(call, index);
    if (status != TUTTI_OK)
        return status;
    bool fits = index->ndim == x->ndim && x->ndim > 0;
    for (int axis = 0; fits && axis < x->ndim; axis++)
        fits = axis == *dim || index->sizes[axis] <= x->sizes[axis];
    if (!fits)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "index %s must have the dimensions of x, %s, and not exceed them apart from dimension %d",
                             tu_describe(index), tu_describe(x), *dim);
    return TUTTI_OK;
}

/* Offset in x of the i-th element of index, row-major. */
static int64_t element_offset(const tt_tensor *x, const tt_tensor *index, int dim, int64_t i, int64_t at) {
    int64_t offset = at * x->strides[dim];
    for (int axis = index->ndim - 1; axis >= 0; axis--) {
        if (axis != dim)
            offset += i % index->sizes[axis] * x->strides[axis];
        i /= index->sizes[axis];
    }
    return offset;
}

tutti_status tu_gather_dim_shape(tu_call *call) {
    int dim;
    tutti_status status = check_along(call, call->inputs[0], call->inputs[1], &dim);
    call->results[0] = tu_shape_of(call->inputs[1]);
    call->results[0].dtype = call->inputs[0]->dtype;
    return status == TUTTI_OK ? tu_shape_contiguous(call->entry->name, &call->results[0]) : status;
}
tutti_status tu_gather_dim_everywhere(tu_call *call) {
    const tu_gather_dim_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1];
    int dim = tu_dim(attributes->dim, call->inputs[0]->ndim);
    size_t size = tu_dtype_bytes[x->dtype];
    int64_t *at;
    if (tu_on_device(x))
        return gather_on_device(call, dim);
    tutti_status status = read_index(call, index, x->sizes[dim], &at);
    if (status != TUTTI_OK)
        return status;
    char *to = tu_pointer(call->outputs[0]);
    const char *from = tu_pointer(x);
    for (int64_t i = 0; i < index->numel; i++)
        memcpy(to + (size_t)i * size, from + element_offset(x, index, dim, i, at[i]) * (int64_t)size, size);
    free_index(at, index);
    return TUTTI_OK;
}
void tu_gather_dim_gradient(tu_gradient *gradient) {
    const tu_gather_dim_attributes *attributes = gradient->attributes;
    gradient->results[0] = tt_scatter_add(tu_gradient_zeros(gradient), attributes->dim, tu_saved(gradient, TU_INPUT(1)),
                                          gradient->grads[0]);
}

tutti_status tu_scatter_add_shape(tu_call *call) {
    int dim;
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1], *source = call->inputs[2];
    tutti_status status = check_along(call, x, index, &dim);
    if (status != TUTTI_OK)
        return status;
    if (!tu_same_sizes(index, source) || source->dtype != x->dtype)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "source %s must have index's shape, %s, and x's dtype",
                             tu_describe(source), tu_describe(index));
    return tu_shape_like_first(call);
}
tutti_status tu_scatter_add_everywhere(tu_call *call) {
    const tu_scatter_add_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1];
    int dim = tu_dim(attributes->dim, x->ndim);
    addition add;
    if (tu_on_device(x))
        return add_on_device(call, dim, true);
    tutti_status status = addition_begin(call, x->sizes[dim], &add);
    if (status != TUTTI_OK)
        return status;
    for (int64_t i = 0; i < index->numel; i++) {
        int64_t offset = element_offset(add.sum, index, dim, i, add.index[i]);
        add_row(add.compute, (char *)tu_pointer(add.sum) + offset * (int64_t)add.element,
                (const char *)tu_pointer(add.source) + (size_t)i * add.element, 1);
    }
    addition_end(call, &add, true);
    return TUTTI_OK;
}

void tu_scatter_add_gradient(tu_gradient *gradient) {
    addition_gradient(gradient, ((const tu_scatter_add_attributes *)gradient->attributes)->dim, tt_gather_dim);
}

/* ---- triangles ---- */

tutti_status tu_triangle_shape(tu_call *call) {
    if (call->inputs[0]->ndim < 2)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s is no matrix", tu_describe(call->inputs[0]));
    return tu_shape_like_first(call);
}
static tutti_status triangle(tu_call *call, bool lower) {
    const tu_tril_attributes *attributes = call->attributes;
    tt_tensor *out = call->outputs[0];
    int64_t rows = out->sizes[out->ndim - 2], columns = out->sizes[out->ndim - 1], diagonal = attributes->diagonal;
    size_t size = tu_dtype_bytes[out->dtype];
    tutti_status status = tu_copy_tensor(out, call->inputs[0]);
    if (out->numel == 0 || status != TUTTI_OK)
        return status;
    if (tu_on_device(out)) {
        tu_launch_triangle flat = {
            tu_place_of(tu_pointer(out)), out->numel, rows, columns, diagonal, (int32_t)size, lower
        };
        return tu_device_launch(tu_device_of(out), "kernel_triangle", out->numel, TU_DEVICE_THREADS, &flat);
    }
    for (int64_t row = 0; row < out->numel / columns; row++) {
        int64_t cut = row % rows + diagonal + (lower ? 1 : 0);
        cut = cut < 0 ? 0 : cut > columns ? columns : cut;
        char *at = (char *)tu_pointer(out) + (size_t)(row * columns) * size;
        if (lower)
            memset(at + (size_t)cut * size, 0, (size_t)(columns - cut) * size);
        else
            memset(at, 0, (size_t)cut * size);
    }
    return TUTTI_OK;
}

tutti_status tu_tril_everywhere(tu_call *call) {
    return triangle(call, true);
}

tutti_status tu_triu_everywhere(tu_call *call) {
    return triangle(call, false);
}
