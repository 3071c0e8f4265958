/* SPDX-License-Identifier: Apache-2.0
 *
 * The executor of the CUDA backend: each collective becomes the arguments of a kernel, which is launched on the
 * caller's stream.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "control.h"

/* ---- places ---- */

static tutti_status tell_device(tu_cuda_collective *collective, uint32_t index, const tu_cuda_mapping *mapping) {
    tu_cuda *cuda = collective->cuda;
    CUstream stream = collective->device->stream;
    tutti_status status = tu_cuda_enter(cuda, collective->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuMemcpyHtoDAsync(
        collective->own + collective->layout.table + index * sizeof *mapping, mapping, sizeof *mapping, stream);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuStreamSynchronize(stream);
    tu_cuda_leave(cuda);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "telling the device about a block");
    collective->uploaded[index] = *mapping;
    return TUTTI_OK;
}

/* The code under which the peers find this buffer; 0 when it has to be staged. Fills the device's table on first
 * sight. */
static tutti_status code_of(tu_cuda_collective *collective, const tu_device_place *place, uint64_t *code) {
    const tu_backend_host *host = collective->cuda->host;
    *code = 0;
    if (place->map == NULL)
        return TUTTI_OK;
    if (place->index >= TU_CUDA_TABLE)
        return host->error(TUTTI_ERROR_LIMIT, "group %s: at most %d symmetric blocks can be used on a GPU at one time",
                           host->group_name(collective->group), TU_CUDA_TABLE - 1);
    tu_cuda_mapping mapping;
    tutti_status status = TUTTI_OK;
    tu_cuda_map_plan(place->map, &mapping.base, &mapping.stride);
    const tu_cuda_mapping *known = &collective->uploaded[place->index];
    if (known->base != mapping.base || known->stride != mapping.stride) { /* indices and addresses are used again */
        if (collective->capture != 0)
            return host->error(TUTTI_ERROR_STATE,
                               "a symmetric block is used for the first time with group %s while a stream captures; "
                               "call tutti_group_prepare after its rendezvous, or run the collective once before",
                               host->group_name(collective->group));
        status = tell_device(collective, place->index, &mapping);
    }
    if (status == TUTTI_OK)
        *code = TU_CUDA_CODE(place->index, place->offset);
    return status;
}

/* ---- launching ---- */

static tu_cuda_meeting meeting_of(const tu_cuda_collective *collective, const tu_device_task *task) {
    return (tu_cuda_meeting){ .control = collective->base,
                              .stride = collective->stride,
                              .inbox_offset = collective->layout.inbox,
                              .epochs = collective->own + collective->layout.epochs,
                              .packets = collective->layout.packets,
                              .packet_epochs = collective->own + collective->layout.packet_epochs,
                              .packet_room = collective->layout.packet_room,
                              .table = collective->own + collective->layout.table,
                              .timeout_ns = (uint64_t)task->timeout_ns,
                              .sequence = task->sequence,
                              .signature = task->signature,
                              .operation = task->operation,
                              .rank = collective->rank,
                              .size = collective->size,
                              .together = collective->together };
}

/* Counts this rank in and waits, bounded, until all ranks of the process have come so far. */
static tutti_status keep_step(tu_cuda_collective *collective, _Atomic uint64_t *count, int64_t deadline) {
    const tu_backend_host *host = collective->cuda->host;
    uint64_t due = collective->steps * collective->step->count;
    atomic_fetch_add_explicit(count, 1, memory_order_acq_rel);
    for (unsigned spins = 0; atomic_load_explicit(count, memory_order_acquire) < due; spins++) {
        if ((spins & 63) != 63)
            continue;
        sched_yield();
        const _Atomic uint64_t *state = host->group_state(collective->group);
        if (state != NULL && atomic_load_explicit(state, memory_order_acquire) != 0)
            return host->group_cause(collective->group);
        if (host->now() > deadline)
            return host->error(TUTTI_ERROR_TIMEOUT,
                               "group %s: another rank of this process did not come to this operation on the GPU until "
                               "the deadline; ranks that are threads launch together",
                               host->group_name(collective->group));
    }
    return TUTTI_OK;
}

/* What a kernel is launched with. The arguments begin with a tu_cuda_meeting. */
typedef struct launch {
    tu_cuda_kernel kernel;
    unsigned blocks, threads;
    void *args;
    const void *list; /* parts of members beyond TU_CUDA_LISTED, for layout.lists; NULL: none */
    size_t list_bytes;
} launch;

/* Lists that do not fit the arguments travel on the stream, before the kernel. */
static tutti_status send_list(tu_cuda_collective *collective, const launch *launch, const tu_cuda_order *order,
                              const char *name) {
    tu_cuda *cuda = collective->cuda;
    if (launch->list == NULL)
        return TUTTI_OK;
    if (order->capture != 0)
        return cuda->host->error(TUTTI_ERROR_UNSUPPORTED,
                                 "%s: with more than %d ranks its parts cannot be captured into a graph", name,
                                 TU_CUDA_LISTED);
    tutti_status status = tu_cuda_enter(cuda, collective->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuMemcpyHtoDAsync(collective->own + collective->layout.lists, launch->list,
                                                     launch->list_bytes, order->stream);
    tu_cuda_leave(cuda);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, "sending the parts of a collective");
}

static bool is_message(const tu_device_task *task) {
    return task->shape == TU_DEVICE_SEND || task->shape == TU_DEVICE_RECEIVE;
}

/* Counts a message that was launched, and goes on when its partner has launched the other side, or after
 * TU_CUDA_HOLD_NS. */
