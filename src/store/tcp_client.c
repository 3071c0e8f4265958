/* SPDX-License-Identifier: Apache-2.0
 *
 * The tcp store: a client of a server that may be ours, in this process or another, or PyTorch's.
 *
 * One command at a time per handle, under its lock. A command that fails half-way leaves the connection in an unknown
 * state: it is closed, and later calls say so. A wait that runs out of time is cancelled, and the connection goes on.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "store/connect.h"
#include "store/store.h"
#include "store/tcp.h"
#include "store/wire.h"

#define REPLY_TIME (5 * TU_SECOND) /* at least this much for a reply that the server owes at once: see send_with */
#define DISTURBED_TIME TU_SECOND   /* for the server's word that it took a wait back */
#define CHUNK_BYTES ((size_t)(64 << 20)) /* of values in one command; longer lists are cut */

typedef struct tcp_store {
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
} tcp_store;

static tcp_store *as_tcp(const tutti_store *store) {
    return (tcp_store *)store;
}

/* ---- a command ---- */

typedef struct call {
    tcp_store *tcp;
    const char *operation;
    int64_t timeout_ns, deadline;
    int64_t reply_deadline; /* of what the server owes at once */
    int64_t reply_time;     /* how long that may take; 0: as send_with says */
} call;

/* The other threads' calls on this handle take their time too: looks around meanwhile. */
static tutti_status lock_handle(call *call) {
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

/* Locks the handle until call_end. Waiting for another thread's call is part of the time. */
static tutti_status call_begin(call *call, tutti_store *store, const char *operation, int64_t timeout_ns) {
    tcp_store *tcp = as_tcp(store);
    *call = (struct call){
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

/* A command of its own deadline: for calls that do not wait for others. */
static tutti_status call_begin_short(call *call, tutti_store *store, const char *operation) {
    return call_begin(call, store, operation, tutti_store_timeout(store));
}

static tutti_status call_end(call *call, tutti_status status) {
    tu_buffer_reset(&call->tcp->out);
    pthread_mutex_unlock(&call->tcp->lock);
    return status;
}

/* The reply is not what the command must give, or it did not come: nothing more can be understood. */
static tutti_status broken(call *call, tutti_status status) {
    tu_connection_close(&call->tcp->connection);
    tu_error_append(" (store %s at %s)", call->operation, call->tcp->text);
    return status;
}

/* A reply that does not come costs the connection, so a deadline that is nearer than a busy server's answer must not
 * end it: a get with a timeout of 1 ms on a loaded host would. */
static tutti_status send_with(call *call, const void *tail, size_t tail_bytes) {
    tu_buffer *out = &call->tcp->out;
    if (out->failed)
        return tu_error_memory("a store command", out->used);
    call->reply_deadline = tu_deadline(call->reply_time > 0 ? call->reply_time : REPLY_TIME);
    if (call->timeout_ns == INT64_MAX) /* a wait without a deadline: a reply that is owed at once still has one */
        call->reply_deadline = tu_deadline(tutti_store_timeout(&call->tcp->store));
    else if (call->reply_time == 0 && call->reply_deadline < call->deadline)
        call->reply_deadline = call->deadline;
    tu_watch *before = tu_watch_rest();
    tutti_status status =
        tu_connection_send(&call->tcp->connection, out->data, out->used, tail, tail_bytes, call->reply_deadline);
    tu_watch_thread_back(before);
    out->used = 0;
    return status == TUTTI_OK ? TUTTI_OK : broken(call, status);
}

static tutti_status send_command(call *call) {
    return send_with(call, NULL, 0);
}

static tutti_status receive(call *call, void *data, size_t bytes) {
    tu_watch *before = tu_watch_rest();
    tutti_status status = tu_connection_receive(&call->tcp->connection, data, bytes, call->reply_deadline);
    tu_watch_thread_back(before);
    return status == TUTTI_OK ? TUTTI_OK : broken(call, status);
}

static tutti_status receive_i64(call *call, int64_t *number) {
    return receive(call, number, sizeof *number);
}

/* A length that no server means is garbage; it must not become an allocation. */
static tutti_status receive_value(call *call, void **value, size_t *bytes) {
    uint64_t length;
    tutti_status status = receive(call, &length, sizeof length);
    if (status != TUTTI_OK)
        return status;
    if (length > TU_FRAME_LIMIT)
        return broken(call, tu_error(TUTTI_ERROR_PROTOCOL,
                                     "the server sends a value of %" PRIu64 " bytes; at most %" PRIu64 " are possible",
                                     length, (uint64_t)TU_FRAME_LIMIT));
    char *fresh = malloc((size_t)length + 1);
    if (fresh == NULL)
        return broken(call, tu_error_memory("a store's value", (size_t)length));
    status = receive(call, fresh, (size_t)length);
    if (status != TUTTI_OK) {
        free(fresh);
        return status;
    }
    fresh[length] = 0;
    *value = fresh;
    *bytes = (size_t)length;
    return TUTTI_OK;
}

static tutti_status unexpected(call *call, int64_t reply) {
    return broken(call, tu_error(TUTTI_ERROR_PROTOCOL, "the server's reply %" PRId64 " means nothing here", reply));
}

/* ---- arguments ---- */

static tutti_status check_value(const char *key, size_t bytes) {
    if (bytes > TU_VALUE_LIMIT)
        return tu_error(TUTTI_ERROR_RANGE,
                        "a value of %zu bytes for key %.200s is too long for a tcp store; at most %u are possible",
                        bytes, key, TU_VALUE_LIMIT);
    return TUTTI_OK;
}

/* How many of the list go into one command. */
static size_t chunk_of(size_t count) {
    return count < TU_KEYS_LIMIT ? count : TU_KEYS_LIMIT;
}

static void put_keys(tu_buffer *out, tu_command command, const char *const *keys, size_t count) {
    tu_put_u8(out, (uint8_t)command);
    tu_put_u64(out, count);
    for (size_t i = 0; i < count; i++)
        tu_put_key(out, keys[i]);
}

static void put_key(tu_buffer *out, tu_command command, const char *key) {
    tu_put_u8(out, (uint8_t)command);
    tu_put_key(out, key);
}

/* ---- commands without a reply ---- */

/* SET, APPEND and QUEUE_PUSH: a key and a value, which is sent from where it lies. */
static tutti_status put_pair(tutti_store *store, const char *operation, tu_command command, const char *key,
                             const void *value, size_t bytes) {
    call call;
    tutti_status status = check_value(key, bytes);
    if (status == TUTTI_OK)
        status = call_begin_short(&call, store, operation);
    if (status != TUTTI_OK)
        return status;
    tu_buffer *out = &call.tcp->out;
    put_key(out, command, key);
    tu_put_u64(out, bytes);
    return call_end(&call, send_with(&call, value, bytes));
}

static tutti_status tcp_set(tutti_store *store, const char *key, const void *value, size_t bytes) {
    return put_pair(store, "set", TU_COMMAND_SET, key, value, bytes);
}

static tutti_status tcp_append(tutti_store *store, const char *key, const void *value, size_t bytes) {
    return put_pair(store, "append", TU_COMMAND_APPEND, key, value, bytes);
}

static tutti_status tcp_queue_push(tutti_store *store, const char *key, const void *value, size_t bytes) {
    return put_pair(store, "queue_push", TU_COMMAND_QUEUE_PUSH, key, value, bytes);
}

static tutti_status tcp_multi_set(tutti_store *store, const char *const *keys, size_t count, const void *const *values,
                                  const size_t *bytes) {
    call call;
    tutti_status status = TUTTI_OK;
    for (size_t i = 0; i < count && status == TUTTI_OK; i++)
        status = check_value(keys[i], bytes[i]);
    if (status == TUTTI_OK)
        status = call_begin_short(&call, store, "multi_set");
    if (status != TUTTI_OK)
        return status;
    tu_buffer *out = &call.tcp->out;
    for (size_t done = 0; done < count && status == TUTTI_OK;) {
        size_t end = done, total = 0;
        while (end < count && end - done < TU_KEYS_LIMIT && total < CHUNK_BYTES)
            total += bytes[end++];
        tu_put_u8(out, TU_COMMAND_MULTI_SET);
        tu_put_u64(out, end - done);
        for (; done < end; done++) {
            tu_put_key(out, keys[done]);
            tu_put_text(out, values[done], bytes[done]);
        }
        status = send_command(&call);
    }
    return call_end(&call, status);
}

/* ---- waiting ---- */

/* Takes back a wait that took too long. The server may have answered at the same moment: then its 0 comes first. */
static tutti_status cancel(call *call) {
    uint8_t reply = 0;
    tu_put_u8(&call->tcp->out, TU_COMMAND_CANCEL_WAIT);
    tutti_status status = send_command(call);
    for (int i = 0; i < 2 && status == TUTTI_OK && reply == 0; i++)
        status = receive(call, &reply, sizeof reply);
    if (status == TUTTI_OK && reply != 1)
        status = unexpected(call, reply);
    return status;
}

/* The same for a wait that a watch ended, with its error. After a strict watch, or a server that does not answer within
 * a moment, the connection is closed. */
static tutti_status cancel_disturbed(call *call, tutti_status status) {
    tu_watch *before = tu_watch_rest();
    if (tu_watched())
        return broken(call, status);
    tutti_error_copy error;
    tu_error_save(&error);
    call->reply_time = DISTURBED_TIME;
    (void)cancel(call);
    tu_watch_thread_back(before);
    return tu_error_restore(&error);
}

/* Sends the WAIT or BARRIER that is in the buffer and waits for its 0. *late: it was cancelled at the deadline; the
 * caller writes the message. */
static tutti_status wait_for_zero(call *call, bool *late) {
    uint8_t reply;
    *late = false;
    tutti_status status = send_command(call);
    if (status != TUTTI_OK)
        return status;
    status = tu_connection_receive(&call->tcp->connection, &reply, sizeof reply, call->deadline);
    if (call->tcp->connection.disturbed)
        return cancel_disturbed(call, status);
    if (status == TUTTI_ERROR_TIMEOUT) {
        *late = true;
        return cancel(call);
    }
    if (status != TUTTI_OK)
        return broken(call, status);
    return reply == 0 ? TUTTI_OK : unexpected(call, reply);
}

static tutti_status wait_locked(call *call, const char *const *keys, size_t count) {
    for (size_t done = 0; done < count;) {
        bool late;
        size_t chunk = chunk_of(count - done);
        put_keys(&call->tcp->out, TU_COMMAND_WAIT, keys + done, chunk);
        tutti_status status = wait_for_zero(call, &late);
        if (status != TUTTI_OK)
            return status;
        if (late)
            return tu_store_wait_timeout(keys, count, call->timeout_ns);
        done += chunk;
    }
    return TUTTI_OK;
}

static tutti_status tcp_wait(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns) {
    call call;
    tutti_status status = call_begin(&call, store, "wait", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    return call_end(&call, wait_locked(&call, keys, count));
}

static tutti_status tcp_barrier(tutti_store *store, const char *key, int64_t count, int64_t timeout_ns) {
    call call;
    bool late;
    tutti_status status = call_begin(&call, store, "barrier", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    put_key(&call.tcp->out, TU_COMMAND_BARRIER, key);
    tu_put_u64(&call.tcp->out, (uint64_t)count);
    status = wait_for_zero(&call, &late);
    if (status == TUTTI_OK && late)
        status = tu_error(TUTTI_ERROR_TIMEOUT,
                          "barrier timeout after %" PRId64 "ms, key: /%s (waiting for %" PRId64 " callers)",
                          timeout_ns / TU_MILLISECOND, key, count);
    return call_end(&call, status);
}

/* ---- commands with a reply ---- */

/* Reads a key without changing anything, in one round trip that every server understands: COMPARE_SET with an
 * expectation that no value equals gives what is there, and the expectation itself when nothing is. (GET on a missing
 * key gives "" or ends the connection, and between a WAIT and a GET the key may go.) */
static tutti_status read_locked(call *call, const char *key, void **value, size_t *bytes, bool *missing) {
    const uint8_t *nobody = call->tcp->nobody;
    tu_buffer *out = &call->tcp->out;
    put_key(out, TU_COMMAND_COMPARE_SET, key);
    tu_put_text(out, nobody, TU_AUTH_BYTES);
    tu_put_text(out, nobody, TU_AUTH_BYTES);
    tutti_status status = send_command(call);
    if (status == TUTTI_OK)
        status = receive_value(call, value, bytes);
    if (status != TUTTI_OK)
        return status;
    *missing = *bytes == TU_AUTH_BYTES && memcmp(*value, nobody, TU_AUTH_BYTES) == 0;
    if (*missing)
        free(*value);
    return TUTTI_OK;
}

static tutti_status tcp_get(tutti_store *store, const char *key, int64_t timeout_ns, void **value, size_t *bytes) {
    call call;
    tutti_status status = call_begin(&call, store, "get", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    void *result;
    size_t result_bytes;
    bool missing;
    while ((status = read_locked(&call, key, &result, &result_bytes, &missing)) == TUTTI_OK && missing) {
        status = wait_locked(&call, &key, 1);
        if (status != TUTTI_OK)
            break;
    }
    if (status == TUTTI_OK) {
        *value = result;
        *bytes = result_bytes;
    }
    return call_end(&call, status);
}

static tutti_status multi_get_locked(call *call, const char *const *keys, size_t count, void **values, size_t *bytes) {
    tutti_status status = wait_locked(call, keys, count);
    size_t got = 0;
    for (size_t asked = 0; asked < count && status == TUTTI_OK;) {
        size_t chunk = chunk_of(count - asked);
        put_keys(&call->tcp->out, TU_COMMAND_MULTI_GET, keys + asked, chunk);
        asked += chunk;
        status = send_command(call);
        for (; status == TUTTI_OK && got < asked; got += status == TUTTI_OK)
            status = receive_value(call, &values[got], &bytes[got]);
    }
    if (status != TUTTI_OK) {
        while (got-- > 0)
            free(values[got]);
    }
    return status;
}

static tutti_status tcp_multi_get(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns,
                                  void **values, size_t *bytes) {
    call call;
    tutti_status status = call_begin(&call, store, "multi_get", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    return call_end(&call, multi_get_locked(&call, keys, count, values, bytes));
}

/* ADD with the key as it goes over the wire. */
static tutti_status add_locked(call *call, const void *key, size_t key_bytes, int64_t amount, int64_t *sum) {
    tu_buffer *out = &call->tcp->out;
    tu_put_u8(out, TU_COMMAND_ADD);
    tu_put_text(out, key, key_bytes);
    tu_put_u64(out, (uint64_t)amount);
    tutti_status status = send_command(call);
    return status == TUTTI_OK ? receive_i64(call, sum) : status;
}

static tutti_status reconnect(call *call);

/* The protocol has no word for "not a number": the server drops the client instead. So a connection that is lost here,
 * to a server that still takes a new one, means just that. */
static tutti_status tcp_add(tutti_store *store, const char *key, int64_t amount, int64_t *sum) {
    call call;
    char name[TU_KEY_LIMIT + 1];
    tutti_status status = call_begin_short(&call, store, "add");
    if (status != TUTTI_OK)
        return status;
    name[0] = '/';
    size_t length = strlen(key);
    memcpy(name + 1, key, length);
    int64_t result;
    status = add_locked(&call, name, length + 1, amount, &result);
    if (status == TUTTI_ERROR_NETWORK) {
        tutti_error_copy lost;
        tu_error_save(&lost);
        status = reconnect(&call) == TUTTI_OK ? tu_store_not_a_number(key) : tu_error_restore(&lost);
    }
    if (status == TUTTI_OK)
        *sum = result;
    return call_end(&call, status);
}

static tutti_status tcp_compare_set(tutti_store *store, const char *key, const void *expected, size_t expected_bytes,
                                    const void *desired, size_t desired_bytes, void **value, size_t *bytes) {
    call call;
    tutti_status status = check_value(key, expected_bytes);
    if (status == TUTTI_OK)
        status = check_value(key, desired_bytes);
    if (status == TUTTI_OK)
        status = call_begin_short(&call, store, "compare_set");
    if (status != TUTTI_OK)
        return status;
    put_key(&call.tcp->out, TU_COMMAND_COMPARE_SET, key);
    tu_put_text(&call.tcp->out, expected, expected_bytes);
    tu_put_text(&call.tcp->out, desired, desired_bytes);
    status = send_command(&call);
    if (status == TUTTI_OK)
        status = receive_value(&call, value, bytes);
    return call_end(&call, status);
}

static tutti_status check_locked(call *call, const char *const *keys, size_t count, bool *present) {
    bool all = true;
    for (size_t done = 0; done < count && all;) {
        uint8_t reply;
        size_t chunk = chunk_of(count - done);
        put_keys(&call->tcp->out, TU_COMMAND_CHECK, keys + done, chunk);
        tutti_status status = send_command(call);
        if (status == TUTTI_OK)
            status = receive(call, &reply, sizeof reply);
        if (status != TUTTI_OK)
            return status;
        if (reply > 1)
            return unexpected(call, reply);
        all = reply == 0;
        done += chunk;
    }
    *present = all;
    return TUTTI_OK;
}

static tutti_status tcp_check(tutti_store *store, const char *const *keys, size_t count, bool *present) {
    call call;
    tutti_status status = call_begin_short(&call, store, "check");
    if (status != TUTTI_OK)
        return status;
    return call_end(&call, check_locked(&call, keys, count, present));
}

/* Commands of at most one key whose reply is a number. */
static tutti_status ask_number(tutti_store *store, const char *operation, tu_command command, const char *key,
                               int64_t *number) {
    call call;
    tutti_status status = call_begin_short(&call, store, operation);
    if (status != TUTTI_OK)
        return status;
    tu_put_u8(&call.tcp->out, (uint8_t)command);
    if (key != NULL)
        tu_put_key(&call.tcp->out, key);
    status = send_command(&call);
    int64_t reply;
    if (status == TUTTI_OK)
        status = receive_i64(&call, &reply);
    if (status == TUTTI_OK && reply < 0)
        status = unexpected(&call, reply);
    if (status == TUTTI_OK)
        *number = reply;
    return call_end(&call, status);
}

static tutti_status tcp_delete(tutti_store *store, const char *key, bool *existed) {
    int64_t removed;
    tutti_status status = ask_number(store, "delete", TU_COMMAND_DELETE, key, &removed);
    if (status == TUTTI_OK)
        *existed = removed > 0;
    return status;
}

static tutti_status tcp_num_keys(tutti_store *store, int64_t *count) {
    return ask_number(store, "num_keys", TU_COMMAND_NUM_KEYS, NULL, count);
}

static tutti_status tcp_queue_length(tutti_store *store, const char *key, int64_t *length) {
    return ask_number(store, "queue_length", TU_COMMAND_QUEUE_LENGTH, key, length);
}

/* One try; TUTTI_ERROR_EMPTY without a message when there was nothing. */
static tutti_status pop_locked(call *call, const char *key, void **value, size_t *bytes) {
    int64_t length;
    put_key(&call->tcp->out, TU_COMMAND_QUEUE_POP, key);
    tutti_status status = send_command(call);
    if (status == TUTTI_OK)
        status = receive_i64(call, &length);
    if (status != TUTTI_OK)
        return status;
    if (length < 0)
        return unexpected(call, length);
    return length > 0 ? receive_value(call, value, bytes) : TUTTI_ERROR_EMPTY;
}

static void rest(int64_t pause, int64_t deadline) {
    int64_t left = tu_deadline_left(deadline);
    struct timespec time = { .tv_nsec = pause < left ? pause : left };
    clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL);
}

/* Between the wait and the pop another client may take it: then it is waited for again. A value under the same key ends
 * the wait too, with nothing in the queue; the pauses keep this from going round at full speed. */
static tutti_status pop_or_wait(call *call, const char *key, void **value, size_t *bytes) {
    for (int64_t pause = 0;; pause = pause < 8 * TU_MILLISECOND ? pause * 2 + TU_MILLISECOND / 8 : pause) {
        tutti_status status = pop_locked(call, key, value, bytes);
        if (status != TUTTI_ERROR_EMPTY)
            return status;
        if (pause > 0)
            rest(pause, call->deadline);
        status = tu_watch_look();
        if (status != TUTTI_OK)
            return status;
        if (tu_deadline_left(call->deadline) == 0)
            return tu_store_wait_timeout(&key, 1, call->timeout_ns);
        status = wait_locked(call, &key, 1);
        if (status != TUTTI_OK)
            return status;
    }
}

static tutti_status tcp_queue_pop(tutti_store *store, const char *key, bool block, int64_t timeout_ns, void **value,
                                  size_t *bytes) {
    call call;
    tutti_status status = call_begin(&call, store, "queue_pop", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    status = block ? pop_or_wait(&call, key, value, bytes) : pop_locked(&call, key, value, bytes);
    if (status == TUTTI_ERROR_EMPTY)
        status = tu_store_queue_empty(key);
    return call_end(&call, status);
}

/* ---- listing ---- */

/* Keeps the users' keys, without their slash. */
static tutti_status strip(void **names, size_t *lengths, size_t count, char ***keys, size_t *kept_count) {
    const char **texts = malloc((count + 1) * sizeof *texts);
    if (texts == NULL)
        return tu_error_memory("a list of keys", count * sizeof *texts);
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        const char *name = names[i];
        if (name[0] != '/')
            continue;
        texts[kept] = name + 1;
        lengths[kept++] = lengths[i] - 1;
    }
    tutti_status status = tu_store_key_block(texts, lengths, kept, keys);
    if (status == TUTTI_OK)
        *kept_count = kept;
    free(texts);
    return status;
}

static tutti_status list_locked(call *call, char ***keys, size_t *count) {
    int64_t announced;
    tu_put_u8(&call->tcp->out, TU_COMMAND_LIST_KEYS);
    tutti_status status = send_command(call);
    if (status == TUTTI_OK)
        status = receive_i64(call, &announced);
    if (status != TUTTI_OK)
        return status;
    if (announced < 0)
        return unexpected(call, announced);
    /* Grows with what has come, not with what was announced. */
    void **names = NULL;
    size_t *lengths = NULL, room = 0, got = 0;
    while (status == TUTTI_OK && got < (uint64_t)announced) {
        if (got == room) {
            room = room > 0 ? room * 2 : 64;
            void **more_names = realloc(names, room * sizeof *names);
            names = more_names != NULL ? more_names : names;
            size_t *more_lengths = realloc(lengths, room * sizeof *lengths);
            lengths = more_lengths != NULL ? more_lengths : lengths;
            if (more_names == NULL || more_lengths == NULL) {
                status = broken(call, tu_error_memory("a list of keys", room * sizeof *names));
                break;
            }
        }
        status = receive_value(call, &names[got], &lengths[got]);
        got += status == TUTTI_OK;
    }
    if (status == TUTTI_OK)
        status = strip(names, lengths, got, keys, count);
    while (got-- > 0)
        free(names[got]);
    free(names);
    free(lengths);
    return status;
}

static tutti_status tcp_list_keys(tutti_store *store, char ***keys, size_t *count) {
    call call;
    tutti_status status = call_begin_short(&call, store, "list_keys");
    return status == TUTTI_OK ? call_end(&call, list_locked(&call, keys, count)) : status;
}

/* ---- opening and closing ---- */

static tutti_status connect_store(tcp_store *tcp, int64_t timeout_ns) {
    if (tcp->own.count > 0)
        return tu_store_connect_once(&tcp->own, &tcp->secret, tu_deadline(timeout_ns), &tcp->connection);
    return tu_store_connect(&tcp->address, &tcp->secret, timeout_ns, &tcp->connection);
}

/* After the server dropped this client: one try, for a server that is still there answers at once. */
static tutti_status reconnect(call *call) {
    tcp_store *tcp = call->tcp;
    tu_address_list list = tcp->own;
    tutti_status status = list.count > 0 ? TUTTI_OK : tu_address_resolve(&tcp->address, call->reply_deadline, &list);
    return status == TUTTI_OK ? tu_store_connect_once(&list, &tcp->secret, call->reply_deadline, &tcp->connection)
                              : status;
}

static void tcp_destroy(tutti_store *store) {
    tcp_store *tcp = as_tcp(store);
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

static int tcp_port(const tutti_store *store) {
    const tcp_store *tcp = as_tcp(store);
    return tu_address_is_unix(&tcp->address) ? -1 : tcp->address.port;
}

static const char *tcp_address(const tutti_store *store) {
    return as_tcp(store)->text;
}

static int tcp_server(const tutti_store *store) {
    return as_tcp(store)->connection.server;
}

static tutti_status tcp_clone(tutti_store *store, tutti_store **clone);

static const tu_store_kind tcp_kind = {
    .name = "tcp",
    .extended_api = true,
    .set = tcp_set,
    .get = tcp_get,
    .add = tcp_add,
    .compare_set = tcp_compare_set,
    .wait = tcp_wait,
    .check = tcp_check,
    .remove = tcp_delete,
    .num_keys = tcp_num_keys,
    .list_keys = tcp_list_keys,
    .clone = tcp_clone,
    .destroy = tcp_destroy,
    .append = tcp_append,
    .multi_get = tcp_multi_get,
    .multi_set = tcp_multi_set,
    .barrier = tcp_barrier,
    .queue_push = tcp_queue_push,
    .queue_pop = tcp_queue_pop,
    .queue_length = tcp_queue_length,
    .port = tcp_port,
    .address = tcp_address,
    .server = tcp_server,
};

static tutti_status tcp_make(int64_t timeout_ns, tcp_store **result) {
    tcp_store *tcp = calloc(1, sizeof *tcp);
    if (tcp == NULL)
        return tu_error_memory("a tcp store", sizeof *tcp);
    tutti_status status = tu_auth_nonce(tcp->nobody);
    if (status != TUTTI_OK) {
        free(tcp);
        return status;
    }
    tu_store_init(&tcp->store, &tcp_kind, timeout_ns);
    pthread_mutex_init(&tcp->lock, NULL);
    tcp->connection.descriptor = -1;
    *result = tcp;
    return TUTTI_OK;
}

static tutti_status tcp_clone(tutti_store *store, tutti_store **clone) {
    tcp_store *tcp = as_tcp(store), *fresh;
    tutti_status status = tcp_make(tutti_store_timeout(store), &fresh);
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

tutti_status tu_tcp_adopt(int descriptor, int64_t timeout_ns, tutti_store **store) {
    tcp_store *tcp;
    tutti_status status = tcp_make(timeout_ns, &tcp);
    if (status != TUTTI_OK)
        return status;
    snprintf(tcp->text, sizeof tcp->text, "descriptor %d", descriptor);
    tcp->client = true;
    tu_connection_init(&tcp->connection, descriptor);
    *store = &tcp->store;
    return TUTTI_OK;
}

/* ---- counting the workers ---- */

static tutti_status add_worker(tcp_store *tcp, int64_t amount, int64_t timeout_ns, int64_t *joined) {
    call call;
    tutti_status status = call_begin(&call, &tcp->store, "open", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    return call_end(&call, add_locked(&call, "init/", 5, amount, joined));
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
static tutti_status count_workers(tcp_store *tcp, const tutti_tcp_store_options *options, int64_t timeout_ns) {
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
        rest(pause, deadline);
        pause = pause * 2 < 10 * TU_MILLISECOND ? pause * 2 : 10 * TU_MILLISECOND;
        status = add_worker(tcp, 0, timeout_ns, &joined);
    }
    return status;
}

/* ---- opening ---- */

/* "tcp://host:port"; brackets for a number of IPv6; this host's name when every address is meant. */
static void write_text(tcp_store *tcp) {
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

static tutti_status check_secret(const tcp_store *tcp) {
    if (tcp->secret.bytes > 0 && !tu_auth_available() && !tu_address_is_unix(&tcp->address))
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "this build of Tutti has no libsodium, so a store over TCP cannot prove a secret; use "
                        "a Unix socket on one host, build with libsodium, or leave the secret out and say "
                        "that the network is trusted (trust_network, TUTTI_TRUST_NETWORK=1)");
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
static tutti_status prepare(tcp_store *tcp, const char *host, int port, const tutti_tcp_store_options *options) {
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
    tcp_store *tcp;
    status = tcp_make(full.timeout_ns, &tcp);
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
