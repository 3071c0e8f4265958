/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that run again as a graph of the device: after two calls as ever, the next one is noted while it is given to a
 * stream (tutti/streams.h, tt_replay_begin), and from then on one launch runs it. It works on the memory that it was
 * noted with: arguments are copied into places of its own before, results out of them behind, so that each call has its
 * own as ever. What a module's slots hold must lie where it lay; where it does not, the call is noted anew.
 *
 * What depends on the host at each call cannot be noted: random numbers, optimizer steps with their counts, effects,
 * tensors of the CPU. A function that has such, or results that share memory, runs as ever, and a warning says why.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/autograd.h>
#include <tutti/streams.h>

#include "base/log.h"
#include "compile/entry.h"
#include "tensor/on_device.h"
#include "tensor/operator.h"

#define WARM 2 /* calls before one is noted: what it needs is there then */

struct tu_replay {
    pthread_mutex_t lock; /* of all below: a call that finds it taken runs as ever */
    const tu_device *device;
    int calls;
    bool refused; /* it could not be noted */
    void *stream; /* the caller's, which it runs on */
    void *graph;  /* NULL: not noted yet */
    int input_count, output_count;
    tt_tensor **places;   /* of each input: where an argument is copied to, or the tensor itself; held */
    const void **origins; /* of each input that is no argument: where it lay */
    tt_tensor **outputs;  /* in memory of the graph */
};

/* ---- what can be noted ---- */

static bool is_there(const tu_value *value, tutti_device device) {
    return value == NULL || value->shape.device == device;
}

/* Why a vertex cannot be noted; NULL: it can. */
static const char *hinders(const tt_graph *graph, const tu_vertex *vertex, tutti_device device) {
    if (vertex->entry->flags & (TU_IMPURE | TU_STARTS | TU_BRINGS | TU_ANYWHERE))
        return "depends on the host at each call, or changes what others have";
    for (int i = 0; i < vertex->operand_count; i++) {
        const tu_value *value = vertex->operands[i].value;
        if (!is_there(value, device))
            return "reads a tensor of another device";
        for (int k = 0; value != NULL && tu_vertex_writes(vertex, i) && k < graph->input_count; k++)
            if (graph->inputs[k].value->storage == value->storage)
                return "writes into what the function is given";
    }
    for (int i = 0; i < vertex->result_count; i++)
        if (!is_there(vertex->results[i], device))
            return "makes a tensor of another device";
    return NULL;
}

static bool returns_input(const tt_graph *graph) {
    for (int i = 0; i < graph->output_count; i++) {
        if (graph->outputs[i].value == NULL)
            return true;
        for (int k = 0; k < graph->input_count; k++)
            if (graph->outputs[i].value->storage == graph->inputs[k].value->storage)
                return true;
    }
    return false;
}

/* Each result of a replay is copied out of the graph on its own. */
static bool shares_results(const tt_graph *graph) {
    for (int i = 0; i < graph->output_count; i++)
        for (int k = 0; k < i; k++)
            if (graph->outputs[i].value->storage == graph->outputs[k].value->storage)
                return true;
    return false;
}

static bool find_reason(const tu_entry *entry, tutti_device device, char *reason, size_t size) {
    const tt_graph *graph = entry->forward;
    reason[0] = 0;
    if (entry->backward != NULL)
        snprintf(reason, size, "its results require grad; run the backward inside of it, or turn gradient mode off");
    else if (graph->effect_count > 0)
        snprintf(reason, size, "it leaves gradients or other tensors behind");
    else if (tutti_device_kind(device) != TUTTI_CUDA)
        snprintf(reason, size, "it computes nothing on a GPU");
    else if (returns_input(graph))
        snprintf(reason, size, "a result of it is one of its inputs, a view of one, or none");
    else if (shares_results(graph))
        snprintf(reason, size, "two results of it share memory");
    for (int i = 0; i < graph->input_count && reason[0] == 0; i++)
        if (graph->inputs[i].value->shape.device != device)
            snprintf(reason, size, "%s is on the device %s", graph->inputs[i].value->name,
                     tutti_device_name(graph->inputs[i].value->shape.device));
    for (const tu_vertex *vertex = graph->first; vertex != NULL && reason[0] == 0; vertex = vertex->next) {
        const char *why = hinders(graph, vertex, device);
        if (why != NULL)
            snprintf(reason, size, "%s %s", vertex->entry->name, why);
    }
    return reason[0] != 0;
}

