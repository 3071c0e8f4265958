/* SPDX-License-Identifier: Apache-2.0
 *
 * A small but complete backend, compiled and loaded by tests/memory/backend.c: memory of a "GPU" that is a memfd,
 * passed to the other ranks as a descriptor. Signals are spun on, without any comfort. It sees libtutti only through
 * the host's table.
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/backend.h"

#ifndef PLUGIN_NAME
#define PLUGIN_NAME "memfd"
#endif
#ifndef PLUGIN_VERSION
#define PLUGIN_VERSION TU_BACKEND_VERSION
#endif

static const tu_backend_host *host;

typedef struct state {
    tutti_world *world;
    _Atomic int blocks; /* that live: checked at close */
} state;

static tutti_status probe(const tu_backend_host *given, int *device_count) {
    host = given;
    *device_count = 2;
    return TUTTI_OK;
}

static tutti_status open_world(const tu_backend_host *given, tutti_world *world, void **result) {
    (void)given;
    state *made = calloc(1, sizeof *made);
    if (made == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "no memory");
    made->world = world;
    host->log(world, TUTTI_LOG_INFO, PLUGIN_NAME, "opened");
    *result = made;
    return TUTTI_OK;
}

static void close_world(void *opaque) {
    state *ours = opaque;
    if (atomic_load(&ours->blocks) != 0)
        abort();
    free(ours);
}

static tutti_status allocate(void *opaque, const tu_backend_request *request, tu_backend_block *block) {
    state *ours = opaque;
    if (request->device_index >= 2)
        return host->error(TUTTI_ERROR_ARGUMENT, "there is no device %d", request->device_index);
    int fd = memfd_create("plugin", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)request->bytes) != 0)
        return host->error_system(errno, "memfd");
    void *address = mmap(NULL, request->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED)
        return host->error_system(errno, "mmap");
    atomic_fetch_add(&ours->blocks, 1);
    *block = (tu_backend_block){ .address = address,
                                 .bytes = request->bytes,
                                 .handle = (void *)(intptr_t)fd,
                                 .device_index = request->device_index < 0 ? 0 : request->device_index };
    return TUTTI_OK;
}

static void free_block(void *opaque, tu_backend_block *block) {
    state *ours = opaque;
    munmap(block->address, block->bytes);
    close((int)(intptr_t)block->handle);
    atomic_fetch_sub(&ours->blocks, 1);
    memset(block, 0, sizeof *block);
}

static tutti_status export_block(void *opaque, const tu_backend_block *block, tu_backend_ticket *ticket) {
    (void)opaque;
    memset(ticket, 0, sizeof *ticket);
    strcpy((char *)ticket->bytes, "made by " PLUGIN_NAME);
    ticket->fd = (int)(intptr_t)block->handle;
    return TUTTI_OK;
}

static void unexport_block(void *opaque, const tu_backend_block *block, tu_backend_ticket *ticket) {
    (void)opaque;
    (void)block;
    ticket->fd = -1;
}

typedef struct imported {
    int count, rank;
    size_t bytes;
    void *addresses[];
} imported;

static tutti_status import_blocks(void *opaque, tutti_group *group, const tu_backend_block *own, int rank, int count,
                                  tu_backend_ticket *tickets, tu_backend_map *map) {
    (void)opaque;
    (void)group;
    tutti_status status = TUTTI_OK;
    imported *made = calloc(1, sizeof *made + (size_t)count * sizeof(void *));
    if (made == NULL)
        status = host->error(TUTTI_ERROR_MEMORY, "no memory");
    for (int member = 0; member < count; member++) {
        if (status == TUTTI_OK && strcmp((char *)tickets[member].bytes, "made by " PLUGIN_NAME) != 0)
            status = host->error(TUTTI_ERROR_PROTOCOL, "rank %d sent a ticket that is not ours", member);
        if (status == TUTTI_OK) {
            made->addresses[member] =
                member == rank ? own->address
                               : mmap(NULL, own->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, tickets[member].fd, 0);
            if (made->addresses[member] == MAP_FAILED)
                status = host->error_system(errno, "mmap of rank %d's block", member);
        }
        if (tickets[member].fd >= 0)
            close(tickets[member].fd);
    }
    if (status != TUTTI_OK)
        return status;
    made->count = count;
    made->rank = rank;
    made->bytes = own->bytes;
    *map = (tu_backend_map){ .addresses = made->addresses, .handle = made };
    return TUTTI_OK;
}

static void unmap(void *opaque, tu_backend_map *map) {
    (void)opaque;
    imported *made = map->handle;
    for (int member = 0; member < made->count; member++) {
        if (member != made->rank)
            munmap(made->addresses[member], made->bytes);
    }
    free(made);
    memset(map, 0, sizeof *map);
}

static bool has_multicast(void *opaque, int device_index) {
    (void)opaque;
    return device_index == 1;
}

