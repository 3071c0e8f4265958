/* SPDX-License-Identifier: Apache-2.0
 *
 * Pinned memory of the host and copies between it and a GPU for which nobody waits: TEST_DEVICE=cuda. On a GPU streams
 * are held up by a function of the host that they must call; the stand-in for the driver is told to fail where the host
 * waits, and so shows whether it did.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

#include <tutti/graph.h>
#include <tutti/tensors.h>

#include "support.h"

/* ---- streams that are held up ---- */

static _Atomic int passes; /* a stream may go on from here */

static void wait_at_the_gate(void *unused) {
    (void)unused;
    while (!atomic_load(&passes))
        usleep(100);
}

static void *of_driver(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return library != NULL ? dlsym(library, name) : NULL;
}

static bool is_stand_in(void) {
    return of_driver("standin_events_are_ready") != NULL;
}

/* Whether everything runs when it is given to a stream: the stand-in, where its streams are not apart. */
static bool runs_at_once(void) {
    const char *streams = getenv("STANDIN_STREAMS");
    return is_stand_in() && (streams == NULL || strcmp(streams, "apart") != 0);
}

static void *asked_of_driver(const char *name) {
    int (*get)(const char *, void **, int, uint64_t, int *) =
        (int (*)(const char *, void **, int, uint64_t, int *))(uintptr_t)of_driver("cuGetProcAddress_v2");
    void *found = NULL;
    int status = 0;
    CHECK(get != NULL && get(name, &found, 12000, 0, &status) == 0 && found != NULL);
    return found;
}

/* The device's context is current then. */
static int call_from(void *stream, void (*function)(void *), void *argument) {
    int (*retain)(void **, int) = (int (*)(void **, int))(uintptr_t)asked_of_driver("cuDevicePrimaryCtxRetain");
    int (*set)(void *) = (int (*)(void *))(uintptr_t)asked_of_driver("cuCtxSetCurrent");
    int (*launch)(void *, void (*)(void *), void *) =
        (int (*)(void *, void (*)(void *), void *))(uintptr_t)asked_of_driver("cuLaunchHostFunc");
    void *context;
    CHECK(retain(&context, 0) == 0 && set(context) == 0);
    return launch(stream, function, argument);
}

/* Nothing that the current stream is given from now on runs before let_go. */
static void hold_up(void) {
    atomic_store(&passes, 0);
    if (runs_at_once()) { /* the host must not ask whether it has */
        ((void (*)(int))(uintptr_t)of_driver("standin_events_are_ready"))(0);
        ((void (*)(const char *, int))(uintptr_t)of_driver("standin_fail"))("cuStreamSynchronize", 1);
        return;
    }
    CHECK_EQ(call_from(tt_stream(test_device()), wait_at_the_gate, NULL), 0);
}

static void let_go(void) {
    atomic_store(&passes, 1);
    if (runs_at_once()) {
        ((void (*)(int))(uintptr_t)of_driver("standin_events_are_ready"))(1);
        ((void (*)(const char *, int))(uintptr_t)of_driver("standin_fail"))("", 0);
    }
}

static void *let_go_soon(void *unused) {
    usleep(20000);
    let_go();
    return unused;
}

/* A scope of the CPU, and a stream of its own. */
static tt_scope begin(void **stream) {
    if (test_device() == TUTTI_CPU)
        SKIP("TEST_DEVICE names no other device");
    tt_scope scope = tt_scope_open();
    CHECK(tt_default_device_set(TUTTI_CPU));
    *stream = tt_stream_new(test_device());
    CHECK(*stream != NULL && tt_stream_set(test_device(), *stream));
    return scope;
}

static void end(tt_scope *scope, void *stream) {
    CHECK_OK(tt_scope_close(scope));
    tt_stream_release(test_device(), stream);
    test_device_leave();
}

static tt_tensor *pinned(double value) {
    tt_tensor *x = tt_empty_pinned(tt_shape(100, 10), TUTTI_F32);
    CHECK(x != NULL && tt_device_of(x) == TUTTI_CPU && tt_fill_(x, value) == x);
    return x;
}

static tt_tensor *there(double value) {
    return tt_full(tt_shape(100, 10), value, TUTTI_F32, TUTTI_OPTIONS(tt_options, .device = test_device()));
}

/* Of memory of the host, as it is now. */
static bool holds(const tt_tensor *x, float value) {
    const float *at = tt_data(x);
    for (int64_t i = 0; at != NULL && i < tt_numel(x); i++)
        if (at[i] != value)
            return false;
    return at != NULL;
}

/* ---- tests ---- */

