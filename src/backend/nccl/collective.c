/* SPDX-License-Identifier: Apache-2.0
 *
 * The executor of the NCCL backend: each collective becomes calls of NCCL on the caller's stream, between two marks
 * that tell the watcher when the stream is in it. All ranks have met on the host before and make the same call.
 *
 * NCCL adds in an order of its own: the promise of the same bits does not hold here, and tutti_group_ran says who ran.
 */
#include <stdlib.h>
#include <string.h>

#include "base/float16.h"
#include "nccl.h"

/* ---- types ---- */

/* How NCCL computes a dtype: as `type`, with `times` of them for each element. */
typedef struct arithmetic {
    ncclDataType_t type;
    unsigned times, bytes; /* bytes of one */
    bool boolean;
} arithmetic;

static const struct {
    tutti_dtype dtype;
    arithmetic arithmetic;
} arithmetics[] = {
    { TUTTI_F64, { ncclFloat64, 1, 8, false } },
    { TUTTI_F32, { ncclFloat32, 1, 4, false } },
    { TUTTI_F16, { ncclFloat16, 1, 2, false } },
    { TUTTI_BF16, { ncclBfloat16, 1, 2, false } },
    { TUTTI_F8_E4M3, { ncclFloat8e4m3, 1, 1, false } },
    { TUTTI_F8_E5M2, { ncclFloat8e5m2, 1, 1, false } },
    { TUTTI_I8, { ncclInt8, 1, 1, false } },
    { TUTTI_I32, { ncclInt32, 1, 4, false } },
    { TUTTI_I64, { ncclInt64, 1, 8, false } },
    { TUTTI_U8, { ncclUint8, 1, 1, false } },
    { TUTTI_U32, { ncclUint32, 1, 4, false } },
    { TUTTI_U64, { ncclUint64, 1, 8, false } },
    { TUTTI_BOOL, { ncclUint8, 1, 1, true } },
    { TUTTI_C64, { ncclFloat32, 2, 4, false } },
    { TUTTI_C128, { ncclFloat64, 2, 8, false } },
};

/* NCCL has no 16-bit integers. */
static bool find_type(tutti_dtype dtype, arithmetic *found) {
    for (size_t i = 0; i < sizeof arithmetics / sizeof *arithmetics; i++) {
        if (arithmetics[i].dtype != dtype)
            continue;
        *found = arithmetics[i].arithmetic;
        return true;
    }
    return false;
}

/* Whether NCCL has the reduction of such elements, and which it is. Of premul_sum the operator is made for each call.
 */
static bool find_reduction(const arithmetic *arithmetic, tutti_reduction reduction, ncclRedOp_t *op) {
    bool complex = arithmetic->times > 1;
    switch (reduction) {
    case TUTTI_SUM:
        *op = arithmetic->boolean ? ncclMax : ncclSum; /* a sum of booleans is their or */
        return true;
    case TUTTI_PRODUCT:
        *op = arithmetic->boolean ? ncclMin : ncclProd;
        return !complex;
    case TUTTI_MAX:
    case TUTTI_MIN:
        *op = reduction == TUTTI_MAX ? ncclMax : ncclMin;
        return !complex;
    case TUTTI_BOR:
    case TUTTI_BAND:
        *op = reduction == TUTTI_BOR ? ncclMax : ncclMin;
        return arithmetic->boolean;
    case TUTTI_AVG:
        *op = ncclAvg; /* of integers it truncates, as Tutti's does */
        return !arithmetic->boolean;
    case TUTTI_PREMUL_SUM:
        *op = ncclSum;
        return arithmetic->type >= ncclFloat16; /* floats; behind them are no others */
    default:
        return false;
    }
}

static bool serves_reduction(const tu_device_task *task) {
    arithmetic arithmetic;
    ncclRedOp_t op;
    return task->row == 0 && find_type(task->dtype, &arithmetic) && find_reduction(&arithmetic, task->reduction, &op);
}

static bool serves(void *state, const tutti_group *group, const tu_device_task *task) {
    (void)state;
    (void)group;
    if (task->algorithm != TUTTI_ALGORITHM_AUTO || task->multicast || task->copy_engines)
        return false; /* these ask for a way of Tutti's own */
    switch (task->shape) {
    case TU_DEVICE_BARRIER:
    case TU_DEVICE_MOVE:
        return true;
    case TU_DEVICE_REDUCE:
    case TU_DEVICE_REDUCE_SCATTER:
        return serves_reduction(task);
    default:
        return false;
    }
}

