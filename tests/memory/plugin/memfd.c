/* SPDX-License-Identifier: Apache-2.0
 *
 * A small but complete backend, compiled and loaded by the tests: memory of a "device" that is a memfd, passed to the
 * other ranks as a descriptor. It sees libtutti only through the host's table.
 *
 * It comes in two kinds. With MAPS 1 a peer's block is mapped and has an address; with MAPS 0 it has none, and bytes
 * and signals go there by rank and offset alone, as over a network: with pwrite and pread.
 */
#include <errno.h>
#include <pthread.h>
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
#ifndef PLUGIN_DEVICE
#define PLUGIN_DEVICE TUTTI_CUDA
#endif
#ifndef MAPS
#define MAPS 1
#endif
/* JOINS 1: all ranks must open it together. The rank that cannot: on its own, and when all enter; -1 nobody. */
#ifndef JOINS
#define JOINS 0
#endif
#ifndef OPEN_FAILS_ON
#define OPEN_FAILS_ON (-1)
#endif
#ifndef JOIN_FAILS_ON
#define JOIN_FAILS_ON (-1)
#endif
/* Sizes as an older plug-in would have them, without the functions at the end. */
#ifndef MEMORY_SIZE
#define MEMORY_SIZE sizeof(tu_backend_memory)
#endif
#ifndef TABLE_SIZE
#define TABLE_SIZE sizeof(tu_backend)
#endif

static const tu_backend_host *host;

typedef struct state {
    tutti_world *world;
    _Atomic int blocks; /* that live: checked at close */
    int joined;         /* how often all entered it */
    size_t reserved;    /* what it has grown by */
} state;

static tutti_status probe(const tu_backend_host *given, int *device_count) {
    host = given;
    *device_count = 2;
    return TUTTI_OK;
}

static tutti_status open_world(const tu_backend_host *given, tutti_world *world, void **result) {
    (void)given;
    if (OPEN_FAILS_ON >= 0 && host->local_rank(world) == OPEN_FAILS_ON)
        return host->error(TUTTI_ERROR_UNSUPPORTED, "this rank has no abacus");
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

static bool can(void *opaque, tu_ability ability) {
    (void)opaque;
    return ability == TU_ABILITY_PASSES_DESCRIPTORS || (MAPS && ability == TU_ABILITY_MAPS_PEERS);
}

/* All ranks at once: each sees how often the others have been here. */
static tutti_status join(void *opaque, tutti_group *group, int64_t deadline) {
    state *ours = opaque;
    int size = host->group_size(group), joined = ours->joined + 1;
    int *all = calloc((size_t)size, sizeof *all);
    if (all == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "no memory");
    tutti_status status = host->exchange(group, "to enter a test", &joined, sizeof joined, -1, deadline, all, NULL);
    for (int rank = 0; status == TUTTI_OK && rank < size; rank++) {
        if (all[rank] != joined)
            status = host->error(TUTTI_ERROR_PROTOCOL, "rank %d came %d times, not %d", rank, all[rank], joined);
    }
    free(all);
    ours->joined = joined;
    if (status == TUTTI_OK && host->group_rank(group) == JOIN_FAILS_ON)
        status = host->error(TUTTI_ERROR_MEMORY, "the abacus has no beads left");
    return status;
}

static tutti_status grow(void *opaque, tutti_group *group, size_t bytes, int64_t deadline) {
    state *ours = opaque;
    (void)group;
    (void)deadline;
    if (bytes > 1000000)
        return host->error(TUTTI_ERROR_MEMORY, "there are not so many beads");
    ours->reserved += bytes;
    return TUTTI_OK;
}

static tutti_status module(void *opaque, void *given) {
    (void)opaque;
    return *(int *)given == 42 ? TUTTI_OK : host->error(TUTTI_ERROR_ARGUMENT, "this is no module");
}

/* ---- memory ---- */

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
    int *descriptors; /* of the peers' blocks; -1 none */
    void *addresses[];
} imported;

static void unmap(void *opaque, tu_backend_map *map) {
    (void)opaque;
    imported *made = map->handle;
    for (int member = 0; member < made->count; member++) {
        if (made->descriptors[member] >= 0)
            close(made->descriptors[member]);
        if (member != made->rank && made->addresses[member] != NULL)
            munmap(made->addresses[member], made->bytes);
    }
    free(made->descriptors);
    free(made);
    memset(map, 0, sizeof *map);
}

static tutti_status import_one(imported *made, int member, const tu_backend_ticket *ticket) {
    if (strcmp((const char *)ticket->bytes, "made by " PLUGIN_NAME) != 0)
        return host->error(TUTTI_ERROR_PROTOCOL, "rank %d sent a ticket that is not ours", member);
    if (member == made->rank || !MAPS)
        return TUTTI_OK;
    void *address = mmap(NULL, made->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ticket->fd, 0);
    if (address == MAP_FAILED)
        return host->error_system(errno, "mmap of rank %d's block", member);
    made->addresses[member] = address;
    return TUTTI_OK;
}

