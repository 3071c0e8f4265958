/* SPDX-License-Identifier: Apache-2.0
 *
 * The two pipelines with a consumer or a producer of the user's on a device (TEST_DEVICE=cuda): what callbacks enqueue
 * finds its tensors ready, gives what it gives on the CPU, and nobody waits for it. What is small also runs with the
 * stand-in for the driver.
 */
#include <signal.h>

#include "gpu.h"

#include "../failing.h"

static const tt_tensor_list none = { 0, NULL };

/* ---- gather and consume ---- */

typedef struct visit {
    int seen[8], order[8], count;
    int fails_at; /* a rank; -1: none */
    tt_tensor *kept, *sum;
} visit;

static tutti_status look(void *argument, tt_tensor_list shards, int rank) {
    visit *state = argument;
    state->seen[rank]++;
    state->order[state->count++] = rank;
    CHECK_EQ(shards.count, 3);
    CHECK(tt_device_of(shards.at[0]) == test_device() && tt_device_of(shards.at[2]) == test_device());
    CHECK(tt_equal(back(shards.at[0]), whole(tt_shape(3, 5), TUTTI_F32, rank)));
    CHECK(tt_equal(back(shards.at[1]), whole(tt_shape(3), TUTTI_U8, 50 + rank)));
    CHECK(tt_equal(back(shards.at[2]), whole(tt_shape(2, 1, 2), TUTTI_F64, 90 + rank)));
    tt_add_(state->sum, shards.at[0]);
    if (state->kept == NULL)
        state->kept = tt_keep(shards.at[0]);
    return rank == state->fails_at ? TUTTI_ERROR_LIMIT : TUTTI_OK;
}

static tutti_status ignore(void *argument, tt_tensor_list shards, int rank) {
    (void)argument, (void)shards, (void)rank;
    return TUTTI_OK;
}

static tt_tensor *sum_of(tt_dims shape, int ranks) {
    tt_tensor *sum = tt_zeros(shape, TUTTI_F32, NULL);
    for (int from = 0; from < ranks; from++)
        sum = tt_add(sum, whole(shape, TUTTI_F32, from));
    return sum;
}

static void check_visits(tutti_world *world, tutti_group *group) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    for (int round = 0; round < 4; round++) {
        tt_tensor *one = whole(tt_shape(3, 5), TUTTI_F32, rank), *two = whole(tt_shape(3), TUTTI_U8, 50 + rank),
                  *three = whole(tt_shape(2, 1, 2), TUTTI_F64, 90 + rank),
                  *here = round % 2 == 1 ? symmetric_there(world, one) : there(one);
        tt_tensor *outs[3] = { there(tt_zeros(tt_shape(3 * ranks, 5), TUTTI_F32, NULL)),
                               there(tt_zeros(tt_shape(3 * ranks), TUTTI_U8, NULL)),
                               there(tt_zeros(tt_shape(2 * ranks, 1, 2), TUTTI_F64, NULL)) };
        visit state = { .fails_at = -1, .sum = there(tt_zeros(tt_shape(3, 5), TUTTI_F32, NULL)) };
        CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(here, there(two), there(three)), look, &state,
                                                     round < 2 ? tt_tensors_of(3, outs) : none, group));
        CHECK_EQ(state.count, ranks);
        CHECK_EQ(state.order[0], rank);
        for (int i = 0; i < ranks; i++)
            CHECK_EQ(state.seen[i], 1);
        CHECK(tt_equal(back(state.sum), sum_of(tt_shape(3, 5), ranks)));
        if (round < 2) {
            CHECK(tt_equal(back(outs[0]), tt_all_gather(one, 0, group)));
            CHECK(tt_equal(back(outs[1]), tt_all_gather(two, 0, group)));
            CHECK(tt_equal(back(outs[2]), tt_all_gather(three, 0, group)));
        }
        FAILS(tt_sum(state.kept), TUTTI_ERROR_FREED, "freed"); /* whoever keeps a lent tensor finds it freed */
        tt_release(state.kept);
    }
}

