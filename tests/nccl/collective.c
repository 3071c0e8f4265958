/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives by NCCL: every one that it has, against the CPU's; and what happens when ranks disagree, do not come, or
 * are stuck.
 */
#include <signal.h>

#include <tutti/backend.h>

#include "../against_cpu.h"
#include "gpu.h"

/* ---- results ---- */

static tutti_status by_nccl(tutti_group *group, operation *run, size_t in_count, size_t out_count, size_t count,
                            tutti_dtype dtype, tutti_reduction reduction, bool in_place) {
    comparison comparison = { .run = run,
                              .in_count = in_count,
                              .out_count = out_count,
                              .count = count,
                              .dtype = dtype,
                              .reduction = reduction,
                              .in_place = in_place,
                              .executor = "nccl" };
    return compare(group, &comparison);
}

/* NCCL has no 16-bit integers and no bit operations. */
static bool nccl_has(tutti_dtype dtype, tutti_reduction reduction) {
    bool complex = dtype == TUTTI_C64 || dtype == TUTTI_C128;
    if (dtype == TUTTI_I16 || dtype == TUTTI_U16)
        return false;
    switch (reduction) {
    case TUTTI_SUM:
        return true;
    case TUTTI_AVG:
        return dtype != TUTTI_BOOL;
    case TUTTI_PREMUL_SUM:
        return dtype <= TUTTI_F8_E5M2 || complex;
    case TUTTI_BAND:
    case TUTTI_BOR:
        return dtype == TUTTI_BOOL;
    case TUTTI_BXOR:
        return false;
    default:
        return !complex;
    }
}

TEST_NCCL(all_reduce_gives_what_the_cpu_gives_for_every_type_and_reduction_that_nccl_has) {
    tutti_group *group = tutti_world_group(world);
    for (int dtype = TUTTI_F64; dtype <= TUTTI_C128; dtype++) {
        for (int reduction = TUTTI_SUM; reduction <= TUTTI_PREMUL_SUM; reduction++) {
            if (!tutti_reduction_applies((tutti_reduction)reduction, (tutti_dtype)dtype))
                continue;
            tutti_status status = by_nccl(group, all_reduce, 1003, 1003, 1003, (tutti_dtype)dtype,
                                          (tutti_reduction)reduction, (dtype + reduction) % 2 == 0);
            if (status == TUTTI_OK && !nccl_has((tutti_dtype)dtype, (tutti_reduction)reduction))
                FAIL("%s %s ran, although NCCL has none", tutti_dtype_name((tutti_dtype)dtype),
                     tutti_reduction_name((tutti_reduction)reduction));
            if (nccl_has((tutti_dtype)dtype, (tutti_reduction)reduction))
                CHECK_OK(status);
            else
                CHECK_EQ(status, TUTTI_ERROR_UNSUPPORTED);
        }
    }
    tutti_ran ran = TUTTI_RAN_INIT;
    CHECK_OK(by_nccl(group, all_reduce, 7, 7, 7, TUTTI_F32, TUTTI_SUM, true));
    CHECK_OK(tutti_all_reduce(group, NULL, NULL, 0, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .device = TUTTI_CUDA)));
    CHECK_OK(tutti_group_ran(group, &ran));
    CHECK_TEXT(ran.executor, "nccl");
}

TEST_NCCL(every_collective_gives_what_the_cpu_gives) {
    static const size_t counts[] = { 1, 1000, 70001 };
    tutti_group *group = tutti_world_group(world);
    size_t size = (size_t)tutti_group_size(group);
    bool root = tutti_group_rank(group) == last(group);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        size_t n = counts[i];
        for (int in_place = 0; in_place < 2; in_place++) {
            CHECK_OK(by_nccl(group, all_gather, n, n * size, n, TUTTI_BF16, 0, in_place));
            CHECK_OK(by_nccl(group, all_to_all, n * size, n * size, n, TUTTI_I64, 0, in_place));
            CHECK_OK(by_nccl(group, reduce_scatter, n * size, n, n, TUTTI_F32, TUTTI_SUM, false));
            CHECK_OK(by_nccl(group, broadcast, n, n, n, TUTTI_U8, 0, in_place));
            CHECK_OK(by_nccl(group, reduce, n, root ? n : 0, n, TUTTI_F32, TUTTI_MAX, in_place));
            CHECK_OK(by_nccl(group, gather, n, root ? n * size : 0, n, TUTTI_F64, 0, false));
            CHECK_OK(by_nccl(group, scatter, n * size, n, n, TUTTI_C64, 0, false));
        }
    }
    CHECK_OK(tutti_barrier(group, BY_NCCL));
    gpu_settle();
    CHECK_OK(tutti_group_check(group));
}

