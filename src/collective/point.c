/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives. Each direction of a pair is a ring of packets in the sender's piece. Packets are taken in order
 * and at once by whoever waits on the receiving rank, so that nothing behind them is held up; a message that no receive
 * awaits yet is noted as unexpected.
 *
 *     MESSAGE   sender to receiver   tag, length, dtype; up to PACKET_BYTES of data, or where the data lies in
 * symmetric memory CLEAR     receiver to sender   a receive awaits it: send the data (to symmetric memory, when the
 * receiver has some) FRAGMENT  sender to receiver   data, in one of the sender's fragments WRITTEN   sender to receiver
 * the data was written into the receiver's symmetric memory DONE      receiver to sender   the data was read from the
 * sender's symmetric memory
 *
 * Every operation is a request: a small machine that is moved on by `progress`, under one lock, from any thread that
 * waits. Works are moved on by a helper thread too.
 */
#include "collective/point.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "collective/batch.h"
#include "collective/check.h"
#include "world/group.h"

enum {
    MESSAGE = 1,
    CLEAR,
    FRAGMENT,
    WRITTEN,
    DONE
};

#define PACKETS 4
#define PACKET_BYTES 80

typedef struct packet {
    _Alignas(TU_LINE) _Atomic uint64_t number; /* from 1, in order; released by the sender */
    uint32_t kind;
    int32_t tag;
    uint64_t message; /* the sender's number of the message */
    uint64_t bytes;   /* of the message, or of this fragment */
    uint64_t offset;  /* of this fragment, or in the symmetric block */
    uint32_t index;   /* of the symmetric block, or of the fragment; 0 none */
    uint32_t dtype;
    unsigned char payload[PACKET_BYTES];
} packet;
_Static_assert(sizeof(packet) == TU_LINE, "a packet is one pair of lines");

/* From one rank to another. */
typedef struct channel {
    packet packets[PACKETS]; /* written by the sender */
    tu_flag taken;           /* how many the receiver has taken; written by it */
} channel;
_Static_assert(sizeof(channel) == TU_AREA_CHANNEL, "world.h reserves the channels");

typedef enum request_state {
    POSTING,  /* send: the MESSAGE packet is still to be posted */
    WAITING,  /* send: for CLEAR or DONE; receive: for a message */
    CLEARING, /* receive: matched; CLEAR is still to be posted */
    MOVING,   /* send: fragments to post; receive: fragments to come */
    WRITING,  /* send: to be written in place, then WRITTEN posted */
    READING,  /* receive: read in place; DONE still to be posted */
    FINISHED
} request_state;

struct tu_request {
    tu_task *task;
    tutti_work *work; /* NULL: a thread waits for it */
    tu_request *next, *previous;
    request_state state;
    _Atomic uint32_t finished; /* released last; pairs with the waiter's look */
    bool mismatch;             /* it failed: the message is not what the receive expects */
    bool listed;
    int peer;         /* target or source; -1 while any will do */
    uint64_t message; /* the sender's number of it */
    size_t bytes;     /* of the message */
    size_t moved;
    uint32_t index; /* of the other side's symmetric memory, and the offset in it */
    uint64_t offset;
    int tag; /* that arrived */
    uint32_t dtype;
};

/* A message that no receive awaits yet. */
typedef struct unexpected {
    struct unexpected *next;
    int source;
    packet packet; /* a copy */
} unexpected;

struct tu_points {
    tu_collective *state;
    tu_memory_group *memory;
    unsigned char *area; /* of the group: channels by sender and receiver, then fragments by sender */
    size_t fragment_bytes;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool running, ending, orphan;
    tu_request *first, *last; /* requests under way, oldest first */
    unexpected *early, **early_end;
    tu_request *done;       /* requests of works that are over, to be finished without the lock */
    int works;              /* requests that belong to works */
    uint64_t messages;      /* last number given to a message */
    uint64_t *sent, *taken; /* packets by peer */
    struct {
        int peer;
        uint64_t packet; /* free again once the peer has taken it; 0: free */
    } fragments[TU_AREA_FRAGMENTS];
};

/* ---- packets ---- */

static channel *channel_of(const tu_points *points, int sender, int receiver) {
    return (channel *)(void *)points->area + (size_t)sender * (size_t)points->state->size + (size_t)receiver;
}

static unsigned char *fragment(const tu_points *points, int sender, uint32_t index) {
    size_t size = (size_t)points->state->size;
    return points->area + size * size * TU_AREA_CHANNEL +
           ((size_t)sender * TU_AREA_FRAGMENTS + index) * points->fragment_bytes;
}

