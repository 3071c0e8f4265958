/* SPDX-License-Identifier: Apache-2.0
 *
 * How agents meet: the hub listens, the others come, prove the secret and say who they are; when all are there the hub
 * tells everybody how many ranks are where. Single-threaded: what is started afterwards may fork.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent_inner.h"
#include "base/clock.h"
#include "base/error.h"
#include "tool.h"

#define STRANGERS 64                /* connections that have not said who they are, at most */
#define HELLO_NS (10 * TU_SECOND)   /* for saying it */
#define PATIENCE_NS (3 * TU_SECOND) /* before the user is told whom we wait for */
#define CONNECT_MS 2000             /* for one attempt */
#define AGAIN_MS 100                /* between two */
#define MAX_SIZE 65535
#define COMPLAINTS 8   /* about strangers */
#define NO_PROGRAM 127 /* exit status of all launchers where one has no such program */

/* ---- one peer ---- */

bool agent_peer_read(agent_peer *peer) {
    tu_link *link = &peer->link;
    size_t room;
    uint8_t *to = tu_link_room(link, &room);
    if (room == 0)
        return true;
    ssize_t count = recv(peer->descriptor, to, room, MSG_DONTWAIT);
    if (count > 0) {
        peer->heard = tu_clock_now();
        tu_link_came(link, (size_t)count);
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
        bool closed = count == 0 || errno == ECONNRESET; /* the latter where it had not read everything */
        if (link->state == TU_LINK_PROVING)
            snprintf(link->why, sizeof link->why,
                     "its launcher did not accept this one's secret: the secrets differ (--secret-file)");
        else if (!closed)
            snprintf(link->why, sizeof link->why, "the connection broke: %s", strerror(errno));
        else if (link->state != TU_LINK_BROKEN)
            snprintf(link->why, sizeof link->why, "its launcher closed the connection: it has ended or was killed");
        return false;
    }
    return link->state != TU_LINK_BROKEN;
}

void agent_peer_flush(agent_peer *peer) {
    while (peer->descriptor >= 0 && peer->link.out_used > 0) {
        ssize_t count = send(peer->descriptor, peer->link.out, peer->link.out_used, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count <= 0)
            return; /* reading tells why */
        tu_link_sent(&peer->link, (size_t)count);
    }
}

void agent_peer_close(agent_peer *peer) {
    if (peer->descriptor >= 0)
        close(peer->descriptor);
    peer->descriptor = -1;
    tu_link_end(&peer->link);
}

/* Says a last word and closes; what does not fit into the socket's buffer is lost, and so is the peer. */
/* `status` is what its launcher exits with. */
static void refuse(agent_peer *peer, const char *why, int status) {
    tu_frame frame = { .kind = TU_FRAME_REFUSED, .status = status };
    snprintf(frame.text, sizeof frame.text, "%s", why);
    tu_link_put(&peer->link, &frame);
    agent_peer_flush(peer);
    shutdown(peer->descriptor, SHUT_WR);
    agent_peer_close(peer);
}

