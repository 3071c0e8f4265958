/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank dies in the middle of fully sharded training: the survivors cut anew what all ranks had, and go on as if they
 * had begun with it.
 */
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "parallel/shard.h"
#include "support.h"

enum {
    LAYERS = 2,
    STEPS_BEFORE = 2,
    STEPS_AFTER = 2
};

/* What the ranks share. */
typedef struct board {
    int victim;     /* a rank of the group */
    bool in_step;   /* it dies in the middle of a step */
    bool in_reduce; /* it dies before it takes part in the last reduction of a backward */
    bool columns;   /* matrices are cut by columns, where as many ranks as there are first have equal parts */
    bool turned;    /* the group lists the ranks of the world from the last to the first */
    bool offloaded; /* shards are in memory of the host, and a GPU computes */
    atomic_int finished;
} board;

typedef struct net {
    tt_module *root, *units[LAYERS];
} net;

static net net_of(tutti_device device) {
    net made;
    tt_module *modules[LAYERS + 1];
    CHECK(tt_default_device_set(device));
    tt_seed(1, 0);
    for (int i = 0; i < LAYERS; i++)
        made.units[i] = modules[i] = tt_linear_module(i == 0 ? 5 : 10, 10, true, TUTTI_F32);
    modules[LAYERS] = tt_layer_norm_module(10, 1e-5, TUTTI_F32);
    made.root = tt_sequential_module(LAYERS + 1, modules);
    CHECK(tt_default_device_set(test_device()));
    return made;
}

/* One that is to be sharded, its parameters in memory of the host where they are offloaded; and one that each rank
 * trains alone. Both begin with the same values, though devices draw others. */
static void nets_of(bool offloaded, net *ours, net *alone) {
    *ours = net_of(offloaded ? TUTTI_CPU : test_device());
    *alone = net_of(test_device());
    bool recording = tt_grad_mode(false);
    tt_named_list from = tt_module_parameters(ours->root), to = tt_module_parameters(alone->root);
    for (size_t i = 0; offloaded && i < from.count; i++)
        tt_copy_(to.at[i], tt_to_device(from.at[i], test_device()));
    tt_grad_mode(recording);
}

/* One step of one rank that computes the batches of `ranks`. */
static void step_alone(tt_module *root, tt_optimizer *optimizer, int ranks, int step) {
    average_alone(root, weighted_loss, ranks, step);
    CHECK(tt_optimizer_step(optimizer));
    tt_optimizer_zero_grad(optimizer);
}

static void step_together(tt_module *root, tt_fully_sharded *sharded, tt_optimizer *optimizer, int rank, int step) {
    CHECK(tt_backward(weighted_loss(root, rank, step), NULL));
    CHECK(tt_fully_sharded_step(sharded));
    tt_optimizer_zero_grad(optimizer);
}

static void die(const board *shared, const tt_fully_sharded *sharded) {
    if (shared->in_step)
        tt_fill_(tt_narrow(sharded->marks, 0, 0, 1), 99);
    kill(getpid(), SIGKILL);
}

/* The victim's last reduction is the one that it does not begin. */
static _Thread_local bool doomed;
static void watch(void *user, tt_shard_event event, const char *unit) {
    (void)user;
    if (doomed && event == TT_SHARD_REDUCE && unit[0] == '0')
        kill(getpid(), SIGKILL);
}

static int by_columns(void *user, const char *name, const tt_tensor *parameter) {
    (void)user, (void)name;
    return tt_dim_count(parameter) == 2 && tt_size(parameter, 1) == 10;
}

/* Of all ranks, in the order of the world or the other way round. */
static tutti_group *group_of(tutti_world *world, bool turned) {
    int order[8], ranks = tutti_world_size(world);
    tutti_group *group = NULL;
    for (int i = 0; i < ranks; i++)
        order[i] = turned ? ranks - 1 - i : i;
    CHECK_OK(tutti_group_new(world, order, ranks, NULL, &group));
    return group;
}

