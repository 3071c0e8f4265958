/* SPDX-License-Identifier: Apache-2.0
 *
 * Puts, gets, signals and barriers. Where all members are mapped and lie evenly, everything is done as the CUDA backend
 * does it. Else bytes go to members without an address by NVSHMEM's puts and gets, by rank and offset, and signals by
 * kernels that use its device functions.
 *
 * What NVSHMEM sends over a network must lie in its heap. Bytes from elsewhere go through a piece of the heap, the
 * bounce, which one stream uses after the other.
 */
#include <stdlib.h>
#include <string.h>

#include "inner.h"

/* ---- areas ---- */

/* Behind the signals, the words in which members say that they write to the area no more; and one that holds what this
 * rank says, from where it is put. */
static size_t farewells_at(int size, int channels) {
    size_t pairs = (size_t)size * (size_t)channels, even = tu_cuda_remote.area_bytes(size, channels);
    size_t apart = (5 * pairs + (size_t)channels) * sizeof(uint64_t); /* as in params.h */
    return ((even > apart ? even : apart) + 7) & ~(size_t)7;
}

static size_t area_bytes(int size, int channels) {
    return farewells_at(size, channels) + ((size_t)size + 1) * sizeof(uint64_t);
}

/* Whether the CUDA backend's kernels reach all members' areas. */
static bool is_even(const tu_backend_peers *peers) {
    const tu_nvshmem_map *areas = peers->areas->handle;
    return areas->cuda.base != 0;
}

static tutti_status tell_members(tu_nvshmem *nvshmem, tu_nvshmem_map *areas) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    size_t count = (size_t)areas->cuda.count, bytes = count * sizeof(tu_nvshmem_member);
    tu_nvshmem_member *members = calloc(count, sizeof *members);
    if (members == NULL)
        return nvshmem->cuda.host->error(TUTTI_ERROR_MEMORY, "out of memory for the signals of %zu ranks", count);
    for (size_t i = 0; i < count; i++)
        members[i] = (tu_nvshmem_member){ .place = (uint64_t)(uintptr_t)areas->places[i], .pe = areas->pes[i] };
    tutti_status status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status == TUTTI_OK) {
        CUresult result = driver->cuMemAlloc(&areas->members, bytes);
        if (result == CUDA_SUCCESS)
            result = driver->cuMemcpyHtoDAsync(areas->members, members, bytes, nvshmem->device->stream);
        if (result == CUDA_SUCCESS)
            result = driver->cuStreamSynchronize(nvshmem->device->stream);
        if (result != CUDA_SUCCESS)
            status = tu_cuda_error(&nvshmem->cuda, result, "a table of members");
        tu_cuda_leave(&nvshmem->cuda);
    }
    free(members);
    return status;
}

static void forget_members(tu_nvshmem *nvshmem, tu_nvshmem_map *areas) {
    if (areas->members == 0 || tu_cuda_enter(&nvshmem->cuda, nvshmem->device) != TUTTI_OK)
        return;
    nvshmem->cuda.driver.cuMemFree(areas->members);
    areas->members = 0;
    tu_cuda_leave(&nvshmem->cuda);
}

static tutti_status no_device_library(const tu_backend_peers *peers) {
    const tu_nvshmem *nvshmem = peers->state;
    return nvshmem->cuda.host->error(TUTTI_ERROR_UNSUPPORTED,
                                     "group %s has members whose memory is not mapped here: Tutti signals them with "
                                     "NVSHMEM's device library, which was not there when Tutti was built",
                                     nvshmem->cuda.host->group_name(peers->group));
}

static tutti_status attach(tu_backend_peers *peers) {
    tu_nvshmem *nvshmem = peers->state;
    tu_nvshmem_map *areas = peers->areas->handle;
    tutti_status status = TUTTI_OK;
    if (!is_even(peers) && nvshmem->module == NULL)
        return no_device_library(peers);
    if (!is_even(peers))
        status = tell_members(nvshmem, areas);
    if (status == TUTTI_OK)
        status = tu_cuda_remote.attach(peers);
    if (status != TUTTI_OK)
        forget_members(nvshmem, areas);
    return status;
}

static bool has_ended(const tu_backend_peers *peers) {
    const tu_nvshmem *nvshmem = peers->state;
    const _Atomic uint64_t *state = nvshmem->cuda.host->group_state(peers->group);
    return nvshmem->lost || (state != NULL && atomic_load_explicit(state, memory_order_acquire) != 0);
}

