/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies of flight recorders, and what follows from them.
 */
#include "flight.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "job/dump.h"
#include "json.h"
#include "tool.h"
#include "world/world.h"

#define MOST_RANKS 65536 /* ranks are 16 bits wide in a recorder */

/* Somebody who has ended is dead, even when none of its peers has looked. */
static void correct_state(flight *copy) {
    if (copy->status_known && (copy->state == TU_RANK_ALIVE || copy->state == TU_RANK_JOINING))
        copy->state = TU_RANK_DEAD;
}

/* ---- lists ---- */

static flight *add_flight(flight_list *list, const char *job_id) {
    flight_job *job = NULL;
    for (size_t i = 0; i < list->count; i++)
        if (strcmp(list->jobs[i].flights[0].job, job_id) == 0)
            job = &list->jobs[i];
    if (job == NULL) {
        flight_job *jobs = realloc(list->jobs, (list->count + 1) * sizeof *jobs);
        if (jobs == NULL)
            return NULL;
        list->jobs = jobs;
        job = &jobs[list->count];
        *job = (flight_job){ 0 };
    }
    flight *flights = realloc(job->flights, (job->count + 1) * sizeof *flights);
    if (flights == NULL)
        return NULL;
    job->flights = flights;
    list->count += job->count == 0;
    flight *copy = &flights[job->count++];
    memset(copy, 0, sizeof *copy);
    snprintf(copy->job, sizeof copy->job, "%s", job_id);
    return copy;
}

static int by_rank(const void *one, const void *other) {
    return ((const flight *)one)->rank - ((const flight *)other)->rank;
}

static void sort(flight_list *list) {
    for (size_t i = 0; i < list->count; i++)
        qsort(list->jobs[i].flights, list->jobs[i].count, sizeof(flight), by_rank);
}

void flight_free(flight_list *list) {
    for (size_t i = 0; i < list->count; i++) {
        for (size_t rank = 0; rank < list->jobs[i].count; rank++) {
            free(list->jobs[i].flights[rank].entries);
            free(list->jobs[i].flights[rank].groups);
        }
        free(list->jobs[i].flights);
    }
    free(list->jobs);
    *list = (flight_list){ 0 };
}

/* ---- from running jobs ---- */

static void look_at_process(flight *copy, const tu_slot *slot) {
    const tu_record_view *current = flight_current(copy);
    tu_process_view process;
    if (!tu_process_look(copy->pid, &process) || process.start_time != slot->start_time) {
        /* Gone without a word, and nobody has looked yet. */
        if (copy->state == TU_RANK_ALIVE || copy->state == TU_RANK_JOINING)
            copy->state = TU_RANK_DEAD;
        return;
    }
    copy->process = process;
    copy->has_process = true;
    int thread = current != NULL ? (int)current->thread : slot->tid; /* also a path in /proc */
    if (thread != copy->pid && tu_process_look(thread, &process))
        copy->process = process;
}

static int copy_live(flight *copy, const tu_job_view *job, int job_rank) {
    const tu_page *page = job->page;
    const tu_slot *slot = tu_page_slot(page, job_rank);
    tu_recorder found = tu_page_recorder(page, job->bytes, job->size, job_rank), *recorder = &found;
    snprintf(copy->world, sizeof copy->world, "%.*s", TU_NAME_BYTES - 1, page->name);
    gethostname(copy->host, sizeof copy->host - 1);
    copy->size = page->world_size;
    copy->rank = slot->world_rank >= 0 && slot->world_rank < copy->size ? slot->world_rank : job_rank;
    copy->live = true;
    copy->state = atomic_load_explicit(&slot->state, memory_order_acquire);
    copy->pid = copy->state == TU_SLOT_EMPTY ? 0 : slot->pid;
    uint64_t wait_status = atomic_load_explicit(&slot->wait_status, memory_order_acquire);
    copy->status_known = (wait_status & TU_SLOT_PUBLISHED) != 0;
    copy->wait_status = (int)(uint32_t)wait_status;
    size_t room = tu_recorder_entries(recorder);
    copy->entries = malloc((room + 1) * sizeof *copy->entries);
    copy->groups = malloc(TU_RECORDER_GROUPS * sizeof *copy->groups);
    if (copy->entries == NULL || copy->groups == NULL)
        return tool_fail("out of memory for the flight recorder of rank %d", copy->rank);
    copy->entry_count = tu_recorder_snapshot(recorder, copy->entries, room);
    copy->group_count = tu_recorder_groups(recorder, copy->groups);
    for (int i = 1; i < TU_OPERATION_COUNT; i++)
        tu_recorder_counters(recorder, (tu_operation)i, &copy->counters[i]);
    copy->now_ns = tu_clock_now();
    copy->wall_minus_clock_ns = tu_clock_wall() - copy->now_ns;
    copy->opened_ns = slot->opened_ns;
    if (copy->pid > 0)
        look_at_process(copy, slot);
    correct_state(copy);
    return 0;
}

