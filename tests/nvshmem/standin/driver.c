/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for the CUDA driver, as a library libcuda.so.1, for tests of the NVSHMEM backend without a GPU: one GPU
 * whose memory is the host's. Copies, words, signals and barriers of blocks are done by the calling thread, and are
 * over when a call returns; a kernel that waits for another rank waits there, with its deadline. Collectives it does
 * not know.
 */
#include <dlfcn.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "backend/cuda/driver.h"
#include "backend/nvshmem/params.h"

static _Thread_local CUcontext contexts[8];
static _Thread_local int depth;
static const CUcontext primary = (CUcontext)(uintptr_t)0x1000;

/* ---- kernels ---- */

static uint64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void *at(uint64_t address) {
    return (void *)(uintptr_t)address;
}

static bool has_fault(const tu_cuda_group_words *group) {
    return atomic_load((_Atomic uint32_t *)&((tu_cuda_words *)at(group->words))->fault) != 0;
}

static void tell_host(tu_cuda_fault *host, const tu_cuda_fault *what) {
    uint32_t code = what->code;
    *host = *what;
    host->code = 0;
    atomic_store((_Atomic uint32_t *)&host->code, code);
}

static void out_of_time(const tu_cuda_group_words *group, int kind, int peer, int channel, uint32_t operation) {
    tu_cuda_fault what = {
        .code = TU_CUDA_FAULT_TIMEOUT, .peer = (uint32_t)peer, .operation = operation, .channel = (uint32_t)channel
    };
    tu_cuda_words *words = at(group->words);
    tu_cuda_report *report = at(group->report);
    uint32_t none = 0;
    if (kind != TU_CUDA_SIGNAL_BARRIER) {
        what.code = atomic_fetch_add((_Atomic uint32_t *)&words->expired, 1) + 1;
        tell_host(&report->expired, &what);
    } else if (atomic_compare_exchange_strong((_Atomic uint32_t *)&words->fault, &none, what.code)) {
        tell_host(&report->fault, &what);
    }
}

static void count_end(const tu_cuda_group_words *group) {
    if (group->place != 0)
        atomic_fetch_add((_Atomic uint64_t *)&((tu_cuda_words *)at(group->words))->ended, 1);
}

/* Signals of members that lie evenly: backend/cuda/signal.cu. */

static tu_cuda_signal *signal_at(const tu_cuda_signal_args *args, int owner, int peer) {
    return (tu_cuda_signal *)at(args->areas + (uint64_t)(int64_t)owner * args->stride) + args->channel * args->size +
           peer;
}

static uint32_t *barrier_at(const tu_cuda_signal_args *args, int owner, int peer) {
    tu_cuda_signal *area = at(args->areas + (uint64_t)(int64_t)owner * args->stride);
    return (uint32_t *)(area + args->channels * args->size) + args->channel * args->size + peer;
}

static bool await32(const tu_cuda_signal_args *args, const uint32_t *word, uint32_t value, int peer) {
    uint64_t deadline = nanoseconds() + args->timeout_ns;
    while ((int32_t)(atomic_load((const _Atomic uint32_t *)word) - value) < 0) {
        if (has_fault(&args->group))
            return false;
        if (nanoseconds() > deadline) {
            out_of_time(&args->group, args->kind, peer, args->channel, args->operation);
            return false;
        }
        sched_yield();
    }
    return true;
}

static void await_word(const tu_cuda_group_words *group, int kind, const void *word, uint64_t value,
                       uint64_t timeout_ns, uint32_t operation) {
    uint64_t deadline = nanoseconds() + timeout_ns, found;
    while (found = atomic_load((const _Atomic uint64_t *)word),
           kind == TU_CUDA_SIGNAL_AWAIT_EQUAL ? found != value : found < value) {
        if (has_fault(group))
            return;
        if (nanoseconds() > deadline) {
            out_of_time(group, kind, -1, 0, operation);
            return;
        }
        sched_yield();
    }
}

static void store32(uint32_t *word, uint32_t value) {
    atomic_store((_Atomic uint32_t *)word, value);
}

static void take32(const tu_cuda_signal_args *args, tu_cuda_signal *mine) {
    store32(&signal_at(args, args->peer, args->rank)->taken, ++mine->taken);
}

