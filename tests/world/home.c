/* SPDX-License-Identifier: Apache-2.0
 *
 * Where ranks begin that outnumber their CPUs. The calls by which a thread is moved, and the one that says where it is,
 * are this file's: so a test sees each of them, whatever the kernel does between two lines.
 */
#include "base/home.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <tutti/tutti.h>

#include "../harness.h"
#include "base/clock.h"
#include "base/wait.h"

/* How often the calling thread asked for other CPUs and for a single one, where it was then, and what it asked for
 * last.
 */
static _Thread_local struct {
    int calls, homes;
    int home, cpu;
    cpu_set_t last;
} moved;
static _Thread_local int pretended = -1; /* where sched_getcpu says that this thread is; -1: where it is */
static bool forbidden;                   /* as by a seccomp filter */
static bool crowded;                     /* where a thread is sent, somebody else computes for 3 ms */
static int meanwhile = -1;               /* to which CPU somebody else binds a thread that was just sent somewhere */

static int real_cpu(void) {
    unsigned cpu = 0;
    return syscall(SYS_getcpu, &cpu, NULL, NULL) == 0 ? (int)cpu : -1;
}

int sched_getcpu(void) {
    return pretended >= 0 ? pretended : real_cpu();
}

static void bind_to(int cpu) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    CHECK_EQ(syscall(SYS_sched_setaffinity, 0, sizeof one, &one), 0);
}

int sched_setaffinity(pid_t pid, size_t bytes, const cpu_set_t *set) {
    if (forbidden)
        return -1;
    int failed = (int)syscall(SYS_sched_setaffinity, pid, bytes, set);
    moved.calls++;
    moved.last = *set;
    if (CPU_COUNT(set) != 1)
        return failed;
    moved.homes++;
    moved.cpu = real_cpu();
    for (moved.home = 0; !CPU_ISSET(moved.home, set);)
        moved.home++;
    if (crowded)
        usleep(3000);
    if (meanwhile >= 0)
        bind_to(meanwhile);
    return failed;
}

static tu_cpus set_of(const int *cpus, int count) {
    tu_cpus set = { 0 };
    for (int i = 0; i < count; i++)
        set.words[cpus[i] / 64] |= UINT64_C(1) << (cpus[i] % 64);
    return set;
}

/* The first two CPUs that this process may use. */
static void find_two(int two[2]) {
    cpu_set_t set;
    int found = 0;
    CHECK_EQ(sched_getaffinity(0, sizeof set, &set), 0);
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++)
        if (CPU_ISSET(cpu, &set))
            two[found++] = cpu;
    if (found < 2)
        SKIP("only one CPU may be used");
}

/* The thread was sent to `cpu`, where it was for certain until it was given `allowed` back. */
static void expect_sent(int cpu, const cpu_set_t *allowed) {
    cpu_set_t now;
    CHECK(moved.homes >= 1 && moved.calls > moved.homes);
    CHECK_EQ(moved.home, cpu);
    CHECK_EQ(moved.cpu, cpu);
    CHECK(CPU_COUNT(&moved.last) > 1);
    CHECK_EQ(sched_getaffinity(0, sizeof now, &now), 0);
    CHECK(CPU_EQUAL(&now, allowed));
}

TEST(neighbours_share_a_cpu_and_the_shares_are_equal) {
    tu_cpus two = set_of((int[]){ 3, 70 }, 2);
    CHECK_EQ(tu_cpus_count(&two), 2);
    for (int rank = 0; rank < 4; rank++)
        CHECK_EQ(tu_home_of(&two, rank, 4), rank < 2 ? 3 : 70);
    tu_cpus three = set_of((int[]){ 0, 5, 1023 }, 3);
    int shares[3] = { 0, 0, 0 }, before = 0;
    for (int rank = 0; rank < 1000; rank++) {
        int home = tu_home_of(&three, rank, 1000);
        CHECK(home == 0 || home == 5 || home == 1023);
        CHECK(home >= before);
        before = home;
        shares[home == 0 ? 0 : home == 5 ? 1 : 2]++;
    }
    for (int i = 0; i < 3; i++)
        CHECK(shares[i] == 333 || shares[i] == 334);
}

