/* SPDX-License-Identifier: Apache-2.0
 *
 * Sends and receives that did not find each other.
 *
 * Messages from one rank to another with one tag are received in the order in which they were sent: so the first that
 * was sent belongs to the first receive that succeeded, and so on. What is left over is a message that was not received
 * or a receive for which no message came; a rank that waits in one of them, or gave up there, is a finding.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "divergence.h"
#include "tool.h"
#include "world/world.h"

#define MOST_TOLD 4 /* messages, and receives, of one finding */

/* A send or receive of one rank. */
typedef struct message {
    const flight *by;
    const tu_record_view *entry;
    int from, to; /* ranks of the group; `from` -1: anybody, in a receive that got nothing */
    int tag;      /* -1: any, likewise */
    bool sent;    /* else a receive */
    bool paired;
} message;

/* Which rank of the group the recorder's rank is; -1: not known, in a group of more members than recorders keep. */
static int own_rank(const flight *copy, const tu_recorder_group_view *group) {
    for (int i = 0; group != NULL && i < group->members; i++)
        if (group->world_ranks[i] == copy->rank)
            return i;
    return -1;
}

static bool is_message(const tu_record_view *entry, uint64_t key) {
    return entry->info.group_key == key && tu_operation_row_of(entry->info.operation)->kind == TU_KIND_MESSAGE;
}

static bool succeeded(const message *made) {
    return !made->entry->running && made->entry->status == TUTTI_OK;
}

static message *gather(const flight_job *job, uint64_t key, size_t *count) {
    size_t room = 0;
    *count = 0;
    for (size_t i = 0; i < job->count; i++)
        room += job->flights[i].entry_count;
    message *list = malloc((room + 1) * sizeof *list);
    for (size_t i = 0; list != NULL && i < job->count; i++) {
        const flight *copy = &job->flights[i];
        int own = own_rank(copy, flight_group(copy, key));
        for (size_t at = 0; own >= 0 && at < copy->entry_count; at++) {
            const tu_record_view *entry = &copy->entries[at];
            if (!is_message(entry, key))
                continue;
            bool sent = !tu_receives(tu_operation_row_of(entry->info.operation));
            list[(*count)++] = (message){ .by = copy,
                                          .entry = entry,
                                          .from = sent ? own : entry->info.root,
                                          .to = sent ? entry->info.root : own,
                                          .tag = entry->info.tag,
                                          .sent = sent };
        }
    }
    return list;
}

static int compare(int64_t one, int64_t other) {
    return one < other ? -1 : one > other;
}

/* By pair and tag; of one pair and tag the sends first, each kind in the order of its rank's calls. */
static int in_order(const void *one, const void *other) {
    const message *left = one, *right = other;
    int order = compare(left->from, right->from);
    order = order != 0 ? order : compare(left->to, right->to);
    order = order != 0 ? order : compare(left->tag, right->tag);
    order = order != 0 ? order : compare(right->sent, left->sent);
    return order != 0 ? order : compare((int64_t)left->entry->id, (int64_t)right->entry->id);
}

static bool same_pair(const message *one, const message *other) {
    return one->from == other->from && one->to == other->to && one->tag == other->tag;
}

/* By rank of the group: whether its recorder is here, and goes back to its first operation. */
static void find_whole(const flight_job *job, uint64_t key, bool whole[TU_RECORDER_MEMBERS]) {
    memset(whole, 0, TU_RECORDER_MEMBERS * sizeof *whole);
    for (size_t i = 0; i < job->count; i++) {
        int own = own_rank(&job->flights[i], flight_group(&job->flights[i], key));
        if (own >= 0)
            whole[own] = !flight_forgot(&job->flights[i]);
    }
}

/* Sorted by pair and tag: gives every receive that succeeded the next message. Where one of the two recorders has
 * forgotten its first operations, or is missing, nobody knows which one that is: there everything that ended well
 * counts as paired. */
