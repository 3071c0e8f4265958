/* SPDX-License-Identifier: Apache-2.0
 *
 * Through leaders: when the ranks span several caches or NUMA nodes, lines cross between them once per domain instead
 * of once per pair.
 *
 * Barrier: members arrive; the leader of a domain awaits them, then says so (up); leaders await each other's up and let
 * their members go (step). Broadcast: the root stages; the leaders of the other domains copy that into slots of their
 * own and say so (up); everybody takes it from the leader of its domain, in the root's domain from the root.
 */
#include <string.h>

#include "collective/domain.h"
#include "collective/parts.h"

static bool leads(const tu_collective *state) {
    return state->domains->leader[state->rank] == state->rank;
}

/* Pairs with the acquire of TU_AWAIT_UP. */
static void say_up(tu_collective *state, uint64_t epoch) {
    atomic_store_explicit(&state->members[state->rank]->up.flag, epoch, memory_order_release);
    tu_ring_members(state);
}

static tutti_status gather_domain(tu_collective *state, tu_task *task, uint64_t epoch) {
    for (int member = 0; member < state->size; member++) {
        if (state->domains->leader[member] != state->rank)
            continue;
        tutti_status status = tu_epoch_await(state, task, epoch, member);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

static tutti_status await_leaders(tu_collective *state, tu_task *task, uint64_t epoch) {
    for (int i = 0; i < state->domains->count; i++) {
        int leader = state->domains->leaders[i];
        if (leader == state->rank)
            continue;
        tutti_status status = tu_epoch_await(state, task, epoch, leader);
        if (status == TUTTI_OK)
            status = tu_await_up(state, task, epoch, leader);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

static tutti_status barrier(tu_collective *state, tu_task *task) {
    uint64_t epoch;
    tutti_status status = tu_epoch_come(state, task, &epoch);
    if (status != TUTTI_OK)
        return status;
    if (leads(state)) {
        status = gather_domain(state, task, epoch);
        if (status != TUTTI_OK)
            return status;
        say_up(state, epoch);
        status = await_leaders(state, task, epoch);
        if (status == TUTTI_OK)
            tu_step_publish(state, epoch);
    } else {
        int leader = state->domains->leader[state->rank];
        status = tu_epoch_await(state, task, epoch, leader);
        if (status == TUTTI_OK)
            status = tu_step_await(state, task, epoch, leader);
    }
    /* Whoever has come through knows that all have arrived. */
    if (status == TUTTI_OK)
        state->cleared = epoch - 1;
    return status;
}

/* From whom this rank takes: -1 for the root itself. */
static int supplier(const tu_collective *state, const tu_task *task) {
    int root = task->info.root, rank = state->rank;
    if (rank == root)
        return -1;
    int leader = state->domains->leader[rank];
    if (leader == state->domains->leader[root] || leader == rank)
        return root;
    return leader;
}

static tutti_status broadcast_round(tu_collective *state, tu_task *task, size_t offset, size_t bytes) {
    uint64_t epoch;
    tutti_status status = tu_epoch_enter(state, task, &epoch);
    if (status != TUTTI_OK)
        return status;
    int from = supplier(state, task);
    bool relays = leads(state) && from >= 0 && state->domains->leader[task->info.root] != state->rank;
    if (from < 0)
        tu_copy(tu_staging(state, state->rank, epoch), (const unsigned char *)task->in + offset, bytes,
                tu_stage_flags(state, bytes));
    tu_epoch_arrive(state, task, epoch);
    if (from < 0)
        return TUTTI_OK;
    status = tu_epoch_await(state, task, epoch, from);
    if (status == TUTTI_OK && from != task->info.root)
        status = tu_await_up(state, task, epoch, from);
    if (status != TUTTI_OK)
        return status;
    if (relays) {
        tu_copy(tu_staging(state, state->rank, epoch), tu_staging(state, from, epoch), bytes,
                tu_stage_flags(state, bytes));
        say_up(state, epoch);
        from = state->rank;
    }
    tu_copy((unsigned char *)task->out + offset, tu_staging(state, from, epoch), bytes, 0);
    return TUTTI_OK;
}

tutti_status tu_tree(tu_collective *state, tu_task *task) {
    if (task->row->kind == TU_KIND_BARRIER)
        return barrier(state, task);
    size_t bytes = task->info.count * task->element, part = state->layout.slot_bytes;
    tu_keep_own_part(state, task, true);
    tutti_status status = TUTTI_OK;
    size_t offset = 0;
    do {
        size_t piece = bytes - offset < part ? bytes - offset : part;
        status = broadcast_round(state, task, offset, piece);
        offset += piece;
    } while (offset < bytes && status == TUTTI_OK);
    return status;
}
