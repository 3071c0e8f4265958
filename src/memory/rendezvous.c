/* SPDX-License-Identifier: Apache-2.0
 *
 * The rendezvous: every member of a group maps the blocks of all the others.
 *
 * It is three exchanges, each a bounded all-gather:
 *
 *     1. what each block is, and the block itself        compared: they must be alike
 *     2. how 1 went here, and this rank's signal area
 *     3. how 2 went here
 *
 * and, between hosts whose fabric has remote memory access, one before the last: keys to the blocks;
 * so that every member knows of every other that it has everything: all return a handle, or none does. A member that
 * runs out of memory or mappings says so in the next exchange and fails all of them alike, which ends nothing. A block
 * that a pool gave out again starts with an exchange of serial numbers: when the same blocks meet again, its handle is
 * reset and a second exchange is all.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "memory/network.h"
#include "memory/tables.h"
#include "world/group.h"

#define RECORD_VERSION 3
#define UNUSED_INDICES 1024 /* that are looked at for one that can be used again */

/* What a member tells about its block in the first exchange. */
typedef struct block_record {
    uint32_t version;
    uint32_t device;
    uint64_t bytes, pad_bytes, pad_offset, alignment;
    uint64_t persistent, persistent_id;
    uint64_t serial;
    uint64_t earlier;                     /* rendezvous of this group so far: the same on all */
    uint64_t above;                       /* an index above all that were ever in use here */
    uint64_t shares;                      /* 1: gives the others a key to its block */
    uint64_t unused[UNUSED_INDICES / 64]; /* a bit for each index that no handle of this rank has */
    char backend[16];
    int32_t status; /* of exporting the block */
    char message[256];
    unsigned char ticket[TU_BACKEND_TICKET_BYTES];
} block_record;

/* What a member tells in the second and third. */
typedef struct step_record {
    int32_t status;
    char message[256];
    unsigned char ticket[TU_BACKEND_TICKET_BYTES];
} step_record;

/* What a member tells where there are keys. */
typedef struct key_record {
    int32_t status;
    char message[256];
    tu_network_key key;
} key_record;

/* What a member of a pool's block tells first. */
typedef struct pool_record {
    uint64_t serial;
    uint64_t index; /* of the handle that it has; 0: none */
} pool_record;

/* One rendezvous under way on this rank. */
typedef struct meeting {
    tutti_memory *memory;
    tutti_group *group;
    tu_memory_group *state;
    tutti_peers *peers; /* under construction */
    tu_operation_info info;
    int64_t deadline;
    bool agreed; /* the failure is the same for all members: it ends nothing */
    /* One of each per member, made before the first exchange: in between nothing of this rank's own may fail untold. */
    block_record *blocks;
    step_record *steps;
    pool_record *serials;
    key_record *keys;
    tu_backend_ticket *tickets;
    tu_mapping **mappings;
    tu_mapping **part; /* of the members on this host, in a group across hosts; and a byte for each behind them */
    int *descriptors;
} meeting;

/* ---- handles under construction ---- */

static int channels_of(const tutti_memory *memory, int size) {
    size_t channels = memory->pad_bytes / (4 * (size_t)size);
    return channels == 0 ? 1 : channels > INT32_MAX ? INT32_MAX : (int)channels;
}

static tutti_status make_peers(const meeting *meeting, tutti_peers **result) {
    tutti_memory *memory = meeting->memory;
    tutti_group *group = meeting->group;
    tutti_peers *peers = calloc(1, sizeof *peers);
    if (peers == NULL)
        return tu_error_memory("a peers handle", sizeof *peers);
    peers->serials = calloc((size_t)group->size, sizeof *peers->serials);
    if (peers->serials == NULL) {
        free(peers);
        return tu_error_memory("a peers handle", (size_t)group->size * sizeof *peers->serials);
    }
    peers->memory = memory;
    peers->group = group;
    peers->group_state = meeting->state;
    peers->proven = true;
    peers->backend = (tu_backend_peers){
        .group = group,
        .state = memory->backend_state,
        .rank = group->rank,
        .size = group->size,
        .channels = channels_of(memory, group->size),
        .device_index = memory->block.device_index,
        .blocks = &peers->blocks,
        .areas = &peers->areas,
        .meeting = meeting->state->meetings + 1,
        .bytes = memory->bytes,
        .pad_offset = memory->pad_offset,
        .pad_bytes = memory->pad_bytes,
    };
    *result = peers;
    return TUTTI_OK;
}

