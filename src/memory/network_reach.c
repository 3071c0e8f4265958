/* SPDX-License-Identifier: Apache-2.0
 *
 * How ranks on other hosts are found and connected to: records in the store that say where each is, and what is known
 * of those that cannot be reached.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/thread.h"
#include "memory/network_inner.h"
#include "world/group.h"

#define LOOK_SLICE (50 * TU_MILLISECOND)    /* of a wait for a peer's record */
#define GOODBYE_TIME (700 * TU_MILLISECOND) /* for the goodbye of a rank that listens no more to come */
#define GOODBYE_SLEEP (5 * TU_MILLISECOND)

/* ---- records ---- */

typedef struct record {
    uint32_t magic, version;
    int32_t rank;
    uint32_t address_bytes;
    uint64_t door, checksum;
    unsigned char address[TU_NETWORK_ADDRESS_BYTES];
} record;

static uint64_t checksum_of(const record *record) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325) ^ record->door ^ (uint64_t)record->rank << 32 ^ record->address_bytes;
    for (uint32_t i = 0; i < record->address_bytes; i++)
        hash = (hash ^ record->address[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static void record_key(int rank, char key[32]) {
    snprintf(key, 32, "network/%d", rank);
}

tutti_status tu_network_leave_record(tu_network *network) {
    record mine = {
        .magic = TU_NETWORK_MAGIC, .version = TU_NETWORK_VERSION, .rank = network->world->rank, .door = network->door
    };
    size_t bytes;
    const void *address = network->part->address(network->state, &bytes);
    mine.address_bytes = (uint32_t)bytes;
    memcpy(mine.address, address, bytes);
    mine.checksum = checksum_of(&mine);
    char key[32];
    record_key(network->world->rank, key);
    return tutti_store_set(network->world->store, key, &mine, offsetof(record, address) + bytes);
}

/* UCX takes an address as it is, so nothing but a whole record of that rank gets there. */
static tutti_status check_record(const record *theirs, size_t bytes, int rank) {
    if (bytes >= 8 && theirs->magic == TU_NETWORK_MAGIC && theirs->version != TU_NETWORK_VERSION)
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "rank %d speaks version %u between hosts, this one version %u: install one version everywhere",
                        rank, theirs->version, TU_NETWORK_VERSION);
    if (bytes < offsetof(record, address) || bytes > sizeof *theirs || theirs->magic != TU_NETWORK_MAGIC ||
        theirs->rank != rank || theirs->address_bytes != bytes - offsetof(record, address) ||
        theirs->checksum != checksum_of(theirs))
        return tu_error(TUTTI_ERROR_PROTOCOL,
                        "the store holds %zu bytes for rank %d that do not say how to reach it; is the store used by "
                        "others under the same prefix?",
                        bytes, rank);
    return TUTTI_OK;
}

static tutti_status learn(tu_network *network, int rank, const void *value, size_t bytes) {
    record theirs = { 0 };
    memcpy(&theirs, value, bytes < sizeof theirs ? bytes : sizeof theirs);
    tutti_status status = check_record(&theirs, bytes, rank);
    unsigned char *address = status == TUTTI_OK ? malloc(theirs.address_bytes) : NULL;
    if (status == TUTTI_OK && address == NULL)
        status = tu_error_memory("the address of a rank", theirs.address_bytes);
    if (status != TUTTI_OK) {
        tu_error_at_fault(rank);
        return status;
    }
    memcpy(address, theirs.address, theirs.address_bytes);
    tu_network_peer *peer = &network->peers[rank];
    pthread_mutex_lock(&network->lock);
    peer->address = address;
    peer->address_bytes = theirs.address_bytes;
    peer->door = theirs.door;
    peer->known = true;
    pthread_mutex_unlock(&network->lock);
    return TUTTI_OK;
}

/* ---- reaching a peer ---- */

/* What was seen of the others at the last look. */
typedef struct sighting {
    uint64_t vote, exchange;
} sighting;

/* Whether the store knows for certain that a rank has left no record: a question to it may just have taken long. */
static bool is_absent(const tu_network *network, int rank) {
    char key[32];
    const char *keys[1] = { key };
    bool present = true;
    record_key(rank, key);
    tutti_error_copy before;
    tu_error_save(&before); /* what the store says here is of no interest */
    bool absent = tutti_store_check(network->world->store, keys, 1, &present) == TUTTI_OK && !present;
    tu_error_restore(&before);
    return absent;
}

/* Somebody whose record does not come may have a reason that the store knows: the group has ended, or the others are in
 * a vote of it or an exchange, which need no network. */
static bool ended_elsewhere(const tu_network *network, const tu_group_wait *wait, int rank, sighting *seen) {
    tutti_group *group = wait->group;
    int member = tu_rank_index(group->ranks, group->size, rank);
    return tu_group_ask_store(group) ||
           (tu_operation_sequenced((tu_operation)wait->info->operation) &&
            (tu_vote_object(group, wait->info, &seen->vote) ||
             (is_absent(network, rank) && tu_exchange_object(group, wait->info, member, &seen->exchange))));
}

static tutti_status look_up(tu_network *network, const tu_group_wait *wait, int rank) {
    char key[32];
    int64_t pause = LOOK_SLICE, ask_at = tu_clock_now() + pause;
    sighting seen = { 0 };
    record_key(rank, key);
    for (;;) {
        int64_t left = tu_deadline_left(wait->wait.deadline);
        if (left <= 0)
            return TUTTI_ERROR_TIMEOUT;
        if (atomic_load_explicit(&network->world->interrupt, memory_order_acquire) != 0)
            return TUTTI_ERROR_INTERRUPTED;
        if (tu_group_overhear(wait->group))
            return TUTTI_ERROR_STATE;
        tutti_status status = wait->wait.check(wait->wait.argument);
        if (status != TUTTI_OK)
            return status;
        void *value;
        size_t bytes;
        tu_watch *before = tu_watch_thread(network->world->calm, false);
        status = tutti_store_get(network->world->store, key, left < LOOK_SLICE ? left : LOOK_SLICE, &value, &bytes);
        tu_watch_thread_back(before);
        if (status == TUTTI_ERROR_TIMEOUT) {
            if (tu_clock_now() < ask_at)
                continue;
            if (ended_elsewhere(network, wait, rank, &seen))
                return TUTTI_ERROR_STATE;
            pause = pause * 2 < TU_SECOND ? pause * 2 : TU_SECOND;
            ask_at = tu_clock_now() + pause;
            continue;
        }
        if (status != TUTTI_OK)
            return status;
        status = learn(network, rank, value, bytes);
        free(value);
        return status;
    }
}

tutti_status tu_network_look_once(tu_network *network, int rank) {
    char key[32];
    const char *keys[1] = { key };
    bool present = false;
    void *value;
    size_t bytes;
    record_key(rank, key);
    if (network->peers[rank].known)
        return TUTTI_OK;
    tu_watch *before = tu_watch_thread(network->world->asking, false);
    tutti_status status = tutti_store_check(network->world->store, keys, 1, &present);
    if (status == TUTTI_OK && present)
        status = tutti_store_get(network->world->store, key, TU_SECOND, &value, &bytes);
    tu_watch_thread_back(before);
    if (status != TUTTI_OK || !present)
        return status;
    status = learn(network, rank, value, bytes);
    free(value);
    return status;
}

tutti_status tu_network_connect_to(tu_network *network, int rank) {
    tu_network_peer *peer = &network->peers[rank];
    pthread_mutex_lock(&network->lock);
    tutti_status status = network->part->connect(network->state, rank, peer->address, peer->address_bytes);
    if (status == TUTTI_OK) {
        peer->connected = true;
        tu_network_own(network, rank, TU_NETWORK_HELLO, 0, 0, 0, NULL, NULL, 0);
        for (tu_network_group *side = network->groups; side != NULL; side = side->next)
            tu_network_letters_settle(side, rank);
    } else if (peer->refused_at == 0) {
        peer->refused_at = tu_clock_now();
    }
    pthread_mutex_unlock(&network->lock);
    if (status != TUTTI_OK)
        tu_error_at_fault(rank);
    return status;
}

/* Whether a rank that could not be connected to has said goodbye, or may have: that is on its way then. */
static bool may_have_left(tu_network *network, int rank) {
    pthread_mutex_lock(&network->lock);
    tu_network_drive(network);
    const tu_network_peer *peer = &network->peers[rank];
    bool left = peer->gone || (peer->refused_at != 0 && tu_clock_now() - peer->refused_at < GOODBYE_TIME);
    pthread_mutex_unlock(&network->lock);
    return left;
}

tutti_status tu_network_try_connect(tu_network *network, int rank) {
    tu_network_peer *peer = &network->peers[rank];
    if (atomic_load_explicit(&peer->connected, memory_order_relaxed))
        return TUTTI_OK;
    pthread_mutex_lock(&network->lock);
    bool gone = peer->gone;
    pthread_mutex_unlock(&network->lock);
    if (gone || pthread_mutex_trylock(&network->looking) != 0)
        return TUTTI_OK;
    tutti_error_copy before;
    tu_error_save(&before);
    tutti_status status = tu_network_look_once(network, rank);
    if (status == TUTTI_OK && peer->known && !peer->connected)
        status = tu_network_connect_to(network, rank);
    pthread_mutex_unlock(&network->looking);
    if (status == TUTTI_ERROR_NETWORK && may_have_left(network, rank)) {
        tu_error_restore(&before);
        status = TUTTI_OK; /* it is tried again at the next look */
    }
    return status;
}

/* UCX and the store know ranks of the world; whoever calls knows those of the group. */
static tutti_status in_words_of_group(const tu_network_group *side, int member, tutti_status status) {
    const tutti_group *group = side->group;
    char why[512];
    if (status != TUTTI_ERROR_NETWORK && status != TUTTI_ERROR_PROTOCOL)
        return status;
    tu_error_shorten(why, sizeof why, tutti_error_message());
    (void)tu_error(status, "rank %d of group %s cannot reach rank %d on %s: %s", group->rank, group->name, member,
                   tu_job_host(group->world->job, group->ranks[member]), why);
    tu_error_at_fault(member);
    return status;
}

tutti_status tu_network_try_reach(tu_network_group *side, int member) {
    return in_words_of_group(side, member, tu_network_try_connect(side->network, side->group->ranks[member]));
}

static tutti_status in_words_of_call(const tu_network_group *side, const tu_group_wait *wait, int member,
                                     tutti_status status) {
    if (in_words_of_group(side, member, status) == TUTTI_ERROR_NETWORK || status == TUTTI_ERROR_PROTOCOL)
        (void)tu_error_where(side->group->name, tu_operation_name((tu_operation)wait->info->operation),
                             wait->info->sequence, side->group->rank);
    return status;
}

static tutti_status reach_once(tu_network *network, const tu_group_wait *wait, int rank) {
    tu_network_peer *peer = &network->peers[rank];
    if (!tu_mutex_lock_until(&network->looking, wait->wait.deadline))
        return TUTTI_ERROR_TIMEOUT;
    tutti_status status = peer->known ? TUTTI_OK : look_up(network, wait, rank);
    if (status == TUTTI_OK && !peer->connected)
        status = tu_network_connect_to(network, rank);
    pthread_mutex_unlock(&network->looking);
    return status;
}

static bool has_gone(tu_network *network, int rank) {
    pthread_mutex_lock(&network->lock);
    bool gone = network->peers[rank].gone;
    pthread_mutex_unlock(&network->lock);
    return gone;
}

/* A rank that listens no more has died, as its launcher may be about to tell; or it has left after the group ended, as
 * the store knows then; or it has closed its world. `receives`: then nobody needs to be reached. */
static tutti_status reach(tu_network_group *side, const tu_group_wait *wait, int member, bool receives) {
    tu_network *network = side->network;
    int rank = side->group->ranks[member];
    tutti_error_copy before, refusal;
    if (atomic_load_explicit(&network->peers[rank].connected, memory_order_relaxed)) /* whoever sends takes the lock */
        return TUTTI_OK;
    tu_error_save(&before);
    for (;;) {
        bool gone = has_gone(network, rank);
        tutti_status status = gone && receives ? TUTTI_OK : reach_once(network, wait, rank);
        if (status != TUTTI_ERROR_NETWORK)
            return in_words_of_call(side, wait, member, status);
        tu_error_save(&refusal);
        bool may_come = may_have_left(network, rank) && (receives || !gone) && tu_clock_now() < wait->wait.deadline;
        tutti_status seen = tu_network_look(side, wait, wait->wait.check(wait->wait.argument));
        if (seen != TUTTI_OK || tu_group_ask_store(side->group))
            return seen != TUTTI_OK ? seen : TUTTI_ERROR_STATE;
        (void)tu_error_restore(may_come ? &before : &refusal);
        if (!may_come)
            return in_words_of_call(side, wait, member, status);
        nanosleep(&(struct timespec){ .tv_nsec = GOODBYE_SLEEP }, NULL);
    }
}

tutti_status tu_network_reach(tu_network_group *side, const tu_group_wait *wait, int member) {
    return reach(side, wait, member, false);
}

tutti_status tu_network_expect(tu_network_group *side, const tu_group_wait *wait, int member) {
    return reach(side, wait, member, true);
}

int tu_network_connections(tu_network *network) {
    int count = 0;
    pthread_mutex_lock(&network->lock);
    for (int rank = 0; rank < network->world->size; rank++)
        count += network->peers[rank].connected;
    pthread_mutex_unlock(&network->lock);
    return count;
}
