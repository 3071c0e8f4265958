/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives on plain buffers: every rank of a group calls the same function with matching arguments.
 *
 *     float gradient[N];
 *     if (tutti_all_reduce(group, gradient, gradient, N, TUTTI_F32, TUTTI_AVG, NULL))
 *         fprintf(stderr, "%s\n", tutti_error_message());
 *
 * BUFFERS are any memory of the process: symmetric (tutti/memory.h) or not, differently on each rank, at any alignment.
 * A block that was rendezvoused with the group is used where it lies; anything else is staged. They are the library's
 * from the call until it returns, or until its work has been waited for. After success no peer touches them any more.
 * `in == out` is in place and always allowed; so is an input that lies at its own place in the output (all_gather,
 * gather: out + rank * count) or an output at its own place in the input (reduce_scatter, scatter: in + rank * count).
 * Any other overlap is an error. After an error `out` is undefined, and `in` unchanged unless in place.
 *
 * ORDER. Collectives of one group must be called in the same order on all its ranks. A rank that calls another
 * operation, or the same with another count, dtype, reduction, root or forced algorithm, makes the call fail on every
 * rank with TUTTI_ERROR_MISMATCH and a message that shows both sides; the group has ended then (tutti/group.h). A rank
 * that had already left the call (the root of a broadcast) fails at its next one.
 *
 * COUNTS are in elements, may be 0, and are those of one rank's share: reduce_scatter writes and all_gather reads
 * `count` elements on each rank. Rank arguments are ranks of the group.
 *
 * REDUCTIONS add in rank order and give the same bits on every rank, at every size, with every algorithm:
 * tutti/dtype.h.
 *
 * Threads: calls may come from any thread; concurrent collectives on one group run one after the other, in an order
 * that is the callers' business.
 */
#ifndef TUTTI_COLLECTIVE_H
#define TUTTI_COLLECTIVE_H

#include <stddef.h>
#include <stdint.h>

#include <tutti/call.h>
#include <tutti/dtype.h>
#include <tutti/group.h>
#include <tutti/work.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returns when every rank of the group has called it. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_barrier(tutti_group *group, const tutti_call *call);

/* ---- reductions: which dtype has which is tabled in tutti/dtype.h ---- */

/* out[i] on every rank: the reduction of all ranks' in[i]. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_all_reduce(tutti_group *group, const void *in, void *out, size_t count,
                                                      tutti_dtype dtype, tutti_reduction reduction,
                                                      const tutti_call *call);
/* The same on `root` alone; elsewhere `out` is not used and may be NULL. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_reduce(tutti_group *group, const void *in, void *out, size_t count,
                                                  tutti_dtype dtype, tutti_reduction reduction, int root,
                                                  const tutti_call *call);
/* `in` has size * count elements; rank r gets the reduction of elements r * count to (r + 1) * count. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_reduce_scatter(tutti_group *group, const void *in, void *out, size_t count,
                                                          tutti_dtype dtype, tutti_reduction reduction,
                                                          const tutti_call *call);
/* The same with a share of its own for each rank: counts[r] elements for rank r, one after the other in `in`. The same
 * `counts` on all ranks. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_reduce_scatter_v(tutti_group *group, const void *in, void *out,
                                                            const size_t *counts, tutti_dtype dtype,
                                                            tutti_reduction reduction, const tutti_call *call);

/* ---- moves ---- */

/* `out` has size * count elements: the inputs of all ranks in rank order. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_all_gather(tutti_group *group, const void *in, void *out, size_t count,
                                                      tutti_dtype dtype, const tutti_call *call);
/* counts[r] elements from rank r go to out + offsets[r]; offsets NULL: one after the other. The same `counts` on all
 * ranks; the offsets are each rank's own. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_all_gather_v(tutti_group *group, const void *in, void *out,
                                                        const size_t *counts, const size_t *offsets, tutti_dtype dtype,
                                                        const tutti_call *call);
/* The root's `in` to every rank's `out`, the root's own included. Elsewhere `in` is not used and may be NULL. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_broadcast(tutti_group *group, const void *in, void *out, size_t count,
                                                     tutti_dtype dtype, int root, const tutti_call *call);
/* The inputs of all ranks in rank order to the root's `out`; elsewhere `out` is not used and may be NULL. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_gather(tutti_group *group, const void *in, void *out, size_t count,
                                                  tutti_dtype dtype, int root, const tutti_call *call);
/* Elements r * count to (r + 1) * count of the root's `in` to rank r; elsewhere `in` is not used and may be NULL. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_scatter(tutti_group *group, const void *in, void *out, size_t count,
                                                   tutti_dtype dtype, int root, const tutti_call *call);
/* Elements r * count to (r + 1) * count of `in` go to rank r; those from rank r come to out + r * count. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_all_to_all(tutti_group *group, const void *in, void *out, size_t count,
                                                      tutti_dtype dtype, const tutti_call *call);
/* in_counts[r] elements at in + in_offsets[r] go to rank r; out_counts[r] elements from rank r come to out +
 * out_offsets[r]. Offsets NULL: one after the other. What rank a sends to b must be what b expects from a: each pair is
 * compared. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_all_to_all_v(tutti_group *group, const void *in, const size_t *in_counts,
                                                        const size_t *in_offsets, void *out, const size_t *out_counts,
                                                        const size_t *out_offsets, tutti_dtype dtype,
                                                        const tutti_call *call);
/* Rank r's input goes to rank to[r]; -1: to nobody. `to` has one entry per rank and is the same on all. A rank that
 * nobody sends to leaves `out` alone; one that several send to gets their inputs one after the other, in rank order. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_permute(tutti_group *group, const void *in, void *out, size_t count,
                                                   tutti_dtype dtype, const int *to, const tutti_call *call);

/* ---- from one rank to another ---- */

