/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the network: what network.c (the world's side), network_reach.c (who is where) and network_group.c (a
 * group's side) share.
 */
#ifndef TU_MEMORY_WIRE_INNER_H
#define TU_MEMORY_WIRE_INNER_H

#include <pthread.h>

#include "memory/network.h"

#define TU_NETWORK_MAGIC UINT32_C(0x52495754) /* "TWIR" */
#define TU_NETWORK_VERSION UINT32_C(1)        /* of headers and records */

typedef enum tu_network_kind {
    TU_NETWORK_HELLO = 1, /* connects, and has the kernel tell when the sender dies */
    TU_NETWORK_DATA,      /* a fragment of a message */
    TU_NETWORK_TAKEN,     /* `offset` more bytes of a group's messages were taken */
    TU_NETWORK_ASK,       /* what the sender calls, and in words; it waits for the receiver; no answer */
    TU_NETWORK_ENDED,     /* the group ended: the data is its tu_cause */
    TU_NETWORK_GOODBYE,   /* the sender closes its world */
    TU_NETWORK_LETTER,
    TU_NETWORK_READ,   /* `offset` more bytes of letters were taken */
    TU_NETWORK_MEMORY, /* something about a window: `step` says what */
    TU_NETWORK_FENCE,  /* have `offset` puts of the sender come? Answered by the next when it is their turn */
    TU_NETWORK_FENCED,
    TU_NETWORK_REVOKE, /* the sender takes the key of share `sequence` back. Answered by the next */
    TU_NETWORK_REVOKED,
    TU_NETWORK_INQUIRE, /* what does the receiver do, and what did it do last in the group? Answered by the next */
    TU_NETWORK_DOING,   /* in words */
    TU_NETWORK_KINDS
} tu_network_kind;

typedef struct tu_network_header {
    uint32_t magic, version;
    uint64_t door; /* of the receiver */
    uint64_t key;  /* of the group */
    uint64_t sequence, offset, total;
    uint32_t kind, step;
    int32_t from, reserved; /* world rank */
    tu_network_said said;
} tu_network_header;
_Static_assert(sizeof(tu_network_header) <= TU_NETWORK_HEADER_BYTES, "a header must fit");

/* A message that came before it was asked for. */
typedef struct tu_network_kept {
    struct tu_network_kept *next;
    tu_network_header header;
    void *parcel;              /* of the backend, with the data; NULL: the data follows */
    const unsigned char *data; /* of header.… bytes */
    size_t bytes;
} tu_network_kept;

/* Bytes of one rank for groups that have no side here yet. A sender is at most a window ahead in each group; whoever
 * sends more sends to many groups of which this rank has used none. */
#define TU_NETWORK_ORPHANS_MOST ((uint64_t)128 << 20)
#define TU_NETWORK_CLOSED 1024

typedef struct tu_network_revocation tu_network_revocation;

/* Ranks that are being asked what they do. */
typedef struct tu_network_inquiry {
    uint64_t number; /* never 0, and never used again in the network */
    tu_doing *doings;
    int count;
} tu_network_inquiry;

typedef struct tu_network_peer {
    bool known, lost, gone;
    _Atomic bool connected; /* set once, with the lock held; calls look without it */
    bool heard;             /* something came from it, so it is connected to this rank */
    bool parted;            /* it has read everything that this rank sent before it closes its world */
    int64_t lost_at;
    uint64_t door;
    size_t address_bytes;
    unsigned char *address;
    char why[160];
    bool cut;                      /* this rank ends the connection, as soon as it is out of UCX */
    bool bade;                     /* it was told that this world closes */
    int64_t refused_at;            /* a connection to it could not be made; 0: none failed */
    uint64_t answering;            /* bytes that it asked for and that have not left */
    uint64_t orphaned;             /* bytes that it has among the orphans */
    int64_t asked_at, answered_at; /* whether the way to it is open */
    uint64_t puts, asked, arrived; /* puts to it; up to which it was asked whether they arrived, and said so */
    uint64_t written, flushed;     /* puts by key to it, and how many of them have arrived */
    /* When it was last asked, and when those puts were all that are known to have arrived: values of tu_network.mark */
    uint64_t asked_mark, arrived_mark, flushed_mark;
    bool flushing;     /* a flush is under way */
    int revocations;   /* of its keys that are not answered yet, or whose key may be met yet */
    uint64_t question; /* inquiry that it has not answered; 0: none */
} tu_network_peer;

struct tu_network {
    tutti_world *world;
    const tu_network_part *part;
    void *state; /* of the part */
    size_t most;
    uint64_t door;
    pthread_mutex_t lock;    /* of everything below, and of the part */
    pthread_mutex_t looking; /* one thread at a time looks up and connects */
    tu_network_peer *peers;  /* by world rank */
    tu_network_group *groups;
    tu_network_kept *orphans,
        **orphans_end;                  /* for groups that have no side here yet, in the order in which they came */
    uint64_t closed[TU_NETWORK_CLOSED]; /* keys of the groups whose sides ended last: what comes is for nobody */
    unsigned closed_count;
    int callers;        /* threads in an operation: between tu_network_enter and tu_network_leave */
    uint64_t entries;   /* how many have entered so far */
    uint64_t drives;    /* how often somebody has driven it */
    int sleepers, bell; /* threads that sleep on the descriptor and on this eventfd */
    bool stirred;       /* something came or left since the last look */
    bool settling;      /* a group has something to send on */
    bool cutting;       /* a peer is to be cut off */
    bool ending, napping;
    bool handed_over; /* a caller sleeps on its bell: the thread is to drive */
    uint64_t tokens;  /* the last that was given to a get */
    uint64_t mark; /* puts of any kind to anybody so far: whoever waits for those before it notes it when he begins */
    tu_network_share *shares;
    uint64_t share_numbers; /* the last that was given to one */
    tu_network_revocation *revocations;
    bool revoking; /* some of them may be answered now */
    struct {
        uint64_t messages, bytes;
    } sent[TU_NETWORK_KINDS];    /* so far, by kind; a fragment counts as a message */
    int64_t asked_way;           /* when somebody last asked how a way fares */
    pthread_mutex_t inquiring;   /* one thread at a time asks; taken before `lock` */
    tu_network_inquiry *inquiry; /* NULL: nobody asks */
    uint64_t inquiries;          /* the last number that was given to one */
    pthread_t thread;
    pthread_cond_t leaving; /* the last caller left while the thread naps, or the network ends */
};

#define TU_NETWORK_WINDOW ((uint64_t)4 << 20) /* bytes that a sender may be ahead of a member */
/* Of a fragment, besides its data: a message without data is not for nothing. */
#define TU_NETWORK_COST ((uint64_t)256)

/* How far a member and this rank are in each other's messages. */
typedef struct tu_network_flow {
    uint64_t sent, taken; /* to the member, and by it */
    uint64_t owed;        /* taken from it and not told yet */
} tu_network_flow;

/* Letters of a member. */
typedef struct tu_network_letters {
    tu_network_kept *first, **end;
    uint64_t sent, taken, owed; /* as in tu_network_flow */
} tu_network_letters;

#define TU_NETWORK_HISTORY 64
struct tu_network_group {
    tu_network_group *next; /* of the network */
    tu_network *network;
    tutti_group *group;
    int *member_of; /* world rank -> member, -1: none */
    tu_network_flow *flows;
    uint64_t sequence;
    tu_network_said said;
    struct {
        uint64_t sequence, signature;
    } history[TU_NETWORK_HISTORY];
    tu_receipt *receipts;
    tu_dispatch *outgoing; /* in order */
    tu_network_kept *kept; /* in order */
    int other;             /* member that called something else; -1: none */
    tu_network_said other_said;
    bool unequal; /* with `other`: see tu_network_other_call */
    uint64_t sent_bytes, expected_bytes;
    tu_network_letters *letters;   /* by member */
    _Atomic uint32_t letter_count; /* that were not taken; written with the lock held */
    tu_network_flow *puts;         /* by member */
    tu_network_window *windows;
    tu_network_fetch *gets;
};

/* With the lock held. */
void tu_network_drive(tu_network *network); /* progress, and what follows from it */
/* The same until ready(argument), which only looks, or so many looks have found nothing; whether it is. */
bool tu_network_drive_until(tu_network *network, int looks, bool (*ready)(void *argument), void *argument);
/* Sleeps until something comes, or the milliseconds are over. Under the lock, which is given up meanwhile. */
void tu_network_sleep(tu_network *network, int milliseconds);
/* Whatever came from the wire; nothing of it is believed. As tu_network_events.arrived. */
bool tu_network_arrived(void *owner, const void *header, size_t header_bytes, const void *data, size_t bytes,
                        void *parcel);
void tu_network_lost(void *owner, int rank, const char *why); /* owner: the network */
void tu_network_own(tu_network *network, int peer, tu_network_kind kind, uint64_t key, uint64_t sequence,
                    uint64_t offset, const tu_network_said *said, const void *data, size_t bytes);
/* The same in two steps: room for the data lies behind what is returned; NULL: it cannot be sent. */
tu_dispatch *tu_network_own_begin(tu_network *network, int peer, size_t bytes);
void tu_network_own_send(tu_network *network, tu_dispatch *dispatch, const tu_network_header *header);
void tu_network_fragment(tu_network *network, tu_dispatch *dispatch, const tu_network_header *header, const void *data,
                         size_t bytes);
void tu_network_free_kept(tu_network *network, tu_network_kept *kept);
uint64_t tu_network_orphan_cost(const tu_network_kept *kept);
/* What came for a group; true: the data is kept until tu_network_free_kept. */
bool tu_network_group_arrived(tu_network_group *side, const tu_network_header *header, const void *data, size_t bytes,
                              void *parcel);
tu_network_kept *tu_network_keep(const tu_network_header *header, const void *data, size_t bytes, void *parcel);
void tu_network_group_settle(tu_network_group *side);
void tu_network_wake(const tu_network *network); /* whoever of this rank sleeps on its bell */
/* Memory: network_memory.c. Likewise. */
void tu_network_memory_arrived(tu_network_group *side, int member, const tu_network_header *header, const void *data,
                               size_t bytes);
void tu_network_fence_arrived(tu_network *network, int rank, uint64_t puts); /* so many puts of this rank arrived */
void tu_network_fence_needless(tu_network *network, int rank); /* nobody is there any more for whom they could */
void tu_network_fence_written(tu_network *network, int rank);  /* one more by key */
/* So many of these have arrived, and all that were put before the mark. */
void tu_network_fence_flushed(tu_network *network, int rank, uint64_t written, uint64_t mark);
/* Shares: network_direct.c. Likewise. */
/* Whether all by key that were put before the mark have arrived; begins to see to it. */
bool tu_network_flushed(tu_network *network, int rank, uint64_t mark);
void tu_network_moved(void *owner, void *token, bool good);
void tu_network_revoke_arrived(tu_network *network, int rank, uint64_t number);
void tu_network_revoked_arrived(tu_network *network, int rank, uint64_t number);
void tu_network_answer_revocations(tu_network *network);
/* Questions about what ranks do: network_inquiry.c. Likewise. */
void tu_network_inquire_arrived(tu_network *network, const tu_network_header *header);
void tu_network_doing_arrived(tu_network *network, const tu_network_header *header, const void *data, size_t bytes);
/* Without the lock: see tutti_world.inquire_hosts. */
void tu_network_inquire(tutti_group *group, tu_doing *doings, int count);
/* Without the lock, when the network ends. */
void tu_network_shares_close(tu_network *network);
void tu_network_revocations_free(tu_network *network);
/* Without the lock: see tutti_world.fence_hosts. */
tutti_status tu_network_fence(tutti_group *group, const tu_operation_info *info);
void tu_network_forget_group(tutti_group *group);    /* see tutti_world.forget_hosts */
tutti_status tu_network_publish(tutti_world *world); /* see tutti_world.publish_hosts */
/* As tu_network_lost, by this rank's own decision: the other end is to learn of it. With the lock held. */
void tu_network_cut(tu_network *network, int rank, const char *why);
tu_way tu_network_way(tutti_world *world, int rank, int64_t since, bool make); /* see tutti_world.way_to_hosts */
bool tu_network_asked(tutti_group *group, int member, uint64_t *sequence, char *text,
                      size_t bytes);                   /* see tutti_world.asked_by_hosts */
tu_network *tu_network_find(const tutti_world *world); /* NULL: the world has none */
/* Connects to a rank, if it has left its record and nobody else is about it. Without the lock. */
tutti_status tu_network_try_connect(tu_network *network, int rank);
/* Letters: network_letter.c. Likewise. */
tutti_status tu_network_letters_make(tu_network_group *side);
void tu_network_letters_free(tu_network_group *side);
bool tu_network_letter_arrived(tu_network_group *side, int member, const tu_network_header *header, const void *data,
                               size_t bytes, void *parcel);
void tu_network_letters_settle(tu_network_group *side, int rank); /* there is a connection to that rank now */
void tu_network_letter_keep(tu_network_group *side, int member, tu_network_kept *kept);
void tu_network_letter_read(tu_network_group *side, int member, uint64_t bytes);
tutti_status tu_network_get(tutti_world *world, tu_network **network);
/* Where this rank can be reached, in the store (network_reach.c). */
tutti_status tu_network_leave_record(tu_network *network);
/* Reads the record of a rank, if it is there already. */
tutti_status tu_network_look_once(tu_network *network, int rank);
/* To a rank whose record is known. */
tutti_status tu_network_connect_to(tu_network *network, int rank);
/* Peers that this rank is connected to. */
int tu_network_connections(tu_network *network);

#endif
