/* SPDX-License-Identifier: Apache-2.0
 *
 * The NCCL backend, of which any one call fails on one of two ranks: of NCCL, of the driver, or an allocation on the
 * host. Both hear of it, nobody waits until a deadline, nothing is left behind, and the next world works. NCCL and the
 * driver are stand-ins.
 */
#include "../failing_memory.h"

#define BY_NCCL TUTTI_OPTIONS(tutti_call, .executor = "nccl")

static tutti_status collectives(tutti_group *group, char *data) {
    static const size_t parts[] = { 10, 30 };
    float factor = 2, *numbers = (float *)(void *)data;
    tutti_status status = tutti_all_reduce(group, numbers, numbers, 64, TUTTI_F32, TUTTI_SUM, BY_NCCL);
    if (status == TUTTI_OK)
        status = tutti_all_reduce(group, numbers, numbers, 64, TUTTI_F32, TUTTI_PREMUL_SUM,
                                  TUTTI_OPTIONS(tutti_call, .executor = "nccl", .factor = &factor));
    if (status == TUTTI_OK)
        status = tutti_reduce_scatter_v(group, numbers, numbers + 64, parts, TUTTI_F32, TUTTI_SUM, BY_NCCL);
    if (status == TUTTI_OK)
        status = tutti_all_to_all(group, data, data, 4096, TUTTI_U8, BY_NCCL);
    if (status == TUTTI_OK)
        status = tutti_broadcast(group, data, data, 100, TUTTI_U8, 0, BY_NCCL);
    if (status == TUTTI_OK)
        status = tutti_all_gather(group, data, data + 8192, 100, TUTTI_U8, BY_NCCL);
    return status;
}

static tutti_status work(tutti_world *world, tutti_memory **memory, tutti_peers **peers) {
    tutti_group *group = tutti_world_group(world);
    tutti_status status = failing_begin(world, "nccl", memory, peers);
    if (status == TUTTI_OK)
        status = collectives(group, tutti_memory_data(*memory));
    if (status == TUTTI_OK)
        status = tutti_peers_barrier(*peers, 0, NULL);
    return status == TUTTI_OK ? failing_end(group) : status;
}

static int (*count)(const char *what);

static int things_of_nccl(void) {
    return count("communicators") + count("windows") + count("blocks");
}

static void begin(void) {
    backends_need("nccl", true);
    if (!backends_standin())
        SKIP("only a stand-in fails when it is told to");
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    *(void **)&count = failing_find(library, "standin_nccl", "count");
}

TEST_LIMIT(any_call_of_nccl_may_fail_on_one_rank, 240) {
    begin();
    failing calls = failing_calls("libnccl.so.2", "standin_nccl");
    for (int victim = 0; victim < 2; victim++)
        CHECK(failing_each(&calls, victim, work, things_of_nccl) > 10);
    CHECK_EQ(things_of_nccl(), 0);
}

TEST_LIMIT(any_call_of_the_driver_may_fail_on_one_rank_that_uses_nccl, 240) {
    begin();
    failing calls = failing_calls("libcuda.so.1", "standin");
    CHECK(failing_each(&calls, 1, work, things_of_nccl) > 20);
    CHECK_EQ(things_of_nccl(), 0);
}

TEST_LIMIT(any_allocation_of_the_nccl_backend_may_fail_on_one_rank, 240) {
    begin();
#ifdef FAILING_HAS_MEMORY
    failing calls = failing_memory("libtutti-nccl.so");
    CHECK(failing_each(&calls, 1, work, things_of_nccl) > 5);
    CHECK_EQ(things_of_nccl(), 0);
#else
    SKIP("the sanitizer has the allocations of this program");
#endif
}
