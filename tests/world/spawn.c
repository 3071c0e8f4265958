/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <tutti/collective.h>
#include <tutti/group.h>
#include <unistd.h>

#include "../harness.h"
#include "base/clock.h"
#include "base/error.h"

static const tutti_spawn_kind kinds[] = { TUTTI_SPAWN_THREADS, TUTTI_SPAWN_PROCESSES };

static tutti_status succeed(tutti_world *world, void *argument) {
    (void)argument;
    return tutti_world_rank(world) % 2 == 0 ? tutti_world_close(world)
                                            : TUTTI_OK; /* closed by itself, or by tutti_spawn */
}

TEST(ranks_may_close_their_world_or_leave_it_to_spawn) {
    for (int kind = 0; kind < 2; kind++) {
        CHECK_OK(tutti_spawn(kinds[kind], 1, succeed, NULL));
        CHECK_OK(tutti_spawn(kinds[kind], 5, succeed, NULL));
    }
}

TEST(bad_arguments_are_refused) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_THREADS, 0, succeed, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_THREADS, -1, succeed, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_THREADS, 1, NULL, NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tutti_spawn((tutti_spawn_kind)7, 1, succeed, NULL), TUTTI_ERROR_ARGUMENT);
}

/* Rank 1 fails; the others wait for it in an agreement. */
static tutti_status one_fails(tutti_world *world, void *argument) {
    if (tutti_world_rank(world) == 1)
        return argument != NULL ? tu_error(TUTTI_ERROR_BACKEND, "the disk is full of %s", (char *)argument)
                                : TUTTI_ERROR_EMPTY;
    tutti_group *group;
    tutti_status status =
        tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .timeout_ns = 60 * TU_SECOND), &group);
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 1 failed: ");
    if (argument != NULL && strlen(argument) > 200) /* the others hear the beginning, and that there is more */
        CHECK_MESSAGE("the disk is full of …, ");   /* cut after a word: the next has no end */
    return status;
}

TEST(a_failing_rank_fails_the_others_and_its_own_error_is_returned) {
    for (int kind = 0; kind < 2; kind++) {
        CHECK_STATUS(tutti_spawn(kinds[kind], 4, one_fails, "cats"), TUTTI_ERROR_BACKEND);
        CHECK_MESSAGE("rank 1: the disk is full of cats");
        char long_text[401] = "";
        for (size_t i = 0; i + 2 < sizeof long_text; i += 2)
            memcpy(long_text + i, "ä", 2);
        CHECK_STATUS(tutti_spawn(kinds[kind], 4, one_fails, long_text), TUTTI_ERROR_BACKEND);
        CHECK_MESSAGE(long_text);
        CHECK_STATUS(tutti_spawn(kinds[kind], 4, one_fails, NULL), TUTTI_ERROR_EMPTY);
        CHECK_MESSAGE("rank 1: its main returned TUTTI_ERROR_EMPTY");
    }
}

static tutti_status leave_a_handle(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group;
    return tutti_group_new(world, NULL, 0, NULL, &group); /* never released */
}

TEST(a_forgotten_handle_is_an_error_of_spawn) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, leave_a_handle, NULL), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("1 group");
}

static tutti_status killed(tutti_world *world, void *argument) {
    (void)argument;
    if (tutti_world_rank(world) == 0)
        raise(SIGTERM);
    tutti_group *group;
    tutti_status status = tutti_group_new(world, NULL, 0, NULL, &group);
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 0 (pid ");
    return status;
}

TEST(a_killed_process_is_returned_with_its_signal_also_when_it_is_rank_0) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, killed, NULL), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 0 (pid ");
    CHECK_MESSAGE("signal 15");
}

static tutti_status exits(tutti_world *world, void *argument) {
    (void)argument;
    if (tutti_world_rank(world) == 1)
        _exit(0); /* even with status 0: it has not returned */
    return TUTTI_OK;
}

TEST(a_process_that_exits_before_its_main_returns_is_dead) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, exits, NULL), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("exited with status 0 before its main returned");
}

