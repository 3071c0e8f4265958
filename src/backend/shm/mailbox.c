/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals and barriers on shared memory. models/mailbox.pml is this file as a Spin model.
 *
 * Every member has an area, which all members map:
 *
 *     sent[sender][channel]    counts signals to the area's owner; written by that sender alone
 *     taken[sender][channel]   counts those that the owner took; written by the owner alone
 *     arrived[channel]         counts the owner's barriers; written by the owner alone
 *
 * A mailbox holds a signal while sent and taken differ: then they differ by one, so a byte each is enough. Rows are
 * padded, so that no two writers share a cache line.
 *
 * "Alone" means one rank. Threads of a rank take turns (turn.h), one for what it sends and one for what it takes; a
 * turn is a load or two and a store, and while only one thread signals it costs no locked instruction.
 *
 * Budget of a signal, a taken signal and a barrier that need not wait long: no system call, no shared lock, no clock,
 * no entry in the recorder; those come with the slow path, after about a microsecond.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "backend/shm/shm.h"
#include "backend/shm/turn.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/round.h"
#include "base/wait.h"
#include "job/job.h"
#include "job/liveness.h"
#include "job/recorder.h"
#include "world/fault.h"
#include "world/world.h"

#define LINE 128
#define QUICK_SPINS 64 /* looks before the slow path; less where ranks share cores */

/* Of this rank, in its own memory. */
typedef struct mailbox_local {
    size_t row_bytes; /* of one row of bytes */
    size_t taken_offset, arrived_offset;
    const _Atomic uint32_t *sleepers;
    uint32_t quick_spins;
    _Atomic uint8_t *resume; /* by channel: an interrupted barrier has been announced and goes on with the next call */
    _Alignas(LINE) tu_turn sending;  /* guards sent[own rank] in all areas */
    _Alignas(LINE) tu_turn taking;   /* guards taken and arrived in the own area */
    _Alignas(LINE) tu_bell *bells[]; /* of the members */
} mailbox_local;

static size_t whole_lines(size_t bytes) {
    return tu_round_up(bytes, LINE);
}

size_t tu_shm_area_bytes(int size, int channels) {
    return 2 * (size_t)size * whole_lines((size_t)channels) + whole_lines(4 * (size_t)channels);
}

tutti_status tu_shm_attach(tu_backend_peers *peers) {
    size_t size = (size_t)peers->size, channels = (size_t)peers->channels;
    size_t bytes = whole_lines(sizeof(mailbox_local) + size * sizeof(tu_bell *)) + whole_lines(channels);
    mailbox_local *local = aligned_alloc(LINE, bytes);
    if (local == NULL)
        return tu_error_memory("signals of a block", bytes);
    memset(local, 0, bytes);
    local->row_bytes = whole_lines(channels);
    local->taken_offset = size * local->row_bytes;
    local->arrived_offset = 2 * local->taken_offset;
    local->resume = (_Atomic uint8_t *)local + bytes - whole_lines(channels);
    tu_turn_init(&local->sending);
    tu_turn_init(&local->taking);
    const tutti_group *group = peers->group;
    tu_job *job = group->world->job;
    if (job != NULL) {
        tu_wait wait;
        tu_job_wait_init(job, 0, &wait);
        local->quick_spins = wait.spins > QUICK_SPINS ? QUICK_SPINS : wait.spins;
        local->sleepers = tu_job_sleepers(job);
        for (int member = 0; member < peers->size; member++)
            local->bells[member] = tu_job_bell(job, group->job_ranks[member]);
    }
    peers->local = local;
    return TUTTI_OK;
}

void tu_shm_detach(tu_backend_peers *peers) {
    free(peers->local);
    peers->local = NULL;
}

void tu_shm_reset(const tu_backend_peers *peers) {
    const mailbox_local *local = peers->local;
    memset(peers->areas->addresses[peers->rank], 0, tu_shm_area_bytes(peers->size, peers->channels));
    memset((void *)local->resume, 0, (size_t)peers->channels);
}

static _Atomic uint8_t *sent_word(const tu_backend_peers *peers, int receiver, int sender, int channel) {
    const mailbox_local *local = peers->local;
    return (_Atomic uint8_t *)peers->areas->addresses[receiver] + (size_t)sender * local->row_bytes + (size_t)channel;
}

