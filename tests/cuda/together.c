/* SPDX-License-Identifier: Apache-2.0
 *
 * Many ranks on one GPU, and nobody who orders them: no barrier between their operations, their allocations and their
 * frees. The default number of connections; ranks as threads share one context.
 */
#include "graph.h"

/* 200 collectives on end, each after work of the rank's own on its stream. */
static void two_hundred(tutti_world *world, void *argument) {
    (void)argument;
    gpu_begin();
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 1 << 20);
    uint32_t *data = tutti_memory_data(memory), *host = malloc(4096), expected = 0;
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    for (int r = 0; r < size; r++)
        expected += (uint32_t)r + 1;
    for (int round = 0; round < 200; round++) {
        size_t count = round % 3 == 0 ? 1024 : round % 3 == 1 ? 16 : 65536;
        CHECK_CUDA(
            gpu.cuMemsetD32Async((CUdeviceptr)(uintptr_t)data, (uint32_t)rank + 1, count, stream)); /* its own work */
        CHECK_OK(tutti_all_reduce(group, data, data + 131072, count, TUTTI_U32, TUTTI_SUM, ON_STREAM));
        if (round % 50 == 49) {
            gpu_read(host, data + 131072, 64);
            CHECK_EQ(host[0], expected);
            CHECK_EQ(host[15], expected);
        }
    }
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    CHECK_OK(tutti_group_check(group));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    free(host);
    gpu_end();
}

TEST_LIMIT(eight_thread_ranks_run_200_collectives_without_a_barrier, 60) {
    gpu_needed();
    test_threads(8, two_hundred, NULL);
    _exit(0);
}

TEST_LIMIT(sixteen_thread_ranks_run_200_collectives_without_a_barrier, 90) {
    gpu_needed();
    test_threads(16, two_hundred, NULL);
    _exit(0);
}

static void seventy_two(tutti_world *world, void *argument) {
    (void)argument;
    gpu_begin();
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 65536);
    uint32_t *data = tutti_memory_data(memory), host[256];
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    for (int i = 0; i < 256; i++)
        host[i] = (uint32_t)(rank * 256 + i);
    gpu_write(data, host, 1024);
    CHECK_OK(tutti_all_reduce(group, data, data + 1024, 256, TUTTI_U32, TUTTI_MAX, ON_STREAM));
    CHECK_OK(tutti_all_to_all(group, data, data + 2048, 1, TUTTI_U32, ON_STREAM));
    CHECK_OK(tutti_reduce_scatter(group, data, data + 4096, 2, TUTTI_U32, TUTTI_SUM, ON_STREAM));
    gpu_read(host, data + 1024, 1024);
    for (int i = 0; i < 256; i++)
        CHECK_EQ(host[i], (uint32_t)((size - 1) * 256 + i));
    gpu_read(host, data + 2048, (size_t)size * 4);
    for (int r = 0; r < size; r++)
        CHECK_EQ(host[r], (uint32_t)(r * 256 + rank));
    gpu_read(host, data + 4096, 8);
    CHECK_EQ(host[1], (uint32_t)(size * (2 * rank + 1) + 256 * size * (size - 1) / 2));
    CHECK_OK(tutti_group_check(group));
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    gpu_end();
}

TEST_LIMIT(seventy_two_thread_ranks_make_a_group_on_a_gpu, 120) {
    gpu_needed();
    test_threads(72, seventy_two, NULL);
    _exit(0);
}

/* Freeing waits for what the rank has in its streams. */
TEST_GPU(free_waits_for_pending_work) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    float *result = gpu_private(1 << 20), host[16];
    gpu_lockstep(group);
    for (int round = 0; round < 5; round++) {
        tutti_memory *memory = gpu_symmetric(world, 1 << 20);
        float *data = tutti_memory_data(memory);
        tutti_peers *peers;
        CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
        CHECK_CUDA(gpu.cuMemsetD32Async((CUdeviceptr)(uintptr_t)data, 0x3f800000, 1 << 18, stream)); /* ones */
        if (rank == 0)
            gpu_delay(stream, 50);
        CHECK_OK(tutti_all_reduce(group, data, result, 1 << 18, TUTTI_F32, TUTTI_SUM, ON_STREAM));
        tutti_peers_release(peers);
        tutti_memory_release(memory); /* while the collective still waits */
    }
    gpu_read(host, result, sizeof host);
    CHECK(host[0] == (float)size && host[15] == (float)size);
    CHECK_OK(tutti_group_check(group));
    gpu_lockstep(group);
    gpu_private_free(result);
}

