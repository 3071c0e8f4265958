/* SPDX-License-Identifier: Apache-2.0 */
#include "collective/request.h"

#include <stdlib.h>
#include <string.h>

/* ---- the list ---- */

static void enlist(tu_messages *messages, tu_request *request) {
    request->previous = messages->last;
    request->next = NULL;
    if (messages->last != NULL)
        messages->last->next = request;
    else
        messages->first = request;
    messages->last = request;
    request->listed = true;
    messages->works += request->work != NULL;
}

void tu_request_unlist(tu_messages *messages, tu_request *request) {
    if (!request->listed)
        return;
    if (request->previous != NULL)
        request->previous->next = request->next;
    else
        messages->first = request->next;
    if (request->next != NULL)
        request->next->previous = request->previous;
    else
        messages->last = request->previous;
    request->listed = false;
    messages->works -= request->work != NULL;
}

/* The flag is the last touch of a request that a thread awaits; works are finished by message.c. */
static void finish(tu_messages *messages, tu_request *request) {
    request->state = TU_REQUEST_FINISHED;
    tu_request_unlist(messages, request);
    if (request->work == NULL) {
        const tu_collective *state = messages->state;
        atomic_store_explicit(&request->finished, 1, memory_order_release);
        tu_bell_ring(state->sleepers, state->bells[state->rank]);
    } else {
        request->next = messages->done;
        messages->done = request;
    }
}

static void fail(tu_messages *messages, tu_request *request, const char *garbage) {
    request->garbage = garbage;
    finish(messages, request);
}

static tu_request *find(tu_messages *messages, bool send, int peer, uint64_t message) {
    for (tu_request *request = messages->first; request != NULL; request = request->next)
        if (tu_request_sends(request) == send && request->peer == peer && request->message == message &&
            request->state != TU_REQUEST_POSTING)
            return request;
    return NULL;
}

/* ---- elements that lie apart ---- */

/* Calls `copy` for each stretch of the buffer that holds bytes [offset, offset + bytes) of the message. */
static void each_stretch(const tu_task *task, unsigned char *buffer, unsigned char *packed, size_t offset, size_t bytes,
                         bool gather) {
    size_t block = task->strided.block * task->element, stride = task->strided.stride * task->element;
    while (bytes != 0) {
        size_t within = offset % block;
        size_t at = offset / block * stride + within;
        size_t piece = block - within < bytes ? block - within : bytes;
        if (gather)
            tu_copy(packed, buffer + at, piece, 0);
        else
            tu_copy(buffer + at, packed, piece, 0);
        packed += piece;
        offset += piece;
        bytes -= piece;
    }
}

/* Copies between a contiguous place and the elements of a message, which may lie apart (tutti_call.strided). */
static void strided_gather(const tu_task *task, void *to, size_t offset, size_t bytes) {
    if (task->strided.block == 0)
        tu_copy(to, (const unsigned char *)task->in + offset, bytes, 0);
    else
        each_stretch(task, (unsigned char *)(uintptr_t)task->in, to, offset, bytes, true);
}

static void strided_scatter(const tu_task *task, const void *from, size_t offset, size_t bytes) {
    if (task->strided.block == 0)
        tu_copy((unsigned char *)task->out + offset, from, bytes, 0);
    else
        each_stretch(task, task->out, (unsigned char *)(uintptr_t)from, offset, bytes, false);
}

/* The block that a whole buffer lies in, when others may use it there; index 0 when not. */
static tu_symmetric place_of(const tu_messages *messages, const tu_task *task, const void *buffer, size_t bytes) {
    tu_symmetric found;
    if (task->strided.block != 0 || !tu_symmetric_find(messages->memory, buffer, bytes, &found) || found.peers == NULL)
        return (tu_symmetric){ .index = 0 };
    return found;
}