static _Atomic uint8_t *taken_word(const tu_backend_peers *peers, int receiver, int sender, int channel) {
    const mailbox_local *local = peers->local;
    return sent_word(peers, receiver, sender, channel) + local->taken_offset;
}

static _Atomic uint32_t *arrived_word(const tu_backend_peers *peers, int member, int channel) {
    const mailbox_local *local = peers->local;
    return (_Atomic uint32_t *)((char *)peers->areas->addresses[member] + local->arrived_offset) + channel;
}

static void ring(const tu_backend_peers *peers, int member) {
    const mailbox_local *local = peers->local;
    tu_bell_ring(local->sleepers, local->bells[member]);
}

/* ---- the slow path: a wait with a deadline, in the flight recorder ---- */

typedef struct slow_wait {
    const tu_backend_peers *peers;
    int other; /* group rank */
    int channel;
    uint32_t epoch;               /* of a barrier */
    int next;                     /* of a barrier: all members below have arrived */
    const _Atomic uint64_t *word; /* of the pad: NULL: none is awaited */
    uint64_t value;
    bool equal;
} slow_wait;

static bool missing_other(void *argument, int member) {
    return member == ((const slow_wait *)argument)->other;
}

/* Waits until ready() is true, which only looks, and then does act(), unless that is NULL; when another thread of this
 * rank was quicker, waits on. */
static tutti_status wait_slowly(slow_wait *state, tu_operation operation, const tu_backend_call *call,
                                bool (*ready)(void *), bool (*act)(void *), bool (*missing)(void *, int)) {
    tutti_group *group = state->peers->group;
    tutti_world *world = group->world;
    tu_operation_info info = { .operation = (uint8_t)operation, .root = state->other, .tag = state->channel };
    tutti_status status =
        tu_timeout_choose(NULL, call->timeout_ns, group->timeout_ns, world->timeout_ns, &info.timeout_ns);
    if (status != TUTTI_OK)
        return status;
    info.group_key = group->key;
    info.group_index = group->recorder_index;
    info.sequence = atomic_fetch_add_explicit(&group->messages, 1, memory_order_relaxed) + 1;
    uint64_t ticket = tu_record_begin(tu_job_recorder(world->job, world->local_rank), &info);
    tu_group_wait wait;
    tu_group_wait_init(&wait, group, &info, ticket, tu_deadline(info.timeout_ns), missing, state);
    do
        status = tu_wait_until(&wait.wait, ready, state);
    while (status == TUTTI_OK && act != NULL && !act(state));
    if (status != TUTTI_OK) {
        status = tu_group_wait_error(&wait, status);
        if (status == TUTTI_ERROR_TIMEOUT && state->word == NULL)
            tu_error_append(" (channel %d)", state->channel);
        else if (status == TUTTI_ERROR_TIMEOUT)
            tu_error_append(" (for a word of the signal pad to be %s%llu; it is %llu)", state->equal ? "" : "at least ",
                            (unsigned long long)state->value,
                            (unsigned long long)atomic_load_explicit(state->word, memory_order_relaxed));
    }
    return tu_group_leave(group, &info, ticket, status);
}

/* Faults that a test asks for; nothing else. */
static tutti_status meet_faults(const tu_backend_peers *peers, tu_operation operation) {
    tutti_group *group = peers->group;
    if (__builtin_expect(group->world->faults == NULL, 1))
        return TUTTI_OK;
    tu_operation_info info = {
        .operation = (uint8_t)operation, .root = -1, .group_key = group->key, .group_index = group->recorder_index
    };
    return tu_fault_meet(group, &info);
}

/* ---- signals ---- */

static bool is_empty(void *argument) {
    const slow_wait *state = argument;
    const tu_backend_peers *peers = state->peers;
    return atomic_load_explicit(sent_word(peers, state->other, peers->rank, state->channel), memory_order_relaxed) ==
           atomic_load_explicit(taken_word(peers, state->other, peers->rank, state->channel), memory_order_relaxed);
}

