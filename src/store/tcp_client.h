/* SPDX-License-Identifier: Apache-2.0
 *
 * The client of a tcp store, in three files: tcp_open.c opens, clones and closes it, tcp_client.c has the operations,
 * tcp_command.c sends one command and receives its reply.
 *
 * One command at a time per handle, under its lock. A command that fails half-way leaves the connection in an unknown
 * state: it is closed, and later calls say so. A wait that runs out of time is cancelled, and the connection goes on.
 */
#ifndef TU_STORE_TCP_CLIENT_H
#define TU_STORE_TCP_CLIENT_H

#include <pthread.h>

#include "store/connect.h"
#include "store/store.h"
#include "store/tcp.h"
#include "store/wire.h"

typedef struct tu_tcp_store {
    tutti_store store;
    tu_address address;
    tu_address_list own; /* of a server in this process: where to connect to; count 0: by `address` */
    char text[300];      /* as a URL */
    tu_secret secret;
    tu_server *server;             /* a reference; NULL: elsewhere */
    bool client;                   /* false: only a server */
    uint8_t nobody[TU_AUTH_BYTES]; /* a value that nobody has: see read_locked */
    pthread_mutex_t lock;
    tu_connection connection; /* under `lock`, and so is the next */
    tu_buffer out;
} tu_tcp_store;

static inline tu_tcp_store *tu_as_tcp(const tutti_store *store) {
    return (tu_tcp_store *)store;
}

/* ---- a command (tcp_command.c) ---- */

typedef struct tu_tcp_call {
    tu_tcp_store *tcp;
    const char *operation;
    int64_t timeout_ns, deadline;
    int64_t reply_deadline; /* of what the server owes at once */
    int64_t reply_time;     /* how long that may take; 0: as tu_tcp_send_with says */
} tu_tcp_call;

/* Locks the handle until tu_tcp_end. Waiting for another thread's call is part of the time. The short form has the
 * store's own deadline: for calls that do not wait for others. */
tutti_status tu_tcp_begin(tu_tcp_call *call, tutti_store *store, const char *operation, int64_t timeout_ns);
tutti_status tu_tcp_begin_short(tu_tcp_call *call, tutti_store *store, const char *operation);
tutti_status tu_tcp_end(tu_tcp_call *call, tutti_status status);
/* The reply is not what the command must give, or it did not come: nothing more can be understood. */
tutti_status tu_tcp_broken(tu_tcp_call *call, tutti_status status);
tutti_status tu_tcp_unexpected(tu_tcp_call *call, int64_t reply);
/* Sends what stands in the handle's buffer, and `tail` behind it. */
tutti_status tu_tcp_send_with(tu_tcp_call *call, const void *tail, size_t tail_bytes);
tutti_status tu_tcp_send(tu_tcp_call *call);
tutti_status tu_tcp_receive(tu_tcp_call *call, void *data, size_t bytes);
tutti_status tu_tcp_receive_i64(tu_tcp_call *call, int64_t *number);
tutti_status tu_tcp_receive_value(tu_tcp_call *call, void **value, size_t *bytes);

/* ---- operations (tcp_client.c) ---- */

extern const tu_store_kind tu_tcp_kind;
tutti_status tu_tcp_add_locked(tu_tcp_call *call, const void *key, size_t key_bytes, int64_t amount, int64_t *sum);
/* Sleeps for a while, no longer than until the deadline. */
void tu_tcp_rest(int64_t pause, int64_t deadline);

/* ---- opening and closing (tcp_open.c) ---- */

/* A store without a connection. */
tutti_status tu_tcp_make(int64_t timeout_ns, tu_tcp_store **result);
/* After the server dropped this client: one try, for a server that is still there answers at once. */
tutti_status tu_tcp_reconnect(tu_tcp_call *call);
tutti_status tu_tcp_clone(tutti_store *store, tutti_store **clone);
tutti_status tu_tcp_move(tutti_store *store, const char *host, int port, int64_t timeout_ns);
void tu_tcp_destroy(tutti_store *store);
int tu_tcp_port(const tutti_store *store);
const char *tu_tcp_address(const tutti_store *store);
int tu_tcp_server(const tutti_store *store);

#endif
