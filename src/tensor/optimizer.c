/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of optimizer steps: in place, one walk over the parameter, or over all parameters of a batch. The public
 * functions are in nn/.
 */
#include <stdlib.h>
#include <string.h>

#include "tensor/kernel/elementary.h"
#include "tensor/kernel/kernels.h"
#include "tensor/noting.h"
#include "tensor/operators.h"
#include "tensor/parallel.h"
#include "tensor/stage.h"
#include "tensor/step.h"

/* Of the inputs, those before the first of these are as large as the parameter; the others are single numbers. */
static int first_number(const tu_call *call) {
    return call->entry == &tu_operator_sgd_step ? 3 : 4;
}

static tutti_status check_number(const tu_call *call, int input) {
    const tt_tensor *x = call->inputs[input];
    if (x->numel == 1 && !tu_is_complex(x->dtype))
        return TUTTI_OK;
    return tu_call_error(call, TUTTI_ERROR_ARGUMENT, "%s is %s and must be one real number",
                         tu_argument_name(call->entry, input), tu_describe(x));
}

/* Dense and of one type: then the kernel runs where they lie. Checked by the shape rule. */
tutti_status tu_step_shape(tu_call *call) {
    const tt_tensor *parameter = call->inputs[0];
    if (!tu_is_float(parameter->dtype))
        return tu_call_error(call, TUTTI_ERROR_TYPE, "the parameter is %s and must be floats", tu_describe(parameter));
    for (int i = 1; i < first_number(call); i++) {
        const tt_tensor *x = call->inputs[i];
        if (x != NULL && (!tu_same_sizes(x, parameter) || x->dtype != parameter->dtype))
            return tu_call_error(call, TUTTI_ERROR_ARGUMENT,
                                 "%s is %s, and the parameter %s: shape and dtype must be the same",
                                 tu_argument_name(call->entry, i), tu_describe(x), tu_describe(parameter));
    }
    tutti_status status = TUTTI_OK;
    for (int i = first_number(call); i < call->input_count && status == TUTTI_OK; i++)
        status = check_number(call, i);
    return status;
}

/* ---- numbers of a step ---- */

/* Two powers cost more than the step of a small parameter, and are those of the parameter before. */
static tu_step_correction correction_of(tu_step_correction *known, double beta1, double beta2, double count) {
    if (known == NULL || known->count != count || known->beta1 != beta1 || known->beta2 != beta2 || !(count > 0)) {
        tu_step_correction made = { beta1, beta2, count, 1 - tu_pow_f64(beta1, count),
                                    1 / tu_sqrt_f64(1 - tu_pow_f64(beta2, count)) };
        if (known == NULL)
            return made;
        *known = made;
    }
    return *known;
}

/* Works rate, decay and correction out from the tensors of the step's numbers. */
static tutti_status number_step(tu_batched_step *each, tu_step_correction *known) {
    double rate = 0, count = 0;
    tutti_status status = each->count != NULL ? tu_read_number(each->count, &count) : TUTTI_OK;
    if (status == TUTTI_OK)
        status = tu_read_number(each->rate, &rate);
    if (status != TUTTI_OK || !each->adamw) {
        each->step.rate = rate;
        each->step.decay = each->weight_decay;
        return status;
    }
    tu_step_correction correction = correction_of(known, each->step.beta1, each->step.beta2, count);
    each->step.rate = rate / correction.rate;
    each->step.decay = 1 - rate * each->weight_decay;
    each->step.correct = correction.root;
    return TUTTI_OK;
}

/* ---- batches ---- */

#define STEP_GRAIN 32768 /* elements that are worth a thread */

static void forget_collected(tu_step_batch *batch) {
    batch->count = 0;
    batch->elements = 0;
    batch->memory_count = 0;
    batch->round++;
}

void tu_step_batch_open(tu_step_batch *batch) {
    forget_collected(batch);
    tu_self()->steps = batch;
}

