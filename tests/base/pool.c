/* SPDX-License-Identifier: Apache-2.0
 *
 * The pool of threads that compute: every item once, loops of several threads at once, forks, and its end.
 */
#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../harness.h"
#include "base/pool.h"

enum {
    ITEMS = 10000
};

static void count_up(void *context, int64_t begin, int64_t end) {
    _Atomic int *counts = context;
    for (int64_t i = begin; i < end; i++)
        atomic_fetch_add_explicit(&counts[i], 1, memory_order_relaxed);
}

/* Each item has been worked on `rounds` times. */
static bool all_are(_Atomic int *counts, int rounds) {
    for (int i = 0; i < ITEMS; i++)
        if (atomic_load(&counts[i]) != rounds)
            return false;
    return true;
}

static int threads_now(void) {
    DIR *folder = opendir("/proc/self/task");
    int count = 0;
    while (folder != NULL) {
        struct dirent *entry = readdir(folder);
        if (entry == NULL)
            break;
        count += entry->d_name[0] != '.';
    }
    closedir(folder);
    return count;
}

/* A thread that was joined is in the list of the system for a moment more. */
static bool threads_become(int count) {
    for (int i = 0; i < 5000 && threads_now() != count; i++)
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    return threads_now() == count;
}

TEST(every_item_is_worked_on_once) {
    static _Atomic int counts[ITEMS];
    tu_pool_hold();
    for (int round = 1; round <= 200; round++) {
        tu_pool_run(&(tu_pool_loop){ count_up, counts, ITEMS, 1 + round % 7 * 100, 4 });
        CHECK(all_are(counts, round));
    }
    CHECK_EQ(tu_pool_threads(), 3);
    tu_pool_release();
}

TEST(without_a_holder_no_thread_is_started) {
    static _Atomic int counts[ITEMS];
    tu_pool_run(&(tu_pool_loop){ count_up, counts, ITEMS, 1, 4 });
    CHECK(all_are(counts, 1));
    CHECK_EQ(tu_pool_threads(), 0);
}

static void loop_inside(void *context, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        tu_pool_run(&(tu_pool_loop){ count_up, context, ITEMS, 1, 4 });
}

TEST(a_loop_inside_a_loop_runs_on_its_own_thread) {
    static _Atomic int counts[ITEMS];
    tu_pool_hold();
    tu_pool_run(&(tu_pool_loop){ loop_inside, counts, 12, 1, 4 });
    CHECK(all_are(counts, 12));
    tu_pool_release();
}

static void *many_loops(void *context) {
    for (int i = 0; i < 100; i++)
        tu_pool_run(&(tu_pool_loop){ count_up, context, ITEMS, 50, 3 });
    return NULL;
}

TEST(loops_of_many_threads_share_the_pool) {
    enum {
        OWNERS = 12
    }; /* more than there are places for loops */
    static _Atomic int counts[OWNERS][ITEMS];
    pthread_t owners[OWNERS];
    tu_pool_hold();
    for (int i = 0; i < OWNERS; i++)
        CHECK_EQ(pthread_create(&owners[i], NULL, many_loops, counts[i]), 0);
    for (int i = 0; i < OWNERS; i++)
        pthread_join(owners[i], NULL);
    for (int i = 0; i < OWNERS; i++)
        CHECK(all_are(counts[i], 100));
    CHECK_EQ(tu_pool_threads(), 2);
    tu_pool_release();
}

TEST(the_last_release_ends_the_threads_and_the_next_use_starts_them_again) {
    if (test_sanitized())
        SKIP("a sanitizer has threads of its own, and starts none after a fork");
    static _Atomic int counts[ITEMS];
    int before = threads_now();
    for (int round = 1; round <= 3; round++) {
        tu_pool_hold();
        tu_pool_hold();
        tu_pool_run(&(tu_pool_loop){ count_up, counts, ITEMS, 1, 3 });
        tu_pool_release();
        CHECK_EQ(threads_now(), before + 2);
        tu_pool_release();
        CHECK(threads_become(before));
        CHECK(all_are(counts, round));
    }
}

TEST(a_forked_child_has_a_pool_of_its_own) {
    if (test_sanitized())
        SKIP("a sanitizer has threads of its own, and starts none after a fork");
    static _Atomic int counts[ITEMS];
    tu_pool_hold();
    tu_pool_run(&(tu_pool_loop){ count_up, counts, ITEMS, 1, 4 });
    pid_t child = fork();
    if (child == 0) {
        bool alone = tu_pool_threads() == 0;
        tu_pool_run(&(tu_pool_loop){ count_up, counts, ITEMS, 1, 4 });
        _exit(alone && all_are(counts, 2) && tu_pool_threads() == 3 ? 0 : 1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    tu_pool_release();
}

TEST(the_setting_limits_the_threads) {
    CHECK_EQ(setenv("TUTTI_THREADS", "5", 1), 0);
    CHECK_EQ(tu_pool_limit(), 5);
    CHECK_EQ(setenv("TUTTI_THREADS", "0", 1), 0);
    CHECK_EQ(tu_pool_limit(), 0);
    unsetenv("TUTTI_THREADS");
    CHECK(tu_pool_limit() >= 0);
}
