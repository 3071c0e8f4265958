/* SPDX-License-Identifier: Apache-2.0
 *
 * Peer handles: one block as all members of a group hold it. Direct access, one-sided copies, signals.
 *
 * MEMORY MODEL, IN SHORT (the long form is docs/memory-model.md; it holds on x86-64 and on arm64)
 *
 * - A peer's buffer is ordinary memory. Plain loads and stores through tutti_peers_buffer order nothing by themselves:
 *   two ranks that touch the same bytes, one of them writing, need a signal, a barrier or atomics of their own in
 *   between.
 * - tutti_peers_put and tutti_peers_get are plain copies that are complete when they return; a put to another host is
 *   when this rank's next signal, barrier, collective or message is. A put is not a message: the peer learns of it by a
 *   signal.
 * - tutti_peers_signal releases: everything that this thread wrote before, by stores or puts, into any block or
 *   ordinary memory, is visible to the thread whose tutti_peers_wait_signal (or tutti_peers_test_signal that says yes)
 *   takes that signal: taking acquires.
 * - Taking releases too, and the sender's next signal on that channel acquires: what the receiver read or wrote before
 *   it took a signal happened before the sender's next signal on that channel returns. So three buffers, used in turn,
 *   need no other synchronisation: when the signal of message m + 2 has returned, message m + 1 was taken, and so
 *   message m was read.
 * - tutti_peers_barrier does both with every member: what any member wrote before its barrier is visible to every
 *   member after theirs.
 * - Order is cumulative: what rank A wrote before signalling B, and B took before signalling C, is visible to C.
 * - The signal pad is the user's alone. The library never touches it after it was zeroed, and its own signals lie
 *   elsewhere.
 *
 * CHANNELS. A signal is a one-slot mailbox per (sender, receiver, channel): a second signal waits, bounded, until the
 * first is taken. Every pair of block and group has channels of its own; so have signals and barriers.
 * tutti_peers_channels tells how many there are.
 *
 * WHAT AN ERROR ENDS. A signal or a wait that runs out of time ends only that call: it may be tried again. A barrier
 * that fails ends its group, and so does the death of an awaited rank (TUTTI_ERROR_DEAD).
 *
 * THREADS. All calls on one tutti_peers may come from several threads at once.
 */
#ifndef TUTTI_PEERS_H
#define TUTTI_PEERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tutti/call.h>
#include <tutti/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what it is ---- */

TUTTI_API int tutti_peers_rank(const tutti_peers *peers); /* this rank's, in the group of the rendezvous */
/* How many members the group of the rendezvous has. */
TUTTI_API int tutti_peers_size(const tutti_peers *peers);
TUTTI_API tutti_group *tutti_peers_group(const tutti_peers *peers); /* lent */
TUTTI_API size_t tutti_peers_bytes(const tutti_peers *peers);       /* of the data, the same on all members */
TUTTI_API size_t tutti_peers_pad_bytes(const tutti_peers *peers);   /* of the signal pad, the same on all members */
TUTTI_API int tutti_peers_channels(const tutti_peers *peers);       /* pad bytes / (4 * size), at least 1 */

/* A member's data as mapped here, an address of the block's device; the own rank gives the block's own.
 * NULL for a rank outside [0, size) and where the peer is not mapped, as on another host. */
TUTTI_API void *tutti_peers_buffer(const tutti_peers *peers, int rank);
/* A member's signal pad as mapped here; NULL where tutti_peers_buffer is. */
TUTTI_API void *tutti_peers_signal_pad(const tutti_peers *peers, int rank);

/* One address that reaches all members at once; NULL without multicast. */
TUTTI_API void *tutti_peers_multicast(const tutti_peers *peers);

/* Another reference to the handle. */
TUTTI_API tutti_peers *tutti_peers_keep(tutti_peers *peers);
/* Ends one reference; NULL is allowed. The memory of a block that was released meanwhile goes with the last one. */
TUTTI_API void tutti_peers_release(tutti_peers *peers);

/* ---- views, checked ---- */

