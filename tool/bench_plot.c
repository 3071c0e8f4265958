/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti bench --plot FILE.svg`: the median time over the size, both axes logarithmic. Up to three curves have a band
 * from minimum to 99th percentile; more would hide each other. What has no size (a barrier) is a dashed line across.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

enum {
    WIDTH = 900,
    HEIGHT = 570,
    LEFT = 80,
    RIGHT = 170,
    TOP = 65,
    BOTTOM = 60,
    LABEL = 60,    /* pixels that a label of the size takes, with room */
    WITH_BANDS = 3 /* curves, at most */
};

static const char *const colours[] = { "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000" };
enum {
    COLOURS = sizeof colours / sizeof colours[0]
};

typedef struct axes {
    double x0, x1, y0, y1; /* in powers: of two and of ten */
} axes;

static double x_of(const axes *axes, double bytes) {
    return LEFT + (log2(bytes) - axes->x0) / (axes->x1 - axes->x0) * (WIDTH - LEFT - RIGHT);
}

static double y_of(const axes *axes, double us) {
    return HEIGHT - BOTTOM - (log10(us) - axes->y0) / (axes->y1 - axes->y0) * (HEIGHT - TOP - BOTTOM);
}

/* Times that can be drawn on a logarithmic axis. */
static bool drawn(const bench_row *row) {
    return row->p50 > 0 && row->min > 0;
}

static axes axes_of(const bench_results *results) {
    axes axes = { 64, 0, 9, -9 };
    for (int i = 0; i < results->count; i++) {
        const bench_row *row = &results->rows[i];
        if (!drawn(row))
            continue;
        if (row->bytes > 0) {
            axes.x0 = fmin(axes.x0, floor(log2((double)row->bytes)));
            axes.x1 = fmax(axes.x1, ceil(log2((double)row->bytes)));
        }
        axes.y0 = fmin(axes.y0, floor(log10(row->min)));
        axes.y1 = fmax(axes.y1, ceil(log10(row->p99)));
    }
    if (axes.x0 > axes.x1)
        axes.x0 = 0;
    axes.x1 = fmax(axes.x1, axes.x0 + 1);
    axes.y1 = fmax(axes.y1, axes.y0 + 1);
    return axes;
}

/* "10 ns", "1 µs", "100 ms", "1 s". */
static void duration_text(double us, char *text, size_t room) {
    static const struct {
        double us;
        const char *name;
    } units[] = { { 1e6, "s" }, { 1e3, "ms" }, { 1, "µs" }, { 1e-3, "ns" } };
    size_t unit = 0;
    while (unit < 3 && us < 0.999 * units[unit].us)
        unit++;
    snprintf(text, room, "%.3g %s", us / units[unit].us, units[unit].name);
}

/* Text for XML; what would end it is left out. */
static void put_text(FILE *file, const char *text) {
    for (; *text != '\0'; text++)
        fputs((char[2]){ strchr("<>&\"", *text) != NULL ? ' ' : *text, '\0' }, file);
}

static void draw_grid(FILE *file, const axes *axes) {
    char text[32];
    int powers = (int)(axes->x1 - axes->x0), most = (WIDTH - LEFT - RIGHT) / LABEL, step = 1;
    while (powers / step > most)
        step *= 2;
    for (int power = (int)axes->x0; power <= (int)axes->x1; power += step) {
        double x = x_of(axes, exp2(power));
        bench_bytes_text((size_t)1 << power, text, sizeof text);
        fprintf(file,
                "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" class=\"grid\"/><text x=\"%.1f\" y=\"%d\" "
                "text-anchor=\"middle\">%s</text>\n",
                x, TOP, x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 20, text);
    }
    for (int power = (int)axes->y0; power <= (int)axes->y1; power++) {
        double y = y_of(axes, pow(10, power));
        duration_text(pow(10, power), text, sizeof text);
        fprintf(file,
                "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" class=\"grid\"/><text x=\"%d\" y=\"%.1f\" "
                "text-anchor=\"end\">%s</text>\n",
                LEFT, y, WIDTH - RIGHT, y, LEFT - 8, y + 4, text);
    }
    fprintf(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">message size</text>\n", (LEFT + WIDTH - RIGHT) / 2,
            HEIGHT - 15);
    fprintf(file, "<text x=\"18\" y=\"%d\" text-anchor=\"middle\" transform=\"rotate(-90 18 %d)\">time</text>\n",
            HEIGHT / 2, HEIGHT / 2);
}

static void draw_band(FILE *file, const axes *axes, const bench_row *rows, int count, const char *colour) {
    fprintf(file, "<polygon fill=\"%s\" fill-opacity=\"0.12\" points=\"", colour);
    for (int i = 0; i < count; i++) {
        if (drawn(&rows[i]))
            fprintf(file, "%.1f,%.1f ", x_of(axes, (double)rows[i].bytes), y_of(axes, rows[i].min));
    }
    for (int i = count - 1; i >= 0; i--) {
        if (drawn(&rows[i]))
            fprintf(file, "%.1f,%.1f ", x_of(axes, (double)rows[i].bytes), y_of(axes, rows[i].p99));
    }
    fprintf(file, "\"/>\n");
}

static void draw_point(FILE *file, const axes *axes, const bench_row *row, const char *colour) {
    char time[32], bytes[32];
    duration_text(row->p50, time, sizeof time);
    bench_bytes_text(row->bytes, bytes, sizeof bytes);
    fprintf(file, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"><title>%s, %s: %s</title></circle>\n",
            x_of(axes, (double)row->bytes), y_of(axes, row->p50), colour, row->operation, bytes, time);
}

/* The rows are of one operation. */
static void draw_curve(FILE *file, const axes *axes, const bench_row *rows, int count, int number, bool band) {
    const char *colour = colours[number % COLOURS];
    bool sizeless = rows[0].bytes == 0;
    if (band && !sizeless)
        draw_band(file, axes, rows, count, colour);
    fprintf(file, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s points=\"", colour,
            sizeless ? " stroke-dasharray=\"6 4\"" : "");
    if (sizeless && drawn(&rows[0]))
        fprintf(file, "%d,%.1f %d,%.1f", LEFT, y_of(axes, rows[0].p50), WIDTH - RIGHT, y_of(axes, rows[0].p50));
    for (int i = 0; i < count && !sizeless; i++) {
        if (drawn(&rows[i]))
            fprintf(file, "%.1f,%.1f ", x_of(axes, (double)rows[i].bytes), y_of(axes, rows[i].p50));
    }
    fprintf(file, "\"/>\n");
    for (int i = 0; i < count && !sizeless; i++) {
        if (drawn(&rows[i]))
            draw_point(file, axes, &rows[i], colour);
    }
    fprintf(file, "<rect x=\"%d\" y=\"%d\" width=\"14\" height=\"4\" fill=\"%s\"/><text x=\"%d\" y=\"%d\">%s</text>\n",
            WIDTH - RIGHT + 15, TOP + 14 + number * 20, colour, WIDTH - RIGHT + 36, TOP + 20 + number * 20,
            rows[0].operation);
}

/* Rows of the operation that begins at `first`. */
static int rows_of(const bench_results *results, int first) {
    int end = first;
    while (end < results->count && strcmp(results->rows[end].operation, results->rows[first].operation) == 0)
        end++;
    return end - first;
}

static void draw_title(FILE *file, const bench_job *job, bool bands) {
    char machine[300];
    bench_machine_text(job->results, machine, sizeof machine);
    fprintf(file, "<text x=\"%d\" y=\"26\" font-size=\"16\">tutti %s: %d rank%s, %s, %s buffers, %s</text>\n", LEFT,
            tutti_version(), job->results->ranks, job->results->ranks == 1 ? "" : "s",
            tutti_dtype_name(job->options->dtype), job->options->private_buffers ? "private" : "symmetric",
            job->options->isolated ? "isolated calls" : "calls back to back");
    fprintf(file, "<text x=\"%d\" y=\"46\" fill=\"#555\">", LEFT);
    put_text(file, machine);
    fprintf(file, "; median%s</text>\n", bands ? ", band from minimum to 99th percentile" : "");
}

int bench_plot(const bench_job *job) {
    const bench_results *results = job->results;
    FILE *file = fopen(job->options->plot, "we");
    if (file == NULL)
        return tool_fail("writing %s: %s", job->options->plot, strerror(errno));
    axes axes = axes_of(results);
    int curves = 0;
    for (int first = 0; first < results->count; first += rows_of(results, first))
        curves++;
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" "
            "font-size=\"12\">\n",
            WIDTH, HEIGHT);
    fprintf(file, "<style>.grid{stroke:#ddd}</style><rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n", WIDTH, HEIGHT);
    draw_title(file, job, curves <= WITH_BANDS);
    draw_grid(file, &axes);
    for (int first = 0, number = 0; first < results->count; number++) {
        int count = rows_of(results, first);
        draw_curve(file, &axes, &results->rows[first], count, number, curves <= WITH_BANDS);
        first += count;
    }
    fprintf(file, "</svg>\n");
    if (fclose(file) != 0)
        return tool_fail("writing %s: %s", job->options->plot, strerror(errno));
    return 0;
}
