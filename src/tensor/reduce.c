/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions over dimensions. A dense tensor of the compute type is seen as (outer, reduced, inner), one run of reduced
 * dimensions after the other. Sums go in two levels, so that long ones stay exact to a few units in the last place, and
 * in an order that depends on the shape alone, not on the threads.
 */
#include <complex.h>
#include <stdio.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/history.h"
#include "tensor/kernel/kernels.h"
#include "tensor/loop.h"
#include "tensor/on_device.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/stage.h"

typedef double _Complex c128;

typedef struct tu_reduction {
    const char *name; /* of its kernels on devices */
    int floats;       /* TU_FOLD_…: the kernels for floats are in the level's table */
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
            for (int lane = 0; lane < 16; lane++)                                                   \
                lanes[lane] = first;                                                                \
            for (; i + 16 <= end; i += 16)                                                          \
                for (int lane = 0; lane < 16; lane++) {                                             \
                    type held = lanes[lane], next = x[i + lane];                                    \
                    lanes[lane] = fold;                                                             \
                }                                                                                   \
            type held = first, next;                                                                \
            for (int lane = 0; lane < 16; lane++) {                                                 \
                next = lanes[lane];                                                                 \
                held = fold;                                                                        \
            }                                                                                       \
            for (; i < end; i++) {                                                                  \
                next = x[i];                                                                        \
                held = fold;                                                                        \
            }                                                                                       \
            next = held;                                                                            \
            held = total;                                                                           \
            total = fold;                                                                           \
        }                                                                                           \
        *(type *)to = total;                                                                        \
    }                                                                                               \
    static void name##_column(void *to, const void *from, int64_t count) {                          \
        const type *x = from;                                                                       \
        type *out = to;                                                                             \
        for (int64_t i = 0; i < count; i++) {                                                       \
            type held = out[i], next = x[i];                                                        \
            out[i] = fold;                                                                          \
        }                                                                                           \
    }                                                                                               \
    static void name##_start(void *to, int64_t count) {                                             \
        for (int64_t i = 0; i < count; i++)                                                         \
            ((type *)to)[i] = first;                                                                \
    }
