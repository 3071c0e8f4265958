/* SPDX-License-Identifier: Apache-2.0
 *
 * A group's side of the network: matching, windows, waiting.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "memory/network_inner.h"
#include "world/group.h"

#define WINDOW TU_NETWORK_WINDOW
#define COST TU_NETWORK_COST
#define CHECK_INTERVAL (20 * TU_MILLISECOND)
#define NEWS_TIME (700 * TU_MILLISECOND) /* for an agent to tell why a connection broke */
#define ASK_AFTER (100 * TU_MILLISECOND)
#define SPINS 2000                    /* looks without an event before a waiting thread sleeps */
#define ABANDON_SLEEP 5               /* milliseconds */
#define LOOKS 4                       /* of them one after the other: each is a system call */
#define ABANDON_LIMIT (2 * TU_SECOND) /* for messages of a failed operation to leave, to ranks that live */

/* ---- taking ---- */

static void take(tu_network_group *side, tu_receipt *receipt, const tu_network_header *header, const void *data,
                 size_t bytes) {
    tu_network_flow *flow = &side->flows[receipt->member];
    if (bytes > 0 && receipt->absorb != NULL)
        receipt->absorb(receipt->argument, header->offset, data, bytes);
    else if (bytes > 0)
        memcpy(receipt->to + header->offset, data, bytes);
    receipt->got += bytes;
    receipt->done = receipt->got == receipt->bytes;
    flow->owed += bytes + COST;
    if (flow->owed >= WINDOW / 4) {
        tu_network_own(side->network, side->group->ranks[receipt->member], TU_NETWORK_TAKEN, side->group->key, 0,
                       flow->owed, NULL, NULL, 0);
        flow->owed = 0;
    }
    if (!receipt->done)
        return;
    tu_receipt **link = &side->receipts;
    while (*link != receipt)
        link = &(*link)->next;
    *link = receipt->next;
    receipt->posted = false;
}

static void disagree(tu_network_group *side, const tu_network_header *header) {
    if (side->other >= 0)
        return;
    side->other = side->member_of[header->from];
    side->other_said = header->said;
}

/* Whether the sender called something else than this rank under that number, as far as this rank has come. */
static bool differs(const tu_network_group *side, const tu_network_header *header) {
    if (header->sequence == side->sequence)
        return header->said.signature != side->said.signature;
    uint64_t slot = header->sequence % TU_NETWORK_HISTORY;
    return header->sequence < side->sequence && side->history[slot].sequence == header->sequence &&
           side->history[slot].signature != header->said.signature;
}

static tu_receipt *receipt_for(tu_network_group *side, const tu_network_header *header) {
    int member = side->member_of[header->from];
    if (header->sequence != side->sequence || header->said.signature != side->said.signature)
        return NULL;
    tu_receipt *receipt = side->receipts;
    while (receipt != NULL && (receipt->member != member || receipt->step != header->step))
        receipt = receipt->next;
    if (receipt != NULL && receipt->bytes != header->total && side->other < 0) {
        side->other = member;
        side->other_said = header->said;
        side->unequal = true;
        side->sent_bytes = header->total;
        side->expected_bytes = receipt->bytes;
    }
    return receipt != NULL && receipt->bytes == header->total ? receipt : NULL;
}

static bool keep(tu_network_group *side, const tu_network_header *header, const void *data, size_t bytes,
                 void *parcel) {
    tu_network_kept **last = &side->kept, *kept = tu_network_keep(header, data, bytes, parcel);
    while (*last != NULL)
        last = &(*last)->next;
    *last = kept;
    if (kept == NULL)
        tu_network_cut(side->network, header->from, "there was no memory for its messages");
    return kept != NULL;
}

static void hear_end(tu_network_group *side, const void *data, size_t bytes) {
    tu_cause cause;
    if (bytes != sizeof cause)
        return;
    memcpy(&cause, data, sizeof cause);
    if (!tu_group_hear(side->group, &cause))
        return;
    for (int member = 0; member < side->group->size; member++) /* those that the teller is not connected to */
        if (member != side->group->rank && member != cause.origin)
            tu_network_own(side->network, side->group->ranks[member], TU_NETWORK_ENDED, side->group->key, 0, 0, NULL,
                           &cause, sizeof cause);
}