/* ---- memory of our own ---- */

/* Memory that is not used any more, unless a graph still writes to it. */
static tutti_status retire_scratch(tu_nccl_group *on) {
    tu_cuda *cuda = &on->nccl->cuda;
    if (on->scratch == 0)
        return TUTTI_OK;
    if (!on->scratch_captured) {
        cuda->driver.cuMemFree(on->scratch); /* waits for the device */
        return TUTTI_OK;
    }
    tu_nccl_spent *spent = malloc(sizeof *spent);
    if (spent == NULL)
        return cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a group of NCCL");
    *spent = (tu_nccl_spent){ .memory = on->scratch, .next = on->spent };
    on->spent = spent;
    on->scratch_captured = false;
    return TUTTI_OK;
}

/* Grows; never while a stream captures, since the driver would refuse. */
static tutti_status get_scratch(tu_nccl_group *on, size_t bytes, bool capturing, const char *name) {
    tu_cuda *cuda = &on->nccl->cuda;
    on->scratch_captured = on->scratch_captured || (capturing && bytes > 0 && bytes <= on->scratch_bytes);
    if (bytes <= on->scratch_bytes)
        return TUTTI_OK;
    if (capturing)
        return cuda->host->error(TUTTI_ERROR_STATE,
                                 "%s in place by NCCL needs memory for a copy of its input, and a stream is capturing: "
                                 "run it once before, or use two buffers",
                                 name);
    size_t rounded = (bytes + TU_NCCL_SCRATCH - 1) / TU_NCCL_SCRATCH * TU_NCCL_SCRATCH;
    CUdeviceptr made = 0;
    CUresult result = cuda->driver.cuMemAlloc(&made, rounded);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "cuMemAlloc");
    tutti_status status = retire_scratch(on);
    if (status != TUTTI_OK) {
        cuda->driver.cuMemFree(made);
        return status;
    }
    on->scratch = made;
    on->scratch_bytes = rounded;
    return TUTTI_OK;
}

/* ---- calls of NCCL ---- */

/* One call at work. */
typedef struct call {
    tu_nccl_group *on;
    tu_device_task *task;
    const tu_nccl_library *nccl;
    ncclComm_t comm;
    bool capturing;
    ncclResult_t result;
    tutti_status status; /* of what is not NCCL's */
} call;

static void call_barrier(call *call) {
    void *word = (void *)(uintptr_t)call->on->scratch;
    call->result = call->nccl->ncclAllReduce(word, word, 1, ncclInt32, ncclSum, call->comm, call->task->stream);
}

/* A factor in the arithmetic of the elements, which NCCL reads before it returns. */
static ncclResult_t make_operator(const call *call, const arithmetic *arithmetic, ncclRedOp_t *op) {
    union {
        double wide;
        float single;
        uint16_t half;
        uint8_t byte;
    } scalar = { .wide = call->task->factor };
    float single = (float)call->task->factor; /* it was an element of the type: nothing is rounded twice */
    switch (arithmetic->type) {
    case ncclFloat32:
        scalar.single = single;
        break;
    case ncclFloat16:
        scalar.half = tu_f32_to_f16(single);
        break;
    case ncclBfloat16:
        scalar.half = tu_f32_to_bf16(single);
        break;
    case ncclFloat8e4m3:
        scalar.byte = tu_f32_to_e4m3(single);
        break;
    case ncclFloat8e5m2:
        scalar.byte = tu_f32_to_e5m2(single);
        break;
    default:
        break;
    }
    return call->nccl->ncclRedOpCreatePreMulSum(op, &scalar, arithmetic->type, ncclScalarHostImmediate, call->comm);
}

/* Whether a call of a group was taken. */
static bool is_taken(ncclResult_t result) {
    return result == ncclSuccess || result == ncclInProgress;
}

