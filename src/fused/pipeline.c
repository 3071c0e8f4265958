/* SPDX-License-Identifier: Apache-2.0
 *
 * The two drivers with a consumer or a producer of the user's.
 */
#include <string.h>

#include "functional/registry.h"
#include "fused/driver.h"
#include "fused/operators.h"
#include "tensor/loop.h"

/* ---- tensors on memory that is lent for one call ---- */

/* A contiguous tensor of x's dtype on foreign memory; the scope's. */
static tt_tensor *lend(void *data, tutti_dtype dtype, int ndim, const int64_t *sizes) {
    tu_shape shape = { .dtype = dtype, .device = TUTTI_CPU, .ndim = ndim };
    memcpy(shape.sizes, sizes, (size_t)ndim * sizeof *sizes);
    if (tu_pending_take(tu_shape_contiguous("a shard", &shape)) != TUTTI_OK)
        return NULL;
    tu_storage *storage = tu_storage_wrap(data, (size_t)tu_shape_numel(&shape) * tu_dtype_bytes[dtype], NULL, NULL);
    tt_tensor *x = storage != NULL ? tu_tensor_on(storage, &shape) : NULL;
    if (x == NULL)
        tu_pending_take(TUTTI_ERROR_MEMORY);
    return tu_scope_own(x);
}

/* Whoever kept the tensor finds its storage freed, not somebody else's memory. */
static void take_back(tt_tensor *x) {
    if (x == NULL)
        return;
    x->storage->data = NULL;
    x->storage->bytes = 0;
}

/* What a callback returned, or left pending. */
static tutti_status close_scope(tt_scope *scope, const char *who, tutti_status returned) {
    tutti_error_copy error;
    tu_error_save(&error);
    tutti_status pending = tt_scope_close(scope);
    if (pending != TUTTI_OK || returned == TUTTI_OK)
        return pending;
    return error.info.status == returned
               ? tu_error_restore(&error)
               : tu_error(returned, "%s: the callback returned %s", who, tutti_status_name(returned));
}

/* Where the tensor lies, it can be used now: collectives that write it are over, and, where it is written, those that
 * read it. */
static tutti_status check_tensor(const char *who, const char *what, const tt_tensor *x, bool written) {
    tutti_status status = tu_tensor_check(who, what, x);
    if (status != TUTTI_OK)
        return status;
    if (x->device != TUTTI_CPU)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s: %s is on the device %s, and a callback needs memory of the CPU",
                        who, what, tutti_device_name(x->device));
    if (!(x->flags & TU_CONTIGUOUS))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: all tensors in `%s` must be contiguous, and %s is not", who, what,
                        tu_describe(x));
    if (written && x->flags & TU_REQUIRES_GRAD && !tu_self()->grad_disabled)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s has no gradient: %s requires grad; switch gradient mode off", who,
                        tu_describe(x));
    if (written && (status = tu_storage_wait_write(x->storage)) != TUTTI_OK)
        return status;
    return tu_tensor_ready(who, what, x);
}

/* ---- gather ---- */

typedef struct consumer {
    tt_tensor_list shards, out;
    tt_shard_consumer *consume;
    void *argument;
} consumer;

static const char *const gathers = "pipelined_all_gather_and_consume";

static tutti_status consume(void *context, int rank, const tu_shard *found) {
    const consumer *job = context;
    tt_tensor *lent[TU_FUSED_PARTS] = { NULL };
    size_t count = job->shards.count;
    tt_scope scope = tt_scope_open();
    for (size_t i = 0; i < count; i++) {
        const tt_tensor *shard = job->shards.at[i];
        size_t bytes = (size_t)shard->numel * tu_dtype_bytes[shard->dtype];
        lent[i] = lend((void *)found[i].data, shard->dtype, shard->ndim, shard->sizes);
        if (job->out.count > 0 && bytes > 0) /* from its own place to its own place: nothing is copied */
            memmove((char *)tu_pointer(job->out.at[i]) + (size_t)rank * bytes, found[i].data, bytes);
    }
    tutti_status status = TUTTI_OK;
    if (tu_self()->pending == TUTTI_OK)
        status = job->consume(job->argument, tt_tensors_of(count, lent), rank);
    for (size_t i = 0; i < count; i++)
        take_back(lent[i]);
    return close_scope(&scope, gathers, status);
}