/* Where the next packet to `peer` goes; NULL while the ring is full. */
static packet *next_packet(tu_points *points, int peer) {
    tu_collective *state = points->state;
    /* Pairs with the release in take_packets: the slot has been read. */
    uint64_t taken = atomic_load_explicit(&channel_of(points, state->rank, peer)->taken.flag, memory_order_acquire);
    if (points->sent[peer] - taken >= PACKETS)
        return NULL;
    return &channel_of(points, state->rank, peer)->packets[points->sent[peer] % PACKETS];
}

static void ring(const tu_collective *state, int peer) {
    tu_bell_ring(state->sleepers, state->bells[peer]);
}

static uint64_t post(tu_points *points, packet *packet, int peer) {
    uint64_t number = ++points->sent[peer];
    atomic_store_explicit(&packet->number, number, memory_order_release); /* pairs with take_packets */
    ring(points->state, peer);
    return number;
}

/* A packet without data; false while the ring is full. */
static bool post_short(tu_points *points, int peer, uint32_t kind, uint64_t message, uint32_t index, uint64_t offset) {
    packet *packet = next_packet(points, peer);
    if (packet == NULL)
        return false;
    packet->kind = kind;
    packet->message = message;
    packet->index = index;
    packet->offset = offset;
    post(points, packet, peer);
    return true;
}

/* ---- requests ---- */

static void enlist(tu_points *points, tu_request *request) {
    request->previous = points->last;
    request->next = NULL;
    if (points->last != NULL)
        points->last->next = request;
    else
        points->first = request;
    points->last = request;
    request->listed = true;
    points->works += request->work != NULL;
}

static void unlist(tu_points *points, tu_request *request) {
    if (!request->listed)
        return;
    if (request->previous != NULL)
        request->previous->next = request->next;
    else
        points->first = request->next;
    if (request->next != NULL)
        request->next->previous = request->previous;
    else
        points->last = request->previous;
    request->listed = false;
    points->works -= request->work != NULL;
}

static bool is_send(const tu_request *request) {
    return request->task->row->in != TU_NOTHING;
}

/* The flag is the last touch of a request that a thread awaits; works are finished by finish_works. */
static void finish(tu_points *points, tu_request *request) {
    request->state = FINISHED;
    unlist(points, request);
    if (request->work == NULL) {
        atomic_store_explicit(&request->finished, 1, memory_order_release);
        tu_bell_ring(points->state->sleepers, points->state->bells[points->state->rank]);
    } else {
        request->next = points->done;
        points->done = request;
    }
}

static tu_request *find_request(tu_points *points, bool send, int peer, uint64_t message) {
    for (tu_request *request = points->first; request != NULL; request = request->next)
        if (is_send(request) == send && request->peer == peer && request->message == message &&
            request->state != POSTING)
            return request;
    return NULL;
}

/* ---- receiving ---- */

static void found_message(tu_points *points, tu_request *request, int source, const packet *packet) {
    const tu_task *task = request->task;
    size_t room = task->info.count * task->element;
    request->peer = source;
    request->message = packet->message;
    request->bytes = packet->bytes;
    request->tag = packet->tag;
    request->dtype = packet->dtype;
    if (packet->bytes > room || packet->dtype != task->info.dtype) {
        request->mismatch = true;
        finish(points, request);
    } else if (packet->bytes <= PACKET_BYTES) {
        if (packet->bytes != 0)
            memcpy(task->out, packet->payload, packet->bytes);
        finish(points, request);
    } else {
        const tutti_peers *peers = packet->index != 0 ? tu_symmetric_peers(points->memory, packet->index) : NULL;
        if (peers != NULL && peers->buffers[source] != NULL) {
            tu_copy(task->out, (const unsigned char *)peers->buffers[source] + packet->offset, packet->bytes, 0);
            request->state = READING;
        } else {
            request->state = CLEARING;
        }
    }
}

static bool accepts(const tu_request *request, int source, int tag) {
    const tu_operation_info *info = &request->task->info;
    return !is_send(request) && request->state == WAITING && (info->root == TUTTI_ANY_SOURCE || info->root == source) &&
           (info->tag == TUTTI_ANY_TAG || info->tag == tag);
}

