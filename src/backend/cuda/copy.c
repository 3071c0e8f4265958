/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes and words on streams.
 *
 * Where several ranks share the process, a put is a kernel: copies of all streams of a context go through a few queues
 * of the copy engines, and one rank's put would stand behind another rank's copy that waits, on its stream, for the
 * signal after that very put. Bytes of the host go through pinned memory, which the kernel reads or writes: the
 * driver's own way for ordinary memory waits inside of a call, where another rank's launch may have to wait for it.
 */
#include <sched.h>
#include <string.h>

#include "cuda.h"

#define COPY_BLOCKS 32
#define COPY_THREADS 512

static tutti_status on_device(void *state, int index, CUresult (*act)(tu_cuda *, void *), void *argument,
                              const char *what) {
    tu_cuda *cuda = state;
    tu_cuda_device *device;
    int chosen;
    tutti_status status = tu_cuda_device_open(cuda, index, &device, &chosen);
    if (status == TUTTI_OK)
        status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = act(cuda, argument);
    tu_cuda_leave(cuda);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, what);
}

struct copy {
    void *to;
    const void *from;
    size_t bytes;
    CUstream stream;
};
static CUresult act_copy(tu_cuda *cuda, void *argument) {
    const struct copy *copy = argument;
    return cuda->driver.cuMemcpyAsync((CUdeviceptr)(uintptr_t)copy->to, (CUdeviceptr)(uintptr_t)copy->from, copy->bytes,
                                      copy->stream);
}

tutti_status tu_cuda_copy(void *state, int device, void *to, const void *from, size_t bytes,
                          const tu_backend_call *call) {
    struct copy copy = { to, from, bytes, call->stream };
    return bytes == 0 ? TUTTI_OK : on_device(state, device, act_copy, &copy, "cuMemcpyAsync");
}

struct words {
    uint32_t *at;
    uint32_t value;
    size_t count;
    CUstream stream;
};
static CUresult act_set(tu_cuda *cuda, void *argument) {
    const struct words *words = argument;
    return cuda->driver.cuMemsetD32Async((CUdeviceptr)(uintptr_t)words->at, words->value, words->count, words->stream);
}
static CUresult act_write(tu_cuda *cuda, void *argument) {
    const struct words *words = argument;
    /* A captured graph cannot hold the stream operation; a memset of one word is ordered there as well. */
    if (tu_cuda_capture(cuda, words->stream) != 0)
        return act_set(cuda, argument);
    return cuda->driver.cuStreamWriteValue32(words->stream, (CUdeviceptr)(uintptr_t)words->at, words->value, 0);
}

tutti_status tu_cuda_set32(void *state, int device, uint32_t *words, uint32_t value, size_t count,
                           const tu_backend_call *call) {
    struct words set = { words, value, count, call->stream };
    return count == 0 ? TUTTI_OK : on_device(state, device, act_set, &set, "cuMemsetD32Async");
}

tutti_status tu_cuda_write32(void *state, int device, uint32_t *word, uint32_t value, const tu_backend_call *call) {
    struct words write = { word, value, 1, call->stream };
    return on_device(state, device, act_write, &write, "cuStreamWriteValue32");
}

/* ---- peers' memory ---- */

static bool is_device_memory(const tu_cuda *cuda, const void *pointer) {
    int index;
    return tu_cuda_streams.recognise((void *)cuda, pointer, &index);
}

static tutti_status copy_by_kernel(tu_cuda *cuda, int index, void *to, const void *from, size_t bytes,
                                   CUstream stream) {
    tu_cuda_device *device = &cuda->devices[index];
    tu_cuda_copy_args args = { (uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes };
    size_t blocks = (bytes + COPY_THREADS * 64 - 1) / (COPY_THREADS * 64);
    tutti_status status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        return status;
    status = tu_cuda_launch(cuda, device, TU_CUDA_COPY, blocks < COPY_BLOCKS ? (unsigned)blocks : COPY_BLOCKS,
                            COPY_THREADS, &args, stream, TU_CUDA_APART);
    if (status == TUTTI_OK && tu_cuda_capture(cuda, stream) == 0)
        tu_cuda_note_use(cuda, device, stream);
    tu_cuda_leave(cuda);
    return status;
}

/* A slot of pinned memory whose last bytes have gone. The caller holds bounce_lock, and has entered the context. */
static CUresult take_slot(tu_cuda *cuda, tu_cuda_device *device, unsigned *slot) {
    *slot = device->next_bounce++ % TU_CUDA_BOUNCES;
    CUevent *event = &device->bounced[*slot];
    return *event == NULL ? cuda->driver.cuEventCreate(event, CU_EVENT_DISABLE_TIMING)
                          : cuda->driver.cuEventSynchronize(*event);
}

/* By a kernel, and an event behind it that says when the slot's bytes have gone. */
static tutti_status copy_marked(tu_cuda *cuda, int index, unsigned slot, void *to, const void *from, size_t bytes,
                                CUstream stream) {
    tutti_status status = copy_by_kernel(cuda, index, to, from, bytes, stream);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuEventRecord(cuda->devices[index].bounced[slot], stream);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, "a copy through pinned memory");
}

