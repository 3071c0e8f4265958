/* SPDX-License-Identifier: Apache-2.0
 *
 * Functional collectives, their gradients and works between hosts: the same values as on one.
 */
#include <tutti/autograd.h>
#include <tutti/collective.h>
#include <tutti/functional.h>
#include <tutti/ops.h>

#include "../collective/on_hosts.h"

static tt_tensor *full(tt_dims shape, double value) {
    return tt_full(shape, value, TUTTI_F32, NULL);
}

static bool all_are(tt_tensor *x, double value) {
    return x != NULL && tt_equal(x, tt_full(tt_sizes(x), value, tt_dtype(x), NULL));
}

static tt_tensor *rows_of(int rank, int rows) {
    return tt_add_scalar(tt_view(tt_arange(0, 3 * rows, 1, TUTTI_F32, NULL), tt_shape(rows, 3)), 100 * rank);
}

static void check_values(tutti_group *group, int rank, int size) {
    double sum = size * (size - 1) / 2.0;
    CHECK(all_are(tt_all_reduce(full(tt_shape(4), rank), TUTTI_SUM, group), sum));
    CHECK(all_are(tt_all_reduce(full(tt_shape(300, 300), rank), TUTTI_MAX, group), size - 1));
    CHECK(all_are(tt_broadcast(full(tt_shape(5), rank), size - 1, group), size - 1));
    tt_tensor *wide = tt_all_gather(full(tt_shape(2, 3), rank), 1, group);
    tt_tensor *scattered = tt_reduce_scatter(rows_of(rank, size), TUTTI_SUM, 0, group);
    tt_tensor *dealt = tt_all_to_all_single(rows_of(rank, size), NULL, NULL, group);
    int to[MOST_RANKS];
    for (int r = 0; r < size; r++)
        to[r] = (r + 1) % size;
    tt_tensor *turned = tt_permute_ranks(full(tt_shape(2), rank), to, group);
    for (int r = 0; r < size; r++) {
        CHECK(all_are(tt_narrow(wide, 1, 3 * r, 3), r));
        CHECK(tt_equal(tt_narrow(dealt, 0, r, 1), tt_narrow(rows_of(r, size), 0, rank, 1)));
    }
    CHECK(tt_equal(scattered, tt_add_scalar(tt_mul_scalar(tt_narrow(rows_of(0, size), 0, rank, 1), size), 100 * sum)));
    CHECK(all_are(turned, (rank + size - 1) % size));
    tt_tensor_list both =
        tt_all_reduce_coalesced(tt_tensors(full(tt_shape(2), 1), full(tt_shape(3), rank)), TUTTI_SUM, group);
    CHECK(all_are(both.at[0], size) && all_are(both.at[1], sum));
}

static void check_gradients(tutti_group *group, int rank, int size) {
    tt_tensor *x = tt_require_grad(full(tt_shape(4, 3), rank), true);
    CHECK(tt_backward(tt_sum(tt_mul_scalar(tt_all_reduce(x, TUTTI_SUM, group), rank + 1)), NULL));
    CHECK(all_are(tt_grad(x), size * (size + 1) / 2.0)); /* of all ranks' factors */
    tt_tensor *y = tt_require_grad(full(tt_shape(2, 3), rank), true);
    CHECK(tt_backward(tt_sum(tt_mul_scalar(tt_all_gather(y, 0, group), rank + 1)), NULL));
    CHECK(all_are(tt_grad(y), size * (size + 1) / 2.0));
    tt_tensor *z = tt_require_grad(full(tt_shape(size, 3), rank), true);
    CHECK(tt_backward(tt_sum(tt_mul_scalar(tt_reduce_scatter(z, TUTTI_SUM, 0, group), rank + 1)), NULL));
    for (int r = 0; r < size; r++)
        CHECK(all_are(tt_narrow(tt_grad(z), 0, r, 1), r + 1));
}

static void functional_across(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    int rank = tutti_group_rank(group), size = tutti_group_size(group);
    tt_scope scope = tt_scope_open();
    check_values(group, rank, size);
    check_gradients(group, rank, size);
    tt_tensor *pending = tt_all_reduce(full(tt_shape(1000), rank), TUTTI_SUM, group);
    CHECK(tt_is_async(pending) && tt_pending_works(world) == 1);
    CHECK(tt_wait_all(world) && all_are(pending, size * (size - 1) / 2.0));
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(tt_pending_works(world), 0);
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST(functional_collectives_and_their_gradients_cross_hosts) {
    on_hosts(one_each, 2, functional_across);
    on_hosts(two_and_two, 4, functional_across);
    on_hosts(in_turns, 5, functional_across);
}