TEST_GPU(more_than_1023_rendezvous_of_a_group_are_all_used_where_they_lie) {
    tutti_group *group = tutti_world_group(world);
    int size = tutti_group_size(group);
    float host[4];
    for (int round = 0; round < 60; round++) { /* indices are used again: memory/lookup.c counts further */
        tutti_memory *memory = gpu_symmetric(world, 4096);
        float *data = tutti_memory_data(memory);
        tutti_peers *peers;
        CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
        CHECK_CUDA(gpu.cuMemsetD32Async((CUdeviceptr)(uintptr_t)data, 0x3f800000, 64, stream));
        CHECK_OK(tutti_all_reduce(group, data, data, 64, TUTTI_F32, TUTTI_SUM, ON_STREAM));
        gpu_read(host, data, sizeof host);
        CHECK(host[0] == (float)size);
        CHECK_OK(tutti_barrier(group, NULL));
        tutti_peers_release(peers);
        tutti_memory_release(memory);
    }
}

TEST_GPU_OF(3, sub_groups_meet_and_compute_on_one_block_each_by_itself) {
    tutti_group *all = tutti_world_group(world), *low, *high;
    int rank = tutti_group_rank(all), size = tutti_group_size(all), half = size / 2;
    int ranks[64];
    for (int i = 0; i < size; i++)
        ranks[i] = i;
    CHECK_OK(tutti_group_new(world, ranks, half + 1, NULL, &low)); /* rank `half` is in both */
    CHECK_OK(tutti_group_new(world, ranks + half, size - half, NULL, &high));
    tutti_memory *memory = gpu_symmetric(world, 8192);
    float *data = tutti_memory_data(memory), host[4];
    tutti_peers *peers[3] = { NULL, NULL, NULL };
    CHECK_OK(tutti_memory_rendezvous(memory, all, &peers[0]));
    if (rank <= half)
        CHECK_OK(tutti_memory_rendezvous(memory, low, &peers[1]));
    if (rank >= half)
        CHECK_OK(tutti_memory_rendezvous(memory, high, &peers[2]));
    CHECK_CUDA(gpu.cuMemsetD32Async((CUdeviceptr)(uintptr_t)data, 0x3f800000, 64, stream));
    if (rank <= half)
        CHECK_OK(tutti_all_reduce(low, data, data + 64, 64, TUTTI_F32, TUTTI_SUM, ON_STREAM));
    if (rank >= half)
        CHECK_OK(tutti_all_reduce(high, data, data + 128, 64, TUTTI_F32, TUTTI_SUM, ON_STREAM));
    CHECK_OK(tutti_all_reduce(all, data, data + 192, 64, TUTTI_F32, TUTTI_SUM, ON_STREAM));
    if (rank <= half) {
        gpu_read(host, data + 64, sizeof host);
        CHECK(host[0] == (float)(half + 1));
    }
    if (rank >= half) {
        gpu_read(host, data + 128, sizeof host);
        CHECK(host[0] == (float)(size - half));
    }
    gpu_read(host, data + 192, sizeof host);
    CHECK(host[0] == (float)size);
    CHECK_OK(tutti_barrier(all, NULL));
    for (int i = 0; i < 3; i++)
        tutti_peers_release(peers[i]);
    tutti_memory_release(memory);
    if (low != TUTTI_NON_GROUP_MEMBER)
        tutti_group_release(low);
    if (high != TUTTI_NON_GROUP_MEMBER)
        tutti_group_release(high);
    CHECK_OK(tutti_barrier(all, NULL));
}
