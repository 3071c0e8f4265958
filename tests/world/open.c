/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <tutti/collective.h>
#include <tutti/group.h>
#include <unistd.h>

#include "../harness.h"
#include "base/clock.h"
#include "world/world.h"

TEST(with_nothing_in_the_environment_a_world_of_one_rank_opens) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    CHECK_EQ(tutti_world_rank(world), 0);
    CHECK_EQ(tutti_world_size(world), 1);
    CHECK_EQ(tutti_world_local_rank(world), 0);
    CHECK_EQ(tutti_world_local_size(world), 1);
    CHECK_TEXT(tutti_world_name(world), "default");
    CHECK_TEXT(tutti_world_launcher(world), "alone");
    CHECK(tutti_world_store(world) == NULL);
    CHECK_TEXT(tutti_group_name(tutti_world_group(world)), "0");
    CHECK_TEXT(tutti_group_description(tutti_world_group(world)), "default_pg");
    CHECK_OK(tutti_world_close(world));
}

TEST_WORLD(ranks_find_each_other, 4) {
    CHECK_EQ(tutti_world_size(world), 4);
    CHECK_EQ(tutti_world_local_size(world), 4);
    CHECK_EQ(tutti_world_rank(world), tutti_world_local_rank(world));
    CHECK_TEXT(tutti_world_launcher(world), "spawn");
    tutti_group *group = tutti_world_group(world);
    CHECK_EQ(tutti_group_rank(group), tutti_world_rank(world));
    CHECK_EQ(tutti_group_size(group), 4);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(tutti_group_ranks(group)[i], i);
    CHECK(tutti_world_store(world) != NULL);
    /* The world's store works, too: everybody adds one. */
    int64_t sum;
    CHECK_OK(tutti_store_add(tutti_world_store(world), "hands", 1, &sum));
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "all", 4, 0));
    CHECK_OK(tutti_store_add(tutti_world_store(world), "hands", 0, &sum));
    CHECK_EQ(sum, 4);
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "read", 4, 0));
    CHECK_OK(tutti_world_close(world));
}

TEST_WORLD(a_world_opens_again_under_its_name_after_closing, 3) {
    (void)world;
    for (int i = 0; i < 5; i++) {
        tutti_world *again;
        CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .name = "again"), &again));
        CHECK_TEXT(tutti_group_name(tutti_world_group(again)), "0"); /* the counter starts over */
        tutti_group *group;
        CHECK_OK(tutti_group_new(again, NULL, 0, NULL, &group));
        CHECK_TEXT(tutti_group_name(group), "1");
        tutti_group_release(group);
        CHECK_OK(tutti_world_close(again));
    }
}

TEST_WORLD(several_worlds_live_in_one_process, 3) {
    tutti_world *second, *third;
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    options.name = "second";
    CHECK_OK(tutti_world_open(&options, &second));
    options.name = "third";
    CHECK_OK(tutti_world_open(&options, &third));
    /* Different histories in one do not disturb the other. */
    tutti_group *groups[3];
    CHECK_OK(tutti_group_new(second, NULL, 0, NULL, &groups[0]));
    CHECK_OK(tutti_group_new(second, NULL, 0, NULL, &groups[1]));
    CHECK_OK(tutti_group_new(third, NULL, 0, NULL, &groups[2]));
    CHECK_TEXT(tutti_group_name(groups[1]), "2");
    CHECK_TEXT(tutti_group_name(groups[2]), "1");
    CHECK(tutti_group_world(groups[2]) == third);
    for (int i = 0; i < 3; i++)
        tutti_group_release(groups[i]);
    CHECK_OK(tutti_world_close(second));
    CHECK_OK(tutti_world_close(third));
}

TEST_WORLD(the_same_name_open_twice_in_one_rank_is_an_error, 2) {
    (void)world;
    tutti_world *twice;
    CHECK_STATUS(tutti_world_open(NULL, &twice), TUTTI_ERROR_EXISTS);
    CHECK_MESSAGE("\"default\" is already open");
}

