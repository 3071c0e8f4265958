/* SPDX-License-Identifier: Apache-2.0
 *
 * Device memory that peers can map: physical memory by cuMemCreate, shared as a file descriptor or, between hosts of
 * one NVLink domain, as a fabric handle; which of the two is decided by trying. A group's blocks are mapped into one
 * reserved range, member r's at base + r * stride, so that kernels need no table of pointers. Ranges are given back on
 * unmap.
 *
 * Ranks that are threads of one process need no export: they retain the handle of the other and map it again.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

static CUmemAllocationProp properties(const tu_cuda_device *device, int handle_type) {
    CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = handle_type };
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device->device;
    prop.allocFlags.gpuDirectRDMACapable = device->rdma; /* so that network cards may reach it */
    return prop;
}

/* Creates physical memory, finding out at the first call which handles this machine can share. */
static CUresult create(tu_cuda *cuda, tu_cuda_device *device, size_t bytes, size_t *rounded,
                       CUmemGenericAllocationHandle *memory) {
    int candidates[2] = { CU_MEM_HANDLE_TYPE_FABRIC, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    for (int i = 0; i < 2; i++) {
        int type = device->handle_type != 0 ? device->handle_type : candidates[i];
        CUmemAllocationProp prop = properties(device, type);
        size_t granularity;
        result = cuda->driver.cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
        if (result == CUDA_SUCCESS) {
            *rounded = (bytes + granularity - 1) / granularity * granularity;
            if (*rounded == 0)
                *rounded = granularity;
            result = cuda->driver.cuMemCreate(memory, *rounded, &prop, 0);
        }
        if (result == CUDA_SUCCESS && device->handle_type == 0 && type == CU_MEM_HANDLE_TYPE_FABRIC) {
            /* The attribute is not enough: a machine may create what it may not export. */
            unsigned char handle[64];
            result = cuda->driver.cuMemExportToShareableHandle(handle, *memory, type, 0);
            if (result != CUDA_SUCCESS)
                cuda->driver.cuMemRelease(*memory);
        }
        if (result == CUDA_SUCCESS) {
            device->handle_type = type;
            return result;
        }
        if (device->handle_type != 0)
            return result;
    }
    return result;
}

CUresult tu_cuda_map_at(tu_cuda *cuda, tu_cuda_device *device, CUdeviceptr address, size_t bytes,
                        CUmemGenericAllocationHandle memory) {
    CUresult result = cuda->driver.cuMemMap(address, bytes, 0, memory, 0);
    if (result != CUDA_SUCCESS)
        return result;
    CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, device->device }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    result = cuda->driver.cuMemSetAccess(address, bytes, &access, 1);
    if (result != CUDA_SUCCESS)
        cuda->driver.cuMemUnmap(address, bytes);
    return result;
}

/* On the caller's stream, with an event behind it; or on one of our own, which waits for nobody's. */
static CUresult clear_new(tu_cuda *cuda, tu_cuda_device *device, tu_cuda_block *block, CUstream stream) {
    const tu_cuda_driver *driver = &cuda->driver;
    CUresult result =
        driver->cuMemsetD8Async(block->address, 0, block->bytes, stream != NULL ? stream : device->stream);
    if (result != CUDA_SUCCESS || stream == NULL)
        return result == CUDA_SUCCESS ? driver->cuStreamSynchronize(device->stream) : result;
    result = driver->cuEventCreate(&block->cleared, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS)
        result = driver->cuEventRecord(block->cleared, stream);
    if (result == CUDA_SUCCESS)
        tu_cuda_note_use(cuda, device, stream);
    return result;
}

/* Waits until the block is clear, where its caller's stream clears it. */
static CUresult await_clear(tu_cuda *cuda, tu_cuda_block *block) {
    if (block->cleared == NULL)
        return CUDA_SUCCESS;
    CUresult result = cuda->driver.cuEventSynchronize(block->cleared);
    cuda->driver.cuEventDestroy(block->cleared);
    block->cleared = NULL;
    return result;
}

