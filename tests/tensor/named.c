/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations on symmetric memory that have names of their own, on tensors: results, gradients, a second use, what
 * they leave alone, and what they refuse.
 */
#include <signal.h>
#include <unistd.h>

#include <tutti/graph.h>
#include <tutti/symmetric.h>

#include "support.h"

static bool is_i64(tt_tensor *x, tt_dims shape, const int64_t *values) {
    return x != NULL && tt_equal(x, tt_from(values, shape, TUTTI_I64, NULL));
}

static tt_tensor *plain(tt_dims shape, double value) {
    return tt_full(shape, value, TUTTI_F32, NULL);
}

static tt_tensor *symmetric(tutti_world *world, tt_dims shape, double value) {
    return tt_fill_(tt_symm_empty(world, shape, TUTTI_F32, NULL), value);
}

/* A copy of x on symmetric memory. */
static tt_tensor *on_symmetric(tutti_world *world, tt_tensor *x) {
    return tt_copy_(tt_symm_empty(world, tt_sizes(x), tt_dtype(x), NULL), x);
}

/* The same body with multicast done by the processors. */
static void with_software_multicast(int ranks, test_rank *body) {
    setenv("TUTTI_MULTICAST", "software", 1);
    test_threads(ranks, body, NULL);
    test_processes(ranks, body, NULL);
    unsetenv("TUTTI_MULTICAST");
}

/* ---- all-reduce ---- */

TEST_WORLD(all_reduces_on_symmetric_memory_equal_the_plain_one, 3) {
    BEGIN;
    tutti_dtype dtypes[] = { TUTTI_F32, TUTTI_BF16, TUTTI_I64 };
    for (int d = 0; d < 3; d++)
        for (int round = 0; round < 3; round++) { /* the second use meets nobody */
            tt_tensor *base = tt_symm_empty(world, tt_shape(40), dtypes[d], NULL);
            tt_copy_(base, tt_add_scalar(tt_arange(0, 40, 1, dtypes[d], NULL), rank + round));
            tt_tensor *x = tt_narrow(base, 0, 4, 33), *before = tt_clone(base); /* in the middle of its block */
            tutti_reduction reduction = round == 1 ? TUTTI_MAX : TUTTI_SUM;
            tt_tensor *wanted = tt_all_reduce(tt_clone(x), reduction, group);
            CHECK(tt_equal(tt_one_shot_all_reduce(x, reduction, group), wanted));
            tt_tensor *out = tt_zeros_like(wanted);
            CHECK(tt_one_shot_all_reduce_out(out, x, reduction, group) == out && tt_equal(out, wanted));
            CHECK(tt_two_shot_all_reduce_out(tt_zero_(out), x, reduction, group) == out && tt_equal(out, wanted));
            CHECK(tt_equal(base, before)); /* inputs stay as they were */
            CHECK(tt_two_shot_all_reduce_(x, reduction, group) == x && tt_equal(x, wanted));
            CHECK(tt_equal(tt_narrow(base, 0, 0, 4), tt_narrow(before, 0, 0, 4)));
            CHECK(tt_equal(tt_narrow(base, 0, 37, 3), tt_narrow(before, 0, 37, 3)));
            CHECK_OK(tutti_barrier(group, NULL));
        }
    END;
}