/* Elements [begin, end) of all parameters in a row. */
static void run_batch(void *context, int64_t begin, int64_t end) {
    const tu_step_batch *batch = context;
    size_t low = 0, high = batch->count; /* the step that element `begin` belongs to is in [low, high) */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (batch->steps[middle].first <= begin)
            low = middle;
        else
            high = middle;
    }
    for (size_t i = low; i < batch->count && batch->steps[i].first < end; i++) {
        const tu_batched_step *each = &batch->steps[i];
        int64_t behind = i + 1 < batch->count ? batch->steps[i + 1].first : batch->elements;
        each->kernel(&each->step, (begin > each->first ? begin : each->first) - each->first,
                     (end < behind ? end : behind) - each->first);
    }
}

/* Fills a list of steps for a device, and returns how many chunks they have. */
static int64_t list_steps(const tu_batched_step *steps, size_t count, int64_t elements, tu_launch_step *list) {
    int64_t chunks = 0;
    for (size_t i = 0; i < count; i++) {
        const tu_step *step = &steps[i].step;
        int64_t own = (i + 1 < count ? steps[i + 1].first : elements) - steps[i].first;
        list[i] = (tu_launch_step){ .parameter = tu_place_of(step->parameter),
                                    .gradient = tu_place_of(step->gradient),
                                    .first = tu_place_of(step->first),
                                    .second = tu_place_of(step->second),
                                    .rate = step->rate,
                                    .momentum = step->momentum,
                                    .decay = step->decay,
                                    .beta1 = step->beta1,
                                    .beta2 = step->beta2,
                                    .epsilon = step->epsilon,
                                    .correct = step->correct,
                                    .begin = chunks,
                                    .elements = own,
                                    .adamw = steps[i].adamw,
                                    .dtype = (int32_t)steps[i].dtype };
        chunks += (own + TU_STEP_CHUNK - 1) / TU_STEP_CHUNK;
    }
    return chunks;
}

static tutti_status launch_steps(tu_device *device, uint64_t list, size_t count, int64_t chunks) {
    tu_launch_steps flat = { list, (int64_t)count, chunks };
    return tu_device_launch_blocks(device, "kernel_steps", chunks, TU_DEVICE_THREADS, &flat);
}

/* A list whose numbers are worked out anew at each run of a noted step. */
typedef struct noted_steps {
    tu_noted_act act; /* first */
    tu_launch_step *list;
    size_t count;
    tu_batched_step steps[]; /* rate and count are held */
} noted_steps;

static tutti_status number_steps(tu_noted_act *act) {
    noted_steps *noted = (noted_steps *)act;
    tu_step_correction known = { .count = 0 };
    tutti_status status = TUTTI_OK;
    for (size_t i = 0; i < noted->count && status == TUTTI_OK; i++) {
        tu_batched_step *each = &noted->steps[i];
        status = number_step(each, &known);
        noted->list[i].rate = each->step.rate;
        noted->list[i].decay = each->step.decay;
        noted->list[i].correct = each->step.correct;
    }
    return status;
}

static void end_steps(tu_noted_act *act) {
    noted_steps *noted = (noted_steps *)act;
    for (size_t i = 0; i < noted->count; i++) {
        tu_tensor_drop(noted->steps[i].rate);
        tu_tensor_drop(noted->steps[i].count);
    }
    free(noted);
}

static tutti_status note_steps(tu_device *device, const tu_batched_step *steps, size_t count, int64_t elements) {
    uint64_t there = 0;
    noted_steps *made = malloc(sizeof *made + count * sizeof *steps);
    if (made == NULL)
        return tu_error_memory("the steps of a replay", count * sizeof *steps);
    *made = (noted_steps){ .act = { .run = number_steps, .end = end_steps }, .count = count };
    made->list = tu_noted_room(tu_noting(device), count * sizeof *made->list, &there);
    if (made->list == NULL) {
        free(made);
        return TUTTI_ERROR_MEMORY;
    }
    memcpy(made->steps, steps, count * sizeof *steps);
    for (size_t i = 0; i < count; i++) {
        tu_tensor_hold(made->steps[i].rate);
        tu_tensor_hold(made->steps[i].count);
    }
    int64_t chunks = list_steps(steps, count, elements, made->list);
    tu_noted_add(tu_noting(device), &made->act);
    return launch_steps(device, there, count, chunks);
}

