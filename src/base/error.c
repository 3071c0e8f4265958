/* SPDX-License-Identifier: Apache-2.0
 *
 * The calling thread's last error: a message and its detail, in thread-local storage of fixed size, so that reporting
 * an error never allocates.
 */
#include "base/error.h"
#include "base/result.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define NO_INFO ((tutti_error_info){ .size = sizeof(tutti_error_info), .rank = -1 })
static _Thread_local tutti_error_copy last = { .size = sizeof last,
                                               .info = { .size = sizeof(tutti_error_info), .rank = -1 } };

static const struct {
    const char *name, *text;
} statuses[] = {
    [TUTTI_OK] = { "TUTTI_OK", "success" },
    [TUTTI_ERROR_ARGUMENT] = { "TUTTI_ERROR_ARGUMENT", "an argument has a value that cannot work" },
    [TUTTI_ERROR_TYPE] = { "TUTTI_ERROR_TYPE", "an argument is of the wrong type" },
    [TUTTI_ERROR_RANGE] = { "TUTTI_ERROR_RANGE", "an index, rank, offset or size is out of range" },
    [TUTTI_ERROR_NOT_FOUND] = { "TUTTI_ERROR_NOT_FOUND", "no object of that name" },
    [TUTTI_ERROR_EXISTS] = { "TUTTI_ERROR_EXISTS", "an object of that name exists already" },
    [TUTTI_ERROR_STATE] = { "TUTTI_ERROR_STATE", "the object is not in a state for this call" },
    [TUTTI_ERROR_UNSUPPORTED] = { "TUTTI_ERROR_UNSUPPORTED", "not possible on this machine, build or object" },
    [TUTTI_ERROR_MEMORY] = { "TUTTI_ERROR_MEMORY", "out of memory" },
    [TUTTI_ERROR_LIMIT] = { "TUTTI_ERROR_LIMIT", "a limit of the system was reached" },
    [TUTTI_ERROR_SYSTEM] = { "TUTTI_ERROR_SYSTEM", "a system call failed" },
    [TUTTI_ERROR_TIMEOUT] = { "TUTTI_ERROR_TIMEOUT", "the deadline passed" },
    [TUTTI_ERROR_DEAD] = { "TUTTI_ERROR_DEAD", "a rank died" },
    [TUTTI_ERROR_GONE] = { "TUTTI_ERROR_GONE", "a rank closed its world" },
    [TUTTI_ERROR_MISMATCH] = { "TUTTI_ERROR_MISMATCH", "the ranks disagree" },
    [TUTTI_ERROR_ABORTED] = { "TUTTI_ERROR_ABORTED", "the group was aborted" },
    [TUTTI_ERROR_INTERRUPTED] = { "TUTTI_ERROR_INTERRUPTED", "the world was interrupted" },
    [TUTTI_ERROR_STORE] = { "TUTTI_ERROR_STORE", "a key-value store failed" },
    [TUTTI_ERROR_NETWORK] = { "TUTTI_ERROR_NETWORK", "a connection could not be made or was lost" },
    [TUTTI_ERROR_REFUSED] = { "TUTTI_ERROR_REFUSED", "the other side refused us, or we it" },
    [TUTTI_ERROR_PROTOCOL] = { "TUTTI_ERROR_PROTOCOL", "garbage or another version on the wire or in shared memory" },
    [TUTTI_ERROR_EMPTY] = { "TUTTI_ERROR_EMPTY", "the queue is empty" },
    [TUTTI_ERROR_FORKED] = { "TUTTI_ERROR_FORKED", "called in a forked child" },
    [TUTTI_ERROR_BACKEND] = { "TUTTI_ERROR_BACKEND", "a plug-in, driver or device failed" },
    [TUTTI_ERROR_FAULT] = { "TUTTI_ERROR_FAULT", "a fault was injected on purpose" },
    [TUTTI_ERROR_HANDLE] = { "TUTTI_ERROR_HANDLE", "a tensor is dead" },
    [TUTTI_ERROR_SCOPE] = { "TUTTI_ERROR_SCOPE", "no scope is open" },
    [TUTTI_ERROR_VERSION] = { "TUTTI_ERROR_VERSION", "a saved tensor was changed in place" },
    [TUTTI_ERROR_FREED] = { "TUTTI_ERROR_FREED", "the storage of a tensor is freed" },
    [TUTTI_ERROR_GRAPH] = { "TUTTI_ERROR_GRAPH", "an earlier backward freed the graph" },
    [TUTTI_ERROR_CAPTURE] = { "TUTTI_ERROR_CAPTURE", "a captured function did what no graph can repeat" },
};
#define STATUS_COUNT (sizeof statuses / sizeof statuses[0])

