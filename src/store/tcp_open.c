/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening a tcp store, with a server or without; closing and cloning it; counting those who come.
 */
#include "store/tcp_client.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"

static tutti_status connect_store(tu_tcp_store *tcp, int64_t timeout_ns) {
    if (tcp->own.count > 0)
        return tu_store_connect_once(&tcp->own, &tcp->secret, tu_deadline(timeout_ns), &tcp->connection);
    return tu_store_connect(&tcp->address, &tcp->secret, timeout_ns, &tcp->connection);
}

tutti_status tu_tcp_reconnect(tu_tcp_call *call) {
    tu_tcp_store *tcp = call->tcp;
    tu_address_list list = tcp->own;
    tutti_status status = list.count > 0 ? TUTTI_OK : tu_address_resolve(&tcp->address, call->reply_deadline, &list);
    return status == TUTTI_OK ? tu_store_connect_once(&list, &tcp->secret, call->reply_deadline, &tcp->connection)
                              : status;
}

void tu_tcp_destroy(tutti_store *store) {
    tu_tcp_store *tcp = tu_as_tcp(store);
    tu_connection_close(&tcp->connection);
    if (tcp->server != NULL) {
        if (tu_store_forked(store))
            tu_server_abandon(tcp->server);
        else
            tu_server_release(tcp->server);
    }
    tu_buffer_free(&tcp->out);
    tu_secret_wipe(&tcp->secret);
    pthread_mutex_destroy(&tcp->lock);
    free(tcp);
}

int tu_tcp_port(const tutti_store *store) {
    const tu_tcp_store *tcp = tu_as_tcp(store);
    return tu_address_is_unix(&tcp->address) ? -1 : tcp->address.port;
}

const char *tu_tcp_address(const tutti_store *store) {
    return tu_as_tcp(store)->text;
}

int tu_tcp_server(const tutti_store *store) {
    return tu_as_tcp(store)->connection.server;
}

tutti_status tu_tcp_make(int64_t timeout_ns, tu_tcp_store **result) {
    tu_tcp_store *tcp = calloc(1, sizeof *tcp);
    if (tcp == NULL)
        return tu_error_memory("a tcp store", sizeof *tcp);
    tutti_status status = tu_auth_nonce(tcp->nobody);
    if (status != TUTTI_OK) {
        free(tcp);
        return status;
    }
    tu_store_init(&tcp->store, &tu_tcp_kind, timeout_ns);
    pthread_mutex_init(&tcp->lock, NULL);
    tcp->connection.descriptor = -1;
    *result = tcp;
    return TUTTI_OK;
}

tutti_status tu_tcp_clone(tutti_store *store, tutti_store **clone) {
    tu_tcp_store *tcp = tu_as_tcp(store), *fresh;
    tutti_status status = tu_tcp_make(tutti_store_timeout(store), &fresh);
    if (status != TUTTI_OK)
        return status;
    fresh->address = tcp->address;
    fresh->own = tcp->own;
    fresh->secret = tcp->secret;
    fresh->client = true;
    memcpy(fresh->text, tcp->text, sizeof fresh->text);
    if (tcp->server != NULL) {
        tu_server_retain(tcp->server);
        fresh->server = tcp->server;
    }
    status = connect_store(fresh, tutti_store_timeout(store));
    if (status != TUTTI_OK) {
        tutti_store_release(&fresh->store);
        return status;
    }
    *clone = &fresh->store;
    return TUTTI_OK;
}

tutti_status tu_tcp_move(tutti_store *store, const char *host, int port, int64_t timeout_ns) {
    tu_tcp_store *tcp = tu_as_tcp(store);
    int64_t deadline = tu_deadline(timeout_ns);
    tu_address address;
    tutti_status status = tu_address_set(&address, host, port);
    if (status == TUTTI_OK && !tu_mutex_lock_until(&tcp->lock, deadline))
        status = tu_error(TUTTI_ERROR_TIMEOUT, "timeout: another thread waits in the store that is to go to %s:%d",
                          host, port);
    if (status != TUTTI_OK)
        return status;
    tu_connection_close(&tcp->connection);
    tcp->address = address;
    tcp->own.count = 0;
    snprintf(tcp->text, sizeof tcp->text, strchr(host, ':') != NULL ? "tcp://[%s]:%d" : "tcp://%s:%d", host, port);
    int64_t left = tu_deadline_left(deadline);
    status = connect_store(tcp, left > 0 ? left : 1);
    pthread_mutex_unlock(&tcp->lock);
    return status;
}

/* ---- counting the workers ---- */

