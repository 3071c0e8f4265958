/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused forms of tt_scaled_matmul: narrow matrices with scales.
 */
#include "tensor/scaled.h"

#include <stdio.h>
#include <string.h>

#include "functional/registry.h"
#include "fused/scaled_parts.h"
#include "tensor/convert.h"
#include "tensor/stage.h"

static const tt_tensor_list none = { 0, tu_nothing };

/* ---- scales of the left matrix ---- */

static bool leads(const tt_tensor *scale, int ndim, const int64_t *sizes) {
    return scale->ndim == ndim && scale->sizes[ndim - 1] == 1 &&
           memcmp(scale->sizes, sizes, (size_t)(ndim - 1) * sizeof *sizes) == 0;
}

/* In this order: what has one element may also be one for every row. */
tu_scale_mode tu_scale_mode_of(const tt_tensor *scale, const tt_tensor *shard, const tu_shape *all) {
    return leads(scale, shard->ndim, shard->sizes) ? TU_SCALES_SHARDED
           : scale->numel == 1                     ? TU_SCALE_WHOLE
           : leads(scale, all->ndim, all->sizes)   ? TU_SCALES_REPLICATED
                                                   : TU_NO_SCALE_MODE;
}

/* Scales that must be the same on all ranks, in a few words. */
static void sign_scales(tu_fused_signature *signature, const float *numbers, int64_t count) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &numbers[i], sizeof bits);
        hash = (hash ^ bits) * 0x100000001b3u;
    }
    char words[96];
    if (count == 1)
        snprintf(words, sizeof words, ", scale %.9g", (double)numbers[0]);
    else
        snprintf(words, sizeof words, ", scale of %lld rows with the check sum %016llx", (long long)count,
                 (unsigned long long)hash);
    tu_fused_sign_data(signature, words, &hash, sizeof hash);
}

/* ---- all-gather: the inputs of a call ---- */

enum {
    HAS_BIAS = 1,
    HAS_RESULT_SCALE = 2
};

tu_scaled_right tu_scaled_next(const tu_call *call, int64_t present, int *at) {
    tu_scaled_right right = { call->inputs[*at], call->inputs[*at + 1], NULL, NULL };
    *at += 2;
    if (present & HAS_BIAS)
        right.bias = call->inputs[(*at)++];
    if (present & HAS_RESULT_SCALE)
        right.result_scale = call->inputs[(*at)++];
    return right;
}

static tutti_status check_right(const tu_call *call, const tu_scaled_right *right, int64_t depth, tutti_dtype dtype) {
    const char *who = call->entry->name;
    const tt_tensor *rhs = right->rhs;
    tutti_status status = tu_fused_check_b(call, rhs);
    if (status != TUTTI_OK)
        return status;
    if (!tu_is_float(dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "the result's dtype must be a float, not %s",
                             tutti_dtype_name(dtype));
    if (tu_is_complex(rhs->dtype) || tu_is_complex(call->inputs[0]->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "not defined for complex matrices");
    if (rhs->sizes[0] != depth)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s and B, %s, cannot be multiplied",
                             tu_describe(call->inputs[0]), tu_describe(rhs));
    if ((status = tu_scaled_check(who, "B_scale", right->scale, 1, rhs->sizes[1])) != TUTTI_OK)
        return status;
    if (right->bias != NULL && (right->bias->ndim != 1 || right->bias->sizes[0] != rhs->sizes[1]))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "bias is %s and must have %lld entries",
                             tu_describe(right->bias), (long long)rhs->sizes[1]);
    if (right->result_scale != NULL && (right->result_scale->numel != 1 || right->result_scale->dtype != TUTTI_F32))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "result_scale is %s and must be one f32",
                             tu_describe(right->result_scale));
    return TUTTI_OK;
}

