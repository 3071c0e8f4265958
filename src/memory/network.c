/* SPDX-License-Identifier: Apache-2.0
 *
 * The world's side of the network: opening, the thread, what comes in.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/thread.h"
#include "memory/network_inner.h"
#include "memory/tables.h"
#include "world/group.h"

#define CLOSE_LIMIT (3 * TU_SECOND)    /* for what was sent to leave, when the world closes */
#define SHORT_NAP (1 * TU_MILLISECOND) /* of the thread, while calls come and go: they drive the network */
#define LONG_NAP (16 * TU_MILLISECOND) /* and while one of them lasts */
#define BROKEN_AFTER \
    (300 * TU_MILLISECOND) /* for somebody to tell why a connection broke, or for its other end to come */
#define IDLE_SLEEP 1000    /* milliseconds */
#define PART_SLEEP 20      /* milliseconds */
/* Sequence of the fence that a rank asks for when it closes its world; `offset` is its door then. */
#define LAST_QUESTION 1
#define WAY_QUESTION 2 /* and of the one by which it asks whether a peer still hears it */

/* ---- messages of the network's own ---- */

void tu_network_wake(const tu_network *network) {
    const tutti_world *world = network->world;
    tu_bell_ring(tu_job_sleepers(world->job), tu_job_bell(world->job, world->local_rank));
}

void tu_network_fragment(tu_network *network, tu_dispatch *dispatch, const tu_network_header *header, const void *data,
                         size_t bytes) {
    bool finished = true;
    const char *why =
        network->part->send(network->state, dispatch->peer, header, sizeof *header, data, bytes, dispatch, &finished);
    if (why != NULL) { /* who waits is told by the state of the peer */
        tu_network_lost(network, dispatch->peer, why);
        dispatch->failed = true;
    } else if (!finished) {
        dispatch->under_way++;
    }
    if (header->kind < TU_NETWORK_KINDS) {
        network->sent[header->kind].messages++;
        network->sent[header->kind].bytes += bytes;
    }
    network->stirred = true;
}

tu_dispatch *tu_network_own_begin(tu_network *network, int peer, size_t bytes) {
    if (!network->peers[peer].connected || network->peers[peer].lost)
        return NULL;
    tu_dispatch *dispatch = malloc(sizeof *dispatch + bytes);
    if (dispatch != NULL)
        *dispatch = (tu_dispatch){ .peer = peer, .bytes = bytes };
    return dispatch;
}

static void free_own(tu_network *network, tu_dispatch *dispatch) {
    network->peers[dispatch->peer].answering -= dispatch->answer;
    free(dispatch);
}

void tu_network_own_send(tu_network *network, tu_dispatch *dispatch, const tu_network_header *header) {
    tu_network_fragment(network, dispatch, header, dispatch + 1, dispatch->bytes);
    if (dispatch->under_way == 0)
        free_own(network, dispatch);
}

void tu_network_own(tu_network *network, int peer, tu_network_kind kind, uint64_t key, uint64_t sequence,
                    uint64_t offset, const tu_network_said *said, const void *data, size_t bytes) {
    tu_dispatch *dispatch = tu_network_own_begin(network, peer, bytes);
    if (dispatch == NULL && network->peers[peer].connected && !network->peers[peer].lost)
        tu_network_cut(network, peer, "there was no memory for a message to it"); /* it may wait for this one */
    if (dispatch == NULL)
        return;
    if (bytes > 0)
        memcpy(dispatch + 1, data, bytes);
    tu_network_header header = { .magic = TU_NETWORK_MAGIC,
                                 .version = TU_NETWORK_VERSION,
                                 .door = network->peers[peer].door,
                                 .key = key,
                                 .sequence = sequence,
                                 .offset = offset,
                                 .total = bytes,
                                 .kind = (uint32_t)kind,
                                 .from = network->world->rank };
    if (said != NULL)
        header.said = *said;
    tu_network_own_send(network, dispatch, &header);
}

/* ---- what comes ---- */

