/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on a GPU: the same calls, the same bits as the CPU's serial loop.
 */
#include "../instructions.h"
#include "graph.h"

#include <math.h>

#include <tutti/named.h>

#include "kernel/kernel.h"

/* What rank r contributes: small values of every kind, reproducible on every rank. */
static void fill(void *to, tutti_dtype dtype, size_t count, int rank) {
    double *values = malloc(count * sizeof *values);
    uint32_t state = 12345u + (uint32_t)rank * 977u;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (double)(int32_t)(state >> 8 & 0xffff) / 257.0 - 100;
        if (state % 97 == 0)
            values[i] = -0.0;
        if (dtype == TUTTI_BOOL)
            values[i] = state >> 31;
    }
    size_t width = dtype == TUTTI_C64 || dtype == TUTTI_C128 ? 2 : 1; /* complex: fill its real view */
    tutti_dtype real = dtype == TUTTI_C64 ? TUTTI_F32 : dtype == TUTTI_C128 ? TUTTI_F64 : dtype;
    CHECK_OK(tutti_convert(values, TUTTI_F64, to, real, count));
    if (width == 2)
        memcpy((char *)to + count * tutti_dtype_size(real), to, count * tutti_dtype_size(real));
    free(values);
}

static void check_all_reduce(tutti_world *world, tutti_dtype dtype, tutti_reduction reduction, size_t count,
                             bool symmetric, bool in_place, tutti_algorithm algorithm) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t bytes = count * tutti_dtype_size(dtype);
    void *inputs[64], *expected = malloc(bytes + 1), *result = malloc(bytes + 1);
    double factors[64];
    for (int r = 0; r < size; r++) {
        inputs[r] = malloc(bytes + 1);
        fill(inputs[r], dtype, count, r);
        factors[r] = 0.5 * (1 << r % 4); /* that every type holds exactly */
    }
    test_instructions_named("reference");
    tu_reduce(expected, (const void *const *)inputs, size, count, dtype, reduction, factors, 0);
    tutti_memory *memory = NULL;
    tutti_peers *peers = NULL;
    char *in, *out;
    if (symmetric) {
        memory = gpu_symmetric(world, 2 * bytes + 512);
        CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
        in = tutti_memory_data(memory);
        out = in_place ? in : in + (bytes + 255) / 256 * 256;
    } else {
        in = gpu_private(bytes);
        out = in_place ? in : gpu_private(bytes);
    }
    gpu_write(in, inputs[rank], bytes);
    gpu_lockstep(group);
    double factor64 = factors[rank];
    char factor[16];
    CHECK_OK(tutti_convert(&factor64, TUTTI_F64, factor,
                           dtype == TUTTI_C64    ? TUTTI_F32
                           : dtype == TUTTI_C128 ? TUTTI_F64
                                                 : dtype,
                           1));
    CHECK_OK(tutti_all_reduce(group, in, out, count, dtype, reduction,
                              TUTTI_OPTIONS(tutti_call, .stream = stream, .algorithm = algorithm, .factor = factor)));
    gpu_read(result, out, bytes);
    CHECK_OK(tutti_group_check(group));
    gpu_lockstep(group);
    if (memcmp(result, expected, bytes) != 0) {
        size_t element = tutti_dtype_size(dtype), i = 0;
        while (memcmp((char *)result + i * element, (char *)expected + i * element, element) == 0)
            i++;
        FAIL("all_reduce %s %s of %zu (%s%s, %s) differs at element %zu on rank %d", tutti_dtype_name(dtype),
             tutti_reduction_name(reduction), count, symmetric ? "symmetric" : "private", in_place ? ", in place" : "",
             tutti_algorithm_name(algorithm), i, rank);
    }
    CHECK_OK(tutti_barrier(group, NULL));
    for (int r = 0; r < size; r++)
        free(inputs[r]);
    free(expected);
    free(result);
    if (symmetric) {
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    } else {
        gpu_private_free(in);
        if (out != in)
            gpu_private_free(out);
    }
    gpu_lockstep(group);
}

TEST_GPU(all_reduce_has_the_bits_of_the_serial_loop_for_every_type_and_reduction) {
    for (int dtype = TUTTI_F64; dtype <= TUTTI_C128; dtype++)
        for (int reduction = TUTTI_SUM; reduction <= TUTTI_PREMUL_SUM; reduction++)
            if (tutti_reduction_applies((tutti_reduction)reduction, (tutti_dtype)dtype))
                check_all_reduce(world, (tutti_dtype)dtype, (tutti_reduction)reduction, 1003,
                                 (dtype + reduction) % 2 == 0, false,
                                 reduction % 3 == 0 ? TUTTI_ALGORITHM_TWO_SHOT : TUTTI_ALGORITHM_ONE_SHOT);
}

