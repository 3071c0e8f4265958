/* SPDX-License-Identifier: Apache-2.0
 *
 * Closing: it takes nothing back from the others, hides no earlier error, and what is used afterwards is told so.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <tutti/collective.h>
#include <tutti/group.h>
#include <tutti/tutti.h>
#include <unistd.h>

#include "../harness.h"

#define MINUTE INT64_C(60000000000)
#define LONG ((size_t)100000)

/* ---- messages ---- */

/* Workers send one result each and leave; the master takes them in any order, long after. */
TEST_WORLD(what_was_sent_is_received_after_the_sender_has_left, 4) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    if (rank > 0) {
        int32_t result = rank * 10;
        CHECK_OK(tutti_send(group, &result, 1, TUTTI_I32, 0, rank, NULL));
        CHECK_OK(tutti_world_close(world));
        return;
    }
    usleep(200000);
    for (int i = 3; i > 0; i--) {
        int32_t result = 0;
        CHECK_OK(tutti_recv(group, &result, 1, TUTTI_I32, i, i, NULL));
        CHECK_EQ(result, i * 10);
    }
    /* Only now is one of them missed, and only by who asks it for more. */
    int32_t more;
    CHECK_STATUS(tutti_recv(group, &more, 1, TUTTI_I32, 2, 2, NULL), TUTTI_ERROR_GONE);
    CHECK_MESSAGE("rank 2");
    CHECK_OK(tutti_group_check(group));
    CHECK_OK(tutti_world_close(world));
}

TEST_WORLD(messages_of_some_that_left_and_some_that_live_are_received_from_any, 4) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    if (rank > 0) {
        if (rank == 3)
            usleep(300000);
        int32_t result = rank;
        CHECK_OK(tutti_send(group, &result, 1, TUTTI_I32, 0, 0, NULL));
        CHECK_OK(tutti_world_close(world));
        return;
    }
    usleep(100000);
    int32_t sum = 0;
    for (int i = 0; i < 3; i++) {
        int32_t result = 0;
        CHECK_OK(tutti_recv(group, &result, 1, TUTTI_I32, TUTTI_ANY_SOURCE, 0, NULL));
        sum += result;
    }
    CHECK_EQ(sum, 6);
    int32_t more; /* everybody has left */
    CHECK_STATUS(tutti_recv(group, &more, 1, TUTTI_I32, TUTTI_ANY_SOURCE, 0, NULL), TUTTI_ERROR_GONE);
    CHECK_OK(tutti_world_close(world));
}

/* A receive from one that lives does not mind that another left. */
TEST_WORLD(a_rank_that_left_disturbs_only_those_who_need_it, 3) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    int32_t value = 7;
    if (rank == 1) {
        CHECK_OK(tutti_world_close(world));
        return;
    }
    usleep(rank == 2 ? 200000 : 0);
    if (rank == 2)
        CHECK_OK(tutti_send(group, &value, 1, TUTTI_I32, 0, 0, NULL));
    else
        CHECK_OK(tutti_recv(group, &value, 1, TUTTI_I32, 2, 0, TUTTI_OPTIONS(tutti_call, .timeout_ns = MINUTE)));
    CHECK_OK(tutti_world_close(world));
}

/* ---- collectives ---- */

typedef tutti_status operation(tutti_group *group, float *in, float *out);

static tutti_status broadcast(tutti_group *group, float *in, float *out) {
    return tutti_broadcast(group, in, out, 2, TUTTI_F32, 0, NULL);
}
static tutti_status long_broadcast(tutti_group *group, float *in, float *out) {
    return tutti_broadcast(group, in, out, LONG, TUTTI_F32, 0, NULL);
}
static tutti_status reduce(tutti_group *group, float *in, float *out) {
    return tutti_reduce(group, in, out, 2, TUTTI_F32, TUTTI_SUM, 0, NULL);
}
static tutti_status long_reduce(tutti_group *group, float *in, float *out) {
    return tutti_reduce(group, in, out, LONG, TUTTI_F32, TUTTI_SUM, 0, NULL);
}
static tutti_status gather(tutti_group *group, float *in, float *out) {
    return tutti_gather(group, in, out, LONG / 4, TUTTI_F32, 0, NULL);
}
static tutti_status scatter(tutti_group *group, float *in, float *out) {
    return tutti_scatter(group, in, out, LONG / 4, TUTTI_F32, 0, NULL);
}
static tutti_status all_reduce(tutti_group *group, float *in, float *out) {
    return tutti_all_reduce(group, in, out, 2, TUTTI_F32, TUTTI_SUM, NULL);
}
static tutti_status long_all_reduce(tutti_group *group, float *in, float *out) {
    return tutti_all_reduce(group, in, out, LONG, TUTTI_F32, TUTTI_SUM, NULL);
}
static tutti_status all_gather(tutti_group *group, float *in, float *out) {
    return tutti_all_gather(group, in, out, LONG / 4, TUTTI_F32, NULL);
}
static tutti_status all_to_all(tutti_group *group, float *in, float *out) {
    return tutti_all_to_all(group, in, out, LONG / 4, TUTTI_F32, NULL);
}
static tutti_status reduce_scatter(tutti_group *group, float *in, float *out) {
    return tutti_reduce_scatter(group, in, out, LONG / 4, TUTTI_F32, TUTTI_SUM, NULL);
}
static tutti_status barrier(tutti_group *group, float *in, float *out) {
    (void)in, (void)out;
    return tutti_barrier(group, NULL);
}

