/* SPDX-License-Identifier: Apache-2.0
 *
 * Functional collectives, their gradients and the work registry, in worlds of threads and of processes.
 */
#include <dlfcn.h>
#include <math.h>

#include <tutti/autograd.h>
#include <tutti/functional.h>
#include <tutti/mesh.h>
#include <tutti/ops.h>
#include <tutti/symmetric.h>

#define TEST_ON_DEVICE
#include "device.h"

#define FORM              \
    &(tutti_group_form) { \
        0                 \
    }

static const tt_tensor_list none = { 0, NULL };

static tt_tensor *full(tt_dims shape, double value) {
    return tt_full(shape, value, TUTTI_F32, NULL);
}

static bool all_are(tt_tensor *x, double value) {
    return x != NULL && tt_equal(x, tt_full(tt_sizes(x), value, tt_dtype(x), NULL));
}

static bool is(tt_tensor *x, tt_dims shape, const float *values) {
    return x != NULL && tt_equal(x, tt_from(values, shape, TUTTI_F32, NULL));
}

static bool has_shape(tt_tensor *x, tt_dims shape) {
    tt_dims sizes = tt_sizes(x);
    return sizes.count == shape.count && memcmp(sizes.at, shape.at, (size_t)shape.count * sizeof shape.at[0]) == 0;
}

#define BEGIN                                                        \
    tutti_group *group = tutti_world_group(world);                   \
    int rank = tutti_group_rank(group), n = tutti_group_size(group); \
    tt_scope scope = tt_scope_open();                                \
    (void)rank, (void)n
/* A rank that is done waits for the others: closing its world while they are in a call would be an error of theirs. */
#define END                               \
    CHECK_OK(tt_scope_close(&scope));     \
    CHECK_EQ(tt_pending_works(world), 0); \
    CHECK_OK(tutti_barrier(group, NULL))

/* ---- values ---- */

TEST_WORLD(all_reduce_sums_over_the_group_and_over_a_row_of_a_mesh, 4) {
    BEGIN;
    CHECK(all_are(tt_all_reduce(full(tt_shape(4), 1), TUTTI_SUM, group), 4));
    tutti_mesh *mesh;
    CHECK_OK(tutti_mesh_new(world, TUTTI_CPU, (int[]){ 2, 2 }, 2, NULL, &mesh));
    CHECK(all_are(
        tt_all_reduce(full(tt_shape(4), 1), TUTTI_SUM, tt_group(world, tutti_form_mesh_dim(FORM, mesh, 1), NULL)), 2));
    CHECK(all_are(tt_all_reduce(full(tt_shape(2), rank), TUTTI_MAX, tt_group(world, tutti_form_name(FORM, "0"), NULL)),
                  3));
    CHECK(all_are(tt_all_reduce(tt_full(tt_shape(3), rank + 1, TUTTI_I64, NULL), TUTTI_PRODUCT, group), 24));
    CHECK(all_are(tt_all_reduce(full(tt_shape(2), rank), TUTTI_AVG, group), 1.5));
    CHECK(all_are(tt_all_reduce_premul(full(tt_shape(2), 10), rank, group), 60));
    CHECK(tt_group(world, tutti_form_name(FORM, "no such group"), NULL) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_NOT_FOUND);
    tt_error_clear();
    END;
    tutti_mesh_release(mesh);
}

TEST_WORLD(all_gather_works_along_every_dimension, 4) {
    BEGIN;
    for (int dim = -3; dim < 3; dim++) {
        tt_tensor *y = tt_all_gather(full(tt_shape(3, 3, 3), rank), dim, group);
        int at = dim < 0 ? dim + 3 : dim;
        for (int r = 0; r < n; r++)
            CHECK(all_are(tt_narrow(y, at, 3 * r, 3), r));
    }
    CHECK(is(tt_all_gather(full(tt_shape(), rank), 0, group), tt_shape(4), (float[]){ 0, 1, 2, 3 }));
    tt_tensor *turned =
        tt_transpose(tt_view(tt_arange(0, 6, 1, TUTTI_F32, NULL), tt_shape(2, 3)), 0, 1); /* not contiguous */
    CHECK(tt_equal(tt_narrow(tt_all_gather(turned, 0, group), 0, 3, 3), turned));
    END;
}

