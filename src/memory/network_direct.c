/* SPDX-License-Identifier: Apache-2.0
 *
 * Shares: blocks of this rank that members on other hosts write and read by the fabric itself, and theirs for this one.
 *
 * Each rendezvous registers its block and gives the key to the members of its group, so that a key opens one block and
 * no more. Bounds are checked here, before anything is sent: a fabric's hardware looks at them again, UCX's emulation
 * does not. The owner does not see what comes, so whoever wrote says when it is there: after a flush of the connection,
 * which everything that orders waits for (network_memory.c).
 *
 * A key is taken back before its block goes. The owner asks those who have it; each writes no more, flushes and
 * answers, by its network's thread if by nobody else. Who does not answer in time is cut off, after which nothing of it
 * arrives. So no late write lands in memory that serves something else by then.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "memory/network_inner.h"

#define END_LIMIT (3 * TU_SECOND) /* for members to give a key back; then each that has not is cut off */
#define END_SLEEP 20              /* milliseconds, at most, between two looks */
#define ABANDON_LIMIT (2 * TU_SECOND)
#define ABANDON_SLEEP 5        /* milliseconds */
#define REVOCATIONS_MOST 65536 /* of one peer that are not answered yet */

/* Another member's block. */
typedef struct remote {
    int rank; /* world rank */
    bool far;
    bool met; /* its key is known, or that it has none */
    uint64_t address, number;
    void *key;     /* NULL: it is reached by messages */
    bool revoked;  /* its owner has taken the key back */
    bool returned; /* that member has given back the key to this rank's block */
    int under_way; /* transfers by the key */
} remote;

struct tu_network_share {
    tu_network_share *next; /* of the network */
    tu_network *network;    /* NULL: it ended before */
    void *region;           /* of the part; NULL: this rank's block is reached by messages */
    uint64_t number;
    size_t bytes;
    int size;
    remote remotes[]; /* by member */
};

struct tu_network_revocation {
    tu_network_revocation *next;
    int rank;
    uint64_t number;
    uint64_t mark;   /* nothing is written by that key after this */
    uint64_t shares; /* of this rank, when it came */
    bool answered;   /* and kept, since its key may be met yet */
};

/* ---- keys ---- */

static uint64_t checksum_of(const tu_network_key *key) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325) ^ key->address ^ key->bytes << 1 ^ key->number << 2 ^
                    (uint64_t)key->key_bytes << 3;
    for (uint32_t i = 0; i < key->key_bytes && i < TU_NETWORK_KEY_BYTES; i++)
        hash = (hash ^ key->key[i]) * UINT64_C(0x100000001b3);
    return hash;
}

void tu_network_key_seal(tu_network_key *key) {
    key->checksum = checksum_of(key);
}

void tu_network_key_none(tu_network_key *key) {
    *key = (tu_network_key){ .magic = TU_NETWORK_MAGIC, .version = TU_NETWORK_VERSION };
}

bool tu_network_shares(const tu_network_group *side) {
    const tu_network *network = side->network;
    return network->part->direct != NULL && network->part->direct(network->state, -1);
}

/* With the lock held. Memory that cannot be registered is reached by messages, unless the user insists. */
static tutti_status offer(tu_network_share *share, void *data, tu_network_key *key) {
    tu_network *network = share->network;
    size_t key_bytes = 0;
    tutti_error_copy before;
    tu_error_save(&before);
    tutti_status status =
        network->part->share(network->state, data, share->bytes, &share->region, key->key, &key_bytes);
    if (status != TUTTI_OK && strcmp(tu_settings_text(&network->world->settings, TU_SETTING_RMA), "on") == 0)
        return status;
    if (status != TUTTI_OK) {
        TU_LOG(TUTTI_LOG_WARN, network->world->log, "network", "%s; it is reached by messages", tutti_error_message());
        tu_error_restore(&before);
        return TUTTI_OK;
    }
    key->number = share->number;
    key->address = (uint64_t)(uintptr_t)data;
    key->key_bytes = (uint32_t)key_bytes;
    return TUTTI_OK;
}

