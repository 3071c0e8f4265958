/* SPDX-License-Identifier: Apache-2.0
 *
 * What a backend is: one table of functions that allocates memory of a device, lets the ranks of a group map each
 * other's, and moves data and signals on it. `shm` (CPU) is built in; others are plug-ins, found and loaded at run
 * time.
 *
 * A plug-in is a shared library libtutti-<name>.so that exports one table, `const tu_backend tutti_backend_v1`. It is
 * compiled against this header and include/tutti alone: whatever it needs of libtutti comes through tu_backend_host,
 * because libtutti exports nothing but its API. It is looked for in TUTTI_PLUGIN_PATH, then in the folder that libtutti
 * was installed with. Its absence is no error until something needs it.
 *
 * How the memory layer uses the table:
 *
 *     probe      once per process and backend: is there a device?
 *     open       once per world, on first need; close ends it
 *     allocate   a block; the signal area of a (block, group) is one too. free ends it
 *     export_block   what the other members need in order to map a block: bytes, and a descriptor (or, in shm, a piece)
 *                    … the memory layer exchanges these and compares sizes …
 *     import_blocks  maps all members' blocks at once, given what each exported. unmap ends it
 *     attach, detach around the life of a (block, group); between them
 *     signal, wait_signal, test_signal, barrier, copy, set32, write32      on what was mapped
 *     collectives   a table of its own for the collective layer, or NULL
 *
 * Every function writes its error (host->error) and returns its status. All may be called from several threads at once.
 */
#ifndef TU_MEMORY_BACKEND_H
#define TU_MEMORY_BACKEND_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/group.h>
#include <tutti/log.h>
#include <tutti/memory.h>
#include <tutti/status.h>
#include <tutti/world.h>

#define TU_BACKEND_VERSION 1
#define TU_BACKEND_TICKET_BYTES 128

typedef struct tu_piece tu_piece;
typedef struct tu_mapping tu_mapping;
typedef struct tu_operation_info tu_operation_info;

/* What libtutti lends to a backend. Valid while the library is loaded. */
typedef struct tu_backend_host {
    size_t size;
    uint32_t version; /* TU_BACKEND_VERSION of this libtutti */

    /* As in base/error.h, base/log.h, base/clock.h. */
    tutti_status (*error)(tutti_status status, const char *format, ...) TUTTI_PRINTF(2, 3);
    tutti_status (*error_system)(int error_number, const char *format, ...) TUTTI_PRINTF(2, 3);
    void (*error_append)(const char *format, ...) TUTTI_PRINTF(1, 2);
    void (*error_at_fault)(int rank);
    void (*log)(tutti_world *world, tutti_log_level level, const char *backend, const char *format, ...)
        TUTTI_PRINTF(4, 5);
    int64_t (*now)(void);

    /* The value of a TUTTI_ setting in this world, "" when unset, NULL when there is none of that name. */
    const char *(*setting)(tutti_world *world, const char *name);

    /* Collective and bounded: gathers `bytes` bytes (at most 4096, the same on all) and, unless fd is -1, one
     * descriptor of each member. payloads has room for size * bytes. fds is NULL when nobody gives one, else gets size
     * entries that the caller closes, -1 for a member that gave none; they are close-on-exec. */
    tutti_status (*exchange)(tutti_group *group, const char *purpose, const void *payload, size_t bytes, int fd,
                             int64_t deadline, void *payloads, int *fds);

    int (*local_rank)(const tutti_world *world);
    int (*group_rank)(const tutti_group *group);
    int (*group_size)(const tutti_group *group);
    const char *(*group_name)(const tutti_group *group);
    const char *(*operation_name)(uint32_t operation); /* tu_operation */
    uint32_t (*operation_find)(const char *name);

    /* One look at the liveness of the members; a death ends the group. For watchers, every 20 ms. */
    tutti_status (*group_look)(tutti_group *group);

    /* The group's state word, for device code and watchers to look at: nonzero once the group ended. */
    const _Atomic uint64_t *(*group_state)(tutti_group *group);
    tutti_status (*group_cause)(tutti_group *group); /* writes the first cause as this thread's error */
    void (*group_end)(tutti_group *group);           /* with this thread's error; the first cause wins */
    int64_t (*timeout)(tutti_group *group,
                       int64_t call_timeout_ns); /* the first of call, group and world that is set */
} tu_backend_host;

typedef struct tu_backend_request {
    size_t bytes;     /* all of it: data, then the pad */
    size_t alignment; /* a power of two */
    int device_index; /* -1: the current one */
    int huge_pages;   /* 1, 0 or -1 (when it helps) */
    const char *what; /* for messages: "a block", "signals" */
} tu_backend_request;

typedef struct tu_backend_block {
    void *address; /* on the device; zeroed, aligned */
    size_t bytes;
    int device_index;
    void *handle; /* the backend's own */
} tu_backend_block;