/* Steps on a device, all in one launch: their list goes there first. */
static tutti_status run_on_device(tu_device *device, const tu_batched_step *steps, size_t count, int64_t elements) {
    size_t bytes = count * sizeof(tu_launch_step);
    tu_device_block there = { 0 };
    void *stream = tu_device_stream(device);
    if (tu_noting(device) != NULL)
        return note_steps(device, steps, count, elements);
    tu_launch_step *list = tu_block_alloc(tu_self(), bytes);
    if (list == NULL)
        return tu_error_memory("the list of an optimizer's steps", bytes);
    int64_t chunks = list_steps(steps, count, elements, list);
    tutti_status status = device->table->allocate(device->state, device->index, stream, bytes, &there);
    if (status == TUTTI_OK)
        status = device->table->copy(device->state, device->index, stream, there.data, list, bytes);
    if (status == TUTTI_OK)
        status = launch_steps(device, tu_place_of(there.data), count, chunks);
    if (there.handle != NULL)
        device->table->release(device->state, device->index, &there);
    tu_block_free(tu_self(), list, bytes);
    return status;
}

static tutti_status run_collected(tu_step_batch *batch) {
    tutti_status status = TUTTI_OK;
    if (batch->count > 0 && batch->steps[0].device != NULL)
        status = run_on_device(batch->steps[0].device, batch->steps, batch->count, batch->elements);
    else
        tu_parallel(batch->elements, STEP_GRAIN, run_batch, batch);
    forget_collected(batch);
    return status;
}

tutti_status tu_step_batch_close(tu_step_batch *batch, bool compute) {
    tu_self()->steps = NULL;
    return compute ? run_collected(batch) : TUTTI_OK;
}

void tu_step_batch_free(tu_step_batch *batch) {
    free(batch->steps);
    free(batch->memories);
}

/* Whether the batch takes it: without memory for the list the step is computed at once. */
static bool add_to_batch(tu_step_batch *batch, const tu_batched_step *each, int64_t elements) {
    if (batch->count == batch->capacity) {
        size_t capacity = batch->capacity == 0 ? 64 : 2 * batch->capacity;
        tu_batched_step *steps = realloc(batch->steps, capacity * sizeof *steps);
        if (steps == NULL)
            return false;
        batch->steps = steps;
        batch->capacity = capacity;
    }
    batch->steps[batch->count] = *each;
    batch->steps[batch->count++].first = batch->elements;
    batch->elements += elements;
    return true;
}

/* ---- memory that steps share ---- */

/* Foreign, mapped and exported memory may belong to several storages. */
static const tu_storage *memory_of(const tt_tensor *x) {
    bool alone = !x->storage->fixed && atomic_load_explicit(&x->storage->exports, memory_order_relaxed) == 0;
    return alone ? x->storage : NULL;
}

static tu_step_span span_of(const tt_tensor *x) {
    bool dense = (x->flags & TU_CONTIGUOUS) != 0;
    uintptr_t begin = (uintptr_t)(dense ? tu_pointer(x) : x->storage->data);
    size_t bytes = dense ? (size_t)x->numel * tu_dtype_bytes[x->dtype] : x->storage->bytes;
    return (tu_step_span){ begin, begin + (x->numel > 0 ? bytes : 0) };
}

static bool spans_meet(tu_step_span a, tu_step_span b) {
    return a.begin < b.end && b.begin < a.end;
}

static void widen(tu_step_span *span, tu_step_span by) {
    if (by.begin == by.end)
        return;
    bool empty = span->begin == span->end;
    span->begin = empty || by.begin < span->begin ? by.begin : span->begin;
    span->end = empty || by.end > span->end ? by.end : span->end;
}