TEST_RANKS(each_ranks_shards_are_consumed_once_on_the_device_and_the_own_first) {
    BEGIN;
    check_visits(world, group);
    END;
}

TEST_RANKS(shards_on_the_device_may_lie_in_their_place_of_what_is_gathered_or_be_empty) {
    BEGIN;
    for (int round = 0; round < 4; round++) {
        tt_tensor *zeros = tt_zeros(tt_shape(2 * ranks, 5), TUTTI_F32, NULL),
                  *out = round % 2 == 0 ? there(zeros) : symmetric_there(world, zeros),
                  *shard = tt_narrow(out, 0, 2 * rank, 2), *before = whole(tt_shape(2, 5), TUTTI_F32, rank + round),
                  *empty = there(tt_zeros(tt_shape(0, 3), TUTTI_F32, NULL)),
                  *nothing = there(tt_zeros(tt_shape(0, 3), TUTTI_F32, NULL));
        tt_copy_(shard, there(before));
        CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(shard, empty), ignore, NULL, tt_tensors(out, nothing),
                                                     group));
        CHECK(tt_equal(back(out), tt_all_gather(before, 0, group)));
    }
    END;
}

static tutti_status leave_pending(void *argument, tt_tensor_list shards, int rank) {
    (void)rank, (void)argument;
    tt_add(shards.at[0], NULL);
    return TUTTI_OK;
}

TEST_RANKS(a_consumer_that_fails_on_the_device_fails_its_own_call_alone) {
    BEGIN;
    tt_tensor *one = there(whole(tt_shape(3, 5), TUTTI_F32, rank)),
              *two = there(whole(tt_shape(3), TUTTI_U8, 50 + rank)),
              *three = there(whole(tt_shape(2, 1, 2), TUTTI_F64, 90 + rank)),
              *placed = symmetric_there(world, whole(tt_shape(3, 5), TUTTI_F32, rank));
    for (int i = 0; i < 4; i++) {
        visit state = { .fails_at = rank == 0 ? i % 2 : -1, .sum = there(tt_zeros(tt_shape(3, 5), TUTTI_F32, NULL)) };
        tutti_status status = tt_pipelined_all_gather_and_consume(tt_tensors(i < 2 ? one : placed, two, three), look,
                                                                  &state, none, group);
        CHECK_EQ(status, rank == 0 ? TUTTI_ERROR_LIMIT : TUTTI_OK);
        if (rank == 0)
            CHECK_MESSAGE("the callback returned");
        tt_release(state.kept);
    }
    CHECK_STATUS(tt_pipelined_all_gather_and_consume(tt_tensors(one), leave_pending, NULL, none, group),
                 TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("NULL");
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_group_check(group));
    END;
}

/* ---- produce and exchange ---- */

typedef struct maker {
    tt_tensor *x, *right; /* NULL: chunks are filled with numbers */
    int rank, fails_at;
} maker;

/* Chunk `rank` is that part of x times right, or a number that names both ranks. */
static tutti_status make(void *argument, int rank, tt_tensor *out) {
    const maker *of = argument;
    CHECK(tt_device_of(out) == test_device());
    if (of->x == NULL)
        tt_fill_(out, 10 * of->rank + rank);
    else
        tt_copy_(out, tt_matmul(tt_narrow(of->x, 0, rank * tt_size(out, 0), tt_size(out, 0)), of->right));
    return rank == of->fails_at ? TUTTI_ERROR_LIMIT : TUTTI_OK;
}

TEST_RANKS(every_rank_receives_the_chunks_made_for_it_on_the_device_along_any_dimension) {
    BEGIN;
    maker of = { .rank = rank, .fails_at = -1 };
    for (int round = 0; round < 3; round++)
        for (int dim = 0; dim < 3; dim++) {
            tutti_dtype dtype = round == 1 ? TUTTI_U8 : TUTTI_F32;
            tt_tensor *zeros = tt_zeros(tt_shape(2 * ranks, ranks, 3 * ranks), dtype, NULL),
                      *output = round == 2 ? symmetric_there(world, zeros) : there(zeros);
            CHECK_OK(tt_pipelined_produce_and_all_to_all(make, &of, output, dim, group));
            tt_tensor_list chunks = tt_chunk(back(output), ranks, dim);
            for (int from = 0; from < ranks; from++)
                CHECK(tt_equal(chunks.at[from], tt_full(tt_sizes(chunks.at[from]), 10 * from + rank, dtype, NULL)));
        }
    CHECK_OK(
        tt_pipelined_produce_and_all_to_all(make, &of, there(tt_zeros(tt_shape(0, 3), TUTTI_F32, NULL)), 0, group));
    END;
}

