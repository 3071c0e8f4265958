/* SPDX-License-Identifier: Apache-2.0
 *
 * How near ranks, cores, memory and devices are to each other on this host.
 *
 * Needs hwloc, but for devices; in a build without it the calls are TUTTI_ERROR_UNSUPPORTED and say so. HWLOC_SYNTHETIC
 * and HWLOC_XMLFILE show another machine instead of this one, as in every program that uses hwloc.
 */
#ifndef TUTTI_CONNECTIVITY_H
#define TUTTI_CONNECTIVITY_H

#include <stddef.h>

#include <tutti/device.h>
#include <tutti/status.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What two places share, nearest first. */
typedef enum tutti_link {
    TUTTI_LINK_SELF = 1,    /* the same place */
    TUTTI_LINK_CORE = 2,    /* hyper-threads of one core */
    TUTTI_LINK_CACHE = 3,   /* the last-level cache */
    TUTTI_LINK_NODE = 4,    /* a NUMA node */
    TUTTI_LINK_PACKAGE = 5, /* a socket */
    TUTTI_LINK_MACHINE = 6, /* the machine's memory, across sockets */
    TUTTI_LINK_NETWORK = 7, /* another host */
    TUTTI_LINK_DIRECT = 8   /* devices: links of their own, beside the machine's (NVLink) */
} tutti_link;

/* "self", "core", "cache", "node", "package", "machine", "network", "direct". */
TUTTI_API const char *tutti_link_name(tutti_link link);

typedef struct tutti_connectivity tutti_connectivity;

typedef enum tutti_place {
    TUTTI_PLACE_PROCESSOR = 1, /* what the system schedules on: a hyper-thread, or a core without */
    TUTTI_PLACE_NODE = 2       /* a NUMA node */
} tutti_place;

/* Between the processors, or the NUMA nodes, of this host. No other rank is involved. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_connectivity_machine(tutti_place place, tutti_connectivity **connectivity);

/* Between the ranks of a group: collective, bounded. A rank's place is the set of processors it may run on; two ranks
 * are as far apart as the farthest of theirs, so that ranks that are not bound share the machine. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_connectivity_ranks(tutti_group *group, tutti_connectivity **connectivity);

/* Between the devices of a kind (TUTTI_CUDA) that this process sees, as its backend tells: TUTTI_LINK_DIRECT where data
 * goes over links of their own, TUTTI_LINK_MACHINE where it goes through the machine. No other rank is involved. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_connectivity_devices(tutti_world *world, tutti_device kind,
                                                                tutti_connectivity **connectivity);

/* The matrix is `size` times `size`, symmetric, TUTTI_LINK_SELF on its diagonal. */
TUTTI_API int tutti_connectivity_size(const tutti_connectivity *connectivity);
/* 0 for an index outside [0, size). */
TUTTI_API tutti_link tutti_connectivity_link(const tutti_connectivity *connectivity, int a, int b);
/* Relative access latency between the NUMA nodes of two places as firmware gives it (10 is local), 0 where it gives
 * none. */
TUTTI_API int tutti_connectivity_distance(const tutti_connectivity *connectivity, int a, int b);
/* How many links of their own two devices have between them (NVLinks, through switches too); 0 for anything else. */
TUTTI_API int tutti_connectivity_direct(const tutti_connectivity *connectivity, int a, int b);
/* "rank 2 on calliope, processors 4-7 (node 1)"; "processor 3 (core 1, node 0)". Lent; "" for an index outside. */
TUTTI_API const char *tutti_connectivity_place(const tutti_connectivity *connectivity, int index);

/* Ends the matrix. NULL is allowed. */
TUTTI_API void tutti_connectivity_release(tutti_connectivity *connectivity);

#ifdef __cplusplus
}
#endif
#endif
