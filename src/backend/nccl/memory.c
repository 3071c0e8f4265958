/* SPDX-License-Identifier: Apache-2.0
 *
 * Symmetric memory by NCCL's windows: a block is allocated by ncclMemAlloc, which never communicates, and registered
 * with the communicator of each group that it meets. The members of an LSA domain (GPUs that reach each other by load
 * and store) then have addresses at equal distances, as the kernels of the CUDA backend want them.
 *
 * Neither success nor a window that is not NULL proves that the memory of peers is there: NCCL registers quietly for
 * itself alone where it cannot do more. So each block ends with a page that holds a number of its own; the others read
 * it through the addresses that they were given.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "nccl.h"

#define PAGE NCCL_WIN_REQUIRED_ALIGNMENT

typedef struct tu_nccl_block {
    size_t room;       /* bytes before the last page */
    uint64_t identity; /* what the last page says */
    CUevent cleared;   /* behind the clearing on the caller's stream; NULL: it is clear */
} tu_nccl_block;

/* What a rank tells the others about its block. */
typedef struct ticket {
    uint64_t room, identity;
} ticket;

typedef struct tu_nccl_map {
    tu_cuda_map map; /* first: functions of the CUDA backend take this for theirs */
    tu_nccl_group *on;
    ncclWindow_t window;
    void *multicast; /* the address that reaches all members; NULL: there is none */
} tu_nccl_map;

static tu_cuda_device *device_of(tu_nccl *nccl, int index) {
    return &nccl->cuda.devices[index];
}

/* ---- allocating ---- */

static tutti_status write_identity(tu_nccl *nccl, tu_cuda_device *device, const tu_nccl_block *block, void *address) {
    const tu_cuda_driver *driver = &nccl->cuda.driver;
    CUdeviceptr page = (CUdeviceptr)(uintptr_t)address + block->room;
    CUresult result = driver->cuMemcpyHtoDAsync(page, &block->identity, sizeof block->identity, device->stream);
    if (result == CUDA_SUCCESS)
        result = driver->cuStreamSynchronize(device->stream);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(&nccl->cuda, result, "marking a block");
}

/* On the caller's stream, with an event behind it; or on one of our own, which waits for nobody's. */
static tutti_status clear_new(tu_nccl *nccl, tu_cuda_device *device, tu_nccl_block *block, void *address,
                              CUstream stream) {
    const tu_cuda_driver *driver = &nccl->cuda.driver;
    CUresult result = driver->cuMemsetD8Async((CUdeviceptr)(uintptr_t)address, 0, block->room,
                                              stream != NULL ? stream : device->stream);
    if (result == CUDA_SUCCESS && stream == NULL)
        result = driver->cuStreamSynchronize(device->stream);
    if (result == CUDA_SUCCESS && stream != NULL)
        result = driver->cuEventCreate(&block->cleared, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS && stream != NULL)
        result = driver->cuEventRecord(block->cleared, stream);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(&nccl->cuda, result, "clearing new memory");
}

static CUresult await_clear(tu_nccl *nccl, tu_nccl_block *block) {
    if (block->cleared == NULL)
        return CUDA_SUCCESS;
    CUresult result = nccl->cuda.driver.cuEventSynchronize(block->cleared);
    nccl->cuda.driver.cuEventDestroy(block->cleared);
    block->cleared = NULL;
    return result;
}

