/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside an agent: agent_meet.c makes it, agent.c is its thread.
 */
#ifndef TUTTI_TOOL_AGENT_INNER_H
#define TUTTI_TOOL_AGENT_INNER_H

#include <pthread.h>
#include <stdatomic.h>

#include "agent.h"
#include "hosts/link.h"

#define AGENT_HOST_BYTES 64

/* The other end of a link. */
typedef struct agent_peer {
    int descriptor; /* -1: none, or no more */
    int node;       /* -1: not known yet, or a hub without ranks */
    tu_link link;
    int64_t since, heard; /* tu_clock_now: when it came, when it last said something */
    bool done, lost;      /* of a node, in the hub */
    char address[64];     /* of its socket, without the port */
} agent_peer;

typedef struct agent_line {
    struct agent_line *next;
    int rank;
    char text[640];
} agent_line;

#define AGENT_DEPUTY 1 /* the node that takes the hub's place: the first after it */

struct agent {
    agent_options options;
    tu_listeners listeners, store;
    agent_peer *peers; /* the hub: [node], its own too, without a link; else one, the hub */
    int peer_count;
    int *ranks;                      /* [node] */
    char (*hosts)[AGENT_HOST_BYTES]; /* [node] */
    int size, first_rank;
    char store_url[320], master[256];
    int master_port;
    tu_news *news;
    int news_descriptor;

    /* Who holds together what is left when the hub is lost. Links to it are made with those to the hub. */
    tu_listeners standby;
    agent_peer *seconds; /* the deputy: [node]; else one, the deputy */
    int second_count;
    char deputy_host[64];
    int deputy_port, deputy_store;
    bool electing; /* the hub is lost; until elect_until others may say so too */
    bool *orphans; /* [node]: it has lost the hub */
    int64_t elect_until;
    char why_orphaned[256];
    struct tutti_store *second_store; /* that the deputy serves */

    /* The thread's, once it runs. */
    pthread_t thread;
    bool started;
    run_state *state;
    int guardian, woken;
    int wake;   /* eventfd: something to do for the thread */
    int events; /* eventfd: something to do for the launcher */
    bool *told; /* [rank of this node]: its end */
    bool failure_told, done_told;
    int64_t beat_at;
    bool first_known; /* the hub: which failure was the first */
    int first_status; /* what to exit with for it */
    bool stopping, over;
    tu_frame candidate; /* a failure that may have another cause; kind 0: none */
    int64_t decide_at;
    bool hub_lost;

    /* The first signal from outside that ends, at whichever launcher, and whether it came again; 0: none. Of the
     * thread; the launcher looks when all is over. */
    _Atomic int outside;
    _Atomic bool outside_twice;

    _Atomic bool ending; /* by the launcher: leave */
    pthread_mutex_t lock;
    /* Under lock: */
    agent_line *first_line, **last_line;
    int signals[16], signal_count;
    bool finished;
    int status;
};

/* Reads what has come; false when the link is over, with the reason in link.why. Then its frames can be taken. */
bool agent_peer_read(agent_peer *peer);
/* Writes what can be written. */
void agent_peer_flush(agent_peer *peer);
void agent_peer_close(agent_peer *peer);
/* Listens, where this is the deputy. 0, or what to exit with. */
int agent_listen_as_deputy(agent *agent);
/* Makes the links between the deputy and the others, once the plan is known. 0, or what to exit with. */
int agent_meet_deputy(agent *agent);
/* Whether there is a deputy, and whether this is it. */
bool agent_has_deputy(const agent *agent);
bool agent_is_deputy(const agent *agent);

#endif