bool tu_network_group_arrived(tu_network_group *side, const tu_network_header *header, const void *data, size_t bytes,
                              void *parcel) {
    int member = side->member_of[header->from];
    if (member < 0)
        return false;
    switch ((tu_network_kind)header->kind) {
    case TU_NETWORK_TAKEN:
        if (header->offset <= side->flows[member].sent - side->flows[member].taken) /* more than was sent is no room */
            side->flows[member].taken += header->offset;
        side->network->settling = true;
        return false;
    case TU_NETWORK_ENDED:
        hear_end(side, data, bytes);
        return false;
    case TU_NETWORK_LETTER:
        return tu_network_letter_arrived(side, member, header, data, bytes, parcel);
    case TU_NETWORK_READ:
        tu_network_letter_read(side, member, header->offset);
        return false;
    case TU_NETWORK_MEMORY:
        tu_network_memory_arrived(side, member, header, data, bytes);
        return false;
    case TU_NETWORK_DATA:
    case TU_NETWORK_ASK:
        break;
    default:
        return false;
    }
    if (differs(side, header))
        disagree(side, header);
    tu_receipt *receipt = header->kind == TU_NETWORK_DATA ? receipt_for(side, header) : NULL;
    if (receipt != NULL) {
        take(side, receipt, header, data, bytes);
        return false;
    }
    if (header->sequence < side->sequence)
        return false; /* of an operation that is over here */
    return keep(side, header, data, bytes, parcel);
}

/* ---- what this rank calls ---- */

void tu_network_enter(tu_network_group *side) {
    pthread_mutex_lock(&side->network->lock);
    side->network->callers++;
    side->network->entries++;
    pthread_mutex_unlock(&side->network->lock);
}

void tu_network_leave(tu_network_group *side) {
    tu_network *network = side->network;
    pthread_mutex_lock(&network->lock);
    if (--network->callers == 0 && network->napping)
        pthread_cond_signal(&network->leaving);
    pthread_mutex_unlock(&network->lock);
}

void tu_network_rest(tu_network_group *side) {
    tu_network *network = side->network;
    pthread_mutex_lock(&network->lock);
    network->handed_over = true;
    if (--network->callers == 0)
        pthread_cond_signal(&network->leaving);
    pthread_mutex_unlock(&network->lock);
}

void tu_network_poll(tu_network_group *side) {
    pthread_mutex_lock(&side->network->lock);
    tu_network_drive(side->network);
    pthread_mutex_unlock(&side->network->lock);
}

void tu_network_enter_saying(tu_network_group *side, uint64_t sequence, const tu_network_said *said) {
    tu_network *network = side->network;
    pthread_mutex_lock(&network->lock);
    network->callers++;
    network->entries++;
    side->sequence = sequence;
    side->said = *said;
    side->history[sequence % TU_NETWORK_HISTORY].sequence = sequence;
    side->history[sequence % TU_NETWORK_HISTORY].signature = said->signature;
    for (tu_network_kept **link = &side->kept, *kept; (kept = *link) != NULL;) {
        if (differs(side, &kept->header))
            disagree(side, &kept->header);
        if (kept->header.sequence < sequence ||
            (kept->header.kind == TU_NETWORK_ASK && kept->header.sequence == sequence)) {
            *link = kept->next;
            tu_network_free_kept(network, kept);
        } else {
            link = &kept->next;
        }
    }
    pthread_mutex_unlock(&network->lock);
}

int tu_network_other(tu_network_group *side, tu_network_other_call *call) {
    pthread_mutex_lock(&side->network->lock);
    int member = side->other;
    *call = (tu_network_other_call){ side->other_said, side->unequal, side->sent_bytes, side->expected_bytes };
    pthread_mutex_unlock(&side->network->lock);
    return member;
}

/* ---- posting and sending ---- */

void tu_network_post(tu_network_group *side, tu_receipt *receipt) {
    tu_network *network = side->network;
    receipt->posted = true;
    pthread_mutex_lock(&network->lock);
    receipt->next = side->receipts;
    side->receipts = receipt;
    for (tu_network_kept **link = &side->kept, *kept; (kept = *link) != NULL && receipt->posted;) {
        if (kept->header.kind == TU_NETWORK_DATA && receipt_for(side, &kept->header) == receipt) {
            *link = kept->next;
            take(side, receipt, &kept->header, kept->data, kept->bytes);
            tu_network_free_kept(network, kept);
        } else {
            link = &kept->next;
        }
    }
    pthread_mutex_unlock(&network->lock);
}