/* False when there is no memory to note an unexpected message: it stays in the ring. */
static bool take_message(tu_points *points, int source, const packet *packet) {
    for (tu_request *request = points->first; request != NULL; request = request->next) {
        if (accepts(request, source, packet->tag)) {
            found_message(points, request, source, packet);
            return true;
        }
    }
    unexpected *early = aligned_alloc(_Alignof(unexpected), sizeof *early); /* a packet is aligned to its lines */
    if (early == NULL)
        return false;
    early->next = NULL;
    early->source = source;
    early->packet.kind = packet->kind;
    early->packet.tag = packet->tag;
    early->packet.message = packet->message;
    early->packet.bytes = packet->bytes;
    early->packet.offset = packet->offset;
    early->packet.index = packet->index;
    early->packet.dtype = packet->dtype;
    memcpy(early->packet.payload, packet->payload, PACKET_BYTES);
    *points->early_end = early;
    points->early_end = &early->next;
    return true;
}

/* A receive that has just been posted: has its message come already? */
static void look_at_early(tu_points *points, tu_request *request) {
    for (unexpected **link = &points->early; *link != NULL; link = &(*link)->next) {
        unexpected *early = *link;
        if (!accepts(request, early->source, early->packet.tag))
            continue;
        *link = early->next;
        if (early->next == NULL)
            points->early_end = link;
        found_message(points, request, early->source, &early->packet);
        free(early);
        return;
    }
}

static void take_fragment(tu_points *points, int source, const packet *packet) {
    tu_request *request = find_request(points, false, source, packet->message);
    if (request == NULL)
        return; /* its receive was given up; the group has ended */
    tu_copy((unsigned char *)request->task->out + packet->offset, fragment(points, source, packet->index),
            packet->bytes, 0);
    request->moved += packet->bytes;
    if (request->moved == request->bytes)
        finish(points, request);
}

static bool take_packet(tu_points *points, int source, const packet *packet) {
    tu_request *request;
    switch (packet->kind) {
    case MESSAGE:
        return take_message(points, source, packet);
    case FRAGMENT:
        take_fragment(points, source, packet);
        return true;
    case CLEAR:
        request = find_request(points, true, source, packet->message);
        if (request != NULL) {
            request->index = packet->index;
            request->offset = packet->offset;
            request->state = packet->index != 0 ? WRITING : MOVING;
        }
        return true;
    case DONE:
        request = find_request(points, true, source, packet->message);
        break;
    default:
        request = find_request(points, false, source, packet->message);
        break;
    }
    if (request != NULL)
        finish(points, request);
    return true;
}

static bool take_packets(tu_points *points) {
    tu_collective *state = points->state;
    bool any = false;
    for (int source = 0; source < state->size; source++) {
        packet *ring_of_source = channel_of(points, source, state->rank)->packets;
        uint64_t before = points->taken[source];
        for (;;) {
            packet *packet = &ring_of_source[points->taken[source] % PACKETS];
            /* Pairs with the release in post. */
            if (atomic_load_explicit(&packet->number, memory_order_acquire) != points->taken[source] + 1 ||
                !take_packet(points, source, packet))
                break;
            points->taken[source]++;
            /* Pairs with next_packet and free_fragment. */
            atomic_store_explicit(&channel_of(points, source, state->rank)->taken.flag, points->taken[source],
                                  memory_order_release);
        }
        if (points->taken[source] != before) {
            any = true;
            ring(state, source);
        }
    }
    return any;
}

/* ---- moving requests on ---- */

static bool post_message(tu_points *points, tu_request *request) {
    const tu_task *task = request->task;
    packet *packet = next_packet(points, request->peer);
    if (packet == NULL)
        return false;
    packet->kind = MESSAGE;
    packet->tag = task->info.tag;
    packet->dtype = task->info.dtype;
    packet->message = request->message;
    packet->bytes = request->bytes;
    packet->index = 0;
    bool short_one = request->bytes <= PACKET_BYTES;
    tu_symmetric found;
    if (short_one && request->bytes != 0)
        memcpy(packet->payload, task->in, request->bytes);
    if (!short_one && tu_symmetric_find(points->memory, task->in, request->bytes, &found) && found.index != 0) {
        packet->index = found.index;
        packet->offset = found.offset;
    }
    request->state = WAITING;
    post(points, packet, request->peer);
    if (short_one)
        finish(points, request);
    return true;
}

static int free_fragment(tu_points *points) {
    tu_collective *state = points->state;
    for (int i = 0; i < TU_AREA_FRAGMENTS; i++) {
        if (points->fragments[i].packet == 0)
            return i;
        int peer = points->fragments[i].peer;
        /* Pairs with the release in take_packets. */
        if (atomic_load_explicit(&channel_of(points, state->rank, peer)->taken.flag, memory_order_acquire) >=
            points->fragments[i].packet)
            return i;
    }
    return -1;
}

