/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults in real collectives, as a user injects them.
 */
#include <tutti/collective.h>
#include <tutti/fault.h>
#include <tutti/group.h>

#include "../harness.h"
#include "base/clock.h"

static tutti_status reduce_five_times(tutti_world *world, void *argument) {
    if (argument != NULL)
        CHECK_OK(tutti_fault_inject(world, argument));
    tutti_group *group = tutti_world_group(world);
    for (int i = 0; i < 5; i++) {
        float in = 1, out = 0;
        tutti_status status = tutti_all_reduce(group, &in, &out, 1, TUTTI_F32, TUTTI_SUM,
                                               TUTTI_OPTIONS(tutti_call, .timeout_ns = 60 * TU_SECOND));
        if (status != TUTTI_OK)
            return status;
    }
    return tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .timeout_ns = 60 * TU_SECOND));
}

static const tutti_spawn_kind kinds[] = { TUTTI_SPAWN_THREADS, TUTTI_SPAWN_PROCESSES };

TEST(a_kill_in_an_all_reduce_is_returned_with_rank_and_signal) {
    setenv("TUTTI_FAULT", "rank=2,op=all_reduce,at=3,do=kill", 1);
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, reduce_five_times, NULL), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 2 (pid ");
    CHECK_MESSAGE("signal 9");
}

TEST(a_failure_in_an_all_reduce_fails_all_ranks_with_its_message) {
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(tutti_spawn(kinds[i], 3, reduce_five_times, "rank=1,op=all_reduce,at=2,do=fail"),
                     TUTTI_ERROR_FAULT);
        CHECK_MESSAGE("all_reduce 3 of group 0");
    }
}

TEST(a_skipped_all_reduce_is_found_as_the_mismatch_that_it_is) {
    for (int i = 0; i < 2; i++) {
        /* Rank 1 comes to the barrier while the others are in the last all_reduce. */
        CHECK_STATUS(tutti_spawn(kinds[i], 3, reduce_five_times, "rank=1,op=all_reduce,at=4,do=skip"),
                     TUTTI_ERROR_MISMATCH);
        CHECK_MESSAGE("barrier");
        CHECK_MESSAGE("all_reduce");
    }
}

static tutti_status skip_a_work(tutti_world *world, void *argument) {
    (void)argument;
    CHECK_OK(tutti_fault_inject(world, "op=all_reduce,at=0,do=skip")); /* on every rank, so that they stay in step */
    float in = 1, out = 0;
    tutti_work *work;
    CHECK_OK(tutti_all_reduce(tutti_world_group(world), &in, &out, 1, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .work = &work)));
    CHECK_OK(tutti_work_wait(work, 0));
    tutti_work_release(work);
    CHECK(out == 0);
    CHECK_OK(tutti_all_reduce(tutti_world_group(world), &in, &out, 1, TUTTI_F32, TUTTI_SUM, NULL));
    CHECK(out == (float)tutti_world_size(world));
    tutti_group *group;
    CHECK_OK(tutti_fault_inject(world, "op=group_new,do=skip"));
    CHECK_STATUS(tutti_group_new(world, NULL, 0, NULL, &group), TUTTI_ERROR_FAULT);
    CHECK_MESSAGE("nothing to return");
    return TUTTI_OK;
}

TEST(a_skipped_work_is_done_and_a_skipped_agreement_has_nothing_to_return) {
    for (int i = 0; i < 2; i++)
        CHECK_OK(tutti_spawn(kinds[i], 2, skip_a_work, NULL));
}

TEST(a_delay_delays_and_the_sum_is_right) {
    int64_t before = tu_clock_now();
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, reduce_five_times, "rank=0,op=all_reduce,at=1,do=delay:60ms"));
    CHECK(tu_clock_now() - before >= 60 * TU_MILLISECOND);
}
