/* SPDX-License-Identifier: Apache-2.0
 *
 * Launchers of one job on several hosts: one agent per host. They meet at an address that one of them, the hub, serves;
 * then each starts its ranks, and a thread of each keeps talking:
 *
 *     hub ── agent of node 1        what ends anywhere is told everywhere, and put on the page that the ranks of each
 *      └──── agent of node 2        host read (hosts/news.h); signals go to all ranks; the hub decides which failure
 *                                   was the first, stops the others, and tells all what to exit with
 *
 * An agent whose link closes, or that is silent for TUTTI_HOST_TIMEOUT, is lost with its host. What is left goes on
 * where the user asked for it (--survive) and where more than half of the ranks are with the hub, or just half. Agents
 * that have lost the hub find another one among themselves, where they have more than half of the ranks
 * (agent_deputies.c); it has a store of its own. Who is in neither part stops its ranks. Nobody is in two, since an
 * agent that has lost the hub closes its link to it.
 */
#ifndef TUTTI_TOOL_AGENT_H
#define TUTTI_TOOL_AGENT_H

#include <stdbool.h>
#include <stdint.h>

#include "hosts/news.h"
#include "run.h"
#include "store/address.h"
#include "store/auth.h"

typedef struct agent_options {
    int nodes, node; /* node -1: a hub without ranks */
    bool hub;
    tu_address meet; /* where the hub is; port 0, of a hub: a free one */
    tu_secret secret;
    bool trust_network;
    bool survive, quiet;
    int ranks;          /* of this node */
    const char *cannot; /* why this node cannot run the program; NULL: it can */
    int64_t deadline;   /* for meeting */
    int64_t connect_ns; /* how long the hub may be unreachable; 0: until the deadline */
    int64_t silence_ns; /* TUTTI_HOST_TIMEOUT */
    bool replaceable;   /* the hub is a launcher among others, so that another can take its place (--survive) */
    int signals;        /* signalfd: a signal that ends ends the meeting */
} agent_options;

typedef struct agent agent;

/* Listens, where this is the hub. Prints its errors; 0, or what to exit with. */
int agent_open(const agent_options *options, agent **agent);
/* The port that the hub listens on. */
int agent_port(const agent *agent);
/* Whether somebody else's end (a child's) makes waiting for the others useless: asked now and then while agents meet;
 * it prints. NULL: nobody is. */
typedef bool agent_hopeless(void *argument);
/* Waits until all agents have come and the plan is known. Prints; 0, or what to exit with. */
int agent_meet(agent *agent, agent_hopeless *hopeless, void *argument);

/* Once they have met: */
int agent_size(const agent *agent);                      /* ranks of the job */
int agent_first_rank(const agent *agent);                /* of this node */
const char *agent_store(const agent *agent);             /* URL for this host's ranks */
int agent_store_listener(const agent *agent);            /* the hub's, else -1 */
const char *agent_master(const agent *agent, int *port); /* MASTER_ADDR and MASTER_PORT */
int agent_news_descriptor(const agent *agent);
tu_news *agent_news(const agent *agent);
const tu_secret *agent_secret(const agent *agent);

/* Starts the thread. `state` is the guardian's, `guardian` its socket, `woken` the eventfd that it writes when
 * something is new; NULL and -1 of a hub without ranks. */
int agent_start(agent *agent, run_state *state, int guardian, int woken);
/* Readable when agent_next has something. */
int agent_events(const agent *agent);
/* The next line to print, "" for none; rank: whose output comes first, or -1. False when there is none. */
bool agent_next(agent *agent, char *line, size_t bytes, int *rank);
/* Sends a signal to the ranks of all other hosts. */
void agent_signal(agent *agent, int signal_number);
/* Whether a rank that ended so was ended by a signal that somebody sent to a launcher, which passed it on: that is no
 * failure of the rank's, and told once for all of them. */
bool agent_ended_from_outside(const agent *agent, int wait_status);
/* At the end of a job over hosts: how ranks ended that were not told of, one line for each way. */
void run_tell_others_of_hosts(output *output, agent *agent, bool *told);
/* The job is over everywhere, as far as this agent will learn; *status: what to exit with. */
bool agent_finished(agent *agent, int *status);
/* Waits for the end of the thread and frees all; NULL is allowed. */
void agent_close(agent *agent);

#endif
