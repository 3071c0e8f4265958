/* SPDX-License-Identifier: Apache-2.0
 *
 * What the operations of libtutti are: one table, read by everything that has to know. Adding an operation means a row
 * in operations.def; nobody compares operations by their numbers.
 */
#ifndef TU_BASE_OPERATION_H
#define TU_BASE_OPERATION_H

#include <stdbool.h>
#include <stdint.h>

#include <tutti/call.h>

typedef enum tu_operation {
    TU_OPERATION_NONE = 0,
#define OPERATION(id, name, ...) TU_OPERATION_##id,
#include "base/operations.def"
#undef OPERATION
    TU_OPERATION_COUNT
} tu_operation;

typedef enum tu_kind {
    TU_KIND_OTHER = 0, /* no collective: meetings, votes, what is done with peers' memory */
    TU_KIND_BARRIER,   /* moves nothing */
    TU_KIND_REDUCTION, /* combines the inputs of all ranks */
    TU_KIND_MOVE,      /* copies parts of inputs to outputs */
    TU_KIND_ROWS,      /* copies rows by splits that lie in memory: all_to_all_vdev and its forms */
    TU_KIND_TILES,     /* takes parts of symmetric matrices where they lie: tiles.c */
    TU_KIND_MESSAGE,   /* from one rank to another */
    TU_KIND_BATCH      /* several of the above */
} tu_kind;

/* Who takes something from whom. */
typedef enum tu_flow {
    TU_FLOW_ALL = 0,   /* everybody from everybody */
    TU_FLOW_TO_ROOT,   /* the root from everybody */
    TU_FLOW_FROM_ROOT, /* everybody from the root */
    TU_FLOW_PERMUTED   /* to[r] from rank r */
} tu_flow;

/* How long a buffer is. With a flow to the root the output is the root's alone, with a flow from it the input. */
typedef enum tu_extent {
    TU_EXTENT_NONE = 0,
    TU_EXTENT_WHOLE,   /* count elements */
    TU_EXTENT_EACH,    /* count elements for each rank, in rank order */
    TU_EXTENT_SHARE,   /* counts[own rank] elements, with the same counts on all ranks */
    TU_EXTENT_SHARES,  /* counts[r] elements for each rank r, one after the other or at offsets */
    TU_EXTENT_SPLITS,  /* counts and offsets of this rank's own */
    TU_EXTENT_SENDERS, /* count elements for each rank that sends here */
    TU_EXTENT_ROWS,    /* the rows of a tutti_rows */
    TU_EXTENT_TILES    /* all of a matrix; the first tile that comes here */
} tu_extent;

/* What others may do with buffers of a rank whose input is its output. */
typedef enum tu_in_place {
    TU_IN_PLACE_STAYS = 0, /* use them where they lie: what they still read, nobody writes */
    TU_IN_PLACE_FIRST,     /* read the input where it lies if this rank's own part is the first one; else not */
    TU_IN_PLACE_MOVES,     /* not use them: parts change places, each with its counterpart */
    TU_IN_PLACE_COPIES     /* not use them, and the rank works from a copy: parts move to places of other sizes */
} tu_in_place;

/* How the rows of all_to_all_vdev are ordered: vdev.c. */
typedef enum tu_rows {
    TU_ROWS_FLAT = 0,
    TU_ROWS_BY_EXPERT = 1,
    TU_ROWS_AT_OFFSETS = 2
} tu_rows;

/* Sets of algorithms, by the bit of their number. */
#define TU_BY_INLINE (1u << TUTTI_ALGORITHM_INLINE)
#define TU_BY_ONE_SHOT (1u << TUTTI_ALGORITHM_ONE_SHOT)
#define TU_BY_TWO_SHOT (1u << TUTTI_ALGORITHM_TWO_SHOT)
#define TU_BY_PIPELINED (1u << TUTTI_ALGORITHM_PIPELINED)
#define TU_BY_TREE (1u << TUTTI_ALGORITHM_TREE)
#define TU_BY_FLAT (TU_BY_INLINE | TU_BY_ONE_SHOT)

