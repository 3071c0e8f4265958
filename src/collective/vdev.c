/* SPDX-License-Identifier: Apache-2.0
 *
 * all_to_all whose splits are data that only the sender knows: everybody arrives and says where its rows and splits
 * lie; then each rank reads the splits of all others, computes where what goes, and copies its rows from where they
 * lie. What it received is written back last, when nobody reads splits any more.
 *
 * The three forms differ in how rows are ordered:
 *     vdev        input by target rank;                          output by source rank
 *     2d          input by (target rank, expert);                output by (expert, source rank), experts aligned
 *     2d_offset   input by (expert, target rank), with offsets;  output by (source rank, expert)
 */
#include <stdlib.h>
#include <string.h>

#include <tutti/named.h>

#include "collective/named.h"
#include "collective/parts.h"

/* What one rank sends to this one, expert by expert. */
typedef struct sender {
    const unsigned char *rows;
    size_t rows_room; /* bytes from there to the end of its block */
    const int64_t *splits;
} sender;

static bool has_offsets(const tu_task *task) {
    return task->row->rows == TU_ROWS_AT_OFFSETS;
}

/* One number that the sender wrote, and may spoil meanwhile: read once. */
static int64_t read_split(const int64_t *split) {
    return __atomic_load_n(split, __ATOMIC_RELAXED);
}

/* Rows that go to `target` for `expert`, and where they begin in the sender's input; -1: beyond all numbers. */
static int64_t sent_rows(const tu_task *task, int size, const int64_t *splits, int target, int expert, int64_t *begin) {
    int experts = task->vdev.experts;
    if (has_offsets(task)) {
        int slot = expert * size + target;
        *begin = read_split(&splits[experts * size + slot]);
        return read_split(&splits[slot]);
    }
    int slot = target * experts + expert;
    *begin = 0;
    for (int i = 0; i < slot; i++)
        if (__builtin_add_overflow(*begin, read_split(&splits[i]), begin)) {
            *begin = -1;
            break;
        }
    return read_split(&splits[slot]);
}

/* The slot of the output that rows from `source` for `expert` go to. */
static int out_slot(const tu_task *task, int size, int source, int expert) {
    return task->row->rows == TU_ROWS_BY_EXPERT ? expert * size + source : source * task->vdev.experts + expert;
}

static tutti_status too_many(const tu_task *task, int rank, int64_t rows) {
    tu_error(TUTTI_ERROR_MISMATCH, "%s %llu of group %s: rank %d receives %lld rows, and its output has room for %zu",
             task->row->name, (unsigned long long)task->info.sequence, task->group->name, rank, (long long)rows,
             task->vdev.out_rows);
    tu_error_at_fault(rank);
    return tu_error_where(task->group->name, task->row->name, task->info.sequence, rank);
}

/* Where the next expert begins, behind `used` rows of this one and the gap that aligns it. Beyond what can be counted
 * nothing has room any more: the end of all numbers. */
static int64_t next_expert(int64_t begin, int64_t used, int64_t align) {
    int64_t whole = used / align + (used % align != 0 || used == 0), rows, next;
    return __builtin_mul_overflow(whole, align, &rows) || __builtin_add_overflow(begin, rows, &next) ? INT64_MAX : next;
}

/* Counts and offsets of the output's slots, in `plan`: as out_splits_offsets will have them. The splits are what others
 * wrote: anything may be there. */
static tutti_status lay_out(const tu_task *task, int rank, int size, const sender *senders, int64_t *plan) {
    int slots = size * task->vdev.experts;
    for (int source = 0; source < size; source++)
        for (int expert = 0; expert < task->vdev.experts; expert++) {
            int64_t begin;
            plan[out_slot(task, size, source, expert)] =
                sent_rows(task, size, senders[source].splits, rank, expert, &begin);
        }
    bool aligned = task->row->rows == TU_ROWS_BY_EXPERT;
    int64_t at = 0, expert_begin = 0;
    for (int slot = 0; slot < slots; slot++) {
        int64_t end;
        plan[slots + slot] = at;
        if (plan[slot] < 0)
            return too_many(task, rank, plan[slot]);
        if (__builtin_add_overflow(at, plan[slot], &end))
            end = INT64_MAX;
        if (plan[slot] != 0 && (uint64_t)end > task->vdev.out_rows)
            return too_many(task, rank, end);
        at = end;
        if (aligned && (slot + 1) % size == 0)
            at = expert_begin = next_expert(expert_begin, at - expert_begin, task->vdev.align);
    }
    return TUTTI_OK;
}

