/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside symmetric memory: from any pointer to the block it lies in, and on to where the peers have theirs. For the
 * collective layer and for this room.
 */
#ifndef TU_MEMORY_MEMORY_H
#define TU_MEMORY_MEMORY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <tutti/memory.h>
#include <tutti/peers.h>
#include <tutti/pool.h>

#include "base/error.h"
#include "memory/backend.h"
#include "world/world.h"

/* ---- for the layers above ---- */

/* What this room keeps for a group. Get it once, keep it while the group lives. */
typedef struct tu_memory_group tu_memory_group;
TU_SHARED tutti_status tu_memory_group_get(tutti_group *group, tu_memory_group **state);

typedef struct tu_symmetric {
    tutti_memory *memory;     /* the block; lent */
    size_t offset;            /* of the pointer in the block's data */
    const tutti_peers *peers; /* of the block with the group; lent; NULL when it was not rendezvoused with this group,
                                 or its backend maps no peers */
    void *const *buffers;     /* each member's data as mapped here, in group order; NULL with peers NULL */
    uint32_t index; /* of peers in the group: the same on all members, from 1; used again when no member has a handle of
                       that index any more; 0 with peers NULL */
} tu_symmetric;

/* Whether [pointer, pointer + bytes) lies in one block; *found is written only then. A few nanoseconds for a pointer
 * that was asked for lately on this group, symmetric or not; O(log n) else. Never blocks on another rank, never fails.
 */
TU_SHARED bool tu_symmetric_find(tu_memory_group *state, const void *pointer, size_t bytes, tu_symmetric *found);

/* The peers with that index, for resolving what another member published; NULL when this rank holds none. Lent. */
TU_SHARED const tutti_peers *tu_symmetric_peers(tu_memory_group *state, uint32_t index);

/* The peers of a block with the group where some members are not mapped here and are reached by rank and offset: lent;
 * NULL: there are none. Takes a lock. */
const tutti_peers *tu_symmetric_unmapped(tu_memory_group *state, const tutti_memory *memory);

/* A member's data, one's own too, as mapped beside the others': where the backend maps all of them in a row, members'
 * data lies at equal distances. Else as tutti_peers_buffer. */
TU_SHARED void *tu_symmetric_mapped(const tutti_peers *peers, int rank);

/* Calls `start`, which launches a kernel that waits for the other members inside: every member does so, and their calls
 * are one meeting in the order of the group's. See tu_backend_kernel. */
TU_SHARED tutti_status tu_peers_run(tutti_peers *peers, const char *operation, tu_backend_start *start, void *context,
                                    const tutti_call *call);

/* The highest index that any peers of the group had so far. */
uint32_t tu_symmetric_last(const tu_memory_group *state);

/* ---- inside this room ---- */

typedef struct tu_memory_world tu_memory_world;

struct tutti_memory {
    tutti_world *world;
    tu_memory_world *tables;
    const tu_backend *backend;
    void *backend_state;
    tu_backend_block block;
    size_t bytes, pad_bytes;
    size_t pad_offset; /* of the pad from the data */
    size_t alignment;
    tutti_device device; /* its kind; block.device_index says which */
    tutti_group *group;  /* default for rendezvous; a reference while there are users; NULL: none */
    tutti_pool *pool;    /* that it came from; NULL: none */
    bool persistent;
    uint64_t persistent_id;
    uint64_t serial;        /* of its memory in this world, from 1: tells blocks apart that share an address in turn */
    _Atomic uint32_t users; /* references of the program; at 0 it is no longer in the tables */
    _Atomic uint32_t references; /* one for all users together, one per peers */
    tutti_peers *first_peers;    /* under tables->lock */
    tutti_memory *next_idle;     /* in its pool */
};

struct tutti_peers {
    tutti_memory *memory; /* a reference */
    tutti_group *group;   /* a reference while users is not 0 */
    tu_memory_group *group_state;
    tu_backend_peers backend;
    tu_backend_map blocks, areas;
    tu_backend_block area; /* this rank's signal area */
    void *const *buffers;  /* = blocks.addresses */
    bool mapped;           /* every member's block has an address here */
    uint64_t *serials;     /* of the members' blocks */
    uint32_t index;        /* in the group */
    uint32_t users;        /* references of the program, under tables->lock */
    bool cached;           /* still in its block's list: a rendezvous may return it */
    bool proven;           /* false for a block that went through a pool: its next rendezvous compares serials */
    tutti_peers *next_of_memory;
    tutti_peers *next_of_group;
};

/* Address tables of a world: world.c of this room. */
tutti_status tu_memory_world_get(tutti_world *world, tu_memory_world **tables);

#endif
