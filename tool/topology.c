/* SPDX-License-Identifier: Apache-2.0
 *
 * Binding by topology: hwloc where it was built in, else the CPUs of this process in their order.
 *
 * The rule is the same for both: the cores that this process may use, in the order of the topology, are cut into equal
 * consecutive shares. So neighbouring ranks share caches and NUMA nodes, and all ranks together use the whole machine.
 */
#include "topology.h"

#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#if TUTTI_HAVE_HWLOC
#include <hwloc.h>
#endif

#define WORD_BITS (8 * sizeof(unsigned long))

static void set_cpu(unsigned long *cpus, size_t cpu) {
    if (cpu < BINDING_WORDS * WORD_BITS)
        cpus[cpu / WORD_BITS] |= 1ul << cpu % WORD_BITS;
}

static bool has_cpu(const unsigned long *cpus, size_t cpu) {
    return (cpus[cpu / WORD_BITS] >> cpu % WORD_BITS & 1) != 0;
}

/* The affinity mask of this process; the raw call tells how many bytes the kernel has. */
static int own_cpus(unsigned long *cpus) {
    memset(cpus, 0, BINDING_WORDS * sizeof *cpus);
    if (syscall(SYS_sched_getaffinity, 0, BINDING_WORDS * sizeof *cpus, cpus) < 0)
        return 1;
    int count = 0;
    for (size_t i = 0; i < BINDING_WORDS; i++)
        count += __builtin_popcountl(cpus[i]);
    return count > 0 ? count : 1;
}

int topology_cpus(void) {
    unsigned long cpus[BINDING_WORDS];
    return own_cpus(cpus);
}

void topology_cpu_text(const unsigned long *cpus, char *text, size_t bytes) {
    size_t used = 0, limit = BINDING_WORDS * WORD_BITS;
    text[0] = '\0';
    for (size_t cpu = 0; cpu < limit && used < bytes; cpu++) {
        if (!has_cpu(cpus, cpu))
            continue;
        size_t end = cpu;
        while (end + 1 < limit && has_cpu(cpus, end + 1))
            end++;
        const char *comma = used > 0 ? "," : "";
        used += (size_t)(end == cpu ? snprintf(text + used, bytes - used, "%s%zu", comma, cpu)
                                    : snprintf(text + used, bytes - used, "%s%zu-%zu", comma, cpu, end));
        cpu = end;
    }
}

/* One core: its CPUs that may be used, and where it is. */
typedef struct core {
    unsigned long cpus[BINDING_WORDS];
    int number, package, node; /* logical; -1 unknown */
} core;

#if TUTTI_HAVE_HWLOC

static int index_above(hwloc_topology_t topology, hwloc_obj_t object, hwloc_obj_type_t type) {
    hwloc_obj_t above = hwloc_get_ancestor_obj_by_type(topology, type, object);
    return above != NULL ? (int)above->logical_index : -1;
}

static int node_of(hwloc_topology_t topology, hwloc_obj_t object) {
    hwloc_obj_t node = NULL;
    while ((node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != NULL)
        if (hwloc_bitmap_isincluded(object->cpuset, node->cpuset))
            return (int)node->logical_index;
    return -1;
}

static void fill_core(hwloc_topology_t topology, hwloc_obj_t object, const unsigned long *own, core *core) {
    int cpu;
    hwloc_bitmap_foreach_begin(cpu, object->cpuset) if ((size_t)cpu < BINDING_WORDS * WORD_BITS &&
                                                        (own == NULL || has_cpu(own, (size_t)cpu)))
        set_cpu(core->cpus, (size_t)cpu);
    hwloc_bitmap_foreach_end();
    core->number = (int)object->logical_index;
    core->package = index_above(topology, object, HWLOC_OBJ_PACKAGE);
    core->node = node_of(topology, object);
}

/* Without plug-ins (PCI, GPUs, XML libraries), which take most of the time that loading a topology takes and are of no
 * use here. */
static int init_without_plugins(hwloc_topology_t *topology) {
    bool given = getenv("HWLOC_PLUGINS_PATH") != NULL;
    if (!given)
        setenv("HWLOC_PLUGINS_PATH", "/nonexistent", 1);
    int failed = hwloc_topology_init(topology);
    if (!given)
        unsetenv("HWLOC_PLUGINS_PATH");
    return failed;
}

/* Cores with a CPU that may be used. Loads only what binding needs: about a millisecond on a small machine. */
static core *find_cores(int *count, const char **why) {
    hwloc_topology_t topology;
    core *cores = NULL;
    *why = "hwloc cannot read the topology of this machine";
    if (init_without_plugins(&topology) != 0)
        return NULL;
    hwloc_topology_set_components(topology, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST,
                                  "x86"); /* visits every CPU; sysfs knows */
    hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE);
    hwloc_topology_set_type_filter(topology, HWLOC_OBJ_CORE, HWLOC_TYPE_FILTER_KEEP_ALL);
    hwloc_topology_set_type_filter(topology, HWLOC_OBJ_PACKAGE, HWLOC_TYPE_FILTER_KEEP_ALL);
    if (hwloc_topology_load(topology) != 0)
        goto destroy;
    unsigned long own[BINDING_WORDS];
    own_cpus(own);
    bool real = hwloc_topology_is_thissystem(topology) != 0; /* HWLOC_SYNTHETIC shows other machines */
    hwloc_obj_type_t type = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE) > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
    int all = hwloc_get_nbobjs_by_type(topology, type), used = 0;
    cores = calloc((size_t)(all > 0 ? all : 1), sizeof *cores);
    *why = "out of memory for the list of cores";
    for (int i = 0; cores != NULL && i < all; i++) {
        fill_core(topology, hwloc_get_obj_by_type(topology, type, (unsigned)i), real ? own : NULL, &cores[used]);
        char text[8];
        topology_cpu_text(cores[used].cpus, text, sizeof text);
        if (text[0] != '\0')
            used++;
        else
            memset(&cores[used], 0, sizeof cores[used]);
    }
    *count = used;
