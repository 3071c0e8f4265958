/* SPDX-License-Identifier: Apache-2.0
 *
 * The line that tells how far a training run is.
 */
#include <tutti/data.h>

#include <stdlib.h>
#include <unistd.h>

#include <tutti/functional.h>

#include "tensor/thread.h"

struct tt_progress {
    tt_progress_options options;
    bool terminal;
    int64_t begin, drawn; /* times, in nanoseconds */
    int64_t waited;       /* for other ranks, before it began */
    int64_t steps, tokens;
    double loss;
};

static const int64_t redraw_ns = 100000000;

tt_progress *tt_progress_new(const tt_progress_options *options) {
    tt_progress_options full = TT_PROGRESS_OPTIONS_INIT;
    if (tu_self()->pending != TUTTI_OK ||
        tu_pending_take(tu_options_copy("tt_progress_options", options, &full, sizeof full)) != TUTTI_OK)
        return NULL;
    if (full.steps < 0 || full.done < 0) {
        tu_fail(TUTTI_ERROR_ARGUMENT, "tt_progress_options: steps is %lld and done is %lld; neither may be negative",
                (long long)full.steps, (long long)full.done);
        return NULL;
    }
    tt_progress *progress = calloc(1, sizeof *progress);
    if (progress == NULL) {
        tu_pending_take(tu_error_memory("a progress line", sizeof *progress));
        return NULL;
    }
    full.file = full.file != NULL ? full.file : stderr;
    progress->options = full;
    progress->terminal = isatty(fileno(full.file)) != 0;
    progress->begin = tutti_clock();
    progress->waited = tt_waited_ns(full.world);
    return progress;
}

/* "840", "12.3k", "4.56M" */
static const char *short_number(double value, char *buffer, size_t size) {
    static const char *const units[] = { "", "k", "M", "G" };
    int unit = 0;
    for (; value >= 1000 && unit < 3; unit++)
        value /= 1000;
    snprintf(buffer, size, "%.*f%s", unit == 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2, value, units[unit]);
    return buffer;
}

/* "0:07", "12:34", "1:02:03" */
static const char *duration(double seconds, char *buffer, size_t size) {
    long long whole = seconds < 1e9 ? (long long)seconds : 1000000000;
    if (whole >= 3600)
        snprintf(buffer, size, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
    else
        snprintf(buffer, size, "%lld:%02lld", whole / 60, whole % 60);
    return buffer;
}

static void draw(tt_progress *progress, int64_t now, bool last) {
    FILE *file = progress->options.file;
    char rate[32], time[32];
    double seconds = (double)(now - progress->begin) * 1e-9;
    int64_t done = progress->options.done + progress->steps, left = progress->options.steps - done;
    fprintf(file, "%sstep %lld", progress->terminal ? "\r\033[K" : "", (long long)done);
    if (progress->options.steps > 0)
        fprintf(file, "/%lld", (long long)progress->options.steps);
    if (progress->steps > 0)
        fprintf(file, "  loss %.4f", progress->loss);
    if (progress->tokens > 0 && seconds > 0)
        fprintf(file, "  %s tokens/s", short_number((double)progress->tokens / seconds, rate, sizeof rate));
    if (progress->options.world != NULL && now > progress->begin)
        fprintf(file, "  %.0f %% waiting",
                100 * (double)(tt_waited_ns(progress->options.world) - progress->waited) /
                    (double)(now - progress->begin));
    if (last)
        fprintf(file, "  in %s\n", duration(seconds, time, sizeof time));
    else if (progress->options.steps > 0 && progress->steps > 0)
        fprintf(file, "  %s left",
                duration(left > 0 ? seconds / (double)progress->steps * (double)left : 0, time, sizeof time));
    fflush(file);
    progress->drawn = now;
}

void tt_progress_step(tt_progress *progress, double loss, int64_t tokens) {
    if (progress == NULL)
        return;
    progress->steps++;
    progress->tokens += tokens;
    progress->loss = loss;
    int64_t now = tutti_clock();
    if (progress->terminal && (progress->drawn == 0 || now - progress->drawn >= redraw_ns))
        draw(progress, now, false);
}

void tt_progress_end(tt_progress *progress) {
    if (progress == NULL)
        return;
    draw(progress, tutti_clock(), true);
    free(progress);
}
