/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for CUDA's runtime, as a library libcudart.so.13 over the stand-in for the driver: what PyTorch needs so
 * that its tensors lie on the GPU that is the CPU. It has memory, streams and events, and no kernels but one that does
 * nothing for a while: operators are run by tests/python/support/standin.py. Loaded before PyTorch (LD_PRELOAD), it is
 * taken for the runtime that PyTorch brings. It refuses what it does not know, and says so.
 */
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include <dlfcn.h>
#include <time.h>

#include <cuda_runtime_api.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

/* ---- the driver, and what went wrong last ---- */

static thread_local cudaError_t last;

static cudaError_t told(int error) {
    if (error != 0 && error != cudaErrorNotReady)
        last = (cudaError_t)error;
    return (cudaError_t)error;
}
static void *found(const char *name) {
    typedef int look_up(const char *, void **, int, uint64_t, int *);
    static look_up *const look = [] {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        return driver != nullptr ? (look_up *)dlsym(driver, "cuGetProcAddress_v2") : nullptr;
    }();
    void *function = nullptr;
    if (look == nullptr || look(name, &function, 13000, 0, nullptr) != 0) {
        fprintf(stderr, "stand-in for the CUDA runtime: there is no stand-in for the driver: %s\n", dlerror());
        abort();
    }
    return function;
}
/* A call of the driver, with the context that a thread of the runtime has. */
template <class... Arguments> static cudaError_t driver(const char *name, Arguments... arguments) {
    static thread_local bool current;
    if (!current) {
        void *context = nullptr;
        ((int (*)(unsigned))found("cuInit"))(0);
        ((int (*)(void **, int))found("cuDevicePrimaryCtxRetain"))(&context, 0);
        ((int (*)(void *))found("cuCtxSetCurrent"))(context);
        current = true;
    }
    return told(((int (*)(Arguments...))found(name))(arguments...));
}

EXPORTED cudaError_t cudaGetLastError() {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
EXPORTED cudaError_t cudaPeekAtLastError() {
    return last;
}
EXPORTED const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaSuccess ? "cudaSuccess" : "an error of the stand-in";
}
EXPORTED const char *cudaGetErrorString(cudaError_t error) {
    return cudaGetErrorName(error);
}
EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult *result) {
    *function = found(name);
    if (result != nullptr)
        *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ---- the device ---- */

EXPORTED cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaRuntimeGetVersion(int *version) {
    return cudaDriverGetVersion(version);
}
EXPORTED cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaSetDevice(int device) {
    return told(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "stand-in");
    properties->totalGlobalMem = (size_t)1 << 30;
    properties->major = 9;
    properties->multiProcessorCount = 4;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxGridSize[0] = 1 << 30;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    return driver("cuDeviceGetAttribute", value, (int)attribute, 0);
}
EXPORTED cudaError_t cudaDeviceGetPCIBusId(char *id, int bytes, int) {
    return driver("cuDeviceGetPCIBusId", id, bytes, 0);
}
EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceSynchronize() {
    return driver("cuCtxSynchronize");
}
EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    return driver("cuThreadExchangeStreamCaptureMode", (int *)mode);
}

/* ---- memory ---- */

EXPORTED cudaError_t cudaMalloc(void **data, size_t bytes) {
    return driver("cuMemAlloc", data, bytes);
}
EXPORTED cudaError_t cudaFree(void *data) {
    return data == nullptr ? cudaSuccess : driver("cuMemFree", data);
}
EXPORTED cudaError_t cudaHostAlloc(void **data, size_t bytes, unsigned flags) {
    return driver("cuMemHostAlloc", data, bytes, flags);
}
EXPORTED cudaError_t cudaFreeHost(void *data) {
    return driver("cuMemFreeHost", data);
}
EXPORTED cudaError_t cudaHostRegister(void *data, size_t bytes, unsigned flags) {
    return driver("cuMemHostRegister", data, bytes, flags);
}
EXPORTED cudaError_t cudaHostUnregister(void *data) {
    return driver("cuMemHostUnregister", data);
}
EXPORTED cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = *total = (size_t)1 << 30;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *data) {
    int type = 0, asked = 2; /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
    void *values[] = { &type };
    cudaError_t error = driver("cuPointerGetAttributes", 1u, &asked, (void **)values, data);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = (cudaMemoryType)type; /* 0: nobody's, 1: the host's, 2: the device's, in both */
    attributes->devicePointer = attributes->hostPointer = (void *)data;
    return error;
}
EXPORTED cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return driver("cuMemcpyAsync", to, from, bytes, stream);
}
EXPORTED cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    cudaError_t error = driver("cuMemcpyAsync", to, from, bytes, (cudaStream_t) nullptr);
    return error != cudaSuccess ? error : driver("cuStreamSynchronize", (cudaStream_t) nullptr);
}
EXPORTED cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    return driver("cuMemsetD8Async", to, (unsigned char)value, bytes, stream);
}
EXPORTED cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, nullptr);
}

