/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes the trace. Its format is the one of Chrome's trace viewer: "X" is an operation with its length, "M" names a
 * process or a track, "s" and "f" are the two ends of an arrow.
 *
 * A viewer draws what overlaps on one track as if it were nested, so every thread of a rank has as many tracks as it
 * had operations at a time. Ranks of one host share a clock. Between hosts that were asked (flight_hosts.c) the
 * difference of the clocks was measured; between files the time of day has to do.
 */
#include "timeline.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <tutti/collective.h>

#include "job/dump.h"
#include "tool.h"

/* One operation with its place in the trace. */
typedef struct slice {
    const tu_record_view *entry;
    int64_t begin_ns, end_ns; /* since the first of all */
    int track;
} slice;

/* One rank: a process of the trace. */
typedef struct lane {
    const flight *from;
    int process; /* number in the trace: ranks of several jobs have the same ranks */
    slice *slices;
    size_t count;
    uint32_t *threads; /* of each track */
    int64_t *busy_ns;  /* until when each track is taken */
    int tracks;
    bool forgot; /* its ring is full: what came before is gone */
} lane;

typedef struct timeline {
    FILE *file;
    lane *lanes;
    size_t count;
    bool first; /* nothing is written yet */
    int arrows;
} timeline;

/* ---- placing ---- */

/* What to add to a rank's clock. One host has one clock, which every file compares with the time of day anew: the
 * first of the host decides for all. */
static int64_t to_wall(const timeline *all, const flight *from) {
    for (size_t i = 0; i < all->count; i++)
        if (strcmp(all->lanes[i].from->host, from->host) == 0)
            return all->lanes[i].from->wall_minus_clock_ns;
    return from->wall_minus_clock_ns;
}

static int by_begin(const void *one, const void *other) {
    const slice *left = one, *right = other;
    if (left->begin_ns != right->begin_ns)
        return left->begin_ns < right->begin_ns ? -1 : 1;
    return left->entry->id < right->entry->id ? -1 : left->entry->id > right->entry->id;
}

/* The first track of the thread that is free by then, else a new one. */
static int take_track(lane *lane, const slice *slice) {
    int track = 0;
    while (track < lane->tracks &&
           (lane->threads[track] != slice->entry->thread || lane->busy_ns[track] > slice->begin_ns))
        track++;
    if (track == lane->tracks)
        lane->threads[lane->tracks++] = slice->entry->thread;
    lane->busy_ns[track] = slice->end_ns;
    return track;
}

/* At most as many tracks as operations. */
static bool place(lane *lane, const flight *from, int process, int64_t offset) {
    size_t room = from->entry_count + 1;
    *lane = (struct lane){ .from = from, .process = process, .count = from->entry_count };
    lane->slices = calloc(room, sizeof *lane->slices);
    lane->threads = calloc(room, sizeof *lane->threads);
    lane->busy_ns = calloc(room, sizeof *lane->busy_ns);
    if (lane->slices == NULL || lane->threads == NULL || lane->busy_ns == NULL)
        return false;
    lane->forgot = flight_forgot(from);
    for (size_t i = 0; i < lane->count; i++) {
        const tu_record_view *entry = &from->entries[i];
        int64_t end = entry->running ? from->now_ns : entry->ended_ns;
        lane->slices[i] = (slice){ .entry = entry, .begin_ns = entry->created_ns + offset };
        lane->slices[i].end_ns = end > entry->created_ns ? end + offset : lane->slices[i].begin_ns;
    }
    qsort(lane->slices, lane->count, sizeof *lane->slices, by_begin);
    for (size_t i = 0; i < lane->count; i++)
        lane->slices[i].track = take_track(lane, &lane->slices[i]);
    return true;
}

/* The first operation of all is at 0. */
static void count_from_the_first(timeline *all) {
    int64_t first = INT64_MAX;
    for (size_t i = 0; i < all->count; i++)
        if (all->lanes[i].count > 0 && all->lanes[i].slices[0].begin_ns < first)
            first = all->lanes[i].slices[0].begin_ns;
    for (size_t i = 0; i < all->count; i++) {
        for (size_t s = 0; s < all->lanes[i].count; s++) {
            all->lanes[i].slices[s].begin_ns -= first;
            all->lanes[i].slices[s].end_ns -= first;
        }
    }
}

