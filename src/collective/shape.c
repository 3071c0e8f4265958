/* SPDX-License-Identifier: Apache-2.0
 *
 * What a task moves and who owns which part of it, worked out from its row in the table of operations.
 */
#include "collective/collective.h"

#define SLICE_ALIGN 64 /* bytes: slices of a reduction begin on cache lines of the buffer */

static size_t sum_before(const size_t *counts, int end) {
    size_t sum = 0;
    for (int i = 0; i < end; i++)
        sum += counts[i];
    return sum;
}

/* ---- reductions ---- */

tu_slice tu_slice_of(const tu_task *task, int size, int owner) {
    size_t count = task->info.count;
    if (task->row->in == TU_EXTENT_EACH)
        return (tu_slice){ (size_t)owner * count, count };
    if (task->row->in == TU_EXTENT_SHARES)
        return (tu_slice){ sum_before(task->in_counts, owner), task->in_counts[owner] };
    size_t align = SLICE_ALIGN / task->element;
    size_t share = (count + (size_t)size - 1) / (size_t)size;
    share = (share + align - 1) / align * align;
    size_t first = share * (size_t)owner;
    if (first >= count)
        return (tu_slice){ count, 0 };
    return (tu_slice){ first, count - first < share ? count - first : share };
}

bool tu_wants_all(const tu_task *task, int member) {
    return !tu_scatters(task->row) && tu_listens(task, member, member);
}

/* ---- moves ---- */

bool tu_listens(const tu_task *task, int listener, int source) {
    switch (task->row->flow) {
    case TU_FLOW_TO_ROOT:
        return listener == task->info.root;
    case TU_FLOW_FROM_ROOT:
        return source == task->info.root;
    case TU_FLOW_PERMUTED:
        return task->to[source] == listener;
    default:
        return true;
    }
}

/* How many of the ranks before `source` send to the same rank. */
static size_t senders_before(const int *to, int source) {
    size_t senders = 0;
    for (int i = 0; i < source; i++)
        senders += to[i] == to[source];
    return senders;
}

/* Where part `index` of a buffer that is cut by counts begins. */
static size_t place_of(const size_t *counts, const size_t *offsets, int index) {
    return offsets != NULL ? offsets[index] : sum_before(counts, index);
}

/* Of all_to_all_v a rank knows what it sends and what it expects, and not what others do. */
static tu_part split_of(const tu_task *task, int rank, int source, int target) {
    tu_part part = { 0, 0, 0 };
    if (source == rank) {
        part.bytes = task->in_counts[target] * task->element;
        part.in_offset = place_of(task->in_counts, task->in_offsets, target) * task->element;
    }
    if (target == rank) {
        part.bytes = task->out_counts[source] * task->element;
        part.out_offset = place_of(task->out_counts, task->out_offsets, source) * task->element;
    }
    return part;
}

tu_part tu_part_of(const tu_task *task, int rank, int source, int target) {
    const tu_operation_row *row = task->row;
    if (!tu_listens(task, target, source))
        return (tu_part){ 0, 0, 0 };
    if (row->in == TU_EXTENT_SPLITS)
        return split_of(task, rank, source, target);
    size_t bytes = (row->in == TU_EXTENT_SHARE ? task->in_counts[source] : task->info.count) * task->element;
    tu_part part = { bytes, row->in == TU_EXTENT_EACH ? (size_t)target * bytes : 0, 0 };
    if (row->out == TU_EXTENT_EACH)
        part.out_offset = (size_t)source * bytes;
    else if (row->out == TU_EXTENT_SHARES)
        part.out_offset = place_of(task->in_counts, task->out_offsets, source) * task->element;
    else if (row->out == TU_EXTENT_SENDERS)
        part.out_offset = senders_before(task->to, source) * bytes;
    return part;
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

static size_t elements_of(const tu_task *task, tu_extent kind, int rank, int size, const size_t *counts,
                          const size_t *offsets) {
    switch (kind) {
    case TU_EXTENT_WHOLE:
        return task->info.count;
    case TU_EXTENT_EACH:
        return task->info.count * (size_t)size;
    case TU_EXTENT_SHARE:
        return task->in_counts[rank];
    case TU_EXTENT_SHARES:
        return extent(task->in_counts, offsets, size);
    case TU_EXTENT_SPLITS:
        return extent(counts, offsets, size);
    case TU_EXTENT_SENDERS: {
        size_t senders = 0;
        for (int i = 0; i < size; i++)
            senders += task->to[i] == rank;
        return task->info.count * senders;
    }
    default:
        return 0;
    }
}

size_t tu_in_bytes(const tu_task *task, int rank, int size) {
    const tu_operation_row *row = task->row;
    if ((row->flow == TU_FLOW_FROM_ROOT && rank != task->info.root) ||
        (row->flow == TU_FLOW_PERMUTED && task->to[rank] < 0))
        return 0;
    if (row->in == TU_EXTENT_ROWS)
        return task->vdev.in_rows * task->info.count * task->element;
    if (row->in == TU_EXTENT_TILES)
        return task->tiles.in_bytes;
    return elements_of(task, row->in, rank, size, task->in_counts, task->in_offsets) * task->element;
}

size_t tu_out_bytes(const tu_task *task, int rank, int size) {
    const tu_operation_row *row = task->row;
    if (row->flow == TU_FLOW_TO_ROOT && rank != task->info.root)
        return 0;
    if (row->out == TU_EXTENT_ROWS)
        return task->vdev.out_rows * task->info.count * task->element;
    if (row->out == TU_EXTENT_TILES)
        return task->tiles.count != 0 ? task->tiles.list[0].columns * task->element : 0;
    return elements_of(task, row->out, rank, size, task->out_counts, task->out_offsets) * task->element;
}
