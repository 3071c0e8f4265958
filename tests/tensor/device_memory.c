/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of tensors on a device other than the CPU, and the streams behind which it is given out again. With the
 * stand-in for the driver, and with a GPU.
 */
#include "device_alone.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

#include <tutti/tensors.h>

/* ---- memory ---- */

static tt_device_memory usage(tutti_device device) {
    tt_device_memory memory = TT_DEVICE_MEMORY_INIT;
    CHECK_OK(tt_device_memory_get(device, &memory));
    return memory;
}

TEST(memory_is_used_again_and_given_back) {
    tutti_device device = there();
    tt_options options;
    tt_device_memory before = usage(device);
    const void *first = NULL;
    for (int i = 0; i < 100; i++) {
        tt_scope scope = tt_scope_open();
        tt_tensor *x = tt_zeros(tt_shape(1000), TUTTI_F32, on(&options, device));
        CHECK(first == NULL || tt_data(x) == first);
        first = tt_data(x);
        CHECK_OK(tt_scope_close(&scope));
    }
    tt_device_memory after = usage(device);
    CHECK(after.allocated == before.allocated && after.allocations - before.allocations == 100);
    CHECK(after.reservations - before.reservations == 1 && after.peak_allocated >= 4000);
    tt_device_memory_trim(device);
    CHECK(usage(device).reserved == 0);
    test_device_leave();
}

TEST(pieces_are_cut_and_grow_together) {
    tutti_device device = there();
    tt_options options;
    tt_scope scope = tt_scope_open();
    tt_tensor *parts[64];
    uint64_t before = usage(device).reservations;
    for (int i = 0; i < 64; i++)
        parts[i] = tt_keep(tt_zeros(tt_shape(64 << 10), TUTTI_U8, on(&options, device)));
    uint64_t segments = usage(device).reservations - before;
    CHECK(segments >= 2 && segments <= 3); /* of two megabytes, for four */
    CHECK_OK(tt_scope_close(&scope));
    for (int i = 0; i < 64; i += 2)
        tt_release(parts[i]);
    for (int i = 1; i < 64; i += 2)
        tt_release(parts[i]);
    CHECK(usage(device).allocated == 0);
    scope = tt_scope_open();
    CHECK(tt_zeros(tt_shape(1 << 20), TUTTI_U8, on(&options, device)) != NULL); /* fits where sixteen were */
    CHECK(usage(device).reservations - before == segments);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(a_limit_is_an_error_with_its_figures_after_what_is_spare_went_back) {
    tutti_device device = there();
    tt_options options;
    tt_scope scope = tt_scope_open();
    CHECK_OK(tt_device_memory_limit(device, 64 << 20));
    {
        tt_scope inner = tt_scope_open();
        CHECK(tt_empty(tt_shape(40 << 20), TUTTI_U8, on(&options, device)) != NULL);
        CHECK_OK(tt_scope_close(&inner));
    }
    /* 40 megabytes are spare; 48 fit only without them. */
    CHECK(tt_empty(tt_shape(48 << 20), TUTTI_U8, on(&options, device)) != NULL);
    CHECK(usage(device).retries == 1);
    FAILS(tt_empty(tt_shape(32 << 20), TUTTI_F32, on(&options, device)), TUTTI_ERROR_MEMORY, "the limit is 67108864");
    CHECK_OK(tt_device_memory_limit(device, 0));
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

TEST(storages_grow_and_shrink_there) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_clone(tt_to_device(tt_ones(tt_shape(4), TUTTI_F32, NULL), device));
    CHECK(tt_storage_resize(x, 0) && tt_storage_bytes(x) == 0);
    FAILS(tt_neg(x), TUTTI_ERROR_FREED, "freed");
    CHECK(tt_storage_resize(x, 64));
    tt_fill_(x, 3);
    CHECK(tt_storage_resize(x, 16) && tt_item(tt_sum(x)) == 12);
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

/* ---- streams ---- */

static void *use_own_stream(void *of_other) {
    tutti_device device = test_device();
    void *stream = tt_stream_new(device);
    CHECK(tt_stream(device) == NULL); /* whatever the other thread has set */
    CHECK(stream != of_other && tt_stream_set(device, stream) && tt_stream(device) == stream);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_to_device(tt_ones(tt_shape(8), TUTTI_F32, NULL), device);
    CHECK(tt_item(tt_sum(x)) == 8);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(device, stream);
    return NULL;
}

TEST(each_thread_has_its_current_stream) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    CHECK(tt_stream(device) == NULL);
    void *stream = tt_stream_new(device);
    CHECK(stream != NULL && tt_stream_set(device, stream) && tt_stream(device) == stream);
    pthread_t other;
    CHECK_EQ(pthread_create(&other, NULL, use_own_stream, stream), 0);
    CHECK_EQ(pthread_join(other, NULL), 0);
    CHECK(tt_stream(device) == stream);
    tt_tensor *x = tt_to_device(tt_ones(tt_shape(8), TUTTI_F32, NULL), device), *y = tt_mul_scalar(x, 2);
    tt_event *event = tt_event_record(device);
    CHECK(tt_stream_set(device, NULL) && tt_event_join(event)); /* the default stream goes on after it */
    CHECK(tt_item(tt_sum(tt_add(y, x))) == 24);
    CHECK(tt_event_wait(event) && tt_event_done(event));
    tt_event_release(event);
    tt_stream_release(device, stream);
    CHECK(tt_item(tt_sum(y)) == 16); /* its memory outlives the stream */
    FAILS(tt_event_wait(NULL), TUTTI_ERROR_ARGUMENT, "event is NULL");
    CHECK_OK(tt_scope_close(&scope));
    test_device_leave();
}

/* The driver's events, told from outside; NULL with a real driver. */
static void (*stand_in_events(void))(int) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver == NULL ? NULL : (void (*)(int))(uintptr_t)dlsym(driver, "standin_events_are_ready");
}