tutti_status tu_fused_all_gather_scaled_matmul_shape(tu_call *call) {
    const tu_fused_all_gather_scaled_matmul_attributes *attributes = call->attributes;
    const tt_tensor *shard = call->inputs[0], *scale = call->inputs[1];
    int dim = attributes->gather_dim, at = 2;
    tu_shape all;
    tutti_status status = tu_fused_check_shard(call, shard, dim);
    if (status == TUTTI_OK && dim == shard->ndim - 1)
        status = tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                               "Invalid gather_dim: scales are not supported where the last dimension is gathered");
    if (status == TUTTI_OK)
        status = tu_fused_gathered(call, dim, tutti_group_size(attributes->group), &all);
    if (status != TUTTI_OK)
        return status;
    if (scale->dtype != TUTTI_F32)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "A_scale is %s and must be f32", tu_describe(scale));
    if (tu_scale_mode_of(scale, shard, &all) == TU_NO_SCALE_MODE)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "Invalid scale shape for fp8 all-gather (shard shape: %s, scale shape: %s)",
                             tu_dims_text(shard->ndim, shard->sizes), tu_dims_text(scale->ndim, scale->sizes));
    for (size_t i = 0; i < attributes->present.count && status == TUTTI_OK; i++) {
        tu_scaled_right right = tu_scaled_next(call, attributes->present.at[i], &at);
        tutti_dtype dtype = attributes->out_dtypes.at[i] != 0 ? (tutti_dtype)attributes->out_dtypes.at[i]
                                                              : (tutti_dtype)right.rhs->dtype;
        status = check_right(call, &right, shard->sizes[shard->ndim - 1], dtype);
        if (status != TUTTI_OK)
            return status;
        tu_shape *result = &call->results[i + 1];
        *result = all;
        result->dtype = dtype;
        result->sizes[all.ndim - 1] = right.rhs->sizes[1];
        status = tu_fused_front_strides(call->entry->name, result, dim);
    }
    call->results[0] = attributes->return_a ? all : tu_fused_empty(call, shard->dtype);
    return status;
}

/* ---- all-gather: the products ---- */

typedef struct scaled_products {
    const tu_call *call;
    size_t count;
    tu_scaled *rights; /* one per product */
    int64_t rows, depth;
    tu_panels panels;
    tutti_dtype dtype;
    tu_scale_mode mode;
    const float *scales; /* of mode TU_SCALE_WHOLE and TU_SCALES_REPLICATED */
    float *gathered;     /* of mode TU_SCALES_SHARDED, where shards are put together: one for every row of A */
    char *whole;         /* where A is put together, or NULL */
} scaled_products;

static bool by_shards(const scaled_products *job) {
    return job->panels.count == job->panels.ranks;
}

/* `count` rows of A from `first` on; `sharded` are their scales, where ranks have their own. */
static tutti_status multiply_scaled(const scaled_products *job, int64_t first, int64_t count, tu_matrix left,
                                    const float *sharded) {
    const float *scales = job->mode == TU_SCALES_SHARDED      ? sharded
                          : job->mode == TU_SCALES_REPLICATED ? job->scales + first
                                                              : job->scales;
    tutti_status status = TUTTI_OK;
    for (size_t i = 0; i < job->count && status == TUTTI_OK; i++) {
        tt_tensor *out = job->call->outputs[i + 1];
        const tu_scaled *right = &job->rights[i];
        if (out->numel > 0)
            status = tu_scaled_rows(
                right, count, left, job->dtype, scales, job->mode == TU_SCALE_WHOLE ? 0 : 1,
                (char *)tu_pointer(out) + (size_t)(first * right->columns) * tu_dtype_bytes[out->dtype], out->dtype);
    }
    return status;
}

/* Puts a shard at its place in A, and its scales beside it. */
static tutti_status place_scaled(void *context, int rank, const tu_shard *shards) {
    const scaled_products *job = context;
    size_t size = tu_dtype_bytes[job->dtype];
    if (job->whole != NULL)
        tu_fused_place_rows(job->whole + (size_t)(rank * job->rows * job->depth) * size, job->depth,
                            tu_fused_shard(&shards[0], job->rows, job->depth), job->rows, job->depth, size);
    if (job->gathered != NULL && job->rows > 0)
        memcpy(job->gathered + rank * job->rows, shards[1].data, (size_t)job->rows * sizeof *job->gathered);
    return TUTTI_OK;
}