static operation *const operations[] = {
    broadcast,  long_broadcast,  reduce,     long_reduce, gather,         scatter,
    all_reduce, long_all_reduce, all_gather, all_to_all,  reduce_scatter, barrier
};
#define OPERATIONS ((int)(sizeof operations / sizeof operations[0]))

/* Everybody closes right after its last call, without a barrier; one rank is slow. */
static void close_right_after(tutti_world *world, void *argument) {
    int which = (int)(intptr_t)argument / 8, slow = (int)(intptr_t)argument % 8;
    tutti_group *group = tutti_world_group(world);
    float *in = calloc(LONG, sizeof(float)), *out = calloc(LONG, sizeof(float));
    in[0] = 1;
    bool warm = which % 2 == 0;
    if (warm)
        CHECK_OK(operations[which](group, in, out));
    if (tutti_world_rank(world) == slow)
        usleep(60000);
    CHECK_OK(operations[which](group, in, out));
    CHECK_OK(tutti_world_close(world));
    free(in);
    free(out);
}

TEST_LIMIT(closing_right_after_any_collective_harms_nobody_as_threads, 120) {
    for (int which = 0; which < OPERATIONS; which++)
        for (int slow = 0; slow < 4; slow += 3)
            test_threads(4, close_right_after, (void *)(intptr_t)(which * 8 + slow));
}

TEST_LIMIT(closing_right_after_any_collective_harms_nobody_as_processes, 120) {
    for (int which = 0; which < OPERATIONS; which++)
        for (int slow = 0; slow < 4; slow += 3)
            test_processes(4, close_right_after, (void *)(intptr_t)(which * 8 + slow));
}

/* ---- errors ---- */

TEST_WORLD(a_close_with_live_handles_does_not_hide_why_the_program_gave_up, 2) {
    tutti_group *group = tutti_world_group(world), *made;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &made));
    if (tutti_world_rank(world) == 1)
        CHECK_OK(tutti_group_abort(group, "the loss is NaN"));
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_ABORTED);
    CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_STATE);
    CHECK(strncmp(tutti_error_message(), "world ", 6) == 0); /* what this call is about comes first */
    CHECK_MESSAGE("handles are alive: 1 group; release them before closing");
    CHECK_MESSAGE("What failed before, and may be why: ");
    CHECK_MESSAGE("the loss is NaN");
    tutti_group_release(made);
}

TEST_WORLD(a_close_with_live_handles_tells_what_ended_a_group_when_nobody_asked, 2) {
    tutti_group *group = tutti_world_group(world), *made;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &made));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_group_abort(group, "the loss is NaN"));
    tutti_error_clear();
    CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_STATE);
    CHECK(strncmp(tutti_error_message(), "world ", 6) == 0); /* what this call is about comes first */
    CHECK_MESSAGE("handles are alive: 1 group; release them before closing");
    CHECK_MESSAGE("What failed before, and may be why: ");
    CHECK_MESSAGE("the loss is NaN");
    tutti_group_release(made);
}

TEST_WORLD(a_lent_group_used_after_the_close_is_an_error, 2) {
    tutti_group *group = tutti_world_group(world), *made, *lent;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &made));
    lent = tutti_group_by_name(world, tutti_group_name(made));
    CHECK(lent == made);
    tutti_group_release(made);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_OK(tutti_world_close(world));
    tutti_group *used[] = { group, lent };
    for (int i = 0; i < 2; i++) {
        float value = 1, sum;
        tutti_group *rest;
        CHECK_STATUS(tutti_barrier(used[i], NULL), TUTTI_ERROR_STATE);
        CHECK_MESSAGE("is closed");
        CHECK_STATUS(tutti_all_reduce(used[i], &value, &sum, 1, TUTTI_F32, TUTTI_SUM, NULL), TUTTI_ERROR_STATE);
        CHECK_STATUS(tutti_send(used[i], &value, 1, TUTTI_F32, 0, 0, NULL), TUTTI_ERROR_STATE);
        CHECK_STATUS(tutti_group_check(used[i]), TUTTI_ERROR_STATE);
        CHECK_STATUS(tutti_group_abort(used[i], "too late"), TUTTI_ERROR_STATE);
        CHECK_STATUS(tutti_group_shrink(used[i], NULL, &rest), TUTTI_ERROR_STATE);
        CHECK_EQ(tutti_group_size(used[i]), 2);
    }
    CHECK_STATUS(tutti_group_new(world, NULL, 0, NULL, &made), TUTTI_ERROR_STATE);
    CHECK_STATUS(tutti_world_close(world), TUTTI_ERROR_ARGUMENT);
}

