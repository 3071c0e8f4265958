/* SPDX-License-Identifier: Apache-2.0
 *
 * Windows: what members on other hosts do to blocks of this rank, and what this rank does to theirs.
 *
 * A put is an active message: the owner copies the bytes, after it has looked whether they lie in a window of the group
 * that the sender is a member of. Where the fabric has remote memory access, bytes go by that instead
 * (network_direct.c); words and signals are messages everywhere.
 *
 * Messages to one member come in order. A signal to one member also says that what was put to others is there, since
 * that member may pass it on: so before it those others are asked (a fence), and answer when they come to the question.
 * What was written by the fabric is there after a flush, which a signal to the same member waits for too. Puts are
 * counted by world rank, as all groups share a connection.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "memory/network_inner.h"

#define WINDOW ((uint64_t)4 << 20) /* bytes that a member may be ahead with its puts */
#define COST ((uint64_t)256)       /* of a put, besides its bytes */
#define RENEWAL (UINT64_C(1) << 32)
#define ANSWERS_MOST ((uint64_t)128 << 20) /* bytes that one member asked for and that have not left */
#define FENCE_SLEEP 20                     /* milliseconds, at most, between two looks around */

/* What a message is about, in `step`. `sequence` is the window's number. */
typedef enum memory_kind {
    PUT = 1, /* data goes to `offset` */
    SET,     /* the word at `offset` becomes said.signature */
    TAKEN,   /* `offset` more bytes of puts were taken */
    TELL,    /* about signals: `offset` is what, said.signature channel << 32 | value */
    GET,     /* `total` bytes from `offset` on; said.signature: a token for the answer */
    GOT,     /* the data */
    REFUSED  /* there is no such window, or it is not so long */
} memory_kind;

/* ---- sending; with the lock held ---- */

static tu_dispatch *begin(tu_network_group *side, int member, size_t bytes) {
    tu_network_peer *peer = &side->network->peers[side->group->ranks[member]];
    tu_dispatch *dispatch = tu_network_own_begin(side->network, side->group->ranks[member], bytes);
    if (dispatch == NULL && peer->connected && !peer->lost) /* the two would be out of step */
        tu_network_cut(side->network, side->group->ranks[member], "there was no memory for a message to it");
    return dispatch;
}

static void send(tu_network_group *side, tu_dispatch *dispatch, memory_kind kind, uint64_t number, uint64_t offset,
                 uint64_t total, uint64_t value) {
    tu_network *network = side->network;
    tu_network_header header = { .magic = TU_NETWORK_MAGIC,
                                 .version = TU_NETWORK_VERSION,
                                 .door = network->peers[dispatch->peer].door,
                                 .key = side->group->key,
                                 .sequence = number,
                                 .offset = offset,
                                 .total = total,
                                 .kind = TU_NETWORK_MEMORY,
                                 .step = (uint32_t)kind,
                                 .from = network->world->rank,
                                 .said = { .signature = value } };
    tu_network_own_send(network, dispatch, &header);
}

static bool send_short(tu_network_group *side, int member, memory_kind kind, uint64_t number, uint64_t offset,
                       uint64_t total, uint64_t value) {
    tu_dispatch *dispatch = begin(side, member, 0);
    if (dispatch != NULL)
        send(side, dispatch, kind, number, offset, total, value);
    return dispatch != NULL;
}

/* ---- what this rank does ---- */

static bool is_unfenced(const tu_network_peer *peer) {
    return peer->puts != peer->arrived || peer->written != peer->flushed;
}

/* Before something is put to a peer, and after something has arrived there: how many peers may lack something. */
static void note_unfenced(tu_network *network, const tu_network_peer *peer) {
    if (!is_unfenced(peer))
        atomic_fetch_add_explicit(&network->world->unfenced, 1, memory_order_relaxed);
}

static void note_fenced(tu_network *network, const tu_network_peer *peer) {
    if (!is_unfenced(peer))
        atomic_fetch_sub_explicit(&network->world->unfenced, 1, memory_order_relaxed);
}

/* Counts a put that is about to be sent. */
static void count_put(tu_network_group *side, int member, size_t bytes) {
    tu_network *network = side->network;
    tu_network_peer *peer = &network->peers[side->group->ranks[member]];
    side->puts[member].sent += bytes + COST;
    if (peer->gone)
        return;
    note_unfenced(network, peer);
    network->mark++;
    peer->puts++;
}

static bool has_room(const tu_network_group *side, int member, size_t bytes) {
    const tu_network_flow *flow = &side->puts[member];
    return flow->sent - flow->taken + bytes + COST <= WINDOW;
}