TEST(closing_what_is_no_open_world_is_an_error) {
    tutti_world *world;
    CHECK_STATUS(tutti_world_close(NULL), TUTTI_ERROR_ARGUMENT);
    CHECK_OK(tutti_world_open(NULL, &world));
    CHECK_OK(tutti_world_close(world));
    CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("closed already");
}

TEST(closing_with_live_handles_lists_them_and_their_memory_goes_with_the_last) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    tutti_group *first, *second;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &first));
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &second));
    tu_world_handle(world, "memory block", 1);
    CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("2 groups");
    CHECK_MESSAGE("1 memory block");
    CHECK_EQ(tutti_group_size(first), 1); /* queries still work */
    tutti_group *late;
    CHECK_STATUS(tutti_group_new(world, NULL, 0, NULL, &late), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("is closed");
    tutti_group_release(first);
    tutti_group_release(second);
    tu_world_handle(world, "memory block", -1);
}

static void bad(tutti_world_options options, tutti_status status, const char *fragment) {
    tutti_world *world;
    options.size = sizeof options;
    CHECK_STATUS(tutti_world_open(&options, &world), status);
    CHECK_MESSAGE(fragment);
}

TEST(bad_options_are_refused_by_name) {
    tutti_store *store;
    CHECK_OK(tutti_store_open_memory(&store));
    bad((tutti_world_options){ .rank = 0, .rank_count = 2, .store = store, .store_url = "unix:@x" },
        TUTTI_ERROR_ARGUMENT, "both a store and");
    bad((tutti_world_options){ .rank = 0, .rank_count = 0, .store = store }, TUTTI_ERROR_ARGUMENT, "rank_count is 0");
    bad((tutti_world_options){ .rank = 2, .rank_count = 2, .store = store }, TUTTI_ERROR_RANGE, "rank is 2");
    bad((tutti_world_options){ .rank = -1, .rank_count = 2, .store = store }, TUTTI_ERROR_RANGE, "rank is -1");
    bad((tutti_world_options){ .rank = 0, .rank_count = -2, .store = store }, TUTTI_ERROR_ARGUMENT, "rank_count is -2");
    bad((tutti_world_options){ .rank = 1, .rank_count = 0 }, TUTTI_ERROR_ARGUMENT, "rank 1");
    bad((tutti_world_options){ .rank = 0, .rank_count = 2 }, TUTTI_ERROR_ARGUMENT, "where to meet");
    bad((tutti_world_options){ .timeout_ns = -1 }, TUTTI_ERROR_ARGUMENT, "timeout_ns is -1");
    bad((tutti_world_options){ .name = "a/b" }, TUTTI_ERROR_ARGUMENT, "slash");
    bad((tutti_world_options){ .name = "" }, TUTTI_ERROR_ARGUMENT, "name");
    bad((tutti_world_options){ .settings = "TUTTI_NONE=1" }, TUTTI_ERROR_ARGUMENT, "TUTTI_NONE");
    bad((tutti_world_options){ .settings = "TUTTI_SPIN=many" }, TUTTI_ERROR_ARGUMENT, "TUTTI_SPIN");
    bad((tutti_world_options){ .log = "loud" }, TUTTI_ERROR_ARGUMENT, "loud");
    tutti_world *world;
    tutti_world_options empty = { 0 };
    CHECK_STATUS(tutti_world_open(&empty, &world), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("size is 0");
    tutti_store_release(store);
}

TEST(options_win_over_the_environment) {
    setenv("TUTTI_TIMEOUT", "7s", 1);
    setenv("TUTTI_SPIN", "3", 1);
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    CHECK_EQ(tutti_group_timeout(tutti_world_group(world)), 7 * TU_SECOND);
    CHECK_EQ(tu_settings_number(&world->settings, TU_SETTING_SPIN), 3);
    CHECK_OK(tutti_world_close(world));
    CHECK_OK(tutti_world_open(
        TUTTI_OPTIONS(tutti_world_options, .threads = TUTTI_NONE, .timeout_ns = 5 * TU_SECOND,
                      .settings = "TUTTI_SPIN=9,TUTTI_FAULT=rank=0,op=barrier,at=99,do=skip,TUTTI_HUGE_PAGES=no"),
        &world));
    CHECK_EQ(tutti_group_timeout(tutti_world_group(world)), 5 * TU_SECOND);
    CHECK_EQ(tu_settings_number(&world->settings, TU_SETTING_SPIN), 9);
    CHECK_EQ(tu_settings_number(&world->settings, TU_SETTING_THREADS), 0);
    CHECK_TEXT(tu_settings_text(&world->settings, TU_SETTING_FAULT), "rank=0,op=barrier,at=99,do=skip");
    CHECK_TEXT(tu_settings_text(&world->settings, TU_SETTING_HUGE_PAGES), "no");
    CHECK_OK(tutti_world_close(world));
}

static char logged[4096];
static void keep_log(tutti_log_level level, const char *subsystem, const char *line, void *user) {
    (void)level, (void)subsystem, (void)user;
    size_t used = strlen(logged);
    snprintf(logged + used, sizeof logged - used, "%s\n", line);
}

TEST(unknown_variables_are_warned_about_and_the_log_says_who_started_us) {
    setenv("TUTTI_TIMOUT", "7s", 1);
    tutti_world *world;
    CHECK_OK(tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .log = "info", .log_callback = keep_log), &world));
    CHECK_OK(tutti_world_close(world));
    CHECK(strstr(logged, "TUTTI_TIMOUT") != NULL);
    CHECK(strstr(logged, "did you mean TUTTI_TIMEOUT") != NULL);
    CHECK(strstr(logged, "alone") != NULL);
}