/* Ends a handle that never became one: whatever it has so far. */
static void unmake_peers(tutti_peers *peers) {
    tutti_memory *memory = peers->memory;
    if (peers->backend.local != NULL)
        memory->backend->remote->detach(&peers->backend);
    if (peers->areas.addresses != NULL)
        memory->backend->memory->unmap(memory->backend_state, &peers->areas);
    if (peers->area.address != NULL)
        memory->backend->memory->free(memory->backend_state, &peers->area);
    if (peers->blocks.addresses != NULL)
        memory->backend->memory->unmap(memory->backend_state, &peers->blocks);
    free(peers->serials);
    free(peers);
}

/* ---- agreeing ---- */

static void note_status(int32_t *status, char message[256], tutti_status own) {
    *status = (int32_t)own;
    if (own != TUTTI_OK)
        tu_error_shorten(message, 256, tutti_error_message());
}

/* Compares what the members tell of their own progress. The first that failed fails all, each with that status; its own
 * words for the one, its name for the others. */
static tutti_status agree(meeting *meeting, const char *doing, const void *statuses, size_t stride,
                          size_t message_offset, tutti_status own) {
    const char *base = statuses;
    for (int member = 0; member < meeting->group->size; member++) {
        int32_t status;
        memcpy(&status, base + (size_t)member * stride, sizeof status);
        if (status == TUTTI_OK)
            continue;
        meeting->agreed = true;
        if (own != TUTTI_OK)
            return own; /* its message stands */
        tu_error((tutti_status)status, "rank %d could not %s: %.255s", member, doing,
                 base + (size_t)member * stride + message_offset);
        tu_error_at_fault(member);
        return tu_error_where(meeting->group->name, "rendezvous", meeting->info.sequence, meeting->group->rank);
    }
    return TUTTI_OK;
}

/* ---- moving tickets ---- */

/* Of members on several hosts: records go to all, pieces to those on this host. */
static tutti_status exchange_across(const meeting *meeting, const char *purpose, const void *record, size_t bytes,
                                    const tu_group_cargo *cargo, void *records) {
    tutti_group *group = meeting->group, *here = group->here;
    tutti_status status =
        tu_group_exchange(group, &meeting->info, purpose, record, bytes, NULL, meeting->deadline, records, NULL);
    for (int member = 0; member < group->size; member++)
        meeting->mappings[member] = NULL;
    if (status != TUTTI_OK || here == NULL)
        return status;
    tu_group_cargo part = {
        .piece = cargo->piece, .mappings = meeting->part, .descriptor = -1, .complete = cargo->complete
    };
    uint8_t nothing = 0;
    status = tu_group_exchange_with(here, &meeting->info, purpose, &nothing, 1, &part, meeting->deadline,
                                    meeting->part + here->size);
    for (int place = 0; place < here->size && status == TUTTI_OK; place++)
        meeting->mappings[tu_rank_index(group->ranks, group->size, here->ranks[place])] = meeting->part[place];
    return status != TUTTI_OK && tu_group_overhear(group) ? tu_group_cause(group) : status;
}

/* An exchange of records that contain a ticket each, with what the tickets carry besides. A failure of this rank alone,
 * after all records went their ways, is left in *arrival for the next exchange to tell; then there are records, but no
 * tickets. */
