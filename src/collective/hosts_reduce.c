/* SPDX-License-Identifier: Apache-2.0
 *
 * Between hosts: reductions, in rank order, so the same bits as on one host.
 *
 * Short ones: every rank gets the inputs of all, and adds them up. Where every rank is on a host of its own, long ones
 * go by hosts_direct.c. Other long ones, where the ranks of a host follow each other: what the first host has
 * accumulated, unrounded, travels to the second, which goes on with it, and so on to the last; that one concludes, and
 * the results travel back. The vector goes in chunks, so that all links are busy in both directions, and in columns: of
 * the ranks of a host each carries a slice of it. Where ranks of a host do not follow each other no such sum exists;
 * then long ones too are gathered, piece by piece: every host gets the inputs of all ranks, which costs so many times
 * the bytes.
 *
 * In any order (TUTTI_ORDER_ANY) each host adds up what it has, whoever its ranks are. Sums of up to TREE_BYTES are
 * exchanged in a tree, by twos, in log2 steps of the hosts; longer ones go along the chain, which is quicker than a
 * ring: a link carries the vector once in each direction, and in a ring 2 (hosts - 1) / hosts times in one.
 */
#include <stdlib.h>
#include <string.h>

#include "collective/hosts.h"

#define SHORT_BYTES ((size_t)128 << 10) /* of one input that is gathered */
#define SHORT_TOTAL ((size_t)256 << 10) /* and of all of them */
#define PIECE_BYTES ((size_t)1 << 20)   /* of all inputs, when long ones are gathered */
#define BLOCK_BYTES ((size_t)8 << 20)   /* of a column, in accumulators: what is under way at once */
#define CHUNK_BYTES ((size_t)192 << 10) /* likewise: one message, at most */
#define LEAST_BYTES ((size_t)16 << 10)  /* and at least, where a column has so many */
#define CHUNKS (STEPS / 2)
#define SLOTS 8                              /* chunks of accumulators that a rank holds */
#define STEPS 256                            /* numbers of messages for one block */
#define TINY_TOTAL ((size_t)64 << 10)        /* of all inputs: gathered in any order too, in one step */
#define TREE_MESSAGES 34                     /* of a rank, each way, at most */
#define TREE_BYTES (SLOTS * CHUNK_BYTES / 2) /* of a column's accumulators: two of them lie in the slots */

#define DIRECT_BYTES ((size_t)4 << 10) /* of what each of single ranks adds up; with less a tree has fewer messages */

/* ---- gathered ---- */

/* Reduces `count` elements from `first` of the vector on, by having all inputs. */
static tutti_status reduce_gathered(tu_hosts *hosts, tu_task *task, size_t first, size_t count, void *result,
                                    uint32_t step) {
    int size = hosts->group->size;
    tu_shares shares = { .each = count * task->element };
    unsigned char *rows;
    tutti_status status = tu_hosts_scratch(hosts, (size_t)size * shares.each, &rows);
    if (status == TUTTI_OK)
        status =
            tu_hosts_gather(hosts, task, (const unsigned char *)task->in + first * task->element, rows, &shares, step);
    if (status != TUTTI_OK || result == NULL)
        return status;
    const void **sources = task->state->sources;
    for (int member = 0; member < size; member++)
        sources[member] = rows + (size_t)member * shares.each;
    tu_reduce(result, sources, size, count, (tutti_dtype)task->info.dtype, (tutti_reduction)task->info.reduction,
              task->state->factors, 0);
    return TUTTI_OK;
}

/* ---- in a chain ---- */

/* A block of the vector, as one rank carries it. */
typedef struct chain {
    tu_hosts *hosts;
    tu_task *task;
    tutti_dtype dtype, wide;
    size_t element, wide_element;
    size_t count, chunk;        /* elements of this rank's column, and of a chunk of it */
    int chunks, previous, next; /* members; -1: none */
    const unsigned char **rows; /* of this host's members, in order: their elements of the column */
    int row_count;
    double *factors;       /* one for what was accumulated, then those of the rows */
    unsigned char *slots;  /* SLOTS chunks of accumulators */
    unsigned char *spread; /* a chunk of each row, widened; NULL where that is the same */
    unsigned char *out;    /* of the column */
    uint32_t step;
    tu_round round;
    /* By chunk, into the round's lists; -1: not yet. */
    int ahead[CHUNKS], passed[CHUNKS], back[CHUNKS], returned[CHUNKS];
    int posted, reduced, back_posted, concluded;
} chain;