static tutti_status survive(tutti_world *world, void *argument) {
    board *shared = argument;
    tutti_group *group = group_of(world, shared->turned), *rest;
    int rank = tutti_group_rank(group), ranks = tutti_group_size(group);
    tt_scope scope = tt_scope_open();
    net net, alone;
    nets_of(shared->offloaded, &net, &alone);
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    /* Products with turned weights may round otherwise, and so may another device's optimizer. */
    double tolerance = shared->columns || shared->offloaded ? 1e-4 : 0;
    options.watch = watch;
    options.dimension = shared->columns ? by_columns : NULL;
    options.device = shared->offloaded ? test_device() : 0;
    tt_fully_sharded *sharded = tt_fully_shard(net.root, LAYERS, net.units, group, &options);
    tt_optimizer *optimizer = tt_adamw_optimizer(net.root, NULL), *reference = tt_adamw_optimizer(alone.root, NULL);
    CHECK(tt_fully_sharded_protect(sharded, optimizer));
    for (int step = 0; step < STEPS_BEFORE; step++) {
        step_together(net.root, sharded, optimizer, rank, step);
        step_alone(alone.root, reference, ranks, step);
    }
    check_whole(sharded, alone.root, tolerance);
    CHECK_OK(tutti_barrier(group, NULL));
    doomed = rank == shared->victim;
    if (doomed && !shared->in_reduce)
        die(shared, sharded);
    tt_scope inner = tt_scope_open();
    if (tt_backward(weighted_loss(net.root, rank, STEPS_BEFORE), NULL)) /* its reductions may still be under way */
        CHECK(!tt_fully_sharded_step(sharded));
    CHECK_STATUS(tt_scope_close(&inner), TUTTI_ERROR_DEAD);
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    if (shared->in_step) {
        CHECK(!tt_fully_sharded_regroup(sharded, rest));
        expect_error(TUTTI_ERROR_STATE, "stopped in the middle of step 99: load a checkpoint");
    } else {
        CHECK(tt_fully_sharded_regroup(sharded, rest));
        CHECK_EQ(tt_pending_works(world), 0);
        check_whole(sharded, alone.root, tolerance);
        for (int step = STEPS_BEFORE; step < STEPS_BEFORE + STEPS_AFTER; step++) {
            step_together(net.root, sharded, optimizer, tutti_group_rank(rest), step);
            step_alone(alone.root, reference, ranks - 1, step);
            check_whole(sharded, alone.root, tolerance);
        }
    }
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_optimizer_release(reference);
    tt_module_release(net.root);
    tt_module_release(alone.root);
    if (shared->in_step && !tt_wait_all(world)) /* what the death ended; else regrouping has done it */
        tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(rest, NULL));
    tutti_group_release(rest);
    tutti_group_release(group);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

static void lose(int ranks, const board *how) {
    board *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    *shared = *how;
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, ranks, survive, shared), TUTTI_ERROR_DEAD);
    CHECK_EQ(atomic_load(&shared->finished), ranks - 1);
    munmap(shared, sizeof *shared);
}

TEST(survivors_go_on_with_what_the_dead_rank_had) {
    lose(3, &(board){ .victim = 0 });
    if (test_on_device()) /* slow, with a stand-in for it */
        return;
    lose(4, &(board){ .victim = 2 });
    lose(4, &(board){ .victim = 1, .turned = true });
    lose(2, &(board){ .victim = 1 });
}

TEST(a_death_while_gradients_are_reduced_lets_them_go_on_too) {
    lose(3, &(board){ .victim = 1, .in_reduce = true });
    if (!test_on_device())
        lose(4, &(board){ .victim = 3, .in_reduce = true });
}

/* 10 columns, first in five equal parts, then in 3, 3, 3 and 1. */
TEST(survivors_go_on_with_columns_too) {
    if (!test_on_device()) /* so many do not fit onto one GPU */
        lose(5, &(board){ .victim = 4, .columns = true });
    else
        lose(2, &(board){ .victim = 1, .columns = true });
}

TEST(survivors_go_on_with_shards_in_memory_of_the_host_too) {
    if (!test_on_device())
        SKIP("this is the cpu");
    lose(3, &(board){ .victim = 0, .offloaded = true });
    lose(2, &(board){ .victim = 1, .offloaded = true, .in_reduce = true });
}

TEST(a_death_in_the_middle_of_a_step_asks_for_a_checkpoint) {
    lose(3, &(board){ .victim = 1, .in_step = true });
}

/* ---- a death at any allocation ---- */

typedef struct places {
    int step, regroup; /* allocation at which rank 1 dies in its step, or rank 2 while it cuts anew; 0: at none */
    atomic_int spared; /* ranks that came through, having made fewer */
    atomic_int cut;    /* ranks other than rank 2 that are done with cutting anew */
    atomic_int finished, from_memory;
} places;

static const char allocations[] = "malloc,calloc,realloc,aligned_alloc";

/* Runs on until it dies, or is spared; then it dies behind so many others' last steps, which it shall not end. */
static void end_of_victim(places *shared, int others) {
    if (!test_fail_disarm())
        atomic_fetch_add(&shared->spared, 1);
    if (test_on_device())
        tt_synchronize(test_device()); /* what it had begun */
    while (atomic_load(&shared->cut) < others)
        usleep(1000);
    kill(getpid(), SIGKILL);
}

