/* SPDX-License-Identifier: Apache-2.0
 *
 * What the algorithms have in common: who listens to whom, a rank's own part, splits, and where symmetric buffers lie.
 */
#ifndef TU_COLLECTIVE_PARTS_H
#define TU_COLLECTIVE_PARTS_H

#include "collective/collective.h"

/* Copies what a rank sends to itself; `first` true before anything is taken, false after everything was. */
void tu_keep_own_part(tu_collective *state, tu_task *task, bool first);

/* all_to_all_v: what goes to whom, for the others to read and to compare. */
void tu_publish_splits(tu_collective *state, const tu_task *task, uint64_t epoch);
tutti_status tu_compare_splits(tu_collective *state, tu_task *task, uint64_t epoch);

/* Where this rank's buffers lie, as far as others may use them in place in this operation. */
void tu_refer(tu_collective *state, const tu_task *task, tu_reference *reference);
/* Copies all members' references of `epoch` into state->references, after all arrived. */
void tu_read_references(tu_collective *state, uint64_t epoch);
/* The address here of what a member referred to, and the bytes from there to the end of its block: nobody is believed
 * to stay within it. The index must not be 0. */
tutti_status tu_resolve(tu_collective *state, tu_task *task, int member, uint32_t index, uint64_t offset,
                        unsigned char **address, size_t *room);
/* The same for the whole input or output, which must lie in the block. */
tutti_status tu_resolve_in(tu_collective *state, tu_task *task, int member, unsigned char **address);
tutti_status tu_resolve_out(tu_collective *state, tu_task *task, int member, unsigned char **address);
/* Writes the error for a member whose published words cannot be: TUTTI_ERROR_PROTOCOL. */
tutti_status tu_garbage(tu_collective *state, const tu_task *task, int member, const char *what);

#endif