tutti_status tu_cuda_allocate(void *state, const tu_backend_request *request, tu_backend_block *out) {
    tu_cuda *cuda = state;
    tu_cuda_device *device;
    int index;
    tutti_status status = tu_cuda_device_open(cuda, request->device_index, &device, &index);
    if (status == TUTTI_OK && tu_cuda_capture(cuda, request->stream) != 0)
        status = cuda->host->error(TUTTI_ERROR_STATE,
                                   "%s cannot be allocated while its stream captures: allocate before", request->what);
    if (status != TUTTI_OK)
        return status;
    tu_cuda_block *block = calloc(1, sizeof *block);
    if (block == NULL)
        return cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for %s", request->what);
    block->device = index;
    status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        goto free_block;
    pthread_mutex_lock(&cuda->lock);
    CUresult result = create(cuda, device, request->bytes, &block->bytes, &block->memory);
    pthread_mutex_unlock(&cuda->lock);
    const char *what = "cuMemCreate";
    if (result != CUDA_SUCCESS)
        goto leave;
    what = "cuMemAddressReserve";
    result = cuda->driver.cuMemAddressReserve(&block->address, block->bytes,
                                              request->alignment > 65536 ? request->alignment : 0, 0, 0);
    if (result != CUDA_SUCCESS)
        goto release_memory;
    what = "cuMemMap";
    result = tu_cuda_map_at(cuda, device, block->address, block->bytes, block->memory);
    if (result != CUDA_SUCCESS)
        goto free_address;
    what = "clearing new memory";
    result = clear_new(cuda, device, block, request->stream);
    if (result != CUDA_SUCCESS)
        goto unmap;
    tu_cuda_leave(cuda);
    *out = (tu_backend_block){
        .address = (void *)(uintptr_t)block->address, .bytes = request->bytes, .device_index = index, .handle = block
    };
    return TUTTI_OK;

unmap: /* behind what clears it, which has begun where only its event, or the wait, failed */
    cuda->driver.cuStreamSynchronize(request->stream != NULL ? request->stream : device->stream);
    if (block->cleared != NULL)
        cuda->driver.cuEventDestroy(block->cleared);
    cuda->driver.cuMemUnmap(block->address, block->bytes);
free_address:
    cuda->driver.cuMemAddressFree(block->address, block->bytes);
release_memory:
    cuda->driver.cuMemRelease(block->memory);
leave:
    status = tu_cuda_error(cuda, result, what);
    cuda->host->error_append(" (for %s of %zu bytes on GPU %d)", request->what, request->bytes, index);
    tu_cuda_leave(cuda);
free_block:
    free(block);
    return status;
}

/* After a device fault the context is lost and nothing can be released: say so once and leave it to the process's
 * end. */
static bool usable(tu_cuda *cuda, tu_cuda_device *device) {
    CUresult result = cuda->driver.cuStreamQuery(device->stream);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY)
        return true;
    cuda->host->log(cuda->world, TUTTI_LOG_WARN, "cuda", "skipping cleanup after CUDA error %d on the device", result);
    return false;
}

/* cuMemUnmap does not wait for kernels that still use the memory. Waiting for the whole context does, whatever stream
 * they are on; but with other ranks in this process their kernels may be waiting for this rank's next one, so there
 * only what this rank put into streams is waited for. */
static bool settle(tu_cuda *cuda, tu_cuda_device *device) {
    if (!atomic_load_explicit(&cuda->shared_process, memory_order_relaxed))
        return cuda->driver.cuCtxSynchronize() == CUDA_SUCCESS;
    tu_cuda_await_uses(cuda, device);
    return true;
}

void tu_cuda_desk_drop(tu_cuda_desk *desk) {
    if (desk == NULL || atomic_fetch_sub_explicit(&desk->references, 1, memory_order_acq_rel) != 1)
        return;
    free((void *)atomic_load_explicit(&desk->counts, memory_order_relaxed));
    free(desk);
}

/* The block's own, with the block's reference. */
static tutti_status make_desk(tu_cuda *cuda, tu_cuda_block *block) {
    if (block->desk != NULL)
        return TUTTI_OK;
    block->desk = calloc(1, sizeof *block->desk);
    if (block->desk == NULL)
        return cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for sharing a block");
    atomic_store_explicit(&block->desk->references, 1, memory_order_relaxed);
    return TUTTI_OK;
}

/* Who shares devices, who is a thread of this process on this device, and the desk of the first of them: all blocks
 * live until everybody has imported them. */