static size_t chunk_count(const chain *chain, int number) {
    size_t first = (size_t)number * chain->chunk;
    return chain->count - first < chain->chunk ? chain->count - first : chain->chunk;
}

static unsigned char *slot_of(const chain *chain, int number) {
    return chain->slots + (size_t)(number % SLOTS) * chain->chunk * chain->wide_element;
}

static unsigned char *result_of(const chain *chain, int number) {
    return chain->out + (size_t)number * chain->chunk * chain->element;
}

/* Whether what this host passes on of a chunk is its only input as it lies. */
static bool passes_input(const chain *chain) {
    return chain->previous < 0 && chain->row_count == 1 && chain->spread == NULL &&
           chain->task->info.reduction != TUTTI_PREMUL_SUM;
}

/* Adds this host's rows to what came, or begins with them. */
static void accumulate(chain *chain, int number, void *to) {
    size_t count = chunk_count(chain, number), first = (size_t)number * chain->chunk;
    const void **sources = chain->task->state->sources;
    int used = 0, skipped = chain->previous < 0;
    if (!skipped)
        sources[used++] = slot_of(chain, number);
    for (int i = 0; i < chain->row_count; i++) {
        const unsigned char *row = chain->rows[i] + first * chain->element;
        if (chain->spread != NULL) {
            unsigned char *wide = chain->spread + (size_t)i * chain->chunk * chain->wide_element;
            tu_widen(wide, row, count, chain->dtype);
            row = wide;
        }
        sources[used++] = row;
    }
    tu_reduce(to, sources, used, count, chain->wide, tu_accumulation((tutti_reduction)chain->task->info.reduction),
              chain->factors + skipped, 0);
}

static bool sent(const chain *chain, int index) {
    return index >= 0 && chain->round.dispatches[index].done;
}

static bool came(const chain *chain, int index) {
    return index >= 0 && chain->round.receipts[index].done;
}

/* Whether the slot of a chunk is free: what it held before has gone on. */
static bool slot_free(const chain *chain, int number) {
    return number < SLOTS ||
           (chain->next < 0 ? chain->reduced > number - SLOTS : sent(chain, chain->passed[number - SLOTS]));
}

static bool can_post(const chain *chain) {
    return chain->previous >= 0 && chain->posted < chain->chunks && slot_free(chain, chain->posted);
}

static bool can_reduce(const chain *chain) {
    if (chain->reduced >= chain->chunks)
        return false;
    return chain->previous >= 0 ? chain->reduced < chain->posted && came(chain, chain->ahead[chain->reduced])
                                : slot_free(chain, chain->reduced);
}

static bool can_return(const chain *chain) {
    return chain->next >= 0 && chain->concluded < chain->chunks && came(chain, chain->back[chain->concluded]);
}

static bool over(const chain *chain) {
    if (chain->reduced < chain->chunks || chain->concluded < chain->chunks)
        return false;
    for (int i = 0; i < chain->round.dispatch_count; i++)
        if (!chain->round.dispatches[i].done)
            return false;
    return true;
}

static bool something_to_do(void *argument) {
    const chain *chain = argument;
    return can_post(chain) || can_reduce(chain) || can_return(chain) || over(chain);
}

static tutti_status send_back(chain *chain, int number) {
    if (chain->previous < 0)
        return TUTTI_OK;
    return tu_round_send(&chain->round, chain->previous, chain->step + STEPS / 2 + (uint32_t)number,
                         result_of(chain, number), chunk_count(chain, number) * chain->element);
}

/* The last host rounds; where there is nothing to round, the sum is made where the result belongs. */
static tutti_status conclude_chunk(chain *chain, int number) {
    void *sum = chain->spread == NULL ? result_of(chain, number) : slot_of(chain, number);
    accumulate(chain, number, sum);
    tu_conclude(result_of(chain, number), sum, chunk_count(chain, number), chain->dtype,
                (tutti_reduction)chain->task->info.reduction, chain->hosts->group->size);
    chain->reduced++;
    chain->concluded++;
    return send_back(chain, number);
}

static tutti_status reduce_chunk(chain *chain) {
    int number = chain->reduced;
    if (chain->next < 0)
        return conclude_chunk(chain, number);
    const void *sum = chain->rows[0] + (size_t)number * chain->chunk * chain->element;
    if (!passes_input(chain)) {
        accumulate(chain, number, slot_of(chain, number));
        sum = slot_of(chain, number);
    }
    chain->reduced++;
    chain->passed[number] = chain->round.dispatch_count;
    return tu_round_send(&chain->round, chain->next, chain->step + (uint32_t)number, sum,
                         chunk_count(chain, number) * chain->wide_element);
}

