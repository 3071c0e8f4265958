/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused products on a device whose driver fails in any one call, on one of two ranks: both hear of it, nobody waits
 * until a deadline, nothing is left behind, and the next world works.
 */
#include "gpu.h"

#include "../failing.h"

#define MINUTE ((int64_t)60 * 1000000000)

static tutti_status take(void *argument, tt_tensor_list shards, int rank) {
    (void)rank;
    tt_add_(argument, shards.at[0]);
    return TUTTI_OK;
}

static tutti_status give(void *argument, int rank, tt_tensor *out) {
    (void)argument;
    tt_fill_(out, rank);
    return TUTTI_OK;
}

/* What goes wrong is pending then, as with the other forms, so that the others hear of it. */
static void keep_pending(tutti_status status) {
    if (status != TUTTI_OK)
        tt_error_set(status, tutti_error_message());
}

static void pipelines(tutti_world *world, tutti_group *group, tt_tensor *x) {
    tt_tensor *sum = there(tt_zeros(tt_shape(8, 16), TUTTI_F32, NULL)),
              *gathered = there(tt_zeros(tt_shape(16, 16), TUTTI_F32, NULL)),
              *other = there(tt_zeros(tt_shape(16, 16), TUTTI_F32, NULL)),
              *placed = symmetric_there(world, whole(tt_shape(8, 16), TUTTI_F32, 5));
    keep_pending(
        tt_pipelined_all_gather_and_consume(tt_tensors(x, placed), take, sum, tt_tensors(gathered, other), group));
    for (int dim = 0; dim < 2; dim++)
        keep_pending(tt_pipelined_produce_and_all_to_all(give, NULL, gathered, dim, group));
}

/* Every form once with a workspace that grows, and once with one that is there. */
static void forms(tutti_world *world, tutti_group *group) {
    int rank = tutti_group_rank(group);
    for (int round = 0; round < 2; round++) {
        tt_tensor *x = there(whole(tt_shape(8, 16), TUTTI_F32, rank)),
                  *right = there(whole(tt_shape(16, 8), TUTTI_F32, 3)),
                  *narrow = there(whole(tt_shape(8, 16), TUTTI_F8_E4M3, rank)),
                  *columns = by_columns_there(tt_transpose(whole(tt_shape(16, 16), TUTTI_F8_E4M3, 4), 0, 1)),
                  *one = there(tt_full(tt_shape(1), 2, TUTTI_F32, NULL)), *all;
        tt_fused_all_gather_matmul(symmetric_there(world, whole(tt_shape(8, 16), TUTTI_F32, rank)),
                                   tt_tensors(right, right), 0, group, &all);
        tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL);
        tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group);
        tt_fused_matmul_reduce_scatter(x, right, TUTTI_AVG, 1, group);
        tt_fused_scaled_matmul_reduce_scatter(narrow, columns, one, one, TUTTI_SUM, 0, 0, tt_shape(8, 16), NULL, NULL,
                                              TUTTI_F32, false, group);
        pipelines(world, group, x);
    }
}

/* Those whose ranks meet inside of a kernel: one that multiplies, and one that stores at all ranks at once. */
static void forms_that_meet(tutti_world *world, tutti_group *group) {
    int rank = tutti_group_rank(group);
    (void)world;
    for (int round = 0; round < 2; round++) {
        tt_tensor *x = there(whole(tt_shape(8, 16), TUTTI_BF16, rank)),
                  *right = there(whole(tt_shape(16, 8), TUTTI_BF16, 3));
        tt_fused_all_gather_matmul(x, tt_tensors(right), 0, group, NULL);
        tt_fused_all_gather_matmul_multimem(x, tt_tensors(right), group);
        tt_fused_matmul_reduce_scatter(x, right, TUTTI_SUM, 0, group);
    }
}

static tutti_status run(tutti_world *world, void (*forms)(tutti_world *, tutti_group *)) {
    tutti_group *group = tutti_world_group(world);
    tutti_status status = tutti_group_set_timeout(group, MINUTE);
    tt_scope scope = tt_scope_open();
    void *stream = tt_stream_new(test_device());
    if (stream != NULL && tt_stream_set(test_device(), stream))
        forms(world, group);
    (void)tt_data(back(tt_all_reduce(there(tt_ones(tt_shape(4), TUTTI_F32, NULL)), TUTTI_SUM, group)));
    /* Without the driver: what is pending here is told to all. */
    tt_options on_the_host = { .size = sizeof on_the_host, .device = TUTTI_CPU };
    tt_wait(tt_all_reduce(tt_ones(tt_shape(4), TUTTI_F32, &on_the_host), TUTTI_SUM, group));
    if (stream != NULL)
        tt_stream_release(test_device(), stream);
    tutti_status closed = tt_scope_close(&scope);
    return status != TUTTI_OK ? status : closed;
}

