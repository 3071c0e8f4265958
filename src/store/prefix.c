/* SPDX-License-Identifier: Apache-2.0
 *
 * The prefix store: a part of another store. Every key gets the prefix and "/" in front; everything else is passed on.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/store.h"

typedef struct prefix_store {
    tutti_store store;
    tutti_store *base;   /* a reference */
    size_t prefix_bytes; /* with the slash */
    char prefix[];       /* with the slash */
} prefix_store;

static prefix_store *as_prefix(tutti_store *store) {
    return (prefix_store *)store;
}

/* ---- keys ---- */

/* Short names need no memory from the heap. */
typedef struct name {
    char *text;
    char space[256];
} name;

static tutti_status name_make(name *name, const prefix_store *prefix, const char *key) {
    size_t bytes = prefix->prefix_bytes + strlen(key) + 1;
    name->text = bytes <= sizeof name->space ? name->space : malloc(bytes);
    if (name->text == NULL)
        return tu_error_memory("a prefixed key", bytes);
    memcpy(name->text, prefix->prefix, prefix->prefix_bytes);
    memcpy(name->text + prefix->prefix_bytes, key, bytes - prefix->prefix_bytes);
    return TUTTI_OK;
}

static tutti_status name_end(name *name, tutti_status status) {
    if (name->text != name->space)
        free(name->text);
    return status;
}

/* One block: the array, then the names. */
static tutti_status names_make(const prefix_store *prefix, const char *const *keys, size_t count, char ***names) {
    size_t bytes = count * sizeof(char *);
    for (size_t i = 0; i < count; i++)
        bytes += prefix->prefix_bytes + strlen(keys[i]) + 1;
    char **block = malloc(bytes);
    if (block == NULL)
        return tu_error_memory("prefixed keys", bytes);
    char *text = (char *)(block + count);
    for (size_t i = 0; i < count; i++) {
        block[i] = text;
        memcpy(text, prefix->prefix, prefix->prefix_bytes);
        size_t key_bytes = strlen(keys[i]) + 1;
        memcpy(text + prefix->prefix_bytes, keys[i], key_bytes);
        text += prefix->prefix_bytes + key_bytes;
    }
    *names = block;
    return TUTTI_OK;
}

/* Does `call` with the key's full name, `full.text`, on the base store, `base`. */
#define WITH_NAME(call)                                                \
    do {                                                               \
        name full;                                                     \
        tutti_store *base = as_prefix(store)->base;                    \
        tutti_status status = name_make(&full, as_prefix(store), key); \
        return status == TUTTI_OK ? name_end(&full, (call)) : status;  \
    } while (0)

/* The same for a list of keys, `names`. */
#define WITH_NAMES(call)                                                        \
    do {                                                                        \
        char **list;                                                            \
        tutti_store *base = as_prefix(store)->base;                             \
        tutti_status status = names_make(as_prefix(store), keys, count, &list); \
        if (status != TUTTI_OK)                                                 \
            return status;                                                      \
        const char *const *names = (const char *const *)list;                   \
        status = (call);                                                        \
        free(list);                                                             \
        return status;                                                          \
    } while (0)

/* ---- the operations ---- */

static tutti_status prefix_set(tutti_store *store, const char *key, const void *value, size_t bytes) {
    WITH_NAME(tutti_store_set(base, full.text, value, bytes));
}

static tutti_status prefix_get(tutti_store *store, const char *key, int64_t timeout_ns, void **value, size_t *bytes) {
    WITH_NAME(tutti_store_get(base, full.text, timeout_ns, value, bytes));
}

static tutti_status prefix_add(tutti_store *store, const char *key, int64_t amount, int64_t *sum) {
    WITH_NAME(tutti_store_add(base, full.text, amount, sum));
}

static tutti_status prefix_compare_set(tutti_store *store, const char *key, const void *expected, size_t expected_bytes,
                                       const void *desired, size_t desired_bytes, void **value, size_t *bytes) {
    WITH_NAME(tutti_store_compare_set(base, full.text, expected, expected_bytes, desired, desired_bytes, value, bytes));
}

static tutti_status prefix_wait(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns) {
    WITH_NAMES(tutti_store_wait(base, names, count, timeout_ns));
}

static tutti_status prefix_check(tutti_store *store, const char *const *keys, size_t count, bool *present) {
    WITH_NAMES(tutti_store_check(base, names, count, present));
}

static tutti_status prefix_delete(tutti_store *store, const char *key, bool *existed) {
    WITH_NAME(tutti_store_delete(base, full.text, existed));
}

static tutti_status prefix_num_keys(tutti_store *store, int64_t *count) {
    return tutti_store_num_keys(as_prefix(store)->base, count);
}

