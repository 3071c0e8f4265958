/* SPDX-License-Identifier: Apache-2.0
 *
 * Connectivity: what hwloc knows of the machine, as a matrix between processors, NUMA nodes or ranks; and what a
 * backend knows of the links between its devices.
 *
 * Each rank tells the others its host and the processors it may run on; everybody then computes the same matrix from
 * its own topology of the host that they share. Between hosts there is only the network.
 */
#include <tutti/connectivity.h>

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "memory/memory.h"
#include "world/group.h"
#include "world/world.h"

#define PLACE_BYTES 192

struct tutti_connectivity {
    int size;
    unsigned char *links; /* size * size, of tutti_link */
    int *distances;       /* size * size */
    int *direct;          /* size * size: links that lead straight from one device to another */
    char (*places)[PLACE_BYTES];
};

const char *tutti_link_name(tutti_link link) {
    static const char *const names[] = {
        "?", "self", "core", "cache", "node", "package", "machine", "network", "direct"
    };
    return link < TUTTI_LINK_SELF || link > TUTTI_LINK_DIRECT ? names[0] : names[link];
}

int tutti_connectivity_size(const tutti_connectivity *connectivity) {
    return connectivity->size;
}

static bool inside(const tutti_connectivity *connectivity, int index) {
    return index >= 0 && index < connectivity->size;
}

tutti_link tutti_connectivity_link(const tutti_connectivity *connectivity, int a, int b) {
    return inside(connectivity, a) && inside(connectivity, b)
               ? (tutti_link)connectivity->links[a * connectivity->size + b]
               : (tutti_link)0;
}

int tutti_connectivity_distance(const tutti_connectivity *connectivity, int a, int b) {
    return inside(connectivity, a) && inside(connectivity, b) ? connectivity->distances[a * connectivity->size + b] : 0;
}

int tutti_connectivity_direct(const tutti_connectivity *connectivity, int a, int b) {
    return inside(connectivity, a) && inside(connectivity, b) ? connectivity->direct[a * connectivity->size + b] : 0;
}

const char *tutti_connectivity_place(const tutti_connectivity *connectivity, int index) {
    return inside(connectivity, index) ? connectivity->places[index] : "";
}

void tutti_connectivity_release(tutti_connectivity *connectivity) {
    if (connectivity == NULL)
        return;
    free(connectivity->links);
    free(connectivity->distances);
    free(connectivity->direct);
    free(connectivity->places);
    free(connectivity);
}

static tutti_status make(int size, tutti_connectivity **result) {
    size_t cells = (size_t)size * (size_t)size;
    tutti_connectivity *made = calloc(1, sizeof *made);
    if (made != NULL) {
        made->size = size;
        made->links = calloc(cells, sizeof *made->links);
        made->distances = calloc(cells, sizeof *made->distances);
        made->direct = calloc(cells, sizeof *made->direct);
        made->places = calloc((size_t)size, sizeof *made->places);
    }
    if (made == NULL || made->links == NULL || made->distances == NULL || made->direct == NULL ||
        made->places == NULL) {
        tutti_connectivity_release(made);
        return tu_error_memory("a connectivity matrix", cells * (sizeof *made->links + sizeof *made->distances));
    }
    *result = made;
    return TUTTI_OK;
}

/* ---- devices ---- */

static tutti_status ask_backend(tutti_world *world, tutti_device kind, const tu_backend **backend, int *count) {
    void *state;
    tutti_status status = tu_backend_get(world, kind, backend, &state);
    if (status == TUTTI_OK && (*backend)->memory->links == NULL)
        status = tu_error(TUTTI_ERROR_UNSUPPORTED, "backend %s does not tell how its devices are connected",
                          (*backend)->name);
    return status == TUTTI_OK ? (*backend)->probe(&tu_backend_host_table, count) : status;
}