static bool post_fragment(tu_points *points, tu_request *request) {
    tu_collective *state = points->state;
    packet *packet = next_packet(points, request->peer);
    int index = packet != NULL ? free_fragment(points) : -1;
    if (index < 0)
        return false;
    size_t bytes = request->bytes - request->moved < points->fragment_bytes ? request->bytes - request->moved
                                                                            : points->fragment_bytes;
    tu_copy(fragment(points, state->rank, (uint32_t)index), (const unsigned char *)request->task->in + request->moved,
            bytes, tu_stage_flags(state, bytes));
    packet->kind = FRAGMENT;
    packet->message = request->message;
    packet->offset = request->moved;
    packet->bytes = bytes;
    packet->index = (uint32_t)index;
    points->fragments[index].peer = request->peer;
    points->fragments[index].packet = post(points, packet, request->peer);
    request->moved += bytes;
    if (request->moved == request->bytes)
        finish(points, request);
    return true;
}

static bool post_clear(tu_points *points, tu_request *request) {
    tu_symmetric found;
    if (!tu_symmetric_find(points->memory, request->task->out, request->bytes, &found))
        found.index = 0;
    if (!post_short(points, request->peer, CLEAR, request->message, found.index, found.index != 0 ? found.offset : 0))
        return false;
    request->state = MOVING;
    return true;
}

/* Written in place once; then the packet that says so, as soon as there is room for it. */
static bool write_in_place(tu_points *points, tu_request *request) {
    if (request->moved == 0) {
        const tutti_peers *peers = tu_symmetric_peers(points->memory, request->index);
        if (peers == NULL || peers->buffers[request->peer] == NULL) {
            request->state = MOVING; /* this rank does not hold it any more */
            return true;
        }
        tu_copy((unsigned char *)peers->buffers[request->peer] + request->offset, request->task->in, request->bytes, 0);
        request->moved = request->bytes;
    }
    if (!post_short(points, request->peer, WRITTEN, request->message, 0, 0))
        return false;
    finish(points, request);
    return true;
}

static bool move_on(tu_points *points, tu_request *request) {
    switch (request->state) {
    case POSTING:
        return post_message(points, request);
    case CLEARING:
        return post_clear(points, request);
    case MOVING:
        return is_send(request) && post_fragment(points, request);
    case WRITING:
        return write_in_place(points, request);
    case READING:
        if (!post_short(points, request->peer, DONE, request->message, 0, 0))
            return false;
        finish(points, request);
        return true;
    default:
        return false;
    }
}

/* With the lock held. Messages to one rank are posted in order: one that finds the ring full holds up those behind
 * it. */
static void progress(tu_points *points) {
    bool any;
    do {
        any = take_packets(points);
        tu_request *next;
        for (tu_request *request = points->first; request != NULL; request = next) {
            next = request->next;
            bool was_posting = request->state == POSTING;
            int peer = request->peer;
            bool moved = move_on(points, request);
            any |= moved;
            if (was_posting && !moved)
                while (next != NULL && next->state == POSTING && next->peer == peer)
                    next = next->next;
        }
    } while (any);
}

/* ---- ends ---- */

/* Writes the error of a message that its receive did not expect. */
static tutti_status mismatch_error(const tu_request *request) {
    const tu_task *task = request->task;
    const tutti_group *group = task->group;
    size_t element = tutti_dtype_size((tutti_dtype)request->dtype);
    tu_error(
        TUTTI_ERROR_MISMATCH,
        "the ranks disagree in group %s: rank %d sent %zu elements of %s with tag %d, rank %d receives at most %llu "
        "elements of %s",
        group->name, request->peer, element != 0 ? request->bytes / element : 0,
        tutti_dtype_name((tutti_dtype)request->dtype), request->tag, group->rank, (unsigned long long)task->info.count,
        tutti_dtype_name((tutti_dtype)task->info.dtype));
    tu_error_at_fault(request->peer);
    tu_error_where(group->name, "recv", task->info.sequence, group->rank);
    return TUTTI_ERROR_MISMATCH;
}

static tutti_status outcome(const tu_request *request) {
    if (request->mismatch)
        return mismatch_error(request);
    tutti_received *received = request->task->received;
    if (!is_send(request) && received != NULL) {
        tutti_received full = { .size = received->size,
                                .source = request->peer,
                                .tag = request->tag,
                                .count = request->bytes / request->task->element };
        memcpy(received, &full, received->size < sizeof full ? received->size : sizeof full);
    }
    return TUTTI_OK;
}

