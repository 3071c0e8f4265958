/* SPDX-License-Identifier: Apache-2.0
 *
 * What clients may send to a store's server: any bytes, in any pieces, from several clients at once.
 * rooms: base store
 *
 * The first byte chooses: bit 0 a secret, bit 1 sessions that are admitted already. Then pieces: one byte for the
 * session and the length's high bits, one for its low bits, and the bytes.
 */
#include "fuzz.h"
#include "store/hub.h"

enum {
    SESSIONS = 3
};

typedef struct client {
    tu_session session;
    tu_buffer input;
} client;

static void leave(tu_hub *hub, client *client, bool admitted) {
    tu_hub_leave(hub, &client->session);
    tu_buffer_free(&client->input);
    *client = (struct client){ .session.state = admitted ? TU_SESSION_OPEN : TU_SESSION_NEW };
}

/* As the server does: what was understood goes, the rest stays for more. */
static void feed(tu_hub *hub, client *client, const uint8_t *data, size_t bytes, bool admitted) {
    tu_put(&client->input, data, bytes);
    for (bool again = true; again;) {
        size_t done = tu_hub_input(hub, &client->session, client->input.data, client->input.used);
        FUZZ_CHECK(done <= client->input.used);
        again = tu_session_paused(&client->session);
        if (done > 0)
            memmove(client->input.data, client->input.data + done, client->input.used - done);
        client->input.used -= done;
        for (tu_session *dirty; (dirty = tu_hub_next_dirty(hub)) != NULL;) {
            dirty->sent = 0;
            tu_buffer_reset(&dirty->output); /* all of it is sent */
        }
    }
    if (client->session.state == TU_SESSION_ENDED)
        leave(hub, client, admitted);
}

static void fuzz_one(const uint8_t *data, size_t bytes) {
    if (bytes == 0)
        return;
    bool admitted = data[0] & 2;
    tu_secret secret = { .bytes = data[0] & 1 ? 32 : 0 };
    tu_hub hub = { .secret = &secret };
    client clients[SESSIONS] = { 0 };
    for (int i = 0; i < SESSIONS; i++)
        leave(&hub, &clients[i], admitted);
    for (size_t at = 1; at + 2 <= bytes;) {
        client *client = &clients[data[at] % SESSIONS];
        size_t length = (size_t)(data[at] / SESSIONS) * 256 + data[at + 1];
        at += 2;
        if (length > bytes - at)
            length = bytes - at;
        feed(&hub, client, data + at, length, admitted);
        at += length;
    }
    for (int i = 0; i < SESSIONS; i++)
        leave(&hub, &clients[i], admitted);
    FUZZ_CHECK(hub.dirty == NULL);
    size_t bucket = 0;
    for (tu_entry *entry = NULL; (entry = tu_table_next(&hub.table, &bucket, entry)) != NULL;) {
        FUZZ_CHECK(tu_entry_ready(entry)); /* nothing is kept for those who waited and left */
        FUZZ_CHECK(entry->waiters.first == NULL);
    }
    tu_hub_clear(&hub);
}

FUZZ_TARGET(store_server)
