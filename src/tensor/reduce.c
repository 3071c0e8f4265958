/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions over dimensions. A dense tensor of the compute type is seen as (outer, reduced, inner), one run of reduced
 * dimensions after the other. Sums go in two levels, so that long ones stay exact to a few units in the last place, and
 * in an order that depends on the shape alone, not on the threads.
 */
#include <complex.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/kernel/kernels.h"
#include "tensor/loop.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"

typedef double _Complex c128;

typedef struct tu_reduction {
    int floats; /* TU_FOLD_…: the kernels for floats are in the level's table */
    tu_fold_kernels i64, u64, c128;
    bool to_bool; /* any, all: result and elements are truth values */
    bool widen;   /* integers give i64 */
    bool float_only;
    bool mean;
    bool no_empty; /* there is no value for no elements */
} reduction;

/* ---- kernels ---- */

/* Integers and complex numbers: sixteen lanes, folded at the end of each block. */
#define REDUCER(name, type, first, fold)                                                            \
    static void name##_row(void *to, const void *from, int64_t count) {                             \
        const type *x = from;                                                                       \
        type total = *(type *)to;                                                                   \
        for (int64_t begin = 0; begin < count; begin += TU_FOLD_BLOCK) {                            \
            int64_t end = begin + TU_FOLD_BLOCK < count ? begin + TU_FOLD_BLOCK : count, i = begin; \
            type lanes[16];                                                                         \
            for (int l = 0; l < 16; l++)                                                            \
                lanes[l] = first;                                                                   \
            for (; i + 16 <= end; i += 16)                                                          \
                for (int l = 0; l < 16; l++) {                                                      \
                    type a = lanes[l], b = x[i + l];                                                \
                    lanes[l] = fold;                                                                \
                }                                                                                   \
            type a = first, b;                                                                      \
            for (int l = 0; l < 16; l++) {                                                          \
                b = lanes[l];                                                                       \
                a = fold;                                                                           \
            }                                                                                       \
            for (; i < end; i++) {                                                                  \
                b = x[i];                                                                           \
                a = fold;                                                                           \
            }                                                                                       \
            b = a;                                                                                  \
            a = total;                                                                              \
            total = fold;                                                                           \
        }                                                                                           \
        *(type *)to = total;                                                                        \
    }                                                                                               \
    static void name##_column(void *to, const void *from, int64_t count) {                          \
        const type *x = from;                                                                       \
        type *o = to;                                                                               \
        for (int64_t i = 0; i < count; i++) {                                                       \
            type a = o[i], b = x[i];                                                                \
            o[i] = fold;                                                                            \
        }                                                                                           \
    }                                                                                               \
    static void name##_start(void *to, int64_t count) {                                             \
        for (int64_t i = 0; i < count; i++)                                                         \
            ((type *)to)[i] = first;                                                                \
    }