TEST_GPU(all_reduce_works_at_every_size_placement_and_algorithm) {
    static const size_t counts[] = { 0, 1, 7, 4096, 70001, 3000001 };
    static const tutti_algorithm algorithms[] = { TUTTI_ALGORITHM_AUTO, TUTTI_ALGORITHM_ONE_SHOT,
                                                  TUTTI_ALGORITHM_TWO_SHOT };
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
        for (int a = 0; a < 3; a++)
            for (int kind = 0; kind < 4; kind++)
                check_all_reduce(world, kind % 2 ? TUTTI_BF16 : TUTTI_F32, TUTTI_SUM, counts[c], kind < 2,
                                 kind % 2 == 1, algorithms[a]);
    check_all_reduce(world, TUTTI_F32, TUTTI_SUM, 9000001, false, false,
                     TUTTI_ALGORITHM_AUTO); /* several rounds of staging */
}

/* Sums of many sizes on end, in place, with nothing between them: element i takes part in those that are longer than i,
 * and each multiplies it by the number of ranks: 2, 4 or 8, so that f32 holds it exactly. Some go by
 * packets in one step, some in two, some meet. */
TEST_GPU(reductions_that_follow_each_other_without_a_wait_do_not_mix) {
    static const size_t counts[] = { 1, 3, 100, 513, 2048, 8190, 40001, 200000 };
    static const tutti_algorithm algorithms[] = { TUTTI_ALGORITHM_AUTO, TUTTI_ALGORITHM_ONE_SHOT,
                                                  TUTTI_ALGORITHM_TWO_SHOT };
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t most = 200000;
    tutti_memory *memory = gpu_symmetric(world, (most + 16) * sizeof(float));
    float *blocks[2] = { tutti_memory_data(memory), gpu_private((most + 16) * sizeof(float)) };
    float *host = malloc(most * sizeof *host), *expected = malloc(most * sizeof *host), first = 0;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    for (int r = 0; r < size; r++)
        first += (float)(r + 1);
    for (int kind = 0; kind < 2; kind++) {
        for (size_t shift = 0; shift < 2; shift++) { /* to 16 bytes, and not */
            float *data = blocks[kind] + shift;
            for (size_t i = 0; i < most; i++) {
                host[i] = (float)(rank + 1);
                expected[i] = 0;
            }
            gpu_write(data, host, most * sizeof *host);
            gpu_lockstep(group);
            for (int round = 0; round < 40; round++) {
                size_t count = counts[(round * 5 + round / 8) % 8];
                CHECK_OK(tutti_all_reduce(
                    group, data, data, count, TUTTI_F32, TUTTI_SUM,
                    TUTTI_OPTIONS(tutti_call, .stream = stream, .algorithm = algorithms[(round / 3) % 3])));
                for (size_t i = 0; i < count; i++)
                    expected[i] = expected[i] == 0 ? first : expected[i] * (float)size;
            }
            gpu_read(host, data, most * sizeof *host);
            CHECK_OK(tutti_group_check(group));
            for (size_t i = 0; i < most; i++) {
                if (host[i] != expected[i])
                    FAIL("%s memory, shift %zu: element %zu is %g, not %g", kind == 0 ? "symmetric" : "private", shift,
                         i, (double)host[i], (double)expected[i]);
            }
        }
    }
    CHECK_OK(tutti_barrier(group, NULL));
    free(host);
    free(expected);
    gpu_private_free(blocks[1]);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

static uint32_t word(int from, int to, size_t i) {
    return (uint32_t)(from * 1000003 + to * 10007) ^ (uint32_t)(i * 2654435761u);
}

/* all_gather, broadcast, scatter, gather, all_to_all, permute: each word says who sent it to whom. */
static void check_moves(tutti_world *world, size_t count, bool symmetric) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), root = size - 1;
    size_t total = count * (size_t)size;
    tutti_memory *memory = NULL;
    tutti_peers *peers = NULL;
    uint32_t *in, *out, *host = malloc(total * 4 + 4), *got = malloc(total * 4 + 4);
    if (symmetric) {
        memory = gpu_symmetric(world, total * 8 + 256);
        CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
        in = tutti_memory_data(memory);
        out = in + (total + 63) / 64 * 64;
    } else {
        in = gpu_private(total * 4);
        out = gpu_private(total * 4);
    }
    for (int to = 0; to < size; to++)
        for (size_t i = 0; i < count; i++)
            host[(size_t)to * count + i] = word(rank, to, i);
    gpu_write(in, host, total * 4);
    gpu_lockstep(group);

    CHECK_OK(tutti_all_to_all(group, in, out, count, TUTTI_U32, ON_STREAM));
    gpu_read(got, out, total * 4);
    for (int from = 0; from < size; from++)
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(got[(size_t)from * count + i], word(from, rank, i));

    CHECK_OK(tutti_all_gather(group, in, out, count, TUTTI_U32, ON_STREAM));
    gpu_read(got, out, total * 4);
    for (int from = 0; from < size; from++)
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(got[(size_t)from * count + i], word(from, 0, i));

    CHECK_OK(tutti_broadcast(group, in, out, total, TUTTI_U32, root, ON_STREAM));
    gpu_read(got, out, total * 4);
    for (int to = 0; to < size; to++)
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(got[(size_t)to * count + i], word(root, to, i));

    CHECK_OK(tutti_scatter(group, in, out, count, TUTTI_U32, root, ON_STREAM));
    gpu_read(got, out, count * 4);
    for (size_t i = 0; i < count; i++)
        CHECK_EQ(got[i], word(root, rank, i));

    CHECK_OK(tutti_gather(group, in, out, count, TUTTI_U32, root, ON_STREAM));
    gpu_read(got, out, total * 4);
    for (int from = 0; rank == root && from < size; from++)
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(got[(size_t)from * count + i], word(from, 0, i));

    int to[64];
    for (int r = 0; r < size; r++)
        to[r] = (r + 1) % size;
    CHECK_OK(tutti_permute(group, in, out, count, TUTTI_U32, to, ON_STREAM));
    gpu_read(got, out, count * 4);
    for (size_t i = 0; i < count; i++)
        CHECK_EQ(got[i], word((rank + size - 1) % size, 0, i));

    /* all_to_all_v: rank a sends a + b words to rank b. */
    size_t in_counts[64], out_counts[64];
    for (int r = 0; r < size; r++) {
        in_counts[r] = (size_t)(rank + r) % (count + 1);
        out_counts[r] = in_counts[r];
    }
    CHECK_OK(tutti_all_to_all_v(group, in, in_counts, NULL, out, out_counts, NULL, TUTTI_U32, ON_STREAM));
    gpu_read(got, out, total * 4);
    size_t at = 0;
    for (int from = 0; from < size; from++) {
        size_t start = 0;
        for (int r = 0; r < rank; r++)
            start += (size_t)(from + r) % (count + 1);
        for (size_t i = 0; i < out_counts[from]; i++, at++) {
            size_t index = start + i;
            CHECK_EQ(got[at], word(from, (int)(index / count), index % count));
        }
    }
    CHECK_OK(tutti_group_check(group));
    CHECK_OK(tutti_barrier(group, NULL));
    free(host);
    free(got);
    if (symmetric) {
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    } else {
        gpu_private_free(in);
        gpu_private_free(out);
    }
    gpu_lockstep(group);
}

