/* SPDX-License-Identifier: Apache-2.0
 *
 * A job: what the ranks of one world on one host share. One tu_job per rank; process-ranks and thread-ranks alike.
 *
 * Ranks here are JOB RANKS: 0 to size-1 among the ranks of this host, in the order of their world ranks. The world
 * layer translates.
 *
 * What a job gives the layers above:
 *   - the job segment: one sealed memfd "tutti-job-<id>", mapped by every rank (thread-ranks share one mapping). It
 *     holds the header, a slot per rank (pid, start time, state, keeper mutex, bell, exit status) and a flight recorder
 *     per rank (recorder.h), so that all of it survives any rank. `tutti ps` finds it in /proc/PID/fd (inspect.h).
 *   - connections: a close-on-exec SEQPACKET socket between each pair of process-ranks, checked by kernel credentials,
 *     job nonce and rank; mailboxes in memory between thread-ranks. Used through tu_job_exchange.
 *   - segments, heap and mappings: reserved shared memory that peers can map (segment.h).
 *   - liveness: a robust mutex per rank, held by its keeper thread, tells a death (also exec) at once; sockets and
 *     pidfds confirm it (liveness.h).
 */
#ifndef TU_JOB_JOB_H
#define TU_JOB_JOB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <tutti/status.h>
#include <tutti/store.h>

#include "base/log.h"
#include "base/wait.h"

typedef struct tu_job tu_job;
typedef struct tu_recorder tu_recorder;
typedef struct tu_piece tu_piece;
typedef struct tu_mapping tu_mapping;

/* Opening meets the others through a store: each rank publishes where it can be reached, reads the records of all,
 * finds those that share its host (same boot id, same user; proved by connecting, mapping the job segment and reading
 * its nonce), and connects to them. Ranks of the same process (same pid and a memory store) become thread-ranks of one
 * job. */
/* Rank 0, of whose process more depends than of others': it may serve the store. */
typedef struct tu_first_rank {
    int pid; /* 0: not known yet, or on another host */
    uint64_t start_time;
} tu_first_rank;

/* Notes its process, as far as it is known before its record: it serves the store. */
void tu_first_rank_note(tu_first_rank *first, int pid);
bool tu_first_rank_runs(const tu_first_rank *process);
/* TUTTI_ERROR_DEAD, naming rank 0, when it is known and its process is over; else TUTTI_OK. */
tutti_status tu_first_rank_check(const tu_first_rank *first);

typedef struct tu_job_options {
    tutti_store *store; /* keys are already private to this world and generation; used only during open */
    const char *name;   /* of the world, for messages and `tutti ps` */
    int world_rank;
    int world_size;
    int64_t deadline;
    const _Atomic uint32_t *interrupt; /* of the world; nonzero ends waits */
    tu_log *log;
    int64_t spin;             /* setting TUTTI_SPIN; -1 chooses */
    bool homes;               /* setting TUTTI_HOMES */
    int64_t recorder_entries; /* setting TUTTI_TRACE_ENTRIES of whoever makes the job's page; 0: the default */
    tu_first_rank *first;     /* filled as soon as it is known; may be NULL */
} tu_job_options;

tutti_status tu_job_open(const tu_job_options *options, tu_job **job);
/* Instead of opening, by the rank or by its parent: the calling thread's error is told to those that wait for this rank
 * in the store. Where it has opened, nothing happens. `pid` is the rank's. */
void tu_job_cannot_open(const tu_job_options *options, int pid);

/* ---- a newcomer in a dead rank's place (join.c) ----
 *
 * The newcomer announces itself: how it can be reached. Whoever lives admits it: connects to it, and one of them, the
 * founder, sends the job segment. The newcomer joins when all have connected, and takes the dead rank's slot. The layer
 * above carries the records between them. All ranks of the world are on this host. */

#define TU_KEY_BYTES 16

/* Who is at a job rank now. Travels through a store. */
typedef struct tu_seat {
    int32_t pid;
    uint32_t fresh; /* 1: a newcomer; the rest says how to reach it */
    uint64_t start_time;
    uint8_t socket[TU_KEY_BYTES], nonce[TU_KEY_BYTES];
} tu_seat;

typedef struct tu_joining tu_joining;

/* Begins to listen; *mine is what the others need. Ended by tu_job_join, or tu_joining_free. */
tutti_status tu_job_announce(const tu_job_options *options, tu_joining **joining, tu_seat *mine);
void tu_joining_free(tu_joining *joining);
/* seats: of all ranks, this one's included. page: the nonce of the job segment. */
tutti_status tu_job_join(tu_joining *joining, const tu_seat *seats, int founder, const uint8_t page[TU_KEY_BYTES],
                         tu_job **job);

void tu_job_seat(const tu_job *job, int rank, tu_seat *seat); /* who is there; not fresh */
/* Admits a newcomer at `rank`, which is dead; the founder also sends the job segment. After a failure it stays dead. */
tutti_status tu_job_admit(tu_job *job, int rank, const tu_seat *seat, bool founder, int64_t deadline);
void tu_job_page_nonce(const tu_job *job, uint8_t nonce[TU_KEY_BYTES]);
uint32_t tu_job_incarnation(const tu_job *job, int rank); /* how often a newcomer has taken that rank */