/* Where `bytes` of a peer's block lie here; NULL when this rank does not hold it, or they are not in it. */
static unsigned char *resolve(const tu_messages *messages, int peer, uint32_t index, uint64_t offset, size_t bytes,
                              bool *outside) {
    const tutti_peers *peers = index != 0 ? tu_symmetric_peers(messages->memory, index) : NULL;
    if (peers == NULL || peers->buffers[peer] == NULL)
        return NULL;
    *outside = offset > peers->memory->bytes || bytes > peers->memory->bytes - offset;
    return *outside ? NULL : (unsigned char *)peers->buffers[peer] + offset;
}

/* ---- receiving ---- */

/* A message whose data lies in a fragment of its sender's, or came with its letter. */
static void read_fragment(tu_messages *messages, tu_request *request, int source, const tu_packet *packet,
                          const void *payload) {
    uint32_t fragment = packet->fragment;
    const void *data = payload;
    if (!tu_elsewhere(messages, source)) {
        if (fragment > TU_AREA_FRAGMENTS || packet->bytes > messages->channels.fragment_bytes) {
            fail(messages, request, "a fragment that its message does not have");
            return;
        }
        data = tu_fragment(&messages->channels, tu_place_of(messages, source), fragment - 1);
    }
    strided_scatter(request->task, data, 0, packet->bytes);
    request->state = TU_REQUEST_READING;
}

/* `packet` is this rank's copy of what the packet says; a short message lies in `payload`, and so does the data of one
 * from another host or in a cell (NULL: there is no such cell). */
static void found_message(tu_messages *messages, tu_request *request, int source, const tu_packet *packet,
                          const void *payload) {
    const tu_task *task = request->task;
    request->peer = source;
    request->message = packet->message;
    request->bytes = packet->bytes;
    request->tag = packet->tag;
    request->dtype = packet->dtype;
    if (packet->bytes > task->info.count * task->element || packet->dtype != task->info.dtype) {
        request->mismatch = true;
        finish(messages, request);
    } else if (packet->bytes % task->element != 0) {
        fail(messages, request, "a message of a part of an element");
    } else if (packet->bytes <= TU_PACKET_BYTES) {
        if (packet->bytes != 0)
            strided_scatter(task, payload, 0, packet->bytes);
        finish(messages, request);
    } else if (packet->cell != 0) {
        if (payload == NULL) {
            fail(messages, request, "a cell that its message does not have");
            return;
        }
        strided_scatter(task, payload, 0, packet->bytes);
        finish(messages, request);
    } else if (packet->fragment != 0) {
        read_fragment(messages, request, source, packet, payload);
    } else {
        bool outside = false;
        const unsigned char *in = resolve(messages, source, packet->index, packet->offset, packet->bytes, &outside);
        if (outside) {
            fail(messages, request, "a message that lies outside of its block");
        } else if (in != NULL) {
            strided_scatter(task, in, 0, packet->bytes);
            request->state = TU_REQUEST_READING;
        } else {
            request->state = TU_REQUEST_CLEARING;
        }
    }
}

static bool accepts(const tu_request *request, int source, int tag) {
    const tu_operation_info *info = &request->task->info;
    return !tu_request_sends(request) && request->state == TU_REQUEST_WAITING &&
           (info->root == TUTTI_ANY_SOURCE || info->root == source) && (info->tag == TUTTI_ANY_TAG || info->tag == tag);
}

void tu_unexpected_free(tu_unexpected *early) {
    free(early->data);
    free(early);
}

static tu_unexpected *room_for_early(tu_messages *messages) {
    tu_unexpected *early = messages->spare;
    if (early == NULL) {
        early = aligned_alloc(_Alignof(tu_unexpected), sizeof *early); /* a packet is aligned to its lines */
    } else {
        messages->spare = early->next;
        messages->spares--;
    }
    if (early != NULL)
        early->data = NULL;
    return early;
}

