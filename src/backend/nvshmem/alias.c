/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of the CUDA backend find member r's block at base + r * stride. NVSHMEM maps the heaps of others one
 * behind the other, beginning with this rank's own: the order differs from rank to rank. So the physical memory of a
 * slab, of all members of a group, is mapped a second time, in the group's order; that costs addresses, and no memory.
 *
 * Whether a group's blocks can be reached like that must have one answer on all members, since signals are laid out
 * differently else: by what their tickets say (tu_nvshmem_ticket), and by their offsets, which must be equal.
 */
#include <stdlib.h>
#include <string.h>

#include "inner.h"

/* One piece of physical memory under a slab: as it is mapped here. */
typedef struct chunk {
    CUdeviceptr base;
    size_t bytes;
} chunk;

/* The piece under an address of this rank's own heap. */
static CUresult chunk_at(const tu_nvshmem *nvshmem, CUdeviceptr address, chunk *chunk) {
    return nvshmem->cuda.driver.cuMemGetAddressRange(&chunk->base, &chunk->bytes, address);
}

/* A number for the set of PEs that are mapped here. Every rank is mapped by itself: so all ranks of a group that have
 * the same number are in one set, and each of them maps all. */
static uint64_t mapped_set(const tu_nvshmem *nvshmem) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int pe = 0; pe < nvshmem->size; pe++) {
        if (nvshmem->library->nvshmem_ptr(nvshmem->slabs[0].base, pe) == NULL)
            continue;
        for (int shift = 0; shift < 32; shift += 8)
            hash = (hash ^ ((unsigned)pe >> shift & 255)) * UINT64_C(0x100000001b3);
    }
    return hash | 1;
}

void tu_nvshmem_find_domain(tu_nvshmem *nvshmem) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    CUmemGenericAllocationHandle handle;
    nvshmem->domain = nvshmem->mapping ? mapped_set(nvshmem) : 0;
    nvshmem->even = false;
    if (nvshmem->domain == 0 || tu_cuda_enter(&nvshmem->cuda, nvshmem->device) != TUTTI_OK)
        return;
    if (driver->cuMemRetainAllocationHandle(&handle, nvshmem->slabs[0].base) == CUDA_SUCCESS) {
        driver->cuMemRelease(handle);
        nvshmem->even = true;
    }
    tu_cuda_leave(&nvshmem->cuda);
}

/* Maps one member's pieces, one after the other. The context is entered. */
static CUresult map_member(tu_nvshmem *nvshmem, tu_nvshmem_alias *alias, int member, int pe) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    const tu_nvshmem_slab *slab = &nvshmem->slabs[alias->slab];
    CUdeviceptr own = (CUdeviceptr)(uintptr_t)slab->base, end = own + slab->bytes;
    CUdeviceptr theirs = (CUdeviceptr)(uintptr_t)nvshmem->library->nvshmem_ptr(slab->base, pe);
    CUdeviceptr to = alias->base + (CUdeviceptr)member * alias->stride;
    CUresult result = CUDA_SUCCESS;
    chunk chunk = { .base = alias->first };
    for (CUdeviceptr from = alias->first; from < end && result == CUDA_SUCCESS; from += chunk.bytes) {
        CUmemGenericAllocationHandle handle;
        result = chunk_at(nvshmem, from, &chunk);
        if (result == CUDA_SUCCESS)
            result = driver->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)(theirs + (from - own)));
        if (result != CUDA_SUCCESS)
            break;
        result = tu_cuda_map_at(&nvshmem->cuda, nvshmem->device, to + (from - alias->first), chunk.bytes, handle);
        driver->cuMemRelease(handle); /* the mapping keeps the memory */
        if (result == CUDA_SUCCESS)
            alias->mapped += chunk.bytes; /* one behind the other */
    }
    return result;
}

