/* SPDX-License-Identifier: Apache-2.0
 *
 * Produce and scatter. A rank computes a chunk of rows for each of the others, hands it to its owner tile by tile, and
 * announces each tile by a signal; then its own, and accepts what has come meanwhile. What has not come is left for the
 * next chunk where that may be: all ranks go through the tiles in the same order, so that a rank waits only for one
 * that is a chunk behind, or else a tile; the first tile is made while the ranks agree.
 *
 * Chunks are computed in memory of this rank's own and copied to their owner: a product is written many times, and the
 * first of them to a line that its owner has read costs a round trip between the processors. Tiles are small, so that
 * they are in a cache when they are added; chunks have as many rows as a product needs, and how many is each rank's own
 * business. Between cores that share a cache the next tile is handed over beside the sum of one: loads of the one and
 * stores of the other are under way at the same time.
 */
#include "collective/arrival.h"
#include "functional/symmetric.h"
#include "fused/driver.h"
#include "tensor/process.h"

/* The same rows of the blocks for all ranks. */
typedef struct chunk {
    int64_t first, rows;
    char *made; /* one rank's behind the other's */
    int handed; /* panels whose first tiles have been handed to their owners */
} chunk;

typedef struct scattering {
    const tu_scatter *plan;
    tu_fused *state;
    const void **from;      /* one per rank */
    tu_aside *asides;       /* one per other rank */
    char *made[2];          /* room for a chunk; the second where one is made while the other is handed over */
    tu_team team;           /* open where several threads work */
    chunk now, before;      /* the one that is made, and the one whose tiles are exchanged meanwhile */
    int64_t tiles;          /* of a block */
    int64_t sent, accepted; /* of them, so far; a tile counts as sent when all others have it */
    int taken;              /* ranks whose signal of the next tile that is accepted has been taken */
    int channels;           /* that their signals use in turn */
    int64_t ahead;          /* tiles that are sent before the first of them is accepted */
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

/* Where row `first` of the block for `rank` is computed. */
static char *made_at(const scattering *run, const chunk *of, int rank, int64_t first) {
    int64_t row = rank * of->rows + first - of->first;
    if (rank == run->state->rank && is_direct(run))
        return run->plan->direct + (size_t)first * run->plan->row_bytes;
    return of->made + (size_t)row * run->plan->row_bytes;
}

/* Where the tile at `first` lies in rings. */
static size_t place_of(const scattering *run, int64_t first) {
    return tu_fused_tile_place(run->state, tile_bytes(run->plan, 0), (uint64_t)(first / run->plan->tile_rows));
}

static void copy_tile(scattering *run, const chunk *of, int to, int64_t first) {
    tu_fused *state = run->state;
    tu_hand_through_ring(state->group, &state->watch, tu_fused_ring(state, to, state->rank, place_of(run, first)),
                         made_at(run, of, to, first), tile_bytes(run->plan, first));
}

/* The last tile goes by the channel of the one before it: when it has been announced that one was taken, and the next
 * call finds no more than two tiles that were not read (fused/workspace.h). */
static int channel_of(const scattering *run, int64_t tile) {
    return (int)((tile > 0 && tile == run->tiles - 1 ? tile - 1 : tile) % run->channels);
}

static tutti_status announce(const scattering *run, int to, int64_t tile) {
    return tutti_peers_signal(run->state->peers, to, channel_of(run, tile), NULL);
}

static tutti_status announce_all(const scattering *run, int64_t tile) {
    const tu_fused *state = run->state;
    tutti_status status = TUTTI_OK;
    for (int step = 1; step < state->size && status == TUTTI_OK; step++)
        status = announce(run, (state->rank + step) % state->size, tile);
    return status;
}

/* Takes the signals of the next tile that is accepted, those that have not been taken, from all other ranks. */
static tutti_status take_all(scattering *run) {
    const tu_fused *state = run->state;
    int channel = channel_of(run, run->accepted);
    for (; run->taken < state->size - 1; run->taken++) {
        int from = (state->rank + 1 + run->taken) % state->size;
        tutti_status status = tutti_peers_wait_signal(state->peers, from, channel, NULL);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

/* Takes those of them that have come, and says whether that was the last. */
static tutti_status try_take(scattering *run, bool *came) {
    const tu_fused *state = run->state;
    int channel = channel_of(run, run->accepted);
    for (*came = true; run->taken < state->size - 1; run->taken++) {
        int from = (state->rank + 1 + run->taken) % state->size;
        tutti_status status = tutti_peers_test_signal(state->peers, from, channel, came);
        if (status != TUTTI_OK || !*came)
            return status;
    }
    return TUTTI_OK;
}

/* The copies of the tiles at `first` to their owners; returns how many. */
static int note_copies(scattering *run, const chunk *of, int64_t first) {
    const tu_fused *state = run->state;
    for (int step = 1; step < state->size; step++) {
        int to = (state->rank + step) % state->size;
        run->asides[step - 1] = (tu_aside){ tu_fused_ring(state, to, state->rank, place_of(run, first)),
                                            made_at(run, of, to, first), tile_bytes(run->plan, first) };
    }
    return state->size - 1;
}

/* The tiles at `first`, with copies beside the sum. */
static tutti_status accept_tile(scattering *run, const chunk *of, int64_t first, int copies) {
    const tu_fused *state = run->state;
    for (int rank = 0; rank < state->size; rank++)
        run->from[rank] = rank == state->rank ? made_at(run, of, rank, first)
                                              : tu_fused_ring(state, state->rank, rank, place_of(run, first));
    return run->plan->accept(run->plan->context, first, rows_from(run->plan, first, run->plan->tile_rows), run->from,
                             run->asides, copies);
}

/* The copies of the tiles at `next` are made now, or, between cores that share a cache, beside the sum; returns how
 * many are left for that. */
static int copy_ahead(scattering *run, const chunk *of, int64_t next) {
    tu_fused *state = run->state;
    if (run->plan->takes_copies && tu_ring_is_near(state->group, &state->watch, tile_bytes(run->plan, next)))
        return note_copies(run, of, next);
    for (int step = 1; step < state->size; step++)
        copy_tile(run, of, (state->rank + step) % state->size, next);
    return 0;
}

/* Accepts the next tiles of all ranks, and with `more` hands over the next ones of the chunk meanwhile. They are
 * announced only when these have been taken: an announcement may wait until an earlier one was, and ranks that wait for
 * each other so would do it for ever. */
static tutti_status run_tile(scattering *run, const chunk *of, bool more) {
    int64_t rows = run->plan->tile_rows, next = run->sent;
    int beside = more ? copy_ahead(run, of, next * rows) : 0;
    run->sent += more;
    tutti_status status = take_all(run);
    int64_t tile = run->accepted++;
    run->taken = 0;
    if (status == TUTTI_OK && more && beside == 0)
        status = announce_all(run, next);
    if (status == TUTTI_OK)
        status = accept_tile(run, of, tile * rows, beside);
    if (status == TUTTI_OK && beside > 0)
        status = announce_all(run, next);
    return status;
}

/* Hands over the next tiles, and accepts none. */
static tutti_status send_tile(scattering *run, const chunk *of) {
    const tu_fused *state = run->state;
    int64_t tile = run->sent++;
    for (int step = 1; step < state->size; step++)
        copy_tile(run, of, (state->rank + step) % state->size, tile * run->plan->tile_rows);
    return announce_all(run, tile);
}

/* Whether a tile must be accepted before, or while, the next one is sent. */
static bool is_due(const scattering *run) {
    return run->sent - run->accepted >= (run->sent == run->tiles - 1 ? 1 : run->ahead);
}

/* Whether the next tile is accepted now: it has come, so that nobody waits, or there is no other choice. */
static tutti_status is_time(scattering *run, bool due, bool *now) {
    *now = due;
    return due || run->accepted == run->sent ? TUTTI_OK : try_take(run, now);
}

/* Hands over the rest of a chunk, whose first tiles have been, and accepts what has come; and more, so that no more
 * than `left` are not accepted. */
static tutti_status run_tiles(scattering *run, const chunk *of, int64_t left) {
    int64_t end = (of->first + of->rows + run->plan->tile_rows - 1) / run->plan->tile_rows;
    tutti_status status = TUTTI_OK;
    bool now = true;
    while (status == TUTTI_OK && run->sent < end) {
        status = is_time(run, is_due(run), &now);
        if (status == TUTTI_OK && now)
            status = run_tile(run, of, run->sent < run->tiles - 1 || run->sent - run->accepted == 1);
        else if (status == TUTTI_OK)
            status = send_tile(run, of);
    }
    for (now = true; status == TUTTI_OK && now && run->accepted < end;) {
        status = is_time(run, end - run->accepted > left, &now);
        if (status == TUTTI_OK && now)
            status = run_tile(run, of, false);
    }
    return status;
}

/* ---- chunks ---- */

static void begin_chunk(scattering *run, int64_t first) {
    const tu_scatter *plan = run->plan;
    run->before = run->now;
    run->now = (chunk){ .first = first,
                        .rows = rows_from(plan, first, plan->chunk_rows),
                        .made = run->made[tu_team_is_open(&run->team) ? first / plan->chunk_rows % 2 : 0] };
}

/* The step-th panel of a chunk: the others' come before this rank's own. */
static int panel_at(const scattering *run, int step) {
    const tu_panels panels = run->plan->panels;
    return (tu_panel_of(panels, run->state->rank) + 1 + step) % panels.count;
}

/* Hands the first tiles of the next panel to their owners. */
static tutti_status hand_panel(scattering *run) {
    const tu_panels panels = run->plan->panels;
    int panel = panel_at(run, run->now.handed++);
    tutti_status status = TUTTI_OK;
    for (int to = tu_panel_first(panels, panel); to < tu_panel_first(panels, panel + 1) && status == TUTTI_OK; to++)
        if (to != run->state->rank) {
            copy_tile(run, &run->now, to, run->now.first);
            status = announce(run, to, run->now.first / run->plan->tile_rows);
        }
    run->sent += run->now.handed == panels.count;
    return status;
}

/* One after the other: made, and handed over. */
static tutti_status make_chunk_alone(scattering *run) {
    const tu_scatter *plan = run->plan;
    tutti_status status = TUTTI_OK;
    for (int step = 0; step < plan->panels.count && status == TUTTI_OK; step++) {
        int panel = panel_at(run, step), begin = tu_panel_first(plan->panels, panel),
            ranks = tu_panel_first(plan->panels, panel + 1) - begin;
        status = plan->produce(plan->context, begin, ranks, run->now.first, run->now.rows,
                               made_at(run, &run->now, begin, run->now.first));
        if (status == TUTTI_OK)
            status = hand_panel(run);
    }
    return status;
}

static tutti_status produce(void *context, const tu_team_job *job) {
    const tu_scatter *plan = context;
    return plan->produce(plan->context, job->first, job->ranks, job->row, job->rows, job->to);
}

/* The rows of one panel: blocks of each rank's, or all at once by a library. */
static void add_panel(scattering *run, int panel) {
    const tu_scatter *plan = run->plan;
    int begin = tu_panel_first(plan->panels, panel), end = tu_panel_first(plan->panels, panel + 1);
    int64_t first = run->now.first, last = first + run->now.rows;
    tu_team_job job = { .group = panel, .after = -1 };
    if (plan->by_library) {
        job.first = begin;
        job.ranks = end - begin;
        job.row = first;
        job.rows = run->now.rows;
        job.to = made_at(run, &run->now, begin, first);
        tu_team_add(&run->team, &job);
        return;
    }
    for (job.first = begin, job.ranks = 1; job.first < end; job.first++)
        for (job.row = first; job.row < last; job.row += plan->block_rows) {
            job.rows = last - job.row < plan->block_rows ? last - job.row : plan->block_rows;
            job.to = made_at(run, &run->now, job.first, job.row);
            tu_team_add(&run->team, &job);
        }
}

/* Exchanges the tiles of the chunk before, then hands over what has been made of this one. */
static tutti_status communicate(void *context) {
    scattering *run = context;
    tutti_status status = run->before.rows > 0 ? run_tiles(run, &run->before, 0) : TUTTI_OK;
    while (status == TUTTI_OK && run->now.handed < run->plan->panels.count)
        if (tu_team_is_done(&run->team, panel_at(run, run->now.handed)))
            status = hand_panel(run);
        else if (!tu_team_help(&run->team))
            break; /* others are at the last jobs */
    return status;
}

/* One thread exchanges the tiles of the chunk before while the others make this one. */
static tutti_status make_chunk_together(scattering *run) {
    tu_team_reset(&run->team);
    for (int step = 0; step < run->plan->panels.count; step++)
        add_panel(run, panel_at(run, step));
    tutti_status status = tu_team_run(&run->team, communicate, run);
    while (status == TUTTI_OK && run->now.handed < run->plan->panels.count)
        status = hand_panel(run);
    return status;
}

static tutti_status make_chunk(scattering *run, int64_t first) {
    begin_chunk(run, first);
    if (tu_team_is_open(&run->team))
        return make_chunk_together(run);
    bool is_last_tile = first + run->plan->tile_rows >= run->plan->rows;
    tutti_status status =
        run->before.rows > 0 ? run_tiles(run, &run->before, is_last_tile ? 0 : run->ahead - 1) : TUTTI_OK;
    return status == TUTTI_OK ? make_chunk_alone(run) : status;
}

/* All chunks from row `first` on, and the tiles of all. */
static tutti_status run_chunks(scattering *run, int64_t first) {
    tutti_status status = TUTTI_OK;
    for (; first < run->plan->rows && status == TUTTI_OK; first += run->plan->chunk_rows)
        status = make_chunk(run, first);
    if (status == TUTTI_OK)
        status = run_tiles(run, &run->now, 0);
    run->state->ring_at = place_of(run, run->plan->rows + run->plan->tile_rows - 1);
    return status;
}

/* ---- the call ---- */

/* How far ranks may run ahead of each other, in the rings that there are: with the signals of so many tiles on their
 * way a tile is written when all but so many and one more before it have been read, and two tiles lie on the same place
 * of a ring only if at least one less than a ring has room for lie between them. A rank that has sent `ahead` tiles
 * more than it has accepted waits for nobody who has accepted as many as it: two signals more are enough for that. */
static void plan_tiles(scattering *run) {
    const tu_scatter *plan = run->plan;
    size_t bytes = tile_bytes(plan, 0);
    run->channels = 1;
    run->ahead = 1;
    run->tiles = bytes > 0 ? (plan->rows + plan->tile_rows - 1) / plan->tile_rows : 0;
    if (bytes == 0 || !run->state->own.fits)
        return;
    run->channels = tu_fused_channels(run->state, bytes);
    int64_t most = run->channels - 2, wanted = plan->chunk_rows / plan->tile_rows + 1;
    if (most > 1 && is_direct(run) && !tu_team_is_open(&run->team))
        run->ahead = wanted < most ? wanted : most;
}

static tutti_status run_real(scattering *run) {
    const tu_scatter *plan = run->plan;
    tu_fused *state = run->state;
    size_t bytes = tile_bytes(plan, 0), ring = tu_fused_ring_for(state, (size_t)plan->rows * plan->row_bytes, bytes);
    state->own.fits = bytes == 0 || (state->memory != NULL && ring <= state->ring_bytes);
    bool sent = bytes > 0 && state->own.fits;
    state->own.sent = sent;
    plan_tiles(run);
    tutti_status status = tu_fused_publish(state, plan->signature, TUTTI_OK);
    if (status != TUTTI_OK)
        return status;
    if (plan->prepare != NULL)
        plan->prepare(plan->context);
    if (sent)
        status = make_chunk(run, 0);
    if (status != TUTTI_OK)
        return tu_fused_give_up(state, plan->who);
    status = tu_fused_agree(state, plan->who);
    if (status == TUTTI_OK && !state->own.fits) /* on all ranks: their blocks have one size */
        status = tu_fused_grow(state, 0, ring);
    if (status != TUTTI_OK)
        return status;
    if (!sent) {
        state->own.fits = true;
        plan_tiles(run);
    }
    if (bytes > 0)
        status = run_chunks(run, sent ? plan->chunk_rows : 0);
    return status == TUTTI_OK ? TUTTI_OK : tu_fused_give_up(state, plan->who);
}

/* A group of one rank, or one whose other ranks are made up and make what this one makes. */
static tutti_status run_alone(scattering *run) {
    const tu_scatter *plan = run->plan;
    int size = tutti_group_size(plan->group), rank = tutti_group_rank(plan->group);
    tutti_status status = tutti_group_check(plan->group);
    if (plan->prepare != NULL)
        plan->prepare(plan->context);
    for (int64_t first = 0; first < plan->rows && status == TUTTI_OK; first += plan->chunk_rows) {
        int64_t count = rows_from(plan, first, plan->chunk_rows);
        char *own = plan->direct != NULL ? plan->direct + (size_t)first * plan->row_bytes : run->made[0];
        for (int i = 0; i < size; i++)
            run->from[i] = own;
        status = plan->produce(plan->context, rank, 1, first, count, own);
        if (status == TUTTI_OK)
            status = plan->accept(plan->context, first, count, run->from, NULL, 0);
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
    if (plan->prepare != NULL)
        plan->prepare(plan->context);
    for (int rank = 0; rank < size && status == TUTTI_OK; rank++) {
        run->from[rank] = received + (size_t)rank * block;
        status = plan->produce(plan->context, rank, 1, 0, plan->rows, made + (size_t)rank * block);
    }
    if (status == TUTTI_OK)
        status = tutti_all_to_all(plan->group, made, received, block, TUTTI_U8, NULL);
    if (status == TUTTI_OK)
        status = plan->accept(plan->context, 0, plan->rows, run->from, NULL, 0);
    tu_block_free(tu_self(), made, bytes);
    return status;
}

/* Where work is worth several threads and there are such. A group that is made up has no peers to wait for. */
static tutti_status open_team(scattering *run) {
    const tu_scatter *plan = run->plan;
    int threads = plan->block_rows > 0 ? tu_process_compute_threads() : 1;
    if (threads == 1 || plan->rows == 0)
        return TUTTI_OK;
    run->team = (tu_team){ .group = plan->group,
                           .threads = threads,
                           .work = produce,
                           .context = (void *)plan,
                           .by_library = plan->by_library,
                           .apart = &run->state->overlaps };
    int64_t blocks = (rows_from(plan, 0, plan->chunk_rows) + plan->block_rows - 1) / plan->block_rows;
    tutti_status status = tu_team_open(&run->team, (int)(blocks * run->state->size));
    if (status == TUTTI_OK && plan->chunk_rows < plan->rows) {
        size_t bytes = (size_t)run->state->size * chunk_bytes(plan);
        run->made[1] = tu_block_alloc(tu_self(), bytes);
        if (run->made[1] == NULL)
            status = tu_error_memory("the tiles of a fused operation", bytes);
    }
    return status;
}

static void close_team(scattering *run) {
    tu_team_close(&run->team);
    tu_block_free(tu_self(), run->made[1], (size_t)run->state->size * chunk_bytes(run->plan));
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
    status = open_team(run);
    status = status == TUTTI_OK ? run_real(run) : tu_fused_refuse_inside(run->state, run->plan->who, status);
    close_team(run);
    tu_fused_leave(run->state);
    return status;
}

tutti_status tu_produce_and_scatter(const tu_scatter *scatter) {
    scattering run = { .plan = scatter };
    size_t ranks = (size_t)tutti_group_size(scatter->group), list = ranks * (sizeof *run.from + sizeof *run.asides),
           chunks = ranks * chunk_bytes(scatter);
    run.from = tu_block_alloc(tu_self(), list);
    run.asides = run.from != NULL ? (tu_aside *)(void *)(run.from + ranks) : NULL;
    run.made[0] = chunks > 0 ? tu_block_alloc(tu_self(), chunks) : NULL;
    tutti_status status = run.from == NULL || (chunks > 0 && run.made[0] == NULL)
                              ? tu_fused_refuse(scatter->group, scatter->who,
                                                tu_error_memory("the tiles of a fused operation", list + chunks))
                              : run_any(&run);
    tu_block_free(tu_self(), run.made[0], chunks);
    tu_block_free(tu_self(), run.from, list);
    return status;
}
