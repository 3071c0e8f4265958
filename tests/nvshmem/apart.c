/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives, rows and messages among ranks whose memory NVSHMEM does not map, as those of other hosts: every result
 * against the CPU's, captured ones, and what happens when ranks disagree, do not come, stop or die in the middle. Here
 * the mapping is switched off (TUTTI_NVSHMEM_MAP=0), with stand-ins for NVSHMEM and the driver (TEST_STANDIN) or on a
 * GPU.
 */
#include <signal.h>

#include <tutti/named.h>
#include <tutti/work.h>

#include "../against_cpu.h"
#include "../backends.h"

static void need(void) {
    backends_need("nvshmem", false);
    if (dlopen("libnvshmem_host.so.3", RTLD_LAZY) == NULL)
        SKIP("NVSHMEM is not installed");
    setenv("TUTTI_NVSHMEM_MAP", "0", 1);
    setenv("TUTTI_NVSHMEM_HEAP", "32M", 1);
}

/* In each rank. */
static void begin(tutti_world *world) {
    gpu_begin();
    CHECK_OK(tutti_backend_open(world, "nvshmem", NULL));
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "nvshmem"));
}

/* Until the group has ended, for a call that is under way. */
static tutti_status await_end(tutti_group *group, tutti_status status) {
    while (status == TUTTI_OK) {
        usleep(500);
        status = tutti_group_check(group);
    }
    return status;
}

