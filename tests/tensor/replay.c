/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps on a GPU that are noted once and run again: TEST_DEVICE=cuda.
 */
#include <dlfcn.h>

#include <tutti/functional.h>
#include <tutti/module.h>
#include <tutti/optimizer.h>
#include <tutti/symmetric.h>
#include <tutti/tensors.h>

#include "support.h"

/* A stream of the rank's own, current until the end. */
static void *own_stream(void) {
    if (test_device() == TUTTI_CPU)
        SKIP("replays are of GPUs");
    void *stream = tt_stream_new(test_device());
    CHECK(stream != NULL && tt_stream_set(test_device(), stream));
    return stream;
}

/* Elements: on a GPU enough for several blocks, and little where the processor stands in for one. */
static int64_t many(void) {
    return access("/dev/nvidiactl", F_OK) == 0 ? 100000 : 500;
}

static tt_tensor *step(tt_tensor *x, tt_tensor *weight) {
    return tt_gelu(tt_matmul(tt_add_scalar(x, 1), weight));
}

TEST(a_noted_step_runs_again_on_new_data) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream();
    tt_tensor *x = tt_ones(tt_shape(4, 8), TUTTI_F32, NULL), *weight = tt_full(tt_shape(8, 3), 0.25, TUTTI_F32, NULL);
    tt_tensor *once = tt_clone(step(x, weight));
    CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
    tt_tensor *y = step(x, weight);
    tt_replay *replay = tt_replay_end(test_device());
    CHECK(replay != NULL);
    for (int i = 0; i < 3; i++) {
        tt_fill_(x, i);
        CHECK(tt_replay_run(replay));
        tt_tensor *eager = step(x, weight); /* in memory of its own: the replay's is its */
        CHECK(tt_equal(y, eager) && tt_equal(y, once) == (i == 1));
    }
    tt_replay_release(replay);
    tt_tensor *kept = tt_add_scalar(y, 0); /* what was made inside lives on */
    CHECK(tt_equal(kept, y));
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), stream);
}

TEST(memory_that_a_replay_uses_is_not_given_out) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream();
    tt_tensor *x = tt_full(tt_shape(1000), 2, TUTTI_F32, NULL), *y = tt_zeros(tt_shape(1000), TUTTI_F32, NULL);
    CHECK(tt_replay_begin(test_device()));
    tt_scope inner = tt_scope_open();
    tt_copy_(y, tt_mul(tt_add_scalar(x, 1), tt_add_scalar(x, 2)));
    CHECK_OK(tt_scope_close(&inner)); /* the intermediates are released, and still the replay's */
    tt_replay *replay = tt_replay_end(test_device());
    CHECK(replay != NULL);
    tt_tensor *others[8];
    for (int i = 0; i < 8; i++)
        others[i] = tt_full(tt_shape(1000), 100 + i, TUTTI_F32, NULL);
    CHECK(tt_replay_run(replay) && all_are(y, 12));
    for (int i = 0; i < 8; i++)
        CHECK(all_are(others[i], 100 + i));
    tt_replay_release(replay);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), stream);
}

TEST(what_would_wait_inside_is_an_error_and_drops_what_was_noted) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream();
    tt_tensor *x = tt_ones(tt_shape(4), TUTTI_F32, NULL);
    CHECK(tt_replay_begin(test_device()));
    tt_item(tt_sum(x));
    CHECK(tt_replay_end(test_device()) == NULL);
    expect_error(TUTTI_ERROR_STATE, "captured");
    CHECK(tt_item(tt_sum(x)) == 4); /* the stream works again */
    CHECK(tt_replay_end(test_device()) == NULL);
    expect_error(TUTTI_ERROR_STATE, "not captured");
    CHECK(tt_stream_set(test_device(), NULL) && !tt_replay_begin(test_device()));
    expect_error(TUTTI_ERROR_STATE, "default stream");
    CHECK(!tt_replay_run(NULL));
    expect_error(TUTTI_ERROR_ARGUMENT, "NULL");
    tt_replay_release(NULL);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), stream);
}

