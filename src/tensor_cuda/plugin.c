/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors on GPUs of NVIDIA: the plug-in's table, its devices, and what streams do: copies, events, kernels.
 *
 * A device is opened on first need, in its primary context. The context is current only while a call is under way: the
 * caller's own stays what it was.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensors.h"

tutti_status tu_gpu_error(const tu_gpus *gpus, CUresult result, const char *what) {
    return tu_cuda_driver_error(gpus->host, &gpus->driver, result, what);
}

static tutti_status checked(const tu_gpus *gpus, CUresult result, const char *what) {
    return __builtin_expect(result == CUDA_SUCCESS, 1) ? TUTTI_OK : tu_gpu_error(gpus, result, what);
}

/* ---- devices ---- */

static void unload_images(const tu_gpus *gpus, tu_gpu *gpu) {
    for (int i = 0; i < TU_TENSOR_IMAGES; i++)
        if (gpu->modules[i] != NULL)
            gpus->driver.cuModuleUnload(gpu->modules[i]);
    if (gpu->together != NULL)
        gpus->driver.cuModuleUnload(gpu->together);
    if (gpu->together_plain != NULL)
        gpus->driver.cuModuleUnload(gpu->together_plain);
    memset(gpu->modules, 0, sizeof gpu->modules);
    gpu->together = gpu->together_plain = NULL;
}

static CUresult load_images(tu_gpus *gpus, tu_gpu *gpu) {
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < TU_TENSOR_IMAGES && result == CUDA_SUCCESS; i++)
        result = gpus->driver.cuModuleLoadData(&gpu->modules[i], tu_gpu_images[i]);
    if (result == CUDA_SUCCESS)
        result = tu_gpu_together_load(gpus, gpu);
    if (result != CUDA_SUCCESS)
        unload_images(gpus, gpu);
    return result;
}

