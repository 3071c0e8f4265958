/* SPDX-License-Identifier: Apache-2.0
 *
 * For tests that run once per device: TEST_DEVICE names it, "cuda" or nothing. tests/CMakeLists.txt runs them on cuda
 * with a stand-in for the driver, scripts/gpu-test with a GPU.
 */
#ifndef TUTTI_TESTS_TENSOR_DEVICE_H
#define TUTTI_TESTS_TENSOR_DEVICE_H

#include <unistd.h>

#include <tutti/functional.h>
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

/* Whether it is another one than the CPU; asks without initialising the driver, after which no process can fork. */
static inline bool test_on_device(void) {
    const char *name = getenv("TEST_DEVICE");
    return name != NULL && name[0] != 0;
}

/* For tests that begin with ranks as threads: behind them processes can start on the CPU alone. */
static inline void test_processes_too(int ranks, test_rank *body, void *argument) {
    if (!test_on_device())
        test_processes(ranks, body, argument);
}

/* A scope in which tensors are made on that device. */
static inline tt_scope test_scope_open(void) {
    CHECK(tt_default_device_set(test_device()));
    return tt_scope_open();
}
#ifdef TEST_ON_DEVICE /* the whole program is about it: defined before this is included */
#define tt_scope_open() test_scope_open()
#endif

/* Options of symmetric memory there. */
#define TEST_OF_DEVICE TUTTI_OPTIONS(tutti_memory_options, .device = test_device())

/* Waits for x; on a GPU for its stream, since that is when the host learns what went wrong. NULL with the error
 * pending.
 */
static inline tt_tensor *test_settle(tt_tensor *x) {
    tt_tensor *waited = tt_wait(x);
    return test_device() == TUTTI_CPU || waited == NULL || tt_synchronize(test_device()) ? waited : NULL;
}

/* At the end of a test: the driver keeps descriptors and threads of its own, which the harness must not count. */
static inline void test_device_leave(void) {
    if (test_device() == TUTTI_CPU)
        return;
    fflush(stdout);
    _exit(0);
}

#endif
