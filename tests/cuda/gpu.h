/* SPDX-License-Identifier: Apache-2.0
 *
 * What the GPU tests share: the driver (loaded as the backend loads it), a stream per rank, copies, and skipping where
 * there is no GPU or no plug-in. The number of ranks is TEST_GPU_RANKS, else 2.
 */
#ifndef TUTTI_TESTS_CUDA_GPU_H
#define TUTTI_TESTS_CUDA_GPU_H

#include <dlfcn.h>
#include <unistd.h>

#include <tutti/collective.h>
#include <tutti/memory.h>
#include <tutti/peers.h>

#include "../harness.h"
#include "backend/cuda/cuda.h"
#include "memory/backend.h"

static tu_cuda_driver gpu;
static _Thread_local CUstream stream;

#define CHECK_CUDA(call)                                                                   \
    do {                                                                                   \
        CUresult check_result = (call);                                                    \
        if (check_result != CUDA_SUCCESS)                                                  \
            test_failed(__FILE__, __LINE__, "%s gave CUDA error %d", #call, check_result); \
    } while (0)

static inline int gpu_ranks(void) {
    const char *text = getenv("TEST_GPU_RANKS");
    return text != NULL ? atoi(text) : 2;
}

/* In the test's own process only asks whether there is a GPU, without initialising the driver: worlds of processes fork
 * from it. */
static inline void gpu_needed(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL || access("/dev/nvidiactl", F_OK) != 0)
        SKIP("no GPU on this machine");
    const char *folder = getenv("TUTTI_PLUGIN_PATH");
    char path[4096];
    snprintf(path, sizeof path, "%s/libtutti-cuda.so", folder != NULL ? folder : ".");
    if (access(path, F_OK) != 0)
        SKIP("the CUDA backend was not built");
}

static inline void gpu_ranks_needed(int least) {
    if (gpu_ranks() < least)
        SKIP("it takes %d ranks, and TEST_GPU_RANKS says %d", least, gpu_ranks());
}

#define GPU_PINNED ((size_t)1 << 20)
static _Thread_local void *gpu_pinned; /* of this rank, for reading */

static inline void gpu_pinned_begin(void) {
    CHECK_CUDA(gpu.cuMemHostAlloc(&gpu_pinned, GPU_PINNED, 0));
}

/* In each rank: loads the driver, makes device 0 current, opens a stream. */
static inline void gpu_begin(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (gpu.library == NULL)
        CHECK_OK(tu_cuda_driver_load(&tu_backend_host_table, &gpu));
    pthread_mutex_unlock(&lock);
    CUdevice device;
    CUcontext context;
    CHECK_CUDA(gpu.cuDeviceGet(&device, 0));
    CHECK_CUDA(gpu.cuDevicePrimaryCtxRetain(&context, device));
    CHECK_CUDA(gpu.cuCtxSetCurrent(context));
    CHECK_CUDA(gpu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    gpu_pinned_begin();
}

static inline void gpu_end(void) {
    CHECK_CUDA(gpu.cuMemFreeHost(gpu_pinned));
    CHECK_CUDA(gpu.cuStreamDestroy(stream));
    CHECK_CUDA(gpu.cuDevicePrimaryCtxRelease(0));
}

static inline void *gpu_private(size_t bytes) {
    CUdeviceptr address;
    CHECK_CUDA(gpu.cuMemAlloc(&address, bytes > 0 ? bytes : 1));
    return (void *)(uintptr_t)address;
}

static inline void gpu_private_free(void *address) {
    CHECK_CUDA(gpu.cuMemFree((CUdeviceptr)(uintptr_t)address));
}

static inline void gpu_write(void *to, const void *from, size_t bytes) {
    if (bytes > 0)
        CHECK_CUDA(gpu.cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)to, from, bytes, stream));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
}

/* Through pinned memory: a copy to ordinary memory waits inside of the driver, and ranks that are threads may have to
 * launch meanwhile what it waits for. */
static inline void gpu_read(void *to, const void *from, size_t bytes) {
    const size_t room = GPU_PINNED;
    void *pinned = gpu_pinned;
    for (size_t done = 0; done < bytes; done += room) {
        size_t now = bytes - done < room ? bytes - done : room;
        CHECK_CUDA(gpu.cuMemcpyDtoHAsync(pinned, (CUdeviceptr)(uintptr_t)from + done, now, stream));
        CHECK_CUDA(gpu.cuStreamSynchronize(stream));
        memcpy((char *)to + done, pinned, now);
    }
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
}

static inline tutti_memory *gpu_symmetric(tutti_world *world, size_t bytes) {
    tutti_memory *memory;
    CHECK_OK(
        tutti_memory_alloc(world, bytes, TUTTI_OPTIONS(tutti_memory_options, .device = TUTTI_CUDA_AT(0)), &memory));
    return memory;
}

/* Allocating and freeing device memory waits for the whole device; with ranks that are threads of one process, nobody
 * may have a kernel waiting for us meanwhile. */
static inline void gpu_lockstep(tutti_group *group) {
    CHECK_OK(tutti_barrier(group, NULL));
}

#define ON_STREAM TUTTI_OPTIONS(tutti_call, .stream = stream)

/* A test whose body runs on every rank, as threads and as processes, with the driver ready; skipped with fewer than
 * `least` ranks. */
#define TEST_GPU(sentence) TEST_GPU_OF(1, sentence)
#define TEST_GPU_OF(least, sentence)                                        \
    static void on_gpu_##sentence(tutti_world *world);                      \
    static void rank_##sentence(tutti_world *world, void *argument) {       \
        (void)argument;                                                     \
        gpu_begin();                                                        \
        on_gpu_##sentence(world);                                           \
        gpu_end();                                                          \
    }                                                                       \
    TEST_LIMIT(sentence##_as_threads, 45) {                                 \
        gpu_needed();                                                       \
        gpu_ranks_needed(least);                                            \
        test_threads(gpu_ranks(), rank_##sentence, NULL);                   \
        _exit(0); /* the driver keeps descriptors and threads of its own */ \
    }                                                                       \
    TEST_LIMIT(sentence##_as_processes, 45) {                               \
        gpu_needed();                                                       \
        gpu_ranks_needed(least);                                            \
        test_processes(gpu_ranks(), rank_##sentence, NULL);                 \
    }                                                                       \
    static void on_gpu_##sentence(tutti_world *world)

#endif
