/* SPDX-License-Identifier: Apache-2.0
 *
 * Gather and consume. A rank tells where its shards lie, works on its own while the others' records come in, then on
 * theirs where they lie, each as soon as its record is there. Where it has several threads, it works while it stages,
 * and looks who has come while it works. The usual call has one agreement, which is over when the
 * last record has come, and a barrier at its end where inputs were read in place.
 *
 * WHY SHARDS MAY BE READ BEFORE ALL RANKS HAVE COME. A record says where its rank's shards lie, and they lie there
 * until that rank has ended the call, for which it needs this one: after the agreement a rank waits for all once more
 * where it stages again or where inputs were read in place, and writes a half again only after the next agreement. A
 * call that fails ends without that; but then it fails here, too, and what was read counts for nothing.
 */
#include <string.h>

#include "collective/arrival.h"
#include "functional/symmetric.h"
#include "fused/driver.h"
#include "memory/memory.h"
#include "tensor/convert.h"
#include "tensor/process.h"

typedef struct gathering {
    const tu_gather *plan;
    tu_fused *state;
    tu_shard own[TU_FUSED_PARTS];
    size_t bytes[TU_FUSED_PARTS];
    void *copies[TU_FUSED_PARTS]; /* dense ones of what is not, where there was no workspace to copy to */
    tu_team team;                 /* open where several threads work */
    bool told;                    /* this rank's shards are staged and published */
    tutti_status local;           /* of this rank's own work: the others are served first */
    tutti_error_copy error;       /* its words */
} gathering;

static size_t aligned(size_t bytes) {
    return (bytes + TU_FUSED_ALIGN - 1) / TU_FUSED_ALIGN * TU_FUSED_ALIGN;
}

/* ---- this rank's shards ---- */

/* A matrix whose columns lie one after the other. */
static bool is_turned(const tt_tensor *x) {
    return x->ndim == 2 && x->strides[0] == 1 && x->strides[1] == x->sizes[0] && !(x->flags & TU_CONTIGUOUS);
}

static bool is_dense(const tt_tensor *x) {
    return x->flags & TU_CONTIGUOUS || is_turned(x);
}

static void find_place(gathering *run, int part) {
    const tt_tensor *x = run->plan->tensors[part];
    tu_fused_place *place = &run->state->own.places[part];
    tu_symmetric found;
    run->own[part] = (tu_shard){ tu_pointer(x), is_turned(x), false };
    place->turned = is_turned(x);
    if (!is_dense(x) || run->bytes[part] == 0 ||
        !tu_symmetric_find(run->state->places, tu_pointer(x), run->bytes[part], &found))
        return;
    place->block_bytes = tutti_memory_bytes(found.memory);
    if (found.index != 0) {
        place->index = found.index;
        place->offset = found.offset;
    }
}

/* Copies one part to `to`, dense. */
static tutti_status copy_part(const gathering *run, int part, void *to) {
    const tt_tensor *x = run->plan->tensors[part];
    if (run->bytes[part] == 0)
        return TUTTI_OK;
    if (!is_dense(x))
        return tu_copy_out(x, to, x->dtype);
    tu_hand_over(run->plan->group, to, tu_pointer(x), run->bytes[part]);
    return TUTTI_OK;
}

/* Copies what cannot be read in place to this rank's half. Without room there, what is not dense is made so. */
static tutti_status stage(gathering *run) {
    tu_fused *state = run->state;
    size_t used = 0;
    for (int i = 0; i < run->plan->count; i++) {
        if (state->own.places[i].index != 0)
            continue;
        state->own.places[i].offset = used;
        used += aligned(run->bytes[i]);
    }
    state->own.fits = used == 0 || (state->memory != NULL && used <= state->half_bytes);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < run->plan->count && status == TUTTI_OK; i++) {
        if (state->own.places[i].index != 0)
            continue;
        void *to = run->bytes[i] > 0 && state->own.fits
                       ? tu_fused_half(state, state->rank) + state->own.places[i].offset
                       : NULL;
        if (to == NULL && is_dense(run->plan->tensors[i]))
            continue;
        if (to == NULL && (to = run->copies[i] = tu_block_alloc(tu_self(), run->bytes[i])) == NULL)
            return tu_error_memory("a shard", run->bytes[i]);
        status = copy_part(run, i, to);
        if (!is_dense(run->plan->tensors[i]))
            run->own[i].data = to;
    }
    return status;
}

