/* SPDX-License-Identifier: Apache-2.0
 *
 * Packets: how the ranks of a group talk about messages. Each ordered pair of ranks has a channel in the group's shared
 * page, a ring of packets that the sender writes and the receiver takes in order and at once, so that nothing behind
 * them is held up; and each rank has a staging area of a few cells. Messages of up to a cell lie there until they are
 * taken; longer ones go fragment by fragment, each of several cells.
 *
 *     MESSAGE    sender to receiver   tag, length, dtype; up to TU_PACKET_BYTES of data, or the cell that has it, and
 *                                     the send is over; else where the data lies in symmetric memory, or a fragment
 *                                     that has it: for a receive that waits already, else it is asked for later
 *     CLEAR      receiver to sender   a receive awaits it: send the data (to symmetric memory, when there is some)
 *     FRAGMENT   sender to receiver   data, in one of the sender's fragments
 *     WRITTEN    sender to receiver   the data was written into the receiver's symmetric memory
 *     DONE       receiver to sender   the data was read from the sender's symmetric memory or its fragment
 *
 * In a group across hosts these are the channels of the members on this host (group->here), and packets for the others
 * go as letters (memory/network.h): the same packet, and behind it its data.
 *
 * A packet is what another process wrote: whoever takes one checks every number in it before using it.
 */
#ifndef TU_COLLECTIVE_PACKET_H
#define TU_COLLECTIVE_PACKET_H

#include "collective/collective.h"

typedef enum tu_packet_kind {
    TU_PACKET_MESSAGE = 1,
    TU_PACKET_CLEAR,
    TU_PACKET_FRAGMENT,
    TU_PACKET_WRITTEN,
    TU_PACKET_DONE
} tu_packet_kind;

#define TU_PACKETS 4
#define TU_PACKET_BYTES 80 /* of data that a packet has room for at most; the contract of tutti_recv names it */
#define TU_CELL_BYTES 2048 /* of data that a cell has room for; likewise */
#define TU_CELLS_MOST 16   /* of a rank */

/* A message of up to 32 bytes is one line with its header: so only what every packet has stands before the data. */
typedef struct tu_packet {
    _Alignas(TU_LINE) _Atomic uint64_t number; /* from 1, in order; released by the sender */
    uint64_t message;                          /* the sender's number of the message */
    uint64_t bytes;                            /* of the message, or of this fragment */
    int32_t tag;
    uint16_t kind;
    uint16_t dtype;
    union {
        unsigned char payload[TU_LINE - 32]; /* of a short message */
        struct {
            uint64_t offset;   /* of this fragment, or in the symmetric block */
            uint32_t index;    /* of the symmetric block, or of the fragment; 0 none */
            uint32_t fragment; /* of a longer message: the one with its data, from 1; 0: none */
            uint32_t cell;     /* likewise of one whose send is over */
        };
    };
} tu_packet;
_Static_assert(sizeof(tu_packet) == TU_LINE, "a packet is one pair of lines");
_Static_assert(TU_PACKET_BYTES <= TU_LINE - 32, "a short message lies in its packet");

/* From one rank to another. */
typedef struct tu_channel {
    tu_packet packets[TU_PACKETS];            /* written by the sender */
    _Alignas(TU_LINE) _Atomic uint64_t taken; /* how many the receiver has taken; written by it */
    _Atomic uint64_t blocked; /* by the receiver: it can do nothing until the sender of this channel acts;
                                 a number that grows, 0 when it is not so (cycle.c) */
} tu_channel;
_Static_assert(sizeof(tu_channel) == TU_AREA_CHANNEL, "world.h reserves the channels");

/* This rank's ends of the channels of a group. Their ends have places: of a group across hosts those of its members on
 * this host; else every member's is its rank. */
typedef struct tu_channels {
    tu_collective *state;
    unsigned char *area; /* of the group: channels by sender and receiver, then fragments by sender */
    void *own_area;      /* of a rank that is alone on its host: the same memory; else NULL */
    int rank, size;      /* this rank's place, and how many there are */
    const int *members;  /* by place; NULL: they are the same */
    size_t fragment_bytes;
    uint64_t *sent, *taken; /* packets by peer */
    uint64_t *seen_taken;   /* by peer: how many of this rank's it had taken when that was last looked at */
    int cell_count;         /* of each rank */
    int next_cell;          /* the one that was used the longest time ago */
    struct {
        int peer;
        uint64_t packet; /* free again once the peer has taken it; 0: free */
    } cells[TU_CELLS_MOST];
} tu_channels;

