/* SPDX-License-Identifier: Apache-2.0
 *
 * From a pointer to its block and to the peers' addresses, quickly.
 *
 * Each group remembers the answers for the last pointers, symmetric or not. An answer holds while the generation of the
 * world's tables is the same: allocation, release and rendezvous change it. A line is read without a lock: its turn is
 * odd while it is written and differs after it was.
 *
 * Budget: a pointer that was asked for lately costs one line of cache and about ten loads; no lock, no store.
 */
#include <stdlib.h>

#include "base/error.h"
#include "memory/tables.h"

static tutti_status make(void *owner, void **state) {
    tutti_group *group = owner;
    tu_memory_world *tables;
    tutti_status status = tu_memory_world_get(group->world, &tables);
    if (status != TUTTI_OK)
        return status;
    tu_memory_group *made = aligned_alloc(64, tu_round_up(sizeof *made, 64));
    if (made == NULL)
        return tu_error_memory("a group's symmetric memory", sizeof *made);
    *made = (tu_memory_group){ .group = group, .tables = tables };
    pthread_mutex_init(&made->meeting, NULL);
    pthread_mutex_init(&made->cache_lock, NULL);
    *state = made;
    return TUTTI_OK;
}

/* Runs when the group's last reference is gone: peers that a user holds keep their group, so only cached ones are
 * left. */
static void end(void *state) {
    tu_memory_group *group = state;
    tutti_peers *doomed = NULL;
    pthread_mutex_lock(&group->tables->lock);
    while (group->first_peers != NULL)
        tu_peers_unlink(group->first_peers, &doomed);
    free(group->by_index.entries);
    pthread_mutex_unlock(&group->tables->lock);
    tu_peers_free(doomed);
    tu_backends_forget(group->tables, group->group);
    pthread_mutex_destroy(&group->cache_lock);
    pthread_mutex_destroy(&group->meeting);
    free(group);
}

tutti_status tu_memory_group_get(tutti_group *group, tu_memory_group **result) {
    static const tu_attachment attachment = { .make = make, .end = end };
    void *state;
    tutti_status status = tu_attachment_get(&group->attachments, &attachment, &state);
    if (status == TUTTI_OK)
        *result = state;
    return status;
}

static const tutti_peers *peers_of(const tutti_memory *memory, const tu_memory_group *group, bool mapped) {
    for (const tutti_peers *peers = memory->first_peers; peers != NULL; peers = peers->next_of_memory) {
        if (peers->group_state == group && peers->proven && peers->mapped == mapped)
            return peers;
    }
    return NULL;
}

/* Fills a line of the cache. Writers take turns by cache_lock. */
static void remember(tu_memory_group *state, tu_symmetric_line *line, uint64_t generation, uintptr_t pointer,
                     size_t room, tutti_memory *memory, const tutti_peers *peers) {
    pthread_mutex_lock(&state->cache_lock);
    uint32_t turn = atomic_load_explicit(&line->turn, memory_order_relaxed);
    atomic_store_explicit(&line->turn, turn + 1, memory_order_relaxed);
    /* Release on each field: a reader that sees one of them sees the odd turn when it looks again. */
    atomic_store_explicit(&line->generation, generation, memory_order_release);
    atomic_store_explicit(&line->pointer, pointer, memory_order_release);
    atomic_store_explicit(&line->room, room, memory_order_release);
    atomic_store_explicit(&line->memory, memory, memory_order_release);
    atomic_store_explicit(&line->peers, peers, memory_order_release);
    atomic_store_explicit(&line->turn, turn + 2, memory_order_release); /* pairs with the acquire in recall */
    pthread_mutex_unlock(&state->cache_lock);
}

typedef struct answer {
    size_t room; /* 0: not symmetric */
    tutti_memory *memory;
    const tutti_peers *peers;
} answer;

