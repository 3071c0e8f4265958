/* SPDX-License-Identifier: Apache-2.0
 *
 * Joining tensors, and choosing elements of one by the integers of another.
 */
#include <stdlib.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/create.h"
#include "tensor/loop.h"
#include "tensor/parallel.h"
#include "tensor/vector_math.h"

#define FAMILY "joining and indexing"

/* ---- cat ---- */

static tutti_status cat_shape(tu_call *call) {
    const tt_tensor *first = call->inputs[0];
    int dim;
    if (call->input_count == 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "expected a non-empty list of tensors");
    tutti_status status = tu_wrap_dim("cat", call->params.integer[0], first->ndim, &dim);
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
        for (int d = 0; fits && d < x->ndim; d++)
            fits = d == dim || x->sizes[d] == first->sizes[d];
        if (!fits)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                                 "sizes of tensors must match except in dimension %d, but got %s and %s", dim,
                                 tu_describe(first), tu_describe(x));
        result->sizes[dim] += x->sizes[dim];
    }
    result->dtype = tu_promote(call, 0);
    call->params.integer[0] = dim;
    return tu_shape_contiguous("cat", result);
}
static tutti_status cat_cpu(tu_call *call) {
    int dim = (int)call->params.integer[0];
    int64_t start = 0;
    for (int i = 0; i < call->input_count; i++) {
        tt_tensor part = *call->outputs[0]; /* a look at the part that x fills */
        const tt_tensor *x = call->inputs[i];
        part.sizes[dim] = x->sizes[dim];
        part.offset += start * part.strides[dim];
        part.numel = x->numel;
        part.flags = 0;
        start += x->sizes[dim];
        if (x->numel > 0)
            tu_copy_tensor(&part, x);
    }
    return TUTTI_OK;
}
static void cat_gradient(tu_gradient *gradient) {
    int dim = (int)gradient->params->integer[0];
    int64_t start = 0;
    for (int i = 0; i < gradient->input_count; i++) {
        int64_t size = tu_input_shape(gradient, i)->sizes[dim];
        if (gradient->needs[i])
            gradient->results[i] = tt_narrow(gradient->grads[0], dim, start, size);
        start += size;
    }
}
static tt_tensor *cat_sample(tu_sampler *s) {
    tt_tensor *a = tu_normal(s, tt_shape(s->n, 3));
    return tt_cat(tt_tensors(a, tu_normal(s, tt_shape(s->n, 2))), 1);
}
TU_OPERATOR(cat) = { .name = "cat",
                     .schema = "cat(tensors, dim) -> tensor",
                     .summary = "one behind the other along dim",
                     .family = FAMILY,
                     .shape = cat_shape,
                     .cpu = cat_cpu,
                     .gradient = cat_gradient,
                     .sample = cat_sample };
tt_tensor *tt_cat(tt_tensor_list tensors, int dim) {
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (tensors.count > INT32_MAX || (tensors.count > 0 && tensors.at == NULL)) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "cat: the list is NULL or too long");
        return NULL;
    }
    tu_call call;
    tu_call_init(&call, &tu_operator_cat, (int)tensors.count, tensors.at);
    call.params.integer[0] = dim;
    return tu_run(&call);
}

static tt_tensor *stack_sample(tu_sampler *s) {
    tt_tensor *a = tu_normal(s, tt_shape(s->n, 3));
    return tt_stack(tt_tensors(a, tu_normal(s, tt_shape(s->n, 3))), 1);
}
TU_OPERATOR(stack) = { .name = "stack",
                       .schema = "stack(tensors, dim) -> tensor",
                       .summary = "side by side along a new dimension",
                       .family = FAMILY,
                       .flags = TU_COMPOSITE,
                       .sample = stack_sample };
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