tu_network_kept *tu_network_keep(const tu_network_header *header, const void *data, size_t bytes, void *parcel) {
    tu_network_kept *kept = malloc(sizeof *kept + (parcel == NULL ? bytes : 0));
    if (kept == NULL)
        return NULL;
    *kept = (tu_network_kept){ .header = *header, .parcel = parcel, .bytes = bytes };
    kept->data = parcel != NULL ? data : (const unsigned char *)(kept + 1);
    if (parcel == NULL && bytes > 0)
        memcpy(kept + 1, data, bytes);
    return kept;
}

void tu_network_free_kept(tu_network *network, tu_network_kept *kept) {
    if (kept->parcel != NULL)
        network->part->give_back(network->state, kept->parcel);
    free(kept);
}

static bool sound(const tu_network *network, const tu_network_header *header, size_t header_bytes, size_t bytes) {
    return header_bytes == sizeof *header && header->magic == TU_NETWORK_MAGIC &&
           header->version == TU_NETWORK_VERSION && header->door == network->door && header->from >= 0 &&
           header->from < network->world->size && header->kind > 0 && header->kind < TU_NETWORK_KINDS &&
           (header->kind != TU_NETWORK_DATA ||
            (header->offset <= header->total && bytes <= header->total - header->offset));
}

uint64_t tu_network_orphan_cost(const tu_network_kept *kept) {
    return kept->bytes + sizeof *kept;
}

static bool is_closed(const tu_network *network, uint64_t key) {
    for (unsigned i = 0; i < network->closed_count && i < TU_NETWORK_CLOSED; i++)
        if (network->closed[i] == key)
            return true;
    return false;
}

/* For a group that has no side here. The kinds that are kept are those that a member may send before this one has used
 * the group; everything else answers what a side sent, which is no more. */
static bool orphaned(tu_network *network, const tu_network_header *header, const void *data, size_t bytes,
                     void *parcel) {
    tu_network_peer *peer = &network->peers[header->from];
    if ((header->kind != TU_NETWORK_DATA && header->kind != TU_NETWORK_LETTER && header->kind != TU_NETWORK_ASK &&
         header->kind != TU_NETWORK_ENDED) ||
        peer->lost || is_closed(network, header->key))
        return false;
    tu_network_kept *kept = NULL;
    if (peer->orphaned <= TU_NETWORK_ORPHANS_MOST)
        kept = tu_network_keep(header, data, bytes, parcel);
    if (kept == NULL) {
        tu_network_cut(network, header->from,
                       peer->orphaned <= TU_NETWORK_ORPHANS_MOST
                           ? "there was no memory for its messages"
                           : "it sent more than 128 MiB to groups that this rank has not used yet");
        return false;
    }
    peer->orphaned += tu_network_orphan_cost(kept);
    *network->orphans_end = kept;
    network->orphans_end = &kept->next;
    return true;
}

bool tu_network_arrived(void *owner, const void *bytes_of_header, size_t header_bytes, const void *data, size_t bytes,
                        void *parcel) {
    tu_network *network = owner;
    tu_network_header header = { 0 };
    memcpy(&header, bytes_of_header, header_bytes < sizeof header ? header_bytes : sizeof header);
    if (!sound(network, &header, header_bytes, bytes)) {
        TU_LOG(TUTTI_LOG_WARN, network->world->log, "network",
               "a message that is not of this job was dropped (%zu bytes)", bytes);
        return false;
    }
    network->stirred = true;
    network->peers[header.from].heard = true;
    if (header.kind == TU_NETWORK_HELLO)
        return false;
    if (header.kind == TU_NETWORK_GOODBYE) {
        network->peers[header.from].gone = true;
        tu_network_fence_needless(network, header.from);
        return false;
    }
    if (header.kind == TU_NETWORK_FENCE) { /* what came before it was put in its place */
        tu_network_own(network, header.from, TU_NETWORK_FENCED, 0, header.sequence, header.offset, NULL, NULL, 0);
        return false;
    }
    if (header.kind == TU_NETWORK_FENCED) {
        if (header.sequence == LAST_QUESTION)
            network->peers[header.from].parted = header.offset == network->door;
        else if (header.sequence == WAY_QUESTION)
            network->peers[header.from].answered_at = tu_clock_now();
        else
            tu_network_fence_arrived(network, header.from, header.offset);
        return false;
    }
    if (header.kind == TU_NETWORK_REVOKE || header.kind == TU_NETWORK_REVOKED) {
        (header.kind == TU_NETWORK_REVOKE ? tu_network_revoke_arrived
                                          : tu_network_revoked_arrived)(network, header.from, header.sequence);
        return false;
    }
    if (header.kind == TU_NETWORK_INQUIRE) {
        tu_network_inquire_arrived(network, &header);
        return false;
    }
    if (header.kind == TU_NETWORK_DOING) {
        tu_network_doing_arrived(network, &header, data, bytes);
        return false;
    }
    tu_network_group *side = network->groups;
    while (side != NULL && side->group->key != header.key)
        side = side->next;
    if (side != NULL)
        return tu_network_group_arrived(side, &header, data, bytes, parcel);
    return orphaned(network, &header, data, bytes, parcel);
}