TEST_GPU(moves_bring_every_word_to_its_place) {
    static const size_t counts[] = { 1, 5, 1024, 100003 };
    for (size_t i = 0; i < 4; i++) {
        check_moves(world, counts[i], true);
        check_moves(world, counts[i], false);
    }
    check_moves(world, (size_t)5 << 20, false); /* several rounds of staging */
}

TEST_GPU(reduce_and_reduce_scatter_agree_with_the_serial_loop) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    for (int symmetric = 0; symmetric < 2; symmetric++) {
        size_t count = 5003, total = count * (size_t)size;
        float *inputs[64], *expected = malloc(total * 4), *got = malloc(total * 4);
        for (int r = 0; r < size; r++) {
            inputs[r] = malloc(total * 4);
            fill(inputs[r], TUTTI_F32, total, r);
        }
        tu_reduce(expected, (const void *const *)inputs, size, total, TUTTI_F32, TUTTI_AVG, NULL, 0);
        tutti_memory *memory = NULL;
        tutti_peers *peers = NULL;
        float *in, *out = gpu_private(total * 4);
        if (symmetric) {
            memory = gpu_symmetric(world, total * 4);
            CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
            in = tutti_memory_data(memory);
        } else {
            in = gpu_private(total * 4);
        }
        gpu_write(in, inputs[rank], total * 4);
        gpu_lockstep(group);
        CHECK_OK(tutti_reduce_scatter(group, in, out, count, TUTTI_F32, TUTTI_AVG, ON_STREAM));
        gpu_read(got, out, count * 4);
        CHECK(memcmp(got, expected + (size_t)rank * count, count * 4) == 0);
        CHECK_OK(tutti_reduce(group, in, out, total, TUTTI_F32, TUTTI_AVG, 0, ON_STREAM));
        gpu_read(got, out, total * 4);
        CHECK(rank != 0 || memcmp(got, expected, total * 4) == 0);
        size_t counts[64], begin = 0;
        for (int r = 0; r < size; r++)
            counts[r] = (size_t)(r * 37) % 100;
        for (int r = 0; r < rank; r++)
            begin += counts[r];
        CHECK_OK(tutti_reduce_scatter_v(group, in, out, counts, TUTTI_F32, TUTTI_AVG, ON_STREAM));
        gpu_read(got, out, counts[rank] * 4);
        CHECK(memcmp(got, expected + begin, counts[rank] * 4) == 0);
        CHECK_OK(tutti_group_check(group));
        CHECK_OK(tutti_barrier(group, NULL));
        for (int r = 0; r < size; r++)
            free(inputs[r]);
        free(expected);
        free(got);
        gpu_private_free(out);
        if (symmetric) {
            tutti_peers_release(peers);
            tutti_memory_release(memory);
        } else {
            gpu_private_free(in);
        }
        gpu_lockstep(group);
    }
}

