/* SPDX-License-Identifier: Apache-2.0
 *
 * Large moves. All arrive and say where their buffers lie; then each pair moves its part the shortest way:
 *     the input is symmetric:   the target copies it from there;
 *     else the output is:       the source copies it there;
 *     else:                     through the source's slot, round by round.
 */
#include <string.h>

#include "collective/compute.h"
#include "collective/parts.h"

/* Pieces in which bytes are copied to or from a peer, with a look at the group's state word in between. */
#define PIECE_BYTES ((size_t)4 << 20)

typedef struct pipeline {
    tu_collective *state;
    tu_task *task;
    bool shared;   /* all targets of a source take the same bytes */
    size_t part;   /* bytes of one part of a slot */
    size_t rounds; /* of the staged pairs; 0: there are none */
    bool ring;     /* through the rings, else the slots of the group's piece */
    uint64_t turn; /* of round 0 */
    unsigned stream;
} pipeline;

static unsigned char *slot(const pipeline *run, int member, uint64_t epoch, size_t round) {
    const tu_collective *state = run->state;
    if (run->ring)
        return tu_ring_slot(state, member, run->turn + round, run->part * (run->shared ? 1 : (size_t)state->size));
    return tu_staging(state, member, epoch);
}

/* The longest part that `source` sends to another rank. */
static size_t longest_from(const pipeline *run, int source) {
    const tu_task *task = run->task;
    if (task->row->in == TU_EXTENT_SPLITS)
        return run->state->references[source].longest;
    size_t bytes = (task->row->in == TU_EXTENT_SHARE ? task->in_counts[source] : task->info.count) * task->element;
    switch (task->row->flow) {
    case TU_FLOW_FROM_ROOT:
        return source == task->info.root ? bytes : 0;
    case TU_FLOW_TO_ROOT:
        return source == task->info.root ? 0 : bytes;
    case TU_FLOW_PERMUTED:
        return task->to[source] >= 0 && task->to[source] != source ? bytes : 0;
    default:
        return bytes;
    }
}

static bool pair_staged(const pipeline *run, int source, int target) {
    const tu_collective *state = run->state;
    return source != target && tu_listens(run->task, target, source) && state->references[source].in_index == 0 &&
           state->references[target].out_index == 0;
}

/* What all members said decides for all of them alike. */
static size_t longest_staged(const pipeline *run) {
    int size = run->state->size;
    size_t longest = 0;
    for (int source = 0; source < size; source++) {
        size_t bytes = longest_from(run, source);
        if (bytes <= longest)
            continue;
        for (int target = 0; target < size; target++) {
            if (pair_staged(run, source, target)) {
                longest = bytes;
                break;
            }
        }
    }
    return longest;
}

/* ---- in place ---- */

static tutti_status copy_pieces(const pipeline *run, void **targets, int count, const unsigned char *from,
                                size_t bytes) {
    for (size_t begin = 0; begin < bytes; begin += PIECE_BYTES) {
        tutti_status status = tu_still_alive(run->state);
        if (status != TUTTI_OK)
            return status;
        size_t piece = bytes - begin < PIECE_BYTES ? bytes - begin : PIECE_BYTES;
        if (count == 1)
            tu_compute_copy(run->state, targets[0], from + begin, piece, run->stream);
        else
            tu_copy_many(targets, count, from + begin, piece, run->stream);
        for (int i = 0; i < count; i++)
            targets[i] = (unsigned char *)targets[i] + piece;
    }
    return TUTTI_OK;
}

/* all_to_all_v: where the source says that this rank's part lies in its input. */
static tutti_status resolve_split(const pipeline *run, uint64_t epoch, int source, tu_part *part, unsigned char **in) {
    tu_collective *state = run->state;
    const tu_reference *reference = &state->references[source];
    uint64_t first = tu_splits(state, source, epoch)[state->rank][1];
    size_t room;
    tutti_status status = tu_resolve(state, run->task, source, reference->in_index, reference->in_offset, in, &room);
    if (status != TUTTI_OK)
        return status;
    if (__builtin_mul_overflow(first, run->task->element, &part->in_offset) || part->in_offset > room ||
        part->bytes > room - part->in_offset)
        return tu_garbage(state, run->task, source, "a part that lies outside of its block");
    return TUTTI_OK;
}

