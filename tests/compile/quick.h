/* SPDX-License-Identifier: Apache-2.0
 *
 * Most tests of compiled functions need no compiler: loops run in blocks, by the library's own kernels, which gives the
 * same bits at once. tests/compile/built.c has those that build.
 */
#ifndef TUTTI_TESTS_COMPILE_QUICK_H
#define TUTTI_TESTS_COMPILE_QUICK_H

#include <stdlib.h>

__attribute__((constructor)) static void use_no_compiler(void) {
    setenv("TUTTI_CC", "/no/compiler", 1);
    setenv("TUTTI_LOG", "warn", 1);
}

#endif