TEST(memory_that_another_stream_uses_is_not_given_out_before) {
    tutti_device device = there();
    tt_options options;
    CHECK(tt_synchronize(device));
    void (*events_are_ready)(int) = stand_in_events();
    if (events_are_ready == NULL)
        SKIP("only the stand-in can hold an event back");
    void *stream = tt_stream_new(device);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(100), TUTTI_F32, on(&options, device));
    const void *memory = tt_data(x);
    CHECK(tt_stream_set(device, stream));
    CHECK(tt_add_scalar(x, 1) != NULL); /* on the other stream */
    CHECK(tt_stream_set(device, NULL));
    events_are_ready(0);
    CHECK_OK(tt_scope_close(&scope));
    scope = tt_scope_open();
    CHECK(tt_data(tt_empty(tt_shape(100), TUTTI_F32, on(&options, device))) != memory);
    events_are_ready(1);
    CHECK(tt_stream_set(device, stream) && tt_synchronize(device) && tt_stream_set(device, NULL));
    bool found = false;
    for (int i = 0; i < 8 && !found; i++)
        found = tt_data(tt_empty(tt_shape(100), TUTTI_F32, on(&options, device))) == memory;
    CHECK(found);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(device, stream);
    test_device_leave();
}

/* A stream that is held up until another thread has allocated, which begins when the first one has found no room. */
typedef struct held_up {
    tutti_device device;
    uint64_t retries;
    _Atomic int allocated;
} held_up;

static void await_allocation(void *argument) {
    while (atomic_load(&((held_up *)argument)->allocated) == 0)
        usleep(100);
}

static void *allocate_meanwhile(void *argument) {
    held_up *of = argument;
    tt_options options;
    while (usage(of->device).retries == of->retries)
        usleep(100);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_empty(tt_shape(16), TUTTI_F32, on(&options, of->device));
    atomic_store(&of->allocated, x != NULL ? 1 : 2);
    tutti_status status = tt_scope_close(&scope);
    return status == TUTTI_OK ? of : NULL;
}

/* Gives the stream what calls a function of the host. */
static void call_on(void *stream, void (*function)(void *), void *argument) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), *launch = NULL, *retain = NULL, *set = NULL,
         *context = NULL;
    int (*get)(const char *, void **, int, uint64_t, int *) =
        (int (*)(const char *, void **, int, uint64_t, int *))dlsym(driver, "cuGetProcAddress_v2");
    CHECK(get("cuLaunchHostFunc", &launch, 12000, 0, NULL) == 0 &&
          get("cuDevicePrimaryCtxRetain", &retain, 12000, 0, NULL) == 0 &&
          get("cuCtxSetCurrent", &set, 12000, 0, NULL) == 0);
    CHECK(((int (*)(void **, int))retain)(&context, 0) == 0 && ((int (*)(void *))set)(context) == 0);
    CHECK(((int (*)(void *, void (*)(void *), void *))launch)(stream, function, argument) == 0);
}

