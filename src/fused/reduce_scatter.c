/* SPDX-License-Identifier: Apache-2.0
 *
 * Matmul, then reduce-scatter: shape rule, the producer of the driver, gradient, public function.
 */
#include <string.h>

#include "functional/registry.h"
#include "fused/operators.h"
#include "kernel/kernel.h"
#include "tensor/parallel.h"
#include "tensor/process.h"
#include "tensor/stage.h"

/* ---- tiles ---- */

/* A tile is in the caches when it is added, and one of several of a chunk, so that most of a chunk goes beside sums. */
#define TILE_BYTES ((size_t)1 << 17)
#define TILES_OF_CHUNK 8
/* Rows of a product that packs the right matrix for them, or reads a large one that was packed once for all. The deeper
 * it is the less it matters that a chunk is in the caches when it is handed over: fewer are enough where it is low,
 * unless it is converted as well, and products of others' pay for more where it is high. With a small one that was
 * packed once a chunk has no more than its tiles. */
#define CHUNK_ROWS 512
#define LOW_DEPTH 1024
#define CHUNK_ROWS_OF_LOW_DEPTH 256
#define HIGH_DEPTH 4096
#define CHUNK_ROWS_OF_HIGH_DEPTH 1024
#define SMALL_PACKED ((size_t)1 << 20)  /* stays in a core's own caches */
#define REDUCED_BYTES ((size_t)1 << 18) /* that are worth a thread */

/* Narrow floats that no library takes. */
static bool is_converted(tutti_dtype dtype) {
    return tu_is_float(dtype) && !tu_product_is_ours(dtype) && !tu_gemm_is_of_library(dtype);
}

static int64_t least_rows(const tu_right *right) {
    if (right->depth < LOW_DEPTH && !is_converted(right->dtype))
        return CHUNK_ROWS_OF_LOW_DEPTH;
    return right->depth >= HIGH_DEPTH && !tu_product_is_ours(right->dtype) ? CHUNK_ROWS_OF_HIGH_DEPTH : CHUNK_ROWS;
}

static int64_t rows_of_packed(const tu_right *right) {
    return right->bytes <= SMALL_PACKED ? 1 : CHUNK_ROWS;
}

/* Whether the rows for one rank are several products: chunks, or the jobs of threads. */
static bool is_cut(int64_t rows, const tu_right *right) {
    return rows > 0 && (rows > least_rows(right) || tu_process_compute_threads() > 1);
}

tu_scatter tu_fused_scatter_of(const tu_fused_block *block, const char *who, tutti_group *group, int64_t rows,
                               const tu_right *right, bool by_rows) {
    int64_t tile = block->row_bytes == 0 ? rows : (int64_t)(TILE_BYTES / block->row_bytes),
            least = right->packed == NULL ? least_rows(right) : rows_of_packed(right);
    tile = tile < 1 ? 1 : tile;
    least = least < TILES_OF_CHUNK * tile ? TILES_OF_CHUNK * tile : least;
    tu_scatter scatter = { .who = who,
                           .group = group,
                           .rows = rows,
                           .tile_rows = tile,
                           .chunk_rows = (least + tile - 1) / tile * tile,
                           .row_bytes = block->row_bytes,
                           .panels = { block->size, block->size },
                           .direct = block->before == 1 ? block->out : NULL,
                           .takes_copies = block->before == 1 && tu_process_compute_threads() == 1 };
    if (by_rows && scatter.chunk_rows >= rows && right->packed == NULL)
        scatter.panels = tu_panels_of(block->size, rows, least);
    scatter.block_rows = tu_fused_block_rows(right, rows < scatter.chunk_rows ? rows : scatter.chunk_rows,
                                             block->columns * right->depth);
    return scatter;
}

typedef struct reduction_job {
    const tu_fused_block *block;
    int64_t first;
    const void *const *from;
} reduction_job;

