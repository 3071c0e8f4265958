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
 *     awaits the others' parts of c, reduces its slice, publishes it (step c), stages c + 1 and arrives there, and only
 * then awaits the others' slices of c and copies them out: so both hand-overs pass while there is something else to do.
 * Two slots suffice: parts of c + 1 overwrite those of c - 1, which all have reduced when they arrive in c; the result
 * of c + 1 overwrites that of c - 1, which all have copied when they arrive in c + 1.
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
    bool wide;
    size_t part; /* bytes of one part of a slot */
    size_t rounds;
    bool stages;      /* this rank's input is staged */
    bool copies;      /* this rank wants all slices and its output is not written by their owners */
    bool others_copy; /* somebody else does */
    unsigned stream;  /* kernel flags for results */
} two_shot;

static unsigned char *slot(const two_shot *run, int member, uint64_t epoch) {
    const tu_collective *state = run->state;
    if (run->wide)
        return state->wide[member] + (epoch & 1) * state->wide_bytes;
    return tu_staging(state, member, epoch);
}

static size_t part_bytes(const tu_collective *state, bool wide) {
    return (wide ? state->wide_bytes : state->layout.slot_bytes) / (size_t)state->size / 64 * 64;
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

static void stage(const two_shot *run, uint64_t epoch, size_t round) {
    const tu_collective *state = run->state;
    const tu_task *task = run->task;
    if (!run->stages)
        return;
    unsigned char *base = slot(run, state->rank, epoch);
    for (int i = 1; i < state->size; i++) {
        int owner = (state->rank + i) % state->size;
        tu_slice part = portion(run, tu_slice_of(task, state->size, owner), round);
        if (part.count != 0)
            tu_copy(base + (size_t)owner * run->part, (const unsigned char *)task->in + part.first * task->element,
                    part.count * task->element,
                    tu_stage_flags(state, part.count * task->element * (size_t)(state->size - 1)));
    }
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

static tutti_status find_sources(const two_shot *run, tu_slice part, uint64_t epoch) {
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
            state->sources[member] = slot(run, member, epoch) + (size_t)state->rank * run->part;
        }
        state->factors[member] = state->references[member].factor;
    }
    return TUTTI_OK;
}

static tutti_status reduce(const two_shot *run, uint64_t epoch, tu_slice part) {
    tu_collective *state = run->state;
    tu_task *task = run->task;
    if (part.count == 0)
        return TUTTI_OK;
    unsigned char *own_part = run->others_copy ? slot(run, state->rank, epoch) + (size_t)state->rank * run->part : NULL;
    int targets;
    tutti_status status = tu_still_alive(state);
    if (status == TUTTI_OK)
        status = find_targets(run, part, own_part, &targets);
    if (status == TUTTI_OK)
        status = find_sources(run, part, epoch);
    if (status != TUTTI_OK)
        return status;
    size_t bytes = part.count * task->element;
    bool only_slot = own_part != NULL && state->targets[0] == own_part, both = own_part != NULL && !only_slot;
    if (both && run->stream != 0)
        state->targets[targets++] = own_part;
    tu_compute_reduce(state, state->targets, targets, state->sources, state->size, part.count,
                      (tutti_dtype)task->info.dtype, (tutti_reduction)task->info.reduction, state->factors,
                      only_slot ? tu_stage_flags(state, bytes) : run->stream);
    /* Where the output goes through the cache, the slot gets a copy of what is still there: it is written another
     * way. */
    if (both && run->stream == 0)
        tu_copy(own_part, state->targets[0], bytes, tu_stage_flags(state, bytes));
    return TUTTI_OK;
}

static void copy_slices(const two_shot *run, uint64_t epoch, size_t round) {
    const tu_collective *state = run->state;
    const tu_task *task = run->task;
    for (int i = 1; i < state->size; i++) {
        int owner = (state->rank + i) % state->size;
        tu_slice part = portion(run, tu_slice_of(task, state->size, owner), round);
        if (part.count != 0)
            tu_compute_copy(run->state, (unsigned char *)task->out + part.first * task->element,
                            slot(run, owner, epoch) + (size_t)owner * run->part, part.count * task->element,
                            run->stream);
    }
}

