/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for the CUDA driver, as a library libcuda.so.1: one GPU whose memory is the host's, with physical memory
 * that can be mapped several times, and the kernels of the CUDA backend that tests need, run on the CPU. Everything is
 * over when a call returns, but a stream can be held up: standin_cuda_hold(1) until standin_cuda_hold(0).
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../cuda/emulated/emulated.h"
#include "driver.h"
#include "params.h"

#define EXPORT __attribute__((visibility("default")))
#define PAGE ((size_t)65536)

/* ---- memory ---- */

/* Physical memory: a descriptor, and who has it. */
typedef struct physical {
    int fd, references;
    size_t bytes;
} physical;

/* Where device memory lies in this process. */
typedef struct place {
    CUdeviceptr address;
    size_t bytes;
    physical *memory; /* NULL: by cuMemAlloc */
    struct place *next;
} place;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static place *places; /* under lock */

static place *find(CUdeviceptr address) {
    place *at = places;
    while (at != NULL && (address < at->address || address >= at->address + at->bytes))
        at = at->next;
    return at;
}

static void add(CUdeviceptr address, size_t bytes, physical *memory) {
    place *made = malloc(sizeof *made);
    *made = (place){ address, bytes, memory, places };
    places = made;
}

static void drop(physical *memory) {
    if (memory != NULL && --memory->references == 0) {
        close(memory->fd);
        free(memory);
    }
}

static bool take_out(CUdeviceptr address) {
    for (place **link = &places; *link != NULL; link = &(*link)->next) {
        place *at = *link;
        if (at->address != address)
            continue;
        *link = at->next;
        drop(at->memory);
        free(at);
        return true;
    }
    return false;
}

static physical *handle_of(CUmemGenericAllocationHandle handle) {
    return (physical *)(uintptr_t)handle;
}

static CUresult granularity(size_t *bytes, const CUmemAllocationProp *prop, int option) {
    (void)prop;
    (void)option;
    *bytes = PAGE;
    return CUDA_SUCCESS;
}

static physical *make_physical(int fd, size_t bytes) {
    physical *made = malloc(sizeof *made);
    *made = (physical){ fd, 1, bytes };
    return made;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                       unsigned long long flags) {
    (void)flags;
    if (prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC)
        return CUDA_ERROR_NOT_PERMITTED;
    int fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)make_physical(fd, bytes);
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&lock);
    drop(handle_of(handle));
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                        unsigned long long flags) {
    (void)alignment;
    (void)hint;
    (void)flags;
    void *at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (CUdeviceptr)(uintptr_t)at;
    return at == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult free_address(CUdeviceptr address, size_t bytes) {
    munmap((void *)(uintptr_t)address, bytes);
    return CUDA_SUCCESS;
}

static CUresult map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags) {
    physical *memory = handle_of(handle);
    (void)flags;
    void *at = mmap((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory->fd,
                    (off_t)offset);
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    memory->references++;
    add(address, bytes, memory);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult unmap(CUdeviceptr address, size_t bytes) {
    pthread_mutex_lock(&lock);
    bool known = take_out(address);
    pthread_mutex_unlock(&lock);
    mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return known ? CUDA_SUCCESS : 1;
}

static CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *desc, size_t count) {
    (void)address;
    (void)bytes;
    (void)desc;
    (void)count;
    return CUDA_SUCCESS;
}

static CUresult share(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags) {
    (void)flags;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    *(int *)shareable = dup(handle_of(handle)->fd);
    return CUDA_SUCCESS;
}

static CUresult import(CUmemGenericAllocationHandle *handle, void *shareable, int type) {
    (void)type;
    int fd = dup((int)(intptr_t)shareable);
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)make_physical(fd, (size_t)lseek(fd, 0, SEEK_END));
    return CUDA_SUCCESS;
}

static CUresult retain(CUmemGenericAllocationHandle *handle, void *address) {
    pthread_mutex_lock(&lock);
    place *at = find((CUdeviceptr)(uintptr_t)address);
    if (at != NULL && at->memory != NULL)
        at->memory->references++;
    *handle = at != NULL ? (CUmemGenericAllocationHandle)(uintptr_t)at->memory : 0;
    pthread_mutex_unlock(&lock);
    return *handle != 0 ? CUDA_SUCCESS : 1;
}

