/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside collectives: what the ranks of a group share, and how a call becomes a task that any thread can run.
 *
 * THE PROTOCOL
 *
 * Every member of a group has one piece of shared memory that it alone writes. Each hand-over of a collective is an
 * EPOCH: a number that all members count alike, because they run the same operations in the same order. In epoch e a
 * member puts its data where the others will look (the payload of a line, a staging slot, or a reference to symmetric
 * memory), then stores e into the flag of its line e & 1: it has ARRIVED. The line carries the signature of the
 * operation beside the flag, so that a difference is seen by whoever looks, for no further cache line. Operations that
 * need a second hand-over (everybody has reduced its slice, everybody has read my buffer) store e in STEP.
 *
 * There are two lines and two slots, used in turn. So a member may enter epoch e only when all are done with e - 2. It
 * knows that from arrivals: who has arrived in e - 1 is done with e - 2. After an operation in which it saw everybody
 * that costs nothing; else (the root of a broadcast runs ahead) it waits at the next entry. No exit barrier is needed.
 *
 * Budget of an 8-byte all-reduce: one hand-over, no system call, no allocation, one uncontended exchange for the lock.
 */
#ifndef TU_COLLECTIVE_COLLECTIVE_H
#define TU_COLLECTIVE_COLLECTIVE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <tutti/collective.h>

#include "base/bare.h"
#include "base/clock.h"
#include "base/error.h"
#include "collective/arrival.h"
#include "collective/executor.h"
#include "kernel/kernel.h"
#include "memory/memory.h"
#include "world/world.h"

/* ---- what members share ---- */

#define TU_LINE 128        /* spacing of words with different writers or readers: lines are fetched in pairs */
#define TU_INLINE_BYTES 48 /* payload that fits beside flag and signature in 64 bytes */

typedef struct tu_line {
    _Alignas(TU_LINE) _Atomic uint64_t flag; /* the epoch; released by the owner, acquired by the others */
    uint64_t signature;                      /* written before flag, read after it; so is the payload */
    unsigned char payload[TU_INLINE_BYTES];
} tu_line;

typedef struct tu_flag {
    _Alignas(TU_LINE) _Atomic uint64_t flag;
} tu_flag;

/* What a member says about where its buffers lie; the payload of the line in algorithms that use buffers in place. */
typedef struct tu_reference {
    uint64_t in_offset, out_offset; /* in the block's data */
    uint32_t in_index, out_index;   /* of the rendezvous in the group; 0: not symmetric, staged */
    double factor;                  /* of premul_sum */
    uint64_t longest;               /* bytes of the longest part that it sends to anybody (all_to_all_v) */
    uint64_t given;                 /* as in tu_task; also behind a payload in the line */
} tu_reference;
_Static_assert(sizeof(tu_reference) <= TU_INLINE_BYTES, "a reference must fit into a line");

/* What a member called, for the message when signatures differ. Written before the flag of its epoch. */
typedef struct tu_said {
    _Alignas(TU_LINE) uint64_t sequence;
    uint64_t count;
    uint64_t detail;
    int32_t root;
    uint8_t operation, dtype, reduction, algorithm;
} tu_said;

/* What others poll and what they hardly ever read lie on pages of their own: a processor that reads the one fetches
 * neighbours ahead, and a line that somebody else has fetched costs its owner a round trip to write. */
typedef struct tu_member {
    _Alignas(4096) tu_line arrive[2];
    _Alignas(4096) tu_flag step;
    tu_flag up; /* tree: all members of my domain have arrived */
    _Alignas(4096) tu_said said[2];
    /* then, by offsets in tu_layout: splits[2][size][2], slots[2] */
} tu_member;

/* Where the variable parts of a member's piece lie; the same on all members. */
typedef struct tu_layout {
    size_t splits, slots, bytes;
    size_t slot_bytes;
} tu_layout;

/* ---- a task: one operation, ready to run on any thread ---- */

typedef struct tu_collective tu_collective;

/* What the all_to_all_vdev forms have besides: splits and offsets count rows. */
typedef struct tu_vdev {
    const int64_t *in_splits;
    int64_t *out_splits;
    size_t in_rows, out_rows;
    int experts;
    int64_t align;
} tu_vdev;

