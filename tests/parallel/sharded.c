/* SPDX-License-Identifier: Apache-2.0
 *
 * Fully sharded training: it computes what one rank would, holds what it should, and gathers in one order.
 */
#include <math.h>

#include <tutti/mesh.h>

#include "layers.h"

/* ---- the same as one rank ---- */

static void train_like_one_rank(tutti_world *world, void *argument) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, argument);
    check_whole(sharded, alone.root, 0);
    tt_optimizer *optimizer = tt_adamw_optimizer(net.root, NULL), *reference = tt_adamw_optimizer(alone.root, NULL);
    for (int step = 0; step < 10; step++) {
        tt_scope inner = tt_scope_open();
        CHECK(tt_backward(weighted_loss(net.root, rank, step), NULL));
        average_alone(alone.root, weighted_loss, ranks, step);
        tt_optimizer_step(optimizer);
        tt_optimizer_step(reference);
        check_whole(sharded, alone.root, 0);
        tt_optimizer_zero_grad(optimizer);
        CHECK_OK(tt_scope_close(&inner));
    }
    end_pair(sharded, optimizer, reference, &net, &alone);
    END;
}

/* F1. */
TEST(training_has_the_bits_of_one_rank) {
    for (int ranks = 1; ranks <= 4; ranks++)
        test_threads(ranks, train_like_one_rank, NULL);
    if (test_on_device()) /* more do not fit onto one GPU */
        return;
    test_threads(5, train_like_one_rank, NULL);
    test_threads(12, train_like_one_rank, NULL); /* the last two have nothing */
}

TEST(training_has_those_bits_as_processes) {
    test_processes(4, train_like_one_rank, NULL);
}

TEST(training_has_those_bits_however_units_are_kept) {
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    for (int i = 0; i < 6; i++) {
        options.reshard = (tt_reshard)(i % 3);
        options.no_prefetch = i >= 3;
        test_threads(3, train_like_one_rank, &options);
    }
}

/* ---- what is held, and when ---- */

/* F2, F3. */
TEST_WORLD(units_are_gathered_and_freed_in_one_order, 2) {
    BEGIN;
    event_log log = { .count = 0 };
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.watch = watch;
    options.user = &log;
    net net = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, &options);
    /* The first forward learns the order. */
    CHECK(tt_backward(weighted_loss(net.root, rank, 0), NULL));
    check_events(&log, "g4 g0 f0 g1 f1 g2 f2 g3 f3 g3 r4 f4 g2 r3 f3 g1 r2 f2 g0 r1 f1 r0 f0 ");
    CHECK(tt_wait_all(world)); /* nobody will read these gradients */
    tt_module_zero_grad(net.root);
    log.count = 0;
    /* The second gathers one unit ahead, both ways; never are more than two and the root's whole. */
    CHECK(tt_backward(weighted_loss(net.root, rank, 1), NULL));
    check_events(&log, "g4 g0 g1 f0 g2 f1 g3 f2 f3 g3 r4 f4 g2 r3 f3 g1 r2 f2 g0 r1 f1 r0 f0 ");
    tt_fully_sharded_counts counts = TT_FULLY_SHARDED_COUNTS_INIT;
    CHECK(tt_fully_sharded_count(sharded, &counts));
    CHECK_EQ(counts.units, LAYERS + 1);
    CHECK_EQ(counts.gathered, 0);
    CHECK_EQ(counts.gathers, 2 * (2 * LAYERS + 1));
    CHECK_EQ(counts.reductions, 2 * (LAYERS + 1));
    CHECK_EQ(counts.gathered_bytes, 0);
    /* A forward without gradients leaves nothing gathered. */
    tt_grad_mode(false);
    tt_module_call(net.root, batch_of(rank, 2));
    tt_grad_mode(true);
    CHECK(tt_fully_sharded_count(sharded, &counts));
    CHECK_EQ(counts.gathered, 0);
    tt_fully_sharded_release(sharded);
    tt_module_release(net.root);
    END;
}

