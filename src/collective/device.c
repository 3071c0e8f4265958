/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives whose buffers lie on a device: recognised, described, and handed to the device's backend, which enqueues
 * them.
 *
 * The call returns when the work is in the stream. What the device finds out later (a deadline, a mismatch, a dead
 * peer) stays with the group and is returned by its next call, and by tutti_group_check.
 */
#include "collective/device.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <tutti/collective.h>

#include "base/error.h"
#include "collective/collective.h"
#include "collective/work.h"

/* This rank's side of a group on its device. */
typedef struct device_side {
    tutti_group *group;
    pthread_mutex_t lock; /* making the team */
    const tu_device_executor *table;
    const tu_backend_streams *streams;
    void *state; /* of the backend in this world */
    void *team;  /* NULL: not made yet */
    int device_index;
    void *stream; /* for works; made on first need, under lock */
} device_side;

static tutti_status make_side(tutti_group *group, void **made) {
    device_side *side = calloc(1, sizeof *side);
    if (side == NULL)
        return tu_error_memory("a group on a device", sizeof *side);
    side->group = group;
    const tu_backend *backend;
    tutti_status status = tu_backend_get(group->world, TUTTI_CUDA, &backend, &side->state);
    if (status == TUTTI_OK && (backend->executor == NULL || backend->streams == NULL))
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s has no collectives", backend->name);
    if (status != TUTTI_OK) {
        free(side);
        return status;
    }
    side->table = backend->executor;
    side->streams = backend->streams;
    pthread_mutex_init(&side->lock, NULL);
    *made = side;
    return TUTTI_OK;
}

static void end_side(void *opaque) {
    device_side *side = opaque;
    if (side->team != NULL)
        side->table->end(side->team);
    if (side->stream != NULL)
        side->streams->destroy(side->state, side->device_index, side->stream);
    pthread_mutex_destroy(&side->lock);
    free(side);
}

static tutti_status get_side(tutti_group *group, device_side **side) {
    void *state;
    tutti_status status = tu_group_room(group, TU_ROOM_BACKEND, make_side, end_side, &state);
    if (status == TUTTI_OK)
        *side = state;
    return status;
}

/* ---- recognising ---- */

static bool on_device(tutti_world *world, const void *pointer, int *index) {
    const tu_backend *backend;
    void *state;
    return pointer != NULL && tu_backend_get(world, TUTTI_CUDA, &backend, &state) == TUTTI_OK &&
           backend->streams != NULL && backend->streams->recognise(state, pointer, index);
}

/* Opens the device's backend when this process uses the device, so that its memory is recognised. */
static void discover(tutti_world *world) {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL || world->fake)
        return;
    dlclose(library);
    tu_error_copy before;
    const tu_backend *backend;
    void *state;
    tu_error_save(&before); /* without a backend, nothing is on a device as far as this world can know */
    if (tu_backend_get(world, TUTTI_CUDA, &backend, &state) != TUTTI_OK)
        TU_LOG(TUTTI_LOG_DEBUG, world->log, "collective", "this process uses CUDA, but: %s", tutti_error_message());
    tu_error_restore(&before);
}

bool tu_device_task_wanted(const tu_task *task, const tutti_call *call) {
    tutti_world *world = task->group->world;
    if (atomic_load_explicit(&world->devices, memory_order_relaxed) == NULL) {
        /* Looked for at the world's first collective, and again whenever a call names a stream. */
        if (call->stream == NULL && atomic_load_explicit(&world->looked, memory_order_relaxed))
            return false;
        atomic_store_explicit(&world->looked, true, memory_order_relaxed);
        discover(world);
        if (atomic_load_explicit(&world->devices, memory_order_relaxed) == NULL)
            return false;
    }
    if (world->fake)
        return false;
    if (task->shape == TU_OPERATION_BARRIER)
        return call->stream != NULL && task->info.operation != TU_OPERATION_PREPARE;
    int index;
    return on_device(world, task->in, &index) || on_device(world, task->out, &index);
}

/* ---- the team ---- */