tutti_status tu_network_share_make(tu_network_group *side, void *data, size_t bytes, tu_network_key *key,
                                   tu_network_share **made) {
    tu_network *network = side->network;
    const tutti_group *group = side->group;
    tu_network_key_none(key);
    key->bytes = bytes;
    tu_network_share *share = calloc(1, sizeof *share + (size_t)group->size * sizeof *share->remotes);
    if (share == NULL)
        return tu_error_memory("the keys of a block", (size_t)group->size * sizeof *share->remotes);
    share->network = network;
    share->bytes = bytes;
    share->size = group->size;
    for (int member = 0; member < group->size; member++)
        share->remotes[member] = (remote){ .rank = group->ranks[member], .far = group->job_ranks[member] < 0 };
    pthread_mutex_lock(&network->lock);
    share->number = ++network->share_numbers;
    tutti_status status = offer(share, data, key);
    if (status == TUTTI_OK) {
        share->next = network->shares;
        network->shares = share;
    }
    pthread_mutex_unlock(&network->lock);
    tu_network_key_seal(key);
    if (status != TUTTI_OK) {
        free(share);
        return status;
    }
    *made = share;
    return TUTTI_OK;
}

/* UCX takes a key as it is, so nothing but a whole one gets there. */
static tutti_status check_key(const tu_network_share *share, int member, const tu_network_key *key) {
    if (key->magic == TU_NETWORK_MAGIC && key->version != TU_NETWORK_VERSION)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "rank %d tells keys of version %u, this one version %u: install one version everywhere", member,
                        key->version, TU_NETWORK_VERSION);
    if (key->magic != TU_NETWORK_MAGIC || key->key_bytes == 0 || key->key_bytes > TU_NETWORK_KEY_BYTES ||
        key->number == 0 || key->bytes != share->bytes || key->address + key->bytes < key->address ||
        key->checksum != checksum_of(key))
        return tu_error(TUTTI_ERROR_PROTOCOL, "what rank %d tells is no key to a block of %zu bytes", member,
                        share->bytes);
    return TUTTI_OK;
}

static bool is_asked(const tu_network *network, int rank, uint64_t number) {
    const tu_network_revocation *asked = network->revocations;
    while (asked != NULL && (asked->rank != rank || asked->number != number))
        asked = asked->next;
    return asked != NULL;
}

/* With the lock held. NULL: it was taken, or is not to be. */
static const char *take(tu_network *network, remote *theirs, const tu_network_key *key) {
    theirs->address = key->address;
    theirs->number = key->number;
    theirs->revoked = is_asked(network, theirs->rank, key->number);
    if (theirs->revoked || !network->part->direct(network->state, theirs->rank))
        return NULL;
    return network->part->take_key(network->state, theirs->rank, key->key, &theirs->key);
}

tutti_status tu_network_share_meet(tu_network_share *share, int member, const tu_network_key *key) {
    tu_network *network = share->network;
    remote *theirs = &share->remotes[member];
    bool none = key->magic == TU_NETWORK_MAGIC && key->version == TU_NETWORK_VERSION && key->key_bytes == 0;
    if (!theirs->far)
        return TUTTI_OK;
    tutti_status status = none ? TUTTI_OK : check_key(share, member, key);
    pthread_mutex_lock(&network->lock);
    const char *why = none || status != TUTTI_OK ? NULL : take(network, theirs, key);
    theirs->met = true;
    network->revoking = network->revocations != NULL;
    pthread_mutex_unlock(&network->lock);
    if (why != NULL)
        status = tu_error(TUTTI_ERROR_NETWORK, "UCX does not take the key of rank %d: %s", member, why);
    if (status != TUTTI_OK)
        tu_error_at_fault(member);
    return status;
}

bool tu_network_reaches(const tu_network_share *share, int member) {
    return share != NULL && share->remotes[member].key != NULL;
}

/* ---- flushes; with the lock held ---- */

typedef struct flush {
    tu_network_motion motion;
    int rank;
    uint64_t written, mark;
} flush;