static tutti_status copy_rows(const tu_task *task, int rank, int size, const sender *senders, const int64_t *plan) {
    size_t row = task->info.count * task->element;
    int slots = size * task->vdev.experts;
    for (int i = 0; i < size; i++) {
        int source = (rank + i) % size;
        for (int expert = 0; expert < task->vdev.experts; expert++) {
            int slot = out_slot(task, size, source, expert);
            int64_t begin;
            int64_t rows = sent_rows(task, size, senders[source].splits, rank, expert, &begin);
            size_t room = senders[source].rows_room / row;
            if (rows != plan[slot] || begin < 0 ||
                (rows > 0 && ((uint64_t)begin > room || (uint64_t)rows > room - (uint64_t)begin)))
                return tu_garbage(task->state, task, source,
                                  "splits that point outside of its rows, or changed meanwhile");
            if (rows > 0)
                tu_copy((unsigned char *)task->out + (size_t)plan[slots + slot] * row,
                        senders[source].rows + (size_t)begin * row, (size_t)rows * row, 0);
        }
    }
    return TUTTI_OK;
}

/* Arrives and finds out where the others' rows and splits lie. */
static tutti_status meet(tu_collective *state, tu_task *task, uint64_t *epoch, sender *senders) {
    tutti_status status = tu_epoch_enter(state, task, epoch);
    if (status != TUTTI_OK)
        return status;
    tu_reference reference = { .factor = 1 };
    tu_symmetric found;
    if (tu_symmetric_find(state->memory, task->in, 1, &found)) {
        reference.in_index = found.index;
        reference.in_offset = found.offset;
    }
    if (tu_symmetric_find(state->memory, task->vdev.in_splits, sizeof(int64_t), &found)) {
        reference.out_index = found.index;
        reference.out_offset = found.offset;
    }
    memcpy(state->members[state->rank]->arrive[*epoch & 1].payload, &reference, sizeof reference);
    tu_epoch_arrive(state, task, *epoch);
    status = tu_epoch_await_all(state, task, *epoch);
    if (status != TUTTI_OK)
        return status;
    tu_read_references(state, *epoch);
    for (int source = 0; source < state->size && status == TUTTI_OK; source++) {
        unsigned char *rows = NULL, *splits;
        size_t rows_room = 0, splits_room;
        size_t needed =
            (size_t)state->size * (size_t)task->vdev.experts * sizeof(int64_t) * (has_offsets(task) ? 2 : 1);
        const tu_reference *theirs = &state->references[source];
        status = tu_resolve(state, task, source, theirs->out_index, theirs->out_offset, &splits, &splits_room);
        if (status == TUTTI_OK && splits_room < needed)
            status = tu_garbage(state, task, source, "splits that lie outside of its block");
        if (status == TUTTI_OK && theirs->in_index != 0) /* 0: it has no rows at all */
            status = tu_resolve(state, task, source, theirs->in_index, theirs->in_offset, &rows, &rows_room);
        if (status == TUTTI_OK)
            senders[source] = (sender){ rows, rows_room, (const int64_t *)(const void *)splits };
    }
    return status;
}

static tutti_status run(tu_collective *state, tu_task *task) {
    int rank = task->group->rank, size = task->group->size;
    size_t slots = (size_t)size * (size_t)task->vdev.experts;
    sender *senders = calloc((size_t)size, sizeof *senders);
    int64_t *plan = calloc(2 * slots, sizeof *plan);
    tutti_status status = TUTTI_OK;
    uint64_t epoch = 0;
    if (senders == NULL || plan == NULL)
        status = tu_error_memory("the splits of an all_to_all", 2 * slots * sizeof *plan);
    else if (state == NULL)
        senders[0] = (sender){ task->in, SIZE_MAX, task->vdev.in_splits };
    else
        status = meet(state, task, &epoch, senders);
    if (status == TUTTI_OK)
        status = lay_out(task, rank, size, senders, plan);
    if (status == TUTTI_OK)
        status = copy_rows(task, rank, size, senders, plan);
    if (status == TUTTI_OK && state != NULL) {
        tu_step_publish(state, epoch);
        status = tu_step_await_all(state, task, epoch);
    }
    if (status == TUTTI_OK)
        memcpy(task->vdev.out_splits, plan, 2 * slots * sizeof *plan);
    free(senders);
    free(plan);
    return status;
}

/* ---- the public calls ---- */

/* What this rank wants to send must lie in its input. */
static tutti_status check_splits(const tu_task *task, int size) {
    const char *name = task->row->name;
    int slots = size * task->vdev.experts;
    uint64_t total = 0;
    for (int i = 0; i < slots; i++) {
        int64_t rows = task->vdev.in_splits[i],
                begin = has_offsets(task) ? task->vdev.in_splits[slots + i] : (int64_t)total;
        if (rows < 0 || begin < 0 || (rows != 0 && (uint64_t)begin + (uint64_t)rows > task->vdev.in_rows))
            return tu_error(TUTTI_ERROR_RANGE, "%s: split %d is %lld rows from row %lld on; the input has %zu rows",
                            name, i, (long long)rows, (long long)begin, task->vdev.in_rows);
        total += (uint64_t)rows;
    }
    return TUTTI_OK;
}

