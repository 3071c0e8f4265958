/* SPDX-License-Identifier: Apache-2.0
 *
 * The forms that functional collectives come in: with a factor, in place, coalesced, into given tensors, as lists, on
 * meta and in fake worlds; their gradients, and what they refuse.
 */
#include <tutti/symmetric.h>

#include "support.h"

#define FORM              \
    &(tutti_group_form) { \
        0                 \
    }

static tt_tensor *full(tt_dims shape, double value) {
    return tt_full(shape, value, TUTTI_F32, NULL);
}

static tt_tensor *leaf(tt_dims shape, double value) {
    return tt_require_grad(full(shape, value), true);
}

/* ---- premul_sum ---- */

TEST_WORLD(every_reduction_has_a_form_with_a_factor, 2) {
    BEGIN;
    double factor = rank + 2; /* 2 and 3: every rank its own */
    for (int round = 0; round < 2; round++) {
        tt_tensor *x = full(tt_shape(4, 2), 10), *part = full(tt_shape(2, 2), 0);
        CHECK(all_are(tt_all_reduce_premul(x, factor, group), 50));
        CHECK(all_are(tt_reduce_scatter_premul(x, factor, 0, group), 50));
        CHECK(all_are(tt_reduce_scatter_premul(x, factor, -1, group), 50));
        CHECK_EQ(tt_size(tt_reduce_scatter_premul(x, factor, 1, group), 1), 1);
        CHECK(tt_reduce_scatter_premul_out(part, x, factor, group) == part && all_are(part, 50));
        tt_tensor_list sums = tt_all_reduce_coalesced_premul(tt_tensors(x, full(tt_shape(3), 1)), factor, group);
        CHECK(sums.count == 2 && all_are(sums.at[0], 50) && all_are(sums.at[1], 5));
        tt_tensor_list parts = tt_reduce_scatter_coalesced_premul(tt_tensors(x, x), factor, 2, (int[]){ 0, 1 }, group);
        CHECK(parts.count == 2 && all_are(parts.at[0], 50) && tt_size(parts.at[1], 1) == 1);
        CHECK(all_are(x, 10) && tt_all_reduce_premul_(x, factor, group) == x && all_are(x, 50));
        tt_tensor *first = full(tt_shape(3), 1), *second = full(tt_shape(5), 2);
        tt_tensor_list given = tt_all_reduce_coalesced_premul_(tt_tensors(first, second), factor, group);
        CHECK(given.count == 2 && given.at[0] == first && all_are(first, 5) && all_are(second, 10));
    }
    CHECK(tt_wait_all(world));                                      /* some were asked for their shapes alone */
    tt_tensor *numbers = tt_full(tt_shape(4), 10, TUTTI_C64, NULL); /* of complex numbers a real factor */
    CHECK(all_are(tt_reduce_scatter_premul(numbers, factor, 0, group), 50));
    CHECK(tt_all_reduce_premul(tt_full(tt_shape(2), 1, TUTTI_BOOL, NULL), 2, group) == NULL);
    expect_error(TUTTI_ERROR_TYPE, "premul_sum");
    END;
}

