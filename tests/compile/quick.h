/* SPDX-License-Identifier: Apache-2.0
 *
 * What most tests of compiled functions share. They need no compiler: loops run in blocks, by the library's own
 * kernels, which gives the same bits at once. tests/compile/built.c has those that build.
 */
#ifndef TUTTI_TESTS_COMPILE_QUICK_H
#define TUTTI_TESTS_COMPILE_QUICK_H

#include <stdlib.h>

#include <tutti/tensors.h>

#include "../tensor/support.h"

__attribute__((constructor)) static void use_no_compiler(void) {
    setenv("TUTTI_CC", "/no/compiler", 1);
    setenv("TUTTI_NVRTC", "/no/compiler", 1); /* operators run one after the other */
    setenv("TUTTI_LOG", "warn", 1);
}

static const tt_compile_mode modes[] = { TT_COMPILE_FUSED, TT_COMPILE_SPLIT, TT_COMPILE_INTERPRET };
#define EACH_MODE for (size_t mode = 0; mode < sizeof modes / sizeof *modes; mode++)

static inline tt_compiled *compile(tt_compile_function *function, void *user, tt_compile_mode mode) {
    tt_compiled *compiled;
    CHECK(tt_compile(function, user, TUTTI_OPTIONS(tt_compile_options, .mode = mode, .full = true), &compiled));
    return compiled;
}

static inline tt_compiled_counts counts_of(const tt_compiled *compiled) {
    tt_compiled_counts counts = TT_COMPILED_COUNTS_INIT;
    CHECK(tt_compiled_count(compiled, &counts));
    return counts;
}

#endif
