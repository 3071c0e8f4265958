/* SPDX-License-Identifier: Apache-2.0
 *
 * One line per message, written with one call, so that lines of several ranks do not mix. The environment is read when
 * a log is made, never kept globally.
 */
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"

struct tu_log {
    tutti_log_level level;
    char rooms[256]; /* ",store,job," or "" for all */
    tutti_log_callback *callback;
    void *user;
    int fd; /* of the log file, -1: not opened; stderr when there is no pattern */
    char pattern[512];
    int rank;
};

static const char *const level_names[] = { "", "warn", "info", "debug", "trace" };

static tutti_status parse(const char *spec, tu_log *log) {
    size_t length = strcspn(spec, ":");
    for (int level = TUTTI_LOG_WARN; level <= TUTTI_LOG_TRACE; level++)
        if (strlen(level_names[level]) == length && strncasecmp(spec, level_names[level], length) == 0)
            log->level = (tutti_log_level)level;
    if (log->level == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "TUTTI_LOG is \"%s\"; it must be warn, info, debug or trace, and may go on with :room,room",
                        spec);
    if (spec[length] == ':' && spec[length + 1] != 0)
        snprintf(log->rooms, sizeof log->rooms, ",%s,", spec + length + 1);
    return TUTTI_OK;
}

tutti_status tu_log_create(const char *spec, const char *file_pattern, tutti_log_callback *callback, void *user,
                           tu_log **out) {
    tu_log *log = calloc(1, sizeof *log);
    if (log == NULL)
        return tu_error_memory("the log", sizeof *log);
    log->callback = callback;
    log->user = user;
    log->fd = -1;
    log->rank = -1;
    tutti_status status = parse(spec != NULL && spec[0] != 0 ? spec : "warn", log);
    if (status != TUTTI_OK) {
        free(log);
        return status;
    }
    if (file_pattern != NULL)
        snprintf(log->pattern, sizeof log->pattern, "%s", file_pattern);
    *out = log;
    return TUTTI_OK;
}

static void expand(const char *pattern, int rank, char *path, size_t bytes) {
    size_t used = 0;
    for (const char *p = pattern; *p != 0 && used + 1 < bytes; p++) {
        char piece[128] = { *p, 0 };
        if (p[0] == '%' && p[1] == 'h') {
            gethostname(piece, sizeof piece - 1);
            p++;
        } else if (p[0] == '%' && p[1] == 'p') {
            snprintf(piece, sizeof piece, "%d", (int)getpid());
            p++;
        } else if (p[0] == '%' && p[1] == 'r') {
            snprintf(piece, sizeof piece, "%d", rank);
            p++;
        }
        used += (size_t)snprintf(path + used, bytes - used, "%s", piece);
    }
}

void tu_log_set_rank(tu_log *log, int rank) {
    log->rank = rank;
    if (log->pattern[0] == 0 || log->fd >= 0)
        return;
    char path[1024] = "";
    expand(log->pattern, rank, path, sizeof path);
    /* Without waiting: a FIFO that nobody reads would hold up the program, now or when it is full. */
    struct stat found;
    log->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0644);
    const char *why = log->fd < 0 ? strerrordesc_np(errno) : NULL;
    if (log->fd >= 0 && (fstat(log->fd, &found) != 0 || S_ISFIFO(found.st_mode) || S_ISSOCK(found.st_mode))) {
        close(log->fd);
        log->fd = -1;
        why = "it is a pipe, whose reader could hold up the program";
    }
    if (log->fd < 0)
        fprintf(stderr, "tutti: warn: cannot write the log to %s (TUTTI_LOG_FILE): %s; logging to stderr\n", path, why);
}

void tu_log_free(tu_log *log) {
    if (log == NULL)
        return;
    if (log->fd >= 0)
        close(log->fd);
    free(log);
}

bool tu_log_wants(const tu_log *log, tutti_log_level level, const char *subsystem) {
    if (log == NULL) {
        tu_log from_environment = { 0 };
        const char *spec = secure_getenv("TUTTI_LOG");
        if (spec == NULL || spec[0] == 0)
            return level <= TUTTI_LOG_WARN;
        tutti_error_copy error;
        tu_error_save(&error);
        bool valid = parse(spec, &from_environment) == TUTTI_OK;
        tu_error_restore(&error);
        return valid ? tu_log_wants(&from_environment, level, subsystem) : level <= TUTTI_LOG_WARN;
    }
    if (level > log->level)
        return level == TUTTI_LOG_WARN;
    if (log->rooms[0] == 0 || level == TUTTI_LOG_WARN)
        return true;
    char room[64];
    snprintf(room, sizeof room, ",%s,", subsystem);
    return strstr(log->rooms, room) != NULL;
}

void tu_log_write(const tu_log *log, tutti_log_level level, const char *subsystem, const char *format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (log != NULL && log->callback != NULL) {
        log->callback(level, subsystem, text, log->user);
        return;
    }
    int64_t wall = tu_clock_wall();
    time_t seconds = (time_t)(wall / TU_SECOND);
    struct tm parts;
    localtime_r(&seconds, &parts);
    char who[32];
    if (log != NULL && log->rank >= 0)
        snprintf(who, sizeof who, "rank %d", log->rank);
    else
        snprintf(who, sizeof who, "pid %d", (int)getpid());
    char line[2304];
    int length =
        snprintf(line, sizeof line, "tutti %02d:%02d:%02d.%03d %s %s %s: %s\n", parts.tm_hour, parts.tm_min,
                 parts.tm_sec, (int)(wall % TU_SECOND / TU_MILLISECOND), who, level_names[level], subsystem, text);
    if (length >= (int)sizeof line) {
        length = sizeof line - 1;
        line[length - 1] = '\n';
    }
    int fd = log != NULL && log->fd >= 0 ? log->fd : STDERR_FILENO;
    ssize_t written = write(fd, line, (size_t)length);
    (void)written; /* nobody is left to tell */
}
