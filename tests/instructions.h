/* SPDX-License-Identifier: Apache-2.0
 *
 * Another instruction set from now on, for tests that compare levels: what a process chooses once, they choose again.
 */
#ifndef TUTTI_TESTS_INSTRUCTIONS_H
#define TUTTI_TESTS_INSTRUCTIONS_H

#include <string.h>

#include "base/instructions.h"

/* False where this machine lacks it. */
static inline bool test_instructions(tu_instructions level) {
    if (!tu_instructions_present(level))
        return false;
    atomic_store_explicit(&tu_instructions_choice, level | TU_INSTRUCTIONS_ASKED, memory_order_relaxed);
    return true;
}

static inline bool test_instructions_named(const char *name) {
    for (int level = TU_REFERENCE; level < TU_INSTRUCTIONS_END; level++)
        if (strcmp(tu_instructions_name((tu_instructions)level), name) == 0)
            return test_instructions((tu_instructions)level);
    return false;
}

#endif