#define TUTTI_ANY_SOURCE (-1)
#define TUTTI_ANY_TAG (-1)

/* Messages of a pair with the same tag arrive in the order in which they were sent. A send may wait until its receive
 * has begun; one of up to 2 KiB to a rank on the same host mostly does not. Tags are 0 or more. To oneself: start one
 * of the two with a work; a blocking send to oneself of more than 80 bytes that no receive awaits is an error (shorter
 * ones wait for nobody). To TUTTI_NOBODY nothing is sent.
 *
 * Sends and receives of several ranks that wait for each other in a circle are an error too: it is found at once where
 * no other thread of a rank could still come, and ends the group with TUTTI_ERROR_MISMATCH; between hosts it ends with
 * the deadline.
 *
 * tutti_call.strided_in and strided_out say how the elements lie when not one after the other; the other side need not
 * do alike. A rank keeps 16384 messages of each other rank that it has not received yet; further sends to it wait.
 * Messages that were never received are told in the error of every send and receive that fails on the rank to which
 * they came, whatever it failed by, and by a warning when a group that did not fail ends.
 *
 * Of device memory: with a named rank and tag, in a group that was used on the device before (tutti_group_prepare). */
TUTTI_API TUTTI_CHECKED tutti_status tutti_send(tutti_group *group, const void *in, size_t count, tutti_dtype dtype,
                                                int to, int tag, const tutti_call *call);
/* Room for `count` elements: a longer message, or one of another dtype, is TUTTI_ERROR_MISMATCH on both sides (where
 * the send did not wait, as with at most 80 bytes and mostly up to 2 KiB, at the sender's next call on the group), a
 * shorter one is received as it is. `from` may be TUTTI_ANY_SOURCE and `tag` TUTTI_ANY_TAG; tutti_call.received tells
 * who it was. From TUTTI_NOBODY come no elements. A receive that runs out of time ends only that receive. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_recv(tutti_group *group, void *out, size_t count, tutti_dtype dtype,
                                                int from, int tag, const tutti_call *call);

/* A send and a receive side by side, so that ranks which all call it wait for nobody in a circle: in_count elements go
 * to rank `to`, at most out_count come from rank `from`, both with that tag. The buffers must not overlap. Either rank
 * may be TUTTI_NOBODY, `from` TUTTI_ANY_SOURCE. With tutti_call.batch both are noted. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_send_recv(tutti_group *group, const void *in, size_t in_count, int to,
                                                     void *out, size_t out_count, int from, tutti_dtype dtype, int tag,
                                                     const tutti_call *call);

/* ---- several at once ---- */

/* Calls with tutti_call.batch set are noted and checked, and run together in tutti_batch_end: sends and receives side
 * by side, collectives in the order in which they were noted, small all-reduces of one dtype and reduction as one. The
 * buffers and arrays of a noted call must stay until the end. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_batch_begin(tutti_group *group, tutti_batch **batch);
/* Runs the batch and ends it, also when it fails; with call->work it only starts it. The batch's timeout is that of
 * `call`. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_batch_end(tutti_batch *batch, const tutti_call *call);
/* Forgets the batch. */
TUTTI_API void tutti_batch_cancel(tutti_batch *batch);

/* ---- which algorithm ran, and why ---- */

typedef struct tutti_ran {
    size_t size;
    tutti_algorithm algorithm;
    char operation[32];
    uint64_t sequence;
    int direct_inputs;  /* how many ranks' inputs were used where they lie */
    int direct_outputs; /* likewise outputs */
    char why[192];      /* "two_shot: 65536 bytes are above 8192 for 2 ranks (built-in table)" */
    char executor[16];  /* who ran it: "alone", "fake", "shm", "cuda" */
} tutti_ran;
#define TUTTI_RAN_INIT TUTTI_DEFAULTS(tutti_ran)
/* TUTTI_RAN_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_ran_init(tutti_ran *ran, size_t size);

/* Of the last collective that this rank ran in the group; TUTTI_ERROR_EMPTY before the first. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_ran(tutti_group *group, tutti_ran *ran);

/* "one_shot"; "?" for a value that is none. */
TUTTI_API const char *tutti_algorithm_name(tutti_algorithm algorithm);
/* From such a name, case ignored. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_algorithm_parse(const char *name, tutti_algorithm *algorithm);

/* Collective: sets up what the group's first collective would, so that later calls need no memory. Two things need it,
 * or any collective before them on the same memory: a capture of a stream, and a message of device memory, since only
 * two ranks come to that and all have to set up together; without it they are TUTTI_ERROR_STATE. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_group_prepare(tutti_group *group, const tutti_call *call);

#ifdef __cplusplus
}
#endif
#endif