bool tu_network_put(tu_network_group *side, int member, uint64_t number, uint64_t offset, const void *from,
                    size_t bytes) {
    pthread_mutex_lock(&side->network->lock);
    tu_dispatch *dispatch = has_room(side, member, bytes) ? begin(side, member, bytes) : NULL;
    if (dispatch != NULL) {
        memcpy(dispatch + 1, from, bytes);
        count_put(side, member, bytes);
        send(side, dispatch, PUT, number, offset, bytes, 0);
    }
    pthread_mutex_unlock(&side->network->lock);
    return dispatch != NULL;
}

bool tu_network_set(tu_network_group *side, int member, uint64_t number, uint64_t offset, uint64_t value) {
    pthread_mutex_lock(&side->network->lock);
    tu_dispatch *dispatch = has_room(side, member, 0) ? begin(side, member, 0) : NULL;
    if (dispatch != NULL) {
        count_put(side, member, 0);
        send(side, dispatch, SET, number, offset, 0, value);
    }
    pthread_mutex_unlock(&side->network->lock);
    return dispatch != NULL;
}

void tu_network_tell(tu_network_group *side, int member, uint64_t number, uint32_t what, uint32_t channel,
                     uint32_t value) {
    pthread_mutex_lock(&side->network->lock);
    (void)send_short(side, member, TELL, number, what, 0, (uint64_t)channel << 32 | value);
    pthread_mutex_unlock(&side->network->lock);
}

/* With the lock held: asks those ranks of which it is not known that everything arrived that was put before the mark,
 * and flushes what was written to them. Of one only the latter, since messages to it come in order. How many these are,
 * and one of them. A rank is asked anew when it has answered: so whoever waits, waits for two answers at most, however
 * many others put and ask meanwhile. */
static int ask_unfenced(tu_network *network, int but, uint64_t mark, int *late) {
    int count = 0;
    for (int rank = 0; rank < network->world->size; rank++) {
        tu_network_peer *peer = &network->peers[rank];
        bool asks = rank != but && peer->puts != peer->arrived && peer->arrived_mark < mark;
        if (!asks && (peer->written == peer->flushed || peer->flushed_mark >= mark))
            continue;
        if (tu_world_rank_state(network->world, rank, false) != TU_RANK_ALIVE) {
            tu_network_fence_needless(network, rank); /* launchers may know of it before the connection does */
            continue;
        }
        bool flushed = tu_network_flushed(network, rank, mark);
        if (asks && peer->asked <= peer->arrived) {
            peer->asked = peer->puts;
            peer->asked_mark = network->mark;
            tu_network_own(network, rank, TU_NETWORK_FENCE, 0, 0, peer->puts, NULL, NULL, 0);
        }
        if (!asks && flushed)
            continue;
        *late = rank;
        count++;
    }
    return count;
}

bool tu_network_fenced(tu_network_group *side, int but, uint64_t *mark) {
    tu_network *network = side->network;
    int late;
    /* A put of another thread that is not counted yet is not before what this one does. */
    if (atomic_load_explicit(&network->world->unfenced, memory_order_relaxed) == 0)
        return true;
    pthread_mutex_lock(&network->lock);
    *mark = *mark == 0 ? network->mark : *mark;
    bool all = ask_unfenced(network, but < 0 ? -1 : side->group->ranks[but], *mark, &late) == 0;
    pthread_mutex_unlock(&network->lock);
    return all;
}

bool tu_network_unfenced(tu_network_group *side, int member, bool ordered) {
    const tu_network_peer *peer = &side->network->peers[side->group->ranks[member]];
    pthread_mutex_lock(&side->network->lock);
    bool unfenced = ordered ? peer->written != peer->flushed : is_unfenced(peer);
    pthread_mutex_unlock(&side->network->lock);
    return unfenced;
}

/* What ends the wait of an operation for its puts, besides that they arrived. */
static tutti_status look_around(tutti_group *group, const tu_operation_info *info, int late, int64_t deadline) {
    const tutti_world *world = group->world;
    const char *operation = tu_operation_name((tu_operation)info->operation);
    if (tu_group_overhear(group))
        return tu_group_cause(group);
    tutti_status status = tu_group_look(group, info);
    if (status == TUTTI_OK && atomic_load_explicit(&world->interrupt, memory_order_acquire) != 0)
        status = tu_world_interrupted(world, operation);
    if (status != TUTTI_OK || tu_clock_now() < deadline)
        return status;
    return tu_error(TUTTI_ERROR_TIMEOUT,
                    "timeout before %s in group %s: rank %d has put something into memory of world rank %d on %s, "
                    "which has not said that it arrived",
                    operation, group->name, group->rank, late, tu_job_host(world->job, late));
}