/* Without the lock: ends the records and wakes whoever waits for the works. */
static void finish_works(tu_request *request) {
    while (request != NULL) {
        tu_request *next = request->next;
        tutti_work *work = request->work;
        tu_error_copy before;
        tu_error_save(&before);
        tutti_status status = tu_group_leave(work->group, &work->task.info, work->task.ticket, outcome(request));
        tu_work_finish(work, status);
        tu_error_restore(&before);
        tu_collective *state = work->task.state;
        tu_bell_ring(state->sleepers, state->bells[state->rank]);
        tu_work_drop(work);
        request = next;
    }
}

static tu_request *take_done(tu_points *points) {
    tu_request *done = points->done;
    points->done = NULL;
    return done;
}

void tu_points_poll(tu_collective *state) {
    tu_points *points = atomic_load_explicit(&state->points, memory_order_acquire);
    if (points == NULL || pthread_mutex_trylock(&points->lock) != 0)
        return;
    progress(points);
    tu_request *done = take_done(points);
    pthread_mutex_unlock(&points->lock);
    finish_works(done);
}

/* ---- waiting ---- */

typedef struct point_wait {
    tu_collective *state;
    const _Atomic uint32_t *flag;
    int peer;
} point_wait;

static bool ready(void *argument) {
    const point_wait *wait = argument;
    if (atomic_load_explicit(wait->flag, memory_order_acquire))
        return true;
    tu_points_poll(wait->state);
    return atomic_load_explicit(wait->flag, memory_order_acquire);
}

static bool missing(void *argument, int member) {
    const point_wait *wait = argument;
    return wait->peer < 0 || member == wait->peer;
}

static tutti_status await(tu_collective *state, const tu_task *task, int peer, const _Atomic uint32_t *flag,
                          int64_t deadline, tu_group_wait *wait) {
    point_wait *awaited = wait->argument;
    *awaited = (point_wait){ state, flag, peer };
    tu_group_wait_init(wait, state->group, &task->info, task->ticket, deadline, missing, awaited);
    wait->any = peer < 0;
    /* Between two looks a pause only: a look goes through the rings of all peers. */
    wait->wait.spins = state->spins / 8;
    return tu_wait_until(&wait->wait, ready, awaited);
}

tutti_status tu_points_wait(tutti_work *work, int64_t deadline) {
    tu_collective *state = work->task.state;
    point_wait awaited;
    tu_group_wait wait = { .argument = &awaited };
    tutti_status status = await(state, &work->task, work->task.info.root, &work->done, deadline, &wait);
    if (status == TUTTI_OK || status == TUTTI_ERROR_TIMEOUT)
        return status;
    /* The helper sees the same and ends the work with it. */
    while (!atomic_load_explicit(&work->done, memory_order_acquire) && tu_deadline_left(deadline) > 0)
        sched_yield();
    return status;
}

/* ---- the helper ---- */

/* With the lock held: takes the works that are over because their time is, or because everything is. */
static tu_request *give_up(tu_points *points, bool all, int64_t now) {
    tu_request *given_up = NULL, *next;
    for (tu_request *request = points->first; request != NULL; request = next) {
        next = request->next;
        if (request->work == NULL || (!all && request->task->deadline > now))
            continue;
        unlist(points, request);
        request->next = given_up;
        given_up = request;
    }
    return given_up;
}

static void fail_works(tu_request *request, const tu_group_wait *wait, tutti_status status) {
    tu_error_copy error;
    if (status != TUTTI_ERROR_TIMEOUT)
        (void)tu_group_wait_error(wait, status), tu_error_save(&error);
    while (request != NULL) {
        tu_request *next = request->next;
        tutti_work *work = request->work;
        tutti_status failed;
        if (status == TUTTI_ERROR_TIMEOUT) {
            tu_group_wait own = *wait;
            own.info = &work->task.info;
            own.ticket = work->task.ticket;
            failed = tu_group_wait_error(&own, status);
        } else {
            failed = tu_error_restore(&error);
        }
        if (request->state != WAITING && request->state != POSTING) /* half of it has moved */
            tu_group_end(work->group, &work->task.info);
        tu_work_finish(work, tu_group_leave(work->group, &work->task.info, work->task.ticket, failed));
        tu_work_drop(work);
        request = next;
    }
}

typedef struct helper_wait {
    tu_points *points;
    int works; /* when the wait began */
} helper_wait;