/* Rows of one rank's shard, or of what was put together of several. */
static tutti_status multiply_rows(void *context, const tu_team_job *rows) {
    const scaled_products *job = context;
    size_t size = tu_dtype_bytes[job->dtype];
    int64_t first = rows->first * job->rows + rows->row;
    tu_matrix left = { NULL, job->depth, 1 };
    const float *sharded = job->gathered != NULL ? job->gathered + first : NULL;
    if (by_shards(job)) {
        left = tu_fused_shard(&rows->shards[0], job->rows, job->depth);
        left.data = (const char *)left.data + (size_t)(rows->row * left.row) * size;
        sharded = job->mode == TU_SCALES_SHARDED ? (const float *)rows->shards[1].data + rows->row : NULL;
    } else {
        left.data = job->whole + (size_t)(first * job->depth) * size;
    }
    return multiply_scaled(job, first, rows->rows, left, sharded);
}

static tutti_status open_rights(scaled_products *job) {
    const tu_fused_all_gather_scaled_matmul_attributes *attributes = job->call->attributes;
    int at = 2;
    tutti_status status = TUTTI_OK;
    job->count = 0;
    for (size_t i = 0; i < attributes->present.count && status == TUTTI_OK; i++) {
        tu_scaled_right right = tu_scaled_next(job->call, attributes->present.at[i], &at);
        status = tu_scaled_open(&job->rights[i], right.rhs, right.scale, right.bias, right.result_scale);
        job->count += status == TUTTI_OK;
    }
    return status;
}

tt_tensor *tu_front_scales(const tt_tensor *scale, tu_scale_mode mode, int dim) {
    if (mode == TU_SCALE_WHOLE)
        return tu_stage_in(scale, TUTTI_F32);
    tt_tensor *front = tu_fused_front(scale, dim);
    if (front == NULL || mode == TU_SCALES_SHARDED)
        return front;
    tt_tensor *dense = tu_stage_in(front, TUTTI_F32);
    tu_tensor_drop(front);
    return dense;
}

static int64_t all_columns(const scaled_products *job) {
    int64_t columns = 0;
    for (size_t i = 0; i < job->count; i++)
        columns += job->rights[i].columns;
    return columns;
}

static tutti_status gather_scaled(scaled_products *job, const tt_tensor *front, const tt_tensor *scales) {
    const tu_fused_all_gather_scaled_matmul_attributes *attributes = job->call->attributes;
    tu_fused_signature signature = tu_fused_sign(job->call->entry->name);
    tu_fused_sign_number(&signature, " along dimension", attributes->gather_dim);
    tu_fused_sign_tensor(&signature, " of", job->call->inputs[0]);
    tu_fused_sign_tensor(&signature, ", with a_scale", job->call->inputs[1]);
    if (job->mode != TU_SCALES_SHARDED) {
        job->scales = tu_pointer(scales);
        sign_scales(&signature, job->scales, scales->numel);
    }
    tu_gather gather = { .who = job->call->entry->name,
                         .group = attributes->group,
                         .signature = &signature,
                         .count = job->mode == TU_SCALES_SHARDED ? 2 : 1,
                         .tensors = { front, scales },
                         .consume = job->whole != NULL || job->gathered != NULL ? place_scaled : NULL,
                         .work = multiply_rows,
                         .rows = job->rows,
                         .block_rows = tu_fused_block_rows(NULL, job->rows, all_columns(job) * job->depth),
                         .by_library = tu_gemm_is_of_library(TUTTI_F32),
                         .panels = job->panels,
                         .context = job };
    return tu_gather_and_consume(&gather);
}

/* Memory of one call: the right matrices, and what shards of few rows are put together in. */
typedef struct scaled_room {
    size_t rights, scales, panels;
    void *whole; /* NULL where the caller wants A */
} scaled_room;

