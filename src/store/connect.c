/* SPDX-License-Identifier: Apache-2.0
 *
 * Connecting, the client's side of the handshake, and moving bytes.
 *
 * The socket blocks, but never longer than TICK (SO_RCVTIMEO): a reply that comes in time costs one system call, and a
 * deadline that is nearer than a tick is kept with poll, as is the interval of a watch.
 */
#include "store/connect.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "store/watch.h"

#define TICK TU_SECOND
#define FIRST_PAUSE TU_MILLISECOND
#define LONGEST_PAUSE TU_SECOND

/* ---- moving bytes ---- */

void tu_connection_init(tu_connection *connection, int descriptor) {
    int on = 1;
    struct timeval tick = { .tv_sec = TICK / TU_SECOND };
    setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &tick, sizeof tick);
    setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &tick, sizeof tick);
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on,
               sizeof on); /* fails on a Unix socket, where there is no delay */
    setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    connection->descriptor = descriptor;
    connection->disturbed = false;
    connection->at = connection->filled = 0;
}

void tu_connection_close(tu_connection *connection) {
    if (connection->descriptor >= 0)
        close(connection->descriptor);
    connection->descriptor = -1;
    connection->at = connection->filled = 0;
}

static tutti_status lost(int error) {
    if (error == 0)
        return tu_error(TUTTI_ERROR_NETWORK, "the store's server closed the connection");
    tutti_status status = tu_error_system(error, "the connection to the store's server broke");
    return status == TUTTI_ERROR_SYSTEM ? tu_error(TUTTI_ERROR_NETWORK, "%s", tutti_error_message()) : status;
}

/* Sleeps until the socket is ready or the deadline has come; the caller then tries without blocking. *disturbed: a
 * watch ended it. */
static tutti_status poll_until(int descriptor, short events, int64_t deadline, bool *disturbed) {
    for (;;) {
        int64_t left = tu_deadline_left(deadline);
        if (left == 0)
            return tu_error(TUTTI_ERROR_TIMEOUT, "timeout: the store's server has not answered");
        left = tu_deadline_left(tu_watch_slice(deadline));
        struct timespec time = { .tv_sec = left / TU_SECOND, .tv_nsec = left % TU_SECOND };
        struct pollfd ready = { .fd = descriptor, .events = events };
        int count = ppoll(&ready, 1, &time, NULL);
        if (count > 0)
            return TUTTI_OK;
        if (count < 0 && errno != EINTR)
            return tu_error_system(errno, "waiting for the store's server failed (poll)");
        tutti_status status = tu_watch_look();
        if (status != TUTTI_OK) {
            *disturbed = true;
            return status;
        }
    }
}

/* Whether a call must not block for a tick. */
static bool is_near(int64_t deadline) {
    return tu_watched() || tu_deadline_left(deadline) < 2 * TICK;
}

/* What to do after a send or recv that moved nothing: TUTTI_OK, try again. A signal is treated as a tick: the deadline
 * is looked at, however often signals come. */
static tutti_status after(tu_connection *connection, int error, bool *near, short events, int64_t deadline) {
    if (error != EAGAIN && error != EWOULDBLOCK && error != EINTR)
        return lost(error);
    *near = is_near(deadline);
    return *near ? poll_until(connection->descriptor, events, deadline, &connection->disturbed) : TUTTI_OK;
}

tutti_status tu_connection_send(tu_connection *connection, const void *head, size_t head_bytes, const void *tail,
                                size_t tail_bytes, int64_t deadline) {
    struct iovec parts[2] = { { (void *)head, head_bytes }, { (void *)tail, tail_bytes } };
    bool near = is_near(deadline);
    connection->disturbed = false;
    while (parts[0].iov_len + parts[1].iov_len > 0) {
        struct msghdr message = { .msg_iov = parts, .msg_iovlen = 2 };
        ssize_t sent = sendmsg(connection->descriptor, &message, MSG_NOSIGNAL | (near ? MSG_DONTWAIT : 0));
        if (sent < 0) {
            tutti_status status = after(connection, errno, &near, POLLOUT, deadline);
            if (status != TUTTI_OK)
                return status;
            continue;
        }
        size_t moved = (size_t)sent;
        for (int i = 0; i < 2 && moved > 0; i++) {
            size_t part = moved < parts[i].iov_len ? moved : parts[i].iov_len;
            parts[i].iov_base = (char *)parts[i].iov_base + part;
            parts[i].iov_len -= part;
            moved -= part;
        }
    }
    return TUTTI_OK;
}

tutti_status tu_connection_receive(tu_connection *connection, void *data, size_t bytes, int64_t deadline) {
    uint8_t *to = data;
    bool near = is_near(deadline);
    connection->disturbed = false;
    while (bytes > 0) {
        size_t there = connection->filled - connection->at;
        if (there > 0) {
            size_t part = there < bytes ? there : bytes;
            memcpy(to, connection->input + connection->at, part);
            connection->at += (uint32_t)part;
            to += part;
            bytes -= part;
            continue;
        }
        bool direct = bytes >= sizeof connection->input;
        ssize_t got = recv(connection->descriptor, direct ? to : connection->input,
                           direct ? bytes : sizeof connection->input, near ? MSG_DONTWAIT : 0);
        if (got == 0)
            return lost(0);
        if (got < 0) {
            tutti_status status = after(connection, errno, &near, POLLIN, deadline);
            if (status != TUTTI_OK)
                return status;
            continue;
        }
        if (direct) {
            to += got;
            bytes -= (size_t)got;
        } else {
            connection->at = 0;
            connection->filled = (uint32_t)got;
        }
    }
    return TUTTI_OK;
}