/* reduce_scatter of unequal parts: a reduction for each part, all as one. */
static ncclResult_t scatter_parts(const call *call, const arithmetic *arithmetic, ncclRedOp_t op) {
    const tu_device_task *task = call->task;
    const unsigned char *in = task->in;
    ncclResult_t result = call->nccl->ncclGroupStart();
    if (result != ncclSuccess)
        return result;
    for (int root = 0; root < call->on->size && is_taken(result); root++) {
        uint64_t first = task->parts[root] * arithmetic->times, end = task->parts[root + 1] * arithmetic->times;
        if (end > first)
            result = call->nccl->ncclReduce(in + first * arithmetic->bytes, task->out, end - first, arithmetic->type,
                                            op, root, call->comm, task->stream);
    }
    ncclResult_t ended = call->nccl->ncclGroupEnd();
    return is_taken(result) ? ended : result;
}

static bool equal_parts(const tu_device_task *task, int size) {
    for (int i = 1; i < size; i++)
        if (task->parts[i + 1] - task->parts[i] != task->parts[1] - task->parts[0])
            return false;
    return true;
}

static void call_reduction(call *call) {
    const tu_device_task *task = call->task;
    arithmetic arithmetic;
    ncclRedOp_t op;
    if (!find_type(task->dtype, &arithmetic) || !find_reduction(&arithmetic, task->reduction, &op)) {
        call->status =
            call->on->nccl->cuda.host->error(TUTTI_ERROR_UNSUPPORTED, "%s: NCCL has no such reduction", task->name);
        return;
    }
    bool made = task->reduction == TUTTI_PREMUL_SUM;
    size_t count = task->count * arithmetic.times;
    call->result = made ? make_operator(call, &arithmetic, &op) : ncclSuccess;
    if (call->result != ncclSuccess)
        return;
    if (task->shape == TU_DEVICE_REDUCE_SCATTER && equal_parts(task, call->on->size))
        call->result = call->nccl->ncclReduceScatter(task->in, task->out, count / (size_t)call->on->size,
                                                     arithmetic.type, op, call->comm, task->stream);
    else if (task->shape == TU_DEVICE_REDUCE_SCATTER)
        call->result = scatter_parts(call, &arithmetic, op);
    else if (task->root >= 0)
        call->result = call->nccl->ncclReduce(task->in, task->out, count, arithmetic.type, op, task->root, call->comm,
                                              task->stream);
    else
        call->result =
            call->nccl->ncclAllReduce(task->in, task->out, count, arithmetic.type, op, call->comm, task->stream);
    if (made)
        (void)call->nccl->ncclRedOpDestroy(op, call->comm);
}

static bool is_broadcast(const tu_device_task *task) {
    return strcmp(task->name, "broadcast") == 0;
}

/* How much of the input would be overwritten while others still get it. */
static size_t staged_bytes(const tu_device_task *task, int size) {
    uint64_t end = 0;
    if (task->in == NULL || task->in != task->out || is_broadcast(task))
        return 0;
    for (int i = 0; i < size; i++)
        if (task->send_bytes[i] > 0 && task->send_offset[i] + task->send_bytes[i] > end)
            end = task->send_offset[i] + task->send_bytes[i];
    return end;
}

/* What an operation needs, before anything of it is in the stream: one that is refused leaves nothing behind. */
static tutti_status make_room(const call *call) {
    const tu_device_task *task = call->task;
    size_t bytes = task->shape == TU_DEVICE_BARRIER ? 1
                   : task->shape == TU_DEVICE_MOVE  ? staged_bytes(task, call->on->size)
                                                    : 0;
    return get_scratch(call->on, bytes, call->capturing, task->name);
}

static const unsigned char *stage_input(call *call) {
    const tu_device_task *task = call->task;
    tu_cuda *cuda = &call->on->nccl->cuda;
    size_t bytes = staged_bytes(task, call->on->size);
    if (bytes == 0)
        return task->in;
    CUresult result =
        cuda->driver.cuMemcpyAsync(call->on->scratch, (CUdeviceptr)(uintptr_t)task->in, bytes, task->stream);
    if (result != CUDA_SUCCESS)
        call->status = tu_cuda_error(cuda, result, "copying the input");
    return (const unsigned char *)(uintptr_t)call->on->scratch;
}

static void keep_own(call *call, const unsigned char *in) {
    const tu_device_task *task = call->task;
    tu_cuda *cuda = &call->on->nccl->cuda;
    int rank = call->on->rank;
    CUdeviceptr to = (CUdeviceptr)(uintptr_t)task->out + task->receive_offset[rank],
                from = (CUdeviceptr)(uintptr_t)in + task->send_offset[rank];
    if (task->send_bytes[rank] == 0 || to == from)
        return;
    CUresult result = cuda->driver.cuMemcpyAsync(to, from, task->send_bytes[rank], task->stream);
    if (result != CUDA_SUCCESS)
        call->status = tu_cuda_error(cuda, result, "copying this rank's own part");
}

