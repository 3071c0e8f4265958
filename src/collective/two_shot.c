/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions in two hand-overs: each rank reduces its slice of all inputs and hands the result to whoever wants it.
 *
 * Every rank's buffers are used where they lie when they are symmetric: the owner of a slice reads it from the inputs
 * and writes it into the outputs of all, which moves as little as can be. Other ranks stage: their input goes through
 * their slot, part by owner; the result of a slice waits in its owner's own part of the owner's slot, which staging
 * leaves free. The two kinds mix at will.
 *
 * Messages that do not fit into a slot go in rounds. In round c a rank
 *     awaits the others' parts of c, reduces its slice and publishes it (step c), then awaits the others' slices of c,
 * copies them out while it stages c + 1, and arrives there. Reading what others have written and writing for them go
 * side by side (tu_compute_both), since each by itself leaves the processor waiting.
 * Two slots suffice: parts and result of c + 1 overwrite those of c - 1, with which all are done when they arrive in c.
 */
#include <string.h>

#include "collective/compute.h"
#include "collective/parts.h"

/* Pieces in which a slice is reduced in place, with a look at the group's state word in between. */
#define PIECE_BYTES ((size_t)1 << 20)

typedef struct two_shot {
    tu_collective *state;
    tu_task *task;
    tu_slice mine;
    bool ring;     /* through the rings, else the slots of the group's piece */
    uint64_t turn; /* of round 0 */
    size_t part;   /* bytes of one part of a slot */
    size_t rounds;
    bool stages;      /* this rank's input is staged */
    bool copies;      /* this rank wants all slices and its output is not written by their owners */
    bool others_copy; /* somebody else does */
    unsigned stream;  /* kernel flags for results */
} two_shot;

static unsigned char *slot(const two_shot *run, int member, uint64_t epoch, size_t round) {
    const tu_collective *state = run->state;
    if (run->ring)
        return tu_ring_slot(state, member, run->turn + round, run->part * (size_t)state->size);
    return tu_staging(state, member, epoch);
}

static unsigned stage_flags(const two_shot *run, size_t bytes) {
    return run->ring ? tu_ring_flags(run->state, bytes) : tu_stage_flags(run->state, bytes);
}

static size_t longest_slice(const tu_task *task, int size) {
    size_t longest = 0;
    for (int owner = 0; owner < size; owner++) {
        size_t count = tu_slice_of(task, size, owner).count;
        longest = count > longest ? count : longest;
    }
    return longest * task->element;
}

/* Elements of `slice` in round `round`: first of the whole buffer, count. */
static tu_slice portion(const two_shot *run, tu_slice slice, size_t round) {
    size_t elements = run->part / run->task->element;
    size_t begin = round * elements;
    if (slice.count <= begin)
        return (tu_slice){ slice.first, 0 };
    return (tu_slice){ slice.first + begin, slice.count - begin < elements ? slice.count - begin : elements };
}

/* ---- the steps of a round ---- */

/* This rank's parts for the other owners. */
static tu_lane to_stage(const two_shot *run, uint64_t epoch, size_t round) {
    tu_collective *state = run->state;
    const tu_task *task = run->task;
    tu_lane put = { .segments = state->put };
    unsigned char *base = slot(run, state->rank, epoch, round);
    for (int i = 1; i < state->size && run->stages; i++) {
        int owner = (state->rank + i) % state->size;
        tu_slice part = portion(run, tu_slice_of(task, state->size, owner), round);
        tu_lane_add(&put, base + (size_t)owner * run->part,
                    (const unsigned char *)task->in + part.first * task->element, part.count * task->element);
    }
    put.flags = stage_flags(run, put.bytes);
    return put;
}

static void stage(const two_shot *run, uint64_t epoch, size_t round) {
    tu_lane put = to_stage(run, epoch, round);
    tu_compute_stage(run->state, &put);
}

/* Where the results of this rank's slice go: its own output, outputs that are written in place, or else its slot for
 * those who copy. */
