/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the plug-in: what network.c (messages) and direct.c (remote memory access) share.
 */
#ifndef TU_BACKEND_UCX_INNER_H
#define TU_BACKEND_UCX_INNER_H

#include "ucx.h"

/* Whether puts and gets go by UCX's remote memory access: TUTTI_RMA. */
typedef enum tu_ucx_mode {
    TU_UCX_AUTO, /* where hardware does it */
    TU_UCX_ON,   /* also where UCX emulates it */
    TU_UCX_OFF
} tu_ucx_mode;

typedef struct network network;

typedef struct endpoint {
    network *network;
    int peer;
    ucp_ep_h handle; /* NULL: not connected, or no more */
    bool broken;     /* told, and to be closed outside of the callback */
    bool direct;     /* bytes go to and from that rank's memory without its processor, or are to be moved as if */
} endpoint;

/* A send that is under way, or what moves bytes by itself; the header must outlive it. */
typedef struct sending {
    network *network;
    int peer;
    void *token;                  /* NULL: told as not good already */
    bool direct;                  /* told as moved, not as sent */
    struct sending *next, **link; /* in the list of those under way, or of spare ones */
    ucp_dt_iov_t pieces[2];       /* header and data, where they are packed */
    unsigned char header[TU_NETWORK_HEADER_BYTES];
} sending;

struct network {
    const tu_backend_host *host;
    const tu_ucx_library *ucx;
    tutti_world *world;
    const tu_network_events *events;
    void *owner;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_address_t *address;
    size_t address_bytes, most;
    int descriptor, peer_count;
    bool any_broken;
    tu_ucx_mode mode;
    bool offers;          /* keys to memory of this rank */
    endpoint **endpoints; /* by peer; NULL until it is used */
    sending *spare, *under_way;
};

/* A request of `network` to a peer, begun and handed to UCX with tu_ucx_sent as its callback and *begun as its
 * argument: why it cannot be, in words that last, or NULL. */
const char *tu_ucx_begin(network *network, int peer, void *token, bool direct, sending **begun);
const char *tu_ucx_begun(sending *one, void *request, bool *finished);
void tu_ucx_sent(void *request, ucs_status_t status, void *argument);

/* ---- direct.c ---- */

tutti_status tu_ucx_direct_choose(network *network); /* before there is a context */
uint64_t tu_ucx_direct_features(const network *network);
bool tu_ucx_direct_look(network *network); /* what the context has; true: it must be made anew, with the feature */
void tu_ucx_direct_connected(endpoint *endpoint); /* and a connection */

/* As in tu_network_part. */
bool tu_ucx_direct(void *network, int peer);
tutti_status tu_ucx_share(void *network, void *data, size_t bytes, void **region, void *key, size_t *key_bytes);
void tu_ucx_unshare(void *network, void *region);
const char *tu_ucx_take_key(void *network, int peer, const void *key, void **taken);
void tu_ucx_drop_key(void *network, void *taken);
const char *tu_ucx_write(void *network, int peer, void *key, uint64_t address, const void *from, size_t bytes,
                         void *token, bool *finished);
const char *tu_ucx_read(void *network, int peer, void *key, uint64_t address, void *to, size_t bytes, void *token,
                        bool *finished);
const char *tu_ucx_flush(void *network, int peer, void *token, bool *finished);

#endif