/* Everything that this rank's kernels wrote to others has arrived. The context is entered. */
static bool settle(tu_nvshmem *nvshmem) {
    if (nvshmem->cuda.driver.cuCtxSynchronize() != CUDA_SUCCESS)
        return false;
    nvshmem->library->nvshmemx_quiet_on_stream(nvshmem->device->stream);
    return nvshmem->cuda.driver.cuStreamSynchronize(nvshmem->device->stream) == CUDA_SUCCESS;
}

/* Of members that are not all mapped. Freed memory of the heap is given out again, while signals of others, or their
 * words that they have taken this rank's, may still be on their way to the area. So each member tells the others when
 * it writes nothing any more; whoever has heard that from all gives the area back (memory.c). Nobody waits for it. Of a
 * group that has ended nobody knows who is there to be told: its areas stay until the world is closed. */
static void say_farewell(const tu_backend_peers *peers) {
    tu_nvshmem *nvshmem = peers->state;
    const tu_nvshmem_map *areas = peers->areas->handle;
    size_t farewells = farewells_at(peers->size, peers->channels), mine = 8 * (size_t)peers->rank;
    char *said = (char *)peers->areas->addresses[peers->rank] + farewells + 8 * (size_t)peers->size;
    CUstream stream = nvshmem->device->stream;
    areas->own->farewells = farewells;
    areas->own->member_count = peers->size;
    areas->own->rank = peers->rank;
    if (has_ended(peers) || tu_cuda_enter(&nvshmem->cuda, nvshmem->device) != TUTTI_OK)
        return;
    if (settle(nvshmem) &&
        nvshmem->cuda.driver.cuMemsetD8Async((CUdeviceptr)(uintptr_t)said, 1, 8, stream) == CUDA_SUCCESS) {
        for (int i = 0; i < peers->size; i++)
            if (i != peers->rank)
                nvshmem->library->nvshmemx_putmem_on_stream(areas->places[i] + farewells + mine, said, 8, areas->pes[i],
                                                            stream);
        (void)settle(nvshmem); /* the word is this rank's until it has been put */
    }
    tu_cuda_leave(&nvshmem->cuda);
}

static void detach(tu_backend_peers *peers) {
    tu_nvshmem_map *areas = peers->areas->handle;
    if (peers->met && areas->own->apart)
        say_farewell(peers);
    tu_cuda_remote.detach(peers);
    forget_members(peers->state, areas);
}

/* Words of members that are not mapped may still be on their way when all have come: nobody begins anew before they
 * have arrived. */
static void await_words(const tu_backend_peers *peers) {
    tu_nvshmem *nvshmem = peers->state;
    const tu_backend_host *host = nvshmem->cuda.host;
    char nothing = 0;
    if (tu_cuda_enter(&nvshmem->cuda, nvshmem->device) == TUTTI_OK) {
        (void)settle(nvshmem);
        tu_cuda_leave(&nvshmem->cuda);
    }
    if (host->exchange(peers->group, "signals that begin anew", &nothing, 1, -1,
                       host->now() + host->timeout(peers->group, 0), NULL, NULL) != TUTTI_OK)
        host->group_end(peers->group);
}

static void reset(const tu_backend_peers *peers) {
    tu_nvshmem *nvshmem = peers->state;
    const tu_nvshmem_map *areas = peers->areas->handle;
    if (areas->own->apart)
        await_words(peers);
    tu_backend_block area = { .address = peers->areas->addresses[peers->rank],
                              .bytes = area_bytes(peers->size, peers->channels),
                              .device_index = peers->device_index };
    if (tu_cuda_clear(&nvshmem->cuda, &area, 0, area.bytes) != TUTTI_OK)
        nvshmem->cuda.host->log(nvshmem->cuda.world, TUTTI_LOG_WARN, "nvshmem",
                                "the signals of a block could not be reset");
}

/* ---- bytes ---- */

