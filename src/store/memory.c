/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory store: for the threads of one process. One lock, one condition; whatever may end a wait wakes all waiters,
 * so that none is overlooked.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "store/store.h"
#include "store/table.h"

typedef struct memory_store {
    tutti_store store;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* on the monotonic clock */
    tu_table table;         /* under `lock` */
} memory_store;

static memory_store *lock(tutti_store *store) {
    memory_store *memory = (memory_store *)store;
    pthread_mutex_lock(&memory->lock);
    return memory;
}

static tutti_status unlock(memory_store *memory, tutti_status status) {
    pthread_mutex_unlock(&memory->lock);
    return status;
}

static tutti_status unlock_changed(memory_store *memory) {
    pthread_cond_broadcast(&memory->changed);
    return unlock(memory, TUTTI_OK);
}

static tutti_status no_memory(memory_store *memory, tu_entry *entry, size_t bytes) {
    if (entry != NULL)
        tu_table_tidy(&memory->table, entry);
    return tu_error_memory("a key of the memory store", bytes);
}

static tu_entry *find(memory_store *memory, const char *key) {
    return tu_table_find(&memory->table, key, strlen(key));
}

/* Sleeps until something may have changed, and looks around. *in_time: the deadline has not passed. */
static tutti_status sleep_until(memory_store *memory, int64_t deadline, bool *in_time) {
    int64_t slice = tu_watch_slice(deadline);
    struct timespec until = { .tv_sec = slice / TU_SECOND, .tv_nsec = slice % TU_SECOND };
    *in_time = pthread_cond_timedwait(&memory->changed, &memory->lock, &until) != ETIMEDOUT || slice < deadline;
    if (!tu_watched())
        return TUTTI_OK;
    pthread_mutex_unlock(&memory->lock); /* whoever watches may take its time */
    tutti_status status = tu_watch_look();
    pthread_mutex_lock(&memory->lock);
    return status;
}

