/* SPDX-License-Identifier: Apache-2.0
 *
 * Executors of backends: the executor part of one, turned into one that runs tasks. A task whose buffers lie on a
 * device is recognised, described, and handed to the backend, which enqueues it. One on memory of the CPU gets there
 * when tutti_call.executor names the backend, and is over when the backend returns.
 *
 * The call returns when the work is in the stream. What the device finds out later (a deadline, a mismatch, a dead
 * peer) stays with the group and is returned by its next call, and by tutti_group_check.
 *
 * Budget of a call on symmetric buffers, or with tutti_call.device, up to the backend's `run`: no lock, and the driver
 * is asked nothing. What the backend itself does then is its own business: see backend/cuda/order.c.
 */
#include "collective/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/collective.h>

#include "base/error.h"
#include "collective/collective.h"
#include "collective/work.h"
#include "collective/works.h"

/* A backend's executor in a group. */
typedef struct device_executor {
    tu_executor executor; /* first: a task refers to it by this */
    const tu_device_executor *table;
    const tu_backend_streams *streams;
    void *streams_state;  /* of the backend that has them */
    void *state;          /* of the executor's own */
    pthread_mutex_t lock; /* making `prepared` and the stream */
    _Atomic(void *)
        prepared; /* what the backend keeps of the group; NULL: not made yet. Released after device_index is set */
    int device_index;
    void *stream; /* for works; made on first need */
} device_executor;

/* What a group has on one kind of device. */
typedef struct device_group {
    device_executor list[TU_EXECUTORS];
    tu_executors executors; /* those of the list */
    const tu_backend_streams *streams;
    void *streams_state;
} device_group;

/* One that a call has named. */
typedef struct named_executor {
    device_executor executor;
    struct named_executor *next;
} named_executor;

/* What a group has of backends. */
typedef struct backend_group {
    pthread_mutex_t lock;                            /* making what follows */
    _Atomic(device_group *) kinds[TU_BACKEND_KINDS]; /* NULL: not made yet; released when made */
    named_executor *named;                           /* under lock; only grows */
} backend_group;

static device_executor *executor_of(const tu_task *task) {
    return (device_executor *)(uintptr_t)task->executor;
}

static const tu_executor adapter, host_adapter;

/* Whether the backend's executor has a flag set: an older plug-in's table ends before it. */
#define SAYS(table, flag) ((table)->size >= offsetof(tu_device_executor, flag) + sizeof(table)->flag && (table)->flag)

/* `streams` are those of the backend that has the device's memory; one that has its own knows its devices by them. */
static void make_executor(device_executor *executor, const tu_backend_opened *backend,
                          const tu_backend_streams *streams, void *streams_state) {
    if (streams != NULL && backend->table->streams != NULL) {
        streams = backend->table->streams;
        streams_state = backend->state;
    }
    executor->executor = streams != NULL ? adapter : host_adapter;
    snprintf(executor->executor.name, sizeof executor->executor.name, "%s", backend->table->name);
    executor->table = backend->table->executor;
    executor->executor.takes_turns = executor->executor.takes_turns || SAYS(executor->table, meets);
    executor->executor.own_order = SAYS(executor->table, own_order);
    executor->streams = streams;
    executor->streams_state = streams_state;
    executor->state = backend->state;
    pthread_mutex_init(&executor->lock, NULL);
}

static void end_executor(device_executor *executor) {
    void *prepared = atomic_load_explicit(&executor->prepared, memory_order_acquire);
    if (prepared != NULL)
        executor->table->end(prepared);
    if (executor->stream != NULL)
        executor->streams->destroy(executor->streams_state, executor->device_index, executor->stream);
    pthread_mutex_destroy(&executor->lock);
}

/* The kind's own backend runs what another, which has its memory now, does not; where there is none nobody misses it
 * yet. */
static void open_default(tutti_world *world, tutti_device kind, const char *chosen) {
    tutti_error_copy before;
    const tu_backend *backend;
    void *state;
    if (strcmp(chosen, tu_backend_default(kind)) == 0)
        return;
    tu_error_save(&before);
    (void)tu_backend_open(world, tu_backend_default(kind), &backend, &state);
    (void)tu_error_restore(&before);
}

/* Every open backend of the kind that has an executor, the one with the kind's memory first; its streams serve all. In
 * a group of several hosts the kind's own backend comes last, since it may not be able to map members there. */
