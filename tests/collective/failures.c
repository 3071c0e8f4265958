/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that die, leave, stop coming or are interrupted in the middle of each collective: nobody hangs, and the error
 * says who.
 */
#include <pthread.h>
#include <signal.h>
#include <tutti/collective.h>
#include <tutti/store.h>
#include <unistd.h>

#include "values.h"

#define LONG ((size_t)400000)

typedef tutti_status operation(tutti_group *group, float *in, float *out, const tutti_call *call);

static tutti_status barrier(tutti_group *group, float *in, float *out, const tutti_call *call) {
    (void)in, (void)out;
    return tutti_barrier(group, call);
}
static tutti_status short_reduce(tutti_group *group, float *in, float *out, const tutti_call *call) {
    return tutti_all_reduce(group, in, out, 2, TUTTI_F32, TUTTI_SUM, call);
}
static tutti_status long_reduce(tutti_group *group, float *in, float *out, const tutti_call *call) {
    return tutti_all_reduce(group, in, out, LONG, TUTTI_F32, TUTTI_SUM, call);
}
static tutti_status all_gather(tutti_group *group, float *in, float *out, const tutti_call *call) {
    return tutti_all_gather(group, in, out, LONG / 3, TUTTI_F32, call);
}
static tutti_status broadcast(tutti_group *group, float *in, float *out, const tutti_call *call) {
    return tutti_broadcast(group, in, out, LONG, TUTTI_F32, 0, call);
}
static tutti_status reduce(tutti_group *group, float *in, float *out, const tutti_call *call) {
    return tutti_reduce(group, in, out, LONG, TUTTI_F32, TUTTI_SUM, 0, call);
}
static tutti_status reduce_scatter(tutti_group *group, float *in, float *out, const tutti_call *call) {
    return tutti_reduce_scatter(group, in, out, LONG / 3, TUTTI_F32, TUTTI_SUM, call);
}
static tutti_status all_to_all(tutti_group *group, float *in, float *out, const tutti_call *call) {
    return tutti_all_to_all(group, in, out, LONG / 3, TUTTI_F32, call);
}
static tutti_status gather(tutti_group *group, float *in, float *out, const tutti_call *call) {
    return tutti_gather(group, in, out, LONG / 3, TUTTI_F32, 0, call);
}
static tutti_status ring(tutti_group *group, float *in, float *out, const tutti_call *call) {
    (void)call;
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tutti_work *work;
    tutti_status status =
        tutti_recv(group, out, LONG, TUTTI_F32, (rank + 1) % size, 0, TUTTI_OPTIONS(tutti_call, .work = &work));
    if (status != TUTTI_OK)
        return status;
    status = tutti_send(group, in, LONG, TUTTI_F32, (rank + size - 1) % size, 0, NULL);
    tutti_status received = tutti_work_wait(work, 0);
    tutti_work_release(work);
    return status != TUTTI_OK ? status : received;
}

static const struct {
    const char *name;
    operation *run;
} operations[] = {
    { "barrier", barrier },       { "short all_reduce", short_reduce }, { "all_reduce", long_reduce },
    { "all_gather", all_gather }, { "broadcast", broadcast },           { "reduce", reduce },
    { "gather", gather },         { "reduce_scatter", reduce_scatter }, { "all_to_all", all_to_all },
    { "send and recv", ring },
};

static void *kill_soon(void *argument) {
    (void)argument;
    usleep(30000);
    kill(getpid(), SIGKILL);
    return NULL;
}

/* The last rank is killed at some moment of an endless row of operations; the others have a minute, and must see the
 * death instead. */
static tutti_status lose_a_rank(tutti_world *world, void *argument) {
    operation *run = operations[(size_t)(uintptr_t)argument].run;
    tutti_group *group = tutti_world_group(world);
    int size = tutti_world_size(world);
    float *in = calloc(LONG, 4), *out = calloc(LONG, 4);
    CHECK_OK(tutti_barrier(group, NULL));
    pthread_t killer;
    if (tutti_world_rank(world) == size - 1)
        CHECK(pthread_create(&killer, NULL, kill_soon, NULL) == 0);
    tutti_call call = TUTTI_CALL_INIT;
    call.timeout_ns = INT64_C(60000000000);
    tutti_status status;
    do
        status = run(group, in, out, &call);
    while (status == TUTTI_OK);
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 2");
    tutti_error_info info = TUTTI_ERROR_INFO_INIT;
    CHECK_OK(tutti_error_detail(&info));
    CHECK_EQ(info.at_fault[0], size - 1);
    free(in);
    free(out);
    return TUTTI_OK;
}

TEST(the_death_of_a_rank_in_any_collective_is_told_to_all_others) {
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        tutti_status status = tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, lose_a_rank, (void *)(uintptr_t)i);
        if (status != TUTTI_ERROR_DEAD || strstr(tutti_error_message(), "rank 2") == NULL)
            FAIL("%s: %s: %s", operations[i].name, tutti_status_name(status), tutti_error_message());
    }
}