/* x as a dense tensor of its own type: x itself, or a copy. The caller drops it. */
static tt_tensor *dense(const tt_tensor *x) {
    if (x->flags & TU_CONTIGUOUS)
        return tu_tensor_hold((tt_tensor *)x);
    tu_shape shape = tu_shape_of(x);
    if (tu_shape_contiguous("index", &shape) != TUTTI_OK)
        return NULL;
    tt_tensor *copy = tu_tensor_new(&shape);
    if (copy != NULL)
        tu_copy_tensor(copy, x);
    return copy;
}

/* sizes before and after `dim` */
static void around(const tt_tensor *x, int dim, int64_t *outer, int64_t *inner) {
    *outer = *inner = 1;
    for (int i = 0; i < x->ndim; i++)
        if (i != dim)
            *(i < dim ? outer : inner) *= x->sizes[i];
}

/* ---- index_select ---- */

static tutti_status index_select_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1];
    int dim;
    tutti_status status = tu_wrap_dim(call->operator->name, call->params.integer[0], x->ndim, &dim);
    if (status == TUTTI_OK)
        status = check_index(call, index);
    if (status != TUTTI_OK)
        return status;
    if (index->ndim > 1 || x->ndim == 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "index is %s and x %s: index has one dimension, x at least one", tu_describe(index),
                             tu_describe(x));
    call->params.integer[0] = dim;
    call->results[0] = tu_shape_of(x);
    call->results[0].sizes[dim] = index->numel;
    return tu_shape_contiguous(call->operator->name, &call->results[0]);
}

typedef struct row_copy {
    const char *from;
    char *to;
    const int64_t *index;
    int64_t count, size, inner; /* rows chosen, rows there are, bytes of one */
} row_copy;

static void copy_rows(void *context, int64_t begin, int64_t end) {
    const row_copy *c = context;
    for (int64_t i = begin; i < end; i++) {
        int64_t outer = i / c->count, row = i % c->count;
        memcpy(c->to + i * c->inner, c->from + (outer * c->size + c->index[row]) * c->inner, (size_t)c->inner);
    }
}

static tutti_status index_select_cpu(tu_call *call) {
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1];
    tt_tensor *out = call->outputs[0];
    int dim = (int)call->params.integer[0];
    int64_t *at, outer, inner;
    tutti_status status = read_index(call, index, x->sizes[dim], &at);
    if (status != TUTTI_OK)
        return status;
    tt_tensor *from = dense(x);
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
static void index_select_gradient(tu_gradient *gradient) {
    const tu_shape *shape = tu_input_shape(gradient, 0);
    tt_options options = TT_OPTIONS_INIT;
    options.device = shape->device;
    tt_tensor *zeros = tt_zeros(tt_dims_of(shape->ndim, shape->sizes), gradient->grads[0]->dtype, &options);
    gradient->results[0] =
        tt_index_add(zeros, (int)gradient->params->integer[0], tu_saved(gradient, TU_INPUT(1)), gradient->grads[0]);
}
static tt_tensor *index_select_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n, 5));
    return tt_index_select(x, 1, tu_index(s, tt_shape(3), 5));
}
TU_OPERATOR(index_select) = { .name = "index_select",
                              .schema = "index_select(x, index, dim) -> tensor",
                              .summary = "entries of one dimension by a list of indices",
                              .family = FAMILY,
                              .shape = index_select_shape,
                              .cpu = index_select_cpu,
                              .gradient = index_select_gradient,
                              .saves = { TU_INPUT(1) },
                              .sample = index_select_sample };
static tt_tensor *with_dim(const tu_operator *operator, int count, tt_tensor *const *inputs, int dim) {
    tu_call call;
    tu_call_init(&call, operator, count, inputs);
    call.params.integer[0] = dim;
    return tu_run(&call);
}
tt_tensor *tt_index_select(tt_tensor *x, int dim, tt_tensor *index) {
    return with_dim(&tu_operator_index_select, 2, (tt_tensor *[]){ x, index }, dim);
}

/* ---- adding rows: index_add ---- */

TU_CLONES static void add_row_f32(float *to, const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        to[i] += from[i];
}
TU_CLONES static void add_row_f64(double *to, const double *from, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        to[i] += from[i];
}