static tutti_status ensure_team(device_side *side, int index, void *stream, int64_t deadline) {
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&side->lock);
    if (side->team == NULL) {
        if (side->streams->capturing(side->state, stream))
            status = tu_error(TUTTI_ERROR_STATE,
                              "group %s has not been used on this device, and a stream is capturing: call "
                              "tutti_group_prepare before the capture begins",
                              side->group->name);
        else
            status = side->table->prepare(side->state, side->group, &index, deadline, &side->team);
        side->device_index = index;
    } else if (index >= 0 && index != side->device_index) {
        status =
            tu_error(TUTTI_ERROR_ARGUMENT, "group %s is used with device %d on this rank; this buffer is on device %d",
                     side->group->name, side->device_index, index);
    }
    pthread_mutex_unlock(&side->lock);
    return status;
}

tutti_status tu_device_prepare(tutti_group *group, int64_t deadline) {
    if (atomic_load_explicit(&group->world->devices, memory_order_acquire) == NULL || group->size == 1)
        return TUTTI_OK;
    device_side *side;
    tu_memory_group *memory;
    tutti_status status = get_side(group, &side);
    if (status == TUTTI_OK)
        status = ensure_team(side, -1, NULL, deadline);
    if (status == TUTTI_OK)
        status = tu_memory_group_get(group, &memory);
    for (uint32_t index = 1; status == TUTTI_OK && index < 1024; index++) {
        const tutti_peers *peers = tu_symmetric_peers(memory, index);
        if (peers == NULL || peers->memory->device == TUTTI_CPU)
            continue;
        tu_device_place place = { .map = &peers->blocks, .index = index };
        status = side->table->know(side->team, &place);
    }
    return status;
}

/* ---- describing ---- */

static tutti_status find_place(tutti_group *group, const void *pointer, size_t bytes, tu_device_place *place) {
    *place = (tu_device_place){ .map = NULL };
    if (pointer == NULL || bytes == 0)
        return TUTTI_OK;
    tu_memory_group *memory;
    tu_symmetric found;
    tutti_status status = tu_memory_group_get(group, &memory);
    if (status == TUTTI_OK && tu_symmetric_find(memory, pointer, bytes, &found) && found.peers != NULL)
        *place = (tu_device_place){ .map = &found.peers->blocks, .index = found.index, .offset = found.offset };
    return status;
}

/* Arrays of a device task, per member. */
typedef struct lists {
    uint64_t send_offset[TU_DEVICE_RANKS], send_bytes[TU_DEVICE_RANKS], receive_offset[TU_DEVICE_RANKS],
        receive_bytes[TU_DEVICE_RANKS];
    uint64_t parts[TU_DEVICE_RANKS + 1];
} lists;