/* ---- the handshake ---- */

/* The server says in words why not. */
static tutti_status read_refusal(tu_connection *connection, int64_t deadline) {
    uint64_t length;
    char words[TU_REFUSAL_LIMIT + 1];
    tutti_status status = tu_connection_receive(connection, &length, sizeof length, deadline);
    if (status != TUTTI_OK)
        return status;
    if (length > TU_REFUSAL_LIMIT)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "the store's server refuses this client in %" PRIu64 " bytes, which is no sentence", length);
    status = tu_connection_receive(connection, words, (size_t)length, deadline);
    if (status != TUTTI_OK)
        return status;
    words[length] = 0;
    return tu_error(TUTTI_ERROR_REFUSED, "the store's server refuses this client: %s", words);
}

static tutti_status say_hello(tu_connection *connection, const tu_secret *secret, int64_t deadline,
                              uint8_t proof[TU_AUTH_BYTES]) {
    uint8_t mine[TU_AUTH_BYTES], expected[TU_AUTH_BYTES];
    struct {
        uint8_t nonce[TU_AUTH_BYTES], proof[TU_AUTH_BYTES];
    } server;
    uint32_t magic;
    tutti_status status = tu_auth_nonce(mine);
    if (status != TUTTI_OK)
        return status;
    uint8_t hello[1 + 2 * sizeof(uint32_t) + TU_AUTH_BYTES] = { TU_COMMAND_HELLO };
    memcpy(hello + 1, &(uint32_t){ TU_HELLO_MAGIC }, sizeof(uint32_t));
    memcpy(hello + 5, &(uint32_t){ TU_HANDSHAKE_VERSION }, sizeof(uint32_t));
    memcpy(hello + 9, mine, TU_AUTH_BYTES);
    status = tu_connection_send(connection, hello, sizeof hello, NULL, 0, deadline);
    if (status == TUTTI_OK)
        status = tu_connection_receive(connection, &magic, sizeof magic, deadline);
    if (status != TUTTI_OK)
        return status;
    if (magic == TU_REFUSAL_MAGIC)
        return read_refusal(connection, deadline);
    if (magic != TU_HELLO_MAGIC)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "the store's server answers the handshake with %#" PRIx32 "; it is no server of Tutti", magic);
    status = tu_connection_receive(connection, &server, sizeof server, deadline);
    if (status == TUTTI_OK)
        status = tu_auth_proof(secret, TU_AUTH_SERVER, mine, server.nonce, expected);
    if (status != TUTTI_OK)
        return status;
    if (!tu_auth_equal(expected, server.proof))
        return tu_error(TUTTI_ERROR_REFUSED,
                        "the store's server does not know this job's secret: it belongs to another job, or one "
                        "of the two was given a wrong one");
    return tu_auth_proof(secret, TU_AUTH_CLIENT, mine, server.nonce, proof);
}

tutti_status tu_connection_greet(tu_connection *connection, const tu_secret *secret, int64_t deadline) {
    uint8_t message[1 + TU_AUTH_BYTES + 10];
    size_t used = 0;
    if (secret->bytes > 0) {
        message[used++] = TU_COMMAND_PROOF;
        tutti_status status = say_hello(connection, secret, deadline, message + used);
        if (status != TUTTI_OK)
            return status;
        used += TU_AUTH_BYTES;
    }
    uint32_t magic = TU_VALIDATE_MAGIC, nonce = (uint32_t)getpid(), echo; /* a pid is smaller than a refusal's magic */
    message[used++] = TU_COMMAND_VALIDATE;
    memcpy(message + used, &magic, sizeof magic);
    used += sizeof magic;
    message[used++] = TU_COMMAND_PING;
    memcpy(message + used, &nonce, sizeof nonce);
    used += sizeof nonce;
    tutti_status status = tu_connection_send(connection, message, used, NULL, 0, deadline);
    if (status == TUTTI_OK)
        status = tu_connection_receive(connection, &echo, sizeof echo, deadline);
    if (status != TUTTI_OK)
        return status;
    if (echo == TU_REFUSAL_MAGIC)
        return read_refusal(connection, deadline);
    if (echo != nonce)
        return tu_error(TUTTI_ERROR_NETWORK, "the store's server answered a ping of %" PRIu32 " with %" PRIu32, nonce,
                        echo);
    return TUTTI_OK;
}

/* ---- connecting ---- */

