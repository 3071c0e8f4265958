/* SPDX-License-Identifier: Apache-2.0
 *
 * Symmetric memory on a GPU: the contract of the CPU's, on device memory.
 */
#include <tutti/connectivity.h>

#include "gpu.h"

TEST_GPU(a_block_is_zeroed_and_every_peer_can_be_read_and_written) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size;
    tutti_memory *memory = gpu_symmetric(world, 1 << 20);
    uint32_t *host = calloc(1, 1 << 20);
    gpu_read(host, tutti_memory_data(memory), 1 << 20);
    for (int i = 0; i < 1 << 18; i++)
        CHECK_EQ(host[i], 0);
    CHECK(tutti_memory_find(world, (char *)tutti_memory_data(memory) + 12345) == memory);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    CHECK(tutti_peers_buffer(peers, rank) == tutti_memory_data(memory));
    for (int i = 0; i < 256; i++)
        host[i] = (uint32_t)(rank * 1000 + i);
    CHECK_OK(tutti_peers_put(peers, next, 4096, host, 1024, ON_STREAM));
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    gpu_read(host, (char *)tutti_memory_data(memory) + 4096, 1024);
    for (int i = 0; i < 256; i++)
        CHECK_EQ(host[i], (uint32_t)((rank + size - 1) % size * 1000 + i));
    uint32_t got[4];
    CHECK_OK(tutti_peers_get(peers, next, 4096, got, sizeof got, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    CHECK_EQ(got[3], (uint32_t)(rank * 1000 + 3));
    CHECK_OK(tutti_group_check(group));
    CHECK_OK(tutti_barrier(group, NULL));
    free(host);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_GPU(peers_lie_at_equal_distances) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 100);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    int64_t stride = 0;
    for (int r = 0; r + 1 < size; r++) {
        if (r == rank || r + 1 == rank)
            continue; /* one's own address is the block's own */
        int64_t distance = (char *)tutti_peers_buffer(peers, r + 1) - (char *)tutti_peers_buffer(peers, r);
        CHECK(stride == 0 || stride == distance);
        stride = distance;
    }
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_GPU(unequal_sizes_fail_alike_and_end_nothing) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = gpu_symmetric(world, tutti_group_rank(group) == 1 ? 8 << 20 : 4 << 20);
    tutti_peers *peers;
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_MISMATCH);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_GPU(a_persistent_block_keeps_its_address) {
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.device = TUTTI_CUDA_AT(0);
    options.persistent = true;
    options.persistent_id = 77;
    tutti_memory *memory, *again;
    CHECK_OK(tutti_memory_alloc(world, 4096, &options, &memory));
    void *address = tutti_memory_data(memory);
    CHECK_STATUS(tutti_memory_alloc(world, 4096, &options, &again), TUTTI_ERROR_STATE);
    tutti_memory_release(memory);
    CHECK_OK(tutti_memory_alloc(world, 4096, &options, &again));
    CHECK(tutti_memory_data(again) == address);
    tutti_memory_release(again);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(too_much_memory_is_an_error_code) {
    tutti_memory *memory;
    tutti_memory_options options = TUTTI_MEMORY_OPTIONS_INIT;
    options.device = TUTTI_CUDA_AT(0);
    CHECK_STATUS(tutti_memory_alloc(world, (size_t)1 << 46, &options, &memory), TUTTI_ERROR_MEMORY);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(signals_order_data_between_streams_of_ranks) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size,
        before = (rank + size - 1) % size;
    tutti_memory *memory = gpu_symmetric(world, 1 << 20);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    uint32_t *words = gpu_private(1 << 16), host[4];
    for (uint32_t round = 1; round <= 20; round++) {
        CHECK_CUDA(gpu.cuMemsetD32Async((CUdeviceptr)(uintptr_t)words, (uint32_t)rank * 100 + round, 1 << 14, stream));
        CHECK_OK(tutti_peers_put(peers, next, 0, words, 1 << 16, ON_STREAM));
        CHECK_OK(tutti_peers_signal(peers, next, 3, ON_STREAM));
        CHECK_OK(tutti_peers_wait_signal(peers, before, 3, ON_STREAM));
        gpu_read(host, (char *)tutti_memory_data(memory) + 65520, sizeof host);
        CHECK_EQ(host[3], (uint32_t)before * 100 + round);
        CHECK_OK(tutti_barrier(group, NULL));
    }
    bool arrived = true;
    CHECK_OK(tutti_peers_test_signal(peers, before, 3, &arrived));
    CHECK(!arrived);
    CHECK_OK(tutti_group_check(group));
    gpu_private_free(words);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

/* A wait for a signal that runs out of time ends that wait alone. */
TEST_GPU(wait_signal_timeout) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    if (rank == 0) {
        CHECK_OK(
            tutti_peers_wait_signal(peers, 1, 0, TUTTI_OPTIONS(tutti_call, .stream = stream, .timeout_ns = 100000000)));
        CHECK_CUDA(gpu.cuStreamSynchronize(stream)); /* no error here: the context is well */
        CHECK_STATUS(tutti_group_check(group), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("waited for rank 1 on channel 0");
        CHECK_OK(tutti_group_check(group)); /* told once */
    }
    CHECK_OK(tutti_barrier(group, NULL));
    /* Everybody goes on: signals, a barrier, a collective. */
    CHECK_OK(tutti_peers_signal(peers, (rank + 1) % size, 0, ON_STREAM));
    CHECK_OK(tutti_peers_wait_signal(peers, (rank + size - 1) % size, 0, ON_STREAM));
    CHECK_OK(tutti_peers_barrier(peers, 1, ON_STREAM));
    CHECK_OK(tutti_all_reduce(group, tutti_memory_data(memory), tutti_memory_data(memory), 16, TUTTI_F32, TUTTI_SUM,
                              ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    CHECK_OK(tutti_group_check(group));
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_GPU(a_signal_that_nobody_takes_runs_out_of_time_alone) { /* as rows.c, put_signal_timeout, on every rank */
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size;
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    CHECK_OK(tutti_peers_signal(peers, next, 2, ON_STREAM));
    CHECK_OK(tutti_peers_signal(peers, next, 2, TUTTI_OPTIONS(tutti_call, .stream = stream, .timeout_ns = 50000000)));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    CHECK_STATUS(tutti_group_check(group), TUTTI_ERROR_TIMEOUT);
    bool arrived = false;
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_peers_test_signal(peers, (rank + size - 1) % size, 2, &arrived));
    CHECK(arrived); /* the first one, taken by the test */
    CHECK_OK(tutti_peers_test_signal(peers, (rank + size - 1) % size, 2, &arrived));
    CHECK(!arrived);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

/* A barrier that runs out of time ends the group. */
TEST_GPU(barrier_timeout) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    if (tutti_group_rank(group) == 0) {
        CHECK_OK(tutti_peers_barrier(peers, 0, TUTTI_OPTIONS(tutti_call, .stream = stream, .timeout_ns = 100000000)));
        CHECK_CUDA(gpu.cuStreamSynchronize(stream));
        CHECK_STATUS(tutti_group_check(group), TUTTI_ERROR_TIMEOUT);
        uint32_t word = 7, back = 0;
        gpu_write(tutti_memory_data(memory), &word, sizeof word); /* the context is well */
        gpu_read(&back, tutti_memory_data(memory), sizeof back);
        CHECK_EQ(back, 7);
    } else {
        tutti_status status = TUTTI_OK;
        for (int i = 0; i < 2000 && status == TUTTI_OK; i++) {
            usleep(10000);
            status = tutti_group_check(group);
        }
        CHECK_EQ(status, TUTTI_ERROR_TIMEOUT);
    }
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST_GPU(words_are_set_and_written_in_stream_order) {
    tutti_memory *memory = gpu_symmetric(world, 256);
    int64_t shape[1] = { 64 };
    tutti_view view = TUTTI_VIEW_INIT;
    CHECK_OK(tutti_view_of(tutti_memory_data(memory), TUTTI_U32, shape, 1, &view));
    view.device = TUTTI_CUDA_AT(0);
    CHECK_OK(tutti_view_memset32(world, &view, 32, 1, 16, ON_STREAM));
    CHECK_OK(tutti_view_write_value32(world, &view, 63, 9, ON_STREAM));
    uint32_t host[64];
    gpu_read(host, tutti_memory_data(memory), sizeof host);
    for (int i = 0; i < 64; i++)
        CHECK_EQ(host[i], (i >= 32 && i < 48 ? 1u : i == 63 ? 9u : 0u));
    CHECK_STATUS(tutti_view_memset32(world, &view, -1, 1, 1, ON_STREAM), TUTTI_ERROR_RANGE);
    tutti_memory_release(memory);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

/* The devices of this process have a matrix of links. */
TEST_GPU(cuda_nvlink_connectivity_detection) {
    tutti_connectivity *connectivity;
    tutti_memory *memory = gpu_symmetric(world, 64);
    tutti_status status = tutti_connectivity_devices(world, TUTTI_CUDA, &connectivity);
    tutti_memory_release(memory);
    if (status == TUTTI_ERROR_UNSUPPORTED)
        return; /* NVML is not there, and the message says so */
    CHECK_OK(status);
    for (int i = 0; i < tutti_connectivity_size(connectivity); i++)
        CHECK_EQ(tutti_connectivity_link(connectivity, i, i), TUTTI_LINK_SELF);
    tutti_connectivity_release(connectivity);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

TEST_GPU(who_sees_the_value_of_a_word_sees_the_bytes_before_it) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group), next = (rank + 1) % size,
        before = (rank + size - 1) % size;
    tutti_memory *memory = gpu_symmetric(world, 4096);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
    for (uint64_t round = 1; round <= 20; round++) {
        uint64_t value = (uint64_t)rank * 1000 + round, got = 0;
        CHECK_OK(tutti_peers_put_with_signal(peers, next, 128, &value, sizeof value, 3, round, ON_STREAM));
        gpu_lockstep(group); /* everybody has put */
        CHECK_OK(
            tutti_peers_wait_for_signal(peers, 3, round % 2 == 0 ? TUTTI_EQUAL : TUTTI_AT_LEAST, round, ON_STREAM));
        gpu_read(&got, (char *)tutti_memory_data(memory) + 128, sizeof got);
        CHECK_EQ(got, (uint64_t)before * 1000 + round);
        gpu_lockstep(group);
    }
    CHECK_OK(tutti_peers_wait_for_signal(peers, 3, TUTTI_EQUAL, 77,
                                         TUTTI_OPTIONS(tutti_call, .stream = stream, .timeout_ns = 20000000)));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    CHECK_STATUS(tutti_group_check(group), TUTTI_ERROR_TIMEOUT); /* told once, and ends nothing */
    CHECK_MESSAGE("word");
    CHECK_OK(tutti_group_check(group));
    gpu_lockstep(group);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}