static void find_near(tu_cuda_map *m, const tu_cuda_ticket *tickets, int rank) {
    int first = -1, others = 0;
    for (int i = 0; i < m->count; i++) {
        int sharing = 0;
        for (int j = 0; j < m->count; j++)
            sharing += memcmp(&tickets[i].uuid, &tickets[j].uuid, sizeof tickets[i].uuid) == 0;
        m->sharing = sharing > m->sharing ? sharing : m->sharing;
        m->near[i] = tickets[i].pid == tickets[rank].pid &&
                     memcmp(&tickets[i].uuid, &tickets[rank].uuid, sizeof tickets[i].uuid) == 0;
        if (m->near[i] && first < 0)
            first = i;
        others += m->near[i] && i != rank;
    }
    if (others == 0)
        return;
    m->desk = ((const tu_cuda_block *)(uintptr_t)tickets[first].block)->desk;
    atomic_fetch_add_explicit(&m->desk->references, 1, memory_order_relaxed);
}

void tu_cuda_free(void *state, tu_backend_block *out) {
    tu_cuda *cuda = state;
    tu_cuda_block *block = out->handle;
    tu_cuda_device *device = &cuda->devices[block->device];
    if (tu_cuda_enter(cuda, device) == TUTTI_OK) {
        (void)await_clear(cuda, block);
        if (usable(cuda, device) && settle(cuda, device)) {
            cuda->driver.cuMemUnmap(block->address, block->bytes);
            cuda->driver.cuMemAddressFree(block->address, block->bytes);
            cuda->driver.cuMemRelease(block->memory);
        }
        tu_cuda_leave(cuda);
    }
    tu_cuda_desk_drop(block->desk);
    free(block);
    memset(out, 0, sizeof *out);
}

tutti_status tu_cuda_clear(void *state, const tu_backend_block *block, size_t offset, size_t bytes) {
    tu_cuda *cuda = state;
    tu_cuda_device *device = &cuda->devices[block->device_index];
    tutti_status status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        return status;
    CUresult result =
        cuda->driver.cuMemsetD8Async((CUdeviceptr)(uintptr_t)block->address + offset, 0, bytes, device->stream);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuStreamSynchronize(device->stream);
    tu_cuda_leave(cuda);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(cuda, result, "clearing memory");
}

tutti_status tu_cuda_export(void *state, const tu_backend_block *out, tu_backend_ticket *into) {
    tu_cuda *cuda = state;
    tu_cuda_block *block = out->handle;
    tu_cuda_device *device = &cuda->devices[block->device];
    tu_cuda_ticket message = { .bytes = block->bytes,
                               .block = (uint64_t)(uintptr_t)block,
                               .pid = (int32_t)getpid(),
                               .handle_type = device->handle_type,
                               .multicast = tu_cuda_has_multicast(cuda, block->device),
                               .device = block->device,
                               .uuid = device->uuid };
    int fd = -1;
    tutti_status status = make_desk(cuda, block);
    if (status == TUTTI_OK)
        status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = await_clear(cuda, block);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuMemExportToShareableHandle(
            device->handle_type == CU_MEM_HANDLE_TYPE_FABRIC ? (void *)message.fabric : (void *)&fd, block->memory,
            device->handle_type, 0);
    if (result != CUDA_SUCCESS)
        status = tu_cuda_error(cuda, result, "cuMemExportToShareableHandle");
    tu_cuda_leave(cuda);
    if (status != TUTTI_OK)
        return status;
    if (fd >= 0)
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    memcpy(into->bytes, &message, sizeof message);
    into->fd = fd;
    return TUTTI_OK;
}

void tu_cuda_unexport(void *state, const tu_backend_block *block, tu_backend_ticket *into) {
    (void)state;
    (void)block;
    if (into->fd >= 0)
        close(into->fd);
    into->fd = -1;
}

/* In the device's context. */
static void unmap(tu_cuda_map *m) {
    tu_cuda_driver *driver = &m->cuda->driver;
    for (int i = 0; i < m->count && m->base != 0; i++) {
        if (m->mapped[i])
            driver->cuMemUnmap(m->base + (CUdeviceptr)i * m->stride, m->stride);
        if (m->handles[i] != 0)
            driver->cuMemRelease(m->handles[i]);
    }
    if (m->base != 0)
        driver->cuMemAddressFree(m->base, m->stride * (size_t)m->count);
    m->base = 0;
}

