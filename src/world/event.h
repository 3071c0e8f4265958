/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TU_WORLD_EVENT_H
#define TU_WORLD_EVENT_H

#include "world/world.h"

/* Ends the helper and what it collected; NULL is allowed. */
void tu_events_free(struct tu_events *events);

#endif
