/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside a world and a group: what the layers above (memory, collective, tools) may rely on.
 */
#ifndef TU_WORLD_WORLD_H
#define TU_WORLD_WORLD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <tutti/group.h>
#include <tutti/world.h>

#include "base/log.h"
#include "base/settings.h"
#include "hosts/news.h"
#include "job/job.h"
#include "job/liveness.h"
#include "job/recorder.h"
#include "job/segment.h"
#include "store/watch.h"
#include "world/attachment.h"

#define TU_HANDLE_KINDS 16
typedef struct tu_spawn_record tu_spawn_record;
typedef struct tu_events tu_events;
typedef struct tu_cause tu_cause;

#define TU_INTERRUPT_USER UINT32_C(1)  /* tutti_world_interrupt */
#define TU_INTERRUPT_CLOSE UINT32_C(2) /* tutti_world_close */

/* To a rank on another host. */
typedef enum tu_way {
    TU_WAY_OPEN = 0, /* or there is none yet */
    TU_WAY_ASKED,    /* it has not answered yet */
    TU_WAY_BROKEN,   /* it broke a moment ago, or has not answered for TUTTI_HOST_TIMEOUT */
    TU_WAY_CLOSED    /* that rank has closed its world */
} tu_way;

/* What a rank on another host does: its answer, or why there is none. */
#define TU_DOING_BYTES 320
typedef struct tu_doing {
    int rank; /* of the world */
    char text[TU_DOING_BYTES];
} tu_doing;

struct tutti_world {
    char name[64];
    int rank, size;             /* world ranks */
    int local_rank, local_size; /* equal to job rank and size */
    const char *launcher;
    bool fake, fake_error;
    tu_settings settings;
    tu_log *log;
    int64_t timeout_ns;
    tutti_store *store; /* prefixed; NULL when alone or fake */
    tu_watch *watch;    /* over waits on the store; NULL when alone or fake */
    tu_watch *calm;     /* the same for waits on behalf of some ranks, which know themselves whose deaths end them */
    tu_watch *asking;   /* over questions that the store's server answers at once, if there is one: look_for_server */
    _Atomic uint32_t moves; /* tu_news_store of the store that this rank has followed: tu_world_follow */
    _Atomic bool *mourned;  /* by world rank: its death was told by tutti_world_next_event, or a shrink left it out: it
                               ends no wait on the store any more */
    tu_job *job;            /* NULL when fake */
    tu_news *news;          /* of the launcher that started this rank; NULL: of one host, or started by another */
    int *job_rank_of;       /* world rank -> job rank, -1 on another host */
    int *node_of;           /* world rank -> node (tu_job_node); in the same block as job_rank_of */
    int node, nodes;        /* this rank's, and how many there are; a fake world has one, and no node_of */
    _Atomic(tutti_group *) group; /* of all ranks: "0", until a refill makes another */
    _Atomic uint32_t interrupt;   /* TU_INTERRUPT_…: not 0 ends waits */
    _Atomic uint32_t closed;      /* set once by tutti_world_close */
    /* Set once a backend other than the CPU's has been opened: asks the devices how the group fares. */
    _Atomic(tutti_status (*)(tutti_group *)) devices;
    _Atomic bool looked; /* for devices, at the first collective */
    /* Set once messages go to other hosts: tells members there that a group ended, quicker than the store does. */
    _Atomic(void (*)(tutti_group *, const tu_cause *)) tell_hosts;
    /* Likewise: waits until what this rank has put into memory on other hosts is there. Called by what tells others of
     * it, while there are ranks there of which that is not known. */
    _Atomic(tutti_status (*)(tutti_group *, const tu_operation_info *)) fence_hosts;
    /* Likewise: how the connection to a rank on another host fares. One that is open is asked whether it is, once after
     * `since`; where there is none, one is made if that is wanted. */
    _Atomic(tu_way (*)(tutti_world *, int, int64_t since, bool make)) way_to_hosts;
    /* Likewise: whether a member on another host waits for this rank in an operation, as it has told: its number, and
     * what it is in words. */
    _Atomic(bool (*)(tutti_group *, int member, uint64_t *sequence, char *text, size_t bytes)) asked_by_hosts;
    /* Likewise: asks ranks on other hosts what they do, for an error that names them. Waits a moment for answers, past
     * any deadline. */
    _Atomic(void (*)(tutti_group *, tu_doing *, int count)) inquire_hosts;
    /* Likewise: leaves this rank's record in the store. */
    _Atomic(tutti_status (*)(tutti_world *)) publish_hosts;
    /* Likewise: a group across hosts is released, used or not: what comes for it is for nobody. */
    _Atomic(void (*)(tutti_group *)) forget_hosts;
    _Atomic int unfenced;    /* how many these are; written with the network's lock held */
    _Atomic int32_t handles; /* 1 while open, and 1 for each live object of the layers above: see tu_world_handle */
    _Atomic int32_t batches; /* that were begun and neither ended nor cancelled: they keep their groups */
    pthread_mutex_t lock;    /* registry of groups, kinds of handles */
    tu_attachments attachments;
    struct tu_registry *registry; /* names, tags, counter: registry.h */
    struct tu_events *events;     /* collected once somebody asks for them (event.c); under `lock` */
    struct tu_faults *faults;     /* to inject; NULL: none (fault.c) */
    struct {
        const char *what;
        int count;
    } kinds[TU_HANDLE_KINDS];     /* live handles by kind, for close's list */
    const tu_spawn_record *spawn; /* of the tutti_spawn that started this rank, else NULL */
    char meeting[256];            /* where it met, in words, for "already open" and for the log */
    char address[64];             /* this host's address on the route to the meeting place; "" on one host */
    tutti_world *next;            /* in the process's list of open worlds, or of closed ones */
    tutti_group *shells;          /* groups of a closed world, without what they held: see tu_world_bury */
};