#define FOLDERS(name) \
    { name##_row, name##_column, name##_start }

REDUCER(sum_i64, uint64_t, 0, held + next)
REDUCER(sum_c128, c128, 0, held + next)
REDUCER(prod_i64, uint64_t, 1, held *next)
REDUCER(prod_c128, c128, 1, held *next)
REDUCER(max_i64, int64_t, INT64_MIN, (held > next ? held : next))
REDUCER(max_u64, uint64_t, 0, (held > next ? held : next))
REDUCER(min_i64, int64_t, INT64_MAX, (held < next ? held : next))
REDUCER(min_u64, uint64_t, UINT64_MAX, (held < next ? held : next))
REDUCER(any_i64, int64_t, 0, ((held | next) != 0))
REDUCER(all_i64, int64_t, 1, (held != 0 && next != 0))

/* Of the rows that share the rule and the kernel below: what their results are. */
const struct tu_reduction tu_sum_detail = { "sum", TU_FOLD_SUM, FOLDERS(sum_i64), .c128 = FOLDERS(sum_c128),
                                            .widen = true };
const struct tu_reduction tu_mean_detail = { "sum", TU_FOLD_SUM, .c128 = FOLDERS(sum_c128), .float_only = true,
                                             .mean = true };
const struct tu_reduction tu_prod_detail = { "prod", TU_FOLD_PRODUCT, FOLDERS(prod_i64), .c128 = FOLDERS(prod_c128),
                                             .widen = true };
const struct tu_reduction tu_amax_detail = { "amax", TU_FOLD_MAXIMUM, FOLDERS(max_i64), FOLDERS(max_u64),
                                             .no_empty = true };
const struct tu_reduction tu_amin_detail = { "amin", TU_FOLD_MINIMUM, FOLDERS(min_i64), FOLDERS(min_u64),
                                             .no_empty = true };
const struct tu_reduction tu_any_detail = { "any", .i64 = FOLDERS(any_i64), .to_bool = true };
const struct tu_reduction tu_all_detail = { "all", .i64 = FOLDERS(all_i64), .to_bool = true };

static const tu_fold_kernels *reducer_for(const reduction *rule, tutti_dtype compute) {
    switch (compute) {
    case TUTTI_F32:
    case TUTTI_F64:
        return &tu_tensor_kernels_get()->folds[tu_float_index(compute)][rule->floats];
    case TUTTI_I64:
        return &rule->i64;
    case TUTTI_U64:
        return rule->u64.row != NULL ? &rule->u64 : &rule->i64;
    default:
        return &rule->c128;
    }
}

/* ---- (outer, reduced, inner) ---- */

typedef struct fold {
    const tu_fold_kernels *kernels;
    size_t size;
    int64_t outer, reduced, inner;
    const char *from;
    char *to;
    tu_device *device; /* NULL: the CPU */
    const char *name;  /* there, "sum" */
    const char *type;  /* "f32" */
    /* There, where `from` are narrow floats, which the kernels widen: "bf16"; and the bytes of one. Else NULL, and 0.
     */
    const char *narrow;
    size_t narrow_size;
    bool narrow_result; /* and `to` are such too */
} fold;

/* Memory for partial results, where the tensors are. */
typedef struct scratch {
    tu_device *device;
    tu_device_block block;
    size_t bytes;
} scratch;

static tutti_status scratch_take(scratch *taken, tu_device *device, size_t bytes) {
    *taken = (scratch){ .device = device, .bytes = bytes };
    if (device != NULL)
        return device->table->allocate(device->state, device->index, tu_device_stream(device), bytes, &taken->block);
    taken->block.data = tu_block_alloc(tu_self(), bytes);
    return taken->block.data != NULL ? TUTTI_OK : tu_error_memory("a reduction's partial results", bytes);
}

static void scratch_give(scratch *taken) {
    if (taken->device != NULL && taken->block.handle != NULL)
        taken->device->table->release(taken->device->state, taken->device->index, &taken->block);
    else if (taken->device == NULL)
        tu_block_free(tu_self(), taken->block.data, taken->bytes);
    *taken = (scratch){ 0 };
}

#define ROWS 64 /* rows of one first-level column sum */

/* One outer index, columns [begin, end): blocks of rows fold into a buffer, the buffers into the result. */
static void fold_columns(const fold *job, int64_t outer, int64_t begin, int64_t end) {
    _Alignas(64) char buffer[4096];
    int64_t room = (int64_t)(sizeof buffer / job->size);
    const char *from = job->from + (size_t)(outer * job->reduced * job->inner) * job->size;
    char *to = job->to + (size_t)(outer * job->inner) * job->size;
    for (int64_t column = begin; column < end; column += room) {
        int64_t width = end - column < room ? end - column : room;
        char *target = to + (size_t)column * job->size;
        job->kernels->start(target, width);
        for (int64_t row = 0; row < job->reduced; row += ROWS) {
            int64_t last = row + ROWS < job->reduced ? row + ROWS : job->reduced;
            job->kernels->start(buffer, width);
            for (int64_t i = row; i < last; i++)
                job->kernels->column(buffer, from + (size_t)(i * job->inner + column) * job->size, width);
            job->kernels->column(target, buffer, width);
        }
    }
}

static void fold_outer(void *context, int64_t begin, int64_t end) {
    const fold *job = context;
    for (int64_t i = begin; i < end; i++) {
        if (job->inner > 1) {
            fold_columns(job, i, 0, job->inner);
            continue;
        }
        job->kernels->start(job->to + (size_t)i * job->size, 1);
        job->kernels->row(job->to + (size_t)i * job->size, job->from + (size_t)(i * job->reduced) * job->size,
                          job->reduced);
    }
}

static void fold_inner(void *context, int64_t begin, int64_t end) {
    const fold *job = context;
    for (int64_t i = 0; i < job->outer; i++)
        fold_columns(job, i, begin, end);
}

#define PART 65536

/* A single long row: parts of fixed size, then their results. */
static void fold_parts(void *context, int64_t begin, int64_t end) {
    const fold *job = context;
    for (int64_t part = begin; part < end; part++) {
        int64_t first = part * PART, count = job->reduced - first < PART ? job->reduced - first : PART;
        job->kernels->start(job->to + (size_t)part * job->size, 1);
        job->kernels->row(job->to + (size_t)part * job->size, job->from + (size_t)first * job->size, count);
    }
}

static tutti_status fold_long(const fold *job) {
    int64_t parts = (job->reduced + PART - 1) / PART;
    char *partial = tu_block_alloc(tu_self(), (size_t)parts * job->size);
    if (partial == NULL)
        return tu_error_memory("a reduction's partial results", (size_t)parts * job->size);
    fold each = *job;
    each.to = partial;
    tu_parallel(parts, 1, fold_parts, &each);
    job->kernels->start(job->to, 1);
    job->kernels->row(job->to, partial, parts);
    tu_block_free(tu_self(), partial, (size_t)parts * job->size);
    return TUTTI_OK;
}

/* ---- on a device: the same order, by kernels ---- */

#define FOLD_THREADS 256
#define PARTS_THREADS 32 /* few, each of which has much to read: they are spread over processors */

static tutti_status launch_fold(const fold *job, const char *form, const char *type, int64_t blocks, unsigned threads,
                                const tu_launch_fold *flat) {
    char name[TU_KERNEL_NAME];
    tu_kernel_name_of(name, 4, (const char *const[]){ "fold", form, job->name, type });
    return tu_device_launch_blocks(job->device, name, blocks, threads, flat);
}

/* A thread has the columns of eight bytes. */
static int64_t columns_at_once(const fold *job) {
    size_t size = job->narrow != NULL ? job->narrow_size : job->size;
    return size < 8 ? (int64_t)(8 / size) : 1;
}

/* Rows in blocks of TU_FOLD_BLOCK elements, columns in blocks of TU_FOLD_ROWS; then the blocks' results. */
static tutti_status fold_on_device(const fold *job) {
    bool rows = job->inner == 1;
    int64_t part = rows ? TU_FOLD_BLOCK : TU_FOLD_ROWS, parts = (job->reduced + part - 1) / part;
    parts = parts < 1 ? 1 : parts;
    tu_launch_fold flat = {
        tu_place_of(job->from), tu_place_of(job->to), job->outer, job->reduced, job->inner, parts, part
    };
    int64_t units = job->outer * parts * job->inner, results = job->outer * job->inner;
    int64_t teams = rows ? FOLD_THREADS / (strcmp(job->type, "f32") == 0 ? 32 : 16) : FOLD_THREADS;
    scratch partial = { 0 };
    tutti_status status = parts > 1 ? scratch_take(&partial, job->device, (size_t)units * job->size) : TUTTI_OK;
    if (status == TUTTI_OK && parts > 1)
        flat.to = tu_place_of(partial.block.data);
    if (!rows && flat.from % 8 == 0 && job->inner % columns_at_once(job) == 0)
        units /= columns_at_once(job);
    if (status == TUTTI_OK)
        status = launch_fold(job, rows ? "rows" : "columns", job->narrow != NULL ? job->narrow : job->type,
                             (units + teams - 1) / teams, FOLD_THREADS, &flat);
    if (status == TUTTI_OK && parts > 1) {
        flat.from = flat.to;
        flat.to = tu_place_of(job->to);
        status = launch_fold(job, "parts", job->narrow_result ? job->narrow : job->type,
                             (results + PARTS_THREADS - 1) / PARTS_THREADS, PARTS_THREADS, &flat);
    }
    scratch_give(&partial);
    return status;
}

/* A single long row in parts of fixed size, as fold_long has it. */
static tutti_status fold_long_on_device(const fold *job) {
    int64_t full = job->reduced / PART, rest = job->reduced % PART;
    scratch partial;
    tutti_status status = scratch_take(&partial, job->device, (size_t)(full + 1) * job->size);
    if (status != TUTTI_OK)
        return status;
    fold each = *job, last = *job, all = *job;
    each.outer = full;
    each.reduced = PART;
    each.to = partial.block.data;
    last.from += (size_t)(full * PART) * (job->narrow != NULL ? job->narrow_size : job->size);
    last.reduced = rest;
    last.to = (char *)partial.block.data + (size_t)full * job->size;
    all.from = partial.block.data;
    all.reduced = full + (rest > 0);
    all.narrow = NULL;
    status = fold_on_device(&each);
    if (status == TUTTI_OK && rest > 0)
        status = fold_on_device(&last);
    if (status == TUTTI_OK)
        status = fold_on_device(&all);
    scratch_give(&partial);
    return status;
}

static tutti_status run_fold(const fold *job) {
    if (job->device != NULL)
        return job->outer == 1 && job->inner == 1 && job->reduced > 2 * PART ? fold_long_on_device(job)
                                                                             : fold_on_device(job);
    if (job->outer == 1 && job->inner == 1 && job->reduced > 2 * PART)
        return fold_long(job);
    int64_t work = job->reduced * job->inner;
    if (job->outer == 1 && job->inner > 1)
        tu_parallel(job->inner, 65536 / (job->reduced > 0 ? job->reduced : 1) + 64, fold_inner, (void *)job);
    else
        tu_parallel(job->outer, 32768 / (work > 0 ? work : 1) + 1, fold_outer, (void *)job);
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
    const reduction *rule = call->entry->detail;
    const tt_tensor *x = call->inputs[0];
    unsigned mask;
    tutti_status status = reduced_dims(call, &attributes->dims, &mask);
    if (status != TUTTI_OK)
        return status;
    if (reducer_for(rule, rule->to_bool ? TUTTI_I64 : tu_compute_dtype(x->dtype))->row == NULL ||
        (rule->float_only && !tu_is_float(x->dtype) && !tu_is_complex(x->dtype)))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for %s", tu_describe(x));
    tu_shape *result = &call->results[0];
    *result = (tu_shape){ .dtype = x->dtype, .device = call->device };
    if (rule->to_bool)
        result->dtype = TUTTI_BOOL;
    else if (rule->widen && (tu_is_integer(x->dtype) || x->dtype == TUTTI_BOOL))
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
    if (rule->no_empty && count == 0)
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
    if (tu_copy_tensor(dense, x) != TUTTI_OK) {
        tu_tensor_drop(dense);
        return NULL;
    }
    if (!truth)
        return dense;
    tt_tensor *wide = dense_of(dense, compute, false); /* not zero, then 0 or 1 */
    tu_tensor_drop(dense);
    return wide;
}

/* Folds the last reduced run, again and again, from memory into smaller memory. */
static tutti_status fold_runs(const fold *plan, int count, int64_t *sizes, bool *reduced) {
    const char *from = plan->from;
    scratch temporary = { 0 };
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
        fold job = *plan;
        job.outer = job.inner = 1;
        job.reduced = sizes[at];
        job.from = from;
        for (int i = 0; i < count; i++)
            *(i < at ? &job.outer : i > at ? &job.inner : &(int64_t){ 0 }) *= sizes[i];
        if (before >= 0) {
            scratch next;
            status = scratch_take(&next, plan->device, (size_t)(job.outer * job.inner) * plan->size);
            if (status != TUTTI_OK)
                break;
            job.to = next.block.data;
            status = run_fold(&job);
            scratch_give(&temporary);
            temporary = next;
            from = job.to;
        } else {
            status = run_fold(&job);
        }
        if (status != TUTTI_OK || before < 0)
            break;
        /* The run is gone; its kept neighbours become one. */
        sizes[at] = 1;
        reduced[at] = false;
    }
    scratch_give(&temporary);
    return status;
}