TEST_WORLD(a_reduction_that_needs_a_factor_is_refused_without_one, 2) {
    BEGIN;
    tt_tensor *x = full(tt_shape(4), 1), *part = full(tt_shape(2), 0);
    tt_tensor_list list = tt_tensors(x);
    CHECK(tt_all_reduce(x, TUTTI_PREMUL_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "needs a factor");
    CHECK(tt_all_reduce_(x, TUTTI_PREMUL_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "needs a factor");
    CHECK(tt_reduce_scatter(x, TUTTI_PREMUL_SUM, 0, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "tt_reduce_scatter_premul");
    CHECK(tt_reduce_scatter_out(part, x, TUTTI_PREMUL_SUM, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "needs a factor");
    CHECK(tt_all_reduce_coalesced(list, TUTTI_PREMUL_SUM, group).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "needs a factor");
    CHECK(tt_all_reduce_coalesced_(list, TUTTI_PREMUL_SUM, group).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "needs a factor");
    CHECK(tt_reduce_scatter_coalesced(list, TUTTI_PREMUL_SUM, 1, (int[]){ 0 }, group).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "needs a factor");
    CHECK_OK(tutti_group_check(group));
    END;
}

TEST_WORLD(gradients_of_sums_with_a_factor_have_it_too, 2) {
    BEGIN;
    double factor = rank + 2;
    tt_tensor *x = leaf(tt_shape(4, 2), 1), *y = leaf(tt_shape(2), 1);
    CHECK(tt_backward(tt_sum(tt_mul_scalar(tt_all_reduce_premul(x, factor, group), rank + 1)), NULL));
    CHECK(all_are(tt_grad(x), 3 * factor)); /* the sum of the ranks' gradients, 1 and 2, times this rank's factor */
    tt_set_grad(x, NULL);
    CHECK(tt_backward(tt_sum(tt_mul_scalar(tt_reduce_scatter_premul(x, factor, 1, group), rank + 1)), NULL));
    for (int peer = 0; peer < ranks; peer++)
        CHECK(all_are(tt_narrow(tt_grad(x), 1, peer, 1), (peer + 1) * factor));
    tt_set_grad(x, NULL);
    tt_tensor_list sums = tt_all_reduce_coalesced_premul(tt_tensors(x, y), factor, group);
    CHECK(tt_backward(tt_add(tt_sum(sums.at[0]), tt_sum(sums.at[1])), NULL));
    CHECK(all_are(tt_grad(x), 2 * factor) && all_are(tt_grad(y), 2 * factor));
    tt_set_grad(x, NULL);
    tt_set_grad(y, NULL);
    tt_tensor_list parts = tt_reduce_scatter_coalesced_premul(tt_tensors(x, y), factor, 2, (int[]){ 1, 0 }, group);
    CHECK(tt_backward(tt_add(tt_sum(tt_mul_scalar(parts.at[0], rank + 1)), tt_sum(parts.at[1])), NULL));
    for (int peer = 0; peer < ranks; peer++)
        CHECK(all_are(tt_narrow(tt_grad(x), 1, peer, 1), (peer + 1) * factor));
    CHECK(all_are(tt_grad(y), factor));
    END;
}

/* ---- lists ---- */

TEST_WORLD(a_list_is_reduced_where_it_lies, 3) {
    BEGIN;
    tt_tensor *flat = full(tt_shape(10), rank), *first = tt_narrow(flat, 0, 0, 4), *second = tt_narrow(flat, 0, 4, 6);
    tt_tensor *third = full(tt_shape(2, 2), 1);
    tt_tensor_list given = tt_tensors(first, second, third);
    uint64_t version = tt_version(third);
    for (int round = 0; round < 2; round++) {
        tt_tensor_list done = tt_all_reduce_coalesced_(given, round == 0 ? TUTTI_SUM : TUTTI_AVG, group);
        CHECK(done.count == 3 && done.at[0] == first && done.at[2] == third);
    }
    CHECK(all_are(flat, 3) && all_are(third, 3) && tt_version(third) == version + 2);
    CHECK(tt_all_reduce_coalesced_(tt_tensors(first, flat), TUTTI_SUM, group).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "share");
    CHECK(tt_all_reduce_coalesced_(tt_tensors(third, third), TUTTI_SUM, group).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "share memory, and both are written");
    CHECK(tt_all_reduce_coalesced_(tt_tensors(tt_transpose(full(tt_shape(2, 3), 1), 0, 1)), TUTTI_SUM, group).count ==
          0);
    expect_error(TUTTI_ERROR_ARGUMENT, "not contiguous");
    tt_tensor *wanted = leaf(tt_shape(2), 1);
    CHECK(tt_all_reduce_coalesced_(tt_tensors(third, wanted), TUTTI_SUM, group).count == 0);
    expect_error(TUTTI_ERROR_UNSUPPORTED, "has no gradient");
    bool recording = tt_grad_mode(false);
    CHECK(tt_all_reduce_coalesced_(tt_tensors(wanted), TUTTI_SUM, group).count == 1 && all_are(wanted, 3));
    tt_grad_mode(recording);
    CHECK(tt_all_reduce_coalesced_(tt_tensors_of(0, NULL), TUTTI_SUM, group).count == 0); /* of none: no call */
    CHECK_EQ(tt_error_pending(), TUTTI_OK);
    CHECK_OK(tutti_group_check(group));
    END;
}

TEST_WORLD(a_write_that_is_saved_for_a_gradient_is_seen_in_every_tensor_of_a_list, 2) {
    BEGIN;
    tt_tensor *w = leaf(tt_shape(2), 1), *a = full(tt_shape(2), 2), *b = full(tt_shape(2), 3);
    tt_tensor *loss = tt_sum(tt_mul(w, b)); /* saves b */
    CHECK(tt_all_reduce_coalesced_(tt_tensors(a, b), TUTTI_SUM, group).count == 2);
    CHECK(!tt_backward(loss, NULL));
    expect_error(TUTTI_ERROR_VERSION, "");
    CHECK(tt_wait_all(world));
    END;
}

TEST_WORLD(the_gradient_of_a_coalesced_call_is_one_operation, 2) {
    BEGIN;
    for (int kind = 0; kind < 3; kind++) {
        tt_tensor *x = leaf(tt_shape(4, 2), 1), *y = leaf(tt_shape(2), 1), *z = leaf(tt_shape(6), 1),
                  *list[] = { x, y, z };
        tt_tensor_list given = tt_tensors_of(3, list);
        tt_tensor_list results = kind == 0 ? tt_all_reduce_coalesced(given, TUTTI_AVG, group)
                                 : kind == 1
                                     ? tt_all_gather_coalesced(given, group)
                                     : tt_reduce_scatter_coalesced(given, TUTTI_AVG, 3, (int[]){ 1, 0, 0 }, group);
        tt_tensor *loss = tt_add(tt_sum(results.at[0]), tt_sum(results.at[2])); /* nothing arrives at the second */
        CHECK(tt_pending_works(world) == 0 && tt_backward(loss, NULL));
        CHECK_EQ(tt_pending_works(world), 1); /* still in flight, and one */
        double wanted = kind == 0 ? 1 : kind == 1 ? 2 : 0.5;
        CHECK(all_are(tt_grad(x), wanted) && all_are(tt_grad(z), wanted));
        CHECK(tt_grad(y) == NULL || all_are(tt_grad(y), 0));
    }
    tt_tensor *one = leaf(tt_shape(), 1);
    CHECK(tt_backward(tt_sum(tt_all_gather_coalesced(tt_tensors(one), group).at[0]), NULL) && all_are(tt_grad(one), 2));
    END;
}

TEST_WORLD(a_coalesced_call_can_be_differentiated_twice, 2) {
    BEGIN;
    tt_tensor *x = leaf(tt_shape(2), 3), *y = leaf(tt_shape(4, 2), 2);
    tt_tensor_list parts =
        tt_reduce_scatter_coalesced(tt_tensors(tt_square(x), tt_square(y)), TUTTI_SUM, 2, (int[]){ 0, 1 }, group);
    tt_tensor *loss = tt_add(tt_sum(tt_square(parts.at[0])), tt_sum(tt_square(parts.at[1])));
    tt_tensor_list first = tt_gradients(tt_tensors(loss), tt_tensors(x, y), tt_tensors_of(0, NULL),
                                        TUTTI_OPTIONS(tt_backward_options, .create_graph = true));
    /* Per element the loss of both ranks together is (2 x²)², as seen from the rank that has the part. */
    CHECK(all_are(first.at[0], 2 * 2 * 9 * 2 * 3) && all_are(first.at[1], 2 * 2 * 4 * 2 * 2));
    CHECK(tt_backward(tt_add(tt_sum(first.at[0]), tt_sum(first.at[1])), NULL) && tt_grad(x) != NULL &&
          tt_grad(y) != NULL);
    END;
}

/* ---- rows ---- */

TEST_WORLD(each_ranks_tensor_comes_in_a_list, 3) {
    BEGIN;
    for (int round = 0; round < 2; round++) {
        tt_tensor_list same = tt_all_gather_list(full(tt_shape(2, 3), rank), NULL, group);
        CHECK(same.count == 3 && tt_is_async(same.at[1]));
        for (int peer = 0; peer < ranks; peer++)
            CHECK(all_are(same.at[peer], peer) && tt_size(same.at[peer], 0) == 2);
        int64_t rows[] = { 2, 0, 5 };
        tt_tensor *x = leaf(tt_shape(rows[rank], 2), rank + 1);
        tt_tensor_list own = tt_all_gather_list(x, rows, group);
        CHECK_EQ(own.count, 3);
        for (int peer = 0; peer < ranks; peer++)
            CHECK(all_are(own.at[peer], peer + 1) && tt_size(own.at[peer], 0) == rows[peer]);
        /* Every rank's loss counts a peer's rows its rank + 1 times. */
        tt_tensor *loss = tt_add(tt_sum(own.at[0]), tt_mul_scalar(tt_sum(own.at[2]), 3));
        CHECK(tt_backward(loss, NULL) && all_are(tt_grad(x), 3 * (rank + 1)));
    }
    tt_tensor *one = leaf(tt_shape(), rank);
    tt_tensor_list ones = tt_all_gather_list(one, NULL, group);
    CHECK(ones.count == 3 && tt_dim_count(ones.at[2]) == 0 && tt_item(ones.at[2]) == 2);
    CHECK(tt_backward(tt_mul_scalar(ones.at[1], 5), NULL) && tt_item(tt_grad(one)) == (rank == 1 ? 15 : 0));
    CHECK(tt_all_gather_list(full(tt_shape(2), 1), (int64_t[]){ 1, 1, 1 }, group).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "must have the 1 rows");
    CHECK(tt_all_gather_list(full(tt_shape(2), 1), (int64_t[]){ 2, -1, 2 }, group).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "negative entry");
    CHECK(tt_all_gather_list(NULL, NULL, group).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "x");
    END;
}

TEST_WORLD(rows_are_exchanged_into_a_given_tensor, 2) {
    BEGIN;
    tt_tensor *out = full(tt_shape(4, 2), -1), *x = full(tt_shape(4, 2), rank);
    for (int round = 0; round < 2; round++) {
        CHECK(tt_all_to_all_out(out, x, NULL, NULL, group) == out);
        CHECK(all_are(tt_narrow(out, 0, 0, 2), 0) && all_are(tt_narrow(out, 0, 2, 2), 1));
    }
    int64_t mine[2][2] = { { 3, 1 }, { 2, 2 } }, theirs[2][2] = { { 3, 2 }, { 1, 2 } };
    tt_tensor *uneven = full(tt_shape(rank == 0 ? 5 : 3, 2), -1);
    CHECK(tt_all_to_all_out(uneven, x, theirs[rank], mine[rank], group) == uneven);
    CHECK(all_are(tt_narrow(uneven, 0, 0, theirs[rank][0]), 0) &&
          all_are(tt_narrow(uneven, 0, theirs[rank][0], theirs[rank][1]), 1));
    CHECK(tt_all_to_all_out(full(tt_shape(3, 2), 0), x, NULL, NULL, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "out is");
    CHECK(tt_all_to_all_out(out, x, NULL, mine[rank], group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "together");
    CHECK(tt_all_to_all_out(out, leaf(tt_shape(4, 2), 1), NULL, NULL, group) == NULL);
    expect_error(TUTTI_ERROR_UNSUPPORTED, "has no gradient");
    CHECK(tt_all_to_all_out(tt_transpose(full(tt_shape(2, 4), 0), 0, 1), x, NULL, NULL, group) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "not contiguous");
    END;
}

/* ---- groups ---- */

TEST_WORLD(a_tag_chooses_among_groups_of_the_same_ranks, 2) {
    tutti_group *blue, *red;
    CHECK_OK(tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .tag = "blue"), &blue));
    CHECK_OK(tutti_group_new(world, NULL, 0, TUTTI_OPTIONS(tutti_group_options, .tag = "red"), &red));
    BEGIN;
    int both[] = { 0, 1 };
    CHECK(tt_group(world, tutti_form_ranks(FORM, both, 2), "blue") == blue);
    CHECK(tt_group(world, tutti_form_ranks(FORM, both, 2), "red") == red);
    CHECK(tt_group(world, tutti_form_ranks(FORM, both, 2), NULL) == group);
    CHECK(all_are(
        tt_all_reduce(full(tt_shape(2), 1), TUTTI_SUM, tt_group(world, tutti_form_ranks(FORM, both, 2), "red")), 2));
    CHECK(tt_group(world, tutti_form_ranks(FORM, both, 2), "green") == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    END;
    tutti_group_release(blue);
    tutti_group_release(red);
}

/* The program lets its group go before the backward: the graph holds it, whatever form it was used in. */
TEST_WORLD(a_graph_holds_the_groups_of_all_forms_until_its_backward_has_run, 2) {
    tutti_group *group;
    CHECK_OK(tutti_group_new(world, NULL, 0, NULL, &group));
    tt_scope scope = tt_scope_open();
    tt_tensor *x = leaf(tt_shape(4, 2), 1), *symmetric = tt_symm_empty(world, tt_shape(4, 2), TUTTI_F32, NULL);
    tt_copy_(symmetric, x);
    tt_tensor *results[] = { tt_all_gather(x, 1, group),
                             tt_reduce_scatter(x, TUTTI_AVG, 1, group),
                             tt_reduce_scatter_premul(x, 2, 0, group),
                             tt_all_gather_list(x, NULL, group).at[1],
                             tt_all_to_all_single(x, NULL, NULL, group),
                             tt_permute_ranks(x, (int[]){ 1, 0 }, group),
                             tt_shard_dim_all_to_all(x, 0, 1, group),
                             tt_copy_to_group(x, group),
                             tt_all_reduce_coalesced(tt_tensors(x, x), TUTTI_SUM, group).at[0],
                             tt_one_shot_all_reduce(symmetric, TUTTI_SUM, group),
                             tt_reduce_scatter_split(symmetric, TUTTI_SUM, group),
                             tt_low_contention_all_gather(x, group) };
    tt_tensor *loss = tt_zeros(tt_shape(), TUTTI_F32, NULL);
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++)
        loss = tt_add(loss, tt_sum(results[i]));
    CHECK(tt_wait_all(world));
    tutti_group_release(group);
    CHECK(tt_backward(loss, NULL) && tt_grad(x) != NULL && tt_wait_all(world));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

/* ---- meta and fake worlds ---- */

TEST(messages_and_coalesced_reductions_on_meta_need_no_group) {
    tt_scope scope = tt_scope_open();
    tt_tensor *x = meta_like(tt_shape(4, 3), TUTTI_F32), *y = meta_like(tt_shape(2), TUTTI_F32);
    tt_tensor_list sums = tt_all_reduce_coalesced(tt_tensors(x, y), TUTTI_SUM, NULL);
    CHECK(sums.count == 2 && tt_size(sums.at[0], 1) == 3 && tt_size(sums.at[1], 0) == 2);
    CHECK(tt_all_reduce_coalesced_(tt_tensors(x, y), TUTTI_SUM, NULL).at[1] == y);
    CHECK(tt_all_reduce_coalesced_premul(tt_tensors(x, y), 2, NULL).count == 2);
    CHECK(tt_all_reduce_premul_(x, 2, NULL) == x);
    CHECK(tt_numel(tt_isend(x, 1, 0, NULL)) == 0 && tt_irecv(x, 1, 0, NULL) == x);
    tt_p2p both[] = { { TT_P2P_SEND, x, 1, 0 }, { TT_P2P_RECV, y, 0, 0 } };
    tt_tensor_list done = tt_batch_p2p(2, both, NULL);
    CHECK(done.count == 2 && tt_numel(done.at[0]) == 0 && done.at[1] == y);
    both[1].tensor = full(tt_shape(2), 0); /* a real one needs it */
    CHECK(tt_batch_p2p(2, both, NULL).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "group is NULL");
    CHECK(tt_all_gather_coalesced(tt_tensors(x), NULL).count == 0); /* the number of ranks matters */
    expect_error(TUTTI_ERROR_ARGUMENT, "group is NULL");
    CHECK(tt_all_reduce_coalesced(tt_tensors(full(tt_shape(2), 0)), TUTTI_SUM, NULL).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "group is NULL");
    CHECK_OK(tt_scope_close(&scope));
}

TEST(a_batch_of_messages_without_a_list_is_refused) {
    tutti_world *world;
    CHECK_OK(tutti_world_open(NULL, &world));
    tt_scope scope = tt_scope_open();
    CHECK(tt_batch_p2p(2, NULL, tutti_world_group(world)).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "the list of them is NULL");
    CHECK(tt_batch_p2p(1, &(tt_p2p){ 7, full(tt_shape(1), 0), 0, 0 }, tutti_world_group(world)).count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "neither a send nor a receive");
    CHECK(tt_reduce_scatter_coalesced(tt_tensors(full(tt_shape(1), 0)), TUTTI_SUM, 1, NULL, tutti_world_group(world))
              .count == 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "0 dimensions given for 1 tensors");
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}

TEST(every_result_of_a_fake_world_is_defined) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 2, NULL, &world));
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_view(tt_arange(0, 8, 1, TUTTI_F32, NULL), tt_shape(4, 2));
    CHECK(tt_equal(tt_all_reduce_premul(x, 3, group), x));
    CHECK(tt_equal(tt_reduce_scatter(x, TUTTI_SUM, 0, group), tt_narrow(x, 0, 2, 2)));
    CHECK(tt_equal(tt_reduce_scatter(x, TUTTI_SUM, 1, group), tt_narrow(x, 1, 1, 1)));
    CHECK(tt_equal(tt_reduce_scatter_premul(x, 3, 0, group), tt_narrow(x, 0, 2, 2)));
    CHECK(tt_equal(tt_all_to_all_single(x, NULL, NULL, group), x));
    tt_tensor *more = tt_all_to_all_single(x, (int64_t[]){ 3, 3 }, (int64_t[]){ 2, 2 }, group);
    CHECK(tt_equal(tt_narrow(more, 0, 0, 4), x) && all_are(tt_narrow(more, 0, 4, 2), 0));
    tt_tensor_list sums = tt_all_reduce_coalesced(tt_tensors(x, x), TUTTI_SUM, group);
    CHECK(tt_equal(sums.at[0], x) && tt_equal(sums.at[1], x));
    tt_tensor_list list = tt_all_gather_list(x, NULL, group);
    CHECK(tt_equal(list.at[0], x) && tt_equal(list.at[1], x));
    tt_tensor *w = leaf(tt_shape(4), 1);
    CHECK(tt_backward(tt_sum(tt_all_gather(w, 0, group)), NULL) && all_are(tt_grad(w), 1));
    CHECK(tt_wait_all(world));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_world_close(world));
}