/* F2. */
TEST_WORLD_THREADS(memory_falls_with_the_ranks, 4) {
    BEGIN;
    tt_module *layers[8];
    for (int i = 0; i < 8; i++)
        layers[i] = tt_linear_module(64, 64, false, TUTTI_F32);
    tt_module *root = tt_sequential_module(8, layers);
    tt_fully_sharded *sharded = tt_fully_shard(root, 8, layers, group, NULL);
    int64_t bytes = 64 * 64 * 4;
    for (int step = 0; step < 2; step++)
        CHECK(tt_backward(tt_sum(tt_module_call(root, tt_ones(tt_shape(2, 64), TUTTI_F32, NULL))), NULL));
    tt_fully_sharded_counts counts = TT_FULLY_SHARDED_COUNTS_INIT;
    CHECK(tt_fully_sharded_count(sharded, &counts));
    CHECK_EQ(counts.shard_bytes, 8 * bytes / ranks);
    CHECK_EQ(counts.most_gathered_bytes, 2 * bytes); /* the one in use, and the one that comes */
    for (int i = 0; i < 8; i++) {
        tt_tensor *weight = tt_module_parameter(layers[i], "weight");
        CHECK_EQ(tt_size(weight, 0), 64 / ranks);
        CHECK_EQ(tt_size(tt_grad(weight), 0), 64 / ranks);
    }
    tt_fully_sharded_release(sharded);
    tt_module_release(root);
    END;
}

/* ---- pieces, precision, meshes, clipping ---- */

/* F4. */
TEST_WORLD(pieces_without_a_reduction_equal_one_batch, 2) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    CHECK(tt_fully_sharded_sync(sharded, false));
    for (int piece = 0; piece < 3; piece++) {
        if (piece == 2)
            CHECK(!tt_fully_sharded_sync(sharded, true));
        CHECK(tt_backward(weighted_loss(net.root, rank, piece), NULL));
        for (int other = 0; other < ranks; other++)
            CHECK(tt_backward(tt_div_scalar(weighted_loss(alone.root, other, piece), ranks), NULL));
    }
    tt_optimizer *optimizer = tt_sgd_optimizer(net.root, NULL), *reference = tt_sgd_optimizer(alone.root, NULL);
    tt_optimizer_step(optimizer);
    tt_optimizer_step(reference);
    check_whole(sharded, alone.root, 1e-5);
    end_pair(sharded, optimizer, reference, &net, &alone);
    END;
}

static _Thread_local tutti_dtype computed_in;
static void note_dtype(const tt_hook_context *context, tt_module *module, tt_tensor_list inputs, size_t count,
                       tt_tensor **outputs) {
    (void)context, (void)module, (void)inputs, (void)count;
    computed_in = tt_dtype(outputs[0]);
}

/* F5. */
TEST_WORLD(parameters_are_computed_with_in_bf16_and_reduced_in_f32, 2) {
    BEGIN;
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.param_dtype = TUTTI_BF16;
    options.reduce_dtype = TUTTI_F32;
    options.output_dtype = TUTTI_F32;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, &options);
    CHECK(tt_hook_forward(net.units[1], note_dtype, NULL, NULL, NULL));
    tt_optimizer *optimizer = tt_sgd_optimizer(net.root, NULL), *reference = tt_sgd_optimizer(alone.root, NULL);
    tt_tensor *loss = weighted_loss(net.root, rank, 0);
    CHECK(tt_dtype(loss) == TUTTI_F32 && computed_in == TUTTI_BF16);
    CHECK(tt_backward(loss, NULL));
    tt_named_list shards = tt_module_parameters(net.root);
    for (size_t i = 0; i < shards.count; i++)
        CHECK(tt_dtype(shards.at[i]) == TUTTI_F32 && tt_dtype(tt_grad(shards.at[i])) == TUTTI_F32);
    average_alone(alone.root, weighted_loss, ranks, 0);
    tt_optimizer_step(optimizer);
    tt_optimizer_step(reference);
    tt_named_list whole = tt_fully_sharded_parameters(sharded);
    for (size_t i = 0; i < whole.count; i++)
        CHECK(tt_dtype(whole.at[i]) == TUTTI_BF16 &&
              tt_allclose(tt_to(whole.at[i], TUTTI_F32), tt_module_parameters(alone.root).at[i], 0.02, 0.02));
    end_pair(sharded, optimizer, reference, &net, &alone);
    END;
}

/* A module that scales its input by a weight, and notes in which type both came. */
static _Thread_local tutti_dtype input_came_in, weight_came_in;
static int scale_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_tensor *weight = tt_module_parameter(module, "weight");
    input_came_in = tt_dtype(inputs.at[0]);
    weight_came_in = tt_dtype(weight);
    outputs[0] = tt_mul(inputs.at[0], weight);
    return 1;
}

