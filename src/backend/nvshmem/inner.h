/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the NVSHMEM backend. It stands on the files of the CUDA backend (devices, streams, the order of a group's
 * kernels, faults, the watcher, collectives) and replaces where memory comes from and how peers are reached:
 *
 *     slab        one piece of NVSHMEM's heap, made by all ranks together when the backend is opened or grown
 *     block       carved from a slab by its rank alone; the others learn its offset at the rendezvous
 *     peer        mapped: an address of this GPU, and everything is done as the CUDA backend does it
 *                 not mapped, as over a network: by rank and offset, with NVSHMEM's puts, gets and signals
 *
 * A process is one PE of NVSHMEM, whatever worlds it has, so what NVSHMEM was made to do outlives them: join.c keeps
 * it, and hands slabs of a closed world to the next.
 */
#ifndef TU_NVSHMEM_INNER_H
#define TU_NVSHMEM_INNER_H

#include "backend/cuda/cuda.h"
#include "library.h"
#include "params.h"

#define TU_NVSHMEM_SLABS 64 /* of a process: the first, and what it has grown by */

/* A free part of a slab. */
typedef struct tu_nvshmem_gap {
    size_t begin, bytes;
} tu_nvshmem_gap;

typedef struct tu_nvshmem_slab {
    char *base; /* this rank's; the others' lie at the same place of their heaps */
    size_t bytes;
    tu_nvshmem_gap *gaps; /* in order, none empty, no two adjacent */
    size_t gap_count, gap_room;
    size_t blocks; /* that are carved from it */
} tu_nvshmem_slab;

/* Where in the heap something is carved: blocks from the beginning, so that ranks that allocate alike get the same
 * offsets; what comes and goes when it likes, on each rank, from the end. */
typedef enum tu_nvshmem_fit {
    TU_NVSHMEM_FIRST,
    TU_NVSHMEM_LAST
} tu_nvshmem_fit;

/* A team of NVSHMEM as a group has it. */
typedef struct tu_nvshmem_team tu_nvshmem_team;
struct tu_nvshmem_team {
    const tutti_group *group; /* NULL: it went away; another of the same members has the same team */
    int32_t team;
    tu_nvshmem_team *next;
    int count;
    int pes[];
};

/* A slab of all members of a group, mapped in the group's order: alias.c. */
typedef struct tu_nvshmem_alias tu_nvshmem_alias;
struct tu_nvshmem_alias {
    const tutti_group *group;
    int slab, count;
    CUdeviceptr base,
        first; /* where the first member's pieces are mapped, and where this rank's own are mapped first */
    size_t stride;
    size_t mapped; /* bytes from base on: the driver takes a range without a gap back */
    tu_nvshmem_alias *next;
};

/* The kernels that use NVSHMEM's device functions. */
typedef enum tu_nvshmem_kernel {
    TU_NVSHMEM_SIGNAL,
    TU_NVSHMEM_EXCHANGE,
    TU_NVSHMEM_PLAN,
    TU_NVSHMEM_TAKE,
    TU_NVSHMEM_KERNELS
} tu_nvshmem_kernel;

typedef struct tu_nvshmem_block tu_nvshmem_block;

typedef struct tu_nvshmem {
    tu_cuda cuda; /* first: the functions of the CUDA backend take this as their state */
    const tu_nvshmem_library *library;
    tu_cuda_device *device; /* the one that NVSHMEM works on … */
    int device_index;       /* … set by join */
    int status;             /* nvshmemx_init_status */
    int *pes;               /* of each rank of the world */
    int rank, size;         /* in the world */
    bool mapping;           /* false: TUTTI_NVSHMEM_MAP=0, peers count as not mapped */
    uint64_t domain;   /* which PEs are mapped here, as a number: ranks that have the same map each other; 0: nobody */
    bool even;         /* its heaps can be mapped in any order: alias.c */
    bool holds;        /* the process's NVSHMEM: one world at a time does */
    size_t heap;       /* TUTTI_NVSHMEM_HEAP, bytes */
    _Atomic bool lost; /* a call did not come back: nothing more is asked of NVSHMEM */
    CUmodule module;   /* of kernels with device functions; NULL: Tutti was built without them */
    CUfunction kernels[TU_NVSHMEM_KERNELS];

    pthread_mutex_t alias_lock; /* never held while another rank is waited for */
    tu_nvshmem_alias *aliases;

    pthread_mutex_t heap_lock; /* the slabs, the teams, and the blocks that are awaited; nothing waits under it */
    tu_nvshmem_slab slabs[TU_NVSHMEM_SLABS];
    _Atomic int slab_count; /* grows only, after the slab is there; also read without the lock */
    tu_nvshmem_team *teams; /* under heap_lock */
    int team_count;
    int team_limit;            /* TUTTI_NVSHMEM_TEAMS */
    tu_nvshmem_block *awaited; /* of areas that were freed, and to which members may still write */

    pthread_mutex_t bounce_lock; /* before heap_lock */
    char *bounce;    /* TU_NVSHMEM_BOUNCE bytes of the heap, for bytes that lie elsewhere; NULL until needed */
    CUevent bounced; /* behind its last use; NULL: none yet */
} tu_nvshmem;

#define TU_NVSHMEM_BOUNCE ((size_t)4 << 20)

/* A block: a part of a slab. */
struct tu_nvshmem_block {
    int slab;
    size_t offset, bytes; /* rounded up */
    CUevent cleared;      /* behind the clearing on the caller's stream; NULL: it is clear */
    /* A signal area of members that are not all mapped: it is given out again when all of them have said in it that
     * they write to it no more. */
    bool apart;
    size_t farewells;       /* where in the block they say so: a word for each; 0: it was not used */
    int member_count, rank; /* of the group, and this rank's own */
    tu_nvshmem_block *next; /* in the list of those that are awaited */
};