static bool recall(const tu_symmetric_line *line, uint64_t generation, uintptr_t pointer, answer *found) {
    uint32_t turn = atomic_load_explicit(&line->turn, memory_order_acquire); /* pairs with the last store in remember */
    if ((turn & 1) != 0 || atomic_load_explicit(&line->generation, memory_order_acquire) != generation ||
        atomic_load_explicit(&line->pointer, memory_order_acquire) != pointer)
        return false;
    /* Acquire on each field: the second look at the turn cannot move before them. */
    found->room = atomic_load_explicit(&line->room, memory_order_acquire);
    found->memory = atomic_load_explicit(&line->memory, memory_order_acquire);
    found->peers = atomic_load_explicit(&line->peers, memory_order_acquire);
    return atomic_load_explicit(&line->turn, memory_order_relaxed) == turn;
}

static answer look_up(tu_memory_group *state, uintptr_t pointer) {
    answer found = { 0, NULL, NULL };
    pthread_mutex_lock(&state->tables->lock);
    tutti_memory *memory = tu_order_floor(&state->tables->blocks, pointer);
    if (memory != NULL) {
        size_t offset = (size_t)(pointer - (uintptr_t)memory->block.address);
        if (offset < memory->bytes)
            found = (answer){ memory->bytes - offset, memory, peers_of(memory, state, true) };
    }
    pthread_mutex_unlock(&state->tables->lock);
    return found;
}

bool tu_symmetric_find(tu_memory_group *state, const void *pointer, size_t bytes, tu_symmetric *result) {
    uintptr_t address = (uintptr_t)pointer;
    /* Pairs with the increments: an answer of this generation was looked up after all changes up to it. */
    uint64_t generation = atomic_load_explicit(&state->tables->generation, memory_order_acquire);
    tu_symmetric_line *line = &state->cache[(address >> 6 ^ address >> 12 ^ address >> 20) % TU_SYMMETRIC_CACHE];
    answer found;
    if (!recall(line, generation, address, &found)) {
        found = look_up(state, address);
        remember(state, line, generation, address, found.room, found.memory, found.peers);
    }
    if (found.room == 0 || bytes > found.room)
        return false;
    *result = (tu_symmetric){
        .memory = found.memory,
        .offset = (size_t)(address - (uintptr_t)found.memory->block.address),
        .peers = found.peers,
        .buffers = found.peers == NULL ? NULL : found.peers->buffers,
        .index = found.peers == NULL ? 0 : found.peers->index,
    };
    return true;
}

const tutti_peers *tu_symmetric_unmapped(tu_memory_group *state, const tutti_memory *memory) {
    pthread_mutex_lock(&state->tables->lock);
    const tutti_peers *peers = peers_of(memory, state, false);
    pthread_mutex_unlock(&state->tables->lock);
    return peers;
}

const tutti_peers *tu_symmetric_peers(tu_memory_group *state, uint32_t index) {
    /* Pairs with the release below. Cleared before a handle goes: see unlink_from_group. */
    _Atomic(const tutti_peers *) *slot = &state->recent[index % TU_RECENT_PEERS];
    const tutti_peers *peers = atomic_load_explicit(slot, memory_order_acquire);
    if (peers != NULL && peers->index == index)
        return peers;
    pthread_mutex_lock(&state->tables->lock);
    peers = tu_order_get(&state->by_index, index);
    if (peers != NULL)
        atomic_store_explicit(slot, peers, memory_order_release);
    pthread_mutex_unlock(&state->tables->lock);
    return peers;
}

void *tu_symmetric_mapped(const tutti_peers *peers, int rank) {
    const tu_backend_map *blocks = &peers->blocks;
    return blocks->row != NULL ? (char *)blocks->row + (size_t)rank * blocks->row_step : peers->buffers[rank];
}

uint32_t tu_symmetric_last(const tu_memory_group *state) {
    return atomic_load_explicit(&state->last_index, memory_order_relaxed);
}
