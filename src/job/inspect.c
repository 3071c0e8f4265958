/* SPDX-License-Identifier: Apache-2.0
 *
 * Looking into jobs from outside: /proc, the check of a segment, and the publishing of exit statuses.
 */
#include "job/inspect.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

#define LINK_PREFIX "/memfd:" TU_PAGE_NAME

/* Flags of a task in /proc/PID/stat, as the kernel has had them since 2.6. */
#define TASK_EXITING 0x4u
#define TASK_SIGNALED 0x400u

static bool known(const tu_job_list *list, const struct stat *file) {
    for (size_t i = 0; i < list->count; i++)
        if (list->jobs[i].device == file->st_dev && list->jobs[i].inode == file->st_ino)
            return true;
    return false;
}

/* Whether the open descriptor is a job segment that can be believed so far; else says why not. */
static bool acceptable(int descriptor, const struct stat *file, char *why, size_t why_bytes, int pid) {
    int seals = fcntl(descriptor, F_GET_SEALS);
    if (seals < 0 || (seals & TU_PAGE_SEALS) != TU_PAGE_SEALS) {
        snprintf(why, why_bytes,
                 "a job segment of pid %d is not sealed: its job is still being founded, or it is no job of Tutti",
                 pid);
        return false;
    }
    if (file->st_uid != geteuid()) {
        snprintf(why, why_bytes, "a job segment of pid %d belongs to user %u", pid, (unsigned)file->st_uid);
        return false;
    }
    return file->st_size > 0;
}

/* Opens, checks and maps the segment behind /proc/PID/fd/N; adds it unless it is known or not acceptable. */
static tutti_status add_segment(tu_job_list *list, int pid, const char *descriptor_name, int directory, bool writable) {
    struct stat file;
    if (fstatat(directory, descriptor_name, &file, 0) != 0 || known(list, &file))
        return TUTTI_OK;
    int descriptor = openat(directory, descriptor_name, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return TUTTI_OK; /* closed meanwhile */
    tutti_status status = TUTTI_OK;
    if (fstat(descriptor, &file) != 0 || !acceptable(descriptor, &file, list->skipped, sizeof list->skipped, pid))
        goto close_descriptor;
    size_t bytes = (size_t)file.st_size;
    void *address = mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) {
        status = tu_error_system(errno, "cannot map the job segment of pid %d (%zu bytes)", pid, bytes);
        goto close_descriptor;
    }
    char whose[64];
    snprintf(whose, sizeof whose, "the job segment of pid %d", pid);
    if (tu_page_check(address, bytes, whose) != TUTTI_OK) {
        tu_error_shorten(list->skipped, sizeof list->skipped, tutti_error_message());
        goto unmap;
    }
    int size = ((const tu_page *)address)->size;
    if (bytes < tu_page_bytes_least(size)) { /* it changed since */
        snprintf(list->skipped, sizeof list->skipped, "%s changes while it is read", whose);
        goto unmap;
    }
    tu_job_view *jobs = realloc(list->jobs, (list->count + 1) * sizeof *jobs);
    if (jobs == NULL) {
        status = tu_error_memory("the list of jobs", (list->count + 1) * sizeof *jobs);
        goto unmap;
    }
    list->jobs = jobs;
    list->jobs[list->count++] = (tu_job_view){ address, bytes, size, file.st_dev, file.st_ino, writable, pid };
    goto close_descriptor;
unmap:
    munmap(address, bytes);
close_descriptor:
    close(descriptor);
    return status;
}

tutti_status tu_inspect_process(tu_job_list *list, int pid, bool writable) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *folder = opendir(path);
    if (folder == NULL)
        return TUTTI_OK;
    tutti_status status = TUTTI_OK;
    struct dirent *entry;
    while (status == TUTTI_OK && (entry = readdir(folder)) != NULL) {
        char target[sizeof LINK_PREFIX];
        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        ssize_t length = readlinkat(dirfd(folder), entry->d_name, target, sizeof target);
        if (length >= (ssize_t)sizeof LINK_PREFIX - 1 && memcmp(target, LINK_PREFIX, sizeof LINK_PREFIX - 1) == 0)
            status = add_segment(list, pid, entry->d_name, dirfd(folder), writable);
    }
    closedir(folder);
    return status;
}