static void kernel_signal(const void *given) {
    const tu_cuda_signal_args *args = given;
    tu_cuda_signal *counters = at(args->local), *mine = counters + args->channel * args->size;
    mine += args->peer < 0 ? 0 : args->peer;
    uint32_t *epoch = (uint32_t *)(counters + args->channels * args->size) + args->channel;
    bool there = false;
    switch (has_fault(&args->group) && args->kind != TU_CUDA_SIGNAL_TEST ? -1 : args->kind) {
    case TU_CUDA_SIGNAL_PUT:
        if (await32(args, &signal_at(args, args->rank, args->peer)->taken, mine->sent, args->peer))
            store32(&signal_at(args, args->peer, args->rank)->sent, ++mine->sent);
        break;
    case TU_CUDA_SIGNAL_WAIT:
        if (await32(args, &signal_at(args, args->rank, args->peer)->sent, mine->taken + 1, args->peer))
            take32(args, mine);
        break;
    case TU_CUDA_SIGNAL_TEST:
        there = (int32_t)(atomic_load((_Atomic uint32_t *)&signal_at(args, args->rank, args->peer)->sent) -
                          mine->taken) > 0;
        if (there)
            take32(args, mine);
        store32(at(args->answer), there);
        break;
    case TU_CUDA_SIGNAL_SET_WORD:
        atomic_store((_Atomic uint64_t *)at(args->word), args->value);
        break;
    case TU_CUDA_SIGNAL_AWAIT_EQUAL:
    case TU_CUDA_SIGNAL_AWAIT_LEAST:
        await_word(&args->group, args->kind, at(args->word), args->value, args->timeout_ns, args->operation);
        break;
    case TU_CUDA_SIGNAL_BARRIER:
        ++*epoch;
        for (int member = 0; member < args->size; member++)
            store32(barrier_at(args, member, args->rank), *epoch);
        for (int member = 0; member < args->size; member++)
            await32(args, barrier_at(args, args->rank, member), *epoch, member);
        break;
    default:
        break;
    }
    count_end(&args->group);
}

/* Signals of members that are not mapped: backend/nvshmem/kernels.cu. */

enum {
    SENT,
    TAKEN,
    ARRIVED
};

static uint64_t *word_at(const tu_nvshmem_signal_args *args, uint64_t area, int row, int member) {
    return (uint64_t *)at(area) +
           ((uint64_t)row * (uint64_t)args->channels + (uint64_t)args->channel) * (uint64_t)args->size + member;
}

/* NVSHMEM's own stand-in knows where the memory of another process is. */
static void set_at(const void *place, int pe, uint64_t value) {
    void *library = dlopen("libnvshmem_host.so.3", RTLD_NOW | RTLD_NOLOAD);
    void *(*address)(const void *, int) = (void *(*)(const void *, int))(uintptr_t)dlsym(library, "standin_address");
    atomic_store((_Atomic uint64_t *)address(place, pe), value);
    dlclose(library);
}

static void tell(const tu_nvshmem_signal_args *args, int member, int row, uint64_t value) {
    const tu_nvshmem_member *to = (const tu_nvshmem_member *)at(args->members) + member;
    set_at(word_at(args, to->place, row, args->rank), to->pe, value);
}

static bool await64(const tu_nvshmem_signal_args *args, const uint64_t *word, uint64_t value, int peer) {
    uint64_t deadline = nanoseconds() + args->timeout_ns;
    while (atomic_load((const _Atomic uint64_t *)word) < value) {
        if (has_fault(&args->group))
            return false;
        if (nanoseconds() > deadline) {
            out_of_time(&args->group, args->kind, peer, args->channel, args->operation);
            return false;
        }
        sched_yield();
    }
    return true;
}

static void kernel_nvshmem_signal(const void *given) {
    const tu_nvshmem_signal_args *args = given;
    uint64_t pairs = (uint64_t)args->channels * (uint64_t)args->size;
    uint64_t *own = at(args->own), *epoch = own + 5 * pairs + args->channel;
    int peer = args->peer < 0 ? 0 : args->peer;
    uint64_t *mine = own + 3 * pairs + 2 * ((uint64_t)args->channel * (uint64_t)args->size + (uint64_t)peer);
    bool there = false;
    switch (has_fault(&args->group) && args->kind != TU_CUDA_SIGNAL_TEST ? -1 : args->kind) {
    case TU_CUDA_SIGNAL_PUT:
        if (await64(args, word_at(args, args->own, TAKEN, peer), mine[0], peer))
            tell(args, peer, SENT, ++mine[0]);
        break;
    case TU_CUDA_SIGNAL_WAIT:
        if (await64(args, word_at(args, args->own, SENT, peer), mine[1] + 1, peer))
            tell(args, peer, TAKEN, ++mine[1]);
        break;
    case TU_CUDA_SIGNAL_TEST:
        there = atomic_load((_Atomic uint64_t *)word_at(args, args->own, SENT, peer)) > mine[1];
        if (there)
            tell(args, peer, TAKEN, ++mine[1]);
        store32(at(args->answer), there);
        break;
    case TU_CUDA_SIGNAL_SET_WORD:
        set_at(at(args->word), args->pe, args->value);
        break;
    case TU_CUDA_SIGNAL_AWAIT_EQUAL:
    case TU_CUDA_SIGNAL_AWAIT_LEAST:
        await_word(&args->group, args->kind, at(args->word), args->value, args->timeout_ns, args->operation);
        break;
    case TU_CUDA_SIGNAL_BARRIER:
        ++*epoch;
        for (int member = 0; member < args->size; member++)
            tell(args, member, ARRIVED, *epoch);
        for (int member = 0; member < args->size; member++)
            await64(args, word_at(args, args->own, ARRIVED, member), *epoch, member);
        break;
    default:
        break;
    }
    count_end(&args->group);
}