#define TEST_APART_OF(ranks, sentence)                                \
    static void apart_##sentence(tutti_world *world);                 \
    static void rank_##sentence(tutti_world *world, void *argument) { \
        (void)argument;                                               \
        begin(world);                                                 \
        apart_##sentence(world);                                      \
    }                                                                 \
    TEST_LIMIT(sentence, 120) {                                       \
        need();                                                       \
        test_processes(ranks, rank_##sentence, NULL);                 \
        _exit(0); /* the driver keeps descriptors and threads */      \
    }                                                                 \
    static void apart_##sentence(tutti_world *world)
#define TEST_APART(sentence) TEST_APART_OF(backends_ranks(), sentence)

/* ---- settings ---- */

/* 24 MiB fit into a heap of 0.03125 GiB, and nobody's memory is mapped. */
static void use_settings(tutti_world *world, void *argument) {
    int rank = tutti_world_rank(world), next = (rank + 1) % tutti_world_size(world);
    tutti_peers *peers;
    (void)argument;
    begin(world);
    tutti_memory *memory = gpu_symmetric(world, (size_t)24 << 20);
    CHECK_OK(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers));
    CHECK(tutti_peers_buffer(peers, rank) != NULL && tutti_peers_buffer(peers, next) == NULL);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_LIMIT(settings_mean_what_they_say_however_they_are_written, 120) {
    need();
    setenv("TUTTI_NVSHMEM_HEAP", "0.03125GiB", 1);
    setenv("TUTTI_NVSHMEM_MAP", "off", 1);
    test_processes(2, use_settings, NULL);
    _exit(0);
}

static void have_no_heap(tutti_world *world, void *argument) {
    (void)argument;
    gpu_begin();
    CHECK_STATUS(tutti_backend_open(world, "nvshmem", NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("TUTTI_NVSHMEM_HEAP");
}

TEST_LIMIT(a_heap_of_nothing_is_refused, 120) {
    need();
    setenv("TUTTI_NVSHMEM_HEAP", "0", 1);
    test_processes(2, have_no_heap, NULL);
    _exit(0);
}

/* ---- results ---- */

static void same(tutti_group *group, comparison given) {
    given.broken = true;
    CHECK_OK(compare(group, &given));
}

TEST_APART(every_type_and_reduction_has_the_bits_of_the_cpu) {
    tutti_group *group = tutti_world_group(world);
    for (int dtype = TUTTI_F64; dtype <= TUTTI_C128; dtype++)
        for (int reduction = TUTTI_SUM; reduction <= TUTTI_PREMUL_SUM; reduction++)
            if (tutti_reduction_applies((tutti_reduction)reduction, (tutti_dtype)dtype) &&
                (reduction == TUTTI_SUM || dtype <= TUTTI_F32 || (dtype + reduction) % 3 == 0))
                same(group, (comparison){ all_reduce, 203, 203, 203, (tutti_dtype)dtype, (tutti_reduction)reduction,
                                          .in_place = (dtype + reduction) % 2 == 0 });
    tutti_ran ran = TUTTI_RAN_INIT;
    CHECK_OK(tutti_barrier(group, ON_STREAM));
    CHECK_OK(tutti_group_ran(group, &ran));
    CHECK_TEXT(ran.executor, "nvshmem");
}

/* `in` and `out` are NULL, or symmetric. */
static void every_collective(tutti_group *group, size_t n, bool in_place, char *in, char *out) {
    size_t size = (size_t)tutti_group_size(group);
    bool root = tutti_group_rank(group) == last(group);
    same(group, (comparison){ all_reduce, n, n, n, TUTTI_F32, TUTTI_SUM, in_place, .in = in, .out = out });
    same(group, (comparison){ all_gather, n, n * size, n, TUTTI_BF16, 0, in_place, .in = in, .out = out });
    same(group, (comparison){ all_to_all, n * size, n * size, n, TUTTI_I32, 0, in_place, .in = in, .out = out });
    same(group, (comparison){ reduce_scatter, n * size, n, n, TUTTI_F32, TUTTI_AVG, in_place, .in = in, .out = out });
    same(group, (comparison){ broadcast, n, n, n, TUTTI_U8, 0, in_place, .in = in, .out = out });
    same(group, (comparison){ reduce, n, root ? n : 0, n, TUTTI_F16, TUTTI_SUM, in_place, .in = in, .out = out });
    same(group, (comparison){ gather, n, root ? n * size : 0, n, TUTTI_F64, 0, in_place, .in = in, .out = out });
    same(group, (comparison){ scatter, n * size, n, n, TUTTI_C64, 0, in_place, .in = in, .out = out });
}

TEST_APART(every_collective_gives_what_the_cpu_gives_from_any_memory) {
    static const size_t counts[] = { 1, 20003 };
    tutti_group *group = tutti_world_group(world);
    size_t bytes = (size_t)tutti_group_size(group) * 20003 * 8 + 512;
    tutti_memory *memory = gpu_symmetric(world, 2 * bytes);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    char *data = tutti_memory_data(memory);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int in_place = 0; in_place < 2; in_place++) {
            every_collective(group, counts[i], in_place, NULL, NULL);
            every_collective(group, counts[i], in_place, data, in_place ? NULL : data + bytes);
        }
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

/* More than the stage and the inboxes hold at one time, on sub-groups too. */
TEST_APART(long_ones_go_in_rounds_and_sub_groups_go_alone) {
    tutti_group *group = tutti_world_group(world), *ends;
    int pair[] = { 0, tutti_world_size(world) - 1 };
    CHECK_OK(tutti_group_new(world, pair, 2, NULL, &ends));
    size_t n = 600001; /* of which a stage holds a part only */
    same(group, (comparison){ all_reduce, n, n, n, TUTTI_F32, TUTTI_SUM, .in_place = true });
    same(group, (comparison){ reduce, n, tutti_group_rank(group) == last(group) ? n : 0, n, TUTTI_F32, TUTTI_SUM });
    same(group, (comparison){ broadcast, n, n, n, TUTTI_U8, 0 });
    same(group, (comparison){ broadcast, n, n, n, TUTTI_U8, 0, .in_place = true });
    if (ends != TUTTI_NON_GROUP_MEMBER) {
        for (int i = 0; i < 2; i++)
            every_collective(ends, 101, false, NULL, NULL);
        tutti_group_release(ends);
    }
    same(group,
         (comparison){ all_to_all, 3 * 100003, 3 * 100003, 300009 / (size_t)tutti_group_size(group), TUTTI_I16, 0 });
}

/* Both ways to cut a matrix. */
TEST_APART(parts_of_a_matrix_are_reduced_by_elements_and_by_columns) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t rows = 70, columns = 40 * (size_t)size, count = rows * columns, part = count / (size_t)size;
    tutti_memory *memory = gpu_symmetric(world, count * 4), *here;
    tutti_peers *peers, *there;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    CHECK_OK(tutti_memory_alloc(world, count * 4, NULL, &here));
    CHECK_OK(tutti_memory_rendezvous(here, group, &there));
    float *expected = malloc(part * 4), *result = malloc(part * 4), *out = gpu_private(part * 4);
    fill(tutti_memory_data(here), TUTTI_F32, count, rank, true);
    gpu_write(tutti_memory_data(memory), tutti_memory_data(here), count * 4);
    for (int by_columns = 0; by_columns < 2; by_columns++) {
        CHECK_OK(tutti_reduce_scatter_out(group, tutti_memory_data(memory), out, rows, columns, by_columns, TUTTI_F32,
                                          TUTTI_SUM, ON_STREAM));
        CHECK_OK(tutti_reduce_scatter_out(group, tutti_memory_data(here), expected, rows, columns, by_columns,
                                          TUTTI_F32, TUTTI_SUM, NULL));
        gpu_settle();
        gpu_read(result, out, part * 4);
        CHECK_OK(tutti_group_check(group));
        CHECK(memcmp(result, expected, part * 4) == 0);
    }
    free(expected);
    free(result);
    tutti_peers_release(there);
    tutti_memory_release(here);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_APART(parts_of_several_sizes_arrive_and_unequal_splits_end_the_group) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t in_counts[64], in_offsets[64], out_counts[64], out_offsets[64], in_sum = 0, out_sum = 0;
    for (int i = 0; i < size; i++) { /* some are empty */
        in_counts[i] = (size_t)(30000 * rank + 70000 * ((rank + i) % 2));
        out_counts[i] = (size_t)(30000 * i + 70000 * ((rank + i) % 2));
        in_offsets[i] = in_sum;
        out_offsets[i] = out_sum;
        in_sum += in_counts[i];
        out_sum += out_counts[i];
    }
    int32_t *in = malloc(in_sum * 4 + 4), *expected = malloc(out_sum * 4 + 4), *result = malloc(out_sum * 4 + 4);
    for (size_t i = 0; i < in_sum; i++)
        in[i] = rank * 1000000 + (int32_t)i;
    int32_t *device_in = gpu_private(in_sum * 4), *device_out = gpu_private(out_sum * 4);
    gpu_write(device_in, in, in_sum * 4);
    CHECK_OK(tutti_all_to_all_v(group, device_in, in_counts, in_offsets, device_out, out_counts, out_offsets, TUTTI_I32,
                                ON_STREAM));
    CHECK_OK(tutti_all_to_all_v(group, in, in_counts, in_offsets, expected, out_counts, out_offsets, TUTTI_I32, NULL));
    gpu_settle();
    gpu_read(result, device_out, out_sum * 4);
    CHECK_OK(tutti_group_check(group));
    CHECK(memcmp(result, expected, out_sum * 4) == 0);
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == 1)
        out_counts[0]++;
    tutti_status status = tutti_all_to_all_v(group, device_in, in_counts, in_offsets, device_out, out_counts,
                                             out_offsets, TUTTI_I32, ON_STREAM);
    CHECK_EQ(await_end(group, status), TUTTI_ERROR_MISMATCH); /* the others hear of it by the group's end */
}

/* What arrives is written where something lies that is still to go to others. */
static void move_in_place(tutti_group *group, size_t unit) {
    int size = tutti_group_size(group), rank = tutti_group_rank(group), to[64];
    size_t counts[64], same[64], offsets[64], in_offsets[64], out_offsets[64], sum = 0;
    size_t most = (size_t)size * (unit + 5 * (size_t)size);
    int32_t *host = malloc(most * 4), *expected = malloc(most * 4), *result = malloc(most * 4);
    int32_t *device = gpu_private(most * 4);
    for (size_t i = 0; i < most; i++)
        host[i] = rank * 10000000 + (int32_t)i;
    for (int i = 0; i < size; i++) {
        counts[i] = unit + (size_t)i * 5;
        same[i] = unit;
        offsets[i] = sum;
        sum += counts[i];
        in_offsets[i] = (size_t)i * unit;
        out_offsets[i] = (size_t)((i + 1) % size) * unit;
        to[i] = (i + 1) % size;
    }
    for (int which = 0; which < 4; which++) {
        gpu_write(device, host, most * 4);
        memcpy(expected, host, most * 4);
        for (int on_device = 0; on_device < 2; on_device++) {
            int32_t *data = on_device ? device : expected;
            const tutti_call *call = on_device ? ON_STREAM : NULL;
            if (which == 0)
                CHECK_OK(tutti_all_to_all_v(group, data, same, in_offsets, data, same, out_offsets, TUTTI_I32, call));
            else if (which == 1)
                CHECK_OK(tutti_all_gather_v(group, data, data, counts, offsets, TUTTI_I32, call));
            else if (which == 2)
                CHECK_OK(tutti_permute(group, data, data, unit, TUTTI_I32, to, call));
            else
                CHECK_OK(tutti_reduce_scatter_v(group, data, data, counts, TUTTI_I32, TUTTI_SUM, call));
        }
        gpu_settle();
        gpu_read(result, device, most * 4);
        CHECK_OK(tutti_group_check(group));
        if (memcmp(result, expected, (which == 3 ? counts[rank] : most) * 4) != 0)
            FAIL("move %d of %zu in place differs from the CPU's on rank %d", which, unit, rank);
    }
    gpu_private_free(device);
    free(host);
    free(expected);
    free(result);
}

static void be_in_place(tutti_world *world, void *argument) {
    static const size_t units[] = { 3, 1001, 60001 };
    tutti_group *group = tutti_world_group(world);
    tutti_peers *peers;
    (void)argument;
    begin(world);
    tutti_memory *memory = gpu_symmetric(world, (size_t)tutti_group_size(group) * 20003 * 8);
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        move_in_place(group, units[i]);
    every_collective(group, 20003, true, tutti_memory_data(memory), NULL);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_LIMIT(collectives_in_place_read_everything_before_it_is_overwritten, 120) {
    need();
    for (int mapped = 0; mapped < 2; mapped++) {
        setenv("TUTTI_NVSHMEM_MAP", mapped ? "1" : "0", 1);
        test_processes(backends_ranks(), be_in_place, NULL);
    }
    _exit(0);
}

/* ---- messages ---- */

TEST_APART(messages_arrive_in_order_whole_and_in_columns) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size,
        before = (rank + size - 1) % size;
    static const size_t counts[] = { 0, 5, 4096, 300000 };
    int32_t *in = gpu_private(300000 * 4), *out = gpu_private(300000 * 4), *host = malloc(300000 * 4);
    CHECK_OK(tutti_barrier(group, ON_STREAM)); /* makes what is needed */
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (size_t j = 0; j < counts[i]; j++)
            host[j] = rank * 1000 + (int32_t)(i + j);
        gpu_write(in, host, counts[i] * 4);
        if (rank % 2 == 0)
            CHECK_OK(tutti_send(group, in, counts[i], TUTTI_I32, next, (int)i, ON_STREAM));
        CHECK_OK(tutti_recv(group, out, counts[i], TUTTI_I32, before, (int)i, ON_STREAM));
        if (rank % 2 != 0)
            CHECK_OK(tutti_send(group, in, counts[i], TUTTI_I32, next, (int)i, ON_STREAM));
        gpu_settle();
        gpu_read(host, out, counts[i] * 4);
        CHECK_OK(tutti_group_check(group));
        for (size_t j = 0; j < counts[i]; j++)
            CHECK_EQ(host[j], before * 1000 + (int32_t)(i + j));
    }
    tutti_strided column = TUTTI_STRIDED_INIT; /* a column of a matrix of 50 columns becomes a row there */
    column.block = 1;
    column.stride = 50;
    for (int i = 0; i < 5000; i++)
        host[i] = rank * 10000 + i;
    gpu_write(in, host, 5000 * 4);
    CHECK_OK(tutti_send(group, in + 7, 100, TUTTI_I32, next, 9,
                        TUTTI_OPTIONS(tutti_call, .stream = stream, .strided_in = &column)));
    CHECK_OK(tutti_recv(group, out, 100, TUTTI_I32, before, 9, ON_STREAM));
    gpu_settle();
    gpu_read(host, out, 100 * 4);
    CHECK_OK(tutti_group_check(group));
    for (int i = 0; i < 100; i++)
        CHECK_EQ(host[i], before * 10000 + 7 + 50 * i);
    free(host);
}

