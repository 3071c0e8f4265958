/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the job: what its files share with each other and with nobody else.
 *
 *     open.c      opening and closing; the getters
 *     join.c      a newcomer in a dead rank's place
 *     meet.c      records in the store: who is where
 *     connect.c   sockets, hellos, and the passing of the job segment
 *     wire.c      messages with descriptors over the sockets
 *     exchange.c  the mailbox, and the exchange on it
 *     segment.c   memfds: making, checking, mapping, importing; mappings
 *     heap.c      small pieces carved from segments
 *     ledger.c    may this much be reserved?
 *     liveness.c  keeper, probe, and the story of a death
 *     process.c   what /proc and pidfds say about a process
 *
 * Locks, in the order in which they are taken: heap, atlas; a mailbox's and a peer's send lock are never held together
 * with another, except that filing a message takes the atlas's lock first and gives it back.
 */
#ifndef TU_JOB_INNER_H
#define TU_JOB_INNER_H

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "job/job.h"
#include "job/liveness.h"
#include "job/page.h"
#include "job/recorder.h"
#include "job/segment.h"

#define TU_LOOK_INTERVAL (20 * TU_MILLISECOND) /* longest time between two looks at who lives */

/* ---- process.c ---- */

#define TU_PLACE_BYTES 128
#define TU_HOST_BYTES 65

/* What processes must have in common to be one job: boot, network namespace and pid namespace. */
tutti_status tu_process_place(char place[TU_PLACE_BYTES]);
uint64_t tu_process_start_time(int pid); /* 0: no such process, or no /proc */
/* Runs, as far as anybody can tell: not a zombie, and the same process that started then. */
bool tu_process_runs(int pid, uint64_t start_time);
/* -1 when it cannot be had; close-on-exec. start_time 0: whoever has that number now. */
int tu_pidfd_open(int pid, uint64_t start_time);
bool tu_pidfd_exited(int pidfd);

typedef struct tu_fate {
    bool exited;  /* the process is no more (or a zombie); false: it still exists */
    bool exiting; /* about to end */
    bool known;
    int exit_code, signal;
} tu_fate;
void tu_process_fate(int pid, uint64_t start_time, int pidfd, tu_fate *fate);
/* The name of a running process; "" when it cannot be had. */
void tu_process_name(int pid, char *name, size_t bytes);

/* ---- segments, heap, mappings ---- */

/* Imported segments that live, so that a second import of one is the same mapping. Outlives the job while a mapping
 * does. */
typedef struct tu_atlas tu_atlas;
typedef struct tu_heap tu_heap;

struct tu_segment {
    _Atomic uint32_t references;
    char *base;
    size_t bytes; /* of the whole file, mark included */
    int fd;       /* of one's own; -1 of an import */
    uint64_t id;  /* unique under its owner */
    int owner;    /* job rank */
    bool heap;    /* carved into pieces; permanent */
    bool huge;
    tu_atlas *atlas;    /* where an import is listed; NULL: one's own */
    tu_segment *next;   /* in the atlas */
    _Atomic bool *sent; /* own heap segment: which peers have its descriptor; looked at under the peer's send lock */
};

/* What a message says about a piece. */
typedef struct tu_piece_wire {
    uint64_t id; /* of the segment; 0: no piece */
    uint64_t segment_bytes;
    uint64_t offset, bytes;
    uint32_t heap, huge;
} tu_piece_wire;

tutti_status tu_segment_make(tu_job *job, const char *what, size_t bytes, size_t alignment, int huge, bool heap,
                             tu_segment **segment);
void tu_segment_drop(tu_segment *segment);

tutti_status tu_atlas_create(int owners, tu_atlas **atlas);
void tu_atlas_drop(tu_atlas *atlas);
/* Finds or maps the segment that `wire` describes; fd -1: it must be known already. *known tells whether it was.
 * One reference for the caller, and for a heap segment one that the job keeps until it closes. Takes the descriptor
 * over. */
tutti_status tu_segment_import(tu_job *job, int owner, const tu_piece_wire *wire, int fd, tu_segment **segment);
/* Gives up the job's references to heap segments of peers. */
void tu_atlas_forget(tu_atlas *atlas);

void tu_piece_describe(const tu_piece *piece, tu_piece_wire *wire);
/* A mapping of a part of `segment`, for job rank `holder`. counted: the piece's count for that rank has been raised
 * already. */
