/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices: opened on first need, in their primary contexts, with all kernels loaded.
 *
 * What the groups on a device need of pinned and device memory is allocated here, once: later allocations could make
 * the driver wait for kernels that wait for other ranks.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define HIGH_PRIORITY (-5) /* the driver takes the nearest that there is */

/* Which of this thread's uses of a device, one inside the other, pushed a context: a bit each. */
static _Thread_local uint32_t pushed, uses;

/* Pushes the context only where another one is current: most programs have made the device current themselves. */
tutti_status tu_cuda_enter(tu_cuda *cuda, tu_cuda_device *device) {
    CUcontext current = NULL;
    CUresult result = cuda->driver.cuCtxGetCurrent(&current);
    uint32_t bit = UINT32_C(1) << uses;
    pushed &= ~bit;
    if (result != CUDA_SUCCESS || current != device->context) {
        result = cuda->driver.cuCtxPushCurrent(device->context);
        if (result != CUDA_SUCCESS)
            return tu_cuda_error(cuda, result, "cuCtxPushCurrent");
        pushed |= bit;
    }
    uses++;
    return TUTTI_OK;
}

void tu_cuda_leave(tu_cuda *cuda) {
    CUcontext context;
    uses--;
    if ((pushed >> uses & 1) != 0)
        cuda->driver.cuCtxPopCurrent(&context);
}

tutti_status tu_cuda_turn_take(tu_cuda *cuda, tu_cuda_turn *turn, int64_t timeout_ns) {
    if (__builtin_expect(!atomic_exchange_explicit(&turn->taken, true, memory_order_acquire), 1)) /* pairs with give */
        return TUTTI_OK;
    int64_t deadline = cuda->host->now() + timeout_ns;
    while (atomic_exchange_explicit(&turn->taken, true, memory_order_acquire)) {
        sched_yield();
        if (cuda->host->now() > deadline)
            return cuda->host->error(TUTTI_ERROR_TIMEOUT,
                                     "another thread of this rank was in an operation of the same group on the GPU "
                                     "until the deadline");
    }
    return TUTTI_OK;
}

void tu_cuda_turn_give(tu_cuda_turn *turn) {
    atomic_store_explicit(&turn->taken, false, memory_order_release);
}

static int attribute(tu_cuda *cuda, CUdevice device, int which) {
    int value = 0;
    return cuda->driver.cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

static const char *const kernel_names[] = {
#define KERNEL(id, name) [TU_CUDA_##id] = #name,
#include "kernels.def"
#undef KERNEL
};

const char *tu_cuda_kernel_name(tu_cuda_kernel kernel) {
    return kernel_names[kernel];
}

/* All of them, now: the driver would load a kernel at its first launch, and wait for the device to be idle, while
 * another rank's kernel on it waits for that very launch. */
static CUresult load_kernels(tu_cuda *cuda, tu_cuda_device *device) {
    CUresult result = cuda->driver.cuModuleLoadData(&device->module, tu_cuda_image);
    for (int i = 0; result == CUDA_SUCCESS && i < TU_CUDA_KERNEL_COUNT; i++) {
        result = cuda->driver.cuModuleGetFunction(&device->kernels[i], device->module, kernel_names[i]);
        if (result == CUDA_SUCCESS && cuda->driver.cuFuncLoad != NULL)
            result = cuda->driver.cuFuncLoad(device->kernels[i]);
    }
    return result;
}

static CUresult allocate_words(tu_cuda *cuda, tu_cuda_device *device) {
    const tu_cuda_driver *driver = &cuda->driver;
    size_t words = TU_CUDA_GROUPS * sizeof(tu_cuda_words), reports = TU_CUDA_GROUPS * sizeof(tu_cuda_report);
    unsigned flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
    CUresult result = driver->cuMemAlloc(&device->words, words);
    if (result == CUDA_SUCCESS)
        result = driver->cuMemHostAlloc((void **)&device->reports, reports, flags);
    if (result == CUDA_SUCCESS)
        result = driver->cuMemHostGetDevicePointer(&device->reports_here, device->reports, 0);
    if (result == CUDA_SUCCESS)
        result = driver->cuMemHostAlloc((void **)&device->answer, sizeof *device->answer, flags);
    if (result == CUDA_SUCCESS)
        result = driver->cuMemHostGetDevicePointer(&device->answer_here, device->answer, 0);
    if (result == CUDA_SUCCESS)
        result = driver->cuMemHostAlloc((void **)&device->bounce, TU_CUDA_BOUNCES * TU_CUDA_BOUNCE, flags);
    if (result == CUDA_SUCCESS)
        result = driver->cuMemHostGetDevicePointer(&device->bounce_here, device->bounce, 0);
    if (result == CUDA_SUCCESS) {
        memset(device->reports, 0, reports);
        result = driver->cuMemsetD8Async(device->words, 0, words, device->stream);
    }
    return result == CUDA_SUCCESS ? driver->cuStreamSynchronize(device->stream) : result;
}

static void free_words(tu_cuda *cuda, tu_cuda_device *device) {
    if (device->bounce != NULL)
        cuda->driver.cuMemFreeHost(device->bounce);
    device->bounce = NULL;
    if (device->answer != NULL)
        cuda->driver.cuMemFreeHost(device->answer);
    if (device->reports != NULL)
        cuda->driver.cuMemFreeHost(device->reports);
    if (device->words != 0)
        cuda->driver.cuMemFree(device->words);
    device->answer = NULL;
    device->reports = NULL;
    device->words = 0;
}

/* With the context entered: everything that lives as long as the device is open. */
static tutti_status equip(tu_cuda *cuda, tu_cuda_device *device, int index) {
    CUresult result = cuda->driver.cuStreamCreateWithPriority(&device->stream, CU_STREAM_NON_BLOCKING, HIGH_PRIORITY);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "cuStreamCreateWithPriority");
    tutti_status status = TUTTI_OK;
    result = load_kernels(cuda, device);
    if (result != CUDA_SUCCESS) {
        status = tu_cuda_error(cuda, result, "loading Tutti's kernels");
        cuda->host->error_append(
            " (GPU %d has compute capability %d.x; TUTTI_CUDA_ARCHITECTURES at build time says for "
            "which Tutti has kernels)",
            index, device->major);
    } else if ((result = allocate_words(cuda, device)) != CUDA_SUCCESS) {
        status = tu_cuda_error(cuda, result, "allocating the words of groups");
    }
    if (status != TUTTI_OK) {
        free_words(cuda, device);
        if (device->module != NULL)
            cuda->driver.cuModuleUnload(device->module);
        cuda->driver.cuStreamDestroy(device->stream);
        device->module = NULL;
    }
    return status;
}

