/* SPDX-License-Identifier: Apache-2.0
 *
 * A flight recorder as a file, for people and for `tutti trace`: JSON, one line per entry.
 *
 *     {"tutti_flight_recorder": 1, "job": "…", "world": "default", "rank": 2, "size": 4, "pid": 4711, …,
 *      "groups": [{"key": "…", "name": "0", "size": 4, "ranks": [0, 1, 2, 3]}],
 *      "entries": [{"id": 1, "group": "…", "operation": "all_reduce", "sequence": 1, …}],
 *      "counters": [{"operation": "all_reduce", "calls": 17, …}]}
 *
 * Times are nanoseconds on the host's monotonic clock; "wall_minus_clock_ns" turns them into time of day, as far as
 * that host knows it. Of a job over hosts whose launchers have compared their clocks, "clock_ahead_ns" is how far this
 * host's is ahead of that of the first launcher, to "clock_error_ns".
 */
#ifndef TU_JOB_DUMP_H
#define TU_JOB_DUMP_H

#include <stdio.h>

#include "job/page.h"

#define TU_DUMP_VERSION 1

typedef struct tu_dump_clock {
    int64_t ahead_ns, error_ns;
} tu_dump_clock;

/* Writes the recorder of one job rank. clock: NULL where nobody has compared clocks. */
tutti_status tu_dump_write(const tu_page *page, int rank, const tu_recorder *recorder, const tu_dump_clock *clock,
                           FILE *file);

/* The same to "folder/tutti-<job>-rank-<world rank>.json", replaced as a whole. */
tutti_status tu_dump_file(const tu_page *page, int rank, const tu_recorder *recorder, const tu_dump_clock *clock,
                          const char *folder);

/* A text as JSON, quotes included. */
void tu_json_string(FILE *file, const char *text);

#endif
