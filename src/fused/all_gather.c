/* SPDX-License-Identifier: Apache-2.0
 *
 * All-gather, then matmul: shape rules, the consumer of the driver, gradients, public functions.
 */
#include <string.h>

#include <tutti/named.h>

#include "functional/registry.h"
#include "functional/symmetric.h"
#include "fused/operators.h"
#include "tensor/convert.h"
#include "tensor/loop.h"
#include "tensor/parallel.h"
#include "tensor/process.h"

/* ---- layouts ---- */

tt_tensor *tu_fused_front(const tt_tensor *x, int dim) {
    tu_shape shape = tu_shape_of(x);
    for (int i = dim; i > 0; i--) {
        shape.sizes[i] = x->sizes[i - 1];
        shape.strides[i] = x->strides[i - 1];
    }
    shape.sizes[0] = x->sizes[dim];
    shape.strides[0] = x->strides[dim];
    return tu_tensor_alias(x, &shape);
}

tutti_status tu_fused_front_strides(const char *who, tu_shape *shape, int dim) {
    tutti_status status = tu_shape_contiguous(who, shape); /* checks the bytes, too */
    if (status != TUTTI_OK || dim == 0 || dim == shape->ndim - 1)
        return status;
    int64_t stride = shape->sizes[shape->ndim - 1];
    for (int i = shape->ndim - 2; i >= 0; i--) {
        if (i == dim)
            continue;
        shape->strides[i] = stride;
        stride *= shape->sizes[i] > 0 ? shape->sizes[i] : 1;
    }
    shape->strides[dim] = stride;
    return TUTTI_OK;
}

int64_t tu_fused_row_count(const tt_tensor *x) {
    int64_t rows = 1;
    for (int i = 0; i < x->ndim - 1; i++)
        rows *= x->sizes[i];
    return rows;
}

bool tu_fused_is_rows(const tt_tensor *x) {
    return x->flags & TU_CONTIGUOUS || x->ndim == 2;
}

tu_matrix tu_fused_rows(const tt_tensor *x) {
    return x->ndim == 2 ? tu_fused_matrix(x) : (tu_matrix){ tu_pointer(x), x->sizes[x->ndim - 1], 1 };
}

/* Rows from which a shard is multiplied where it lies, if every product packs the right matrix. Fewer are put together,
 * so that it is packed once for all; with many, that would cost more than it saves. */
#define SHARD_ROWS 512

tu_panels tu_fused_panels(int ranks, int64_t rows, bool packed_once) {
    return tu_symm_test_mode() ? (tu_panels){ ranks, 1 }
           : packed_once       ? (tu_panels){ ranks, ranks }
                               : tu_panels_of(ranks, rows, SHARD_ROWS);
}

/* A job has so many multiplications at least, which take some ten microseconds. */
#define JOB_PRODUCTS ((int64_t)1 << 19)
#define JOB_ROWS 48            /* with a matrix that was packed once */
#define JOB_ROWS_OF_OTHERS 256 /* with one that every product packs or converts */

int64_t tu_fused_block_rows(const tu_right *right, int64_t rows, int64_t products_of_row) {
    int threads = tu_process_compute_threads();
    if (threads == 1 || rows == 0 || products_of_row < 1 || rows < JOB_PRODUCTS / products_of_row)
        return 0;
    int64_t least = right != NULL && right->packed != NULL ? JOB_ROWS : JOB_ROWS_OF_OTHERS,
            few = 1 + JOB_PRODUCTS / products_of_row, share = (rows + 2 * threads - 1) / (2 * threads);
    least = few > least ? few : least;
    return ((share > least ? share : least) + JOB_ROWS - 1) / JOB_ROWS * JOB_ROWS;
}

void tu_fused_fetch(char *to, const char *from, size_t bytes) {
    const size_t page = 4096, line = 64;
    for (; bytes >= 4 * page; bytes -= 4 * page, to += 4 * page, from += 4 * page)
        for (size_t i = 0; i < page; i += line)
            for (size_t j = 0; j < 4 * page; j += page)
                memcpy(to + j + i, from + j + i, line);
    memcpy(to, from, bytes);
}

typedef struct placing {
    char *to;
    int64_t stride, columns;
    tu_matrix from;
    size_t size;
} placing;

