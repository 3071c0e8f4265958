/* SPDX-License-Identifier: Apache-2.0
 *
 * The line of deputies: who takes the hub's place when it is lost. See agent.h for what is left of a job then.
 *
 * Every agent but the first hub listens for the others, and knows from the plan where they do. One that has lost the
 * hub, an orphan, closes its link to it and goes along the nodes behind it, in order: it counts on one candidate at a
 * time (TU_FRAME_ORPHAN), and closes that link too before it counts on the next. At its own place it is the candidate
 * itself. A candidate that has lost the hub too, and on which more than half of all ranks count with its own, becomes
 * the hub; one that does not get them within TUTTI_HOST_TIMEOUT declines, and goes on along the line like the others.
 * So no agent counts for two, and of two parts of a job one at most has more than half.
 *
 * Everybody waits for candidates before it alone, or for such that wait no more for others, so nobody waits in a
 * circle; a candidate says that it is still there (TU_FRAME_UNDECIDED), and one that is silent is passed over. Links to
 * the next candidates are opened at once, some at a time: those that do not answer cost their time together.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <tutti/store.h>

#include "agent_inner.h"
#include "base/clock.h"
#include "base/error.h"
#include "tool.h"

#define STRANGERS 16                 /* connections that have not said who they are, at most */
#define STRANGER_NS (10 * TU_SECOND) /* for saying it */
#define AHEAD 16                     /* candidates that are connected to at once */
#define SILENCES 5                   /* TUTTI_HOST_TIMEOUT so often: then whoever has found nobody gives up */

typedef enum way_state {
    WAY_NONE,
    WAY_CONNECTING,
    WAY_GREETING, /* until both have proved the secret */
    WAY_OPEN,
    WAY_OVER /* it could not be made, broke, or its candidate is not to be had */
} way_state;

/* From an orphan to a candidate. */
typedef struct way {
    agent_peer peer;
    way_state state;
    bool refused; /* by the candidate, which lives */
    int64_t until;
} way;

struct agent_deputies {
    tu_listeners listeners;
    char (*addresses)[AGENT_ADDRESS_BYTES]; /* [node] */
    int *ports;                             /* [node]: where it listens for others; 0: nowhere */
    int hub;                                /* node that is the hub, or was the last */
    bool *gone;                             /* [node]: the hub has lost it, or it was a hub that is lost */
    agent_peer strangers[STRANGERS];
    agent_peer *comers; /* [node]: those that came to this agent … */
    bool *counts;       /* [node]: … and count on it */
    bool electing;      /* this agent is an orphan */
    bool declined;      /* it was a candidate, for too few */
    char why[256];      /* it is */
    int asked;          /* the candidate that it counts on; its own node: itself */
    bool told;          /* that candidate knows */
    bool orphan_too;    /* as that candidate has said of itself */
    int64_t lost_at, asked_at, beat_at;
    way *ways; /* [node] */
    tu_listeners store_listeners;
    struct tutti_store *store; /* that this agent serves once it has become the hub */
};

/* ---- opening and closing ---- */

static bool has_line(const agent *this) {
    return this->options.survive && this->options.replaceable && this->options.nodes > 1;
}

static int no_memory(const agent *this) {
    return tool_fail("run: no memory for the launchers of %d hosts", this->options.nodes);
}

static bool listen_somewhere(const agent *this, int64_t deadline, tu_listeners *listeners) {
    tu_address anywhere = { .host = "" };
    bool may_be_open = this->options.secret.bytes > 0 || this->options.trust_network;
    if (!may_be_open) /* then all are on this host */
        snprintf(anywhere.host, sizeof anywhere.host, "127.0.0.1");
    return tu_store_listen(&anywhere, may_be_open, deadline, listeners) == TUTTI_OK;
}