#define R(name) \
    { name##_row, name##_column, name##_start }

REDUCER(sum_i64, uint64_t, 0, a + b)
REDUCER(sum_c128, c128, 0, a + b)
REDUCER(prod_i64, uint64_t, 1, a *b)
REDUCER(prod_c128, c128, 1, a *b)
REDUCER(max_i64, int64_t, INT64_MIN, (a > b ? a : b))
REDUCER(max_u64, uint64_t, 0, (a > b ? a : b))
REDUCER(min_i64, int64_t, INT64_MAX, (a < b ? a : b))
REDUCER(min_u64, uint64_t, UINT64_MAX, (a < b ? a : b))
REDUCER(any_i64, int64_t, 0, ((a | b) != 0))
REDUCER(all_i64, int64_t, 1, (a != 0 && b != 0))

/* Of the rows that share the rule and the kernel below: what their results are. */
const struct tu_reduction tu_sum_detail = { TU_FOLD_SUM, R(sum_i64), .c128 = R(sum_c128), .widen = true };
const struct tu_reduction tu_mean_detail = { TU_FOLD_SUM, .c128 = R(sum_c128), .float_only = true, .mean = true };
const struct tu_reduction tu_prod_detail = { TU_FOLD_PRODUCT, R(prod_i64), .c128 = R(prod_c128), .widen = true };
const struct tu_reduction tu_amax_detail = { TU_FOLD_MAXIMUM, R(max_i64), R(max_u64), .no_empty = true };
const struct tu_reduction tu_amin_detail = { TU_FOLD_MINIMUM, R(min_i64), R(min_u64), .no_empty = true };
const struct tu_reduction tu_any_detail = { .i64 = R(any_i64), .to_bool = true };
const struct tu_reduction tu_all_detail = { .i64 = R(all_i64), .to_bool = true };

static const tu_fold_kernels *reducer_for(const reduction *r, tutti_dtype compute) {
    switch (compute) {
    case TUTTI_F32:
    case TUTTI_F64:
        return &tu_tensor_kernels_get()->folds[tu_float_index(compute)][r->floats];
    case TUTTI_I64:
        return &r->i64;
    case TUTTI_U64:
        return r->u64.row != NULL ? &r->u64 : &r->i64;
    default:
        return &r->c128;
    }
}

/* ---- (outer, reduced, inner) ---- */

typedef struct fold {
    const tu_fold_kernels *r;
    size_t size;
    int64_t outer, reduced, inner;
    const char *from;
    char *to;
} fold;

#define ROWS 64 /* rows of one first-level column sum */

/* One outer index, columns [begin, end): blocks of rows fold into a buffer, the buffers into the result. */
static void fold_columns(const fold *f, int64_t outer, int64_t begin, int64_t end) {
    _Alignas(64) char buffer[4096];
    int64_t room = (int64_t)(sizeof buffer / f->size);
    const char *from = f->from + (size_t)(outer * f->reduced * f->inner) * f->size;
    char *to = f->to + (size_t)(outer * f->inner) * f->size;
    for (int64_t column = begin; column < end; column += room) {
        int64_t width = end - column < room ? end - column : room;
        char *target = to + (size_t)column * f->size;
        f->r->start(target, width);
        for (int64_t row = 0; row < f->reduced; row += ROWS) {
            int64_t last = row + ROWS < f->reduced ? row + ROWS : f->reduced;
            f->r->start(buffer, width);
            for (int64_t i = row; i < last; i++)
                f->r->column(buffer, from + (size_t)(i * f->inner + column) * f->size, width);
            f->r->column(target, buffer, width);
        }
    }
}

static void fold_outer(void *context, int64_t begin, int64_t end) {
    const fold *f = context;
    for (int64_t i = begin; i < end; i++) {
        if (f->inner > 1) {
            fold_columns(f, i, 0, f->inner);
            continue;
        }
        f->r->start(f->to + (size_t)i * f->size, 1);
        f->r->row(f->to + (size_t)i * f->size, f->from + (size_t)(i * f->reduced) * f->size, f->reduced);
    }
}

static void fold_inner(void *context, int64_t begin, int64_t end) {
    const fold *f = context;
    for (int64_t i = 0; i < f->outer; i++)
        fold_columns(f, i, begin, end);
}

#define PART 65536

/* A single long row: parts of fixed size, then their results. */
static void fold_parts(void *context, int64_t begin, int64_t end) {
    const fold *f = context;
    for (int64_t part = begin; part < end; part++) {
        int64_t first = part * PART, count = f->reduced - first < PART ? f->reduced - first : PART;
        f->r->start(f->to + (size_t)part * f->size, 1);
        f->r->row(f->to + (size_t)part * f->size, f->from + (size_t)first * f->size, count);
    }
}

static tutti_status fold_long(const fold *f) {
    int64_t parts = (f->reduced + PART - 1) / PART;
    char *partial = tu_block_alloc(tu_self(), (size_t)parts * f->size);
    if (partial == NULL)
        return tu_error_memory("a reduction's partial results", (size_t)parts * f->size);
    fold each = *f;
    each.to = partial;
    tu_parallel(parts, 1, fold_parts, &each);
    f->r->start(f->to, 1);
    f->r->row(f->to, partial, parts);
    tu_block_free(tu_self(), partial, (size_t)parts * f->size);
    return TUTTI_OK;
}

static tutti_status run_fold(const fold *f) {
    if (f->outer == 1 && f->inner == 1 && f->reduced > 2 * PART)
        return fold_long(f);
    int64_t work = f->reduced * f->inner;
    if (f->outer == 1 && f->inner > 1)
        tu_parallel(f->inner, 65536 / (f->reduced > 0 ? f->reduced : 1) + 64, fold_inner, (void *)f);
    else
        tu_parallel(f->outer, 32768 / (work > 0 ? work : 1) + 1, fold_outer, (void *)f);
    return TUTTI_OK;
}

/* ---- dimensions ---- */

/* The dimensions to reduce, as bits; none given means all. */
static tutti_status reduced_dims(const tu_call *call, const tt_dims *dims, unsigned *mask) {
    int ndim = call->inputs[0]->ndim;
    *mask = 0;
    if (dims->count <= 0) {
        *mask = (1u << ndim) - 1;
        return TUTTI_OK;
    }
    if (dims->count > TT_MAX_DIMS)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%d dimensions given", dims->count);
    for (int i = 0; i < dims->count; i++) {
        int dim;
        tutti_status status = tu_wrap_dim(call->entry->name, dims->at[i], ndim, &dim);
        if (status != TUTTI_OK)
            return status;
        if (*mask & 1u << dim)
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "dimension %d appears twice", dim);
        if (ndim > 0)
            *mask |= 1u << dim;
    }
    return TUTTI_OK;
}

