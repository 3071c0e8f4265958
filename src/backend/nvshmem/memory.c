/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of NVSHMEM's heap. Allocating and freeing are this rank's business alone; a rendezvous tells the members at
 * which offset of which slab each block lies. A member whose heap is mapped here has an address; another is reached by
 * rank and offset (remote.c).
 *
 * Members whose blocks lie in one slab are mapped once more, evenly, where their heaps can be (alias.c): then the
 * collectives of the CUDA backend use them where they lie, and, where they lie at the same offset, its signals too.
 * Else collectives stage, and signals are NVSHMEM's.
 */
#include <stdlib.h>
#include <string.h>

#include "inner.h"

#define MAGIC 0x4e565348
#define GRAIN 512 /* bytes: what is carved is a multiple */

/* ---- blocks ---- */

static tutti_status check_device(const tu_nvshmem *nvshmem, const tu_backend_request *request) {
    const tu_backend_host *host = nvshmem->cuda.host;
    if (request->device_index >= 0 && request->device_index != nvshmem->device_index)
        return host->error(TUTTI_ERROR_UNSUPPORTED,
                           "%s on GPU %d: NVSHMEM has its heap on GPU %d of this rank, which was current when "
                           "tutti_backend_open was called",
                           request->what, request->device_index, nvshmem->device_index);
    if (tu_cuda_capture((tu_cuda *)(uintptr_t)&nvshmem->cuda, request->stream) != 0)
        return host->error(TUTTI_ERROR_STATE, "%s cannot be allocated while its stream captures: allocate before",
                           request->what);
    return TUTTI_OK;
}

/* On the caller's stream, with an event behind it; or on one of our own, which waits for nobody's. */
static CUresult clear_new(tu_nvshmem *nvshmem, tu_nvshmem_block *block, void *address, CUstream stream) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    CUstream used = stream != NULL ? stream : nvshmem->device->stream;
    CUresult result = driver->cuMemsetD8Async((CUdeviceptr)(uintptr_t)address, 0, block->bytes, used);
    if (result != CUDA_SUCCESS || stream == NULL)
        return result == CUDA_SUCCESS ? driver->cuStreamSynchronize(used) : result;
    result = driver->cuEventCreate(&block->cleared, CU_EVENT_DISABLE_TIMING);
    return result == CUDA_SUCCESS ? driver->cuEventRecord(block->cleared, stream) : result;
}

static void drop_event(tu_nvshmem *nvshmem, tu_nvshmem_block *block) {
    if (block->cleared != NULL)
        nvshmem->cuda.driver.cuEventDestroy(block->cleared);
    block->cleared = NULL;
}

static CUresult await_clear(tu_nvshmem *nvshmem, tu_nvshmem_block *block) {
    if (block->cleared == NULL)
        return CUDA_SUCCESS;
    CUresult result = nvshmem->cuda.driver.cuEventSynchronize(block->cleared);
    drop_event(nvshmem, block);
    return result;
}

static void give_back(tu_nvshmem *nvshmem, const tu_nvshmem_block *block) {
    pthread_mutex_lock(&nvshmem->heap_lock);
    tu_nvshmem_give_back(nvshmem, block->slab, block->offset, block->bytes);
    pthread_mutex_unlock(&nvshmem->heap_lock);
}

/* ---- areas that members may still write to ---- */

static char *place_of(const tu_nvshmem *nvshmem, const tu_nvshmem_block *block) {
    return nvshmem->slabs[block->slab].base + block->offset;
}

static CUresult clear_old(tu_nvshmem *nvshmem, const tu_nvshmem_block *block) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    CUstream stream = nvshmem->device->stream;
    CUresult result =
        driver->cuMemsetD8Async((CUdeviceptr)(uintptr_t)place_of(nvshmem, block), 0, block->bytes, stream);
    return result == CUDA_SUCCESS ? driver->cuStreamSynchronize(stream) : result;
}

