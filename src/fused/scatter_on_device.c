/* SPDX-License-Identifier: Apache-2.0
 *
 * Matmul, then reduce-scatter on a device. Each rank makes the products for all ranks piece by piece into its stage, by
 * the vendor's library; beside the stream, as soon as a piece is there on all ranks, each adds its own rows of it, in
 * rank order. While one piece is added the next one is multiplied.
 */
#include <string.h>

#include "functional/symmetric.h"
#include "fused/device.h"
#include "fused/scaled_parts.h"
#include "tensor/convert.h"
#include "tensor/loop.h"
#include "tensor/stage.h"

typedef struct partials {
    tu_fused_run run;
    tu_fused_block block;
    int64_t rows, depth; /* of a block */
    bool last;           /* scattered along the columns of b */
    tu_matrix lhs;
    const tt_tensor *rhs;
    tutti_dtype dtype;
    bool scaled;
    const tt_tensor *row_scales, *column_scales, *bias, *whole; /* of scaled products, f32; the last two may be NULL */
    bool fast;                                                  /* of these, as of tu_device_product */
} partials;

/* ---- products ---- */

/* Rows [first, first + count) of the blocks of `ranks` ranks from `rank` on, one block behind the other. */
static tutti_status produce(const partials *job, int rank, int ranks, int64_t first, int64_t count, void *to) {
    size_t size = tu_dtype_bytes[job->dtype];
    int64_t columns = job->block.columns, row = (job->last ? 0 : rank * job->rows) + first,
            column = job->last ? rank * columns : 0;
    tu_device_product product = {
        .rows = count,
        .columns = columns,
        .depth = job->depth,
        .batch = ranks,
        .left = { (const char *)job->lhs.data + (size_t)(row * job->lhs.row) * size, job->lhs.row, job->lhs.column,
                  job->last ? 0 : job->rows * job->lhs.row },
        .right = { (const char *)tu_pointer(job->rhs) + (size_t)(column * job->rhs->strides[1]) * size,
                   job->rhs->strides[0], job->rhs->strides[1], job->last ? columns * job->rhs->strides[1] : 0 },
        .out = { to, columns, 1, count * columns },
        .dtype = job->dtype,
        .result = job->block.dtype,
        .fast = job->fast
    };
    if (!job->scaled)
        return tu_device_multiply(job->run.device, &product);
    bool by_rows = job->row_scales->numel > 1;
    tu_fused_scales scales = { .rows = (const float *)tu_pointer(job->row_scales) + (by_rows ? row : 0),
                               .by_rows = by_rows,
                               .columns = job->column_scales,
                               .bias = job->bias,
                               .whole = job->whole };
    return tu_fused_multiply_scaled(&job->run, &product, &scales);
}

/* For all ranks: in one call, or, where every row has its own scale, one for each. */
static tutti_status produce_for_all(const partials *job, int64_t first, int64_t count, char *to) {
    int size = job->run.size;
    tutti_status status = TUTTI_OK;
    if (!job->scaled || job->row_scales->numel == 1)
        return produce(job, 0, size, first, count, to);
    for (int rank = 0; rank < size && status == TUTTI_OK; rank++)
        status = produce(job, rank, 1, first, count, to + (size_t)(rank * count) * job->block.row_bytes);
    return status;
}

/* ---- pieces ---- */

/* A piece of all ranks' blocks has so many bytes at least. While one is added the next is multiplied; but a product
 * that is cut is slower, and what adds takes processors from it: more than two pieces cost more than they hide. */
#define PIECE_BYTES ((int64_t)64 << 20)
#define PIECES 2

static int64_t piece_rows(const partials *job) {
    int64_t bytes = (int64_t)job->block.row_bytes * job->rows * job->run.size, count = bytes / PIECE_BYTES;
    count = count < 1 ? 1 : count > PIECES ? PIECES : count;
    int64_t rows = (job->rows + count - 1) / count;
    return (rows + 127) / 128 * 128; /* whole tiles of the library's */
}