/* One part of a matrix that comes to this rank: from `source`, or reduced over all ranks. */
typedef struct tu_tile {
    int source;       /* -1: all */
    size_t in_offset; /* bytes from the beginning of everybody's input */
    size_t rows, columns;
    size_t in_pitch, out_pitch; /* bytes from one row to the next */
    unsigned char *out;
} tu_tile;

typedef struct tu_tiles {
    const tu_tile *list; /* for this rank */
    size_t count;
    size_t in_bytes; /* of the whole input */
} tu_tiles;

struct tu_task {
    tutti_group *group;
    tu_collective *state; /* of the group */
    const tu_executor *executor;
    tu_operation_info info;      /* operation, dtype, reduction, count, root, tag; enter fills the rest */
    const tu_operation_row *row; /* what the operation is; info.operation is its number */
    const void *in;
    void *out;
    size_t element;                                                  /* bytes of one */
    const size_t *in_counts, *in_offsets, *out_counts, *out_offsets; /* v-forms, in elements */
    const int *to;                                                   /* permute */
    double factor;
    uint64_t detail; /* hash of what else must be equal on all ranks: counts, to */
    tutti_algorithm forced;
    int64_t timeout_ns; /* as in tutti_call */
    int64_t deadline;   /* 0 until somebody needs it: tu_task_deadline */
    uint64_t ticket;    /* of the recorder; 0 until it is recorded: tu_task_record */
    bool any_order;     /* TUTTI_ORDER_ANY */
    bool entered;
    bool agreed;    /* it failed alike on all ranks: ends nothing */
    bool ended;     /* a part of it failed and has ended the group: the thread's error is what to return */
    bool met;       /* all members have come to it, on the host: tu_task_meet */
    bool skipped;   /* of a batch: an injected fault leaves it out */
    uint64_t given; /* several tasks as one: how many of them, from the first, have their inputs; 0: it is one task */
    uint64_t valid; /* the least that any rank has given: so many have their results */
    uint64_t signature;
    tu_task *outer;      /* of a part of a call across hosts: that call, of which errors and records speak; else NULL */
    uint64_t open_epoch; /* of a one-shot that has been started */
    const void *source;  /* copied to `in` when the task's turn comes (one_shot_all_reduce_copy), or NULL */
    void *stream;        /* as in tutti_call */
    int device_index;    /* of the buffers, for executors of devices; -1: not known */
    tutti_received *received;
    tutti_strided strided; /* how the elements of a message lie; block 0: one after the other */
    size_t columns;        /* reduce_scatter_out that splits the last dimension: elements of a row; 0: it does not */
    tu_vdev vdev;
    tu_tiles tiles;
    tutti_status (*custom)(tu_collective *state,
                           tu_task *task); /* runs it, where no algorithm does; state NULL in a group of one */
};

/* A dtype or reduction as tu_operation_info keeps it. What does not fit is none, and stays none: it must not become
 * another one. */
static inline uint8_t tu_code(int value) {
    return value >= 0 && value < UINT8_MAX ? (uint8_t)value : UINT8_MAX;
}

/* The clock is read only when something has to wait. */
static inline int64_t tu_task_deadline(tu_task *task) {
    if (task->deadline == 0)
        task->deadline = tu_deadline(task->info.timeout_ns);
    return task->deadline;
}

/* What the program called, of which this is the whole or a part. */
static inline tu_task *tu_task_called(tu_task *task) {
    return __builtin_expect(task->outer != NULL, 0) ? task->outer : task;
}

/* Recorded after this rank has arrived: while the others' lines are on their way there is time for it. Parts are not:
 * what the program called has been, and is what the rank does. */
static inline void tu_task_record(tu_task *task) {
    if (task->ticket == 0 && task->outer == NULL) {
        memcpy(&task->info.executor, task->executor->name, sizeof task->info.executor);
        task->ticket = tu_group_record(task->group, &task->info);
    }
}

/* ---- this rank's side of a group ---- */

/* From `bytes` on. */
typedef struct tu_rule {
    uint64_t bytes;
    tutti_algorithm algorithm;
} tu_rule;
#define TU_RULES 6

typedef struct tu_choice {
    tutti_algorithm algorithm;
    uint64_t bytes;   /* that decided */
    uint64_t limit;   /* of the rule that was chosen */
    const char *from; /* "built-in table", a file's name, "TUTTI_ALGORITHM", "the call" */
    bool replaced;    /* the rule's algorithm cannot serve this call; the next best one does */
    bool any_order;   /* it did not add in rank order, as the call allowed */
} tu_choice;