/* Rows that lie one after the other in the result, too. */
static void reduce_run(const tu_fused_block *block, char *to, const void *const *from, int64_t skip, int64_t rows) {
    const void *shifted[block->size]; /* a pointer per rank */
    size_t offset = (size_t)skip * block->row_bytes;
    for (int i = 0; i < block->size; i++)
        shifted[i] = (const char *)from[i] + offset;
    tu_reduce(to, shifted, block->size, (size_t)(rows * block->columns), block->dtype, block->reduction, NULL, 0);
}

/* Row i of a block goes by the scattered dimension first; in the result it lies where its dimensions say. */
static int64_t place_of_row(const tu_fused_block *block, int64_t row) {
    int64_t behind = row % block->behind, before = row / block->behind % block->before,
            chunk = row / block->behind / block->before;
    return (before * block->chunk + chunk) * block->behind + behind;
}

static void reduce_rows(void *context, int64_t begin, int64_t end) {
    const reduction_job *job = context;
    const tu_fused_block *block = job->block;
    while (begin < end) {
        int64_t run = block->before == 1 ? end - begin : block->behind - (job->first + begin) % block->behind;
        run = run < end - begin ? run : end - begin;
        reduce_run(block, block->out + (size_t)place_of_row(block, job->first + begin) * block->row_bytes, job->from,
                   begin, run);
        begin += run;
    }
}

/* A share of the rows beside each copy. */
static void reduce_beside(const tu_fused_block *block, int64_t first, int64_t count, const void *const *from,
                          const tu_aside *copies, int copy_count) {
    const void *shifted[block->size]; /* a pointer per rank */
    size_t element = tu_dtype_bytes[block->dtype], all = (size_t)(count * block->columns), begin = 0;
    char *to = block->out + (size_t)first * block->row_bytes;
    for (int i = 0; i < copy_count; i++) {
        size_t end = i == copy_count - 1 ? all : all / (size_t)copy_count * (size_t)(i + 1);
        void *part = to + begin * element;
        for (int rank = 0; rank < block->size; rank++)
            shifted[rank] = (const char *)from[rank] + begin * element;
        tu_reduce_beside(&part, 1, shifted, block->size, end - begin, block->dtype, block->reduction, NULL, 0,
                         &copies[i]);
        begin = end;
    }
}

tutti_status tu_fused_reduce(const tu_fused_block *block, int64_t first, int64_t count, const void *const *from,
                             const tu_aside *copies, int copy_count) {
    if (copy_count > 0) {
        reduce_beside(block, first, count, from, copies, copy_count);
        return TUTTI_OK;
    }
    reduction_job job = { block, first, from };
    tu_parallel(count, 1 + (int64_t)REDUCED_BYTES / (int64_t)(block->row_bytes + 1), reduce_rows, &job);
    return TUTTI_OK;
}

/* ---- shape ---- */

tutti_status tu_fused_scattered(const tu_call *call, tu_shape *result, int dim, int ranks) {
    if (result->sizes[dim] % ranks != 0)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "dimension %d of the product, %s, is not divisible by the %d ranks of the group", dim,
                             tu_dims_text(result->ndim, result->sizes), ranks);
    result->sizes[dim] /= ranks;
    return tu_shape_contiguous(call->entry->name, result);
}

tutti_status tu_fused_matmul_reduce_scatter_shape(tu_call *call) {
    const tu_fused_matmul_reduce_scatter_attributes *attributes = call->attributes;
    const tt_tensor *lhs = call->inputs[0], *rhs = call->inputs[1];
    int ranks = tutti_group_size(attributes->group), dim = attributes->scatter_dim;
    if (lhs->ndim < 2)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "A_shard must be a matrix, but a is %s", tu_describe(lhs));
    if (dim < 0 || dim >= lhs->ndim)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "Invalid gather_dim: scatter_dim is %d and must be in [0, %d)",
                             dim, lhs->ndim);
    tutti_status status = tu_fused_check_b(call, rhs);
    if (status != TUTTI_OK)
        return status;
    if (attributes->reduction != TUTTI_SUM && attributes->reduction != TUTTI_AVG)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "reduce_op must be sum or avg, not %s",
                             tutti_reduction_name(attributes->reduction));
    if (lhs->dtype != rhs->dtype || lhs->dtype == TUTTI_BOOL ||
        !tutti_reduction_applies(attributes->reduction, lhs->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "expected a and b to have one dtype of numbers, but got %s and %s",
                             tu_describe(lhs), tu_describe(rhs));
    if (lhs->sizes[lhs->ndim - 1] != rhs->sizes[0])
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "%s and %s cannot be multiplied: the last size of a and the first of b differ",
                             tu_describe(lhs), tu_describe(rhs));
    tu_shape *result = &call->results[0];
    *result = tu_shape_of(lhs);
    result->offset = 0;
    result->sizes[lhs->ndim - 1] = rhs->sizes[1];
    return tu_fused_scattered(call, result, dim, ranks);
}

