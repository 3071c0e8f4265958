/* SPDX-License-Identifier: Apache-2.0
 *
 * What the process knows of all its worlds: which are open, who is in a call, which were closed.
 */
#ifndef TU_WORLD_LIST_H
#define TU_WORLD_LIST_H

#include "world/launch.h"

/* How many real worlds are open in this process, and their names. */
int tu_worlds_open(char names[256]);

/* An open world that was opened by this spawned rank; NULL: none. */
tutti_world *tu_worlds_of(const tu_spawn_record *spawn);

/* Enters the world, unless this rank has one of that name open at the same place. */
tutti_status tu_worlds_claim(tutti_world *world);
/* Takes it off the list; whether it was there. */
bool tu_worlds_unclaim(tutti_world *world);

/* Ends the waits of other threads in this world, which is marked as closed, and waits until they have left it; false
 * when they have not within the world's timeout. */
bool tu_world_empty(tutti_world *world);

/* Keeps the bare structs of a world that was closed, so that a late call is told so. */
void tu_worlds_bury(tutti_world *world);
/* Frees them at once: of one that never opened. */
void tu_world_free_shells(tutti_world *world);

#endif
