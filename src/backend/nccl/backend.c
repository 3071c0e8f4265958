/* SPDX-License-Identifier: Apache-2.0
 *
 * The NCCL backend: its table, and its life in a world.
 */
#include <stdlib.h>

#include "nccl.h"

static tutti_status probe(const tu_backend_host *host, int *device_count) {
    tu_nccl_library library;
    tutti_status status = tu_nccl_library_load(host, &library);
    return status == TUTTI_OK ? tu_cuda_probe(host, device_count) : status;
}

static void describe(const tu_backend_host *host, char *text, size_t bytes) {
    tu_nccl_library library;
    if (tu_nccl_library_load(host, &library) == TUTTI_OK)
        tu_nccl_library_describe(&library, text, bytes);
    else
        text[0] = 0;
}

static tutti_status open_world(const tu_backend_host *host, tutti_world *world, void **state) {
    tu_nccl *nccl = calloc(1, sizeof *nccl);
    if (nccl == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "out of memory for the NCCL backend");
    tutti_status status = tu_nccl_library_load(host, &nccl->library);
    if (status == TUTTI_OK)
        status = tu_cuda_open(host, world, &nccl->cuda);
    if (status != TUTTI_OK) {
        free(nccl);
        return status;
    }
    pthread_mutex_init(&nccl->lock, NULL);
    tu_nccl_watch_start(nccl);
    *state = nccl;
    return TUTTI_OK;
}

static void close_world(void *state) {
    tu_nccl *nccl = state;
    tu_nccl_groups_free(nccl);
    tu_nccl_watch_stop(nccl);
    tu_cuda_close(&nccl->cuda);
    pthread_mutex_destroy(&nccl->lock);
    free(nccl);
}

static bool can(void *state, tu_ability ability) {
    (void)state;
    /* Memory of peers has addresses inside an LSA domain; a rendezvous finds out whether there is one. */
    return ability == TU_ABILITY_MAPS_PEERS || ability == TU_ABILITY_SPANS_HOSTS;
}

static tutti_status check(void *state, tutti_group *group) {
    tutti_status status = tu_cuda_check(state, group);
    return status == TUTTI_OK ? tu_nccl_check(state, group) : status;
}

TUTTI_API extern const tu_backend tutti_backend_v2;
const tu_backend tutti_backend_v2 = {
    .size = sizeof(tu_backend),
    .version = TU_BACKEND_VERSION,
    .name = "nccl",
    .device = TUTTI_CUDA,
    .probe = probe,
    .open = open_world,
    .close = close_world,
    .can = can,
    .memory = &tu_nccl_memory,
    .remote = &tu_cuda_remote,
    .streams = &tu_cuda_streams,
    .executor = &tu_nccl_executor,
    .forget = tu_nccl_forget,
    .check = check,
    .describe = describe,
    .communicator = tu_nccl_bring,
};