static void place_some(void *context, int64_t begin, int64_t end) {
    const placing *job = context;
    const char *from = job->from.data;
    if (job->from.column == 1 && job->from.row == job->columns && job->stride == job->columns) {
        size_t row_bytes = (size_t)job->columns * job->size, first = (size_t)begin * row_bytes;
        tu_fused_fetch(job->to + first, from + first, (size_t)(end - begin) * row_bytes);
        return;
    }
    for (int64_t i = begin; i < end; i++)
        tu_pack(job->to + (size_t)(i * job->stride) * job->size, from + (size_t)(i * job->from.row) * job->size,
                job->from.column, job->size, job->columns);
}

void tu_fused_place_rows(char *to, int64_t stride, tu_matrix from, int64_t rows, int64_t columns, size_t size) {
    placing job = { to, stride, columns, from, size };
    if (columns > 0)
        tu_parallel(rows, 1 + (1 << 18) / (columns * (int64_t)size), place_some, &job);
}

/* ---- shapes ---- */

tutti_status tu_fused_check_b(const tu_call *call, const tt_tensor *rhs) {
    return rhs->ndim == 2
               ? TUTTI_OK
               : tu_call_error(call, TUTTI_ERROR_ARGUMENT, "B must be a matrix, but is %s", tu_describe(rhs));
}

tutti_status tu_fused_check_shard(const tu_call *call, const tt_tensor *shard, int gather_dim) {
    if (shard->ndim < 2)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "A_shard must be a matrix, but is %s", tu_describe(shard));
    if (gather_dim < 0 || gather_dim >= shard->ndim)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "Invalid gather_dim: %d is not in [0, %d)", gather_dim,
                             shard->ndim);
    if (shard->dtype == TUTTI_BOOL)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for bool");
    return TUTTI_OK;
}

tutti_status tu_fused_gathered(const tu_call *call, int gather_dim, int ranks, tu_shape *result) {
    const tt_tensor *shard = call->inputs[0];
    *result = tu_shape_of(shard);
    result->offset = 0;
    if (__builtin_mul_overflow(shard->sizes[gather_dim], ranks, &result->sizes[gather_dim]))
        return tu_call_error(call, TUTTI_ERROR_RANGE, "%s from all ranks is too large", tu_describe(shard));
    return tu_fused_front_strides(call->entry->name, result, gather_dim);
}

tu_shape tu_fused_empty(const tu_call *call, tutti_dtype dtype) {
    return (tu_shape){ .dtype = dtype, .device = call->device, .ndim = 1, .sizes = { 0 }, .strides = { 1 } };
}

static tutti_status product_shape(const tu_call *call, const tu_shape *all, const tt_tensor *rhs, int gather_dim,
                                  tu_shape *result) {
    const tt_tensor *shard = call->inputs[0];
    tutti_status status = tu_fused_check_b(call, rhs);
    if (status != TUTTI_OK)
        return status;
    if (rhs->dtype != all->dtype)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "expected A_shard and B to have the same dtype, but got %s and %s",
                             tu_describe(shard), tu_describe(rhs));
    if (rhs->sizes[0] != all->sizes[all->ndim - 1])
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "A, gathered from %s along dimension %d, has %lld columns, and B, %s, must have as many "
                             "rows",
                             tu_describe(shard), gather_dim, (long long)all->sizes[all->ndim - 1], tu_describe(rhs));
    *result = *all;
    result->sizes[all->ndim - 1] = rhs->sizes[1];
    return tu_fused_front_strides(call->entry->name, result, gather_dim);
}

static tutti_status all_shapes(tu_call *call, int gather_dim, bool return_a, tutti_group *group) {
    const tt_tensor *shard = call->inputs[0];
    tu_shape all;
    tutti_status status = tu_fused_check_shard(call, shard, gather_dim);
    if (status == TUTTI_OK)
        status = tu_fused_gathered(call, gather_dim, tutti_group_size(group), &all);
    for (int i = 1; i < call->input_count && status == TUTTI_OK; i++)
        status = product_shape(call, &all, call->inputs[i], gather_dim, &call->results[i]);
    call->results[0] = return_a ? all : tu_fused_empty(call, shard->dtype);
    return status;
}