TEST(copies_of_pinned_memory_return_before_they_run) {
    void *stream;
    tt_scope scope = begin(&stream);
    tt_tensor *from = pinned(3), *back = pinned(0), *x = there(1);
    CHECK(tt_synchronize(test_device()));
    hold_up();
    CHECK(tt_copy_async_(x, from) == x && tt_version(x) == 1);
    CHECK(tt_copy_async_(back, x) == back);
    tt_event *event = tt_event_record(test_device());
    CHECK(!tt_event_done(event)); /* the host is here, and nothing has run */
    let_go();
    CHECK(holds(back, 3)); /* whoever reads it waits */
    CHECK(tt_synchronize(test_device()) && tt_event_done(event));
    tt_event_release(event);
    end(&scope, stream);
}

TEST(copies_and_kernels_of_one_stream_run_beside_another_that_is_held_up) {
    void *stream, *other;
    tt_scope scope = begin(&stream);
    other = tt_stream_new(test_device());
    tt_tensor *from = pinned(2), *back = pinned(0), *x = there(0);
    CHECK(tt_synchronize(test_device()) && tt_stream_set(test_device(), other));
    if (runs_at_once())
        SKIP("here the stand-in holds all streams up, or none");
    CHECK(
        tt_copy_async_(back, tt_mul(x, x))); /* kernels that the driver loads now, and memory: both may wait for all */
    CHECK(tt_synchronize(test_device()) && tt_stream_set(test_device(), stream));
    hold_up();
    tt_event *held = tt_event_record(test_device());
    CHECK(tt_stream_set(test_device(), other));
    CHECK(tt_copy_async_(x, from) && tt_copy_async_(back, tt_mul(x, x)));
    CHECK(tt_synchronize(test_device()) && holds(back, 4));
    CHECK(!tt_event_done(held));
    let_go();
    CHECK(tt_event_wait(held) && tt_stream_set(test_device(), stream));
    tt_event_release(held);
    tt_stream_release(test_device(), other);
    end(&scope, stream);
}

TEST(whoever_writes_pinned_memory_waits_for_the_copy_that_reads_it) {
    void *stream;
    pthread_t thread;
    tt_scope scope = begin(&stream);
    tt_tensor *from = pinned(3), *back = pinned(0), *x = there(1);
    CHECK(tt_synchronize(test_device()));
    hold_up();
    CHECK(tt_copy_async_(x, from) != NULL);
    CHECK(holds(from, 3)); /* reading it needs no wait */
    if (runs_at_once()) {
        ((void (*)(const char *, int))(uintptr_t)of_driver("standin_fail"))("cuEventSynchronize", 1);
        tt_fill_(from, 5);
        expect_error(TUTTI_ERROR_BACKEND, "waiting for an event"); /* it waited, and was told that this failed */
    }
    CHECK_EQ(pthread_create(&thread, NULL, let_go_soon, NULL), 0);
    CHECK(tt_fill_(from, 5) != NULL);
    pthread_join(thread, NULL);
    CHECK(tt_copy_async_(back, x) != NULL && holds(back, 3));
    CHECK(tt_copy_async_(x, from) != NULL && tt_copy_async_(back, x) != NULL && holds(back, 5));
    end(&scope, stream);
}

TEST(releasing_pinned_memory_waits_for_the_copy_that_reads_it) {
    void *stream;
    pthread_t thread;
    tt_scope scope = begin(&stream);
    tt_tensor *back = pinned(0), *x = there(1);
    tt_scope inner = tt_scope_open();
    CHECK(tt_default_device_set(TUTTI_CPU));
    tt_tensor *from = pinned(7);
    CHECK(tt_synchronize(test_device()));
    hold_up();
    CHECK(tt_copy_async_(x, from) != NULL && tt_copy_async_(back, tt_add_scalar(x, 1)) != NULL);
    CHECK_EQ(pthread_create(&thread, NULL, let_go_soon, NULL), 0);
    CHECK_OK(tt_scope_close(&inner));
    for (int i = 0; i < 8; i++)
        CHECK(holds(pinned(-1), -1)); /* where it was, perhaps */
    CHECK(holds(back, 8));
    pthread_join(thread, NULL);
    end(&scope, stream);
}