/* ---- consuming ---- */

static bool is_complete(const gathering *run, int first, int end) {
    bool complete = true;
    for (int rank = first; rank < end; rank++)
        complete = complete && run->state->done[rank];
    return complete;
}

static bool is_one_by_one(const tu_gather *plan) {
    return plan->panels.count == plan->panels.ranks;
}

static int64_t rows_of(const tu_gather *plan, int ranks) {
    return plan->same_rows ? plan->rows : ranks * plan->rows;
}

/* A failure is kept until everybody has been served. */
static void keep(gathering *run, tutti_status status) {
    if (status == TUTTI_OK || run->local != TUTTI_OK)
        return;
    run->local = status;
    tu_error_save(&run->error);
}

/* The work on the rows of these ranks: done at once, or left to the team in blocks. Those of the next rank are added to
 * the same results where ranks go in order, and come behind. */
static void work_on(gathering *run, int first, int ranks, const tu_shard *shards) {
    const tu_gather *plan = run->plan;
    int64_t rows = rows_of(plan, ranks);
    tu_team_job job = { .first = first, .ranks = ranks, .rows = rows, .after = -1 };
    if (shards != NULL)
        memcpy(job.shards, shards, sizeof job.shards);
    if (!tu_team_is_open(&run->team)) {
        keep(run, plan->work(plan->context, &job));
        return;
    }
    int64_t each = plan->by_library ? rows : plan->block_rows;
    int blocks = (int)((rows + each - 1) / each), number = run->team.count;
    for (int64_t row = 0; row < rows; row += each, number++) {
        job.row = row;
        job.rows = rows - row < each ? rows - row : each;
        job.after = plan->in_order && first > 0 ? number - blocks : -1;
        tu_team_add(&run->team, &job);
    }
}

/* One rank's shards, and the panel that they complete. */
static void consume(gathering *run, int rank, const tu_shard *shards) {
    const tu_gather *plan = run->plan;
    run->state->done[rank] = true;
    if (run->local != TUTTI_OK)
        return;
    if (plan->consume != NULL)
        keep(run, plan->consume(plan->context, rank, shards));
    if (run->local != TUTTI_OK || plan->work == NULL)
        return;
    if (is_one_by_one(plan)) {
        work_on(run, rank, 1, shards);
        return;
    }
    int panel = tu_panel_of(plan->panels, rank), first = tu_panel_first(plan->panels, panel),
        end = tu_panel_first(plan->panels, panel + 1);
    if (is_complete(run, first, end))
        work_on(run, first, end - first, NULL);
}

/* Shards that lie where the record says. */
static void consume_at(gathering *run, int rank, const tu_fused_record *record) {
    const tu_fused *state = run->state;
    tu_shard shards[TU_FUSED_PARTS];
    if (rank == state->rank) {
        consume(run, rank, run->own);
        return;
    }
    for (int i = 0; i < run->plan->count; i++) {
        const tu_fused_place *place = &record->places[i];
        const char *base = run->bytes[i] == 0 ? NULL
                           : place->index != 0
                               ? tutti_peers_buffer(tu_symmetric_peers(state->places, place->index), rank)
                               : tu_fused_half(state, rank);
        shards[i] = (tu_shard){ base != NULL ? base + place->offset : NULL, place->turned, place->index == 0 };
    }
    consume(run, rank, shards);
}

/* ---- before the agreement: each rank's shards as its record comes ---- */

/* Whether the call of that rank is this one, and its shards lie as this rank's do: then they can be read, whatever
 * others have. */
