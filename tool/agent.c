/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread of an agent: see agent.h. It alone touches the links and the news page; it reads what the guardian writes
 * into the state that they share, and leaves lines for the launcher to print, so that nobody who holds up the output
 * holds up the job.
 */
#include "agent.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent_inner.h"
#include "base/clock.h"
#include "base/thread.h"
#include "tool.h"

#define DECIDE_NS (2 * TU_SECOND) /* that a failure waits for a death that may have caused it to be told */
#define FAREWELL_NS (2 * TU_SECOND)
#define CLOCK_QUESTIONS 16 /* at once, at the beginning; then one with each beat */
#define CLOCK_DRIFT 10000  /* a clock goes wrong by one in so many at most */

/* ---- for the launcher ---- */

static void ring(int descriptor) {
    (void)!write(descriptor, &(uint64_t){ 1 }, sizeof(uint64_t));
}

static void hush(int descriptor) {
    uint64_t count;
    (void)!read(descriptor, &count, sizeof count);
}

static void say(agent *this, int rank, const char *format, ...) TUTTI_PRINTF(3, 4);
static void say(agent *this, int rank, const char *format, ...) {
    agent_line *line = calloc(1, sizeof *line);
    if (line == NULL)
        return; /* the job matters more */
    line->rank = rank;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line->text, sizeof line->text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&this->lock);
    *this->last_line = line;
    this->last_line = &line->next;
    pthread_mutex_unlock(&this->lock);
    ring(this->events);
}

bool agent_next(agent *this, char *text, size_t bytes, int *rank) {
    pthread_mutex_lock(&this->lock);
    agent_line *line = this->first_line;
    if (line != NULL) {
        this->first_line = line->next;
        if (this->first_line == NULL)
            this->last_line = &this->first_line;
    } else {
        hush(this->events);
    }
    pthread_mutex_unlock(&this->lock);
    if (line == NULL)
        return false;
    snprintf(text, bytes, "%s", line->text);
    *rank = line->rank;
    free(line);
    return true;
}

int agent_events(const agent *this) {
    return this->events;
}

void agent_signal(agent *this, int signal_number) {
    pthread_mutex_lock(&this->lock);
    if (this->signal_count < (int)(sizeof this->signals / sizeof *this->signals))
        this->signals[this->signal_count++] = signal_number;
    pthread_mutex_unlock(&this->lock);
    ring(this->wake);
}

bool agent_finished(agent *this, int *status) {
    pthread_mutex_lock(&this->lock);
    bool finished = this->finished;
    *status = this->status;
    pthread_mutex_unlock(&this->lock);
    return finished;
}

static void finish(agent *this, int status) {
    this->over = true;
    pthread_mutex_lock(&this->lock);
    this->finished = true;
    this->status = status;
    pthread_mutex_unlock(&this->lock);
    ring(this->events);
}

/* ---- telling others ---- */

static bool linked(const agent_peer *peer) {
    return peer->descriptor >= 0 && !peer->lost;
}

/* To all but one node (-2: to all). */
static void tell(agent *this, const tu_frame *frame, int but) {
    for (int i = 0; i < this->peer_count; i++)
        if (linked(&this->peers[i]) && (!this->options.hub || i != but))
            tu_link_put(&this->peers[i].link, frame);
}