TEST_APART_OF(2, a_message_with_another_tag_is_a_mismatch) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group);
    char *buffer = gpu_private(64);
    CHECK_OK(tutti_barrier(group, ON_STREAM));
    tutti_status status = rank == 0 ? tutti_send(group, buffer, 64, TUTTI_U8, 1, 3, ON_STREAM)
                                    : tutti_recv(group, buffer, 64, TUTTI_U8, 0, 4, ON_STREAM);
    CHECK_EQ(await_end(group, status), TUTTI_ERROR_MISMATCH);
}

/* ---- graphs ---- */

TEST_APART(captured_collectives_run_again_and_again_between_eager_ones) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group), rank = tutti_group_rank(group);
    size_t count = 40000; /* several kernels, and several chunks */
    int32_t *host = malloc(count * 4), *sum = gpu_private(count * 4), *all = gpu_private(count * 4 * (size_t)size);
    CUgraph graph;
    CUgraphExec runnable;
    CHECK_OK(tutti_group_prepare(group, NULL));
    for (size_t i = 0; i < count; i++)
        host[i] = 1;
    gpu_write(sum, host, count * 4);
    CHECK_CUDA(gpu.cuStreamBeginCapture(stream, 1)); /* this thread's calls alone */
    CHECK_OK(tutti_all_reduce(group, sum, sum, count, TUTTI_I32, TUTTI_SUM, ON_STREAM));
    CHECK_OK(tutti_all_gather(group, sum, all, count, TUTTI_I32, ON_STREAM));
    CHECK_OK(tutti_broadcast(group, all, all, count * (size_t)size, TUTTI_I32, 1, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamEndCapture(stream, &graph));
    CHECK_CUDA(gpu.cuGraphInstantiateWithFlags(&runnable, graph, 0));
    int32_t expected = 1;
    for (int round = 0; round < 3; round++) {
        CHECK_CUDA(gpu.cuGraphLaunch(runnable, stream));
        expected *= size;
        if (round == 1) { /* eager ones may come between */
            CHECK_OK(tutti_all_reduce(group, sum, sum, count, TUTTI_I32, TUTTI_SUM, ON_STREAM));
            expected *= size;
        }
    }
    gpu_settle();
    CHECK_OK(tutti_group_check(group));
    for (int i = -1; i < size; i++) {
        gpu_read(host, i < 0 ? sum : all + (size_t)i * count, count * 4);
        for (size_t j = 0; j < count; j++)
            if (host[j] != expected)
                FAIL("rank %d: element %zu of part %d is %d, not %d", rank, j, i, host[j], expected);
    }
    CHECK_CUDA(gpu.cuGraphExecDestroy(runnable));
    CHECK_CUDA(gpu.cuGraphDestroy(graph));
    free(host);
}