/* One slot's worth of the host's bytes: into pinned memory now, from there by a kernel. */
static tutti_status put_slot(tu_cuda *cuda, int index, char *to, const char *from, size_t bytes, CUstream stream) {
    tu_cuda_device *device = &cuda->devices[index];
    unsigned slot;
    CUresult result = take_slot(cuda, device, &slot);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "a put of the host's bytes");
    memcpy(device->bounce + slot * TU_CUDA_BOUNCE, from, bytes);
    uintptr_t here = (uintptr_t)(device->bounce_here + slot * TU_CUDA_BOUNCE);
    return copy_marked(cuda, index, slot, to, (const void *)here, bytes, stream);
}

/* The way back: by a kernel into pinned memory, and when that is over, to where it shall go. */
static tutti_status get_slot(tu_cuda *cuda, int index, char *to, const char *from, size_t bytes, CUstream stream) {
    tu_cuda_device *device = &cuda->devices[index];
    unsigned slot;
    tutti_status status = TUTTI_OK;
    CUresult result = take_slot(cuda, device, &slot);
    if (result == CUDA_SUCCESS) {
        uintptr_t here = (uintptr_t)(device->bounce_here + slot * TU_CUDA_BOUNCE);
        status = copy_marked(cuda, index, slot, (void *)here, from, bytes, stream);
    }
    while (status == TUTTI_OK && result == CUDA_SUCCESS &&
           (result = cuda->driver.cuEventQuery(device->bounced[slot])) == CUDA_ERROR_NOT_READY) {
        result = CUDA_SUCCESS; /* what it waits for has a deadline of its own */
        sched_yield();
    }
    if (status == TUTTI_OK && result == CUDA_SUCCESS)
        memcpy(to, device->bounce + slot * TU_CUDA_BOUNCE, bytes);
    return result == CUDA_SUCCESS ? status : tu_cuda_error(cuda, result, "a get of bytes for the host");
}

/* Slot by slot; `move_slot` is one of the two above. */
static tutti_status by_slots(tu_cuda *cuda, int index, char *to, const char *from, size_t bytes, CUstream stream,
                             tutti_status (*move_slot)(tu_cuda *, int, char *, const char *, size_t, CUstream)) {
    tu_cuda_device *device = &cuda->devices[index];
    tutti_status status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&device->bounce_lock);
    for (size_t done = 0; status == TUTTI_OK && done < bytes; done += TU_CUDA_BOUNCE) {
        size_t now = bytes - done < TU_CUDA_BOUNCE ? bytes - done : TU_CUDA_BOUNCE;
        status = move_slot(cuda, index, to + done, from + done, now, stream);
    }
    pthread_mutex_unlock(&device->bounce_lock);
    tu_cuda_leave(cuda);
    return status;
}

/* Whether bytes of this rank go by kernels and pinned memory: they are the host's, and ranks share the process. */
static bool needs_slots(tu_cuda *cuda, const void *mine, const tu_backend_call *call) {
    return atomic_load_explicit(&cuda->shared_process, memory_order_relaxed) && !is_device_memory(cuda, mine) &&
           tu_cuda_capture(cuda, call->stream) == 0;
}

static tutti_status transfer(const tu_backend_peers *peers, void *to, const void *from, const void *mine, size_t bytes,
                             const tu_backend_call *call) {
    tu_cuda *cuda = peers->state;
    if (bytes > 0 && atomic_load_explicit(&cuda->shared_process, memory_order_relaxed) && is_device_memory(cuda, mine))
        return copy_by_kernel(cuda, peers->device_index, to, from, bytes, call->stream);
    return tu_cuda_copy(cuda, peers->device_index, to, from, bytes, call);
}

tutti_status tu_cuda_put(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                         const tu_backend_call *call) {
    char *target = (char *)peers->blocks->addresses[to] + offset;
    if (bytes > 0 && needs_slots(peers->state, from, call))
        return by_slots(peers->state, peers->device_index, target, from, bytes, call->stream, put_slot);
    return transfer(peers, target, from, from, bytes, call);
}

tutti_status tu_cuda_get(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                         const tu_backend_call *call) {
    const char *source = (const char *)peers->blocks->addresses[from] + offset;
    if (bytes > 0 && needs_slots(peers->state, to, call))
        return by_slots(peers->state, peers->device_index, to, source, bytes, call->stream, get_slot);
    return transfer(peers, to, source, to, bytes, call);
}
