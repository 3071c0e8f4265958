/* SPDX-License-Identifier: Apache-2.0
 *
 * A hash table with chains. It doubles when there are more entries than buckets and never shrinks; a failed doubling is
 * no error, only longer chains.
 */
#include "store/table.h"

#include <stdlib.h>
#include <string.h>

#include "store/store.h"

enum {
    FIRST_BUCKETS = 64
};

/* Eight bytes at a time, multiply and fold: keys are short and their ends differ. */
static uint64_t hash_of(const void *key, size_t bytes) {
    const uint8_t *byte = key;
    uint64_t hash = UINT64_C(0x9e3779b97f4a7c15) ^ bytes;
    for (; bytes >= 8; byte += 8, bytes -= 8) {
        uint64_t word;
        memcpy(&word, byte, 8);
        hash = (hash ^ word) * UINT64_C(0xff51afd7ed558ccd);
        hash ^= hash >> 32;
    }
    for (; bytes > 0; byte++, bytes--)
        hash = (hash ^ *byte) * UINT64_C(0x100000001b3);
    hash *= UINT64_C(0xc4ceb9fe1a85ec53);
    return hash ^ (hash >> 32);
}

static tu_entry **bucket_of(const tu_table *table, uint64_t hash) {
    return &table->buckets[hash & (table->bucket_count - 1)];
}

static void grow(tu_table *table) {
    size_t wider_count = table->bucket_count > 0 ? table->bucket_count * 2 : FIRST_BUCKETS;
    tu_entry **wider = calloc(wider_count, sizeof *wider);
    if (wider == NULL)
        return;
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (tu_entry *entry = table->buckets[i], *next; entry != NULL; entry = next) {
            next = entry->next;
            tu_entry **bucket = &wider[entry->hash & (wider_count - 1)];
            entry->next = *bucket;
            *bucket = entry;
        }
    }
    free(table->buckets);
    table->buckets = wider;
    table->bucket_count = wider_count;
}

static tu_entry *find_hashed(const tu_table *table, uint64_t hash, const void *key, size_t bytes) {
    if (table->bucket_count == 0)
        return NULL;
    for (tu_entry *entry = *bucket_of(table, hash); entry != NULL; entry = entry->next) {
        if (entry->hash == hash && entry->key_bytes == bytes && memcmp(entry->key, key, bytes) == 0)
            return entry;
    }
    return NULL;
}

tu_entry *tu_table_find(const tu_table *table, const void *key, size_t bytes) {
    return find_hashed(table, hash_of(key, bytes), key, bytes);
}

tu_entry *tu_table_make(tu_table *table, const void *key, size_t bytes) {
    uint64_t hash = hash_of(key, bytes);
    tu_entry *entry = find_hashed(table, hash, key, bytes);
    if (entry != NULL)
        return entry;
    if (table->entries >= table->bucket_count)
        grow(table);
    if (table->bucket_count == 0)
        return NULL;
    entry = calloc(1, sizeof *entry + bytes);
    if (entry == NULL)
        return NULL;
    entry->hash = hash;
    entry->key_bytes = bytes;
    memcpy(entry->key, key, bytes);
    tu_entry **bucket = bucket_of(table, hash);
    entry->next = *bucket;
    *bucket = entry;
    table->entries++;
    return entry;
}

void tu_table_tidy(tu_table *table, tu_entry *entry) {
    if (entry->present || entry->queued > 0 || entry->waiters.first != NULL)
        return;
    tu_entry **link = bucket_of(table, entry->hash);
    while (*link != entry)
        link = &(*link)->next;
    *link = entry->next;
    table->entries--;
    free(entry);
}

void tu_table_clear(tu_table *table) {
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (tu_entry *entry = table->buckets[i], *next; entry != NULL; entry = next) {
            next = entry->next;
            while (entry->queued > 0)
                free(tu_entry_pop(entry));
            free(entry->value);
            free(entry);
        }
    }
    free(table->buckets);
    *table = (tu_table){ 0 };
}

/* Room for `bytes`; keeps what is there. */
static bool reserve(tu_entry *entry, size_t bytes) {
    if (bytes <= entry->capacity)
        return true;
    uint8_t *wider = realloc(entry->value, bytes);
    if (wider == NULL)
        return false;
    entry->value = wider;
    entry->capacity = bytes;
    return true;
}

static void mark_present(tu_table *table, tu_entry *entry) {
    table->present += !entry->present;
    entry->present = true;
}

bool tu_entry_set(tu_table *table, tu_entry *entry, const void *value, size_t bytes) {
    if (!reserve(entry, bytes))
        return false;
    if (bytes > 0)
        memcpy(entry->value, value, bytes);
    entry->bytes = bytes;
    mark_present(table, entry);
    return true;
}

bool tu_entry_append(tu_table *table, tu_entry *entry, const void *value, size_t bytes) {
    size_t wanted;
    if (__builtin_add_overflow(entry->bytes, bytes, &wanted))
        return false;
    /* Half as much again, so that many small appends do not copy the whole each time. */
    if (wanted > entry->capacity && entry->bytes > 0 && !reserve(entry, wanted + wanted / 2))
        return false;
    if (!reserve(entry, wanted))
        return false;
    if (bytes > 0)
        memcpy(entry->value + entry->bytes, value, bytes);
    entry->bytes = wanted;
    mark_present(table, entry);
    return true;
}

void tu_entry_unset(tu_table *table, tu_entry *entry) {
    table->present -= entry->present;
    entry->present = false;
    free(entry->value);
    entry->value = NULL;
    entry->bytes = entry->capacity = 0;
}

bool tu_entry_push(tu_entry *entry, const void *value, size_t bytes) {
    tu_queued *queued = bytes < SIZE_MAX - sizeof *queued ? malloc(sizeof *queued + bytes) : NULL;
    if (queued == NULL)
        return false;
    queued->next = NULL;
    queued->bytes = bytes;
    if (bytes > 0)
        memcpy(queued->data, value, bytes);
    if (entry->queued++ == 0)
        entry->queue_first = queued;
    else
        entry->queue_last->next = queued;
    entry->queue_last = queued;
    return true;
}

tu_queued *tu_entry_pop(tu_entry *entry) {
    tu_queued *queued = entry->queue_first;
    entry->queue_first = queued->next;
    entry->queued--;
    return queued;
}

tu_add_result tu_entry_add(tu_table *table, tu_entry *entry, int64_t amount, int64_t *sum) {
    int64_t number = 0;
    if (!tu_store_parse(entry->value, entry->bytes, &number) || __builtin_add_overflow(number, amount, &number))
        return TU_ADD_NOT_A_NUMBER;
    char text[TU_STORE_NUMBER];
    if (!tu_entry_set(table, entry, text, tu_store_print(number, text)))
        return TU_ADD_NO_MEMORY;
    *sum = number;
    return TU_ADD_DONE;
}

tu_entry *tu_table_next(const tu_table *table, size_t *bucket, tu_entry *entry) {
    if (entry != NULL) {
        if (entry->next != NULL)
            return entry->next;
        ++*bucket;
    }
    for (; *bucket < table->bucket_count; ++*bucket) {
        if (table->buckets[*bucket] != NULL)
            return table->buckets[*bucket];
    }
    return NULL;
}
