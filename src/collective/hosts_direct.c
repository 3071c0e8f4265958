/* SPDX-License-Identifier: Apache-2.0
 *
 * Between hosts of one rank each: long reductions, in rank order, without a chain.
 *
 * Two ranks swap their inputs, and each adds up what comes while it comes: a link carries the vector once in each
 * direction, as in a chain or when each adds up a half, but nobody waits for what another has added up, and inputs go
 * in sends as long as there are. More ranks each add up a part of the vector, for which all others send them their
 * inputs, and send the results round: a link carries the vector 2 (hosts - 1) / hosts times in each direction, in two
 * steps, while in a chain the hosts in its middle carry it twice, in 2 (hosts - 1) steps. Who adds up has the inputs
 * themselves, so nothing is widened on its way.
 */
#include <stdlib.h>
#include <string.h>

#include "collective/hosts.h"

#define COPY_BYTES ((size_t)2 << 20)  /* of an input in place that is swapped: a copy of so much of it is sent */
#define BLOCK_BYTES ((size_t)8 << 20) /* of inputs of all others that a rank holds */
#define STEPS 256                     /* numbers of messages for one block */

bool tu_hosts_direct(const tu_hosts *hosts) {
    return hosts->host_count == hosts->group->size && hosts->host_count <= TU_HOSTS_DIRECT_MOST;
}

/* ---- two ranks ---- */

typedef struct swap {
    const tu_task *task;
    const unsigned char *mine; /* this rank's input, from where the message begins */
    unsigned char *out;
    bool first;     /* of the two */
    unsigned flags; /* of the kernel */
} swap;

/* With the network's lock held. */
static void add_up(void *argument, size_t offset, const void *data, size_t bytes) {
    const swap *swap = argument;
    const void *mine = swap->mine + offset, *sources[2] = { swap->first ? mine : data, swap->first ? data : mine };
    tu_reduce(swap->out + offset, sources, 2, bytes / swap->task->element, (tutti_dtype)swap->task->info.dtype,
              (tutti_reduction)swap->task->info.reduction, swap->task->state->factors, swap->flags);
}

static tutti_status swap_bytes(tu_hosts *hosts, tu_task *task, swap *swap, const void *sent, size_t bytes,
                               uint32_t step) {
    int rank = hosts->group->rank, other = 1 - rank;
    tu_round round;
    tutti_status status = tu_round_begin(&round, hosts, task, 1);
    if (status != TUTTI_OK)
        return status;
    if (tu_wants_all(task, other))
        status = tu_round_send(&round, other, step, sent, bytes);
    if (status == TUTTI_OK && tu_wants_all(task, rank))
        status = tu_round_absorb(&round, other, step, add_up, swap, bytes);
    if (status == TUTTI_OK)
        status = tu_round_wait(&round);
    return tu_round_end(&round, status);
}

/* In place, what is added up would go where input lies that is still to leave. */
static tutti_status swap_in_place(tu_hosts *hosts, tu_task *task, size_t bytes, unsigned flags) {
    unsigned char *copy;
    tutti_status status = tu_hosts_scratch(hosts, bytes < COPY_BYTES ? bytes : COPY_BYTES, &copy);
    uint32_t step = 0;
    for (size_t at = 0; at < bytes && status == TUTTI_OK; at += COPY_BYTES, step++) {
        size_t length = bytes - at < COPY_BYTES ? bytes - at : COPY_BYTES;
        unsigned char *place = (unsigned char *)task->out + at;
        swap swap = { .task = task, .mine = place, .out = place, .first = hosts->group->rank == 0, .flags = flags };
        memcpy(copy, place, length);
        status = swap_bytes(hosts, task, &swap, copy, length, step);
    }
    return status;
}

static tutti_status swap_inputs(tu_hosts *hosts, tu_task *task) {
    size_t bytes = task->info.count * task->element;
    unsigned flags = bytes >= task->state->large ? TU_KERNEL_STREAM : 0; /* longer than the caches keep */
    if (task->in == task->out)
        return swap_in_place(hosts, task, bytes, flags);
    swap swap = { .task = task, .mine = task->in, .out = task->out, .first = hosts->group->rank == 0, .flags = flags };
    return swap_bytes(hosts, task, &swap, task->in, bytes, 0);
}

