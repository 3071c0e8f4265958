/* SPDX-License-Identifier: Apache-2.0
 *
 * What fused operations keep on a device, and how streams of several ranks agree and meet: see device.h.
 */
#include "fused/device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "functional/symmetric.h"
#include "memory/memory.h"
#include "world/attachment.h"

#define CHANNEL 0 /* of the meetings */

/* Memory that calls were captured with: their graphs use it whenever they run, and nothing tells when they end. */
typedef struct kept_memory {
    struct kept_memory *next;
    tutti_memory *memory;
} kept_memory;

/* Everything but `bytes` and `together` belongs to the thread whose turn it is: see tu_fused. */
struct tu_fused_room {
    tu_device *device;        /* that the memory lies on; NULL: none yet */
    tutti_memory *memory;     /* NULL: none yet */
    kept_memory *captured;    /* where that memory goes, since a call was captured with it; NULL: none was */
    kept_memory *kept;        /* what was so before it grew: as long as the group is there */
    atomic_size_t bytes;      /* of it; read without a turn, too */
    _Atomic int64_t together; /* calls that were made in one kernel; likewise */
    size_t board_bytes, half_bytes, stage_bytes;
    uint64_t gathers, scatters; /* so far, equal on all ranks */
    void *beside;               /* a stream of its own */
    void *last;                 /* the stream of the last call that was not captured */
    void *done;                 /* an event behind that call; NULL: there was none */
};

/* ---- a group's room ---- */

static tutti_status make_room(void *owner, void **made) {
    (void)owner;
    *made = calloc(1, sizeof(tu_fused_room));
    return *made != NULL ? TUTTI_OK : tu_error_memory("the state of fused operations", sizeof(tu_fused_room));
}

/* For what calls put into streams, which libtutti does not see: it would unmap the memory below their kernels. */
static void await_calls(const tu_fused_room *room) {
    const tu_device *device = room->device;
    tutti_status status = room->done == NULL ? TUTTI_OK : device->table->wait(device->state, device->index, room->done);
    if (room->beside != NULL) /* a call that failed may have left something there */
        status = device->table->synchronize(device->state, device->index, room->beside);
    (void)status; /* a device that cannot wait has stopped */
}

static void drop_memory(tu_fused_room *room) {
    if (room->memory != NULL)
        await_calls(room);
    if (room->captured != NULL) {
        room->captured->memory = room->memory;
        room->captured->next = room->kept;
        room->kept = room->captured;
        room->captured = NULL;
    } else {
        tutti_memory_release(room->memory);
    }
    room->memory = NULL;
    atomic_store_explicit(&room->bytes, 0, memory_order_relaxed);
    room->board_bytes = room->half_bytes = room->stage_bytes = 0;
    room->gathers = room->scatters = 0;
}

static void leave_device(tu_fused_room *room) {
    const tu_device *device = room->device;
    drop_memory(room);
    if (device != NULL && room->done != NULL)
        device->table->unmark(device->state, device->index, room->done);
    if (device != NULL) {
        tu_device_stream_end(room->device, room->beside);
        tu_devices_drop();
    }
    room->device = NULL;
    room->beside = room->last = room->done = NULL;
}

static void end_room(void *ended) {
    tu_fused_room *room = ended;
    leave_device(room);
    while (room->kept != NULL) {
        kept_memory *one = room->kept;
        room->kept = one->next;
        tutti_memory_release(one->memory);
        free(one);
    }
    free(room);
}

static const tu_attachment attachment = { .make = make_room, .end = end_room };

/* Made behind what the group has of symmetric memory, and so ended before it: that unmaps the memory of peers below
 * calls that still use it. */
static tutti_status room_of(tutti_group *group, tu_fused_room **room) {
    tu_memory_group *places;
    void *found;
    tutti_status status = tu_memory_group_get(group, &places);
    if (status == TUTTI_OK)
        status = tu_group_attachment(group, &attachment, &found);
    if (status == TUTTI_OK)
        *room = found;
    return status;
}

static tutti_status enter_device(tu_fused_room *room, tu_device *device) {
    if (room->device == device)
        return TUTTI_OK;
    leave_device(room);
    tutti_status status = device->table->stream_new(device->state, device->index, &room->beside);
    if (status != TUTTI_OK)
        return status;
    tu_devices_hold();
    room->device = device;
    return TUTTI_OK;
}

size_t tu_fused_device_bytes(tutti_group *group) {
    tu_fused_room *room;
    if (room_of(group, &room) != TUTTI_OK)
        return 0;
    return atomic_load_explicit(&room->bytes, memory_order_relaxed);
}

