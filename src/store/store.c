/* SPDX-License-Identifier: Apache-2.0
 *
 * The front of all stores: checks arguments, settles timeouts, calls the kind, and makes what a kind does not have
 * itself from what it has.
 */
#include "store/store.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"

void tu_store_init(tutti_store *store, const tu_store_kind *kind, int64_t timeout_ns) {
    store->kind = kind;
    atomic_init(&store->references, 1);
    atomic_init(&store->timeout_ns, timeout_ns > 0 ? timeout_ns : TU_STORE_TIMEOUT);
    store->owner = getpid();
    store->watch = NULL;
}

void tu_store_set_watch(tutti_store *store, tu_watch *watch) {
    tu_watch_release(store->watch);
    store->watch = tu_watch_keep(watch);
}

void tu_store_retain(tutti_store *store) {
    /* Relaxed: whoever retains holds a reference already. */
    atomic_fetch_add_explicit(&store->references, 1, memory_order_relaxed);
}

bool tu_store_forked(const tutti_store *store) {
    return store->owner != getpid();
}

void tutti_store_release(tutti_store *store) {
    if (store == NULL || tu_store_forked(store)) /* its threads, and the other ends, are the parent's */
        return;
    /* Release: my use of the store; acquire: everybody else's, before it goes. They pair with each other. */
    if (atomic_fetch_sub_explicit(&store->references, 1, memory_order_acq_rel) != 1)
        return;
    tu_watch_release(store->watch);
    store->kind->destroy(store);
}

/* ---- messages and small parts that the kinds share ---- */

tutti_status tu_store_wait_timeout(const char *const *keys, size_t count, int64_t timeout_ns) {
    enum {
        SHOWN = 16
    };
    tutti_status status =
        tu_error(TUTTI_ERROR_TIMEOUT, "wait timeout after %" PRId64 "ms, keys:", timeout_ns / TU_MILLISECOND);
    for (size_t i = 0; i < count && i < SHOWN; i++)
        tu_error_append("%s /%.200s", i == 0 ? "" : ",", keys[i]);
    if (count > SHOWN)
        tu_error_append(" and %zu more", count - SHOWN);
    return status;
}

tutti_status tu_store_queue_empty(const char *key) {
    return tu_error(TUTTI_ERROR_EMPTY, "queue %s is empty", key);
}

tutti_status tu_store_not_a_number(const char *key) {
    return tu_error(TUTTI_ERROR_STORE,
                    "add: the value of key %s is not a decimal integer, or the sum does not fit 64 bits", key);
}

tutti_status tu_store_copy(const void *data, size_t bytes, void **copy) {
    char *fresh = bytes < SIZE_MAX ? malloc(bytes + 1) : NULL;
    if (fresh == NULL)
        return tu_error_memory("a store's value", bytes);
    if (bytes > 0)
        memcpy(fresh, data, bytes);
    fresh[bytes] = 0;
    *copy = fresh;
    return TUTTI_OK;
}

tutti_status tu_store_key_block(const char *const *texts, const size_t *lengths, size_t count, char ***keys) {
    size_t bytes = count * sizeof(char *) + 1;
    for (size_t i = 0; i < count; i++)
        bytes += lengths[i] + 1;
    char **block = malloc(bytes);
    if (block == NULL)
        return tu_error_memory("a list of keys", bytes);
    char *text = (char *)(block + count);
    for (size_t i = 0; i < count; i++) {
        block[i] = text;
        memcpy(text, texts[i], lengths[i]);
        text[lengths[i]] = 0;
        text += lengths[i] + 1;
    }
    *keys = block;
    return TUTTI_OK;
}

bool tu_store_parse(const void *text, size_t bytes, int64_t *number) {
    if (bytes == 0) {
        *number = 0;
        return true;
    }
    const char *digit = text;
    const char *end = digit + bytes;
    bool negative = *digit == '-';
    if (negative && ++digit == end)
        return false;
    int64_t value = 0; /* kept negative: that side reaches one further */
    for (; digit < end; digit++) {
        if (*digit < '0' || *digit > '9')
            return false;
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_sub_overflow(value, *digit - '0', &value))
            return false;
    }
    if (!negative && value == INT64_MIN)
        return false;
    *number = negative ? value : -value;
    return true;
}

size_t tu_store_print(int64_t number, char text[TU_STORE_NUMBER]) {
    return (size_t)snprintf(text, TU_STORE_NUMBER, "%" PRId64, number);
}

/* ---- argument checks ---- */

static tutti_status check_store(const tutti_store *store, const char *operation) {
    if (store == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the store is NULL", operation);
    if (tu_store_forked(store))
        return tu_error(TUTTI_ERROR_FORKED,
                        "%s: this store was opened by process %d, and this is a forked child; open another here",
                        operation, (int)store->owner);
    return TUTTI_OK;
}

static tutti_status check_length(const char *operation, const char *key) {
    if (strnlen(key, TU_STORE_KEY + 1) <= TU_STORE_KEY)
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_RANGE, "%s: a key of %zu bytes is too long; at most %d are possible", operation,
                    strlen(key), TU_STORE_KEY);
}