/* Sends what the window allows. */
static void push(tu_network_group *side, tu_dispatch *dispatch) {
    tu_network *network = side->network;
    tu_network_flow *flow = &side->flows[dispatch->member];
    while (!dispatch->failed && (!dispatch->begun || dispatch->at < dispatch->bytes)) {
        size_t left = dispatch->bytes - dispatch->at, piece = left < network->most ? left : network->most;
        if (flow->sent - flow->taken + piece + COST > WINDOW)
            return;
        tu_network_header header = { .magic = TU_NETWORK_MAGIC,
                                     .version = TU_NETWORK_VERSION,
                                     .door = network->peers[dispatch->peer].door,
                                     .key = side->group->key,
                                     .sequence = dispatch->sequence,
                                     .offset = dispatch->at,
                                     .total = dispatch->bytes,
                                     .kind = TU_NETWORK_DATA,
                                     .step = dispatch->step,
                                     .from = network->world->rank,
                                     .said = side->said };
        dispatch->begun = true;
        flow->sent += piece + COST;
        dispatch->at += piece;
        tu_network_fragment(network, dispatch, &header, dispatch->data + header.offset, piece);
    }
}

void tu_network_group_settle(tu_network_group *side) {
    for (tu_dispatch **link = &side->outgoing, *dispatch; (dispatch = *link) != NULL;) {
        push(side, dispatch);
        bool over = dispatch->failed || (dispatch->begun && dispatch->at == dispatch->bytes);
        if (over && dispatch->under_way == 0) {
            dispatch->done = !dispatch->failed;
            dispatch->queued = false;
            *link = dispatch->next;
        } else {
            link = &dispatch->next;
        }
    }
}

void tu_network_send(tu_network_group *side, tu_dispatch *dispatch, int member, uint32_t step, const void *data,
                     size_t bytes) {
    tu_network *network = side->network;
    *dispatch = (tu_dispatch){ .group = side,
                               .peer = side->group->ranks[member],
                               .member = member,
                               .step = step,
                               .sequence = side->sequence,
                               .data = data,
                               .bytes = bytes,
                               .queued = true };
    pthread_mutex_lock(&network->lock);
    tu_dispatch **last = &side->outgoing;
    while (*last != NULL)
        last = &(*last)->next;
    *last = dispatch;
    tu_network_group_settle(side);
    pthread_mutex_unlock(&network->lock);
}

/* ---- waiting ---- */

/* Whether the launcher of its host says that a member's process ended well: who sent it something just when it closed
 * its world sees a connection that breaks. */
static bool has_ended(const tutti_group *group, int member) {
    const tu_news *news = group->world->news;
    return news != NULL && group->job_ranks[member] < 0 && tu_news_of(news, group->ranks[member]) == TU_NEWS_ENDED;
}

static tutti_status departed(const tu_network_group *side, const tu_group_wait *wait, int member) {
    const tutti_group *group = side->group;
    const tu_network_peer *peer = &side->network->peers[group->ranks[member]];
    char operation[160];
    tu_operation_text(group, wait->info, operation, sizeof operation);
    const char *host = tu_job_host(group->world->job, group->ranks[member]);
    tutti_status status =
        peer->gone || has_ended(group, member)
            ? tu_error(TUTTI_ERROR_GONE, "rank %d of group %s on %s closed its world; rank %d was in %s", member,
                       group->name, host, group->rank, operation)
            : tu_error(TUTTI_ERROR_DEAD,
                       "rank %d lost rank %d of group %s on %s in %s: the connection broke (%s). Its process has "
                       "ended, or the network between the hosts is down",
                       group->rank, member, group->name, host, operation, peer->why);
    if (status == TUTTI_ERROR_GONE)
        tu_error_append(TU_LEFT_EARLY);
    tu_error_at_fault(member);
    (void)tu_error_where(group->name, tu_operation_name((tu_operation)wait->info->operation), wait->info->sequence,
                         group->rank);
    return status;
}

/* Of a member on this host; the network tells of the others. */
static bool has_closed(const tutti_group *group, int member) {
    return group->job_ranks[member] >= 0 &&
           tu_world_rank_state(group->world, group->ranks[member], false) == TU_RANK_CLOSED;
}

