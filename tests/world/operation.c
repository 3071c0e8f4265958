/* SPDX-License-Identifier: Apache-2.0
 *
 * The protocol of operations: numbers, deadlines, deaths, departures, mismatches, aborts, faults, and what the messages
 * say.
 *
 * The operation under test is the smallest there is: each member counts itself in memory of its own that the others
 * map, and waits for them.
 */
#include <pthread.h>
#include <signal.h>
#include <tutti/fault.h>
#include <tutti/group.h>
#include <unistd.h>

#include "../harness.h"
#include "base/clock.h"
#include "base/error.h"
#include "world/world.h"

#define MOST 8

typedef struct hall {
    tutti_group *group;
    tu_piece own;
    tu_mapping *mappings[MOST];
    uint64_t rounds[TU_OPERATION_COUNT]; /* each operation counts for itself, so that one is not taken for another */
} hall;

typedef struct counted {
    const hall *hall;
    tu_operation operation;
    uint64_t round;
} counted;

static const _Atomic uint64_t *counter(const hall *hall, int member, tu_operation operation) {
    return (const _Atomic uint64_t *)hall->mappings[member]->address + operation;
}

static bool not_there(void *argument, int member) {
    const counted *counted = argument;
    return atomic_load_explicit(counter(counted->hall, member, counted->operation), memory_order_acquire) <
           counted->round;
}

static bool all_there(void *argument) {
    const counted *counted = argument;
    for (int member = 0; member < counted->hall->group->size; member++)
        if (not_there(argument, member))
            return false;
    return true;
}

static hall *enter_hall(tutti_group *group) {
    hall *hall = calloc(1, sizeof *hall);
    CHECK(hall != NULL);
    hall->group = group;
    CHECK_OK(tu_piece_alloc(group->world->job, "a counter", TU_OPERATION_COUNT * 8, 64, 0, &hall->own));
    tu_operation_info info = { .operation = TU_OPERATION_RENDEZVOUS, .root = -1 };
    int64_t deadline;
    uint64_t ticket;
    char nothing = 0, nothings[MOST];
    CHECK_OK(tu_group_enter(group, 0, &info, &deadline, &ticket));
    CHECK_OK(tu_group_exchange(group, &info, "hall", &nothing, 1, &hall->own, deadline, nothings, hall->mappings));
    CHECK_OK(tu_group_leave(group, &info, ticket, TUTTI_OK));
    return hall;
}

static void leave_hall(hall *hall) {
    for (int i = 0; i < hall->group->size; i++)
        tu_mapping_release(hall->mappings[i]);
    tu_piece_free(hall->group->world->job, &hall->own);
    free(hall);
}

/* One operation: all members meet. */
static tutti_status meet(hall *hall, tu_operation operation, int64_t timeout_ns) {
    tutti_group *group = hall->group;
    tu_operation_info info = {
        .operation = operation, .root = -1, .count = 4096, .dtype = TUTTI_F32, .reduction = TUTTI_SUM
    };
    int64_t deadline;
    uint64_t ticket;
    tutti_status status = tu_group_enter(group, timeout_ns, &info, &deadline, &ticket);
    if (status != TUTTI_OK)
        return tu_not_entered(status);
    counted counted = { hall, operation, ++hall->rounds[operation] };
    atomic_store_explicit((_Atomic uint64_t *)hall->own.address + operation, counted.round, memory_order_release);
    for (int member = 0; member < group->size; member++)
        tu_job_ring(group->world->job, group->job_ranks[member]);
    tu_group_wait wait;
    tu_group_wait_init(&wait, group, &info, ticket, deadline, not_there, &counted);
    status = tu_wait_until(&wait.wait, all_there, &counted);
    if (status != TUTTI_OK)
        status = tu_group_wait_error(&wait, status);
    return tu_group_leave(group, &info, ticket, status);
}

static tutti_error_info detail(void) {
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    return info;
}

/* Waits outside of the group, so that nobody closes while others still look; for longer than these wait inside. */
static void curtain(tutti_world *world, const char *key, int count) {
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), key, count, 60 * test_moment()));
}