/* In the device's context. */
static tutti_status fill(tu_nccl *nccl, tu_cuda_device *device, const tu_backend_request *request, tu_nccl_block *block,
                         void **address) {
    const tu_backend_host *host = nccl->cuda.host;
    ncclResult_t result = nccl->library.ncclMemAlloc(address, block->room + PAGE);
    if (result != ncclSuccess)
        return host->error(TUTTI_ERROR_MEMORY, "ncclMemAlloc of %zu bytes for %s: NCCL says \"%s\"", block->room + PAGE,
                           request->what, nccl->library.ncclGetErrorString(result));
    tutti_status status = TUTTI_OK;
    if (((uintptr_t)*address & (request->alignment - 1)) != 0)
        status = host->error(TUTTI_ERROR_UNSUPPORTED, "ncclMemAlloc gives memory that is not aligned to %zu bytes",
                             request->alignment);
    if (status == TUTTI_OK)
        status = write_identity(nccl, device, block, *address);
    if (status == TUTTI_OK)
        status = clear_new(nccl, device, block, *address, request->stream);
    if (status != TUTTI_OK) {
        if (block->cleared != NULL)
            nccl->cuda.driver.cuEventDestroy(block->cleared);
        (void)nccl->library.ncclMemFree(*address);
    }
    return status;
}

static tutti_status allocate(void *state, const tu_backend_request *request, tu_backend_block *out) {
    tu_nccl *nccl = state;
    tu_cuda_device *device;
    int index;
    tutti_status status = tu_cuda_device_open(&nccl->cuda, request->device_index, &device, &index);
    if (status == TUTTI_OK && tu_cuda_capture(&nccl->cuda, request->stream) != 0)
        status = nccl->cuda.host->error(
            TUTTI_ERROR_STATE, "%s cannot be allocated while its stream captures: allocate before", request->what);
    if (status != TUTTI_OK)
        return status;
    tu_nccl_block *block = calloc(1, sizeof *block);
    if (block == NULL || getrandom(&block->identity, sizeof block->identity, 0) != sizeof block->identity) {
        free(block);
        return nccl->cuda.host->error(TUTTI_ERROR_MEMORY, "out of memory for %s", request->what);
    }
    void *address = NULL;
    block->room = (request->bytes + PAGE - 1) / PAGE * PAGE;
    status = tu_cuda_enter(&nccl->cuda, device);
    if (status == TUTTI_OK) {
        status = fill(nccl, device, request, block, &address);
        tu_cuda_leave(&nccl->cuda);
    }
    if (status != TUTTI_OK) {
        free(block);
        return status;
    }
    *out = (tu_backend_block){ .address = address, .bytes = request->bytes, .device_index = index, .handle = block };
    return TUTTI_OK;
}

static void free_block(void *state, tu_backend_block *out) {
    tu_nccl *nccl = state;
    tu_nccl_block *block = out->handle;
    if (tu_cuda_enter(&nccl->cuda, device_of(nccl, out->device_index)) == TUTTI_OK) {
        (void)await_clear(nccl, block);
        /* ncclMemFree does not wait for kernels that still use the memory. */
        CUresult settled = nccl->cuda.driver.cuCtxSynchronize();
        ncclResult_t result = settled == CUDA_SUCCESS ? nccl->library.ncclMemFree(out->address) : ncclSuccess;
        if (result != ncclSuccess)
            nccl->cuda.host->log(nccl->cuda.world, TUTTI_LOG_WARN, "nccl", "ncclMemFree: %s",
                                 nccl->library.ncclGetErrorString(result));
        tu_cuda_leave(&nccl->cuda);
    }
    free(block);
    memset(out, 0, sizeof *out);
}

/* ---- telling ---- */

static tutti_status export_block(void *state, const tu_backend_block *out, tu_backend_ticket *into) {
    tu_nccl *nccl = state;
    tu_nccl_block *block = out->handle;
    ticket mine = { .room = block->room, .identity = block->identity };
    tutti_status status = tu_cuda_enter(&nccl->cuda, device_of(nccl, out->device_index));
    if (status != TUTTI_OK)
        return status;
    CUresult result = await_clear(nccl, block); /* before anybody can signal into it */
    tu_cuda_leave(&nccl->cuda);
    memcpy(into->bytes, &mine, sizeof mine);
    into->fd = -1;
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(&nccl->cuda, result, "clearing new memory");
}

static void unexport_block(void *state, const tu_backend_block *block, tu_backend_ticket *into) {
    (void)state;
    (void)block;
    into->fd = -1;
}

/* ---- windows ---- */

