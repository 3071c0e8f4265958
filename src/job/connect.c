/* SPDX-License-Identifier: Apache-2.0
 *
 * Connecting the process-ranks of a host: each connects to the abstract sockets of all lower ranks and accepts the
 * higher ones. The kernel says who is at the other end (SO_PEERCRED); a hello proves that it knows the nonce from the
 * store and says which rank it is. Strangers and garbage are logged and closed, and do not disturb. The founder sends
 * the job segment down each new connection.
 *
 * One loop does all of it without blocking, so that no order of arrival can block it either.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "job/inner.h"

#define HELLO_MAGIC UINT64_C(0x4f4c4c4548495554) /* "TUIHELLO" */
#define STRANGERS 64 /* connections without a hello besides those of all ranks; then the oldest goes */
#define HELLO_LIMIT (10 * TU_SECOND)
#define DOUBT_INTERVAL TU_SECOND

typedef struct hello {
    uint64_t magic;
    uint32_t version;
    int32_t world_rank, world_size;
    int32_t pid;
    uint8_t nonce[TU_NONCE_BYTES]; /* of the rank that is greeted, from its record */
} hello;

typedef struct half_open {
    int fd;
    int64_t since;
} half_open;

typedef struct connecting {
    tu_opening *opening;
    tu_job *job;
    half_open *waiting; /* room for every other rank, and for STRANGERS */
    int waiting_count, waiting_room;
    struct pollfd *polls; /* room for all of these, and two more; or for one per rank */
    int missing;          /* connections not made yet */
    bool *page_sent;      /* by job rank; the founder's */
    int pages_to_send;
    bool page_here;
    int64_t next_look;
    int64_t next_doubt; /* whether those that are missing are still who they were */
} connecting;

tutti_status tu_listen(int world_size, int *listener, uint8_t name[TU_NONCE_BYTES]) {
    tutti_status status = tu_random_bytes(name, TU_NONCE_BYTES);
    if (status != TUTTI_OK)
        return status;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return tu_error_system(errno, "cannot create the socket on which other ranks reach this one");
    struct sockaddr_un address;
    socklen_t length = tu_socket_address(name, &address);
    if (bind(fd, (struct sockaddr *)&address, length) != 0 || listen(fd, world_size + STRANGERS) != 0) {
        status = tu_error_system(errno, "cannot listen on an abstract Unix socket");
        close(fd);
        return status;
    }
    *listener = fd;
    return TUTTI_OK;
}

static bool is_founder(const connecting *state) {
    return state->opening->rank == state->opening->founder;
}

static tu_peer *founder_of(const connecting *state) {
    return &state->job->peers[state->opening->founder];
}

/* Whether this rank connects to that one, or waits for its connection: the higher to the lower, and those that are
 * there already to newcomers. */
static bool connects_to(const tu_opening *opening, int rank) {
    return rank < opening->rank && (opening->fresh == NULL || opening->fresh[rank]);
}

static const tu_record *record_of(const connecting *state, int rank) {
    return &state->opening->records[state->opening->local[rank]];
}

/* ---- both sides ---- */

static tutti_status adopt(connecting *state, int rank, int fd) {
    state->job->peers[rank].fd = fd;
    state->missing--;
    if (is_founder(state))
        state->pages_to_send++;
    return TUTTI_OK;
}

static bool peer_credentials(int fd, struct ucred *credentials) {
    socklen_t length = sizeof *credentials;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, credentials, &length) == 0;
}

/* ---- to lower ranks ---- */

/* Connects without waiting. Leaves the peer unconnected when that is not possible now: looking around tells whether it
 * ever will be. */
static tutti_status connect_to(connecting *state, int rank) {
    const tu_record *record = record_of(state, rank);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return tu_error_system(errno, "cannot create a socket to reach rank %d", record->world_rank);
    struct sockaddr_un address;
    socklen_t length = tu_socket_address(record->socket, &address);
    if (connect(fd, (struct sockaddr *)&address, length) != 0) {
        int error = errno;
        close(fd);
        if (error == ECONNREFUSED || error == EAGAIN || error == EINTR)
            return TUTTI_OK;
        return tu_error_system(error, "cannot connect to rank %d (pid %d)", record->world_rank, record->pid);
    }
    struct ucred credentials;
    if (!peer_credentials(fd, &credentials) || credentials.uid != state->opening->mine.uid ||
        credentials.pid != record->pid) {
        close(fd);
        return tu_error(TUTTI_ERROR_REFUSED,
                        "the socket of rank %d belongs to another process (pid %d, uid %u) than its record says "
                        "(pid %d, uid %u)",
                        record->world_rank, credentials.pid, credentials.uid, record->pid, record->uid);
    }
    hello greeting = { .magic = HELLO_MAGIC,
                       .version = TU_PAGE_VERSION,
                       .world_rank = state->opening->mine.world_rank,
                       .world_size = state->opening->mine.world_size,
                       .pid = state->opening->mine.pid };
    memcpy(greeting.nonce, record->nonce, TU_NONCE_BYTES);
    if (send(fd, &greeting, sizeof greeting, MSG_NOSIGNAL) != (ssize_t)sizeof greeting) {
        int error = errno;
        close(fd);
        if (error == EPIPE || error == ECONNRESET)
            return TUTTI_OK;
        return tu_error_system(error, "cannot greet rank %d (pid %d)", record->world_rank, record->pid);
    }
    return adopt(state, rank, fd);
}

