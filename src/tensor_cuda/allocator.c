/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of tensors. Segments are taken of the driver and kept; pieces of them are given out and come back. A piece
 * belongs to the stream that it was allocated for: released, it serves that stream again at once, since what comes
 * later on a stream runs later. Other streams that used it are remembered, with an event each when it is released, and
 * it is spare when those events are over.
 *
 * Small requests share segments; a piece that is larger than asked for is cut, and spare neighbours of one stream grow
 * together again. Spare pieces lie in lists by size, four per power of two; of small ones of the default stream the one
 * that was released last waits aside, since the next request is often for the same. Where the driver or the limit has
 * no more, segments that are spare as a whole go back first.
 *
 * What is allocated while a stream is captured comes from segments of the graph's own, whoever began the capture: its
 * kernels use that memory whenever the graph runs, so that nobody else may have it.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "tensors.h"

#define ALIGNMENT ((size_t)TU_DEVICE_GRAIN)
#define SMALL ((size_t)1 << 20) /* requests up to this share segments of SMALL_SEGMENT */
#define SMALL_SEGMENT ((size_t)2 << 20)
#define LARGE_SEGMENT \
    ((size_t)32 << 20) /* others at least of this; what is larger has its own, in steps of SMALL_SEGMENT */

/* ---- lists by size ---- */

static int class_of(size_t bytes) {
    size_t units = bytes / ALIGNMENT;
    int power = 63 - __builtin_clzll(units);
    int quarter = power >= 2 ? (int)(units >> (power - 2) & 3) : 0;
    int at = power * 4 + quarter;
    return at < TU_SIZE_CLASSES ? at : TU_SIZE_CLASSES - 1;
}

static void push(tu_gpu_piece **list, tu_gpu_piece *piece) {
    piece->next = *list;
    piece->link = list;
    if (*list != NULL)
        (*list)->link = &piece->next;
    *list = piece;
}

static void pull(tu_gpu_piece *piece) {
    *piece->link = piece->next;
    if (piece->next != NULL)
        piece->next->link = piece->link;
}

/* ---- pieces ---- */

/* Takes the neighbour behind into the piece. */
static void absorb(tu_gpu_piece *piece) {
    tu_gpu_piece *behind = piece->after;
    piece->bytes += behind->bytes;
    piece->after = behind->after;
    if (piece->after != NULL)
        piece->after->before = piece;
    free(behind);
}

static bool joins(const tu_gpu_piece *piece, const tu_gpu_piece *neighbour) {
    return neighbour != NULL && neighbour->spare && neighbour->stream == piece->stream;
}

/* Makes a piece spare, with its spare neighbours. */
static void make_spare(tu_gpu *gpu, tu_gpu_piece *piece) {
    piece->spare = true;
    if (joins(piece, piece->after)) {
        pull(piece->after);
        absorb(piece);
    }
    if (joins(piece, piece->before)) {
        piece = piece->before;
        pull(piece);
        absorb(piece);
    }
    push(&gpu->spare[class_of(piece->bytes)], piece);
}

/* Whether the piece stays aside, as a whole, for the next request of its size. */
static bool keep_recent(tu_gpu *gpu, tu_gpu_piece *piece) {
    int at = class_of(piece->bytes);
    if (at >= TU_RECENT_CLASSES || gpu->recent[at] != NULL || piece->stream != NULL || piece->segment->graph != NULL)
        return false;
    gpu->recent[at] = piece;
    return true;
}

static tu_gpu_piece *take_recent(tu_gpu *gpu, size_t bytes) {
    int at = class_of(bytes);
    tu_gpu_piece *piece = at < TU_RECENT_CLASSES ? gpu->recent[at] : NULL;
    if (piece == NULL || piece->bytes != bytes)
        return NULL;
    gpu->recent[at] = NULL;
    return piece;
}

/* What waits aside is spare like everything else. */
static void settle_recent(tu_gpu *gpu) {
    for (int i = 0; i < TU_RECENT_CLASSES; i++) {
        tu_gpu_piece *piece = gpu->recent[i];
        gpu->recent[i] = NULL;
        if (piece != NULL)
            make_spare(gpu, piece);
    }
}