void agent_prepare_socket(int descriptor) {
    int on = 1;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* ---- opening ---- */

int agent_open(const agent_options *options, agent **made) {
    agent *this = calloc(1, sizeof *this);
    if (this == NULL)
        return tool_fail("run: no memory for the launchers of %d hosts", options->nodes);
    this->options = *options;
    this->news_descriptor = this->guardian = this->woken = -1;
    this->last_line = &this->first_line;
    pthread_mutex_init(&this->lock, NULL);
    this->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    this->events = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    this->peer_count = options->hub ? options->nodes : 1;
    this->peers = calloc((size_t)this->peer_count, sizeof *this->peers);
    this->ranks = calloc((size_t)options->nodes, sizeof *this->ranks);
    this->hosts = calloc((size_t)options->nodes, sizeof *this->hosts);
    for (int i = 0; this->peers != NULL && i < this->peer_count; i++)
        this->peers[i] = (agent_peer){ .descriptor = -1, .node = options->hub ? i : -1 };
    *made = this;
    if (this->peers == NULL || this->ranks == NULL || this->hosts == NULL || this->wake < 0 || this->events < 0)
        return tool_fail("run: no memory or no descriptors for the launchers of %d hosts", options->nodes);
    if (options->secret.bytes > 0 && !tu_auth_available())
        return tool_fail("run: this build of Tutti has no libsodium, so that launchers cannot prove a secret; install "
                         "libsodium-dev and pkg-config and build it again (the Python package: pip install "
                         "--force-reinstall .), or on a network that you trust set TUTTI_TRUST_NETWORK=1");
    int result = agent_deputies_open(this);
    if (result != 0 || !options->hub)
        return result;
    bool may_be_open = options->secret.bytes > 0 || options->trust_network;
    tu_address any_port = options->meet;
    any_port.port = 0;
    tutti_status status = tu_store_listen(&options->meet, may_be_open, options->deadline, &this->listeners);
    if (status == TUTTI_OK)
        status = tu_store_listen(&any_port, may_be_open, options->deadline, &this->store);
    if (status != TUTTI_OK)
        return tool_fail("run: cannot listen where the hosts meet: %s%s", tutti_error_message(),
                         status == TUTTI_ERROR_REFUSED ? ". For tutti run: --secret-file FILE" : "");
    return 0;
}

int agent_port(const agent *this) {
    return this->listeners.port;
}

/* A signal that ends has come; its number, else 0. */
static int ending_signal(const agent *this) {
    struct signalfd_siginfo signal;
    while (this->options.signals >= 0 && read(this->options.signals, &signal, sizeof signal) == sizeof signal)
        if (run_ends((int)signal.ssi_signo))
            return (int)signal.ssi_signo;
    return 0;
}

/* ---- the hub ---- */

typedef struct meeting {
    agent *agent;
    agent_peer strangers[STRANGERS];
    int complaints;
    int64_t tell_at;
} meeting;

static void complain(meeting *this, const agent_peer *peer, const char *why) {
    if (this->complaints++ < COMPLAINTS)
        fprintf(stderr, "tutti run: refused a connection from %s: %s\n", peer->address, why);
}

/* Why this agent cannot be taken; "" when it can. */
static void judge(const agent *this, const tu_frame *hello, char *why, size_t bytes) {
    char version[32] = "", host[AGENT_HOST_BYTES] = "";
    int read = sscanf(hello->text, "%31s %63s", version, host);
    why[0] = 0;
    if (read != 2 || strcmp(version, TUTTI_VERSION_STRING) != 0)
        snprintf(why, bytes, "node %d runs Tutti %s, the hub Tutti %s: install one version on all hosts", hello->node,
                 version, TUTTI_VERSION_STRING);
    else if (hello->status != this->options.nodes)
        snprintf(why, bytes, "node %d was started with --nodes %d, the hub with --nodes %d", hello->node, hello->status,
                 this->options.nodes);
    else if (hello->node < 0 || hello->node >= this->options.nodes || hello->node == this->options.node)
        snprintf(why, bytes, "there is no place for a node %d: it is the hub's, or not below --nodes %d", hello->node,
                 this->options.nodes);
    else if (this->peers[hello->node].descriptor >= 0)
        snprintf(why, bytes, "node %d is there already, on %s: every host needs a --node of its own", hello->node,
                 this->hosts[hello->node]);
    else if (((hello->flags & TU_FRAME_SURVIVE) != 0) != this->options.survive)
        snprintf(why, bytes, "node %d was started %s --survive, the hub %s it", hello->node,
                 this->options.survive ? "without" : "with", this->options.survive ? "with" : "without");
    else if (hello->count < 1 || hello->count > MAX_SIZE)
        snprintf(why, bytes, "node %d has %d ranks; it must be 1 to %d", hello->node, hello->count, MAX_SIZE);
}

static void refuse_all(agent *this, const char *why, int status) {
    for (int node = 0; node < this->peer_count; node++)
        if (this->peers[node].descriptor >= 0)
            refuse(&this->peers[node], why, status);
}

/* Takes in a stranger that has said hello. Returns what to exit with, or -1. */
static int admit(meeting *this, agent_peer *stranger, const tu_frame *hello) {
    agent *agent = this->agent;
    char why[256];
    judge(agent, hello, why, sizeof why);
    if (why[0] != 0) {
        complain(this, stranger, why);
        refuse(stranger, why, 1);
        return -1;
    }
    char version[32];
    sscanf(hello->text, "%31s %63s", version, agent->hosts[hello->node]);
    if ((hello->flags & TU_FRAME_CANNOT) != 0) {
        const char *reason = strchr(hello->text, '\n');
        snprintf(why, sizeof why, "node %d (%s) cannot start the program: %.150s", hello->node,
                 agent->hosts[hello->node], reason != NULL ? reason + 1 : "no reason was given");
        refuse(stranger, why, NO_PROGRAM);
        refuse_all(agent, why, NO_PROGRAM);
        fprintf(stderr, "tutti run: %s\n", why);
        return NO_PROGRAM;
    }
    agent->ranks[hello->node] = hello->count;
    agent_deputies_place(agent, hello->node, stranger->address, hello->pid);
    agent_peer *peer = &agent->peers[hello->node];
    *peer = *stranger;
    peer->node = hello->node;
    *stranger = (agent_peer){ .descriptor = -1 }; /* its link is the peer's now */
    return -1;
}

/* Without the port and brackets; an address of IPv4 that came through a socket of IPv6 as what it is. */
static void address_text(const tu_socket_address *address, socklen_t length, char *text, size_t bytes) {
    char whole[96];
    tu_socket_text(address, length, whole, sizeof whole);
    char *colon = strrchr(whole, ':');
    if (colon != NULL)
        *colon = 0;
    const char *begin = whole[0] == '[' ? whole + 1 : whole;
    if (strncmp(begin, "::ffff:", 7) == 0 && strchr(begin, '.') != NULL)
        begin += 7;
    snprintf(text, bytes, "%.*s", (int)strcspn(begin, "]"), begin);
}

void agent_accept(int listener, agent_peer *strangers, int count, const tu_secret *secret) {
    tu_socket_address address;
    socklen_t length = sizeof address;
    int descriptor;
    while ((descriptor = accept4(listener, &address.any, &length, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
        int free = 0;
        while (free < count && strangers[free].descriptor >= 0)
            free++;
        agent_peer *peer = &strangers[free < count ? free : 0];
        if (free == count) { /* too many say nothing: the oldest goes */
            for (int i = 1; i < count; i++)
                if (strangers[i].since < peer->since)
                    peer = &strangers[i];
            agent_peer_close(peer);
        }
        int64_t now = tu_clock_now();
        *peer = (agent_peer){ .descriptor = descriptor, .node = -1, .since = now, .heard = now };
        address_text(&address, length, peer->address, sizeof peer->address);
        agent_prepare_socket(descriptor);
        if (tu_link_init(&peer->link, true, secret) != TUTTI_OK)
            agent_peer_close(peer);
        length = sizeof address;
    }
}

/* What a stranger has sent. Returns what to exit with, or -1. */
static int hear_stranger(meeting *this, agent_peer *peer) {
    bool there = agent_peer_read(peer);
    tu_frame frame;
    agent_peer_flush(peer);
    if (tu_link_take(&peer->link, &frame)) {
        if (frame.kind == TU_FRAME_HELLO)
            return admit(this, peer, &frame);
        there = false;
        snprintf(peer->link.why, sizeof peer->link.why, "it does not say who it is");
    }
    if (!there || peer->link.state == TU_LINK_BROKEN) {
        complain(this, peer, peer->link.why);
        agent_peer_close(peer);
    }
    return -1;
}

/* One that has come may leave again before all are there. */
static void hear_known(meeting *this, agent_peer *peer) {
    if (agent_peer_read(peer) && peer->link.state == TU_LINK_OPEN)
        return;
    fprintf(stderr, "tutti run: node %d (%s) has left before all were there: %s\n", peer->node,
            this->agent->hosts[peer->node], peer->link.why);
    agent_peer_close(peer);
}

static bool is_missing(const agent *this, int node) {
    return node != this->options.node && this->peers[node].descriptor < 0;
}

static void name_missing(const agent *this, char *text, size_t bytes) {
    bool missing[this->options.nodes];
    for (int node = 0; node < this->options.nodes; node++)
        missing[node] = is_missing(this, node);
    tool_rank_list(missing, this->options.nodes, text, bytes);
}

static bool all_here(const agent *this) {
    for (int node = 0; node < this->options.nodes; node++)
        if (is_missing(this, node))
            return false;
    return true;
}

/* One look at everything that may have happened. Returns what to exit with, or -1. */
static int look_round(meeting *this) {
    agent *agent = this->agent;
    struct pollfd polled[TU_LISTENERS + STRANGERS + agent->peer_count + 1];
    agent_peer *of[sizeof polled / sizeof *polled];
    int count = 0, result = -1;
    polled[count++] = (struct pollfd){ .fd = agent->options.signals, .events = POLLIN };
    for (int i = 0; i < agent->listeners.count; i++)
        polled[count++] = (struct pollfd){ .fd = agent->listeners.descriptor[i], .events = POLLIN };
    int first = count;
    for (int i = 0; i < STRANGERS + agent->peer_count; i++) {
        agent_peer *peer = i < STRANGERS ? &this->strangers[i] : &agent->peers[i - STRANGERS];
        of[count] = peer;
        polled[count++] = (struct pollfd){ .fd = peer->descriptor, .events = POLLIN };
    }
    poll(polled, (nfds_t)count, 200);
    for (int i = 1; i < first; i++)
        if (polled[i].revents != 0)
            agent_accept(polled[i].fd, this->strangers, STRANGERS, &agent->options.secret);
    int64_t now = tu_clock_now();
    for (int i = first; i < count && result < 0; i++) {
        if (of[i]->descriptor != polled[i].fd || of[i]->descriptor < 0)
            continue;
        bool stranger = i < first + STRANGERS;
        if (polled[i].revents != 0 && stranger)
            result = hear_stranger(this, of[i]);
        else if (polled[i].revents != 0)
            hear_known(this, of[i]);
        else if (stranger && now - of[i]->since > HELLO_NS) {
            complain(this, of[i], "it says nothing");
            agent_peer_close(of[i]);
        }
    }
    return result;
}

static int gather(meeting *this, agent_hopeless *hopeless, void *argument) {
    agent *agent = this->agent;
    char missing[256];
    for (int result; !all_here(agent);) {
        result = look_round(this);
        if (result >= 0)
            return result;
        int signal_number = ending_signal(agent);
        if (signal_number != 0 || (hopeless != NULL && hopeless(argument))) {
            refuse_all(agent, signal_number != 0 ? "the hub was told to end" : "another host cannot be started", 1);
            return signal_number != 0 ? 128 + signal_number : 1;
        }
        int64_t now = tu_clock_now();
        if (now < this->tell_at && now < agent->options.deadline)
            continue;
        name_missing(agent, missing, sizeof missing);
        if (now >= agent->options.deadline) {
            refuse_all(agent, "other nodes did not come in time", 1);
            return tool_fail(
                "run: these nodes did not come in time: %s; is their tutti run started, and can they reach "
                "port %d of %s? (TUTTI_TIMEOUT gives them more time)",
                missing, agent->listeners.port, agent->options.meet.host);
        }
        this->tell_at = INT64_MAX;
        if (!agent->options.quiet && hopeless == NULL)
            fprintf(stderr, "tutti run: waiting on port %d for these nodes: %s\n", agent->listeners.port, missing);
    }
    return 0;
}

/* Tells everybody who is where. */
static int make_plan(agent *this) {
    for (int node = 0; node < this->options.nodes; node++)
        this->size += this->ranks[node];
    if (this->size > MAX_SIZE) {
        refuse_all(this, "together they have too many ranks", 1);
        return tool_fail("run: %d ranks on all hosts are more than %d", this->size, MAX_SIZE);
    }
    this->master_port = run_free_port();
    if (this->options.node < 0) /* PyTorch's rank 0 is not on this host */
        snprintf(this->master, sizeof this->master, "%s", this->peers[0].address);
    tu_frame plan = {
        .kind = TU_FRAME_PLAN, .count = this->size, .status = this->store.port, .pid = this->master_port
    };
    snprintf(plan.text, sizeof plan.text, "%s", this->master);
    for (int to = 0; to < this->options.nodes; to++) {
        if (this->peers[to].descriptor < 0)
            continue;
        for (int node = 0; node < this->options.nodes; node++) {
            const char *address;
            tu_frame frame = { .kind = TU_FRAME_NODE, .node = node, .count = this->ranks[node] };
            agent_deputies_place_of(this, node, &address, &frame.pid);
            snprintf(frame.text, sizeof frame.text, "%s %s", this->hosts[node], address);
            tu_link_put(&this->peers[to].link, &frame);
        }
        tu_link_put(&this->peers[to].link, &plan);
        agent_peer_flush(&this->peers[to]);
    }
    return 0;
}

static int meet_as_hub(agent *this, agent_hopeless *hopeless, void *argument) {
    meeting *meeting = calloc(1, sizeof *meeting);
    if (meeting == NULL)
        return tool_fail("run: no memory for the launchers of %d hosts", this->options.nodes);
    meeting->agent = this;
    meeting->tell_at = tu_deadline(PATIENCE_NS);
    for (int i = 0; i < STRANGERS; i++)
        meeting->strangers[i].descriptor = -1;
    if (this->options.node >= 0) {
        this->ranks[this->options.node] = this->options.ranks;
        gethostname(this->hosts[this->options.node], AGENT_HOST_BYTES - 1);
    }
    int result;
    if (this->options.cannot != NULL) { /* the others would wait for it */
        meeting->tell_at = INT64_MAX;
        result = gather(meeting, hopeless, argument);
        char why[256];
        snprintf(why, sizeof why, "node %d (%s) cannot start the program: %.150s", this->options.node,
                 this->hosts[this->options.node], this->options.cannot);
        refuse_all(this, why, NO_PROGRAM);
        result = result != 0 ? result : NO_PROGRAM;
    } else {
        result = gather(meeting, hopeless, argument);
    }
    for (int i = 0; i < STRANGERS; i++)
        agent_peer_close(&meeting->strangers[i]);
    free(meeting);
    tu_store_listen_end(&this->listeners); /* nobody comes any more */
    return result != 0 ? result : make_plan(this);
}

/* ---- the others ---- */

/* A connection to the hub, or -1 when nobody is there yet. */
static int try_to_connect(const tu_address_list *list) {
    for (size_t i = 0; i < list->count; i++) {
        int descriptor = socket(list->address[i].any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (descriptor < 0)
            continue;
        int error = connect(descriptor, &list->address[i].any, list->length[i]) == 0 ? 0 : errno;
        struct pollfd polled = { .fd = descriptor, .events = POLLOUT };
        socklen_t length = sizeof error;
        if (error == EINPROGRESS &&
            (poll(&polled, 1, CONNECT_MS) <= 0 || getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &length) != 0))
            error = ETIMEDOUT;
        if (error == 0)
            return descriptor;
        close(descriptor);
    }
    return -1;
}

static void say_hello(agent *this, agent_peer *hub) {
    char host[AGENT_HOST_BYTES] = "";
    gethostname(host, sizeof host - 1);
    const char *cannot = this->options.cannot;
    tu_frame hello = { .kind = TU_FRAME_HELLO,
                       .node = this->options.node,
                       .pid = agent_deputies_port(this),
                       .count = this->options.ranks,
                       .status = this->options.nodes,
                       .flags =
                           (this->options.survive ? TU_FRAME_SURVIVE : 0) | (cannot != NULL ? TU_FRAME_CANNOT : 0) };
    snprintf(hello.text, sizeof hello.text, "%s %s%s%.300s", TUTTI_VERSION_STRING, host[0] != 0 ? host : "?",
             cannot != NULL ? "\n" : "", cannot != NULL ? cannot : "");
    tu_link_put(&hub->link, &hello);
}

/* Takes in one frame of the plan. Returns 0 when it is complete, -1 for more, else what to exit with. */
static int hear_plan(agent *this, const tu_frame *frame) {
    switch (frame->kind) {
    case TU_FRAME_REFUSED:
        (void)tool_fail("run: the launcher at %s port %d says: %s", this->options.meet.host, this->options.meet.port,
                        frame->text);
        return frame->status > 0 && frame->status < 128 ? frame->status : 1;
    case TU_FRAME_NODE:
        if (frame->node >= 0 && frame->node < this->options.nodes && frame->count > 0 && frame->count <= MAX_SIZE) {
            this->ranks[frame->node] = frame->count;
            char address[AGENT_ADDRESS_BYTES] = "";
            sscanf(frame->text, "%*s %63s", address);
            agent_deputies_place(this, frame->node, address, frame->pid);
            snprintf(this->hosts[frame->node], AGENT_HOST_BYTES, "%.*s", (int)strcspn(frame->text, " "), frame->text);
            return -1;
        }
        break;
    case TU_FRAME_PLAN:
        for (int node = 0; node < this->options.nodes; node++)
            this->size += this->ranks[node];
        if (this->size != frame->count || this->ranks[this->options.node] != this->options.ranks || frame->status < 1 ||
            frame->status > 65535)
            break;
        this->store.port = frame->status;
        this->master_port = frame->pid;
        snprintf(this->master, sizeof this->master, "%.255s", frame->text);
        return 0;
    case TU_FRAME_BEAT:
        return -1;
    default:
        break;
    }
    return tool_fail("run: the launcher at %s port %d says what makes no sense (frame %d)", this->options.meet.host,
                     this->options.meet.port, (int)frame->kind);
}

/* Until the plan is there. -1: the connection was lost before the hub said anything: try again. */
static int talk_to_hub(agent *this, agent_peer *hub) {
    for (bool said = false;;) {
        if (!said && hub->link.state == TU_LINK_OPEN) { /* behind the proof */
            say_hello(this, hub);
            said = true;
        }
        agent_peer_flush(hub);
        struct pollfd polled[2] = { { .fd = hub->descriptor,
                                      .events = (short)(POLLIN | (hub->link.out_used > 0 ? POLLOUT : 0)) },
                                    { .fd = this->options.signals, .events = POLLIN } };
        poll(polled, 2, 200);
        bool there = polled[0].revents == 0 || agent_peer_read(hub);
        int result = -1;
        for (tu_frame frame; result < 0 && tu_link_take(&hub->link, &frame);)
            result = hear_plan(this, &frame);
        if (result >= 0)
            return result;
        int signal_number = ending_signal(this);
        if (signal_number != 0)
            return 128 + signal_number;
        if (!there || hub->link.state == TU_LINK_BROKEN)
            return hub->link.state == TU_LINK_GREETING
                       ? -1
                       : tool_fail("run: cannot meet the launcher at %s port %d: %s", this->options.meet.host,
                                   this->options.meet.port, hub->link.why);
        if (tu_clock_now() >= this->options.deadline)
            return tool_fail("run: the launcher at %s port %d does not say in time how many ranks are where; it may "
                             "wait for other nodes",
                             this->options.meet.host, this->options.meet.port);
    }
}

static int meet_hub(agent *this) {
    agent_peer *hub = &this->peers[0];
    int64_t give_up = this->options.deadline;
    if (this->options.connect_ns > 0 && tu_deadline(this->options.connect_ns) < give_up)
        give_up = tu_deadline(this->options.connect_ns);
    for (;;) {
        tu_address_list list;
        if (tu_address_resolve(&this->options.meet, this->options.deadline, &list) != TUTTI_OK)
            return tool_fail("run: cannot find the host of --meet: %s", tutti_error_message());
        int descriptor = try_to_connect(&list), result = -1;
        if (descriptor >= 0) {
            *hub = (agent_peer){ .descriptor = descriptor, .node = -1 };
            agent_prepare_socket(descriptor);
            if (tu_link_init(&hub->link, false, &this->options.secret) != TUTTI_OK)
                return tool_fail("run: %s", tutti_error_message());
            result = talk_to_hub(this, hub);
            if (result >= 0)
                return result;
            agent_peer_close(hub);
        }
        if (tu_clock_now() >= give_up)
            return tool_fail("run: there is no launcher at %s port %d: is the one of node 0 started, and does a "
                             "firewall let this host reach it?",
                             this->options.meet.host, this->options.meet.port);
        poll(&(struct pollfd){ .fd = this->options.signals, .events = POLLIN }, 1, AGAIN_MS);
        int signal_number = ending_signal(this);
        if (signal_number != 0)
            return 128 + signal_number;
    }
}

/* ---- both ---- */

static int make_news(agent *this) {
    const char *hosts[this->options.nodes];
    for (int node = 0; node < this->options.nodes; node++)
        hosts[node] = this->hosts[node];
    tu_news_plan plan = { .nodes = this->options.nodes,
                          .node = this->options.node,
                          .ranks = this->ranks,
                          .silence_ns = this->options.silence_ns,
                          .hosts = hosts };
    if (tu_news_create(&plan, &this->news, &this->news_descriptor) != TUTTI_OK)
        return tool_fail("run: %s", tutti_error_message());
    return 0;
}

int agent_meet(agent *this, agent_hopeless *hopeless, void *argument) {
    int result = this->options.hub ? meet_as_hub(this, hopeless, argument) : meet_hub(this);
    if (result != 0)
        return result;
    for (int node = 0; node < this->options.node; node++)
        this->first_rank += this->ranks[node];
    const char *host = this->options.meet.host[0] != 0 ? this->options.meet.host : "127.0.0.1";
    bool six = strchr(host, ':') != NULL;
    snprintf(this->store_url, sizeof this->store_url, six ? "tcp://[%s]:%d" : "tcp://%s:%d", host, this->store.port);
    if (this->master[0] == 0)
        snprintf(this->master, sizeof this->master, "%s", host);
    int64_t now = tu_clock_now();
    for (int i = 0; i < this->peer_count; i++)
        this->peers[i].heard = now;
    return make_news(this);
}

int agent_size(const agent *this) {
    return this->size;
}

int agent_first_rank(const agent *this) {
    return this->first_rank;
}

const char *agent_store(const agent *this) {
    return this->store_url;
}

int agent_store_listener(const agent *this) {
    return this->options.hub && this->store.count > 0 ? this->store.descriptor[0] : -1;
}

const char *agent_master(const agent *this, int *port) {
    *port = this->master_port;
    return this->master;
}

int agent_news_descriptor(const agent *this) {
    return this->news_descriptor;
}

tu_news *agent_news(const agent *this) {
    return this->news;
}

const tu_secret *agent_secret(const agent *this) {
    return &this->options.secret;
}
