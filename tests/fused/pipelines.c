/* SPDX-License-Identifier: Apache-2.0
 *
 * The two pipelines with a consumer or a producer of the user's.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "support.h"

/* ---- gather and consume ---- */

typedef struct visit {
    int seen[8], order[8], count;
    int fails_at; /* a rank; -1: none */
    tutti_group *group;
    tt_tensor *kept;
} visit;

static tutti_status look(void *argument, tt_tensor_list shards, int rank) {
    visit *state = argument;
    state->seen[rank]++;
    state->order[state->count++] = rank;
    CHECK_EQ(shards.count, 3);
    CHECK(tt_equal(shards.at[0], whole(tt_shape(3, 5), TUTTI_F32, rank)));
    CHECK(tt_equal(shards.at[1], whole(tt_shape(3), TUTTI_U8, 50 + rank))); /* what follows is aligned all the same */
    CHECK(tt_equal(shards.at[2], whole(tt_shape(2, 1, 2), TUTTI_F64, 90 + rank)));
    if (state->kept == NULL)
        state->kept = tt_keep(shards.at[0]);
    if (rank == state->fails_at)
        return TUTTI_ERROR_LIMIT;
    return TUTTI_OK;
}

static tutti_status ignore(void *argument, tt_tensor_list shards, int rank) {
    (void)argument, (void)shards, (void)rank;
    return TUTTI_OK;
}

static const tt_tensor_list none = { 0, NULL };

TEST_WORLD(each_ranks_shards_are_consumed_once_and_the_own_first, 4) {
    BEGIN;
    for (int round = 0; round < 4; round++) {
        tt_tensor *one = whole(tt_shape(3, 5), TUTTI_F32, rank), *two = whole(tt_shape(3), TUTTI_U8, 50 + rank),
                  *three = whole(tt_shape(2, 1, 2), TUTTI_F64, 90 + rank);
        if (round % 2 == 1)
            one = symmetric(world, one);
        tt_tensor *outs[3] = { tt_zeros(tt_shape(12, 5), TUTTI_F32, NULL), tt_zeros(tt_shape(12), TUTTI_U8, NULL),
                               tt_zeros(tt_shape(8, 1, 2), TUTTI_F64, NULL) };
        visit state = { .fails_at = -1, .group = group };
        CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(one, two, three), look, &state,
                                                     round < 2 ? tt_tensors_of(3, outs) : none, group));
        CHECK_EQ(state.count, ranks);
        CHECK_EQ(state.order[0], rank);
        for (int i = 0; i < ranks; i++)
            CHECK_EQ(state.seen[i], 1);
        if (round < 2) {
            CHECK(tt_equal(outs[0], tt_all_gather(one, 0, group)));
            CHECK(tt_equal(outs[1], tt_all_gather(two, 0, group)));
            CHECK(tt_equal(outs[2], tt_all_gather(three, 0, group)));
        }
        /* whoever keeps a lent tensor finds it freed */
        FAILS(tt_sum(state.kept), TUTTI_ERROR_FREED, "freed");
        tt_release(state.kept);
    }
    END;
}

TEST_WORLD(shards_may_lie_in_their_place_of_what_is_gathered, 3) {
    BEGIN;
    for (int round = 0; round < 4; round++) {
        tt_tensor *out = round % 2 == 0 ? tt_zeros(tt_shape(6, 5), TUTTI_F32, NULL)
                                        : symmetric(world, tt_zeros(tt_shape(6, 5), TUTTI_F32, NULL)),
                  *shard = tt_narrow(out, 0, 2 * rank, 2), *before = whole(tt_shape(2, 5), TUTTI_F32, rank + round);
        tt_copy_(shard, before);
        CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(shard), ignore, NULL, tt_tensors(out), group));
        CHECK(tt_equal(out, tt_all_gather(before, 0, group)));
    }
    END;
}

TEST_WORLD(a_consumer_that_fails_fails_its_own_call_alone, 2) {
    BEGIN;
    tt_tensor *one = whole(tt_shape(3, 5), TUTTI_F32, rank), *two = whole(tt_shape(3), TUTTI_U8, 50 + rank),
              *three = whole(tt_shape(2, 1, 2), TUTTI_F64, 90 + rank);
    for (int at = 0; at < 2; at++) {
        visit state = { .fails_at = rank == 0 ? at : -1, .group = group };
        tutti_status status =
            tt_pipelined_all_gather_and_consume(tt_tensors(one, two, three), look, &state, none, group);
        CHECK_EQ(status, rank == 0 ? TUTTI_ERROR_LIMIT : TUTTI_OK);
        if (rank == 0)
            CHECK_MESSAGE("the callback returned");
        tt_release(state.kept);
    }
    CHECK_OK(tutti_group_check(group));
    END;
}

