/* SPDX-License-Identifier: Apache-2.0
 *
 * A driver of which any one call fails, on one of two ranks: opening, allocating, meeting, collectives and signals on
 * the stand-in of the driver. Nobody waits until a deadline, nothing is left behind, and the next world works.
 */
#include "../collective/on_hosts.h"
#include "../failing.h"

static tutti_status work(tutti_world *world, tutti_memory **memory, tutti_peers **peers) {
    tutti_group *group = tutti_world_group(world);
    tutti_status status = failing_begin(world, "cuda", memory, peers);
    char *data = *memory != NULL ? tutti_memory_data(*memory) : NULL;
    if (status == TUTTI_OK)
        status = tutti_all_reduce(group, data, data, 64, TUTTI_F32, TUTTI_SUM, NULL);
    if (status == TUTTI_OK)
        status = tutti_all_gather(group, data, data + 32768, 4096, TUTTI_U8, NULL);
    if (status == TUTTI_OK)
        status = tutti_peers_barrier(*peers, 0, NULL);
    if (status == TUTTI_OK)
        status = tutti_group_check(group);
    return status;
}

TEST_LIMIT(any_call_of_the_driver_may_fail_on_one_rank, 240) {
    backends_need("cuda", true);
    if (!backends_standin())
        SKIP("only a stand-in fails when it is told to");
    failing calls = failing_calls("libcuda.so.1", "standin");
    CHECK(failing_each(&calls, 1, work, NULL) > 20);
}

/* Without a fabric that maps members there, and without NCCL or NVSHMEM. */
static void reduce_between_hosts(tutti_world *world) {
    tutti_memory *memory;
    CHECK_OK(tutti_backend_open(world, "cuda", NULL));
    CHECK_OK(tutti_memory_alloc(world, 4096, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA_AT(0)), &memory));
    char *data = tutti_memory_data(memory);
    CHECK_STATUS(tutti_all_reduce(tutti_world_group(world), data, data, 64, TUTTI_F32, TUTTI_SUM, NULL),
                 TUTTI_ERROR_UNSUPPORTED);
    CHECK(strstr(tutti_error_message(), "tutti-nccl") != NULL &&
          strstr(tutti_error_message(), "tutti-nvshmem") != NULL);
    tutti_memory_release(memory);
}

TEST(collectives_on_memory_of_a_gpu_between_hosts_name_the_plugins_that_have_them) {
    backends_need("cuda", true);
    if (!backends_standin())
        SKIP("GPUs of one host may map each other");
    on_hosts(one_each, 2, reduce_between_hosts);
}