static tutti_status pull(const pipeline *run, uint64_t epoch) {
    tu_collective *state = run->state;
    tu_task *task = run->task;
    for (int i = 1; i < state->size; i++) {
        int source = (state->rank + i) % state->size;
        if (!tu_listens(task, state->rank, source) || state->references[source].in_index == 0)
            continue;
        tu_part part = tu_part_of(task, state->rank, source, state->rank);
        if (part.bytes == 0)
            continue;
        unsigned char *in;
        tutti_status status;
        if (task->row->in == TU_EXTENT_SPLITS)
            status = resolve_split(run, epoch, source, &part, &in);
        else
            status = tu_resolve_in(state, task, source, &in);
        void *to = (unsigned char *)task->out + part.out_offset;
        if (status == TUTTI_OK)
            status = copy_pieces(run, &to, 1, in + part.in_offset, part.bytes);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

static tutti_status push(const pipeline *run) {
    tu_collective *state = run->state;
    tu_task *task = run->task;
    if (state->references[state->rank].in_index != 0)
        return TUTTI_OK;
    int count = 0;
    tu_part part = { 0, 0, 0 };
    for (int i = 1; i < state->size; i++) {
        int target = (state->rank + i) % state->size;
        if (!tu_listens(task, target, state->rank) || state->references[target].out_index == 0)
            continue;
        part = tu_part_of(task, state->rank, state->rank, target);
        if (part.bytes == 0)
            continue;
        unsigned char *out;
        tutti_status status = tu_resolve_out(state, task, target, &out);
        if (status != TUTTI_OK)
            return status;
        state->targets[count++] = out + part.out_offset;
        if (!run->shared) {
            status =
                copy_pieces(run, state->targets, count, (const unsigned char *)task->in + part.in_offset, part.bytes);
            if (status != TUTTI_OK)
                return status;
            count = 0;
        }
    }
    if (count == 0)
        return TUTTI_OK;
    return copy_pieces(run, state->targets, count, (const unsigned char *)task->in + part.in_offset, part.bytes);
}

/* ---- staged ---- */

static size_t portion(const pipeline *run, size_t bytes, size_t round) {
    size_t begin = round * run->part;
    return bytes <= begin ? 0 : bytes - begin < run->part ? bytes - begin : run->part;
}

/* This rank's parts for those who take them from its slot. */
static tu_lane to_stage(const pipeline *run, uint64_t epoch, size_t round) {
    tu_collective *state = run->state;
    const tu_task *task = run->task;
    tu_lane put = { .segments = state->put };
    unsigned char *base = slot(run, state->rank, epoch, round);
    for (int i = 1; i < state->size; i++) {
        int target = (state->rank + i) % state->size;
        if (!pair_staged(run, state->rank, target))
            continue;
        tu_part part = tu_part_of(task, state->rank, state->rank, target);
        tu_lane_add(&put, base + (run->shared ? 0 : (size_t)target * run->part),
                    (const unsigned char *)task->in + part.in_offset + round * run->part,
                    portion(run, part.bytes, round));
        if (run->shared)
            break;
    }
    put.flags = run->ring ? tu_ring_flags(state, put.bytes) : tu_stage_flags(state, put.bytes);
    return put;
}

/* What this rank takes from the others' slots, once they have arrived. */
static tutti_status to_take(const pipeline *run, uint64_t epoch, size_t round, tu_lane *take) {
    tu_collective *state = run->state;
    tu_task *task = run->task;
    *take = (tu_lane){ .segments = state->taken, .flags = run->stream };
    for (int i = 1; i < state->size; i++) {
        int source = (state->rank + i) % state->size;
        if (!pair_staged(run, source, state->rank))
            continue;
        tutti_status status = tu_epoch_await(state, task, epoch, source);
        if (status != TUTTI_OK)
            return status;
        tu_part part = tu_part_of(task, state->rank, source, state->rank);
        tu_lane_add(take, (unsigned char *)task->out + part.out_offset + round * run->part,
                    slot(run, source, epoch, round) + (run->shared ? 0 : (size_t)state->rank * run->part),
                    portion(run, part.bytes, round));
    }
    return TUTTI_OK;
}

/* A round is taken while the next one is staged. Two slots suffice: who arrives in a round has taken the one before. */
static tutti_status run_rounds(pipeline *run, uint64_t *epoch) {
    tu_collective *state = run->state;
    tu_lane take = { .segments = state->taken };
    tutti_status status = TUTTI_OK;
    for (size_t round = 0; round <= run->rounds && status == TUTTI_OK; round++) {
        bool more = round < run->rounds;
        tu_lane put = { .segments = state->put };
        if (round != 0)
            status = to_take(run, *epoch, round - 1, &take);
        if (more && status == TUTTI_OK)
            status = tu_epoch_enter(state, run->task, epoch);
        if (status != TUTTI_OK)
            break;
        if (more)
            put = to_stage(run, *epoch, round);
        tu_compute_round(state, round, &take, &put);
        if (more)
            tu_epoch_arrive(state, run->task, *epoch);
    }
    return status;
}

/* ---- the whole ---- */

static size_t own_longest(const tu_collective *state, const tu_task *task) {
    size_t longest = 0;
    if (task->row->in == TU_EXTENT_SPLITS)
        for (int target = 0; target < state->size; target++)
            if (target != state->rank && task->in_counts[target] > longest)
                longest = task->in_counts[target];
    return longest * task->element;
}

static tutti_status arrive(pipeline *run, uint64_t *epoch) {
    tu_collective *state = run->state;
    tu_task *task = run->task;
    tutti_status status = tu_epoch_enter(state, task, epoch);
    if (status != TUTTI_OK)
        return status;
    tu_reference reference;
    tu_refer(state, task, &reference);
    reference.longest = own_longest(state, task);
    memcpy(state->members[state->rank]->arrive[*epoch & 1].payload, &reference, sizeof reference);
    if (task->row->in == TU_EXTENT_SPLITS)
        tu_publish_splits(state, task, *epoch);
    tu_epoch_arrive(state, task, *epoch);
    status = tu_epoch_await_all(state, task, *epoch);
    if (status != TUTTI_OK)
        return status;
    tu_read_references(state, *epoch);
    return task->row->in == TU_EXTENT_SPLITS ? tu_compare_splits(state, task, *epoch) : TUTTI_OK;
}

/* Parts longer than this go through the rings. */
#define LONG_PART ((size_t)4 << 10)

/* Rounds let those who only take begin while a source still stages. Where everybody stages and takes as much they only
 * interrupt copies (a sixth of the time of 512 KiB each way, between cores that share a cache): one, where it fits. */
static tutti_status plan(pipeline *run, size_t longest) {
    tu_collective *state = run->state;
    size_t parts = run->shared ? 1 : (size_t)state->size, room = state->layout.slot_bytes / parts / 64 * 64;
    tutti_status status = TUTTI_OK;
    run->ring = longest > room || longest > LONG_PART;
    if (run->ring) {
        status = tu_collective_attach_rings(state, run->task);
        room = tu_ring_room(state, parts);
    }
    size_t half = state->ring_bytes / 2 / parts / 64 * 64;
    if (run->ring && run->task->row->flow == TU_FLOW_ALL && longest <= half)
        run->part = (longest + 63) / 64 * 64;
    else
        run->part = run->ring ? tu_round_bytes(state, longest, room) : room;
    run->rounds = (longest + run->part - 1) / run->part;
    run->turn = state->turns;
    if (status == TUTTI_OK && run->ring)
        state->turns += run->rounds;
    return status;
}

tutti_status tu_pipelined(tu_collective *state, tu_task *task) {
    pipeline run = { .state = state, .task = task, .shared = !tu_has_parts(task->row) };
    size_t bytes = tu_out_bytes(task, state->rank, state->size);
    run.stream = bytes >= state->large ? TU_KERNEL_STREAM : 0;
    tu_keep_own_part(state, task, true);
    uint64_t first, epoch;
    tutti_status status = arrive(&run, &first);
    /* In place what is pulled falls on input that is still to be pushed or staged: so that comes first. */
    if (status == TUTTI_OK)
        status = push(&run);
    if (status != TUTTI_OK)
        return status;
    epoch = first;
    size_t longest = longest_staged(&run);
    if (longest != 0) {
        status = plan(&run, longest);
        if (status == TUTTI_OK)
            status = run_rounds(&run, &epoch);
        if (status != TUTTI_OK)
            return status;
    }
    status = pull(&run, first);
    if (status != TUTTI_OK)
        return status;
    /* Nobody may touch this rank's buffers after the call. */
    const tu_reference *mine = &state->references[state->rank];
    if (state->direct_inputs != 0 || state->direct_outputs != 0) {
        tu_step_publish(state, epoch);
        if (mine->in_index != 0 || mine->out_index != 0)
            status = tu_step_await_all(state, task, epoch);
    }
    if (status == TUTTI_OK)
        tu_keep_own_part(state, task, false);
    return status;
}
