/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank that dies while the others are in an operation of NCCL with it. Not under MPS, where a death may take the
 * server with it.
 */
#include <signal.h>

#include "../against_cpu.h"
#include "gpu.h"

static void sleep_on_host(void *argument) {
    (void)argument;
    sleep(60);
}

/* The victim's stream stands still, so that NCCL's kernels of the others wait for it; then it dies. */
static void body(tutti_world *world) {
    tutti_group *group = tutti_world_group(world);
    float *buffer = gpu_private(1 << 16);
    CUresult (*launch)(CUstream, void (*)(void *), void *);
    *(void **)&launch = dlsym(gpu.library, "cuLaunchHostFunc");
    CHECK_OK(tutti_all_reduce(group, buffer, buffer, 1000, TUTTI_F32, TUTTI_SUM, BY_NCCL));
    gpu_settle();
    bool victim = tutti_group_rank(group) == tutti_group_size(group) - 1;
    if (victim)
        CHECK_CUDA(launch(stream, sleep_on_host, NULL));
    CHECK_OK(
        tutti_all_reduce(group, buffer, buffer, 1000, TUTTI_F32, TUTTI_SUM,
                         TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl", .timeout_ns = 60000000000)));
    if (victim)
        raise(SIGKILL);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < 3000 && status == TUTTI_OK; i++) {
        usleep(10000);
        status = tutti_group_check(group);
    }
    CHECK(status == TUTTI_ERROR_DEAD || status == TUTTI_ERROR_BACKEND); /* whoever sees it first: Tutti, or NCCL */
    gpu_settle();                                                       /* the kernels have left */
    _exit(0);
}

static tutti_status run(tutti_world *world, void *argument) {
    (void)argument;
    nccl_begin(world);
    body(world);
    return TUTTI_OK;
}

TEST_LIMIT(a_dead_rank_ends_the_operations_of_nccl_that_wait_for_it, 120) {
    nccl_needed();
    if (getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL)
        SKIP("under MPS a death may take the server with it");
    CHECK_STATUS(tutti_spawn(TUTTI_SPAWN_PROCESSES, gpu_ranks(), run, NULL), TUTTI_ERROR_DEAD);
}