int agent_deputies_open(agent *this) {
    if (!has_line(this))
        return 0;
    size_t nodes = (size_t)this->options.nodes;
    agent_deputies *line = this->deputies = calloc(1, sizeof *line);
    if (line == NULL)
        return no_memory(this);
    for (int i = 0; i < STRANGERS; i++)
        line->strangers[i].descriptor = -1;
    line->addresses = calloc(nodes, sizeof *line->addresses);
    line->ports = calloc(nodes, sizeof *line->ports);
    line->gone = calloc(nodes, sizeof *line->gone);
    line->counts = calloc(nodes, sizeof *line->counts);
    line->comers = calloc(nodes, sizeof *line->comers);
    line->ways = calloc(nodes, sizeof *line->ways);
    for (int node = 0; line->comers != NULL && line->ways != NULL && node < this->options.nodes; node++)
        line->comers[node] = line->ways[node].peer = (agent_peer){ .descriptor = -1, .node = node };
    if (line->addresses == NULL || line->ports == NULL || line->gone == NULL || line->counts == NULL ||
        line->comers == NULL || line->ways == NULL)
        return no_memory(this);
    if (!this->options.hub && !listen_somewhere(this, this->options.deadline, &line->listeners))
        return tool_fail("run: cannot listen for the other hosts, should node 0 be lost: %s", tutti_error_message());
    return 0;
}

void agent_deputies_close(agent *this) {
    agent_deputies *line = this->deputies;
    if (line == NULL)
        return;
    for (int i = 0; i < STRANGERS; i++)
        agent_peer_close(&line->strangers[i]);
    for (int node = 0; node < this->options.nodes; node++) {
        if (line->comers != NULL)
            agent_peer_close(&line->comers[node]);
        if (line->ways != NULL)
            agent_peer_close(&line->ways[node].peer);
    }
    tu_store_listen_end(&line->listeners);
    tutti_store_release(line->store);
    free(line->addresses);
    free(line->ports);
    free(line->gone);
    free(line->counts);
    free(line->comers);
    free(line->ways);
    free(line);
    this->deputies = NULL;
}

int agent_deputies_port(const agent *this) {
    return this->deputies != NULL ? this->deputies->listeners.port : 0;
}

void agent_deputies_place(agent *this, int node, const char *address, int port) {
    if (this->deputies == NULL)
        return;
    snprintf(this->deputies->addresses[node], AGENT_ADDRESS_BYTES, "%s", address);
    this->deputies->ports[node] = port;
}

void agent_deputies_place_of(const agent *this, int node, const char **address, int *port) {
    *address = this->deputies != NULL ? this->deputies->addresses[node] : "";
    *port = this->deputies != NULL ? this->deputies->ports[node] : 0;
}

void agent_deputies_node_lost(agent *this, int node) {
    if (this->deputies != NULL)
        this->deputies->gone[node] = true;
}

/* ---- those that come ---- */

static void put(agent_peer *peer, tu_frame_kind kind, uint32_t flags, const char *text) {
    tu_frame frame = { .kind = kind, .node = peer->node, .flags = flags };
    snprintf(frame.text, sizeof frame.text, "%s", text);
    tu_link_put(&peer->link, &frame);
    agent_peer_flush(peer);
}

static void turn_away(agent_deputies *line, int node, const char *why) {
    line->counts[node] = false;
    if (line->comers[node].descriptor < 0)
        return;
    put(&line->comers[node], TU_FRAME_REFUSED, 0, why);
    agent_peer_close(&line->comers[node]);
}

static void turn_all_away(agent *this, const char *why) {
    for (int node = 0; node < this->options.nodes; node++)
        turn_away(this->deputies, node, why);
}

static void say_undecided(const agent_deputies *line, agent_peer *comer) {
    put(comer, TU_FRAME_UNDECIDED, line->electing ? TU_FRAME_ORPHAN_TOO : 0, "");
}

