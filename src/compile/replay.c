/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that run again as a graph of the device: after two calls as ever, the next one is noted while it is given to a
 * stream (tutti/streams.h, tt_replay_begin), and from then on one launch runs it. It works on the memory that it was
 * noted with: arguments and gradients that it adds to are copied into places of its own before, and back where it
 * writes them; results are copied out of it behind, so that each call has its own as ever. What a module's slots hold
 * must lie where it lay; where it does not, the call is noted anew.
 *
 * What the host does at each call (random states, an optimizer's count and rate, other arithmetic on tensors of the
 * CPU) is done again before each run: tensor/noting.h. Gradients that the function leaves are set anew. What cannot be
 * noted (memory that is resized, versions that are set, results that share memory or require grad) makes a function run
 * as ever, and a warning says why.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/autograd.h>
#include <tutti/streams.h>

#include "autograd/operators.h"
#include "base/log.h"
#include "compile/entry.h"
#include "functional/operators.h"
#include "tensor/noting.h"
#include "tensor/operators.h"

#define WARM 2 /* calls before one is noted: what it needs is there then */

/* The gradient of a leaf that the function changes. */
typedef struct left_gradient {
    int input;         /* the leaf */
    tt_tensor *before; /* what it had before the call was noted; lent by the scope, while it is noted */
    tt_tensor *after;  /* held, in memory of the graph: what it gets a copy of; NULL: it gets none */
    bool stays;        /* it is the one that was there, which the graph adds to */
    const void *lay;   /* where that one lay */
} left_gradient;

struct tu_replay {
    pthread_mutex_t lock; /* of all below: a call that finds it taken runs as ever */
    tu_device *device;
    int calls;
    bool refused; /* it could not be noted */
    bool tf32;    /* the mode that it was noted in */
    void *stream; /* the caller's, which it runs on */
    void *graph;  /* NULL: not noted yet */
    tu_noted *noted;
    int input_count, output_count, effect_count, gradient_count;
    tt_tensor **places;   /* of each input: where an argument is copied to, or the tensor itself; held */
    const void **origins; /* of each input that is no argument: where it lay */
    bool *written;        /* of each input: the function writes into it */
    tt_tensor **outputs;  /* in memory of the graph, those of effects last */
    left_gradient *gradients;
};

/* ---- what can be noted ---- */

/* Whether the tensor of an input has a place of its own, to which it is copied before each run. */
static bool is_copied(const tu_graph_input *input) {
    return input->kind == TU_INPUT_ARGUMENT || input->kind == TU_INPUT_GRADIENT;
}

/* Sees to what a leaf's gradient is: the host's part of it is done behind each run. */
static bool sets_gradient(const tu_vertex *vertex) {
    return vertex->entry == &tu_operator_set_grad || vertex->entry == &tu_operator_accumulate_grad;
}

/* Takes numbers of the host that may change: see tensor/noting.h. */
static bool takes_numbers(const tu_vertex *vertex) {
    const tu_operator *entry = vertex->entry;
    return entry == &tu_operator_adamw_step || entry == &tu_operator_sgd_step || entry == &tu_operator_rand ||
           entry == &tu_operator_randn || entry == &tu_operator_randint || entry == &tu_operator_uniform ||
           entry == &tu_operator_normal || entry == &tu_operator_dropout;
}

/* Impure, and yet the same at each run, or seen to. */
static bool is_seen_to(const tu_vertex *vertex) {
    const tu_operator *entry = vertex->entry;
    return takes_numbers(vertex) || sets_gradient(vertex) || entry == &tu_operator_grad_of ||
           entry == &tu_operator_random_state || entry == &tu_operator_seed || entry == &tu_operator_empty ||
           entry == &tu_operator_empty_strided || entry == &tu_operator_wait || tu_vertex_communicates(vertex);
}

typedef struct devices {
    bool host, there, elsewhere; /* a vertex has values of the CPU, of the device, of another one */
} devices;

static void look_at(devices *found, const tu_value *value, tutti_device device) {
    if (value == NULL)
        return;
    found->host = found->host || value->shape.device == TUTTI_CPU;
    found->there = found->there || value->shape.device == device;
    found->elsewhere = found->elsewhere || (value->shape.device != TUTTI_CPU && value->shape.device != device);
}

