/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank that ends, by whatever means, is seen by the others in whatever they do, with its rank, its pid and how it
 * ended; never by a deadline (they are all a minute away), and a rank that only stands still is not called dead.
 */
#include <fcntl.h>
#include <sys/prctl.h>

#include "base/wait.h"
#include "job.h"

/* ---- ways to end ---- */

typedef enum ending {
    BY_KILL,
    BY_ABORT,
    BY_EXIT_3,
    BY_EXIT_0,
    BY_EXEC,
    BY_EXEC_OF_A_THREAD,
    BY_CLOSE,
    ENDINGS
} ending;

static const char *const endings[ENDINGS] = { "was killed by signal 9 (Killed)",
                                              "was killed by signal 6",
                                              "exited with status 3",
                                              "exited with status 0",
                                              "called exec",
                                              "called exec",
                                              "closed its world" };

static void *exec_in_thread(void *argument) {
    execl("/bin/sleep", "sleep", "30", (char *)NULL);
    return argument;
}

static void end_by(tu_job *job, ending how) {
    pthread_t thread;
    switch (how) {
    case BY_KILL:
        raise(SIGKILL);
        break;
    case BY_ABORT:
        prctl(PR_SET_DUMPABLE, 1);
        abort();
    case BY_EXIT_3:
        _exit(3);
    case BY_EXIT_0:
        _exit(0);
    case BY_EXEC:
        execl("/bin/sleep", "sleep", "30", (char *)NULL);
        break;
    case BY_EXEC_OF_A_THREAD:
        CHECK_EQ(pthread_create(&thread, NULL, exec_in_thread, NULL), 0);
        pause();
        break;
    default:
        tu_job_close(job);
        _exit(0);
    }
}

/* ---- what the others do meanwhile ---- */

typedef enum activity {
    IN_EXCHANGE,
    IN_WAIT,
    PROBING,
    ACTIVITIES
} activity;

static ending how;
static activity what;
static int victim;

static tutti_status check_victim(void *argument) {
    tu_job *job = argument;
    tu_rank_state state = tu_rank_probe(job, victim);
    return state == TU_RANK_DEAD || state == TU_RANK_CLOSED ? tu_death_error(job, victim, "in a wait of the test")
                                                            : TUTTI_OK;
}

static tutti_status run_activity(tu_job *job) {
    job_exchange space;
    static _Atomic uint32_t never;
    tu_wait wait;
    switch (what) {
    case IN_EXCHANGE:
        return tu_job_exchange(job, job_exchange_all(&space, job, 1, 1, NULL, 0, NULL), NULL, NULL);
    case IN_WAIT:
        tu_job_wait_init(job, tu_deadline(60 * TU_SECOND), &wait);
        wait.check = check_victim;
        wait.argument = job;
        return tu_wait_reached(&wait, &never, 1);
    default:
        for (;;) {
            tutti_status status = check_victim(job);
            if (status != TUTTI_OK)
                return status;
            usleep(500);
        }
    }
}

/* The text may first say less than is known later: an exec shows when the old program's descriptors are closed. */
static void expect_story(tu_job *job) {
    tu_death death;
    int64_t deadline = tu_deadline(30 * TU_SECOND);
    do {
        tu_death_describe(job, victim, &death);
        if (strstr(death.text, endings[how]) != NULL)
            break;
        usleep(1000);
    } while (tu_deadline_left(deadline) > 0);
    if (strstr(death.text, endings[how]) == NULL)
        FAIL("\"%s\" does not contain \"%s\"", death.text, endings[how]);
    CHECK_EQ(death.rank, victim);
    CHECK_EQ(death.world_rank, victim);
    CHECK_EQ(death.pid, job->peers[victim].pid);
    char pid[32];
    snprintf(pid, sizeof pid, "(pid %d)", death.pid);
    CHECK(strstr(death.text, pid) != NULL);
    if (how == BY_KILL || how == BY_ABORT)
        CHECK(death.known && death.signal == (how == BY_KILL ? SIGKILL : SIGABRT));
    if (how == BY_EXIT_3 || how == BY_EXIT_0)
        CHECK(death.known && death.signal == 0 && death.exit_code == (how == BY_EXIT_3 ? 3 : 0));
}

