/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TU_WORLD_REFILL_H
#define TU_WORLD_REFILL_H

#include "world/world.h"

/* The launcher's key in the store, by rank: why nobody will take its place any more, in words, with a zero byte. */
#define TU_REFILL_OVER "tutti/refill-over/%d"

/* The newcomer's way to open a world (refill.c): announces itself, waits for the others' welcome, joins their job and
 * the group that all make then. world->store is open. Fills world->job and world->group. */
tutti_status tu_refill_join(tutti_world *world, const tu_job_options *options, int64_t deadline);

#endif
