/* SPDX-License-Identifier: Apache-2.0
 *
 * What ranks on other hosts do, for the error of a wait that ran out of time: they are asked, all at once, and
 * whichever thread of theirs drives the network answers, so one that is in no call answers too. One whose process is
 * stopped, or that is cut off, does not: answers are waited for a moment only. One that has not answered is asked
 * nothing more until it does, so that whoever asks again does not wait again.
 */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "memory/network_inner.h"

#define ANSWER_TIME (500 * TU_MILLISECOND)
#define ANSWERS_MOST ((uint64_t)1 << 20) /* bytes of answers that a rank has asked for and not read */

void tu_network_inquire_arrived(tu_network *network, const tu_network_header *header) {
    char text[TU_DOING_BYTES];
    tu_network_peer *peer = &network->peers[header->from];
    if (peer->answering > ANSWERS_MOST) /* it does not read what it asks for */
        return;
    tu_world_doing(network->world, header->key, text, sizeof text);
    tu_dispatch *dispatch = tu_network_own_begin(network, header->from, strlen(text));
    if (dispatch == NULL)
        return;
    memcpy(dispatch + 1, text, dispatch->bytes);
    dispatch->answer = dispatch->bytes + sizeof *dispatch;
    peer->answering += dispatch->answer;
    tu_network_header answer = { .magic = TU_NETWORK_MAGIC,
                                 .version = TU_NETWORK_VERSION,
                                 .door = peer->door,
                                 .key = header->key,
                                 .sequence = header->sequence,
                                 .total = dispatch->bytes,
                                 .kind = TU_NETWORK_DOING,
                                 .from = network->world->rank };
    tu_network_own_send(network, dispatch, &answer);
}

void tu_network_doing_arrived(tu_network *network, const tu_network_header *header, const void *data, size_t bytes) {
    tu_network_peer *peer = &network->peers[header->from];
    tu_network_inquiry *inquiry = network->inquiry;
    if (peer->question == 0 || header->sequence != peer->question)
        return;
    peer->question = 0;
    if (inquiry == NULL || header->sequence != inquiry->number) /* whoever asked waits no more */
        return;
    int i = 0;
    while (i < inquiry->count && inquiry->doings[i].rank != header->from)
        i++;
    if (i == inquiry->count)
        return;
    char *text = inquiry->doings[i].text;
    size_t length = bytes < TU_DOING_BYTES ? bytes : TU_DOING_BYTES - 1;
    for (size_t at = 0; at < length; at++) {
        char letter = ((const char *)data)[at];
        text[at] = (char)(letter >= 0x20 && letter < 0x7f ? letter : '?'); /* it is shown to a person */
    }
    text[length] = 0;
}

static bool is_awaited(const tu_network *network, const tu_network_inquiry *inquiry, int rank) {
    const tu_network_peer *peer = &network->peers[rank];
    return peer->question == inquiry->number && !peer->lost && !peer->gone;
}

static bool anybody_awaited(const tu_network *network, const tu_network_inquiry *inquiry) {
    for (int i = 0; i < inquiry->count; i++)
        if (is_awaited(network, inquiry, inquiry->doings[i].rank))
            return true;
    return false;
}

/* With the lock held: what is said of a rank until it answers. */
static void ask(tu_network *network, const tu_network_inquiry *inquiry, uint64_t key, tu_doing *doing) {
    tu_network_peer *peer = &network->peers[doing->rank];
    const char *text = "it did not answer when it was asked what it does: its process is stopped, or the network "
                       "between the hosts is down";
    if (peer->gone)
        text = "it closed its world";
    else if (peer->lost)
        text = "the connection to it broke";
    else if (!peer->connected || !peer->heard) /* it could not answer */
        text = "it is not connected to this rank yet, so it cannot be asked what it does";
    else if (peer->question == 0) {
        peer->question = inquiry->number;
        tu_network_own(network, doing->rank, TU_NETWORK_INQUIRE, key, inquiry->number, 0, NULL, NULL, 0);
    }
    snprintf(doing->text, sizeof doing->text, "%s", text);
}

void tu_network_inquire(tutti_group *group, tu_doing *doings, int count) {
    tu_network *network = tu_network_find(group->world);
    if (network == NULL)
        return;
    pthread_mutex_lock(&network->inquiring);
    bool had_ended = tu_group_ended(group);
    int64_t limit = tu_deadline(ANSWER_TIME), left;
    pthread_mutex_lock(&network->lock);
    tu_network_inquiry inquiry = { .number = ++network->inquiries, .doings = doings, .count = count };
    tu_network_drive(network); /* an answer that came late */
    network->inquiry = &inquiry;
    for (int i = 0; i < count; i++)
        ask(network, &inquiry, group->key, &doings[i]);
    tu_network_drive(network);
    /* When the group ends meanwhile, that is what is told. */
    while (anybody_awaited(network, &inquiry) && tu_group_ended(group) == had_ended &&
           (left = tu_deadline_left(limit)) > 0) {
        tu_network_sleep(network, (int)(left / TU_MILLISECOND) + 1);
        tu_network_drive(network);
    }
    network->inquiry = NULL;
    pthread_mutex_unlock(&network->lock);
    pthread_mutex_unlock(&network->inquiring);
}