/* What is not reduced at all is copied. */
static tutti_status copy_plainly(const fold *plan, size_t bytes) {
    if (plan->device != NULL)
        return plan->device->table->copy(plan->device->state, plan->device->index, tu_device_stream(plan->device),
                                         plan->to, plan->from, bytes);
    memcpy(plan->to, plan->from, bytes);
    return TUTTI_OK;
}

/* The mean from the sum. */
static tutti_status scale_sums(const fold *plan, tutti_dtype compute, int64_t count, double scale) {
    if (compute == TUTTI_C128)
        count *= 2; /* of each both parts */
    if (plan->device != NULL) {
        tu_launch_line line = { .to = tu_place_of(plan->to), .total = count, .first = scale };
        return tu_device_launch(plan->device, compute == TUTTI_F32 ? "kernel_scale_f32" : "kernel_scale_f64", count,
                                TU_DEVICE_THREADS, &line);
    }
    if (compute == TUTTI_F32)
        for (int64_t i = 0; i < count; i++)
            ((float *)plan->to)[i] = (float)((double)((float *)plan->to)[i] * scale);
    else
        for (int64_t i = 0; i < count; i++)
            ((double *)plan->to)[i] *= scale;
    return TUTTI_OK;
}

/* Whether the one reduced run is of columns, and of so many that their parts are folded by a kernel of their own. */
static bool columns_have_parts(int count, const int64_t *sizes, const bool *reduced) {
    for (int i = 0; i + 1 < count; i++)
        if (reduced[i])
            return sizes[i] > TU_FOLD_ROWS;
    return false;
}

