/* SPDX-License-Identifier: Apache-2.0
 *
 * A flight recorder as a file, for people and for `tutti trace`: JSON, one line per entry.
 *
 *     {"tutti_flight_recorder": 1, "job": "…", "world": "default", "rank": 2, "size": 4, "pid": 4711, …,
 *      "groups": [{"key": "…", "name": "0", "size": 4, "ranks": [0, 1, 2, 3]}],
 *      "entries": [{"id": 1, "group": "…", "operation": "all_reduce", "sequence": 1, …}],
 *      "counters": [{"operation": "all_reduce", "calls": 17, …}]}
 *
 * Times are nanoseconds on the host's monotonic clock; "wall_minus_clock_ns" turns them into time of day.
 */
#ifndef TU_JOB_DUMP_H
#define TU_JOB_DUMP_H

#include <stdio.h>

#include "job/page.h"

#define TU_DUMP_VERSION 1

/* Writes the recorder of one job rank. */
tutti_status tu_dump_write(const tu_page *page, int rank, const tu_recorder *recorder, FILE *file);

/* The same to "folder/tutti-<job>-rank-<world rank>.json", replaced as a whole. */
tutti_status tu_dump_file(const tu_page *page, int rank, const tu_recorder *recorder, const char *folder);

/* A text as JSON, quotes included. */
void tu_json_string(FILE *file, const char *text);

#endif