static bool is_wanted(const tu_job_view *job, const char *prefix) {
    char id[TU_ID_BYTES];
    tu_page_id(job->page, id);
    return strncmp(id, prefix, strlen(prefix)) == 0 && job->page->world_size >= job->size &&
           job->page->world_size <= MOST_RANKS;
}

int flight_add_live(flight_list *list, const char *prefix) {
    tu_job_list jobs = { 0 };
    int failed = 0;
    if (tu_inspect_user(&jobs) != TUTTI_OK) {
        tu_inspect_free(&jobs);
        return tool_fail("%s", tutti_error_message());
    }
    for (size_t i = 0; i < jobs.count && !failed; i++) {
        const tu_page *page = jobs.jobs[i].page;
        char id[TU_ID_BYTES];
        tu_page_id(page, id);
        if (!is_wanted(&jobs.jobs[i], prefix))
            continue;
        for (int rank = 0; rank < jobs.jobs[i].size && !failed; rank++) {
            flight *copy = add_flight(list, id);
            failed =
                copy == NULL ? tool_fail("out of memory for the list of ranks") : copy_live(copy, &jobs.jobs[i], rank);
        }
    }
    if (jobs.count == 0 && jobs.skipped[0] != '\0')
        fprintf(stderr, "tutti: left out: %s\n", jobs.skipped);
    tu_inspect_free(&jobs);
    sort(list);
    return failed;
}

/* Through a buffer, so that its length can be said first. */
static int write_one(FILE *file, const tu_job_view *job, int job_rank) {
    flight copy = { 0 };
    char *text = NULL;
    size_t bytes = 0;
    tu_recorder recorder = tu_page_recorder(job->page, job->bytes, job->size, job_rank);
    FILE *buffer = open_memstream(&text, &bytes);
    if (buffer == NULL)
        return tool_fail("out of memory for a flight recorder");
    int failed = copy_live(&copy, job, job_rank);
    if (!failed && tu_dump_write(job->page, job_rank, &recorder, NULL, buffer) != TUTTI_OK)
        failed = tool_fail("%s", tutti_error_message());
    fclose(buffer);
    if (!failed) {
        fprintf(file, "flight %c %d %zu\n", copy.has_process ? copy.process.state : '-', copy.process.cpu, bytes);
        fwrite(text, 1, bytes, file);
    }
    free(copy.entries);
    free(copy.groups);
    free(text);
    return failed;
}

int flight_write_live(FILE *file, const char *prefix) {
    tu_job_list jobs = { 0 };
    int failed = 0;
    if (tu_inspect_user(&jobs) != TUTTI_OK)
        failed = tool_fail("%s", tutti_error_message());
    for (size_t i = 0; i < jobs.count && !failed; i++)
        for (int rank = 0; rank < jobs.jobs[i].size && is_wanted(&jobs.jobs[i], prefix) && !failed; rank++)
            failed = write_one(file, &jobs.jobs[i], rank);
    tu_inspect_free(&jobs);
    return failed;
}

/* ---- from files ---- */

static size_t count_members(const json *array) {
    size_t count = 0;
    for (const json *member = array != NULL ? array->first : NULL; member != NULL; member = member->next)
        count++;
    return count;
}

static uint32_t state_of(const char *name) {
    static const struct {
        const char *name;
        uint32_t state;
    } states[] = { { "joining", TU_RANK_JOINING },
                   { "alive", TU_RANK_ALIVE },
                   { "closed", TU_RANK_CLOSED },
                   { "dead", TU_RANK_DEAD } };
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++)
        if (strcmp(states[i].name, name) == 0)
            return states[i].state;
    return TU_SLOT_EMPTY;
}