TEST_WORLD(a_local_input_goes_through_a_symmetric_buffer, 3) {
    BEGIN;
    tt_tensor *buffer = symmetric(world, tt_shape(4, 8), 0), *x = plain(tt_shape(4, 8), rank + 1);
    tt_tensor *first = tt_one_shot_all_reduce_copy(buffer, x, TUTTI_SUM, group);
    tt_tensor *second = tt_one_shot_all_reduce_copy(buffer, tt_mul_scalar(x, 10), TUTTI_SUM, group); /* waits for it */
    CHECK(all_are(first, 6) && all_are(second, 60));
    tt_tensor *out = plain(tt_shape(4, 8), 0), *small = plain(tt_shape(5), rank);
    CHECK(tt_one_shot_all_reduce_copy_out(out, buffer, x, TUTTI_MAX, group) == out && all_are(out, 3));
    CHECK(all_are(tt_one_shot_all_reduce_copy(buffer, small, TUTTI_SUM, group), 3)); /* a part of the buffer */
    CHECK(tt_version(buffer) > 0 && all_are(x, rank + 1));
    CHECK(tt_one_shot_all_reduce_copy(buffer, plain(tt_shape(33), 1), TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "must be smaller than symm buffer size");
    CHECK(tt_one_shot_all_reduce_copy(plain(tt_shape(8), 0), small, TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "the buffer must be allocated with empty_strided_p2p()");
    CHECK(tt_one_shot_all_reduce_copy(buffer, tt_to(small, TUTTI_F64), TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_TYPE, "dtype");
    END;
}

TEST_WORLD(results_are_asynchronous_and_inputs_may_go_at_once, 2) {
    BEGIN;
    tt_tensor *result;
    {
        tt_scope inner = tt_scope_open();
        result = tt_keep(tt_one_shot_all_reduce(symmetric(world, tt_shape(1000), rank + 1), TUTTI_SUM, group));
        CHECK_OK(tt_scope_close(&inner)); /* the input's storage is held by what is in flight */
    }
    CHECK(all_are(result, 3));
    tt_release(result);
    tt_tensor *x = symmetric(world, tt_shape(1000), rank + 1), *sum = tt_one_shot_all_reduce(x, TUTTI_SUM, group);
    tt_fill_(x, -1); /* waits until everybody has read it */
    CHECK(all_are(sum, 3) && all_are(x, -1));
    CHECK_OK(tutti_barrier(group, NULL));
    END;
}

TEST_WORLD(gradients_of_one_shot_all_reduces_are_all_reduces, 2) {
    BEGIN;
    for (int k = 0; k < 2; k++) {
        tutti_reduction reduction = k == 0 ? TUTTI_SUM : TUTTI_AVG;
        tt_tensor *x = tt_require_grad(symmetric(world, tt_shape(3), 1), true);
        tt_tensor *y = tt_one_shot_all_reduce(x, reduction, group);
        CHECK(tt_backward(tt_sum(tt_mul_scalar(y, rank + 1)), NULL));
        CHECK(all_are(tt_grad(x), k == 0 ? 3 : 1.5));
    }
    tt_tensor *x = tt_require_grad(symmetric(world, tt_shape(3), 1), true);
    tt_tensor *largest = tt_one_shot_all_reduce(x, TUTTI_MAX, group);
    CHECK(all_are(largest, 1) && !tt_backward(tt_sum(largest), NULL));
    expect_error(TUTTI_ERROR_UNSUPPORTED, "sum and avg only");
    /* Forms that write a given tensor have none, and run without gradients. */
    CHECK(tt_two_shot_all_reduce_(x, TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_UNSUPPORTED, "has no gradient");
    CHECK(tt_one_shot_all_reduce_copy(symmetric(world, tt_shape(3), 0), x, TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_UNSUPPORTED, "has no gradient");
    bool recording = tt_grad_mode(false);
    tt_tensor *quiet = tt_one_shot_all_reduce(x, TUTTI_SUM, group);
    CHECK(!tt_requires_grad(quiet) && all_are(quiet, 2));
    CHECK(all_are(tt_two_shot_all_reduce_(x, TUTTI_SUM, group), 2));
    tt_grad_mode(recording);
    END;
}

TEST_WORLD(mempool_compute_ops, 2) { /* what is computed in a pool scope serves as input */
    BEGIN;
    tutti_pool *pool;
    CHECK_OK(tutti_pool_new(world, TEST_OF_DEVICE, &pool));
    for (int step = 0; step < 3; step++) {
        tt_scope inner = tt_scope_open();
        CHECK(tt_symm_pool_begin(pool, group));
        tt_tensor *y = tt_matmul(plain(tt_shape(4, 4), rank + 1), plain(tt_shape(4, 4), 1));
        CHECK(tt_symm_pool_end());
        CHECK(all_are(tt_one_shot_all_reduce(y, TUTTI_SUM, group), 12));
        CHECK_OK(tt_scope_close(&inner));
    }
    END;
    tutti_pool_release(pool);
}

/* ---- what is refused ---- */

typedef tt_tensor *all_reduce(tt_tensor *x, tutti_reduction reduction, tutti_group *group);

TEST_WORLD(inputs_must_be_symmetric_and_contiguous, 2) {
    BEGIN;
    all_reduce *functions[] = { tt_one_shot_all_reduce, tt_two_shot_all_reduce_, tt_multimem_all_reduce_,
                                tt_multimem_one_shot_all_reduce, tt_reduce_scatter_split };
    tt_tensor *ordinary = plain(tt_shape(4, 4), 1), *x = symmetric(world, tt_shape(4, 4), 1);
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        CHECK(functions[i](ordinary, TUTTI_SUM, group) == NULL);
        expect_error(TUTTI_ERROR_ARGUMENT, "must be allocated with empty_strided_p2p()");
        CHECK(functions[i](tt_transpose(x, 0, 1), TUTTI_SUM, group) == NULL);
        expect_error(TUTTI_ERROR_ARGUMENT, "must be contiguous");
        CHECK(functions[i](x, TUTTI_BAND, group) == NULL);
        expect_error(TUTTI_ERROR_TYPE, "not defined for");
        CHECK(functions[i](x, TUTTI_PREMUL_SUM, group) == NULL);
        expect_error(TUTTI_ERROR_ARGUMENT, "factor");
        CHECK(functions[i](x, TUTTI_SUM, NULL) == NULL);
        expect_error(TUTTI_ERROR_ARGUMENT, "group is NULL");
        CHECK(functions[i](NULL, TUTTI_SUM, group) == NULL);
        expect_error(TUTTI_ERROR_ARGUMENT, "NULL");
    }
    CHECK(tt_one_shot_all_reduce_out(plain(tt_shape(3), 0), x, TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "input/output size mismatch");
    CHECK(tt_one_shot_all_reduce_out(tt_transpose(ordinary, 0, 1), x, TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "output must be contiguous");
    CHECK_OK(tutti_group_check(group)); /* wrong arguments end nothing */
    END;
}

TEST_WORLD(a_tensor_without_elements_needs_no_symmetric_memory, 2) {
    BEGIN;
    tt_tensor *none = plain(tt_shape(0), 0);
    CHECK_EQ(tt_numel(tt_one_shot_all_reduce(none, TUTTI_SUM, group)), 0);
    CHECK(tt_two_shot_all_reduce_(none, TUTTI_SUM, group) == none);
    CHECK_EQ(tt_size(tt_reduce_scatter_split(plain(tt_shape(3, 0), 0), TUTTI_SUM, group), 0), 3);
    END;
}

TEST(shapes_on_meta_need_a_group_only_where_its_size_matters) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = meta_like(tt_shape(8, 4), TUTTI_F32), *out = meta_like(tt_shape(8, 4), TUTTI_F32);
    CHECK(tt_size(tt_one_shot_all_reduce(x, TUTTI_SUM, NULL), 0) == 8);
    CHECK(tt_two_shot_all_reduce_(x, TUTTI_SUM, NULL) == x);
    CHECK(tt_one_shot_all_reduce_copy_out(out, x, x, TUTTI_SUM, NULL) == out);
    CHECK(tt_multimem_one_shot_reduce_out(out, x, TUTTI_SUM, 0, NULL) == out);
    CHECK(tt_low_contention_all_gather(x, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "group is NULL");
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 4, NULL, &world));
    tutti_group *group = tutti_world_group(world);
    CHECK(tt_size(tt_low_contention_all_gather(x, group), 0) == 32);
    CHECK(tt_size(tt_low_contention_reduce_scatter(x, TUTTI_SUM, group), 0) == 2);
    CHECK(tt_size(tt_reduce_scatter_split(x, TUTTI_SUM, group), 1) == 1);
    CHECK(tt_all_to_all_vdev(out, meta_like(tt_shape(2, 4), TUTTI_I64), x, meta_like(tt_shape(4), TUTTI_I64), group) ==
          out);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}

TEST(in_a_fake_world_results_are_made_of_the_input) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 4, NULL, &world));
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = on_symmetric(world, tt_view(tt_arange(0, 16, 1, TUTTI_F32, NULL), tt_shape(4, 4)));
    CHECK(tt_equal(tt_one_shot_all_reduce(x, TUTTI_SUM, group), x));
    CHECK(tt_two_shot_all_reduce_(tt_clone(x), TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "must be allocated"); /* arguments are checked as in a real one */
    CHECK(tt_equal(tt_multimem_one_shot_all_reduce(x, TUTTI_SUM, group), x));
    CHECK(tt_equal(tt_reduce_scatter_split(x, TUTTI_SUM, group), tt_narrow(x, 1, 1, 1)));
    CHECK(tt_equal(tt_low_contention_reduce_scatter(x, TUTTI_SUM, group), tt_narrow(x, 0, 1, 1)));
    tt_tensor *gathered = tt_low_contention_all_gather(x, group);
    for (int peer = 0; peer < 4; peer++)
        CHECK(tt_equal(tt_narrow(gathered, 0, 4 * peer, 4), x));
    CHECK(tt_wait_all(world));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}

TEST_WORLD(another_reduction_on_one_rank_fails_on_all, 2) {
    BEGIN;
    tt_tensor *x = symmetric(world, tt_shape(100), 1);
    CHECK(!test_settle(tt_one_shot_all_reduce(x, rank == 0 ? TUTTI_SUM : TUTTI_MAX, group)));
    expect_error(TUTTI_ERROR_MISMATCH, test_device() == TUTTI_CPU ? "max" : "rank 1"); /* a GPU compares hashes */
    CHECK_OK(tt_scope_close(&scope));
}

static tutti_status lose_rank_one(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = symmetric(world, tt_shape(100), 1);
    CHECK(all_are(tt_one_shot_all_reduce(x, TUTTI_SUM, group), 3));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1)
        raise(SIGKILL);
    CHECK(!test_settle(tt_two_shot_all_reduce_(x, TUTTI_SUM, group)));
    expect_error(TUTTI_ERROR_DEAD, "rank 1");
    CHECK_OK(tt_scope_close(&scope));
    return TUTTI_OK;
}

TEST(the_death_of_a_rank_is_told_where_its_result_is_needed) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, lose_rank_one, NULL), TUTTI_ERROR_DEAD);
}