static tutti_status find_targets(const two_shot *run, tu_slice part, unsigned char *own_part, int *count) {
    tu_collective *state = run->state;
    tu_task *task = run->task;
    bool scatter = tu_scatters(task->row);
    size_t at = part.first * task->element;
    *count = 0;
    if (scatter)
        state->targets[(*count)++] = (unsigned char *)task->out + (part.first - run->mine.first) * task->element;
    for (int i = 0; i < state->size && !scatter; i++) {
        int member = (state->rank + i) % state->size;
        if (!tu_wants_all(task, member))
            continue;
        unsigned char *out = task->out;
        if (member != state->rank) {
            if (state->references[member].out_index == 0)
                continue;
            tutti_status status = tu_resolve_out(state, task, member, &out);
            if (status != TUTTI_OK)
                return status;
        }
        state->targets[(*count)++] = out + at;
    }
    if (run->others_copy && *count == 0)
        state->targets[(*count)++] = own_part;
    return TUTTI_OK;
}

static tutti_status find_sources(const two_shot *run, tu_slice part, uint64_t epoch, size_t round) {
    tu_collective *state = run->state;
    tu_task *task = run->task;
    size_t at = part.first * task->element;
    for (int member = 0; member < state->size; member++) {
        unsigned char *in;
        if (member == state->rank) {
            state->sources[member] = (const unsigned char *)task->in + at;
        } else if (state->references[member].in_index != 0) {
            tutti_status status = tu_resolve_in(state, task, member, &in);
            if (status != TUTTI_OK)
                return status;
            state->sources[member] = in + at;
        } else {
            state->sources[member] = slot(run, member, epoch, round) + (size_t)state->rank * run->part;
        }
        state->factors[member] = state->references[member].factor;
    }
    return TUTTI_OK;
}

/* The result is wanted in outputs and in this rank's slot: adds what is missing to the lanes. Through the cache both
 * are written at once. Past it, the one that goes through it is reduced and the other copied from there. */
static void add_slot(const two_shot *run, unsigned char *own_part, size_t bytes, tu_sweep *sweep, tu_lane *put) {
    tu_collective *state = run->state;
    unsigned slot_flags = stage_flags(run, bytes);
    if (slot_flags == run->stream || sweep->to_count > 1) {
        state->targets[sweep->to_count++] = own_part;
        return;
    }
    unsigned char *out = state->targets[0];
    put->flags = slot_flags | run->stream;
    if (run->stream != 0) {
        state->targets[0] = own_part;
        sweep->flags = 0;
        tu_lane_add(put, out, own_part, bytes);
    } else {
        tu_lane_add(put, own_part, out, bytes);
    }
}

/* Reduces `part` of this rank's slice. Meanwhile `put`, unless it is empty, is staged, or else the result for those who
 * copy: an operation has one of them. */
static tutti_status reduce(const two_shot *run, uint64_t epoch, size_t round, tu_slice part, tu_lane *put) {
    tu_collective *state = run->state;
    tu_task *task = run->task;
    tutti_status status = tu_still_alive(state);
    if (status != TUTTI_OK)
        return status;
    tu_lane take = { .sweep = NULL };
    if (part.count == 0) {
        tu_compute_both(state, &take, put);
        return TUTTI_OK;
    }
    unsigned char *own_part =
        run->others_copy ? slot(run, state->rank, epoch, round) + (size_t)state->rank * run->part : NULL;
    int targets = 0;
    status = find_targets(run, part, own_part, &targets);
    if (status == TUTTI_OK)
        status = find_sources(run, part, epoch, round);
    if (status != TUTTI_OK)
        return status;
    tu_sweep sweep = { .to = state->targets,
                       .from = state->sources,
                       .to_count = targets,
                       .from_count = state->size,
                       .count = part.count,
                       .element = task->element,
                       .dtype = (tutti_dtype)task->info.dtype,
                       .reduction = (tutti_reduction)task->info.reduction,
                       .factors = state->factors,
                       .flags = run->stream };
    size_t bytes = part.count * task->element;
    if (own_part != NULL && state->targets[0] == own_part)
        sweep.flags = stage_flags(run, bytes);
    else if (own_part != NULL)
        add_slot(run, own_part, bytes, &sweep, put);
    take.sweep = &sweep;
    /* The next round that is staged meanwhile is watched; a result of this one, which is copied, is not. */
    if (own_part == NULL)
        tu_compute_round(state, round + 1, &take, put);
    else
        tu_compute_both(state, &take, put);
    return TUTTI_OK;
}

