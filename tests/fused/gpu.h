/* SPDX-License-Identifier: Apache-2.0
 *
 * What tests of fused products on a device share: tensors there and back, ranks on one GPU, graphs.
 */
#ifndef TESTS_FUSED_GPU_H
#define TESTS_FUSED_GPU_H

#include <dlfcn.h>
#include <unistd.h>

#include <tutti/streams.h>

#include "../tensor/device.h"
#include "support.h"

static inline tt_tensor *there(tt_tensor *x) {
    return tt_to_device(x, test_device());
}

/* A matrix that lies by columns does so there, too: a copy alone would lie by rows. */
static inline tt_tensor *by_columns_there(tt_tensor *x) {
    return tt_device_of(x) == TUTTI_CPU ? tt_transpose(there(tt_contiguous(tt_transpose(x, 0, 1))), 0, 1) : x;
}

static inline tt_tensor *back(tt_tensor *x) {
    return tt_to_device(x, TUTTI_CPU);
}

static inline int gpu_ranks(void) {
    const char *text = getenv("TEST_GPU_RANKS");
    return text != NULL ? atoi(text) : 2;
}

/* Asks without initialising the driver: worlds of processes fork from here. */
static inline void gpu_needed(void) {
    const char *name = getenv("TEST_DEVICE");
    if (name == NULL || name[0] == 0)
        SKIP("this is the cpu");
    if (access("/dev/nvidiactl", F_OK) != 0)
        SKIP("no GPU on this machine");
}

static inline void device_needed(void) {
    const char *name = getenv("TEST_DEVICE");
    if (name == NULL || name[0] == 0)
        SKIP("this is the cpu");
}

/* Where streams can be held up: with the stand-in, if they run beside each other. */
static inline void streams_needed(void) {
    const char *streams = getenv("STANDIN_STREAMS");
    device_needed();
    if (access("/dev/nvidiactl", F_OK) != 0 && (streams == NULL || strcmp(streams, "apart") != 0))
        SKIP("here the stand-in runs everything at once");
}

/* The body runs on every rank, with a stream of its own. */
#define RANK_ON_DEVICE(sentence)                                      \
    static void on_gpu_##sentence(tutti_world *world);                \
    static void rank_##sentence(tutti_world *world, void *argument) { \
        (void)argument;                                               \
        tt_scope outer = tt_scope_open();                             \
        void *stream = tt_stream_new(test_device());                  \
        CHECK(tt_stream_set(test_device(), stream));                  \
        on_gpu_##sentence(world);                                     \
        tt_stream_release(test_device(), stream);                     \
        CHECK_OK(tt_scope_close(&outer));                             \
    }