TEST_WORLD(all_gather_vectors_of_two_ranks, 2) {
    BEGIN;
    tt_tensor *a = tt_add_scalar(tt_view(tt_arange(1, 5, 1, TUTTI_F32, NULL), tt_shape(2, 2)), 4 * rank);
    CHECK(is(tt_all_gather(a, 1, group), tt_shape(2, 4), (float[]){ 1, 2, 5, 6, 3, 4, 7, 8 }));
    tt_tensor *b = tt_add_scalar(tt_view(tt_arange(1, 4, 1, TUTTI_F32, NULL), tt_shape(1, 3)), 3 * rank);
    tt_tensor *gathered = tt_all_gather(b, 1, group);
    CHECK(tt_is_async(gathered));
    CHECK(is(gathered, tt_shape(1, 6), (float[]){ 1, 2, 3, 4, 5, 6 }));
    CHECK(is(tt_all_gather(tt_view(a, tt_shape(1, 2, 2)), 2, group), tt_shape(1, 2, 4),
             (float[]){ 1, 2, 5, 6, 3, 4, 7, 8 }));
    END;
}

/* The parts are put side by side by whoever waits, also where nobody reads the result, or all wait at once. */
TEST_WORLD(a_gather_along_another_dimension_lands_when_it_is_waited_for, 2) {
    BEGIN;
    tt_tensor *a = tt_add_scalar(tt_view(tt_arange(1, 5, 1, TUTTI_F32, NULL), tt_shape(2, 2)), 4 * rank);
    tt_tensor *first = tt_all_gather(a, 1, group), *second = tt_all_gather(tt_neg(a), -1, group);
    CHECK(tt_is_async(first) && tt_is_async(second) && tt_pending_works(world) == 2);
    CHECK(tt_sizes(first).at[1] == 4 && tt_is_contiguous(first));
    CHECK(tt_wait_all(world) && !tt_is_async(first));
    CHECK(is(first, tt_shape(2, 4), (float[]){ 1, 2, 5, 6, 3, 4, 7, 8 }));
    CHECK(is(second, tt_shape(2, 4), (float[]){ -1, -2, -5, -6, -3, -4, -7, -8 }));
    /* Parts of a strided tensor, scattered along its last dimension and gathered again. */
    tt_tensor *x = tt_t(tt_view(tt_arange(0, 12, 1, TUTTI_F32, NULL), tt_shape(4, 3)));
    CHECK(tt_equal(tt_all_gather(tt_reduce_scatter(x, TUTTI_AVG, 1, group), 1, group), x));
    END;
}

/* They end when all have met: else the next one, of a rank that is ahead, would change what a late one reads. */
TEST_WORLD(collectives_of_nothing_leave_the_next_ones_alone, 3) {
    BEGIN;
    tt_tensor *some =
        tt_symm_empty(world, tt_shape(4), TUTTI_F32, TUTTI_OPTIONS(tt_symm_options, .device = test_device()));
    CHECK(tt_peer_tensor(some, rank, group) != NULL); /* from now on it is read where it lies */
    for (int round = 0; round < 30; round++) {
        tt_scope inner = tt_scope_open();
        tt_tensor *none = tt_empty(tt_shape(0), TUTTI_F32, NULL), *made[7];
        made[0] = tt_reduce_scatter(none, TUTTI_SUM, 0, group);
        made[1] = tt_broadcast_(tt_fill_(some, rank + round), 0, group);
        made[2] = tt_all_reduce(none, TUTTI_SUM, group);
        made[3] = tt_broadcast_(tt_full(tt_shape(4), rank + round, TUTTI_F32, NULL), 0, group);
        made[4] = tt_all_gather(none, 0, group);
        made[5] = tt_broadcast_(tt_empty(tt_shape(0), TUTTI_F32, NULL), 0, group);
        made[6] = tt_broadcast_(tt_full(tt_shape(4), rank + round, TUTTI_F32, NULL), 0, group);
        for (size_t i = 0; i < sizeof made / sizeof *made; i++)
            CHECK(tt_wait(made[i]) != NULL);
        for (int i = 1; i < 7; i += i == 1 ? 2 : 3)
            CHECK(tt_item(tt_sum(made[i])) == 4 * round);
        CHECK_OK(tt_scope_close(&inner));
    }
    END;
}

