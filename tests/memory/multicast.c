/* SPDX-License-Identifier: Apache-2.0
 *
 * One address for the memory of all ranks, by the switch: on the backend that TEST_BACKEND names, where every rank has
 * a GPU of its own that can. Elsewhere it says what is missing, and both questions, whether a device can and whether a
 * block has such an address, are answered with no.
 */
#include <sys/mman.h>

#include "../backends.h"

/* What the ranks found, in memory that they share. */
typedef struct finding {
    _Atomic int without_support, without_address, reached;
} finding;

static void reach_all(tutti_world *world, void *argument) {
    finding *found = argument;
    tutti_group *group = tutti_world_group(world);
    tutti_memory *memory;
    uint32_t word = 4711, here = 0;
    backends_begin(world);
    tutti_peers *peers = backends_meet(world, group, 4096, &memory);
    void *address = tutti_peers_multicast(peers);
    if (!tutti_memory_has_multicast_support(world, TUTTI_CUDA_AT(0))) {
        atomic_fetch_add(&found->without_support, 1);
        CHECK(address == NULL);
    }
    if (address == NULL) {
        atomic_fetch_add(&found->without_address, 1);
        CHECK_STATUS(tutti_peers_put_multicast(peers, 64, &word, sizeof word, backends_call()),
                     TUTTI_ERROR_UNSUPPORTED);
    } else {
        if (tutti_group_rank(group) == 0)
            CHECK_OK(tutti_peers_put_multicast(peers, 64, &word, sizeof word, backends_call()));
        CHECK_OK(tutti_peers_barrier(peers, 0, backends_call()));
        CHECK_OK(tutti_peers_get(peers, tutti_group_rank(group), 64, &here, sizeof here, backends_call()));
        backends_settle();
        CHECK_EQ(here, word);
        atomic_fetch_add(&found->reached, 1);
    }
    backends_settle();
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_peers_release(peers);
    tutti_memory_release(memory);
}

TEST(one_address_reaches_the_memory_of_all_ranks) {
    if (backends_name() == NULL)
        SKIP("TEST_BACKEND names no backend of GPUs");
    backends_need(backends_name(), strcmp(backends_name(), "nccl") == 0 && backends_standin());
    finding *found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(found != MAP_FAILED);
    if (strcmp(backends_name(), "nccl") == 0 && backends_standin())
        test_threads(backends_ranks(), reach_all, found);
    else
        test_processes(backends_ranks(), reach_all, found);
    if (found->without_support > 0)
        SKIP("this GPU has no multicast (CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED is 0)");
    if (found->without_address > 0)
        SKIP("ranks share a GPU, or no switch connects theirs: their blocks have no multicast address");
    CHECK_EQ(found->reached, backends_ranks());
    _exit(0); /* the driver keeps descriptors and threads of its own */
}