/* ---- signals: a word per (sender, channel) in the receiver's area, 0 or 1; and a count per rank and channel for
 * barriers ---- */

static size_t area_bytes(int size, int channels) {
    return 4 * (size_t)(size + 1) * (size_t)channels;
}

static tutti_status attach(tu_backend_peers *peers) {
    peers->local = calloc((size_t)peers->channels, sizeof(uint32_t));
    return peers->local == NULL ? host->error(TUTTI_ERROR_MEMORY, "no memory") : TUTTI_OK;
}

static void detach(tu_backend_peers *peers) {
    free(peers->local);
    peers->local = NULL;
}

static void reset(const tu_backend_peers *peers) {
    memset(peers->areas->addresses[peers->rank], 0, area_bytes(peers->size, peers->channels));
    memset(peers->local, 0, (size_t)peers->channels * sizeof(uint32_t));
}

static _Atomic uint32_t *word(const tu_backend_peers *peers, int member, int row, int channel) {
    return (_Atomic uint32_t *)peers->areas->addresses[member] + row * peers->channels + channel;
}

static tutti_status spin(const tu_backend_peers *peers, _Atomic uint32_t *place, uint32_t from, uint32_t to,
                         int64_t timeout_ns) {
    int64_t deadline = host->now() + host->timeout(peers->group, timeout_ns);
    uint32_t expected = from;
    while (!atomic_compare_exchange_weak(place, &expected, to)) {
        expected = from;
        if (atomic_load(host->group_state(peers->group)) != 0)
            return host->group_cause(peers->group);
        if (host->now() > deadline)
            return host->error(TUTTI_ERROR_TIMEOUT, "timeout: no signal");
        sched_yield();
    }
    return TUTTI_OK;
}

static tutti_status send_signal(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call) {
    return spin(peers, word(peers, to, peers->rank, channel), 0, 1, call->timeout_ns);
}

static tutti_status wait_signal(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call) {
    return spin(peers, word(peers, peers->rank, from, channel), 1, 0, call->timeout_ns);
}

static tutti_status test_signal(const tu_backend_peers *peers, int from, int channel, bool *arrived) {
    uint32_t expected = 1;
    *arrived = atomic_compare_exchange_strong(word(peers, peers->rank, from, channel), &expected, 0);
    return TUTTI_OK;
}

static tutti_status barrier(const tu_backend_peers *peers, int channel, const tu_backend_call *call) {
    (void)call;
    uint32_t epoch = ++((uint32_t *)peers->local)[channel];
    atomic_store(word(peers, peers->rank, peers->size, channel), epoch);
    for (int member = 0; member < peers->size; member++) {
        while ((int32_t)(atomic_load(word(peers, member, peers->size, channel)) - epoch) < 0) {
            if (atomic_load(host->group_state(peers->group)) != 0)
                return host->group_cause(peers->group);
            sched_yield();
        }
    }
    return TUTTI_OK;
}

static tutti_status copy(void *opaque, int device_index, void *to, const void *from, size_t bytes,
                         const tu_backend_call *call) {
    (void)opaque;
    (void)device_index;
    (void)call;
    memmove(to, from, bytes);
    return TUTTI_OK;
}

static tutti_status clear(void *opaque, const tu_backend_block *block, size_t offset, size_t bytes) {
    (void)opaque;
    memset((char *)block->address + offset, 0, bytes);
    return TUTTI_OK;
}

static tutti_status set32(void *opaque, int device_index, uint32_t *words, uint32_t value, size_t count,
                          const tu_backend_call *call) {
    (void)opaque;
    (void)device_index;
    (void)call;
    for (size_t i = 0; i < count; i++)
        words[i] = value;
    return TUTTI_OK;
}

static tutti_status write32(void *opaque, int device_index, uint32_t *place, uint32_t value,
                            const tu_backend_call *call) {
    return set32(opaque, device_index, place, value, 1, call);
}

__attribute__((visibility("default"))) extern const tu_backend tutti_backend_v1;
const tu_backend tutti_backend_v1 = {
    .size = sizeof(tu_backend),
    .version = PLUGIN_VERSION,
    .name = PLUGIN_NAME,
    .device = TUTTI_CUDA,
    .probe = probe,
    .open = open_world,
    .close = close_world,
    .allocate = allocate,
    .free = free_block,
    .export_block = export_block,
    .unexport_block = unexport_block,
    .import_blocks = import_blocks,
    .unmap = unmap,
    .has_multicast = has_multicast,
    .area_bytes = area_bytes,
    .attach = attach,
    .detach = detach,
    .reset = reset,
    .signal = send_signal,
    .wait_signal = wait_signal,
    .test_signal = test_signal,
    .barrier = barrier,
    .copy = copy,
    .clear = clear,
    .set32 = set32,
    .write32 = write32,
};
