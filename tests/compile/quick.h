/* SPDX-License-Identifier: Apache-2.0
 *
 * What most tests of compiled functions share. They need no compiler: loops run in blocks, by the library's own
 * kernels, which gives the same bits at once. tests/compile/built.c has those that build; and with TEST_BUILT=1 those
 * here do, too, by the system's compiler or NVRTC, into a cache of the program's own.
 */
#ifndef TUTTI_TESTS_COMPILE_QUICK_H
#define TUTTI_TESTS_COMPILE_QUICK_H

#include <ftw.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <tutti/tensors.h>

#include "../tensor/support.h"

static char built_folder[PATH_MAX]; /* with TEST_BUILT=1: what is built is kept there */
static pid_t built_by;

__attribute__((constructor)) static void choose_compiler(void) {
    const char *base = getenv("TMPDIR"), *builds = getenv("TEST_BUILT");
    setenv("TUTTI_LOG", "warn", 1);
    if (builds == NULL || builds[0] != '1') {
        setenv("TUTTI_CC", "/no/compiler", 1);
        setenv("TUTTI_NVRTC", "/no/compiler", 1); /* operators run one after the other */
        return;
    }
    snprintf(built_folder, sizeof built_folder, "%s/tutti-built-XXXXXX",
             base != NULL && base[0] == '/' ? base : "/tmp");
    built_by = getpid();
    if (mkdtemp(built_folder) == NULL)
        abort();
    setenv("XDG_CACHE_HOME", built_folder, 1);
    setenv("TUTTI_CC_LIMIT", "600", 1);
}

static inline int remove_built(const char *path, const struct stat *about, int type, struct FTW *at) {
    (void)about, (void)type, (void)at;
    return remove(path);
}

/* By the program itself, and not by the processes in which its tests run. */
__attribute__((destructor)) static void leave_nothing_built(void) {
    if (built_folder[0] != 0 && built_by == getpid())
        nftw(built_folder, remove_built, 16, FTW_DEPTH | FTW_PHYS);
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
