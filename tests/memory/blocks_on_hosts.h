/* SPDX-License-Identifier: Apache-2.0
 *
 * A block of every rank of a world that spans hosts, rendezvoused with its group.
 */
#ifndef TEST_BLOCKS_ON_HOSTS_H
#define TEST_BLOCKS_ON_HOSTS_H

#include <tutti/memory.h>
#include <tutti/peers.h>

#include "../collective/on_hosts.h"

typedef struct block {
    tutti_memory *memory;
    tutti_peers *peers;
    tutti_group *group;
    int rank, size;
    unsigned char *data;
} block;

static inline block meet(tutti_world *world, size_t bytes) {
    block made = { .group = tutti_world_group(world) };
    made.rank = tutti_group_rank(made.group);
    made.size = tutti_group_size(made.group);
    CHECK_OK(tutti_memory_alloc(world, bytes, NULL, &made.memory));
    CHECK_OK(tutti_memory_rendezvous(made.memory, made.group, &made.peers));
    made.data = tutti_memory_data(made.memory);
    return made;
}

static inline void leave(block *made) {
    tutti_peers_release(made->peers);
    tutti_memory_release(made->memory);
}

/* Whether puts and gets go by remote memory access: tests run both ways, over TCP, where UCX emulates it. */
static inline bool by_key(void) {
    const char *setting = getenv("TUTTI_RMA");
    return setting != NULL && strcmp(setting, "on") == 0;
}

#endif