/* ---- the whole ---- */

/* Everything lies in place: one pass, no slots. */
static tutti_status reduce_in_place(two_shot *run, uint64_t epoch) {
    size_t elements = PIECE_BYTES * (size_t)(1 + run->state->helpers) / run->task->element;
    tutti_status status = TUTTI_OK;
    for (size_t begin = 0; begin < run->mine.count && status == TUTTI_OK; begin += elements) {
        size_t count = run->mine.count - begin < elements ? run->mine.count - begin : elements;
        status = reduce(run, epoch, (tu_slice){ run->mine.first + begin, count });
    }
    return status;
}

/* `epoch` has been entered and arrived in, with round 0 staged. */
static tutti_status run_rounds(two_shot *run, uint64_t epoch, uint64_t *last) {
    tu_collective *state = run->state;
    tu_task *task = run->task;
    bool scatter = tu_scatters(task->row);
    for (size_t round = 0;; round++) {
        tutti_status status = tu_epoch_await_all(state, task, epoch);
        if (status == TUTTI_OK)
            status = reduce(run, epoch, portion(run, run->mine, round));
        if (status != TUTTI_OK)
            return status;
        if (!scatter)
            tu_step_publish(state, epoch);
        uint64_t current = epoch;
        bool more = round + 1 < run->rounds;
        if (more) {
            status = tu_epoch_enter(state, task, &epoch);
            if (status != TUTTI_OK)
                return status;
            stage(run, epoch, round + 1);
            tu_epoch_arrive(state, task, epoch);
        }
        if (run->copies) {
            status = tu_step_await_all(state, task, current);
            if (status != TUTTI_OK)
                return status;
            copy_slices(run, current, round);
        }
        *last = current;
        if (!more)
            return TUTTI_OK;
    }
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
    if (mine->in_index != 0 || mine->out_index != 0)
        return tu_step_await_all(state, task, epoch);
    /* The root copies round c after it arrived in c + 1: its step says that it is done with the round before the
     * last. */
    if (task->row->flow == TU_FLOW_TO_ROOT && run->rounds > 1 && state->rank != task->info.root)
        return tu_step_await(state, task, epoch, task->info.root);
    return TUTTI_OK;
}

tutti_status tu_two_shot(tu_collective *state, tu_task *task) {
    two_shot run = { .state = state, .task = task, .mine = tu_slice_of(task, state->size, state->rank) };
    size_t bytes = task->info.count * task->element;
    run.stream = bytes >= state->large ? TU_KERNEL_STREAM : 0;
    size_t longest = longest_slice(task, state->size);
    run.part = part_bytes(state, false);
    bool fits = longest <= run.part;
    uint64_t epoch, last;
    tutti_status status = tu_epoch_enter(state, task, &epoch);
    if (status != TUTTI_OK)
        return status;
    tu_reference reference;
    tu_refer(state, task, &reference);
    memcpy(state->members[state->rank]->arrive[epoch & 1].payload, &reference, sizeof reference);
    run.stages = reference.in_index == 0;
    run.rounds = 1;
    if (fits)
        stage(&run, epoch, 0);
    tu_epoch_arrive(state, task, epoch);
    status = tu_epoch_await_all(state, task, epoch);
    if (status != TUTTI_OK)
        return status;
    learn(&run, epoch);
    last = epoch;
    if (everything_in_place(&run)) {
        status = reduce_in_place(&run, epoch);
        if (status == TUTTI_OK && !tu_scatters(task->row))
            tu_step_publish(state, epoch);
        return status == TUTTI_OK ? leave(&run, epoch) : status;
    }
    if (!fits) {
        status = tu_collective_widen(state, task);
        if (status != TUTTI_OK)
            return status;
        run.wide = true;
        run.part = part_bytes(state, true);
        run.rounds = (longest + run.part - 1) / run.part;
        status = tu_epoch_enter(state, task, &epoch);
        if (status != TUTTI_OK)
            return status;
        stage(&run, epoch, 0);
        tu_epoch_arrive(state, task, epoch);
    }
    status = run_rounds(&run, epoch, &last);
    return status == TUTTI_OK ? leave(&run, last) : status;
}
