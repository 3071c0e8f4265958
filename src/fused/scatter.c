/* SPDX-License-Identifier: Apache-2.0
 *
 * Produce and scatter. A rank computes a chunk of rows for each of the others, hands it to its owner tile by tile, and
 * announces each tile by a signal; then its own, and accepts what has come meanwhile. All ranks go through the tiles in
 * the same order, so that a rank waits only for one that is a tile behind; the first tile is made while the ranks
 * agree.
 *
 * Chunks are computed in memory of this rank's own and copied to their owner: a product is written many times, and the
 * first of them to a line that its owner has read costs a round trip between the processors. Tiles are small, so that
 * they are in a cache when they are added; chunks have as many rows as a product needs, and how many is each rank's own
 * business.
 */
#include "collective/arrival.h"
#include "functional/symmetric.h"
#include "fused/driver.h"

typedef struct scattering {
    const tu_scatter *plan;
    tu_fused *state;
    const void **from;           /* one per rank */
    char *made;                  /* the chunk for each rank, one behind the other */
    int64_t first_made, in_made; /* its rows: from where, and how many */
} scattering;

static int64_t rows_from(const tu_scatter *plan, int64_t first, int64_t most) {
    int64_t rest = plan->rows - first;
    return rest < most ? rest : most;
}

static size_t tile_bytes(const tu_scatter *plan, int64_t first) {
    return (size_t)rows_from(plan, first, plan->tile_rows) * plan->row_bytes;
}

static size_t chunk_bytes(const tu_scatter *plan) {
    return (size_t)rows_from(plan, 0, plan->chunk_rows) * plan->row_bytes;
}

/* ---- tiles ---- */

/* Whether this rank's own rows are computed where they shall be in the end. */
static bool is_direct(const scattering *run) {
    return run->plan->direct != NULL && run->plan->panels.count == run->plan->panels.ranks;
}

/* Where row `first` of the block for `rank` was computed. */
static char *made_at(const scattering *run, int rank, int64_t first) {
    int64_t row = rank * run->in_made + first - run->first_made;
    if (rank == run->state->rank && is_direct(run))
        return run->plan->direct + (size_t)first * run->plan->row_bytes;
    return run->made + (size_t)row * run->plan->row_bytes;
}

static tutti_status hand_tile(scattering *run, int to, int64_t first, uint64_t tile) {
    tu_fused *state = run->state;
    tu_hand_over(state->group, tu_fused_slot(state, to, state->rank, tile), made_at(run, to, first),
                 tile_bytes(run->plan, first));
    return tutti_peers_signal(state->peers, to, TU_FUSED_CHANNEL, NULL);
}

/* Makes the chunks of one panel and hands the first tile of each to its owner. */
static tutti_status make_panel(scattering *run, int panel, uint64_t tile) {
    const tu_scatter *plan = run->plan;
    int64_t first = run->first_made;
    int begin = tu_panel_first(plan->panels, panel), end = tu_panel_first(plan->panels, panel + 1);
    tutti_status status =
        plan->produce(plan->context, begin, end - begin, first, run->in_made, made_at(run, begin, first));
    for (int to = begin; to < end && status == TUTTI_OK; to++)
        if (to != run->state->rank)
            status = hand_tile(run, to, first, tile);
    return status;
}

/* All chunks from row `first` on, the others' before this rank's own. */
static tutti_status make_chunks(scattering *run, int64_t first, uint64_t tile) {
    const tu_panels panels = run->plan->panels;
    int own = tu_panel_of(panels, run->state->rank);
    tutti_status status = TUTTI_OK;
    run->first_made = first;
    run->in_made = rows_from(run->plan, first, run->plan->chunk_rows);
    for (int step = 1; step <= panels.count && status == TUTTI_OK; step++)
        status = make_panel(run, (own + step) % panels.count, tile);
    return status;
}

/* The tiles at `first`: of a new chunk, or of the one that has been made. */
static tutti_status hand_tiles(scattering *run, int64_t first, uint64_t tile) {
    tu_fused *state = run->state;
    tutti_status status = TUTTI_OK;
    if (first >= run->first_made + run->in_made)
        return make_chunks(run, first, tile);
    for (int step = 1; step < state->size && status == TUTTI_OK; step++)
        status = hand_tile(run, (state->rank + step) % state->size, first, tile);
    return status;
}

/* Takes one signal of every other rank, those that are there first. */
static tutti_status take_all(tu_fused *state) {
    tutti_status status = TUTTI_OK;
    for (int step = 1; step < state->size && status == TUTTI_OK; step++)
        status = tutti_peers_wait_signal(state->peers, (state->rank + step) % state->size, TU_FUSED_CHANNEL, NULL);
    return status;
}

static tutti_status run_tile(scattering *run, int64_t first, uint64_t tile, bool sent) {
    const tu_fused *state = run->state;
    tutti_status status = sent ? TUTTI_OK : hand_tiles(run, first, tile);
    if (status == TUTTI_OK)
        status = take_all(run->state);
    if (status != TUTTI_OK)
        return status;
    for (int rank = 0; rank < state->size; rank++)
        run->from[rank] =
            rank == state->rank ? made_at(run, rank, first) : tu_fused_slot(state, state->rank, rank, tile);
    return run->plan->accept(run->plan->context, first, rows_from(run->plan, first, run->plan->tile_rows), run->from);
}

