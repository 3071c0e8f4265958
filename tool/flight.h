/* SPDX-License-Identifier: Apache-2.0
 *
 * What ranks did and do, as `tutti ps` and `tutti trace` see it: copies of flight recorders, from running jobs or from
 * files, and what follows from them.
 */
#ifndef TUTTI_TOOL_FLIGHT_H
#define TUTTI_TOOL_FLIGHT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "job/inspect.h"
#include "job/recorder.h"

/* One rank's recorder. */
typedef struct flight {
    char job[TU_ID_BYTES];
    char world[TU_NAME_BYTES];
    char host[64];
    int rank, size; /* in the world */
    int pid;
    bool live;         /* from a running job, not from a file */
    uint32_t state;    /* TU_SLOT_EMPTY or tu_rank_state */
    bool status_known; /* its parent published how it ended */
    int wait_status;
    bool has_process;        /* `process` is filled: of a live one that still exists */
    tu_process_view process; /* the thread that is in the operation, else the one that opened the world */
    int64_t now_ns;          /* when the copy was made, on the host's clock */
    int64_t wall_minus_clock_ns;
    bool compared;              /* of a file: its host's clock with that of the first launcher … */
    int64_t ahead_ns, error_ns; /* … of which it is so far ahead */
    int64_t opened_ns;
    tu_record_view *entries; /* oldest first */
    size_t entry_count;
    tu_recorder_group_view *groups;
    size_t group_count;
    tu_counters counters[TU_OPERATION_COUNT];
} flight;

/* The ranks of one job, by rank. */
typedef struct flight_job {
    flight *flights;
    size_t count;
} flight_job;

typedef struct flight_list {
    flight_job *jobs;
    size_t count;
} flight_list;

/* Each adds to the list. The first adds the running jobs whose id begins with `prefix` ("" all). The second reads one
 * file, or all files of a folder. 0, or 1 after printing why not. */
int flight_add_live(flight_list *list, const char *prefix);
int flight_add_path(flight_list *list, const char *path);

/* Puts the files of a job over hosts on one clock, where their launchers have compared theirs; says so. NULL: silently.
 */
void flight_align_files(flight_list *list, FILE *file);

/* Another host's clock, as it was measured from here. */
typedef struct flight_clock {
    char host[256];   /* as it was named */
    int64_t ahead_ns; /* of this host's */
    int64_t error_ns; /* at most */
} flight_clock;
#define FLIGHT_HOSTS 4096
/* The same for running jobs of other hosts, a comma list of them: flight_hosts.c. Their times are then on this host's
 * clock, by way of wall_minus_clock_ns. */
int flight_add_hosts(flight_list *list, const char *hosts, const char *rsh, const char *prefix, flight_clock *clocks,
                     int room, int *count);
/* What that asks for there: answers questions on the standard input until it ends. */
int flight_serve(void);
/* Every rank of the running jobs, one behind the other: a line "flight STATE CPU BYTES", and the recorder. */
int flight_write_live(FILE *file, const char *prefix);
/* One recorder of a running job on another host. */
struct json;
int flight_add_json(flight_list *list, const struct json *from, const flight_clock *clock, char state, int cpu);
void flight_free(flight_list *list);

const char *flight_group_name(const flight *copy, uint64_t key);
/* Whether its ring has wrapped: what came before the oldest entry is gone. */
bool flight_forgot(const flight *copy);
/* "all_reduce 17 of group 0 (f32 sum, 4096 elements)". */
void flight_text(const flight *copy, const tu_record_view *entry, char *text, size_t bytes);
/* The newest entry that runs; NULL when there is none. */
const tu_record_view *flight_current(const flight *copy);
/* The newest ended entry of a group (0: of any); NULL when there is none. */
const tu_record_view *flight_last(const flight *copy, uint64_t group_key);
/* What the rank knows about a group; NULL when it is not a member. */
const tu_recorder_group_view *flight_group(const flight *copy, uint64_t key);

/* Members of the entry's group that have not begun it: flags by world rank, `size` of them. Returns how many. */
int flight_missing(const flight_job *job, const tu_record_view *entry, bool *missing, int size);

/* "is computing: running on CPU 3, in no operation of Tutti", "was killed by signal 9 (Killed)", "is in barrier 3 of
 * group dp for 4.2 s": what a rank does instead of coming. */
void flight_doing(const flight *copy, char *text, size_t bytes);

/* On how many hosts the ranks of a job are. */
int flight_host_count(const flight_job *job);

/* "3.2 s", "15 ms", "2 min 5 s". */
void flight_duration(int64_t ns, char *text, size_t bytes);

/* The first point at which the ranks of the job went apart, in words; false when they did not. In divergence.c. */
bool flight_divergence(const flight_job *job, char *text, size_t bytes);

#endif