static tutti_status make_room(scaled_products *job, scaled_room *room) {
    size_t rows = (size_t)(job->rows * job->panels.ranks);
    room->rights = job->count * sizeof *job->rights;
    room->scales = !by_shards(job) && job->mode == TU_SCALES_SHARDED ? rows * sizeof *job->gathered : 0;
    room->panels = !by_shards(job) && job->whole == NULL ? rows * (size_t)job->depth * tu_dtype_bytes[job->dtype] : 0;
    job->rights = tu_block_alloc(tu_self(), room->rights);
    job->gathered = room->scales > 0 ? tu_block_alloc(tu_self(), room->scales) : NULL;
    room->whole = room->panels > 0 ? tu_block_alloc(tu_self(), room->panels) : NULL;
    job->whole = room->panels > 0 ? room->whole : job->whole;
    job->count = 0; /* of those that are open */
    return job->rights != NULL && (room->scales == 0 || job->gathered != NULL) &&
                   (room->panels == 0 || room->whole != NULL)
               ? TUTTI_OK
               : tu_error_memory("scaled matrices", room->rights + room->scales + room->panels);
}

static void free_room(scaled_products *job, const scaled_room *room) {
    for (size_t i = 0; i < job->count; i++)
        tu_scaled_close(&job->rights[i]);
    tu_block_free(tu_self(), room->whole, room->panels);
    tu_block_free(tu_self(), job->gathered, room->scales);
    tu_block_free(tu_self(), job->rights, room->rights);
}

tutti_status tu_fused_all_gather_scaled_matmul_cpu(tu_call *call) {
    const tu_fused_all_gather_scaled_matmul_attributes *attributes = call->attributes;
    const tt_tensor *shard = call->inputs[0];
    tu_shape all = tu_shape_of(shard);
    int ranks = tutti_group_size(attributes->group);
    all.sizes[attributes->gather_dim] *= ranks;
    scaled_products job = { .call = call,
                            .count = attributes->present.count,
                            .rows = tu_fused_row_count(shard),
                            .depth = shard->sizes[shard->ndim - 1],
                            .dtype = shard->dtype,
                            .mode = tu_scale_mode_of(call->inputs[1], shard, &all),
                            .whole = attributes->return_a ? tu_pointer(call->outputs[0]) : NULL };
    job.panels = tu_fused_panels(ranks, job.rows, false);
    scaled_room room;
    tt_tensor *front = tu_fused_front(shard, attributes->gather_dim),
              *scales = tu_front_scales(call->inputs[1], job.mode, attributes->gather_dim);
    tutti_status status = make_room(&job, &room);
    if (status == TUTTI_OK)
        status = front == NULL || scales == NULL ? TUTTI_ERROR_MEMORY : open_rights(&job);
    status = status != TUTTI_OK ? tu_fused_refuse(attributes->group, call->entry->name, status)
                                : gather_scaled(&job, front, scales);
    free_room(&job, &room);
    tu_tensor_drop(front);
    tu_tensor_drop(scales);
    return status;
}

/* ---- all-gather: the public function ---- */

/* One entry for each of bs. */
static bool check_list(const char *what, size_t count, const void *at, size_t wanted) {
    if (count != wanted)
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "fused_all_gather_scaled_matmul: len(%s) must be the same as len(Bs): it is %zu, and there are %zu",
                what, count, wanted);
    else if (at == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "fused_all_gather_scaled_matmul: %s is a list of %zu at NULL", what, count);
    return count == wanted && at != NULL;
}

static bool check_option(const char *what, size_t count, const void *at, size_t wanted) {
    return count == 0 || check_list(what, count, at, wanted);
}

static bool check_scales(tt_tensor_list b_scales, size_t wanted) {
    bool good = check_list("B_scales", b_scales.count, b_scales.at, wanted);
    char entry[48];
    for (size_t i = 0; good && i < wanted; i++) {
        snprintf(entry, sizeof entry, "b_scales, entry %zu,", i);
        good = tu_fused_check_given("fused_all_gather_scaled_matmul", entry, b_scales.at[i]);
    }
    return good;
}