/* Bytes to be copied. */
typedef struct tu_segment {
    unsigned char *to;
    const unsigned char *from;
    size_t bytes;
} tu_segment;

typedef struct tu_works tu_works;       /* helper thread and queue: works.c */
typedef struct tu_messages tu_messages; /* sends and receives: request.h */

struct tu_collective {
    tutti_group *group;
    int rank, size;
    _Atomic uint32_t busy;    /* lock of everything below but `messages`: 0 free, 1 held */
    _Atomic uint32_t waiters; /* threads that wait for it */
    bool ready;               /* the pieces are exchanged */
    tu_layout layout;
    tu_piece piece;
    tu_mapping **mappings;
    tu_member **members; /* each member's piece as mapped here */
    tu_bell **bells;     /* of the members */
    const _Atomic uint32_t *sleepers;
    uint32_t spins;   /* pauses before a wait becomes serious */
    uint64_t epoch;   /* the last one entered */
    uint64_t cleared; /* every member is known to be done with epochs up to this one; -1 at first: epochs count from 1,
                         and the first of them is compared by whoever left it early, too */
    uint64_t signature[2]; /* of this rank's last two epochs, by parity */
    tu_memory_group *memory;
    struct tu_domains *domains; /* domain.h; NULL: not known */
    const void **sources;       /* scratch of the reductions: size entries each */
    void **targets;
    double *factors;
    tu_segment *taken, *put; /* scratch of the rounds: size entries each */
    tu_reference *references;
    int direct_inputs, direct_outputs; /* of the last operation that used references */
    int helpers;                       /* threads besides the caller's that may compute */
    uint64_t large;                    /* bytes from which results are written past the cache */
    uint64_t stage_stream; /* bytes from which staging is: a line that a peer has read costs a round trip to write
                              again; see state.c */
    tu_piece ring_piece;   /* for longer messages, attached on first need */
    tu_mapping **ring_mappings;
    unsigned char **rings;          /* each member's ring; NULL: not attached */
    size_t ring_bytes, chunk_bytes; /* of one; the most that a round uses of it … */
    size_t crowded_chunk_bytes;     /* … where `crowded` */
    bool crowded;         /* some member says that ranks outnumber the cores; known with the rings, the same on all */
    uint64_t turns;       /* rounds that have gone through the ring; the same on all members */
    bool near;            /* the members' cores, as measured at first: state.c */
    tu_stage_watch watch; /* of staging through the ring */
    tutti_work *open;     /* a one-shot that was started and not finished, with a reference; works.c */
    int64_t next_look;    /* when a test of `open` looks for the dead again */
    bool helping;         /* the lock is held by the helper thread */
    _Atomic(tu_works *) works;          /* NULL until the first work that needs it */
    _Atomic(tutti_batch *) spare_batch; /* for the next batch; NULL: it needs memory */
    _Atomic(tu_messages *) messages;    /* NULL until the first send or receive */
    tu_executors executors;             /* for memory of the CPU; those for devices: device.c */
    const tu_executor *only;            /* the one of these that serves every task; NULL: they have to be asked */
    const tu_executor *ran_by;          /* the executor of the last collective that ran */
    tu_operation_info ran;              /* that collective */
    tu_task *outer;                     /* of group->here of another one: the call there that this serves; else NULL */
    tu_choice choice;                   /* of the last run, for tutti_group_ran */
    tu_rule rules[TU_OPERATION_COUNT]
                 [TU_RULES]; /* for this number of ranks; the last one in use has the largest bytes */
    tutti_algorithm forced[TU_OPERATION_COUNT]; /* TUTTI_ALGORITHM */
    const char *rules_from;
};

/* The group's state, made on first need; local. */
tutti_status tu_collective_get(tutti_group *group, tu_collective **state);
extern const tu_attachment tu_collective_attachment;
/* The same where it has been made, else NULL. */
static inline tu_collective *tu_collective_find(const tutti_group *group) {
    return tu_attachment_find(&group->attachments, &tu_collective_attachment);
}
/* Exchanges the pieces, once; collective. With the lock held. */
tutti_status tu_collective_setup(tu_collective *state, tu_task *task);
/* Attaches the rings, once; collective. */
tutti_status tu_collective_attach_rings(tu_collective *state, tu_task *task);