/* All ranks have agreed, and wait on their streams for chunks that never come, until they hear why. */
TEST_RANKS(a_producer_that_fails_on_the_device_ends_the_group_with_its_words) {
    BEGIN;
    tutti_group *few;
    CHECK_OK(tutti_group_new(world, NULL, ranks, NULL, &few));
    maker of = { .rank = rank, .fails_at = -1 };
    for (int warm = 0; warm < 2; warm++)
        CHECK_OK(
            tt_pipelined_produce_and_all_to_all(make, &of, there(tt_zeros(tt_shape(ranks), TUTTI_F32, NULL)), 0, few));
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    of.fails_at = rank == 1 ? 0 : -1;
    tutti_status status =
        tt_pipelined_produce_and_all_to_all(make, &of, there(tt_zeros(tt_shape(ranks), TUTTI_F32, NULL)), 0, few);
    CHECK(rank == 1 ? status == TUTTI_ERROR_LIMIT : status == TUTTI_OK || status == TUTTI_ERROR_ABORTED);
    if (rank == 1)
        CHECK_MESSAGE("callback returned");
    (void)tt_synchronize(test_device());
    tt_error_clear();
    CHECK_STATUS(tutti_group_check(few), TUTTI_ERROR_ABORTED);
    CHECK_MESSAGE("it could not go on with pipelined_produce_and_all_to_all");
    tt_tensor *x = there(whole(tt_shape(8, 8), TUTTI_F32, rank));
    CHECK(tt_equal(back(tt_matmul(x, x)), tt_matmul(back(x), back(x)))); /* the device goes on */
    CHECK_OK(tutti_barrier(group, NULL));
    tutti_group_release(few);
    END;
}

/* ---- one call behind the other ---- */

#define ROUNDS 12

typedef struct consumer {
    tt_tensor *right, *products[8];
} consumer;

static tutti_status multiply(void *argument, tt_tensor_list shards, int rank) {
    consumer *of = argument;
    tt_copy_(of->products[rank], tt_matmul(shards.at[0], of->right));
    return TUTTI_OK;
}

/* What one call of each kind gives, on the device or on the CPU, with ranks' products one below the other. */
static tt_tensor *gather_once(tutti_group *group, tt_tensor *shard, tt_tensor *right, tt_tensor *out) {
    int ranks = tutti_group_size(group);
    tt_options options = { .size = sizeof options, .device = tt_device_of(shard) };
    consumer of = { .right = right };
    tt_tensor *all = tt_zeros(tt_shape(ranks * tt_size(shard, 0), tt_size(right, 1)), TUTTI_F32, &options);
    for (int from = 0; from < ranks; from++)
        of.products[from] = tt_narrow(all, 0, from * tt_size(shard, 0), tt_size(shard, 0));
    CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(shard), multiply, &of, tt_tensors(out), group));
    return all;
}

/* Rounds without a wait between them, on two streams in turns, with a rank that is late in each: every one has its own
 * inputs and results, whoever still reads what the round before has left in the workspace. */
