/* SPDX-License-Identifier: Apache-2.0
 *
 * Fully sharded training of ranks on several hosts: it has the bits of one rank, and after a death goes on from a
 * checkpoint, since nobody has the memory of another host mapped.
 */
#include "../collective/on_hosts.h"
#include "layers.h"

#define STEPS 3

/* One step of all ranks, and of one rank that computes their batches. */
static void step_both(const net *ours, tt_optimizer *optimizer, const net *alone, tt_optimizer *reference,
                      tutti_group *group, int step) {
    tt_scope scope = tt_scope_open();
    CHECK(tt_backward(weighted_loss(ours->root, tutti_group_rank(group), step), NULL));
    average_alone(alone->root, weighted_loss, tutti_group_size(group), step);
    CHECK(tt_optimizer_step(optimizer));
    CHECK(tt_optimizer_step(reference));
    tt_optimizer_zero_grad(optimizer);
    CHECK_OK(tt_scope_close(&scope));
}

static void train_with(tutti_group *group, const tt_fully_sharded_options *options, double tolerance) {
    tt_scope scope = tt_scope_open();
    net ours = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&ours, group, options);
    CHECK_OK(tt_error_pending());
    tt_optimizer *optimizer = tt_adamw_optimizer(ours.root, NULL), *reference = tt_adamw_optimizer(alone.root, NULL);
    CHECK(tt_fully_sharded_protect(sharded, optimizer));
    for (int step = 0; step < STEPS; step++) {
        step_both(&ours, optimizer, &alone, reference, group, step);
        check_whole(sharded, alone.root, tolerance);
    }
    end_pair(sharded, optimizer, reference, &ours, &alone);
    CHECK_OK(tt_scope_close(&scope));
}

static void train(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    train_with(group, NULL, 0);
    options.near_ranks = tutti_group_size(group) == 4 ? 2 : 0; /* the ranks of a host */
    options.divisor = tutti_group_size(group);
    train_with(group, &options, 1e-6);
    options.near_ranks = 0;
    options.divisor = 0;
    options.param_dtype = TUTTI_BF16; /* what is sent lies in a block of its own */
    options.reduce_dtype = options.output_dtype = TUTTI_F32;
    train_with(group, &options, 0.05);
}

TEST(training_across_hosts_has_the_bits_of_one_rank) {
    on_hosts(one_each, 2, train);
    on_hosts(two_and_two, 4, train);
}

/* ---- a death ---- */

static char folder[64];

/* A model of the rest of the ranks, read from the checkpoint, is what all had when it was written. */
static void go_on_from_the_checkpoint(tutti_group *rest, const net *alone, tt_optimizer *reference) {
    net anew = net_of(2);
    tt_fully_sharded *sharded = shard(&anew, rest, NULL);
    tt_optimizer *optimizer = tt_adamw_optimizer(anew.root, NULL);
    CHECK(tt_fully_sharded_load(sharded, optimizer, folder));
    check_whole(sharded, alone->root, 0);
    step_both(&anew, optimizer, alone, reference, rest, STEPS);
    check_whole(sharded, alone->root, 0);
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_module_release(anew.root);
}

static void lose_one(tutti_world *world) {
    tutti_group *group = tutti_world_group(world), *rest;
    tt_scope scope = tt_scope_open();
    net ours = net_of(1), alone = net_of(1);
    tt_fully_sharded *sharded = shard(&ours, group, NULL);
    tt_optimizer *optimizer = tt_adamw_optimizer(ours.root, NULL), *reference = tt_adamw_optimizer(alone.root, NULL);
    CHECK(tt_fully_sharded_protect(sharded, optimizer));
    for (int step = 0; step < STEPS; step++)
        step_both(&ours, optimizer, &alone, reference, group, step);
    CHECK(tt_fully_sharded_save(sharded, optimizer, folder));
    tutti_status status = tutti_barrier(group, NULL); /* all have saved */
    if (tutti_world_rank(world) == 3)
        kill(getpid(), SIGKILL);
    while (status == TUTTI_OK)
        status = tutti_barrier(group, NULL);
    CHECK_EQ(status, TUTTI_ERROR_DEAD);
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    CHECK(!tt_fully_sharded_regroup(sharded, rest));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("in memory of another host");
    CHECK_MESSAGE("load a checkpoint");
    tt_error_clear();
    go_on_from_the_checkpoint(rest, &alone, reference);
    end_pair(sharded, optimizer, reference, &ours, &alone);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(rest, NULL));
    tutti_group_release(rest);
}

TEST(after_a_death_ranks_of_several_hosts_go_on_from_a_checkpoint) {
    snprintf(folder, sizeof folder, "/tmp/tutti-test-parallel-hosts-%d", (int)getpid());
    on_hosts(two_and_two, 4, lose_one);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK_EQ(system(command), 0);
}