static void kernel_copy(const void *given) {
    const tu_cuda_copy_args *args = given;
    memmove(at(args->to), at(args->from), args->bytes);
}

static void kernel_follow(const void *given) {
    (void)given; /* everything launched before is over */
}

static const struct {
    const char *name;
    void (*run)(const void *args);
} kernels[] = {
    { "tutti_signal", kernel_signal },
    { "tutti_nvshmem_signal", kernel_nvshmem_signal },
    { "tutti_copy", kernel_copy },
    { "tutti_follow", kernel_follow },
};

/* ---- the driver's functions ---- */

static CUresult nothing(void) {
    return CUDA_SUCCESS;
}
static CUresult unknown(void) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
static CUresult version(int *number) {
    *number = 13000;
    return CUDA_SUCCESS;
}
static CUresult device(CUdevice *found, int ordinal) {
    *found = ordinal;
    return CUDA_SUCCESS;
}
static CUresult count(int *devices) {
    *devices = 1;
    return CUDA_SUCCESS;
}
static CUresult attribute(int *value, int which, CUdevice of) {
    (void)of;
    *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9
             : which == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED    ? 0
                                                                   : 1;
    return CUDA_SUCCESS;
}
static CUresult uuid(CUuuid *id, CUdevice of) {
    (void)of;
    memset(id, 7, sizeof *id);
    return CUDA_SUCCESS;
}
static CUresult retain(CUcontext *context, CUdevice of) {
    (void)of;
    *context = primary;
    return CUDA_SUCCESS;
}
static CUresult current(CUcontext *context) {
    *context = depth > 0 ? contexts[depth - 1] : NULL;
    return CUDA_SUCCESS;
}
static CUresult current_device(CUdevice *found) {
    *found = 0;
    return depth > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
static CUresult push(CUcontext context) {
    contexts[depth++] = context;
    return CUDA_SUCCESS;
}
static CUresult pop(CUcontext *context) {
    *context = contexts[--depth];
    return CUDA_SUCCESS;
}
static CUresult text(CUresult result, const char **name) {
    (void)result;
    *name = "stand-in";
    return CUDA_SUCCESS;
}
static CUresult allocate(CUdeviceptr *address, size_t bytes) {
    void *data = malloc(bytes);
    *address = (CUdeviceptr)(uintptr_t)data;
    return data != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
static CUresult release(CUdeviceptr address) {
    free(at(address));
    return CUDA_SUCCESS;
}
static CUresult allocate_host(void **data, size_t bytes, unsigned flags) {
    (void)flags;
    *data = calloc(1, bytes);
    return *data != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
static CUresult release_host(void *data) {
    free(data);
    return CUDA_SUCCESS;
}
static CUresult device_pointer(CUdeviceptr *here, void *data, unsigned flags) {
    (void)flags;
    *here = (CUdeviceptr)(uintptr_t)data;
    return CUDA_SUCCESS;
}
static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    (void)stream;
    memmove(at(to), at(from), bytes);
    return CUDA_SUCCESS;
}
static CUresult copy_from_host(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    (void)stream;
    memmove(at(to), from, bytes);
    return CUDA_SUCCESS;
}
static CUresult set8(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    (void)stream;
    memset(at(to), value, bytes);
    return CUDA_SUCCESS;
}
static CUresult set32(CUdeviceptr to, unsigned value, size_t words, CUstream stream) {
    (void)stream;
    for (size_t i = 0; i < words; i++)
        ((uint32_t *)at(to))[i] = value;
    return CUDA_SUCCESS;
}
static CUresult write32(CUstream stream, CUdeviceptr to, uint32_t value, unsigned flags) {
    (void)stream;
    (void)flags;
    store32(at(to), value);
    return CUDA_SUCCESS;
}
static CUresult make(void **made, unsigned flags) {
    (void)flags;
    *made = malloc(1);
    return CUDA_SUCCESS;
}
static CUresult make_with_priority(void **made, unsigned flags, int priority) {
    (void)priority;
    return make(made, flags);
}
static CUresult end(void *made) {
    free(made);
    return CUDA_SUCCESS;
}
/* Memory that is shared between processes can be mapped once more: the heaps of NVSHMEM's stand-in. A piece has 1 MiB.
 */
#define PIECE ((CUdeviceptr)1 << 20)
static CUresult range(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    *base = address / PIECE * PIECE;
    *bytes = PIECE;
    return CUDA_SUCCESS;
}
static CUresult handle(CUmemGenericAllocationHandle *memory, void *address) {
    *memory = (CUdeviceptr)(uintptr_t)address / PIECE * PIECE;
    return CUDA_SUCCESS;
}
static CUresult reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint, uint64_t flags) {
    (void)alignment, (void)hint, (void)flags;
    void *reserved = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (CUdeviceptr)(uintptr_t)reserved;
    return reserved != MAP_FAILED ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
static CUresult map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle memory,
                    uint64_t flags) {
    (void)flags;
    void *again = mremap(at(memory + offset), 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at(address));
    return again != MAP_FAILED ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}
static CUresult unmap(CUdeviceptr address, size_t bytes) {
    return munmap(at(address), bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult load(CUmodule *module, const void *image) {
    *module = (CUmodule)(uintptr_t)image;
    return CUDA_SUCCESS;
}
static CUresult function(CUfunction *found, CUmodule module, const char *name) {
    (void)module;
    *found = (CUfunction)(uintptr_t)1; /* one that cannot be launched */
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (strcmp(kernels[i].name, name) == 0)
            *found = (CUfunction)(uintptr_t)kernels[i].run;
    return CUDA_SUCCESS;
}
static CUresult launch(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters,
                       void **extra) {
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)stream, (void)extra;
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if ((uintptr_t)function == 1)
        return CUDA_ERROR_NOT_SUPPORTED;
    ((void (*)(const void *))(uintptr_t)function)(parameters[0]);
    return CUDA_SUCCESS;
}

static const struct {
    const char *name;
    void *function;
} known[] = {
#define IS(name, function) \
    { #name, (void *)(uintptr_t)(function) }
    IS(cuInit, nothing),
    IS(cuDriverGetVersion, version),
    IS(cuDeviceGet, device),
    IS(cuDeviceGetCount, count),
    IS(cuDeviceGetAttribute, attribute),
    IS(cuDeviceGetUuid, uuid),
    IS(cuDevicePrimaryCtxRetain, retain),
    IS(cuDevicePrimaryCtxRelease, nothing),
    IS(cuCtxGetCurrent, current),
    IS(cuCtxGetDevice, current_device),
    IS(cuCtxPushCurrent, push),
    IS(cuCtxPopCurrent, pop),
    IS(cuCtxSynchronize, nothing),
    IS(cuGetErrorName, text),
    IS(cuGetErrorString, text),
    IS(cuMemAlloc, allocate),
    IS(cuMemFree, release),
    IS(cuMemHostAlloc, allocate_host),
    IS(cuMemFreeHost, release_host),
    IS(cuMemHostGetDevicePointer, device_pointer),
    IS(cuMemcpyAsync, copy),
    IS(cuMemcpyHtoDAsync, copy_from_host),
    IS(cuMemsetD8Async, set8),
    IS(cuMemsetD32Async, set32),
    IS(cuStreamWriteValue32, write32),
    IS(cuStreamCreate, make),
    IS(cuStreamCreateWithPriority, make_with_priority),
    IS(cuStreamDestroy, end),
    IS(cuStreamSynchronize, nothing),
    IS(cuStreamQuery, nothing),
    IS(cuStreamWaitEvent, nothing),
    IS(cuEventCreate, make),
    IS(cuEventRecord, nothing),
    IS(cuEventQuery, nothing),
    IS(cuEventSynchronize, nothing),
    IS(cuEventDestroy, end),
    IS(cuMemGetAddressRange, range),
    IS(cuMemRetainAllocationHandle, handle),
    IS(cuMemRelease, nothing),
    IS(cuMemAddressReserve, reserve),
    IS(cuMemAddressFree, nothing),
    IS(cuMemMap, map),
    IS(cuMemSetAccess, nothing),
    IS(cuMemUnmap, unmap),
    IS(cuModuleLoadData, load),
    IS(cuModuleUnload, nothing),
    IS(cuModuleGetFunction, function),
    IS(cuFuncLoad, nothing),
    IS(cuLaunchKernel, launch),
#undef IS
};

__attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char *name, void **found, int since,
                                                                    uint64_t flags, int *status);
CUresult cuGetProcAddress_v2(const char *name, void **found, int since, uint64_t flags, int *status) {
    (void)since, (void)flags, (void)status;
    *found = (void *)(uintptr_t)unknown;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, name) == 0)
            *found = known[i].function;
    return CUDA_SUCCESS;
}
