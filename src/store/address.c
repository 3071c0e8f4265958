/* SPDX-License-Identifier: Apache-2.0
 *
 * From names to socket addresses. getaddrinfo knows no deadline, so it runs in a thread that may be left behind: the
 * question and its answer are shared by both and go with the last of them.
 */
#include "store/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "store/store.h"

tutti_status tu_address_set(tu_address *address, const char *host, int port) {
    size_t length = strlen(host);
    if (length >= sizeof address->host)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the store's host has %zu bytes; at most %zu are possible", length,
                        sizeof address->host - 1);
    memcpy(address->host, host, length + 1);
    if (strncmp(host, "unix:", 5) == 0) {
        size_t room = sizeof((struct sockaddr_un *)0)->sun_path - 1;
        if (host[5] != '@' && host[5] != '/')
            return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\" is no Unix socket: write unix:@name or unix:/path", host);
        if (length - 5 > room || host[6] == 0)
            return tu_error(TUTTI_ERROR_ARGUMENT, "\"%s\": the name of a Unix socket has 1 to %zu bytes", host,
                            room - 1);
        address->port = 0;
        return TUTTI_OK;
    }
    if (port < 0 || port > 65535)
        return tu_error(TUTTI_ERROR_ARGUMENT, "port %d of the store is not in 0..65535", port);
    address->port = port;
    return TUTTI_OK;
}

static void list_add(tu_address_list *list, const void *address, socklen_t length) {
    if (list->count == TU_ADDRESS_COUNT)
        return;
    memcpy(&list->address[list->count], address, length);
    list->length[list->count++] = length;
}

static void list_add_ipv4(tu_address_list *list, in_addr_t number, int port) {
    struct sockaddr_in ipv4 = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = number };
    list_add(list, &ipv4, sizeof ipv4);
}

static void list_add_ipv6(tu_address_list *list, struct in6_addr number, int port) {
    struct sockaddr_in6 ipv6 = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port), .sin6_addr = number };
    list_add(list, &ipv6, sizeof ipv6);
}

static void list_add_unix(tu_address_list *list, const char *name) {
    struct sockaddr_un local = { .sun_family = AF_UNIX };
    size_t length = strlen(name);
    memcpy(local.sun_path, name, length);
    if (name[0] == '@')
        local.sun_path[0] = 0; /* an abstract name: no file */
    else
        length++; /* a path ends with a zero */
    list_add(list, &local, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length));
}

/* ---- asking for a name, with a deadline ---- */

typedef struct question {
    pthread_mutex_t lock;
    pthread_cond_t answered;
    int holders; /* the asker and the thread; under `lock` */
    bool done;
    int error; /* of getaddrinfo */
    tu_address address;
    tu_address_list list;
} question;

static void question_leave(question *question) {
    bool last = --question->holders == 0;
    pthread_mutex_unlock(&question->lock);
    if (!last)
        return;
    pthread_cond_destroy(&question->answered);
    pthread_mutex_destroy(&question->lock);
    free(question);
}

static int look_up(const tu_address *address, int flags, tu_address_list *list) {
    struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags }, *found;
    char port[8];
    snprintf(port, sizeof port, "%d", address->port);
    int error = getaddrinfo(address->host, port, &hints, &found);
    if (error != 0)
        return error;
    for (struct addrinfo *one = found; one != NULL; one = one->ai_next)
        list_add(list, one->ai_addr, one->ai_addrlen);
    freeaddrinfo(found);
    return 0;
}

static void *answer(void *argument) {
    question *asked = argument;
    tu_address_list list = { 0 };
    int error = look_up(&asked->address, AI_ADDRCONFIG, &list);
    pthread_mutex_lock(&asked->lock);
    asked->error = error;
    asked->list = list;
    asked->done = true;
    pthread_cond_signal(&asked->answered);
    question_leave(asked);
    return NULL;
}