tutti_status tu_collective_lock(tu_collective *state, int64_t deadline);
static inline bool tu_collective_try_lock(tu_collective *state) {
    uint32_t free_word = 0;
    return atomic_compare_exchange_strong_explicit(&state->busy, &free_word, 1, memory_order_acquire,
                                                   memory_order_relaxed); /* pairs with tu_collective_unlock */
}
void tu_collective_unlock(tu_collective *state);

/* ---- parts of a member's piece ---- */

static inline unsigned char *tu_staging(const tu_collective *state, int member, uint64_t epoch) {
    return (unsigned char *)state->members[member] + state->layout.slots + (epoch & 1) * state->layout.slot_bytes;
}
/* Where a member stages round `turn` of the ring, in a slot of `bytes`, at most half of it. Rounds alternate between
 * the halves, like epochs between the two slots, and go round in each: so a line is used again only after all others.
 */
static inline unsigned char *tu_ring_slot(const tu_collective *state, int member, uint64_t turn, size_t bytes) {
    size_t half = state->ring_bytes / 2;
    return state->rings[member] + (turn & 1) * half + (turn >> 1) % (half / bytes) * bytes;
}
/* splits[i][0]: elements that the member sends to i; splits[i][1]: where they lie in its input. */
static inline uint64_t (*tu_splits(const tu_collective *state, int member, uint64_t epoch))[2] {
    unsigned char *base = (unsigned char *)state->members[member] + state->layout.splits;
    return (uint64_t(*)[2])(void *)(base + (epoch & 1) * (size_t)state->size * 16);
}
/* ---- hand-overs: sync.c ---- */

/* Looks, each after a pause, before a wait is set up: about a microsecond, beyond which that costs nothing. Without the
 * pause a look that finds nothing takes the line away from its writer, who then has to fetch it back. */
#define TU_QUICK_SPINS 64

/* Enters the next epoch: waits, where it must, until all members are done with the one before the last. */
tutti_status tu_epoch_enter(tu_collective *state, tu_task *task, uint64_t *epoch);
/* Publishes what was put into the line and slot of `epoch`. */
void tu_epoch_arrive(tu_collective *state, tu_task *task, uint64_t epoch);
/* Both, for a hand-over without data. */
static inline tutti_status tu_epoch_come(tu_collective *state, tu_task *task, uint64_t *epoch) {
    tutti_status status = tu_epoch_enter(state, task, epoch);
    if (status == TUTTI_OK)
        tu_epoch_arrive(state, task, *epoch);
    return status;
}
/* Waits until `member` (or all) arrived, and compares signatures. */
tutti_status tu_epoch_await(tu_collective *state, tu_task *task, uint64_t epoch, int member);
tutti_status tu_epoch_await_all(tu_collective *state, tu_task *task, uint64_t epoch);
/* Everybody has arrived in `epoch`, so nobody reads this rank's line of the one before any more. It is the line of the
 * next epoch: fetched back for writing now, on the way out, it is there when the next call stores its flag. */
static inline void tu_line_reclaim(tu_collective *state, uint64_t epoch) {
    tu_prefetch_for_write(&state->members[state->rank]->arrive[(epoch + 1) & 1]);
    state->cleared = epoch - 1;
}
/* Whether `member` (or all) have arrived; never waits, compares nothing. */
bool tu_epoch_reached(const tu_collective *state, uint64_t epoch, int member);
bool tu_epoch_complete(const tu_collective *state, uint64_t epoch);
/* The second hand-over. */
void tu_step_publish(tu_collective *state, uint64_t epoch);
tutti_status tu_step_await_all(tu_collective *state, tu_task *task, uint64_t epoch);
tutti_status tu_step_await(tu_collective *state, tu_task *task, uint64_t epoch, int member);
/* Kernel flags for staging `bytes` in one hand-over. */
static inline unsigned tu_stage_flags(const tu_collective *state, size_t bytes) {
    return bytes >= state->stage_stream ? TU_KERNEL_STREAM : 0;
}
/* The same for staging through the ring. */
static inline unsigned tu_ring_flags(const tu_collective *state, size_t bytes) {
    return state->watch.watched ? (state->watch.far ? TU_KERNEL_STREAM : 0) : tu_stage_flags(state, bytes);
}
/* Rings every member that sleeps. */
void tu_ring_sleepers(const tu_collective *state);
static inline void tu_ring_members(const tu_collective *state) {
    atomic_signal_fence(memory_order_seq_cst); /* pairs with the sleepers' membarrier, as in tu_bell_ring */
    if (__builtin_expect(atomic_load_explicit(state->sleepers, memory_order_relaxed) != 0, 0))
        tu_ring_sleepers(state);
}
/* TUTTI_OK while the group lives, else its cause; before each chunk that is written to a peer. */
static inline tutti_status tu_still_alive(const tu_collective *state) {
    return tu_group_ended(state->group) ? tu_group_cause(state->group) : TUTTI_OK;
}