TEST_WORLD(operations_are_numbered_from_1_in_each_group, 3) {
    hall *hall = enter_hall(tutti_world_group(world));
    for (int i = 0; i < 100; i++)
        CHECK_OK(meet(hall, TU_OPERATION_ALL_REDUCE, 0));
    CHECK_EQ(tutti_group_sequence(tutti_world_group(world)), 101);
    CHECK_EQ(tutti_group_completed(tutti_world_group(world)), 101);
    leave_hall(hall);
}

TEST_WORLD(a_deadline_names_the_missing_rank_and_what_it_does_and_ends_the_group_for_all, 3) {
    hall *hall = enter_hall(tutti_world_group(world));
    CHECK_OK(meet(hall, TU_OPERATION_ALL_REDUCE, 0));
    if (tutti_world_rank(world) != 2) {
        CHECK_STATUS(meet(hall, TU_OPERATION_ALL_REDUCE, test_moment()), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("timeout");
        CHECK_MESSAGE("all_reduce 3 of group 0");
        CHECK_MESSAGE("rank 2 (");
        CHECK_MESSAGE("last completed all_reduce 2");
        CHECK_MESSAGE("now in no call of Tutti");
        CHECK_MESSAGE("a longer timeout of the call or group, or else TUTTI_TIMEOUT, gives them more time");
        tutti_error_info info = detail();
        CHECK_EQ(info.sequence, 3);
        CHECK_TEXT(info.operation, "all_reduce");
        CHECK_TEXT(info.group, "0");
        CHECK_EQ(info.at_fault_count, 1);
        CHECK_EQ(info.at_fault[0], 2);
        CHECK_EQ(info.rank, tutti_world_rank(world));
    }
    curtain(world, "after", 3);
    /* The late rank learns the first cause at once, and so does everybody from now on. */
    CHECK_STATUS(meet(hall, TU_OPERATION_ALL_REDUCE, 0), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("group 0 has ended");
    CHECK_STATUS(tutti_group_check(tutti_world_group(world)), TUTTI_ERROR_TIMEOUT);
    CHECK_EQ(detail().at_fault[0], 2);
    /* Other groups live. */
    int both[] = { 0, 1 };
    tutti_group *group;
    CHECK_OK(
        tutti_group_new(world, both, 2, TUTTI_OPTIONS(tutti_group_options, .local_synchronization = true), &group));
    tutti_group_release(group);
    curtain(world, "end", 3);
    leave_hall(hall);
}

TEST_WORLD(another_operation_under_the_same_number_is_a_mismatch_on_every_rank_and_shows_both, 3) {
    hall *hall = enter_hall(tutti_world_group(world));
    bool odd = tutti_world_rank(world) == 1;
    CHECK_STATUS(meet(hall, odd ? TU_OPERATION_BROADCAST : TU_OPERATION_ALL_REDUCE, 60 * TU_SECOND),
                 TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("broadcast 2 of group 0");
    CHECK_MESSAGE("all_reduce 2 of group 0");
    CHECK_MESSAGE("same order");
    curtain(world, "end", 3);
    leave_hall(hall);
}

TEST_WORLD(a_rank_that_closed_is_told_from_one_that_died, 3) {
    hall *hall = enter_hall(tutti_world_group(world));
    if (tutti_world_rank(world) == 1) {
        leave_hall(hall);
        CHECK_OK(tutti_world_close(world));
        return;
    }
    CHECK_STATUS(meet(hall, TU_OPERATION_BARRIER, 60 * TU_SECOND), TUTTI_ERROR_GONE);
    CHECK_MESSAGE("rank 1");
    CHECK_MESSAGE("closed its world");
    CHECK_EQ(detail().at_fault[0], 1);
    /* At once, too, for a rank that comes later. */
    CHECK_STATUS(meet(hall, TU_OPERATION_BARRIER, 60 * TU_SECOND), TUTTI_ERROR_GONE);
    leave_hall(hall);
}

static tutti_status die_in_the_middle(tutti_world *world, void *argument) {
    hall *hall = enter_hall(tutti_world_group(world));
    int how = *(int *)argument;
    if (tutti_world_rank(world) == 2) {
        if (how == 0)
            raise(SIGKILL);
        else if (how == 1)
            _exit(7);
        else if (how == 2)
            execlp("sleep", "sleep", "3", (char *)NULL); /* lives on while the others look */
        abort();
    }
    tutti_status status = meet(hall, TU_OPERATION_ALL_REDUCE, 60 * TU_SECOND);
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 2");
    CHECK_MESSAGE("all_reduce 2 of group 0");
    tutti_error_info info = detail();
    CHECK_EQ(info.at_fault_count, 1);
    CHECK_EQ(info.at_fault[0], 2);
    if (how == 2)
        CHECK_MESSAGE("exec");
    leave_hall(hall);
    return TUTTI_OK;
}

static void death(int how, const char *fragment) {
    tutti_status status = tutti_spawn(TUTTI_SPAWN_PROCESSES, 4, die_in_the_middle, &how);
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 2 (pid ");
    CHECK_MESSAGE(fragment);
}

TEST(a_killed_rank_is_seen_by_all_long_before_the_deadline) {
    death(0, "killed by signal 9");
}

TEST(a_rank_that_exits_is_seen_with_its_status) {
    death(1, "exited with status 7");
}

TEST(a_rank_that_calls_exec_is_seen) {
    death(2, "exited with status 0 before its main returned");
}

TEST_WORLD(abort_ends_every_wait_with_the_reason_and_its_origin, 3) {
    hall *hall = enter_hall(tutti_world_group(world));
    if (tutti_world_rank(world) == 2) {
        usleep(30000);
        CHECK_OK(tutti_group_abort(tutti_world_group(world), "the loss is NaN"));
        CHECK_OK(tutti_group_abort(tutti_world_group(world), "once more"));
    } else {
        CHECK_STATUS(meet(hall, TU_OPERATION_ALL_REDUCE, 60 * TU_SECOND), TUTTI_ERROR_ABORTED);
        CHECK_MESSAGE("rank 2 aborted group 0: the loss is NaN");
    }
    CHECK_STATUS(meet(hall, TU_OPERATION_ALL_REDUCE, 0), TUTTI_ERROR_ABORTED);
    CHECK_MESSAGE("the loss is NaN");
    CHECK_EQ(detail().at_fault[0], 2);
    tutti_group *late;
    CHECK_STATUS(tutti_group_new(world, NULL, 0, NULL, &late), TUTTI_ERROR_ABORTED); /* needs the default group */
    CHECK_STATUS(tutti_group_abort(NULL, "x"), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_group_abort(TUTTI_NON_GROUP_MEMBER, "x"), TUTTI_ERROR_ARGUMENT);
    curtain(world, "end", 3);
    leave_hall(hall);
}

TEST_WORLD(only_the_first_of_two_causes_counts, 4) {
    char reason[32];
    snprintf(reason, sizeof reason, "reason of rank %d", tutti_world_rank(world));
    CHECK_OK(tutti_group_abort(tutti_world_group(world), reason));
    curtain(world, "aborted", 4);
    CHECK_STATUS(tutti_group_check(tutti_world_group(world)), TUTTI_ERROR_ABORTED);
    char key[16];
    snprintf(key, sizeof key, "%d", tutti_world_rank(world));
    const char *text = strstr(tutti_error_message(), "reason of rank ");
    CHECK(text != NULL);
    CHECK_OK(tutti_store_set(tutti_world_store(world), key, text, strlen(text)));
    void *first;
    size_t bytes;
    CHECK_OK(tutti_store_get(tutti_world_store(world), "0", 0, &first, &bytes));
    CHECK_TEXT(text, first);
    tutti_free(first);
    curtain(world, "end", 4);
}

static void *interrupt_soon(void *argument) {
    usleep(50000);
    tutti_world_interrupt(argument);
    return NULL;
}

TEST_WORLD(interrupt_ends_a_wait_and_not_the_group, 2) {
    hall *hall = enter_hall(tutti_world_group(world));
    if (tutti_world_rank(world) == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, interrupt_soon, world) == 0);
        CHECK_STATUS(meet(hall, TU_OPERATION_RECV, 60 * TU_SECOND), TUTTI_ERROR_INTERRUPTED);
        CHECK_MESSAGE("tutti_world_interrupt");
        pthread_join(thread, NULL);
        tutti_world_resume(world);
        CHECK_OK(tutti_group_check(tutti_world_group(world)));
    }
    curtain(world, "end", 2);
    leave_hall(hall);
}

TEST_WORLD(a_receive_that_runs_out_of_time_ends_only_that_wait, 2) {
    hall *hall = enter_hall(tutti_world_group(world));
    if (tutti_world_rank(world) == 0)
        CHECK_STATUS(meet(hall, TU_OPERATION_RECV, 20 * TU_MILLISECOND), TUTTI_ERROR_TIMEOUT);
    curtain(world, "tried", 2);
    CHECK_OK(tutti_group_check(tutti_world_group(world)));
    CHECK_EQ(tutti_group_sequence(tutti_world_group(world)), 1); /* and took no number of the collectives */
    CHECK_OK(meet(hall, TU_OPERATION_ALL_REDUCE, 0));
    leave_hall(hall);
}

TEST_WORLD_THREADS(wrong_arguments_end_nothing, 2) {
    tutti_group *group = tutti_world_group(world);
    tu_operation_info info = { .operation = TU_OPERATION_BARRIER };
    int64_t deadline;
    uint64_t ticket;
    CHECK_STATUS(tu_group_enter(NULL, 0, &info, &deadline, &ticket), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tu_group_enter(TUTTI_NON_GROUP_MEMBER, 0, &info, &deadline, &ticket), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tu_group_enter(group, -1, &info, &deadline, &ticket), TUTTI_ERROR_ARGUMENT);
    CHECK_EQ(tutti_group_sequence(group), 0);
    CHECK(tu_group_absent(TUTTI_NON_GROUP_MEMBER, "barrier") && !tu_group_absent(group, "barrier"));
    CHECK_OK(tutti_group_check(group));
}

/* ---- a stopped rank ---- */

static tutti_status stop_in_the_middle(tutti_world *world, void *unused) {
    (void)unused;
    hall *hall = enter_hall(tutti_world_group(world));
    char key[8], text[16];
    snprintf(key, sizeof key, "%d", tutti_world_rank(world));
    snprintf(text, sizeof text, "%d", (int)getpid());
    CHECK_OK(tutti_store_set(tutti_world_store(world), key, text, strlen(text)));
    curtain(world, "pids", 2);
    if (tutti_world_rank(world) == 1) {
        raise(SIGSTOP);
        leave_hall(hall);
        return TUTTI_OK;
    }
    void *pid;
    size_t bytes;
    CHECK_OK(tutti_store_get(tutti_world_store(world), "1", 0, &pid, &bytes));
    test_await_stopped(atoi(pid));
    CHECK_STATUS(meet(hall, TU_OPERATION_ALL_REDUCE, 200 * TU_MILLISECOND), TUTTI_ERROR_TIMEOUT);
    CHECK_MESSAGE("stopped");
    kill(atoi(pid), SIGCONT);
    tutti_free(pid);
    leave_hall(hall);
    return TUTTI_OK;
}

TEST(a_stopped_rank_is_reported_as_stopped_at_the_deadline) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, stop_in_the_middle, NULL));
}