tutti_status tu_inspect_user(tu_job_list *list) {
    DIR *folder = opendir("/proc");
    if (folder == NULL)
        return tu_error_system(errno, "cannot read /proc, where running jobs are found");
    tutti_status status = TUTTI_OK;
    struct dirent *entry;
    while (status == TUTTI_OK && (entry = readdir(folder)) != NULL) {
        struct stat process;
        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        if (fstatat(dirfd(folder), entry->d_name, &process, 0) == 0 && process.st_uid == geteuid())
            status = tu_inspect_process(list, atoi(entry->d_name), false);
    }
    closedir(folder);
    return status;
}

void tu_inspect_free(tu_job_list *list) {
    for (size_t i = 0; i < list->count; i++)
        munmap((void *)list->jobs[i].page, list->jobs[i].bytes);
    free(list->jobs);
    *list = (tu_job_list){ 0 };
}

bool tu_inspect_publish(const tu_job_list *list, int pid, int wait_status) {
    bool found = false;
    for (size_t i = 0; i < list->count; i++) {
        const tu_page *page = list->jobs[i].page;
        for (int rank = 0; list->jobs[i].writable && rank < list->jobs[i].size; rank++) {
            tu_slot *slot = tu_page_slot(page, rank);
            /* Acquire pairs with the owner's release when its state left EMPTY: its pid is complete. */
            if (atomic_load_explicit(&slot->state, memory_order_acquire) == TU_SLOT_EMPTY || slot->pid != pid)
                continue;
            uint64_t unset = 0;
            atomic_compare_exchange_strong_explicit(&slot->wait_status, &unset,
                                                    TU_SLOT_PUBLISHED | (uint32_t)wait_status, memory_order_release,
                                                    memory_order_relaxed);
            found = true;
        }
    }
    return found;
}

void tu_death_publish(int pid, int wait_status, const int *survivors, int count) {
    tu_job_list list = { 0 };
    for (int i = 0; i < count; i++)
        if (tu_inspect_process(&list, survivors[i], true) != TUTTI_OK)
            break; /* no memory: publish where it was possible */
    tu_inspect_publish(&list, pid, wait_status);
    tu_inspect_free(&list);
}

bool tu_process_look(int pid, tu_process_view *view) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return false;
    ssize_t length = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    if (length <= 0)
        return false;
    text[length] = '\0';
    char *open_bracket = strchr(text, '('), *close_bracket = strrchr(text, ')'); /* a name may contain brackets */
    if (open_bracket == NULL || close_bracket == NULL)
        return false;
    memset(view, 0, sizeof *view);
    snprintf(view->name, sizeof view->name, "%.*s", (int)(close_bracket - open_bracket - 1), open_bracket + 1);
    unsigned flags = 0;
    long long user = 0, kernel = 0;
    unsigned long long start = 0;
    /* From field 3: state, ppid, …, 9 flags, …, 14 utime, 15 stime, …, 22 starttime, …, 39 processor. */
    int read_fields =
        sscanf(close_bracket + 1,
               " %c %d %*d %*d %*d %*d %u %*u %*u %*u %*u %lld %lld %*d %*d %*d %*d %*d %*d %llu %*u %*d %*u "
               "%*u %*u %*u %*u %*u %*u %*u %*u %*u %*u %*u %*u %*d %d",
               &view->state, &view->parent, &flags, &user, &kernel, &start, &view->cpu);
    if (read_fields < 7)
        return false;
    view->exiting = (flags & TASK_EXITING) != 0 || view->state == 'Z' || view->state == 'X';
    view->signaled = (flags & TASK_SIGNALED) != 0;
    view->start_time = start;
    view->cpu_ticks = user + kernel;
    return true;
}