tutti_status tu_network_fence(tutti_group *group, const tu_operation_info *info) {
    tu_network *network;
    tutti_status status = tu_network_get(group->world, &network);
    int64_t deadline = tu_deadline(info->timeout_ns);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&network->lock);
    uint64_t mark = network->mark;
    for (int late; ask_unfenced(network, -1, mark, &late) != 0;) {
        tu_network_drive(network);
        if (ask_unfenced(network, -1, mark, &late) == 0)
            break;
        pthread_mutex_unlock(&network->lock);
        status = look_around(group, info, late, deadline);
        pthread_mutex_lock(&network->lock);
        if (status != TUTTI_OK)
            break;
        tu_network_sleep(network, FENCE_SLEEP);
    }
    pthread_mutex_unlock(&network->lock);
    return status;
}

bool tu_network_ask_for(tu_network_group *side, tu_network_fetch *get, int member, uint64_t number, uint64_t offset,
                        void *to, size_t bytes) {
    tu_network *network = side->network;
    pthread_mutex_lock(&network->lock);
    *get = (tu_network_fetch){ .token = ++network->tokens, .member = member, .to = to, .bytes = bytes };
    bool sent = send_short(side, member, GET, number, offset, bytes, get->token);
    if (sent) {
        get->next = side->gets;
        side->gets = get;
    }
    pthread_mutex_unlock(&network->lock);
    return sent;
}

static void unlink_get(tu_network_group *side, const tu_network_fetch *get) {
    for (tu_network_fetch **link = &side->gets; *link != NULL; link = &(*link)->next)
        if (*link == get) {
            *link = get->next;
            return;
        }
}

void tu_network_forget(tu_network_group *side, tu_network_fetch *get) {
    pthread_mutex_lock(&side->network->lock);
    unlink_get(side, get);
    pthread_mutex_unlock(&side->network->lock);
}

/* ---- windows ---- */

void tu_network_window_open(tu_network_group *side, tu_network_window *window) {
    pthread_mutex_lock(&side->network->lock);
    window->side = side;
    window->next = side->windows;
    side->windows = window;
    pthread_mutex_unlock(&side->network->lock);
}

void tu_network_window_close(tu_network_window *window) {
    tu_network_group *side = window->side;
    if (side == NULL)
        return;
    pthread_mutex_lock(&side->network->lock);
    for (tu_network_window **link = &side->windows; *link != NULL; link = &(*link)->next)
        if (*link == window) {
            *link = window->next;
            break;
        }
    pthread_mutex_unlock(&side->network->lock);
}

void tu_network_window_renew(tu_network_group *side, tu_network_window *window) {
    window->number += RENEWAL;
    tu_network_window_open(side, window);
}

/* ---- what others do; with the lock held ---- */

static tu_network_window *find_window(const tu_network_group *side, uint64_t number) {
    tu_network_window *window = side->windows;
    while (window != NULL && window->number != number)
        window = window->next;
    return window; /* NULL: it was released here, and what comes for it is for nobody */
}

static bool lies_within(uint64_t offset, uint64_t bytes, uint64_t first, uint64_t length) {
    return offset >= first && offset - first <= length && bytes <= length - (offset - first);
}

static void refuse(const tu_network_group *side, int member, const char *what, uint64_t offset, uint64_t bytes) {
    TU_LOG(TUTTI_LOG_WARN, side->network->world->log, "network",
           "rank %d of group %s %s %llu bytes at byte %llu, outside of the block: dropped", member, side->group->name,
           what, (unsigned long long)bytes, (unsigned long long)offset);
}

static void note_taken(tu_network_group *side, int member, size_t bytes) {
    tu_network_flow *flow = &side->puts[member];
    flow->owed += bytes + COST;
    if (flow->owed < WINDOW / 4)
        return;
    if (send_short(side, member, TAKEN, 0, flow->owed, 0, 0))
        flow->owed = 0;
}

static void take_put(tu_network_group *side, int member, const tu_network_header *header, const void *data,
                     size_t bytes) {
    const tu_network_window *window = find_window(side, header->sequence);
    if (window != NULL && lies_within(header->offset, bytes, 0, window->bytes))
        memcpy(window->data + header->offset, data, bytes);
    else if (window != NULL)
        refuse(side, member, "puts", header->offset, bytes);
    note_taken(side, member, bytes);
}