const char *tutti_status_name(tutti_status status) {
    return (unsigned)status < STATUS_COUNT ? statuses[status].name : "TUTTI_ERROR_?";
}

const char *tutti_status_text(tutti_status status) {
    return (unsigned)status < STATUS_COUNT ? statuses[status].text : "unknown status";
}

const char *tutti_version(void) {
    return TUTTI_VERSION_STRING;
}

const char *tutti_error_message(void) {
    return last.message;
}

void tutti_error_clear(void) {
    last.info = NO_INFO;
    last.message[0] = 0;
}

tutti_status tutti_error_detail(tutti_error_info *info) {
    if (info == NULL || info->size < sizeof(size_t))
        return TUTTI_ERROR_ARGUMENT; /* without a message: the last error stays what it is */
    size_t size = info->size < sizeof last.info ? info->size : sizeof last.info;
    size_t callers_size = info->size;
    memcpy(info, &last.info, size);
    info->size = callers_size;
    return TUTTI_OK;
}

/* Ends a text that did not fit into its room after a whole word. */
static void end_after_word(char *text, size_t bytes) {
    static const char more[] = " …";
    if (bytes <= sizeof more)
        return;
    size_t end = bytes - sizeof more;
    while (end > 0 && text[end] != ' ')
        end--;
    if (end == 0) /* one long word: between two characters of it */
        for (end = bytes - sizeof more; end > 0 && ((unsigned char)text[end] & 0xc0) == 0x80;)
            end--;
    memcpy(text + end, more, sizeof more);
}

void tu_error_shorten(char *to, size_t bytes, const char *message) {
    if (snprintf(to, bytes, "%s", message) >= (int)bytes)
        end_after_word(to, bytes);
}

static void format_message(char *to, size_t bytes, const char *format, va_list arguments) TUTTI_PRINTF(3, 0);
static void format_message(char *to, size_t bytes, const char *format, va_list arguments) {
    if (vsnprintf(to, bytes, format, arguments) >= (int)bytes)
        end_after_word(to, bytes);
}

static void append(const char *format, va_list arguments) TUTTI_PRINTF(1, 0);
static void append(const char *format, va_list arguments) {
    size_t used = strlen(last.message), room = sizeof last.message - used;
    if (vsnprintf(last.message + used, room, format, arguments) >= (int)room)
        end_after_word(last.message, sizeof last.message);
}

static void start(tutti_status status) {
    last.info = NO_INFO;
    last.info.status = status;
}

tutti_status tu_error(tutti_status status, const char *format, ...) {
    /* An argument may be the old message itself: format first, then replace. */
    char message[sizeof last.message];
    va_list arguments;
    va_start(arguments, format);
    format_message(message, sizeof message, format, arguments);
    va_end(arguments);
    start(status);
    memcpy(last.message, message, sizeof message);
    return status;
}

static tutti_status status_of_errno(int error_number) {
    switch (error_number) {
    case ENOMEM:
    case ENOSPC:
        return TUTTI_ERROR_MEMORY;
    case EMFILE:
    case ENFILE:
    case EAGAIN:
    case ETOOMANYREFS:
        return TUTTI_ERROR_LIMIT;
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case EPIPE:
    case ENETUNREACH:
    case EHOSTUNREACH:
    case ENETDOWN:
    case EADDRINUSE:
    case EADDRNOTAVAIL:
    case ETIMEDOUT:
    case ENOTCONN:
        return TUTTI_ERROR_NETWORK;
    default:
        return TUTTI_ERROR_SYSTEM;
    }
}

tutti_status tu_error_system(int error_number, const char *format, ...) {
    char message[sizeof last.message];
    va_list arguments;
    va_start(arguments, format);
    format_message(message, sizeof message, format, arguments);
    va_end(arguments);
    char text[128];
    tutti_status status =
        tu_error(status_of_errno(error_number), "%s: %s", message, strerror_r(error_number, text, sizeof text));
    last.info.system_error = error_number;
    if (error_number == EMFILE) {
        struct rlimit limit;
        if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
            tu_error_append(" (this process may have %llu open files, RLIMIT_NOFILE; raise it with `ulimit -n`)",
                            (unsigned long long)limit.rlim_cur);
    }
    return status;
}

