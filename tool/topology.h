/* SPDX-License-Identifier: Apache-2.0
 *
 * Which processors a rank gets.
 */
#ifndef TUTTI_TOOL_TOPOLOGY_H
#define TUTTI_TOOL_TOPOLOGY_H

#include <stddef.h>

typedef enum binding_policy {
    BIND_AUTO, /* core while there are enough cores, else none */
    BIND_CORE, /* an equal share of the cores each, neighbours side by side */
    BIND_NUMA, /* the NUMA nodes of that share */
    BIND_NONE
} binding_policy;

#define BINDING_WORDS 128 /* 8192 CPUs */

typedef struct binding {
    unsigned long cpus[BINDING_WORDS]; /* as sched_setaffinity takes them */
    char text[160];                    /* "cores 0-3 (CPUs 0-7), package 0, NUMA node 0" */
} binding;

/* CPUs that this process may use. */
int topology_cpus(void);

/* Fills one binding per rank. Returns 1 when ranks are to be bound, 0 when not (`why` says why), -1 when the policy
 * cannot be kept (`why` says why). */
int topology_bind(binding_policy policy, int ranks, binding *bindings, char *why, size_t why_bytes);

/* "0-3,8": the CPUs of a set, for people. */
void topology_cpu_text(const unsigned long *cpus, char *text, size_t bytes);

#endif
