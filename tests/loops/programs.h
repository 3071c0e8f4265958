/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of programs share: running one, and comparing bits.
 */
#ifndef TUTTI_TESTS_LOOPS_PROGRAMS_H
#define TUTTI_TESTS_LOOPS_PROGRAMS_H

#include <ftw.h>
#include <limits.h>
#include <unistd.h>

#include <tutti/streams.h>
#include <tutti/tensors.h>

#include "../harness.h"
#include "loops/program.h"

/* A folder for one test alone, which is also where its compiled loops are kept. */
static inline const char *own_folder(void) {
    static char path[PATH_MAX];
    const char *base = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/tutti-loops-XXXXXX", base != NULL && base[0] == '/' ? base : "/tmp");
    CHECK(mkdtemp(path) != NULL);
    setenv("XDG_CACHE_HOME", path, 1);
    setenv("TUTTI_CC_LIMIT", "600", 1);
    return path;
}

static inline int remove_one(const char *path, const struct stat *about, int type, struct FTW *at) {
    (void)about, (void)type, (void)at;
    return remove(path);
}

static inline void remove_folder(const char *path) {
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* Tensors are made on the device that TEST_DEVICE names; false: that is the CPU, where they are without a word. */
static inline bool use_device(void) {
    const char *name = getenv("TEST_DEVICE");
    if (name == NULL || name[0] == 0)
        return false;
    if (strcmp(name, "cuda") != 0 || !tt_device_available(TUTTI_CUDA))
        FAIL("there is no device %s", name);
    tt_default_device_set(TUTTI_CUDA);
    CHECK_OK(tt_error_show());
    return true;
}

/* Runs a program on tensors like those that its graph was captured with. The outputs are the scope's. */
static inline void run_program(tu_program *program, const tt_graph *graph, tt_tensor_list arguments,
                               tt_tensor **outputs) {
    tt_tensor *inputs[64] = { NULL };
    CHECK(graph->input_count <= 64);
    CHECK_OK(tu_graph_gather("run", graph, arguments, inputs));
    for (int i = 0; i < graph->output_count; i++)
        outputs[i] = NULL;
    CHECK_OK(tu_program_run(program, inputs, outputs));
    for (int i = 0; i < graph->input_count; i++)
        tu_tensor_drop(inputs[i]);
    for (int i = 0; i < graph->output_count; i++)
        if (outputs[i] != NULL)
            outputs[i] = tu_scope_own(outputs[i]);
}

/* Whether two tensors have the same dtype, shape and bits; one NaN is as good as another. */
static inline bool same_bits(tt_tensor *left, tt_tensor *right) {
    if (tt_dtype(left) != tt_dtype(right) || tt_dim_count(left) != tt_dim_count(right))
        return false;
    for (int i = 0; i < tt_dim_count(left); i++)
        if (tt_size(left, i) != tt_size(right, i))
            return false;
    size_t bytes = tu_dtype_bytes[tt_dtype(left)], count = (size_t)tt_numel(left);
    const char *one = tt_data(tt_to_device(tt_contiguous(left), TUTTI_CPU));
    const char *other = tt_data(tt_to_device(tt_contiguous(right), TUTTI_CPU));
    for (size_t i = 0; i < count; i++) {
        if (memcmp(one + i * bytes, other + i * bytes, bytes) == 0)
            continue;
        double first = 0, second = 0;
        if (!tu_is_float(tt_dtype(left)) ||
            tutti_convert(one + i * bytes, tt_dtype(left), &first, TUTTI_F64, 1) != TUTTI_OK ||
            tutti_convert(other + i * bytes, tt_dtype(left), &second, TUTTI_F64, 1) != TUTTI_OK || first == first ||
            second == second) {
            fprintf(stderr, "element %zu of %zu is %.17g and %.17g\n", i, count, first, second);
            return false;
        }
    }
    return true;
}

#endif