TEST(of_two_steps_that_are_noted_at_once_the_later_one_ends_first) {
    tt_scope scope = tt_scope_open();
    void *outer = own_stream(), *inner = tt_stream_new(test_device());
    tt_tensor *x = tt_ones(tt_shape(4), TUTTI_F32, NULL);
    CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
    tt_tensor *y = tt_add_scalar(x, 1);
    CHECK(tt_stream_set(test_device(), inner) && tt_replay_begin(test_device()));
    tt_tensor *z = tt_add_scalar(x, 2);
    CHECK(tt_stream_set(test_device(), outer) && tt_replay_end(test_device()) == NULL);
    expect_error(TUTTI_ERROR_STATE, "end what was begun later first"); /* and both go on */
    CHECK(tt_stream_set(test_device(), inner));
    tt_replay *second = tt_replay_end(test_device());
    CHECK(tt_stream_set(test_device(), outer));
    tt_replay *first = tt_replay_end(test_device());
    CHECK(first != NULL && second != NULL);
    CHECK(tt_replay_run(first) && all_are(y, 2));
    CHECK(tt_stream_set(test_device(), inner) && tt_replay_run(second) && all_are(z, 3));
    CHECK(tt_stream_set(test_device(), outer));
    tt_replay_release(first);
    tt_replay_release(second);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), inner);
    tt_stream_release(test_device(), outer);
}

/* As a program does that gives up in the middle. */
TEST(a_stream_that_is_released_while_it_is_noted_leaves_nothing_to_the_next_one) {
    tt_scope scope = tt_scope_open();
    void *given_up = own_stream(), *stream;
    tt_tensor *x = tt_ones(tt_shape(33), TUTTI_F32, NULL), *noise;
    tt_seed(5, 1);
    noise = tt_randn(tt_shape(33), TUTTI_F32, NULL);
    tt_seed(5, 1);
    CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
    tt_add(x, tt_randn(tt_shape(33), TUTTI_F32, NULL));
    tt_stream_release(test_device(), given_up);
    CHECK(tt_equal(tt_randn(tt_shape(33), TUTTI_F32, NULL), noise)); /* nothing was drawn */
    stream = own_stream();                                           /* the stand-in gives the handle out again */
    CHECK(tt_item(tt_sum(x)) == 33);
    CHECK(tt_replay_begin(test_device()));
    tt_tensor *y = tt_add_scalar(x, 1);
    tt_replay *replay = tt_replay_end(test_device());
    CHECK(replay != NULL && tt_replay_run(replay) && all_are(y, 2));
    tt_replay_release(replay);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), stream);
}

/* ---- numbers of the host that change from run to run ---- */

static tt_tensor *draws(tt_tensor *x) {
    tt_tensor *noise = tt_randn(tt_shape(33), TUTTI_F32, NULL),
              *whole = tt_randint(0, 9, tt_shape(33), TUTTI_I64, NULL);
    return tt_add(tt_dropout(tt_add(x, noise), 0.25), tt_to(whole, TUTTI_F32));
}

TEST(a_replay_draws_the_numbers_that_calls_would) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream();
    tt_tensor *x = tt_ones(tt_shape(33), TUTTI_F32, NULL), *expected[4], *behind;
    tt_seed(5, 1);
    for (int i = 0; i < 4; i++)
        expected[i] = draws(x);
    behind = tt_rand(tt_shape(7), TUTTI_F32, NULL);
    tt_seed(5, 1);
    CHECK(tt_equal(draws(x), expected[0])); /* one call as it is */
    CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
    tt_tensor *y = draws(x);
    tt_replay *replay = tt_replay_end(test_device());
    CHECK(replay != NULL);
    for (int i = 1; i < 4; i++)
        CHECK(tt_replay_run(replay) && tt_equal(y, expected[i]));
    CHECK(
        tt_equal(tt_rand(tt_shape(7), TUTTI_F32, NULL), behind)); /* the generator is where calls would have left it */
    tt_replay_release(replay);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), stream);
}

