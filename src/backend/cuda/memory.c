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

/* What a rank tells the others about its block. */
typedef struct ticket {
    uint64_t bytes; /* of the physical memory */
    uint64_t block; /* address of the tu_cuda_block in the sender's process */
    int32_t pid;
    int32_t handle_type;
    int32_t multicast; /* whether its device can */
    int32_t device;
    CUuuid uuid;
    unsigned char fabric[64];
} ticket;
_Static_assert(sizeof(ticket) <= TU_BACKEND_TICKET_BYTES, "a ticket must fit");

/* A mapped set of blocks. */
typedef struct map {
    tu_cuda *cuda;
    tu_cuda_device *device;
    CUdeviceptr base;
    size_t stride;
    int count;
    CUmemGenericAllocationHandle *handles; /* imported, 0 for none */
    bool *mapped;
    CUmemGenericAllocationHandle multicast;
    CUdeviceptr multicast_address;
    bool multicast_bound;
} map;

static CUmemAllocationProp properties(const tu_cuda_device *device, int handle_type) {
    CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = handle_type };
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device->device;
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

static CUresult map_at(tu_cuda *cuda, tu_cuda_device *device, CUdeviceptr address, size_t bytes,
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

tutti_status tu_cuda_allocate(void *state, const tu_backend_request *request, tu_backend_block *out) {
    tu_cuda *cuda = state;
    tu_cuda_device *device;
    int index;
    tutti_status status = tu_cuda_device_open(cuda, request->device_index, &device, &index);
    if (status != TUTTI_OK)
        return status;
    tu_cuda_block *block = calloc(1, sizeof *block);
    if (block == NULL)
        return cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for %s", request->what);
    block->device = index;
    block->exported = -1;
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
    result = map_at(cuda, device, block->address, block->bytes, block->memory);
    if (result != CUDA_SUCCESS)
        goto free_address;
    /* Zeroed before anybody can see it; on a stream of our own, so that it waits for nobody's. */
    what = "clearing new memory";
    result = cuda->driver.cuMemsetD8Async(block->address, 0, block->bytes, device->stream);
    if (result == CUDA_SUCCESS)
        result = cuda->driver.cuStreamSynchronize(device->stream);
    if (result != CUDA_SUCCESS)
        goto unmap;
    tu_cuda_leave(cuda);
    *out = (tu_backend_block){
        .address = (void *)(uintptr_t)block->address, .bytes = request->bytes, .device_index = index, .handle = block
    };
    return TUTTI_OK;

unmap:
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
 * they are on; but with other ranks in this process their kernels may be waiting for this rank's next one, so there the
 * caller's streams must be idle before it releases, as tutti/memory.h says. */
static bool settle(tu_cuda *cuda) {
    return atomic_load_explicit(&cuda->shared_process, memory_order_relaxed) ||
           cuda->driver.cuCtxSynchronize() == CUDA_SUCCESS;
}

void tu_cuda_free(void *state, tu_backend_block *out) {
    tu_cuda *cuda = state;
    tu_cuda_block *block = out->handle;
    tu_cuda_device *device = &cuda->devices[block->device];
    if (tu_cuda_enter(cuda, device) == TUTTI_OK) {
        if (usable(cuda, device)) {
            if (settle(cuda)) {
                cuda->driver.cuMemUnmap(block->address, block->bytes);
                cuda->driver.cuMemAddressFree(block->address, block->bytes);
                cuda->driver.cuMemRelease(block->memory);
            }
        }
        tu_cuda_leave(cuda);
    }
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
    ticket message = { .bytes = block->bytes,
                       .block = (uint64_t)(uintptr_t)block,
                       .pid = (int32_t)getpid(),
                       .handle_type = device->handle_type,
                       .multicast = device->multicast,
                       .device = block->device,
                       .uuid = device->uuid };
    int fd = -1;
    tutti_status status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        return status;
    CUresult result = cuda->driver.cuMemExportToShareableHandle(
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

static void drop(map *m) {
    tu_cuda_driver *driver = &m->cuda->driver;
    if (m->base != 0) {
        for (int i = 0; i < m->count; i++) {
            if (m->mapped != NULL && m->mapped[i])
                driver->cuMemUnmap(m->base + (CUdeviceptr)i * m->stride, m->stride);
            if (m->handles != NULL && m->handles[i] != 0)
                driver->cuMemRelease(m->handles[i]);
        }
        driver->cuMemAddressFree(m->base, m->stride * (size_t)m->count);
    }
    free(m->handles);
    free(m->mapped);
}

/* The handle of member i's memory in this process. */
static CUresult obtain(tu_cuda *cuda, const ticket *from, int fd, CUmemGenericAllocationHandle *handle) {
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

/* ---- multicast: the order is essential, see each step ---- */

/* All members say how it went; false unless everybody is well. Never fails by itself but for what ends the group. */
static tutti_status agree(tu_cuda *cuda, tutti_group *group, const char *step, int64_t deadline, bool well, bool *all) {
    int size = cuda->host->group_size(group);
    unsigned char mine = well, *theirs = malloc((size_t)size);
    if (theirs == NULL)
        return cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for an agreement");
    tutti_status status = cuda->host->exchange(group, step, &mine, 1, -1, deadline, theirs, NULL);
    *all = status == TUTTI_OK;
    for (int i = 0; *all && i < size; i++)
        *all = theirs[i] != 0;
    free(theirs);
    return status;
}

static void multicast_drop(map *m, bool own_created, CUmemGenericAllocationHandle created) {
    tu_cuda_driver *driver = &m->cuda->driver;
    if (m->multicast_address != 0) {
        driver->cuMemUnmap(m->multicast_address, m->stride);
        driver->cuMemAddressFree(m->multicast_address, m->stride);
        m->multicast_address = 0;
    }
    if (m->multicast_bound)
        driver->cuMulticastUnbind(m->multicast, m->device->device, 0, m->stride);
    m->multicast_bound = false;
    if (m->multicast != 0)
        driver->cuMemRelease(m->multicast);
    m->multicast = 0;
    if (own_created)
        driver->cuMemRelease(created);
}

/* One address that writes to and reduces from all members. Whatever fails, all members go on without it together. */
/* `broken`: this rank's own mapping failed already; it takes part only so that nobody waits for it. */
static tutti_status multicast_make(map *m, tutti_group *group, const tu_cuda_block *own, int rank,
                                   const ticket *tickets, bool broken, int64_t deadline) {
    tu_cuda *cuda = m->cuda;
    tu_cuda_driver *driver = &cuda->driver;
    for (int i = 0; i < m->count; i++) {
        if (!tickets[i].multicast)
            return TUTTI_OK;
        for (int j = 0; j < i; j++) /* two members on one device cannot both be bound */
            if (memcmp(&tickets[i].uuid, &tickets[j].uuid, sizeof tickets[i].uuid) == 0)
                return TUTTI_OK;
    }
    struct {
        int32_t good;
        unsigned char fabric[64];
    } offer = { 0, { 0 } }, *offers = calloc((size_t)m->count, sizeof *offers);
    int *fds = malloc((size_t)m->count * sizeof *fds), fd = -1;
    CUmemGenericAllocationHandle created = 0;
    bool all = false;
    tutti_status status = TUTTI_OK;
    if (offers == NULL || fds == NULL) {
        status = cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for multicast");
        goto free_offers;
    }
    int type = tickets[0].handle_type;
    if (rank == 0 && !broken) {
        CUmulticastObjectProp prop = { .numDevices = (unsigned)m->count,
                                       .size = m->stride,
                                       .handleTypes = (unsigned long long)type };
        offer.good = driver->cuMulticastCreate(&created, &prop) == CUDA_SUCCESS;
        if (offer.good)
            offer.good = driver->cuMemExportToShareableHandle(type == CU_MEM_HANDLE_TYPE_FABRIC ? (void *)offer.fabric
                                                                                                : (void *)&fd,
                                                              created, type, 0) == CUDA_SUCCESS;
    }
    status = cuda->host->exchange(group, "multicast", &offer, sizeof offer, fd, deadline, offers, fds);
    if (status != TUTTI_OK)
        goto release_created;
    bool well = offers[0].good && !broken;
    /* Everybody imports, also its creator, so that the address takes the same path on all. */
    if (well)
        well = driver->cuMemImportFromShareableHandle(&m->multicast,
                                                      type == CU_MEM_HANDLE_TYPE_FABRIC ? (void *)offers[0].fabric
                                                                                        : (void *)(uintptr_t)fds[0],
                                                      type) == CUDA_SUCCESS &&
               driver->cuMulticastAddDevice(m->multicast, m->device->device) == CUDA_SUCCESS;
    for (int i = 0; i < m->count; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    /* Binding blocks until all devices were added: agree before anybody binds. */
    status = agree(cuda, group, "multicast devices", deadline, well, &all);
    if (status == TUTTI_OK && all) {
        m->multicast_bound = driver->cuMulticastBindMem(m->multicast, 0, own->memory, 0, m->stride, 0) == CUDA_SUCCESS;
        well = m->multicast_bound &&
               driver->cuMemAddressReserve(&m->multicast_address, m->stride, 0, 0, 0) == CUDA_SUCCESS;
        if (well && map_at(cuda, m->device, m->multicast_address, m->stride, m->multicast) != CUDA_SUCCESS) {
            driver->cuMemAddressFree(m->multicast_address, m->stride);
            m->multicast_address = 0;
            well = false;
        }
        status = agree(cuda, group, "multicast mapping", deadline, well, &all);
    }
    if (status != TUTTI_OK || !all)
        multicast_drop(m, false, 0);
    /* Only now may the creator's own reference go: before, a late importer would get another, empty object. */
release_created:
    if (created != 0)
        driver->cuMemRelease(created);
    if (fd >= 0)
        close(fd);
free_offers:
    free(fds);
    free(offers);
    return status;
}

tutti_status tu_cuda_import(void *state, tutti_group *group, const tu_backend_block *own, int rank, int count,
                            tu_backend_ticket *given, tu_backend_map *out) {
    tu_cuda *cuda = state;
    tu_cuda_block *block = own->handle;
    tu_cuda_device *device = &cuda->devices[block->device];
    ticket *tickets = calloc((size_t)count, sizeof *tickets);
    map *m = calloc(1, sizeof *m);
    void **addresses = calloc((size_t)count, sizeof *addresses);
    tutti_status status = TUTTI_OK;
    if (tickets == NULL || m == NULL || addresses == NULL) {
        status = cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a mapping of %d blocks", count);
        goto close_descriptors;
    }
    *m = (map){ .cuda = cuda, .device = device, .count = count, .stride = block->bytes };
    m->handles = calloc((size_t)count, sizeof *m->handles);
    m->mapped = calloc((size_t)count, sizeof *m->mapped);
    if (m->handles == NULL || m->mapped == NULL) {
        status = cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for a mapping of %d blocks", count);
        goto close_descriptors;
    }
    for (int i = 0; i < count; i++)
        memcpy(&tickets[i], given[i].bytes, sizeof tickets[i]);
    for (int i = 0; i < count; i++) {
        if (i != rank && tickets[i].pid == getpid())
            atomic_store_explicit(&cuda->shared_process, true, memory_order_relaxed);
        if (tickets[i].bytes != block->bytes || tickets[i].handle_type != tickets[rank].handle_type) {
            status = cuda->host->error(
                TUTTI_ERROR_MISMATCH,
                "rank %d has %llu bytes of device memory shared by handle type %d, this rank %zu bytes and type %d", i,
                (unsigned long long)tickets[i].bytes, tickets[i].handle_type, block->bytes, tickets[rank].handle_type);
            cuda->host->error_at_fault(i);
            goto close_descriptors;
        }
    }
    status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        goto close_descriptors;
    CUresult result = cuda->driver.cuMemAddressReserve(&m->base, m->stride * (size_t)count, 0, 0, 0);
    if (result != CUDA_SUCCESS) {
        m->base = 0;
        status = tu_cuda_error(cuda, result, "cuMemAddressReserve");
        goto leave;
    }
    for (int i = 0; status == TUTTI_OK && i < count; i++) {
        result = obtain(cuda, &tickets[i], given[i].fd, &m->handles[i]);
        if (result == CUDA_SUCCESS)
            result = map_at(cuda, device, m->base + (CUdeviceptr)i * m->stride, m->stride, m->handles[i]);
        if (result != CUDA_SUCCESS) {
            status = tu_cuda_error(cuda, result, "mapping the memory of a peer");
            cuda->host->error_append(" (rank %d, GPU %d there, GPU %d here%s)", i, tickets[i].device, block->device,
                                     tickets[i].handle_type == CU_MEM_HANDLE_TYPE_FABRIC ? ", by fabric handle" : "");
            cuda->host->error_at_fault(i);
            break;
        }
        m->mapped[i] = true;
        addresses[i] = i == rank ? own->address : (void *)(uintptr_t)(m->base + (CUdeviceptr)i * m->stride);
    }
    tutti_status met = multicast_make(m, group, block, rank, tickets, status != TUTTI_OK,
                                      cuda->host->now() + cuda->host->timeout(group, 0));
    if (status == TUTTI_OK)
        status = met;
    if (status != TUTTI_OK)
        goto leave;
    tu_cuda_leave(cuda);
    *out =
        (tu_backend_map){ .addresses = addresses, .multicast = (void *)(uintptr_t)m->multicast_address, .handle = m };
    for (int i = 0; i < count; i++)
        if (given[i].fd >= 0)
            close(given[i].fd);
    free(tickets);
    return TUTTI_OK;

leave:
    drop(m);
    m->handles = NULL;
    m->mapped = NULL;
    tu_cuda_leave(cuda);
close_descriptors:
    for (int i = 0; i < count; i++)
        if (given[i].fd >= 0)
            close(given[i].fd);
    if (m != NULL) {
        free(m->handles);
        free(m->mapped);
    }
    free(m);
    free(addresses);
    free(tickets);
    return status;
}

void tu_cuda_unmap(void *state, tu_backend_map *out) {
    tu_cuda *cuda = state;
    map *m = out->handle;
    if (tu_cuda_enter(cuda, m->device) == TUTTI_OK) {
        if (usable(cuda, m->device) && settle(cuda)) {
            multicast_drop(m, false, 0); /* before the memory behind it */
            drop(m);
        }
        tu_cuda_leave(cuda);
    }
    free(out->addresses);
    free(m);
    memset(out, 0, sizeof *out);
}

void tu_cuda_map_plan(const tu_backend_map *out, uint64_t *base, uint64_t *stride) {
    const map *m = out->handle;
    *base = m->base;
    *stride = m->stride;
}

bool tu_cuda_has_multicast(void *state, int device_index) {
    tu_cuda *cuda = state;
    const char *setting = cuda->host->setting(cuda->world, "TUTTI_MULTICAST");
    if (setting != NULL && strcmp(setting, "off") == 0)
        return false;
    tu_cuda_device *device;
    int index;
    if (device_index >= cuda->device_count || tu_cuda_device_open(cuda, device_index, &device, &index) != TUTTI_OK)
        return false;
    return device->multicast;
}