TEST(parts_of_pinned_memory_are_copied_and_two_tensors_of_one_gpu) {
    void *stream;
    tt_scope scope = begin(&stream);
    tt_tensor *from = pinned(1), *back = pinned(0), *x = there(0), *y = there(9);
    CHECK(tt_fill_(tt_narrow(from, 0, 20, 5), 6) != NULL);
    CHECK(tt_copy_async_(tt_narrow(x, 0, 0, 5), tt_narrow(from, 0, 20, 5)) != NULL);
    CHECK(tt_copy_async_(tt_narrow(back, 0, 7, 5), tt_narrow(x, 0, 0, 5)) != NULL);
    CHECK(holds(tt_narrow(back, 0, 7, 5), 6) && holds(tt_narrow(back, 0, 0, 7), 0) &&
          holds(tt_narrow(back, 0, 12, 88), 0));
    CHECK(tt_copy_async_(x, y) == x && tt_copy_async_(back, x) && holds(back, 9));
    tt_tensor *none = tt_empty_pinned(tt_shape(0), TUTTI_F32), *empty = tt_narrow(tt_flatten(x, 0, -1), 0, 0, 0);
    CHECK(tt_copy_async_(empty, none) == empty && tt_copy_async_(none, empty) == none);
    end(&scope, stream);
}

static int copies(tt_tensor_list inputs, tt_tensor **outputs, void *user) {
    outputs[0] = tt_copy_async_(inputs.at[0], user);
    return 1;
}

TEST(what_cannot_be_copied_without_a_wait_is_an_error_that_says_what_can) {
    void *stream;
    tt_graph *graph;
    tt_scope scope = begin(&stream);
    tt_tensor *from = pinned(1), *x = there(0), *plain = tt_ones(tt_shape(100, 10), TUTTI_F32, NULL);
    CHECK(tt_copy_async_(x, plain) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "tt_empty_pinned");
    CHECK(tt_copy_async_(plain, x) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "nor in pinned memory");
    CHECK(tt_copy_async_(plain, from) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "is on a GPU");
    CHECK(tt_copy_async_(x, tt_empty_pinned(tt_shape(100, 10), TUTTI_F64)) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "one shape and dtype");
    CHECK(tt_copy_async_(x, tt_narrow(from, 0, 0, 50)) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "one shape and dtype");
    CHECK(tt_copy_async_(tt_narrow(x, 1, 0, 5), tt_narrow(from, 1, 0, 5)) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "row by row");
    CHECK(tt_copy_async_(x, NULL) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "source");
    CHECK(tt_copy_async_(NULL, x) == NULL);
    expect_error(TUTTI_ERROR_ARGUMENT, "copy_async_");
    tt_tensor *leaf = tt_require_grad(tt_clone(x), true);
    CHECK(tt_copy_async_(leaf, from) == NULL);
    expect_error(TUTTI_ERROR_STATE, "requires grad");
    bool recording = tt_grad_mode(false);
    CHECK(tt_copy_async_(leaf, from) == leaf);
    tt_grad_mode(recording);
    CHECK(!tt_capture(copies, from, tt_tensors(x), &graph));
    expect_error(TUTTI_ERROR_CAPTURE, "cannot be captured");
    end(&scope, stream);
}

TEST(a_replay_copies_what_pinned_memory_holds_at_each_run) {
    void *stream;
    tt_scope scope = begin(&stream);
    tt_tensor *from = pinned(1), *back = pinned(0), *x = there(0);
    tt_mul_scalar(x, 2); /* what is made on first use */
    CHECK(tt_synchronize(test_device()) && tt_replay_begin(test_device()));
    tt_copy_async_(x, from);
    tt_copy_async_(back, tt_mul_scalar(x, 2));
    tt_replay *replay = tt_replay_end(test_device());
    CHECK(replay != NULL);
    for (int i = 0; i < 3; i++) {
        tt_fill_(from, i + 1); /* the run before is over */
        CHECK(tt_replay_run(replay) && tt_synchronize(test_device()));
        CHECK(holds(back, (float)(2 * i + 2)));
    }
    tt_replay_release(replay);
    end(&scope, stream);
}

TEST(a_copy_that_fails_leaves_memory_as_it_was_and_can_be_made_again) {
    void *stream;
    tt_scope scope = begin(&stream);
    if (!is_stand_in())
        SKIP("only the stand-in fails where it is told to");
    tt_tensor *from = pinned(3), *back = pinned(0), *x = there(1);
    CHECK(tt_synchronize(test_device()));
    void (*fail)(int) = (void (*)(int))(uintptr_t)of_driver("standin_fail_call");
    int (*left)(void) = (int (*)(void))(uintptr_t)of_driver("standin_calls_left");
    bool whole = false;
    for (int nth = 1; !whole && nth < 100; nth++) {
        fail(nth);
        bool good = tt_copy_async_(x, from) != NULL;
        whole = left() > 0;
        fail(0);
        CHECK(good || tt_error_pending() == TUTTI_ERROR_MEMORY || tt_error_pending() == TUTTI_ERROR_BACKEND);
        CHECK(good || !whole);
        tt_error_clear();
        tt_copy_async_(x, from);
        CHECK(tt_copy_async_(back, x) != NULL && holds(back, 3));
        tt_fill_(back, 0);
    }
    CHECK(whole);
    end(&scope, stream);
}
