/* SPDX-License-Identifier: Apache-2.0
 *
 * What a program changes about fully sharded units while it trains: when they are freed and gathered, which of them
 * ahead, how they are sent, and when replicas average.
 */
#include <tutti/mesh.h>

#include "layers.h"

static tt_fully_sharded *watched(const net *of, tutti_group *group, event_log *log) {
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.watch = watch;
    options.user = log;
    return shard(of, group, &options);
}

/* One step without an optimizer: what happens to the units. */
static void run_step(const net *of, tutti_world *world, int rank, event_log *log) {
    log->count = 0;
    CHECK(tt_backward(weighted_loss(of->root, rank, 0), NULL));
    CHECK(tt_wait_all(world)); /* nobody will read these gradients */
    tt_module_zero_grad(of->root);
}

static void end(tt_fully_sharded *sharded, const net *of) {
    tt_fully_sharded_release(sharded);
    tt_module_release(of->root);
}

/* ---- which units are gathered ahead ---- */

TEST_WORLD(units_that_are_listed_are_gathered_ahead_and_no_others, 2) {
    BEGIN;
    event_log log = { .count = 0 };
    net net = net_of(1);
    tt_fully_sharded *sharded = watched(&net, group, &log);
    CHECK(tt_fully_sharded_prefetch(sharded, TT_PASS_FORWARD, net.root, 2, net.units));
    CHECK(tt_fully_sharded_prefetch(sharded, TT_PASS_FORWARD, net.units[0], 0, NULL));
    CHECK(tt_fully_sharded_prefetch(sharded, TT_PASS_FORWARD, net.units[1], 2, net.units + 2));
    CHECK(tt_fully_sharded_prefetch(sharded, TT_PASS_BACKWARD, net.root, 2, net.units + 2));
    CHECK(tt_fully_sharded_prefetch(sharded, TT_PASS_BACKWARD, net.units[3], 0, NULL));
    for (int step = 0; step < 2; step++) { /* lists count from the first forward on, which learns the order */
        run_step(&net, world, rank, &log);
        if (step == 0)
            check_events(&log, "g4 g0 g1 f0 g2 g3 f1 f2 f3 g2 g3 r4 f4 r3 f3 g1 r2 f2 g0 r1 f1 r0 f0 ");
    }
    check_events(&log, "g4 g0 g1 f0 g2 g3 f1 f2 f3 g2 g3 r4 f4 r3 f3 g1 r2 f2 g0 r1 f1 r0 f0 ");
    CHECK(tt_fully_sharded_prefetch(sharded, TT_PASS_BACKWARD, net.root, 1, net.units)); /* another one */
    run_step(&net, world, rank, &log);
    check_events(&log, "g4 g0 g1 f0 g2 g3 f1 f2 f3 g0 r4 f4 g3 r3 f3 g2 g1 r2 f2 r1 f1 r0 f0 ");
    end(sharded, &net);
    END;
}

/* ---- functions other than forwards ---- */

/* What the layer of a unit gives, without its relu, and squared. */
static int squares(tt_module *unit, tt_tensor_list inputs, tt_tensor **outputs) {
    outputs[0] = tt_square(tt_module_call(tt_module_child(unit, "0"), inputs.at[0]));
    return 1;
}

static tt_tensor *loss_by_method(const net *of, tt_tensor *x) {
    tt_tensor_list seen = tt_module_call_method(of->units[0], squares, tt_tensors_of(1, &x));
    return seen.count == 1 ? tt_mean(tt_add(tt_module_call(of->root, x), seen.at[0])) : NULL;
}