static tutti_status post_back(chain *chain) {
    tutti_status status = TUTTI_OK;
    for (; chain->next >= 0 && chain->back_posted < chain->chunks && status == TUTTI_OK; chain->back_posted++) {
        int number = chain->back_posted;
        chain->back[number] = chain->round.receipt_count;
        status = tu_round_receive(&chain->round, chain->next, chain->step + STEPS / 2 + (uint32_t)number,
                                  result_of(chain, number), chunk_count(chain, number) * chain->element);
    }
    return status;
}

static tutti_status post_chunk(chain *chain) {
    int number = chain->posted++;
    chain->ahead[number] = chain->round.receipt_count;
    return tu_round_receive(&chain->round, chain->previous, chain->step + (uint32_t)number, slot_of(chain, number),
                            chunk_count(chain, number) * chain->wide_element);
}

/* Carries the column through this host. Results of a chunk come only after all have read their inputs of it. */
static tutti_status carry(chain *chain) {
    memset(chain->passed, -1, sizeof chain->passed);
    tutti_status status = post_back(chain);
    while (status == TUTTI_OK) {
        if (can_post(chain)) {
            status = post_chunk(chain);
        } else if (can_return(chain)) {
            status = send_back(chain, chain->concluded++);
        } else if (can_reduce(chain)) {
            status = reduce_chunk(chain);
        } else {
            status = tu_round_wait_for(&chain->round, something_to_do, chain);
            if (status == TUTTI_OK && over(chain))
                break;
        }
    }
    return status;
}

/* ---- in a tree ---- */

/* One member of each host carries a column. */
static int carrier(const chain *chain, int host) {
    const tu_hosts *hosts = chain->hosts;
    return hosts->hosts[host].members[hosts->index % hosts->columns];
}

/* The sums of two hosts, which both know, into the memory of the lower one's: so all add alike. */
static void join(chain *chain, int other, unsigned char **mine, unsigned char **theirs) {
    static const double ones[2] = { 1, 1 };
    bool lower = chain->hosts->host < other;
    unsigned char *first = lower ? *mine : *theirs, *last = lower ? *theirs : *mine;
    const void *sources[2] = { first, last };
    tu_reduce(first, sources, 2, chain->count, chain->wide,
              tu_accumulation((tutti_reduction)chain->task->info.reduction), ones, 0);
    *mine = first;
    *theirs = last;
}

static tutti_status send_sum(chain *chain, int host, uint32_t step, const unsigned char *sum) {
    return tu_round_send(&chain->round, carrier(chain, host), chain->step + step, sum,
                         chain->count * chain->wide_element);
}

static tutti_status receive_sum(chain *chain, int host, uint32_t step, unsigned char *sum) {
    return tu_round_receive(&chain->round, carrier(chain, host), chain->step + step, sum,
                            chain->count * chain->wide_element);
}

static tutti_status swap_sums(chain *chain, int other, uint32_t step, unsigned char **mine, unsigned char **theirs) {
    tutti_status status = receive_sum(chain, other, step, *theirs);
    if (status == TUTTI_OK)
        status = send_sum(chain, other, step, *mine);
    if (status == TUTTI_OK)
        status = tu_round_wait(&chain->round);
    if (status == TUTTI_OK)
        join(chain, other, mine, theirs);
    return status;
}

/* By twos among the first hosts, a power of two of them. Each of the others gives its sum to one of these first, and
 * gets the result last. */
static tutti_status exchange_sums(chain *chain, unsigned char **mine, unsigned char **theirs) {
    int host = chain->hosts->host, count = chain->hosts->host_count, half = 1;
    while (2 * half <= count)
        half *= 2;
    int other = host < half ? host + half : host - half;
    tutti_status status = TUTTI_OK;
    if (host >= half) {
        status = send_sum(chain, other, 0, *mine);
        if (status == TUTTI_OK)
            status = receive_sum(chain, other, 1, *theirs);
        if (status == TUTTI_OK)
            status = tu_round_wait(&chain->round);
        *mine = *theirs;
        return status;
    }
    if (other < count) {
        status = receive_sum(chain, other, 0, *theirs);
        if (status == TUTTI_OK)
            status = tu_round_wait(&chain->round);
        if (status == TUTTI_OK)
            join(chain, other, mine, theirs);
    }
    for (int bit = 1, step = 2; bit < half && status == TUTTI_OK; bit *= 2, step++)
        status = swap_sums(chain, host ^ bit, (uint32_t)step, mine, theirs);
    if (status == TUTTI_OK && other < count)
        status = send_sum(chain, other, 1, *mine);
    return status == TUTTI_OK ? tu_round_wait(&chain->round) : status;
}