/* Why a vertex cannot be noted; NULL: it can. */
static const char *hinders(const tt_graph *graph, const tu_vertex *vertex, tutti_device device) {
    devices found = { false, false, false };
    for (int i = 0; i < vertex->operand_count; i++)
        look_at(&found, vertex->operands[i].value, device);
    for (int i = 0; i < vertex->result_count; i++)
        look_at(&found, vertex->results[i], device);
    if (vertex->entry->flags & (TU_IMPURE | TU_STARTS | TU_BRINGS) && !is_seen_to(vertex))
        return "depends on the host at each call, or changes what others have";
    if (found.elsewhere)
        return "has a tensor of a third device";
    if (found.host && found.there && !takes_numbers(vertex))
        return "reads a tensor of one device and makes one of another";
    if (found.host && tu_vertex_communicates(vertex))
        return "meets other ranks on the CPU";
    const tu_value *leaf = sets_gradient(vertex) ? vertex->operands[0].value : NULL;
    if (leaf != NULL && leaf->maker != NULL)
        return "is for a leaf that the function makes";
    if (leaf != NULL && is_copied(&graph->inputs[leaf->place]))
        return "is for an argument, which is copied: only tensors that it finds itself can get gradients";
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

/* Whether a tensor that it leaves in a module's slot is memory of somebody else's too, or is put where it finds one at
 * the next call. */
static bool leaves_shared(const tt_graph *graph) {
    for (int i = 0; i < graph->effect_count; i++) {
        const tu_value *left = graph->effects[i].value;
        const tu_holder *holder = &graph->effects[i].holder;
        for (int k = 0; k < graph->input_count; k++)
            if ((left != NULL && left->storage == graph->inputs[k].value->storage) ||
                (graph->inputs[k].kind == TU_INPUT_HELD && graph->inputs[k].holder.owner == holder->owner &&
                 graph->inputs[k].holder.index == holder->index))
                return true;
        for (int k = 0; left != NULL && k < graph->output_count; k++)
            if (left->storage == graph->outputs[k].value->storage)
                return true;
        for (int k = 0; left != NULL && k < i; k++)
            if (graph->effects[k].value != NULL && left->storage == graph->effects[k].value->storage)
                return true;
    }
    return false;
}

/* The GPU that it computes on; TUTTI_CPU: none. */
static tutti_device device_of(const tt_graph *graph) {
    for (const tu_value *value = graph->values; value != NULL; value = value->next)
        if (tu_is_remote(value->shape.device))
            return value->shape.device;
    return TUTTI_CPU;
}

static bool find_reason(const tu_entry *entry, tutti_device device, char *reason, size_t size) {
    const tt_graph *graph = entry->forward;
    reason[0] = 0;
    if (entry->backward != NULL)
        snprintf(reason, size, "its results require grad; run the backward inside of it, or turn gradient mode off");
    else if (tutti_device_kind(device) != TUTTI_CUDA)
        snprintf(reason, size, "it computes nothing on a GPU");
    else if (returns_input(graph))
        snprintf(reason, size, "a result of it is one of its inputs, a view of one, or none");
    else if (shares_results(graph))
        snprintf(reason, size, "two results of it share memory");
    else if (leaves_shared(graph))
        snprintf(reason, size, "what it leaves in a module is read by it, or shares memory with an input or a result");
    for (const tu_vertex *vertex = graph->first; vertex != NULL && reason[0] == 0; vertex = vertex->next) {
        const char *why = hinders(graph, vertex, device);
        if (why != NULL)
            snprintf(reason, size, "%s %s", vertex->entry->name, why);
    }
    return reason[0] != 0;
}

/* ---- making and ending ---- */

/* The last run is over before the memory goes that it works on: of tensors that only the replay still holds, too. */
static void forget(tu_replay *replay) {
    if (replay->graph != NULL)
        replay->device->table->graph_end(replay->device->state, replay->device->index, replay->graph);
    replay->graph = NULL;
    for (int i = 0; i < replay->output_count + replay->effect_count; i++) {
        tu_tensor_drop(replay->outputs[i]);
        replay->outputs[i] = NULL;
    }
    for (int i = 0; i < replay->input_count; i++) {
        tu_tensor_drop(replay->places[i]);
        replay->places[i] = NULL;
    }
    for (int i = 0; i < replay->gradient_count; i++) {
        tu_tensor_drop(replay->gradients[i].after);
        replay->gradients[i].after = NULL;
    }
    tu_noted_end(replay->noted);
    replay->noted = NULL;
}

void tu_replay_end(tu_replay *replay) {
    if (replay == NULL)
        return;
    if (replay->places != NULL && replay->outputs != NULL && replay->gradients != NULL)
        forget(replay);
    if (replay->device != NULL)
        tu_devices_drop();
    pthread_mutex_destroy(&replay->lock);
    free(replay->places);
    free((void *)replay->origins);
    free(replay->written);
    free(replay->outputs);
    free(replay->gradients);
    free(replay);
}

/* Which inputs are written, and whose gradients change. */
static void look_through(tu_replay *made, const tt_graph *graph) {
    for (const tu_vertex *vertex = graph->first; vertex != NULL; vertex = vertex->next) {
        if (sets_gradient(vertex)) {
            int leaf = vertex->operands[0].value->place, i = 0;
            while (i < made->gradient_count && made->gradients[i].input != leaf)
                i++;
            if (i == made->gradient_count)
                made->gradients[made->gradient_count++].input = leaf;
            continue;
        }
        if (vertex->entry == &tu_operator_wait || vertex->entry == &tu_operator_grad_of)
            continue;
        for (int i = 0; i < vertex->operand_count; i++) {
            const tu_value *value = vertex->operands[i].value;
            for (int k = 0; value != NULL && tu_vertex_writes(vertex, i) && k < graph->input_count; k++)
                made->written[k] = made->written[k] || graph->inputs[k].value->storage == value->storage;
        }
    }
}

static tutti_status make_lists(tu_replay *made, const tt_graph *graph) {
    size_t inputs = (size_t)graph->input_count + 1, outputs = (size_t)(graph->output_count + graph->effect_count) + 1;
    made->input_count = graph->input_count;
    made->output_count = graph->output_count;
    made->effect_count = graph->effect_count;
    made->places = calloc(inputs, sizeof(tt_tensor *));
    made->origins = calloc(inputs, sizeof *made->origins);
    made->written = calloc(inputs, sizeof *made->written);
    made->outputs = calloc(outputs, sizeof(tt_tensor *));
    made->gradients = calloc(inputs, sizeof *made->gradients);
    if (made->places == NULL || made->origins == NULL || made->written == NULL || made->outputs == NULL ||
        made->gradients == NULL)
        return tu_error_memory("a replay", inputs * sizeof(tt_tensor *));
    look_through(made, graph);
    return TUTTI_OK;
}

tutti_status tu_replay_make(tu_entry *entry, bool full) {
    char reason[256];
    const tt_graph *graph = entry->forward;
    tutti_device number = device_of(graph);
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
    tutti_status status = make_lists(made, graph);
    if (status == TUTTI_OK)
        status = tu_device_get(number, &device);
    made->device = device;
    if (device != NULL)
        tu_devices_hold();
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
        bool copied = is_copied(&entry->forward->inputs[i]);
        tu_shape shape = tu_shape_of(inputs[i]);
        shape.offset = 0;
        replay->origins[i] = tu_pointer(inputs[i]);
        replay->places[i] = copied ? tu_tensor_new(&shape) : tu_tensor_hold(inputs[i]);
        if (replay->places[i] == NULL)
            return TUTTI_ERROR_MEMORY;
    }
    for (int i = 0; i < replay->gradient_count; i++)
        replay->gradients[i].before = tt_grad(inputs[replay->gradients[i].input]);
    return tu_self()->pending;
}

