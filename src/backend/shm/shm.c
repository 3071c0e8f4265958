/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend, built in: blocks are pieces of reserved shared memory (job/segment.h), which the job passes to the
 * other ranks and maps there; thread-ranks share the one mapping of their process. Members of a group on other hosts
 * are reached by messages (mailbox.c, memory/network.h). A fake world gets private memory and has no peers.
 */
#include "backend/shm/shm.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/error.h"
#include "memory/backend.h"
#include "world/world.h"

/* A put looks at the group's state word this often: nobody writes into a group that ended for longer than one chunk. */
#define PUT_CHUNK ((size_t)1 << 20)

static tutti_status shm_probe(const tu_backend_host *host, int *device_count) {
    (void)host;
    *device_count = 1;
    return TUTTI_OK;
}

/* The state is the world itself: the job and the settings are there. */
static tutti_status shm_begin(const tu_backend_host *host, tutti_world *world, void **state) {
    (void)host;
    *state = world;
    return TUTTI_OK;
}

static void shm_end(void *state) {
    (void)state;
}

/* ---- blocks ---- */

static tutti_status allocate_private(const tu_backend_request *request, tu_piece *piece) {
    size_t bytes = (request->bytes + request->alignment - 1) / request->alignment * request->alignment;
    piece->address = aligned_alloc(request->alignment, bytes);
    if (piece->address == NULL)
        return tu_error_memory(request->what, bytes);
    memset(piece->address, 0, bytes);
    piece->bytes = bytes;
    return TUTTI_OK;
}

static tutti_status shm_allocate(void *state, const tu_backend_request *request, tu_backend_block *block) {
    tutti_world *world = state;
    tu_piece *piece = calloc(1, sizeof *piece);
    if (piece == NULL)
        return tu_error_memory("a piece", sizeof *piece);
    tutti_status status = world->fake ? allocate_private(request, piece)
                                      : tu_piece_alloc(world->job, request->what, request->bytes, request->alignment,
                                                       request->huge_pages, piece);
    if (status != TUTTI_OK) {
        free(piece);
        return status;
    }
    *block =
        (tu_backend_block){ .address = piece->address, .bytes = request->bytes, .device_index = -1, .handle = piece };
    return TUTTI_OK;
}

static void shm_free(void *state, tu_backend_block *block) {
    tutti_world *world = state;
    tu_piece *piece = block->handle;
    if (world->fake)
        free(piece->address);
    else
        tu_piece_free(world->job, piece);
    free(piece);
    *block = (tu_backend_block){ 0 };
}

static tutti_status shm_clear(void *state, const tu_backend_block *block, size_t offset, size_t bytes) {
    (void)state;
    memset((char *)block->address + offset, 0, bytes);
    return TUTTI_OK;
}

/* ---- sharing ---- */

static tutti_status shm_export(void *state, const tu_backend_block *block, tu_backend_ticket *ticket) {
    const tutti_world *world = state;
    *ticket = (tu_backend_ticket){ .fd = -1, .piece = world->fake ? NULL : block->handle };
    return TUTTI_OK;
}

static void shm_unexport(void *state, const tu_backend_block *block, tu_backend_ticket *ticket) {
    (void)state;
    (void)block;
    (void)ticket;
}

/* The mappings were made by the exchange: here they only find their place. The map's handle is the list of them, for
 * release. */
typedef struct shm_map {
    int count;
    tu_mapping **mappings;
    void **addresses;
} shm_map;

static void release_tickets(tu_backend_ticket *tickets, int count) {
    for (int member = 0; member < count; member++) {
        if (tickets[member].mapping != NULL)
            tu_mapping_release(tickets[member].mapping);
    }
}

static tutti_status shm_import(void *state, tutti_group *group, const tu_backend_block *own, int rank, int count,
                               tu_backend_ticket *tickets, tu_backend_map *map) {
    const tutti_world *world = state;
    size_t bytes = sizeof(shm_map) + (size_t)count * (sizeof(tu_mapping *) + sizeof(void *));
    shm_map *made = calloc(1, bytes);
    if (made == NULL) {
        release_tickets(tickets, count);
        return tu_error_memory("addresses of peers", bytes);
    }
    made->count = count;
    made->mappings = (tu_mapping **)(made + 1);
    made->addresses = (void **)(made->mappings + count);
    for (int member = 0; member < count; member++) {
        tu_mapping *mapping = tickets[member].mapping;
        bool far = !world->fake && group->job_ranks[member] < 0; /* on another host: it has no address here */
        if (!world->fake && !far && member != rank && (mapping == NULL || mapping->bytes < own->bytes)) {
            tutti_status status = tu_error(TUTTI_ERROR_PROTOCOL, "rank %d gave %zu bytes where this rank has %zu",
                                           member, mapping == NULL ? (size_t)0 : mapping->bytes, own->bytes);
            release_tickets(tickets, count);
            free(made);
            return status;
        }
        made->addresses[member] = member == rank ? own->address : mapping == NULL ? NULL : mapping->address;
    }
    for (int member = 0; member < count; member++)
        made->mappings[member] = tickets[member].mapping;
    *map = (tu_backend_map){ .addresses = made->addresses, .handle = made };
    return TUTTI_OK;
}

