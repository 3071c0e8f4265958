/* SPDX-License-Identifier: Apache-2.0
 *
 * Fully sharded training inside. A unit has three flat tensors: `shard`, this rank's parts of its parameters one after
 * the other, on symmetric memory; `sent`, the same in the dtype that is gathered; and `whole`, whose storage is freed
 * when the unit is not in use. A parameter is a leaf over a part of each: the shard, which the optimizer sees, and the
 * whole one, which autograd sees. Both are made once.
 *
 * A parameter may be cut along any dimension: in flat tensors its rows, which are slices along that dimension, lie one
 * after the other, and the leaves are views with the dimension back in its place.
 */
#ifndef TU_PARALLEL_SHARD_H
#define TU_PARALLEL_SHARD_H

#include <stdatomic.h>

#include "autograd/node.h"
#include "nn/module.h"
#include "nn/optimizer.h"
#include "parallel/parallel.h"

typedef struct tu_shard_unit tu_shard_unit;

/* What a protected optimizer remembers of a unit: flat, as the shard is. */
typedef struct tu_shard_state {
    tt_tensor *own, **peers; /* held; NULL: nothing */
} tu_shard_state;

/* What is gathered ahead of what comes next by itself. */
typedef struct tu_shard_ahead {
    bool told; /* by the program */
    size_t count;
    tu_shard_unit **units;
} tu_shard_ahead;

/* Where a parameter is found. */
typedef struct tu_shard_slot {
    tt_module *module; /* held by the root */
    const char *name;  /* the module's own */
} tu_shard_slot;

typedef struct tu_shard_member {
    tu_shard_unit *unit;
    char *name; /* in the root */
    tu_shard_slot *slots;
    int slot_count;
    tt_tensor *original;       /* until it is cut; held */
    tu_shape shape;            /* of the whole */
    int dim;                   /* along which it is cut; a row is a slice along it */
    int64_t rows, part, width; /* rows in all, rows of a part, elements of a row */
    int64_t own;               /* rows that this rank really has */
    int64_t offset;            /* in the flat shard */
    tt_tensor *shard, *whole;  /* leaves; held */
    tt_tensor *sent, *landing; /* flat, with their padding: what is gathered, NULL where the unit has none, and where
                                  it goes; held */
    tt_hook *hook;
    bool trained, arrived;
} tu_shard_member;

struct tu_shard_unit {
    tt_fully_sharded *all;
    tt_module *module; /* held by the root */
    char *name;
    int count, trained; /* members, and those that require grad */
    tu_shard_member *members;
    tutti_dtype dtype, gathered_dtype;
    tutti_device device, gathered_device; /* of the shard; of what is computed with */
    int64_t elements;                     /* of the flat shard */
    tt_tensor *shard, *sent; /* the same where nothing is cast; `sent` is NULL where shards are on another device: it is
                                made for each gather then; held */
    tt_tensor *whole;        /* held */
    tt_tensor *kept;         /* after a forward: the parts of this rank's smaller group; its storage is freed like the
                                whole one's; NULL where there is no such group; held */
    tt_tensor **peers;       /* every rank's `shard`, by rank; NULL: it is on another host; held */
    tu_shard_state states[TU_STEP_STATES];
    tt_hook *before, *after;                                 /* around the module's forward */
    bool keep_forward, keep_backward, not_back, no_replicas; /* switches: see tt_shard_switch */
    tu_shard_ahead ahead[2];                                 /* at a forward and at a backward */
    bool gathered;        /* or on its way, where a unit has no elements; else its storage tells */
    bool hidden;          /* whole, and slots have shards: kept behind a backward */
    uint64_t versions;    /* of the shards, when it was gathered */
    uint64_t pass;        /* the forward of the root in which it was gathered */
    int arrivals;         /* members whose gradient is complete in this backward */
    bool reduced;         /* in this backward */
    tt_tensor *reduction; /* flat; under way, and not handed out yet; held, or NULL */
    bool *in_reduction;   /* per member */
    tt_tensor *partial;   /* as the reduction: what replicas have not averaged yet; held, or NULL */
    bool *in_partial;     /* per member */
    tt_tensor *home;      /* offloaded: flat, pinned memory of the host for reduced gradients; held, or NULL */
    bool comes_home;      /* the reduction is copied there */
};

/* Between memory of the host and the GPU that computes: of shards, and of their gradients. */
typedef enum tu_offload_way {
    TU_OFFLOAD_UP,
    TU_OFFLOAD_DOWN,
    TU_OFFLOAD_WAYS
} tu_offload_way;

struct tt_fully_sharded {
    atomic_int references; /* the caller's, one per hook on a result, one per compiled function that looked at it */
    bool released;
    tt_module *root; /* held */
    tutti_group *group;
    tutti_device device; /* of the shards */
    tutti_group *near;   /* over which units stay cut after the forward; held, or NULL */
    tt_fully_sharded_options options;
    int unit_count;
    tu_shard_unit *units; /* the root's last */
    int member_count;
    tu_shard_member **members; /* of all units, as the root lists them */
    bool local;                /* gradients are not reduced */
    uint32_t changes;          /* how often units were cut anew, or switched */
    bool callback;             /* the end of a backward is awaited */
    uint64_t backward;         /* of this one */
    tu_shard_unit *reducing;   /* whose reduction began last, or NULL */
    /* Units in the order of their last forward, for what comes next; and in the order in which forwards of this step
     * ended, for the way back. */
    tu_shard_unit **order, **ended;
    size_t order_count, order_capacity, next, ended_count, ended_capacity, back;
    bool order_known;
    uint64_t pass;                  /* forwards of the root so far */
    bool inside;                    /* one is under way */
    bool lost;                      /* there was no agreement on who has cut anew: ranks may have different parts */
    tt_optimizer *optimizer;        /* that is protected, or NULL; held */
    tt_tensor *marks, **at_peers;   /* steps that were begun and that were made, of this rank and of all; held;
                                       NULL for ranks on other hosts */
    void *streams[TU_OFFLOAD_WAYS]; /* of options.device, for copies; NULL until they are needed */
    tt_fully_sharded_counts counts;
};

