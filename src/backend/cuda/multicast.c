/* SPDX-License-Identifier: Apache-2.0
 *
 * Multicast: one address whose stores reach every member's block and whose loads reduce over them, by the switch.
 *
 * The order of the steps is essential:
 *
 *     1. every member's device can do it, each on a device of its own, and nobody switched it off (in the tickets)
 *     2. rank 0 creates the object and exports it
 *     3. the handle goes to everybody; when rank 0 failed, everybody hears that and goes on without
 *     4. everybody, rank 0 too, imports it and adds its device
 *     5. all agree: binding blocks until all devices were added, so one that is missing would hang the others
 *     6. everybody binds its memory and maps the object
 *     7. all agree; unless all succeeded, everybody undoes its part in reverse
 *     8. rank 0 lets go of its first reference: before that a late importer would get another, empty object
 *
 * Taking down: unmap, unbind, release, and only then may the memory behind it go.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

/* What rank 0 hands out; the others' are ignored. */
typedef struct offer {
    int32_t good;
    unsigned char fabric[64];
} offer;

/* 1. */
static bool is_possible(const tu_cuda_ticket *tickets, int count) {
    for (int i = 0; i < count; i++) {
        if (!tickets[i].multicast)
            return false;
        for (int j = 0; j < i; j++) { /* two members on one device cannot both be bound */
            if (memcmp(&tickets[i].uuid, &tickets[j].uuid, sizeof tickets[i].uuid) == 0)
                return false;
        }
    }
    return count > 1;
}

/* 2. */
static void create(tu_cuda_map *map, int handle_type, offer *offer, int *fd, CUmemGenericAllocationHandle *created) {
    const tu_cuda_driver *driver = &map->cuda->driver;
    CUmulticastObjectProp prop = { .numDevices = (unsigned)map->count,
                                   .size = map->stride,
                                   .handleTypes = (unsigned long long)handle_type };
    size_t granularity = 0;
    if (driver->cuMulticastGetGranularity(&granularity, &prop, CU_MULTICAST_GRANULARITY_MINIMUM) != CUDA_SUCCESS ||
        granularity == 0 || map->stride % granularity != 0)
        return;
    if (driver->cuMulticastCreate(created, &prop) != CUDA_SUCCESS) {
        *created = 0;
        return;
    }
    bool fabric = handle_type == CU_MEM_HANDLE_TYPE_FABRIC;
    offer->good = driver->cuMemExportToShareableHandle(fabric ? (void *)offer->fabric : (void *)fd, *created,
                                                       handle_type, 0) == CUDA_SUCCESS;
}

/* 4. */
static bool join(tu_cuda_map *map, int handle_type, const offer *offer, int fd) {
    const tu_cuda_driver *driver = &map->cuda->driver;
    bool fabric = handle_type == CU_MEM_HANDLE_TYPE_FABRIC;
    void *handle = fabric ? (void *)(uintptr_t)offer->fabric : (void *)(intptr_t)fd;
    if (driver->cuMemImportFromShareableHandle(&map->multicast, handle, handle_type) != CUDA_SUCCESS) {
        map->multicast = 0;
        return false;
    }
    return driver->cuMulticastAddDevice(map->multicast, map->device->device) == CUDA_SUCCESS;
}

/* 6. */
static bool bind_and_map(tu_cuda_map *map, const tu_cuda_block *own) {
    const tu_cuda_driver *driver = &map->cuda->driver;
    CUdeviceptr address = 0;
    map->multicast_bound =
        driver->cuMulticastBindMem(map->multicast, 0, own->memory, 0, map->stride, 0) == CUDA_SUCCESS;
    if (!map->multicast_bound || driver->cuMemAddressReserve(&address, map->stride, 0, 0, 0) != CUDA_SUCCESS)
        return false;
    if (tu_cuda_map_at(map->cuda, map->device, address, map->stride, map->multicast) != CUDA_SUCCESS) {
        driver->cuMemAddressFree(address, map->stride);
        return false;
    }
    map->multicast_address = address;
    return true;
}

void tu_cuda_multicast_drop(tu_cuda_map *map) {
    const tu_cuda_driver *driver = &map->cuda->driver;
    if (map->multicast_address != 0) {
        driver->cuMemUnmap(map->multicast_address, map->stride);
        driver->cuMemAddressFree(map->multicast_address, map->stride);
    }
    if (map->multicast_bound)
        driver->cuMulticastUnbind(map->multicast, map->device->device, 0, map->stride);
    if (map->multicast != 0)
        driver->cuMemRelease(map->multicast);
    map->multicast_address = 0;
    map->multicast_bound = false;
    map->multicast = 0;
}

/* 5 and 7: all members say how it went; *all is false unless everybody is well. */
static tutti_status agree(tu_cuda_map *map, tutti_group *group, const char *step, int64_t deadline, bool well,
                          unsigned char *answers, bool *all) {
    unsigned char mine = well;
    tutti_status status = map->cuda->host->exchange(group, step, &mine, 1, -1, deadline, answers, NULL);
    *all = status == TUTTI_OK;
    for (int i = 0; *all && i < map->count; i++)
        *all = answers[i] != 0;
    return status;
}

tutti_status tu_cuda_multicast_make(tu_cuda_map *map, tutti_group *group, const tu_cuda_block *own, int rank,
                                    const tu_cuda_ticket *tickets, bool broken, int64_t deadline) {
    tu_cuda *cuda = map->cuda;
    if (!is_possible(tickets, map->count))
        return TUTTI_OK;
    size_t count = (size_t)map->count;
    offer mine = { .good = 0 }, *offers = calloc(count, sizeof *offers);
    unsigned char *answers = calloc(count, 1);
    int *fds = calloc(count, sizeof *fds), fd = -1, type = tickets[0].handle_type;
    CUmemGenericAllocationHandle created = 0;
    bool all = false, well = false;
    tutti_status status = TUTTI_OK;
    if (offers == NULL || fds == NULL || answers == NULL) {
        status = cuda->host->error(TUTTI_ERROR_MEMORY, "out of memory for multicast");
        goto free_lists;
    }
    if (rank == 0 && !broken)
        create(map, type, &mine, &fd, &created);
    status = cuda->host->exchange(group, "multicast", &mine, sizeof mine, fd, deadline, offers, fds); /* 3 */
    if (status != TUTTI_OK)
        goto release_created;
    well = offers[0].good && !broken && join(map, type, &offers[0], fds[0]);
    for (int i = 0; i < map->count; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
    }
    status = agree(map, group, "multicast devices", deadline, well, answers, &all);
    if (status == TUTTI_OK && all) {
        well = bind_and_map(map, own);
        status = agree(map, group, "multicast mapping", deadline, well, answers, &all);
    }
    if (status != TUTTI_OK || !all)
        tu_cuda_multicast_drop(map);
    else
        cuda->host->log(cuda->world, TUTTI_LOG_DEBUG, "cuda", "%zu bytes of %d ranks have a multicast address",
                        map->stride, map->count);

release_created:
    if (created != 0)
        cuda->driver.cuMemRelease(created); /* 8 */
    if (fd >= 0)
        close(fd);
free_lists:
    free(answers);
    free(fds);
    free(offers);
    return status;
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