/* Local, waits for nobody: says goodbye to all peers (state CLOSED in its slot, ring their bells), joins the keeper,
 * closes sockets, drops this rank's reference to the job segment. Mappings still held stay valid until released. */
void tu_job_close(tu_job *job);

/* The first part of closing alone: tells the peers that this rank is gone. Pieces and mappings can still be released
 * until tu_job_close, which may come later: for a world that is closed while handles are alive. */
void tu_job_goodbye(tu_job *job);

int tu_job_rank(const tu_job *job);                 /* this rank's job rank */
int tu_job_size(const tu_job *job);                 /* ranks of the world on this host */
int tu_job_world_rank(const tu_job *job, int rank); /* from job rank to world rank */
bool tu_job_threads(const tu_job *job);             /* all ranks of the job are threads of this process */
int tu_job_cores(const tu_job *job);                /* cores that the job's ranks may use together */
void tu_job_go_home(const tu_job *job); /* sends the calling thread to this rank's home, if it has one: base/home.h */
const char *tu_job_host(const tu_job *job, int world_rank); /* host name that a world rank published */
/* A node is a set of ranks that share memory: one host, one user. All ranks number them alike, by their lowest ranks.
 */
int tu_job_nodes(const tu_job *job); /* how many the world has */
int tu_job_node(const tu_job *job, int world_rank);
bool tu_job_forked(const tu_job *job); /* true in a forked child (a wiped page tells) */

/* Fills everything of *wait but check and argument: bell, sleepers, interrupt, departures, ladder. */
void tu_job_wait_init(const tu_job *job, int64_t deadline, tu_wait *wait);

/* Wakes every thread of this rank that waits in the job, to look around. */
void tu_job_wake(tu_job *job);

/* Rings a peer's bell after a store that it may wait for. */
void tu_job_ring(tu_job *job, int rank);
/* For hot paths: what tu_bell_ring takes. */
const _Atomic uint32_t *tu_job_sleepers(const tu_job *job);
tu_bell *tu_job_bell(const tu_job *job, int rank);

/* Says to all that this rank takes no part any more in the agreement of that key, which is never 0. */
void tu_job_refuse(tu_job *job, uint64_t key);
bool tu_job_refused(const tu_job *job, int rank, uint64_t key); /* whether a rank has said so */

const tu_recorder *tu_job_recorder(const tu_job *job, int rank); /* any rank's, for reading; one's own for writing */
const struct tu_page *tu_job_page(const tu_job *job);            /* the job segment (page.h), for reading */

/* ---- the exchange: a bounded all-gather of small records, with one optional piece of shared memory each ---- */

typedef struct tu_exchange {
    const int *ranks; /* job ranks of the members, in group order */
    int count;
    int me;                /* index of this rank in `ranks` */
    uint64_t key;          /* the same on all members and on no other set of ranks: a group's uid */
    uint64_t sequence;     /* of exchanges under this key */
    const char *purpose;   /* "rendezvous", "group", …: compared between members; differing is TUTTI_ERROR_MISMATCH
                              showing both */
    const void *payload;   /* this rank's record */
    size_t bytes;          /* at most TU_EXCHANGE_BYTES; must be the same on all members, else MISMATCH */
    const tu_piece *piece; /* shared memory of this rank that the others shall map, or NULL */
    const int *descriptor; /* a descriptor that the others shall get a copy of, or NULL; not together with piece */
    int *descriptors; /* room for `count`, or NULL when nobody gives one: copies that the caller closes, close-on-exec,
                         one's own included; -1 for a member that gave none */
    bool *complete;   /* NULL, or is set: whether all records went their ways and agree in purpose and size. Then
                         `payloads` are there, and a failure (a piece that cannot be mapped) concerns this rank alone */
    int64_t deadline;
    const _Atomic uint64_t *ended; /* the group's state word, or NULL: more than `ended_above` ends the exchange with
                                      TUTTI_ERROR_STATE and no message */
    uint64_t ended_above;
    /* Asked every 20 ms about each member that has not come: a failure ends the exchange with it. NULL: not asked. */
    tutti_status (*compare)(void *argument, int member);
    void *argument;
} tu_exchange;

#define TU_EXCHANGE_BYTES 4096

/* payloads: room for count * bytes, in group order, one's own included; NULL: this rank only tells. mappings: NULL when
 * nobody gives a piece, else
 * count entries; mappings[i] is a reference to member i's piece mapped here (one's own included), NULL for a member
 * that gave none. Two threads may run exchanges with different keys at once. Errors: TIMEOUT (message: who came, who
 * did not), DEAD/GONE (message: which rank, from liveness), MISMATCH, PROTOCOL, INTERRUPTED, MEMORY, LIMIT. After an
 * error nothing is held. The ranks at fault are in the error's detail, as indices into `ranks`. */
tutti_status tu_job_exchange(tu_job *job, const tu_exchange *exchange, void *payloads, tu_mapping **mappings);

#endif
