/* SPDX-License-Identifier: Apache-2.0
 *
 * Symmetric memory by windows of NCCL. One rank on a GPU has a window of its own; ranks that NCCL takes for several
 * hosts have none in common, and are told so.
 */
#include "../against_cpu.h"
#include "gpu.h"

static tutti_memory *allocate(tutti_world *world, size_t bytes) {
    CHECK_OK(tutti_memory_set_backend(world, TUTTI_CUDA, "nccl"));
    return gpu_symmetric(world, bytes);
}

TEST_NCCL_RANKS(a_block_is_a_window_and_its_pad_is_clear, 1) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = allocate(world, 100000);
    tutti_peers *peers;
    tutti_status status = tutti_memory_rendezvous(memory, group, &peers);
    tu_nccl_library library;
    CHECK_OK(tu_nccl_library_load(&tu_backend_host_table, &library));
    if (library.version < TU_NCCL_VERSION(2, 28, 0)) {
        CHECK_EQ(status, TUTTI_ERROR_UNSUPPORTED);
        CHECK_MESSAGE("2.28");
        tutti_memory_release(memory);
        return;
    }
    CHECK_OK(status);
    unsigned char *bytes = malloc(100000), *pad = malloc(tutti_peers_pad_bytes(peers));
    gpu_read(bytes, tutti_peers_buffer(peers, 0), 100000);
    gpu_read(pad, tutti_peers_signal_pad(peers, 0), tutti_peers_pad_bytes(peers));
    for (size_t i = 0; i < 100000; i++)
        CHECK_EQ(bytes[i], 0);
    for (size_t i = 0; i < tutti_peers_pad_bytes(peers); i++)
        CHECK_EQ(pad[i], 0);
    for (size_t i = 0; i < 100000; i++)
        bytes[i] = (unsigned char)(i * 7);
    CHECK_OK(tutti_peers_put(peers, 0, 0, bytes, 100000, ON_STREAM));
    CHECK_OK(tutti_peers_signal(peers, 0, 1, ON_STREAM));
    CHECK_OK(tutti_peers_wait_signal(peers, 0, 1, ON_STREAM));
    memset(bytes, 0, 100000);
    CHECK_OK(tutti_peers_get(peers, 0, 5, bytes, 1000, ON_STREAM));
    gpu_settle();
    for (size_t i = 0; i < 1000; i++)
        CHECK_EQ(bytes[i], (unsigned char)((i + 5) * 7));
    CHECK_OK(tutti_peers_barrier(peers, 0, ON_STREAM));
    gpu_settle();
    CHECK_OK(tutti_group_check(group));
    tutti_peers_release(peers);
    free(bytes);
    free(pad);
    tutti_memory_release(memory);
}

TEST_NCCL_RANKS(a_group_of_the_same_name_made_again_has_windows_of_its_own, 1) {
    tutti_memory *memory = allocate(world, 4096);
    static const int ranks[] = { 0 };
    for (int round = 0; round < 3; round++) {
        tutti_group *group;
        tutti_peers *peers;
        CHECK_OK(tutti_group_new(world, ranks, 1, TUTTI_OPTIONS(tutti_group_options, .name = "again"), &group));
        CHECK_OK(tutti_memory_rendezvous(memory, group, &peers));
        uint32_t value = 7u + (uint32_t)round, got = 0;
        CHECK_OK(tutti_peers_put(peers, 0, 0, &value, sizeof value, ON_STREAM));
        CHECK_OK(tutti_peers_get(peers, 0, 0, &got, sizeof got, ON_STREAM));
        gpu_settle();
        CHECK_EQ(got, value);
        tutti_peers_release(peers);
        CHECK_OK(tutti_group_destroy(group));
        tutti_group_release(group);
    }
    tutti_memory_release(memory);
}

TEST_NCCL_RANKS(ranks_without_a_common_lsa_domain_are_told_so_and_nothing_ends, 2) {
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory = allocate(world, 4096);
    tutti_peers *peers;
    float one = 1, *buffer = tutti_memory_data(memory);
    CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("LSA");
    gpu_write(buffer, &one, 4);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_settle();
    gpu_read(&one, buffer, 4);
    CHECK(one == 2);
    tutti_memory_release(memory);
}
