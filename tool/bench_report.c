/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti bench`: results as text, JSON and CSV, the machine that they belong to, and the comparison with an earlier
 * run.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "base/cache.h"
#include "bench.h"
#include "job/dump.h"
#include "json.h"
#include "kernel/kernel.h"
#include "machine.h"

void bench_bytes_text(size_t bytes, char *text, size_t room) {
    static const char *const units[] = { "B", "KiB", "MiB", "GiB" };
    int unit = 0;
    double value = (double)bytes;
    while (value >= 1024 && unit < 3) {
        value /= 1024;
        unit++;
    }
    snprintf(text, room, "%.4g %s", value, units[unit]);
}

/* ---- the machine ---- */

typedef struct machine {
    char processor[128], system[256], caches[96], governor[32], smt[16];
    long processors;
    int nodes;
} machine;

static void look_at(machine *found) {
    struct utsname name;
    char l2[24], l3[24];
    machine_processor(found->processor, sizeof found->processor);
    uname(&name);
    snprintf(found->system, sizeof found->system, "%s %s %s", name.sysname, name.release, name.machine);
    bench_bytes_text(tu_cache_bytes(2), l2, sizeof l2);
    bench_bytes_text(tu_cache_bytes(3), l3, sizeof l3);
    snprintf(found->caches, sizeof found->caches, "L2 %s, L3 %s", l2, l3);
    if (!machine_first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", found->governor,
                            sizeof found->governor))
        snprintf(found->governor, sizeof found->governor, "unknown");
    machine_first_line("/sys/devices/system/cpu/smt/active", found->smt, sizeof found->smt);
    found->processors = sysconf(_SC_NPROCESSORS_ONLN);
    found->nodes = machine_nodes();
}

void bench_machine_text(const bench_results *results, char *text, size_t room) {
    machine found;
    struct utsname name;
    look_at(&found);
    uname(&name);
    int used = snprintf(text, room, "%s: %s, %ld CPU%s", name.nodename, found.processor, found.processors,
                        found.processors == 1 ? "" : "s");
    if (used > 0 && (size_t)used < room)
        snprintf(text + used, room - (size_t)used, ", load %.1f before", results->load);
}

/* ---- text ---- */

void bench_report_head(FILE *file, const bench_job *job, int ranks, const char *launcher) {
    const bench_options *options = job->options;
    machine found;
    look_at(&found);
    fprintf(file, "# tutti bench %s, kernels %s\n", tutti_version(), tu_kernels_name());
    fprintf(file, "# machine: %s, %ld CPUs, %d NUMA node%s, %s, SMT %s, governor %s, %s\n", found.processor,
            found.processors, found.nodes, found.nodes == 1 ? "" : "s", found.caches,
            found.smt[0] == '1'   ? "on"
            : found.smt[0] == '0' ? "off"
                                  : "unknown",
            found.governor, found.system);
    fprintf(file, "# ranks: %d, started by %s; binding: %s\n", ranks, launcher, job->binding_text);
    fprintf(file,
            "# buffers: %s%s%s%s; calls: %s; times in microseconds, bandwidth in GB/s of the median; size is the "
            "larger buffer's\n",
            options->private_buffers ? "private" : "symmetric", options->in_place ? ", in place" : "",
            options->cold ? ", cold" : "", options->dirty ? ", rewritten before each call" : "",
            options->isolated ? "isolated (a barrier before each)" : "streaming (back to back)");
    if (options->rounds > 1)
        fprintf(file,
                "# rounds: %d; p50 is the median of their medians, noise half the distance between the least and "
                "the largest\n",
                options->rounds);
}

/* Enough digits to compare: 0.123, 12.34, 1234.5. */
static const char *microseconds(double value, char *text, size_t room) {
    snprintf(text, room, "%.*f", value < 10 ? 3 : value < 1000 ? 2 : 1, value);
    return text;
}

void bench_report_row(FILE *file, const bench_row *row, bool first_of_operation) {
    char times[5][24], wrong[24] = "-", algbw[16] = "-", busbw[16] = "-";
    if (first_of_operation)
        fprintf(file, "#\n# %s\n#%11s %11s %7s %10s %10s %10s %10s %10s %10s %8s %8s %6s%s\n", row->operation, "size",
                "count", "type", "op", "min", "p50", "avg", "p99", "max", "algbw", "busbw", "wrong",
                row->rounds > 1 ? "   noise" : "");
    if (row->wrong >= 0)
        snprintf(wrong, sizeof wrong, "%lld", (long long)row->wrong);
    if (row->algbw > 0) {
        snprintf(algbw, sizeof algbw, "%.2f", row->algbw);
        snprintf(busbw, sizeof busbw, "%.2f", row->busbw);
    }
    fprintf(file, " %11zu %11zu %7s %10s %10s %10s %10s %10s %10s %8s %8s %6s", row->bytes, row->count,
            row->bytes > 0 ? tutti_dtype_name(row->dtype) : "-",
            row->reduction ? tutti_reduction_name(row->reduction) : "-",
            microseconds(row->min, times[0], sizeof times[0]), microseconds(row->p50, times[1], sizeof times[1]),
            microseconds(row->avg, times[2], sizeof times[2]), microseconds(row->p99, times[3], sizeof times[3]),
            microseconds(row->max, times[4], sizeof times[4]), algbw, busbw, wrong);
    if (row->rounds > 1)
        fprintf(file, "  %4.0f %%", row->p50 > 0 ? 50 * (row->high - row->low) / row->p50 : 0);
    fputc('\n', file);
    fflush(file);
}

/* ---- JSON and CSV ---- */

static const char *yes(bool value) {
    return value ? "true" : "false";
}

static void member(FILE *file, const char *name, const char *value, bool last) {
    fprintf(file, "    \"%s\": ", name);
    tu_json_string(file, value);
    fprintf(file, last ? "\n" : ",\n");
}

static void row_json(FILE *file, const bench_row *row) {
    fprintf(file,
            "    {\"operation\": \"%s\", \"size\": %zu, \"count\": %zu, \"type\": \"%s\", \"op\": ", row->operation,
            row->bytes, row->count, tutti_dtype_name(row->dtype));
    fprintf(file, row->reduction ? "\"%s\"" : "null", tutti_reduction_name(row->reduction));
    fprintf(file,
            ", \"ranks\": %d, \"min_us\": %.4f, \"p50_us\": %.4f, \"avg_us\": %.4f, \"p99_us\": %.4f, \"max_us\": %.4f",
            row->ranks, row->min, row->p50, row->avg, row->p99, row->max);
    fprintf(file, ", \"algbw_gbs\": %.4f, \"busbw_gbs\": %.4f, \"wrong\": ", row->algbw, row->busbw);
    if (row->wrong >= 0)
        fprintf(file, "%lld", (long long)row->wrong);
    else
        fprintf(file, "null");
    fprintf(file, ", \"rounds\": %d, \"p50_low_us\": %.4f, \"p50_high_us\": %.4f", row->rounds, row->low, row->high);
    fprintf(file, ", \"iterations\": %ld, \"calls_per_measurement\": %d, \"algorithm\": ", row->iterations, row->batch);
    fprintf(file, row->algorithm[0] ? "\"%s\"" : "null", row->algorithm);
    fprintf(file, ", \"buffers\": \"%s\", \"mode\": \"%s\", \"in_place\": %s, \"cold\": %s, \"dirty\": %s}",
            row->private_buffers ? "private" : "symmetric", row->isolated ? "isolated" : "streaming",
            yes(row->in_place), yes(row->cold), yes(row->dirty));
}

void bench_report_json(FILE *file, const bench_job *job) {
    const bench_results *results = job->results;
    machine found;
    char when[32], number[24];
    time_t now = time(NULL);
    struct tm broken;
    look_at(&found);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &broken));
    fprintf(file, "{\n  \"machine\": {\n");
    member(file, "processor", found.processor, false);
    snprintf(number, sizeof number, "%ld", found.processors);
    fprintf(file, "    \"cpus\": %s,\n    \"numa_nodes\": %d,\n", number, found.nodes);
    member(file, "caches", found.caches, false);
    member(file, "smt", found.smt[0] == '1' ? "on" : found.smt[0] == '0' ? "off" : "unknown", false);
    member(file, "governor", found.governor, false);
    member(file, "system", found.system, false);
    member(file, "version", tutti_version(), false);
    member(file, "kernels", tu_kernels_name(), false);
    fprintf(file, "    \"load\": %.2f,\n", results->load);
    fprintf(file, "    \"ranks\": %d,\n", results->ranks);
    member(file, "launcher", results->launcher, false);
    member(file, "binding", job->binding_text, false);
    member(file, "date", when, true);
    fprintf(file, "  },\n  \"results\": [\n");
    for (int i = 0; i < results->count; i++) {
        row_json(file, &results->rows[i]);
        fprintf(file, i + 1 < results->count ? ",\n" : "\n");
    }
    fprintf(file, "  ]\n}\n");
}

void bench_report_csv(FILE *file, const bench_results *results) {
    fprintf(file, "operation,size,count,type,op,ranks,min_us,p50_us,avg_us,p99_us,max_us,algbw_gbs,busbw_gbs,wrong,"
                  "iterations,algorithm,buffers,mode,"
                  "in_place,cold,dirty\n");
    for (int i = 0; i < results->count; i++) {
        const bench_row *row = &results->rows[i];
        fprintf(file, "%s,%zu,%zu,%s,%s,%d,%.4f,%.4f,%.4f,%.4f,%.4f,%.4f,%.4f,", row->operation, row->bytes, row->count,
                tutti_dtype_name(row->dtype), row->reduction ? tutti_reduction_name(row->reduction) : "", row->ranks,
                row->min, row->p50, row->avg, row->p99, row->max, row->algbw, row->busbw);
        if (row->wrong >= 0)
            fprintf(file, "%lld", (long long)row->wrong);
        fprintf(file, ",%ld,%s,%s,%s,%s,%s,%s\n", row->iterations, row->algorithm,
                row->private_buffers ? "private" : "symmetric", row->isolated ? "isolated" : "streaming",
                yes(row->in_place), yes(row->cold), yes(row->dirty));
    }
}

/* ---- the baseline ---- */

static bool same_row(const json *old, const bench_row *row) {
    return strcmp(json_text(old, "operation"), row->operation) == 0 &&
           json_number(old, "size", -1) == (int64_t)row->bytes &&
           strcmp(json_text(old, "type"), tutti_dtype_name(row->dtype)) == 0 &&
           strcmp(json_text(old, "op"), row->reduction ? tutti_reduction_name(row->reduction) : "") == 0 &&
           json_number(old, "ranks", -1) == row->ranks &&
           strcmp(json_text(old, "buffers"), row->private_buffers ? "private" : "symmetric") == 0 &&
           strcmp(json_text(old, "mode"), row->isolated ? "isolated" : "streaming") == 0 &&
           json_number(old, "in_place", -1) == row->in_place && json_number(old, "cold", -1) == row->cold &&
           json_number(old, "dirty", -1) == row->dirty;
}

/* The row of the baseline that was measured like this one; NULL when it has none. */
static const json *row_before(const json *document, const bench_row *row) {
    const json *rows = json_member(document, "results");
    const json *old = rows != NULL ? rows->first : NULL;
    while (old != NULL && !same_row(old, row))
        old = old->next;
    return old;
}

typedef enum verdict {
    AS_BEFORE,
    WITHIN_NOISE, /* the median is larger, but rounds of then and now overlap */
    SLOWER
} verdict;

/* Slower is what is slower by more than the percentage in every round than it was in any. */
static verdict judge(const bench_row *row, const json *old, double percent) {
    double before = json_real(old, "p50_us", 0), worst = json_real(old, "p50_high_us", before);
    if (row->p50 <= before * (1 + percent / 100))
        return AS_BEFORE;
    return row->low > worst ? SLOWER : WITHIN_NOISE;
}

static void tell_slower(const bench_row *row, const json *old) {
    double before = json_real(old, "p50_us", 0);
    fprintf(stderr,
            "slower: %s of %zu bytes takes %.3f us (%.3f to %.3f in %d round%s), %.0f %% more than the %.3f us (%.3f "
            "to %.3f) of the baseline\n",
            row->operation, row->bytes, row->p50, row->low, row->high, row->rounds, row->rounds == 1 ? "" : "s",
            (row->p50 / before - 1) * 100, before, json_real(old, "p50_low_us", before),
            json_real(old, "p50_high_us", before));
}

/* A comparison between a quiet machine and a busy one compares the others' programs. */
static void tell_load(const json *document, double now) {
    const json *machine = json_member(document, "machine");
    double before = machine != NULL ? json_real(machine, "load", 0) : 0;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    if (now > 0.5 * (double)processors || before > 0.5 * (double)processors)
        fprintf(stderr, "The load before was %.1f then and is %.1f now on %ld CPUs: measure both on a quiet machine.\n",
                before, now, processors);
}

static int compare(const json *document, const bench_job *job) {
    int compared = 0, counts[3] = { 0 };
    for (int i = 0; i < job->results->count; i++) {
        const bench_row *row = &job->results->rows[i];
        const json *old = row_before(document, row);
        if (old == NULL)
            continue;
        compared++;
        verdict found = judge(row, old, job->options->slower);
        counts[found]++;
        if (found == SLOWER)
            tell_slower(row, old);
    }
    if (compared == 0) {
        tool_fail(
            "%s has no row like those measured now: same operation, size, type, reduction, ranks, buffers and mode",
            job->options->baseline);
        return 1;
    }
    fprintf(stderr, "%d of %d rows that the baseline has are more than %.0f %% slower; %d differ within the noise\n",
            counts[SLOWER], compared, job->options->slower, counts[WITHIN_NOISE]);
    if (counts[SLOWER] + counts[WITHIN_NOISE] > 0)
        tell_load(document, job->results->load);
    return counts[SLOWER] > 0;
}

/* The parsed baseline, to be freed; NULL with the reason. */
static json *read_baseline(const char *path, char *problem, size_t room) {
    size_t bytes;
    char *text = json_read_file(path, &bytes);
    if (text == NULL) {
        snprintf(problem, room, "%s", strerror(errno));
        return NULL;
    }
    json *document = json_parse(text, bytes, problem, room);
    free(text);
    return document;
}

int bench_suspects(const bench_job *job, uint8_t *flags) {
    char problem[128];
    json *document = read_baseline(job->options->baseline, problem, sizeof problem);
    int found = 0;
    memset(flags, 0, (size_t)job->results->count);
    for (int i = 0; document != NULL && i < job->results->count; i++) {
        const json *old = row_before(document, &job->results->rows[i]);
        flags[i] = old != NULL && judge(&job->results->rows[i], old, job->options->slower) == SLOWER;
        found += flags[i];
    }
    json_free(document);
    return found;
}

int bench_report_baseline(const bench_job *job) {
    char problem[128];
    json *document = read_baseline(job->options->baseline, problem, sizeof problem);
    if (document == NULL)
        return tool_fail("%s cannot be read as what --json writes: %s", job->options->baseline, problem);
    int failed = compare(document, job);
    json_free(document);
    return failed;
}
