/* SPDX-License-Identifier: Apache-2.0
 *
 * The table that says which algorithm runs from which size, and from where results are written past the cache.
 */
#ifndef TU_COLLECTIVE_TUNING_H
#define TU_COLLECTIVE_TUNING_H

#include "collective/collective.h"

/* From `ranks` ranks and `bytes` bytes on (those of tu_task_bytes), use `algorithm`. The rows of an operation with the
 * largest `ranks` that the group reaches count; of them the one with the largest `bytes` that the call reaches. */
typedef struct tu_tuning_row {
    tu_operation operation;
    int ranks;
    uint64_t bytes;
    tutti_algorithm algorithm;
} tu_tuning_row;

typedef struct tu_tuning {
    const char *from; /* "built-in table" or a file's name */
    const tu_tuning_row *rows;
    int count;
    uint64_t
        stream_bytes;     /* buffers of that many bytes and more are written past the cache; 0: from the cache's size */
    uint64_t stage_bytes; /* staged parts of that many bytes and more are written past the cache; 0: from the time of a
                             hand-over */
    uint64_t chunk_bytes; /* of one larger slot */
} tu_tuning;

extern const tu_tuning tu_tuning_built_in;

/* Reads a table from a file: lines "all_reduce 2 4096 two_shot" (operation, ranks, bytes, algorithm), "stream 4M",
 * "stage 8K", "chunk 256K"; # begins a comment. Operations that the file does not mention keep their built-in rows. An
 * error names file and line. */
tutti_status tu_tuning_read(const char *path, tu_tuning **tuning);
void tu_tuning_free(tu_tuning *tuning);

/* Fills the rules and limits of a group's state, from TUTTI_TUNING's file or the built-in table, and
 * TUTTI_ALGORITHM. */
tutti_status tu_tuning_apply(tu_collective *state);

#endif