TEST_WORLD(a_method_of_a_unit_gathers_it_and_its_gradients_are_reduced, 2) {
    BEGIN;
    event_log log = { .count = 0 };
    net ours = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = watched(&ours, group, &log);
    tt_optimizer *optimizer = tt_adamw_optimizer(ours.root, NULL), *reference = tt_adamw_optimizer(alone.root, NULL);
    tt_tensor *x = tt_add_scalar(tt_mul_scalar(tt_arange(0, 15, 1, TUTTI_F32, NULL), 0.1), -0.7);
    x = tt_reshape(x, tt_shape(3, 5));
    for (int step = 0; step < 3; step++) { /* the same on both ranks, whose average is exact */
        tt_scope inner = tt_scope_open();
        log.count = 0;
        CHECK(tt_backward(loss_by_method(&ours, x), NULL));
        CHECK(log.at[0].event == TT_SHARD_GATHER && log.at[0].unit == 0);
        CHECK(tt_optimizer_step(optimizer) && tt_backward(loss_by_method(&alone, x), NULL));
        CHECK(tt_optimizer_step(reference));
        tt_optimizer_zero_grad(optimizer);
        tt_optimizer_zero_grad(reference);
        check_whole(sharded, alone.root, 0);
        CHECK_OK(tt_scope_close(&inner));
    }
    CHECK_EQ(tt_module_call_method(ours.units[0], NULL, tt_tensors_of(1, &x)).count, 0);
    expect_error(TUTTI_ERROR_ARGUMENT, "method is NULL");
    end_pair(sharded, optimizer, reference, &ours, &alone);
    END;
}

/* ---- when units are freed ---- */

TEST_WORLD(units_stay_whole_behind_forward_and_backward_where_switches_say_so, 2) {
    BEGIN;
    event_log log = { .count = 0 };
    net net = net_of(1);
    tt_fully_sharded *sharded = watched(&net, group, &log);
    run_step(&net, world, rank, &log);
    CHECK(tt_fully_sharded_switch(sharded, net.units[1], TT_SWITCH_FREE_FORWARD, false));
    CHECK(tt_fully_sharded_switch(sharded, net.root, TT_SWITCH_FREE_FORWARD, true));
    run_step(&net, world, rank, &log);
    check_events(&log, "g4 g0 g1 f0 g2 g3 f2 f3 f4 g4 g3 r4 f4 g2 r3 f3 r2 f2 g0 r1 f1 r0 f0 ");
    CHECK(tt_fully_sharded_switch(sharded, NULL, TT_SWITCH_FREE_BACKWARD, false));
    run_step(&net, world, rank, &log);
    run_step(&net, world, rank, &log); /* shards are what they were */
    check_events(&log, "f0 f2 f3 f4 g4 g3 r4 g2 r3 r2 g0 r1 r0 ");
    CHECK(tt_fully_sharded_switch(sharded, NULL, TT_SWITCH_FREE_BACKWARD, true));
    run_step(&net, world, rank, &log);
    tt_fully_sharded_counts counts = TT_FULLY_SHARDED_COUNTS_INIT;
    CHECK(tt_fully_sharded_count(sharded, &counts));
    CHECK_EQ(counts.gathered, 0);
    end(sharded, &net);
    END;
}

/* Between backward and forward slots have shards, and a shard that was written to is gathered anew. */
static void train_whole(tutti_world *world, void *argument) {
    BEGIN;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    (void)argument;
    CHECK(tt_fully_sharded_switch(sharded, NULL, TT_SWITCH_FREE_BACKWARD, false));
    CHECK(tt_fully_sharded_switch(sharded, NULL, TT_SWITCH_FREE_FORWARD, false));
    tt_optimizer *optimizer = tt_adamw_optimizer(net.root, NULL), *reference = tt_adamw_optimizer(alone.root, NULL);
    tt_fully_sharded_counts before = TT_FULLY_SHARDED_COUNTS_INIT, after = TT_FULLY_SHARDED_COUNTS_INIT;
    for (int step = 0; step < 4; step++) {
        tt_scope inner = tt_scope_open();
        CHECK(tt_fully_sharded_count(sharded, &before));
        CHECK(tt_backward(weighted_loss(net.root, rank, step), NULL));
        CHECK(tt_size(tt_module_parameter(tt_module_child(net.units[2], "0"), "weight"), 0) < 10 || ranks == 1);
        CHECK(tt_fully_sharded_count(sharded, &after));
        CHECK_EQ(after.gathers - before.gathers, LAYERS + 1);
        average_alone(alone.root, weighted_loss, ranks, step);
        CHECK(tt_optimizer_step(optimizer) && tt_optimizer_step(reference));
        if (step % 2 == 0) /* gathers by itself */
            check_whole(sharded, alone.root, 0);
        tt_optimizer_zero_grad(optimizer);
        CHECK_OK(tt_scope_close(&inner));
    }
    end_pair(sharded, optimizer, reference, &net, &alone);
    END;
}