static void shm_unmap(void *state, tu_backend_map *map) {
    (void)state;
    shm_map *made = map->handle;
    for (int member = 0; member < made->count; member++) {
        if (made->mappings[member] != NULL)
            tu_mapping_release(made->mappings[member]);
    }
    free(made);
    *map = (tu_backend_map){ 0 };
}

/* ---- bytes and words ---- */

static tutti_status shm_copy(void *state, int device_index, void *to, const void *from, size_t bytes,
                             const tu_backend_call *call) {
    (void)state;
    (void)device_index;
    (void)call;
    memmove(to, from, bytes); /* a rank may copy within its own block */
    return TUTTI_OK;
}

static tutti_status shm_set32(void *state, int device_index, uint32_t *words, uint32_t value, size_t count,
                              const tu_backend_call *call) {
    (void)state;
    (void)device_index;
    (void)call;
    for (size_t i = 0; i < count; i++)
        atomic_store_explicit((_Atomic uint32_t *)&words[i], value, memory_order_relaxed);
    return TUTTI_OK;
}

static tutti_status shm_write32(void *state, int device_index, uint32_t *word, uint32_t value,
                                const tu_backend_call *call) {
    (void)state;
    (void)device_index;
    (void)call;
    atomic_store_explicit((_Atomic uint32_t *)word, value,
                          memory_order_release); /* pairs with the user's acquire load */
    return TUTTI_OK;
}

/* ---- peers' memory ---- */

/* In chunks, so that a rank that was stopped in the middle does not write on into a group that has ended meanwhile. */
static tutti_status shm_put(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                            const tu_backend_call *call) {
    if (peers->blocks->addresses[to] == NULL)
        return tu_shm_put_far(peers, to, offset, from, bytes, call);
    char *target = (char *)peers->blocks->addresses[to] + offset;
    for (size_t done = 0; done < bytes;) {
        size_t now = bytes - done < PUT_CHUNK ? bytes - done : PUT_CHUNK;
        if (done > 0 && tu_group_ended(peers->group))
            return tu_group_cause(peers->group);
        memmove(target + done, (const char *)from + done, now); /* a rank may copy within its own block */
        done += now;
    }
    return TUTTI_OK;
}

static tutti_status shm_get(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                            const tu_backend_call *call) {
    if (peers->blocks->addresses[from] == NULL)
        return tu_shm_get_far(peers, from, offset, to, bytes, call);
    memmove(to, (const char *)peers->blocks->addresses[from] + offset, bytes);
    return TUTTI_OK;
}

/* ---- the table ---- */

static bool shm_can(void *state, tu_ability ability) {
    (void)state;
    return ability == TU_ABILITY_MAPS_PEERS || ability == TU_ABILITY_PASSES_PIECES || ability == TU_ABILITY_SPANS_HOSTS;
}

static const tu_backend_memory memory_part = {
    .size = sizeof(tu_backend_memory),
    .allocate = shm_allocate,
    .free = shm_free,
    .export_block = shm_export,
    .unexport_block = shm_unexport,
    .import_blocks = shm_import,
    .unmap = shm_unmap,
    .clear = shm_clear,
    .copy = shm_copy,
    .set32 = shm_set32,
    .write32 = shm_write32,
};

static const tu_backend_remote remote_part = {
    .size = sizeof(tu_backend_remote),
    .area_bytes = tu_shm_area_bytes,
    .attach = tu_shm_attach,
    .detach = tu_shm_detach,
    .reset = tu_shm_reset,
    .put = shm_put,
    .get = shm_get,
    .signal = tu_shm_signal,
    .wait_signal = tu_shm_wait_signal,
    .test_signal = tu_shm_test_signal,
    .barrier = tu_shm_barrier,
    .set_word = tu_shm_set_word,
    .wait_word = tu_shm_wait_word,
};

const tu_backend tu_backend_shm = {
    .size = sizeof(tu_backend),
    .version = TU_BACKEND_VERSION,
    .name = "shm",
    .device = TUTTI_CPU,
    .probe = shm_probe,
    .open = shm_begin,
    .close = shm_end,
    .can = shm_can,
    .memory = &memory_part,
    .remote = &remote_part,
};
