/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the ranks of a job went apart first: here in what all of them call, in messages.c in what one sends and another
 * receives.
 *
 * The operations of a group that all its members call are numbered alike on every rank. So under each number all
 * members must have the same call; one that differs is a mismatch, and one that is not there while others wait is late.
 * The earliest of all groups is the first divergence: what came later is often only its consequence.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "divergence.h"
#include "tool.h"
#include "world/world.h"

/* How long a rank may be late in a running job before that is a finding. */
#define LATE_NS TU_SECOND

/* One rank's call under some number. */
typedef struct call {
    const flight *by;
    const tu_record_view *entry;
} call;

/* Whether two ranks' entries under the same number belong to the same call. Counts may differ where the operation
 * allows it. */
static bool same_call(const tu_operation_info *one, const tu_operation_info *other) {
    if (one->operation != other->operation || one->dtype != other->dtype || one->reduction != other->reduction ||
        one->root != other->root)
        return false;
    return one->count == other->count || tu_operation_row_of(one->operation)->counts_differ;
}

void finding_append(finding *found, const char *format, ...) {
    size_t used = strlen(found->text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(found->text + used, sizeof found->text - used, format, arguments);
    va_end(arguments);
}

/* "ranks 0 and 2 called all_reduce 3 of group 0, rank 1 called barrier 3 of group 0" */
static void tell_mismatch(const call *calls, size_t count, finding *found) {
    int size = calls[0].by->size;
    bool told[count], same[size];
    memset(told, 0, sizeof told);
    for (size_t i = 0; i < count; i++) {
        char what[200], list[200];
        int ranks = 0;
        if (told[i])
            continue;
        memset(same, 0, sizeof same);
        for (size_t other = i; other < count; other++) {
            if (!same_call(&calls[i].entry->info, &calls[other].entry->info) || calls[other].by->rank >= size)
                continue;
            told[other] = same[calls[other].by->rank] = true;
            ranks++;
        }
        tool_rank_list(same, size, list, sizeof list);
        flight_text(calls[i].by, calls[i].entry, what, sizeof what);
        finding_append(found, "%srank%s %s called %s", found->text[0] != '\0' ? ", " : "", ranks == 1 ? "" : "s", list,
                       what);
    }
    finding_append(
        found, ". All ranks of a group must make the same calls in the same order: one of them skipped a call, made "
               "one too many, or gave another size, type or root.");
}

static void tell_late(const flight_job *job, const call *waiting, const bool *missing, int count, finding *found) {
    char what[200], list[200], since[32];
    const flight *by = waiting->by;
    const tu_record_view *entry = waiting->entry;
    flight_text(by, entry, what, sizeof what);
    flight_duration((entry->running ? by->now_ns : entry->ended_ns) - entry->created_ns, since, sizeof since);
    tool_rank_list(missing, by->size, list, sizeof list);
    finding_append(found, "rank%s %s did not come to %s, for which rank %d %s %s:", count == 1 ? "" : "s", list, what,
                   by->rank, entry->running ? "has been waiting" : "waited", since);
    for (size_t i = 0; i < job->count; i++) {
        const flight *copy = &job->flights[i];
        if (copy->rank >= by->size || !missing[copy->rank])
            continue;
        char doing[400];
        flight_doing(copy, doing, sizeof doing);
        finding_append(found, " rank %d (pid %d) %s;", copy->rank, copy->pid, doing);
    }
    found->text[strlen(found->text) - 1] = '.';
}

bool finding_held_up(const flight *by, const tu_record_view *entry) {
    if (entry->running)
        return by->now_ns - entry->created_ns >= LATE_NS;
    return entry->status == TUTTI_ERROR_TIMEOUT || entry->status == TUTTI_ERROR_DEAD ||
           entry->status == TUTTI_ERROR_GONE;
}

/* Looks at the calls under one number of one group. */
static bool examine(const flight_job *job, const call *calls, size_t count, finding *found) {
    const call *waiting = NULL;
    bool mismatch = false;
    found->at_ns = INT64_MAX;
    found->text[0] = '\0';
    for (size_t i = 0; i < count; i++) {
        mismatch |= !same_call(&calls[0].entry->info, &calls[i].entry->info);
        if (calls[i].entry->created_ns < found->at_ns)
            found->at_ns = calls[i].entry->created_ns;
        if (finding_held_up(calls[i].by, calls[i].entry) &&
            (waiting == NULL || calls[i].entry->created_ns < waiting->entry->created_ns))
            waiting = &calls[i];
    }
    if (mismatch) {
        tell_mismatch(calls, count, found);
        return true;
    }
    if (waiting == NULL)
        return false;
    bool missing[waiting->by->size];
    int absent = flight_missing(job, waiting->entry, missing, waiting->by->size);
    if (absent > 0)
        tell_late(job, waiting, missing, absent, found);
    return absent > 0;
}

static int by_number(const void *one, const void *other) {
    uint64_t left = ((const call *)one)->entry->info.sequence, right = ((const call *)other)->entry->info.sequence;
    return left < right ? -1 : left > right;
}

static bool counts(const tu_record_view *entry, uint64_t key) {
    return entry->info.group_key == key && tu_operation_sequenced((tu_operation)entry->info.operation);
}

/* All calls of the group, by number, from the first number on that no recorder has forgotten. */
static call *gather(const flight_job *job, uint64_t key, size_t *count) {
    size_t room = 0;
    uint64_t from = 0;
    for (size_t i = 0; i < job->count; i++)
        room += job->flights[i].entry_count;
    call *calls = malloc((room + 1) * sizeof *calls);
    *count = 0;
    for (size_t i = 0; calls != NULL && i < job->count; i++) {
        const flight *copy = &job->flights[i];
        bool forgot = flight_forgot(copy), first = true;
        for (size_t at = 0; at < copy->entry_count; at++) {
            const tu_record_view *entry = &copy->entries[at];
            if (!counts(entry, key))
                continue;
            if (forgot && first && !entry->running && entry->info.sequence > from)
                from = entry->info.sequence;
            first = first && entry->running; /* one that still runs may be older than the ring */
            calls[(*count)++] = (call){ copy, entry };
        }
    }
    if (calls == NULL)
        return NULL;
    size_t kept = 0;
    for (size_t i = 0; i < *count; i++)
        if (calls[i].entry->info.sequence >= from)
            calls[kept++] = calls[i];
    *count = kept;
    qsort(calls, kept, sizeof *calls, by_number);
    return calls;
}

static bool examine_group(const flight_job *job, uint64_t key, finding *found) {
    size_t count, begin = 0;
    bool apart = false;
    call *calls = gather(job, key, &count);
    while (calls != NULL && begin < count && !apart) {
        size_t end = begin + 1;
        while (end < count && calls[end].entry->info.sequence == calls[begin].entry->info.sequence)
            end++;
        apart = examine(job, calls + begin, end - begin, found);
        begin = end;
    }
    free(calls);
    return apart;
}

void finding_each_group(const flight_job *job,
                        void (*each)(const flight_job *job, const flight *by, uint64_t key, void *argument),
                        void *argument) {
    for (size_t i = 0; i < job->count; i++) {
        for (size_t group = 0; group < job->flights[i].group_count; group++) {
            uint64_t key = job->flights[i].groups[group].key;
            bool seen = false; /* by an earlier rank's list */
            for (size_t before = 0; before < i && !seen; before++)
                seen = flight_group(&job->flights[before], key) != NULL;
            if (!seen)
                each(job, &job->flights[i], key, argument);
        }
    }
}

/* The first of all that were found so far. */
typedef struct search {
    finding best, candidate;
    bool any;
} search;

static void search_group(const flight_job *job, const flight *by, uint64_t key, void *argument) {
    search *this = argument;
    (void)by;
    for (int messages = 0; messages < 2; messages++) {
        if (!(messages ? finding_of_messages : examine_group)(job, key, &this->candidate))
            continue;
        if (!this->any || this->candidate.at_ns < this->best.at_ns)
            this->best = this->candidate;
        this->any = true;
    }
}

bool flight_divergence(const flight_job *job, char *text, size_t bytes) {
    search *this = calloc(1, sizeof *this);
    if (this == NULL)
        return false;
    finding_each_group(job, search_group, this);
    bool any = this->any;
    if (any)
        snprintf(text, bytes, "%s", this->best.text);
    free(this);
    return any;
}
