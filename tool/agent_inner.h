/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside an agent: agent_meet.c makes it, agent.c is its thread, agent_deputies.c finds another hub.
 */
#ifndef TUTTI_TOOL_AGENT_INNER_H
#define TUTTI_TOOL_AGENT_INNER_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "agent.h"
#include "hosts/link.h"

#define AGENT_HOST_BYTES 64
#define AGENT_ADDRESS_BYTES 64
#define AGENT_BEATS 5 /* in the time after which silence is a loss */

/* The other end of a link. */
typedef struct agent_peer {
    int descriptor; /* -1: none, or no more */
    int node;       /* -1: not known yet, or a hub without ranks */
    tu_link link;
    int64_t since, heard;              /* tu_clock_now: when it came, when it last said something */
    bool done, lost;                   /* of a node, in the hub */
    char address[AGENT_ADDRESS_BYTES]; /* of its socket, without the port */
} agent_peer;

typedef struct agent_line {
    struct agent_line *next;
    int rank;
    char text[640];
} agent_line;

typedef struct agent_deputies agent_deputies;

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

    agent_deputies *deputies; /* NULL: nobody takes the hub's place */

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
    bool followed; /* another hub than the first */
    /* How far this host's clock is ahead of the first hub's, which is asked as long as it is the hub. */
    int clock_answers;
    int64_t clock_error, clock_at; /* of the best answer, and when it came */

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
void agent_prepare_socket(int descriptor);
/* Takes in who knocks at a listener; where too many have not said who they are, the oldest goes. */
void agent_accept(int listener, agent_peer *strangers, int count, const tu_secret *secret);

/* ---- the line: agent_deputies.c ---- */

/* Makes it, where there is one, and listens for others. 0, or what to exit with. */
int agent_deputies_open(agent *agent);
void agent_deputies_close(agent *agent);
/* Where this agent listens, and where each node does; without a line 0 and "". */
int agent_deputies_port(const agent *agent);
void agent_deputies_place(agent *agent, int node, const char *address, int port);
void agent_deputies_place_of(const agent *agent, int node, const char **address, int *port);
/* The hub has lost a node. */
void agent_deputies_node_lost(agent *agent, int node);
/* This agent has lost the hub: whether there may be another. Then agent_give_up, agent_follow or agent_become_hub is
 * what comes of it. */
bool agent_deputies_lose_hub(agent *agent, const char *why);
/* In each round of the thread: what time brings, what is polled for (so many descriptors) and what came. */
void agent_deputies_look(agent *agent);
int agent_deputies_room(const agent *agent);
void agent_deputies_poll(const agent *agent, struct pollfd *polled);
void agent_deputies_hear(agent *agent, const struct pollfd *polled);
/* This process stood still so long. */
void agent_deputies_forgive(agent *agent, int64_t gap);

/* ---- what comes of it: agent.c ---- */

void agent_give_up(agent *agent, const char *why);
/* The agent at the other end is the hub now, and has a store there. Its link is taken over. `lost` was the hub. */
void agent_follow(agent *agent, const agent_peer *hub, int lost, const char *address, int store_port, const char *why);
/* This agent is the hub now, of those nodes that count on it; `peers` becomes its. */
void agent_become_hub(agent *agent, agent_peer *peers, const bool *counts, int lost, const char *address,
                      int store_port, const char *why);

#endif