/* The bounce is this stream's when what used it before is over. With bounce_lock held and the context entered. */
static tutti_status take_bounce(tu_nvshmem *nvshmem, CUstream stream) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    if (nvshmem->bounce == NULL) {
        int slab;
        size_t offset;
        tutti_status status =
            tu_nvshmem_obtain(nvshmem, TU_NVSHMEM_BOUNCE, 512, TU_NVSHMEM_LAST, "bytes on their way", &slab, &offset);
        if (status != TUTTI_OK)
            return status;
        nvshmem->bounce = nvshmem->slabs[slab].base + offset;
    }
    CUresult result = nvshmem->bounced == NULL ? driver->cuEventCreate(&nvshmem->bounced, CU_EVENT_DISABLE_TIMING)
                                               : driver->cuStreamWaitEvent(stream, nvshmem->bounced, 0);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(&nvshmem->cuda, result, "ordering bytes on their way");
}

/* One transfer with a member that has no address here: `place` stands for its bytes, `mine` are this rank's. */
typedef struct transfer {
    char *place, *mine;
    size_t bytes;
    int pe;
    bool is_put;
    CUstream stream;
} transfer;

static void move(const tu_nvshmem *nvshmem, const transfer *transfer, char *here, size_t done, size_t bytes) {
    if (transfer->is_put)
        nvshmem->library->nvshmemx_putmem_on_stream(transfer->place + done, here, bytes, transfer->pe,
                                                    transfer->stream);
    else
        nvshmem->library->nvshmemx_getmem_on_stream(here, transfer->place + done, bytes, transfer->pe,
                                                    transfer->stream);
}

/* With bounce_lock held and the context entered. */
static tutti_status by_bounce(tu_nvshmem *nvshmem, const transfer *transfer) {
    const tu_cuda_driver *driver = &nvshmem->cuda.driver;
    tutti_status status = take_bounce(nvshmem, transfer->stream);
    CUdeviceptr bounce = (CUdeviceptr)(uintptr_t)nvshmem->bounce;
    CUresult result = CUDA_SUCCESS;
    for (size_t done = 0; status == TUTTI_OK && result == CUDA_SUCCESS && done < transfer->bytes;) {
        size_t left = transfer->bytes - done, bytes = left < TU_NVSHMEM_BOUNCE ? left : TU_NVSHMEM_BOUNCE;
        CUdeviceptr mine = (CUdeviceptr)(uintptr_t)transfer->mine + done;
        if (transfer->is_put)
            result = driver->cuMemcpyAsync(bounce, mine, bytes, transfer->stream);
        if (result == CUDA_SUCCESS)
            move(nvshmem, transfer, nvshmem->bounce, done, bytes);
        if (result == CUDA_SUCCESS && !transfer->is_put)
            result = driver->cuMemcpyAsync(mine, bounce, bytes, transfer->stream);
        done += bytes;
    }
    if (status == TUTTI_OK) { /* also behind one that broke off: what it has put into the stream uses the bounce */
        CUresult recorded = driver->cuEventRecord(nvshmem->bounced, transfer->stream);
        result = result == CUDA_SUCCESS ? recorded : result;
    }
    return status != TUTTI_OK || result == CUDA_SUCCESS
               ? status
               : tu_cuda_error(&nvshmem->cuda, result, transfer->is_put ? "a put" : "a get");
}

static tutti_status run_transfer(const tu_backend_peers *peers, const transfer *transfer) {
    tu_nvshmem *nvshmem = peers->state;
    tutti_status status = tu_cuda_group_check(peers->local);
    if (status != TUTTI_OK || transfer->bytes == 0)
        return status;
    if (tu_cuda_capture(&nvshmem->cuda, transfer->stream) != 0)
        return nvshmem->cuda.host->error(TUTTI_ERROR_UNSUPPORTED,
                                         "a put or get by NVSHMEM, to a member that is not mapped, cannot be captured");
    status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status != TUTTI_OK)
        return status;
    if (tu_nvshmem_in_heap(nvshmem, transfer->mine, transfer->bytes)) {
        move(nvshmem, transfer, transfer->mine, 0, transfer->bytes);
    } else {
        pthread_mutex_lock(&nvshmem->bounce_lock);
        status = by_bounce(nvshmem, transfer);
        pthread_mutex_unlock(&nvshmem->bounce_lock);
    }
    tu_cuda_leave(&nvshmem->cuda);
    return status;
}

static transfer transfer_of(const tu_backend_peers *peers, int member, size_t offset, const void *mine, size_t bytes,
                            const tu_backend_call *call) {
    const tu_nvshmem_map *blocks = peers->blocks->handle;
    return (transfer){ .place = blocks->places[member] + offset,
                       .mine = (char *)(uintptr_t)mine,
                       .bytes = bytes,
                       .pe = blocks->pes[member],
                       .stream = call->stream };
}