typedef struct tu_operation_row {
    const char *name;
    tu_operation form;  /* the operation whose shape and tuning rules it has: itself, but for the named forms */
    tu_operation meets; /* under which ranks compare what they call: itself, but for those that compare themselves */
    tu_kind kind;
    tu_flow flow;
    tu_extent in, out;
    tu_in_place in_place;
    tu_rows rows;
    bool placed;            /* everybody knows where its part of another's output lies, and may write it there */
    bool own_number;        /* not all members do it alike: numbered by a counter of the rank's own, not the group's */
    bool timeout_ends_call; /* a timeout ends that call alone; else the group, whose members are out of step */
    bool counts_differ;     /* ranks may give different counts */
    bool returns_object;    /* its caller gets an object or an answer, which a skipped call cannot have */
    bool makes_group;       /* also in a fake world whose collectives fail */
    bool excludes_late;     /* can be told to leave out ranks that do not come */
    bool host_only;         /* never enqueued on a stream */
    bool of_records;        /* its elements are records of the library, which tell a caller nothing */
    bool multicast;         /* on a device: by one address for all members */
    bool copy_engines;      /* on a device: by copy engines where that is possible */
    tutti_algorithm fixed;  /* the only one it has, or AUTO */
    unsigned algorithms;    /* those it has, when none is fixed */
    const char *partner;    /* what the root field is: "root", "to rank", "from rank" */
    const char *tag;        /* what the tag field is: "tag", "channel"; NULL: nothing */
} tu_operation_row;

extern const tu_operation_row tu_operations[TU_OPERATION_COUNT];

/* The row of a number that may come from another process: "?" for what is none. */
const tu_operation_row *tu_operation_row_of(unsigned operation);

static inline const char *tu_operation_name(tu_operation operation) {
    return tu_operation_row_of((unsigned)operation)->name;
}
tu_operation tu_operation_find(const char *name); /* TU_OPERATION_NONE when there is none */

/* Whether calls of both may meet under one number; what else must be equal is their own business. */
static inline bool tu_operations_meet(unsigned one, unsigned other) {
    return one == other || tu_operation_row_of(one)->meets == tu_operation_row_of(other)->meets;
}

/* Whether all members of a group do this operation alike and in the same order, so that its sequence number means the
 * same on all of them. Others (send, recv, put, get, signals, votes) are numbered by a counter of the rank's own. */
static inline bool tu_operation_sequenced(tu_operation operation) {
    return (unsigned)operation >= TU_OPERATION_COUNT || !tu_operations[operation].own_number;
}

/* Whether one rank has a part of its own in the call: a root must be given. */
static inline bool tu_has_root(const tu_operation_row *row) {
    return row->flow == TU_FLOW_TO_ROOT || row->flow == TU_FLOW_FROM_ROOT;
}
/* Whether lists of counts say how long the parts are. */
static inline bool tu_has_counts(const tu_operation_row *row) {
    return row->in == TU_EXTENT_SHARE || row->in == TU_EXTENT_SHARES || row->in == TU_EXTENT_SPLITS;
}
/* Whether an input has a part for each rank. */
static inline bool tu_has_parts(const tu_operation_row *row) {
    return row->in == TU_EXTENT_EACH || row->in == TU_EXTENT_SHARES || row->in == TU_EXTENT_SPLITS;
}
/* Whether each rank gets a part of its own of what is reduced. */
static inline bool tu_scatters(const tu_operation_row *row) {
    return row->kind == TU_KIND_REDUCTION && row->in != TU_EXTENT_WHOLE;
}
/* Whether inputs of several ranks lie side by side in an output. */
static inline bool tu_gathers(const tu_operation_row *row) {
    return row->kind == TU_KIND_MOVE && (row->in == TU_EXTENT_WHOLE || row->in == TU_EXTENT_SHARE) &&
           (row->out == TU_EXTENT_EACH || row->out == TU_EXTENT_SHARES);
}
/* Whether everybody gets the whole of what is reduced. */
static inline bool tu_reduces_to_all(const tu_operation_row *row) {
    return row->kind == TU_KIND_REDUCTION && row->flow == TU_FLOW_ALL && row->in == TU_EXTENT_WHOLE;
}
/* Whether it hands a message to another rank; whoever takes one has no input. */
static inline bool tu_sends(const tu_operation_row *row) {
    return row->kind == TU_KIND_MESSAGE && row->in != TU_EXTENT_NONE;
}
/* Whether it takes a message from another rank. */
static inline bool tu_receives(const tu_operation_row *row) {
    return row->kind == TU_KIND_MESSAGE && row->in == TU_EXTENT_NONE;
}
/* Whether the root deals out parts of its input. */
static inline bool tu_deals(const tu_operation_row *row) {
    return row->flow == TU_FLOW_FROM_ROOT && row->in == TU_EXTENT_EACH;
}

#endif