static tutti_status exchange(const meeting *meeting, const char *purpose, const void *record, size_t bytes,
                             size_t ticket_offset, const tu_backend_ticket *ticket, void *records,
                             tutti_status *arrival) {
    tutti_group *group = meeting->group;
    bool complete = false, pieces = tu_memory_can(meeting->memory, TU_ABILITY_PASSES_PIECES);
    bool descriptors = tu_memory_can(meeting->memory, TU_ABILITY_PASSES_DESCRIPTORS);
    tu_group_cargo cargo = { .piece = ticket->piece,
                             .mappings = pieces ? meeting->mappings : NULL,
                             .descriptor = ticket->fd,
                             .descriptors = descriptors ? meeting->descriptors : NULL,
                             .complete = &complete };
    for (int member = 0; member < group->size; member++)
        meeting->tickets[member] = (tu_backend_ticket){ .fd = -1 };
    tutti_status status =
        pieces && !group->local && !group->world->fake
            ? exchange_across(meeting, purpose, record, bytes, &cargo, records)
            : tu_group_exchange_with(group, &meeting->info, purpose, record, bytes, &cargo, meeting->deadline, records);
    if (status != TUTTI_OK && complete) {
        *arrival = status;
        return TUTTI_OK;
    }
    for (int member = 0; status == TUTTI_OK && member < group->size; member++) {
        tu_backend_ticket *theirs = &meeting->tickets[member];
        theirs->fd = descriptors ? meeting->descriptors[member] : -1;
        theirs->mapping = pieces ? meeting->mappings[member] : NULL;
        memcpy(theirs->bytes, (char *)records + (size_t)member * bytes + ticket_offset, TU_BACKEND_TICKET_BYTES);
    }
    return status;
}

/* ---- across hosts ---- */

/* The network, before anybody can need it; a failure is told with the block. */
static tutti_status join_network(const meeting *meeting, uint64_t *shares) {
    tu_network_group *side = NULL;
    bool needed = !meeting->group->local && !meeting->group->world->fake &&
                  tu_memory_can(meeting->memory, TU_ABILITY_PASSES_PIECES);
    tutti_status status = needed ? tu_network_group_get(meeting->group, &side) : TUTTI_OK;
    *shares = status == TUTTI_OK && side != NULL && tu_network_shares(side);
    return status;
}

/* Connects to the members on other hosts, which have all joined the network. */
static tutti_status reach_others(const meeting *meeting) {
    tutti_group *group = meeting->group;
    tu_network_group *side;
    tutti_status status = tu_network_group_get(group, &side);
    tu_group_wait wait;
    tu_group_wait_init(&wait, group, &meeting->info, 0, meeting->deadline, NULL, NULL);
    for (int member = 0; member < group->size && status == TUTTI_OK; member++)
        if (group->job_ranks[member] < 0)
            status = tu_network_reach(side, &wait, member);
    return status == TUTTI_OK ? TUTTI_OK : tu_group_wait_error(&wait, status);
}

/* This rank's key, where it has one; and the others', where it may use them. */
static tutti_status make_key(const meeting *meeting, tu_network_key *key) {
    tu_backend_peers *peers = &meeting->peers->backend;
    tu_network_group *side;
    tutti_status status = tu_network_group_get(meeting->group, &side);
    return status != TUTTI_OK
               ? status
               : tu_network_share_make(side, peers->blocks->addresses[peers->rank], peers->bytes, key, &peers->share);
}

static tutti_status take_keys(const meeting *meeting) {
    tutti_status status = TUTTI_OK;
    tu_network_share *share = meeting->peers->backend.share;
    for (int member = 0; share != NULL && member < meeting->group->size && status == TUTTI_OK; member++)
        status = tu_network_share_meet(share, member, &meeting->keys[member].key);
    return status;
}

/* What all members have told of their blocks says whether anybody has a key. On one host nobody has. */
static bool has_keys(const meeting *meeting) {
    bool any = false, across = !meeting->group->local && !meeting->group->world->fake;
    for (int member = 0; across && member < meeting->group->size; member++)
        any = any || meeting->blocks[member].shares != 0;
    return any;
}

/* Keys, where anybody has one. They are taken where all members can do so: a member that failed before may have no
 * connection to answer by, so after an agreed failure none is asked back. */
static tutti_status meet_keys(meeting *meeting, tutti_status *own) {
    key_record record = { 0 };
    if (!has_keys(meeting))
        return TUTTI_OK;
    tu_network_key_none(&record.key);
    if (*own == TUTTI_OK && meeting->blocks[meeting->group->rank].shares != 0)
        *own = make_key(meeting, &record.key);
    note_status(&record.status, record.message, *own);
    tutti_status status = tu_group_exchange(meeting->group, &meeting->info, "rendezvous: keys", &record, sizeof record,
                                            NULL, meeting->deadline, meeting->keys, NULL);
    if (status == TUTTI_OK)
        status = agree(meeting, "share its block", meeting->keys, sizeof *meeting->keys, offsetof(key_record, message),
                       *own);
    if (status == TUTTI_OK) {
        *own = take_keys(meeting);
    } else if (meeting->agreed) {
        tu_network_share_drop(meeting->peers->backend.share);
        meeting->peers->backend.share = NULL;
    }
    return status;
}

