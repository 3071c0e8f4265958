/* SPDX-License-Identifier: Apache-2.0
 *
 * Data parallel training: bits of the average, buckets and their order, parameters without a part, pieces of batches.
 */
#include <tutti/symmetric.h>

#include "support.h"

/* Weights of a seed, so that ranks can begin alike or not. */
static tt_module *net_of(int seed) {
    tt_seed((uint64_t)seed, 0);
    tt_module *layers[] = { tt_linear_module(5, 10, true, TUTTI_F32), tt_function_module("relu", tt_relu),
                            tt_linear_module(10, 7, true, TUTTI_F32), tt_linear_module(7, 3, false, TUTTI_F32) };
    return tt_sequential_module(4, layers);
}

static tt_tensor *loss_of(tt_module *net, int rank, int step) {
    return tt_mean(tt_square(tt_module_call(net, batch_of(rank, step))));
}

static void check_equal(tt_module *left, tt_module *right, bool gradients) {
    tt_named_list first = tt_module_parameters(left), second = tt_module_parameters(right);
    CHECK_EQ(first.count, second.count);
    for (size_t i = 0; i < first.count; i++) {
        CHECK(tt_equal(first.at[i], second.at[i]));
        if (gradients)
            CHECK(tt_equal(tt_grad(first.at[i]), tt_grad(second.at[i])));
    }
}

static void train_like_one_rank(tutti_world *world, void *argument) {
    BEGIN;
    const tt_data_parallel_options *options = argument;
    tt_module *net = net_of(1), *alone = net_of(1);
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, options);
    tt_data_parallel_counts first = TT_DATA_PARALLEL_COUNTS_INIT, counts = TT_DATA_PARALLEL_COUNTS_INIT;
    CHECK(tt_data_parallel_count(parallel, &first));
    tt_optimizer *optimizer = tt_adamw_optimizer(net, NULL), *reference = tt_adamw_optimizer(alone, NULL);
    for (int step = 0; step < 5; step++) {
        tt_scope inner = tt_scope_open();
        CHECK(tt_backward(loss_of(net, rank, step), NULL));
        average_alone(alone, loss_of, ranks, step);
        check_equal(net, alone, true);
        tt_optimizer_step(optimizer);
        tt_optimizer_step(reference);
        check_equal(net, alone, false);
        tt_optimizer_zero_grad(optimizer);
        CHECK_OK(tt_scope_close(&inner));
    }
    CHECK(tt_data_parallel_count(parallel, &counts));
    CHECK_EQ(counts.backwards, 5);
    CHECK_EQ(counts.reductions, first.buckets + 4 * counts.buckets); /* they are made anew after the first backward */
    CHECK_EQ(counts.early, counts.reductions - 5); /* all but the last begin while gradients are still to come */
    tt_data_parallel_release(parallel);
    tt_optimizer_release(optimizer);
    tt_optimizer_release(reference);
    tt_module_release(net);
    tt_module_release(alone);
    END;
}

TEST(the_average_has_the_bits_of_one_rank_that_adds_in_order) {
    for (int ranks = 1; ranks <= 4; ranks++)
        test_threads(ranks, train_like_one_rank, NULL);
}

TEST(the_average_has_those_bits_as_processes) {
    test_processes(2, train_like_one_rank, NULL);
}

TEST(the_average_has_those_bits_in_many_buckets) {
    tt_data_parallel_options small = TT_DATA_PARALLEL_OPTIONS_INIT;
    small.bucket_bytes = small.first_bucket_bytes = 300;
    test_threads(3, train_like_one_rank, &small);
    test_processes_too(4, train_like_one_rank, &small);
}

TEST_WORLD(weights_and_buffers_become_those_of_rank_0, 3) {
    BEGIN;
    tt_module *net = net_of(10 + rank), *first = net_of(10);
    CHECK(tt_module_set_buffer(net, "mean", tt_full(tt_shape(3), rank + 1, TUTTI_F32, NULL)));
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, NULL);
    check_equal(net, first, false);
    CHECK(tt_equal(tt_module_buffer(net, "mean"), tt_ones(tt_shape(3), TUTTI_F32, NULL)));
    tt_fill_(tt_module_buffer(net, "mean"), 5 + rank);
    tt_module_call(net, batch_of(rank, 0));
    CHECK(tt_equal(tt_module_buffer(net, "mean"), tt_full(tt_shape(3), 5, TUTTI_F32, NULL)));
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    tt_module_release(first);
    END;
}

