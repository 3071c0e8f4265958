/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages between ranks of a group that spans hosts, above the network part of a plug-in (`tutti-ucx`).
 *
 * A world has one network, opened by its first group that needs it. A rank then leaves a record in the world's store:
 * how it can be reached, and a random number, its door; whoever sends it something says that number, and messages that
 * do not are dropped. A peer is looked up, and connected to, when it is first used.
 *
 * A group's side of the network (tu_network_group) matches messages: a receipt waits for the message of one member,
 * under the number of an operation and a step within it. Every message carries what its sender called, so that a rank
 * that called something else learns it from the message that it gets anyway. A long message is cut into fragments. A
 * sender is at most a window ahead of what a member has taken from it in this group, so that nobody's memory fills with
 * messages that he does not expect yet.
 *
 * Who waits drives the network: it progresses while it spins, then sleeps on the network's descriptor. While nobody
 * waits, a thread of the rank does the same.
 */
#ifndef TU_MEMORY_WIRE_H
#define TU_MEMORY_WIRE_H

#include "memory/network_part.h"
#include "world/world.h"

typedef struct tu_network tu_network;
typedef struct tu_network_group tu_network_group;

#define TU_NETWORK_SAID_BYTES 48

/* What a rank calls: two that differ in `signature` called different things, and `text` is for the message. */
typedef struct tu_network_said {
    uint64_t signature;
    unsigned char bytes[TU_NETWORK_SAID_BYTES];
} tu_network_said;

/* Takes bytes of a message from `offset` on, where they come: with the network's lock held, by whichever thread drives
 * it, each byte once, in any pieces. */
typedef void tu_absorb(void *argument, size_t offset, const void *data, size_t bytes);

/* A message that is awaited. Of the caller; must stay until it is done or tu_network_abandon has returned. */
typedef struct tu_receipt {
    struct tu_receipt *next;
    int member;
    uint32_t step;
    unsigned char *to;
    tu_absorb *absorb; /* NULL: what comes is copied to `to` */
    void *argument;
    size_t bytes, got;
    bool posted;
    _Atomic bool done; /* set with the network's lock held; messages about a wait look without it */
} tu_receipt;

/* A message on its way. Likewise. */
typedef struct tu_dispatch {
    struct tu_dispatch *next;
    tu_network_group *group; /* NULL: a message of the network's own, freed when it has left */
    int peer;                /* world rank */
    int member;
    uint32_t kind, step;
    uint64_t sequence;
    const unsigned char *data;
    size_t bytes, at;
    size_t answer; /* what it counts among the answers to the peer; 0: it is none */
    int under_way; /* fragments that UCX still reads */
    bool begun, queued, failed;
    _Atomic bool done; /* likewise */
} tu_dispatch;

/* The group's side of the network; opens the network where that is not done yet. Local, but for the world's store. */
tutti_status tu_network_group_get(tutti_group *group, tu_network_group **side);

/* Connects to a member, whose record may not be in the store yet: bounded by the wait. `wait` may be that of any
 * operation of the group. */
tutti_status tu_network_reach(tu_network_group *side, const tu_group_wait *wait, int member);

/* The same for a member that sends something. One that has closed its world since may have sent it before: then there
 * is nobody to connect to, and what it sent is here or on its way. */
tutti_status tu_network_expect(tu_network_group *side, const tu_group_wait *wait, int member);

/* Around an operation: the caller drives the network meanwhile, and the thread looks in now and then only. */
void tu_network_enter(tu_network_group *side);
void tu_network_leave(tu_network_group *side);

/* The same for a collective, and what this rank calls from now on: under this number. */
void tu_network_enter_saying(tu_network_group *side, uint64_t sequence, const tu_network_said *said);

/* The caller has filled in member, step, bytes and where they go; the rest is zero. */
void tu_network_post(tu_network_group *side, tu_receipt *receipt);
void tu_network_send(tu_network_group *side, tu_dispatch *dispatch, int member, uint32_t step, const void *data,
                     size_t bytes);

/* Waits until ready(argument), which is asked with the network's lock held and only looks. As tu_wait_until, with the
 * wait's deadline, group and check; also ends with TUTTI_ERROR_MISMATCH, without a message, when a member called
 * something else (tu_network_other), and with DEAD or GONE when a connection broke. */