/* ---- more of them ---- */

/* A block: of each rank's part as many elements. */
typedef struct spread {
    tu_hosts *hosts;
    tu_task *task;
    size_t part, piece; /* elements of a part in the block, and of a message */
    size_t at;          /* where the block begins in each part */
    uint32_t step;
    unsigned char *slots; /* of all other ranks the inputs of this rank's part */
    tu_round round;
    int awaited; /* piece */
} spread;

/* Elements of piece `number` of a rank's part; from where in the vector on. */
static size_t piece_of(const spread *spread, int owner, int number, size_t *first) {
    tu_slice slice = tu_slice_of(spread->task, spread->hosts->group->size, owner);
    size_t at = (size_t)number * spread->piece, end = slice.count < spread->at ? 0 : slice.count - spread->at;
    end = end < spread->part ? end : spread->part;
    *first = slice.first + spread->at + at;
    return at >= end ? 0 : end - at < spread->piece ? end - at : spread->piece;
}

static unsigned char *slot_of(const spread *spread, int source, int number) {
    int place = source - (source > spread->hosts->group->rank);
    return spread->slots + ((size_t)place * spread->part + (size_t)number * spread->piece) * spread->task->element;
}

/* Whether everybody's input of the awaited piece has come; they were the first that were asked for, piece by piece. */
static bool piece_came(void *argument) {
    const spread *spread = argument;
    int others = spread->hosts->group->size - 1;
    for (int i = spread->awaited * others; i < (spread->awaited + 1) * others; i++)
        if (!spread->round.receipts[i].done)
            return false;
    return true;
}

static tutti_status expect_inputs(spread *spread) {
    int rank = spread->hosts->group->rank, size = spread->hosts->group->size;
    tutti_status status = TUTTI_OK;
    size_t first, count;
    for (int number = 0; (count = piece_of(spread, rank, number, &first)) > 0; number++)
        for (int i = 1; i < size && status == TUTTI_OK; i++) {
            int source = (rank + size - i) % size;
            status = tu_round_receive(&spread->round, source, spread->step + (uint32_t)number,
                                      slot_of(spread, source, number), count * spread->task->element);
        }
    return status;
}

static tutti_status expect_results(spread *spread) {
    int rank = spread->hosts->group->rank, size = spread->hosts->group->size;
    tutti_status status = TUTTI_OK;
    size_t first, count;
    for (int i = 1; i < size && tu_wants_all(spread->task, rank); i++) {
        int owner = (rank + size - i) % size;
        for (int number = 0; status == TUTTI_OK && (count = piece_of(spread, owner, number, &first)) > 0; number++)
            status = tu_round_receive(&spread->round, owner, spread->step + STEPS / 2 + (uint32_t)number,
                                      (unsigned char *)spread->task->out + first * spread->task->element,
                                      count * spread->task->element);
    }
    return status;
}

/* Each begins with another one, so that all links are busy. */
static tutti_status send_inputs(spread *spread) {
    int rank = spread->hosts->group->rank, size = spread->hosts->group->size;
    tutti_status status = TUTTI_OK;
    size_t first, count;
    for (int i = 1; i < size; i++) {
        int owner = (rank + i) % size;
        for (int number = 0; status == TUTTI_OK && (count = piece_of(spread, owner, number, &first)) > 0; number++)
            status = tu_round_send(&spread->round, owner, spread->step + (uint32_t)number,
                                   (const unsigned char *)spread->task->in + first * spread->task->element,
                                   count * spread->task->element);
    }
    return status;
}

/* Whether results must not be written yet where they belong: input of this rank lies there that is still to leave. */
static bool stays_in_slots(const spread *spread) {
    return tu_scatters(spread->task->row) && spread->task->in == spread->task->out;
}

