/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals, barriers and single words on streams. See signal.cu for the protocol.
 *
 * A signal area is [channels][size] signals, [channels][size] barrier words that peers write, then what only its owner
 * uses: [channels][size] counters and [channels] epochs.
 */
#include <string.h>

#include "cuda.h"

static size_t shared_bytes(int size, int channels) {
    return ((size_t)channels * (size_t)size * (sizeof(tu_cuda_signal) + sizeof(uint32_t)) + 127) & ~(size_t)127;
}

size_t tu_cuda_area_bytes(int size, int channels) {
    return shared_bytes(size, channels) + (size_t)channels * (size_t)size * sizeof(tu_cuda_signal) +
           (size_t)channels * sizeof(uint32_t);
}

/* The group's fault words, so that nothing has to be allocated by a signal, and a stream may capture it. */
tutti_status tu_cuda_attach(tu_backend_peers *peers) {
    tu_cuda_fate *fate;
    tutti_status status = tu_cuda_fate_get(peers->state, peers->group, peers->device_index, &fate);
    peers->local = status == TUTTI_OK ? fate : NULL;
    return status;
}

void tu_cuda_detach(tu_backend_peers *peers) {
    peers->local = NULL; /* fates live as long as the world */
}

void tu_cuda_reset(const tu_backend_peers *peers) {
    tu_cuda *cuda = peers->state;
    tu_backend_block area = { .address = peers->areas->addresses[peers->rank],
                              .bytes = tu_cuda_area_bytes(peers->size, peers->channels),
                              .device_index = peers->device_index };
    if (tu_cuda_clear(cuda, &area, 0, area.bytes) != TUTTI_OK)
        cuda->host->log(cuda->world, TUTTI_LOG_WARN, "cuda", "the signals of a block could not be reset");
}

static tutti_status launch(const tu_backend_peers *peers, int kind, int peer, int channel, const tu_backend_call *call,
                           const char *name) {
    tu_cuda *cuda = peers->state;
    tu_cuda_device *device = &cuda->devices[peers->device_index];
    const tu_cuda_fate *fate = peers->local;
    tutti_status status = tu_cuda_check(cuda, peers->group);
    if (status != TUTTI_OK)
        return status;
    tu_cuda_signal_args args = { .fault = fate->fault,
                                 .host_fault = fate->host_address,
                                 .rank = peers->rank,
                                 .size = peers->size,
                                 .channel = channel,
                                 .channels = peers->channels,
                                 .peer = peer,
                                 .kind = kind,
                                 .timeout_ns = (uint64_t)cuda->host->timeout(peers->group, call->timeout_ns),
                                 .operation = cuda->host->operation_find(name) };
    tu_cuda_map_plan(peers->areas, &args.areas, &args.stride);
    args.local = (uint64_t)(uintptr_t)peers->areas->addresses[peers->rank] + shared_bytes(peers->size, peers->channels);
    status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        return status;
    void *parameters[] = { &args };
    unsigned threads = kind == TU_CUDA_SIGNAL_BARRIER ? (unsigned)(peers->size + 31) / 32 * 32 : 1;
    CUresult result = cuda->driver.cuLaunchKernel(device->kernels[TU_CUDA_SIGNAL], 1, 1, 1, threads, 1, 1, 0,
                                                  call->stream, parameters, NULL);
    if (result != CUDA_SUCCESS)
        status = tu_cuda_error(cuda, result, "launching a signal");
    tu_cuda_leave(cuda);
    if (status == TUTTI_OK)
        tu_cuda_watch(cuda);
    return status;
}

tutti_status tu_cuda_signal_put(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call) {
    return launch(peers, TU_CUDA_SIGNAL_PUT, to, channel, call, "peers_signal");
}

tutti_status tu_cuda_signal_wait(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call) {
    return launch(peers, TU_CUDA_SIGNAL_WAIT, from, channel, call, "peers_wait_signal");
}

tutti_status tu_cuda_barrier(const tu_backend_peers *peers, int channel, const tu_backend_call *call) {
    return launch(peers, TU_CUDA_SIGNAL_BARRIER, -1, channel, call, "peers_barrier");
}

/* Reads both counters; the host waits for two small copies. */
tutti_status tu_cuda_signal_test(const tu_backend_peers *peers, int from, int channel, bool *arrived) {
    tu_cuda *cuda = peers->state;
    tu_cuda_device *device = &cuda->devices[peers->device_index];
    size_t at = ((size_t)channel * (size_t)peers->size + (size_t)from) * sizeof(tu_cuda_signal);
    CUdeviceptr area = (CUdeviceptr)(uintptr_t)peers->areas->addresses[peers->rank];
    tu_cuda_signal theirs, mine;
    tutti_status status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuMemcpyDtoHAsync(&theirs, area + at, sizeof theirs, device->stream);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuMemcpyDtoHAsync(&mine, area + shared_bytes(peers->size, peers->channels) + at,
                                                sizeof mine, device->stream);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuStreamSynchronize(device->stream);
    tu_cuda_leave(cuda);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "reading a signal");
    *arrived = (int32_t)(theirs.sent - mine.taken) > 0;
    return TUTTI_OK;
}

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

tutti_status tu_cuda_put(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                         const tu_backend_call *call) {
    return tu_cuda_copy(peers->state, peers->device_index, (char *)peers->blocks->addresses[to] + offset, from, bytes,
                        call);
}

tutti_status tu_cuda_get(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                         const tu_backend_call *call) {
    return tu_cuda_copy(peers->state, peers->device_index, to, (const char *)peers->blocks->addresses[from] + offset,
                        bytes, call);
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
    int status = 0;
    /* A captured graph cannot hold the stream operation; a memset of one word is ordered there as well. */
    if (cuda->driver.cuStreamIsCapturing(words->stream, &status) == CUDA_SUCCESS &&
        status != CU_STREAM_CAPTURE_STATUS_NONE)
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