/* ---- works ---- */

TEST_APART(works_on_two_groups_run_beside_each_other) {
    tutti_group *group = tutti_world_group(world), *second;
    int ranks[64];
    for (int i = 0; i < tutti_group_size(group); i++)
        ranks[i] = i;
    CHECK_OK(tutti_group_new(world, ranks, tutti_group_size(group), NULL, &second));
    tutti_work *works[2];
    float host[256], *one = gpu_private(sizeof host), *two = gpu_private(sizeof host);
    for (int i = 0; i < 256; i++)
        host[i] = (float)i;
    gpu_write(one, host, sizeof host);
    gpu_write(two, host, sizeof host);
    CHECK_OK(tutti_all_reduce(group, one, one, 256, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .stream = stream, .work = &works[0])));
    CHECK_OK(tutti_all_reduce(second, two, two, 256, TUTTI_F32, TUTTI_MAX,
                              TUTTI_OPTIONS(tutti_call, .stream = stream, .work = &works[1])));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(tutti_work_wait(works[i], 0));
        tutti_work_release(works[i]);
    }
    gpu_read(host, one, sizeof host);
    for (int i = 0; i < 256; i++)
        CHECK(host[i] == (float)(i * tutti_group_size(group)));
    gpu_read(host, two, sizeof host);
    for (int i = 0; i < 256; i++)
        CHECK(host[i] == (float)i);
    tutti_group_release(second);
}