static tutti_status ask(const tu_address *address, int64_t deadline, tu_address_list *list) {
    question *asked = calloc(1, sizeof *asked);
    if (asked == NULL)
        return tu_error_memory("the look-up of a name", sizeof *asked);
    asked->address = *address;
    asked->holders = 2;
    pthread_mutex_init(&asked->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&asked->answered, &monotonic);
    pthread_condattr_destroy(&monotonic);

    pthread_t thread;
    int error = tu_thread_start("tutti-resolve", answer, asked, &thread);
    pthread_mutex_lock(&asked->lock);
    if (error != 0) {
        asked->holders = 1;
        question_leave(asked);
        return tu_error_system(error, "no thread to look up %s", address->host);
    }
    pthread_detach(thread);
    struct timespec until = { .tv_sec = deadline / TU_SECOND, .tv_nsec = deadline % TU_SECOND };
    while (!asked->done && pthread_cond_timedwait(&asked->answered, &asked->lock, &until) != ETIMEDOUT)
        continue;
    tutti_status status = TUTTI_OK;
    if (!asked->done)
        status = tu_error(TUTTI_ERROR_NETWORK, "the look-up of %s took too long", address->host);
    else if (asked->error != 0)
        status = tu_error(TUTTI_ERROR_NETWORK, "the name %s cannot be resolved: %s", address->host,
                          gai_strerror(asked->error));
    else
        *list = asked->list, list->named = true;
    question_leave(asked);
    return status;
}

tutti_status tu_address_resolve(const tu_address *address, int64_t deadline, tu_address_list *list) {
    *list = (tu_address_list){ 0 };
    if (tu_address_is_unix(address)) {
        list_add_unix(list, address->host + 5);
    } else if (strcmp(address->host, "localhost") == 0) {
        list_add_ipv4(list, htonl(INADDR_LOOPBACK), address->port);
        list_add_ipv6(list, in6addr_loopback, address->port);
    } else if (address->host[0] == 0) {
        list_add_ipv6(list, in6addr_any, address->port);
        list_add_ipv4(list, htonl(INADDR_ANY), address->port);
    } else if (look_up(address, AI_NUMERICHOST, list) != 0) {
        return ask(address, deadline, list);
    }
    return TUTTI_OK;
}

/* ---- looking at socket addresses ---- */

bool tu_socket_is_loopback(const tu_socket_address *address) {
    switch (address->any.sa_family) {
    case AF_UNIX:
        return true;
    case AF_INET:
        return ntohl(address->ipv4.sin_addr.s_addr) >> 24 == 127;
    case AF_INET6:
        if (IN6_IS_ADDR_V4MAPPED(&address->ipv6.sin6_addr))
            return address->ipv6.sin6_addr.s6_addr[12] == 127;
        return IN6_IS_ADDR_LOOPBACK(&address->ipv6.sin6_addr);
    default:
        return false;
    }
}

int tu_socket_port(const tu_socket_address *address) {
    switch (address->any.sa_family) {
    case AF_INET:
        return ntohs(address->ipv4.sin_port);
    case AF_INET6:
        return ntohs(address->ipv6.sin6_port);
    default:
        return -1;
    }
}

void tu_socket_text(const tu_socket_address *address, socklen_t length, char *text, size_t bytes) {
    char number[INET6_ADDRSTRLEN] = "?";
    switch (address->any.sa_family) {
    case AF_UNIX: {
        int name = (int)length - (int)offsetof(struct sockaddr_un, sun_path);
        bool abstract = name > 0 && address->local.sun_path[0] == 0;
        snprintf(text, bytes, "unix:%s%.*s", abstract ? "@" : "", name > 0 ? name - abstract : 0,
                 address->local.sun_path + abstract);
        break;
    }
    case AF_INET:
        inet_ntop(AF_INET, &address->ipv4.sin_addr, number, sizeof number);
        snprintf(text, bytes, "%s:%d", number, tu_socket_port(address));
        break;
    case AF_INET6:
        inet_ntop(AF_INET6, &address->ipv6.sin6_addr, number, sizeof number);
        snprintf(text, bytes, "[%s]:%d", number, tu_socket_port(address));
        break;
    default:
        snprintf(text, bytes, "a socket of family %d", address->any.sa_family);
    }
}