TEST_WORLD_THREADS(buffers_may_stay_each_rank_s_own, 2) {
    BEGIN;
    tt_data_parallel_options options = TT_DATA_PARALLEL_OPTIONS_INIT;
    options.own_buffers = true;
    tt_module *net = net_of(1);
    CHECK(tt_module_set_buffer(net, "mean", tt_zeros(tt_shape(3), TUTTI_F32, NULL)));
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, &options);
    tt_fill_(tt_module_buffer(net, "mean"), 5 + rank);
    tt_module_call(net, batch_of(rank, 0));
    CHECK(tt_equal(tt_module_buffer(net, "mean"), tt_full(tt_shape(3), 5 + rank, TUTTI_F32, NULL)));
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    END;
}

TEST_WORLD_THREADS(ranks_with_other_parameters_are_told_on_all, 3) {
    BEGIN;
    tt_module *net = tt_linear_module(3, rank == 1 ? 5 : 4, true, TUTTI_F32);
    CHECK(tt_data_parallel_new(net, group, NULL) == NULL);
    expect_error(TUTTI_ERROR_MISMATCH,
                 "parameter 0 has another name, shape or dtype on rank 1 than on rank 0; here it is \"weight\"");
    tt_module_release(net);
    net = tt_linear_module(3, 4, rank != 2, TUTTI_F32);
    CHECK(tt_data_parallel_new(net, group, NULL) == NULL);
    expect_error(TUTTI_ERROR_MISMATCH, "rank 0 has 2 parameters and rank 2 has 1");
    tt_module_release(net);
    END;
}

/* ---- buckets ---- */

typedef struct order_log {
    int count, buckets[64];
    int64_t elements[64];
} order_log;

static void log_and_average(void *user, const tt_bucket *bucket) {
    order_log *log = user;
    log->buckets[log->count] = bucket->index;
    log->elements[log->count++] = tt_numel(bucket->gradients.at[0]);
    tt_bucket_average(NULL, bucket);
}

/* F12, with the three that are marked so below. */
TEST_WORLD(buckets_are_reduced_in_one_order_and_follow_the_backward, 2) {
    BEGIN;
    order_log log = { .count = 0 };
    tt_data_parallel_options options = TT_DATA_PARALLEL_OPTIONS_INIT;
    options.bucket_bytes = options.first_bucket_bytes = 1; /* each parameter is a bucket of its own */
    options.reduce = log_and_average;
    options.user = &log;
    tt_module *net = net_of(1);
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, &options);
    for (int step = 0; step < 2; step++) {
        tt_backward(loss_of(net, rank, step), NULL);
        tt_module_zero_grad(net);
    }
    CHECK_EQ(log.count, 10);
    for (int i = 0; i < 10; i++)
        CHECK_EQ(log.buckets[i], i % 5);
    /* First in the reverse order of the parameters; then as gradients come, in which a layer's bias is before its
     * weight, or behind it, but the last layer's is the first. */
    CHECK_EQ(log.elements[0], 21);
    CHECK_EQ(log.elements[1], 7);
    CHECK_EQ(log.elements[2], 70);
    CHECK_EQ(log.elements[5], 21);
    CHECK(log.elements[6] + log.elements[7] == 77 && log.elements[8] + log.elements[9] == 60);
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    END;
}

