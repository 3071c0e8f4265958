/* SPDX-License-Identifier: Apache-2.0
 *
 * `tutti bench --plot FILE.svg`: the median time over the size, both axes logarithmic, with a band from minimum to 99th
 * percentile.
 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "bench.h"

enum {
    WIDTH = 900,
    HEIGHT = 560,
    LEFT = 80,
    RIGHT = 170,
    TOP = 50,
    BOTTOM = 60
};

static const char *const colours[] = { "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000" };
enum {
    COLOURS = sizeof colours / sizeof colours[0]
};

typedef struct axes {
    double x0, x1, y0, y1; /* in powers: of two and of ten */
} axes;

static double x_of(const axes *a, double bytes) {
    return LEFT + (log2(bytes) - a->x0) / (a->x1 - a->x0) * (WIDTH - LEFT - RIGHT);
}

static double y_of(const axes *a, double us) {
    return HEIGHT - BOTTOM - (log10(us) - a->y0) / (a->y1 - a->y0) * (HEIGHT - TOP - BOTTOM);
}

static bool drawn(const bench_row *row) {
    return row->bytes > 0 && row->p50 > 0 && row->min > 0;
}

static axes axes_of(const bench_results *results) {
    axes a = { 64, 0, 9, -9 };
    for (int i = 0; i < results->count; i++) {
        const bench_row *row = &results->rows[i];
        if (!drawn(row))
            continue;
        a.x0 = fmin(a.x0, floor(log2((double)row->bytes)));
        a.x1 = fmax(a.x1, ceil(log2((double)row->bytes)));
        a.y0 = fmin(a.y0, floor(log10(row->min)));
        a.y1 = fmax(a.y1, ceil(log10(row->p99)));
    }
    a.x1 = fmax(a.x1, a.x0 + 1);
    a.y1 = fmax(a.y1, a.y0 + 1);
    return a;
}

static void draw_grid(FILE *file, const axes *a) {
    char text[32];
    int step = a->x1 - a->x0 > 16 ? 4 : a->x1 - a->x0 > 8 ? 2 : 1;
    for (int power = (int)a->x0; power <= (int)a->x1; power += step) {
        double x = x_of(a, exp2(power));
        bench_bytes_text((size_t)1 << power, text, sizeof text);
        fprintf(file,
                "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" class=\"grid\"/><text x=\"%.1f\" y=\"%d\" "
                "text-anchor=\"middle\">%s</text>\n",
                x, TOP, x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 20, text);
    }
    for (int power = (int)a->y0; power <= (int)a->y1; power++) {
        double y = y_of(a, pow(10, power));
        fprintf(file,
                "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" class=\"grid\"/><text x=\"%d\" y=\"%.1f\" "
                "text-anchor=\"end\">%g</text>\n",
                LEFT, y, WIDTH - RIGHT, y, LEFT - 8, y + 4, pow(10, power));
    }
    fprintf(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">message size</text>\n", (LEFT + WIDTH - RIGHT) / 2,
            HEIGHT - 15);
    fprintf(
        file,
        "<text x=\"20\" y=\"%d\" text-anchor=\"middle\" transform=\"rotate(-90 20 %d)\">time, microseconds</text>\n",
        HEIGHT / 2, HEIGHT / 2);
}

/* Rows [first, end) are of one operation. */
static void draw_curve(FILE *file, const axes *a, const bench_results *results, int first, int end, int number) {
    const char *colour = colours[number % COLOURS];
    fprintf(file, "<polygon fill=\"%s\" fill-opacity=\"0.12\" points=\"", colour);
    for (int i = first; i < end; i++) {
        if (drawn(&results->rows[i]))
            fprintf(file, "%.1f,%.1f ", x_of(a, (double)results->rows[i].bytes), y_of(a, results->rows[i].min));
    }
    for (int i = end - 1; i >= first; i--) {
        if (drawn(&results->rows[i]))
            fprintf(file, "%.1f,%.1f ", x_of(a, (double)results->rows[i].bytes), y_of(a, results->rows[i].p99));
    }
    fprintf(file, "\"/>\n<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" points=\"", colour);
    for (int i = first; i < end; i++) {
        if (drawn(&results->rows[i]))
            fprintf(file, "%.1f,%.1f ", x_of(a, (double)results->rows[i].bytes), y_of(a, results->rows[i].p50));
    }
    fprintf(file, "\"/>\n");
    for (int i = first; i < end; i++) {
        const bench_row *row = &results->rows[i];
        if (drawn(row))
            fprintf(
                file,
                "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"><title>%s, %zu bytes: %.3f us</title></circle>\n",
                x_of(a, (double)row->bytes), y_of(a, row->p50), colour, row->operation, row->bytes, row->p50);
    }
    fprintf(file, "<rect x=\"%d\" y=\"%d\" width=\"14\" height=\"4\" fill=\"%s\"/><text x=\"%d\" y=\"%d\">%s</text>\n",
            WIDTH - RIGHT + 15, TOP + 14 + number * 20, colour, WIDTH - RIGHT + 36, TOP + 20 + number * 20,
            results->rows[first].operation);
}

int bench_plot(const bench_job *job) {
    const bench_results *results = job->results;
    FILE *file = fopen(job->options->plot, "we");
    if (file == NULL)
        return tool_fail("writing %s: %s", job->options->plot, strerror(errno));
    axes a = axes_of(results);
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" "
            "font-size=\"12\">\n",
            WIDTH, HEIGHT);
    fprintf(file, "<style>.grid{stroke:#ddd}</style><rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n", WIDTH, HEIGHT);
    fprintf(file,
            "<text x=\"%d\" y=\"28\" font-size=\"16\">tutti %s, %d ranks, %s %s: median, and minimum to 99th "
            "percentile</text>\n",
            LEFT, tutti_version(), results->ranks, tutti_dtype_name(job->options->dtype),
            job->options->private_buffers ? "private" : "symmetric");
    draw_grid(file, &a);
    for (int first = 0, number = 0; first < results->count; number++) {
        int end = first;
        while (end < results->count && strcmp(results->rows[end].operation, results->rows[first].operation) == 0)
            end++;
        draw_curve(file, &a, results, first, end, number);
        first = end;
    }
    fprintf(file, "</svg>\n");
    if (fclose(file) != 0)
        return tool_fail("writing %s: %s", job->options->plot, strerror(errno));
    return 0;
}
