/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages over the connections between process-ranks. Each is one SEQPACKET record: header, payload, at most one
 * descriptor. Nothing here waits except tu_wire_receive, which waits for as long as it is told. What comes in is
 * believed only after it has been checked; a message that makes no sense is logged and dropped, and the job goes on.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "job/inner.h"

#define EVENTS_AT_ONCE 64
#define DESCRIPTORS 4 /* room for more than the one we take, so that a surplus is seen and closed */

/* ---- sending ---- */

static int send_record(int fd, const tu_wire *wire, const void *payload, int descriptor) {
    struct iovec parts[2] = { { (void *)wire, sizeof *wire }, { (void *)payload, wire->bytes } };
    struct msghdr header = { .msg_iov = parts, .msg_iovlen = wire->bytes > 0 ? 2 : 1 };
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    if (descriptor >= 0) {
        memset(control, 0, sizeof control);
        header.msg_control = control;
        header.msg_controllen = sizeof control;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
    }
    ssize_t sent;
    do
        sent = sendmsg(fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? errno : 0;
}

tutti_status tu_wire_send(tu_job *job, int to, const tu_wire *wire, const void *payload, const tu_piece *piece,
                          int descriptor, bool *crowded) {
    tu_peer *peer = &job->peers[to];
    *crowded = false;
    if (atomic_load_explicit(&peer->ended, memory_order_relaxed))
        return TUTTI_ERROR_GONE;
    bool heap = piece != NULL && piece->segment->heap;
    _Atomic uint32_t *holds = heap ? tu_piece_holds(job, piece->segment, piece->offset, to) : NULL;
    if (heap) /* before it can be received: the piece is not reused while the message is on its way */
        atomic_fetch_add_explicit(holds, 1, memory_order_relaxed);
    pthread_mutex_lock(&peer->send_lock);
    bool with = piece != NULL && (!heap || !atomic_load_explicit(&piece->segment->sent[to], memory_order_relaxed));
    int error = send_record(peer->fd, wire, payload, with ? piece->segment->fd : descriptor);
    if (error == 0 && heap)
        atomic_store_explicit(&piece->segment->sent[to], true, memory_order_relaxed);
    pthread_mutex_unlock(&peer->send_lock);
    if (error == 0)
        return TUTTI_OK;
    if (heap)
        atomic_fetch_sub_explicit(holds, 1, memory_order_relaxed);
    switch (error) {
    case EAGAIN:
    case ENOBUFS:
        return TUTTI_ERROR_EMPTY;
    case ETOOMANYREFS: /* descriptors of this user that nobody has received yet: goes by */
        *crowded = true;
        return TUTTI_ERROR_EMPTY;
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN:
        return TUTTI_ERROR_GONE;
    default:
        return tu_error_system(error, "cannot send to rank %d (pid %d)", peer->world_rank, peer->pid);
    }
}

/* ---- receiving ---- */

void tu_message_free(tu_message *message) {
    tu_mapping_release(message->mapping);
    if (message->has_descriptor)
        close(message->descriptor);
    free(message->error);
    free(message);
}

/* Takes the first descriptor out of a received message and closes any others. */
static int take_descriptor(struct msghdr *header) {
    int first = -1;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(header); part != NULL; part = CMSG_NXTHDR(header, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
            if (first < 0)
                first = fd;
            else
                close(fd);
        }
    }
    return first;
}

ssize_t tu_wire_take(int fd, tu_message *message, size_t room, int *descriptor, bool *lost) {
    struct iovec parts[2] = { { &message->wire, sizeof message->wire }, { message->payload, room } };
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(DESCRIPTORS * sizeof(int))];
    struct msghdr header = {
        .msg_iov = parts, .msg_iovlen = 2, .msg_control = control, .msg_controllen = sizeof control
    };
    ssize_t got;
    do
        got = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    *descriptor = -1;
    *lost = false;
    if (got <= 0)
        return got;
    *descriptor = take_descriptor(&header);
    *lost = (header.msg_flags & MSG_CTRUNC) != 0;
    bool whole = (header.msg_flags & MSG_TRUNC) == 0 && (size_t)got >= sizeof message->wire &&
                 message->wire.magic == TU_WIRE_MAGIC && (size_t)got == sizeof message->wire + message->wire.bytes &&
                 memchr(message->wire.purpose, '\0', TU_PURPOSE_BYTES) != NULL;
    if (!whole && *descriptor >= 0) {
        close(*descriptor);
        *descriptor = -1;
    }
    errno = EBADMSG;
    return whole ? got : -1;
}

