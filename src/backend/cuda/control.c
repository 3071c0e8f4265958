/* SPDX-License-Identifier: Apache-2.0
 *
 * Making the control block of a group on a device: who shares what, how many thread blocks a launch may have, and where
 * everything lies.
 *
 * HOW MANY THREAD BLOCKS. Kernels that wait for each other must all be resident at once, also when several ranks share
 * a GPU: each rank gets its share of what the GPU can hold. The least share of all members counts, since block b of a
 * rank meets block b of every other.
 */
#include "control.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MESSAGE_STAGE ((uint64_t)4 << 20)

/* Packets of all sources to all members together, as long as sending everything to everybody is quicker than meeting;
 * and the least of one source, for large groups. Measured on an H200 with 2, 4 and 8 ranks. */
#define PACKETS ((uint64_t)1 << 17)
#define LEAST_PACKETS 128

typedef struct introduction {
    CUuuid uuid;
    int32_t pid, blocks;
    uint64_t step; /* address of this rank's lockstep, for ranks of the same process */
} introduction;

/* What meeting takes on the host, made before: a rank that has no memory for it says so in the first agreement. */
typedef struct room {
    introduction *introductions; /* of each member, and so are: */
    tu_backend_ticket *tickets;
    unsigned char (*payloads)[TU_BACKEND_TICKET_BYTES];
    int *fds;
    tu_cuda_lockstep *step; /* NULL: it is in use */
} room;

static tutti_status make_room(const tu_cuda *cuda, int size, room *room) {
    size_t count = (size_t)size;
    room->introductions = calloc(count, sizeof *room->introductions);
    room->tickets = calloc(count, sizeof *room->tickets);
    room->payloads = calloc(count, sizeof *room->payloads);
    room->fds = calloc(count, sizeof *room->fds);
    room->step = calloc(1, sizeof *room->step + count * count * 2 * sizeof room->step->messages[0]);
    return room->introductions != NULL && room->tickets != NULL && room->payloads != NULL && room->fds != NULL &&
                   room->step != NULL
               ? TUTTI_OK
               : cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a group of %d ranks on a GPU", size);
}

static void free_room(room *room) {
    free(room->introductions);
    free(room->tickets);
    free(room->payloads);
    free(room->fds);
    free(room->step);
}

/* How many thread blocks of the hungriest kernel the device holds at once. */
static CUresult resident_blocks(tu_cuda *cuda, tu_cuda_device *device, int *blocks) {
    *blocks = 1 << 20;
    for (int i = 0; i < TU_CUDA_KERNEL_COUNT; i++) {
        bool packets = i >= TU_CUDA_PACKETS_F64 && i <= TU_CUDA_PACKETS_BOOLEAN;
        int per_processor, threads = packets ? TU_CUDA_PACKET_THREADS : TU_CUDA_THREADS;
        CUresult result =
            cuda->driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, device->kernels[i], threads, 0);
        if (result != CUDA_SUCCESS)
            return result;
        if (per_processor * device->processors < *blocks)
            *blocks = per_processor * device->processors;
    }
    return CUDA_SUCCESS;
}

/* What this rank says of itself. */
static tutti_status describe(tu_cuda_collective *collective, introduction *mine) {
    tu_cuda *cuda = collective->cuda;
    int blocks = 0;
    *mine = (introduction){ .uuid = collective->device->uuid, .pid = (int32_t)getpid() };
    tutti_status status = tu_cuda_enter(cuda, collective->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = resident_blocks(cuda, collective->device, &blocks);
    tu_cuda_leave(cuda);
    mine->blocks = blocks;
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, "asking for occupancy");
}

/* Tells the members about this rank's device and hears about theirs: how many blocks, and who shares this process. */
static tutti_status introduce(tu_cuda_collective *collective, introduction mine, room *room, int64_t deadline) {
    tu_cuda *cuda = collective->cuda;
    const introduction *all = room->introductions;
    mine.step = (uint64_t)(uintptr_t)room->step;
    tutti_status status =
        cuda->host->exchange(collective->group, "device", &mine, sizeof mine, -1, deadline, room->introductions, NULL);
    if (status != TUTTI_OK)
        return status;
    collective->blocks = TU_CUDA_BLOCKS;
    int first_here = -1, here = 0;
    /* So far. Domains of memory are in drivers from 12.0 on. */
    collective->together =
        collective->device->major >= 9 && cuda->driver.cuLaunchKernelEx != NULL && cuda->driver.version >= 12000;
    for (int i = 0; i < collective->size; i++) {
        int sharing = 1; /* itself, and the others on its device */
        for (int j = 0; j < collective->size; j++)
            sharing += j != i && memcmp(&all[i].uuid, &all[j].uuid, sizeof all[i].uuid) == 0;
        if (all[i].blocks / sharing < collective->blocks)
            collective->blocks = all[i].blocks / sharing;
        collective->near[i] = all[i].pid == mine.pid && memcmp(&all[i].uuid, &mine.uuid, sizeof mine.uuid) == 0;
        if (memcmp(&all[i].uuid, &mine.uuid, sizeof mine.uuid) != 0)
            collective->together = false;
        if (all[i].pid == mine.pid) {
            if (first_here < 0)
                first_here = i;
            here++;
        }
    }
    if (collective->blocks < 1)
        return cuda->host->error(TUTTI_ERROR_UNSUPPORTED,
                                 "too many ranks share a GPU: their kernels cannot all be resident");
    if (here > 1) {
        atomic_store_explicit(&cuda->shared_process, true, memory_order_relaxed);
        collective->step = (tu_cuda_lockstep *)(uintptr_t)all[first_here].step;
        if (first_here == collective->rank) {
            collective->step->count = (uint32_t)here;
            atomic_store_explicit(&collective->step->references, (uint32_t)here, memory_order_release);
            room->step = NULL;
        }
    }
    return TUTTI_OK;
}