/* A time from a file, kept within what can be added and subtracted. */
static int64_t read_time(const json *from, const char *name, int64_t most) {
    int64_t value = json_number(from, name, 0);
    return value > most ? most : value < -most ? -most : value;
}

#define MOST_CLOCK (INT64_C(1) << 60) /* 36 years since boot */
#define MOST_WALL (INT64_C(1) << 61)

static void read_entry(const json *from, tu_record_view *view) {
    tu_operation_info *info = &view->info;
    tutti_dtype dtype = 0;
    tutti_reduction reduction = 0;
    memset(view, 0, sizeof *view);
    view->id = (uint64_t)json_number(from, "id", 0);
    info->group_key = strtoull(json_text(from, "group"), NULL, 16);
    info->operation = (uint8_t)tu_operation_find(json_text(from, "operation"));
    info->sequence = (uint64_t)json_number(from, "sequence", 0);
    info->count = (uint64_t)json_number(from, "count", 0);
    if (json_member(from, "dtype") != NULL && tutti_dtype_parse(json_text(from, "dtype"), &dtype) == TUTTI_OK)
        info->dtype = (uint8_t)dtype;
    if (json_member(from, "reduction") != NULL &&
        tutti_reduction_parse(json_text(from, "reduction"), &reduction) == TUTTI_OK)
        info->reduction = (uint8_t)reduction;
    info->root = (int32_t)json_number(from, "root", -1);
    info->tag = (int32_t)json_number(from, "tag", 0);
    info->algorithm = (uint8_t)json_number(from, "algorithm", 0);
    info->timeout_ns = json_number(from, "timeout_ns", 0);
    view->thread = (uint32_t)json_number(from, "thread", 0);
    view->created_ns = read_time(from, "created_ns", MOST_CLOCK);
    view->ended_ns = read_time(from, "ended_ns", MOST_CLOCK);
    view->running = strcmp(json_text(from, "state"), "running") == 0;
    view->status = (tutti_status)json_number(from, "status", 0);
    view->waiting_for = (int)json_number(from, "waiting_for", -1);
}

static void read_counters(const json *from, flight *copy) {
    const json *list = json_member(from, "counters");
    for (const json *one = list != NULL ? list->first : NULL; one != NULL; one = one->next) {
        tu_counters *counters = &copy->counters[tu_operation_find(json_text(one, "operation"))];
        counters->calls = (uint64_t)json_number(one, "calls", 0);
        counters->failures = (uint64_t)json_number(one, "failures", 0);
        counters->bytes = (uint64_t)json_number(one, "bytes", 0);
        counters->time_ns = json_number(one, "time_ns", 0);
        const json *algorithms = json_member(one, "by_algorithm");
        const json *calls = algorithms != NULL ? algorithms->first : NULL;
        for (int i = 0; i < TU_COUNTER_ALGORITHMS && calls != NULL; i++, calls = calls->next)
            counters->by_algorithm[i] = (uint64_t)calls->number;
    }
}

static void read_group(const json *from, tu_recorder_group_view *group) {
    memset(group, 0, sizeof *group);
    group->key = strtoull(json_text(from, "key"), NULL, 16);
    group->size = (int)json_number(from, "size", 0);
    snprintf(group->name, sizeof group->name, "%s", json_text(from, "name"));
    const json *ranks = json_member(from, "ranks");
    for (const json *rank = ranks != NULL ? ranks->first : NULL; rank != NULL && group->members < TU_RECORDER_MEMBERS;
         rank = rank->next)
        group->world_ranks[group->members++] = (int)rank->number;
}

/* What says otherwise was not written by Tutti. */
static bool plausible(const json *from) {
    int64_t rank = json_number(from, "rank", -1), size = json_number(from, "size", -1);
    return size > 0 && size <= MOST_RANKS && rank >= 0 && rank < size;
}