/* to[i] += from[i], in the compute type */
static tutti_status add_row(tutti_dtype dtype, void *to, const void *from, int64_t count) {
    if (dtype == TUTTI_F32) {
        add_row_f32(to, from, count);
        return TUTTI_OK;
    }
    if (dtype == TUTTI_F64 || dtype == TUTTI_C128) {
        add_row_f64(to, from, count * (dtype == TUTTI_C128 ? 2 : 1));
        return TUTTI_OK;
    }
    tutti_dtype compute = tu_compute_dtype(dtype);
    _Alignas(16) char a[16 * 64], b[16 * 64];
    size_t size = tu_dtype_bytes[dtype];
    for (int64_t first = 0; first < count; first += 64) {
        size_t length = (size_t)(count - first < 64 ? count - first : 64);
        char *target = (char *)to + (size_t)first * size;
        tutti_status status = tutti_convert(target, dtype, a, compute, length);
        if (status == TUTTI_OK)
            status = tutti_convert((const char *)from + (size_t)first * size, dtype, b, compute, length);
        for (size_t i = 0; i < length && status == TUTTI_OK; i++) {
            if (compute == TUTTI_F32)
                ((float *)a)[i] += ((float *)b)[i];
            else if (compute == TUTTI_C128)
                ((double *)a)[2 * i] += ((double *)b)[2 * i], ((double *)a)[2 * i + 1] += ((double *)b)[2 * i + 1];
            else
                ((uint64_t *)a)[i] += ((uint64_t *)b)[i];
        }
        if (status == TUTTI_OK)
            status = tutti_convert(a, compute, target, dtype, length);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

static tutti_status index_add_shape(tu_call *call) {
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1], *source = call->inputs[2];
    int dim;
    tutti_status status = tu_wrap_dim(call->operator->name, call->params.integer[0], x->ndim, &dim);
    if (status == TUTTI_OK)
        status = check_index(call, index);
    if (status != TUTTI_OK)
        return status;
    bool fits = index->ndim <= 1 && x->ndim > 0 && source->ndim == x->ndim && source->dtype == x->dtype &&
                source->sizes[dim] == index->numel;
    for (int d = 0; fits && d < x->ndim; d++)
        fits = d == dim || source->sizes[d] == x->sizes[d];
    if (!fits)
        return tu_call_error(
            call, TUTTI_ERROR_ARGUMENT,
            "x is %s, index %s and source %s: source must be like x, with one entry per index in dimension %d",
            tu_describe(x), tu_describe(index), tu_describe(source), dim);
    call->params.integer[0] = dim;
    return tu_shape_like_first(call);
}
static tutti_status index_add_cpu(tu_call *call) {
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1];
    tt_tensor *out = call->outputs[0];
    int dim = (int)call->params.integer[0];
    int64_t *at, outer, inner, size = x->sizes[dim];
    tutti_status status = read_index(call, index, size, &at);
    if (status != TUTTI_OK)
        return status;
    tt_tensor *source = dense(call->inputs[2]);
    if (source == NULL) {
        free_index(at, index);
        return TUTTI_ERROR_MEMORY;
    }
    tu_copy_tensor(out, x);
    around(x, dim, &outer, &inner);
    size_t bytes = (size_t)inner * tu_dtype_bytes[x->dtype];
    for (int64_t o = 0; o < outer && status == TUTTI_OK && inner > 0; o++)
        for (int64_t i = 0; i < index->numel && status == TUTTI_OK; i++)
            status = add_row(x->dtype, (char *)tu_pointer(out) + (size_t)(o * size + at[i]) * bytes,
                             (const char *)tu_pointer(source) + (size_t)(o * index->numel + i) * bytes, inner);
    tu_tensor_drop(source);
    free_index(at, index);
    return status;
}
static void index_add_gradient(tu_gradient *gradient) {
    gradient->results[0] = gradient->grads[0];
    if (gradient->needs[2])
        gradient->results[2] =
            tt_index_select(gradient->grads[0], (int)gradient->params->integer[0], tu_saved(gradient, TU_INPUT(1)));
}
static tt_tensor *index_add_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n, 4)), *index = tu_index(s, tt_shape(3), 4);
    return tt_index_add(x, 1, index, tu_normal(s, tt_shape(s->n, 3)));
}
TU_OPERATOR(index_add) = { .name = "index_add",
                           .schema = "index_add(x, index, source, dim) -> tensor",
                           .summary = "x, with source's entries added where index says",
                           .family = FAMILY,
                           .shape = index_add_shape,
                           .cpu = index_add_cpu,
                           .gradient = index_add_gradient,
                           .saves = { 0, 0, TU_INPUT(1) },
                           .sample = index_add_sample };
