/* SPDX-License-Identifier: Apache-2.0
 *
 * What Tutti's kernels use of NVSHMEM's device library, for kernels that run on the CPU: the stand-in of the host
 * library knows where the memory of another process is. Those of a block are called by all its threads.
 */
#ifndef TUTTI_TESTS_NVSHMEM_DEVICE_H
#define TUTTI_TESTS_NVSHMEM_DEVICE_H

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#define NVSHMEM_SIGNAL_SET 9
#define NVSHMEM_CMP_EQ 0

static inline void *nvshmem_standin(const char *function) {
    static void *const library = dlopen("libnvshmem_host.so.3", RTLD_NOW | RTLD_NOLOAD);
    return dlsym(library, function);
}

static inline void nvshmem_quiet(void) {
    static void (*const quiet)(void) = (void (*)(void))nvshmem_standin("standin_quiet");
    quiet();
}

static inline void nvshmemx_signal_op(uint64_t *word, uint64_t value, int, int pe) {
    static void (*const put)(void *, const void *, size_t, uint64_t *, uint64_t, int) =
        (void (*)(void *, const void *, size_t, uint64_t *, uint64_t, int))nvshmem_standin("standin_put");
    put(nullptr, nullptr, 0, word, value, pe);
}

static inline int nvshmem_uint64_test(uint64_t *word, int, uint64_t value) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) == value;
}

/* The bytes come in two halves, between which the process may die. */
static inline void nvshmemx_putmem_signal_nbi_block(void *to, const void *from, size_t bytes, uint64_t *word,
                                                    uint64_t value, int, int pe) {
    static void (*const put)(void *, const void *, size_t, uint64_t *, uint64_t, int) =
        (void (*)(void *, const void *, size_t, uint64_t *, uint64_t, int))nvshmem_standin("standin_put");
    __syncthreads();
    if (threadIdx.x == 0)
        put(to, from, bytes, word, value, pe);
    __syncthreads();
}

static inline void nvshmemx_getmem_nbi_block(void *to, const void *from, size_t bytes, int pe) {
    static void (*const get)(void *, const void *, size_t, int) =
        (void (*)(void *, const void *, size_t, int))nvshmem_standin("standin_get");
    __syncthreads();
    if (threadIdx.x == 0)
        get(to, from, bytes, pe);
    __syncthreads();
}

#endif