static tutti_status make_kind(const tutti_group *group, tutti_device kind, device_group **made) {
    tu_backend_opened backends[TU_EXECUTORS];
    device_group *on_device = calloc(1, sizeof *on_device);
    if (on_device == NULL)
        return tu_error_memory("a group on a device", sizeof *on_device);
    const tu_backend *backend;
    void *state;
    tutti_status status = tu_backend_get(group->world, kind, &backend, &state); /* opens it */
    if (status == TUTTI_OK)
        open_default(group->world, kind, backend->name);
    int count = tu_backends_of(group->world, kind, backends, TU_EXECUTORS);
    bool stays = group->local || (count > 0 && strcmp(backends[0].table->name, tu_backend_default(kind)) != 0);
    on_device->executors.kind = kind;
    for (int i = 0; i < count && on_device->streams == NULL; i++) {
        on_device->streams = backends[i].table->streams;
        on_device->streams_state = backends[i].state;
    }
    for (int i = 0; i < count && on_device->streams != NULL; i++) {
        const tu_backend_opened *at = &backends[stays ? i : (i + 1) % count];
        if (at->table->executor == NULL)
            continue;
        device_executor *executor = &on_device->list[on_device->executors.count];
        make_executor(executor, at, on_device->streams, on_device->streams_state);
        on_device->executors.list[on_device->executors.count++] = &executor->executor;
    }
    if (on_device->executors.count == 0) {
        free(on_device);
        return status != TUTTI_OK ? status
                                  : tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s has no collectives", backend->name);
    }
    *made = on_device;
    return TUTTI_OK;
}

static tutti_status make_group(void *owner, void **made) {
    (void)owner;
    backend_group *backends = calloc(1, sizeof *backends);
    if (backends == NULL)
        return tu_error_memory("a group's backends", sizeof *backends);
    pthread_mutex_init(&backends->lock, NULL);
    *made = backends;
    return TUTTI_OK;
}

static void end_group(void *opaque) {
    backend_group *backends = opaque;
    for (int row = 0; row < TU_BACKEND_KINDS; row++) {
        device_group *on_device = atomic_load_explicit(&backends->kinds[row], memory_order_acquire);
        for (int i = 0; on_device != NULL && i < on_device->executors.count; i++)
            end_executor(&on_device->list[i]);
        free(on_device);
    }
    for (named_executor *one = backends->named, *next; one != NULL; one = next) {
        next = one->next;
        end_executor(&one->executor);
        free(one);
    }
    pthread_mutex_destroy(&backends->lock);
    free(backends);
}

static tutti_status get_backends(tutti_group *group, backend_group **backends) {
    static const tu_attachment attachment = { .make = make_group, .end = end_group };
    void *state = tu_attachment_find(&group->attachments, &attachment);
    tu_memory_group *memory; /* attached before, so that it lives until the device has let go of it */
    tutti_status status = state != NULL ? TUTTI_OK : tu_memory_group_get(group, &memory);
    if (status == TUTTI_OK && state == NULL)
        status = tu_attachment_get(&group->attachments, &attachment, &state);
    if (status == TUTTI_OK)
        *backends = state;
    return status;
}

static tutti_status get_kind(tutti_group *group, int row, device_group **on_device) {
    backend_group *backends;
    tutti_status status = get_backends(group, &backends);
    if (status != TUTTI_OK)
        return status;
    *on_device = atomic_load_explicit(&backends->kinds[row], memory_order_acquire); /* pairs with the release below */
    if (__builtin_expect(*on_device != NULL, 1))
        return TUTTI_OK;
    pthread_mutex_lock(&backends->lock);
    *on_device = atomic_load_explicit(&backends->kinds[row], memory_order_relaxed);
    if (*on_device == NULL) {
        status = make_kind(group, tu_backend_kind_at(row), on_device);
        if (status == TUTTI_OK)
            atomic_store_explicit(&backends->kinds[row], *on_device, memory_order_release);
    }
    pthread_mutex_unlock(&backends->lock);
    return status;
}

/* ---- by name ---- */

/* Opens the backend, which is known to have an executor for this memory. Streams of a device are those of the backend
 * that has its memory. */