static void sent(void *owner, void *token, bool good) {
    tu_network *network = owner;
    tu_dispatch *dispatch = token;
    dispatch->under_way--;
    network->stirred = true;
    if (dispatch->group == NULL) {
        free_own(network, dispatch);
        return;
    }
    dispatch->failed = dispatch->failed || !good;
    network->settling = true;
}

void tu_network_lost(void *owner, int rank, const char *why) {
    tu_network *network = owner;
    tu_network_peer *peer = &network->peers[rank];
    if (!peer->lost) {
        snprintf(peer->why, sizeof peer->why, "%s", why);
        peer->lost_at = tu_clock_now();
    }
    peer->lost = true;
    tu_network_fence_needless(network, rank);
    network->stirred = true;
}

void tu_network_cut(tu_network *network, int rank, const char *why) {
    tu_network_lost(network, rank, why);
    network->peers[rank].cut = network->cutting = true;
}

/* Not inside of progress: a connection is not closed by what it brings. */
static void cut_off(tu_network *network) {
    network->cutting = false;
    for (int rank = 0; rank < network->world->size; rank++)
        if (network->peers[rank].cut) {
            network->peers[rank].cut = false;
            network->part->disconnect(network->state, rank);
        }
}

static const tu_network_events events = { .header_bytes = sizeof(tu_network_header),
                                          .arrived = tu_network_arrived,
                                          .sent = sent,
                                          .lost = tu_network_lost,
                                          .moved = tu_network_moved };

static void settle(tu_network *network) {
    while (network->settling) {
        network->settling = false;
        for (tu_network_group *side = network->groups; side != NULL; side = side->next)
            tu_network_group_settle(side);
    }
}

static bool never(void *argument) {
    (void)argument;
    return false;
}

void tu_network_drive(tu_network *network) {
    (void)tu_network_drive_until(network, 1, never, NULL);
}

/* A look at the sockets is a system call, and one that finds nothing costs as much as one that does: whoever has what
 * it waits for does not make it. */
bool tu_network_drive_until(tu_network *network, int looks, bool (*ready)(void *argument), void *argument) {
    bool any, over;
    network->drives++;
    do {
        any = network->part->progress(network->state);
        network->stirred |= any;
        if (network->cutting)
            cut_off(network);
        if (network->revoking)
            tu_network_answer_revocations(network);
        settle(network);
        over = ready(argument);
        looks = any ? looks : looks - 1;
    } while (looks > 0 && !over);
    if (network->stirred && network->sleepers > 0) {
        uint64_t count = (uint64_t)network->sleepers;
        (void)!write(network->bell, &count, sizeof count); /* full: they are awake already */
    }
    network->stirred = false;
    return over;
}

/* ---- the thread ---- */

static void nap(tu_network *network, int64_t nanoseconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t time = until.tv_sec * TU_SECOND + until.tv_nsec + nanoseconds;
    until = (struct timespec){ .tv_sec = time / TU_SECOND, .tv_nsec = time % TU_SECOND };
    network->napping = nanoseconds > SHORT_NAP;
    pthread_cond_timedwait(&network->leaving, &network->lock, &until);
    network->napping = false;
}