TEST_GPU(a_work_runs_beside_the_callers_stream) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(4096), host[1024];
    for (int i = 0; i < 1024; i++)
        host[i] = (float)(tutti_group_rank(group) + 1);
    gpu_write(buffer, host, 4096);
    gpu_lockstep(group);
    tutti_work *work;
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1024, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .stream = stream, .work = &work)));
    CHECK_OK(tutti_work_wait(work, 0));
    bool finished = false;
    CHECK_OK(tutti_work_test(work, &finished));
    CHECK(finished);
    tutti_work_release(work);
    gpu_read(host, buffer, 4096);
    int size = tutti_group_size(group);
    CHECK(host[1023] == (float)(size * (size + 1) / 2));
    CHECK_OK(tutti_barrier(group, NULL));
    gpu_private_free(buffer);
}

TEST_GPU(a_mismatch_is_an_error_on_every_rank) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(1 << 16);
    gpu_lockstep(group);
    size_t count = tutti_group_rank(group) == 0 ? 1000 : 1001;
    tutti_status status = tutti_all_reduce(group, buffer, buffer, count, TUTTI_F32, TUTTI_SUM, ON_STREAM);
    for (int i = 0; i < 3000 && status == TUTTI_OK; i++) {
        usleep(10000);
        status = tutti_group_check(group);
    }
    CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    CHECK_STATUS(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, ON_STREAM), TUTTI_ERROR_MISMATCH);
    gpu_private_free(buffer);
}

TEST_GPU(a_mismatch_is_seen_where_one_rank_sends_packets_and_the_others_meet) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(16 << 20);
    gpu_lockstep(group);
    size_t count = tutti_group_rank(group) == 0 ? 100 : 4 << 20;
    tutti_status status = tutti_all_reduce(group, buffer, buffer, count, TUTTI_F32, TUTTI_SUM, ON_STREAM);
    for (int i = 0; i < 3000 && status == TUTTI_OK; i++) {
        usleep(10000);
        status = tutti_group_check(group);
    }
    CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    gpu_private_free(buffer);
}

/* The named operations of `count` elements for each rank, numbered; symmetric memory of the device. */
static tutti_status run_named(int number, tutti_group *group, float *in, float *out, size_t count) {
    size_t size = (size_t)tutti_group_size(group);
    switch (number) {
    case 0:
        return tutti_one_shot_all_reduce(group, in, out, count, TUTTI_F32, TUTTI_SUM, ON_STREAM);
    case 1:
        return tutti_two_shot_all_reduce(group, in, count, TUTTI_F32, TUTTI_SUM, ON_STREAM);
    case 2:
        return tutti_reduce_scatter_out(group, in, out, 1, count * size, false, TUTTI_F32, TUTTI_SUM, ON_STREAM);
    default:
        return tutti_reduce_scatter_out(group, in, out, 2, count * size, true, TUTTI_F32, TUTTI_SUM, ON_STREAM);
    }
}

