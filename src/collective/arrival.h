/* SPDX-License-Identifier: Apache-2.0
 *
 * What libtutti-tensor's fused operations need of a started all-gather: who has come, before all have; and copies to
 * where others read next.
 *
 *     while (!tu_work_peek(work, member, &record))
 *         if (!tu_work_await_arrival(work, seen))
 *             return tutti_work_wait(work, 0);     (the work is over, or knows better why it will not be)
 */
#ifndef TU_COLLECTIVE_ARRIVAL_H
#define TU_COLLECTIVE_ARRIVAL_H

#include <stdbool.h>
#include <stdint.h>

#include <tutti/call.h>
#include <tutti/group.h>
#include <tutti/work.h>

#include "base/error.h"

/* tutti_all_gather of bytes as the beginning of the fused operation of that name, which records, faults and messages
 * then tell; all fused operations may meet in one, and compare themselves by what they have gathered. */
TU_SHARED tutti_status tu_fused_all_gather(const char *name, tutti_group *group, const void *in, void *out,
                                           size_t bytes, const tutti_call *call);

/* Copies to `part` what `member` has given to a started all-gather, if it has come and called the same. False
 * otherwise, and where nothing can be told before all have come (work that is queued behind another). Never waits. */
TU_SHARED bool tu_work_peek(tutti_work *work, int member, void *part);

/* Waits until a member without a mark in `seen` (one for each) has come, and returns true; false when the work is over,
 * or will fail: waiting for the work tells how. */
TU_SHARED bool tu_work_await_arrival(tutti_work *work, const bool *seen);

/* What the threads of a rank do in a fused operation, for the flight recorder: one thread's jobs, or its communication
 * (0 jobs), is an entry `fused_product` or `fused_exchange` of that group, from `began`, which the first of these
 * returned, to now. */
TU_SHARED uint64_t tu_fused_span_begin(tutti_group *group);
TU_SHARED void tu_fused_span_end(tutti_group *group, uint64_t began, int jobs);

/* Copies to memory that other ranks read next, by the stores that suit that on this machine: past the caches where the
 * lines would have to be fetched from the processor that has read them last. They do not overlap. */
TU_SHARED void tu_hand_over(const tutti_group *group, void *to, const void *from, size_t bytes);

/* How a rank copies to a ring that others read: by ordinary stores where their cores share a cache and the ring is
 * larger than a core's own, past the caches else. Ranks may move, so it watches how long the copies take: see
 * compute.c. One for each ring, zero at first, used by one thread at a time. */
typedef struct tu_stage_watch {
    bool begun;   /* the group's first measurement has been asked */
    bool watched; /* no tuning file says how to stage */
    bool far;     /* past the caches */
    int contrary, next_trial, trial_interval;
} tu_stage_watch;

/* Copies to such a ring. Whether ordinary stores are quick there: then a copy may go beside a reduction. */
TU_SHARED void tu_hand_through_ring(const tutti_group *group, tu_stage_watch *watch, void *to, const void *from,
                                    size_t bytes);
TU_SHARED bool tu_ring_is_near(const tutti_group *group, tu_stage_watch *watch, size_t bytes);

#endif
