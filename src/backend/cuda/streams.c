/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams and events, and which device a pointer lies on.
 */
#include "cuda.h"

static bool recognise(void *state, const void *pointer, int *device_index) {
    tu_cuda *cuda = state;
    unsigned type = 0;
    int ordinal = -1;
    int attributes[2] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL };
    void *values[2] = { &type, &ordinal };
    if (cuda->driver.cuPointerGetAttributes(2, attributes, values, (CUdeviceptr)(uintptr_t)pointer) != CUDA_SUCCESS ||
        type != CU_MEMORYTYPE_DEVICE)
        return false;
    *device_index = ordinal;
    return true;
}

uint64_t tu_cuda_stream_id(const tu_cuda *cuda, CUstream stream) {
    unsigned long long id = 0;
    uintptr_t handle = (uintptr_t)stream;
    if (handle <= 2) /* the default streams */
        return UINT64_C(1) << 63 | handle;
    if (cuda->driver.cuStreamGetId != NULL && cuda->driver.cuStreamGetId(stream, &id) == CUDA_SUCCESS)
        return id + 1;
    return handle;
}

/* Asks in the context of a device of ours: this thread has none, or another. */
static CUresult ask_with_context(tu_cuda *cuda, CUstream stream, int *status, unsigned long long *id) {
    for (int i = 0; i < cuda->device_count; i++) {
        if (!cuda->devices[i].open || tu_cuda_enter(cuda, &cuda->devices[i]) != TUTTI_OK)
            continue;
        CUresult result = cuda->driver.cuStreamGetCaptureInfo(stream, status, id, NULL, NULL, NULL);
        tu_cuda_leave(cuda);
        return result;
    }
    return CUDA_ERROR_INVALID_CONTEXT;
}

uint64_t tu_cuda_capture(tu_cuda *cuda, CUstream stream) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long id = 0;
    if (stream == NULL) /* the legacy stream cannot capture, and asking it during a capture would break that */
        return 0;
    CUresult result = cuda->driver.cuStreamGetCaptureInfo(stream, &status, &id, NULL, NULL, NULL);
    if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_INVALID_HANDLE)
        result = ask_with_context(cuda, stream, &status, &id);
    return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE ? id : 0;
}

static bool capturing(void *state, void *stream) {
    return tu_cuda_capture(state, stream) != 0;
}

static tutti_status create(void *state, int index, void **stream) {
    tu_cuda *cuda = state;
    CUstream made;
    tutti_status status = tu_cuda_enter(cuda, &cuda->devices[index]);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuStreamCreate(&made, CU_STREAM_NON_BLOCKING);
    tu_cuda_leave(cuda);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "cuStreamCreate");
    *stream = made;
    return TUTTI_OK;
}

static void destroy(void *state, int index, void *stream) {
    tu_cuda *cuda = state;
    if (tu_cuda_enter(cuda, &cuda->devices[index]) == TUTTI_OK) {
        cuda->driver.cuStreamDestroy(stream);
        tu_cuda_leave(cuda);
    }
}

static tutti_status mark(void *state, int index, void *stream, void **event) {
    tu_cuda *cuda = state;
    CUevent made = NULL;
    tutti_status status = tu_cuda_enter(cuda, &cuda->devices[index]);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuEventCreate(&made, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS && (result = cuda->driver.cuEventRecord(made, stream)) != CUDA_SUCCESS)
        cuda->driver.cuEventDestroy(made);
    tu_cuda_leave(cuda);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "recording an event");
    *event = made;
    return TUTTI_OK;
}

static tutti_status join(void *state, int index, void *stream, void *event) {
    tu_cuda *cuda = state;
    tutti_status status = tu_cuda_enter(cuda, &cuda->devices[index]);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuStreamWaitEvent(stream, event, 0);
    tu_cuda_leave(cuda);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, "cuStreamWaitEvent");
}

static tutti_status test(void *state, int index, void *event, bool *complete) {
    tu_cuda *cuda = state;
    tutti_status status = tu_cuda_enter(cuda, &cuda->devices[index]);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuEventQuery(event);
    tu_cuda_leave(cuda);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY)
        return tu_cuda_error(cuda, result, "cuEventQuery");
    *complete = result == CUDA_SUCCESS;
    return TUTTI_OK;
}

static void unmark(void *state, int index, void *event) {
    tu_cuda *cuda = state;
    if (tu_cuda_enter(cuda, &cuda->devices[index]) == TUTTI_OK) {
        cuda->driver.cuEventDestroy(event);
        tu_cuda_leave(cuda);
    }
}

const tu_backend_streams tu_cuda_streams = {
    .size = sizeof(tu_backend_streams),
    .recognise = recognise,
    .capturing = capturing,
    .create = create,
    .destroy = destroy,
    .mark = mark,
    .join = join,
    .test = test,
    .unmark = unmark,
};