static bool go_on_from_memory(tt_fully_sharded *sharded, tutti_group *rest, places *shared) {
    bool dies = shared->regroup > 0 && tutti_world_rank(tutti_group_world(rest)) == 2;
    if (dies)
        test_kill_arm(allocations, shared->regroup);
    bool whole = tt_fully_sharded_regroup(sharded, rest);
    if (dies)
        end_of_victim(shared, tutti_group_size(rest) - 1);
    atomic_fetch_add(&shared->cut, 1);
    return whole;
}

static tutti_status die_somewhere(tutti_world *world, void *argument) {
    places *shared = argument;
    tutti_group *group = tutti_world_group(world), *rest, *last;
    int rank = tutti_world_rank(world), ranks = tutti_world_size(world);
    tt_scope scope = tt_scope_open();
    net net = net_of(test_device()), alone = net_of(test_device());
    tt_fully_sharded *sharded = tt_fully_shard(net.root, LAYERS, net.units, group, NULL);
    tt_optimizer *optimizer = tt_adamw_optimizer(net.root, NULL), *reference = tt_adamw_optimizer(alone.root, NULL);
    CHECK(tt_fully_sharded_protect(sharded, optimizer));
    step_together(net.root, sharded, optimizer, rank, 0);
    step_alone(alone.root, reference, ranks, 0);
    CHECK(tt_backward(weighted_loss(net.root, rank, 1), NULL));
    for (size_t i = 0; i < tt_module_parameters(net.root).count; i++)
        CHECK(test_settle(tt_grad(tt_module_parameters(net.root).at[i])) != NULL);
    CHECK_OK(tutti_barrier(group, NULL)); /* all have their gradients: a death takes nobody's step away */
    if (rank == 1 && shared->step > 0)
        test_kill_arm(allocations, shared->step);
    CHECK(tt_fully_sharded_step(sharded));
    if (rank == 1)
        end_of_victim(shared, 0);
    step_alone(alone.root, reference, ranks, 1);
    CHECK_OK(tutti_group_shrink(group, NULL, &rest));
    bool whole = go_on_from_memory(sharded, rest, shared);
    tutti_status status = tt_error_show();
    CHECK(whole || status == TUTTI_ERROR_STATE || status == TUTTI_ERROR_DEAD);
    tt_error_clear();
    CHECK_OK(tutti_group_shrink(rest, NULL, &last));
    if (shared->regroup > 0) { /* the other one has died since */
        whole = tt_fully_sharded_regroup(sharded, last);
        if (!whole)
            CHECK_STATUS(tt_error_show(), TUTTI_ERROR_STATE);
        tt_error_clear();
    }
    if (whole)
        check_whole(sharded, alone.root, 0);
    CHECK_EQ(tt_item(tt_all_reduce(tt_full(tt_shape(), whole, TUTTI_F32, NULL), TUTTI_SUM, last)),
             whole ? tutti_group_size(last) : 0);
    atomic_fetch_add(&shared->from_memory, whole);
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_optimizer_release(reference);
    tt_module_release(net.root);
    tt_module_release(alone.root);
    if (!tt_wait_all(world)) /* what deaths ended */
        tt_error_clear();
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(last, NULL));
    tutti_group_release(rest);
    tutti_group_release(last);
    atomic_fetch_add(&shared->finished, 1);
    return TUTTI_OK;
}

/* Whether the death came where it was to come. */
static bool die_at(int step, int regroup) {
    places *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    shared->step = step;
    shared->regroup = regroup;
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, 4, die_somewhere, shared), TUTTI_ERROR_DEAD);
    CHECK_EQ(atomic_load(&shared->finished), regroup > 0 ? 2 : 3);
    bool died = atomic_load(&shared->spared) == (regroup > 0 ? 1 : 0);
    /* Who had finished its step leaves everything behind; and nothing is lost where parts are made anew. */
    if (!died || regroup > 0)
        CHECK_EQ(atomic_load(&shared->from_memory), regroup > 0 ? 2 : 3);
    munmap(shared, sizeof *shared);
    return died;
}

TEST_LIMIT(wherever_in_a_step_a_rank_dies_the_others_have_all_or_are_told, 300) {
    int deaths = 0, apart = test_sanitized() ? 7 : test_on_device() ? 20 : 2;
    while (die_at(1 + deaths * apart, 0))
        deaths++;
    CHECK(deaths > 0);
}

TEST_LIMIT(wherever_another_dies_while_they_cut_anew_nothing_is_lost, 300) {
    int deaths = 0, apart = test_sanitized() ? 400 : test_on_device() ? 1500 : 101;
    while (die_at(0, 1 + deaths * apart))
        deaths++;
    CHECK(deaths > 0);
}