/* ---- writing ---- */

static void next(timeline *all) {
    fputs(all->first ? "\n" : ",\n", all->file);
    all->first = false;
}

/* Microseconds, to the nanosecond. */
static void put_time(FILE *file, const char *name, int64_t ns) {
    fprintf(file, ", \"%s\": %" PRId64 ".%03d", name, ns / 1000, (int)(ns % 1000));
}

static void write_slice(timeline *all, const lane *lane, const slice *slice) {
    const tu_record_view *entry = slice->entry;
    const tu_operation_info *info = &entry->info;
    char text[200];
    next(all);
    fprintf(all->file, "{\"name\": \"%s\", \"cat\": \"%s\", \"ph\": \"X\", \"pid\": %d, \"tid\": %d",
            tu_operation_name((tu_operation)info->operation),
            entry->running              ? "running"
            : entry->status == TUTTI_OK ? "completed"
                                        : "failed",
            lane->process, slice->track);
    put_time(all->file, "ts", slice->begin_ns);
    put_time(all->file, "dur", slice->end_ns - slice->begin_ns);
    fputs(", \"args\": {\"call\": ", all->file);
    flight_text(lane->from, entry, text, sizeof text);
    tu_json_string(all->file, text);
    fputs(", \"group\": ", all->file);
    tu_json_string(all->file, flight_group_name(lane->from, info->group_key));
    fprintf(all->file, ", \"sequence\": %" PRIu64 ", \"count\": %" PRIu64, info->sequence, info->count);
    uint64_t element = info->dtype != 0 ? tutti_dtype_size((tutti_dtype)info->dtype) : 1;
    fprintf(all->file, ", \"bytes\": %" PRIu64, info->count * element);
    if (info->algorithm != 0)
        fprintf(all->file, ", \"algorithm\": \"%s\"", tutti_algorithm_name((tutti_algorithm)info->algorithm));
    if (entry->waiting_for >= 0)
        fprintf(all->file, ", \"waiting for rank\": %d", entry->waiting_for);
    fprintf(all->file, ", \"status\": \"%s\"}}", entry->running ? "running" : tutti_status_name(entry->status));
}

static void write_lane(timeline *all, const lane *lane) {
    char text[200];
    next(all);
    fprintf(all->file, "{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"name\": ", lane->process);
    snprintf(text, sizeof text, "rank %d (pid %d on %s)", lane->from->rank, lane->from->pid, lane->from->host);
    tu_json_string(all->file, text);
    fputs("}}", all->file);
    next(all);
    fprintf(all->file, "{\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"sort_index\": %d}}",
            lane->process, lane->process);
    for (int track = 0; track < lane->tracks; track++) {
        int earlier = 0;
        for (int other = 0; other < track; other++)
            earlier += lane->threads[other] == lane->threads[track];
        snprintf(text, sizeof text, earlier == 0 ? "thread %u" : "thread %u, %d more at a time", lane->threads[track],
                 earlier);
        next(all);
        fprintf(all->file,
                "{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"args\": {\"name\": \"%s\"}}",
                lane->process, track, text);
        next(all);
        fprintf(all->file,
                "{\"name\": \"thread_sort_index\", \"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"args\": {\"sort_index\": "
                "%d}}",
                lane->process, track, track);
    }
    for (size_t i = 0; i < lane->count; i++)
        write_slice(all, lane, &lane->slices[i]);
}

/* ---- arrows from sends to receives ---- */

/* The peer of a send or receive as a rank of the world; -1 when it is not known. */
static int peer_of(const lane *lane, const tu_operation_info *info) {
    const tu_recorder_group_view *group = flight_group(lane->from, info->group_key);
    return group != NULL && info->root >= 0 && info->root < group->members ? group->world_ranks[info->root] : -1;
}

/* Whether the slice is a message that went through between the two ranks, with this group and tag. */
static bool is_message(const lane *lane, const slice *slice, bool sent, int peer, const tu_operation_info *like) {
    const tu_operation_info *info = &slice->entry->info;
    const tu_operation_row *row = tu_operation_row_of(info->operation);
    return row->kind == TU_KIND_MESSAGE && tu_sends(row) == sent && !slice->entry->running &&
           slice->entry->status == TUTTI_OK && info->group_key == like->group_key && info->tag == like->tag &&
           peer_of(lane, info) == peer;
}