destroy:
    hwloc_topology_destroy(topology);
    return cores;
}

#else

static core *find_cores(int *count, const char **why) {
    unsigned long own[BINDING_WORDS];
    int all = own_cpus(own), used = 0;
    core *cores = calloc((size_t)all, sizeof *cores);
    *why = "out of memory for the list of CPUs";
    for (size_t cpu = 0; cores != NULL && cpu < BINDING_WORDS * WORD_BITS && used < all; cpu++) {
        if (!has_cpu(own, cpu))
            continue;
        set_cpu(cores[used].cpus, cpu);
        cores[used].number = (int)cpu;
        cores[used].package = cores[used].node = -1;
        used++;
    }
    *count = used;
    return cores;
}

#endif

/* "package 0", "packages 0-1", nothing when unknown. */
static void place_text(const char *what, int first, int last, char *text, size_t bytes) {
    text[0] = '\0';
    if (first < 0 || last < 0)
        return;
    if (first == last)
        snprintf(text, bytes, ", %s %d", what, first);
    else
        snprintf(text, bytes, ", %ss %d-%d", what, first, last);
}

static void bind_to(const core *cores, int first, int last, binding *bound) {
    memset(bound->cpus, 0, sizeof bound->cpus);
    for (int i = first; i <= last; i++)
        for (size_t word = 0; word < BINDING_WORDS; word++)
            bound->cpus[word] |= cores[i].cpus[word];
    char cpus[64], package[32], node[32];
    topology_cpu_text(bound->cpus, cpus, sizeof cpus);
    place_text("package", cores[first].package, cores[last].package, package, sizeof package);
    place_text("NUMA node", cores[first].node, cores[last].node, node, sizeof node);
    if (first == last)
        snprintf(bound->text, sizeof bound->text, "core %d (CPU%s %s)%s%s", cores[first].number,
                 strpbrk(cpus, ",-") != NULL ? "s" : "", cpus, package, node);
    else
        snprintf(bound->text, sizeof bound->text, "cores %d-%d (CPUs %s)%s%s", cores[first].number, cores[last].number,
                 cpus, package, node);
}

/* Widens a share of cores to the NUMA nodes that it lies in. */
static void widen_to_nodes(const core *cores, int count, int *first, int *last) {
    while (*first > 0 && cores[*first - 1].node == cores[*first].node)
        (*first)--;
    while (*last + 1 < count && cores[*last + 1].node == cores[*last].node)
        (*last)++;
}

int topology_bind(binding_policy policy, int ranks, binding *bindings, char *why, size_t why_bytes) {
    if (policy == BIND_NONE) {
        snprintf(why, why_bytes, "not bound, as asked for");
        return 0;
    }
    int cpus = topology_cpus();
    bool real = getenv("HWLOC_SYNTHETIC") == NULL && getenv("HWLOC_XMLFILE") == NULL;
    if (policy == BIND_AUTO && ranks > cpus && real) { /* known without loading the topology */
        snprintf(why, why_bytes, "not bound: %d ranks for %d CPUs", ranks, cpus);
        return 0;
    }
    int count = 0;
    const char *problem;
    core *cores = find_cores(&count, &problem);
    int result = -1;
    if (cores == NULL || count == 0) {
        snprintf(why, why_bytes, "%s", count == 0 && cores != NULL ? "no usable core was found" : problem);
    } else if (ranks > count && policy != BIND_NUMA) {
        snprintf(why, why_bytes, "%d ranks for %d cores", ranks, count);
        result = policy == BIND_AUTO ? 0 : -1;
    } else if (policy == BIND_NUMA && cores[0].node < 0) {
        snprintf(why, why_bytes, "the NUMA nodes of this machine are not known%s",
                 TUTTI_HAVE_HWLOC ? "" : ": built without hwloc");
    } else {
        for (int rank = 0; rank < ranks; rank++) {
            int first = (int)((long)rank * count / ranks), last = (int)((long)(rank + 1) * count / ranks) - 1;
            if (last < first)
                last = first;
            if (policy == BIND_NUMA)
                widen_to_nodes(cores, count, &first, &last);
            bind_to(cores, first, last, &bindings[rank]);
        }
        result = 1;
    }
    free(cores);
    return result;
}
