/* SPDX-License-Identifier: Apache-2.0
 *
 * The commands of the store's protocol on one table. An error of a client ends that client's session and no other.
 */
#include "store/hub.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"

/* ---- sessions ---- */

static void mark_dirty(tu_hub *hub, tu_session *session) {
    if (session->dirty)
        return;
    session->dirty = true;
    session->next_dirty = hub->dirty;
    hub->dirty = session;
}

tu_session *tu_hub_next_dirty(tu_hub *hub) {
    tu_session *session = hub->dirty;
    if (session != NULL) {
        hub->dirty = session->next_dirty;
        session->dirty = false;
    }
    return session;
}

TUTTI_PRINTF(3, 4) static void end(tu_hub *hub, tu_session *session, const char *format, ...) {
    if (session->state == TU_SESSION_ENDED)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(session->why, sizeof session->why, format, arguments);
    va_end(arguments);
    session->state = TU_SESSION_ENDED;
    mark_dirty(hub, session);
}

static void end_without_memory(tu_hub *hub, tu_session *session) {
    end(hub, session, "out of memory for what it asked for");
}

/* Tells a client of ours in words why it is not served. To others it is a wrong answer to their PING. */
TUTTI_PRINTF(3, 4) static void refuse(tu_hub *hub, tu_session *session, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(session->why, sizeof session->why, format, arguments);
    va_end(arguments);
    if (length >= (int)sizeof session->why)
        length = (int)sizeof session->why - 1;
    tu_put_u32(&session->output, TU_REFUSAL_MAGIC);
    tu_put_text(&session->output, session->why, (size_t)length);
    session->state = TU_SESSION_REFUSED;
    mark_dirty(hub, session);
}

/* ---- waiting ---- */

static void unlink_waiter(tu_waiter *waiter) {
    tu_waiter_list *list = &waiter->entry->waiters;
    if (waiter->previous != NULL)
        waiter->previous->next = waiter->next;
    else
        list->first = waiter->next;
    if (waiter->next != NULL)
        waiter->next->previous = waiter->previous;
    else
        list->last = waiter->previous;
    waiter->entry = NULL;
}

static void link_waiter(tu_waiter *waiter, tu_session *session, tu_entry *entry, bool barrier) {
    *waiter = (tu_waiter){ .previous = entry->waiters.last, .entry = entry, .session = session, .barrier = barrier };
    if (entry->waiters.last != NULL)
        entry->waiters.last->next = waiter;
    else
        entry->waiters.first = waiter;
    entry->waiters.last = waiter;
}

/* Ends the session's wait, if it has one, whatever has come. */
static void stop_waiting(tu_hub *hub, tu_session *session) {
    for (size_t i = 0; i < session->waiter_count; i++) {
        tu_entry *entry = session->waiters[i].entry;
        if (entry != NULL) {
            unlink_waiter(&session->waiters[i]);
            tu_table_tidy(&hub->table, entry);
        }
    }
    free(session->waiters);
    session->waiters = NULL;
    session->waiter_count = session->missing = 0;
}

/* The waiter's key has come; with the last one its session is told. */
static void arrive(tu_hub *hub, tu_waiter *waiter) {
    tu_session *session = waiter->session;
    unlink_waiter(waiter);
    if (--session->missing > 0)
        return;
    stop_waiting(hub, session);
    tu_put_u8(&session->output, 0);
    mark_dirty(hub, session);
}

static void wake(tu_hub *hub, tu_entry *entry, bool barrier) {
    for (tu_waiter *waiter = entry->waiters.first, *next; waiter != NULL; waiter = next) {
        next = waiter->next; /* stays: a session's waiters go only when the last of them has come */
        if (waiter->barrier == barrier)
            arrive(hub, waiter);
    }
}

/* Something was queued: one waiter may come and take it. */
static void wake_one(tu_hub *hub, tu_entry *entry) {
    for (tu_waiter *waiter = entry->waiters.first; waiter != NULL; waiter = waiter->next) {
        if (!waiter->barrier) {
            waiter->session->owes_pop = true;
            arrive(hub, waiter);
            return;
        }
    }
}

/* A session that was woken for a queue turns to something else without having taken anything: another may. */
static void pass_on(tu_hub *hub, tu_session *session) {
    if (!session->owes_pop)
        return;
    session->owes_pop = false;
    size_t bucket = 0;
    for (tu_entry *entry = NULL; (entry = tu_table_next(&hub->table, &bucket, entry)) != NULL;) {
        if (entry->queued > 0)
            wake_one(hub, entry);
    }
}