tutti_status tu_reduce_everywhere(tu_call *call) {
    const tu_sum_dims_attributes *attributes = call->attributes;
    const reduction *rule = call->entry->detail;
    const tt_tensor *x = call->inputs[0];
    tt_tensor *out = call->outputs[0];
    tutti_dtype compute = rule->to_bool ? TUTTI_I64 : tu_compute_dtype(x->dtype);
    const tu_fold_kernels *kernels = reducer_for(rule, compute);
    unsigned mask;
    tutti_status status = reduced_dims(call, &attributes->dims, &mask);
    if (status != TUTTI_OK || out->numel == 0)
        return status;
    int64_t sizes[TT_MAX_DIMS];
    bool reduced[TT_MAX_DIMS];
    int folds = 0, count = runs_of(x, mask, sizes, reduced);
    for (int i = 0; i < count; i++)
        folds += reduced[i];
    bool narrow = tu_on_device(x) && (x->dtype == TUTTI_BF16 || x->dtype == TUTTI_F16) && x->flags & TU_CONTIGUOUS &&
                  folds == 1 && !rule->to_bool; /* one fold, that reads them as they lie */
    bool narrow_result = narrow && !rule->mean && out->dtype == x->dtype && columns_have_parts(count, sizes, reduced);
    tt_tensor *dense = narrow ? tu_tensor_hold((tt_tensor *)x) : dense_of(x, compute, rule->to_bool),
              *staged = tu_stage_out(out, narrow_result ? (tutti_dtype)out->dtype : compute);
    if (dense == NULL || staged == NULL) {
        tu_tensor_drop(dense);
        tu_tensor_drop(staged);
        return TUTTI_ERROR_MEMORY;
    }
    bool is_u64 = compute == TUTTI_U64 && rule->u64.row != NULL;
    fold plan = { .kernels = kernels,
                  .size = tu_dtype_bytes[compute],
                  .from = tu_pointer(dense),
                  .to = tu_pointer(staged),
                  .device = tu_on_device(x) ? tu_device_of(x) : NULL,
                  .name = rule->name,
                  .type = compute == TUTTI_F32    ? "f32"
                          : compute == TUTTI_F64  ? "f64"
                          : is_u64                ? "u64"
                          : compute == TUTTI_C128 ? "c128"
                                                  : "i64",
                  .narrow = narrow ? tutti_dtype_name((tutti_dtype)x->dtype) : NULL,
                  .narrow_size = narrow ? tu_dtype_bytes[x->dtype] : 0,
                  .narrow_result = narrow_result };
    status = folds > 0 ? fold_runs(&plan, count, sizes, reduced) : copy_plainly(&plan, (size_t)out->numel * plan.size);
    if (status == TUTTI_OK && rule->mean)
        status = scale_sums(&plan, compute, out->numel, (double)out->numel / (double)x->numel);
    tu_tensor_drop(dense);
    return tu_stage_end(1, &out, &staged, status);
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
    tt_tensor *share = tt_div(with_kept(gradient, gradient->grads[0]), tt_sum_to(equal, tu_sizes(y)));
    gradient->results[0] = tt_mul(equal, share);
}