tutti_status tu_fused_all_gather_matmul_shape(tu_call *call) {
    const tu_fused_all_gather_matmul_attributes *attributes = call->attributes;
    return all_shapes(call, attributes->gather_dim, attributes->return_a, attributes->group);
}

static tutti_status check_contiguous(const tu_call *call) {
    const tt_tensor *shard = call->inputs[0];
    return shard->flags & TU_CONTIGUOUS ? TUTTI_OK
                                        : tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                                                        "A_shard must be contiguous, but %s is not: "
                                                        "fused_all_gather_matmul takes any strides",
                                                        tu_describe(shard));
}

tutti_status tu_fused_all_gather_matmul_native_shape(tu_call *call) {
    const tu_fused_all_gather_matmul_native_attributes *attributes = call->attributes;
    tutti_status status = all_shapes(call, 0, attributes->return_a, attributes->group);
    return status == TUTTI_OK ? check_contiguous(call) : status;
}

tutti_status tu_fused_all_gather_matmul_multimem_shape(tu_call *call) {
    const tu_fused_all_gather_matmul_multimem_attributes *attributes = call->attributes;
    tutti_status status = all_shapes(call, 0, false, attributes->group);
    return status == TUTTI_OK ? check_contiguous(call) : status;
}

/* ---- the products ---- */

typedef struct products {
    const tu_call *call;
    int64_t rows, depth; /* of a shard, as a matrix */
    tu_panels panels;
    tutti_dtype dtype;
    tu_right *rights; /* one per matrix */
    char *whole;      /* where A is put together, or NULL */
    tu_matrix *parts; /* where each rank's shard lies, if panels are multiplied without being put together; or NULL */
    char *fetched;    /* where a shard that another rank has staged is copied before a library reads it, or NULL */
    bool last;        /* gathered along the last dimension */
} products;

static bool by_shards(const products *job) {
    return job->panels.count == job->panels.ranks;
}

/* Puts a shard at its place in A: rows, or columns. */
static tutti_status place_shard(void *context, int rank, const tu_shard *shard) {
    const products *job = context;
    size_t size = tu_dtype_bytes[job->dtype];
    int64_t stride = job->last ? job->panels.ranks * job->depth : job->depth,
            first = job->last ? rank * job->depth : rank * job->rows * job->depth;
    tu_fused_place_rows(job->whole + (size_t)first * size, stride, tu_fused_shard(shard, job->rows, job->depth),
                        job->rows, job->depth, size);
    return TUTTI_OK;
}

/* Our own products take a panel's shards where they lie. */
static tutti_status note_shard(void *context, int rank, const tu_shard *shard) {
    const products *job = context;
    job->parts[rank] = tu_fused_shard(shard, job->rows, job->depth);
    return TUTTI_OK;
}

static tutti_status multiply_parts(const products *job, const tu_team_job *rows) {
    size_t size = tu_dtype_bytes[job->dtype];
    tutti_status status = TUTTI_OK;
    for (int i = 1; i < job->call->input_count && status == TUTTI_OK; i++) {
        const tu_right *right = &job->rights[i - 1];
        char *out = (char *)tu_pointer(job->call->outputs[i]) +
                    (size_t)((rows->first * job->rows + rows->row) * right->columns) * size;
        if (job->call->outputs[i]->numel > 0)
            status = tu_product_of_parts(job->dtype, job->parts + rows->first, job->rows, rows->row, rows->rows,
                                         right->columns, job->depth, right->matrix, out, right->columns);
    }
    return status;
}

/* `left` (rows, depth) with each matrix: rows of the results from `row` on. */
static tutti_status multiply(const products *job, tu_matrix left, int64_t rows, int64_t row) {
    size_t size = tu_dtype_bytes[job->dtype];
    tutti_status status = TUTTI_OK;
    for (int i = 1; i < job->call->input_count && status == TUTTI_OK; i++) {
        const tu_right *right = &job->rights[i - 1];
        char *out = (char *)tu_pointer(job->call->outputs[i]) + (size_t)(row * right->columns) * size;
        if (job->call->outputs[i]->numel > 0)
            status = tu_right_multiply(right, rows, left, out, right->columns);
    }
    return status;
}

