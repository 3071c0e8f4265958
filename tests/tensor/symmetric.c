/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on symmetric memory: the peers' tensors, pool scopes, and whether all this is on.
 */
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <tutti/peers.h>
#include <tutti/symmetric.h>

#include "functional/symmetric.h"
#include "support.h"

static tt_tensor *symmetric(tutti_world *world, tt_dims shape, double value) {
    return tt_fill_(tt_symm_empty(world, shape, TUTTI_F32, NULL), value);
}

static void barrier(tutti_group *group) {
    CHECK_OK(tutti_barrier(group, NULL));
}

/* ---- peers ---- */

TEST_WORLD(a_peer_tensor_reads_and_writes_where_the_peer_has_its_own, 3) {
    BEGIN;
    tt_tensor *x = symmetric(world, tt_shape(4, 6), rank);
    for (int peer = 0; peer < ranks; peer++) {
        tt_tensor *theirs = tt_peer_tensor(x, peer, group);
        barrier(group);
        CHECK(all_are(theirs, peer) && tt_same_storage(theirs, x) == (peer == rank));
        barrier(group);
    }
    int next = (rank + 1) % ranks;
    tt_tensor *there = tt_peer_tensor(x, next, group);
    tt_fill_(tt_narrow(there, 1, 2, 2), 10 + rank); /* a view of it, written through */
    barrier(group);
    CHECK(all_are(tt_narrow(x, 1, 2, 2), 10 + (rank + ranks - 1) % ranks) && all_are(tt_narrow(x, 1, 0, 2), rank));
    CHECK(tt_version(there) == 1); /* what was written through it, and nothing else */
    END;
}

TEST_WORLD(a_peer_tensor_of_a_view_is_that_view, 2) {
    BEGIN;
    tt_tensor *x = tt_symm_empty(world, tt_shape(3, 4), TUTTI_F32, NULL);
    tt_copy_(x, tt_add_scalar(tt_view(tt_arange(0, 12, 1, TUTTI_F32, NULL), tt_shape(3, 4)), 100 * rank));
    tt_tensor *column = tt_transpose(tt_slice(tt_narrow(x, 0, 1, 2), 1, 1, 4, 2), 0, 1); /* offset, strides, turned */
    tt_tensor *theirs = tt_peer_tensor(column, 1 - rank, group);
    barrier(group);
    CHECK(tt_equal(theirs, tt_add_scalar(column, rank == 0 ? 100 : -100)));
    CHECK(!tt_is_contiguous(theirs) && tt_offset(theirs) == tt_offset(column));
    CHECK_EQ(tt_stride(theirs, 0), tt_stride(column, 0));
    barrier(group);
    END;
}

TEST_WORLD(a_peer_tensor_outlives_what_it_came_from, 2) {
    BEGIN;
    tt_tensor *theirs;
    {
        tt_scope inner = tt_scope_open();
        tt_tensor *x = symmetric(world, tt_shape(1000), 7 + rank);
        theirs = tt_keep(tt_peer_tensor(x, 1 - rank, group));
        CHECK_OK(tt_scope_close(&inner)); /* x is gone, on both ranks */
    }
    barrier(group);
    CHECK(all_are(theirs, 8 - rank));
    tt_release(theirs);
    END;
}

/* Its last use waits in a stream that is not the current one any more: nothing is unmapped below it, whoever maps it.
 */
static void check_released_behind(tutti_world *world, void *argument) {
    (void)argument;
    BEGIN;
    void *streams[] = { tt_stream_new(test_device()), tt_stream_new(test_device()) };
    tt_tensor *large = tt_full(tt_shape(256, 256), 1, TUTTI_F32, NULL);
    CHECK(tt_synchronize(test_device()));
    for (int of_peer = 0; of_peer < 2; of_peer++) {
        tt_scope inner = tt_scope_open();
        CHECK(tt_stream_set(test_device(), streams[0]));
        tt_tensor *x = symmetric(world, tt_shape(1 << 18), rank), *theirs = tt_peer_tensor(x, 1 - rank, group);
        CHECK(tt_synchronize(test_device()));
        barrier(group);
        tt_tensor *late = tt_mul_scalar(tt_matmul(large, large), 0), *y = tt_add(of_peer ? theirs : x, tt_sum(late));
        tt_scope_return(y);
        CHECK(tt_stream_set(test_device(), streams[1]));
        CHECK_OK(tt_scope_close(&inner));
        CHECK(tt_stream_set(test_device(), streams[0]));
        CHECK(all_are(y, of_peer ? 1 - rank : rank));
    }
    CHECK(tt_stream_set(test_device(), NULL));
    for (int i = 0; i < 2; i++)
        tt_stream_release(test_device(), streams[i]);
    END;
}