/* Somebody counts on this agent from now on. */
static void count_in(agent *this, agent_peer *comer) {
    agent_deputies *line = this->deputies;
    if (this->options.hub || line->declined || this->hub_lost || this->stopping || line->gone[comer->node]) {
        turn_away(line, comer->node, "nobody here goes on with it");
        return;
    }
    line->counts[comer->node] = true;
    say_undecided(line, comer);
}

static void hear_comer(agent *this, agent_peer *comer) {
    bool there = agent_peer_read(comer);
    agent_peer_flush(comer);
    for (tu_frame frame; comer->descriptor >= 0 && tu_link_take(&comer->link, &frame);)
        if (frame.kind == TU_FRAME_ORPHAN)
            count_in(this, comer);
    if (comer->descriptor >= 0 && (!there || comer->link.state == TU_LINK_BROKEN)) {
        this->deputies->counts[comer->node] = false;
        agent_peer_close(comer);
    }
}

/* A stranger says which node it is; one that was here before is here no more. */
static void hear_stranger(agent *this, agent_peer *stranger) {
    bool there = agent_peer_read(stranger);
    tu_frame frame;
    agent_peer_flush(stranger);
    if (tu_link_take(&stranger->link, &frame)) {
        if (frame.kind == TU_FRAME_HELLO && frame.node >= 0 && frame.node < this->options.nodes &&
            frame.node != this->options.node) {
            agent_peer *comer = &this->deputies->comers[frame.node];
            this->deputies->counts[frame.node] = false;
            agent_peer_close(comer);
            *comer = *stranger;
            comer->node = frame.node;
            *stranger = (agent_peer){ .descriptor = -1 }; /* its link is the comer's now */
            hear_comer(this, comer);
            return;
        }
        there = false;
    }
    if (!there || stranger->link.state == TU_LINK_BROKEN)
        agent_peer_close(stranger);
}

/* ---- ways to candidates ---- */

static void end_way(way *way) {
    agent_peer_close(&way->peer);
    way->state = WAY_OVER;
}

