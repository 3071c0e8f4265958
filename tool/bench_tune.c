/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti bench --tune FILE`: measures every algorithm of every collective over the sizes, on symmetric and on private
 * buffers, and writes the table that TUTTI_TUNING reads.
 *
 * The algorithms take turns in several rounds, so that a bad moment of the machine hits them all. One takes over from a
 * size on when its median is at least a twentieth less than that of the one before it, and when even its slowest
 * round was faster than the other's fastest; what is closer than that is noise and changes nothing.
 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "bench.h"

#define FIRST_ALGORITHM TUTTI_ALGORITHM_INLINE
#define LAST_ALGORITHM TUTTI_ALGORITHM_TREE
#define WORTH_IT 0.95

/* The operations that the table knows. */
static const char *const tuned[] = { "all_reduce", "reduce",  "reduce_scatter", "all_gather", "broadcast",
                                     "gather",     "scatter", "all_to_all",     "permute" };

#define TUNED (sizeof tuned / sizeof tuned[0])

typedef struct tuner {
    const bench_options *options;
    bench_arena *arenas[2]; /* symmetric, private */
    int rank, size;
    FILE *file; /* of rank 0 */
    bench_meter meter;
    int lines, within_noise;
} tuner;

/* Bytes by which the table is searched: of one rank's input. */
static size_t deciding_bytes(const bench_operation *operation, const bench_row *row, int size) {
    return bench_in_elements(operation, row->count, size) * tutti_dtype_size(row->dtype);
}

/* The medians of one algorithm at one size. */
typedef struct timing {
    bool runs;     /* this operation has it at this size */
    double median; /* of the rounds */
    double low, high;
    double rounds[BENCH_ROUNDS]; /* geometric means of symmetric and private buffers */
} timing;

/* One round of one algorithm. *runs, alike on all ranks, says whether the operation has it at this size; only rank 0
 * has times. */
static tutti_status time_of(const tuner *tuner, const bench_operation *operation, size_t bytes,
                            tutti_algorithm algorithm, bool *runs, double *time, size_t *deciding) {
    bench_options one = *tuner->options;
    double product = 1;
    one.algorithm = algorithm;
    one.seconds /= one.rounds;
    *runs = false;
    for (int kind = 0; kind < 2; kind++) {
        bench_row row;
        one.private_buffers = kind == 1;
        tutti_status status = bench_measure(tuner->arenas[kind], &one, operation, bytes, &row);
        if (status == TUTTI_ERROR_UNSUPPORTED ||
            status == TUTTI_ERROR_ARGUMENT) /* the operation does not have it: alike on all ranks */
            return TUTTI_OK;
        if (status != TUTTI_OK)
            return status;
        if (strcmp(row.algorithm, tutti_algorithm_name(algorithm)) != 0) /* it gave way to another */
            return TUTTI_OK;
        product *= row.p50;
        *deciding = deciding_bytes(operation, &row, tuner->size);
    }
    *runs = true;
    *time = sqrt(product);
    return TUTTI_OK;
}

/* All algorithms at one size, in turns. An algorithm that does not run in the first round does not run at all. */
static tutti_status time_all(const tuner *tuner, const bench_operation *operation, size_t bytes,
                             timing timings[LAST_ALGORITHM + 1], size_t *deciding) {
    int rounds = tuner->options->rounds;
    memset(timings, 0, (LAST_ALGORITHM + 1) * sizeof *timings);
    for (int round = 0; round < rounds; round++) {
        for (int i = FIRST_ALGORITHM; i <= LAST_ALGORITHM; i++) {
            if (round > 0 && !timings[i].runs)
                continue;
            tutti_status status = time_of(tuner, operation, bytes, (tutti_algorithm)i, &timings[i].runs,
                                          &timings[i].rounds[round], deciding);
            if (status != TUTTI_OK)
                return status;
        }
    }
    for (int i = FIRST_ALGORITHM; i <= LAST_ALGORITHM; i++) {
        if (!timings[i].runs)
            continue;
        timings[i].median = bench_median(timings[i].rounds, rounds);
        timings[i].low = timings[i].rounds[0];
        timings[i].high = timings[i].rounds[rounds - 1];
    }
    return TUTTI_OK;
}

static int fastest(const timing timings[LAST_ALGORITHM + 1]) {
    int best = TUTTI_ALGORITHM_AUTO;
    for (int i = FIRST_ALGORITHM; i <= LAST_ALGORITHM; i++)
        if (timings[i].runs && (best == TUTTI_ALGORITHM_AUTO || timings[i].median < timings[best].median))
            best = i;
    return best;
}

static bool takes_over(const timing *best, const timing *current) {
    return !current->runs || (best->median < current->median * WORTH_IT && best->high < current->low);
}

static tutti_status tune_operation(tuner *tuner, const bench_operation *operation) {
    int current = TUTTI_ALGORITHM_AUTO;
    const bench_options *options = tuner->options;
    for (size_t bytes = options->begin; bytes <= options->end; bytes = bench_next_size(options, bytes)) {
        timing timings[LAST_ALGORITHM + 1];
        size_t deciding = 0;
        char text[64], size_text[32];
        bench_bytes_text(bytes, size_text, sizeof size_text);
        snprintf(text, sizeof text, "tuning %s, %s", operation->name, size_text);
        if (tuner->rank == 0)
            bench_progress(&tuner->meter, tuner->meter.done++, tuner->meter.total, text);
        tutti_status status = time_all(tuner, operation, bytes, timings, &deciding);
        if (status != TUTTI_OK)
            return status;
        int best = fastest(timings);
        if (tuner->rank != 0 || best == TUTTI_ALGORITHM_AUTO || best == current)
            continue;
        if (!takes_over(&timings[best], &timings[current])) {
            tuner->within_noise++;
            continue;
        }
        fprintf(tuner->file, "%s %d %zu %s\n", operation->name, tuner->size,
                current == TUTTI_ALGORITHM_AUTO ? 0 : deciding, tutti_algorithm_name((tutti_algorithm)best));
        tuner->lines++;
        current = best;
    }
    return TUTTI_OK;
}

static long count_sizes(const bench_options *options) {
    long count = 0;
    for (size_t bytes = options->begin; bytes <= options->end; bytes = bench_next_size(options, bytes))
        count++;
    return count;
}

tutti_status bench_tune(tutti_world *world, const bench_options *options) {
    tuner tuner = { .options = options, .rank = tutti_world_rank(world), .size = tutti_world_size(world) };
    bench_options kinds[2] = { *options, *options };
    kinds[0].private_buffers = false;
    kinds[1].private_buffers = true;
    tuner.meter.total = (long)TUNED * count_sizes(options);
    tutti_status status = TUTTI_OK;
    if (tuner.rank == 0 && (tuner.file = fopen(options->tune, "we")) == NULL)
        return tu_error_system(errno, "writing %s", options->tune);
    for (int kind = 0; kind < 2 && status == TUTTI_OK; kind++)
        status = bench_arena_make(world, &kinds[kind], &tuner.arenas[kind]);
    if (tuner.rank == 0)
        fprintf(tuner.file,
                "# Made by tutti bench --tune with %d ranks in %d rounds, tutti %s. Use: TUTTI_TUNING=%s\n# operation, "
                "ranks, from bytes on, algorithm\n",
                tuner.size, options->rounds, tutti_version(), options->tune);
    for (size_t i = 0; i < TUNED && status == TUTTI_OK; i++)
        status = tune_operation(&tuner, bench_operation_find(tuned[i]));
    for (int kind = 0; kind < 2; kind++) {
        if (tuner.arenas[kind] != NULL)
            bench_arena_free(tuner.arenas[kind]);
    }
    if (tuner.rank != 0)
        return status;
    bench_progress_done();
    if (fclose(tuner.file) != 0 && status == TUTTI_OK)
        status = tu_error_system(errno, "writing %s", options->tune);
    if (status == TUTTI_OK)
        printf("%s: %d lines; %d times the fastest was so by less than the noise and was not taken\n", options->tune,
               tuner.lines, tuner.within_noise);
    return status;
}