static tutti_status work(tutti_world *world, tutti_memory **memory, tutti_peers **peers) {
    (void)memory, (void)peers;
    return run(world, forms);
}

static tutti_status work_that_meets(tutti_world *world, tutti_memory **memory, tutti_peers **peers) {
    (void)memory, (void)peers;
    return run(world, forms_that_meet);
}

/* Memory that the tensors' allocator keeps for later is not left behind. */
static int trimmed(void) {
    tt_device_memory_trim(test_device());
    return 0;
}

static void check_calls(failing_work *work, int step) {
    device_needed();
    if (access("/dev/nvidiactl", F_OK) == 0)
        SKIP("only a stand-in fails when it is told to");
    failing calls = failing_calls("libcuda.so.1", "standin");
    /* FUSED_FAILURES=1 has all of some thousand fail; FUSED_FAILURES=1:500 those from the 500th on. */
    const char *asked = getenv("FUSED_FAILURES"), *from = asked != NULL ? strchr(asked, ':') : NULL;
    failing_choice choice = { from != NULL ? atoi(from + 1) : 1, asked != NULL ? atoi(asked) : step, true };
    CHECK(failing_some(&calls, 1, work, trimmed, choice) > 5);
    test_device_leave();
}

TEST_LIMIT(any_call_of_the_driver_may_fail_on_one_rank_in_fused_products, 240) {
    check_calls(work, 41);
}

TEST_LIMIT(any_call_of_the_driver_may_fail_on_one_rank_in_products_whose_kernels_meet, 240) {
    setenv("TUTTI_MULTICAST", "software", 1);
    check_calls(work_that_meets, 9);
}

/* What adds the parts beside the stream writes the result, whose memory is given out again when the call has failed. */
static void check_memory_of_a_result(tutti_world *world, void *argument) {
    (void)argument;
    BEGIN;
    const int64_t rows = 256, columns = 512, depth = 4;
    failing calls = failing_calls("libcuda.so.1", "standin");
    void *stream = tt_stream_new(test_device());
    CHECK(tt_stream_set(test_device(), stream));
    tt_tensor *left = there(tt_ones(tt_shape(ranks * rows, depth), TUTTI_F32, NULL)),
              *right = there(tt_ones(tt_shape(depth, columns), TUTTI_F32, NULL)),
              *sevens = tt_full(tt_shape(rows, columns), 7, TUTTI_F32, NULL),
              *on_the_host = tt_zeros(tt_shape(4), TUTTI_F32, NULL);
    for (int32_t nth = 1, failed = 1; failed; nth++) {
        tutti_group *fresh;
        CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &fresh));
        CHECK_OK(tutti_group_set_timeout(fresh, MINUTE));
        CHECK(tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, 0, fresh) != NULL);
        CHECK(tt_synchronize(test_device()));
        tt_scope inner = tt_scope_open();
        if (rank == 0)
            calls.fail(nth);
        (void)tt_fused_matmul_reduce_scatter(left, right, TUTTI_SUM, 0, fresh);
        int32_t mine = rank == 0 && calls.left() == 0;
        calls.fail(0);
        tt_wait(tt_all_reduce(on_the_host, TUTTI_SUM, fresh)); /* tells what is pending here, also before the call */
        tutti_status ended = tt_scope_close(&inner);           /* what went wrong is no news */
        (void)ended;
        tt_tensor *next = there(sevens);
        CHECK_OK(tutti_broadcast(group, &mine, &failed, 1, TUTTI_I32, 0, NULL));
        CHECK_OK(tutti_group_destroy(fresh));
        tutti_group_release(fresh);
        CHECK(tt_equal(back(next), sevens));
    }
    CHECK(tt_stream_set(test_device(), NULL));
    tt_stream_release(test_device(), stream);
    END;
}

TEST_LIMIT(a_result_is_not_written_any_more_when_its_call_has_failed, 120) {
    device_needed();
    if (access("/dev/nvidiactl", F_OK) == 0)
        SKIP("only a stand-in fails when it is told to");
    test_threads(2, check_memory_of_a_result, NULL);
    test_device_leave();
}
