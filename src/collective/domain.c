/* SPDX-License-Identifier: Apache-2.0
 *
 * Caches and NUMA nodes of the ranks, read from the system's tables: quick enough for a group's first collective, where
 * loading a whole topology would not be. A topology of another machine, synthetic or captured (HWLOC_SYNTHETIC,
 * HWLOC_XMLFILE), is read by hwloc; the ranks are then thought on its processors in order.
 */
#include "collective/domain.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#if TUTTI_HAVE_HWLOC
#include <hwloc.h>
#endif

/* A number in a small file of the system; -1 when there is none. */
static int read_number(const char *path) {
    char text[32];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return -1;
    text[length] = 0;
    return atoi(text);
}

static int cache_of(int cpu) {
    char path[96];
    for (int index = 3; index >= 2; index--) {
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cache/index%d/id", cpu, index);
        int id = read_number(path);
        if (id >= 0)
            return id;
    }
    return -1;
}

static int node_of(int cpu) {
    char path[96];
    for (int node = 0; node < 64; node++) {
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/node%d", cpu, node);
        if (access(path, F_OK) == 0)
            return node;
    }
    return -1;
}

#if TUTTI_HAVE_HWLOC
static bool foreign_topology(void) {
    return secure_getenv("HWLOC_SYNTHETIC") != NULL || secure_getenv("HWLOC_XMLFILE") != NULL;
}

static tu_locality foreign_place(int local_rank) {
    tu_locality place = { -1, -1 };
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) != 0)
        return place;
    if (hwloc_topology_load(topology) == 0) {
        int count = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PU);
        hwloc_obj_t unit =
            count > 0 ? hwloc_get_obj_by_type(topology, HWLOC_OBJ_PU, (unsigned)(local_rank % count)) : NULL;
        hwloc_obj_t cache = unit != NULL ? hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_L3CACHE, unit) : NULL;
        hwloc_obj_t node = NULL;
        while (unit != NULL && (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != NULL)
            if (hwloc_bitmap_isincluded(unit->cpuset, node->cpuset))
                place.node = (int)node->logical_index;
        if (cache != NULL)
            place.cache = (int)cache->logical_index;
    }
    hwloc_topology_destroy(topology);
    return place;
}
#endif

tu_locality tu_locality_here(int local_rank) {
    tu_locality place = { -1, -1 };
#if TUTTI_HAVE_HWLOC
    if (foreign_topology())
        return foreign_place(local_rank);
#endif
    (void)local_rank;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return place;
    int first = -1, last = -1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &set)) {
            first = first < 0 ? cpu : first;
            last = cpu;
        }
    }
    if (first < 0)
        return place;
    /* The set is one stretch or a few siblings: its ends tell whether it stays within one cache. */
    place.cache = cache_of(first);
    if (last != first && cache_of(last) != place.cache)
        place.cache = -1;
    place.node = node_of(first);
    if (last != first && node_of(last) != place.node)
        place.node = -1;
    return place;
}

static int domain_of(const tu_locality *place, int by_cache) {
    return by_cache ? place->cache : place->node;
}

static int distinct(const tu_locality *places, int size, int by_cache) {
    int count = 0;
    for (int i = 0; i < size; i++) {
        int seen = 0;
        for (int j = 0; j < i && !seen; j++)
            seen = domain_of(&places[j], by_cache) == domain_of(&places[i], by_cache);
        count += !seen;
    }
    return count;
}

struct tu_domains *tu_domains_make(const tu_locality *places, int size) {
    tu_domains *domains = calloc(1, sizeof *domains);
    if (domains == NULL)
        return NULL;
    domains->leader = calloc((size_t)size, sizeof(int));
    domains->leaders = calloc((size_t)size, sizeof(int));
    if (domains->leader == NULL || domains->leaders == NULL) {
        tu_domains_free(domains);
        return NULL;
    }
    int by_cache = distinct(places, size, 1) > 1;
    for (int i = 0; i < size; i++) {
        int leader = i;
        for (int j = 0; j < i && leader == i; j++)
            if (domain_of(&places[j], by_cache) == domain_of(&places[i], by_cache))
                leader = j;
        domains->leader[i] = leader;
        if (leader == i)
            domains->leaders[domains->count++] = i;
    }
    return domains;
}

void tu_domains_free(struct tu_domains *domains) {
    if (domains == NULL)
        return;
    free(domains->leader);
    free(domains->leaders);
    free(domains);
}
