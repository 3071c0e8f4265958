/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of libtutti's backends for GPUs for the stand-in driver: their threads run as fibers, since they meet
 * each other and other ranks.
 */
#include "words.hpp"

#include "kernels.cu"
#include "nvshmem.h"

namespace with_nvshmem {
#include "backend/nvshmem/kernels.cu"
}
using with_nvshmem::tutti_nvshmem_exchange;
using with_nvshmem::tutti_nvshmem_plan;
using with_nvshmem::tutti_nvshmem_signal;
using with_nvshmem::tutti_nvshmem_take;

#include "emulate.hpp"
#include "fibers.hpp"

namespace emulated {
void run_fibers(body *run, unsigned blocks, unsigned threads, const void *args) {
    emulated_run(run, blocks, threads, args);
}
} // namespace emulated

#define KERNEL_OF(function)                                                                    \
    static const emulated::entry entry_of_##function(#function, emulated_entry<function>::run, \
                                                     emulated_entry<function>::bytes, true);
#define KERNEL(id, name) KERNEL_OF(name)
#include "kernels.def"
KERNEL_OF(tutti_nvshmem_signal)
KERNEL_OF(tutti_nvshmem_exchange)
KERNEL_OF(tutti_nvshmem_plan)
KERNEL_OF(tutti_nvshmem_take)