/* ---- late, leaving, interrupted ---- */

static void until_it_has_ended(tutti_group *group) {
    while (tutti_group_check(group) == TUTTI_OK)
        usleep(1000);
}

/* What one rank tells the other beside the group. */
static void tell(tutti_world *world, const char *what) {
    CHECK_OK(tutti_store_set(tutti_world_store(world), what, "", 0));
}

static void hear(tutti_world *world, const char *what) {
    CHECK_OK(tutti_store_wait(tutti_world_store(world), &what, 1, 0));
}

TEST_WORLD(a_rank_that_does_not_come_is_named_when_the_deadline_passes, 3) {
    tutti_group *group = tutti_world_group(world);
    float value = 1, sum;
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) != 1) {
        tutti_call call = TUTTI_CALL_INIT;
        call.timeout_ns = test_moment();
        CHECK_STATUS(tutti_all_reduce(group, &value, &sum, 1, TUTTI_F32, TUTTI_SUM, &call), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 1");
        CHECK_MESSAGE("all_reduce");
    } else {
        until_it_has_ended(group);
        CHECK_STATUS(tutti_all_reduce(group, &value, &sum, 1, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_TIMEOUT);
    }
}

TEST_WORLD(a_rank_that_left_properly_is_told_as_gone, 2) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1)
        return;
    float *in = calloc(LONG, 4), *out = calloc(LONG, 4);
    CHECK_STATUS(tutti_all_reduce(group, in, out, LONG, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_GONE);
    CHECK_MESSAGE("rank 1");
    free(in);
    free(out);
}

/* A work that is only ever tested ends too. */
static tutti_status test_until_finished(tutti_group *group, int64_t timeout_ns) {
    float value = 1, sum;
    tutti_work *work;
    CHECK_OK(tutti_all_reduce(group, &value, &sum, 1, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .work = &work, .timeout_ns = timeout_ns)));
    bool finished = false;
    while (!finished)
        CHECK_OK(tutti_work_test(work, &finished));
    tutti_status status = tutti_work_wait(work, 0);
    tutti_work_release(work);
    return status;
}

TEST_WORLD(a_work_that_is_only_tested_ends_with_its_deadline, 2) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 0) {
        CHECK_STATUS(test_until_finished(group, 100000000), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 1");
    } else {
        until_it_has_ended(group); /* the other has given up */
    }
}

static tutti_status lose_a_rank_while_testing(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1)
        raise(SIGKILL);
    CHECK_STATUS(test_until_finished(group, INT64_C(600000000000)), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 1");
    return TUTTI_OK;
}

TEST(a_work_that_is_only_tested_ends_with_the_death_of_a_rank) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, lose_a_rank_while_testing, NULL), TUTTI_ERROR_DEAD);
}

static void *interrupt_soon(void *argument) {
    usleep(50000);
    tutti_world_interrupt(argument);
    return NULL;
}

TEST_WORLD(an_interrupt_ends_the_wait_and_the_group, 2) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, interrupt_soon, world) == 0);
        CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_INTERRUPTED);
        pthread_join(thread, NULL);
        tutti_world_resume(world);
    } else {
        until_it_has_ended(group);
    }
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_INTERRUPTED);
}

/* So long that a helper thread runs it. */
#define LONG_COUNT (1 << 18)

TEST_WORLD(an_interrupt_ends_a_work_that_is_under_way_and_its_group, 2) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 0) {
        int *numbers = calloc(LONG_COUNT, sizeof *numbers);
        tutti_work *work;
        CHECK(numbers != NULL);
        CHECK_OK(tutti_all_reduce(group, numbers, numbers, LONG_COUNT, TUTTI_I32, TUTTI_SUM,
                                  TUTTI_OPTIONS(tutti_call, .work = &work)));
        tutti_world_interrupt(world); /* nobody waits for it but the helper */
        until_it_has_ended(group);
        tutti_world_resume(world);
        CHECK_STATUS(tutti_work_wait(work, 0), TUTTI_ERROR_INTERRUPTED);
        CHECK_MESSAGE("tutti_world_interrupt");
        tutti_work_release(work);
        free(numbers);
    } else {
        until_it_has_ended(group);
    }
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_INTERRUPTED);
}

TEST_WORLD(an_abort_ends_a_work_that_nobody_finishes, 2) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 0) {
        int one = 1, sum;
        tutti_work *work;
        CHECK_OK(
            tutti_all_reduce(group, &one, &sum, 1, TUTTI_I32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &work)));
        tell(world, "started");
        CHECK_STATUS(tutti_work_wait(work, 0), TUTTI_ERROR_ABORTED);
        CHECK_MESSAGE("enough");
        tutti_work_release(work);
    } else {
        hear(world, "started");
        CHECK_OK(tutti_group_abort(group, "enough"));
    }
}
