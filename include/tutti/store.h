/* SPDX-License-Identifier: Apache-2.0
 *
 * Stores: key-value meeting places. Ranks use one to find each other; programs may use one for themselves.
 *
 * Four kinds with the same operations: memory (threads of one process), file (a file that all can open), tcp (a server
 * and its clients; speaks PyTorch's TCPStore protocol in both roles, and the same over a Unix socket) and prefix (a
 * part of another store).
 *
 * Keys and values are byte strings; keys are given as C strings of at most 8191 bytes; a tcp store takes values of at
 * most 8 MiB. A store may be used from any thread; calls on one tcp or file handle take turns, so a blocked get holds
 * up the others: use tutti_store_clone for another thread. A forked child cannot use its parent's stores
 * (TUTTI_ERROR_FORKED), and to release one there does nothing.
 *
 * Blocking calls take timeout_ns: 0 means the store's own (300 s unless set), negative is an error, but for
 * TUTTI_UNTIL_EVENT on the store of a world. A timeout is TUTTI_ERROR_TIMEOUT, its message contains "timeout", and the
 * store stays usable. Waits on tutti_world_store also end with the death of a rank, an abort of the world's group, an
 * interrupt or the world's close.
 */
#ifndef TUTTI_STORE_H
#define TUTTI_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tutti_store tutti_store;

/* ---- opening ---- */

/* All threads that hold (a reference to) this object share its keys. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_open_memory(tutti_store **store);

typedef struct tutti_file_store_options {
    size_t size;
    int64_t timeout_ns; /* default of blocking calls; 0: 300 s */
    int workers;        /* handles that will be closed before the file is removed; 0: never remove it */
} tutti_file_store_options;
#define TUTTI_FILE_STORE_OPTIONS_INIT TUTTI_DEFAULTS(tutti_file_store_options)
/* TUTTI_FILE_STORE_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_file_store_options_init(tutti_file_store_options *options, size_t size);

/* A file that all can open and lock; it is made where it does not exist. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_open_file(const char *path, const tutti_file_store_options *options,
                                                           tutti_store **store);

typedef struct tutti_tcp_store_options {
    size_t size;
    int64_t timeout_ns;  /* of connecting, and default of blocking calls; 0: 300 s */
    bool server;         /* host the server too; port 0 picks a free one, see tutti_store_port */
    int workers;         /* > 0: each store object announces itself, and the server waits for that many */
    bool no_wait;        /* with workers: the server does not wait */
    int listen_fd;       /* with server: a listening socket to take over; 0 or less: none */
    const void *secret;  /* the job's secret; NULL: none. With one, only clients that prove it are served. */
    size_t secret_bytes; /* 16 to 64 */
    bool trust_network;  /* allow a server without secret on an address other than loopback */
} tutti_tcp_store_options;
#define TUTTI_TCP_STORE_OPTIONS_INIT TUTTI_DEFAULTS(tutti_tcp_store_options)
/* TUTTI_TCP_STORE_OPTIONS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_tcp_store_options_init(tutti_tcp_store_options *options, size_t size);

/* `host` is a name or an address; "unix:@name" (abstract) and "unix:/path" are Unix sockets (port is ignored), where
 * the kernel's credentials admit only processes of the same user. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_open_tcp(const char *host, int port,
                                                          const tutti_tcp_store_options *options, tutti_store **store);

/* A store whose keys all get `prefix` and "/" in front. Keeps a reference to `base`. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_open_prefix(const char *prefix, tutti_store *base,
                                                             tutti_store **store);

/* A server without a client, for launchers. Its operations are errors; tutti_store_clone gives a client. See
 * tutti_store_address for what to tell the clients. Released with tutti_store_release. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_serve(const char *host, int port,
                                                       const tutti_tcp_store_options *options, tutti_store **server);

/* From "unix:@name", "tcp://host:port" or "file:///path" (the form of TUTTI_STORE). */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_open_url(const char *url, const tutti_tcp_store_options *options,
                                                          tutti_store **store);

