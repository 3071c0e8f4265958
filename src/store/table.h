/* SPDX-License-Identifier: Apache-2.0
 *
 * Keys with their values, queues and waiters: the data of a memory store and of a tcp server. Not locked: the owner
 * sees to that. A key may be any bytes.
 *
 * An entry is there while it has a value, a queue that is not empty, or somebody who waits for it.
 */
#ifndef TU_STORE_TABLE_H
#define TU_STORE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct tu_queued {
    struct tu_queued *next;
    size_t bytes;
    uint8_t data[];
} tu_queued;

typedef struct tu_waiter tu_waiter;

/* Waiters in order of arrival; the server's. */
typedef struct tu_waiter_list {
    tu_waiter *first, *last;
} tu_waiter_list;

typedef struct tu_entry {
    struct tu_entry *next; /* in its bucket */
    uint64_t hash;
    bool present; /* has a value, which may be empty */
    uint8_t *value;
    size_t bytes, capacity;
    uint64_t asked; /* the number of the last command that asked for several values (hub.c) */
    tu_queued *queue_first, *queue_last;
    int64_t queued;
    tu_waiter_list waiters;
    size_t key_bytes;
    uint8_t key[];
} tu_entry;

typedef struct tu_table {
    tu_entry **buckets; /* a power of two; NULL while empty */
    size_t bucket_count;
    size_t entries;
    int64_t present; /* entries with a value */
} tu_table;

void tu_table_clear(tu_table *table);

tu_entry *tu_table_find(const tu_table *table, const void *key, size_t bytes);
/* Finds or makes; NULL when memory is out. */
tu_entry *tu_table_make(tu_table *table, const void *key, size_t bytes);
/* Removes the entry if nothing holds it any more. */
void tu_table_tidy(tu_table *table, tu_entry *entry);

/* Has a value, or something in its queue. `entry` may be NULL. */
static inline bool tu_entry_ready(const tu_entry *entry) {
    return entry != NULL && (entry->present || entry->queued > 0);
}

/* False: out of memory, and nothing has changed. */
bool tu_entry_set(tu_table *table, tu_entry *entry, const void *value, size_t bytes);
bool tu_entry_append(tu_table *table, tu_entry *entry, const void *value, size_t bytes);
bool tu_entry_push(tu_entry *entry, const void *value, size_t bytes);
void tu_entry_unset(tu_table *table, tu_entry *entry);
/* Takes the first of the queue, which is not empty; the caller frees it. */
tu_queued *tu_entry_pop(tu_entry *entry);

typedef enum tu_add_result {
    TU_ADD_DONE,
    TU_ADD_NOT_A_NUMBER,
    TU_ADD_NO_MEMORY
} tu_add_result;
tu_add_result tu_entry_add(tu_table *table, tu_entry *entry, int64_t amount, int64_t *sum);

static inline bool tu_entry_equals(const tu_entry *entry, const void *value, size_t bytes) {
    return entry->bytes == bytes && (bytes == 0 || __builtin_memcmp(entry->value, value, bytes) == 0);
}

/* Walks all entries: start with entry NULL and bucket 0. */
tu_entry *tu_table_next(const tu_table *table, size_t *bucket, tu_entry *entry);

#endif