/* ---- the control block ---- */

static uint64_t place(uint64_t *end, uint64_t bytes) {
    uint64_t begin = (*end + 127) & ~UINT64_C(127);
    *end = begin + bytes;
    return begin;
}

static tu_cuda_layout lay_out(int size) {
    uint64_t members = (uint64_t)size, end = 0;
    tu_cuda_layout layout = { 0 };
    layout.message_share = MESSAGE_STAGE / members / 4096 * 4096;
    if (layout.message_share < 16384)
        layout.message_share = 16384;
    layout.inbox = place(&end, TU_CUDA_BLOCKS * members * sizeof(tu_cuda_inbox));
    layout.packet_room = PACKETS / (members * members);
    if (layout.packet_room < LEAST_PACKETS)
        layout.packet_room = LEAST_PACKETS;
    layout.packets = place(&end, 2 * TU_CUDA_PACKET_STEPS * members * layout.packet_room * sizeof(tu_cuda_packet));
    layout.sent = place(&end, TU_CUDA_MESSAGE_BLOCKS * members * sizeof(tu_cuda_message));
    layout.taken = place(&end, TU_CUDA_MESSAGE_BLOCKS * members * sizeof(tu_cuda_message));
    layout.slots = place(&end, TU_CUDA_SLOTS * 2 * sizeof(int64_t));
    layout.stage = place(&end, TU_CUDA_STAGE);
    layout.scratch = place(&end, TU_CUDA_STAGE / members / 16 * 16 + 4096);
    layout.message_stage = place(&end, members * layout.message_share);
    layout.table = place(&end, TU_CUDA_TABLE * sizeof(tu_cuda_mapping));
    layout.epochs = place(&end, TU_CUDA_BLOCKS * sizeof(tu_cuda_epoch));
    layout.packet_epochs = place(&end, TU_CUDA_PACKET_BLOCKS * sizeof(tu_cuda_epoch));
    layout.counters = place(&end, 2 * TU_CUDA_MESSAGE_BLOCKS * members * sizeof(uint32_t));
    layout.vdev = place(&end, TU_CUDA_SLOTS * 2 * sizeof(int64_t));
    layout.lists = place(&end, TU_CUDA_RANKS * sizeof(tu_cuda_move_part));
    layout.bytes = end;
    return layout;
}

/* Tells the others about this rank's control block and maps theirs. */
static tutti_status share_control(tu_cuda_collective *collective, const tu_backend_ticket *ticket, room *room,
                                  int64_t deadline) {
    tu_cuda *cuda = collective->cuda;
    tutti_status status = cuda->host->exchange(collective->group, "device control", ticket->bytes, sizeof ticket->bytes,
                                               ticket->fd, deadline, room->payloads, room->fds);
    if (status != TUTTI_OK)
        return status;
    for (int i = 0; i < collective->size; i++) {
        memcpy(room->tickets[i].bytes, room->payloads[i], sizeof ticket->bytes);
        room->tickets[i].fd = room->fds[i];
    }
    return tu_cuda_import(cuda, collective->group, &collective->control, collective->rank, collective->size,
                          room->tickets, &collective->map);
}

/* The first entry of the table is the control block itself. */
static tutti_status begin_table(tu_cuda_collective *collective) {
    tu_cuda *cuda = collective->cuda;
    tu_cuda_mapping control = { collective->base, collective->stride };
    tutti_status status = tu_cuda_enter(cuda, collective->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuMemcpyHtoDAsync(collective->own + collective->layout.table, &control,
                                                     sizeof control, collective->device->stream);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuStreamSynchronize(collective->device->stream);
    tu_cuda_leave(cuda);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, "making a group's tables");
}

static tutti_status make_control(tu_cuda_collective *collective, tu_backend_ticket *ticket) {
    tu_cuda *cuda = collective->cuda;
    collective->layout = lay_out(collective->size);
    tu_backend_request request = { .bytes = collective->layout.bytes,
                                   .alignment = 128,
                                   .device_index = collective->device_index,
                                   .what = "a group's control block" };
    tutti_status status = tu_cuda_allocate(cuda, &request, &collective->control);
    if (status != TUTTI_OK)
        return status;
    status = tu_cuda_export(cuda, &collective->control, ticket);
    if (status != TUTTI_OK)
        tu_cuda_free(cuda, &collective->control);
    return status;
}