/* Something happened to the works: look again whose turn it is. */
static bool works_changed(void *argument) {
    const helper_wait *wait = argument;
    tu_points *points = wait->points;
    if (pthread_mutex_trylock(&points->lock) != 0)
        return false;
    progress(points);
    bool changed = points->done != NULL || points->works != wait->works || points->ending;
    pthread_mutex_unlock(&points->lock);
    return changed;
}

static bool nobody_missing(void *argument, int member) {
    const helper_wait *wait = argument;
    bool awaited = false;
    pthread_mutex_lock(&wait->points->lock);
    for (tu_request *request = wait->points->first; request != NULL && !awaited; request = request->next)
        awaited = request->work != NULL && request->peer == member;
    pthread_mutex_unlock(&wait->points->lock);
    return awaited;
}

/* With the lock held and works under way; gives it back unlocked. */
static void help_works(tu_points *points) {
    int64_t deadline = INT64_MAX;
    tu_task task = { .group = NULL };
    for (tu_request *request = points->first; request != NULL; request = request->next) {
        if (request->work != NULL && request->task->deadline < deadline) {
            deadline = request->task->deadline;
            task = *request->task;
        }
    }
    helper_wait wait = { points, points->works };
    pthread_mutex_unlock(&points->lock);
    tu_group_wait group_wait;
    tu_group_wait_init(&group_wait, points->state->group, &task.info, task.ticket, deadline, nobody_missing, &wait);
    group_wait.wait.spins = 0;
    group_wait.wait.yields = 20;
    tutti_status status = tu_wait_until(&group_wait.wait, works_changed, &wait);
    pthread_mutex_lock(&points->lock);
    tu_request *given_up = status == TUTTI_OK ? NULL : give_up(points, status != TUTTI_ERROR_TIMEOUT, tu_clock_now());
    tu_request *done = take_done(points);
    pthread_mutex_unlock(&points->lock);
    if (given_up != NULL)
        fail_works(given_up, &group_wait, status);
    finish_works(done);
}

static void free_points(tu_points *points) {
    while (points->early != NULL) {
        unexpected *next = points->early->next;
        free(points->early);
        points->early = next;
    }
    pthread_mutex_destroy(&points->lock);
    pthread_cond_destroy(&points->changed);
    free(points->sent);
    free(points->taken);
    free(points);
}

static void *help(void *argument) {
    tu_points *points = argument;
    pthread_mutex_lock(&points->lock);
    while (!points->ending) {
        if (points->works == 0 && points->done == NULL) {
            pthread_cond_wait(&points->changed, &points->lock);
            continue;
        }
        help_works(points);
        pthread_mutex_lock(&points->lock);
    }
    bool orphan = points->orphan;
    pthread_mutex_unlock(&points->lock);
    if (orphan)
        free_points(points);
    return NULL;
}

void tu_points_free(tu_points *points) {
    if (points == NULL)
        return;
    pthread_mutex_lock(&points->lock);
    points->ending = true;
    /* The group may go with a work that the helper itself finished: then it frees this as its last act. */
    points->orphan = points->running && pthread_equal(points->thread, pthread_self());
    bool orphan = points->orphan, running = points->running;
    pthread_t thread = points->thread;
    pthread_cond_broadcast(&points->changed);
    pthread_mutex_unlock(&points->lock);
    if (orphan) {
        pthread_detach(thread);
        return;
    }
    if (running)
        pthread_join(thread, NULL);
    free_points(points);
}

/* ---- the way in ---- */

static tutti_status make_points(tu_collective *state, tu_points **made) {
    tu_points *points = calloc(1, sizeof *points);
    if (points == NULL)
        return tu_error_memory("sends and receives", sizeof *points);
    points->state = state;
    points->area = (unsigned char *)state->group->page + sizeof(tu_group_page);
    points->fragment_bytes = tu_area_fragment_bytes(state->size);
    points->early_end = &points->early;
    points->sent = calloc((size_t)state->size, sizeof(uint64_t));
    points->taken = calloc((size_t)state->size, sizeof(uint64_t));
    pthread_mutex_init(&points->lock, NULL);
    pthread_cond_init(&points->changed, NULL);
    tutti_status status = TUTTI_OK;
    if (points->sent == NULL || points->taken == NULL)
        status = tu_error_memory("sends and receives", 2 * (size_t)state->size * sizeof(uint64_t));
    if (status == TUTTI_OK)
        status = tu_memory_group_get(state->group, &points->memory);
    if (status != TUTTI_OK) {
        free_points(points);
        return status;
    }
    *made = points;
    return TUTTI_OK;
}