/* Cutting (shard.c): makes the tensors of a unit from the originals of its members. */
tutti_status tu_shard_cut(tu_shard_unit *unit);
/* Begins to gather a unit, unless it is gathered; its slots have whole parameters then. */
void tu_shard_gather(tu_shard_unit *unit);
/* The same for a backward: from what the forward left in the smaller group, where it left something. */
void tu_shard_gather_back(tu_shard_unit *unit);
/* Frees it after a forward, but for the part that this rank keeps for its smaller group. */
void tu_shard_shrink(tu_shard_unit *unit);
bool tu_shard_is_gathered(const tu_shard_unit *unit);
/* What was done, and how much is gathered now. */
void tu_shard_count(const tt_fully_sharded *all, tt_fully_sharded_counts *counts);
/* Frees it; its slots have shards. Also with an error pending. */
void tu_shard_free(tu_shard_unit *unit);
/* The same behind a backward, where it may stay whole. */
void tu_shard_leave(tu_shard_unit *unit);
/* Begins to reduce the gradients that the whole parameters have. */
void tu_shard_reduce(tu_shard_unit *unit);
/* Gives the shards their gradients (shard_settle.c). */
void tu_shard_settle(tu_shard_unit *unit);
/* Elements of a rank's part of a parameter, with the padding of its last rows. */
int64_t tu_shard_part_elements(const tu_shard_member *member);
/* The units of sharded; NULL with the error pending where the module is none (shard_switches.c). */
tu_shard_unit *tu_shard_unit_of(const char *who, const tt_fully_sharded *sharded, const tt_module *module);
/* Whether a call on it can go on (sharded.c). */
bool tu_shard_usable(const char *who, const tt_fully_sharded *sharded);

/* Every rank's x, which is symmetric, by rank, NULL for those on other hosts, whose memory is not mapped here; the list
 * is the caller's and ends with tu_shard_peers_free. NULL with the error pending. A collective. */
tt_tensor **tu_shard_peers(tt_tensor *x, tutti_group *group);
void tu_shard_peers_free(tt_tensor **peers, int count);
/* The part of a flat tensor, cut like a shard, that is this member's rows. */
tt_tensor *tu_shard_rows(tt_tensor *flat, const tu_shard_member *member);
/* A flat tensor of `rows` rows as a part of the parameter: a view. */
tt_tensor *tu_shard_shaped(tt_tensor *flat, const tu_shard_member *member, int64_t rows);
/* This rank's rows of a whole parameter, or of what is cut like one: a view. */
tt_tensor *tu_shard_own(tt_tensor *whole, const tu_shard_member *member);
/* Gives back what a unit has, but for its members' names and slots (shard.c). */
void tu_shard_clear(tu_shard_unit *unit);

/* Shards in memory of the host (offload.c). */
/* Whether shards are gathered on another device: they have no lasting copy there. */
bool tu_shard_is_offloaded(const tu_shard_unit *unit);
/* Whether a GPU computes, and shards stay in memory of the host, pinned for it; where there is nothing to pin they are
 * not. */
bool tu_offload_is_pinned(const tu_shard_unit *unit);
/* A flat shard, pinned for the GPU that computes where the driver can do that. NULL with the error pending. */
tt_tensor *tu_offload_shard(const tu_shard_unit *unit, tutti_dtype dtype);
/* Makes the stream for these copies current, ordered behind the one that was, which tu_offload_end is given. False:
 * the unit has none, nothing has changed, or there is an error pending. */
bool tu_offload_begin(tu_shard_unit *unit, tu_offload_way way, void **before);
/* With `join` that one is ordered behind the copies in turn: a program's own function may have done more than begin
 * collectives, which are ordered by themselves. */
void tu_offload_end(const tu_shard_unit *unit, void *before, bool join);
/* This rank's parts where they are computed with, or on their way there. */
tt_tensor *tu_offload_up(const tu_shard_unit *unit);
/* The reduced gradients in memory of the host, or on their way there. */
tt_tensor *tu_offload_down(tu_shard_unit *unit, tt_tensor *reduction);
/* Begins that as soon as a reduction is done, where nothing else is to be done to it. */
void tu_offload_down_early(tu_shard_unit *unit);
void tu_offload_release(tt_fully_sharded *all);

/* Hooks (shard_hooks.c). */
/* Hangs those of the parameters of a unit. */
void tu_shard_hang_members(tu_shard_unit *unit);
void tu_shard_hang(tt_fully_sharded *all);
/* Ends one reference to what the unit is a part of. */
void tu_shard_drop(void *unit);

#endif