tutti_status tu_error_memory(const char *what, size_t bytes) {
    return tu_error(TUTTI_ERROR_MEMORY, "out of memory for %s (%zu bytes)", what, bytes);
}

tutti_status tu_error_where(const char *group, const char *operation, uint64_t sequence, int rank) {
    snprintf(last.info.group, sizeof last.info.group, "%s", group);
    snprintf(last.info.operation, sizeof last.info.operation, "%s", operation);
    last.info.sequence = sequence;
    last.info.rank = rank;
    return last.info.status;
}

void tu_error_at_fault(int rank) {
    for (int i = 0; i < last.info.at_fault_count; i++)
        if (last.info.at_fault[i] == rank)
            return;
    if (last.info.at_fault_count < TUTTI_ERROR_RANKS)
        last.info.at_fault[last.info.at_fault_count++] = rank;
}

void tu_error_append(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    append(format, arguments);
    va_end(arguments);
}

void tu_error_save(tutti_error_copy *copy) {
    *copy = last;
}

tutti_status tu_error_restore(const tutti_error_copy *copy) {
    last = *copy;
    return last.info.status;
}

static tutti_status read_size(const char *type, const void *given, size_t *size) {
    memcpy(size, given, sizeof *size);
    if (*size == 0)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s.size is 0: set it to sizeof(%s), as the INIT macro does", type, type);
    if (*size < sizeof *size)
        return tu_error(TUTTI_ERROR_ARGUMENT, "%s.size is %zu, less than the field itself", type, *size);
    return TUTTI_OK;
}

tutti_status tu_result_copy(const char *type, const void *full, size_t full_size, void *result) {
    size_t size;
    if (result == NULL)
        return tu_error(TUTTI_ERROR_ARGUMENT, "the place for a %s is NULL", type);
    tutti_status status = read_size(type, result, &size);
    if (status != TUTTI_OK)
        return status;
    memcpy(result, full, size < full_size ? size : full_size);
    memcpy(result, &size, sizeof size);
    return TUTTI_OK;
}

tutti_status tu_options_copy(const char *type, const void *options, void *full, size_t full_size) {
    if (options == NULL)
        return TUTTI_OK;
    size_t size;
    tutti_status status = read_size(type, options, &size);
    if (status != TUTTI_OK)
        return status;
    for (size_t i = full_size; i < size; i++)
        if (((const unsigned char *)options)[i] != 0)
            return tu_error(TUTTI_ERROR_UNSUPPORTED,
                            "%s.size is %zu, and a field at byte %zu is set that Tutti " TUTTI_VERSION_STRING
                            " (%zu bytes) does not know: leave it 0, or update the library",
                            type, size, i, full_size);
    memcpy(full, options, size < full_size ? size : full_size);
    memcpy(full, &full_size, sizeof full_size);
    return TUTTI_OK;
}

/* ---- for programs ---- */

tutti_status tutti_error_set(tutti_status status, const char *message) {
    return status == TUTTI_OK ? TUTTI_OK : tu_error(status, "%s", message != NULL ? message : "");
}

tutti_status tutti_error_save(tutti_error_copy *copy) {
    if (copy == NULL || copy->size < sizeof *copy)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_error_save: the copy is NULL or has no size: set it to TUTTI_ERROR_COPY_INIT");
    memcpy(copy->message, last.message, sizeof copy->message);
    copy->info = last.info;
    return TUTTI_OK;
}

tutti_status tutti_error_restore(const tutti_error_copy *copy) {
    if (copy == NULL || copy->size < sizeof *copy)
        return tu_error(TUTTI_ERROR_ARGUMENT,
                        "tutti_error_restore: the copy is NULL or has no size: set it to TUTTI_ERROR_COPY_INIT");
    memcpy(last.message, copy->message, sizeof last.message);
    last.message[sizeof last.message - 1] = 0;
    last.info = copy->info;
    last.info.size = sizeof last.info;
    return last.info.status;
}

void tutti_free(void *memory) {
    free(memory);
}