static void check_rounds(tutti_world *world, tutti_group *group) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group), rows = 16,
        late = access("/dev/nvidiactl", F_OK) == 0 ? 2048 : 32;
    void *streams[2] = { tt_stream(test_device()), tt_stream_new(test_device()) };
    tt_tensor *right = there(whole(tt_shape(32, 24), TUTTI_F32, 7)),
              *slow = there(whole(tt_shape(late, late), TUTTI_F32, 8)), *shards[ROUNDS], *talls[ROUNDS],
              *gathered[ROUNDS], *products[ROUNDS], *outputs[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        tt_tensor *shard = whole(tt_shape(rows, 32), TUTTI_F32, 100 * i + rank);
        shards[i] = i % 3 == 2 ? symmetric_there(world, shard) : there(shard);
        talls[i] = there(whole(tt_shape(ranks * rows, 32), TUTTI_F32, 100 * i + 50 + rank));
        gathered[i] = there(tt_zeros(tt_shape(ranks * rows, 32), TUTTI_F32, NULL));
        outputs[i] = there(tt_zeros(tt_shape(ranks * rows, 24), TUTTI_F32, NULL));
    }
    (void)tt_matmul(slow, slow); /* its kernel is loaded before a rank's waits for another's */
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    for (int i = 0; i < ROUNDS; i++) {
        CHECK(tt_stream_set(test_device(), streams[i % 2]));
        for (int j = 0; i % ranks == rank && j < 4; j++)
            (void)tt_matmul(slow, slow);
        products[i] = gather_once(group, shards[i], right, gathered[i]);
        maker of = { .x = talls[i], .right = right, .rank = rank, .fails_at = -1 };
        CHECK_OK(tt_pipelined_produce_and_all_to_all(make, &of, outputs[i], 0, group));
        if (i % 4 == 3) /* empty calls between them */
            CHECK_OK(tt_pipelined_produce_and_all_to_all(make, &of, there(tt_zeros(tt_shape(0), TUTTI_F32, NULL)), 0,
                                                         group));
    }
    for (int i = 0; i < 2; i++)
        CHECK(tt_stream_set(test_device(), streams[i]) && tt_synchronize(test_device()));
    CHECK(tt_stream_set(test_device(), streams[0]));
    for (int i = 0; i < ROUNDS; i++) {
        tt_tensor *all = tt_zeros(tt_shape(ranks * rows, 32), TUTTI_F32, NULL);
        CHECK(tt_equal(back(products[i]), gather_once(group, back(shards[i]), back(right), all)));
        CHECK(tt_equal(back(gathered[i]), all));
        for (int from = 0; from < ranks; from++) {
            tt_tensor *tall = whole(tt_shape(ranks * rows, 32), TUTTI_F32, 100 * i + 50 + from);
            CHECK(tt_equal(back(tt_narrow(outputs[i], 0, from * rows, rows)),
                           tt_matmul(tt_narrow(tall, 0, rank * rows, rows), back(right))));
        }
    }
    tt_stream_release(test_device(), streams[1]);
    CHECK_OK(tutti_group_check(group));
}

TEST_RANKS(pipelines_follow_each_other_on_any_stream_without_a_wait) {
    BEGIN;
    check_rounds(world, group);
    END;
}

/* So many that chunks share the places in which they are made. */
static void many_ranks(tutti_world *world, void *argument) {
    (void)argument;
    tt_scope outer = tt_scope_open();
    void *stream = tt_stream_new(test_device());
    CHECK(tt_stream_set(test_device(), stream));
    BEGIN;
    check_rounds(world, group);
    END;
    tt_stream_release(test_device(), stream);
    CHECK_OK(tt_scope_close(&outer));
}

TEST_LIMIT(many_ranks_make_their_chunks_in_few_places, 120) {
    device_needed();
    test_threads(7, many_ranks, NULL);
    test_device_leave();
}

/* ---- alone, and in test mode ---- */

static void check_alone(tutti_group *group) {
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_tensor *x = whole(tt_shape(4, 3), TUTTI_F32, rank),
              *out = there(tt_zeros(tt_shape(4 * ranks, 3), TUTTI_F32, NULL)),
              *right = whole(tt_shape(3, 2), TUTTI_F32, 5), *all = tt_zeros(tt_shape(4 * ranks, 3), TUTTI_F32, NULL);
    CHECK(tt_equal(back(gather_once(group, there(x), there(right), out)), gather_once(group, x, right, all)));
    CHECK(tt_equal(back(out), all));
    maker of = { .rank = rank, .fails_at = -1 };
    for (int dim = 0; dim < 2; dim++) {
        tt_tensor *output = there(tt_zeros(tt_shape(2 * ranks, 3 * ranks), TUTTI_F32, NULL));
        CHECK_OK(tt_pipelined_produce_and_all_to_all(make, &of, output, dim, group));
        CHECK(tt_equal(back(output), tt_full(tt_shape(2 * ranks, 3 * ranks), 11 * rank, TUTTI_F32, NULL)));
    }
}