static void drop_tickets(const meeting *meeting) {
    for (int member = 0; member < meeting->group->size; member++) {
        if (meeting->tickets[member].mapping != NULL)
            tu_mapping_release(meeting->tickets[member].mapping);
        if (meeting->tickets[member].fd >= 0)
            close(meeting->tickets[member].fd);
    }
}

/* ---- the three steps ---- */

static void list_unused(tu_memory_group *state, uint64_t unused[UNUSED_INDICES / 64]) {
    memset(unused, 0xff, UNUSED_INDICES / 8);
    unused[0] &= ~UINT64_C(1); /* 0 is no index */
    pthread_mutex_lock(&state->tables->lock);
    for (size_t i = 0; i < state->by_index.count; i++) {
        uint64_t index = state->by_index.entries[i].key;
        if (index < UNUSED_INDICES)
            unused[index / 64] &= ~(UINT64_C(1) << index % 64);
    }
    pthread_mutex_unlock(&state->tables->lock);
}

static void describe_block(const meeting *meeting, block_record *record) {
    const tutti_memory *memory = meeting->memory;
    *record = (block_record){
        .version = RECORD_VERSION,
        .device = (uint32_t)memory->device,
        .bytes = memory->bytes,
        .pad_bytes = memory->pad_bytes,
        .pad_offset = memory->pad_offset,
        .alignment = memory->alignment,
        .persistent = memory->persistent,
        .persistent_id = memory->persistent ? memory->persistent_id : 0,
        .serial = memory->serial,
        .earlier = meeting->state->meetings,
        .above = (uint64_t)tu_symmetric_last(meeting->state) + 1,
    };
    snprintf(record->backend, sizeof record->backend, "%s", memory->backend->name);
    list_unused(meeting->state, record->unused);
}

/* The index of the new handle: the lowest that no member uses any more, so that indices stay small, or a new one. All
 * members see the same records and come to the same answer. */
static uint32_t choose_index(const block_record *records, int size) {
    uint64_t above = 1;
    for (int member = 0; member < size; member++)
        above = records[member].above > above ? records[member].above : above;
    for (size_t word = 0; word < UNUSED_INDICES / 64; word++) {
        uint64_t common = UINT64_MAX;
        for (int member = 0; member < size; member++)
            common &= records[member].unused[word];
        if (common != 0)
            return (uint32_t)(word * 64 + (size_t)__builtin_ctzll(common));
    }
    return (uint32_t)above;
}

/* What of a block must be alike, by name. */
typedef struct trait {
    const char *name;
    size_t offset;
} trait;
static const trait traits[] = {
    { "byte size", offsetof(block_record, bytes) },
    { "signal pad size", offsetof(block_record, pad_bytes) },
    { "alignment", offsetof(block_record, alignment) },
    { "offset of the pad", offsetof(block_record, pad_offset) },
    { "persistence", offsetof(block_record, persistent) },
    { "persistent id", offsetof(block_record, persistent_id) },
    { "number of earlier rendezvous of this group", offsetof(block_record, earlier) },
};

static uint64_t trait_of(const block_record *record, const trait *trait) {
    uint64_t value;
    memcpy(&value, (const char *)record + trait->offset, sizeof value);
    return value;
}

/* "8192 on ranks 1, 3": every member whose value is not that of rank 0. */
static void list_differing(const block_record *records, int size, const trait *trait) {
    int listed = 0;
    for (int member = 1; member < size; member++) {
        uint64_t value = trait_of(&records[member], trait);
        if (value == trait_of(&records[0], trait))
            continue;
        if (listed++ < 16)
            tu_error_append("%s%llu on rank %d", listed == 1 ? " " : ", ", (unsigned long long)value, member);
        tu_error_at_fault(member);
    }
    if (listed > 16)
        tu_error_append(" and %d more", listed - 16);
}

static tutti_status mismatch(meeting *meeting) {
    meeting->agreed = true;
    return tu_error_where(meeting->group->name, "rendezvous", meeting->info.sequence, meeting->group->rank);
}