/* Cuts what is not needed off. Without memory for that the piece stays whole. */
static void cut(tu_gpu *gpu, tu_gpu_piece *piece, size_t bytes) {
    size_t least = piece->segment->bytes <= SMALL_SEGMENT ? ALIGNMENT : SMALL;
    if (piece->bytes - bytes < least)
        return;
    tu_gpu_piece *rest = calloc(1, sizeof *rest);
    if (rest == NULL)
        return;
    *rest = (tu_gpu_piece){ .address = piece->address + bytes,
                            .bytes = piece->bytes - bytes,
                            .segment = piece->segment,
                            .before = piece,
                            .after = piece->after,
                            .stream = piece->stream };
    if (rest->after != NULL)
        rest->after->before = rest;
    piece->after = rest;
    piece->bytes = bytes;
    rest->spare = true;
    push(&gpu->spare[class_of(rest->bytes)], rest);
}

/* The smallest spare piece of the stream that is large enough, of the first lists that can have one. A small request
 * stays out of large segments, which it would break up. */
static tu_gpu_piece *find_spare(tu_gpu *gpu, CUstream stream, const tu_gpu_graph *graph, size_t bytes) {
    bool small = bytes <= SMALL;
    for (int at = class_of(bytes); at < TU_SIZE_CLASSES; at++) {
        tu_gpu_piece *best = NULL;
        for (tu_gpu_piece *piece = gpu->spare[at]; piece != NULL; piece = piece->next)
            if (piece->stream == stream && piece->bytes >= bytes && piece->segment->graph == graph &&
                small == (piece->segment->bytes <= SMALL_SEGMENT) && (best == NULL || piece->bytes < best->bytes))
                best = piece;
        if (best != NULL)
            return best;
    }
    return NULL;
}

/* ---- other streams ---- */

static void drop_list(tu_gpus *gpus, tu_gpu_use *list) {
    while (list != NULL) {
        tu_gpu_use *use = list;
        list = use->next;
        if (use->event != NULL)
            gpus->driver.cuEventDestroy(use->event);
        free(use);
    }
}

static void drop_uses(tu_gpus *gpus, tu_gpu_piece *piece) {
    drop_list(gpus, piece->uses);
    piece->uses = NULL;
}

/* Marks where the stream is. While it is captured that cannot be told, and it gets no event. False: the driver failed
 * to. */
