/* SPDX-License-Identifier: Apache-2.0
 *
 * What fused operations keep with a group, and how the ranks agree on a call.
 *
 * THE WORKSPACE is one block of symmetric memory per group and rank:
 *
 *     half 0, half 1      shards that this rank has staged, for the others to read; gathers use the halves in turn
 *     rings               one for each of the others, into which that rank writes tiles for this one
 *
 * A CALL begins with an all-gather of records, started and not waited for: what this rank is about to do, and where its
 * shards lie. It takes the call's number in the group, so that another operation on some rank is a mismatch as
 * everywhere else; its result is the agreement.
 *
 * WHY NOTHING IS OVERWRITTEN TOO EARLY. A half is written again in the next call but one. Between the two lies an
 * agreement, which each rank reaches only after it has read what it needed of the earlier call. Tiles lie
 * one behind the other in a ring, from the beginning again where the next would not fit. Their signals go by C channels
 * in turn, and one waits until the one before it on its channel was taken (tutti/peers.h), that of the tile C before;
 * who has taken that is done with all tiles before it. So at most C + 1 tiles are not read when one is written, and a
 * ring has room for C + 3 such tiles. The last two tiles of a call go by one channel: the next call, whose tiles may
 * have another size, and whose first one comes before its agreement, finds at most two that were not read. A ring has
 * room for four of the largest, so that none falls on one of these two.
 *
 * WHY RANKS RUN AHEAD. A rank that must wait in each chunk for the slowest one pays for every disturbance of every
 * rank. Where a rank's own rows are computed in place it goes on with the next chunk instead, and accepts tiles of this
 * one that have not come when it sends those: the others may be late by the time in which a chunk is made, and nobody
 * waits. Tiles that have come are accepted at once, while this rank's own rows are in the caches.
 *
 * WHY A RING IS LARGER THAN THAT. Between cores that share a cache ordinary stores are quickest, but only to lines that
 * have left the caches of the core that has read them: so a rank's rings are twice as large as the second cache of
 * today's cores.
 */
#ifndef TU_FUSED_WORKSPACE_H
#define TU_FUSED_WORKSPACE_H

#include <stdatomic.h>

#include <tutti/collective.h>
#include <tutti/peers.h>

#include "collective/arrival.h"
#include "tensor/operator.h"

#define TU_FUSED_PARTS 8                      /* tensors that are gathered together */
#define TU_FUSED_TILES 4                      /* that a ring has room for at least */
#define TU_FUSED_RINGS ((size_t)2 << 20)      /* bytes of all rings of a rank */
#define TU_FUSED_LONG_RINGS ((size_t)5 << 20) /* the same for blocks that are larger: most chunks fit in, and more */
#define TU_FUSED_SHORT ((size_t)16 << 10)     /* blocks that are copied by ordinary stores in any case */
#define TU_FUSED_CHANNELS 61                  /* of the signals that announce tiles, at most */
#define TU_FUSED_ALIGN 128u                   /* of parts in a half, and of tiles */
#define TU_FUSED_TEXT 200                     /* characters of a call in words */
enum {
    TU_FUSED_STAYS = 1, /* of tu_fused_record.together */
    TU_FUSED_LEAVES = 2
};

/* Where one part of a rank's shards lies, as told to the others. */
typedef struct tu_fused_place {
    uint64_t offset;      /* in the block of `index`, or in the half */
    uint64_t block_bytes; /* of the symmetric block that it lies in; 0: it lies in none */
    uint32_t index;       /* of that block's rendezvous with the group; 0: it has not met, or the part is staged */
    uint32_t turned;      /* the matrix lies column by column */
} tu_fused_place;

/* What a rank tells the others of its call. */
typedef struct tu_fused_record {
    uint64_t signature;  /* of what must be equal on all ranks */
    int32_t status;      /* of this rank's preparations; not OK: the call fails on all */
    uint16_t fits, sent; /* the workspace is large enough; one tile is on its way to every other rank */
    uint16_t together;   /* on a device: there is one kernel for all of the call, behind which this rank reads no
                          * shard (TU_FUSED_LEAVES); 0: there is none */
    uint16_t kernel;     /* which one it is: tu_together_kernel */
    tu_fused_place places[TU_FUSED_PARTS];
    char text[TU_FUSED_TEXT]; /* what the signature is of, or what went wrong */
} tu_fused_record;

typedef struct tu_memory_group tu_memory_group;

