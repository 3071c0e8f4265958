/* SPDX-License-Identifier: Apache-2.0
 *
 * Votes: agreements of a group's members that survive the death of any of them at any moment, and work when the group
 * has ended. On one host; where members are on several, vote_hosts.c does the same by the world's store.
 *
 * A vote has a number, its attempt. Each member writes its ballot and then its `arrived` word. Who sees that all it
 * waits for have arrived or departed writes a proposal, complete, into its own slot, and then tries to move the page's
 * `decided` word on to this attempt, by compare-and-swap: the first wins, and everybody takes the winner's proposal. So
 * no member is special; one that dies before the swap has changed nothing, one that dies after it has finished its
 * part. A deadline is decided in the same way, so that all fail alike. models/vote.pml proves it.
 *
 * Ballots and proposals are written in turns of two: attempt n + 2 begins after everybody has left attempt n.
 */
#ifndef TU_WORLD_VOTE_H
#define TU_WORLD_VOTE_H

#include "world/world.h"

typedef enum tu_vote_kind {
    TU_VOTE_AGREE = 1,  /* the logical and of `yes` */
    TU_VOTE_SHRINK = 2, /* who survives, and what they have all completed */
    TU_VOTE_COMMIT = 3  /* whether all awaited made it; `status` and `text` say why not */
} tu_vote_kind;

typedef enum tu_vote_outcome {
    TU_VOTE_DONE = 1,
    TU_VOTE_RETRY = 2,    /* commit: one has died meanwhile; `culprit` saw it, or -1 */
    TU_VOTE_MISMATCH = 3, /* the members do different things; `culprit` is the first that differs */
    TU_VOTE_FAILED = 4,   /* commit: `culprit` cannot */
    TU_VOTE_LATE = 5,     /* the deadline passed; `members` are those that live and did not come */
    TU_VOTE_FEW = 6       /* shrink across hosts: more members are out of reach than are left */
} tu_vote_outcome;

#define TU_VOTE_TEXT 224

typedef struct tu_vote {
    /* What this member says. */
    tu_vote_kind kind;
    bool yes;
    tutti_status status;
    const char *text;
    uint64_t digest;     /* of the arguments that must be equal */
    const bool *awaited; /* by member: whose ballots count; the same for all voters */
    uint64_t refusal;    /* commit: not 0: members that have refused this key (tu_job_refuse) will not come */
    /* How it waits. */
    const tu_operation_info *info;
    uint64_t ticket;
    int64_t deadline;
    uint64_t attempt; /* 0: the next; set */
    /* The decision. */
    tu_vote_outcome outcome;
    bool all;         /* agree */
    bool *members;    /* shrink: survivors; late: the missing. Room for the group's size. */
    uint64_t settled; /* shrink */
    int culprit;      /* member, or -1 */
    tutti_status culprit_status;
    char culprit_text[TU_VOTE_TEXT];
} tu_vote;

/* Votes and waits for the decision. TUTTI_OK when there is one, whatever its outcome; else INTERRUPTED, TIMEOUT when
 * the others went on without this rank, or across hosts NETWORK or DEAD when this rank is cut off from them, with a
 * message. Under the group's vote_lock. */
tutti_status tu_vote_hold(tutti_group *group, tu_vote *vote);

/* Writes this member's ballot and goes: for one whose part failed, so that whatever the others decide is no success.
 * Under the group's vote_lock. */
void tu_vote_cast(tutti_group *group, tu_vote *vote);

/* Room for the slots of a group's members, behind its page and area. */
size_t tu_votes_bytes(int size);

#endif