/* ---- parts of several sizes ---- */

TEST_NCCL(parts_of_several_sizes_arrive_and_unequal_splits_fail_before_nccl_is_entered) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t in_counts[64], in_offsets[64], out_counts[64], out_offsets[64], in_sum = 0, out_sum = 0;
    for (int i = 0; i < size; i++) { /* rank r sends 3 * r + i + 1 to rank i */
        in_counts[i] = (size_t)(3 * rank + i + 1);
        out_counts[i] = (size_t)(3 * i + rank + 1);
        in_offsets[i] = in_sum;
        out_offsets[i] = out_sum;
        in_sum += in_counts[i];
        out_sum += out_counts[i];
    }
    int32_t *in = malloc(in_sum * 4), *expected = malloc(out_sum * 4), *result = malloc(out_sum * 4);
    for (size_t i = 0; i < in_sum; i++)
        in[i] = rank * 1000 + (int32_t)i;
    int32_t *device_in = gpu_private(in_sum * 4), *device_out = gpu_private(out_sum * 4);
    gpu_write(device_in, in, in_sum * 4);
    CHECK_OK(tutti_all_to_all_v(group, device_in, in_counts, in_offsets, device_out, out_counts, out_offsets, TUTTI_I32,
                                BY_NCCL));
    CHECK_OK(tutti_all_to_all_v(group, in, in_counts, in_offsets, expected, out_counts, out_offsets, TUTTI_I32, NULL));
    gpu_settle();
    gpu_read(result, device_out, out_sum * 4);
    CHECK(memcmp(result, expected, out_sum * 4) == 0);
    if (rank == 1)
        in_counts[0]--;
    CHECK_STATUS(tutti_all_to_all_v(group, device_in, in_counts, in_offsets, device_out, out_counts, out_offsets,
                                    TUTTI_I32, BY_NCCL),
                 TUTTI_ERROR_MISMATCH);
    gpu_private_free(device_in);
    gpu_private_free(device_out);
    free(in);
    free(expected);
    free(result);
}

/* ---- works, graphs, streams ---- */

TEST_NCCL(a_work_runs_beside_the_stream_and_can_be_waited_for) {
    tutti_group *group = tutti_world_group(world);
    float host[256], *buffer = gpu_private(sizeof host);
    for (int i = 0; i < 256; i++)
        host[i] = (float)i;
    gpu_write(buffer, host, sizeof host);
    tutti_work *work;
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 256, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .work = &work)));
    CHECK_OK(tutti_work_wait(work, 0));
    gpu_read(host, buffer, sizeof host);
    for (int i = 0; i < 256; i++)
        CHECK(host[i] == (float)(i * tutti_group_size(group)));
    tutti_work_release(work);
    gpu_private_free(buffer);
}

/* ---- what goes wrong ---- */

TEST_NCCL(calls_that_differ_fail_on_every_rank_and_show_both_sides) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    float *buffer = gpu_private(4096);
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, rank == 0 ? 100 : 99, TUTTI_F32, TUTTI_SUM, BY_NCCL),
                 TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("100 elements");
    CHECK_MESSAGE("99 elements");
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, 10, TUTTI_F32, TUTTI_SUM, BY_NCCL), TUTTI_ERROR_MISMATCH);
    gpu_private_free(buffer);
}

TEST_NCCL(a_rank_that_does_not_come_is_named_when_the_deadline_passes) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_settle();
    if (tutti_group_rank(group) != 1) {
        CHECK_STATUS(
            tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM,
                             TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 500000000)),
            TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 1");
    } else {
        while (tutti_group_check(group) == TUTTI_OK)
            usleep(1000);
    }
    gpu_settle();
    gpu_private_free(buffer);
}

static void sleep_on_host(void *seconds) {
    sleep(*(const unsigned *)seconds);
}