TEST_GPU(named_operations_of_nothing_meet_and_one_rank_alone_is_a_mismatch) {
    tutti_group *all = tutti_world_group(world);
    tutti_memory *memory = gpu_symmetric(world, 1 << 16);
    float *in = tutti_memory_data(memory), *out = gpu_private(1 << 16);
    for (int number = 0; number < 4; number++) {
        tutti_group *group;
        CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &group));
        CHECK_OK(run_named(number, group, in, out, 64));
        CHECK_OK(run_named(number, group, in, out, 0));
        CHECK_OK(run_named(number, group, in, out, 64));
        CHECK_CUDA(gpu.cuStreamSynchronize(stream));
        CHECK_OK(tutti_group_check(group));
        gpu_lockstep(group);
        tutti_status status = run_named(number, group, in, out, tutti_group_rank(group) == 1 ? 0 : 64);
        for (int i = 0; i < 3000 && status == TUTTI_OK && tutti_group_size(group) > 1; i++) {
            usleep(10000);
            status = tutti_group_check(group);
        }
        CHECK_EQ(status, tutti_group_size(group) > 1 ? TUTTI_ERROR_MISMATCH : TUTTI_OK);
        CHECK_CUDA(gpu.cuStreamSynchronize(stream));
        tutti_group_release(group);
        CHECK_OK(tutti_barrier(all, NULL));
    }
    gpu_private_free(out);
    tutti_memory_release(memory);
}

TEST_GPU(buffers_on_cpu_and_device_do_not_mix) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    float host[4] = { 0 };
    CHECK_STATUS(tutti_all_reduce(group, tutti_memory_data(memory), host, 4, TUTTI_F32, TUTTI_SUM, ON_STREAM),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_memory_release(memory);
}

/* ---- graphs ---- */

TEST_GPU(captured_calls_can_be_replayed_and_mixed_with_eager_ones) {
    CUresult (*begin)(CUstream, int) = (CUresult(*)(CUstream, int))driver_symbol("cuStreamBeginCapture_v2");
    CUresult (*end)(CUstream, CUgraph *) = (CUresult(*)(CUstream, CUgraph *))driver_symbol("cuStreamEndCapture");
    CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long) =
        (CUresult(*)(CUgraphExec *, CUgraph, unsigned long long))driver_symbol("cuGraphInstantiateWithFlags");
    CUresult (*launch)(CUgraphExec, CUstream) = (CUresult(*)(CUgraphExec, CUstream))driver_symbol("cuGraphLaunch");
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 1 << 16);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    float *data = tutti_memory_data(memory), host[1024];
    CUgraph graph;
    CUgraphExec exec;
    /* Before the group was used on the device a capture is refused, and stays whole. */
    CHECK_CUDA(begin(stream, 1));
    CHECK_STATUS(tutti_all_reduce(group, data, data, 1024, TUTTI_F32, TUTTI_SUM, ON_STREAM), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("tutti_group_prepare");
    CHECK_CUDA(end(stream, &graph));
    CHECK_OK(tutti_group_prepare(group, NULL));
    CHECK_CUDA(begin(stream, 1));
    CHECK_OK(tutti_all_reduce(group, data, data, 1024, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .stream = stream, .algorithm = TUTTI_ALGORITHM_TWO_SHOT)));
    CHECK_OK(tutti_peers_barrier(peers, 1, ON_STREAM));
    CHECK_OK(tutti_group_check(group));
    CHECK_CUDA(end(stream, &graph));
    CHECK_CUDA(instantiate(&exec, graph, 0));
    for (int i = 0; i < 1024; i++)
        host[i] = 1;
    gpu_write(data, host, 4096);
    CHECK_OK(tutti_barrier(group, NULL));
    float expected = 1;
    for (int round = 0; round < 6; round++) {
        if (round % 3 == 2)
            CHECK_OK(
                tutti_all_reduce(group, data, data, 1024, TUTTI_F32, TUTTI_SUM,
                                 TUTTI_OPTIONS(tutti_call, .stream = stream, .algorithm = TUTTI_ALGORITHM_TWO_SHOT)));
        else
            CHECK_CUDA(launch(exec, stream));
        CHECK_CUDA(gpu.cuStreamSynchronize(stream));
        CHECK_OK(tutti_barrier(group, NULL)); /* lockstep, for ranks that are threads */
        expected *= (float)size;
    }
    gpu_read(host, data, 4096);
    CHECK(host[0] == expected && host[1023] == expected);
    CHECK_OK(tutti_group_check(group));
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

/* ---- named operations ---- */

