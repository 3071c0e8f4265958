/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the shards of fully sharded training lie: along other dimensions, in a smaller group after the forward, and on
 * another device than the one that computes.
 */
#include <tutti/streams.h>

#include "layers.h"

/* SGD, whose steps are as close as the gradients are. */
static void train_and_compare(tt_fully_sharded *sharded, net *ours, net *alone, int rank, int ranks, double tolerance) {
    tt_optimizer *optimizer = tt_sgd_optimizer(ours->root, NULL), *reference = tt_sgd_optimizer(alone->root, NULL);
    for (int step = 0; step < 4; step++) {
        tt_scope inner = tt_scope_open();
        CHECK(tt_backward(weighted_loss(ours->root, rank, step), NULL));
        average_alone(alone->root, weighted_loss, ranks, step);
        CHECK(tt_optimizer_step(optimizer) && tt_optimizer_step(reference));
        check_whole(sharded, alone->root, tolerance);
        tt_optimizer_zero_grad(optimizer);
        CHECK_OK(tt_scope_close(&inner));
    }
    end_pair(sharded, optimizer, reference, ours, alone);
}

/* ---- along other dimensions ---- */

/* Columns of matrices that have enough of them, rows of all others. */
static int by_columns(void *user, const char *name, const tt_tensor *parameter) {
    (void)user, (void)name;
    return tt_dim_count(parameter) == 2 && tt_size(parameter, 1) == 10 ? 1 : 0;
}

static void train_by_columns(tutti_world *world, void *argument) {
    BEGIN;
    (void)argument;
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.dimension = by_columns;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, &options);
    tt_tensor *weight = tt_module_parameter(tt_module_child(net.units[1], "0"), "weight");
    CHECK(tt_size(weight, 0) == 10 && tt_size(weight, 1) == 10 / ranks);
    check_whole(sharded, alone.root, 0);
    CHECK(tt_fully_sharded_gather(sharded, net.units[1]));
    weight = tt_module_parameter(tt_module_child(net.units[1], "0"), "weight");
    CHECK(tt_equal(weight, tt_module_parameter(tt_module_child(alone.units[1], "0"), "weight")));
    CHECK(tt_fully_sharded_free(sharded, net.units[1]));
    train_and_compare(sharded, &net, &alone, rank, ranks, 1e-5);
    END;
}

TEST(columns_are_cut_as_rows_are) {
    test_threads(2, train_by_columns, NULL);
    test_threads(!test_on_device() ? 5 : 1, train_by_columns, NULL); /* more do not fit onto one GPU */
    test_processes_too(2, train_by_columns, NULL);
}

static int as_told(void *user, const char *name, const tt_tensor *parameter) {
    (void)name;
    return tt_dim_count(parameter) == 2 ? *(const int *)user : 0;
}

/* Matrices shall be cut along that dimension, and cannot be. */
static void check_refused(tutti_world *world, int dimension, tutti_status status, const char *words) {
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.dimension = as_told;
    options.user = &dimension;
    BEGIN;
    net net = net_of(1);
    CHECK(shard(&net, group, &options) == NULL);
    expect_error(status, words);
    tt_module_release(net.root);
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD_THREADS(dimensions_that_cannot_be_cut_are_refused_by_name, 2) {
    check_refused(world, 1, TUTTI_ERROR_ARGUMENT, "parameter \"0.0.weight\" is"); /* the first layer has 5 columns */
}

TEST_WORLD_THREADS(a_dimension_that_does_not_exist_is_refused, 1) {
    check_refused(world, 2, TUTTI_ERROR_RANGE, "dimension 2 of parameter \"0.0.weight\"");
}

TEST_WORLD(ranks_that_cut_along_other_dimensions_are_told_on_all, 2) {
    BEGIN;
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.dimension = as_told;
    options.user = &rank;
    tt_module *layer = tt_linear_module(4, 4, false, TUTTI_F32); /* a square: its shards are alike either way */
    CHECK(tt_fully_shard(layer, 0, NULL, group, &options) == NULL);
    expect_error(TUTTI_ERROR_MISMATCH, "or is cut otherwise, on rank 1");
    tt_module_release(layer);
    END;
}

/* ---- a smaller group after the forward ---- */

static void train_near(tutti_world *world, void *argument) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    train_and_compare(shard(&net, group, argument), &net, &alone, rank, ranks, 0);
    END;
}

TEST(units_that_stay_in_a_smaller_group_have_the_bits_of_one_rank) {
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.near_ranks = 2;
    test_threads(4, train_near, &options);
    test_processes_too(4, train_near, &options);
    options.reshard = TT_RESHARD_ALWAYS;
    test_threads(4, train_near, &options);
    options.near_ranks = 3;
    options.no_prefetch = true;
    if (!test_on_device()) /* so many do not fit onto one GPU */
        test_threads(6, train_near, &options);
}

