/* SPDX-License-Identifier: Apache-2.0
 *
 * The tcp store: a client of a server that may be ours, in this process or another, or PyTorch's. The operations.
 */
#include "store/tcp_client.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/error.h"

#define DISTURBED_TIME TU_SECOND         /* for the server's word that it took a wait back */
#define CHUNK_BYTES ((size_t)(64 << 20)) /* of values in one command; longer lists are cut */

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
    tu_tcp_call call;
    tutti_status status = check_value(key, bytes);
    if (status == TUTTI_OK)
        status = tu_tcp_begin_short(&call, store, operation);
    if (status != TUTTI_OK)
        return status;
    tu_buffer *out = &call.tcp->out;
    put_key(out, command, key);
    tu_put_u64(out, bytes);
    return tu_tcp_end(&call, tu_tcp_send_with(&call, value, bytes));
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
    tu_tcp_call call;
    tutti_status status = TUTTI_OK;
    for (size_t i = 0; i < count && status == TUTTI_OK; i++)
        status = check_value(keys[i], bytes[i]);
    if (status == TUTTI_OK)
        status = tu_tcp_begin_short(&call, store, "multi_set");
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
        status = tu_tcp_send(&call);
    }
    return tu_tcp_end(&call, status);
}

/* ---- waiting ---- */

/* Takes back a wait that took too long. The server may have answered at the same moment: then its 0 comes first. */
static tutti_status cancel(tu_tcp_call *call) {
    uint8_t reply = 0;
    tu_put_u8(&call->tcp->out, TU_COMMAND_CANCEL_WAIT);
    tutti_status status = tu_tcp_send(call);
    for (int i = 0; i < 2 && status == TUTTI_OK && reply == 0; i++)
        status = tu_tcp_receive(call, &reply, sizeof reply);
    if (status == TUTTI_OK && reply != 1)
        status = tu_tcp_unexpected(call, reply);
    return status;
}

/* The same for a wait that a watch ended, with its error. After a strict watch, or a server that does not answer within
 * a moment, the connection is closed. */
static tutti_status cancel_disturbed(tu_tcp_call *call, tutti_status status) {
    tu_watch *before = tu_watch_rest();
    if (tu_watched())
        return tu_tcp_broken(call, status);
    tutti_error_copy error;
    tu_error_save(&error);
    call->reply_time = DISTURBED_TIME;
    (void)cancel(call);
    tu_watch_thread_back(before);
    return tu_error_restore(&error);
}

/* Sends the WAIT or BARRIER that is in the buffer and waits for its 0. *late: it was cancelled at the deadline; the
 * caller writes the message. */
static tutti_status wait_for_zero(tu_tcp_call *call, bool *late) {
    uint8_t reply;
    *late = false;
    tutti_status status = tu_tcp_send(call);
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
        return tu_tcp_broken(call, status);
    return reply == 0 ? TUTTI_OK : tu_tcp_unexpected(call, reply);
}

