/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for the CUDA driver, as a library libcuda.so.1: one GPU whose memory is the host's and whose kernels are
 * those of tensors and of the backends, compiled for the CPU. Everything is over when a call returns, but an event may
 * be told not to be: standin_events_are_ready(0); and streams can be held up: standin_cuda_hold(1) until
 * standin_cuda_hold(-1). With STANDIN_STREAMS=apart streams run beside each other and the host, graphs of captures too.
 * Memory that ranks share is a file in memory, so that ranks may be processes too; a capture keeps what it was given
 * and runs it when its graph is launched. With STANDIN_GPUS=own every rank that asks sees a GPU of its own, as NCCL
 * wants it; with STANDIN_MAJOR=8 it is of another generation than Hopper. With it tests of tensors, NCCL and NVSHMEM run where there is no GPU; what it does not know fails.
 */
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"
#include "emulate.hpp"
#include "streams.hpp"
#include "tensor_map.hpp"

/* ---- kernels ---- */

namespace emulated {
thread_local place here;

/* Nobody destroys it when the process ends: a stream may still run one of them. */
static std::map<std::string, kernel> &table() {
    static auto *const known = new std::map<std::string, kernel>;
    return *known;
}
entry::entry(const char *name, body *run, size_t bytes, bool fibers) {
    table()[name] = { run, bytes, fibers, nullptr };
}
kernel *find(const char *name) {
    auto found = table().find(name);
    return found == table().end() ? nullptr : &found->second;
}
} // namespace emulated

/* ---- the driver's functions ---- */

static const size_t capacity = (size_t)1 << 30;
static std::mutex lock;
static std::map<CUdeviceptr, size_t> allocated;
static size_t in_use;
static bool ready = true;
static int launches;
static thread_local CUcontext contexts[8];
static thread_local int depth;
static const CUcontext primary = (CUcontext)(uintptr_t)0x1000;
/* What streams were given; those that have no object are one. Nobody destroys it when the process ends: some may run.
 */
static standin::lines &all_lines = *new standin::lines;
static const std::shared_ptr<standin::line> &line_of_none = *new std::shared_ptr<standin::line>(all_lines.make());

extern "C" __attribute__((visibility("default"))) void standin_events_are_ready(int yes) {
    ready = yes != 0;
}
extern "C" __attribute__((visibility("default"))) size_t standin_bytes_in_use(void) {
    std::lock_guard<std::mutex> held(lock);
    return in_use;
}
extern "C" __attribute__((visibility("default"))) int standin_launches(void) {
    return launches;
}

/* That function, or finding the kernel of that name, fails the nth time from now. */
static std::string failing;
static int failing_after;
extern "C" __attribute__((visibility("default"))) void standin_fail(const char *function, int nth) {
    std::lock_guard<std::mutex> held(lock);
    failing = function;
    failing_after = nth;
}
static bool fails_in(const char *function) {
    std::lock_guard<std::mutex> held(lock);
    return failing == function && failing_after > 0 && --failing_after == 0;
}

/* Whichever function this thread calls the nth time from now fails, but for those that give something back: the number
 * of calls that are left until then, 0 when it has failed. */
static thread_local int calls_left;
static thread_local bool counts_calls;
static thread_local int pauses;                     /* calls of another stand-in, which do not count */
static thread_local std::vector<void *> calls_made; /* since standin_fail_call */
extern "C" __attribute__((visibility("default"))) void standin_pause_calls(int more) {
    pauses += more;
}
extern "C" __attribute__((visibility("default"))) void standin_fail_call(int nth) {
    calls_left = nth;
    counts_calls = nth > 0;
    calls_made.clear();
}
extern "C" __attribute__((visibility("default"))) int standin_calls_left(void) {
    return calls_left;
}
template <auto function> struct counted;
template <class... Given, CUresult (*function)(Given...)> struct counted<function> {
    static CUresult call(Given... given) {
        bool counts = counts_calls && pauses == 0;
        if (counts)
            calls_made.push_back((void *)call);
        if (counts && calls_left > 0 && --calls_left == 0)
            return CUDA_ERROR_OUT_OF_MEMORY;
        return function(given...);
    }
};

/* Streams, events, pinned pieces, ranges of addresses and modules that were not given back. */
static std::atomic<int> objects;
extern "C" __attribute__((visibility("default"))) int standin_objects(void) {
    return objects;
}

