/* SPDX-License-Identifier: Apache-2.0
 *
 * A collective on one rank while another makes a group or a rendezvous: the calls differ, and every rank that waits
 * learns that, before its deadline.
 */
#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "../harness.h"

typedef struct pair {
    int collective, other, odd, root;
} pair;

static tutti_status collective(tutti_group *group, int which, int root, const tutti_call *call) {
    int in[8] = { 0 }, out[8];
    switch (which) {
    case 0:
        return tutti_broadcast(group, in, out, 1, TUTTI_I32, root, call);
    case 1:
        return tutti_reduce(group, in, out, 1, TUTTI_I32, TUTTI_SUM, root, call);
    case 2:
        return tutti_gather(group, in, out, 1, TUTTI_I32, root, call);
    case 3:
        return tutti_scatter(group, in, out, 1, TUTTI_I32, root, call);
    default:
        return tutti_all_reduce(group, in, out, 1, TUTTI_I32, TUTTI_SUM, call);
    }
}

static tutti_status other(tutti_world *world, tutti_group *group, int which) {
    int everybody[] = { 0, 1, 2 }, size = tutti_group_size(group);
    tutti_group *made = NULL;
    tutti_memory *memory;
    tutti_peers *peers = NULL;
    tutti_status status;
    switch (which) {
    case 0:
        status = tutti_group_split(group, (const int *const[]){ everybody }, (const int[]){ size }, 1, NULL, &made);
        tutti_group_release(made);
        return status;
    default:
        CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
        status = tutti_memory_rendezvous(memory, group, &peers);
        tutti_peers_release(peers);
        tutti_memory_release(memory);
        return status;
    }
}

/* Calls until one fails: a rank that has left a rooted collective early fails at its next call. */
static void call_apart(tutti_world *world, void *argument) {
    const pair *apart = argument;
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_status status = TUTTI_OK;
    if (tutti_world_rank(world) == apart->odd)
        status = other(world, group, apart->other);
    else
        for (int i = 0; i < 3 && status == TUTTI_OK; i++)
            status = collective(group, apart->collective, apart->root, NULL);
    if (status != TUTTI_ERROR_MISMATCH)
        FAIL("rank %d got %s (%s) when rank %d called %d against collective %d with root %d", tutti_world_rank(world),
             tutti_status_name(status), tutti_error_message(), apart->odd, apart->other, apart->collective,
             apart->root);
}

static void all_pairs(int ranks) {
    setenv("TUTTI_TIMEOUT", test_sanitized() ? "40" : "20", 1);
    for (int which = 0; which < 5; which++)
        for (int against = 0; against < 2; against++)
            for (int odd = 0; odd < ranks; odd++)
                for (int root = 0; root < (which < 4 ? ranks : 1); root++) {
                    pair apart = { which, against, odd, root };
                    test_threads(ranks, call_apart, &apart);
                }
}

TEST(a_collective_against_a_split_or_a_rendezvous_is_a_mismatch_with_2_ranks) {
    all_pairs(2);
}
TEST_LIMIT(a_collective_against_a_split_or_a_rendezvous_is_a_mismatch_with_3_ranks, 120) {
    all_pairs(3);
}