static tutti_status make_named(tutti_group *group, tutti_device kind, const char *name, named_executor **made) {
    tu_backend_opened backend, of_kind[TU_EXECUTORS];
    const tu_backend_streams *streams = NULL;
    void *streams_state = NULL;
    tutti_status status = tu_backend_open(group->world, name, &backend.table, &backend.state);
    int count = status == TUTTI_OK && kind != TUTTI_CPU ? tu_backends_of(group->world, kind, of_kind, TU_EXECUTORS) : 0;
    for (int i = 0; i < count && streams == NULL; i++) {
        streams = of_kind[i].table->streams;
        streams_state = of_kind[i].state;
    }
    *made = status == TUTTI_OK ? calloc(1, sizeof **made) : NULL;
    if (status == TUTTI_OK && *made == NULL)
        status = tu_error_memory("an executor", sizeof **made);
    if (status == TUTTI_OK)
        make_executor(&(*made)->executor, &backend, streams, streams_state);
    return status;
}

/* Whether a backend of that name brings an executor for this memory; it is not opened to find out. */
static bool brings_executor(tutti_world *world, tutti_device kind, const char *name) {
    tutti_error_copy before;
    const tu_backend *table;
    tu_error_save(&before); /* that there is none is told by the caller */
    bool there = tu_backend_find(world, name, &table) == TUTTI_OK && table->executor != NULL && table->device == kind;
    (void)tu_error_restore(&before);
    return there;
}

tutti_status tu_device_executor_named(tutti_group *group, tutti_device kind, const char *name,
                                      const tu_executor **executor) {
    backend_group *backends;
    tutti_status status = get_backends(group, &backends);
    *executor = NULL;
    if (status != TUTTI_OK || !brings_executor(group->world, kind, name))
        return status;
    pthread_mutex_lock(&backends->lock);
    named_executor *one = backends->named;
    while (one != NULL && strcmp(one->executor.executor.name, name) != 0)
        one = one->next;
    if (one == NULL) {
        status = make_named(group, kind, name, &one);
        if (status == TUTTI_OK) {
            one->next = backends->named;
            backends->named = one;
        }
    }
    pthread_mutex_unlock(&backends->lock);
    if (status == TUTTI_OK)
        *executor = &one->executor.executor;
    return status;
}

/* ---- recognising ---- */

/* Whether the memory is on a device, and on which. */
static bool locate(const tu_task *task, const device_group *on_device, const void *pointer, int *index) {
    tu_memory_group *memory;
    tu_symmetric found;
    if (pointer == NULL)
        return false;
    if (tu_memory_group_get(task->group, &memory) == TUTTI_OK && tu_symmetric_find(memory, pointer, 1, &found)) {
        *index = found.memory->block.device_index;
        return found.memory->device != TUTTI_CPU;
    }
    return on_device->streams->recognise(on_device->streams_state, pointer, index);
}

static tutti_status apart(const tu_task *task, const char *buffer) {
    return tu_error(TUTTI_ERROR_ARGUMENT,
                    "%s: `%s` is memory of the CPU and the other buffer is on a device; both must be on one",
                    task->row->name, buffer);
}

/* Where both buffers lie; an error when they lie apart. *index stays -1 when no buffer is on a device. */
static tutti_status locate_buffers(const tu_task *task, const device_group *on_device, int *index) {
    int rank = task->group->rank, size = task->group->size;
    const struct {
        const char *name;
        const void *pointer;
        size_t bytes;
    } buffers[2] = { { "in", task->in, tu_in_bytes(task, rank, size) },
                     { "out", task->out, tu_out_bytes(task, rank, size) } };
    bool there[2] = { false, false };
    int where[2] = { -1, -1 };
    *index = -1;
    for (int i = 0; i < 2; i++) {
        there[i] = i > 0 && buffers[1].pointer == buffers[0].pointer
                       ? there[0]
                       : locate(task, on_device, buffers[i].pointer, &where[i]);
        if (there[i] && *index < 0)
            *index = where[i];
    }
    for (int i = 0; i < 2 && *index >= 0; i++) {
        if (buffers[i].pointer == NULL || buffers[i].bytes == 0)
            continue;
        if (!there[i])
            return apart(task, buffers[i].name);
        if (where[i] >= 0 && where[i] != *index)
            return tu_error(TUTTI_ERROR_ARGUMENT, "%s: in is on device %d and out on device %d; both must be on one",
                            task->row->name, where[0], where[1]);
    }
    for (size_t i = 1; i < task->tiles.count && *index >= 0; i++) /* the first one is `out` */
        if (task->tiles.list[i].columns != 0 && !locate(task, on_device, task->tiles.list[i].out, &where[1]))
            return apart(task, "out");
    return TUTTI_OK;
}

