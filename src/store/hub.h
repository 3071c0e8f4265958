/* SPDX-License-Identifier: Apache-2.0
 *
 * The server's mind, without sockets: what each client has sent goes in, what it is to be sent comes out. One thread
 * owns a hub and its sessions.
 */
#ifndef TU_STORE_HUB_H
#define TU_STORE_HUB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "store/auth.h"
#include "store/table.h"
#include "store/wire.h"

typedef enum tu_session_state {
    TU_SESSION_NEW,        /* nothing said yet */
    TU_SESSION_CHALLENGED, /* said hello; owes the proof */
    TU_SESSION_PROVEN,     /* knows the secret; owes VALIDATE */
    TU_SESSION_OPEN,       /* is served */
    TU_SESSION_REFUSED,    /* gets its refusal; what it still says is ignored */
    TU_SESSION_ENDED       /* to be closed now; `why` says why */
} tu_session_state;

typedef struct tu_session tu_session;

/* One session that waits for one key. */
struct tu_waiter {
    tu_waiter *previous, *next; /* in the entry's list */
    tu_entry *entry;            /* NULL once the key has come */
    tu_session *session;
    bool barrier;
};

struct tu_session {
    tu_session_state state;
    tu_scan scan; /* of the command at the front of the input */
    tu_buffer output;
    size_t sent; /* of output */
    tu_waiter *waiters;
    size_t waiter_count;
    size_t missing; /* waiters whose key has not come */
    uint8_t client_nonce[TU_AUTH_BYTES], server_nonce[TU_AUTH_BYTES];
    bool owes_pop; /* was woken because something was queued, and has not come to take it */
    bool dirty;    /* in the hub's list */
    tu_session *next_dirty;
    char why[160];
};

typedef struct tu_hub {
    uint64_t commands; /* that asked for several values */
    tu_table table;
    const tu_secret *secret; /* with bytes 0: none is asked for */
    tu_session *dirty;       /* sessions that have something new to send, or have ended */
} tu_hub;

/* More than this still to be sent, and a session's input waits. */
#define TU_OUTPUT_PAUSE ((size_t)1 << 20)

/* Does the whole commands at the front of `data`; returns how many bytes that was. What is left is the beginning of a
 * command, to be given again with more behind it, or the session is ENDED, or it must first be sent what it has asked
 * for (tu_session_paused). */
size_t tu_hub_input(tu_hub *hub, tu_session *session, const uint8_t *data, size_t bytes);

static inline size_t tu_session_pending(const tu_session *session) {
    return session->output.used - session->sent;
}
static inline bool tu_session_paused(const tu_session *session) {
    return tu_session_pending(session) > TU_OUTPUT_PAUSE;
}

/* The next session in the dirty list, taken off; NULL at its end. */
tu_session *tu_hub_next_dirty(tu_hub *hub);

/* Forgets the session: its waits, its buffers. */
void tu_hub_leave(tu_hub *hub, tu_session *session);
void tu_hub_clear(tu_hub *hub);

#endif