static bool check_lists(tt_tensor_list bs, tt_tensor_list b_scales, const tt_fused_scaled_options *options) {
    return tu_fused_check_bs("fused_all_gather_scaled_matmul", bs) && check_scales(b_scales, bs.count) &&
           check_option("biases", options->biases.count, options->biases.at, bs.count) &&
           check_option("result_scales", options->result_scales.count, options->result_scales.at, bs.count) &&
           check_option("out_dtypes", options->out_dtype_count, options->out_dtypes, bs.count) &&
           check_option("use_fast_accum", options->use_fast_accum_count, options->use_fast_accum, bs.count);
}

static tt_tensor *entry_of(tt_tensor_list list, size_t i) {
    return list.count > 0 ? list.at[i] : NULL;
}

/* All tensors of the call in one list, and which of the optional ones are there. */
static size_t list_inputs(tt_tensor_list bs, tt_tensor_list b_scales, const tt_fused_scaled_options *options,
                          tt_tensor **inputs, int64_t *present, int64_t *dtypes, int64_t *fast) {
    size_t at = 2;
    for (size_t i = 0; i < bs.count; i++) {
        tt_tensor *bias = entry_of(options->biases, i), *whole = entry_of(options->result_scales, i);
        inputs[at++] = bs.at[i];
        inputs[at++] = b_scales.at[i];
        if (bias != NULL)
            inputs[at++] = bias;
        if (whole != NULL)
            inputs[at++] = whole;
        present[i] = (bias != NULL ? HAS_BIAS : 0) | (whole != NULL ? HAS_RESULT_SCALE : 0);
        dtypes[i] = options->out_dtype_count > 0 ? (int64_t)options->out_dtypes[i] : 0;
        fast[i] = options->use_fast_accum_count > 0 && options->use_fast_accum[i];
    }
    return at;
}

tt_tensor_list tt_fused_all_gather_scaled_matmul(tt_tensor *a_shard, tt_tensor_list bs, tt_tensor *a_scale,
                                                 tt_tensor_list b_scales, int gather_dim, tutti_group *group,
                                                 const tt_fused_scaled_options *options, tt_tensor **a_gathered) {
    tt_fused_scaled_options full = TT_FUSED_SCALED_OPTIONS_INIT;
    if (!tu_flight_check("fused_all_gather_scaled_matmul", group, false) ||
        !tu_fused_check_given("fused_all_gather_scaled_matmul", "a_shard", a_shard) ||
        !tu_fused_check_given("fused_all_gather_scaled_matmul", "a_scale", a_scale) ||
        tu_pending_take(tu_options_copy("tt_fused_scaled_options", options, &full, sizeof full)) != TUTTI_OK ||
        !check_lists(bs, b_scales, &full))
        return none;
    tt_tensor **inputs = tu_scope_memory((2 + 4 * bs.count) * sizeof *inputs);
    int64_t *present = tu_scope_memory(3 * bs.count * sizeof *present);
    tu_shape *results = tu_scope_memory((bs.count + 1) * sizeof *results);
    tt_tensor **outputs = tu_scope_memory((bs.count + 1) * sizeof *outputs);
    if (inputs == NULL || present == NULL || results == NULL || outputs == NULL)
        return none;
    inputs[0] = a_shard;
    inputs[1] = a_scale;
    int count = (int)list_inputs(bs, b_scales, &full, inputs, present, present + bs.count, present + 2 * bs.count);
    tu_fused_all_gather_scaled_matmul_attributes attributes = { .present = { bs.count, present },
                                                                .out_dtypes = { bs.count, present + bs.count },
                                                                .use_fast_accum = { bs.count, present + 2 * bs.count },
                                                                .gather_dim = gather_dim,
                                                                .return_a = a_gathered != NULL,
                                                                .group = group };
    tu_call call;
    tu_call_init(&call, &tu_operator_fused_all_gather_scaled_matmul, count, inputs, &attributes);
    call.output_count = (int)bs.count + 1;
    call.results = results;
    call.outputs = outputs;
    if (!tu_run(&call))
        return none;
    if (a_gathered != NULL)
        *a_gathered = outputs[0];
    return tt_tensors_of(bs.count, outputs + 1);
}

static tt_tensor *narrow(tu_sampler *sampler, tt_dims shape) {
    return tt_detach(tt_to(sampler->make(sampler, TU_SAMPLE_NORMAL, shape, 0), TUTTI_F8_E4M3));
}

