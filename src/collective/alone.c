/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups in which nobody else is there: of one rank, and fake ones.
 */
#include <string.h>

#include "collective/collective.h"

tutti_status tu_alone(tu_task *task) {
    if (task->shape == TU_OPERATION_BARRIER)
        return TUTTI_OK;
    if (task->shape == TU_OPERATION_ALL_TO_ALL_VDEV)
        return task->custom(NULL, task);
    if (tu_is_reduction(task->shape)) {
        if (task->info.count != 0)
            tu_reduce(task->out, &task->in, 1, task->info.count, (tutti_dtype)task->info.dtype,
                      (tutti_reduction)task->info.reduction, &task->factor, 0);
        return TUTTI_OK;
    }
    if (task->shape == TU_OPERATION_ALL_TO_ALL_V && task->in_counts[0] != task->out_counts[0])
        return tu_error(TUTTI_ERROR_MISMATCH, "%s: rank 0 sends %zu elements to itself and expects %zu",
                        tu_operation_name((tu_operation)task->info.operation), task->in_counts[0], task->out_counts[0]);
    tu_part part = tu_part_of(task, 0, 1, 0, 0);
    if (part.bytes != 0)
        memmove((unsigned char *)task->out + part.out_offset, (const unsigned char *)task->in + part.in_offset,
                part.bytes);
    return TUTTI_OK;
}

/* All-gather copies the input into every slot; every other operation leaves its output as it was. */
void tu_fake(tu_task *task) {
    if (task->shape != TU_OPERATION_ALL_GATHER && task->shape != TU_OPERATION_ALL_GATHER_V)
        return;
    int rank = task->group->rank, size = task->group->size;
    size_t bytes = tu_in_bytes(task, rank, size);
    for (int i = 0; i < size && bytes != 0; i++) {
        tu_part part = tu_part_of(task, rank, size, i, rank);
        memmove((unsigned char *)task->out + part.out_offset, task->in, part.bytes < bytes ? part.bytes : bytes);
    }
}
