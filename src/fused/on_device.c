/* SPDX-License-Identifier: Apache-2.0
 *
 * The operators of this room on a device. Shape rules, gradients and public functions are the CPU's; here is what is
 * computed: products by the vendor's library that read the others' shards where they lie, several ranks' in one call
 * where their shards lie at equal distances.
 */
#include <stdlib.h>
#include <string.h>

#include <tutti/named.h>

#include "functional/symmetric.h"
#include "fused/device.h"
#include "fused/scaled_parts.h"
#include "tensor/convert.h"
#include "tensor/loop.h"
#include "tensor/stage.h"

/* ---- matrices ---- */

/* A handle on a matrix somewhere on the device, which must outlive it. NULL, with the error written, without memory. */
static tt_tensor *view_of(const tu_device *device, const void *data, tutti_dtype dtype, int64_t rows, int64_t columns,
                          int64_t row, int64_t column) {
    tu_shape shape = {
        .dtype = dtype, .device = device->number, .ndim = 2, .sizes = { rows, columns }, .strides = { row, column }
    };
    int64_t last = rows > 0 && columns > 0 ? (rows - 1) * row + (columns - 1) * column + 1 : 0;
    tu_storage *storage = tu_storage_wrap((void *)(uintptr_t)data, (size_t)last * tu_dtype_bytes[dtype], NULL, NULL);
    if (storage != NULL)
        storage->device = device->number;
    return tu_tensor_on(storage, &shape);
}

/* A tensor as a matrix of all its rows that the library can read: as it lies, or a dense copy. */
static tt_tensor *rows_of(tt_tensor *x) {
    bool lies = x->flags & TU_CONTIGUOUS || (x->ndim == 2 && x->strides[0] == 1 && x->strides[1] == x->sizes[0]) ||
                x->numel == 0;
    return lies ? tu_tensor_hold(x) : tu_stage_in(x, x->dtype);
}

static tu_device_matrix matrix_of(tu_matrix matrix) {
    return (tu_device_matrix){ matrix.data, matrix.row, matrix.column, 0 };
}

/* ---- products of shards ---- */

/* One right matrix with what belongs to it. */
typedef struct right_side {
    const tt_tensor *rhs;
    tt_tensor *out;                                /* rows of all ranks, dense */
    const tt_tensor *column_scales, *bias, *whole; /* f32, of scaled products; the last two may be NULL */
    bool fast;                                     /* of these, as of tu_device_product */
} right_side;

typedef struct shard_products {
    tu_fused_run run;
    tu_fused_gather gather;
    int64_t rows, depth; /* of a shard, as a matrix */
    tutti_dtype dtype;
    int count;
    right_side *rights;
    bool scaled;
    const tt_tensor *row_scales; /* of scaled products: one, or one for every row of A; NULL: part 1 of the shards */
} shard_products;

static tutti_status multiply(const shard_products *job, const right_side *right, int first, int ranks, tu_shard shard,
                             int64_t step);

/* Where left and right are of different types both are widened, a rank's shard at a time. */
static tutti_status multiply_wide(const shard_products *job, const right_side *right, int first, int ranks,
                                  tu_shard shard, int64_t step) {
    shard_products wide = *job;
    right_side of_wide = *right;
    tt_tensor *rhs = tu_stage_in(right->rhs, TUTTI_F32);
    tutti_status status = rhs != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    wide.dtype = TUTTI_F32;
    of_wide.rhs = rhs;
    for (int rank = first; rank < first + ranks && status == TUTTI_OK; rank++) {
        tu_matrix from = tu_fused_shard(&shard, job->rows, job->depth);
        tt_tensor *narrow =
            view_of(job->run.device, from.data, job->dtype, job->rows, job->depth, from.row, from.column);
        tt_tensor *left = narrow != NULL ? tu_stage_in(narrow, TUTTI_F32) : NULL;
        status = left != NULL ? multiply(&wide, &of_wide, rank, 1, (tu_shard){ tu_pointer(left), false }, 0)
                              : TUTTI_ERROR_MEMORY;
        tu_tensor_drop(left);
        tu_tensor_drop(narrow);
        shard.data = (const char *)shard.data + (size_t)step * tu_dtype_bytes[job->dtype];
    }
    tu_tensor_drop(rhs);
    return status;
}

