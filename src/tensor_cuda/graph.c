/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphs: what a stream was given, noted once and run again. Memory that is allocated for the stream meanwhile comes
 * from segments of the graph's own, so that a later run finds it as it was left; what it copies from the host is kept
 * with the graph, in pinned memory, since the copy runs with the graph.
 */
#include <stdlib.h>
#include <string.h>

#include "tensors.h"

#define THREAD_ALONE 1 /* mode of a capture: calls of other threads are nobody's business */

tu_gpu_graph *tu_gpu_capture_of(const tu_gpu *gpu, CUstream stream) {
    if (__atomic_load_n(&gpu->capture_count, __ATOMIC_RELAXED) == 0 || stream == NULL)
        return NULL;
    for (int i = 0; i < TU_GPU_CAPTURES; i++)
        if (__atomic_load_n(&gpu->captures[i].stream, __ATOMIC_ACQUIRE) == stream) /* pairs with note_capture */
            return gpu->captures[i].graph;
    return NULL;
}

static bool note_capture(tu_gpu *gpu, CUstream stream, tu_gpu_graph *graph) {
    int at = 0;
    pthread_mutex_lock(&gpu->lock);
    while (at < TU_GPU_CAPTURES && gpu->captures[at].stream != NULL)
        at++;
    if (at < TU_GPU_CAPTURES) {
        gpu->captures[at].graph = graph;
        __atomic_store_n(&gpu->captures[at].stream, stream, __ATOMIC_RELEASE); /* pairs with tu_gpu_capture_of */
        __atomic_fetch_add(&gpu->capture_count, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&gpu->lock);
    return at < TU_GPU_CAPTURES;
}

static tu_gpu_graph *take_capture(tu_gpu *gpu, CUstream stream) {
    tu_gpu_graph *graph = NULL;
    pthread_mutex_lock(&gpu->lock);
    for (int i = 0; i < TU_GPU_CAPTURES && stream != NULL && graph == NULL; i++) {
        if (gpu->captures[i].stream != stream)
            continue;
        graph = gpu->captures[i].graph;
        __atomic_store_n(&gpu->captures[i].stream, NULL, __ATOMIC_RELEASE);
        __atomic_fetch_sub(&gpu->capture_count, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&gpu->lock);
    return graph;
}

int tu_gpu_relax(const tu_gpus *gpus, int mode) {
    int before = mode;
    if (gpus->driver.cuThreadExchangeStreamCaptureMode == NULL)
        return mode;
    return gpus->driver.cuThreadExchangeStreamCaptureMode(&before) == CUDA_SUCCESS ? before : mode;
}

/* The number of the capture that the stream is in; 0: it is in none. The default stream cannot capture, and asking it
 * would break another's capture. */
static unsigned long long number_of(const tu_gpus *gpus, CUstream stream) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long number = 0;
    if ((uintptr_t)stream <= 1 || /* NULL and 1 are the default stream */
        gpus->driver.cuStreamGetCaptureInfo(stream, &status, &number, NULL, NULL, NULL) != CUDA_SUCCESS ||
        status == CU_STREAM_CAPTURE_STATUS_NONE)
        return 0;
    return number != 0 ? number : 1;
}

bool tu_gpu_is_noted(const tu_gpus *gpus, const tu_gpu *gpu, CUstream stream) {
    return tu_gpu_capture_of(gpu, stream) != NULL || number_of(gpus, stream) != 0;
}

tutti_status tu_gpu_graph_of(tu_gpus *gpus, tu_gpu *gpu, CUstream stream, tu_gpu_graph **graph) {
    *graph = tu_gpu_capture_of(gpu, stream);
    unsigned long long number = *graph == NULL ? number_of(gpus, stream) : 0;
    if (number == 0)
        return TUTTI_OK;
    pthread_mutex_lock(&gpu->lock);
    tu_gpu_graph *found = gpu->others;
    for (int i = 0; i < TU_GPU_CAPTURES && *graph == NULL; i++) /* a stream that came to a replay's */
        if (gpu->captures[i].stream != NULL && gpu->captures[i].graph->number == number)
            *graph = gpu->captures[i].graph;
    while (found != NULL && found->number != number)
        found = found->next;
    if (*graph == NULL && found == NULL && (found = calloc(1, sizeof *found)) != NULL) {
        found->number = number;
        found->next = gpu->others;
        gpu->others = found;
    }
    pthread_mutex_unlock(&gpu->lock);
    *graph = *graph != NULL ? *graph : found;
    return *graph != NULL ? TUTTI_OK : gpus->host->error(TUTTI_ERROR_MEMORY, "out of memory for a graph");
}

bool tu_gpu_capturing(void *state, int index, void *stream) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    bool pushed;
    if (stream == NULL || tu_gpu_enter(gpus, index, &gpu, &pushed) != TUTTI_OK)
        return false;
    bool yes = tu_gpu_is_noted(gpus, gpu, stream);
    tu_gpu_leave(gpus, pushed);
    return yes;
}

