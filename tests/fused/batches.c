/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused operations while a batch of collectives is open on their group, or on its way as a work. A batch is a list that
 * a rank keeps until it ends it: what is called meanwhile, fused forms and their gradients too, comes before it, and
 * what is called after its end comes behind it.
 */
#include <signal.h>

#include <tutti/collective.h>

#include "support.h"

#define MINUTE ((int64_t)60 * 1000000000)
#define LONG 40000 /* elements of a collective that takes a while */

/* ---- a batch of every kind of call ---- */

typedef struct batched {
    tutti_group *group;
    tutti_batch *batch; /* NULL: this rank has none */
    int rank, ranks;
    int32_t one, two, sums[2], gathered[8], sent, received;
    int32_t many[LONG];
} batched;

static const tutti_call *in(const batched *of) {
    static _Thread_local tutti_call call;
    call = (tutti_call)TUTTI_CALL_INIT;
    call.batch = of->batch;
    return &call;
}

/* Calls that others answer: all ranks need a batch. */
static void note_collectives(batched *of) {
    of->one = of->rank + 1;
    of->two = 10;
    for (int i = 0; i < LONG; i++)
        of->many[i] = i;
    CHECK_OK(tutti_all_reduce(of->group, &of->one, &of->sums[0], 1, TUTTI_I32, TUTTI_SUM, in(of)));
    CHECK_OK(tutti_all_reduce(of->group, &of->two, &of->sums[1], 1, TUTTI_I32, TUTTI_SUM, in(of)));
    CHECK_OK(tutti_all_gather(of->group, &of->one, of->gathered, 1, TUTTI_I32, in(of)));
    CHECK_OK(tutti_all_reduce(of->group, of->many, of->many, LONG, TUTTI_I32, TUTTI_SUM, in(of)));
}

static void note_messages(batched *of) {
    of->sent = 100 + of->rank;
    CHECK_OK(tutti_send_recv(of->group, &of->sent, 1, (of->rank + 1) % of->ranks, &of->received, 1,
                             (of->rank + of->ranks - 1) % of->ranks, TUTTI_I32, 7, in(of)));
}

static batched *batch_of(tutti_group *group) {
    batched *of = calloc(1, sizeof *of);
    CHECK(of != NULL);
    of->group = group;
    of->rank = tutti_group_rank(group);
    of->ranks = tutti_group_size(group);
    CHECK_OK(tutti_batch_begin(group, &of->batch));
    return of;
}

/* Nothing of the batch has run. */
static void check_untouched(const batched *of) {
    CHECK(of->sums[0] == 0 && of->sums[1] == 0 && of->received == 0 && of->many[2] == 2);
    for (int i = 0; i < 8; i++)
        CHECK_EQ(of->gathered[i], 0);
}

static void check_done(batched *of) {
    CHECK_EQ(of->sums[0], of->ranks * (of->ranks + 1) / 2);
    CHECK_EQ(of->sums[1], 10 * of->ranks);
    for (int i = 0; i < of->ranks; i++)
        CHECK_EQ(of->gathered[i], i + 1);
    for (int i = 0; i < LONG; i++)
        CHECK_EQ(of->many[i], i * of->ranks);
    CHECK_EQ(of->received, 100 + (of->rank + of->ranks - 1) % of->ranks);
    free(of);
}

/* ---- every fused form beside the unfused pair ---- */

static tutti_status sum_shards(void *argument, tt_tensor_list shards, int rank) {
    (void)rank;
    tt_add_(argument, shards.at[0]);
    return TUTTI_OK;
}

static tutti_status fill(void *argument, int rank, tt_tensor *out) {
    const int *mine = argument;
    tt_fill_(out, 10 * *mine + rank);
    return TUTTI_OK;
}