static tutti_status compare_blocks(meeting *meeting, const block_record *records) {
    int size = meeting->group->size;
    for (int member = 1; member < size; member++) {
        if (records[member].version != records[0].version) {
            tu_error(TUTTI_ERROR_PROTOCOL,
                     "rank %d lays blocks out by version %u, rank 0 by version %u: the ranks run different versions of "
                     "Tutti",
                     member, records[member].version, records[0].version);
            tu_error_at_fault(member);
            return mismatch(meeting);
        }
        if (records[member].device != records[0].device ||
            strncmp(records[member].backend, records[0].backend, sizeof records[0].backend) != 0) {
            tu_error(
                TUTTI_ERROR_MISMATCH,
                "the blocks lie on different devices: rank 0's on %s (backend %.15s), rank %d's on %s (backend %.15s)",
                tutti_device_name((tutti_device)records[0].device), records[0].backend, member,
                tutti_device_name((tutti_device)records[member].device), records[member].backend);
            tu_error_at_fault(member);
            return mismatch(meeting);
        }
    }
    for (size_t i = 0; i < sizeof traits / sizeof *traits; i++) {
        bool differ = false;
        for (int member = 1; member < size; member++)
            differ = differ || trait_of(&records[member], &traits[i]) != trait_of(&records[0], &traits[i]);
        if (!differ)
            continue;
        tu_error(TUTTI_ERROR_MISMATCH, "the blocks of a rendezvous must be alike: their %s is %llu on rank 0, but",
                 traits[i].name, (unsigned long long)trait_of(&records[0], &traits[i]));
        list_differing(records, size, &traits[i]);
        return mismatch(meeting);
    }
    return TUTTI_OK;
}

/* 1: blocks. On success all members' blocks are mapped here, or *own says why not. */
static tutti_status meet_blocks(meeting *meeting, tutti_status *own) {
    tutti_memory *memory = meeting->memory;
    block_record record, *records = meeting->blocks;
    tu_backend_ticket ticket = { .fd = -1 };
    tutti_status arrival = TUTTI_OK;
    describe_block(meeting, &record);
    *own = join_network(meeting, &record.shares);
    if (*own == TUTTI_OK)
        *own = memory->backend->memory->export_block(memory->backend_state, &memory->block, &ticket);
    note_status(&record.status, record.message, *own);
    memcpy(record.ticket, ticket.bytes, sizeof record.ticket);
    tutti_status status = exchange(meeting, "rendezvous: blocks", &record, sizeof record,
                                   offsetof(block_record, ticket), &ticket, records, &arrival);
    memory->backend->memory->unexport_block(memory->backend_state, &memory->block, &ticket);
    if (status != TUTTI_OK)
        return status;
    status = compare_blocks(meeting, records);
    if (status == TUTTI_OK)
        status = agree(meeting, "offer its block", &records[0].status, sizeof *records,
                       offsetof(block_record, message) - offsetof(block_record, status), *own);
    if (status != TUTTI_OK) {
        drop_tickets(meeting);
        return status;
    }
    for (int member = 0; member < meeting->group->size; member++)
        meeting->peers->serials[member] = records[member].serial;
    meeting->peers->index = choose_index(records, meeting->group->size);
    *own = arrival;
    if (arrival == TUTTI_OK)
        *own = memory->backend->memory->import_blocks(memory->backend_state, meeting->group, &memory->block,
                                                      meeting->group->rank, meeting->group->size, meeting->tickets,
                                                      &meeting->peers->blocks);
    return TUTTI_OK;
}

/* 2: signal areas, of which each rank makes its own. */
static tutti_status make_area(meeting *meeting, tu_backend_ticket *ticket) {
    tutti_memory *memory = meeting->memory;
    tutti_peers *peers = meeting->peers;
    tu_backend_request request = {
        .bytes = memory->backend->remote->area_bytes(peers->backend.size, peers->backend.channels),
        .alignment = 128,
        .device_index = memory->block.device_index,
        .huge_pages = 0,
        .what = "signals of a block",
        .blocks = &peers->blocks,
    };
    tutti_status status = memory->backend->memory->allocate(memory->backend_state, &request, &peers->area);
    return status != TUTTI_OK ? status
                              : memory->backend->memory->export_block(memory->backend_state, &peers->area, ticket);
}