static CUresult init(unsigned) {
    return CUDA_SUCCESS;
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
static const int processors = 4; /* as many ranks can share the GPU */
static int major_of_gpu() {
    const char *given = getenv("STANDIN_MAJOR");
    return given != nullptr ? atoi(given) : 9;
}
static CUresult attribute(int *value, int which, CUdevice) {
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = major_of_gpu();
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = processors;
        break;
    default: /* memory by handles, as descriptors; no multicast, no fabric */
        *value = which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
                 which == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    }
    return CUDA_SUCCESS;
}
static CUresult uuid(CUuuid *found, CUdevice) {
    static std::atomic<int> asked;
    const char *gpus = getenv("STANDIN_GPUS");
    memset(found, gpus != nullptr && strcmp(gpus, "own") == 0 ? 8 + asked++ % 200 : 7, sizeof *found);
    return CUDA_SUCCESS;
}
static CUresult bus(char *id, int bytes, CUdevice) {
    snprintf(id, (size_t)bytes, "0000:00:00.0");
    return CUDA_SUCCESS;
}
static CUresult retain(CUcontext *context, CUdevice) {
    *context = primary;
    return CUDA_SUCCESS;
}
static CUresult release(CUdevice) {
    return CUDA_SUCCESS;
}
static CUresult current(CUcontext *context) {
    *context = depth > 0 ? contexts[depth - 1] : nullptr;
    return CUDA_SUCCESS;
}
static CUresult current_device(CUdevice *found) {
    *found = 0;
    return depth > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
static CUresult push(CUcontext context) {
    if (depth == 8)
        return CUDA_ERROR_NOT_SUPPORTED;
    contexts[depth++] = context;
    return CUDA_SUCCESS;
}
static CUresult pop(CUcontext *context) {
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = contexts[--depth];
    return CUDA_SUCCESS;
}
static CUresult set_context(CUcontext context) {
    depth = depth > 0 ? depth : 1;
    contexts[depth - 1] = context;
    return CUDA_SUCCESS;
}
static CUresult error_name(CUresult, const char **text) {
    *text = "stand-in";
    return CUDA_SUCCESS;
}

/* Captures that forbid calls which could wait for the GPU: to every thread, to the thread that began them. A thread
 * takes itself out of that by the mode relaxed. */
enum {
    FOR_ALL,
    FOR_THREAD,
    RELAXED
};
static std::atomic<int> captures_for_all;
static thread_local int captures_for_thread, thread_mode;
static std::atomic<bool> broken; /* a capture for all: by a call that it forbids */
static bool is_forbidden() {
    bool yes =
        thread_mode != RELAXED && (captures_for_thread > 0 || (thread_mode == FOR_ALL && captures_for_all.load() > 0));
    if (yes && captures_for_all.load() > 0)
        broken = true;
    return yes;
}

static CUresult allocate(CUdeviceptr *address, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (is_forbidden())
        return 900;
    if (bytes > capacity - in_use)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *data = aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (data == nullptr)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(data, 0xcd, bytes); /* what nobody wrote shows */
    *address = (CUdeviceptr)(uintptr_t)data;
    allocated[*address] = bytes;
    in_use += bytes;
    return CUDA_SUCCESS;
}
static CUresult free_memory(CUdeviceptr address) {
    all_lines.wait(); /* as the driver does: what streams were given may use it */
    std::lock_guard<std::mutex> held(lock);
    if (is_forbidden())
        return 900;
    auto found = allocated.find(address);
    if (found == allocated.end())
        return CUDA_ERROR_INVALID_HANDLE;
    in_use -= found->second;
    allocated.erase(found);
    free((void *)(uintptr_t)address);
    return CUDA_SUCCESS;
}
static std::map<CUdeviceptr, size_t> pinned; /* under the lock */
static CUresult allocate_host(void **data, size_t bytes, unsigned) {
    std::lock_guard<std::mutex> held(lock);
    if (is_forbidden())
        return 900;
    *data = aligned_alloc(512, (bytes + 511) / 512 * 512);
    pinned[(CUdeviceptr)(uintptr_t)*data] = bytes;
    objects++;
    return *data != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
static CUresult free_host(void *data) {
    all_lines.wait(); /* likewise */
    std::lock_guard<std::mutex> held(lock);
    pinned.erase((CUdeviceptr)(uintptr_t)data);
    free(data);
    objects--;
    return CUDA_SUCCESS;
}
/* A page is registered once, as the driver has it. */
static CUresult register_host(void *data, size_t bytes, unsigned) {
    std::lock_guard<std::mutex> held(lock);
    const CUdeviceptr page = 4096, first = (CUdeviceptr)(uintptr_t)data / page,
                      last = ((CUdeviceptr)(uintptr_t)data + bytes - 1) / page;
    if (data == nullptr || bytes == 0)
        return CUDA_ERROR_INVALID_HANDLE;
    for (const auto &each : pinned)
        if (each.first / page <= last && (each.first + each.second - 1) / page >= first)
            return CUDA_ERROR_INVALID_HANDLE;
    pinned[(CUdeviceptr)(uintptr_t)data] = bytes;
    objects++;
    return CUDA_SUCCESS;
}
static CUresult unregister_host(void *data) {
    std::lock_guard<std::mutex> held(lock);
    if (pinned.erase((CUdeviceptr)(uintptr_t)data) == 0)
        return CUDA_ERROR_INVALID_HANDLE;
    objects--;
    return CUDA_SUCCESS;
}
static CUresult device_pointer(CUdeviceptr *here, void *data, unsigned) {
    *here = (CUdeviceptr)(uintptr_t)data;
    return CUDA_SUCCESS;
}
/* ---- memory that ranks share ---- */

static const size_t granule = (size_t)2 << 20;
static std::map<CUdeviceptr, std::pair<size_t, int>> mapped; /* bytes and descriptor, by address */

static CUresult granularity(size_t *bytes, const CUmemAllocationProp *, int) {
    *bytes = granule;
    return CUDA_SUCCESS;
}
static CUresult create_memory(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                              unsigned long long) {
    if (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC)
        return CUDA_ERROR_NOT_SUPPORTED;
    int file = memfd_create("standin", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUmemGenericAllocationHandle)file + 1;
    return CUDA_SUCCESS;
}
static CUresult release_memory(CUmemGenericAllocationHandle handle) {
    return close((int)handle - 1) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
static CUresult reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long) {
    size_t aligned = alignment > granule ? alignment : granule;
    char *all = (char *)mmap(nullptr, bytes + aligned, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *begin = (char *)(((uintptr_t)all + aligned - 1) / aligned * aligned);
    if (begin > all)
        munmap(all, (size_t)(begin - all));
    munmap(begin + bytes, (size_t)(all + aligned - begin));
    *address = (CUdeviceptr)(uintptr_t)begin;
    objects++;
    return CUDA_SUCCESS;
}
extern "C" __attribute__((visibility("default"))) int standin_mappings(void) {
    std::lock_guard<std::mutex> held(lock);
    return (int)mapped.size();
}
static CUresult unreserve(CUdeviceptr address, size_t bytes) {
    objects--;
    return munmap((void *)(uintptr_t)address, bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
static CUresult map_memory(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                           unsigned long long) {
    if (fails_in("cuMemMap"))
        return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard<std::mutex> held(lock);
    int file = (int)handle - 1;
    if (mmap((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, (off_t)offset) ==
        MAP_FAILED)
        return CUDA_ERROR_INVALID_HANDLE;
    mapped[address] = { bytes, fcntl(file, F_DUPFD_CLOEXEC, 0) };
    return CUDA_SUCCESS;
}
/* As the driver: the range must be whole mappings without a gap, or nothing happens. */
static CUresult unmap_memory(CUdeviceptr address, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    CUdeviceptr next = address;
    for (auto found = mapped.find(address); found != mapped.end() && found->first == next && next < address + bytes;
         found++)
        next += found->second.first;
    if (next != address + bytes)
        return 1; /* invalid value */
    for (auto found = mapped.lower_bound(address); found != mapped.end() && found->first < address + bytes;) {
        close(found->second.second);
        found = mapped.erase(found);
    }
    mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return CUDA_SUCCESS;
}
static CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
    return CUDA_SUCCESS;
}
static CUresult export_memory(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    *(int *)shareable = fcntl((int)handle - 1, F_DUPFD_CLOEXEC, 0);
    return CUDA_SUCCESS;
}
static CUresult import_memory(CUmemGenericAllocationHandle *handle, void *shareable, int type) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    *handle = (CUmemGenericAllocationHandle)fcntl((int)(intptr_t)shareable, F_DUPFD_CLOEXEC, 0) + 1;
    return CUDA_SUCCESS;
}
static CUresult retain_memory(CUmemGenericAllocationHandle *handle, void *address) {
    std::lock_guard<std::mutex> held(lock);
    auto found = mapped.upper_bound((CUdeviceptr)(uintptr_t)address);
    if (found == mapped.begin())
        return CUDA_ERROR_INVALID_HANDLE;
    --found;
    *handle = (CUmemGenericAllocationHandle)fcntl(found->second.second, F_DUPFD_CLOEXEC, 0) + 1;
    return CUDA_SUCCESS;
}

/* The piece of memory that an address lies in, as it was mapped. */
static CUresult address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    std::lock_guard<std::mutex> held(lock);
    auto found = mapped.upper_bound(address);
    if (found == mapped.begin() || address >= (--found)->first + found->second.first)
        return CUDA_ERROR_INVALID_HANDLE;
    *base = found->first;
    *bytes = found->second.first;
    return CUDA_SUCCESS;
}

template <class Value>
static bool lies_in(const std::map<CUdeviceptr, Value> &places, CUdeviceptr address,
                    size_t (*bytes_of)(const Value &)) {
    auto found = places.upper_bound(address);
    if (found == places.begin())
        return false;
    --found;
    return address < found->first + bytes_of(found->second);
}
/* Whose memory it is: the device's, the host's (1), where it is pinned, or nobody's that the driver knows (0). */
static int type_of(CUdeviceptr address) {
    std::lock_guard<std::mutex> held(lock);
    bool known = lies_in<size_t>(allocated, address, [](const size_t &bytes) { return bytes; }) ||
                 lies_in<std::pair<size_t, int>>(mapped, address,
                                                 [](const std::pair<size_t, int> &place) { return place.first; });
    bool of_host = lies_in<size_t>(pinned, address, [](const size_t &bytes) { return bytes; });
    return known ? CU_MEMORYTYPE_DEVICE : of_host ? 1 : 0;
}
static CUresult pointer_attributes(unsigned count, int *attributes, void **values, CUdeviceptr address) {
    int type = type_of(address);
    for (unsigned i = 0; i < count; i++)
        *(int *)values[i] = attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? type : 0;
    return CUDA_SUCCESS;
}

/* ---- streams, and what is captured of them ---- */

typedef std::vector<std::function<void()>> notes;
/* Of what was captured, or of kernels that were added one by one. */
struct graph_state {
    notes given;
    bool of_nodes;
};
struct capture {
    notes given;
    bool ended;
    unsigned long long number;
};
struct stream_state {
    std::shared_ptr<capture> into;       /* null: it runs what it is given */
    int mode;                            /* of the capture that it began */
    std::shared_ptr<standin::line> line; /* where streams are apart */
};
struct event_state {
    std::shared_ptr<capture> into;
    std::shared_ptr<standin::line> line; /* null: not recorded, or streams are not apart */
    uint64_t place;
};

static std::shared_ptr<standin::line> line_of(CUstream stream) {
    return (uintptr_t)stream <= 2 ? line_of_none : ((stream_state *)stream)->line;
}
static void wait_for_stream(CUstream stream) {
    if (!standin::streams_are_apart())
        return;
    auto line = line_of(stream);
    line->wait(line->end());
}

static std::shared_ptr<capture> capture_of(CUstream stream) {
    std::lock_guard<std::mutex> held(lock);
    auto into = (uintptr_t)stream <= 2 ? nullptr : ((stream_state *)stream)->into;
    return into != nullptr && into->ended ? nullptr : into;
}
/* Runs it, or notes it where the stream is captured. */
static CUresult give(CUstream stream, std::function<void()> what) {
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    auto into = capture_of(stream);
    if (into != nullptr)
        into->given.push_back(what);
    else if (standin::streams_are_apart())
        line_of(stream)->give(what);
    else
        what();
    return CUDA_SUCCESS;
}

/* For stand-ins of libraries that put work into streams: 1 where the stream is captured, and `run` will be called with
 * a copy of the argument when the graph is launched; 0: the caller shall do it now. */
extern "C" __attribute__((visibility("default"))) int standin_cuda_give(CUstream stream, void (*run)(void *),
                                                                        const void *argument, size_t bytes) {
    auto into = capture_of(stream);
    if (into == nullptr) {
        wait_for_stream(stream);
        return 0;
    }
    auto copy = std::shared_ptr<void>(malloc(bytes), free);
    memcpy(copy.get(), argument, bytes);
    into->given.push_back([=] { run(copy.get()); });
    return 1;
}

/* ---- streams that are held up: nothing counts as over, and marks are not made ---- */

static std::mutex hold_lock;
static int holders;                             /* under hold_lock */
static std::vector<std::function<void()>> kept; /* likewise */

extern "C" __attribute__((visibility("default"))) void standin_cuda_hold(int more) {
    std::lock_guard<std::mutex> held(hold_lock);
    holders += more;
    if (holders > 0)
        return;
    for (auto &each : kept)
        each();
    kept.clear();
}
static bool is_held() {
    std::lock_guard<std::mutex> held(hold_lock);
    return holders > 0;
}

/* A word as a whole: kernels may be looking at it. */
static void move(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    if (bytes == sizeof(uint32_t) && ((to | from) & 3) == 0)
        __atomic_store_n((uint32_t *)(uintptr_t)to, *(const uint32_t *)(uintptr_t)from, __ATOMIC_RELAXED);
    else
        memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
}
/* A copy from or to memory of the host that is not pinned is over when the call returns, as the driver has it. */
static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    CUresult result = give(stream, [=] { move(to, from, bytes); });
    if (result == CUDA_SUCCESS && standin::streams_are_apart() && capture_of(stream) == nullptr &&
        (type_of(to) == 0 || type_of(from) == 0))
        wait_for_stream(stream);
    return result;
}
static CUresult copy_in(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    return copy(to, (CUdeviceptr)(uintptr_t)from, bytes, stream);
}
static CUresult copy_out(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy((CUdeviceptr)(uintptr_t)to, from, bytes, stream);
}
static CUresult clear(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    return give(stream, [=] { memset((void *)(uintptr_t)to, value, bytes); });
}
static CUresult clear_words(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    return give(stream, [=] {
        for (size_t i = 0; i < count; i++)
            ((unsigned *)(uintptr_t)to)[i] = value;
    });
}
static CUresult write_word(CUstream stream, CUdeviceptr to, uint32_t value, unsigned) {
    return give(stream, [=] { __atomic_store_n((uint32_t *)(uintptr_t)to, value, __ATOMIC_RELEASE); });
}

/* The handle of the stream that was ended last is given out first, as the driver may do. */
static auto &ended_streams = *new std::vector<stream_state *>; /* under the lock; never freed */
static CUresult make_stream(CUstream *stream, unsigned) {
    std::lock_guard<std::mutex> held(lock);
    stream_state *made = ended_streams.empty() ? new stream_state : ended_streams.back();
    if (!ended_streams.empty())
        ended_streams.pop_back();
    *made = { nullptr, 0, all_lines.make() };
    *stream = (CUstream)made;
    objects++;
    return CUDA_SUCCESS;
}
static CUresult make_stream_of(CUstream *stream, unsigned flags, int) {
    return make_stream(stream, flags);
}
static CUresult end_stream(CUstream stream) {
    line_of(stream)->close();
    std::lock_guard<std::mutex> held(lock);
    ((stream_state *)stream)->into = nullptr;
    ended_streams.push_back((stream_state *)stream);
    objects--;
    return CUDA_SUCCESS;
}
static CUresult stream_id(CUstream stream, unsigned long long *id) {
    *id = (unsigned long long)(uintptr_t)stream;
    return CUDA_SUCCESS;
}
static CUresult query_stream(CUstream stream) {
    if (is_held())
        return CUDA_ERROR_NOT_READY;
    if (capture_of(stream) != nullptr)
        return 900;
    auto line = line_of(stream);
    return line->has_passed(line->end()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
static CUresult of_stream(CUstream stream) {
    if (fails_in("cuStreamSynchronize"))
        return 999;
    if (capture_of(stream) != nullptr)
        return 900;
    wait_for_stream(stream);
    return CUDA_SUCCESS;
}
static CUresult run_on_host(CUstream stream, void (*function)(void *), void *argument) {
    return give(stream, [=] { function(argument); });
}
static CUresult capture_info(CUstream stream, int *status, unsigned long long *id, void **, const void **, size_t *) {
    auto into = capture_of(stream);
    *status = into != nullptr;
    *id = into != nullptr ? into->number : 0;
    return CUDA_SUCCESS;
}
static CUresult begin_capture(CUstream stream, int mode) {
    std::lock_guard<std::mutex> held(lock);
    if ((uintptr_t)stream <= 2)
        return 900;
    captures_for_all += mode == FOR_ALL;
    captures_for_thread += mode == FOR_THREAD;
    ((stream_state *)stream)->mode = mode;
    ((stream_state *)stream)->into = std::make_shared<capture>();
    static unsigned long long captures;
    ((stream_state *)stream)->into->ended = false;
    ((stream_state *)stream)->into->number = ++captures;
    return CUDA_SUCCESS;
}
static CUresult end_capture(CUstream stream, CUgraph *graph) {
    std::lock_guard<std::mutex> held(lock);
    auto into = ((stream_state *)stream)->into;
    if (into == nullptr)
        return 901;
    ((stream_state *)stream)->into = nullptr;
    captures_for_all -= ((stream_state *)stream)->mode == FOR_ALL;
    captures_for_thread -= ((stream_state *)stream)->mode == FOR_THREAD;
    *graph = (CUgraph) new graph_state{ into->given, false };
    into->given.clear();
    into->ended = true; /* for the streams that came to it too */
    return captures_for_all.load() == 0 && broken.exchange(false) ? 901 : CUDA_SUCCESS;
}
static CUresult exchange_mode(int *mode) {
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
static CUresult instantiate(CUgraphExec *runnable, CUgraph graph, unsigned long long) {
    if (is_forbidden()) /* while another stream is captured */
        return 900;
    *runnable = (CUgraphExec) new std::shared_ptr<graph_state>(new graph_state(*(graph_state *)graph));
    return CUDA_SUCCESS;
}
static thread_local CUresult graph_result; /* of a kernel that a graph was given by itself, and not by a capture */
static CUresult launch_graph(CUgraphExec runnable, CUstream stream) {
    auto graph = *(std::shared_ptr<graph_state> *)runnable;
    if (!graph->of_nodes)
        return give(stream, [=] {
            for (auto &each : graph->given)
                each();
        });
    wait_for_stream(stream); /* parameters may be others when the call has returned */
    graph_result = CUDA_SUCCESS;
    for (auto &each : graph->given)
        each();
    return graph_result;
}
static CUresult end_runnable(CUgraphExec runnable) {
    delete (std::shared_ptr<graph_state> *)runnable; /* a stream may still run it */
    return CUDA_SUCCESS;
}
static CUresult end_graph(CUgraph graph) {
    delete (graph_state *)graph;
    return CUDA_SUCCESS;
}

/* A stream that waits for an event of a capture is captured with it, until that ends. */
static CUresult wait_event(CUstream stream, CUevent event, unsigned) {
    std::unique_lock<std::mutex> held(lock);
    auto into = ((event_state *)event)->into;
    if (into != nullptr && (uintptr_t)stream > 2)
        ((stream_state *)stream)->into = into;
    auto line = ((event_state *)event)->line;
    uint64_t place = ((event_state *)event)->place;
    held.unlock();
    if (into == nullptr && line != nullptr && capture_of(stream) == nullptr)
        line_of(stream)->give([=] { line->wait(place); });
    return CUDA_SUCCESS;
}
static CUresult make_event(CUevent *event, unsigned) {
    *event = (CUevent) new event_state{ nullptr, nullptr, 0 };
    objects++;
    return CUDA_SUCCESS;
}
static CUresult record(CUevent event, CUstream stream) {
    auto into = capture_of(stream);
    std::lock_guard<std::mutex> held(lock);
    ((event_state *)event)->into = into;
    ((event_state *)event)->line = into == nullptr && standin::streams_are_apart() ? line_of(stream) : nullptr;
    ((event_state *)event)->place = line_of(stream)->end();
    return CUDA_SUCCESS;
}
static CUresult query(CUevent event) {
    if (is_forbidden())
        return 900;
    if (is_held())
        return CUDA_ERROR_NOT_READY;
    std::lock_guard<std::mutex> held(lock);
    if (((event_state *)event)->into != nullptr)
        return 907;
    auto &line = ((event_state *)event)->line;
    return ready && (line == nullptr || line->has_passed(((event_state *)event)->place)) ? CUDA_SUCCESS
                                                                                         : CUDA_ERROR_NOT_READY;
}
static CUresult of_event(CUevent event) {
    if (fails_in("cuEventSynchronize"))
        return 999;
    std::unique_lock<std::mutex> held(lock);
    auto line = ((event_state *)event)->line;
    uint64_t place = ((event_state *)event)->place;
    held.unlock();
    if (line != nullptr)
        line->wait(place);
    return CUDA_SUCCESS;
}
static CUresult end_event(CUevent event) {
    delete (event_state *)event;
    objects--;
    return CUDA_SUCCESS;
}
static CUresult synchronize(void) {
    all_lines.wait();
    return CUDA_SUCCESS;
}

/* Modules that were written at run time are libraries of the CPU: see nvrtc.cpp. Others are the kernels above. */
struct written {
    void *library;
    std::map<std::string, emulated::kernel> kernels;
};
/* Under the lock. Nobody destroys them when the process ends: a stream may still run a kernel of theirs. */
static auto &modules = *new std::map<CUmodule, std::unique_ptr<written>>;

static size_t bytes_of_library(const void *image) {
    const auto *head = (const Elf64_Ehdr *)image;
    return memcmp(head->e_ident, ELFMAG, SELFMAG) == 0 &&
                   (head->e_machine == EM_X86_64 || head->e_machine == EM_AARCH64)
               ? head->e_shoff + (size_t)head->e_shnum * head->e_shentsize
               : 0;
}
static std::atomic<int> loaded; /* modules that are */
extern "C" __attribute__((visibility("default"))) int standin_modules(void) {
    return loaded;
}
static CUresult load(CUmodule *module, const void *image) {
    *module = (CUmodule)(uintptr_t)image;
    size_t bytes = bytes_of_library(image);
    loaded += bytes == 0;
    if (bytes == 0)
        return CUDA_SUCCESS;
    if (fails_in("cuModuleLoadData"))
        return CUDA_ERROR_OUT_OF_MEMORY;
    char path[] = "/tmp/tutti-standin-XXXXXX"; /* another name each time: the loader goes by names */
    int file = mkstemp(path);
    void *library =
        file >= 0 && write(file, image, bytes) == (ssize_t)bytes ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (file >= 0) {
        close(file);
        unlink(path);
    }
    if (library == nullptr)
        return 200; /* invalid image */
    std::lock_guard<std::mutex> held(lock);
    *module = (CUmodule)library;
    modules[*module].reset(new written{ library, {} });
    loaded++;
    return CUDA_SUCCESS;
}
static CUresult unload(CUmodule module) {
    all_lines.wait(); /* its kernels may still run */
    std::lock_guard<std::mutex> held(lock);
    loaded--;
    auto found = modules.find(module);
    if (found != modules.end()) {
        dlclose(found->second->library);
        modules.erase(found);
    }
    return CUDA_SUCCESS;
}
static CUresult find(CUfunction *function, CUmodule module, const char *name) {
    if (fails_in("cuModuleGetFunction") || fails_in(name))
        return CUDA_ERROR_INVALID_HANDLE;
    std::lock_guard<std::mutex> held(lock);
    auto found = modules.find(module);
    *function = nullptr;
    if (found == modules.end()) {
        *function = (CUfunction)(void *)emulated::find(name);
    } else if (void *run = dlsym(found->second->library, name)) {
        auto &kernel = found->second->kernels[name];
        kernel = { nullptr, 25 * sizeof(void *), false, (emulated::loop *)run };
        *function = (CUfunction)(void *)&kernel;
    }
    return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
/* Kernels that were loaded before their first launch; under the lock. */
static std::set<const void *> loaded_early;
static CUresult load_function(CUfunction function) {
    std::lock_guard<std::mutex> held(lock);
    loaded_early.insert((const void *)function);
    return CUDA_SUCCESS;
}
extern "C" __attribute__((visibility("default"))) int standin_is_loaded(const char *name) {
    std::lock_guard<std::mutex> held(lock);
    return loaded_early.count((const void *)emulated::find(name)) != 0;
}
/* Those of the images are one list; others are found by name alone. */
static CUresult function_count(unsigned *count, CUmodule module) {
    std::lock_guard<std::mutex> held(lock);
    *count = modules.count(module) != 0 ? 0 : (unsigned)emulated::table().size();
    return CUDA_SUCCESS;
}
static CUresult list_functions(CUfunction *functions, unsigned count, CUmodule) {
    for (auto &each : emulated::table())
        if (count-- > 0)
            *functions++ = (CUfunction)(void *)&each.second;
    return CUDA_SUCCESS;
}
static CUresult occupancy(int *blocks, CUfunction, int, size_t) {
    *blocks = 1;
    return CUDA_SUCCESS;
}
/* Thread blocks that have a processor for themselves, by what they take of its memory (100 KiB in the smallest), and
 * stay until all of them are there: those of all ranks that are threads. On a GPU too many of them would wait for each
 * other. */
static const unsigned half_of_processor = 50 << 10;
static std::atomic<int> blocks_that_stay;
static void run_staying(const emulated::kernel *kernel, unsigned blocks, unsigned threads, const void *args) {
    if (blocks_that_stay.fetch_add((int)blocks) + (int)blocks > processors) {
        fprintf(stderr, "the stand-in for the driver: more thread blocks than processors, of which each wants one\n");
        abort();
    }
    emulated::run_fibers(kernel->run, blocks, threads, args);
    blocks_that_stay -= (int)blocks;
}
static void run_kernel(const emulated::kernel *kernel, unsigned blocks, unsigned threads, const void *args,
                       unsigned shared_bytes = 0) {
    if (kernel->fibers && shared_bytes > half_of_processor)
        return run_staying(kernel, blocks, threads, args);
    if (kernel->fibers)
        return emulated::run_fibers(kernel->run, blocks, threads, args);
    for (unsigned block = 0; block < blocks; block++) {
        emulated::here = { (int64_t)block, (int64_t)blocks, (int)threads };
        if (kernel->written != nullptr)
            kernel->written(args, (int64_t)block, (int64_t)blocks);
        else
            kernel->run(args);
    }
}
/* A mark that a watcher looks at: not before the stream goes on. */
static bool keep_mark(const emulated::kernel *kernel, const void *args) {
    std::lock_guard<std::mutex> held(hold_lock);
    if (holders == 0 || kernel != emulated::find("tutti_mark"))
        return false;
    auto copy = std::shared_ptr<void>(malloc(kernel->bytes), free);
    memcpy(copy.get(), args, kernel->bytes);
    kept.push_back([=] { run_kernel(kernel, 1, 1, copy.get()); });
    return true;
}
/* What a launch may fail by; it is counted. */
static CUresult begin_launch() {
    if (depth == 0 || contexts[depth - 1] != primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (fails_in("cuLaunchKernel"))
        return CUDA_ERROR_OUT_OF_MEMORY;
    __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}
static CUresult launch(CUfunction function, unsigned grid_x, unsigned, unsigned, unsigned block_x, unsigned, unsigned,
                       unsigned shared_bytes, CUstream stream, void **parameters, void **) {
    const auto *kernel = (const emulated::kernel *)(void *)function;
    CUresult result = begin_launch();
    if (result != CUDA_SUCCESS)
        return result;
    if (grid_x == 0 || block_x == 0)
        return 1; /* invalid value */
    bool captured = capture_of(stream) != nullptr;
    if (!captured && keep_mark(kernel, parameters[0]))
        return CUDA_SUCCESS;
    if (!captured && !standin::streams_are_apart()) {
        run_kernel(kernel, grid_x, block_x, parameters[0], shared_bytes);
        return CUDA_SUCCESS;
    }
    auto args = std::shared_ptr<void>(aligned_alloc(64, (kernel->bytes + 63) / 64 * 64), free);
    memcpy(args.get(), parameters[0], kernel->bytes);
    return give(stream, [=] { run_kernel(kernel, grid_x, block_x, args.get(), shared_bytes); });
}
/* A node of a graph: a launch, whose parameters are copied when they are set. */
struct kernel_node {
    CUDA_KERNEL_NODE_PARAMS kernel;
    std::vector<char> args;
};
static void set_node(kernel_node *node, const CUDA_KERNEL_NODE_PARAMS *kernel) {
    size_t bytes = ((const emulated::kernel *)(void *)kernel->function)->bytes;
    node->kernel = *kernel;
    node->args.assign((const char *)kernel->parameters[0], (const char *)kernel->parameters[0] + bytes);
}
static CUresult make_graph(CUgraph *graph, unsigned) {
    *graph = (CUgraph) new graph_state{ {}, true };
    return CUDA_SUCCESS;
}
static CUresult add_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *, size_t,
                         const CUDA_KERNEL_NODE_PARAMS *kernel) {
    auto added = std::make_shared<kernel_node>();
    set_node(added.get(), kernel);
    ((graph_state *)graph)->given.push_back([=] {
        const auto *function = (const emulated::kernel *)(void *)added->kernel.function;
        graph_result = begin_launch(); /* no stream gets it: the graph has the place in one */
        if (graph_result == CUDA_SUCCESS && !keep_mark(function, added->args.data()))
            run_kernel(function, added->kernel.blocks[0], added->kernel.threads[0], added->args.data());
    });
    *node = (CUgraphNode)added.get();
    return CUDA_SUCCESS;
}
static CUresult set_node_of(CUgraphExec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *kernel) {
    if (fails_in("cuGraphExecKernelNodeSetParams"))
        return 1; /* invalid value */
    set_node((kernel_node *)node, kernel);
    return CUDA_SUCCESS;
}
/* What a kernel may have changes nothing here. */
static CUresult set_attribute(CUfunction, int, int) {
    return CUDA_SUCCESS;
}
/* Of matrices whose rows go to shared memory 128 bytes at a time, as the kernels here have it. */
static CUresult encode_map(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int, int) {
    uint32_t element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
    if (rank != 2 || (uintptr_t)map % 64 != 0 || (uintptr_t)address % 16 != 0 || strides[0] % 16 != 0 ||
        box[0] * element != 128 || box[1] == 0 || box[1] > 256 || steps[0] != 1 || steps[1] != 1 || interleave != 0 ||
        swizzle != CU_TENSOR_MAP_SWIZZLE_128B)
        return 1; /* invalid value */
    *(standin::tensor_map *)map = { (uint8_t *)address,  (int64_t)sizes[0], (int64_t)sizes[1],
                                    (int64_t)strides[0], element,           box[1] };
    return CUDA_SUCCESS;
}
/* With attributes: those that change no result here, since kernels run one after the other. */
static CUresult launch_with(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    for (unsigned i = 0; i < config->attribute_count; i++) {
        switch (config->attributes[i].id) {
        case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
        case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
            break;
        case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            if (config->attributes[i].value.cluster[0] != 1)
                return 1; /* there are none */
            break;
        default:
            return 1; /* invalid value */
        }
    }
    return launch(function, config->grid_x, config->grid_y, config->grid_z, config->block_x, config->block_y,
                  config->block_z, config->shared_bytes, config->stream, parameters, extra);
}

/* ---- by name ---- */

static const struct {
    const char *name;
    void *function;
} known[] = {
    { "cuInit", (void *)counted<init>::call },
    { "cuDriverGetVersion", (void *)counted<version>::call },
    { "cuDeviceGet", (void *)counted<device>::call },
    { "cuDeviceGetCount", (void *)counted<count>::call },
    { "cuDeviceGetAttribute", (void *)counted<attribute>::call },
    { "cuDevicePrimaryCtxRetain", (void *)counted<retain>::call },
    { "cuDevicePrimaryCtxRelease", (void *)release },
    { "cuCtxGetCurrent", (void *)counted<current>::call },
    { "cuCtxGetDevice", (void *)counted<current_device>::call },
    { "cuCtxPushCurrent", (void *)counted<push>::call },
    { "cuCtxPopCurrent", (void *)pop },
    { "cuCtxSynchronize", (void *)synchronize },
    { "cuGetErrorName", (void *)error_name },
    { "cuGetErrorString", (void *)error_name },
    { "cuMemAlloc", (void *)counted<allocate>::call },
    { "cuMemFree", (void *)free_memory },
    { "cuMemHostAlloc", (void *)counted<allocate_host>::call },
    { "cuMemFreeHost", (void *)free_host },
    { "cuMemHostRegister", (void *)counted<register_host>::call },
    { "cuMemHostUnregister", (void *)unregister_host },
    { "cuMemHostGetDevicePointer", (void *)counted<device_pointer>::call },
    { "cuMemcpyAsync", (void *)counted<copy>::call },
    { "cuMemsetD8Async", (void *)counted<clear>::call },
    { "cuStreamCreate", (void *)counted<make_stream>::call },
    { "cuStreamDestroy", (void *)end_stream },
    { "cuStreamSynchronize", (void *)counted<of_stream>::call },
    { "cuStreamQuery", (void *)query_stream },
    { "cuStreamWaitEvent", (void *)counted<wait_event>::call },
    { "cuLaunchHostFunc", (void *)counted<run_on_host>::call },
    { "cuEventCreate", (void *)counted<make_event>::call },
    { "cuEventRecord", (void *)counted<record>::call },
    { "cuEventQuery", (void *)counted<query>::call },
    { "cuEventSynchronize", (void *)counted<of_event>::call },
    { "cuEventDestroy", (void *)end_event },
    { "cuModuleLoadData", (void *)counted<load>::call },
    { "cuModuleUnload", (void *)unload },
    { "cuModuleGetFunction", (void *)counted<find>::call },
    { "cuLaunchKernel", (void *)counted<launch>::call },
    { "cuFuncSetAttribute", (void *)counted<set_attribute>::call },
    { "cuLaunchKernelEx", (void *)counted<launch_with>::call },
    { "cuTensorMapEncodeTiled", (void *)counted<encode_map>::call },
    { "cuDeviceGetUuid", (void *)counted<uuid>::call },
    { "cuDeviceGetPCIBusId", (void *)counted<bus>::call },
    { "cuCtxSetCurrent", (void *)counted<set_context>::call },
    { "cuMemGetAllocationGranularity", (void *)counted<granularity>::call },
    { "cuMemCreate", (void *)counted<create_memory>::call },
    { "cuMemRelease", (void *)release_memory },
    { "cuMemAddressReserve", (void *)counted<reserve>::call },
    { "cuMemAddressFree", (void *)unreserve },
    { "cuMemMap", (void *)counted<map_memory>::call },
    { "cuMemUnmap", (void *)unmap_memory },
    { "cuMemSetAccess", (void *)counted<set_access>::call },
    { "cuMemExportToShareableHandle", (void *)counted<export_memory>::call },
    { "cuMemImportFromShareableHandle", (void *)counted<import_memory>::call },
    { "cuMemRetainAllocationHandle", (void *)counted<retain_memory>::call },
    { "cuMemGetAddressRange", (void *)counted<address_range>::call },
    { "cuMemcpyHtoDAsync", (void *)counted<copy_in>::call },
    { "cuMemcpyDtoHAsync", (void *)counted<copy_out>::call },
    { "cuMemsetD32Async", (void *)counted<clear_words>::call },
    { "cuPointerGetAttributes", (void *)counted<pointer_attributes>::call },
    { "cuStreamCreateWithPriority", (void *)counted<make_stream_of>::call },
    { "cuStreamGetId", (void *)counted<stream_id>::call },
    { "cuStreamGetCaptureInfo", (void *)counted<capture_info>::call },
    { "cuStreamBeginCapture", (void *)counted<begin_capture>::call },
    { "cuStreamEndCapture", (void *)counted<end_capture>::call },
    { "cuThreadExchangeStreamCaptureMode", (void *)counted<exchange_mode>::call },
    { "cuGraphInstantiateWithFlags", (void *)counted<instantiate>::call },
    { "cuGraphCreate", (void *)counted<make_graph>::call },
    { "cuGraphAddKernelNode", (void *)counted<add_node>::call },
    { "cuGraphExecKernelNodeSetParams", (void *)counted<set_node_of>::call },
    { "cuGraphLaunch", (void *)counted<launch_graph>::call },
    { "cuGraphExecDestroy", (void *)end_runnable },
    { "cuGraphDestroy", (void *)end_graph },
    { "cuStreamWriteValue32", (void *)counted<write_word>::call },
    { "cuFuncLoad", (void *)counted<load_function>::call },
    { "cuModuleGetFunctionCount", (void *)counted<function_count>::call },
    { "cuModuleEnumerateFunctions", (void *)counted<list_functions>::call },
    { "cuOccupancyMaxActiveBlocksPerMultiprocessor", (void *)counted<occupancy>::call },
};

/* The function that this thread called the nth time; NULL: it has not made so many calls. */
extern "C" __attribute__((visibility("default"))) const char *standin_call_made(int nth) {
    for (const auto &each : known)
        if (nth > 0 && (size_t)nth <= calls_made.size() && each.function == calls_made[(size_t)nth - 1])
            return each.name;
    return nullptr;
}

/* Everything that is not among them. */
static CUresult other(void) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

extern "C" __attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char *name, void **function, int,
                                                                               uint64_t, int *) {
    *function = (void *)other;
    for (const auto &each : known)
        if (strcmp(each.name, name) == 0)
            *function = each.function;
    return CUDA_SUCCESS;
}

/* PyTorch looks for this one with the loader. */
extern "C" __attribute__((visibility("default"))) CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags,
                                                                                      int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