/* All have met, and those who die know that the others know: a death ends a meeting that is not over for everybody. */
static void meet_before_death(tu_job *job, bool dies) {
    job_exchange space;
    job_meet(job, 1);
    tu_exchange *said = job_exchange_all(&space, job, UINT64_MAX, 2, NULL, 0, NULL);
    if (!dies)
        said->deadline = tu_clock_now(); /* sends, and does not wait */
    tutti_status status = tu_job_exchange(job, said, NULL, NULL);
    /* The time of those that live is over at once, or they see the death. Of two that die the second may see the first,
     * who knew that all have met. */
    CHECK(status == TUTTI_OK || status == TUTTI_ERROR_DEAD || !dies);
}

static void survive(tu_job *job) {
    meet_before_death(job, tu_job_rank(job) == victim);
    if (tu_job_rank(job) == victim) {
        usleep(2000);
        end_by(job, how);
    }
    tutti_status expected = how == BY_CLOSE ? TUTTI_ERROR_GONE : TUTTI_ERROR_DEAD;
    CHECK_STATUS(run_activity(job), expected);
    char rank[16];
    snprintf(rank, sizeof rank, "rank %d", victim);
    CHECK_MESSAGE(rank);
    CHECK_EQ(tu_rank_state_of(job, victim), how == BY_CLOSE ? TU_RANK_CLOSED : TU_RANK_DEAD);
    CHECK_EQ(tu_job_departures(job) >= 1, 1);
    expect_story(job);
    /* Survivors still reach each other. */
    int others[2], count = 0, me = 0;
    for (int i = 0; i < 3; i++)
        if (i != victim) {
            me = i == tu_job_rank(job) ? count : me;
            others[count++] = i;
        }
    tu_exchange exchange = { .ranks = others,
                             .count = 2,
                             .me = me,
                             .key = 2,
                             .sequence = 1,
                             .purpose = "survivors",
                             .deadline = tu_deadline(60 * TU_SECOND) };
    CHECK_OK(tu_job_exchange(job, &exchange, NULL, NULL));
}

static void run_death(ending ending, activity activity, int rank, bool reap_first) {
    job_place place;
    pid_t children[3];
    how = ending;
    what = activity;
    victim = rank;
    job_place_open(&place);
    for (int i = 0; i < 3; i++)
        children[i] = job_start_process(&place, i, 3, survive);
    bool lives = how == BY_EXEC || how == BY_EXEC_OF_A_THREAD;
    if (reap_first && !lives) /* nothing of it is left in /proc then */
        job_wait_process(children[victim]);
    for (int i = 0; i < 3; i++)
        if (i != victim)
            CHECK_EQ(job_wait_process(children[i]), 0);
    if (lives)
        kill(children[victim], SIGKILL);
    if (lives || !reap_first)
        job_wait_process(children[victim]);
    job_place_close(&place);
}

static void run_matrix(activity activity) {
    for (int ending = 0; ending < ENDINGS; ending++)
        for (int rank = 0; rank < 3; rank++)
            run_death((enum ending)ending, activity, rank, false);
}

TEST(whoever_ends_however_is_seen_in_an_exchange) {
    run_matrix(IN_EXCHANGE);
}

TEST(whoever_ends_however_is_seen_in_a_wait) {
    run_matrix(IN_WAIT);
}

TEST(whoever_ends_however_is_seen_by_a_probe) {
    run_matrix(PROBING);
}

static bool kernel_keeps_statuses(void) {
    pid_t child = fork();
    if (child == 0)
        _exit(3);
    CHECK(child > 0);
    int pidfd = tu_pidfd_open(child, tu_process_start_time(child));
    uint64_t start_time = tu_process_start_time(child);
    job_wait_process(child);
    tu_fate fate;
    tu_process_fate(child, start_time, pidfd, &fate);
    if (pidfd >= 0)
        close(pidfd);
    return fate.known && fate.exit_code == 3;
}

TEST(the_status_of_a_rank_that_was_waited_for_is_still_known) {
    if (!kernel_keeps_statuses())
        SKIP("this kernel forgets the status of a process that was waited for (Linux 6.15 and newer keep it)");
    run_death(BY_KILL, IN_EXCHANGE, 1, true);
    run_death(BY_EXIT_3, PROBING, 0, true);
    run_death(BY_EXIT_0, IN_WAIT, 2, true);
}