tutti_status tu_network_wait(tu_network_group *side, const tu_group_wait *wait, bool (*ready)(void *argument),
                             void *argument);
/* After a mismatch: who it is, and what that member said, or how long its message was. */
typedef struct tu_network_other_call {
    tu_network_said said;
    bool unequal; /* the calls are alike; a message is longer or shorter than expected */
    uint64_t sent_bytes, expected_bytes;
} tu_network_other_call;
int tu_network_other(tu_network_group *side, tu_network_other_call *call);

/* ---- letters: from one member to another, beside the operations that all members do alike ----
 *
 * What one member sends another comes in order. A letter is a copy, so no memory of the caller's is touched later.
 * Whatever comes, and whatever makes room for more, rings this rank's bell. */

/* Connects to a member if it can be found already; never waits for it. */
tutti_status tu_network_try_reach(tu_network_group *side, int member);
/* Sends a head of at most TU_LETTER_HEAD bytes, and `bytes` more, which `fill` copies from `offset` of whatever it
 * knows; at most TU_LETTER_BYTES. False: there is no way to the member yet or any more, no room, or no memory. */
#define TU_LETTER_HEAD ((size_t)64)
#define TU_LETTER_BYTES ((size_t)128 << 10)
typedef void tu_letter_fill(void *argument, void *to, uint64_t offset, size_t bytes);
bool tu_network_write(tu_network_group *side, int member, const void *head, size_t head_bytes, tu_letter_fill *fill,
                      void *argument, uint64_t offset, size_t bytes);
/* The oldest letter of a member that was not taken: its bytes, lent until it is; NULL: none. One thread at a time. */
const void *tu_network_letter(tu_network_group *side, int member, size_t *bytes);
void tu_network_letter_taken(tu_network_group *side, int member);
/* Whether there may be letters: one load. */
bool tu_network_has_letters(const tu_network_group *side);

/* ---- memory that members on other hosts may use: network_memory.c ----
 *
 * A window is a block of this rank that was rendezvoused with the group: members write into it and read from it by its
 * number, and nowhere else. What one member does comes in order; it is done by whichever thread of the owner drives the
 * network, within the window's bounds. */
typedef struct tu_network_window {
    struct tu_network_window *next;
    tu_network_group *side; /* NULL: not open, or the group's side has ended before it */
    uint64_t number;        /* the same on all members, and never used again in the group */
    unsigned char *data;
    size_t bytes;                     /* that are put and got */
    size_t words_offset, words_bytes; /* of the 64-bit words that are set */
    /* A member says something about signals: with the network's lock held. */
    void (*told)(void *argument, int member, uint32_t what, uint32_t channel, uint32_t value);
    void *argument;
} tu_network_window;
void tu_network_window_open(tu_network_group *side, tu_network_window *window);
/* Nothing of the window is touched afterwards. */
void tu_network_window_close(tu_network_window *window);
/* Opens a window that was closed under another number: what was sent to the old one is dropped. All members do so
 * between two exchanges. */
void tu_network_window_renew(tu_network_group *side, tu_network_window *window);

/* Into a member's window. False: there is no room, or no way to it any more. At most TU_LETTER_BYTES:
 * UCX 1.13 ends a process by an assertion more often the longer what a rank that dies has not taken yet. */
bool tu_network_put(tu_network_group *side, int member, uint64_t number, uint64_t offset, const void *from,
                    size_t bytes);
bool tu_network_set(tu_network_group *side, int member, uint64_t number, uint64_t offset, uint64_t value);
void tu_network_tell(tu_network_group *side, int member, uint64_t number, uint32_t what, uint32_t channel,
                     uint32_t value);
/* Whether everything that this rank has put has arrived, but for messages to one member: that member knows by the
 * order of what comes. Asks those of whom it is not known. but: -1 for none. *mark is 0 at the first look of a wait and
 * kept for the others: what is put after the first is not waited for. */
bool tu_network_fenced(tu_network_group *side, int but, uint64_t *mark);
/* Whether it is not known yet that everything arrived that was put to a member; `ordered`: but for what the order of
 * messages sees to. */
bool tu_network_unfenced(tu_network_group *side, int member, bool ordered);