/* With the context current. */
static tutti_status equip(tu_gpus *gpus, tu_gpu *gpu, int index) {
    const tu_cuda_driver *driver = &gpus->driver;
    CUresult result = driver->cuMemHostAlloc((void **)&gpu->fault, sizeof *gpu->fault,
                                             CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    if (result != CUDA_SUCCESS)
        return tu_gpu_error(gpus, result, "allocating the place of faults");
    result = driver->cuMemHostGetDevicePointer(&gpu->fault_here, gpu->fault, 0);
    if (result != CUDA_SUCCESS) {
        driver->cuMemFreeHost(gpu->fault);
        return tu_gpu_error(gpus, result, "asking for the place of faults");
    }
    memset(gpu->fault, 0, sizeof *gpu->fault);
    result = load_images(gpus, gpu);
    if (result == CUDA_SUCCESS)
        return TUTTI_OK;
    driver->cuMemFreeHost(gpu->fault);
    tutti_status status = tu_gpu_error(gpus, result, "loading the kernels of tensors");
    gpus->host->error_append(" (cuda:%d has compute capability %d.x; TUTTI_CUDA_ARCHITECTURES at build time says for "
                             "which there are kernels)",
                             index, gpu->major);
    return status;
}

/* What kernels are chosen by, and how many of their blocks there are. */
static CUresult ask_attributes(const tu_gpus *gpus, tu_gpu *gpu) {
    const tu_cuda_driver *driver = &gpus->driver;
    CUresult result =
        driver->cuDeviceGetAttribute(&gpu->processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, gpu->device);
    if (result == CUDA_SUCCESS)
        result = driver->cuDeviceGetAttribute(&gpu->major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, gpu->device);
    if (result == CUDA_SUCCESS)
        result = driver->cuDeviceGetAttribute(&gpu->minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, gpu->device);
    return result;
}

/* NULL where no image has it, which is no error. */
static CUresult find_kernel(const tu_gpus *gpus, const tu_gpu *gpu, const char *name, void **kernel) {
    CUfunction function = NULL;
    for (int i = 0; i < TU_TENSOR_IMAGES && function == NULL; i++)
        if (gpus->driver.cuModuleGetFunction(&function, gpu->modules[i], name) != CUDA_SUCCESS)
            function = NULL;
    *kernel = function;
    return CUDA_SUCCESS;
}

static tutti_status open_gpu(tu_gpus *gpus, int index) {
    tu_gpu *gpu = &gpus->gpus[index];
    const tu_cuda_driver *driver = &gpus->driver;
    CUcontext popped;
    CUresult result = driver->cuDeviceGet(&gpu->device, index);
    if (result != CUDA_SUCCESS)
        return tu_gpu_error(gpus, result, "cuDeviceGet");
    result = ask_attributes(gpus, gpu);
    if (result != CUDA_SUCCESS)
        return tu_gpu_error(gpus, result, "cuDeviceGetAttribute");
    result = driver->cuDevicePrimaryCtxRetain(&gpu->context, gpu->device);
    if (result != CUDA_SUCCESS)
        return tu_gpu_error(gpus, result, "cuDevicePrimaryCtxRetain");
    tutti_status status = checked(gpus, driver->cuCtxPushCurrent(gpu->context), "cuCtxPushCurrent");
    if (status == TUTTI_OK) {
        status = equip(gpus, gpu, index);
        void *any = NULL;
        if (status == TUTTI_OK && find_kernel(gpus, gpu, "kernel_add_f32", &any) == CUDA_SUCCESS)
            tu_gpu_quick_begin(gpus, gpu, any);
        driver->cuCtxPopCurrent(&popped);
    }
    if (status != TUTTI_OK) {
        driver->cuDevicePrimaryCtxRelease(gpu->device);
        return status;
    }
    pthread_mutex_init(&gpu->lock, NULL);
    __atomic_store_n(&gpu->open, true, __ATOMIC_RELEASE); /* pairs with tu_gpu_enter */
    return TUTTI_OK;
}

tutti_status tu_gpu_enter(tu_gpus *gpus, int index, tu_gpu **found, bool *pushed) {
    if (__builtin_expect(index < 0 || index >= gpus->count, 0))
        return gpus->host->error(TUTTI_ERROR_RANGE, "cuda:%d does not exist: this process sees %d GPU%s", index,
                                 gpus->count, gpus->count == 1 ? "" : "s");
    tu_gpu *gpu = *found = &gpus->gpus[index];
    if (__builtin_expect(!__atomic_load_n(&gpu->open, __ATOMIC_ACQUIRE), 0)) { /* pairs with open_gpu */
        pthread_mutex_lock(&gpus->lock);
        tutti_status status = gpu->open ? TUTTI_OK : open_gpu(gpus, index);
        pthread_mutex_unlock(&gpus->lock);
        if (status != TUTTI_OK)
            return status;
    }
    CUcontext current = NULL;
    CUresult result = gpus->driver.cuCtxGetCurrent(&current);
    *pushed = result != CUDA_SUCCESS || current != gpu->context;
    return *pushed ? checked(gpus, gpus->driver.cuCtxPushCurrent(gpu->context), "cuCtxPushCurrent") : TUTTI_OK;
}

void tu_gpu_leave(const tu_gpus *gpus, bool pushed) {
    CUcontext popped;
    if (pushed)
        gpus->driver.cuCtxPopCurrent(&popped);
}

tutti_status tu_gpu_enter_aside(tu_gpus *gpus, int index, tu_gpu **gpu, tu_gpu_aside *aside) {
    *aside = (tu_gpu_aside){ .pushed = false };
    tutti_status status = tu_gpu_enter(gpus, index, gpu, &aside->pushed);
    aside->entered = status == TUTTI_OK;
    aside->mode = tu_gpu_relax(gpus, TU_GPU_RELAXED);
    return status;
}

void tu_gpu_leave_aside(const tu_gpus *gpus, const tu_gpu_aside *aside) {
    tu_gpu_relax(gpus, aside->mode);
    if (aside->entered)
        tu_gpu_leave(gpus, aside->pushed);
}

/* `call`, an expression of the driver's, with the device's context current. */
#define ON_GPU(state, index, call, what)                            \
    tu_gpus *gpus = state;                                          \
    tu_gpu *gpu;                                                    \
    bool pushed;                                                    \
    tutti_status status = tu_gpu_enter(gpus, index, &gpu, &pushed); \
    if (status == TUTTI_OK) {                                       \
        status = checked(gpus, call, what);                         \
        tu_gpu_leave(gpus, pushed);                                 \
    }                                                               \
    return status

/* The same, also while another library captures. */
#define ASIDE_ON_GPU(state, index, call, what)                           \
    tu_gpus *gpus = state;                                               \
    tu_gpu *gpu;                                                         \
    tu_gpu_aside aside;                                                  \
    tutti_status status = tu_gpu_enter_aside(gpus, index, &gpu, &aside); \
    if (status == TUTTI_OK)                                              \
        status = checked(gpus, call, what);                              \
    tu_gpu_leave_aside(gpus, &aside);                                    \
    return status

static int count(void *state) {
    return ((tu_gpus *)state)->count;
}

/* The one whose context the thread has; else the first. */
static int current(void *state) {
    tu_gpus *gpus = state;
    CUcontext context = NULL;
    CUdevice device = 0;
    if (gpus->driver.cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == NULL ||
        gpus->driver.cuCtxGetDevice(&device) != CUDA_SUCCESS || device >= gpus->count)
        return 0;
    return device;
}

/* ---- memory of the host ---- */

static tutti_status pin(void *state, size_t bytes, void **data) {
    ASIDE_ON_GPU(
        state, current(state),
        gpus->driver.cuMemHostAlloc(data, bytes > 0 ? bytes : 1, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "cuMemHostAlloc");
}

static void unpin(void *state, void *data) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    tu_gpu_aside aside;
    (void)tu_gpu_enter_aside(gpus, current(state), &gpu, &aside);
    gpus->driver.cuMemFreeHost(data);
    tu_gpu_leave_aside(gpus, &aside);
}

static CUresult try_to_pin(const tu_gpus *gpus, void *data, size_t bytes) {
    CUresult result = gpus->driver.cuMemHostRegister(data, bytes, CU_MEMHOSTREGISTER_PORTABLE);
    if (result != CUDA_SUCCESS)
        gpus->host->log(NULL, TUTTI_LOG_WARN, "tensor-cuda",
                        "%zu bytes of the host cannot be pinned (cuMemHostRegister: CUDA error %d): copies of them are "
                        "waited for",
                        bytes, (int)result);
    return result;
}

static tutti_status pin_there(void *state, void *data, size_t bytes) {
    ASIDE_ON_GPU(state, current(state), try_to_pin(gpus, data, bytes), "cuMemHostRegister");
}

/* Also where the context cannot be entered: the memory goes, and what comes to its place can be pinned then. */
static void unpin_there(void *state, void *data) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    tu_gpu_aside aside;
    (void)tu_gpu_enter_aside(gpus, current(state), &gpu, &aside);
    gpus->driver.cuMemHostUnregister(data);
    tu_gpu_leave_aside(gpus, &aside);
}