static tutti_status wait_locked(tu_tcp_call *call, const char *const *keys, size_t count) {
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
    tu_tcp_call call;
    tutti_status status = tu_tcp_begin(&call, store, "wait", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    return tu_tcp_end(&call, wait_locked(&call, keys, count));
}

static tutti_status tcp_barrier(tutti_store *store, const char *key, int64_t count, int64_t timeout_ns) {
    tu_tcp_call call;
    bool late;
    tutti_status status = tu_tcp_begin(&call, store, "barrier", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    put_key(&call.tcp->out, TU_COMMAND_BARRIER, key);
    tu_put_u64(&call.tcp->out, (uint64_t)count);
    status = wait_for_zero(&call, &late);
    if (status == TUTTI_OK && late)
        status = tu_error(TUTTI_ERROR_TIMEOUT,
                          "barrier timeout after %" PRId64 "ms, key: /%s (waiting for %" PRId64 " callers)",
                          timeout_ns / TU_MILLISECOND, key, count);
    return tu_tcp_end(&call, status);
}

/* ---- commands with a reply ---- */

/* Reads a key without changing anything, in one round trip that every server understands: COMPARE_SET with an
 * expectation that no value equals gives what is there, and the expectation itself when nothing is. (GET on a missing
 * key gives "" or ends the connection, and between a WAIT and a GET the key may go.) */
static tutti_status read_locked(tu_tcp_call *call, const char *key, void **value, size_t *bytes, bool *missing) {
    const uint8_t *nobody = call->tcp->nobody;
    tu_buffer *out = &call->tcp->out;
    put_key(out, TU_COMMAND_COMPARE_SET, key);
    tu_put_text(out, nobody, TU_AUTH_BYTES);
    tu_put_text(out, nobody, TU_AUTH_BYTES);
    tutti_status status = tu_tcp_send(call);
    if (status == TUTTI_OK)
        status = tu_tcp_receive_value(call, value, bytes);
    if (status != TUTTI_OK)
        return status;
    *missing = *bytes == TU_AUTH_BYTES && memcmp(*value, nobody, TU_AUTH_BYTES) == 0;
    if (*missing)
        free(*value);
    return TUTTI_OK;
}

static tutti_status tcp_get(tutti_store *store, const char *key, int64_t timeout_ns, void **value, size_t *bytes) {
    tu_tcp_call call;
    tutti_status status = tu_tcp_begin(&call, store, "get", timeout_ns);
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
    return tu_tcp_end(&call, status);
}

static tutti_status multi_get_locked(tu_tcp_call *call, const char *const *keys, size_t count, void **values,
                                     size_t *bytes) {
    tutti_status status = wait_locked(call, keys, count);
    size_t got = 0;
    for (size_t asked = 0; asked < count && status == TUTTI_OK;) {
        size_t chunk = chunk_of(count - asked);
        put_keys(&call->tcp->out, TU_COMMAND_MULTI_GET, keys + asked, chunk);
        asked += chunk;
        status = tu_tcp_send(call);
        for (; status == TUTTI_OK && got < asked; got += status == TUTTI_OK)
            status = tu_tcp_receive_value(call, &values[got], &bytes[got]);
    }
    if (status != TUTTI_OK) {
        while (got-- > 0)
            free(values[got]);
    }
    return status;
}

static tutti_status tcp_multi_get(tutti_store *store, const char *const *keys, size_t count, int64_t timeout_ns,
                                  void **values, size_t *bytes) {
    tu_tcp_call call;
    tutti_status status = tu_tcp_begin(&call, store, "multi_get", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    return tu_tcp_end(&call, multi_get_locked(&call, keys, count, values, bytes));
}

/* ADD with the key as it goes over the wire. */
tutti_status tu_tcp_add_locked(tu_tcp_call *call, const void *key, size_t key_bytes, int64_t amount, int64_t *sum) {
    tu_buffer *out = &call->tcp->out;
    tu_put_u8(out, TU_COMMAND_ADD);
    tu_put_text(out, key, key_bytes);
    tu_put_u64(out, (uint64_t)amount);
    tutti_status status = tu_tcp_send(call);
    return status == TUTTI_OK ? tu_tcp_receive_i64(call, sum) : status;
}

/* The protocol has no word for "not a number": the server drops the client instead. So a connection that is lost here,
 * to a server that still takes a new one, means just that. */
static tutti_status tcp_add(tutti_store *store, const char *key, int64_t amount, int64_t *sum) {
    tu_tcp_call call;
    char name[TU_KEY_LIMIT + 1];
    tutti_status status = tu_tcp_begin_short(&call, store, "add");
    if (status != TUTTI_OK)
        return status;
    name[0] = '/';
    size_t length = strlen(key);
    memcpy(name + 1, key, length);
    int64_t result;
    status = tu_tcp_add_locked(&call, name, length + 1, amount, &result);
    if (status == TUTTI_ERROR_NETWORK) {
        tutti_error_copy lost;
        tu_error_save(&lost);
        status = tu_tcp_reconnect(&call) == TUTTI_OK ? tu_store_not_a_number(key) : tu_error_restore(&lost);
    }
    if (status == TUTTI_OK)
        *sum = result;
    return tu_tcp_end(&call, status);
}

static tutti_status tcp_compare_set(tutti_store *store, const char *key, const void *expected, size_t expected_bytes,
                                    const void *desired, size_t desired_bytes, void **value, size_t *bytes) {
    tu_tcp_call call;
    tutti_status status = check_value(key, expected_bytes);
    if (status == TUTTI_OK)
        status = check_value(key, desired_bytes);
    if (status == TUTTI_OK)
        status = tu_tcp_begin_short(&call, store, "compare_set");
    if (status != TUTTI_OK)
        return status;
    put_key(&call.tcp->out, TU_COMMAND_COMPARE_SET, key);
    tu_put_text(&call.tcp->out, expected, expected_bytes);
    tu_put_text(&call.tcp->out, desired, desired_bytes);
    status = tu_tcp_send(&call);
    if (status == TUTTI_OK)
        status = tu_tcp_receive_value(&call, value, bytes);
    return tu_tcp_end(&call, status);
}

static tutti_status check_locked(tu_tcp_call *call, const char *const *keys, size_t count, bool *present) {
    bool all = true;
    for (size_t done = 0; done < count && all;) {
        uint8_t reply;
        size_t chunk = chunk_of(count - done);
        put_keys(&call->tcp->out, TU_COMMAND_CHECK, keys + done, chunk);
        tutti_status status = tu_tcp_send(call);
        if (status == TUTTI_OK)
            status = tu_tcp_receive(call, &reply, sizeof reply);
        if (status != TUTTI_OK)
            return status;
        if (reply > 1)
            return tu_tcp_unexpected(call, reply);
        all = reply == 0;
        done += chunk;
    }
    *present = all;
    return TUTTI_OK;
}

static tutti_status tcp_check(tutti_store *store, const char *const *keys, size_t count, bool *present) {
    tu_tcp_call call;
    tutti_status status = tu_tcp_begin_short(&call, store, "check");
    if (status != TUTTI_OK)
        return status;
    return tu_tcp_end(&call, check_locked(&call, keys, count, present));
}

/* Commands of at most one key whose reply is a number. */
static tutti_status ask_number(tutti_store *store, const char *operation, tu_command command, const char *key,
                               int64_t *number) {
    tu_tcp_call call;
    tutti_status status = tu_tcp_begin_short(&call, store, operation);
    if (status != TUTTI_OK)
        return status;
    tu_put_u8(&call.tcp->out, (uint8_t)command);
    if (key != NULL)
        tu_put_key(&call.tcp->out, key);
    status = tu_tcp_send(&call);
    int64_t reply;
    if (status == TUTTI_OK)
        status = tu_tcp_receive_i64(&call, &reply);
    if (status == TUTTI_OK && reply < 0)
        status = tu_tcp_unexpected(&call, reply);
    if (status == TUTTI_OK)
        *number = reply;
    return tu_tcp_end(&call, status);
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
static tutti_status pop_locked(tu_tcp_call *call, const char *key, void **value, size_t *bytes) {
    int64_t length;
    put_key(&call->tcp->out, TU_COMMAND_QUEUE_POP, key);
    tutti_status status = tu_tcp_send(call);
    if (status == TUTTI_OK)
        status = tu_tcp_receive_i64(call, &length);
    if (status != TUTTI_OK)
        return status;
    if (length < 0)
        return tu_tcp_unexpected(call, length);
    return length > 0 ? tu_tcp_receive_value(call, value, bytes) : TUTTI_ERROR_EMPTY;
}

void tu_tcp_rest(int64_t pause, int64_t deadline) {
    int64_t left = tu_deadline_left(deadline);
    struct timespec time = { .tv_nsec = pause < left ? pause : left };
    clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL);
}

/* Between the wait and the pop another client may take it: then it is waited for again. A value under the same key ends
 * the wait too, with nothing in the queue; the pauses keep this from going round at full speed. */
static tutti_status pop_or_wait(tu_tcp_call *call, const char *key, void **value, size_t *bytes) {
    for (int64_t pause = 0;; pause = pause < 8 * TU_MILLISECOND ? pause * 2 + TU_MILLISECOND / 8 : pause) {
        tutti_status status = pop_locked(call, key, value, bytes);
        if (status != TUTTI_ERROR_EMPTY)
            return status;
        if (pause > 0)
            tu_tcp_rest(pause, call->deadline);
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
    tu_tcp_call call;
    tutti_status status = tu_tcp_begin(&call, store, "queue_pop", timeout_ns);
    if (status != TUTTI_OK)
        return status;
    status = block ? pop_or_wait(&call, key, value, bytes) : pop_locked(&call, key, value, bytes);
    if (status == TUTTI_ERROR_EMPTY)
        status = tu_store_queue_empty(key);
    return tu_tcp_end(&call, status);
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

static tutti_status list_locked(tu_tcp_call *call, char ***keys, size_t *count) {
    int64_t announced;
    tu_put_u8(&call->tcp->out, TU_COMMAND_LIST_KEYS);
    tutti_status status = tu_tcp_send(call);
    if (status == TUTTI_OK)
        status = tu_tcp_receive_i64(call, &announced);
    if (status != TUTTI_OK)
        return status;
    if (announced < 0)
        return tu_tcp_unexpected(call, announced);
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
                status = tu_tcp_broken(call, tu_error_memory("a list of keys", room * sizeof *names));
                break;
            }
        }
        status = tu_tcp_receive_value(call, &names[got], &lengths[got]);
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
    tu_tcp_call call;
    tutti_status status = tu_tcp_begin_short(&call, store, "list_keys");
    return status == TUTTI_OK ? tu_tcp_end(&call, list_locked(&call, keys, count)) : status;
}

/* ---- the kind ---- */

const tu_store_kind tu_tcp_kind = {
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
    .clone = tu_tcp_clone,
    .move = tu_tcp_move,
    .destroy = tu_tcp_destroy,
    .append = tcp_append,
    .multi_get = tcp_multi_get,
    .multi_set = tcp_multi_set,
    .barrier = tcp_barrier,
    .queue_push = tcp_queue_push,
    .queue_pop = tcp_queue_pop,
    .queue_length = tcp_queue_length,
    .port = tu_tcp_port,
    .address = tu_tcp_address,
    .server = tu_tcp_server,
};