TEST(a_step_that_seeds_draws_the_same_numbers_at_each_run) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream();
    tt_tensor *x = tt_ones(tt_shape(33), TUTTI_F32, NULL);
    tt_seed(3, 0);
    tt_tensor *expected = draws(x), *behind = draws(x);
    CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
    tt_seed(3, 0);
    tt_tensor *y = draws(x);
    tt_replay *replay = tt_replay_end(test_device());
    for (int i = 0; i < 3; i++) {
        tt_seed(77, 0);
        CHECK(tt_replay_run(replay) && tt_equal(y, expected) && tt_equal(draws(x), behind));
    }
    tt_replay_release(replay);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), stream);
}

/* A layer with its optimizer, and one step of it. */
typedef struct trained {
    tt_module *module;
    tt_optimizer *optimizer;
} trained;

static trained new_trained(bool adamw) {
    tt_seed(9, 0);
    tt_module *module = tt_linear_module(6, 4, true, TUTTI_F32);
    return (trained){ module,
                      adamw ? tt_adamw_optimizer(module, TUTTI_OPTIONS(tt_adamw, .learning_rate = 0.05))
                            : tt_sgd_optimizer(module, TUTTI_OPTIONS(tt_sgd, .learning_rate = 0.05, .momentum = 0.9)) };
}

static tt_tensor *train_once(trained one, tt_tensor *x) {
    tt_tensor *loss = tt_sum(tt_square(tt_dropout(tt_module_call(one.module, x), 0.25)));
    tt_backward(loss, NULL);
    tt_clip_grad_norm(tt_tensors(tt_module_parameter(one.module, "weight"), tt_module_parameter(one.module, "bias")), 2,
                      NULL);
    tt_optimizer_step(one.optimizer);
    tt_optimizer_zero_grad(one.optimizer);
    return tt_detach(loss);
}

static void compare_trained(bool adamw) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream();
    tt_tensor *x = tt_ones(tt_shape(3, 6), TUTTI_F32, NULL), *losses[6];
    trained called = new_trained(adamw), replayed = new_trained(adamw);
    tt_seed(4, 0);
    for (int i = 0; i < 6; i++) {
        tt_fill_(tt_optimizer_learning_rate(called.optimizer, 0), 0.05 / (i + 1));
        tt_fill_(x, i);
        losses[i] = train_once(called, x);
    }
    tt_seed(4, 0);
    tt_fill_(x, 0);
    train_once(replayed, x); /* once as it is, with the first rate */
    CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
    tt_tensor *loss = train_once(replayed, x);
    tt_replay *replay = tt_replay_end(test_device());
    CHECK_OK(tt_error_show());
    CHECK(replay != NULL && tt_item(tt_optimizer_steps(replayed.optimizer)) == 1); /* nothing has run */
    for (int i = 1; i < 6; i++) {
        tt_fill_(tt_optimizer_learning_rate(replayed.optimizer, 0), 0.05 / (i + 1));
        tt_fill_(x, i);
        CHECK(tt_replay_run(replay) && tt_equal(loss, losses[i]));
    }
    CHECK(tt_item(tt_optimizer_steps(replayed.optimizer)) == 6);
    static const char *const names[] = { "weight", "bias" };
    for (int i = 0; i < 2; i++)
        CHECK(tt_equal(tt_module_parameter(called.module, names[i]), tt_module_parameter(replayed.module, names[i])));
    tt_replay_release(replay);
    tt_optimizer_release(called.optimizer);
    tt_optimizer_release(replayed.optimizer);
    tt_module_release(called.module);
    tt_module_release(replayed.module);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), stream);
}

TEST(a_replayed_step_of_adamw_counts_and_takes_the_rate_of_the_time) {
    compare_trained(true);
}

TEST(a_replayed_step_with_momentum_takes_the_rate_of_the_time) {
    compare_trained(false);
}

TEST(a_replay_with_numbers_of_the_host_is_no_part_of_another) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream();
    tt_tensor *x = tt_ones(tt_shape(33), TUTTI_F32, NULL);
    draws(x);
    CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
    draws(x);
    tt_replay *replay = tt_replay_end(test_device());
    CHECK(replay != NULL && tt_replay_begin(test_device()));
    CHECK(!tt_replay_run(replay) && tt_replay_end(test_device()) == NULL);
    expect_error(TUTTI_ERROR_STATE, "part of another capture");
    CHECK(tt_replay_run(replay));
    tt_replay_release(replay);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), stream);
}

