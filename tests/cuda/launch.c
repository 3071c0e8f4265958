/* SPDX-License-Identifier: Apache-2.0
 *
 * What a call on a GPU costs the host, without a GPU: the functions of the driver are stand-ins that count, and so are
 * the locks of the backend. Anything that a call should not ask fails the test.
 */
#include <unistd.h>

#include "../harness.h"
#include "backend/cuda/control.h"
#include "base/clock.h"
#include "world/world.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

const unsigned char tu_cuda_image[1] = { 0 };

typedef struct counts {
    int launches, captures, contexts, pushes, others, locks;
    CUfunction kernel; /* of the last launch */
    unsigned blocks, threads;
    CUstream stream;
    tu_cuda_group_words words; /* that the last kernel was given */
    int together;              /* what it was told about where its peers are */
    int overlaps;              /* 1: may begin before the one in front of it ends; 0: not; -1: nothing was said */
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

static void (*while_it_copies)(void); /* what another thread does meanwhile; once */

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
    tu_cuda_kernel kernel = (tu_cuda_kernel)((uintptr_t)function - 1);
    if (kernel == TU_CUDA_COPY && while_it_copies != NULL)
        while_it_copies();
    if (kernel == TU_CUDA_COPY) {
        const tu_cuda_copy_args *args = parameters[0];
        /* copy_bytes: where all is whole vectors one thread takes 16 bytes at once; else every byte is another's */
        CHECK(((args->to | args->from | args->bytes) & 15) == 0);
        memcpy((void *)(uintptr_t)args->to, (const void *)(uintptr_t)args->from, args->bytes);
    } else if (kernel != TU_CUDA_FOLLOW && kernel != TU_CUDA_SIGNAL && kernel < TU_CUDA_MULTIMEM_BARRIER_SWITCH) {
        seen.words = ((const tu_cuda_meeting *)parameters[0])->group;
        seen.together = ((const tu_cuda_meeting *)parameters[0])->together;
    }
    seen.overlaps = -1;
    return CUDA_SUCCESS;
}