TEST_WORLD(buckets_hold_one_dtype_each, 2) {
    BEGIN;
    tt_module *layers[] = { tt_linear_module(4, 4, true, TUTTI_F32), tt_linear_module(4, 4, true, TUTTI_F64) };
    tt_module *net = tt_sequential_module(2, layers);
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, NULL);
    tt_tensor *x = tt_full(tt_shape(2, 4), rank + 1, TUTTI_F32, NULL);
    tt_tensor *hidden = tt_module_call(tt_module_child(net, "0"), x);
    tt_tensor *y = tt_module_call(tt_module_child(net, "1"), tt_to(hidden, TUTTI_F64));
    CHECK(tt_backward(tt_sum(y), NULL));
    CHECK(tt_dtype(tt_grad(tt_module_parameter(tt_module_child(net, "1"), "weight"))) == TUTTI_F64);
    tt_data_parallel_counts counts = TT_DATA_PARALLEL_COUNTS_INIT;
    CHECK(tt_data_parallel_count(parallel, &counts));
    CHECK_EQ(counts.buckets, 2);
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    END;
}

/* ---- batches in pieces ---- */

/* F12. */
TEST_WORLD(pieces_without_a_reduction_add_up, 2) {
    BEGIN;
    tt_module *net = net_of(1), *whole = net_of(1);
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, NULL);
    CHECK(tt_data_parallel_sync(parallel, false));
    for (int piece = 0; piece < 3; piece++) {
        if (piece == 2)
            CHECK(!tt_data_parallel_sync(parallel, true));
        CHECK(tt_backward(loss_of(net, rank, piece), NULL));
        for (int other = 0; other < ranks; other++)
            CHECK(tt_backward(loss_of(whole, other, piece), NULL));
    }
    tt_named_list own = tt_module_parameters(net), sums = tt_module_parameters(whole);
    for (size_t i = 0; i < own.count; i++)
        CHECK(tt_allclose(tt_grad(own.at[i]), tt_div_scalar(tt_grad(sums.at[i]), ranks), 1e-5, 1e-6));
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    tt_module_release(whole);
    END;
}

/* ---- parameters without a part ---- */

/* "both" is used by every rank, "first" by rank 0 alone, "none" by nobody. */
static int some_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    tt_tensor *y = tt_mul(inputs.at[0], tt_module_parameter(module, "both"));
    const int *rank = tt_module_user(module);
    outputs[0] = *rank == 0 ? tt_mul(y, tt_module_parameter(module, "first")) : y;
    return 1;
}

static tt_module *some_of(int *rank) {
    static const tt_module_type type = { sizeof type, "Some", some_forward, NULL };
    tt_module *module = tt_module_new(&type, rank);
    const char *names[] = { "both", "first", "none" };
    for (int i = 0; i < 3; i++)
        tt_module_set_parameter(module, names[i], tt_parameter(tt_full(tt_shape(2), 3, TUTTI_F32, NULL), true));
    return module;
}

static void use_some(tutti_world *world, void *argument) {
    BEGIN;
    tt_module *net = some_of(&rank);
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, argument);
    tt_tensor *kept = tt_full(tt_shape(2), 7, TUTTI_F32, NULL);
    for (int step = 0; step < 3; step++) {
        tt_tensor *none = tt_module_parameter(net, "none");
        tt_set_grad(none, step == 2 ? kept : NULL);
        CHECK(tt_backward(tt_sum(tt_module_call(net, tt_ones(tt_shape(2), TUTTI_F32, NULL))), NULL));
        /* Of rank 0: 3 each; of the others: 1 for "both". */
        tt_tensor *both = tt_full(tt_shape(2), (3.0 + (ranks - 1)) / ranks, TUTTI_F32, NULL);
        CHECK(tt_allclose(tt_grad(tt_module_parameter(net, "both")), both, 1e-6, 0));
        tt_tensor *first = tt_full(tt_shape(2), 3.0 / ranks, TUTTI_F32, NULL);
        CHECK(tt_allclose(tt_grad(tt_module_parameter(net, "first")), first, 1e-6, 0));
        CHECK(step < 2 ? tt_grad(none) == NULL : tt_equal(tt_grad(none), kept));
        tt_set_grad(tt_module_parameter(net, "both"), NULL);
        tt_set_grad(tt_module_parameter(net, "first"), NULL);
    }
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    END;
}

/* F12. */
TEST(parameters_without_a_part_are_found_when_asked_for) {
    tt_data_parallel_options options = TT_DATA_PARALLEL_OPTIONS_INIT;
    options.find_unused = true;
    test_threads(3, use_some, &options);
    test_processes_too(2, use_some, &options);
}