/* Why a group ended. In shared memory; written once by the rank that wins the state word. */
struct tu_cause {
    int32_t status; /* tutti_status */
    int32_t origin; /* group rank that ended it; of a part that of the whole */
    int32_t unused; /* 0; hosts send each other the struct as it lies */
    int64_t time;   /* on tu_clock_now of the origin's host */
    uint64_t sequence;
    char operation[32];
    int32_t at_fault_count;
    int32_t at_fault[TUTTI_ERROR_RANKS]; /* group ranks; of a part those of the whole */
    char message[1024];
};

/* Shared part of a group, in the piece of member 0. */
typedef struct tu_group_page {
    _Alignas(128) _Atomic uint64_t
        state; /* 0 lives; else (origin + 1) | TU_GROUP_TOLD once `cause` is complete; set by compare-and-swap */
    _Alignas(128) tu_cause cause; /* written by the winner alone, between its two steps */
    /* Votes (vote.h): attempt << 32 | (member whose proposal was chosen) + 1; by compare-and-swap, attempts only
     * rise. */
    _Alignas(128) _Atomic uint64_t decided;
    /* The exchange inside a shrink ends when it is at least the number of the vote before it: by any member whose part
     * failed, or who votes anew elsewhere; only rises (tu_shrink_abandon). */
    _Atomic uint64_t abandoned;
} tu_group_page;
#define TU_GROUP_TOLD (UINT64_C(1) << 32)

/* Behind the page lies an area, zeroed, for sends and receives: they begin without the other members, so their memory
 * must be there from the start. A channel per ordered pair and a few fragments per member (collective/packet.h). */
#define TU_AREA_CHANNEL ((size_t)640)
#define TU_AREA_FRAGMENTS 2
static inline size_t tu_area_fragment_bytes(int size) {
    return (size <= 16 ? (size_t)16 : (size_t)4) << 10;
}
static inline size_t tu_area_bytes(int size) {
    return (size_t)size * (size_t)size * TU_AREA_CHANNEL +
           (size_t)size * TU_AREA_FRAGMENTS * tu_area_fragment_bytes(size);
}

