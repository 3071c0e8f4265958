/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards in memory of the host, of units that a GPU computes with: they and their gradients lie in pinned memory, so
 * that nobody waits for copies; gradients that somebody keeps stay what they are; and a driver that fails in any one
 * call is told on all ranks.
 */
#include <tutti/streams.h>
#include <unistd.h>

#include "../failing.h"
#include "layers.h"

#define MINUTE ((int64_t)60 * 1000000000)

/* Made in memory of the host. */
static net net_at_home(void) {
    CHECK(tt_default_device_set(TUTTI_CPU));
    net made = net_of(1);
    CHECK(tt_default_device_set(test_device()));
    return made;
}

static tt_fully_sharded *offload(const net *of, tutti_group *group) {
    return shard(of, group, TUTTI_OPTIONS(tt_fully_sharded_options, .device = test_device()));
}

static tt_tensor *weight_of(const net *of, int unit) {
    return tt_module_parameter(tt_module_child(of->units[unit], "0"), "weight");
}

/* Copies that nobody waits for reach it. */
static void check_pinned(tt_tensor *x) {
    bool recording = tt_grad_mode(false);
    tt_tensor *there = tt_empty(tt_sizes(x), tt_dtype(x), TUTTI_OPTIONS(tt_options, .device = test_device()));
    CHECK_EQ(tt_device_of(x), TUTTI_CPU);
    CHECK(tt_copy_async_(there, tt_detach(x)) != NULL);
    CHECK(tt_equal(tt_to_device(there, TUTTI_CPU), x));
    tt_grad_mode(recording);
}

TEST_WORLD_THREADS(shards_and_gradients_lie_in_pinned_memory, 2) {
    if (!test_on_device())
        SKIP("this is the cpu");
    BEGIN;
    net net = net_at_home();
    tt_fully_sharded *sharded = offload(&net, group);
    CHECK(tt_backward(weighted_loss(net.root, rank, 7), NULL));
    for (int i = 0; i < LAYERS; i++) {
        check_pinned(weight_of(&net, i));
        check_pinned(tt_grad(weight_of(&net, i)));
    }
    tt_fully_sharded_release(sharded);
    tt_module_release(net.root);
    END;
}

TEST_WORLD_THREADS(gradients_that_somebody_keeps_are_not_written_again, 2) {
    if (!test_on_device())
        SKIP("this is the cpu");
    BEGIN;
    net net = net_at_home();
    tt_fully_sharded *sharded = offload(&net, group);
    CHECK(tt_backward(weighted_loss(net.root, rank, 1), NULL));
    tt_tensor *kept = tt_grad(weight_of(&net, 0)), *values = tt_clone(kept);
    const void *first = tt_data(kept), *place[3];
    for (int step = 0; step < 3; step++) {
        tt_scope inner = tt_scope_open();
        tt_module_zero_grad(net.root);
        CHECK(tt_backward(weighted_loss(net.root, rank, 2 + step), NULL));
        place[step] = tt_data(tt_grad(weight_of(&net, 0)));
        CHECK_OK(tt_scope_close(&inner));
    }
    CHECK(tt_equal(kept, values));
    CHECK(place[0] != first && place[1] == place[0] && place[2] == place[0]); /* pinned once more, and no more often */
    tt_fully_sharded_release(sharded);
    tt_module_release(net.root);
    END;
}

/* Plain operators, too: what they wrote is there when the unit computes. */
static void gather_by_hand(void *user, const tt_shard_transfer *transfer) {
    ++*(int *)user;
    for (size_t i = 0; i < transfer->parts.count; i++)
        tt_copy_(transfer->wholes.at[i], tt_all_gather(transfer->parts.at[i], 0, transfer->group));
}

TEST_WORLD_THREADS(a_program_may_gather_shards_of_the_host_by_itself, 2) {
    if (!test_on_device())
        SKIP("this is the cpu");
    BEGIN;
    int gathers = 0;
    net net = net_at_home(), other = net_at_home();
    tt_fully_sharded *sharded = offload(&net, group);
    tt_fully_sharded *by_hand = shard(
        &other, group,
        TUTTI_OPTIONS(tt_fully_sharded_options, .device = test_device(), .gather = gather_by_hand, .user = &gathers));
    CHECK(tt_backward(weighted_loss(net.root, rank, 3), NULL));
    CHECK(tt_backward(weighted_loss(other.root, rank, 3), NULL));
    for (int i = 0; i < LAYERS; i++)
        CHECK(tt_equal(tt_grad(weight_of(&net, i)), tt_grad(weight_of(&other, i))));
    CHECK(gathers > LAYERS);
    tt_fully_sharded_release(sharded);
    tt_fully_sharded_release(by_hand);
    tt_module_release(net.root);
    tt_module_release(other.root);
    END;
}