static tt_tensor *scales(tu_sampler *sampler, tt_dims shape) {
    return tt_detach(tt_to(sampler->make(sampler, TU_SAMPLE_POSITIVE, shape, 0), TUTTI_F32));
}

tt_tensor *tu_fused_all_gather_scaled_matmul_sample(tu_sampler *sampler) {
    tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
    options.out_dtypes = &(tutti_dtype){ TUTTI_F32 };
    options.out_dtype_count = 1;
    tt_tensor *shard = narrow(sampler, tt_shape(sampler->size, 3)), *rhs = narrow(sampler, tt_shape(3, 4)),
              *of_a = scales(sampler, tt_shape(sampler->size, 1)), *of_b = scales(sampler, tt_shape(1, 4));
    tt_tensor_list made = tt_fused_all_gather_scaled_matmul(shard, tt_tensors(rhs), of_a, tt_tensors(of_b), 0,
                                                            sampler->group, &options, NULL);
    return made.count == 1 ? made.at[0] : NULL;
}

/* ---- reduce-scatter ---- */

static tutti_status check_scatter(const tu_call *call) {
    const tu_fused_scaled_matmul_reduce_scatter_attributes *attributes = call->attributes;
    const tt_tensor *lhs = call->inputs[0], *a_scale = call->inputs[2];
    const tt_dims *shape = &attributes->output_shape;
    if (lhs->ndim < 2)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "A_shard must be a matrix, but a is %s", tu_describe(lhs));
    if (attributes->scatter_dim < 0 || attributes->scatter_dim >= lhs->ndim)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "Invalid scatter dim for 2D tensor input to scaled_mm: %d is not in [0, %d)",
                             attributes->scatter_dim, lhs->ndim);
    if (attributes->orig_scatter_dim < 0 || attributes->orig_scatter_dim >= shape->count)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "Invalid scatter dim for 3D+ output tensor: %d is not in [0, %d)",
                             attributes->orig_scatter_dim, shape->count);
    if (attributes->scatter_dim == lhs->ndim - 1 || attributes->orig_scatter_dim == shape->count - 1)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "Invalid scatter dim: scales are not supported where the last dimension is scattered");
    if (attributes->reduction != TUTTI_SUM && attributes->reduction != TUTTI_AVG)
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "reduce_op must be sum or avg, not %s",
                             tutti_reduction_name(attributes->reduction));
    if (a_scale->dtype != TUTTI_F32)
        return tu_call_error(call, TUTTI_ERROR_TYPE, "A_scale is %s and must be f32", tu_describe(a_scale));
    if (a_scale->numel != 1 && !leads(a_scale, lhs->ndim, lhs->sizes))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "For row-wise scaling, the leading dims of A_scale must match the leading dims of A (A "
                             "shape: %s, A_scale shape: %s)",
                             tu_dims_text(lhs->ndim, lhs->sizes), tu_dims_text(a_scale->ndim, a_scale->sizes));
    return TUTTI_OK;
}

/* Of a shape that a tensor can have. */
static int64_t rows_of(const tt_dims *shape) {
    int64_t rows = 1;
    for (int i = 0; i < shape->count - 1; i++)
        rows *= shape->at[i];
    return rows;
}

tutti_status tu_fused_scaled_matmul_reduce_scatter_shape(tu_call *call) {
    const tu_fused_scaled_matmul_reduce_scatter_attributes *attributes = call->attributes;
    const tt_tensor *lhs = call->inputs[0];
    const tt_dims *shape = &attributes->output_shape;
    tu_scaled_right right = { call->inputs[1], call->inputs[3], call->inputs[4], call->inputs[5] };
    int ranks = tutti_group_size(attributes->group), dim = attributes->orig_scatter_dim;
    tutti_status status = check_scatter(call);
    if (status == TUTTI_OK)
        status = check_right(call, &right, lhs->sizes[lhs->ndim - 1], attributes->dtype);
    if (status != TUTTI_OK)
        return status;
    tu_shape *result = &call->results[0];
    status = tu_shape_from(call->entry->name, *shape, attributes->dtype, call->device, result);
    if (status != TUTTI_OK)
        return status;
    if (shape->at[shape->count - 1] != right.rhs->sizes[1] || rows_of(shape) != tu_fused_row_count(lhs) ||
        (shape->count == lhs->ndim && dim != attributes->scatter_dim))
        return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                             "output_shape %s scattered along dimension %d is not the product of %s, scattered along "
                             "%d, and %s",
                             tu_dims_text(shape->count, shape->at), dim, tu_describe(lhs), attributes->scatter_dim,
                             tu_describe(right.rhs));
    return tu_fused_scattered(call, result, dim, ranks);
}