static tutti_status meet_areas(meeting *meeting, tutti_status *own) {
    tutti_memory *memory = meeting->memory;
    tutti_peers *peers = meeting->peers;
    step_record record = { 0 }, *records = meeting->steps;
    tu_backend_ticket ticket = { .fd = -1 };
    tutti_status arrival = TUTTI_OK;
    if (*own == TUTTI_OK)
        *own = make_area(meeting, &ticket);
    note_status(&record.status, record.message, *own);
    memcpy(record.ticket, ticket.bytes, sizeof record.ticket);
    tutti_status status = exchange(meeting, "rendezvous: signals", &record, sizeof record,
                                   offsetof(step_record, ticket), &ticket, records, &arrival);
    if (peers->area.address != NULL)
        memory->backend->memory->unexport_block(memory->backend_state, &peers->area, &ticket);
    if (status != TUTTI_OK)
        return status;
    status =
        agree(meeting, "map the blocks of the others", records, sizeof *records, offsetof(step_record, message), *own);
    if (status != TUTTI_OK) {
        drop_tickets(meeting);
        return status;
    }
    *own = arrival;
    if (arrival == TUTTI_OK)
        *own = memory->backend->memory->import_blocks(memory->backend_state, meeting->group, &peers->area,
                                                      meeting->group->rank, meeting->group->size, meeting->tickets,
                                                      &peers->areas);
    if (*own == TUTTI_OK && !meeting->group->local && tu_memory_can(memory, TU_ABILITY_PASSES_PIECES))
        *own = reach_others(meeting);
    if (*own == TUTTI_OK)
        *own = memory->backend->remote->attach(&peers->backend);
    return TUTTI_OK;
}

/* 3: whether everybody has everything. */
static tutti_status meet_ready(meeting *meeting, tutti_status own) {
    step_record record = { 0 };
    note_status(&record.status, record.message, own);
    tutti_status status = tu_group_exchange(meeting->group, &meeting->info, "rendezvous: ready", &record, sizeof record,
                                            NULL, meeting->deadline, meeting->steps, NULL);
    if (status == TUTTI_OK)
        status = agree(meeting, "map the signals of the others", meeting->steps, sizeof *meeting->steps,
                       offsetof(step_record, message), own);
    return status;
}

static tutti_status meet_all(meeting *meeting) {
    tutti_status own = TUTTI_OK;
    tutti_status status = make_peers(meeting, &meeting->peers);
    if (status != TUTTI_OK)
        return status;
    status = meet_blocks(meeting, &own);
    if (status == TUTTI_OK)
        status = meet_areas(meeting, &own);
    if (status == TUTTI_OK)
        status = meet_keys(meeting, &own);
    if (status == TUTTI_OK)
        status = meet_ready(meeting, own);
    meeting->peers->backend.met = status == TUTTI_OK;
    if (status != TUTTI_OK) {
        unmake_peers(meeting->peers);
        meeting->peers = NULL;
    }
    return status;
}

/* ---- caching ---- */

static tutti_peers *cached(const tutti_memory *memory, const tu_memory_group *state) {
    for (tutti_peers *peers = memory->first_peers; peers != NULL; peers = peers->next_of_memory) {
        if (peers->group_state == state)
            return peers;
    }
    return NULL;
}

/* A handle that stands, with one more user; or NULL. */
static tutti_peers *take_cached(tutti_memory *memory, tu_memory_group *state) {
    pthread_mutex_lock(&memory->tables->lock);
    tutti_peers *peers = cached(memory, state);
    if (peers != NULL && !peers->proven)
        peers = NULL;
    if (peers != NULL)
        tu_peers_use(peers);
    pthread_mutex_unlock(&memory->tables->lock);
    return peers;
}

