/* SPDX-License-Identifier: Apache-2.0
 *
 * A group's side on a device: its control block, its staging, and the launch of every collective.
 *
 * HOW MANY THREAD BLOCKS. Kernels that wait for each other must all be resident at once, also when several ranks share
 * a GPU: each rank gets its share of what the GPU can hold. The least share of all members counts, since block b of a
 * rank meets block b of every other.
 *
 * RANKS THAT ARE THREADS launch in lockstep: nobody enqueues its next collective before all have enqueued this one.
 * Streams share hardware queues; without that, one rank's second kernel could stand before another's first, for which
 * the first one waits.
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

#define THREADS 512
#define STAGE_BYTES ((uint64_t)16 << 20)
#define VDEV_SLOTS 1024

typedef struct lockstep {
    _Atomic uint64_t launched; /* by all threads together */
    _Atomic uint32_t references;
    uint32_t count;
} lockstep;

typedef struct team {
    tu_cuda *cuda;
    tutti_group *group;
    int rank, size;
    int device_index;
    tu_cuda_device *device;
    tu_cuda_fate *fate;
    tu_backend_block control;
    tu_backend_map map;
    uint64_t base, stride; /* of the control blocks */
    uint64_t inbox_offset, vdev_offset, stage_offset, scratch_offset;
    CUdeviceptr table, epochs;        /* private device memory: one allocation */
    uint32_t known;                   /* entries of the table that are filled; 1 for the control block itself */
    uint64_t uploaded[TU_CUDA_TABLE]; /* base of each entry, 0 none */
    int blocks;                       /* that every member can hold resident */
    lockstep *step;                   /* with the other ranks of this process; NULL: none */
    uint64_t launches;
    int64_t timeout_ns; /* of the call that is launching; 0: it is captured, not launched */
    pthread_mutex_t lock;
} team;

/* ---- making a team ---- */

typedef struct introduction {
    CUuuid uuid;
    int32_t pid, blocks;
    uint64_t step; /* address of this rank's lockstep, for ranks of the same process */
} introduction;

/* How many thread blocks of the hungriest kernel the device holds at once. */
static CUresult resident_blocks(tu_cuda *cuda, tu_cuda_device *device, int *blocks) {
    *blocks = 1 << 20;
    for (int i = 0; i < TU_CUDA_KERNEL_COUNT; i++) {
        int per_processor;
        CUresult result =
            cuda->driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, device->kernels[i], THREADS, 0);
        if (result != CUDA_SUCCESS)
            return result;
        if (per_processor * device->processors < *blocks)
            *blocks = per_processor * device->processors;
    }
    return CUDA_SUCCESS;
}

/* Tells the members about this rank's device and hears about theirs: how many blocks, and who shares this process. */
static tutti_status introduce(team *t, int64_t deadline) {
    tu_cuda *cuda = t->cuda;
    introduction mine = { .uuid = t->device->uuid, .pid = (int32_t)getpid() }, *all = NULL;
    lockstep *own = calloc(1, sizeof *own);
    tutti_status status = tu_cuda_enter(cuda, t->device);
    if (status == TUTTI_OK) {
        int blocks;
        CUresult result = resident_blocks(cuda, t->device, &blocks);
        mine.blocks = blocks;
        tu_cuda_leave(cuda);
        if (result != CUDA_SUCCESS)
            status = tu_cuda_error(cuda, result, "asking for occupancy");
    }
    if (status == TUTTI_OK && (own == NULL || (all = calloc((size_t)t->size, sizeof *all)) == NULL))
        status = cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a group on GPU %d", t->device_index);
    if (status != TUTTI_OK)
        goto free_own;
    mine.step = (uint64_t)(uintptr_t)own;
    status = cuda->host->exchange(t->group, "device", &mine, sizeof mine, -1, deadline, all, NULL);
    if (status != TUTTI_OK)
        goto free_own;
    t->blocks = TU_CUDA_BLOCKS;
    int first_here = -1, here = 0;
    for (int i = 0; i < t->size; i++) {
        int sharing = 1; /* itself, and the others on its device */
        for (int j = 0; j < t->size; j++)
            sharing += j != i && memcmp(&all[i].uuid, &all[j].uuid, sizeof all[i].uuid) == 0;
        if (all[i].blocks / sharing < t->blocks)
            t->blocks = all[i].blocks / sharing;
        if (all[i].pid == mine.pid) {
            if (first_here < 0)
                first_here = i;
            here++;
        }
    }
    if (t->blocks < 1) {
        status = cuda->host->error(TUTTI_ERROR_UNSUPPORTED,
                                   "too many ranks share a GPU: their kernels cannot all be resident");
        goto free_own;
    }
    if (here > 1) {
        atomic_store_explicit(&cuda->shared_process, true, memory_order_relaxed);
        t->step = (lockstep *)(uintptr_t)all[first_here].step;
        if (first_here == t->rank) {
            t->step->count = (uint32_t)here;
            atomic_store_explicit(&t->step->references, (uint32_t)here, memory_order_release);
            own = NULL;
        }
    }
free_own:
    free(all);
    free(own);
    return status;
}

