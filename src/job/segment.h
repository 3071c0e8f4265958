/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared memory of a job: segments, the heap on them, and mappings of peers' memory.
 *
 * A segment is a memfd that is reserved (fallocate, after comparing with MemAvailable, with every cgroup ancestor's
 * limit and with the world's ledger, under the ledger's lock in the job segment), zeroed, sealed against shrinking and
 * growing, and mapped. Too much is TUTTI_ERROR_MEMORY, a limit is TUTTI_ERROR_LIMIT naming it; never a SIGBUS later.
 *
 * A piece is a part of a segment that this rank owns. Small pieces are carved from permanent heap segments that each
 * peer maps once; a large one (TU_PIECE_OWN_SEGMENT bytes and more) is a segment of its own.
 */
#ifndef TU_JOB_SEGMENT_H
#define TU_JOB_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "job/job.h"

#define TU_PIECE_OWN_SEGMENT ((size_t)2 << 20)

typedef struct tu_segment tu_segment;

struct tu_piece {
    void *address; /* in this process */
    size_t bytes;
    tu_segment *segment; /* that it lies in */
    size_t offset;       /* there */
};

/* Zeroed, aligned to `alignment` (a power of two, at most 2 MiB; at least 64 is given). huge: 1 ask for huge pages,
 * 0 do not, -1 when it helps. Thread-safe. */
tutti_status tu_piece_alloc(tu_job *job, const char *what, size_t bytes, size_t alignment, int huge, tu_piece *piece);

/* Gives the memory back: a heap piece is reused once no peer maps it any more, tracked by the peers' release of their
 * mappings; an own segment is unmapped and closed here, and lives on while a peer has it mapped. Clears *piece.
 * Pieces are given back before their job closes. */
void tu_piece_free(tu_job *job, tu_piece *piece);

/* A peer's piece, mapped here. It outlives the job; whoever has it releases it once. */
struct tu_mapping {
    void *address;
    size_t bytes;
};

void tu_mapping_release(tu_mapping *mapping);

#endif