static void check_pipelines(tutti_group *group) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_tensor *x = whole(tt_shape(4, 6), TUTTI_F32, rank), *sum = tt_zeros(tt_shape(4, 6), TUTTI_F32, NULL),
              *all = tt_zeros(tt_shape(4 * ranks, 6), TUTTI_F32, NULL),
              *output = tt_zeros(tt_shape(ranks), TUTTI_F32, NULL);
    CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(x), sum_shards, sum, tt_tensors(all), group));
    CHECK(tt_equal(sum, tt_all_reduce(x, TUTTI_SUM, group)) && tt_equal(all, tt_all_gather(x, 0, group)));
    CHECK_OK(tt_pipelined_produce_and_all_to_all(fill, &rank, output, 0, group));
    CHECK(tt_equal(output, tt_add_scalar(tt_mul_scalar(tt_arange(0, ranks, 1, TUTTI_F32, NULL), 10), rank)));
}

static void check_scaled(tutti_group *group) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_tensor *x = whole(tt_shape(2 * ranks, 6), TUTTI_F8_E4M3, rank),
              *right = whole(tt_shape(6, 8), TUTTI_F8_E4M3, 40),
              *of_x = tt_add_scalar(whole(tt_shape(2 * ranks, 1), TUTTI_F32, rank + 60), 4),
              *one = tt_full(tt_shape(1), 2, TUTTI_F32, NULL);
    tt_fused_scaled_options options = TT_FUSED_SCALED_OPTIONS_INIT;
    options.out_dtypes = &(tutti_dtype){ TUTTI_F32 };
    options.out_dtype_count = 1;
    tt_tensor_list products =
        tt_fused_all_gather_scaled_matmul(x, tt_tensors(right), of_x, tt_tensors(one), 0, group, &options, NULL);
    tt_tensor *own = tt_scaled_matmul(x, right, of_x, one, NULL, NULL, TUTTI_F32, false);
    CHECK_EQ(products.count, 1);
    CHECK(tt_equal(products.at[0], tt_all_gather(own, 0, group)));
    CHECK(tt_equal(tt_fused_scaled_matmul_reduce_scatter(x, right, of_x, one, TUTTI_SUM, 0, 0, tt_shape(2 * ranks, 8),
                                                         NULL, NULL, TUTTI_F32, false, group),
                   tt_reduce_scatter(own, TUTTI_SUM, 0, group)));
}

static void check_forms(tutti_world *world, tutti_group *group) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_tensor *x = whole(tt_shape(2 * ranks, 6), TUTTI_F32, rank), *right = whole(tt_shape(6, 8), TUTTI_F32, 40 + rank),
              *placed = symmetric(world, x), *expected = gathered_product(x, right, 0, group),
              *scattered = tt_reduce_scatter(tt_matmul(x, right), TUTTI_SUM, 0, group), *all;
    for (int round = 0; round < 2; round++) {
        CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, &all).at[0], expected));
        CHECK(tt_equal(all, tt_all_gather(x, 0, group)));
        CHECK(tt_equal(tt_fused_all_gather_matmul(placed, tt_tensors(right), 0, group, NULL).at[0], expected));
        CHECK(tt_equal(tt_fused_all_gather_matmul_native(x, right, group, NULL), expected));
        CHECK(tt_equal(tt_fused_all_gather_matmul_multimem(x, tt_tensors(right), group).at[0], expected));
        CHECK(tt_equal(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group), scattered));
        check_scaled(group);
        check_pipelines(group);
    }
}

/* The gradients of both halves of a layer, whose own gradients are fused forms. */
static void check_gradients(tutti_group *group) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_tensor *grads[2][3];
    for (int fused = 0; fused < 2; fused++) {
        tt_tensor *leaves[3] = { whole(tt_shape(2 * ranks, 6), TUTTI_F64, rank),
                                 whole(tt_shape(6, 4), TUTTI_F64, 70 + rank),
                                 whole(tt_shape(4, 6), TUTTI_F64, 80 + rank) };
        for (int i = 0; i < 3; i++)
            tt_require_grad(leaves[i], true);
        tt_tensor *h = fused ? tt_fused_all_gather_matmul(leaves[0], tt_tensors(leaves[1]), 0, group, NULL).at[0]
                             : gathered_product(leaves[0], leaves[1], 0, group),
                  *y = fused ? tt_fused_matmul_reduce_scatter(h, leaves[2], TUTTI_SUM, 0, group)
                             : tt_reduce_scatter(tt_matmul(h, leaves[2]), TUTTI_SUM, 0, group);
        tt_backward(tt_sum(tt_mul(y, y)), NULL);
        for (int i = 0; i < 3; i++)
            grads[fused][i] = tt_grad(leaves[i]);
    }
    for (int i = 0; i < 3; i++)
        CHECK(grads[0][i] != NULL && grads[1][i] != NULL && tt_equal(grads[0][i], grads[1][i]));
}