typedef struct tu_fused {
    tutti_group *group; /* lent: this is attached to it */
    tu_memory_group *places;
    pthread_mutex_t lock; /* of `busy` */
    pthread_cond_t idle;  /* `busy` has become false */
    bool busy;            /* a call is under way: everything below belongs to its thread */
    /* The thread of that call, or NULL. It alone writes it, so that a thread finds itself here only inside a call of
     * its own: no order is needed. */
    _Atomic(const tu_thread *) holder;
    atomic_size_t bytes;      /* of the workspace; read without a turn, too */
    _Atomic int64_t overlaps; /* jobs that one thread was at while another communicated; likewise */
    int rank, size;
    tutti_memory *memory; /* NULL: none yet */
    tutti_peers *peers;   /* of it, during a call */
    size_t half_bytes, ring_bytes;
    uint64_t gathers;     /* so far, equal on all ranks */
    size_t ring_at;       /* where the next tile lies, if it fits; likewise */
    tu_stage_watch watch; /* of the copies to rings */
    bool meets_in_vain;   /* a rendezvous of inputs has failed: they are staged from then on */
    tutti_work *work;     /* of the agreement under way */
    const char *who;      /* whose it is */
    tu_fused_record own;
    tu_fused_record *records; /* one per rank */
    bool *came, *done;        /* of a gather, one per rank: its record has been read; its shards have been consumed */
} tu_fused;

/* Whether ranks of the group are made up. */
bool tu_fused_is_fake(tutti_group *group);

/* What must be equal on all ranks: the hash of all of it decides, and the text tells it in messages, as far as there is
 * room. Names of tensors belong to neither, since each rank may choose its own. */
typedef struct tu_fused_signature {
    const char *who; /* a name of base/operations.def */
    uint64_t hash;
    size_t used;
    char text[TU_FUSED_TEXT];
} tu_fused_signature;
/* A signature begins with the name of the operator. Words precede a number, and a tensor's dtype and sizes; they stand
 * for data. */
tu_fused_signature tu_fused_sign(const char *who);
void tu_fused_sign_text(tu_fused_signature *signature, const char *text);
void tu_fused_sign_data(tu_fused_signature *signature, const char *words, const void *data, size_t bytes);
void tu_fused_sign_number(tu_fused_signature *signature, const char *words, int64_t number);
void tu_fused_sign_tensor(tu_fused_signature *signature, const char *words, const tt_tensor *x);

/* Begins a call on a group of several real ranks, in this rank's turn and with the record empty; leave ends it. An
 * error from within a callback of a call on the same group. Another thread's call is waited for until the group's
 * deadline, which ends the group: that thread may be waiting for this one. */
tutti_status tu_fused_enter(tutti_group *group, tu_fused **state);
void tu_fused_leave(tu_fused *state);

/* Tells the others `state->own`; `status` is that of this rank's preparations. */
tutti_status tu_fused_publish(tu_fused *state, const tu_fused_signature *signature, tutti_status status);
/* Waits for the others' records. An error where one of them failed or differs, the same on all ranks. */
tutti_status tu_fused_agree(tu_fused *state, const char *who);

/* Makes halves and rings at least that large. Every rank calls it after an agreement, with the same sizes. */
tutti_status tu_fused_grow(tu_fused *state, size_t half_bytes, size_t ring_bytes);

/* A rank's half of the current gather, as mapped here. */
char *tu_fused_half(const tu_fused *state, int rank);

/* Bytes of a ring for blocks of that size in tiles of at most that size. */
size_t tu_fused_ring_for(const tu_fused *state, size_t block_bytes, size_t tile_bytes);
/* Where the index-th tile from now on lies in a ring, and that place in `rank`'s ring for `from`, as mapped here. */
size_t tu_fused_tile_place(const tu_fused *state, size_t tile_bytes, uint64_t index);
char *tu_fused_ring(const tu_fused *state, int rank, int from, size_t place);
/* How many channels the signals of such tiles use in turn. */
int tu_fused_channels(const tu_fused *state, size_t tile_bytes);

/* This rank cannot take part at all, for the thread's error: tells the others, whose call fails like this one. From
 * within a callback nobody is told: the others have begun no such call that could be told apart from the one under way.
 * Returns the error. */
tutti_status tu_fused_refuse(tutti_group *group, const char *who, tutti_status status);
/* The same inside a call, before anything was published. */
tutti_status tu_fused_refuse_inside(tu_fused *state, const char *who, tutti_status status);
/* This rank cannot go on and the others depend on it: ends the group with the thread's error, and returns it. */
tutti_status tu_fused_give_up(tu_fused *state, const char *who);

/* How many jobs of this rank's products one thread was at while another copied, signalled or waited; so far. */
int64_t tu_fused_overlaps(tutti_group *group);

#endif