static CUresult allocate(CUdeviceptr *address, size_t bytes) {
    void *made = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
    *address = (CUdeviceptr)(uintptr_t)made;
    pthread_mutex_lock(&lock);
    add(*address, bytes > 0 ? bytes : 1, NULL);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult free_memory(CUdeviceptr address) {
    pthread_mutex_lock(&lock);
    bool known = take_out(address);
    pthread_mutex_unlock(&lock);
    free((void *)(uintptr_t)address);
    return known ? CUDA_SUCCESS : 1;
}

static CUresult host_allocate(void **address, size_t bytes, unsigned flags) {
    (void)flags;
    *address = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *address != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult host_free(void *address) {
    free(address);
    return CUDA_SUCCESS;
}

static CUresult host_pointer(CUdeviceptr *device, void *host, unsigned flags) {
    (void)flags;
    *device = (CUdeviceptr)(uintptr_t)host;
    return CUDA_SUCCESS;
}

static CUresult pointer_attributes(unsigned count, int *attributes, void **values, CUdeviceptr address) {
    pthread_mutex_lock(&lock);
    bool known = find(address) != NULL;
    pthread_mutex_unlock(&lock);
    for (unsigned i = 0; i < count; i++)
        *(int *)values[i] = !known ? 0 : attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? CU_MEMORYTYPE_DEVICE : 0;
    return CUDA_SUCCESS;
}

/* ---- what is in a stream ---- */

/* What was launched while streams are held up. */
typedef struct launched {
    uint64_t *word;
    struct launched *next;
} launched;

static pthread_mutex_t stream_lock = PTHREAD_MUTEX_INITIALIZER;
static int held;          /* how many hold; under stream_lock */
static launched *waiting; /* marks, the last first; under stream_lock */

static void count_up(uint64_t *word) {
    __atomic_store_n(word, *word + 1, __ATOMIC_RELEASE);
}

EXPORT void standin_cuda_hold(int more);
void standin_cuda_hold(int more) {
    pthread_mutex_lock(&stream_lock);
    held += more;
    while (held == 0 && waiting != NULL) {
        launched *next = waiting->next;
        count_up(waiting->word);
        free(waiting);
        waiting = next;
    }
    pthread_mutex_unlock(&stream_lock);
}

static bool is_held(void) {
    pthread_mutex_lock(&stream_lock);
    bool now = held > 0;
    pthread_mutex_unlock(&stream_lock);
    return now;
}

static void mark(uint64_t *word) {
    pthread_mutex_lock(&stream_lock);
    if (held > 0) {
        launched *made = malloc(sizeof *made);
        *made = (launched){ word, waiting };
        waiting = made;
    } else {
        count_up(word);
    }
    pthread_mutex_unlock(&stream_lock);
}

static CUresult stream_query(CUstream stream) {
    (void)stream;
    return is_held() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static CUresult set8(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
    (void)stream;
    memset((void *)(uintptr_t)address, value, count);
    return CUDA_SUCCESS;
}

static CUresult set32(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
    (void)stream;
    for (size_t i = 0; i < count; i++)
        ((unsigned *)(uintptr_t)address)[i] = value;
    return CUDA_SUCCESS;
}

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    (void)stream;
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return CUDA_SUCCESS;
}

static CUresult copy_in(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    return copy(to, (CUdeviceptr)(uintptr_t)from, bytes, stream);
}

static CUresult copy_out(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy((CUdeviceptr)(uintptr_t)to, from, bytes, stream);
}

static CUresult write32(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    (void)flags;
    return set32(address, value, 1, stream);
}

static CUresult capture_info(CUstream stream, int *status, unsigned long long *id, void **graph,
                             const void **dependencies, size_t *count) {
    (void)stream;
    (void)graph;
    (void)dependencies;
    (void)count;
    *status = 0;
    *id = 0;
    return CUDA_SUCCESS;
}

static CUresult make_stream(CUstream *stream, unsigned flags) {
    (void)flags;
    *stream = malloc(16);
    return CUDA_SUCCESS;
}

static CUresult make_priority(CUstream *stream, unsigned flags, int priority) {
    (void)priority;
    return make_stream(stream, flags);
}

static CUresult destroy_stream(CUstream stream) {
    free(stream);
    return CUDA_SUCCESS;
}

static CUresult make_event(CUevent *event, unsigned flags) {
    (void)flags;
    *event = malloc(16);
    return CUDA_SUCCESS;
}

static CUresult destroy_event(CUevent event) {
    free(event);
    return CUDA_SUCCESS;
}

static CUresult event_query(CUevent event) {
    (void)event;
    return is_held() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

/* ---- kernels: a function is its name ---- */

static CUresult load_module(CUmodule *module, const void *image) {
    (void)image;
    *module = (CUmodule)(uintptr_t)1;
    return CUDA_SUCCESS;
}

static CUresult get_function(CUfunction *function, CUmodule module, const char *name) {
    (void)module;
    *function = (CUfunction)(uintptr_t)name; /* the backend's names are constants */
    return CUDA_SUCCESS;
}

static CUresult occupancy(int *blocks, CUfunction function, int threads, size_t shared) {
    (void)function;
    (void)threads;
    (void)shared;
    *blocks = 1;
    return CUDA_SUCCESS;
}

static CUresult launch(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters,
                       void **extra) {
    const char *name = (const char *)function;
    (void)grid_y;
    (void)grid_z;
    (void)block_y;
    (void)block_z;
    (void)shared;
    (void)extra;
    if (strcmp(name, "tutti_mark") == 0) {
        mark((uint64_t *)(uintptr_t)((const tu_cuda_mark_args *)parameters[0])->word);
        return CUDA_SUCCESS;
    }
    if (strcmp(name, "tutti_copy") == 0) {
        const tu_cuda_copy_args *args = parameters[0];
        return copy(args->to, args->from, args->bytes, stream);
    }
    if (strcmp(name, "tutti_signal") != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    emulated_launch(EMULATED_SIGNAL, grid_x, block_x, parameters[0]);
    return CUDA_SUCCESS;
}

/* ---- the rest ---- */

static _Thread_local CUcontext contexts[16];
static _Thread_local int depth;

static CUresult fine(void) {
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

/* Each rank that asks sees a GPU of its own: NCCL wants one for each. */
static CUresult uuid(CUuuid *found, CUdevice ordinal) {
    static int asked; /* under lock */
    (void)ordinal;
    pthread_mutex_lock(&lock);
    memset(found, ++asked, sizeof *found);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult attribute(int *value, int which, CUdevice ordinal) {
    (void)ordinal;
    *value =
        which == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED || which == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
            ? 0
        : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9
                                                                : 4;
    return CUDA_SUCCESS;
}

static CUresult retain_context(CUcontext *context, CUdevice ordinal) {
    (void)ordinal;
    *context = (CUcontext)(uintptr_t)0x1000;
    return CUDA_SUCCESS;
}

static CUresult current(CUcontext *context) {
    *context = contexts[depth];
    return CUDA_SUCCESS;
}

static CUresult set_current(CUcontext context) {
    contexts[depth] = context;
    return CUDA_SUCCESS;
}

static CUresult context_device(CUdevice *found) {
    *found = 0;
    return CUDA_SUCCESS;
}

static CUresult push(CUcontext context) {
    if (context == NULL)
        return 1;
    contexts[++depth] = context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context) {
    *context = contexts[depth--];
    return CUDA_SUCCESS;
}

static CUresult name_error(CUresult result, const char **text) {
    (void)result;
    *text = "an error of the stand-in";
    return CUDA_SUCCESS;
}

static const struct {
    const char *name;
    void *function;
} functions[] = {
    { "cuInit", (void *)(uintptr_t)fine },
    { "cuDriverGetVersion", (void *)(uintptr_t)version },
    { "cuDeviceGet", (void *)(uintptr_t)device },
    { "cuDeviceGetCount", (void *)(uintptr_t)count },
    { "cuDeviceGetUuid", (void *)(uintptr_t)uuid },
    { "cuDeviceGetAttribute", (void *)(uintptr_t)attribute },
    { "cuDevicePrimaryCtxRetain", (void *)(uintptr_t)retain_context },
    { "cuCtxGetCurrent", (void *)(uintptr_t)current },
    { "cuCtxSetCurrent", (void *)(uintptr_t)set_current },
    { "cuCtxGetDevice", (void *)(uintptr_t)context_device },
    { "cuCtxPushCurrent", (void *)(uintptr_t)push },
    { "cuCtxPopCurrent", (void *)(uintptr_t)pop },
    { "cuGetErrorName", (void *)(uintptr_t)name_error },
    { "cuGetErrorString", (void *)(uintptr_t)name_error },
    { "cuMemGetAllocationGranularity", (void *)(uintptr_t)granularity },
    { "cuMemCreate", (void *)(uintptr_t)create },
    { "cuMemRelease", (void *)(uintptr_t)release },
    { "cuMemAddressReserve", (void *)(uintptr_t)reserve },
    { "cuMemAddressFree", (void *)(uintptr_t)free_address },
    { "cuMemMap", (void *)(uintptr_t)map },
    { "cuMemUnmap", (void *)(uintptr_t)unmap },
    { "cuMemSetAccess", (void *)(uintptr_t)set_access },
    { "cuMemExportToShareableHandle", (void *)(uintptr_t)share },
    { "cuMemImportFromShareableHandle", (void *)(uintptr_t)import },
    { "cuMemRetainAllocationHandle", (void *)(uintptr_t)retain },
    { "cuMemsetD8Async", (void *)(uintptr_t)set8 },
    { "cuMemsetD32Async", (void *)(uintptr_t)set32 },
    { "cuMemcpyAsync", (void *)(uintptr_t)copy },
    { "cuMemcpyHtoDAsync", (void *)(uintptr_t)copy_in },
    { "cuMemcpyDtoHAsync", (void *)(uintptr_t)copy_out },
    { "cuMemAlloc", (void *)(uintptr_t)allocate },
    { "cuMemFree", (void *)(uintptr_t)free_memory },
    { "cuMemHostAlloc", (void *)(uintptr_t)host_allocate },
    { "cuMemFreeHost", (void *)(uintptr_t)host_free },
    { "cuMemHostGetDevicePointer", (void *)(uintptr_t)host_pointer },
    { "cuPointerGetAttributes", (void *)(uintptr_t)pointer_attributes },
    { "cuStreamCreate", (void *)(uintptr_t)make_stream },
    { "cuStreamCreateWithPriority", (void *)(uintptr_t)make_priority },
    { "cuStreamGetCaptureInfo", (void *)(uintptr_t)capture_info },
    { "cuStreamDestroy", (void *)(uintptr_t)destroy_stream },
    { "cuStreamQuery", (void *)(uintptr_t)stream_query },
    { "cuStreamWriteValue32", (void *)(uintptr_t)write32 },
    { "cuEventCreate", (void *)(uintptr_t)make_event },
    { "cuEventQuery", (void *)(uintptr_t)event_query },
    { "cuEventDestroy", (void *)(uintptr_t)destroy_event },
    { "cuModuleLoadData", (void *)(uintptr_t)load_module },
    { "cuModuleGetFunction", (void *)(uintptr_t)get_function },
    { "cuOccupancyMaxActiveBlocksPerMultiprocessor", (void *)(uintptr_t)occupancy },
    { "cuLaunchKernel", (void *)(uintptr_t)launch },
    { "cuStreamGetId", NULL },
    { "cuMulticastCreate", NULL },
};

/* What is not listed succeeds and does nothing. */
EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status);
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int asked, uint64_t flags, int *status) {
    (void)asked;
    (void)flags;
    (void)status;
    *function = (void *)(uintptr_t)fine;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].name, symbol) == 0)
            *function = functions[i].function;
    return CUDA_SUCCESS;
}