TEST(who_waits_for_memory_that_streams_use_keeps_nobody_from_allocating_whom_they_wait_for) {
    tutti_device device = there();
    tt_options options;
    const char *streams = getenv("STANDIN_STREAMS");
    if (access("/dev/nvidiactl", F_OK) != 0 && (streams == NULL || strcmp(streams, "apart") != 0))
        SKIP("here the stand-in runs everything at once");
    const int64_t bytes = 20 << 20; /* a segment of its own */
    held_up held = { .device = device };
    void *other = tt_stream_new(device), *good;
    pthread_t thread;
    tt_scope scope = tt_scope_open();
    CHECK(tt_zeros(tt_shape(16), TUTTI_F32, on(&options, device)) != NULL); /* beside it there is room for the thread */
    tt_scope inner = tt_scope_open();
    tt_tensor *x = tt_zeros(tt_shape(bytes), TUTTI_U8, &options);
    const void *memory = tt_data(x);
    CHECK(tt_synchronize(device));
    call_on(other, await_allocation, &held);
    CHECK(tt_stream_set(device, other) && tt_fill_(x, 1) != NULL && tt_stream_set(device, NULL));
    CHECK_OK(tt_scope_close(&inner));
    CHECK_OK(tt_device_memory_limit(device, usage(device).reserved));
    held.retries = usage(device).retries;
    CHECK_EQ(pthread_create(&thread, NULL, allocate_meanwhile, &held), 0);
    x = tt_empty(tt_shape(bytes), TUTTI_U8, &options);
    CHECK(x != NULL && tt_data(x) == memory);
    CHECK_EQ(pthread_join(thread, &good), 0);
    CHECK(good != NULL && atomic_load(&held.allocated) == 1);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(device, other);
    test_device_leave();
}

TEST(memory_that_is_resized_on_another_stream_is_not_given_out_before_it_was_copied) {
    tutti_device device = there();
    tt_options options;
    CHECK(tt_synchronize(device));
    void (*events_are_ready)(int) = stand_in_events();
    if (events_are_ready == NULL)
        SKIP("only the stand-in can hold an event back");
    void *stream = tt_stream_new(device);
    tt_scope scope = tt_scope_open();
    tt_tensor *x = tt_ones(tt_shape(100), TUTTI_F32, on(&options, device));
    const void *memory = tt_data(x);
    CHECK(tt_stream_set(device, stream));
    events_are_ready(0);
    CHECK(tt_storage_resize(x, 4096)); /* copies on the other stream */
    tt_event *copied = tt_event_record(device);
    CHECK(tt_stream_set(device, NULL) && tt_data(x) != memory);
    CHECK(tt_data(tt_empty(tt_shape(100), TUTTI_F32, on(&options, device))) != memory);
    events_are_ready(1);
    CHECK(tt_event_join(copied) && tt_item(tt_sum(x)) == 100);
    tt_event_release(copied);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(device, stream);
    test_device_leave();
}

/* Where a stream is cannot be asked while it is captured: what it had before may still run. */
static void check_captured_meanwhile(tutti_device device, void (*events_are_ready)(int), bool own) {
    void *stream = tt_stream_new(device), *other = own ? tt_stream_new(device) : NULL;
    tt_options options;
    tt_scope scope = tt_scope_open();
    CHECK(tt_stream_set(device, own ? stream : NULL));
    tt_tensor *x = tt_ones(tt_shape(100), TUTTI_F32, on(&options, device));
    const void *memory = tt_data(x);
    CHECK(tt_synchronize(device) && tt_stream_set(device, own ? other : stream));
    CHECK(tt_add_scalar(x, 1) != NULL);
    events_are_ready(0);
    CHECK(tt_stream_set(device, stream) && tt_replay_begin(device));
    CHECK_OK(tt_scope_close(&scope));
    scope = tt_scope_open();
    if (!own) {
        CHECK(tt_stream_set(device, NULL));
        CHECK(tt_data(tt_empty(tt_shape(100), TUTTI_F32, on(&options, device))) != memory);
        CHECK(tt_stream_set(device, stream));
    }
    tt_replay *replay = tt_replay_end(device);
    CHECK(replay != NULL && tt_stream_set(device, own ? stream : NULL));
    CHECK(tt_data(tt_empty(tt_shape(100), TUTTI_F32, on(&options, device))) != memory);
    events_are_ready(1);
    CHECK(tt_stream_set(device, own ? other : stream) && tt_synchronize(device));
    CHECK(tt_stream_set(device, own ? stream : NULL));
    bool found = false;
    for (int i = 0; i < 8 && !found; i++)
        found = tt_data(tt_empty(tt_shape(100), TUTTI_F32, on(&options, device))) == memory;
    CHECK(found && tt_stream_set(device, NULL));
    tt_replay_release(replay);
    CHECK_OK(tt_scope_close(&scope));
    tt_stream_release(device, stream);
    tt_stream_release(device, other);
}

