/* SPDX-License-Identifier: Apache-2.0
 *
 * A driver of which any one call fails, on one of two ranks: opening, allocating, meeting, collectives and signals on
 * the stand-in of the driver. Nobody waits until a deadline, nothing is left behind, and the next world works.
 */
#include "../failing.h"

static tutti_status work(tutti_world *world, tutti_memory **memory, tutti_peers **peers) {
    tutti_group *group = tutti_world_group(world);
    tutti_status status = tutti_backend_open(world, "cuda", NULL);
    if (status == TUTTI_OK)
        status =
            tutti_memory_alloc(world, 65536, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA_AT(0)), memory);
    if (status == TUTTI_OK)
        status = tutti_memory_rendezvous(*memory, group, peers);
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