tt_tensor *tt_index_add(tt_tensor *x, int dim, tt_tensor *index, tt_tensor *source) {
    return with_dim(&tu_operator_index_add, 3, (tt_tensor *[]){ x, index, source }, dim);
}

/* ---- embedding ---- */

static tutti_status embedding_shape(tu_call *call) {
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
static tutti_status embedding_cpu(tu_call *call) {
    const tt_tensor *index = call->inputs[1];
    tt_tensor *out = call->outputs[0];
    int64_t *at;
    tutti_status status = read_index(call, index, call->inputs[0]->sizes[0], &at);
    if (status != TUTTI_OK)
        return status;
    tt_tensor *weight = dense(call->inputs[0]);
    if (weight != NULL && out->numel > 0) {
        row_copy copy = { tu_pointer(weight), tu_pointer(out),  at,
                          index->numel,       weight->sizes[0], weight->sizes[1] * tu_dtype_bytes[weight->dtype] };
        tu_parallel(index->numel, 65536 / (copy.inner + 1) + 1, copy_rows, &copy);
    }
    tu_tensor_drop(weight);
    free_index(at, index);
    return weight != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
}
static void embedding_gradient(tu_gradient *gradient) {
    const tu_shape *shape = tu_input_shape(gradient, 0);
    tt_options options = TT_OPTIONS_INIT;
    options.device = shape->device;
    tt_tensor *zeros = tt_zeros(tt_dims_of(2, shape->sizes), gradient->grads[0]->dtype, &options);
    tt_tensor *index = tt_reshape(tu_saved(gradient, TU_INPUT(1)), tt_shape(-1));
    if (index != NULL)
        gradient->results[0] =
            tt_index_add(zeros, 0, index, tt_reshape(gradient->grads[0], tt_shape(index->numel, shape->sizes[1])));
}
static tt_tensor *embedding_sample(tu_sampler *s) {
    tt_tensor *weight = tu_normal(s, tt_shape(5, 3));
    return tt_embedding(weight, tu_index(s, tt_shape(2, s->n), 5));
}
TU_OPERATOR(embedding) = { .name = "embedding",
                           .schema = "embedding(weight, index) -> tensor",
                           .summary = "rows of weight, one per index",
                           .family = FAMILY,
                           .shape = embedding_shape,
                           .cpu = embedding_cpu,
                           .gradient = embedding_gradient,
                           .saves = { TU_INPUT(1) },
                           .sample = embedding_sample };
tt_tensor *tt_embedding(tt_tensor *weight, tt_tensor *index) {
    return tu_run2(&tu_operator_embedding, weight, index);
}

/* ---- gather and scatter_add along a dimension ---- */

static tutti_status check_along(tu_call *call, const tt_tensor *x, const tt_tensor *index, int *dim) {
    tutti_status status = tu_wrap_dim(call->operator->name, call->params.integer[0], x->ndim, dim);
    if (status == TUTTI_OK)
        status = check_index(call, index);
    if (status != TUTTI_OK)
        return status;
    bool fits = index->ndim == x->ndim && x->ndim > 0;
    for (int d = 0; fits && d < x->ndim; d++)
        fits = d == *dim || index->sizes[d] <= x->sizes[d];
    if (!fits)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "index %s must have the dimensions of x, %s, and not exceed them apart from dimension %d",
                             tu_describe(index), tu_describe(x), *dim);
    call->params.integer[0] = *dim;
    return TUTTI_OK;
}