/* ---- the commands; `at` stands behind the command's byte ---- */

static void do_set(tu_hub *hub, tu_session *session, const uint8_t *at) {
    tu_text key = tu_read_text(&at), value = tu_read_text(&at);
    tu_entry *entry = tu_table_make(&hub->table, key.data, key.bytes);
    if (entry == NULL || !tu_entry_set(&hub->table, entry, value.data, value.bytes)) {
        if (entry != NULL)
            tu_table_tidy(&hub->table, entry);
        end_without_memory(hub, session);
        return;
    }
    wake(hub, entry, false);
}

static void do_append(tu_hub *hub, tu_session *session, const uint8_t *at) {
    tu_text key = tu_read_text(&at), value = tu_read_text(&at);
    tu_entry *entry = tu_table_make(&hub->table, key.data, key.bytes);
    if (entry == NULL || entry->bytes + value.bytes > TU_FRAME_LIMIT ||
        !tu_entry_append(&hub->table, entry, value.data, value.bytes)) {
        if (entry != NULL)
            tu_table_tidy(&hub->table, entry);
        end_without_memory(hub, session);
        return;
    }
    wake(hub, entry, false);
}

static void do_compare_set(tu_hub *hub, tu_session *session, const uint8_t *at) {
    tu_text key = tu_read_text(&at), expected = tu_read_text(&at), desired = tu_read_text(&at);
    tu_entry *entry = tu_table_find(&hub->table, key.data, key.bytes);
    bool present = entry != NULL && entry->present;
    if (present ? !tu_entry_equals(entry, expected.data, expected.bytes) : expected.bytes > 0) {
        if (present)
            tu_put_text(&session->output, entry->value, entry->bytes);
        else
            tu_put_text(&session->output, expected.data, expected.bytes);
        return;
    }
    entry = tu_table_make(&hub->table, key.data, key.bytes);
    if (entry == NULL || !tu_entry_set(&hub->table, entry, desired.data, desired.bytes)) {
        if (entry != NULL)
            tu_table_tidy(&hub->table, entry);
        end_without_memory(hub, session);
        return;
    }
    tu_put_text(&session->output, desired.data, desired.bytes);
    wake(hub, entry, false);
}

static void put_value(tu_hub *hub, tu_session *session, tu_text key) {
    const tu_entry *entry = tu_table_find(&hub->table, key.data, key.bytes);
    if (entry != NULL && entry->present)
        tu_put_text(&session->output, entry->value, entry->bytes);
    else
        tu_put_u64(&session->output, 0);
}

static void do_get(tu_hub *hub, tu_session *session, const uint8_t *at) {
    put_value(hub, session, tu_read_text(&at));
}

static void do_multi_get(tu_hub *hub, tu_session *session, const uint8_t *at) {
    uint64_t count = tu_read_u64(&at), total = 0;
    const uint8_t *again = at;
    bool repeated = false; /* a short command that names one large value many times would cost any amount of memory */
    hub->commands++;
    for (uint64_t i = 0; i < count; i++) {
        tu_text key = tu_read_text(&at);
        tu_entry *entry = tu_table_find(&hub->table, key.data, key.bytes);
        total += sizeof(uint64_t) + (entry != NULL ? entry->bytes : 0);
        repeated = repeated || (entry != NULL && entry->asked == hub->commands);
        if (entry != NULL)
            entry->asked = hub->commands;
    }
    if (total > (repeated ? TU_REPEATED_LIMIT : TU_FRAME_LIMIT)) {
        end(hub, session, "it asked for %" PRIu64 " bytes in one reply", total);
        return;
    }
    for (uint64_t i = 0; i < count; i++)
        put_value(hub, session, tu_read_text(&again));
}

static void do_multi_set(tu_hub *hub, tu_session *session, const uint8_t *at) {
    uint64_t count = tu_read_u64(&at);
    for (uint64_t i = 0; i < count && session->state == TU_SESSION_OPEN; i++) {
        const uint8_t *pair = at;
        tu_read_text(&at);
        tu_read_text(&at);
        do_set(hub, session, pair);
    }
}

