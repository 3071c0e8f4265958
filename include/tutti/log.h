/* SPDX-License-Identifier: Apache-2.0
 *
 * Logging: to stderr, to a file per process, or to a callback of yours.
 *
 *     TUTTI_LOG=warn|info|debug|trace[:subsystem,…]     how much (default warn), and of which rooms (default all)
 *     TUTTI_LOG_FILE=path                               %h is replaced by the host, %p by the pid, %r by the rank
 *
 * A callback is set per world, in tutti_world_options.
 */
#ifndef TUTTI_LOG_H
#define TUTTI_LOG_H

#include <tutti/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tutti_log_level {
    TUTTI_LOG_WARN = 1,
    TUTTI_LOG_INFO = 2,
    TUTTI_LOG_DEBUG = 3,
    TUTTI_LOG_TRACE = 4
} tutti_log_level;

/* Called with one finished line, without a newline, from whichever thread logs; must not call Tutti. */
typedef void tutti_log_callback(tutti_log_level level, const char *subsystem, const char *line, void *user);

#ifdef __cplusplus
}
#endif
#endif
