/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals and barriers on streams. See signal.cu for the protocol.
 *
 * A signal area is [channels][size] signals, [channels][size] barrier words that peers write, [channels] counters of
 * the multicast barrier, then what only its owner uses: [channels][size] counters and [channels] epochs.
 */
#include <stdlib.h>

#include "cuda.h"

static size_t shared_bytes(int size, int channels) {
    size_t words = (size_t)channels * (size_t)size * (sizeof(tu_cuda_signal) + sizeof(uint32_t));
    return (words + (size_t)channels * sizeof(uint32_t) + 127) & ~(size_t)127;
}

static size_t area_bytes(int size, int channels) {
    return shared_bytes(size, channels) + (size_t)channels * (size_t)size * sizeof(tu_cuda_signal) +
           (size_t)channels * sizeof(uint32_t);
}

/* ---- ranks that share the process: how many signals and barriers each has launched ---- */

/* Launches of one signal: [channel][from][to] {put by `from`, taken by `to`}, then barriers: [channel][rank]. */
static _Atomic uint32_t *signal_counts(const tu_backend_peers *peers, _Atomic uint32_t *counts, int channel, int from,
                                       int to) {
    size_t size = (size_t)peers->size;
    return counts + (((size_t)channel * size + (size_t)from) * size + (size_t)to) * 2;
}

static _Atomic uint32_t *barrier_counts(const tu_backend_peers *peers, _Atomic uint32_t *counts, int channel) {
    return signal_counts(peers, counts, peers->channels, 0, 0) + (size_t)channel * (size_t)peers->size;
}

static tutti_status open_desk(const tu_backend_peers *peers) {
    const tu_cuda_map *areas = peers->areas->handle;
    if (areas->desk == NULL || atomic_load_explicit(&areas->desk->counts, memory_order_acquire) != NULL)
        return TUTTI_OK;
    size_t size = (size_t)peers->size, words = (size_t)peers->channels * size * (2 * size + 1);
    _Atomic uint32_t *made = calloc(words, sizeof *made), *none = NULL;
    if (made == NULL)
        return ((tu_cuda *)peers->state)->host->error(TUTTI_ERROR_MEMORY, "out of memory for signals");
    if (!atomic_compare_exchange_strong_explicit(&areas->desk->counts, &none, made, memory_order_acq_rel,
                                                 memory_order_acquire))
        free((void *)made); /* another rank was quicker */
    return TUTTI_OK;
}

static uint32_t count_launch(_Atomic uint32_t *count) { /* this rank alone writes it */
    uint32_t number = atomic_load_explicit(count, memory_order_relaxed) + 1;
    atomic_store_explicit(count, number, memory_order_release); /* pairs with tu_cuda_hold */
    return number;
}

/* What a launch of a signal or barrier waits for, of ranks that share the process. */
typedef struct company {
    const _Atomic uint32_t *count; /* of one partner, or of all members' barriers; NULL: nothing */
    uint32_t due;
    bool barrier;
    _Atomic uint32_t *mine; /* of a signal: the word that this rank counted in … */
    uint32_t number;        /* … and what it says since */
} company;

/* Counts a launch. The group's turn is taken. */
static company count_signal(const tu_backend_peers *peers, int kind, int peer, int channel) {
    const tu_cuda_map *areas = peers->areas->handle;
    if (kind >= TU_CUDA_SIGNAL_SET_WORD || areas->desk == NULL || (peer >= 0 && !areas->near[peer]))
        return (company){ .count = NULL };
    _Atomic uint32_t *counts = atomic_load_explicit(&areas->desk->counts, memory_order_acquire);
    if (kind == TU_CUDA_SIGNAL_BARRIER) {
        _Atomic uint32_t *barriers = barrier_counts(peers, counts, channel);
        return (company){ .count = barriers, .due = count_launch(barriers + peers->rank), .barrier = true };
    }
    if (kind == TU_CUDA_SIGNAL_PUT) { /* the slot is free when the signal before was taken */
        _Atomic uint32_t *count = signal_counts(peers, counts, channel, peers->rank, peer);
        uint32_t number = count_launch(count);
        return (company){ .count = count + 1, .due = number - 1, .mine = count, .number = number };
    }
    _Atomic uint32_t *count = signal_counts(peers, counts, channel, peer, peers->rank);
    uint32_t number = count_launch(count + 1);
    return (company){ .count = count, .due = number, .mine = count + 1, .number = number };
}