/* Its place in the table, or the free one where it would be. The table is never full. */
static tu_step_memory *place_of(const tu_step_batch *batch, const tu_storage *storage) {
    size_t mask = batch->memory_capacity - 1;
    size_t at = (size_t)(((uint64_t)(uintptr_t)storage * 0x9e3779b97f4a7c15u) >> 32) & mask;
    while (batch->memories[at].round == batch->round && batch->memories[at].storage != storage)
        at = (at + 1) & mask;
    return &batch->memories[at];
}

/* At most half of the table is in use, so that places are found fast. */
static bool make_room(tu_step_batch *batch) {
    if (2 * (batch->memory_count + 1) <= batch->memory_capacity)
        return true;
    tu_step_batch larger = *batch;
    larger.memory_capacity = batch->memory_capacity == 0 ? 256 : 2 * batch->memory_capacity;
    larger.memories = calloc(larger.memory_capacity, sizeof *larger.memories);
    if (larger.memories == NULL)
        return false;
    for (size_t i = 0; i < batch->memory_capacity; i++)
        if (batch->memories[i].round == batch->round)
            *place_of(&larger, batch->memories[i].storage) = batch->memories[i];
    free(batch->memories);
    *batch = larger;
    return true;
}

static bool is_written(const tu_call *call, int input) {
    return (call->entry->written & TU_INPUT(input)) != 0;
}

/* Whether the batch could note what the step reads and writes. */
static bool note_memory(tu_step_batch *batch, const tu_call *call) {
    for (int i = 0; i < first_number(call); i++) {
        if (call->inputs[i] == NULL)
            continue;
        if (!make_room(batch))
            return false;
        const tu_storage *storage = memory_of(call->inputs[i]);
        tu_step_memory *memory = place_of(batch, storage);
        if (memory->round != batch->round) {
            *memory = (tu_step_memory){ .storage = storage, .round = batch->round };
            batch->memory_count++;
        }
        widen(is_written(call, i) ? &memory->written : &memory->read, span_of(call->inputs[i]));
    }
    return true;
}

/* Runs what was collected before a step that must see it, or must not be seen by it. */
static tutti_status keep_order(const tu_call *call) {
    tu_step_batch *batch = tu_self()->steps;
    if (batch == NULL || batch->count == 0)
        return TUTTI_OK;
    const tu_device *device = tu_on_device(call->inputs[0]) ? tu_device_of(call->inputs[0]) : NULL;
    if (batch->steps[0].device != device) /* a batch is of one device */
        return run_collected(batch);
    for (int i = 0; i < call->input_count; i++) {
        if (call->inputs[i] == NULL)
            continue;
        const tu_step_memory *memory = place_of(batch, memory_of(call->inputs[i]));
        tu_step_span span = span_of(call->inputs[i]);
        if (memory->round == batch->round &&
            (spans_meet(span, memory->written) || (is_written(call, i) && spans_meet(span, memory->read)))) {
            return run_collected(batch);
        }
    }
    return TUTTI_OK;
}

static void run_one(void *context, int64_t begin, int64_t end) {
    const tu_batched_step *each = context;
    each->kernel(&each->step, begin, end);
}

/* ---- steps ---- */