/* ---- the products ---- */

typedef struct partial_products {
    tu_fused_block block;
    tu_matrix lhs;
    tu_right rhs;
    int64_t rows; /* of a block */
    bool last;    /* scattered along the columns of b */
} partial_products;

static tutti_status produce(void *context, int rank, int ranks, int64_t first, int64_t count, void *to) {
    const partial_products *job = context;
    size_t size = tu_dtype_bytes[job->block.dtype];
    tu_matrix left = job->lhs;
    left.data = (const char *)left.data + (size_t)(((job->last ? 0 : rank * job->rows) + first) * left.row) * size;
    if (!job->last)
        return tu_right_multiply(&job->rhs, ranks * count, left, to, job->block.columns);
    tu_matrix right = job->rhs.matrix; /* its columns for this rank */
    right.data = (const char *)right.data + (size_t)(rank * job->block.columns * right.column) * size;
    return tu_gemm(job->block.dtype, count, job->block.columns, job->rhs.depth, left, right, 0, to, job->block.columns,
                   NULL);
}

static void pack_right(void *context) {
    const partial_products *job = context;
    tu_right_pack(&job->rhs);
}

static tutti_status accept(void *context, int64_t first, int64_t count, const void *const *from, const tu_aside *copies,
                           int copy_count) {
    const partial_products *job = context;
    return tu_fused_reduce(&job->block, first, count, from, copies, copy_count);
}

tu_fused_block tu_fused_block_of(const tt_tensor *out, int dim, tutti_reduction reduction, tutti_group *group) {
    tu_fused_block block = { .chunk = 1,
                             .before = 1,
                             .behind = 1,
                             .columns = out->sizes[out->ndim - 1],
                             .dtype = out->dtype,
                             .reduction = reduction,
                             .out = tu_pointer(out),
                             .size = tutti_group_size(group) };
    block.row_bytes = (size_t)block.columns * tu_dtype_bytes[out->dtype];
    if (dim == out->ndim - 1) {
        block.behind = tu_fused_row_count(out);
        return block;
    }
    block.chunk = out->sizes[dim];
    for (int i = 0; i < dim; i++)
        block.before *= out->sizes[i];
    for (int i = dim + 1; i < out->ndim - 1; i++)
        block.behind *= out->sizes[i];
    return block;
}

static partial_products partial_of(const tu_call *call, const tt_tensor *front, int dim, tutti_reduction reduction,
                                   tutti_group *group) {
    const tt_tensor *out = call->outputs[0], *rhs = call->inputs[1];
    return (partial_products){ .lhs = tu_fused_rows(front),
                               .rhs = { out->dtype, rhs->sizes[1], rhs->sizes[0], tu_fused_matrix(rhs), NULL, 0 },
                               .rows = tu_fused_row_count(out),
                               .last = dim == out->ndim - 1,
                               .block = tu_fused_block_of(out, dim, reduction, group) };
}

tt_tensor *tu_fused_scattered_rows(tt_tensor *lhs, int dim) {
    tt_tensor *front = dim == lhs->ndim - 1 ? tu_tensor_hold(lhs) : tu_fused_front(lhs, dim);
    if (front == NULL || tu_fused_is_rows(front))
        return front;
    tt_tensor *dense = tu_stage_in(front, front->dtype);
    tu_tensor_drop(front);
    return dense;
}

