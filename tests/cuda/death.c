/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank that dies while the others wait for it on the GPU, and a context that a kernel has ruined. Not under MPS,
 * where either may take the server with it.
 */
#include <signal.h>

#include "gpu.h"

static void body(tutti_world *world, void *argument) {
    (void)argument;
    tutti_group *group = tutti_world_group(world);
    int victim = tutti_group_size(group) - 1;
    gpu_begin();
    float *buffer = gpu_private(1 << 16);
    tutti_memory *memory = gpu_symmetric(world, 4096); /* so that the world knows of the device */
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1000, TUTTI_F32, TUTTI_SUM, ON_STREAM));
    CHECK_CUDA(gpu.cuStreamSynchronize(stream));
    CHECK_OK(tutti_barrier(group, NULL));
    if (tutti_group_rank(group) == victim)
        raise(SIGKILL);
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1000, TUTTI_F32, TUTTI_SUM,
                              TUTTI_OPTIONS(tutti_call, .stream = stream, .timeout_ns = 60000000000)));
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 5000 && status == TUTTI_OK; i++) {
        usleep(10000);
        status = tutti_group_check(group);
    }
    CHECK_EQ(status, TUTTI_ERROR_DEAD);          /* not the deadline's error */
    CHECK_CUDA(gpu.cuStreamSynchronize(stream)); /* the kernel has left */
    tutti_memory_release(memory);
    _exit(0);
}

static tutti_status run(tutti_world *world, void *argument) {
    body(world, argument);
    return TUTTI_OK;
}

TEST_LIMIT(a_dead_rank_ends_the_kernels_that_wait_for_it, 120) {
    gpu_needed();
    if (getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL)
        SKIP("under MPS a death may take the server with it");
    if (gpu_ranks() > 4)
        SKIP("time slices of many processes take too long");
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, gpu_ranks(), run, NULL), TUTTI_ERROR_DEAD);
}

/* A kernel fails; whether the program has noticed or not, what is released and
 * closed afterwards neither crashes nor waits. */
static tutti_status fail_and_free(tutti_world *world, void *argument) {
    const bool *observed = argument;
    static const char failing[] = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry fails() { trap; }\n";
    gpu_begin();
    tutti_memory *memory = gpu_symmetric(world, 1 << 20);
    tutti_peers *peers;
    CHECK_OK(tutti_memory_rendezvous(memory, tutti_world_group(world), &peers));
    CUmodule module;
    CUfunction function;
    CHECK_CUDA(gpu.cuModuleLoadData(&module, failing));
    CHECK_CUDA(gpu.cuModuleGetFunction(&function, module, "fails"));
    CHECK_CUDA(gpu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    if (*observed)
        CHECK(gpu.cuStreamSynchronize(stream) != CUDA_SUCCESS);
    tutti_peers_release(peers);
    tutti_memory_release(memory);
    CHECK(gpu.cuStreamSynchronize(stream) != CUDA_SUCCESS);
    tutti_memory *host; /* what is no GPU's still works */
    CHECK_OK(tutti_memory_alloc(world, 4096, NULL, &host));
    tutti_memory_release(host);
    return TUTTI_OK;
}

TEST_LIMIT(free_after_device_assert, 120) {
    gpu_needed();
    if (getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL)
        SKIP("under MPS a kernel that fails may take the server with it");
    for (int observed = 0; observed < 2; observed++)
        CHECK_OK(tutti_spawn(TUTTI_SPAWN_PROCESSES, 1, fail_and_free, &(bool){ observed != 0 }));
}