/* ---- the last run, and memory that goes behind it ---- */

/* So many that a run has not ended when the call returns, where streams are apart. */
static tt_replay *long_replay(void) {
    tt_tensor *x = tt_ones(tt_shape(1 << 19), TUTTI_F32, NULL);
    CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
    for (int i = 0; i < 16; i++)
        x = tt_add_scalar(x, 1);
    tt_replay *replay = tt_replay_end(test_device());
    CHECK(replay != NULL);
    return replay;
}

static void expect_idle(void) {
    tt_event *event = tt_event_record(test_device());
    CHECK(tt_event_done(event));
    tt_event_release(event);
}

/* Nothing tells then when it has ended, and its memory may go as soon as the call has returned. */
TEST(a_run_that_the_driver_fails_to_mark_is_over_when_the_call_returns) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream(), *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void (*fail)(int) = (void (*)(int))(uintptr_t)dlsym(library, "standin_fail_call");
    int (*left)(void) = (int (*)(void))(uintptr_t)dlsym(library, "standin_calls_left");
    if (fail == NULL || left == NULL)
        SKIP("only a stand-in fails when it is told to");
    tt_replay *replay = long_replay();
    int failures = 0;
    for (int nth = 1, delivered = 1; delivered; nth++) {
        fail(nth);
        bool ran = tt_replay_run(replay);
        delivered = left() == 0;
        fail(0);
        tt_error_clear();
        failures += !ran;
        if (!ran)
            expect_idle();
        CHECK(tt_synchronize(test_device()));
    }
    CHECK(failures > 1);
    tt_replay_release(replay);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), stream);
}

TEST(a_replay_that_became_part_of_another_is_released_behind_its_own_last_run) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream(), *other = tt_stream_new(test_device());
    tt_replay *replay = long_replay();
    CHECK(tt_replay_run(replay));
    CHECK(tt_stream_set(test_device(), other) && tt_replay_begin(test_device()));
    CHECK(tt_replay_run(replay));
    tt_replay *whole = tt_replay_end(test_device());
    CHECK(whole != NULL && tt_stream_set(test_device(), stream));
    tt_replay_release(whole);
    tt_replay_release(replay);
    expect_idle();
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), other);
    tt_stream_release(test_device(), stream);
}

/* The driver's own functions: another library captures with them. */
typedef struct driver {
    int (*begin)(void *stream, int mode);
    int (*end)(void *stream, void **graph);
    int (*instantiate)(void **runnable, void *graph, unsigned long long flags);
    int (*launch)(void *runnable, void *stream);
    int (*end_runnable)(void *runnable);
    int (*end_graph)(void *graph);
} driver;

static void *function_of(void *library, const char *name) {
    int (*get)(const char *, void **, int, uint64_t, int *) =
        (int (*)(const char *, void **, int, uint64_t, int *))(uintptr_t)dlsym(library, "cuGetProcAddress_v2");
    void *found = NULL;
    int status = 0;
    CHECK(get != NULL && get(name, &found, 12000, 0, &status) == 0 && found != NULL);
    return found;
}

static driver driver_of(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context;
    CHECK(library != NULL);
    driver found = { (int (*)(void *, int))(uintptr_t)function_of(library, "cuStreamBeginCapture"),
                     (int (*)(void *, void **))(uintptr_t)function_of(library, "cuStreamEndCapture"),
                     (int (*)(void **, void *, unsigned long long))(uintptr_t)function_of(
                         library, "cuGraphInstantiateWithFlags"),
                     (int (*)(void *, void *))(uintptr_t)function_of(library, "cuGraphLaunch"),
                     (int (*)(void *))(uintptr_t)function_of(library, "cuGraphExecDestroy"),
                     (int (*)(void *))(uintptr_t)function_of(library, "cuGraphDestroy") };
    int (*retain)(void **, int) = (int (*)(void **, int))(uintptr_t)function_of(library, "cuDevicePrimaryCtxRetain");
    int (*push)(void *) = (int (*)(void *))(uintptr_t)function_of(library, "cuCtxPushCurrent");
    CHECK(retain(&context, 0) == 0 && push(context) == 0);
    return found;
}

