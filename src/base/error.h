/* SPDX-License-Identifier: Apache-2.0
 *
 * Writing the calling thread's error. The function that first sees an error writes the message with one of these and
 * returns their result; its callers pass the status on and touch nothing.
 *
 *     return tu_error(TUTTI_ERROR_RANGE, "rank %d must be in [0, %d)", rank, size);
 */
#ifndef TU_BASE_ERROR_H
#define TU_BASE_ERROR_H

#include <math.h>
#include <stdarg.h>
#include <string.h>

#include <tutti/status.h>

/* Also used by libtutti-tensor, which is a library of its own: exported under the version TUTTI_PRIVATE, and no part of
 * the API. */
#define TU_SHARED TUTTI_API

/* Sets the message and returns `status`. Clears what an earlier error left in the detail. */
TU_SHARED tutti_status tu_error(tutti_status status, const char *format, ...) TUTTI_PRINTF(2, 3);

/* The same for a failed system call: appends ": " and the text of `error_number` (an errno), keeps the number, and
 * chooses the status: MEMORY for ENOMEM, LIMIT for EMFILE, ENFILE, EAGAIN of thread creation and ETOOMANYREFS, NETWORK
 * for connection errors, else SYSTEM. For EMFILE the message names RLIMIT_NOFILE and its value. */
TU_SHARED tutti_status tu_error_system(int error_number, const char *format, ...) TUTTI_PRINTF(2, 3);

/* Out of memory of the C library: "out of memory for <what> (<bytes> bytes)". */
TU_SHARED tutti_status tu_error_memory(const char *what, size_t bytes);

/* Adds context to the error just set: the operation of a group, and ranks at fault. Returns `status` of the error. */
tutti_status tu_error_where(const char *group, const char *operation, uint64_t sequence, int rank);
void tu_error_at_fault(int rank);

/* Appends to the message just set. */
TU_SHARED void tu_error_append(const char *format, ...) TUTTI_PRINTF(1, 2);

/* A message where there is less room: as many of its words as fit, and " …" where that is not all. */
TU_SHARED void tu_error_shorten(char *to, size_t bytes, const char *message);

/* Moving an error between threads: a work's error goes to the thread that waits for it. */
TU_SHARED void tu_error_save(tutti_error_copy *copy);                  /* of the calling thread; sets the size */
TU_SHARED tutti_status tu_error_restore(const tutti_error_copy *copy); /* into the calling thread; returns its status */

/* For the …_init functions of public structs. */
static inline void tu_struct_init(void *made, size_t size) {
    if (made == NULL || size < sizeof size)
        return;
    memset(made, 0, size);
    memcpy(made, &size, sizeof size);
}

/* A number of an options struct: the default for 0, zero for TUTTI_ZERO. */
static inline double tu_option_number(double value, double instead) {
    return value != 0 ? value : signbit(value) ? 0.0 : instead;
}

/* For struct arguments: checks that `options` is NULL or its size is not 0, and copies min(size) bytes over *full,
 * which the caller has set to defaults and whose own size is `full_size`. What lies beyond must be zero: a newer
 * program may not ask for something that is then silently left out. */
TU_SHARED tutti_status tu_options_copy(const char *type, const void *options, void *full, size_t full_size);

#endif