/* Only keys below the prefix, without it. They stay in the block that the base made; the array shrinks in place. */
static tutti_status prefix_list_keys(tutti_store *store, char ***keys, size_t *count) {
    prefix_store *prefix = as_prefix(store);
    char **all;
    size_t all_count;
    tutti_status status = tutti_store_list_keys(prefix->base, &all, &all_count);
    if (status != TUTTI_OK)
        return status;
    size_t kept = 0;
    for (size_t i = 0; i < all_count; i++) {
        if (strncmp(all[i], prefix->prefix, prefix->prefix_bytes) == 0)
            all[kept++] = all[i] + prefix->prefix_bytes;
    }
    *keys = all;
    *count = kept;
    return TUTTI_OK;
}

static tutti_status prefix_append(tutti_store *store, const char *key, const void *value, size_t bytes) {
    WITH_NAME(tutti_store_append(base, full.text, value, bytes));
}

static tutti_status prefix_multi_get(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns,
                                     void **values, size_t *bytes) {
    WITH_NAMES(tutti_store_multi_get(base, names, count, timeout_ns, values, bytes));
}

static tutti_status prefix_multi_set(tutti_store *store, const char *const *keys, size_t count,
                                     const void *const *values, const size_t *bytes) {
    WITH_NAMES(tutti_store_multi_set(base, names, count, values, bytes));
}

static tutti_status prefix_queue_push(tutti_store *store, const char *key, const void *value, size_t bytes) {
    WITH_NAME(tutti_store_queue_push(base, full.text, value, bytes));
}

static tutti_status prefix_queue_pop(tutti_store *store, const char *key, bool block, int64_t timeout_ns, void **value,
                                     size_t *bytes) {
    WITH_NAME(tutti_store_queue_pop(base, full.text, block, timeout_ns, value, bytes));
}

static tutti_status prefix_queue_length(tutti_store *store, const char *key, int64_t *length) {
    WITH_NAME(tutti_store_queue_length(base, full.text, length));
}

static tutti_store *prefix_base(tutti_store *store) {
    return as_prefix(store)->base;
}

static void prefix_destroy(tutti_store *store) {
    tutti_store_release(as_prefix(store)->base);
    free(store);
}

/* ---- opening ---- */

static tutti_status prefix_clone(tutti_store *store, tutti_store **clone);

/* Barriers are made from add, set and wait (the front does that), as every PyTorch prefix store does: both kinds of
 * program can meet in one. */
static const tu_store_kind prefix_kind = {
    .name = "prefix",
    .set = prefix_set,
    .get = prefix_get,
    .add = prefix_add,
    .compare_set = prefix_compare_set,
    .wait = prefix_wait,
    .check = prefix_check,
    .remove = prefix_delete,
    .num_keys = prefix_num_keys,
    .list_keys = prefix_list_keys,
    .clone = prefix_clone,
    .destroy = prefix_destroy,
    .append = prefix_append,
    .multi_get = prefix_multi_get,
    .multi_set = prefix_multi_set,
    .queue_push = prefix_queue_push,
    .queue_pop = prefix_queue_pop,
    .queue_length = prefix_queue_length,
    .base = prefix_base,
};

/* Takes over the reference to `base`, also when it fails. */
static tutti_status prefix_make(const char *text, size_t text_bytes, tutti_store *base, tutti_store **store) {
    prefix_store *prefix = malloc(sizeof *prefix + text_bytes + 1);
    if (prefix == NULL) {
        tutti_store_release(base);
        return tu_error_memory("a prefix store", sizeof *prefix + text_bytes);
    }
    tu_store_init(&prefix->store, &prefix_kind, 0);
    prefix->base = base;
    prefix->prefix_bytes = text_bytes;
    memcpy(prefix->prefix, text, text_bytes);
    prefix->prefix[text_bytes] = 0;
    *store = &prefix->store;
    return TUTTI_OK;
}

static tutti_status prefix_clone(tutti_store *store, tutti_store **clone) {
    prefix_store *prefix = as_prefix(store);
    tutti_store *base;
    tutti_status status = tutti_store_clone(prefix->base, &base);
    if (status != TUTTI_OK)
        return status;
    return prefix_make(prefix->prefix, prefix->prefix_bytes, base, clone);
}

tutti_status tutti_store_open_prefix(const char *prefix, tutti_store *base, tutti_store **store) {
    if (prefix == NULL || store == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "store open_prefix: the %s is NULL",
                        prefix == NULL ? "prefix" : "place for the result");
    if (base == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "store open_prefix: there is no underlying store (NULL)");
    size_t bytes = strlen(prefix);
    char *slashed = malloc(bytes + 1);
    if (slashed == NULL)
        return tu_error_memory("a prefix", bytes);
    memcpy(slashed, prefix, bytes);
    slashed[bytes] = '/';
    tu_store_retain(base);
    tutti_status status = prefix_make(slashed, bytes + 1, base, store);
    free(slashed);
    return status;
}