/* ---- fork ---- */

TEST(every_call_in_a_forked_child_is_refused_and_fork_plus_exec_works) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &group));
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        tutti_group *other;
        CHECK_STATUS(tutti_group_new(world, NULL, 0, NULL, &other), TUTTI_ERROR_FORKED);
        CHECK_MESSAGE("forked child");
        CHECK_STATUS(tutti_group_abort(group, "x"), TUTTI_ERROR_FORKED);
        CHECK_STATUS(tutti_group_destroy(group), TUTTI_ERROR_FORKED);
        CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_FORKED);
        execlp("true", "true", (char *)NULL);
        _exit(1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    CHECK_OK(tutti_group_check(group));
    tutti_group_release(group);
    CHECK_OK(tutti_world_close(world));
}

/* ---- bad company ---- */

typedef struct seat {
    tutti_store *store;
    int rank, count;
    int64_t timeout_ns;
    tutti_status status;
    char message[2048];
} seat;

static void *sit_down(void *argument) {
    seat *seat = argument;
    tutti_world *world;
    seat->status = tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .rank = seat->rank, .rank_count = seat->count,
                                                  .store = seat->store, .timeout_ns = seat->timeout_ns),
                                    &world);
    if (seat->status == TUTTI_OK)
        seat->status = tutti_world_close(world);
    else
        snprintf(seat->message, sizeof seat->message, "%s", tutti_error_message());
    return NULL;
}

static void sit_all_down(seat *seats, int count) {
    pthread_t threads[8];
    for (int i = 0; i < count; i++)
        CHECK(pthread_create(&threads[i], NULL, sit_down, &seats[i]) == 0);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

TEST(a_missing_rank_is_named_at_the_deadline_with_those_who_came) {
    tutti_store *store;
    CHECK_OK(tutti_store_open_memory(&store));
    seat seats[2] = { { store, 0, 3, 300 * TU_MILLISECOND, 0, "" }, { store, 2, 3, 300 * TU_MILLISECOND, 0, "" } };
    sit_all_down(seats, 2);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(seats[i].status, TUTTI_ERROR_TIMEOUT);
        CHECK(strstr(seats[i].message, "1") != NULL);
    }
    tutti_store_release(store);
}

