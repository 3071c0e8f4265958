/* SPDX-License-Identifier: Apache-2.0
 *
 * May this much shared memory be reserved? Reserving more than a cgroup allows gets the process killed instead of
 * refused, and ranks that ask at the same time would all be told yes. So each asks under one lock, against the limit of
 * every cgroup above it, MemAvailable, RLIMIT_FSIZE and RLIMIT_AS, less what others are just about to reserve; then it
 * reserves without the lock, so that large reservations go on side by side.
 *
 * What other programs take meanwhile is beyond us.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "job/inner.h"

/* The lock is held for microseconds, unless its holder is stopped, or waits for a CPU behind all the others. */
#define LOCK_SECONDS(ranks) (10 + (ranks) / 20)
#define SETTLE_LIMIT (10 * TU_SECOND) /* how long others' pending reservations are waited for before saying no */
#define LINE 512

/* ---- the lock ---- */

/* A thousand ranks may queue for longer than the limit, each for its moment: only a lock that nobody leaves any more is
 * given up. */
static tutti_status lock_ledger(tu_job *job) {
    uint64_t turns, before;
    int error, limit = LOCK_SECONDS(job->size);
    do {
        before = atomic_load_explicit(&job->page->ledger_turns, memory_order_relaxed);
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += limit;
        error = pthread_mutex_timedlock(&job->page->ledger, &until);
        turns = atomic_load_explicit(&job->page->ledger_turns, memory_order_relaxed);
    } while (error == ETIMEDOUT && turns != before);
    if (error == EOWNERDEAD) /* its amounts are in its slot, which counts no more */
        error = pthread_mutex_consistent(&job->page->ledger);
    if (error == ETIMEDOUT)
        return tu_error(TUTTI_ERROR_TIMEOUT,
                        "another rank of this host has held the memory ledger's lock for %d s; it may be "
                        "stopped (see `tutti ps`)",
                        limit);
    return error == 0 ? TUTTI_OK : tu_error_system(error, "cannot lock the memory ledger");
}

static void unlock_ledger(tu_job *job) {
    atomic_fetch_add_explicit(&job->page->ledger_turns, 1, memory_order_relaxed);
    pthread_mutex_unlock(&job->page->ledger);
}

static int64_t pending_of_others(tu_job *job) {
    int64_t sum = 0;
    for (int rank = 0; rank < job->size; rank++)
        if (rank != job->rank && tu_rank_state_of(job, rank) != TU_RANK_DEAD)
            sum += atomic_load_explicit(&tu_page_slot(job->page, rank)->pending, memory_order_relaxed);
    return sum;
}

/* ---- what is there ---- */

/* The number after `name` in a file of lines "name number …"; -1 when it is not there. */
static int64_t number_in_file(const char *path, const char *name) {
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return -1;
    char line[LINE];
    int64_t number = -1;
    size_t length = strlen(name);
    while (number < 0 && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, name, length) == 0 && (line[length] == ' ' || line[length] == '\t'))
            number = strtoll(line + length, NULL, 10);
    fclose(file);
    return number;
}

/* The one number in a file; -1 when there is none ("max"). */
static int64_t number_of_file(const char *path) {
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return -1;
    char line[64], *end;
    int64_t number = -1;
    if (fgets(line, sizeof line, file) != NULL) {
        unsigned long long value = strtoull(line, &end, 10);
        if (end != line)
            number = value > INT64_MAX ? INT64_MAX : (int64_t)value;
    }
    fclose(file);
    return number;
}

