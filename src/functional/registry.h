/* SPDX-License-Identifier: Apache-2.0
 *
 * The work registry: collectives that nobody has waited for yet, and the storages that they write and read. It belongs
 * to the world.
 */
#ifndef TU_FUNCTIONAL_REGISTRY_H
#define TU_FUNCTIONAL_REGISTRY_H

#include <string.h>

#include <tutti/functional.h>

#include "tensor/operator.h"

/* A tensor without data: nothing is sent for it. */
static inline bool tu_is_meta(const tt_tensor *x) {
    return x != NULL && x->magic == TU_MAGIC_ALIVE && x->device == TUTTI_META;
}

/* A fake group moves no data: a result that has the shape of the input is a copy of it. */
static inline bool tu_group_is_fake(tutti_group *group) {
    return strcmp(tutti_world_launcher(tutti_group_world(group)), "fake") == 0;
}

/* Before a collective starts: whether it may. With an error pending, ends the group with its message and returns false.
 * `who` is for messages. A group is required unless group_optional says that nothing is sent. */
bool tu_flight_check(const char *who, tutti_group *group, bool group_optional);

/* A collective that is about to start, and what the registry shall know of it. Tensors may be NULL. */
typedef struct tu_flight_plan {
    const char *operation; /* a name that stays valid */
    tutti_group *group;
    const tt_tensor *writes, *reads;
    const tt_tensor *sends; /* tt_wait of it waits for the work too, though only `reads` is read */
    tt_tensor *lands;       /* where the work writes the ranks' parts, one after the other; whoever finishes it puts */
    int dim;                /* them side by side along this dimension of `writes`, whose shape it keeps */
    const tt_tensor *also_writes, *also_reads;
    bool nothing;    /* the call is over when it returns, because it moves nothing: there is no work to register */
    tutti_call call; /* tu_flight_call fills these three */
    tutti_work *work;
    const struct tu_device *device; /* where it is enqueued; NULL: memory of the host */
} tu_flight_plan;
/* The options for starting it: asynchronous, or part of the thread's batch. Follow with tu_flight_begin. */
tutti_call *tu_flight_call(tu_flight_plan *plan);
/* After the call, whose status is passed on. Registers the work, if one was started, under its storages, which it keeps
 * alive. In a batch they are noted, and registered with the batch's work. */
tutti_status tu_flight_begin(tutti_status status, const tu_flight_plan *plan);

/* A fake group scatters nothing: this rank's part of what it has itself. x is dense; `out` has as many elements on each
 * rank. */
void tu_fake_part(tutti_group *group, tt_tensor *out, const tt_tensor *x);
/* Its other ranks have what this one has: x in every part of out, one after the other. False: the group is real. */
bool tu_fake_gather(tutti_group *group, const tt_tensor *out, const tt_tensor *x);
/* `count` elements of x, which is dense as `out` is, from the one number `from` on, to number `to` of out. */
void tu_fake_copy(const tt_tensor *out, int64_t to, const tt_tensor *x, int64_t from, int64_t count);

/* From begin to end the calls of this thread on the group are noted, and run as one work. */
tutti_status tu_batch_open(const char *operation, tutti_group *group);
tutti_status tu_batch_close(tutti_group *group, bool good);

/* Copies between a dense block that has the parts of x along dim one after the other, and x. */
typedef enum tu_parts_direction {
    TU_PARTS_TO_BLOCK,
    TU_PARTS_FROM_BLOCK
} tu_parts_direction;
void tu_move_parts(const tt_tensor *block, const tt_tensor *x, int dim, int ranks, tu_parts_direction direction);

#endif
