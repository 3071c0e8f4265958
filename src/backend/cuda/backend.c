/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA backend: symmetric memory and collectives on GPUs of NVIDIA. Its table, and its life in a world.
 */
#include <stdlib.h>

#include "cuda.h"

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
    tu_cuda_groups_free(cuda);
    for (int i = 0; i < cuda->device_count; i++)
        tu_cuda_device_close(cuda, &cuda->devices[i]);
    pthread_mutex_destroy(&cuda->lock);
    free(cuda);
}

static bool can(void *state, tu_ability ability) {
    (void)state;
    /* Between hosts only where fabric handles are shared: a rendezvous finds that out by trying. */
    return ability == TU_ABILITY_MAPS_PEERS || ability == TU_ABILITY_PASSES_DESCRIPTORS ||
           ability == TU_ABILITY_SPANS_HOSTS;
}

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
    .memory = &tu_cuda_memory,
    .remote = &tu_cuda_remote,
    .streams = &tu_cuda_streams,
    .executor = &tu_cuda_executor,
    .forget = tu_cuda_forget,
    .check = tu_cuda_check,
};
