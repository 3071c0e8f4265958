/* SPDX-License-Identifier: Apache-2.0
 *
 * Setting up, refusing and taking down multicast, step by step, without a GPU: the functions of the driver are
 * stand-ins that keep count of everything they give out and of the order of calls, and fail where a test says so. The
 * exchanges between the ranks are real.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <unistd.h>

#include "../harness.h"
#include "backend/cuda/cuda.h"
#include "world/world.h"

#define RANKS 3
#define STRIDE ((size_t)2 << 20)

typedef enum step {
    NOTHING,
    GRANULARITY,
    CREATE,
    EXPORT,
    IMPORT,
    ADD_DEVICE,
    BIND,
    RESERVE,
    MAP,
    ACCESS,
    STEPS
} step;

/* What one rank's driver has given out. */
typedef struct stand_in {
    step failing;
    int created, imported, bound, reserved, mapped;
    int order;                                /* of calls that take down */
    int unmapped_at, unbound_at, released_at; /* their place in that order */
    int calls;                                /* all of them */
} stand_in;

static _Thread_local stand_in here;
static _Atomic int added;        /* devices of the object, by all ranks */
static _Atomic int importable;   /* the creator's reference lives */
static _Atomic int late_imports; /* after it was gone: they would get an empty object */
static _Atomic int early_binds;  /* before all devices were added: they would hang */