/* `ranks` ranks' shards from `first` on, `step` elements apart, times one matrix. */
static tutti_status multiply(const shard_products *job, const right_side *right, int first, int ranks, tu_shard shard,
                             int64_t step) {
    int64_t columns = right->rhs->sizes[1];
    size_t size = tu_dtype_bytes[right->out->dtype];
    if ((tutti_dtype)right->rhs->dtype != job->dtype)
        return multiply_wide(job, right, first, ranks, shard, step);
    tu_device_product product = { .rows = job->rows,
                                  .columns = columns,
                                  .depth = job->depth,
                                  .batch = ranks,
                                  .left = matrix_of(tu_fused_shard(&shard, job->rows, job->depth)),
                                  .right = matrix_of(tu_fused_matrix(right->rhs)),
                                  .out = { (char *)tu_pointer(right->out) +
                                               (size_t)(first * job->rows * columns) * size,
                                           columns, 1, job->rows * columns },
                                  .dtype = job->dtype,
                                  .result = right->out->dtype,
                                  .fast = right->fast };
    product.left.step = step;
    if (!job->scaled)
        return tu_device_multiply(job->run.device, &product);
    bool by_rows = job->row_scales == NULL || job->row_scales->numel > 1;
    tu_fused_scales scales = { .rows = job->row_scales == NULL ? tu_fused_part_of(&job->gather, 1, first).data
                                                               : (const float *)tu_pointer(job->row_scales) +
                                                                     (by_rows ? first * job->rows : 0),
                               .by_rows = by_rows,
                               .columns = right->column_scales,
                               .bias = right->bias,
                               .whole = right->whole };
    return tu_fused_multiply_scaled(&job->run, &product, &scales);
}

/* How many ranks from `first` on, before `end`, have shards at equal distances, in *step elements. Scales of rows have
 * one place for each shard. */
static int run_of(const shard_products *job, int first, int end, int64_t *step) {
    int64_t size = tu_dtype_bytes[job->dtype];
    tu_shard shard = tu_fused_part_of(&job->gather, 0, first);
    int count = 1;
    *step = 0;
    for (int rank = first + 1; rank < end; rank++, count++) {
        tu_shard next = tu_fused_part_of(&job->gather, 0, rank);
        int64_t distance = (const char *)next.data - (const char *)shard.data;
        if (job->scaled && (job->row_scales == NULL || job->row_scales->numel > 1))
            break;
        if (next.turned != shard.turned || distance % ((rank - first) * size) != 0 ||
            (count > 1 && distance != (rank - first) * *step * size))
            break;
        *step = distance / ((rank - first) * size);
    }
    return count;
}

/* The shards of ranks [first, end). */
static tutti_status multiply_ranks(const shard_products *job, int first, int end) {
    tutti_status status = TUTTI_OK;
    while (first < end && status == TUTTI_OK) {
        int64_t step;
        int count = run_of(job, first, end, &step);
        for (int i = 0; i < job->count && status == TUTTI_OK; i++)
            if (job->rights[i].out->numel > 0)
                status = multiply(job, &job->rights[i], first, count, tu_fused_part_of(&job->gather, 0, first), step);
        first += count;
    }
    return status;
}

/* This rank's shard from where the caller has it, while the others meet; then theirs, whole runs of them. */
static tutti_status multiply_own_first(shard_products *job) {
    int rank = job->run.rank;
    tu_shard own = { tu_pointer(job->gather.parts[0].tensor), !(job->gather.parts[0].tensor->flags & TU_CONTIGUOUS) };
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < job->count && status == TUTTI_OK; i++)
        if (job->rights[i].out->numel > 0)
            status = multiply(job, &job->rights[i], rank, 1, own, 0);
    if (status == TUTTI_OK)
        status = tu_fused_await_others(&job->gather);
    if (status == TUTTI_OK)
        status = multiply_ranks(job, rank + 1, job->run.size);
    return status == TUTTI_OK ? multiply_ranks(job, 0, rank) : status;
}