/* timeout_ns as in tutti_call. Errors of what is finished are its own; a failure is one to get a turn. */
typedef tutti_status tu_group_settle(tutti_group *group, int64_t timeout_ns);

struct tutti_group {
    tutti_world *world;
    _Atomic uint32_t references;
    char name[64];
    char description[64];
    char tag[96];
    uint64_t key;       /* uid: the same on all members, unlike any other group's of the job, never reused */
    int rank, size;     /* of this rank in the group */
    int *ranks;         /* group rank -> world rank */
    int *job_ranks;     /* group rank -> job rank, -1 on another host */
    bool local;         /* all members on this host */
    tutti_group *whole; /* of a part: the group across hosts whose `here` it is, and which outlives it; else NULL */
    _Atomic int64_t timeout_ns; /* 0: the world's */
    tu_group_page *page;      /* and its area; shared by the members on one host; private memory for fake groups, groups
                                 across hosts and of one */
    tu_mapping *page_mapping; /* NULL when the page is private */
    tu_piece page_piece;      /* of member 0: the page's memory */
    uint32_t recorder_index;  /* of the name in this rank's recorder */
    _Atomic uint64_t
        sequence; /* of the last operation begun; operations of a group are numbered from 1 in call order */
    _Atomic uint64_t messages;          /* the same for what not all members do alike (send, recv, puts, signals): see
                                           tu_operation_sequenced */
    _Atomic uint64_t completed;         /* of the last operation that this rank completed … */
    _Atomic uint64_t completed_in_turn; /* … and of the last that ended in the turn in which it was numbered: by who has
                                           the turn of the group's collectives; the later of the two counts */
    uint64_t attempts;                  /* number of this rank's last vote (vote.h); under vote_lock */
    pthread_mutex_t vote_lock;          /* one vote of a group at a time */
    uint64_t exchanges;                 /* of exchanges under `key`; under exchange_lock */
    pthread_mutex_t exchange_lock;      /* one exchange of a group at a time */
    _Atomic uint32_t departures;        /* tu_job_departures when the members were last looked at */
    _Atomic int64_t next_look;          /* when whoever only asks looks at them again */
    _Atomic uint32_t splits;            /* groups split off, for their descriptions */
    _Atomic uint64_t settled; /* of a shrunk group: last sequence that all survivors completed in the parent */
    _Atomic uint32_t destroyed;
    tu_attachments attachments;
    /* Finishes what was started on the group and goes on by itself; NULL while there is nothing of that kind. Set once,
     * by the collective layer: release there, acquire in tu_group_enter. */
    _Atomic(tu_group_settle *) settle;
    /* Of a group across hosts: the group of its members on this host, made with it; NULL: this rank is the only one.
     * When one of the two ends, so does the other. Release in tu_group_make_part, acquire in tu_group_overhear. */
    _Atomic(tutti_group *) here;
    struct tu_group_links *links; /* in the registry; NULL once destroyed */
    tutti_group *next_shell;
    bool end_told; /* its end has been made an event; under the world's lock */
};

/* Errors speak of groups that the program knows, and of their ranks: of a part it is the whole. */
static inline tutti_group *tu_group_known(tutti_group *group) {
    return group->whole != NULL ? group->whole : group;
}
int tu_group_known_rank(const tutti_group *group, int member);

/* ---- for operations on a group (collectives, rendezvous, signals …) ---- */

/* The entry check of every operation: argument not NULL, not forked, world open, group not ended (then the first cause
 * again), no member dead (then the group ends), faults to inject. Takes the next sequence number, fills
 * info->group_key, group_index, sequence and timeout_ns, begins the record. call_timeout_ns as in tutti_call. What was
 * started before and goes on by itself is finished first: it may exchange records with the members, and so may the
 * caller. */