TEST(a_capture_that_others_began_has_memory_of_its_own) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream(), *graph, *runnable;
    driver driver = driver_of();
    tt_tensor *x = tt_full(tt_shape(4, 8), 1, TUTTI_F32, NULL), *weight = tt_full(tt_shape(8, 3), 1, TUTTI_F32, NULL);
    tt_tensor *others[8], *large = NULL;
    float host[32];
    for (int i = 0; i < 32; i++)
        host[i] = -1;
    tt_tensor *once = step(x, weight); /* what is made on first use */
    CHECK(tt_synchronize(test_device()));
    CHECK_EQ(driver.begin(stream, 0), 0); /* of the kind that forbids most: memory of the driver, to every thread */
    tt_scope inner = tt_scope_open();
    tt_tensor *y = tt_keep(step(x, weight));
    large = tt_keep(tt_mul_scalar(tt_full(tt_shape(12 << 20), 3, TUTTI_U8, NULL), 2)); /* nothing spare has its size */
    tt_scope reading = tt_scope_open();
    CHECK(!tt_read(x, host, TUTTI_F32, 32)); /* would wait: refused, and the capture goes on */
    CHECK_EQ(tt_scope_close(&reading), TUTTI_ERROR_STATE);
    tt_item(tt_sum(x)); /* likewise */
    CHECK_EQ(tt_scope_close(&inner), TUTTI_ERROR_STATE);
    CHECK(strstr(tutti_error_message(), "captured") != NULL);
    CHECK_EQ(driver.end(stream, &graph), 0);
    CHECK_EQ(driver.instantiate(&runnable, graph, 0), 0);
    for (int i = 0; i < 8; i++)
        others[i] = tt_full(tt_shape(4, 8), 100 + i, TUTTI_F32, NULL);
    for (int i = 0; i < 3; i++) {
        tt_fill_(x, i);
        CHECK_EQ(driver.launch(runnable, stream), 0);
        CHECK(tt_equal(y, step(x, weight)) && tt_equal(y, once) == (i == 1));
    }
    for (int i = 0; i < 32; i++) /* nor does the graph copy what was refused */
        CHECK(host[i] == -1);
    CHECK(all_are(tt_narrow(large, 0, 1 << 20, 100), 6));
    for (int i = 0; i < 8; i++) /* the graph's intermediates were released, and are not given out */
        CHECK(all_are(others[i], 100 + i));
    tt_release(y);
    tt_release(large);
    CHECK(driver.end_runnable(runnable) == 0 && driver.end_graph(graph) == 0);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(test_device(), stream);
}

/* What the driver refuses meanwhile breaks the capture, whoever asked. */
TEST(while_another_library_captures_memory_goes_back_and_events_are_asked) {
    tt_scope scope = tt_scope_open();
    void *stream = own_stream(), *others, *graph;
    driver driver = driver_of();
    tt_tensor *x = tt_ones(tt_shape(8), TUTTI_F32, NULL);
    CHECK(tt_replay_begin(test_device()));
    tt_tensor *y = tt_add_scalar(x, 1);
    tt_replay *replay = tt_replay_end(test_device());
    CHECK(replay != NULL && tt_replay_run(replay));
    tt_release(tt_keep(tt_empty(tt_shape(40 << 20), TUTTI_U8, NULL))); /* a segment of its own */
    CHECK(tt_synchronize(test_device()));
    others = tt_stream_new(test_device());
    tt_event *event = tt_event_record(test_device());
    tt_device_memory before = { .size = sizeof before }, behind = { .size = sizeof behind };
    CHECK_EQ(driver.begin(others, 0), 0);
    CHECK(tt_event_wait(event) && tt_event_done(event));
    tt_scope inner = tt_scope_open();
    CHECK(tt_empty_pinned(tt_shape(16), TUTTI_F32) != NULL);
    tt_empty(tt_shape(50 << 20), TUTTI_U8, NULL);
    CHECK_OK(tt_scope_close(&inner));
    CHECK_OK(tt_device_memory_get(test_device(), &before));
    tt_device_memory_trim(test_device());
    CHECK_OK(tt_device_memory_get(test_device(), &behind));
    CHECK(behind.reserved < before.reserved);
    tt_replay_release(replay);
    tt_stream_release(test_device(), stream);
    CHECK_EQ(driver.end(others, &graph), 0);
    CHECK_EQ(driver.end_graph(graph), 0);
    CHECK(all_are(y, 2));
    tt_event_release(event);
    tt_stream_release(test_device(), others);
    CHECK_OK(tt_scope_close(&scope));
}