static tutti_status describe(const tu_task *task, const tutti_call *call, lists *l, tu_device_task *out) {
    tutti_group *group = task->group;
    int rank = group->rank, size = group->size;
    const char *name = tu_operation_name((tu_operation)task->info.operation);
    if (size > TU_DEVICE_RANKS)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s: on devices a group has at most %d ranks, not %d", name,
                        TU_DEVICE_RANKS, size);
    uint64_t signature = tu_signature(task);
    *out = (tu_device_task){ .size = sizeof *out,
                             .operation = task->info.operation,
                             .name = name,
                             .sequence = task->info.sequence,
                             .signature = (uint32_t)(signature ^ signature >> 32),
                             .in = task->in,
                             .out = task->out,
                             .algorithm = task->forced,
                             .stream = call->stream,
                             .dtype = (tutti_dtype)task->info.dtype,
                             .reduction = (tutti_reduction)task->info.reduction,
                             .count = task->info.count,
                             .root = -1,
                             .factor = task->factor };
    switch (task->shape) {
    case TU_OPERATION_BARRIER:
        out->shape = TU_DEVICE_BARRIER;
        return TUTTI_OK;
    case TU_OPERATION_ALL_REDUCE:
    case TU_OPERATION_REDUCE:
        out->shape = TU_DEVICE_REDUCE;
        out->root = task->shape == TU_OPERATION_REDUCE ? task->info.root : -1;
        break;
    case TU_OPERATION_REDUCE_SCATTER:
    case TU_OPERATION_REDUCE_SCATTER_V:
        out->shape = TU_DEVICE_REDUCE_SCATTER;
        for (int i = 0; i < size; i++) {
            tu_slice slice = tu_slice_of(task, size, i);
            l->parts[i] = slice.first;
            l->parts[i + 1] = slice.first + slice.count;
        }
        out->parts = l->parts;
        out->count = l->parts[size];
        out->row = task->row;
        break;
    case TU_OPERATION_ALL_TO_ALL_VDEV:
        out->shape = TU_DEVICE_VDEV;
        out->in_splits = task->vdev.in_splits;
        out->out_splits = task->vdev.out_splits;
        out->row_bytes = task->info.count * task->element;
        out->in_rows = task->vdev.in_rows;
        out->out_rows = task->vdev.out_rows;
        out->major_align = task->vdev.align;
        out->experts = task->vdev.experts;
        out->form = task->info.operation == TU_OPERATION_ALL_TO_ALL_VDEV_2D          ? 1
                    : task->info.operation == TU_OPERATION_ALL_TO_ALL_VDEV_2D_OFFSET ? 2
                                                                                     : 0;
        return find_place(group, task->in, task->vdev.in_rows * out->row_bytes, &out->in_place);
    case TU_OPERATION_SEND:
    case TU_OPERATION_RECV:
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "%s takes memory of the CPU; on devices use tutti_peers_put and tutti_peers_signal, or "
                        "tutti_permute",
                        name);
    default:
        out->shape = TU_DEVICE_MOVE;
        for (int i = 0; i < size; i++) {
            tu_part sent = tu_part_of(task, rank, size, rank, i), received = tu_part_of(task, rank, size, i, rank);
            l->send_offset[i] = sent.in_offset;
            l->send_bytes[i] = sent.bytes;
            l->receive_offset[i] = received.out_offset;
            l->receive_bytes[i] = received.bytes;
        }
        out->send_offset = l->send_offset;
        out->send_bytes = l->send_bytes;
        out->receive_offset = l->receive_offset;
        out->receive_bytes = l->receive_bytes;
        /* What the size of the launch goes by must be equal on all ranks, which the splits of all_to_all_v are not. */
        out->count = task->shape == TU_OPERATION_ALL_TO_ALL_V ? (uint64_t)1 << 24
                                                              : task->info.count * task->element * (uint64_t)size;
        break;
    }
    tutti_status status = find_place(group, task->in, tu_in_bytes(task, rank, size), &out->in_place);
    return status == TUTTI_OK ? find_place(group, task->out, tu_out_bytes(task, rank, size), &out->out_place) : status;
}

/* ---- enqueueing ---- */

static tutti_status check_places(const tu_task *task, int *index) {
    int rank = task->group->rank, size = task->group->size, other;
    bool vdev = task->shape == TU_OPERATION_ALL_TO_ALL_VDEV;
    const struct {
        const char *name;
        const void *pointer;
        size_t bytes;
    } buffers[2] = { { "in", task->in, vdev ? task->vdev.in_rows : tu_in_bytes(task, rank, size) },
                     { "out", task->out, vdev ? task->vdev.out_rows : tu_out_bytes(task, rank, size) } };
    *index = -1;
    for (int i = 0; i < 2; i++) {
        if (buffers[i].pointer == NULL || buffers[i].bytes == 0)
            continue;
        if (!on_device(task->group->world, buffers[i].pointer, &other))
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            "%s: `%s` is memory of the CPU and the other buffer is on a device; both must be on one",
                            tu_operation_name((tu_operation)task->info.operation), buffers[i].name);
        if (*index >= 0 && other != *index)
            return tu_error(TUTTI_ERROR_ARGUMENT, "%s: in is on device %d and out on device %d; both must be on one",
                            tu_operation_name((tu_operation)task->info.operation), *index, other);
        *index = other;
    }
    return TUTTI_OK;
}