tutti_status tu_reduce_shape(tu_call *call) {
    const tu_sum_dims_attributes *attributes = call->attributes; /* of every reduction */
    const reduction *r = call->entry->detail;
    const tt_tensor *x = call->inputs[0];
    unsigned mask;
    tutti_status status = reduced_dims(call, &attributes->dims, &mask);
    if (status != TUTTI_OK)
        return status;
    if (reducer_for(r, r->to_bool ? TUTTI_I64 : tu_compute_dtype(x->dtype))->row == NULL ||
        (r->float_only && !tu_is_float(x->dtype) && !tu_is_complex(x->dtype)))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tu_describe(x));
    tu_shape *result = &call->results[0];
    *result = (tu_shape){ .dtype = x->dtype, .device = call->device };
    if (r->to_bool)
        result->dtype = TUTTI_BOOL;
    else if (r->widen && (tu_is_integer(x->dtype) || x->dtype == TUTTI_BOOL))
        result->dtype = TUTTI_I64;
    int64_t count = 1;
    for (int i = 0; i < x->ndim; i++) {
        if (mask & 1u << i)
            count *= x->sizes[i];
        if (!(mask & 1u << i))
            result->sizes[result->ndim++] = x->sizes[i];
        else if (attributes->keep_dims)
            result->sizes[result->ndim++] = 1;
    }
    if (r->no_empty && count == 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "%s has no elements in the dimensions to reduce, and so no extremum", tu_describe(x));
    return tu_shape_contiguous(call->entry->name, result);
}

/* Sizes as alternating runs of kept and reduced dimensions; returns how many runs. */
static int runs_of(const tt_tensor *x, unsigned mask, int64_t *sizes, bool *reduced) {
    int count = 0;
    for (int i = 0; i < x->ndim; i++) {
        if (x->sizes[i] == 1)
            continue;
        bool is_reduced = (mask & 1u << i) != 0;
        if (count > 0 && reduced[count - 1] == is_reduced) {
            sizes[count - 1] *= x->sizes[i];
        } else {
            sizes[count] = x->sizes[i];
            reduced[count++] = is_reduced;
        }
    }
    return count;
}