void tu_network_sleep(tu_network *network, int milliseconds) {
    if (!network->part->arm(network->state))
        return;
    network->sleepers++;
    pthread_mutex_unlock(&network->lock);
    struct pollfd fds[2] = { { .fd = network->part->descriptor(network->state), .events = POLLIN },
                             { .fd = network->bell, .events = POLLIN } };
    uint64_t rung;
    if (poll(fds, 2, milliseconds) > 0 && (fds[1].revents & POLLIN) != 0)
        (void)!read(network->bell, &rung, sizeof rung);
    pthread_mutex_lock(&network->lock);
    network->sleepers--;
}

/* Where calls follow each other the thread naps between short looks: neither what comes for them nor their end wakes
 * it, which would cost each of them more than their message. A call that lasts lets it nap longer, and wakes it when it
 * leaves; when none came during a nap, or one goes to sleep itself, the thread sleeps on the network's descriptor. */
static void *tend(void *argument) {
    tu_network *network = argument;
    int64_t length = SHORT_NAP;
    uint64_t entries = 0;
    pthread_mutex_lock(&network->lock);
    while (!network->ending) {
        uint64_t drives = network->drives;
        bool lasts = network->callers > 0 && network->entries == entries;
        bool recent = network->entries != entries && !network->handed_over;
        network->handed_over = false;
        if (network->callers > 0 || recent) {
            length = lasts && length * 2 < LONG_NAP ? length * 2 : lasts ? LONG_NAP : SHORT_NAP;
            entries = network->entries;
            nap(network, length);
            if (network->drives == drives) /* they are busy with something else */
                tu_network_drive(network);
            continue;
        }
        tu_network_drive(network);
        tu_network_sleep(network, IDLE_SLEEP);
    }
    pthread_mutex_unlock(&network->lock);
    return NULL;
}

/* ---- opening and closing ---- */

static void free_network(tu_network *network) {
    for (int rank = 0; rank < network->world->size && network->peers != NULL; rank++)
        free(network->peers[rank].address);
    free(network->peers);
    if (network->bell >= 0)
        close(network->bell);
    pthread_mutex_destroy(&network->lock);
    pthread_mutex_destroy(&network->looking);
    pthread_mutex_destroy(&network->inquiring);
    pthread_cond_destroy(&network->leaving);
    free(network);
}

/* The plug-in's part, or an error in words of what the user wanted. */
static tutti_status find_part(tutti_world *world, const tu_network_part **part) {
    const tu_backend *backend;
    void *state;
    tutti_status status = tu_backend_open(world, "ucx", &backend, &state);
    if (status == TUTTI_OK && backend->network == NULL)
        status = tu_error(TUTTI_ERROR_BACKEND, "plug-in tutti-ucx has no messages to other hosts: is it an older one?");
    if (status == TUTTI_ERROR_NOT_FOUND)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "groups whose ranks are on several hosts need the plug-in tutti-ucx: %s",
                        tutti_error_message());
    if (status == TUTTI_OK)
        *part = backend->network;
    return status;
}

static tutti_status start(tu_network *network) {
    tutti_status status = network->part->open(&tu_backend_host_table, network->world, network->world->address,
                                              network->world->size, &events, network, &network->state);
    if (status != TUTTI_OK)
        return status;
    network->most = network->part->most(network->state);
    status = tu_network_leave_record(network);
    int error = status == TUTTI_OK ? tu_thread_start("tutti-network", tend, network, &network->thread) : 0;
    if (error != 0)
        status = tu_error_system(error, "cannot start the thread that looks after messages from other hosts");
    if (status != TUTTI_OK)
        network->part->close(network->state, 0);
    return status;
}