/* ---- from higher ranks ---- */

static void refuse(connecting *state, int fd, const char *why) {
    struct ucred credentials = { 0 };
    (void)peer_credentials(fd, &credentials);
    TU_LOG(TUTTI_LOG_WARN, state->job->log, "job", "a connection from pid %d (uid %u) was closed: %s", credentials.pid,
           credentials.uid, why);
    close(fd);
}

/* Which job rank a hello comes from, or -1 with the reason. */
static int check_hello(const connecting *state, int fd, const hello *greeting, ssize_t bytes, const char **why) {
    const tu_opening *opening = state->opening;
    struct ucred credentials;
    *why = "its hello is garbage";
    if (bytes != (ssize_t)sizeof *greeting || greeting->magic != HELLO_MAGIC)
        return -1;
    *why = "it has another layout version";
    if (greeting->version != TU_PAGE_VERSION)
        return -1;
    *why = "it does not know the nonce";
    if (memcmp(greeting->nonce, opening->mine.nonce, TU_NONCE_BYTES) != 0)
        return -1;
    *why = "it has another world size";
    if (greeting->world_size != opening->mine.world_size)
        return -1;
    *why = "it is not a rank that may connect here";
    int rank = 0;
    while (rank < opening->size && opening->local[rank] != greeting->world_rank)
        rank++;
    if (rank == opening->size || rank == opening->rank || connects_to(opening, rank))
        return -1;
    *why = "its rank was published by another process";
    if (!peer_credentials(fd, &credentials) || credentials.pid != record_of(state, rank)->pid)
        return -1;
    *why = "its rank is connected already";
    return state->job->peers[rank].fd < 0 ? rank : -1;
}

/* Reads the hello of a half-open connection if it has come; true when the connection is half-open no more. */
static bool greet(connecting *state, half_open *waiting) {
    hello greeting;
    ssize_t bytes = recv(waiting->fd, &greeting, sizeof greeting, MSG_DONTWAIT | MSG_TRUNC);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) {
        if (tu_clock_now() - waiting->since < HELLO_LIMIT)
            return false;
        refuse(state, waiting->fd, "it did not say hello");
        return true;
    }
    const char *why = "it closed without a hello";
    int rank = bytes > 0 ? check_hello(state, waiting->fd, &greeting, bytes, &why) : -1;
    if (rank < 0)
        refuse(state, waiting->fd, why);
    else
        (void)adopt(state, rank, waiting->fd);
    return true;
}

static void greet_all(connecting *state) {
    int kept = 0;
    for (int i = 0; i < state->waiting_count; i++)
        if (!greet(state, &state->waiting[i]))
            state->waiting[kept++] = state->waiting[i];
    state->waiting_count = kept;
}

static tutti_status accept_all(connecting *state) {
    for (;;) {
        int fd = accept4(state->opening->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR))
            return TUTTI_OK;
        if (fd < 0)
            return tu_error_system(errno, "cannot accept the connection of another rank");
        struct ucred credentials;
        if (!peer_credentials(fd, &credentials) || credentials.uid != state->opening->mine.uid) {
            refuse(state, fd, "it belongs to another user");
            continue;
        }
        if (state->waiting_count == state->waiting_room)
            greet_all(state); /* the hello of a rank comes with its connection: now only strangers are left */
        if (state->waiting_count == state->waiting_room) {
            refuse(state, state->waiting[0].fd, "too many connections without a hello");
            state->waiting_count--;
            memmove(&state->waiting[0], &state->waiting[1], (size_t)state->waiting_count * sizeof state->waiting[0]);
        }
        state->waiting[state->waiting_count++] = (half_open){ .fd = fd, .since = tu_clock_now() };
    }
}

/* ---- the job segment ---- */

