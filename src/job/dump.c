/* SPDX-License-Identifier: Apache-2.0
 *
 * Writing a flight recorder as JSON. Entries that change while they are read are left out, as everywhere.
 */
#include "job/dump.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "job/recorder.h"

void tu_json_string(FILE *file, const char *text) {
    fputc('"', file);
    for (const unsigned char *at = (const unsigned char *)text; *at != '\0'; at++) {
        if (*at == '"' || *at == '\\')
            fprintf(file, "\\%c", *at);
        else if (*at < 0x20)
            fprintf(file, "\\u%04x", *at);
        else
            fputc(*at, file);
    }
    fputc('"', file);
}

static const char *state_name(uint32_t state) {
    switch (state) {
    case TU_RANK_JOINING:
        return "joining";
    case TU_RANK_ALIVE:
        return "alive";
    case TU_RANK_CLOSED:
        return "closed";
    case TU_RANK_DEAD:
        return "dead";
    default:
        return "not there yet";
    }
}

static void write_identity(const tu_page *page, int rank, const tu_dump_clock *compared, FILE *file) {
    const tu_slot *slot = tu_page_slot(page, rank);
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    int64_t clock = tu_clock_now();
    fprintf(file, "{\"tutti_flight_recorder\": %d,\n \"job\": ", TU_DUMP_VERSION);
    char id[TU_ID_BYTES], name[TU_NAME_BYTES];
    tu_page_id(page, id);
    snprintf(name, sizeof name, "%.*s", TU_NAME_BYTES - 1, page->name);
    tu_json_string(file, id);
    fputs(", \"world\": ", file);
    tu_json_string(file, name);
    fprintf(file, ", \"rank\": %d, \"size\": %d, \"pid\": %d, \"host\": ", slot->world_rank, page->world_size,
            slot->pid);
    tu_json_string(file, host);
    fprintf(file, ",\n \"state\": \"%s\", ", state_name(atomic_load_explicit(&slot->state, memory_order_acquire)));
    uint64_t wait_status = atomic_load_explicit(&slot->wait_status, memory_order_acquire);
    if (wait_status & TU_SLOT_PUBLISHED)
        fprintf(file, "\"wait_status\": %u, ", (unsigned)(uint32_t)wait_status);
    fprintf(file, "\"opened_ns\": %" PRId64 ", \"written_ns\": %" PRId64 ", \"wall_minus_clock_ns\": %" PRId64 ",\n",
            slot->opened_ns, clock, tu_clock_wall() - clock);
    if (compared != NULL)
        fprintf(file, " \"clock_ahead_ns\": %" PRId64 ", \"clock_error_ns\": %" PRId64 ",\n", compared->ahead_ns,
                compared->error_ns);
}

static void write_groups(const tu_recorder_group_view *groups, size_t count, FILE *file) {
    fputs(" \"groups\": [", file);
    for (size_t i = 0; i < count; i++) {
        fprintf(file, "%s\n  {\"key\": \"%016" PRIx64 "\", \"name\": ", i > 0 ? "," : "", groups[i].key);
        tu_json_string(file, groups[i].name);
        fprintf(file, ", \"size\": %d, \"ranks\": [", groups[i].size);
        for (int m = 0; m < groups[i].members; m++)
            fprintf(file, "%s%d", m > 0 ? ", " : "", groups[i].world_ranks[m]);
        fputs("]}", file);
    }
    fputs("],\n", file);
}