/* What one member tells the others about a block. */
typedef struct tu_backend_ticket {
    unsigned char bytes[TU_BACKEND_TICKET_BYTES]; /* arrives as it was written */
    int fd; /* export: borrowed until unexport, -1 none. import: a descriptor of one's own, to be closed by import */
    const tu_piece *piece; /* export, shm only; else NULL */
    tu_mapping *mapping;   /* import, shm only: a reference that import takes over; else NULL */
} tu_backend_ticket;

/* All members' blocks, mapped. */
typedef struct tu_backend_map {
    void **addresses; /* of each member's block, in group order; one's own is the block's own; NULL where not mapped */
    void *multicast;  /* one address for all, or NULL */
    void *handle;     /* the backend's own */
} tu_backend_map;

/* What signals, barriers and copies work on. */
typedef struct tu_backend_peers {
    tutti_group *group;
    void *state; /* of the backend in this world */
    int rank, size, channels;
    int device_index;
    const tu_backend_map *blocks;
    const tu_backend_map *areas; /* signal areas: area_bytes of each member, zeroed before anybody can see it */
    void *local;                 /* the backend's own: attach makes it, detach ends it */
} tu_backend_peers;

typedef struct tu_backend_call {
    int64_t timeout_ns; /* as in tutti_call: 0 inherits */
    void *stream;
} tu_backend_call;

typedef struct tu_backend {
    size_t size;
    uint32_t version;
    const char *name; /* "shm", "cuda" */
    tutti_device device;

    tutti_status (*probe)(const tu_backend_host *host, int *device_count);
    tutti_status (*open)(const tu_backend_host *host, tutti_world *world, void **state);
    void (*close)(void *state);

    tutti_status (*allocate)(void *state, const tu_backend_request *request, tu_backend_block *block);
    void (*free)(void *state, tu_backend_block *block);

    tutti_status (*export_block)(void *state, const tu_backend_block *block, tu_backend_ticket *ticket);
    void (*unexport_block)(void *state, const tu_backend_block *block, tu_backend_ticket *ticket);
    /* Takes over the descriptors and mappings of all tickets, also when it fails. */
    tutti_status (*import_blocks)(void *state, tutti_group *group, const tu_backend_block *own, int rank, int count,
                                  tu_backend_ticket *tickets, tu_backend_map *map);
    void (*unmap)(void *state, tu_backend_map *map);
    bool (*has_multicast)(void *state, int device_index);

    /* The signal area of one member; attach and detach frame the use of a (block, group) for signals. reset makes it as
     * new, for a block that is used again: the caller guarantees that nobody signals meanwhile. */
    size_t (*area_bytes)(int size, int channels);
    tutti_status (*attach)(tu_backend_peers *peers);
    void (*detach)(tu_backend_peers *peers);
    void (*reset)(const tu_backend_peers *peers);
    tutti_status (*signal)(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call);
    tutti_status (*wait_signal)(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call);
    tutti_status (*test_signal)(const tu_backend_peers *peers, int from, int channel, bool *arrived);
    tutti_status (*barrier)(const tu_backend_peers *peers, int channel, const tu_backend_call *call);
    /* Between the device's memory, mapped peers' memory and the host's. Ordered before this thread's (stream's) next
     * signal. */
    tutti_status (*copy)(void *state, int device_index, void *to, const void *from, size_t bytes,
                         const tu_backend_call *call);
    tutti_status (*clear)(void *state, const tu_backend_block *block, size_t offset,
                          size_t bytes); /* to zero, complete on return */
    tutti_status (*set32)(void *state, int device_index, uint32_t *words, uint32_t value, size_t count,
                          const tu_backend_call *call);
    tutti_status (*write32)(void *state, int device_index, uint32_t *word, uint32_t value, const tu_backend_call *call);

    /* How many links there are between each two of `count` devices, count * count entries. NULL: there is no such
     * thing. */
    tutti_status (*links)(const tu_backend_host *host, int *matrix, int count);

    /* The group goes away: nothing of it may be used any more. NULL: nothing is kept per group. */
    void (*forget)(void *state, tutti_group *group);

    /* What went wrong on the device in operations of the group that had been enqueued: sticky; one load from pinned
     * memory, allowed while a stream captures. Writes the error. NULL: nothing is enqueued. */
    tutti_status (*check)(void *state, tutti_group *group);

    const void *collectives; /* declared by the collective layer; NULL: none */
} tu_backend;

/* The built-in one: backend/shm. */
extern const tu_backend tu_backend_shm;

/* The backend that serves a device in this world, opened; loads a plug-in where it has to. */
tutti_status tu_backend_get(tutti_world *world, tutti_device device, const tu_backend **backend, void **state);
/* The kind of a device, TUTTI_CPU for 0; an error for one that symmetric memory does not know. `kind` may be NULL. */
tutti_status tu_backend_device(tutti_device device, tutti_device *kind);

/* Finds a backend by name: built in, or a plug-in. NOT_FOUND lists where it looked and why each file was refused. */
tutti_status tu_backend_find(tutti_world *world, const char *name, const tu_backend **backend);

extern const tu_backend_host tu_backend_host_table;

#endif
