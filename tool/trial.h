/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether a world would open with the environment as it is.
 */
#ifndef TUTTI_TOOL_TRIAL_H
#define TUTTI_TOOL_TRIAL_H

#include <stdbool.h>
#include <stddef.h>

/* True when it does; else `problem` says why not. `computes`: ranks also meet in memory and add up; without, as a fault
 * that is injected on purpose would end them, the world is only opened. Call it while this process has one thread. */
bool trial(bool computes, char *problem, size_t room);

#endif
