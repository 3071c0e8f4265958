/* SPDX-License-Identifier: Apache-2.0
 *
 * What this room keeps for a world and for a group, and the one lock that guards their lists. Inside this room only.
 */
#ifndef TU_MEMORY_TABLES_H
#define TU_MEMORY_TABLES_H

#include "base/round.h"
#include "memory/memory.h"

/* An ordered array of (key, value): O(log n) search, insertion by moving what lies behind. */
typedef struct tu_order_entry {
    uint64_t key;
    void *value;
} tu_order_entry;
typedef struct tu_order {
    tu_order_entry *entries;
    size_t count, capacity;
} tu_order;

tutti_status tu_order_insert(tu_order *order, uint64_t key, void *value); /* fails only by memory */
void tu_order_remove(tu_order *order, uint64_t key);
void *tu_order_get(const tu_order *order, uint64_t key); /* NULL when there is none */
void *tu_order_floor(const tu_order *order,
                     uint64_t key); /* with the greatest key that is not above; NULL when there is none */

/* A backend as this world knows it: its table, made whole, and its state once it is open. */
typedef struct tu_backend_entry tu_backend_entry;
struct tu_backend_entry {
    tu_backend table; /* its parts are those below */
    tu_backend_memory memory;
    tu_backend_remote remote;
    tu_backend_streams streams;
    void *state;
    bool begun;          /* its `open` succeeded, and `close` is due; under backend_lock */
    _Atomic bool opened; /* it can be used: begun and, where it wants that, joined. Released when `state` is set */
    tu_backend_entry *next;
};

struct tu_memory_world {
    tutti_world *world;
    pthread_mutex_t lock; /* the lists, users of peers; never held while another rank or the system is waited for */
    tu_order blocks;      /* allocated ones, by the address of their data */
    tu_order persistent;  /* all persistent ones, by id */
    uint64_t serial;      /* of the last block made */
    _Atomic uint64_t generation;          /* changes whenever an answer of tu_symmetric_find may: readers compare it */
    _Atomic size_t pad_bytes;             /* for blocks that ask for none; 0: the setting */
    pthread_mutex_t persistent_lock;      /* held over a whole persistent allocation, so that an id is made once */
    pthread_mutex_t backend_lock;         /* never held while another rank is waited for */
    pthread_mutex_t joining;              /* one tutti_backend_open or tutti_backend_grow at a time */
    _Atomic(tu_backend_entry *) backends; /* all that are known; added under backend_lock, never taken out */
    tu_backend_entry
        *chosen[TU_BACKEND_KINDS]; /* that has the memory of a kind; NULL: not chosen; under backend_lock */
};

#define TU_SYMMETRIC_CACHE 16
#define TU_RECENT_PEERS 64

/* One remembered answer. Written under the lock of tu_memory_group, read without it: `turn` is odd while it is
 * written. */
typedef struct tu_symmetric_line {
    _Alignas(64) _Atomic uint32_t turn;
    _Atomic uint64_t generation;
    _Atomic uintptr_t pointer;
    _Atomic size_t room; /* bytes from the pointer to the end of its block; 0: not symmetric */
    _Atomic(tutti_memory *) memory;
    _Atomic(const tutti_peers *) peers;
} tu_symmetric_line;

struct tu_memory_group {
    tutti_group *group;
    tu_memory_world *tables;
    pthread_mutex_t meeting;  /* one rendezvous at a time per group and rank */
    tutti_peers *first_peers; /* under tables->lock */
    tu_order by_index;        /* under tables->lock */
    _Atomic(const tutti_peers *)
        recent[TU_RECENT_PEERS]; /* by index modulo; written under tables->lock, read without */
    _Atomic uint32_t last_index; /* the highest that was ever in use; under `meeting` */
    uint64_t meetings;           /* rendezvous that succeeded; under `meeting` */
    pthread_mutex_t cache_lock;
    tu_symmetric_line cache[TU_SYMMETRIC_CACHE];
};

/* ---- plugin.c, backend.c ---- */
/* A copy of the table, made whole; to be freed. NULL: no memory. */
tu_backend_entry *tu_backend_adopt(const tu_backend *given);
/* Finds the plug-in, loads it, and takes its table over. */
tutti_status tu_backend_load(tutti_world *world, const char *name, tu_backend_entry **entry);
/* Finds a backend and begins it here, without the other ranks; *opened says whether it can be used. */
tutti_status tu_backend_begin(tu_memory_world *tables, const char *name, tu_backend_entry **entry, bool *opened);
void tu_backend_opens(tu_memory_world *tables, tu_backend_entry *entry); /* all ranks have joined it */
void tu_backends_forget(tu_memory_world *tables, tutti_group *group);
void tu_backends_end(tu_memory_world *tables);
/* Whether the block's backend is able to do something. */
bool tu_memory_can(const tutti_memory *memory, tu_ability ability);

/* ---- memory.c ---- */
tutti_status tu_memory_create(tu_memory_world *tables, size_t bytes, const tutti_memory_options *options,
                              tutti_memory **memory);
/* Makes it findable, with one user and that default group (NULL: none). */
tutti_status tu_memory_list(tutti_memory *memory, tutti_group *group);
void tu_memory_drop(tutti_memory *memory);         /* one reference */
void tu_memory_forget_peers(tutti_memory *memory); /* no rendezvous returns what was cached any more */
tutti_status tu_memory_options_check(const tutti_memory_options *options);

/* ---- peers.c ---- */
/* Unlinks what nobody uses from both lists onto *doomed; the caller holds the lock. tu_peers_free ends them, without
 * it. */
void tu_peers_unlink(tutti_peers *peers, tutti_peers **doomed);
void tu_peers_free(tutti_peers *doomed);
/* One more user; the caller holds the lock. */
void tu_peers_use(tutti_peers *peers);

/* ---- pool.c ---- */
/* A block of a pool lost its last user. True when the pool keeps it. */
bool tu_pool_take_back(tutti_pool *pool, tutti_memory *memory);
void tu_pool_drop(tutti_pool *pool);

#endif