static bool mark_use(tu_gpus *gpus, const tu_gpu *gpu, tu_gpu_use *use) {
    if (tu_gpu_is_noted(gpus, gpu, use->stream))
        return true;
    CUevent event;
    if (gpus->driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        return false;
    if (gpus->driver.cuEventRecord(event, use->stream) != CUDA_SUCCESS) {
        gpus->driver.cuEventDestroy(event);
        return false;
    }
    use->event = event;
    return true;
}

/* Whether the streams that used it are past it; waits for them where `wait` says so. A stream that was captured when
 * the piece came back may still be at what it was given before: it is marked when that is over, as is one that the
 * driver failed to mark. Memory of a graph that such a stream used is not given out again: what it does there runs with
 * the graph. */
static bool is_over(tu_gpus *gpus, const tu_gpu *gpu, const tu_gpu_piece *piece, bool wait) {
    for (tu_gpu_use *use = piece->uses; use != NULL; use = use->next) {
        if (use->event == NULL && piece->segment->graph == NULL)
            (void)mark_use(gpus, gpu, use);
        if (use->event == NULL)
            return false;
        CUresult result = wait ? gpus->driver.cuEventSynchronize(use->event) : gpus->driver.cuEventQuery(use->event);
        if (result == CUDA_ERROR_NOT_READY)
            return false;
    }
    return true;
}

static void collect_waiting(tu_gpus *gpus, tu_gpu *gpu, bool wait) {
    tu_gpu_piece *next;
    for (tu_gpu_piece *piece = gpu->waiting; piece != NULL; piece = next) {
        next = piece->next;
        if (!is_over(gpus, gpu, piece, wait))
            continue;
        pull(piece);
        drop_uses(gpus, piece);
        make_spare(gpu, piece);
    }
}

/* ---- segments ---- */

/* Takes segments out that are spare as a whole. */
static tu_gpu_segment *take_spare(tu_gpu *gpu) {
    tu_gpu_segment *taken = NULL, *next;
    for (tu_gpu_segment *segment = gpu->segments; segment != NULL; segment = next) {
        next = segment->next;
        tu_gpu_piece *piece = segment->first;
        if (!piece->spare || piece->after != NULL || segment->graph != NULL)
            continue;
        pull(piece);
        *segment->link = segment->next;
        if (segment->next != NULL)
            segment->next->link = segment->link;
        segment->next = taken;
        taken = segment;
    }
    return taken;
}

/* Gives them back. The driver waits for what still runs on them, or on anything, and that may wait for other ranks of
 * this process, which allocate meanwhile: so the lock is given up for a while. */
static void give_back(tu_gpus *gpus, tu_gpu *gpu) {
    tu_gpu_segment *taken = take_spare(gpu);
    size_t bytes = 0;
    if (taken == NULL)
        return;
    gpu->going++;
    pthread_mutex_unlock(&gpu->lock);
    while (taken != NULL) {
        tu_gpu_segment *segment = taken;
        taken = segment->next;
        gpus->driver.cuMemFree(segment->address);
        bytes += segment->bytes;
        free(segment->first);
        free(segment);
    }
    pthread_mutex_lock(&gpu->lock);
    gpu->usage.reserved -= bytes;
    gpu->going--;
}

static size_t segment_bytes(size_t bytes) {
    if (bytes <= SMALL)
        return SMALL_SEGMENT;
    if (bytes <= LARGE_SEGMENT / 2)
        return LARGE_SEGMENT;
    return (bytes + SMALL_SEGMENT - 1) / SMALL_SEGMENT * SMALL_SEGMENT;
}

static tu_gpu_piece *add_segment(tu_gpu *gpu, CUstream stream, tu_gpu_graph *graph, CUdeviceptr address, size_t bytes) {
    tu_gpu_segment *segment = calloc(1, sizeof *segment);
    tu_gpu_piece *piece = calloc(1, sizeof *piece);
    if (segment == NULL || piece == NULL) {
        free(segment);
        free(piece);
        return NULL;
    }
    *segment = (tu_gpu_segment){ address, bytes, gpu->segments, &gpu->segments, piece, graph };
    if (gpu->segments != NULL)
        gpu->segments->link = &segment->next;
    gpu->segments = segment;
    *piece = (tu_gpu_piece){ .address = address, .bytes = bytes, .segment = segment, .stream = stream };
    gpu->usage.reserved += bytes;
    gpu->usage.reservations++;
    if (gpu->usage.reserved > gpu->usage.peak_reserved)
        gpu->usage.peak_reserved = gpu->usage.reserved;
    return piece;
}

static CUresult take(tu_gpus *gpus, const tu_gpu *gpu, size_t bytes, CUdeviceptr *address) {
    if (gpu->usage.limit != 0 && (bytes > gpu->usage.limit || gpu->usage.reserved > gpu->usage.limit - bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return gpus->driver.cuMemAlloc(address, bytes);
}

static tutti_status no_memory(const tu_gpus *gpus, const tu_gpu *gpu, int index, size_t bytes) {
    const tu_device_usage *usage = &gpu->usage;
    if (usage->limit != 0)
        return gpus->host->error(
            TUTTI_ERROR_MEMORY,
            "out of memory on cuda:%d for a tensor of %zu bytes: %zu are in use, %zu reserved, and "
            "the limit is %zu; raise it, or release tensors",
            index, bytes, usage->allocated, usage->reserved, usage->limit);
    return gpus->host->error(
        TUTTI_ERROR_MEMORY,
        "out of memory on cuda:%d for a tensor of %zu bytes: %zu are in use and %zu reserved by this "
        "process",
        index, bytes, usage->allocated, usage->reserved);
}

/* Whether it will be over without anything that this process has still to do: see is_over. */
static bool is_awaited(const tu_gpus *gpus, const tu_gpu_piece *piece) {
    for (const tu_gpu_use *use = piece->uses; use != NULL; use = use->next) {
        if (use->event == NULL)
            return false;
        if (gpus->driver.cuEventQuery(use->event) == CUDA_ERROR_NOT_READY)
            return true;
    }
    return true;
}

/* Where there may be room later: streams have used what came back, or another thread is giving segments back. Other
 * ranks of this process may hold those streams up until they have allocated, too: so the lock is theirs meanwhile. */
static bool let_others_go_on(const tu_gpus *gpus, tu_gpu *gpu) {
    const tu_gpu_piece *piece = gpu->waiting;
    while (piece != NULL && !is_awaited(gpus, piece))
        piece = piece->next;
    if (piece == NULL && gpu->going == 0)
        return false;
    pthread_mutex_unlock(&gpu->lock);
    sched_yield();
    pthread_mutex_lock(&gpu->lock);
    return true;
}

/* As calls that nobody gives a time: what streams of other libraries wait for may never come. */
#define ROOM_NS (300 * INT64_C(1000000000))

/* Where there is no room: of what is spare, or in place of it, now or when the streams are past it that used it. */
static CUresult make_room(tu_gpus *gpus, tu_gpu *gpu, CUstream stream, size_t bytes, size_t whole, CUdeviceptr *address,
                          tu_gpu_piece **piece) {
    CUresult result;
    int64_t deadline = gpus->host->now() + ROOM_NS;
    gpu->usage.retries++;
    do {
        settle_recent(gpu); /* others have released while the lock was theirs */
        collect_waiting(gpus, gpu, false);
        if ((*piece = find_spare(gpu, stream, NULL, bytes)) != NULL) {
            pull(*piece);
            return CUDA_SUCCESS;
        }
        give_back(gpus, gpu);
        result = take(gpus, gpu, whole, address);
    } while (result == CUDA_ERROR_OUT_OF_MEMORY && gpus->host->now() < deadline && let_others_go_on(gpus, gpu));
    return result;
}

/* A new segment's piece; where there is no room, after what is spare went back. */
static tutti_status reserve(tu_gpus *gpus, tu_gpu *gpu, int index, CUstream stream, tu_gpu_graph *graph, size_t bytes,
                            tu_gpu_piece **piece) {
    size_t whole = segment_bytes(bytes);
    CUdeviceptr address = 0;
    CUresult result = take(gpus, gpu, whole, &address);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && graph == NULL)
        result = make_room(gpus, gpu, stream, bytes, whole, &address, piece);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return no_memory(gpus, gpu, index, bytes);
    if (result != CUDA_SUCCESS)
        return tu_gpu_error(gpus, result, "cuMemAlloc");
    if (*piece != NULL)
        return TUTTI_OK;
    *piece = add_segment(gpu, stream, graph, address, whole);
    if (*piece != NULL)
        return TUTTI_OK;
    gpus->driver.cuMemFree(address);
    return gpus->host->error(TUTTI_ERROR_MEMORY, "out of memory of the host for a segment of cuda:%d", index);
}

/* ---- the table's functions ---- */

/* Gives the piece out. The lock is held. */
static void give_out(tu_gpu *gpu, tu_gpu_piece *piece, size_t bytes, tu_device_block *block) {
    piece->spare = false;
    cut(gpu, piece, bytes);
    gpu->usage.allocated += piece->bytes;
    gpu->usage.allocations++;
    if (gpu->usage.allocated > gpu->usage.peak_allocated)
        gpu->usage.peak_allocated = gpu->usage.allocated;
    *block = (tu_device_block){ (void *)(uintptr_t)piece->address, piece };
}

/* A spare piece for the default stream, which cannot be captured: nothing has to be asked of the driver for that. */
static bool allocate_quickly(tu_gpu *gpu, size_t bytes, tu_device_block *block) {
    pthread_mutex_lock(&gpu->lock);
    tu_gpu_piece *piece = take_recent(gpu, bytes);
    if (piece == NULL && gpu->waiting == NULL && (piece = find_spare(gpu, NULL, NULL, bytes)) != NULL)
        pull(piece);
    if (piece != NULL)
        give_out(gpu, piece, bytes, block);
    pthread_mutex_unlock(&gpu->lock);
    return piece != NULL;
}

tutti_status tu_gpu_allocate(void *state, int index, void *stream, size_t bytes, tu_device_block *block) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    tu_gpu_graph *graph;
    bool pushed;
    if (bytes > SIZE_MAX / 4)
        return gpus->host->error(TUTTI_ERROR_MEMORY, "no GPU has memory for a tensor of %zu bytes", bytes);
    size_t rounded = bytes == 0 ? ALIGNMENT : (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (stream == NULL && tu_gpu_is_open(gpus, index) && allocate_quickly(&gpus->gpus[index], rounded, block))
        return TUTTI_OK;
    tutti_status status = tu_gpu_enter(gpus, index, &gpu, &pushed);
    if (status != TUTTI_OK)
        return status;
    status = tu_gpu_graph_of(gpus, gpu, stream, &graph);
    if (status != TUTTI_OK) {
        tu_gpu_leave(gpus, pushed);
        return status;
    }
    /* While any stream of the process is captured, the driver lets this thread ask events and take memory only so. */
    int mode = tu_gpu_relax(gpus, TU_GPU_RELAXED);
    pthread_mutex_lock(&gpu->lock);
    settle_recent(gpu);
    if (gpu->waiting != NULL && graph == NULL)
        collect_waiting(gpus, gpu, false);
    tu_gpu_piece *piece = find_spare(gpu, stream, graph, rounded);
    if (piece != NULL)
        pull(piece);
    else
        status = reserve(gpus, gpu, index, stream, graph, rounded, &piece);
    if (status == TUTTI_OK)
        give_out(gpu, piece, rounded, block);
    pthread_mutex_unlock(&gpu->lock);
    tu_gpu_relax(gpus, mode);
    tu_gpu_leave(gpus, pushed);
    return status;
}

/* Marks where the other streams are; false where there is nothing to wait for. One that the driver fails to mark is
 * marked when the piece is looked at again. */
static bool mark_uses(tu_gpus *gpus, const tu_gpu *gpu, tu_gpu_piece *piece) {
    for (tu_gpu_use *use = piece->uses; use != NULL; use = use->next)
        (void)mark_use(gpus, gpu, use);
    return piece->uses != NULL;
}

/* A piece that no other stream used is spare at once, and nothing is asked of the driver. */
static bool release_quickly(tu_gpu *gpu, tu_gpu_piece *piece) {
    pthread_mutex_lock(&gpu->lock);
    bool alone = piece->uses == NULL;
    if (alone) {
        gpu->usage.allocated -= piece->bytes;
        if (!keep_recent(gpu, piece))
            make_spare(gpu, piece);
    }
    pthread_mutex_unlock(&gpu->lock);
    return alone;
}

void tu_gpu_release(void *state, int index, tu_device_block *block) {
    tu_gpus *gpus = state;
    tu_gpu_piece *piece = block->handle;
    tu_gpu *gpu;
    bool pushed;
    if (piece == NULL)
        return;
    if (!release_quickly(&gpus->gpus[index], piece)) {
        if (tu_gpu_enter(gpus, index, &gpu, &pushed) != TUTTI_OK)
            return;
        pthread_mutex_lock(&gpu->lock);
        gpu->usage.allocated -= piece->bytes;
        if (mark_uses(gpus, gpu, piece))
            push(&gpu->waiting, piece);
        else
            make_spare(gpu, piece);
        pthread_mutex_unlock(&gpu->lock);
        tu_gpu_leave(gpus, pushed);
    }
    *block = (tu_device_block){ 0 };
}

/* Until the stream is past its mark, or, where it is captured by us, past what it held before. What it is given while
 * another library captures it runs with a graph that we know nothing of. The host waits without the lock: streams may
 * wait for other ranks of this process, which allocate meanwhile. */
static void await_use(tu_gpus *gpus, tu_gpu *gpu, tu_gpu_use *use) {
    bool marked = true, held = true;
    while (use->event == NULL && held) {
        pthread_mutex_lock(&gpu->lock); /* a capture that is under way keeps its graph meanwhile */
        const tu_gpu_graph *graph = tu_gpu_capture_of(gpu, use->stream);
        held = graph != NULL && gpus->driver.cuEventQuery(graph->began) == CUDA_ERROR_NOT_READY;
        if (graph == NULL)
            marked = mark_use(gpus, gpu, use);
        pthread_mutex_unlock(&gpu->lock);
        if (held)
            sched_yield();
    }
    if (use->event != NULL)
        gpus->driver.cuEventSynchronize(use->event);
    else if (!marked) /* nothing tells when that stream is past it */
        gpus->driver.cuCtxSynchronize();
}

void tu_gpu_release_behind(void *state, int index, tu_device_block *block) {
    tu_gpus *gpus = state;
    tu_gpu_piece *piece = block->handle;
    tu_gpu *gpu;
    tu_gpu_aside aside;
    if (tu_gpu_enter_aside(gpus, index, &gpu, &aside) == TUTTI_OK) {
        pthread_mutex_lock(&gpu->lock);
        tu_gpu_use own = { .stream = piece->stream, .next = piece->uses };
        for (tu_gpu_use *use = &own; use != NULL; use = use->next)
            (void)mark_use(gpus, gpu, use);
        piece->uses = NULL;
        gpu->usage.allocated -= piece->bytes;
        make_spare(gpu, piece);
        pthread_mutex_unlock(&gpu->lock);
        for (tu_gpu_use *use = &own; use != NULL; use = use->next)
            await_use(gpus, gpu, use);
        if (own.event != NULL)
            gpus->driver.cuEventDestroy(own.event);
        drop_list(gpus, own.next);
    }
    tu_gpu_leave_aside(gpus, &aside);
    *block = (tu_device_block){ 0 };
}

void tu_gpu_used(void *state, int index, const tu_device_block *block, void *stream) {
    tu_gpus *gpus = state;
    tu_gpu_piece *piece = block->handle;
    tu_gpu *gpu = &gpus->gpus[index];
    pthread_mutex_lock(&gpu->lock);
    tu_gpu_use *use = piece->uses;
    while (use != NULL && use->stream != stream)
        use = use->next;
    if (use == NULL && stream != piece->stream) {
        use = calloc(1, sizeof *use);
        if (use != NULL) {
            *use = (tu_gpu_use){ .stream = stream, .next = piece->uses };
            piece->uses = use;
        } else { /* cannot be remembered: the piece is in order with this stream only after a wait */
            gpus->driver.cuStreamSynchronize(stream);
        }
    }
    pthread_mutex_unlock(&gpu->lock);
}

void tu_gpu_trim(void *state, int index) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    tu_gpu_aside aside;
    if (tu_gpu_enter_aside(gpus, index, &gpu, &aside) == TUTTI_OK) {
        pthread_mutex_lock(&gpu->lock);
        settle_recent(gpu);
        collect_waiting(gpus, gpu, false);
        give_back(gpus, gpu);
        pthread_mutex_unlock(&gpu->lock);
    }
    tu_gpu_leave_aside(gpus, &aside);
}

/* Locks the device, which is opened before where nobody has used it. */
static tutti_status lock_device(tu_gpus *gpus, int index, tu_gpu **found) {
    bool pushed;
    tutti_status status = tu_gpu_enter(gpus, index, found, &pushed);
    if (status != TUTTI_OK)
        return status;
    tu_gpu_leave(gpus, pushed);
    pthread_mutex_lock(&(*found)->lock);
    return TUTTI_OK;
}

tutti_status tu_gpu_usage(void *state, int index, tu_device_usage *usage) {
    tu_gpu *gpu;
    tutti_status status = lock_device(state, index, &gpu);
    if (status != TUTTI_OK)
        return status;
    *usage = gpu->usage;
    pthread_mutex_unlock(&gpu->lock);
    return TUTTI_OK;
}

tutti_status tu_gpu_set_limit(void *state, int index, size_t bytes) {
    tu_gpu *gpu;
    tutti_status status = lock_device(state, index, &gpu);
    if (status != TUTTI_OK)
        return status;
    gpu->usage.limit = bytes;
    pthread_mutex_unlock(&gpu->lock);
    return TUTTI_OK;
}

/* What belonged to the stream belongs to the default one: nothing of it runs any more. */
void tu_gpu_stream_gone(tu_gpus *gpus, tu_gpu *gpu, CUstream stream) {
    pthread_mutex_lock(&gpu->lock);
    collect_waiting(gpus, gpu, false);
    for (tu_gpu_segment *segment = gpu->segments; segment != NULL; segment = segment->next) {
        for (tu_gpu_piece *piece = segment->first; piece != NULL; piece = piece->after) {
            if (piece->stream == stream)
                piece->stream = NULL;
            for (tu_gpu_use *use = piece->uses; use != NULL; use = use->next)
                if (use->stream == stream && use->event == NULL)
                    use->stream = NULL;
        }
    }
    pthread_mutex_unlock(&gpu->lock);
}

void tu_gpu_memory_freed(tu_gpu *gpu, const tu_gpu_graph *graph) {
    pthread_mutex_lock(&gpu->lock);
    for (tu_gpu_segment *segment = gpu->segments; segment != NULL; segment = segment->next)
        if (segment->graph == graph)
            segment->graph = NULL;
    pthread_mutex_unlock(&gpu->lock);
}

void tu_gpu_memory_end(tu_gpus *gpus, tu_gpu *gpu) {
    tu_gpu_others_end(gpus, gpu);
    collect_waiting(gpus, gpu, true);
    while (gpu->segments != NULL) {
        tu_gpu_segment *segment = gpu->segments;
        gpu->segments = segment->next;
        gpus->driver.cuMemFree(segment->address);
        while (segment->first != NULL) {
            tu_gpu_piece *piece = segment->first;
            segment->first = piece->after;
            drop_uses(gpus, piece);
            free(piece);
        }
        free(segment);
    }
}