static void pair_messages(message *list, size_t count, const bool whole[TU_RECORDER_MEMBERS]) {
    for (size_t begin = 0, end; begin < count; begin = end) {
        size_t sends = begin, receives;
        int from = list[begin].from, to = list[begin].to;
        bool forgot = from < 0 || from >= TU_RECORDER_MEMBERS || to < 0 || to >= TU_RECORDER_MEMBERS || !whole[from] ||
                      !whole[to];
        for (end = begin; end < count && same_pair(&list[begin], &list[end]);)
            end++;
        for (receives = begin; receives < end && list[receives].sent; receives++)
            list[receives].paired = forgot && succeeded(&list[receives]);
        for (size_t i = receives; i < end; i++) {
            list[i].paired = succeeded(&list[i]);
            if (list[i].paired && !forgot && sends < receives)
                list[sends++].paired = true;
        }
    }
}

/* Whether the message may be what the receive waited for, but for its tag; or the other way round. */
static bool concerns(const message *waiting, const message *other) {
    if (other->paired || other->sent == waiting->sent)
        return false;
    const message *sent = waiting->sent ? waiting : other, *receive = waiting->sent ? other : waiting;
    return sent->to == receive->to && (receive->from < 0 || receive->from == sent->from);
}

static void tell_elements(const tu_operation_info *info, finding *found) {
    finding_append(found, "%llu element%s of %s", (unsigned long long)info->count, info->count == 1 ? "" : "s",
                   tutti_dtype_name((tutti_dtype)info->dtype));
}

/* "with tag 7777 (4 elements of f32), with tag 5 (1 element of f32) and 3 more" */
static void tell_other_side(const message *waiting, const message *list, size_t count, finding *found) {
    int told = 0;
    for (size_t i = 0; i < count; i++) {
        if (!concerns(waiting, &list[i]) || told++ >= MOST_TOLD)
            continue;
        if (told > 1)
            finding_append(found, ",");
        else if (waiting->sent)
            finding_append(found, "; it waits, or waited, in receives");
        else
            finding_append(found, "; what it has not received:");
        if (!waiting->sent && waiting->from < 0)
            finding_append(found, " from rank %d", list[i].from);
        if (list[i].tag < 0)
            finding_append(found, " with any tag (");
        else
            finding_append(found, " with tag %d (", list[i].tag);
        tell_elements(&list[i].entry->info, found);
        finding_append(found, ")");
    }
    if (told > MOST_TOLD)
        finding_append(found, " and %d more", told - MOST_TOLD);
}

static const flight *recorder_of(const flight_job *job, uint64_t key, int rank) {
    for (size_t i = 0; i < job->count; i++)
        if (rank >= 0 && own_rank(&job->flights[i], flight_group(&job->flights[i], key)) == rank)
            return &job->flights[i];
    return NULL;
}

static bool fits(const message *sent, const message *receive) {
    const tu_operation_info *one = &sent->entry->info, *other = &receive->entry->info;
    return one->dtype == other->dtype && one->count <= other->count;
}

/* Of one that failed because the ranks disagree: the other side's call for the same pair and tag, which it does not
 * fit.
 */
static const message *find_unlike(const message *waiting, const message *list, size_t count) {
    for (size_t i = 0; waiting->entry->status == TUTTI_ERROR_MISMATCH && i < count; i++)
        if (!list[i].paired && list[i].sent != waiting->sent && same_pair(waiting, &list[i]))
            return (waiting->sent ? fits(waiting, &list[i]) : fits(&list[i], waiting)) ? NULL : &list[i];
    return NULL;
}

/* What is known of a message that a receive waited for: only a recorder that is there, and goes back to its first
 * operation, can say that there was none. */
static void tell_what_was_sent(int rank, const flight *by, finding *found) {
    if (by == NULL)
        finding_append(found, ": whether rank %d has sent such a message is not known, its recorder is not here", rank);
    else if (flight_forgot(by))
        finding_append(found, ": rank %d has not sent such a message, as far back as its recorder goes", rank);
    else
        finding_append(found, ": rank %d has not sent such a message", rank);
}

/* Whether no message of the group can be missing from the recorders. */
static bool all_are_whole(const flight_job *job, uint64_t key) {
    bool whole[TU_RECORDER_MEMBERS];
    const tu_recorder_group_view *group = NULL;
    for (size_t i = 0; i < job->count && group == NULL; i++)
        group = flight_group(&job->flights[i], key);
    find_whole(job, key, whole);
    for (int rank = 0; group != NULL && rank < group->members; rank++)
        if (!whole[rank])
            return false;
    return group != NULL;
}