/* Offset in x of the i-th element of index, row-major. */
static int64_t element_offset(const tt_tensor *x, const tt_tensor *index, int dim, int64_t i, int64_t at) {
    int64_t offset = at * x->strides[dim];
    for (int d = index->ndim - 1; d >= 0; d--) {
        if (d != dim)
            offset += i % index->sizes[d] * x->strides[d];
        i /= index->sizes[d];
    }
    return offset;
}

static tutti_status gather_shape(tu_call *call) {
    int dim;
    tutti_status status = check_along(call, call->inputs[0], call->inputs[1], &dim);
    call->results[0] = tu_shape_of(call->inputs[1]);
    call->results[0].dtype = call->inputs[0]->dtype;
    return status == TUTTI_OK ? tu_shape_contiguous(call->operator->name, &call->results[0]) : status;
}
static tutti_status gather_cpu(tu_call *call) {
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1];
    int dim = (int)call->params.integer[0];
    size_t size = tu_dtype_bytes[x->dtype];
    int64_t *at;
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
static void gather_gradient(tu_gradient *gradient) {
    const tu_shape *shape = tu_input_shape(gradient, 0);
    tt_options options = TT_OPTIONS_INIT;
    options.device = shape->device;
    tt_tensor *zeros = tt_zeros(tt_dims_of(shape->ndim, shape->sizes), gradient->grads[0]->dtype, &options);
    gradient->results[0] =
        tt_scatter_add(zeros, (int)gradient->params->integer[0], tu_saved(gradient, TU_INPUT(1)), gradient->grads[0]);
}
static tt_tensor *gather_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n, 5));
    return tt_gather_dim(x, 1, tu_index(s, tt_shape(s->n, 3), 5));
}
TU_OPERATOR(gather_dim) = { .name = "gather_dim",
                            .schema = "gather_dim(x, index, dim) -> tensor",
                            .summary = "out[i][j] = x[i][index[i][j]] for dim 1, and so on",
                            .family = FAMILY,
                            .shape = gather_shape,
                            .cpu = gather_cpu,
                            .gradient = gather_gradient,
                            .saves = { TU_INPUT(1) },
                            .sample = gather_sample };
tt_tensor *tt_gather_dim(tt_tensor *x, int dim, tt_tensor *index) {
    return with_dim(&tu_operator_gather_dim, 2, (tt_tensor *[]){ x, index }, dim);
}