static void write_entry(const tu_record_view *view, FILE *file) {
    const tu_operation_info *info = &view->info;
    fprintf(file, "{\"id\": %" PRIu64 ", \"group\": \"%016" PRIx64 "\", \"operation\": \"%s\", \"sequence\": %" PRIu64,
            view->id, info->group_key, tu_operation_name((tu_operation)info->operation), info->sequence);
    fprintf(file, ", \"count\": %" PRIu64, info->count);
    if (info->dtype != 0)
        fprintf(file, ", \"dtype\": \"%s\"", tutti_dtype_name((tutti_dtype)info->dtype));
    if (info->reduction != 0)
        fprintf(file, ", \"reduction\": \"%s\"", tutti_reduction_name((tutti_reduction)info->reduction));
    fprintf(file, ", \"root\": %d, \"tag\": %d, \"algorithm\": %d, \"timeout_ns\": %" PRId64 ", \"thread\": %u",
            info->root, info->tag, info->algorithm, info->timeout_ns, view->thread);
    fprintf(file, ", \"created_ns\": %" PRId64 ", \"ended_ns\": %" PRId64 ", \"state\": \"%s\"", view->created_ns,
            view->ended_ns,
            view->running              ? "running"
            : view->status == TUTTI_OK ? "completed"
                                       : "failed");
    if (!view->running && view->status != TUTTI_OK)
        fprintf(file, ", \"status\": %d, \"status_name\": \"%s\"", (int)view->status, tutti_status_name(view->status));
    if (view->waiting_for >= 0)
        fprintf(file, ", \"waiting_for\": %d", view->waiting_for);
    fputc('}', file);
}

static void write_counters(const tu_recorder *recorder, FILE *file) {
    bool first = true;
    fputs(" \"counters\": [", file);
    for (int i = 1; i < TU_OPERATION_COUNT; i++) {
        tu_counters counters;
        tu_recorder_counters(recorder, (tu_operation)i, &counters);
        if (counters.calls == 0)
            continue;
        fprintf(file,
                "%s\n  {\"operation\": \"%s\", \"calls\": %" PRIu64 ", \"failures\": %" PRIu64 ", \"bytes\": %" PRIu64
                ", \"time_ns\": %" PRId64 ", \"by_algorithm\": [",
                first ? "" : ",", tu_operation_name((tu_operation)i), counters.calls, counters.failures, counters.bytes,
                counters.time_ns);
        for (int a = 0; a < TU_COUNTER_ALGORITHMS; a++)
            fprintf(file, "%s%" PRIu64, a > 0 ? ", " : "", counters.by_algorithm[a]);
        fputs("]}", file);
        first = false;
    }
    fputs("]}\n", file);
}

tutti_status tu_dump_write(const tu_page *page, int rank, const tu_recorder *recorder, const tu_dump_clock *clock,
                           FILE *file) {
    size_t room = tu_recorder_entries(recorder);
    tu_record_view *views = malloc((room + 1) * sizeof *views);
    tu_recorder_group_view *groups = malloc(TU_RECORDER_GROUPS * sizeof *groups);
    tutti_status status = TUTTI_OK;
    if (views == NULL || groups == NULL) {
        status = tu_error_memory("a copy of a flight recorder", room * sizeof *views);
        goto free_copies;
    }
    write_identity(page, rank, clock, file);
    write_groups(groups, tu_recorder_groups(recorder, groups), file);
    size_t count = tu_recorder_snapshot(recorder, views, room);
    fputs(" \"entries\": [", file);
    for (size_t i = 0; i < count; i++) {
        fputs(i > 0 ? ",\n  " : "\n  ", file);
        write_entry(&views[i], file);
    }
    fputs("],\n", file);
    write_counters(recorder, file);
free_copies:
    free(groups);
    free(views);
    return status;
}

tutti_status tu_dump_file(const tu_page *page, int rank, const tu_recorder *recorder, const tu_dump_clock *clock,
                          const char *folder) {
    char path[4096], temporary[4096 + 16], id[TU_ID_BYTES];
    tu_page_id(page, id);
    int world_rank = tu_page_slot(page, rank)->world_rank;
    snprintf(path, sizeof path, "%s/tutti-%s-rank-%d.json", folder, id, world_rank);
    snprintf(temporary, sizeof temporary, "%s.%d", path, (int)gettid()); /* threads may write at once */
    FILE *file = fopen(temporary, "we");
    if (file == NULL)
        return tu_error_system(errno, "cannot write the flight recorder of rank %d to %s", world_rank, temporary);
    tutti_status status = tu_dump_write(page, rank, recorder, clock, file);
    errno = 0;
    int failed = ferror(file);
    failed |= fclose(file);
    if (status == TUTTI_OK && (failed || rename(temporary, path) != 0))
        status = tu_error_system(errno, "cannot write the flight recorder of rank %d to %s", world_rank, path);
    if (status != TUTTI_OK)
        unlink(temporary);
    return status;
}