/* The stream of one rank stands still behind something else: NCCL's kernels of the others would wait for ever. */
TEST_NCCL(a_stream_that_is_stuck_ends_the_group_at_the_deadline_and_the_device_goes_on) {
    static const unsigned seconds = 4;
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    tutti_status status = TUTTI_OK;
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_settle();
    CUresult (*launch)(CUstream, void (*)(void *), void *);
    *(void **)&launch = dlsym(gpu.library, "cuLaunchHostFunc");
    if (tutti_group_rank(group) == 1)
        CHECK_CUDA(launch(stream, sleep_on_host, (void *)(uintptr_t)&seconds));
    CHECK_OK(
        tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM,
                         TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 1000000000)));
    for (int i = 0; i < 3000 && status == TUTTI_OK; i++) {
        usleep(1000);
        status = tutti_group_check(group);
    }
    CHECK_EQ(status, TUTTI_ERROR_TIMEOUT);
    gpu_settle(); /* the kernels have left */
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL), TUTTI_ERROR_TIMEOUT);
    gpu_private_free(buffer);
}

TEST_NCCL(operations_are_captured_and_run_again) {
    tutti_group *group = tutti_world_group(world);
    int ranks = tutti_group_size(group), expected = 1, host = 1, *sum = gpu_private(sizeof host);
    CUgraph graph;
    CUgraphExec runnable;
    CHECK_OK(tutti_all_reduce(group, sum, sum, 1, TUTTI_I32, TUTTI_SUM, BY_NCCL)); /* makes what is needed */
    gpu_settle();
    gpu_write(sum, &host, sizeof host);
    CHECK_CUDA(gpu.cuStreamBeginCapture(stream, 1)); /* this thread's calls alone */
    CHECK_OK(tutti_all_reduce(group, sum, sum, 1, TUTTI_I32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(tutti_barrier(group, BY_NCCL));
    CHECK_CUDA(gpu.cuStreamEndCapture(stream, &graph));
    CHECK_CUDA(gpu.cuGraphInstantiateWithFlags(&runnable, graph, 0));
    for (int round = 0; round < 4; round++) {
        CHECK_CUDA(gpu.cuGraphLaunch(runnable, stream));
        expected *= ranks;
    }
    CHECK_OK(tutti_all_reduce(group, sum, sum, 1, TUTTI_I32, TUTTI_SUM, BY_NCCL)); /* eager ones may follow */
    gpu_settle();
    gpu_read(&host, sum, sizeof host);
    CHECK_EQ(host, expected * ranks);
    CHECK_OK(tutti_group_check(group));
    CHECK_CUDA(gpu.cuGraphExecDestroy(runnable));
    CHECK_CUDA(gpu.cuGraphDestroy(graph));
    gpu_private_free(sum);
}

/* The same with more operations than NCCL and the driver have room for: calls would stay inside. */
TEST_NCCL(calls_behind_a_stream_that_is_stuck_come_back_at_the_deadline) {
    static const unsigned seconds = 4;
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    tutti_status status = TUTTI_OK;
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_settle();
    CUresult (*launch)(CUstream, void (*)(void *), void *);
    *(void **)&launch = dlsym(gpu.library, "cuLaunchHostFunc");
    if (tutti_group_rank(group) == 1)
        CHECK_CUDA(launch(stream, sleep_on_host, (void *)(uintptr_t)&seconds));
    for (int i = 0; i < 200000 && status == TUTTI_OK; i++)
        status =
            tutti_all_reduce(group, buffer, buffer, 1000, TUTTI_F32, TUTTI_SUM,
                             TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 1000000000));
    for (int i = 0; i < 10000 && status == TUTTI_OK; i++) {
        usleep(1000);
        status = tutti_group_check(group);
    }
    CHECK_EQ(status, TUTTI_ERROR_TIMEOUT);
    gpu_settle();
    gpu_private_free(buffer);
}

TEST_NCCL(an_abort_ends_what_is_in_the_stream) {
    static const unsigned seconds = 3;
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_settle();
    CUresult (*launch)(CUstream, void (*)(void *), void *);
    *(void **)&launch = dlsym(gpu.library, "cuLaunchHostFunc");
    if (tutti_group_rank(group) == 1)
        CHECK_CUDA(launch(stream, sleep_on_host, (void *)(uintptr_t)&seconds));
    tutti_group *other;
    int ranks[64];
    for (int i = 0; i < tutti_group_size(group); i++)
        ranks[i] = i;
    CHECK_OK(tutti_group_new(world, ranks, tutti_group_size(group), NULL, &other));
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    CHECK_OK(tutti_barrier(other, NULL));
    if (tutti_group_rank(group) == 0)
        CHECK_OK(tutti_group_abort(group, "the test says so"));
    tutti_status status = TUTTI_OK;
    while (status == TUTTI_OK) {
        usleep(1000);
        status = tutti_group_check(group);
    }
    CHECK_EQ(status, TUTTI_ERROR_ABORTED);
    gpu_settle();
    gpu_private_free(buffer);
    tutti_group_release(other);
}

/* Without different hosts NCCL refuses two ranks on one GPU; Tutti says so before. */
TEST_LIMIT(two_ranks_on_one_gpu_of_one_host_are_refused_by_name, 60) {
    extern void two_on_one(tutti_world * world, void *argument);
    nccl_needed();
    test_processes(2, two_on_one, NULL);
}

void two_on_one(tutti_world *world, void *argument);
void two_on_one(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    unsetenv("NCCL_HOSTID");
    gpu_begin();
    float *buffer = gpu_private(4096);
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, BY_NCCL), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("one GPU");
    gpu_private_free(buffer);
    gpu_end();
}