static tutti_status look_away(void *argument, tt_tensor_list shards, int rank) {
    (void)argument, (void)shards, (void)rank;
    return TUTTI_OK;
}

static tutti_status leave_pending(void *argument, tt_tensor_list shards, int rank) {
    (void)rank, (void)argument;
    tt_add(shards.at[0], NULL);
    return TUTTI_OK;
}

TEST_WORLD(an_error_that_a_consumer_leaves_pending_is_returned, 2) {
    BEGIN;
    tt_tensor *one = whole(tt_shape(3, 5), TUTTI_F32, rank);
    CHECK_STATUS(tt_pipelined_all_gather_and_consume(tt_tensors(one), leave_pending, NULL, none, group),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("NULL");
    CHECK_OK(tutti_group_check(group));
    END;
}

/* ---- ranks that come late ---- */

static atomic_int consumed; /* by rank 0 in this round, of those that are not late */

static tutti_status count_those_that_came(void *argument, tt_tensor_list shards, int rank) {
    (void)argument, (void)shards;
    if (rank < 3)
        atomic_fetch_add(&consumed, 1);
    return TUTTI_OK;
}

/* The last rank comes only when rank 0 has worked on all others' shards: who waits for all before it reads one waits
 * for ever. The first round makes the workspace, or has the symmetric shards meet. */
TEST_WORLD_THREADS(shards_are_consumed_as_they_become_ready_while_a_rank_is_late, 4) {
    BEGIN;
    tt_tensor *mine = whole(tt_shape(3, 5), TUTTI_F32, rank), *placed = symmetric(world, mine);
    for (int round = 0; round < 6; round++) {
        tt_tensor *x = round < 3 ? mine : placed;
        if (rank == 0)
            atomic_store(&consumed, 0);
        CHECK_OK(tutti_barrier(group, NULL));
        while (rank == 3 && round % 3 != 0 && atomic_load(&consumed) < 3)
            usleep(100);
        CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(x), rank == 0 ? count_those_that_came : look_away, NULL,
                                                     none, group));
        CHECK_OK(tutti_barrier(group, NULL));
    }
    END;
}

/* ---- calls from within a callback ---- */

/* On the group of the pipeline that the callback belongs to, where nothing of the kind can begin. */
static void check_refused(tutti_group *group) {
    tt_tensor *x = tt_ones(tt_shape(4, 4), TUTTI_F32, NULL);
    CHECK_STATUS(tt_pipelined_all_gather_and_consume(tt_tensors(x), leave_pending, NULL, none, group),
                 TUTTI_ERROR_STATE);
    CHECK_MESSAGE("from a consumer or producer");
    FAILS(tt_fused_all_gather_matmul(x, tt_tensors(x), 0, group, NULL), TUTTI_ERROR_STATE,
          "from a consumer or producer");
    FAILS(tt_fused_all_gather_matmul_multimem(x, tt_tensors(x), group), TUTTI_ERROR_STATE,
          "from a consumer or producer");
    FAILS(tt_fused_matmul_reduce_scatter(x, x, TUTTI_SUM, 0, group), TUTTI_ERROR_STATE, "from a consumer or producer");
    CHECK_OK(tutti_group_check(group));
}

static tutti_status consume_and_call(void *argument, tt_tensor_list shards, int rank) {
    (void)shards, (void)rank;
    check_refused(argument);
    tt_fused_workspace_bytes(argument); /* hangs nobody */
    return TUTTI_OK;
}

static tutti_status produce_and_call(void *argument, int rank, tt_tensor *out) {
    check_refused(argument);
    CHECK(tt_fused_workspace_bytes(argument) > 0);
    tt_fill_(out, rank);
    return TUTTI_OK;
}

TEST_WORLD(a_callback_cannot_begin_another_call_on_its_group_and_is_told_so, 2) {
    BEGIN;
    tt_tensor *x = whole(tt_shape(4, 4), TUTTI_F32, rank), *output = tt_zeros(tt_shape(6), TUTTI_F32, NULL);
    for (int round = 0; round < 2; round++) {
        CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(x), consume_and_call, group, none, group));
        CHECK_OK(tt_pipelined_produce_and_all_to_all(produce_and_call, group, output, 0, group));
        CHECK(tt_equal(output, tt_full(tt_shape(6), rank, TUTTI_F32, NULL)));
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(x), 0, group, NULL).at[0],
                       gathered_product(x, x, 0, group)));
    }
    END;
}