static tutti_status make_control(team *t, int64_t deadline) {
    tu_cuda *cuda = t->cuda;
    uint64_t inbox = (uint64_t)TU_CUDA_BLOCKS * (uint64_t)t->size * sizeof(tu_cuda_inbox);
    uint64_t scratch = STAGE_BYTES / (uint64_t)t->size / 16 * 16 + 4096;
    t->inbox_offset = 0;
    t->vdev_offset = (inbox + 127) & ~UINT64_C(127);
    t->stage_offset = (t->vdev_offset + VDEV_SLOTS * 16 + 127) & ~UINT64_C(127);
    t->scratch_offset = t->stage_offset + STAGE_BYTES;
    tu_backend_request request = { .bytes = t->scratch_offset + scratch,
                                   .alignment = 128,
                                   .device_index = t->device_index,
                                   .what = "a group's control block" };
    tu_backend_ticket ticket = { .fd = -1 }, *tickets = calloc((size_t)t->size, sizeof *tickets);
    unsigned char *payloads = malloc((size_t)t->size * sizeof ticket.bytes);
    int *fds = malloc((size_t)t->size * sizeof *fds);
    tutti_status status = TUTTI_OK;
    if (tickets == NULL || payloads == NULL || fds == NULL)
        status = cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a group on GPU %d", t->device_index);
    if (status == TUTTI_OK)
        status = tu_cuda_allocate(cuda, &request, &t->control);
    if (status != TUTTI_OK)
        goto free_tickets;
    status = tu_cuda_export(cuda, &t->control, &ticket);
    if (status != TUTTI_OK)
        goto free_control;
    status = cuda->host->exchange(t->group, "device control", ticket.bytes, sizeof ticket.bytes, ticket.fd, deadline,
                                  payloads, fds);
    if (status == TUTTI_OK) {
        for (int i = 0; i < t->size; i++) {
            memcpy(tickets[i].bytes, payloads + (size_t)i * sizeof ticket.bytes, sizeof ticket.bytes);
            tickets[i].fd = fds[i];
        }
        status = tu_cuda_import(cuda, t->group, &t->control, t->rank, t->size, tickets, &t->map);
    }
    tu_cuda_unexport(cuda, &t->control, &ticket);
    if (status == TUTTI_OK) {
        tu_cuda_map_plan(&t->map, &t->base, &t->stride);
        goto free_tickets;
    }
free_control:
    tu_cuda_free(cuda, &t->control);
free_tickets:
    free(fds);
    free(payloads);
    free(tickets);
    return status;
}

