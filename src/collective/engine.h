/* SPDX-License-Identifier: Apache-2.0
 *
 * Works and the helper thread of a group, which runs those that the starting thread could not finish, in order.
 */
#ifndef TU_COLLECTIVE_ENGINE_H
#define TU_COLLECTIVE_ENGINE_H

#include "collective/collective.h"

/* Starts the task, which has been checked, and stores a work. */
tutti_status tu_work_start(tu_task *task, tutti_work **work);

/* With the state's lock held: finishes the work that was left open and runs those that are queued, so that the caller's
 * operation comes after them. Their errors are theirs. */
void tu_engine_drain(tu_collective *state);

/* With the state's lock held, after draining: enters the task so that its number follows those of queued works. */
tutti_status tu_engine_enter(tu_collective *state, tu_task *task);

/* Ends the thread and frees the engine. */
void tu_engine_stop(tu_engine *engine);

#endif
