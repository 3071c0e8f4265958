/* SPDX-License-Identifier: Apache-2.0
 *
 * src/collective/hosts_direct.c as it is, on the simulation: see simulation.h.
 */
#include "transport.h"

#include "collective/hosts_direct.c"