tutti_status tu_mapping_make(tu_job *job, tu_segment *segment, const tu_piece_wire *wire, int holder, bool counted,
                             tu_mapping **mapping);
/* The count of mappings of a heap piece that a rank holds: raised by the sender of a piece on behalf of the receiver,
 * lowered by whoever releases the mapping. NULL for a piece that is a segment of its own. */
_Atomic uint32_t *tu_piece_holds(const tu_job *job, const tu_segment *segment, uint64_t offset, int holder);
size_t tu_holds_bytes(const tu_job *job); /* room for the counts, before each heap piece */

tutti_status tu_heap_create(tu_job *job, tu_heap **heap);
void tu_heap_free(tu_heap *heap);
tutti_status tu_heap_alloc(tu_heap *heap, const char *what, size_t bytes, size_t alignment, tu_piece *piece);
void tu_heap_give_back(tu_heap *heap, const tu_piece *piece);
/* The descriptor of segment `id` did not reach that rank: the next message with a piece of it brings it again. */
void tu_heap_send_again(tu_heap *heap, uint64_t id, int rank);

/* ledger.c: notes that `bytes` are about to be reserved, or says why they cannot be. */
tutti_status tu_ledger_begin(tu_job *job, const char *what, size_t bytes);
void tu_ledger_end(tu_job *job, size_t bytes, bool reserved); /* they are now, or will not be */
void tu_ledger_return(tu_job *job, size_t bytes);             /* they were, and are no more */
/* TUTTI_ERROR_LIMIT when RLIMIT_FSIZE (ulimit -f) is below `bytes`: the kernel would kill the process by SIGXFSZ when
 * it sized shared memory beyond it. */
tutti_status tu_file_size_check(const char *what, size_t bytes);
/* The error for an mmap that failed: names RLIMIT_AS or vm.max_map_count where that is the reason. */
tutti_status tu_map_error(int error_number, const char *what, size_t bytes);

/* ---- messages ---- */

#define TU_WIRE_MAGIC UINT32_C(0x54755469)
#define TU_PURPOSE_BYTES 32

typedef enum tu_wire_kind {
    TU_WIRE_PAGE = 1, /* the founder's: the job segment's descriptor */
    TU_WIRE_EXCHANGE = 2,
    TU_WIRE_NEED = 3 /* `key` is the id of a heap segment whose descriptor was lost on the way: send it again */
} tu_wire_kind;

typedef struct tu_wire {
    uint32_t magic, kind;
    uint64_t key, sequence;
    int32_t sender; /* job rank */
    uint32_t bytes; /* of the payload that follows */
    char purpose[TU_PURPOSE_BYTES];
    tu_piece_wire piece;
    uint32_t descriptor; /* 1: a descriptor that is no piece comes along */
    uint32_t unused;
} tu_wire;

typedef struct tu_message {
    struct tu_message *next;
    tu_wire wire;
    tu_mapping *mapping; /* of the piece, NULL when none */
    tutti_status status; /* why the piece could not be mapped */
    bool has_descriptor;
    int descriptor;          /* closed with the message; when has_descriptor */
    tutti_error_copy *error; /* in words; may be NULL even so, when there was no memory for it */
    unsigned char payload[];
} tu_message;

void tu_message_free(tu_message *message);

/* An exchange that ended before all had come: what still arrives for it is dropped. */
typedef struct tu_orphan {
    struct tu_orphan *next;
    uint64_t key, sequence;
    int awaited; /* entries of `from` that are true */
    bool from[]; /* by job rank */
} tu_orphan;

/* Messages for one rank that nobody has taken yet. Thread-ranks put into each other's; a process-rank files what its
 * sockets bring. */
typedef struct tu_mailbox {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    tu_message *first, **last;
    tu_orphan *orphans;
    bool receiving; /* a thread reads the sockets, on behalf of all */
    bool closed;
} tu_mailbox;

tutti_status tu_mailbox_init(tu_mailbox *mailbox);
void tu_mailbox_end(tu_mailbox *mailbox);
void tu_mailbox_put(tu_mailbox *mailbox, tu_message *message); /* takes it over */
void tu_mailbox_wake(tu_mailbox *mailbox);
void tu_mailbox_close(tu_mailbox *mailbox); /* drops everything, and what still comes */

/* ---- peers and the job itself ---- */