TEST(what_a_stream_still_uses_is_released_behind_it) {
    if (!test_on_device())
        SKIP("this is the cpu, which has no streams");
    test_threads(2, check_released_behind, NULL);
    test_device_leave();
}

TEST_WORLD(a_peer_tensor_is_no_part_of_the_graph, 2) {
    BEGIN;
    tt_tensor *x = tt_require_grad(symmetric(world, tt_shape(4), 1 + rank), true);
    tt_tensor *theirs = tt_peer_tensor(x, 1 - rank, group);
    barrier(group);
    CHECK(!tt_requires_grad(theirs));
    CHECK(tt_backward(tt_sum(tt_mul(x, theirs)), NULL) && all_are(tt_grad(x), 2 - rank)); /* a constant */
    barrier(group);
    /* The version sees this rank's writes: a gradient that saved it is refused. */
    tt_tensor *product = tt_sum(tt_mul(x, theirs));
    tt_fill_(theirs, 5);
    CHECK(!tt_backward(product, NULL));
    expect_error(TUTTI_ERROR_VERSION, "");
    barrier(group);
    END;
}

TEST_WORLD(peers_of_a_subgroup_are_counted_in_it, 4) {
    BEGIN;
    tutti_group *half;
    CHECK_OK(tutti_group_new_subgroups(group, 2, NULL, NULL, &half));
    tt_tensor *x = symmetric(world, tt_shape(5), rank);
    tt_tensor *near = tt_peer_tensor(x, 1 - tutti_group_rank(half), half),
              *far = tt_peer_tensor(x, ranks - 1 - rank, group);
    barrier(group);
    CHECK(all_are(near, rank ^ 1) && all_are(far, ranks - 1 - rank));
    barrier(group);
    END;
    tutti_group_release(half);
}

TEST_WORLD(what_has_no_peer_tensor_says_why, 2) {
    BEGIN;
    tt_tensor *x = symmetric(world, tt_shape(4), 1), *plain = tt_zeros(tt_shape(4), TUTTI_F32, NULL);
    CHECK(tt_peer_tensor(plain, 0, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "must be allocated with empty_strided_p2p()");
    for (int bad = -1; bad <= ranks; bad += ranks + 1) {
        CHECK(tt_peer_tensor(x, bad, group) == NULL);
        expect_error(TUTTI_ERROR_RANGE, "rank must be in [0, 2)");
    }
    CHECK(tt_peer_tensor(x, 0, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "group is NULL");
    CHECK(tt_peer_tensor(NULL, 0, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "x");
    CHECK_OK(tutti_group_check(group)); /* a wrong argument ends nothing */
    tt_tensor *theirs = tt_peer_tensor(x, 1 - rank, group);
    CHECK(!tt_storage_resize(theirs, 0));
    expect_error(TUTTI_ERROR_STATE, "not resizable");
    tt_tensor *shape =
        tt_peer_tensor(tt_empty(tt_shape(2, 3), TUTTI_F32, TUTTI_OPTIONS(tt_options, .device = TUTTI_META)), 1, NULL);
    CHECK(tt_device_of(shape) == TUTTI_META && tt_size(shape, 1) == 3); /* meta needs neither group nor memory */
    END;
}

TEST(in_a_fake_world_every_peer_is_this_rank) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 4, NULL, &world));
    tt_scope scope = tt_scope_open();
    tt_tensor *x = symmetric(world, tt_shape(4), 3);
    for (int peer = 0; peer < 4; peer++)
        CHECK(tt_same_storage(tt_peer_tensor(x, peer, tutti_world_group(world)), x));
    CHECK(tt_peer_tensor(tt_zeros(tt_shape(4), TUTTI_F32, NULL), 0, tutti_world_group(world)) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "must be allocated");
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}

TEST_WORLD(blocks_that_differ_do_not_meet_and_end_nothing, 2) {
    BEGIN;
    tt_tensor *x = symmetric(world, tt_shape(4 + 4 * rank), 1);
    CHECK(tt_peer_tensor(x, 0, group) == NULL);
    expect_error(TUTTI_ERROR_MISMATCH, "");
    CHECK_OK(tutti_group_check(group));
    CHECK(all_are(tt_peer_tensor(symmetric(world, tt_shape(4), 1), rank, group), 1));
    END;
}