tutti_status tutti_connectivity_devices(tutti_world *world, tutti_device kind, tutti_connectivity **result) {
    if (world == NULL || result == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_connectivity_devices needs a world and a place for its result");
    const tu_backend *backend;
    tutti_connectivity *made = NULL;
    int count = 0;
    tutti_status status = tu_world_check(world);
    if (status == TUTTI_OK)
        status = ask_backend(world, kind, &backend, &count);
    if (status == TUTTI_OK)
        status = make(count, &made);
    if (status != TUTTI_OK)
        return status;
    status = backend->memory->links(&tu_backend_host_table, made->direct, count);
    if (status != TUTTI_OK) {
        tutti_connectivity_release(made);
        return status;
    }
    for (int a = 0; a < count; a++) {
        snprintf(made->places[a], PLACE_BYTES, "%s", tutti_device_name(tutti_device_at(kind, a)));
        for (int b = 0; b < count; b++)
            made->links[a * count + b] = (unsigned char)(a == b                            ? TUTTI_LINK_SELF
                                                         : made->direct[a * count + b] > 0 ? TUTTI_LINK_DIRECT
                                                                                           : TUTTI_LINK_MACHINE);
    }
    *result = made;
    return TUTTI_OK;
}

#if TUTTI_HAVE_HWLOC

#include <hwloc.h>

static tutti_status load(hwloc_topology_t *topology) {
    if (hwloc_topology_init(topology) != 0)
        return tu_error(TUTTI_ERROR_SYSTEM, "hwloc cannot be started");
    if (hwloc_topology_load(*topology) != 0) {
        hwloc_topology_destroy(*topology);
        return tu_error(TUTTI_ERROR_SYSTEM, "hwloc cannot read the topology of this machine");
    }
    return TUTTI_OK;
}

/* ---- links ---- */

/* Whether one object of the type covers the set. */
static bool covered(hwloc_topology_t topology, hwloc_obj_type_t type, hwloc_const_cpuset_t set) {
    hwloc_obj_t object = NULL;
    while ((object = hwloc_get_next_obj_by_type(topology, type, object)) != NULL) {
        if (object->cpuset != NULL && hwloc_bitmap_isincluded(set, object->cpuset))
            return true;
    }
    return false;
}

static bool share_last_cache(hwloc_topology_t topology, hwloc_const_cpuset_t set) {
    static const hwloc_obj_type_t caches[] = { HWLOC_OBJ_L5CACHE, HWLOC_OBJ_L4CACHE, HWLOC_OBJ_L3CACHE,
                                               HWLOC_OBJ_L2CACHE };
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++) {
        if (hwloc_get_nbobjs_by_type(topology, caches[i]) > 0)
            return covered(topology, caches[i], set);
    }
    return false;
}

/* The nearest thing that covers both. */
static tutti_link link_between(hwloc_topology_t topology, hwloc_const_cpuset_t a, hwloc_const_cpuset_t b) {
    hwloc_bitmap_t both = hwloc_bitmap_alloc();
    if (both == NULL)
        return TUTTI_LINK_MACHINE;
    hwloc_bitmap_or(both, a, b);
    tutti_link link = TUTTI_LINK_MACHINE;
    if (covered(topology, HWLOC_OBJ_CORE, both))
        link = TUTTI_LINK_CORE;
    else if (share_last_cache(topology, both))
        link = TUTTI_LINK_CACHE;
    else if (hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE) > 1 && covered(topology, HWLOC_OBJ_NUMANODE, both))
        link = TUTTI_LINK_NODE;
    else if (covered(topology, HWLOC_OBJ_PACKAGE, both))
        link = TUTTI_LINK_PACKAGE;
    hwloc_bitmap_free(both);
    return link;
}

/* ---- distances ---- */