static bool lies_alike(const gathering *run, const tu_fused_record *record) {
    const tu_fused_record *own = &run->state->own;
    bool alike = record->status == TUTTI_OK && record->signature == own->signature && record->fits && own->fits;
    for (int i = 0; i < run->plan->count; i++)
        alike = alike && record->places[i].index == own->places[i].index;
    return alike;
}

/* From rank 0 on, as far as those have come. Returns the next one, which has not; -1: no more can be read before the
 * agreement. */
static int consume_in_order(gathering *run) {
    tu_fused *state = run->state;
    tu_fused_record found;
    for (int rank = 0; rank < state->size; rank++) {
        if (state->done[rank])
            continue;
        if (rank != state->rank && !tu_work_peek(state->work, rank, &found))
            return rank;
        if (rank != state->rank && !lies_alike(run, &found))
            return -1;
        consume_at(run, rank, &found);
    }
    return -1;
}

/* Those whose records are there now, this rank's neighbour first. Returns how many are not. */
static int consume_any(gathering *run) {
    tu_fused *state = run->state;
    tu_fused_record found;
    int missing = 0;
    for (int step = 1; step < state->size; step++) {
        int rank = (state->rank + step) % state->size;
        if (state->came[rank])
            continue;
        state->came[rank] = tu_work_peek(state->work, rank, &found);
        missing += !state->came[rank];
        if (state->came[rank] && lies_alike(run, &found))
            consume_at(run, rank, &found);
    }
    return missing;
}

/* Whether others are still missing, who are marked as not seen. */
static bool consume_those_that_came(gathering *run) {
    tu_fused *state = run->state;
    if (!run->plan->in_order)
        return consume_any(run) > 0;
    int next = consume_in_order(run);
    for (int rank = 0; rank < state->size; rank++)
        state->came[rank] = rank != next;
    return next >= 0;
}

static void consume_own(gathering *run) {
    if (!run->plan->in_order && !run->state->done[run->state->rank])
        consume(run, run->state->rank, run->own);
}

/* Stages and tells where this rank's shards lie, once; then takes what comes, as long as there is work to do between.
 */
static tutti_status communicate(void *context) {
    gathering *run = context;
    tutti_status status = TUTTI_OK;
    if (!run->told)
        status = tu_fused_publish(run->state, run->plan->signature, stage(run));
    run->told = true;
    if (status != TUTTI_OK || run->state->own.status != TUTTI_OK)
        return status;
    while (consume_those_that_came(run) && tu_team_help(&run->team))
        ;
    return TUTTI_OK;
}

/* One thread communicates while others work on what has come. An error is the call's; one of the work is kept. */
static tutti_status work_together(gathering *run, tu_team_talk *talk) {
    tutti_status status = tu_team_run(&run->team, talk, run);
    bool of_work = run->team.status != TUTTI_OK;
    if (of_work)
        keep(run, status);
    return of_work ? TUTTI_OK : status;
}

static bool is_all_dense(const tu_gather *plan) {
    bool dense = true;
    for (int i = 0; i < plan->count; i++)
        dense = dense && is_dense(plan->tensors[i]);
    return dense;
}

/* This rank's shards while they are staged, the others' while it looks who comes; a wait only where there is nothing
 * else to do. What is not dense becomes so by staging. */
static tutti_status consume_early_together(gathering *run) {
    tu_fused *state = run->state;
    if (is_all_dense(run->plan))
        consume_own(run);
    tutti_status status = work_together(run, communicate);
    if (status != TUTTI_OK || state->own.status != TUTTI_OK)
        return status;
    consume_own(run);
    while (status == TUTTI_OK) {
        bool missing = consume_those_that_came(run);
        if (run->team.next < run->team.count && run->local == TUTTI_OK)
            status = work_together(run, communicate);
        else if (!missing || !tu_work_await_arrival(state->work, state->came))
            return TUTTI_OK;
    }
    return status;
}

