/* SPDX-License-Identifier: Apache-2.0
 *
 * What a backend is: a table that says what it can do for a device. `shm` (CPU) is built in; others are plug-ins, found
 * and loaded at run time. Several backends may serve one device (cuda and nccl), each with the parts that it has:
 *
 *     memory      allocates blocks, exports them, imports the blocks of all members of a group
 *     remote      put, get, signal and barrier on what was imported, by rank and offset
 *     streams     recognises pointers of the device; streams and events
 *     executor    runs collectives: a table that the layer above declares, and this one passes on
 *     tensors     memory, kernels and copies for libtutti-tensor: likewise (tensor/device.h)
 *     network        messages between ranks of different hosts (memory/network_part.h)
 *
 * Any part may be absent. The table and each part begin with their size: what an older plug-in does not have yet counts
 * as absent, and what a newer one has besides is left alone. `version` changes only when something that exists changes
 * its meaning, and then both sides refuse each other.
 *
 * A plug-in is a shared library libtutti-<name>.so that exports one table, `const tu_backend tutti_backend_v2`. It is
 * compiled against private headers that need nothing of libtutti but include/tutti: whatever it calls of libtutti comes
 * through tu_backend_host, because libtutti exports nothing but its API. It is looked for in TUTTI_PLUGIN_PATH, then in
 * the folder that libtutti was installed with. Its absence is no error until something needs it.
 *
 * How the memory layer uses a backend:
 *
 *     probe            is there a device?
 *     open             once per world, on first need; for tensors, which have none, with NULL. close ends it
 *     join             where the backend has it: all ranks together, after all opened it; only then it is used
 *     can              what it is able to do: nobody concludes that from the device
 *     allocate         a block; the signal area of a (block, group) is one too. free ends it
 *     export_block     what the other members need in order to reach a block: bytes and, where it can, a descriptor
 *                      … the memory layer exchanges these and compares sizes …
 *     import_blocks    makes all members' blocks reachable, given what each exported. unmap ends it
 *     attach, detach   around the life of a (block, group); between them
 *     put, get, signal, wait_signal, test_signal, barrier
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

#define TU_BACKEND_VERSION 6
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
     * descriptor of each member. payloads has room for size * bytes; NULL: this rank only tells, as one that has no
     * memory left for what the others say, and must not leave them waiting. fds is NULL when nobody gives one, else
     * gets size entries that the caller closes, -1 for a member that gave none; they are close-on-exec. */
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
    const char *(*error_message)(void);          /* of this thread's last error */
    int (*local_size)(const tutti_world *world); /* ranks on this host */
    /* Of a setting that is a number: bytes, nanoseconds, an integer, 0 or 1, however people have written it. */
    int64_t (*setting_number)(tutti_world *world, const char *name);
} tu_backend_host;

