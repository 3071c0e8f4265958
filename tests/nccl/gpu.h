/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of NCCL share: ranks as processes, each a host of its own for NCCL (it takes one rank per GPU of a
 * host, and there may be one GPU alone), and skipping where there is no GPU, no NCCL or no plug-in.
 */
#ifndef TUTTI_TESTS_NCCL_GPU_H
#define TUTTI_TESTS_NCCL_GPU_H

#include "../cuda/gpu.h"
#include "backend/nccl/library.h"

#define BY_NCCL TUTTI_OPTIONS(tutti_call, .stream = stream, .executor = "nccl")

static inline void nccl_needed(void) {
    gpu_needed();
    char path[4096];
    const char *folder = getenv("TUTTI_PLUGIN_PATH");
    snprintf(path, sizeof path, "%s/libtutti-nccl.so", folder != NULL ? folder : ".");
    if (access(path, F_OK) != 0)
        SKIP("the NCCL backend was not built");
    void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_LOCAL);
    if (library == NULL)
        SKIP("there is no libnccl.so.2 here");
    dlclose(library);
}

/* In each rank, before NCCL is used. */
static inline void nccl_begin(tutti_world *world) {
    char host[32];
    snprintf(host, sizeof host, "tutti-%d", tutti_world_rank(world));
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_IB_DISABLE", "1", 0);
    gpu_begin();
}

#define TEST_NCCL_RANKS(sentence, ranks)                              \
    static void on_gpu_##sentence(tutti_world *world);                \
    static void rank_##sentence(tutti_world *world, void *argument) { \
        (void)argument;                                               \
        nccl_begin(world);                                            \
        on_gpu_##sentence(world);                                     \
        gpu_end();                                                    \
    }                                                                 \
    TEST_LIMIT(sentence, 60) {                                        \
        nccl_needed();                                                \
        test_processes(ranks, rank_##sentence, NULL);                 \
    }                                                                 \
    static void on_gpu_##sentence(tutti_world *world)
#define TEST_NCCL(sentence) TEST_NCCL_RANKS(sentence, gpu_ranks())

#endif