TEST(one_rank_and_one_among_made_up_ones_have_pipelines_on_the_device) {
    device_needed();
    for (int size = 1; size < 5; size += 3) {
        tutti_world *world;
        CHECK_OK(size == 1 ? tutti_world_open(NULL, &world) : tutti_world_open_fake(2, size, NULL, &world));
        tt_scope scope = tt_scope_open();
        check_alone(tutti_world_group(world));
        CHECK_OK(tt_scope_close(&scope));
        CHECK_OK(tutti_world_close(world));
    }
    test_device_leave();
}

TEST_RANKS(test_mode_takes_the_plain_collectives_on_the_device) {
    BEGIN;
    const char *name = tutti_group_name(group);
    CHECK(tt_symm_test_begin(1, &name));
    check_visits(world, group);
    maker of = { .rank = rank, .fails_at = -1 };
    for (int dim = 0; dim < 2; dim++) {
        tt_tensor *output = there(tt_zeros(tt_shape(2 * ranks, ranks), TUTTI_F32, NULL));
        CHECK_OK(tt_pipelined_produce_and_all_to_all(make, &of, output, dim, group));
        tt_tensor_list chunks = tt_chunk(back(output), ranks, dim);
        for (int from = 0; from < ranks; from++)
            CHECK(tt_equal(chunks.at[from], tt_full(tt_sizes(chunks.at[from]), 10 * from + rank, TUTTI_F32, NULL)));
    }
    tt_symm_test_end();
    END;
}

/* ---- what goes wrong ---- */

static tutti_status consume_and_call(void *argument, tt_tensor_list shards, int rank) {
    tutti_group *group = argument;
    tt_tensor *x = shards.at[0];
    (void)rank;
    CHECK_STATUS(tt_pipelined_all_gather_and_consume(tt_tensors(x), ignore, NULL, none, group), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("from a consumer or producer");
    FAILS(tt_fused_all_gather_matmul(x, tt_tensors(x), 0, group, NULL), TUTTI_ERROR_STATE,
          "from a consumer or producer");
    FAILS(tt_fused_matmul_reduce_scatter(x, x, TUTTI_SUM, 0, group), TUTTI_ERROR_STATE, "from a consumer or producer");
    return TUTTI_OK;
}

TEST_RANKS(a_callback_on_the_device_cannot_begin_another_call_on_its_group) {
    BEGIN;
    tt_tensor *x = there(whole(tt_shape(2 * ranks, 2 * ranks), TUTTI_F32, rank)),
              *right = there(whole(tt_shape(2 * ranks, 4), TUTTI_F32, 3));
    for (int round = 0; round < 2; round++) {
        CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(x), consume_and_call, group, none, group));
        CHECK(tt_equal(back(tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL).at[0]),
                       gathered_product(back(x), back(right), 0, group)));
    }
    END;
}

TEST_RANKS(pipelines_that_differ_are_told_on_every_rank_and_end_nothing) {
    BEGIN;
    maker of = { .rank = rank, .fails_at = -1 };
    tt_tensor *x = whole(tt_shape(2 * ranks, 4), TUTTI_F32, rank), *here = there(x),
              *longer = there(whole(tt_shape(4 * ranks, 4), TUTTI_F32, rank));
    for (int round = 0; round < 2; round++) {
        CHECK_STATUS(tt_pipelined_all_gather_and_consume(tt_tensors(rank == 0 ? x : here), ignore, NULL, none, group),
                     TUTTI_ERROR_MISMATCH);
        CHECK_MESSAGE("on a device");
        CHECK_STATUS(
            tt_pipelined_all_gather_and_consume(tt_tensors(rank == 1 ? longer : here), ignore, NULL, none, group),
            TUTTI_ERROR_MISMATCH);
        CHECK_STATUS(tt_pipelined_produce_and_all_to_all(make, &of, rank == 0 ? longer : here, 0, group),
                     TUTTI_ERROR_MISMATCH);
        CHECK_MESSAGE("rank 0 calls pipelined_produce_and_all_to_all along dimension 0");
        check_visits(world, group);
    }
    CHECK_OK(tutti_group_check(group));
    END;
}