/* The addresses that the pieces under a slab take. The context is entered. */
static CUresult measure(const tu_nvshmem *nvshmem, tu_nvshmem_alias *alias) {
    const tu_nvshmem_slab *slab = &nvshmem->slabs[alias->slab];
    CUdeviceptr own = (CUdeviceptr)(uintptr_t)slab->base, end = own + slab->bytes;
    chunk chunk;
    CUresult result = chunk_at(nvshmem, own, &chunk);
    alias->first = chunk.base;
    while (result == CUDA_SUCCESS && chunk.base + chunk.bytes < end)
        result = chunk_at(nvshmem, chunk.base + chunk.bytes, &chunk);
    alias->stride = result == CUDA_SUCCESS ? chunk.base + chunk.bytes - alias->first : 0;
    return result;
}

static tutti_status make(tu_nvshmem *nvshmem, tu_nvshmem_alias *alias, const int *pes) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    tutti_status status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = measure(nvshmem, alias);
    if (result == CUDA_SUCCESS)
        result = driver->cuMemAddressReserve(&alias->base, alias->stride * (size_t)alias->count, 0, 0, 0);
    for (int i = 0; i < alias->count && result == CUDA_SUCCESS; i++) {
        result = map_member(nvshmem, alias, i, pes[i]);
        if (result != CUDA_SUCCESS)
            nvshmem->cuda.host->error_at_fault(i);
    }
    tu_cuda_leave(&nvshmem->cuda);
    return result == CUDA_SUCCESS
               ? TUTTI_OK
               : tu_cuda_error(&nvshmem->cuda, result, "mapping NVSHMEM's heap in the order of a group");
}

static void unmake(tu_nvshmem *nvshmem, tu_nvshmem_alias *alias) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    if (alias->base != 0 && tu_cuda_enter(&nvshmem->cuda, nvshmem->device) == TUTTI_OK) {
        if (driver->cuCtxSynchronize() == CUDA_SUCCESS) { /* nothing uses it any more */
            if (alias->mapped > 0)
                driver->cuMemUnmap(alias->base, alias->mapped);
            driver->cuMemAddressFree(alias->base, alias->stride * (size_t)alias->count);
        }
        tu_cuda_leave(&nvshmem->cuda);
    }
    free(alias);
}

tutti_status tu_nvshmem_alias_get(tu_nvshmem *nvshmem, const tutti_group *group, int slab, int count, const int *pes,
                                  uint64_t *base, uint64_t *stride) {
    pthread_mutex_lock(&nvshmem->alias_lock);
    tu_nvshmem_alias *alias = nvshmem->aliases;
    while (alias != NULL && (alias->group != group || alias->slab != slab))
        alias = alias->next;
    tutti_status status = TUTTI_OK;
    if (alias == NULL) {
        alias = calloc(1, sizeof *alias);
        if (alias == NULL) {
            status = nvshmem->cuda.host->error(TUTTI_ERROR_MEMORY, "out of memory for a mapping of %d heaps", count);
        } else {
            *alias = (tu_nvshmem_alias){ .group = group, .slab = slab, .count = count };
            status = make(nvshmem, alias, pes);
        }
        if (status == TUTTI_OK) {
            alias->next = nvshmem->aliases;
            nvshmem->aliases = alias;
        } else if (alias != NULL) {
            unmake(nvshmem, alias);
        }
    }
    if (status == TUTTI_OK) {
        *base = alias->base + ((CUdeviceptr)(uintptr_t)nvshmem->slabs[slab].base - alias->first);
        *stride = alias->stride;
    }
    pthread_mutex_unlock(&nvshmem->alias_lock);
    return status;
}

void tu_nvshmem_alias_drop(tu_nvshmem *nvshmem, const tutti_group *group) {
    tu_nvshmem_alias *dropped = NULL;
    pthread_mutex_lock(&nvshmem->alias_lock);
    for (tu_nvshmem_alias **link = &nvshmem->aliases; *link != NULL;) {
        tu_nvshmem_alias *alias = *link;
        if (group != NULL && alias->group != group) {
            link = &alias->next;
            continue;
        }
        *link = alias->next;
        alias->next = dropped;
        dropped = alias;
    }
    pthread_mutex_unlock(&nvshmem->alias_lock);
    while (dropped !=
           NULL) { /* which waits for the device: not with the lock, which another thread may want meanwhile */
        tu_nvshmem_alias *next = dropped->next;
        unmake(nvshmem, dropped);
        dropped = next;
    }
}
