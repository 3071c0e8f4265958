/* SPDX-License-Identifier: Apache-2.0
 *
 * The server: one thread around epoll. The commands themselves are the hub's (hub.c).
 *
 * Nobody can hold it up: sockets never block; a client that does not read what it asked for is not listened to until it
 * does; a client that has not said who it is within HALF_OPEN_TIME is closed, and beyond HALF_OPEN_LIMIT of those the
 * oldest makes room for the next.
 *
 * Per command of a client that waits for its answer: one epoll_wait (shared with all that are ready), one recv, one
 * send.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "store/hub.h"
#include "store/tcp.h"

enum {
    HALF_OPEN_LIMIT = 256,
    ACCEPT_BATCH = 64, /* then those already accepted get their turn */
    EVENT_BATCH = 256,
    INPUT_CHUNK = 128 << 10,
    REFUSALS_AT_ONCE = 8, /* lines about strangers, then a pause */
};
#define HALF_OPEN_TIME (5 * TU_SECOND)
#define ACCEPT_PAUSE (100 * TU_MILLISECOND) /* when a connection cannot be taken for want of memory or descriptors */

#define WARN_PAUSE (10 * TU_SECOND)

/* What an event is about stands first in each struct that epoll knows. */
typedef enum source {
    SOURCE_STOP,
    SOURCE_LISTENER,
    SOURCE_CONNECTION
} source;

typedef struct listener {
    source source;
    int descriptor;
} listener;

typedef struct connection {
    source source;
    int descriptor; /* -1: closed, and freed after this round of events */
    tu_session session;
    tu_buffer input;                    /* the beginning of a command that is still to come */
    uint32_t events;                    /* what epoll watches for */
    bool half_open;                     /* in that list */
    int64_t deadline;                   /* while half open */
    struct connection *previous, *next; /* in the list of half-open, open or closed ones */
    char peer[64];
} connection;

typedef struct connection_list {
    connection *first, *last;
    size_t count;
} connection_list;

struct tu_server {
    _Atomic int references;
    pthread_t thread;
    tu_secret secret;
    tu_listeners listeners;
    listener listener[TU_LISTENERS];
    struct {
        source source;
        int descriptor; /* eventfd */
    } stop;
    int epoll;
    int spare; /* given up for a moment to close a connection that finds no descriptor left */
    /* The rest belongs to the thread. */
    int64_t accept_again;  /* 0: accepting */
    int64_t warn_again;    /* of a full table of descriptors */
    int64_t refusal_again; /* before that no line about a stranger */
    int refusals_told;     /* of REFUSALS_AT_ONCE */
    uint64_t refusals_untold;
    tu_hub hub;
    connection_list half_open, open, closed;
    uint8_t *chunk; /* INPUT_CHUNK bytes */
};

/* ---- lists ---- */

static void list_add(connection_list *list, connection *connection) {
    connection->next = NULL;
    connection->previous = list->last;
    if (list->last != NULL)
        list->last->next = connection;
    else
        list->first = connection;
    list->last = connection;
    list->count++;
}

static void list_remove(connection_list *list, connection *connection) {
    if (connection->previous != NULL)
        connection->previous->next = connection->next;
    else
        list->first = connection->next;
    if (connection->next != NULL)
        connection->next->previous = connection->previous;
    else
        list->last = connection->previous;
    list->count--;
}

/* ---- one connection ---- */

static void close_connection(tu_server *server, connection *connection, const char *why) {
    if (connection->descriptor < 0)
        return;
    if (why[0] != 0)
        TU_LOG(TUTTI_LOG_INFO, NULL, "store", "closing the connection of %s: %s", connection->peer, why);
    list_remove(connection->half_open ? &server->half_open : &server->open, connection);
    tu_hub_leave(&server->hub, &connection->session);
    tu_buffer_free(&connection->input);
    /* A forked child of this process may hold the same socket: closing ours would then neither end it nor stop its
     * events. */
    epoll_ctl(server->epoll, EPOLL_CTL_DEL, connection->descriptor, NULL);
    shutdown(connection->descriptor, SHUT_RDWR);
    close(connection->descriptor);
    connection->descriptor = -1;
    list_add(&server->closed, connection);
}