/* ---- two at once ---- */

static void two_die(tu_job *job) {
    bool dies = tu_job_rank(job) == 0 || tu_job_rank(job) == 2;
    meet_before_death(job, dies);
    if (dies)
        raise(SIGKILL);
    job_exchange space;
    CHECK_STATUS(tu_job_exchange(job, job_exchange_all(&space, job, 1, 1, NULL, 0, NULL), NULL, NULL),
                 TUTTI_ERROR_DEAD);
    int64_t deadline = tu_deadline(30 * TU_SECOND);
    while ((tu_rank_probe(job, 0) != TU_RANK_DEAD || tu_rank_probe(job, 2) != TU_RANK_DEAD) &&
           tu_deadline_left(deadline) > 0)
        usleep(1000);
    CHECK_EQ(tu_rank_state_of(job, 0), TU_RANK_DEAD);
    CHECK_EQ(tu_rank_state_of(job, 2), TU_RANK_DEAD);
    CHECK(tu_rank_probe(job, 1) != TU_RANK_DEAD);
    CHECK(tu_rank_probe(job, 3) != TU_RANK_DEAD);
    CHECK(tu_job_departures(job) >= 2);
}

TEST(two_deaths_at_once_are_counted_once_each) {
    job_place place;
    pid_t children[4];
    job_place_open(&place);
    for (int rank = 0; rank < 4; rank++)
        children[rank] = job_start_process(&place, rank, 4, two_die);
    for (int rank = 0; rank < 4; rank++) {
        int status = job_wait_process(children[rank]);
        CHECK_EQ(status, rank % 2 == 0 ? SIGKILL : 0);
    }
    job_place_close(&place);
}

/* ---- alive after all ---- */

static void stand_still(tu_job *job) {
    job_meet(job, 1);
    job_exchange space;
    tu_exchange *exchange = job_exchange_all(&space, job, 1, 1, NULL, 0, NULL);
    if (tu_job_rank(job) == 1) {
        raise(SIGSTOP);
    } else {
        exchange->deadline = tu_deadline(200 * TU_MILLISECOND);
        CHECK_STATUS(tu_job_exchange(job, exchange, NULL, NULL), TUTTI_ERROR_TIMEOUT);
        CHECK_EQ(tu_rank_probe(job, 1), TU_RANK_ALIVE);
        test_await_stopped(job->peers[1].pid);
        kill(job->peers[1].pid, SIGCONT);
    }
    job_meet(job, 2); /* it wakes up and goes on */
}

TEST(a_stopped_rank_is_late_and_not_dead) {
    job_processes(2, stand_still);
}

/* A child of a rank holds copies of its sockets: only the robust mutex and the pidfd tell the death. */
static int leash[2]; /* the child lives until the test lets go */

static void die_with_child(tu_job *job) {
    meet_before_death(job, tu_job_rank(job) == 1);
    if (tu_job_rank(job) == 1) {
        if (fork() == 0) {
            char byte;
            close(leash[1]);
            (void)!read(leash[0], &byte, 1);
            _exit(0);
        }
        raise(SIGKILL);
    }
    job_exchange space;
    CHECK_STATUS(tu_job_exchange(job, job_exchange_all(&space, job, 1, 1, NULL, 0, NULL), NULL, NULL),
                 TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("was killed by signal 9");
}

TEST(a_forked_child_does_not_hide_its_parents_death) {
    job_place place;
    job_place_open(&place);
    CHECK_EQ(pipe(leash), 0);
    pid_t first = job_start_process(&place, 0, 2, die_with_child),
          second = job_start_process(&place, 1, 2, die_with_child);
    CHECK_EQ(job_wait_process(first), 0);
    CHECK_EQ(job_wait_process(second), SIGKILL);
    job_place_close(&place);
    close(leash[0]);
    close(leash[1]);
    while (waitpid(-1, NULL, 0) > 0) { /* the grandchild, which is ours now */
    }
}

static void know_that_one_is_forked(tu_job *job) {
    CHECK(!tu_job_forked(job));
    job_meet(job, 1);
    if (tu_job_rank(job) == 0) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            bool forked = tu_job_forked(job);
            tu_job_close(job); /* harmless: the peer notices nothing */
            _exit(forked ? 0 : 1);
        }
        CHECK_EQ(job_wait_process(child), 0);
        CHECK(!tu_job_forked(job));
    }
    job_meet(job, 2);
    CHECK_EQ(tu_rank_probe(job, 0), TU_RANK_ALIVE);
    job_meet(job, 3);
}