/* Whether the call concerns this kind of device: then task->device_index is set. */
static tutti_status recognise(tu_task *task, const tutti_call *call, const device_group *on_device, bool *there) {
    if (call->device != 0) {
        task->device_index = tutti_device_index(call->device);
        *there = true;
        return TUTTI_OK;
    }
    if (task->row->kind == TU_KIND_BARRIER) {
        task->device_index = -1;
        *there = call->stream != NULL && !task->row->host_only;
        return TUTTI_OK;
    }
    tutti_status status = locate_buffers(task, on_device, &task->device_index);
    *there = task->device_index >= 0;
    return status;
}

/* The first kind of device that the call concerns: the one that it names, or one that knows its buffers. */
static tutti_status find_kind(tu_task *task, const tutti_call *call, const tu_executors **executors) {
    int named = call->device == 0 ? -1 : tu_backend_row(tutti_device_kind(call->device));
    for (int row = 1; row < TU_BACKEND_KINDS; row++) {
        device_group *on_device;
        bool there = false;
        if (named >= 0 && row != named)
            continue;
        tutti_status status = get_kind(task->group, row, &on_device);
        if (status != TUTTI_OK && named < 0)
            continue; /* nothing can lie there, as far as this world knows */
        if (status == TUTTI_OK)
            status = recognise(task, call, on_device, &there);
        if (status == TUTTI_OK && there)
            *executors = &on_device->executors;
        if (status != TUTTI_OK || there)
            return status;
    }
    return TUTTI_OK;
}

static tutti_status no_such_device(const tu_task *task, tutti_device device) {
    char names[64] = "";
    for (int row = 0; row < TU_BACKEND_KINDS; row++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", row > 0 ? " and " : "",
                 tutti_device_name(tu_backend_kind_at(row)));
    return tu_error(TUTTI_ERROR_ARGUMENT,
                    "%s: tutti_call.device is %s (%d), where no collective finds data; there are %s", task->row->name,
                    tutti_device_name(device), device, names);
}

tutti_status tu_device_executors(tu_task *task, const tutti_call *call, const tu_executors **executors) {
    tutti_world *world = task->group->world;
    tutti_device kind = tutti_device_kind(call->device);
    if (kind == TUTTI_CPU)
        return TUTTI_OK;
    if (call->device != 0 && tu_backend_row(kind) < 0)
        return no_such_device(task, call->device);
    if (atomic_load_explicit(&world->devices, memory_order_relaxed) == NULL) {
        /* Looked for at the world's first collective, and again whenever a call names a stream or a device. */
        atomic_store_explicit(&world->looked, true, memory_order_relaxed);
        tu_backend_discover(world);
        if (atomic_load_explicit(&world->devices, memory_order_relaxed) == NULL && call->device == 0)
            return TUTTI_OK;
    }
    return find_kind(task, call, executors);
}

/* ---- describing ---- */

static tutti_status find_place(tutti_group *group, const void *pointer, size_t bytes, tu_device_place *place) {
    *place = (tu_device_place){ .map = NULL };
    if (pointer == NULL || bytes == 0)
        return TUTTI_OK;
    tu_memory_group *memory;
    tu_symmetric found;
    tutti_status status = tu_memory_group_get(group, &memory);
    if (status != TUTTI_OK || !tu_symmetric_find(memory, pointer, bytes, &found))
        return status;
    const tutti_peers *peers = found.peers != NULL ? found.peers : tu_symmetric_unmapped(memory, found.memory);
    if (peers != NULL)
        *place = (tu_device_place){ .map = &peers->blocks, .index = peers->index, .offset = found.offset };
    return TUTTI_OK;
}

/* Arrays of a device task, per member. */
typedef struct lists {
    uint64_t send_offset[TU_DEVICE_RANKS], send_bytes[TU_DEVICE_RANKS], receive_offset[TU_DEVICE_RANKS],
        receive_bytes[TU_DEVICE_RANKS];
    uint64_t parts[TU_DEVICE_RANKS + 1];
} lists;