static tutti_status meet_without_rank_one(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_world_rank(world) == 1)
        raise(SIGKILL);
    tt_scope scope = tt_scope_open();
    CHECK(tt_peer_tensor(symmetric(world, tt_shape(4), 1), 0, group) == NULL);
    expect_error(TUTTI_ERROR_DEAD, "rank 1");
    CHECK_OK(tt_scope_close(&scope));
    return TUTTI_OK;
}

TEST(a_peer_that_is_dead_is_told_where_all_meet) {
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 3, meet_without_rank_one, NULL), TUTTI_ERROR_DEAD);
}

TEST_WORLD(a_peer_that_does_not_come_is_told_at_the_deadline, 2) {
    tutti_group *group = tutti_world_group(world);
    CHECK_OK(tutti_barrier(group, NULL));
    tt_scope scope = tt_scope_open();
    if (tutti_world_rank(world) == 0) {
        CHECK_OK(tutti_group_set_timeout(group, test_moment()));
        CHECK(tt_peer_tensor(symmetric(world, tt_shape(4), 1), 1, group) == NULL);
        expect_error(TUTTI_ERROR_TIMEOUT, "rank 1");
    } else {
        while (tutti_group_check(group) == TUTTI_OK) /* until the other has given up */
            usleep(1000);
    }
    CHECK_OK(tt_scope_close(&scope));
}

/* Every allocation fails in turn; nothing is left behind. A world each: a rendezvous that fails ends its group. */
static tutti_status one_peer_tensor(void *argument) {
    (void)argument;
    tutti_world *world;
    tutti_status status = tutti_world_open(NULL, &world);
    if (status != TUTTI_OK)
        return status;
    tt_scope scope = tt_scope_open();
    tt_peer_tensor(tt_symm_empty(world, tt_shape(64), TUTTI_F32, NULL), 0, tutti_world_group(world));
    status = tt_scope_close(&scope);
    tutti_error_copy error;
    tu_error_save(&error);
    tutti_status closed = tutti_world_close(world);
    return status != TUTTI_OK ? tu_error_restore(&error) : closed;
}

TEST(a_peer_tensor_without_memory_leaves_nothing_behind) {
    CHECK_OK(one_peer_tensor(NULL));
    test_fail_each("malloc,calloc,realloc,aligned_alloc", one_peer_tensor, NULL);
}

/* ---- pool scopes ---- */

static tutti_pool *new_pool(tutti_world *world) {
    tutti_pool *pool;
    CHECK_OK(tutti_pool_new(world, TEST_OF_DEVICE, &pool));
    return pool;
}

TEST_WORLD(everything_made_in_a_pool_scope_is_symmetric, 2) {
    BEGIN;
    tutti_pool *pool = new_pool(world);
    tt_tensor *before = tt_ones(tt_shape(8, 8), TUTTI_F32, NULL);
    CHECK(tt_symm_pool_begin(pool, group));
    tt_tensor *made = tt_full(tt_shape(8, 8), rank + 1, TUTTI_F32, NULL), *product = tt_matmul(made, before),
              *sum = tt_add_scalar(made, 1);
    CHECK(tt_symm_pool_end());
    tt_tensor *after = tt_add_scalar(made, 1);
    CHECK(tt_symm_memory(made) != NULL && tt_symm_memory(product) != NULL && tt_symm_memory(sum) != NULL);
    CHECK(tt_symm_memory(before) == NULL && tt_symm_memory(after) == NULL);
    tt_tensor *theirs = tt_peer_tensor(product, 1 - rank, group);
    barrier(group);
    CHECK(all_are(theirs, 8 * (2 - rank)) && all_are(product, 8 * (rank + 1)));
    barrier(group);
    END;
    tutti_pool_release(pool);
}

TEST(memory_of_a_pool_scope_is_used_again) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    tutti_pool *pool = new_pool(world);
    const void *first = NULL;
    for (int step = 0; step < 3; step++) {
        tt_scope scope = tt_scope_open();
        CHECK(tt_symm_pool_begin(pool, NULL));
        const void *at = tt_data(tt_ones(tt_shape(1000), TUTTI_F32, NULL));
        CHECK(step == 0 || at == first);
        first = at;
        CHECK(tt_symm_pool_end());
        CHECK_OK(tt_scope_close(&scope));
    }
    tutti_pool_statistics statistics = TUTTI_POOL_STATISTICS_INIT;
    CHECK_OK(tutti_pool_query(pool, &statistics));
    CHECK(statistics.used_blocks == 0 && statistics.reused >= 2);
    tutti_pool_release(pool);
    CHECK_OK(tutti_world_close(world));
}