/* Cuts anew over the same ranks; rank 1 has no memory for its n-th allocation. Whether it was whole, on all. */
static bool regroup_without_memory(tt_fully_sharded *sharded, tutti_world *world, long nth, bool *delivered) {
    tutti_group *group;
    bool fails = nth > 0 && tutti_world_rank(world) == 1;
    CHECK_OK(tutti_group_new(world, (int[]){ 0, 1, 2, 3 }, tutti_world_size(world), NULL, &group));
    if (fails)
        test_fail_arm_here(allocations, nth);
    bool whole = tt_fully_sharded_regroup(sharded, group);
    *delivered = fails && test_fail_disarm();
    CHECK(whole || tt_error_pending() != TUTTI_OK);
    tt_error_clear();
    tutti_group_release(group);
    tt_tensor *both = tt_from((double[]){ whole, *delivered }, tt_shape(2), TUTTI_F64,
                              TUTTI_OPTIONS(tt_options, .device = TUTTI_CPU));
    double sums[2] = { 0 };
    CHECK(tt_read(tt_all_reduce(both, TUTTI_SUM, tutti_world_group(world)), sums, TUTTI_F64, 2));
    CHECK_EQ(sums[0], whole ? tutti_world_size(world) : 0);
    *delivered = sums[1] > 0;
    return whole;
}

/* After an error they cut anew once more, or, with near ranks, go on as they were. */
static void train_without_memory(tutti_world *world, int near_ranks, bool offloaded) {
    int rank = tutti_world_rank(world), ranks = tutti_world_size(world), step = 0, refused = 0;
    int apart = test_sanitized() || test_on_device() ? 211 : 37;
    tt_scope scope = tt_scope_open();
    net net, alone;
    nets_of(offloaded, &net, &alone);
    tt_fully_sharded_options options = TT_FULLY_SHARDED_OPTIONS_INIT;
    options.near_ranks = near_ranks;
    options.device = offloaded ? test_device() : 0;
    tt_fully_sharded *sharded = tt_fully_shard(net.root, LAYERS, net.units, tutti_world_group(world), &options);
    tt_optimizer *optimizer = tt_adamw_optimizer(net.root, NULL), *reference = tt_adamw_optimizer(alone.root, NULL);
    CHECK(tt_fully_sharded_protect(sharded, optimizer));
    bool delivered = true, whole = false;
    for (long nth = 1; delivered && !(whole && near_ranks != 0); nth += apart) {
        step_together(net.root, sharded, optimizer, rank, step);
        step_alone(alone.root, reference, ranks, step++);
        bool again;
        whole = regroup_without_memory(sharded, world, nth, &delivered);
        refused += !whole;
        CHECK(whole || near_ranks != 0 || regroup_without_memory(sharded, world, 0, &again));
        check_whole(sharded, alone.root, offloaded ? 1e-4 : 0);
    }
    CHECK(refused > 0);
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_optimizer_release(reference);
    tt_module_release(net.root);
    tt_module_release(alone.root);
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD_THREADS(a_rank_without_memory_leaves_all_with_what_they_had, 3) {
    train_without_memory(world, 0, false);
}

TEST_WORLD_THREADS(a_rank_without_memory_leaves_near_ranks_near, 4) {
    train_without_memory(world, 2, false);
}

TEST_WORLD_THREADS(a_rank_without_memory_leaves_shards_in_memory_of_the_host, 3) {
    if (!test_on_device())
        SKIP("this is the cpu");
    train_without_memory(world, 0, true);
}

TEST_WORLD_THREADS(regrouping_is_refused_where_it_cannot_work, 1) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    net net = net_of(test_device());
    tt_fully_sharded *sharded = tt_fully_shard(net.root, LAYERS, net.units, group, NULL);
    CHECK(!tt_fully_sharded_step(sharded));
    expect_error(TUTTI_ERROR_STATE, "no optimizer is protected");
    CHECK(!tt_fully_sharded_regroup(sharded, NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    CHECK(!tt_fully_sharded_protect(sharded, NULL));
    tt_error_clear();
    tt_module *stranger = tt_linear_module(2, 2, true, TUTTI_F32);
    tt_optimizer *other = tt_sgd_optimizer(stranger, NULL);
    CHECK(!tt_fully_sharded_protect(sharded, other));
    expect_error(TUTTI_ERROR_ARGUMENT, "make it after tt_fully_shard");
    tt_optimizer_release(other);
    tt_module_release(stranger);
    tt_optimizer *optimizer = tt_sgd_optimizer(net.root, NULL);
    CHECK(tt_fully_sharded_protect(sharded, optimizer));
    CHECK(!tt_fully_sharded_protect(sharded, optimizer));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_STATE);
    tt_error_clear();
    tt_fully_sharded_release(sharded);
    tt_optimizer_release(optimizer);
    tt_module_release(net.root);
    CHECK_OK(tt_scope_close(&scope));
}