static void tell_guardian(const agent *this, int message) {
    if (this->state != NULL)
        (void)send(this->guardian, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static bool own_done(const agent *this) {
    return this->state == NULL || atomic_load_explicit(&this->state->done, memory_order_acquire) != 0;
}

/* ---- signals ---- */

static void note_signal(agent *this, int number) {
    if (!run_ends(number))
        return;
    if (this->outside == number)
        this->outside_twice = true;
    else if (this->outside == 0)
        this->outside = number;
}

bool agent_ended_from_outside(const agent *this, int wait_status) {
    return this->outside != 0 && WIFSIGNALED(wait_status) &&
           (WTERMSIG(wait_status) == this->outside || (this->outside_twice && WTERMSIG(wait_status) == SIGKILL));
}

/* ---- clocks ---- */

static void ask_clock(agent *this) {
    tu_frame frame = { .kind = TU_FRAME_CLOCK };
    snprintf(frame.text, sizeof frame.text, "%" PRId64, tu_clock_now());
    if (!this->options.hub && !this->followed)
        tell(this, &frame, -2);
}

static bool answer_clock(agent_peer *from, const tu_frame *asked) {
    tu_frame frame = { .kind = TU_FRAME_CLOCK };
    snprintf(frame.text, sizeof frame.text, "%.30s %" PRId64, asked->text, tu_clock_now());
    tu_link_put(&from->link, &frame);
    agent_peer_flush(from);
    return true;
}

/* Question and answer bracket the moment at which the other clock was read: the quickest answer tells the difference
 * best, to half of what it took. Clocks drift, so an old answer is worth less with time. */
static bool hear_clock(agent *this, const tu_frame *frame) {
    int64_t asked, theirs, now = tu_clock_now();
    if (sscanf(frame->text, "%" SCNd64 " %" SCNd64, &asked, &theirs) != 2 || asked > now || asked < 0 || theirs < 0)
        return false;
    int64_t error = (now - asked) / 2, drift = (now - this->clock_at) / CLOCK_DRIFT;
    if (this->clock_answers == 0 || error <= this->clock_error + drift) {
        this->clock_error = error;
        this->clock_at = now;
        tu_news_set_clock(this->news, asked + error - theirs, error);
    }
    if (++this->clock_answers < CLOCK_QUESTIONS)
        ask_clock(this);
    return true;
}

/* ---- the end of ranks ---- */

static void note_end(agent *this, const tu_frame *frame) {
    char text[384];
    bool told = tu_news_of(this->news, frame->rank) != TU_NEWS_RUNS; /* to the hub that was before this one */
    tu_news_rank_ended(this->news, frame->rank, frame->pid, frame->status);
    if (told)
        return;
    if (frame->status == 0 || !this->options.survive || !this->first_known ||
        agent_ended_from_outside(this, frame->status))
        return;
    tu_news_text(this->news, frame->rank, text, sizeof text);
    say(this, frame->rank, "tutti run: %s\n", text);
}

/* Stops the ranks of this host, and as the hub those of all. */
static void stop_all(agent *this, const char *why) {
    if (this->stopping)
        return;
    this->stopping = true;
    tell_guardian(this, RUN_STOP);
    if (!this->options.hub)
        return;
    tu_frame frame = { .kind = TU_FRAME_STOP };
    snprintf(frame.text, sizeof frame.text, "%s", why);
    tell(this, &frame, -2);
}

/* The hub: this was the first failure. rank -1: no rank's; `text` says it. */
static void decide(agent *this, int rank, int pid, int status, const char *text) {
    this->first_known = true;
    this->first_status = status;
    tu_frame frame = { .kind = TU_FRAME_FIRST, .rank = rank, .pid = pid, .status = status };
    snprintf(frame.text, sizeof frame.text, "%.400s%s", text,
             rank >= 0 && this->options.survive ? "; the others go on" : "");
    tell(this, &frame, -2);
    say(this, rank, "tutti run: %s\n", frame.text);
    if (!this->options.survive)
        stop_all(this, frame.text);
}

static int exit_code(int wait_status) {
    return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

static void decide_by_rank(agent *this, const tu_frame *failed) {
    char text[384];
    this->candidate.kind = (tu_frame_kind)0;
    if (agent_ended_from_outside(this, failed->status)) {
        snprintf(text, sizeof text, "stopped by SIG%s from outside", sigabbrev_np(this->outside));
        decide(this, -1, 0, 128 + this->outside, text);
        return;
    }
    tu_news_text(this->news, failed->rank, text, sizeof text);
    decide(this, failed->rank, failed->pid, exit_code(failed->status), text);
}

/* Smaller is likelier to be the first of all: killed by a signal, exited, failed by another's death. */
static int blame(const tu_frame *failed) {
    return (failed->flags & TU_FRAME_SUFFERED) != 0 ? 2 : WIFSIGNALED(failed->status) ? 0 : 1;
}

/* The hub: a node says which of its ranks failed first. Ranks of other hosts may learn of a death, and exit, before the
 * kernel has torn down the dead one's memory and its launcher can tell: whoever exited waits a moment for one that was
 * killed. */
static void consider(agent *this, const tu_frame *failed) {
    if (this->first_known)
        return;
    if (blame(failed) == 0) {
        decide_by_rank(this, failed);
        return;
    }
    if (this->candidate.kind == 0)
        this->decide_at = tu_deadline(DECIDE_NS);
    if (this->candidate.kind == 0 || blame(failed) < blame(&this->candidate))
        this->candidate = *failed;
}

/* ---- lost hosts ---- */

static int ranks_left(const agent *this) {
    int left = 0;
    for (int node = 0; node < this->options.nodes; node++)
        left += this->peers[node].lost ? 0 : this->ranks[node];
    return left;
}

/* The hub has lost a node. */
static void lose_node(agent *this, agent_peer *peer, const char *why) {
    tu_frame frame = { .kind = TU_FRAME_LOST, .node = peer->node };
    snprintf(frame.text, sizeof frame.text, "%.200s", why);
    agent_peer_close(peer);
    peer->lost = true;
    tu_news_node_lost(this->news, peer->node, frame.text);
    tell(this, &frame, peer->node);
    char text[512];
    snprintf(text, sizeof text, "host %s (node %d) is lost: %.200s", this->hosts[peer->node], peer->node, why);
    int left = ranks_left(this);
    if (!this->options.survive && !this->first_known) {
        decide(this, -1, 0, 1, text);
    } else {
        say(this, -1, "tutti run: %s%s\n", text,
            this->options.survive && 2 * left >= this->size ? "; the others go on" : "");
    }
    if (this->options.survive && 2 * left < this->size && !this->stopping) {
        snprintf(text, sizeof text,
                 "fewer than half of the ranks (%d of %d) are left, so they are stopped: another part of the job may "
                 "be larger",
                 left, this->size);
        this->first_known = true;
        this->first_status = 1;
        this->options.survive = false; /* whoever ended well does not make this a success */
        say(this, -1, "tutti run: %s\n", text);
        stop_all(this, text);
    }
}

/* An agent has lost the hub, and nobody takes its place: nobody can tell it who goes on. */
void agent_give_up(agent *this, const char *why) {
    this->hub_lost = true;
    tu_news_alone(this->news, why);
    for (int node = 0; node < this->options.nodes; node++)
        if (node != this->options.node)
            tu_news_node_lost(this->news, node, "the launchers of the hosts cannot reach each other");
    say(this, -1,
        "tutti run: lost the launcher that holds the job together (at %s): %.200s. The ranks of this host are stopped: "
        "they cannot know who goes on\n",
        this->options.meet.host, why);
    stop_all(this, why);
}

static void lose_hub(agent *this, agent_peer *hub, const char *why) {
    char reason[192];
    snprintf(reason, sizeof reason, "%s", why);
    agent_peer_close(hub); /* whoever has lost it is with it no more */
    if (!agent_deputies_lose_hub(this, reason))
        agent_give_up(this, reason);
}

/* ---- another hub ---- */

/* It hears once more of what has ended here: the last hub may not have told all. */
static void tell_again(agent *this) {
    this->failure_told = this->done_told = false;
    memset(this->told, 0, (size_t)this->options.ranks * sizeof *this->told);
}

void agent_become_hub(agent *this, agent_peer *peers, const bool *counts, int lost, const char *address, int store_port,
                      const char *why) {
    int left = 0;
    free(this->peers);
    this->peers = peers;
    this->peer_count = this->options.nodes;
    this->options.hub = true;
    this->first_known = true; /* somebody's failure was the first */
    this->first_status = 1;
    tell_again(this);
    tell(this, &(tu_frame){ .kind = TU_FRAME_TAKEOVER, .status = store_port }, -2);
    tu_news_moved(this->news, this->options.node, address, store_port);
    for (int node = 0; node < this->options.nodes; node++)
        left += node == this->options.node || counts[node] ? this->ranks[node] : 0;
    say(this, -1, "tutti run: lost the launcher of node %d: %.200s. %d of %d ranks have, and go on with this one\n",
        lost, why, left, this->size);
    for (int node = 0; node < this->options.nodes; node++) {
        peers[node].heard = tu_clock_now();
        if (node != this->options.node && !counts[node])
            lose_node(this, &peers[node],
                      node == lost ? why : "it has not come to the launcher that took the place of the lost one");
    }
}

void agent_follow(agent *this, const agent_peer *hub, int lost, const char *address, int store_port, const char *why) {
    agent_peer_close(&this->peers[0]);
    this->followed = true;
    this->peers[0] = *hub;
    this->peers[0].heard = tu_clock_now();
    tell_again(this);
    snprintf(this->options.meet.host, sizeof this->options.meet.host, "%s", address);
    tu_news_moved(this->news, hub->node, address, store_port);
    say(this, -1, "tutti run: lost the launcher of node %d: %.200s. The job goes on with that of node %d\n", lost, why,
        hub->node);
}

static void lose(agent *this, agent_peer *peer, const char *why) {
    if (this->options.hub)
        lose_node(this, peer, why);
    else
        lose_hub(this, peer, why);
}

/* ---- what others say ---- */

static bool rank_of_node(const agent *this, const agent_peer *from, int rank) {
    return rank >= 0 && rank < this->size && (!this->options.hub || tu_news_node(this->news, rank) == from->node);
}

static bool hear_as_hub(agent *this, agent_peer *from, const tu_frame *frame) {
    switch (frame->kind) {
    case TU_FRAME_FAILED:
        if (!rank_of_node(this, from, frame->rank))
            return false;
        consider(this, frame);
        return true;
    case TU_FRAME_CLOCK:
        return answer_clock(from, frame);
    case TU_FRAME_DONE:
        from->done = true;
        if (frame->status != 0 && !this->first_known)
            decide(this, -1, 0, frame->status, frame->text);
        return true;
    default:
        return false;
    }
}

static bool hear_as_agent(agent *this, const tu_frame *frame) {
    switch (frame->kind) {
    case TU_FRAME_FIRST:
        this->first_known = true;
        say(this, frame->rank >= 0 && frame->rank < this->size ? frame->rank : -1, "tutti run: %s\n", frame->text);
        return true;
    case TU_FRAME_LOST:
        if (frame->node < 0 || frame->node >= this->options.nodes)
            return false;
        tu_news_node_lost(this->news, frame->node, frame->text);
        agent_deputies_node_lost(this, frame->node);
        if (this->options.survive || this->first_known) /* else it is the first failure, which is told as such */
            say(this, -1, "tutti run: host %s (node %d) is lost: %.200s\n", this->hosts[frame->node], frame->node,
                frame->text);
        return true;
    case TU_FRAME_STOP:
        if (!this->first_known)
            say(this, -1, "tutti run: %s\n", frame->text);
        stop_all(this, frame->text);
        return true;
    case TU_FRAME_FINISH:
        finish(this, frame->status & 0xff);
        return true;
    case TU_FRAME_CLOCK:
        return hear_clock(this, frame);
    default:
        return false;
    }
}

/* False for what makes no sense. */
static bool hear(agent *this, agent_peer *from, const tu_frame *frame) {
    switch (frame->kind) {
    case TU_FRAME_BEAT:
        return true;
    case TU_FRAME_ENDED:
        if (!rank_of_node(this, from, frame->rank))
            return false;
        note_end(this, frame);
        if (this->options.hub)
            tell(this, frame, from->node);
        return true;
    case TU_FRAME_SIGNAL:
        if (!run_forwards(frame->status))
            return false;
        note_signal(this, frame->status);
        tell_guardian(this, frame->status);
        if (this->options.hub)
            tell(this, frame, from->node);
        return true;
    default:
        return this->options.hub ? hear_as_hub(this, from, frame) : hear_as_agent(this, frame);
    }
}

static void hear_peer(agent *this, agent_peer *peer) {
    bool there = agent_peer_read(peer);
    for (tu_frame frame; !this->over && linked(peer) && tu_link_take(&peer->link, &frame);)
        if (!hear(this, peer, &frame)) {
            there = false;
            snprintf(peer->link.why, sizeof peer->link.why, "what it says makes no sense (frame %d)", (int)frame.kind);
            break;
        }
    if (!this->over && linked(peer) && (!there || peer->link.state == TU_LINK_BROKEN))
        lose(this, peer, peer->link.why);
}

/* ---- what happens here ---- */

static void tell_end(agent *this, int here) {
    const run_rank *rank = &this->state->ranks[here];
    tu_frame frame = { .kind = TU_FRAME_ENDED,
                       .node = this->options.node,
                       .rank = this->first_rank + here,
                       .pid = atomic_load_explicit(&rank->pid, memory_order_relaxed),
                       .status = atomic_load_explicit(&rank->wait_status, memory_order_relaxed) };
    this->told[here] = true;
    note_end(this, &frame);
    tell(this, &frame, -2);
}

/* A rank that was killed is told at once. One that exited with a failure may have done so because of another that is
 * still on its way out, and whoever hears of it first would blame it: it waits until the guardian knows who failed
 * first, which is then told first. */
static void look_at_ends(agent *this) {
    if (this->state == NULL)
        return;
    int first = (int)atomic_load_explicit(&this->state->first_failure, memory_order_acquire) - 1;
    if (first >= 0 && !this->told[first])
        tell_end(this, first);
    for (int i = 0; i < this->options.ranks; i++) {
        const run_rank *rank = &this->state->ranks[i];
        /* Acquire pairs with the guardian's release: the wait status is there. */
        if (this->told[i] || atomic_load_explicit(&rank->ended, memory_order_acquire) == 0)
            continue;
        int status = atomic_load_explicit(&rank->wait_status, memory_order_relaxed);
        if (status == 0 || WIFSIGNALED(status) || first >= 0)
            tell_end(this, i);
    }
}

static void look_at_failure(agent *this) {
    uint32_t first = this->state != NULL ? atomic_load_explicit(&this->state->first_failure, memory_order_acquire) : 0;
    if (first == 0 || this->failure_told)
        return;
    this->failure_told = true;
    run_rank *rank = &this->state->ranks[first - 1];
    bool suffered = atomic_load_explicit(&this->state->first_suffered, memory_order_relaxed) != 0;
    tu_frame frame = { .kind = TU_FRAME_FAILED,
                       .node = this->options.node,
                       .rank = this->first_rank + (int)first - 1,
                       .pid = atomic_load_explicit(&rank->pid, memory_order_relaxed),
                       .status = atomic_load_explicit(&rank->wait_status, memory_order_relaxed),
                       .flags = suffered ? TU_FRAME_SUFFERED : 0 };
    if (this->options.hub)
        consider(this, &frame);
    else
        tell(this, &frame, -2);
}

static void look_at_end(agent *this) {
    if (this->state == NULL || this->done_told || !own_done(this))
        return;
    this->done_told = true;
    tu_frame frame = { .kind = TU_FRAME_DONE, .node = this->options.node };
    int error = atomic_load_explicit(&this->state->start_error, memory_order_acquire);
    if (error != 0) {
        frame.status = error == ENOENT ? 127 : 126;
        snprintf(frame.text, sizeof frame.text, "host %s (node %d) cannot start rank %d: %s",
                 this->hosts[this->options.node], this->options.node,
                 this->first_rank + atomic_load(&this->state->start_rank), strerror(error));
    }
    if (!this->options.hub)
        tell(this, &frame, -2);
    else if (error != 0 && !this->first_known)
        decide(this, -1, 0, frame.status, frame.text);
}

static void pass_signals(agent *this) {
    int signals[sizeof this->signals / sizeof *this->signals], count;
    pthread_mutex_lock(&this->lock);
    count = this->signal_count;
    memcpy(signals, this->signals, sizeof signals);
    this->signal_count = 0;
    pthread_mutex_unlock(&this->lock);
    for (int i = 0; i < count; i++) {
        note_signal(this, signals[i]);
        tell(this, &(tu_frame){ .kind = TU_FRAME_SIGNAL, .status = signals[i] }, -2);
    }
}

/* ---- time ---- */

static void keep_time(agent *this) {
    int64_t now = tu_clock_now();
    tu_news_beat(this->news);
    agent_deputies_look(this);
    if (now >= this->beat_at) {
        this->beat_at = now + this->options.silence_ns / AGENT_BEATS;
        tell(this, &(tu_frame){ .kind = TU_FRAME_BEAT }, -2);
        ask_clock(this);
    }
    for (int i = 0; i < this->peer_count; i++) {
        agent_peer *peer = &this->peers[i];
        if (!linked(peer) || now - peer->heard <= this->options.silence_ns)
            continue;
        char why[128];
        snprintf(why, sizeof why, "it has been silent for %.1f s (TUTTI_HOST_TIMEOUT)",
                 (double)(now - peer->heard) / 1e9);
        lose(this, peer, why);
    }
    if (this->candidate.kind != 0 && now >= this->decide_at && !this->first_known)
        decide_by_rank(this, &this->candidate);
}

/* Those that stood still while this process did cannot have been heard: a stopped launcher, or one that did not get to
 * run, first listens again. */
static void forgive_own_silence(agent *this, int64_t before) {
    int64_t gap = tu_clock_now() - before;
    if (gap <= this->options.silence_ns / 2)
        return;
    for (int i = 0; i < this->peer_count; i++)
        this->peers[i].heard += gap;
    agent_deputies_forgive(this, gap);
}

/* ---- the end ---- */

static bool any_ended_well(const agent *this) {
    for (int rank = 0; rank < this->size; rank++)
        if (tu_news_of(this->news, rank) == TU_NEWS_ENDED)
            return true;
    return false;
}

static void look_at_job(agent *this) {
    if (this->hub_lost) {
        if (own_done(this))
            finish(this, 1);
        return;
    }
    if (!this->options.hub || !own_done(this))
        return;
    for (int i = 0; i < this->peer_count; i++)
        if (i != this->options.node && !this->peers[i].done && !this->peers[i].lost)
            return;
    if (!this->first_known && this->candidate.kind != 0)
        decide_by_rank(this, &this->candidate);
    int status = !this->first_known || (this->options.survive && any_ended_well(this)) ? 0 : this->first_status;
    tell(this, &(tu_frame){ .kind = TU_FRAME_FINISH, .status = status }, -2);
    finish(this, status);
}

static bool anything_to_send(const agent *this) {
    for (int i = 0; i < this->peer_count; i++)
        if (linked(&this->peers[i]) && this->peers[i].link.out_used > 0)
            return true;
    return false;
}

/* Sends the last words: those who read them close their end, or time is over. */
static void say_goodbye(agent *this) {
    int64_t deadline = tu_deadline(FAREWELL_NS);
    while (anything_to_send(this) && tu_clock_now() < deadline) {
        struct pollfd polled[this->peer_count];
        for (int i = 0; i < this->peer_count; i++) {
            agent_peer *peer = &this->peers[i];
            bool waits = linked(peer) && peer->link.out_used > 0;
            polled[i] = (struct pollfd){ .fd = waits ? peer->descriptor : -1, .events = POLLOUT };
        }
        poll(polled, (nfds_t)this->peer_count, 100);
        for (int i = 0; i < this->peer_count; i++) {
            agent_peer_flush(&this->peers[i]);
            if ((polled[i].revents & (POLLERR | POLLHUP)) != 0)
                agent_peer_close(&this->peers[i]);
        }
    }
}

/* ---- the thread ---- */

static void wait_and_hear(agent *this) {
    int count = this->peer_count, line = 2 + count;
    struct pollfd polled[line + agent_deputies_room(this)];
    polled[0] = (struct pollfd){ .fd = this->wake, .events = POLLIN };
    polled[1] = (struct pollfd){ .fd = this->woken, .events = POLLIN };
    for (int i = 0; i < count; i++) {
        const agent_peer *peer = &this->peers[i];
        polled[2 + i] = (struct pollfd){ .fd = linked(peer) ? peer->descriptor : -1,
                                         .events = (short)(POLLIN | (peer->link.out_used > 0 ? POLLOUT : 0)) };
    }
    agent_deputies_poll(this, polled + line);
    int64_t before = tu_clock_now();
    poll(polled, (nfds_t)(line + agent_deputies_room(this)),
         (int)(this->options.silence_ns / AGENT_BEATS / TU_MILLISECOND));
    forgive_own_silence(this, before);
    for (int i = 0; i < 2; i++)
        if (polled[i].revents != 0)
            hush(polled[i].fd);
    for (int i = 0; i < count && !this->over; i++)
        if (polled[2 + i].revents != 0 && linked(&this->peers[i]))
            hear_peer(this, &this->peers[i]);
    if (!this->over)
        agent_deputies_hear(this, polled + line);
}

static void *talk(void *argument) {
    agent *this = argument;
    while (!this->over && !atomic_load_explicit(&this->ending, memory_order_acquire)) {
        pass_signals(this); /* before the ends that they bring about */
        look_at_ends(this);
        look_at_failure(this);
        look_at_end(this);
        keep_time(this);
        look_at_job(this);
        for (int i = 0; i < this->peer_count; i++)
            agent_peer_flush(&this->peers[i]);
        if (!this->over)
            wait_and_hear(this);
    }
    say_goodbye(this);
    return NULL;
}

int agent_start(agent *this, run_state *state, int guardian, int woken) {
    this->state = state;
    this->guardian = guardian;
    this->woken = woken;
    if (this->options.hub)
        tu_news_set_clock(this->news, 0, 0);
    this->told = calloc((size_t)this->options.ranks + 1, sizeof *this->told);
    int error = this->told == NULL ? ENOMEM : tu_thread_start("tutti-agent", talk, this, &this->thread);
    if (error != 0)
        return tool_fail("run: cannot start the thread that talks to other hosts: %s", strerror(error));
    this->started = true;
    return 0;
}

void agent_close(agent *this) {
    if (this == NULL)
        return;
    /* Acquired by the thread: what the launcher did before is visible. */
    atomic_store_explicit(&this->ending, true, memory_order_release);
    ring(this->wake);
    if (this->started)
        pthread_join(this->thread, NULL);
    for (int i = 0; this->peers != NULL && i < this->peer_count; i++)
        agent_peer_close(&this->peers[i]);
    tu_store_listen_end(&this->listeners);
    agent_deputies_close(this);
    char text[640];
    for (int rank; agent_next(this, text, sizeof text, &rank);)
        continue;
    tu_news_close(this->news);
    if (this->news_descriptor >= 0)
        close(this->news_descriptor);
    tu_secret_wipe(&this->options.secret);
    free(this->told);
    free(this->peers);
    free(this->ranks);
    free(this->hosts);
    pthread_mutex_destroy(&this->lock);
    free(this);
}
