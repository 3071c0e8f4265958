/* SPDX-License-Identifier: Apache-2.0
 *
 * What the host side and the kernels share: layouts in device memory, and the arguments of each kernel.
 *
 * THE CONTROL BLOCK. Every rank of a group has one on its device, mapped by all members at base + rank * stride. It
 * holds
 *
 *     inbox      one entry per (thread block, sender): the sender's thread block b writes entry [b][sender] of each
 * peer messages   the same for sends and receives: entry [b][sender] announces a chunk, entry [b][receiver] takes it
 *     slots      what all_to_all_vdev tells its peers
 *     stages     data on its way
 *     packets    data on its way together with its flag, for small reductions
 *
 * and, used by its owner alone, a table of mapped blocks, the EPOCHS (how many meetings each thread block number has
 * been through; they live in device memory, so that a captured graph can be replayed and mixed with eager calls), the
 * counters of messages and scratch. Outside of it lie the words of the group on this device (tu_cuda_words): the first
 * fault, which is sticky, and how many thread blocks have ended.
 *
 * The first meeting of a kernel brings, beside the flag, a hash of where the sender's buffers lie. Where all hashes
 * agree, as they do when every rank uses the same offsets of the same symmetric blocks, everybody can compute all
 * addresses; else a second meeting hands them over.
 *
 * A barrier of thread block b: all its threads arrive; thread t < n stores (epoch, signature) into entry [b][me] of
 * rank t, with release at system scope, and waits, with acquire, until its own entry [b][t] has reached the epoch. A
 * differing signature at the same epoch is a mismatched call. Entries carry the sender's addresses as well, written
 * before the flag.
 */
#ifndef TU_CUDA_PARAMS_H
#define TU_CUDA_PARAMS_H

#include <stdint.h>

#define TU_CUDA_RANKS 512          /* of one group on GPUs: a thread per member in one thread block */
#define TU_CUDA_LISTED 64          /* members whose parts fit into a kernel's arguments; more lie in device memory */
#define TU_CUDA_BLOCKS 128         /* thread blocks of one launch, at most */
#define TU_CUDA_TABLE 65536        /* symmetric blocks of a group at one time */
#define TU_CUDA_SLOTS 16384        /* parts of an all_to_all_vdev on one rank */
#define TU_CUDA_MESSAGE_BLOCKS 16  /* thread blocks of a send or receive */
#define TU_CUDA_PACKET_BLOCKS 128  /* thread blocks of a reduction by packets, at most */
#define TU_CUDA_PACKET_THREADS 256 /* of each: small blocks begin soonest */

typedef struct tu_cuda_inbox {
    uint64_t flag; /* epoch << 32 | signature … */
    uint64_t plan; /* … and a hash of source and target, 0 when one has to be staged: written together, as one 16-byte
                      store */
    uint64_t source;  /* where the receiver finds the sender's data: code, see below */
    uint64_t target;  /* where the receiver may write at the sender's: code; 0 none */
    uint64_t count;   /* bytes that the sender has for this receiver */
    double factor;    /* of premul_sum */
    uint64_t longest; /* of a move: bytes of the longest part that the sender has for anybody */
    uint64_t offset;  /* of a move: where the sender's part for this receiver begins */
} tu_cuda_inbox;      /* 64 bytes */

/* A code names memory of a member so that every member can find it: index of the mapped block in the group's table, and
 * the offset there. Index 0 is the control block itself with its staging. */
#define TU_CUDA_CODE(index, offset) ((uint64_t)(index) << 44 | (uint64_t)(offset))
#define TU_CUDA_CODE_INDEX(code) ((uint32_t)((code) >> 44))
#define TU_CUDA_CODE_OFFSET(code) ((code) & ((UINT64_C(1) << 44) - 1))

typedef struct tu_cuda_fault {
    uint32_t code; /* 0, or TU_CUDA_FAULT_…; set once by compare-and-swap on the device, or by the host's watcher */
    uint32_t peer; /* the member at fault */
    uint32_t mine, theirs; /* signatures of a mismatch */
    uint32_t operation;    /* tu_operation of the kernel */
    uint32_t channel;      /* of a signal */
    uint64_t sequence;     /* of the eager call, 0 in a replay */
} tu_cuda_fault;