/* The map's own memory, when nothing is mapped any more. */
static void drop(tu_cuda_map *m) {
    free(m->handles);
    free(m->mapped);
    free(m->near);
    tu_cuda_desk_drop(m->desk);
}

/* The handle of member i's memory in this process. */
static CUresult obtain(tu_cuda *cuda, const tu_cuda_ticket *from, int fd, CUmemGenericAllocationHandle *handle) {
    if (from->pid == getpid()) { /* a thread of this process, or this rank itself */
        const tu_cuda_block *block = (const tu_cuda_block *)(uintptr_t)from->block;
        return cuda->driver.cuMemRetainAllocationHandle(handle, (void *)(uintptr_t)block->address);
    }
    if (from->handle_type == CU_MEM_HANDLE_TYPE_FABRIC)
        return cuda->driver.cuMemImportFromShareableHandle(handle, (void *)(uintptr_t)from->fabric,
                                                           CU_MEM_HANDLE_TYPE_FABRIC);
    return cuda->driver.cuMemImportFromShareableHandle(handle, (void *)(uintptr_t)fd,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

/* A map of nothing yet; NULL: no memory. */
static tu_cuda_map *make_map(tu_cuda *cuda, tu_cuda_device *device, int count, size_t stride) {
    tu_cuda_map *m = calloc(1, sizeof *m);
    if (m == NULL)
        return NULL;
    *m = (tu_cuda_map){ .cuda = cuda, .device = device, .count = count, .stride = stride };
    m->handles = calloc((size_t)count, sizeof *m->handles);
    m->mapped = calloc((size_t)count, sizeof *m->mapped);
    m->near = calloc((size_t)count, sizeof *m->near);
    if (m->handles != NULL && m->mapped != NULL && m->near != NULL)
        return m;
    drop(m);
    free(m);
    return NULL;
}

/* Takes the tickets out of what was given; all must be of one size and kind. */
static tutti_status take_tickets(tu_cuda *cuda, const tu_backend_ticket *given, int rank, int count, size_t bytes,
                                 tu_cuda_ticket *tickets) {
    for (int i = 0; i < count; i++)
        memcpy(&tickets[i], given[i].bytes, sizeof tickets[i]);
    for (int i = 0; i < count; i++) {
        if (i != rank && tickets[i].pid == getpid())
            atomic_store_explicit(&cuda->shared_process, true, memory_order_relaxed);
        if (tickets[i].bytes == bytes && tickets[i].handle_type == tickets[rank].handle_type)
            continue;
        cuda->host->error(
            TUTTI_ERROR_MISMATCH,
            "rank %d has %llu bytes of device memory shared by handle type %d, this rank %zu bytes and type %d", i,
            (unsigned long long)tickets[i].bytes, tickets[i].handle_type, bytes, tickets[rank].handle_type);
        cuda->host->error_at_fault(i);
        return TUTTI_ERROR_MISMATCH;
    }
    return TUTTI_OK;
}

/* Everybody's memory at base + rank × stride; this rank's own keeps its address. */
static tutti_status map_members(tu_cuda_map *m, const tu_backend_block *own, int rank, const tu_cuda_ticket *tickets,
                                const tu_backend_ticket *given, void **addresses) {
    tu_cuda *cuda = m->cuda;
    for (int i = 0; i < m->count; i++) {
        CUdeviceptr at = m->base + (CUdeviceptr)i * m->stride;
        CUresult result = obtain(cuda, &tickets[i], given[i].fd, &m->handles[i]);
        if (result == CUDA_SUCCESS)
            result = tu_cuda_map_at(cuda, m->device, at, m->stride, m->handles[i]);
        if (result != CUDA_SUCCESS) {
            tutti_status status = tu_cuda_error(cuda, result, "mapping the memory of a peer");
            cuda->host->error_append(" (rank %d, GPU %d there, GPU %d here%s)", i, tickets[i].device,
                                     tickets[rank].device,
                                     tickets[i].handle_type == CU_MEM_HANDLE_TYPE_FABRIC ? ", by fabric handle" : "");
            cuda->host->error_at_fault(i);
            return status;
        }
        m->mapped[i] = true;
        addresses[i] = i == rank ? own->address : (void *)(uintptr_t)at;
    }
    return TUTTI_OK;
}

/* In the device's context. Whoever cannot map says so to those who make the multicast object with it. */
static tutti_status map_all(tu_cuda_map *m, tutti_group *group, const tu_backend_block *own, int rank,
                            const tu_cuda_ticket *tickets, const tu_backend_ticket *given, void **addresses) {
    tu_cuda *cuda = m->cuda;
    CUresult result = cuda->driver.cuMemAddressReserve(&m->base, m->stride * (size_t)m->count, 0, 0, 0);
    if (result != CUDA_SUCCESS) {
        m->base = 0;
        return tu_cuda_error(cuda, result, "cuMemAddressReserve");
    }
    tutti_status status = map_members(m, own, rank, tickets, given, addresses);
    tutti_status met = tu_cuda_multicast_make(m, group, own->handle, rank, tickets, status != TUTTI_OK,
                                              cuda->host->now() + cuda->host->timeout(group, 0));
    return status != TUTTI_OK ? status : met;
}

tutti_status tu_cuda_import(void *state, tutti_group *group, const tu_backend_block *own, int rank, int count,
                            tu_backend_ticket *given, tu_backend_map *out) {
    tu_cuda *cuda = state;
    tu_cuda_block *block = own->handle;
    tu_cuda_device *device = &cuda->devices[block->device];
    tu_cuda_ticket *tickets = calloc((size_t)count, sizeof *tickets);
    void **addresses = calloc((size_t)count, sizeof *addresses);
    tu_cuda_map *m = make_map(cuda, device, count, block->bytes);
    tutti_status status =
        tickets != NULL && m != NULL && addresses != NULL
            ? take_tickets(cuda, given, rank, count, block->bytes, tickets)
            : cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a mapping of %d blocks", count);
    if (status == TUTTI_OK) {
        find_near(m, tickets, rank);
        status = tu_cuda_enter(cuda, device);
        if (status == TUTTI_OK) {
            status = map_all(m, group, own, rank, tickets, given, addresses);
            if (status != TUTTI_OK)
                unmap(m);
            tu_cuda_leave(cuda);
        }
    }
    for (int i = 0; i < count; i++)
        if (given[i].fd >= 0)
            close(given[i].fd);
    free(tickets);
    if (status == TUTTI_OK) {
        *out = (tu_backend_map){ .addresses = addresses,
                                 .multicast = (void *)(uintptr_t)m->multicast_address,
                                 .handle = m,
                                 .row = (void *)(uintptr_t)m->base,
                                 .row_step = m->stride };
        return TUTTI_OK;
    }
    if (m != NULL)
        drop(m);
    free(m);
    free(addresses);
    return status;
}

void tu_cuda_unmap(void *state, tu_backend_map *out) {
    tu_cuda *cuda = state;
    tu_cuda_map *m = out->handle;
    if (tu_cuda_enter(cuda, m->device) == TUTTI_OK) {
        if (usable(cuda, m->device) && settle(cuda, m->device)) {
            tu_cuda_multicast_drop(m); /* before the memory behind it */
            unmap(m);
            drop(m);
        }
        tu_cuda_leave(cuda);
    }
    free(out->addresses);
    free(m);
    memset(out, 0, sizeof *out);
}

void tu_cuda_map_plan(const tu_backend_map *out, uint64_t *base, uint64_t *stride) {
    const tu_cuda_map *m = out->handle;
    *base = m->base;
    *stride = m->stride;
}

const tu_backend_memory tu_cuda_memory = {
    .size = sizeof(tu_backend_memory),
    .allocate = tu_cuda_allocate,
    .free = tu_cuda_free,
    .export_block = tu_cuda_export,
    .unexport_block = tu_cuda_unexport,
    .import_blocks = tu_cuda_import,
    .unmap = tu_cuda_unmap,
    .clear = tu_cuda_clear,
    .copy = tu_cuda_copy,
    .set32 = tu_cuda_set32,
    .write32 = tu_cuda_write32,
    .has_multicast = tu_cuda_has_multicast,
    .links = tu_cuda_links,
};
