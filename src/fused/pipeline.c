/* SPDX-License-Identifier: Apache-2.0
 *
 * The two drivers with a consumer or a producer of the user's, on the CPU and on a device. There the callbacks are
 * called on the host, and what they enqueue on the stream runs behind what makes their tensors ready:
 *
 *     stream    own shards ............ the others' shards ...          chunk 1   chunk 2   chunk 3 ... own chunk
 *     beside    stage, all meet, join                                   meet, take 1   meet, take 2 ...     join
 */
#include <string.h>

#include "functional/registry.h"
#include "functional/symmetric.h"
#include "fused/device.h"
#include "fused/driver.h"
#include "fused/operators.h"
#include "tensor/loop.h"

/* ---- tensors on memory that is lent for one call ---- */

/* A contiguous tensor on foreign memory; NULL with the error written. */
static tt_tensor *wrap(const void *data, const tu_shape *shape) {
    tu_shape dense = *shape;
    dense.offset = 0;
    if (tu_shape_contiguous("a shard", &dense) != TUTTI_OK)
        return NULL;
    tu_storage *storage = tu_storage_wrap((void *)(uintptr_t)data,
                                          (size_t)tu_shape_numel(&dense) * tu_dtype_bytes[dense.dtype], NULL, NULL);
    if (storage != NULL)
        storage->device = dense.device;
    return tu_tensor_on(storage, &dense);
}

/* The same, the scope's; NULL with the error pending. */
static tt_tensor *lend(const void *data, const tu_shape *shape) {
    tt_tensor *x = wrap(data, shape);
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
 * read it. All tensors of a call are on the device of the first. */
static tutti_status check_tensor(const char *who, const char *what, const tt_tensor *x, const tt_tensor *first,
                                 bool written) {
    tutti_status status = tu_tensor_check(who, what, x);
    if (status != TUTTI_OK)
        return status;
    if (x->device != TUTTI_CPU && !tu_on_device(x))
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "%s: %s is on the device %s, and a callback needs memory of cpu or cuda", who, what,
                        tutti_device_name(x->device));
    if (x->device != first->device)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: %s in `%s` is on the device %s and %s on %s; expected all on one",
                        who, tu_describe(x), what, tutti_device_name(x->device), tu_describe(first),
                        tutti_device_name(first->device));
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
    const tu_fused_run *run; /* on a device; else NULL */
} consumer;

static const char *const gathers = "pipelined_all_gather_and_consume";

/* From its own place to its own place nothing is copied. */
static tutti_status place_shard(const consumer *job, size_t part, int rank, const void *from) {
    const tt_tensor *shard = job->shards.at[part];
    size_t bytes = (size_t)shard->numel * tu_dtype_bytes[shard->dtype];
    if (job->out.count == 0 || bytes == 0)
        return TUTTI_OK;
    char *to = (char *)tu_pointer(job->out.at[part]) + (size_t)rank * bytes;
    if (to == from)
        return TUTTI_OK;
    if (job->run != NULL)
        return job->run->device->table->copy(job->run->device->state, job->run->device->index, job->run->stream, to,
                                             from, bytes);
    memcpy(to, from, bytes);
    return TUTTI_OK;
}

static tutti_status consume(void *context, int rank, const tu_shard *found) {
    const consumer *job = context;
    tt_tensor *lent[TU_FUSED_PARTS] = { NULL };
    size_t count = job->shards.count;
    tutti_status status = TUTTI_OK;
    tt_scope scope = tt_scope_open();
    for (size_t i = 0; i < count && status == TUTTI_OK; i++) {
        tu_shape shape = tu_shape_of(job->shards.at[i]);
        lent[i] = lend(found[i].data, &shape);
        status = place_shard(job, i, rank, found[i].data);
    }
    if (status == TUTTI_OK && tu_self()->pending == TUTTI_OK)
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
        status = check_tensor(gathers, "shard", job->shards.at[i], job->shards.at[0], false);
        if (status == TUTTI_OK && job->out.count > 0)
            status = check_tensor(gathers, "ag_out", job->out.at[i], job->shards.at[0], true);
        if (status == TUTTI_OK && job->out.count > 0)
            status = check_out(job->shards.at[i], job->out.at[i], ranks);
    }
    return status;
}