#define TU_CUDA_NOBODY UINT32_MAX /* the peer of a fault where none can be named */

enum {
    TU_CUDA_FAULT_TIMEOUT = 1,
    TU_CUDA_FAULT_MISMATCH = 2,
    TU_CUDA_FAULT_ENDED = 3, /* the host says that the group ended: death, abort */
    TU_CUDA_FAULT_RANGE = 4, /* splits given on the device exceed their buffers */
    TU_CUDA_FAULT_ORDER = 5  /* an earlier operation of the group, on another stream, did not end in time */
};

/* How far a thread block number has come, in meetings or in reductions by packets. */
typedef struct tu_cuda_epoch {
    uint32_t value;
    uint32_t left; /* not 0: it left an operation on the way, by a fault, and begins none any more. What it told its
                      peers next, they would take for the operation that it has left */
} tu_cuda_epoch;

/* Of a group on this rank's device; in device memory. */
typedef struct tu_cuda_words {
    uint32_t fault;   /* the code of the first fault; kernels that wait and find it set leave */
    uint32_t expired; /* signals that ran out of time: they end nothing */
    uint64_t ended;   /* thread blocks of eager kernels that have ended */
} tu_cuda_words;

/* The same group, in pinned memory: written by kernels, read by the host. */
typedef struct tu_cuda_report {
    tu_cuda_fault fault;
    tu_cuda_fault expired; /* the last signal that ran out of time; `code` counts them */
} tu_cuda_report;

/* Where a kernel finds both. */
typedef struct tu_cuda_group_words {
    uint64_t words;  /* tu_cuda_words, device memory */
    uint64_t report; /* tu_cuda_report, device address of pinned memory */
    uint64_t place;  /* 1 + how many thread blocks of eager kernels come before this one; 0: the kernel is captured */
} tu_cuda_group_words;

typedef struct tu_cuda_mapping {
    uint64_t base; /* member r's block lies at base + r * stride */
    uint64_t stride;
} tu_cuda_mapping;

/* Everything a kernel needs to meet its peers. */
typedef struct tu_cuda_meeting {
    uint64_t control; /* of member 0; member r's at control + r * stride */
    uint64_t stride;
    uint64_t inbox_offset;  /* in the control block */
    uint64_t epochs;        /* address of this rank's: tu_cuda_epoch[TU_CUDA_BLOCKS] */
    uint64_t packets;       /* in the control block: see tu_cuda_packet_args */
    uint64_t packet_epochs; /* likewise [TU_CUDA_PACKET_BLOCKS], all values alike between kernels */
    uint64_t packet_room;   /* packets of one source */
    tu_cuda_group_words group;
    uint64_t table; /* address of tu_cuda_mapping[TU_CUDA_TABLE] */
    uint64_t timeout_ns;
    uint64_t sequence;
    uint64_t plan; /* this rank's */
    uint32_t signature;
    uint32_t operation;
    int32_t rank, size;
    int32_t together; /* all members are on this device: what they tell each other has its scope */
} tu_cuda_meeting;

/* all_reduce, reduce and reduce_scatter in all their forms. */
typedef struct tu_cuda_reduce_args {
    tu_cuda_meeting meeting;
    uint64_t in;                         /* this rank's input, device address */
    uint64_t out;                        /* this rank's output; 0: this rank gets none */
    uint64_t source;                     /* code of the input; 0: private, goes through staging */
    uint64_t target;                     /* code of the output; 0: private */
    uint64_t source_base, source_stride; /* of the input's block: member r's input lies at base + r * stride, where all
                                            have the same plan */
    uint64_t target_base, target_stride;
    uint64_t source_multicast, target_multicast; /* one address for all members' input and output; 0: none */
    uint64_t stage, stage_code;                  /* this rank's staging, at the same code on all */
    uint64_t scratch, scratch_code;              /* for reduced slices: at least stage_bytes / size */
    uint64_t stage_bytes;                        /* a multiple of 16 * size */
    uint64_t count;                              /* elements of the whole input */
    uint64_t row; /* reduce_scatter that splits the last dimension: elements of a row, all inputs symmetric; else 0 */
    uint64_t in_pitch, out_pitch; /* of TU_CUDA_LOCAL with a row: elements from one row to the next */
    double factor;
    int32_t reduction; /* tutti_reduction */
    int32_t mode;
    uint64_t more; /* address of a list like `parts` when there are more members, else 0; of TU_CUDA_LOCAL: of the
                      factor of each source, or 0 */
    uint64_t parts[TU_CUDA_LISTED + 1]; /* of TU_CUDA_SCATTER: where each rank's part begins */
} tu_cuda_reduce_args;