static tutti_status scatter_shape(tu_call *call) {
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
static tutti_status scatter_cpu(tu_call *call) {
    const tt_tensor *x = call->inputs[0], *index = call->inputs[1];
    tt_tensor *out = call->outputs[0];
    int dim = (int)call->params.integer[0];
    size_t size = tu_dtype_bytes[x->dtype];
    int64_t *at;
    tutti_status status = read_index(call, index, x->sizes[dim], &at);
    if (status != TUTTI_OK)
        return status;
    tt_tensor *source = dense(call->inputs[2]);
    if (source == NULL) {
        free_index(at, index);
        return TUTTI_ERROR_MEMORY;
    }
    tu_copy_tensor(out, x);
    for (int64_t i = 0; i < index->numel && status == TUTTI_OK; i++)
        status = add_row(x->dtype, (char *)tu_pointer(out) + element_offset(out, index, dim, i, at[i]) * (int64_t)size,
                         (const char *)tu_pointer(source) + (size_t)i * size, 1);
    tu_tensor_drop(source);
    free_index(at, index);
    return status;
}
static void scatter_gradient(tu_gradient *gradient) {
    gradient->results[0] = gradient->grads[0];
    if (gradient->needs[2])
        gradient->results[2] =
            tt_gather_dim(gradient->grads[0], (int)gradient->params->integer[0], tu_saved(gradient, TU_INPUT(1)));
}
static tt_tensor *scatter_sample(tu_sampler *s) {
    tt_tensor *x = tu_normal(s, tt_shape(s->n, 5)), *index = tu_index(s, tt_shape(s->n, 3), 5);
    return tt_scatter_add(x, 1, index, tu_normal(s, tt_shape(s->n, 3)));
}
TU_OPERATOR(scatter_add) = { .name = "scatter_add",
                             .schema = "scatter_add(x, index, source, dim) -> tensor",
                             .summary = "x, with out[i][index[i][j]] += source[i][j] for dim 1, and so on",
                             .family = FAMILY,
                             .shape = scatter_shape,
                             .cpu = scatter_cpu,
                             .gradient = scatter_gradient,
                             .saves = { 0, 0, TU_INPUT(1) },
                             .sample = scatter_sample };
tt_tensor *tt_scatter_add(tt_tensor *x, int dim, tt_tensor *index, tt_tensor *source) {
    return with_dim(&tu_operator_scatter_add, 3, (tt_tensor *[]){ x, index, source }, dim);
}

/* ---- triangles ---- */

static tutti_status triangle_shape(tu_call *call) {
    if (call->inputs[0]->ndim < 2)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s is no matrix", tu_describe(call->inputs[0]));
    return tu_shape_like_first(call);
}
static tutti_status triangle(tu_call *call, bool lower) {
    tt_tensor *out = call->outputs[0];
    int64_t rows = out->sizes[out->ndim - 2], columns = out->sizes[out->ndim - 1], diagonal = call->params.integer[0];
    size_t size = tu_dtype_bytes[out->dtype];
    tu_copy_tensor(out, call->inputs[0]);
    if (out->numel == 0)
        return TUTTI_OK;
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
static tutti_status tril_cpu(tu_call *call) {
    return triangle(call, true);
}
static tutti_status triu_cpu(tu_call *call) {
    return triangle(call, false);
}
static void tril_gradient(tu_gradient *gradient) {
    gradient->results[0] = tt_tril(gradient->grads[0], gradient->params->integer[0]);
}
static void triu_gradient(tu_gradient *gradient) {
    gradient->results[0] = tt_triu(gradient->grads[0], gradient->params->integer[0]);
}
static tt_tensor *tril_sample(tu_sampler *s) {
    return tt_tril(tu_normal(s, tt_shape(s->n, 3, 4)), 1);
}
static tt_tensor *triu_sample(tu_sampler *s) {
    return tt_triu(tu_normal(s, tt_shape(s->n, 3, 4)), -1);
}
TU_OPERATOR(tril) = { .name = "tril",
                      .schema = "tril(x, diagonal) -> tensor",
                      .summary = "zero above a diagonal",
                      .family = FAMILY,
                      .shape = triangle_shape,
                      .cpu = tril_cpu,
                      .gradient = tril_gradient,
                      .sample = tril_sample };
TU_OPERATOR(triu) = { .name = "triu",
                      .schema = "triu(x, diagonal) -> tensor",
                      .summary = "zero below a diagonal",
                      .family = FAMILY,
                      .shape = triangle_shape,
                      .cpu = triu_cpu,
                      .gradient = triu_gradient,
                      .sample = triu_sample };
static tt_tensor *with_diagonal(const tu_operator *operator, tt_tensor * x, int64_t diagonal) {
    tu_call call;
    tu_call_init(&call, operator, 1, &x);
    call.params.integer[0] = diagonal;
    return tu_run(&call);
}
tt_tensor *tt_tril(tt_tensor *x, int64_t diagonal) {
    return with_diagonal(&tu_operator_tril, x, diagonal);
}
tt_tensor *tt_triu(tt_tensor *x, int64_t diagonal) {
    return with_diagonal(&tu_operator_triu, x, diagonal);
}