/* Table of mapped blocks and the epochs, private to this rank. */
static tutti_status make_private(team *t) {
    tu_cuda *cuda = t->cuda;
    tu_cuda_mapping control = { t->base, t->stride };
    size_t bytes = TU_CUDA_TABLE * sizeof(tu_cuda_mapping) + TU_CUDA_BLOCKS * sizeof(uint32_t);
    tutti_status status = tu_cuda_enter(cuda, t->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuMemAlloc(&t->table, bytes);
    if (result == CUDA_SUCCESS) {
        t->epochs = t->table + TU_CUDA_TABLE * sizeof(tu_cuda_mapping);
        result = cuda->driver.cuMemsetD8Async(t->table, 0, bytes, t->device->stream);
    }
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuMemcpyHtoDAsync(t->table, &control, sizeof control, t->device->stream);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuStreamSynchronize(t->device->stream);
    if (result != CUDA_SUCCESS) {
        status = tu_cuda_error(cuda, result, "making a group's tables");
        if (t->table != 0)
            cuda->driver.cuMemFree(t->table);
    }
    tu_cuda_leave(cuda);
    return status;
}

static tutti_status ready(team *t, int64_t deadline) {
    unsigned char mine = 1, all[TU_CUDA_RANKS];
    return t->cuda->host->exchange(t->group, "device ready", &mine, 1, -1, deadline, all, NULL);
}

static void end_team(void *opaque) {
    team *t = opaque;
    tu_cuda *cuda = t->cuda;
    if (t->step != NULL && atomic_fetch_sub_explicit(&t->step->references, 1, memory_order_acq_rel) == 1)
        free(t->step);
    tu_cuda_unmap(cuda, &t->map);
    tu_cuda_free(cuda, &t->control);
    if (tu_cuda_enter(cuda, t->device) == TUTTI_OK) {
        cuda->driver.cuMemFree(t->table);
        tu_cuda_leave(cuda);
    }
    pthread_mutex_destroy(&t->lock);
    free(t);
}

static tutti_status prepare(void *state, tutti_group *group, int *device_index, int64_t deadline, void **out) {
    tu_cuda *cuda = state;
    team *t = calloc(1, sizeof *t);
    if (t == NULL)
        return cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a group on a GPU");
    *t = (team){
        .cuda = cuda, .group = group, .rank = cuda->host->group_rank(group), .size = cuda->host->group_size(group)
    };
    tutti_status status = TUTTI_OK;
    if (t->size > TU_CUDA_RANKS)
        status = cuda->host->error(TUTTI_ERROR_UNSUPPORTED, "group %s has %d ranks; on GPUs a group has at most %d",
                                   cuda->host->group_name(group), t->size, TU_CUDA_RANKS);
    if (status == TUTTI_OK)
        status = tu_cuda_device_open(cuda, *device_index, &t->device, &t->device_index);
    if (status == TUTTI_OK)
        status = tu_cuda_fate_get(cuda, group, t->device_index, &t->fate);
    if (status == TUTTI_OK)
        status = introduce(t, deadline);
    if (status != TUTTI_OK)
        goto free_team;
    status = make_control(t, deadline);
    if (status != TUTTI_OK)
        goto free_team;
    status = make_private(t);
    if (status != TUTTI_OK)
        goto unmap_control;
    /* Nobody launches before all are done with allocating, which waits for the device. */
    status = ready(t, deadline);
    if (status != TUTTI_OK)
        goto free_table;
    pthread_mutex_init(&t->lock, NULL);
    *device_index = t->device_index;
    *out = t;
    return TUTTI_OK;

free_table:
    if (tu_cuda_enter(cuda, t->device) == TUTTI_OK) {
        cuda->driver.cuMemFree(t->table);
        tu_cuda_leave(cuda);
    }
unmap_control:
    tu_cuda_unmap(cuda, &t->map);
    tu_cuda_free(cuda, &t->control);
free_team:
    if (t->step != NULL && atomic_fetch_sub_explicit(&t->step->references, 1, memory_order_acq_rel) == 1)
        free(t->step);
    free(t);
    return status;
}

/* ---- running ---- */

/* The code under which the peers find this buffer; 0 when it has to be staged. Fills the device's table on first
 * sight. */
static tutti_status code_of(team *t, const tu_device_place *place, void *stream, uint64_t *code) {
    *code = 0;
    if (place->map == NULL || place->index >= TU_CUDA_TABLE)
        return TUTTI_OK;
    tu_cuda_mapping mapping;
    tu_cuda_map_plan(place->map, &mapping.base, &mapping.stride);
    if (t->uploaded[place->index] != mapping.base) {
        if (tu_cuda_streams.capturing(t->cuda, stream))
            return t->cuda->host->error(
                TUTTI_ERROR_STATE,
                "a symmetric block is used for the first time with group %s while a stream captures; "
                "call tutti_group_prepare after its rendezvous, or run the collective once before",
                t->cuda->host->group_name(t->group));
        CUresult result = t->cuda->driver.cuMemcpyHtoDAsync(t->table + place->index * sizeof mapping, &mapping,
                                                            sizeof mapping, t->device->stream);
        if (result == CUDA_SUCCESS)
            result = t->cuda->driver.cuStreamSynchronize(t->device->stream);
        if (result != CUDA_SUCCESS)
            return tu_cuda_error(t->cuda, result, "telling the device about a block");
        t->uploaded[place->index] = mapping.base;
    }
    *code = TU_CUDA_CODE(place->index, place->offset);
    return TUTTI_OK;
}

static tu_cuda_meeting meeting_of(const team *t, const tu_device_task *task) {
    return (tu_cuda_meeting){ .control = t->base,
                              .stride = t->stride,
                              .inbox_offset = t->inbox_offset,
                              .epochs = t->epochs,
                              .fault = t->fate->fault,
                              .host_fault = t->fate->host_address,
                              .table = t->table,
                              .timeout_ns = (uint64_t)task->timeout_ns,
                              .sequence = task->sequence,
                              .signature = task->signature,
                              .operation = task->operation,
                              .rank = t->rank,
                              .size = t->size };
}

/* Waits, bounded, until every rank of this process is about to launch the same step. Whatever makes the driver wait for
 * the device has been done by then, on all of them. */
static tutti_status await_lockstep(team *t, int64_t timeout_ns) {
    int64_t deadline = t->cuda->host->now() + timeout_ns;
    uint64_t due = (t->launches + 1) * t->step->count;
    atomic_fetch_add_explicit(&t->step->launched, 1, memory_order_release);
    for (unsigned spins = 0; atomic_load_explicit(&t->step->launched, memory_order_acquire) < due; spins++) {
        if ((spins & 63) != 63)
            continue;
        sched_yield();
        const _Atomic uint64_t *state = t->cuda->host->group_state(t->group);
        if (state != NULL && atomic_load_explicit(state, memory_order_acquire) != 0)
            return t->cuda->host->group_cause(t->group);
        if (t->cuda->host->now() > deadline)
            return t->cuda->host->error(TUTTI_ERROR_TIMEOUT,
                                        "group %s: another rank of this process did not make its previous call on the "
                                        "GPU until the deadline; ranks "
                                        "that are threads launch in lockstep",
                                        t->cuda->host->group_name(t->group));
    }
    t->launches++;
    return TUTTI_OK;
}

static tutti_status launch(team *t, tu_cuda_kernel kernel, int blocks, int threads, void *args, void *stream) {
    void *parameters[] = { args };
    tutti_status status = t->step != NULL && t->timeout_ns != 0 ? await_lockstep(t, t->timeout_ns) : TUTTI_OK;
    if (status != TUTTI_OK)
        return status;
    CUresult result = t->cuda->driver.cuLaunchKernel(t->device->kernels[kernel], (unsigned)blocks, 1, 1,
                                                     (unsigned)threads, 1, 1, 0, stream, parameters, NULL);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(t->cuda, result, tu_cuda_kernel_name(kernel));
}

/* Blocks for this many bytes of work per rank: enough to keep loads in flight, no more than all can hold. Depends only
 * on what is equal on all ranks. */
static int blocks_for(const team *t, uint64_t bytes) {
    uint64_t blocks = (bytes + THREADS * 16 - 1) / (THREADS * 16);
    return blocks < 1 ? 1 : blocks > (uint64_t)t->blocks ? t->blocks : (int)blocks;
}

static tu_cuda_kernel reduce_kernel(const team *t, const tu_device_task *task) {
    tutti_dtype dtype = task->dtype == TUTTI_C64 ? TUTTI_F32 : task->dtype == TUTTI_C128 ? TUTTI_F64 : task->dtype;
    int by_size = t->size == 2 ? 0 : t->size == 4 ? 1 : t->size == 8 ? 2 : -1;
    if (by_size >= 0 && (task->reduction == TUTTI_SUM || task->reduction == TUTTI_AVG)) {
        if (dtype == TUTTI_F32)
            return (tu_cuda_kernel)(TU_CUDA_REDUCE_F32_2 + by_size);
        if (dtype == TUTTI_F16)
            return (tu_cuda_kernel)(TU_CUDA_REDUCE_F16_2 + by_size);
        if (dtype == TUTTI_BF16)
            return (tu_cuda_kernel)(TU_CUDA_REDUCE_BF16_2 + by_size);
    }
    return (tu_cuda_kernel)(TU_CUDA_REDUCE_F64 + (int)dtype -
                            (int)TUTTI_F64); /* both lists are in the order of tutti_dtype */
}

/* One-shot reads everything n times; two-shot meets once more. Bytes of the input up to which one-shot is quicker. */
static uint64_t one_shot_limit(const team *t) {
    return (uint64_t)(1 << 20) / (uint64_t)t->size;
}

/* A hash of two codes, never 0. */
static uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t h = a * UINT64_C(0x9e3779b97f4a7c15) ^ (b + UINT64_C(0x7f4a7c15f39cc060)) * UINT64_C(0xff51afd7ed558ccd);
    h ^= h >> 32;
    h *= UINT64_C(0xc4ceb9fe1a85ec53);
    h ^= h >> 29;
    return h | 1;
}