TEST(ranks_that_can_have_a_cpu_each_have_no_home) {
    tu_cpus two = set_of((int[]){ 3, 70 }, 2), one = set_of((int[]){ 7 }, 1), none = { 0 };
    CHECK_EQ(tu_home_of(&two, 1, 2), -1);
    CHECK_EQ(tu_home_of(&two, 0, 1), -1);
    CHECK_EQ(tu_home_of(&one, 3, 8), -1);
    CHECK_EQ(tu_home_of(&none, 3, 8), -1);
}

TEST(who_goes_home_is_there_and_is_not_bound) {
    int two[2];
    cpu_set_t allowed;
    find_two(two);
    CHECK_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    for (int i = 0; i < 4; i++) {
        moved.homes = 0;
        tu_home_go(two[i % 2]);
        CHECK_EQ(moved.homes, 1);
        expect_sent(two[i % 2], &allowed);
    }
}

TEST(nobody_is_sent_where_it_may_not_go) {
    int two[2];
    find_two(two);
    bind_to(two[0]);
    tu_home_go(two[1]);
    tu_home_go(-1);
    tu_home_go(CPU_SETSIZE);
    CHECK_EQ(moved.calls, 0);
}

/* The kernel remembers for which CPUs a thread asked, and would keep it there when its cpuset grows. */
TEST(who_was_free_to_use_every_cpu_is_so_afterwards) {
    int two[2];
    cpu_set_t every, before, after;
    find_two(two);
    memset(&every, 0xff, sizeof every);
    CHECK_EQ(syscall(SYS_sched_setaffinity, 0, sizeof every, &every), 0);
    CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    tu_home_go(two[1]);
    CHECK_EQ(moved.homes, 1);
    CHECK(CPU_EQUAL(&moved.last, &every));
    CHECK_EQ(sched_getaffinity(0, sizeof after, &after), 0);
    CHECK(CPU_EQUAL(&before, &after));
}

TEST(who_was_limited_by_its_user_is_so_afterwards) {
    int two[2];
    cpu_set_t before, after;
    find_two(two);
    bind_to(two[0]);
    CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    for (int i = 0; i < 3; i++) {
        moved.calls = 0;
        tu_home_go(two[0]);
        CHECK(moved.calls == 2 || i == 0); /* what is known is not found out again */
        CHECK_EQ(sched_getaffinity(0, sizeof after, &after), 0);
        CHECK(CPU_EQUAL(&before, &after));
    }
}

TEST(what_somebody_else_binds_meanwhile_counts) {
    int two[2];
    cpu_set_t after;
    find_two(two);
    meanwhile = two[1];
    tu_home_go(two[0]);
    CHECK_EQ(sched_getaffinity(0, sizeof after, &after), 0);
    CHECK_EQ(CPU_COUNT(&after), 1);
    CHECK(CPU_ISSET(two[1], &after));
}

TEST(where_the_kernel_forbids_it_ranks_stay) {
    int two[2];
    cpu_set_t before, after;
    find_two(two);
    CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    forbidden = true;
    tu_home_go(two[1]);
    CHECK_EQ(sched_getaffinity(0, sizeof after, &after), 0);
    CHECK(CPU_EQUAL(&before, &after));
}

static bool never(void *argument) {
    (void)argument;
    return false;
}

static void wait_in_vain(int home) {
    tu_wait wait = { .deadline = tu_clock_now(), .yields = 1, .home = home + 1 };
    CHECK_EQ(tu_wait_until(&wait, never, NULL), TUTTI_ERROR_TIMEOUT);
}

/* In a thread of its own, which has not returned yet: returns, not a second time at once, and again later. False when
 * the machine was too slow to tell: a return that takes long is the last for a while. */
static bool returns_and_not_twice_at_once(const int two[2]) {
    cpu_set_t allowed;
    CHECK_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    pretended = two[1];
    wait_in_vain(-1);
    wait_in_vain(two[1]);
    CHECK_EQ(moved.calls, 0); /* it has no home, and then it is there */
    int64_t began = tu_clock_now();
    wait_in_vain(two[0]);
    CHECK_EQ(moved.homes, 1);
    expect_sent(two[0], &allowed);
    wait_in_vain(two[0]);
    if (tu_clock_now() - began >= TU_MILLISECOND)
        return false;
    CHECK_EQ(moved.homes, 1);
    usleep(20000);
    wait_in_vain(two[0]);
    CHECK_EQ(moved.homes, 2);
    expect_sent(two[0], &allowed);
    return true;
}

static void *try_to_return(void *argument) {
    int *two = argument;
    return returns_and_not_twice_at_once(two) ? two : NULL;
}