static bool is_full(void *argument) {
    const slow_wait *state = argument;
    const tu_backend_peers *peers = state->peers;
    return atomic_load_explicit(sent_word(peers, peers->rank, state->other, state->channel), memory_order_relaxed) !=
           atomic_load_explicit(taken_word(peers, peers->rank, state->other, state->channel), memory_order_relaxed);
}

static bool try_send(void *argument) {
    const slow_wait *state = argument;
    const tu_backend_peers *peers = state->peers;
    mailbox_local *local = peers->local;
    _Atomic uint8_t *sent = sent_word(peers, state->other, peers->rank, state->channel);
    _Atomic uint8_t *taken = taken_word(peers, state->other, peers->rank, state->channel);
    bool owned = tu_turn_enter(&local->sending);
    uint8_t count = atomic_load_explicit(sent, memory_order_relaxed); /* own word */
    /* Acquire pairs with the release in try_take: what the receiver did before it took the last signal is over. */
    bool empty = atomic_load_explicit(taken, memory_order_acquire) == count;
    if (empty)
        atomic_store_explicit(sent, (uint8_t)(count + 1),
                              memory_order_release); /* pairs with the acquire in try_take */
    tu_turn_leave(&local->sending, owned);
    if (empty)
        ring(peers, state->other);
    return empty;
}

static bool try_take(void *argument) {
    const slow_wait *state = argument;
    const tu_backend_peers *peers = state->peers;
    mailbox_local *local = peers->local;
    _Atomic uint8_t *sent = sent_word(peers, peers->rank, state->other, state->channel);
    _Atomic uint8_t *taken = taken_word(peers, peers->rank, state->other, state->channel);
    if (!is_full(argument)) /* a look without the lock first: spinning threads of a rank do not disturb each other */
        return false;
    bool owned = tu_turn_enter(&local->taking);
    uint8_t count = atomic_load_explicit(taken, memory_order_relaxed);     /* own word */
    bool full = atomic_load_explicit(sent, memory_order_acquire) != count; /* pairs with the release in try_send */
    if (full)
        atomic_store_explicit(taken, (uint8_t)(count + 1),
                              memory_order_release); /* pairs with the acquire in try_send */
    tu_turn_leave(&local->taking, owned);
    if (full)
        ring(peers, state->other); /* it may wait for an empty mailbox */
    return full;
}

static bool try_quickly(const tu_backend_peers *peers, bool (*ready)(void *), slow_wait *state) {
    const mailbox_local *local = peers->local;
    for (uint32_t i = 0; i <= local->quick_spins; i++) {
        if (ready(state))
            return true;
        tu_pause();
    }
    return false;
}

tutti_status tu_shm_signal(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call) {
    slow_wait state = { .peers = peers, .other = to, .channel = channel };
    tutti_status status = meet_faults(peers, TU_OPERATION_PEERS_SIGNAL);
    if (status != TUTTI_OK || try_quickly(peers, try_send, &state))
        return tu_not_entered(status);
    return wait_slowly(&state, TU_OPERATION_PEERS_SIGNAL, call, is_empty, try_send, missing_other);
}

tutti_status tu_shm_wait_signal(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call) {
    slow_wait state = { .peers = peers, .other = from, .channel = channel };
    tutti_status status = meet_faults(peers, TU_OPERATION_PEERS_WAIT_SIGNAL);
    if (status != TUTTI_OK || try_quickly(peers, try_take, &state))
        return tu_not_entered(status);
    return wait_slowly(&state, TU_OPERATION_PEERS_WAIT_SIGNAL, call, is_full, try_take, missing_other);
}

tutti_status tu_shm_test_signal(const tu_backend_peers *peers, int from, int channel, bool *arrived) {
    slow_wait state = { .peers = peers, .other = from, .channel = channel };
    *arrived = try_take(&state);
    /* A program that only tests has nobody else to look who lives, so it looks itself. */
    if (*arrived || peers->group->world->job == NULL || tu_group_look(peers->group, NULL) == TUTTI_OK)
        return TUTTI_OK;
    *arrived = try_take(&state); /* the last thing that the sender did */
    return *arrived ? TUTTI_OK : tu_group_cause(peers->group);
}

/* ---- words of the pad ---- */

