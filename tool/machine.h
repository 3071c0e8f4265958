/* SPDX-License-Identifier: Apache-2.0
 *
 * What /proc and /sys say about this machine, for the sub-commands that tell it.
 */
#ifndef TUTTI_TOOL_MACHINE_H
#define TUTTI_TOOL_MACHINE_H

#include <stdbool.h>
#include <stddef.h>

/* The first line of a file, without its end; false, and an empty text, when it cannot be read. */
bool machine_first_line(const char *path, char *text, size_t bytes);

/* What follows the ':' in the first line that begins with `key`; false, and an empty text, when there is none. */
bool machine_line_of(const char *path, const char *key, char *text, size_t bytes);

/* "AMD EPYC 7763", or "unknown processor". */
void machine_processor(char *text, size_t bytes);

int machine_nodes(void); /* NUMA nodes; 1 where the kernel tells of none */
int machine_gpus(void);  /* NVIDIA's, that there are devices for */

#endif