TEST_GPU(named_operations_work_on_device_memory) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t rows = 6, columns = 32 * (size_t)size, total = rows * columns;
    float *inputs[64], *expected = malloc(total * 4), *got = malloc(total * 4);
    for (int r = 0; r < size; r++) {
        inputs[r] = malloc(total * 4);
        fill(inputs[r], TUTTI_F32, total, r);
    }
    tu_reduce(expected, (const void *const *)inputs, size, total, TUTTI_F32, TUTTI_SUM, NULL, 0);
    tutti_memory *memory = gpu_symmetric(world, total * 4);
    float *data = tutti_memory_data(memory), *private_in = gpu_private(total * 4), *out = gpu_private(total * 4);
    gpu_write(private_in, inputs[rank], total * 4);
    gpu_lockstep(group);
    CHECK_OK(
        tutti_one_shot_all_reduce_copy(group, data, total, private_in, out, total, TUTTI_F32, TUTTI_SUM, ON_STREAM));
    gpu_read(got, out, total * 4);
    CHECK_OK(tutti_group_check(group));
    CHECK(memcmp(got, expected, total * 4) == 0);
    size_t part = columns / (size_t)size;
    CHECK_OK(tutti_reduce_scatter_out(group, data, out, rows, columns, true, TUTTI_F32, TUTTI_SUM, ON_STREAM));
    gpu_read(got, out, rows * part * 4);
    for (size_t row = 0; row < rows; row++)
        CHECK(memcmp(got + row * part, expected + row * columns + (size_t)rank * part, part * 4) == 0);
    CHECK_OK(tutti_two_shot_all_reduce(group, data, total, TUTTI_F32, TUTTI_SUM, ON_STREAM));
    gpu_read(got, data, total * 4);
    CHECK(memcmp(got, expected, total * 4) == 0);
    CHECK_OK(tutti_low_contention_all_gather(group, data, out, part, TUTTI_F32, ON_STREAM));
    gpu_read(got, out, (size_t)size * part * 4);
    for (int r = 0; r < size; r++)
        CHECK(memcmp(got + (size_t)r * part, expected, part * 4) == 0);
    CHECK_STATUS(tutti_multimem_all_reduce(group, data, total, TUTTI_F32, TUTTI_SUM, ON_STREAM),
                 TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("multicast support is required");
    CHECK_OK(tutti_group_check(group));
    gpu_lockstep(group);
    for (int r = 0; r < size; r++)
        free(inputs[r]);
    free(expected);
    free(got);
    gpu_private_free(private_in);
    gpu_private_free(out);
    tutti_memory_release(memory);
}

/* Rows go to the experts, of which each begins at a multiple of `align`, and come back as they were. Each rank sends
 * fewer than `most` rows to each. */
static void send_and_return(tutti_world *world, int experts, size_t row, int most, int64_t align) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), slots = size * experts;
    size_t room = (size_t)(most + (align > 1 ? 64 : 0)) * (size_t)slots;
    tutti_memory *memory = gpu_symmetric(world, 3 * room * row * 4 + 8 * (size_t)slots * 8);
    uint32_t *in = tutti_memory_data(memory), *out = in + room * row, *back = out + room * row;
    int64_t *in_splits = (int64_t *)(back + room * row), *out_splits = in_splits + slots,
            *back_splits = out_splits + 2 * slots;
    int64_t *host_splits = malloc((size_t)slots * 16), in_rows = 0;
    uint32_t *host = malloc(room * row * 4), *got = malloc(room * row * 4);
    for (int i = 0; i < slots; i++) {
        host_splits[i] = (rank * 7 + i * 5) % most; /* some are 0 */
        in_rows += host_splits[i];
    }
    for (size_t i = 0; i < (size_t)in_rows * row; i++)
        host[i] = (uint32_t)rank << 24 | (uint32_t)i;
    gpu_write(in, host, (size_t)in_rows * row * 4);
    gpu_write(in_splits, host_splits, (size_t)slots * 8);
    tutti_rows forth = TUTTI_ROWS_INIT, again;
    forth.in = in;
    forth.out = out;
    forth.in_rows = forth.out_rows = room;
    forth.row = row;
    forth.dtype = TUTTI_U32;
    again = forth;
    again.in = out;
    again.out = back;
    gpu_lockstep(group);
    CHECK_OK(tutti_all_to_all_vdev_2d(group, &forth, experts, align, in_splits, out_splits, ON_STREAM));
    CHECK_OK(tutti_all_to_all_vdev_2d_offset(group, &again, experts, out_splits, back_splits, ON_STREAM));
    gpu_read(got, back, (size_t)in_rows * row * 4);
    CHECK_OK(tutti_group_check(group));
    CHECK(memcmp(got, host, (size_t)in_rows * row * 4) == 0); /* the way back undoes the way forth */
    gpu_read(host_splits, out_splits, (size_t)slots * 16);
    for (int expert = 0; expert < experts; expert++)
        CHECK_EQ(host_splits[slots + expert * size] % align, 0);
    gpu_lockstep(group);
    free(host_splits);
    free(host);
    free(got);
    tutti_memory_release(memory);
}

TEST_GPU(all_to_all_by_splits_on_the_device_and_back) {
    send_and_return(world, 3, 20, 9, 8);
}