int64_t tu_fused_together(tutti_group *group) {
    tu_fused_room *room;
    if (room_of(group, &room) != TUTTI_OK)
        return 0;
    return atomic_load_explicit(&room->together, memory_order_relaxed);
}

/* ---- streams ---- */

/* What comes to `later` from now on begins when `earlier` has done what it holds. */
static tutti_status follow(const tu_device *device, void *later, void *earlier) {
    void *event;
    tutti_status status = device->table->mark(device->state, device->index, earlier, &event);
    if (status != TUTTI_OK)
        return status;
    status = device->table->join(device->state, device->index, later, event);
    device->table->unmark(device->state, device->index, event);
    return status;
}

/* The workspace is used in the order of the calls, whichever streams they are on. */
static tutti_status follow_last(tu_fused_run *run) {
    tu_fused_room *room = run->room;
    if (room->done == NULL || room->last == run->stream || run->capturing)
        return TUTTI_OK;
    return run->device->table->join(run->device->state, run->device->index, run->stream, room->done);
}

/* Marks where a call ends in its stream. */
static tutti_status mark_end(const tu_device *device, void *stream, void **event) {
    tutti_status status = device->table->mark(device->state, device->index, stream, event);
    if (status != TUTTI_OK) { /* nothing will tell when the call has ended: now it has */
        tutti_error_copy error;
        tu_error_save(&error);
        tutti_status ended = device->table->synchronize(device->state, device->index, stream);
        (void)ended;
        status = tu_error_restore(&error);
    }
    return status;
}

/* Without an event a call on another stream could not follow this one: an error. */
static tutti_status note_last(tu_fused_run *run) {
    const tu_device *device = run->device;
    tu_fused_room *room = run->room;
    if (run->capturing)
        return TUTTI_OK;
    if (room->done != NULL)
        device->table->unmark(device->state, device->index, room->done);
    room->last = run->stream;
    room->done = NULL;
    return mark_end(device, run->stream, &room->done);
}

static tutti_call call_on(void *stream) {
    tutti_call call = TUTTI_CALL_INIT;
    call.stream = stream;
    return call;
}

/* This rank cannot go on, and the others' streams will wait for it. */
static tutti_status checked(tu_fused_run *run, tutti_status status) {
    return status == TUTTI_OK || run->state == NULL ? status : tu_fused_give_up(run->state, run->who);
}

void tu_fused_forget(const tu_fused_run *run, void **event) {
    if (*event != NULL)
        run->device->table->unmark(run->device->state, run->device->index, *event);
    *event = NULL;
}

tutti_status tu_fused_await(tu_fused_run *run, void **event) {
    if (*event == NULL)
        return TUTTI_OK;
    tutti_status status = run->device->table->join(run->device->state, run->device->index, run->stream, *event);
    tu_fused_forget(run, event);
    return checked(run, status);
}

/* Ends the group. What is beside the stream may use tensors of this rank, which can go when the call has returned. */
static tutti_status leave_beside(tu_fused_run *run, tutti_status status) {
    tutti_error_copy error;
    status = checked(run, status);
    tu_error_save(&error);
    tutti_status followed = follow(run->device, run->stream, run->room->beside);
    (void)followed; /* what made this rank leave counts */
    return tu_error_restore(&error);
}

/* ---- calls ---- */

tutti_status tu_fused_begin(tu_fused_run *run, const tu_call *call, tutti_group *group) {
    tutti_status status = tu_fused_begin_on(run, call->entry->name, tu_device_of(call->inputs[0]), group);
    run->call = call;
    return status;
}

tutti_status tu_fused_begin_on(tu_fused_run *run, const char *who, tu_device *device, tutti_group *group) {
    *run = (tu_fused_run){
        .who = who, .group = group, .device = device, .rank = tutti_group_rank(group), .size = tutti_group_size(group)
    };
    run->stream = tu_device_stream(run->device);
    if (run->size == 1 || tu_fused_is_fake(group))
        return tutti_group_check(group);
    tu_device_meet(run->device);
    const tu_device_tensors *table = run->device->table;
    run->capturing = table->capturing != NULL && table->capturing(run->device->state, run->device->index, run->stream);
    tutti_status status = tu_fused_enter(group, &run->state);
    if (status != TUTTI_OK)
        return tu_fused_refuse(group, who, status);
    status = room_of(group, &run->room);
    if (status == TUTTI_OK)
        status = enter_device(run->room, run->device);
    if (status == TUTTI_OK && run->room->memory != NULL)
        status = tutti_memory_rendezvous(run->room->memory, group, &run->peers); /* cached: asks nobody */
    if (status == TUTTI_OK)
        status = follow_last(run);
    if (status == TUTTI_OK)
        return TUTTI_OK;
    status = tu_fused_refuse_inside(run->state, who, status);
    tutti_peers_release(run->peers);
    tu_fused_leave(run->state);
    run->state = NULL;
    return status;
}