typedef struct tu_backend_request {
    size_t bytes;                        /* all of it: data, then the pad */
    size_t alignment;                    /* a power of two */
    int device_index;                    /* -1: the current one */
    int huge_pages;                      /* 1, 0 or -1 (when it helps) */
    const char *what;                    /* for messages: "a block", "signals" */
    void *stream;                        /* on which it is cleared, for what comes after; NULL: it is clear on return */
    const struct tu_backend_map *blocks; /* of a signal area: those of the members that it is for; NULL: it is none */
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

/* All members' blocks, as this rank reaches them. */
typedef struct tu_backend_map {
    void **addresses; /* of each member's block, in group order; one's own is the block's own; NULL where not mapped */
    void *multicast;  /* one address for all, or NULL */
    void *handle;     /* the backend's own */
    /* Where all of them, one's own too, also lie at equal distances: member 0's, and the step. NULL: nowhere. */
    void *row;
    size_t row_step;
} tu_backend_map;

/* What puts, signals and barriers work on. */
typedef struct tu_backend_peers {
    tutti_group *group;
    void *state; /* of the backend in this world */
    int rank, size, channels;
    int device_index;
    const tu_backend_map *blocks;
    const tu_backend_map *areas; /* signal areas: area_bytes of each member, zeroed before anybody can see it */
    void *local;                 /* the backend's own: attach makes it, detach ends it */
    uint64_t meeting;            /* number of the rendezvous in the group: the same on all members, and used once */
    size_t bytes, pad_offset, pad_bytes; /* of the block: its data, and the signal pad behind */
    struct tu_network_share *share;      /* keys between hosts (memory/network.h); NULL: none. detach ends it */
    bool met;                            /* all members are attached, and each will be detached */
} tu_backend_peers;

typedef struct tu_backend_call {
    int64_t timeout_ns; /* as in tutti_call: 0 inherits */
    void *stream;
} tu_backend_call;

/* What a backend may be able to do. Values are never reused. */
typedef enum tu_ability {
    TU_ABILITY_MAPS_PEERS = 1,         /* members' blocks have addresses here, for plain loads and stores or kernels */
    TU_ABILITY_SPANS_HOSTS = 2,        /* members on other hosts are reached too */
    TU_ABILITY_PASSES_DESCRIPTORS = 3, /* tickets carry a file descriptor */
    TU_ABILITY_PASSES_PIECES = 4       /* tickets carry a piece of the job's own shared memory: shm */
} tu_ability;

/* ---- memory ---- */

typedef struct tu_backend_memory {
    size_t size;
    tutti_status (*allocate)(void *state, const tu_backend_request *request, tu_backend_block *block);
    void (*free)(void *state, tu_backend_block *block);
    /* A block that was allocated on a stream is clear when this returns: only then can anybody else reach it. */
    tutti_status (*export_block)(void *state, const tu_backend_block *block, tu_backend_ticket *ticket);
    void (*unexport_block)(void *state, const tu_backend_block *block, tu_backend_ticket *ticket);
    /* Takes over the descriptors and mappings of all tickets, also when it fails. */
    tutti_status (*import_blocks)(void *state, tutti_group *group, const tu_backend_block *own, int rank, int count,
                                  tu_backend_ticket *tickets, tu_backend_map *map);
    void (*unmap)(void *state, tu_backend_map *map);

    /* On this rank's own memory. clear is complete on return; the others are ordered by the call's stream. */
    tutti_status (*clear)(void *state, const tu_backend_block *block, size_t offset, size_t bytes);
    tutti_status (*copy)(void *state, int device_index, void *to, const void *from, size_t bytes,
                         const tu_backend_call *call); /* between the device's memory and the host's, or within */
    tutti_status (*set32)(void *state, int device_index, uint32_t *words, uint32_t value, size_t count,
                          const tu_backend_call *call);
    tutti_status (*write32)(void *state, int device_index, uint32_t *word, uint32_t value, const tu_backend_call *call);

    /* From here on each may be NULL. */
    bool (*has_multicast)(void *state, int device_index); /* one store reaches all members. NULL: no */
    /* How many direct links there are between each two of `count` devices, count * count entries; 0 on the diagonal.
     * NULL: there is no such thing. */
    tutti_status (*links)(const tu_backend_host *host, int *matrix, int count);
} tu_backend_memory;

/* ---- remote: by rank and offset ---- */

/* What a kernel that is launched by somebody else, and waits for other ranks inside, has to know of its group: where it
 * finds that the group has ended and tells what went wrong (the layout is the backend's), its place among the group's
 * kernels, its deadline, what it is called in messages, how many thread blocks of a whole processor each may be there
 * at once beside the other ranks', and whether it may come onto the device while the kernel in front of it on its
 * stream ends, which it waits for first of all. */
typedef struct tu_backend_kernel {
    uint64_t words, report, place, timeout_ns;
    uint32_t operation;
    int blocks;
    bool overlaps;
} tu_backend_kernel;
/* Launches it, and says with how many thread blocks. */
typedef tutti_status tu_backend_start(void *context, const tu_backend_kernel *kernel, unsigned *blocks);

typedef struct tu_backend_remote {
    size_t size;
    /* The signal area of one member. attach and detach frame the use of a (block, group). reset makes its signals as
     * new, for a block that is used again: the caller guarantees that nobody signals meanwhile. */
    size_t (*area_bytes)(int size, int channels);
    tutti_status (*attach)(tu_backend_peers *peers);
    void (*detach)(tu_backend_peers *peers);
    void (*reset)(const tu_backend_peers *peers);

    /* Bytes to and from member's block at `offset`, which the caller has checked. A put comes before this thread's
     * (stream's) next signal to that member. It stops, with the group's cause, soon after the group ended. */
    tutti_status (*put)(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                        const tu_backend_call *call);
    tutti_status (*get)(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                        const tu_backend_call *call);
    tutti_status (*signal)(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call);
    tutti_status (*wait_signal)(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call);
    tutti_status (*test_signal)(const tu_backend_peers *peers, int from, int channel, bool *arrived);
    tutti_status (*barrier)(const tu_backend_peers *peers, int channel, const tu_backend_call *call);

    /* From here on each may be NULL. A number of 64 bits at `offset` of a member's block, which the caller has checked:
     * set_word stores it after the puts before, wait_word waits until the own one is, or is at least, the value. */
    tutti_status (*set_word)(const tu_backend_peers *peers, int to, size_t offset, uint64_t value,
                             const tu_backend_call *call);
    tutti_status (*wait_word)(const tu_backend_peers *peers, size_t offset, bool equal, uint64_t value,
                              const tu_backend_call *call);
    /* Calls `start` once, in the order of the group's kernels; all members do so, as for a barrier. */
    tutti_status (*run)(const tu_backend_peers *peers, const char *operation, tu_backend_start *start, void *context,
                        const tu_backend_call *call);
} tu_backend_remote;

/* ---- streams ---- */

typedef struct tu_backend_streams {
    size_t size;
    /* Whether the pointer is memory of the device; then its index. Never fails. */
    bool (*recognise)(void *state, const void *pointer, int *device_index);
    bool (*capturing)(void *state, void *stream);
    /* A stream of the library's own. */
    tutti_status (*create)(void *state, int device_index, void **stream);
    void (*destroy)(void *state, int device_index, void *stream);
    /* mark: an event behind what the stream holds. join orders the stream after the event. test: whether everything
     * before the event is over; never waits. unmark ends the event, which may not be over yet. */
    tutti_status (*mark)(void *state, int device_index, void *stream, void **event);
    tutti_status (*join)(void *state, int device_index, void *stream, void *event);
    tutti_status (*test)(void *state, int device_index, void *event, bool *complete);
    void (*unmark)(void *state, int device_index, void *event);
} tu_backend_streams;

/* ---- the table ---- */

typedef struct tu_backend {
    size_t size;
    uint32_t version;
    const char *name; /* "shm", "cuda" */
    tutti_device device;

    tutti_status (*probe)(const tu_backend_host *host, int *device_count);
    tutti_status (*open)(const tu_backend_host *host, tutti_world *world, void **state);
    void (*close)(void *state);
    bool (*can)(void *state, tu_ability ability);

    const tu_backend_memory *memory;
    const tu_backend_remote *remote;
    const tu_backend_streams *streams;
    const void *executor;

    /* The group goes away: nothing of it may be used any more. NULL: nothing is kept per group. */
    void (*forget)(void *state, tutti_group *group);
    /* What went wrong on the device in operations of the group that had been enqueued: sticky; one load from pinned
     * memory, allowed while a stream captures. Writes the error. NULL: nothing is enqueued. */
    tutti_status (*check)(void *state, tutti_group *group);
    const void *tensors;
    /* Messages to ranks on other hosts: a table that memory/network_part.h declares. */
    const void *network;

    /* Of a backend that all ranks of a world enter together (tutti_backend_open); NULL: it needs no such thing. Called
     * once every rank has said that `open` went well there; bounded by the deadline. Until it has succeeded on all,
     * nothing but `close` is called. */
    tutti_status (*join)(void *state, tutti_group *world, int64_t deadline);
    /* More memory on every rank, in the same way; NULL: it allocates as it goes. */
    tutti_status (*grow)(void *state, tutti_group *world, size_t bytes, int64_t deadline);
    /* Makes a module of the program's kernels ready for the library's device functions; NULL: there are none. */
    tutti_status (*module)(void *state, void *module);
    /* A communicator of the program's own for the group, which has none yet; NULL: the backend takes none. */
    tutti_status (*communicator)(void *state, tutti_group *group, void *communicator);
    /* One line about the library behind the backend, for `tutti info`: its version, where it lies, what it can. Empty
     * where there is nothing to tell; it writes no error. NULL: likewise. */
    void (*describe)(const tu_backend_host *host, char *text, size_t bytes);
    /* The library's object for a group, by all its members; NULL: there is no such thing. UNSUPPORTED and LIMIT come on
     * all members alike. */
    tutti_status (*team)(void *state, tutti_group *group, int64_t deadline, int32_t *team);
} tu_backend;

/* The built-in one: backend/shm. */
extern const tu_backend tu_backend_shm;

/* The backend that serves a device's memory in this world, opened; loads a plug-in where it has to. */
tutti_status tu_backend_get(tutti_world *world, tutti_device device, const tu_backend **backend, void **state);
/* The kind of a device, TUTTI_CPU for 0; an error for one that symmetric memory does not know. `kind` may be NULL. */
tutti_status tu_backend_device(tutti_device device, tutti_device *kind);

/* The name of the backend that a kind of device has unless the program chooses another. */
const char *tu_backend_default(tutti_device kind);

/* A backend by name, opened, whatever device it serves and whichever backend has that device's memory. */
tutti_status tu_backend_open(tutti_world *world, const char *name, const tu_backend **backend, void **state);

/* A backend that is open in this world. */
typedef struct tu_backend_opened {
    const tu_backend *table;
    void *state;
} tu_backend_opened;

/* The kinds of devices that symmetric memory has, the CPU first. */
#define TU_BACKEND_KINDS 2
tutti_device tu_backend_kind_at(int row);
/* The row of a kind; -1: none. */
int tu_backend_row(tutti_device kind);

/* The open backends that serve a kind of device, at most `room`: the one that has its memory first. Returns how many.
 */
int tu_backends_of(tutti_world *world, tutti_device kind, tu_backend_opened *list, int room);

/* Opens the backends of devices that this process uses already, so that their memory is recognised. Never fails. */
void tu_backend_discover(tutti_world *world);

/* Finds a backend by name without opening it: built in, or a plug-in. Its table is whole: parts that the plug-in lacks
 * are NULL. NOT_FOUND lists where it looked and why each file was refused. Lent while the world lives. */
tutti_status tu_backend_find(tutti_world *world, const char *name, const tu_backend **backend);

/* Calls `found` with the name of every plug-in that lies in a folder where tu_backend_find looks, each name once. None
 * is loaded. */
void tu_backend_list(tutti_world *world, void (*found)(const char *name, void *argument), void *argument);

/* A backend by name that no world has: loaded from the folders that the environment names, and opened with no world.
 * Its table is whole, and lent until tu_backend_close_apart, which ends both. */
TUTTI_API tutti_status tu_backend_open_apart(const char *name, tu_backend_opened *opened);
TUTTI_API void tu_backend_close_apart(tu_backend_opened *opened);

extern const tu_backend_host tu_backend_host_table;

#endif
