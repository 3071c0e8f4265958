/* SPDX-License-Identifier: Apache-2.0
 *
 * The log. Silent but for warnings unless TUTTI_LOG asks for more. A subsystem is the name of a room: "store", "job", …
 *
 *     TU_LOG(TUTTI_LOG_INFO, world->log, "world", "rank %d of %d found by %s", rank, size, launcher);
 *
 * `log` may be NULL: then the environment's setting decides and stderr is written.
 */
#ifndef TU_BASE_LOG_H
#define TU_BASE_LOG_H

#include <stdbool.h>

#include <tutti/log.h>

#include "base/error.h"

typedef struct tu_log tu_log; /* level per subsystem, sink, rank for the prefix; safe from any thread */

tutti_status tu_log_create(const char *spec, const char *file_pattern, tutti_log_callback *callback, void *user,
                           tu_log **log);
void tu_log_set_rank(tu_log *log, int rank);
void tu_log_free(tu_log *log);

TU_SHARED bool tu_log_wants(const tu_log *log, tutti_log_level level, const char *subsystem);
TU_SHARED void tu_log_write(const tu_log *log, tutti_log_level level, const char *subsystem, const char *format, ...)
    TUTTI_PRINTF(4, 5);

#define TU_LOG(level, log, subsystem, ...)                          \
    do {                                                            \
        if (tu_log_wants((log), (level), (subsystem)))              \
            tu_log_write((log), (level), (subsystem), __VA_ARGS__); \
    } while (0)

#endif