static tutti_status lost_descriptor(tu_job *job, int from, const tu_piece_wire *piece) {
    if (piece->heap) {
        tu_wire need = { .magic = TU_WIRE_MAGIC, .kind = TU_WIRE_NEED, .key = piece->id, .sender = job->rank };
        bool crowded; /* if it cannot be sent now, the next exchange fails here again and asks again */
        (void)tu_wire_send(job, from, &need, NULL, NULL, -1, &crowded);
    }
    return tu_error_system(EMFILE, "a descriptor from rank %d (pid %d) was lost on arrival",
                           job->peers[from].world_rank, job->peers[from].pid);
}

static tutti_status map_piece(tu_job *job, int from, tu_message *message, int descriptor, bool lost) {
    const tu_piece_wire *piece = &message->wire.piece;
    if (lost && descriptor < 0)
        return lost_descriptor(job, from, piece);
    tu_segment *segment;
    tutti_status status = tu_segment_import(job, from, piece, descriptor, &segment);
    if (status == TUTTI_ERROR_NOT_FOUND && piece->heap)
        return lost_descriptor(job, from, piece); /* it was lost earlier, and our asking for it too */
    if (status != TUTTI_OK)
        return status;
    status = tu_mapping_make(job, segment, piece, job->rank, true, &message->mapping);
    if (status != TUTTI_OK && piece->heap && piece->offset >= tu_holds_bytes(job) && piece->offset < segment->bytes)
        atomic_fetch_sub_explicit(tu_piece_holds(job, segment, piece->offset, job->rank), 1, memory_order_release);
    tu_segment_drop(segment); /* the mapping has its own reference */
    return status;
}

/* Keeps why a piece could not be mapped for the thread whose exchange it is. */
static void note_error(tu_message *message, tutti_status status) {
    message->status = status;
    message->error = malloc(sizeof *message->error);
    if (message->error != NULL)
        tu_error_save(message->error);
}

static void file_message(tu_job *job, int from, tu_message *message, int descriptor, bool lost) {
    if (message->wire.sender != from || message->wire.bytes > TU_EXCHANGE_BYTES ||
        (message->wire.kind != TU_WIRE_EXCHANGE && message->wire.kind != TU_WIRE_NEED)) {
        TU_LOG(TUTTI_LOG_WARN, job->log, "job", "a message from rank %d that makes no sense was dropped",
               job->peers[from].world_rank);
        if (descriptor >= 0)
            close(descriptor);
        free(message);
        return;
    }
    if (message->wire.kind == TU_WIRE_NEED) {
        tu_heap_send_again(job->heap, message->wire.key, from);
        if (descriptor >= 0)
            close(descriptor);
        free(message);
        return;
    }
    if (message->wire.piece.id != 0) {
        tutti_status status = map_piece(job, from, message, descriptor, lost);
        if (status != TUTTI_OK)
            note_error(message, status);
    } else if (message->wire.descriptor != 0) {
        message->has_descriptor = descriptor >= 0;
        message->descriptor = descriptor;
        if (descriptor < 0)
            note_error(message, tu_error_system(EMFILE, "a descriptor from rank %d (pid %d) was lost on arrival",
                                                job->peers[from].world_rank, job->peers[from].pid));
    } else if (descriptor >= 0) {
        close(descriptor);
    }
    tu_mailbox_put(job->mailbox, message);
}

