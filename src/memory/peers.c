/* SPDX-License-Identifier: Apache-2.0
 *
 * Peer handles: their life, their queries, and the checks in front of copies and signals; the backend does the work.
 *
 * A handle lives while a user holds it or its block's cache does. Only a held one keeps its group: a cached one goes
 * with its block or with its group, whichever ends first.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/result.h"
#include "memory/tables.h"

/* ---- life ---- */

void tu_peers_use(tutti_peers *peers) {
    if (peers->users++ == 0) {
        tutti_group_keep(peers->group);
        tu_world_handle(peers->memory->world, "peers", 1);
    }
}

static void unlink_from_memory(tutti_peers *peers) {
    for (tutti_peers **link = &peers->memory->first_peers; *link != NULL; link = &(*link)->next_of_memory) {
        if (*link == peers) {
            *link = peers->next_of_memory;
            break;
        }
    }
    peers->cached = false;
}

static void unlink_from_group(tutti_peers *peers) {
    tu_memory_group *group = peers->group_state;
    for (tutti_peers **link = &group->first_peers; *link != NULL; link = &(*link)->next_of_group) {
        if (*link == peers) {
            *link = peers->next_of_group;
            break;
        }
    }
    tu_order_remove(&group->by_index, peers->index);
    _Atomic(const tutti_peers *) *slot = &group->recent[peers->index % TU_RECENT_PEERS];
    if (atomic_load_explicit(slot, memory_order_relaxed) == peers)
        atomic_store_explicit(slot, NULL, memory_order_relaxed);
}

void tu_peers_unlink(tutti_peers *peers, tutti_peers **doomed) {
    if (peers->cached)
        unlink_from_memory(peers);
    if (peers->users > 0)
        return;
    unlink_from_group(peers);
    peers->next_of_memory = *doomed;
    *doomed = peers;
}

void tu_peers_free(tutti_peers *doomed) {
    while (doomed != NULL) {
        tutti_peers *peers = doomed;
        doomed = peers->next_of_memory;
        tutti_memory *memory = peers->memory;
        memory->backend->remote->detach(&peers->backend);
        memory->backend->memory->unmap(memory->backend_state, &peers->areas);
        memory->backend->memory->free(memory->backend_state, &peers->area);
        memory->backend->memory->unmap(memory->backend_state, &peers->blocks);
        free(peers->serials);
        free(peers);
        tu_memory_drop(memory);
    }
}

tutti_peers *tutti_peers_keep(tutti_peers *peers) {
    if (peers != NULL && !tu_world_forked(peers->memory->world)) {
        pthread_mutex_lock(&peers->memory->tables->lock);
        tu_peers_use(peers);
        pthread_mutex_unlock(&peers->memory->tables->lock);
    }
    return peers;
}

void tutti_peers_release(tutti_peers *peers) {
    if (peers == NULL || tu_world_forked(peers->memory->world))
        return;
    tutti_world *world = peers->memory->world;
    tu_memory_world *tables = peers->memory->tables;
    tutti_group *group = peers->group;
    tutti_peers *doomed = NULL;
    pthread_mutex_lock(&tables->lock);
    bool last = --peers->users == 0;
    if (last && !peers->cached)
        tu_peers_unlink(peers, &doomed);
    pthread_mutex_unlock(&tables->lock);
    tu_peers_free(doomed);
    if (last) {
        tutti_group_release(group);
        tu_world_handle(world, "peers", -1); /* last: the world may go with it */
    }
}

/* ---- queries ---- */

int tutti_peers_rank(const tutti_peers *peers) {
    return peers->backend.rank;
}

int tutti_peers_size(const tutti_peers *peers) {
    return peers->backend.size;
}

tutti_group *tutti_peers_group(const tutti_peers *peers) {
    return peers->group;
}

size_t tutti_peers_bytes(const tutti_peers *peers) {
    return peers->memory->bytes;
}

size_t tutti_peers_pad_bytes(const tutti_peers *peers) {
    return peers->memory->pad_bytes;
}

int tutti_peers_channels(const tutti_peers *peers) {
    return peers->backend.channels;
}

void *tutti_peers_buffer(const tutti_peers *peers, int rank) {
    return rank < 0 || rank >= peers->backend.size ? NULL : peers->buffers[rank];
}

