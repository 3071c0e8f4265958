/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams, events and memory of devices, and copies between devices: the public functions over on_device.h.
 */
#include <tutti/streams.h>

#include <stdlib.h>
#include <string.h>

#include "base/result.h"
#include "tensor/loop.h"
#include "tensor/noting.h"
#include "tensor/operators.h"

/* The device of a call, which is not the CPU; else NULL with the pending error set. */
static tu_device *device_for(const char *who, tutti_device number) {
    tu_device *device = NULL;
    if (tu_self()->pending != TUTTI_OK)
        return NULL;
    if (tutti_device_kind(number) != TUTTI_CUDA) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: the device %s has no streams and no memory of its own; cuda has", who,
                tutti_device_name(number));
        return NULL;
    }
    return tu_pending_take(tu_device_get(number, &device)) == TUTTI_OK ? device : NULL;
}

bool tt_device_available(tutti_device number) {
    if (number == 0 || number == TUTTI_CPU || number == TUTTI_META)
        return true;
    if (tutti_device_kind(number) == 0)
        return false;
    tutti_error_copy before;
    tu_device *device;
    tu_error_save(&before);
    bool there = tu_device_get(number, &device) == TUTTI_OK;
    (void)tu_error_restore(&before);
    return there;
}

tutti_device tt_default_device(void) {
    tutti_device device = tu_self()->default_device;
    return device != 0 ? device : TUTTI_CPU;
}

bool tt_default_device_set(tutti_device number) {
    tu_device *device = NULL;
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (number == 0 || number == TUTTI_CPU || number == TUTTI_META) {
        tu_self()->default_device = number;
        return true;
    }
    if (tu_pending_take(tu_device_get(number, &device)) != TUTTI_OK)
        return false;
    tu_self()->default_device = device->number;
    return true;
}

/* ---- streams ---- */

void *tt_stream(tutti_device number) {
    const tu_device *device = device_for("stream", number);
    return device != NULL ? tu_device_stream(device) : NULL;
}

bool tt_stream_set(tutti_device number, void *stream) {
    const tu_device *device = device_for("stream_set", number);
    tu_thread *self = tu_self();
    if (device == NULL || tu_pending_take(tu_thread_register()) != TUTTI_OK)
        return false;
    if (self->streams == NULL && (self->streams = calloc(TU_DEVICES, sizeof *self->streams)) == NULL) {
        tu_pending_take(tu_error_memory("current streams", TU_DEVICES * sizeof *self->streams));
        return false;
    }
    self->streams[device->index] = stream;
    return true;
}

void *tt_stream_new(tutti_device number) {
    const tu_device *device = device_for("stream_new", number);
    void *stream = NULL;
    if (device == NULL || tu_pending_take(device->table->stream_new(device->state, device->index, &stream)) != TUTTI_OK)
        return NULL;
    tu_devices_hold();
    return stream;
}

void tt_stream_release(tutti_device number, void *stream) {
    tu_device *device;
    tu_thread *self = tu_self();
    if (stream == NULL || tutti_device_kind(number) != TUTTI_CUDA || tu_device_get(number, &device) != TUTTI_OK)
        return;
    tu_noted_drop(device, stream);
    if (self->streams != NULL && self->streams[device->index] == stream)
        self->streams[device->index] = NULL;
    tu_device_stream_end(device, stream);
    tu_devices_drop();
}

bool tt_synchronize(tutti_device number) {
    const tu_device *device = device_for("synchronize", number);
    return device != NULL && tu_pending_take(tu_device_wait(device)) == TUTTI_OK;
}

/* ---- events ---- */

struct tt_event {
    const tu_device *device;
    void *event;
};

tt_event *tt_event_record(tutti_device number) {
    const tu_device *device = device_for("event_record", number);
    tt_event *made = device != NULL ? malloc(sizeof *made) : NULL;
    if (device != NULL && made == NULL)
        tu_pending_take(tu_error_memory("an event", sizeof *made));
    if (made == NULL)
        return NULL;
    *made = (tt_event){ .device = device };
    if (tu_pending_take(device->table->mark(device->state, device->index, tu_device_stream(device), &made->event)) ==
        TUTTI_OK) {
        tu_devices_hold();
        return made;
    }
    free(made);
    return NULL;
}