tutti_status tu_fused_end(tu_fused_run *run, tutti_status status) {
    if (run->state == NULL)
        return status;
    tutti_error_copy error;
    tu_error_save(&error);
    tutti_status noted = note_last(run); /* also behind a failure: some of the call may be in the stream */
    if (status == TUTTI_OK)
        status = checked(run, noted);
    else
        tu_error_restore(&error);
    tutti_peers_release(run->peers); /* the block keeps them */
    tu_fused_leave(run->state);
    run->state = NULL;
    return status;
}

tutti_status tu_fused_multiply_scaled(const tu_fused_run *run, const tu_device_product *product,
                                      const tu_fused_scales *scales) {
    tu_device_scaled scaled = { .product = *product,
                                .row_scales = scales->rows,
                                .column_scales = tu_pointer(scales->columns),
                                .bias = scales->bias != NULL ? tu_pointer(scales->bias) : NULL,
                                .whole = scales->whole != NULL ? tu_pointer(scales->whole) : NULL,
                                .scales_rows = scales->by_rows,
                                .scales_columns = scales->columns->numel > 1 };
    return tu_device_multiply_scaled(run->device, &scaled);
}

/* TUTTI_TOGETHER. */
static const char *asked_kernel(const tu_fused_run *run) {
    return tu_world_setting(tutti_group_world(run->group), TU_SETTING_TOGETHER);
}

/* Equal on all ranks, so that they choose alike. */
static void sign_setting(const tu_fused_run *run, tu_fused_signature *signature) {
    const char *asked = asked_kernel(run);
    if (strcmp(asked, "auto") == 0)
        return;
    tu_fused_sign_text(signature, ", with TUTTI_TOGETHER=");
    tu_fused_sign_text(signature, asked);
}

/* A call that is captured has other places than one that runs, so it is another call. */
static tutti_status agree(tu_fused_run *run, const tu_fused_signature *signature) {
    tu_fused_signature whole = *signature;
    if (run->capturing)
        tu_fused_sign_text(&whole, ", for a graph");
    sign_setting(run, &whole);
    run->state->own.kernel = (uint16_t)run->kernel;
    run->state->own.together = !run->together ? 0 : run->leaves ? TU_FUSED_LEAVES : TU_FUSED_STAYS;
    tutti_status status = tu_fused_publish(run->state, &whole, TUTTI_OK);
    if (status == TUTTI_OK)
        status = tu_fused_agree(run->state, run->who);
    for (int rank = 0; rank < run->size && status == TUTTI_OK; rank++) {
        run->together =
            run->together && run->state->records[rank].together != 0 && run->state->records[rank].kernel == run->kernel;
        run->leaves = run->leaves && run->state->records[rank].together == TU_FUSED_LEAVES;
    }
    return status;
}

/* ---- growing ---- */

/* Whether some rank captures, as the records say. */
static bool anybody_captures(const tu_fused_run *run) {
    bool captures = false;
    for (int rank = 0; rank < run->size; rank++)
        captures = captures || !run->state->records[rank].fits;
    return captures;
}

static size_t rounded(size_t bytes) {
    return (bytes + TU_FUSED_ALIGN - 1) / TU_FUSED_ALIGN * TU_FUSED_ALIGN;
}

/* Of the half of the current gather, and of the stage of the current scatter. Calls that are captured do not count:
 * they do not run between those before and behind them, which may have no meeting of theirs between two uses of a half.
 */
static size_t half_offset(const tu_fused_run *run) {
    const tu_fused_room *room = run->room;
    return room->board_bytes + (run->capturing ? 2 : room->gathers % 2) * room->half_bytes;
}
static size_t stage_offset(const tu_fused_room *room) {
    return room->board_bytes + 3 * room->half_bytes + room->scatters % 2 * room->stage_bytes;
}

/* A board with words for so many rows and columns of each rank's block. */
static size_t board_bytes(int size, int64_t rows, int64_t columns) {
    size_t half_tiles = (size_t)((rows + 63) / 64 + 1) * (size_t)((columns + 255) / 256);
    return sizeof(tu_together_board) + half_tiles * (size_t)size * sizeof(uint32_t);
}

/* The memory stays where it is for a graph, also when it has to grow. */
static tutti_status keep_for_graph(tu_fused_room *room) {
    if (room->captured == NULL)
        room->captured = calloc(1, sizeof *room->captured);
    return room->captured != NULL ? TUTTI_OK : tu_error_memory("the workspace of a graph", sizeof *room->captured);
}