void *tutti_peers_signal_pad(const tutti_peers *peers, int rank) {
    char *buffer = tutti_peers_buffer(peers, rank);
    return buffer == NULL ? NULL : buffer + peers->memory->pad_offset;
}

void *tutti_peers_multicast(const tutti_peers *peers) {
    return peers->blocks.multicast;
}

/* ---- views ---- */

static tutti_status check_rank(const tutti_peers *peers, const char *what, int rank) {
    if (rank < 0 || rank >= peers->backend.size)
        return tu_error(TUTTI_ERROR_RANGE, "%s: rank must be in [0, %d), not %d", what, peers->backend.size, rank);
    return TUTTI_OK;
}

/* A view of `bytes` bytes of memory at `base`: everything of it must lie inside. */
static tutti_status make_view(const tutti_peers *peers, const char *what, char *base, size_t bytes,
                              const int64_t *shape, int dim_count, tutti_dtype dtype, size_t skip, int64_t offset,
                              tutti_view *view) {
    tutti_view made = TUTTI_VIEW_INIT;
    tutti_status status = tutti_view_of(base, dtype, shape, dim_count, &made);
    if (status != TUTTI_OK)
        return status;
    if (base == NULL)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "%s: Cannot get buffer across nodes: that rank is not mapped here; tutti_peers_put, "
                        "tutti_peers_get and signals reach it",
                        what);
    if (offset < 0)
        return tu_error(TUTTI_ERROR_RANGE, "%s: an offset must be non-negative, not %lld", what, (long long)offset);
    size_t element = tutti_dtype_size(dtype), wanted = tutti_view_bytes(&made), start;
    if (__builtin_mul_overflow((size_t)offset, element, &start) || __builtin_add_overflow(start, skip, &start) ||
        start > bytes || wanted > bytes - start)
        return tu_error(
            TUTTI_ERROR_RANGE,
            "%s: the requested size (%zu bytes from element %lld of %s on) exceeds the allocated size (%zu bytes)",
            what, wanted, (long long)offset, tutti_dtype_name(dtype), bytes);
    made.data = base + start;
    made.device = tutti_memory_device(peers->memory);
    return tu_result_copy("tutti_view", &made, sizeof made, view);
}