TEST(sizes_that_disagree_are_an_error_on_every_rank) {
    tutti_store *store;
    CHECK_OK(tutti_store_open_memory(&store));
    seat seats[2] = { { store, 0, 2, 60 * TU_SECOND, 0, "" }, { store, 1, 3, 60 * TU_SECOND, 0, "" } };
    sit_all_down(seats, 2);
    for (int i = 0; i < 2; i++)
        CHECK(seats[i].status == TUTTI_ERROR_MISMATCH);
    CHECK(strstr(seats[0].message, "3") != NULL && strstr(seats[0].message, "2") != NULL);
    tutti_store_release(store);
}

TEST(a_second_rank_0_in_another_process_is_an_error) {
    tutti_store *server;
    char url[64];
    snprintf(url, sizeof url, "unix:@tutti-test-open-%d", (int)getpid());
    fflush(NULL);
    pid_t children[2];
    for (int i = 0; i < 2; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            usleep(100000);
            tutti_world *world;
            tutti_status status = tutti_world_open(TUTTI_OPTIONS(tutti_world_options, .rank = 0, .rank_count = 2,
                                                                 .store_url = url, .timeout_ns = 3 * test_moment()),
                                                   &world);
            CHECK(status != TUTTI_OK);
            CHECK(status != TUTTI_ERROR_TIMEOUT || i == 0);
            CHECK_MESSAGE("rank 0");
            _exit(0);
        }
    }
    CHECK_OK(tutti_store_serve(url, 0, NULL, &server));
    for (int i = 0; i < 2; i++) {
        int status;
        CHECK(waitpid(children[i], &status, 0) == children[i]);
        CHECK_EQ(status, 0);
    }
    tutti_store_release(server);
}

TEST(a_full_table_of_descriptors_is_named) {
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = (rlim_t)test_count_descriptors() + 3; /* and what the harness has open beyond */
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    tutti_world *world;
    int taken[8], count = 0;
    while (count < 8 && (taken[count] = dup(0)) >= 0)
        count++;
    CHECK_STATUS(tutti_world_open(NULL, &world), TUTTI_ERROR_LIMIT);
    CHECK_MESSAGE("RLIMIT_NOFILE");
    while (count > 0)
        close(taken[--count]);
}

/* ---- interrupt ---- */

static void *interrupt_soon(void *argument) {
    usleep(50000);
    tutti_world_interrupt(argument);
    return NULL;
}

TEST_WORLD(interrupt_ends_waits_until_resume, 2) {
    int alone[1] = { tutti_world_rank(world) };
    if (tutti_world_rank(world) == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, interrupt_soon, world) == 0);
        int both[2] = { 0, 1 };
        tutti_group *group;
        /* Rank 1 does not come to this one. */
        CHECK_STATUS(
            tutti_group_new(world, both, 2, TUTTI_OPTIONS(tutti_group_options, .local_synchronization = true), &group),
            TUTTI_ERROR_INTERRUPTED);
        pthread_join(thread, NULL);
        tutti_world_resume(world);
    }
    tutti_group *own;
    CHECK_OK(tutti_group_new(world, alone, 1, TUTTI_OPTIONS(tutti_group_options, .local_synchronization = true), &own));
    tutti_group_release(own);
    CHECK_OK(tutti_store_barrier(tutti_world_store(world), "end", 2, 0));
}

/* ---- n-th failures ---- */

static tutti_status open_and_close(void *argument) {
    (void)argument;
    tutti_world *world;
    tutti_status status = tutti_world_open(NULL, &world);
    if (status != TUTTI_OK)
        return status;
    tutti_group *group;
    status = tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .tag = "x"), &group);
    if (status == TUTTI_OK)
        tutti_group_release(group);
    tutti_status closed = tutti_world_close(world);
    return status != TUTTI_OK ? status : closed;
}

