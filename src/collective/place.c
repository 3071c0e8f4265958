/* SPDX-License-Identifier: Apache-2.0
 *
 * Where buffers lie: a block that was rendezvoused with the group is published as (number of the rendezvous, offset),
 * and the others read and write it in place.
 */
#include <string.h>

#include "collective/parts.h"

/* In place is safe for others only when nobody's output falls on bytes that somebody else still has to read. */
static bool input_in_place(const tu_collective *state, const tu_task *task) {
    const unsigned char *in = task->in, *out = task->out;
    if (in != out)
        return true; /* apart, or the output is the input's own place, which this rank alone reads */
    switch (task->row->in_place) {
    case TU_IN_PLACE_STAYS: /* an owner alone reads and writes its slice; what is gathered lies at its own place already
                               (tu_keep_own_part); a root that deals keeps its own part last */
        return true;
    case TU_IN_PLACE_FIRST:
        return tu_slice_of(task, state->size, state->rank).first == 0;
    default:
        return false;
    }
}

static bool output_in_place(const tu_task *task) {
    return task->row->placed && (task->in != task->out || task->row->in_place == TU_IN_PLACE_STAYS);
}

void tu_refer(tu_collective *state, const tu_task *task, tu_reference *reference) {
    *reference = (tu_reference){ .factor = task->factor, .given = task->given };
    size_t in_bytes = tu_in_bytes(task, state->rank, state->size),
           out_bytes = tu_out_bytes(task, state->rank, state->size);
    tu_symmetric found;
    if (in_bytes != 0 && input_in_place(state, task) && tu_symmetric_find(state->memory, task->in, in_bytes, &found) &&
        found.index != 0) {
        reference->in_index = found.index;
        reference->in_offset = found.offset;
    }
    if (out_bytes != 0 && output_in_place(task) && tu_symmetric_find(state->memory, task->out, out_bytes, &found) &&
        found.index != 0) {
        reference->out_index = found.index;
        reference->out_offset = found.offset;
    }
}

void tu_read_references(tu_collective *state, uint64_t epoch) {
    state->direct_inputs = state->direct_outputs = 0;
    for (int member = 0; member < state->size; member++) {
        memcpy(&state->references[member], state->members[member]->arrive[epoch & 1].payload, sizeof(tu_reference));
        state->direct_inputs += state->references[member].in_index != 0;
        state->direct_outputs += state->references[member].out_index != 0;
    }
}

tutti_status tu_garbage(tu_collective *state, const tu_task *task, int member, const char *what) {
    tu_error(TUTTI_ERROR_PROTOCOL, "in %s %llu of group %s rank %d published %s; something overwrote its memory",
             task->row->name, (unsigned long long)task->info.sequence, state->group->name, member, what);
    tu_error_at_fault(member);
    return tu_error_where(state->group->name, task->row->name, task->info.sequence, state->rank);
}

tutti_status tu_resolve(tu_collective *state, tu_task *task, int member, uint32_t index, uint64_t offset,
                        unsigned char **address, size_t *room) {
    const tutti_peers *peers = tu_symmetric_peers(state->memory, index);
    if (peers == NULL || peers->buffers[member] == NULL) {
        tu_error(TUTTI_ERROR_MISMATCH,
                 "in %s %llu of group %s rank %d uses a symmetric block (rendezvous %u) whose peers rank %d has "
                 "released; keep the block and its peers on all ranks while one of them passes it to collectives",
                 task->row->name, (unsigned long long)task->info.sequence, state->group->name, member, index,
                 state->rank);
        tu_error_at_fault(state->rank);
        return tu_error_where(state->group->name, task->row->name, task->info.sequence, state->rank);
    }
    if (offset > peers->memory->bytes)
        return tu_garbage(state, task, member, "an address outside of its block");
    *address = (unsigned char *)peers->buffers[member] + offset;
    *room = peers->memory->bytes - offset;
    return TUTTI_OK;
}

/* Of all_to_all_v only the owner knows how long its input is: its parts are compared with the room one by one. */
static tutti_status resolve_bytes(tu_collective *state, tu_task *task, int member, uint32_t index, uint64_t offset,
                                  size_t bytes, unsigned char **address) {
    size_t room;
    tutti_status status = tu_resolve(state, task, member, index, offset, address, &room);
    return status == TUTTI_OK && bytes > room ? tu_garbage(state, task, member, "a buffer longer than its block")
                                              : status;
}

tutti_status tu_resolve_in(tu_collective *state, tu_task *task, int member, unsigned char **address) {
    const tu_reference *reference = &state->references[member];
    return resolve_bytes(state, task, member, reference->in_index, reference->in_offset,
                         tu_in_bytes(task, member, state->size), address);
}

tutti_status tu_resolve_out(tu_collective *state, tu_task *task, int member, unsigned char **address) {
    const tu_reference *reference = &state->references[member];
    return resolve_bytes(state, task, member, reference->out_index, reference->out_offset,
                         tu_out_bytes(task, member, state->size), address);
}
