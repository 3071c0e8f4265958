/* SPDX-License-Identifier: Apache-2.0
 *
 * Batches: calls that are noted and run together.
 */
#ifndef TU_COLLECTIVE_BATCH_H
#define TU_COLLECTIVE_BATCH_H

#include "collective/collective.h"
#include "collective/short.h"

/* Where the next task goes, for those who make it there; it counts once it is noted. NULL: no memory, with an error. */
tu_task *tu_batch_place(tutti_batch *batch);
/* Refuses a call that is to be noted and to start a work, whoever would run it. */
tutti_status tu_batch_check(const char *name, const tutti_call *call);
/* Notes a checked task, which may lie in its place already. */
tutti_status tu_batch_note(tutti_batch *batch, const tu_task *task);
/* Where the next `count` short messages of the group go; they count once they are noted. NULL: they have to be noted as
 * tasks. */
tu_short *tu_batch_short_places(tutti_batch *batch, const tutti_group *group, int count);
void tu_batch_note_short(tutti_batch *batch, int count);
/* Runs all of it. The first error is returned. */
tutti_status tu_batch_run(tutti_batch *batch);
/* The same in two steps: gives the collectives their numbers; runs them in their turn. */
tutti_status tu_batch_enter(tutti_batch *batch);
tutti_status tu_batch_run_in_turn(tutti_batch *batch);
void tu_batch_free(tutti_batch *batch);

#endif