TEST_WORLD(reduce_scatter_gives_each_rank_its_part, 2) {
    BEGIN;
    tt_tensor *x = tt_mul_scalar(tt_view(tt_arange(1, 9, 1, TUTTI_F32, NULL), tt_shape(2, 4)), rank == 0 ? 1 : 10);
    tt_tensor *y = tt_reduce_scatter(x, TUTTI_SUM, 1, group);
    CHECK(rank == 0 ? is(y, tt_shape(2, 2), (float[]){ 11, 22, 55, 66 })
                    : is(y, tt_shape(2, 2), (float[]){ 33, 44, 77, 88 }));
    CHECK(is(tt_reduce_scatter(x, TUTTI_MAX, 0, group), tt_shape(1, 4),
             rank == 0 ? (float[]){ 10, 20, 30, 40 } : (float[]){ 50, 60, 70, 80 }));
    CHECK(tt_reduce_scatter(full(tt_shape(3, 3), 1), TUTTI_SUM, 1, group) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("dimension 1");
    CHECK_MESSAGE("divisible");
    tt_error_clear();
    END;
}

TEST_WORLD(all_to_all_by_uneven_splits, 3) {
    BEGIN;
    static const float inputs[3][3] = { { 0, 1, 2 }, { 10, 11 }, { 20, 21, 22 } };
    static const int64_t in[3][3] = { { 1, 2, 0 }, { 0, 1, 1 }, { 2, 0, 1 } },
                         out[3][3] = { { 1, 0, 2 }, { 2, 1, 0 }, { 0, 1, 1 } };
    static const float outputs[3][3] = { { 0, 20, 21 }, { 1, 2, 10 }, { 11, 22 } };
    int count = rank == 1 ? 2 : 3, received = rank == 2 ? 2 : 3;
    tt_tensor *x = tt_from(inputs[rank], tt_shape(count), TUTTI_F32, NULL);
    CHECK(is(tt_all_to_all_single(x, out[rank], in[rank], group), tt_shape(received), outputs[rank]));
    /* and two-dimensional, with complex numbers */
    tt_tensor *wide = tt_to(tt_expand(tt_view(x, tt_shape(count, 1)), tt_shape(count, 2)), TUTTI_C64);
    tt_tensor *y = tt_all_to_all_single(wide, out[rank], in[rank], group);
    CHECK(is(tt_select(tt_select(tt_view_as_real(y), 2, 0), 1, 1), tt_shape(received), outputs[rank]));
    END;
}

TEST_WORLD(all_to_all_of_growing_blocks_and_of_equal_parts, 3) {
    BEGIN;
    int64_t splits[8], rows = (int64_t)n * (rank + 1) * (n + 1) / 2;
    for (int i = 0; i < n; i++)
        splits[i] = (i + 1) * (rank + 1);
    for (int dims = 1; dims <= 2; dims++) {
        tt_tensor *y = tt_all_to_all_single(
            dims == 1 ? full(tt_shape(rows), rank + 1) : full(tt_shape(rows, 5), rank + 1), splits, splits, group);
        for (int i = 0, at = 0; i < n; at += (int)splits[i++])
            CHECK(all_are(tt_narrow(y, 0, at, splits[i]), i + 1));
    }
    tt_tensor *even = tt_all_to_all_single(full(tt_shape(n, n), rank + 1), NULL, NULL, group);
    for (int i = 0; i < n; i++)
        CHECK(all_are(tt_select(even, 0, i), i + 1));
    CHECK(tt_all_to_all_single(even, splits, NULL, group) == NULL);
    tt_error_clear();
    CHECK(tt_all_to_all_single(full(tt_shape(n + 1), 1), NULL, NULL, group) == NULL);
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    CHECK(tt_all_to_all_single(even, splits, splits, group) == NULL); /* rows do not add up */
    tt_error_clear();
    END;
}

TEST_WORLD(broadcast_takes_a_group_rank_and_leaves_its_input, 4) {
    BEGIN;
    tt_tensor *x = full(tt_shape(5), rank);
    CHECK(all_are(tt_broadcast(x, 2, group), 2) && all_are(x, rank));
    CHECK(tt_broadcast(x, 4, group) == NULL);
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_RANGE);
    tt_error_clear();
    tt_broadcast_(x, 1, group);
    CHECK(tt_version(x) == 1 && all_are(x, 1));
    END;
}

TEST_WORLD(permutation_moves_tensors_of_any_shape, 3) {
    BEGIN;
    CHECK(all_are(tt_permute_ranks(full(tt_shape(2, 3), rank), (int[]){ 1, 2, 0 }, group), (rank + 2) % 3));
    CHECK(tt_item(tt_permute_ranks(full(tt_shape(), rank), (int[]){ 1, 2, 0 }, group)) == (rank + 2) % 3);
    tt_tensor *uneven = tt_permute_ranks(full(tt_shape(2), rank), (int[]){ 2, 2, -1 }, group);
    CHECK(rank == 2 ? is(uneven, tt_shape(4), (float[]){ 0, 0, 1, 1 }) : tt_numel(tt_wait(uneven)) == 0);
    END;
}