static void free_closed(tu_server *server) {
    for (connection *connection; (connection = server->closed.first) != NULL;) {
        list_remove(&server->closed, connection);
        free(connection);
    }
}

static void watch(tu_server *server, connection *connection) {
    uint32_t events = (tu_session_paused(&connection->session) ? 0 : EPOLLIN) |
                      (tu_session_pending(&connection->session) > 0 ? EPOLLOUT : 0);
    if (events == connection->events)
        return;
    struct epoll_event event = { .events = events, .data.ptr = connection };
    if (epoll_ctl(server->epoll, EPOLL_CTL_MOD, connection->descriptor, &event) != 0)
        close_connection(server, connection, "epoll_ctl failed");
    connection->events = events;
}

/* Sends what is pending as far as the socket takes it. */
static void send_pending(tu_server *server, connection *connection) {
    tu_session *session = &connection->session;
    while (tu_session_pending(session) > 0) {
        ssize_t sent = send(connection->descriptor, session->output.data + session->sent, tu_session_pending(session),
                            MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
            close_connection(server, connection, "it left before its reply");
            return;
        }
        if (sent < 0)
            break;
        session->sent += (size_t)sent;
    }
    if (tu_session_pending(session) == 0) {
        session->sent = 0;
        tu_buffer_reset(&session->output);
    }
    watch(server, connection);
}

/* Strangers may come by the thousand: one line now and then, with how many there were. */
static void tell_refusal(tu_server *server, const connection *connection) {
    int64_t now = tu_clock_now();
    if (now < server->refusal_again) {
        server->refusals_untold++;
        return;
    }
    if (server->refusals_untold > 0)
        TU_LOG(TUTTI_LOG_WARN, NULL, "store", "refused %s: %s; and %" PRIu64 " more since the last such line",
               connection->peer, connection->session.why, server->refusals_untold);
    else
        TU_LOG(TUTTI_LOG_WARN, NULL, "store", "refused %s: %s", connection->peer, connection->session.why);
    server->refusals_untold = 0;
    if (++server->refusals_told >= REFUSALS_AT_ONCE) {
        server->refusals_told = 0;
        server->refusal_again = now + WARN_PAUSE;
    }
}

/* A session that was admitted leaves the list of those with a deadline. */
static void settle(tu_server *server, connection *connection) {
    if (connection->half_open && connection->session.state == TU_SESSION_OPEN) {
        list_remove(&server->half_open, connection);
        connection->half_open = false;
        list_add(&server->open, connection);
    }
    if (connection->session.state == TU_SESSION_REFUSED && connection->session.why[0] != 0) {
        tell_refusal(server, connection);
        connection->session.why[0] = 0; /* said once */
    }
}

static connection *connection_of(tu_session *session) {
    return (connection *)((char *)session - offsetof(connection, session));
}

/* After input: answers go out, to this client and to those that it woke; sessions that ended are closed. */
static void serve_dirty(tu_server *server) {
    for (tu_session *session; (session = tu_hub_next_dirty(&server->hub)) != NULL;) {
        connection *connection = connection_of(session);
        settle(server, connection);
        if (session->state == TU_SESSION_ENDED)
            close_connection(server, connection, session->why);
        else if (session->output.failed)
            close_connection(server, connection, "out of memory for its reply");
        else
            send_pending(server, connection);
    }
}

/* Does what is in `data`, which may be the connection's own input, and keeps the rest there. True: the session was
 * paused, and its answers are all sent by now, so it can go on. */