typedef struct tu_peer {
    int world_rank;
    int pid;
    uint64_t start_time;
    int fd;             /* connection, non-blocking; -1 for oneself and between threads */
    int pidfd;          /* -1 when there is none */
    _Atomic bool ended; /* end-of-file was read from it, or it broke */
    bool to_write;      /* `events` also tells when it can be written to; the receiving thread's */
    pthread_mutex_t send_lock;
    _Atomic int64_t next_look; /* when to look at pidfd and socket again; any thread */
} tu_peer;

/* What thread-ranks of one process share; a process-rank has one alone. */
typedef struct tu_house {
    _Atomic int32_t shares; /* ranks that have not given up theirs: meet.c says who gives up for one that never came */
    int size;
    bool threads;
    tu_page *page;
    size_t page_bytes;
    int page_fd;
    unsigned char *fork_page; /* 1; wiped in a forked child */
    tu_mailbox *mailboxes;    /* `boxes` of them: one per thread-rank, or this rank's */
    int boxes;
} tu_house;

tutti_status tu_house_create(int size, bool threads, tu_house **house);
void tu_house_drop(tu_house *house, int shares);
/* Makes and prepares the job segment. world_ranks: of the job's ranks. */
tutti_status tu_house_found(tu_house *house, const tu_job_options *options, const char *id, const uint8_t *nonce,
                            const int *world_ranks);
/* Maps and checks one that came from the founder. Takes the descriptor over. */
tutti_status tu_house_enter(tu_house *house, int fd, const uint8_t *nonce, const char *whose);

struct tu_job {
    tu_house *house;
    tu_page *page; /* house->page */
    tu_slot *slot; /* this rank's */
    int rank, size;
    int world_rank, world_size;
    char name[TU_NAME_BYTES];
    tu_peer *peers;               /* by job rank */
    tu_recorder *recorders;       /* by job rank */
    char (*hosts)[TU_HOST_BYTES]; /* by world rank */
    int *nodes;                   /* by world rank: see tu_job_node */
    int node_count;
    int cores;
    int home;     /* CPU on which this rank begins; -1: wherever it is */
    tu_wait wait; /* what tu_job_wait_init copies */
    const _Atomic uint32_t *interrupt;
    tu_log *log;
    tu_mailbox *mailbox;
    int events; /* epoll over the connections, so that a message costs the same among any number of ranks; -1 none */
    tu_heap *heap;
    tu_atlas *atlas;
    _Atomic uint64_t segments; /* how many this rank has made: their ids */
    _Atomic uint32_t refusals; /* how many agreements it has left */
    pthread_t keeper;
    bool keeper_runs;
    bool robust; /* the kernel looks after robust mutexes, as user-mode emulators do not */
    sem_t keeper_holds, keeper_stop;
};

/* liveness.c */
bool tu_robust_works(void);
tutti_status tu_keeper_start(tu_job *job);
void tu_keeper_stop(tu_job *job);
/* Changes this rank's own state to CLOSED or DEAD, once; tells everybody. */
void tu_depart(tu_job *job, tu_rank_state state, const char *why);
void tu_ring_all(tu_job *job);
/* Whether the process of a rank is certain not to run any more. */
bool tu_rank_exited(tu_job *job, int rank);

struct tu_opening;
/* open.c: parts of opening that a newcomer takes too (join.c). */
tutti_status tu_job_make(const tu_job_options *options, tu_job **made);
tutti_status tu_job_settle(struct tu_opening *opening);
tutti_status tu_job_take_slot(tu_job *job, uint64_t start_time);
void tu_job_end(tu_job *job); /* undoes any part of opening */
void tu_job_ladder(tu_job *job, const tu_job_options *options);

/* connect.c: one try to connect to a rank, whose record is there; peers[rank].fd is -1 when it is not possible now. */
tutti_status tu_connect_one(struct tu_opening *opening, int rank);
/* heap.c, segment.c: what a dead rank held and gave is forgotten. */
void tu_heap_forget(tu_heap *heap, int rank);
void tu_atlas_forget_owner(tu_atlas *atlas, int rank);
/* exchange.c: drops what came from that rank and was not taken. */
void tu_mailbox_forget(tu_mailbox *mailbox, int rank);
/* wire.c: hears the new connection of a rank. */
tutti_status tu_wire_hear(tu_job *job, int rank);

/* connect.c: connects to all local peers, and gives or gets the job segment. */
struct tu_opening;
tutti_status tu_connect(struct tu_opening *opening);
tutti_status tu_listen(int world_size, int *listener, uint8_t name[TU_NONCE_BYTES]);