enum {
    TU_CUDA_ONE_SHOT = 1, /* everybody who has an output reduces everything into it */
    TU_CUDA_TWO_SHOT = 2, /* rank r reduces slice r and stores it into every output, or everybody gathers the slices */
    TU_CUDA_SCATTER = 3,  /* rank r reduces part r into its own output */
    TU_CUDA_LOCAL = 4     /* without meeting: the sources lie source_stride apart; `count` elements, or rows of `row` */
};

/* A reduction in which data and flag arrive together, as one 16-byte store: nobody meets anybody. */
typedef struct tu_cuda_packet {
    uint64_t data;
    uint64_t flag; /* epoch << 32 | signature */
} tu_cuda_packet;

/* The packets of a member: [parity of the epoch][step][source][packet_room]. A rank that is one operation ahead writes
 * the other parity; it cannot be two ahead, since the operation between needs what everybody sends in it. */
#define TU_CUDA_PACKET_STEPS 2

typedef struct tu_cuda_packet_args {
    tu_cuda_meeting meeting;
    uint64_t in, out;  /* of this rank, of any memory; they may be the same */
    uint64_t count;    /* elements, at least 1 */
    int32_t reduction; /* sum or avg */
    int32_t steps;     /* 1: everybody gets everything. 2: rank r reduces slice r and hands it to all */
} tu_cuda_packet_args;

typedef struct tu_cuda_move_part {
    uint64_t send_offset, send_bytes;       /* for one member, from `in` */
    uint64_t receive_offset, receive_bytes; /* from that member, to `out` */
} tu_cuda_move_part;

/* all_gather, broadcast, gather, scatter, all_to_all, permute and their v-forms: everybody pulls. */
typedef struct tu_cuda_move_args {
    tu_cuda_meeting meeting;
    uint64_t in, out;
    uint64_t source; /* code of the input; 0: private, goes through staging */
    uint64_t stage, stage_code;
    uint64_t stage_bytes; /* a multiple of 16 * size */
    uint64_t longest;     /* bytes of the longest part that this rank sends */
    uint64_t more;        /* address of a list like `parts` when there are more members, else 0 */
    tu_cuda_move_part parts[TU_CUDA_LISTED];
} tu_cuda_move_args;

/* An all_gather that stores each rank's part into everybody's output. */
typedef struct tu_cuda_gather_args {
    tu_cuda_meeting meeting;
    uint64_t in, bytes;                  /* this rank's part */
    uint64_t target;                     /* code of the output */
    uint64_t target_base, target_stride; /* where all members have the same plan */
    uint64_t multicast;                  /* one address for all outputs; 0: none */
} tu_cuda_gather_args;

/* One message to or from one member, through the sender's stage. */
typedef struct tu_cuda_message {
    uint32_t count; /* chunks sent to, or taken from, the owner of this entry so far */
    int32_t tag;
    uint64_t bytes; /* of the whole message */
} tu_cuda_message;

typedef struct tu_cuda_message_args {
    tu_cuda_meeting meeting;
    uint64_t buffer;       /* of this rank */
    uint64_t bytes;        /* of the whole message */
    uint64_t sent_offset;  /* in the control block: tu_cuda_message[TU_CUDA_MESSAGE_BLOCKS][size] */
    uint64_t taken_offset; /* the same, for what was taken */
    uint64_t counters;     /* this rank's own: uint32_t[2][TU_CUDA_MESSAGE_BLOCKS][size], sent and taken */
    uint64_t stage_offset; /* in the control block: a share for each receiver */
    uint64_t share;        /* bytes of it: a chunk */
    uint64_t block_bytes;  /* elements that lie apart: in blocks of so many bytes … */
    uint64_t stride_bytes; /* … each so many bytes after the last; 0: one after the other */
    int32_t peer, tag;
    int32_t is_send;
} tu_cuda_message_args;