static tutti_status check_key(const tutti_store *store, const char *operation, const char *key) {
    tutti_status status = check_store(store, operation);
    if (status != TUTTI_OK)
        return status;
    return key != NULL ? check_length(operation, key)
                       : tu_error(TUTTI_ERROR_ARGUMENT, "%s: the key is NULL", operation);
}

static tutti_status check_keys(const tutti_store *store, const char *operation, const char *const *keys, size_t count) {
    tutti_status status = check_store(store, operation);
    if (status != TUTTI_OK)
        return status;
    if (keys == NULL && count > 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the list of keys is NULL", operation);
    for (size_t i = 0; i < count; i++) {
        if (keys[i] == NULL)
            return tu_error(TUTTI_ERROR_ARGUMENT, "%s: key %zu of %zu is NULL", operation, i, count);
        status = check_length(operation, keys[i]);
        if (status != TUTTI_OK)
            return status;
    }
    return TUTTI_OK;
}

static tutti_status check_value(const char *operation, const void *value, size_t bytes) {
    if (value == NULL && bytes > 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the value is NULL but has %zu bytes", operation, bytes);
    return TUTTI_OK;
}

static tutti_status check_result(const char *operation, const void *result) {
    return result != NULL ? TUTTI_OK
                          : tu_error(TUTTI_ERROR_ARGUMENT, "%s: there is no place for the result (NULL)", operation);
}

static tutti_status choose_timeout(const tutti_store *store, const char *operation, int64_t timeout_ns,
                                   int64_t *chosen) {
    if (timeout_ns == TUTTI_UNTIL_EVENT) {
        if (store->watch == NULL && !tu_watched())
            return tu_error(TUTTI_ERROR_ARGUMENT,
                            "%s: TUTTI_UNTIL_EVENT is for the store of a world (tutti_world_store): no event would end "
                            "a wait on this one",
                            operation);
        *chosen = INT64_MAX;
        return TUTTI_OK;
    }
    return tu_timeout_choose(operation, timeout_ns, tutti_store_timeout(store), TU_STORE_TIMEOUT, chosen);
}

/* Runs a check and leaves the function with its status when it fails. */
#define CHECK(expression)                         \
    do {                                          \
        tutti_status check_status = (expression); \
        if (check_status != TUTTI_OK)             \
            return check_status;                  \
    } while (0)

/* Runs a call that may wait, with the store's watch if it has one. */
#define WATCHED(store, timeout, call)                                           \
    do {                                                                        \
        tu_watch *before = tu_watch_thread(store->watch, timeout == INT64_MAX); \
        tutti_status watched_status = (call);                                   \
        tu_watch_thread_back(before);                                           \
        return watched_status;                                                  \
    } while (0)

/* ---- values ---- */

tutti_status tutti_store_set(tutti_store *store, const char *key, const void *value, size_t bytes) {
    CHECK(check_key(store, "store set", key));
    CHECK(check_value("store set", value, bytes));
    return store->kind->set(store, key, value, bytes);
}

tutti_status tutti_store_get(tutti_store *store, const char *key, int64_t timeout_ns, void **value, size_t *bytes) {
    int64_t timeout;
    CHECK(check_key(store, "store get", key));
    CHECK(check_result("store get", value));
    CHECK(choose_timeout(store, "store get", timeout_ns, &timeout));
    size_t ignored;
    WATCHED(store, timeout, store->kind->get(store, key, timeout, value, bytes != NULL ? bytes : &ignored));
}

tutti_status tutti_store_add(tutti_store *store, const char *key, int64_t amount, int64_t *sum) {
    CHECK(check_key(store, "store add", key));
    int64_t ignored;
    return store->kind->add(store, key, amount, sum != NULL ? sum : &ignored);
}

tutti_status tutti_store_compare_set(tutti_store *store, const char *key, const void *expected, size_t expected_bytes,
                                     const void *desired, size_t desired_bytes, void **value, size_t *bytes) {
    CHECK(check_key(store, "store compare_set", key));
    CHECK(check_value("store compare_set (expected)", expected, expected_bytes));
    CHECK(check_value("store compare_set (desired)", desired, desired_bytes));
    CHECK(check_result("store compare_set", value));
    size_t ignored;
    return store->kind->compare_set(store, key, expected, expected_bytes, desired, desired_bytes, value,
                                    bytes != NULL ? bytes : &ignored);
}

tutti_status tutti_store_wait(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns) {
    int64_t timeout;
    CHECK(check_keys(store, "store wait", keys, count));
    CHECK(choose_timeout(store, "store wait", timeout_ns, &timeout));
    if (count == 0)
        return TUTTI_OK;
    WATCHED(store, timeout, store->kind->wait(store, keys, count, timeout));
}

tutti_status tutti_store_check(tutti_store *store, const char *const *keys, size_t count, bool *present) {
    CHECK(check_keys(store, "store check", keys, count));
    CHECK(check_result("store check", present));
    if (count == 0) {
        *present = true;
        return TUTTI_OK;
    }
    return store->kind->check(store, keys, count, present);
}

tutti_status tutti_store_delete(tutti_store *store, const char *key, bool *existed) {
    CHECK(check_key(store, "store delete", key));
    bool ignored;
    return store->kind->remove(store, key, existed != NULL ? existed : &ignored);
}

tutti_status tutti_store_num_keys(tutti_store *store, int64_t *count) {
    CHECK(check_store(store, "store num_keys"));
    CHECK(check_result("store num_keys", count));
    return store->kind->num_keys(store, count);
}

tutti_status tutti_store_list_keys(tutti_store *store, char ***keys, size_t *count) {
    CHECK(check_store(store, "store list_keys"));
    CHECK(check_result("store list_keys", keys));
    CHECK(check_result("store list_keys", count));
    return store->kind->list_keys(store, keys, count);
}

tutti_status tutti_store_append(tutti_store *store, const char *key, const void *value, size_t bytes) {
    CHECK(check_key(store, "store append", key));
    CHECK(check_value("store append", value, bytes));
    return store->kind->append(store, key, value, bytes);
}

static tutti_status get_one_by_one(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns,
                                   void **values, size_t *bytes) {
    int64_t deadline = tu_deadline(timeout_ns);
    for (size_t i = 0; i < count; i++) {
        int64_t left = tu_deadline_left(deadline);
        tutti_status status = store->kind->get(store, keys[i], left > 0 ? left : 1, &values[i], &bytes[i]);
        if (status != TUTTI_OK) {
            while (i-- > 0)
                free(values[i]);
            return status;
        }
    }
    return TUTTI_OK;
}

tutti_status tutti_store_multi_get(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns,
                                   void **values, size_t *bytes) {
    int64_t timeout;
    CHECK(check_keys(store, "store multi_get", keys, count));
    CHECK(choose_timeout(store, "store multi_get", timeout_ns, &timeout));
    if (count == 0)
        return TUTTI_OK;
    CHECK(check_result("store multi_get", values));
    CHECK(check_result("store multi_get", bytes));
    if (store->kind->multi_get == NULL)
        WATCHED(store, timeout, get_one_by_one(store, keys, count, timeout, values, bytes));
    WATCHED(store, timeout, store->kind->multi_get(store, keys, count, timeout, values, bytes));
}

tutti_status tutti_store_multi_set(tutti_store *store, const char *const *keys, size_t count, const void *const *values,
                                   const size_t *bytes) {
    CHECK(check_keys(store, "store multi_set", keys, count));
    if (count == 0)
        return TUTTI_OK;
    if (values == NULL || bytes == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "store multi_set: %zu keys but no values", count);
    for (size_t i = 0; i < count; i++)
        CHECK(check_value("store multi_set", values[i], bytes[i]));
    if (store->kind->multi_set != NULL)
        return store->kind->multi_set(store, keys, count, values, bytes);
    for (size_t i = 0; i < count; i++)
        CHECK(store->kind->set(store, keys[i], values[i], bytes[i]));
    return TUTTI_OK;
}

/* ---- queues ---- */

static tutti_status no_queues(const tutti_store *store) {
    return tu_error(TUTTI_ERROR_UNSUPPORTED, "a %s store has no queues; memory and tcp stores have", store->kind->name);
}

tutti_status tutti_store_queue_push(tutti_store *store, const char *key, const void *value, size_t bytes) {
    CHECK(check_key(store, "store queue_push", key));
    CHECK(check_value("store queue_push", value, bytes));
    return store->kind->queue_push != NULL ? store->kind->queue_push(store, key, value, bytes) : no_queues(store);
}

tutti_status tutti_store_queue_pop(tutti_store *store, const char *key, bool block, int64_t timeout_ns, void **value,
                                   size_t *bytes) {
    int64_t timeout;
    CHECK(check_key(store, "store queue_pop", key));
    CHECK(check_result("store queue_pop", value));
    CHECK(choose_timeout(store, "store queue_pop", timeout_ns, &timeout));
    size_t ignored;
    if (store->kind->queue_pop == NULL)
        return no_queues(store);
    WATCHED(store, timeout,
            store->kind->queue_pop(store, key, block, timeout, value, bytes != NULL ? bytes : &ignored));
}

tutti_status tutti_store_queue_length(tutti_store *store, const char *key, int64_t *length) {
    CHECK(check_key(store, "store queue_length", key));
    CHECK(check_result("store queue_length", length));
    return store->kind->queue_length != NULL ? store->kind->queue_length(store, key, length) : no_queues(store);
}

/* ---- barrier ---- */

/* Everybody adds one; who completes the count sets the flag that all wait for. */
static tutti_status barrier_by_add(tutti_store *store, const char *key, int64_t count, int64_t timeout_ns) {
    char name[TU_STORE_KEY + sizeof "/num_members"];
    const char *flag = name;
    size_t length = strlen(key);
    if (length + strlen("/num_members") > TU_STORE_KEY)
        return tu_error(TUTTI_ERROR_RANGE, "store barrier: a key of %zu bytes is too long; a barrier adds to it",
                        length);
    memcpy(name, key, length);
    memcpy(name + length, "/num_members", sizeof "/num_members");
    int64_t members = 0;
    tutti_status status = store->kind->add(store, name, 1, &members);
    memcpy(name + length, "/last_member", sizeof "/last_member");
    if (status == TUTTI_OK && members >= count)
        status = store->kind->set(store, name, "1", 1);
    if (status == TUTTI_OK)
        status = store->kind->wait(store, &flag, 1, timeout_ns);
    if (status == TUTTI_ERROR_TIMEOUT)
        status = tu_error(TUTTI_ERROR_TIMEOUT,
                          "barrier timeout after %" PRId64 "ms, key: /%s (this caller was number %" PRId64
                          " of %" PRId64 ")",
                          timeout_ns / TU_MILLISECOND, key, members, count);
    return status;
}

tutti_status tutti_store_barrier(tutti_store *store, const char *key, int64_t count, int64_t timeout_ns) {
    int64_t timeout;
    CHECK(check_key(store, "store barrier", key));
    CHECK(choose_timeout(store, "store barrier", timeout_ns, &timeout));
    if (count < 1)
        return tu_error(TUTTI_ERROR_ARGUMENT, "store barrier: the count must be at least 1, not %" PRId64, count);
    if (store->kind->barrier == NULL)
        WATCHED(store, timeout, barrier_by_add(store, key, count, timeout));
    WATCHED(store, timeout, store->kind->barrier(store, key, count, timeout));
}

/* ---- the handle itself ---- */

tutti_status tutti_store_clone(tutti_store *store, tutti_store **clone) {
    CHECK(check_store(store, "store clone"));
    CHECK(check_result("store clone", clone));
    tutti_store *made;
    CHECK(store->kind->clone(store, &made));
    if (made != store) /* a clone may be another reference to the same store, which other threads use */
        tu_store_set_watch(made, store->watch);
    *clone = made;
    return TUTTI_OK;
}

tutti_status tu_store_move(tutti_store *store, const char *host, int port, int64_t timeout_ns) {
    while (store->kind->base != NULL)
        store = store->kind->base(store);
    return store->kind->move != NULL ? store->kind->move(store, host, port, timeout_ns) : TUTTI_OK;
}

static const tutti_store *below(const tutti_store *store) {
    while (store->kind->base != NULL)
        store = store->kind->base((tutti_store *)store);
    return store;
}

tutti_store *tutti_store_underlying(tutti_store *store) {
    return store != NULL ? (tutti_store *)below(store) : NULL;
}

tutti_status tutti_store_set_timeout(tutti_store *store, int64_t timeout_ns) {
    int64_t timeout;
    CHECK(check_store(store, "store set_timeout"));
    CHECK(tu_timeout_choose("store set_timeout", timeout_ns, TU_STORE_TIMEOUT, 0, &timeout));
    /* Relaxed: a number on its own. */
    atomic_store_explicit(&tutti_store_underlying(store)->timeout_ns, timeout, memory_order_relaxed);
    return TUTTI_OK;
}

int64_t tutti_store_timeout(const tutti_store *store) {
    return store != NULL ? atomic_load_explicit(&below(store)->timeout_ns, memory_order_relaxed) : 0;
}

bool tutti_store_has_extended_api(const tutti_store *store) {
    return store != NULL && below(store)->kind->extended_api;
}

const char *tutti_store_kind(const tutti_store *store) {
    return store != NULL ? store->kind->name : "";
}

int tutti_store_port(const tutti_store *store) {
    const tutti_store *base = store != NULL ? below(store) : NULL;
    return base != NULL && base->kind->port != NULL ? base->kind->port(base) : -1;
}

int tu_store_server(const tutti_store *store) {
    const tutti_store *base = below(store);
    return base->kind->server != NULL ? base->kind->server(base) : 0;
}

const char *tutti_store_address(const tutti_store *store) {
    const tutti_store *base = store != NULL ? below(store) : NULL;
    return base != NULL && base->kind->address != NULL ? base->kind->address(base) : "";
}