static CUresult begin_capture(const tu_gpus *gpus, tu_gpu_graph *graph, CUstream stream) {
    CUresult result = gpus->driver.cuEventCreate(&graph->began, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS)
        result = gpus->driver.cuEventRecord(graph->began, stream);
    return result == CUDA_SUCCESS ? gpus->driver.cuStreamBeginCapture(stream, THREAD_ALONE) : result;
}

tutti_status tu_gpu_capture_begin(void *state, int index, void *stream) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    bool pushed;
    if (gpus->driver.cuStreamBeginCapture == NULL || gpus->driver.cuGraphInstantiateWithFlags == NULL)
        return gpus->host->error(TUTTI_ERROR_UNSUPPORTED, "this CUDA driver has no graphs");
    if (stream == NULL)
        return gpus->host->error(TUTTI_ERROR_STATE,
                                 "the default stream cannot be captured: make another one current before");
    tutti_status status = tu_gpu_enter(gpus, index, &gpu, &pushed);
    if (status != TUTTI_OK)
        return status;
    tu_gpu_graph *graph = calloc(1, sizeof *graph);
    if (graph == NULL)
        status = gpus->host->error(TUTTI_ERROR_MEMORY, "out of memory for a graph");
    else if (tu_gpu_capture_of(gpu, stream) != NULL)
        status = gpus->host->error(TUTTI_ERROR_STATE, "this stream is captured already");
    CUresult result = status == TUTTI_OK ? begin_capture(gpus, graph, stream) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        status = tu_gpu_error(gpus, result, "beginning a capture");
    if (status == TUTTI_OK)
        graph->number = number_of(gpus, stream);
    if (status == TUTTI_OK && !note_capture(gpu, stream, graph)) {
        CUgraph noted = NULL;
        if (gpus->driver.cuStreamEndCapture(stream, &noted) == CUDA_SUCCESS && noted != NULL)
            gpus->driver.cuGraphDestroy(noted);
        status = gpus->host->error(TUTTI_ERROR_LIMIT, "at most %d streams of a GPU can be captured at one time",
                                   TU_GPU_CAPTURES);
    }
    if (status != TUTTI_OK && graph != NULL && graph->began != NULL)
        gpus->driver.cuEventDestroy(graph->began);
    if (status != TUTTI_OK)
        free(graph);
    tu_gpu_leave(gpus, pushed);
    return status;
}

static CUresult make_runnable(const tu_gpus *gpus, tu_gpu_graph *graph, CUgraph noted) {
    CUresult result = gpus->driver.cuGraphInstantiateWithFlags(&graph->runnable, noted, 0);
    if (result == CUDA_SUCCESS)
        result = gpus->driver.cuEventCreate(&graph->ran, CU_EVENT_DISABLE_TIMING);
    return result;
}

tutti_status tu_gpu_capture_end(void *state, int index, void *stream, void **made) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    tu_gpu_aside aside; /* this thread may have begun others, of streams of their own */
    CUgraph noted = NULL;
    tutti_status status = tu_gpu_enter_aside(gpus, index, &gpu, &aside);
    tu_gpu_graph *graph = status == TUTTI_OK ? take_capture(gpu, stream) : NULL;
    if (graph == NULL) {
        tu_gpu_leave_aside(gpus, &aside);
        return status != TUTTI_OK ? status : gpus->host->error(TUTTI_ERROR_STATE, "the current stream is not captured");
    }
    CUresult result = gpus->driver.cuStreamEndCapture(stream, &noted);
    if (result == CUDA_SUCCESS && made != NULL)
        result = make_runnable(gpus, graph, noted);
    if (noted != NULL)
        gpus->driver.cuGraphDestroy(noted);
    tu_gpu_leave_aside(gpus, &aside);
    if (result == CUDA_SUCCESS && made != NULL) {
        *made = graph;
        return TUTTI_OK;
    }
    tu_gpu_graph_end(state, index, graph);
    return made == NULL ? TUTTI_OK : tu_gpu_error(gpus, result, "ending a capture");
}