/* ---- what goes wrong ---- */

TEST_APART(calls_that_differ_are_told_from_each_other) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    tutti_status status = tutti_all_reduce(group, buffer, buffer, tutti_group_rank(group) == 0 ? 100 : 99, TUTTI_F32,
                                           TUTTI_SUM, ON_STREAM);
    CHECK_EQ(await_end(group, status), TUTTI_ERROR_MISMATCH);
    CHECK_EQ(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, ON_STREAM), TUTTI_ERROR_MISMATCH);
}

TEST_APART_OF(2, a_rank_that_does_not_come_is_named_when_the_deadline_passes) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, ON_STREAM));
    gpu_settle();
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_status status = TUTTI_OK;
    if (tutti_group_rank(group) != 1)
        status = tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .stream = stream, .timeout_ns = 300000000));
    CHECK_EQ(await_end(group, status), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("rank 1");
}

/* Rank 1 has no room for what a group needs: all hear so at once, and it goes when it has. */
TEST_APART(a_heap_without_room_on_one_rank_fails_all_and_the_next_attempt_works) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *large = NULL;
    float *buffer = gpu_private(4096);
    if (tutti_group_rank(group) == 1)
        large = gpu_symmetric(world, (size_t)28 << 20);
    CHECK_STATUS(tutti_group_prepare(group, NULL), TUTTI_ERROR_MEMORY);
    CHECK_MESSAGE("TUTTI_NVSHMEM_HEAP");
    if (tutti_group_rank(group) != 1)
        CHECK_MESSAGE("member 1");
    tutti_memory_release(large);
    CHECK_OK(tutti_group_prepare(group, NULL));
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 100, TUTTI_F32, TUTTI_SUM, ON_STREAM));
    gpu_settle();
    CHECK_OK(tutti_group_check(group));
}