/* members: the places in a group across hosts, lent; NULL in others. */
tutti_status tu_channels_open(tu_channels *channels, tu_collective *state, const int *members, int count);
void tu_channels_close(tu_channels *channels);

static inline tu_channel *tu_channel_of(const tu_channels *channels, int sender, int receiver) {
    return (tu_channel *)(void *)channels->area + (size_t)sender * (size_t)channels->size + (size_t)receiver;
}
static inline unsigned char *tu_fragment(const tu_channels *channels, int sender, uint32_t index) {
    size_t size = (size_t)channels->size;
    return channels->area + size * size * TU_AREA_CHANNEL +
           ((size_t)sender * TU_AREA_FRAGMENTS + index) * channels->fragment_bytes;
}
static inline unsigned char *tu_cell(const tu_channels *channels, int sender, uint32_t index) {
    return tu_fragment(channels, sender, 0) + (size_t)index * TU_CELL_BYTES;
}

static inline void tu_channel_ring(const tu_channels *channels, int peer) {
    int member = channels->members == NULL ? peer : channels->members[peer];
    tu_bell_ring(channels->state->sleepers, channels->state->bells[member]);
}

/* Where the next packet to `peer` goes; NULL while the ring is full. tu_packet_post makes it visible. */
static inline tu_packet *tu_packet_next(tu_channels *channels, int peer) {
    uint64_t sent = channels->sent[peer];
    tu_channel *channel = tu_channel_of(channels, channels->rank, peer);
    /* The receiver's word is looked at only when the ring could be full: each look takes the line away from it. Pairs
     * with the release in tu_packet_taken: the packet's place has been read. */
    if (sent - channels->seen_taken[peer] >= TU_PACKETS)
        channels->seen_taken[peer] = atomic_load_explicit(&channel->taken, memory_order_acquire);
    return sent - channels->seen_taken[peer] < TU_PACKETS ? &channel->packets[sent % TU_PACKETS] : NULL;
}
static inline uint64_t tu_packet_post(tu_channels *channels, tu_packet *packet, int peer) {
    uint64_t number = ++channels->sent[peer];
    atomic_store_explicit(&packet->number, number, memory_order_release); /* pairs with tu_packet_look */
    tu_channel_ring(channels, peer);
    return number;
}
/* A packet without data; false while the ring is full. */
bool tu_packet_post_short(tu_channels *channels, int peer, tu_packet_kind kind, uint64_t message, uint32_t index,
                          uint64_t offset);
/* Posts `bytes` of a message, in a free fragment; false while there is none, or the ring is full. */
bool tu_packet_post_fragment(tu_channels *channels, int peer, uint64_t message, uint64_t offset, size_t bytes,
                             void (*fill)(void *argument, void *to, uint64_t offset, size_t bytes), void *argument);

/* A fragment or cell that nobody reads any more, or -1; and that a packet which was posted to `peer` needs it. */
int tu_fragment_find(tu_channels *channels);
void tu_fragment_use(tu_channels *channels, int fragment, int peer, uint64_t packet);
int tu_cell_find(tu_channels *channels);
void tu_cell_use(tu_channels *channels, int cell, int peer, uint64_t packet);
/* Where the data of a message from `source` lies whose packet says that it is in that cell; NULL: there is none. */
static inline const unsigned char *tu_cell_of(const tu_channels *channels, int source, uint32_t cell, uint64_t bytes) {
    bool is_there = cell != 0 && cell <= (uint32_t)channels->cell_count && bytes <= TU_CELL_BYTES;
    return is_there ? tu_cell(channels, source, cell - 1) : NULL;
}

/* The next packet from `source` that was not taken; NULL: none. */
static inline const tu_packet *tu_packet_look(const tu_channels *channels, int source) {
    uint64_t taken = channels->taken[source];
    const tu_packet *packet = &tu_channel_of(channels, source, channels->rank)->packets[taken % TU_PACKETS];
    /* Pairs with the release in tu_packet_post. */
    return atomic_load_explicit(&packet->number, memory_order_acquire) == taken + 1 ? packet : NULL;
}
static inline void tu_packet_taken(tu_channels *channels, int source) {
    uint64_t taken = ++channels->taken[source];
    /* Pairs with tu_packet_next, is_free of cells, and with tu_channel_empty. */
    atomic_store_explicit(&tu_channel_of(channels, source, channels->rank)->taken, taken, memory_order_release);
}
/* Whether everything that `sender` posted to `receiver` has been taken. */
bool tu_channel_empty(const tu_channels *channels, int sender, int receiver);

#endif
