/* SPDX-License-Identifier: Apache-2.0
 *
 * One hand-over: every rank stages what others need of its input, arrives, waits for those it listens to, and takes.
 * Tiny payloads are staged in the line of the flag ("inline"), others in the slot. What does not fit goes in several
 * rounds; two slots in turn let a rank stage the next round while others still read the last.
 *
 * Reductions read all ranks' inputs in rank order, so every rank computes the same bits.
 */
#include <string.h>

#include "collective/parts.h"

/* How the staging area of one round is cut: `parts` equal parts of at most `bytes` each. */
typedef struct cut {
    size_t bytes;
    int parts; /* one per rank, or 1 when all listeners take the same */
    size_t rounds;
} cut;

/* The longest part of any rank. Of all_to_all_v it is this rank's alone: the others say theirs when they arrive. */
static size_t longest_part(const tu_task *task, int size) {
    size_t longest = task->info.count;
    if (task->row->kind == TU_KIND_BARRIER)
        return 0;
    if (task->in_counts != NULL) {
        longest = 0;
        for (int i = 0; i < size; i++)
            longest = task->in_counts[i] > longest ? task->in_counts[i] : longest;
    }
    return longest * task->element;
}

static size_t capacity_of(const tu_collective *state, const tu_task *task, tutti_algorithm algorithm) {
    return algorithm == TUTTI_ALGORITHM_INLINE ? tu_line_room(task) : state->layout.slot_bytes;
}

static size_t rounds_for(size_t longest, size_t bytes) {
    return longest <= bytes ? 1 : (longest + bytes - 1) / bytes;
}

static cut cut_of(const tu_collective *state, const tu_task *task, tutti_algorithm algorithm) {
    cut made = { .parts = tu_has_parts(task->row) ? state->size : 1 };
    size_t share = capacity_of(state, task, algorithm) / (size_t)made.parts;
    size_t unit = share >= 128 ? 64 : task->element;
    made.bytes = task->row->kind == TU_KIND_BARRIER ? 1 : share / unit * unit;
    made.rounds = rounds_for(longest_part(task, state->size), made.bytes);
    return made;
}

static unsigned char *staging(const tu_collective *state, int member, uint64_t epoch, tutti_algorithm algorithm) {
    return algorithm == TUTTI_ALGORITHM_INLINE ? state->members[member]->arrive[epoch & 1].payload
                                               : tu_staging(state, member, epoch);
}

/* Bytes of round `round` of a part. */
static size_t portion(size_t bytes, const cut *cut, size_t round) {
    size_t begin = round * cut->bytes;
    return bytes <= begin ? 0 : bytes - begin < cut->bytes ? bytes - begin : cut->bytes;
}

/* ---- staging ---- */

/* What `target` shall find of this rank's input, and where that lies. */
static tu_part to_stage(const tu_collective *state, const tu_task *task, int target) {
    if (task->row->kind != TU_KIND_REDUCTION)
        return tu_part_of(task, state->rank, state->rank, target);
    if (!tu_scatters(task->row))
        return (tu_part){ task->info.count * task->element, 0, 0 };
    tu_slice slice = tu_slice_of(task, state->size, target);
    return (tu_part){ slice.count * task->element, slice.first * task->element, 0 };
}

/* The one part that all listeners take: for whom does not matter, as long as somebody listens. */
static int any_listener(const tu_collective *state, const tu_task *task) {
    if (task->row->flow == TU_FLOW_TO_ROOT)
        return task->info.root;
    if (task->row->flow == TU_FLOW_PERMUTED)
        return task->to[state->rank];
    return state->rank == 0 ? 1 : 0;
}

static void stage(tu_collective *state, const tu_task *task, uint64_t epoch, tutti_algorithm algorithm, const cut *cut,
                  size_t round) {
    unsigned char *base = staging(state, state->rank, epoch, algorithm);
    const unsigned char *in = task->in;
    tu_reference reference = { .factor = task->factor,
                               .longest = longest_part(task, state->size),
                               .given = task->given };
    tu_line *line = &state->members[state->rank]->arrive[epoch & 1];
    if (algorithm != TUTTI_ALGORITHM_INLINE)
        memcpy(line->payload, &reference, sizeof reference);
    else if (task->info.reduction == TUTTI_PREMUL_SUM)
        memcpy(line->payload + offsetof(tu_reference, factor), &task->factor, sizeof task->factor);
    else if (task->given != 0)
        memcpy(line->payload + offsetof(tu_reference, given), &task->given, sizeof task->given);
    if (cut->parts == 1) {
        int target = any_listener(state, task);
        tu_part part = target >= 0 && target != state->rank ? to_stage(state, task, target) : (tu_part){ 0, 0, 0 };
        size_t bytes = portion(part.bytes, cut, round);
        if (bytes != 0)
            tu_copy(base, in + part.in_offset + round * cut->bytes, bytes, tu_stage_flags(state, bytes));
        return;
    }
    for (int target = 0; target < state->size; target++) {
        tu_part part = to_stage(state, task, target);
        size_t bytes = portion(part.bytes, cut, round);
        if (target != state->rank && bytes != 0)
            tu_copy(base + (size_t)target * cut->bytes, in + part.in_offset + round * cut->bytes, bytes,
                    tu_stage_flags(state, bytes * (size_t)(state->size - 1)));
    }
}