static tutti_status check_out(const tt_tensor *shard, const tt_tensor *out, int ranks) {
    int64_t rows = 0;
    bool fits = out->dtype == shard->dtype && out->ndim == shard->ndim && shard->ndim > 0 &&
                !__builtin_mul_overflow(shard->sizes[0], ranks, &rows) && out->sizes[0] == rows;
    for (int i = 1; fits && i < shard->ndim; i++)
        fits = out->sizes[i] == shard->sizes[i];
    return fits ? TUTTI_OK
                : tu_error(TUTTI_ERROR_ARGUMENT,
                           "%s: %s in `ag_out` cannot hold %s of each of the %d ranks along dimension 0", gathers,
                           tu_describe(out), tu_describe(shard), ranks);
}

static bool overlap(const tt_tensor *x, const tt_tensor *y) {
    size_t x_bytes = (size_t)x->numel * tu_dtype_bytes[x->dtype], y_bytes = (size_t)y->numel * tu_dtype_bytes[y->dtype];
    uintptr_t x_begin = (uintptr_t)tu_pointer(x), y_begin = (uintptr_t)tu_pointer(y);
    return x_bytes > 0 && y_bytes > 0 && x_begin < y_begin + y_bytes && y_begin < x_begin + x_bytes;
}

/* Others may be reading a shard while what they have sent is written: it may lie in its own place in its own ag_out,
 * and nowhere else in what is written. */
static tutti_status check_apart(const consumer *job, int rank) {
    for (size_t i = 0; i < job->out.count; i++)
        for (size_t j = 0; j < job->shards.count; j++) {
            const tt_tensor *out = job->out.at[i], *shard = job->shards.at[j];
            size_t bytes = (size_t)shard->numel * tu_dtype_bytes[shard->dtype];
            bool in_place = i == j && (char *)tu_pointer(shard) == (char *)tu_pointer(out) + (size_t)rank * bytes;
            if ((!in_place && overlap(out, shard)) || (i < j && overlap(out, job->out.at[j])))
                return tu_error(TUTTI_ERROR_ARGUMENT,
                                "%s: %s in `ag_out` overlaps another tensor of the call: a shard may lie in this "
                                "rank's place of its own ag_out alone",
                                gathers, tu_describe(out));
        }
    return TUTTI_OK;
}

static tutti_status check_gather(const consumer *job, int ranks) {
    if (job->consume == NULL || job->shards.count == 0 || job->shards.count > TU_FUSED_PARTS ||
        (job->out.count != 0 && job->out.count != job->shards.count))
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s needs a consumer, 1 to %d shards and as many tensors in `ag_out`, or none; it got %zu and "
                        "%zu",
                        gathers, TU_FUSED_PARTS, job->shards.count, job->out.count);
    if (job->shards.at == NULL || (job->out.count > 0 && job->out.at == NULL))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: `%s` is a list of %zu tensors at NULL", gathers,
                        job->shards.at == NULL ? "shard" : "ag_out", job->shards.count);
    tutti_status status = TUTTI_OK;
    for (size_t i = 0; i < job->shards.count && status == TUTTI_OK; i++) {
        status = check_tensor(gathers, "shard", job->shards.at[i], false);
        if (status == TUTTI_OK && job->out.count > 0)
            status = check_tensor(gathers, "ag_out", job->out.at[i], true);
        if (status == TUTTI_OK && job->out.count > 0)
            status = check_out(job->shards.at[i], job->out.at[i], ranks);
    }
    return status;
}

tutti_status tt_pipelined_all_gather_and_consume(tt_tensor_list shards, tt_shard_consumer *user_consume, void *argument,
                                                 tt_tensor_list ag_out, tutti_group *group) {
    consumer job = { shards, ag_out, user_consume, argument };
    tu_fused_signature signature = tu_fused_sign(gathers);
    if (!tu_flight_check(gathers, group, false))
        return tt_error_show();
    tutti_status status = check_gather(&job, tutti_group_size(group));
    if (status == TUTTI_OK)
        status = check_apart(&job, tutti_group_rank(group));
    if (status != TUTTI_OK)
        return status;
    tu_gather gather = { .who = gathers,
                         .group = group,
                         .signature = &signature,
                         .count = (int)shards.count,
                         .consume = consume,
                         .context = &job };
    for (size_t i = 0; i < shards.count; i++) {
        gather.tensors[i] = shards.at[i];
        tu_fused_sign_tensor(&signature, i == 0 ? " of" : ",", shards.at[i]);
    }
    status = tu_gather_and_consume(&gather);
    for (size_t i = 0; i < ag_out.count; i++)
        tu_bump(ag_out.at[i]);
    return status;
}

