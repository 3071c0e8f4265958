/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernel says about a process: where it runs, since when, whether it still does, and how it ended. Only reads;
 * a process of another user or a host without /proc gives "do not know", never a guess.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "job/inner.h"

/* Reads a small file as a text; returns its length or -1. */
static ssize_t read_text(const char *path, char *text, size_t bytes) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = read(fd, text, bytes - 1);
    close(fd);
    if (length < 0)
        return -1;
    text[length] = '\0';
    while (length > 0 && text[length - 1] == '\n')
        text[--length] = '\0';
    return length;
}

tutti_status tu_process_place(char place[TU_PLACE_BYTES]) {
    char boot[48], network[32], pids[32];
    if (read_text("/proc/sys/kernel/random/boot_id", boot, sizeof boot) < 0)
        return tu_error_system(errno, "cannot read the boot id from /proc/sys/kernel/random/boot_id");
    ssize_t length = readlink("/proc/self/ns/net", network, sizeof network - 1);
    network[length > 0 ? length : 0] = '\0';
    length = readlink("/proc/self/ns/pid", pids, sizeof pids - 1);
    pids[length > 0 ? length : 0] = '\0';
    snprintf(place, TU_PLACE_BYTES, "%s %s %s", boot, network, pids);
    return TUTTI_OK;
}

/* The fields of /proc/PID/stat that matter here. */
typedef struct stat_fields {
    char state;
    unsigned long flags;
    uint64_t start_time;
    int exit_code;
} stat_fields;

static bool read_stat(int pid, stat_fields *fields) {
    char path[64], text[1024];
    /* One's own by another path to the same numbers: user-mode emulators make up /proc/self/stat. */
    if (pid == getpid())
        snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, pid);
    else
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (read_text(path, text, sizeof text) < 0)
        return false;
    char *at = strrchr(text, ')'); /* a name may hold anything, blanks and parentheses included */
    if (at == NULL)
        return false;
    memset(fields, 0, sizeof *fields);
    char *rest, *word = strtok_r(at + 1, " ", &rest);
    for (int field = 3; word != NULL; field++, word = strtok_r(NULL, " ", &rest)) {
        if (field == 3)
            fields->state = word[0];
        else if (field == 9)
            fields->flags = strtoul(word, NULL, 10);
        else if (field == 22)
            fields->start_time = strtoull(word, NULL, 10);
        else if (field == 52)
            fields->exit_code = (int)strtol(word, NULL, 10);
    }
    return fields->start_time != 0;
}

uint64_t tu_process_start_time(int pid) {
    stat_fields fields;
    return read_stat(pid, &fields) ? fields.start_time : 0;
}

bool tu_process_runs(int pid, uint64_t start_time) {
    stat_fields fields;
    return read_stat(pid, &fields) && fields.start_time == start_time && fields.state != 'Z' && fields.state != 'X';
}

int tu_pidfd_open(int pid, uint64_t start_time) {
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);                                /* always close-on-exec */
    if (pidfd >= 0 && start_time != 0 && tu_process_start_time(pid) != start_time) { /* somebody else has it now */
        close(pidfd);
        return -1;
    }
    return pidfd;
}

bool tu_pidfd_exited(int pidfd) {
    struct pollfd look = { .fd = pidfd, .events = POLLIN };
    return pidfd >= 0 && poll(&look, 1, 0) == 1 && (look.revents & POLLIN) != 0;
}

/* PIDFD_GET_INFO of Linux 6.15, which the headers of our oldest systems do not have. */
struct pidfd_information {
    uint64_t mask, cgroup_id;
    uint32_t pid, thread_group, parent, ids[8];
    int32_t exit_code;
};
#define GET_INFORMATION _IOWR(0xFF, 11, struct pidfd_information)
#define INFORMATION_EXIT (UINT64_C(1) << 3)
_Static_assert(sizeof(struct pidfd_information) == 64, "the first version of the kernel's structure");

static void set_wait_status(tu_fate *fate, int wait_status) {
    fate->known = true;
    fate->signal = wait_status & 0x7f;
    fate->exit_code = fate->signal != 0 ? 0 : (wait_status >> 8) & 0xff;
}

/* The kernel keeps the status of a process that was waited for, for those who hold a pidfd. */
static bool ask_pidfd(int pidfd, tu_fate *fate) {
    struct pidfd_information information = { .mask = INFORMATION_EXIT };
    if (pidfd < 0 || ioctl(pidfd, GET_INFORMATION, &information) != 0 || (information.mask & INFORMATION_EXIT) == 0)
        return false;
    fate->exited = true;
    set_wait_status(fate, information.exit_code);
    return true;
}

#define FLAG_EXITING 0x4UL /* PF_EXITING, in field 9 of stat since Linux 2.6 */

void tu_process_fate(int pid, uint64_t start_time, int pidfd, tu_fate *fate) {
    memset(fate, 0, sizeof *fate);
    bool over = tu_pidfd_exited(pidfd);
    stat_fields fields;
    if (!read_stat(pid, &fields) || fields.start_time != start_time) {
        fate->exited = true; /* and waited for */
        (void)ask_pidfd(pidfd, fate);
        return;
    }
    if (fields.state == 'T' || fields.state == 't')
        fields.exit_code = 0; /* of a stopped process it is the signal that stopped it */
    fate->exited = over || fields.state == 'Z' || fields.state == 'X';
    fate->exiting = fate->exited || (fields.flags & FLAG_EXITING) != 0 || fields.exit_code != 0;
    /* A status of 0 counts only once the process is over: until then the field has not been written. */
    if (fields.exit_code != 0 || over)
        set_wait_status(fate, fields.exit_code);
}

void tu_process_name(int pid, char *name, size_t bytes) {
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/comm", pid);
    if (pid <= 0 || read_text(path, name, bytes) < 0)
        name[0] = '\0';
}

void tu_hex(const uint8_t *bytes, size_t count, char *text) {
    for (size_t i = 0; i < count; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
}

tutti_status tu_random_bytes(void *bytes, size_t count) {
    ssize_t got = getrandom(bytes, count, 0); /* up to 256 bytes come whole */
    if (got != (ssize_t)count)
        return tu_error_system(got < 0 ? errno : EIO, "cannot get %zu random bytes from getrandom", count);
    return TUTTI_OK;
}
