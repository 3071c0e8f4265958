/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for the CUDA driver, as a library libcuda.so.1: one GPU whose memory is the host's and whose kernels are
 * those of tensors, compiled for the CPU. Everything is over when a call returns, but an event may be told not to be:
 * standin_events_are_ready(0). With it tests of tensors on cuda run where there is no GPU; what it does not know fails.
 */
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "driver.h"
#include "emulate.hpp"

/* ---- kernels ---- */

namespace emulated {
thread_local place here;

static std::map<std::string, body *> &table() {
    static std::map<std::string, body *> known;
    return known;
}
entry::entry(const char *name, body *run) {
    table()[name] = run;
}
body *find(const char *name) {
    auto found = table().find(name);
    return found == table().end() ? nullptr : found->second;
}
} // namespace emulated

/* ---- the driver's functions ---- */

static const size_t capacity = (size_t)1 << 30;
static std::mutex lock;
static std::map<CUdeviceptr, size_t> allocated;
static size_t in_use;
static bool ready = true;
static int launches;
static thread_local CUcontext contexts[8];
static thread_local int depth;
static const CUcontext primary = (CUcontext)(uintptr_t)0x1000;

extern "C" __attribute__((visibility("default"))) void standin_events_are_ready(int yes) {
    ready = yes != 0;
}
extern "C" __attribute__((visibility("default"))) size_t standin_bytes_in_use(void) {
    std::lock_guard<std::mutex> held(lock);
    return in_use;
}
extern "C" __attribute__((visibility("default"))) int standin_launches(void) {
    return launches;
}

