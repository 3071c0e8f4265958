/* SPDX-License-Identifier: Apache-2.0
 *
 * What a task moves and who owns which part of it: the one place that knows the collectives by their shapes.
 */
#include "collective/collective.h"

#define SLICE_ALIGN 64 /* bytes: slices of a reduction begin on cache lines of the buffer */

bool tu_is_reduction(tu_operation operation) {
    return operation == TU_OPERATION_ALL_REDUCE || operation == TU_OPERATION_REDUCE ||
           operation == TU_OPERATION_REDUCE_SCATTER || operation == TU_OPERATION_REDUCE_SCATTER_V;
}

/* ---- reductions ---- */

static size_t sum_before(const size_t *counts, int end) {
    size_t sum = 0;
    for (int i = 0; i < end; i++)
        sum += counts[i];
    return sum;
}

tu_slice tu_slice_of(const tu_task *task, int size, int owner) {
    size_t count = task->info.count;
    switch (task->shape) {
    case TU_OPERATION_REDUCE_SCATTER:
        return (tu_slice){ (size_t)owner * count, count };
    case TU_OPERATION_REDUCE_SCATTER_V:
        return (tu_slice){ sum_before(task->in_counts, owner), task->in_counts[owner] };
    default: {
        size_t align = SLICE_ALIGN / task->element;
        size_t share = (count + (size_t)size - 1) / (size_t)size;
        share = (share + align - 1) / align * align;
        size_t first = share * (size_t)owner;
        if (first >= count)
            return (tu_slice){ count, 0 };
        return (tu_slice){ first, count - first < share ? count - first : share };
    }
    }
}

bool tu_wants_all(const tu_task *task, int member) {
    return task->shape == TU_OPERATION_ALL_REDUCE || (task->shape == TU_OPERATION_REDUCE && member == task->info.root);
}

/* ---- moves ---- */

bool tu_move_shared(tu_operation operation) {
    return operation == TU_OPERATION_ALL_GATHER || operation == TU_OPERATION_ALL_GATHER_V ||
           operation == TU_OPERATION_BROADCAST || operation == TU_OPERATION_GATHER || operation == TU_OPERATION_PERMUTE;
}

/* How many of the ranks before `source` send to the same rank. */
static size_t senders_before(const int *to, int source) {
    size_t senders = 0;
    for (int i = 0; i < source; i++)
        senders += to[i] == to[source];
    return senders;
}

tu_part tu_part_of(const tu_task *task, int rank, int size, int source, int target) {
    (void)size;
    size_t bytes = task->info.count * task->element;
    size_t from = (size_t)source, to = (size_t)target;
    switch (task->shape) {
    case TU_OPERATION_ALL_GATHER:
        return (tu_part){ bytes, 0, from * bytes };
    case TU_OPERATION_ALL_GATHER_V: {
        size_t offset = task->out_offsets != NULL ? task->out_offsets[source] : sum_before(task->in_counts, source);
        return (tu_part){ task->in_counts[source] * task->element, 0, offset * task->element };
    }
    case TU_OPERATION_BROADCAST:
        return source == task->info.root ? (tu_part){ bytes, 0, 0 } : (tu_part){ 0, 0, 0 };
    case TU_OPERATION_GATHER:
        return target == task->info.root ? (tu_part){ bytes, 0, from * bytes } : (tu_part){ 0, 0, 0 };
    case TU_OPERATION_SCATTER:
        return source == task->info.root ? (tu_part){ bytes, to * bytes, 0 } : (tu_part){ 0, 0, 0 };
    case TU_OPERATION_ALL_TO_ALL:
        return (tu_part){ bytes, to * bytes, from * bytes };
    case TU_OPERATION_ALL_TO_ALL_V: {
        tu_part part = { 0, 0, 0 };
        if (source == rank) {
            part.bytes = task->in_counts[target] * task->element;
            part.in_offset =
                (task->in_offsets != NULL ? task->in_offsets[target] : sum_before(task->in_counts, target)) *
                task->element;
        }
        if (target == rank) {
            part.bytes = task->out_counts[source] * task->element;
            part.out_offset =
                (task->out_offsets != NULL ? task->out_offsets[source] : sum_before(task->out_counts, source)) *
                task->element;
        }
        return part;
    }
    case TU_OPERATION_PERMUTE:
        return task->to[source] == target ? (tu_part){ bytes, 0, senders_before(task->to, source) * bytes }
                                          : (tu_part){ 0, 0, 0 };
    default:
        return (tu_part){ 0, 0, 0 };
    }
}

/* ---- buffers ---- */

/* The end of the furthest part of a buffer. */
static size_t extent(const size_t *counts, const size_t *offsets, int size) {
    if (offsets == NULL)
        return sum_before(counts, size);
    size_t end = 0;
    for (int i = 0; i < size; i++)
        if (counts[i] != 0 && offsets[i] + counts[i] > end)
            end = offsets[i] + counts[i];
    return end;
}

size_t tu_in_bytes(const tu_task *task, int rank, int size) {
    size_t count = task->info.count;
    switch (task->shape) {
    case TU_OPERATION_REDUCE_SCATTER:
    case TU_OPERATION_ALL_TO_ALL:
        count *= (size_t)size;
        break;
    case TU_OPERATION_SCATTER:
        count = rank == task->info.root ? count * (size_t)size : 0;
        break;
    case TU_OPERATION_BROADCAST:
        count = rank == task->info.root ? count : 0;
        break;
    case TU_OPERATION_REDUCE_SCATTER_V:
        count = sum_before(task->in_counts, size);
        break;
    case TU_OPERATION_ALL_GATHER_V:
        count = task->in_counts[rank];
        break;
    case TU_OPERATION_ALL_TO_ALL_V:
        count = extent(task->in_counts, task->in_offsets, size);
        break;
    case TU_OPERATION_PERMUTE:
        count = task->to[rank] >= 0 ? count : 0;
        break;
    case TU_OPERATION_BARRIER:
        return 0;
    default:
        break;
    }
    return count * task->element;
}

size_t tu_out_bytes(const tu_task *task, int rank, int size) {
    size_t count = task->info.count;
    switch (task->shape) {
    case TU_OPERATION_ALL_GATHER:
    case TU_OPERATION_ALL_TO_ALL:
        count *= (size_t)size;
        break;
    case TU_OPERATION_GATHER:
        count = rank == task->info.root ? count * (size_t)size : 0;
        break;
    case TU_OPERATION_REDUCE:
        count = rank == task->info.root ? count : 0;
        break;
    case TU_OPERATION_REDUCE_SCATTER_V:
        count = task->in_counts[rank];
        break;
    case TU_OPERATION_ALL_GATHER_V:
        count = extent(task->in_counts, task->out_offsets, size);
        break;
    case TU_OPERATION_ALL_TO_ALL_V:
        count = extent(task->out_counts, task->out_offsets, size);
        break;
    case TU_OPERATION_PERMUTE: {
        size_t senders = 0;
        for (int i = 0; i < size; i++)
            senders += task->to[i] == rank;
        count *= senders;
        break;
    }
    case TU_OPERATION_BARRIER:
        return 0;
    default:
        break;
    }
    return count * task->element;
}
