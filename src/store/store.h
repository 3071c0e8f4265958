/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kinds of store have in common: one table of functions per kind. The front (store.c) checks arguments and
 * settles timeouts; a kind may rely on that: keys and results are not NULL, keys are not too long, timeout_ns is
 * positive.
 */
#ifndef TU_STORE_STORE_H
#define TU_STORE_STORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <tutti/store.h>

#include "store/watch.h"

typedef struct tu_store_kind {
    const char *name;
    bool extended_api;
    tutti_status (*set)(tutti_store *, const char *key, const void *value, size_t bytes);
    tutti_status (*get)(tutti_store *, const char *key, int64_t timeout_ns, void **value, size_t *bytes);
    tutti_status (*add)(tutti_store *, const char *key, int64_t amount, int64_t *sum);
    tutti_status (*append)(tutti_store *, const char *key, const void *value, size_t bytes);
    tutti_status (*compare_set)(tutti_store *, const char *key, const void *expected, size_t expected_bytes,
                                const void *desired, size_t desired_bytes, void **value, size_t *bytes);
    tutti_status (*wait)(tutti_store *, const char *const *keys, size_t count, int64_t timeout_ns);
    tutti_status (*check)(tutti_store *, const char *const *keys, size_t count, bool *present);
    tutti_status (*remove)(tutti_store *, const char *key, bool *existed);
    tutti_status (*num_keys)(tutti_store *, int64_t *count);
    tutti_status (*list_keys)(tutti_store *, char ***keys, size_t *count);
    tutti_status (*clone)(tutti_store *, tutti_store **clone);
    void (*destroy)(tutti_store *);
    /* The rest may be NULL: the first three are then made from the calls above, queues are unsupported. */
    tutti_status (*multi_get)(tutti_store *, const char *const *keys, size_t count, int64_t timeout_ns, void **values,
                              size_t *bytes);
    tutti_status (*multi_set)(tutti_store *, const char *const *keys, size_t count, const void *const *values,
                              const size_t *bytes);
    tutti_status (*barrier)(tutti_store *, const char *key, int64_t count, int64_t timeout_ns);
    tutti_status (*queue_push)(tutti_store *, const char *key, const void *value, size_t bytes);
    tutti_status (*queue_pop)(tutti_store *, const char *key, bool block, int64_t timeout_ns, void **value,
                              size_t *bytes);
    tutti_status (*queue_length)(tutti_store *, const char *key, int64_t *length);
    int (*port)(const tutti_store *);
    const char *(*address)(const tutti_store *);
    int (*server)(const tutti_store *);  /* see tu_store_server */
    tutti_store *(*base)(tutti_store *); /* of a prefix: the store below */
    tutti_status (*move)(tutti_store *, const char *host, int port, int64_t timeout_ns); /* NULL: it has no server */
} tu_store_kind;

/* Stands first in the struct of every kind. */
struct tutti_store {
    const tu_store_kind *kind;
    _Atomic int references;
    _Atomic int64_t timeout_ns; /* of blocking calls that give none; > 0 */
    pid_t owner;                /* a forked child may not use it */
    tu_watch *watch;            /* a reference; NULL: nobody looks around while its calls wait */
};

#define TU_STORE_TIMEOUT (INT64_C(300) * 1000000000)
#define TU_STORE_KEY 8191 /* bytes that a key may have; the front checks it */

void tu_store_init(tutti_store *store, const tu_store_kind *kind, int64_t timeout_ns);
void tu_store_retain(tutti_store *store);
bool tu_store_forked(const tutti_store *store);
int tu_store_server(const tutti_store *store); /* pid of the process that serves it, where that is known; else 0 */
/* Another server takes the place of a tcp store's, with the same secret and none of its keys: the handle and those on
 * top of it go there. Other stores stay as they are. */
tutti_status tu_store_move(tutti_store *store, const char *host, int port, int64_t timeout_ns);
/* From now on calls that wait on this store, and on clones made later, look around. Takes a reference of its own. */
void tu_store_set_watch(tutti_store *store, tu_watch *watch);

/* Writes "wait timeout after 100ms, keys: /a, /b" and returns TUTTI_ERROR_TIMEOUT. */
tutti_status tu_store_wait_timeout(const char *const *keys, size_t count, int64_t timeout_ns);
tutti_status tu_store_queue_empty(const char *key);
tutti_status tu_store_not_a_number(const char *key);

/* A malloc'ed copy with a zero byte after its end. */
tutti_status tu_store_copy(const void *data, size_t bytes, void **copy);

/* Builds the block of tutti_store_list_keys: key i is texts[i], lengths[i]. */
tutti_status tu_store_key_block(const char *const *texts, const size_t *lengths, size_t count, char ***keys);

/* Decimal text to number and back, as `add` keeps it; empty text is 0. False: not a decimal integer that fits. */
bool tu_store_parse(const void *text, size_t bytes, int64_t *number);
#define TU_STORE_NUMBER 24
size_t tu_store_print(int64_t number, char text[TU_STORE_NUMBER]);

#endif
