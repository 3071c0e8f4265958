/* SPDX-License-Identifier: Apache-2.0
 *
 * Which instruction set computes. One choice per process serves libtutti's kernels, libtutti-tensor, its BLAS and
 * oneDNN: the best that this machine has, or what the setting TUTTI_ISA limits it to. It is made once, by the first
 * world that opens or the first computation, and stays. Safe from any thread.
 */
#ifndef TU_BASE_INSTRUCTIONS_H
#define TU_BASE_INSTRUCTIONS_H

#include <stdatomic.h>
#include <stdbool.h>

#include <tutti/status.h>

#include "base/error.h"

/* 0 is no level. A later one of the same architecture includes the earlier ones. */
typedef enum tu_instructions {
    TU_REFERENCE = 1, /* plain C: what the compiler makes of it for any machine of the architecture */
    TU_NEON = 2,
    TU_AVX2 = 3,   /* with FMA and F16C */
    TU_AVX512 = 4, /* F, BW, VL and DQ */
    TU_INSTRUCTIONS_END
} tu_instructions;

/* "reference", "neon", "avx2", "avx512". */
const char *tu_instructions_name(tu_instructions level);
bool tu_instructions_present(tu_instructions level);

/* Makes the choice: by name, or with NULL or "", where there is none yet, by TUTTI_ISA, else the best.
 * TUTTI_ERROR_ARGUMENT for a word that is no level, TUTTI_ERROR_UNSUPPORTED for a level that this machine lacks,
 * TUTTI_ERROR_STATE where this process already computes with another. */
TU_SHARED tutti_status tu_instructions_choose(const char *name);

/* The choice; made now if it was not yet. Where TUTTI_ISA has no meaning here it is the best: whoever can report an
 * error calls tu_instructions_choose first. */
TU_SHARED tu_instructions tu_instructions_get(void);

/* Whether somebody asked for this level, so that libraries with an own choice must be told. */
TU_SHARED bool tu_instructions_asked(void);

/* The choice itself: a level, with TU_INSTRUCTIONS_ASKED where somebody named it; 0 until it is made. Whoever comes
 * first stores it, in one exchange; nothing else hangs on it, so relaxed order is enough. */
#define TU_INSTRUCTIONS_ASKED 0x100u
extern _Atomic unsigned tu_instructions_choice;

#endif