/* Where the results of a piece are made. */
static unsigned char *result_of(const spread *spread, int number, size_t first) {
    const tu_task *task = spread->task;
    int rank = spread->hosts->group->rank;
    if (stays_in_slots(spread) || (!tu_scatters(task->row) && !tu_wants_all(task, rank)))
        return slot_of(spread, rank == 0 ? 1 : 0, number);
    size_t at = tu_scatters(task->row) ? spread->at + (size_t)number * spread->piece : first;
    return (unsigned char *)task->out + at * task->element;
}

static tutti_status reduce_piece(spread *spread, int number, size_t first, size_t count) {
    const tu_task *task = spread->task;
    int rank = spread->hosts->group->rank, size = spread->hosts->group->size;
    const void **sources = task->state->sources;
    unsigned char *result = result_of(spread, number, first);
    for (int source = 0; source < size; source++)
        sources[source] =
            source == rank ? (const unsigned char *)task->in + first * task->element : slot_of(spread, source, number);
    tu_reduce(result, sources, size, count, (tutti_dtype)task->info.dtype, (tutti_reduction)task->info.reduction,
              task->state->factors, 0);
    tutti_status status = TUTTI_OK;
    for (int i = 1; i < size && status == TUTTI_OK; i++)
        if (tu_wants_all(task, (rank + i) % size))
            status = tu_round_send(&spread->round, (rank + i) % size, spread->step + STEPS / 2 + (uint32_t)number,
                                   result, count * task->element);
    return status;
}

static void keep_results(spread *spread) {
    size_t first, count;
    int rank = spread->hosts->group->rank;
    for (int number = 0; (count = piece_of(spread, rank, number, &first)) > 0; number++)
        memcpy((unsigned char *)spread->task->out +
                   (spread->at + (size_t)number * spread->piece) * spread->task->element,
               result_of(spread, number, first), count * spread->task->element);
}

static tutti_status reduce_part(spread *spread) {
    int rank = spread->hosts->group->rank;
    size_t first, count;
    tutti_status status = TUTTI_OK;
    for (int number = 0; status == TUTTI_OK && (count = piece_of(spread, rank, number, &first)) > 0; number++) {
        spread->awaited = number;
        status = tu_round_wait_for(&spread->round, piece_came, spread);
        if (status == TUTTI_OK)
            status = reduce_piece(spread, number, first, count);
    }
    return status == TUTTI_OK ? tu_round_wait(&spread->round) : status;
}

static tutti_status run_block(spread *spread) {
    int pieces = (int)((spread->part + spread->piece - 1) / spread->piece), others = spread->hosts->group->size - 1;
    tutti_status status = tu_round_begin(&spread->round, spread->hosts, spread->task, 2 * pieces * others);
    if (status != TUTTI_OK)
        return status;
    status = expect_inputs(spread);
    if (status == TUTTI_OK)
        status = expect_results(spread);
    if (status == TUTTI_OK)
        status = send_inputs(spread);
    if (status == TUTTI_OK)
        status = reduce_part(spread);
    status = tu_round_end(&spread->round, status);
    if (status == TUTTI_OK && stays_in_slots(spread))
        keep_results(spread);
    return status;
}

static tutti_status spread_inputs(tu_hosts *hosts, tu_task *task) {
    int size = hosts->group->size;
    size_t longest = 0, room = BLOCK_BYTES / (size_t)size / 64 * 64 / task->element;
    for (int owner = 0; owner < size; owner++) {
        size_t count = tu_slice_of(task, size, owner).count;
        longest = count > longest ? count : longest;
    }
    spread spread = { .hosts = hosts, .task = task };
    spread.part = longest < room ? longest : room;
    spread.piece = TU_HOSTS_MESSAGE / task->element;
    spread.piece = spread.part < spread.piece ? spread.part : spread.piece;
    tutti_status status = tu_hosts_scratch(hosts, (size_t)(size - 1) * spread.part * task->element, &spread.slots);
    for (; spread.at < longest && status == TUTTI_OK; spread.at += spread.part, spread.step += STEPS)
        status = run_block(&spread);
    return status;
}

tutti_status tu_hosts_reduce_direct(tu_hosts *hosts, tu_task *task) {
    bool two = hosts->group->size == 2 && !tu_scatters(task->row);
    return two ? swap_inputs(hosts, task) : spread_inputs(hosts, task);
}