static tutti_status get_points(tu_collective *state, tu_points **found) {
    tu_points *points = atomic_load_explicit(&state->points, memory_order_acquire);
    if (points == NULL) {
        tutti_status status = make_points(state, &points);
        if (status != TUTTI_OK)
            return status;
        tu_points *none = NULL;
        if (!atomic_compare_exchange_strong_explicit(&state->points, &none, points, memory_order_acq_rel,
                                                     memory_order_acquire)) {
            free_points(points);
            points = none;
        }
    }
    *found = points;
    return TUTTI_OK;
}

/* Enlists the request and moves it on as far as it goes. */
static void begin(tu_points *points, tu_request *request) {
    pthread_mutex_lock(&points->lock);
    request->peer = request->task->info.root;
    if (is_send(request)) {
        request->state = POSTING;
        request->message = ++points->messages;
        request->bytes = request->task->info.count * request->task->element;
    } else {
        request->state = WAITING;
    }
    enlist(points, request);
    if (!is_send(request))
        look_at_early(points, request);
    progress(points);
    tu_request *done = take_done(points);
    pthread_mutex_unlock(&points->lock);
    finish_works(done);
}

static bool is_finished(const tu_request *request) {
    return atomic_load_explicit(&request->finished, memory_order_acquire) != 0;
}

/* Takes a request back. True when half of it has moved: then the pair is out of step. */
static bool withdraw(tu_points *points, tu_request *request) {
    pthread_mutex_lock(&points->lock);
    bool half = request->listed && !(request->state == POSTING || (request->state == WAITING && !is_send(request)));
    unlist(points, request);
    for (unexpected **link = &points->early; *link != NULL; link = &(*link)->next) {
        unexpected *early = *link;
        if (is_send(request) && early->source == points->state->rank && request->peer == points->state->rank &&
            early->packet.message == request->message) {
            *link = early->next;
            if (early->next == NULL)
                points->early_end = link;
            free(early);
            half = false;
            break;
        }
    }
    pthread_mutex_unlock(&points->lock);
    return half;
}

static tutti_status enter(tu_task *task) {
    tutti_status status = tu_task_enter(task);
    if (status == TUTTI_OK) {
        (void)tu_task_deadline(task);
        tu_task_record(task);
    }
    return status;
}

/* Waits for a request that `begin` has begun. */
static tutti_status complete(tu_points *points, tu_request *request) {
    tu_task *task = request->task;
    tu_collective *state = task->state;
    tutti_status status = TUTTI_OK;
    if (!is_finished(request) && is_send(request) && request->peer == state->rank) {
        (void)withdraw(points, request);
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "send: rank %d sends to itself and waits, but no receive is under way that could take the message; "
            "start the receive, or the send, with a work",
            state->rank);
    }
    if (!is_finished(request)) {
        point_wait awaited;
        tu_group_wait wait = { .argument = &awaited };
        status = await(state, task, task->info.root, &request->finished, task->deadline, &wait);
        if (status != TUTTI_OK) {
            bool half = withdraw(points, request);
            status = is_finished(request) ? TUTTI_OK : tu_group_wait_error(&wait, status);
            if (status != TUTTI_OK && half)
                tu_group_end(task->group, &task->info);
        }
    }
    return status == TUTTI_OK ? outcome(request) : status;
}

tutti_status tu_point_run(tu_task *task) {
    tu_points *points;
    tutti_status status = get_points(task->state, &points);
    if (status != TUTTI_OK)
        return status;
    (void)tu_task_deadline(task);
    tu_task_record(task);
    tu_request request = { .task = task };
    begin(points, &request);
    return complete(points, &request);
}

tutti_status tu_point_post(tu_task *task, tu_request **posted) {
    tu_points *points;
    tutti_status status = get_points(task->state, &points);
    tu_request *request = status == TUTTI_OK ? calloc(1, sizeof *request) : NULL;
    if (status == TUTTI_OK && request == NULL)
        status = tu_error_memory("a send or receive", sizeof *request);
    if (status == TUTTI_OK)
        status = enter(task);
    if (status != TUTTI_OK) {
        free(request);
        return status;
    }
    request->task = task;
    begin(points, request);
    *posted = request;
    return TUTTI_OK;
}

tutti_status tu_point_await(tu_collective *state, tu_request *request) {
    tutti_status status = complete(atomic_load_explicit(&state->points, memory_order_acquire), request);
    status = tu_task_leave(request->task, status);
    free(request);
    return status;
}