static tutti_status publish(meeting *meeting) {
    tutti_peers *peers = meeting->peers;
    tutti_memory *memory = meeting->memory;
    tutti_peers *doomed = NULL;
    peers->buffers = peers->blocks.addresses;
    peers->mapped = true;
    for (int member = 0; member < meeting->group->size; member++)
        peers->mapped = peers->mapped && peers->buffers[member] != NULL;
    pthread_mutex_lock(&memory->tables->lock);
    tutti_status status = tu_order_insert(&meeting->state->by_index, peers->index, peers);
    if (status == TUTTI_OK) {
        tutti_peers *former = cached(memory, meeting->state); /* of a pool's block, with other partners */
        if (former != NULL)
            tu_peers_unlink(former, &doomed);
        atomic_fetch_add_explicit(&memory->references, 1, memory_order_relaxed);
        peers->next_of_memory = memory->first_peers;
        memory->first_peers = peers;
        peers->next_of_group = meeting->state->first_peers;
        meeting->state->first_peers = peers;
        peers->cached = true;
        tu_peers_use(peers);
        atomic_fetch_add_explicit(&memory->tables->generation, 1,
                                  memory_order_release); /* pairs with tu_symmetric_find */
    }
    pthread_mutex_unlock(&memory->tables->lock);
    tu_peers_free(doomed);
    if (status != TUTTI_OK) {
        unmake_peers(peers);
        return status;
    }
    meeting->state->meetings++;
    if (peers->index > tu_symmetric_last(meeting->state))
        atomic_store_explicit(&meeting->state->last_index, peers->index, memory_order_relaxed);
    return status;
}

/* ---- blocks of a pool ---- */

/* When the same blocks as last time meet again, the old handle is as new after a reset: *result is it, in use. All
 * members come to the same answer, because they compare the same records with serial numbers that they agreed on. */
static tutti_status meet_again(meeting *meeting, tutti_peers **result) {
    tutti_memory *memory = meeting->memory;
    pthread_mutex_lock(&memory->tables->lock);
    tutti_peers *peers = cached(memory, meeting->state);
    if (peers != NULL && peers->users > 0)
        peers = NULL; /* somebody still uses it for what the block was before */
    pthread_mutex_unlock(&memory->tables->lock);
    pool_record record = { .serial = memory->serial, .index = peers == NULL ? 0 : peers->index };
    tutti_status status = tu_group_exchange(meeting->group, &meeting->info, "rendezvous: pool", &record, sizeof record,
                                            NULL, meeting->deadline, meeting->serials, NULL);
    if (status != TUTTI_OK || peers == NULL)
        return status;
    for (int member = 0; member < meeting->group->size; member++) {
        if (meeting->serials[member].index != record.index || meeting->serials[member].serial != peers->serials[member])
            return TUTTI_OK;
    }
    /* Everybody is here, so nobody signals or waits any more on what the block was before; and nobody does on what it
     * is now until all have come to the second exchange. */
    memory->backend->remote->reset(&peers->backend);
    status = tu_group_exchange(meeting->group, &meeting->info, "rendezvous: pool ready", &record, sizeof record, NULL,
                               meeting->deadline, meeting->serials, NULL);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&memory->tables->lock);
    peers->proven = true;
    tu_peers_use(peers);
    atomic_fetch_add_explicit(&memory->tables->generation, 1, memory_order_release); /* pairs with tu_symmetric_find */
    pthread_mutex_unlock(&memory->tables->lock);
    *result = peers;
    return TUTTI_OK;
}

/* ---- the call ---- */

static tutti_status check_hosts(const tutti_memory *memory, const tutti_group *group) {
    if (group->local || group->world->fake || tu_memory_can(memory, TU_ABILITY_SPANS_HOSTS))
        return TUTTI_OK;
    for (int member = 0; member < group->size; member++) {
        if (group->job_ranks[member] >= 0)
            continue;
        tu_error(TUTTI_ERROR_UNSUPPORTED,
                 "rank %d of group %s is on host %s: backend %s maps memory between ranks of one host only. Make a "
                 "group per host "
                 "(tutti_group_split), or send the data (tutti_send, tutti_store_set)",
                 member, group->name, tu_job_host(group->world->job, group->ranks[member]), memory->backend->name);
        tu_error_at_fault(member);
        return TUTTI_ERROR_UNSUPPORTED;
    }
    return TUTTI_OK;
}

/* One rendezvous at a time on a group: another thread's may take until its own deadline. */
static tutti_status lock_meeting(const meeting *meeting) {
    if (tu_mutex_lock_until(&meeting->state->meeting, meeting->deadline))
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_TIMEOUT, "timeout: this rank is in another rendezvous on group %s, in another thread",
                    meeting->group->name);
}

static tutti_status meet(meeting *meeting, tutti_peers **peers) {
    tutti_status status = TUTTI_OK;
    *peers = NULL;
    if (meeting->memory->pool != NULL)
        status = meet_again(meeting, peers);
    if (status != TUTTI_OK || *peers != NULL)
        return status;
    status = meet_all(meeting);
    if (status == TUTTI_OK)
        status = publish(meeting);
    if (status == TUTTI_OK)
        *peers = meeting->peers;
    return status;
}