/* A dense tensor of type `compute` with x's elements: x itself where it is one already. The caller drops it. */
static tt_tensor *dense_of(const tt_tensor *x, tutti_dtype compute, bool truth) {
    if (x->dtype == compute && x->flags & TU_CONTIGUOUS && !truth)
        return tu_tensor_hold((tt_tensor *)x);
    tu_shape shape = tu_shape_of(x);
    shape.dtype = truth ? TUTTI_BOOL : compute;
    if (tu_shape_contiguous("reduce", &shape) != TUTTI_OK)
        return NULL;
    tt_tensor *dense = tu_tensor_new(&shape);
    if (dense == NULL)
        return NULL;
    tu_copy_tensor(dense, x);
    if (!truth)
        return dense;
    tt_tensor *wide = dense_of(dense, compute, false); /* not zero, then 0 or 1 */
    tu_tensor_drop(dense);
    return wide;
}

/* Folds the last reduced run, again and again, from memory into smaller memory. */
static tutti_status fold_runs(const tu_fold_kernels *r, size_t size, const char *from, int count, int64_t *sizes,
                              bool *reduced, char *to) {
    char *temporary = NULL;
    size_t temporary_bytes = 0;
    tutti_status status = TUTTI_OK;
    for (;;) {
        int at = count - 1;
        while (at >= 0 && !reduced[at])
            at--;
        if (at < 0)
            break;
        int before = at - 1;
        while (before >= 0 && !reduced[before])
            before--;
        fold f = { r, size, 1, sizes[at], 1, from, to };
        for (int i = 0; i < count; i++)
            *(i < at ? &f.outer : i > at ? &f.inner : &(int64_t){ 0 }) *= sizes[i];
        if (before >= 0) {
            size_t bytes = (size_t)(f.outer * f.inner) * size;
            f.to = tu_block_alloc(tu_self(), bytes);
            if (f.to == NULL) {
                status = tu_error_memory("a reduction's partial results", bytes);
                break;
            }
            status = run_fold(&f);
            tu_block_free(tu_self(), temporary, temporary_bytes);
            temporary = f.to;
            temporary_bytes = bytes;
            from = temporary;
        } else {
            status = run_fold(&f);
        }
        if (status != TUTTI_OK || before < 0)
            break;
        /* The run is gone; its kept neighbours become one. */
        sizes[at] = 1;
        reduced[at] = false;
    }
    tu_block_free(tu_self(), temporary, temporary_bytes);
    return status;
}

tutti_status tu_reduce_cpu(tu_call *call) {
    const tu_sum_dims_attributes *attributes = call->attributes;
    const reduction *r = call->entry->detail;
    const tt_tensor *x = call->inputs[0];
    tt_tensor *out = call->outputs[0];
    tutti_dtype compute = r->to_bool ? TUTTI_I64 : tu_compute_dtype(x->dtype);
    const tu_fold_kernels *kernels = reducer_for(r, compute);
    unsigned mask;
    tutti_status status = reduced_dims(call, &attributes->dims, &mask);
    if (status != TUTTI_OK || out->numel == 0)
        return status;
    tt_tensor *dense = dense_of(x, compute, r->to_bool);
    if (dense == NULL)
        return TUTTI_ERROR_MEMORY;
    size_t size = tu_dtype_bytes[compute], bytes = (size_t)out->numel * size;
    char *to = out->dtype == compute ? tu_pointer(out) : tu_block_alloc(tu_self(), bytes);
    if (to == NULL) {
        tu_tensor_drop(dense);
        return tu_error_memory("a reduction's result", bytes);
    }
    int64_t sizes[TT_MAX_DIMS];
    bool reduced[TT_MAX_DIMS], any = false;
    int count = runs_of(x, mask, sizes, reduced);
    for (int i = 0; i < count; i++)
        any = any || reduced[i];
    if (any)
        status = fold_runs(kernels, size, tu_pointer(dense), count, sizes, reduced, to);
    else
        memcpy(to, tu_pointer(dense), bytes);
    if (status == TUTTI_OK && r->mean) {
        double scale = (double)out->numel / (double)x->numel;
        if (compute == TUTTI_F32)
            for (int64_t i = 0; i < out->numel; i++)
                ((float *)to)[i] = (float)((double)((float *)to)[i] * scale);
        else
            for (int64_t i = 0; i < out->numel * (compute == TUTTI_C128 ? 2 : 1); i++)
                ((double *)to)[i] *= scale;
    }
    tu_tensor_drop(dense);
    if (to != tu_pointer(out)) {
        if (status == TUTTI_OK)
            status = tutti_convert(to, compute, tu_pointer(out), out->dtype, (size_t)out->numel);
        tu_block_free(tu_self(), to, bytes);
    }
    return status;
}