/* Trees: waits until the leader `member` says that its domain is complete, or has the data. */
tutti_status tu_await_up(tu_collective *state, tu_task *task, uint64_t epoch, int member);

/* ---- mismatch.c ---- */

static inline uint64_t tu_mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 29;
}
/* `meets`: of the operation's row. `detail`: as in tu_task. */
static inline uint64_t tu_signature_of(const tu_operation_info *info, tu_operation meets, uint64_t detail) {
    if (TUTTI_BARE)
        return 1;
    uint64_t small = (uint64_t)meets << 56 | (uint64_t)info->dtype << 48 | (uint64_t)info->reduction << 40 |
                     (uint64_t)info->algorithm << 32 | (uint32_t)info->root;
    return tu_mix(tu_mix(small * UINT64_C(0xff51afd7ed558ccd), info->count), detail);
}
static inline uint64_t tu_signature(const tu_task *task) {
    return tu_signature_of(&task->info, task->row->meets, task->detail);
}

static inline void tu_say(tu_said *said, const tu_operation_info *info, uint64_t detail) {
    if (TUTTI_BARE)
        return;
    said->sequence = info->sequence;
    said->count = info->count;
    said->detail = detail;
    said->root = info->root;
    said->operation = info->operation;
    said->dtype = info->dtype;
    said->reduction = info->reduction;
    said->algorithm = info->algorithm;
}
/* Writes the error for a member whose signature differs; returns TUTTI_ERROR_MISMATCH. */
tutti_status tu_mismatch(tu_collective *state, tu_task *task, uint64_t epoch, int member);
/* The same for what another host's member said. */
tutti_status tu_mismatch_of(const tutti_group *group, const tu_task *task, const tu_said *mine, int member,
                            const tu_said *theirs);
/* A pair of ranks that disagree on what one sends to the other. */
tutti_status tu_mismatch_split(tu_collective *state, tu_task *task, int from, int to, uint64_t sent, uint64_t expected);

/* ---- which algorithm: tuning.c ---- */

/* The algorithm that the call, or else a setting, asks for; AUTO when they leave it open. */
tutti_algorithm tu_forced_algorithm(const tu_task *task);
/* Bytes that the line of a flag has for a payload of this task. */
static inline size_t tu_line_room(const tu_task *task) {
    return task->info.reduction == TUTTI_PREMUL_SUM ? offsetof(tu_reference, factor)
           : task->given != 0                       ? offsetof(tu_reference, given)
                                                    : TU_INLINE_BYTES;
}
/* Whether the algorithm that the call or a setting asks for can be had: local, so that it is said before the call has a
 * number. */
tutti_status tu_choose_check(const tu_collective *state, const tu_task *task);
/* Which algorithm runs; the same on all ranks that have the same tables. */
void tu_choose(const tu_collective *state, const tu_task *task, tu_choice *choice);

/* ---- running: task.c ---- */

/* The whole, on this thread, after the arguments were checked and an executor was chosen. */
tutti_status tu_task_run(tu_task *task);
/* The same for a task whose turn it is, or that needs none: enters it unless it has been, prepares, runs, leaves. */
tutti_status tu_task_run_in_turn(tu_task *task);
/* Waits for the turn of the group's collectives: the state's lock. tu_collective_unlock ends it. */
tutti_status tu_turn_take(tu_collective *state, int64_t timeout_ns);
/* Copies `source`, where there is one: before the task runs, and not before those before it have. */
tutti_status tu_task_fill(tu_task *task);
/* The first and the last step, for works, whose steps lie apart. */
tutti_status tu_task_enter(tu_task *task);
tutti_status tu_task_leave(tu_task *task, tutti_status status);

/* Meets all members on the host and compares their calls, once; in a turn: meet.c. */
tutti_status tu_task_meet(tu_task *task);