static void tell(const flight_job *job, const message *waiting, const message *list, size_t count, finding *found) {
    const tu_record_view *entry = waiting->entry;
    int other = waiting->sent ? waiting->to : waiting->from;
    char what[200], since[32], doing[400];
    flight_text(waiting->by, entry, what, sizeof what);
    flight_duration((entry->running ? waiting->by->now_ns : entry->ended_ns) - entry->created_ns, since, sizeof since);
    finding_append(found, "rank %d %s %s in %s", waiting->by->rank, entry->running ? "has been waiting" : "waited",
                   since, what);
    if (!entry->running)
        finding_append(found, ", which failed (%s)", tutti_status_name(entry->status));
    const message *unlike = find_unlike(waiting, list, count);
    if (unlike != NULL) {
        finding_append(found, ": rank %d %s ", other, waiting->sent ? "receives at most" : "sent");
        tell_elements(&unlike->entry->info, found);
        finding_append(found, ". A message must fit into its receive, and be of its type.");
        return;
    }
    const flight *copy = recorder_of(job, entry->info.group_key, other);
    if (waiting->sent)
        finding_append(found, ": rank %d has not received it", other);
    else if (other >= 0)
        tell_what_was_sent(other, copy, found);
    else
        finding_append(found, ": nobody has sent such a message%s",
                       all_are_whole(job, entry->info.group_key) ? "" : " of which a recorder knows that is here");
    tell_other_side(waiting, list, count, found);
    if (copy != NULL && copy != waiting->by) {
        flight_doing(copy, doing, sizeof doing);
        finding_append(found, "; rank %d (pid %d) %s", copy->rank, copy->pid, doing);
    }
    finding_append(found, ". A message is received by a receive of its source and tag.");
}

static bool has_other_side(const message *waiting, const message *list, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (concerns(waiting, &list[i]))
            return true;
    return false;
}

/* Whether a rank waits there, or waited until it failed. A receive without a deadline is where servers rest. */
static bool is_held_up(const message *made, const message *list, size_t count) {
    const tu_record_view *entry = made->entry;
    if (!entry->running)
        return entry->status != TUTTI_OK;
    bool rests = !made->sent && entry->info.timeout_ns == INT64_MAX;
    return finding_held_up(made->by, entry) && !(rests && !has_other_side(made, list, count));
}

/* The first that found no counterpart. */
static const message *first_held_up(const message *list, size_t count) {
    const message *first = NULL;
    for (size_t i = 0; i < count; i++) {
        const message *made = &list[i];
        if (!made->paired && (first == NULL || made->entry->created_ns < first->entry->created_ns) &&
            is_held_up(made, list, count))
            first = made;
    }
    return first;
}

static message *gather_and_pair(const flight_job *job, uint64_t key, size_t *count) {
    message *list = gather(job, key, count);
    if (list == NULL)
        return NULL;
    bool whole[TU_RECORDER_MEMBERS];
    find_whole(job, key, whole);
    qsort(list, *count, sizeof *list, in_order);
    pair_messages(list, *count, whole);
    return list;
}

bool finding_of_messages(const flight_job *job, uint64_t key, finding *found) {
    size_t count;
    message *list = gather_and_pair(job, key, &count);
    const message *waiting = list != NULL ? first_held_up(list, count) : NULL;
    found->text[0] = 0;
    if (waiting != NULL) {
        found->at_ns = waiting->entry->created_ns;
        tell(job, waiting, list, count, found);
    }
    free(list);
    return waiting != NULL;
}

int finding_of_unreceived(const flight_job *job, uint64_t key, finding *found) {
    size_t count;
    int told = 0;
    message *list = gather_and_pair(job, key, &count);
    found->text[0] = 0;
    for (size_t i = 0; list != NULL && i < count; i++) {
        if (list[i].paired || !list[i].sent || told++ >= MOST_TOLD)
            continue;
        finding_append(found, "%sfrom rank %d to rank %d with tag %d (", told > 1 ? ", " : "", list[i].from, list[i].to,
                       list[i].tag);
        tell_elements(&list[i].entry->info, found);
        finding_append(found, ")");
    }
    if (told > MOST_TOLD)
        finding_append(found, " and %d more", told - MOST_TOLD);
    free(list);
    return told;
}