typedef struct cgroup_files {
    const char *limit, *usage, *inactive, *active;
} cgroup_files;
static const cgroup_files version1 = { "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                                       "total_active_file" };
static const cgroup_files version2 = { "memory.max", "memory.current", "inactive_file", "active_file" };

/* What one cgroup still allows: limit less usage, plus the file cache in it, which the kernel drops first. */
static int64_t cgroup_room(const char *folder, const cgroup_files *files, int64_t *limit) {
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/%s", folder, files->limit);
    *limit = number_of_file(path);
    if (*limit < 0 || *limit > INT64_MAX / 2)
        return INT64_MAX;
    snprintf(path, sizeof path, "%s/%s", folder, files->usage);
    int64_t usage = number_of_file(path);
    if (usage < 0)
        return INT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    int64_t inactive = number_in_file(path, files->inactive), active = number_in_file(path, files->active);
    return *limit - usage + (inactive > 0 ? inactive : 0) + (active > 0 ? active : 0);
}

/* The folder in which the memory cgroups are mounted, from /proc/self/mountinfo; `root` is what of the tree is mounted
 * there. Version 1 has the option "memory". */
static bool find_mount(bool second, char *mount, char *root, size_t bytes) {
    FILE *file = fopen("/proc/self/mountinfo", "re");
    if (file == NULL)
        return false;
    char line[4 * LINE];
    bool found = false;
    while (!found && fgets(line, sizeof line, file) != NULL) {
        char *kind = strstr(line, second ? " - cgroup2 " : " - cgroup ");
        char where[LINE], what[LINE];
        if (kind == NULL || sscanf(line, "%*s %*s %*s %511s %511s", what, where) != 2)
            continue;
        char *options = strrchr(kind, ' ');
        if (!second && (options == NULL || strstr(options, "memory") == NULL))
            continue;
        snprintf(mount, bytes, "%s", where);
        snprintf(root, bytes, "%s", strcmp(what, "/") == 0 ? "" : what);
        found = true;
    }
    fclose(file);
    return found;
}

/* This process's path in the hierarchy: the line "0::/path" (version 2) or "4:memory:/path" (version 1). */
static bool find_path(bool second, char *path, size_t bytes) {
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (file == NULL)
        return false;
    char line[4 * LINE];
    bool found = false;
    while (!found && fgets(line, sizeof line, file) != NULL) {
        char *controllers = strchr(line, ':');
        char *at = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (at == NULL)
            continue;
        line[strcspn(line, "\n")] = '\0';
        *at = '\0';
        if (second ? strcmp(line, "0:") != 0 : strstr(controllers, "memory") == NULL)
            continue;
        snprintf(path, bytes, "%s", strcmp(at + 1, "/") == 0 ? "" : at + 1);
        found = true;
    }
    fclose(file);
    return found;
}

static tutti_status check_cgroups(bool second, const char *what, int64_t needed, size_t bytes) {
    char mount[LINE], root[LINE], path[LINE], folder[2 * LINE + 8];
    if (!find_mount(second, mount, root, sizeof mount) || !find_path(second, path, sizeof path))
        return TUTTI_OK;
    /* In a container the mount may show only the container's own part of the tree. */
    char *inside = strncmp(path, root, strlen(root)) == 0 ? path + strlen(root) : path;
    for (;;) {
        int64_t limit;
        snprintf(folder, sizeof folder, "%s%s", mount, inside);
        int64_t room = cgroup_room(folder, second ? &version2 : &version1, &limit);
        if (room < needed)
            return tu_error(TUTTI_ERROR_LIMIT,
                            "%zu bytes of shared memory for %s do not fit below the limit of the cgroup %s: "
                            "%" PRId64 " bytes in all, %" PRId64
                            " left for the ranks of this host; raise its %s or allocate less",
                            bytes, what, inside[0] != '\0' ? inside : "/", limit, room > 0 ? room : 0,
                            second ? version2.limit : version1.limit);
        char *slash = strrchr(inside, '/');
        if (slash == NULL)
            return TUTTI_OK;
        *slash = '\0';
    }
}

static tutti_status check_process_limits(const char *what, size_t bytes) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur)
        return tu_error(TUTTI_ERROR_LIMIT,
                        "%zu bytes of shared memory for %s are more than this process may have in one file: "
                        "RLIMIT_FSIZE is %llu (`ulimit -f`)",
                        bytes, what, (unsigned long long)limit.rlim_cur);
    return TUTTI_OK;
}

static tutti_status check_machine(const char *what, int64_t needed, size_t bytes) {
    int64_t kibibytes = number_in_file("/proc/meminfo", "MemAvailable:");
    if (kibibytes >= 0 && kibibytes < needed / 1024)
        return tu_error(TUTTI_ERROR_MEMORY,
                        "%zu bytes of shared memory for %s do not fit: this machine has %" PRId64
                        " bytes available (MemAvailable), and other ranks are reserving %" PRId64,
                        bytes, what, kibibytes * 1024, needed - (int64_t)bytes);
    return TUTTI_OK;
}