/* Of every element of the last dimension of x (rows, n), the product of the others, by multiplications alone: products
 * of pairs, of pairs of pairs and so on up, and each time the other half's product on the way down. */
static tt_tensor *products_of_others(tt_tensor *x) {
    enum {
        LEVELS = 63
    };
    tt_tensor *even[LEVELS], *odd[LEVELS];
    int64_t rows = tu_size(x, 0), count = tu_size(x, 1), width = 1;
    int levels = 0;
    while (width < count)
        width *= 2;
    tt_options options = TT_OPTIONS_INIT;
    options.device = x->device;
    tt_tensor *level = tt_cat(tt_tensors(x, tt_ones(tt_shape(rows, width - count), x->dtype, &options)), 1);
    for (; width > 1 && level != NULL; width /= 2) {
        tt_tensor *pairs = tt_view(level, tt_shape(rows, width / 2, 2));
        even[levels] = tt_select(pairs, 2, 0);
        odd[levels] = tt_select(pairs, 2, 1);
        level = tt_mul(even[levels], odd[levels]);
        levels++;
    }
    tt_tensor *others = tt_ones(tt_shape(rows, 1), x->dtype, &options);
    while (levels-- > 0 && tu_self()->pending == TUTTI_OK)
        others = tt_reshape(tt_stack(tt_tensors(tt_mul(others, odd[levels]), tt_mul(others, even[levels])), 2),
                            tt_shape(rows, -1));
    return tt_narrow(others, 1, 0, count);
}

