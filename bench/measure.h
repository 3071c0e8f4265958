/* SPDX-License-Identifier: Apache-2.0
 *
 * What benches share: the time, the median of figures, and an end where a call fails.
 */
#ifndef BENCH_MEASURE_H
#define BENCH_MEASURE_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <tutti/status.h>

/* In seconds. */
static inline double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static inline void check(tutti_status status) {
    if (status == TUTTI_OK)
        return;
    fprintf(stderr, "%s\n", tutti_error_message());
    exit(1);
}

static inline int by_size(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return difference < 0 ? -1 : difference > 0;
}

/* Sorts the figures. */
static inline double median(double *figures, int count) {
    qsort(figures, (size_t)count, sizeof *figures, by_size);
    return figures[count / 2];
}

#endif