static tutti_status consume_early(gathering *run) {
    tu_fused *state = run->state;
    if (run->plan->prepare != NULL && tu_team_is_open(&run->team))
        run->plan->prepare(run->plan->context);
    if (tu_team_is_open(&run->team))
        return consume_early_together(run);
    tutti_status status = tu_fused_publish(state, run->plan->signature, stage(run));
    if (status != TUTTI_OK || state->own.status != TUTTI_OK)
        return status;
    if (run->plan->prepare != NULL)
        run->plan->prepare(run->plan->context);
    consume_own(run);
    while (consume_those_that_came(run) && tu_work_await_arrival(state->work, state->came))
        ;
    return TUTTI_OK;
}

/* ---- after the agreement: the same on all ranks, from the records ---- */

/* Whether everything can be read as the records say: all ranks have room for what they stage, and pass memory of the
 * same rendezvous where they pass symmetric memory. */
static bool can_read(const gathering *run) {
    const tu_fused *state = run->state;
    bool can = true;
    for (int rank = 0; rank < state->size; rank++) {
        can = can && state->records[rank].fits;
        for (int i = 0; i < run->plan->count; i++)
            can = can && state->records[rank].places[i].index == state->records[0].places[i].index;
    }
    return can;
}

/* Symmetric inputs that have not met yet do so now, for the next call. */
static tutti_status meet(gathering *run, int part) {
    tu_fused *state = run->state;
    for (int rank = 0; rank < state->size; rank++) {
        const tu_fused_place *place = &state->records[rank].places[part];
        if (place->index != 0 || place->block_bytes == 0 ||
            place->block_bytes != state->records[0].places[part].block_bytes)
            return TUTTI_OK;
    }
    tu_symmetric found;
    if (state->meets_in_vain || !tu_symmetric_find(state->places, run->own[part].data, run->bytes[part], &found))
        return TUTTI_OK;
    tutti_peers *peers;
    if (tutti_memory_rendezvous(found.memory, state->group, &peers) == TUTTI_OK) {
        tutti_peers_release(peers); /* the block keeps it */
        return TUTTI_OK;
    }
    state->meets_in_vain = true;
    return tutti_group_check(state->group); /* blocks that cannot meet are staged; an ended group is an error */
}

static tutti_status meet_all(gathering *run) {
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < run->plan->count && status == TUTTI_OK; i++)
        status = meet(run, i);
    return status;
}

/* Not everything fits, or the ranks differ in where their shards lie: all of them stage everything, in a new workspace
 * or in the other half, which was read in the call before: others may be reading this one still. Parts come from the
 * tensors once more: what was made dense in the workspace may have gone with it. */
static tutti_status stage_again(gathering *run) {
    tu_fused *state = run->state;
    size_t used = 0;
    for (int i = 0; i < run->plan->count; i++)
        used += aligned(run->bytes[i]);
    state->gathers++;
    if (state->memory == NULL || used > state->half_bytes) {
        tutti_status status = tu_fused_grow(state, used, 0); /* the records come anew, with the same places */
        if (status != TUTTI_OK)
            return status;
    }
    used = 0;
    for (int i = 0; i < run->plan->count; i++) {
        char *to = tu_fused_half(state, state->rank) + used;
        for (int rank = 0; rank < state->size; rank++) {
            state->records[rank].places[i].offset = used;
            state->records[rank].places[i].index = 0;
        }
        if (copy_part(run, i, to) != TUTTI_OK)
            return tu_fused_give_up(state, run->plan->who); /* the others wait for the copy */
        if (!is_dense(run->plan->tensors[i]))
            run->own[i].data = to;
        used += aligned(run->bytes[i]);
    }
    return tutti_barrier(state->group, NULL);
}