TEST(a_static_graph_learns_them_in_its_first_step) {
    tt_data_parallel_options options = TT_DATA_PARALLEL_OPTIONS_INIT;
    options.static_graph = true;
    test_threads(3, use_some, &options);
    test_processes_too(2, use_some, &options);
}

TEST_WORLD_THREADS(a_parameter_without_a_gradient_is_an_error_that_names_it, 1) {
    BEGIN;
    tt_module *net = some_of(&rank);
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, NULL);
    CHECK(!tt_backward(tt_sum(tt_module_call(net, tt_ones(tt_shape(2), TUTTI_F32, NULL))), NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_STATE);
    CHECK_MESSAGE("no gradient reached parameter \"none\" in this backward");
    CHECK_MESSAGE("set find_unused");
    tt_error_clear();
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    END;
}

/* A rank that uses nothing runs no backward over parameters, and takes part all the same. */
static int nothing_forward(tt_module *module, tt_tensor_list inputs, tt_tensor **outputs) {
    const int *rank = tt_module_user(module);
    outputs[0] = *rank == 0 ? tt_mul(inputs.at[0], tt_module_parameter(module, "weight")) : inputs.at[0];
    return 1;
}

TEST_WORLD(a_rank_that_uses_nothing_takes_part, 2) {
    BEGIN;
    static const tt_module_type type = { sizeof type, "Nothing", nothing_forward, NULL };
    tt_module *net = tt_module_new(&type, &rank);
    tt_module_set_parameter(net, "weight", tt_parameter(tt_ones(tt_shape(2), TUTTI_F32, NULL), true));
    tt_data_parallel_options options = TT_DATA_PARALLEL_OPTIONS_INIT;
    options.find_unused = true;
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, &options);
    tt_tensor *y = tt_module_call(net, tt_full(tt_shape(2), 4, TUTTI_F32, NULL));
    if (rank == 0)
        CHECK(tt_backward(tt_sum(y), NULL));
    CHECK(tt_equal(tt_grad(tt_module_parameter(net, "weight")), tt_full(tt_shape(2), 2, TUTTI_F32, NULL)));
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    END;
}

/* ---- misuse ---- */

static tt_tensor *fail_once(const tt_hook_context *context, tt_tensor *grad) {
    int *failures = context->user;
    return (*failures)++ == 0 ? tt_add(grad, tt_ones(tt_shape(99), TUTTI_F32, NULL)) : NULL;
}

TEST_WORLD_THREADS(after_a_backward_that_failed_the_next_one_is_whole, 1) {
    BEGIN;
    int failures = 0;
    tt_module *net = net_of(1);
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, NULL);
    tt_tensor *weight = tt_module_parameter(tt_module_child(net, "0"), "weight");
    CHECK(tt_hook_tensor(weight, fail_once, &failures, NULL, NULL));
    CHECK(!tt_backward(loss_of(net, 0, 0), NULL));
    tt_error_clear();
    tt_module_zero_grad(net);
    CHECK(tt_backward(loss_of(net, 0, 0), NULL));
    tt_module *alone = net_of(1);
    CHECK(tt_backward(loss_of(alone, 0, 0), NULL));
    check_equal(net, alone, true);
    tt_module_release(alone);
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    END;
}

/* F12: the only way to a gradient that is complete twice. What the backward inside leaves undone the outer one tells.
 */
static tt_tensor *go_back_inside(const tt_hook_context *context, tt_tensor *grad) {
    (void)grad;
    bool recording = tt_grad_mode(true);
    tt_backward(loss_of(context->user, 0, 1), NULL);
    tt_grad_mode(recording);
    return NULL;
}

