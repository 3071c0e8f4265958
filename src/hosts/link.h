/* SPDX-License-Identifier: Apache-2.0
 *
 * What launchers of a job over several hosts (agents) say to each other, and the bytes of it. No sockets here: a link
 * takes the bytes that came and holds those to send.
 *
 *     agent                                               hub
 *     "TUTTIAG1", mode, nonce                      --->
 *                                                  <---   "TUTTIAG1", mode, nonce, proof("hub", both nonces)
 *     checks it; proof("agent", both nonces)       --->   checks it
 *     frames                                       <-->   frames
 *
 * mode is 1 with a secret and 0 without one (then the proofs are zeros); both must have the same. Proofs are those of
 * the store (store/auth.h). A frame is 32 bytes, the text's included in none of them, and the text:
 *
 *     u32 "TAF1"   u16 kind   u16 bytes of text   i32 node, rank, pid, status, count   u32 flags     (little endian)
 */
#ifndef TU_HOSTS_LINK_H
#define TU_HOSTS_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "store/auth.h"

typedef enum tu_frame_kind {
    TU_FRAME_HELLO = 1, /* agent: node, count ranks of its own, status nodes, flags; text: version and host name; pid:
                           port at which it listens for others that lose the hub. To such a one: node alone */
    TU_FRAME_REFUSED,   /* hub: text says why; then the link closes */
    TU_FRAME_NODE,      /* hub: node, its count ranks; text: its host name, and its address; pid: as in its hello */
    TU_FRAME_PLAN,      /* hub, after the nodes: count ranks in all, status: port of the store, pid: port for PyTorch;
                           text: PyTorch's address, "" for the one at which the hub was reached */
    TU_FRAME_ENDED,     /* rank, pid, status: wait status */
    TU_FRAME_FAILED,    /* node's first failure: rank, pid, status, flags */
    TU_FRAME_FIRST,     /* hub: the job's first failure: rank (-1: a node was lost), pid, status; text says it */
    TU_FRAME_SIGNAL,    /* status: a signal for all ranks */
    TU_FRAME_BEAT,      /* still here */
    TU_FRAME_LOST,      /* hub: node is out of reach; text says why */
    TU_FRAME_STOP,      /* hub: all ranks are to be stopped; text says why */
    TU_FRAME_DONE,      /* agent: all its ranks have ended; status: 0, or 126, 127: they could not be started, as text
                           says */
    TU_FRAME_FINISH,    /* hub: the job is over; status: what to exit with */
    TU_FRAME_ORPHAN,    /* agent, to a candidate: it has lost the hub, and counts on this one and on nobody else */
    TU_FRAME_TAKEOVER,  /* candidate, to those: it is the hub now; status: port of its store */
    TU_FRAME_UNDECIDED, /* candidate, to those: it is still there; flags */
    TU_FRAME_CLOCK,     /* agent: text: its clock; the first hub answers with that and its own behind it */
    TU_FRAME_KINDS
} tu_frame_kind;

#define TU_FRAME_SURVIVE UINT32_C(1)    /* hello: --survive */
#define TU_FRAME_CANNOT UINT32_C(2)     /* hello: this node cannot run the program; text after the host says why */
#define TU_FRAME_SUFFERED UINT32_C(4)   /* failed: by the death of another rank */
#define TU_FRAME_ORPHAN_TOO UINT32_C(8) /* undecided: it has lost the hub itself */

#define TU_FRAME_TEXT 512 /* with the zero that ends it */
#define TU_FRAME_HEAD 32
#define TU_FRAME_MOST (TU_FRAME_HEAD + TU_FRAME_TEXT)

typedef struct tu_frame {
    tu_frame_kind kind;
    int32_t node, rank, pid, status, count;
    uint32_t flags;
    char text[TU_FRAME_TEXT];
} tu_frame;

typedef enum tu_link_state {
    TU_LINK_GREETING, /* waits for the other's nonce */
    TU_LINK_PROVING,  /* the hub waits for the agent's proof */
    TU_LINK_OPEN,
    TU_LINK_BROKEN /* `why` says it */
} tu_link_state;

#define TU_LINK_GREETING_BYTES (8 + 1 + TU_AUTH_BYTES)
#define TU_LINK_OUT ((size_t)1 << 20) /* what may wait to be sent: who does not take it is not there */

typedef struct tu_link {
    tu_link_state state;
    bool hub;
    const tu_secret *secret; /* lent */
    uint8_t nonce[TU_AUTH_BYTES], other[TU_AUTH_BYTES];
    char why[192];
    uint8_t in[2 * TU_FRAME_MOST];
    size_t in_used;
    uint8_t *out; /* to send: out_used bytes */
    size_t out_used, out_room;
} tu_link;

/* An agent's link holds its greeting at once. */
tutti_status tu_link_init(tu_link *link, bool hub, const tu_secret *secret);
void tu_link_end(tu_link *link);

/* Where the next bytes go and how many fit; then tu_link_came with how many came. */
static inline uint8_t *tu_link_room(tu_link *link, size_t *bytes) {
    *bytes = sizeof link->in - link->in_used;
    return link->in + link->in_used;
}
void tu_link_came(tu_link *link, size_t bytes);
/* The next whole frame; false when there is none, or the link is broken. */
bool tu_link_take(tu_link *link, tu_frame *frame);
/* Appends to what is to be sent; a link that takes no more is broken. */
void tu_link_put(tu_link *link, const tu_frame *frame);
/* The first `bytes` of it were sent. */
void tu_link_sent(tu_link *link, size_t bytes);

/* Reads one frame: its length, 0 when it is not whole yet, or -1 for what is none. */
int tu_frame_read(const uint8_t *data, size_t bytes, tu_frame *frame);
size_t tu_frame_write(const tu_frame *frame, uint8_t data[TU_FRAME_MOST]);

#endif