/* ---- asking ---- */

tutti_status tu_ledger_begin(tu_job *job, const char *what, size_t bytes) {
    if (bytes > INT64_MAX / 4)
        return tu_error(TUTTI_ERROR_MEMORY, "%zu bytes of shared memory for %s are more than any machine has", bytes,
                        what);
    tutti_status status = check_process_limits(what, bytes);
    if (status != TUTTI_OK)
        return status;
    int64_t deadline = tu_deadline(SETTLE_LIMIT);
    for (;;) {
        status = lock_ledger(job);
        if (status != TUTTI_OK)
            return status;
        int64_t others = pending_of_others(job);
        status = check_cgroups(true, what, (int64_t)bytes + others, bytes);
        if (status == TUTTI_OK)
            status = check_cgroups(false, what, (int64_t)bytes + others, bytes);
        if (status == TUTTI_OK)
            status = check_machine(what, (int64_t)bytes + others, bytes);
        if (status == TUTTI_OK)
            atomic_fetch_add_explicit(&job->slot->pending, (int64_t)bytes, memory_order_relaxed);
        unlock_ledger(job);
        if (status == TUTTI_OK || others == 0 || tu_deadline_left(deadline) == 0)
            return status;
        /* What others reserve right now counts twice, as theirs and as used: let them finish, then look again. */
        nanosleep(&(struct timespec){ .tv_nsec = TU_MILLISECOND }, NULL);
    }
}

void tu_ledger_end(tu_job *job, size_t bytes, bool reserved) {
    /* Without the lock: an amount that stops pending a moment early was reserved before. */
    if (reserved)
        atomic_fetch_add_explicit(&job->slot->reserved, (int64_t)bytes, memory_order_relaxed);
    atomic_fetch_sub_explicit(&job->slot->pending, (int64_t)bytes, memory_order_relaxed);
}

void tu_ledger_return(tu_job *job, size_t bytes) {
    atomic_fetch_sub_explicit(&job->slot->reserved, (int64_t)bytes, memory_order_relaxed);
}

/* ---- mappings ---- */

static int64_t count_maps(void) {
    FILE *file = fopen("/proc/self/maps", "re");
    if (file == NULL)
        return -1;
    int64_t count = 0;
    for (int c; (c = fgetc_unlocked(file)) != EOF;)
        count += c == '\n';
    fclose(file);
    return count;
}

tutti_status tu_file_size_check(const char *what, size_t bytes) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur)
        return TUTTI_OK;
    return tu_error(TUTTI_ERROR_LIMIT,
                    "%s needs %zu bytes of shared memory, and files of this process may have %llu bytes only "
                    "(RLIMIT_FSIZE, ulimit -f; shared memory counts as a file): raise it",
                    what, bytes, (unsigned long long)limit.rlim_cur);
}

tutti_status tu_map_error(int error_number, const char *what, size_t bytes) {
    struct rlimit limit;
    if (error_number == ENOMEM && getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        long long pages = 0;
        FILE *file = fopen("/proc/self/statm", "re");
        if (file != NULL) {
            if (fscanf(file, "%lld", &pages) != 1)
                pages = 0;
            fclose(file);
        }
        if ((unsigned long long)pages * (unsigned long long)sysconf(_SC_PAGESIZE) + bytes >= limit.rlim_cur)
            return tu_error(TUTTI_ERROR_LIMIT,
                            "cannot map %zu bytes for %s: the address space of this process is limited to %llu "
                            "bytes, RLIMIT_AS (`ulimit -v`)",
                            bytes, what, (unsigned long long)limit.rlim_cur);
    }
    int64_t most = number_of_file("/proc/sys/vm/max_map_count");
    if (error_number == ENOMEM && most > 0 && count_maps() >= most - 2)
        return tu_error(TUTTI_ERROR_LIMIT,
                        "cannot map %zu bytes for %s: this process has as many mappings as the kernel allows, "
                        "vm.max_map_count = %" PRId64 " (raise it with sysctl, or use fewer large blocks)",
                        bytes, what, most);
    return tu_error_system(error_number, "cannot map %zu bytes for %s", bytes, what);
}
