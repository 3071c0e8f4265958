/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations of all ranks as a trace that https://ui.perfetto.dev and chrome://tracing open.
 */
#ifndef TUTTI_TOOL_TIMELINE_H
#define TUTTI_TOOL_TIMELINE_H

#include <stdio.h>

#include "flight.h"

/* A process per rank; operations that overlap lie on tracks of their own; times count from the first of all. Returns 0,
 * or 1 after saying that there is no memory. */
int timeline_write(const flight_list *list, FILE *file);

#endif