tutti_status tu_fused_matmul_reduce_scatter_cpu(tu_call *call) {
    const tu_fused_matmul_reduce_scatter_attributes *attributes = call->attributes;
    const char *who = call->entry->name;
    int dim = attributes->scatter_dim;
    tt_tensor *front = tu_fused_scattered_rows(call->inputs[0], dim), *out = call->outputs[0];
    if (front == NULL)
        return tu_fused_refuse(attributes->group, who, TUTTI_ERROR_MEMORY);
    partial_products job = partial_of(call, front, dim, attributes->reduction, attributes->group);
    tu_fused_signature signature = tu_fused_sign(who);
    tu_fused_sign_text(&signature, " ");
    tu_fused_sign_text(&signature, tutti_reduction_name(attributes->reduction));
    tu_fused_sign_number(&signature, " along dimension", dim);
    tu_fused_sign_tensor(&signature, " into", out);
    int64_t rows = out->numel > 0 ? job.rows : 0;
    tutti_status status = job.last || !is_cut(rows, &job.rhs) ? TUTTI_OK : tu_right_open(&job.rhs, rows);
    tu_scatter scatter = tu_fused_scatter_of(&job.block, who, attributes->group, rows, &job.rhs, !job.last);
    scatter.signature = &signature;
    scatter.by_library = tu_gemm_is_of_library(out->dtype);
    scatter.prepare = pack_right;
    scatter.produce = produce;
    scatter.accept = accept;
    scatter.context = &job;
    status = status == TUTTI_OK ? tu_produce_and_scatter(&scatter) : tu_fused_refuse(attributes->group, who, status);
    tu_right_close(&job.rhs);
    tu_tensor_drop(front);
    return status;
}

/* ---- gradient: fused forms again ---- */

/* With G the gathered gradient: of a, G times b's adjoint; of b, a's adjoint times G, or the adjoint of (G's adjoint
 * times a), which gathers without putting G together. */
void tu_fused_matmul_reduce_scatter_gradient(tu_gradient *gradient) {
    const tu_fused_matmul_reduce_scatter_attributes *attributes = gradient->attributes;
    tutti_group *group = attributes->group;
    int dim = attributes->scatter_dim;
    bool last = dim == tu_input_shape(gradient, 0)->ndim - 1;
    tt_tensor *grad = gradient->grads[0], *all = NULL;
    if (attributes->reduction == TUTTI_AVG)
        grad = tt_div_scalar(grad, tutti_group_size(group));
    if (gradient->needs[0]) {
        tt_tensor_list of_a =
            tt_fused_all_gather_matmul(grad, tt_tensors(tu_fused_adjoint(tu_saved(gradient, TU_INPUT(1)))), dim, group,
                                       gradient->needs[1] ? &all : NULL);
        gradient->results[0] = of_a.count == 1 ? of_a.at[0] : NULL;
    }
    if (!gradient->needs[1])
        return;
    tt_tensor *lhs = tu_fused_flat(tu_saved(gradient, TU_INPUT(0)), dim);
    if (gradient->needs[0]) {
        gradient->results[1] = tt_matmul(tu_fused_adjoint(lhs), tu_fused_flat(all, dim));
        return;
    }
    tt_tensor_list turned = tt_fused_all_gather_matmul(tu_fused_adjoint(tu_fused_flat(grad, dim)), tt_tensors(lhs),
                                                       last ? 0 : 1, group, NULL);
    gradient->results[1] = turned.count == 1 ? tu_fused_adjoint(turned.at[0]) : NULL;
}

tt_tensor *tt_fused_matmul_reduce_scatter(tt_tensor *lhs, tt_tensor *rhs, tutti_reduction reduction, int scatter_dim,
                                          tutti_group *group) {
    return tu_flight_check("fused_matmul_reduce_scatter", group, false)
               ? tu_fused_matmul_reduce_scatter(lhs, rhs, reduction, scatter_dim, group)
               : NULL;
}