/* The first tiles have been sent already where `sent` says so. */
static tutti_status run_tiles(scattering *run, bool sent) {
    tu_fused *state = run->state;
    tutti_status status = TUTTI_OK;
    for (int64_t first = 0; first < run->plan->rows && status == TUTTI_OK; first += run->plan->tile_rows)
        status = run_tile(run, first, state->tiles++, sent && first == 0);
    return status;
}

/* ---- the call ---- */

static tutti_status run_real(scattering *run) {
    const tu_scatter *plan = run->plan;
    tu_fused *state = run->state;
    size_t bytes = tile_bytes(plan, 0);
    state->own.slot_bytes = bytes;
    state->own.fits = bytes == 0 || (state->memory != NULL && bytes <= state->slot_bytes);
    bool sent = bytes > 0 && state->own.fits;
    state->own.sent = sent;
    tutti_status status = tu_fused_publish(state, plan->signature, TUTTI_OK);
    if (status != TUTTI_OK)
        return status;
    if (sent)
        status = make_chunks(run, 0, state->tiles);
    if (status != TUTTI_OK)
        return tu_fused_give_up(state, plan->who);
    status = tu_fused_agree(state, plan->who);
    if (status == TUTTI_OK && !state->own.fits) /* on all ranks: their blocks have one size */
        status = tu_fused_grow(state, 0, bytes);
    if (status != TUTTI_OK)
        return status;
    if (bytes > 0)
        status = run_tiles(run, sent);
    return status == TUTTI_OK ? TUTTI_OK : tu_fused_give_up(state, plan->who);
}

/* A group of one rank, or one whose other ranks are made up and make what this one makes. */
static tutti_status run_alone(scattering *run) {
    const tu_scatter *plan = run->plan;
    int size = tutti_group_size(plan->group), rank = tutti_group_rank(plan->group);
    tutti_status status = tutti_group_check(plan->group);
    for (int64_t first = 0; first < plan->rows && status == TUTTI_OK; first += plan->chunk_rows) {
        int64_t count = rows_from(plan, first, plan->chunk_rows);
        char *own = plan->direct != NULL ? plan->direct + (size_t)first * plan->row_bytes : run->made;
        for (int i = 0; i < size; i++)
            run->from[i] = own;
        status = plan->produce(plan->context, rank, 1, first, count, own);
        if (status == TUTTI_OK)
            status = plan->accept(plan->context, first, count, run->from);
    }
    return status;
}

/* In test mode: everything is made, then exchanged by the plain collective. */
static tutti_status run_reference(scattering *run) {
    const tu_scatter *plan = run->plan;
    int size = tutti_group_size(plan->group);
    size_t block = (size_t)plan->rows * plan->row_bytes, bytes = 2 * (size_t)size * block;
    if (block == 0)
        return tutti_barrier(plan->group, NULL);
    char *made = tu_block_alloc(tu_self(), bytes);
    if (made == NULL)
        return tu_error_memory("all blocks", bytes);
    char *received = made + (size_t)size * block;
    tutti_status status = TUTTI_OK;
    for (int rank = 0; rank < size && status == TUTTI_OK; rank++) {
        run->from[rank] = received + (size_t)rank * block;
        status = plan->produce(plan->context, rank, 1, 0, plan->rows, made + (size_t)rank * block);
    }
    if (status == TUTTI_OK)
        status = tutti_all_to_all(plan->group, made, received, block, TUTTI_U8, NULL);
    if (status == TUTTI_OK)
        status = plan->accept(plan->context, 0, plan->rows, run->from);
    tu_block_free(tu_self(), made, bytes);
    return status;
}

static tutti_status run_any(scattering *run) {
    tutti_group *group = run->plan->group;
    if (tutti_group_size(group) == 1 || tu_fused_is_fake(group))
        return run_alone(run);
    if (tu_symm_test_mode())
        return run_reference(run);
    tutti_status status = tu_fused_enter(group, &run->state);
    if (status != TUTTI_OK)
        return tu_fused_refuse(group, run->plan->who, status);
    status = run_real(run);
    tu_fused_leave(run->state);
    return status;
}

tutti_status tu_produce_and_scatter(const tu_scatter *scatter) {
    scattering run = { .plan = scatter };
    size_t ranks = (size_t)tutti_group_size(scatter->group), list = ranks * sizeof *run.from,
           chunks = ranks * chunk_bytes(scatter);
    run.from = tu_block_alloc(tu_self(), list);
    run.made = chunks > 0 ? tu_block_alloc(tu_self(), chunks) : NULL;
    tutti_status status = run.from == NULL || (chunks > 0 && run.made == NULL)
                              ? tu_fused_refuse(scatter->group, scatter->who,
                                                tu_error_memory("the tiles of a fused operation", list + chunks))
                              : run_any(&run);
    tu_block_free(tu_self(), run.made, chunks);
    tu_block_free(tu_self(), run.from, list);
    return status;
}
