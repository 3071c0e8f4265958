/* SPDX-License-Identifier: Apache-2.0
 *
 * Work: an operation that has been started and will finish by itself.
 *
 *     tutti_work *work;
 *     tutti_all_reduce(group, in, out, count, TUTTI_F32, TUTTI_SUM, TUTTI_OPTIONS(tutti_call, .work = &work));
 *     compute_something_else();
 *     if (tutti_work_wait(work, 0)) { fprintf(stderr, "%s\n", tutti_error_message()); }
 *     tutti_work_release(work);
 *
 * The buffers are the library's until the work has been waited for (or tested complete). Works of one group run in the
 * order in which they were started, on every rank; sends and receives run beside them. Small operations are published
 * by the starting thread itself; whatever cannot be finished without waiting goes to one helper thread per group,
 * started on first need.
 *
 * Any thread may use a work. Waiting does not release it; releasing an unfinished work lets it finish.
 */
#ifndef TUTTI_WORK_H
#define TUTTI_WORK_H

#include <stdbool.h>
#include <stdint.h>

#include <tutti/call.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the operation has finished, well or not; never waits. A failure is told by tutti_work_wait. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_work_test(tutti_work *work, bool *finished);

/* Waits until the operation has finished and returns its status, with its message for this thread; as often as one
 * likes. timeout_ns: 0 as long as the operation itself may take, so that its own error tells who is missing (of device
 * memory: the group's); when another time runs out TUTTI_ERROR_TIMEOUT ends only this wait, not the work. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_work_wait(tutti_work *work, int64_t timeout_ns);

/* Orders a stream (a CUstream) after the operation: what is put into it from now on finds the result. The host does not
 * wait, except for memory of the CPU, where the operation is over when this returns, with its status. An error that the
 * device finds later is told by tutti_work_wait and tutti_group_check. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_work_join(tutti_work *work, void *stream);

/* The operation's number in its group, as messages and `tutti trace` show it. */
TUTTI_API uint64_t tutti_work_sequence(const tutti_work *work);

/* Another reference; ends with tutti_work_release. */
TUTTI_API tutti_work *tutti_work_keep(tutti_work *work);
/* Ends one reference; an unfinished work still finishes. NULL is allowed. */
TUTTI_API void tutti_work_release(tutti_work *work);

#ifdef __cplusplus
}
#endif
#endif
