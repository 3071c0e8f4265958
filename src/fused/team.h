/* SPDX-License-Identifier: Apache-2.0
 *
 * The threads of one rank in a fused operation: while one copies, signals and waits, the others multiply.
 *
 *     tu_team_add(&team, &job);                           (rows of a product: any thread may do them)
 *     status = tu_team_run(&team, communicate, &run);     (one thread communicates, the others multiply)
 *
 * A run is one loop of the process's pool (base/pool.h): there are no threads but those that compute anyway. One thread
 * communicates, in the order in which it would without others, so that nothing can lock up that could not lock up
 * without threads, and every wait has the deadline that it has there. It is the caller's, which then helps. A product
 * of a library that has threads of its own is left to the caller's thread, which those threads belong to; then a thread
 * of the pool communicates. Nobody waits for a thread to come: one that finds nothing to do leaves, and where none of
 * the pool is free the caller's does everything.
 *
 * Which rows a job has follows from sizes and the number of threads, never from who comes first.
 */
#ifndef TU_FUSED_TEAM_H
#define TU_FUSED_TEAM_H

#include <pthread.h>
#include <stdatomic.h>

#include <tutti/group.h>

#include "base/error.h"
#include "tensor/thread.h"

/* One tensor of a rank's shards, dense in memory. */
typedef struct tu_shard {
    const void *data;
    bool turned; /* a matrix that lies column by column */
    bool staged; /* another rank has copied it there, past the caches */
} tu_shard;

/* Rows of a product. */
typedef struct tu_team_job {
    int first, ranks;   /* whose they are: neighbours, or one rank */
    int64_t row, rows;  /* which of them */
    tu_shard shards[2]; /* of a gather, where the rows are one rank's */
    char *to;           /* of a scatter */
    int group;          /* jobs that tu_team_is_done asks for together */
    int after;          /* the job that must be done before; -1: none */
    int state;          /* the team's, under its lock */
} tu_team_job;

typedef tutti_status tu_team_work(void *context, const tu_team_job *job);
typedef tutti_status tu_team_talk(void *context);

typedef struct tu_team {
    tutti_group *group; /* in whose name its work is recorded; NULL: in nobody's */
    int threads;        /* that may work at once, the caller's included */
    tu_team_work *work; /* what a job is */
    void *context;
    bool by_library;        /* which has threads of its own: the caller's thread does all jobs */
    _Atomic int64_t *apart; /* counts jobs that one thread is at while another communicates */

    pthread_mutex_t lock; /* of all below */
    const tu_thread *caller;
    tu_team_job *jobs; /* NULL: there is no team */
    int count, room;
    int next;     /* all jobs before it are taken */
    int running;  /* jobs that a thread is at */
    int visitors; /* threads of the pool that are here */
    bool talks;   /* one communicates now, and is not at a job */
    tutti_status status;
    tutti_error_copy error; /* of the first job that failed */
} tu_team;

/* With room for so many jobs between two resets; the fields before the lock are set. */
tutti_status tu_team_open(tu_team *team, int room);
void tu_team_close(tu_team *team);
static inline bool tu_team_is_open(const tu_team *team) {
    return team->jobs != NULL;
}

/* Forgets all jobs, which are done. */
void tu_team_reset(tu_team *team);
/* Adds a job, before a run or inside it, and returns its number. */
int tu_team_add(tu_team *team, const tu_team_job *job);

/* Inside a run, by the thread that communicates: does a job, false where it has none to do and shall return; whether
 * all jobs of a group are done. */
bool tu_team_help(tu_team *team);
bool tu_team_is_done(tu_team *team, int group);

/* Calls `talk` on one thread while others do jobs; returns when all jobs are done, those that were added meanwhile,
 * too. The error, in this thread's words, is that of talk, else of the first job that failed, behind which none is
 * begun. NULL: jobs alone. */
tutti_status tu_team_run(tu_team *team, tu_team_talk *talk, void *context);

#endif