/* The same over any dimensions of x: they are moved to the end, and back. */
static tt_tensor *products_over(tt_tensor *x, const tt_dims *dims) {
    if (x == NULL || x->numel == 0)
        return x;
    bool reduced[TT_MAX_DIMS] = { false };
    tt_dims order = { .count = x->ndim }, back = order, sizes = order;
    int64_t count = 1;
    for (int i = 0; i < dims->count; i++)
        reduced[tu_dim((int)dims->at[i], x->ndim)] = true;
    for (int pass = 0, at = 0; pass < 2; pass++)
        for (int i = 0; i < x->ndim; i++)
            if ((dims->count <= 0 || reduced[i]) == (pass == 1)) {
                order.at[at] = i;
                back.at[i] = at;
                sizes.at[at++] = x->sizes[i];
                count *= pass == 1 ? x->sizes[i] : 1;
            }
    tt_tensor *rows = tt_reshape(tt_permute(x, order), tt_shape(x->numel / count, count));
    return rows == NULL ? NULL : tt_permute(tt_view(products_of_others(rows), sizes), back);
}

/* The product of the others: the quotient where there is no 0; at a single 0 the product of the rest; else 0. */
void tu_prod_gradient(tu_gradient *gradient) {
    const tu_prod_attributes *attributes = gradient->attributes;
    tt_tensor *x = tu_saved(gradient, TU_INPUT(0)), *none = tt_number(0);
    if (!tu_self()->grad_disabled) { /* the choice between the cases has no gradient */
        gradient->results[0] =
            tt_mul(with_kept(gradient, gradient->grads[0]), tu_conjugate(products_over(x, &attributes->dims)));
        return;
    }
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
    if (tu_is_complex(x->dtype) || (x->ndim > 0 && x->sizes[dim] == 0))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "dimension %d of %s has no largest element", dim,
                             tu_describe(x));
    call->results[0] = tu_shape_of(x);
    call->results[0].dtype = TUTTI_I64;
    tu_shape *result = &call->results[0];
    if (x->ndim > 0) /* a single number is at place 0 */
        result->sizes[dim] = 1;
    if (x->ndim > 0 && !attributes->keep_dims)
        memmove(result->sizes + dim, result->sizes + dim + 1, (size_t)(--result->ndim - dim) * sizeof result->sizes[0]);
    return tu_shape_contiguous("argmax", result);
}
tutti_status tu_argmax_everywhere(tu_call *call) {
    const tu_argmax_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    int dim = tu_dim(attributes->dim, call->inputs[0]->ndim);
    bool whole = !tu_is_float(x->dtype);
    tt_tensor *dense = dense_of(x, whole ? TUTTI_I64 : TUTTI_F64, false);
    if (dense == NULL)
        return TUTTI_ERROR_MEMORY;
    int64_t outer = 1, inner = 1, size = x->ndim > 0 ? x->sizes[dim] : 1, *to = tu_pointer(call->outputs[0]);
    for (int i = 0; i < x->ndim; i++)
        *(i < dim ? &outer : i > dim ? &inner : &(int64_t){ 0 }) *= x->sizes[i];
    if (tu_on_device(x)) {
        tu_launch_fold flat = { tu_place_of(tu_pointer(dense)), tu_place_of(to), outer, size, inner, 1, size };
        tutti_status status = tu_device_launch(tu_device_of(x), whole ? "kernel_argmax_i64" : "kernel_argmax_f64",
                                               outer * inner, TU_DEVICE_THREADS, &flat);
        tu_tensor_drop(dense);
        return status;
    }
    const double *floats = tu_pointer(dense);
    const int64_t *integers = tu_pointer(dense);
    for (int64_t slice = 0; slice < outer; slice++) {
        for (int64_t i = 0; i < inner; i++) {
            int64_t best = 0, base = slice * size * inner + i;
            for (int64_t k = 1; k < size; k++) {
                int64_t at = base + k * inner, top = base + best * inner;
                if (whole ? integers[at] > integers[top]
                          : floats[at] > floats[top] || (floats[at] != floats[at] && floats[top] == floats[top]))
                    best = k;
            }
            to[slice * inner + i] = best;
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
    if (tu_is_complex(dtype))
        x = tt_view_as_real(tt_reshape(x, tt_shape(-1)));
    tt_tensor *sum = tt_sum(tt_square(narrow ? tt_to(x, TUTTI_F32) : x)), *is_zero = tt_eq(sum, tt_number(0));
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
    return tu_historian_table.own(tt_view(tt_sum_dims(x, dims, true), shape));
}
