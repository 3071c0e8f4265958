/* SPDX-License-Identifier: Apache-2.0
 *
 * What the error of a wait that ran out of time says of ranks on other hosts: they are asked what they do. An answer is
 * waited for a moment only, so on a busy machine a test asks again until there is one.
 */
#include <tutti/collective.h>
#include <tutti/memory.h>

#include "on_hosts.h"

static int over[2]; /* a pipe: rank 0 writes a byte when its deadline has come */

static void check_says(const char *words) {
    if (strstr(tutti_error_message(), words) == NULL)
        fprintf(stderr, "\"%s\" is not in: %s\n", words, tutti_error_message());
    CHECK(strstr(tutti_error_message(), words) != NULL);
}

static bool says(const char *words) {
    return strstr(tutti_error_message(), words) != NULL;
}

static tutti_group *group_of_all(tutti_world *world) {
    static const int ranks[] = { 0, 1 };
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, ranks, 2, TUTTI_OPTIONS(tutti_group_options, .keep_order = true), &group));
    return group;
}

/* Whether any rank says so. */
static bool any_says(tutti_world *world, bool mine) {
    int32_t said = mine, all = 0;
    CHECK_OK(tutti_all_reduce(tutti_world_group(world), &said, &all, 1, TUTTI_I32, TUTTI_MAX, NULL));
    return all != 0;
}

/* ---- what is told ---- */

static void check_missing(int pid) {
    char words[64];
    snprintf(words, sizeof words, ", pid %d, ", pid);
    check_says("Missing: rank 1 (on host ");
    check_says(words);
    check_says("`tutti ps --hosts");
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK(info.at_fault_count == 1 && info.at_fault[0] == 1);
}

static int pid_of_rank_1(tutti_world *world) {
    int32_t pid = getpid();
    CHECK_OK(tutti_broadcast(tutti_world_group(world), &pid, &pid, 1, TUTTI_I32, 1, NULL));
    return pid;
}

static void one_computes(tutti_world *world) {
    int pid = pid_of_rank_1(world);
    bool again;
    do {
        tutti_group *group = group_of_all(world);
        CHECK_OK(tutti_barrier(group, NULL));
        CHECK(!any_says(world, false)); /* all have left the barrier */
        tutti_status status = TUTTI_OK;
        if (tutti_world_rank(world) == 0)
            status = tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .timeout_ns = 50 * TU_MILLISECOND));
        else
            while ((status = tutti_group_check(group)) == TUTTI_OK) /* rank 0 gives up, and tells */
                usleep(1000);
        CHECK_STATUS(status, TUTTI_ERROR_TIMEOUT);
        again = says("did not answer");
        if (!again) {
            check_missing(pid);
            check_says("last completed barrier 1 here, now in no call of Tutti)");
        }
        tutti_group_release(group);
        again = any_says(world, again);
    } while (again);
}

TEST(a_deadline_says_that_a_rank_on_another_host_is_in_no_call) {
    on_hosts(one_each, 2, one_computes);
}

static void one_receives(tutti_world *world) {
    tutti_group *all = tutti_world_group(world);
    int pid = pid_of_rank_1(world);
    bool again;
    do {
        tutti_group *group = group_of_all(world);
        int32_t word = 5;
        again = false;
        if (tutti_world_rank(world) == 0) {
            CHECK_STATUS(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .timeout_ns = 50 * TU_MILLISECOND)),
                         TUTTI_ERROR_TIMEOUT);
            again = !says("now in recv"); /* it may not have come there */
            if (!again) {
                check_missing(pid);
                check_says("has completed nothing in this group, now in recv ");
                check_says(" of group 0 (i32, 1 element, ");
            }
            CHECK_OK(tutti_send(all, &word, 1, TUTTI_I32, 1, 7, NULL));
        } else {
            CHECK_OK(tutti_recv(all, &word, 1, TUTTI_I32, 0, 7, NULL));
        }
        tutti_group_release(group);
        again = any_says(world, again);
    } while (again);
}

TEST(a_deadline_says_in_which_call_a_rank_on_another_host_is_instead) {
    on_hosts(one_each, 2, one_receives);
}

static void one_does_not_come(tutti_world *world) {
    int pid = pid_of_rank_1(world);
    bool again;
    do {
        tutti_group *group = group_of_all(world);
        CHECK_OK(tutti_group_set_timeout(group, 50 * TU_MILLISECOND));
        again = false;
        if (tutti_world_rank(world) == 0) {
            tutti_memory *memory;
            tutti_peers *peers;
            CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &memory));
            CHECK_STATUS(tutti_memory_rendezvous(memory, group, &peers), TUTTI_ERROR_TIMEOUT);
            check_says("rendezvous 1 of group ");
            again = says("did not answer");
            if (!again) {
                check_missing(pid);
                check_says("has completed nothing in this group, now in "); /* it may have gone on */
            }
            tutti_memory_release(memory);
        }
        tutti_group_release(group);
        again = any_says(world, again);
    } while (again);
}

TEST(the_deadline_of_a_rendezvous_says_what_a_rank_on_another_host_does_instead) {
    on_hosts(one_each, 2, one_does_not_come);
}

/* ---- when there is no answer ---- */

/* The deadline of a receive ends that call alone. */
static void receive_in_vain(tutti_group *group) {
    int32_t word;
    CHECK_STATUS(
        tutti_recv(group, &word, 1, TUTTI_I32, 1, 7, TUTTI_OPTIONS(tutti_call, .timeout_ns = 10 * TU_MILLISECOND)),
        TUTTI_ERROR_TIMEOUT);
    check_says("it waited for rank 1 (on host ");
}

static void one_is_stopped(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 0) {
        do
            receive_in_vain(group);
        while (!says("it did not answer when it was asked what it does: its process is stopped, or the network"));
        CHECK(write(over[1], "", 1) == 1);
        do /* what it says when it goes on is no answer to this question */
            receive_in_vain(group);
        while (!says("last completed barrier 1 here, now in "));
    } else {
        pid_t stopped = getpid(), helper = fork();
        if (helper == 0) {
            char byte;
            bool told = read(over[0], &byte, 1) == 1;
            kill(stopped, SIGCONT);
            _exit(told ? 0 : 1);
        }
        kill(stopped, SIGSTOP);
        int status;
        CHECK(waitpid(helper, &status, 0) == helper && status == 0);
    }
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(a_deadline_says_that_a_stopped_rank_on_another_host_did_not_answer) {
    CHECK(pipe(over) == 0);
    on_hosts(one_each, 2, one_is_stopped);
    close(over[0]);
    close(over[1]);
}

static void one_has_no_network(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    if (tutti_world_rank(world) == 0) {
        CHECK_STATUS(tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .timeout_ns = 50 * TU_MILLISECOND)),
                     TUTTI_ERROR_TIMEOUT);
        CHECK(write(over[1], "", 1) == 1);
        check_says("Missing: rank 1 (on host ");
        check_says("it is not connected to this rank yet, so it cannot be asked what it does)");
    } else {
        char byte;
        CHECK(read(over[0], &byte, 1) == 1);
    }
}

TEST(a_deadline_says_that_a_rank_on_another_host_was_never_connected_to) {
    CHECK(pipe(over) == 0);
    on_hosts(one_each, 2, one_has_no_network);
    close(over[0]);
    close(over[1]);
}

/* ---- who left ---- */

static void one_closes(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1)
        return;
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_GONE);
    check_says("closed its world");
    check_says("do all ranks make the same calls?");
}

TEST(a_rank_on_another_host_that_left_early_is_told_with_the_likely_cause) {
    on_hosts(one_each, 2, one_closes);
}