static tutti_status make_room(meeting *meeting) {
    size_t size = (size_t)meeting->group->size;
    meeting->blocks = calloc(size, sizeof *meeting->blocks);
    meeting->steps = calloc(size, sizeof *meeting->steps);
    meeting->serials = calloc(size, sizeof *meeting->serials);
    meeting->keys = calloc(meeting->group->local ? 1 : size, sizeof *meeting->keys);
    meeting->tickets = calloc(size, sizeof *meeting->tickets);
    meeting->mappings = calloc(size, sizeof *meeting->mappings);
    meeting->part = calloc(size, sizeof *meeting->part + 1);
    meeting->descriptors = calloc(size, sizeof *meeting->descriptors);
    if (meeting->blocks == NULL || meeting->steps == NULL || meeting->serials == NULL || meeting->keys == NULL ||
        meeting->tickets == NULL || meeting->mappings == NULL || meeting->part == NULL || meeting->descriptors == NULL)
        return tu_error_memory("a rendezvous",
                               size * (sizeof *meeting->blocks + sizeof *meeting->steps + sizeof *meeting->tickets));
    return TUTTI_OK;
}

static void free_room(meeting *meeting) {
    free(meeting->blocks);
    free(meeting->steps);
    free(meeting->serials);
    free(meeting->keys);
    free(meeting->tickets);
    free(meeting->mappings);
    free(meeting->part);
    free(meeting->descriptors);
}

static tutti_status rendezvous(tutti_memory *memory, tutti_group *group, tu_memory_group *state, tutti_peers **peers) {
    meeting meeting = { .memory = memory, .group = group, .state = state };
    meeting.info = (tu_operation_info){ .operation = TU_OPERATION_RENDEZVOUS, .count = memory->bytes, .root = -1 };
    uint64_t ticket;
    tutti_status status = tu_group_enter(group, 0, &meeting.info, &meeting.deadline, &ticket);
    if (status == TU_FAULT_SKIP) /* there is no handle to return */
        return tu_error(TUTTI_ERROR_FAULT, "an injected fault made this rank skip rendezvous %llu of group %s",
                        (unsigned long long)meeting.info.sequence, group->name);
    if (status != TUTTI_OK)
        return status;
    status = lock_meeting(&meeting);
    if (status == TUTTI_OK) {
        status = make_room(&meeting);
        if (status == TUTTI_OK)
            status = meet(&meeting, peers);
        free_room(&meeting);
        pthread_mutex_unlock(&state->meeting);
    }
    if (meeting.agreed)
        return tu_group_leave_agreement(group, ticket, status);
    return tu_group_leave(group, &meeting.info, ticket, status);
}

tutti_status tutti_memory_rendezvous(tutti_memory *memory, tutti_group *group, tutti_peers **peers) {
    if (memory == NULL || peers == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "tutti_memory_rendezvous needs a block and a place for its result");
    if (group == TUTTI_NON_GROUP_MEMBER)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "this rank is no member of the group (TUTTI_NON_GROUP_MEMBER): only members meet");
    if (group == NULL)
        group = memory->group;
    if (group == NULL)
        return tu_error(
            TUTTI_ERROR_ARGUMENT,
            "a rendezvous needs a group (group_name): none was given, neither at allocation nor at rendezvous");
    TU_INSIDE(memory->world);
    tutti_status status = tu_world_check(memory->world);
    if (status != TUTTI_OK)
        return status;
    if (tutti_group_world(group) != memory->world)
        return tu_error(TUTTI_ERROR_ARGUMENT, "group %s belongs to another world than the block",
                        tutti_group_name(group));
    if (tu_group_overhear(group))
        return tu_group_cause(group);
    tu_memory_group *state;
    status = check_hosts(memory, group);
    if (status == TUTTI_OK)
        status = tu_memory_group_get(group, &state);
    if (status != TUTTI_OK)
        return status;
    tutti_peers *found = take_cached(memory, state);
    if (found == NULL)
        status = rendezvous(memory, group, state, &found);
    if (status == TUTTI_OK)
        *peers = found;
    return status;
}
