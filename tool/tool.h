/* SPDX-License-Identifier: Apache-2.0
 *
 * What the sub-commands of `tutti` share.
 *
 * A sub-command is one tool_command, listed in main.c's table. Its main gets the arguments from its own name on and
 * returns the exit status: 0 done, 1 failed or found something, 2 wrong usage.
 */
#ifndef TUTTI_TOOL_TOOL_H
#define TUTTI_TOOL_TOOL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <tutti/export.h>

typedef struct tool_command {
    const char *name;
    const char *summary; /* one line of `tutti help` */
    const char *help;    /* all of `tutti help NAME` */
    int (*main)(int argc, char **argv);
} tool_command;

extern const tool_command tool_run, tool_bench, tool_info, tool_doctor, tool_ps, tool_trace;

#define TOOL_USAGE 2

/* "tutti run: <text>" and where to read on, to stderr; returns TOOL_USAGE. `command` may be NULL. */
int tool_usage(const tool_command *command, const char *format, ...) TUTTI_PRINTF(2, 3);

/* What getopt_long returned and the sub-command does not know itself: -h prints its help, ':' is a missing value,
 * anything else no option, with the one of `longs` that may have been meant. Returns the exit status. getopt_long must
 * be silent: opterr 0, and ':' before the letters. */
struct option;
int tool_other_option(const tool_command *command, int option, char *const *argv, const struct option *longs);

/* "tutti: <text>" to stderr; returns 1. */
int tool_fail(const char *format, ...) TUTTI_PRINTF(1, 2);

/* Of `names` the one that somebody may have meant who typed `name`; NULL when none is near. */
const char *tool_nearest(const char *name, const char *const *names, size_t count);

/* Whether to colour what goes to `descriptor`: a terminal, and neither NO_COLOR nor TERM=dumb. */
bool tool_colour(int descriptor);

/* "was killed by signal 9 (Killed)", "exited with status 3". */
void tool_wait_text(int wait_status, char *text, size_t bytes);

/* "0", "0 and 1", "0, 1 and 3", "0-5 and 7": ranks for a sentence. `chosen` has `count` flags. */
void tool_rank_list(const bool *chosen, int count, char *text, size_t bytes);

#endif