tutti_status tu_shm_set_word(const tu_backend_peers *peers, int to, size_t offset, uint64_t value,
                             const tu_backend_call *call) {
    (void)call;
    tutti_status status = meet_faults(peers, TU_OPERATION_PEERS_SIGNAL);
    if (status != TUTTI_OK)
        return tu_not_entered(status);
    _Atomic uint64_t *word = (_Atomic uint64_t *)((char *)peers->blocks->addresses[to] + offset);
    atomic_store_explicit(word, value, memory_order_release); /* pairs with the acquire in has_value */
    ring(peers, to);
    return TUTTI_OK;
}

static bool has_value(void *argument) {
    const slow_wait *state = argument;
    uint64_t value = atomic_load_explicit(state->word, memory_order_acquire); /* pairs with tu_shm_set_word */
    return state->equal ? value == state->value : value >= state->value;
}

/* Anybody may be the one that sets it. */
static bool missing_setter(void *argument, int member) {
    return member != ((const slow_wait *)argument)->peers->rank;
}

tutti_status tu_shm_wait_word(const tu_backend_peers *peers, size_t offset, bool equal, uint64_t value,
                              const tu_backend_call *call) {
    slow_wait state = { .peers = peers,
                        .other = -1,
                        .word = (const _Atomic uint64_t *)((char *)peers->blocks->addresses[peers->rank] + offset),
                        .value = value,
                        .equal = equal };
    tutti_status status = meet_faults(peers, TU_OPERATION_PEERS_WAIT_SIGNAL);
    if (status != TUTTI_OK || try_quickly(peers, has_value, &state))
        return tu_not_entered(status);
    return wait_slowly(&state, TU_OPERATION_PEERS_WAIT_SIGNAL, call, has_value, NULL, missing_setter);
}

/* ---- barrier ---- */

static bool has_arrived(const slow_wait *state, int member) {
    /* Pairs with the release in announce. Signed distance, so that the count may wrap. */
    uint32_t count = atomic_load_explicit(arrived_word(state->peers, member, state->channel), memory_order_acquire);
    return (int32_t)(count - state->epoch) >= 0;
}

static bool all_arrived(void *argument) {
    slow_wait *state = argument;
    while (state->next < state->peers->size && has_arrived(state, state->next))
        state->next++;
    return state->next == state->peers->size;
}

static bool missing_arrival(void *argument, int member) {
    return !has_arrived(argument, member);
}

/* Counts this rank's arrival, unless an interrupted barrier did so already. */
static uint32_t announce(const tu_backend_peers *peers, int channel) {
    mailbox_local *local = peers->local;
    _Atomic uint32_t *word = arrived_word(peers, peers->rank, channel);
    bool owned = tu_turn_enter(&local->taking);
    uint32_t epoch = atomic_load_explicit(word, memory_order_relaxed); /* own word */
    if (atomic_load_explicit(&local->resume[channel], memory_order_relaxed) != 0) {
        atomic_store_explicit(&local->resume[channel], 0, memory_order_relaxed);
    } else {
        epoch++;
        atomic_store_explicit(word, epoch, memory_order_release); /* pairs with the acquire in has_arrived */
    }
    tu_turn_leave(&local->taking, owned);
    return epoch;
}

static void resume_later(const tu_backend_peers *peers, int channel) {
    mailbox_local *local = peers->local;
    bool owned = tu_turn_enter(&local->taking);
    atomic_store_explicit(&local->resume[channel], 1, memory_order_relaxed);
    tu_turn_leave(&local->taking, owned);
}

tutti_status tu_shm_barrier(const tu_backend_peers *peers, int channel, const tu_backend_call *call) {
    tutti_status status = meet_faults(peers, TU_OPERATION_PEERS_BARRIER);
    if (status != TUTTI_OK)
        return tu_not_entered(status);
    slow_wait state = { .peers = peers, .other = -1, .channel = channel };
    state.epoch = announce(peers, channel);
    for (int member = 0; member < peers->size; member++) {
        if (member != peers->rank)
            ring(peers, member);
    }
    if (try_quickly(peers, all_arrived, &state))
        return TUTTI_OK;
    status = wait_slowly(&state, TU_OPERATION_PEERS_BARRIER, call, all_arrived, NULL, missing_arrival);
    if (status == TUTTI_ERROR_INTERRUPTED)
        resume_later(peers, channel);
    return status;
}