/* The others' slices. */
static tu_lane to_copy(const two_shot *run, uint64_t epoch, size_t round) {
    tu_collective *state = run->state;
    const tu_task *task = run->task;
    tu_lane take = { .segments = state->taken, .flags = run->stream };
    for (int i = 1; i < state->size && run->copies; i++) {
        int owner = (state->rank + i) % state->size;
        tu_slice part = portion(run, tu_slice_of(task, state->size, owner), round);
        tu_lane_add(&take, (unsigned char *)task->out + part.first * task->element,
                    slot(run, owner, epoch, round) + (size_t)owner * run->part, part.count * task->element);
    }
    return take;
}

/* ---- the whole ---- */

/* Everything lies in place: one pass, no slots. */
static tutti_status reduce_in_place(two_shot *run, uint64_t epoch) {
    size_t elements = PIECE_BYTES * (size_t)(1 + run->state->helpers) / run->task->element;
    tutti_status status = TUTTI_OK;
    for (size_t begin = 0; begin < run->mine.count && status == TUTTI_OK; begin += elements) {
        size_t count = run->mine.count - begin < elements ? run->mine.count - begin : elements;
        tu_lane nothing = { .segments = run->state->put };
        status = reduce(run, epoch, 0, (tu_slice){ run->mine.first + begin, count }, &nothing);
    }
    return status;
}

/* Enters the epoch of the round after `round`; what is to be staged in it, or nothing after the last. */
static tutti_status next_round(const two_shot *run, size_t round, uint64_t *epoch, tu_lane *put) {
    *put = (tu_lane){ .segments = run->state->put };
    if (round + 1 >= run->rounds)
        return TUTTI_OK;
    tutti_status status = tu_epoch_enter(run->state, run->task, epoch);
    if (status == TUTTI_OK)
        *put = to_stage(run, *epoch, round + 1);
    return status;
}

/* A round of which each owner keeps its slice: it is reduced while the next one is staged. */
static tutti_status scatter_round(const two_shot *run, size_t round, uint64_t current, uint64_t *epoch) {
    tu_lane put;
    tutti_status status = next_round(run, round, epoch, &put);
    return status == TUTTI_OK ? reduce(run, current, round, portion(run, run->mine, round), &put) : status;
}

static tutti_status gather_round(const two_shot *run, size_t round, uint64_t current, uint64_t *epoch) {
    tu_collective *state = run->state;
    tu_lane put = { .segments = state->put };
    tutti_status status = reduce(run, current, round, portion(run, run->mine, round), &put);
    if (status != TUTTI_OK)
        return status;
    tu_step_publish(state, current);
    if (run->copies)
        status = tu_step_await_all(state, run->task, current);
    if (status == TUTTI_OK)
        status = next_round(run, round, epoch, &put);
    if (status != TUTTI_OK)
        return status;
    tu_lane take = to_copy(run, current, round);
    tu_compute_round(state, round + 1, &take, &put);
    return TUTTI_OK;
}

/* `epoch` has been entered and arrived in, with round 0 staged. */
static tutti_status run_rounds(two_shot *run, uint64_t epoch, uint64_t *last) {
    tu_collective *state = run->state;
    bool scatter = tu_scatters(run->task->row);
    tutti_status status = TUTTI_OK;
    for (size_t round = 0; round < run->rounds && status == TUTTI_OK; round++) {
        uint64_t current = *last = epoch;
        status = tu_epoch_await_all(state, run->task, current);
        if (status == TUTTI_OK)
            status = scatter ? scatter_round(run, round, current, &epoch) : gather_round(run, round, current, &epoch);
        if (status == TUTTI_OK && epoch != current)
            tu_epoch_arrive(state, run->task, epoch);
    }
    return status;
}

/* What all members said decides for all of them alike. */
static bool everything_in_place(const two_shot *run) {
    const tu_collective *state = run->state;
    for (int member = 0; member < state->size; member++) {
        if (state->references[member].in_index == 0)
            return false;
        if (tu_wants_all(run->task, member) && state->references[member].out_index == 0)
            return false;
    }
    return true;
}