/* ---- a communicator of the program's ---- */

static ncclComm_t make_communicator(tu_nccl_library *library, tutti_group *group) {
    ncclUniqueId id = { { 0 } };
    ncclComm_t comm = NULL;
    ncclResult_t result = ncclInProgress;
    int undefined = NCCL_CONFIG_UNDEF_INT;
    ncclConfig_t config = { .size = sizeof config,
                            .magic = TU_NCCL_CONFIG_MAGIC,
                            .version = TU_NCCL_OLDEST,
                            .blocking = 0,
                            .cgaClusterSize = undefined,
                            .minCTAs = undefined,
                            .maxCTAs = undefined,
                            .splitShare = undefined,
                            .trafficClass = undefined,
                            .collnetEnable = undefined,
                            .CTAPolicy = undefined,
                            .shrinkShare = undefined,
                            .nvlsCTAs = undefined };
    CHECK_OK(tu_nccl_library_load(&tu_backend_host_table, library));
    if (tutti_group_rank(group) == 0)
        CHECK_EQ(library->ncclGetUniqueId(&id), ncclSuccess);
    CHECK_OK(tutti_broadcast(group, &id, &id, sizeof id, TUTTI_U8, 0, NULL));
    result = library->ncclCommInitRankConfig(&comm, tutti_group_size(group), id, tutti_group_rank(group), &config);
    while (result == ncclInProgress || result == ncclSuccess) {
        CHECK_EQ(library->ncclCommGetAsyncError(comm, &result), ncclSuccess);
        if (result == ncclSuccess)
            return comm;
        usleep(1000);
    }
    FAIL("NCCL makes no communicator: %s", library->ncclGetErrorString(result));
}

TEST_NCCL(a_communicator_of_the_program_is_used_and_stays_the_programs) {
    tutti_group *group = tutti_world_group(world);
    tu_nccl_library library;
    ncclComm_t comm = make_communicator(&library, group);
    float host = 1, *buffer = gpu_private(4);
    if (library.ncclCommRevoke == NULL) {
        CHECK_STATUS(tutti_backend_communicator(group, "nccl", comm), TUTTI_ERROR_UNSUPPORTED);
        return;
    }
    CHECK_OK(tutti_backend_communicator(group, "nccl", comm));
    gpu_write(buffer, &host, 4);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_settle();
    gpu_read(&host, buffer, 4);
    CHECK(host == (float)tutti_group_size(group));
    CHECK_STATUS(tutti_backend_communicator(group, "nccl", comm), TUTTI_ERROR_STATE);
    CHECK_STATUS(tutti_backend_communicator(group, "cuda", comm), TUTTI_ERROR_UNSUPPORTED);
    /* It still works outside of Tutti. */
    ncclResult_t result = library.ncclAllReduce(buffer, buffer, 1, ncclFloat32, ncclSum, comm, stream);
    while (result == ncclInProgress)
        CHECK_EQ(library.ncclCommGetAsyncError(comm, &result), ncclSuccess);
    CHECK_EQ(result, ncclSuccess);
    gpu_settle();
    gpu_private_free(buffer);
}