/* Every rank comes here after an agreement, with the same sizes. */
static tutti_status reserve(tu_fused_run *run, const tu_fused_signature *signature, size_t board_bytes,
                            size_t half_bytes, size_t stage_bytes) {
    tu_fused_room *room = run->room;
    size_t board = rounded(board_bytes > room->board_bytes ? board_bytes : room->board_bytes),
           half = rounded(half_bytes > room->half_bytes ? half_bytes : room->half_bytes),
           stage = rounded(stage_bytes > room->stage_bytes ? stage_bytes : room->stage_bytes),
           old = room->board_bytes + 3 * room->half_bytes + 2 * room->stage_bytes, bytes = board + 3 * half + 2 * stage;
    if (room->memory != NULL && bytes <= old)
        return run->capturing ? checked(run, keep_for_graph(room)) : TUTTI_OK;
    if (anybody_captures(run))
        return tu_error(TUTTI_ERROR_STATE,
                        "%s: the workspace of group \"%s\" has %zu bytes on the device and would have to grow to %zu "
                        "while a stream captures a graph: make the same call once before the capture",
                        run->who, tutti_group_name(run->group), old, bytes);
    tutti_memory *memory = NULL;
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.device = run->device->number;
    tutti_peers_release(run->peers);
    run->peers = NULL;
    drop_memory(room); /* first: the old and the new one need not lie in memory together */
    tutti_status status = tutti_memory_alloc(tutti_group_world(run->group), bytes, &options, &memory);
    run->state->own.status = (int32_t)status;
    status = tu_fused_publish(run->state, signature, status);
    if (status == TUTTI_OK)
        status = tu_fused_agree(run->state, run->who);
    if (status == TUTTI_OK)
        status = tutti_memory_rendezvous(memory, run->group, &run->peers);
    if (status != TUTTI_OK) {
        tutti_memory_release(memory);
        return status;
    }
    room->memory = memory;
    atomic_store_explicit(&room->bytes, tutti_memory_bytes(memory), memory_order_relaxed);
    room->board_bytes = board;
    room->half_bytes = half;
    room->stage_bytes = stage;
    return TUTTI_OK;
}

/* ---- gather: places ---- */

static bool is_turned(const tt_tensor *x) {
    return x->ndim == 2 && !(x->flags & TU_CONTIGUOUS);
}

static void find_places(tu_fused_gather *gather) {
    tu_fused *state = gather->run->state;
    state->own.fits = !gather->run->capturing;
    for (int i = 0; i < gather->count; i++) {
        const tu_fused_part *part = &gather->parts[i];
        tu_fused_place *place = &state->own.places[i];
        tu_symmetric found;
        *place = (tu_fused_place){ .turned = is_turned(part->tensor) };
        if (part->bytes == 0 || !tu_symmetric_find(state->places, tu_pointer(part->tensor), part->bytes, &found))
            continue;
        place->block_bytes = tutti_memory_bytes(found.memory);
        place->index = found.index;
        place->offset = found.offset;
    }
}

/* Blocks that have not met with the group do so now, all ranks together. */
static tutti_status meet(tu_fused_gather *gather, int part) {
    const tu_fused *state = gather->run->state;
    tu_symmetric found;
    tutti_peers *peers;
    if (!tu_symmetric_find(state->places, tu_pointer(gather->parts[part].tensor), gather->parts[part].bytes, &found))
        return tu_error(TUTTI_ERROR_STATE, "a symmetric block has gone during a call that uses it");
    tutti_status status = tutti_memory_rendezvous(found.memory, gather->run->group, &peers);
    if (status != TUTTI_OK)
        return tutti_group_check(gather->run->group); /* blocks that cannot meet are staged */
    gather->parts[part].in_place = true;
    gather->parts[part].blocks = peers;
    tutti_peers_release(peers); /* the block keeps them, and the input keeps the block */
    return TUTTI_OK;
}

/* In test mode: the plain collective. */
static tutti_status gather_plainly(tu_fused_gather *gather) {
    tu_fused_run *run = gather->run;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < gather->count && status == TUTTI_OK; i++) {
        tu_fused_part *part = &gather->parts[i];
        tu_shape shape = { .dtype = part->tensor->dtype,
                           .device = run->device->number,
                           .ndim = 1,
                           .sizes = { run->size * part->tensor->numel },
                           .strides = { 1 } };
        tutti_call call = call_on(run->stream);
        part->gathered = tu_tensor_new(&shape);
        status = part->gathered == NULL ? TUTTI_ERROR_MEMORY
                 : part->bytes == 0     ? TUTTI_OK
                                    : tutti_all_gather(run->group, tu_pointer(part->tensor), tu_pointer(part->gathered),
                                                       part->bytes, TUTTI_U8, &call);
    }
    status = checked(run, status);
    for (int i = 0; i < gather->count && status != TUTTI_OK; i++) {
        tu_tensor_drop(gather->parts[i].gathered);
        gather->parts[i].gathered = NULL;
    }
    return status;
}