static void describe_reduction(const tu_task *task, lists *lists, tu_device_task *out) {
    int size = task->group->size;
    out->shape = TU_DEVICE_REDUCE;
    out->root = tu_has_root(task->row) ? task->info.root : -1;
    if (!tu_scatters(task->row))
        return;
    out->shape = TU_DEVICE_REDUCE_SCATTER;
    for (int i = 0; i < size; i++) {
        tu_slice slice = tu_slice_of(task, size, i);
        lists->parts[i] = slice.first;
        lists->parts[i + 1] = slice.first + slice.count;
    }
    out->parts = lists->parts;
    out->count = lists->parts[size];
    out->row = task->columns;
}

static void describe_rows(const tu_task *task, tu_device_task *out) {
    out->shape = TU_DEVICE_VDEV;
    out->in_splits = task->vdev.in_splits;
    out->out_splits = task->vdev.out_splits;
    out->row_bytes = task->info.count * task->element;
    out->in_rows = task->vdev.in_rows;
    out->out_rows = task->vdev.out_rows;
    out->major_align = task->vdev.align;
    out->experts = task->vdev.experts;
    out->form = (int)task->row->rows;
}

static void describe_move(const tu_task *task, lists *lists, tu_device_task *out) {
    int rank = task->group->rank, size = task->group->size;
    out->shape = TU_DEVICE_MOVE;
    for (int i = 0; i < size; i++) {
        tu_part sent = tu_part_of(task, rank, rank, i), received = tu_part_of(task, rank, i, rank);
        lists->send_offset[i] = sent.in_offset;
        lists->send_bytes[i] = sent.bytes;
        lists->receive_offset[i] = received.out_offset;
        lists->receive_bytes[i] = received.bytes;
    }
    out->send_offset = lists->send_offset;
    out->send_bytes = lists->send_bytes;
    out->receive_offset = lists->receive_offset;
    out->receive_bytes = lists->receive_bytes;
    /* What the size of the launch goes by must be equal on all ranks, which the splits of all_to_all_v are not. */
    out->count =
        task->row->in == TU_EXTENT_SPLITS ? (uint64_t)1 << 24 : task->info.count * task->element * (uint64_t)size;
}

static void give_tile(const tu_device_task *task, size_t i, tu_device_tile *one) {
    const tu_tile *tile = (const tu_tile *)task->tiles + i;
    *one = (tu_device_tile){ tile->source,   tile->in_offset, tile->rows, tile->columns,
                             tile->in_pitch, tile->out_pitch, tile->out };
}

static void describe_tiles(const tu_task *task, tu_device_task *out) {
    out->shape = TU_DEVICE_TILES;
    out->tile = give_tile;
    out->tiles = task->tiles.list;
    out->tile_count = task->tiles.count;
    out->element_bytes = task->element;
}

static void describe_message(const tu_task *task, tu_device_task *out) {
    out->shape = task->row->in != 0 ? TU_DEVICE_SEND : TU_DEVICE_RECEIVE;
    out->root = task->info.root;
    out->tag = task->info.tag;
    out->count = task->info.count * task->element;
    out->block_bytes = task->strided.block * task->element;
    out->stride_bytes = task->strided.block != 0 ? task->strided.stride * task->element : 0;
}

/* What a backend has to know of a task, in one place. */
static tutti_status describe(const tu_task *task, lists *lists, tu_device_task *out) {
    int rank = task->group->rank, size = task->group->size;
    uint64_t signature = tu_signature(task);
    *out = (tu_device_task){ .size = sizeof *out,
                             .operation = task->info.operation,
                             .name = task->row->name,
                             .sequence = task->info.sequence,
                             .signature = (uint32_t)(signature ^ signature >> 32),
                             .in = task->in,
                             .out = task->out,
                             .algorithm = task->forced,
                             .multicast = task->row->multicast,
                             .copy_engines = task->row->copy_engines,
                             .stream = task->stream,
                             .dtype = (tutti_dtype)task->info.dtype,
                             .reduction = (tutti_reduction)task->info.reduction,
                             .count = task->info.count,
                             .root = -1,
                             .factor = task->factor };
    switch (task->row->kind) {
    case TU_KIND_BARRIER:
        out->shape = TU_DEVICE_BARRIER;
        return TUTTI_OK;
    case TU_KIND_REDUCTION:
        describe_reduction(task, lists, out);
        break;
    case TU_KIND_ROWS:
        describe_rows(task, out);
        return find_place(task->group, task->in, tu_in_bytes(task, rank, size), &out->in_place);
    case TU_KIND_TILES:
        describe_tiles(task, out);
        return find_place(task->group, task->in, tu_in_bytes(task, rank, size), &out->in_place);
    case TU_KIND_MESSAGE:
        describe_message(task, out);
        return TUTTI_OK;
    default:
        describe_move(task, lists, out);
        break;
    }
    tutti_status status = find_place(task->group, task->in, tu_in_bytes(task, rank, size), &out->in_place);
    return status == TUTTI_OK ? find_place(task->group, task->out, tu_out_bytes(task, rank, size), &out->out_place)
                              : status;
}

