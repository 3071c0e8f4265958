/* SPDX-License-Identifier: Apache-2.0
 *
 * What the ranks write: read from their pipes, cut into lines, tagged, coloured, merged and kept in files.
 *
 * A line is written whole: nothing of another rank comes between its parts. A line longer than LINE_LIMIT is cut. On a
 * terminal the beginning of a line whose end keeps us waiting is shown, so that a prompt can be answered.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "run.h"
#include "tool.h"

#define LINE_LIMIT ((size_t)1 << 20)
#define READ_BYTES ((size_t)1 << 16)
#define HELD_UP_MS 200                   /* between two looks around while nobody takes our output */
#define PROMPT_NS (100 * TU_MILLISECOND) /* how long a beginning waits for its end before it is shown */

typedef struct bytes {
    char *data;
    size_t used, room;
} bytes;

typedef struct stream {
    int pipe;     /* -1: at its end */
    int log;      /* file in --log-dir, or -1 */
    bytes line;   /* the beginning of a line whose end has not come yet */
    size_t shown; /* how much of it is on the terminal already */
    int64_t came; /* when the last of it came */
} stream;

struct output {
    int ranks, first_rank;
    bool tagged;
    bool coloured[2];
    bool terminal[2];
    int open_line;  /* stream whose unfinished line the terminal's cursor is in; -1 none */
    bool broken[2]; /* nobody reads our standard output (error) any more */
    bytes text;     /* gathered for one write */
    int signals;
    bool (*held_up)(void *argument);
    void *argument;
    stream streams[]; /* [2 * rank + (1 for standard error)] */
};

static bool append(bytes *to, const char *data, size_t count) {
    if (count == 0)
        return true;
    if (to->used + count > to->room) {
        size_t room = to->used + count + (to->room > 4096 ? to->room : 4096);
        char *larger = realloc(to->data, room);
        if (larger == NULL)
            return false; /* this much of the output is lost; the job goes on */
        to->data = larger;
        to->room = room;
    }
    memcpy(to->data + to->used, data, count);
    to->used += count;
    return true;
}