static int copy_file(flight *copy, const json *from) {
    snprintf(copy->world, sizeof copy->world, "%s", json_text(from, "world"));
    snprintf(copy->host, sizeof copy->host, "%s", json_text(from, "host"));
    copy->rank = (int)json_number(from, "rank", 0);
    copy->size = (int)json_number(from, "size", 0);
    copy->pid = (int)json_number(from, "pid", 0);
    copy->state = state_of(json_text(from, "state"));
    copy->status_known = json_member(from, "wait_status") != NULL;
    copy->wait_status = (int)json_number(from, "wait_status", 0);
    correct_state(copy);
    copy->now_ns = read_time(from, "written_ns", MOST_CLOCK);
    copy->opened_ns = read_time(from, "opened_ns", MOST_CLOCK);
    copy->wall_minus_clock_ns = read_time(from, "wall_minus_clock_ns", MOST_WALL);
    copy->compared = json_member(from, "clock_ahead_ns") != NULL;
    copy->ahead_ns = read_time(from, "clock_ahead_ns", MOST_CLOCK);
    copy->error_ns = read_time(from, "clock_error_ns", MOST_CLOCK);
    const json *entries = json_member(from, "entries"), *groups = json_member(from, "groups");
    copy->entries = calloc(count_members(entries) + 1, sizeof *copy->entries);
    copy->groups = calloc(count_members(groups) + 1, sizeof *copy->groups);
    if (copy->entries == NULL || copy->groups == NULL)
        return tool_fail("out of memory for the flight recorder of rank %d", copy->rank);
    for (const json *entry = entries != NULL ? entries->first : NULL; entry != NULL; entry = entry->next)
        read_entry(entry, &copy->entries[copy->entry_count++]);
    for (const json *group = groups != NULL ? groups->first : NULL; group != NULL; group = group->next)
        read_group(group, &copy->groups[copy->group_count++]);
    read_counters(from, copy);
    return 0;
}

/* Two hosts of one machine may see each other's processes. */
static bool has_rank(const flight_list *list, const json *from) {
    for (size_t i = 0; i < list->count; i++)
        for (size_t rank = 0; rank < list->jobs[i].count; rank++) {
            const flight *copy = &list->jobs[i].flights[rank];
            if (strcmp(copy->job, json_text(from, "job")) == 0 && copy->rank == json_number(from, "rank", -1))
                return true;
        }
    return false;
}

int flight_add_json(flight_list *list, const json *from, const flight_clock *clock, char state, int cpu) {
    if (json_number(from, "tutti_flight_recorder", 0) != TU_DUMP_VERSION || !plausible(from))
        return tool_fail("%s sent what is no flight recorder of this version of Tutti", clock->host);
    if (has_rank(list, from))
        return 0;
    flight *copy = add_flight(list, json_text(from, "job"));
    if (copy == NULL || copy_file(copy, from))
        return copy == NULL ? tool_fail("out of memory for the list of ranks") : 1;
    copy->live = true;
    copy->wall_minus_clock_ns = tu_clock_wall() - tu_clock_now() - clock->ahead_ns;
    if (state == '-' && (copy->state == TU_RANK_ALIVE || copy->state == TU_RANK_JOINING))
        copy->state = TU_RANK_DEAD; /* gone without a word, and nobody has looked yet */
    copy->has_process = state != '-';
    copy->process.state = state;
    copy->process.cpu = cpu;
    sort(list);
    return 0;
}

static int add_file(flight_list *list, const char *path, bool must) {
    size_t bytes = 0;
    char problem[160];
    char *text = json_read_file(path, &bytes);
    if (text == NULL)
        return tool_fail("cannot read %s: %s", path, strerror(errno));
    json *from = json_parse(text, bytes, problem, sizeof problem);
    free(text);
    int64_t version = json_number(from, "tutti_flight_recorder", 0);
    int failed = 0;
    if (from == NULL)
        failed = must ? tool_fail("%s is not JSON: %s", path, problem) : 0;
    else if (version == 1 && !plausible(from))
        failed = tool_fail("%s is damaged: it has no rank", path);
    else if (version != 1)
        failed = must ? tool_fail(version == 0 ? "%s is not a flight recorder of Tutti"
                                               : "%s was written by another version of Tutti",
                                  path)
                      : 0;
    else {
        flight *copy = add_flight(list, json_text(from, "job"));
        failed = copy == NULL ? tool_fail("out of memory for the list of ranks") : copy_file(copy, from);
    }
    json_free(from);
    return failed;
}