/* A rank's shards; this rank's are read where they are, since their copy is made beside the stream. */
static tutti_status consume_there(const tu_fused_gather *gather, consumer *job, int rank) {
    tu_shard found[TU_FUSED_PARTS];
    for (int i = 0; i < gather->count; i++)
        found[i] = rank == job->run->rank ? (tu_shard){ .data = tu_pointer(gather->parts[i].tensor) }
                                          : tu_fused_part_of(gather, i, rank);
    return consume(job, rank, found);
}

/* All of a call behind its beginning. What goes wrong with consuming is this rank's alone: *local, with its words. */
static tutti_status gather_begun(consumer *job, tu_fused_gather *gather, tutti_status *local, tutti_error_copy *error) {
    tu_fused_run *run = gather->run;
    tutti_status status = tu_fused_open_gather(gather);
    if (status != TUTTI_OK)
        return status;
    *local = consume_there(gather, job, run->rank);
    tu_error_save(error);
    status = tu_fused_await_others(gather);
    for (int step = 1; step < run->size && status == TUTTI_OK && *local == TUTTI_OK; step++) {
        *local = consume_there(gather, job, (run->rank + step) % run->size);
        tu_error_save(error);
    }
    return tu_fused_close_gather(gather, status);
}

static tutti_status gather_there(consumer *job, const tu_gather *plan) {
    tu_fused_run run;
    tu_fused_gather gather = { .run = &run, .signature = plan->signature, .count = plan->count, .own_first = true };
    tutti_error_copy error;
    tutti_status local = TUTTI_OK,
                 status = tu_fused_begin_on(&run, gathers, tu_device_of(plan->tensors[0]), plan->group);
    if (status != TUTTI_OK)
        return status;
    job->run = &run;
    for (int i = 0; i < plan->count; i++) {
        gather.parts[i].tensor = plan->tensors[i];
        tu_device_note_use(run.device, plan->tensors[i]->storage, run.stream);
        if (job->out.count > 0)
            tu_device_note_use(run.device, job->out.at[i]->storage, run.stream);
    }
    status = tu_fused_end(&run, gather_begun(job, &gather, &local, &error));
    return status != TUTTI_OK ? status : local != TUTTI_OK ? tu_error_restore(&error) : TUTTI_OK;
}

tutti_status tt_pipelined_all_gather_and_consume(tt_tensor_list shards, tt_shard_consumer *user_consume, void *argument,
                                                 tt_tensor_list ag_out, tutti_group *group) {
    consumer job = { shards, ag_out, user_consume, argument, NULL };
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
    bool there = tu_on_device(shards.at[0]);
    if (there)
        tu_fused_sign_text(&signature, " on a device");
    status = there ? gather_there(&job, &gather) : tu_gather_and_consume(&gather);
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
    tu_shape chunk; /* contiguous */
    size_t bytes;   /* of a chunk */
    bool dense;     /* a chunk lies in one piece */
} producer;

static const char *const scatters = "pipelined_produce_and_all_to_all";

static tutti_status produce(void *context, int rank, int ranks, int64_t first, int64_t count, void *to) {
    const producer *job = context;
    (void)ranks, (void)first, (void)count; /* a chunk is made as a whole, and for one rank */
    tt_scope scope = tt_scope_open();
    tt_tensor *out = lend(to, &job->chunk);
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
    tutti_status status = check_tensor(scatters, "output", job->output, job->output, true);
    if (status != TUTTI_OK)
        return status;
    const tt_tensor *output = job->output;
    if (job->dim < 0 || job->dim >= output->ndim || output->sizes[job->dim] % job->ranks != 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "%s: dimension %d of %s cannot be cut in as many chunks as there are ranks, %d", scatters,
                        job->dim, tu_describe(output), job->ranks);
    job->chunk = tu_shape_of(output);
    job->chunk.sizes[job->dim] /= job->ranks;
    job->chunk.offset = 0;
    job->bytes = (size_t)tu_shape_numel(&job->chunk) * tu_dtype_bytes[output->dtype];
    job->dense = true;
    for (int i = 0; i < job->dim; i++)
        job->dense = job->dense && output->sizes[i] == 1;
    return tu_shape_contiguous(scatters, &job->chunk);
}