/* By what all ranks have told: in place where all have the part in blocks of one rendezvous, or of none yet. */
static tutti_status settle_places(tu_fused_gather *gather) {
    const tu_fused *state = gather->run->state;
    const tu_fused_record *records = state->records;
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < gather->count && status == TUTTI_OK; i++) {
        tu_fused_part *part = &gather->parts[i];
        const tu_fused_place *first = &records[0].places[i];
        bool symmetric = first->block_bytes != 0;
        for (int rank = 1; rank < state->size; rank++)
            symmetric = symmetric && records[rank].places[i].block_bytes == first->block_bytes &&
                        records[rank].places[i].index == first->index;
        part->in_place = symmetric && first->index != 0;
        if (part->in_place)
            part->blocks = tu_symmetric_peers(state->places, first->index);
        else if (symmetric && !state->meets_in_vain && !anybody_captures(gather->run))
            status = meet(gather, i);
    }
    return status;
}

/* Where staged parts go in the half, which is made large enough. */
static tutti_status lay_out(tu_fused_gather *gather) {
    size_t used = 0;
    for (int i = 0; i < gather->count; i++) {
        if (gather->parts[i].in_place)
            continue;
        gather->parts[i].staged = used;
        used += rounded(gather->parts[i].bytes);
    }
    return reserve(gather->run, gather->signature, board_bytes(gather->run->size, 0, 0), used > 0 ? used : 1, 0);
}

/* ---- gather: meeting ---- */

static bool has_staged(const tu_fused_gather *gather) {
    bool staged = false;
    for (int i = 0; i < gather->count; i++)
        staged = staged || (!gather->parts[i].in_place && gather->parts[i].bytes > 0);
    return staged;
}

static tutti_status stage_parts(const tu_fused_gather *gather, void *stream) {
    const tu_fused_run *run = gather->run;
    char *half = (char *)tutti_memory_data(run->room->memory) + half_offset(run);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < gather->count && status == TUTTI_OK; i++) {
        const tu_fused_part *part = &gather->parts[i];
        if (!part->in_place && part->bytes > 0)
            status = run->device->table->copy(run->device->state, run->device->index, stream, half + part->staged,
                                              tu_pointer(part->tensor), part->bytes);
    }
    return status;
}

static tutti_status meet_on(const tu_fused_run *run, void *stream) {
    tutti_call call = call_on(stream);
    return tutti_peers_barrier(run->peers, CHANNEL, &call);
}

/* Where it is staged beside the stream, that comes first. */
static tutti_status leave_gather(const tu_fused_gather *gather, tutti_status status) {
    return gather->own_first ? leave_beside(gather->run, status) : checked(gather->run, status);
}

static tutti_status announce(tu_fused_gather *gather) {
    tu_fused_run *run = gather->run;
    void *stream = gather->own_first ? run->room->beside : run->stream;
    tutti_status status = gather->own_first ? follow(run->device, stream, run->stream) : TUTTI_OK;
    if (status == TUTTI_OK && run->capturing && has_staged(gather)) /* all have read what the run before has staged */
        status = meet_on(run, stream);
    if (status == TUTTI_OK)
        status = stage_parts(gather, stream);
    if (status == TUTTI_OK)
        status = meet_on(run, stream);
    if (status == TUTTI_OK && gather->own_first)
        status = run->device->table->mark(run->device->state, run->device->index, stream, &gather->met);
    return status;
}

tutti_status tu_fused_open_gather(tu_fused_gather *gather) {
    tu_fused_run *run = gather->run;
    for (int i = 0; i < gather->count; i++)
        gather->parts[i].bytes =
            (size_t)gather->parts[i].tensor->numel * tu_dtype_bytes[gather->parts[i].tensor->dtype];
    if (run->state == NULL)
        return TUTTI_OK;
    find_places(gather);
    tutti_status status = agree(run, gather->signature);
    if (status == TUTTI_OK && tu_symm_test_mode())
        return gather_plainly(gather);
    if (status == TUTTI_OK)
        status = settle_places(gather);
    if (status == TUTTI_OK)
        status = lay_out(gather);
    if (status != TUTTI_OK || run->together)
        return status;
    status = announce(gather);
    return status == TUTTI_OK ? TUTTI_OK : leave_gather(gather, status);
}