/* ---- open batches ---- */

static void open_while_forms_run(tutti_world *world, void *argument) {
    BEGIN;
    (void)argument;
    for (int as_work = 0; as_work < 2; as_work++) {
        batched *of = batch_of(group);
        note_collectives(of);
        check_forms(world, group);
        note_messages(of); /* between two forms: where a call is noted does not matter, where the batch ends does */
        check_gradients(group);
        check_untouched(of);
        tutti_work *work = NULL;
        CHECK_OK(tutti_batch_end(of->batch, as_work ? TUTTI_OPTIONS(tutti_call, .work = &work) : NULL));
        if (as_work) { /* numbered now: what follows comes behind it */
            check_forms(world, group);
            check_gradients(group);
            CHECK_OK(tutti_work_wait(work, 0));
            tutti_work_release(work);
        }
        check_done(of);
    }
    END;
}

TEST(forms_and_gradients_run_while_a_batch_is_open_or_on_its_way) {
    setenv("TUTTI_MULTICAST", "software", 1);
    test_threads(2, open_while_forms_run, NULL);
    test_threads(3, open_while_forms_run, NULL);
    test_processes(2, open_while_forms_run, NULL);
}

TEST(forms_of_ranks_with_several_threads_run_while_a_batch_is_open_or_on_its_way) {
    setenv("TUTTI_MULTICAST", "software", 1);
    setenv("TUTTI_THREADS", "2", 1);
    test_threads(2, open_while_forms_run, NULL);
    test_processes(2, open_while_forms_run, NULL);
}

TEST_WORLD(a_batch_of_one_rank_alone_disturbs_nobody, 3) {
    BEGIN;
    for (int who = 0; who < ranks; who++)
        for (int cancelled = 0; cancelled < 2; cancelled++) {
            batched *of = rank == who ? batch_of(group) : NULL;
            int32_t sent = 5, received = 0;
            if (of != NULL) /* to itself: nobody answers, and nobody has to */
                CHECK_OK(tutti_send_recv(group, &sent, 1, rank, &received, 1, rank, TUTTI_I32, 3, in(of)));
            check_pipelines(group);
            check_scaled(group);
            check_gradients(group);
            CHECK_EQ(received, 0);
            if (of != NULL && cancelled)
                tutti_batch_cancel(of->batch);
            else if (of != NULL)
                CHECK_OK(tutti_batch_end(of->batch, NULL));
            CHECK_EQ(received, of != NULL && !cancelled ? 5 : 0);
            free(of);
        }
    END;
}

TEST_WORLD(a_batch_works_on_what_a_fused_form_has_made_by_its_end, 2) {
    BEGIN;
    tt_tensor *x = whole(tt_shape(4, 6), TUTTI_F32, rank), *right = whole(tt_shape(6, 8), TUTTI_F32, 40 + rank),
              *output = tt_zeros(tt_shape(ranks), TUTTI_F32, NULL);
    float sums[2] = { 0 };
    tutti_batch *batch;
    CHECK_OK(tutti_batch_begin(group, &batch));
    CHECK_OK(tutti_all_reduce(group, tt_data(output), sums, 2, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .batch = batch)));
    CHECK_OK(tt_pipelined_produce_and_all_to_all(fill, &rank, output, 0, group));
    CHECK_OK(tutti_batch_end(batch, NULL)); /* reads what the pipeline has written since */
    CHECK(sums[0] == 1 && sums[1] == 21);   /* 0 + 1, 10 + 11 */
    CHECK(tt_equal(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0],
                   gathered_product(x, right, 0, group)));
    END;
}

/* ---- batches of the tensor library ---- */

