/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside a work.
 */
#ifndef TU_COLLECTIVE_WORK_H
#define TU_COLLECTIVE_WORK_H

#include "collective/collective.h"

typedef struct tu_request tu_request; /* a send or receive under way: request.h */

struct tutti_work {
    _Atomic uint32_t users;      /* references of the program */
    _Atomic uint32_t references; /* one for all users together, one for whoever runs it */
    _Atomic uint32_t ends;       /* TU_WORK_DONE, TU_WORK_RELEASED: whoever sets the second lets go of the group */
    _Atomic uint32_t done;       /* released after status and error are set */
    bool last;                   /* its runner lets go of the group, when it drops it */
    tutti_group *group;          /* a reference */
    tu_task task;                /* its arrays lie in `arrays` */
    void *arrays;
    tutti_batch *batch;   /* instead of the task, or NULL */
    tu_request *request;  /* of a send or receive, or NULL */
    void *event;          /* of a device, or NULL: device.c */
    _Atomic bool claimed; /* of a device: a thread has seen that it is over, and finishes it */
    tutti_status status;
    tutti_error_copy *error;
    tutti_work *next; /* in the queue */
};

#define TU_WORK_DONE 1u
#define TU_WORK_RELEASED 2u

static inline bool tu_work_done(const tutti_work *work) {
    return atomic_load_explicit(&work->done, memory_order_acquire) != 0; /* pairs with tu_work_finish */
}

/* Starts the task, which has been checked, and stores a work. */
tutti_status tu_work_start(tu_task *task, tutti_work **work);
/* The same in two steps. A reference of the user's, not started: */
tutti_status tu_work_make(const tu_task *task, tutti_work **work);
/* Starts it and gives the reference to *result; on failure it is freed. */
tutti_status tu_work_start_made(tutti_work *work, tutti_work **result);
/* Runs a work at once, on the calling thread: `start` of executors that never wait for anybody. */
tutti_status tu_work_run_now(tutti_work *work);
/* The runner's reference. Dropping it may end the group, so no lock of it may be held. */
tutti_work *tu_work_hold(tutti_work *work);
void tu_work_drop(tutti_work *work);
/* Marks it done, with the calling thread's error when it failed. */
void tu_work_finish(tutti_work *work, tutti_status status);

/* Whether the calling thread is a helper of the library's own: what it waits for, the program's threads do not. */
extern _Thread_local bool tu_on_helper;

/* A thread that blocks all signals. */
tutti_status tu_helper_start(pthread_t *thread, const char *name, void *(*body)(void *), void *argument);

#endif