typedef struct scaled_partials {
    tu_fused_block block;
    tu_scaled right;
    tu_matrix lhs;
    tutti_dtype dtype;
    int64_t rows; /* of a block */
    const float *scales;
    int64_t scale_step;
} scaled_partials;

static tutti_status produce_scaled(void *context, int rank, int ranks, int64_t first, int64_t count, void *to) {
    const scaled_partials *job = context;
    int64_t row = rank * job->rows + first;
    tu_matrix left = job->lhs;
    left.data = (const char *)left.data + (size_t)(row * left.row) * tu_dtype_bytes[job->dtype];
    return tu_scaled_rows(&job->right, ranks * count, left, job->dtype, job->scales + row * job->scale_step,
                          job->scale_step, to, job->block.dtype);
}

static tutti_status accept_scaled(void *context, int64_t first, int64_t count, const void *const *from,
                                  const tu_aside *copies, int copy_count) {
    const scaled_partials *job = context;
    return tu_fused_reduce(&job->block, first, count, from, copies, copy_count);
}

tt_tensor *tu_rows_by_blocks(const tt_tensor *x, const tu_fused_block *block) {
    int64_t width = x->sizes[x->ndim - 1], rows = tu_fused_row_count(x), scattered = block->chunk * block->size;
    tt_tensor *dense = tu_fused_is_rows(x) ? tu_tensor_hold((tt_tensor *)x) : tu_stage_in(x, x->dtype);
    if (dense == NULL)
        return NULL;
    tu_matrix matrix = tu_fused_rows(dense);
    tu_shape shape = { .dtype = x->dtype, .device = x->device, .offset = dense->offset };
    if (block->before == 1) {
        shape.ndim = 2;
        memcpy(shape.sizes, (int64_t[]){ rows, width }, 2 * sizeof(int64_t));
        memcpy(shape.strides, (int64_t[]){ matrix.row, matrix.column }, 2 * sizeof(int64_t));
    } else {
        shape.ndim = 4;
        memcpy(shape.sizes, (int64_t[]){ scattered, block->before, block->behind, width }, 4 * sizeof(int64_t));
        memcpy(shape.strides,
               (int64_t[]){ block->behind * matrix.row, scattered * block->behind * matrix.row, matrix.row,
                            matrix.column },
               4 * sizeof(int64_t));
    }
    tt_tensor *view = tu_tensor_alias(dense, &shape), *result = view;
    if (view != NULL && block->before != 1) {
        result = tu_stage_in(view, x->dtype);
        tu_tensor_drop(view);
    }
    tu_tensor_drop(dense);
    return result;
}

static tutti_status scatter_scaled(tu_call *call, scaled_partials *job) {
    const tu_fused_scaled_matmul_reduce_scatter_attributes *attributes = call->attributes;
    const tt_tensor *out = call->outputs[0];
    int64_t rows = out->numel > 0 ? job->rows : 0;
    tu_fused_signature signature = tu_fused_sign(call->entry->name);
    tu_fused_sign_text(&signature, " ");
    tu_fused_sign_text(&signature, tutti_reduction_name(attributes->reduction));
    tu_fused_sign_number(&signature, " along dimension", attributes->orig_scatter_dim);
    tu_fused_sign_tensor(&signature, " into", out);
    tu_fused_sign_text(&signature,
                       job->scale_step == 0 ? ", with one scale for a" : ", with a scale for every row of a");
    const tu_right right = { .dtype = job->dtype, .depth = job->right.depth }; /* never packed once */
    tu_scatter scatter = tu_fused_scatter_of(&job->block, call->entry->name, attributes->group, rows, &right, true);
    scatter.signature = &signature;
    scatter.by_library = tu_gemm_is_of_library(TUTTI_F32);
    scatter.produce = produce_scaled;
    scatter.accept = accept_scaled;
    scatter.context = job;
    return tu_produce_and_scatter(&scatter);
}

