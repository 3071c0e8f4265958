/* SPDX-License-Identifier: Apache-2.0
 *
 * The NVSHMEM backend: symmetric memory of GPUs on several hosts, and beside programs that use NVSHMEM. Its table, and
 * its life in a world.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "inner.h"

static tutti_status probe(const tu_backend_host *host, int *device_count) {
    const tu_nvshmem_library *library;
    tutti_status status = tu_nvshmem_library_get(host, &library);
    return status == TUTTI_OK ? tu_cuda_probe(host, device_count) : status;
}

static tutti_status open_world(const tu_backend_host *host, tutti_world *world, void **state) {
    tu_nvshmem *nvshmem = calloc(1, sizeof *nvshmem);
    if (nvshmem == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "out of memory for the NVSHMEM backend");
    tutti_status status = tu_nvshmem_library_get(host, &nvshmem->library);
    if (status == TUTTI_OK)
        status = tu_cuda_open(host, world, &nvshmem->cuda);
    if (status != TUTTI_OK)
        goto free_nvshmem;
    status = tu_nvshmem_begin(nvshmem);
    if (status != TUTTI_OK)
        goto close_cuda;
    pthread_mutex_init(&nvshmem->heap_lock, NULL);
    pthread_mutex_init(&nvshmem->alias_lock, NULL);
    pthread_mutex_init(&nvshmem->bounce_lock, NULL);
    *state = nvshmem;
    return TUTTI_OK;

close_cuda:
    tu_cuda_close(&nvshmem->cuda);
free_nvshmem:
    free(nvshmem);
    return status;
}

static void drop_device_things(tu_nvshmem *nvshmem) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    if (tu_cuda_enter(&nvshmem->cuda, nvshmem->device) != TUTTI_OK)
        return;
    if (nvshmem->bounced != NULL)
        driver->cuEventDestroy(nvshmem->bounced);
    tu_cuda_leave(&nvshmem->cuda);
}

static void close_world(void *state) {
    tu_nvshmem *nvshmem = state;
    if (nvshmem->lost) { /* a thread that did not come back may still look at it */
        tu_cuda_watch_stop(&nvshmem->cuda);
        return;
    }
    tu_nvshmem_alias_drop(nvshmem, NULL);
    drop_device_things(nvshmem);
    tu_cuda_close(&nvshmem->cuda);
    tu_nvshmem_end(nvshmem);
    pthread_mutex_destroy(&nvshmem->bounce_lock);
    pthread_mutex_destroy(&nvshmem->alias_lock);
    pthread_mutex_destroy(&nvshmem->heap_lock);
    free(nvshmem);
}

static bool can(void *state, tu_ability ability) {
    const tu_nvshmem *nvshmem = state;
    return ability == TU_ABILITY_SPANS_HOSTS || (ability == TU_ABILITY_MAPS_PEERS && nvshmem->mapping);
}

static tutti_status module(void *state, void *given) {
    tu_nvshmem *nvshmem = state;
    tutti_status status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status != TUTTI_OK)
        return status;
    int result = nvshmem->library->nvshmemx_cumodule_init(given);
    tu_cuda_leave(&nvshmem->cuda);
    if (result != 0)
        return nvshmem->cuda.host->error(TUTTI_ERROR_BACKEND,
                                         "NVSHMEM does not take the module (nvshmemx_cumodule_init: %d): was it linked "
                                         "with the device library of NVSHMEM %d.%d, and does it use it?",
                                         result, nvshmem->library->version / 10000,
                                         nvshmem->library->version / 100 % 100);
    return TUTTI_OK;
}

static tutti_status team(void *state, tutti_group *group, int64_t deadline, int32_t *result) {
    return tu_nvshmem_team_get(state, group, deadline, false, result);
}

static void describe(const tu_backend_host *host, char *text, size_t bytes) {
    const tu_nvshmem_library *library;
    Dl_info place;
    text[0] = 0;
    if (tu_nvshmem_library_get(host, &library) != TUTTI_OK)
        return; /* probe says why */
    bool known = dladdr((void *)(uintptr_t)library->nvshmem_malloc, &place) != 0;
    snprintf(text, bytes, "NVSHMEM %d.%d.%d (%s): %s", library->version / 10000, library->version / 100 % 100,
             library->version % 100, known ? place.dli_fname : TU_NVSHMEM_LIBRARY,
             tu_nvshmem_has_image[0] != 0
                 ? "mapped peers, and others by Tutti's kernels on its device library"
                 : "mapped peers only, since its device library was not there when Tutti was built");
}

TUTTI_API extern const tu_backend tutti_backend_v2;
const tu_backend tutti_backend_v2 = {
    .size = sizeof(tu_backend),
    .version = TU_BACKEND_VERSION,
    .name = "nvshmem",
    .device = TUTTI_CUDA,
    .probe = probe,
    .open = open_world,
    .close = close_world,
    .can = can,
    .memory = &tu_nvshmem_memory,
    .remote = &tu_nvshmem_remote,
    .streams = &tu_cuda_streams,
    .executor = &tu_nvshmem_executor,
    .forget = tu_nvshmem_forget,
    .check = tu_cuda_check,
    .join = tu_nvshmem_join,
    .grow = tu_nvshmem_grow,
    .module = module,
    .describe = describe,
    .team = team,
};