/* A contiguous view of a member's data, `offset` elements of `dtype` from its start. No dimensions: one element. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_get_buffer(const tutti_peers *peers, int rank, const int64_t *shape,
                                                            int dim_count, tutti_dtype dtype, int64_t offset,
                                                            tutti_view *view);

/* What lies at a member where `pointer` (into this rank's data) lies here. NULL stands for the start of the data. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_get_remote(const tutti_peers *peers, int rank, const void *pointer,
                                                            const int64_t *shape, int dim_count, tutti_dtype dtype,
                                                            tutti_view *view);

/* A view of a member's signal pad. Without dimensions (0, NULL): flat, from `offset` to the end. dtype 0 is u32. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_get_signal_pad(const tutti_peers *peers, int rank,
                                                                const int64_t *shape, int dim_count, tutti_dtype dtype,
                                                                int64_t offset, tutti_view *view);

/* ---- one-sided copies ---- */

/* Copies `bytes` bytes from ordinary or symmetric memory into a member's data, `offset` bytes from its start. Returns
 * when `from` may be reused; the bytes are ordered before this thread's next signal or barrier. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_put(tutti_peers *peers, int to, size_t offset, const void *from,
                                                     size_t bytes, const tutti_call *call);

/* The same into every member's data at once, this rank's too: one copy to the multicast address, by a copy engine on a
 * GPU (memcpy_to_multicast_). A block without such an address is TUTTI_ERROR_UNSUPPORTED, unless TUTTI_MULTICAST is
 * "software": then each member gets a copy of its own. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_put_multicast(tutti_peers *peers, size_t offset, const void *from,
                                                               size_t bytes, const tutti_call *call);

/* Copies from a member's data. Returns when the bytes are there. From another host only while that member lives and has
 * its handle: one that has released it is TUTTI_ERROR_STATE. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_get(tutti_peers *peers, int from, size_t offset, void *to,
                                                     size_t bytes, const tutti_call *call);

/* ---- signals ---- */

/* After everything this thread wrote before. Waits while the previous signal of this channel to this member is not
 * taken. A rank may signal itself. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_signal(tutti_peers *peers, int to, int channel,
                                                        const tutti_call *call);

/* Takes one signal. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_wait_signal(tutti_peers *peers, int from, int channel,
                                                             const tutti_call *call);

/* Takes one if it is there. Never waits. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_test_signal(tutti_peers *peers, int from, int channel, bool *arrived);

/* ---- values: words of the signal pad that a rank sets and its owner waits for ----
 *
 * Unlike signals they are not taken: a word keeps its value until somebody sets it again. One rank sets a word at a
 * time. Word i is the 64-bit number at byte 8 * i of the pad; the pad is zero at first. */

/* How a word is compared. NVSHMEM's programs wait for a value, NCCL's for at least a value. */
typedef enum tutti_comparison {
    TUTTI_EQUAL = 1,
    TUTTI_AT_LEAST = 2 /* as unsigned numbers */
} tutti_comparison;

/* Copies bytes as tutti_peers_put does, then sets a word of the member's pad: who sees the value sees the bytes. 0
 * bytes only set the word. A backend without it is TUTTI_ERROR_UNSUPPORTED. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_put_with_signal(tutti_peers *peers, int to, size_t offset,
                                                                 const void *from, size_t bytes, size_t word,
                                                                 uint64_t value, const tutti_call *call);

/* Waits until a word of this rank's own pad is, or is at least, `value`, and leaves it as it is. On device memory the
 * stream waits; with ranks that are threads of one process on one GPU the other rank should have put before. Running
 * out of time ends this wait alone. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_wait_for_signal(tutti_peers *peers, size_t word,
                                                                 tutti_comparison comparison, uint64_t value,
                                                                 const tutti_call *call);

/* ---- barriers ---- */

/* Returns when every member has called it on this channel. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_peers_barrier(tutti_peers *peers, int channel, const tutti_call *call);

#ifdef __cplusplus
}
#endif
#endif
