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
 * Budget of a launch, besides cuLaunchKernel: three questions that the driver answers from its own tables (is the
 * device current, does the stream capture, what is the stream's id), and two locks that only another thread of this
 * rank holds which launches on the same group at that moment: their kernels need an order. Where ranks share the
 * process there is an event behind each launch as well, for tu_cuda_await_uses.
 */
#include "cuda.h"

tutti_status tu_cuda_launch(tu_cuda *cuda, tu_cuda_device *device, tu_cuda_kernel kernel, unsigned blocks,
                            unsigned threads, void *args, CUstream stream) {
    void *parameters[] = { args };
    CUresult result =
        cuda->driver.cuLaunchKernel(device->kernels[kernel], blocks, 1, 1, threads, 1, 1, 0, stream, parameters, NULL);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, tu_cuda_kernel_name(kernel));
}

static tutti_status follow(tu_cuda_order *order, int64_t timeout_ns, uint32_t operation, uint64_t sequence) {
    tu_cuda_group *group = order->group;
    tu_cuda_follow_args args = { .group = order->words,
                                 .ended = group->launched,
                                 .timeout_ns = (uint64_t)timeout_ns,
                                 .sequence = sequence,
                                 .operation = operation,
                                 .rank = group->cuda->host->group_rank(group->group) };
    return tu_cuda_launch(group->cuda, group->device, TU_CUDA_FOLLOW, 1, 1, &args, order->stream);
}

static tutti_status join_capture(tu_cuda_order *order) {
    tu_cuda_group *group = order->group;
    CUresult result = group->cuda->driver.cuStreamWaitEvent(order->stream, group->captured, 0);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(group->cuda, result, "ordering two captured streams");
}

tutti_status tu_cuda_order_begin(tu_cuda_group *group, CUstream stream, uint64_t capture, int64_t timeout_ns,
                                 uint32_t operation, uint64_t sequence, tu_cuda_order *order) {
    /* A stream that captures cannot be asked for its id without breaking the capture; while it captures, its handle is
     * not given to another. */
    uint64_t id = capture != 0 ? (uint64_t)(uintptr_t)stream : tu_cuda_stream_id(group->cuda, stream);
    *order = (tu_cuda_order){ .group = group,
                              .stream = stream,
                              .stream_id = id,
                              .capture = capture,
                              .words = { .words = group->words, .report = group->report, .eager = capture == 0 } };
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&group->order_lock);
    if (capture == 0 && group->last_stream != 0 && group->last_stream != order->stream_id)
        status = follow(order, timeout_ns, operation, sequence);
    if (capture != 0 && group->capture == capture && group->captured_stream != order->stream_id)
        status = join_capture(order);
    if (status != TUTTI_OK)
        pthread_mutex_unlock(&group->order_lock);
    return status;
}

void tu_cuda_order_end(tu_cuda_order *order, unsigned blocks) {
    tu_cuda_group *group = order->group;
    tu_cuda *cuda = group->cuda;
    if (blocks > 0 && order->capture == 0) {
        group->launched += blocks;
        group->last_stream = order->stream_id;
    } else if (blocks > 0) {
        CUresult result = cuda->driver.cuEventRecord(group->captured, order->stream);
        if (result != CUDA_SUCCESS)
            cuda->host->log(cuda->world, TUTTI_LOG_WARN, "cuda",
                            "no event behind a captured operation (CUDA error %d): other streams of this capture are "
                            "not ordered after it",
                            result);
        group->capture = result == CUDA_SUCCESS ? order->capture : 0;
        group->captured_stream = order->stream_id;
    }
    pthread_mutex_unlock(&group->order_lock);
    if (blocks > 0 && order->capture == 0)
        tu_cuda_note_use(cuda, group->device, order->stream);
}

/* ---- what this rank has in its streams, where other ranks share the context ---- */

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
    if (use->event != NULL && cuda->driver.cuEventRecord(use->event, stream) == CUDA_SUCCESS)
        use->stream = id;
    pthread_mutex_unlock(&device->use_lock);
}

void tu_cuda_await_uses(tu_cuda *cuda, tu_cuda_device *device) {
    for (int i = 0; i < TU_CUDA_USERS; i++) {
        pthread_mutex_lock(&device->use_lock);
        CUevent event = device->uses[i].stream != 0 ? device->uses[i].event : NULL;
        pthread_mutex_unlock(&device->use_lock);
        if (event != NULL)
            cuda->driver.cuEventSynchronize(event); /* its kernels have deadlines of their own */
    }
}