/* What a group had of the heap belongs to somebody else as soon as the group is gone. */
static void leave_at_once(tutti_world *world, const int *ranks, int size) {
    unsigned char pattern[4096], found[sizeof pattern];
    char *in = gpu_private(64), *out = gpu_private(64 * (size_t)size);
    tutti_group *group;
    memset(pattern, 0x5a, sizeof pattern);
    CHECK_OK(tutti_group_new(world, ranks, size, NULL, &group));
    CHECK_OK(tutti_all_gather(group, in, out, 64, TUTTI_U8, ON_STREAM));
    gpu_settle();
    CHECK_OK(tutti_group_destroy(group));
    tutti_group_release(group);
    tutti_memory *memory = gpu_symmetric(world, sizeof pattern);
    gpu_write(tutti_memory_data(memory), pattern, sizeof pattern);
    usleep(10000); /* for what comes too late */
    gpu_read(found, tutti_memory_data(memory), sizeof pattern);
    CHECK(memcmp(found, pattern, sizeof pattern) == 0);
    tutti_memory_release(memory);
    gpu_private_free(in);
    gpu_private_free(out);
}

/* All that is left of the heap, in blocks that hold a pattern: nobody else writes there. */
static void check_heap(tutti_world *world) {
    enum {
        MOST = 64
    };
    tutti_memory *blocks[MOST];
    size_t sizes[MOST], largest = (size_t)16 << 20;
    int count = 0;
    unsigned char *pattern = malloc(largest), *found = malloc(largest);
    memset(pattern, 0x5a, largest);
    for (size_t bytes = largest; bytes >= 4096; bytes /= 2) {
        while (count < MOST &&
               tutti_memory_alloc(world, bytes, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA_AT(0)),
                                  &blocks[count]) == TUTTI_OK)
            sizes[count++] = bytes;
    }
    CHECK(count > 0);
    for (int i = 0; i < count; i++)
        gpu_write(tutti_memory_data(blocks[i]), pattern, sizes[i]);
    usleep(100000); /* for what comes too late */
    for (int i = 0; i < count; i++) {
        gpu_read(found, tutti_memory_data(blocks[i]), sizes[i]);
        CHECK(memcmp(found, pattern, sizes[i]) == 0);
        tutti_memory_release(blocks[i]);
    }
    free(pattern);
    free(found);
}