/* The same where depth is a part of the matrices' rows, from `inner` on: products of other parts are added from the
 * second on. */
static tutti_status multiply_part(const products *job, tu_matrix left, int64_t rows, int64_t row, int64_t inner) {
    size_t size = tu_dtype_bytes[job->dtype];
    tutti_status status = TUTTI_OK;
    for (int i = 1; i < job->call->input_count && status == TUTTI_OK; i++) {
        tu_matrix right = job->rights[i - 1].matrix;
        int64_t columns = job->rights[i - 1].columns;
        right.data = (const char *)right.data + (size_t)(inner * right.row) * size;
        char *out = (char *)tu_pointer(job->call->outputs[i]) + (size_t)(row * columns) * size;
        if (job->call->outputs[i]->numel > 0)
            status = tu_gemm(job->dtype, rows, columns, job->depth, left, right, inner > 0 ? 1 : 0, out, columns, NULL);
    }
    return status;
}

/* Rows of one rank's shard, or of what was put together of several. */
static tutti_status multiply_rows(void *context, const tu_team_job *rows) {
    const products *job = context;
    size_t size = tu_dtype_bytes[job->dtype];
    tu_matrix left;
    int64_t first = job->last ? 0 : rows->first * job->rows;
    if (by_shards(job)) {
        left = tu_fused_shard(&rows->shards[0], job->rows, job->depth);
        if (job->fetched != NULL && rows->shards[0].staged) {
            tu_fused_fetch(job->fetched, left.data, (size_t)(job->rows * job->depth) * size);
            left.data = job->fetched;
        }
        left.data = (const char *)left.data + (size_t)(rows->row * left.row) * size;
        return job->last ? multiply_part(job, left, rows->rows, rows->row, rows->first * job->depth)
                         : multiply(job, left, rows->rows, first + rows->row);
    }
    if (job->parts != NULL)
        return multiply_parts(job, rows);
    int64_t depth = job->last ? job->panels.ranks * job->depth : job->depth;
    left = (tu_matrix){ job->whole + (size_t)((first + rows->row) * depth) * size, depth, 1 };
    return multiply(job, left, rows->rows, first + rows->row);
}

/* Accumulators of the BLAS are of the dtype itself: only there can products be added to what is rounded already. */
static bool adds_up(tutti_dtype dtype) {
    return dtype == TUTTI_F32 || dtype == TUTTI_F64 || tu_is_complex(dtype);
}

static tu_right right_of(const tt_tensor *rhs) {
    return (tu_right){ rhs->dtype, rhs->sizes[1], rhs->sizes[0], tu_fused_matrix(rhs), NULL, 0 };
}

static bool all_packed_once(const tu_call *call, int64_t rows) {
    bool all = true;
    for (int i = 1; i < call->input_count; i++) {
        tu_right right = right_of(call->inputs[i]);
        all = all && tu_right_pays(&right, rows);
    }
    return all;
}

static products products_of(const tu_call *call, const tt_tensor *front, bool last, bool return_a, tutti_group *group) {
    products job = { .call = call,
                     .rows = tu_fused_row_count(front),
                     .depth = front->sizes[front->ndim - 1],
                     .dtype = front->dtype,
                     .whole = return_a ? tu_pointer(call->outputs[0]) : NULL,
                     .last = last };
    job.panels = tu_fused_panels(tutti_group_size(group), job.rows, all_packed_once(call, job.rows));
    if (last && !tu_symm_test_mode()) /* columns: one by one, or all at once */
        job.panels.count = adds_up(job.dtype) ? job.panels.ranks : 1;
    return job;
}

static void close_rights(products *job) {
    size_t bytes = (size_t)(job->call->input_count - 1) * sizeof *job->rights;
    for (int i = 0; job->rights != NULL && i < job->call->input_count - 1; i++)
        tu_right_close(&job->rights[i]);
    tu_block_free(tu_self(), job->rights, bytes);
}

