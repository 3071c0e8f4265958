/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the results of steps lie: those that live and die inside a run share one block of memory, the arena, which the
 * program keeps from run to run. A place is used again when what was there has died; a loop writes its result over an
 * input that dies with it where each element is read before its place is written.
 */
#ifndef TU_LOOPS_PLAN_H
#define TU_LOOPS_PLAN_H

#include "loops/group.h"

typedef struct tu_planned {
    bool here;        /* in the arena; else the memory is made when it is needed, as operators do */
    int first, last;  /* steps */
    size_t bytes, at; /* in the arena */
    int over;         /* the storage whose place it takes over in its first step; -1: none */
    const tu_value *value;
} tu_planned;

typedef struct tu_plan {
    int storage_count;
    tu_planned *storages; /* by number */
    size_t bytes;         /* of the arena */
    size_t live;          /* of all planned storages that are alive at once, at most */
    size_t total;         /* of all planned storages */
} tu_plan;

/* After the nests were scheduled. */
tutti_status tu_plan_make(const tt_graph *graph, const tu_step_of_program *steps, int step_count, tu_plan *plan);
void tu_plan_free(tu_plan *plan);
void tu_plan_print(FILE *to, const tu_plan *plan);

#endif
