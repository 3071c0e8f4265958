/* SPDX-License-Identifier: Apache-2.0
 *
 * Parallel training, compiled: modules that are data parallel or fully sharded inside compiled functions and compiled
 * backwards leave the bits that they leave in eager code.
 */
#include <tutti/tensors.h>
#include <tutti/tutti.h>

#include "../compile/quick.h"
#include "../harness.h"

enum {
    LAYERS = 3,
    STEPS = 4
};

typedef enum way {
    EAGER,
    WHOLE_STEP,       /* forward, backward and the optimizer in one compiled function */
    FORWARD_AND_BACK, /* the loss is compiled, with its gradients */
    BACKWARD_ALONE    /* the forward runs as it is, its backward is compiled */
} way;

typedef struct trained trained;

typedef struct kind {
    bool sharded;
    tt_data_parallel_options data;
    tt_fully_sharded_options shards;
    tt_compile_mode mode;
    int quiet_steps; /* at the beginning, in which gradients are not reduced and add up */
    bool offloaded;  /* shards stay in memory of the host */
    void (*change)(trained *one, int step);
} kind;

/* ---- what is trained ---- */

struct trained {
    tt_module *root, *units[LAYERS];
    tt_optimizer *optimizer;
    tt_data_parallel *data;
    tt_fully_sharded *shards;
    bool steps; /* the optimizer does, and gradients are cleared */
};

/* Layers of 10 rows, which 4 ranks cut into 3, 3, 3 and 1; a unit each, and a norm of the root's own. */
static void build(trained *made, const kind *of, tutti_group *group) {
    tt_module *modules[LAYERS + 1];
    tt_seed(3, 0);
    if (of->offloaded)
        CHECK(tt_default_device_set(TUTTI_CPU));
    for (int i = 0; i < LAYERS; i++) {
        tt_module *pair[] = { tt_linear_module(i == 0 ? 5 : 10, 10, true, TUTTI_F32),
                              tt_function_module("relu", tt_relu) };
        made->units[i] = modules[i] = tt_sequential_module(2, pair);
    }
    modules[LAYERS] = tt_layer_norm_module(10, 1e-5, TUTTI_F32);
    made->root = tt_sequential_module(LAYERS + 1, modules);
    CHECK(tt_default_device_set(test_device()));
    made->data = of->sharded ? NULL : tt_data_parallel_new(made->root, group, &of->data);
    made->shards = of->sharded ? tt_fully_shard(made->root, LAYERS, made->units, group, &of->shards) : NULL;
    made->optimizer = tt_adamw_optimizer(made->root, NULL);
    made->steps = true;
}

static void release(trained *one) {
    tt_data_parallel_release(one->data);
    tt_fully_sharded_release(one->shards);
    tt_optimizer_release(one->optimizer);
    tt_module_release(one->root);
}

static void synchronize(trained *one, bool on) {
    one->steps = on;
    if (one->data != NULL)
        tt_data_parallel_sync(one->data, on);
    else
        tt_fully_sharded_sync(one->shards, on);
}

static int loss_of(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    trained *one = user;
    tt_tensor *weights = tt_arange(0, 10, 1, TUTTI_F32, NULL);
    outputs[0] = tt_mean(tt_mul(tt_square(tt_module_call(one->root, inputs.at[0])), weights));
    return 1;
}

static void finish_step(trained *one) {
    if (!one->steps)
        return;
    tt_optimizer_step(one->optimizer);
    tt_optimizer_zero_grad(one->optimizer);
}

static int step_of(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    loss_of(inputs, outputs, user);
    tt_backward(outputs[0], NULL);
    finish_step(user);
    outputs[0] = tt_detach(outputs[0]);
    return 1;
}

static tt_tensor *train(trained *one, way how, tt_tensor *x, tt_compiled *fast, tt_backward_cache *cache) {
    tt_tensor_list inputs = tt_tensors(x);
    tt_tensor *loss = NULL;
    if (how == EAGER) {
        step_of(inputs, &loss, one);
        return loss;
    }
    if (how == BACKWARD_ALONE)
        loss_of(inputs, &loss, one);
    else
        loss = tt_compiled_call(fast, inputs).at[0];
    if (how == WHOLE_STEP)
        return loss;
    CHECK(how == FORWARD_AND_BACK || tt_backward_compiled_begin(cache));
    CHECK(tt_backward(loss, NULL));
    CHECK(how == FORWARD_AND_BACK || tt_backward_compiled_end());
    finish_step(one);
    return tt_detach(loss);
}

static tt_tensor *batch_of(tutti_group *group, int step) {
    tt_seed((uint64_t)(1000 + step), (uint32_t)tutti_group_rank(group));
    return tt_randn(tt_shape(4, 5), TUTTI_F32, NULL);
}