static void learn(two_shot *run, uint64_t epoch) {
    tu_collective *state = run->state;
    tu_read_references(state, epoch);
    run->stages = state->references[state->rank].in_index == 0;
    run->copies = tu_wants_all(run->task, state->rank) && state->references[state->rank].out_index == 0;
    run->others_copy = false;
    for (int member = 0; member < state->size; member++) {
        if (member != state->rank && tu_wants_all(run->task, member) && state->references[member].out_index == 0)
            run->others_copy = true;
        if (state->references[member].given < run->task->valid)
            run->task->valid = state->references[member].given;
    }
}

/* Nobody may touch this rank's buffers, or its last result, after the call. */
static tutti_status leave(const two_shot *run, uint64_t epoch) {
    tu_collective *state = run->state;
    tu_task *task = run->task;
    const tu_reference *mine = &state->references[state->rank];
    bool scatter = tu_scatters(task->row);
    if (scatter && state->direct_inputs != 0)
        tu_step_publish(state, epoch);
    return mine->in_index != 0 || mine->out_index != 0 ? tu_step_await_all(state, task, epoch) : TUTTI_OK;
}

/* Parts longer than this go through the rings. */
#define LONG_PART ((size_t)4 << 10)

/* How the message is cut: a ring that is there is used at once. Sets *staged when round 0 can be staged before anything
 * is known of the others; else it is cut anew when the rings are attached. */
static void plan(two_shot *run, bool *staged) {
    tu_collective *state = run->state;
    size_t longest = longest_slice(run->task, state->size);
    size_t room = state->layout.slot_bytes / (size_t)state->size / 64 * 64;
    run->ring = longest > room || longest > LONG_PART;
    if (run->ring)
        room = tu_ring_room(state, (size_t)state->size);
    run->part = run->ring ? tu_round_bytes(state, longest, room) : room;
    run->rounds = longest == 0 ? 1 : (longest + run->part - 1) / run->part;
    *staged = !run->ring || state->rings != NULL;
}

/* Arrives with a reference, and with round 0 staged where that is possible. */
static tutti_status begin(two_shot *run, bool staged, uint64_t *epoch) {
    tu_collective *state = run->state;
    tutti_status status = tu_epoch_enter(state, run->task, epoch);
    if (status != TUTTI_OK)
        return status;
    tu_reference reference;
    tu_refer(state, run->task, &reference);
    memcpy(state->members[state->rank]->arrive[*epoch & 1].payload, &reference, sizeof reference);
    run->stages = reference.in_index == 0;
    if (staged) {
        run->turn = state->turns;
        state->turns += run->ring ? run->rounds : 0;
        stage(run, *epoch, 0);
    }
    tu_epoch_arrive(state, run->task, *epoch);
    return tu_epoch_await_all(state, run->task, *epoch);
}

/* The first message that needs them attaches the rings, and stages round 0 then. */
static tutti_status begin_again(two_shot *run, uint64_t *epoch) {
    tu_collective *state = run->state;
    bool staged;
    tutti_status status = tu_collective_attach_rings(state, run->task);
    if (status == TUTTI_OK)
        status = tu_epoch_enter(state, run->task, epoch);
    if (status != TUTTI_OK)
        return status;
    plan(run, &staged);
    run->turn = state->turns;
    state->turns += run->rounds;
    stage(run, *epoch, 0);
    tu_epoch_arrive(state, run->task, *epoch);
    return TUTTI_OK;
}

tutti_status tu_two_shot(tu_collective *state, tu_task *task) {
    two_shot run = { .state = state, .task = task, .mine = tu_slice_of(task, state->size, state->rank) };
    run.stream = task->info.count * task->element >= state->large ? TU_KERNEL_STREAM : 0;
    bool staged;
    plan(&run, &staged);
    uint64_t epoch, last;
    tutti_status status = begin(&run, staged, &epoch);
    if (status != TUTTI_OK)
        return status;
    learn(&run, epoch);
    if (everything_in_place(&run)) {
        status = reduce_in_place(&run, epoch);
        if (status == TUTTI_OK && !tu_scatters(task->row))
            tu_step_publish(state, epoch);
        return status == TUTTI_OK ? leave(&run, epoch) : status;
    }
    if (!staged)
        status = begin_again(&run, &epoch);
    last = epoch;
    if (status == TUTTI_OK)
        status = run_rounds(&run, epoch, &last);
    return status == TUTTI_OK ? leave(&run, last) : status;
}