/* Everything that only moves data: sends and receives, all as one. */
static void call_move(call *call) {
    const tu_device_task *task = call->task;
    const unsigned char *in = stage_input(call);
    if (call->status == TUTTI_OK)
        keep_own(call, in);
    if (call->status != TUTTI_OK)
        return;
    ncclResult_t result = call->nccl->ncclGroupStart();
    if (result != ncclSuccess) {
        call->result = result;
        return;
    }
    for (int step = 1; step < call->on->size && is_taken(result); step++) {
        int to = (call->on->rank + step) % call->on->size,
            from = (call->on->rank + call->on->size - step) % call->on->size;
        if (task->send_bytes[to] > 0)
            result = call->nccl->ncclSend(in + task->send_offset[to], task->send_bytes[to], ncclUint8, to, call->comm,
                                          task->stream);
        if (task->receive_bytes[from] > 0 && is_taken(result))
            result = call->nccl->ncclRecv((unsigned char *)task->out + task->receive_offset[from],
                                          task->receive_bytes[from], ncclUint8, from, call->comm, task->stream);
    }
    ncclResult_t ended = call->nccl->ncclGroupEnd();
    call->result = is_taken(result) ? ended : result;
}

/* Who gives, in a broadcast. */
static int broadcast_root(const call *call) {
    int root = 0;
    while (root < call->on->size - 1 && call->task->receive_bytes[root] == 0)
        root++;
    return root;
}

/* The two collectives of this kind that NCCL has quicker ways for. */
static bool call_known_move(call *call) {
    const tu_device_task *task = call->task;
    int rank = call->on->rank;
    if (strcmp(task->name, "all_gather") == 0 && task->in != task->out) {
        call->result =
            call->nccl->ncclAllGather(task->in, task->out, task->send_bytes[rank], ncclUint8, call->comm, task->stream);
        return true;
    }
    if (!is_broadcast(task))
        return false;
    int root = broadcast_root(call);
    const void *in = rank == root ? task->in : task->out; /* where nothing is given it is not looked at */
    call->result =
        call->nccl->ncclBroadcast(in, task->out, task->receive_bytes[root], ncclUint8, root, call->comm, task->stream);
    return true;
}

static void call_shape(call *call) {
    switch (call->task->shape) {
    case TU_DEVICE_BARRIER:
        call_barrier(call);
        return;
    case TU_DEVICE_REDUCE:
    case TU_DEVICE_REDUCE_SCATTER:
        call_reduction(call);
        return;
    default:
        if (!call_known_move(call))
            call_move(call);
    }
}

/* ---- in the stream ---- */

/* `which` is a member of tu_nccl_passed. */
static tutti_status mark(const call *call, size_t which) {
    tu_nccl_group *on = call->on;
    CUstream stream = call->task->stream;
    size_t passed = call->capturing ? offsetof(tu_nccl_marks, graphs) : offsetof(tu_nccl_marks, eager);
    tu_cuda_mark_args args = { .word = on->marks_here + passed + which };
    return tu_cuda_launch(&on->nccl->cuda, on->device, TU_CUDA_MARK, 1, 1, &args, stream, TU_CUDA_APART);
}

/* Operations of a communicator come one after the other, whichever streams they are on. */
static CUresult follow_last(tu_nccl_group *on, CUstream stream, bool capturing) {
    if (!on->last_recorded || capturing || on->last_stream == stream)
        return CUDA_SUCCESS;
    return on->nccl->cuda.driver.cuStreamWaitEvent(stream, on->last_event, 0);
}

static CUresult note_last(tu_nccl_group *on, CUstream stream, bool capturing) {
    if (capturing)
        return CUDA_SUCCESS;
    on->last_stream = stream;
    on->last_recorded = true;
    return on->nccl->cuda.driver.cuEventRecord(on->last_event, stream);
}

/* So that the watcher can tell what the stream is in. */
static void say(tu_nccl_group *on, const tu_device_task *task) {
    uint64_t number = ++on->number;
    on->said[number % TU_NCCL_REMEMBERED] = (tu_nccl_said){
        .number = number, .sequence = task->sequence, .operation = task->operation, .timeout_ns = task->timeout_ns
    };
}

