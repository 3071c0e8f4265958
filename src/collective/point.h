/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives of a group.
 */
#ifndef TU_COLLECTIVE_POINT_H
#define TU_COLLECTIVE_POINT_H

#include "collective/collective.h"

void tu_points_free(tu_points *points);

#endif