/* ---- a driver that fails ---- */

static tutti_status work(tutti_world *world, tutti_memory **memory, tutti_peers **peers) {
    (void)memory, (void)peers;
    tutti_group *group = tutti_world_group(world);
    tutti_status status = tutti_group_set_timeout(group, MINUTE);
    tt_scope scope = tt_scope_open();
    tt_options on_the_host = { .size = sizeof on_the_host, .device = TUTTI_CPU };
    tt_default_device_set(TUTTI_CPU);
    tt_module *layers[] = { tt_linear_module(4, 4, false, TUTTI_F32), tt_linear_module(4, 4, false, TUTTI_F32) };
    tt_module *root = tt_sequential_module(2, layers);
    tt_fully_sharded *sharded =
        tt_fully_shard(root, 2, layers, group, TUTTI_OPTIONS(tt_fully_sharded_options, .device = test_device()));
    tt_optimizer *optimizer = tt_sgd_optimizer(root, NULL);
    tt_tensor *x = tt_to_device(tt_ones(tt_shape(2, 4), TUTTI_F32, &on_the_host), test_device());
    if (tt_error_pending() == TUTTI_OK && tt_backward(tt_sum(tt_module_call(root, x)), NULL))
        tt_optimizer_step(optimizer);
    /* Without the driver: what is pending here is told to all. */
    tt_wait(tt_all_reduce(tt_ones(tt_shape(4), TUTTI_F32, &on_the_host), TUTTI_SUM, group));
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_module_release(root);
    tutti_status closed = tt_scope_close(&scope);
    if (!tt_wait_all(world)) /* for what a backward that failed has begun, too */
        tt_error_clear();
    return status != TUTTI_OK ? status : closed;
}

/* Memory that the tensors' allocator keeps for later is not left behind. */
static int trimmed(void) {
    tt_device_memory_trim(test_device());
    return 0;
}

TEST(shards_that_cannot_be_pinned_are_copied_all_the_same) {
    if (!test_on_device())
        SKIP("this is the cpu");
    if (access("/dev/nvidiactl", F_OK) == 0)
        SKIP("only a stand-in fails when it is told to");
    test_device(); /* opens the driver's stand-in */
    failing calls = failing_calls("libcuda.so.1", "standin");
    failing_attempt *one = failing_new(1);
    failing_threads threads = { &calls, work, one };
    for (int round = 0; round < 2; round++) { /* what the process does once is done in the first */
        *one = (failing_attempt){ .victim = 1, .nth = FAILING_NEVER };
        CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, failing_thread, &threads));
    }
    int nth = 1;
    while (nth <= one->calls && strcmp(one->names[nth - 1], "cuMemHostRegister") != 0)
        nth++;
    CHECK(nth <= one->calls);
    *one = (failing_attempt){ .victim = 1, .nth = nth };
    CHECK_OK(tutti_spawn(TUTTI_SPAWN_THREADS, 2, failing_thread, &threads));
    CHECK(one->failed);
    CHECK_TEXT(failing_name(one), "cuMemHostRegister");
    munmap(one, sizeof *one);
    trimmed();
    test_device_leave();
}

TEST_LIMIT(any_call_of_the_driver_may_fail_on_one_rank_while_shards_are_copied, 240) {
    if (!test_on_device())
        SKIP("this is the cpu");
    if (access("/dev/nvidiactl", F_OK) == 0)
        SKIP("only a stand-in fails when it is told to");
    failing calls = failing_calls("libcuda.so.1", "standin");
    /* OFFLOAD_FAILURES=1 has all fail; OFFLOAD_FAILURES=1:500 those from the 500th on. */
    const char *asked = getenv("OFFLOAD_FAILURES"), *from = asked != NULL ? strchr(asked, ':') : NULL;
    failing_choice choice = { from != NULL ? atoi(from + 1) : 1, asked != NULL ? atoi(asked) : 41, true };
    CHECK(failing_some(&calls, 1, work, trimmed, choice) > 0); /* of some it does not need the answer */
    test_device_leave();
}