/* Whether every other member has said that it writes to the area no more. The context is entered. */
static bool is_left(tu_nvshmem *nvshmem, const tu_nvshmem_block *block) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    CUstream stream = nvshmem->device->stream;
    uint64_t words[64];
    bool left = true;
    for (int first = 0; first < block->member_count && left; first += 64) {
        int count = block->member_count - first < 64 ? block->member_count - first : 64;
        CUdeviceptr from = (CUdeviceptr)(uintptr_t)place_of(nvshmem, block) + block->farewells + 8 * (size_t)first;
        left = driver->cuMemcpyDtoHAsync(words, from, 8 * (size_t)count, stream) == CUDA_SUCCESS &&
               driver->cuStreamSynchronize(stream) == CUDA_SUCCESS;
        for (int i = 0; i < count && left; i++)
            left = words[i] != 0 || first + i == block->rank;
    }
    return left;
}

static void await_farewells(tu_nvshmem *nvshmem, tu_nvshmem_block *block) {
    pthread_mutex_lock(&nvshmem->heap_lock);
    block->next = nvshmem->awaited;
    nvshmem->awaited = block;
    pthread_mutex_unlock(&nvshmem->heap_lock);
}

/* Gives back what is awaited no more. */
static void look_for_farewells(tu_nvshmem *nvshmem) {
    if (tu_cuda_enter(&nvshmem->cuda, nvshmem->device) != TUTTI_OK)
        return;
    pthread_mutex_lock(&nvshmem->heap_lock);
    tu_nvshmem_block *block = nvshmem->awaited;
    nvshmem->awaited = NULL; /* another thread does not look at these meanwhile */
    pthread_mutex_unlock(&nvshmem->heap_lock);
    while (block != NULL) {
        tu_nvshmem_block *next = block->next;
        if (is_left(nvshmem, block) && clear_old(nvshmem, block) == CUDA_SUCCESS) {
            give_back(nvshmem, block);
            free(block);
        } else {
            await_farewells(nvshmem, block);
        }
        block = next;
    }
    tu_cuda_leave(&nvshmem->cuda);
}

void tu_nvshmem_awaited_free(tu_nvshmem *nvshmem) {
    while (nvshmem->awaited != NULL) {
        tu_nvshmem_block *next = nvshmem->awaited->next;
        free(nvshmem->awaited);
        nvshmem->awaited = next;
    }
}

/* ---- allocating and freeing ---- */

tutti_status tu_nvshmem_obtain(tu_nvshmem *nvshmem, size_t bytes, size_t alignment, tu_nvshmem_fit fit,
                               const char *what, int *slab, size_t *offset) {
    tutti_status status;
    for (int attempt = 0; attempt < 2; attempt++) {
        pthread_mutex_lock(&nvshmem->heap_lock);
        status = tu_nvshmem_carve(nvshmem, bytes, alignment, fit, what, slab, offset);
        bool more = status == TUTTI_ERROR_MEMORY && nvshmem->awaited != NULL;
        pthread_mutex_unlock(&nvshmem->heap_lock);
        if (!more)
            break;
        look_for_farewells(nvshmem);
    }
    return status;
}

/* Whether it is for signals of members that are not all mapped. */
static bool is_apart(const tu_backend_request *request) {
    const tu_nvshmem_map *blocks = request->blocks != NULL ? request->blocks->handle : NULL;
    return blocks != NULL && !blocks->mapped;
}