/* Puts all ranks' shards at their places in `whole`: rows, or columns where the last dimension is gathered. */
static tutti_status place_shards(const shard_products *job, tt_tensor *whole, bool last) {
    const tu_device *device = job->run.device;
    int64_t stride = last ? job->run.size * job->depth : job->depth;
    tutti_status status = TUTTI_OK;
    if (whole->numel == 0)
        return TUTTI_OK;
    for (int rank = 0; rank < job->run.size && status == TUTTI_OK; rank++) {
        tu_shard shard = tu_fused_part_of(&job->gather, 0, rank);
        tu_matrix from = tu_fused_shard(&shard, job->rows, job->depth);
        char *to = (char *)tu_pointer(whole) +
                   (size_t)(rank * (last ? job->depth : job->rows * job->depth)) * tu_dtype_bytes[job->dtype];
        tt_tensor *source = view_of(device, from.data, job->dtype, job->rows, job->depth, from.row, from.column),
                  *target = view_of(device, to, job->dtype, job->rows, job->depth, stride, 1);
        status = source == NULL || target == NULL ? TUTTI_ERROR_MEMORY : tu_device_copy_tensor(target, source);
        tu_tensor_drop(source);
        tu_tensor_drop(target);
    }
    return status;
}

/* Gathered along the depth: A is put together, so that every product is one sum, and rounded once. */
static tutti_status multiply_whole(shard_products *job, tt_tensor *wanted) {
    tu_shape shape = { .dtype = job->dtype,
                       .device = job->run.device->number,
                       .ndim = 2,
                       .sizes = { job->rows, job->run.size * job->depth },
                       .strides = { job->run.size * job->depth, 1 } };
    tt_tensor *whole = wanted != NULL ? tu_tensor_hold(wanted) : tu_tensor_new(&shape);
    tutti_status status = whole != NULL ? place_shards(job, whole, true) : TUTTI_ERROR_MEMORY;
    for (int i = 0; i < job->count && status == TUTTI_OK; i++) {
        const right_side *right = &job->rights[i];
        tu_device_product product = { .rows = job->rows,
                                      .columns = right->rhs->sizes[1],
                                      .depth = job->run.size * job->depth,
                                      .batch = 1,
                                      .left = { tu_pointer(whole), job->run.size * job->depth, 1, 0 },
                                      .right = matrix_of(tu_fused_matrix(right->rhs)),
                                      .out = { tu_pointer(right->out), right->rhs->sizes[1], 1, 0 },
                                      .dtype = job->dtype,
                                      .result = job->dtype };
        if (right->out->numel > 0)
            status = tu_device_multiply(job->run.device, &product);
    }
    tu_tensor_drop(whole);
    return status;
}

/* Elements of a rank's product from which it is worth a call of its own: then it fills the device several times, and
 * this rank's can run while the others are waited for. */
#define OWN_ELEMENTS ((int64_t)1 << 22)

static bool pays_own_first(const shard_products *job) {
    int64_t columns = 0;
    for (int i = 0; i < job->count; i++)
        columns += job->rights[i].rhs->sizes[1];
    return job->rows * columns >= OWN_ELEMENTS && !tu_symm_test_mode();
}