TEST(opening_survives_the_failure_of_any_call) {
    test_fail_each(NULL, open_and_close, NULL);
}

/* ---- opening keeps its deadline, and tells who died ---- */

typedef struct joiner {
    char url[64];
    int rank, ranks;
    int64_t timeout_ns;
} joiner;

static tutti_status join_world(const joiner *joiner, tutti_world **world) {
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    options.rank = joiner->rank;
    options.rank_count = joiner->ranks;
    options.store_url = joiner->url;
    options.timeout_ns = joiner->timeout_ns;
    return tutti_world_open(&options, world);
}

/* Rank 0 in a process of its own: it serves the store and waits for somebody who never comes. */
static pid_t start_rank_0(joiner *joiner, const char *what) {
    snprintf(joiner->url, sizeof joiner->url, "unix:@tutti-test-%s-%d", what, (int)getpid());
    joiner->rank = 0;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        tutti_world *world;
        joiner->timeout_ns = INT64_C(60000000000);
        (void)!join_world(joiner, &world);
        _exit(0);
    }
    for (tutti_status status = TUTTI_ERROR_NETWORK; status != TUTTI_OK;) { /* until it serves */
        tutti_store *store;
        tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
        options.timeout_ns = INT64_C(1000000000);
        status = tutti_store_open_url(joiner->url, &options, &store);
        if (status == TUTTI_OK)
            tutti_store_release(store);
    }
    return pid;
}

typedef struct blow {
    const char *url;
    pid_t pid;
    int signal;
} blow;

/* Strikes the process that serves the store when rank 1 has left its record there, and waits for rank 2. */
static void *strike_soon(void *argument) {
    const blow *blow = argument;
    tutti_store *store;
    CHECK_OK(tutti_store_open_url(blow->url, NULL, &store));
    for (bool there = false; !there;) {
        char **keys;
        size_t count;
        CHECK_OK(tutti_store_list_keys(store, &keys, &count));
        for (size_t i = 0; i < count; i++)
            there |= strlen(keys[i]) >= 5 && strcmp(keys[i] + strlen(keys[i]) - 5, "job/1") == 0;
        tutti_free(keys);
        usleep(1000);
    }
    CHECK_EQ(kill(blow->pid, blow->signal), 0);
    tutti_store_release(store);
    return NULL;
}

TEST(opening_keeps_its_deadline_when_the_rank_that_serves_the_store_is_stopped) {
    joiner joiner = { .ranks = 3 };
    blow blow = { joiner.url, start_rank_0(&joiner, "stopped"), SIGSTOP };
    tutti_world *world;
    pthread_t striker;
    joiner.rank = 1;
    joiner.timeout_ns = 2 * test_moment();
    CHECK_EQ(pthread_create(&striker, NULL, strike_soon, &blow), 0);
    int64_t begin = tu_clock_now();
    CHECK_STATUS(join_world(&joiner, &world), TUTTI_ERROR_TIMEOUT);
    /* What it was given, a moment to tell, and what a loaded machine adds; a server that answered nothing
     * used to cost five seconds more. */
    CHECK(tu_clock_now() - begin < 6 * test_moment());
    CHECK_MESSAGE("stopped");
    CHECK_EQ(pthread_join(striker, NULL), 0);
    CHECK_EQ(kill(blow.pid, SIGKILL), 0);
    CHECK_EQ(waitpid(blow.pid, NULL, 0), blow.pid);
}

