/* SPDX-License-Identifier: Apache-2.0
 *
 * Making groups: for the files of this room.
 */
#ifndef TU_WORLD_GROUP_H
#define TU_WORLD_GROUP_H

#include "world/world.h"

/* A group still to be made. Strings and lists are copied. */
typedef struct tu_group_plan {
    const char *name;
    const char *description;
    uint64_t key;     /* see tu_group_key */
    const int *ranks; /* world ranks in group order; this rank is among them */
    int count;
    int64_t timeout_ns;
    tutti_group *whole; /* it becomes group->here of that one; NULL: of none */
} tu_group_plan;

/* The object alone, with one reference, known to nobody; no communication. It has no page yet. */
tutti_status tu_group_make(tutti_world *world, const tu_group_plan *plan, tutti_group **group);

/* The page of a new group. Member 0 of a group on one host reserves shared memory and gives *piece to an exchange among
 * the members; everybody passes what that exchange mapped for member 0 to tu_group_page_set, which takes the reference.
 * Other groups get private memory in tu_group_page_reserve, and need no exchange. */
tutti_status tu_group_page_reserve(tutti_group *group, const tu_piece **piece);
void tu_group_page_set(tutti_group *group, tu_mapping *mapping);

/* Everything a member needs before it agrees: the object, memory for its page, a place in the registry's memory. */
tutti_status tu_group_reserve(tutti_world *world, const tu_group_plan *plan, tutti_group **group,
                              const tu_piece **piece);

/* Some members are on other hosts, or took part in the agreement there: the page goes round among the members. ended:
 * a word that ends the exchange when it is more than `above`, or NULL. */
tutti_status tu_group_share_page(tutti_group *group, const tu_piece *piece, int64_t deadline, _Atomic uint64_t *ended,
                                 uint64_t above);

/* Of a group across hosts: group->here, the group of its members on this one, in an exchange among these, which `ended`
 * ends as above. A failure ends the group, for members elsewhere who know nothing of it. Nothing to do for other
 * groups. */
tutti_status tu_group_make_part(tutti_group *group, int64_t deadline, _Atomic uint64_t *ended, uint64_t above);

/* Names the group in this rank's recorder and enters it into the registry under its tag ("" or NULL: none); the
 * registry keeps a reference. Fails by memory only, or with TUTTI_ERROR_EXISTS when the name is taken. */
tutti_status tu_group_register(tutti_group *group, const char *tag);

/* The first 64 bits of a SHA-1 of the text, never 0. The text says which group it is: the same on all members and for
 * no other group of this world, ever. */
uint64_t tu_group_key(const char *format, ...) TUTTI_PRINTF(1, 2);

/* Where `rank` stands in the list; -1: nowhere. */
int tu_rank_index(const int *ranks, int count, int rank);

/* The world's group "0", of all ranks. Called once, by tutti_world_open. */
tutti_status tu_group_make_default(tutti_world *world, int64_t deadline);

/* An exchange among world ranks that are not, or not yet, a group; `sequence` counts under `key`. As
 * tu_group_exchange. */
typedef struct tu_meeting {
    const int *ranks; /* world ranks */
    int count;
    int me; /* index of this rank */
    uint64_t key;
    uint64_t sequence;
    const char *purpose;
    const char *what;        /* "making group 3": for messages */
    _Atomic uint64_t *ended; /* as in tu_exchange */
    uint64_t ended_above;
    tu_group_page *page;   /* of the group whose end other hosts may tell of meanwhile, or NULL */
    const int *descriptor; /* as in tu_exchange; on one host only */
    int *descriptors;
    bool *complete;                                      /* as in tu_exchange */
    tutti_status (*compare)(void *argument, int member); /* as in tu_exchange, or NULL */
    void *argument;
} tu_meeting;
tutti_status tu_meet(tutti_world *world, const tu_meeting *meeting, const void *payload, size_t bytes,
                     const tu_piece *piece, int64_t deadline, void *payloads, tu_mapping **mappings);

/* How this rank's part of making a group went, against how it went for all members: a vote in the new group's own page,
 * which survives a death at any moment. A rank that did not get the page says so in its slot of the job. `mine` is
 * returned when it is a failure, and is then a failure for all. A group of one rank, across hosts or in a fake world
 * has nobody to ask. `what` is for messages; errors name ranks of `parent`, which may be the group itself. */
tutti_status tu_group_commit(tutti_group *group, const tutti_group *parent, int64_t deadline, const char *what,
                             tutti_status mine);
/* Takes back a group that was registered already; its reference stays. The thread's error stays. */
void tu_group_unmake(tutti_group *group);

/* tutti_group_agree with a deadline of its own; 0: the group's. */
tutti_status tu_group_agree(tutti_group *group, bool mine, int64_t timeout_ns, bool *all);

/* Ends the record of an operation that failed alike for all, which ends nothing. */
tutti_status tu_group_leave_agreement(tutti_group *group, uint64_t ticket, tutti_status status);

/* Appends to the error of a wait that ran out of time: ". Missing: rank 3 (pid 71, last completed all_reduce 4 here,
 * now in barrier 2 of group 1 for 0.3 s)" and the like of the others; members on other hosts are asked. `count` members
 * are missing; the first TUTTI_ERROR_RANKS are listed. */
void tu_group_append_missing(tutti_group *group, const int *members, int count);
/* Then what to try. */
void tu_group_append_remedy(const tutti_group *group);

/* Publishes the cause for members on other hosts; nothing for a group on one host. */
void tu_group_tell_hosts(tutti_group *group, const tu_cause *cause);
/* Takes over a cause that came from another host, into this rank's own page. False: it makes no sense, or the group has
 * ended already. */
bool tu_group_hear(tutti_group *group, tu_cause *cause);
/* Whether the group has ended, as far as the store knows: for those who lost whoever could have told them. */
bool tu_group_ask_store(tutti_group *group);
/* For a rank that waits in an operation of a group across hosts, and looks now and then: whether the others are in a
 * vote instead, and have been at the last look (*seen: 0 before the first). Then they are told, and the group ends. */
bool tu_vote_object(tutti_group *group, const tu_operation_info *info, uint64_t *seen);
/* The same for a member that is in an exchange through the store which this rank has not come to. One that has done
 * what this rank waits for may be there, too: so this is for who has found before each look that it has not. */
bool tu_exchange_object(tutti_group *group, const tu_operation_info *info, int member, uint64_t *seen);
/* To the members on this host: ends group->here too. False: one of them has, before. */
bool tu_group_pass_on(tutti_group *group, const tu_cause *cause);

#endif