TEST(who_waits_elsewhere_returns_and_not_twice_at_once) {
    int two[2];
    find_two(two);
    void *told = NULL;
    for (int i = 0; i < 50 && told == NULL; i++) {
        pthread_t thread;
        CHECK_EQ(pthread_create(&thread, NULL, try_to_return, two), 0);
        CHECK_EQ(pthread_join(thread, &told), 0);
    }
}

TEST(a_home_where_somebody_else_computes_is_left_alone_for_a_while) {
    int two[2];
    find_two(two);
    pretended = two[1];
    crowded = true;
    int64_t began = tu_clock_now();
    wait_in_vain(two[0]);
    CHECK_EQ(moved.homes, 1);
    for (int i = 0; i < 5; i++) {
        usleep(20000);
        wait_in_vain(two[0]);
        if (tu_clock_now() - began > 2 * TU_SECOND)
            SKIP("the machine is too slow");
    }
    CHECK_EQ(moved.homes, 1);
}

/* ---- worlds ---- */

typedef struct crowd {
    int two[2]; /* CPUs that all may use */
    int ranks;
    bool left_alone;
} crowd;

static tutti_status begin_at_home(tutti_world *world, void *argument) {
    const crowd *crowd = argument;
    cpu_set_t allowed;
    int rank = tutti_world_rank(world);
    CPU_ZERO(&allowed);
    CPU_SET(crowd->two[0], &allowed);
    CPU_SET(crowd->two[1], &allowed);
    if (crowd->ranks > 2 && !crowd->left_alone)
        expect_sent(crowd->two[rank * 2 / crowd->ranks], &allowed); /* the last that opening a world does */
    else
        CHECK_EQ(moved.calls, 0);
    return tutti_barrier(tutti_world_group(world), NULL);
}

static crowd crowd_of(int ranks) {
    crowd crowd = { .ranks = ranks };
    cpu_set_t both;
    find_two(crowd.two);
    CPU_ZERO(&both);
    CPU_SET(crowd.two[0], &both);
    CPU_SET(crowd.two[1], &both);
    CHECK_EQ(syscall(SYS_sched_setaffinity, 0, sizeof both, &both), 0);
    return crowd;
}

static void expect_begun(tutti_spawn_kind kind, int ranks) {
    crowd crowd = crowd_of(ranks);
    CHECK_OK(tutti_spawn(kind, ranks, begin_at_home, &crowd));
}

TEST(a_crowd_of_threads_begins_evenly_placed) {
    for (int ranks = 3; ranks <= 6; ranks++)
        expect_begun(TUTTI_SPAWN_THREADS, ranks);
}

TEST(a_crowd_of_processes_begins_evenly_placed) {
    for (int ranks = 3; ranks <= 6; ranks++)
        expect_begun(TUTTI_SPAWN_PROCESSES, ranks);
}

TEST(ranks_with_a_cpu_each_are_left_to_the_kernel) {
    expect_begun(TUTTI_SPAWN_THREADS, 2);
    expect_begun(TUTTI_SPAWN_PROCESSES, 2);
}

TEST(a_setting_leaves_a_crowd_to_the_kernel) {
    crowd crowd = crowd_of(4);
    crowd.left_alone = true;
    setenv("TUTTI_HOMES", "0", 1);
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 4, begin_at_home, &crowd));
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 4, begin_at_home, &crowd));
}

/* Every second rank on the same CPU, as its user wants it. */
static tutti_status bound_by_its_user(tutti_world *first, void *argument) {
    const crowd *crowd = argument;
    int cpu = crowd->two[tutti_world_rank(first) % 2];
    bind_to(cpu);
    moved.calls = 0;
    tutti_world_options options = TUTTI_WORLD_OPTIONS_INIT;
    options.name = "bound";
    tutti_world *world;
    CHECK_OK(tutti_world_open(&options, &world));
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    CHECK_OK(tutti_barrier(tutti_world_group(first), NULL)); /* its home of the first world may lie elsewhere */
    CHECK_EQ(moved.calls, 0);
    CHECK_EQ(real_cpu(), cpu);
    return tutti_world_close(world);
}

TEST(who_is_bound_by_its_user_stays_there) {
    crowd crowd = crowd_of(4);
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 4, bound_by_its_user, &crowd));
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 4, bound_by_its_user, &crowd));
}
