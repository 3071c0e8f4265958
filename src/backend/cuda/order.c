/* SPDX-License-Identifier: Apache-2.0
 *
 * The order of a group's kernels. They share words (epochs, inboxes, signals), so one may begin only when the one
 * before it has ended, also when they are on different streams.
 *
 * Eager kernels: each thread block counts its end in device memory. A launch on another stream than the last one is
 * preceded by a tiny kernel that waits until everything launched so far has ended: the earlier operation alone, not
 * later work on that stream. While one stream is used this costs nothing.
 *
 * Captured kernels cannot be counted, since a graph runs any number of times. In a capture an event behind each of them
 * becomes an edge of the graph. What was captured and what is launched eagerly are not ordered: a graph that never runs
 * must not hold anybody up, and one that runs is ordered by the stream that it runs on.
 *
 * A stream is known by its handle. A program may give a stream back and get another with the same handle while the
 * first still works: each kernel knows its place in the order, and waits for it (device.cuh, await_order).
 *
 * Budget of a launch, besides cuLaunchKernel: no lock, and one question that the driver answers from its own tables,
 * whether the stream captures; none for the legacy default stream, which cannot. The context is not asked for: where it
 * is not the current one the driver refuses the launch, and only then it is pushed.
 */
#include <sched.h>

#include "cuda.h"

/* A kernel of ranks that are together on the device. With `overlaps` it may come onto the device before the one in
 * front of it on the stream has ended, and waits there for that end (device.cuh, await_order). Whatever the stream
 * says, it is in the domain in which the device orders memory for all of them. */
static CUresult launch_together(tu_cuda *cuda, CUfunction function, unsigned blocks, unsigned threads,
                                void **parameters, CUstream stream, bool overlaps) {
    CUlaunchAttribute attributes[] = {
        { .id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value.number = overlaps },
        { .id = CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, .value.number = CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT },
        { .id = CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, .value.domains = { 0, 1 } }
    };
    CUlaunchConfig config = { .grid_x = blocks,
                              .grid_y = 1,
                              .grid_z = 1,
                              .block_x = threads,
                              .block_y = 1,
                              .block_z = 1,
                              .stream = stream,
                              .attributes = attributes,
                              .attribute_count = sizeof attributes / sizeof attributes[0] };
    return cuda->driver.cuLaunchKernelEx(&config, function, parameters, NULL);
}

static CUresult launch_once(tu_cuda *cuda, tu_cuda_device *device, tu_cuda_kernel kernel, unsigned blocks,
                            unsigned threads, void *args, CUstream stream, tu_cuda_manner manner) {
    void *parameters[] = { args };
    CUfunction function = device->kernels[kernel];
    if (manner == TU_CUDA_APART)
        return cuda->driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, NULL);
    return launch_together(cuda, function, blocks, threads, parameters, stream, manner == TU_CUDA_OVERLAPPING);
}

tutti_status tu_cuda_launch(tu_cuda *cuda, tu_cuda_device *device, tu_cuda_kernel kernel, unsigned blocks,
                            unsigned threads, void *args, CUstream stream, tu_cuda_manner manner) {
    CUresult result = launch_once(cuda, device, kernel, blocks, threads, args, stream, manner);
    if (__builtin_expect(result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_INVALID_HANDLE, 0)) {
        tutti_status status = tu_cuda_enter(cuda, device);
        if (status != TUTTI_OK)
            return status;
        result = launch_once(cuda, device, kernel, blocks, threads, args, stream, manner);
        tu_cuda_leave(cuda);
    }
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, tu_cuda_kernel_name(kernel));
}

static tutti_status follow(tu_cuda_order *order, int64_t timeout_ns, uint32_t operation, uint64_t sequence) {
    tu_cuda_group *group = order->group;
    tu_cuda_follow_args args = { .group = order->words,
                                 .ended = atomic_load_explicit(&group->launched, memory_order_relaxed),
                                 .timeout_ns = (uint64_t)timeout_ns,
                                 .sequence = sequence,
                                 .operation = operation,
                                 .rank = group->cuda->host->group_rank(group->group) };
    return tu_cuda_launch(group->cuda, group->device, TU_CUDA_FOLLOW, 1, 1, &args, order->stream, TU_CUDA_APART);
}

static tutti_status join_capture(tu_cuda_order *order) {
    tu_cuda_group *group = order->group;
    CUresult result = group->cuda->driver.cuStreamWaitEvent(order->stream, group->captured, 0);
    order->joined = true;
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(group->cuda, result, "ordering two captured streams");
}