static void take_word(tu_network_group *side, int member, const tu_network_header *header) {
    const tu_network_window *window = find_window(side, header->sequence);
    if (window != NULL && header->offset % sizeof(uint64_t) == 0 &&
        lies_within(header->offset, sizeof(uint64_t), window->words_offset, window->words_bytes))
        /* Pairs with the acquire of whoever waits for the word: the puts before it are there. */
        atomic_store_explicit((_Atomic uint64_t *)(void *)(window->data + header->offset), header->said.signature,
                              memory_order_release);
    else if (window != NULL)
        refuse(side, member, "sets", header->offset, sizeof(uint64_t));
    note_taken(side, member, 0);
}

static void answer_get(tu_network_group *side, int member, const tu_network_header *header) {
    const tu_network_window *window = find_window(side, header->sequence);
    bool good = window != NULL && header->total <= TU_LETTER_BYTES &&
                lies_within(header->offset, header->total, 0, window->bytes);
    tu_network_peer *peer = &side->network->peers[side->group->ranks[member]];
    if (peer->answering > ANSWERS_MOST) { /* whoever reads the answers never has so many under way */
        tu_network_cut(side->network, side->group->ranks[member], "it asked for more than 128 MiB and read nothing");
        return;
    }
    tu_dispatch *dispatch = begin(side, member, good ? (size_t)header->total : 0);
    if (dispatch == NULL)
        return;
    dispatch->answer = dispatch->bytes + sizeof *dispatch;
    peer->answering += dispatch->answer;
    if (good)
        memcpy(dispatch + 1, window->data + header->offset, (size_t)header->total);
    send(side, dispatch, good ? GOT : REFUSED, header->sequence, header->offset, dispatch->bytes,
         header->said.signature);
}

static void take_answer(tu_network_group *side, int member, const tu_network_header *header, const void *data,
                        size_t bytes) {
    tu_network_fetch *get = side->gets;
    while (get != NULL && (get->token != header->said.signature || get->member != member))
        get = get->next;
    if (get == NULL)
        return; /* nobody waits for it any more */
    bool good = header->step == GOT && bytes == get->bytes;
    if (good)
        memcpy(get->to, data, bytes);
    unlink_get(side, get);
    /* Released last; pairs with the acquire of whoever waits, whose memory it is. */
    atomic_store_explicit(&get->refused, !good, memory_order_relaxed);
    atomic_store_explicit(&get->over, true, memory_order_release);
}

void tu_network_fence_arrived(tu_network *network, int rank, uint64_t puts) {
    tu_network_peer *peer = &network->peers[rank];
    if (puts <= peer->arrived || puts > peer->puts)
        return;
    peer->arrived = puts;
    peer->arrived_mark = puts >= peer->asked ? peer->asked_mark : peer->arrived_mark;
    note_fenced(network, peer);
    tu_network_wake(network);
}

void tu_network_fence_written(tu_network *network, int rank) {
    tu_network_peer *peer = &network->peers[rank];
    note_unfenced(network, peer);
    network->mark++;
    peer->written++;
}

void tu_network_fence_flushed(tu_network *network, int rank, uint64_t written, uint64_t mark) {
    tu_network_peer *peer = &network->peers[rank];
    peer->flushed_mark = mark;
    if (written <= peer->flushed)
        return;
    peer->flushed = written;
    note_fenced(network, peer);
    tu_network_wake(network);
}

void tu_network_fence_needless(tu_network *network, int rank) {
    tu_network_fence_arrived(network, rank, network->peers[rank].puts);
    tu_network_fence_flushed(network, rank, network->peers[rank].written, network->mark);
}

static void hear_about_signals(const tu_network_group *side, int member, const tu_network_header *header) {
    const tu_network_window *window = find_window(side, header->sequence);
    if (window != NULL)
        window->told(window->argument, member, (uint32_t)header->offset, (uint32_t)(header->said.signature >> 32),
                     (uint32_t)header->said.signature);
}

void tu_network_memory_arrived(tu_network_group *side, int member, const tu_network_header *header, const void *data,
                               size_t bytes) {
    tu_network_flow *flow = &side->puts[member];
    uint64_t ahead = flow->sent - flow->taken;
    switch ((memory_kind)header->step) {
    case PUT:
        take_put(side, member, header, data, bytes);
        break;
    case SET:
        take_word(side, member, header);
        break;
    case TAKEN:
        flow->taken += header->offset < ahead ? header->offset : ahead; /* more than was sent is no room */
        break;
    case TELL:
        hear_about_signals(side, member, header);
        break;
    case GET:
        answer_get(side, member, header);
        break;
    case GOT:
    case REFUSED:
        take_answer(side, member, header, data, bytes);
        break;
    default:
        break;
    }
    tu_network_wake(side->network);
}
