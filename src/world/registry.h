/* SPDX-License-Identifier: Apache-2.0
 *
 * What a rank knows of its groups: by name, by tag, by rank list, in order of creation. Everything but find by tag and
 * ranks takes constant time, so that the thousandth group costs what the tenth did. Callers hold world->lock.
 */
#ifndef TU_WORLD_REGISTRY_H
#define TU_WORLD_REGISTRY_H

#include "world/world.h"

typedef struct tu_registry tu_registry;

/* How often a list of ranks was made into a group: for names and keys. Lives as long as the registry. */
typedef struct tu_rank_list {
    struct tu_rank_list *next;
    uint64_t hash;
    uint64_t living;  /* groups of exactly these ranks, in this order, that are registered now */
    uint64_t created; /* by those ranks alone, ever: never reused in a key */
    int count;
    int ranks[];
} tu_rank_list;

tutti_status tu_registry_create(tu_registry **registry);
void tu_registry_free(tu_registry *registry); /* empty by now */

/* The next number of the group counter, which it advances: 0 for the default group. */
uint64_t tu_registry_number(tu_registry *registry);

/* What it would give next; and that it gives no number below `counter`. */
uint64_t tu_registry_counter(const tu_registry *registry);
void tu_registry_count_on(tu_registry *registry, uint64_t counter);

/* Makes room for a group, so that tu_registry_add cannot fail. `tag` is the user's; "" none. */
tutti_status tu_registry_prepare(tu_registry *registry, tutti_group *group, const char *tag);
void tu_registry_add(tu_registry *registry, tutti_group *group);
void tu_registry_remove(tu_registry *registry, tutti_group *group);

tutti_group *tu_registry_name(const tu_registry *registry, const char *name);
tutti_group *tu_registry_find(const tu_registry *registry, const char *tag, const int *ranks, int count);

/* In order of creation: the first (group NULL) and the one after. */
tutti_group *tu_registry_next(const tu_registry *registry, const tutti_group *group);
int tu_registry_count(const tu_registry *registry);

/* The entry of a rank list, made where missing; NULL: out of memory. */
tu_rank_list *tu_registry_ranks(tu_registry *registry, const int *ranks, int count);

#endif
