/* SPDX-License-Identifier: Apache-2.0 */
#include "base/instructions.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/error.h"

static const char *const names[TU_INSTRUCTIONS_END] = {
    [TU_REFERENCE] = "reference", [TU_NEON] = "neon", [TU_AVX2] = "avx2", [TU_AVX512] = "avx512"
};

_Atomic unsigned tu_instructions_choice;
#define ASKED TU_INSTRUCTIONS_ASKED

const char *tu_instructions_name(tu_instructions level) {
    return level >= TU_REFERENCE && level < TU_INSTRUCTIONS_END ? names[level] : "?";
}

#if defined(__x86_64__)
static bool has_avx2(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_F16C) != 0;
}
#endif

bool tu_instructions_present(tu_instructions level) {
    switch (level) {
    case TU_REFERENCE:
        return true;
#if defined(__x86_64__)
    case TU_AVX2:
        return has_avx2();
    case TU_AVX512:
        return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__)
    case TU_NEON: /* part of the base architecture */
        return true;
#endif
    default:
        return false;
    }
}

static tu_instructions best(void) {
    tu_instructions level = TU_INSTRUCTIONS_END - 1;
    while (!tu_instructions_present(level))
        level--;
    return level;
}

static tutti_status parse(const char *name, tu_instructions *level) {
    for (int i = TU_REFERENCE; i < TU_INSTRUCTIONS_END; i++) {
        if (strcmp(name, names[i]) != 0)
            continue;
        if (!tu_instructions_present((tu_instructions)i))
            return tu_error(TUTTI_ERROR_UNSUPPORTED,
                            "TUTTI_ISA: this machine has no %s; its best is %s, and reference runs everywhere", name,
                            names[best()]);
        *level = (tu_instructions)i;
        return TUTTI_OK;
    }
    return tu_error(TUTTI_ERROR_ARGUMENT,
                    "TUTTI_ISA: \"%s\" is no instruction set; write reference, neon, avx2 or avx512", name);
}

/* Stores the choice unless there is one, and returns the one that holds. */
static unsigned settle(unsigned wanted) {
    unsigned found = 0;
    return atomic_compare_exchange_strong_explicit(&tu_instructions_choice, &found, wanted, memory_order_relaxed,
                                                   memory_order_relaxed)
               ? wanted
               : found;
}

tutti_status tu_instructions_choose(const char *name) {
    tu_instructions level = TU_REFERENCE;
    if (name == NULL || name[0] == 0) {
        if (atomic_load_explicit(&tu_instructions_choice, memory_order_relaxed) != 0)
            return TUTTI_OK;
        name = secure_getenv("TUTTI_ISA");
    }
    if (name == NULL || name[0] == 0) {
        settle(best());
        return TUTTI_OK;
    }
    tutti_status status = parse(name, &level);
    if (status != TUTTI_OK)
        return status;
    unsigned holds = settle(level | ASKED) & ~ASKED;
    if (holds != level)
        return tu_error(TUTTI_ERROR_STATE,
                        "TUTTI_ISA=%s: this process computes with %s already, and there is one choice per process; set "
                        "it in the environment, or before the first world and the first tensor",
                        name, names[holds]);
    return TUTTI_OK;
}

tu_instructions tu_instructions_get(void) {
    unsigned found = atomic_load_explicit(&tu_instructions_choice, memory_order_relaxed);
    if (found == 0) {
        const char *name = secure_getenv("TUTTI_ISA");
        for (unsigned i = TU_REFERENCE; name != NULL && i < TU_INSTRUCTIONS_END; i++)
            if (strcmp(name, names[i]) == 0 && tu_instructions_present((tu_instructions)i))
                found = i | ASKED;
        found = settle(found != 0 ? found : best());
    }
    return (tu_instructions)(found & ~ASKED);
}

bool tu_instructions_asked(void) {
    return (atomic_load_explicit(&tu_instructions_choice, memory_order_relaxed) & ASKED) != 0;
}