/* In test mode: everything at once, then the plain collective. */
static tutti_status make_plainly(partials *job, const tu_fused_signature *signature, char *to) {
    tt_tensor *out = job->run.call->outputs[0];
    tu_shape shape = {
        .dtype = out->dtype, .device = out->device, .ndim = 1, .sizes = { job->run.size * out->numel }, .strides = { 1 }
    };
    tutti_call call = TUTTI_CALL_INIT;
    char *stage;
    call.stream = job->run.stream;
    tutti_status status = tu_fused_open_scatter(&job->run, signature, 0, 0, 0, &stage);
    if (status != TUTTI_OK)
        return status;
    tt_tensor *all = tu_tensor_new(&shape);
    if (all == NULL)
        status = TUTTI_ERROR_MEMORY;
    if (status == TUTTI_OK && out->numel > 0)
        status = produce_for_all(job, 0, job->rows, tu_pointer(all));
    if (status == TUTTI_OK && out->numel > 0)
        status = tutti_reduce_scatter(job->run.group, tu_pointer(all), to, (size_t)out->numel, out->dtype,
                                      job->block.reduction, &call);
    tu_tensor_drop(all);
    return tu_fused_close_scatter(&job->run, status);
}

/* Everything in one kernel. */
static tu_device_together whole_product(const partials *job, char *to) {
    return (tu_device_together){ .scatters = true,
                                 .average = job->block.reduction == TUTTI_AVG,
                                 .rank = job->run.rank,
                                 .size = job->run.size,
                                 .rows = job->rows,
                                 .columns = job->block.columns,
                                 .depth = job->depth,
                                 .dtype = job->dtype,
                                 .right_dtype = job->dtype,
                                 .result = job->dtype,
                                 .left = { job->lhs.data },
                                 .left_row = job->lhs.row,
                                 .right = { tu_pointer(job->rhs), job->rhs->strides[0], job->rhs->strides[1], 0 },
                                 .sums = to,
                                 .part_bytes = (size_t)job->rows * job->block.row_bytes };
}

static void choose_together(partials *job, const tu_device_together *product) {
    job->run.together = false;
    if (!job->scaled && !job->last && job->lhs.column == 1)
        tu_fused_choose_together(&job->run, *product);
}

static tutti_status make_and_add(partials *job, const tu_fused_signature *signature, char *to) {
    char *stage;
    int64_t rows = job->block.row_bytes > 0 ? job->rows : 0, each = piece_rows(job);
    size_t row_bytes = job->block.row_bytes, size = (size_t)job->run.size;
    tu_device_together product = whole_product(job, to);
    choose_together(job, &product);
    tutti_status status =
        tu_fused_open_scatter(&job->run, signature, size * (size_t)rows * row_bytes, rows, job->block.columns, &stage);
    if (status != TUTTI_OK)
        return status;
    if (rows == 0) /* no meeting, and so no use of a stage */
        return TUTTI_OK;
    if (job->run.together)
        return tu_fused_scatter_together(&job->run, &product);
    for (int64_t first = 0; first < rows && status == TUTTI_OK; first += each) {
        int64_t count = rows - first < each ? rows - first : each;
        size_t offset = size * (size_t)first * row_bytes;
        status = produce_for_all(job, first, count, stage + offset);
        if (status == TUTTI_OK)
            status = tu_fused_add_beside(&job->run, offset, to + (size_t)first * row_bytes, count * job->block.columns,
                                         job->block.dtype, job->block.reduction, first + count == rows);
    }
    return tu_fused_close_scatter(&job->run, status);
}

/* ---- without others ---- */

/* out = out + x, both f32 and dense. */
static tutti_status add_to(const tu_call *call, tt_tensor *out, tt_tensor *x) {
    tt_tensor *inputs[] = { out, x };
    tu_call sum;
    tu_call_init(&sum, &tu_operator_add, 2, inputs, &(tu_add_attributes){});
    sum.device = call->device;
    sum.results[0].dtype = out->dtype;
    sum.outputs[0] = out;
    return tu_operator_add.kernels[TU_ON_CUDA](&sum);
}