static void do_add(tu_hub *hub, tu_session *session, const uint8_t *at) {
    tu_text key = tu_read_text(&at);
    int64_t amount = (int64_t)tu_read_u64(&at), sum;
    tu_entry *entry = tu_table_make(&hub->table, key.data, key.bytes);
    tu_add_result result = entry != NULL ? tu_entry_add(&hub->table, entry, amount, &sum) : TU_ADD_NO_MEMORY;
    if (result == TU_ADD_DONE) {
        tu_put_u64(&session->output, (uint64_t)sum);
        wake(hub, entry, false);
        return;
    }
    if (entry != NULL)
        tu_table_tidy(&hub->table, entry);
    if (result == TU_ADD_NO_MEMORY)
        end_without_memory(hub, session);
    else
        end(hub, session, "it added to %.*s, which is not a decimal integer that has room",
            (int)(key.bytes < 80 ? key.bytes : 80), (const char *)key.data);
}

static void do_check(tu_hub *hub, tu_session *session, const uint8_t *at) {
    uint64_t count = tu_read_u64(&at);
    bool ready = true;
    for (uint64_t i = 0; i < count && ready; i++) {
        tu_text key = tu_read_text(&at);
        ready = tu_entry_ready(tu_table_find(&hub->table, key.data, key.bytes));
    }
    tu_put_u8(&session->output, ready ? 0 : 1);
}

static bool may_wait(tu_hub *hub, tu_session *session) {
    pass_on(hub, session);
    if (session->waiters != NULL)
        end(hub, session, "it waits twice at once");
    return session->waiters == NULL;
}

static void do_wait(tu_hub *hub, tu_session *session, const uint8_t *at) {
    if (!may_wait(hub, session))
        return;
    uint64_t count = tu_read_u64(&at);
    const uint8_t *again = at;
    size_t missing = 0;
    for (uint64_t i = 0; i < count; i++) {
        tu_text key = tu_read_text(&at);
        missing += !tu_entry_ready(tu_table_find(&hub->table, key.data, key.bytes));
    }
    if (missing == 0) {
        tu_put_u8(&session->output, 0);
        return;
    }
    session->waiters = calloc(missing, sizeof *session->waiters);
    for (uint64_t i = 0; session->waiters != NULL && i < count; i++) {
        tu_text key = tu_read_text(&again);
        tu_entry *entry = tu_table_make(&hub->table, key.data, key.bytes);
        if (entry == NULL) {
            stop_waiting(hub, session);
        } else if (!tu_entry_ready(entry)) {
            link_waiter(&session->waiters[session->waiter_count++], session, entry, false);
            session->missing++;
        }
    }
    if (session->waiters == NULL)
        end_without_memory(hub, session);
}

/* Counts its callers as text under the key, as the others' servers do, so that the key passes at once for ever
 * after. */
static void do_barrier(tu_hub *hub, tu_session *session, const uint8_t *at) {
    if (!may_wait(hub, session))
        return;
    tu_text key = tu_read_text(&at);
    int64_t count = (int64_t)tu_read_u64(&at), came;
    tu_entry *entry = tu_table_make(&hub->table, key.data, key.bytes);
    tu_waiter *waiter = calloc(1, sizeof *waiter);
    if (entry == NULL || waiter == NULL) {
        end_without_memory(hub, session);
        goto free_waiter;
    }
    tu_add_result result = tu_entry_add(&hub->table, entry, 1, &came);
    if (result != TU_ADD_DONE) {
        end(hub, session, "its barrier is at a key whose value is not a decimal integer");
        goto free_waiter;
    }
    wake(hub, entry, false);
    if (came >= count) {
        tu_put_u8(&session->output, 0);
        wake(hub, entry, true);
        goto free_waiter;
    }
    session->waiters = waiter;
    session->waiter_count = session->missing = 1;
    link_waiter(waiter, session, entry, true);
    return;
free_waiter:
    free(waiter);
    if (entry != NULL)
        tu_table_tidy(&hub->table, entry);
}

static void do_cancel_wait(tu_hub *hub, tu_session *session) {
    stop_waiting(hub, session);
    pass_on(hub, session);
    tu_put_u8(&session->output, 1);
}

static void do_delete(tu_hub *hub, tu_session *session, const uint8_t *at) {
    tu_text key = tu_read_text(&at);
    tu_entry *entry = tu_table_find(&hub->table, key.data, key.bytes);
    bool existed = entry != NULL && entry->present;
    if (existed) {
        tu_entry_unset(&hub->table, entry);
        tu_table_tidy(&hub->table, entry);
    }
    tu_put_u64(&session->output, existed);
}