/* ---- taking ---- */

static double factor_of(const tu_collective *state, int member, uint64_t epoch) {
    double factor;
    memcpy(&factor, state->members[member]->arrive[epoch & 1].payload + offsetof(tu_reference, factor), sizeof factor);
    return factor;
}

static void take_reduction(tu_collective *state, const tu_task *task, uint64_t epoch, tutti_algorithm algorithm,
                           const cut *cut, size_t round) {
    if (!tu_listens(task, state->rank, state->rank))
        return;
    tu_part mine = to_stage(state, task, state->rank);
    size_t bytes = portion(mine.bytes, cut, round);
    if (bytes == 0)
        return;
    size_t at = cut->parts == 1 ? 0 : (size_t)state->rank * cut->bytes;
    for (int member = 0; member < state->size; member++)
        state->sources[member] = member == state->rank
                                     ? (const unsigned char *)task->in + mine.in_offset + round * cut->bytes
                                     : staging(state, member, epoch, algorithm) + at;
    if (task->info.reduction == TUTTI_PREMUL_SUM)
        for (int member = 0; member < state->size; member++)
            state->factors[member] = member == state->rank ? task->factor : factor_of(state, member, epoch);
    tu_reduce((unsigned char *)task->out + round * cut->bytes, state->sources, state->size, bytes / task->element,
              (tutti_dtype)task->info.dtype, (tutti_reduction)task->info.reduction, state->factors, 0);
}

static tutti_status take_parts(tu_collective *state, const tu_task *task, uint64_t epoch, tutti_algorithm algorithm,
                               const cut *cut, size_t round) {
    for (int source = 0; source < state->size; source++) {
        if (source == state->rank || !tu_listens(task, state->rank, source))
            continue;
        tu_part part = tu_part_of(task, state->rank, source, state->rank);
        size_t bytes = portion(part.bytes, cut, round);
        const unsigned char *from =
            staging(state, source, epoch, algorithm) + (cut->parts == 1 ? 0 : (size_t)state->rank * cut->bytes);
        if (bytes != 0)
            tu_copy((unsigned char *)task->out + part.out_offset + round * cut->bytes, from, bytes, 0);
    }
    return TUTTI_OK;
}

void tu_keep_own_part(tu_collective *state, tu_task *task, bool first) {
    /* The root of a scatter in place would overwrite what rank 0 has not taken yet: it keeps its part last; all others
     * first. */
    if (task->row->kind != TU_KIND_MOVE || first == tu_deals(task->row))
        return;
    tu_part part = tu_part_of(task, state->rank, state->rank, state->rank);
    unsigned char *to = (unsigned char *)task->out + part.out_offset;
    const unsigned char *from = (const unsigned char *)task->in + part.in_offset;
    if (part.bytes == 0 || to == from)
        return;
    bool apart = to + part.bytes <= from || from + part.bytes <= to;
    if (apart && tu_out_bytes(task, state->rank, state->size) >= state->large)
        tu_copy(to, from, part.bytes, TU_KERNEL_STREAM);
    else
        memmove(to, from, part.bytes);
    /* In place the beginning of the output is rank 0's: from now on the input lies at its own place. */
    if (task->in == task->out && tu_gathers(task->row))
        task->in = to;
}

tutti_status tu_compare_splits(tu_collective *state, tu_task *task, uint64_t epoch) {
    for (int source = 0; source < state->size; source++) {
        uint64_t sent = tu_splits(state, source, epoch)[state->rank][0];
        if (sent != task->out_counts[source])
            return tu_mismatch_split(state, task, source, state->rank, sent, task->out_counts[source]);
    }
    return TUTTI_OK;
}

void tu_publish_splits(tu_collective *state, const tu_task *task, uint64_t epoch) {
    uint64_t(*splits)[2] = tu_splits(state, state->rank, epoch);
    uint64_t offset = 0;
    for (int target = 0; target < state->size; target++) {
        splits[target][0] = task->in_counts[target];
        splits[target][1] = task->in_offsets != NULL ? task->in_offsets[target] : offset;
        offset += task->in_counts[target];
    }
}

/* ---- one round ---- */