TEST(wrong_arguments_on_the_device_are_told) {
    device_needed();
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    {
        BEGIN;
        (void)rank, (void)ranks;
        maker of = { .fails_at = -1 };
        tt_tensor *host = whole(tt_shape(4, 3), TUTTI_F32, 0), *x = there(host), *turned = tt_transpose(x, 0, 1),
                  *leaf = tt_require_grad(tt_detach(there(host)), true),
                  *large = there(whole(tt_shape(6, 3), TUTTI_F32, 0));
#define GATHER(shards, out) tt_pipelined_all_gather_and_consume(shards, ignore, NULL, out, group)
        CHECK_STATUS(GATHER(tt_tensors(turned), none), TUTTI_ERROR_ARGUMENT);
        CHECK_MESSAGE("all tensors in `shard` must be contiguous");
        CHECK_STATUS(GATHER(tt_tensors(x), tt_tensors(host)), TUTTI_ERROR_ARGUMENT);
        CHECK_MESSAGE("in `ag_out` is on the device cpu and");
        CHECK_STATUS(GATHER(tt_tensors(host, x), none), TUTTI_ERROR_ARGUMENT);
        CHECK_MESSAGE("expected all on one");
        CHECK_STATUS(GATHER(tt_tensors(x), tt_tensors(leaf)), TUTTI_ERROR_UNSUPPORTED);
        CHECK_MESSAGE("has no gradient");
        CHECK_STATUS(GATHER(tt_tensors(tt_narrow(large, 0, 0, 4)), tt_tensors(tt_narrow(large, 0, 1, 4))),
                     TUTTI_ERROR_ARGUMENT);
        CHECK_MESSAGE("overlaps another tensor of the call");
        CHECK_STATUS(tt_pipelined_produce_and_all_to_all(make, &of, leaf, 0, group), TUTTI_ERROR_UNSUPPORTED);
        CHECK_STATUS(tt_pipelined_produce_and_all_to_all(make, &of, turned, 0, group), TUTTI_ERROR_ARGUMENT);
        END;
    }
    CHECK_OK(tutti_world_close(world));
    test_device_leave();
}

/* All ranks have agreed, but rank 1's stream does not come: the others' streams leave at the deadline. */
TEST_HELD(a_stream_that_does_not_come_to_a_pipeline_is_told_at_the_deadline_and_the_device_goes_on) {
    BEGIN;
    for (int scatters = 0; scatters < 2; scatters++) {
        tutti_group *few;
        CHECK_OK(tutti_group_new(world, NULL, ranks, NULL, &few));
        maker of = { .rank = rank, .fails_at = -1 };
        tt_tensor *x = there(whole(tt_shape(2 * ranks, 4), TUTTI_F32, rank));
        for (int held = 0; held < 2; held++) {
            volatile uint32_t *word = NULL;
            CHECK(tt_synchronize(test_device()));
            CHECK_OK(tutti_barrier(group, NULL));
            if (held == 1)
                CHECK_OK(tutti_group_set_timeout(few, 300000000));
            if (held == 1 && rank == 1)
                word = hold_stream(tt_stream(test_device()));
            CHECK_OK(scatters ? tt_pipelined_produce_and_all_to_all(make, &of, x, 0, few)
                              : tt_pipelined_all_gather_and_consume(tt_tensors(x), ignore, NULL, none, few));
            if (held == 1 && rank != 1) {
                (void)tt_synchronize(test_device());
                tt_error_clear();
                CHECK(tutti_group_check(few) != TUTTI_OK);
            }
            CHECK_OK(tutti_barrier(group, NULL));
            if (word != NULL)
                *word = 1;
            (void)tt_synchronize(test_device());
            tt_error_clear();
        }
        CHECK(tutti_group_check(few) != TUTTI_OK);
        check_visits(world, group); /* another group, and the device, go on */
        CHECK_OK(tutti_barrier(group, NULL));
        tutti_group_release(few);
    }
    END;
}