static tutti_status add_worker(tu_tcp_store *tcp, int64_t amount, int64_t timeout_ns, int64_t *joined) {
    tu_tcp_call call;
    tutti_status status = tu_tcp_begin(&call, &tcp->store, "open", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    return tu_tcp_end(&call, tu_tcp_add_locked(&call, "init/", 5, amount, joined));
}

static void warn_of_backlog(int workers) {
    FILE *file = fopen("/proc/sys/net/core/somaxconn", "re");
    int limit;
    if (file == NULL)
        return;
    if (fscanf(file, "%d", &limit) == 1 && limit < workers)
        TU_LOG(TUTTI_LOG_WARN, NULL, "store",
               "%d workers will connect, but the kernel queues only %d connections "
               "(net.core.somaxconn); some may have to try again",
               workers, limit);
    fclose(file);
}

/* Everybody announces itself; the server's own store waits until all have. */
static tutti_status count_workers(tu_tcp_store *tcp, const tutti_tcp_store_options *options, int64_t timeout_ns) {
    int64_t deadline = tu_deadline(timeout_ns), joined, pause = TU_MILLISECOND;
    if (options->server)
        warn_of_backlog(options->workers);
    tutti_status status = add_worker(tcp, 1, timeout_ns, &joined);
    while (status == TUTTI_OK && options->server && !options->no_wait && joined < options->workers) {
        if (tu_deadline_left(deadline) == 0)
            return tu_error(TUTTI_ERROR_TIMEOUT,
                            "Timed out after %" PRId64 "ms (timeout) waiting for clients. %" PRId64
                            "/%d clients joined.",
                            timeout_ns / TU_MILLISECOND, joined, options->workers);
        tu_tcp_rest(pause, deadline);
        pause = pause * 2 < 10 * TU_MILLISECOND ? pause * 2 : 10 * TU_MILLISECOND;
        status = add_worker(tcp, 0, timeout_ns, &joined);
    }
    return status;
}

/* ---- opening ---- */

/* "tcp://host:port"; brackets for a number of IPv6; this host's name when every address is meant. */
static void write_text(tu_tcp_store *tcp) {
    char name[256] = "localhost";
    const char *host = tcp->address.host;
    if (tu_address_is_unix(&tcp->address)) {
        snprintf(tcp->text, sizeof tcp->text, "%s", host);
        return;
    }
    if (host[0] == 0 && gethostname(name, sizeof name - 1) == 0)
        host = name;
    bool brackets = strchr(host, ':') != NULL;
    snprintf(tcp->text, sizeof tcp->text, "tcp://%s%s%s:%d", brackets ? "[" : "", host, brackets ? "]" : "",
             tcp->address.port);
}

static tutti_status check_secret(const tu_tcp_store *tcp) {
    if (tcp->secret.bytes > 0 && !tu_auth_available() && !tu_address_is_unix(&tcp->address))
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "this build of Tutti has no libsodium, so a store over TCP cannot prove a secret; use "
                        "a Unix socket on one host, build again with libsodium-dev and pkg-config installed, or leave "
                        "the secret out and say that the network is trusted (trust_network, TUTTI_TRUST_NETWORK=1)");
    return TUTTI_OK;
}

static tutti_status check_options(const tutti_tcp_store_options *options) {
    if (options->timeout_ns < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the store's timeout_ns must not be negative");
    if (options->workers < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the store's number of workers must not be negative: %d",
                        options->workers);
    if (options->listen_fd > 0 && !options->server)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_tcp_store_options.listen_fd is %d, but a client listens nowhere: set server too",
                        options->listen_fd);
    return TUTTI_OK;
}

/* Fills in address and secret, and starts the server where one is asked for. */
static tutti_status prepare(tu_tcp_store *tcp, const char *host, int port, const tutti_tcp_store_options *options) {
    tutti_status status = tu_address_set(&tcp->address, host, port);
    if (status == TUTTI_OK)
        status = tu_secret_set(&tcp->secret, options->secret, options->secret_bytes);
    if (status == TUTTI_OK)
        status = check_secret(tcp);
    if (status != TUTTI_OK)
        return status;
    if (!tu_auth_available())
        tu_secret_wipe(&tcp->secret); /* a Unix socket: the kernel vouches for both sides */
    if (options->server) {
        status = tu_server_start(&tcp->address, options->listen_fd, &tcp->secret, options->trust_network,
                                 tu_deadline(tutti_store_timeout(&tcp->store)), &tcp->server);
        if (status != TUTTI_OK)
            return status;
        tu_server_own_address(tcp->server, &tcp->own);
        tcp->address.port = tu_server_port(tcp->server) > 0 ? tu_server_port(tcp->server) : 0;
    } else if (port == 0 && !tu_address_is_unix(&tcp->address)) {
        return tu_error(TUTTI_ERROR_ARGUMENT, "port number missing: a client of a tcp store needs its server's port");
    }
    write_text(tcp);
    return TUTTI_OK;
}

static tutti_status open_store(const char *operation, const char *host, int port,
                               const tutti_tcp_store_options *options, bool serve_only, tutti_store **store) {
    tutti_tcp_store_options full = TUTTI_TCP_STORE_OPTIONS_INIT;
    tutti_status status = tu_options_copy("tutti_tcp_store_options", options, &full, sizeof full);
    full.server |= serve_only;
    if (status == TUTTI_OK)
        status = check_options(&full);
    if (status != TUTTI_OK)
        return status;
    if (host == NULL || store == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the %s is NULL", operation,
                        host == NULL ? "host" : "place for the result");
    tu_tcp_store *tcp;
    status = tu_tcp_make(full.timeout_ns, &tcp);
    if (status != TUTTI_OK)
        return status;
    int64_t timeout = tutti_store_timeout(&tcp->store);
    tcp->client = !serve_only;
    status = prepare(tcp, host, port, &full);
    if (status == TUTTI_OK && tcp->client)
        status = connect_store(tcp, timeout);
    if (status == TUTTI_OK && tcp->client && full.workers > 0)
        status = count_workers(tcp, &full, timeout);
    if (status != TUTTI_OK) {
        tutti_store_release(&tcp->store);
        return status;
    }
    *store = &tcp->store;
    return TUTTI_OK;
}

tutti_status tutti_store_open_tcp(const char *host, int port, const tutti_tcp_store_options *options,
                                  tutti_store **store) {
    return open_store("store open_tcp", host, port, options, false, store);
}

tutti_status tutti_store_serve(const char *host, int port, const tutti_tcp_store_options *options,
                               tutti_store **server) {
    return open_store("store serve", host, port, options, true, server);
}