TEST_WORLD_THREADS(inputs_may_keep_their_type, 2) {
    BEGIN;
    static const tt_module_type type = { sizeof type, "Scale", scale_forward, NULL };
    for (int keep = 0; keep < 2; keep++) {
        tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
        options.param_dtype = TUTTI_BF16;
        options.keep_inputs = keep;
        tt_module *module = tt_module_new(&type, NULL);
        CHECK(tt_module_set_parameter(module, "weight", tt_parameter(tt_ones(tt_shape(4), TUTTI_F32, NULL), true)));
        tt_fully_sharded *sharded = tt_fully_shard(module, 0, NULL, group, &options);
        tt_tensor *scaled = tt_module_call(module, tt_full(tt_shape(4), 1.001, TUTTI_F32, NULL));
        CHECK(weight_came_in == TUTTI_BF16 && input_came_in == (keep ? TUTTI_F32 : TUTTI_BF16));
        CHECK_EQ(tt_dtype(scaled), keep ? TUTTI_F32 : TUTTI_BF16);
        CHECK(tt_backward(tt_sum(scaled), NULL));
        tt_fully_sharded_release(sharded);
        tt_module_release(module);
    }
    END;
}

/* F6: sums are made in f32, and divided once, so that no factors before and after are needed. */
TEST_WORLD(averages_of_f16_do_not_overflow_on_their_way, 4) {
    BEGIN;
    tt_module *root = tt_linear_module(1, 4, false, TUTTI_F16);
    tt_fully_sharded *sharded = tt_fully_shard(root, 0, NULL, group, NULL);
    CHECK(tt_backward(tt_sum(tt_module_call(root, tt_full(tt_shape(1, 1), 40000, TUTTI_F16, NULL))), NULL));
    tt_tensor *grad = tt_grad(tt_module_parameter(root, "weight"));
    CHECK(tt_equal(grad, tt_full(tt_shape(1, 1), 40000, TUTTI_F16, NULL)));
    tt_fully_sharded_release(sharded);
    tt_module_release(root);
    END;
}

TEST_WORLD(gradients_are_divided_by_what_is_asked_for, 2) {
    BEGIN;
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.divisor = 0.5;
    tt_module *root = tt_linear_module(1, 4, false, TUTTI_F32);
    tt_fully_sharded *sharded = tt_fully_shard(root, 0, NULL, group, &options);
    CHECK(tt_backward(tt_sum(tt_module_call(root, tt_full(tt_shape(1, 1), rank + 1, TUTTI_F32, NULL))), NULL));
    tt_tensor *grad = tt_grad(tt_module_parameter(root, "weight"));
    CHECK(tt_equal(grad, tt_full(tt_shape(2, 1), (1 + 2) / 0.5, TUTTI_F32, NULL)));
    tt_fully_sharded_release(sharded);
    tt_module_release(root);
    END;
}

TEST_WORLD(each_rank_may_cut_its_own_values, 2) {
    BEGIN;
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.own_values = true;
    tt_module *root = tt_linear_module(3, 4, false, TUTTI_F32);
    tt_grad_mode(false);
    tt_fill_(tt_module_parameter(root, "weight"), rank);
    tt_grad_mode(true);
    tt_fully_sharded *sharded = tt_fully_shard(root, 0, NULL, group, &options);
    tt_tensor *whole = tt_named(tt_fully_sharded_parameters(sharded), "weight");
    CHECK(tt_equal(tt_narrow(whole, 0, 0, 2), tt_zeros(tt_shape(2, 3), TUTTI_F32, NULL)));
    CHECK(tt_equal(tt_narrow(whole, 0, 2, 2), tt_ones(tt_shape(2, 3), TUTTI_F32, NULL)));
    tt_fully_sharded_release(sharded);
    tt_module_release(root);
    END;
}

/* F7. */
TEST_WORLD(a_mesh_shards_in_one_dimension_and_replicates_in_the_other, 4) {
    BEGIN;
    tutti_mesh *mesh;
    tutti_group_form form;
    CHECK_OK(tutti_mesh_new(world, TUTTI_CPU, (int[]){ 2, 2 }, 2, NULL, &mesh));
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.replicas = tt_group(world, tutti_form_mesh_dim(&form, mesh, 0), NULL);
    tutti_group *shards = tt_group(world, tutti_form_mesh_dim(&form, mesh, 1), NULL);
    net net = net_of(1 + rank), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, shards, &options);
    check_whole(sharded, alone.root, 0);
    tt_optimizer *optimizer = tt_sgd_optimizer(net.root, NULL), *reference = tt_sgd_optimizer(alone.root, NULL);
    for (int step = 0; step < 3; step++) {
        CHECK(tt_backward(weighted_loss(net.root, rank, step), NULL));
        average_alone(alone.root, weighted_loss, ranks, step);
        tt_optimizer_step(optimizer);
        tt_optimizer_step(reference);
        check_whole(sharded, alone.root, 1e-5);
        tt_optimizer_zero_grad(optimizer);
    }
    end_pair(sharded, optimizer, reference, &net, &alone);
    END;
    tutti_mesh_release(mesh);
}