static tutti_status carry_in_tree(chain *chain) {
    unsigned char *mine = chain->slots, *theirs = chain->slots + TREE_BYTES;
    chain->previous = chain->next = -1;
    for (int number = 0; number < chain->chunks; number++)
        accumulate(chain, number, mine + (size_t)number * chain->chunk * chain->wide_element);
    tutti_status status = exchange_sums(chain, &mine, &theirs);
    if (status == TUTTI_OK)
        tu_conclude(chain->out, mine, chain->count, chain->dtype, (tutti_reduction)chain->task->info.reduction,
                    chain->hosts->group->size);
    return status;
}

/* ---- blocks ---- */

/* Elements of a block of `count` that column `column` has. */
static tu_slice column_of(const tu_hosts *hosts, size_t count, size_t element, int column) {
    tu_slice none = { count, 0 };
    if (column >= hosts->columns)
        return none;
    size_t align = 64 / element, columns = (size_t)hosts->columns;
    size_t share = ((count + columns - 1) / columns + align - 1) / align * align;
    size_t first = share * (size_t)column;
    if (first >= count)
        return none;
    return (tu_slice){ first, count - first < share ? count - first : share };
}

/* Of each of this host's members the elements of this rank's column, one row after the other. */
static tutti_status take_rows(chain *chain, const unsigned char *in, size_t count, unsigned char *rows) {
    tu_hosts *hosts = chain->hosts;
    int members = hosts->hosts[hosts->host].count;
    size_t *counts = calloc(4 * (size_t)members, sizeof *counts);
    if (counts == NULL)
        return tu_error_memory("parts of a reduction", 4 * (size_t)members * sizeof *counts);
    size_t *in_offsets = counts + members, *out_counts = in_offsets + members, *out_offsets = out_counts + members;
    for (int i = 0; i < members; i++) {
        tu_slice slice = column_of(hosts, count, chain->element, i);
        counts[i] = slice.count * chain->element;
        in_offsets[i] = slice.first * chain->element;
        out_counts[i] = chain->count * chain->element;
        out_offsets[i] = (size_t)i * chain->count * chain->element;
        chain->rows[i] = rows + out_offsets[i];
    }
    tutti_call call = tu_hosts_call(chain->task);
    tutti_status status =
        tutti_all_to_all_v(hosts->here, in, counts, in_offsets, rows, out_counts, out_offsets, TUTTI_U8, &call);
    free(counts);
    return status;
}

/* Hands the columns of a block round on this host. */
static tutti_status share_columns(chain *chain, size_t count, unsigned char *out) {
    tu_hosts *hosts = chain->hosts;
    int members = hosts->hosts[hosts->host].count;
    size_t *counts = calloc((size_t)members, sizeof *counts);
    if (counts == NULL)
        return tu_error_memory("parts of a reduction", (size_t)members * sizeof *counts);
    for (int i = 0; i < members; i++)
        counts[i] = column_of(hosts, count, chain->element, i).count * chain->element;
    tutti_call call = tu_hosts_call(chain->task);
    tutti_status status = tutti_all_gather_v(hosts->here, chain->out, out, counts, NULL, TUTTI_U8, &call);
    free(counts);
    return status;
}

/* Elements of a chunk. A chain is as quick as its links once all of them are busy: a column has at least twice as many
 * chunks as it takes steps there and back, as long as they do not get too short. */
static size_t chunk_of(const chain *chain) {
    size_t bytes = chain->count * chain->wide_element, steps = 2 * (size_t)(chain->hosts->host_count - 1);
    size_t chunk = bytes / (2 * steps);
    chunk = chunk < LEAST_BYTES ? LEAST_BYTES : chunk;
    chunk = chunk < bytes / (CHUNKS - 1) ? bytes / (CHUNKS - 1) : chunk;
    chunk = chunk > CHUNK_BYTES ? CHUNK_BYTES : chunk;
    return chunk / 64 * 64 / chain->wide_element;
}