static tutti_status one_dies(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_scope scope = tt_scope_open();
    maker of = { .rank = rank, .fails_at = -1 };
    tt_tensor *x = there(whole(tt_shape(2 * ranks, 4), TUTTI_F32, rank));
    CHECK_OK(tt_pipelined_produce_and_all_to_all(make, &of, x, 0, group));
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    if (rank == ranks - 1)
        raise(SIGKILL);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 100 && status == TUTTI_OK; i++)
        status = i % 2 == 0 ? tt_pipelined_produce_and_all_to_all(make, &of, x, 0, group)
                            : tt_pipelined_all_gather_and_consume(tt_tensors(x), ignore, NULL, none, group);
    CHECK_EQ(status, TUTTI_ERROR_DEAD); /* not the deadline's error */
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tt_scope_close(&scope));
    fflush(stdout);
    _exit(0);
}

TEST_LIMIT(a_dead_rank_is_an_error_of_pipelines_on_the_device, 120) {
    device_needed();
    if (getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL)
        SKIP("under MPS a death may take the server with it");
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 2, one_dies, NULL), TUTTI_ERROR_DEAD);
}

/* A rank that leaves a call in the middle has a copy of its shard beside the stream, behind what that holds. The shard
 * goes with the call here, and is unmapped. */
static void check_shard_that_goes(tutti_world *world, void *argument) {
    (void)argument;
    BEGIN;
    failing calls = failing_calls("libcuda.so.1", "standin");
    void *stream = tt_stream_new(test_device());
    CHECK(tt_stream_set(test_device(), stream));
    tt_tensor *large = there(tt_ones(tt_shape(128, 128), TUTTI_F32, NULL)),
              *x = there(tt_zeros(tt_shape(2 << 20), TUTTI_F32, NULL));
    for (int32_t nth = 1, failed = 1; failed; nth++) {
        tutti_group *fresh;
        CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &fresh));
        CHECK_OK(tt_pipelined_all_gather_and_consume(tt_tensors(x), ignore, NULL, none, fresh));
        tt_scope inner = tt_scope_open();
        tt_tensor *shard = rank == 0 ? symmetric_there(world, x) : x; /* on one rank alone: it is staged */
        (void)tt_matmul(large, large);
        if (rank == 0)
            calls.fail(nth);
        tutti_status status = tt_pipelined_all_gather_and_consume(tt_tensors(shard), ignore, NULL, none, fresh);
        int32_t mine = rank == 0 && calls.left() == 0;
        CHECK(status == TUTTI_OK || mine || rank != 0);
        calls.fail(0);
        CHECK_OK(tt_scope_close(&inner));
        CHECK_OK(tutti_broadcast(group, &mine, &failed, 1, TUTTI_I32, 0, NULL));
        CHECK(tt_synchronize(test_device()) || failed);
        tt_error_clear();
        CHECK_OK(tutti_group_destroy(fresh));
        tutti_group_release(fresh);
    }
    CHECK(tt_stream_set(test_device(), NULL));
    tt_stream_release(test_device(), stream);
    END;
}

TEST_LIMIT(a_shard_may_go_when_the_call_that_stages_it_has_failed, 120) {
    device_needed();
    if (access("/dev/nvidiactl", F_OK) == 0)
        SKIP("only a stand-in fails when it is told to");
    test_threads(2, check_shard_that_goes, NULL);
    test_device_leave();
}

/* ---- graphs ---- */

/* The callbacks are called while the calls are captured; what they have enqueued runs with the graph, on what its
 * inputs hold then. A workspace that would grow meanwhile is an error. */
