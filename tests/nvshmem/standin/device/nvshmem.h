/* SPDX-License-Identifier: Apache-2.0
 *
 * What Tutti's kernels use of NVSHMEM's device library, for kernels that run on the CPU: the stand-in of the host
 * library knows where the memory of another process is.
 */
#ifndef TUTTI_TESTS_NVSHMEM_DEVICE_H
#define TUTTI_TESTS_NVSHMEM_DEVICE_H

#include <dlfcn.h>
#include <stdint.h>

#define NVSHMEM_SIGNAL_SET 9

static inline void nvshmem_quiet(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline void nvshmemx_signal_op(uint64_t *word, uint64_t value, int, int pe) {
    void *library = dlopen("libnvshmem_host.so.3", RTLD_NOW | RTLD_NOLOAD);
    void *(*address)(const void *, int) = (void *(*)(const void *, int))dlsym(library, "standin_address");
    __atomic_store_n((uint64_t *)address(word, pe), value, __ATOMIC_RELEASE);
    dlclose(library);
}

#endif