/* Whether there is an event to ask; else sets the pending error. */
static bool is_event(const char *who, const tt_event *event) {
    if (tu_self()->pending == TUTTI_OK && event == NULL)
        tu_fail(TUTTI_ERROR_ARGUMENT, "%s: event is NULL", who);
    return tu_self()->pending == TUTTI_OK;
}

bool tt_event_join(const tt_event *event) {
    if (!is_event("event_join", event))
        return false;
    const tu_device *device = event->device;
    return tu_pending_take(device->table->join(device->state, device->index, tu_device_stream(device), event->event)) ==
           TUTTI_OK;
}

bool tt_event_wait(const tt_event *event) {
    if (!is_event("event_wait", event))
        return false;
    const tu_device *device = event->device;
    return tu_pending_take(device->table->wait(device->state, device->index, event->event)) == TUTTI_OK;
}

bool tt_event_done(const tt_event *event) {
    bool complete = false;
    if (!is_event("event_done", event))
        return false;
    const tu_device *device = event->device;
    return tu_pending_take(device->table->test(device->state, device->index, event->event, &complete)) == TUTTI_OK &&
           complete;
}

void tt_event_release(tt_event *event) {
    if (event == NULL)
        return;
    event->device->table->unmark(event->device->state, event->device->index, event->event);
    tu_devices_drop();
    free(event);
}

/* ---- replays ---- */

struct tt_replay {
    const tu_device *device;
    void *graph;
    tu_noted *noted; /* what the host does before each run */
};

bool tt_replay_begin(tutti_device number) {
    const tu_device *device = device_for("replay_begin", number);
    tu_noted *noted = NULL;
    if (device == NULL || tu_pending_take(device->table->capture_begin(device->state, device->index,
                                                                       tu_device_stream(device))) != TUTTI_OK)
        return false;
    tutti_status status = tu_noted_begin(device, &noted);
    if (status != TUTTI_OK)
        device->table->capture_end(device->state, device->index, tu_device_stream(device), NULL);
    return tu_pending_take(status) == TUTTI_OK;
}

/* Also with an error pending: the stream must not stay captured. */
tt_replay *tt_replay_end(tutti_device number) {
    tu_device *device = NULL;
    if (tutti_device_kind(number) != TUTTI_CUDA || tu_device_get(number, &device) != TUTTI_OK)
        return device_for("replay_end", number), NULL;
    tu_noted *noted = tu_noting(device);
    if (noted == NULL && tu_device_capturing(device)) {
        tu_fail(TUTTI_ERROR_STATE, "replay_end: the current stream is captured, but not since this thread's last "
                                   "tt_replay_begin: end what was begun later first, each with its stream current");
        return NULL;
    }
    tt_replay *made = malloc(sizeof *made);
    if (made == NULL)
        tu_pending_take(tu_error_memory("a replay", sizeof *made));
    bool good = made != NULL && tu_self()->pending == TUTTI_OK;
    if (made != NULL)
        *made = (tt_replay){ .device = device, .noted = noted };
    if (noted != NULL)
        tu_noted_close(noted);
    tutti_status status =
        device->table->capture_end(device->state, device->index, tu_device_stream(device), good ? &made->graph : NULL);
    if (good && tu_pending_take(status) == TUTTI_OK) {
        tu_devices_hold();
        return made;
    }
    tu_noted_end(noted);
    free(made);
    return NULL;
}

bool tt_replay_run(tt_replay *replay) {
    if (tu_self()->pending != TUTTI_OK)
        return false;
    if (replay == NULL) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "replay_run: replay is NULL");
        return false;
    }
    const tu_device *device = replay->device;
    void *stream = tu_device_stream(device);
    tutti_status status = tu_noted_run(replay->noted, stream);
    if (status == TUTTI_OK)
        status = device->table->graph_run(device->state, device->index, stream, replay->graph);
    return tu_pending_take(status) == TUTTI_OK;
}