static tutti_status run_reduce(team *t, tu_device_task *task) {
    static const size_t sizes[] = { 0, 8, 4, 2, 2, 1, 1, 1, 2, 4, 8, 1, 2, 4, 8, 1, 4, 8 };
    uint64_t count = task->count;
    if (task->dtype == TUTTI_C64 || task->dtype == TUTTI_C128)
        count *= 2; /* by its real view */
    uint64_t bytes = count * sizes[task->dtype];
    bool scatter = task->shape == TU_DEVICE_REDUCE_SCATTER;
    bool one_shot = task->algorithm == TUTTI_ALGORITHM_ONE_SHOT || task->algorithm == TUTTI_ALGORITHM_INLINE ||
                    (task->algorithm == TUTTI_ALGORITHM_AUTO && bytes <= one_shot_limit(t)) || task->root >= 0;
    bool wanted = task->root < 0 || task->root == t->rank;
    tu_cuda_reduce_args args = { .meeting = meeting_of(t, task),
                                 .in = (uint64_t)(uintptr_t)task->in,
                                 .out = wanted ? (uint64_t)(uintptr_t)task->out : 0,
                                 .stage = t->base + (uint64_t)t->rank * t->stride + t->stage_offset,
                                 .stage_code = TU_CUDA_CODE(0, t->stage_offset),
                                 .scratch = t->base + (uint64_t)t->rank * t->stride + t->scratch_offset,
                                 .scratch_code = TU_CUDA_CODE(0, t->scratch_offset),
                                 .stage_bytes = STAGE_BYTES / (16 * (uint64_t)t->size) * 16 * (uint64_t)t->size,
                                 .count = count,
                                 .row = task->row,
                                 .factor = task->factor,
                                 .reduction = task->reduction,
                                 .mode = scatter    ? TU_CUDA_SCATTER
                                         : one_shot ? TU_CUDA_ONE_SHOT
                                                    : TU_CUDA_TWO_SHOT };
    for (int i = 0; scatter && i <= t->size; i++)
        args.parts[i] = (task->row != 0 ? task->count / (uint64_t)t->size * (uint64_t)i : task->parts[i]) *
                        (count / (task->count ? task->count : 1));
    task->ran = one_shot ? TUTTI_ALGORITHM_ONE_SHOT : TUTTI_ALGORITHM_TWO_SHOT;
    tutti_status status = code_of(t, &task->in_place, task->stream, &args.source);
    if (status == TUTTI_OK)
        status = code_of(t, &task->out_place, task->stream, &args.target);
    if (status != TUTTI_OK)
        return status;
    if (args.source != 0) {
        tu_cuda_map_plan(task->in_place.map, &args.source_base, &args.source_stride);
        args.source_base += task->in_place.offset;
    }
    if (args.target != 0) {
        tu_cuda_map_plan(task->out_place.map, &args.target_base, &args.target_stride);
        args.target_base += task->out_place.offset;
    }
    /* In place, what a rank writes is what others still read: but for a push, which writes only what its own slice's
     * reader wrote. */
    if (task->in == task->out && args.mode == TU_CUDA_ONE_SHOT)
        args.source = 0;
    if (args.source != 0 && (args.mode != TU_CUDA_TWO_SHOT || args.target != 0))
        args.meeting.plan = mix(args.source, args.mode == TU_CUDA_TWO_SHOT ? args.target : 1);
    if (scatter && task->in_place.map == NULL && task->row != 0)
        return t->cuda->host->error(TUTTI_ERROR_ARGUMENT,
                                    "%s: an input whose last dimension is split must be symmetric memory", task->name);
    uint64_t work = one_shot ? bytes : bytes / (uint64_t)t->size;
    return launch(t, reduce_kernel(t, task), blocks_for(t, work), THREADS, &args, task->stream);
}