/* Each key counts once it was seen, also when it is deleted before the last one comes. */
static tutti_status wait_locked(memory_store *memory, const char *const *keys, size_t count, int64_t timeout_ns) {
    int64_t deadline = tu_deadline(timeout_ns);
    bool in_time = true;
    for (size_t seen = 0; seen < count;) {
        if (tu_entry_ready(find(memory, keys[seen]))) {
            seen++;
            continue;
        }
        if (!in_time)
            return tu_store_wait_timeout(keys, count, timeout_ns);
        tutti_status status = sleep_until(memory, deadline, &in_time);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

static tutti_status memory_set(tutti_store *store, const char *key, const void *value, size_t bytes) {
    memory_store *memory = lock(store);
    tu_entry *entry = tu_table_make(&memory->table, key, strlen(key));
    if (entry == NULL || !tu_entry_set(&memory->table, entry, value, bytes))
        return unlock(memory, no_memory(memory, entry, bytes));
    return unlock_changed(memory);
}

static tutti_status memory_append(tutti_store *store, const char *key, const void *value, size_t bytes) {
    memory_store *memory = lock(store);
    tu_entry *entry = tu_table_make(&memory->table, key, strlen(key));
    if (entry == NULL || !tu_entry_append(&memory->table, entry, value, bytes))
        return unlock(memory, no_memory(memory, entry, bytes));
    return unlock_changed(memory);
}

/* The value of a key that may have gone again since it was seen; then it is waited for once more. */
static tutti_status get_locked(memory_store *memory, const char *key, int64_t deadline, int64_t timeout_ns,
                               void **value, size_t *bytes) {
    for (bool in_time = true;;) {
        tu_entry *entry = find(memory, key);
        if (entry != NULL && entry->present) {
            tutti_status status = tu_store_copy(entry->value, entry->bytes, value);
            if (status == TUTTI_OK)
                *bytes = entry->bytes;
            return status;
        }
        if (!in_time)
            return tu_store_wait_timeout(&key, 1, timeout_ns);
        tutti_status status = sleep_until(memory, deadline, &in_time);
        if (status != TUTTI_OK)
            return status;
    }
}

static tutti_status memory_get(tutti_store *store, const char *key, int64_t timeout_ns, void **value, size_t *bytes) {
    memory_store *memory = lock(store);
    return unlock(memory, get_locked(memory, key, tu_deadline(timeout_ns), timeout_ns, value, bytes));
}

static tutti_status memory_multi_get(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns,
                                     void **values, size_t *bytes) {
    int64_t deadline = tu_deadline(timeout_ns);
    memory_store *memory = lock(store);
    for (size_t i = 0; i < count; i++) {
        tutti_status status = get_locked(memory, keys[i], deadline, timeout_ns, &values[i], &bytes[i]);
        if (status != TUTTI_OK) {
            while (i-- > 0)
                free(values[i]);
            return unlock(memory, status);
        }
    }
    return unlock(memory, TUTTI_OK);
}

static tutti_status memory_multi_set(tutti_store *store, const char *const *keys, size_t count,
                                     const void *const *values, const size_t *bytes) {
    memory_store *memory = lock(store);
    for (size_t i = 0; i < count; i++) {
        tu_entry *entry = tu_table_make(&memory->table, keys[i], strlen(keys[i]));
        if (entry == NULL || !tu_entry_set(&memory->table, entry, values[i], bytes[i])) {
            pthread_cond_broadcast(&memory->changed); /* for the keys before this one */
            return unlock(memory, no_memory(memory, entry, bytes[i]));
        }
    }
    return unlock_changed(memory);
}

static tutti_status memory_add(tutti_store *store, const char *key, int64_t amount, int64_t *sum) {
    memory_store *memory = lock(store);
    tu_entry *entry = tu_table_make(&memory->table, key, strlen(key));
    tu_add_result result = entry != NULL ? tu_entry_add(&memory->table, entry, amount, sum) : TU_ADD_NO_MEMORY;
    if (result == TU_ADD_NO_MEMORY)
        return unlock(memory, no_memory(memory, entry, TU_STORE_NUMBER));
    if (result == TU_ADD_NOT_A_NUMBER)
        return unlock(memory, tu_store_not_a_number(key));
    return unlock_changed(memory);
}

static tutti_status memory_compare_set(tutti_store *store, const char *key, const void *expected, size_t expected_bytes,
                                       const void *desired, size_t desired_bytes, void **value, size_t *bytes) {
    memory_store *memory = lock(store);
    tu_entry *entry = find(memory, key);
    bool present = entry != NULL && entry->present;
    bool sets = present ? tu_entry_equals(entry, expected, expected_bytes) : expected_bytes == 0;
    const void *result = sets ? desired : present ? entry->value : expected;
    size_t result_bytes = sets ? desired_bytes : present ? entry->bytes : expected_bytes;

    void *copy;
    tutti_status status = tu_store_copy(result, result_bytes, &copy);
    if (status != TUTTI_OK)
        return unlock(memory, status);
    if (sets) {
        entry = tu_table_make(&memory->table, key, strlen(key));
        if (entry == NULL || !tu_entry_set(&memory->table, entry, desired, desired_bytes)) {
            free(copy);
            return unlock(memory, no_memory(memory, entry, desired_bytes));
        }
    }
    *value = copy;
    *bytes = result_bytes;
    return sets ? unlock_changed(memory) : unlock(memory, TUTTI_OK);
}

static tutti_status memory_wait(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns) {
    memory_store *memory = lock(store);
    return unlock(memory, wait_locked(memory, keys, count, timeout_ns));
}

static tutti_status memory_check(tutti_store *store, const char *const *keys, size_t count, bool *present) {
    memory_store *memory = lock(store);
    bool all = true;
    for (size_t i = 0; i < count && all; i++)
        all = tu_entry_ready(find(memory, keys[i]));
    *present = all;
    return unlock(memory, TUTTI_OK);
}

static tutti_status memory_delete(tutti_store *store, const char *key, bool *existed) {
    memory_store *memory = lock(store);
    tu_entry *entry = find(memory, key);
    *existed = entry != NULL && entry->present;
    if (*existed) {
        tu_entry_unset(&memory->table, entry);
        tu_table_tidy(&memory->table, entry);
    }
    return unlock(memory, TUTTI_OK);
}

static tutti_status memory_num_keys(tutti_store *store, int64_t *count) {
    memory_store *memory = lock(store);
    *count = memory->table.present;
    return unlock(memory, TUTTI_OK);
}

static tutti_status memory_list_keys(tutti_store *store, char ***keys, size_t *count) {
    memory_store *memory = lock(store);
    size_t present = (size_t)memory->table.present;
    const char **texts = malloc((present + 1) * sizeof *texts);
    size_t *lengths = malloc((present + 1) * sizeof *lengths);
    tutti_status status;
    if (texts == NULL || lengths == NULL) {
        status = tu_error_memory("a list of keys", present * sizeof *texts);
        goto free_lists;
    }
    size_t bucket = 0, found = 0;
    for (tu_entry *entry = NULL; (entry = tu_table_next(&memory->table, &bucket, entry)) != NULL;) {
        if (!entry->present)
            continue;
        texts[found] = (const char *)entry->key;
        lengths[found++] = entry->key_bytes;
    }
    status = tu_store_key_block(texts, lengths, found, keys);
    if (status == TUTTI_OK)
        *count = found;
free_lists:
    free(lengths);
    free(texts);
    return unlock(memory, status);
}

static tutti_status memory_queue_push(tutti_store *store, const char *key, const void *value, size_t bytes) {
    memory_store *memory = lock(store);
    tu_entry *entry = tu_table_make(&memory->table, key, strlen(key));
    if (entry == NULL || !tu_entry_push(entry, value, bytes))
        return unlock(memory, no_memory(memory, entry, bytes));
    return unlock_changed(memory);
}

static tutti_status memory_queue_pop(tutti_store *store, const char *key, bool block, int64_t timeout_ns, void **value,
                                     size_t *bytes) {
    int64_t deadline = tu_deadline(timeout_ns);
    memory_store *memory = lock(store);
    tu_entry *entry;
    for (bool in_time = true; (entry = find(memory, key)) == NULL || entry->queued == 0;) {
        if (!block)
            return unlock(memory, tu_store_queue_empty(key));
        if (!in_time)
            return unlock(memory, tu_store_wait_timeout(&key, 1, timeout_ns));
        tutti_status status = sleep_until(memory, deadline, &in_time);
        if (status != TUTTI_OK)
            return unlock(memory, status);
    }
    tutti_status status = tu_store_copy(entry->queue_first->data, entry->queue_first->bytes, value);
    if (status == TUTTI_OK) {
        *bytes = entry->queue_first->bytes;
        free(tu_entry_pop(entry));
        tu_table_tidy(&memory->table, entry);
    }
    return unlock(memory, status);
}

static tutti_status memory_queue_length(tutti_store *store, const char *key, int64_t *length) {
    memory_store *memory = lock(store);
    tu_entry *entry = find(memory, key);
    *length = entry != NULL ? entry->queued : 0;
    return unlock(memory, TUTTI_OK);
}

static tutti_status memory_clone(tutti_store *store, tutti_store **clone) {
    tu_store_retain(store);
    *clone = store;
    return TUTTI_OK;
}

static void memory_destroy(tutti_store *store) {
    memory_store *memory = (memory_store *)store;
    tu_table_clear(&memory->table);
    pthread_cond_destroy(&memory->changed);
    pthread_mutex_destroy(&memory->lock);
    free(memory);
}

static const tu_store_kind memory_kind = {
    .name = "memory",
    .extended_api = true,
    .set = memory_set,
    .get = memory_get,
    .add = memory_add,
    .compare_set = memory_compare_set,
    .wait = memory_wait,
    .check = memory_check,
    .remove = memory_delete,
    .num_keys = memory_num_keys,
    .list_keys = memory_list_keys,
    .clone = memory_clone,
    .destroy = memory_destroy,
    .append = memory_append,
    .multi_get = memory_multi_get,
    .multi_set = memory_multi_set,
    .queue_push = memory_queue_push,
    .queue_pop = memory_queue_pop,
    .queue_length = memory_queue_length,
};

tutti_status tutti_store_open_memory(tutti_store **store) {
    if (store == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "store open: there is no place for the result (NULL)");
    memory_store *memory = calloc(1, sizeof *memory);
    if (memory == NULL)
        return tu_error_memory("a memory store", sizeof *memory);
    tu_store_init(&memory->store, &memory_kind, 0);
    pthread_mutex_init(&memory->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&memory->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *store = &memory->store;
    return TUTTI_OK;
}