void tt_replay_release(tt_replay *replay) {
    if (replay == NULL)
        return;
    replay->device->table->graph_end(replay->device->state, replay->device->index, replay->graph);
    tu_noted_end(replay->noted);
    tu_devices_drop();
    free(replay);
}

/* ---- memory ---- */

tutti_status tt_device_memory_get(tutti_device number, tt_device_memory *memory) {
    tu_device *device;
    tu_device_usage usage;
    if (memory == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tt_device_memory_get: memory is NULL");
    if (tutti_device_kind(number) != TUTTI_CUDA)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tt_device_memory_get: the device %s has no memory of its own; cuda has",
                        tutti_device_name(number));
    tutti_status status = tu_device_get(number, &device);
    if (status == TUTTI_OK)
        status = device->table->usage(device->state, device->index, &usage);
    if (status != TUTTI_OK)
        return status;
    tt_device_memory full = { .allocated = usage.allocated,
                              .reserved = usage.reserved,
                              .peak_allocated = usage.peak_allocated,
                              .peak_reserved = usage.peak_reserved,
                              .limit = usage.limit,
                              .allocations = usage.allocations,
                              .reservations = usage.reservations,
                              .retries = usage.retries };
    return tu_result_copy("tt_device_memory", &full, sizeof full, memory);
}

tutti_status tt_device_memory_limit(tutti_device number, size_t bytes) {
    tu_device *device;
    if (tutti_device_kind(number) != TUTTI_CUDA)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tt_device_memory_limit: the device %s has no memory of its own; cuda has",
                        tutti_device_name(number));
    tutti_status status = tu_device_get(number, &device);
    return status == TUTTI_OK ? device->table->set_limit(device->state, device->index, bytes) : status;
}

void tt_device_memory_trim(tutti_device number) {
    tu_device *device;
    if (tutti_device_kind(number) == TUTTI_CUDA && tu_device_get(number, &device) == TUTTI_OK)
        device->table->trim(device->state, device->index);
}

/* ---- to another device ---- */

tutti_status tu_to_device_shape(tu_call *call) {
    const tu_to_device_attributes *attributes = call->attributes;
    const tt_tensor *x = call->inputs[0];
    tutti_device device = attributes->device == 0 ? TUTTI_CPU : attributes->device;
    if (x->device == TUTTI_META && device != TUTTI_META)
        return tu_call_error(call, TUTTI_ERROR_UNSUPPORTED, "%s has a shape but no data", tu_describe(x));
    return tu_shape_from("to_device", tt_dims_of(x->ndim, x->sizes), x->dtype, device, &call->results[0]);
}

tutti_status tu_to_device_everywhere(tu_call *call) {
    tt_tensor *out = call->outputs[0];
    return out->device == TUTTI_META || out->numel == 0 ? TUTTI_OK : tu_copy_tensor(out, call->inputs[0]);
}

tt_tensor *tu_to_device_sample(tu_sampler *sampler) {
    tt_tensor *x = sampler->make(sampler, TU_SAMPLE_NORMAL, tt_shape(sampler->size, 3), 0);
    return tu_to_device(x, x != NULL ? x->device : TUTTI_CPU);
}

tt_tensor *tt_to_device(tt_tensor *x, tutti_device device) {
    tu_device *found;
    if (tu_self()->pending != TUTTI_OK || tu_pending_take(tu_tensor_check("to_device", "x", x)) != TUTTI_OK)
        return NULL;
    if (device == TUTTI_CUDA && !tu_is_capturing()) { /* the current one, by its number */
        if (tu_pending_take(tu_device_get(device, &found)) != TUTTI_OK)
            return NULL;
        device = found->number;
    }
    if (x->device == (device == 0 ? TUTTI_CPU : device) && !(x->flags & TU_NUMBER))
        return x;
    return tu_to_device(x, device);
}
