/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs a kernel of the CUDA backend, or one of NVSHMEM's, on the CPU: what it does to memory, not how fast.
 */
#ifndef TUTTI_TESTS_CUDA_EMULATED_H
#define TUTTI_TESTS_CUDA_EMULATED_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum emulated_kernel {
    EMULATED_PACKETS_F32,
    EMULATED_PACKETS_BF16,
    EMULATED_PACKETS_I8,
    EMULATED_PACKETS_F64,
    EMULATED_REDUCE_F32,
    EMULATED_REDUCE_F32_4,
    EMULATED_MULTIMEM_F32,
    EMULATED_MULTIMEM_GATHER,
    EMULATED_MOVE,
    EMULATED_MESSAGE,
    EMULATED_SIGNAL,
    EMULATED_MULTIMEM_BARRIER,
    EMULATED_NVSHMEM_SIGNAL
} emulated_kernel;

/* Returns when all blocks have ended. The arguments are those of the kernel. */
void emulated_launch(emulated_kernel kernel, unsigned blocks, unsigned threads, const void *args);

#ifdef __cplusplus
}
#endif
#endif