/* ---- the executor shm: shm.c ---- */

/* Sets the task's algorithm and signature; notes for tutti_group_ran that it runs. In a turn. */
void tu_shm_choose(tu_task *task);
static inline void tu_shm_note(tu_collective *state, const tu_executor *executor, const tu_operation_info *info) {
    state->ran = *info;
    state->ran_by = executor;
    state->direct_inputs = state->direct_outputs = 0;
}

/* The quick way for calls without options: express.c. False: it is not for this call, nothing has happened. */
bool tu_express_barrier(tutti_group *group, tutti_status *status);
bool tu_express_all_reduce(tutti_group *group, const void *in, void *out, size_t count, tutti_dtype dtype,
                           tutti_reduction reduction, tutti_status *status);

/* One hand-over: start publishes, finish waits and takes. bytes: staged by this rank. */
tutti_status tu_one_shot(tu_collective *state, tu_task *task, tutti_algorithm algorithm);
bool tu_one_shot_can_start(const tu_collective *state, const tu_task *task, tutti_algorithm algorithm);
tutti_status tu_one_shot_start(tu_collective *state, tu_task *task, tutti_algorithm algorithm);
tutti_status tu_one_shot_finish(tu_collective *state, tu_task *task, tutti_algorithm algorithm);
/* Of a started all-gather: what `member`, who has come, has given to it. */
void tu_one_shot_peek(const tu_collective *state, const tu_task *task, int member, void *part);

tutti_status tu_two_shot(tu_collective *state, tu_task *task);  /* reductions */
tutti_status tu_pipelined(tu_collective *state, tu_task *task); /* moves */
tutti_status tu_tree(tu_collective *state, tu_task *task);      /* barrier, broadcast */

/* ---- what a task moves: shape.c ---- */

/* Slice of a reduction that `owner` reduces, in elements. */
typedef struct tu_slice {
    size_t first, count;
} tu_slice;
tu_slice tu_slice_of(const tu_task *task, int size, int owner);
/* Who gets the results: everybody, the root, or each owner its own slice. */
bool tu_wants_all(const tu_task *task, int member);

/* One part of a move: from `source` to `target`. Offsets in bytes; in_offset is valid on the source (everywhere but in
 * all_to_all_v, where it is the source's own business), out_offset on the target. */
typedef struct tu_part {
    size_t bytes, in_offset, out_offset;
} tu_part;
tu_part tu_part_of(const tu_task *task, int rank, int source, int target);
/* Whether `listener` takes anything from `source` in this operation. */
bool tu_listens(const tu_task *task, int listener, int source);

/* Bytes of the buffers on this rank; 0 where a buffer is not used. */
size_t tu_in_bytes(const tu_task *task, int rank, int size);
size_t tu_out_bytes(const tu_task *task, int rank, int size);

/* ---- from a public call to a task: call.c ---- */

/* Whether the memory of a call could be a device's: this world has one, or has not looked yet, or the call speaks of
 * one. */
static inline bool tu_device_possible(const tutti_world *world, const tutti_call *call) {
    if (__builtin_expect(atomic_load_explicit(&world->devices, memory_order_relaxed) != NULL, 0))
        return !world->fake;
    return !world->fake &&
           (!atomic_load_explicit(&world->looked, memory_order_relaxed) || call->stream != NULL || call->device != 0);
}

/* A task of which nothing is set but these. (An initializer would clear it by a string instruction, which takes longer
 * than a barrier's arithmetic.) */
static inline void tu_task_begin(tu_task *task, tutti_group *group, tu_operation operation) {
    size_t bytes = sizeof *task;
    __asm__("" : "+r"(bytes)); /* so that the library's memset does it */
    memset(task, 0, bytes);
    task->group = group;
    task->row = &tu_operations[operation];
    task->info.operation = (uint8_t)operation;
    task->info.root = -1;
}

/* Checks arguments and options, and runs, starts or notes the task. */
tutti_status tu_submit(tu_task *task, const tutti_call *call);
/* The second half, for a task whose arguments have been checked. */
tutti_status tu_submit_checked(tu_task *task, const tutti_call *call);
/* For a call that has nothing to do, on any rank: complete at once, and so is the work that it asked for. */
tutti_status tu_submit_nothing(tutti_group *group, const tutti_call *call);

#endif