static tutti_status import_blocks(void *opaque, tutti_group *group, const tu_backend_block *own, int rank, int count,
                                  tu_backend_ticket *tickets, tu_backend_map *map) {
    (void)group;
    imported *made = calloc(1, sizeof *made + (size_t)count * sizeof(void *));
    int *descriptors = malloc((size_t)count * sizeof *descriptors);
    tutti_status status = TUTTI_OK;
    if (made == NULL || descriptors == NULL) {
        for (int member = 0; member < count; member++) {
            if (tickets[member].fd >= 0)
                close(tickets[member].fd);
        }
        free(made);
        free(descriptors);
        return host->error(TUTTI_ERROR_MEMORY, "no memory");
    }
    *made = (imported){ .count = count, .rank = rank, .bytes = own->bytes, .descriptors = descriptors };
    for (int member = 0; member < count; member++)
        descriptors[member] = tickets[member].fd;
    made->addresses[rank] = own->address;
    for (int member = 0; status == TUTTI_OK && member < count; member++)
        status = import_one(made, member, &tickets[member]);
    *map = (tu_backend_map){ .addresses = made->addresses, .handle = made };
    if (status != TUTTI_OK)
        unmap(opaque, map);
    return status;
}

static bool has_multicast(void *opaque, int device_index) {
    (void)opaque;
    return device_index == 1;
}

/* Three links between the two devices. */
static tutti_status links(const tu_backend_host *given, int *matrix, int count) {
    (void)given;
    for (int i = 0; i < count * count; i++)
        matrix[i] = i / count == i % count ? 0 : 3;
    return TUTTI_OK;
}