/* Goes on when the partners have launched what it waits for, or after TU_CUDA_HOLD_NS. The group's turn is taken, so
 * that no other thread of this rank launches meanwhile what would stand before the partners' kernels in a queue. */
static void keep_company(const tu_backend_peers *peers, company company, int64_t timeout_ns) {
    const tu_cuda_map *areas = peers->areas->handle;
    bool came = true;
    if (company.count != NULL && !company.barrier &&
        !tu_cuda_hold(peers->local, company.count, company.due, timeout_ns)) {
        /* The partner did not come: this launch no longer counts, or every later one would be held for it. */
        uint32_t number = company.number;
        atomic_compare_exchange_strong_explicit(company.mine, &number, number - 1, memory_order_relaxed,
                                                memory_order_relaxed);
    }
    for (int member = 0; company.barrier && came && member < peers->size; member++) { /* one who is late is enough */
        if (areas->near[member])
            came = tu_cuda_hold(peers->local, company.count + member, company.due, timeout_ns);
    }
}

/* The words that this rank counts in begin anew, as its area does. */
static void forget_launches(const tu_backend_peers *peers) {
    const tu_cuda_map *areas = peers->areas->handle;
    _Atomic uint32_t *counts =
        areas->desk != NULL ? atomic_load_explicit(&areas->desk->counts, memory_order_acquire) : NULL;
    for (int channel = 0; counts != NULL && channel < peers->channels; channel++) {
        atomic_store_explicit(barrier_counts(peers, counts, channel) + peers->rank, 0, memory_order_release);
        for (int peer = 0; peer < peers->size; peer++) {
            atomic_store_explicit(signal_counts(peers, counts, channel, peers->rank, peer), 0, memory_order_release);
            atomic_store_explicit(signal_counts(peers, counts, channel, peer, peers->rank) + 1, 0,
                                  memory_order_release);
        }
    }
}

/* ---- the life of a (block, group) ---- */

/* The group on this device, so that nothing has to be allocated by a signal, and a stream may capture it. */
static tutti_status attach(tu_backend_peers *peers) {
    tu_cuda_group *group;
    tutti_status status = tu_cuda_group_get(peers->state, peers->group, peers->device_index, &group);
    if (status == TUTTI_OK)
        status = open_desk(peers);
    peers->local = status == TUTTI_OK ? group : NULL;
    return status;
}

static void detach(tu_backend_peers *peers) {
    peers->local = NULL; /* it lives as long as the group */
}

static void reset(const tu_backend_peers *peers) {
    tu_cuda *cuda = peers->state;
    tu_backend_block area = { .address = peers->areas->addresses[peers->rank],
                              .bytes = area_bytes(peers->size, peers->channels),
                              .device_index = peers->device_index };
    forget_launches(peers);
    if (tu_cuda_clear(cuda, &area, 0, area.bytes) != TUTTI_OK)
        cuda->host->log(cuda->world, TUTTI_LOG_WARN, "cuda", "the signals of a block could not be reset");
}

static tu_cuda_signal_args arguments(const tu_backend_peers *peers, int kind, int peer, int channel, int64_t timeout_ns,
                                     const char *name) {
    tu_cuda *cuda = peers->state;
    tu_cuda_signal_args args = { .rank = peers->rank,
                                 .size = peers->size,
                                 .channel = channel,
                                 .channels = peers->channels,
                                 .peer = peer,
                                 .kind = kind,
                                 .timeout_ns = (uint64_t)timeout_ns,
                                 .operation = cuda->host->operation_find(name) };
    args.multicast = (uint64_t)(uintptr_t)peers->areas->multicast;
    tu_cuda_map_plan(peers->areas, &args.areas, &args.stride);
    args.local = (uint64_t)(uintptr_t)peers->areas->addresses[peers->rank] + shared_bytes(peers->size, peers->channels);
    return args;
}

/* A barrier is one addition where the areas have a multicast address, or where the processors stand in for it. */
static tu_cuda_kernel kernel_of(const tu_backend_peers *peers, int kind) {
    const tu_cuda_group *group = peers->local;
    if (kind != TU_CUDA_SIGNAL_BARRIER || (peers->areas->multicast == NULL && !group->software))
        return TU_CUDA_SIGNAL;
    return peers->areas->multicast != NULL ? TU_CUDA_MULTIMEM_BARRIER_SWITCH : TU_CUDA_MULTIMEM_BARRIER_MEMBERS;
}