static tutti_status check_rows(const tu_task *task, const tutti_rows *rows) {
    const char *name = task->row->name;
    size_t element = tutti_dtype_size(rows->dtype), in_bytes, out_bytes, row;
    if (element == 0)
        return tu_error(TUTTI_ERROR_TYPE, "%s: %d is no dtype", name, (int)rows->dtype);
    if (__builtin_mul_overflow(rows->row, element, &row) || __builtin_mul_overflow(row, rows->in_rows, &in_bytes) ||
        __builtin_mul_overflow(row, rows->out_rows, &out_bytes))
        return tu_error(TUTTI_ERROR_RANGE, "%s: the rows are more than memory can have", name);
    const unsigned char *in = rows->in, *out = rows->out;
    if (in_bytes != 0 && out_bytes != 0 && in < out + out_bytes && out < in + in_bytes)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: in and out overlap", name);
    return TUTTI_OK;
}

static tutti_status check_symmetric(tutti_group *group, tu_operation operation, const tutti_rows *rows,
                                    const tu_task *task) {
    size_t row = rows->row * tutti_dtype_size(rows->dtype);
    size_t slots = (size_t)group->size * (size_t)task->vdev.experts * sizeof(int64_t);
    tutti_status status = tu_named_symmetric(group, operation, "the input", rows->in, rows->in_rows * row);
    if (status == TUTTI_OK)
        status = tu_named_symmetric(group, operation, "in_splits", task->vdev.in_splits,
                                    has_offsets(task) ? 2 * slots : slots);
    if (status == TUTTI_OK)
        status = tu_named_symmetric(group, operation, "the output", rows->out, rows->out_rows * row);
    if (status == TUTTI_OK)
        status = tu_named_symmetric(group, operation, "out_splits_offsets", task->vdev.out_splits, 2 * slots);
    return status;
}

/* Splits on a device are read there. */
static bool on_host(tutti_group *group, const int64_t *splits) {
    tutti_memory *memory = group->world->fake ? NULL : tutti_memory_find(group->world, splits);
    return memory == NULL || memory->device == TUTTI_CPU;
}

static tutti_status submit(tutti_group *group, tu_operation operation, const tutti_rows *given, int experts,
                           int64_t align, const int64_t *in_splits, int64_t *out_splits, const tutti_call *call) {
    const char *name = tu_operation_name(operation);
    tutti_rows rows = TUTTI_ROWS_INIT;
    if (given == NULL || in_splits == NULL || out_splits == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: rows, splits and out_splits_offsets must not be NULL", name);
    tutti_status status = tu_options_copy("tutti_rows", given, &rows, sizeof rows);
    if (status != TUTTI_OK)
        return status;
    if (rows.row == 0)
        rows.row = 1;
    if (experts < 1 || align < 1)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: experts (%d) and major_align (%lld) must be at least 1", name,
                        experts, (long long)align);
    if (group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the group is NULL", name);
    tu_task task = {
        .group = group,
        .row = &tu_operations[operation],
        .in = rows.in,
        .out = rows.out,
        .custom = run,
        .detail = (uint64_t)experts << 32 ^ (uint64_t)align,
        .vdev = { in_splits, out_splits, rows.in_rows, rows.out_rows, experts, align },
        .info = { .operation = (uint8_t)operation, .count = rows.row, .dtype = (uint8_t)rows.dtype, .root = -1 }
    };
    if (group == TUTTI_NON_GROUP_MEMBER)
        return tu_submit(&task, call);
    status = check_rows(&task, &rows);
    if (status == TUTTI_OK)
        status = check_symmetric(group, operation, &rows, &task);
    if (status == TUTTI_OK && on_host(group, in_splits))
        status = check_splits(&task, group->size);
    return status == TUTTI_OK ? tu_submit(&task, call) : status;
}

tutti_status tutti_all_to_all_vdev(tutti_group *group, const tutti_rows *rows, const int64_t *in_splits,
                                   int64_t *out_splits_offsets, const tutti_call *call) {
    return submit(group, TU_OPERATION_ALL_TO_ALL_VDEV, rows, 1, 1, in_splits, out_splits_offsets, call);
}

tutti_status tutti_all_to_all_vdev_2d(tutti_group *group, const tutti_rows *rows, int experts, int64_t major_align,
                                      const int64_t *in_splits, int64_t *out_splits_offsets, const tutti_call *call) {
    return submit(group, TU_OPERATION_ALL_TO_ALL_VDEV_2D, rows, experts, major_align, in_splits, out_splits_offsets,
                  call);
}

tutti_status tutti_all_to_all_vdev_2d_offset(tutti_group *group, const tutti_rows *rows, int experts,
                                             const int64_t *in_splits_offsets, int64_t *out_splits_offsets,
                                             const tutti_call *call) {
    return submit(group, TU_OPERATION_ALL_TO_ALL_VDEV_2D_OFFSET, rows, experts, 1, in_splits_offsets,
                  out_splits_offsets, call);
}