TEST(memory_that_a_stream_used_before_it_was_captured_is_not_given_out_before) {
    tutti_device device = there();
    CHECK(tt_synchronize(device));
    void (*events_are_ready)(int) = stand_in_events();
    if (events_are_ready == NULL)
        SKIP("only the stand-in can hold an event back");
    check_captured_meanwhile(device, events_are_ready, false); /* another stream than the memory's own */
    check_captured_meanwhile(device, events_are_ready, true);  /* the memory's own; another one has used it, too */
    test_device_leave();
}

/* The driver gives handles out again: memory of a stream that has ended is not the new one's. */
TEST(memory_of_an_ended_stream_is_not_taken_for_that_of_a_new_one_with_its_handle) {
    tutti_device device = there();
    tt_options options;
    CHECK(tt_synchronize(device));
    void (*events_are_ready)(int) = stand_in_events();
    if (events_are_ready == NULL)
        SKIP("only the stand-in can hold an event back");
    void *ended = tt_stream_new(device), *streams[64] = { NULL };
    tt_scope scope = tt_scope_open();
    CHECK(tt_stream_set(device, ended));
    tt_tensor *x = tt_ones(tt_shape(100), TUTTI_F32, on(&options, device));
    const void *memory = tt_data(x);
    tt_stream_release(device, ended);
    int count = 0;
    do
        streams[count] = tt_stream_new(device);
    while (streams[count++] != ended && count < 64);
    if (streams[count - 1] != ended)
        SKIP("no new stream has the handle of the old one");
    CHECK(tt_stream_set(device, ended) && tt_add_scalar(x, 1) != NULL);
    CHECK(tt_stream_set(device, NULL));
    events_are_ready(0);
    CHECK_OK(tt_scope_close(&scope));
    scope = tt_scope_open();
    CHECK(tt_data(tt_empty(tt_shape(100), TUTTI_F32, on(&options, device))) != memory);
    events_are_ready(1);
    CHECK_OK(tt_scope_close(&scope));
    for (int i = 0; i < count; i++)
        tt_stream_release(device, streams[i]);
    test_device_leave();
}

/* ---- the end of the library ---- */

/* Memory goes with the device, and its figures with that. */
static void finalize_beside(tutti_device device, tt_event *event, void *stream, tt_replay *replay) {
    uint64_t reservations = usage(device).reservations;
    CHECK(reservations > 0);
    CHECK_OK(tt_finalize());
    CHECK(usage(device).reservations == reservations);
    CHECK(event == NULL || tt_event_wait(event));
    CHECK(replay == NULL || tt_replay_run(replay));
    CHECK(tt_synchronize(device));
    tt_event_release(event);
    tt_stream_release(device, stream);
    if (replay != NULL) {
        CHECK_OK(tt_finalize());
        CHECK(usage(device).reservations == reservations);
    }
    tt_replay_release(replay);
    CHECK_OK(tt_finalize());
    CHECK(usage(device).reservations == 0);
}

static void use_memory(tutti_device device) {
    tt_options options;
    CHECK(tt_zeros(tt_shape(100), TUTTI_F32, on(&options, device)) != NULL);
}

TEST(a_device_stays_behind_the_end_of_the_library_while_a_stream_an_event_or_a_replay_is_held) {
    tutti_device device = there();
    tt_scope scope = tt_scope_open();
    use_memory(device);
    tt_event *event = tt_event_record(device);
    CHECK_OK(tt_scope_close(&scope));
    finalize_beside(device, event, NULL, NULL);
    for (int replayed = 0; replayed < 2; replayed++) {
        void *stream = tt_stream_new(device);
        CHECK(stream != NULL && tt_stream_set(device, stream));
        scope = tt_scope_open();
        CHECK(!replayed || tt_replay_begin(device));
        use_memory(device);
        tt_replay *replay = replayed ? tt_replay_end(device) : NULL;
        CHECK_OK(tt_scope_close(&scope));
        finalize_beside(device, NULL, stream, replay);
    }
    test_device_leave();
}