TEST(what_stays_whole_behind_a_backward_is_never_old) {
    test_threads(3, train_whole, NULL);
    test_processes_too(2, train_whole, NULL);
}

/* ---- what a backward does not read ---- */

TEST_WORLD(a_unit_whose_backward_reads_nothing_is_not_gathered_for_it, 2) {
    BEGIN;
    event_log log = { .count = 0 };
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.watch = watch;
    options.user = &log;
    int64_t letters[] = { 3, 0, 3, 7 };
    tt_tensor *index = tt_from(letters, tt_shape(4), TUTTI_I64, NULL);
    tt_module *layers[] = { tt_embedding_module(8, 6, TUTTI_F32), tt_linear_module(6, 4, false, TUTTI_F32) };
    tt_module *root = tt_sequential_module(2, layers);
    tt_fully_sharded *sharded = tt_fully_shard(root, 2, layers, group, &options);
    CHECK(tt_fully_sharded_switch(sharded, layers[0], TT_SWITCH_GATHER_BACKWARD, false));
    CHECK(tt_backward(tt_sum(tt_module_call(root, index)), NULL));
    check_events(&log, "g0 f0 g1 f1 g1 r1 f1 r0 ");
    tt_tensor *weight = tt_named(tt_fully_sharded_parameters(sharded), "1.weight");
    tt_tensor *row = tt_sum_dims(weight, tt_shape(0), false); /* the gradient of a row, once for each time it is read */
    tt_tensor *grad = tt_all_gather(tt_grad(tt_module_parameter(layers[0], "weight")), 0, group);
    CHECK(tt_allclose(tt_select(grad, 0, 3), tt_add(row, row), 1e-6, 1e-6));
    CHECK(tt_allclose(tt_select(grad, 0, 7), row, 1e-6, 1e-6));
    CHECK(tt_fully_sharded_switch(sharded, layers[1], TT_SWITCH_GATHER_BACKWARD, false));
    CHECK(!tt_backward(tt_sum(tt_module_call(root, index)), NULL));
    expect_error(TUTTI_ERROR_FREED, "");
    tt_fully_sharded_release(sharded);
    tt_module_release(root);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- replicas ---- */

TEST_WORLD(pieces_add_up_in_shards_until_replicas_average, 4) {
    BEGIN;
    tutti_mesh *mesh;
    tutti_group_form form;
    CHECK_OK(tutti_mesh_new(world, TUTTI_CPU, (int[]){ 2, 2 }, 2, NULL, &mesh));
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.replicas = tt_group(world, tutti_form_mesh_dim(&form, mesh, 0), NULL);
    tutti_group *shards = tt_group(world, tutti_form_mesh_dim(&form, mesh, 1), NULL);
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, shards, &options);
    tt_optimizer *optimizer = tt_sgd_optimizer(net.root, NULL), *reference = tt_sgd_optimizer(alone.root, NULL);
    for (int piece = 0; piece < 3; piece++) {
        CHECK(tt_fully_sharded_switch(sharded, NULL, TT_SWITCH_REPLICAS, piece == 2));
        CHECK(tt_backward(weighted_loss(net.root, rank, piece), NULL));
        CHECK((tt_grad(tt_module_parameters(net.root).at[0]) != NULL) == (piece == 2));
        for (int other = 0; other < ranks; other++)
            CHECK(tt_backward(tt_div_scalar(weighted_loss(alone.root, other, piece), ranks), NULL));
    }
    CHECK(tt_optimizer_step(optimizer) && tt_optimizer_step(reference));
    check_whole(sharded, alone.root, 1e-5);
    end_pair(sharded, optimizer, reference, &net, &alone);
    END;
    tutti_mesh_release(mesh);
}

/* ---- how they are sent ---- */

typedef struct sender {
    int gathers, reductions;
    bool fails;
} sender;

static void gather_by_hand(void *user, const tt_shard_transfer *transfer) {
    ((sender *)user)->gathers++;
    for (size_t i = 0; i < transfer->parts.count; i++)
        tt_copy_(transfer->wholes.at[i], tt_all_gather(transfer->parts.at[i], 0, transfer->group));
}