/* One rank, or one whose other ranks are made up and have what this one has: the sum of so many equal blocks. */
static tutti_status make_alone(partials *job, char *to) {
    int ranks = job->run.size;
    int64_t count = job->rows * job->block.columns;
    tutti_dtype real = tu_fused_real_of(job->block.dtype, &count), wide = tu_compute_dtype(real);
    tutti_status status = produce(job, job->run.rank, 1, 0, job->rows, to);
    if (status != TUTTI_OK || ranks == 1 || job->block.reduction == TUTTI_AVG)
        return status;
    tu_shape shape = {
        .dtype = real, .device = job->run.device->number, .ndim = 1, .sizes = { count }, .strides = { 1 }
    };
    tu_storage *storage = tu_storage_wrap(to, (size_t)job->rows * job->block.row_bytes, NULL, NULL);
    if (storage != NULL)
        storage->device = shape.device;
    tt_tensor *made = tu_tensor_on(storage, &shape);
    shape.dtype = wide;
    tt_tensor *one = tu_tensor_new(&shape), *sum = tu_tensor_new(&shape);
    status = made == NULL || one == NULL || sum == NULL ? TUTTI_ERROR_MEMORY : tu_device_copy_tensor(one, made);
    if (status == TUTTI_OK)
        status = tu_device_copy_tensor(sum, made);
    for (int rank = 1; rank < ranks && status == TUTTI_OK; rank++)
        status = add_to(job->run.call, sum, one);
    if (status == TUTTI_OK)
        status = tu_device_copy_tensor(made, sum);
    tu_tensor_drop(sum);
    tu_tensor_drop(one);
    tu_tensor_drop(made);
    return status;
}

/* ---- the result ---- */

/* Rows of a block go by the scattered dimension first; in the result they lie where its dimensions say. */
static tutti_status put_in_order(const partials *job, const tt_tensor *rows) {
    const tu_fused_block *block = &job->block;
    tt_tensor *out = job->run.call->outputs[0];
    tu_shape from = tu_shape_of(rows), to = tu_shape_of(out);
    from.ndim = to.ndim = 4;
    from.offset = 0;
    memcpy(to.sizes, (int64_t[]){ block->before, block->chunk, block->behind, block->columns }, 4 * sizeof(int64_t));
    memcpy(from.sizes, to.sizes, 4 * sizeof(int64_t));
    memcpy(from.strides,
           (int64_t[]){ block->behind * block->columns, block->before * block->behind * block->columns, block->columns,
                        1 },
           4 * sizeof(int64_t));
    memcpy(
        to.strides,
        (int64_t[]){ block->chunk * block->behind * block->columns, block->behind * block->columns, block->columns, 1 },
        4 * sizeof(int64_t));
    tt_tensor *source = tu_tensor_alias(rows, &from), *target = tu_tensor_alias(out, &to);
    tutti_status status = source == NULL || target == NULL ? TUTTI_ERROR_MEMORY : tu_device_copy_tensor(target, source);
    tu_tensor_drop(source);
    tu_tensor_drop(target);
    return status;
}

static tutti_status scatter(partials *job, tutti_group *group, const tu_fused_signature *signature) {
    const tu_call *call = job->run.call;
    tt_tensor *out = call->outputs[0], *rows = NULL;
    tutti_status status = TUTTI_OK;
    if (job->block.before > 1) {
        tu_shape shape = {
            .dtype = out->dtype, .device = out->device, .ndim = 1, .sizes = { out->numel }, .strides = { 1 }
        };
        if ((rows = tu_tensor_new(&shape)) == NULL)
            status = TUTTI_ERROR_MEMORY;
    }
    if (status == TUTTI_OK)
        status = tu_fused_begin(&job->run, call, group);
    else
        return tu_fused_refuse(group, call->entry->name, status);
    char *to = rows != NULL ? tu_pointer(rows) : job->block.out;
    if (status == TUTTI_OK && job->run.state == NULL)
        status = out->numel > 0 ? make_alone(job, to) : TUTTI_OK;
    else if (status == TUTTI_OK)
        status = tu_fused_end(&job->run, tu_symm_test_mode() ? make_plainly(job, signature, to)
                                                             : make_and_add(job, signature, to));
    if (status == TUTTI_OK && rows != NULL)
        status = put_in_order(job, rows);
    tu_tensor_drop(rows);
    return status;
}

/* ---- operators ---- */