static void check_same(const trained *one, const trained *other) {
    tt_named_list left = tt_module_parameters(one->root), right = tt_module_parameters(other->root);
    CHECK_EQ(left.count, right.count);
    for (size_t i = 0; i < left.count; i++) {
        tt_tensor *first = tt_grad(left.at[i]), *second = tt_grad(right.at[i]);
        CHECK(tt_equal(left.at[i], right.at[i]));
        CHECK((first == NULL) == (second == NULL) && (first == NULL || tt_equal(first, second)));
    }
}

/* ---- the comparison ---- */

typedef struct pair {
    trained eager, compiled;
    tt_compiled *fast;
    tt_backward_cache *cache;
} pair;

static void begin(pair *both, tutti_group *group, const kind *of, way how) {
    build(&both->eager, of, group);
    build(&both->compiled, of, group);
    tt_compile_options options = { .size = sizeof options, .mode = of->mode, .full = true, .name = "step" };
    tt_backward_cache_options full = { .size = sizeof full, .full = true };
    CHECK(tt_compile(how == WHOLE_STEP ? step_of : loss_of, &both->compiled, &options, &both->fast));
    CHECK(tt_backward_cache_new(&full, &both->cache));
}

static void end(pair *both) {
    tt_compiled_release(&both->fast);
    tt_backward_cache_release(&both->cache);
    release(&both->eager);
    release(&both->compiled);
}

/* Where nothing changes from step to step there are no more captures than ways to begin: with gradients and without. */
static void check_counts(const pair *both, way how, int most) {
    tt_compiled_counts counts = TT_COMPILED_COUNTS_INIT;
    tt_backward_counts backwards = TT_BACKWARD_COUNTS_INIT;
    CHECK(tt_compiled_count(both->fast, &counts));
    CHECK(tt_backward_cache_count(both->cache, &backwards));
    CHECK_EQ(counts.eager + backwards.eager, 0);
    CHECK(how == BACKWARD_ALONE ? backwards.captures <= most && backwards.hits >= STEPS - most
                                : counts.captures <= most && counts.hits >= STEPS - most);
    if (both->compiled.shards == NULL)
        return;
    tt_fully_sharded_counts now = TT_FULLY_SHARDED_COUNTS_INIT;
    CHECK(tt_fully_sharded_count(both->compiled.shards, &now));
    CHECK_EQ(now.gathered, 0); /* after a backward nothing is */
    CHECK_EQ(now.gathered_bytes, 0);
}

static void compare_with_eager(tutti_world *world, const kind *of, way how) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    pair both;
    begin(&both, group, of, how);
    for (int step = 0; step < STEPS + of->quiet_steps; step++) {
        tt_scope inner = tt_scope_open();
        synchronize(&both.eager, step >= of->quiet_steps);
        synchronize(&both.compiled, step >= of->quiet_steps);
        if (of->change != NULL)
            of->change(&both.eager, step);
        if (of->change != NULL)
            of->change(&both.compiled, step);
        tt_tensor *x = batch_of(group, step);
        tt_tensor *expected = train(&both.eager, EAGER, x, NULL, NULL);
        tt_tensor *loss = train(&both.compiled, how, x, both.fast, both.cache);
        CHECK(tt_equal(expected, loss));
        check_same(&both.eager, &both.compiled);
        CHECK_OK(tt_scope_close(&inner));
    }
    if (of->change == NULL)
        check_counts(&both, how, of->quiet_steps > 0 ? 4 : 1);
    end(&both);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_EQ(tt_pending_works(world), 0);
    CHECK_OK(tutti_barrier(group, NULL));
}

static void compare_each_way(tutti_world *world, const kind *of) {
    compare_with_eager(world, of, WHOLE_STEP);
    compare_with_eager(world, of, FORWARD_AND_BACK);
    compare_with_eager(world, of, BACKWARD_ALONE);
}

static kind kind_of(bool sharded) {
    kind of = { .sharded = sharded };
    of.data = (tt_data_parallel_options)TT_DATA_PARALLEL_OPTIONS_INIT;
    of.shards = (tt_fully_sharded_options)TT_FULLY_SHARDED_OPTIONS_INIT;
    return of;
}

TEST_WORLD(data_parallel_modules_are_compiled_with_the_bits_of_eager_code_on_two_ranks, 2) {
    kind of = kind_of(false);
    compare_each_way(world, &of);
    of.data.bucket_bytes = of.data.first_bucket_bytes = 256; /* many of them */
    of.mode = TT_COMPILE_INTERPRET;
    compare_each_way(world, &of);
}

TEST_WORLD(data_parallel_modules_are_compiled_with_the_bits_of_eager_code_on_four_ranks, 4) {
    kind of = kind_of(false);
    of.data.bucket_bytes = of.data.first_bucket_bytes = 256;
    compare_each_way(world, &of);
}

