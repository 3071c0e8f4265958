/* SPDX-License-Identifier: Apache-2.0
 *
 * The process's list of open worlds, as tutti_spawn asks it.
 */
#ifndef TU_WORLD_LIST_H
#define TU_WORLD_LIST_H

#include "world/launch.h"

/* How many real worlds are open in this process, and their names. */
int tu_worlds_open(char names[256]);

/* An open world that was opened by this spawned rank; NULL: none. */
tutti_world *tu_worlds_of(const tu_spawn_record *spawn);

#endif