/* ---- scatter on a device ---- */

/* Chunks that a rank has made and not all others have taken: so many, and no rank waits for a slower one at once. */
#define SLOTS 3

/* A chunk to its place in the output. */
static tutti_status place_chunk(const producer *job, tu_device *device, void *stream, int rank, const void *from) {
    tu_shape shape = tu_shape_of(job->output);
    shape.sizes[job->dim] = job->chunk.sizes[job->dim];
    shape.offset += rank * shape.sizes[job->dim] * shape.strides[job->dim];
    tt_tensor to = tu_tensor_look(job->output, &shape), *chunk = wrap(from, &job->chunk);
    tutti_status status = chunk != NULL ? tu_device_copy_on(device, stream, &to, chunk) : TUTTI_ERROR_MEMORY;
    tu_tensor_drop(chunk);
    return status;
}

/* This rank's own, in its place where a chunk lies in one piece; made up ranks have the same. */
static tutti_status produce_own(producer *job, const tu_fused_run *run) {
    tt_tensor *made = job->dense ? NULL : tu_tensor_new(&job->chunk);
    if (!job->dense && made == NULL)
        return TUTTI_ERROR_MEMORY;
    void *to = made != NULL ? tu_pointer(made) : (char *)tu_pointer(job->output) + (size_t)run->rank * job->bytes;
    tutti_status status = produce(job, run->rank, 1, 0, 1, to);
    for (int rank = 0; rank < run->size && status == TUTTI_OK; rank++)
        if (rank == run->rank || run->state == NULL)
            status = place_chunk(job, run->device, run->stream, rank, to);
    tu_tensor_drop(made);
    return status;
}

/* The chunk for the rank that is `step` ranks on is made, and the one that the rank as far before this one has made is
 * taken. `met` has an event for each slot, behind the meeting of the step that has used it last. */
static tutti_status exchange_step(producer *job, tu_fused_run *run, char *stage, size_t each, int step, void **met) {
    int slot = (step - 1) % SLOTS, from = (run->rank - step + run->size) % run->size;
    size_t offset = (size_t)slot * each;
    void *beside;
    /* When all have come to the step behind the one that has used this slot, they have read what lay there. */
    tutti_status status = step > SLOTS ? tu_fused_await(run, &met[(slot + 1) % SLOTS]) : TUTTI_OK;
    if (status == TUTTI_OK)
        status = produce(job, (run->rank + step) % run->size, 1, 0, 1, stage + offset);
    tu_fused_forget(run, &met[slot]);
    if (status == TUTTI_OK)
        status = tu_fused_meet_beside(run, &beside, &met[slot]);
    if (status == TUTTI_OK)
        status = place_chunk(job, run->device, beside, from, tu_fused_stage_of(run, from) + offset);
    return status;
}

static tutti_status exchange_begun(producer *job, tu_fused_run *run, const tu_fused_signature *signature) {
    size_t each = (job->bytes + TU_FUSED_ALIGN - 1) / TU_FUSED_ALIGN * TU_FUSED_ALIGN;
    size_t slots = run->size - 1 < SLOTS ? (size_t)run->size - 1 : SLOTS;
    void *met[SLOTS] = { NULL };
    char *stage;
    tutti_status status = tu_fused_open_scatter(run, signature, slots * each, 0, 0, &stage);
    if (status != TUTTI_OK || job->bytes == 0)
        return status;
    for (int step = 1; step < run->size && status == TUTTI_OK; step++)
        status = exchange_step(job, run, stage, each, step, met);
    for (int i = 0; i < SLOTS; i++)
        tu_fused_forget(run, &met[i]);
    if (status == TUTTI_OK)
        status = produce_own(job, run);
    return tu_fused_close_scatter(run, status);
}