/* The product with the first right matrix, as one kernel. */
static tu_device_together first_product(const shard_products *job) {
    const right_side *right = &job->rights[0];
    int64_t columns = right->rhs->sizes[1];
    tu_device_together product = { .rank = job->run.rank,
                                   .size = job->run.size,
                                   .rows = job->rows,
                                   .columns = columns,
                                   .depth = job->depth,
                                   .dtype = job->dtype,
                                   .right_dtype = right->rhs->dtype,
                                   .result = right->out->dtype,
                                   .left_row = job->depth,
                                   .right = matrix_of(tu_fused_matrix(right->rhs)) };
    if (job->scaled) {
        product.scales_rows = job->row_scales == NULL || job->row_scales->numel > 1;
        product.scales_columns = right->column_scales->numel > 1;
        product.fast = right->fast;
        product.column_scales = tu_pointer(right->column_scales);
        product.bias = right->bias != NULL ? tu_pointer(right->bias) : NULL;
        product.whole = right->whole != NULL ? tu_pointer(right->whole) : NULL;
    }
    for (int rank = 0; rank < job->run.size && rank < TU_TOGETHER_RANKS; rank++) {
        product.left[rank] = tu_pointer(job->gather.parts[0].tensor);
        if (job->row_scales != NULL) /* else the shards' come with them */
            product.row_scales[rank] =
                (const float *)tu_pointer(job->row_scales) + (product.scales_rows ? rank * job->rows : 0);
        product.out[rank] =
            (char *)tu_pointer(right->out) + (size_t)(rank * job->rows * columns) * tu_dtype_bytes[right->out->dtype];
    }
    return product;
}

static void choose_together(shard_products *job, bool last) {
    bool narrow = tu_dtype_bytes[job->dtype] == 1; /* what has scales, and what has not */
    job->run.together = false;
    if (!last && job->scaled == narrow && job->rights[0].out->numel > 0 &&
        (job->gather.parts[0].tensor->flags & TU_CONTIGUOUS))
        tu_fused_choose_together(&job->run, first_product(job));
}

/* The first right matrix in one kernel, the others behind it. */
static tutti_status multiply_together(shard_products *job) {
    tu_device_together product = first_product(job);
    tutti_status status = tu_fused_gather_together(&job->gather, &product);
    job->rights++;
    job->count--;
    if (status == TUTTI_OK && job->count > 0)
        status = multiply_ranks(job, 0, job->run.size);
    job->rights--;
    job->count++;
    return status;
}

static tutti_status multiply_gathered(shard_products *job, const tu_fused_signature *signature, bool last,
                                      tt_tensor *wanted) {
    tu_fused_gather *gather = &job->gather;
    gather->run = &job->run;
    gather->signature = signature;
    gather->own_first = !last && pays_own_first(job);
    choose_together(job, last);
    job->run.leaves = job->count == 1 && wanted == NULL; /* other ranks may want other things */
    tutti_status status = tu_fused_open_gather(gather);
    if (status != TUTTI_OK)
        return status;
    if (job->run.together)
        status = multiply_together(job);
    else if (last)
        status = multiply_whole(job, wanted);
    else
        status = gather->own_first ? multiply_own_first(job) : multiply_ranks(job, 0, job->run.size);
    if (status == TUTTI_OK && !last && wanted != NULL)
        status = place_shards(job, wanted, false);
    return tu_fused_close_gather(gather, status);
}

/* ---- all-gather, then matmul ---- */

static tu_fused_signature sign_gather(const tu_call *call, int gather_dim) {
    tu_fused_signature signature = tu_fused_sign(call->entry->name);
    tu_fused_sign_number(&signature, " along dimension", gather_dim);
    tu_fused_sign_tensor(&signature, " of", call->inputs[0]);
    tu_fused_sign_text(&signature, " on a device");
    return signature;
}

