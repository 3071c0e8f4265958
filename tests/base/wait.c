/* SPDX-License-Identifier: Apache-2.0 */
#include "base/wait.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "../harness.h"
#include "base/clock.h"
#include "base/error.h"

static tu_bell bell;
static _Atomic uint32_t sleepers, interrupt_flag;
static _Atomic uint32_t word;
static _Atomic uint64_t ended;

static tu_wait make_wait(int64_t timeout) {
    tu_bell_prepare();
    return (tu_wait){ .deadline = tu_deadline(timeout),
                      .bell = &bell,
                      .sleepers = &sleepers,
                      .interrupt = &interrupt_flag,
                      .ended = &ended,
                      .spins = 10,
                      .yields = 2 };
}

static void *set_later(void *argument) {
    usleep(50000);
    atomic_store_explicit((_Atomic uint32_t *)argument, 5, memory_order_release);
    tu_bell_ring(&sleepers, &bell);
    return NULL;
}

static void *interrupt_later(void *argument) {
    usleep(50000);
    atomic_store_explicit((_Atomic uint32_t *)argument, 1, memory_order_relaxed);
    tu_bell_ring(&sleepers, &bell);
    return NULL;
}

static tutti_status fail_check(void *argument) {
    (void)argument;
    return tu_error(TUTTI_ERROR_DEAD, "rank 2 died");
}

TEST(a_sleeper_is_woken_by_the_bell) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, set_later, &word) == 0);
    tu_wait wait = make_wait(60 * TU_SECOND);
    CHECK_OK(tu_wait_reached(&wait, &word, 5));
    pthread_join(thread, NULL);
    CHECK_EQ(atomic_load(&sleepers), 0);
    CHECK_EQ(atomic_load(&bell.asleep), 0);
}

TEST(a_wait_without_a_bell_polls) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, set_later, &word) == 0);
    tu_wait wait = make_wait(60 * TU_SECOND);
    wait.bell = NULL;
    CHECK_OK(tu_wait_reached(&wait, &word, 5));
    pthread_join(thread, NULL);
}

TEST(the_deadline_ends_a_wait) {
    tu_wait wait = make_wait(30 * TU_MILLISECOND);
    CHECK_STATUS(tu_wait_reached(&wait, &word, 1), TUTTI_ERROR_TIMEOUT);
}

TEST(a_true_condition_wins_over_a_passed_deadline) {
    tu_wait wait = make_wait(1);
    wait.deadline = 1;
    CHECK_OK(tu_wait_reached(&wait, &word, 0));
}

TEST(an_interrupt_ends_a_wait) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, interrupt_later, &interrupt_flag) == 0);
    tu_wait wait = make_wait(60 * TU_SECOND);
    CHECK_STATUS(tu_wait_reached(&wait, &word, 1), TUTTI_ERROR_INTERRUPTED);
    pthread_join(thread, NULL);
}

TEST(the_end_of_its_group_ends_a_wait) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, set_later, &ended) == 0);
    tu_wait wait = make_wait(60 * TU_SECOND);
    CHECK_STATUS(tu_wait_reached(&wait, &word, 1), TUTTI_ERROR_STATE);
    pthread_join(thread, NULL);
}

TEST(a_wait_whose_deadline_has_passed_still_tells_a_death) {
    tu_wait wait = make_wait(1);
    wait.deadline = 1;
    wait.check = fail_check;
    CHECK_STATUS(tu_wait_reached(&wait, &word, 1), TUTTI_ERROR_DEAD);
}

TEST(a_failed_liveness_check_ends_a_wait_with_its_error) {
    tu_wait wait = make_wait(60 * TU_SECOND);
    wait.check = fail_check;
    CHECK_STATUS(tu_wait_reached(&wait, &word, 1), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 2 died");
}

static void *compute(void *argument) {
    const _Atomic uint32_t *over = argument;
    while (atomic_load_explicit(over, memory_order_relaxed) == 0)
        ;
    return NULL;
}

/* Both threads on one CPU: a yield gives it to the one that computes for a slice of time, which is noticed. */
TEST(who_yields_beside_somebody_that_computes_stops_yielding_for_a_while) {
    static _Atomic uint32_t over;
    cpu_set_t before, one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    if (sched_setaffinity(0, sizeof one, &one) != 0)
        SKIP("a thread may not be bound to a CPU here");
    CHECK(tu_give_way());
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, compute, &over) == 0);
    int yields = 0;
    while (tu_give_way() && yields < 1000000)
        yields++;
    CHECK(yields < 1000000);
    CHECK(!tu_give_way()); /* and it is not asked again at once */
    atomic_store_explicit(&over, 1, memory_order_relaxed);
    pthread_join(thread, NULL);
    int64_t end = tu_deadline(60 * TU_SECOND);
    while (!tu_give_way())
        CHECK(tu_clock_now() < end);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
}

TEST(counters_may_wrap) {
    _Atomic uint32_t small = 3;
    tu_wait wait = make_wait(30 * TU_MILLISECOND);
    CHECK_OK(tu_wait_reached(&wait, &small, UINT32_MAX - 2));
    atomic_store(&small, UINT32_MAX - 2);
    CHECK_STATUS(tu_wait_reached(&wait, &small, 3), TUTTI_ERROR_TIMEOUT);
}

TEST(ranks_that_outnumber_the_cores_do_not_spin) {
    tu_wait few = { 0 }, many = { 0 };
    tu_wait_ladder(&few, 2, 2);
    tu_wait_ladder(&many, 8, 2);
    CHECK(few.spins > 0);
    CHECK_EQ(many.spins, 0);
}
