/* SPDX-License-Identifier: Apache-2.0
 *
 * Status codes and error messages: how every Tutti function says what went wrong.
 *
 * THE ERROR CONVENTION, ONCE FOR ALL HEADERS
 *
 * - A function that can fail returns a tutti_status. TUTTI_OK (0) is success; everything else is a failure.
 * - Results come through pointers that stand last in the argument list and are written only on success.
 * - After a failure tutti_error_message() returns, for the calling thread, a sentence or two that say what
 *   happened, to which rank, the likely cause and what to try. tutti_error_detail() gives the same as data.
 * - Nothing in Tutti aborts the process, and nothing but warnings is printed unless logging asks for it.
 *
 * From the error kinds that people know from PyTorch to Tutti's statuses:
 *
 *     ValueError, AssertionError          TUTTI_ERROR_ARGUMENT
 *     TypeError                           TUTTI_ERROR_TYPE
 *     KeyError                            TUTTI_ERROR_NOT_FOUND
 *     IndexError                          TUTTI_ERROR_RANGE
 *     NotImplementedError                 TUTTI_ERROR_UNSUPPORTED
 *     RuntimeError                        TUTTI_ERROR_STATE, or the more exact code where there is one
 *     DistStoreError                      TUTTI_ERROR_STORE; a store's timeout is TUTTI_ERROR_TIMEOUT
 *     DistNetworkError                    TUTTI_ERROR_NETWORK
 *     DistQueueEmptyError                 TUTTI_ERROR_EMPTY
 *     DistBackendError                    TUTTI_ERROR_BACKEND
 */
#ifndef TUTTI_STATUS_H
#define TUTTI_STATUS_H

#include <stddef.h>
#include <stdint.h>

#include <tutti/export.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Values are written out and never reused. */
typedef enum tutti_status {
    TUTTI_OK = 0,
    TUTTI_ERROR_ARGUMENT = 1,    /* an argument has a value that cannot work */
    TUTTI_ERROR_TYPE = 2,        /* an argument is of the wrong type: dtype, reduction, kind of object */
    TUTTI_ERROR_RANGE = 3,       /* an index, rank, offset or size lies outside its range */
    TUTTI_ERROR_NOT_FOUND = 4,   /* no object of that name */
    TUTTI_ERROR_EXISTS = 5,      /* an object of that name is there already */
    TUTTI_ERROR_STATE = 6,       /* right call, wrong moment: closed, in use, not ready */
    TUTTI_ERROR_UNSUPPORTED = 7, /* this machine, build or object cannot do that; the message says why */
    TUTTI_ERROR_MEMORY = 8,      /* out of memory, at allocation */
    TUTTI_ERROR_LIMIT = 9,       /* a limit of the system was reached: descriptors, mappings, threads, locked memory */
    TUTTI_ERROR_SYSTEM = 10, /* a system call failed; the message and tutti_error_info.system_error say which and how */
    TUTTI_ERROR_TIMEOUT = 11,     /* the deadline passed */
    TUTTI_ERROR_DEAD = 12,        /* a rank died */
    TUTTI_ERROR_GONE = 13,        /* a rank closed its world, properly, while others still counted on it */
    TUTTI_ERROR_MISMATCH = 14,    /* ranks disagree: operation, count, dtype, reduction, root, order, size */
    TUTTI_ERROR_ABORTED = 15,     /* somebody called tutti_group_abort */
    TUTTI_ERROR_INTERRUPTED = 16, /* somebody called tutti_world_interrupt */
    TUTTI_ERROR_STORE = 17,       /* a key-value store failed */
    TUTTI_ERROR_NETWORK = 18,     /* a connection could not be made or was lost */
    TUTTI_ERROR_REFUSED = 19,     /* the other side does not trust us, or we not it: secret, user, nonce */
    TUTTI_ERROR_PROTOCOL = 20,    /* garbage, or another version, on the wire or in shared memory */
    TUTTI_ERROR_EMPTY = 21,       /* a queue is empty */
    TUTTI_ERROR_FORKED = 22,      /* called in a forked child of the process that opened the world */
    TUTTI_ERROR_BACKEND = 23,     /* a plug-in, driver or device reported an error */
    TUTTI_ERROR_FAULT = 24,       /* injected on purpose, see tutti/fault.h */
    TUTTI_ERROR_HANDLE = 25,      /* a tensor is dead: its scope was closed, or it was released once too often */
    TUTTI_ERROR_SCOPE = 26,       /* no scope is open in this thread to own a result */
    TUTTI_ERROR_VERSION = 27,     /* a tensor saved for a gradient was changed in place since */
    TUTTI_ERROR_FREED = 28,       /* the storage of a tensor is freed, or too small for it */
    TUTTI_ERROR_GRAPH = 29,       /* an earlier backward freed what this one needs */
    TUTTI_ERROR_CAPTURE = 30      /* a function that is being captured did what no graph can repeat */
} tutti_status;

