/* SPDX-License-Identifier: Apache-2.0
 *
 * What the host side and the kernels of the NVSHMEM backend share.
 *
 * SIGNALS OF PEERS THAT ARE NOT MAPPED. A member's area is, in 64-bit words as NVSHMEM's signals are:
 *
 *     [channels][size] sent      written by the sender
 *     [channels][size] taken     written by the receiver of this member's signals
 *     [channels][size] arrived   barriers that each member came to, written by that member
 *
 * and then what only its owner uses: [channels][size] {sent, taken}, [channels] barriers. The protocol is that of the
 * CUDA backend's signals.
 *
 * EXCHANGES WITH MEMBERS THAT ARE NOT MAPPED. Each member has an area in its heap:
 *
 *     [size][2] arrived    which chunk lies in the inbox below, written by the sender with the chunk
 *     [size][2] taken      which chunk of this member's the other one took last of those, written by that one
 *     [size][2] inbox      chunks on their arrival, from each member two in turns
 *     [size][2] outbox     chunks that are being put: what a network sends must lie in the heap
 *
 * A message to a member goes in chunks. The sender puts chunk n into inbox [me][n % 2] there, together with the word
 * arrived [me][n % 2] = n << 32 | signature, as soon as chunk n - 2 was taken; the receiver copies it to where it
 * belongs and tells that it has taken it. A network may deliver two words in any order: no word is written again before
 * what was written last has been seen. Numbers of chunks go on from message to message and are kept on the device,
 * so that a captured exchange can run again. Every pair exchanges at least one chunk, which may be empty: so an
 * exchange is a barrier too, and whoever makes another call is found by its signature. Sends and receives have an area
 * of their own.
 */
#ifndef TU_NVSHMEM_PARAMS_H
#define TU_NVSHMEM_PARAMS_H

#include <stdint.h>

#include "backend/cuda/params.h"

typedef struct tu_nvshmem_member {
    uint64_t place; /* what stands for the member's area in NVSHMEM's calls: an address of this rank's own heap */
    int32_t pe;
    int32_t unused;
} tu_nvshmem_member;

typedef struct tu_nvshmem_signal_args {
    uint64_t members; /* address of tu_nvshmem_member[size], device memory */
    uint64_t own;     /* this rank's area */
    tu_cuda_group_words group;
    uint64_t answer; /* of a test: device address of a pinned word, 1 or 0 */
    uint64_t timeout_ns;
    int32_t rank, size, channel, channels;
    int32_t peer;
    int32_t kind; /* TU_CUDA_SIGNAL_… */
    uint32_t operation;
    int32_t pe;           /* of a number that is set: whose it is … */
    uint64_t word, value; /* … or one that is awaited: its place in this rank's heap, and what it shall be */
} tu_nvshmem_signal_args;

/* A part of a message. */
typedef struct tu_nvshmem_piece {
    uint64_t offset, bytes;
} tu_nvshmem_piece;

/* Where the bytes of this rank's messages lie: byte b of a piece at base + offset + b; or, where `row` is not 0, in
 * rows of so many bytes, `pitch` apart: byte b is byte (skip + b) % row of row (skip + b) / row. */
typedef struct tu_nvshmem_side {
    uint64_t base;
    uint64_t row, pitch, skip;
} tu_nvshmem_side;

/* Where the parts of an area lie, from its beginning. */
typedef struct tu_nvshmem_boxes {
    uint64_t arrived, taken, inbox, outbox;
    uint64_t counters; /* device address of this rank's own: uint32_t[size][2], sent to and taken from each member */
} tu_nvshmem_boxes;

typedef struct tu_nvshmem_exchange_args {
    tu_cuda_group_words group;
    uint64_t members; /* address of tu_nvshmem_member[size], device memory: their areas */
    uint64_t own;     /* this rank's area */
    tu_nvshmem_boxes boxes;
    uint64_t chunk; /* bytes, a multiple of 16 */
    uint64_t timeout_ns, sequence;
    tu_nvshmem_side in, out;
    uint64_t value; /* what everybody gets where in.base is 0: eight bytes */
    uint32_t signature, operation;
    int32_t rank, size;
    int32_t peer;    /* of a send or receive; -1: an exchange of all */
    int32_t is_send; /* else a receive */
    int32_t in_heap; /* the input is put from where it lies, if its messages are of one piece */
    int32_t pieces;  /* of each message; 0: all are empty */
    uint64_t more;   /* address of a list like the following, [2][size][pieces], where that has no room; else 0 */
    tu_nvshmem_piece list[2][TU_CUDA_LISTED]; /* to, and from, each member; of a send or receive the first alone */
} tu_nvshmem_exchange_args;

/* Makes the pieces of an all_to_all_vdev, when all have told each other how many rows they have. */
typedef struct tu_nvshmem_plan_args {
    tu_cuda_group_words group;
    uint64_t timeout_ns, sequence;
    uint64_t in_splits;  /* int64: as in tu_cuda_vdev_args */
    uint64_t out_splits; /* int64[2][slots] */
    uint64_t told;       /* int64[size][experts]: rows that come from each member */
    uint64_t scratch;    /* int64[2][TU_CUDA_SLOTS] */
    uint64_t list;       /* tu_nvshmem_piece[2][size][experts] */
    uint64_t row_bytes, in_rows, out_rows;
    int64_t major_align;
    uint32_t operation;
    int32_t experts, form;
    int32_t rank, size;
} tu_nvshmem_plan_args;

/* Gets the same rows of several members' blocks, one member after the other. */
typedef struct tu_nvshmem_take_args {
    tu_cuda_group_words group;
    uint64_t timeout_ns;
    uint64_t to, stride;  /* of the first one's, in this rank's heap; the rows lie one after the other */
    uint64_t rows, bytes; /* bytes of a row */
    uint64_t pitch;       /* of the members' rows */
    uint64_t count;
    tu_nvshmem_member from[TU_CUDA_LISTED]; /* `place` stands for the first row */
} tu_nvshmem_take_args;

#endif