/* Nothing has run yet: gradients are what they were. */
static void restore_gradients(const tu_replay *replay, tt_tensor *const *inputs) {
    for (int i = 0; i < replay->gradient_count; i++)
        if (tt_grad(inputs[replay->gradients[i].input]) != replay->gradients[i].before)
            tt_set_grad(inputs[replay->gradients[i].input], replay->gradients[i].before);
}

/* What the noted call has left in slots and gradients is memory of the graph, and kept for copies. */
static void take_left(const tu_entry *entry, tu_replay *replay, tt_tensor *const *inputs) {
    const tt_graph *graph = entry->forward;
    for (int i = 0; i < replay->effect_count; i++) {
        const tu_graph_effect *effect = &graph->effects[i];
        if (effect->value != NULL)
            replay->outputs[replay->output_count + i] =
                tu_tensor_hold(effect->holder.get(effect->holder.owner, effect->holder.index));
    }
    for (int i = 0; i < replay->gradient_count; i++) {
        left_gradient *one = &replay->gradients[i];
        tt_tensor *after = tt_grad(inputs[one->input]);
        one->stays = after != NULL && after == one->before;
        one->after = one->stays ? NULL : tu_tensor_hold(after);
        one->lay = one->stays ? tu_pointer(after) : NULL;
    }
}