/* ---- making and ending ---- */

static void forget(tu_replay *replay) {
    for (int i = 0; i < replay->output_count; i++) {
        tu_tensor_drop(replay->outputs[i]);
        replay->outputs[i] = NULL;
    }
    for (int i = 0; i < replay->input_count; i++) {
        tu_tensor_drop(replay->places[i]);
        replay->places[i] = NULL;
    }
    if (replay->graph != NULL)
        replay->device->table->graph_end(replay->device->state, replay->device->index, replay->graph);
    replay->graph = NULL;
}

void tu_replay_end(tu_replay *replay) {
    if (replay == NULL)
        return;
    if (replay->places != NULL && replay->outputs != NULL)
        forget(replay);
    pthread_mutex_destroy(&replay->lock);
    free(replay->places);
    free((void *)replay->origins);
    free(replay->outputs);
    free(replay);
}

tutti_status tu_replay_make(tu_entry *entry, bool full) {
    char reason[256];
    const tt_graph *graph = entry->forward;
    tutti_device number =
        graph->output_count > 0 && graph->outputs[0].value != NULL ? graph->outputs[0].value->shape.device : TUTTI_CPU;
    if (entry->compare_forward != NULL)
        return TUTTI_OK; /* every call is compared with calls of operators, which a replay would leave out */
    if (find_reason(entry, number, reason, sizeof reason)) {
        if (full)
            return tu_error(TUTTI_ERROR_CAPTURE, "compiled %s cannot be replayed: %s", entry->name, reason);
        TU_LOG(TUTTI_LOG_WARN, NULL, "compile", "compiled %s is not replayed, and runs as ever: %s", entry->name,
               reason);
        return TUTTI_OK;
    }
    tu_replay *made = calloc(1, sizeof *made);
    tu_device *device = NULL;
    if (made == NULL)
        return tu_error_memory("a replay", sizeof *made);
    pthread_mutex_init(&made->lock, NULL);
    made->input_count = graph->input_count;
    made->output_count = graph->output_count;
    made->places = calloc((size_t)made->input_count + 1, sizeof(tt_tensor *));
    made->origins = calloc((size_t)made->input_count + 1, sizeof *made->origins);
    made->outputs = calloc((size_t)made->output_count + 1, sizeof(tt_tensor *));
    tutti_status status = made->places == NULL || made->origins == NULL || made->outputs == NULL
                              ? tu_error_memory("a replay", (size_t)made->input_count * sizeof(tt_tensor *))
                              : tu_device_get(number, &device);
    made->device = device;
    if (status != TUTTI_OK)
        tu_replay_end(made);
    else
        entry->replay = made;
    return status;
}

/* ---- noting ---- */

/* Another tensor of the same shape and strides, for an argument; everything else is used where it is. */
static tutti_status take_places(const tu_entry *entry, tu_replay *replay, tt_tensor *const *inputs) {
    for (int i = 0; i < replay->input_count; i++) {
        bool argument = entry->forward->inputs[i].kind == TU_INPUT_ARGUMENT;
        tu_shape shape = tu_shape_of(inputs[i]);
        shape.offset = 0;
        replay->origins[i] = tu_pointer(inputs[i]);
        replay->places[i] = argument ? tu_tensor_new(&shape) : tu_tensor_hold(inputs[i]);
        if (replay->places[i] == NULL)
            return TUTTI_ERROR_MEMORY;
    }
    return TUTTI_OK;
}