static tutti_status clear(void *opaque, const tu_backend_block *block, size_t offset, size_t bytes) {
    (void)opaque;
    memset((char *)block->address + offset, 0, bytes);
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

/* ---- remote ---- */

/* Bytes at `offset` of a member's block or area. */
static tutti_status write_to(const tu_backend_map *map, int member, size_t offset, const void *from, size_t bytes) {
    const imported *made = map->handle;
    if (made->addresses[member] != NULL) {
        memmove((char *)made->addresses[member] + offset, from, bytes);
        return TUTTI_OK;
    }
    for (size_t done = 0; done < bytes;) {
        ssize_t now =
            pwrite(made->descriptors[member], (const char *)from + done, bytes - done, (off_t)(offset + done));
        if (now < 0 && errno != EINTR)
            return host->error_system(errno, "put to rank %d", member);
        done += now > 0 ? (size_t)now : 0;
    }
    return TUTTI_OK;
}

static tutti_status read_from(const tu_backend_map *map, int member, size_t offset, void *to, size_t bytes) {
    const imported *made = map->handle;
    if (made->addresses[member] != NULL) {
        memmove(to, (const char *)made->addresses[member] + offset, bytes);
        return TUTTI_OK;
    }
    for (size_t done = 0; done < bytes;) {
        ssize_t now = pread(made->descriptors[member], (char *)to + done, bytes - done, (off_t)(offset + done));
        if (now == 0 || (now < 0 && errno != EINTR))
            return host->error_system(now == 0 ? EIO : errno, "get from rank %d", member);
        done += now > 0 ? (size_t)now : 0;
    }
    return TUTTI_OK;
}

static tutti_status put(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                        const tu_backend_call *call) {
    (void)call;
    return write_to(peers->blocks, to, offset, from, bytes);
}

static tutti_status get(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                        const tu_backend_call *call) {
    (void)call;
    return read_from(peers->blocks, from, offset, to, bytes);
}

/* A member's area has three words per (channel, other member), each written by that other member alone: signals that it
 * sent here, signals from here that it took, barriers that it came to. What this rank itself sent, took and came to it
 * counts in `local`. */
typedef enum row {
    SENT,
    TAKEN,
    ARRIVED,
    ROWS
} row;

typedef struct counters {
    pthread_mutex_t lock;
    uint32_t words[];
} counters;

static size_t area_bytes(int size, int channels) {
    return 4 * (size_t)ROWS * (size_t)size * (size_t)channels;
}

static size_t index_of(const tu_backend_peers *peers, row row, int channel, int member) {
    return ((size_t)row * (size_t)peers->channels + (size_t)channel) * (size_t)peers->size + (size_t)member;
}

static tutti_status attach(tu_backend_peers *peers) {
    counters *made = calloc(1, sizeof *made + area_bytes(peers->size, peers->channels));
    if (made == NULL)
        return host->error(TUTTI_ERROR_MEMORY, "no memory");
    pthread_mutex_init(&made->lock, NULL);
    peers->local = made;
    return TUTTI_OK;
}

static void detach(tu_backend_peers *peers) {
    free(peers->local);
    peers->local = NULL;
}

static void reset(const tu_backend_peers *peers) {
    counters *mine = peers->local;
    memset(peers->areas->addresses[peers->rank], 0, area_bytes(peers->size, peers->channels));
    memset(mine->words, 0, area_bytes(peers->size, peers->channels));
}

/* What `member` wrote into this rank's area. */
static uint32_t heard(const tu_backend_peers *peers, row row, int channel, int member) {
    return atomic_load((_Atomic uint32_t *)peers->areas->addresses[peers->rank] +
                       index_of(peers, row, channel, member));
}

static tutti_status tell(const tu_backend_peers *peers, row row, int channel, int member, uint32_t value) {
    atomic_thread_fence(memory_order_seq_cst);
    return write_to(peers->areas, member, 4 * index_of(peers, row, channel, peers->rank), &value, sizeof value);
}

static tutti_status pause_until(const tu_backend_peers *peers, int64_t deadline) {
    if (atomic_load(host->group_state(peers->group)) != 0)
        return host->group_cause(peers->group);
    if (host->now() > deadline)
        return host->error(TUTTI_ERROR_TIMEOUT, "timeout: no signal");
    sched_yield();
    return TUTTI_OK;
}

static int64_t deadline_of(const tu_backend_peers *peers, const tu_backend_call *call) {
    return host->now() + host->timeout(peers->group, call->timeout_ns);
}

static tutti_status send_signal(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call) {
    counters *mine = peers->local;
    uint32_t *sent = &mine->words[index_of(peers, SENT, channel, to)];
    int64_t deadline = deadline_of(peers, call);
    tutti_status status = TUTTI_OK;
    for (bool done = false; status == TUTTI_OK && !done;) {
        pthread_mutex_lock(&mine->lock);
        done = heard(peers, TAKEN, channel, to) == *sent;
        if (done)
            status = tell(peers, SENT, channel, to, ++*sent);
        pthread_mutex_unlock(&mine->lock);
        if (!done)
            status = pause_until(peers, deadline);
    }
    return status;
}

static tutti_status test_signal(const tu_backend_peers *peers, int from, int channel, bool *arrived) {
    counters *mine = peers->local;
    tutti_status status = TUTTI_OK;
    pthread_mutex_lock(&mine->lock);
    uint32_t *taken = &mine->words[index_of(peers, TAKEN, channel, from)];
    *arrived = heard(peers, SENT, channel, from) != *taken;
    if (*arrived)
        status = tell(peers, TAKEN, channel, from, ++*taken);
    pthread_mutex_unlock(&mine->lock);
    return status;
}

static tutti_status wait_signal(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call) {
    int64_t deadline = deadline_of(peers, call);
    bool arrived = false;
    tutti_status status = test_signal(peers, from, channel, &arrived);
    while (status == TUTTI_OK && !arrived) {
        status = pause_until(peers, deadline);
        if (status == TUTTI_OK)
            status = test_signal(peers, from, channel, &arrived);
    }
    return status;
}

static tutti_status barrier(const tu_backend_peers *peers, int channel, const tu_backend_call *call) {
    counters *mine = peers->local;
    uint32_t epoch = ++mine->words[index_of(peers, ARRIVED, channel, peers->rank)];
    int64_t deadline = deadline_of(peers, call);
    tutti_status status = TUTTI_OK;
    for (int member = 0; status == TUTTI_OK && member < peers->size; member++)
        status = tell(peers, ARRIVED, channel, member, epoch);
    for (int member = 0; status == TUTTI_OK && member < peers->size; member++) {
        while (status == TUTTI_OK && (int32_t)(heard(peers, ARRIVED, channel, member) - epoch) < 0)
            status = pause_until(peers, deadline);
    }
    return status;
}

/* ---- the table, and what a newer edition may have behind it ---- */

static const struct {
    tu_backend_memory part;
    void (*from_the_future)(void);
} memory_part = {
    .part = { .size = MEMORY_SIZE,
              .allocate = allocate,
              .free = free_block,
              .export_block = export_block,
              .unexport_block = unexport_block,
              .import_blocks = import_blocks,
              .unmap = unmap,
              .clear = clear,
              .copy = copy,
              .set32 = set32,
              .write32 = write32,
              .has_multicast = has_multicast,
              .links = links },
    .from_the_future = abort,
};

static const tu_backend_remote remote_part = {
    .size = sizeof(tu_backend_remote),
    .area_bytes = area_bytes,
    .attach = attach,
    .detach = detach,
    .reset = reset,
    .put = put,
    .get = get,
    .signal = send_signal,
    .wait_signal = wait_signal,
    .test_signal = test_signal,
    .barrier = barrier,
};

struct table {
    tu_backend table;
    void (*from_the_future)(void);
};
__attribute__((visibility("default"))) extern const struct table tutti_backend_v2;
const struct table tutti_backend_v2 = {
    .table = { .size = TABLE_SIZE,
               .version = PLUGIN_VERSION,
               .name = PLUGIN_NAME,
               .device = PLUGIN_DEVICE,
               .probe = probe,
               .open = open_world,
               .close = close_world,
               .can = can,
               .join = JOINS ? join : NULL,
               .grow = JOINS ? grow : NULL,
               .module = JOINS ? module : NULL,
#ifndef WITHOUT_MEMORY
               .memory = &memory_part.part,
               .remote = &remote_part
#endif
    },
    .from_the_future = abort,
};
