/* SPDX-License-Identifier: Apache-2.0
 *
 * The network part of a backend: short messages between the ranks of a world, over a network. What they mean, how they
 * are cut, matched and waited for is libtutti's business (memory/network.h); a backend connects, sends, and says what
 * came. Besides, where a fabric can, it moves bytes to and from memory of another rank without that rank.
 *
 * All functions of one network are called by one thread at a time: the caller has a lock. Events are told from inside
 * `progress` and `disconnect` alone.
 */
#ifndef TU_MEMORY_WIRE_PART_H
#define TU_MEMORY_WIRE_PART_H

#include "memory/backend.h"

#define TU_NETWORK_HEADER_BYTES 256   /* of a header, at most */
#define TU_NETWORK_ADDRESS_BYTES 1024 /* of an address, at most */
#define TU_NETWORK_KEY_BYTES 256      /* of a key to memory, at most */

typedef struct tu_network_events {
    size_t header_bytes; /* of every message */
    /* A message came. Header and data are the backend's. True: the callee keeps the data until it gives back `parcel`;
     * where parcel is NULL it cannot, and copies what it needs. */
    bool (*arrived)(void *owner, const void *header, size_t header_bytes, const void *data, size_t bytes, void *parcel);
    void (*sent)(void *owner, void *token, bool good);    /* a send that was not finished at once is over */
    void (*lost)(void *owner, int peer, const char *why); /* the connection to a peer broke; it stays so */
    void (*moved)(void *owner, void *token, bool good);   /* likewise of a write, a read or a flush */
} tu_network_events;

typedef struct tu_network_part {
    size_t size;
    /* address: of this host, on the route to the others; "": whatever there is. */
    tutti_status (*open)(const tu_backend_host *host, tutti_world *world, const char *address, int peer_count,
                         const tu_network_events *events, void *owner, void **network);
    /* Lets what was sent leave, until the deadline; then ends everything. */
    void (*close)(void *network, int64_t deadline);
    /* What the others need in order to connect; lent while the network lives. */
    const void *(*address)(void *network, size_t *bytes);
    size_t (*most)(void *network);    /* bytes of data that one message may have */
    int (*descriptor)(void *network); /* readable when there is something to progress, once armed */
    tutti_status (*connect)(void *network, int peer, const void *address, size_t bytes);
    /* Ends the connection at once: what was sent and has not left is lost. Its sends are told as not good before this
     * returns, which takes no longer than a second. */
    void (*disconnect)(void *network, int peer);
    /* The header is copied; data is read until the send is over: *finished, or told by `sent`. Returns why it cannot be
     * sent, in words that last; NULL: it is under way. The thread's last error is left alone. */
    const char *(*send)(void *network, int peer, const void *header, size_t header_bytes, const void *data,
                        size_t bytes, void *token, bool *finished);
    bool (*progress)(void *network); /* whether something happened */
    bool (*arm)(void *network);      /* true: nothing is left to progress, and the descriptor tells what comes next */
    void (*give_back)(void *network, void *parcel);

    /* Remote memory access. Whether bytes move to and from the memory of a peer, which is connected, without its
     * processor; peer -1: whether memory of this rank is to be shared so at all. */
    bool (*direct)(void *network, int peer);
    /* Memory of this rank that whoever has the key, of at most TU_NETWORK_KEY_BYTES, may read and write. */
    tutti_status (*share)(void *network, void *data, size_t bytes, void **region, void *key, size_t *key_bytes);
    void (*unshare)(void *network, void *region);
    /* The key of a connected peer. It is taken as it is, so the caller has checked that it is whole. Returns as `send`
     * does. Dropped when nothing is under way by it. */
    const char *(*take_key)(void *network, int peer, const void *key, void **taken);
    void (*drop_key)(void *network, void *taken);
    /* As `send`: the caller's memory is used until it is over. A write comes after those before it to that peer, and is
     * there when a flush that followed it is over. Nobody checks bounds but the caller. */
    const char *(*write)(void *network, int peer, void *key, uint64_t address, const void *from, size_t bytes,
                         void *token, bool *finished);
    const char *(*read)(void *network, int peer, void *key, uint64_t address, void *to, size_t bytes, void *token,
                        bool *finished);
    const char *(*flush)(void *network, int peer, void *token, bool *finished);
} tu_network_part;

#endif