TEST(a_forked_child_knows_that_it_is_one) {
    if (!tu_robust_works())
        SKIP("an emulator that does not wipe pages at fork");
    job_threads(2, know_that_one_is_forked);
    job_processes(2, know_that_one_is_forked);
}

/* A live process that has lost its connections is not dead, but it is of no use either. */
static void close_everything(tu_job *job) {
    job_exchange space;
    job_meet(job, 1);
    if (tu_job_rank(job) == 1) {
        int nowhere = open("/dev/null", O_RDONLY | O_CLOEXEC);
        dup2(nowhere, job->peers[0].fd); /* as a program does that closes what it did not open */
        close(nowhere);
        while (tu_rank_probe(job, 0) == TU_RANK_ALIVE)
            usleep(1000);
        return;
    }
    CHECK_STATUS(tu_job_exchange(job, job_exchange_all(&space, job, 1, 1, NULL, 0, NULL), NULL, NULL),
                 TUTTI_ERROR_NETWORK);
    CHECK_MESSAGE("rank 1");
    CHECK_MESSAGE("lives");
    CHECK_EQ(tu_rank_probe(job, 1), TU_RANK_ALIVE);
}

TEST(a_rank_that_lost_its_descriptors_is_cut_off_and_not_dead) {
    if (!tu_robust_works())
        SKIP("an emulator without robust mutexes");
    job_processes(2, close_everything);
}

/* ---- threads ---- */

static void thread_dies(tu_job *job) {
    meet_before_death(job, tu_job_rank(job) == 1);
    if (tu_job_rank(job) == 1) {
        usleep(2000);
        tu_job_mark_dead(job, "returned from its main function without closing its world");
        return; /* the harness closes the job, which does not make it less dead */
    }
    job_exchange space;
    CHECK_STATUS(tu_job_exchange(job, job_exchange_all(&space, job, 1, 1, NULL, 0, NULL), NULL, NULL),
                 TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 1 returned from its main function");
    CHECK_EQ(tu_rank_probe(job, 1), TU_RANK_DEAD);
    CHECK(tu_job_departures(job) >= 1);
}

TEST(a_thread_rank_that_ends_without_closing_is_dead) {
    job_threads(3, thread_dies);
}

/* ---- the parent's word ---- */

static void wait_for_word(tu_job *job) {
    meet_before_death(job, tu_job_rank(job) == 1);
    if (tu_job_rank(job) == 1)
        _exit(42);
    tu_death death;
    int64_t deadline = tu_deadline(30 * TU_SECOND);
    do {
        usleep(1000);
    } while ((tu_rank_probe(job, 1) != TU_RANK_DEAD || atomic_load(&tu_page_slot(job->page, 1)->wait_status) == 0) &&
             tu_deadline_left(deadline) > 0);
    tu_death_describe(job, 1, &death);
    CHECK(death.known);
    CHECK_EQ(death.exit_code, 42);
    CHECK(strstr(death.text, "exited with status 42") != NULL);
}

TEST(the_parent_publishes_the_status_in_the_job_segment) {
    job_place place;
    job_place_open(&place);
    pid_t first = job_start_process(&place, 0, 2, wait_for_word),
          second = job_start_process(&place, 1, 2, wait_for_word);
    int status = job_wait_process(second);
    CHECK_EQ(WEXITSTATUS(status), 42);
    int survivors[1] = { first };
    tu_death_publish(second, status, survivors, 1);
    CHECK_EQ(job_wait_process(first), 0);
    job_place_close(&place);
}

static void wait_matrix(void) {
    run_death(BY_KILL, IN_EXCHANGE, 1, false);
    run_death(BY_EXEC, IN_WAIT, 0, false);
    run_death(BY_EXIT_0, PROBING, 2, false);
}

TEST(an_ordinary_user_sees_deaths_too) {
    test_as_ordinary_user(wait_matrix);
}