/* The matrices, with memory to pack those in that several shards are multiplied with. */
static tutti_status open_rights(products *job) {
    size_t bytes = (size_t)(job->call->input_count - 1) * sizeof *job->rights;
    tutti_status status = TUTTI_OK;
    if ((job->rights = tu_block_alloc(tu_self(), bytes)) == NULL)
        return tu_error_memory("the matrices of a fused operation", bytes);
    memset(job->rights, 0, bytes);
    for (int i = 0; i < job->call->input_count - 1 && status == TUTTI_OK; i++) {
        job->rights[i] = right_of(job->call->inputs[i + 1]);
        if (!job->last && by_shards(job) && job->rows > 0)
            status = tu_right_open(&job->rights[i], job->rows);
    }
    return status;
}

/* A library reads a shard row by row, which takes twice as long as to fetch one that stays in the second cache. */
#define MOST_FETCHED ((size_t)512 << 10)

static bool is_fetched(const products *job, size_t bytes) {
    return tu_gemm_is_of_library(job->dtype) && !job->last && bytes > 0 && bytes <= MOST_FETCHED &&
           tu_process_compute_threads() == 1;
}

/* Memory of a call: for panels of several ranks, unless they lie in A, where our own products need no more than where
 * the shards lie; or for one shard that is fetched. Returns its bytes. */
static size_t open_room(products *job, void **room, tutti_status *status) {
    bool apart = tu_product_is_ours(job->dtype) && !job->last && job->depth > 0;
    size_t ranks = (size_t)job->panels.ranks, shard = (size_t)(job->rows * job->depth) * tu_dtype_bytes[job->dtype],
           bytes = by_shards(job) ? shard
                   : apart        ? ranks * sizeof *job->parts
                                  : ranks * shard;
    *room = NULL;
    if (*status != TUTTI_OK || (by_shards(job) ? !is_fetched(job, shard) : job->whole != NULL))
        return 0;
    if ((*room = tu_block_alloc(tu_self(), bytes)) == NULL)
        *status = tu_error_memory("gathered shards", bytes);
    else if (by_shards(job))
        job->fetched = *room;
    else if (apart)
        job->parts = *room;
    else
        job->whole = *room;
    return bytes;
}

static void pack_rights(void *context) {
    const products *job = context;
    for (int i = 0; i < job->call->input_count - 1; i++)
        tu_right_pack(&job->rights[i]);
}

/* Columns of all matrices. */
static int64_t all_columns(const products *job) {
    int64_t columns = 0;
    for (int i = 0; i < job->call->input_count - 1; i++)
        columns += job->rights[i].columns;
    return columns;
}

static tu_fused_signature sign(const tu_call *call, int gather_dim) {
    tu_fused_signature signature = tu_fused_sign(call->entry->name);
    tu_fused_sign_number(&signature, " along dimension", gather_dim);
    tu_fused_sign_tensor(&signature, " of", call->inputs[0]);
    return signature;
}

static tutti_status run_products(tu_call *call, int gather_dim, bool return_a, tutti_group *group) {
    const tt_tensor *shard = call->inputs[0];
    bool last = gather_dim == shard->ndim - 1;
    tt_tensor *front = last ? tu_tensor_hold(call->inputs[0]) : tu_fused_front(shard, gather_dim);
    if (front == NULL)
        return tu_fused_refuse(group, call->entry->name, TUTTI_ERROR_MEMORY);
    products job = products_of(call, front, last, return_a, group);
    void *room;
    tu_fused_signature signature = sign(call, gather_dim);
    tutti_status status = open_rights(&job);
    size_t bytes = open_room(&job, &room, &status);
    tu_gather gather = { .who = call->entry->name,
                         .group = group,
                         .signature = &signature,
                         .count = 1,
                         .tensors = { front },
                         .in_order = last && by_shards(&job),
                         .consume = job.whole != NULL   ? place_shard
                                    : job.parts != NULL ? note_shard
                                                        : NULL,
                         .notes_places = job.parts != NULL,
                         .work = multiply_rows,
                         .rows = job.rows,
                         .same_rows = last,
                         .by_library = tu_gemm_is_of_library(job.dtype),
                         .prepare = pack_rights,
                         .panels = job.panels,
                         .context = &job };
    if (status == TUTTI_OK) {
        gather.block_rows = tu_fused_block_rows(&job.rights[0], job.rows, all_columns(&job) * job.depth);
        status = tu_gather_and_consume(&gather);
    } else {
        status = tu_fused_refuse(group, call->entry->name, status);
    }
    close_rights(&job);
    tu_block_free(tu_self(), room, bytes);
    tu_tensor_drop(front);
    return status;
}

