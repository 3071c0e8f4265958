/* SPDX-License-Identifier: Apache-2.0
 *
 * What a call on a GPU costs the host, without a GPU: the functions of the driver are stand-ins that count, and so are
 * the locks of the backend. Anything that a call should not ask fails the test.
 */
#include "../harness.h"
#include "backend/cuda/control.h"
#include "world/world.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

const unsigned char tu_cuda_image[1] = { 0 };

typedef struct counts {
    int launches, captures, contexts, pushes, others, locks;
    CUfunction kernel; /* of the last launch */
    unsigned blocks, threads;
    CUstream stream;
    tu_cuda_group_words words; /* that the last kernel was given */
} counts;

static _Thread_local counts seen;
static _Thread_local bool counting;
static _Thread_local CUcontext current;                     /* of this thread, as the driver has it */
static _Thread_local unsigned long long capturing;          /* 0: no stream captures */
static const CUcontext ours = (CUcontext)(uintptr_t)0x1000; /* the device's */

int __real_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex) {
    seen.locks += counting;
    return __real_pthread_mutex_lock(mutex);
}

/* Everything that has no stand-in below. */
#define X(required, name, since, parameters)  \
    static CUresult other_##name parameters { \
        seen.others++;                        \
        FAIL("the driver was asked " #name);  \
        return CUDA_ERROR_NOT_SUPPORTED;      \
    }
TU_CUDA_FUNCTIONS(X)
#undef X

static CUresult launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,
                              void **parameters, void **extra) {
    seen.launches++;
    if (current != ours)
        return CUDA_ERROR_INVALID_CONTEXT;
    seen.kernel = function;
    seen.blocks = grid_x;
    seen.threads = block_x;
    seen.stream = stream;
    bool meets = (uintptr_t)function - 1 != TU_CUDA_FOLLOW && (uintptr_t)function - 1 != TU_CUDA_SIGNAL;
    if (meets)
        seen.words = ((const tu_cuda_meeting *)parameters[0])->group;
    return CUDA_SUCCESS;
}

static CUresult get_capture(CUstream stream, int *status, unsigned long long *id, void **graph,
                            const void **dependencies, size_t *dependency_count) {
    seen.captures++;
    *status = capturing != 0;
    *id = capturing;
    return CUDA_SUCCESS;
}

static CUresult get_current(CUcontext *context) {
    seen.contexts++;
    *context = current;
    return CUDA_SUCCESS;
}

static CUresult push(CUcontext context) {
    seen.pushes++;
    current = context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context) {
    *context = current;
    current = NULL;
    return CUDA_SUCCESS;
}

static CUresult record(CUevent event, CUstream stream) {
    return CUDA_SUCCESS;
}

/* A rank's side of a group on a device that is not there. */
typedef struct stand_in {
    tu_cuda cuda;
    tu_cuda_group on;
    tu_cuda_collective collective;
    tu_cuda_report report;
    tu_cuda_map map;
    tu_backend_map place;
    tu_cuda_mapping uploaded[4];
    bool near[2];
} stand_in;

static void begin(stand_in *here, tutti_world *world, int size) {
    memset(here, 0, sizeof *here);
    tu_cuda_driver *driver = &here->cuda.driver;
#define X(required, name, since, parameters) driver->name = other_##name;
    TU_CUDA_FUNCTIONS(X)
#undef X
    driver->cuLaunchKernel = launch_kernel;
    driver->cuStreamGetCaptureInfo = get_capture;
    driver->cuCtxGetCurrent = get_current;
    driver->cuCtxPushCurrent = push;
    driver->cuCtxPopCurrent = pop;
    driver->cuEventRecord = record;
    here->cuda.host = &tu_backend_host_table;
    here->cuda.world = world;
    here->cuda.device_count = 1;
    atomic_store(&here->cuda.watched, true); /* no thread is needed */
    tu_cuda_device *device = &here->cuda.devices[0];
    device->open = true;
    device->context = ours;
    for (int i = 0; i < TU_CUDA_KERNEL_COUNT; i++)
        device->kernels[i] = (CUfunction)(uintptr_t)(i + 1);
    here->on.cuda = &here->cuda;
    here->on.group = tutti_world_group(world);
    here->on.device = device;
    here->on.told = &here->report;
    here->map = (tu_cuda_map){ .cuda = &here->cuda, .device = device, .base = 0x10000000, .stride = 1 << 24 };
    here->place.handle = &here->map;
    here->uploaded[1] = (tu_cuda_mapping){ here->map.base, here->map.stride };
    here->collective = (tu_cuda_collective){ .cuda = &here->cuda,
                                             .group = here->on.group,
                                             .size = size,
                                             .device = device,
                                             .on = &here->on,
                                             .layout = { .packet_room = 131072 / (uint64_t)(size * size) },
                                             .uploaded = here->uploaded,
                                             .near = here->near,
                                             .blocks = 66 };
    current = ours;
    capturing = 0;
}

/* An all-reduce of f32 on symmetric memory that the device knows. */
static tu_device_task all_reduce(stand_in *here, uint64_t count, CUstream stream) {
    return (tu_device_task){ .size = sizeof(tu_device_task),
                             .shape = TU_DEVICE_REDUCE,
                             .name = "all_reduce",
                             .in = (void *)(uintptr_t)here->map.base,
                             .out = (void *)(uintptr_t)(here->map.base + (1 << 23)),
                             .in_place = { .map = &here->place, .index = 1 },
                             .out_place = { .map = &here->place, .index = 1, .offset = 1 << 23 },
                             .timeout_ns = INT64_C(30000000000),
                             .stream = stream,
                             .dtype = TUTTI_F32,
                             .reduction = TUTTI_SUM,
                             .count = count,
                             .root = -1 };
}

