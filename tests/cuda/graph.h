/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphs and delays for the GPU tests: functions of the driver that the backend itself does not use.
 */
#ifndef TUTTI_TESTS_CUDA_GRAPH_H
#define TUTTI_TESTS_CUDA_GRAPH_H

#include "gpu.h"

static inline void *driver_symbol(const char *name) {
    void *symbol = dlsym(gpu.library, name);
    if (symbol == NULL)
        FAIL("the driver has no %s", name);
    return symbol;
}

static inline void graph_begin(CUstream on) {
    CUresult (*begin)(CUstream, int) = (CUresult(*)(CUstream, int))driver_symbol("cuStreamBeginCapture_v2");
    CHECK_CUDA(begin(on, 1)); /* this thread's calls alone */
}

static inline CUgraph graph_end(CUstream on) {
    CUresult (*end)(CUstream, CUgraph *) = (CUresult(*)(CUstream, CUgraph *))driver_symbol("cuStreamEndCapture");
    CUgraph graph;
    CHECK_CUDA(end(on, &graph));
    return graph;
}

static inline CUgraphExec graph_instantiate(CUgraph graph) {
    CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long) =
        (CUresult(*)(CUgraphExec *, CUgraph, unsigned long long))driver_symbol("cuGraphInstantiateWithFlags");
    CUgraphExec executable;
    CHECK_CUDA(instantiate(&executable, graph, 0));
    return executable;
}

static inline void graph_launch(CUgraphExec executable, CUstream on) {
    CUresult (*launch)(CUgraphExec, CUstream) = (CUresult(*)(CUgraphExec, CUstream))driver_symbol("cuGraphLaunch");
    CHECK_CUDA(launch(executable, on));
}

static inline size_t graph_edges(CUgraph graph) {
    CUresult (*edges)(CUgraph, void *, void *, size_t *) =
        (CUresult(*)(CUgraph, void *, void *, size_t *))driver_symbol("cuGraphGetEdges");
    size_t count = 0;
    CHECK_CUDA(edges(graph, NULL, NULL, &count));
    return count;
}

/* What is put into `after` from now on comes after what `before` has now. */
static inline void stream_follow(CUstream after, CUstream before) {
    CUevent event;
    CHECK_CUDA(gpu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK_CUDA(gpu.cuEventRecord(event, before));
    CHECK_CUDA(gpu.cuStreamWaitEvent(after, event, 0));
    CHECK_CUDA(gpu.cuEventDestroy(event));
}

static inline void sleep_on_host(void *milliseconds) {
    usleep((useconds_t)(uintptr_t)milliseconds * 1000);
}

/* Holds a stream up. */
static inline void gpu_delay(CUstream on, int milliseconds) {
    CUresult (*host)(CUstream, void (*)(void *), void *) =
        (CUresult(*)(CUstream, void (*)(void *), void *))driver_symbol("cuLaunchHostFunc");
    CHECK_CUDA(host(on, sleep_on_host, (void *)(uintptr_t)milliseconds));
}

static inline CUstream stream_new(void) {
    CUstream made;
    CHECK_CUDA(gpu.cuStreamCreate(&made, CU_STREAM_NON_BLOCKING));
    return made;
}

#define ON(which) TUTTI_OPTIONS(tutti_call, .stream = which)

#endif
