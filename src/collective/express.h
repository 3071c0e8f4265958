/* SPDX-License-Identifier: Apache-2.0
 *
 * What the express lanes have in common: short collectives (express.c) and short messages (short.c) of a group that is
 * as it almost always is.
 */
#ifndef TU_COLLECTIVE_EXPRESS_H
#define TU_COLLECTIVE_EXPRESS_H

#include "base/bare.h"
#include "collective/collective.h"
#include "job/liveness.h"

/* The group as it almost always is: alive, on this host, with nobody departed, no faults to inject, no devices, and
 * nothing on its way to memory on other hosts. The reasons are looked for, and told, on the ordinary way. To be asked
 * inside a call (TU_INSIDE_GROUP). */
static inline bool tu_group_usual(const tutti_group *group) {
    if (group == NULL || group == TUTTI_NON_GROUP_MEMBER || group->size == 1 || !group->local)
        return false;
    const tutti_world *world = group->world;
    if (world->fake || world->faults != NULL || atomic_load_explicit(&world->devices, memory_order_relaxed) != NULL ||
        !atomic_load_explicit(&world->looked, memory_order_relaxed) ||
        atomic_load_explicit(&world->unfenced, memory_order_relaxed) != 0)
        return false;
    if (TUTTI_BARE)
        return true;
    return atomic_load_explicit(&world->closed, memory_order_acquire) == 0 && !tu_job_forked(world->job) &&
           atomic_load_explicit(&group->destroyed, memory_order_relaxed) == 0 && !tu_group_ended(group) &&
           tu_job_departures(world->job) == atomic_load_explicit(&group->departures, memory_order_relaxed);
}

#endif