/* ---- streams and events ---- */

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return driver("cuStreamCreateWithPriority", stream, flags, priority);
}
EXPORTED cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return driver("cuStreamDestroy", stream);
}
EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
    *priority = 0;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return driver("cuStreamQuery", stream);
}
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return driver("cuStreamSynchronize", stream);
}
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return driver("cuStreamWaitEvent", stream, event, flags);
}
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    unsigned long long number;
    return driver("cuStreamGetCaptureInfo", stream, (int *)status, &number, (void **)nullptr, (const void **)nullptr,
                  (size_t *)nullptr);
}
EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                              unsigned long long *number, cudaGraph_t *, const cudaGraphNode_t **,
                                              const cudaGraphEdgeData **, size_t *) {
    unsigned long long some;
    return driver("cuStreamGetCaptureInfo", stream, (int *)status, number != nullptr ? number : &some, (void **)nullptr,
                  (const void **)nullptr, (size_t *)nullptr);
}
EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return driver("cuEventCreate", event, flags);
}
EXPORTED cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return driver("cuEventDestroy", event);
}
EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return driver("cuEventRecord", event, stream);
}
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
    return driver("cuEventQuery", event);
}
EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return driver("cuEventSynchronize", event);
}
/* Whatever it says is a time: nothing is measured here. */
EXPORTED cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 0.01f;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    return driver("cuLaunchHostFunc", stream, function, argument);
}

/* ---- kernels: their names are known, and none is run but PyTorch's that waits ---- */

static std::mutex lock;
static std::map<const void *, std::string> names; /* under the lock */

EXPORTED void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void **) {}
EXPORTED void __cudaUnregisterFatBinary(void **) {}
EXPORTED char __cudaInitModule(void **) {
    return 1;
}
EXPORTED void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
EXPORTED void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, void *, void *,
                                     void *, void *, int *) {
    std::lock_guard<std::mutex> held(lock);
    names[function] = name;
}
struct configuration {
    dim3 grid, block;
    size_t shared;
    void *stream;
};
static thread_local configuration next;
EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    next = { grid, block, shared, stream };
    return 0;
}
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = next.grid;
    *block = next.block;
    *shared = next.shared;
    *(void **)stream = next.stream;
    return cudaSuccess;
}
static void spin(void *cycles) { /* of a clock of 2 GHz */
    int64_t nanoseconds = (int64_t)(intptr_t)cycles / 2;
    struct timespec pause = { (time_t)(nanoseconds / 1000000000), (long)(nanoseconds % 1000000000) };
    nanosleep(&pause, nullptr);
}
static cudaError_t launch(const void *function, void **arguments, cudaStream_t stream) {
    std::string name;
    {
        std::lock_guard<std::mutex> held(lock);
        auto entry = names.find(function);
        name = entry != names.end() ? entry->second : "unknown";
    }
    if (name.find("spin_kernel") != std::string::npos) /* torch.cuda._sleep(cycles) */
        return cudaLaunchHostFunc(stream, spin, (void *)(intptr_t) * (int64_t *)arguments[0]);
    fprintf(stderr, "stand-in for the CUDA runtime: there is no kernel %s\n", name.c_str());
    return told(cudaErrorNotSupported);
}
EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **arguments, size_t,
                                        cudaStream_t stream) {
    return launch((const void *)kernel, arguments, stream);
}
EXPORTED cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
    return launch(function, arguments, stream);
}
EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **arguments) {
    return launch(function, arguments, how->stream);
}
EXPORTED cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3, dim3, void **arguments, size_t,
                                                 cudaStream_t stream) {
    return launch(function, arguments, stream);
}

/* ---- everything else: see refused.c ---- */

extern "C" cudaError_t standin_refused(const char *name) {
    fprintf(stderr, "stand-in for the CUDA runtime: it has no %s\n", name);
    return told(cudaErrorNotSupported);
}