/* The name of a status, "TUTTI_ERROR_TIMEOUT" for instance. Never NULL; an unknown value gives "TUTTI_ERROR_?". */
TUTTI_API const char *tutti_status_name(tutti_status status);

/* What a status means, in a few words. Never NULL. */
TUTTI_API const char *tutti_status_text(tutti_status status);

/* The calling thread's last error, in words. Never NULL; "" before the first error. Valid until the thread's
 * next failing Tutti call. A success leaves it as it was. */
TUTTI_API const char *tutti_error_message(void);

#define TUTTI_ERROR_RANKS 64

/* The calling thread's last error, as data. Set `size` before the call (TUTTI_ERROR_INFO_INIT does). */
typedef struct tutti_error_info {
    size_t size;
    tutti_status status;
    int rank;           /* of the caller, in `group`; -1 where no group was involved */
    uint64_t sequence;  /* of the operation in its group */
    char group[64];     /* name of the group, "" where none was involved */
    char operation[32]; /* "all_reduce", "rendezvous", … */
    int system_error;   /* errno of the system call that failed, or 0 */
    int at_fault_count; /* how many of `at_fault` are set: dead, missing, differing, aborting ranks */
    int at_fault[TUTTI_ERROR_RANKS];
} tutti_error_info;

#define TUTTI_ERROR_INFO_INIT TUTTI_DEFAULTS(tutti_error_info)
/* TUTTI_ERROR_INFO_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_error_info_init(tutti_error_info *error_info, size_t size);

/* Copies the calling thread's last error into *info, as far as info->size reaches. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_error_detail(tutti_error_info *info);

/* Forgets the calling thread's last error. */
TUTTI_API void tutti_error_clear(void);

/* Sets the calling thread's last error, for functions of the program that follow this convention, and returns
 * `status`. TUTTI_OK changes nothing. */
TUTTI_API tutti_status tutti_error_set(tutti_status status, const char *message);

#define TUTTI_ERROR_MESSAGE 2048 /* bytes of the longest message, with the zero byte at its end */

/* A thread's last error, set aside: to make calls that may fail without losing it, or to take it to another thread. */
typedef struct tutti_error_copy {
    size_t size;
    char message[TUTTI_ERROR_MESSAGE];
    tutti_error_info info;
} tutti_error_copy;
#define TUTTI_ERROR_COPY_INIT TUTTI_DEFAULTS(tutti_error_copy)
/* TUTTI_ERROR_COPY_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_error_copy_init(tutti_error_copy *copy, size_t size);

/* Copies the calling thread's last error to *copy, whose size is set. */
TUTTI_API TUTTI_CHECKED tutti_status tutti_error_save(tutti_error_copy *copy);

/* Makes *copy the calling thread's last error, and returns the status of that error. */
TUTTI_API tutti_status tutti_error_restore(const tutti_error_copy *copy);

#ifdef __cplusplus
}
#endif
#endif