int flight_add_path(flight_list *list, const char *path) {
    struct stat file;
    if (stat(path, &file) != 0)
        return tool_fail("%s is neither the id of a running job nor a file: %s", path, strerror(errno));
    if (!S_ISDIR(file.st_mode)) {
        int failed = add_file(list, path, true);
        sort(list);
        return failed;
    }
    DIR *folder = opendir(path);
    if (folder == NULL)
        return tool_fail("cannot read the folder %s: %s", path, strerror(errno));
    struct dirent *entry;
    int failed = 0;
    size_t before = list->count;
    while (!failed && (entry = readdir(folder)) != NULL) {
        size_t length = strlen(entry->d_name);
        if (length < 5 || strcmp(entry->d_name + length - 5, ".json") != 0)
            continue;
        char name[8192];
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        failed = add_file(list, name, false);
    }
    closedir(folder);
    if (!failed && list->count == before)
        failed = tool_fail("there is no flight recorder in %s", path);
    sort(list);
    return failed;
}

/* One host's word is taken for the time of day; from there the measured differences tell. */
static bool align(flight_job *job) {
    const flight *first = &job->flights[0];
    for (size_t i = 0; i < job->count; i++)
        if (job->flights[i].live || !job->flights[i].compared)
            return false;
    int64_t wall_minus_first = first->wall_minus_clock_ns + first->ahead_ns;
    for (size_t i = 0; i < job->count; i++)
        job->flights[i].wall_minus_clock_ns = wall_minus_first - job->flights[i].ahead_ns;
    return true;
}

static void tell_clocks(const flight_job *job, FILE *file) {
    const flight *first = &job->flights[0];
    for (size_t i = 1; i < job->count; i++) {
        const flight *copy = &job->flights[i];
        bool known = false;
        for (size_t before = 0; before < i && !known; before++)
            known = strcmp(job->flights[before].host, copy->host) == 0;
        int64_t ahead = copy->ahead_ns - first->ahead_ns;
        if (!known)
            fprintf(file, "host %s: its clock was %.6f s %s that of %s, measured to %.3f ms by the launchers\n",
                    copy->host, (double)(ahead < 0 ? -ahead : ahead) / 1e9, ahead < 0 ? "behind" : "ahead of",
                    first->host, (double)(copy->error_ns + first->error_ns) / 1e6);
    }
}

void flight_align_files(flight_list *list, FILE *file) {
    for (size_t i = 0; i < list->count; i++) {
        flight_job *job = &list->jobs[i];
        bool live = false;
        for (size_t at = 0; at < job->count; at++)
            live = live || job->flights[at].live;
        if (live || flight_host_count(job) < 2)
            continue;
        bool aligned = align(job);
        if (aligned && file != NULL)
            tell_clocks(job, file);
        else if (file != NULL)
            fprintf(file, "Not all files say how far the clocks of their hosts were apart: all are taken for right\n");
    }
}

/* ---- what follows ---- */

const char *flight_group_name(const flight *copy, uint64_t key) {
    for (size_t i = 0; i < copy->group_count; i++)
        if (copy->groups[i].key == key)
            return copy->groups[i].name;
    return "?";
}

void flight_text(const flight *copy, const tu_record_view *entry, char *text, size_t bytes) {
    tu_operation_info_text(&entry->info, flight_group_name(copy, entry->info.group_key), text, bytes);
}

const tu_record_view *flight_current(const flight *copy) {
    for (size_t i = copy->entry_count; i-- > 0;)
        if (copy->entries[i].running)
            return &copy->entries[i];
    return NULL;
}

const tu_record_view *flight_last(const flight *copy, uint64_t group_key) {
    for (size_t i = copy->entry_count; i-- > 0;)
        if (!copy->entries[i].running && (group_key == 0 || copy->entries[i].info.group_key == group_key))
            return &copy->entries[i];
    return NULL;
}

/* The highest sequence number that the rank has begun in the group. */
static uint64_t reached(const flight *copy, uint64_t group_key) {
    uint64_t highest = 0;
    for (size_t i = 0; i < copy->entry_count; i++) {
        const tu_operation_info *info = &copy->entries[i].info;
        if (info->group_key == group_key && tu_operation_sequenced((tu_operation)info->operation) &&
            info->sequence > highest)
            highest = info->sequence;
    }
    return highest;
}