TEST_WORLD(what_coalesced_collectives_bring_is_waited_for, 2) {
    BEGIN;
    for (int round = 0; round < 4; round++) {
        tt_tensor *x = tt_require_grad(whole(tt_shape(4, 6), TUTTI_F32, rank), true),
                  *right = tt_require_grad(whole(tt_shape(6, 8), TUTTI_F32, 40 + rank), true),
                  *later = whole(tt_shape(LONG), TUTTI_F32, rank);
        tt_tensor_list sums = tt_all_reduce_coalesced(tt_tensors(x, right, later), TUTTI_SUM, group);
        CHECK_EQ(sums.count, 3);
        tt_tensor *y = tt_fused_all_gather_matmul(sums.at[0], tt_tensors(sums.at[1]), 0, group, NULL).at[0],
                  *part = tt_fused_matmul_reduce_scatter(sums.at[0], sums.at[1], TUTTI_SUM, 0, group),
                  *one = tt_all_reduce(x, TUTTI_SUM, group), *two = tt_all_reduce(right, TUTTI_SUM, group);
        CHECK(tt_equal(y, gathered_product(one, two, 0, group)));
        CHECK(tt_equal(part, tt_reduce_scatter(tt_matmul(one, two), TUTTI_SUM, 0, group)));
        CHECK(tt_equal(sums.at[2], tt_all_reduce(later, TUTTI_SUM, group)));
        tt_backward(tt_add(tt_sum(y), tt_sum(tt_mul(part, part))), NULL);
        tt_tensor *of_x = tt_clone(tt_grad(x)), *of_right = tt_clone(tt_grad(right));
        tt_set_grad(x, NULL);
        tt_set_grad(right, NULL);
        tt_tensor *again = gathered_product(one, two, 0, group),
                  *cut = tt_reduce_scatter(tt_matmul(one, two), TUTTI_SUM, 0, group);
        tt_backward(tt_add(tt_sum(again), tt_sum(tt_mul(cut, cut))), NULL);
        CHECK(tt_equal(of_x, tt_grad(x)) && tt_equal(of_right, tt_grad(right)));
    }
    END;
}

TEST_WORLD(messages_of_a_batch_on_their_way_are_waited_for_as_inputs_and_else_left_alone, 2) {
    BEGIN;
    for (int round = 0; round < 4; round++) {
        tt_tensor *x = whole(tt_shape(4, 6), TUTTI_F32, rank), *theirs = tt_zeros(tt_shape(4, 6), TUTTI_F32, NULL),
                  *right = whole(tt_shape(6, 8), TUTTI_F32, 40);
        tt_p2p both[2] = { { .kind = TT_P2P_SEND, .tensor = x, .peer = 1 - rank, .tag = round },
                           { .kind = TT_P2P_RECV, .tensor = theirs, .peer = 1 - rank, .tag = round } };
        tt_tensor_list moved = tt_batch_p2p(2, both, group);
        CHECK_EQ(moved.count, 2);
        CHECK(tt_equal(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group),
                       tt_reduce_scatter(tt_matmul(x, right), TUTTI_SUM, 0, group)));
        tt_tensor *swapped = whole(tt_shape(4, 6), TUTTI_F32, 1 - rank);
        CHECK(tt_equal(tt_fused_all_gather_matmul(moved.at[1], tt_tensors(right), 0, group, NULL).at[0],
                       gathered_product(swapped, right, 0, group)));
    }
    END;
}

/* ---- from within a callback ---- */

static tutti_status note_inside(void *argument, tt_tensor_list shards, int rank) {
    batched *of = argument;
    (void)shards;
    if (rank == of->rank)
        note_collectives(of);
    else
        check_untouched(of);
    return TUTTI_OK;
}

TEST_WORLD(a_callback_may_note_calls_in_a_batch_that_ends_later, 2) {
    BEGIN;
    tt_tensor *x = whole(tt_shape(4, 6), TUTTI_F32, rank);
    batched *of = batch_of(group);
    note_messages(of);
    CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(x), note_inside, of, (tt_tensor_list){ 0, NULL }, group));
    check_untouched(of);
    CHECK_OK(tutti_batch_end(of->batch, NULL));
    check_done(of);
    END;
}

