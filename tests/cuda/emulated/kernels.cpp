/* SPDX-License-Identifier: Apache-2.0
 *
 * All kernels of the CUDA backend and of NVSHMEM's, compiled for the CPU, and the way to run one.
 */
#include "words.hpp"

#include "kernels.cu"
#include "nvshmem.h"

namespace with_nvshmem {
#include "backend/nvshmem/kernels.cu"
}

#include "emulated.h"
#include "fibers.hpp"

extern "C" void emulated_launch(emulated_kernel kernel, unsigned blocks, unsigned threads, const void *args) {
    static emulated_body *const bodies[] = {
        emulated_entry<tutti_packets_f32>::run,                  /* EMULATED_PACKETS_F32 */
        emulated_entry<tutti_packets_bf16>::run,                 /* EMULATED_PACKETS_BF16 */
        emulated_entry<tutti_packets_i8>::run,                   /* EMULATED_PACKETS_I8 */
        emulated_entry<tutti_packets_f64>::run,                  /* EMULATED_PACKETS_F64 */
        emulated_entry<tutti_reduce_f32>::run,                   /* EMULATED_REDUCE_F32 */
        emulated_entry<tutti_reduce_f32_4>::run,                 /* EMULATED_REDUCE_F32_4 */
        emulated_entry<tutti_multimem_f32_by_members>::run,      /* EMULATED_MULTIMEM_F32 */
        emulated_entry<tutti_multimem_gather_by_members>::run,   /* EMULATED_MULTIMEM_GATHER */
        emulated_entry<tutti_move>::run,                         /* EMULATED_MOVE */
        emulated_entry<tutti_message>::run,                      /* EMULATED_MESSAGE */
        emulated_entry<tutti_signal>::run,                       /* EMULATED_SIGNAL */
        emulated_entry<tutti_multimem_barrier_by_members>::run,  /* EMULATED_MULTIMEM_BARRIER */
        emulated_entry<with_nvshmem::tutti_nvshmem_signal>::run, /* EMULATED_NVSHMEM_SIGNAL */
    };
    emulated_run(bodies[kernel], blocks, threads, args);
}
