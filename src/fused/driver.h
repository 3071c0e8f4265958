/* SPDX-License-Identifier: Apache-2.0
 *
 * The two ways in which a rank computes and communicates at once. All fused operations are one of them with a product
 * in the middle.
 */
#ifndef TU_FUSED_DRIVER_H
#define TU_FUSED_DRIVER_H

#include "fused/team.h"
#include "fused/workspace.h"
#include "kernel/kernel.h"

/* ---- panels ---- */

/* The ranks in runs of neighbours whose rows are multiplied together, because a product of few rows spends its time on
 * packing the right matrix. Sizes alone decide, not who comes when: results have the same bits in every run of a
 * program. */
typedef struct tu_panels {
    int ranks, count;
} tu_panels;

/* Of ranks with `rows` rows each: panels have `least` rows or all. */
static inline tu_panels tu_panels_of(int ranks, int64_t rows, int64_t least) {
    int64_t count = rows >= least ? ranks : ranks * rows / least;
    return (tu_panels){ ranks, count > 1 ? (int)count : 1 };
}
static inline int tu_panel_of(tu_panels panels, int rank) {
    return (int)((int64_t)rank * panels.count / panels.ranks);
}
/* Its first rank; that of the next panel is where it ends. */
static inline int tu_panel_first(tu_panels panels, int panel) {
    return (int)(((int64_t)panel * panels.ranks + panels.count - 1) / panels.count);
}

/* ---- gather and consume ---- */

typedef struct tu_gather {
    const char *who;
    tutti_group *group;
    const tu_fused_signature *signature; /* has the sizes and dtypes of the tensors */
    int count;                           /* of them, at most TU_FUSED_PARTS */
    const tt_tensor *tensors[TU_FUSED_PARTS];
    bool in_order; /* from rank 0 on, instead of this rank first */
    /* Called once for each rank, on one thread at a time. */
    tutti_status (*consume)(void *context, int rank, const tu_shard *shards);
    /* It notes where shards lie, and the work on a panel reads them there: those of a panel that is not complete when
     * shards move are consumed once more. */
    bool notes_places;
    /* What is done with all that was consumed, or NULL: rows of the shards of one rank, or, where panels have several
     * ranks, of those of a panel, which have all been consumed. */
    tu_team_work *work;
    int64_t rows, block_rows; /* of a rank; of a job of several threads: 0, the work is not worth them */
    bool same_rows;           /* the ranks' shards are columns: a panel has no more rows than a rank */
    bool by_library;          /* see tu_team: a job has all rows then */
    /* Before the first work, or NULL. */
    void (*prepare)(void *context);
    tu_panels panels;
    void *context;
} tu_gather;

/* Hands each rank's shards to `consume` once: where they lie, or staged; this rank's first, the others' as they become
 * ready. A failure of consume or work is this rank's alone: the others are served all the same. */
tutti_status tu_gather_and_consume(const tu_gather *gather);

/* ---- produce and scatter ---- */

typedef struct tu_scatter {
    const char *who;
    tutti_group *group;
    const tu_fused_signature *signature; /* has rows, row_bytes, and what they are of */
    int64_t rows, tile_rows;             /* of one rank's block; of a tile of it, the same on all ranks */
    int64_t chunk_rows;                  /* that are made at once: whole tiles, as many as this rank likes */
    int64_t block_rows; /* of a job of several threads; 0: one thread makes chunks and hands them over */
    bool by_library;    /* see tu_team: a job is a chunk then */
    size_t row_bytes;
    tu_panels panels; /* as many as ranks where a block has several chunks */
    char *direct;     /* where this rank's own rows are computed, row_bytes apart; NULL: in a tile */
    /* Before anything is produced, or NULL. */
    void (*prepare)(void *context);
    /* Writes rows [first, first + count) of the blocks for the `ranks` ranks from `rank` on, dense, one block behind
     * the other. Of several ranks they are all rows of a block. */
    tutti_status (*produce)(void *context, int rank, int ranks, int64_t first, int64_t count, void *to);
    /* The same rows of this rank's own block, as each rank has made them, in rank order. Where it takes copies it may
     * be given some, which it makes meanwhile. */
    tutti_status (*accept)(void *context, int64_t first, int64_t count, const void *const *from, const tu_aside *copies,
                           int copy_count);
    bool takes_copies;
    void *context;
} tu_scatter;

/* Every rank makes a block for each rank, tile by tile, and hands each to its owner, who accepts the tiles of all. A
 * failure of a callback ends the group: the others wait for tiles. */
tutti_status tu_produce_and_scatter(const tu_scatter *scatter);

#endif