static bool digest_once(tu_server *server, connection *connection, const uint8_t *data, size_t bytes) {
    tu_buffer *input = &connection->input;
    size_t done = tu_hub_input(&server->hub, &connection->session, data, bytes);
    bool paused = tu_session_paused(&connection->session);
    settle(server, connection);
    if (data == input->data) {
        memmove(input->data, input->data + done, bytes - done);
        input->used = bytes - done;
        if (done == bytes)
            tu_buffer_reset(input);
    } else {
        tu_put(input, data + done, bytes - done);
        if (input->failed)
            close_connection(server, connection, "out of memory for its command");
    }
    serve_dirty(server);
    return paused && connection->descriptor >= 0 && !tu_session_paused(&connection->session) && input->used > 0;
}

static void digest(tu_server *server, connection *connection, const uint8_t *data, size_t bytes) {
    for (bool again = true; again; data = connection->input.data, bytes = connection->input.used)
        again = digest_once(server, connection, data, bytes);
}

static void receive(tu_server *server, connection *connection) {
    tu_buffer *input = &connection->input;
    bool own = input->used > 0;
    uint8_t *room = own ? tu_buffer_room(input, INPUT_CHUNK) : server->chunk;
    if (room == NULL) {
        close_connection(server, connection, "out of memory for its command");
        return;
    }
    ssize_t got = recv(connection->descriptor, room, INPUT_CHUNK, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (got <= 0) {
        close_connection(server, connection, "");
        return;
    }
    if (own) {
        input->used += (size_t)got;
        digest(server, connection, input->data, input->used);
    } else {
        digest(server, connection, room, (size_t)got);
    }
}

static void on_connection(tu_server *server, connection *connection, uint32_t events) {
    if (connection->descriptor < 0)
        return;
    if (events & EPOLLERR) {
        close_connection(server, connection, "");
        return;
    }
    if (events & EPOLLOUT) {
        bool was_paused = tu_session_paused(&connection->session);
        send_pending(server, connection);
        if (was_paused && connection->descriptor >= 0 && !tu_session_paused(&connection->session) &&
            connection->input.used > 0)
            digest(server, connection, connection->input.data, connection->input.used);
    }
    if (connection->descriptor < 0)
        return;
    if (events & EPOLLIN && !tu_session_paused(&connection->session))
        receive(server, connection);
    else if (events & EPOLLHUP)
        close_connection(server, connection, "");
}

/* ---- new connections ---- */

static bool same_user(int descriptor, char *peer, size_t bytes) {
    struct ucred other;
    socklen_t length = sizeof other;
    if (getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &other, &length) != 0)
        return false;
    snprintf(peer, bytes, "process %d of user %u", (int)other.pid, (unsigned)other.uid);
    return other.uid == geteuid();
}