/* Writes all to a log file. */
static bool write_all(int descriptor, const char *data, size_t count) {
    while (count > 0) {
        ssize_t wrote = write(descriptor, data, count);
        if (wrote >= 0) {
            data += wrote;
            count -= (size_t)wrote;
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

/* Writes all to our standard output (error), waiting as long as it takes: who holds up our output holds up the ranks,
 * as without us. But a write that blocks would hold up signals too, so it writes no more at a time than a pipe with
 * room surely takes, and looks around while there is none. */
static bool write_patiently(output *out, int descriptor, const char *data, size_t count) {
    while (count > 0) {
        struct pollfd polled[2] = { { .fd = descriptor, .events = POLLOUT }, { .fd = out->signals, .events = POLLIN } };
        poll(polled, 2, HELD_UP_MS);
        /* It heeds signals in any case, but gives nothing up that can be written. */
        bool over = (polled[1].revents != 0 || polled[0].revents == 0) && out->held_up(out->argument);
        if (polled[0].revents == 0 && over)
            return false;
        if (polled[0].revents == 0)
            continue;
        ssize_t wrote = write(descriptor, data, count < PIPE_BUF ? count : PIPE_BUF);
        if (wrote < 0 && errno != EAGAIN && errno != EINTR)
            return false;
        data += wrote > 0 ? wrote : 0;
        count -= wrote > 0 ? (size_t)wrote : 0;
    }
    return true;
}

void output_tell(output *out, const char *format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    size_t count = length < (int)sizeof line ? (size_t)length : sizeof line - 1;
    if (out != NULL)
        (void)write_patiently(out, STDERR_FILENO, line, count);
    else
        (void)write_all(STDERR_FILENO, line, count);
}

static int open_log(const char *folder, int rank, const char *kind) {
    char path[4096];
    snprintf(path, sizeof path, "%s/rank-%d.%s", folder, rank, kind);
    int descriptor = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (descriptor < 0)
        tool_fail("cannot write %s: %s", path, strerror(errno));
    return descriptor;
}

output *output_open(const run_options *options, int (*pipes)[2], int signals, bool (*held_up)(void *argument),
                    void *argument) {
    output *out = calloc(1, sizeof *out + 2 * (size_t)options->ranks * sizeof *out->streams);
    if (out == NULL) {
        tool_fail("out of memory for the output of %d ranks", options->ranks);
        return NULL;
    }
    out->ranks = options->ranks;
    out->first_rank = options->first_rank;
    out->tagged = !options->quiet;
    out->open_line = -1;
    out->signals = signals;
    out->held_up = held_up;
    out->argument = argument;
    for (int i = 0; i < 2; i++) {
        out->coloured[i] = tool_colour(1 + i);
        out->terminal[i] = isatty(1 + i) != 0;
    }
    for (int i = 0; i < 2 * options->ranks; i++) {
        out->streams[i].pipe = pipes[i][0];
        out->streams[i].log = -1;
        fcntl(pipes[i][0], F_SETFL, O_NONBLOCK);
        if (options->log_dir == NULL)
            continue;
        out->streams[i].log = open_log(options->log_dir, options->first_rank + i / 2, i % 2 == 0 ? "out" : "err");
        if (out->streams[i].log < 0) {
            output_close(out);
            return NULL;
        }
    }
    return out;
}

static void close_stream(stream *s) {
    if (s->pipe >= 0)
        close(s->pipe);
    if (s->log >= 0)
        close(s->log);
    s->pipe = s->log = -1;
    free(s->line.data);
    s->line = (bytes){ 0 };
}

static void put_tag(output *out, int rank, int kind) {
    static const char *const colours[] = { "36", "33", "32", "35", "34", "31", "96", "93", "92", "95", "94", "91" };
    char tag[48];
    int length = out->coloured[kind] ? snprintf(tag, sizeof tag, "\033[%sm[%d]\033[0m ",
                                                colours[rank % (int)(sizeof colours / sizeof *colours)], rank)
                                     : snprintf(tag, sizeof tag, "[%d] ", rank);
    append(&out->text, tag, (size_t)length);
}

/* Nobody reads this kind of our output any more: the ranks learn it as they would from a closed pipe of their own. */
static void end_kind(output *out, int kind) {
    out->broken[kind] = true;
    for (int i = kind; i < 2 * out->ranks; i += 2)
        if (out->streams[i].log < 0 && out->streams[i].pipe >= 0)
            close_stream(&out->streams[i]);
}

static void flush(output *out, int kind) {
    if (out->text.used > 0 && !out->broken[kind] && !write_patiently(out, 1 + kind, out->text.data, out->text.used))
        end_kind(out, kind);
    out->text.used = 0;
}

/* Begins a piece of a line: at the cursor where it goes on, else on a line of its own. */
static void begin_piece(output *out, int index) {
    if (out->open_line == index)
        return;
    if (out->open_line >= 0 && out->terminal[index % 2]) {
        append(&out->text, "\n", 1);
        out->open_line = -1;
    }
    if (out->tagged)
        put_tag(out, out->first_rank + index / 2, index % 2);
}

/* The rest of a line: what was kept and not shown, then `data`; ends it. */
static void end_piece(output *out, int index, const char *data, size_t count, bool add_newline) {
    stream *s = &out->streams[index];
    begin_piece(out, index);
    append(&out->text, s->line.data + s->shown, s->line.used - s->shown);
    append(&out->text, data, count);
    if (add_newline)
        append(&out->text, "\n", 1);
    s->line.used = s->shown = 0;
    if (out->open_line == index)
        out->open_line = -1;
}

/* Moves whole lines from the stream's line and the new data to the text to write. */
static void take(output *out, int index, const char *data, size_t count) {
    stream *s = &out->streams[index];
    if (s->log >= 0)
        write_all(s->log, data, count);
    while (count > 0) {
        const char *end = memchr(data, '\n', count);
        size_t part = end != NULL ? (size_t)(end - data) + 1 : count;
        bool whole = end != NULL || s->line.used + part >= LINE_LIMIT;
        if (!whole) {
            append(&s->line, data, part);
            s->came = tu_clock_now();
            return;
        }
        end_piece(out, index, data, part, end == NULL);
        data += part;
        count -= part;
    }
}

static void finish_line(output *out, int index) {
    if (out->streams[index].line.used > 0)
        end_piece(out, index, NULL, 0, true);
}

/* One read; false when nothing more is there for now. */
static bool read_stream(output *out, int index) {
    static char data[READ_BYTES];
    stream *s = &out->streams[index];
    if (s->pipe < 0)
        return false;
    ssize_t count = read(s->pipe, data, sizeof data);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (count > 0)
        take(out, index, data, (size_t)count);
    else
        finish_line(out, index);
    flush(out, index % 2);
    if (count <= 0)
        close_stream(s);
    return count > 0;
}

int output_poll(const output *out, struct pollfd *polled) {
    int count = 0;
    for (int i = 0; i < 2 * out->ranks; i++)
        if (out->streams[i].pipe >= 0)
            polled[count++] = (struct pollfd){ .fd = out->streams[i].pipe, .events = POLLIN };
    return count;
}

void output_read(output *out, const struct pollfd *polled, int count) {
    int next = 0; /* `polled` is in the order of the streams, which lack those that ended since */
    for (int i = 0; i < 2 * out->ranks && next < count; i++) {
        if (out->streams[i].pipe != polled[next].fd)
            continue;
        if (polled[next++].revents != 0)
            read_stream(out, i);
    }
}

static bool waits_to_be_shown(const output *out, int index) {
    const stream *s = &out->streams[index];
    return out->terminal[index % 2] && s->line.used > s->shown;
}

int output_timeout(const output *out) {
    int64_t first = INT64_MAX;
    for (int i = 0; i < 2 * out->ranks; i++)
        if (waits_to_be_shown(out, i) && out->streams[i].came + PROMPT_NS < first)
            first = out->streams[i].came + PROMPT_NS;
    return first == INT64_MAX ? -1 : (int)((tu_deadline_left(first) + TU_MILLISECOND - 1) / TU_MILLISECOND);
}

void output_show_prompts(output *out) {
    int64_t now = tu_clock_now();
    for (int i = 0; i < 2 * out->ranks; i++) {
        stream *s = &out->streams[i];
        if (!waits_to_be_shown(out, i) || now < s->came + PROMPT_NS)
            continue;
        begin_piece(out, i);
        append(&out->text, s->line.data + s->shown, s->line.used - s->shown);
        s->shown = s->line.used;
        out->open_line = i;
        flush(out, i % 2);
    }
}

void output_answered(output *out) {
    out->open_line = -1;
}

void output_drain(output *out, int rank) {
    for (int i = 0; i < 2 * out->ranks; i++)
        if (rank < 0 || i / 2 == rank)
            while (read_stream(out, i))
                continue;
}

void output_close(output *out) {
    for (int i = 0; i < 2 * out->ranks; i++) {
        finish_line(out, i);
        flush(out, i % 2);
        close_stream(&out->streams[i]);
    }
    free(out->text.data);
    free(out);
}
