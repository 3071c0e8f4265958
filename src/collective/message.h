/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives of a group.
 */
#ifndef TU_COLLECTIVE_MESSAGE_H
#define TU_COLLECTIVE_MESSAGE_H

#include "collective/collective.h"
#include "collective/work.h"

/* A send or a receive as it is asked for. */
typedef struct tu_message {
    tutti_group *group;
    tu_operation operation;
    const void *in; /* of a send */
    void *out;      /* of a receive */
    size_t count;
    tutti_dtype dtype;
    int peer, tag;
} tu_message;
/* Checks it and runs, starts or notes it. The group lives, the world is entered, the options are complete. */
tutti_status tu_message_submit(const tu_message *message, const tutti_call *call);

/* After a send or receive has failed: adds to its error which messages this rank has not received. */
void tu_message_failed(const tu_task *task, tutti_status status);
/* A send to or a receive from TUTTI_NOBODY: complete at once. */
tutti_status tu_message_nobody(const tu_task *task, const tutti_call *call);
/* Runs a send or receive that was entered to its end. */
tutti_status tu_message_run(tu_task *task);
/* Enters one and starts it for a work. */
tutti_status tu_message_start(tutti_work *work);

/* Several that the caller awaits together: the messages of the group are opened, then each is prepared, all are begun
 * at once, and all are awaited. Preparing enters the task, which must stay, as must the request. */
tutti_status tu_messages_open(tu_collective *state);
tutti_status tu_message_prepare(tu_task *task, tu_request *request);
void tu_messages_begin(tu_collective *state, tu_request *const *requests, int count);
/* All are awaited, also after a failure: their buffers are the caller's again afterwards. `status` is how it went so
 * far; the first error counts. */
tutti_status tu_messages_await(tu_collective *state, tu_request *const *requests, int count, tutti_status status);

/* Moves on what can be moved on without waiting. */
void tu_messages_poll(tu_collective *state);
/* Waits until the work is done: TUTTI_ERROR_TIMEOUT without a message when the deadline comes first. */
tutti_status tu_messages_wait(tutti_work *work, int64_t deadline);

/* Ends the helper thread and frees everything. */
void tu_messages_end(tu_messages *messages);

#endif