TEST(pool_scopes_nest_and_hold_their_pools) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    tutti_pool *outer = new_pool(world), *inner = new_pool(world);
    tutti_pool_statistics of_outer = TUTTI_POOL_STATISTICS_INIT, of_inner = TUTTI_POOL_STATISTICS_INIT;
    tt_scope scope = tt_scope_open();
    CHECK(tt_symm_pool_begin(outer, NULL));
    tt_ones(tt_shape(10), TUTTI_F32, NULL);
    CHECK(tt_symm_pool_begin(inner, NULL));
    tt_ones(tt_shape(10), TUTTI_F32, NULL);
    tt_ones(tt_shape(20), TUTTI_F32, NULL);
    CHECK_OK(tutti_pool_query(outer, &of_outer));
    CHECK_OK(tutti_pool_query(inner, &of_inner));
    CHECK(of_outer.used_blocks == 1 && of_inner.used_blocks == 2);
    tutti_pool_release(inner); /* the scope holds it */
    tt_tensor *last = tt_ones(tt_shape(30), TUTTI_F32, NULL);
    CHECK(tt_symm_memory(last) != NULL && tt_symm_pool_end());
    tt_ones(tt_shape(40), TUTTI_F32, NULL);
    CHECK_OK(tutti_pool_query(outer, &of_outer));
    CHECK(of_outer.used_blocks == 2 && tt_symm_pool_end());
    CHECK(all_are(last, 1)); /* the tensor holds its block */
    CHECK(!tt_symm_pool_end());
    expect_error(TUTTI_ERROR_STATE, "no pool scope is open");
    CHECK_OK(tt_scope_close(&scope));
    tutti_pool_release(outer);
    CHECK_OK(tutti_world_close(world));
}

static void *make_beside(void *argument) {
    (void)argument;
    tt_scope scope = tt_scope_open();
    bool ordinary = tt_symm_memory(tt_ones(tt_shape(10), TUTTI_F32, NULL)) == NULL;
    CHECK_OK(tt_scope_close(&scope));
    return ordinary ? argument : NULL;
}

static void *leave_open(void *argument) {
    CHECK(tt_symm_pool_begin(argument, NULL));
    return argument; /* the thread's end ends the scope */
}

TEST(a_pool_scope_is_its_threads_alone_and_ends_with_it) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    tutti_pool *pool = new_pool(world);
    pthread_t thread;
    void *result;
    CHECK(tt_symm_pool_begin(pool, NULL));
    CHECK(pthread_create(&thread, NULL, make_beside, pool) == 0 && pthread_join(thread, &result) == 0);
    CHECK(result == pool && tt_symm_pool_end());
    CHECK(pthread_create(&thread, NULL, leave_open, pool) == 0 && pthread_join(thread, &result) == 0);
    tutti_pool_release(pool);
    CHECK_OK(tutti_world_close(world)); /* would name a pool that is still held */
}

TEST_WORLD(ranks_that_make_other_tensors_in_a_pool_scope_are_told, 2) {
    BEGIN;
    tutti_pool *pool = new_pool(world);
    for (int kind = 0; kind < 3; kind++) {
        CHECK(tt_symm_pool_begin(pool, group));
        int64_t sizes[3][2] = { { 16, 16 }, { 16, 32 }, { 32, 16 } }; /* another one, another size, another order */
        tt_ones(tt_shape(sizes[kind][rank * (kind > 0)]), TUTTI_F32, NULL);
        if (kind == 0 && rank == 1)
            tt_ones(tt_shape(3), TUTTI_F32, NULL);
        if (kind == 2)
            tt_ones(tt_shape(sizes[kind][1 - rank]), TUTTI_F32, NULL);
        CHECK(!tt_symm_pool_end());
        CHECK_EQ(tt_error_show(), TUTTI_ERROR_MISMATCH);
        CHECK_MESSAGE("rank 1");
        expect_error(TUTTI_ERROR_MISMATCH, "all ranks must make the same ones");
        CHECK_OK(tutti_group_check(group)); /* all got the same answer: nothing has ended */
    }
    CHECK(tt_symm_pool_begin(pool, group));
    tt_ones(tt_shape(5), TUTTI_F32, NULL);
    CHECK(tt_symm_pool_end());
    END;
    tutti_pool_release(pool);
}