TEST_WORLD(permutation_swaps_inside_both_dimensions_of_a_mesh, 4) {
    BEGIN;
    tutti_mesh *mesh;
    CHECK_OK(tutti_mesh_new(world, TUTTI_CPU, (int[]){ 2, 2 }, 2, NULL, &mesh));
    for (int dim = 0; dim < 2; dim++) {
        int other = dim == 0 ? rank ^ 2 : rank ^ 1;
        CHECK(all_are(tt_permute_ranks(full(tt_shape(2), rank), (int[]){ 1, 0 },
                                       tt_group(world, tutti_form_mesh_dim(FORM, mesh, dim), NULL)),
                      other));
    }
    END;
    tutti_mesh_release(mesh);
}

TEST_WORLD(coalesced_forms_equal_single_ones, 4) {
    BEGIN;
    tt_tensor_list sums =
        tt_all_reduce_coalesced(tt_tensors(full(tt_shape(4), 1), full(tt_shape(6), 3)), TUTTI_SUM, group);
    CHECK(sums.count == 2 && tt_pending_works(world) == 1); /* one work for both */
    CHECK(all_are(sums.at[0], 4));
    CHECK(tt_pending_works(world) == 0 && all_are(sums.at[1], 12));
    tt_tensor_list gathered = tt_all_gather_coalesced(tt_tensors(full(tt_shape(4), 1), full(tt_shape(4), 2)), group);
    CHECK(gathered.count == 2 && tt_numel(gathered.at[0]) == 16 && all_are(gathered.at[0], 1) &&
          all_are(gathered.at[1], 2));
    tt_tensor *ones = tt_full(tt_shape(4), 1, TUTTI_I64, NULL), *twos = tt_full(tt_shape(3, 4), 2, TUTTI_I64, NULL);
    tt_tensor_list given = tt_tensors(ones, twos);
    tt_tensor_list scattered = tt_reduce_scatter_coalesced(given, TUTTI_SUM, 2, (int[]){ 0, 1 }, group);
    CHECK(scattered.count == 2 && all_are(scattered.at[0], 4) && has_shape(scattered.at[1], tt_shape(3, 1)) &&
          all_are(scattered.at[1], 8));
    CHECK(given.at[1] == twos); /* the caller's list is left alone */
    CHECK(tt_reduce_scatter_coalesced(given, TUTTI_SUM, 1, (int[]){ 0 }, group).count == 0);
    tt_error_clear();
    END;
}

TEST_WORLD(out_forms_write_given_tensors, 2) {
    BEGIN;
    tt_tensor *out = tt_zeros(tt_shape(4), TUTTI_F32, NULL), *part = tt_zeros(tt_shape(2), TUTTI_F32, NULL);
    CHECK(tt_all_gather_out(out, full(tt_shape(2), rank), group) == out && tt_version(out) == 1);
    CHECK(is(out, tt_shape(4), (float[]){ 0, 0, 1, 1 }));
    CHECK(tt_reduce_scatter_out(part, out, TUTTI_SUM, group) == part && all_are(part, 2 * rank));
    tt_tensor *x = tt_symm_empty(world, tt_shape(8), TUTTI_F32, NULL);
    CHECK(tt_symm_memory(x) != NULL && tt_symm_memory(out) == NULL && all_are(x, 0));
    tt_fill_(x, 3);
    tt_all_reduce_(x, TUTTI_SUM, group);
    CHECK(all_are(x, 6) && !tt_storage_resize(x, 0));
    tt_error_clear();
    CHECK(tt_all_reduce_(tt_slice(x, 0, 0, 8, 2), TUTTI_SUM, group) == NULL);
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    CHECK(tt_all_gather_out(part, out, group) == NULL);
    tt_error_clear();
    END;
}

TEST_WORLD(the_sharded_dimension_can_be_changed, 2) {
    BEGIN;
    tt_tensor *whole = tt_view(tt_arange(0, 24, 1, TUTTI_F32, NULL), tt_shape(4, 6));
    tt_tensor *y = tt_shard_dim_all_to_all(tt_narrow(whole, 0, 2 * rank, 2), 0, 1, group);
    CHECK(tt_equal(y, tt_narrow(whole, 1, 3 * rank, 3)));
    CHECK(tt_shard_dim_all_to_all(full(tt_shape(2, 3), 1), 0, 1, group) == NULL);
    tt_error_clear();
    END;
}