static tutti_status put(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                        const tu_backend_call *call) {
    if (peers->blocks->addresses[to] != NULL)
        return tu_cuda_put(peers, to, offset, from, bytes, call);
    transfer transfer = transfer_of(peers, to, offset, from, bytes, call);
    transfer.is_put = true;
    return run_transfer(peers, &transfer);
}

static tutti_status get(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                        const tu_backend_call *call) {
    if (peers->blocks->addresses[from] != NULL)
        return tu_cuda_get(peers, from, offset, to, bytes, call);
    transfer transfer = transfer_of(peers, from, offset, to, bytes, call);
    return run_transfer(peers, &transfer);
}

/* ---- signals ---- */

static tu_nvshmem_signal_args arguments(const tu_backend_peers *peers, int kind, int peer, int channel,
                                        int64_t timeout_ns, const char *name) {
    tu_nvshmem *nvshmem = peers->state;
    const tu_nvshmem_map *areas = peers->areas->handle;
    return (tu_nvshmem_signal_args){ .members = areas->members,
                                     .own = (uint64_t)(uintptr_t)peers->areas->addresses[peers->rank],
                                     .timeout_ns = (uint64_t)timeout_ns,
                                     .rank = peers->rank,
                                     .size = peers->size,
                                     .channel = channel,
                                     .channels = peers->channels,
                                     .peer = peer,
                                     .kind = kind,
                                     .operation = nvshmem->cuda.host->operation_find(name) };
}

/* In the device's context. */
static tutti_status launch_kernel(tu_nvshmem *nvshmem, tu_nvshmem_signal_args *args, unsigned threads,
                                  CUstream stream) {
    void *parameters[] = { args };
    CUresult result = nvshmem->cuda.driver.cuLaunchKernel(nvshmem->kernels[TU_NVSHMEM_SIGNAL], 1, 1, 1, threads, 1, 1,
                                                          0, stream, parameters, NULL);
    return result == CUDA_SUCCESS ? TUTTI_OK : tu_cuda_error(&nvshmem->cuda, result, "a signal by NVSHMEM");
}

/* A number of the pad: its place in NVSHMEM's calls, whose it is, and what it is set to or waited for. */
typedef struct number {
    const char *place;
    uint64_t value;
    int pe;
} number;

static tutti_status launch(const tu_backend_peers *peers, int kind, int peer, int channel, number number,
                           const tu_backend_call *call, const char *name) {
    tu_nvshmem *nvshmem = peers->state;
    tu_cuda_group *group = peers->local;
    tutti_status status = tu_cuda_group_check(group);
    if (status != TUTTI_OK)
        return status;
    int64_t timeout_ns = nvshmem->cuda.host->timeout(peers->group, call->timeout_ns);
    tu_nvshmem_signal_args args = arguments(peers, kind, peer, channel, timeout_ns, name);
    args.word = (uint64_t)(uintptr_t)number.place;
    args.value = number.value;
    args.pe = number.pe;
    unsigned threads = (unsigned)(peers->size + 31) / 32 * 32;
    threads = kind != TU_CUDA_SIGNAL_BARRIER ? 1 : threads > 512 ? 512 : threads;
    tu_cuda_order order;
    status = tu_cuda_enter(&nvshmem->cuda, nvshmem->device);
    if (status != TUTTI_OK)
        return status;
    tu_cuda_watch(&nvshmem->cuda); /* before anything waits */
    status = tu_cuda_order_begin(group, call->stream, tu_cuda_capture(&nvshmem->cuda, call->stream), timeout_ns,
                                 args.operation, 0, &order);
    if (status == TUTTI_OK) {
        args.group = order.words;
        bool waits = kind == TU_CUDA_SIGNAL_WAIT || kind >= TU_CUDA_SIGNAL_AWAIT_EQUAL;
        if (!waits && order.capture == 0) /* puts of the stream arrive before the signal */
            nvshmem->library->nvshmemx_quiet_on_stream(call->stream);
        status = launch_kernel(nvshmem, &args, threads, call->stream);
        tu_cuda_order_end(&order, status == TUTTI_OK);
    }
    tu_cuda_leave(&nvshmem->cuda);
    return status;
}

static tutti_status put_signal(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call) {
    return is_even(peers) ? tu_cuda_remote.signal(peers, to, channel, call)
                          : launch(peers, TU_CUDA_SIGNAL_PUT, to, channel, (number){ 0 }, call, "peers_signal");
}