static tutti_status await_sources(tu_collective *state, tu_task *task, uint64_t epoch) {
    if (task->row->flow == TU_FLOW_ALL)
        return tu_epoch_await_all(state, task, epoch);
    bool all = true;
    for (int member = 0; member < state->size; member++) {
        if (member == state->rank)
            continue;
        if (!tu_listens(task, state->rank, member)) {
            all = false;
            continue;
        }
        tutti_status status = tu_epoch_await(state, task, epoch, member);
        if (status != TUTTI_OK)
            return status;
    }
    if (all)
        state->cleared = epoch - 1;
    return TUTTI_OK;
}

static tutti_status begin(tu_collective *state, tu_task *task, tutti_algorithm algorithm, const cut *cut, size_t round,
                          uint64_t *epoch) {
    tutti_status status = tu_epoch_enter(state, task, epoch);
    if (status != TUTTI_OK)
        return status;
    if (task->row->kind != TU_KIND_BARRIER)
        stage(state, task, *epoch, algorithm, cut, round);
    if (task->row->in == TU_EXTENT_SPLITS && round == 0)
        tu_publish_splits(state, task, *epoch);
    tu_epoch_arrive(state, task, *epoch);
    return TUTTI_OK;
}

/* How many rounds all_to_all_v takes, once everybody has said how long its longest part is. */
static size_t agreed_rounds(const tu_collective *state, uint64_t epoch, const cut *cut) {
    size_t rounds = cut->rounds;
    for (int member = 0; member < state->size; member++) {
        tu_reference reference;
        memcpy(&reference, state->members[member]->arrive[epoch & 1].payload, sizeof reference);
        size_t theirs = rounds_for(reference.longest, cut->bytes);
        rounds = theirs > rounds ? theirs : rounds;
    }
    return rounds;
}

/* Of several tasks as one: those that every rank has given. */
static void compare_given(const tu_collective *state, tu_task *task, uint64_t epoch) {
    for (int member = 0; member < state->size; member++) {
        uint64_t given;
        memcpy(&given, state->members[member]->arrive[epoch & 1].payload + offsetof(tu_reference, given), sizeof given);
        if (given < task->valid)
            task->valid = given;
    }
}

static tutti_status end(tu_collective *state, tu_task *task, tutti_algorithm algorithm, cut *cut, size_t round,
                        uint64_t epoch) {
    tutti_status status = await_sources(state, task, epoch);
    if (status == TUTTI_OK && task->row->in == TU_EXTENT_SPLITS && round == 0) {
        cut->rounds = agreed_rounds(state, epoch, cut);
        status = tu_compare_splits(state, task, epoch);
    }
    if (status != TUTTI_OK || task->row->kind == TU_KIND_BARRIER)
        return status;
    if (__builtin_expect(task->given != 0, 0))
        compare_given(state, task, epoch);
    if (task->row->kind == TU_KIND_REDUCTION)
        take_reduction(state, task, epoch, algorithm, cut, round);
    else
        status = take_parts(state, task, epoch, algorithm, cut, round);
    return status;
}

/* ---- the whole ---- */

/* A long reduction whose inputs are all symmetric: everybody reads them where they lie. Sets *done; else nothing has
 * been moved. */
static tutti_status reduce_where_they_lie(tu_collective *state, tu_task *task, bool *done) {
    *done = false;
    uint64_t epoch;
    tutti_status status = tu_epoch_enter(state, task, &epoch);
    if (status != TUTTI_OK)
        return status;
    tu_reference reference;
    tu_refer(state, task, &reference);
    if (task->in == task->out)
        reference.in_index = 0; /* others read it while this rank would write it */
    memcpy(state->members[state->rank]->arrive[epoch & 1].payload, &reference, sizeof reference);
    tu_epoch_arrive(state, task, epoch);
    status = tu_epoch_await_all(state, task, epoch);
    if (status != TUTTI_OK)
        return status;
    tu_read_references(state, epoch);
    if (state->direct_inputs != state->size)
        return TUTTI_OK;
    state->direct_outputs = 0;
    for (int member = 0; member < state->size; member++) {
        unsigned char *in;
        status = tu_resolve_in(state, task, member, &in);
        if (status != TUTTI_OK)
            return status;
        state->sources[member] = in;
        state->factors[member] = state->references[member].factor;
    }
    if (tu_listens(task, state->rank, state->rank))
        tu_reduce(task->out, state->sources, state->size, task->info.count, (tutti_dtype)task->info.dtype,
                  (tutti_reduction)task->info.reduction, state->factors, 0);
    *done = true;
    tu_step_publish(state, epoch);
    return tu_step_await_all(state, task, epoch);
}

