/* SPDX-License-Identifier: Apache-2.0
 *
 * Looking into jobs from outside, without their cooperation: what `tutti ps`, `tutti trace` and launchers use.
 *
 * Every process-rank keeps its job segment open. It is found by name in /proc/PID/fd, opened through that link, and
 * believed only after its seals, owner and layout were checked (page.h). No privilege is needed, no signal is sent, and
 * the job notices nothing. A mapped segment stays readable after all its ranks are gone.
 */
#ifndef TU_JOB_INSPECT_H
#define TU_JOB_INSPECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <tutti/status.h>

#include "job/page.h"

/* One job segment, mapped here. */
typedef struct tu_job_view {
    const tu_page *page;
    size_t bytes;
    int size;     /* ranks, as checked: the page may be spoiled later */
    dev_t device; /* device and inode: the segment's identity */
    ino_t inode;
    bool writable; /* mapped for publishing */
    int found_in;  /* pid */
} tu_job_view;

/* Jobs in the order in which they were found. Begin with { 0 }. */
typedef struct tu_job_list {
    tu_job_view *jobs;
    size_t count;
    char skipped[256]; /* why the last segment that was left out was left out; "" when none was */
} tu_job_list;

/* Adds the jobs among the descriptors of `pid` that are not in the list yet. A process that is gone or may not be read
 * adds none. Fails only for want of memory. */
tutti_status tu_inspect_process(tu_job_list *list, int pid, bool writable);

/* Adds the jobs of all processes of this user on this host. */
tutti_status tu_inspect_user(tu_job_list *list);

void tu_inspect_free(tu_job_list *list);

/* Writes the wait status of `pid` into its slots in all jobs of the list that were opened writable. True when it had
 * one. */
bool tu_inspect_publish(const tu_job_list *list, int pid, int wait_status);

/* A process as the kernel shows it. */
typedef struct tu_process_view {
    char state;    /* R, S, D, T, t, Z, X */
    bool exiting;  /* on its way out: killed or exiting, its memory perhaps still being torn down */
    bool signaled; /* by a signal */
    int parent;
    int cpu;             /* where it ran last */
    uint64_t start_time; /* ticks since boot: with the pid, its identity */
    int64_t cpu_ticks;   /* user and system time, in clock ticks */
    char name[32];
} tu_process_view;

/* False when there is no such process. */
bool tu_process_look(int pid, tu_process_view *view);

#endif