static tutti_status is_aborted(const tu_nccl_group *on) {
    return on->nccl->cuda.host->error(TUTTI_ERROR_ABORTED, "the NCCL communicator of group %s has been aborted",
                                      on->name);
}

/* Whether all members are in one LSA domain, in their order. */
static tutti_status check_domain(tu_nccl_group *on) {
    const tu_backend_host *host = on->nccl->cuda.host;
    if (on->nccl->library.ncclTeamLsa == NULL && on->nccl->library.ncclGetPeerDevicePointer == NULL)
        return host->error(
            TUTTI_ERROR_UNSUPPORTED,
            "group %s: NCCL %d.%d has windows, but no addresses of peers in them: NCCL 2.28 or newer has", on->name,
            on->nccl->library.version / 10000, on->nccl->library.version / 100 % 100);
    if (on->nccl->library.ncclTeamLsa == NULL)
        return TUTTI_OK; /* each pointer is asked for */
    tu_nccl_team team = { .size = 0 };
    pthread_mutex_lock(&on->lock); /* the watcher may abort it */
    bool there = on->comm != NULL;
    if (there)
        team = on->nccl->library.ncclTeamLsa(on->comm);
    pthread_mutex_unlock(&on->lock);
    if (!there)
        return is_aborted(on);
    if (team.size == on->size && team.rank == on->rank)
        return TUTTI_OK;
    return host->error(TUTTI_ERROR_UNSUPPORTED,
                       "group %s: symmetric memory by NCCL needs all %d ranks in one LSA domain (GPUs that reach each "
                       "other by load and store); rank %d shares its domain with %d. Collectives work: "
                       "tutti_call.executor = \"nccl\"",
                       on->name, on->size, on->rank, team.size);
}

static bool is_device_memory(const tu_nccl *nccl, const void *pointer) {
    unsigned type = 0;
    int attributes[1] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE };
    void *values[1] = { &type };
    return pointer != NULL &&
           nccl->cuda.driver.cuPointerGetAttributes(1, attributes, values, (CUdeviceptr)(uintptr_t)pointer) ==
               CUDA_SUCCESS &&
           type == CU_MEMORYTYPE_DEVICE;
}

static tutti_status no_window(const tu_nccl_group *on, const char *why) {
    return on->nccl->cuda.host->error(TUTTI_ERROR_UNSUPPORTED,
                                      "group %s: NCCL registered a block, but not as a window of an LSA domain: %s",
                                      on->name, why);
}

/* Copies from the device on the backend's own stream. */
static CUresult fetch(const tu_nccl_group *on, void *to, CUdeviceptr from, size_t bytes) {
    const tu_cuda_driver *driver = &on->nccl->cuda.driver;
    CUresult result = driver->cuMemcpyDtoHAsync(to, from, bytes, on->device->stream);
    return result == CUDA_SUCCESS ? driver->cuStreamSynchronize(on->device->stream) : result;
}

/* 2.29 and newer: the host asks for each. */
static tutti_status ask_pointers(const tu_nccl_group *on, ncclWindow_t window, void **pointers) {
    for (int i = 0; i < on->size; i++) {
        ncclResult_t result = on->nccl->library.ncclGetPeerDevicePointer(window, 0, i, &pointers[i]);
        if (result != ncclSuccess || pointers[i] == NULL)
            return no_window(on, "a peer has no address in it");
    }
    return TUTTI_OK;
}

/* 2.28: the window itself, in device memory, says where LSA rank 0 lies, and how far the others are apart. */
static tutti_status read_pointers(const tu_nccl_group *on, ncclWindow_t window, void **pointers) {
    tu_nccl_window head;
    if (!is_device_memory(on->nccl, window) ||
        fetch(on, &head, (CUdeviceptr)(uintptr_t)window, sizeof head) != CUDA_SUCCESS)
        return no_window(on, "it is not in device memory");
    if (head.lsa_rank != on->rank || head.base == NULL || (head.stride4G == 0 && on->size > 1))
        return no_window(on, "it does not say where its members lie");
    for (int i = 0; i < on->size; i++)
        pointers[i] = head.base + ((uint64_t)head.stride4G << 32) * (uint64_t)i;
    return TUTTI_OK;
}

