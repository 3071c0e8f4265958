/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA backend: symmetric memory and collectives on GPUs of NVIDIA. Its table, and opening of devices.
 */
#include "cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static tutti_status probe(const tu_backend_host *host, int *device_count) {
    tu_cuda_driver driver;
    tutti_status status = tu_cuda_driver_load(host, &driver);
    if (status != TUTTI_OK)
        return status;
    CUresult result = driver.cuDeviceGetCount(device_count);
    /* The library stays loaded: libcuda cannot be unloaded once it is initialised. */
    if (result != CUDA_SUCCESS || *device_count == 0)
        return host->error(TUTTI_ERROR_UNSUPPORTED, "the CUDA driver is there, but no GPU");
    return TUTTI_OK;
}

static tutti_status open_world(const tu_backend_host *host, tutti_world *world, void **state) {
    tu_cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "out of memory for the CUDA backend");
    cuda->host = host;
    cuda->world = world;
    tutti_status status = tu_cuda_driver_load(host, &cuda->driver);
    if (status != TUTTI_OK)
        goto free_cuda;
    if (cuda->driver.cuDeviceGetCount(&cuda->device_count) != CUDA_SUCCESS || cuda->device_count == 0) {
        status = host->error(TUTTI_ERROR_UNSUPPORTED, "the CUDA driver is there, but no GPU");
        goto free_cuda;
    }
    if (cuda->device_count > TU_CUDA_DEVICES)
        cuda->device_count = TU_CUDA_DEVICES;
    pthread_mutex_init(&cuda->lock, NULL);
    tu_cuda_watch_start(cuda);
    *state = cuda;
    return TUTTI_OK;

free_cuda:
    free(cuda);
    return status;
}

static void close_world(void *state) {
    tu_cuda *cuda = state;
    tu_cuda_watch_stop(cuda);
    tu_cuda_fates_free(cuda);
    for (int i = 0; i < cuda->device_count; i++) {
        tu_cuda_device *device = &cuda->devices[i];
        if (!device->open)
            continue;
        if (tu_cuda_enter(cuda, device) == TUTTI_OK) {
            cuda->driver.cuStreamDestroy(device->stream);
            if (device->module != NULL)
                cuda->driver.cuModuleUnload(device->module);
            tu_cuda_leave(cuda);
        }
        cuda->driver.cuDevicePrimaryCtxRelease(device->device);
    }
    pthread_mutex_destroy(&cuda->lock);
    free(cuda);
}

tutti_status tu_cuda_enter(tu_cuda *cuda, tu_cuda_device *device) {
    CUresult result = cuda->driver.cuCtxPushCurrent(device->context);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, "cuCtxPushCurrent");
}

void tu_cuda_leave(tu_cuda *cuda) {
    CUcontext context;
    cuda->driver.cuCtxPopCurrent(&context);
}

static int attribute(tu_cuda *cuda, CUdevice device, int which) {
    int value = 0;
    return cuda->driver.cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

static const char *const kernel_names[] = {
#define KERNEL(id, name) [TU_CUDA_##id] = name,
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

static tutti_status open_device(tu_cuda *cuda, int index) {
    tu_cuda_device *device = &cuda->devices[index];
    CUresult result = cuda->driver.cuDeviceGet(&device->device, index);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "cuDeviceGet");
    if (!attribute(cuda, device->device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED))
        return cuda->host->error(TUTTI_ERROR_UNSUPPORTED, "GPU %d has no virtual memory management", index);
    device->processors = attribute(cuda, device->device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    device->major = attribute(cuda, device->device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    device->multicast = cuda->driver.cuMulticastCreate != NULL && device->major >= 9 &&
                        attribute(cuda, device->device, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
    cuda->driver.cuDeviceGetUuid(&device->uuid, device->device);
    result = cuda->driver.cuDevicePrimaryCtxRetain(&device->context, device->device);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "cuDevicePrimaryCtxRetain");
    tutti_status status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        goto release_context;
    result = cuda->driver.cuStreamCreate(&device->stream, CU_STREAM_NON_BLOCKING);
    if (result != CUDA_SUCCESS) {
        status = tu_cuda_error(cuda, result, "cuStreamCreate");
        goto leave_context;
    }
    result = load_kernels(cuda, device);
    if (result != CUDA_SUCCESS) {
        status = tu_cuda_error(cuda, result, "loading Tutti's kernels");
        cuda->host->error_append(" (built for compute capability 8.0, 9.0, 10.0 and newer; GPU %d has %d.x)", index,
                                 device->major);
        goto destroy_stream;
    }
    tu_cuda_leave(cuda);
    device->open = true;
    return TUTTI_OK;

destroy_stream:
    cuda->driver.cuStreamDestroy(device->stream);
leave_context:
    tu_cuda_leave(cuda);
release_context:
    cuda->driver.cuDevicePrimaryCtxRelease(device->device);
    return status;
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

static bool can(void *state, tu_ability ability) {
    (void)state;
    /* Between hosts only where fabric handles are shared, and then the rendezvous finds that out by trying. */
    return ability == TU_ABILITY_MAPS_PEERS || ability == TU_ABILITY_PASSES_DESCRIPTORS ||
           ability == TU_ABILITY_SPANS_HOSTS;
}

static const tu_backend_memory memory_part = {
    .size = sizeof(tu_backend_memory),
    .allocate = tu_cuda_allocate,
    .free = tu_cuda_free,
    .export_block = tu_cuda_export,
    .unexport_block = tu_cuda_unexport,
    .import_blocks = tu_cuda_import,
    .unmap = tu_cuda_unmap,
    .clear = tu_cuda_clear,
    .copy = tu_cuda_copy,
    .set32 = tu_cuda_set32,
    .write32 = tu_cuda_write32,
    .has_multicast = tu_cuda_has_multicast,
    .links = tu_cuda_links,
};

static const tu_backend_remote remote_part = {
    .size = sizeof(tu_backend_remote),
    .area_bytes = tu_cuda_area_bytes,
    .attach = tu_cuda_attach,
    .detach = tu_cuda_detach,
    .reset = tu_cuda_reset,
    .put = tu_cuda_put,
    .get = tu_cuda_get,
    .signal = tu_cuda_signal_put,
    .wait_signal = tu_cuda_signal_wait,
    .test_signal = tu_cuda_signal_test,
    .barrier = tu_cuda_barrier,
};

TUTTI_API extern const tu_backend tutti_backend_v2;
const tu_backend tutti_backend_v2 = {
    .size = sizeof(tu_backend),
    .version = TU_BACKEND_VERSION,
    .name = "cuda",
    .device = TUTTI_CUDA,
    .probe = probe,
    .open = open_world,
    .close = close_world,
    .can = can,
    .memory = &memory_part,
    .remote = &remote_part,
    .streams = &tu_cuda_streams,
    .executor = &tu_cuda_executor,
    .forget = tu_cuda_forget,
    .check = tu_cuda_check,
};