static tutti_status run_inside(void *argument, tt_tensor_list shards, int rank) {
    tutti_group *other = argument;
    (void)shards;
    if (rank != tutti_group_rank(other))
        return TUTTI_OK;
    batched *of = batch_of(other);
    note_collectives(of);
    note_messages(of);
    CHECK_OK(tutti_batch_end(of->batch, NULL));
    check_done(of);
    return TUTTI_OK;
}

TEST_WORLD(a_callback_may_run_a_batch_on_another_group, 2) {
    BEGIN;
    tutti_group *other;
    CHECK_OK(tutti_group_new_subgroups(group, ranks, NULL, NULL, &other));
    tt_tensor *x = whole(tt_shape(4, 6), TUTTI_F32, rank);
    for (int round = 0; round < 2; round++)
        CHECK_OK(
            tt_pipelined_all_gather_and_consume(tt_tensors(x), run_inside, other, (tt_tensor_list){ 0, NULL }, group));
    CHECK_OK(tutti_group_destroy(other));
    tutti_group_release(other);
    END;
}

/* ---- what goes wrong ---- */

TEST_WORLD(a_form_that_fails_on_all_ranks_leaves_the_batch_as_it_is, 3) {
    BEGIN;
    tt_tensor *right = whole(tt_shape(4, 6), TUTTI_F32, 1);
    for (int as_work = 0; as_work < 2; as_work++) {
        batched *of = batch_of(group);
        note_collectives(of);
        FAILS(tt_fused_all_gather_matmul(whole(tt_shape(rank == 1 ? 9 : 6, 4), TUTTI_F32, rank), tt_tensors(right), 0,
                                         group, NULL),
              TUTTI_ERROR_MISMATCH, "but rank 1 calls fused_all_gather_matmul along dimension 0 of f32 [9, 4]");
        FAILS(tt_fused_matmul_reduce_scatter(whole(tt_shape(6, 4), TUTTI_F32, rank), right,
                                             rank == 0 ? TUTTI_AVG : TUTTI_SUM, 0, group),
              TUTTI_ERROR_MISMATCH, "rank 0 calls fused_matmul_reduce_scatter avg");
        note_messages(of);
        check_untouched(of);
        tutti_work *work = NULL;
        CHECK_OK(tutti_batch_end(of->batch, as_work ? TUTTI_OPTIONS(tutti_call, .work = &work) : NULL));
        if (as_work) {
            FAILS(tt_fused_all_gather_matmul(whole(tt_shape(rank == 1 ? 9 : 6, 4), TUTTI_F32, rank), tt_tensors(right),
                                             0, group, NULL),
                  TUTTI_ERROR_MISMATCH, "but rank 1 calls fused_all_gather_matmul");
            CHECK_OK(tutti_work_wait(work, 0));
            tutti_work_release(work);
        }
        check_done(of);
    }
    END;
}

/* Rank 1 ends its batch before the form that the others begin with. */
static void end_in_another_order(tutti_group *group, bool scatters) {
    int rank = tutti_group_rank(group);
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    tt_tensor *x = whole(tt_shape(6, 4), TUTTI_F32, rank), *right = whole(tt_shape(4, 6), TUTTI_F32, 1);
    batched *of = batch_of(group);
    note_collectives(of);
    tutti_status status = TUTTI_OK;
    if (rank == 1)
        status = tutti_batch_end(of->batch, NULL);
    else if (scatters)
        tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group);
    else
        tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL);
    if (rank != 1)
        status = tt_error_show();
    CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("all_reduce");
    CHECK_MESSAGE(scatters ? "fused_matmul_reduce_scatter" : "fused_all_gather_matmul");
    tt_error_clear();
    if (rank != 1) /* ends the batch all the same, with the first cause */
        CHECK_STATUS(tutti_batch_end(of->batch, NULL), TUTTI_ERROR_MISMATCH);
    free(of);
}

TEST_WORLD(a_batch_that_ends_before_a_form_on_one_rank_and_behind_it_on_others_is_a_mismatch_on_all, 3) {
    BEGIN;
    for (int scatters = 0; scatters < 2; scatters++) {
        tutti_group *other;
        CHECK_OK(tutti_group_new_subgroups(group, ranks, NULL, NULL, &other));
        end_in_another_order(other, scatters);
        CHECK_OK(tutti_barrier(group, NULL)); /* nobody is in the group that has ended */
        tutti_group_release(other);
    }
    END;
}