static void flush_over(tu_network *network, tu_network_motion *motion, bool good) {
    flush *over = (flush *)motion;
    tu_network_peer *peer = &network->peers[over->rank];
    peer->flushing = false;
    if (good)
        tu_network_fence_flushed(network, over->rank, over->written, over->mark);
    network->revoking = network->revocations != NULL;
    free(over);
}

/* The connection broke, or there is no memory. */
static void cannot(tu_network *network, int rank, const char *why) {
    if (!network->peers[rank].lost)
        tu_network_cut(network, rank, why);
}

static bool is_flushed(const tu_network_peer *peer, uint64_t mark) {
    return peer->written == peer->flushed || peer->flushed_mark >= mark;
}

bool tu_network_flushed(tu_network *network, int rank, uint64_t mark) {
    tu_network_peer *peer = &network->peers[rank];
    bool finished = true;
    if (is_flushed(peer, mark))
        return true;
    if (peer->flushing)
        return false;
    flush *made = malloc(sizeof *made);
    if (made == NULL) {
        cannot(network, rank, "there was no memory for a flush");
        return false;
    }
    *made = (flush){ .motion = { .over = flush_over }, .rank = rank, .written = peer->written, .mark = network->mark };
    peer->flushing = true;
    const char *why = network->part->flush(network->state, rank, made, &finished);
    if (finished)
        flush_over(network, &made->motion, why == NULL);
    if (why != NULL)
        cannot(network, rank, why);
    return is_flushed(peer, mark);
}

bool tu_network_written(const tu_network_share *share, int member, uint64_t *mark) {
    pthread_mutex_lock(&share->network->lock);
    *mark = *mark == 0 ? share->network->mark : *mark;
    bool over = tu_network_flushed(share->network, share->remotes[member].rank, *mark);
    pthread_mutex_unlock(&share->network->lock);
    return over;
}

void tu_network_moved(void *owner, void *token, bool good) {
    tu_network *network = owner;
    tu_network_motion *motion = token;
    network->stirred = true;
    motion->over(network, motion, good);
    tu_network_wake(network);
}

/* ---- puts and gets ---- */

static void transfer_over(tu_network *network, tu_network_motion *motion, bool good) {
    tu_network_transfer *transfer = (tu_network_transfer *)motion;
    (void)network;
    transfer->share->remotes[transfer->member].under_way--;
    /* Released last; pairs with the acquire of whoever waits, whose memory it is. */
    atomic_store_explicit(&transfer->failed, !good, memory_order_relaxed);
    atomic_store_explicit(&transfer->over, true, memory_order_release);
}

static void begin(tu_network_transfer *transfer, const char *why, bool finished) {
    tu_network *network = transfer->share->network;
    if (finished)
        transfer_over(network, &transfer->motion, why == NULL);
    if (why != NULL)
        cannot(network, transfer->share->remotes[transfer->member].rank, why);
    network->stirred = true;
}

/* With the lock held: whether the transfer can begin. One that lies outside of the block, or whose block is no more,
 * moves nothing; of a member that closed its world a wait tells. */
static bool prepare(tu_network_share *share, int member, uint64_t offset, size_t bytes, tu_network_transfer *transfer) {
    remote *theirs = &share->remotes[member];
    const tu_network_peer *peer = &share->network->peers[theirs->rank];
    bool inside = offset <= share->bytes && bytes <= share->bytes - offset;
    bool there = theirs->key != NULL && !theirs->revoked;
    *transfer = (tu_network_transfer){ .motion = { .over = transfer_over }, .share = share, .member = member };
    theirs->under_way++;
    if (inside && there && !peer->lost && !peer->gone)
        return true;
    atomic_store_explicit(&transfer->refused, !inside || (!there && !peer->gone), memory_order_relaxed);
    transfer_over(share->network, &transfer->motion, false);
    return false;
}