/* The data goes where it outlives the packet. False: no memory. */
static bool keep_data(tu_unexpected *early, const void *payload) {
    tu_packet *packet = &early->packet;
    if (packet->bytes <= TU_PACKET_BYTES) {
        memcpy(packet->payload, payload, packet->bytes);
    } else if (packet->cell == 0) {
        packet->fragment = 0; /* its sender's again: the receive will ask for the data */
    } else if (payload != NULL) {
        early->data = malloc(packet->bytes);
        if (early->data == NULL)
            return false;
        memcpy(early->data, payload, packet->bytes);
    }
    return true;
}

/* False when an unexpected message cannot be kept, for want of memory or because there are too many: it stays in the
 * ring. */
static bool take_message(tu_messages *messages, int source, const tu_packet *packet, const void *payload) {
    if (packet->bytes > TU_PACKET_BYTES && packet->cell != 0)
        payload = tu_cell_of(&messages->channels, tu_place_of(messages, source), packet->cell, packet->bytes);
    for (tu_request *request = messages->first; request != NULL; request = request->next) {
        if (accepts(request, source, packet->tag)) {
            found_message(messages, request, source, packet, payload);
            return true;
        }
    }
    if (messages->early_count[source] >= TU_UNEXPECTED_MOST)
        return false;
    tu_unexpected *early = room_for_early(messages);
    if (early == NULL)
        return false;
    early->next = NULL;
    early->source = source;
    early->packet = *packet;
    if (!keep_data(early, payload)) {
        tu_unexpected_free(early);
        return false;
    }
    *messages->early_end = early;
    messages->early_end = &early->next;
    messages->early_count[source]++;
    return true;
}

/* Takes an unexpected message out of the list and keeps its memory, or frees it. */
static void forget(tu_messages *messages, tu_unexpected **link) {
    tu_unexpected *early = *link;
    *link = early->next;
    if (early->next == NULL)
        messages->early_end = link;
    messages->early_count[early->source]--;
    if (messages->spares >= TU_UNEXPECTED_SPARE) {
        tu_unexpected_free(early);
        return;
    }
    free(early->data);
    early->data = NULL;
    early->next = messages->spare;
    messages->spare = early;
    messages->spares++;
}

/* A receive that has just been posted: has its message come already? */
static void look_at_early(tu_messages *messages, tu_request *request) {
    for (tu_unexpected **link = &messages->early; *link != NULL; link = &(*link)->next) {
        if (!accepts(request, (*link)->source, (*link)->packet.tag))
            continue;
        const tu_packet *packet = &(*link)->packet;
        bool in_packet = packet->bytes <= TU_PACKET_BYTES;
        found_message(messages, request, (*link)->source, packet, in_packet ? packet->payload : (*link)->data);
        forget(messages, link);
        return;
    }
}

static void take_fragment(tu_messages *messages, int source, const tu_packet *packet, const void *payload) {
    tu_request *request = find(messages, false, source, packet->message);
    if (request == NULL)
        return; /* its receive was given up; the group has ended */
    uint64_t offset = packet->offset, bytes = packet->bytes;
    bool far = tu_elsewhere(messages, source);
    if ((!far && (packet->index >= TU_AREA_FRAGMENTS || bytes > messages->channels.fragment_bytes)) ||
        request->state != TU_REQUEST_MOVING || offset != request->moved || bytes > request->bytes - request->moved) {
        fail(messages, request, "a fragment that its message does not have");
        return;
    }
    const void *data = far ? payload : tu_fragment(&messages->channels, tu_place_of(messages, source), packet->index);
    strided_scatter(request->task, data, offset, bytes);
    request->moved += bytes;
    if (request->moved == request->bytes)
        finish(messages, request);
}

/* What a packet says, read once: whoever writes garbage into shared memory may do so between a check and a use. */
static void read_packet(const volatile tu_packet *shared, tu_packet *packet) {
    packet->message = shared->message;
    packet->bytes = shared->bytes;
    packet->tag = shared->tag;
    packet->kind = shared->kind;
    packet->dtype = shared->dtype;
    packet->offset = shared->offset;
    packet->index = shared->index;
    packet->fragment = shared->fragment;
    packet->cell = shared->cell;
}

