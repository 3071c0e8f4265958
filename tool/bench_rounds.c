/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti bench`: all rows, in rounds.
 *
 * A machine has moods that last longer than a row: another program runs for a second, a clock rate changes. So rows are
 * measured in several rounds, each round from the first row to the last. The median of a row is that of its rounds'
 * medians, and the least and the largest of these say how much of a difference is noise.
 */
#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "bench.h"

/* ---- progress ---- */

void bench_progress(bench_meter *meter, long done, long total, const char *text) {
    int64_t now = tu_clock_now();
    if (meter->begin_ns == 0)
        meter->begin_ns = meter->shown_ns = now;
    double spent = (double)(now - meter->begin_ns) / 1e9;
    long left = done > 0 ? lround(spent / (double)done * (double)(total - done)) : -1;
    bool terminal = isatty(STDERR_FILENO);
    if (!terminal && now - meter->shown_ns < 10 * TU_SECOND) /* a line now and then for a log */
        return;
    meter->shown_ns = now;
    fprintf(stderr, "%s%3ld %% %s", terminal ? "\r" : "tutti bench: ", 100 * done / (total > 0 ? total : 1), text);
    if (left >= 0)
        fprintf(stderr, ", %ld s left", left);
    fputs(terminal ? "\033[K" : "\n", stderr);
}

void bench_progress_done(void) {
    if (isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

/* ---- rows ---- */

/* What is measured: the rows of a round, in order. */
typedef struct step {
    const bench_operation *operation;
    size_t bytes;
    bool first; /* of its operation */
} step;

size_t bench_next_size(const bench_options *options, size_t bytes) {
    if (options->step > 0)
        return bytes + options->step;
    size_t next = (size_t)((double)bytes * options->factor);
    return next > bytes ? next : bytes + 1;
}

static int list_steps(const bench_options *options, int size, step *steps) {
    int count = 0;
    for (int i = 0; i < options->operation_count; i++) {
        const bench_operation *operation = options->operations[i];
        size_t last = SIZE_MAX;
        for (size_t bytes = options->begin; bytes <= options->end; bytes = bench_next_size(options, bytes)) {
            size_t elements = bench_count(operation, bytes, options->dtype, size);
            size_t made = bench_bytes(operation, elements, options->dtype, size);
            if (made == last) /* small sizes round to the same whole elements */
                continue;
            if (count == BENCH_ROWS)
                return count;
            steps[count++] = (step){ operation, bytes, last == SIZE_MAX };
            last = made;
            if (operation->shape == BENCH_NOTHING)
                break;
        }
    }
    return count;
}

/* Another round of the same row. */
static void merge(const bench_operation *operation, const bench_row *round, bench_row *row) {
    double medians[BENCH_ROUNDS];
    if (row->rounds == BENCH_ROUNDS)
        return;
    row->medians[row->rounds++] = round->p50;
    memcpy(medians, row->medians, sizeof medians);
    row->p50 = bench_median(medians, row->rounds);
    row->low = medians[0];
    row->high = medians[row->rounds - 1];
    row->min = fmin(row->min, round->min);
    row->max = fmax(row->max, round->max);
    row->avg += (round->avg - row->avg) / row->rounds;
    row->p99 += (round->p99 - row->p99) / row->rounds;
    row->iterations += round->iterations;
    row->wrong = round->wrong > row->wrong ? round->wrong : row->wrong;
    bench_bandwidth(operation, row);
}

/* One round over the chosen steps (NULL: all of them). */
static tutti_status run_round(bench_arena *arena, const bench_job *job, const step *steps, int count,
                              const uint8_t *chosen, bool reports, bench_meter *meter) {
    bench_options options = *job->options;
    options.seconds /= options.rounds;
    for (int i = 0; i < count; i++) {
        bench_row round, *row = &job->results->rows[i];
        char text[64], bytes[32];
        if (chosen != NULL && !chosen[i])
            continue;
        bench_bytes_text(steps[i].bytes, bytes, sizeof bytes);
        snprintf(text, sizeof text, "%s %s", steps[i].operation->name, bytes);
        if (reports && (options.rounds > 1 || isatty(STDERR_FILENO))) /* in one round the rows themselves tell */
            bench_progress(meter, meter->done, meter->total, text);
        meter->done++;
        tutti_status status = bench_measure(arena, &options, steps[i].operation, steps[i].bytes, &round);
        if (status != TUTTI_OK)
            return status;
        if (!reports)
            continue;
        if (i >= job->results->count) {
            *row = round;
            row->medians[0] = round.p50;
            job->results->count = i + 1;
        } else {
            merge(steps[i].operation, &round, row);
        }
        if (options.rounds == 1 && chosen == NULL && options.format == BENCH_TEXT) {
            bench_progress_done();
            bench_report_row(stdout, row, steps[i].first);
        }
    }
    return TUTTI_OK;
}

/* Rows that seem to be slower than the baseline get as many rounds again, and once more: a bad moment passes. */
static tutti_status look_again(bench_arena *arena, tutti_group *group, const bench_job *job, const step *steps,
                               int count, bool reports) {
    uint8_t *suspects = calloc((size_t)count, 1);
    if (suspects == NULL)
        return tu_error_memory("the list of suspects", (size_t)count);
    tutti_status status = TUTTI_OK;
    for (int again = 0; again < 2 && status == TUTTI_OK; again++) {
        int found = reports ? bench_suspects(job, suspects) : 0;
        bench_meter meter = { .total = (long)found * job->options->rounds };
        status = tutti_broadcast(group, suspects, suspects, (size_t)count, TUTTI_U8, 0, NULL);
        for (int round = 0; round < job->options->rounds && status == TUTTI_OK; round++)
            status = run_round(arena, job, steps, count, suspects, reports, &meter);
    }
    free(suspects);
    return status;
}

static tutti_status run_rounds(bench_arena *arena, tutti_world *world, const bench_job *job) {
    step *steps = calloc(BENCH_ROWS, sizeof *steps);
    if (steps == NULL)
        return tu_error_memory("the list of rows", BENCH_ROWS * sizeof *steps);
    const bench_options *options = job->options;
    bool reports = tutti_world_rank(world) == 0;
    int count = list_steps(options, tutti_world_size(world), steps);
    bench_meter meter = { .total = (long)count * options->rounds };
    tutti_status status = TUTTI_OK;
    for (int round = 0; round < options->rounds && status == TUTTI_OK; round++)
        status = run_round(arena, job, steps, count, NULL, reports, &meter);
    if (status == TUTTI_OK && options->baseline != NULL && options->rounds > 1)
        status = look_again(arena, tutti_world_group(world), job, steps, count, reports);
    if (reports)
        bench_progress_done();
    for (int i = 0; i < count && reports && status == TUTTI_OK; i++) {
        if (options->rounds > 1 && options->format == BENCH_TEXT)
            bench_report_row(stdout, &job->results->rows[i], steps[i].first);
    }
    free(steps);
    return status;
}

/* ---- a rank ---- */

static tutti_status check_ranks(const bench_options *options, int size) {
    for (int i = 0; i < options->operation_count; i++) {
        if (size < options->operations[i]->least_ranks)
            return tu_error(TUTTI_ERROR_ARGUMENT, "%s needs at least %d ranks; this job has %d",
                            options->operations[i]->name, options->operations[i]->least_ranks, size);
    }
    if (options->root >= size)
        return tu_error(TUTTI_ERROR_RANGE, "root %d must be in [0, %d)", options->root, size);
    return TUTTI_OK;
}

tutti_status bench_rank_main(tutti_world *world, void *argument) {
    const bench_job *job = argument;
    int rank = tutti_world_rank(world);
    if (job->bindings != NULL &&
        sched_setaffinity(0, sizeof job->bindings[rank].cpus, (const cpu_set_t *)job->bindings[rank].cpus) != 0)
        return tu_error_system(errno, "binding rank %d to %s", rank, job->bindings[rank].text);
    tutti_status status = check_ranks(job->options, tutti_world_size(world));
    if (status != TUTTI_OK)
        return status;
    if (job->options->tune != NULL)
        return bench_tune(world, job->options);
    if (rank == 0) {
        job->results->ranks = tutti_world_size(world);
        (void)getloadavg(&job->results->load, 1); /* 0 where it is not told */
        snprintf(job->results->launcher, sizeof job->results->launcher, "%s", tutti_world_launcher(world));
        if (job->options->format == BENCH_TEXT)
            bench_report_head(stdout, job, tutti_world_size(world), tutti_world_launcher(world));
    }
    bench_arena *arena;
    status = bench_arena_make(world, job->options, &arena);
    if (status != TUTTI_OK)
        return status;
    status = run_rounds(arena, world, job);
    if (status == TUTTI_OK)
        status = tutti_barrier(tutti_world_group(world), NULL);
    bench_arena_free(arena);
    return status;
}