/* F11. */
TEST_WORLD(fully_sharded_modules_are_compiled_with_the_bits_of_eager_code_on_two_ranks, 2) {
    kind of = kind_of(true);
    compare_each_way(world, &of);
    of.mode = TT_COMPILE_INTERPRET;
    compare_each_way(world, &of);
}

TEST_WORLD(fully_sharded_modules_are_compiled_with_the_bits_of_eager_code_on_four_ranks, 4) {
    kind of = kind_of(true);
    compare_each_way(world, &of);
}

TEST_WORLD_THREADS(units_may_be_kept_and_computed_with_in_another_dtype, 2) {
    kind of = kind_of(true);
    of.mode = TT_COMPILE_SPLIT;
    for (int i = 0; i < 6; i++) {
        of.shards.reshard = (tt_reshard)(i % 3);
        of.shards.no_prefetch = i % 2;
        of.shards.param_dtype = i < 3 ? 0 : TUTTI_BF16;
        of.shards.reduce_dtype = i < 3 ? 0 : TUTTI_F32;
        of.shards.divisor = i == 1 ? 3 : 0;
        compare_each_way(world, &of);
    }
}

static int by_columns(void *user, const char *name, const tt_tensor *parameter) {
    (void)user, (void)name;
    return tt_dim_count(parameter) == 2 && tt_size(parameter, 1) % 2 == 0;
}

TEST_WORLD_THREADS(units_that_are_cut_by_columns_are_compiled_too, 2) {
    kind of = kind_of(true);
    of.mode = TT_COMPILE_SPLIT;
    of.shards.dimension = by_columns;
    compare_each_way(world, &of);
}

TEST_WORLD_THREADS(units_that_stay_in_a_smaller_group_are_compiled_too, 4) {
    kind of = kind_of(true);
    of.mode = TT_COMPILE_SPLIT;
    of.shards.near_ranks = 2;
    compare_each_way(world, &of);
}

/* On a GPU: without one the host is where everything is. */
TEST_WORLD_THREADS(units_whose_shards_stay_in_memory_of_the_host_are_compiled_too, 2) {
    kind of = kind_of(true);
    of.mode = TT_COMPILE_SPLIT;
    of.offloaded = true;
    of.shards.device = test_device();
    compare_each_way(world, &of);
}

/* Something else in every step. */
static void turn_switches(trained *one, int step) {
    CHECK(tt_fully_sharded_switch(one->shards, one->units[1], TT_SWITCH_FREE_FORWARD, step != 1));
    CHECK(tt_fully_sharded_switch(one->shards, NULL, TT_SWITCH_FREE_BACKWARD, step != 2));
    CHECK(tt_fully_sharded_prefetch(one->shards, TT_PASS_FORWARD, one->root, (size_t)step % 3, one->units));
}

TEST_WORLD_THREADS(switches_between_steps_are_guarded, 2) {
    kind of = kind_of(true);
    of.mode = TT_COMPILE_SPLIT;
    of.change = turn_switches;
    compare_each_way(world, &of);
}

TEST_WORLD_THREADS(whether_gradients_are_reduced_is_guarded, 2) {
    for (int sharded = 0; sharded < 2; sharded++) {
        kind of = kind_of(sharded);
        of.quiet_steps = 3;
        of.mode = TT_COMPILE_SPLIT;
        compare_each_way(world, &of);
    }
}

/* ---- compiled and eager code in turns ---- */