/* Calls of NCCL, and the mark behind them. */
static tutti_status call_and_mark(call *call, int64_t deadline) {
    tu_nccl_group *on = call->on;
    CUresult result;
    tu_nccl_go_inside(on, deadline);
    call_shape(call);
    call->result = tu_nccl_come_out(on, call->result);
    tutti_status status = call->status;
    if (status == TUTTI_OK)
        status = tu_nccl_settle(on, call->result, deadline, call->task->name);
    if (status == TUTTI_OK)
        status = mark(call, offsetof(tu_nccl_passed, ended));
    if (status == TUTTI_OK && (result = note_last(on, call->task->stream, call->capturing)) != CUDA_SUCCESS)
        status = tu_cuda_error(&on->nccl->cuda, result, "cuEventRecord");
    return status;
}

/* The context is entered and the lock held. All ranks are in this call: whoever fails in it, for whatever reason, ends
 * the group, since the others wait for it on their GPUs. */
static tutti_status enqueue(tu_nccl_group *on, tu_device_task *task) {
    tu_cuda *cuda = &on->nccl->cuda;
    call call = { .on = on,
                  .task = task,
                  .nccl = &on->nccl->library,
                  .comm = on->comm,
                  .capturing = tu_cuda_capture(cuda, task->stream) != 0 };
    int64_t deadline = cuda->host->now() + task->timeout_ns;
    tutti_status status = make_room(&call);
    if (status != TUTTI_OK)
        return status;
    CUresult result = follow_last(on, task->stream, call.capturing);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "cuStreamWaitEvent");
    if (!call.capturing)
        say(on, task);
    status = mark(&call, offsetof(tu_nccl_passed, begun));
    if (status == TUTTI_OK)
        status = call_and_mark(&call, deadline);
    if (status != TUTTI_OK) {
        cuda->host->group_end(on->group);
        tu_nccl_abort(on);
    }
    return status;
}

static tutti_status check_group(tu_nccl_group *on) {
    const tu_backend_host *host = on->nccl->cuda.host;
    const _Atomic uint64_t *state = host->group_state(on->group);
    return state != NULL && atomic_load_explicit(state, memory_order_acquire) != 0 ? host->group_cause(on->group)
                                                                                   : TUTTI_OK;
}

static tutti_status run(void *prepared, tu_device_task *task) {
    tu_nccl_group *on = prepared;
    tu_cuda *cuda = &on->nccl->cuda;
    tutti_status status = check_group(on);
    if (status != TUTTI_OK)
        return status;
    task->ran = TUTTI_ALGORITHM_AUTO;
    pthread_mutex_lock(&on->lock);
    if (on->comm == NULL)
        status = cuda->host->error(TUTTI_ERROR_ABORTED, "the NCCL communicator of group %s has been aborted", on->name);
    else
        status = tu_cuda_enter(cuda, on->device);
    if (status == TUTTI_OK) {
        status = enqueue(on, task);
        tu_cuda_leave(cuda);
    }
    pthread_mutex_unlock(&on->lock);
    return status;
}

static tutti_status prepare(void *state, tutti_group *group, int *device_index, int64_t deadline, void **prepared) {
    tu_nccl_group *on;
    tutti_status status = tu_nccl_group_get(state, group, *device_index, deadline, &on);
    if (status != TUTTI_OK)
        return status;
    *device_index = on->device_index;
    *prepared = on;
    return TUTTI_OK;
}

static void end(void *prepared) {
    (void)prepared; /* it lives as long as the group: tu_nccl_forget */
}

static tutti_status add_block(void *prepared, const tu_device_place *place) {
    (void)prepared;
    (void)place; /* NCCL finds registered memory by its address */
    return TUTTI_OK;
}

static tutti_status check(void *prepared) {
    return check_group(prepared);
}

tutti_status tu_nccl_check(void *state, tutti_group *group) {
    tu_nccl_group *on = tu_nccl_group_find(state, group);
    return on == NULL ? TUTTI_OK : check_group(on);
}

const tu_device_executor tu_nccl_executor = {
    .size = sizeof(tu_device_executor),
    .version = TU_BACKEND_VERSION,
    .prepare = prepare,
    .end = end,
    .run = run,
    .add_block = add_block,
    .serves = serves,
    .check = check,
    .meets = true,
    .own_order = true,
};