/* ---- faults ---- */

static tutti_status five_rounds(tutti_world *world, void *argument) {
    if (argument != NULL)
        CHECK_OK(tutti_fault_inject(world, argument));
    hall *hall = enter_hall(tutti_world_group(world));
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 5 && status == TUTTI_OK; i++)
        status = meet(hall, TU_OPERATION_ALL_REDUCE, 60 * TU_SECOND);
    leave_hall(hall);
    return status;
}

TEST(an_injected_kill_comes_at_the_call_that_was_asked_for) {
    setenv("TUTTI_FAULT", "rank=2,op=all_reduce,at=3,do=kill", 1);
    CHECK_EQ(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, five_rounds, NULL), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 2 (pid");
    CHECK_MESSAGE("killed by signal 9");
}

TEST(an_injected_exit_keeps_its_status) {
    setenv("TUTTI_FAULT", "rank=1,op=all_reduce,at=0,do=exit:5", 1);
    CHECK_EQ(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, five_rounds, NULL), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("exited with status 5");
}

TEST(an_injected_failure_fails_all_ranks) {
    CHECK_EQ(tutti_spawn(TUTTI_SPAWN_THREADS, 3, five_rounds, "rank=1,op=all_reduce,at=2,do=fail"), TUTTI_ERROR_FAULT);
    CHECK_MESSAGE("all_reduce 4 of group 0");
}

TEST(a_skipped_call_is_seen_by_the_others) {
    CHECK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, five_rounds, "rank=1,op=all_reduce,at=4,do=skip") != TUTTI_OK);
    CHECK_MESSAGE("rank 1");
}

