/* SPDX-License-Identifier: Apache-2.0
 *
 * A tape keeps the random states that a region of a program draws, so that the region can run once more with the very
 * same numbers: a checkpoint does that. States are tensors, so in a graph the second run uses the vertices of the
 * first.
 */
#ifndef TU_TENSOR_TAPE_H
#define TU_TENSOR_TAPE_H

#include <stdbool.h>
#include <stddef.h>

#include <tutti/tensor.h>

typedef struct tu_tape {
    struct tu_tape *outer;
    bool replays;
    size_t count, capacity, next; /* `next`: which one a replay gives out */
    tt_tensor **states;           /* held */
} tu_tape;

/* From here to tu_tape_end the calling thread's draws are kept on the tape, or come from it. They nest. */
void tu_tape_begin(tu_tape *tape, bool replays);
void tu_tape_end(tu_tape *tape);
void tu_tape_free(tu_tape *tape);

#endif