/* ---- the steps of a task ---- */

/* Whether the backend's executor has a function: an older plug-in's table ends before it. */
#define HAS(table, function) \
    ((table)->size >= offsetof(tu_device_executor, function) + sizeof(table)->function && (table)->function != NULL)

/* Takes away what is this rank's own, so that no executor can be chosen on one rank for a reason that others lack. */
static void hide_own(tu_device_task *described) {
    described->in = NULL;
    described->out = NULL;
    described->in_place = (tu_device_place){ 0 };
    described->out_place = (tu_device_place){ 0 };
    described->stream = NULL;
    described->send_offset = described->send_bytes = NULL;
    described->receive_offset = described->receive_bytes = NULL;
    described->in_splits = NULL;
    described->out_splits = NULL;
    described->block_bytes = described->stride_bytes = 0;
    described->tiles = NULL;
    described->tile_count = 0;
}

static bool serves(const tutti_group *group, const tu_task *task) {
    const device_executor *executor = executor_of(task);
    const tu_device_executor *table = executor->table;
    if (group->size > TU_DEVICE_RANKS)
        return false;
    if (!HAS(table, serves))
        return task->row->kind != TU_KIND_MESSAGE;
    lists lists;
    tu_device_task described;
    if (describe(task, &lists, &described) != TUTTI_OK)
        return false;
    hide_own(&described);
    return table->serves(executor->state, group, &described);
}

/* A message has one partner, who must be named: devices match messages of a pair in their order. And only two ranks
 * come to it, so that what all ranks have to make together must be there. */
static tutti_status check_message(const tu_task *task, const device_executor *executor) {
    if (task->info.root < 0 || task->info.tag < 0)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "%s by executor %s needs a rank and a tag: TUTTI_ANY_SOURCE and TUTTI_ANY_TAG are for memory "
                        "of the CPU, by shm",
                        task->row->name, task->executor->name);
    if (task->strided.block != 0 && !SAYS(executor->table, strided))
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s: executor %s takes no elements that lie apart", task->row->name,
                        executor->executor.name);
    if (atomic_load_explicit(&executor->prepared, memory_order_acquire) == NULL)
        return tu_error(
            TUTTI_ERROR_STATE,
            "%s: group %s has not been used on this device: all its ranks must call tutti_group_prepare, or "
            "any collective there, before the first message",
            task->row->name, task->group->name);
    return TUTTI_OK;
}

static tutti_status check_host(tu_task *task) {
    return task->row->kind == TU_KIND_MESSAGE ? check_message(task, executor_of(task)) : TUTTI_OK;
}

static tutti_status check(tu_task *task) {
    device_executor *executor = executor_of(task);
    tutti_status status = check_host(task);
    if (status != TUTTI_OK)
        return status;
    if (atomic_load_explicit(&executor->prepared, memory_order_acquire) == NULL) /* pairs with prepare_once */
        return executor->streams->capturing(executor->streams_state, task->stream)
                   ? tu_error(TUTTI_ERROR_STATE,
                              "group %s has not been used on this device, and a stream is capturing: call "
                              "tutti_group_prepare before the capture begins",
                              task->group->name)
                   : TUTTI_OK;
    if (task->device_index >= 0 && task->device_index != executor->device_index)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "group %s is used with device %d on this rank; this buffer is on device %d", task->group->name,
                        executor->device_index, task->device_index);
    return TUTTI_OK;
}

