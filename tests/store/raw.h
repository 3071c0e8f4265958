/* SPDX-License-Identifier: Apache-2.0
 *
 * Plain sockets and plain bytes, for tests that play the other side of a store's connection.
 */
#ifndef TUTTI_TESTS_STORE_RAW_H
#define TUTTI_TESTS_STORE_RAW_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <tutti/store.h>
#include <unistd.h>

#include "../harness.h"

#define MILLISECONDS(n) (INT64_C(1000000) * (n))

/* A text literal as bytes, without its closing zero. */
#define BYTES(literal) (literal), sizeof(literal) - 1
#define VALIDATE "\x00\xce\xf7\x85\x3c"

static inline int raw_connect(int port) {
    int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = { .sin_family = AF_INET,
                                   .sin_port = htons((uint16_t)port),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    CHECK(descriptor >= 0);
    CHECK_EQ(connect(descriptor, (struct sockaddr *)&address, sizeof address), 0);
    int on = 1;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct timeval limit = { .tv_sec = 20 };
    setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return descriptor;
}

static inline int raw_listen(int *port) {
    int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof address;
    CHECK(descriptor >= 0);
    CHECK_EQ(bind(descriptor, (struct sockaddr *)&address, sizeof address), 0);
    CHECK_EQ(listen(descriptor, 16), 0);
    CHECK_EQ(getsockname(descriptor, (struct sockaddr *)&address, &length), 0);
    *port = ntohs(address.sin_port);
    return descriptor;
}

static inline void raw_send(int descriptor, const void *data, size_t bytes) {
    for (size_t sent = 0; sent < bytes;) {
        ssize_t part = send(descriptor, (const char *)data + sent, bytes - sent, MSG_NOSIGNAL);
        CHECK(part > 0 || (part < 0 && errno == EINTR));
        sent += part > 0 ? (size_t)part : 0;
    }
}

static inline void raw_receive(int descriptor, void *data, size_t bytes) {
    for (size_t got = 0; got < bytes;) {
        ssize_t part = recv(descriptor, (char *)data + got, bytes - got, 0);
        if (part < 0 && errno == EINTR)
            continue;
        if (part <= 0)
            FAIL("%zu of %zu bytes came: %s", got, bytes, part == 0 ? "closed" : strerror(errno));
        got += (size_t)part;
    }
}

static inline void raw_expect(int descriptor, const void *expected, size_t bytes) {
    char got[4096];
    CHECK(bytes <= sizeof got);
    raw_receive(descriptor, got, bytes);
    for (size_t i = 0; i < bytes; i++) {
        if (got[i] != ((const char *)expected)[i])
            FAIL("byte %zu is %#x, not %#x", i, (unsigned char)got[i], ((const unsigned char *)expected)[i]);
    }
}

/* The other side closes without another word. */
static inline void raw_expect_closed(int descriptor) {
    char byte;
    ssize_t got;
    do
        got = recv(descriptor, &byte, 1, 0);
    while (got < 0 && errno == EINTR);
    if (got > 0 || (got < 0 && errno != ECONNRESET))
        FAIL("the connection is still open (%s)", got > 0 ? "a byte came" : strerror(errno));
    close(descriptor);
}

/* The other side is still there, and answers a ping. */
static inline void raw_expect_alive(int descriptor) {
    raw_send(descriptor, BYTES("\x0d\x01\x02\x03\x04"));
    raw_expect(descriptor, BYTES("\x01\x02\x03\x04"));
}

static inline int raw_client(int port) {
    int descriptor = raw_connect(port);
    raw_send(descriptor, BYTES(VALIDATE));
    raw_expect_alive(descriptor);
    return descriptor;
}

static inline tutti_store *open_server(const char *host) {
    tutti_store *store;
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.server = true;
    CHECK_OK(tutti_store_open_tcp(host, 0, &options, &store));
    return store;
}

#endif
