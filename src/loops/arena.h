/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory of a run: one block, and storages in it. The block lives as long as one of its storages does, so that a
 * tensor that somebody keeps stays good; then the next run has a new one.
 */
#ifndef TU_LOOPS_ARENA_H
#define TU_LOOPS_ARENA_H

#include "loops/plan.h"

typedef struct tu_arena {
    atomic_int references; /* the run's or the program's, and one per storage */
    size_t bytes;
    char *memory;
} tu_arena;

/* NULL with the thread's error written. */
tu_arena *tu_arena_new(size_t bytes);
void tu_arena_drop(tu_arena *arena);
/* Whether nobody but the caller has it any more. */
bool tu_arena_is_free(const tu_arena *arena);
/* A storage at the place of the plan. */
tu_storage *tu_arena_storage(tu_arena *arena, const tu_planned *planned);

/* Gives the results of a call their places: a source of memory while the vertex runs. */
typedef struct tu_arena_source {
    tu_source source;
    tu_arena *arena;
    const tu_plan *plan;
    const tu_vertex *vertex;
    int next; /* result; below 0: numbers among the operands come first */
} tu_arena_source;
void tu_arena_begin(tu_arena_source *source, tu_arena *arena, const tu_plan *plan, const tu_vertex *vertex);
void tu_arena_end(tu_arena_source *source);

#endif