TEST(a_delay_delays_and_nothing_else) {
    int64_t before = tu_clock_now();
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, five_rounds, "op=all_reduce,at=1,do=delay:60ms"));
    CHECK(tu_clock_now() - before >= 60 * TU_MILLISECOND);
}

TEST(faults_that_are_not_understood_are_refused) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    static const struct {
        const char *spec, *fragment;
    } bad[] = { { "rank=0", "does not say what to do" }, { "do=explode", "do=explode is unknown" },
                { "do=delay", "needs a time" },          { "do=delay:soon", "no duration" },
                { "op=none,do=kill", "no operation" },   { "when=1,do=kill", "\"when\" is unknown" },
                { "rank=1,do=kill", "1 ranks" },         { "at=-1,do=fail", "negative" },
                { "nonsense", "not understood" },        { "do=kill:9", "after the colon" } };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_STATUS(tutti_fault_inject(world, bad[i].spec), TUTTI_ERROR_ARGUMENT);
        CHECK_MESSAGE(bad[i].fragment);
    }
    CHECK_STATUS(tutti_fault_inject(world, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_fault_inject(world, "op=barrier,at=7,do=skip;op=barrier,at=8,do=fail"));
    CHECK_OK(tutti_world_close(world));
}

/* ---- attachments ---- */