/* On a Unix socket the kernel says whose server it is: the name alone proves nothing. */
static tutti_status check_owner(int descriptor, int *pid) {
    struct ucred server;
    socklen_t length = sizeof server;
    if (getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &server, &length) != 0)
        return tu_error_system(errno, "cannot ask whose the store's server is (SO_PEERCRED)");
    if (server.uid != geteuid())
        return tu_error(TUTTI_ERROR_REFUSED,
                        "the store's server, process %d, belongs to user %u, and this is user %u; on a Unix "
                        "socket both must be the same",
                        (int)server.pid, (unsigned)server.uid, (unsigned)geteuid());
    *pid = (int)server.pid;
    return TUTTI_OK;
}

static tutti_status connect_socket(const tu_socket_address *address, socklen_t length, int64_t deadline, int *result) {
    int descriptor = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (descriptor < 0)
        return tu_error_system(errno, "no socket for the store");
    int error = connect(descriptor, &address->any, length) == 0 ? 0 : errno;
    if (error == EINPROGRESS || error == EINTR) {
        bool disturbed;
        tutti_status status = poll_until(descriptor, POLLOUT, deadline, &disturbed);
        if (status != TUTTI_OK) {
            close(descriptor);
            return status;
        }
        socklen_t error_length = sizeof error;
        if (getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &error_length) != 0)
            error = errno;
    }
    int flags = fcntl(descriptor, F_GETFL);
    if (error == 0 && (flags < 0 || fcntl(descriptor, F_SETFL, flags & ~O_NONBLOCK) != 0))
        error = errno;
    if (error != 0) {
        char text[160];
        close(descriptor);
        tu_socket_text(address, length, text, sizeof text);
        if (error == EAGAIN) /* a Unix socket whose queue is full */
            return tu_error(TUTTI_ERROR_NETWORK, "the server at %s has too many connections waiting", text);
        return tu_error_system(error, "connecting to %s", text);
    }
    *result = descriptor;
    return TUTTI_OK;
}

tutti_status tu_store_connect_once(const tu_address_list *list, const tu_secret *secret, int64_t deadline,
                                   tu_connection *connection) {
    tutti_status status = tu_error(TUTTI_ERROR_NETWORK, "the host has no address");
    for (size_t i = 0; i < list->count; i++) {
        /* One address that swallows everything must leave time for the others. */
        int64_t share = tu_deadline_left(deadline) / (int64_t)(list->count - i);
        int descriptor = -1;
        status = connect_socket(&list->address[i], list->length[i], tu_deadline(share > 0 ? share : 1), &descriptor);
        if (status != TUTTI_OK)
            continue;
        int server = 0;
        if (list->address[i].any.sa_family == AF_UNIX)
            status = check_owner(descriptor, &server);
        tu_connection_init(connection, descriptor);
        connection->server = server;
        if (status == TUTTI_OK)
            status = tu_connection_greet(connection, secret, deadline);
        if (status == TUTTI_OK || status == TUTTI_ERROR_REFUSED) {
            if (status != TUTTI_OK)
                tu_connection_close(connection);
            return status;
        }
        tu_connection_close(connection);
    }
    return status;
}

/* Time does not mend these. */
static bool is_final(tutti_status status) {
    return status == TUTTI_ERROR_REFUSED || status == TUTTI_ERROR_LIMIT || status == TUTTI_ERROR_MEMORY ||
           status == TUTTI_ERROR_UNSUPPORTED || status == TUTTI_ERROR_PROTOCOL;
}

/* Sleeps about `pause`, so that ranks that failed together do not come again together; a signal does not shorten it
 * much. */
static void rest(int64_t pause, int64_t deadline) {
    unsigned dice = (unsigned)(tu_clock_now() >> 4) ^ ((unsigned)getpid() * 2654435761u);
    pause = pause / 2 + (int64_t)(dice % 1024) * pause / 1024;
    int64_t left = tu_deadline_left(deadline);
    if (pause > left)
        pause = left;
    struct timespec time = { .tv_sec = pause / TU_SECOND, .tv_nsec = pause % TU_SECOND };
    clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL);
}

tutti_status tu_store_connect(const tu_address *address, const tu_secret *secret, int64_t timeout_ns,
                              tu_connection *connection) {
    int64_t deadline = tu_deadline(timeout_ns);
    for (int64_t pause = FIRST_PAUSE;; pause = pause * 3 / 2 < LONGEST_PAUSE ? pause * 3 / 2 : LONGEST_PAUSE) {
        tu_address_list list;
        tutti_status status = tu_address_resolve(address, deadline, &list);
        if (status == TUTTI_OK)
            status = tu_store_connect_once(&list, secret, deadline, connection);
        if (status == TUTTI_OK || is_final(status))
            return status;
        tutti_status looked = tu_watch_look();
        if (looked != TUTTI_OK)
            return looked;
        rest(pause, tu_watch_slice(deadline));
        if (tu_deadline_left(deadline) == 0)
            return tu_error(TUTTI_ERROR_NETWORK,
                            "The client socket has timed out after %" PRId64
                            "ms while trying to connect to (%s, %d); last: %.500s",
                            timeout_ns / TU_MILLISECOND, address->host, address->port, tutti_error_message());
    }
}
