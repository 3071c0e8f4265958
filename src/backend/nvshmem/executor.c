/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on memory of GPUs, with Tutti's own kernels. In a group whose members are all mapped they are those of
 * the CUDA backend, which shares memory of its own by descriptors or fabric handles: blocks of NVSHMEM's heap that lie
 * in one slab are used where they lie, others go through its staging. In any other group everything goes by NVSHMEM
 * (apart.c). Which it is, all members find out together when the group is prepared.
 */
#include "apart.h"

#include <stdlib.h>

#include "backend/cuda/control.h"

/* A group, as it was prepared. */
typedef struct prepared {
    tu_nvshmem *nvshmem;
    tu_cuda_collective *mapped; /* NULL: some members are not mapped … */
    tu_nvshmem_apart *apart;    /* … and these exchange */
} prepared;

/* ---- members that are mapped ---- */

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

static tutti_status run_mapped(const prepared *prepared, tu_device_task *task) {
    const tu_backend_host *host = prepared->nvshmem->cuda.host;
    bool hands_over = !task->multicast && task->shape != TU_DEVICE_TILES;
    task->in_place = reachable(task->in_place, hands_over);
    task->out_place = reachable(task->out_place, hands_over);
    bool taken = task->shape == TU_DEVICE_VDEV || task->shape == TU_DEVICE_TILES; /* by peers: it cannot be staged */
    if (taken && task->in_place.map == NULL && tu_nvshmem_in_heap(prepared->nvshmem, task->in, 1))
        return host->error(TUTTI_ERROR_UNSUPPORTED,
                           "%s: peers take the input of NVSHMEM's heap where it lies, and cannot in group %s: the "
                           "blocks of all members must lie in one slab%s",
                           task->name, host->group_name(prepared->mapped->group),
                           hands_over ? "" : " at the same offset (allocate in the same order on all ranks)");
    return tu_cuda_executor.run(prepared->mapped, task);
}

/* ---- which it is ---- */

/* What a rank says of itself. */
typedef struct view {
    uint64_t domain;     /* tu_nvshmem.domain */
    int32_t has_kernels; /* those that use NVSHMEM's device library */
    int32_t unused;
} view;

/* Whether the members are all mapped, and the first without kernels. */
static tutti_status look(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, view *all, bool *mapped,
                         int *without) {
    const tu_backend_host *host = nvshmem->cuda.host;
    view mine = { .domain = nvshmem->domain, .has_kernels = nvshmem->module != NULL };
    tutti_status status = host->exchange(group, "who is mapped", &mine, sizeof mine, -1, deadline, all, NULL);
    *mapped = mine.domain != 0;
    *without = -1;
    for (int i = 0; i < host->group_size(group) && status == TUTTI_OK; i++) {
        *mapped = *mapped && all[i].domain == mine.domain;
        if (all[i].has_kernels == 0 && *without < 0)
            *without = i;
    }
    return status;
}

static tutti_status prepare_apart(prepared *prepared, tutti_group *group, int *device_index, int64_t deadline,
                                  int without) {
    tu_nvshmem *nvshmem = prepared->nvshmem;
    const tu_backend_host *host = nvshmem->cuda.host;
    if (without >= 0)
        return host->error(TUTTI_ERROR_UNSUPPORTED,
                           "group %s has members whose memory is not mapped: Tutti's collectives reach them with "
                           "NVSHMEM's device library, which was not there when Tutti was built on rank %d",
                           host->group_name(group), without);
    if (host->group_size(group) > TU_CUDA_RANKS)
        return host->error(TUTTI_ERROR_LIMIT, "group %s has %d ranks; on GPUs a group has at most %d",
                           host->group_name(group), host->group_size(group), TU_CUDA_RANKS);
    *device_index = nvshmem->device_index;
    return tu_nvshmem_apart_make(nvshmem, group, deadline, &prepared->apart);
}

static tutti_status prepare_one(prepared *prepared, tutti_group *group, int *device_index, int64_t deadline,
                                view *views) {
    tu_nvshmem *nvshmem = prepared->nvshmem;
    bool mapped = true;
    int without = -1;
    tutti_status status = look(nvshmem, group, deadline, views, &mapped, &without);
    if (status != TUTTI_OK || !mapped)
        return status == TUTTI_OK ? prepare_apart(prepared, group, device_index, deadline, without) : status;
    void *collective = NULL;
    status = tu_cuda_executor.prepare(&nvshmem->cuda, group, device_index, deadline, &collective);
    prepared->mapped = collective;
    return status;
}

static tutti_status prepare(void *state, tutti_group *group, int *device_index, int64_t deadline, void **made) {
    tu_nvshmem *nvshmem = state;
    const tu_backend_host *host = nvshmem->cuda.host;
    prepared *prepared = calloc(1, sizeof *prepared);
    view *views = calloc((size_t)host->group_size(group), sizeof *views);
    tutti_status status = prepared != NULL && views != NULL
                              ? TUTTI_OK
                              : host->error(TUTTI_ERROR_MEMORY, "out of memory for a group on a GPU");
    status = tu_cuda_agree(host, group, "a group of NVSHMEM", deadline, status);
    if (status == TUTTI_OK) {
        prepared->nvshmem = nvshmem;
        status = prepare_one(prepared, group, device_index, deadline, views);
    }
    free(views);
    if (status == TUTTI_OK)
        *made = prepared;
    else
        free(prepared);
    return status;
}

/* ---- the executor ---- */

static tutti_status run(void *opaque, tu_device_task *task) {
    const prepared *prepared = opaque;
    return prepared->apart != NULL ? tu_nvshmem_apart_run(prepared->apart, task) : run_mapped(prepared, task);
}

static tutti_status add_block(void *opaque, const tu_device_place *place) {
    const prepared *prepared = opaque;
    tu_device_place even = reachable(*place, true);
    return prepared->apart != NULL || even.map == NULL ? TUTTI_OK : tu_cuda_executor.add_block(prepared->mapped, &even);
}

static void end(void *opaque) {
    prepared *prepared = opaque;
    if (prepared->apart != NULL)
        tu_nvshmem_apart_end(prepared->apart);
    else
        tu_cuda_executor.end(prepared->mapped);
    free(prepared);
}

static bool serves(void *state, const tutti_group *group, const tu_device_task *task) {
    return tu_cuda_executor.serves(state, group, task);
}

static tutti_status check(void *opaque) {
    const prepared *prepared = opaque;
    return prepared->apart != NULL ? tu_nvshmem_apart_check(prepared->apart) : tu_cuda_executor.check(prepared->mapped);
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