/* With all that is said about the launch. */
static CUresult launch_kernel_with(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    CHECK(config->grid_y == 1 && config->grid_z == 1 && config->block_y == 1 && config->block_z == 1);
    CUresult result = launch_kernel(function, config->grid_x, 1, 1, config->block_x, 1, 1, config->shared_bytes,
                                    config->stream, parameters, extra);
    bool in_usual_domain = false;
    for (unsigned i = 0; i < config->attribute_count; i++) {
        const CUlaunchAttribute *attribute = &config->attributes[i];
        if (attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            seen.overlaps = attribute->value.number;
        if (attribute->id == CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN)
            in_usual_domain = attribute->value.number == CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT;
    }
    CHECK(in_usual_domain);
    return result;
}

static CUresult wait_event(CUstream stream, CUevent event, unsigned flags) {
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

/* Copies that were asked for, in order; a launch between them is a 0. */
#define NOTED 64
typedef struct noted {
    CUdeviceptr to, from;
    size_t bytes;
} noted;
static _Thread_local noted copies[NOTED];
static _Thread_local int copied, failing_copy; /* the number of the one that fails, from 1; 0: none */

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    CHECK(copied < NOTED);
    copies[copied++] = (noted){ to, from, bytes };
    return copied == failing_copy ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult name_error(CUresult result, const char **text) {
    *text = "stand-in";
    return CUDA_SUCCESS;
}

static CUresult record(CUevent event, CUstream stream) {
    return CUDA_SUCCESS;
}

static CUresult synchronize(CUstream stream) {
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
    driver->cuStreamSynchronize = synchronize;
    driver->cuMemcpyAsync = copy;
    driver->cuGetErrorName = name_error;
    driver->cuGetErrorString = name_error;
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
    copied = failing_copy = 0;
    memset(&seen, 0, sizeof seen);
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

static void begin_together(stand_in *here, tutti_world *world) {
    begin(here, world, 2);
    here->cuda.driver.cuLaunchKernelEx = launch_kernel_with;
    here->cuda.driver.cuStreamWaitEvent = wait_event;
    here->collective.together = true;
}

TEST_WORLD_THREADS(kernels_of_ranks_on_one_device_come_while_the_ones_before_them_end, 1) {
    stand_in *here = malloc(sizeof *here);
    static const uint64_t counts[] = { 100, 100000, 4000000 };
    begin_together(here, world);
    for (int i = 0; i < 3; i++) {
        run(here, counts[i], first);
        CHECK(seen.launches == 1 && seen.together == 1 && seen.overlaps == 1);
    }
    run(here, 100, second); /* behind the tiny kernel that waits for the other stream */
    CHECK(seen.launches == 2 && seen.overlaps == 1);
    current = NULL;
    run(here, 100, second); /* refused, and made again in the same manner */
    CHECK(seen.launches == 2 && seen.overlaps == 1);
    begin(here, world, 2); /* on several devices */
    run(here, 100, first);
    CHECK(seen.together == 0 && seen.overlaps == -1);
    free(here);
}

TEST_WORLD_THREADS(ranks_that_are_threads_launch_one_after_the_other, 1) {
    stand_in *here = malloc(sizeof *here);
    tu_cuda_lockstep *step = calloc(1, sizeof *step);
    step->count = 1;
    begin_together(here, world);
    here->collective.step = step;
    run(here, 100, first);
    CHECK(seen.together == 1 && seen.overlaps == 0);
    free(step);
    free(here);
}

TEST_WORLD_THREADS(in_a_graph_a_kernel_behind_two_others_waits_for_their_ends, 1) {
    stand_in *here = malloc(sizeof *here);
    begin_together(here, world);
    capturing = 7;
    run(here, 100, first);
    CHECK_EQ(seen.overlaps, 1);
    run(here, 100, second); /* which waits for the first one's event */
    CHECK_EQ(seen.overlaps, 0);
    run(here, 100, second);
    CHECK_EQ(seen.overlaps, 1);
    free(here);
}

TEST_WORLD_THREADS(a_barrier_is_heard_beyond_the_device, 1) {
    stand_in *here = malloc(sizeof *here);
    begin_together(here, world);
    tu_device_task task = all_reduce(here, 1, first);
    task.shape = TU_DEVICE_BARRIER;
    CHECK_OK(tu_cuda_executor.run(&here->collective, &task));
    CHECK(seen.kernel == (CUfunction)(uintptr_t)(TU_CUDA_MEET + 1) && seen.together == 0);
    free(here);
}

static void check_kernel(stand_in *here, int size, uint64_t bytes, tutti_algorithm algorithm, tu_cuda_kernel kernel,
                         tutti_algorithm ran) {
    tutti_world *world = here->cuda.world;
    bool together = here->collective.together;
    begin(here, world, size);
    here->collective.together = together;
    here->cuda.driver.cuLaunchKernelEx = launch_kernel_with;
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

TEST_WORLD_THREADS(on_one_device_one_shot_goes_further_and_two_steps_of_packets_less_far, 1) {
    stand_in *here = calloc(1, sizeof *here);
    begin_together(here, world);
    const tutti_algorithm any = TUTTI_ALGORITHM_AUTO, one = TUTTI_ALGORITHM_ONE_SHOT, two = TUTTI_ALGORITHM_TWO_SHOT;
    check_kernel(here, 2, 256 << 10, any, TU_CUDA_PACKETS_F32, one);
    check_kernel(here, 2, 2 << 20, any, TU_CUDA_REDUCE_F32_2, one);
    check_kernel(here, 2, 4 << 20, any, TU_CUDA_REDUCE_F32_2, two);
    check_kernel(here, 2, 128 << 10, two, TU_CUDA_PACKETS_F32, two);
    check_kernel(here, 2, 256 << 10, two, TU_CUDA_REDUCE_F32_2, two);
    check_kernel(here, 4, 64 << 10, any, TU_CUDA_PACKETS_F32, one);
    check_kernel(here, 4, 512 << 10, any, TU_CUDA_REDUCE_F32_4, one);
    check_kernel(here, 4, 1 << 20, any, TU_CUDA_REDUCE_F32_4, two);
    check_kernel(here, 8, 64 << 10, any, TU_CUDA_REDUCE_F32_8, one);
    check_kernel(here, 8, 64 << 10, two, TU_CUDA_PACKETS_F32, two);
    check_kernel(here, 8, 256 << 10, any, TU_CUDA_REDUCE_F32_8, two);
    free(here);
}

/* ---- copy engines ---- */

/* An all_gather of `part` bytes, from private memory, into symmetric memory at offset 4096. */
static tu_device_task all_gather(stand_in *here, uint64_t *lists, uint64_t part) {
    int size = here->collective.size;
    for (int i = 0; i < size; i++) {
        lists[i] = 0; /* from the beginning of the input, to everybody */
        lists[size + i] = part;
        lists[2 * size + i] = (uint64_t)i * part;
        lists[3 * size + i] = part;
    }
    return (tu_device_task){ .size = sizeof(tu_device_task),
                             .shape = TU_DEVICE_MOVE,
                             .name = "low_contention_all_gather_multicast",
                             .in = (void *)(uintptr_t)0x900000,
                             .out = (void *)(uintptr_t)(here->map.base + 4096),
                             .out_place = { .map = &here->place, .index = 1, .offset = 4096 },
                             .timeout_ns = INT64_C(30000000000),
                             .stream = first,
                             .count = part * (uint64_t)size,
                             .root = -1,
                             .multicast = true,
                             .copy_engines = true,
                             .send_offset = lists,
                             .send_bytes = lists + size,
                             .receive_offset = lists + 2 * size,
                             .receive_bytes = lists + 3 * size };
}

TEST_WORLD_THREADS(an_all_gather_by_multicast_copies_is_one_copy_between_two_meetings, 1) {
    stand_in *here = malloc(sizeof *here);
    uint64_t lists[16];
    begin(here, world, 4);
    here->collective.rank = 2;
    here->place.multicast = (void *)(uintptr_t)0x70000000;
    tu_device_task task = all_gather(here, lists, 1000);
    CHECK_OK(tu_cuda_executor.run(&here->collective, &task));
    CHECK_EQ(seen.launches, 2);
    CHECK_EQ((uintptr_t)seen.kernel - 1, TU_CUDA_MEET);
    CHECK_EQ(copied, 1);
    CHECK(copies[0].to == 0x70000000 + 4096 + 2000 && copies[0].from == 0x900000 && copies[0].bytes == 1000);
    free(here);
}

TEST_WORLD_THREADS(without_a_switch_it_is_a_copy_for_each_member_beginning_with_its_own, 1) {
    stand_in *here = malloc(sizeof *here);
    uint64_t lists[16];
    begin(here, world, 4);
    here->collective.rank = 2;
    tu_device_task task = all_gather(here, lists, 1000);
    CHECK_OK(tu_cuda_executor.run(&here->collective, &task));
    CHECK(seen.launches == 2 && copied == 4);
    for (int step = 0; step < 4; step++)
        CHECK_EQ(copies[step].to, here->map.base + (uint64_t)((2 + step) % 4) * here->map.stride + 4096 + 2000);
    for (int failing = 1; failing <= 4; failing++) { /* a copy that fails ends the call there */
        begin(here, world, 4);
        failing_copy = failing;
        task = all_gather(here, lists, 1000);
        CHECK_STATUS(tu_cuda_executor.run(&here->collective, &task), TUTTI_ERROR_MEMORY);
        CHECK(copied == failing && seen.launches == 1);
        CHECK(!atomic_load(&here->collective.turn.taken) && !atomic_load(&here->on.turn.taken));
    }
    free(here);
}

TEST_WORLD_THREADS(ranks_whose_outputs_lie_at_different_places_have_different_signatures, 1) {
    stand_in *here = malloc(sizeof *here);
    uint64_t lists[16];
    begin(here, world, 4);
    tu_device_task one = all_gather(here, lists, 1000), other = one;
    other.out_place.offset += 16;
    CHECK_OK(tu_cuda_executor.run(&here->collective, &one));
    CHECK_OK(tu_cuda_executor.run(&here->collective, &other));
    CHECK(one.signature != other.signature);
    free(here);
}

TEST_WORLD_THREADS(a_reduce_scatter_by_copy_engines_pushes_every_part_and_adds_up_its_own, 1) {
    stand_in *here = malloc(sizeof *here);
    begin(here, world, 4);
    here->collective.rank = 1;
    here->collective.base = 0x40000000;
    here->collective.stride = 0x8000000;
    here->collective.own = here->collective.base + here->collective.stride;
    here->collective.layout.stage = 0x1000;
    uint64_t share = TU_CUDA_STAGE / 4, count = share / 4 + 100, parts[5]; /* two rounds of f32 */
    for (uint64_t i = 0; i <= 4; i++)
        parts[i] = i * count;
    tu_device_task task = all_reduce(here, 4 * count, first);
    task.shape = TU_DEVICE_REDUCE_SCATTER;
    task.parts = parts;
    task.out = (void *)(uintptr_t)(here->map.base + 16 * count); /* behind the input */
    task.out_place.offset = 16 * count;
    task.copy_engines = true;
    CHECK_OK(tu_cuda_executor.run(&here->collective, &task));
    CHECK_EQ(copied, 8);
    CHECK_EQ(seen.launches, 6); /* two meetings and a sum, twice */
    CHECK_EQ((uintptr_t)seen.kernel - 1, TU_CUDA_REDUCE_F32);
    for (uint64_t i = 0; i < 8; i++) {
        uint64_t peer = (1 + i % 4) % 4, round = i / 4;
        CHECK_EQ(copies[i].to, 0x40000000 + peer * 0x8000000 + 0x1000 + 1 * share);
        CHECK_EQ(copies[i].from, here->map.base + peer * count * 4 + round * share);
        CHECK_EQ(copies[i].bytes, round == 0 ? share : 400);
    }
    task.reduction = TUTTI_PREMUL_SUM; /* factors are handed over in meetings */
    copied = 0;
    CHECK_OK(tu_cuda_executor.run(&here->collective, &task));
    CHECK_EQ(copied, 0);
    free(here);
}

/* ---- barriers of a block ---- */

TEST_WORLD_THREADS(a_barrier_of_a_block_is_one_addition_where_there_is_a_switch_or_a_stand_in_for_it, 1) {
    stand_in *here = malloc(sizeof *here);
    tu_backend_map areas = { .handle = NULL };
    void *addresses[2] = { (void *)(uintptr_t)0x30000000, (void *)(uintptr_t)0x30100000 };
    begin(here, world, 2);
    areas.handle = &here->map;
    areas.addresses = addresses;
    tu_backend_peers peers = {
        .group = here->on.group, .state = &here->cuda, .size = 2, .channels = 8, .areas = &areas, .local = &here->on
    };
    tu_backend_call call = { .stream = first };
    counting = true;
    CHECK_OK(tu_cuda_remote.barrier(&peers, 3, &call));
    CHECK(seen.launches == 1 && seen.captures == 1 && seen.contexts == 0 && seen.locks == 0);
    CHECK_EQ((uintptr_t)seen.kernel - 1, TU_CUDA_SIGNAL);
    CHECK_EQ(seen.threads, 32);
    here->on.software = true;
    CHECK_OK(tu_cuda_remote.barrier(&peers, 3, &call));
    CHECK_EQ((uintptr_t)seen.kernel - 1, TU_CUDA_MULTIMEM_BARRIER_MEMBERS);
    CHECK_EQ(seen.threads, 1);
    areas.multicast = (void *)(uintptr_t)0x70000000;
    CHECK_OK(tu_cuda_remote.barrier(&peers, 3, &call));
    CHECK_EQ((uintptr_t)seen.kernel - 1, TU_CUDA_MULTIMEM_BARRIER_SWITCH);
    CHECK_OK(tu_cuda_remote.signal(&peers, 1, 3, &call)); /* signals stay what they are */
    CHECK_EQ((uintptr_t)seen.kernel - 1, TU_CUDA_SIGNAL);
    counting = false;
    CHECK_EQ(seen.locks, 0);
    free(here);
}

/* ---- signals of ranks that are threads of one process ---- */

typedef struct pair {
    stand_in here;
    tu_cuda_desk desk;
    _Atomic uint32_t counts[8 * 2 * 5]; /* 8 channels of 2 ranks: signals, then barriers */
    tu_backend_map areas;
    void *addresses[2];
    tu_backend_peers peers;
} pair;

static void begin_pair(pair *pair, tutti_world *world, int rank) {
    begin(&pair->here, world, 2);
    pair->here.near[0] = pair->here.near[1] = true;
    pair->here.map.near = pair->here.near;
    pair->here.map.desk = &pair->desk;
    atomic_store(&pair->desk.counts, pair->counts);
    memset(pair->counts, 0, sizeof pair->counts);
    pair->areas = (tu_backend_map){ .handle = &pair->here.map, .addresses = pair->addresses };
    pair->peers = (tu_backend_peers){ .group = pair->here.on.group,
                                      .state = &pair->here.cuda,
                                      .rank = rank,
                                      .size = 2,
                                      .channels = 8,
                                      .areas = &pair->areas,
                                      .local = &pair->here.on };
}

TEST_WORLD_THREADS(a_wait_goes_on_when_its_partner_has_launched_the_signal_and_else_is_not_counted, 1) {
    pair *pair = malloc(sizeof *pair);
    tu_backend_call soon = { .stream = first, .timeout_ns = 3000000 };
    const int signal = (3 * 2 + 1) * 2 * 2; /* channel 3, from 1 to 0: put, taken */
    begin_pair(pair, world, 0);
    CHECK_OK(
        tu_cuda_remote.wait_signal(&pair->peers, 1, 3, &soon)); /* nobody comes: it is launched, and held a while */
    CHECK_EQ(seen.launches, 1);
    CHECK_EQ(pair->counts[signal + 1], 0);
    pair->counts[signal] = 1; /* the partner launched one */
    tu_backend_call call = { .stream = first, .timeout_ns = INT64_C(3600000000000) };
    CHECK_OK(tu_cuda_remote.wait_signal(&pair->peers, 1, 3, &call));
    CHECK_EQ(pair->counts[signal + 1], 1);
    free(pair);
}

TEST_WORLD_THREADS(a_second_signal_is_held_until_the_first_is_waited_for, 1) {
    pair *pair = malloc(sizeof *pair);
    tu_backend_call call = { .stream = first, .timeout_ns = 3000000 };
    const int signal = (3 * 2 + 0) * 2 * 2 + 2; /* channel 3, from 0 to 1 */
    begin_pair(pair, world, 0);
    CHECK_OK(tu_cuda_remote.signal(&pair->peers, 1, 3, &call));
    CHECK_EQ(pair->counts[signal], 1);
    CHECK_OK(tu_cuda_remote.signal(&pair->peers, 1, 3, &call)); /* not taken in time */
    CHECK_EQ(pair->counts[signal], 1);
    pair->counts[signal + 1] = 1;
    CHECK_OK(tu_cuda_remote.signal(&pair->peers, 1, 3, &call));
    CHECK_EQ(pair->counts[signal], 2);
    CHECK_EQ(seen.locks, 0);
    free(pair);
}

TEST_WORLD_THREADS(in_a_capture_nobody_is_held_and_nothing_is_counted, 1) {
    pair *pair = malloc(sizeof *pair);
    tu_backend_call call = { .stream = first, .timeout_ns = INT64_C(3600000000000) };
    begin_pair(pair, world, 0);
    capturing = 9;
    CHECK_OK(tu_cuda_remote.wait_signal(&pair->peers, 1, 3, &call));
    CHECK_OK(tu_cuda_remote.barrier(&pair->peers, 3, &call));
    for (size_t i = 0; i < sizeof pair->counts / sizeof pair->counts[0]; i++)
        CHECK_EQ(pair->counts[i], 0);
    free(pair);
}

/* Two threads of rank 0, each on its stream. */
typedef struct caller {
    pair *pair;
    CUstream stream;
} caller;

static void *call_barrier(void *argument) {
    const caller *caller = argument;
    tu_backend_call call = { .stream = caller->stream, .timeout_ns = INT64_C(3600000000000) };
    current = ours;
    CHECK_OK(tu_cuda_remote.barrier(&caller->pair->peers, 3, &call));
    return NULL;
}

static _Atomic int barriers_launched;

static CUresult launch_and_count(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                 CUstream stream, void **parameters, void **extra) {
    atomic_fetch_add(&barriers_launched, (uintptr_t)function - 1 == TU_CUDA_SIGNAL);
    return CUDA_SUCCESS;
}

/* Streams share queues of the hardware: what the second thread launches would stand before the kernel of another rank
 * that the first thread's waits for. */
TEST_WORLD_THREADS(another_thread_launches_nothing_until_the_partners_have_launched_what_the_first_waits_for, 1) {
    pair *pair = malloc(sizeof *pair);
    const int barriers = 8 * 2 * 2 * 2 + 3 * 2; /* of channel 3 */
    begin_pair(pair, world, 0);
    pair->here.cuda.driver.cuLaunchKernel = launch_and_count;
    atomic_store(&barriers_launched, 0);
    int64_t begun = tu_clock_now();
    pthread_t threads[2];
    caller callers[2] = { { pair, first }, { pair, second } };
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, call_barrier, &callers[i]), 0);
    int launched = 0;
    for (int i = 0; i < 100 && launched < 2; i++) {
        usleep(2000);
        launched = atomic_load(&barriers_launched);
    }
    CHECK(launched < 2 || tu_clock_now() - begun >= TU_CUDA_HOLD_NS);
    atomic_store(&pair->counts[barriers + 1], 2); /* the partner comes twice */
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(atomic_load(&barriers_launched), 2);
    CHECK_EQ(pair->counts[barriers], 2);
    free(pair);
}

/* A group with kernels of which the device says how many have ended. */
typedef struct counted_group {
    stand_in here;
    _Alignas(16) tu_cuda_words there, answer;
} counted_group;

static void begin_counted(counted_group *counted, tutti_world *world, uint64_t launched, uint64_t ended) {
    *counted = (counted_group){ .there = { .ended = ended } };
    stand_in *here = &counted->here;
    begin(here, world, 2);
    tu_cuda_device *device = here->on.device;
    pthread_mutex_init(&here->cuda.lock, NULL);
    pthread_mutex_init(&device->answer_lock, NULL);
    device->answer = &counted->answer;
    device->answer_here = (uintptr_t)&counted->answer;
    here->on.words = (uintptr_t)&counted->there;
    here->on.launched = launched;
    here->on.number = 1;
    here->cuda.groups = &here->on;
}

static void end_counted(counted_group *counted) {
    pthread_mutex_destroy(&counted->here.on.device->answer_lock);
    pthread_mutex_destroy(&counted->here.cuda.lock);
    free(counted);
}

/* Kernels count on meanwhile: bytes that several threads take one after the other may be of two numbers. */
TEST_WORLD_THREADS(the_host_learns_how_many_kernels_have_ended_by_one_load, 1) {
    counted_group *counted = aligned_alloc(64, (sizeof *counted + 63) / 64 * 64);
    begin_counted(counted, world, 3, 3);
    tu_cuda_await_kernels(&counted->here.cuda, counted->here.on.device);
    CHECK(seen.launches == 1 && counted->here.on.settled == 3);
    end_counted(counted);
}

static counted_group *changing;
static tu_cuda_group later;

/* What is copied is still of the first group, which has launched more; the next look finds the second one's. */
static void change_groups(void) {
    while_it_copies = NULL;
    later = changing->here.on;
    later.launched = 3;
    later.number = 2;
    changing->here.cuda.groups = &later;
}

TEST_WORLD_THREADS(a_count_of_an_ended_group_is_not_taken_for_that_of_a_new_one_with_its_words, 1) {
    changing = aligned_alloc(64, (sizeof *changing + 63) / 64 * 64);
    begin_counted(changing, world, 5, 5);
    while_it_copies = change_groups;
    tu_cuda_await_kernels(&changing->here.cuda, changing->here.on.device);
    CHECK_EQ(seen.launches, 2); /* the second one was asked for its own */
    CHECK_EQ(changing->here.on.settled, 0);
    end_counted(changing);
}