static void reduce_by_hand(void *user, const tt_shard_transfer *transfer) {
    sender *one = user;
    int ranks = tutti_group_size(transfer->group), rank = tutti_group_rank(transfer->group);
    one->reductions++;
    CHECK(transfer->divisor == 0 && transfer->parts.count == transfer->wholes.count);
    for (size_t i = 0; i < transfer->parts.count; i++) {
        int64_t elements = tt_numel(transfer->parts.at[i]);
        CHECK_EQ(tt_numel(transfer->wholes.at[i]), ranks * elements);
        tt_tensor *sum = tt_all_reduce(transfer->wholes.at[i], TUTTI_AVG, transfer->group);
        tt_copy_(transfer->parts.at[i], tt_narrow(sum, 0, rank * elements, elements));
    }
    if (one->fails) /* a tensor that does not exist */
        tt_copy_(transfer->parts.at[0], NULL);
}

TEST_WORLD(a_program_may_gather_and_reduce_by_itself, 3) {
    BEGIN;
    sender own = { .gathers = 0 };
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.gather = gather_by_hand;
    options.reduce = reduce_by_hand;
    options.user = &own;
    net net = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, &options);
    tt_optimizer *optimizer = tt_sgd_optimizer(net.root, NULL), *reference = tt_sgd_optimizer(alone.root, NULL);
    for (int step = 0; step < 3; step++) {
        CHECK(tt_backward(weighted_loss(net.root, rank, step), NULL));
        average_alone(alone.root, weighted_loss, ranks, step);
        CHECK(tt_optimizer_step(optimizer) && tt_optimizer_step(reference));
        tt_optimizer_zero_grad(optimizer);
    }
    CHECK(own.gathers == 3 * (2 * LAYERS + 1) && own.reductions == 3 * (LAYERS + 1));
    check_whole(sharded, alone.root, 0);
    own.fails = true;
    CHECK(!tt_backward(weighted_loss(net.root, rank, 0), NULL));
    expect_error(TUTTI_ERROR_ARGUMENT, "copy_");
    end_pair(sharded, optimizer, reference, &net, &alone);
    CHECK_OK(tt_scope_close(&scope));
}

/* ---- what cannot be ---- */

TEST_WORLD_THREADS(switches_and_lists_that_mean_nothing_are_refused, 1) {
    BEGIN;
    net net = net_of(1);
    tt_fully_sharded *sharded = shard(&net, group, NULL);
    tt_module *stranger = tt_module_child(net.units[0], "0"), *units[] = { net.units[0], stranger };
    CHECK(!tt_fully_sharded_switch(NULL, NULL, TT_SWITCH_FREE_FORWARD, true));
    expect_error(TUTTI_ERROR_ARGUMENT, "sharded is NULL");
    CHECK(!tt_fully_sharded_switch(sharded, NULL, (tt_shard_switch)5, true));
    expect_error(TUTTI_ERROR_ARGUMENT, "5 is no tt_shard_switch");
    CHECK(!tt_fully_sharded_switch(sharded, stranger, TT_SWITCH_FREE_FORWARD, true));
    expect_error(TUTTI_ERROR_NOT_FOUND, "is no unit");
    CHECK(!tt_fully_sharded_switch(sharded, NULL, TT_SWITCH_REPLICAS, false));
    expect_error(TUTTI_ERROR_STATE, "there are no replicas");
    CHECK(!tt_fully_sharded_prefetch(sharded, (tt_shard_pass)3, net.root, 0, NULL));
    expect_error(TUTTI_ERROR_ARGUMENT, "3 is no tt_shard_pass");
    CHECK(!tt_fully_sharded_prefetch(sharded, TT_PASS_FORWARD, NULL, 0, NULL));
    expect_error(TUTTI_ERROR_ARGUMENT, "unit is NULL");
    CHECK(!tt_fully_sharded_prefetch(sharded, TT_PASS_FORWARD, net.root, 1, NULL));
    expect_error(TUTTI_ERROR_ARGUMENT, "ahead is NULL");
    CHECK(!tt_fully_sharded_prefetch(sharded, TT_PASS_FORWARD, net.root, 2, units));
    expect_error(TUTTI_ERROR_NOT_FOUND, "is no unit");
    end(sharded, &net);
    END;
}
