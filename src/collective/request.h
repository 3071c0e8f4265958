/* SPDX-License-Identifier: Apache-2.0
 *
 * Requests: sends and receives under way. Each is a small machine that is moved on by tu_requests_progress, under one
 * lock, from any thread of the rank that waits. A message that no receive awaits yet is kept as unexpected.
 */
#ifndef TU_COLLECTIVE_REQUEST_H
#define TU_COLLECTIVE_REQUEST_H

#include "collective/packet.h"
#include "collective/work.h"
#include "memory/network.h"

/* Unexpected messages that a rank keeps of one other; what comes after them stays with its sender, whose sends wait. */
#define TU_UNEXPECTED_MOST 16384
/* Unexpected messages whose memory is kept for the next ones. */
#define TU_UNEXPECTED_SPARE 64

typedef enum tu_request_state {
    TU_REQUEST_POSTING,  /* send: the MESSAGE packet is still to be posted */
    TU_REQUEST_WAITING,  /* send: for CLEAR or DONE; receive: for a message */
    TU_REQUEST_CLEARING, /* receive: matched; CLEAR is still to be posted */
    TU_REQUEST_MOVING,   /* send: fragments to post; receive: fragments to come */
    TU_REQUEST_WRITING,  /* send: to be written in place, then WRITTEN posted */
    TU_REQUEST_READING,  /* receive: read in place; DONE still to be posted */
    TU_REQUEST_FINISHED
} tu_request_state;

struct tu_request {
    tu_task *task;
    tutti_work *work; /* NULL: a thread waits for it */
    tu_request *next, *previous;
    tu_request_state state;
    _Atomic uint32_t finished; /* released last; pairs with the waiter's look */
    const char *garbage;       /* what was wrong with a packet of the peer's; NULL: nothing */
    bool mismatch;             /* it failed: the message is not what the receive expects */
    bool listed;
    bool past;        /* over and recorded before anybody waited for it */
    int peer;         /* target or source; negative while any will do */
    uint64_t message; /* the sender's number of it */
    size_t bytes;     /* of the message */
    size_t moved;
    uint32_t index; /* of the other side's symmetric memory, and the offset in it */
    uint64_t offset;
    int tag; /* that arrived */
    uint32_t dtype;
};

/* A message that no receive awaits yet. */
typedef struct tu_unexpected {
    struct tu_unexpected *next;
    int source;
    void *data;       /* of a message whose send is over and that does not lie in its packet; else NULL */
    tu_packet packet; /* a copy */
} tu_unexpected;

/* The messages of a group, on this rank. */
struct tu_messages {
    tu_collective *state;
    tu_memory_group *memory;
    tu_channels channels;
    tu_network_group *network; /* of a group across hosts, else NULL; so are the next two */
    int *places;               /* by member: of its end of the channels; -1: it is on another host */
    int *here, here_count;     /* members on this host, by place; in the memory of `places` */
    _Atomic bool *wanted;      /* by member: a request was for it, so a way to it is looked for; likewise */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool running, ending, orphan; /* of the helper: message.c */
    tu_request *first, *last;     /* requests under way, oldest first */
    tu_unexpected *early, **early_end;
    tu_unexpected *spare; /* memory of unexpected messages that were received, to be used again */
    int spares;
    int *early_count;  /* unexpected messages by source */
    tu_request *done;  /* requests of works that are over, to be finished without the lock */
    int works;         /* requests that belong to works */
    uint64_t messages; /* last number given to a message */
    uint64_t passes;   /* how often the requests have been gone through */
    uint64_t *full_in; /* by peer: the last pass that found its ring full for a message */
    int blocked_on;    /* whose channel says that this rank is blocked; -1: none (cycle.c) */
    uint64_t blocked;  /* how often it has been */
};

static inline bool tu_request_sends(const tu_request *request) {
    return request->task->row->in != TU_EXTENT_NONE;
}

/* The place of a member's end of the channels. */
static inline int tu_place_of(const tu_messages *messages, int member) {
    return messages->places == NULL ? member : messages->places[member];
}
static inline int tu_member_at(const tu_messages *messages, int place) {
    return messages->here == NULL ? place : messages->here[place];
}
/* Whether packets to and from it go as letters. */
static inline bool tu_elsewhere(const tu_messages *messages, int member) {
    return tu_place_of(messages, member) < 0;
}

/* With the lock held. Enlists a request; moves everything on as far as it goes. */
void tu_request_begin(tu_messages *messages, tu_request *request);
void tu_requests_progress(tu_messages *messages);
/* Takes a request back. True when half of it has moved: then the pair is out of step. Takes the lock. */
bool tu_request_withdraw(tu_messages *messages, tu_request *request);
void tu_request_unlist(tu_messages *messages, tu_request *request);
void tu_unexpected_free(tu_unexpected *early);

/* ---- packets between hosts: letter.c ---- */

/* Before the channels; nothing to do in a group on one host. */
tutti_status tu_letters_open(tu_messages *messages);
/* That there should be a way to a member, if it is on another host; TUTTI_ANY_SOURCE: to all that are. */
void tu_letters_want(tu_messages *messages, int member);
/* Looks for these ways, once; never waits for anybody. Of a group across hosts. */
tutti_status tu_letters_reach(tu_messages *messages);
/* With the lock held. As tu_packet_post: false while there is no room, or no way. `fill` copies `bytes` of data from
 * packet->offset of the message on. */
bool tu_letter_post(tu_messages *messages, int peer, const tu_packet *packet, tu_letter_fill *fill, void *argument,
                    size_t bytes);
/* The next packet from `source`: what it says, and its data; NULL: none. */
const void *tu_letter_look(tu_messages *messages, int source, tu_packet *packet);
void tu_letter_taken(tu_messages *messages, int source);

/* ---- who waits for whom: cycle.c ---- */

/* With the lock held: this rank's word about whom it waits for is taken back; anything may have changed it. */
void tu_blocked_clear(tu_messages *messages);
/* From a wait: says whom this rank waits for, and looks whether that one, in the end, waits for this rank. A cycle of
 * ranks that none of them can leave is an error at once. */
tutti_status tu_cycle_look(tu_messages *messages, const tu_request *request);

#endif