/* Reads the last page of every member's block through its address here. */
static tutti_status check_identities(const tu_nccl_group *on, void *const *pointers, const ticket *tickets) {
    for (int i = 0; i < on->size; i++) {
        uint64_t found = 0;
        CUdeviceptr page = (CUdeviceptr)(uintptr_t)pointers[i] + tickets[i].room;
        if (!is_device_memory(on->nccl, pointers[i]) || fetch(on, &found, page, sizeof found) != CUDA_SUCCESS ||
            found != tickets[i].identity)
            return no_window(on, "behind the address of a peer is not its block");
    }
    return TUTTI_OK;
}

static tutti_status find_pointers(tu_nccl_map *made, const ticket *tickets, void **pointers) {
    const tu_nccl_group *on = made->on;
    tutti_status status = made->window == NULL ? no_window(on, "there is no window")
                          : on->nccl->library.ncclGetPeerDevicePointer != NULL
                              ? ask_pointers(on, made->window, pointers)
                              : read_pointers(on, made->window, pointers);
    if (status == TUTTI_OK)
        status = check_identities(on, pointers, tickets);
    if (status != TUTTI_OK)
        return status;
    made->map.base = (CUdeviceptr)(uintptr_t)pointers[0];
    made->map.stride = on->size > 1 ? (size_t)((char *)pointers[1] - (char *)pointers[0]) : tickets[0].room + PAGE;
    for (int i = 0; i < on->size; i++)
        if ((CUdeviceptr)(uintptr_t)pointers[i] != made->map.base + (CUdeviceptr)i * made->map.stride)
            return no_window(on, "its members do not lie at equal distances");
    return TUTTI_OK;
}

/* The address that reaches all members. A machine whose switch is ill has none, and goes on without. */
static void *find_multicast(const tu_nccl_map *made) {
    const tu_nccl_library *library = &made->on->nccl->library;
    void *pointer = NULL;
    if (library->ncclGetLsaMultimemDevicePointer == NULL || !made->map.device->multicast || made->map.count < 2 ||
        library->ncclGetLsaMultimemDevicePointer(made->window, 0, &pointer) != ncclSuccess)
        return NULL;
    return pointer;
}

/* In the device's context, with the communicator's lock. All members come here together. */
static tutti_status register_window(tu_nccl_map *made, const tu_backend_block *own, int64_t deadline) {
    tu_nccl_group *on = made->on;
    const tu_nccl_block *block = own->handle;
    tu_nccl_go_inside(on, deadline);
    ncclResult_t result = on->nccl->library.ncclCommWindowRegister(on->comm, own->address, block->room + PAGE,
                                                                   &made->window, NCCL_WIN_COLL_SYMMETRIC);
    tutti_status status = tu_nccl_settle(on, tu_nccl_come_out(on, result), deadline, "registering a window");
    on->windows += status == TUTTI_OK && made->window != NULL;
    return status;
}

/* An aborted communicator drops its windows itself. */
static void drop_window(tu_nccl_map *made, int64_t deadline) {
    tu_nccl_group *on = made->on;
    if (made->window == NULL)
        return;
    if (on->comm != NULL) {
        tu_nccl_go_inside(on, deadline);
        ncclResult_t result = on->nccl->library.ncclCommWindowDeregister(on->comm, made->window);
        (void)tu_nccl_settle(on, tu_nccl_come_out(on, result), deadline, "deregistering a window");
    }
    made->window = NULL;
    tu_nccl_window_gone(on);
}