TEST_WORLD(a_rank_whose_step_failed_in_a_pool_scope_ends_the_others, 2) {
    BEGIN;
    tutti_pool *pool = new_pool(world);
    CHECK(tt_symm_pool_begin(pool, group));
    if (rank == 1)
        tt_matmul(tt_ones(tt_shape(2, 3), TUTTI_F32, NULL), tt_ones(tt_shape(2, 3), TUTTI_F32, NULL));
    CHECK(!tt_symm_pool_end());
    CHECK_EQ(tt_error_show(), rank == 1 ? TUTTI_ERROR_ARGUMENT : TUTTI_ERROR_ABORTED);
    CHECK_MESSAGE("matmul");
    tt_error_clear();
    CHECK(!tt_symm_pool_end()); /* it was ended all the same */
    expect_error(TUTTI_ERROR_STATE, "no pool scope");
    CHECK_OK(tt_scope_close(&scope));
    tutti_pool_release(pool);
}

TEST(a_pool_scope_needs_a_pool_of_the_cpu) {
    tt_scope scope = tt_scope_open();
    CHECK(!tt_symm_pool_begin(NULL, NULL));
    expect_error(TUTTI_ERROR_ARGUMENT, "pool is NULL");
    CHECK_OK(tt_scope_close(&scope));
}

static tutti_status in_a_pool_scope(void *argument) {
    tt_scope scope = tt_scope_open();
    tt_symm_pool_begin(argument, NULL);
    tt_add_scalar(tt_ones(tt_shape(100), TUTTI_F32, NULL), 1);
    if (tt_error_pending() == TUTTI_OK)
        tt_symm_pool_end();
    else { /* begun or not, the first error is what counts */
        tutti_status status = tt_error_show();
        tt_error_clear();
        tt_symm_pool_end();
        tt_error_clear();
        tutti_status closed = tt_scope_close(&scope);
        return closed == TUTTI_OK ? tutti_error_set(status, "the ranks-th allocation failed") : closed;
    }
    return tt_scope_close(&scope);
}

TEST(a_pool_scope_without_memory_is_an_error_and_leaves_nothing_behind) {
    tutti_world *world;
    if (test_device() != TUTTI_CPU)
        SKIP("a driver allocates memory of the host too, and keeps descriptors");
    CHECK_OK(tutti_world_open(NULL, &world));
    tutti_pool *pool = new_pool(world);
    CHECK_OK(in_a_pool_scope(pool));
    test_fail_each("malloc,calloc,realloc,aligned_alloc", in_a_pool_scope, pool);
    tutti_pool_trim(pool);
    tutti_pool_statistics statistics = TUTTI_POOL_STATISTICS_INIT;
    CHECK_OK(tutti_pool_query(pool, &statistics));
    CHECK(statistics.used_blocks == 0);
    tutti_pool_release(pool);
    CHECK_OK(tutti_world_close(world));
}

/* ---- whether it is on ---- */

TEST(symmetric_memory_is_on_for_every_group_and_in_test_mode_for_named_ones) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(0, 4, NULL, &world));
    const char *name = tutti_group_name(tutti_world_group(world)), *mocked[] = { "mocked_group", "another" };
    CHECK(tt_symm_enabled(world, name) && !tt_symm_enabled(world, "unknown") && !tu_symm_test_mode());
    CHECK(tt_symm_test_begin(2, mocked));
    CHECK(tt_symm_enabled(world, "mocked_group") && tt_symm_enabled(world, "another") && tu_symm_test_mode());
    CHECK(!tt_symm_enabled(world, name));
    CHECK(tt_symm_test_begin(0, NULL)); /* nested: all of them */
    CHECK(tt_symm_enabled(world, name) && tt_symm_enabled(world, "unknown"));
    tt_symm_test_end();
    CHECK(!tt_symm_enabled(world, name) && tt_symm_enabled(world, "mocked_group"));
    tt_symm_test_end();
    CHECK(tt_symm_enabled(world, name) && !tt_symm_enabled(world, "mocked_group") && !tu_symm_test_mode());
    tt_symm_test_end();
    expect_error(TUTTI_ERROR_STATE, "no test mode");
    CHECK(!tt_symm_test_begin(1, (const char *[]){ NULL }));
    expect_error(TUTTI_ERROR_ARGUMENT, "name 0 of 1");
    CHECK(!tt_symm_enabled(world, NULL));
    expect_error(TUTTI_ERROR_ARGUMENT, "group is NULL");
    CHECK_OK(tutti_world_close(world));
}