/* Signals that were taken, or never are, are over for those who release what they were for; yet words of them are on
 * their way. There is no room for more than three such areas: they are given back when they are over. */
static void release_at_once(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size;
    for (int round = 0; round < 5; round++) {
        tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
        tutti_memory *memory;
        tutti_peers *peers;
        options.device = TUTTI_CUDA_AT(0);
        options.signal_pad_bytes = (size_t)768 << 10; /* makes channels, and so a large area */
        tutti_status status = TUTTI_ERROR_MEMORY;
        CHECK_OK(tutti_memory_alloc(world, 4096, &options, &memory));
        for (int i = 0; status == TUTTI_ERROR_MEMORY && i < 2000; i++) { /* a farewell may be on its way */
            status = tutti_memory_rendezvous(memory, group, &peers);
            usleep(1000);
        }
        CHECK_OK(status);
        CHECK_OK(tutti_peers_signal(peers, next, 3, ON_STREAM));
        CHECK_OK(tutti_peers_wait_signal(peers, (rank + size - 1) % size, 3, ON_STREAM));
        CHECK_OK(tutti_peers_signal(peers, next, 4, ON_STREAM)); /* nobody waits for it */
        gpu_settle();
        tutti_peers_release(peers);
        tutti_memory_release(memory);
        if (round == 2)
            check_heap(world);
    }
}

/* What was put before a collective is there when it is over. */
static void put_and_meet(tutti_group *group, tutti_memory *memory, tutti_peers *peers) {
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    for (uint32_t round = 1; round <= 3; round++) {
        uint32_t word = 1000 * round + (uint32_t)rank, found = 0;
        CHECK_OK(tutti_peers_put(peers, (rank + 1) % size, 64, &word, sizeof word, ON_STREAM));
        CHECK_OK(tutti_barrier(group, ON_STREAM));
        gpu_read(&found, (char *)tutti_memory_data(memory) + 64, sizeof found);
        CHECK_EQ(found, 1000 * round + (uint32_t)((rank + size - 1) % size));
        CHECK_OK(tutti_barrier(group, ON_STREAM));
    }
}

static void be_late(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    int ranks[64], size = tutti_group_size(group);
    size_t bytes = 400000; /* several chunks, which are put from where they lie */
    tutti_peers *peers;
    (void)argument;
    begin(world);
    tutti_memory *memory = gpu_symmetric(world, bytes * (size_t)(size + 1));
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    char *in = tutti_memory_data(memory), *out = in + bytes;
    for (int i = 0; i < size; i++)
        ranks[i] = i;
    for (int round = 0; round < 4; round++) {
        leave_at_once(world, ranks, size);
        same(group, (comparison){ all_gather, bytes, bytes * (size_t)size, bytes, TUTTI_U8, 0, .in = in, .out = out });
    }
    every_collective(group, 11, false, NULL, NULL);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

static void be_later(tutti_world *world, void *argument) {
    tutti_group *group = tutti_world_group(world);
    tutti_peers *peers;
    (void)argument;
    begin(world);
    release_at_once(world);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    put_and_meet(group, memory, peers);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_LIMIT(what_is_on_its_way_meets_no_stranger_and_is_there_before_a_collective_ends, 120) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in is late when it is told to");
    setenv("STANDIN_NVSHMEM", "later", 1);
    test_processes(backends_ranks(), be_later, NULL);
    _exit(0);
}

TEST_LIMIT(a_network_may_deliver_late_and_in_any_order, 120) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in is late when it is told to");
    setenv("STANDIN_NVSHMEM", "late", 1);
    test_processes(backends_ranks(), be_late, NULL);
    _exit(0);
}

/* Ranks 0 and 1 map each other, and so do 2 and 3: their groups need nothing of the heap for collectives, and signals
 * and rows go by addresses; that of all goes by rank and offset. */
