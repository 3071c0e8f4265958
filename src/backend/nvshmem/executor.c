/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on memory of GPUs, with Tutti's own kernels: the executor of the CUDA backend. It shares memory of its
 * own by descriptors or fabric handles. Blocks of NVSHMEM's heap that lie in one slab are used where they lie, others
 * go through its staging.
 */
#include "backend/cuda/control.h"
#include "inner.h"

/* Where the kernels find it; what they cannot reach where it lies counts as any other memory. Blocks at different
 * offsets are found by an address in the slab, which the kernels hand over to each other; those of multicast and of
 * tiles do not. */
static tu_device_place reachable(tu_device_place place, bool hands_over) {
    const tu_nvshmem_map *map = place.map != NULL ? place.map->handle : NULL;
    if (map == NULL || map->cuda.base != 0)
        return place;
    if (hands_over && map->slab.base != 0)
        return (
            tu_device_place){ .map = &map->slab_map, .index = place.index, .offset = place.offset + map->slab_offset };
    return (tu_device_place){ .map = NULL };
}

static tutti_status run(void *prepared, tu_device_task *task) {
    const tu_cuda_collective *collective = prepared;
    const tu_nvshmem *nvshmem = (const tu_nvshmem *)collective->cuda; /* which begins with it */
    bool hands_over = !task->multicast && task->shape != TU_DEVICE_TILES;
    task->in_place = reachable(task->in_place, hands_over);
    task->out_place = reachable(task->out_place, hands_over);
    bool taken = task->shape == TU_DEVICE_VDEV || task->shape == TU_DEVICE_TILES; /* by peers: it cannot be staged */
    if (taken && task->in_place.map == NULL && tu_nvshmem_in_heap(nvshmem, task->in, 1))
        return collective->cuda->host->error(
            TUTTI_ERROR_UNSUPPORTED,
            "%s: peers take the input of NVSHMEM's heap where it lies, and cannot in group %s: all members must be "
            "mapped, and their blocks lie in one slab%s",
            task->name, collective->cuda->host->group_name(collective->group),
            hands_over ? "" : " at the same offset (allocate in the same order on all ranks)");
    return tu_cuda_executor.run(prepared, task);
}

static tutti_status add_block(void *prepared, const tu_device_place *place) {
    tu_device_place even = reachable(*place, true);
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