static void do_queue_push(tu_hub *hub, tu_session *session, const uint8_t *at) {
    tu_text key = tu_read_text(&at), value = tu_read_text(&at);
    tu_entry *entry = tu_table_make(&hub->table, key.data, key.bytes);
    if (entry == NULL || !tu_entry_push(entry, value.data, value.bytes)) {
        if (entry != NULL)
            tu_table_tidy(&hub->table, entry);
        end_without_memory(hub, session);
        return;
    }
    wake_one(hub, entry);
}

static void do_queue_pop(tu_hub *hub, tu_session *session, const uint8_t *at) {
    tu_text key = tu_read_text(&at);
    tu_entry *entry = tu_table_find(&hub->table, key.data, key.bytes);
    int64_t length = entry != NULL ? entry->queued : 0;
    session->owes_pop = false;
    tu_put_u64(&session->output, (uint64_t)length);
    if (length == 0)
        return;
    tu_queued *first = tu_entry_pop(entry);
    tu_put_text(&session->output, first->data, first->bytes);
    free(first);
    tu_table_tidy(&hub->table, entry);
}

static void do_queue_length(tu_hub *hub, tu_session *session, const uint8_t *at) {
    tu_text key = tu_read_text(&at);
    const tu_entry *entry = tu_table_find(&hub->table, key.data, key.bytes);
    tu_put_u64(&session->output, entry != NULL ? (uint64_t)entry->queued : 0);
}

static void do_list_keys(tu_hub *hub, tu_session *session) {
    tu_put_u64(&session->output, (uint64_t)hub->table.present);
    size_t bucket = 0;
    for (tu_entry *entry = NULL; (entry = tu_table_next(&hub->table, &bucket, entry)) != NULL;) {
        if (entry->present)
            tu_put_text(&session->output, entry->key, entry->key_bytes);
    }
}

/* ---- getting in ---- */

static void do_validate(tu_hub *hub, tu_session *session, const uint8_t *at) {
    uint32_t magic = tu_read_u32(&at);
    if (magic != TU_VALIDATE_MAGIC)
        end(hub, session, "its first word is %#" PRIx32 ", not the protocol's", magic);
    else if (session->state == TU_SESSION_NEW && hub->secret->bytes > 0)
        refuse(hub, session,
               "this store serves only clients that prove the job's secret, and this one did not; "
               "join through the launcher, which hands it out");
    else
        session->state = TU_SESSION_OPEN;
}

static void do_hello(tu_hub *hub, tu_session *session, const uint8_t *at) {
    uint8_t proof[TU_AUTH_BYTES];
    uint32_t magic = tu_read_u32(&at), version = tu_read_u32(&at);
    memcpy(session->client_nonce, at, TU_AUTH_BYTES);
    if (magic != TU_HELLO_MAGIC) {
        end(hub, session, "its hello begins with %#" PRIx32, magic);
    } else if (version != TU_HANDSHAKE_VERSION) {
        refuse(hub, session,
               "the client speaks version %" PRIu32 " of the handshake, this store version %" PRIu32
               "; use the same Tutti on both sides",
               version, TU_HANDSHAKE_VERSION);
    } else if (hub->secret->bytes == 0) {
        refuse(hub, session, "this store has no secret, and the client asks for one; give both sides the same");
    } else if (tu_auth_nonce(session->server_nonce) != TUTTI_OK ||
               tu_auth_proof(hub->secret, TU_AUTH_SERVER, session->client_nonce, session->server_nonce, proof) !=
                   TUTTI_OK) {
        refuse(hub, session, "the store cannot prove its secret: %.100s", tutti_error_message());
    } else {
        tu_put_u32(&session->output, TU_HELLO_MAGIC);
        tu_put(&session->output, session->server_nonce, TU_AUTH_BYTES);
        tu_put(&session->output, proof, TU_AUTH_BYTES);
        session->state = TU_SESSION_CHALLENGED;
    }
}

static void do_proof(tu_hub *hub, tu_session *session, const uint8_t *at) {
    uint8_t proof[TU_AUTH_BYTES];
    if (tu_auth_proof(hub->secret, TU_AUTH_CLIENT, session->client_nonce, session->server_nonce, proof) != TUTTI_OK ||
        !tu_auth_equal(proof, at))
        refuse(hub, session, "the client's proof of the job's secret is wrong");
    else
        session->state = TU_SESSION_PROVEN;
}