/* ---- streams and events ---- */

static tutti_status stream_new(void *state, int index, void **stream) {
    ON_GPU(state, index, gpus->driver.cuStreamCreate((CUstream *)stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

/* A stream and an event know their context: they go also where that cannot be entered. */
static void stream_end(void *state, int index, void *stream) {
    tu_gpus *gpus = state;
    tu_gpu *gpu = NULL;
    tu_gpu_aside aside;
    if (stream == NULL)
        return;
    (void)tu_gpu_enter_aside(gpus, index, &gpu, &aside);
    if (gpu != NULL && tu_gpu_capture_of(gpu, stream) != NULL) { /* a replay that will not be: its handle lives on */
        tutti_status status = tu_gpu_capture_end(state, index, stream, NULL);
        (void)status;
    }
    gpus->driver.cuStreamSynchronize(stream);
    if (gpu != NULL)
        tu_gpu_stream_gone(gpus, gpu, stream);
    gpus->driver.cuStreamDestroy(stream);
    tu_gpu_leave_aside(gpus, &aside);
}

static tutti_status synchronize(void *state, int index, void *stream) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    tu_gpu_aside aside; /* another stream's capture may forbid that this thread waits for one */
    tutti_status status = tu_gpu_enter_aside(gpus, index, &gpu, &aside);
    if (status == TUTTI_OK && tu_gpu_is_noted(gpus, gpu, stream))
        status = gpus->host->error(TUTTI_ERROR_STATE,
                                   "the host cannot wait for a stream that is captured: what reads a tensor on the "
                                   "host belongs before the capture, or behind a run");
    else if (status == TUTTI_OK)
        status = checked(gpus, gpus->driver.cuStreamSynchronize(stream), "waiting for a stream");
    tu_gpu_leave_aside(gpus, &aside);
    return status;
}

static CUresult record(const tu_gpus *gpus, CUstream stream, void **event) {
    CUevent made;
    CUresult result = gpus->driver.cuEventCreate(&made, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS)
        return result;
    result = gpus->driver.cuEventRecord(made, stream);
    if (result != CUDA_SUCCESS)
        gpus->driver.cuEventDestroy(made);
    else
        *event = made;
    return result;
}

static tutti_status mark(void *state, int index, void *stream, void **event) {
    ON_GPU(state, index, record(gpus, stream, event), "recording an event");
}

static tutti_status join(void *state, int index, void *stream, void *event) {
    ON_GPU(state, index, gpus->driver.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
}

static tutti_status wait_event(void *state, int index, void *event) {
    ASIDE_ON_GPU(state, index, gpus->driver.cuEventSynchronize(event), "waiting for an event");
}

static CUresult query(const tu_gpus *gpus, CUevent event, bool *complete) {
    CUresult result = gpus->driver.cuEventQuery(event);
    *complete = result == CUDA_SUCCESS;
    return result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result;
}

static tutti_status test(void *state, int index, void *event, bool *complete) {
    ASIDE_ON_GPU(state, index, query(gpus, event, complete), "cuEventQuery");
}

static void unmark(void *state, int index, void *event) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    bool pushed = false;
    tutti_status entered = tu_gpu_enter(gpus, index, &gpu, &pushed);
    gpus->driver.cuEventDestroy(event);
    if (entered == TUTTI_OK)
        tu_gpu_leave(gpus, pushed);
}

/* ---- copies and kernels ---- */

static tutti_status copy(void *state, int index, void *stream, void *to, const void *from, size_t bytes) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    tu_gpu_graph *graph = NULL;
    bool pushed;
    tutti_status status = tu_gpu_enter(gpus, index, &gpu, &pushed);
    if (status != TUTTI_OK)
        return status;
    status = tu_gpu_graph_of(gpus, gpu, stream, &graph);
    if (graph != NULL && (from = tu_gpu_keep_bytes(gpus, graph, from, bytes)) == NULL)
        status = gpus->host->error(TUTTI_ERROR_MEMORY, "out of pinned memory for %zu bytes of a graph", bytes);
    if (status == TUTTI_OK)
        status = checked(
            gpus, gpus->driver.cuMemcpyAsync((CUdeviceptr)(uintptr_t)to, (CUdeviceptr)(uintptr_t)from, bytes, stream),
            "a copy");
    tu_gpu_leave(gpus, pushed);
    return status;
}

static tutti_status clear(void *state, int index, void *stream, void *to, size_t bytes) {
    ON_GPU(state, index, gpus->driver.cuMemsetD8Async((CUdeviceptr)(uintptr_t)to, 0, bytes, stream), "clearing memory");
}

static tutti_status find(void *state, int index, const char *name, void **kernel) {
    ON_GPU(state, index, find_kernel(gpus, gpu, name, kernel), "finding a kernel");
}

#define SHARED_AS_IT_IS 49152 /* bytes that a block may have without asking for more */

static CUresult launch_kernel(const tu_gpus *gpus, tu_gpu *gpu, void *stream, void *kernel, unsigned blocks,
                              unsigned threads, unsigned shared, const void *arguments) {
    void *parameters[1] = { (void *)(uintptr_t)arguments };
    CUresult result = CUDA_SUCCESS;
    if (shared > SHARED_AS_IT_IS && gpus->driver.cuFuncSetAttribute != NULL)
        result = gpus->driver.cuFuncSetAttribute(kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared);
    if (result != CUDA_SUCCESS || tu_gpu_launch_quickly(gpus, gpu, stream,
                                                        &(CUDA_KERNEL_NODE_PARAMS){ .function = kernel,
                                                                                    .blocks = { blocks, 1, 1 },
                                                                                    .threads = { threads, 1, 1 },
                                                                                    .shared = shared,
                                                                                    .parameters = parameters },
                                                        &result))
        return result;
    return gpus->driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared, stream, parameters, NULL);
}

