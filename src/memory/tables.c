/* SPDX-License-Identifier: Apache-2.0
 *
 * The tables of a world: which blocks lie where, which persistent ids exist; and the ordered array they are made of.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "memory/tables.h"

/* The position of the first entry whose key is above `key`. */
static size_t position_above(const tu_order *order, uint64_t key) {
    size_t low = 0, high = order->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (order->entries[middle].key <= key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

tutti_status tu_order_insert(tu_order *order, uint64_t key, void *value) {
    if (order->count == order->capacity) {
        size_t capacity = order->capacity == 0 ? 16 : 2 * order->capacity;
        tu_order_entry *entries = realloc(order->entries, capacity * sizeof *entries);
        if (entries == NULL)
            return tu_error_memory("the table of symmetric blocks", capacity * sizeof *entries);
        order->entries = entries;
        order->capacity = capacity;
    }
    size_t position = position_above(order, key);
    memmove(order->entries + position + 1, order->entries + position,
            (order->count - position) * sizeof *order->entries);
    order->entries[position] = (tu_order_entry){ key, value };
    order->count++;
    return TUTTI_OK;
}

void tu_order_remove(tu_order *order, uint64_t key) {
    size_t position = position_above(order, key);
    if (position == 0 || order->entries[position - 1].key != key)
        return;
    memmove(order->entries + position - 1, order->entries + position,
            (order->count - position) * sizeof *order->entries);
    order->count--;
    if (order->count == 0) {
        free(order->entries);
        *order = (tu_order){ 0 };
    }
}

void *tu_order_floor(const tu_order *order, uint64_t key) {
    size_t position = position_above(order, key);
    return position == 0 ? NULL : order->entries[position - 1].value;
}

void *tu_order_get(const tu_order *order, uint64_t key) {
    size_t position = position_above(order, key);
    return position == 0 || order->entries[position - 1].key != key ? NULL : order->entries[position - 1].value;
}

static tutti_status make(void *owner, void **state) {
    tutti_world *world = owner;
    tu_memory_world *tables = calloc(1, sizeof *tables);
    if (tables == NULL)
        return tu_error_memory("the tables of symmetric memory", sizeof *tables);
    tables->world = world;
    pthread_mutex_init(&tables->lock, NULL);
    pthread_mutex_init(&tables->persistent_lock, NULL);
    pthread_mutex_init(&tables->backend_lock, NULL);
    pthread_mutex_init(&tables->joining, NULL);
    *state = tables;
    return TUTTI_OK;
}

/* Runs when the world's last handle is gone: no user holds a block, so only persistent ones are left. */
static void end(void *state) {
    tu_memory_world *tables = state;
    while (tables->persistent.count > 0) {
        tutti_memory *memory = tables->persistent.entries[0].value;
        tu_order_remove(&tables->persistent, memory->persistent_id);
        tu_memory_forget_peers(memory);
        tu_memory_drop(memory);
    }
    tu_backends_end(tables);
    free(tables->blocks.entries);
    pthread_mutex_destroy(&tables->joining);
    pthread_mutex_destroy(&tables->backend_lock);
    pthread_mutex_destroy(&tables->persistent_lock);
    pthread_mutex_destroy(&tables->lock);
    free(tables);
}

tutti_status tu_memory_world_get(tutti_world *world, tu_memory_world **tables) {
    static const tu_attachment attachment = { .make = make, .end = end };
    void *state;
    tutti_status status = tu_attachment_get(&world->attachments, &attachment, &state);
    if (status == TUTTI_OK)
        *tables = state;
    return status;
}