/* A callback that waits for another thread's call on its group would wait for ever. */
typedef struct errand {
    tutti_group *group;
    tutti_status status;
    char words[512];
} errand;

static void *run_errand(void *argument) {
    errand *of = argument;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(4, 4), TUTTI_F32, NULL);
    tt_fused_all_gather_matmul(x, tt_tensors(x), 0, of->group, NULL);
    of->status = tt_error_show();
    snprintf(of->words, sizeof of->words, "%s", tutti_error_message());
    tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
    return NULL;
}

static tutti_status send_a_thread(void *argument, tt_tensor_list shards, int rank) {
    errand *of = argument;
    (void)shards;
    pthread_t thread;
    if (rank != tutti_group_rank(of->group))
        return TUTTI_OK;
    /* From here on: the call under way has its deadline already, so that another rank may be as late as it likes. */
    CHECK_OK(tutti_group_set_timeout(of->group, 200000000));
    CHECK_EQ(pthread_create(&thread, NULL, run_errand, of), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    return TUTTI_OK;
}

TEST_WORLD_THREADS(a_callback_that_waits_for_another_threads_call_is_told_at_the_deadline, 2) {
    BEGIN;
    tt_tensor *x = whole(tt_shape(4, 4), TUTTI_F32, rank);
    errand of = { .group = group };
    tutti_status status = tt_pipelined_all_gather_and_consume(tt_tensors(x), rank == 0 ? send_a_thread : look_away,
                                                              rank == 0 ? (void *)&of : NULL, none, group);
    if (rank == 0) {
        CHECK_EQ(of.status, TUTTI_ERROR_TIMEOUT);
        CHECK(strstr(of.words, "another thread of its own, which is in a fused operation") != NULL);
        CHECK(status != TUTTI_OK); /* the group has ended */
    }
    CHECK(tutti_group_check(group) != TUTTI_OK || rank == 1); /* rank 1 may be done before */
    CHECK_OK(tt_scope_close(&scope));
}

static void *run_other(void *argument) {
    errand *of = argument;
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(4, 4), TUTTI_F32, NULL);
    CHECK_EQ(tt_fused_all_gather_matmul(x, tt_tensors(x), 0, of->group, NULL).count, 1);
    CHECK_OK(tt_scope_close(&scope));
    return NULL;
}

/* Threads that do not wait for each other's calls take turns. */
TEST_WORLD_THREADS(two_threads_of_a_rank_take_turns_in_fused_calls, 2) {
    BEGIN;
    errand of = { .group = group };
    for (int round = 0; round < 4; round++) {
        pthread_t threads[2];
        for (int i = 0; i < 2; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, run_other, &of), 0);
        for (int i = 0; i < 2; i++)
            CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    END;
}

/* ---- produce and exchange ---- */

static tutti_status make(void *argument, int rank, tt_tensor *out) {
    int *me = argument;
    tt_fill_(out, 10 * *me + rank);
    return rank == me[1] ? TUTTI_ERROR_LIMIT : TUTTI_OK;
}

TEST_WORLD(every_rank_receives_the_chunks_made_for_it_along_any_dimension, 3) {
    BEGIN;
    int me[2] = { rank, -1 };
    for (int round = 0; round < 3; round++)
        for (int dim = 0; dim < 3; dim++) {
            tt_tensor *output = tt_zeros(tt_shape(6, 3, 9), round == 1 ? TUTTI_U8 : TUTTI_F32, NULL);
            CHECK_OK(tt_pipelined_produce_and_all_to_all(make, me, output, dim, group));
            tt_tensor_list chunks = tt_chunk(output, ranks, dim);
            for (int from = 0; from < ranks; from++)
                CHECK(tt_equal(chunks.at[from],
                               tt_full(tt_sizes(chunks.at[from]), 10 * from + rank, tt_dtype(output), NULL)));
        }
    CHECK_OK(tt_pipelined_produce_and_all_to_all(make, me, tt_zeros(tt_shape(0, 3), TUTTI_F32, NULL), 0, group));
    END;
}