static tu_fused_signature sign_scatter(const tu_call *call, tutti_reduction reduction, int dim) {
    tu_fused_signature signature = tu_fused_sign(call->entry->name);
    tu_fused_sign_text(&signature, " ");
    tu_fused_sign_text(&signature, tutti_reduction_name(reduction));
    tu_fused_sign_number(&signature, " along dimension", dim);
    tu_fused_sign_tensor(&signature, " into", call->outputs[0]);
    tu_fused_sign_text(&signature, " on a device");
    return signature;
}

tutti_status tu_fused_matmul_reduce_scatter_cuda(tu_call *call) {
    const tu_fused_matmul_reduce_scatter_attributes *attributes = call->attributes;
    const tt_tensor *out = call->outputs[0];
    int dim = attributes->scatter_dim;
    tt_tensor *front = tu_fused_scattered_rows(call->inputs[0], dim);
    if (front == NULL)
        return tu_fused_refuse(attributes->group, call->entry->name, TUTTI_ERROR_MEMORY);
    partials job = { .run = { .call = call },
                     .block = tu_fused_block_of(out, dim, attributes->reduction, attributes->group),
                     .rows = tu_fused_row_count(out),
                     .depth = call->inputs[1]->sizes[0],
                     .last = dim == out->ndim - 1,
                     .lhs = tu_fused_rows(front),
                     .rhs = call->inputs[1],
                     .dtype = out->dtype };
    tu_fused_signature signature = sign_scatter(call, attributes->reduction, dim);
    tutti_status status = scatter(&job, attributes->group, &signature);
    tu_tensor_drop(front);
    return status;
}

tutti_status tu_fused_scaled_matmul_reduce_scatter_cuda(tu_call *call) {
    const tu_fused_scaled_matmul_reduce_scatter_attributes *attributes = call->attributes;
    const tt_tensor *out = call->outputs[0], *a_scale = call->inputs[2];
    partials job = { .run = { .call = call },
                     .block =
                         tu_fused_block_of(out, attributes->orig_scatter_dim, attributes->reduction, attributes->group),
                     .rows = tu_fused_row_count(out),
                     .depth = call->inputs[1]->sizes[0],
                     .dtype = call->inputs[0]->dtype,
                     .scaled = true,
                     .fast = attributes->use_fast_accum };
    tt_tensor *lhs = tu_rows_by_blocks(call->inputs[0], &job.block),
              *by_rows = a_scale->numel == 1 ? tu_stage_in(a_scale, TUTTI_F32) : tu_rows_by_blocks(a_scale, &job.block),
              *held[5] = { NULL };
    if (lhs != NULL && call->inputs[1]->dtype != lhs->dtype) { /* both are widened */
        tt_tensor *wide = tu_stage_in(lhs, TUTTI_F32);
        tu_tensor_drop(lhs);
        lhs = wide;
        held[0] = tu_stage_in(call->inputs[1], TUTTI_F32);
        job.dtype = TUTTI_F32;
    } else {
        held[0] = tu_tensor_hold(call->inputs[1]); /* as it lies */
    }
    bool good = lhs != NULL && by_rows != NULL;
    held[1] = good ? tu_stage_in(by_rows, TUTTI_F32) : NULL;
    for (int i = 3; i < 6 && good; i++)
        good = (held[i - 1] = tu_stage_in(call->inputs[i], TUTTI_F32)) != NULL || call->inputs[i] == NULL;
    tutti_status status;
    if (good && held[0] != NULL && held[1] != NULL) {
        job.lhs = lhs->ndim == 2 ? tu_fused_matrix(lhs) : (tu_matrix){ tu_pointer(lhs), job.depth, 1 };
        job.rhs = held[0];
        job.row_scales = held[1];
        job.column_scales = held[2];
        job.bias = held[3];
        job.whole = held[4];
        tu_fused_signature signature = sign_scatter(call, attributes->reduction, attributes->orig_scatter_dim);
        tu_fused_sign_text(&signature,
                           a_scale->numel == 1 ? ", with one scale for a" : ", with a scale for every row of a");
        status = scatter(&job, attributes->group, &signature);
    } else {
        status = tu_fused_refuse(attributes->group, call->entry->name, TUTTI_ERROR_MEMORY);
    }
    for (int i = 0; i < 5; i++)
        tu_tensor_drop(held[i]);
    tu_tensor_drop(by_rows);
    tu_tensor_drop(lhs);
    return status;
}