/* A number of the pad, with what it is set to or waited for. */
typedef struct number {
    uint64_t address, value;
} number;

/* The kernels of signals and barriers. */
typedef struct own_kernel {
    const tu_backend_peers *peers;
    tu_cuda_signal_args args;
    tu_cuda_kernel kernel;
    unsigned threads;
    CUstream stream;
} own_kernel;

static tutti_status start_own(void *context, const tu_backend_kernel *kernel, unsigned *blocks) {
    own_kernel *own = context;
    tu_cuda *cuda = own->peers->state;
    own->args.group = (tu_cuda_group_words){ kernel->words, kernel->report, kernel->place };
    *blocks = 1;
    return tu_cuda_launch(cuda, &cuda->devices[own->peers->device_index], own->kernel, 1, own->threads, &own->args,
                          own->stream, TU_CUDA_APART);
}

/* Whole processors for each rank on the device, also for those whose kernels are another group's. */
static int processors_each(const tu_backend_peers *peers) {
    tu_cuda *cuda = peers->state;
    int sharing = ((const tu_cuda_map *)peers->areas->handle)->sharing,
        of_host = (cuda->host->local_size(cuda->world) + cuda->device_count - 1) / cuda->device_count;
    return cuda->devices[peers->device_index].processors / (sharing > of_host ? sharing : of_host);
}

/* In the order of the group's kernels. */
static tutti_status launch_in_order(const tu_backend_peers *peers, int kind, int peer, int channel,
                                    tu_backend_kernel kernel, tu_backend_start *start, void *context,
                                    const tu_backend_call *call) {
    tu_cuda *cuda = peers->state;
    tu_cuda_order order;
    company company = { .count = NULL };
    unsigned blocks = 0;
    tu_cuda_watch(cuda); /* before anything waits */
    tutti_status status = tu_cuda_order_begin(peers->local, call->stream, tu_cuda_capture(cuda, call->stream),
                                              (int64_t)kernel.timeout_ns, kernel.operation, 0, &order);
    if (status != TUTTI_OK)
        return status;
    kernel.words = order.words.words;
    kernel.report = order.words.report;
    kernel.place = order.words.place;
    kernel.overlaps = !order.joined;
    status = start(context, &kernel, &blocks);
    if (status == TUTTI_OK && order.capture == 0)
        company = count_signal(peers, kind, peer, channel);
    keep_company(peers, company, (int64_t)kernel.timeout_ns);
    tu_cuda_order_end(&order, status == TUTTI_OK ? blocks : 0);
    return status;
}

static tutti_status launch(const tu_backend_peers *peers, int kind, int peer, int channel, number number,
                           const tu_backend_call *call, const char *name) {
    tu_cuda *cuda = peers->state;
    tutti_status status = tu_cuda_group_check(peers->local);
    if (status != TUTTI_OK)
        return status;
    int64_t timeout_ns = cuda->host->timeout(peers->group, call->timeout_ns);
    unsigned threads = (unsigned)(peers->size + 31) / 32 * 32;
    own_kernel own = { .peers = peers,
                       .args = arguments(peers, kind, peer, channel, timeout_ns, name),
                       .kernel = kernel_of(peers, kind),
                       .stream = call->stream };
    own.args.word = number.address;
    own.args.value = number.value;
    own.threads = kind != TU_CUDA_SIGNAL_BARRIER || own.kernel != TU_CUDA_SIGNAL ? 1 : threads > 512 ? 512 : threads;
    tu_backend_kernel kernel = { .timeout_ns = (uint64_t)timeout_ns, .operation = own.args.operation };
    return launch_in_order(peers, kind, peer, channel, kernel, start_own, &own, call);
}

/* A kernel of somebody else's is a meeting like a barrier of the first channel. */
static tutti_status run(const tu_backend_peers *peers, const char *operation, tu_backend_start *start, void *context,
                        const tu_backend_call *call) {
    tu_cuda *cuda = peers->state;
    tutti_status status = tu_cuda_group_check(peers->local);
    if (status != TUTTI_OK)
        return status;
    tu_backend_kernel kernel = { .timeout_ns = (uint64_t)cuda->host->timeout(peers->group, call->timeout_ns),
                                 .operation = cuda->host->operation_find(operation),
                                 .blocks = processors_each(peers) };
    return launch_in_order(peers, TU_CUDA_SIGNAL_BARRIER, -1, 0, kernel, start, context, call);
}