TEST_WORLD(a_rank_that_does_not_come_is_told_at_the_deadline, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = symmetric(world, tt_shape(100), 1);
    CHECK(all_are(tt_one_shot_all_reduce(x, TUTTI_SUM, group), 2)); /* met */
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 0) {
        CHECK_OK(tutti_group_set_timeout(group, test_moment()));
        CHECK(!test_settle(tt_one_shot_all_reduce(x, TUTTI_SUM, group)));
        expect_error(TUTTI_ERROR_TIMEOUT, test_device() == TUTTI_CPU ? "rank 1" : "rank");
    } else {
        while (tutti_group_check(group) == TUTTI_OK) /* until the other has given up */
            usleep(1000);
    }
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- multicast ---- */

static void multicast(tutti_world *world, void *argument) {
    (void)argument;
    BEGIN;
    for (int round = 0; round < 2; round++) {
        tt_tensor *x = symmetric(world, tt_shape(6, 5), rank + 1);
        CHECK(all_are(tt_multimem_one_shot_all_reduce(x, TUTTI_SUM, group), 6) && all_are(x, rank + 1));
        tt_tensor *out = plain(tt_shape(6, 5), -1);
        CHECK(tt_multimem_one_shot_all_reduce_out(out, x, TUTTI_MAX, group) == out && all_are(out, 3));
        tt_tensor *root = rank == 1 ? plain(tt_shape(6, 5), 0) : NULL;
        CHECK(tt_multimem_one_shot_reduce_out(root, x, TUTTI_SUM, 1, group) == root);
        CHECK(rank != 1 || all_are(root, 6));
        tt_tensor *gathered = symmetric(world, tt_shape(18, 5), -1);
        CHECK(tt_multimem_all_gather_out(gathered, plain(tt_shape(6, 5), rank), group) == gathered);
        for (int peer = 0; peer < ranks; peer++)
            CHECK(all_are(tt_narrow(gathered, 0, 6 * peer, 6), peer));
        CHECK(tt_multimem_all_reduce_(x, TUTTI_SUM, group) == x && all_are(x, 6));
        CHECK(tt_wait_all(world));
        CHECK_OK(tutti_barrier(group, NULL));
    }
    tt_tensor *x = tt_require_grad(symmetric(world, tt_shape(3), 1), true);
    CHECK(tt_backward(tt_sum(tt_multimem_one_shot_all_reduce(x, TUTTI_SUM, group)), NULL) && all_are(tt_grad(x), 3));
    bool recording = tt_grad_mode(false);
    CHECK(tt_multimem_one_shot_reduce_out(NULL, x, TUTTI_SUM, 3, group) == NULL);
    expect_error(TUTTI_ERROR_RANGE, "root must be in [0, 3)");
    CHECK(tt_multimem_one_shot_reduce_out(NULL, x, TUTTI_SUM, rank, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "needs an out");
    CHECK(tt_multimem_all_gather_out(plain(tt_shape(9), 0), x, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "output must be allocated with empty_strided_p2p()");
    CHECK(tt_multimem_all_gather_out(symmetric(world, tt_shape(8), 0), x, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "dimension 0 of out");
    CHECK(tt_multimem_all_gather_out(symmetric(world, tt_shape(9, 1), 0), x, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "as many dimensions");
    tt_grad_mode(recording);
    END;
}

TEST(multicast_by_the_processors_gives_the_same_results) {
    with_software_multicast(3, multicast);
}

TEST_WORLD(without_multicast_its_operations_say_so_and_end_nothing, 2) {
    BEGIN;
    tt_tensor *x = symmetric(world, tt_shape(8), 1);
    CHECK(tt_multimem_all_reduce_(x, TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_UNSUPPORTED, "multicast support is required");
    CHECK(tt_multimem_one_shot_all_reduce(x, TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_UNSUPPORTED, "multicast support is required");
    CHECK_OK(tutti_group_check(group));
    END;
}

/* ---- all-gather and reduce-scatter ---- */

TEST_WORLD(low_contention_forms_and_their_gradients, 3) { /* spec: test_low_contention_… [symm/not] */
    BEGIN;
    for (int symm = 0; symm < 2; symm++) {
        tt_tensor *x = plain(tt_shape(2, 4), rank), *chunks = plain(tt_shape(6, 4), 0);
        for (int peer = 0; peer < ranks; peer++)
            tt_fill_(tt_narrow(chunks, 0, 2 * peer, 2), peer);
        if (symm) {
            x = on_symmetric(world, x);
            chunks = on_symmetric(world, chunks);
        }
        tt_require_grad(x, true);
        tt_require_grad(chunks, true);
        tt_tensor *gathered = tt_low_contention_all_gather(x, group);
        for (int peer = 0; peer < ranks; peer++)
            CHECK(all_are(tt_narrow(gathered, 0, 2 * peer, 2), peer));
        CHECK(tt_backward(tt_sum(tt_mul_scalar(gathered, rank + 1)), NULL) && all_are(tt_grad(x), 6));
        tt_tensor *sum = tt_low_contention_reduce_scatter(chunks, TUTTI_SUM, group);
        CHECK(all_are(sum, rank * ranks) && all_are(tt_low_contention_reduce_scatter(chunks, TUTTI_AVG, group), rank));
        CHECK(tt_backward(tt_sum(tt_mul_scalar(sum, rank + 1)), NULL));
        for (int peer = 0; peer < ranks; peer++)
            CHECK(all_are(tt_narrow(tt_grad(chunks), 0, 2 * peer, 2), peer + 1));
    }
    tt_tensor *one = tt_require_grad(plain(tt_shape(), rank), true), *each = tt_low_contention_all_gather(one, group);
    CHECK(tt_size(each, 0) == ranks && tt_backward(tt_sum(each), NULL) && all_are(tt_grad(one), ranks));
    tt_tensor *turned = tt_transpose(plain(tt_shape(2, 3), rank), 0, 1); /* any strides */
    CHECK(all_are(tt_narrow(tt_low_contention_all_gather(turned, group), 0, 3, 3), 1));
    CHECK(tt_low_contention_reduce_scatter(plain(tt_shape(4), 1), TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "not divisible");
    END;
}

TEST_WORLD(reduce_scatter_splits_the_last_dimension, 4) { /* spec: test_reduce_scatter, corner cases */
    BEGIN;
    tt_tensor *values = tt_view(tt_arange(0, 24, 1, TUTTI_F32, NULL), tt_shape(3, 8));
    for (int round = 0; round < 2; round++) {
        tt_tensor *x = tt_require_grad(on_symmetric(world, tt_mul_scalar(values, rank + 1)), true);
        tt_tensor *part = tt_reduce_scatter_split(x, round == 0 ? TUTTI_SUM : TUTTI_AVG, group);
        tt_tensor *wanted = tt_mul_scalar(tt_narrow(values, 1, 2 * rank, 2), round == 0 ? 10 : 2.5);
        CHECK(tt_equal(part, wanted));
        CHECK(tt_backward(tt_sum(tt_mul_scalar(part, rank + 1)), NULL));
        for (int peer = 0; peer < ranks; peer++)
            CHECK(all_are(tt_narrow(tt_grad(x), 1, 2 * peer, 2), (peer + 1) * (round == 0 ? 1 : 0.25)));
        tt_tensor *out = plain(tt_shape(3, 2), 0), *flat = tt_view(tt_detach(x), tt_shape(24));
        CHECK(tt_reduce_scatter_split_out(out, tt_detach(x), TUTTI_SUM, group) == out);
        CHECK(tt_equal(out, tt_mul_scalar(tt_narrow(values, 1, 2 * rank, 2), 10)));
        CHECK(tt_equal(tt_reduce_scatter_split(flat, TUTTI_SUM, group), /* flat: a piece of it */
                       tt_mul_scalar(tt_narrow(tt_view(values, tt_shape(24)), 0, 6 * rank, 6), 10)));
        CHECK(tt_wait_all(world));
        CHECK_OK(tutti_barrier(group, NULL));
    }
    tt_tensor *x = symmetric(world, tt_shape(100), 1);
    CHECK(tt_reduce_scatter_split(tt_narrow(x, 0, 0, 50), TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "divisible");
    CHECK(tt_reduce_scatter_split(tt_view(x, tt_shape(2, 50)), TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "last dimension");
    CHECK(tt_reduce_scatter_split_out(plain(tt_shape(24), 0), x, TUTTI_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "input/output size mismatch");
    CHECK_EQ(tt_numel(tt_reduce_scatter_split(tt_narrow(x, 0, 0, 0), TUTTI_SUM, group)), 0);
    END;
}

/* ---- all-to-all by splits that are data ---- */

TEST_WORLD(rows_go_where_the_splits_say, 3) {
    BEGIN;
    for (int round = 0; round < 2; round++) {
        int64_t splits[3], wanted[6];
        int64_t sent = 0, came = 0;
        for (int peer = 0; peer < ranks; peer++) {
            splits[peer] = (rank + peer) % 3;
            sent += splits[peer];
            wanted[peer] = (rank + peer) % 3; /* what that peer sends here */
            wanted[ranks + peer] = came;
            came += wanted[peer];
        }
        tt_tensor *x = tt_symm_empty(world, tt_shape(6, 2), TUTTI_F32, NULL),
                  *out = symmetric(world, tt_shape(9, 2), -1);
        for (int peer = 0, at = 0; peer < ranks; at += (int)splits[peer++])
            tt_fill_(tt_narrow(x, 0, at, splits[peer]), 10 * rank + peer);
        CHECK(sent <= 6);
        tt_tensor *in_splits = on_symmetric(world, tt_from(splits, tt_shape(3), TUTTI_I64, NULL));
        tt_tensor *out_splits = tt_symm_empty(world, tt_shape(2, 3), TUTTI_I64, NULL);
        CHECK(tt_all_to_all_vdev(out, out_splits, x, in_splits, group) == out);
        CHECK(is_i64(out_splits, tt_shape(2, 3), wanted) && is_i64(in_splits, tt_shape(3), splits));
        for (int peer = 0; peer < ranks; peer++)
            CHECK(all_are(tt_narrow(out, 0, wanted[ranks + peer], wanted[peer]), 10 * peer + rank));
        CHECK(all_are(tt_narrow(out, 0, came, 9 - came), -1));
        CHECK(tt_version(out) == 2 && tt_version(out_splits) == 1);
        CHECK_OK(tutti_barrier(group, NULL));
    }
    END;
}

/* There and back again: to the experts, each aligned, and home in the order in which the rows left. */
TEST_WORLD(rows_go_to_experts_and_come_back, 2) {
    BEGIN;
    enum {
        EXPERTS = 2,
        ALIGN = 4
    };
    int64_t splits[2 * EXPERTS] = { 1 + rank, 2, 0, 3 - rank }; /* by rank, then expert */
    int64_t rows = 1 + rank + 2 + 0 + 3 - rank;
    tt_tensor *x = tt_symm_empty(world, tt_shape(8, 3), TUTTI_F32, NULL), *at = symmetric(world, tt_shape(16, 3), -1);
    tt_copy_(x, tt_add_scalar(tt_view(tt_arange(0, 24, 1, TUTTI_F32, NULL), tt_shape(8, 3)), 100 * rank));
    tt_tensor *in_splits = on_symmetric(world, tt_from(splits, tt_shape(4), TUTTI_I64, NULL));
    tt_tensor *middle = tt_symm_empty(world, tt_shape(2, 4), TUTTI_I64, NULL);
    CHECK(tt_all_to_all_vdev_2d(at, middle, x, in_splits, ALIGN, group) == at);
    /* Rank 0's splits are {1, 2, 0, 3}, rank 1's {2, 2, 0, 2}: by expert, then rank. */
    int64_t wanted[2][8] = { { 1, 2, 2, 2, 0, 1, 4, 6 }, { 0, 0, 3, 2, 0, 0, 4, 7 } };
    CHECK(is_i64(middle, tt_shape(2, 4), wanted[rank]));
    tt_tensor *home = symmetric(world, tt_shape(8, 3), -1),
              *last = tt_symm_empty(world, tt_shape(2, 4), TUTTI_I64, NULL);
    CHECK(tt_all_to_all_vdev_2d_offset(home, last, at, middle, group) == home);
    CHECK(tt_equal(tt_narrow(home, 0, 0, rows), tt_narrow(x, 0, 0, rows)));
    CHECK(tt_equal(tt_select(last, 0, 0), in_splits));
    CHECK_OK(tutti_barrier(group, NULL));
    END;
}

TEST_WORLD(splits_and_rows_that_do_not_fit_are_refused, 2) {
    BEGIN;
    tt_tensor *x = symmetric(world, tt_shape(4, 2), 1), *out = symmetric(world, tt_shape(4, 2), 0);
    tt_tensor *in = tt_symm_empty(world, tt_shape(2), TUTTI_I64, NULL),
              *to = tt_symm_empty(world, tt_shape(2, 2), TUTTI_I64, NULL);
    tt_tensor *narrow = symmetric(world, tt_shape(4, 3), 0),
              *short_splits = tt_symm_empty(world, tt_shape(3), TUTTI_I64, NULL);
    CHECK(tt_all_to_all_vdev(out, to, x, tt_to(in, TUTTI_I32), group) == NULL);
    expect_error(TUTTI_ERROR_TYPE, "in_splits must be int64");
    CHECK(tt_all_to_all_vdev(out, in, x, in, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "out_splits_offsets must be a row of splits and a row of offsets");
    CHECK(tt_all_to_all_vdev(out, to, x, short_splits, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "in_splits has 3 entries");
    CHECK(tt_all_to_all_vdev(narrow, to, x, in, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "rows of one length");
    CHECK(tt_all_to_all_vdev(out, to, plain(tt_shape(4, 2), 1), in, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "input must be allocated with empty_strided_p2p()");
    CHECK(tt_all_to_all_vdev(out, to, x, tt_clone(in), group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "in_splits must be allocated with empty_strided_p2p()");
    CHECK(tt_all_to_all_vdev_2d(out, to, x, in, -1, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "major_align");
    CHECK_OK(tutti_group_check(group));
    END;
}

/* ---- captured ---- */

/* Inputs: a symmetric x, a symmetric buffer, the four tensors of an exchange. */
static int everything(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    tutti_group *group = user;
    tt_tensor *x = inputs.at[0], *buffer = inputs.at[1];
    outputs[0] = tt_add_scalar(tt_one_shot_all_reduce(x, TUTTI_SUM, group), 1);
    outputs[1] = tt_one_shot_all_reduce_copy(buffer, tt_mul_scalar(x, 2), TUTTI_SUM, group);
    outputs[2] = tt_low_contention_all_gather(x, group);
    outputs[3] = tt_reduce_scatter_split(x, TUTTI_AVG, group);
    outputs[4] = tt_clone(tt_peer_tensor(x, 0, group));
    tt_two_shot_all_reduce_(buffer, TUTTI_MAX, group);
    outputs[5] = tt_clone(buffer);
    tt_all_to_all_vdev(inputs.at[2], inputs.at[3], x, inputs.at[4], group);
    outputs[6] = tt_clone(inputs.at[2]);
    tt_tensor *plain_one = tt_mul_scalar(x, 3), *plain_two = tt_add_scalar(x, 5);
    outputs[7] = tt_all_reduce_coalesced_(tt_tensors(plain_one, plain_two), TUTTI_SUM, group).at[1];
    outputs[8] = tt_all_gather_list(x, NULL, group).at[1];
    outputs[9] = tt_reduce_scatter_premul(x, 0.5, 0, group);
    return 10;
}

enum {
    RESULTS = 10
};

TEST_WORLD(graphs_of_these_operations_give_what_they_give, 2) {
    BEGIN;
    tt_tensor *inputs[5] = {
        on_symmetric(world, tt_add_scalar(tt_view(tt_arange(0, 8, 1, TUTTI_F32, NULL), tt_shape(4, 2)), 10 * rank)),
        symmetric(world, tt_shape(4, 2), 0), symmetric(world, tt_shape(4, 2), 0),
        tt_symm_empty(world, tt_shape(2, 2), TUTTI_I64, NULL),
        on_symmetric(world, tt_full(tt_shape(2), 2, TUTTI_I64, NULL))
    };
    tt_graph *graph;
    tt_tensor *wanted[RESULTS];
    CHECK(tt_capture(everything, group, tt_tensors_of(5, inputs), &graph));
    CHECK_EQ(tt_graph_count_of(graph, "one_shot_all_reduce"), 1);
    CHECK_EQ(tt_graph_count_of(graph, "peer_tensor"), 1);
    CHECK(tt_graph_check(graph));
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK_EQ(everything(tt_tensors_of(5, inputs), wanted, group), RESULTS);
    for (int i = 0; i < RESULTS; i++)
        wanted[i] = tt_clone(wanted[i]);
    CHECK_OK(tutti_barrier(group, NULL));
    for (int round = 0; round < 2; round++) {
        tt_tensor_list got = tt_graph_run(graph, tt_tensors_of(5, inputs));
        CHECK_EQ(got.count, RESULTS);
        for (int i = 0; i < RESULTS; i++)
            if (!tt_equal(got.at[i], wanted[i]))
                FAIL("result %d differs in round %d", i, round);
        CHECK(tt_wait_all(world));
        CHECK_OK(tutti_barrier(group, NULL));
    }
    tt_graph_release(&graph);
    END;
}
