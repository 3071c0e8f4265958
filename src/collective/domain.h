/* SPDX-License-Identifier: Apache-2.0
 *
 * Who shares a cache or a NUMA node with whom, and the two-level tree that follows from it.
 */
#ifndef TU_COLLECTIVE_DOMAIN_H
#define TU_COLLECTIVE_DOMAIN_H

#include <stdbool.h>
#include <stdint.h>

/* Where a rank runs. -1: not bound to one, or not known. */
typedef struct tu_locality {
    int32_t cache; /* index of the last-level cache */
    int32_t node;  /* of the NUMA node */
} tu_locality;

/* Of the calling thread, from its CPU set. */
tu_locality tu_locality_here(int local_rank);

typedef struct tu_domains {
    int count;    /* of domains; 1: no hierarchy */
    int *leader;  /* of each member: the lowest rank of its domain */
    int *leaders; /* `count` ranks, ascending */
} tu_domains;

/* Domains by last-level cache when the members span several caches, else by NUMA node, else one. Places that are not
 * known make one domain. NULL when memory is short: then there is no hierarchy. */
struct tu_domains *tu_domains_make(const tu_locality *places, int size);
void tu_domains_free(struct tu_domains *domains);

#endif