/* What far ranks write to their shards after the forward is not seen by the backward, and those who come next see it.
 */
TEST_WORLD(the_backward_gathers_from_the_smaller_group, 4) {
    BEGIN;
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.near_ranks = 2;
    tt_module *unit = tt_linear_module(4, 8, false, TUTTI_F32), *root = tt_sequential_module(1, &unit);
    tt_fully_sharded *sharded = tt_fully_shard(root, 1, &unit, group, &options);
    tt_tensor *before = tt_named(tt_fully_sharded_parameters(sharded), "0.weight");
    tt_tensor *x = tt_require_grad(tt_add_scalar(tt_zeros(tt_shape(1, 4), TUTTI_F32, NULL), 1), true);
    tt_tensor *loss = tt_sum(tt_module_call(root, x));
    bool recording = tt_grad_mode(false);
    tt_fill_(tt_module_parameter(unit, "weight"), 100);
    tt_grad_mode(recording);
    CHECK_OK(tutti_barrier(group, NULL));
    CHECK(tt_backward(loss, NULL));
    CHECK(tt_allclose(tt_grad(x), tt_sum_dims(before, tt_shape(0), true), 1e-6, 1e-6));
    CHECK(all_are(tt_named(tt_fully_sharded_parameters(sharded), "0.weight"), 100));
    tt_fully_sharded_counts counts = TT_FULLY_SHARDED_COUNTS_INIT;
    CHECK(tt_fully_sharded_count(sharded, &counts));
    CHECK_EQ(counts.gathered, 0);
    tt_fully_sharded_release(sharded);
    tt_module_release(root);
    END;
}

TEST_WORLD_THREADS(sizes_of_smaller_groups_that_cannot_be_are_refused, 4) {
    BEGIN;
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    net net = net_of(1);
    for (int near = -1; near <= 4; near++) {
        options.near_ranks = near;
        if (near == 0 || near == 2)
            continue;
        CHECK(shard(&net, group, &options) == NULL);
        expect_error(TUTTI_ERROR_ARGUMENT, "it must divide the 4 ranks of the group");
    }
    options.near_ranks = 2;
    options.reshard = TT_RESHARD_NEVER;
    CHECK(shard(&net, group, &options) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "reshard says that units stay whole");
    tt_module_release(net.root);
    END;
}

/* ---- on another device than the one that computes ---- */

static void offload(tutti_world *world, void *argument) {
    BEGIN;
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    tutti_device device = test_device();
    if (argument != NULL)
        options = *(const tt_fully_sharded_options *)argument;
    options.device = device;
    net alone = net_of(1);
    CHECK(tt_default_device_set(TUTTI_CPU));
    net net = net_of(1);
    CHECK(tt_default_device_set(device));
    bool recording = tt_grad_mode(false);
    tt_named_list ours = tt_module_parameters(net.root), theirs = tt_module_parameters(alone.root);
    for (size_t i = 0; i < ours.count; i++) /* drawn by other generators */
        tt_copy_(theirs.at[i], tt_to_device(ours.at[i], device));
    tt_grad_mode(recording);
    tt_fully_sharded *sharded = shard(&net, group, &options);
    CHECK(tt_backward(weighted_loss(net.root, rank, 7), NULL));
    tt_tensor *weight = tt_module_parameter(tt_module_child(net.units[0], "0"), "weight");
    CHECK_EQ(tt_device_of(weight), TUTTI_CPU);
    CHECK_EQ(tt_device_of(tt_grad(weight)), TUTTI_CPU);
    CHECK(tt_wait_all(world));
    tt_module_zero_grad(net.root);
    CHECK(tt_fully_sharded_gather(sharded, net.units[0]));
    CHECK_EQ(tt_device_of(tt_module_parameter(tt_module_child(net.units[0], "0"), "weight")), device);
    CHECK(tt_fully_sharded_free(sharded, NULL));
    train_and_compare(sharded, &net, &alone, rank, ranks, 1e-5);
    END;
}

TEST(shards_may_stay_in_memory_of_the_host) {
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    test_threads(1, offload, NULL);
    test_threads(3, offload, NULL);
    options.near_ranks = 2;
    test_threads(4, offload, &options);
}

TEST(shards_may_stay_in_memory_of_the_host_as_processes) {
    test_processes(2, offload, NULL);
}

TEST_WORLD_THREADS(parameters_without_values_and_of_several_devices_are_refused, 1) {
    BEGIN;
    tt_module *layer = tt_linear_module(3, 4, true, TUTTI_F32);
    CHECK(tt_module_set_parameter(layer, "bias", tt_parameter(meta_like(tt_shape(4), TUTTI_F32), true)));
    CHECK(tt_fully_shard(layer, 0, NULL, group, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "parameter \"bias\" is on device meta");
    tt_module_release(layer);
    CHECK_OK(tt_scope_close(&scope));
}