tutti_status tu_fused_all_gather_matmul_cpu(tu_call *call) {
    const tu_fused_all_gather_matmul_attributes *attributes = call->attributes;
    return run_products(call, attributes->gather_dim, attributes->return_a, attributes->group);
}

tutti_status tu_fused_all_gather_matmul_native_cpu(tu_call *call) {
    const tu_fused_all_gather_matmul_native_attributes *attributes = call->attributes;
    return run_products(call, 0, attributes->return_a, attributes->group);
}

/* Every rank's rows go to all ranks' halves at once; then each rank multiplies what lies in its own. */
static tutti_status gather_by_multicast(tu_fused *state, const tu_call *call, const tu_fused_signature *signature) {
    const tt_tensor *shard = call->inputs[0];
    size_t count = (size_t)shard->numel, bytes = count * tu_dtype_bytes[shard->dtype] * (size_t)state->size;
    tutti_status status = tu_fused_publish(state, signature, TUTTI_OK);
    if (status == TUTTI_OK)
        status = tu_fused_agree(state, call->entry->name);
    if (status != TUTTI_OK)
        return status;
    if (state->memory == NULL || state->half_bytes < bytes)
        status = tu_fused_grow(state, bytes, 0);
    if (status == TUTTI_OK && bytes > 0)
        status = tutti_multimem_all_gather_out(state->group, tu_pointer(shard), tu_fused_half(state, state->rank),
                                               count, shard->dtype, NULL);
    if (status == TUTTI_OK) {
        products job = products_of(call, shard, false, false, state->group);
        job.whole = tu_fused_half(state, state->rank);
        job.panels.count = 1;
        status = open_rights(&job);
        if (status == TUTTI_OK)
            status = multiply_rows(&job, &(tu_team_job){ .ranks = state->size, .rows = state->size * job.rows });
        close_rights(&job);
    }
    state->gathers++;
    return status;
}

tutti_status tu_fused_all_gather_matmul_multimem_cpu(tu_call *call) {
    const tu_fused_all_gather_matmul_multimem_attributes *attributes = call->attributes;
    tutti_group *group = attributes->group;
    if (tutti_group_size(group) == 1 || tu_fused_is_fake(group))
        return run_products(call, 0, false, group);
    tu_fused *state;
    tu_fused_signature signature = sign(call, 0);
    tutti_status status = tu_fused_enter(group, &state);
    if (status != TUTTI_OK)
        return tu_fused_refuse(group, call->entry->name, status);
    status = gather_by_multicast(state, call, &signature);
    tu_fused_leave(state);
    return status;
}

/* ---- gradients: fused forms again ---- */

tt_tensor *tu_fused_adjoint(tt_tensor *x) {
    return tu_conjugate(tt_transpose(x, 0, 1));
}

tt_tensor *tu_fused_flat(tt_tensor *x, int dim) {
    if (x == NULL)
        return NULL;
    tt_dims order = tu_sizes(x);
    int64_t columns = x->sizes[x->ndim - 1], rows = tu_fused_row_count(x);
    for (int i = 0; i < order.count; i++)
        order.at[i] = i == 0 ? dim : i <= dim ? i - 1 : i;
    return tt_reshape(dim < x->ndim - 1 ? tt_permute(x, order) : x, tt_shape(rows, columns));
}

/* Of the gathered tensor: the gradients of all products times the adjoints of their matrices, and what arrived at A
 * itself, scattered. */
static tt_tensor *shard_gradient(tu_gradient *gradient, int gather_dim, tutti_group *group) {
    tt_tensor *grads[TU_FUSED_MOST_BS], *adjoints[TU_FUSED_MOST_BS], *result = NULL;
    size_t count = 0;
    for (int i = 1; i < gradient->input_count; i++) {
        if (gradient->grads[i] == NULL)
            continue;
        grads[count] = gradient->grads[i];
        adjoints[count++] = tu_fused_adjoint(tu_saved(gradient, TU_INPUT(i)));
    }
    if (count > 0)
        result = tt_fused_matmul_reduce_scatter(count == 1 ? grads[0] : tt_cat(tt_tensors_of(count, grads), -1),
                                                count == 1 ? adjoints[0] : tt_cat(tt_tensors_of(count, adjoints), 0),
                                                TUTTI_SUM, gather_dim, group);
    if (gradient->grads[0] == NULL || gradient->grads[0]->numel == 0)
        return result;
    tt_tensor *of_a = tt_reduce_scatter(tt_contiguous(gradient->grads[0]), TUTTI_SUM, gather_dim, group);
    return result != NULL ? tt_add(result, of_a) : of_a;
}