tutti_status tu_fused_await_others(tu_fused_gather *gather) {
    return tu_fused_await(gather->run, &gather->met);
}

tutti_status tu_fused_close_gather(tu_fused_gather *gather, tutti_status status) {
    tu_fused_run *run = gather->run;
    bool in_place = false;
    for (int i = 0; i < gather->count; i++) {
        in_place = in_place || gather->parts[i].in_place;
        tu_tensor_drop(gather->parts[i].gathered);
    }
    tu_fused_forget(run, &gather->met);
    if (run->state == NULL)
        return status;
    if (status != TUTTI_OK)
        return leave_gather(gather, status);
    run->room->gathers += !run->capturing && !tu_symm_test_mode(); /* which uses no half */
    if (gather->left || !in_place)
        return TUTTI_OK;
    if (!gather->own_first)
        return checked(run, meet_on(run, run->stream));
    /* Where the first meeting was, so that the two need no order between streams. */
    status = follow(run->device, run->room->beside, run->stream);
    if (status == TUTTI_OK)
        status = meet_on(run, run->room->beside);
    if (status == TUTTI_OK)
        status = follow(run->device, run->stream, run->room->beside);
    return checked(run, status);
}

tu_shard tu_fused_part_of(const tu_fused_gather *gather, int part, int rank) {
    const tu_fused_run *run = gather->run;
    const tu_fused_part *of = &gather->parts[part];
    if (run->state == NULL || of->bytes == 0) /* the others are made up, and have what this rank has */
        return (tu_shard){ tu_pointer(of->tensor), is_turned(of->tensor) };
    const tu_fused_place *place = &run->state->records[rank].places[part];
    if (of->gathered != NULL)
        return (tu_shard){ (const char *)tu_pointer(of->gathered) + (size_t)rank * of->bytes, place->turned };
    const char *data = tu_symmetric_mapped(of->in_place ? of->blocks : run->peers, rank);
    return (tu_shard){ data + (of->in_place ? place->offset : half_offset(run) + of->staged), place->turned };
}

/* ---- in one kernel ---- */

/* Where one kernel is as quick as several or quicker, as measured (docs/performance-gpu.md): every gather of 16-bit
 * floats, and a scatter that is small, where the number of launches counts, or deep, where handing tiles out does not.
 */
#define DEEP_SCATTER 512
#define SMALL_SCATTER ((int64_t)1 << 20) /* elements of all ranks' blocks */
#define SMALL_GATHER ((int64_t)1 << 23)  /* likewise of the product of f8 of all shards */

/* Of f8 the library has products of all shards at once with one scale, and of one shard at a time with scales of its
 * rows. It is as quick at least where products are large. Nor has it everything. */
static bool pays_f8(const tu_device_together *product) {
    bool library = product->dtype == TUTTI_F8_E4M3 && product->right_dtype == TUTTI_F8_E4M3 && product->bias == NULL &&
                   product->whole == NULL && product->scales_rows == product->scales_columns &&
                   product->columns % 16 == 0;
    return !library || product->size * product->rows * product->columns <= SMALL_GATHER;
}

/* Of the plain kernel nothing is measured: it is taken where the alternative is Tutti's own kernel of products. */
static bool pays_plain(const tu_fused_run *run) {
    const tu_device *device = run->device;
    return !device->table->has_library(device->state, device->index);
}

static bool pays_hopper(const tu_device_together *product) {
    if (!product->scatters)
        return tu_dtype_bytes[product->dtype] > 1 || pays_f8(product);
    return product->depth >= DEEP_SCATTER || product->size * product->rows * product->columns <= SMALL_SCATTER;
}

void tu_fused_choose_together(tu_fused_run *run, tu_device_together product) {
    const tu_device *device = run->device;
    const char *asked = asked_kernel(run);
    run->together = false;
    if (run->state == NULL || tu_symm_test_mode() || product.rows == 0 || strcmp(asked, "off") == 0 ||
        device->table->can_together == NULL)
        return;
    bool decides = strcmp(asked, "auto") == 0;
    product.kernel = decides ? TU_TOGETHER_NONE : strcmp(asked, "plain") == 0 ? TU_TOGETHER_PLAIN : TU_TOGETHER_HOPPER;
    run->kernel = (tu_together_kernel)device->table->can_together(device->state, device->index, &product);
    run->together = run->kernel != TU_TOGETHER_NONE;
    if (run->together && decides)
        run->together = run->kernel == TU_TOGETHER_PLAIN ? pays_plain(run) : pays_hopper(&product);
}

typedef struct start {
    tu_fused_run *run;
    const tu_device_together *product;
} start;

