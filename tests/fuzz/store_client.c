/* SPDX-License-Identifier: Apache-2.0
 *
 * What a server may answer to a store's client: any bytes, and then nothing more.
 * rooms: base store
 *
 * The first byte chooses the operation; the rest is all that the server ever says.
 */
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "fuzz.h"
#include "store/tcp_client.h"

enum {
    LONGEST = 32 << 10 /* fits a socket's buffer: nobody reads while it is written */
};

static void greet(int descriptor, bool with_secret) {
    tu_secret secret = { .bytes = with_secret ? 32 : 0 };
    tu_connection *connection = malloc(sizeof *connection);
    tu_connection_init(connection, descriptor);
    FUZZ_CHECK(!with_secret || tu_connection_greet(connection, &secret, tu_deadline(TU_SECOND)) != TUTTI_OK);
    if (!with_secret)
        (void)!tu_connection_greet(connection, &secret, tu_deadline(TU_SECOND));
    tu_connection_close(connection);
    free(connection);
}

static void operate(tutti_store *store, unsigned which) {
    static const char *const keys[] = { "a", "b", "c" };
    void *values[3];
    size_t bytes[3], count;
    char **list;
    int64_t number;
    bool yes;
    tutti_status status = TUTTI_OK;
    switch (which) {
    case 0:
        status = tutti_store_get(store, "a", 0, values, bytes);
        if (status == TUTTI_OK)
            tutti_free(values[0]);
        break;
    case 1:
        status = tutti_store_multi_get(store, keys, 3, 0, values, bytes);
        for (int i = 0; status == TUTTI_OK && i < 3; i++)
            tutti_free(values[i]);
        break;
    case 2:
        status = tutti_store_list_keys(store, &list, &count);
        if (status == TUTTI_OK)
            free(list);
        break;
    case 3:
        status = tutti_store_queue_pop(store, "a", true, 2 * TU_MILLISECOND, values, bytes);
        if (status == TUTTI_OK)
            tutti_free(values[0]);
        break;
    case 4:
        status = tutti_store_compare_set(store, "a", "x", 1, "y", 1, values, bytes);
        if (status == TUTTI_OK)
            tutti_free(values[0]);
        break;
    case 5:
        status = tutti_store_check(store, keys, 3, &yes);
        break;
    case 6:
        status = tutti_store_num_keys(store, &number);
        break;
    case 7:
        status = tutti_store_barrier(store, "a", 2, TU_MILLISECOND);
        break;
    }
    FUZZ_CHECK(status == TUTTI_OK || tutti_error_message()[0] != 0);
}

/* A client of a connection that is already validated; takes over the descriptor. */
static tutti_store *client_of(int descriptor) {
    tu_tcp_store *tcp;
    FUZZ_CHECK(tu_tcp_make(TU_SECOND, &tcp) == TUTTI_OK);
    snprintf(tcp->text, sizeof tcp->text, "descriptor %d", descriptor);
    tcp->client = true;
    tu_connection_init(&tcp->connection, descriptor);
    return &tcp->store;
}

static void fuzz_one(const uint8_t *data, size_t bytes) {
    int pair[2];
    if (bytes == 0 || bytes > LONGEST || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
        return;
    ssize_t sent = send(pair[1], data + 1, bytes - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    FUZZ_CHECK(sent == (ssize_t)bytes - 1);
    shutdown(pair[1], SHUT_WR);
    unsigned which = data[0] % 10;
    if (which >= 8) {
        greet(pair[0], which == 9);
    } else {
        tutti_store *store = client_of(pair[0]);
        operate(store, which);
        operate(store, (which + 1) % 8); /* in whatever state the first left it */
        tutti_store_release(store);
    }
    close(pair[1]);
}

FUZZ_TARGET(store_client)
