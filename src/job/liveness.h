/* SPDX-License-Identifier: Apache-2.0
 *
 * Who is alive. A rank's slot in the job segment has a state; a rank that vanished is found by whoever looks: its
 * keeper's robust mutex says EOWNERDEAD, or its socket is at end-of-file. The finder marks the slot DEAD, once, counts
 * it in the header's `departures`, and rings every bell.
 */
#ifndef TU_JOB_LIVENESS_H
#define TU_JOB_LIVENESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "job/job.h"

typedef enum tu_rank_state {
    TU_RANK_JOINING = 1, /* has not finished opening */
    TU_RANK_ALIVE = 2,
    TU_RANK_CLOSED = 3, /* closed its world properly */
    TU_RANK_DEAD = 4    /* vanished: killed, exited, exec; a thread-rank whose main returned without closing */
} tu_rank_state;

/* As last seen; one load. */
tu_rank_state tu_rank_state_of(const tu_job *job, int rank);

/* Looks, and returns the state; costs a trylock. Also cheap enough for a check every millisecond. */
tu_rank_state tu_rank_probe(tu_job *job, int rank);

/* How many ranks have been marked dead or closed so far: one load, for a look before each operation. */
uint32_t tu_job_departures(const tu_job *job);

typedef struct tu_death {
    int rank; /* job rank */
    int world_rank;
    int pid;
    bool known;    /* exit status or signal known by now */
    int exit_code; /* valid when known and signal is 0 */
    int signal;    /* 0 when it exited */
    char text[256]; /* "rank 2 (pid 4711) was killed by signal 9 (Killed)", "… called exec", "… exited with status 3",
                       "… died; only its parent (pid 4700, mpirun) knows its exit status" */
} tu_death;

/* Describes a rank that is DEAD or CLOSED, with its exit status or signal where anybody may know it by now. Never
 * waits. */
void tu_death_describe(tu_job *job, int rank, tu_death *death);

/* What is said of a rank that closed its world while it was waited for, wherever it was. */
#define TU_LEFT_EARLY                                                                                   \
    ". It left while others still counted on it: do all ranks make the same calls? tutti_world_finish " \
    "leaves together"

/* Writes the error for a departed rank: TUTTI_ERROR_DEAD or TUTTI_ERROR_GONE; returns it. `doing` is "in all_reduce 17
 * of group 0". */
tutti_status tu_death_error(tu_job *job, int rank, const char *doing);

/* For tutti_spawn's threads: this rank's main returned without closing its world. */
void tu_job_mark_dead(tu_job *job, const char *why);

/* For whoever is the parent of ranks (tutti run, tutti_spawn): writes the wait status of `pid` into the slots of all
 * jobs found among the descriptors of `survivors`. */
void tu_death_publish(int pid, int wait_status, const int *survivors, int count);

#endif