static tutti_status send_pages(connecting *state) {
    for (int rank = 1; rank < state->opening->size && state->pages_to_send > 0; rank++) {
        tu_peer *peer = &state->job->peers[rank];
        if (peer->fd < 0 || state->page_sent[rank])
            continue;
        int error = tu_wire_send_page(peer->fd, state->opening->rank, state->job->house->page_fd);
        if (error == EAGAIN || error == ETOOMANYREFS || error == ENOBUFS)
            continue; /* too many descriptors on their way: goes by */
        if (error != 0 && error != EPIPE && error != ECONNRESET)
            return tu_error_system(error, "cannot send the job segment to rank %d (pid %d)", peer->world_rank,
                                   peer->pid);
        state->page_sent[rank] = true; /* if it broke, looking around finds the death */
        state->pages_to_send--;
    }
    return TUTTI_OK;
}

static tutti_status take_page(connecting *state) {
    tu_peer *founder = founder_of(state);
    if (founder->fd < 0)
        return TUTTI_OK;
    union {
        tu_message message;
        char room[sizeof(tu_message) + 64];
    } space = { 0 };
    int descriptor;
    bool lost;
    ssize_t got = tu_wire_take(founder->fd, &space.message, 64, &descriptor, &lost);
    if (got < 0 && errno != EBADMSG)
        return TUTTI_OK; /* not yet; or it broke, then looking around tells */
    if (got == 0)
        return TUTTI_OK;
    char whose[80];
    snprintf(whose, sizeof whose, "the job segment of rank %d (pid %d)", founder->world_rank, founder->pid);
    if (got < 0 || space.message.wire.kind != TU_WIRE_PAGE) {
        if (got > 0 && descriptor >= 0)
            close(descriptor);
        return tu_error(TUTTI_ERROR_PROTOCOL, "garbage came instead of %s", whose);
    }
    if (descriptor < 0 && lost)
        return tu_error_system(EMFILE, "the descriptor of %s was lost on arrival", whose);
    if (descriptor < 0)
        return tu_error(TUTTI_ERROR_PROTOCOL, "a message without descriptor came instead of %s", whose);
    const uint8_t *nonce = state->opening->page_nonce != NULL ? state->opening->page_nonce : record_of(state, 0)->nonce;
    tutti_status status = tu_house_enter(state->job->house, descriptor, nonce, whose);
    state->page_here = status == TUTTI_OK;
    return status;
}

/* ---- the loop ---- */

/* A peer that is missing, or that has gone again: is it dead, or has it said why? One system call asks about all, where
 * there are pidfds. */
static tutti_status look_at_peers(connecting *state) {
    tutti_status status = tu_meet_trouble(state->opening);
    int size = state->opening->size;
    for (int rank = 0; rank < size; rank++)
        state->polls[rank] = (struct pollfd){ .fd = state->job->peers[rank].pidfd, .events = POLLIN };
    bool asked = poll(state->polls, (nfds_t)size, 0) >= 0;
    bool doubt = tu_clock_now() >= state->next_doubt;
    if (doubt)
        state->next_doubt = tu_deadline(DOUBT_INTERVAL);
    for (int rank = 0; rank < size && status == TUTTI_OK; rank++) {
        const tu_record *record = record_of(state, rank);
        tu_peer *peer = &state->job->peers[rank];
        bool lives = asked && peer->pidfd >= 0 ? (state->polls[rank].revents & POLLIN) == 0
                                               : tu_process_runs(record->pid, record->start_time);
        /* A number that was given to another process since its record was written. */
        if (doubt && lives && peer->fd < 0 && peer->pidfd >= 0)
            lives = tu_process_runs(record->pid, record->start_time);
        if (rank == state->opening->rank || lives)
            continue;
        status = tu_meet_died(state->opening, record, peer->pidfd);
    }
    return status;
}

static tutti_status not_connected(const connecting *state) {
    const tu_opening *opening = state->opening;
    bool *marked = calloc((size_t)opening->size, sizeof *marked);
    if (marked == NULL)
        return tu_error_memory("a list of ranks", (size_t)opening->size * sizeof *marked);
    for (int rank = 0; rank < opening->size; rank++)
        marked[rank] = rank != opening->rank && state->job->peers[rank].fd < 0;
    char missing[256];
    tu_rank_names(marked, opening->local, opening->size, missing, sizeof missing);
    if (state->missing > 0)
        tu_error(TUTTI_ERROR_TIMEOUT,
                 "timeout while opening world \"%s\": rank %s of this host did not connect to rank %d; stopped?",
                 opening->options->name, missing, opening->mine.world_rank);
    else
        tu_error(TUTTI_ERROR_TIMEOUT,
                 "timeout while opening world \"%s\": the job segment did not come from rank %d (pid %d); stopped?",
                 opening->options->name, founder_of(state)->world_rank, founder_of(state)->pid);
    for (int rank = 0; rank < opening->size; rank++)
        if (marked[rank])
            tu_error_at_fault(opening->local[rank]);
    free(marked);
    return TUTTI_ERROR_TIMEOUT;
}

