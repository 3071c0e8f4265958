/* SPDX-License-Identifier: Apache-2.0
 *
 * The flight recorder: the last 2048 operations of each rank, always on, in shared memory; and counters per operation.
 *
 * Nothing need be done to have it. `tutti ps` and `tutti trace` read it from outside while the job runs; `tutti run
 * --log-dir` and TUTTI_TRACE_DIR write it when an operation fails; these functions read it from within.
 */
#ifndef TUTTI_TRACE_H
#define TUTTI_TRACE_H

#include <stddef.h>
#include <stdint.h>

#include <tutti/status.h>
#include <tutti/world.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes this rank's recorder, as JSON, to "folder/tutti-<job>-rank-<rank>.json", for `tutti trace folder` and for
 * people. Local. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_trace_write(tutti_world *world, const char *folder);

/* The same as text: *text is freed with tutti_free. Local. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_trace_text(tutti_world *world, char **text);

#define TUTTI_COUNTER_ALGORITHMS 12

/* What this rank has done so far. Set `size` before the call (TUTTI_COUNTERS_INIT does). */
typedef struct tutti_counters {
    size_t size;
    uint64_t calls; /* that have ended, failures included */
    uint64_t failures;
    uint64_t bytes;                                  /* count times the element's size */
    int64_t time_ns;                                 /* spent in them */
    uint64_t by_algorithm[TUTTI_COUNTER_ALGORITHMS]; /* calls, by tutti_algorithm; 0 where there is no choice */
} tutti_counters;
#define TUTTI_COUNTERS_INIT TUTTI_DEFAULTS(tutti_counters)
/* TUTTI_COUNTERS_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_counters_init(tutti_counters *counters, size_t size);

/* Of one operation, named as in the API without "tutti_": "all_reduce". TUTTI_ERROR_NOT_FOUND for a name that is none.
 * Local; while other threads are in calls it is as of a moment ago. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_trace_counters(tutti_world *world, const char *operation,
                                                          tutti_counters *counters);

#ifdef __cplusplus
}
#endif
#endif