static int made, ended;
static const void *last_ended;
static tutti_status attach(void *owner, void **state) {
    *state = owner;
    made++;
    return TUTTI_OK;
}
static tutti_status attach_count(void *owner, void **state) {
    (void)owner;
    *state = &made;
    made++;
    return TUTTI_OK;
}
static tutti_status refuse(void *owner, void **state) {
    (void)owner;
    (void)state;
    return tu_error(TUTTI_ERROR_STATE, "nothing is attached today");
}
static void detach(void *state) {
    last_ended = state;
    ended++;
}

TEST(an_attachment_is_made_once_and_ended_with_its_owner_the_last_one_first) {
    static const tu_attachment one = { .make = attach, .end = detach };
    static const tu_attachment other = { .make = attach_count, .end = detach };
    static const tu_attachment never = { .make = refuse, .end = detach };
    tutti_world *world;
    void *state;
    CHECK_OK(tutti_world_open(NULL, &world));
    tutti_group *group = tutti_world_group(world);
    CHECK(tu_attachment_find(&group->attachments, &one) == NULL);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(tu_attachment_get(&group->attachments, &one, &state));
        CHECK(state == group);
        CHECK_OK(tu_attachment_get(&world->attachments, &one, &state));
        CHECK(state == world);
        CHECK_OK(tu_attachment_get(&world->attachments, &other, &state));
        CHECK(state == &made);
        CHECK_STATUS(tu_attachment_get(&world->attachments, &never, &state), TUTTI_ERROR_STATE);
    }
    CHECK_EQ(made, 3);
    CHECK_OK(tutti_world_close(world));
    CHECK_EQ(ended, 3);
    CHECK(last_ended == world);
}