TEST_WORLD_THREADS(a_gradient_that_is_ready_twice_in_one_backward_is_told, 2) {
    BEGIN;
    tt_module *net = net_of(1);
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, NULL);
    tt_tensor *hidden = tt_module_call(tt_module_child(net, "0"), batch_of(rank, 0));
    CHECK(tt_hook_tensor(hidden, go_back_inside, net, NULL, NULL)); /* the last layers have their gradients by then */
    tt_tensor *y = tt_module_call(tt_module_child(net, "3"), tt_module_call(tt_module_child(net, "2"), hidden));
    CHECK(!tt_backward(tt_sum(y), NULL));
    expect_error(TUTTI_ERROR_STATE, "got its gradient twice in one backward");
    tt_module_zero_grad(net);
    CHECK(tt_backward(loss_of(net, rank, 2), NULL)); /* and the next one is whole again */
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    CHECK(tt_wait_all(world));
    END;
}

TEST_WORLD_THREADS(a_backward_that_is_to_be_differentiated_is_refused, 1) {
    BEGIN;
    tt_module *net = net_of(1);
    tt_data_parallel *parallel = tt_data_parallel_new(net, group, NULL);
    tt_tensor *loss = loss_of(net, 0, 0);
    tt_backward_options options = TT_BACKWARD_OPTIONS_INIT;
    options.create_graph = true;
    CHECK(!tt_backward_from(tt_tensors(loss), (tt_tensor_list){ 0, NULL }, &options));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_UNSUPPORTED);
    tt_error_clear();
    tt_module_zero_grad(net);
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    END;
}

TEST_WORLD_THREADS(a_module_is_made_data_parallel_once, 2) {
    BEGIN;
    tt_module *inner = tt_linear_module(3, 2, true, TUTTI_F32), *outer = tt_sequential_module(1, &inner);
    tt_data_parallel *parallel = tt_data_parallel_new(inner, group, NULL);
    CHECK(parallel != NULL);
    CHECK_OK(tutti_barrier(group, NULL)); /* the error below ends the group, also for a rank that is still in there */
    CHECK(tt_data_parallel_new(outer, group, NULL) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_STATE);
    tt_error_clear();
    tt_data_parallel_release(parallel);
    tt_module_release(outer);
    CHECK_OK(tt_scope_close(&scope));
}

TEST_WORLD_THREADS(bad_arguments_are_refused, 1) {
    BEGIN;
    tt_module *net = net_of(1);
    tt_data_parallel_options options = TT_DATA_PARALLEL_OPTIONS_INIT;
    options.bucket_bytes = -1;
    CHECK(tt_data_parallel_new(NULL, group, NULL) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    CHECK(tt_data_parallel_new(net, NULL, NULL) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    CHECK(tt_data_parallel_new(net, group, &options) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "bucket_bytes is -1");
    options.bucket_bytes = 0;
    options.find_unused = options.static_graph = true;
    CHECK(tt_data_parallel_new(net, group, &options) == NULL);
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    CHECK(!tt_data_parallel_sync(NULL, true));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    CHECK(!tt_data_parallel_count(NULL, NULL));
    CHECK_EQ(tt_error_show(), TUTTI_ERROR_ARGUMENT);
    tt_error_clear();
    tt_data_parallel_release(NULL);
    tt_module_release(net);
    END;
}

static tutti_status train_once(void *argument) {
    (void)argument;
    tutti_world *world;
    tutti_status status = tutti_world_open(NULL, &world);
    if (status != TUTTI_OK)
        return status;
    tt_scope scope = tt_scope_open();
    tt_module *net = net_of(1);
    tt_data_parallel *parallel = tt_data_parallel_new(net, tutti_world_group(world), NULL);
    tt_backward(loss_of(net, 0, 0), NULL);
    tt_backward(loss_of(net, 0, 1), NULL);
    tt_data_parallel_release(parallel);
    tt_module_release(net);
    status = tt_scope_close(&scope);
    if (status != TUTTI_OK && !tt_wait_all(world)) /* what had begun before the failure */
        tt_error_clear();
    tutti_status closed = tutti_world_close(world);
    return status != TUTTI_OK ? status : closed;
}

TEST(an_allocation_that_fails_leaves_nothing_behind) {
    CHECK_OK(train_once(NULL));
    if (test_on_device()) /* the stand-in for a driver allocates too */
        SKIP("on the CPU alone");
    test_fail_each("malloc,calloc,realloc", train_once, NULL);
}