static tutti_status make_network(void *owner, void **made) {
    tutti_world *world = owner;
    tu_network *network = calloc(1, sizeof *network);
    if (network == NULL)
        return tu_error_memory("the network of a world", sizeof *network);
    network->world = world;
    network->orphans_end = &network->orphans;
    pthread_mutex_init(&network->lock, NULL);
    pthread_mutex_init(&network->looking, NULL);
    pthread_mutex_init(&network->inquiring, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&network->leaving, &attributes);
    pthread_condattr_destroy(&attributes);
    network->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
    network->peers = calloc((size_t)world->size, sizeof *network->peers);
    tutti_status status = TUTTI_OK;
    if (network->bell < 0)
        status = tu_error_system(errno, "cannot make an eventfd for messages from other hosts");
    else if (network->peers == NULL)
        status = tu_error_memory("the peers of a network", (size_t)world->size * sizeof *network->peers);
    else if (getrandom(&network->door, sizeof network->door, 0) != sizeof network->door)
        status = tu_error_system(errno, "no random numbers");
    if (status == TUTTI_OK)
        status = find_part(world, &network->part); /* open already: see tu_network_get */
    if (status == TUTTI_OK)
        status = start(network);
    if (status != TUTTI_OK) {
        free_network(network);
        return status;
    }
    *made = network;
    return TUTTI_OK;
}

/* Whether somebody has not said yet that everything has come. One that closes its own world needs nothing; one that
 * never sent anything cannot answer, and there is nothing of it that could be unread. Where a connection broke, nobody
 * is waited for: whatever was under way has failed. */
static bool somebody_reads(const tu_network *network) {
    bool any = false;
    for (int rank = 0; rank < network->world->size; rank++) {
        const tu_network_peer *peer = &network->peers[rank];
        if (peer->lost && !peer->gone)
            return false;
        any = any || (peer->heard && !peer->lost && !peer->gone && !peer->parted && (peer->connected || peer->known));
    }
    return any;
}

/* Who has sent this rank something, and got nothing from it yet, is connected to as well: it would take the end of its
 * connection for a death. */
static void connect_to_senders(tu_network *network) {
    tutti_error_copy before;
    tu_error_save(&before);
    for (int rank = 0; rank < network->world->size; rank++) {
        const tu_network_peer *peer = &network->peers[rank];
        pthread_mutex_lock(&network->lock);
        bool heard = peer->heard && !peer->connected && !peer->lost && !peer->gone;
        pthread_mutex_unlock(&network->lock);
        if (heard && tu_network_look_once(network, rank) == TUTTI_OK && peer->known)
            (void)tu_network_connect_to(network, rank);
    }
    tu_error_restore(&before);
}

/* With the lock held: to those that were not told yet, also such that came only now. */
static void bid_farewell(tu_network *network) {
    for (int rank = 0; rank < network->world->size; rank++) {
        tu_network_peer *peer = &network->peers[rank];
        if (!peer->connected || peer->bade)
            continue;
        peer->bade = true;
        tu_network_own(network, rank, TU_NETWORK_GOODBYE, 0, 0, 0, NULL, NULL, 0);
        if (peer->heard)
            tu_network_own(network, rank, TU_NETWORK_FENCE, 0, LAST_QUESTION, network->door, NULL, NULL, 0);
    }
}

/* A connection that is closed while something comes in that nobody reads any more is cut, and what its other end has
 * not read by then is lost. So whoever could still be sending says first that it has read everything. */
static void take_leave(tu_network *network, int64_t deadline) {
    for (bool wait = true; wait;) {
        connect_to_senders(network);
        pthread_mutex_lock(&network->lock);
        bid_farewell(network);
        tu_network_drive(network);
        wait = somebody_reads(network) && tu_clock_now() < deadline;
        if (wait) {
            tu_network_sleep(network, PART_SLEEP);
            tu_network_drive(network);
        }
        pthread_mutex_unlock(&network->lock);
    }
}

static void end_network(void *argument) {
    tu_network *network = argument;
    atomic_store_explicit(&network->world->forget_hosts, NULL, memory_order_release); /* pairs with free_group */
    pthread_mutex_lock(&network->lock);
    network->ending = true;
    uint64_t one = 1;
    (void)!write(network->bell, &one, sizeof one);
    pthread_cond_broadcast(&network->leaving);
    pthread_mutex_unlock(&network->lock);
    pthread_join(network->thread, NULL);
    tu_network_shares_close(network); /* of handles that outlive it */
    int64_t deadline = tu_deadline(CLOSE_LIMIT);
    take_leave(network, deadline);
    while (network->orphans != NULL) {
        tu_network_kept *next = network->orphans->next;
        tu_network_free_kept(network, network->orphans);
        network->orphans = next;
    }
    network->part->close(network->state, deadline);
    tu_network_revocations_free(network);
    free_network(network);
}