/* spec: test_one_shot_all_reduce, test_two_shot_all_reduce, test_reduce_scatter, test_low_contention_reduce_scatter */
static void check_named_forms(tutti_world *world, tutti_dtype dtype) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t rows = 3, columns = 6 * (size_t)size, total = rows * columns, element = tutti_dtype_size(dtype);
    size_t part = columns / (size_t)size, bytes = total * element;
    char *inputs[64], *expected = malloc(bytes), *got = malloc(bytes);
    for (int r = 0; r < size; r++) {
        inputs[r] = malloc(bytes);
        fill(inputs[r], dtype, total, r);
    }
    tu_reduce(expected, (const void *const *)inputs, size, total, dtype, TUTTI_SUM, NULL, 0);
    tutti_memory *memory = gpu_symmetric(world, 2 * bytes + 512);
    char *data = tutti_memory_data(memory), *out = data + (bytes + 255) / 256 * 256;
    gpu_write(data, inputs[rank], bytes);
    gpu_lockstep(group);
    CHECK_OK(tutti_one_shot_all_reduce(group, data, out, total, dtype, TUTTI_SUM, ON_STREAM));
    gpu_read(got, out, bytes);
    CHECK(memcmp(got, expected, bytes) == 0);
    CHECK_OK(tutti_two_shot_all_reduce_out(group, data, out, total, dtype, TUTTI_SUM, ON_STREAM));
    gpu_read(got, out, bytes);
    CHECK(memcmp(got, expected, bytes) == 0);
    CHECK_OK(tutti_reduce_scatter_out(group, data, out, rows, columns, true, dtype, TUTTI_SUM, ON_STREAM));
    gpu_read(got, out, rows * part * element);
    for (size_t row = 0; row < rows; row++) {
        if (memcmp(got + row * part * element, expected + (row * columns + (size_t)rank * part) * element,
                   part * element) != 0)
            FAIL("reduce_scatter_out of %s with a split last dimension differs in row %zu", tutti_dtype_name(dtype),
                 row);
    }
    CHECK_OK(tutti_reduce_scatter_out(group, data, out, (size_t)size, rows * part, false, dtype, TUTTI_SUM, ON_STREAM));
    gpu_read(got, out, rows * part * element);
    CHECK(memcmp(got, expected + (size_t)rank * rows * part * element, rows * part * element) == 0);
    CHECK_OK(tutti_low_contention_reduce_scatter(group, data, out, rows * part, dtype, TUTTI_SUM, ON_STREAM));
    gpu_read(got, out, rows * part * element);
    CHECK(memcmp(got, expected + (size_t)rank * rows * part * element, rows * part * element) == 0);
    CHECK_OK(tutti_low_contention_all_gather(group, data, out, total / (size_t)size, dtype, ON_STREAM));
    gpu_read(got, out, bytes);
    for (int r = 0; r < size; r++)
        CHECK(memcmp(got + (size_t)r * bytes / (size_t)size, inputs[r], bytes / (size_t)size) == 0);
    CHECK_OK(tutti_group_check(group));
    gpu_lockstep(group);
    for (int r = 0; r < size; r++)
        free(inputs[r]);
    free(expected);
    free(got);
    tutti_memory_release(memory);
}

TEST_GPU(every_named_form_has_the_bits_of_the_serial_loop_for_every_type) {
    test_instructions_named("reference");
    for (int dtype = TUTTI_F64; dtype <= TUTTI_C128; dtype++)
        check_named_forms(world, (tutti_dtype)dtype);
}

TEST_GPU(all_to_all_by_splits_takes_more_than_1024_of_them) {
    send_and_return(world, 2048 / tutti_world_size(world) + 1, 4, 3, 1);
}

/* spec: test_multimem_all_reduce, test_multimem_one_shot_all_reduce, test_multimem_one_shot_reduce_out,
 * test_multimem_all_gather, in the software form */