/* ---- gradients and shorthands ---- */

/* All reductions have the same attributes, so that this serves each. A reduced tensor, with the reduced dimensions put
 * back as size 1. */
static tt_tensor *with_kept(const tu_gradient *gradient, tt_tensor *x) {
    const tu_sum_dims_attributes *attributes = gradient->attributes;
    const tu_shape *shape = tu_input_shape(gradient, 0);
    const tt_dims *dims = &attributes->dims;
    tt_dims kept = tt_dims_of(shape->ndim, shape->sizes);
    for (int i = 0; i < shape->ndim && dims->count <= 0; i++)
        kept.at[i] = 1;
    for (int i = 0; i < dims->count && shape->ndim > 0; i++)
        kept.at[dims->at[i] < 0 ? dims->at[i] + shape->ndim : dims->at[i]] = 1;
    return tt_view(x, kept);
}
void tu_sum_gradient(tu_gradient *gradient) {
    gradient->results[0] = tt_expand(with_kept(gradient, gradient->grads[0]), tu_input_dims(gradient, 0));
}
tt_tensor *tt_sum(tt_tensor *x) {
    return tt_sum_dims(x, tt_no_dims(), false);
}

void tu_mean_gradient(tu_gradient *gradient) {
    int64_t count = tu_shape_numel(tu_input_shape(gradient, 0)), outputs = gradient->grads[0]->numel;
    tt_tensor *share = tt_mul_scalar(gradient->grads[0], count == 0 ? 0 : (double)outputs / (double)count);
    gradient->results[0] = tt_expand(with_kept(gradient, share), tu_input_dims(gradient, 0));
}
tt_tensor *tt_mean(tt_tensor *x) {
    return tt_mean_dims(x, tt_no_dims(), false);
}

void tu_extremum_gradient(tu_gradient *gradient) {
    tt_tensor *x = tu_saved(gradient, TU_INPUT(0)), *y = with_kept(gradient, tu_saved(gradient, TU_OUTPUT(0)));
    if (y == NULL)
        return;
    tt_tensor *equal = tt_to(tt_eq(x, y), gradient->grads[0]->dtype);
    tt_tensor *share = tt_div(with_kept(gradient, gradient->grads[0]), tt_sum_to(equal, tt_sizes(y)));
    gradient->results[0] = tt_mul(equal, share);
}

/* The product of the others: the quotient where there is no 0; at a single 0 the product of the rest; else 0. */
void tu_prod_gradient(tu_gradient *gradient) {
    const tu_prod_attributes *attributes = gradient->attributes;
    tt_tensor *x = tu_saved(gradient, TU_INPUT(0)), *none = tt_number(0);
    tt_tensor *is_zero = tt_eq(x, none), *filled = tt_where(is_zero, tt_ones_like(x), x);
    tt_tensor *zeros = tt_sum_dims(is_zero, attributes->dims, true);
    tt_tensor *rest = tt_prod(filled, attributes->dims, true);
    tt_tensor *at_zero = tt_where(tt_eq(zeros, tt_number(1)), rest, none);
    tt_tensor *elsewhere = tt_where(tt_eq(zeros, none), tt_div(rest, filled), none);
    gradient->results[0] =
        tt_mul(with_kept(gradient, gradient->grads[0]), tu_conjugate(tt_where(is_zero, at_zero, elsewhere)));
}

