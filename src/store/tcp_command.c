/* SPDX-License-Identifier: Apache-2.0
 *
 * One command of a tcp store: the handle's lock, what is sent, what comes back.
 */
#include "store/tcp_client.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

/* At least this much for a reply that the server owes at once: see tu_tcp_send_with. */
#define REPLY_TIME (5 * TU_SECOND)

/* The other threads' calls on this handle take their time too: looks around meanwhile. */
static tutti_status lock_handle(tu_tcp_call *call) {
    for (;;) {
        int64_t slice = tu_watch_slice(call->deadline);
        if (tu_mutex_lock_until(&call->tcp->lock, slice))
            return TUTTI_OK;
        if (slice == call->deadline)
            return tu_error(TUTTI_ERROR_TIMEOUT,
                            "store %s: timeout after %" PRId64 "ms, spent waiting for another thread's call on this "
                            "handle; clone the store for each thread",
                            call->operation, call->timeout_ns / TU_MILLISECOND);
        tutti_status status = tu_watch_look();
        if (status != TUTTI_OK)
            return status;
    }
}

tutti_status tu_tcp_begin(tu_tcp_call *call, tutti_store *store, const char *operation, int64_t timeout_ns) {
    tu_tcp_store *tcp = tu_as_tcp(store);
    *call = (tu_tcp_call){
        .tcp = tcp, .operation = operation, .timeout_ns = timeout_ns, .deadline = tu_deadline(timeout_ns)
    };
    if (!tcp->client)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "store %s: this is a server without a client; tutti_store_clone gives one", operation);
    tutti_status status = lock_handle(call);
    if (status != TUTTI_OK)
        return status;
    if (tcp->connection.descriptor < 0) {
        pthread_mutex_unlock(&tcp->lock);
        return tu_error(TUTTI_ERROR_NETWORK, "store %s: the connection to %s was lost earlier", operation, tcp->text);
    }
    return TUTTI_OK;
}

tutti_status tu_tcp_begin_short(tu_tcp_call *call, tutti_store *store, const char *operation) {
    return tu_tcp_begin(call, store, operation, tutti_store_timeout(store));
}

tutti_status tu_tcp_end(tu_tcp_call *call, tutti_status status) {
    tu_buffer_reset(&call->tcp->out);
    pthread_mutex_unlock(&call->tcp->lock);
    return status;
}

tutti_status tu_tcp_broken(tu_tcp_call *call, tutti_status status) {
    tu_connection_close(&call->tcp->connection);
    tu_error_append(" (store %s at %s)", call->operation, call->tcp->text);
    return status;
}

/* A reply that does not come costs the connection, so a deadline that is nearer than a busy server's answer must not
 * end it: a get with a timeout of 1 ms on a loaded host would. */
tutti_status tu_tcp_send_with(tu_tcp_call *call, const void *tail, size_t tail_bytes) {
    tu_buffer *out = &call->tcp->out;
    if (out->failed)
        return tu_error_memory("a store command", out->used);
    call->reply_deadline = tu_deadline(call->reply_time > 0 ? call->reply_time : REPLY_TIME);
    if (call->reply_time == 0 && call->timeout_ns == INT64_MAX) /* a wait without a deadline: a reply has one still */
        call->reply_deadline = tu_deadline(tutti_store_timeout(&call->tcp->store));
    else if (call->reply_time == 0 && call->reply_deadline < call->deadline)
        call->reply_deadline = call->deadline;
    tu_watch *before = tu_watch_rest();
    tutti_status status =
        tu_connection_send(&call->tcp->connection, out->data, out->used, tail, tail_bytes, call->reply_deadline);
    tu_watch_thread_back(before);
    out->used = 0;
    return status == TUTTI_OK ? TUTTI_OK : tu_tcp_broken(call, status);
}

tutti_status tu_tcp_send(tu_tcp_call *call) {
    return tu_tcp_send_with(call, NULL, 0);
}

tutti_status tu_tcp_receive(tu_tcp_call *call, void *data, size_t bytes) {
    tu_watch *before = tu_watch_rest();
    tutti_status status = tu_connection_receive(&call->tcp->connection, data, bytes, call->reply_deadline);
    tu_watch_thread_back(before);
    return status == TUTTI_OK ? TUTTI_OK : tu_tcp_broken(call, status);
}

tutti_status tu_tcp_receive_i64(tu_tcp_call *call, int64_t *number) {
    return tu_tcp_receive(call, number, sizeof *number);
}

/* A length that no server means is garbage; it must not become an allocation. */
tutti_status tu_tcp_receive_value(tu_tcp_call *call, void **value, size_t *bytes) {
    uint64_t length;
    tutti_status status = tu_tcp_receive(call, &length, sizeof length);
    if (status != TUTTI_OK)
        return status;
    if (length > TU_FRAME_LIMIT)
        return tu_tcp_broken(call,
                             tu_error(TUTTI_ERROR_PROTOCOL,
                                      "the server sends a value of %" PRIu64 " bytes; at most %" PRIu64 " are possible",
                                      length, (uint64_t)TU_FRAME_LIMIT));
    char *fresh = malloc((size_t)length + 1);
    if (fresh == NULL)
        return tu_tcp_broken(call, tu_error_memory("a store's value", (size_t)length));
    status = tu_tcp_receive(call, fresh, (size_t)length);
    if (status != TUTTI_OK) {
        free(fresh);
        return status;
    }
    fresh[length] = 0;
    *value = fresh;
    *bytes = (size_t)length;
    return TUTTI_OK;
}

tutti_status tu_tcp_unexpected(tu_tcp_call *call, int64_t reply) {
    return tu_tcp_broken(call,
                         tu_error(TUTTI_ERROR_PROTOCOL, "the server's reply %" PRId64 " means nothing here", reply));
}