static void tune(int descriptor) {
    int on = 1, idle = 60, interval = 10, probes = 6;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    /* A host that vanished says nothing: ask now and then, so that its waits do not stay for ever. */
    setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

/* Takes the descriptor over, also when it fails. */
static void admit(tu_server *server, int descriptor, const tu_socket_address *from, socklen_t length) {
    connection *fresh = calloc(1, sizeof *fresh);
    if (fresh == NULL) {
        close(descriptor);
        return;
    }
    fresh->source = SOURCE_CONNECTION;
    fresh->descriptor = descriptor;
    if (server->listeners.port < 0) {
        if (!same_user(descriptor, fresh->peer, sizeof fresh->peer)) {
            TU_LOG(TUTTI_LOG_WARN, NULL, "store", "refused %s: only processes of user %u are served", fresh->peer,
                   (unsigned)geteuid());
            goto close_descriptor;
        }
    } else {
        tu_socket_text(from, length, fresh->peer, sizeof fresh->peer);
        tune(descriptor);
    }
    struct epoll_event event = { .events = EPOLLIN, .data.ptr = fresh };
    if (epoll_ctl(server->epoll, EPOLL_CTL_ADD, descriptor, &event) != 0)
        goto close_descriptor;
    fresh->events = EPOLLIN;
    fresh->half_open = true;
    fresh->deadline = tu_deadline(HALF_OPEN_TIME);
    if (server->half_open.count >= HALF_OPEN_LIMIT)
        close_connection(server, server->half_open.first, "it has said nothing, and others want in");
    list_add(&server->half_open, fresh);
    return;
close_descriptor:
    close(descriptor);
    free(fresh);
}

static void listen_again(tu_server *server, bool yes) {
    for (int i = 0; i < server->listeners.count; i++) {
        struct epoll_event event = { .events = yes ? EPOLLIN : 0, .data.ptr = &server->listener[i] };
        epoll_ctl(server->epoll, EPOLL_CTL_MOD, server->listener[i].descriptor, &event);
    }
    server->accept_again = yes ? 0 : tu_deadline(ACCEPT_PAUSE);
}

/* No descriptor for a connection: the spare one serves to take it and close it, so that its owner hears of it. */
static bool turn_away(tu_server *server, int listening) {
    if (server->warn_again <= tu_clock_now()) {
        TU_LOG(TUTTI_LOG_WARN, NULL, "store",
               "no descriptor left for another client (%zu are connected); raise RLIMIT_NOFILE", server->open.count);
        server->warn_again = tu_deadline(WARN_PAUSE);
    }
    if (server->spare < 0)
        return false;
    close(server->spare);
    int unwanted = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    if (unwanted >= 0)
        close(unwanted);
    server->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return unwanted >= 0;
}

static void accept_some(tu_server *server, int listening) {
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        tu_socket_address from = { 0 };
        socklen_t length = sizeof from;
        int descriptor = accept4(listening, &from.any, &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (descriptor >= 0) {
            admit(server, descriptor, &from, length);
            continue;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return;
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if ((errno == EMFILE || errno == ENFILE) && turn_away(server, listening))
            continue;
        listen_again(server, false);
        return;
    }
}

/* ---- the thread ---- */

/* Closes those that took too long to say who they are; returns how long to sleep, in milliseconds, -1 for as long as it
 * takes. */
static int look_at_clock(tu_server *server) {
    if (server->half_open.first == NULL && server->accept_again == 0)
        return -1;
    int64_t now = tu_clock_now(), next = INT64_MAX;
    if (server->accept_again != 0) {
        if (server->accept_again <= now)
            listen_again(server, true);
        else
            next = server->accept_again;
    }
    for (connection *oldest; (oldest = server->half_open.first) != NULL && oldest->deadline <= now;)
        close_connection(server, oldest,
                         oldest->session.state == TU_SESSION_REFUSED ? "" : "it took too long to say who it is");
    free_closed(server);
    if (server->half_open.first != NULL && server->half_open.first->deadline < next)
        next = server->half_open.first->deadline;
    return next == INT64_MAX ? -1 : (int)((next - now) / TU_MILLISECOND + 1);
}

static void *serve(void *argument) {
    tu_server *server = argument;
    struct epoll_event events[EVENT_BATCH];
    for (bool stop = false; !stop;) {
        int count = epoll_wait(server->epoll, events, EVENT_BATCH, look_at_clock(server));
        for (int i = 0; i < count; i++) {
            source *what = events[i].data.ptr;
            if (*what == SOURCE_STOP)
                stop = true;
            else if (*what == SOURCE_LISTENER)
                accept_some(server, ((listener *)what)->descriptor);
            else
                on_connection(server, (connection *)what, events[i].events);
        }
        serve_dirty(server); /* those that a closed connection made way for */
        free_closed(server);
    }
    return NULL;
}

/* ---- start and end ---- */

static void free_server(tu_server *server) {
    connection_list *lists[] = { &server->half_open, &server->open };
    for (int i = 0; i < 2; i++) {
        while (lists[i]->first != NULL)
            close_connection(server, lists[i]->first, "");
    }
    free_closed(server);
    tu_hub_clear(&server->hub);
    tu_store_listen_end(&server->listeners);
    int descriptors[] = { server->epoll, server->stop.descriptor, server->spare };
    for (int i = 0; i < 3; i++) {
        if (descriptors[i] >= 0)
            close(descriptors[i]);
    }
    tu_secret_wipe(&server->secret);
    free(server->chunk);
    free(server);
}

static tutti_status add_source(tu_server *server, int descriptor, void *source) {
    struct epoll_event event = { .events = EPOLLIN, .data.ptr = source };
    if (epoll_ctl(server->epoll, EPOLL_CTL_ADD, descriptor, &event) != 0)
        return tu_error_system(errno, "the store server cannot watch a descriptor (epoll_ctl)");
    return TUTTI_OK;
}

static tutti_status set_up(tu_server *server) {
    server->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (server->epoll < 0)
        return tu_error_system(errno, "the store server cannot start (epoll_create1)");
    server->stop.source = SOURCE_STOP;
    server->stop.descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->stop.descriptor < 0)
        return tu_error_system(errno, "the store server cannot start (eventfd)");
    server->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    tutti_status status = add_source(server, server->stop.descriptor, &server->stop);
    for (int i = 0; status == TUTTI_OK && i < server->listeners.count; i++) {
        server->listener[i] = (listener){ SOURCE_LISTENER, server->listeners.descriptor[i] };
        status = add_source(server, server->listener[i].descriptor, &server->listener[i]);
    }
    return status;
}

tutti_status tu_server_start(const tu_address *address, int listen_fd, const tu_secret *secret, bool trust_network,
                             int64_t deadline, tu_server **server) {
    tu_server *fresh = calloc(1, sizeof *fresh);
    uint8_t *chunk = malloc(INPUT_CHUNK);
    if (fresh == NULL || chunk == NULL) {
        free(chunk);
        free(fresh);
        return tu_error_memory("a store server", INPUT_CHUNK + sizeof *fresh);
    }
    atomic_init(&fresh->references, 1);
    fresh->chunk = chunk;
    fresh->epoll = fresh->stop.descriptor = fresh->spare = -1;
    fresh->secret = *secret;
    fresh->hub.secret = &fresh->secret;
    bool may_be_open = secret->bytes > 0 || trust_network;
    bool adopts = listen_fd > 0;
    tutti_status status = adopts ? tu_store_listen_adopt(listen_fd, address, may_be_open, &fresh->listeners)
                                 : tu_store_listen(address, may_be_open, deadline, &fresh->listeners);
    if (status == TUTTI_OK)
        status = set_up(fresh);
    if (status == TUTTI_OK) {
        int error = tu_thread_start("tutti-store", serve, fresh, &fresh->thread);
        if (error != 0)
            status = tu_error_system(error, "the store server cannot start its thread");
    }
    if (status != TUTTI_OK) {
        if (adopts)
            fresh->listeners.count = 0; /* stays the caller's */
        free_server(fresh);
        return status;
    }
    *server = fresh;
    return TUTTI_OK;
}

void tu_server_retain(tu_server *server) {
    atomic_fetch_add_explicit(&server->references, 1, memory_order_relaxed); /* the caller holds one already */
}

void tu_server_release(tu_server *server) {
    /* Acquire and release: pairs with the other holders' releases. */
    if (atomic_fetch_sub_explicit(&server->references, 1, memory_order_acq_rel) != 1)
        return;
    eventfd_write(server->stop.descriptor, 1);
    pthread_join(server->thread, NULL);
    free_server(server);
}

void tu_server_abandon(tu_server *server) {
    if (atomic_fetch_sub_explicit(&server->references, 1, memory_order_acq_rel) != 1)
        return;
    server->listeners.unlink_path[0] = 0; /* the parent's */
    tu_store_listen_end(&server->listeners);
    close(server->epoll);
    close(server->stop.descriptor);
    /* The fork may have caught the thread at its work, so what it had in hand is not touched. */
}

int tu_server_port(const tu_server *server) {
    return server->listeners.port;
}

void tu_server_own_address(const tu_server *server, tu_address_list *list) {
    *list = (tu_address_list){ .count = 1,
                               .address = { server->listeners.own },
                               .length = { server->listeners.own_length } };
}
