/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps on a device that are noted once and run again (tutti/streams.h) take numbers from the host that change from run
 * to run: states of the random generator, counts and rates of optimizers. So kernels of a noted step find such numbers
 * in memory of the device, and before each run the host works them out anew and brings them there, in order with the
 * stream. What the host does for that is a list of acts, in the order of the program; the numbers of all of them travel
 * together.
 *
 * While a thread notes, its generator and the tensors of the host that acts write move on as ever; when it has ended,
 * they are what they were, since nothing has run yet.
 */
#ifndef TU_TENSOR_NOTING_H
#define TU_TENSOR_NOTING_H

#include "tensor/on_device.h"

/* One thing that the host does before each run; whoever needs it makes this the head of what it keeps. */
typedef struct tu_noted_act {
    struct tu_noted_act *next;
    tutti_status (*run)(struct tu_noted_act *act);
    void (*end)(struct tu_noted_act *act); /* frees it */
} tu_noted_act;

typedef struct tu_noted tu_noted;

/* Begins a list, which is this thread's until tu_noted_close. */
tutti_status tu_noted_begin(const tu_device *device, tu_noted **made);
/* The thread notes no more. Generator and tensors of the host are what they were. */
void tu_noted_close(tu_noted *noted);
/* Where the thread notes what comes to that stream: it notes no more, and the list is gone. */
void tu_noted_drop(const tu_device *device, const void *stream);
/* Acts, then brings their numbers to the device: before the graph is given to the same stream. */
tutti_status tu_noted_run(tu_noted *noted, void *stream);
/* After the last run; NULL is nothing to do. */
void tu_noted_end(tu_noted *noted);

/* The list of this thread where its current stream of the device is noted; else NULL. */
tu_noted *tu_noting(const tu_device *device);
/* The list of this thread, whatever device it is for. */
static inline tu_noted *tu_noting_here(void) {
    return tu_self()->noting;
}
/* Takes the act over, also where its function fails later. */
void tu_noted_add(tu_noted *noted, tu_noted_act *act);
/* Room for so many bytes: on the host, where acts write, and *there, where kernels read. NULL with the error written.
 */
void *tu_noted_room(tu_noted *noted, size_t bytes, uint64_t *there);
/* Before an act that will run again writes x, on the host, for the first time: tu_noted_close puts it back. */
tutti_status tu_noted_guard(tu_noted *noted, tt_tensor *x);

#endif