static tutti_status allocate(void *state, const tu_backend_request *request, tu_backend_block *out) {
    tu_nvshmem *nvshmem = state;
    const tu_backend_host *host = nvshmem->cuda.host;
    tutti_status status = check_device(nvshmem, request);
    if (status != TUTTI_OK)
        return status;
    tu_nvshmem_block *block = calloc(1, sizeof *block);
    if (block == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "out of memory for %s", request->what);
    block->bytes = (request->bytes + GRAIN - 1) / GRAIN * GRAIN;
    if (block->bytes == 0)
        block->bytes = GRAIN;
    block->apart = is_apart(request);
    status = tu_nvshmem_obtain(nvshmem, block->bytes, request->alignment > GRAIN ? request->alignment : GRAIN,
                               block->apart ? TU_NVSHMEM_LAST : TU_NVSHMEM_FIRST, request->what, &block->slab,
                               &block->offset);
    if (status != TUTTI_OK)
        goto free_block;
    char *address = place_of(nvshmem, block);
    status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status != TUTTI_OK)
        goto give_block_back;
    CUresult result = clear_new(nvshmem, block, address, request->stream);
    tu_cuda_leave(&nvshmem->cuda);
    if (result != CUDA_SUCCESS) {
        status = tu_cuda_error(&nvshmem->cuda, result, "clearing new memory");
        goto give_block_back;
    }
    *out = (tu_backend_block){
        .address = address, .bytes = request->bytes, .device_index = nvshmem->device_index, .handle = block
    };
    return TUTTI_OK;

give_block_back:
    drop_event(nvshmem, block);
    give_back(nvshmem, block);
free_block:
    free(block);
    return status;
}

/* Waits until nothing on the device uses the memory, and clears it: what is left in it is nobody's signal. */
static void free_memory(void *state, tu_backend_block *out) {
    tu_nvshmem *nvshmem = state;
    tu_nvshmem_block *block = out->handle;
    CUresult result = CUDA_ERROR_INVALID_CONTEXT;
    if (tu_cuda_enter(&nvshmem->cuda, nvshmem->device) == TUTTI_OK) {
        (void)await_clear(nvshmem, block);
        result = nvshmem->cuda.driver.cuCtxSynchronize();
        if (result == CUDA_SUCCESS && block->farewells == 0)
            result = clear_old(nvshmem, block);
        tu_cuda_leave(&nvshmem->cuda);
    }
    memset(out, 0, sizeof *out);
    if (result == CUDA_SUCCESS && block->farewells != 0) {
        await_farewells(nvshmem, block);
        look_for_farewells(nvshmem);
        return;
    }
    if (result == CUDA_SUCCESS)
        give_back(nvshmem, block);
    else
        nvshmem->cuda.host->log(nvshmem->cuda.world, TUTTI_LOG_WARN, "nvshmem",
                                "%zu bytes of the heap are not used again after CUDA error %d on the device",
                                block->bytes, result);
    free(block);
}

/* ---- tickets ---- */

static tutti_status export_block(void *state, const tu_backend_block *own, tu_backend_ticket *ticket) {
    tu_nvshmem *nvshmem = state;
    tu_nvshmem_block *block = own->handle;
    tu_nvshmem_ticket message = { .magic = MAGIC,
                                  .pe = nvshmem->pes[nvshmem->rank],
                                  .slab = (uint64_t)block->slab,
                                  .offset = block->offset,
                                  .bytes = block->bytes,
                                  .domain = nvshmem->domain,
                                  .even = nvshmem->even,
                                  .multicast = tu_cuda_has_multicast(nvshmem, nvshmem->device_index) };
    tutti_status status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = await_clear(nvshmem, block);
    tu_cuda_leave(&nvshmem->cuda);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(&nvshmem->cuda, result, "clearing a block");
    memcpy(ticket->bytes, &message, sizeof message);
    ticket->fd = -1;
    return TUTTI_OK;
}

static void unexport_block(void *state, const tu_backend_block *block, tu_backend_ticket *ticket) {
    (void)state;
    (void)block;
    (void)ticket;
}

/* ---- maps ---- */

static void drop_map(tu_nvshmem_map *map) {
    if (map == NULL)
        return;
    free(map->cuda.near);
    free(map->places);
    free(map->pes);
    free(map);
}