/* F8. */
TEST_WORLD(clipping_shards_clips_as_one_rank_does, 3) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    CHECK(tt_backward(weighted_loss(net.root, rank, 0), NULL));
    average_alone(alone.root, weighted_loss, ranks, 0);
    tt_named_list shards = tt_module_parameters(net.root), whole = tt_module_parameters(alone.root);
    tt_tensor *norm = tt_clip_grad_norm(tt_tensors_of(shards.count, shards.at), 0.1, group);
    tt_tensor *expected = tt_clip_grad_norm(tt_tensors_of(whole.count, whole.at), 0.1, NULL);
    CHECK(tt_allclose(norm, expected, 1e-5, 0) && tt_item(norm) > 0.1);
    tt_optimizer *optimizer = tt_sgd_optimizer(net.root, NULL), *reference = tt_sgd_optimizer(alone.root, NULL);
    tt_optimizer_step(optimizer);
    tt_optimizer_step(reference);
    check_whole(sharded, alone.root, 1e-5);
    end_pair(sharded, optimizer, reference, &net, &alone);
    END;
}

/* ---- parameters that are special ---- */

/* F9. */
TEST_WORLD_THREADS(a_module_reduces_whether_or_not_its_input_needs_a_gradient, 2) {
    BEGIN;
    for (int needs = 0; needs < 2; needs++) {
        net net = net_of(1), alone = net_of(1);
        tt_fully_sharded *sharded = shard(&net, group, NULL);
        tt_tensor *x = tt_require_grad(tt_clone(batch_of(0, 0)), needs);
        CHECK(tt_backward(tt_sum(tt_module_call(net.root, x)), NULL));
        CHECK(tt_backward(tt_sum(tt_module_call(alone.root, tt_detach(x))), NULL));
        tt_tensor *mine = tt_grad(tt_module_parameter(tt_module_child(net.units[0], "0"), "weight"));
        tt_tensor *whole = tt_grad(tt_module_parameter(tt_module_child(alone.units[0], "0"), "weight"));
        CHECK(tt_equal(mine, tt_narrow(whole, 0, rank * 5, 5)));
        CHECK((tt_grad(x) != NULL) == needs);
        CHECK(tt_wait_all(world));
        tt_fully_sharded_release(sharded);
        tt_module_release(net.root);
        tt_module_release(alone.root);
    }
    END;
}

/* F10. */
TEST_WORLD(frozen_parameters_are_gathered_and_not_reduced, 2) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    for (int i = 0; i < 2; i++) {
        tt_module *linear = tt_module_child((i == 0 ? &net : &alone)->units[1], "0");
        tt_require_grad(tt_module_parameter(linear, "weight"), false);
    }
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    CHECK(tt_backward(weighted_loss(net.root, rank, 0), NULL));
    CHECK(tt_grad(tt_module_parameter(tt_module_child(net.units[1], "0"), "weight")) == NULL);
    CHECK(tt_grad(tt_module_parameter(tt_module_child(net.units[1], "0"), "bias")) != NULL);
    tt_tensor *first = tt_grad(tt_module_parameter(tt_module_child(net.units[0], "0"), "bias"));
    tt_tensor *sum = tt_all_gather(first, 0, group), *expected = NULL;
    for (int other = 0; other < ranks; other++)
        CHECK(tt_backward(tt_div_scalar(weighted_loss(alone.root, other, 0), ranks), NULL));
    expected = tt_grad(tt_module_parameter(tt_module_child(alone.units[0], "0"), "bias"));
    CHECK(tt_allclose(sum, expected, 1e-5, 1e-6));
    tt_fully_sharded_release(sharded);
    tt_module_release(net.root);
    tt_module_release(alone.root);
    END;
}

TEST_WORLD(parameters_that_a_unit_shares_stay_one, 2) {
    BEGIN;
    tt_module *layers[] = { tt_linear_module(4, 4, false, TUTTI_F32), tt_linear_module(4, 4, false, TUTTI_F32) };
    CHECK(tt_module_set_parameter(layers[1], "weight", tt_module_parameter(layers[0], "weight")));
    tt_module *root = tt_sequential_module(2, layers);
    tt_tensor *whole = tt_clone(tt_detach(tt_module_parameter(layers[0], "weight")));
    tt_fully_sharded *sharded = tt_fully_shard(root, 0, NULL, group, NULL);
    CHECK(tt_module_parameter(layers[0], "weight") == tt_module_parameter(layers[1], "weight"));
    tt_tensor *x = tt_ones(tt_shape(1, 4), TUTTI_F32, NULL);
    tt_tensor *y = tt_module_call(root, x);
    tt_broadcast_(whole, 0, group);
    CHECK(tt_allclose(y, tt_linear(tt_linear(x, whole, NULL), whole, NULL), 1e-6, 1e-6));
    CHECK(tt_backward(tt_sum(y), NULL));
    CHECK_EQ(tt_fully_sharded_parameters(sharded).count, 1);
    tt_fully_sharded_release(sharded);
    tt_module_release(root);
    END;
}