/* Copies bytes from one place of this device's address space to another. */
typedef struct tu_cuda_copy_args {
    uint64_t to, from, bytes;
} tu_cuda_copy_args;

/* Rows of bytes from one place to another. */
typedef struct tu_cuda_tile {
    uint64_t to, from, rows, bytes; /* bytes of a row */
    uint64_t to_pitch, from_pitch;
} tu_cuda_tile;

#define TU_CUDA_TILES 64 /* of one launch */

typedef struct tu_cuda_tiles_args {
    tu_cuda_group_words group;
    uint64_t timeout_ns;
    uint64_t count;
    tu_cuda_tile tiles[TU_CUDA_TILES];
} tu_cuda_tiles_args;

/* Counts up a word of pinned memory: the stream has come here. */
typedef struct tu_cuda_mark_args {
    uint64_t word;
} tu_cuda_mark_args;

/* Lets a stream go on when the thread blocks of earlier operations, on other streams, have ended. */
typedef struct tu_cuda_follow_args {
    tu_cuda_group_words group;
    uint64_t ended; /* how many */
    uint64_t timeout_ns;
    uint64_t sequence;
    uint32_t operation;
    int32_t rank;
} tu_cuda_follow_args;

/* all_to_all_vdev and its 2d forms: the splits lie on the device. */
typedef struct tu_cuda_vdev_args {
    tu_cuda_meeting meeting;
    uint64_t in, out;
    uint64_t source;      /* code of the input */
    uint64_t in_splits;   /* int64 on the device: [slots], or [2][slots] with offsets */
    uint64_t out_splits;  /* int64[2][slots]: counts, offsets */
    uint64_t splits_code; /* code of the slots in this rank's control block: rows and offset of each */
    uint64_t scratch;     /* this rank's own: int64[2][TU_CUDA_SLOTS] */
    uint64_t row_bytes;
    uint64_t in_rows, out_rows;
    int64_t major_align; /* of 2d: at least 1 */
    int32_t experts;     /* per rank; 1 for the flat form */
    int32_t form;        /* 0 flat, 1 2d, 2 2d_offset */
} tu_cuda_vdev_args;

/* Signals of one (block, group): area layout of each member is [channels][size] of tu_cuda_signal, then
 * [channels][size] barrier epochs, each written by that member, then [channels] counters of the multicast barrier, to
 * which everybody adds. */
typedef struct tu_cuda_signal {
    uint32_t sent;  /* written by the sender, in the receiver's area */
    uint32_t taken; /* written by the receiver, in the sender's area at [channel][receiver] */
} tu_cuda_signal;

typedef struct tu_cuda_signal_args {
    uint64_t areas; /* member 0's; member r's at areas + r * stride */
    uint64_t stride;
    uint64_t
        local; /* this rank's counters, device memory: [channels][size] {sent, taken}, then [channels] barrier epochs */
    tu_cuda_group_words group;
    uint64_t answer;    /* of a test: device address of a pinned word, 1 or 0 */
    uint64_t multicast; /* of the multicast barrier: one address for all members' areas; 0: none */
    uint64_t timeout_ns;
    int32_t rank, size, channel, channels;
    int32_t peer;
    int32_t kind;
    uint32_t operation;
    uint64_t word, value; /* of a number that is set or awaited: its address, and what it shall be */
} tu_cuda_signal_args;

enum {
    TU_CUDA_SIGNAL_PUT = 0,
    TU_CUDA_SIGNAL_WAIT = 1,
    TU_CUDA_SIGNAL_BARRIER = 2,
    TU_CUDA_SIGNAL_TEST = 3, /* takes the signal if it is there */
    TU_CUDA_SIGNAL_SET_WORD = 4,
    TU_CUDA_SIGNAL_AWAIT_EQUAL = 5,
    TU_CUDA_SIGNAL_AWAIT_LEAST = 6
};

#endif
