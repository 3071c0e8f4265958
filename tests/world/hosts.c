/* SPDX-License-Identifier: Apache-2.0
 *
 * Worlds across hosts. Here a second host is a second network namespace: its ranks share neither sockets nor a job with
 * the others, and meet them in a file.
 */
#include <sched.h>
#include <sys/wait.h>
#include <tutti/mesh.h>
#include <unistd.h>

#include "../harness.h"
#include "base/clock.h"
#include "world/world.h"

static char url[96];

static void second_host(void) {
    if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
        SKIP("a second network namespace cannot be made here");
}

static void run_rank(int rank, void (*body)(tutti_world *)) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .rank = rank, .rank_count = 4, .store_url = url,
                                            .timeout_ns = 60 * TU_SECOND),
                              &world));
    body(world);
    CHECK_OK(tutti_world_close(world));
    exit(0);
}

/* Ranks 0 and 1 on this host, 2 and 3 on the other. */
static void on_two_hosts(void (*body)(tutti_world *)) {
    snprintf(url, sizeof url, "file:///tmp/tutti-test-hosts-%d", (int)getpid());
    fflush(NULL);
    pid_t hosts[2];
    for (int host = 0; host < 2; host++) {
        hosts[host] = fork();
        if (hosts[host] != 0)
            continue;
        if (host == 1)
            second_host();
        pid_t ranks[2];
        for (int i = 0; i < 2; i++) {
            ranks[i] = fork();
            if (ranks[i] == 0)
                run_rank(2 * host + i, body);
        }
        int worst = 0;
        for (int i = 0; i < 2; i++) {
            int status;
            CHECK(waitpid(ranks[i], &status, 0) == ranks[i]);
            worst = status != 0 ? 1 : worst;
        }
        exit(worst);
    }
    int statuses[2];
    for (int host = 1; host >= 0; host--) {
        CHECK(waitpid(hosts[host], &statuses[host], 0) == hosts[host]);
        if (WIFEXITED(statuses[host]) && WEXITSTATUS(statuses[host]) == 77) {
            kill(hosts[0], SIGKILL);
            waitpid(hosts[0], NULL, 0);
            unlink(url + 7);
            SKIP("a second network namespace cannot be made here");
        }
    }
    unlink(url + 7);
    CHECK_EQ(statuses[0], 0);
    CHECK_EQ(statuses[1], 0);
}

static void look_around(tutti_world *world) {
    CHECK_EQ(tutti_world_size(world), 4);
    CHECK_EQ(tutti_world_local_size(world), 2);
    CHECK_EQ(tutti_world_local_rank(world), tutti_world_rank(world) % 2);
    CHECK(!tutti_world_group(world)->local);
    CHECK_EQ(world->nodes, 2);
    CHECK_EQ(world->node, tutti_world_rank(world) / 2);
    for (int rank = 0; rank < 4; rank++)
        CHECK_EQ(world->node_of[rank], rank / 2);
}

TEST(ranks_of_two_hosts_find_each_other) {
    on_two_hosts(look_around);
}

static void exchange_numbers(tutti_group *group) {
    tu_operation_info info = { .operation = TU_OPERATION_CONNECTIVITY, .root = -1 };
    int64_t deadline;
    uint64_t ticket;
    int numbers[4], mine = 10 + group->world->rank;
    CHECK_OK(tu_group_enter(group, 0, &info, &deadline, &ticket));
    CHECK_OK(tu_group_exchange(group, &info, "numbers", &mine, sizeof mine, NULL, deadline, numbers, NULL));
    CHECK_OK(tu_group_leave(group, &info, ticket, TUTTI_OK));
    for (int i = 0; i < group->size; i++)
        CHECK_EQ(numbers[i], 10 + group->ranks[i]);
}