/* ---- leaving together ---- */

TEST_WORLD(ranks_that_finish_leave_together, 4) {
    static _Atomic int calls[64]; /* of threads; of processes each its own */
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world);
    usleep((useconds_t)rank * 30000);
    atomic_fetch_add(&calls[rank], 1);
    float one = 1, sum;
    CHECK_OK(tutti_all_reduce(group, &one, &sum, 1, TUTTI_F32, TUTTI_SUM, NULL));
    CHECK_OK(tutti_world_finish(world, 0));
    CHECK_STATUS(tutti_barrier(group, NULL), TUTTI_ERROR_STATE);
}

TEST_WORLD(a_rank_that_does_not_come_to_the_finish_is_named_and_the_world_is_closed, 2) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 0) {
        CHECK_STATUS(tutti_world_finish(world, test_moment()), TUTTI_ERROR_TIMEOUT);
        CHECK_MESSAGE("rank 1");
        CHECK_STATUS(tutti_world_finish(world, 0), TUTTI_ERROR_STATE);
    } else {
        int32_t never;
        CHECK_STATUS(tutti_recv(group, &never, 1, TUTTI_I32, 0, 0, NULL), TUTTI_ERROR_GONE);
        CHECK_OK(tutti_world_finish(world, MINUTE)); /* the other has closed: nobody is left to wait for */
    }
}

static tutti_status finish_without_one(tutti_world *world, void *argument) {
    (void)argument;
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
    if (tutti_world_rank(world) == 1)
        raise(SIGKILL);
    CHECK_OK(tutti_world_finish(world, MINUTE));
    return TUTTI_OK;
}

TEST(the_dead_are_not_waited_for_at_the_finish) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, finish_without_one, NULL), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 1");
}

/* ---- a close while other threads are in calls ---- */

typedef struct busy {
    tutti_group *group;
    tutti_world *world;
    int what;
    tutti_status status;
} busy;

/* Until the world is closed under it. Whatever the call is, it ends with an error and nothing is used after it is
 * freed: a sanitizer sees to that. */
static void *call_until_it_fails(void *argument) {
    busy *busy = argument;
    float value = 1, sum;
    do {
        tutti_group *made;
        tutti_memory *block;
        switch (busy->what) {
        case 0:
            busy->status = tutti_barrier(busy->group, NULL);
            break;
        case 1:
            busy->status = tutti_all_reduce(busy->group, &value, &sum, 1, TUTTI_F32, TUTTI_SUM, NULL);
            break;
        case 2: /* both would be a circle */
            busy->status = tutti_group_rank(busy->group) == 0
                               ? tutti_recv(busy->group, &value, 1, TUTTI_F32, 1, 0, NULL)
                               : tutti_group_check(busy->group);
            break;
        case 3:
            busy->status = tutti_group_check(busy->group);
            break;
        case 4:
            busy->status = tutti_group_new(busy->world, NULL, 0, NULL, &made);
            if (busy->status == TUTTI_OK)
                tutti_group_release(made);
            break;
        default:
            busy->status = tutti_memory_alloc(busy->world, 100, NULL, &block);
            if (busy->status == TUTTI_OK)
                tutti_memory_release(block);
            break;
        }
    } while (busy->status == TUTTI_OK);
    return NULL;
}

static void close_under_calls(tutti_world *world, void *argument) {
    busy busy = { .group = tutti_world_group(world), .world = world, .what = (int)(intptr_t)argument };
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, call_until_it_fails, &busy), 0);
    usleep((useconds_t)(10000 + 7919 * tutti_world_rank(world)));
    tutti_status status = tutti_world_close(world); /* a block or group may have been made in the last moment */
    CHECK(status == TUTTI_OK || status == TUTTI_ERROR_STATE);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(busy.status == TUTTI_ERROR_STATE || busy.status == TUTTI_ERROR_GONE);
}

TEST_LIMIT(a_close_while_other_threads_are_in_calls_waits_for_them_and_they_get_an_error, 150) {
    for (int what = 0; what < 6; what++)
        for (int round = 0; round < 3; round++) {
            test_threads(2, close_under_calls, (void *)(intptr_t)what);
            test_processes(2, close_under_calls, (void *)(intptr_t)what);
        }
}
