/* SPDX-License-Identifier: Apache-2.0
 *
 * Commands on other hosts, by ssh or by whatever --rsh says, for the sub-commands that ask there.
 */
#ifndef TUTTI_TOOL_REMOTE_H
#define TUTTI_TOOL_REMOTE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define REMOTE_PATIENCE_S 20 /* with one command on another host */

typedef struct remote_command {
    pid_t pid;
    int to, from; /* its standard input, -1: /dev/null; and its output */
    int64_t deadline;
    char line[4096]; /* what came and was not read yet */
    size_t used;
    bool over; /* nothing more will come */
} remote_command;

/* Starts `line` in the shell of the host. rsh: NULL for ssh. with_input: `to` is open; with_errors: what it says on its
 * standard error comes with its output, else it goes to ours. False: it cannot be started. */
bool remote_start(remote_command *command, const char *rsh, const char *host, const char *line, bool with_input,
                  bool with_errors);
/* A line without its end, or so many bytes; false: there is none, or the time is over. */
bool remote_line(remote_command *command, char *text, size_t bytes);
bool remote_bytes(remote_command *command, char *to, size_t bytes);
bool remote_say(remote_command *command, const char *text);
/* Ends it, by force when its time is over. Its wait status; -1: it did not end in time. */
int remote_end(remote_command *command);

/* The next host of a list like "a:4,user@b", without its ranks; NULL: there is none. `rest` begins with a copy of the
 * list, which is changed. */
const char *remote_next_host(char **rest);

/* This program's path, for the shell of another host, quoted. */
void remote_self(char *text, size_t bytes);

/* "ssh", or the word of --rsh. */
static inline const char *remote_name(const char *rsh) {
    return rsh != NULL ? rsh : "ssh";
}

#endif
