/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti trace`: merges flight recorders of running jobs, or of files that were written when one failed, says in words
 * where the ranks went apart first, and writes a trace for Perfetto and Chrome.
 */
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "divergence.h"
#include "flight.h"
#include "timeline.h"
#include "tool.h"

static const char help_text[] =
    "Usage: tutti trace [OPTION…] [JOB | FILE | FOLDER]…\n"
    "\n"
    "Merges the flight recorders of the ranks of a job: of a running one, dead ranks included, by the\n"
    "beginning of its id; or of one that failed, from the files that \"tutti run --log-dir\" or\n"
    "TUTTI_TRACE_DIR left. Without arguments: of all jobs of this user on this host. Says in words\n"
    "where the ranks went apart first: in a call that all must make alike, or in a send or receive\n"
    "that found no counterpart of its rank and tag.\n"
    "\n"
    "  -o, --output FILE   write the operations of all ranks as a trace, which https://ui.perfetto.dev\n"
    "                      and chrome://tracing open; - is the standard output\n"
    "  -l, --list          also list the last operations of each rank\n"
    "  -n, --last N        how many of them; default 20\n"
    "      --hosts A,B     of the running jobs on these hosts; a list as \"tutti run --hosts\" takes it. How\n"
    "                      far their clocks are from this one's is measured, said, and put right\n"
    "      --rsh COMMAND   how to run a command on a host: COMMAND HOST COMMAND-LINE; default ssh\n"
    "      --serve         what --hosts starts there: answers questions on its standard input\n"
    "\n"
    "Exit status: 0 when the ranks agree and nothing failed, 1 when not or when no job was found, 2 for\n"
    "wrong usage.\n";

static int trace_main(int argc, char **argv);
const tool_command tool_trace = { "trace", "say where ranks went apart; write a timeline", help_text, trace_main };

/* ---- words ---- */

static void list_entries(const flight *copy, size_t last) {
    size_t from = copy->entry_count > last ? copy->entry_count - last : 0;
    for (size_t i = from; i < copy->entry_count; i++) {
        const tu_record_view *entry = &copy->entries[i];
        char what[200], took[32], ago[32];
        flight_text(copy, entry, what, sizeof what);
        flight_duration((entry->running ? copy->now_ns : entry->ended_ns) - entry->created_ns, took, sizeof took);
        flight_duration(copy->now_ns - entry->created_ns, ago, sizeof ago);
        printf("    %9s ago  %s: %s %s\n", ago, what,
               entry->running              ? "running for"
               : entry->status == TUTTI_OK ? "took"
                                           : tutti_status_name(entry->status),
               took);
    }
}

/* The first operation of any rank that failed, and how many did; NULL: none. */
static const tu_record_view *first_failure(const flight_job *job, const flight **by, size_t *count) {
    const tu_record_view *first = NULL;
    *count = 0;
    for (size_t i = 0; i < job->count; i++)
        for (size_t at = 0; at < job->flights[i].entry_count; at++) {
            const tu_record_view *entry = &job->flights[i].entries[at];
            if (entry->running || entry->status == TUTTI_OK)
                continue;
            ++*count;
            int64_t at_wall = entry->ended_ns + job->flights[i].wall_minus_clock_ns;
            if (first == NULL || at_wall < first->ended_ns + (*by)->wall_minus_clock_ns) {
                first = entry;
                *by = &job->flights[i];
            }
        }
    return first;
}

static void tell_unreceived(const flight_job *job, const flight *by, uint64_t key, void *argument) {
    finding *found = argument;
    int count = finding_of_unreceived(job, key, found);
    if (count != 0)
        printf("  In group %s %d message%s not received when the recorders were copied: %s\n",
               flight_group_name(by, key), count, count == 1 ? " was" : "s were", found->text);
}

/* Ranks that did not go apart: whether something failed all the same, and what was not compared. */
static bool tell_agreement(const flight_job *job) {
    const flight *by = NULL;
    size_t failures;
    bool forgot = false;
    const tu_record_view *failed = first_failure(job, &by, &failures);
    for (size_t i = 0; i < job->count; i++)
        forgot |= flight_forgot(&job->flights[i]);
    printf("  The ranks made the same calls in the same order, and nobody is held up in a send or receive, as far as "
           "their recorders go back%s.\n",
           forgot ? "; messages are paired only where they go back to the first" : "");
    finding found;
    finding_each_group(job, tell_unreceived, &found);
    if (failed == NULL)
        return false;
    char what[200];
    flight_text(by, failed, what, sizeof what);
    printf("  %zu operation%s failed, first rank %d's %s: %s (%s)\n", failures, failures == 1 ? "" : "s", by->rank,
           what, tutti_status_name(failed->status), tutti_status_text(failed->status));
    return true;
}

/* Whether the ranks went apart, or something failed. */
static bool tell_job(const flight_job *job, bool list, size_t last) {
    const flight *first = &job->flights[0];
    char text[2048];
    size_t operations = 0;
    int hosts = flight_host_count(job);
    for (size_t i = 0; i < job->count; i++)
        operations += job->flights[i].entry_count;
    printf("job %s: world %s, recorders of %zu rank%s of %d, %zu operations\n", first->job, first->world, job->count,
           job->count == 1 ? "" : "s", first->size, operations);
    for (size_t i = 0; i < job->count; i++) {
        flight_doing(&job->flights[i], text, sizeof text);
        printf("  rank %d (pid %d%s%s) %s\n", job->flights[i].rank, job->flights[i].pid, hosts > 1 ? " on " : "",
               hosts > 1 ? job->flights[i].host : "", text);
        if (list)
            list_entries(&job->flights[i], last);
    }
    bool apart = flight_divergence(job, text, sizeof text);
    if (apart)
        printf("  The first divergence: %s\n", text);
    else
        apart = tell_agreement(job);
    return apart;
}

static int write_trace(const flight_list *list, const char *path) {
    FILE *file = strcmp(path, "-") == 0 ? stdout : fopen(path, "we");
    if (file == NULL)
        return tool_fail("cannot write %s: %s", path, strerror(errno));
    if (timeline_write(list, file))
        return 1;
    int failed = ferror(file);
    if (file != stdout)
        failed |= fclose(file);
    return failed ? tool_fail("cannot write %s: %s", path, strerror(errno)) : 0;
}

/* ---- the command ---- */

static int gather_hosts(flight_list *list, const char *hosts, const char *rsh, const char *prefix, bool silent) {
    static flight_clock clocks[FLIGHT_HOSTS];
    int count;
    if (flight_add_hosts(list, hosts, rsh, prefix, clocks, FLIGHT_HOSTS, &count))
        return 1;
    for (int i = 0; i < count && !silent; i++) {
        int64_t ahead = clocks[i].ahead_ns;
        printf("host %s: its clock is %.6f s %s this one's, measured to %.3f ms\n", clocks[i].host,
               (double)(ahead < 0 ? -ahead : ahead) / 1e9, ahead < 0 ? "behind" : "ahead of",
               (double)clocks[i].error_ns / 1e6);
    }
    if (list->count == 0)
        printf("no job of this user is running on these hosts\n");
    return list->count == 0;
}

static int gather(flight_list *list, char **names, int count, bool silent) {
    if (count == 0 && flight_add_live(list, ""))
        return 1;
    for (int i = 0; i < count; i++) {
        struct stat file;
        size_t before = list->count;
        if (stat(names[i], &file) == 0 ? flight_add_path(list, names[i]) : flight_add_live(list, names[i]))
            return 1;
        if (list->count == before && stat(names[i], &file) != 0)
            return tool_fail("%s is neither a file nor the id of a running job of this user on this host", names[i]);
    }
    if (list->count == 0) {
        printf("no job of this user is running on this host\n");
        return 1;
    }
    flight_align_files(list, silent ? NULL : stdout);
    return 0;
}

static int trace_main(int argc, char **argv) {
    static const struct option longs[] = {
        { "output", required_argument, NULL, 'o' }, { "list", no_argument, NULL, 'l' },
        { "last", required_argument, NULL, 'n' },   { "hosts", required_argument, NULL, 'H' },
        { "rsh", required_argument, NULL, 'R' },    { "serve", no_argument, NULL, 'S' },
        { "help", no_argument, NULL, 'h' },         { 0 }
    };
    const char *output = NULL, *hosts = NULL, *rsh = NULL;
    bool list = false;
    long last = 20;
    int option;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":o:ln:h", longs, NULL)) != -1) {
        switch (option) {
        case 'o':
            output = optarg;
            break;
        case 'l':
            list = true;
            break;
        case 'H':
            hosts = optarg;
            break;
        case 'R':
            rsh = optarg;
            break;
        case 'S':
            return flight_serve();
        case 'n':
            list = true;
            last = strtol(optarg, NULL, 10);
            if (last < 1)
                return tool_usage(&tool_trace, "--last %s: must be a number from 1 on", optarg);
            break;
        default:
            return tool_other_option(&tool_trace, option, argv, longs);
        }
    }
    if (rsh != NULL && hosts == NULL)
        return tool_usage(&tool_trace, "--rsh goes with --hosts");
    if (hosts != NULL && argc - optind > 1)
        return tool_usage(&tool_trace, "one JOB at most with --hosts");
    flight_list jobs = { 0 };
    bool trace_on_stdout = output != NULL && strcmp(output, "-") == 0;
    int failed = hosts == NULL ? gather(&jobs, argv + optind, argc - optind, trace_on_stdout)
                               : gather_hosts(&jobs, hosts, rsh, optind < argc ? argv[optind] : "", trace_on_stdout);
    if (!failed && output != NULL)
        failed = write_trace(&jobs, output);
    bool apart = false;
    for (size_t i = 0; !failed && !trace_on_stdout && i < jobs.count; i++)
        apart |= tell_job(&jobs.jobs[i], list, (size_t)last);
    flight_free(&jobs);
    return failed || apart;
}
