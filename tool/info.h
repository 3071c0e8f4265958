/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti info` on other hosts: info_hosts.c.
 */
#ifndef TUTTI_TOOL_INFO_H
#define TUTTI_TOOL_INFO_H

#include <stdint.h>

/* Prints what it says on each host of a comma list; ranks 0: not said. The exit status. */
int info_hosts(const char *hosts, const char *rsh, int64_t ranks);

#endif