static tutti_status gather_matmul(tu_call *call, int gather_dim, bool return_a, tutti_group *group) {
    const tt_tensor *shard = call->inputs[0];
    bool last = gather_dim == shard->ndim - 1;
    right_side rights[TU_FUSED_MOST_BS] = { { NULL } };
    tt_tensor *front = last ? tu_tensor_hold(call->inputs[0]) : tu_fused_front(shard, gather_dim),
              *dense = front != NULL ? rows_of(front) : NULL;
    tutti_status status = dense != NULL ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    shard_products job = { .rows = tu_fused_row_count(shard),
                           .depth = shard->sizes[shard->ndim - 1],
                           .dtype = shard->dtype,
                           .count = call->input_count - 1,
                           .rights = rights,
                           .gather = { .count = 1, .parts = { { .tensor = dense } } } };
    for (int i = 0; i < job.count; i++)
        rights[i] = (right_side){ .rhs = call->inputs[i + 1], .out = call->outputs[i + 1] };
    if (status == TUTTI_OK) {
        tu_fused_signature signature = sign_gather(call, gather_dim);
        status = tu_fused_begin(&job.run, call, group);
        if (status == TUTTI_OK)
            status =
                tu_fused_end(&job.run, multiply_gathered(&job, &signature, last, return_a ? call->outputs[0] : NULL));
    } else {
        status = tu_fused_refuse(group, call->entry->name, status);
    }
    tu_tensor_drop(dense);
    tu_tensor_drop(front);
    return status;
}

tutti_status tu_fused_all_gather_matmul_cuda(tu_call *call) {
    const tu_fused_all_gather_matmul_attributes *attributes = call->attributes;
    return gather_matmul(call, attributes->gather_dim, attributes->return_a, attributes->group);
}

tutti_status tu_fused_all_gather_matmul_native_cuda(tu_call *call) {
    const tu_fused_all_gather_matmul_native_attributes *attributes = call->attributes;
    return gather_matmul(call, 0, attributes->return_a, attributes->group);
}

/* Every rank's rows go to all ranks' halves at once; then each rank multiplies what lies in its own. */
static tutti_status multiply_by_multicast(tu_fused_run *run, const tu_fused_signature *signature) {
    const tt_tensor *shard = run->call->inputs[0];
    int64_t rows = run->size * tu_fused_row_count(shard), depth = shard->sizes[shard->ndim - 1];
    size_t bytes = (size_t)run->size * (size_t)shard->numel * tu_dtype_bytes[shard->dtype];
    char *half;
    tutti_call options = TUTTI_CALL_INIT;
    options.stream = run->stream;
    tutti_status status = tu_fused_open_half(run, signature, bytes, &half);
    if (status != TUTTI_OK)
        return status;
    if (bytes > 0)
        status = tutti_multimem_all_gather_out(run->group, tu_pointer(shard), half, (size_t)shard->numel, shard->dtype,
                                               &options);
    for (int i = 1; i < run->call->input_count && status == TUTTI_OK; i++) {
        const tt_tensor *rhs = run->call->inputs[i], *out = run->call->outputs[i];
        tu_device_product product = { .rows = rows,
                                      .columns = rhs->sizes[1],
                                      .depth = depth,
                                      .batch = 1,
                                      .left = { half, depth, 1, 0 },
                                      .right = matrix_of(tu_fused_matrix(rhs)),
                                      .out = { tu_pointer(out), rhs->sizes[1], 1, 0 },
                                      .dtype = shard->dtype,
                                      .result = shard->dtype };
        if (out->numel > 0)
            status = tu_device_multiply(run->device, &product);
    }
    return status;
}

tutti_status tu_fused_all_gather_matmul_multimem_cuda(tu_call *call) {
    const tu_fused_all_gather_matmul_multimem_attributes *attributes = call->attributes;
    tutti_group *group = attributes->group;
    tu_fused_run run;
    if (tutti_group_size(group) == 1 || tu_fused_is_fake(group))
        return gather_matmul(call, 0, false, group);
    tu_fused_signature signature = sign_gather(call, 0);
    tutti_status status = tu_fused_begin(&run, call, group);
    return status == TUTTI_OK ? tu_fused_end(&run, multiply_by_multicast(&run, &signature)) : status;
}

/* ---- with scales ---- */

/* The f32 forms of what belongs to the right matrices, held until the call is enqueued. */
typedef struct scaled_inputs {
    right_side *rights;
    tt_tensor **held;
    int count, held_count;
} scaled_inputs;

