/* SPDX-License-Identifier: Apache-2.0
 *
 * For tests that run once per device: TEST_DEVICE names it, "cuda" or nothing. tests/CMakeLists.txt runs them on cuda
 * with a stand-in for the driver, scripts/gpu-test with a GPU.
 */
#ifndef TUTTI_TESTS_TENSOR_DEVICE_H
#define TUTTI_TESTS_TENSOR_DEVICE_H

#include <unistd.h>

#include <tutti/streams.h>

#include "../harness.h"

/* The device that this run is about; skips where it was asked for and is not there. */
static inline tutti_device test_device(void) {
    const char *name = getenv("TEST_DEVICE");
    tutti_device device = TUTTI_CPU;
    if (name == NULL || name[0] == 0)
        return TUTTI_CPU;
    CHECK_OK(tutti_device_parse(name, &device));
    if (!tt_device_available(device))
        SKIP("there are no tensors on %s here", name);
    return device == TUTTI_CUDA ? TUTTI_CUDA_AT(0) : device;
}

/* At the end of a test: the driver keeps descriptors and threads of its own, which the harness must not count. */
static inline void test_device_leave(void) {
    if (test_device() == TUTTI_CPU)
        return;
    fflush(stdout);
    _exit(0);
}

#endif
