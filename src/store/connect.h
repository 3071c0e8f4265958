/* SPDX-License-Identifier: Apache-2.0
 *
 * A client's connection: made with patience, read and written with deadlines.
 */
#ifndef TU_STORE_CONNECT_H
#define TU_STORE_CONNECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "store/address.h"
#include "store/auth.h"
#include "store/wire.h"

/* Replies are read through a buffer, so that many small ones cost one system call. */
typedef struct tu_connection {
    int descriptor; /* -1: none */
    int server;     /* pid of the server on a Unix socket; 0: not known */
    bool disturbed; /* the last send or receive was ended by whoever watches this thread (watch.h) */
    uint32_t at, filled;
    uint8_t input[16 << 10];
} tu_connection;

/* One try on each address. */
tutti_status tu_store_connect_once(const tu_address_list *list, const tu_secret *secret, int64_t deadline,
                                   tu_connection *connection);

/* Again and again, with pauses that grow, until the timeout. */
tutti_status tu_store_connect(const tu_address *address, const tu_secret *secret, int64_t timeout_ns,
                              tu_connection *connection);

/* Prepares a connected socket that this takes over. */
void tu_connection_init(tu_connection *connection, int descriptor);
void tu_connection_close(tu_connection *connection);

/* The client's part of the handshake: proves the secret, if there is one, and sees that the other side is a store. */
tutti_status tu_connection_greet(tu_connection *connection, const tu_secret *secret, int64_t deadline);

/* Both write the message, and give TIMEOUT at the deadline, NETWORK for a lost connection, and what a watch of this
 * thread says. A signal does not end them, and signals do not put off the deadline. */
tutti_status tu_connection_send(tu_connection *connection, const void *head, size_t head_bytes, const void *tail,
                                size_t tail_bytes, int64_t deadline);
tutti_status tu_connection_receive(tu_connection *connection, void *data, size_t bytes, int64_t deadline);

#endif