/* The shards have moved: whoever noted where they lie, and has not worked on them yet, must be told anew. */
static void forget_places(gathering *run) {
    const tu_panels panels = run->plan->panels;
    for (int panel = 0; run->plan->notes_places && panel < panels.count; panel++) {
        int first = tu_panel_first(panels, panel), end = tu_panel_first(panels, panel + 1);
        if (!is_complete(run, first, end))
            memset(run->state->done + first, 0, (size_t)(end - first) * sizeof *run->state->done);
    }
}

static bool reads_in_place(const gathering *run) {
    bool any = false;
    for (int i = 0; i < run->plan->count; i++)
        any = any || run->state->records[0].places[i].index != 0;
    return any;
}

static tutti_status run_agreed(gathering *run) {
    tu_fused *state = run->state;
    bool can = can_read(run);
    tutti_status status = meet_all(run);
    if (status == TUTTI_OK && !can)
        status = stage_again(run);
    if (status != TUTTI_OK)
        return status;
    if (!can)
        forget_places(run);
    consume_own(run);
    for (int step = run->plan->in_order ? 0 : 1; step < state->size; step++) {
        int rank = run->plan->in_order ? step : (state->rank + step) % state->size;
        if (!state->done[rank])
            consume_at(run, rank, &state->records[rank]);
    }
    if (tu_team_is_open(&run->team) && run->local == TUTTI_OK)
        status = work_together(run, NULL);
    if (status != TUTTI_OK)
        return status;
    /* After success nobody touches the inputs any more. Staged ones are copies. */
    if (reads_in_place(run))
        status = tutti_barrier(state->group, NULL);
    return status;
}

static tutti_status run_entered(gathering *run) {
    tu_fused *state = run->state;
    for (int i = 0; i < run->plan->count; i++)
        find_place(run, i);
    memset(state->came, 0, (size_t)state->size * sizeof *state->came);
    memset(state->done, 0, (size_t)state->size * sizeof *state->done);
    state->came[state->rank] = true;
    tutti_status status = consume_early(run);
    if (status != TUTTI_OK)
        return status;
    status = tu_fused_agree(state, run->plan->who);
    if (status == TUTTI_OK) {
        status = run_agreed(run);
        state->gathers++;
    }
    return status != TUTTI_OK ? status : run->local != TUTTI_OK ? tu_error_restore(&run->error) : TUTTI_OK;
}

/* ---- without others ---- */

/* All shards in rank order. */
static tutti_status consume_all(const gathering *run,
                                const tu_shard *(*shards_of)(const gathering *, int, tu_shard *)) {
    const tu_gather *plan = run->plan;
    int size = tutti_group_size(plan->group);
    tutti_status status = TUTTI_OK;
    if (plan->prepare != NULL)
        plan->prepare(plan->context);
    for (int rank = 0; rank < size && status == TUTTI_OK; rank++) {
        tu_shard room[TU_FUSED_PARTS] = { { NULL, false, false } };
        const tu_shard *shards = shards_of(run, rank, room);
        if (plan->consume != NULL)
            status = plan->consume(plan->context, rank, shards);
        if (status != TUTTI_OK || plan->work == NULL)
            continue;
        int panel = tu_panel_of(plan->panels, rank), first = tu_panel_first(plan->panels, panel),
            ranks = tu_panel_first(plan->panels, panel + 1) - first;
        tu_team_job job = { .first = first, .ranks = ranks, .rows = rows_of(plan, ranks), .after = -1 };
        memcpy(job.shards, shards, sizeof job.shards);
        if (rank == first + ranks - 1)
            status = plan->work(plan->context, &job);
    }
    return status;
}

static const tu_shard *own_shards(const gathering *run, int rank, tu_shard *shards) {
    (void)rank, (void)shards;
    return run->own;
}

static const tu_shard *gathered_shards(const gathering *run, int rank, tu_shard *shards) {
    for (int i = 0; i < run->plan->count; i++)
        if (run->copies[i] != NULL)
            shards[i].data = (const char *)run->copies[i] + (size_t)rank * run->bytes[i];
    return shards;
}