/* A training step with collectives: forward, backward, the gradient's average. */
static tt_tensor *train(tt_tensor *x, tt_tensor *weight, tutti_group *group) {
    tt_set_grad(weight, NULL);
    tt_backward(tt_sum(tt_all_reduce(tt_mul(x, weight), TUTTI_SUM, group)), NULL);
    return tt_wait(tt_all_reduce(tt_grad(weight), TUTTI_AVG, group));
}

TEST_WORLD(a_step_with_collectives_runs_again_on_all_ranks, 2) {
    if (test_device() == TUTTI_CPU)
        return; /* streams are of GPUs */
    BEGIN;
    void *stream = own_stream();
    tt_tensor *x = tt_full(tt_shape(6), rank + 1, TUTTI_F32, NULL);
    tt_tensor *weight = tt_full(tt_shape(6), 3, TUTTI_F32, TUTTI_OPTIONS(tt_options, .requires_grad = true));
    CHECK(all_are(train(x, weight, group), 3) && tt_wait_all(world) && tt_synchronize(test_device()));
    CHECK(tt_replay_begin(test_device()));
    tt_tensor *average = train(x, weight, group);
    tt_replay *replay = tt_replay_end(test_device());
    CHECK(replay != NULL && tt_pending_works(world) == 0);
    for (int i = 0; i < 3; i++) {
        tt_fill_(x, (rank + 1) * (i + 1));
        CHECK(tt_synchronize(test_device()));
        CHECK_OK(tutti_barrier(group, NULL)); /* ranks that are threads launch together */
        CHECK(tt_replay_run(replay));
        CHECK(all_are(average, 3.0 * (i + 1)));
    }
    tt_replay_release(replay);
    END;
    tt_stream_release(test_device(), stream);
}

/* ---- collectives and streams ---- */

TEST_WORLD(a_result_is_there_for_the_current_stream_without_a_wait_of_the_host, 2) {
    if (test_device() == TUTTI_CPU)
        return; /* streams are of GPUs */
    BEGIN;
    void *stream = own_stream();
    tt_tensor *x = tt_full(tt_shape(many()), 1, TUTTI_F32, NULL);
    for (int i = 0; i < 10; i++)
        x = tt_mul_scalar(tt_all_reduce(tt_add_scalar(x, 0), TUTTI_SUM, group), 0.5);
    CHECK(!tt_is_async(x) && tt_pending_works(world) == 0); /* joined by the operator that needed it */
    CHECK(all_are(x, 1));
    END;
    tt_stream_release(test_device(), stream);
}

TEST_WORLD(memory_of_a_collective_is_not_given_out_before_it_is_over, 2) {
    if (test_device() == TUTTI_CPU)
        return; /* streams are of GPUs */
    BEGIN;
    void *stream = own_stream();
    tt_tensor *sum = tt_zeros(tt_shape(many()), TUTTI_F32, NULL);
    for (int i = 0; i < 20; i++) {
        tt_scope inner = tt_scope_open();
        tt_tensor *y = tt_all_reduce(tt_full(tt_shape(many()), i, TUTTI_F32, NULL), TUTTI_SUM, group);
        tt_full(tt_shape(many()), -1, TUTTI_F32, NULL); /* would take the input's memory */
        tt_add_(sum, y);
        CHECK_OK(tt_scope_close(&inner));
    }
    CHECK(all_are(sum, 190 * ranks));
    END;
    tt_stream_release(test_device(), stream);
}