static tutti_status wait_signal(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call) {
    return is_even(peers) ? tu_cuda_remote.wait_signal(peers, from, channel, call)
                          : launch(peers, TU_CUDA_SIGNAL_WAIT, from, channel, (number){ 0 }, call, "peers_wait_signal");
}

static tutti_status barrier(const tu_backend_peers *peers, int channel, const tu_backend_call *call) {
    return is_even(peers) ? tu_cuda_remote.barrier(peers, channel, call)
                          : launch(peers, TU_CUDA_SIGNAL_BARRIER, -1, channel, (number){ 0 }, call, "peers_barrier");
}

/* Whether the CUDA backend's kernels reach all members' blocks too. */
static bool has_even_blocks(const tu_backend_peers *peers) {
    const tu_nvshmem_map *blocks = peers->blocks->handle;
    return is_even(peers) && blocks->cuda.base != 0;
}

static tutti_status use_word(const tu_backend_peers *peers, int kind, int member, size_t offset, uint64_t value,
                             const tu_backend_call *call) {
    const tu_nvshmem *nvshmem = peers->state;
    const tu_nvshmem_map *blocks = peers->blocks->handle;
    bool sets = kind == TU_CUDA_SIGNAL_SET_WORD;
    if (nvshmem->module == NULL)
        return no_device_library(peers);
    number number = { blocks->places[member] + offset, value, blocks->pes[member] };
    return launch(peers, kind, sets ? member : -1, 0, number, call, sets ? "peers_signal" : "peers_wait_signal");
}

static tutti_status set_word(const tu_backend_peers *peers, int to, size_t offset, uint64_t value,
                             const tu_backend_call *call) {
    return has_even_blocks(peers) ? tu_cuda_remote.set_word(peers, to, offset, value, call)
                                  : use_word(peers, TU_CUDA_SIGNAL_SET_WORD, to, offset, value, call);
}

static tutti_status wait_word(const tu_backend_peers *peers, size_t offset, bool equal, uint64_t value,
                              const tu_backend_call *call) {
    int kind = equal ? TU_CUDA_SIGNAL_AWAIT_EQUAL : TU_CUDA_SIGNAL_AWAIT_LEAST;
    return has_even_blocks(peers) ? tu_cuda_remote.wait_word(peers, offset, equal, value, call)
                                  : use_word(peers, kind, peers->rank, offset, value, call);
}

/* A kernel on the backend's own stream looks, takes, and answers; the host waits for it. */
static tutti_status test_signal(const tu_backend_peers *peers, int from, int channel, bool *arrived) {
    tu_nvshmem *nvshmem = peers->state;
    if (is_even(peers))
        return tu_cuda_remote.test_signal(peers, from, channel, arrived);
    tu_cuda_device *device = nvshmem->device;
    const tu_cuda_group *group = peers->local;
    tu_nvshmem_signal_args args = arguments(peers, TU_CUDA_SIGNAL_TEST, from, channel, 0, "peers_wait_signal");
    args.group = (tu_cuda_group_words){ .words = group->words, .report = group->report };
    args.answer = device->answer_here;
    tutti_status status = tu_cuda_enter(&nvshmem->cuda, device);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&device->answer_lock);
    status = launch_kernel(nvshmem, &args, 1, device->stream);
    CUresult result = status == TUTTI_OK ? nvshmem->cuda.driver.cuStreamSynchronize(device->stream) : CUDA_SUCCESS;
    *arrived = status == TUTTI_OK && __atomic_load_n((uint32_t *)device->answer, __ATOMIC_ACQUIRE) != 0;
    pthread_mutex_unlock(&device->answer_lock);
    tu_cuda_leave(&nvshmem->cuda);
    return result == CUDA_SUCCESS ? status : tu_cuda_error(&nvshmem->cuda, result, "testing for a signal");
}

const tu_backend_remote tu_nvshmem_remote = {
    .size = sizeof(tu_backend_remote),
    .area_bytes = area_bytes,
    .attach = attach,
    .detach = detach,
    .reset = reset,
    .put = put,
    .get = get,
    .signal = put_signal,
    .wait_signal = wait_signal,
    .test_signal = test_signal,
    .barrier = barrier,
    .set_word = set_word,
    .wait_word = wait_word,
};