static CUresult init(unsigned) {
    return CUDA_SUCCESS;
}
static CUresult version(int *number) {
    *number = 13000;
    return CUDA_SUCCESS;
}
static CUresult device(CUdevice *found, int ordinal) {
    *found = ordinal;
    return CUDA_SUCCESS;
}
static CUresult count(int *devices) {
    *devices = 1;
    return CUDA_SUCCESS;
}
static CUresult attribute(int *value, int which, CUdevice) {
    *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 4;
    return CUDA_SUCCESS;
}
static CUresult retain(CUcontext *context, CUdevice) {
    *context = primary;
    return CUDA_SUCCESS;
}
static CUresult release(CUdevice) {
    return CUDA_SUCCESS;
}
static CUresult current(CUcontext *context) {
    *context = depth > 0 ? contexts[depth - 1] : nullptr;
    return CUDA_SUCCESS;
}
static CUresult current_device(CUdevice *found) {
    *found = 0;
    return depth > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
static CUresult push(CUcontext context) {
    if (depth == 8)
        return CUDA_ERROR_NOT_SUPPORTED;
    contexts[depth++] = context;
    return CUDA_SUCCESS;
}
static CUresult pop(CUcontext *context) {
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = contexts[--depth];
    return CUDA_SUCCESS;
}
static CUresult error_name(CUresult, const char **text) {
    *text = "stand-in";
    return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *address, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (bytes > capacity - in_use)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *data = aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (data == nullptr)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(data, 0xcd, bytes); /* what nobody wrote shows */
    *address = (CUdeviceptr)(uintptr_t)data;
    allocated[*address] = bytes;
    in_use += bytes;
    return CUDA_SUCCESS;
}
static CUresult free_memory(CUdeviceptr address) {
    std::lock_guard<std::mutex> held(lock);
    auto found = allocated.find(address);
    if (found == allocated.end())
        return CUDA_ERROR_INVALID_HANDLE;
    in_use -= found->second;
    allocated.erase(found);
    free((void *)(uintptr_t)address);
    return CUDA_SUCCESS;
}
static CUresult allocate_host(void **data, size_t bytes, unsigned) {
    *data = aligned_alloc(512, (bytes + 511) / 512 * 512);
    return *data != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
static CUresult free_host(void *data) {
    free(data);
    return CUDA_SUCCESS;
}
static CUresult device_pointer(CUdeviceptr *here, void *data, unsigned) {
    *here = (CUdeviceptr)(uintptr_t)data;
    return CUDA_SUCCESS;
}
static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return CUDA_SUCCESS;
}
static CUresult clear(CUdeviceptr to, unsigned char value, size_t bytes, CUstream) {
    memset((void *)(uintptr_t)to, value, bytes);
    return CUDA_SUCCESS;
}

static CUresult make_stream(CUstream *stream, unsigned) {
    *stream = (CUstream)malloc(1);
    return CUDA_SUCCESS;
}
static CUresult end_stream(CUstream stream) {
    free(stream);
    return CUDA_SUCCESS;
}
static CUresult of_stream(CUstream) {
    return CUDA_SUCCESS;
}
static CUresult wait_event(CUstream, CUevent, unsigned) {
    return CUDA_SUCCESS;
}
static CUresult make_event(CUevent *event, unsigned) {
    *event = (CUevent)malloc(1);
    return CUDA_SUCCESS;
}
static CUresult record(CUevent, CUstream) {
    return CUDA_SUCCESS;
}
static CUresult query(CUevent) {
    return ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
static CUresult of_event(CUevent) {
    return CUDA_SUCCESS;
}
static CUresult end_event(CUevent event) {
    free(event);
    return CUDA_SUCCESS;
}
static CUresult synchronize(void) {
    return CUDA_SUCCESS;
}

static CUresult load(CUmodule *module, const void *image) {
    *module = (CUmodule)(uintptr_t)image;
    return CUDA_SUCCESS;
}
static CUresult unload(CUmodule) {
    return CUDA_SUCCESS;
}
static CUresult find(CUfunction *function, CUmodule, const char *name) {
    *function = (CUfunction)(void *)emulated::find(name);
    return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
static CUresult launch(CUfunction function, unsigned grid_x, unsigned, unsigned, unsigned block_x, unsigned, unsigned,
                       unsigned, CUstream, void **parameters, void **) {
    if (depth == 0 || contexts[depth - 1] != primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    launches++;
    for (unsigned block = 0; block < grid_x; block++) {
        emulated::here = { (int64_t)block, (int64_t)grid_x, (int)block_x };
        ((emulated::body *)(void *)function)(parameters[0]);
    }
    return CUDA_SUCCESS;
}

/* ---- by name ---- */

static const struct {
    const char *name;
    void *function;
} known[] = {
    { "cuInit", (void *)init },
    { "cuDriverGetVersion", (void *)version },
    { "cuDeviceGet", (void *)device },
    { "cuDeviceGetCount", (void *)count },
    { "cuDeviceGetAttribute", (void *)attribute },
    { "cuDevicePrimaryCtxRetain", (void *)retain },
    { "cuDevicePrimaryCtxRelease", (void *)release },
    { "cuCtxGetCurrent", (void *)current },
    { "cuCtxGetDevice", (void *)current_device },
    { "cuCtxPushCurrent", (void *)push },
    { "cuCtxPopCurrent", (void *)pop },
    { "cuCtxSynchronize", (void *)synchronize },
    { "cuGetErrorName", (void *)error_name },
    { "cuGetErrorString", (void *)error_name },
    { "cuMemAlloc", (void *)allocate },
    { "cuMemFree", (void *)free_memory },
    { "cuMemHostAlloc", (void *)allocate_host },
    { "cuMemFreeHost", (void *)free_host },
    { "cuMemHostGetDevicePointer", (void *)device_pointer },
    { "cuMemcpyAsync", (void *)copy },
    { "cuMemsetD8Async", (void *)clear },
    { "cuStreamCreate", (void *)make_stream },
    { "cuStreamDestroy", (void *)end_stream },
    { "cuStreamSynchronize", (void *)of_stream },
    { "cuStreamQuery", (void *)of_stream },
    { "cuStreamWaitEvent", (void *)wait_event },
    { "cuEventCreate", (void *)make_event },
    { "cuEventRecord", (void *)record },
    { "cuEventQuery", (void *)query },
    { "cuEventSynchronize", (void *)of_event },
    { "cuEventDestroy", (void *)end_event },
    { "cuModuleLoadData", (void *)load },
    { "cuModuleUnload", (void *)unload },
    { "cuModuleGetFunction", (void *)find },
    { "cuLaunchKernel", (void *)launch },
};

/* Everything that is not among them. */
static CUresult other(void) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

extern "C" __attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char *name, void **function, int,
                                                                               uint64_t, int *) {
    *function = (void *)other;
    for (const auto &each : known)
        if (strcmp(each.name, name) == 0)
            *function = each.function;
    return CUDA_SUCCESS;
}