/* An event behind a captured kernel, which other streams of the capture wait for. */
static void mark_capture(tu_cuda_order *order) {
    tu_cuda_group *group = order->group;
    tu_cuda *cuda = group->cuda;
    CUresult result = cuda->driver.cuEventRecord(group->captured, order->stream);
    if (result != CUDA_SUCCESS)
        cuda->host->log(cuda->world, TUTTI_LOG_WARN, "cuda",
                        "no event behind a captured operation (CUDA error %d): other streams of this capture are "
                        "not ordered after it",
                        result);
    group->capture = result == CUDA_SUCCESS ? order->capture : 0;
    group->captured_stream = order->stream;
}

tutti_status tu_cuda_order_begin(tu_cuda_group *group, CUstream stream, uint64_t capture, int64_t timeout_ns,
                                 uint32_t operation, uint64_t sequence, tu_cuda_order *order) {
    tutti_status status = tu_cuda_turn_take(group->cuda, &group->turn, timeout_ns);
    if (status != TUTTI_OK)
        return status;
    if (capture != 0) { /* a refused launch would break the capture: the context must be the right one before */
        status = tu_cuda_enter(group->cuda, group->device);
        if (status != TUTTI_OK) {
            tu_cuda_turn_give(&group->turn);
            return status;
        }
    }
    uint64_t launched = atomic_load_explicit(&group->launched, memory_order_relaxed);
    *order = (tu_cuda_order){
        .group = group,
        .stream = stream,
        .capture = capture,
        .words = { .words = group->words, .report = group->report, .place = capture == 0 ? launched + 1 : 0 }
    };
    if (capture == 0 && launched > 0 && group->last_stream != stream)
        status = follow(order, timeout_ns, operation, sequence);
    if (capture != 0 && group->capture == capture && group->captured_stream != stream)
        status = join_capture(order);
    if (status != TUTTI_OK)
        tu_cuda_order_end(order, 0);
    return status;
}

void tu_cuda_order_end(tu_cuda_order *order, unsigned blocks) {
    tu_cuda_group *group = order->group;
    if (blocks > 0 && order->capture == 0) {
        atomic_fetch_add_explicit(&group->launched, blocks, memory_order_relaxed);
        group->last_stream = order->stream;
    } else if (blocks > 0) {
        mark_capture(order);
    }
    if (order->capture != 0)
        tu_cuda_leave(group->cuda);
    tu_cuda_turn_give(&group->turn);
}

/* ---- ranks that share a process ---- */

bool tu_cuda_hold(tu_cuda_group *group, const _Atomic uint32_t *count, uint32_t due, int64_t timeout_ns) {
    const tu_backend_host *host = group->cuda->host;
    const _Atomic uint64_t *state = host->group_state(group->group);
    int64_t until = host->now() + (timeout_ns < TU_CUDA_HOLD_NS ? timeout_ns : TU_CUDA_HOLD_NS);
    for (unsigned spins = 0; (int32_t)(atomic_load_explicit(count, memory_order_acquire) - due) < 0; spins++) {
        if ((spins & 63) != 63)
            continue;
        sched_yield();
        if (host->now() > until || (state != NULL && atomic_load_explicit(state, memory_order_acquire) != 0))
            return false;
    }
    return true;
}

/* ---- what this rank copies in its streams, where other ranks share the context ---- */

void tu_cuda_note_use(tu_cuda *cuda, tu_cuda_device *device, CUstream stream) {
    if (!atomic_load_explicit(&cuda->shared_process, memory_order_relaxed))
        return; /* then waiting for the context is enough */
    uint64_t id = tu_cuda_stream_id(cuda, stream);
    pthread_mutex_lock(&device->use_lock);
    tu_cuda_use *use = NULL;
    for (int i = 0; use == NULL && i < TU_CUDA_USERS; i++) {
        if (device->uses[i].stream == id || device->uses[i].stream == 0)
            use = &device->uses[i];
    }
    if (use == NULL) { /* many streams: the oldest use is waited for now rather than forgotten */
        use = &device->uses[device->next_use++ % TU_CUDA_USERS];
        cuda->driver.cuEventSynchronize(use->event);
    }
    if (use->event == NULL && cuda->driver.cuEventCreate(&use->event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        use->event = NULL;
    bool noted = use->event != NULL && cuda->driver.cuEventRecord(use->event, stream) == CUDA_SUCCESS;
    if (noted)
        use->stream = id;
    pthread_mutex_unlock(&device->use_lock);
    if (!noted) /* nothing will tell when the copy has ended: now it has */
        cuda->driver.cuStreamSynchronize(stream);
}

void tu_cuda_await_uses(tu_cuda *cuda, tu_cuda_device *device) {
    for (int i = 0; i < TU_CUDA_USERS; i++) {
        pthread_mutex_lock(&device->use_lock);
        CUevent event = device->uses[i].stream != 0 ? device->uses[i].event : NULL;
        pthread_mutex_unlock(&device->use_lock);
        if (event != NULL)
            cuda->driver.cuEventSynchronize(event); /* its kernels have deadlines of their own */
    }
    tu_cuda_await_kernels(cuda, device);
}