/* Runs the program while a stream of its own notes what it is given: the default stream cannot. */
static tutti_status note_on(tu_entry *entry, tu_replay *replay, void *stream) {
    const tu_device *device = replay->device;
    const tu_device_tensors *table = device->table;
    if (!tt_stream_set(device->number, stream))
        return tu_self()->pending;
    tutti_status status = table->capture_begin(device->state, device->index, stream);
    if (status == TUTTI_OK) {
        status = tu_noted_begin(device, &replay->noted);
        if (status == TUTTI_OK)
            status = tu_program_run(entry->run_forward, replay->places, replay->outputs);
        if (status == TUTTI_OK)
            take_left(entry, replay, replay->places);
        tutti_error_copy error;
        tu_error_save(&error);
        if (replay->noted != NULL)
            tu_noted_close(replay->noted);
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
    replay->tf32 = tu_self()->tf32;
    tutti_status status = take_places(entry, replay, inputs);
    if (status == TUTTI_OK)
        status = device->table->stream_new(device->state, device->index, &stream);
    if (status == TUTTI_OK)
        status = note_on(entry, replay, stream);
    if (stream != NULL)
        tu_device_stream_end(replay->device, stream);
    if (status != TUTTI_OK) {
        forget(replay);
        replay->refused = true;
        TU_LOG(TUTTI_LOG_WARN, NULL, "compile", "compiled %s is not replayed, and runs as ever: %s", entry->name,
               tutti_error_message());
        tt_error_clear();
    }
    restore_gradients(replay, inputs);
    return status;
}

/* ---- running ---- */

/* Whether what it uses where it lies has moved, or is computed in another way now. */
static bool has_changed(const tu_entry *entry, const tu_replay *replay, tt_tensor *const *inputs) {
    for (int i = 0; i < replay->input_count; i++)
        if (!is_copied(&entry->forward->inputs[i]) && replay->origins[i] != tu_pointer(inputs[i]))
            return true;
    for (int i = 0; i < replay->gradient_count; i++) {
        const left_gradient *one = &replay->gradients[i];
        const tt_tensor *now = one->stays ? tt_grad(inputs[one->input]) : NULL;
        if (one->stays && (now == NULL || tu_pointer(now) != one->lay))
            return true;
    }
    return replay->tf32 != tu_self()->tf32;
}

/* Of an argument whose elements share memory the memory is copied: its elements cannot be written one by one. */
static tt_tensor *as_it_lies(tt_tensor *x) {
    int64_t last = (int64_t)(tu_tensor_need(x) / tu_dtype_bytes[x->dtype]);
    return tu_overlaps_itself(x) ? tt_as_strided(x, tt_shape(last - x->offset), tt_shape(1), x->offset) : x;
}

static bool copy_between(tt_tensor *to, tt_tensor *from) {
    return tt_copy_(as_it_lies(to), as_it_lies(from)) != NULL;
}

/* What the graph wrote is known as written, and goes back to arguments. */
static tutti_status put_back(const tu_entry *entry, const tu_replay *replay, tt_tensor *const *inputs) {
    for (int i = 0; i < replay->input_count; i++) {
        if (!replay->written[i])
            continue;
        if (!is_copied(&entry->forward->inputs[i]))
            tu_bump(inputs[i]);
        else if (!copy_between(inputs[i], replay->places[i]))
            return tu_self()->pending;
    }
    return TUTTI_OK;
}

/* Copies of what it leaves go into slots and gradients. */
static tutti_status leave_copies(const tu_entry *entry, const tu_replay *replay, tt_tensor *const *inputs) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < replay->effect_count && status == TUTTI_OK; i++) {
        const tu_graph_effect *effect = &entry->forward->effects[i];
        tt_tensor *noted = replay->outputs[replay->output_count + i], *copy = noted != NULL ? tt_clone(noted) : NULL;
        status = noted != NULL && copy == NULL ? tu_self()->pending
                                               : effect->holder.set(effect->holder.owner, effect->holder.index, copy);
    }
    for (int i = 0; i < replay->gradient_count && status == TUTTI_OK; i++) {
        const left_gradient *one = &replay->gradients[i];
        if (one->stays)
            continue;
        tt_set_grad(inputs[one->input], one->after != NULL ? tt_clone(one->after) : NULL);
        status = tu_self()->pending;
    }
    return status;
}

static tutti_status run(const tu_entry *entry, const tu_replay *replay, tt_tensor *const *inputs, tt_tensor **outputs) {
    const tu_device *device = replay->device;
    for (int i = 0; i < replay->input_count; i++)
        if (is_copied(&entry->forward->inputs[i]) && !copy_between(replay->places[i], inputs[i]))
            return tu_self()->pending;
    tutti_status status = tu_noted_run(replay->noted, replay->stream);
    if (status == TUTTI_OK)
        status = device->table->graph_run(device->state, device->index, replay->stream, replay->graph);
    if (status == TUTTI_OK)
        status = put_back(entry, replay, inputs);
    if (status == TUTTI_OK)
        status = leave_copies(entry, replay, inputs);
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
        if (replay->graph == NULL || has_changed(entry, replay, inputs))
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