/* `packet` is this rank's own copy. */
static bool take_packet(tu_messages *messages, int source, const tu_packet *packet, const void *payload) {
    tu_request *request;
    switch (packet->kind) {
    case TU_PACKET_MESSAGE:
        return take_message(messages, source, packet, payload);
    case TU_PACKET_FRAGMENT:
        take_fragment(messages, source, packet, payload);
        return true;
    case TU_PACKET_CLEAR:
        request = find(messages, true, source, packet->message);
        if (request != NULL && request->state == TU_REQUEST_WAITING) {
            request->index = packet->index;
            request->offset = packet->offset;
            request->state = packet->index != 0 ? TU_REQUEST_WRITING : TU_REQUEST_MOVING;
        }
        return true;
    case TU_PACKET_DONE:
        request = find(messages, true, source, packet->message);
        break;
    default:
        request = find(messages, false, source, packet->message);
        break;
    }
    if (request != NULL)
        finish(messages, request);
    return true;
}

static bool take_packets(tu_messages *messages) {
    bool any = false;
    tu_packet own;
    for (int place = 0; place < messages->channels.size; place++) {
        bool from_it = false;
        for (const tu_packet *packet; (packet = tu_packet_look(&messages->channels, place)) != NULL; from_it = true) {
            tu_blocked_clear(messages);
            read_packet(packet, &own);
            if (!take_packet(messages, tu_member_at(messages, place), &own, packet->payload))
                break;
            tu_packet_taken(&messages->channels, place);
        }
        if (from_it)
            tu_channel_ring(&messages->channels, place);
        any |= from_it;
    }
    return any;
}

/* The same of what came from other hosts. */
static bool take_letters(tu_messages *messages) {
    bool any = false;
    tu_packet packet;
    if (!tu_network_has_letters(messages->network))
        return false;
    for (int source = 0; source < messages->state->size; source++) {
        if (!tu_elsewhere(messages, source))
            continue;
        for (const void *data; (data = tu_letter_look(messages, source, &packet)) != NULL; any = true) {
            if (!take_packet(messages, source, &packet, data))
                break;
            tu_letter_taken(messages, source);
        }
    }
    return any;
}

/* ---- moving requests on ---- */

/* Puts a message that fits into a fragment there before anybody has asked for it: a receive that waits already is
 * spared a hand-over each way. -1: it does not fit, or none is free. */
static int fill_ahead(tu_messages *messages, const tu_request *request) {
    tu_channels *channels = &messages->channels;
    int fragment = request->bytes <= channels->fragment_bytes ? tu_fragment_find(channels) : -1;
    if (fragment >= 0)
        strided_gather(request->task, tu_fragment(channels, channels->rank, (uint32_t)fragment), 0, request->bytes);
    return fragment;
}

static void fill_fragment(void *argument, void *to, uint64_t offset, size_t bytes) {
    strided_gather(((const tu_request *)argument)->task, to, offset, bytes);
}

static bool write_message(tu_messages *messages, tu_request *request) {
    tu_packet packet = { .kind = TU_PACKET_MESSAGE,
                         .tag = request->task->info.tag,
                         .dtype = request->task->info.dtype,
                         .message = request->message,
                         .bytes = request->bytes };
    bool ahead = request->bytes <= TU_LETTER_BYTES;
    packet.fragment = ahead;
    if (!tu_letter_post(messages, request->peer, &packet, fill_fragment, request, ahead ? request->bytes : 0))
        return false;
    request->state = TU_REQUEST_WAITING;
    if (request->bytes <= TU_PACKET_BYTES)
        finish(messages, request);
    return true;
}

/* What of this rank's staging area a packet needs; -1: nothing. */
typedef struct staged {
    int cell, fragment;
} staged;

/* Says in the packet where the data is that does not fit into it: in a cell, then the send is over. To itself a rank
 * sends in the ordinary way: a mistake is told. */