static tutti_status launch(void *state, int index, void *stream, void *kernel, unsigned blocks, unsigned threads,
                           unsigned shared, const void *arguments) {
    ON_GPU(state, index, launch_kernel(gpus, gpu, stream, kernel, blocks, threads, shared, arguments),
           "launching a kernel");
}

/* ---- loading ---- */

/* Every kernel of a module. A driver before 12.4 cannot tell which there are, and a failure is told by the launch. */
static void load_kernels(const tu_gpus *gpus, CUmodule module) {
    const tu_cuda_driver *driver = &gpus->driver;
    unsigned count = 0;
    if (module == NULL || driver->cuFuncLoad == NULL || driver->cuModuleGetFunctionCount == NULL ||
        driver->cuModuleEnumerateFunctions == NULL ||
        driver->cuModuleGetFunctionCount(&count, module) != CUDA_SUCCESS || count == 0)
        return;
    CUfunction *functions = calloc(count, sizeof *functions);
    if (functions != NULL && driver->cuModuleEnumerateFunctions(functions, count, module) == CUDA_SUCCESS)
        for (unsigned i = 0; i < count; i++)
            driver->cuFuncLoad(functions[i]);
    free(functions);
}

static void load_all(void *state, int index) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    bool pushed;
    if (tu_gpu_enter(gpus, index, &gpu, &pushed) != TUTTI_OK)
        return;
    int mode = tu_gpu_relax(gpus, TU_GPU_RELAXED); /* another stream may be captured meanwhile */
    pthread_mutex_lock(&gpu->lock);
    if (!gpu->loads) {
        for (int i = 0; i < TU_TENSOR_IMAGES; i++)
            load_kernels(gpus, gpu->modules[i]);
        load_kernels(gpus, gpu->together);
        load_kernels(gpus, gpu->together_plain);
        for (const tu_gpu_module *made = gpu->written; made != NULL; made = made->next)
            load_kernels(gpus, made->module);
    }
    gpu->loads = true;
    pthread_mutex_unlock(&gpu->lock);
    tu_gpu_relax(gpus, mode);
    tu_gpu_leave(gpus, pushed);
}