static tutti_status run_move(team *t, tu_device_task *task) {
    tu_cuda_move_args args = { .meeting = meeting_of(t, task),
                               .in = (uint64_t)(uintptr_t)task->in,
                               .out = (uint64_t)(uintptr_t)task->out,
                               .stage = t->base + (uint64_t)t->rank * t->stride + t->stage_offset,
                               .stage_code = TU_CUDA_CODE(0, t->stage_offset),
                               .stage_bytes = STAGE_BYTES / (16 * (uint64_t)t->size) * 16 * (uint64_t)t->size };
    for (int i = 0; i < t->size; i++) {
        args.send_offset[i] = task->send_offset[i];
        args.send_bytes[i] = task->send_bytes[i];
        args.receive_offset[i] = task->receive_offset[i];
        args.receive_bytes[i] = task->receive_bytes[i];
        if (args.send_bytes[i] > args.longest)
            args.longest = args.send_bytes[i];
    }
    tutti_status status = code_of(t, &task->in_place, task->stream, &args.source);
    if (status != TUTTI_OK)
        return status;
    if (task->in != NULL && task->in == task->out)
        args.source = 0; /* in place: what arrives would overwrite what others still pull */
    task->ran = TUTTI_ALGORITHM_PIPELINED;
    /* Splits may differ between ranks: the number of blocks must not depend on them. */
    return launch(t, TU_CUDA_MOVE, blocks_for(t, task->count), THREADS, &args, task->stream);
}