TEST_WORLD(a_producer_that_fails_fails_the_call_on_every_rank, 3) {
    BEGIN;
    for (int warm = 0; warm < 2; warm++)
        CHECK_OK(tt_pipelined_produce_and_all_to_all(make, (int[]){ rank, -1 }, tt_zeros(tt_shape(6), TUTTI_F32, NULL),
                                                     0, group));
    CHECK_OK(tutti_barrier(group, NULL)); /* nobody is in an earlier call when the group ends */
    tutti_status status = tt_pipelined_produce_and_all_to_all(make, (int[]){ rank, rank == 1 ? 2 : -1 },
                                                              tt_zeros(tt_shape(6), TUTTI_F32, NULL), 0, group);
    CHECK_EQ(status, rank == 1 ? TUTTI_ERROR_LIMIT : TUTTI_ERROR_ABORTED);
    CHECK_MESSAGE(rank == 1 ? "callback returned" : "it could not go on with pipelined_produce_and_all_to_all");
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- arguments ---- */

TEST(wrong_arguments_are_told) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    BEGIN;
    visit state = { .fails_at = -1 };
    tt_tensor *x = whole(tt_shape(4, 3), TUTTI_F32, 0), *turned = tt_transpose(x, 0, 1),
              *small = whole(tt_shape(3, 3), TUTTI_F32, 0), *leaf = tt_require_grad(tt_clone(x), true);
    tt_tensor *many[9] = { x, x, x, x, x, x, x, x, x };
#define GATHER(shards, out) tt_pipelined_all_gather_and_consume(shards, look, &state, out, group)
    CHECK_STATUS(GATHER(tt_tensors(turned), none), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("all tensors in `shard` must be contiguous");
    CHECK_STATUS(GATHER(tt_tensors(x), tt_tensors(turned)), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("all tensors in `ag_out` must be contiguous");
    CHECK_STATUS(GATHER(tt_tensors(x), tt_tensors(small)), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("cannot hold");
    CHECK_STATUS(GATHER(tt_tensors(x), tt_tensors(x, x)), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(GATHER(none, none), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(GATHER(tt_tensors_of(9, many), none), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("1 to 8 shards");
    CHECK_STATUS(GATHER(tt_tensors(NULL), none), TUTTI_ERROR_ARGUMENT);
    tt_tensor_list nowhere = { 1, NULL };
    CHECK_STATUS(GATHER(nowhere, none), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("`shard` is a list of 1 tensors at NULL");
    CHECK_STATUS(GATHER(tt_tensors(x), nowhere), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("`ag_out` is a list of 1 tensors at NULL");
    CHECK_STATUS(GATHER(tt_tensors(x), tt_tensors(leaf)), TUTTI_ERROR_UNSUPPORTED);
    tt_tensor *large = whole(tt_shape(6, 3), TUTTI_F32, 0), *upper = tt_narrow(large, 0, 0, 4),
              *lower = tt_narrow(large, 0, 1, 4);
    CHECK_STATUS(GATHER(tt_tensors(upper), tt_tensors(lower)), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("overlaps another tensor of the call");
    CHECK_STATUS(GATHER(tt_tensors(x, small), tt_tensors(upper, tt_narrow(large, 0, 3, 3))), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("overlaps another tensor of the call");
    CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(tt_clone(small), x), ignore, NULL, tt_tensors(small, x),
                                                 group)); /* in its own place */
    const int64_t huge = INT64_MAX / 2 + 1;
    CHECK_STATUS(GATHER(tt_tensors(tt_empty(tt_shape(huge, 0), TUTTI_F32, NULL)),
                        tt_tensors(tt_empty(tt_shape(2, 0), TUTTI_F32, NULL))),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tt_pipelined_all_gather_and_consume(tt_tensors(x), NULL, NULL, none, group), TUTTI_ERROR_ARGUMENT);
    int me[2] = { 0, -1 };
    CHECK_STATUS(tt_pipelined_produce_and_all_to_all(NULL, me, x, 0, group), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tt_pipelined_produce_and_all_to_all(make, me, NULL, 0, group), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tt_pipelined_produce_and_all_to_all(make, me, turned, 0, group), TUTTI_ERROR_ARGUMENT);
    CHECK_STATUS(tt_pipelined_produce_and_all_to_all(make, me, x, 2, group), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("cannot be cut");
    tt_options options = TT_OPTIONS_INIT;
    options.device = TUTTI_META;
    CHECK_STATUS(GATHER(tt_tensors(tt_empty(tt_shape(2, 2), TUTTI_F32, &options)), none), TUTTI_ERROR_UNSUPPORTED);
    CHECK_OK(tt_pipelined_produce_and_all_to_all(make, me, x, 0, group));
    CHECK(tt_equal(x, tt_zeros_like(x)));
    END;
    CHECK_OK(tutti_world_close(world));
}
