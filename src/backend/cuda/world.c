/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of the CUDA backend in a world. Backends for libraries on top of CUDA begin with the same: their state's
 * first member is a tu_cuda, so that streams, signals and kernels of this folder serve them too.
 */
#include "cuda.h"

tutti_status tu_cuda_open(const tu_backend_host *host, tutti_world *world, tu_cuda *cuda) {
    cuda->host = host;
    cuda->world = world;
    tutti_status status = tu_cuda_driver_load(host, &cuda->driver);
    if (status != TUTTI_OK)
        return status;
    if (cuda->driver.cuDeviceGetCount(&cuda->device_count) != CUDA_SUCCESS || cuda->device_count == 0)
        return host->error(TUTTI_ERROR_UNSUPPORTED, "the CUDA driver is there, but no GPU");
    if (cuda->device_count > TU_CUDA_DEVICES)
        cuda->device_count = TU_CUDA_DEVICES;
    pthread_mutex_init(&cuda->lock, NULL);
    tu_cuda_watch_start(cuda);
    return TUTTI_OK;
}

void tu_cuda_close(tu_cuda *cuda) {
    tu_cuda_watch_stop(cuda);
    tu_cuda_groups_free(cuda);
    for (int i = 0; i < cuda->device_count; i++)
        tu_cuda_device_close(cuda, &cuda->devices[i]);
    pthread_mutex_destroy(&cuda->lock);
}

tutti_status tu_cuda_probe(const tu_backend_host *host, int *device_count) {
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