/* Reads one message of a peer; *any becomes true when there was one. */
static tutti_status read_peer(tu_job *job, int from, bool *any) {
    tu_peer *peer = &job->peers[from];
    tu_message *message = malloc(sizeof *message + TU_EXCHANGE_BYTES);
    if (message == NULL)
        return tu_error_memory("a message", sizeof *message + TU_EXCHANGE_BYTES);
    memset(message, 0, sizeof *message);
    int descriptor;
    bool lost;
    ssize_t got = tu_wire_take(peer->fd, message, TU_EXCHANGE_BYTES, &descriptor, &lost);
    int error = got < 0 ? errno : 0;
    if (got > 0) {
        *any = true;
        file_message(job, from, message, descriptor, lost);
        return TUTTI_OK;
    }
    free(message);
    if (error == EBADMSG) {
        *any = true;
        TU_LOG(TUTTI_LOG_WARN, job->log, "job", "garbage from rank %d was dropped", peer->world_rank);
    } else if (error == ECONNRESET) {
        *any = true; /* it left without reading ours; what it sent before is still there, then comes the end */
    } else if (error != EAGAIN && error != ENOMEM && error != ENOBUFS) {
        atomic_store_explicit(&peer->ended, true, memory_order_relaxed);
    }
    return TUTTI_OK;
}

tutti_status tu_wire_hear(tu_job *job, int rank) {
    struct epoll_event event = { .events = EPOLLIN, .data.u32 = (uint32_t)rank };
    job->peers[rank].to_write = false;
    if (epoll_ctl(job->events, EPOLL_CTL_ADD, job->peers[rank].fd, &event) != 0)
        return tu_error_system(errno, "cannot wait for messages of rank %d (epoll)", job->peers[rank].world_rank);
    return TUTTI_OK;
}

tutti_status tu_wire_listen(tu_job *job) {
    job->events = epoll_create1(EPOLL_CLOEXEC);
    if (job->events < 0)
        return tu_error_system(errno, "cannot wait for messages of %d ranks (epoll)", job->size);
    tutti_status status = TUTTI_OK;
    for (int rank = 0; rank < job->size && status == TUTTI_OK; rank++)
        if (job->peers[rank].fd >= 0)
            status = tu_wire_hear(job, rank);
    return status;
}

/* Tells `events` for which peers it matters when they can be written to. */
static void ask_for_room(tu_job *job, const bool *writable) {
    for (int rank = 0; rank < job->size; rank++) {
        tu_peer *peer = &job->peers[rank];
        bool wanted = writable != NULL && writable[rank];
        if (wanted == peer->to_write || peer->fd < 0 || atomic_load_explicit(&peer->ended, memory_order_relaxed))
            continue;
        struct epoll_event event = { .events = wanted ? EPOLLIN | EPOLLOUT : EPOLLIN, .data.u32 = (uint32_t)rank };
        if (epoll_ctl(job->events, EPOLL_CTL_MOD, peer->fd, &event) == 0)
            peer->to_write = wanted;
    }
}

tutti_status tu_wire_receive(tu_job *job, const bool *writable, int64_t nanoseconds, bool *any) {
    *any = false;
    if (job->events < 0)
        return TUTTI_OK;
    ask_for_room(job, writable);
    struct epoll_event ready[EVENTS_AT_ONCE];
    int64_t milliseconds = (nanoseconds + TU_MILLISECOND - 1) / TU_MILLISECOND;
    int count = epoll_wait(job->events, ready, EVENTS_AT_ONCE, milliseconds > INT_MAX ? INT_MAX : (int)milliseconds);
    if (count < 0 && errno != EINTR)
        return tu_error_system(errno, "cannot wait for messages of %d ranks (epoll)", job->size);
    for (int i = 0; i < count; i++) {
        int rank = (int)ready[i].data.u32;
        if ((ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0)
            continue;
        tutti_status status = read_peer(job, rank, any);
        if (status != TUTTI_OK)
            return status;
        if (atomic_load_explicit(&job->peers[rank].ended, memory_order_relaxed)) /* or it would be ready for ever */
            (void)epoll_ctl(job->events, EPOLL_CTL_DEL, job->peers[rank].fd, NULL);
    }
    return TUTTI_OK;
}

/* The founder's first message on a connection. */
int tu_wire_send_page(int fd, int sender, int page_fd) {
    tu_wire wire = { .magic = TU_WIRE_MAGIC, .kind = TU_WIRE_PAGE, .sender = sender };
    return send_record(fd, &wire, NULL, page_fd);
}
