/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the executor `hosts`: collectives of groups whose members are on several hosts. What stays on a host runs on
 * shared memory, as a collective of the members there; what crosses goes as messages (memory/network.h).
 */
#ifndef TU_COLLECTIVE_HOSTS_H
#define TU_COLLECTIVE_HOSTS_H

#include "collective/collective.h"
#include "memory/network.h"

#define TU_HOSTS_MESSAGE ((size_t)1 << 20) /* bytes that go at once: what plug-in tutti-ucx takes as one message */

/* The members on one host. */
typedef struct tu_host {
    int count;
    const int *members; /* in group order */
} tu_host;

typedef struct tu_hosts {
    tutti_group *group;
    tu_network_group *network;
    tutti_group *here;           /* = group->here */
    tu_collective *part;         /* of `here`, where there is one */
    int host_count, host, index; /* hosts in the order of their first members; this rank's, and its place there */
    int columns;                 /* members of the host that has fewest */
    bool contiguous;             /* members of a host follow each other in the group */
    tu_host *hosts;
    int *members; /* what hosts[…].members point into */
    unsigned char *scratch;
    size_t scratch_bytes;
} tu_hosts;

/* Messages of one step of an operation, and the wait for them. Stays where it is between tu_round_begin and _end. */
#define TU_ROUND_FEW 2 /* of each kind: in the round itself */
typedef struct tu_round {
    tu_hosts *hosts;
    tu_task *task;
    tu_group_wait wait;
    tu_receipt *receipts;
    tu_dispatch *dispatches;
    int receipt_count, dispatch_count, room;
    int unreached; /* member that could not be connected to until the deadline; -1: none */
    tu_receipt few_receipts[TU_ROUND_FEW];
    tu_dispatch few_dispatches[TU_ROUND_FEW];
} tu_round;

/* Room for so many messages each way, until tu_round_end. */
tutti_status tu_round_begin(tu_round *round, tu_hosts *hosts, tu_task *task, int room);
/* What came of the round is passed on. After a failure its messages are forgotten: none of their memory is touched. */
tutti_status tu_round_end(tu_round *round, tutti_status status);
tutti_status tu_round_receive(tu_round *round, int member, uint32_t step, void *to, size_t bytes);
/* The same, but what comes is given to `absorb`, in pieces, and goes nowhere else. */
tutti_status tu_round_absorb(tu_round *round, int member, uint32_t step, tu_absorb *absorb, void *argument,
                             size_t bytes);
tutti_status tu_round_send(tu_round *round, int member, uint32_t step, const void *from, size_t bytes);
/* Until ready(argument), or until all messages have come and gone. */
tutti_status tu_round_wait_for(tu_round *round, bool (*ready)(void *argument), void *argument);
tutti_status tu_round_wait(tu_round *round);
/* Whether all of them have. */
static inline bool tu_round_is_done(const tu_round *round) {
    for (int i = 0; i < round->receipt_count; i++)
        if (!round->receipts[i].done)
            return false;
    for (int i = 0; i < round->dispatch_count; i++)
        if (!round->dispatches[i].done)
            return false;
    return true;
}

/* At least so many bytes, until the next call. */
tutti_status tu_hosts_scratch(tu_hosts *hosts, size_t bytes, unsigned char **scratch);
/* Options of the parts of a task that run on this host: its time. */
tutti_call tu_hosts_call(tu_task *task);
/* The member that speaks for a host. */
static inline int tu_hosts_leader(const tu_hosts *hosts, int host) {
    return hosts->hosts[host].members[0];
}

/* What each member has of a vector: as many bytes each, one behind the other, or what lists say. */
typedef struct tu_shares {
    size_t each;
    const size_t *bytes, *offsets; /* by member; NULL: see above */
    bool apart;                    /* offsets may differ between members: each share is a message of its own */
} tu_shares;

static inline size_t tu_share_bytes(const tu_shares *shares, int member) {
    return shares->bytes != NULL ? shares->bytes[member] : shares->each;
}

static inline size_t tu_share_offset(const tu_shares *shares, int member) {
    return shares->offsets != NULL ? shares->offsets[member] : (size_t)member * shares->each;
}

/* Every member's share, at its offset in `out`, to every member. */
tutti_status tu_hosts_gather(tu_hosts *hosts, tu_task *task, const void *own, unsigned char *out,
                             const tu_shares *shares, uint32_t step);

tutti_status tu_hosts_barrier(tu_hosts *hosts, tu_task *task);
tutti_status tu_hosts_move(tu_hosts *hosts, tu_task *task);
tutti_status tu_hosts_reduce(tu_hosts *hosts, tu_task *task);
/* Whether long reductions of this group go by hosts_direct.c: every rank is on a host of its own, and they are not too
 * many for each to be connected with all. */
#define TU_HOSTS_DIRECT_MOST 64
bool tu_hosts_direct(const tu_hosts *hosts);
tutti_status tu_hosts_reduce_direct(tu_hosts *hosts, tu_task *task);
/* How a reduction runs that may add in any order. */
tutti_algorithm tu_hosts_choose(const tu_hosts *hosts, const tu_task *task);

#endif
