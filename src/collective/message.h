/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives of a group.
 */
#ifndef TU_COLLECTIVE_MESSAGE_H
#define TU_COLLECTIVE_MESSAGE_H

#include "collective/collective.h"
#include "collective/work.h"

/* A send to or a receive from TUTTI_NOBODY: complete at once. */
tutti_status tu_message_nobody(const tu_task *task, const tutti_call *call);
/* Runs a send or receive that was entered to its end. */
tutti_status tu_message_run(tu_task *task);
/* Enters one and starts it for a work. */
tutti_status tu_message_start(tutti_work *work);

/* Several that the caller awaits together: prepared one by one, begun all at once, awaited one by one. Preparing enters
 * the task, which must stay, as must the request. */
tutti_status tu_message_prepare(tu_task *task, tu_request *request);
void tu_messages_begin(tu_collective *state, tu_request *const *requests, int count);
tutti_status tu_message_await(tu_collective *state, tu_request *request);

/* Moves on what can be moved on without waiting. */
void tu_messages_poll(tu_collective *state);
/* Waits until the work is done: TUTTI_ERROR_TIMEOUT without a message when the deadline comes first. */
tutti_status tu_messages_wait(tutti_work *work, int64_t deadline);

/* Ends the helper thread and frees everything. */
void tu_messages_end(tu_messages *messages);

#endif