/* The first NUMA node that a set touches, or NULL. */
static hwloc_obj_t node_of(hwloc_topology_t topology, hwloc_const_cpuset_t set) {
    hwloc_obj_t node = NULL;
    while ((node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != NULL) {
        if (node->cpuset != NULL && hwloc_bitmap_intersects(node->cpuset, set))
            return node;
    }
    return NULL;
}

static int distance_between(hwloc_topology_t topology, hwloc_obj_t a, hwloc_obj_t b) {
    struct hwloc_distances_s *distances;
    unsigned count = 1;
    hwloc_uint64_t there = 0, back = 0;
    if (a == NULL || b == NULL ||
        hwloc_distances_get_by_type(topology, HWLOC_OBJ_NUMANODE, &count, &distances,
                                    HWLOC_DISTANCES_KIND_FROM_OS | HWLOC_DISTANCES_KIND_MEANS_LATENCY, 0) != 0 ||
        count == 0)
        return 0;
    if (hwloc_distances_obj_pair_values(distances, a, b, &there, &back) != 0)
        there = 0;
    hwloc_distances_release(topology, distances);
    return (int)there;
}

/* ---- the machine ---- */

static void place_of_processor(hwloc_topology_t topology, hwloc_obj_t object, char text[PLACE_BYTES]) {
    hwloc_obj_t core = hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_CORE, object);
    hwloc_obj_t node = node_of(topology, object->cpuset);
    hwloc_obj_t package = hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_PACKAGE, object);
    snprintf(text, PLACE_BYTES, "processor %u (core %d, node %d, package %d)", object->os_index,
             core == NULL ? -1 : (int)core->logical_index, node == NULL ? -1 : (int)node->os_index,
             package == NULL ? -1 : (int)package->logical_index);
}

static void place_of_node(hwloc_obj_t object, char text[PLACE_BYTES]) {
    char *set = NULL;
    hwloc_bitmap_list_asprintf(&set, object->cpuset);
    snprintf(text, PLACE_BYTES, "node %u (processors %.80s, %llu MiB)", object->os_index, set == NULL ? "?" : set,
             (unsigned long long)(object->attr->numanode.local_memory >> 20));
    free(set);
}

tutti_status tutti_connectivity_machine(tutti_place place, tutti_connectivity **result) {
    if (result == NULL || (place != TUTTI_PLACE_PROCESSOR && place != TUTTI_PLACE_NODE))
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_connectivity_machine needs a kind of place and a place for its result");
    hwloc_topology_t topology;
    tutti_status status = load(&topology);
    if (status != TUTTI_OK)
        return status;
    hwloc_obj_type_t type = place == TUTTI_PLACE_NODE ? HWLOC_OBJ_NUMANODE : HWLOC_OBJ_PU;
    int size = hwloc_get_nbobjs_by_type(topology, type);
    tutti_connectivity *made;
    status = make(size, &made);
    for (int a = 0; status == TUTTI_OK && a < size; a++) {
        hwloc_obj_t from = hwloc_get_obj_by_type(topology, type, (unsigned)a);
        if (place == TUTTI_PLACE_NODE)
            place_of_node(from, made->places[a]);
        else
            place_of_processor(topology, from, made->places[a]);
        for (int b = 0; b < size; b++) {
            hwloc_obj_t to = hwloc_get_obj_by_type(topology, type, (unsigned)b);
            made->links[a * size + b] =
                (unsigned char)(a == b ? TUTTI_LINK_SELF : link_between(topology, from->cpuset, to->cpuset));
            made->distances[a * size + b] =
                distance_between(topology, node_of(topology, from->cpuset), node_of(topology, to->cpuset));
        }
    }
    hwloc_topology_destroy(topology);
    if (status == TUTTI_OK)
        *result = made;
    return status;
}

/* ---- ranks ---- */

typedef struct rank_record {
    char host[64];
    char processors[512]; /* as a list: "0-3,8" */
} rank_record;

static tutti_status describe_self(hwloc_topology_t topology, const tutti_world *world, rank_record *record) {
    *record = (rank_record){ 0 };
    snprintf(record->host, sizeof record->host, "%s",
             world->job == NULL ? "fake" : tu_job_host(world->job, world->rank));
    cpu_set_t mine;
    hwloc_bitmap_t set = hwloc_bitmap_alloc();
    if (set == NULL)
        return tu_error_memory("a set of processors", 0);
    if (sched_getaffinity(0, sizeof mine, &mine) == 0) {
        for (int i = 0; i < CPU_SETSIZE; i++) {
            if (CPU_ISSET(i, &mine))
                hwloc_bitmap_set(set, (unsigned)i);
        }
    }
    hwloc_bitmap_and(set, set, hwloc_topology_get_topology_cpuset(topology)); /* which may be another machine's */
    if (hwloc_bitmap_iszero(set))
        hwloc_bitmap_copy(set, hwloc_topology_get_topology_cpuset(topology));
    hwloc_bitmap_list_snprintf(record->processors, sizeof record->processors, set);
    hwloc_bitmap_free(set);
    return TUTTI_OK;
}