tutti_status tu_fused_scaled_matmul_reduce_scatter_cpu(tu_call *call) {
    const tu_fused_scaled_matmul_reduce_scatter_attributes *attributes = call->attributes;
    const tt_tensor *a_scale = call->inputs[2];
    scaled_partials job = { .block = tu_fused_block_of(call->outputs[0], attributes->orig_scatter_dim,
                                                       attributes->reduction, attributes->group),
                            .rows = tu_fused_row_count(call->outputs[0]) };
    tt_tensor *lhs = tu_rows_by_blocks(call->inputs[0], &job.block),
              *by_rows = a_scale->numel == 1 ? tu_stage_in(a_scale, TUTTI_F32) : tu_rows_by_blocks(a_scale, &job.block),
              *dense = by_rows != NULL ? tu_stage_in(by_rows, TUTTI_F32) : NULL;
    tutti_status status = lhs == NULL || dense == NULL ? TUTTI_ERROR_MEMORY
                                                       : tu_scaled_open(&job.right, call->inputs[1], call->inputs[3],
                                                                        call->inputs[4], call->inputs[5]);
    if (status == TUTTI_OK) {
        job.lhs = lhs->ndim == 2 ? tu_fused_matrix(lhs) : (tu_matrix){ tu_pointer(lhs), job.right.depth, 1 };
        job.dtype = lhs->dtype;
        job.scales = tu_pointer(dense);
        job.scale_step = a_scale->numel == 1 ? 0 : 1;
        status = scatter_scaled(call, &job);
        tu_scaled_close(&job.right);
    } else {
        status = tu_fused_refuse(attributes->group, call->entry->name, status);
    }
    tu_tensor_drop(lhs);
    tu_tensor_drop(by_rows);
    tu_tensor_drop(dense);
    return status;
}

tt_tensor *tt_fused_scaled_matmul_reduce_scatter(tt_tensor *lhs, tt_tensor *rhs, tt_tensor *a_scale, tt_tensor *b_scale,
                                                 tutti_reduction reduction, int orig_scatter_dim, int scatter_dim,
                                                 tt_dims output_shape, tt_tensor *bias, tt_tensor *result_scale,
                                                 tutti_dtype dtype, bool use_fast_accum, tutti_group *group) {
    if (!tu_flight_check("fused_scaled_matmul_reduce_scatter", group, false))
        return NULL;
    if (a_scale == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT,
                "fused_scaled_matmul_reduce_scatter: A_scale cannot be none for scaled_mm: argument a_scale is NULL");
        return NULL;
    }
    if (dtype == 0 && rhs != NULL)
        dtype = tt_dtype(rhs);
    return tu_fused_scaled_matmul_reduce_scatter(lhs, rhs, a_scale, b_scale, reduction, orig_scatter_dim, scatter_dim,
                                                 output_shape, bias, result_scale, dtype, use_fast_accum, group);
}

tt_tensor *tu_fused_scaled_matmul_reduce_scatter_sample(tu_sampler *sampler) {
    tt_tensor *lhs = narrow(sampler, tt_shape(2, sampler->size, 3)), *rhs = narrow(sampler, tt_shape(3, 4)),
              *of_a = scales(sampler, tt_shape(2, sampler->size, 1)), *of_b = scales(sampler, tt_shape(1, 4));
    return tt_fused_scaled_matmul_reduce_scatter(lhs, rhs, of_a, of_b, TUTTI_SUM, 1, 1, tt_shape(2, sampler->size, 4),
                                                 NULL, NULL, TUTTI_F32, false, sampler->group);
}