TEST_WORLD(checkpointed_units_are_computed_again_from_what_was_gathered, 2) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = tt_fully_shard(net.units[1], 0, NULL, group, NULL);
    tt_tensor *x = tt_require_grad(tt_add_scalar(tt_zeros(tt_shape(3, 10), TUTTI_F32, NULL), 1), true);
    for (int step = 0; step < 2; step++)
        CHECK(tt_backward(tt_sum(tt_square(tt_module_call_checkpointed(net.units[1], x))), NULL));
    tt_tensor *grad = tt_clone(tt_grad(x));
    tt_set_grad(x, NULL);
    for (int step = 0; step < 2; step++)
        CHECK(tt_backward(tt_sum(tt_square(tt_module_call(alone.units[1], x))), NULL));
    CHECK(tt_equal(grad, tt_grad(x)));
    tt_fully_sharded_counts counts = TT_FULLY_SHARDED_COUNTS_INIT;
    CHECK(tt_fully_sharded_count(sharded, &counts));
    CHECK_EQ(counts.gathered, 0);
    tt_fully_sharded_release(sharded);
    tt_module_release(net.root);
    tt_module_release(alone.root);
    END;
}

/* ---- by hand ---- */

TEST_WORLD(whole_parameters_are_set_and_read_back, 3) {
    BEGIN;
    net net = net_of(1), other = net_of(2);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    CHECK(tt_fully_sharded_set_parameters(sharded, tt_module_parameters(other.root)));
    check_whole(sharded, other.root, 0);
    CHECK(tt_fully_sharded_gather(sharded, net.units[2]));
    CHECK_EQ(tt_size(tt_module_parameter(tt_module_child(net.units[2], "0"), "weight"), 0), 10);
    CHECK(tt_fully_sharded_free(sharded, net.units[2]));
    CHECK(tt_size(tt_module_parameter(tt_module_child(net.units[2], "0"), "weight"), 0) <= 4);
    tt_named_list wrong = tt_module_parameters(tt_module_child(other.root, "4"));
    CHECK(!tt_fully_sharded_set_parameters(sharded, wrong));
    expect_error(TUTTI_ERROR_NOT_FOUND, "parameter \"0.0.weight\" is missing");
    check_whole(sharded, other.root, 0);
    tt_fully_sharded_release(sharded);
    tt_module_release(net.root);
    tt_module_release(other.root);
    END;
}

TEST_WORLD_THREADS(what_cannot_be_sharded_is_refused_and_left_as_it_was, 2) {
    BEGIN;
    net net = net_of(1), stranger = net_of(2);
    tt_tensor *weight = tt_module_parameter(tt_module_child(net.units[0], "0"), "weight");
    CHECK(tt_fully_shard(net.root, 1, &stranger.units[0], group, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "units[0] (Sequential) is not below the root");
    CHECK(tt_module_parameter(tt_module_child(net.units[0], "0"), "weight") == weight);
    tt_module_release(net.root);
    tt_module_release(stranger.root);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- what went another way ---- */

static tt_tensor *fail_here(const tt_hook_context *context, tt_tensor *grad) {
    (void)context;
    return tt_view(grad, tt_shape(7));
}

TEST_WORLD_THREADS(after_a_backward_that_failed_the_next_one_is_whole, 2) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    tt_optimizer *optimizer = tt_sgd_optimizer(net.root, NULL), *reference = tt_sgd_optimizer(alone.root, NULL);
    tt_tensor *x = tt_parameter(batch_of(rank, 0), true);
    CHECK(tt_hook_tensor(x, fail_here, NULL, NULL, NULL));
    CHECK(!tt_backward(tt_mean(tt_square(tt_module_call(net.root, x))), NULL)); /* units have been reduced by then */
    tt_error_clear();
    for (int step = 0; step < 2; step++) {
        CHECK(tt_backward(weighted_loss(net.root, rank, step), NULL));
        average_alone(alone.root, weighted_loss, ranks, step);
        CHECK(tt_optimizer_step(optimizer) && tt_optimizer_step(reference));
        tt_optimizer_zero_grad(optimizer);
        check_whole(sharded, alone.root, 0);
    }
    end_pair(sharded, optimizer, reference, &net, &alone);
    END;
}

static void look_before_the_step(tutti_world *world, void *argument) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, argument);
    tt_optimizer *optimizer = tt_sgd_optimizer(net.root, NULL), *reference = tt_sgd_optimizer(alone.root, NULL);
    for (int step = 0; step < 2; step++) {
        CHECK(tt_backward(weighted_loss(net.root, rank, step), NULL));
        average_alone(alone.root, weighted_loss, ranks, step);
        weighted_loss(net.root, rank, 99); /* nobody goes back from here, so units stay whole */
        CHECK(tt_optimizer_step(optimizer) && tt_optimizer_step(reference));
        tt_optimizer_zero_grad(optimizer);
        if (step == 1)
            check_whole(sharded, alone.root, 0);
        CHECK(tt_equal(tt_detach(weighted_loss(net.root, rank, 50)), tt_detach(weighted_loss(alone.root, rank, 50))));
    }
    end_pair(sharded, optimizer, reference, &net, &alone);
    END;
}