tutti_status tu_group_enter(tutti_group *group, int64_t call_timeout_ns, tu_operation_info *info, int64_t *deadline,
                            uint64_t *ticket);

/* An injected fault can ask that a call does nothing and succeeds: tu_group_enter then returns this. So every operation
 * says if (status != TUTTI_OK) return tu_not_entered(status); */
#define TU_FAULT_SKIP ((tutti_status)1000)
static inline tutti_status tu_not_entered(tutti_status status) {
    return status == TU_FAULT_SKIP ? TUTTI_OK : status;
}

/* The same in two steps, for operations that are over in less time than their book-keeping takes: they record while
 * they wait, and read the clock for their deadline (info->timeout_ns from now) only when they have to. An operation
 * that waits long must have been recorded. */
tutti_status tu_group_enter_unrecorded(tutti_group *group, int64_t call_timeout_ns, tu_operation_info *info);
uint64_t tu_group_record(tutti_group *group, const tu_operation_info *info);
/* The last step of both, for those who have checked the rest: the next number of a counter of the group. */
static inline uint64_t tu_group_next(_Atomic uint64_t *counter) {
    return atomic_fetch_add_explicit(counter, 1, memory_order_relaxed) + 1;
}
static inline void tu_group_number(const tutti_group *group, _Atomic uint64_t *counter, tu_operation_info *info) {
    info->sequence = tu_group_next(counter);
    info->group_key = group->key;
    info->group_index = group->recorder_index;
}

/* Notes an operation that went well. */
static inline void tu_group_completed(tutti_group *group, uint64_t sequence) {
    uint64_t seen = atomic_load_explicit(&group->completed, memory_order_relaxed);
    while (seen < sequence && !atomic_compare_exchange_weak_explicit(&group->completed, &seen, sequence,
                                                                     memory_order_relaxed, memory_order_relaxed)) {
    }
}

/* The same by who has had the turn of the group's collectives since it was numbered: nobody else writes that word, so
 * that it needs no atomic operation, which would wait until all stores before it have left the processor. */
static inline void tu_group_completed_in_turn(tutti_group *group, uint64_t sequence) {
    atomic_store_explicit(&group->completed_in_turn, sequence, memory_order_relaxed);
}

/* Ends the record; on success notes the sequence as completed. A failure by death, mismatch, abort or deadline ends the
 * group with the calling thread's error as first cause, or replaces that error by the cause that was first. Returns the
 * status to return. */
tutti_status tu_group_leave(tutti_group *group, const tu_operation_info *info, uint64_t ticket, tutti_status status);

/* The part of it that concerns the group, for a failure that has to be told before the operation ends. True: the group
 * has ended, and the thread's error and *status are what to return. */
bool tu_group_fail(tutti_group *group, const tu_operation_info *info, tutti_status *status);

/* Ends the group with the calling thread's current error; the first cause wins. Rings all members. The end of a part is
 * that of the whole. */
void tu_group_end(tutti_group *group, const tu_operation_info *info);
/* 0 while the group lives. One load; pairs with the release in tu_group_end. */
static inline bool tu_group_ended(const tutti_group *group) {
    return atomic_load_explicit(&group->page->state, memory_order_acquire) != 0;
}
/* Whether the group has ended, here or among its members on this host: a group across hosts has no state word that they
 * share but that of group->here. */
bool tu_group_overhear(tutti_group *group);
/* Writes the first cause as this thread's error, marked as such; returns its status. */
tutti_status tu_group_cause(tutti_group *group);

/* TUTTI_OK, or how a member died, which ends the group. For calls that ask and do not wait: it asks the kernel every 10
 * ms at most, and else looks at one word. info NULL: no operation. */
tutti_status tu_group_look(tutti_group *group, const tu_operation_info *info);