static tutti_status look_around(connecting *state) {
    const tu_job_options *options = state->opening->options;
    int64_t now = tu_clock_now();
    if (options->interrupt != NULL && atomic_load_explicit(options->interrupt, memory_order_relaxed) != 0)
        return tu_error(TUTTI_ERROR_INTERRUPTED, "rank %d was interrupted while opening world \"%s\"",
                        options->world_rank, options->name);
    if (now >= state->next_look) {
        state->next_look = now + TU_LOOK_INTERVAL;
        tutti_status status = look_at_peers(state);
        for (int rank = 0; rank < state->opening->rank && status == TUTTI_OK; rank++)
            if (state->job->peers[rank].fd < 0 && connects_to(state->opening, rank))
                status = connect_to(state, rank);
        if (status != TUTTI_OK)
            return status;
    }
    return now >= options->deadline ? not_connected(state) : TUTTI_OK;
}

static void wait_for_news(connecting *state) {
    struct pollfd *polls = state->polls;
    nfds_t count = 0;
    polls[count++] = (struct pollfd){ .fd = state->opening->listener, .events = POLLIN };
    if (!is_founder(state))
        polls[count++] = (struct pollfd){ .fd = state->page_here ? -1 : founder_of(state)->fd, .events = POLLIN };
    for (int i = 0; i < state->waiting_count; i++)
        polls[count++] = (struct pollfd){ .fd = state->waiting[i].fd, .events = POLLIN };
    int64_t wait = state->pages_to_send > 0 ? TU_MILLISECOND : TU_LOOK_INTERVAL;
    int64_t left = tu_deadline_left(state->opening->options->deadline);
    if (wait > left)
        wait = left;
    struct timespec time = { .tv_sec = wait / TU_SECOND, .tv_nsec = wait % TU_SECOND };
    bool failed = ppoll(polls, count, &time, NULL) < 0 && errno != EINTR;
    if (failed || (!is_founder(state) && (polls[1].revents & POLLHUP) != 0 && (polls[1].revents & POLLIN) == 0))
        (void)nanosleep(&(struct timespec){ .tv_nsec = TU_MILLISECOND },
                        NULL); /* the founder left: do not spin until we know why */
}

static bool complete(const connecting *state) {
    return state->missing == 0 && (is_founder(state) ? state->pages_to_send == 0 : state->page_here);
}

static tutti_status run(connecting *state) {
    tutti_status status = TUTTI_OK;
    for (int rank = 0; rank < state->opening->rank && status == TUTTI_OK; rank++)
        if (connects_to(state->opening, rank))
            status = connect_to(state, rank);
    while (status == TUTTI_OK) {
        status = accept_all(state);
        if (status != TUTTI_OK)
            return status;
        greet_all(state);
        if (is_founder(state))
            status = send_pages(state);
        else if (!state->page_here)
            status = take_page(state);
        if (status != TUTTI_OK || complete(state))
            return status;
        wait_for_news(state);
        status = look_around(state);
    }
    return status;
}

tutti_status tu_connect(tu_opening *opening) {
    connecting state = { .opening = opening, .job = opening->job, .missing = opening->size - 1 };
    state.next_look = tu_clock_now() + TU_LOOK_INTERVAL;
    state.next_doubt = tu_deadline(DOUBT_INTERVAL);
    size_t size = (size_t)opening->size, room = size + STRANGERS;
    state.waiting_room = (int)room;
    state.page_sent = calloc(size, sizeof *state.page_sent);
    state.waiting = calloc(room, sizeof *state.waiting);
    state.polls = calloc(room + 2, sizeof *state.polls);
    tutti_status status = TUTTI_OK;
    if (state.page_sent == NULL || state.waiting == NULL || state.polls == NULL)
        status = tu_error_memory("connections", room * (sizeof *state.waiting + sizeof *state.polls));
    else
        status = run(&state);
    for (int i = 0; i < state.waiting_count; i++)
        close(state.waiting[i].fd);
    free(state.page_sent);
    free(state.waiting);
    free(state.polls);
    return status;
}

tutti_status tu_connect_one(tu_opening *opening, int rank) {
    connecting state = { .opening = opening, .job = opening->job, .missing = 1 };
    return connect_to(&state, rank);
}