const tu_recorder_group_view *flight_group(const flight *copy, uint64_t key) {
    for (size_t i = 0; i < copy->group_count; i++)
        if (copy->groups[i].key == key)
            return &copy->groups[i];
    return NULL;
}

int flight_missing(const flight_job *job, const tu_record_view *entry, bool *missing, int size) {
    int count = 0;
    memset(missing, 0, (size_t)size * sizeof *missing);
    if (!tu_operation_sequenced((tu_operation)entry->info.operation)) {
        if (entry->waiting_for >= 0 && entry->waiting_for < size)
            missing[entry->waiting_for] = true, count = 1;
        return count;
    }
    for (size_t i = 0; i < job->count; i++) {
        const flight *copy = &job->flights[i];
        bool member = flight_group(copy, entry->info.group_key) != NULL;
        if (copy->rank >= size || !member || reached(copy, entry->info.group_key) >= entry->info.sequence)
            continue;
        missing[copy->rank] = true;
        count++;
    }
    return count;
}

bool flight_forgot(const flight *copy) {
    return copy->entry_count > 0 && copy->entries[copy->entry_count - 1].id > copy->entry_count;
}

void flight_duration(int64_t ns, char *text, size_t bytes) {
    if (ns < 0)
        ns = 0;
    if (ns < 1000000)
        snprintf(text, bytes, "%.0f us", (double)ns / 1e3);
    else if (ns < TU_SECOND)
        snprintf(text, bytes, "%.0f ms", (double)ns / 1e6);
    else if (ns < 60 * TU_SECOND)
        snprintf(text, bytes, "%.1f s", (double)ns / 1e9);
    else if (ns < 3600 * TU_SECOND)
        snprintf(text, bytes, "%d min %d s", (int)(ns / TU_SECOND / 60), (int)(ns / TU_SECOND % 60));
    else
        snprintf(text, bytes, "%d h %d min", (int)(ns / TU_SECOND / 3600), (int)(ns / TU_SECOND / 60 % 60));
}

void flight_doing(const flight *copy, char *text, size_t bytes) {
    char what[200], since[32], last[320] = "";
    const tu_record_view *current = flight_current(copy), *ended = flight_last(copy, 0);
    if (ended != NULL) {
        flight_text(copy, ended, what, sizeof what);
        flight_duration(copy->now_ns - ended->ended_ns, since, sizeof since);
        snprintf(last, sizeof last, "; its last operation, %s, %s %s before", what,
                 ended->status == TUTTI_OK ? "ended" : "failed", since);
    }
    if (copy->state == TU_SLOT_EMPTY || copy->state == TU_RANK_JOINING) {
        snprintf(text, bytes, "has not joined the world yet");
    } else if (copy->state == TU_RANK_DEAD) {
        char how[96] = "died";
        if (copy->status_known)
            tool_wait_text(copy->wait_status, how, sizeof how);
        snprintf(text, bytes, "%s%s", how, last);
    } else if (copy->state == TU_RANK_CLOSED) {
        snprintf(text, bytes, "has closed its world%s", last);
    } else if (copy->has_process && (copy->process.state == 'T' || copy->process.state == 't')) {
        snprintf(text, bytes, "is stopped by a signal or a debugger%s", last);
    } else if (current != NULL) {
        flight_text(copy, current, what, sizeof what);
        flight_duration(copy->now_ns - current->created_ns, since, sizeof since);
        snprintf(text, bytes, "is in %s for %s", what, since);
    } else if (copy->has_process && copy->process.state == 'R') {
        snprintf(text, bytes, "is computing on CPU %d, in no operation of Tutti%s", copy->process.cpu, last);
    } else {
        snprintf(text, bytes, "is %sin no operation of Tutti%s",
                 copy->has_process && copy->process.state == 'S' ? "asleep, " : "", last);
    }
}

int flight_host_count(const flight_job *job) {
    int count = 0;
    for (size_t i = 0; i < job->count; i++) {
        bool known = false;
        for (size_t before = 0; before < i && !known; before++)
            known = strcmp(job->flights[before].host, job->flights[i].host) == 0;
        count += !known;
    }
    return count;
}