static void hold_message(tu_cuda_collective *collective, const tu_device_task *task) {
    bool is_send = task->shape == TU_DEVICE_SEND;
    size_t size = (size_t)collective->size, from = (size_t)(is_send ? collective->rank : task->root),
           to = (size_t)(is_send ? task->root : collective->rank);
    if (!collective->near[task->root])
        return;
    _Atomic uint32_t *pair = &collective->step->messages[(from * size + to) * 2], *mine = pair + !is_send;
    uint32_t number = atomic_load_explicit(mine, memory_order_relaxed) + 1;
    atomic_store_explicit(mine, number, memory_order_release); /* this rank alone writes it; pairs with tu_cuda_hold */
    /* A message that fits the stage needs only that the one before it was taken. */
    bool is_short = is_send && task->count <= collective->layout.message_share;
    tu_cuda_hold(collective->on, pair + is_send, is_short ? number - 1 : number, task->timeout_ns);
}

/* Ranks that share the process go on when the others have launched their side. The group's turn is taken, so that no
 * other thread of this rank launches meanwhile what would stand before their kernels in a queue of the hardware. */
static tutti_status await_launches(tu_cuda_collective *collective, const tu_device_task *task, int64_t deadline,
                                   tutti_status status) {
    if (collective->step == NULL || collective->capture != 0)
        return status;
    if (is_message(task)) {
        if (status == TUTTI_OK)
            hold_message(collective, task);
        return status;
    }
    if (status == TUTTI_OK)
        return keep_step(collective, &collective->step->launched, deadline);
    /* Counted in any case. But the others' launches may wait for what this rank did not launch: the group ends now. */
    atomic_fetch_add_explicit(&collective->step->launched, 1, memory_order_acq_rel);
    return status;
}

/* Kernels of ranks that are processes overlap where all are on this device: peers then hear of what the kernel in front
 * stored when this one does. Ranks that are threads wait for each other's launches on the host, and would gain nothing.
 * A kernel that two others stand in front of in a graph waits for both to end. */
static tu_cuda_manner manner_of(const tu_cuda_collective *collective, const tu_cuda_order *order) {
    if (!collective->together)
        return TU_CUDA_APART;
    return collective->step == NULL && !order->joined ? TU_CUDA_OVERLAPPING : TU_CUDA_TOGETHER;
}

static tutti_status launch_in_order(tu_cuda_collective *collective, const tu_device_task *task, const launch *launch,
                                    int64_t deadline) {
    tu_cuda_order order;
    tutti_status status = tu_cuda_order_begin(collective->on, task->stream, collective->capture, task->timeout_ns,
                                              task->operation, task->sequence, &order);
    if (status != TUTTI_OK)
        return await_launches(collective, task, deadline, status);
    ((tu_cuda_meeting *)launch->args)->group = order.words;
    status = send_list(collective, launch, &order, task->name);
    if (status == TUTTI_OK)
        status = tu_cuda_launch(collective->cuda, collective->device, launch->kernel, launch->blocks, launch->threads,
                                launch->args, task->stream, manner_of(collective, &order));
    unsigned blocks = status == TUTTI_OK ? launch->blocks : 0;
    status = await_launches(collective, task, deadline, status);
    tu_cuda_order_end(&order, blocks);
    return status;
}

static tutti_status launch_kernel(tu_cuda_collective *collective, const tu_device_task *task, const launch *launch) {
    tu_cuda_lockstep *step = collective->step;
    if (step == NULL || collective->capture != 0)
        return launch_in_order(collective, task, launch, 0);
    int64_t deadline = collective->cuda->host->now() + task->timeout_ns;
    collective->steps++;
    tutti_status status = keep_step(collective, &step->arrived, deadline);
    return status == TUTTI_OK ? launch_in_order(collective, task, launch, deadline) : status;
}

/* ---- reductions ---- */

/* Blocks for this many bytes of work per rank: enough to keep loads in flight, no more than all can hold. Depends only
 * on what is equal on all ranks. */
static unsigned blocks_for(const tu_cuda_collective *collective, uint64_t bytes) {
    uint64_t blocks = (bytes + TU_CUDA_THREADS * 16 - 1) / (TU_CUDA_THREADS * 16), most = (uint64_t)collective->blocks;
    return (unsigned)(blocks < 1 ? 1 : blocks > most ? most : blocks);
}

/* Complex numbers are reduced by their real view. */
static tutti_dtype real_type(const tu_device_task *task) {
    return task->dtype == TUTTI_C64 ? TUTTI_F32 : task->dtype == TUTTI_C128 ? TUTTI_F64 : task->dtype;
}