static staged stage(tu_messages *messages, const tu_request *request, tu_packet *packet) {
    tu_channels *channels = &messages->channels;
    staged staged = { .cell = -1, .fragment = -1 };
    if (request->bytes <= TU_CELL_BYTES && request->peer != messages->state->rank)
        staged.cell = tu_cell_find(channels);
    if (staged.cell >= 0) {
        strided_gather(request->task, tu_cell(channels, channels->rank, (uint32_t)staged.cell), 0, request->bytes);
    } else {
        tu_symmetric found = place_of(messages, request->task, request->task->in, request->bytes);
        packet->index = found.index;
        packet->offset = found.offset;
        if (found.index == 0)
            staged.fragment = fill_ahead(messages, request);
    }
    packet->cell = (uint32_t)(staged.cell + 1);
    packet->fragment = (uint32_t)(staged.fragment + 1);
    return staged;
}

static bool post_message(tu_messages *messages, tu_request *request) {
    const tu_task *task = request->task;
    if (tu_elsewhere(messages, request->peer))
        return write_message(messages, request);
    int place = tu_place_of(messages, request->peer);
    tu_packet *packet = tu_packet_next(&messages->channels, place);
    if (packet == NULL)
        return false;
    packet->kind = TU_PACKET_MESSAGE;
    packet->tag = task->info.tag;
    packet->dtype = task->info.dtype;
    packet->message = request->message;
    packet->bytes = request->bytes;
    packet->index = 0;
    bool short_one = request->bytes <= TU_PACKET_BYTES;
    staged staged = { .cell = -1, .fragment = -1 };
    if (!short_one)
        staged = stage(messages, request, packet);
    else if (request->bytes != 0)
        strided_gather(task, packet->payload, 0, request->bytes);
    request->state = TU_REQUEST_WAITING;
    uint64_t number = tu_packet_post(&messages->channels, packet, place);
    if (staged.fragment >= 0)
        tu_fragment_use(&messages->channels, staged.fragment, place, number);
    if (staged.cell >= 0)
        tu_cell_use(&messages->channels, staged.cell, place, number);
    if (short_one || staged.cell >= 0)
        finish(messages, request);
    return true;
}

/* A packet without data, whichever way. */
static bool post_short(tu_messages *messages, int peer, tu_packet_kind kind, uint64_t message, uint32_t index,
                       uint64_t offset) {
    if (!tu_elsewhere(messages, peer))
        return tu_packet_post_short(&messages->channels, tu_place_of(messages, peer), kind, message, index, offset);
    tu_packet packet = { .kind = kind, .message = message };
    return tu_letter_post(messages, peer, &packet, NULL, NULL, 0);
}

static bool write_fragment(tu_messages *messages, tu_request *request, size_t bytes) {
    tu_packet packet = {
        .kind = TU_PACKET_FRAGMENT, .message = request->message, .bytes = bytes, .offset = request->moved
    };
    return tu_letter_post(messages, request->peer, &packet, fill_fragment, request, bytes);
}

static bool post_fragment(tu_messages *messages, tu_request *request) {
    bool far = tu_elsewhere(messages, request->peer);
    size_t left = request->bytes - request->moved, room = far ? TU_LETTER_BYTES : messages->channels.fragment_bytes;
    size_t bytes = left < room ? left : room;
    bool posted = far ? write_fragment(messages, request, bytes)
                      : tu_packet_post_fragment(&messages->channels, tu_place_of(messages, request->peer),
                                                request->message, request->moved, bytes, fill_fragment, request);
    if (!posted)
        return false;
    request->moved += bytes;
    if (request->moved == request->bytes)
        finish(messages, request);
    return true;
}

static bool post_clear(tu_messages *messages, tu_request *request) {
    tu_symmetric found = { .index = 0 };
    if (!tu_elsewhere(messages, request->peer))
        found = place_of(messages, request->task, request->task->out, request->bytes);
    if (!post_short(messages, request->peer, TU_PACKET_CLEAR, request->message, found.index,
                    found.index != 0 ? found.offset : 0))
        return false;
    request->state = TU_REQUEST_MOVING;
    return true;
}

