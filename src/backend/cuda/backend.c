/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA backend: symmetric memory and collectives on GPUs of NVIDIA. Its table.
 */
#include <stdlib.h>

#include "cuda.h"

static tutti_status open_world(const tu_backend_host *host, tutti_world *world, void **state) {
    tu_cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "out of memory for the CUDA backend");
    tutti_status status = tu_cuda_open(host, world, cuda);
    if (status == TUTTI_OK)
        *state = cuda;
    else
        free(cuda);
    return status;
}

static void close_world(void *state) {
    tu_cuda_close(state);
    free(state);
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
    .probe = tu_cuda_probe,
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
