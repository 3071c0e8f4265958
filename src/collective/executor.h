/* SPDX-License-Identifier: Apache-2.0
 *
 * Executors: who runs a task. For the memory of a device a group has an ordered list of them, made once; the first that
 * serves a task runs it, unless tutti_call.executor names one. So that all ranks choose alike, `serves` looks only at
 * what is equal on all of them: the group, the operation, its dtype, reduction and counts.
 *
 *     alone   groups of one rank
 *     fake    groups of a fake world
 *     shm     ranks that share the memory of a host
 *     hosts   ranks of several hosts
 *     cuda    memory of a GPU
 *
 * and whatever other backends bring, for the CPU or a device: device.c turns their executor part into one. A backend
 * that is not open yet is opened by the first call that names it.
 *
 * Every task runs one way, in tu_task_run: drain (works that were started before it), enter (its number, the group's
 * state), prepare (what the group's first task sets up), run (choose how, and do it), leave (record, errors, the end of
 * a group). An executor fills in the steps that are its own.
 */
#ifndef TU_COLLECTIVE_EXECUTOR_H
#define TU_COLLECTIVE_EXECUTOR_H

#include <stdbool.h>
#include <stdint.h>

#include <tutti/call.h>
#include <tutti/group.h>

typedef struct tu_task tu_task;

typedef struct tu_executor {
    char name[16];
    bool takes_turns; /* collectives of a group run one after the other, on the threads that call or on a helper */
    bool enqueues;    /* `run` puts the task into its stream and returns: a batch has nothing to gather */
    bool own_order;   /* adds in an order of its own: the promise of the same bits does not hold */
    bool (*serves)(const tutti_group *group, const tu_task *task);
    /* Refuses what this rank can know to be impossible, before the call has a number. NULL: nothing. */
    tutti_status (*check)(tu_task *task);
    /* Collective: what must be there before the group's first task. NULL: nothing. */
    tutti_status (*prepare)(tu_task *task);
    /* Runs a task that was entered: to its end, or into its stream. */
    tutti_status (*run)(tu_task *task);
    /* Starts a work. An error is the call's, and then nothing has begun. */
    tutti_status (*start)(tutti_work *work);
    /* Moves a work on and says whether it is over; never waits. */
    tutti_status (*test)(tutti_work *work, bool *finished);
    /* Waits for a work; TUTTI_ERROR_TIMEOUT without a message when the deadline comes first. NULL: by testing. */
    tutti_status (*wait)(tutti_work *work, int64_t deadline);
    /* Orders a stream after a work that is in another. NULL: the host waits for it. */
    tutti_status (*join)(tutti_work *work, void *stream);
    /* The program has released a work. NULL: nothing to do. */
    void (*release)(tutti_work *work);
} tu_executor;

#define TU_EXECUTORS 4 /* of one group for one device, at most */
typedef struct tu_executors {
    tutti_device kind; /* of the memory */
    int count;
    const tu_executor *list[TU_EXECUTORS]; /* in the order in which they are asked */
} tu_executors;

extern const tu_executor tu_executor_alone, tu_executor_fake, tu_executor_shm, tu_executor_hosts;

/* Those that run collectives of the group on memory of the CPU. */
tu_executors tu_executors_cpu(const tutti_group *group);

/* Sets task->executor. An unknown or unserving name is an error that lists those there are. */
tutti_status tu_executor_choose(tu_task *task, const tutti_call *call);

#endif