static void write_end(timeline *all, const lane *lane, const slice *slice, char which, int64_t at) {
    next(all);
    fprintf(all->file,
            "{\"name\": \"message\", \"cat\": \"message\", \"ph\": \"%c\"%s, \"id\": %d, \"pid\": %d, \"tid\": %d",
            which, which == 'f' ? ", \"bp\": \"e\"" : "", all->arrows, lane->process, slice->track);
    put_time(all->file, "ts", at);
    fputc('}', all->file);
}

/* Messages of one tag between two ranks overtake nobody: the first send belongs to the first receive. Where a ring has
 * forgotten its beginning, they are paired from the newest on, and only where the send was not after the receive. */
static void pair_messages(timeline *all, const lane *from, const lane *to, const tu_operation_info *like) {
    bool backwards = from->forgot || to->forgot;
    size_t receive = 0;
    for (size_t i = 0; i < from->count; i++) {
        const slice *sent = &from->slices[backwards ? from->count - 1 - i : i], *got = NULL;
        if (!is_message(from, sent, true, to->from->rank, like))
            continue;
        for (; receive < to->count && got == NULL; receive++) {
            const slice *candidate = &to->slices[backwards ? to->count - 1 - receive : receive];
            if (is_message(to, candidate, false, from->from->rank, like))
                got = candidate;
        }
        if (got == NULL)
            return;
        if (got->end_ns < sent->begin_ns) {
            receive -= backwards; /* that send's message was not received yet */
            continue;
        }
        all->arrows++;
        write_end(all, from, sent, 's', sent->begin_ns);
        write_end(all, to, got, 'f', got->end_ns > got->begin_ns ? got->end_ns - 1 : got->end_ns);
    }
}

/* Every channel once: at the first send of its group, peer and tag. */
static void write_arrows(timeline *all, const lane *from, const lane *peers, size_t count) {
    for (size_t i = 0; i < from->count; i++) {
        const tu_operation_info *info = &from->slices[i].entry->info;
        int peer = tu_sends(tu_operation_row_of(info->operation)) ? peer_of(from, info) : -1;
        bool seen = peer < 0;
        for (size_t before = 0; before < i && !seen; before++)
            seen = is_message(from, &from->slices[before], true, peer, info);
        for (size_t other = 0; other < count && !seen; other++)
            if (peers[other].from->rank == peer)
                pair_messages(all, from, &peers[other], info);
    }
}

/* ---- all ---- */

static size_t count_lanes(const flight_list *list) {
    size_t count = 0;
    for (size_t i = 0; i < list->count; i++)
        count += list->jobs[i].count;
    return count;
}

static void free_lanes(timeline *all) {
    for (size_t i = 0; i < all->count; i++) {
        free(all->lanes[i].slices);
        free(all->lanes[i].threads);
        free(all->lanes[i].busy_ns);
    }
    free(all->lanes);
}

int timeline_write(const flight_list *list, FILE *file) {
    timeline all = { .file = file, .first = true };
    all.lanes = calloc(count_lanes(list) + 1, sizeof *all.lanes);
    bool placed = all.lanes != NULL;
    for (size_t i = 0; i < list->count && placed; i++) {
        for (size_t rank = 0; rank < list->jobs[i].count && placed; rank++) {
            const flight *from = &list->jobs[i].flights[rank];
            int64_t offset = to_wall(&all, from);
            placed = place(&all.lanes[all.count], from, (int)all.count, offset);
            all.count++;
        }
    }
    if (!placed) {
        free_lanes(&all);
        return tool_fail("out of memory for the trace");
    }
    count_from_the_first(&all);
    fputs("{\"displayTimeUnit\": \"ns\", \"traceEvents\": [", file);
    size_t begin = 0;
    for (size_t i = 0; i < list->count; i++) {
        for (size_t rank = 0; rank < list->jobs[i].count; rank++)
            write_lane(&all, &all.lanes[begin + rank]);
        for (size_t rank = 0; rank < list->jobs[i].count; rank++)
            write_arrows(&all, &all.lanes[begin + rank], &all.lanes[begin], list->jobs[i].count);
        begin += list->jobs[i].count;
    }
    fputs("\n]}\n", file);
    free_lanes(&all);
    return 0;
}