/* Before it is served a client may say only what brings it further. */
static bool may_say(tu_session_state state, uint8_t command) {
    switch (state) {
    case TU_SESSION_NEW:
        return command == TU_COMMAND_VALIDATE || command == TU_COMMAND_HELLO;
    case TU_SESSION_CHALLENGED:
        return command == TU_COMMAND_PROOF;
    case TU_SESSION_PROVEN:
        return command == TU_COMMAND_VALIDATE;
    default:
        return command != TU_COMMAND_VALIDATE && command != TU_COMMAND_HELLO && command != TU_COMMAND_PROOF;
    }
}

/* ---- the way in ---- */

static void dispatch(tu_hub *hub, tu_session *session, uint8_t command, const uint8_t *at) {
    switch (command) {
    case TU_COMMAND_VALIDATE:
        do_validate(hub, session, at);
        break;
    case TU_COMMAND_SET:
        do_set(hub, session, at);
        break;
    case TU_COMMAND_COMPARE_SET:
        do_compare_set(hub, session, at);
        break;
    case TU_COMMAND_GET:
        do_get(hub, session, at);
        break;
    case TU_COMMAND_ADD:
        do_add(hub, session, at);
        break;
    case TU_COMMAND_CHECK:
        do_check(hub, session, at);
        break;
    case TU_COMMAND_WAIT:
        do_wait(hub, session, at);
        break;
    case TU_COMMAND_NUM_KEYS:
        tu_put_u64(&session->output, (uint64_t)hub->table.present);
        break;
    case TU_COMMAND_DELETE:
        do_delete(hub, session, at);
        break;
    case TU_COMMAND_APPEND:
        do_append(hub, session, at);
        break;
    case TU_COMMAND_MULTI_GET:
        do_multi_get(hub, session, at);
        break;
    case TU_COMMAND_MULTI_SET:
        do_multi_set(hub, session, at);
        break;
    case TU_COMMAND_CANCEL_WAIT:
        do_cancel_wait(hub, session);
        break;
    case TU_COMMAND_PING:
        tu_put(&session->output, at, sizeof(uint32_t));
        break;
    case TU_COMMAND_QUEUE_PUSH:
        do_queue_push(hub, session, at);
        break;
    case TU_COMMAND_QUEUE_POP:
        do_queue_pop(hub, session, at);
        break;
    case TU_COMMAND_QUEUE_LENGTH:
        do_queue_length(hub, session, at);
        break;
    case TU_COMMAND_LIST_KEYS:
        do_list_keys(hub, session);
        break;
    case TU_COMMAND_BARRIER:
        do_barrier(hub, session, at);
        break;
    case TU_COMMAND_HELLO:
        do_hello(hub, session, at);
        break;
    case TU_COMMAND_PROOF:
        do_proof(hub, session, at);
        break;
    }
}

size_t tu_hub_input(tu_hub *hub, tu_session *session, const uint8_t *data, size_t bytes) {
    size_t done = 0;
    while (done < bytes && !tu_session_paused(session)) {
        if (session->state == TU_SESSION_REFUSED)
            return bytes;
        if (session->state == TU_SESSION_ENDED)
            break;
        const uint8_t *frame = data + done;
        if (!may_say(session->state, frame[0])) {
            end(hub, session, "command %u is not allowed at this moment", frame[0]);
            break;
        }
        tu_scan_result result = tu_frame_scan(frame, bytes - done, &session->scan);
        if (result == TU_SCAN_MORE)
            break;
        if (result == TU_SCAN_BAD) {
            end(hub, session, "%s: %" PRIu64, session->scan.why, session->scan.number);
            break;
        }
        dispatch(hub, session, frame[0], frame + 1);
        done += session->scan.at;
        session->scan = (tu_scan){ 0 };
        if (session->output.failed)
            end_without_memory(hub, session);
    }
    if (tu_session_pending(session) > 0)
        mark_dirty(hub, session);
    return done;
}

void tu_hub_leave(tu_hub *hub, tu_session *session) {
    stop_waiting(hub, session);
    pass_on(hub, session);
    for (tu_session **link = &hub->dirty; session->dirty && *link != NULL; link = &(*link)->next_dirty) {
        if (*link == session) {
            *link = session->next_dirty;
            session->dirty = false;
            break;
        }
    }
    tu_buffer_free(&session->output);
}

void tu_hub_clear(tu_hub *hub) {
    tu_table_clear(&hub->table);
    hub->dirty = NULL;
}