/* Neighbours, sizes and memory of a block; `count` elements in all columns. */
static tutti_status set_up(chain *chain, const unsigned char *in, unsigned char *out, size_t count) {
    tu_hosts *hosts = chain->hosts;
    tu_slice slice = column_of(hosts, count, chain->element, hosts->index);
    chain->count = slice.count;
    chain->out = out + slice.first * chain->element;
    chain->chunk = chunk_of(chain);
    chain->chunks = (int)((chain->count + chain->chunk - 1) / chain->chunk);
    int before = hosts->host - 1, after = hosts->host + 1;
    chain->previous = before >= 0 ? hosts->hosts[before].members[hosts->index % hosts->columns] : -1;
    chain->next = after < hosts->host_count ? hosts->hosts[after].members[hosts->index % hosts->columns] : -1;
    chain->row_count = hosts->hosts[hosts->host].count;
    size_t slots = SLOTS * CHUNK_BYTES,
           spread = chain->wide != chain->dtype ? CHUNK_BYTES * (size_t)chain->row_count : 0;
    size_t rows = hosts->here != NULL ? (size_t)chain->row_count * chain->count * chain->element : 0;
    unsigned char *memory;
    tutti_status status = tu_hosts_scratch(hosts, slots + spread + rows + 64, &memory);
    if (status != TUTTI_OK)
        return status;
    chain->slots = memory;
    chain->spread = spread > 0 ? memory + slots : NULL;
    if (hosts->here != NULL)
        return take_rows(chain, in, count, memory + slots + spread);
    chain->rows[0] = in;
    return TUTTI_OK;
}

static tutti_status run_block(chain *chain, const unsigned char *in, unsigned char *out, size_t count) {
    tutti_status status = set_up(chain, in, out, count);
    if (status == TUTTI_OK && chain->chunks > 0) {
        bool tree = chain->task->info.algorithm == TUTTI_ALGORITHM_TREE;
        status = tu_round_begin(&chain->round, chain->hosts, chain->task, tree ? TREE_MESSAGES : 2 * chain->chunks);
        if (status != TUTTI_OK)
            return status;
        status = tu_round_end(&chain->round, tree ? carry_in_tree(chain) : carry(chain));
    }
    return status == TUTTI_OK && chain->hosts->here != NULL ? share_columns(chain, count, out) : status;
}

static tutti_status chain_factors(chain *chain) {
    tu_hosts *hosts = chain->hosts;
    chain->factors[0] = 1;
    chain->factors[1] = chain->task->factor;
    if (chain->task->info.reduction != TUTTI_PREMUL_SUM || hosts->here == NULL)
        return TUTTI_OK;
    tutti_call call = tu_hosts_call(chain->task);
    return tutti_all_gather(hosts->here, &chain->task->factor, chain->factors + 1, 1, TUTTI_F64, &call);
}

/* Reduces `count` elements from `first` on: less than fit into the messages of one block. */
static tutti_status reduce_chained(tu_hosts *hosts, tu_task *task, size_t first, size_t count, unsigned char *result,
                                   uint32_t step) {
    int members = hosts->hosts[hosts->host].count;
    tutti_dtype dtype = (tutti_dtype)task->info.dtype, wide = tu_accumulator(dtype);
    chain *made = calloc(1, sizeof *made);
    const unsigned char **rows = calloc((size_t)members, sizeof *rows);
    double *factors = calloc((size_t)members + 1, sizeof *factors);
    tutti_status status = TUTTI_OK;
    if (made == NULL || rows == NULL || factors == NULL)
        status = tu_error_memory("a reduction across hosts", sizeof *made);
    if (status == TUTTI_OK) {
        *made = (chain){ .hosts = hosts,
                         .task = task,
                         .dtype = dtype,
                         .wide = wide,
                         .element = task->element,
                         .wide_element = tutti_dtype_size(wide),
                         .rows = rows,
                         .factors = factors,
                         .step = step };
        status = chain_factors(made);
    }
    if (status == TUTTI_OK)
        status = run_block(made, (const unsigned char *)task->in + first * task->element, result, count);
    free(factors);
    free(rows);
    free(made);
    return status;
}

/* ---- the vector, block by block ---- */

/* What this rank wants of the results. */
static tu_slice wanted(const tu_hosts *hosts, const tu_task *task, size_t total) {
    int rank = hosts->group->rank;
    if (tu_scatters(task->row))
        return tu_slice_of(task, hosts->group->size, rank);
    return tu_wants_all(task, rank) ? (tu_slice){ 0, total } : (tu_slice){ 0, 0 };
}