/* An independent handle to the same data, safe for another thread. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_clone(tutti_store *store, tutti_store **clone);
/* Ends the handle; the keys live as long as the store does. NULL is allowed. */
TUTTI_API void tutti_store_release(tutti_store *store);

/* ---- values ---- */

/* Sets a key, whether or not it exists. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_set(tutti_store *store, const char *key, const void *value,
                                                     size_t bytes);

/* Waits until the key exists. *value has a zero byte after its end, and is freed with tutti_free. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_get(tutti_store *store, const char *key, int64_t timeout_ns,
                                                     void **value, size_t *bytes);

/* Atomic; a missing or empty key counts as 0; kept as decimal text. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_add(tutti_store *store, const char *key, int64_t amount, int64_t *sum);

/* Missing key and empty `expected`: sets, gives `desired`. Missing key else: gives `expected`. Equal to expected: sets,
 * gives `desired`. Otherwise gives what is there. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_compare_set(tutti_store *store, const char *key, const void *expected,
                                                             size_t expected_bytes, const void *desired,
                                                             size_t desired_bytes, void **value, size_t *bytes);

/* Waits until all these keys exist. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_wait(tutti_store *store, const char *const *keys, size_t count,
                                                      int64_t timeout_ns);
/* *present: whether all these keys exist. Never waits. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_check(tutti_store *store, const char *const *keys, size_t count,
                                                       bool *present);
/* Removes a key; *existed (may be NULL) says whether it was there. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_delete(tutti_store *store, const char *key, bool *existed);
/* How many keys there are; a tcp store counts one of its own where it has workers. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_num_keys(tutti_store *store, int64_t *count);

/* *keys is one block (array, then the texts), freed with one tutti_free. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_list_keys(tutti_store *store, char ***keys, size_t *count);

/* Adds bytes to the end of a value; a missing key counts as empty. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_append(tutti_store *store, const char *key, const void *value,
                                                        size_t bytes);

/* Waits until all keys exist. Each of values[i] is freed with tutti_free. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_multi_get(tutti_store *store, const char *const *keys, size_t count,
                                                           int64_t timeout_ns, void **values, size_t *bytes);
/* Sets several keys: keys[i] to the bytes[i] bytes at values[i]. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_multi_set(tutti_store *store, const char *const *keys, size_t count,
                                                           const void *const *values, const size_t *bytes);

/* ---- queues: first in, first out, in a namespace of their own ---- */

/* Adds a value to the end of a queue, which is made by the first one. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_queue_push(tutti_store *store, const char *key, const void *value,
                                                            size_t bytes);
/* block false and nothing there: TUTTI_ERROR_EMPTY. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_queue_pop(tutti_store *store, const char *key, bool block,
                                                           int64_t timeout_ns, void **value, size_t *bytes);
/* How many values a queue holds; 0 for one that does not exist. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_queue_length(tutti_store *store, const char *key, int64_t *length);

/* ---- and the rest ---- */

/* Returns when `count` callers have come. One use per key. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_barrier(tutti_store *store, const char *key, int64_t count,
                                                         int64_t timeout_ns);
/* Sets the default timeout of this handle's blocking calls. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_store_set_timeout(tutti_store *store, int64_t timeout_ns);
/* The default timeout of this handle's blocking calls, in nanoseconds. */
TUTTI_API int64_t tutti_store_timeout(const tutti_store *store);
/* Whether append and the multi_ calls are native to this kind. */
TUTTI_API bool tutti_store_has_extended_api(const tutti_store *store);
/* "memory", "file", "tcp" or "prefix". */
TUTTI_API const char *tutti_store_kind(const tutti_store *store);
/* Of a tcp store or server: the port in use; -1 for other kinds and Unix sockets. */
TUTTI_API int tutti_store_port(const tutti_store *store);
/* Of a tcp store or server: "tcp://host:port" or "unix:…", as tutti_store_open_url and TUTTI_STORE take it; else "".
 * Lent. */
TUTTI_API const char *tutti_store_address(const tutti_store *store);
/* The store below all prefixes; lent. */
TUTTI_API tutti_store *tutti_store_underlying(tutti_store *store);

#ifdef __cplusplus
}
#endif
#endif
