/* SPDX-License-Identifier: Apache-2.0
 *
 * The server of a tcp store: one thread, any number of clients.
 */
#ifndef TU_STORE_TCP_H
#define TU_STORE_TCP_H

#include <tutti/store.h>

#include "store/address.h"
#include "store/auth.h"

typedef struct tu_server tu_server;

/* `listen_fd` > 0 is taken over when the start succeeds. The secret is copied. */
tutti_status tu_server_start(const tu_address *address, int listen_fd, const tu_secret *secret, bool trust_network,
                             int64_t deadline, tu_server **server);
void tu_server_retain(tu_server *server);
void tu_server_release(tu_server *server);
/* The same in a forked child, where the thread does not run: stops listening there and nothing else. */
void tu_server_abandon(tu_server *server);

int tu_server_port(const tu_server *server);
/* Where this process reaches it. */
void tu_server_own_address(const tu_server *server, tu_address_list *list);

#endif