/* Bytes that were asked for. Of the caller; must stay until it is over or tu_network_forget has returned. */
typedef struct tu_network_fetch {
    struct tu_network_fetch *next;
    uint64_t token;
    int member;
    unsigned char *to;
    size_t bytes;
    _Atomic bool over, refused; /* set with the network's lock held; waits look without it */
} tu_network_fetch;
bool tu_network_ask_for(tu_network_group *side, tu_network_fetch *get, int member, uint64_t number, uint64_t offset,
                        void *to, size_t bytes);
void tu_network_forget(tu_network_group *side, tu_network_fetch *get);

/* ---- memory that moves without its owner: network_direct.c ----
 *
 * Where the fabric has remote memory access, the block of a rendezvous is registered, each member gives the others a
 * key to its own, and puts and gets go by that. What a member wrote is there when it has flushed, which
 * tu_network_fenced sees to. */
typedef struct tu_network_share tu_network_share;

/* As members tell each other. */
typedef struct tu_network_key {
    uint32_t magic, version;
    uint64_t address, bytes; /* of the block, in its owner's process */
    uint64_t number;         /* of the share, in its owner's network */
    uint32_t key_bytes;      /* 0: the owner has no key to offer */
    uint32_t reserved;
    uint64_t checksum;
    unsigned char key[TU_NETWORK_KEY_BYTES];
} tu_network_key;

/* Whether this rank shares blocks so, where others do too. */
bool tu_network_shares(const tu_network_group *side);
/* The key to a block of this rank, for the members of the group. */
tutti_status tu_network_share_make(tu_network_group *side, void *data, size_t bytes, tu_network_key *key,
                                   tu_network_share **share);
void tu_network_key_none(tu_network_key *key); /* what a rank tells that has none */
void tu_network_key_seal(tu_network_key *key); /* its checksum */
/* A member's key. One of another version, of another block's size, or that was damaged on its way is refused; the
 * checksum proves nothing about who made it, so members of a group trust each other. The member is connected. One that
 * was taken back meanwhile is not taken. */
tutti_status tu_network_share_meet(tu_network_share *share, int member, const tu_network_key *key);
/* Takes the keys back: nobody writes to the block afterwards. Bounded by three seconds, and one more for each member
 * that has to be cut off then. NULL: nothing. */
void tu_network_share_end(tu_network_share *share);
/* The same for one whose keys nobody has met, since all members agreed not to: asks nobody. */
void tu_network_share_drop(tu_network_share *share);
/* Whether puts and gets to a member go this way. */
bool tu_network_reaches(const tu_network_share *share, int member);
/* Whether everything that this rank wrote to a member is there; begins to see to it. mark: as in tu_network_fenced. */
bool tu_network_written(const tu_network_share *share, int member, uint64_t *mark);

/* Something that the part will tell about. */
typedef struct tu_network_motion {
    void (*over)(tu_network *network, struct tu_network_motion *motion, bool good);
} tu_network_motion;

/* Bytes that move. Of the caller; must stay until it is over, or tu_network_transfer_end has returned, like the bytes.
 */
typedef struct tu_network_transfer {
    tu_network_motion motion;
    tu_network_share *share;
    int member;
    _Atomic bool over, failed, refused; /* refused: nothing moved; it is outside of the block, or that is no more */
} tu_network_transfer;
void tu_network_put_by_key(tu_network_share *share, int member, uint64_t offset, const void *from, size_t bytes,
                           tu_network_transfer *transfer);
void tu_network_get_by_key(tu_network_share *share, int member, uint64_t offset, void *to, size_t bytes,
                           tu_network_transfer *transfer);
/* After a wait for it that failed: its memory is the caller's again. A member that takes nothing is cut off. */
void tu_network_transfer_end(tu_network_transfer *transfer);

/* ---- waits of one's own ---- */

/* Drives the network once, without waiting. */
void tu_network_poll(tu_network_group *side);
/* Between tu_network_enter and tu_network_leave: the caller is about to sleep on its bell, and is back. */
void tu_network_rest(tu_network_group *side);
/* What ends a wait of this group besides: `status`, that is what the check of a tu_group_wait said; that a member's
 * connection broke, or an awaited one closed its world, in words; STATE when the group ended, whatever else is. For
 * waits that do not go through tu_network_wait. */
tutti_status tu_network_look(tu_network_group *side, const tu_group_wait *wait, tutti_status status);

/* After a failure: forgets all receipts and dispatches of the group. None of their memory is touched afterwards. */
void tu_network_abandon(tu_network_group *side);

#endif
