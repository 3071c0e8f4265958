/* SPDX-License-Identifier: Apache-2.0
 *
 * Allocations of a plug-in that fail when they are told to: malloc, calloc and realloc of the whole program are these,
 * and look who calls. The harness wraps calls of Tutti's own objects alone, which a plug-in is none of.
 */
#ifndef TUTTI_TESTS_FAILING_MEMORY_H
#define TUTTI_TESTS_FAILING_MEMORY_H

#include "failing.h"

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FAILING_HAS_MEMORY 1

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
__attribute__((visibility("default"))) void *malloc(size_t bytes);
__attribute__((visibility("default"))) void *calloc(size_t count, size_t bytes);
__attribute__((visibility("default"))) void *realloc(void *old, size_t bytes);

static const char *failing_plugin; /* the name of its file */
static _Thread_local int failing_left, failing_made;
static _Thread_local bool failing_counts;
static _Thread_local char failing_places[FAILING_CALLS][48];

/* Whether a call from there fails. */
static bool failing_here(const void *caller) {
    Dl_info place;
    if (!failing_counts || failing_made == FAILING_CALLS || dladdr(caller, &place) == 0 || place.dli_fname == NULL ||
        strstr(place.dli_fname, failing_plugin) == NULL)
        return false;
    snprintf(failing_places[failing_made++], sizeof failing_places[0], "%s+0x%zx", failing_plugin,
             (size_t)((const char *)caller - (const char *)place.dli_fbase));
    return failing_left > 0 && --failing_left == 0;
}

void *malloc(size_t bytes) {
    return failing_here(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes) {
    return failing_here(__builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *old, size_t bytes) {
    return failing_here(__builtin_return_address(0)) ? NULL : __libc_realloc(old, bytes);
}

static void failing_memory_fail(int nth) {
    failing_left = nth;
    failing_made = 0;
    failing_counts = nth > 0;
}

static int failing_memory_left(void) {
    return failing_left;
}

static const char *failing_memory_made(int nth) {
    return nth <= failing_made ? failing_places[nth - 1] : NULL;
}

/* Of the calling thread. */
static inline failing failing_memory(const char *plugin) {
    failing_plugin = plugin;
    return (failing){ failing_memory_fail, failing_memory_left, failing_memory_made };
}
#endif

#endif