/* In test mode: everything is made, then exchanged by the plain collective. */
static tutti_status exchange_plainly(producer *job, tu_fused_run *run, const tu_fused_signature *signature) {
    tu_shape shape = { .dtype = TUTTI_U8,
                       .device = run->device->number,
                       .ndim = 1,
                       .sizes = { run->size * (int64_t)job->bytes },
                       .strides = { 1 } };
    tutti_call call = TUTTI_CALL_INIT;
    char *stage;
    call.stream = run->stream;
    tutti_status status = tu_fused_open_scatter(run, signature, 0, 0, 0, &stage);
    if (status != TUTTI_OK || job->bytes == 0)
        return status;
    tt_tensor *made = tu_tensor_new(&shape), *received = tu_tensor_new(&shape);
    if (made == NULL || received == NULL)
        status = TUTTI_ERROR_MEMORY;
    for (int rank = 0; rank < run->size && status == TUTTI_OK; rank++)
        status = produce(job, rank, 1, 0, 1, (char *)tu_pointer(made) + (size_t)rank * job->bytes);
    if (status == TUTTI_OK)
        status = tutti_all_to_all(run->group, tu_pointer(made), tu_pointer(received), job->bytes, TUTTI_U8, &call);
    for (int rank = 0; rank < run->size && status == TUTTI_OK; rank++)
        status =
            place_chunk(job, run->device, run->stream, rank, (char *)tu_pointer(received) + (size_t)rank * job->bytes);
    tu_tensor_drop(received);
    tu_tensor_drop(made);
    return tu_fused_close_scatter(run, status);
}

static tutti_status exchange_there(producer *job, tutti_group *group, const tu_fused_signature *signature) {
    tu_fused_run run;
    tutti_status status = tu_fused_begin_on(&run, scatters, tu_device_of(job->output), group);
    if (status != TUTTI_OK)
        return status;
    tu_device_note_use(run.device, job->output->storage, run.stream);
    if (run.state == NULL)
        return job->bytes > 0 ? produce_own(job, &run) : TUTTI_OK;
    return tu_fused_end(&run, tu_symm_test_mode() ? exchange_plainly(job, &run, signature)
                                                  : exchange_begun(job, &run, signature));
}

/* ---- scatter, the call ---- */

tutti_status tt_pipelined_produce_and_all_to_all(tt_chunk_producer *user_produce, void *argument, tt_tensor *output,
                                                 int chunk_dim, tutti_group *group) {
    if (!tu_flight_check(scatters, group, false))
        return tt_error_show();
    producer job = { .produce = user_produce,
                     .argument = argument,
                     .output = output,
                     .dim = chunk_dim,
                     .ranks = tutti_group_size(group) };
    tutti_status status = check_scatter(&job);
    if (status != TUTTI_OK)
        return status;
    tu_fused_signature signature = tu_fused_sign(scatters);
    tu_fused_sign_number(&signature, " along dimension", chunk_dim);
    tu_fused_sign_tensor(&signature, " of", output);
    if (tu_on_device(output))
        tu_fused_sign_text(&signature, " on a device");
    tu_scatter scatter = { .who = scatters,
                           .group = group,
                           .signature = &signature,
                           .rows = job.bytes > 0 ? 1 : 0,
                           .tile_rows = 1,
                           .chunk_rows = 1,
                           .row_bytes = job.bytes,
                           .panels = { job.ranks, job.ranks },
                           .produce = produce,
                           .accept = accept,
                           .context = &job };
    if (job.dense && job.bytes > 0)
        scatter.direct = (char *)tu_pointer(output) + (size_t)tutti_group_rank(group) * job.bytes;
    status = tu_on_device(output) ? exchange_there(&job, group, &signature) : tu_produce_and_scatter(&scatter);
    tu_bump(output);
    return status;
}
