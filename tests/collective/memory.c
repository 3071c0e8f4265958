/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives when memory runs out: each allocation fails in turn; the call fails with a message, nobody hangs, nothing
 * is left behind.
 */
#include <stdatomic.h>
#include <unistd.h>

#include <tutti/collective.h>

#include "values.h"
#include "world/world.h"

static tutti_status use_everything(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), value = 1, sum;
    tutti_call call = TUTTI_CALL_INIT;
    call.timeout_ns = INT64_C(250000000);
    tutti_status status = tutti_all_reduce(group, &value, &sum, 1, TUTTI_I32, TUTTI_SUM, &call);
    if (status == TUTTI_OK) {
        static char in[2][300000], out[2][300000]; /* long enough for the larger slots */
        status = tutti_all_reduce(group, in[rank], out[rank], 300000, TUTTI_U8, TUTTI_SUM, &call);
    }
    tutti_work *work;
    if (status == TUTTI_OK) {
        tutti_call start = call;
        start.work = &work;
        status = tutti_all_reduce(group, &value, &sum, 1, TUTTI_I32, TUTTI_SUM, &start);
        if (status == TUTTI_OK) {
            status = tutti_work_wait(work, call.timeout_ns);
            tutti_work_release(work);
        }
    }
    tutti_batch *batch;
    if (status == TUTTI_OK)
        status = tutti_batch_begin(group, &batch);
    if (status == TUTTI_OK) {
        tutti_call note = call;
        note.batch = batch;
        int got;
        status = tutti_send(group, &value, 1, TUTTI_I32, 1 - rank, 0, &note);
        if (status == TUTTI_OK)
            status = tutti_recv(group, &got, 1, TUTTI_I32, 1 - rank, 0, &note);
        if (status != TUTTI_OK)
            tutti_batch_cancel(batch);
        else
            status = tutti_batch_end(batch, &call);
    }
    if (status == TUTTI_OK)
        status = tutti_barrier(group, &call);
    return status;
}

typedef struct attempt {
    long nth;
    bool delivered;
    _Atomic int open, over; /* ranks */
} attempt;

static void meet(_Atomic int *ranks) {
    atomic_fetch_add(ranks, 1);
    while (atomic_load(ranks) < 2)
        usleep(100);
}

/* The world stands: from now on the n-th allocation of either rank fails. */
static tutti_status try_once(tutti_world *world, void *argument) {
    attempt *attempt = argument;
    meet(&attempt->open);
    if (tutti_world_rank(world) == 0)
        test_fail_arm("malloc,calloc,realloc", attempt->nth);
    tutti_status status = use_everything(world, NULL);
    if (status != TUTTI_OK)
        CHECK(tutti_error_message()[0] != 0);
    meet(&attempt->over);
    if (tutti_world_rank(world) == 0)
        attempt->delivered = test_fail_disarm();
    return TUTTI_OK;
}

/* ---- batches of many messages ---- */

/* A call that failed for want of memory has begun nothing: it can be made again, and the others are none the wiser. */
static tutti_status exchange_many(tutti_world *world, attempt *attempt) {
    enum {
        MANY = 40
    };
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_world_rank(world), in[MANY], out[MANY], one = 1, sum = 0;
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    tutti_call note = TUTTI_CALL_INIT;
    note.batch = batch;
    for (int i = 0; i < MANY; i++) {
        in[i] = rank * 1000 + i;
        CHECK_OK(tutti_send(group, &in[i], 1, TUTTI_I32, 1 - rank, i, &note));
        CHECK_OK(tutti_recv(group, &out[i], 1, TUTTI_I32, 1 - rank, i, &note));
    }
    CHECK_OK(tutti_all_reduce(group, &one, &sum, 1, TUTTI_I32, TUTTI_PRODUCT, &note));
    if (rank == 0 && attempt->nth != 0)
        test_fail_arm_here("malloc", attempt->nth);
    tutti_status status = tutti_batch_end(batch, NULL);
    if (rank == 0 && attempt->nth != 0)
        attempt->delivered = test_fail_disarm();
    if (status != TUTTI_OK)
        return status;
    CHECK(out[7] == (1 - rank) * 1000 + 7 && sum == 1);
    return TUTTI_OK;
}

static tutti_status fail_and_try_again(tutti_world *world, void *argument) {
    attempt *first = argument, none = { .nth = 0 };
    CHECK_OK(exchange_many(world, &none)); /* what the group makes at first use is there */
    if (tutti_world_rank(world) == 0) {
        CHECK_STATUS(exchange_many(world, first), TUTTI_ERROR_MEMORY);
        CHECK(first->delivered);
        tu_record_view view; /* nothing of it runs on */
        CHECK(!tu_recorder_current(tu_job_recorder(world->job, world->local_rank), 0, &view));
    }
    CHECK_OK(exchange_many(world, &none));
    return TUTTI_OK;
}

TEST(a_batch_without_memory_for_its_messages_has_begun_nothing) {
    attempt attempt = { .nth = 1 };
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, fail_and_try_again, &attempt));
}

TEST_LIMIT(collectives_survive_the_failure_of_any_allocation, 120) {
    if (test_sanitized())
        SKIP("takes too long with sanitizers");
    attempt attempt = { .nth = 0, .delivered = true };
    while (attempt.delivered) {
        attempt.nth++;
        attempt.open = attempt.over = 0;
        CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, try_once, &attempt));
    }
    CHECK(attempt.nth > 10);
}