static tu_cuda_kernel reduce_kernel(const tu_cuda_collective *collective, const tu_device_task *task) {
    tutti_dtype dtype = real_type(task);
    int by_size = collective->size == 2 ? 0 : collective->size == 4 ? 1 : collective->size == 8 ? 2 : -1;
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

/* One-shot reads everything n times; two-shot waits for its stores. Bytes of the input up to which one-shot is quicker:
 * where the ranks share a device, they share what it reads in a time, too. Measured on an H200 with 2, 4 and 8 ranks.
 */
static uint64_t one_shot_limit(const tu_cuda_collective *collective) {
    uint64_t size = (uint64_t)collective->size;
    return collective->together ? (uint64_t)(8 << 20) / (size * size) : (uint64_t)(1 << 20) / size;
}

/* A hash of two codes, never 0. */
static uint64_t mix(uint64_t source, uint64_t target) {
    uint64_t hash =
        source * UINT64_C(0x9e3779b97f4a7c15) ^ (target + UINT64_C(0x7f4a7c15f39cc060)) * UINT64_C(0xff51afd7ed558ccd);
    hash ^= hash >> 32;
    hash *= UINT64_C(0xc4ceb9fe1a85ec53);
    hash ^= hash >> 29;
    return hash | 1;
}

/* Two elements for each complex number. */
static uint64_t elements_of(const tu_device_task *task) {
    return task->dtype == TUTTI_C64 || task->dtype == TUTTI_C128 ? 2 : 1;
}

static size_t element_bytes(const tu_device_task *task) {
    static const size_t sizes[] = { 0, 8, 4, 2, 2, 1, 1, 1, 2, 4, 8, 1, 2, 4, 8, 1, 4, 8 };
    return sizes[task->dtype];
}

/* Where staging takes place, in units that all parts have alike. */
static uint64_t stage_bytes(const tu_cuda_collective *collective) {
    uint64_t unit = 16 * (uint64_t)collective->size;
    return TU_CUDA_STAGE / unit * unit;
}

static bool is_one_shot(const tu_cuda_collective *collective, const tu_device_task *task, uint64_t bytes) {
    return task->algorithm == TUTTI_ALGORITHM_ONE_SHOT || task->algorithm == TUTTI_ALGORITHM_INLINE ||
           (task->algorithm == TUTTI_ALGORITHM_AUTO && bytes <= one_shot_limit(collective)) || task->root >= 0;
}

/* Where the buffers lie, and whether all members can compute each other's addresses from the same plan. */
static tutti_status find_places(tu_cuda_collective *collective, const tu_device_task *task, tu_cuda_reduce_args *args) {
    tutti_status status = code_of(collective, &task->in_place, &args->source);
    if (status == TUTTI_OK)
        status = code_of(collective, &task->out_place, &args->target);
    if (status != TUTTI_OK)
        return status;
    if (args->source != 0) {
        tu_cuda_map_plan(task->in_place.map, &args->source_base, &args->source_stride);
        args->source_base += task->in_place.offset;
    }
    if (args->target != 0) {
        tu_cuda_map_plan(task->out_place.map, &args->target_base, &args->target_stride);
        args->target_base += task->out_place.offset;
    }
    /* In place, what a rank writes is what others still read: but for a push, which writes only what its own slice's
     * reader wrote. */
    if (task->in == task->out && args->mode == TU_CUDA_ONE_SHOT)
        args->source = 0;
    if (args->source != 0 && (args->mode != TU_CUDA_TWO_SHOT || args->target != 0))
        args->meeting.plan = mix(args->source, args->mode == TU_CUDA_TWO_SHOT ? args->target : 1);
    return TUTTI_OK;
}

/* Where all members' copies of a place lie at one address; 0: nowhere. */
static uint64_t multicast_of(const tu_device_place *place) {
    return place->map == NULL || place->map->multicast == NULL
               ? 0
               : (uint64_t)(uintptr_t)place->map->multicast + place->offset;
}

/* The kernel of a multicast form: by the switch where the buffers have such an address, else by the processors. Types
 * and reductions that a switch does not have stay with the ordinary kernel. */
static tu_cuda_kernel multimem_kernel(const tu_device_task *task, tu_cuda_reduce_args *args, tu_cuda_kernel ordinary) {
    int type = task->dtype == TUTTI_F32 ? 0 : task->dtype == TUTTI_F16 ? 1 : task->dtype == TUTTI_BF16 ? 2 : -1;
    if (type < 0 || args->mode == TU_CUDA_SCATTER || (task->reduction != TUTTI_SUM && task->reduction != TUTTI_AVG))
        return ordinary;
    args->source_multicast = multicast_of(&task->in_place);
    args->target_multicast = multicast_of(&task->out_place);
    bool by_switch = args->source_multicast != 0 && (args->mode != TU_CUDA_TWO_SHOT || args->target_multicast != 0);
    args->meeting.together = args->meeting.together && !by_switch;
    return (tu_cuda_kernel)((by_switch ? TU_CUDA_MULTIMEM_F32_SWITCH : TU_CUDA_MULTIMEM_F32_MEMBERS) + type);
}

/* Where each rank's part of a reduce_scatter begins, in real elements. */
static void cut_parts(const tu_cuda_collective *collective, const tu_device_task *task, uint64_t *parts) {
    uint64_t size = (uint64_t)collective->size;
    for (uint64_t i = 0; i <= size; i++)
        parts[i] = (task->row != 0 ? task->count / size * i : task->parts[i]) * elements_of(task);
}

#define TOGETHER_CHUNKS 16384 /* of 8 bytes, up to which two steps of packets are quicker on one device */

/* How many steps of packets a reduction takes: 0: it is not small, or not a sum for everybody. Depends only on what is
 * equal on all ranks; where the buffers lie does not matter. */
static int packet_steps(const tu_cuda_collective *collective, const tu_device_task *task, uint64_t bytes) {
    uint64_t chunks = (bytes + 7) / 8, size = (uint64_t)collective->size, room = collective->layout.packet_room;
    bool may_once = task->algorithm != TUTTI_ALGORITHM_TWO_SHOT;
    bool may_twice = task->algorithm == TUTTI_ALGORITHM_TWO_SHOT ||
                     (task->algorithm == TUTTI_ALGORITHM_AUTO && size > 2 && /* with two it is the same traffic … */
                      !collective->together); /* … and on one device one-shot is quicker than both steps */
    if (collective->together && (chunks > TOGETHER_CHUNKS || (chunks + size - 1) / size > room / 2))
        may_twice = false; /* there a release costs little, and twice the bytes more */
    if (task->shape != TU_DEVICE_REDUCE || task->root >= 0 || task->multicast || chunks == 0 || size < 2 ||
        (task->reduction != TUTTI_SUM && task->reduction != TUTTI_AVG))
        return 0;
    return may_once && chunks <= room ? 1 : may_twice && (chunks + size - 1) / size <= room ? 2 : 0;
}

static tutti_status run_packets(tu_cuda_collective *collective, tu_device_task *task, int steps) {
    uint64_t count = task->count * elements_of(task), chunks = (count * element_bytes(task) + 7) / 8;
    uint64_t size = (uint64_t)collective->size, lanes = steps == 1 ? chunks : (chunks + size - 1) / size * (size - 1);
    uint64_t blocks = (lanes + TU_CUDA_PACKET_THREADS - 1) / TU_CUDA_PACKET_THREADS, most = TU_CUDA_PACKET_BLOCKS;
    if (most > (uint64_t)collective->blocks)
        most = (uint64_t)collective->blocks;
    tu_cuda_packet_args args = { .meeting = meeting_of(collective, task),
                                 .in = (uint64_t)(uintptr_t)task->in,
                                 .out = (uint64_t)(uintptr_t)task->out,
                                 .count = count,
                                 .reduction = task->reduction,
                                 .steps = steps };
    launch launch = { .kernel = (tu_cuda_kernel)(TU_CUDA_PACKETS_F64 + (int)real_type(task) - (int)TUTTI_F64),
                      .blocks = (unsigned)(blocks < most ? blocks : most),
                      .threads = TU_CUDA_PACKET_THREADS,
                      .args = &args };
    task->ran = steps == 1 ? TUTTI_ALGORITHM_ONE_SHOT : TUTTI_ALGORITHM_TWO_SHOT;
    return launch_kernel(collective, task, &launch);
}

static tutti_status run_reduce(tu_cuda_collective *collective, tu_device_task *task) {
    const tu_cuda_layout *layout = &collective->layout;
    uint64_t count = task->count * elements_of(task), bytes = count * element_bytes(task);
    bool scatter = task->shape == TU_DEVICE_REDUCE_SCATTER, one_shot = is_one_shot(collective, task, bytes);
    bool wanted = task->root < 0 || task->root == collective->rank;
    int steps = packet_steps(collective, task, bytes);
    if (steps != 0)
        return run_packets(collective, task, steps);
    uint64_t parts[TU_CUDA_RANKS + 1];
    tu_cuda_reduce_args args = { .meeting = meeting_of(collective, task),
                                 .in = (uint64_t)(uintptr_t)task->in,
                                 .out = wanted ? (uint64_t)(uintptr_t)task->out : 0,
                                 .stage = collective->own + layout->stage,
                                 .stage_code = TU_CUDA_CODE(0, layout->stage),
                                 .scratch = collective->own + layout->scratch,
                                 .scratch_code = TU_CUDA_CODE(0, layout->scratch),
                                 .stage_bytes = stage_bytes(collective),
                                 .count = count,
                                 .row = task->row * elements_of(task),
                                 .factor = task->factor,
                                 .reduction = task->reduction,
                                 .mode = scatter    ? TU_CUDA_SCATTER
                                         : one_shot ? TU_CUDA_ONE_SHOT
                                                    : TU_CUDA_TWO_SHOT };
    launch launch = { .kernel = reduce_kernel(collective, task), .threads = TU_CUDA_THREADS, .args = &args };
    if (scatter && task->in_place.map == NULL && task->row != 0 && count != 0)
        return collective->cuda->host->error(
            TUTTI_ERROR_ARGUMENT, "%s: an input whose last dimension is split must be symmetric memory", task->name);
    if (scatter && collective->size <= TU_CUDA_LISTED) {
        cut_parts(collective, task, args.parts);
    } else if (scatter) {
        cut_parts(collective, task, parts);
        args.more = collective->own + layout->lists;
        launch.list = parts;
        launch.list_bytes = ((size_t)collective->size + 1) * sizeof *parts;
    }
    tutti_status status = find_places(collective, task, &args);
    if (status != TUTTI_OK)
        return status;
    if (task->multicast)
        launch.kernel = multimem_kernel(task, &args, launch.kernel);
    task->ran = one_shot ? TUTTI_ALGORITHM_ONE_SHOT : TUTTI_ALGORITHM_TWO_SHOT;
    launch.blocks = blocks_for(collective, one_shot ? bytes : bytes / (uint64_t)collective->size);
    return launch_kernel(collective, task, &launch);
}

/* ---- moves ---- */

static tutti_status run_barrier(tu_cuda_collective *collective, const tu_device_task *task) {
    tu_cuda_meeting meeting = meeting_of(collective, task);
    meeting.together = false; /* of what came before it on the streams some may be for the host, or of copy engines */
    launch launch = {
        .kernel = TU_CUDA_MEET, .blocks = 1, .threads = (unsigned)(collective->size + 31) / 32 * 32, .args = &meeting
    };
    return launch_kernel(collective, task, &launch);
}

static uint64_t list_parts(const tu_cuda_collective *collective, const tu_device_task *task, tu_cuda_move_part *parts) {
    uint64_t longest = 0;
    for (int i = 0; i < collective->size; i++) {
        parts[i] = (tu_cuda_move_part){ task->send_offset[i], task->send_bytes[i], task->receive_offset[i],
                                        task->receive_bytes[i] };
        if (parts[i].send_bytes > longest)
            longest = parts[i].send_bytes;
    }
    return longest;
}

/* An all_gather in which everybody stores its part into everybody's output, which is symmetric. */
static tutti_status run_multimem_gather(tu_cuda_collective *collective, tu_device_task *task) {
    tu_cuda_gather_args args = { .meeting = meeting_of(collective, task),
                                 .in = (uint64_t)(uintptr_t)task->in + task->send_offset[0],
                                 .bytes = task->send_bytes[0],
                                 .multicast = multicast_of(&task->out_place) };
    launch launch = { .kernel = args.multicast != 0 ? TU_CUDA_MULTIMEM_GATHER_SWITCH : TU_CUDA_MULTIMEM_GATHER_MEMBERS,
                      .blocks = blocks_for(collective, task->count),
                      .threads = TU_CUDA_THREADS,
                      .args = &args };
    tutti_status status = code_of(collective, &task->out_place, &args.target);
    if (status != TUTTI_OK)
        return status;
    tu_cuda_map_plan(task->out_place.map, &args.target_base, &args.target_stride);
    args.target_base += task->out_place.offset;
    args.meeting.plan = mix(args.target, 2);
    args.meeting.together = args.meeting.together && args.multicast == 0;
    task->ran = TUTTI_ALGORITHM_PIPELINED;
    return launch_kernel(collective, task, &launch);
}

static tutti_status copy_by_engine(tu_cuda_collective *collective, uint64_t to, uint64_t from, uint64_t bytes,
                                   void *stream) {
    tutti_status status = tu_cuda_enter(collective->cuda, collective->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = collective->cuda->driver.cuMemcpyAsync(to, from, bytes, stream);
    tu_cuda_leave(collective->cuda);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(collective->cuda, result, "cuMemcpyAsync");
}

/* One chunk of an all_gather by copy engines: into the own stage, then out of everybody's, between meetings. */
static tutti_status gather_chunk(tu_cuda_collective *collective, const tu_device_task *task, uint64_t skip,
                                 uint64_t bytes) {
    uint64_t stage = collective->layout.stage, in = (uint64_t)(uintptr_t)task->in + task->send_offset[0] + skip;
    tutti_status status = run_barrier(collective, task); /* nobody pulls from the stage any more */
    if (status == TUTTI_OK)
        status = copy_by_engine(collective, collective->own + stage, in, bytes, task->stream);
    if (status == TUTTI_OK)
        status = run_barrier(collective, task);
    for (int step = 0; status == TUTTI_OK && step < collective->size; step++) {
        int peer = (collective->rank + step) % collective->size;
        uint64_t to = (uint64_t)(uintptr_t)task->out + task->receive_offset[peer] + skip;
        uint64_t from = collective->base + (uint64_t)peer * collective->stride + stage;
        status = copy_by_engine(collective, to, from, bytes, task->stream);
    }
    return status;
}

/* An all_gather that leaves the processors to others: they only meet. Through the stages, so that all ranks do the same
 * whether or not their inputs are symmetric. */
static tutti_status run_gather_by_engines(tu_cuda_collective *collective, tu_device_task *task) {
    tutti_status status = TUTTI_OK;
    for (uint64_t skip = 0; status == TUTTI_OK && skip < task->send_bytes[0]; skip += TU_CUDA_STAGE) {
        uint64_t left = task->send_bytes[0] - skip;
        status = gather_chunk(collective, task, skip, left < TU_CUDA_STAGE ? left : TU_CUDA_STAGE);
    }
    task->ran = TUTTI_ALGORITHM_PIPELINED;
    return status == TUTTI_OK ? run_barrier(collective, task) : status;
}

/* An all_gather by one copy of each rank: to the multicast address of the output, or to every member's where the
 * processors' place is taken by as many copies. The meetings carry where the output lies: it must be the same place of
 * the same block on all ranks, since nobody hands addresses over. */
static tutti_status run_gather_by_multicast(tu_cuda_collective *collective, tu_device_task *task) {
    uint64_t code, base, stride, all = multicast_of(&task->out_place), part = task->send_bytes[0];
    uint64_t in = (uint64_t)(uintptr_t)task->in + task->send_offset[0], mine = (uint64_t)collective->rank * part;
    tutti_status status = code_of(collective, &task->out_place, &code);
    if (status != TUTTI_OK)
        return status;
    tu_cuda_map_plan(task->out_place.map, &base, &stride);
    task->signature ^= (uint32_t)mix(code, 3);
    status = run_barrier(collective, task); /* nobody reads its old output any more */
    if (status == TUTTI_OK && all != 0)
        status = copy_by_engine(collective, all + mine, in, part, task->stream);
    for (int step = 0; status == TUTTI_OK && all == 0 && step < collective->size; step++) {
        uint64_t peer = (uint64_t)((collective->rank + step) % collective->size);
        status =
            copy_by_engine(collective, base + peer * stride + task->out_place.offset + mine, in, part, task->stream);
    }
    task->ran = TUTTI_ALGORITHM_PIPELINED;
    return status == TUTTI_OK ? run_barrier(collective, task) : status;
}

/* Adds up one round of a reduce_scatter: the parts of all ranks lie in this rank's stage, `share` bytes apart. */
static tutti_status fold_round(tu_cuda_collective *collective, tu_device_task *task, uint64_t skip, uint64_t bytes,
                               uint64_t share) {
    size_t element = element_bytes(task);
    tu_cuda_reduce_args args = { .meeting = meeting_of(collective, task),
                                 .out = (uint64_t)(uintptr_t)task->out + skip,
                                 .source_base = collective->own + collective->layout.stage,
                                 .source_stride = share,
                                 .count = bytes / element,
                                 .reduction = task->reduction,
                                 .mode = TU_CUDA_LOCAL };
    launch launch = { .kernel = (tu_cuda_kernel)(TU_CUDA_REDUCE_F64 + (int)real_type(task) - (int)TUTTI_F64),
                      .blocks = blocks_for(collective, bytes),
                      .threads = TU_CUDA_THREADS,
                      .args = &args };
    return launch_kernel(collective, task, &launch);
}

/* A reduce_scatter in which copy engines push every rank's parts into the stages of those who want them; the processors
 * meet, and add up what lies in their own memory, in rank order. */
static tutti_status run_scatter_by_engines(tu_cuda_collective *collective, tu_device_task *task) {
    uint64_t size = (uint64_t)collective->size, share = TU_CUDA_STAGE / size / 16 * 16,
             stage = collective->layout.stage;
    uint64_t unit = element_bytes(task) * elements_of(task), longest = 0;
    tutti_status status = TUTTI_OK;
    for (uint64_t i = 0; i < size; i++) {
        uint64_t bytes = (task->parts[i + 1] - task->parts[i]) * unit;
        longest = bytes > longest ? bytes : longest;
    }
    for (uint64_t skip = 0; status == TUTTI_OK && skip < longest; skip += share) {
        uint64_t mine = 0;
        status = run_barrier(collective, task); /* what the last round brought has been added up everywhere */
        for (uint64_t step = 0; status == TUTTI_OK && step < size; step++) {
            uint64_t peer = ((uint64_t)collective->rank + step) % size;
            uint64_t whole = (task->parts[peer + 1] - task->parts[peer]) * unit, left = whole > skip ? whole - skip : 0;
            uint64_t bytes = left < share ? left : share;
            uint64_t to = collective->base + peer * collective->stride + stage + (uint64_t)collective->rank * share;
            mine = peer == (uint64_t)collective->rank ? bytes : mine;
            if (bytes > 0)
                status = copy_by_engine(collective, to, (uint64_t)(uintptr_t)task->in + task->parts[peer] * unit + skip,
                                        bytes, task->stream);
        }
        if (status == TUTTI_OK)
            status = run_barrier(collective, task);
        if (status == TUTTI_OK && mine > 0)
            status = fold_round(collective, task, skip, mine, share);
    }
    task->ran = TUTTI_ALGORITHM_TWO_SHOT;
    return status;
}

static tutti_status run_move(tu_cuda_collective *collective, tu_device_task *task) {
    const tu_cuda_layout *layout = &collective->layout;
    tu_cuda_move_part parts[TU_CUDA_RANKS];
    tu_cuda_move_args args = { .meeting = meeting_of(collective, task),
                               .in = (uint64_t)(uintptr_t)task->in,
                               .out = (uint64_t)(uintptr_t)task->out,
                               .stage = collective->own + layout->stage,
                               .stage_code = TU_CUDA_CODE(0, layout->stage),
                               .stage_bytes = stage_bytes(collective) };
    /* Splits may differ between ranks: the number of blocks must not depend on them. */
    launch launch = {
        .kernel = TU_CUDA_MOVE, .blocks = blocks_for(collective, task->count), .threads = TU_CUDA_THREADS, .args = &args
    };
    if (collective->size <= TU_CUDA_LISTED) {
        args.longest = list_parts(collective, task, args.parts);
    } else {
        args.longest = list_parts(collective, task, parts);
        args.more = collective->own + layout->lists;
        launch.list = parts;
        launch.list_bytes = (size_t)collective->size * sizeof *parts;
    }
    tutti_status status = code_of(collective, &task->in_place, &args.source);
    if (status != TUTTI_OK)
        return status;
    if (task->in != NULL && task->in == task->out)
        args.source = 0; /* in place: what arrives would overwrite what others still pull */
    task->ran = TUTTI_ALGORITHM_PIPELINED;
    return launch_kernel(collective, task, &launch);
}

static tutti_status run_vdev(tu_cuda_collective *collective, const tu_device_task *task) {
    const tu_cuda_layout *layout = &collective->layout;
    const tu_backend_host *host = collective->cuda->host;
    tu_cuda_vdev_args args = { .meeting = meeting_of(collective, task),
                               .in = (uint64_t)(uintptr_t)task->in,
                               .out = (uint64_t)(uintptr_t)task->out,
                               .in_splits = (uint64_t)(uintptr_t)task->in_splits,
                               .out_splits = (uint64_t)(uintptr_t)task->out_splits,
                               .splits_code = TU_CUDA_CODE(0, layout->slots),
                               .scratch = collective->own + layout->vdev,
                               .row_bytes = task->row_bytes,
                               .in_rows = task->in_rows,
                               .out_rows = task->out_rows,
                               .major_align = task->major_align,
                               .experts = task->experts,
                               .form = task->form };
    if ((int64_t)collective->size * task->experts > TU_CUDA_SLOTS)
        return host->error(TUTTI_ERROR_LIMIT, "%s: %d ranks with %d experts each are more than %d parts", task->name,
                           collective->size, task->experts, TU_CUDA_SLOTS);
    tutti_status status = code_of(collective, &task->in_place, &args.source);
    if (status != TUTTI_OK)
        return status;
    if (args.source == 0 && task->in_rows > 0 && task->row_bytes > 0)
        return host->error(TUTTI_ERROR_ARGUMENT, "%s: the input must be symmetric memory", task->name);
    launch plan = { .kernel = TU_CUDA_VDEV_PLAN, .blocks = 1, .threads = TU_CUDA_THREADS, .args = &args };
    launch pull = { .kernel = TU_CUDA_VDEV_PULL,
                    .blocks = collective->blocks < 32 ? (unsigned)collective->blocks : 32,
                    .threads = TU_CUDA_THREADS,
                    .args = &args };
    status = launch_kernel(collective, task, &plan);
    return status == TUTTI_OK ? launch_kernel(collective, task, &pull) : status;
}

/* ---- tiles ---- */

/* Launches a kernel that waits for nobody: not in step with the other ranks, who may have none. `words` is part of the
 * arguments. */
static tutti_status launch_alone(tu_cuda_collective *collective, const tu_device_task *task, const launch *launch,
                                 tu_cuda_group_words *words) {
    tu_cuda_order order;
    tutti_status status = tu_cuda_order_begin(collective->on, task->stream, collective->capture, task->timeout_ns,
                                              task->operation, task->sequence, &order);
    if (status != TUTTI_OK)
        return status;
    *words = order.words;
    status = tu_cuda_launch(collective->cuda, collective->device, launch->kernel, launch->blocks, launch->threads,
                            launch->args, task->stream, TU_CUDA_APART);
    tu_cuda_order_end(&order, status == TUTTI_OK ? launch->blocks : 0);
    return status;
}

/* One tile, reduced over all members: member r's input lies at base + r * stride. */
static tutti_status reduce_tile(tu_cuda_collective *collective, const tu_device_task *task, const tu_device_tile *tile,
                                uint64_t base, uint64_t stride) {
    uint64_t times = elements_of(task), element = task->element_bytes / times;
    tu_cuda_reduce_args args = { .meeting = meeting_of(collective, task),
                                 .out = (uint64_t)(uintptr_t)tile->out,
                                 .source_base = base + tile->in_offset,
                                 .source_stride = stride,
                                 .count = tile->rows * tile->columns * times,
                                 .row = tile->columns * times,
                                 .in_pitch = tile->in_pitch / element,
                                 .out_pitch = tile->out_pitch / element,
                                 .reduction = task->reduction,
                                 .mode = TU_CUDA_LOCAL };
    launch launch = { .kernel = (tu_cuda_kernel)(TU_CUDA_REDUCE_F64 + (int)real_type(task) - (int)TUTTI_F64),
                      .blocks = blocks_for(collective, args.count * element),
                      .threads = TU_CUDA_THREADS,
                      .args = &args };
    launch.kernel = multimem_kernel(task, &args, launch.kernel);
    if (args.source_multicast != 0)
        args.source_multicast += tile->in_offset;
    return launch_alone(collective, task, &launch, &args.meeting.group);
}

static tutti_status copy_tiles(tu_cuda_collective *collective, const tu_device_task *task, uint64_t base,
                               uint64_t stride) {
    tutti_status status = TUTTI_OK;
    for (size_t first = 0; status == TUTTI_OK && first < task->tile_count; first += TU_CUDA_TILES) {
        size_t left = task->tile_count - first;
        tu_cuda_tiles_args args = { .timeout_ns = (uint64_t)task->timeout_ns,
                                    .count = left < TU_CUDA_TILES ? left : TU_CUDA_TILES };
        uint64_t bytes = 0;
        for (uint64_t i = 0; i < args.count; i++) {
            tu_device_tile tile;
            task->tile(task, first + i, &tile);
            args.tiles[i] = (tu_cuda_tile){ .to = (uint64_t)(uintptr_t)tile.out,
                                            .from = base + (uint64_t)tile.source * stride + tile.in_offset,
                                            .rows = tile.rows,
                                            .bytes = tile.columns * task->element_bytes,
                                            .to_pitch = tile.out_pitch,
                                            .from_pitch = tile.in_pitch };
            bytes += tile.rows * args.tiles[i].bytes;
        }
        launch launch = { .kernel = TU_CUDA_TILE_COPIES,
                          .blocks = blocks_for(collective, bytes),
                          .threads = TU_CUDA_THREADS,
                          .args = &args };
        status = launch_alone(collective, task, &launch, &args.group);
    }
    return status;
}

/* All meet; each takes what it wants, where it lies; all meet. Ranks that get nothing only meet. */
static tutti_status run_tiles(tu_cuda_collective *collective, tu_device_task *task) {
    uint64_t base, stride;
    if (task->in_place.map == NULL)
        return collective->cuda->host->error(TUTTI_ERROR_ARGUMENT, "%s: the input must be symmetric memory",
                                             task->name);
    tu_cuda_map_plan(task->in_place.map, &base, &stride);
    base += task->in_place.offset;
    tutti_status status = run_barrier(collective, task);
    if (status == TUTTI_OK && task->reduction == 0)
        status = copy_tiles(collective, task, base, stride);
    for (size_t i = 0; status == TUTTI_OK && task->reduction != 0 && i < task->tile_count; i++) {
        tu_device_tile tile;
        task->tile(task, i, &tile);
        status = reduce_tile(collective, task, &tile, base, stride);
    }
    task->ran = TUTTI_ALGORITHM_ONE_SHOT;
    return status == TUTTI_OK ? run_barrier(collective, task) : status;
}

/* ---- in place ---- */

static tutti_status copy_alone(tu_cuda_collective *collective, const tu_device_task *task, uint64_t to, uint64_t from,
                               uint64_t bytes) {
    tu_cuda_tiles_args args = { .timeout_ns = (uint64_t)task->timeout_ns, .count = 1 };
    args.tiles[0] = (tu_cuda_tile){ .to = to, .from = from, .rows = 1, .bytes = bytes };
    launch launch = { .kernel = TU_CUDA_TILE_COPIES,
                      .blocks = blocks_for(collective, bytes),
                      .threads = TU_CUDA_THREADS,
                      .args = &args };
    return launch_alone(collective, task, &launch, &args.group);
}

/* A reduce_scatter. A result that lies in a part of another rank's, or in columns of others, waits until all have read.
 */
static tutti_status run_scatter(tu_cuda_collective *collective, tu_device_task *task) {
    uint64_t unit = element_bytes(task) * elements_of(task), size = (uint64_t)collective->size, aside;
    uint64_t first = task->row != 0 ? 0 : task->parts[collective->rank] * unit;
    uint64_t bytes = task->row != 0 ? task->count / size * unit
                                    : (task->parts[collective->rank + 1] - task->parts[collective->rank]) * unit;
    bool by_engines = /* factors are handed over by meetings alone */
        task->copy_engines && task->row == 0 && task->reduction != TUTTI_PREMUL_SUM;
    bool waits = tu_cuda_overlaps(task->in, task->count * unit, task->out, bytes) &&
                 (task->row != 0 || (const char *)task->in + first != (const char *)task->out);
    void *out = task->out;
    tutti_status status = TUTTI_OK;
    if (waits) {
        status = tu_cuda_aside_get(collective->on, bytes, collective->capture, task->name, &aside);
        if (status != TUTTI_OK)
            return status;
        task->out = (void *)(uintptr_t)aside;
        task->out_place = (tu_device_place){ .map = NULL };
    }
    status = by_engines ? run_scatter_by_engines(collective, task) : run_reduce(collective, task);
    return waits && status == TUTTI_OK ? copy_alone(collective, task, (uint64_t)(uintptr_t)out, aside, bytes) : status;
}

/* An input that is overwritten is sent from a copy. */
static tutti_status keep_input(tu_cuda_collective *collective, tu_device_task *task) {
    uint64_t bytes = tu_cuda_overwritten(task, collective->size), aside;
    if (bytes == 0)
        return TUTTI_OK;
    tutti_status status = tu_cuda_aside_get(collective->on, bytes, collective->capture, task->name, &aside);
    if (status == TUTTI_OK)
        status = copy_alone(collective, task, aside, (uint64_t)(uintptr_t)task->in, bytes);
    task->in = (const void *)(uintptr_t)aside;
    task->in_place = (tu_device_place){ .map = NULL };
    return status;
}

static tutti_status run_any_move(tu_cuda_collective *collective, tu_device_task *task) {
    tutti_status status = keep_input(collective, task);
    if (status != TUTTI_OK)
        return status;
    if (task->multicast && task->out_place.map != NULL)
        return task->copy_engines ? run_gather_by_multicast(collective, task) : run_multimem_gather(collective, task);
    return task->copy_engines ? run_gather_by_engines(collective, task) : run_move(collective, task);
}

/* Not in step with the other ranks of the process: only two of them take part. */
static tutti_status run_message(tu_cuda_collective *collective, const tu_device_task *task) {
    const tu_cuda_layout *layout = &collective->layout;
    bool is_send = task->shape == TU_DEVICE_SEND;
    unsigned blocks =
        collective->blocks < TU_CUDA_MESSAGE_BLOCKS ? (unsigned)collective->blocks : TU_CUDA_MESSAGE_BLOCKS;
    tu_cuda_message_args args = { .meeting = meeting_of(collective, task),
                                  .buffer = (uint64_t)(uintptr_t)(is_send ? task->in : task->out),
                                  .bytes = task->count,
                                  .sent_offset = layout->sent,
                                  .taken_offset = layout->taken,
                                  .counters = collective->own + layout->counters,
                                  .stage_offset = layout->message_stage,
                                  .share = layout->message_share,
                                  .block_bytes = task->block_bytes,
                                  .stride_bytes = task->stride_bytes,
                                  .peer = task->root,
                                  .tag = task->tag,
                                  .is_send = is_send };
    launch launch = { .kernel = TU_CUDA_MESSAGE, .blocks = blocks, .threads = TU_CUDA_THREADS, .args = &args };
    return launch_in_order(collective, task, &launch, 0);
}

/* ---- the executor ---- */

static tutti_status add_block(void *opaque, const tu_device_place *place) {
    tu_cuda_collective *collective = opaque;
    uint64_t code;
    tutti_status status =
        tu_cuda_turn_take(collective->cuda, &collective->turn, collective->cuda->host->timeout(collective->group, 0));
    if (status != TUTTI_OK)
        return status;
    collective->capture = 0;
    status = code_of(collective, place, &code);
    tu_cuda_turn_give(&collective->turn);
    return status;
}

static tutti_status run_shape(tu_cuda_collective *collective, tu_device_task *task) {
    switch (task->shape) {
    case TU_DEVICE_BARRIER:
        return run_barrier(collective, task);
    case TU_DEVICE_REDUCE:
        return run_reduce(collective, task);
    case TU_DEVICE_REDUCE_SCATTER:
        return run_scatter(collective, task);
    case TU_DEVICE_MOVE:
        return run_any_move(collective, task);
    case TU_DEVICE_VDEV:
        return run_vdev(collective, task);
    case TU_DEVICE_TILES:
        return run_tiles(collective, task);
    case TU_DEVICE_SEND:
    case TU_DEVICE_RECEIVE:
        return run_message(collective, task);
    }
    return collective->cuda->host->error(TUTTI_ERROR_UNSUPPORTED, "%s does not run on a GPU", task->name);
}

/* Members of a block that are not mapped here, as another backend may have them, cannot be reached by address: it
 * counts as any other memory. */
static void forget_unmapped(tu_device_place *place) {
    uint64_t base = 1, stride;
    if (place->map != NULL)
        tu_cuda_map_plan(place->map, &base, &stride);
    if (base == 0)
        place->map = NULL;
}

static tutti_status run(void *opaque, tu_device_task *task) {
    tu_cuda_collective *collective = opaque;
    forget_unmapped(&task->in_place);
    forget_unmapped(&task->out_place);
    tutti_status status = tu_cuda_group_check(collective->on);
    if (status != TUTTI_OK)
        return status;
    tu_cuda_watch(collective->cuda); /* before anything waits: a launch does, too, when a queue of the driver is full */
    status = tu_cuda_turn_take(collective->cuda, &collective->turn, task->timeout_ns);
    if (status != TUTTI_OK)
        return status;
    collective->capture = tu_cuda_capture(collective->cuda, task->stream);
    status = run_shape(collective, task);
    tu_cuda_turn_give(&collective->turn);
    return status;
}

static bool serves(void *state, const tutti_group *group, const tu_device_task *task) {
    (void)state;
    (void)group;
    (void)task;
    return true; /* messages too */
}

static tutti_status check(void *opaque) {
    tu_cuda_collective *collective = opaque;
    return tu_cuda_group_check(collective->on);
}

const tu_device_executor tu_cuda_executor = {
    .size = sizeof(tu_device_executor),
    .version = TU_BACKEND_VERSION,
    .prepare = tu_cuda_collective_make,
    .end = tu_cuda_collective_end,
    .run = run,
    .add_block = add_block,
    .serves = serves,
    .check = check,
    .strided = true,
};