TEST_WORLD(complex_and_strided_inputs_are_reduced, 2) {
    BEGIN;
    double parts[] = { 1, 2, 3, 4 };
    tt_tensor *z = tt_from(parts, tt_shape(2), TUTTI_C128, NULL);
    tt_tensor *real = tt_view_as_real(tt_all_reduce(z, TUTTI_SUM, group));
    CHECK(tt_at(real, tt_shape(1, 1)) == 8);
    CHECK(tt_all_reduce(z, TUTTI_MAX, group) == NULL);
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_TYPE);
    tt_error_clear();
    CHECK(tt_reduce_scatter(z, TUTTI_MAX, 0, group) == NULL);
    tt_error_clear();
    tt_tensor *strided = tt_slice(tt_arange(0, 10, 1, TUTTI_F32, NULL), 0, 0, 10, 3);
    CHECK(is(tt_all_reduce(strided, TUTTI_SUM, group), tt_shape(4), (float[]){ 0, 6, 12, 18 }));
    END;
}

/* ---- waiting ---- */

TEST_WORLD(results_wait_on_first_use_and_not_on_views, 2) {
    BEGIN;
    CHECK_EQ(tt_pending_works(world), 0);
    tt_tensor *y = tt_all_reduce(full(tt_shape(2, 4), 1), TUTTI_SUM, group);
    CHECK(tt_pending_works(world) == 1 && tt_is_async(y));
    tt_tensor *view = tt_transpose(tt_view(y, tt_shape(4, 2)), 0, 1);
    CHECK(tt_is_async(view) && tt_pending_works(world) == 1);
    tt_tensor *sum = tt_add(view, view); /* waits, and gives an ordinary tensor */
    CHECK(!tt_is_async(sum) && !tt_is_async(y) && tt_pending_works(world) == 0 && all_are(sum, 4));
    CHECK(tt_wait(y) == y && tt_wait(y) == y); /* again is no error */
    tt_tensor *input = full(tt_shape(1000), 1), *z = tt_all_gather(input, 0, group);
    tt_fill_(input, 7); /* waits until it has been read */
    CHECK(all_are(z, 1) && all_are(input, 7));
    tt_all_reduce(full(tt_shape(3), 1), TUTTI_SUM, group); /* nobody waits for it by hand */
    CHECK(tt_pending_works(world) == 1 && tt_wait_all(world) && tt_pending_works(world) == 0);
    END;
}