static void run(stand_in *here, uint64_t count, CUstream stream) {
    tu_device_task task = all_reduce(here, count, stream);
    memset(&seen, 0, sizeof seen);
    counting = true;
    tutti_status status = tu_cuda_executor.run(&here->collective, &task);
    counting = false;
    CHECK_OK(status);
}

static const CUstream first = (CUstream)(uintptr_t)0x5000, second = (CUstream)(uintptr_t)0x6000;

TEST_WORLD_THREADS(a_call_takes_no_lock_and_asks_the_driver_only_whether_its_stream_captures, 1) {
    stand_in *here = malloc(sizeof *here);
    begin(here, world, 2);
    static const uint64_t counts[] = { 100, 100000, 4000000 }; /* by packets, and where the data lies */
    for (int i = 0; i < 3; i++) {
        run(here, counts[i], first);
        CHECK_EQ(seen.launches, 1);
        CHECK_EQ(seen.captures, 1);
        CHECK_EQ(seen.contexts, 0);
        CHECK_EQ(seen.pushes, 0);
        CHECK_EQ(seen.locks, 0);
        CHECK(seen.stream == first);
    }
    free(here);
}

TEST_WORLD_THREADS(on_the_default_stream_the_driver_is_asked_nothing, 1) {
    stand_in *here = malloc(sizeof *here);
    begin(here, world, 2);
    run(here, 100, NULL);
    CHECK_EQ(seen.launches, 1);
    CHECK_EQ(seen.captures + seen.contexts + seen.pushes + seen.locks, 0);
    free(here);
}

TEST_WORLD_THREADS(a_call_on_another_stream_is_preceded_by_one_tiny_kernel_and_knows_its_place, 1) {
    stand_in *here = malloc(sizeof *here);
    begin(here, world, 2);
    run(here, 100, first);
    CHECK_EQ(seen.words.place, 1);
    unsigned blocks = seen.blocks;
    run(here, 100, second);
    CHECK_EQ(seen.launches, 2);
    CHECK_EQ(seen.words.place, blocks + 1);
    run(here, 100, second);
    CHECK_EQ(seen.launches, 1);
    CHECK_EQ(seen.words.place, 2 * blocks + 1);
    capturing = 7; /* in a graph nothing is counted */
    run(here, 100, second);
    CHECK_EQ(seen.launches, 1);
    CHECK_EQ(seen.words.place, 0);
    CHECK_EQ(atomic_load(&here->on.launched), 3 * blocks);
    free(here);
}

TEST_WORLD_THREADS(only_where_the_context_is_not_current_it_is_pushed_and_popped, 1) {
    stand_in *here = malloc(sizeof *here);
    begin(here, world, 2);
    current = NULL;
    run(here, 100, first);
    CHECK_EQ(seen.launches, 2); /* refused, and made again */
    CHECK_EQ(seen.pushes, 1);
    CHECK(current == NULL);
    CHECK_EQ(atomic_load(&here->on.launched), 1);
    free(here);
}

static void check_kernel(stand_in *here, int size, uint64_t bytes, tutti_algorithm algorithm, tu_cuda_kernel kernel,
                         tutti_algorithm ran) {
    tutti_world *world = here->cuda.world;
    begin(here, world, size);
    tu_device_task task = all_reduce(here, bytes / 4, first);
    task.algorithm = algorithm;
    CHECK_OK(tu_cuda_executor.run(&here->collective, &task));
    CHECK_EQ((uintptr_t)seen.kernel - 1, (uintptr_t)kernel);
    CHECK_EQ(task.ran, ran);
    CHECK(seen.blocks >= 1 && seen.blocks <= 66);
}

TEST_WORLD_THREADS(small_sums_go_by_packets_in_one_step_or_two, 1) {
    stand_in *here = calloc(1, sizeof *here);
    begin(here, world, 2);
    const tutti_algorithm any = TUTTI_ALGORITHM_AUTO, one = TUTTI_ALGORITHM_ONE_SHOT, two = TUTTI_ALGORITHM_TWO_SHOT;
    check_kernel(here, 2, 4096, any, TU_CUDA_PACKETS_F32, one);
    check_kernel(here, 2, 256 << 10, any, TU_CUDA_PACKETS_F32, one);
    check_kernel(here, 2, 1 << 20, any, TU_CUDA_REDUCE_F32_2, two);
    check_kernel(here, 4, 64 << 10, any, TU_CUDA_PACKETS_F32, one);
    check_kernel(here, 4, 256 << 10, any, TU_CUDA_PACKETS_F32, two);
    check_kernel(here, 4, 1 << 20, any, TU_CUDA_REDUCE_F32_4, two);
    check_kernel(here, 8, 4096, two, TU_CUDA_PACKETS_F32, two);
    check_kernel(here, 8, 64 << 10, any, TU_CUDA_PACKETS_F32, two);
    check_kernel(here, 8, 64 << 10, one, TU_CUDA_REDUCE_F32_8, one); /* too much to send to everybody */
    check_kernel(here, 8, 4 << 20, any, TU_CUDA_REDUCE_F32_8, two);
    free(here);
}