void tu_network_put_by_key(tu_network_share *share, int member, uint64_t offset, const void *from, size_t bytes,
                           tu_network_transfer *transfer) {
    tu_network *network = share->network;
    const remote *theirs = &share->remotes[member];
    bool finished = true;
    pthread_mutex_lock(&network->lock);
    if (prepare(share, member, offset, bytes, transfer)) {
        tu_network_fence_written(network, theirs->rank);
        const char *why = network->part->write(network->state, theirs->rank, theirs->key, theirs->address + offset,
                                               from, bytes, transfer, &finished);
        begin(transfer, why, finished);
    }
    pthread_mutex_unlock(&network->lock);
}

void tu_network_get_by_key(tu_network_share *share, int member, uint64_t offset, void *to, size_t bytes,
                           tu_network_transfer *transfer) {
    tu_network *network = share->network;
    const remote *theirs = &share->remotes[member];
    bool finished = true;
    pthread_mutex_lock(&network->lock);
    if (prepare(share, member, offset, bytes, transfer)) {
        const char *why = network->part->read(network->state, theirs->rank, theirs->key, theirs->address + offset, to,
                                              bytes, transfer, &finished);
        begin(transfer, why, finished);
    }
    pthread_mutex_unlock(&network->lock);
}

void tu_network_transfer_end(tu_network_transfer *transfer) {
    tu_network *network = transfer->share->network;
    int rank = transfer->share->remotes[transfer->member].rank;
    int64_t limit = tu_deadline(ABANDON_LIMIT);
    pthread_mutex_lock(&network->lock);
    while (!atomic_load_explicit(&transfer->over, memory_order_relaxed) && tu_clock_now() < limit) {
        tu_network_drive(network);
        if (!atomic_load_explicit(&transfer->over, memory_order_relaxed))
            tu_network_sleep(network, ABANDON_SLEEP);
    }
    if (!atomic_load_explicit(&transfer->over, memory_order_relaxed)) {
        tu_network_lost(network, rank, "it took nothing any more");
        network->part->disconnect(network->state, rank); /* which ends the transfer */
    }
    pthread_mutex_unlock(&network->lock);
}

/* ---- the end of a share; with the lock held ---- */

static void ask_back(const tu_network_share *share) {
    for (int member = 0; member < share->size && share->region != NULL; member++)
        if (share->remotes[member].far)
            tu_network_own(share->network, share->remotes[member].rank, TU_NETWORK_REVOKE, 0, share->number, 0, NULL,
                           NULL, 0);
}

/* Whether a member may still write into this rank's block, or this rank, before the mark, into the member's. */
static bool is_open(const tu_network_share *share, int member, uint64_t mark) {
    const remote *theirs = &share->remotes[member];
    const tu_network_peer *peer = &share->network->peers[theirs->rank];
    if (theirs->under_way > 0)
        return true;
    if (!theirs->far || peer->lost || peer->gone || !peer->connected)
        return false;
    return (share->region != NULL && !theirs->returned) || !tu_network_flushed(share->network, theirs->rank, mark);
}

static bool any_open(const tu_network_share *share, uint64_t mark) {
    bool any = false;
    for (int member = 0; member < share->size; member++)
        any = is_open(share, member, mark) || any; /* all of them begin to flush */
    return any;
}

static void cut_open(const tu_network_share *share, uint64_t mark) {
    tu_network *network = share->network;
    for (int member = 0; member < share->size; member++)
        if (is_open(share, member, mark)) {
            TU_LOG(TUTTI_LOG_WARN, network->world->log, "network",
                   "rank %d has not given back the key to a block that is released: it is cut off",
                   share->remotes[member].rank);
            tu_network_lost(network, share->remotes[member].rank, "it did not give back the key to a block");
            network->part->disconnect(network->state, share->remotes[member].rank);
        }
}

/* Whoever uses a block has ended with it before he releases it: nothing is written by the share any more. */
static void call_back(const tu_network_share *share) {
    tu_network *network = share->network;
    int64_t limit = tu_deadline(END_LIMIT);
    uint64_t mark = network->mark;
    ask_back(share);
    tu_network_drive(network);
    while (any_open(share, mark) && tu_clock_now() < limit) {
        tu_network_sleep(network, END_SLEEP);
        tu_network_drive(network);
    }
    cut_open(share, mark);
}

