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
 * Of a member on another host there is a copy of its area here, and of its rows here in this rank's: whoever writes a
 * word that the other reads also tells it the new value (tu_network_tell), and the network writes it into the copy
 * there. So everybody looks at memory of its own host, and the words mean the same.
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
#include "memory/network.h"
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
    tu_network_group *network; /* NULL: all members are on this host */
    tu_network_window window;  /* what those on other hosts may use */
    unsigned char *copies;     /* of their areas */
    _Atomic uint32_t tests;    /* of signals that were not there */
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

/* On another host. */
static bool is_far(const tu_backend_peers *peers, int member) {
    return peers->group->job_ranks[member] < 0 && !peers->group->world->fake;
}

/* What a member is told about a word; numbers are never used again. */
typedef enum told_what {
    TOLD_SENT = 1, /* the teller's count of signals to this rank */
    TOLD_TAKEN,    /* how many of this rank's it has taken */
    TOLD_ARRIVED   /* its barriers */
} told_what;

static void told(void *argument, int member, uint32_t what, uint32_t channel, uint32_t value);

/* Copies of the areas of those on other hosts, and a window for what they send. */
static tutti_status attach_hosts(tu_backend_peers *peers) {
    mailbox_local *local = peers->local;
    size_t bytes = tu_shm_area_bytes(peers->size, peers->channels), count = 0;
    tutti_status status = tu_network_group_get(peers->group, &local->network);
    if (status != TUTTI_OK)
        return status;
    for (int member = 0; member < peers->size; member++)
        count += is_far(peers, member);
    local->copies = aligned_alloc(LINE, count * bytes);
    if (local->copies == NULL)
        return tu_error_memory("signals of a block", count * bytes);
    memset(local->copies, 0, count * bytes);
    count = 0;
    for (int member = 0; member < peers->size; member++)
        if (is_far(peers, member))
            peers->areas->addresses[member] = local->copies + count++ * bytes;
    local->window = (tu_network_window){ .number = peers->meeting,
                                         .data = peers->blocks->addresses[peers->rank],
                                         .bytes = peers->bytes,
                                         .words_offset = peers->pad_offset,
                                         .words_bytes = peers->pad_bytes,
                                         .told = told,
                                         .argument = peers };
    tu_network_window_open(local->network, &local->window);
    return TUTTI_OK;
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
            if (group->job_ranks[member] >= 0)
                local->bells[member] = tu_job_bell(job, group->job_ranks[member]);
    }
    peers->local = local;
    tutti_status status = job != NULL && !group->local ? attach_hosts(peers) : TUTTI_OK;
    if (status != TUTTI_OK) {
        free(local);
        peers->local = NULL;
    }
    return status;
}

void tu_shm_detach(tu_backend_peers *peers) {
    mailbox_local *local = peers->local;
    if (local->network != NULL)
        tu_network_window_close(&local->window);
    tu_network_share_end(peers->share);
    peers->share = NULL;
    free(local->copies);
    free(local);
    peers->local = NULL;
}