/* Fills *wait for waiting on members of the group. Its check (every 20 ms at most, and at once when a rank departs)
 * looks at all members: the death of any ends the wait. For those that missing(argument, member) says are awaited it
 * also looks whether they closed their worlds, and at what they do instead: a member that is in another operation under
 * the same sequence number of this group is a mismatch. It writes the error. NULL missing: all members but this one. */
typedef struct tu_group_wait {
    tu_wait wait;
    tutti_group *group;
    const tu_operation_info *info;
    uint64_t ticket;
    bool (*missing)(void *argument, int member);
    void *argument;
    bool
        any; /* one of the awaited is enough: they are gone when all of them have closed their worlds. Set after init */
} tu_group_wait;
void tu_group_wait_init(tu_group_wait *wait, tutti_group *group, const tu_operation_info *info, uint64_t ticket,
                        int64_t deadline, bool (*missing)(void *argument, int member), void *argument);
/* Turns what a tu_wait_… returned into the error to give: TIMEOUT gets its message (group, operation, sequence, this
 * rank, who arrived, who is missing and what each of them is doing instead), STATE becomes the group's cause,
 * INTERRUPTED its sentence; what the check wrote stays. */
tutti_status tu_group_wait_error(const tu_group_wait *wait, tutti_status status);

/* What this rank does, and what it completed last in a group, in words: for members on other hosts that ask. */
void tu_world_doing(const tutti_world *world, uint64_t group_key, char *text, size_t bytes);

/* Compares what a member has recorded with what this rank does, or did under the number where the member still is: a
 * mismatch is an error that shows both. For waits that do not go through tu_group_wait. */
tutti_status tu_group_compare(tutti_group *group, const tu_operation_info *info, int member);

/* "all_reduce 17 of group 0": for messages. */
void tu_operation_text(const tutti_group *group, const tu_operation_info *info, char *text, size_t bytes);

/* tu_job_exchange among the members (or through the store when they span hosts and no piece is given). Errors are
 * complete. */
tutti_status tu_group_exchange(tutti_group *group, const tu_operation_info *info, const char *purpose,
                               const void *payload, size_t bytes, const tu_piece *piece, int64_t deadline,
                               void *payloads, tu_mapping **mappings);

/* The same with a descriptor of each member (-1: none) instead of pieces; see tu_exchange.descriptors. On one host
 * only. */
tutti_status tu_group_exchange_descriptors(tutti_group *group, const tu_operation_info *info, const char *purpose,
                                           const void *payload, size_t bytes, int descriptor, int64_t deadline,
                                           void *payloads, int *descriptors);

/* Both, for a caller that goes on after a failure of its own: see tu_exchange.complete. */
typedef struct tu_group_cargo {
    const tu_piece *piece; /* NULL: none */
    tu_mapping **mappings; /* NULL, or room for one per member */
    int descriptor;        /* -1: none; not together with a piece */
    int *descriptors;      /* NULL, or room for one per member */
    bool *complete;        /* NULL, or is set */
} tu_group_cargo;
tutti_status tu_group_exchange_with(tutti_group *group, const tu_operation_info *info, const char *purpose,
                                    const void *payload, size_t bytes, const tu_group_cargo *cargo, int64_t deadline,
                                    void *payloads);

/* Counts a live handle (+1) or its end (-1); `what` is for tutti_world_close's list. A world's memory goes with its
 * last handle. */
void tu_world_handle(tutti_world *world, const char *what, int change);

/* ---- ranks wherever they are (departed.c), by world rank ---- */

/* As last seen; with `probe` the kernel is asked about ranks of this host. Of ranks of other hosts the launcher's news
 * tell; where there are none they are taken to be alive. */
tu_rank_state tu_world_rank_state(const tutti_world *world, int rank, bool probe);
/* Index in `ranks` (NULL: all of the world) of one that is dead: of this host's whichever is found, of others' the one
 * that was told first, since the rest may have died of it. -1: none. but: ranks that do not count; may be NULL. */