/* ---- kernels that are written at run time ---- */

/* Under the device's lock. */
static tu_gpu_module *written_module(tu_gpu *gpu, const char *name) {
    tu_gpu_module *found = gpu->written;
    while (found != NULL && strcmp(found->name, name) != 0)
        found = found->next;
    return found;
}

/* With the device's context current. */
static tutti_status load_module(tu_gpus *gpus, tu_gpu *gpu, const char *name, const void *image, void **module) {
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&gpu->lock);
    tu_gpu_module *made = written_module(gpu, name);
    *module = made != NULL ? made->module : NULL;
    if (made == NULL && image != NULL) {
        made = calloc(1, sizeof *made);
        int mode = tu_gpu_relax(gpus, TU_GPU_RELAXED); /* another stream may be captured meanwhile */
        status = made == NULL
                     ? gpus->host->error(TUTTI_ERROR_MEMORY, "out of memory for a module")
                     : checked(gpus, gpus->driver.cuModuleLoadData(&made->module, image), "loading compiled kernels");
        if (status == TUTTI_OK && gpu->loads)
            load_kernels(gpus, made->module);
        tu_gpu_relax(gpus, mode);
        if (status == TUTTI_OK) {
            snprintf(made->name, sizeof made->name, "%s", name);
            made->next = gpu->written;
            gpu->written = made;
            *module = made->module;
        } else {
            free(made);
        }
    }
    pthread_mutex_unlock(&gpu->lock);
    return status;
}

static tutti_status module_of(void *state, int index, const char *name, const void *image, void **module) {
    tu_gpus *gpus = state;
    tu_gpu *gpu;
    bool pushed;
    tutti_status status = tu_gpu_enter(gpus, index, &gpu, &pushed);
    if (status != TUTTI_OK)
        return status;
    status = load_module(gpus, gpu, name, image, module);
    tu_gpu_leave(gpus, pushed);
    return status;
}

static tutti_status module_find(void *state, int index, void *module, const char *name, void **kernel) {
    ON_GPU(state, index, gpus->driver.cuModuleGetFunction((CUfunction *)kernel, module, name),
           "finding a compiled kernel");
}

static void written_end(const tu_gpus *gpus, tu_gpu *gpu) {
    for (tu_gpu_module *made = gpu->written, *next; made != NULL; made = next) {
        next = made->next;
        gpus->driver.cuModuleUnload(made->module);
        free(made);
    }
}

/* ---- faults ---- */

static bool fault(void *state, int index, tu_device_fault *found) {
    tu_gpus *gpus = state;
    tu_gpu *gpu = &gpus->gpus[index];
    if (index < 0 || index >= gpus->count || !__atomic_load_n(&gpu->open, __ATOMIC_ACQUIRE))
        return false;
    if (__atomic_load_n(&gpu->fault->operation, __ATOMIC_ACQUIRE) <= 0) /* pairs with the fence of the kernel */
        return false;
    *found = *gpu->fault;
    __atomic_store_n(&gpu->fault->operation, 0, __ATOMIC_RELEASE);
    return true;
}

static tu_device_fault *fault_place(void *state, int index) {
    return (tu_device_fault *)(uintptr_t)((tu_gpus *)state)->gpus[index].fault_here;
}

/* ---- the table ---- */