/* A member whose connection broke, or an awaited one that said goodbye; -1: none. Where agents tell how ranks end, they
 * are given a while to say it: that is more than a connection tells. */
static int find_departed(tu_network_group *side, const tu_group_wait *wait) {
    int gone = -1;
    bool others = false;
    int64_t before = tu_clock_now() - (side->group->world->news != NULL ? NEWS_TIME : 0);
    for (int member = 0; member < side->group->size; member++) {
        const tu_network_peer *peer = &side->network->peers[side->group->ranks[member]];
        if (member == side->group->rank)
            continue;
        pthread_mutex_lock(&side->network->lock); /* not while `missing` is asked: it may take the lock of a caller */
        bool closed = peer->gone || (peer->lost && has_ended(side->group, member));
        bool broke = peer->lost && !closed && peer->lost_at <= before;
        pthread_mutex_unlock(&side->network->lock);
        if (broke)
            return member;
        if (wait->missing != NULL && !wait->missing(wait->argument, member))
            continue;
        if (closed && !wait->any)
            return member;
        gone = closed ? member : gone;
        others = others || (!closed && !has_closed(side->group, member));
    }
    return others ? -1 : gone; /* of a wait for any of them: all are gone */
}

tutti_status tu_network_look(tu_network_group *side, const tu_group_wait *wait, tutti_status status) {
    int member = status == TUTTI_OK ? find_departed(side, wait) : -1;
    /* Asked last: who ended the group may have left at once, and with the connection went its word of it. */
    if (tu_group_overhear(side->group) || (member >= 0 && tu_group_ask_store(side->group)))
        return TUTTI_ERROR_STATE;
    return member >= 0 ? departed(side, wait, member) : status;
}

static tutti_status look_around(tu_network_group *side, const tu_group_wait *wait) {
    return tu_network_look(side, wait, wait->wait.check(wait->wait.argument));
}

static void ask(tu_network_group *side, const tu_group_wait *wait, int member) {
    tu_network *network = side->network;
    char text[160];
    tu_operation_text(side->group, wait->info, text, sizeof text);
    pthread_mutex_lock(&network->lock);
    tu_network_own(network, side->group->ranks[member], TU_NETWORK_ASK, side->group->key, side->sequence, 0,
                   &side->said, text, strlen(text));
    pthread_mutex_unlock(&network->lock);
}

/* Asks those that are awaited what they call: for waits that have taken long, in operations in which nobody would send
 * anything to this rank if they called something else. */
static void ask_awaited(tu_network_group *side, const tu_group_wait *wait) {
    for (int member = 0; member < side->group->size; member++)
        if (member != side->group->rank && side->group->job_ranks[member] < 0 && wait->missing != NULL &&
            wait->missing(wait->argument, member))
            ask(side, wait, member);
}

/* With the lock held: the last question of a rank about a group, or NULL. */
static const tu_network_kept *question_of(const tu_network_kept *kept, uint64_t key, int rank) {
    const tu_network_kept *last = NULL;
    for (; kept != NULL; kept = kept->next)
        if (kept->header.kind == TU_NETWORK_ASK && kept->header.key == key && kept->header.from == rank)
            last = kept;
    return last;
}

/* Sleeps until something comes, at most until the next look. */
static void doze(tu_network *network, int64_t until) {
    int64_t left = until - tu_clock_now();
    if (left <= 0)
        return;
    pthread_mutex_lock(&network->lock);
    tu_network_sleep(network, (int)(left / TU_MILLISECOND) + 1);
    pthread_mutex_unlock(&network->lock);
}

