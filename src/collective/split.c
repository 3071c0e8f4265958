/* SPDX-License-Identifier: Apache-2.0
 *
 * reduce_scatter_out that splits the last dimension: a rank's part is a stretch of every row. The inputs are symmetric
 * and read where they lie.
 */
#include <stdlib.h>
#include <string.h>

#include "collective/named.h"
#include "collective/parts.h"

static tutti_status reduce_rows(tu_collective *state, tu_task *task, unsigned char *out) {
    size_t columns = task->columns, share = columns / (size_t)state->size, rows = task->info.count / share;
    for (int member = 0; member < state->size; member++) {
        unsigned char *in;
        tutti_status status = tu_resolve_in(state, task, member, &in);
        if (status != TUTTI_OK)
            return status;
        state->sources[member] = in + (size_t)state->rank * share * task->element;
        state->factors[member] = state->references[member].factor;
    }
    for (size_t row = 0; row < rows; row++) {
        tu_reduce(out + row * share * task->element, state->sources, state->size, share, (tutti_dtype)task->info.dtype,
                  (tutti_reduction)task->info.reduction, state->factors, 0);
        for (int member = 0; member < state->size; member++)
            state->sources[member] = (const unsigned char *)state->sources[member] + columns * task->element;
    }
    return TUTTI_OK;
}

tutti_status tu_split_last_dim(tu_collective *state, tu_task *task) {
    size_t bytes = task->info.count * task->element, in_bytes = bytes * (size_t)state->size;
    const unsigned char *in = task->in;
    unsigned char *out = task->out, *apart = NULL;
    /* In place the result waits until nobody reads the input any more. */
    if (out < in + in_bytes && in < out + bytes && (apart = malloc(bytes)) == NULL)
        return tu_error_memory("reduce_scatter_out in place", bytes);
    uint64_t epoch;
    tu_symmetric found;
    tutti_status status = tu_epoch_enter(state, task, &epoch);
    if (status == TUTTI_OK) {
        tu_reference reference = { .factor = task->factor };
        if (tu_symmetric_find(state->memory, in, in_bytes, &found)) {
            reference.in_index = found.index;
            reference.in_offset = found.offset;
        }
        memcpy(state->members[state->rank]->arrive[epoch & 1].payload, &reference, sizeof reference);
        tu_epoch_arrive(state, task, epoch);
        status = tu_epoch_await_all(state, task, epoch);
    }
    if (status == TUTTI_OK) {
        tu_read_references(state, epoch);
        status = reduce_rows(state, task, apart != NULL ? apart : out);
    }
    if (status == TUTTI_OK) {
        tu_step_publish(state, epoch);
        status = tu_step_await_all(state, task, epoch);
    }
    if (status == TUTTI_OK && apart != NULL)
        memcpy(out, apart, bytes);
    free(apart);
    return status;
}