static tutti_status end_inside(void *argument, tt_tensor_list shards, int rank) {
    batched *of = argument;
    (void)shards;
    if (rank != of->rank)
        return TUTTI_OK;
    return tutti_batch_end(of->batch, NULL);
}

static tutti_status look_away(void *argument, tt_tensor_list shards, int rank) {
    (void)argument, (void)shards, (void)rank;
    return TUTTI_OK;
}

TEST_WORLD(a_batch_that_a_callback_of_one_rank_runs_on_its_own_group_is_a_mismatch_on_all, 2) {
    BEGIN;
    tutti_group *other;
    CHECK_OK(tutti_group_new_subgroups(group, ranks, NULL, NULL, &other));
    CHECK_OK(tutti_group_set_timeout(other, MINUTE));
    tt_tensor *x = whole(tt_shape(4, 6), TUTTI_F32, rank);
    tt_tensor_list none = { 0, NULL };
    CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(x), look_away, NULL, none, other)); /* has met */
    batched *of = batch_of(other);
    note_collectives(of);
    tutti_status status =
        tt_pipelined_all_gather_and_consume(tt_tensors(x), rank == 0 ? end_inside : look_away, of, none, other);
    if (status == TUTTI_OK) /* what it needed of rank 0 was there before */
        status = tutti_barrier(other, NULL);
    CHECK_EQ(status, TUTTI_ERROR_MISMATCH);
    CHECK_MESSAGE("all_reduce");
    if (rank == 1)
        CHECK_STATUS(tutti_batch_end(of->batch, NULL), TUTTI_ERROR_MISMATCH);
    free(of);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(other);
    END;
}

TEST_WORLD(a_form_that_runs_out_of_time_ends_the_batch_with_its_cause, 2) {
    BEGIN;
    tutti_group *other;
    CHECK_OK(tutti_group_new_subgroups(group, ranks, NULL, NULL, &other));
    tt_tensor *x = whole(tt_shape(6, 4), TUTTI_F32, rank), *right = whole(tt_shape(4, 6), TUTTI_F32, 1);
    batched *of = batch_of(other);
    note_collectives(of);
    if (rank == 0) {
        CHECK_OK(tutti_group_set_timeout(other, 200000000));
        FAILS(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, other, NULL), TUTTI_ERROR_TIMEOUT, "rank 1");
    }
    CHECK_OK(tutti_barrier(group, NULL)); /* the other has not come, and has its batch open all the while */
    CHECK_STATUS(tutti_batch_end(of->batch, NULL), TUTTI_ERROR_TIMEOUT);
    free(of);
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(other);
    END;
}

static tutti_status dies_with_a_batch(tutti_world *world, void *argument) {
    const bool *as_work = argument;
    BEGIN;
    CHECK_OK(tutti_group_set_timeout(group, MINUTE));
    tt_tensor *x = whole(tt_shape(6, 4), TUTTI_F32, rank), *right = whole(tt_shape(4, 6), TUTTI_F32, 1);
    CHECK(tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group) != NULL);
    batched *of = batch_of(group);
    note_collectives(of);
    note_messages(of);
    if (rank == 1)
        raise(SIGKILL);
    tutti_work *work = NULL;
    tutti_status ended = TUTTI_OK;
    if (*as_work) {
        ended = tutti_batch_end(of->batch, TUTTI_OPTIONS(tutti_call, .work = &work));
        of->batch = NULL;
    }
    tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_DEAD);
    CHECK_MESSAGE("rank 1");
    tt_error_clear();
    if (of->batch != NULL)
        ended = tutti_batch_end(of->batch, NULL);
    else if (work != NULL) {
        ended = tutti_work_wait(work, 0);
        tutti_work_release(work);
    }
    CHECK_EQ(ended, TUTTI_ERROR_DEAD);
    free(of);
    return tt_scope_close(&scope);
}

TEST(a_death_ends_the_form_and_the_batch) {
    for (int as_work = 0; as_work < 2; as_work++) {
        bool how = as_work;
        CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, dies_with_a_batch, &how), TUTTI_ERROR_DEAD);
    }
}