static void close_share(tu_network_share *share) {
    tu_network *network = share->network;
    for (int member = 0; member < share->size; member++)
        if (share->remotes[member].key != NULL)
            network->part->drop_key(network->state, share->remotes[member].key);
    if (share->region != NULL)
        network->part->unshare(network->state, share->region);
    tu_network_share **link = &network->shares;
    while (*link != share)
        link = &(*link)->next;
    *link = share->next;
    share->network = NULL;
    network->revoking = network->revocations != NULL;
}

static void end_share(tu_network_share *share, bool given) {
    tu_network *network = share != NULL ? share->network : NULL;
    if (network != NULL) {
        pthread_mutex_lock(&network->lock);
        if (given)
            call_back(share);
        close_share(share);
        pthread_mutex_unlock(&network->lock);
    }
    free(share);
}

void tu_network_share_end(tu_network_share *share) {
    end_share(share, true);
}

void tu_network_share_drop(tu_network_share *share) {
    end_share(share, false);
}

void tu_network_shares_close(tu_network *network) {
    pthread_mutex_lock(&network->lock);
    while (network->shares != NULL) {
        call_back(network->shares);
        close_share(network->shares);
    }
    pthread_mutex_unlock(&network->lock);
}

void tu_network_revocations_free(tu_network *network) {
    for (tu_network_revocation *next; network->revocations != NULL; network->revocations = next) {
        next = network->revocations->next;
        free(network->revocations);
    }
}

/* ---- what others say; with the lock held ---- */

void tu_network_revoke_arrived(tu_network *network, int rank, uint64_t number) {
    for (tu_network_share *share = network->shares; share != NULL; share = share->next)
        for (int member = 0; member < share->size; member++)
            if (share->remotes[member].rank == rank && share->remotes[member].number == number)
                share->remotes[member].revoked = true;
    if (is_asked(network, rank, number))
        return;
    tu_network_peer *peer = &network->peers[rank];
    tu_network_revocation *made = peer->revocations < REVOCATIONS_MOST ? malloc(sizeof *made) : NULL;
    if (made == NULL) {
        cannot(network, rank, "there was no memory for what it takes back");
        return;
    }
    *made = (tu_network_revocation){ .next = network->revocations,
                                     .rank = rank,
                                     .number = number,
                                     .mark = network->mark,
                                     .shares = network->share_numbers };
    network->revocations = made;
    network->revoking = true;
    peer->revocations++;
}

void tu_network_revoked_arrived(tu_network *network, int rank, uint64_t number) {
    for (tu_network_share *share = network->shares; share != NULL; share = share->next)
        for (int member = 0; share->number == number && member < share->size; member++)
            if (share->remotes[member].rank == rank)
                share->remotes[member].returned = true;
}

/* Whether a rendezvous was under way when a key was taken back that may be among those that it has yet to meet. */
static bool may_be_met(const tu_network *network, const tu_network_revocation *asked) {
    for (const tu_network_share *share = network->shares; share != NULL; share = share->next)
        for (int member = 0; share->number <= asked->shares && member < share->size; member++) {
            const remote *theirs = &share->remotes[member];
            if (theirs->rank == asked->rank && theirs->far && !theirs->met)
                return true;
        }
    return false;
}

/* Not inside of progress. Everything that was written by the key is there before it is answered. */
void tu_network_answer_revocations(tu_network *network) {
    network->revoking = false;
    for (tu_network_revocation **link = &network->revocations, *asked; (asked = *link) != NULL;) {
        tu_network_peer *peer = &network->peers[asked->rank];
        if (!asked->answered && (peer->lost || tu_network_flushed(network, asked->rank, asked->mark))) {
            tu_network_own(network, asked->rank, TU_NETWORK_REVOKED, 0, asked->number, 0, NULL, NULL, 0);
            asked->answered = true;
        }
        if (!asked->answered || may_be_met(network, asked)) {
            link = &asked->next;
            continue;
        }
        *link = asked->next;
        peer->revocations--;
        free(asked);
    }
}