/* ---- argmax ---- */

tutti_status tu_argmax_shape(tu_call *call) {
    const tu_argmax_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    int dim;
    tutti_status status = tu_wrap_dim("argmax", attributes->dim, x->ndim, &dim);
    if (status != TUTTI_OK)
        return status;
    if (tu_is_complex(x->dtype) || x->ndim == 0 || x->sizes[dim] == 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "dimension %d of %s has no largest element", dim,
                             tu_describe(x));
    call->results[0] = tu_shape_of(x);
    call->results[0].dtype = TUTTI_I64;
    call->results[0].sizes[dim] = 1;
    if (!attributes->keep_dims) {
        tu_shape *result = &call->results[0];
        memmove(result->sizes + dim, result->sizes + dim + 1, (size_t)(--result->ndim - dim) * sizeof result->sizes[0]);
    }
    return tu_shape_contiguous("argmax", &call->results[0]);
}
tutti_status tu_argmax_cpu(tu_call *call) {
    const tu_argmax_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    int dim = tu_dim(attributes->dim, call->inputs[0]->ndim);
    bool whole = !tu_is_float(x->dtype);
    tt_tensor *dense = dense_of(x, whole ? TUTTI_I64 : TUTTI_F64, false);
    if (dense == NULL)
        return TUTTI_ERROR_MEMORY;
    int64_t outer = 1, inner = 1, size = x->sizes[dim], *to = tu_pointer(call->outputs[0]);
    for (int i = 0; i < x->ndim; i++)
        *(i < dim ? &outer : i > dim ? &inner : &(int64_t){ 0 }) *= x->sizes[i];
    const double *f = tu_pointer(dense);
    const int64_t *n = tu_pointer(dense);
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t i = 0; i < inner; i++) {
            int64_t best = 0, base = o * size * inner + i;
            for (int64_t k = 1; k < size; k++) {
                int64_t at = base + k * inner, top = base + best * inner;
                if (whole ? n[at] > n[top] : f[at] > f[top] || (f[at] != f[at] && f[top] == f[top]))
                    best = k;
            }
            to[o * inner + i] = best;
        }
    }
    tu_tensor_drop(dense);
    return TUTTI_OK;
}

/* ---- composites ---- */

/* Narrow floats are squared in f32, where they do not overflow. At 0 the root is left out, so that its slope, which is
 * infinite there, meets no 0. */
tt_tensor *tt_norm(tt_tensor *x) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("norm", "x", x)) != TUTTI_OK)
        return NULL;
    tutti_dtype dtype = x->dtype;
    bool narrow = tu_is_float(dtype) && tu_dtype_bytes[dtype] < 4;
    tt_tensor *sum = tt_sum(tt_square(tt_abs(narrow ? tt_to(x, TUTTI_F32) : x))), *is_zero = tt_eq(sum, tt_number(0));
    tt_tensor *root = tt_where(is_zero, sum, tt_sqrt(tt_where(is_zero, tt_number(1), sum)));
    return narrow ? tt_to(root, dtype) : root;
}

tt_tensor *tt_sum_to(tt_tensor *x, tt_dims shape) {
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("sum_to", "x", x)) != TUTTI_OK)
        return NULL;
    int pad = x->ndim - shape.count;
    tt_dims dims = { .count = 0 };
    bool fits = pad >= 0 && shape.count >= 0;
    for (int i = 0; fits && i < x->ndim; i++) {
        int64_t wanted = i < pad ? 1 : shape.at[i - pad];
        if (i < pad || (wanted == 1 && x->sizes[i] != 1))
            dims.at[dims.count++] = i;
        else
            fits = wanted == x->sizes[i];
    }
    if (!fits) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "sum_to: %s was not broadcast from %s", tu_describe(x),
                tu_dims_text(shape.count, shape.at));
        return NULL;
    }
    if (dims.count == 0)
        return x;
    return tt_view(tt_sum_dims(x, dims, true), shape);
}