/* Written in place once; then the packet that says so, as soon as there is room for it. */
static bool write_in_place(tu_messages *messages, tu_request *request) {
    if (request->moved == 0) {
        bool outside = false;
        unsigned char *out =
            resolve(messages, request->peer, request->index, request->offset, request->bytes, &outside);
        if (outside) {
            fail(messages, request, "a place for a message that lies outside of its block");
            return true;
        }
        if (out == NULL) {
            request->state = TU_REQUEST_MOVING; /* this rank does not hold it any more */
            return true;
        }
        strided_gather(request->task, out, 0, request->bytes);
        request->moved = request->bytes;
    }
    if (!post_short(messages, request->peer, TU_PACKET_WRITTEN, request->message, 0, 0))
        return false;
    finish(messages, request);
    return true;
}

static bool move_on(tu_messages *messages, tu_request *request) {
    switch (request->state) {
    case TU_REQUEST_CLEARING:
        return post_clear(messages, request);
    case TU_REQUEST_MOVING:
        return tu_request_sends(request) && post_fragment(messages, request);
    case TU_REQUEST_WRITING:
        return write_in_place(messages, request);
    case TU_REQUEST_READING:
        if (!post_short(messages, request->peer, TU_PACKET_DONE, request->message, 0, 0))
            return false;
        finish(messages, request);
        return true;
    default:
        return false;
    }
}

/* Messages to one rank are posted in order: one that finds the ring full holds up all behind it, also when there is
 * room a moment later and something for another rank stands between them. */
static bool post_in_turn(tu_messages *messages, tu_request *request) {
    int peer = request->peer;
    if (messages->full_in[peer] == messages->passes)
        return false;
    if (post_message(messages, request)) /* and may be gone with that */
        return true;
    messages->full_in[peer] = messages->passes;
    return false;
}

void tu_requests_progress(tu_messages *messages) {
    bool any;
    do {
        any = take_packets(messages);
        if (messages->network != NULL)
            any |= take_letters(messages);
        messages->passes++;
        tu_request *next;
        for (tu_request *request = messages->first; request != NULL; request = next) {
            next = request->next;
            bool was_posting = request->state == TU_REQUEST_POSTING;
            int peer = request->peer;
            bool moved = was_posting ? post_in_turn(messages, request) : move_on(messages, request);
            /* What was posted to another rank moves nothing else on here. */
            any |= moved && (!was_posting || peer == messages->state->rank);
        }
    } while (any);
}

void tu_request_begin(tu_messages *messages, tu_request *request) {
    const tu_task *task = request->task;
    request->peer = task->info.root;
    if (tu_request_sends(request)) {
        request->state = TU_REQUEST_POSTING;
        request->message = ++messages->messages;
        request->bytes = task->info.count * task->element;
    } else {
        request->state = TU_REQUEST_WAITING;
    }
    enlist(messages, request);
    if (!tu_request_sends(request))
        look_at_early(messages, request);
}

bool tu_request_withdraw(tu_messages *messages, tu_request *request) {
    int own = messages->state->rank;
    pthread_mutex_lock(&messages->lock);
    tu_blocked_clear(messages);
    bool half = request->listed && !(request->state == TU_REQUEST_POSTING ||
                                     (request->state == TU_REQUEST_WAITING && !tu_request_sends(request)));
    tu_request_unlist(messages, request);
    /* What was sent to oneself is taken back out of the unexpected ones. */
    for (tu_unexpected **link = &messages->early; *link != NULL; link = &(*link)->next) {
        if (tu_request_sends(request) && (*link)->source == own && request->peer == own &&
            (*link)->packet.message == request->message) {
            forget(messages, link);
            half = false;
            break;
        }
    }
    pthread_mutex_unlock(&messages->lock);
    return half;
}