/* Runs the program while a stream of its own notes what it is given: the default stream cannot. */
static tutti_status note_on(tu_entry *entry, tu_replay *replay, void *stream) {
    const tu_device *device = replay->device;
    const tu_device_tensors *table = device->table;
    if (!tt_stream_set(device->number, stream))
        return tu_self()->pending;
    tutti_status status = table->capture_begin(device->state, device->index, stream);
    if (status == TUTTI_OK) {
        status = tu_program_run(entry->run_forward, replay->places, replay->outputs);
        tutti_error_copy error;
        tu_error_save(&error);
        tutti_status ended =
            table->capture_end(device->state, device->index, stream, status == TUTTI_OK ? &replay->graph : NULL);
        if (status != TUTTI_OK)
            tu_error_restore(&error);
        else
            status = ended;
    }
    tt_stream_set(device->number, replay->stream);
    return status;
}

static tutti_status note(tu_entry *entry, tu_replay *replay, tt_tensor *const *inputs) {
    const tu_device *device = replay->device;
    void *stream = NULL;
    forget(replay);
    tutti_status status = take_places(entry, replay, inputs);
    if (status == TUTTI_OK)
        status = device->table->stream_new(device->state, device->index, &stream);
    if (status == TUTTI_OK)
        status = note_on(entry, replay, stream);
    if (stream != NULL)
        device->table->stream_end(device->state, device->index, stream);
    if (status != TUTTI_OK) {
        forget(replay);
        replay->refused = true;
        TU_LOG(TUTTI_LOG_WARN, NULL, "compile", "compiled %s is not replayed, and runs as ever: %s", entry->name,
               tutti_error_message());
        tt_error_clear();
    }
    return status;
}

/* ---- running ---- */

static bool lies_elsewhere(const tu_entry *entry, const tu_replay *replay, tt_tensor *const *inputs) {
    for (int i = 0; i < replay->input_count; i++)
        if (entry->forward->inputs[i].kind != TU_INPUT_ARGUMENT && replay->origins[i] != tu_pointer(inputs[i]))
            return true;
    return false;
}

/* Of an argument whose elements share memory the memory is copied: its elements cannot be written one by one. */
static tt_tensor *as_it_lies(tt_tensor *x) {
    int64_t last = (int64_t)(tu_tensor_need(x) / tu_dtype_bytes[x->dtype]);
    return tu_overlaps_itself(x) ? tt_as_strided(x, tt_shape(last - x->offset), tt_shape(1), x->offset) : x;
}

static tutti_status run(const tu_entry *entry, const tu_replay *replay, tt_tensor *const *inputs, tt_tensor **outputs) {
    const tu_device *device = replay->device;
    for (int i = 0; i < replay->input_count; i++)
        if (entry->forward->inputs[i].kind == TU_INPUT_ARGUMENT &&
            tt_copy_(as_it_lies(replay->places[i]), as_it_lies(inputs[i])) == NULL)
            return tu_self()->pending;
    tutti_status status = device->table->graph_run(device->state, device->index, replay->stream, replay->graph);
    for (int i = 0; i < replay->output_count && status == TUTTI_OK; i++) {
        tt_tensor *copy = tt_clone(replay->outputs[i]);
        if (copy == NULL)
            return tu_self()->pending;
        outputs[i] = tu_tensor_hold(copy);
    }
    return status;
}

tutti_status tu_replay_try(tu_entry *entry, tt_tensor *const *inputs, tt_tensor **outputs, bool *ran) {
    tu_replay *replay = entry->replay;
    tutti_status status = TUTTI_OK;
    *ran = false;
    if (replay == NULL || pthread_mutex_trylock(&replay->lock) != 0)
        return TUTTI_OK;
    void *stream = tu_device_stream(replay->device);
    replay->calls += replay->calls <= WARM; /* and no further: it would overflow */
    bool possible = !replay->refused && replay->calls > WARM && !tu_device_capturing(replay->device);
    if (possible && replay->graph == NULL)
        replay->stream = stream;
    if (possible && replay->stream == stream) { /* its places are in order with that stream alone */
        tt_scope scope = tt_scope_open();
        bool recording = tt_grad_mode(false);
        if (replay->graph == NULL || lies_elsewhere(entry, replay, inputs))
            possible = note(entry, replay, inputs) == TUTTI_OK;
        if (possible) {
            *ran = true;
            status = run(entry, replay, inputs, outputs);
        }
        tt_grad_mode(recording);
        tu_scope_leave(&scope);
    }
    pthread_mutex_unlock(&replay->lock);
    return status;
}