tutti_status tu_gpu_graph_run(void *state, int index, void *stream, void *which) {
    tu_gpus *gpus = state;
    tu_gpu_graph *graph = which;
    tu_gpu *gpu;
    bool pushed;
    tutti_status status = tu_gpu_enter(gpus, index, &gpu, &pushed);
    if (status != TUTTI_OK)
        return status;
    bool noted = tu_gpu_is_noted(gpus, gpu, stream); /* part of another graph, with which it runs: nothing to mark */
    CUresult result = gpus->driver.cuGraphLaunch(graph->runnable, stream);
    if (result == CUDA_SUCCESS && !noted)
        result = gpus->driver.cuEventRecord(graph->ran, stream);
    if (result != CUDA_SUCCESS && !noted) /* nothing tells when it has run, or what it was given: now that is over */
        gpus->driver.cuStreamSynchronize(stream);
    tu_gpu_leave(gpus, pushed);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_gpu_error(gpus, result, "running a graph");
}

static void drop_kept(const tu_gpus *gpus, tu_gpu_graph *graph) {
    while (graph->kept != NULL) {
        tu_gpu_kept *one = graph->kept;
        graph->kept = one->next;
        gpus->driver.cuMemFreeHost(one);
    }
}

void tu_gpu_others_end(tu_gpus *gpus, tu_gpu *gpu) {
    while (gpu->others != NULL) {
        tu_gpu_graph *graph = gpu->others;
        gpu->others = graph->next;
        drop_kept(gpus, graph);
        free(graph);
    }
}

void tu_gpu_graph_end(void *state, int index, void *which) {
    tu_gpus *gpus = state;
    tu_gpu_graph *graph = which;
    tu_gpu *gpu;
    tu_gpu_aside aside;
    if (graph == NULL)
        return;
    if (tu_gpu_enter_aside(gpus, index, &gpu, &aside) != TUTTI_OK) {
        tu_gpu_leave_aside(gpus, &aside);
        return;
    }
    gpus->driver.cuEventDestroy(graph->began);
    if (graph->ran != NULL) {
        gpus->driver.cuEventSynchronize(graph->ran); /* over at once where it never ran */
        gpus->driver.cuEventDestroy(graph->ran);
    }
    if (graph->runnable != NULL)
        gpus->driver.cuGraphExecDestroy(graph->runnable);
    drop_kept(gpus, graph);
    tu_gpu_memory_freed(gpu, graph);
    tu_gpu_leave_aside(gpus, &aside);
    free(graph);
}

/* ---- copies ---- */

/* Of the host, and not pinned: what pinned memory holds is read when the graph runs. */
static bool is_of_host(const tu_gpus *gpus, const void *from) {
    int type = 0, attribute = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    void *values[1] = { &type };
    return gpus->driver.cuPointerGetAttributes(1, &attribute, values, (CUdeviceptr)(uintptr_t)from) != CUDA_SUCCESS ||
           type == 0;
}

const void *tu_gpu_keep_bytes(tu_gpus *gpus, tu_gpu_graph *graph, const void *from, size_t bytes) {
    tu_gpu_kept *kept = NULL;
    if (!is_of_host(gpus, from))
        return from;
    int before = tu_gpu_relax(gpus, TU_GPU_RELAXED);
    CUresult result = gpus->driver.cuMemHostAlloc((void **)&kept, sizeof *kept + bytes, CU_MEMHOSTALLOC_PORTABLE);
    tu_gpu_relax(gpus, before);
    if (result != CUDA_SUCCESS)
        return NULL;
    kept->next = graph->kept;
    graph->kept = kept;
    return memcpy(kept + 1, from, bytes);
}
