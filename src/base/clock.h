/* SPDX-License-Identifier: Apache-2.0
 *
 * Time: one monotonic clock in nanoseconds, and deadlines on it.
 */
#ifndef TU_BASE_CLOCK_H
#define TU_BASE_CLOCK_H

#include <stdint.h>

#include <tutti/status.h>

#define TU_MILLISECOND INT64_C(1000000)
#define TU_SECOND INT64_C(1000000000)

int64_t tu_clock_now(void);  /* CLOCK_MONOTONIC, the same for all processes of the host */
int64_t tu_clock_wall(void); /* CLOCK_REALTIME, for logs and traces */

/* now + timeout_ns, without overflow. timeout_ns must be > 0. */
int64_t tu_deadline(int64_t timeout_ns);
int64_t tu_deadline_from(int64_t start, int64_t timeout_ns); /* start + timeout_ns */

/* What is left, at least 0. */
int64_t tu_deadline_left(int64_t deadline);

/* A timeout for messages: "1 ns", "20 us", "150 ms", "1.5 s". */
typedef struct tu_duration {
    char text[24];
} tu_duration;
tu_duration tu_duration_of(int64_t ns);

/* The first of the given timeouts that is not 0; negative is TUTTI_ERROR_ARGUMENT naming `what` (NULL: nothing). */
tutti_status tu_timeout_choose(const char *what, int64_t call, int64_t group, int64_t world, int64_t *timeout_ns);

#endif