/* Copies what this rank wants of the results of a block. */
static void keep(const tu_task *task, tu_slice slice, size_t first, size_t count, const unsigned char *results) {
    size_t begin = first > slice.first ? first : slice.first;
    size_t end = first + count < slice.first + slice.count ? first + count : slice.first + slice.count;
    if (begin < end)
        memmove((unsigned char *)task->out + (begin - slice.first) * task->element,
                results + (begin - first) * task->element, (end - begin) * task->element);
}

static size_t block_count(const tu_hosts *hosts, const tu_task *task, bool gathered) {
    size_t wide = tutti_dtype_size(tu_accumulator((tutti_dtype)task->info.dtype));
    if (gathered) {
        size_t piece = PIECE_BYTES / (size_t)hosts->group->size / task->element;
        return piece > 64 ? piece : 64;
    }
    return BLOCK_BYTES / wide * (size_t)hosts->columns;
}

/* Elements of the vector that all ranks give. */
static size_t total_of(const tu_hosts *hosts, const tu_task *task) {
    return task->row->in == TU_EXTENT_EACH ? task->info.count * (size_t)hosts->group->size : task->info.count;
}

tutti_algorithm tu_hosts_choose(const tu_hosts *hosts, const tu_task *task) {
    size_t total = total_of(hosts, task), wide = tutti_dtype_size(tu_accumulator((tutti_dtype)task->info.dtype));
    if (total * task->element * (size_t)hosts->group->size <= TINY_TOTAL)
        return TUTTI_ALGORITHM_ONE_SHOT;
    if (tu_hosts_direct(hosts) && total * task->element >= DIRECT_BYTES * (size_t)hosts->host_count)
        return TUTTI_ALGORITHM_TWO_SHOT;
    size_t column = column_of(hosts, total, task->element, 0).count; /* the longest */
    return column * wide <= TREE_BYTES ? TUTTI_ALGORITHM_TREE : TUTTI_ALGORITHM_PIPELINED;
}

/* Whether every host gets all inputs. */
static bool is_gathered(const tu_hosts *hosts, const tu_task *task, size_t bytes) {
    if (task->any_order)
        return task->info.algorithm == TUTTI_ALGORITHM_ONE_SHOT;
    return !hosts->contiguous || (bytes <= SHORT_BYTES && bytes * (size_t)hosts->group->size <= SHORT_TOTAL);
}

/* Two ranks swap short inputs too. */
static bool is_direct(const tu_hosts *hosts, const tu_task *task, size_t bytes) {
    if (task->any_order)
        return task->info.algorithm == TUTTI_ALGORITHM_TWO_SHOT;
    return tu_hosts_direct(hosts) &&
           ((hosts->group->size == 2 && !tu_scatters(task->row)) || !is_gathered(hosts, task, bytes));
}

tutti_status tu_hosts_reduce(tu_hosts *hosts, tu_task *task) {
    size_t total = total_of(hosts, task), bytes = total * task->element;
    bool direct = is_direct(hosts, task, bytes), gathered = !direct && is_gathered(hosts, task, bytes);
    tutti_status status = TUTTI_OK;
    if ((gathered || direct) && task->info.reduction == TUTTI_PREMUL_SUM) /* the factors of all ranks */
        status = tu_hosts_gather(hosts, task, &task->factor, (unsigned char *)task->state->factors,
                                 &(tu_shares){ .each = sizeof(double) }, UINT32_MAX - (uint32_t)hosts->group->size);
    if (direct && status == TUTTI_OK)
        status = tu_hosts_reduce_direct(hosts, task);
    if (direct || status != TUTTI_OK)
        return status;
    tu_slice slice = wanted(hosts, task, total);
    size_t block = block_count(hosts, task, gathered);
    unsigned char *results = NULL;
    bool whole = slice.count == total; /* results go where they belong at once */
    if (!whole && total > 0) {
        results = malloc((total < block ? total : block) * task->element);
        if (results == NULL)
            return tu_error_memory("results of a reduction", (total < block ? total : block) * task->element);
    }
    uint32_t step = 0;
    for (size_t first = 0; first < total && status == TUTTI_OK;
         first += block, step += STEPS + (uint32_t)hosts->group->size) {
        size_t count = total - first < block ? total - first : block;
        unsigned char *to = whole ? (unsigned char *)task->out + first * task->element : results;
        status = gathered ? reduce_gathered(hosts, task, first, count, to, step)
                          : reduce_chained(hosts, task, first, count, to, step);
        if (status == TUTTI_OK && !whole)
            keep(task, slice, first, count, results);
    }
    free(results);
    return status;
}
