/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti bench`: one rank's part of the measurement.
 *
 * Isolated: a barrier, then one call, timed. Streaming: calls back to back; calls too short for the clock are timed
 * several at once. The time of a measurement is taken over the ranks (average unless asked otherwise), the statistics
 * over the measurements.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cache.h"
#include "base/clock.h"
#include "base/error.h"
#include "bench.h"

#define SLOT_ALIGNMENT ((size_t)4096)
#define MOST_ITERATIONS 20000
#define LEAST_ITERATIONS 7
#define SHORTEST_NS 2000.0 /* measurements shorter than this are made of several calls */

typedef struct side {
    tutti_memory *memory; /* NULL: private */
    tutti_peers *peers;
    char *data;
} side;

struct bench_arena {
    tutti_world *world;
    tutti_group *group;
    int rank, size;
    side in, out;
    size_t room;      /* bytes of each side */
    double *times;    /* MOST_ITERATIONS, or what was asked for */
    double *combined; /* on rank 0 */
    size_t *counts;
    int *to;
    double clock_ns; /* what reading the clock twice costs */
};

/* ---- buffers ---- */

static tutti_status make_side(bench_arena *arena, side *side, bool symmetric) {
    if (symmetric) {
        tutti_status status = tutti_memory_alloc(arena->world, arena->room, NULL, &side->memory);
        if (status != TUTTI_OK)
            return status;
        side->data = tutti_memory_data(side->memory);
        return tutti_memory_rendezvous(side->memory, arena->group, &side->peers);
    }
    void *data;
    if (posix_memalign(&data, SLOT_ALIGNMENT, arena->room) != 0)
        return tu_error_memory("a benchmark buffer", arena->room);
    side->data = data;
    memset(data, 0, arena->room);
    return TUTTI_OK;
}

static void free_side(side *side) {
    if (side->memory == NULL)
        free(side->data);
    tutti_peers_release(side->peers);
    tutti_memory_release(side->memory);
}

static size_t slot_bytes(size_t bytes) {
    return (bytes + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
}

static bool any_one_sided(const bench_options *options) {
    for (int i = 0; i < options->operation_count; i++) {
        if (options->operations[i]->one_sided)
            return true;
    }
    return false;
}

/* The largest buffer of any row, rounding to whole elements included. */
static size_t largest(const bench_options *options, int size) {
    size_t least = (size_t)size * tutti_dtype_size(options->dtype);
    return options->end > least ? options->end : least;
}

static double clock_cost(void) {
    int64_t least = INT64_MAX;
    for (int i = 0; i < 1000; i++) {
        int64_t begin = tu_clock_now(), spent = tu_clock_now() - begin;
        if (spent < least)
            least = spent;
    }
    return (double)least;
}

tutti_status bench_arena_make(tutti_world *world, const bench_options *options, bench_arena **made) {
    bench_arena *arena = calloc(1, sizeof *arena);
    if (arena == NULL)
        return tu_error_memory("the benchmark", sizeof *arena);
    size_t iterations = options->iterations > MOST_ITERATIONS ? (size_t)options->iterations : MOST_ITERATIONS;
    arena->world = world;
    arena->group = tutti_world_group(world);
    arena->rank = tutti_world_rank(world);
    arena->size = tutti_world_size(world);
    arena->clock_ns = clock_cost();
    arena->times = calloc(iterations, sizeof *arena->times);
    arena->combined = calloc(iterations, sizeof *arena->combined);
    arena->counts = calloc((size_t)arena->size, sizeof *arena->counts);
    arena->to = calloc((size_t)arena->size, sizeof *arena->to);
    arena->room = slot_bytes(largest(options, arena->size));
    if (options->cold) {
        size_t cold = slot_bytes(2 * tu_cache_last_bytes());
        arena->room = 2 * arena->room > cold ? 2 * arena->room : cold;
    }
    tutti_status status = TUTTI_OK;
    if (!arena->times || !arena->combined || !arena->counts || !arena->to)
        status = tu_error_memory("the benchmark's times", iterations * 2 * sizeof(double));
    bool symmetric = !options->private_buffers || any_one_sided(options);
    if (status == TUTTI_OK)
        status = make_side(arena, &arena->in, symmetric);
    if (status == TUTTI_OK)
        status = make_side(arena, &arena->out, symmetric);
    if (status == TUTTI_OK)
        *made = arena;
    else
        bench_arena_free(arena);
    return status;
}

void bench_arena_free(bench_arena *arena) {
    free_side(&arena->out);
    free_side(&arena->in);
    free(arena->to);
    free(arena->counts);
    free(arena->combined);
    free(arena->times);
    free(arena);
}

/* ---- calls ---- */

typedef struct row_plan {
    const bench_options *options;
    const bench_operation *operation;
    bench_call call;
    tutti_call extra;
    uint64_t factor; /* one half, in the row's type */
    size_t slots, stride;
    long number;   /* of calls made */
    tutti_ran ran; /* what the last one that was measured ran as, where the library says */
} row_plan;

static void plan_row(bench_arena *arena, const bench_options *options, const bench_operation *operation, size_t bytes,
                     row_plan *plan) {
    size_t count = bench_count(operation, bytes, options->dtype, arena->size);
    *plan = (row_plan){ .options = options, .operation = operation, .extra = TUTTI_CALL_INIT, .ran = TUTTI_RAN_INIT };
    plan->stride = slot_bytes(bench_bytes(operation, count, options->dtype, arena->size));
    plan->slots = options->cold && plan->stride > 0 ? arena->room / plan->stride : 1;
    plan->extra.algorithm = options->algorithm;
    plan->extra.factor = &plan->factor;
    double half = 0.5;
    tutti_dtype real = options->dtype == TUTTI_C64    ? TUTTI_F32
                       : options->dtype == TUTTI_C128 ? TUTTI_F64
                                                      : options->dtype;
    (void)!tutti_convert(&half, TUTTI_F64, &plan->factor, real, 1);
    for (int rank = 0; rank < arena->size; rank++) {
        arena->counts[rank] = count;
        arena->to[rank] = (rank + 1) % arena->size;
    }
    bool plain =
        options->algorithm == TUTTI_ALGORITHM_AUTO && options->reduction != TUTTI_PREMUL_SUM; /* as most users call */
    plan->call = (bench_call){ .group = arena->group,
                               .in_peers = arena->in.peers,
                               .out_peers = arena->out.peers,
                               .rank = arena->rank,
                               .size = arena->size,
                               .root = options->root,
                               .count = count,
                               .dtype = options->dtype,
                               .reduction = options->reduction,
                               .counts = arena->counts,
                               .to = arena->to,
                               .call = plain ? NULL : &plan->extra };
}

/* In place: the smaller buffer at its own place in the larger one. */
static void aim(bench_arena *arena, row_plan *plan, size_t slot) {
    size_t at = slot * plan->stride, part = plan->call.count * tutti_dtype_size(plan->call.dtype);
    char *in = arena->in.data + at, *out = arena->out.data + at;
    if (plan->options->in_place && !plan->operation->one_sided) {
        out = in;
        if (plan->operation->shape == BENCH_GATHER)
            in += (size_t)arena->rank * part;
        else if (plan->operation->shape == BENCH_SCATTER)
            out += (size_t)arena->rank * part;
    }
    plan->call.in = in;
    plan->call.out = out;
    plan->call.in_offset = plan->call.out_offset = at;
}

static void fill_input(bench_arena *arena, row_plan *plan, unsigned salt) {
    size_t elements = bench_in_elements(plan->operation, plan->call.count, arena->size);
    bench_fill((void *)(uintptr_t)plan->call.in, elements, plan->call.dtype, arena->rank, salt);
}

static tutti_status one_call(bench_arena *arena, row_plan *plan) {
    if (plan->slots > 1)
        aim(arena, plan, (size_t)plan->number % plan->slots);
    plan->number++;
    return plan->operation->run(&plan->call);
}

/* Times `batch` calls; *ns is per call. */
static tutti_status measure_once(bench_arena *arena, row_plan *plan, int batch, double *ns) {
    if (plan->options->dirty) {
        aim(arena, plan, (size_t)plan->number % plan->slots);
        fill_input(arena, plan, (unsigned)plan->number + 1);
    }
    tutti_status status = plan->options->isolated ? tutti_barrier(arena->group, NULL) : TUTTI_OK;
    int64_t begin = tu_clock_now();
    for (int i = 0; i < batch && status == TUTTI_OK; i++)
        status = one_call(arena, plan);
    double spent = (double)(tu_clock_now() - begin) - arena->clock_ns;
    *ns = (spent > 0 ? spent : 0) / batch / plan->operation->trips;
    return status;
}

/* A call on fresh input, compared with what it must give; the number of wrong elements on all ranks. */
static tutti_status check_row(bench_arena *arena, row_plan *plan, int64_t *wrong) {
    const unsigned salt = 0x5eed;
    aim(arena, plan, 0);
    size_t bytes =
        bench_out_elements(plan->operation, plan->call.count, arena->size) * tutti_dtype_size(plan->call.dtype);
    memset(plan->call.out, 0xa5, bytes);
    fill_input(arena, plan, salt);
    tutti_status status = tutti_barrier(arena->group, NULL); /* a put must not come before the memset */
    if (status == TUTTI_OK)
        status = plan->operation->run(&plan->call);
    if (status == TUTTI_OK)
        status = tutti_barrier(arena->group, NULL);
    if (status != TUTTI_OK)
        return status;
    uint64_t mine = bench_wrong(plan->operation, &plan->call, salt), all = 0;
    status = tutti_all_reduce(arena->group, &mine, &all, 1, TUTTI_U64, TUTTI_SUM,
                              NULL); /* nobody goes on while another still looks */
    *wrong = (int64_t)all;
    return status;
}

/* ---- a row ---- */

/* The first calls set things up; from the time of the next ones rank 0 decides how many follow. */
static tutti_status choose_length(bench_arena *arena, row_plan *plan, long *iterations, int *batch) {
    const bench_options *options = plan->options;
    double ns = 0, least = INFINITY;
    long warmup = options->warmup >= 0 ? options->warmup : 3;
    tutti_status status = TUTTI_OK;
    for (long i = 0; i < warmup && status == TUTTI_OK; i++)
        status = measure_once(arena, plan, 1, &ns);
    for (int i = 0; i < 5 && status == TUTTI_OK; i++) {
        status = measure_once(arena, plan, 1, &ns);
        least = fmin(least, ns * plan->operation->trips);
    }
    double each = fmax(least, 20);
    int64_t choice[2] = { options->iterations, 1 };
    if (!options->isolated && !options->dirty && each < SHORTEST_NS)
        choice[1] = (int64_t)(SHORTEST_NS / each) + 1;
    if (options->iterations == 0) {
        double fit = options->seconds * 1e9 / (each * (double)choice[1]);
        choice[0] = fit < LEAST_ITERATIONS ? LEAST_ITERATIONS : fit > MOST_ITERATIONS ? MOST_ITERATIONS : (int64_t)fit;
    }
    if (status == TUTTI_OK)
        status = tutti_broadcast(arena->group, choice, choice, 2, TUTTI_I64, 0, NULL);
    *iterations = (long)choice[0];
    *batch = (int)choice[1];
    return status;
}

/* Measures: as often as was chosen. When that was not the user's choice it ends with the time, too: calls may turn out
 * much longer than the quickest of the first, on a machine that others use. The ranks agree after 7, 14, 28 … of them.
 */
static tutti_status measure(bench_arena *arena, row_plan *plan, int batch, long *iterations) {
    const bench_options *options = plan->options;
    int64_t end = tu_clock_now() + (int64_t)(options->seconds * 1e9);
    long most = *iterations, stretch = options->iterations == 0 ? LEAST_ITERATIONS : most, done = 0;
    tutti_status status = tutti_barrier(arena->group, NULL);
    while (done < most && status == TUTTI_OK) {
        long until = most - done < 2 * stretch ? most : done + stretch;
        for (; done < until && status == TUTTI_OK; done++)
            status = measure_once(arena, plan, batch, &arena->times[done]);
        int64_t over = tu_clock_now() >= end;
        if (plan->operation->one_sided || plan->operation->trips != 1 ||
            tutti_group_ran(arena->group, &plan->ran) != TUTTI_OK)
            plan->ran = (tutti_ran)TUTTI_RAN_INIT;
        if (done < most && status == TUTTI_OK)
            status = tutti_broadcast(arena->group, &over, &over, 1, TUTTI_I64, 0, NULL);
        if (over)
            break;
        stretch *= 2;
    }
    *iterations = done;
    return status;
}

static int ascending(const void *one, const void *other) {
    double x = *(const double *)one, y = *(const double *)other;
    return (x > y) - (x < y);
}

double bench_median(double *values, long count) {
    qsort(values, (size_t)count, sizeof *values, ascending);
    return values[count / 2];
}

static void summarise(double *times, long count, bench_row *row) {
    double median = bench_median(times, count), sum = 0; /* they are in order now */
    for (long i = 0; i < count; i++)
        sum += times[i];
    row->min = times[0] / 1e3;
    row->p50 = row->low = row->high = median / 1e3;
    row->p99 = times[(count * 99) / 100 < count ? (count * 99) / 100 : count - 1] / 1e3;
    row->max = times[count - 1] / 1e3;
    row->avg = sum / (double)count / 1e3;
}

static void describe(const bench_arena *arena, const row_plan *plan, bench_row *row) {
    const bench_options *options = plan->options;
    *row = (bench_row){ .bytes = bench_bytes(plan->operation, plan->call.count, options->dtype, arena->size),
                        .count = plan->call.count,
                        .dtype = options->dtype,
                        .reduction = plan->operation->reduces ? options->reduction : (tutti_reduction)0,
                        .ranks = arena->size,
                        .wrong = -1,
                        .private_buffers = arena->in.memory == NULL,
                        .in_place = options->in_place && !plan->operation->one_sided,
                        .cold = options->cold,
                        .dirty = options->dirty,
                        .isolated = options->isolated };
    snprintf(row->operation, sizeof row->operation, "%s", plan->operation->name);
    if (plan->ran.operation[0] != '\0')
        snprintf(row->algorithm, sizeof row->algorithm, "%s", tutti_algorithm_name(plan->ran.algorithm));
}

tutti_status bench_measure(bench_arena *arena, const bench_options *options, const bench_operation *operation,
                           size_t bytes, bench_row *row) {
    row_plan plan;
    long iterations;
    int batch;
    plan_row(arena, options, operation, bytes, &plan);
    for (size_t slot = plan.slots; slot-- > 0;) {
        aim(arena, &plan, slot);
        if (operation->shape != BENCH_NOTHING)
            fill_input(arena, &plan, 0);
    }
    tutti_status status = choose_length(arena, &plan, &iterations, &batch);
    if (status == TUTTI_OK)
        status = measure(arena, &plan, batch, &iterations);
    if (status != TUTTI_OK)
        return status;
    describe(arena, &plan, row);
    static const tutti_reduction across[] = { 0, TUTTI_AVG, TUTTI_MIN, TUTTI_MAX };
    double *times = arena->times;
    if (options->across != 0) {
        times = arena->combined;
        status = tutti_reduce(arena->group, arena->times, times, (size_t)iterations, TUTTI_F64, across[options->across],
                              0, NULL);
    }
    if (status == TUTTI_OK && options->check && operation->expect != NULL)
        status = check_row(arena, &plan, &row->wrong);
    if (status != TUTTI_OK || arena->rank != 0)
        return status;
    row->iterations = iterations;
    row->batch = batch;
    row->rounds = 1;
    summarise(times, iterations, row);
    bench_bandwidth(operation, row);
    return TUTTI_OK;
}

void bench_bandwidth(const bench_operation *operation, bench_row *row) {
    if (operation->bus_factor == NULL || row->p50 <= 0)
        return;
    row->algbw = (double)row->bytes / row->p50 / 1e3;
    row->busbw = row->algbw * operation->bus_factor(row->ranks);
}