static void check_multimem(tutti_world *world, tutti_dtype dtype, size_t count, size_t shift) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    size_t element = tutti_dtype_size(dtype), bytes = count * element;
    char *inputs[64], *expected = malloc(bytes), *got = malloc(bytes * (size_t)size);
    for (int r = 0; r < size; r++) {
        inputs[r] = malloc(bytes);
        fill(inputs[r], dtype, count, r);
    }
    tu_reduce(expected, (const void *const *)inputs, size, count, dtype, TUTTI_SUM, NULL, 0);
    tutti_memory *memory = gpu_symmetric(world, bytes * (size_t)(size + 1) + 1024);
    char *in = (char *)tutti_memory_data(memory) + shift, *out = in + (bytes + 255) / 256 * 256;
    gpu_write(in, inputs[rank], bytes);
    gpu_lockstep(group);
    CHECK_OK(tutti_multimem_one_shot_all_reduce(group, in, out, count, dtype, TUTTI_SUM, ON_STREAM));
    gpu_read(got, out, bytes);
    CHECK(memcmp(got, expected, bytes) == 0);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_CUDA(gpu.cuMemsetD8Async((CUdeviceptr)(uintptr_t)out, 0, bytes, stream));
    CHECK_OK(tutti_multimem_one_shot_reduce_out(group, in, out, count, dtype, TUTTI_SUM, 0, ON_STREAM));
    gpu_read(got, out, bytes);
    if (rank == 0)
        CHECK(memcmp(got, expected, bytes) == 0);
    for (size_t i = 0; rank != 0 && i < bytes; i++)
        CHECK_EQ(got[i], 0); /* the root's alone */
    CHECK_OK(tutti_multimem_all_gather_out(group, in, out, count, dtype, ON_STREAM));
    gpu_read(got, out, bytes * (size_t)size);
    for (int r = 0; r < size; r++)
        CHECK(memcmp(got + (size_t)r * bytes, inputs[r], bytes) == 0);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_CUDA(gpu.cuMemsetD8Async((CUdeviceptr)(uintptr_t)out, 0, bytes * (size_t)size, stream));
    CHECK_OK(tutti_low_contention_all_gather_multicast(group, in, out, count, dtype, ON_STREAM));
    gpu_read(got, out, bytes * (size_t)size);
    for (int r = 0; r < size; r++)
        CHECK(memcmp(got + (size_t)r * bytes, inputs[r], bytes) == 0);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_multimem_all_reduce(group, in, count, dtype, TUTTI_SUM, ON_STREAM));
    gpu_read(got, in, bytes);
    CHECK(memcmp(got, expected, bytes) == 0);
    CHECK_OK(tutti_group_check(group));
    gpu_lockstep(group);
    for (int r = 0; r < size; r++)
        free(inputs[r]);
    free(expected);
    free(got);
    tutti_memory_release(memory);
}

/* memcpy_to_multicast and the multicast barrier: everybody writes its word into everybody's block, between barriers. */
static void check_multicast_words(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    uint32_t *word = gpu_private(4), host[64];
    gpu_lockstep(group);
    for (uint32_t round = 1; round <= 10; round++) {
        CHECK_CUDA(gpu.cuMemsetD32Async((CUdeviceptr)(uintptr_t)word, round * 100 + (uint32_t)rank, 1, stream));
        CHECK_OK(tutti_peers_put_multicast(peers, (size_t)rank * 4, word, 4, ON_STREAM));
        CHECK_OK(tutti_peers_barrier(peers, 3, ON_STREAM));
        gpu_read(host, tutti_memory_data(memory), (size_t)size * 4);
        for (int r = 0; r < size; r++)
            CHECK_EQ(host[r], round * 100 + (uint32_t)r);
        CHECK_OK(tutti_peers_barrier(peers, 3, ON_STREAM)); /* nobody writes the next before all have read */
    }
    CHECK_STATUS(tutti_peers_put_multicast(peers, 4095, word, 2, ON_STREAM), TUTTI_ERROR_RANGE);
    CHECK_OK(tutti_group_check(group));
    gpu_lockstep(group);
    gpu_private_free(word);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

static void multimem_in_software(tutti_world *world, void *argument) {
    static const tutti_dtype types[] = { TUTTI_F32, TUTTI_BF16, TUTTI_F16, TUTTI_I32 };
    static const size_t counts[] = { 1, 2048, 2049, 300000 }, shifts[] = { 0, 4, 8, 16 };
    (void)argument;
    gpu_begin();
    test_instructions_named("reference");
    for (int type = 0; type < 4; type++) {
        for (int i = 0; i < 4; i++)
            check_multimem(world, types[type], counts[i], shifts[(type + i) % 4]);
    }
    check_multicast_words(world);
    gpu_end();
}

TEST_LIMIT(multicast_forms_in_software_have_the_bits_of_the_serial_loop_as_threads, 60) {
    gpu_needed();
    setenv("TUTTI_MULTICAST", "software", 1);
    test_threads(gpu_ranks(), multimem_in_software, NULL);
    _exit(0);
}

TEST_LIMIT(multicast_forms_in_software_have_the_bits_of_the_serial_loop_as_processes, 60) {
    gpu_needed();
    setenv("TUTTI_MULTICAST", "software", 1);
    test_processes(gpu_ranks(), multimem_in_software, NULL);
}
