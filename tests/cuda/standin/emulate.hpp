/* SPDX-License-Identifier: Apache-2.0
 *
 * For kernels of tensors that run on the CPU: what kernel.cuh has of CUDA else. A block's phases run one after the
 * other, each for all threads; blocks run one after the other.
 */
#ifndef TUTTI_TESTS_CUDA_EMULATE_HPP
#define TUTTI_TESTS_CUDA_EMULATE_HPP

#include <cstddef>
#include <cstdint>

namespace emulated {
typedef void body(const void *args);
typedef void loop(const void *args, int64_t block, int64_t blocks);
struct place {
    int64_t block, blocks;
    int threads;
};
extern thread_local place here;
/* A kernel: the bytes of its argument, and whether its threads meet while they run; one that was written at run time is
 * a loop instead, which is told where it runs. */
struct kernel {
    body *run;
    size_t bytes;
    bool fibers;
    loop *written;
};
/* Makes one known by its name. */
struct entry {
    entry(const char *name, body *run, size_t bytes, bool fibers);
};
/* The one of that name, or nullptr. */
kernel *find(const char *name);
/* Runs one whose threads meet. */
void run_fibers(body *run, unsigned blocks, unsigned threads, const void *args);
} // namespace emulated

#define HERE static inline
#define MEMBER static inline
#define APART static __attribute__((noinline))
#define SHARED static thread_local
#define KERNEL(name, arguments)                                                                          \
    static void kernel_##name(const arguments &args);                                                    \
    static const emulated::entry name##_entry(                                                           \
        "kernel_" #name, [](const void *args) { kernel_##name(*static_cast<const arguments *>(args)); }, \
        sizeof(arguments), false);                                                                       \
    static void kernel_##name(const arguments &args)
#define BLOCK (emulated::here.block)
#define BLOCKS (emulated::here.blocks)
#define THREADS (emulated::here.threads)
#define EACH_ELEMENT(i, total) for (int64_t i = BLOCK; i < (total); i += BLOCKS)
#define EACH_THREAD(self) for (int self = 0; self < THREADS; self++)
#define SYNC() ((void)0)
#define SYNC_TEAM() ((void)0)
#define FENCE() ((void)0)
#define FIRST_TO_SET(word, value) (*(word) == 0 ? (*(word) = (value), true) : false)
#define ADD_TO(word, value) ((*(word) += (value)) - (value))
#define UNROLL
#define UNROLL_BY_4
#define UNROLL_BY_16

#endif