static tutti_status fill_ranks(hwloc_topology_t topology, const rank_record *records, tutti_connectivity *made) {
    int size = made->size;
    hwloc_bitmap_t *sets = calloc((size_t)size, sizeof *sets);
    tutti_status status = sets == NULL ? tu_error_memory("sets of processors", (size_t)size * sizeof *sets) : TUTTI_OK;
    for (int a = 0; status == TUTTI_OK && a < size; a++) {
        sets[a] = hwloc_bitmap_alloc();
        if (sets[a] == NULL || hwloc_bitmap_list_sscanf(sets[a], records[a].processors) != 0)
            status = tu_error_memory("a set of processors", sizeof records[a].processors);
    }
    for (int a = 0; status == TUTTI_OK && a < size; a++) {
        hwloc_obj_t node = node_of(topology, sets[a]);
        snprintf(made->places[a], PLACE_BYTES, "rank %d on %.63s, processors %.80s (node %d)", a, records[a].host,
                 records[a].processors, node == NULL ? -1 : (int)node->os_index);
        for (int b = 0; b < size; b++) {
            bool same_host = strcmp(records[a].host, records[b].host) == 0;
            tutti_link link = a == b      ? TUTTI_LINK_SELF
                              : same_host ? link_between(topology, sets[a], sets[b])
                                          : TUTTI_LINK_NETWORK;
            made->links[a * size + b] = (unsigned char)link;
            made->distances[a * size + b] =
                same_host ? distance_between(topology, node, node_of(topology, sets[b])) : 0;
        }
    }
    for (int a = 0; sets != NULL && a < size; a++)
        hwloc_bitmap_free(sets[a]);
    free(sets);
    return status;
}

tutti_status tutti_connectivity_ranks(tutti_group *group, tutti_connectivity **result) {
    if (result == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_connectivity_ranks needs a place for its result");
    tu_operation_info info = { .operation = TU_OPERATION_CONNECTIVITY, .root = -1 };
    int64_t deadline;
    uint64_t ticket;
    tutti_status status = tu_group_enter(group, 0, &info, &deadline, &ticket);
    if (status != TUTTI_OK)
        return status;
    hwloc_topology_t topology;
    rank_record record, *records = calloc((size_t)group->size, sizeof record);
    tutti_connectivity *made = NULL;
    status =
        records == NULL ? tu_error_memory("places of ranks", (size_t)group->size * sizeof record) : load(&topology);
    if (status == TUTTI_OK) {
        status = make(group->size, &made);
        if (status == TUTTI_OK)
            status = describe_self(topology, group->world, &record);
        if (status == TUTTI_OK)
            status =
                tu_group_exchange(group, &info, "connectivity", &record, sizeof record, NULL, deadline, records, NULL);
        if (status == TUTTI_OK)
            status = fill_ranks(topology, records, made);
        hwloc_topology_destroy(topology);
    }
    free(records);
    status = tu_group_leave(group, &info, ticket, status);
    if (status == TUTTI_OK)
        *result = made;
    else
        tutti_connectivity_release(made);
    return status;
}

#else

static tutti_status no_hwloc(void) {
    return tu_error(TUTTI_ERROR_UNSUPPORTED,
                    "this libtutti was built without hwloc, which connectivity needs: build it with hwloc installed "
                    "(libhwloc-dev)");
}

tutti_status tutti_connectivity_machine(tutti_place place, tutti_connectivity **result) {
    (void)place;
    (void)result;
    return no_hwloc();
}

tutti_status tutti_connectivity_ranks(tutti_group *group, tutti_connectivity **result) {
    (void)group;
    (void)result;
    return no_hwloc();
}

#endif
