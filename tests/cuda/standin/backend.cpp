/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of libtutti's CUDA backend for the stand-in driver: their threads run as fibers, since they meet each
 * other and other ranks.
 */
#include "words.hpp"

#include "kernels.cu"

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
#define EVERY_TYPE(X) \
    X(f64) X(f32) X(f16) X(bf16) X(e4m3) X(e5m2) X(i8) X(i16) X(i32) X(i64) X(u8) X(u16) X(u32) X(u64) X(boolean)
#define REDUCE_OF(type) KERNEL_OF(tutti_reduce_##type)
#define PACKETS_OF(type) KERNEL_OF(tutti_packets_##type)
#define REDUCE_SIZES(type) \
    KERNEL_OF(tutti_reduce_##type##_2) KERNEL_OF(tutti_reduce_##type##_4) KERNEL_OF(tutti_reduce_##type##_8)
#define MULTIMEM_OF(type) KERNEL_OF(tutti_multimem_##type##_by_switch) KERNEL_OF(tutti_multimem_##type##_by_members)
EVERY_TYPE(REDUCE_OF)
EVERY_TYPE(PACKETS_OF)
REDUCE_SIZES(f32)
REDUCE_SIZES(f16)
REDUCE_SIZES(bf16)
MULTIMEM_OF(f32)
MULTIMEM_OF(f16)
MULTIMEM_OF(bf16)
MULTIMEM_OF(gather)
MULTIMEM_OF(barrier)
KERNEL_OF(tutti_move)
KERNEL_OF(tutti_meet)
KERNEL_OF(tutti_signal)
KERNEL_OF(tutti_mark)
KERNEL_OF(tutti_vdev_plan)
KERNEL_OF(tutti_vdev_pull)
KERNEL_OF(tutti_copy)
KERNEL_OF(tutti_follow)
KERNEL_OF(tutti_message)