static const tu_attachment network_attachment = { .make = make_network, .end = end_network };

tutti_status tu_network_get(tutti_world *world, tu_network **network) {
    const tu_network_part *part;
    void *made = tu_attachment_find(&world->attachments, &network_attachment);
    /* The plug-in is attached to the world too, and before the network, which uses it until its end. */
    tutti_status status = made != NULL ? TUTTI_OK : find_part(world, &part);
    if (status == TUTTI_OK && made == NULL)
        status = tu_attachment_get(&world->attachments, &network_attachment, &made);
    *network = made;
    return status;
}

tu_network *tu_network_find(const tutti_world *world) {
    return tu_attachment_find(&world->attachments, &network_attachment);
}

void tu_network_forget_group(tutti_group *group) {
    tu_network *network = tu_network_find(group->world);
    if (network == NULL)
        return;
    pthread_mutex_lock(&network->lock);
    tu_network_kept **link = &network->orphans;
    for (tu_network_kept *kept; (kept = *link) != NULL;) {
        if (kept->header.key != group->key) {
            link = &kept->next;
            continue;
        }
        *link = kept->next;
        network->peers[kept->header.from].orphaned -= tu_network_orphan_cost(kept);
        tu_network_free_kept(network, kept);
    }
    network->orphans_end = link;
    if (!is_closed(network, group->key))
        network->closed[network->closed_count++ % TU_NETWORK_CLOSED] = group->key;
    pthread_mutex_unlock(&network->lock);
}

tutti_status tu_network_publish(tutti_world *world) {
    tu_network *network = tu_network_find(world);
    return network != NULL ? tu_network_leave_record(network) : TUTTI_OK;
}

/* Time in which this process stood still is nobody's silence: whoever asks does so many times a second. */
static void forgive_stillness(tu_network *network, int64_t now, int64_t silence, int64_t since) {
    int64_t gap = now - network->asked_way;
    if (network->asked_way > since && gap > silence / 4)
        for (int rank = 0; rank < network->world->size; rank++)
            network->peers[rank].asked_at += network->peers[rank].asked_at > 0 ? gap : 0;
    network->asked_way = now;
}

/* With the lock held. Who never sent this rank anything may have no way to answer. */
static tu_way ask_for_way(tu_network *network, int rank, int64_t since) {
    tu_network_peer *peer = &network->peers[rank];
    int64_t now = tu_clock_now(), silence = tu_settings_number(&network->world->settings, TU_SETTING_HOST_TIMEOUT);
    forgive_stillness(network, now, silence, since);
    if (!peer->connected || !peer->heard || peer->answered_at >= since)
        return TU_WAY_OPEN;
    if (peer->asked_at < since) {
        peer->asked_at = now;
        tu_network_own(network, rank, TU_NETWORK_FENCE, 0, WAY_QUESTION, network->door, NULL, NULL, 0);
    }
    return now - peer->asked_at < silence ? TU_WAY_ASKED : TU_WAY_BROKEN;
}

tu_way tu_network_way(tutti_world *world, int rank, int64_t since, bool make) {
    tu_network *network = tu_network_find(world);
    if (network == NULL)
        return TU_WAY_OPEN;
    if (make)
        (void)tu_network_try_connect(network, rank); /* what is in the way shows below */
    pthread_mutex_lock(&network->lock);
    const tu_network_peer *peer = &network->peers[rank];
    tu_way way = peer->gone ? TU_WAY_CLOSED : TU_WAY_BROKEN;
    if (!peer->gone && !peer->lost)
        way = ask_for_way(network, rank, since);
    else if (!peer->gone && tu_clock_now() - peer->lost_at < BROKEN_AFTER)
        way = TU_WAY_ASKED;
    pthread_mutex_unlock(&network->lock);
    return way;
}