/* Runs a kernel on staged copies, and puts back those that it writes. All memory is there before the first write. */
static tutti_status run_step(tu_call *call, tu_batched_step each, tu_step_kernel *const *kernels) {
    tu_device *device = tu_on_device(call->inputs[0]) ? tu_device_of(call->inputs[0]) : NULL;
    tutti_dtype own = (tutti_dtype)call->inputs[0]->dtype;
    bool as_it_lies = device != NULL && (own == TUTTI_BF16 || own == TUTTI_F16); /* the device's kernel widens it */
    tutti_dtype dtype = as_it_lies ? own : tu_stage_dtype(call->inputs[0]);
    tt_tensor *staged[4] = { NULL };
    int count = first_number(call);
    void *at[4] = { NULL };
    bool ready = true, in_place = true;
    for (int i = 0; i < count; i++) {
        if (call->inputs[i] == NULL)
            continue;
        ready = (staged[i] = tu_stage_in(call->inputs[i], dtype)) != NULL && ready;
        at[i] = staged[i] != NULL ? tu_pointer(staged[i]) : NULL;
        in_place = in_place && staged[i] == call->inputs[i];
    }
    tutti_status status = ready ? TUTTI_OK : TUTTI_ERROR_MEMORY;
    if (ready) {
        each.step.parameter = at[0];
        each.step.gradient = at[1];
        each.step.first = at[2];
        each.step.second = at[3];
        each.kernel = device == NULL ? kernels[tu_float_index(dtype)] : NULL;
        each.device = device;
        each.dtype = dtype;
        int64_t elements = call->inputs[0]->numel;
        tu_step_batch *batch = in_place && !tu_self()->anomaly ? tu_self()->steps : NULL;
        bool collected = batch != NULL && note_memory(batch, call) && add_to_batch(batch, &each, elements);
        if (!collected && device != NULL)
            status = run_on_device(device, &each, 1, elements);
        else if (!collected)
            tu_parallel(elements, STEP_GRAIN, run_one, &each);
    }
    for (int i = 0; i < count; i++) {
        if (status == TUTTI_OK && staged[i] != call->inputs[i] && is_written(call, i) && staged[i] != NULL &&
            staged[i]->numel > 0)
            status = tu_copy_tensor(call->inputs[i], staged[i]);
        tu_tensor_drop(staged[i]);
    }
    return status;
}

tutti_status tu_sgd_everywhere(tu_call *call) {
    const tu_sgd_step_attributes *own = call->attributes;
    tu_batched_step each = { .step = { .momentum = own->momentum },
                             .rate = call->inputs[3],
                             .weight_decay = own->weight_decay };
    tutti_status status = keep_order(call);
    if (status == TUTTI_OK)
        status = number_step(&each, NULL);
    return status == TUTTI_OK ? run_step(call, each, tu_tensor_kernels_get()->sgd) : status;
}

tutti_status tu_adamw_everywhere(tu_call *call) {
    const tu_adamw_step_attributes *own = call->attributes;
    tu_step_batch *batch = tu_self()->steps;
    tu_batched_step each = { .step = { .beta1 = own->beta1, .beta2 = own->beta2, .epsilon = own->epsilon },
                             .adamw = true,
                             .count = call->inputs[4],
                             .rate = call->inputs[5],
                             .weight_decay = own->weight_decay };
    tutti_status status = keep_order(call);
    if (status == TUTTI_OK)
        status = number_step(&each, batch != NULL ? &batch->correction : NULL);
    return status == TUTTI_OK ? run_step(call, each, tu_tensor_kernels_get()->adamw) : status;
}

static tt_tensor *made(tu_sampler *sampler, tu_sample_kind kind) {
    return tt_detach(tt_clone(sampler->make(sampler, kind, tt_shape(sampler->size, 3), 0)));
}

static tt_tensor *made_number(tu_sampler *sampler) {
    return tt_detach(tt_clone(sampler->make(sampler, TU_SAMPLE_POSITIVE, tt_shape(), 0)));
}

tt_tensor *tu_sgd_sample(tu_sampler *sampler) {
    tt_tensor *parameter = made(sampler, TU_SAMPLE_NORMAL), *gradient = made(sampler, TU_SAMPLE_NORMAL);
    tu_sgd_step(parameter, gradient, made(sampler, TU_SAMPLE_NORMAL), made_number(sampler), 0.9, 0.1, NULL);
    return tt_detach(parameter);
}

tt_tensor *tu_adamw_sample(tu_sampler *sampler) {
    tt_tensor *parameter = made(sampler, TU_SAMPLE_NORMAL), *gradient = made(sampler, TU_SAMPLE_NORMAL);
    tt_tensor *first = made(sampler, TU_SAMPLE_NORMAL), *second = made(sampler, TU_SAMPLE_POSITIVE);
    tu_adamw_step(parameter, gradient, first, second, made_number(sampler), made_number(sampler), 0.9, 0.999, 1e-8,
                  0.01, NULL);
    return tt_detach(parameter);
}