static tu_nvshmem_map *make_map(tu_nvshmem *nvshmem, tu_nvshmem_block *own, int count) {
    tu_nvshmem_map *map = calloc(1, sizeof *map);
    if (map == NULL)
        return NULL;
    map->cuda = (tu_cuda_map){ .cuda = &nvshmem->cuda, .device = nvshmem->device, .count = count };
    map->own = own;
    map->cuda.near = calloc((size_t)count, sizeof *map->cuda.near);
    map->places = calloc((size_t)count, sizeof *map->places);
    map->pes = calloc((size_t)count, sizeof *map->pes);
    if (map->cuda.near != NULL && map->places != NULL && map->pes != NULL)
        return map;
    drop_map(map);
    return NULL;
}

/* Where one member's block lies: its ticket is another rank's word, and is checked. */
static tutti_status place_member(tu_nvshmem *nvshmem, tu_nvshmem_map *map, int member, const tu_backend_ticket *given,
                                 size_t bytes, void **address) {
    tu_nvshmem_ticket ticket;
    memcpy(&ticket, given->bytes, sizeof ticket);
    int slab_count = tu_nvshmem_slab_count(nvshmem);
    const tu_nvshmem_slab *slab = ticket.slab < (uint64_t)slab_count ? &nvshmem->slabs[ticket.slab] : NULL;
    if (ticket.magic != MAGIC || ticket.pe < 0 || ticket.pe >= nvshmem->size || slab == NULL || ticket.bytes != bytes ||
        ticket.offset > slab->bytes || slab->bytes - ticket.offset < bytes) {
        tutti_status status = nvshmem->cuda.host->error(
            TUTTI_ERROR_PROTOCOL,
            "member %d says that it is PE %d, and that its block lies in slab %llu at %llu, "
            "%llu bytes: this rank has %d slabs, and %zu bytes",
            member, ticket.pe, (unsigned long long)ticket.slab, (unsigned long long)ticket.offset,
            (unsigned long long)ticket.bytes, slab_count, bytes);
        nvshmem->cuda.host->error_at_fault(member);
        return status;
    }
    map->pes[member] = ticket.pe;
    map->places[member] = slab->base + ticket.offset;
    char *base = nvshmem->mapping ? nvshmem->library->nvshmem_ptr(slab->base, ticket.pe) : NULL;
    *address = base != NULL ? base + ticket.offset : NULL;
    return TUTTI_OK;
}

/* How the members can be reached: by what they say, and so with the same answer on all. */
typedef enum reach {
    APART,    /* some are not mapped, or lie in different slabs */
    IN_SLAB,  /* all lie in one slab, at different offsets */
    AT_OFFSET /* … and at one offset */
} reach;

/* `mapped`: whether all members map each other. */
static reach find_reach(const tu_backend_ticket *tickets, int count, bool *mapped) {
    tu_nvshmem_ticket first, other;
    reach reach = AT_OFFSET;
    memcpy(&first, tickets[0].bytes, sizeof first);
    *mapped = first.domain != 0;
    for (int i = 0; i < count; i++) {
        memcpy(&other, tickets[i].bytes, sizeof other);
        *mapped = *mapped && other.domain == first.domain;
        if (other.slab != first.slab || other.even == 0 || !*mapped)
            reach = APART;
        else if (other.offset != first.offset && reach == AT_OFFSET)
            reach = IN_SLAB;
    }
    return reach;
}

static tutti_status map_slab(tu_nvshmem *nvshmem, tu_nvshmem_map *map, tutti_group *group, const tu_nvshmem_block *own,
                             reach reach) {
    uint64_t base, stride;
    tutti_status status = tu_nvshmem_alias_get(nvshmem, group, own->slab, map->cuda.count, map->pes, &base, &stride);
    if (status != TUTTI_OK)
        return status;
    if (reach == AT_OFFSET) {
        map->cuda.base = base + own->offset;
        map->cuda.stride = stride;
        return TUTTI_OK;
    }
    map->slab = map->cuda; /* the lists are the other's */
    map->slab.base = base;
    map->slab.stride = stride;
    map->slab_map.handle = &map->slab;
    map->slab_offset = own->offset;
    return TUTTI_OK;
}

