/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on memory of GPUs, with Tutti's own kernels: the executor of the CUDA backend. It shares memory of its
 * own by descriptors or fabric handles. Blocks of NVSHMEM's heap that lie evenly are used where they lie, others go
 * through its staging.
 */
#include <string.h>

#include "backend/cuda/control.h"
#include "inner.h"

/* What the kernels cannot reach where it lies counts as any other memory. */
static tu_device_place reachable(tu_device_place place) {
    const tu_nvshmem_map *map = place.map != NULL ? place.map->handle : NULL;
    if (map != NULL && map->cuda.base == 0)
        memset(&place, 0, sizeof place);
    return place;
}

static tutti_status run(void *prepared, tu_device_task *task) {
    bool symmetric = task->in_place.map != NULL;
    task->in_place = reachable(task->in_place);
    if (task->shape == TU_DEVICE_VDEV && symmetric &&
        task->in_place.map == NULL) { /* peers pull: it cannot be staged */
        const tu_cuda_collective *collective = prepared;
        return collective->cuda->host->error(
            TUTTI_ERROR_UNSUPPORTED,
            "%s: the input of NVSHMEM's heap is not mapped evenly by the members of group %s: its block must lie at "
            "the same offset on all of them (allocate in the same order), and all must be mapped",
            task->name, collective->cuda->host->group_name(collective->group));
    }
    task->out_place = reachable(task->out_place);
    return tu_cuda_executor.run(prepared, task);
}

static tutti_status add_block(void *prepared, const tu_device_place *place) {
    tu_device_place even = reachable(*place);
    return even.map == NULL ? TUTTI_OK : tu_cuda_executor.add_block(prepared, &even);
}

static tutti_status prepare(void *state, tutti_group *group, int *device_index, int64_t deadline, void **prepared) {
    return tu_cuda_executor.prepare(state, group, device_index, deadline, prepared);
}

static void end(void *prepared) {
    tu_cuda_executor.end(prepared);
}

static bool serves(void *state, const tutti_group *group, const tu_device_task *task) {
    return tu_cuda_executor.serves(state, group, task);
}

static tutti_status check(void *prepared) {
    return tu_cuda_executor.check(prepared);
}

const tu_device_executor tu_nvshmem_executor = {
    .size = sizeof(tu_device_executor),
    .version = TU_BACKEND_VERSION,
    .prepare = prepare,
    .end = end,
    .run = run,
    .add_block = add_block,
    .serves = serves,
    .check = check,
    .strided = true,
};