/* wire.c: sends one message without waiting: TUTTI_OK; TUTTI_ERROR_EMPTY and no message when it would have to wait
 * (then *crowded tells whether too many descriptors are on their way); TUTTI_ERROR_GONE and no message when the peer is
 * not there any more. */
tutti_status tu_wire_send(tu_job *job, int to, const tu_wire *wire, const void *payload, const tu_piece *piece,
                          int descriptor, bool *crowded);
/* Makes job->events for the connections that have been made. */
tutti_status tu_wire_listen(tu_job *job);
/* Waits up to `nanoseconds` for messages and files at most one of each peer; *any tells whether there were any.
 * writable: by job rank, peers for whose socket to become writable is also waited for; may be NULL. Only the receiving
 * thread calls it. */
tutti_status tu_wire_receive(tu_job *job, const bool *writable, int64_t nanoseconds, bool *any);

/* Reads one record; returns its length, 0 at the end, -1 with errno (EAGAIN: nothing there; EBADMSG: not a message of
 * ours, and its descriptors are closed). lost: a descriptor came and there was no room for it in this process's table.
 */
ssize_t tu_wire_take(int fd, tu_message *message, size_t room, int *descriptor, bool *lost);
/* The founder's first message on a connection; returns an errno or 0. */
int tu_wire_send_page(int fd, int sender, int page_fd);

/* meet.c: see there. */
typedef struct tu_record {
    uint64_t magic;
    uint32_t version;
    uint32_t bytes; /* of this record as published */
    int32_t world_rank, world_size;
    int32_t pid;
    uint32_t uid;
    uint64_t start_time;
    uint64_t house;                 /* rank 0 of thread-ranks: address of the tu_house */
    uint8_t nonce[TU_NONCE_BYTES];  /* the job's, when this rank founds it; and asked of whoever connects to it */
    uint8_t socket[TU_NONCE_BYTES]; /* name of its abstract socket */
    char id[TU_ID_BYTES];
    char place[TU_PLACE_BYTES];
    char host[TU_HOST_BYTES];
    int32_t failed; /* a tutti_status: this rank, or `by` on its behalf, gave up; the text follows */
    int32_t by;
    uint64_t writer; /* random, so that a writer recognises its own */
    char text[512];  /* published only where there is one */
} tu_record;

typedef struct tu_opening {
    const tu_job_options *options;
    tu_job *job;
    tu_record mine;
    tu_record *records; /* by world rank; NULL in a world of one */
    int *local;         /* job rank -> world rank */
    int rank, size;     /* in the job */
    bool threads;       /* the store is in memory: the ranks are threads of this process */
    tu_house *house;    /* thread-rank 0: made before its record is published */
    int listener;
    bool published; /* the record is in the store */
    bool told;      /* another rank gave up first, and said so */
    bool intruder;  /* another process has this rank already */
    int largest;    /* world size that any rank claims */
    int64_t next_look;
    int known;                 /* records of ranks below it have been looked for, the first time round */
    int founder;               /* job rank that sends the job segment */
    const uint8_t *page_nonce; /* of the job segment; NULL: the founder's */
    const bool *fresh;         /* of a newcomer: which ranks are new, too; NULL: all open together */
} tu_opening;

/* Which process this is, and what it asks for. */
void tu_record_self(const tu_job_options *options, tu_record *mine);
tutti_status tu_meet_prepare(tu_opening *opening);
tutti_status tu_meet_records(tu_opening *opening);
/* Another rank's reason to give up, if one has said so; else TUTTI_OK. */
tutti_status tu_meet_trouble(tu_opening *opening);
/* The error for a rank of this host whose process is over; pidfd -1: none. What it said itself comes first. */
tutti_status tu_meet_died(tu_opening *opening, const tu_record *record, int pidfd);
/* Tells everybody that this rank gives up, with the calling thread's error. Gives up shares of the house for ranks that
 * now cannot come. */
void tu_meet_give_up(tu_opening *opening);
/* The abstract address of a record's socket. */
struct sockaddr_un;
unsigned tu_socket_address(const uint8_t name[TU_NONCE_BYTES], struct sockaddr_un *address);

/* "0, 2-5": which of the ranks are marked; at most `bytes`. */
void tu_rank_names(const bool *marked, const int *names, int count, char *text, size_t bytes);
void tu_hex(const uint8_t *bytes, size_t count, char *text);
tutti_status tu_random_bytes(void *bytes, size_t count);

#endif