/* Collective, once. */
static tutti_status prepare_once(device_executor *executor, tutti_group *group, int index, int64_t deadline) {
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&executor->lock);
    if (atomic_load_explicit(&executor->prepared, memory_order_relaxed) == NULL) {
        void *prepared = NULL;
        status = executor->table->prepare(executor->state, group, &index, deadline, &prepared);
        if (status == TUTTI_ERROR_UNSUPPORTED && !group->local)
            tu_error_append(
                ". Between hosts memory of a GPU goes by the plug-ins tutti-nccl and tutti-nvshmem: open one "
                "of them (tutti_backend_open) before the group is first used");
        executor->device_index = index;
        atomic_store_explicit(&executor->prepared, prepared,
                              memory_order_release); /* pairs with the acquires of the steps */
    }
    pthread_mutex_unlock(&executor->lock);
    return status;
}

static tutti_status prepare(tu_task *task) {
    device_executor *executor = executor_of(task);
    tu_task_record(task);
    if (SAYS(executor->table, meets) && task->row->kind != TU_KIND_MESSAGE) {
        tutti_status status = tu_task_meet(task);
        if (status != TUTTI_OK)
            return status;
    }
    if (atomic_load_explicit(&executor->prepared, memory_order_acquire) != NULL) /* pairs with prepare_once */
        return TUTTI_OK;
    return prepare_once(executor, task->group, task->device_index, tu_task_deadline(task));
}

/* For tutti_group_ran. Without a turn another thread that is at it notes its own. */
static void note(tu_task *task, tutti_algorithm algorithm) {
    tu_collective *state = task->state;
    bool in_turn = task->executor->takes_turns;
    task->info.algorithm = (uint8_t)algorithm;
    if (!in_turn && !tu_collective_try_lock(state))
        return;
    state->ran = task->info;
    state->ran_by = task->executor;
    state->choice = (tu_choice){ .algorithm = algorithm, .from = task->executor->name };
    if (!in_turn)
        tu_collective_unlock(state);
}

/* What arrives is what was asked for, or the group ends. */
static void note_received(const tu_task *task) {
    tutti_received full = {
        .size = task->received->size, .source = task->info.root, .tag = task->info.tag, .count = task->info.count
    };
    memcpy(task->received, &full, full.size < sizeof full ? full.size : sizeof full);
}

static tutti_status run(tu_task *task) {
    device_executor *executor = executor_of(task);
    lists lists;
    tu_device_task described;
    tutti_status status = describe(task, &lists, &described);
    if (status != TUTTI_OK)
        return status;
    described.timeout_ns = task->info.timeout_ns;
    status = executor->table->run(atomic_load_explicit(&executor->prepared, memory_order_acquire), &described);
    if (status != TUTTI_OK)
        return status;
    if (task->row->kind != TU_KIND_MESSAGE)
        note(task, described.ran);
    else if (task->received != NULL)
        note_received(task);
    return TUTTI_OK;
}

/* ---- works ---- */

/* The executor's own stream, ordered after the caller's. */
static tutti_status fork_stream(device_executor *executor, void *after, void **stream) {
    const tu_backend_streams *streams = executor->streams;
    tutti_status status = TUTTI_OK;
    void *event;
    pthread_mutex_lock(&executor->lock);
    if (executor->stream == NULL)
        status = streams->create(executor->streams_state, executor->device_index, &executor->stream);
    pthread_mutex_unlock(&executor->lock);
    if (status == TUTTI_OK)
        status = streams->mark(executor->streams_state, executor->device_index, after, &event);
    if (status != TUTTI_OK)
        return status;
    status = streams->join(executor->streams_state, executor->device_index, executor->stream, event);
    streams->unmark(executor->streams_state, executor->device_index, event);
    *stream = executor->stream;
    return status;
}

/* On the executor's own stream, ordered after the caller's, and an event behind it. */
static tutti_status start_in_turn(tutti_work *work) {
    tu_task *task = &work->task;
    device_executor *executor = executor_of(task);
    tutti_status status = task->entered ? TUTTI_OK : tu_task_enter(task);
    if (status != TUTTI_OK)
        return status;
    status = prepare(task);
    if (status == TUTTI_OK)
        status = fork_stream(executor, task->stream, &task->stream);
    if (status != TUTTI_OK)
        return tu_task_leave(task, status);
    status = tu_task_run_in_turn(task);
    return status == TUTTI_OK
               ? executor->streams->mark(executor->streams_state, executor->device_index, task->stream, &work->event)
               : status;
}