static const tu_device_tensors tensors = {
    .size = sizeof(tu_device_tensors),
    .count = count,
    .current = current,
    .allocate = tu_gpu_allocate,
    .release = tu_gpu_release,
    .used = tu_gpu_used,
    .release_behind = tu_gpu_release_behind,
    .trim = tu_gpu_trim,
    .usage = tu_gpu_usage,
    .set_limit = tu_gpu_set_limit,
    .pin = pin,
    .unpin = unpin,
    .pin_there = pin_there,
    .unpin_there = unpin_there,
    .stream_new = stream_new,
    .stream_end = stream_end,
    .synchronize = synchronize,
    .mark = mark,
    .join = join,
    .wait = wait_event,
    .test = test,
    .unmark = unmark,
    .copy = copy,
    .clear = clear,
    .find = find,
    .launch = launch,
    .compiler = tu_gpu_compiler_name,
    .compile = tu_gpu_compile,
    .module = module_of,
    .module_find = module_find,
    .fault = fault,
    .fault_place = fault_place,
    .product = tu_gpu_product,
    .can_together = tu_gpu_can_together,
    .together = tu_gpu_together,
    .capturing = tu_gpu_capturing,
    .capture_begin = tu_gpu_capture_begin,
    .capture_end = tu_gpu_capture_end,
    .graph_run = tu_gpu_graph_run,
    .graph_end = tu_gpu_graph_end,
    .load = load_all,
    .has_library = tu_gpu_has_library,
};

static tutti_status count_gpus(const tu_backend_host *host, const tu_cuda_driver *driver, int *found) {
    if (driver->cuDeviceGetCount(found) != CUDA_SUCCESS || *found == 0)
        return host->error(TUTTI_ERROR_UNSUPPORTED, "the CUDA driver is there, but no GPU");
    return TUTTI_OK;
}

static tutti_status probe(const tu_backend_host *host, int *found) {
    tu_cuda_driver driver;
    tutti_status status = tu_cuda_driver_load(host, &driver);
    return status == TUTTI_OK ? count_gpus(host, &driver, found) : status;
}

static tutti_status open_tensors(const tu_backend_host *host, tutti_world *world, void **state) {
    (void)world; /* tensors belong to none */
    tu_gpus *gpus = calloc(1, sizeof *gpus);
    if (gpus == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "out of memory for tensors on GPUs");
    gpus->host = host;
    tutti_status status = tu_cuda_driver_load(host, &gpus->driver);
    if (status == TUTTI_OK)
        status = count_gpus(host, &gpus->driver, &gpus->count);
    if (status != TUTTI_OK) {
        free(gpus);
        return status;
    }
    if (gpus->count > TU_TENSOR_GPUS)
        gpus->count = TU_TENSOR_GPUS;
    pthread_mutex_init(&gpus->lock, NULL);
    *state = gpus;
    return TUTTI_OK;
}

static void close_gpu(tu_gpus *gpus, tu_gpu *gpu) {
    CUcontext popped;
    if (!gpu->open)
        return;
    if (gpus->driver.cuCtxPushCurrent(gpu->context) == CUDA_SUCCESS) {
        tu_gpu_quick_end(gpus, gpu);
        tu_gpu_products_end(gpus, gpu);
        tu_gpu_memory_end(gpus, gpu);
        unload_images(gpus, gpu);
        written_end(gpus, gpu);
        gpus->driver.cuMemFreeHost(gpu->fault);
        gpus->driver.cuCtxPopCurrent(&popped);
    }
    gpus->driver.cuDevicePrimaryCtxRelease(gpu->device);
    pthread_mutex_destroy(&gpu->lock);
}

static void close_tensors(void *state) {
    tu_gpus *gpus = state;
    for (int i = 0; i < gpus->count; i++)
        close_gpu(gpus, &gpus->gpus[i]);
    pthread_mutex_destroy(&gpus->lock);
    free(gpus->library);
    tu_gpu_compiler_end(gpus);
    free(gpus);
}

static bool can(void *state, tu_ability ability) {
    (void)state;
    (void)ability;
    return false;
}

TUTTI_API extern const tu_backend tutti_backend_v2;
const tu_backend tutti_backend_v2 = {
    .size = sizeof(tu_backend),
    .version = TU_BACKEND_VERSION,
    .name = "tensor-cuda",
    .device = TUTTI_CUDA,
    .probe = probe,
    .open = open_tensors,
    .close = close_tensors,
    .can = can,
    .tensors = &tensors,
};