/* What calls that give a view of a member's memory begin with. */
static tutti_status check_place(const tutti_peers *peers, const char *what, int rank, const tutti_view *view) {
    if (peers == NULL || view == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s needs peers and a place for the view", what);
    return check_rank(peers, what, rank);
}

tutti_status tutti_peers_get_buffer(const tutti_peers *peers, int rank, const int64_t *shape, int dim_count,
                                    tutti_dtype dtype, int64_t offset, tutti_view *view) {
    tutti_status status = check_place(peers, "get_buffer", rank, view);
    if (status != TUTTI_OK)
        return status;
    return make_view(peers, "get_buffer", peers->buffers[rank], peers->memory->bytes, shape, dim_count, dtype, 0,
                     offset, view);
}

tutti_status tutti_peers_get_remote(const tutti_peers *peers, int rank, const void *pointer, const int64_t *shape,
                                    int dim_count, tutti_dtype dtype, tutti_view *view) {
    tutti_status status = check_place(peers, "get_remote", rank, view);
    if (status != TUTTI_OK)
        return status;
    uintptr_t own = (uintptr_t)peers->memory->block.address;
    size_t skip = pointer == NULL ? 0 : (size_t)((uintptr_t)pointer - own);
    if (pointer != NULL && ((uintptr_t)pointer < own || skip > peers->memory->bytes))
        return tu_error(TUTTI_ERROR_ARGUMENT, "get_remote: the pointer does not lie in this rank's block");
    return make_view(peers, "get_remote", peers->buffers[rank], peers->memory->bytes, shape, dim_count, dtype, skip, 0,
                     view);
}

tutti_status tutti_peers_get_signal_pad(const tutti_peers *peers, int rank, const int64_t *shape, int dim_count,
                                        tutti_dtype dtype, int64_t offset, tutti_view *view) {
    tutti_status status = check_place(peers, "get_signal_pad", rank, view);
    if (status != TUTTI_OK)
        return status;
    if (dtype == 0)
        dtype = TUTTI_U32;
    int64_t rest = 0;
    size_t element = tutti_dtype_size(dtype);
    if (dim_count == 0 && shape == NULL && element != 0) {
        rest = (int64_t)(peers->memory->pad_bytes / element);
        rest = offset > 0 && offset <= rest ? rest - offset : rest;
        shape = &rest;
        dim_count = 1;
    }
    return make_view(peers, "get_signal_pad", tutti_peers_signal_pad(peers, rank), peers->memory->pad_bytes, shape,
                     dim_count, dtype, 0, offset, view);
}

/* ---- the checks in front of an operation ---- */

/* Peers, fork, call; and that the group lives, when it has to. */
static tutti_status check_call(const tutti_peers *peers, const char *what, const tutti_call *call, bool alive,
                               tu_backend_call *short_call) {
    if (peers == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s needs peers", what);
    *short_call = (tu_backend_call){ 0 };
    if (call != NULL) {
        tutti_call full = TUTTI_CALL_INIT;
        tutti_status status = tu_options_copy("tutti_call", call, &full, sizeof full);
        if (status != TUTTI_OK)
            return status;
        if (full.timeout_ns < 0)
            return tu_error(TUTTI_ERROR_ARGUMENT, "%s: timeout_ns must not be negative (%lld)", what,
                            (long long)full.timeout_ns);
        if (full.work != NULL || full.batch != NULL)
            return tu_error(TUTTI_ERROR_UNSUPPORTED,
                            "%s is complete when it returns: it takes no work handle and no batch", what);
        *short_call = (tu_backend_call){ .timeout_ns = full.timeout_ns, .stream = full.stream };
    }
    if (alive && tu_group_ended(peers->group))
        return tu_group_cause(peers->group);
    return tu_world_check(peers->memory->world);
}

static tutti_status check_channel(const tutti_peers *peers, const char *what, int channel) {
    if (channel < 0)
        return tu_error(TUTTI_ERROR_RANGE, "%s: a channel must be non-negative, not %d", what, channel);
    if (channel >= peers->backend.channels)
        return tu_error(
            TUTTI_ERROR_RANGE,
            "%s: channel %d is above the maximum supported channel %d of %d ranks and a signal pad of %zu bytes: "
            "allocate the block with more signal_pad_bytes",
            what, channel, peers->backend.channels - 1, peers->backend.size, peers->memory->pad_bytes);
    return TUTTI_OK;
}

static tutti_status check_signal(const tutti_peers *peers, const char *what, int rank, int channel) {
    tutti_status status = check_rank(peers, what, rank);
    return status != TUTTI_OK ? status : check_channel(peers, what, channel);
}

static tutti_status check_copy(const tutti_peers *peers, const char *what, int rank, size_t offset, const void *local,
                               size_t bytes) {
    if (local == NULL && bytes > 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s: the address of the bytes is NULL", what);
    if ((int64_t)offset < 0)
        return tu_error(TUTTI_ERROR_RANGE, "%s: an offset must be non-negative, not %lld", what, (long long)offset);
    if (rank < 0 || rank >= peers->backend.size)
        return tu_error(TUTTI_ERROR_RANGE, "%s: invalid peer %d: rank must be in [0, %d)", what, rank,
                        peers->backend.size);
    if (offset > peers->memory->bytes || bytes > peers->memory->bytes - offset)
        return tu_error(TUTTI_ERROR_RANGE,
                        "%s: %zu bytes from byte %zu on: the range exceeds the %zu bytes of the block", what, bytes,
                        offset, peers->memory->bytes);
    return TUTTI_OK;
}

/* The other ranks of a fake world: what goes to them goes nowhere. */
static bool is_nobody(const tutti_peers *peers, int rank) {
    return peers->memory->world->fake && rank != peers->backend.rank;
}

/* ---- operations ---- */

tutti_status tutti_peers_put(tutti_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                             const tutti_call *call) {
    tu_backend_call short_call;
    tutti_status status = check_call(peers, "put", call, true, &short_call);
    if (status == TUTTI_OK)
        status = check_copy(peers, "put", to, offset, from, bytes);
    if (status != TUTTI_OK || bytes == 0 || is_nobody(peers, to))
        return status;
    return peers->memory->backend->remote->put(&peers->backend, to, offset, from, bytes, &short_call);
}

/* By the processors, in rank order. */
static tutti_status put_to_each(tutti_peers *peers, size_t offset, const void *from, size_t bytes,
                                const tu_backend_call *call) {
    tutti_status status = TUTTI_OK;
    for (int to = 0; status == TUTTI_OK && to < peers->backend.size; to++) {
        if (!is_nobody(peers, to))
            status = peers->memory->backend->remote->put(&peers->backend, to, offset, from, bytes, call);
    }
    return status;
}

tutti_status tutti_peers_put_multicast(tutti_peers *peers, size_t offset, const void *from, size_t bytes,
                                       const tutti_call *call) {
    tu_backend_call short_call;
    tutti_status status = check_call(peers, "put_multicast", call, true, &short_call);
    if (status == TUTTI_OK)
        status = check_copy(peers, "put_multicast", 0, offset, from, bytes);
    if (status != TUTTI_OK)
        return status;
    const tutti_memory *memory = peers->memory;
    const char *setting = tu_settings_text(&memory->world->settings, TU_SETTING_MULTICAST);
    char *all = tutti_peers_multicast(peers);
    if (all == NULL && strcmp(setting, "software") != 0)
        return tu_error(TUTTI_ERROR_UNSUPPORTED,
                        "put_multicast: multicast support is required, and this block has none (TUTTI_MULTICAST=%s). "
                        "TUTTI_MULTICAST=software makes a copy for each member",
                        setting);
    if (bytes == 0)
        return TUTTI_OK;
    if (all == NULL)
        return put_to_each(peers, offset, from, bytes, &short_call);
    return memory->backend->memory->copy(memory->backend_state, memory->block.device_index, all + offset, from, bytes,
                                         &short_call);
}

tutti_status tutti_peers_get(tutti_peers *peers, int from, size_t offset, void *to, size_t bytes,
                             const tutti_call *call) {
    tu_backend_call short_call;
    tutti_status status = check_call(peers, "get", call, false, &short_call); /* a dead rank's block stays readable */
    if (status == TUTTI_OK)
        status = check_copy(peers, "get", from, offset, to, bytes);
    if (status != TUTTI_OK || bytes == 0 || is_nobody(peers, from))
        return status;
    return peers->memory->backend->remote->get(&peers->backend, from, offset, to, bytes, &short_call);
}

/* A signal to, or from, another member. */
static tutti_status run_signal(tutti_peers *peers, const char *what, bool sends, int member, int channel,
                               const tutti_call *call) {
    tu_backend_call short_call;
    tutti_status status = check_call(peers, what, call, true, &short_call);
    if (status == TUTTI_OK)
        status = check_signal(peers, what, member, channel);
    if (status != TUTTI_OK || peers->memory->world->fake)
        return status;
    const tu_backend_remote *remote = peers->memory->backend->remote;
    return (sends ? remote->signal : remote->wait_signal)(&peers->backend, member, channel, &short_call);
}

tutti_status tutti_peers_signal(tutti_peers *peers, int to, int channel, const tutti_call *call) {
    return run_signal(peers, "signal", true, to, channel, call);
}

tutti_status tutti_peers_wait_signal(tutti_peers *peers, int from, int channel, const tutti_call *call) {
    return run_signal(peers, "wait_signal", false, from, channel, call);
}

tutti_status tutti_peers_test_signal(tutti_peers *peers, int from, int channel, bool *arrived) {
    tu_backend_call short_call;
    tutti_status status = check_call(peers, "test_signal", NULL, true, &short_call);
    if (status == TUTTI_OK && arrived == NULL)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "test_signal needs a place for its answer");
    if (status == TUTTI_OK)
        status = check_signal(peers, "test_signal", from, channel);
    if (status != TUTTI_OK)
        return status;
    if (peers->memory->world->fake) {
        *arrived = true;
        return TUTTI_OK;
    }
    return peers->memory->backend->remote->test_signal(&peers->backend, from, channel, arrived);
}

/* Whether the word exists, and the backend has words. */
static tutti_status check_word(const tutti_peers *peers, const char *what, size_t word) {
    const tu_backend *backend = peers->memory->backend;
    if (word >= peers->memory->pad_bytes / sizeof(uint64_t))
        return tu_error(TUTTI_ERROR_RANGE,
                        "%s: the signal pad of %zu bytes has words 0 to %zd, not %zu: allocate the block with more "
                        "signal_pad_bytes",
                        what, peers->memory->pad_bytes, (ssize_t)(peers->memory->pad_bytes / sizeof(uint64_t)) - 1,
                        word);
    if (backend->remote->set_word == NULL || backend->remote->wait_word == NULL)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s: backend %s has no words that are waited for", what,
                        backend->name);
    return TUTTI_OK;
}

static size_t word_offset(const tutti_peers *peers, size_t word) {
    return peers->memory->pad_offset + word * sizeof(uint64_t);
}

tutti_status tutti_peers_put_with_signal(tutti_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                                         size_t word, uint64_t value, const tutti_call *call) {
    static const char what[] = "put_with_signal";
    tu_backend_call short_call;
    tutti_status status = check_call(peers, what, call, true, &short_call);
    if (status == TUTTI_OK)
        status = check_copy(peers, what, to, offset, from, bytes);
    if (status == TUTTI_OK)
        status = check_word(peers, what, word);
    if (status != TUTTI_OK || is_nobody(peers, to))
        return status;
    const tu_backend_remote *remote = peers->memory->backend->remote;
    if (bytes > 0)
        status = remote->put(&peers->backend, to, offset, from, bytes, &short_call);
    return status == TUTTI_OK ? remote->set_word(&peers->backend, to, word_offset(peers, word), value, &short_call)
                              : status;
}

tutti_status tutti_peers_wait_for_signal(tutti_peers *peers, size_t word, tutti_comparison comparison, uint64_t value,
                                         const tutti_call *call) {
    static const char what[] = "wait_for_signal";
    tu_backend_call short_call;
    tutti_status status = check_call(peers, what, call, true, &short_call);
    if (status == TUTTI_OK && comparison != TUTTI_EQUAL && comparison != TUTTI_AT_LEAST)
        status = tu_error(TUTTI_ERROR_ARGUMENT, "%s: the comparison is TUTTI_EQUAL or TUTTI_AT_LEAST, not %d", what,
                          (int)comparison);
    if (status == TUTTI_OK)
        status = check_word(peers, what, word);
    if (status != TUTTI_OK || peers->memory->world->fake)
        return status;
    return peers->memory->backend->remote->wait_word(&peers->backend, word_offset(peers, word),
                                                     comparison == TUTTI_EQUAL, value, &short_call);
}

tutti_status tu_peers_run(tutti_peers *peers, const char *operation, tu_backend_start *start, void *context,
                          const tutti_call *call) {
    tu_backend_call short_call;
    const tu_backend *backend = peers->memory->backend;
    tutti_status status = check_call(peers, operation, call, true, &short_call);
    if (status != TUTTI_OK)
        return status;
    if (backend->remote->run == NULL)
        return tu_error(TUTTI_ERROR_UNSUPPORTED, "%s: backend %s has no kernels of others", operation, backend->name);
    return backend->remote->run(&peers->backend, operation, start, context, &short_call);
}

/* Whether a call could not be made here, whatever the other ranks do. */
static bool is_own_failure(tutti_status status) {
    return status == TUTTI_ERROR_MEMORY || status == TUTTI_ERROR_LIMIT || status == TUTTI_ERROR_SYSTEM ||
           status == TUTTI_ERROR_BACKEND;
}

tutti_status tutti_peers_barrier(tutti_peers *peers, int channel, const tutti_call *call) {
    tu_backend_call short_call;
    tutti_status status = check_call(peers, "barrier", call, true, &short_call);
    if (status == TUTTI_OK)
        status = check_channel(peers, "barrier", channel);
    if (status != TUTTI_OK || peers->memory->world->fake)
        return status;
    status = peers->memory->backend->remote->barrier(&peers->backend, channel, &short_call);
    if (peers->memory->device != TUTTI_CPU && is_own_failure(status))
        tu_group_end(peers->group, NULL); /* the others wait for this rank on their devices */
    return status;
}