static CUresult outcome(step step) {
    here.calls++;
    return here.failing == step ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

static CUresult get_granularity(size_t *granularity, const CUmulticastObjectProp *prop, int option) {
    (void)prop;
    (void)option;
    *granularity = STRIDE;
    return outcome(GRANULARITY);
}

static CUresult create(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop) {
    CHECK_EQ(prop->numDevices, RANKS);
    CHECK_EQ(prop->size, STRIDE);
    if (outcome(CREATE) != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_SUPPORTED;
    here.created++;
    atomic_store(&importable, 1);
    *handle = 100;
    return CUDA_SUCCESS;
}

static CUresult export_handle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                              unsigned long long flags) {
    (void)flags;
    CHECK_EQ(handle, 100);
    CHECK_EQ(type, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (outcome(EXPORT) != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_SUPPORTED;
    *(int *)shareable = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return CUDA_SUCCESS;
}

static CUresult import_handle(CUmemGenericAllocationHandle *handle, void *shareable, int type) {
    (void)type;
    CHECK(fcntl((int)(intptr_t)shareable, F_GETFD) >= 0); /* a descriptor that is open here */
    if (outcome(IMPORT) != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_SUPPORTED;
    atomic_fetch_add(&late_imports, atomic_load(&importable) == 0);
    here.imported++;
    *handle = 200;
    return CUDA_SUCCESS;
}

static CUresult add_device(CUmemGenericAllocationHandle handle, CUdevice device) {
    (void)device;
    CHECK_EQ(handle, 200);
    if (outcome(ADD_DEVICE) != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_SUPPORTED;
    atomic_fetch_add(&added, 1);
    return CUDA_SUCCESS;
}

static CUresult bind_memory(CUmemGenericAllocationHandle multicast, size_t offset, CUmemGenericAllocationHandle memory,
                            size_t memory_offset, size_t bytes, unsigned long long flags) {
    (void)flags;
    CHECK(multicast == 200 && offset == 0 && memory == 7 && memory_offset == 0 && bytes == STRIDE);
    atomic_fetch_add(&early_binds, atomic_load(&added) != RANKS);
    if (outcome(BIND) != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_SUPPORTED;
    here.bound++;
    return CUDA_SUCCESS;
}

static CUresult unbind(CUmemGenericAllocationHandle multicast, CUdevice device, size_t offset, size_t bytes) {
    (void)device;
    CHECK(multicast == 200 && offset == 0 && bytes == STRIDE);
    here.bound--;
    here.unbound_at = ++here.order;
    return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                        unsigned long long flags) {
    (void)alignment;
    (void)hint;
    (void)flags;
    CHECK_EQ(bytes, STRIDE);
    if (outcome(RESERVE) != CUDA_SUCCESS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    here.reserved++;
    *address = 0x7000000;
    return CUDA_SUCCESS;
}

static CUresult free_address(CUdeviceptr address, size_t bytes) {
    CHECK(address == 0x7000000 && bytes == STRIDE);
    here.reserved--;
    return CUDA_SUCCESS;
}

static CUresult map_memory(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                           unsigned long long flags) {
    (void)bytes;
    (void)flags;
    CHECK(address == 0x7000000 && offset == 0 && handle == 200); /* a multicast handle is mapped from 0 only */
    if (outcome(MAP) != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_SUPPORTED;
    here.mapped++;
    return CUDA_SUCCESS;
}

static CUresult unmap_memory(CUdeviceptr address, size_t bytes) {
    (void)address;
    (void)bytes;
    here.mapped--;
    here.unmapped_at = ++here.order;
    return CUDA_SUCCESS;
}

static CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *desc, size_t count) {
    (void)address;
    (void)bytes;
    CHECK(count == 1 && desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    return outcome(ACCESS);
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    if (handle == 100) { /* the creator's own reference: everybody must be through */
        here.created--;
        atomic_store(&importable, 0);
        return CUDA_SUCCESS;
    }
    CHECK_EQ(handle, 200);
    here.imported--;
    here.released_at = ++here.order;
    return CUDA_SUCCESS;
}

static void stand_in_driver(tu_cuda_driver *driver) {
    driver->cuMulticastGetGranularity = get_granularity;
    driver->cuMulticastCreate = create;
    driver->cuMemExportToShareableHandle = export_handle;
    driver->cuMemImportFromShareableHandle = import_handle;
    driver->cuMulticastAddDevice = add_device;
    driver->cuMulticastBindMem = bind_memory;
    driver->cuMulticastUnbind = unbind;
    driver->cuMemAddressReserve = reserve;
    driver->cuMemAddressFree = free_address;
    driver->cuMemMap = map_memory;
    driver->cuMemUnmap = unmap_memory;
    driver->cuMemSetAccess = set_access;
    driver->cuMemRelease = release;
}

/* What multicast.c needs of its neighbours. */
CUresult tu_cuda_map_at(tu_cuda *cuda, tu_cuda_device *device, CUdeviceptr address, size_t bytes,
                        CUmemGenericAllocationHandle memory) {
    CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, device->device }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    CUresult result = cuda->driver.cuMemMap(address, bytes, 0, memory, 0);
    if (result == CUDA_SUCCESS && (result = cuda->driver.cuMemSetAccess(address, bytes, &access, 1)) != CUDA_SUCCESS)
        cuda->driver.cuMemUnmap(address, bytes);
    return result;
}

tutti_status tu_cuda_device_open(tu_cuda *cuda, int index, tu_cuda_device **device, int *chosen) {
    *device = &cuda->devices[index];
    *chosen = index;
    return TUTTI_OK;
}

/* One rank's part of setting up, with a failure at a step of one rank. */
typedef struct attempt {
    tu_cuda cuda;
    tu_cuda_device device;
    tu_cuda_map map;
    tu_cuda_ticket tickets[RANKS];
    tu_cuda_block own;
} attempt;

static void begin(attempt *attempt, tutti_world *world, step failing, bool one_device) {
    here = (stand_in){ .failing = failing };
    memset(attempt, 0, sizeof *attempt);
    attempt->cuda.host = &tu_backend_host_table;
    attempt->cuda.world = world;
    stand_in_driver(&attempt->cuda.driver);
    attempt->own.memory = 7;
    attempt->map =
        (tu_cuda_map){ .cuda = &attempt->cuda, .device = &attempt->device, .stride = STRIDE, .count = RANKS };
    for (int rank = 0; rank < RANKS; rank++) {
        attempt->tickets[rank].multicast = 1;
        attempt->tickets[rank].handle_type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        attempt->tickets[rank].uuid.bytes[0] = one_device ? 1 : (unsigned char)rank;
    }
}

static tutti_status make(attempt *attempt, tutti_world *world, bool broken) {
    tutti_group *group = tutti_world_group(world);
    return tu_cuda_multicast_make(&attempt->map, group, &attempt->own, tutti_world_rank(world), attempt->tickets,
                                  broken, tu_backend_host_table.now() + INT64_C(30000000000));
}

static void check_nothing_is_left(void) {
    CHECK_EQ(here.created, 0);
    CHECK_EQ(here.imported, 0);
    CHECK_EQ(here.bound, 0);
    CHECK_EQ(here.reserved, 0);
    CHECK_EQ(here.mapped, 0);
}

/* All members, between two attempts: the counts of all are those of one attempt. */
static void meet(tutti_world *world) {
    unsigned char mine = 1, all[RANKS];
    CHECK_OK(tu_backend_host_table.exchange(tutti_world_group(world), "next attempt", &mine, 1, -1,
                                            tu_backend_host_table.now() + INT64_C(30000000000), all, NULL));
}

static void start_over(tutti_world *world) {
    meet(world);
    CHECK_EQ(atomic_load(&late_imports), 0);
    CHECK_EQ(atomic_load(&early_binds), 0);
    meet(world);
    if (tutti_world_rank(world) == 0)
        atomic_store(&added, 0);
    meet(world);
}

TEST_WORLD_THREADS(multicast_is_set_up_and_taken_down_in_the_order_that_the_driver_needs, RANKS) {
    attempt attempt;
    begin(&attempt, world, NOTHING, false);
    CHECK_OK(make(&attempt, world, false));
    CHECK_EQ(attempt.map.multicast_address, 0x7000000);
    CHECK_EQ(here.created, 0); /* the creator's own reference has gone, its import lives */
    CHECK(here.imported == 1 && here.bound == 1 && here.mapped == 1 && here.reserved == 1);
    start_over(world);
    tu_cuda_multicast_drop(&attempt.map);
    CHECK(here.unmapped_at < here.unbound_at && here.unbound_at < here.released_at);
    check_nothing_is_left();
    CHECK_EQ(attempt.map.multicast_address, 0);
    tu_cuda_multicast_drop(&attempt.map); /* again is nothing */
    CHECK_EQ(here.order, 3);
}

TEST_WORLD_THREADS(a_failure_at_any_step_on_any_rank_leaves_all_without_multicast_and_nothing_behind, RANKS) {
    for (int failing = GRANULARITY; failing < STEPS; failing++) {
        for (int victim = 0; victim < RANKS; victim++) {
            attempt attempt;
            bool only_first = failing == GRANULARITY || failing == CREATE || failing == EXPORT;
            if (only_first && victim != 0)
                continue;
            begin(&attempt, world, tutti_world_rank(world) == victim ? (step)failing : NOTHING, false);
            CHECK_OK(make(&attempt, world, false)); /* going without is no error */
            CHECK_EQ(attempt.map.multicast_address, 0);
            check_nothing_is_left();
            start_over(world);
        }
    }
}

TEST_WORLD_THREADS(a_rank_whose_own_mapping_failed_takes_part_so_that_nobody_waits_for_it, RANKS) {
    for (int victim = 0; victim < RANKS; victim++) {
        attempt attempt;
        begin(&attempt, world, NOTHING, false);
        CHECK_OK(make(&attempt, world, tutti_world_rank(world) == victim));
        CHECK_EQ(attempt.map.multicast_address, 0);
        check_nothing_is_left();
        start_over(world);
    }
}

TEST_WORLD_THREADS(without_support_on_every_rank_or_on_one_device_nothing_is_tried, RANKS) {
    attempt attempt;
    begin(&attempt, world, NOTHING, true); /* two ranks on one device */
    CHECK_OK(make(&attempt, world, false));
    CHECK_EQ(here.calls, 0);
    begin(&attempt, world, NOTHING, false);
    attempt.tickets[1].multicast = 0; /* or switched off there */
    CHECK_OK(make(&attempt, world, false));
    CHECK_EQ(here.calls, 0);
    CHECK_EQ(attempt.map.multicast_address, 0);
}
