/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches on the default stream by a graph of one kernel. The driver takes 2.9 us to set the kernel and its parameters
 * anew and to run the graph, and 4.6 us for cuLaunchKernel (H200, driver 580; docs/performance-gpu.md). What is set
 * counts for runs that begin later, so that one graph does for all; of two threads that launch at once the second takes
 * the usual way. The default stream is never captured, and a graph that is run there stands in its order as any kernel
 * does.
 */
#include "tensors.h"

#define TU_QUICK_BYTES 4096 /* of parameters, at most */

static bool make(const tu_cuda_driver *driver, tu_gpu_quick *quick, const CUDA_KERNEL_NODE_PARAMS *kernel) {
    if (driver->cuGraphCreate == NULL || driver->cuGraphAddKernelNode == NULL || driver->cuGraphLaunch == NULL ||
        driver->cuGraphExecKernelNodeSetParams == NULL || driver->cuGraphInstantiateWithFlags == NULL ||
        driver->cuGraphCreate(&quick->graph, 0) != CUDA_SUCCESS)
        return false;
    if (driver->cuGraphAddKernelNode(&quick->node, quick->graph, NULL, 0, kernel) == CUDA_SUCCESS &&
        driver->cuGraphInstantiateWithFlags(&quick->runnable, quick->graph, 0) == CUDA_SUCCESS)
        return true;
    driver->cuGraphDestroy(quick->graph);
    quick->graph = NULL;
    quick->runnable = NULL;
    return false;
}

void tu_gpu_quick_begin(const tu_gpus *gpus, tu_gpu *gpu, CUfunction kernel) {
    static const char nothing[TU_QUICK_BYTES]; /* what a kernel is given that is never run so */
    void *parameters[1] = { (void *)(uintptr_t)nothing };
    CUDA_KERNEL_NODE_PARAMS first = {
        .function = kernel, .blocks = { 1, 1, 1 }, .threads = { 1, 1, 1 }, .parameters = parameters
    };
    pthread_mutex_init(&gpu->quick.lock, NULL);
    if (kernel == NULL || !make(&gpus->driver, &gpu->quick, &first))
        gpu->quick.runnable = NULL;
}

bool tu_gpu_launch_quickly(const tu_gpus *gpus, tu_gpu *gpu, CUstream stream, const CUDA_KERNEL_NODE_PARAMS *kernel,
                           CUresult *result) {
    tu_gpu_quick *quick = &gpu->quick;
    if (stream != NULL || quick->runnable == NULL || pthread_mutex_trylock(&quick->lock) != 0)
        return false;
    bool set = gpus->driver.cuGraphExecKernelNodeSetParams(quick->runnable, quick->node, kernel) == CUDA_SUCCESS;
    if (set)
        *result = gpus->driver.cuGraphLaunch(quick->runnable, stream);
    pthread_mutex_unlock(&quick->lock);
    return set;
}

void tu_gpu_quick_end(const tu_gpus *gpus, tu_gpu *gpu) {
    if (gpu->quick.runnable != NULL) {
        gpus->driver.cuGraphExecDestroy(gpu->quick.runnable);
        gpus->driver.cuGraphDestroy(gpu->quick.graph);
    }
    pthread_mutex_destroy(&gpu->quick.lock);
}