/* In the device's context. All members come here. */
static tutti_status connect(tu_nccl_map *made, const tu_backend_block *own, const ticket *tickets, void **pointers,
                            int64_t deadline) {
    tu_nccl_group *on = made->on;
    pthread_mutex_lock(&on->lock);
    tutti_status status = on->comm == NULL ? is_aborted(on) : register_window(made, own, deadline);
    if (status != TUTTI_OK) {
        on->nccl->cuda.host->group_end(on->group); /* the others wait for this rank inside of NCCL */
    } else {
        status = find_pointers(made, tickets, pointers);
        if (status == TUTTI_OK)
            made->multicast = find_multicast(made);
        else
            drop_window(made, deadline);
    }
    pthread_mutex_unlock(&on->lock);
    return status;
}

static void drop_map(tu_nccl_map *made, void **addresses) {
    if (made != NULL)
        free(made->map.near);
    free(made);
    free(addresses);
}

static tutti_status import_blocks(void *state, tutti_group *group, const tu_backend_block *own, int rank, int count,
                                  tu_backend_ticket *given, tu_backend_map *out) {
    tu_nccl *nccl = state;
    const tu_backend_host *host = nccl->cuda.host;
    int64_t deadline = host->now() + host->timeout(group, 0);
    tu_nccl_group *on = NULL;
    ticket tickets[TU_DEVICE_RANKS];
    if (count > TU_DEVICE_RANKS)
        return host->error(TUTTI_ERROR_LIMIT, "a group on GPUs has at most %d ranks", TU_DEVICE_RANKS);
    for (int i = 0; i < count; i++)
        memcpy(&tickets[i], given[i].bytes, sizeof tickets[i]);
    tutti_status status = tu_nccl_group_get(nccl, group, own->device_index, deadline, &on);
    if (on == NULL)
        return status; /* as on all members */
    tu_nccl_map *made = calloc(1, sizeof *made);
    void **addresses = calloc((size_t)count, sizeof *addresses);
    bool *near = calloc((size_t)count, sizeof *near);
    if (made == NULL || addresses == NULL || near == NULL) {
        status = host->error(TUTTI_ERROR_MEMORY, "out of memory for a window of %d blocks", count);
        free(near);
    } else {
        *made = (tu_nccl_map){ .map = { .cuda = &nccl->cuda, .device = on->device, .count = count, .near = near },
                               .on = on };
    }
    if (status == TUTTI_OK)
        status = check_domain(on);
    if (status == TUTTI_OK)
        status = tu_cuda_enter(&nccl->cuda, on->device);
    bool entered = status == TUTTI_OK;
    status = tu_cuda_agree(host, group, "nccl window", deadline, status); /* before NCCL waits for all */
    if (status == TUTTI_OK)
        status = connect(made, own, tickets, addresses, deadline);
    if (entered)
        tu_cuda_leave(&nccl->cuda);
    if (status != TUTTI_OK) {
        drop_map(made, addresses);
        return status;
    }
    addresses[rank] = own->address;
    *out = (tu_backend_map){ .addresses = addresses, .multicast = made->multicast, .handle = made };
    return TUTTI_OK;
}

static void unmap(void *state, tu_backend_map *out) {
    tu_nccl *nccl = state;
    tu_nccl_map *made = out->handle;
    if (tu_cuda_enter(&nccl->cuda, made->map.device) == TUTTI_OK) {
        (void)nccl->cuda.driver.cuCtxSynchronize(); /* kernels may still be at the blocks of others */
        pthread_mutex_lock(&made->on->lock);
        drop_window(made, nccl->cuda.host->now() + INT64_C(1000000000));
        pthread_mutex_unlock(&made->on->lock);
        tu_cuda_leave(&nccl->cuda);
    }
    drop_map(made, out->addresses);
    memset(out, 0, sizeof *out);
}

const tu_backend_memory tu_nccl_memory = {
    .size = sizeof(tu_backend_memory),
    .allocate = allocate,
    .free = free_block,
    .export_block = export_block,
    .unexport_block = unexport_block,
    .import_blocks = import_blocks,
    .unmap = unmap,
    .clear = tu_cuda_clear,
    .copy = tu_cuda_copy,
    .set32 = tu_cuda_set32,
    .write32 = tu_cuda_write32,
    .has_multicast = tu_cuda_has_multicast,
};