static void take_turns(tutti_world *world, const kind *of) {
    static const way ways[] = { FORWARD_AND_BACK, EAGER, BACKWARD_ALONE, FORWARD_AND_BACK, BACKWARD_ALONE, EAGER };
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    pair both;
    begin(&both, group, of, FORWARD_AND_BACK);
    for (int step = 0; step < 6; step++) {
        tt_scope inner = tt_scope_open();
        tt_tensor *x = batch_of(group, step), *result = NULL;
        CHECK(tt_compiled_call(both.fast, tt_tensors(x)).count == 1); /* without a backward */
        if (step % 2 == 1)
            loss_of(tt_tensors(x), &result, &both.compiled);
        bool recording = tt_grad_mode(false);
        CHECK(tt_equal(tt_compiled_call(both.fast, tt_tensors(x)).at[0],
                       tt_compiled_call(both.fast, tt_tensors(x)).at[0]));
        tt_grad_mode(recording);
        tt_tensor *expected = train(&both.eager, EAGER, x, NULL, NULL);
        CHECK(tt_equal(expected, train(&both.compiled, ways[step], x, both.fast, both.cache)));
        check_same(&both.eager, &both.compiled);
        CHECK_OK(tt_scope_close(&inner));
    }
    end(&both);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD_THREADS(compiled_and_eager_calls_may_take_turns, 2) {
    kind data = kind_of(false), shards = kind_of(true);
    take_turns(world, &data);
    for (int i = 0; i < 3; i++) {
        shards.shards.reshard = (tt_reshard)i;
        take_turns(world, &shards);
    }
}

/* ---- what cannot be compiled ---- */

static int reading_loss(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    loss_of(inputs, outputs, user);
    if (tt_item(outputs[0]) < 0)
        tt_error_set(TUTTI_ERROR_STATE, "squares are not negative");
    return 1;
}

static int reading_step(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    trained *one = user;
    loss_of(inputs, outputs, user);
    tt_backward(outputs[0], NULL);
    tt_named_list parameters = tt_module_parameters(one->root);
    if (tt_item(tt_sum(tt_grad(parameters.at[0]))) != tt_item(outputs[0]))
        finish_step(one);
    outputs[0] = tt_detach(outputs[0]);
    return 1;
}

/* A capture that ends in the middle leaves modules as they were: eager code trains on. */
TEST_WORLD_THREADS(a_function_that_reads_elements_trains_as_it_is, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    for (int i = 0; i < 4; i++) {
        kind of = kind_of(i % 2);
        pair both;
        tt_compile_options options = { .size = sizeof options, .name = "reading" };
        begin(&both, group, &of, WHOLE_STEP);
        tt_compiled_release(&both.fast);
        CHECK(tt_compile(i < 2 ? reading_loss : reading_step, &both.compiled, &options, &both.fast));
        for (int step = 0; step < 3; step++) {
            tt_tensor *x = batch_of(group, step), *expected = train(&both.eager, EAGER, x, NULL, NULL);
            CHECK(tt_equal(expected, train(&both.compiled, i < 2 ? FORWARD_AND_BACK : WHOLE_STEP, x, both.fast, NULL)));
            check_same(&both.eager, &both.compiled);
        }
        tt_compiled_counts counts = TT_COMPILED_COUNTS_INIT;
        CHECK(tt_compiled_count(both.fast, &counts));
        CHECK_EQ(counts.eager, 3);
        CHECK(strstr(tt_compiled_reason(both.fast), "item") != NULL);
        end(&both);
    }
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

TEST_WORLD_THREADS(unused_parameters_are_looked_for_in_eager_code_alone, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    kind of = kind_of(false);
    pair both;
    of.data.find_unused = true;
    begin(&both, group, &of, WHOLE_STEP);
    tt_tensor *x = batch_of(group, 0);
    CHECK(tt_compiled_call(both.fast, tt_tensors(x)).count == 0);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_CAPTURE);
    CHECK_MESSAGE("find_unused looks at every step on the host");
    tt_error_clear();
    tt_tensor *expected = train(&both.eager, EAGER, x, NULL, NULL);
    CHECK(tt_equal(expected, train(&both.compiled, EAGER, x, NULL, NULL)));
    check_same(&both.eager, &both.compiled);
    end(&both);
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}

/* The first step runs as it is, since it learns; the others are compiled. */
TEST_WORLD_THREADS(a_static_graph_is_compiled_after_its_first_step, 2) {
    tutti_group *group = tutti_world_group(world);
    tt_scope scope = tt_scope_open();
    kind of = kind_of(false);
    of.data.static_graph = true;
    for (way how = WHOLE_STEP; how <= BACKWARD_ALONE; how++) {
        pair both;
        begin(&both, group, &of, how);
        tt_compiled_release(&both.fast);
        tt_backward_cache_release(&both.cache);
        CHECK(tt_compile(how == WHOLE_STEP ? step_of : loss_of, &both.compiled, NULL, &both.fast));
        CHECK(tt_backward_cache_new(NULL, &both.cache));
        for (int step = 0; step < 4; step++) {
            tt_tensor *x = batch_of(group, step), *expected = train(&both.eager, EAGER, x, NULL, NULL);
            CHECK(tt_equal(expected, train(&both.compiled, how, x, both.fast, both.cache)));
            check_same(&both.eager, &both.compiled);
        }
        tt_compiled_counts counts = TT_COMPILED_COUNTS_INIT;
        tt_backward_counts backwards = TT_BACKWARD_COUNTS_INIT;
        CHECK(tt_compiled_count(both.fast, &counts));
        CHECK(tt_backward_cache_count(both.cache, &backwards));
        CHECK_EQ(counts.eager, how == WHOLE_STEP);
        CHECK_EQ(backwards.eager, how == BACKWARD_ALONE);
        CHECK_EQ(how == BACKWARD_ALONE ? backwards.hits : counts.hits, how == FORWARD_AND_BACK ? 3 : 2);
        end(&both);
    }
    CHECK_OK(tt_scope_close(&scope));
    CHECK_OK(tutti_barrier(group, NULL));
}
