/* SPDX-License-Identifier: Apache-2.0
 *
 * Packets between hosts: they go as letters, with their data behind them. A message of at most TU_LETTER_BYTES takes
 * its data along, for a receive that waits already; if none does, the data is dropped and asked for later, as between
 * ranks of a host, so that messages which nobody has received cost little memory.
 *
 * What comes from another host is looked at before it is used: every number, and whether the data is what they say.
 */
#include <stdlib.h>
#include <string.h>

#include "collective/request.h"

/* What a letter begins with. */
typedef struct head {
    uint64_t message, bytes, offset; /* as in tu_packet */
    int32_t tag;
    uint16_t kind, dtype;
    uint32_t ahead; /* a longer message's data follows */
    uint32_t reserved;
} head;
_Static_assert(sizeof(head) <= TU_LETTER_HEAD, "the head of a letter must fit");

/* ---- opening ---- */

static tutti_status find_places(tu_messages *messages) {
    const tutti_group *group = messages->state->group;
    size_t size = (size_t)group->size;
    messages->places = malloc(2 * size * sizeof *messages->places + size * sizeof *messages->wanted);
    if (messages->places == NULL)
        return tu_error_memory("sends and receives", 2 * size * sizeof *messages->places);
    messages->here = messages->places + size;
    messages->wanted = (_Atomic bool *)(messages->here + size);
    for (int member = 0; member < group->size; member++) {
        bool on_this_host = group->job_ranks[member] >= 0;
        messages->places[member] = on_this_host ? messages->here_count : -1;
        atomic_init(&messages->wanted[member], false);
        if (on_this_host)
            messages->here[messages->here_count++] = member;
    }
    return TUTTI_OK;
}

tutti_status tu_letters_open(tu_messages *messages) {
    tutti_group *group = messages->state->group;
    if (group->local)
        return TUTTI_OK;
    tutti_status status = tu_network_group_get(group, &messages->network);
    return status == TUTTI_OK ? find_places(messages) : status;
}

void tu_letters_want(tu_messages *messages, int member) {
    for (int other = 0; messages->network != NULL && other < messages->state->size; other++)
        if ((member < 0 || member == other) && tu_elsewhere(messages, other)) /* a hint: nothing else hangs on it */
            atomic_store_explicit(&messages->wanted[other], true, memory_order_relaxed);
}

tutti_status tu_letters_reach(tu_messages *messages) {
    tutti_status status = TUTTI_OK;
    for (int member = 0; member < messages->state->size && status == TUTTI_OK; member++)
        if (atomic_load_explicit(&messages->wanted[member], memory_order_relaxed))
            status = tu_network_try_reach(messages->network, member);
    return status;
}

/* ---- posting ---- */

bool tu_letter_post(tu_messages *messages, int peer, const tu_packet *packet, tu_letter_fill *fill, void *argument,
                    size_t bytes) {
    head head = { .message = packet->message,
                  .bytes = packet->bytes,
                  .offset = packet->offset,
                  .tag = packet->tag,
                  .kind = packet->kind,
                  .dtype = packet->dtype,
                  .ahead = packet->fragment };
    return tu_network_write(messages->network, peer, &head, sizeof head, fill, argument, head.offset, bytes);
}

/* ---- taking ---- */

/* Whether the data behind the head is what the head says. */
static bool is_sound(const head *head, size_t bytes) {
    switch (head->kind) {
    case TU_PACKET_MESSAGE:
        return head->offset == 0 && head->tag >= 0 &&
               (head->bytes <= TU_PACKET_BYTES || head->ahead != 0 ? bytes == head->bytes : bytes == 0);
    case TU_PACKET_FRAGMENT:
        return bytes == head->bytes && bytes != 0;
    case TU_PACKET_CLEAR:
    case TU_PACKET_DONE:
        return bytes == 0;
    default:
        return false;
    }
}

const void *tu_letter_look(tu_messages *messages, int source, tu_packet *packet) {
    size_t bytes;
    const unsigned char *letter;
    while ((letter = tu_network_letter(messages->network, source, &bytes)) != NULL) {
        head head = { 0 };
        if (bytes >= sizeof head)
            memcpy(&head, letter, sizeof head);
        if (bytes >= sizeof head && is_sound(&head, bytes - sizeof head)) {
            packet->message = head.message;
            packet->bytes = head.bytes;
            packet->offset = head.offset;
            packet->tag = head.tag;
            packet->kind = head.kind;
            packet->dtype = head.dtype;
            packet->index = 0;
            packet->fragment = head.ahead != 0;
            packet->cell = 0;
            return letter + sizeof head;
        }
        TU_LOG(TUTTI_LOG_WARN, messages->state->group->world->log, "collective",
               "rank %d of group %s sent something that is no message (%zu bytes); it was dropped", source,
               messages->state->group->name, bytes);
        tu_network_letter_taken(messages->network, source);
    }
    return NULL;
}

void tu_letter_taken(tu_messages *messages, int source) {
    tu_network_letter_taken(messages->network, source);
}