TEST(what_a_forward_without_a_backward_left_is_not_used_again) {
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    for (int i = 0; i < 3; i++) {
        options.reshard = (tt_reshard)i;
        test_threads(2, look_before_the_step, &options);
    }
}

TEST_WORLD(ranks_that_list_their_units_in_another_order_are_told, 2) {
    BEGIN;
    net net = net_of(1);
    tt_module *units[] = { net.units[1 + rank], net.units[2 - rank] }; /* of the same shapes */
    CHECK(tt_fully_shard(net.root, 2, units, group, NULL) == NULL);
    expect_error(TUTTI_ERROR_MISMATCH, "parameter 0 has another name, shape or dtype, or is cut otherwise, on rank 1");
    tt_module_release(net.root);
    END;
}

static tt_tensor *double_it(const tt_hook_context *context, tt_tensor *grad) {
    (void)context;
    return tt_mul_scalar(grad, 2);
}

TEST_WORLD_THREADS(hooks_of_parameters_are_refused, 1) {
    BEGIN;
    tt_module *root = tt_linear_module(3, 4, true, TUTTI_F32);
    CHECK(tt_hook_tensor(tt_module_parameter(root, "weight"), double_it, NULL, NULL, NULL));
    CHECK(tt_fully_shard(root, 0, NULL, group, NULL) == NULL);
    expect_error(TUTTI_ERROR_UNSUPPORTED, "parameter \"weight\" has hooks");
    tt_module_release(root);
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD_THREADS(hooks_of_shards_run, 2) {
    BEGIN;
    tt_module *root = tt_linear_module(3, 4, true, TUTTI_F32);
    tt_fully_sharded *sharded = tt_fully_shard(root, 0, NULL, group, NULL);
    CHECK(tt_hook_tensor(tt_module_parameter(root, "weight"), double_it, NULL, NULL, NULL));
    for (int step = 1; step < 3; step++) {
        CHECK(tt_backward(tt_sum(tt_module_call(root, tt_ones(tt_shape(2, 3), TUTTI_F32, NULL))), NULL));
        tt_tensor *weight = tt_module_parameter(root, "weight"), *bias = tt_module_parameter(root, "bias");
        CHECK(tt_equal(tt_grad(weight), tt_full(tt_shape(2, 3), 4 * step, TUTTI_F32, NULL)));
        CHECK(tt_equal(tt_grad(bias), tt_full(tt_shape(2), 2 * step, TUTTI_F32, NULL)));
    }
    tt_fully_sharded_release(sharded);
    tt_module_release(root);
    END;
}

static tt_tensor *fail_once(const tt_hook_context *context, tt_tensor *grad) {
    int *left = context->user;
    return (*left)-- > 0 ? tt_view(grad, tt_shape(7)) : NULL;
}

TEST_WORLD_THREADS(a_backward_that_failed_is_tried_again_on_the_same_graph, 2) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    tt_tensor *x = tt_parameter(tt_ones(tt_shape(2, 5), TUTTI_F32, NULL), true);
    tt_backward_options keep = TT_BACKWARD_OPTIONS_INIT;
    keep.retain_graph = true;
    int left = 1;
    CHECK(tt_hook_tensor(x, fail_once, &left, NULL, NULL));
    tt_tensor *loss = tt_mean(tt_square(tt_module_call(net.root, x)));
    CHECK(!tt_backward_from(tt_tensors(loss), (tt_tensor_list){ 0, NULL }, &keep));
    tt_error_clear();
    CHECK(tt_backward_from(tt_tensors(loss), (tt_tensor_list){ 0, NULL }, &keep));
    CHECK(tt_backward(tt_mean(tt_square(tt_module_call(alone.root, tt_detach(x)))), NULL));
    tt_tensor *mine = tt_grad(tt_module_parameter(tt_module_child(net.units[0], "0"), "weight"));
    tt_tensor *whole = tt_grad(tt_module_parameter(tt_module_child(alone.units[0], "0"), "weight"));
    CHECK(mine != NULL && tt_equal(mine, tt_narrow(whole, 0, rank * 5, 5)));
    CHECK(tt_wait_all(world));
    tt_fully_sharded_release(sharded);
    tt_module_release(net.root);
    tt_module_release(alone.root);
    END;
}