/* Whether one address could reach all members: by what they say, and so with the same answer on all. */
static bool wants_multicast(const tu_backend_ticket *tickets, int count) {
    tu_nvshmem_ticket first, other;
    memcpy(&first, tickets[0].bytes, sizeof first);
    for (int i = 0; i < count; i++) {
        memcpy(&other, tickets[i].bytes, sizeof other);
        if (other.slab != first.slab || other.offset != first.offset || other.multicast == 0)
            return false;
    }
    return count > 1;
}

/* Without a team, or where it has no such address, the members go on without. */
static tutti_status find_multicast(tu_nvshmem *nvshmem, const tu_nvshmem_map *map, tutti_group *group, bool broken,
                                   void **multicast) {
    const tu_backend_host *host = nvshmem->cuda.host;
    int32_t team = -1;
    tutti_status status = tu_nvshmem_team_get(nvshmem, group, host->now() + host->timeout(group, 0), broken, &team);
    if (status == TUTTI_ERROR_UNSUPPORTED || status == TUTTI_ERROR_LIMIT) {
        host->log(nvshmem->cuda.world, TUTTI_LOG_INFO, "nvshmem", "no multicast in group %s: it has no team",
                  host->group_name(group));
        return TUTTI_OK;
    }
    if (status == TUTTI_OK && !broken)
        *multicast = nvshmem->library->nvshmemx_mc_ptr(team, map->places[0]);
    return status;
}

static tutti_status import_blocks(void *state, tutti_group *group, const tu_backend_block *own, int rank, int count,
                                  tu_backend_ticket *tickets, tu_backend_map *out) {
    tu_nvshmem *nvshmem = state;
    tu_nvshmem_block *block = own->handle;
    void **addresses = calloc((size_t)count, sizeof *addresses), *multicast = NULL;
    tu_nvshmem_map *map = make_map(nvshmem, block, count);
    tutti_status status = TUTTI_OK;
    if (addresses == NULL || map == NULL)
        status = nvshmem->cuda.host->error(TUTTI_ERROR_MEMORY, "out of memory for a mapping of %d blocks", count);
    for (int i = 0; status == TUTTI_OK && i < count; i++)
        status = place_member(nvshmem, map, i, &tickets[i], block->bytes, &addresses[i]);
    if (status == TUTTI_OK) {
        addresses[rank] = own->address;
        reach reach = find_reach(tickets, count, &map->mapped);
        if (reach != APART)
            status = map_slab(nvshmem, map, group, block, reach);
    }
    if (wants_multicast(tickets, count)) {
        tutti_status met = find_multicast(nvshmem, map, group, status != TUTTI_OK, &multicast);
        status = status != TUTTI_OK ? status : met;
    }
    if (status == TUTTI_OK) {
        *out = (tu_backend_map){ .addresses = addresses, .multicast = multicast, .handle = map };
        return TUTTI_OK;
    }
    drop_map(map);
    free(addresses);
    return status;
}

/* The heap stays mapped; what still runs on the device may go on. */
static void unmap(void *state, tu_backend_map *out) {
    (void)state;
    drop_map(out->handle);
    free(out->addresses);
    memset(out, 0, sizeof *out);
}

const tu_backend_memory tu_nvshmem_memory = {
    .size = sizeof(tu_backend_memory),
    .allocate = allocate,
    .free = free_memory,
    .export_block = export_block,
    .unexport_block = unexport_block,
    .import_blocks = import_blocks,
    .unmap = unmap,
    .clear = tu_cuda_clear,
    .copy = tu_cuda_copy,
    .set32 = tu_cuda_set32,
    .write32 = tu_cuda_write32,
    .has_multicast = tu_cuda_has_multicast,
    .links = tu_cuda_links,
};
