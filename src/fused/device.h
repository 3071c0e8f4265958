/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused operations on a device: what a group keeps there, and the two ways in which a stream computes and communicates.
 *
 * THE AGREEMENT is that of the CPU, on the host (workspace.h): every call begins with it, so that another call on some
 * rank, a rank that cannot take part and a dead one are told by the same words, and every rank knows where the others'
 * shards lie before it enqueues a product that reads them. The host waits for the other ranks' hosts there, and
 * for a device only where the workspace grows or moves. What follows is enqueued: meetings of the streams
 * (tutti_peers_barrier), which have the call's deadline and leave when the group ends, and products by the vendor's
 * library between them. So a call can be captured into a graph: the capture agrees, and replays meet.
 *
 * THE WORKSPACE is one block of symmetric memory of the device per group and rank:
 *
 *     board               what kernels that compute and communicate at once write for each other: tensor/together.h
 *     half 0, half 1      shards that this rank has staged, for the others to read; gathers use the halves in turn
 *     half 2              the same of gathers that were captured
 *     stage 0, stage 1    products that this rank has made for all, until they are added, or that all have made for
 *                         this one, or the last chunks of a producer, until they are taken; scatters use them in turn
 *
 * WHY NOTHING IS OVERWRITTEN TOO EARLY. A half is written again in the next gather but one, a stage in the next scatter
 * but one. Between the two lies a meeting, which each rank's stream reaches only after it has read what it needed of
 * the earlier call. What was read in place is behind a meeting at the call's end. Streams of two calls are ordered by
 * an event where they differ. A kernel that computes and communicates at once writes when all ranks have begun it, and
 * so have ended what they did before.
 *
 * What a graph captured may run at any time and any number of times. Its gathers have a half that calls do not use, and
 * a meeting before the first write, if they are not one kernel: all have read then what the run before has left there.
 * A scatter of several kernels has a meeting before the first write and one behind the last read.
 *
 * WHY NOTHING LOCKS UP WHERE RANKS SHARE A DEVICE. What waits for other ranks is one thread block per rank, and waits
 * for kernels alone that wait for nobody: products and sums, and what callbacks of pipelines enqueue. So there is
 * always room for these. A kernel that computes and communicates at once has no more thread blocks than the device has
 * processors for each of the ranks on it, and a rank's run one after the other, also those of several groups. Graphs
 * that hold such kernels of several groups must not run at the same time.
 */
#ifndef TU_FUSED_DEVICE_H
#define TU_FUSED_DEVICE_H

#include "fused/operators.h"
#include "tensor/on_device.h"
#include "tensor/together.h"

/* What a group keeps on its device: private to device.c. */
typedef struct tu_fused_room tu_fused_room;

/* A call on a device, from tu_fused_begin to tu_fused_end. */
typedef struct tu_fused_run {
    const char *who;     /* a name of base/operations.def */
    const tu_call *call; /* of an operator; NULL: the call is none */
    tutti_group *group;
    tu_device *device;
    void *stream;    /* the thread's current one, which products go to */
    int rank, size;  /* in the group */
    tu_fused *state; /* NULL: there are no others */
    tu_fused_room *room;
    tutti_peers *peers; /* of the room's memory; NULL: there is none yet */
    bool capturing;
    bool together;             /* this rank could make the call in one kernel; after the agreement: all can, and do */
    tu_together_kernel kernel; /* that it could; after the agreement: which it is */
    bool leaves;               /* with that kernel this rank has read all shards; after the agreement: all have */
} tu_fused_run;

/* Takes this rank's turn. A group of one rank, and one whose other ranks are made up, has no state. */
tutti_status tu_fused_begin(tu_fused_run *run, const tu_call *call, tutti_group *group);
tutti_status tu_fused_begin_on(tu_fused_run *run, const char *who, tu_device *device, tutti_group *group);
/* Ends the turn. A failure of this rank alone, after the agreement, ends the group: the others wait for it. Returns
 * status. */
tutti_status tu_fused_end(tu_fused_run *run, tutti_status status);

/* What comes to the stream from now on is behind an event of this call, which is forgotten; NULL is nothing to do. */
tutti_status tu_fused_await(tu_fused_run *run, void **event);
void tu_fused_forget(const tu_fused_run *run, void **event);