/* Of the matrices: A's adjoint times the gradients, where A is gathered once more, without being put together. */
static void matrix_gradients(tu_gradient *gradient, int gather_dim, tutti_group *group) {
    tt_tensor *grads[TU_FUSED_MOST_BS];
    int of[TU_FUSED_MOST_BS];
    size_t count = 0;
    bool last = gather_dim == tu_input_shape(gradient, 0)->ndim - 1;
    for (int i = 1; i < gradient->input_count; i++) {
        if (!gradient->needs[i] || gradient->grads[i] == NULL)
            continue;
        of[count] = i;
        grads[count++] = tu_fused_flat(gradient->grads[i], gather_dim);
    }
    if (count == 0)
        return;
    tt_tensor *turned = tu_fused_adjoint(tu_fused_flat(tu_saved(gradient, TU_INPUT(0)), gather_dim));
    tt_tensor_list results = tt_fused_all_gather_matmul(turned, tt_tensors_of(count, grads), last ? 0 : 1, group, NULL);
    for (size_t i = 0; i < results.count; i++)
        gradient->results[of[i]] = results.at[i];
}

static void products_gradient(tu_gradient *gradient, int gather_dim, tutti_group *group) {
    if (gradient->needs[0])
        gradient->results[0] = shard_gradient(gradient, gather_dim, group);
    matrix_gradients(gradient, gather_dim, group);
}

void tu_fused_all_gather_matmul_gradient(tu_gradient *gradient) {
    const tu_fused_all_gather_matmul_attributes *attributes = gradient->attributes;
    products_gradient(gradient, attributes->gather_dim, attributes->group);
}

void tu_fused_all_gather_matmul_native_gradient(tu_gradient *gradient) {
    const tu_fused_all_gather_matmul_native_attributes *attributes = gradient->attributes;
    products_gradient(gradient, 0, attributes->group);
}

void tu_fused_all_gather_matmul_multimem_gradient(tu_gradient *gradient) {
    const tu_fused_all_gather_matmul_multimem_attributes *attributes = gradient->attributes;
    products_gradient(gradient, 0, attributes->group);
}

/* ---- public ---- */

static const tt_tensor_list none = { 0, tu_nothing };

/* a_shard, then count of bs from `first` on. */
static tt_tensor_list with_shard(tt_tensor *shard, tt_tensor_list bs, size_t first, size_t count) {
    tt_tensor **list = tu_scope_memory((count + 1) * sizeof *list);
    if (list == NULL)
        return none;
    list[0] = shard;
    for (size_t i = 0; i < count; i++)
        list[i + 1] = bs.at[first + i];
    return tt_tensors_of(count + 1, list);
}