#define TEST_ON_DEVICES(sentence, needed)                   \
    RANK_ON_DEVICE(sentence)                                \
    TEST_LIMIT(sentence##_as_threads, 60) {                 \
        needed();                                           \
        test_threads(gpu_ranks(), rank_##sentence, NULL);   \
        test_device_leave();                                \
    }                                                       \
    TEST_LIMIT(sentence##_as_processes, 60) {               \
        needed();                                           \
        test_processes(gpu_ranks(), rank_##sentence, NULL); \
    }                                                       \
    static void on_gpu_##sentence(tutti_world *world)

/* As threads and as processes: on a GPU; or also with the stand-in for the driver. */
#define TEST_GPU(sentence) TEST_ON_DEVICES(sentence, gpu_needed)
#define TEST_RANKS(sentence) TEST_ON_DEVICES(sentence, device_needed)
#define TEST_HELD(sentence) TEST_ON_DEVICES(sentence, streams_needed)

/* From 1 to 7: scales with which products stay exact. */
static inline tt_tensor *positive(tt_tensor *x) {
    return tt_add_scalar(x, 4);
}

/* All ranks' shards, one after the other: what the CPU would gather. Ranks know each other's numbers. */
static inline tt_tensor *all_of(tt_dims shape, tutti_dtype dtype, int ranks, int dim) {
    tt_tensor *shards[64];
    for (int rank = 0; rank < ranks; rank++)
        shards[rank] = whole(shape, dtype, rank);
    return tt_cat(tt_tensors_of((size_t)ranks, shards), dim);
}

/* The part of x along dim that is this rank's. */
static inline tt_tensor *part_of(tt_tensor *x, int dim, int rank, int ranks) {
    int64_t each = tt_size(x, dim) / ranks;
    return tt_narrow(x, dim, rank * each, each);
}

typedef struct driver {
    int (*begin)(void *stream, int mode);
    int (*end)(void *stream, void **graph);
    int (*instantiate)(void **executable, void *graph, unsigned long long flags);
    int (*launch)(void *executable, void *stream);
} driver;

/* A function of the driver, or of its stand-in. */
static inline void *function_of(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *found = NULL;
    int (*get)(const char *, void **, int, uint64_t, int *) =
        (int (*)(const char *, void **, int, uint64_t, int *))dlsym(library, "cuGetProcAddress_v2");
    int status = 0;
    CHECK(get != NULL && get(name, &found, 12000, 0, &status) == 0 && found != NULL);
    return found;
}

/* Graphs of the driver, with the device's context current. */
static inline driver graphs(void) {
    driver made = { (int (*)(void *, int))function_of("cuStreamBeginCapture"),
                    (int (*)(void *, void **))function_of("cuStreamEndCapture"),
                    (int (*)(void **, void *, unsigned long long))function_of("cuGraphInstantiateWithFlags"),
                    (int (*)(void *, void *))function_of("cuGraphLaunch") };
    int (*retain)(void **, int) = (int (*)(void **, int))function_of("cuDevicePrimaryCtxRetain");
    int (*set)(void *) = (int (*)(void *))function_of("cuCtxSetCurrent");
    void *context;
    CHECK(retain(&context, 0) == 0 && set(context) == 0);
    return made;
}

static inline bool is_gpu(void) {
    return access("/dev/nvidiactl", F_OK) == 0;
}

static inline void await_word(void *word) {
    while (*(volatile uint32_t *)word == 0)
        usleep(100);
}

/* Keeps a stream from going on until the host sets the word that is returned; see streams_needed. With the stand-in it
 * calls a function of the host that waits. */
static inline volatile uint32_t *hold_stream(void *stream) {
    static uint32_t words[64];
    static _Atomic int used;
    (void)graphs(); /* the device's context is current */
    if (!is_gpu()) {
        int (*launch)(void *, void (*)(void *), void *) =
            (int (*)(void *, void (*)(void *), void *))function_of("cuLaunchHostFunc");
        volatile uint32_t *mine = &words[used++];
        CHECK_EQ(launch(stream, await_word, (void *)(uintptr_t)mine), 0);
        return mine;
    }
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *word;
    int (*allocate)(void **, size_t) = (int (*)(void **, size_t))dlsym(library, "cuMemAllocHost_v2");
    int (*await)(void *, uint64_t, uint32_t, unsigned) =
        (int (*)(void *, uint64_t, uint32_t, unsigned))dlsym(library, "cuStreamWaitValue32_v2");
    CHECK(allocate != NULL && await != NULL && allocate(&word, sizeof(uint32_t)) == 0);
    *(volatile uint32_t *)word = 0;
    CHECK_EQ(await(stream, (uint64_t)(uintptr_t)word, 1, 0), 0);
    return word;
}

/* The first number of the GPU's compute capability. */
static inline int generation_of_gpu(void) {
    int (*ask)(int *, int, int) = (int (*)(int *, int, int))function_of("cuDeviceGetAttribute");
    int major = 0;
    (void)graphs(); /* the device's context is current */
    CHECK(ask(&major, 75, 0) == 0);
    return major;
}

/* Whether TUTTI_TOGETHER is that, or not set, which is "auto". */
static inline bool together_is(const char *word) {
    const char *set = getenv("TUTTI_TOGETHER");
    return strcmp(set != NULL && set[0] != 0 ? set : "auto", word) == 0;
}

/* Whether products are made by the kernel for Hopper that computes and communicates at once. */
static inline bool is_hopper(void) {
    return generation_of_gpu() == 9 && (together_is("auto") || together_is("hopper"));
}

/* The same of 16-bit floats by either kernel. A GPU that has only the plain one, and cuBLASLt, takes it for small
 * products. */
static inline bool is_one_kernel(void) {
    return is_hopper() || (generation_of_gpu() >= 8 && together_is("plain")) ||
           (generation_of_gpu() >= 8 && generation_of_gpu() != 9 && together_is("auto"));
}

/* Of many cases all on a GPU, and every seventh with the stand-in, whose tensor cores are slow: that still has each of
 * the choices that a case is made of. */
static inline int stride_of_cases(void) {
    return is_gpu() ? 1 : 7;
}

static inline tt_tensor *symmetric_there(tutti_world *world, tt_tensor *x) {
    tt_symm_options options = TT_SYMM_OPTIONS_INIT;
    options.device = test_device();
    tt_tensor *copy = tt_symm_empty(world, tt_sizes(x), tt_dtype(x), &options);
    return tt_copy_(copy, there(x));
}

#endif