static void begin_way(agent *this, int node) {
    agent_deputies *line = this->deputies;
    way *way = &line->ways[node];
    tu_address address;
    tu_address_list list;
    way->state = WAY_OVER;
    way->until = tu_deadline(this->options.silence_ns / 2); /* kernels answer; proofs may take longer */
    if (line->ports[node] <= 0 || tu_address_set(&address, line->addresses[node], line->ports[node]) != TUTTI_OK ||
        tu_address_resolve(&address, way->until, &list) != TUTTI_OK || list.count == 0)
        return;
    int descriptor = socket(list.address[0].any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (descriptor < 0)
        return;
    if ((connect(descriptor, &list.address[0].any, list.length[0]) != 0 && errno != EINPROGRESS) ||
        tu_link_init(&way->peer.link, false, &this->options.secret) != TUTTI_OK) {
        close(descriptor);
        return;
    }
    way->peer.descriptor = descriptor;
    agent_prepare_socket(descriptor);
    way->state = WAY_CONNECTING;
}

/* The next candidates that may be had, some at a time. */
static void open_ways(agent *this) {
    agent_deputies *line = this->deputies;
    int ahead = 0;
    for (int node = line->hub + 1; node < this->options.nodes && ahead < AHEAD; node++) {
        if (node == this->options.node || line->gone[node] || line->ways[node].state == WAY_OVER)
            continue;
        if (line->ways[node].state == WAY_NONE)
            begin_way(this, node);
        ahead++;
    }
}

static void go_on(agent *this);

/* The candidate has become the hub. */
static void follow(agent *this, way *way, int store_port) {
    agent_deputies *line = this->deputies;
    agent_peer hub = way->peer;
    int lost = line->hub;
    way->peer = (agent_peer){ .descriptor = -1, .node = hub.node }; /* its link is the hub's now */
    line->hub = hub.node;
    line->electing = false;
    for (int other = 0; other < this->options.nodes; other++)
        end_way(&line->ways[other]);
    turn_all_away(this, "it goes on with another one");
    agent_follow(this, &hub, lost, line->addresses[hub.node], store_port, line->why);
}

static void hear_way(agent *this, way *way) {
    agent_deputies *line = this->deputies;
    int error = 0;
    socklen_t length = sizeof error;
    agent_peer *peer = &way->peer;
    if (way->state == WAY_CONNECTING) {
        if (getsockopt(peer->descriptor, SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) {
            end_way(way);
            return;
        }
        way->state = WAY_GREETING;
        way->until = tu_deadline(this->options.silence_ns);
    }
    bool there = agent_peer_read(peer);
    if (there && way->state == WAY_GREETING && peer->link.state == TU_LINK_OPEN) {
        tu_link_put(&peer->link, &(tu_frame){ .kind = TU_FRAME_HELLO, .node = this->options.node });
        way->state = WAY_OPEN;
    }
    for (tu_frame frame; way->state == WAY_OPEN && tu_link_take(&peer->link, &frame);) {
        if (frame.kind == TU_FRAME_TAKEOVER && line->electing && peer->node == line->asked && line->told) {
            follow(this, way, frame.status);
            return;
        }
        if (frame.kind == TU_FRAME_UNDECIDED && peer->node == line->asked)
            line->orphan_too = (frame.flags & TU_FRAME_ORPHAN_TOO) != 0;
        else if (frame.kind == TU_FRAME_REFUSED)
            way->refused = true;
    }
    agent_peer_flush(peer);
    if (!there || way->refused || peer->link.state == TU_LINK_BROKEN)
        end_way(way);
}

/* ---- the election ---- */

bool agent_deputies_lose_hub(agent *this, const char *why) {
    agent_deputies *line = this->deputies;
    if (line == NULL || this->stopping)
        return false;
    int64_t now = tu_clock_now();
    snprintf(line->why, sizeof line->why, "%s", why);
    line->gone[line->hub] = true;
    line->electing = true;
    line->lost_at = line->beat_at = now;
    line->asked = line->hub;
    tu_news_elect(this->news);
    for (int node = 0; node < this->options.nodes; node++) {
        end_way(&line->ways[node]);
        line->ways[node].state = WAY_NONE;
        line->ways[node].refused = false;
        if (line->counts[node])
            say_undecided(line, &line->comers[node]);
    }
    go_on(this);
    return true;
}

/* No more than this many ranks can come together. */
static int ranks_at_most(const agent *this) {
    int count = 0;
    for (int node = 0; node < this->options.nodes; node++)
        count += this->deputies->gone[node] ? 0 : this->ranks[node];
    return count;
}

static void give_up(agent *this) {
    char why[sizeof this->deputies->why];
    snprintf(why, sizeof why, "%s", this->deputies->why);
    this->deputies->electing = false;
    for (int node = 0; node < this->options.nodes; node++)
        end_way(&this->deputies->ways[node]);
    turn_all_away(this, "it has lost the hub and found nobody");
    agent_give_up(this, why);
}

/* To the next candidate. */
static void go_on(agent *this) {
    agent_deputies *line = this->deputies;
    if (line->asked != line->hub && line->asked != this->options.node)
        end_way(&line->ways[line->asked]); /* it counts for nobody else */
    int64_t now = tu_clock_now();
    do
        line->asked++;
    while (line->asked < this->options.nodes && line->gone[line->asked]);
    line->told = line->orphan_too = false;
    line->asked_at = now;
    if (line->asked >= this->options.nodes || 2 * ranks_at_most(this) <= this->size)
        give_up(this);
    else
        open_ways(this);
}

/* This agent counts on another one. */
static void look_at_candidate(agent *this, int64_t now) {
    agent_deputies *line = this->deputies;
    way *way = &line->ways[line->asked];
    if (way->state == WAY_NONE) /* beyond those that were opened at once */
        open_ways(this);
    if (way->state == WAY_OPEN && !line->told) {
        put(&way->peer, TU_FRAME_ORPHAN, 0, "");
        line->told = true;
        way->peer.heard = now;
    }
    bool silent = line->told && now - way->peer.heard > this->options.silence_ns;
    /* Who still has its hub by then will not lose it with this one. */
    bool needless = line->told && !line->orphan_too && now - line->lost_at > 2 * this->options.silence_ns;
    if (way->state == WAY_OVER || silent || needless)
        go_on(this);
}

/* Becomes the hub of those that count on it; false: without a store there is no job. */
static bool take_over(agent *this) {
    agent_deputies *line = this->deputies;
    agent_peer *peers = calloc((size_t)this->options.nodes, sizeof *peers);
    tutti_tcp_store_options options = TUTTI_TCP_STORE_OPTIONS_INIT;
    options.trust_network = true; /* asked when it began to listen */
    if (tu_auth_available() && this->options.secret.bytes > 0) {
        options.secret = this->options.secret.data;
        options.secret_bytes = this->options.secret.bytes;
    }
    bool listens = peers != NULL && listen_somewhere(this, tu_deadline(TU_SECOND), &line->store_listeners);
    options.listen_fd = listens ? line->store_listeners.descriptor[0] : -1;
    if (!listens || tutti_store_serve(line->addresses[this->options.node], 0, &options, &line->store) != TUTTI_OK) {
        tu_store_listen_end(&line->store_listeners);
        free(peers);
        return false;
    }
    for (int node = 0; node < this->options.nodes; node++) {
        peers[node] = line->counts[node] ? line->comers[node] : (agent_peer){ .descriptor = -1, .node = node };
        if (line->counts[node])
            line->comers[node] = (agent_peer){ .descriptor = -1, .node = node };
        end_way(&line->ways[node]);
    }
    int lost = line->hub;
    line->hub = this->options.node;
    line->electing = false;
    agent_become_hub(this, peers, line->counts, lost, line->addresses[line->hub], line->store_listeners.port,
                     line->why);
    turn_all_away(this, "the others go on without it");
    return true;
}

/* This agent is the candidate: whether it has all that it can hope for. */
static bool all_count(const agent *this) {
    const agent_deputies *line = this->deputies;
    for (int node = 0; node < this->options.nodes; node++) {
        const way *way = &line->ways[node];
        bool hopeless = line->gone[node] || (way->state == WAY_OVER && !way->refused);
        if (node != this->options.node && !line->counts[node] && !hopeless)
            return false;
    }
    return true;
}

static void look_at_comers(agent *this, int64_t now) {
    agent_deputies *line = this->deputies;
    int count = this->ranks[this->options.node];
    for (int node = 0; node < this->options.nodes; node++)
        count += line->counts[node] ? this->ranks[node] : 0;
    bool enough = 2 * count > this->size, over = now - line->asked_at > this->options.silence_ns || all_count(this);
    if (!over || (enough && take_over(this)))
        return;
    line->declined = true;
    turn_all_away(this, "too few count on it");
    go_on(this);
}

/* Ways that take too long, strangers that say nothing, and those that count on this agent and are silent. */
static void look_at_silence(agent *this, int64_t now) {
    agent_deputies *line = this->deputies;
    for (int node = 0; node < this->options.nodes; node++) {
        way *way = &line->ways[node];
        if ((way->state == WAY_CONNECTING || way->state == WAY_GREETING) && now > way->until)
            end_way(way);
        if (line->counts[node] && now - line->comers[node].heard > this->options.silence_ns) {
            line->counts[node] = false;
            agent_peer_close(&line->comers[node]);
        }
    }
    for (int i = 0; i < STRANGERS; i++)
        if (line->strangers[i].descriptor >= 0 && now - line->strangers[i].since > STRANGER_NS)
            agent_peer_close(&line->strangers[i]);
}

static void beat(agent *this, int64_t now) {
    agent_deputies *line = this->deputies;
    if (now < line->beat_at)
        return;
    line->beat_at = now + this->options.silence_ns / AGENT_BEATS;
    for (int node = 0; node < this->options.nodes; node++)
        if (line->counts[node])
            say_undecided(line, &line->comers[node]);
    if (line->electing && line->told && line->ways[line->asked].state == WAY_OPEN)
        put(&line->ways[line->asked].peer, TU_FRAME_BEAT, 0, "");
}

void agent_deputies_look(agent *this) {
    agent_deputies *line = this->deputies;
    if (line == NULL)
        return;
    int64_t now = tu_clock_now();
    look_at_silence(this, now);
    beat(this, now);
    for (int before = -1; line->electing && before != line->asked;) { /* on, as far as nobody has to be waited for */
        before = line->asked;
        if (line->asked == this->options.node)
            look_at_comers(this, now);
        else
            look_at_candidate(this, now);
    }
    if (line->electing && now - line->lost_at > SILENCES * this->options.silence_ns)
        give_up(this);
}

/* ---- in the thread's loop ---- */

int agent_deputies_room(const agent *this) {
    return this->deputies != NULL ? TU_LISTENERS + STRANGERS + 2 * this->options.nodes : 0;
}

static struct pollfd polled_of(const agent_peer *peer, bool connecting) {
    bool writes = connecting || peer->link.out_used > 0;
    return (struct pollfd){ .fd = peer->descriptor, .events = (short)(POLLIN | (writes ? POLLOUT : 0)) };
}

/* Always in this order: listeners, strangers, comers, ways. */
void agent_deputies_poll(const agent *this, struct pollfd *polled) {
    const agent_deputies *line = this->deputies;
    if (line == NULL)
        return;
    for (int i = 0; i < TU_LISTENERS; i++)
        *polled++ =
            (struct pollfd){ .fd = i < line->listeners.count ? line->listeners.descriptor[i] : -1, .events = POLLIN };
    for (int i = 0; i < STRANGERS; i++)
        *polled++ = polled_of(&line->strangers[i], false);
    for (int node = 0; node < this->options.nodes; node++)
        *polled++ = polled_of(&line->comers[node], false);
    for (int node = 0; node < this->options.nodes; node++)
        *polled++ = polled_of(&line->ways[node].peer, line->ways[node].state == WAY_CONNECTING);
}

void agent_deputies_hear(agent *this, const struct pollfd *polled) {
    agent_deputies *line = this->deputies;
    if (line == NULL)
        return;
    const struct pollfd *strangers = polled + TU_LISTENERS, *comers = strangers + STRANGERS,
                        *ways = comers + this->options.nodes;
    for (int node = 0; node < this->options.nodes; node++) {
        way *way = &line->ways[node];
        if (way->peer.descriptor >= 0 && way->peer.descriptor == ways[node].fd && ways[node].revents != 0)
            hear_way(this, way);
        agent_peer *comer = &line->comers[node];
        if (comer->descriptor >= 0 && comer->descriptor == comers[node].fd && comers[node].revents != 0)
            hear_comer(this, comer);
    }
    for (int i = 0; i < STRANGERS; i++)
        if (line->strangers[i].descriptor >= 0 && line->strangers[i].descriptor == strangers[i].fd &&
            strangers[i].revents != 0)
            hear_stranger(this, &line->strangers[i]);
    for (int i = 0; i < line->listeners.count; i++)
        if (polled[i].revents != 0)
            agent_accept(line->listeners.descriptor[i], line->strangers, STRANGERS, &this->options.secret);
}

void agent_deputies_forgive(agent *this, int64_t gap) {
    agent_deputies *line = this->deputies;
    for (int node = 0; line != NULL && node < this->options.nodes; node++) {
        line->comers[node].heard += gap;
        line->ways[node].peer.heard += gap;
        line->ways[node].until += gap;
    }
    if (line != NULL) {
        line->lost_at += gap;
        line->asked_at += gap;
    }
}