/* Nothing to stage and nothing to take. */
static tutti_status barrier(tu_collective *state, tu_task *task) {
    uint64_t epoch;
    tutti_status status = tu_epoch_come(state, task, &epoch);
    if (status != TUTTI_OK)
        return status;
    return tu_epoch_await_all(state, task, epoch);
}

/* The shortest way of a frequent call: what the general steps below do, for one round in the line. */
static tutti_status reduce_inline(tu_collective *state, tu_task *task, uint64_t epoch, size_t bytes) {
    unsigned char *payload = state->members[state->rank]->arrive[epoch & 1].payload;
    if (bytes == sizeof(uint64_t))
        memcpy(payload, task->in, sizeof(uint64_t));
    else if (bytes != 0)
        memcpy(payload, task->in, bytes);
    tu_epoch_arrive(state, task, epoch);
    for (int member = 0; member < state->size; member++)
        state->sources[member] = state->members[member]->arrive[epoch & 1].payload;
    state->sources[state->rank] = task->in; /* one's own line may still be on its way out */
    tutti_status status = tu_epoch_await_all(state, task, epoch);
    if (status == TUTTI_OK && bytes != 0)
        tu_reduce(task->out, state->sources, state->size, task->info.count, (tutti_dtype)task->info.dtype,
                  (tutti_reduction)task->info.reduction, NULL, 0);
    return status;
}

static tutti_status tiny_all_reduce(tu_collective *state, tu_task *task) {
    uint64_t epoch;
    tutti_status status = tu_epoch_enter(state, task, &epoch);
    return status == TUTTI_OK ? reduce_inline(state, task, epoch, task->info.count * task->element) : status;
}

tutti_status tu_one_shot(tu_collective *state, tu_task *task, tutti_algorithm algorithm) {
    const tu_operation_row *row = task->row;
    if (row->kind == TU_KIND_BARRIER)
        return barrier(state, task);
    bool reduces_whole = row->kind == TU_KIND_REDUCTION && row->in == TU_EXTENT_WHOLE;
    if (algorithm == TUTTI_ALGORITHM_INLINE && reduces_whole && row->flow == TU_FLOW_ALL &&
        task->info.reduction != TUTTI_PREMUL_SUM && task->given == 0)
        return tiny_all_reduce(state, task);
    cut made = cut_of(state, task, algorithm);
    tutti_status status = TUTTI_OK;
    if (made.rounds > 1 && reduces_whole) {
        bool done;
        status = reduce_where_they_lie(state, task, &done);
        if (status != TUTTI_OK || done)
            return status;
    }
    bool at_once = made.rounds == 1; /* the whole input is staged before anything is overwritten */
    for (size_t round = 0; round < made.rounds && status == TUTTI_OK; round++) {
        uint64_t epoch;
        status = begin(state, task, algorithm, &made, round, &epoch);
        if (status == TUTTI_OK && round == 0) /* while the others are on their way */
            tu_keep_own_part(state, task, true);
        if (status == TUTTI_OK && round == 0 && at_once)
            tu_keep_own_part(state, task, false);
        if (status == TUTTI_OK)
            status = end(state, task, algorithm, &made, round, epoch);
    }
    if (status == TUTTI_OK && !at_once)
        tu_keep_own_part(state, task, false);
    return status;
}

/* Whether the task can be published at once, without waiting, and finished in one round. */
bool tu_one_shot_can_start(const tu_collective *state, const tu_task *task, tutti_algorithm algorithm) {
    if (algorithm != TUTTI_ALGORITHM_INLINE && algorithm != TUTTI_ALGORITHM_ONE_SHOT)
        return false;
    uint64_t next = state->epoch + 1;
    bool clear = (int64_t)(state->cleared - (next - 2)) >= 0;
    return clear && task->row->in != TU_EXTENT_SPLITS && cut_of(state, task, algorithm).rounds == 1;
}

tutti_status tu_one_shot_start(tu_collective *state, tu_task *task, tutti_algorithm algorithm) {
    cut made = cut_of(state, task, algorithm);
    tutti_status status = begin(state, task, algorithm, &made, 0, &task->open_epoch);
    if (status == TUTTI_OK)
        tu_keep_own_part(state, task, true);
    return status;
}

tutti_status tu_one_shot_finish(tu_collective *state, tu_task *task, tutti_algorithm algorithm) {
    cut made = cut_of(state, task, algorithm);
    tutti_status status = end(state, task, algorithm, &made, 0, task->open_epoch);
    if (status == TUTTI_OK)
        tu_keep_own_part(state, task, false);
    return status;
}

void tu_one_shot_peek(const tu_collective *state, const tu_task *task, int member, void *part) {
    size_t bytes = task->info.count * task->element;
    if (member == state->rank)
        memcpy(part, task->in, bytes);
    else
        memcpy(part, staging(state, member, task->open_epoch, (tutti_algorithm)task->info.algorithm), bytes);
}