/* Where the executor meets on the host, the number and the meeting must come in the same order on all ranks. */
static tutti_status start(tutti_work *work) {
    tu_task *task = &work->task;
    if (!task->executor->takes_turns || task->row->kind == TU_KIND_MESSAGE)
        return start_in_turn(work);
    tutti_status status = tu_turn_take(task->state, task->timeout_ns);
    if (status != TUTTI_OK)
        return status;
    tu_works *works = tu_works_drain(task->state);
    status = tu_task_enter(task);
    tu_works_resume(works);
    if (status == TUTTI_OK)
        status = start_in_turn(work);
    tu_collective_unlock(task->state);
    return status;
}

static tutti_status check_prepared(device_executor *executor, tutti_group *group) {
    if (!HAS(executor->table, check))
        return tutti_group_check(group);
    return executor->table->check(atomic_load_explicit(&executor->prepared, memory_order_acquire));
}

static tutti_status join(tutti_work *work, void *stream) {
    device_executor *executor = executor_of(&work->task);
    return executor->streams->join(executor->streams_state, executor->device_index, stream, work->event);
}

static tutti_status test(tutti_work *work, bool *finished) {
    device_executor *executor = executor_of(&work->task);
    bool over = false;
    tutti_status status = executor->streams->test(executor->streams_state, executor->device_index, work->event, &over);
    if (status == TUTTI_OK && over)
        status = check_prepared(executor, work->group); /* what its kernels found */
    /* Of several threads that see it, one finishes it. */
    if ((status != TUTTI_OK || over) && !atomic_exchange_explicit(&work->claimed, true, memory_order_acq_rel))
        tu_work_finish(work, status);
    *finished = tu_work_done(work);
    return TUTTI_OK;
}

static void release(tutti_work *work) {
    device_executor *executor = executor_of(&work->task);
    if (work->event != NULL)
        executor->streams->unmark(executor->streams_state, executor->device_index, work->event);
}

static const tu_executor adapter = { .enqueues = true,
                                     .serves = serves,
                                     .check = check,
                                     .prepare = prepare,
                                     .run = run,
                                     .start = start,
                                     .test = test,
                                     .join = join,
                                     .release = release };

/* ---- memory of the CPU ---- */

static tutti_status test_host(tutti_work *work, bool *finished) {
    *finished = tu_work_done(work);
    return TUTTI_OK;
}

static const tu_executor host_adapter = { .takes_turns = true,
                                          .serves = serves,
                                          .check = check_host,
                                          .prepare = prepare,
                                          .run = run,
                                          .start = tu_works_queue,
                                          .test = test_host,
                                          .wait = tu_works_wait,
                                          .release = tu_works_adopt };

/* ---- tutti_group_prepare ---- */

/* Tells an executor of every block on a device that the group met. */
static tutti_status add_blocks(device_executor *executor, tu_memory_group *memory) {
    void *prepared = atomic_load_explicit(&executor->prepared, memory_order_acquire);
    tutti_status status = TUTTI_OK;
    for (uint32_t index = 1; status == TUTTI_OK && index <= tu_symmetric_last(memory); index++) {
        const tutti_peers *peers = tu_symmetric_peers(memory, index);
        if (peers == NULL || peers->memory->device == TUTTI_CPU)
            continue;
        tu_device_place place = { .map = &peers->blocks, .index = index };
        status = executor->table->add_block(prepared, &place);
    }
    return status;
}

static tutti_status prepare_kind(tutti_group *group, device_group *on_device, int64_t deadline) {
    tu_memory_group *memory;
    tutti_status status = tu_memory_group_get(group, &memory);
    for (int i = 0; status == TUTTI_OK && i < on_device->executors.count; i++) {
        status = prepare_once(&on_device->list[i], group, -1, deadline);
        if (status == TUTTI_OK)
            status = add_blocks(&on_device->list[i], memory);
    }
    return status;
}

tutti_status tu_device_prepare(tutti_group *group, int64_t deadline) {
    if (atomic_load_explicit(&group->world->devices, memory_order_acquire) == NULL || group->size == 1)
        return TUTTI_OK;
    tutti_status status = TUTTI_OK;
    for (int row = 1; status == TUTTI_OK && row < TU_BACKEND_KINDS; row++) {
        device_group *on_device;
        status = get_kind(group, row, &on_device);
        if (status == TUTTI_OK)
            status = prepare_kind(group, on_device, deadline);
    }
    return status;
}
