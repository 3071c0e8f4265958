/* SPDX-License-Identifier: Apache-2.0
 *
 * The express lane of short messages: sends and receives that fit into a packet, alone or several together.
 */
#ifndef TU_COLLECTIVE_SHORT_H
#define TU_COLLECTIVE_SHORT_H

#include "collective/message.h"

/* How many the lane takes together. */
#define TU_SHORT_MOST 16

/* A short message as it was called, and how far it is. A task says the same in ten times the room. */
typedef struct tu_short {
    unsigned char *buffer; /* of a send it is only read */
    uint64_t ticket;       /* of the recorder; 0 until it has to wait */
    uint32_t count, bytes; /* of a receive: at most */
    int32_t peer, tag;
    uint8_t operation, dtype, element;
    bool over;
} tu_short;

/* The messages of one call: runs them, or notes them in the call's batch. False: they are not for this lane, nothing
 * has happened. */
bool tu_short_submit(const tu_message *messages, int count, const tutti_call *call, tutti_status *status);
/* Runs what a batch has noted. False as above. */
bool tu_short_run(tu_collective *state, tu_short *notes, int count, tutti_status *status);
/* The task that the ordinary way makes of such a call. */
void tu_short_task(const tu_short *note, tu_collective *state, tu_task *task);

#endif