/* ---- scatter ---- */

typedef struct producer {
    tt_chunk_producer *produce;
    void *argument;
    tt_tensor *output;
    int dim, ranks;
    tu_shape chunk;
} producer;

static const char *const scatters = "pipelined_produce_and_all_to_all";

static tutti_status produce(void *context, int rank, int ranks, int64_t first, int64_t count, void *to) {
    const producer *job = context;
    (void)ranks, (void)first, (void)count; /* a chunk is made as a whole, and for one rank */
    tt_scope scope = tt_scope_open();
    tt_tensor *out = lend(to, job->chunk.dtype, job->chunk.ndim, job->chunk.sizes);
    tutti_status status = TUTTI_OK;
    if (tu_self()->pending == TUTTI_OK)
        status = job->produce(job->argument, rank, out);
    take_back(out);
    return close_scope(&scope, scatters, status);
}

/* The chunks one after the other along the dimension. */
static tutti_status accept(void *context, int64_t first, int64_t count, const void *const *from, const tu_aside *copies,
                           int copy_count) {
    const producer *job = context;
    (void)first, (void)count, (void)copies, (void)copy_count;
    size_t before = 1, size = tu_dtype_bytes[job->chunk.dtype];
    for (int i = 0; i < job->dim; i++)
        before *= (size_t)job->chunk.sizes[i];
    size_t run = (size_t)tu_shape_numel(&job->chunk) * size / before;
    char *to = tu_pointer(job->output);
    for (size_t i = 0; i < before; i++)
        for (int rank = 0; rank < job->ranks; rank++, to += run)
            if (to != (const char *)from[rank] + i * run)
                memcpy(to, (const char *)from[rank] + i * run, run);
    return TUTTI_OK;
}

static tutti_status check_scatter(producer *job) {
    if (job->produce == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s needs a producer", scatters);
    tutti_status status = check_tensor(scatters, "output", job->output, true);
    if (status != TUTTI_OK)
        return status;
    const tt_tensor *output = job->output;
    if (job->dim < 0 || job->dim >= output->ndim || output->sizes[job->dim] % job->ranks != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s: dimension %d of %s cannot be cut in as many chunks as there are ranks, %d", scatters,
                        job->dim, tu_describe(output), job->ranks);
    job->chunk = tu_shape_of(output);
    job->chunk.sizes[job->dim] /= job->ranks;
    return TUTTI_OK;
}

tutti_status tt_pipelined_produce_and_all_to_all(tt_chunk_producer *user_produce, void *argument, tt_tensor *output,
                                                 int chunk_dim, tutti_group *group) {
    if (!tu_flight_check(scatters, group, false))
        return tt_error_show();
    producer job = { user_produce, argument, output, chunk_dim, tutti_group_size(group), { 0 } };
    tutti_status status = check_scatter(&job);
    if (status != TUTTI_OK)
        return status;
    tu_fused_signature signature = tu_fused_sign(scatters);
    size_t bytes = (size_t)tu_shape_numel(&job.chunk) * tu_dtype_bytes[output->dtype];
    tu_fused_sign_number(&signature, " along dimension", chunk_dim);
    tu_fused_sign_tensor(&signature, " of", output);
    tu_scatter scatter = { .who = scatters,
                           .group = group,
                           .signature = &signature,
                           .rows = bytes > 0 ? 1 : 0,
                           .tile_rows = 1,
                           .chunk_rows = 1,
                           .row_bytes = bytes,
                           .panels = { job.ranks, job.ranks },
                           .produce = produce,
                           .accept = accept,
                           .context = &job };
    bool dense = true; /* a chunk lies in one piece */
    for (int i = 0; i < chunk_dim; i++)
        dense = dense && output->sizes[i] == 1;
    if (dense && bytes > 0)
        scatter.direct = (char *)tu_pointer(output) + (size_t)tutti_group_rank(group) * bytes;
    status = tu_produce_and_scatter(&scatter);
    tu_bump(output);
    return status;
}
