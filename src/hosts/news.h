/* SPDX-License-Identifier: Apache-2.0
 *
 * The news page: what the launcher of a host (its agent) tells the ranks it started about the ranks of all hosts.
 *
 * A sealed memfd that the agent alone can write and that its ranks inherit and map for reading. It says on which node
 * each rank is, which have ended and how, which nodes are lost, and when the agent was last alive. Ranks look at it
 * while they wait, as they look at the ranks of their own host: that costs no thread, no connection and no message, at
 * any number of ranks. On one host, with --survive, the launcher has such a page too, for ranks that die before they
 * are seen in the memory of the job.
 *
 * A rank's own process may outlive its agent's attention: when the agent has been silent for as long as other hosts
 * wait for it, they have given this host up, so a rank that sees it counts everybody else as lost.
 */
#ifndef TU_HOSTS_NEWS_H
#define TU_HOSTS_NEWS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/status.h>

#include "base/error.h"

typedef enum tu_news_state {
    TU_NEWS_RUNS = 0,
    TU_NEWS_ENDED = 1, /* exited with status 0 */
    TU_NEWS_DEAD = 2,  /* killed, or exited with another status */
    TU_NEWS_LOST = 3   /* its node is out of reach: nobody knows what it does */
} tu_news_state;

typedef struct tu_news tu_news; /* one mapping of the page */

/* ---- ranks ---- */

/* Maps the page behind an inherited descriptor, which stays open, and checks it: `ranks` and `rank` must fit it. */
tutti_status tu_news_open(int descriptor, int rank, int ranks, tu_news **news);
/* NULL is allowed. */
void tu_news_close(tu_news *news);

/* How many ranks have departed so far: one load. */
uint32_t tu_news_departures(const tu_news *news);
/* What is known of a rank. A silent agent makes every rank of other nodes lost. */
tu_news_state tu_news_of(const tu_news *news, int rank);
/* When a departed rank's departure became known here, on tu_clock_now. */
int64_t tu_news_when(const tu_news *news, int rank);
/* "rank 5 on host-b (pid 4711) was killed by signal 9 (Killed)". */
void tu_news_text(const tu_news *news, int rank, char *text, size_t bytes);
int tu_news_node(const tu_news *news, int rank);
/* Whether the other hosts have given this one up, or will: its agent lost the others, or is silent. `why` says it. */
bool tu_news_cut_off(const tu_news *news, char *why, size_t bytes);

/* The agents have lost the one that held them together, and ask who else has: whether somebody takes its place, with
 * another store, is known in a moment. */
bool tu_news_electing(const tu_news *news);
/* The node whose store has taken the place of the job's first, and where it is; 0: none has. Grows. */
uint32_t tu_news_store(const tu_news *news, char *host, size_t bytes, int *port);

/* How far this host's clock (tu_clock_now) is ahead of that of the job's first launcher, and to what; false: nobody
 * knows. */
bool tu_news_clock(const tu_news *news, int64_t *ahead_ns, int64_t *error_ns);

/* ---- the agent ---- */

typedef struct tu_news_plan {
    int nodes, node;          /* how many, and which one this is; -1: none of them (a launcher without ranks) */
    const int *ranks;         /* [node]: how many ranks it has; rank numbers follow the nodes */
    int64_t silence_ns;       /* how long an agent may be silent */
    const char *const *hosts; /* [node]: names */
} tu_news_plan;

/* *descriptor can be opened again for reading (through /proc/self/fd) and for nothing else. */
tutti_status tu_news_create(const tu_news_plan *plan, tu_news **news, int *descriptor);
void tu_news_beat(tu_news *news);
/* How long the agent has been silent; for its guardian. */
int64_t tu_news_silence(const tu_news *news);
/* A rank has ended. Tells of a rank once; later calls for it do nothing. */
void tu_news_rank_ended(tu_news *news, int rank, int pid, int wait_status);
/* A node is out of reach: its ranks that have not ended are lost. */
void tu_news_node_lost(tu_news *news, int node, const char *why);
/* See tu_news_electing; ends with tu_news_moved or tu_news_alone. */
void tu_news_elect(tu_news *news);
void tu_news_moved(tu_news *news, int node, const char *host, int port);
/* The agent itself has lost the others: see tu_news_cut_off. */
void tu_news_alone(tu_news *news, const char *why);
/* See tu_news_clock. Whoever reads meanwhile finds the new difference with the old error, which is then larger. */
void tu_news_set_clock(tu_news *news, int64_t ahead_ns, int64_t error_ns);
int tu_news_wait_status(const tu_news *news, int rank); /* of one that is ENDED or DEAD */

#endif
