/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti bench --tune FILE`: measures every algorithm of every collective over the sizes, on symmetric and on private
 * buffers, and writes the table that TUTTI_TUNING reads. An algorithm takes over from a size on when it is at least a
 * twentieth faster there than the one before it.
 */
#include <errno.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "bench.h"

#define LAST_ALGORITHM TUTTI_ALGORITHM_TREE
#define WORTH_IT 0.95

/* The operations that the table knows. */
static const char *const tuned[] = { "all_reduce", "reduce",  "reduce_scatter", "all_gather", "broadcast",
                                     "gather",     "scatter", "all_to_all",     "permute" };

/* Bytes by which the table is searched: of one rank's input. */
static size_t deciding_bytes(const bench_operation *operation, const bench_row *row, int size) {
    return bench_in_elements(operation, row->count, size) * tutti_dtype_size(row->dtype);
}

/* The geometric mean of the medians on both kinds of buffers; 0 where this algorithm does not run at this size. */
static tutti_status time_of(bench_arena *const arenas[2], const bench_options *options,
                            const bench_operation *operation, size_t bytes, tutti_algorithm algorithm, double *time,
                            bench_row *row) {
    bench_options one = *options;
    double product = 1;
    one.algorithm = algorithm;
    *time = 0;
    for (int kind = 0; kind < 2; kind++) {
        one.private_buffers = kind == 1;
        tutti_status status = bench_measure(arenas[kind], &one, operation, bytes, row);
        if (status == TUTTI_ERROR_UNSUPPORTED ||
            status == TUTTI_ERROR_ARGUMENT) /* the operation does not have it: alike on all ranks */
            return TUTTI_OK;
        if (status != TUTTI_OK)
            return status;
        if (strcmp(row->algorithm, tutti_algorithm_name(algorithm)) != 0) /* it gave way to another */
            return TUTTI_OK;
        product *= row->p50;
    }
    *time = sqrt(product);
    return TUTTI_OK;
}

static tutti_status tune_operation(bench_arena *const arenas[2], const bench_options *options,
                                   const bench_operation *operation, int rank, int size, FILE *file) {
    tutti_algorithm current = TUTTI_ALGORITHM_AUTO;
    for (size_t bytes = options->begin; bytes <= options->end; bytes = (size_t)((double)bytes * options->factor)) {
        tutti_algorithm best = TUTTI_ALGORITHM_AUTO;
        double best_time = INFINITY, current_time = INFINITY;
        size_t deciding = 0;
        if (rank == 0 && isatty(STDERR_FILENO))
            fprintf(stderr, "\rtuning %s, %zu bytes …\033[K", operation->name, bytes);
        for (int a = TUTTI_ALGORITHM_INLINE; a <= LAST_ALGORITHM; a++) {
            double time;
            bench_row row;
            tutti_status status = time_of(arenas, options, operation, bytes, (tutti_algorithm)a, &time, &row);
            if (status != TUTTI_OK)
                return status;
            if (time <= 0)
                continue;
            deciding = deciding_bytes(operation, &row, size);
            if (time < best_time) {
                best_time = time;
                best = (tutti_algorithm)a;
            }
            if (a == (int)current)
                current_time = time;
        }
        if (best == TUTTI_ALGORITHM_AUTO || best == current || best_time > current_time * WORTH_IT)
            continue;
        if (rank == 0)
            fprintf(file, "%s %d %zu %s\n", operation->name, size, current == TUTTI_ALGORITHM_AUTO ? 0 : deciding,
                    tutti_algorithm_name(best));
        current = best;
    }
    return TUTTI_OK;
}

tutti_status bench_tune(tutti_world *world, const bench_options *options) {
    int rank = tutti_world_rank(world), size = tutti_world_size(world);
    bench_options kinds[2] = { *options, *options };
    kinds[0].private_buffers = false;
    kinds[1].private_buffers = true;
    bench_arena *arenas[2] = { NULL, NULL };
    FILE *file = NULL;
    tutti_status status = TUTTI_OK;
    if (rank == 0 && (file = fopen(options->tune, "we")) == NULL)
        return tu_error_system(errno, "writing %s", options->tune);
    for (int kind = 0; kind < 2 && status == TUTTI_OK; kind++)
        status = bench_arena_make(world, &kinds[kind], &arenas[kind]);
    if (rank == 0)
        fprintf(file,
                "# Made by tutti bench --tune with %d ranks, tutti %s. Use: TUTTI_TUNING=%s\n# operation, ranks, from "
                "bytes on, algorithm\n",
                size, tutti_version(), options->tune);
    for (size_t i = 0; i < sizeof tuned / sizeof tuned[0] && status == TUTTI_OK; i++)
        status = tune_operation(arenas, options, bench_operation_find(tuned[i]), rank, size, file);
    for (int kind = 0; kind < 2; kind++) {
        if (arenas[kind] != NULL)
            bench_arena_free(arenas[kind]);
    }
    if (rank == 0 && isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
    if (rank == 0 && fclose(file) != 0 && status == TUTTI_OK)
        status = tu_error_system(errno, "writing %s", options->tune);
    if (rank == 0 && status == TUTTI_OK)
        printf("%s\n", options->tune);
    return status;
}