/* The scales of a product, f32; bias and whole may be NULL. */
typedef struct tu_fused_scales {
    const void *rows; /* of the first row that is multiplied, or the only one */
    bool by_rows;     /* every row has its own */
    const tt_tensor *columns, *bias, *whole;
} tu_fused_scales;
tutti_status tu_fused_multiply_scaled(const tu_fused_run *run, const tu_device_product *product,
                                      const tu_fused_scales *scales);

/* Of the workspace on a device, and how many calls were made in one kernel so far; waits for nobody. */
size_t tu_fused_device_bytes(tutti_group *group);
int64_t tu_fused_together(tutti_group *group);

/* ---- gather ---- */

/* One tensor of a rank's shards, and where all ranks have theirs. */
typedef struct tu_fused_part {
    const tt_tensor *tensor; /* dense: contiguous, or a matrix that lies column by column */
    size_t bytes;
    bool in_place;             /* read where the ranks have it; else staged */
    const tutti_peers *blocks; /* that it lies in */
    size_t staged;             /* where in the half */
    tt_tensor *gathered;       /* in test mode: those of all ranks, one after the other; else NULL */
} tu_fused_part;

typedef struct tu_fused_gather {
    tu_fused_run *run;
    const tu_fused_signature *signature;
    int count; /* of parts */
    tu_fused_part parts[TU_FUSED_PARTS];
    bool own_first; /* this rank's shards are used before the others have met: set by the caller, on all ranks alike */
    void *met;      /* where own_first: an event behind the meeting */
    bool left;      /* all ranks have read all shards */
} tu_fused_gather;

/* Agrees, stages what cannot be read in place, and meets: on the stream, or, with own_first, beside it. */
tutti_status tu_fused_open_gather(tu_fused_gather *gather);
/* With own_first: what comes to the stream from now on may read the others' shards. */
tutti_status tu_fused_await_others(tu_fused_gather *gather);
/* Behind the last use of the others' shards; `status` is that of the work on them, and becomes everybody's. */
tutti_status tu_fused_close_gather(tu_fused_gather *gather, tutti_status status);

/* A part as `rank` has it, as this rank reaches it. */
tu_shard tu_fused_part_of(const tu_fused_gather *gather, int part, int rank);

/* ---- in one kernel ---- */

/* Sets run->together and run->kernel: whether this rank's device has it, and it pays. Sizes, types and this rank's
 * matrices are set. */
void tu_fused_choose_together(tu_fused_run *run, tu_device_together product);
/* The first product of a gather whose run is together, with what belongs to the workspace filled in here. The others'
 * shards may be read behind it. */
tutti_status tu_fused_gather_together(tu_fused_gather *gather, tu_device_together *product);
/* The same of a scatter, all of it: the sums are there for what comes to the stream. */
tutti_status tu_fused_scatter_together(tu_fused_run *run, tu_device_together *product);

/* ---- scatter ---- */

/* Agrees, and makes room for products of this rank: `rows` by `columns` elements of 2 bytes for each rank where they
 * are made together, else `bytes` of all of them. */
tutti_status tu_fused_open_scatter(tu_fused_run *run, const tu_fused_signature *signature, size_t bytes, int64_t rows,
                                   int64_t columns, char **stage);
/* Complex numbers are added by their real view: its dtype, and *count, which becomes that of its elements. */
tutti_dtype tu_fused_real_of(tutti_dtype dtype, int64_t *count);
/* Beside the stream, behind what it holds and when all ranks have come so far: the sum or average of what all ranks
 * have for this one in a piece of their stages, which has `count` elements for each rank one after the other, `offset`
 * bytes behind its start. `last`: nothing is multiplied meanwhile. */
tutti_status tu_fused_add_beside(tu_fused_run *run, size_t offset, void *to, int64_t count, tutti_dtype dtype,
                                 tutti_reduction reduction, bool last);
/* Beside the stream, behind what it holds: all ranks meet. What comes to `beside` then may read their stages; *met is
 * an event before that. */
tutti_status tu_fused_meet_beside(tu_fused_run *run, void **beside, void **met);
/* The stage of a rank as this rank reaches it. */
const char *tu_fused_stage_of(const tu_fused_run *run, int rank);
/* What comes to the stream from now on finds what was made beside it; `status` as above. */
tutti_status tu_fused_close_scatter(tu_fused_run *run, tutti_status status);

/* Symmetric memory of so many bytes that other ranks write to: a half, for a gather by multicast. */
tutti_status tu_fused_open_half(tu_fused_run *run, const tu_fused_signature *signature, size_t bytes, char **half);

#endif