static tutti_status put_signal(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call) {
    return launch(peers, TU_CUDA_SIGNAL_PUT, to, channel, (number){ 0 }, call, "peers_signal");
}

static tutti_status wait_signal(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call) {
    return launch(peers, TU_CUDA_SIGNAL_WAIT, from, channel, (number){ 0 }, call, "peers_wait_signal");
}

static tutti_status barrier(const tu_backend_peers *peers, int channel, const tu_backend_call *call) {
    return launch(peers, TU_CUDA_SIGNAL_BARRIER, -1, channel, (number){ 0 }, call, "peers_barrier");
}

/* The address of a member's block as kernels here reach it. */
static uint64_t block_of(const tu_backend_peers *peers, int member) {
    uint64_t base, stride;
    tu_cuda_map_plan(peers->blocks, &base, &stride);
    return base + (uint64_t)member * stride;
}

static tutti_status set_word(const tu_backend_peers *peers, int to, size_t offset, uint64_t value,
                             const tu_backend_call *call) {
    number number = { block_of(peers, to) + offset, value };
    return launch(peers, TU_CUDA_SIGNAL_SET_WORD, to, 0, number, call, "peers_signal");
}

static tutti_status wait_word(const tu_backend_peers *peers, size_t offset, bool equal, uint64_t value,
                              const tu_backend_call *call) {
    number number = { block_of(peers, peers->rank) + offset, value };
    int kind = equal ? TU_CUDA_SIGNAL_AWAIT_EQUAL : TU_CUDA_SIGNAL_AWAIT_LEAST;
    return launch(peers, kind, -1, 0, number, call, "peers_wait_signal");
}

/* A kernel on the backend's own stream looks, takes, and answers; the host waits for it. Not ordered with streams: a
 * test waits for nothing. */
static tutti_status test_signal(const tu_backend_peers *peers, int from, int channel, bool *arrived) {
    tu_cuda *cuda = peers->state;
    tu_cuda_device *device = &cuda->devices[peers->device_index];
    const tu_cuda_group *group = peers->local;
    tu_cuda_signal_args args = arguments(peers, TU_CUDA_SIGNAL_TEST, from, channel, 0, "peers_wait_signal");
    args.group = (tu_cuda_group_words){ .words = group->words, .report = group->report };
    args.answer = device->answer_here;
    tutti_status status = tu_cuda_enter(cuda, device);
    if (status != TUTTI_OK)
        return status;
    pthread_mutex_lock(&device->answer_lock);
    status = tu_cuda_launch(cuda, device, TU_CUDA_SIGNAL, 1, 1, &args, device->stream, TU_CUDA_APART);
    CUresult result = status == TUTTI_OK ? cuda->driver.cuStreamSynchronize(device->stream) : CUDA_SUCCESS;
    *arrived = status == TUTTI_OK && __atomic_load_n((uint32_t *)device->answer, __ATOMIC_ACQUIRE) != 0;
    pthread_mutex_unlock(&device->answer_lock);
    tu_cuda_leave(cuda);
    if (result != CUDA_SUCCESS)
        return tu_cuda_error(cuda, result, "testing for a signal");
    if (!*arrived)
        return status;
    tu_cuda_group *on = peers->local; /* the signal is taken: that counts as a wait */
    status = tu_cuda_turn_take(cuda, &on->turn, cuda->host->timeout(peers->group, 0));
    if (status == TUTTI_OK) {
        (void)count_signal(peers, TU_CUDA_SIGNAL_TEST, from, channel);
        tu_cuda_turn_give(&on->turn);
    }
    return status;
}

const tu_backend_remote tu_cuda_remote = {
    .size = sizeof(tu_backend_remote),
    .area_bytes = area_bytes,
    .attach = attach,
    .detach = detach,
    .reset = reset,
    .put = tu_cuda_put,
    .get = tu_cuda_get,
    .signal = put_signal,
    .wait_signal = wait_signal,
    .test_signal = test_signal,
    .barrier = barrier,
    .set_word = set_word,
    .wait_word = wait_word,
    .run = run,
};