bool tu_fused_check_given(const char *who, const char *what, const tt_tensor *x) {
    if (x == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: argument %s is NULL, and a tensor is required there", who, what);
    return x != NULL;
}

bool tu_fused_check_bs(const char *who, tt_tensor_list bs) {
    bool good = bs.count > 0 && bs.at != NULL;
    if (!good)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: bs must be a list of at least one matrix", who);
    for (size_t i = 0; good && i < bs.count; i++) {
        good = bs.at[i] != NULL;
        if (!good)
            tu_fail(TUTTI_ERROR_ARGUMENT, "%s: entry %zu of argument bs is NULL, and a matrix is required there", who,
                    i);
    }
    return good;
}

/* Whether a call of that name can begin: its group, what is gathered, its matrices. */
static bool check_call(const char *who, tutti_group *group, const tt_tensor *a_shard, tt_tensor_list bs) {
    return tu_flight_check(who, group, false) && tu_fused_check_given(who, "a_shard", a_shard) &&
           tu_fused_check_bs(who, bs);
}

tt_tensor_list tt_fused_all_gather_matmul(tt_tensor *a_shard, tt_tensor_list bs, int gather_dim, tutti_group *group,
                                          tt_tensor **a_gathered) {
    if (!check_call("fused_all_gather_matmul", group, a_shard, bs))
        return none;
    tt_tensor **results = tu_scope_memory(bs.count * sizeof *results), *all = NULL;
    /* More matrices than a gradient can save go one bunch after the other. */
    for (size_t first = 0; results != NULL && first < bs.count; first += TU_FUSED_MOST_BS) {
        size_t count = bs.count - first < TU_FUSED_MOST_BS ? bs.count - first : TU_FUSED_MOST_BS;
        tt_tensor_list made = tu_fused_all_gather_matmul(with_shard(a_shard, bs, first, count), gather_dim,
                                                         a_gathered != NULL && first == 0, group);
        if (made.count == 0)
            return none;
        if (first == 0)
            all = made.at[0];
        memcpy(results + first, made.at + 1, count * sizeof *results);
    }
    if (results == NULL)
        return none;
    if (a_gathered != NULL)
        *a_gathered = all;
    return tt_tensors_of(bs.count, results);
}

tt_tensor *tt_fused_all_gather_matmul_native(tt_tensor *a_shard, tt_tensor *rhs, tutti_group *group,
                                             tt_tensor **a_gathered) {
    const char *who = "fused_all_gather_matmul_native";
    if (!tu_flight_check(who, group, false) || !tu_fused_check_given(who, "a_shard", a_shard) ||
        !tu_fused_check_given(who, "b", rhs))
        return NULL;
    tt_tensor_list made =
        tu_fused_all_gather_matmul_native(with_shard(a_shard, tt_tensors(rhs), 0, 1), a_gathered != NULL, group);
    if (made.count == 0)
        return NULL;
    if (a_gathered != NULL)
        *a_gathered = made.at[0];
    return made.at[1];
}

tt_tensor_list tt_fused_all_gather_matmul_multimem(tt_tensor *a_shard, tt_tensor_list bs, tutti_group *group) {
    if (!check_call("fused_all_gather_matmul_multimem", group, a_shard, bs))
        return none;
    if (bs.count > TU_FUSED_MOST_BS) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "fused_all_gather_matmul_multimem: %zu matrices are more than the %d of one call",
                bs.count, TU_FUSED_MOST_BS);
        return none;
    }
    tt_tensor_list made = tu_fused_all_gather_matmul_multimem(with_shard(a_shard, bs, 0, bs.count), group);
    return made.count == 0 ? none : tt_tensors_of(bs.count, made.at + 1);
}

/* ---- samples ---- */

static tt_tensor *normal(tu_sampler *sampler, tt_dims shape) {
    return sampler->make(sampler, TU_SAMPLE_NORMAL, shape, 0);
}

tt_tensor *tu_fused_all_gather_matmul_sample(tu_sampler *sampler) {
    tt_tensor *shard = normal(sampler, tt_shape(2, sampler->size, 3)), *one = normal(sampler, tt_shape(3, 4)),
              *other = normal(sampler, tt_shape(3, 2)), *all;
    tt_tensor_list made = tt_fused_all_gather_matmul(shard, tt_tensors(one, other), 1, sampler->group, &all);
    return made.count == 2 ? tt_cat(tt_tensors(made.at[0], made.at[1], all), 2) : NULL;
}

tt_tensor *tu_fused_all_gather_matmul_native_sample(tu_sampler *sampler) {
    tt_tensor *shard = tt_contiguous(normal(sampler, tt_shape(sampler->size, 3)));
    return tt_fused_all_gather_matmul_native(shard, normal(sampler, tt_shape(3, 4)), sampler->group, NULL);
}

tt_tensor *tu_fused_all_gather_matmul_multimem_sample(tu_sampler *sampler) {
    tt_tensor *shard = tt_contiguous(normal(sampler, tt_shape(sampler->size, 3)));
    tt_tensor_list made =
        tt_fused_all_gather_matmul_multimem(shard, tt_tensors(normal(sampler, tt_shape(3, 4))), sampler->group);
    return made.count == 1 ? made.at[0] : NULL;
}