TEST(the_death_of_rank_0_while_opening_is_told_by_name_long_before_the_deadline) {
    joiner joiner = { .ranks = 3, .timeout_ns = INT64_C(60000000000) };
    blow blow = { joiner.url, start_rank_0(&joiner, "dead"), SIGKILL };
    tutti_world *world;
    pthread_t striker;
    joiner.rank = 1;
    CHECK_EQ(pthread_create(&striker, NULL, strike_soon, &blow), 0);
    CHECK_STATUS(join_world(&joiner, &world), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 0");
    CHECK_EQ(pthread_join(striker, NULL), 0);
    CHECK_EQ(waitpid(blow.pid, NULL, 0), blow.pid);
}

/* ---- files that are none ---- */

TEST(a_pipe_in_place_of_a_log_or_a_table_holds_nobody_up) {
    char folder[] = "/tmp/tutti-test-XXXXXX", path[64];
    CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/pipe", folder);
    CHECK_EQ(mkfifo(path, 0600), 0);
    setenv("TUTTI_LOG_FILE", path, 1);
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world)); /* warns, and logs to stderr */
    CHECK_OK(tutti_world_close(world));
    unsetenv("TUTTI_LOG_FILE");
    setenv("TUTTI_TUNING", path, 1);
    CHECK_OK(tutti_world_open(NULL, &world));
    float one = 1, sum;
    CHECK_STATUS(tutti_all_reduce(tutti_world_group(world), &one, &sum, 1, TUTTI_F32, TUTTI_SUM, NULL),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("TUTTI_TUNING");
    CHECK_OK(tutti_world_close(world));
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(rmdir(folder), 0);
}

/* ---- a program with more rights than its user ---- */

/* In a copy of this program with the set-user-id bit: none of the user's variables is believed. */
TEST(a_program_with_more_rights_than_its_user_opens_a_world_without_its_environment) {
    if (getauxval(AT_SECURE) == 0)
        SKIP("runs in a copy of this program with the set-user-id bit, by the next test");
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world)); /* TUTTI_TIMEOUT and TUTTI_TUNING are nonsense */
    CHECK_EQ(tutti_world_size(world), 1);     /* RANK and WORLD_SIZE too */
    CHECK_OK(tutti_world_close(world));
}

static void exec_as_ordinary_user(char *program, const char *log) {
    setenv("TUTTI_LOG", "trace", 1);
    setenv("TUTTI_LOG_FILE", log, 1);
    setenv("TUTTI_TIMEOUT", "nonsense", 1);
    setenv("TUTTI_TUNING", "/etc/shadow", 1);
    setenv("RANK", "1", 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("MASTER_ADDR", "192.0.2.1", 1);
    setenv("MASTER_PORT", "1", 1);
    if (setgid(65534) == 0 && setuid(65534) == 0)
        execl(program, program, "a_program_with_more_rights_than_its_user", (char *)NULL);
    _exit(99);
}

TEST(the_environment_of_a_setuid_program_is_not_trusted) {
    char folder[] = "/tmp/tutti-test-setuid-XXXXXX", program[64], log[64], command[256];
    if (test_sanitized())
        SKIP("sanitizers read the environment of their own");
    if (geteuid() != 0)
        SKIP("only root can make a set-user-id program of another user");
    CHECK(mkdtemp(folder) != NULL);
    CHECK_EQ(chmod(folder, 0755), 0);
    snprintf(program, sizeof program, "%s/program", folder);
    snprintf(log, sizeof log, "%s/log", folder);
    snprintf(command, sizeof command, "cp /proc/%d/exe %s && chmod 4755 %s", (int)getpid(), program, program);
    struct statvfs system_of;
    CHECK_EQ(system(command), 0);
    bool obeyed = statvfs(program, &system_of) == 0 && (system_of.f_flag & ST_NOSUID) == 0;
    pid_t pid = obeyed ? fork() : 0;
    if (obeyed && pid == 0)
        exec_as_ordinary_user(program, log);
    int status = 0;
    if (obeyed)
        CHECK_EQ(waitpid(pid, &status, 0), pid);
    bool written = access(log, F_OK) == 0;
    unlink(log);
    unlink(program);
    rmdir(folder);
    if (!obeyed)
        SKIP("/tmp is mounted with nosuid");
    CHECK_EQ(status, 0);
    CHECK(!written);
}
