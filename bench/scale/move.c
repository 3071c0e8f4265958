/* SPDX-License-Identifier: Apache-2.0
 *
 * src/collective/hosts_move.c as it is, on the simulation: see simulation.h.
 */
#include "transport.h"

#include "collective/hosts_move.c"