static const tt_tensor *hold_f32(scaled_inputs *inputs, const tt_tensor *x, tutti_status *status) {
    tt_tensor *staged = tu_stage_in(x, TUTTI_F32);
    if (staged == NULL && x != NULL)
        *status = TUTTI_ERROR_MEMORY;
    inputs->held[inputs->held_count++] = staged;
    return staged;
}

static tutti_status open_rights(const tu_call *call, scaled_inputs *inputs) {
    const tu_fused_all_gather_scaled_matmul_attributes *attributes = call->attributes;
    tutti_status status = TUTTI_OK;
    int at = 2;
    for (int i = 0; i < inputs->count; i++) {
        tu_scaled_right right = tu_scaled_next(call, attributes->present.at[i], &at);
        inputs->rights[i] = (right_side){ .rhs = right.rhs,
                                          .out = call->outputs[i + 1],
                                          .column_scales = hold_f32(inputs, right.scale, &status),
                                          .bias = hold_f32(inputs, right.bias, &status),
                                          .whole = hold_f32(inputs, right.result_scale, &status),
                                          .fast = attributes->use_fast_accum.at[i] != 0 };
    }
    return status;
}

static tutti_status gather_scaled(tu_call *call, shard_products *job, tt_tensor *scales) {
    const tu_fused_all_gather_scaled_matmul_attributes *attributes = call->attributes;
    tu_fused_signature signature = sign_gather(call, attributes->gather_dim);
    tu_fused_sign_tensor(&signature, ", with a_scale", call->inputs[1]);
    if (job->row_scales == NULL)
        job->gather.parts[job->gather.count++].tensor = scales;
    tutti_status status = tu_fused_begin(&job->run, call, attributes->group);
    return status == TUTTI_OK
               ? tu_fused_end(&job->run,
                              multiply_gathered(job, &signature, false, attributes->return_a ? call->outputs[0] : NULL))
               : status;
}

tutti_status tu_fused_all_gather_scaled_matmul_cuda(tu_call *call) {
    const tu_fused_all_gather_scaled_matmul_attributes *attributes = call->attributes;
    const tt_tensor *shard = call->inputs[0];
    tu_shape all = tu_shape_of(shard);
    all.sizes[attributes->gather_dim] *= tutti_group_size(attributes->group);
    tu_scale_mode mode = tu_scale_mode_of(call->inputs[1], shard, &all);
    int count = (int)attributes->present.count;
    tt_tensor *front = tu_fused_front(shard, attributes->gather_dim), *dense = front != NULL ? rows_of(front) : NULL,
              *given = tu_front_scales(call->inputs[1], mode, attributes->gather_dim),
              *scales = given != NULL ? tu_stage_in(given, TUTTI_F32) : NULL;
    scaled_inputs inputs = { .rights = calloc((size_t)count, sizeof *inputs.rights),
                             .held = calloc((size_t)count * 3, sizeof *inputs.held),
                             .count = count };
    tutti_status status = inputs.rights == NULL || inputs.held == NULL
                              ? tu_error_memory("scaled matrices", (size_t)count * sizeof *inputs.rights)
                          : dense == NULL || scales == NULL ? TUTTI_ERROR_MEMORY
                                                            : open_rights(call, &inputs);
    shard_products job = { .rows = tu_fused_row_count(shard),
                           .depth = shard->sizes[shard->ndim - 1],
                           .dtype = shard->dtype,
                           .count = count,
                           .rights = inputs.rights,
                           .scaled = true,
                           .row_scales = mode == TU_SCALES_SHARDED ? NULL : scales,
                           .gather = { .count = 1, .parts = { { .tensor = dense } } } };
    status = status == TUTTI_OK ? gather_scaled(call, &job, scales)
                                : tu_fused_refuse(attributes->group, call->entry->name, status);
    for (int i = 0; i < inputs.held_count; i++)
        tu_tensor_drop(inputs.held[i]);
    free(inputs.held);
    free(inputs.rights);
    tu_tensor_drop(scales);
    tu_tensor_drop(given);
    tu_tensor_drop(dense);
    tu_tensor_drop(front);
    return status;
}