static void note_ran(tu_task *task, tutti_algorithm algorithm) {
    tu_collective *state;
    if (tu_collective_get(task->group, &state) != TUTTI_OK || !tu_collective_try_lock(state))
        return; /* only for tutti_group_ran */
    task->info.algorithm = (uint8_t)algorithm;
    state->ran = task->info;
    state->choice = (tu_choice){ .algorithm = algorithm, .from = "the device's backend" };
    tu_collective_unlock(state);
}

static tutti_status enqueue(device_side *side, tu_task *task, const tutti_call *call, void *stream) {
    lists l;
    tu_device_task described;
    tutti_status status = tu_group_enter(task->group, task->timeout_ns, &task->info, &task->deadline, &task->ticket);
    if (status != TUTTI_OK)
        return status;
    status = describe(task, call, &l, &described);
    if (status == TUTTI_OK) {
        described.timeout_ns = tu_deadline_left(task->deadline) + 1;
        described.stream = stream;
        status = side->table->run(side->team, &described);
    }
    if (status == TUTTI_OK)
        note_ran(task, described.ran);
    return tu_group_leave(task->group, &task->info, task->ticket, status);
}

/* The side's own stream, ordered after the caller's. */
static tutti_status fork_stream(device_side *side, void *after, void **stream) {
    tutti_status status = TUTTI_OK;
    void *event;
    pthread_mutex_lock(&side->lock);
    if (side->stream == NULL)
        status = side->streams->create(side->state, side->device_index, &side->stream);
    pthread_mutex_unlock(&side->lock);
    if (status == TUTTI_OK)
        status = side->streams->mark(side->state, side->device_index, after, &event);
    if (status != TUTTI_OK)
        return status;
    status = side->streams->join(side->state, side->device_index, side->stream, event);
    side->streams->unmark(side->state, side->device_index, event);
    *stream = side->stream;
    return status;
}

/* With a work: on the side's own stream, ordered after the caller's, and an event behind it. */
static tutti_status start_work(device_side *side, tu_task *task, const tutti_call *call) {
    tutti_work *work;
    void *stream;
    tutti_status status = tu_work_make(task, &work);
    if (status != TUTTI_OK)
        return status;
    status = fork_stream(side, call->stream, &stream);
    if (status == TUTTI_OK)
        status = enqueue(side, &work->task, call, stream);
    if (status == TUTTI_OK)
        status = side->streams->mark(side->state, side->device_index, stream, &work->event);
    if (status != TUTTI_OK) {
        tu_work_free(work);
        return status;
    }
    *call->work = work;
    return TUTTI_OK;
}

tutti_status tu_device_submit(tu_task *task, const tutti_call *call) {
    tutti_group *group = task->group;
    device_side *side;
    int index = -1;
    int64_t timeout;
    tutti_status status = task->shape == TU_OPERATION_BARRIER ? TUTTI_OK : check_places(task, &index);
    if (status == TUTTI_OK)
        status =
            tu_timeout_choose("timeout_ns", task->timeout_ns, group->timeout_ns, group->world->timeout_ns, &timeout);
    if (status == TUTTI_OK)
        status = get_side(group, &side);
    if (status == TUTTI_OK)
        status = ensure_team(side, index, call->stream, tu_deadline(timeout));
    if (status != TUTTI_OK)
        return status;
    if (call->work != NULL)
        return start_work(side, task, call);
    return enqueue(side, task, call,
                   call->stream); /* a batch of stream operations needs no gathering: they are in order already */
}

/* ---- works ---- */

tutti_status tu_device_work_test(tutti_work *work, bool *finished) {
    device_side *side;
    tutti_status status = get_side(work->group, &side);
    if (status != TUTTI_OK)
        return status;
    *finished = false;
    status = side->streams->test(side->state, side->device_index, work->event, finished);
    if (status == TUTTI_OK && *finished)
        status = tutti_group_check(work->group); /* what its kernels found */
    if (status != TUTTI_OK || *finished) {
        *finished = true;
        tu_work_finish(work, status);
    }
    return TUTTI_OK;
}

void tu_device_work_end(tutti_work *work) {
    device_side *side;
    if (get_side(work->group, &side) == TUTTI_OK)
        side->streams->unmark(side->state, side->device_index, work->event);
}
