/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside a work.
 */
#ifndef TU_COLLECTIVE_WORK_H
#define TU_COLLECTIVE_WORK_H

#include "collective/collective.h"

typedef struct tu_request tu_request; /* a send or receive under way: point.c */

struct tutti_work {
    _Atomic uint32_t references;
    _Atomic uint32_t done;  /* released after status and error are set */
    tutti_group *group;     /* a reference */
    tu_collective *state;   /* NULL where nobody else is there */
    tu_task task;           /* its arrays lie in `arrays` */
    void *arrays;
    tutti_batch *batch;     /* instead of the task, or NULL */
    tu_request *request;    /* of a send or receive, or NULL */
    void *event;            /* of a device, or NULL: device.c */
    tutti_status status;
    tu_error_copy *error;
    tutti_work *next;       /* in the queue */
};

/* One reference, not started. */
tutti_status tu_work_make(const tu_task *task, tutti_work **work);
/* Starts it and gives the reference to *result; on failure it is released. */
tutti_status tu_work_start_made(tutti_work *work, tutti_work **result);
/* Ends a reference without the courtesies of tutti_work_release. */
void tu_work_free(tutti_work *work);
/* Marks it done, with the calling thread's error when it failed. */
void tu_work_finish(tutti_work *work, tutti_status status);

/* A thread that blocks all signals. */
tutti_status tu_helper_start(pthread_t *thread, const char *name, void *(*body)(void *), void *argument);

#endif