TEST_RANKS(pipelines_are_captured_after_one_call_and_replayed) {
    BEGIN;
    maker of = { .rank = rank, .fails_at = -1, .right = there(whole(tt_shape(8, 6), TUTTI_F32, 3)) };
    tt_tensor *shard = there(whole(tt_shape(4, 8), TUTTI_F32, rank)), *products = NULL,
              *out = there(tt_zeros(tt_shape(4 * ranks, 8), TUTTI_F32, NULL)),
              *output = there(tt_zeros(tt_shape(4 * ranks, 6), TUTTI_F32, NULL)),
              *large = there(tt_zeros(tt_shape(4096 * ranks, 8), TUTTI_F32, NULL));
    of.x = there(whole(tt_shape(4 * ranks, 8), TUTTI_F32, rank));
    for (int captured = 0; captured < 2; captured++) {
        CHECK(tt_synchronize(test_device()));
        CHECK_OK(tutti_barrier(group, NULL));
        if (captured)
            CHECK(tt_replay_begin(test_device()));
        products = gather_once(group, shard, of.right, out);
        CHECK_OK(tt_pipelined_produce_and_all_to_all(make, &of, output, 0, group));
        if (captured) {
            CHECK_STATUS(tt_pipelined_all_gather_and_consume(tt_tensors(large), ignore, NULL, none, group),
                         TUTTI_ERROR_STATE);
            CHECK_MESSAGE("would have to grow to");
            maker plain = { .rank = rank, .fails_at = -1 };
            CHECK_STATUS(tt_pipelined_produce_and_all_to_all(make, &plain, large, 0, group), TUTTI_ERROR_STATE);
        }
    }
    tt_replay *replay = tt_replay_end(test_device());
    CHECK(replay != NULL);
    tt_tensor *shards[ROUNDS], *talls[ROUNDS], *found[ROUNDS][3],
        *slow = there(tt_ones(tt_shape(64, 64), TUTTI_F32, NULL));
    for (int run = 0; run < ROUNDS; run++) {
        shards[run] = there(whole(tt_shape(4, 8), TUTTI_F32, rank + 10 * run));
        talls[run] = there(whole(tt_shape(4 * ranks, 8), TUTTI_F32, rank + 20 * run));
    }
    (void)tt_matmul(slow, slow); /* its kernel is loaded before a rank's waits for another's */
    CHECK(tt_synchronize(test_device()));
    CHECK_OK(tutti_barrier(group, NULL));
    for (int run = 0; run < ROUNDS; run++) { /* without a wait, and with a rank that is late */
        for (int i = 0; run % ranks == rank && i < 8; i++)
            (void)tt_matmul(slow, slow);
        tt_copy_(shard, shards[run]);
        tt_copy_(of.x, talls[run]);
        CHECK(tt_replay_run(replay));
        found[run][0] = tt_clone(products);
        found[run][1] = tt_clone(out);
        found[run][2] = tt_clone(output);
        if (run % 3 == 2) /* a call between two runs */
            CHECK_OK(tt_pipelined_produce_and_all_to_all(make, &of, found[run][2], 0, group));
    }
    CHECK(tt_synchronize(test_device()));
    for (int run = 0; run < ROUNDS; run++)
        for (int from = 0; from < ranks; from++) {
            tt_tensor *theirs = whole(tt_shape(4, 8), TUTTI_F32, from + 10 * run),
                      *tall = whole(tt_shape(4 * ranks, 8), TUTTI_F32, from + 20 * run);
            CHECK(tt_equal(back(tt_narrow(found[run][0], 0, 4 * from, 4)), tt_matmul(theirs, back(of.right))));
            CHECK(tt_equal(back(tt_narrow(found[run][1], 0, 4 * from, 4)), theirs));
            CHECK(tt_equal(back(tt_narrow(found[run][2], 0, 4 * from, 4)),
                           tt_matmul(tt_narrow(tall, 0, 4 * rank, 4), back(of.right))));
        }
    tt_replay_release(replay);
    CHECK_OK(tutti_group_check(group));
    END;
}