static tutti_status run_vdev(team *t, const tu_device_task *task) {
    tu_cuda_vdev_args args = { .meeting = meeting_of(t, task),
                               .in = (uint64_t)(uintptr_t)task->in,
                               .out = (uint64_t)(uintptr_t)task->out,
                               .in_splits = (uint64_t)(uintptr_t)task->in_splits,
                               .out_splits = (uint64_t)(uintptr_t)task->out_splits,
                               .splits_code = TU_CUDA_CODE(0, t->vdev_offset),
                               .row_bytes = task->row_bytes,
                               .in_rows = task->in_rows,
                               .out_rows = task->out_rows,
                               .major_align = task->major_align,
                               .experts = task->experts,
                               .form = task->form };
    if (t->size * task->experts > VDEV_SLOTS)
        return t->cuda->host->error(TUTTI_ERROR_UNSUPPORTED, "%s: %d ranks with %d experts each are more than %d parts",
                                    task->name, t->size, task->experts, VDEV_SLOTS);
    tutti_status status = code_of(t, &task->in_place, task->stream, &args.source);
    if (status != TUTTI_OK)
        return status;
    if (args.source == 0)
        return t->cuda->host->error(TUTTI_ERROR_ARGUMENT, "%s: the input must be symmetric memory", task->name);
    status = launch(t, TU_CUDA_VDEV_PLAN, 1, THREADS, &args, task->stream);
    if (status == TUTTI_OK)
        status = launch(t, TU_CUDA_VDEV_PULL, t->blocks < 32 ? t->blocks : 32, THREADS, &args, task->stream);
    return status;
}

static tutti_status know(void *opaque, const tu_device_place *place) {
    team *t = opaque;
    uint64_t code;
    pthread_mutex_lock(&t->lock);
    tutti_status status = tu_cuda_enter(t->cuda, t->device);
    if (status == TUTTI_OK) {
        status = code_of(t, place, NULL, &code);
        tu_cuda_leave(t->cuda);
    }
    pthread_mutex_unlock(&t->lock);
    return status;
}

static tutti_status run(void *opaque, tu_device_task *task) {
    team *t = opaque;
    tutti_status status = tu_cuda_check(t->cuda, t->group);
    if (status != TUTTI_OK)
        return status;
    bool captured = tu_cuda_streams.capturing(t->cuda, task->stream);
    pthread_mutex_lock(&t->lock); /* two host threads launch one after the other, so that epochs and lockstep agree */
    t->timeout_ns = captured ? 0 : task->timeout_ns;
    status = tu_cuda_enter(t->cuda, t->device);
    if (status == TUTTI_OK) {
        tu_cuda_meeting meeting = meeting_of(t, task);
        switch (task->shape) {
        case TU_DEVICE_BARRIER:
            status = launch(t, TU_CUDA_MEET, 1, t->size > 32 ? 64 : 32, &meeting, task->stream);
            break;
        case TU_DEVICE_REDUCE:
        case TU_DEVICE_REDUCE_SCATTER:
            status = run_reduce(t, task);
            break;
        case TU_DEVICE_MOVE:
            status = run_move(t, task);
            break;
        case TU_DEVICE_VDEV:
            status = run_vdev(t, task);
            break;
        }
        tu_cuda_leave(t->cuda);
    }
    pthread_mutex_unlock(&t->lock);
    if (status == TUTTI_OK)
        tu_cuda_watch(t->cuda);
    return status;
}

const tu_device_executor tu_cuda_executor = {
    .size = sizeof(tu_device_executor),
    .version = TU_BACKEND_VERSION,
    .prepare = prepare,
    .end = end_team,
    .run = run,
    .know = know,
};