tutti_status tu_point_start(tutti_work *work) {
    tu_points *points;
    tutti_status status = get_points(work->task.state, &points);
    if (status != TUTTI_OK)
        return status;
    tu_request *request = calloc(1, sizeof *request);
    if (request == NULL)
        return tu_error_memory("a send or receive", sizeof *request);
    pthread_mutex_lock(&points->lock);
    if (!points->running) {
        status = tu_helper_start(&points->thread, "tutti-points", help, points);
        points->running = status == TUTTI_OK;
    }
    pthread_mutex_unlock(&points->lock);
    if (status == TUTTI_OK)
        status = enter(&work->task);
    if (status != TUTTI_OK) {
        free(request);
        return status;
    }
    request->task = &work->task;
    request->work = tu_work_hold(work);
    work->request = request;
    begin(points, request);
    pthread_mutex_lock(&points->lock);
    if (points->works != 0)
        pthread_cond_broadcast(&points->changed);
    pthread_mutex_unlock(&points->lock);
    return TUTTI_OK;
}

/* ---- the public calls ---- */

static tutti_status check(tu_task *task, const tutti_call *call, int peer, int tag) {
    const char *name = task->row->name;
    bool receives = task->row->out != TU_NOTHING;
    int size = task->group->size;
    task->element = tutti_dtype_size((tutti_dtype)task->info.dtype);
    task->timeout_ns = call->timeout_ns;
    task->received = receives ? call->received : NULL;
    if (task->element == 0)
        return tu_error(TUTTI_ERROR_TYPE, "%s: %d is no dtype", name, task->info.dtype);
    if ((peer < 0 || peer >= size) && peer != TUTTI_NOBODY && !(receives && peer == TUTTI_ANY_SOURCE))
        return tu_error(TUTTI_ERROR_RANGE, "%s: rank %d must be in [0, %d)%s", name, peer, size,
                        receives ? ", or TUTTI_ANY_SOURCE" : "");
    if (tag < 0 && !(receives && tag == TUTTI_ANY_TAG))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: tag %d must not be negative%s", name, tag,
                        receives ? ", but for TUTTI_ANY_TAG" : "");
    if (task->info.count > (SIZE_MAX >> 1) / task->element)
        return tu_error(TUTTI_ERROR_RANGE, "%s: the count asks for more bytes than memory can have", name);
    if (task->info.count != 0 && (receives ? task->out == NULL : task->in == NULL))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the buffer must not be NULL", name);
    if (call->timeout_ns < 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: timeout_ns is %lld; it must be positive, or 0 for the group's", name,
                        (long long)call->timeout_ns);
    if (call->algorithm != TUTTI_ALGORITHM_AUTO)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s has no algorithm %s", name, tutti_algorithm_name(call->algorithm));
    if (call->received != NULL && (!receives || call->received->size == 0))
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: tutti_call.received belongs to a receive, and its size must be set",
                        name);
    return TUTTI_OK;
}

static tutti_status submit(tu_task *task, const tutti_call *given, int peer, int tag) {
    if (task->group == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the group is NULL", task->row->name);
    if (tu_group_absent(task->group, task->row->name))
        return TUTTI_OK;
    tutti_call call = TUTTI_CALL_INIT;
    tutti_status status = tu_world_check(task->group->world);
    if (status == TUTTI_OK && given != NULL)
        status = tu_options_copy("tutti_call", given, &call, sizeof call);
    if (status == TUTTI_OK)
        status = check(task, &call, peer, tag);
    if (status == TUTTI_OK && peer == TUTTI_NOBODY)
        return tu_point_nobody(task, &call);
    return status == TUTTI_OK ? tu_not_entered(tu_submit_checked(task, &call)) : status;
}

static void begin_task(tu_task *task, tutti_group *group, tu_operation operation, size_t count, tutti_dtype dtype,
                       int peer, int tag) {
    tu_task_begin(task, group, operation);
    task->info.count = count;
    task->info.dtype = tu_code((int)dtype);
    task->info.root = peer;
    task->info.tag = tag;
}

tutti_status tutti_send(tutti_group *group, const void *in, size_t count, tutti_dtype dtype, int to, int tag,
                        const tutti_call *call) {
    tu_task task;
    begin_task(&task, group, TU_OPERATION_SEND, count, dtype, to, tag);
    task.in = in;
    return submit(&task, call, to, tag);
}

tutti_status tutti_recv(tutti_group *group, void *out, size_t count, tutti_dtype dtype, int from, int tag,
                        const tutti_call *call) {
    tu_task task;
    begin_task(&task, group, TU_OPERATION_RECV, count, dtype, from, tag);
    task.out = out;
    return submit(&task, call, from, tag);
}