/* What a rank tells the others about a block. */
typedef struct tu_nvshmem_ticket {
    uint32_t magic;
    int32_t pe;
    uint64_t slab, offset, bytes;
    uint64_t domain, even; /* of tu_nvshmem */
    uint64_t multicast;    /* whether its device can, and nobody switched it off */
} tu_nvshmem_ticket;

/* All members' blocks. */
typedef struct tu_nvshmem_map {
    tu_cuda_map cuda; /* first: base and stride, where the members lie evenly; base 0: they do not */
    char **places;    /* what stands for each member's block in NVSHMEM's calls: an address of this rank's own heap */
    int *pes;
    tu_nvshmem_block *own;
    bool mapped; /* all members map each other, by what they say */
    /* Where the members' blocks lie in one slab, at different offsets: the slab of all members, and this rank's offset
     * in it. Kernels that hand addresses over reach them so. base 0: they do not. */
    tu_cuda_map slab;
    tu_backend_map slab_map;
    size_t slab_offset;
    CUdeviceptr members; /* tu_nvshmem_member[count], of a signal area whose members do not lie evenly; 0: none */
} tu_nvshmem_map;

/* ---- join.c ---- */
/* What this rank can do alone, and the end of it. */
tutti_status tu_nvshmem_begin(tu_nvshmem *nvshmem);
void tu_nvshmem_end(tu_nvshmem *nvshmem);
tutti_status tu_nvshmem_join(void *state, tutti_group *world, int64_t deadline);
tutti_status tu_nvshmem_grow(void *state, tutti_group *world, size_t bytes, int64_t deadline);
/* Whether a call of NVSHMEM went well, by what it left in its argument; writes the error. */
typedef tutti_status tu_nvshmem_outcome(const tu_nvshmem *nvshmem, const void *argument);
/* Makes a call that may never come back on a thread of its own, with all members of the group, and waits until it is
 * through on all, or failed on one of them (`outcome`; NULL: it cannot): that fails all at once, as the deadline and
 * the end of the group do. A call that does not come back costs the backend its use, and its thread. */
tutti_status tu_nvshmem_enter(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, const char *what,
                              void (*act)(tu_nvshmem *nvshmem, void *argument), tu_nvshmem_outcome *outcome,
                              void *argument, size_t argument_bytes);

/* ---- heap.c ---- */
/* With heap_lock held. A slab begins with what may fail on one rank alone; adding it then cannot. */
tutti_status tu_nvshmem_slab_begin(tu_nvshmem *nvshmem);
void tu_nvshmem_slab_add(tu_nvshmem *nvshmem, void *base, size_t bytes);
tutti_status tu_nvshmem_carve(tu_nvshmem *nvshmem, size_t bytes, size_t alignment, tu_nvshmem_fit fit, const char *what,
                              int *slab, size_t *offset);
void tu_nvshmem_give_back(tu_nvshmem *nvshmem, int slab, size_t offset, size_t bytes);
void tu_nvshmem_slabs_free(tu_nvshmem *nvshmem);
/* Whether bytes lie in this rank's heap; takes no lock. */
bool tu_nvshmem_in_heap(const tu_nvshmem *nvshmem, const void *pointer, size_t bytes);
/* How many slabs there are, for whoever does not hold the lock. */
static inline int tu_nvshmem_slab_count(const tu_nvshmem *nvshmem) {
    return atomic_load_explicit(&nvshmem->slab_count, memory_order_acquire); /* pairs with tu_nvshmem_slab_add */
}

/* ---- alias.c ---- */
/* Finds out which PEs are mapped here, and how: with the first slab there. */
void tu_nvshmem_find_domain(tu_nvshmem *nvshmem);
/* Where the group's members have the slab, member r at base + r * stride; made at the first call, kept with the group.
 */
tutti_status tu_nvshmem_alias_get(tu_nvshmem *nvshmem, const tutti_group *group, int slab, int count, const int *pes,
                                  uint64_t *base, uint64_t *stride);
void tu_nvshmem_alias_drop(tu_nvshmem *nvshmem, const tutti_group *group); /* NULL: of all groups */

/* ---- memory.c ---- */
extern const tu_backend_memory tu_nvshmem_memory;
/* Carves, without the lock; first gives back what is awaited no more, where there is no room else. */
tutti_status tu_nvshmem_obtain(tu_nvshmem *nvshmem, size_t bytes, size_t alignment, tu_nvshmem_fit fit,
                               const char *what, int *slab, size_t *offset);
void tu_nvshmem_awaited_free(tu_nvshmem *nvshmem);

/* ---- team.c ---- */
/* The group's team, made at the first call: collective over the group, bounded. UNSUPPORTED where NVSHMEM can have
 * none, LIMIT where there are TUTTI_NVSHMEM_TEAMS already. `broken`: this rank failed before; it takes part only so
 * that nobody waits for it. */
tutti_status tu_nvshmem_team_get(tu_nvshmem *nvshmem, tutti_group *group, int64_t deadline, bool broken, int32_t *team);
void tu_nvshmem_forget(void *state, tutti_group *group);
void tu_nvshmem_teams_free(tu_nvshmem *nvshmem);

/* ---- remote.c ---- */
extern const tu_backend_remote tu_nvshmem_remote;

/* ---- executor.c ---- */
extern const tu_device_executor tu_nvshmem_executor;

/* The image of the kernels that use NVSHMEM's device functions: image.S; one byte where Tutti was built without. */
extern const unsigned char tu_nvshmem_image[];
extern const unsigned char tu_nvshmem_has_image[];

#endif