static void be_on_two_hosts(tutti_world *world, void *argument) {
    static const int lists[2][2] = { { 0, 1 }, { 2, 3 } }, counts[] = { 2, 2 };
    const int *const each[] = { lists[0], lists[1] };
    tutti_group *all = tutti_world_group(world), *mine;
    tutti_memory *large, *memory;
    tutti_peers *peers, *far;
    (void)argument;
    begin(world);
    CHECK_OK(tutti_group_split(all, each, counts, 2, NULL, &mine));
    int rank = tutti_world_rank(world), other = 1 - tutti_group_rank(mine);
    memory = gpu_symmetric(world, 65536);
    large = gpu_symmetric(world, (size_t)28 << 20);
    CHECK_STATUS(tutti_group_prepare(all, NULL), TUTTI_ERROR_MEMORY);
    CHECK_OK(tutti_group_prepare(mine, NULL));
    CHECK_OK(tutti_memory_rendezvous(memory, mine, &peers));
    CHECK(tutti_peers_buffer(peers, other) != NULL);
    CHECK_OK(tutti_peers_signal(peers, other, 1, ON_STREAM));
    CHECK_OK(tutti_peers_wait_signal(peers, other, 1, ON_STREAM));
    every_collective(mine, 101, false, tutti_memory_data(memory), (char *)tutti_memory_data(memory) + 32768);
    tutti_memory_release(large);
    CHECK_OK(tutti_barrier(all, NULL));
    CHECK_OK(tutti_memory_rendezvous(memory, all, &far));
    CHECK(tutti_peers_buffer(far, rank ^ 1) != NULL);
    CHECK(tutti_peers_buffer(far, rank ^ 2) == NULL);
    put_and_meet(all, memory, far);
    every_collective(all, 101, false, NULL, NULL);
    every_collective(mine, 101, false, NULL, NULL);
    tutti_peers_release(far);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    tutti_group_release(mine);
}

TEST_LIMIT(groups_of_one_host_of_several_use_the_memory_of_their_members_where_it_lies, 120) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in has two hosts on one machine");
    setenv("STANDIN_NVSHMEM", "two hosts", 1);
    setenv("TUTTI_NVSHMEM_MAP", "1", 1);
    test_processes(4, be_on_two_hosts, NULL);
    _exit(0);
}

/* The stand-in kills or stops rank 1 when half of a chunk is there. */
static tutti_status break_off(tutti_world *world, void *argument) {
    const tutti_status expected = *(const tutti_status *)argument;
    tutti_group *group = tutti_world_group(world);
    size_t count = 200000;
    int32_t pid = (int32_t)getpid(), pids[3];
    begin(world);
    CHECK_OK(tutti_all_gather(group, &pid, pids, 1, TUTTI_I32, NULL));
    CHECK_OK(tutti_group_prepare(group, NULL));
    char *in = gpu_private(count), *out = gpu_private(count * (size_t)tutti_group_size(group));
    int64_t timeout = expected == TUTTI_ERROR_TIMEOUT ? 300000000 : INT64_C(600000000000);
    tutti_status status = tutti_all_gather(group, in, out, count, TUTTI_U8,
                                           TUTTI_OPTIONS(tutti_call, .stream = stream, .timeout_ns = timeout));
    CHECK_EQ(await_end(group, status), expected);
    if (expected == TUTTI_ERROR_TIMEOUT)
        kill(pids[1], SIGKILL); /* nobody else ends that one */
    _exit(0);
}

static void be_broken_off(const char *where, tutti_status expected) {
    need();
    if (!backends_standin())
        SKIP("only a stand-in breaks off where it is told to");
    setenv("STANDIN_NVSHMEM", where, 1);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, break_off, &expected), TUTTI_ERROR_DEAD);
    _exit(0);
}

TEST_LIMIT(a_rank_that_dies_in_the_middle_of_a_chunk_is_told_to_the_others, 120) {
    be_broken_off("dies putting", TUTTI_ERROR_DEAD);
}

TEST_LIMIT(a_rank_that_stops_in_the_middle_of_a_chunk_is_left_at_the_deadline, 120) {
    be_broken_off("stops putting", TUTTI_ERROR_TIMEOUT);
}