static tutti_status start_product(void *context, const tu_backend_kernel *kernel, unsigned *blocks) {
    const start *of = context;
    const tu_device *device = of->run->device;
    return device->table->together(device->state, device->index, of->run->stream, of->product, kernel, blocks);
}

/* Kernels that compute and communicate at once take this rank's whole share of the device, so those of two groups run
 * one after the other, on whichever streams they are: two at a time, on different ranks different ones, would wait for
 * each other's processors. One for each rank, with its world. */
typedef struct queue {
    pthread_mutex_t lock;
    tu_device *device; /* of what follows; NULL: there was no call yet */
    void *last, *done; /* the stream of the last call that was not captured, and an event behind it */
} queue;

static tutti_status make_queue(void *owner, void **made) {
    (void)owner;
    queue *queue = calloc(1, sizeof *queue);
    if (queue == NULL)
        return tu_error_memory("the state of fused operations", sizeof *queue);
    pthread_mutex_init(&queue->lock, NULL);
    *made = queue;
    return TUTTI_OK;
}

static void forget_last(queue *queue) {
    if (queue->done != NULL)
        queue->device->table->unmark(queue->device->state, queue->device->index, queue->done);
    queue->done = queue->last = NULL;
}

static void end_queue(void *ended) {
    queue *queue = ended;
    forget_last(queue);
    if (queue->device != NULL)
        tu_devices_drop();
    pthread_mutex_destroy(&queue->lock);
    free(queue);
}

static const tu_attachment queue_attachment = { .make = make_queue, .end = end_queue };

static tutti_status run_in_turn(tu_fused_run *run, start *start) {
    tu_device *device = run->device;
    tutti_call call = call_on(run->stream);
    void *found;
    tutti_status status = tu_world_attachment(tutti_group_world(run->group), &queue_attachment, &found);
    if (status != TUTTI_OK)
        return status;
    queue *queue = found;
    pthread_mutex_lock(&queue->lock);
    if (queue->device != device)
        forget_last(queue);
    if (queue->device == NULL)
        tu_devices_hold();
    queue->device = device;
    if (queue->done != NULL && queue->last != run->stream && !run->capturing)
        status = device->table->join(device->state, device->index, run->stream, queue->done);
    if (status == TUTTI_OK)
        status = tu_peers_run(run->peers, run->who, start_product, start, &call);
    if (status == TUTTI_OK && !run->capturing) {
        forget_last(queue);
        queue->last = run->stream;
        status = mark_end(device, run->stream, &queue->done);
    }
    pthread_mutex_unlock(&queue->lock);
    return status;
}

static tutti_status run_together(tu_fused_run *run, tu_device_together *product) {
    char *first = tu_symmetric_mapped(run->peers, 0), *second = tu_symmetric_mapped(run->peers, 1);
    start start = { run, product };
    product->kernel = run->kernel;
    product->rank = run->rank;
    product->size = run->size;
    product->boards = (tu_together_board *)first;
    product->step = (size_t)(second - first);
    atomic_fetch_add_explicit(&run->room->together, 1, memory_order_relaxed);
    return run_in_turn(run, &start);
}

tutti_status tu_fused_gather_together(tu_fused_gather *gather, tu_device_together *product) {
    tu_fused_run *run = gather->run;
    const tu_fused_part *part = &gather->parts[0];
    const tu_fused_part *scales = gather->count > 1 ? &gather->parts[1] : NULL; /* of the shards' rows */
    bool in_place = part->in_place || (scales != NULL && scales->in_place);
    char *half = (char *)tutti_memory_data(run->room->memory) + half_offset(run);
    for (int rank = 0; rank < run->size; rank++) {
        bool own = rank == run->rank;
        product->left[rank] = own ? tu_pointer(part->tensor) : tu_fused_part_of(gather, 0, rank).data;
        if (scales != NULL)
            product->row_scales[rank] = own ? tu_pointer(scales->tensor) : tu_fused_part_of(gather, 1, rank).data;
    }
    if (scales != NULL && !scales->in_place)
        product->scales_half = half + scales->staged;
    if (!part->in_place) {
        product->half = half + part->staged;
        product->shard_bytes = part->bytes;
    }
    product->leaves_together = run->leaves && in_place; /* what was staged is behind the next meeting */
    gather->left = product->leaves_together;
    return checked(run, run_together(run, product));
}

tutti_status tu_fused_scatter_together(tu_fused_run *run, tu_device_together *product) {
    size_t stage = stage_offset(run->room);
    product->stage = (char *)tutti_memory_data(run->room->memory) + stage;
    for (int rank = 0; rank < run->size; rank++)
        product->out[rank] =
            (char *)tu_symmetric_mapped(run->peers, rank) + stage + (size_t)run->rank * product->part_bytes;
    tutti_status status = checked(run, run_together(run, product));
    if (status == TUTTI_OK)
        run->room->scatters += !run->capturing;
    return status;
}