void tu_shm_reset(const tu_backend_peers *peers) {
    mailbox_local *local = peers->local;
    size_t bytes = tu_shm_area_bytes(peers->size, peers->channels);
    if (local->network != NULL) /* what was on its way does not arrive any more */
        tu_network_window_close(&local->window);
    for (int member = 0; member < peers->size && local->network != NULL; member++)
        if (is_far(peers, member))
            memset(peers->areas->addresses[member], 0, bytes);
    memset(peers->areas->addresses[peers->rank], 0, bytes);
    memset((void *)local->resume, 0, (size_t)peers->channels);
    if (local->network != NULL)
        tu_network_window_renew(local->network, &local->window);
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

/* A member on another host says that a word of its has a new value: its copy here gets it. The network wakes who waits.
 */
static void told(void *argument, int member, uint32_t what, uint32_t channel, uint32_t value) {
    const tu_backend_peers *peers = argument;
    if (channel >= (uint32_t)peers->channels)
        return;
    /* Each pairs with the acquire of whoever reads the word. */
    if (what == TOLD_SENT)
        atomic_store_explicit(sent_word(peers, peers->rank, member, (int)channel), (uint8_t)value,
                              memory_order_release);
    else if (what == TOLD_TAKEN)
        atomic_store_explicit(taken_word(peers, member, peers->rank, (int)channel), (uint8_t)value,
                              memory_order_release);
    else if (what == TOLD_ARRIVED && (int32_t)(value - atomic_load_explicit(arrived_word(peers, member, (int)channel),
                                                                            memory_order_relaxed)) > 0)
        /* Forward only: of two threads in a barrier each, the later one's word may come first. */
        atomic_store_explicit(arrived_word(peers, member, (int)channel), value, memory_order_release);
}

/* Lets a member know of a word's new value: by its bell, or by telling it. */
static void tell(const tu_backend_peers *peers, int member, told_what what, int channel, uint32_t value) {
    const mailbox_local *local = peers->local;
    if (local->network != NULL && is_far(peers, member))
        tu_network_tell(local->network, member, local->window.number, (uint32_t)what, (uint32_t)channel, value);
    else
        ring(peers, member);
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
    bool (*ready)(void *); /* of a wait across hosts: what it waits for, */
    bool (*missing)(void *, int);
    tutti_status (*look_at_members)(void *); /* and what the wait of a group looks at */
    const void *from;                        /* of a put: what is left; of a word only the last two */
    uint64_t offset;
    size_t bytes;
    tu_network_fetch *gets; /* of a get: those under way */
    int get_count;
    tu_network_transfer *transfer; /* of a put or get by key */
    uint64_t mark;                 /* of a wait for what was put before: see tu_network_fenced */
} slow_wait;

/* ---- waiting while others are on other hosts: whoever waits drives the network ---- */

static tu_network_group *network_of(const slow_wait *state) {
    return ((const mailbox_local *)state->peers->local)->network;
}

static bool ready_far(void *argument) {
    slow_wait *state = argument;
    tu_network_poll(network_of(state));
    return state->ready(state);
}

static bool missing_far(void *argument, int member) {
    slow_wait *state = argument;
    return state->missing(state, member);
}

static tutti_status look_far(void *argument) {
    const tu_group_wait *wait = argument;
    const slow_wait *state = wait->argument;
    return tu_network_look(network_of(state), wait, state->look_at_members(argument));
}

static void sleeping_far(void *argument, bool begins) {
    const tu_group_wait *wait = argument;
    (begins ? tu_network_rest : tu_network_enter)(network_of(wait->argument));
}

static tutti_status wait_far(tu_group_wait *wait, slow_wait *state) {
    state->look_at_members = wait->wait.check;
    wait->wait.check = look_far;
    wait->wait.sleeping = sleeping_far;
    wait->wait.spins /= 8; /* a look at the network takes a while */
    tu_network_enter(network_of(state));
    tutti_status status = tu_wait_until(&wait->wait, ready_far, state);
    tu_network_leave(network_of(state));
    return status;
}

static bool never(void *argument) {
    (void)argument;
    return false;
}

static bool missing_other(void *argument, int member) {
    return member == ((const slow_wait *)argument)->other;
}

/* Anybody may be the one that sets a word, or is late. */
static bool missing_setter(void *argument, int member) {
    return member != ((const slow_wait *)argument)->peers->rank;
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
    state->ready = ready;
    state->missing = missing;
    tu_group_wait_init(&wait, group, &info, ticket, tu_deadline(info.timeout_ns), missing_far, state);
    const tu_group_wait as_made = wait;
    do {
        wait = as_made;
        wait.wait.argument = &wait;
        status = network_of(state) != NULL ? wait_far(&wait, state) : tu_wait_until(&wait.wait, ready, state);
    } while (status == TUTTI_OK && act != NULL && !act(state));
    if (status != TUTTI_OK) {
        status = tu_group_wait_error(&wait, status);
        if (status == TUTTI_ERROR_TIMEOUT && state->word == NULL && state->channel >= 0 && state->other >= 0)
            tu_error_append(". It waited for rank %d on channel %d", state->other, state->channel);
        else if (status == TUTTI_ERROR_TIMEOUT && state->word == NULL && state->channel >= 0)
            tu_error_append(". It waited on channel %d", state->channel);
        else if (status == TUTTI_ERROR_TIMEOUT && state->word != NULL)
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
        tell(peers, state->other, TOLD_SENT, state->channel, (uint8_t)(count + 1));
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
    if (full) /* it may wait for an empty mailbox */
        tell(peers, state->other, TOLD_TAKEN, state->channel, (uint8_t)(count + 1));
    return full;
}

static bool try_quickly(const tu_backend_peers *peers, bool (*ready)(void *), slow_wait *state) {
    const mailbox_local *local = peers->local;
    for (uint32_t i = 0; i <= local->quick_spins; i++) {
        if (local->network != NULL)
            tu_network_poll(local->network);
        if (ready(state))
            return true;
        tu_pause();
    }
    return false;
}

/* ---- order: what was put to other hosts has arrived ---- */

static bool is_fenced(void *argument) {
    slow_wait *state = argument;
    const mailbox_local *local = state->peers->local;
    return local->network == NULL || tu_network_fenced(local->network, state->other, &state->mark);
}

static bool missing_answer(void *argument, int member) {
    const slow_wait *state = argument;
    return tu_network_unfenced(network_of(state), member, member == state->other);
}

/* Before this rank says or takes anything that others may rely on: what it put to members other than `but` is there. */
static tutti_status fence(const tu_backend_peers *peers, int but, tu_operation operation, const tu_backend_call *call) {
    const mailbox_local *local = peers->local;
    slow_wait state = { .peers = peers, .other = but, .channel = -1 };
    if (__builtin_expect(local->network == NULL, 1) || try_quickly(peers, is_fenced, &state))
        return TUTTI_OK;
    return wait_slowly(&state, operation, call, is_fenced, NULL, missing_answer);
}

tutti_status tu_shm_signal(const tu_backend_peers *peers, int to, int channel, const tu_backend_call *call) {
    slow_wait state = { .peers = peers, .other = to, .channel = channel };
    tutti_status status = meet_faults(peers, TU_OPERATION_PEERS_SIGNAL);
    if (status == TUTTI_OK)
        status = fence(peers, to, TU_OPERATION_PEERS_SIGNAL, call);
    if (status != TUTTI_OK || try_quickly(peers, try_send, &state))
        return tu_not_entered(status);
    return wait_slowly(&state, TU_OPERATION_PEERS_SIGNAL, call, is_empty, try_send, missing_other);
}

tutti_status tu_shm_wait_signal(const tu_backend_peers *peers, int from, int channel, const tu_backend_call *call) {
    slow_wait state = { .peers = peers, .other = from, .channel = channel };
    tutti_status status = meet_faults(peers, TU_OPERATION_PEERS_WAIT_SIGNAL);
    if (status == TUTTI_OK)
        status = fence(peers, from, TU_OPERATION_PEERS_WAIT_SIGNAL, call);
    if (status != TUTTI_OK || try_quickly(peers, try_take, &state))
        return tu_not_entered(status);
    return wait_slowly(&state, TU_OPERATION_PEERS_WAIT_SIGNAL, call, is_full, try_take, missing_other);
}

#define LOOK_AT_HOSTS 256 /* tests between two looks at the connections: one takes a lock per member */

/* Whether the group lives, for whoever only tests. */
static tutti_status look_at_group(slow_wait *state) {
    tutti_group *group = state->peers->group;
    mailbox_local *local = state->peers->local;
    tutti_status status = tu_group_look(group, NULL);
    if (status != TUTTI_OK || local->network == NULL ||
        atomic_fetch_add_explicit(&local->tests, 1, memory_order_relaxed) % LOOK_AT_HOSTS != 0)
        return status;
    tu_operation_info info = { .operation = TU_OPERATION_PEERS_WAIT_SIGNAL, .root = state->other };
    tu_group_wait wait;
    tu_group_wait_init(&wait, group, &info, 0, INT64_MAX, missing_other, state);
    status = tu_network_look(local->network, &wait, TUTTI_OK);
    if (status == TUTTI_ERROR_DEAD) /* of one that closed its world a wait tells */
        tu_group_end(group, &info);
    return tu_group_ended(group) ? TUTTI_ERROR_STATE : TUTTI_OK;
}

tutti_status tu_shm_test_signal(const tu_backend_peers *peers, int from, int channel, bool *arrived) {
    slow_wait state = { .peers = peers, .other = from, .channel = channel };
    const mailbox_local *local = peers->local;
    if (local->network != NULL)
        tu_network_poll(local->network);
    /* What this rank has put elsewhere and that has not arrived is not followed by anything yet. */
    *arrived = is_fenced(&state) && try_take(&state);
    /* A program that only tests has nobody else to look who lives, so it looks itself. */
    if (*arrived || peers->group->world->job == NULL || look_at_group(&state) == TUTTI_OK)
        return TUTTI_OK;
    *arrived = is_fenced(&state) && try_take(&state); /* the last thing that the sender did */
    return *arrived ? TUTTI_OK : tu_group_cause(peers->group);
}

/* ---- bytes and words of members on other hosts ---- */

#define GETS_AHEAD 8 /* parts of a get that are under way at once */

/* ---- by key, where the fabric has remote memory access ---- */

static bool has_moved(void *argument) {
    const slow_wait *state = argument;
    return atomic_load_explicit(&state->transfer->over, memory_order_acquire); /* pairs with the network's release */
}

static bool is_written(void *argument) {
    slow_wait *state = argument;
    return tu_network_written(state->peers->share, state->other, &state->mark);
}

/* Waits for bytes that move. Those that do not, because the connection broke, are waited for until somebody says why.
 */
static tutti_status wait_for_transfer(slow_wait *state, tu_operation operation, const tu_backend_call *call) {
    tutti_status status = TUTTI_OK;
    if (!try_quickly(state->peers, has_moved, state))
        status = wait_slowly(state, operation, call, has_moved, NULL, missing_other);
    if (status != TUTTI_OK)
        tu_network_transfer_end(state->transfer);
    else if (atomic_load_explicit(&state->transfer->failed, memory_order_relaxed) &&
             !atomic_load_explicit(&state->transfer->refused, memory_order_relaxed))
        status = wait_slowly(state, operation, call, never, NULL, missing_other);
    return status;
}

/* To a block that its owner has released it moves nothing, as a message would. */
static tutti_status put_by_key(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                               const tu_backend_call *call) {
    tu_network_transfer transfer;
    slow_wait state = { .peers = peers, .other = to, .channel = -1, .transfer = &transfer };
    tu_network_put_by_key(peers->share, to, offset, from, bytes, &transfer);
    return wait_for_transfer(&state, TU_OPERATION_PEERS_PUT, call);
}

static tutti_status released(const tu_backend_peers *peers, int owner) {
    return tu_error(TUTTI_ERROR_STATE, "get: rank %d of group %s has released the block", owner, peers->group->name);
}

/* A get sees what this rank put before. */
static tutti_status get_by_key(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                               const tu_backend_call *call) {
    tu_network_transfer transfer;
    slow_wait state = { .peers = peers, .other = from, .channel = -1, .transfer = &transfer };
    tutti_status status = TUTTI_OK;
    if (!try_quickly(peers, is_written, &state))
        status = wait_slowly(&state, TU_OPERATION_PEERS_GET, call, is_written, NULL, missing_other);
    if (status != TUTTI_OK)
        return status;
    tu_network_get_by_key(peers->share, from, offset, to, bytes, &transfer);
    status = wait_for_transfer(&state, TU_OPERATION_PEERS_GET, call);
    return status == TUTTI_OK && atomic_load_explicit(&transfer.refused, memory_order_relaxed) ? released(peers, from)
                                                                                               : status;
}

/* ---- by messages ---- */

/* Sends what there is room for. */
static bool put_on(void *argument) {
    slow_wait *state = argument;
    const mailbox_local *local = state->peers->local;
    while (state->bytes > 0) {
        size_t now = state->bytes < TU_LETTER_BYTES ? state->bytes : TU_LETTER_BYTES;
        if (!tu_network_put(local->network, state->other, local->window.number, state->offset, state->from, now))
            return false;
        state->from = (const char *)state->from + now;
        state->offset += now;
        state->bytes -= now;
    }
    return true;
}

tutti_status tu_shm_put_far(const tu_backend_peers *peers, int to, size_t offset, const void *from, size_t bytes,
                            const tu_backend_call *call) {
    slow_wait state = { .peers = peers, .other = to, .channel = -1, .from = from, .offset = offset, .bytes = bytes };
    if (tu_network_reaches(peers->share, to))
        return put_by_key(peers, to, offset, from, bytes, call);
    if (try_quickly(peers, put_on, &state))
        return TUTTI_OK;
    return wait_slowly(&state, TU_OPERATION_PEERS_PUT, call, put_on, NULL, missing_other);
}

/* Sets the word once, as soon as there is room: then nothing is left. */
static bool set_once(void *argument) {
    slow_wait *state = argument;
    const mailbox_local *local = state->peers->local;
    if (state->bytes != 0 &&
        tu_network_set(local->network, state->other, local->window.number, state->offset, state->value))
        state->bytes = 0;
    return state->bytes == 0;
}

static tutti_status set_word_far(const tu_backend_peers *peers, int to, size_t offset, uint64_t value,
                                 const tu_backend_call *call) {
    slow_wait state = {
        .peers = peers, .other = to, .channel = -1, .offset = offset, .value = value, .bytes = sizeof value
    };
    if (try_quickly(peers, set_once, &state))
        return TUTTI_OK;
    return wait_slowly(&state, TU_OPERATION_PEERS_SIGNAL, call, set_once, NULL, missing_other);
}

static bool all_got(void *argument) {
    const slow_wait *state = argument;
    for (int i = 0; i < state->get_count; i++)
        if (!atomic_load_explicit(&state->gets[i].over, memory_order_acquire)) /* pairs with the network's release */
            return false;
    return true;
}

/* One round of parts; *done counts the bytes. */
static tutti_status get_parts(slow_wait *state, char *to, size_t bytes, const tu_backend_call *call, size_t *done) {
    const mailbox_local *local = state->peers->local;
    tu_network_fetch gets[GETS_AHEAD];
    state->gets = gets;
    state->get_count = 0;
    for (; state->get_count < GETS_AHEAD && *done < bytes; state->get_count++) {
        size_t now = bytes - *done < TU_LETTER_BYTES ? bytes - *done : TU_LETTER_BYTES;
        if (!tu_network_ask_for(local->network, &gets[state->get_count], state->other, local->window.number,
                                state->offset + *done, to + *done, now))
            break; /* the connection is lost, as a look around tells */
        *done += now;
    }
    tutti_status status = TUTTI_OK;
    if (state->get_count == 0 || !try_quickly(state->peers, all_got, state))
        status = wait_slowly(state, TU_OPERATION_PEERS_GET, call, state->get_count == 0 ? never : all_got, NULL,
                             missing_other);
    bool refused = false;
    for (int i = 0; i < state->get_count; i++) {
        tu_network_forget(local->network, &gets[i]);
        refused = refused || atomic_load_explicit(&gets[i].refused, memory_order_relaxed);
    }
    return status == TUTTI_OK && refused ? released(state->peers, state->other) : status;
}

tutti_status tu_shm_get_far(const tu_backend_peers *peers, int from, size_t offset, void *to, size_t bytes,
                            const tu_backend_call *call) {
    slow_wait state = { .peers = peers, .other = from, .channel = -1, .offset = offset };
    tutti_status status = TUTTI_OK;
    if (tu_network_reaches(peers->share, from))
        return get_by_key(peers, from, offset, to, bytes, call);
    for (size_t done = 0; done < bytes && status == TUTTI_OK;)
        status = get_parts(&state, to, bytes, call, &done);
    return status;
}

/* ---- words of the pad ---- */

tutti_status tu_shm_set_word(const tu_backend_peers *peers, int to, size_t offset, uint64_t value,
                             const tu_backend_call *call) {
    tutti_status status = meet_faults(peers, TU_OPERATION_PEERS_SIGNAL);
    if (status == TUTTI_OK)
        status = fence(peers, to, TU_OPERATION_PEERS_SIGNAL, call);
    if (status != TUTTI_OK)
        return tu_not_entered(status);
    if (is_far(peers, to))
        return set_word_far(peers, to, offset, value, call);
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
    status = fence(peers, -1, TU_OPERATION_PEERS_BARRIER, call);
    if (status != TUTTI_OK)
        return status;
    state.epoch = announce(peers, channel);
    for (int member = 0; member < peers->size; member++) {
        if (member != peers->rank)
            tell(peers, member, TOLD_ARRIVED, channel, state.epoch);
    }
    if (try_quickly(peers, all_arrived, &state))
        return TUTTI_OK;
    status = wait_slowly(&state, TU_OPERATION_PEERS_BARRIER, call, all_arrived, NULL, missing_arrival);
    if (status == TUTTI_ERROR_INTERRUPTED)
        resume_later(peers, channel);
    return status;
}
