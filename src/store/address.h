/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a tcp store is: names to socket addresses, and listening on them.
 */
#ifndef TU_STORE_ADDRESS_H
#define TU_STORE_ADDRESS_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <tutti/status.h>

typedef union tu_socket_address {
    struct sockaddr any;
    struct sockaddr_in ipv4;
    struct sockaddr_in6 ipv6;
    struct sockaddr_un local;
    struct sockaddr_storage storage;
} tu_socket_address;

/* As the user gave it. */
typedef struct tu_address {
    char host[256]; /* name, number, "" for every address of this host, or "unix:…" */
    int port;       /* 0 for Unix sockets */
} tu_address;

enum {
    TU_ADDRESS_COUNT = 8
};

/* Socket addresses in the order in which to try them. */
typedef struct tu_address_list {
    bool named; /* a name was looked up: this host may be known to others by other addresses */
    size_t count;
    tu_socket_address address[TU_ADDRESS_COUNT];
    socklen_t length[TU_ADDRESS_COUNT];
} tu_address_list;

tutti_status tu_address_set(tu_address *address, const char *host, int port);
static inline bool tu_address_is_unix(const tu_address *address) {
    return __builtin_strncmp(address->host, "unix:", 5) == 0;
}

/* Numbers and "localhost" are answered at once; a name is asked for in a thread of its own, so that a slow name server
 * cannot hold the caller beyond its deadline. */
tutti_status tu_address_resolve(const tu_address *address, int64_t deadline, tu_address_list *list);

bool tu_socket_is_loopback(const tu_socket_address *address);
/* The port, or -1 of a Unix socket. */
int tu_socket_port(const tu_socket_address *address);
/* "127.0.0.1:29500", "[::1]:29500", "unix:@name". */
void tu_socket_text(const tu_socket_address *address, socklen_t length, char *text, size_t bytes);

/* ---- listening ---- */

enum {
    TU_LISTENERS = 4
};

typedef struct tu_listeners {
    int count;
    int descriptor[TU_LISTENERS];
    bool open_to_others;   /* listens on an address that other hosts can reach */
    int port;              /* -1 of a Unix socket */
    tu_socket_address own; /* where this process itself can connect to */
    socklen_t own_length;
    char unlink_path[sizeof((struct sockaddr_un *)0)->sun_path]; /* a socket file that we made; "" none */
} tu_listeners;

/* Loopback and other numbers are listened on as they are; a name, "" and a number that is not this host's mean every
 * address of the host. `may_be_open` false refuses what others can reach; a name that means loopback then stays there.
 */
tutti_status tu_store_listen(const tu_address *address, bool may_be_open, int64_t deadline, tu_listeners *listeners);
/* Takes over a socket that listens already. */
tutti_status tu_store_listen_adopt(int descriptor, const tu_address *address, bool may_be_open,
                                   tu_listeners *listeners);
void tu_store_listen_end(tu_listeners *listeners);

#endif