/* ---- scatter ---- */

tutti_status tu_fused_open_scatter(tu_fused_run *run, const tu_fused_signature *signature, size_t bytes, int64_t rows,
                                   int64_t columns, char **stage) {
    run->state->own.fits = !run->capturing;
    tutti_status status = agree(run, signature);
    if (status == TUTTI_OK)
        status = reserve(run, signature, run->together ? board_bytes(run->size, rows, columns) : 0, 0,
                         bytes > 0 ? bytes : 1);
    if (status == TUTTI_OK && run->capturing && !run->together)
        status = checked(run, meet_on(run, run->stream));
    if (status == TUTTI_OK)
        *stage = (char *)tutti_memory_data(run->room->memory) + stage_offset(run->room);
    return status;
}

/* Threads of a block, elements that one of them has at a time, and blocks that add while a product runs: each takes a
 * processor from it, and few keep up with it. */
enum {
    THREADS = 512,
    EACH = 8,
    FEW_BLOCKS = 64
};

tutti_dtype tu_fused_real_of(tutti_dtype dtype, int64_t *count) {
    if (!tu_is_complex(dtype))
        return dtype;
    *count *= 2;
    return dtype == TUTTI_C64 ? TUTTI_F32 : TUTTI_F64;
}

tutti_status tu_fused_add_beside(tu_fused_run *run, size_t offset, void *to, int64_t count, tutti_dtype dtype,
                                 tutti_reduction reduction, bool last) {
    const char *first = tu_symmetric_mapped(run->peers, 0), *second = tu_symmetric_mapped(run->peers, 1);
    size_t from = stage_offset(run->room) + offset + (size_t)(run->rank * count) * tu_dtype_bytes[dtype];
    dtype = tu_fused_real_of(dtype, &count);
    tu_launch_parts parts = { .from = tu_place_of(first + from),
                              .out = tu_place_of(to),
                              .step = second - first,
                              .count = count,
                              .ranks = run->size,
                              .dtype = (int32_t)dtype,
                              .average = reduction == TUTTI_AVG };
    int64_t blocks = (count + THREADS * EACH - 1) / (THREADS * EACH);
    char name[TU_KERNEL_NAME];
    tutti_status status = follow(run->device, run->room->beside, run->stream);
    if (status == TUTTI_OK)
        status = meet_on(run, run->room->beside);
    if (status == TUTTI_OK)
        status = tu_device_launch_on(run->device, run->room->beside, tu_kernel_name(name, "add_parts", dtype),
                                     last || blocks < FEW_BLOCKS ? blocks : FEW_BLOCKS, THREADS, &parts);
    return checked(run, status);
}

const char *tu_fused_stage_of(const tu_fused_run *run, int rank) {
    return (const char *)tu_symmetric_mapped(run->peers, rank) + stage_offset(run->room);
}

tutti_status tu_fused_meet_beside(tu_fused_run *run, void **beside, void **met) {
    *beside = run->room->beside;
    tutti_status status = follow(run->device, *beside, run->stream);
    if (status == TUTTI_OK)
        status = meet_on(run, *beside);
    if (status == TUTTI_OK)
        status = run->device->table->mark(run->device->state, run->device->index, *beside, met);
    return status;
}

tutti_status tu_fused_close_scatter(tu_fused_run *run, tutti_status status) {
    if (run->state == NULL)
        return status;
    if (status != TUTTI_OK)
        return leave_beside(run, status);
    if (tu_symm_test_mode()) /* which uses no stage, and nothing beside the stream */
        return TUTTI_OK;
    run->room->scatters += !run->capturing;
    status = run->capturing ? meet_on(run, run->room->beside) : TUTTI_OK;
    if (status == TUTTI_OK)
        status = follow(run->device, run->stream, run->room->beside);
    return status == TUTTI_OK ? TUTTI_OK : leave_beside(run, status);
}

tutti_status tu_fused_open_half(tu_fused_run *run, const tu_fused_signature *signature, size_t bytes, char **half) {
    run->state->own.fits = !run->capturing;
    tutti_status status = agree(run, signature);
    if (status == TUTTI_OK)
        status = reserve(run, signature, 0, bytes > 0 ? bytes : 1, 0);
    if (status == TUTTI_OK) {
        *half = (char *)tutti_memory_data(run->room->memory) + half_offset(run);
        run->room->gathers += bytes > 0 && !run->capturing; /* of nothing: no meeting, and so no use of a half */
    }
    return status;
}