tutti_status tu_network_wait(tu_network_group *side, const tu_group_wait *wait, bool (*ready)(void *argument),
                             void *argument) {
    tu_network *network = side->network;
    int64_t next_check = 0, ask_at = 0;
    uint32_t idle = 0, spins = (wait->wait.spins > 0 ? SPINS : 20) / LOOKS;
    for (;;) {
        pthread_mutex_lock(&network->lock);
        bool over = tu_network_drive_until(network, LOOKS, ready, argument), differs = side->other >= 0;
        pthread_mutex_unlock(&network->lock);
        if (over)
            return TUTTI_OK;
        if (differs)
            return TUTTI_ERROR_MISMATCH;
        if (tu_group_overhear(side->group))
            return TUTTI_ERROR_STATE;
        if (atomic_load_explicit(wait->wait.interrupt, memory_order_relaxed) != 0)
            return TUTTI_ERROR_INTERRUPTED;
        if (++idle < spins && idle % (64 / LOOKS) != 0)
            continue;
        int64_t now = tu_clock_now();
        if (now >= wait->wait.deadline)
            return TUTTI_ERROR_TIMEOUT;
        if (now >= next_check) {
            tutti_status status = look_around(side, wait);
            if (status != TUTTI_OK)
                return status;
            next_check = now + CHECK_INTERVAL;
            ask_at = ask_at == 0 ? now + ASK_AFTER : ask_at;
            if (now >= ask_at) {
                ask_awaited(side, wait);
                ask_at = INT64_MAX;
            }
        }
        if (idle >= spins)
            doze(network, next_check < wait->wait.deadline ? next_check : wait->wait.deadline);
    }
}

/* ---- failures ---- */

static bool unsent(const tu_network_group *side) {
    for (const tu_dispatch *dispatch = side->outgoing; dispatch != NULL; dispatch = dispatch->next)
        if (dispatch->under_way > 0)
            return true;
    return false;
}

void tu_network_abandon(tu_network_group *side) {
    tu_network *network = side->network;
    int64_t limit = tu_deadline(ABANDON_LIMIT);
    pthread_mutex_lock(&network->lock);
    for (tu_receipt *receipt = side->receipts; receipt != NULL; receipt = receipt->next)
        receipt->posted = false;
    side->receipts = NULL;
    for (tu_dispatch *dispatch = side->outgoing; dispatch != NULL; dispatch = dispatch->next)
        dispatch->failed = true; /* nothing more of it is sent */
    tu_network_drive(network);
    while (unsent(side) && tu_clock_now() < limit) {
        tu_network_sleep(network, ABANDON_SLEEP);
        tu_network_drive(network);
    }
    /* A connection that does not take what it was given is of no more use, and its memory is the caller's again. */
    for (tu_dispatch *dispatch = side->outgoing; dispatch != NULL; dispatch = dispatch->next)
        if (dispatch->under_way > 0) { /* also of one that is lost already, by a send that failed: it is still open */
            tu_network_lost(network, dispatch->peer, "it took nothing any more");
            network->part->disconnect(network->state, dispatch->peer);
        }
    tu_network_group_settle(side);
    pthread_mutex_unlock(&network->lock);
}

static void tell(tutti_group *group, const tu_cause *cause);

/* ---- the object ---- */

static void free_side(tu_network_group *side) {
    tu_network_letters_free(side);
    free(side->member_of);
    free(side->flows);
    free(side->puts);
    free(side);
}

static void adopt_orphans(tu_network_group *side) {
    tu_network *network = side->network;
    tu_network_kept **last = &side->kept;
    tu_network_kept **link = &network->orphans;
    for (tu_network_kept *kept; (kept = *link) != NULL;) {
        if (kept->header.key != side->group->key) {
            link = &kept->next;
            continue;
        }
        *link = kept->next;
        kept->next = NULL;
        network->peers[kept->header.from].orphaned -= tu_network_orphan_cost(kept);
        if (kept->header.kind == TU_NETWORK_LETTER && side->member_of[kept->header.from] >= 0) {
            tu_network_letter_keep(side, side->member_of[kept->header.from], kept);
        } else if (kept->header.kind == TU_NETWORK_ENDED || side->member_of[kept->header.from] < 0) {
            (void)tu_network_group_arrived(side, &kept->header, kept->data, kept->bytes, NULL);
            tu_network_free_kept(network, kept);
        } else {
            *last = kept;
            last = &kept->next;
        }
    }
    network->orphans_end = link;
}

