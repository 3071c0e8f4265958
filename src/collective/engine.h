/* SPDX-License-Identifier: Apache-2.0
 *
 * The helper thread of a group: runs the works that could not be finished by the thread that started them, in order.
 */
#ifndef TU_COLLECTIVE_ENGINE_H
#define TU_COLLECTIVE_ENGINE_H

#include "collective/collective.h"

/* Ends the thread. True when it has ended; false when the caller IS that thread: then it frees the state itself, by release(argument), as its
 * last act. */
bool tu_engine_stop(tu_engine *engine, void (*release)(void *), void *argument);

#endif
