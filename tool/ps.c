/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti ps`: every rank of every job of this user on this host, running or hung, without the job's help.
 */
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <tutti/collective.h>

#include "base/clock.h"
#include "base/settings.h"
#include "flight.h"
#include "job/dump.h"
#include "tool.h"

static const char help_text[] =
    "Usage: tutti ps [OPTION…] [JOB]\n"
    "\n"
    "Shows the jobs of this user on this host, running or hung: for each rank its process, its state,\n"
    "the CPU it ran on last, the operation it is in, for how long, and which ranks it waits for. The\n"
    "job does not notice. JOB is the beginning of a job's id; without it all are shown.\n"
    "\n"
    "  -c, --counters       also calls, bytes and time per operation, summed over the ranks\n"
    "  -w, --watch[=TIME]   again and again, every TIME (default 1s), until interrupted\n"
    "      --hosts A,B      on these hosts instead of this one; a list as \"tutti run --hosts\" takes it\n"
    "      --rsh COMMAND    how to run a command on a host: COMMAND HOST COMMAND-LINE; default ssh\n"
    "      --json           as JSON, for programs\n"
    "\n"
    "States: runs, sleeps, kernel (in a system call that cannot be interrupted), stopped (by a signal\n"
    "or a debugger), zombie (ended, not yet reaped by its parent), joining, closed (its world), dead.\n"
    "\n"
    "Exit status: 0 when a job was shown, 1 when there is none, 2 for wrong usage.\n";

static int ps_main(int argc, char **argv);
const tool_command tool_ps = { "ps", "show what every rank of running jobs does", help_text, ps_main };

static const char *state_text(const flight *copy) {
    switch (copy->state) {
    case TU_SLOT_EMPTY:
    case TU_RANK_JOINING:
        return "joining";
    case TU_RANK_CLOSED:
        return "closed";
    case TU_RANK_DEAD:
        return "dead";
    default:
        break;
    }
    switch (copy->has_process ? copy->process.state : '?') {
    case 'R':
        return "runs";
    case 'S':
    case 'I':
        return "sleeps";
    case 'D':
        return "kernel";
    case 'T':
    case 't':
        return "stopped";
    case 'Z':
    case 'X':
        return "zombie";
    default:
        return "?";
    }
}

/* Ranks that this one waits for, in words and as flags. */
static int waits_for(const flight_job *job, const flight *copy, bool *missing, char *text, size_t bytes) {
    const tu_record_view *current = flight_current(copy);
    text[0] = '\0';
    if (current == NULL || copy->state == TU_RANK_DEAD || copy->state == TU_RANK_CLOSED)
        return 0;
    int count = flight_missing(job, current, missing, copy->size);
    if (count == 0 && current->waiting_for >= 0 && current->waiting_for < copy->size)
        missing[current->waiting_for] = true, count = 1;
    if (count > 0)
        tool_rank_list(missing, copy->size, text, bytes);
    return count;
}

/* ---- as text ---- */

/* What it is in, or what it did last. */
static void operation_text(const flight *copy, char *text, size_t bytes) {
    const tu_record_view *current = flight_current(copy), *last = flight_last(copy, 0);
    bool ended = copy->state == TU_RANK_DEAD || copy->state == TU_RANK_CLOSED;
    snprintf(text, bytes, "-");
    if (copy->state == TU_RANK_DEAD) {
        flight_doing(copy, text, bytes);
    } else if (current != NULL && !ended) {
        flight_text(copy, current, text, bytes);
    } else if (last != NULL) {
        char what[200], since[32];
        flight_text(copy, last, what, sizeof what);
        flight_duration(copy->now_ns - last->ended_ns, since, sizeof since);
        snprintf(text, bytes, "- %s %s %s ago", what, last->status == TUTTI_OK ? "ended" : "failed", since);
    }
}

static void print_rank(const flight_job *job, const flight *copy, int width) {
    char operation[480], since[32] = "", waits[128], cpu[16] = "";
    bool missing[copy->size > 0 ? copy->size : 1];
    const tu_record_view *current = flight_current(copy);
    operation_text(copy, operation, sizeof operation);
    if (current != NULL && copy->state != TU_RANK_DEAD && copy->state != TU_RANK_CLOSED)
        flight_duration(copy->now_ns - current->created_ns, since, sizeof since);
    waits_for(job, copy, missing, waits, sizeof waits);
    if (copy->has_process)
        snprintf(cpu, sizeof cpu, "%d", copy->process.cpu);
    printf("  %5d %8d ", copy->rank, copy->pid);
    if (flight_host_count(job) > 1)
        printf("%-12s ", copy->host);
    printf("%-8s %4s  %-*s %10s  %s\n", state_text(copy), cpu, width, operation, since, waits);
}

static void print_counters(const flight_job *job) {
    bool any = false;
    for (int operation = 1; operation < TU_OPERATION_COUNT; operation++) {
        tu_counters sum = { 0 };
        for (size_t i = 0; i < job->count; i++) {
            const tu_counters *one = &job->flights[i].counters[operation];
            sum.calls += one->calls;
            sum.failures += one->failures;
            sum.bytes += one->bytes;
            sum.time_ns += one->time_ns;
            for (int algorithm = 0; algorithm < TU_COUNTER_ALGORITHMS; algorithm++)
                sum.by_algorithm[algorithm] += one->by_algorithm[algorithm];
        }
        if (sum.calls == 0)
            continue;
        if (!any)
            printf("  %-28s %12s %9s %16s %12s %12s  %s\n", "OPERATION", "CALLS", "FAILED", "BYTES", "TIME", "PER CALL",
                   "ALGORITHMS");
        any = true;
        char time[32], each[32];
        flight_duration(sum.time_ns, time, sizeof time);
        flight_duration(sum.time_ns / (int64_t)sum.calls, each, sizeof each);
        printf("  %-28s %12" PRIu64 " %9" PRIu64 " %16" PRIu64 " %12s %12s ",
               tu_operation_name((tu_operation)operation), sum.calls, sum.failures, sum.bytes, time, each);
        for (int algorithm = 1; algorithm < TU_COUNTER_ALGORITHMS; algorithm++)
            if (sum.by_algorithm[algorithm] > 0)
                printf(" %s %" PRIu64, tutti_algorithm_name((tutti_algorithm)algorithm), sum.by_algorithm[algorithm]);
        putchar('\n');
    }
}

/* far: of hosts that were asked for. */
static void print_job(const flight_job *job, bool counters, bool far) {
    const flight *first = &job->flights[0];
    char age[32], text[2048];
    int width = 20;
    for (size_t i = 0; i < job->count; i++) {
        operation_text(&job->flights[i], text, sizeof text);
        if ((int)strlen(text) > width)
            width = strlen(text) < 80 ? (int)strlen(text) : 80;
    }
    int64_t oldest = 0; /* each on the clock of its host */
    for (size_t i = 0; i < job->count; i++) {
        const flight *copy = &job->flights[i];
        if (copy->opened_ns != 0 && copy->now_ns - copy->opened_ns > oldest)
            oldest = copy->now_ns - copy->opened_ns;
    }
    flight_duration(oldest, age, sizeof age);
    int hosts = flight_host_count(job);
    printf("job %s: world %s, %zu rank%s on ", first->job, first->world, job->count, job->count == 1 ? "" : "s");
    if (hosts > 1)
        printf("%d hosts", hosts);
    else
        printf("%s", far ? first->host : "this host");
    if ((int)job->count != first->size)
        printf(" of %d", first->size);
    printf(", open for %s\n", age);
    printf("  %5s %8s ", "RANK", "PID");
    if (hosts > 1)
        printf("%-12s ", "HOST");
    printf("%-8s %4s  %-*s %10s  %s\n", "STATE", "CPU", width, "OPERATION", "FOR", "WAITS FOR");
    for (size_t i = 0; i < job->count; i++)
        print_rank(job, &job->flights[i], width);
    if (flight_divergence(job, text, sizeof text))
        printf("  The ranks went apart: %s\n", text);
    if (counters)
        print_counters(job);
}

/* ---- as JSON ---- */

static void json_rank(const flight_job *job, const flight *copy) {
    const tu_record_view *current = flight_current(copy), *last = flight_last(copy, 0);
    bool missing[copy->size > 0 ? copy->size : 1];
    char waits[128];
    printf("{\"rank\": %d, \"pid\": %d, \"host\": ", copy->rank, copy->pid);
    tu_json_string(stdout, copy->host);
    printf(", \"state\": \"%s\"", state_text(copy));
    if (copy->has_process)
        printf(", \"cpu\": %d", copy->process.cpu);
    if (copy->status_known)
        printf(", \"wait_status\": %d", copy->wait_status);
    int count = waits_for(job, copy, missing, waits, sizeof waits);
    const tu_record_view *shown[] = { current, last };
    static const char *const names[] = { "current", "last" };
    for (int i = 0; i < 2; i++) {
        if (shown[i] == NULL)
            continue;
        const tu_operation_info *info = &shown[i]->info;
        printf(", \"%s\": {\"operation\": \"%s\", \"group\": ", names[i],
               tu_operation_name((tu_operation)info->operation));
        tu_json_string(stdout, flight_group_name(copy, info->group_key));
        printf(", \"sequence\": %" PRIu64 ", \"count\": %" PRIu64, info->sequence, info->count);
        if (info->dtype != 0)
            printf(", \"dtype\": \"%s\"", tutti_dtype_name((tutti_dtype)info->dtype));
        if (info->reduction != 0)
            printf(", \"reduction\": \"%s\"", tutti_reduction_name((tutti_reduction)info->reduction));
        if (shown[i]->running)
            printf(", \"for_ns\": %" PRId64 "}", copy->now_ns - shown[i]->created_ns);
        else
            printf(", \"took_ns\": %" PRId64 ", \"ended_ns_ago\": %" PRId64 ", \"status\": \"%s\"}",
                   shown[i]->ended_ns - shown[i]->created_ns, copy->now_ns - shown[i]->ended_ns,
                   tutti_status_name(shown[i]->status));
    }
    printf(", \"waits_for\": [");
    for (int rank = 0, told = 0; count > 0 && rank < copy->size; rank++)
        if (missing[rank])
            printf("%s%d", told++ > 0 ? ", " : "", rank);
    printf("], \"counters\": {");
    for (int i = 1, told = 0; i < TU_OPERATION_COUNT; i++) {
        const tu_counters *counted = &copy->counters[i];
        if (counted->calls == 0)
            continue;
        printf("%s\"%s\": {\"calls\": %" PRIu64 ", \"failures\": %" PRIu64 ", \"bytes\": %" PRIu64
               ", \"time_ns\": %" PRId64 ", \"algorithms\": {",
               told++ > 0 ? ", " : "", tu_operation_name((tu_operation)i), counted->calls, counted->failures,
               counted->bytes, counted->time_ns);
        for (int algorithm = 1, shown_algorithms = 0; algorithm < TU_COUNTER_ALGORITHMS; algorithm++)
            if (counted->by_algorithm[algorithm] > 0)
                printf("%s\"%s\": %" PRIu64, shown_algorithms++ > 0 ? ", " : "",
                       tutti_algorithm_name((tutti_algorithm)algorithm), counted->by_algorithm[algorithm]);
        printf("}}");
    }
    printf("}}");
}

static void json_jobs(const flight_list *list) {
    printf("[");
    for (size_t i = 0; i < list->count; i++) {
        const flight_job *job = &list->jobs[i];
        char text[2048];
        printf("%s\n{\"job\": \"%s\", \"world\": ", i > 0 ? "," : "", job->flights[0].job);
        tu_json_string(stdout, job->flights[0].world);
        printf(", \"size\": %d, \"divergence\": ", job->flights[0].size);
        if (flight_divergence(job, text, sizeof text))
            tu_json_string(stdout, text);
        else
            printf("null");
        printf(", \"ranks\": [");
        for (size_t rank = 0; rank < job->count; rank++) {
            printf("%s\n  ", rank > 0 ? "," : "");
            json_rank(job, &job->flights[rank]);
        }
        printf("]}");
    }
    printf("]\n");
}

/* ---- the command ---- */

typedef struct question {
    const char *job, *hosts, *rsh;
    bool json, counters;
} question;

static int gather(flight_list *list, const question *asked) {
    static flight_clock clocks[FLIGHT_HOSTS];
    int count;
    return asked->hosts == NULL
               ? flight_add_live(list, asked->job)
               : flight_add_hosts(list, asked->hosts, asked->rsh, asked->job, clocks, FLIGHT_HOSTS, &count);
}

static int show(const question *asked) {
    flight_list list = { 0 };
    bool json = asked->json;
    const char *job = asked->job, *where = asked->hosts != NULL ? "these hosts" : "this host";
    int failed = gather(&list, asked);
    if (!failed && json) {
        json_jobs(&list);
    } else if (!failed) {
        for (size_t i = 0; i < list.count; i++) {
            if (i > 0)
                putchar('\n');
            print_job(&list.jobs[i], asked->counters, asked->hosts != NULL);
        }
        if (list.count == 0)
            printf(*job != '\0' ? "no job of this user on %s has an id that begins with %s\n"
                                : "no job of this user is running on %s%s\n",
                   where, job);
    }
    failed |= list.count == 0;
    flight_free(&list);
    return failed;
}

static int ps_main(int argc, char **argv) {
    static const struct option longs[] = { { "counters", no_argument, NULL, 'c' },
                                           { "watch", optional_argument, NULL, 'w' },
                                           { "json", no_argument, NULL, 'j' },
                                           { "hosts", required_argument, NULL, 'H' },
                                           { "rsh", required_argument, NULL, 'R' },
                                           { "help", no_argument, NULL, 'h' },
                                           { 0 } };
    question asked = { .job = "" };
    int64_t every = 0;
    int option;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":cwh", longs, NULL)) != -1) {
        switch (option) {
        case 'c':
            asked.counters = true;
            break;
        case 'w':
            every = TU_SECOND;
            if (optarg != NULL && (tu_parse_duration(optarg, &every) || every <= 0))
                return tool_usage(&tool_ps, "--watch=%s: must be a time, like 2s or 500ms", optarg);
            break;
        case 'j':
            asked.json = true;
            break;
        case 'H':
            asked.hosts = optarg;
            break;
        case 'R':
            asked.rsh = optarg;
            break;
        default:
            return tool_other_option(&tool_ps, option, argv, longs);
        }
    }
    if (argc - optind > 1)
        return tool_usage(&tool_ps, "one JOB at most");
    if (asked.rsh != NULL && asked.hosts == NULL)
        return tool_usage(&tool_ps, "--rsh goes with --hosts");
    if (optind < argc)
        asked.job = argv[optind];
    if (every == 0)
        return show(&asked);
    for (;;) {
        if (isatty(1) && !asked.json)
            fputs("\033[H\033[2J", stdout);
        show(&asked);
        fflush(stdout);
        if (ferror(stdout))
            return 1;
        struct timespec pause = { .tv_sec = every / TU_SECOND, .tv_nsec = every % TU_SECOND };
        nanosleep(&pause, NULL);
    }
}
