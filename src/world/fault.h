/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults to inject, as tu_group_enter sees them.
 */
#ifndef TU_WORLD_FAULT_H
#define TU_WORLD_FAULT_H

#include "world/world.h"

typedef struct tu_faults tu_faults;

/* Adds the fault that `spec` describes; "" adds none. *faults starts as NULL. */
tutti_status tu_faults_add(tu_faults **faults, const char *spec, const tutti_world *world);
void tu_faults_free(tu_faults *faults);

/* At the entry of an operation of a world that has faults: delivers the one that is due. */
tutti_status tu_fault_meet(tutti_group *group, const tu_operation_info *info);

#endif