static tutti_status open_device(tu_cuda *cuda, int index) {
    tu_cuda_device *device = &cuda->devices[index];
    CUresult result = cuda->driver.cuDeviceGet(&device->device, index);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "cuDeviceGet");
    if (!attribute(cuda, device->device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED))
        return cuda->host->error(TUTTI_ERROR_UNSUPPORTED, "GPU %d has no virtual memory management", index);
    result = cuda->driver.cuDeviceGetAttribute(&device->processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                               device->device);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuDeviceGetAttribute(&device->major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                                                   device->device);
    if (result != CUDA_SUCCESS) /* what ranks launch together is made for them: a guess would leave the others alone */
        return tu_cuda_error(cuda, result, "cuDeviceGetAttribute");
    device->multicast = cuda->driver.cuMulticastCreate != NULL && device->major >= 9 &&
                        attribute(cuda, device->device, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
    device->rdma = attribute(cuda, device->device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    cuda->driver.cuDeviceGetUuid(&device->uuid, device->device);
    device->words_taken = calloc(TU_CUDA_GROUPS, sizeof *device->words_taken);
    if (device->words_taken == NULL)
        return cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for GPU %d", index);
    tutti_status status = TUTTI_OK;
    result = cuda->driver.cuDevicePrimaryCtxRetain(&device->context, device->device);
    if (result != CUDA_SUCCESS) {
        status = tu_cuda_error(cuda, result, "cuDevicePrimaryCtxRetain");
        goto free_taken;
    }
    status = tu_cuda_enter(cuda, device);
    if (status == TUTTI_OK) {
        status = equip(cuda, device, index);
        tu_cuda_leave(cuda);
    }
    if (status != TUTTI_OK)
        goto release_context;
    pthread_mutex_init(&device->answer_lock, NULL);
    pthread_mutex_init(&device->bounce_lock, NULL);
    pthread_mutex_init(&device->use_lock, NULL);
    device->open = true;
    return TUTTI_OK;

release_context:
    cuda->driver.cuDevicePrimaryCtxRelease(device->device);
free_taken:
    free(device->words_taken);
    return status;
}

void tu_cuda_device_close(tu_cuda *cuda, tu_cuda_device *device) {
    if (!device->open)
        return;
    if (tu_cuda_enter(cuda, device) == TUTTI_OK) {
        for (int i = 0; i < TU_CUDA_USERS; i++) {
            if (device->uses[i].event != NULL)
                cuda->driver.cuEventDestroy(device->uses[i].event);
        }
        for (int i = 0; i < TU_CUDA_BOUNCES; i++) {
            if (device->bounced[i] != NULL)
                cuda->driver.cuEventDestroy(device->bounced[i]);
        }
        free_words(cuda, device);
        cuda->driver.cuStreamDestroy(device->stream);
        cuda->driver.cuModuleUnload(device->module);
        tu_cuda_leave(cuda);
    }
    cuda->driver.cuDevicePrimaryCtxRelease(device->device);
    pthread_mutex_destroy(&device->use_lock);
    pthread_mutex_destroy(&device->bounce_lock);
    pthread_mutex_destroy(&device->answer_lock);
    free(device->words_taken);
    device->open = false;
}

tutti_status tu_cuda_device_open(tu_cuda *cuda, int index, tu_cuda_device **device, int *chosen) {
    if (index < 0) { /* the caller's current device, else the one of its local rank */
        CUcontext context = NULL;
        CUdevice current;
        index = cuda->host->local_rank(cuda->world) % cuda->device_count;
        if (cuda->driver.cuCtxGetCurrent(&context) == CUDA_SUCCESS && context != NULL &&
            cuda->driver.cuCtxGetDevice(&current) == CUDA_SUCCESS)
            index = current;
    }
    if (index >= cuda->device_count)
        return cuda->host->error(TUTTI_ERROR_RANGE, "GPU %d must be in [0, %d)", index, cuda->device_count);
    pthread_mutex_lock(&cuda->lock);
    tutti_status status = cuda->devices[index].open ? TUTTI_OK : open_device(cuda, index);
    pthread_mutex_unlock(&cuda->lock);
    *device = &cuda->devices[index];
    *chosen = index;
    return status;
}