static void make_groups(tutti_world *world) {
    int rank = tutti_world_rank(world);
    tutti_group *local, *across, *members;
    CHECK_OK(tutti_group_new_subgroups(tutti_world_group(world), 2, NULL, NULL, &local));
    CHECK(local->local && local->page_mapping != NULL);
    int column[] = { rank % 2, rank % 2 + 2 }, other[] = { 1 - rank % 2, 3 - rank % 2 };
    tutti_group *none;
    CHECK_OK(tutti_group_new(world, rank % 2 == 0 ? column : other, 2, NULL, rank % 2 == 0 ? &across : &none));
    CHECK_OK(tutti_group_new(world, rank % 2 == 0 ? other : column, 2, NULL, rank % 2 == 0 ? &none : &across));
    CHECK(!across->local);
    CHECK_OK(
        tutti_group_new(world, column, 2, TUTTI_OPTIONS(tutti_group_options, .local_synchronization = true), &members));
    static const int first[] = { 0, 3 }, second[] = { 1, 2 };
    tutti_group *part;
    CHECK_OK(
        tutti_group_split(tutti_world_group(world), (const int *[]){ first, second }, (int[]){ 2, 2 }, 2, NULL, &part));
    for (int i = 0; i < 5; i++) {
        exchange_numbers(local);
        exchange_numbers(across);
        exchange_numbers(members);
        exchange_numbers(part);
        exchange_numbers(tutti_world_group(world));
    }
    /* Shared memory cannot be had there, and the error says why. */
    tu_operation_info info = { .operation = TU_OPERATION_RENDEZVOUS, .root = -1 };
    tu_mapping *mappings[2];
    char byte = 0, bytes[2];
    CHECK_STATUS(tu_group_exchange(across, &info, "memory", &byte, 1, NULL, tu_deadline(TU_SECOND), bytes, mappings),
                 TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("one host");
    tutti_group_release(local);
    tutti_group_release(across);
    tutti_group_release(members);
    tutti_group_release(part);
}

TEST(groups_are_made_on_hosts_and_across_them) {
    on_two_hosts(make_groups);
}

static void disagree(tutti_world *world) {
    int ranks[] = { 0, tutti_world_rank(world) == 3 ? 3 : 2 };
    tutti_group *group;
    CHECK_STATUS(tutti_group_new(world, ranks, 2, NULL, &group), TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("[0, 2]");
    CHECK_MESSAGE("[0, 3]");
}

TEST(a_disagreement_across_hosts_fails_on_every_rank) {
    on_two_hosts(disagree);
}

static void abort_across(tutti_world *world) {
    if (tutti_world_rank(world) == 3) {
        usleep(100000);
        CHECK_OK(tutti_group_abort(tutti_world_group(world), "enough"));
        CHECK_OK(tutti_store_barrier(tutti_world_store(world), "end", 4, 0));
        return;
    }
    tutti_group *group;
    CHECK_STATUS(tutti_group_new(world, NULL, 0, NULL, &group), TUTTI_ERROR_ABORTED);
    CHECK_MESSAGE("enough");
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "end", 4, 0));
}

TEST(an_abort_is_heard_on_the_other_host) {
    on_two_hosts(abort_across);
}

static void one_is_missing(tutti_world *world) {
    tutti_group *group;
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "begin", 4, 0));
    if (tutti_world_rank(world) != 2) {
        CHECK_STATUS(
            tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .timeout_ns = test_moment()), &group),
            TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("Missing: rank 2 (");
    }
    /* The missing one waits here while the others wait for it: for longer than they do, however busy the machine is. */
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "end", 4, 60 * test_moment()));
}

TEST(a_rank_that_is_missing_on_another_host_is_named) {
    on_two_hosts(one_is_missing);
}

/* The part of a group that is on one host is nothing that a user could release. */
static void close_with_a_group(tutti_world *world) {
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &group));
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "end", 4, 0));
    CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("alive: 1 group;");
    tutti_group_release(group);
    exit(0);
}

TEST(a_world_that_is_closed_too_soon_counts_the_groups_of_its_user) {
    on_two_hosts(close_with_a_group);
}