TEST_WORLD_THREADS(bad_arguments_are_refused, 1) {
    BEGIN;
    net net = net_of(1);
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    CHECK(tt_fully_shard(NULL, 0, NULL, group, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "root is NULL");
    CHECK(tt_fully_shard(net.root, 0, NULL, NULL, NULL) == NULL);
    CHECK_MESSAGE("group is NULL");
    tt_error_clear();
    CHECK(tt_fully_shard(net.root, 2, NULL, group, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "units is NULL");
    options.param_dtype = TUTTI_I32;
    CHECK(shard(&net, group, &options) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "param_dtype");
    options.param_dtype = 0;
    options.divisor = -1;
    CHECK(shard(&net, group, &options) == NULL);
    CHECK_MESSAGE("divisor is -1");
    tt_error_clear();
    options.divisor = 0;
    options.reshard = (tt_reshard)7;
    CHECK(shard(&net, group, &options) == NULL);
    CHECK_MESSAGE("reshard is 7");
    tt_error_clear();
    CHECK(!tt_fully_sharded_gather(NULL, NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    tt_fully_sharded_release(NULL);
    tt_module_release(net.root);
    END;
}

TEST_WORLD_THREADS(shards_are_not_taken_for_whole_parameters, 1) {
    BEGIN;
    net net = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    CHECK(tt_fully_shard(tt_module_child(net.units[1], "0"), 0, NULL, group, NULL) == NULL);
    expect_error(TUTTI_ERROR_STATE, "is a shard already");
    tt_fully_sharded_release(sharded);
    tt_module_release(net.root);
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD_THREADS(shards_are_not_made_data_parallel, 1) {
    BEGIN;
    net net = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    CHECK(tt_data_parallel_new(net.root, group, NULL) == NULL);
    expect_error(TUTTI_ERROR_STATE, "replicas of shards are an option of tt_fully_shard");
    tt_fully_sharded_release(sharded);
    tt_module_release(net.root);
    CHECK_OK(tt_scope_close(&scope));
}

/* One of a unit's uses is freed while the other is still to come. */
static int twice_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_module *layer = tt_module_child(module, "layer");
    outputs[0] = tt_module_call(layer, tt_relu(tt_module_call(layer, inputs.at[0])));
    return 1;
}

static tt_module *twice_of(void) {
    static const tt_module_type type = { sizeof type, "Twice", twice_forward, NULL };
    tt_module *root = tt_module_new(&type, NULL);
    tt_seed(5, 0);
    tt_module_add_child(root, "layer", tt_linear_module(5, 5, true, TUTTI_F32));
    return root;
}

static tt_tensor *loss_of_twice(tt_module *root, int rank, int step) {
    return tt_mean(tt_square(tt_module_call(root, batch_of(rank, step))));
}

TEST_WORLD(a_unit_may_be_used_twice_in_a_forward, 2) {
    BEGIN;
    tt_module *ours = twice_of(), *alone = twice_of(), *unit = tt_module_child(ours, "layer");
    tt_fully_sharded *sharded = tt_fully_shard(ours, 1, &unit, group, NULL);
    tt_optimizer *optimizer = tt_adamw_optimizer(ours, NULL), *reference = tt_adamw_optimizer(alone, NULL);
    for (int step = 0; step < 3; step++) {
        CHECK(tt_backward(loss_of_twice(ours, rank, step), NULL));
        average_alone(alone, loss_of_twice, ranks, step);
        CHECK(tt_optimizer_step(optimizer) && tt_optimizer_step(reference));
        tt_optimizer_zero_grad(optimizer);
        check_whole(sharded, alone, 0);
    }
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_optimizer_release(reference);
    tt_module_release(ours);
    tt_module_release(alone);
    END;
}

/* In each order of the three, with gradients that are still under way. */
TEST_WORLD_THREADS(handles_are_released_in_any_order, 2) {
    BEGIN;
    static const char *const orders[] = { "som", "smo", "osm", "oms", "mso", "mos" };
    for (size_t i = 0; i < 2 * (sizeof orders / sizeof *orders); i++) {
        net net = net_of(1);
        tt_fully_sharded *sharded = i % 2 ? shard(&net, group, NULL) : NULL;
        tt_data_parallel *parallel = i % 2 ? NULL : tt_data_parallel_new(net.root, group, NULL);
        tt_optimizer *optimizer = tt_adamw_optimizer(net.root, NULL);
        CHECK(tt_backward(weighted_loss(net.root, rank, 0), NULL));
        for (const char *next = orders[i / 2]; *next != '\0'; next++) {
            if (*next == 'o')
                tt_optimizer_release(optimizer);
            if (*next == 'm')
                tt_module_release(net.root);
            if (*next == 's') {
                tt_fully_sharded_release(sharded);
                tt_data_parallel_release(parallel);
            }
        }
        CHECK_EQ(tt_error_pending(), TUTTI_OK);
        CHECK_EQ(tt_pending_works(world), 0);
    }
    END;
}

/* Its step, and what it remembers, are still there. */
TEST_WORLD_THREADS(a_protected_optimizer_is_kept_by_the_sharding, 2) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    tt_optimizer *optimizer = tt_adamw_optimizer(net.root, NULL), *reference = tt_adamw_optimizer(alone.root, NULL);
    CHECK(tt_fully_sharded_protect(sharded, optimizer));
    tt_optimizer_release(optimizer);
    CHECK(tt_backward(weighted_loss(net.root, rank, 1), NULL));
    average_alone(alone.root, weighted_loss, ranks, 1);
    CHECK(tt_fully_sharded_step(sharded) && tt_optimizer_step(reference));
    check_whole(sharded, alone.root, 0);
    end_pair(sharded, NULL, reference, &net, &alone);
    END;
}

/* Layers without outputs and inputs: there is nothing to send, nothing is under way behind a step, and nothing to pin.
 */
TEST_WORLD(units_of_nothing_are_sharded, 3) {
    BEGIN;
    tt_module *layers[] = { tt_linear_module(4, 0, true, TUTTI_F32), tt_linear_module(0, 4, true, TUTTI_F32) };
    tt_module *root = tt_sequential_module(2, layers);
    tt_fully_sharded *sharded = tt_fully_shard(root, 2, layers, group, NULL);
    tt_optimizer *optimizer = tt_adamw_optimizer(root, NULL);
    CHECK(tt_backward(tt_sum(tt_module_call(root, tt_ones(tt_shape(2, 4), TUTTI_F32, NULL))), NULL));
    CHECK(tt_optimizer_step(optimizer));
    tt_named_list whole = tt_fully_sharded_parameters(sharded);
    CHECK_EQ(whole.count, 4);
    CHECK_EQ(tt_size(whole.at[2], 0), 4);
    CHECK(tt_wait(whole.at[3]) != NULL);
    CHECK_EQ(tt_pending_works(world), 0);
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_module_release(root);
    END;
}

TEST_WORLD_THREADS(a_backward_after_the_release_is_told, 1) {
    BEGIN;
    net net = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    tt_tensor *loss = weighted_loss(net.root, 0, 0);
    tt_fully_sharded_release(sharded);
    CHECK(!tt_backward(loss, NULL));
    expect_error(TUTTI_ERROR_STATE, "whose sharding was released");
    tt_module_release(net.root);
    END;
}

static tutti_status train_once(void *argument) {
    (void)argument;
    tutti_world *world;
    tutti_status status = tutti_world_open(NULL, &world);
    if (status != TUTTI_OK)
        return status;
    tt_scope scope = tt_scope_open();
    net net = net_of(1);
    if (tt_error_pending() == TUTTI_OK) {
        tt_fully_sharded *sharded = shard(&net, tutti_world_group(world), NULL);
        tt_backward(weighted_loss(net.root, 0, 0), NULL);
        tt_backward(weighted_loss(net.root, 0, 1), NULL);
        tt_fully_sharded_release(sharded);
    }
    tt_module_release(net.root);
    status = tt_scope_close(&scope);
    if (status != TUTTI_OK && !tt_wait_all(world)) /* what had begun before the failure */
        tt_error_clear();
    tutti_status closed = tutti_world_close(world);
    return status != TUTTI_OK ? status : closed;
}

TEST_LIMIT(an_allocation_that_fails_leaves_nothing_behind, 120) {
    CHECK_OK(train_once(NULL));
    if (test_on_device()) /* the stand-in for a driver allocates too */
        SKIP("on the CPU alone");
    test_fail_each("malloc,calloc,realloc", train_once, NULL);
}