TEST_WORLD_THREADS(storage_of_a_result_that_nobody_wants_lives_until_the_work_is_done, 2) {
    tutti_group *group = tutti_world_group(world);
    for (int i = 0; i < 20; i++) {
        tt_scope scope = tt_scope_open();
        tt_all_reduce(full(tt_shape(100000), 1), TUTTI_SUM, group);
        CHECK_OK(tt_scope_close(&scope));
    }
    CHECK_EQ(tt_pending_works(world), 20);
    CHECK(tt_wait_all(world));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* On a device all ranks of a group meet before two of them exchange messages. */
static void meet_on_device(tutti_group *group) {
    if (test_device() != TUTTI_CPU)
        CHECK(tt_wait(tt_all_reduce(full(tt_shape(1), 1), TUTTI_SUM, group)) != NULL);
}

TEST_WORLD(sends_and_receives_return_placeholders_and_tensors, 2) {
    BEGIN;
    meet_on_device(group);
    tt_tensor *x = full(tt_shape(3), rank + 1), *y = tt_zeros(tt_shape(3), TUTTI_F32, NULL);
    tt_tensor *sent = tt_isend(x, 1 - rank, 5, group), *received = tt_irecv(y, 1 - rank, 5, group);
    CHECK(tt_numel(sent) == 0 && received == y && tt_version(y) == 1);
    CHECK(all_are(y, 2 - rank));
    tt_wait(sent);
    tt_tensor *z = tt_zeros(tt_shape(3), TUTTI_F32, NULL);
    tt_p2p both[] = { { TT_P2P_SEND, x, 1 - rank, 1 }, { TT_P2P_RECV, z, 1 - rank, 1 } };
    tt_tensor_list list = tt_batch_p2p(2, both, group);
    CHECK(list.count == 2 && list.at[1] == z && tt_pending_works(world) == 1 && all_are(z, 2 - rank));
    both[0].kind = (tt_p2p_kind)9;
    CHECK(tt_batch_p2p(2, both, group).count == 0);
    tt_error_clear();
    END;
}

/* ---- gradients ---- */

static tt_tensor *leaf(tt_dims shape, double value) {
    return tt_full(shape, value, TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
}

TEST_WORLD(gradients_of_reductions, 2) {
    BEGIN;
    tt_tensor *x = leaf(tt_shape(4), 1), *y = leaf(tt_shape(4), 2);
    tt_backward(tt_sum(tt_add(tt_all_reduce(x, TUTTI_SUM, group), y)), NULL);
    CHECK(all_are(tt_grad(x), 2) && all_are(tt_grad(y), 1));
    tt_set_grad(x, NULL);
    tt_backward(tt_sum(tt_mul_scalar(tt_all_reduce(x, TUTTI_AVG, group), rank + 1)), NULL);
    CHECK(all_are(tt_grad(x), 1.5)); /* the mean of what the ranks' losses ask for */
    tt_set_grad(x, NULL);
    tt_backward(tt_sum(tt_all_reduce_premul(x, 5, group)), NULL);
    CHECK(all_are(tt_grad(x), 10));
    tt_tensor *m = tt_sum(tt_all_reduce(x, TUTTI_MAX, group));
    CHECK(!tt_backward(m, NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_UNSUPPORTED);
    CHECK_MESSAGE("max");
    tt_error_clear();
    tt_tensor *b = tt_sum(tt_broadcast(x, 0, group));
    CHECK(!tt_backward(b, NULL));
    tt_error_clear();
    CHECK(tt_all_reduce_(tt_mul_scalar(x, 1), TUTTI_SUM, group) == NULL); /* in place has none */
    CHECK_EQ(tt_error_pending(), TUTTI_ERROR_UNSUPPORTED);
    tt_error_clear();
    END;
}

TEST_WORLD(gradients_of_gathers_and_scatters_along_every_dimension, 2) {
    BEGIN;
    for (int dim = 0; dim < 3; dim++) {
        tt_tensor *x = leaf(tt_shape(3, 3, 3), 1), *y = tt_all_gather(x, dim, group);
        CHECK(all_are(y, 1) && tt_size(y, dim) == 6);
        tt_backward(tt_sum(y), NULL);
        CHECK(all_are(tt_grad(x), 2));
    }
    for (int dim = 0; dim < 2; dim++) {
        tt_tensor *x = leaf(dim == 0 ? tt_shape(6, 3) : tt_shape(3, 6), 1),
                  *y = tt_reduce_scatter(x, TUTTI_SUM, dim, group);
        CHECK(all_are(y, 2) && has_shape(y, tt_shape(3, 3)));
        tt_backward(tt_sum(y), NULL);
        CHECK(all_are(tt_grad(x), 1));
        tt_set_grad(x, NULL);
        tt_backward(tt_sum(tt_reduce_scatter(x, TUTTI_AVG, dim, group)), NULL);
        CHECK(all_are(tt_grad(x), 0.5));
    }
    tt_tensor *s = leaf(tt_shape(), 3);
    tt_backward(tt_sum(tt_all_gather(s, 0, group)), NULL);
    CHECK(tt_item(tt_grad(s)) == 2 && tt_dim_count(tt_grad(s)) == 0);
    END;
}

TEST_WORLD(gradients_of_exchanges_go_back_the_way_they_came, 2) {
    BEGIN;
    tt_tensor *t = leaf(tt_shape(2, 2), 1);
    tt_tensor *out = tt_all_to_all_single(tt_mul_scalar(t, 2), (int64_t[]){ 1, 1 }, (int64_t[]){ 1, 1 }, group);
    CHECK(all_are(out, 2) && has_shape(out, tt_shape(2, 2)) && tt_requires_grad(out));
    tt_backward(tt_sum(out), NULL);
    CHECK(all_are(tt_grad(t), 2));
    tt_tensor *p = leaf(tt_shape(2), rank);
    tt_backward(tt_sum(tt_mul_scalar(tt_permute_ranks(p, (int[]){ 1, 0 }, group), rank + 1)), NULL);
    CHECK(all_are(tt_grad(p), 2 - rank)); /* what the other rank multiplied it by */
    tt_tensor *list_a = leaf(tt_shape(4), 1), *list_b = leaf(tt_shape(2), 1);
    tt_tensor_list sums = tt_all_reduce_coalesced(tt_tensors(list_a, list_b), TUTTI_SUM, group);
    tt_backward(tt_add(tt_sum(sums.at[0]), tt_mul_scalar(tt_sum(sums.at[1]), 3)), NULL);
    CHECK(all_are(tt_grad(list_a), 2) && all_are(tt_grad(list_b), 6));
    END;
}

TEST_WORLD(a_tensor_parallel_layer_equals_the_whole_one, 2) {
    BEGIN;
    tt_seed(7, 0); /* the same on both ranks */
    tt_tensor *x = tt_require_grad(tt_randn(tt_shape(3, 4), TUTTI_F64, NULL), true);
    tt_tensor *w1 = tt_randn(tt_shape(6, 4), TUTTI_F64, NULL), *w2 = tt_randn(tt_shape(5, 6), TUTTI_F64, NULL);
    tt_tensor *whole_x = tt_require_grad(tt_detach(tt_clone(x)), true), *whole_w1 = tt_require_grad(tt_clone(w1), true);
    tt_tensor *expected = tt_linear(tt_gelu(tt_linear(whole_x, whole_w1, NULL)), w2, NULL);
    tt_backward(tt_sum(tt_square(expected)), NULL);
    tt_tensor *rows = tt_require_grad(tt_clone(tt_narrow(w1, 0, 3 * rank, 3)), true),
              *columns = tt_narrow(w2, 1, 3 * rank, 3);
    tt_tensor *y = tt_reduce_from_group(
        tt_linear(tt_gelu(tt_linear(tt_copy_to_group(x, group), rows, NULL)), columns, NULL), group);
    CHECK(tt_allclose(y, expected, 1e-12, 1e-12));
    tt_backward(tt_sum(tt_square(y)), NULL);
    CHECK(tt_allclose(tt_grad(x), tt_grad(whole_x), 1e-11, 1e-11));
    CHECK(tt_allclose(tt_grad(rows), tt_narrow(tt_grad(whole_w1), 0, 3 * rank, 3), 1e-11, 1e-11));
    END;
}

TEST_WORLD(gradients_in_a_row_of_a_mesh_stay_in_that_row, 4) {
    BEGIN;
    tutti_mesh *mesh;
    CHECK_OK(tutti_mesh_new(world, TUTTI_CPU, (int[]){ 2, 2 }, 2, NULL, &mesh));
    tutti_group *row = tt_group(world, tutti_form_mesh_dim(FORM, mesh, 1), NULL);
    tt_tensor *x = leaf(tt_shape(2), rank);
    tt_backward(tt_sum(tt_mul_scalar(tt_all_gather(x, 0, row), rank)), NULL);
    CHECK(all_are(tt_grad(x), rank < 2 ? 1 : 5)); /* 0 + 1, or 2 + 3 */
    END;
    tutti_mesh_release(mesh);
}

/* ---- meta ---- */

TEST(meta_collectives_need_no_group_where_the_ranks_do_not_matter) {
    tt_scope scope = tt_scope_open();
    tt_options meta = TT_OPTIONS_INIT;
    meta.device = TUTTI_META;
    tt_tensor *x = tt_empty(tt_shape(2, 3, 4), TUTTI_F32, &meta);
    CHECK(has_shape(tt_all_reduce(x, TUTTI_SUM, NULL), tt_shape(2, 3, 4)));
    CHECK(has_shape(tt_broadcast(x, 0, NULL), tt_shape(2, 3, 4)));
    CHECK(tt_all_gather(x, 0, NULL) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    CHECK_MESSAGE("group is NULL");
    tt_error_clear();
    CHECK(tt_all_reduce(tt_ones(tt_shape(2), TUTTI_F32, NULL), TUTTI_SUM, NULL) == NULL);
    CHECK_STATUS(tt_scope_close(&scope), TUTTI_ERROR_ARGUMENT);
}

TEST(meta_shapes_are_those_of_a_fake_group_of_four) {
    tutti_world *world;
    CHECK_OK(tutti_world_open_fake(1, 4, NULL, &world));
    tutti_group *group = tutti_world_group(world);
    for (int device = TUTTI_CPU; device <= TUTTI_META; device++) {
        tt_scope scope = tt_scope_open();
        tt_options options = TT_OPTIONS_INIT;
        options.device = (tutti_device)device;
        tt_tensor *x = tt_transpose(tt_zeros(tt_shape(8, 4), TUTTI_F32, &options), 0, 1); /* 4, 8 */
        CHECK(has_shape(tt_all_gather(x, 1, group), tt_shape(4, 32)) &&
              has_shape(tt_all_gather(x, 0, group), tt_shape(16, 8)));
        CHECK(has_shape(tt_reduce_scatter(x, TUTTI_SUM, 1, group), tt_shape(4, 2)));
        CHECK(has_shape(tt_all_to_all_single(x, (int64_t[]){ 1, 2, 3, 4 }, (int64_t[]){ 1, 1, 1, 1 }, group),
                        tt_shape(10, 8)));
        CHECK(tt_is_contiguous(tt_all_reduce(x, TUTTI_SUM, group)) && tt_is_contiguous(tt_broadcast(x, 0, group)));
        CHECK(tt_all_gather(tt_ones(tt_shape(1, 8), TUTTI_F32, &options), 1, group) != NULL);
        tt_tensor_list list = tt_all_gather_coalesced(tt_tensors(x, x), group);
        CHECK(list.count == 2 && has_shape(list.at[1], tt_shape(16, 8)));
        CHECK(tt_numel(tt_isend(x, 0, 0, group)) == 0);
        CHECK(tt_wait_all(world));
        CHECK_OK(tt_scope_close(&scope));
    }
    CHECK_OK(tutti_world_close(world));
}

/* ---- errors reach the others ---- */

TEST_WORLD(a_rank_whose_step_fails_ends_the_others_collectives_with_its_message, 2) {
    BEGIN;
    tt_tensor *x = full(tt_shape(4), 1);
    if (rank == 1)
        x = tt_matmul(full(tt_shape(2, 3), 1), full(tt_shape(2, 3), 1)); /* fails */
    tt_tensor *y = tt_all_reduce(x, TUTTI_SUM, group);
    tt_wait(y);
    tutti_status status = tt_scope_close(&scope);
    if (rank == 1) {
        CHECK_EQ(status, TUTTI_ERROR_ARGUMENT);
        CHECK_MESSAGE("matmul");
    } else {
        CHECK_EQ(status, TUTTI_ERROR_ABORTED);
        CHECK_MESSAGE("cannot be multiplied");
    }
    (void)none;
}

TEST_WORLD(nothing_is_left_after_a_training_step_with_collectives, 2) {
    {
        BEGIN;
        tt_seed(1, rank);
        tt_tensor *w = tt_require_grad(tt_randn(tt_shape(4, 4), TUTTI_F32, NULL), true),
                  *x = tt_randn(tt_shape(2, 4), TUTTI_F32, NULL);
        tt_tensor *y = tt_all_gather(tt_linear(x, w, NULL), 0, group);
        tt_backward(tt_sum(tt_square(y)), NULL);
        tt_tensor *mean = tt_all_reduce(tt_grad(w), TUTTI_AVG, group);
        CHECK(tt_sgd_step(w, mean, NULL, NULL));
        END;
    }
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL)); /* the other rank may be a thread of this process */
    tt_counts counts = { .size = sizeof counts };
    CHECK_OK(tt_count(&counts));
    CHECK(counts.tensors == 0 && counts.storages == 0 && counts.scopes == 0 && counts.nodes == 0);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

/* ---- kernels ---- */

/* Whether a kernel that nobody launches was loaded; -1: the driver is the real one, which does not tell. */
static int is_loaded_early(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*ask)(const char *) = driver == NULL ? NULL : (int (*)(const char *))dlsym(driver, "standin_is_loaded");
    return ask == NULL ? -1 : ask("kernel_eq_dense_f16");
}

static void loads_kernels(tutti_world *world, __attribute__((unused)) void *argument) {
    int n = tutti_group_size(tutti_world_group(world));
    tt_scope scope = tt_scope_open();
    tt_tensor *x = full(tt_shape(2, 2), 1);
    CHECK_EQ(is_loaded_early(), 0);
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL)); /* nobody begins before all have looked */
    CHECK(all_are(test_settle(tt_all_reduce(x, TUTTI_SUM, tutti_world_group(world))), n));
    CHECK_EQ(is_loaded_early(), n > 1);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(tutti_world_group(world), NULL));
}

/* Otherwise a launch of one rank waits for the kernel of another, which waits for it. */
TEST(ranks_that_are_threads_have_loaded_every_kernel_before_they_meet) {
    if (!test_on_device() || is_loaded_early() < 0)
        SKIP("only a stand-in for the driver tells what is loaded");
    test_threads(1, loads_kernels, NULL);
    test_threads(2, loads_kernels, NULL);
    test_device_leave();
}