static tutti_status thread_exits(tutti_world *world, void *argument) {
    (void)argument;
    if (tutti_world_rank(world) == 1)
        pthread_exit(NULL);
    tutti_group *group;
    tutti_status status = tutti_group_new(world, NULL, 0, NULL, &group);
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    return status;
}

TEST(a_thread_that_ends_itself_is_dead_to_the_others) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_THREADS, 3, thread_exits, NULL), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 1");
    CHECK_MESSAGE("without returning");
}

static tutti_status spawn_inside(tutti_world *world, void *argument) {
    (void)world, (void)argument;
    return tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, succeed, NULL);
}

TEST(forking_while_a_world_is_open_is_refused) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_THREADS, 2, spawn_inside, NULL), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("while a world is open");
    CHECK_MESSAGE("\"default\"");
}

static tutti_status further_worlds(tutti_world *world, void *argument) {
    (void)argument;
    tutti_world *second;
    tutti_status status = tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .name = "second"), &second);
    if (status != TUTTI_OK)
        return status;
    CHECK_EQ(tutti_world_rank(second), tutti_world_rank(world));
    CHECK_EQ(tutti_world_size(second), tutti_world_size(world));
    CHECK_TEXT(tutti_world_launcher(second), "spawn");
    return TUTTI_OK; /* both are closed by tutti_spawn */
}

TEST(ranks_may_open_further_worlds) {
    for (int kind = 0; kind < 2; kind++)
        CHECK_OK(tutti_spawn(kinds[kind], 3, further_worlds, NULL));
}

static void *open_in_thread(void *argument) {
    tutti_world *second;
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .name = "second"), &second));
    CHECK_EQ(tutti_world_size(second), *(int *)argument);
    CHECK_OK(tutti_world_close(second));
    return NULL;
}

static tutti_status open_elsewhere(tutti_world *world, void *argument) {
    (void)argument;
    int size = tutti_world_size(world);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, open_in_thread, &size) == 0);
    pthread_join(thread, NULL);
    return TUTTI_OK;
}

TEST(any_thread_of_a_spawned_process_finds_its_launcher) {
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, open_elsewhere, NULL));
}

TEST(spawned_ranks_do_not_listen_to_the_environment) {
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "64", 1);
    setenv("MASTER_ADDR", "192.0.2.1", 1);
    setenv("MASTER_PORT", "1", 1);
    for (int kind = 0; kind < 2; kind++)
        CHECK_OK(tutti_spawn(kinds[kind], 2, succeed, NULL));
}

static tutti_status spawn_two(void *argument) {
    return tutti_spawn(*(tutti_spawn_kind *)argument, 2, succeed, NULL);
}

TEST(spawning_processes_survives_the_failure_of_any_pipe) {
    tutti_spawn_kind kind = TUTTI_SPAWN_PROCESSES;
    test_fail_each("pipe2", spawn_two, &kind);
}

TEST(spawning_threads_survives_the_failure_of_any_thread) {
    tutti_spawn_kind kind = TUTTI_SPAWN_THREADS;
    test_fail_each("pthread_create", spawn_two, &kind);
}

TEST_LIMIT(a_thread_that_runs_out_of_memory_while_it_opens_holds_nobody_up, 120) {
    tutti_spawn_kind kind = TUTTI_SPAWN_THREADS;
    setenv("TUTTI_TIMEOUT", "100s", 1);
    test_fail_each("malloc,calloc,realloc", spawn_two, &kind);
}

static int forks; /* by this process */

static void count_fork(void) {
    forks++;
}

static void die_as_rank_1(void) {
    if (forks == 1) /* the parent has counted the one of rank 0 */
        raise(SIGKILL);
}

TEST_LIMIT(a_process_that_dies_before_it_opens_holds_nobody_up, 90) {
    setenv("TUTTI_TIMEOUT", "80s", 1);
    CHECK_EQ(pthread_atfork(NULL, count_fork, die_as_rank_1), 0);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, succeed, NULL), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 1");
}

static tutti_status look_at_the_clock(tutti_world *world, void *argument) {
    int64_t before = tutti_clock(), all[3];
    tutti_status status = tutti_all_gather(tutti_world_group(world), &before, all, 1, TUTTI_I64, NULL);
    (void)argument;
    for (int rank = 0; rank < 3 && status == TUTTI_OK; rank++)
        CHECK(all[rank] <= tutti_clock()); /* one clock: what another rank saw before it sent lies in the past */
    return status;
}