static tutti_status make_side(void *owner, void **made) {
    tutti_group *group = owner;
    tu_network *network;
    tutti_status status = tu_network_get(group->world, &network);
    if (status != TUTTI_OK)
        return status;
    size_t size = (size_t)group->world->size;
    tu_network_group *side = calloc(1, sizeof *side);
    if (side != NULL) {
        side->member_of = malloc(size * sizeof *side->member_of);
        side->flows = calloc((size_t)group->size, sizeof *side->flows);
        side->puts = calloc((size_t)group->size, sizeof *side->puts);
        side->network = network;
        side->group = group;
    }
    if (side == NULL || side->member_of == NULL || side->flows == NULL || side->puts == NULL ||
        tu_network_letters_make(side) != TUTTI_OK) {
        if (side != NULL)
            free_side(side);
        return tu_error_memory("a group's messages between hosts", size * sizeof(int));
    }
    side->other = -1;
    for (size_t rank = 0; rank < size; rank++)
        side->member_of[rank] = -1;
    for (int member = 0; member < group->size; member++)
        side->member_of[group->ranks[member]] = member;
    pthread_mutex_lock(&network->lock);
    side->next = network->groups;
    network->groups = side;
    adopt_orphans(side);
    pthread_mutex_unlock(&network->lock);
    atomic_store_explicit(&group->world->tell_hosts, tell, memory_order_release); /* pairs with tu_group_tell_hosts */
    atomic_store_explicit(&group->world->forget_hosts, tu_network_forget_group,
                          memory_order_release);                                                   /* and releases */
    atomic_store_explicit(&group->world->publish_hosts, tu_network_publish, memory_order_release); /* and with moves */
    atomic_store_explicit(&group->world->way_to_hosts, tu_network_way, memory_order_release);      /* and with votes */
    atomic_store_explicit(&group->world->asked_by_hosts, tu_network_asked, memory_order_release);  /* likewise */
    atomic_store_explicit(&group->world->inquire_hosts, tu_network_inquire, memory_order_release); /* and with errors */
    atomic_store_explicit(&group->world->fence_hosts, tu_network_fence, memory_order_release); /* and with operations */
    *made = side;
    return TUTTI_OK;
}

static void end_side(void *argument) {
    tu_network_group *side = argument;
    tu_network *network = side->network;
    pthread_mutex_lock(&network->lock);
    tu_network_group **link = &network->groups;
    while (*link != side)
        link = &(*link)->next;
    *link = side->next;
    for (tu_network_window *window = side->windows; window != NULL; window = window->next)
        window->side = NULL; /* of handles that go with the group, after this */
    while (side->kept != NULL) {
        tu_network_kept *next = side->kept->next;
        tu_network_free_kept(network, side->kept);
        side->kept = next;
    }
    free_side(side); /* with the lock held: letters that nobody took are the backend's memory */
    pthread_mutex_unlock(&network->lock);
}

static const tu_attachment side_attachment = { .make = make_side, .end = end_side };

tutti_status tu_network_group_get(tutti_group *group, tu_network_group **side) {
    void *made = NULL;
    tutti_status status = tu_attachment_get(&group->attachments, &side_attachment, &made);
    *side = made;
    return status;
}

/* The group ended here: those that this rank is connected to learn it from it, and tell it on. */
static void tell(tutti_group *group, const tu_cause *cause) {
    tu_network *network = tu_network_find(group->world);
    if (network == NULL)
        return;
    pthread_mutex_lock(&network->lock);
    for (int member = 0; member < group->size; member++)
        if (member != group->rank)
            tu_network_own(network, group->ranks[member], TU_NETWORK_ENDED, group->key, 0, 0, NULL, cause,
                           sizeof *cause);
    tu_network_drive(network);
    pthread_mutex_unlock(&network->lock);
}

/* Whoever asked is connected to, so that it can be told what comes of it. */
bool tu_network_asked(tutti_group *group, int member, uint64_t *sequence, char *text, size_t bytes) {
    tu_network *network = tu_network_find(group->world);
    if (network == NULL)
        return false;
    const tu_network_group *side = tu_attachment_find(&group->attachments, &side_attachment);
    int rank = group->ranks[member];
    pthread_mutex_lock(&network->lock);
    const tu_network_kept *asked = question_of(side != NULL ? side->kept : network->orphans, group->key, rank);
    bool found = asked != NULL, connected = network->peers[rank].connected;
    if (found) {
        *sequence = asked->header.sequence;
        size_t length = asked->bytes < bytes ? asked->bytes : bytes - 1;
        memcpy(text, asked->data, length);
        text[length] = 0;
    }
    pthread_mutex_unlock(&network->lock);
    if (found && !connected)
        (void)tu_network_try_connect(network, rank); /* what is in the way shows in the vote */
    return found;
}
