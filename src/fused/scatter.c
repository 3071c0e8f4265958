/* SPDX-License-Identifier: Apache-2.0
 *
 * Produce and scatter. A rank computes tiles for the others straight into their memory and announces each by a signal;
 * then its own, and accepts what has come meanwhile. All ranks go through the tiles in the same order, so that a rank
 * waits only for one that is a tile behind; the first tile is made while the ranks agree.
 */
#include "functional/symmetric.h"
#include "fused/driver.h"

typedef struct scattering {
    const tu_scatter *plan;
    tu_fused *state;
    const void **from; /* one per rank */
} scattering;

static int64_t rows_at(const tu_scatter *plan, int64_t first) {
    int64_t rest = plan->rows - first;
    return rest < plan->tile_rows ? rest : plan->tile_rows;
}

/* ---- tiles ---- */

static tutti_status send_tiles(scattering *run, int64_t first, uint64_t tile) {
    tu_fused *state = run->state;
    tutti_status status = TUTTI_OK;
    for (int step = 1; step < state->size && status == TUTTI_OK; step++) {
        int to = (state->rank + step) % state->size;
        status = run->plan->produce(run->plan->context, to, first, rows_at(run->plan, first),
                                    tu_fused_slot(state, to, state->rank, tile));
        if (status == TUTTI_OK)
            status = tutti_peers_signal(state->peers, to, TU_FUSED_CHANNEL, NULL);
    }
    return status;
}

/* Takes one signal of every other rank, those that are there first. */
static tutti_status take_all(tu_fused *state) {
    tutti_status status = TUTTI_OK;
    for (int step = 1; step < state->size && status == TUTTI_OK; step++)
        status = tutti_peers_wait_signal(state->peers, (state->rank + step) % state->size, TU_FUSED_CHANNEL, NULL);
    return status;
}

static tutti_status make_own(scattering *run, int64_t first, uint64_t tile) {
    const tu_scatter *plan = run->plan;
    int rank = run->state->rank;
    void *own = plan->direct != NULL ? plan->direct + (size_t)first * plan->row_bytes
                                     : tu_fused_slot(run->state, rank, rank, tile);
    for (int i = 0; i < run->state->size; i++)
        run->from[i] = i == rank ? own : tu_fused_slot(run->state, rank, i, tile);
    return plan->produce(plan->context, rank, first, rows_at(plan, first), own);
}

static tutti_status run_tile(scattering *run, int64_t first, uint64_t tile, bool sent) {
    tutti_status status = sent ? TUTTI_OK : send_tiles(run, first, tile);
    if (status == TUTTI_OK)
        status = make_own(run, first, tile);
    if (status == TUTTI_OK)
        status = take_all(run->state);
    if (status == TUTTI_OK)
        status = run->plan->accept(run->plan->context, first, rows_at(run->plan, first), run->from);
    return status;
}

static tutti_status run_tiles(scattering *run, bool sent) {
    tutti_status status = TUTTI_OK;
    for (int64_t first = 0; first < run->plan->rows && status == TUTTI_OK; first += run->plan->tile_rows)
        status = run_tile(run, first, run->state->tiles++, sent && first == 0);
    return status;
}

/* ---- the call ---- */

static tutti_status run_real(scattering *run) {
    const tu_scatter *plan = run->plan;
    tu_fused *state = run->state;
    size_t bytes = (size_t)rows_at(plan, 0) * plan->row_bytes;
    state->own.slot_bytes = bytes;
    state->own.fits = bytes == 0 || (state->memory != NULL && bytes <= state->slot_bytes);
    bool sent = bytes > 0 && state->own.fits;
    state->own.sent = sent;
    tutti_status status = tu_fused_publish(state, plan->signature, TUTTI_OK);
    if (status != TUTTI_OK)
        return status;
    if (sent)
        status = send_tiles(run, 0, state->tiles);
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
    size_t bytes = plan->direct == NULL ? (size_t)rows_at(plan, 0) * plan->row_bytes : 0;
    void *tile = bytes > 0 ? tu_block_alloc(tu_self(), bytes) : NULL;
    tutti_status status = tutti_group_check(plan->group);
    if (bytes > 0 && tile == NULL)
        return tu_error_memory("a tile", bytes);
    for (int64_t first = 0; first < plan->rows && status == TUTTI_OK; first += plan->tile_rows) {
        void *own = plan->direct != NULL ? plan->direct + (size_t)first * plan->row_bytes : tile;
        for (int i = 0; i < size; i++)
            run->from[i] = own;
        status = plan->produce(plan->context, rank, first, rows_at(plan, first), own);
        if (status == TUTTI_OK)
            status = plan->accept(plan->context, first, rows_at(plan, first), run->from);
    }
    tu_block_free(tu_self(), tile, bytes);
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
        status = plan->produce(plan->context, rank, 0, plan->rows, made + (size_t)rank * block);
    }
    if (status == TUTTI_OK)
        status = tutti_all_to_all(plan->group, made, received, block, TUTTI_U8, NULL);
    if (status == TUTTI_OK)
        status = plan->accept(plan->context, 0, plan->rows, run->from);
    tu_block_free(tu_self(), made, bytes);
    return status;
}

tutti_status tu_produce_and_scatter(const tu_scatter *scatter) {
    scattering run = { .plan = scatter };
    size_t bytes = (size_t)tutti_group_size(scatter->group) * sizeof *run.from;
    tutti_status status;
    if ((run.from = tu_block_alloc(tu_self(), bytes)) == NULL)
        return tu_fused_refuse(scatter->group, scatter->who, tu_error_memory("the tiles of a fused operation", bytes));
    if (tutti_group_size(scatter->group) == 1 || tu_fused_is_fake(scatter->group)) {
        status = run_alone(&run);
    } else if (tu_symm_test_mode()) {
        status = run_reference(&run);
    } else {
        status = tu_fused_enter(scatter->group, &run.state);
        if (status == TUTTI_OK) {
            status = run_real(&run);
            tu_fused_leave(run.state);
        } else {
            status = tu_fused_refuse(scatter->group, scatter->who, status);
        }
    }
    tu_block_free(tu_self(), run.from, bytes);
    return status;
}
