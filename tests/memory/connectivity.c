/* SPDX-License-Identifier: Apache-2.0
 *
 * Connectivity, on machines we do not have: hwloc shows them from a description (HWLOC_SYNTHETIC).
 */
#include <sched.h>
#include <tutti/connectivity.h>
#include <unistd.h>

#include "../harness.h"

static tutti_connectivity *machine(const char *synthetic, tutti_place place) {
    setenv("HWLOC_SYNTHETIC", synthetic, 1);
    tutti_connectivity *made = NULL;
    tutti_status status = tutti_connectivity_machine(place, &made);
    if (status == TUTTI_ERROR_UNSUPPORTED)
        SKIP("%s", tutti_error_message());
    CHECK_EQ(status, TUTTI_OK);
    return made;
}

TEST(this_machine_has_a_symmetric_matrix_with_itself_on_the_diagonal) { /* spec: …connectivity_detection */
    for (int place = TUTTI_PLACE_PROCESSOR; place <= TUTTI_PLACE_NODE; place++) {
        tutti_connectivity *made;
        tutti_status status = tutti_connectivity_machine((tutti_place)place, &made);
        if (status == TUTTI_ERROR_UNSUPPORTED)
            SKIP("%s", tutti_error_message());
        CHECK_EQ(status, TUTTI_OK);
        int size = tutti_connectivity_size(made);
        CHECK(size > 0);
        for (int a = 0; a < size; a++) {
            CHECK(strstr(tutti_connectivity_place(made, a), place == TUTTI_PLACE_NODE ? "node " : "processor ") !=
                  NULL);
            for (int b = 0; b < size; b++) {
                CHECK_EQ(tutti_connectivity_link(made, a, b), tutti_connectivity_link(made, b, a));
                CHECK((tutti_connectivity_link(made, a, b) == TUTTI_LINK_SELF) == (a == b));
            }
        }
        CHECK_EQ(tutti_connectivity_link(made, -1, 0), 0);
        CHECK_EQ(tutti_connectivity_link(made, 0, size), 0);
        CHECK_TEXT(tutti_connectivity_place(made, size), "");
        tutti_connectivity_release(made);
    }
    tutti_connectivity_release(NULL);
}

TEST(two_sockets_with_two_caches_each_and_hyper_threads) {
    tutti_connectivity *made = machine("package:2 numanode:1 l3:2 core:2 pu:2", TUTTI_PLACE_PROCESSOR);
    CHECK_EQ(tutti_connectivity_size(made), 16);
    CHECK_EQ(tutti_connectivity_link(made, 0, 1), TUTTI_LINK_CORE);
    CHECK_EQ(tutti_connectivity_link(made, 0, 2), TUTTI_LINK_CACHE);
    CHECK_EQ(tutti_connectivity_link(made, 0, 3), TUTTI_LINK_CACHE);
    CHECK_EQ(tutti_connectivity_link(made, 0, 4), TUTTI_LINK_NODE);
    CHECK_EQ(tutti_connectivity_link(made, 7, 0), TUTTI_LINK_NODE);
    CHECK_EQ(tutti_connectivity_link(made, 0, 8), TUTTI_LINK_MACHINE);
    CHECK_EQ(tutti_connectivity_link(made, 15, 15), TUTTI_LINK_SELF);
    tutti_connectivity_release(made);
}

TEST(one_socket_with_four_numa_nodes) {
    tutti_connectivity *made = machine("package:1 group:4 numanode:1 l3:1 core:2 pu:1", TUTTI_PLACE_PROCESSOR);
    CHECK_EQ(tutti_connectivity_link(made, 0, 1), TUTTI_LINK_CACHE);
    CHECK_EQ(tutti_connectivity_link(made, 0, 2), TUTTI_LINK_PACKAGE);
    tutti_connectivity_release(made);
    made = machine("package:1 group:4 numanode:1 l3:1 core:2 pu:1", TUTTI_PLACE_NODE);
    CHECK_EQ(tutti_connectivity_size(made), 4);
    CHECK_EQ(tutti_connectivity_link(made, 0, 3), TUTTI_LINK_PACKAGE);
    CHECK(strstr(tutti_connectivity_place(made, 1), "node 1 (processors 2-3") != NULL);
    tutti_connectivity_release(made);
}

TEST(a_machine_of_one_processor) {
    tutti_connectivity *made = machine("core:1 pu:1", TUTTI_PLACE_PROCESSOR);
    CHECK_EQ(tutti_connectivity_size(made), 1);
    CHECK_EQ(tutti_connectivity_link(made, 0, 0), TUTTI_LINK_SELF);
    tutti_connectivity_release(made);
}

TEST(links_have_names_and_wrong_arguments_are_refused) {
    tutti_connectivity *made;
    CHECK_TEXT(tutti_link_name(TUTTI_LINK_CACHE), "cache");
    CHECK_TEXT(tutti_link_name(TUTTI_LINK_NETWORK), "network");
    CHECK_TEXT(tutti_link_name((tutti_link)99), "?");
    if (tutti_connectivity_machine(TUTTI_PLACE_NODE, &made) == TUTTI_ERROR_UNSUPPORTED)
        SKIP("%s", tutti_error_message());
    tutti_connectivity_release(made);
    CHECK_STATUS(tutti_connectivity_machine((tutti_place)9, &made), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_connectivity_machine(TUTTI_PLACE_NODE, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_connectivity_ranks(NULL, &made), TUTTI_ERROR_ARGUMENT);
}

/* Ranks are bound to the first two processors of this machine, which the description places elsewhere. */
static void bound_ranks(tutti_world *world, void *synthetic) {
    (void)synthetic;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(tutti_world_rank(world) % 2, &set);
    CHECK_EQ(sched_setaffinity(0, sizeof set, &set), 0);
    tutti_connectivity *made;
    CHECK_OK(tutti_connectivity_ranks(tutti_world_group(world), &made));
    CHECK_EQ(tutti_connectivity_size(made), 3);
    CHECK_EQ(tutti_connectivity_link(made, 1, 1), TUTTI_LINK_SELF);
    CHECK_EQ(tutti_connectivity_link(made, 0, 1), TUTTI_LINK_MACHINE);
    CHECK_EQ(tutti_connectivity_link(made, 0, 2), TUTTI_LINK_CORE); /* the same core */
    CHECK(strstr(tutti_connectivity_place(made, 1), "rank 1 on ") != NULL);
    CHECK(strstr(tutti_connectivity_place(made, 1), "processors 1 (node 1)") != NULL);
    tutti_connectivity_release(made);
}

TEST(ranks_are_placed_by_their_processors) {
    if (sysconf(_SC_NPROCESSORS_ONLN) < 2)
        SKIP("needs two processors");
    tutti_connectivity_release(machine("package:2 numanode:1 core:1 pu:1", TUTTI_PLACE_NODE));
    test_threads(3, bound_ranks, NULL);
    test_processes(3, bound_ranks, NULL);
}