int tu_world_first_dead(const tutti_world *world, const int *ranks, int count, const _Atomic bool *but, bool probe);
/* "rank 5 on host-b (pid 4711) was killed by signal 9 (Killed)": of one that departed. */
void tu_world_rank_text(const tutti_world *world, int rank, char *text, size_t bytes);
/* Writes the error for a departed rank, TUTTI_ERROR_DEAD or TUTTI_ERROR_GONE; returns it. */
tutti_status tu_world_departed_error(const tutti_world *world, int rank, const char *doing);

/* Goes to the store that took the place of the job's, if one has (tu_news_store): before the store is used on behalf of
 * ranks of several hosts. */
tutti_status tu_world_follow(tutti_world *world);

/* Which ranks are where, once the job is open. */
tutti_status tu_world_place_ranks(tutti_world *world);

/* After a failed operation: writes this rank's flight recorder, and those of dead ranks, where TUTTI_TRACE_DIR says.
 * Leaves the thread's error as it is. */
void tu_trace_failure(tutti_world *world);

/* A group of a closed world that has nothing left but its own memory: kept for a while, so that a pointer that somebody
 * lent before the close still finds a closed world instead of a crash. */
void tu_world_bury(tutti_group *group);

/* ---- calls and the close ----
 *
 * A thread that is in a call says in which world, in a word of its own; tutti_world_close sets `closed`, makes that
 * visible to all threads, ends the waits of those that are inside and waits until they have left. So a call that finds
 * its world open may use it until it returns. The quick side costs two stores. */
typedef struct tu_caller {
    _Atomic(const tutti_world *) world; /* by its thread; NULL: in no call */
    struct tu_caller *next;
    bool listed;
} tu_caller;
extern _Thread_local tu_caller tu_caller_here;
void tu_caller_list(tu_caller *caller);

static inline const tutti_world *tu_world_enter(const tutti_world *world) {
    tu_caller *here = &tu_caller_here;
    if (__builtin_expect(!here->listed, 0))
        tu_caller_list(here);
    const tutti_world *before = atomic_load_explicit(&here->world, memory_order_relaxed);
    atomic_store_explicit(&here->world, world, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst); /* pairs with tu_fence_all in the close: before the look at `closed` */
    return before;
}
static inline void tu_world_exit(const tutti_world **before) {
    atomic_store_explicit(&tu_caller_here.world, *before, memory_order_release); /* pairs with the close's look */
}
/* At the beginning of a call: inside until the block ends. Then ask tu_world_check. */
#define TU_INSIDE(of_world) \
    __attribute__((cleanup(tu_world_exit), unused)) const tutti_world *inside_before = tu_world_enter(of_world)
#define TU_INSIDE_GROUP(group) TU_INSIDE((group) != NULL && (group) != TUTTI_NON_GROUP_MEMBER ? (group)->world : NULL)

/* Whether this is a forked child of the process that opened the world. There objects are released by nobody: a lock
 * that another thread held at the fork is held for ever, and what they stand for is the parent's. */
static inline bool tu_world_forked(const tutti_world *world) {
    return world->job != NULL && tu_job_forked(world->job);
}

/* TUTTI_OK for an open world of this process; NULL, closed and forked are errors. For calls that take a world. */
tutti_status tu_world_check(const tutti_world *world);

/* The error for a wait that an interrupt ended: tutti_world_interrupt, or the close by another thread. `what` was
 * interrupted. */
tutti_status tu_world_interrupted(const tutti_world *world, const char *what);

/* True for TUTTI_NON_GROUP_MEMBER, with a warning: collectives then do nothing and succeed. */
bool tu_group_absent(const tutti_group *group, const char *operation);

/* Whether this rank is a thread of a process that spawned all of them. */
bool tu_world_is_thread(const tutti_world *world);

#endif
