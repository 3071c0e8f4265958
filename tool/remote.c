/* SPDX-License-Identifier: Apache-2.0
 *
 * Commands on other hosts; see remote.h.
 */
#include "remote.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"

/* In the child: becomes ssh, or the shell that runs --rsh with the host and the line as its last arguments. */
_Noreturn static void become(const char *rsh, const char *host, const char *line) {
    char *script = NULL;
    setpgid(0, 0); /* so that all of it can be ended */
    if (rsh == NULL)
        execlp("ssh", "ssh", "-o", "BatchMode=yes", "--", host, line, (char *)NULL);
    else if (asprintf(&script, "exec %s \"$@\"", rsh) > 0)
        execl("/bin/sh", "sh", "-c", script, "rsh", host, line, (char *)NULL);
    _exit(127);
}

static void close_both(const int ends[2]) {
    close(ends[0]);
    close(ends[1]);
}

bool remote_start(remote_command *command, const char *rsh, const char *host, const char *line, bool with_input,
                  bool with_errors) {
    int in[2] = { -1, -1 }, out[2];
    *command = (remote_command){ .to = -1, .from = -1, .deadline = tu_deadline(REMOTE_PATIENCE_S * TU_SECOND) };
    if (pipe2(out, O_CLOEXEC) != 0)
        return false;
    if (with_input && pipe2(in, O_CLOEXEC) != 0) {
        close_both(out);
        return false;
    }
    command->pid = fork();
    if (command->pid == 0) {
        int input = with_input ? in[0] : open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (dup2(input, 0) == 0 && dup2(out[1], 1) == 1 && (!with_errors || dup2(out[1], 2) == 2))
            become(rsh, host, line);
        _exit(127);
    }
    close(out[1]);
    if (with_input)
        close(in[0]);
    command->from = out[0];
    command->to = in[1];
    if (command->pid > 0)
        return true;
    close(out[0]);
    if (with_input)
        close(in[1]);
    return false;
}

/* Reads more of what it says; false: nothing comes any more, or not in time. */
static bool read_more(remote_command *command) {
    int64_t left = tu_deadline_left(command->deadline);
    struct pollfd polled = { .fd = command->from, .events = POLLIN };
    if (command->over || command->used == sizeof command->line || left <= 0 ||
        poll(&polled, 1, (int)(left / TU_MILLISECOND) + 1) <= 0)
        return false;
    ssize_t count = read(command->from, command->line + command->used, sizeof command->line - command->used);
    command->over = count <= 0;
    command->used += count > 0 ? (size_t)count : 0;
    return count > 0;
}

static void drop(remote_command *command, size_t bytes) {
    command->used -= bytes;
    memmove(command->line, command->line + bytes, command->used);
}

bool remote_line(remote_command *command, char *text, size_t bytes) {
    char *end;
    while ((end = memchr(command->line, '\n', command->used)) == NULL)
        if (!read_more(command))
            break;
    size_t length = end != NULL ? (size_t)(end - command->line) : command->used;
    if (end == NULL && length == 0)
        return false;
    snprintf(text, bytes, "%.*s", (int)length, command->line);
    drop(command, length + (end != NULL));
    return true;
}

bool remote_bytes(remote_command *command, char *to, size_t bytes) {
    while (bytes > 0) {
        if (command->used == 0 && !read_more(command))
            return false;
        size_t part = command->used < bytes ? command->used : bytes;
        memcpy(to, command->line, part);
        drop(command, part);
        to += part;
        bytes -= part;
    }
    return true;
}

bool remote_say(remote_command *command, const char *text) {
    struct sigaction ignore = { .sa_handler = SIG_IGN }, before; /* one that has ended is seen by what does not come */
    sigaction(SIGPIPE, &ignore, &before);
    bool whole = write(command->to, text, strlen(text)) == (ssize_t)strlen(text);
    sigaction(SIGPIPE, &before, NULL);
    return whole;
}

int remote_end(remote_command *command) {
    if (command->to >= 0)
        close(command->to);
    while (command->used = 0, read_more(command))
        continue;
    int status, result = -1;
    if (!command->over)
        kill(-command->pid, SIGKILL);
    close(command->from);
    while (waitpid(command->pid, &status, 0) != command->pid)
        if (errno != EINTR)
            return -1;
    if (command->over)
        result = status;
    return result;
}

const char *remote_next_host(char **rest) {
    char *item;
    while ((item = strsep(rest, ",")) != NULL) {
        char *colon = strrchr(item, ':');
        if (colon != NULL)
            *colon = '\0';
        if (item[0] != '\0' && item[0] != '-')
            return item;
    }
    return NULL;
}

void remote_self(char *text, size_t bytes) {
    char self[4096] = "";
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    self[length > 0 ? length : 0] = '\0';
    snprintf(text, bytes, "'%s'", self);
}