TEST(the_ranks_of_a_host_have_one_clock) {
    for (int kind = 0; kind < 2; kind++)
        CHECK_OK(tutti_spawn(kinds[kind], 3, look_at_the_clock, NULL));
}

TEST(wrong_arguments_of_tutti_main_are_its_exit_status) {
    CHECK_EQ(tutti_main(2, NULL, NULL), 1);
    CHECK_MESSAGE("rank_main is NULL");
    CHECK_EQ(tutti_main(-2, succeed, NULL), 1);
    CHECK_MESSAGE("ranks_if_alone is -2");
}

/* ---- nothing that hangs holds tutti_spawn up ---- */

static tutti_status stop_one_fail_another(tutti_world *world, void *argument) {
    (void)argument;
    if (tutti_world_rank(world) == 1)
        raise(SIGSTOP);
    if (tutti_world_rank(world) == 2)
        return tutti_group_abort(tutti_world_group(world), "enough") == TUTTI_OK ? TUTTI_ERROR_RANGE
                                                                                 : TUTTI_ERROR_STATE;
    return tutti_group_check(tutti_world_group(world));
}

TEST(a_rank_that_is_stopped_does_not_hold_up_a_spawn_whose_others_failed) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, stop_one_fail_another, NULL), TUTTI_ERROR_RANGE);
    CHECK_MESSAGE("rank 2");
}

/* Rank 1 goes on in code of its own until whoever spawned it has been told. */
static tutti_status fail_beside_one_that_goes_on(tutti_world *world, void *argument) {
    const int *said = argument;
    char text[4096];
    size_t used = 0;
    if (tutti_world_rank(world) != 1)
        return tutti_group_abort(tutti_world_group(world), "enough") == TUTTI_OK ? TUTTI_ERROR_RANGE
                                                                                 : TUTTI_ERROR_STATE;
    for (ssize_t bytes; (bytes = read(*said, text + used, sizeof text - 1 - used)) > 0;) {
        used += (size_t)bytes;
        text[used] = 0;
        if (strstr(text, "tutti_spawn: rank 0 has failed: ") != NULL &&
            strstr(text, "Rank 1 has not ended: waiting for it") != NULL)
            return TUTTI_OK;
    }
    return TUTTI_ERROR_STATE;
}

TEST(whoever_waits_for_a_rank_that_goes_on_when_others_have_failed_is_told_why) {
    static const tutti_spawn_kind kinds[] = { TUTTI_SPAWN_THREADS, TUTTI_SPAWN_PROCESSES };
    for (int i = 0; i < 2; i++) {
        int said[2], before = dup(STDERR_FILENO);
        CHECK(before >= 0 && pipe(said) == 0);
        CHECK(dup2(said[1], STDERR_FILENO) == STDERR_FILENO);
        tutti_status status = tutti_spawn(kinds[i], 2, fail_beside_one_that_goes_on, &said[0]);
        CHECK(dup2(before, STDERR_FILENO) == STDERR_FILENO);
        CHECK_STATUS(status, TUTTI_ERROR_RANGE);
        close(before);
        close(said[0]);
        close(said[1]);
    }
}

/* The grandchild holds the rank's end of the pipe. */
static tutti_status leave_a_child_behind(tutti_world *world, void *argument) {
    pid_t *grandchild = argument;
    if (tutti_world_rank(world) != 1)
        return TUTTI_OK;
    pid_t pid = fork();
    if (pid == 0) {
        pause();
        _exit(0);
    }
    *grandchild = pid;
    raise(SIGKILL);
    return TUTTI_OK;
}

TEST(a_child_that_a_dead_rank_left_behind_is_not_waited_for) {
    pid_t *grandchild = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(grandchild != MAP_FAILED);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, leave_a_child_behind, grandchild), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 1");
    CHECK(*grandchild > 0);
    CHECK_EQ(kill(*grandchild, SIGKILL), 0);
    (void)waitpid(*grandchild, NULL, 0); /* the harness adopts orphans */
    munmap(grandchild, 4096);
}