/* ---- life ---- */

static void drop_step(tu_cuda_collective *collective) {
    tu_cuda_lockstep *step = collective->step;
    if (step != NULL && atomic_fetch_sub_explicit(&step->references, 1, memory_order_acq_rel) == 1)
        free(step);
}

void tu_cuda_collective_end(void *opaque) {
    tu_cuda_collective *collective = opaque;
    drop_step(collective);
    tu_cuda_unmap(collective->cuda, &collective->map);
    tu_cuda_free(collective->cuda, &collective->control);
    free(collective->uploaded);
    free(collective->near);
    free(collective);
}

static tutti_status check_size(const tu_cuda_collective *collective) {
    if (collective->size <= TU_CUDA_RANKS)
        return TUTTI_OK;
    return collective->cuda->host->error(TUTTI_ERROR_LIMIT, "group %s has %d ranks; on GPUs a group has at most %d",
                                         collective->cuda->host->group_name(collective->group), collective->size,
                                         TU_CUDA_RANKS);
}

/* What this rank can do before it hears of the others. */
static tutti_status begin(tu_cuda_collective *collective, introduction *mine, tu_backend_ticket *ticket) {
    tu_cuda *cuda = collective->cuda;
    tutti_status status = check_size(collective);
    if (status == TUTTI_OK)
        status = tu_cuda_device_open(cuda, collective->device_index, &collective->device, &collective->device_index);
    if (status == TUTTI_OK)
        status = tu_cuda_group_get(cuda, collective->group, collective->device_index, &collective->on);
    if (status == TUTTI_OK)
        status = describe(collective, mine);
    return status == TUTTI_OK ? make_control(collective, ticket) : status;
}

/* What needs the others: all have come so far. */
static tutti_status meet(tu_cuda_collective *collective, const introduction *mine, const tu_backend_ticket *ticket,
                         room *room, int64_t deadline) {
    tutti_status status = introduce(collective, *mine, room, deadline);
    if (status == TUTTI_OK)
        status = share_control(collective, ticket, room, deadline);
    if (status != TUTTI_OK)
        return status;
    tu_cuda_map_plan(&collective->map, &collective->base, &collective->stride);
    collective->own = collective->base + (uint64_t)collective->rank * collective->stride;
    return begin_table(collective);
}

/* A rank that cannot go on tells the others so, instead of leaving them to their deadline; and nobody launches before
 * all are done with allocating, which may wait for the device. */
static tutti_status build(tu_cuda_collective *collective, room *room, int64_t deadline) {
    tu_cuda *cuda = collective->cuda;
    introduction mine;
    tu_backend_ticket ticket = { .fd = -1 };
    tutti_status own = begin(collective, &mine, &ticket);
    tutti_status status = tu_cuda_agree(cuda->host, collective->group, "device begin", deadline, own);
    if (status == TUTTI_OK)
        status = tu_cuda_agree(cuda->host, collective->group, "device ready", deadline,
                               meet(collective, &mine, &ticket, room, deadline));
    if (own == TUTTI_OK)
        tu_cuda_unexport(cuda, &collective->control, &ticket);
    if (status == TUTTI_OK)
        return TUTTI_OK;
    if (collective->map.addresses != NULL)
        tu_cuda_unmap(cuda, &collective->map);
    if (own == TUTTI_OK)
        tu_cuda_free(cuda, &collective->control);
    drop_step(collective);
    return status;
}

tutti_status tu_cuda_collective_make(void *state, tutti_group *group, int *device_index, int64_t deadline,
                                     void **made) {
    tu_cuda *cuda = state;
    tu_cuda_collective *collective = calloc(1, sizeof *collective);
    tu_cuda_mapping *uploaded = calloc(TU_CUDA_TABLE, sizeof *uploaded);
    bool *near = calloc((size_t)cuda->host->group_size(group), sizeof *near);
    room room;
    tutti_status status = make_room(cuda, cuda->host->group_size(group), &room);
    if (status == TUTTI_OK && (collective == NULL || uploaded == NULL || near == NULL))
        status = cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a group on a GPU");
    if (status != TUTTI_OK) { /* the others are told, who would wait for this rank in `build` */
        status = tu_cuda_agree(cuda->host, group, "device begin", deadline, status);
    } else {
        *collective = (tu_cuda_collective){ .cuda = cuda,
                                            .group = group,
                                            .rank = cuda->host->group_rank(group),
                                            .size = cuda->host->group_size(group),
                                            .device_index = *device_index,
                                            .uploaded = uploaded,
                                            .near = near };
        status = build(collective, &room, deadline);
    }
    free_room(&room);
    if (status != TUTTI_OK) {
        free(near);
        free(uploaded);
        free(collective);
        return status;
    }
    *device_index = collective->device_index;
    *made = collective;
    // cppcheck-suppress memleak // the collective owns both lists
    return TUTTI_OK;
}