/* A group of one rank, or one whose other ranks are made up and have what this one has. */
static tutti_status run_alone(gathering *run) {
    tutti_status status = tutti_group_check(run->plan->group);
    for (int i = 0; i < run->plan->count && status == TUTTI_OK; i++) {
        const tt_tensor *x = run->plan->tensors[i];
        run->own[i] = (tu_shard){ tu_pointer(x), is_turned(x), false };
        if (is_dense(x) || run->bytes[i] == 0)
            continue;
        if ((run->copies[i] = tu_block_alloc(tu_self(), run->bytes[i])) == NULL)
            return tu_error_memory("a shard", run->bytes[i]);
        run->own[i].data = run->copies[i];
        status = copy_part(run, i, run->copies[i]);
    }
    return status == TUTTI_OK ? consume_all(run, own_shards) : status;
}

/* In test mode: the plain collective, then everything at once. */
static tutti_status run_reference(gathering *run) {
    const tu_gather *plan = run->plan;
    int size = tutti_group_size(plan->group);
    tutti_status status = TUTTI_OK;
    for (int i = 0; i < plan->count && status == TUTTI_OK; i++) {
        size_t bytes = run->bytes[i];
        if (bytes == 0)
            continue;
        if ((run->copies[i] = tu_block_alloc(tu_self(), (size_t)(size + 1) * bytes)) == NULL)
            return tu_error_memory("gathered shards", (size_t)(size + 1) * bytes);
        char *all = run->copies[i], *own = all + (size_t)size * bytes;
        status = tu_copy_out(plan->tensors[i], own, plan->tensors[i]->dtype);
        if (status == TUTTI_OK)
            status = tutti_all_gather(plan->group, own, all, bytes, TUTTI_U8, NULL);
    }
    if (status == TUTTI_OK)
        status = consume_all(run, gathered_shards);
    for (int i = 0; i < plan->count; i++) {
        tu_block_free(tu_self(), run->copies[i], (size_t)(size + 1) * run->bytes[i]);
        run->copies[i] = NULL;
    }
    return status;
}

/* Where work is worth several threads and there are such. */
static tutti_status open_team(gathering *run) {
    const tu_gather *plan = run->plan;
    int threads = plan->work != NULL && plan->block_rows > 0 ? tu_process_compute_threads() : 1;
    if (threads == 1 || plan->rows == 0)
        return TUTTI_OK;
    run->team = (tu_team){ .group = plan->group,
                           .threads = threads,
                           .work = plan->work,
                           .context = plan->context,
                           .by_library = plan->by_library,
                           .apart = &run->state->overlaps };
    int64_t blocks = (plan->rows + plan->block_rows - 1) / plan->block_rows;
    return tu_team_open(&run->team, (int)((blocks + 1) * run->state->size));
}

static tutti_status run_real(gathering *run) {
    const tu_gather *plan = run->plan;
    tutti_status status = tu_fused_enter(plan->group, &run->state);
    if (status != TUTTI_OK)
        return tu_fused_refuse(plan->group, plan->who, status);
    status = open_team(run);
    if (status == TUTTI_OK)
        status = run_entered(run);
    else
        status = tu_fused_refuse_inside(run->state, plan->who, status);
    tu_team_close(&run->team);
    tu_fused_leave(run->state);
    return status;
}

tutti_status tu_gather_and_consume(const tu_gather *gather) {
    gathering run = { .plan = gather };
    tutti_status status;
    for (int i = 0; i < gather->count; i++)
        run.bytes[i] = (size_t)gather->tensors[i]->numel * tu_dtype_bytes[gather->tensors[i]->dtype];
    if (tutti_group_size(gather->group) == 1 || tu_fused_is_fake(gather->group))
        status = run_alone(&run);
    else if (tu_symm_test_mode())
        status = run_reference(&run);
    else
        status = run_real(&run);
    for (int i = 0; i < gather->count; i++)
        tu_block_free(tu_self(), run.copies[i], run.bytes[i]);
    return status;
}
