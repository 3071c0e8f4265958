/* SPDX-License-Identifier: Apache-2.0
 *
 * tutti_call: what every operation takes as its last argument, NULL for defaults.
 *
 *     tutti_barrier(group, TUTTI_OPTIONS(tutti_call, .timeout_ns = 5000000000));
 *
 * One tutti_call without `work`, `received` and `batch` may serve many calls and threads.
 */
#ifndef TUTTI_CALL_H
#define TUTTI_CALL_H

#include <stddef.h>
#include <stdint.h>

#include <tutti/device.h>
#include <tutti/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tutti_work tutti_work;   /* tutti/work.h */
typedef struct tutti_batch tutti_batch; /* tutti/collective.h */

/* How an operation moves its data. Values are written out and never reused. */
typedef enum tutti_algorithm {
    TUTTI_ALGORITHM_AUTO = 0,     /* by the tuning table: from the operation, its bytes and the number of ranks */
    TUTTI_ALGORITHM_INLINE = 1,   /* tiny payload in the cache line of the flag: one hand-over */
    TUTTI_ALGORITHM_ONE_SHOT = 2, /* every rank publishes its input, then takes what it needs from all: one hand-over */
    TUTTI_ALGORITHM_TWO_SHOT = 3, /* reductions: each rank reduces its slice and hands it to all */
    TUTTI_ALGORITHM_PIPELINED =
        4,                   /* moves: where the buffers lie when they are symmetric, else in chunks through staging */
    TUTTI_ALGORITHM_TREE = 5 /* through one leader per cache or NUMA domain: barrier and broadcast */
} tutti_algorithm;

/* In which order a reduction adds. */
typedef enum tutti_order {
    TUTTI_ORDER_RANK = 0, /* 0 to n - 1: the same bits wherever and however it runs */
    TUTTI_ORDER_ANY = 1   /* whatever is quickest; all ranks still get the same bits. It matters between hosts:
                             docs/hosts.md. tutti_group_ran tells what ran. */
} tutti_order;

/* What a receive got. Set `size` before the call (TUTTI_RECEIVED_INIT does). */
typedef struct tutti_received {
    size_t size;
    int source; /* rank in the group */
    int tag;
    size_t count; /* elements */
} tutti_received;
#define TUTTI_RECEIVED_INIT TUTTI_DEFAULTS(tutti_received)
/* TUTTI_RECEIVED_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_received_init(tutti_received *received, size_t size);

/* Elements that do not lie one after the other: in blocks of `block`, each beginning `stride` elements after the last.
 * A column of a row-major matrix has block 1 and the length of a row as stride. */
typedef struct tutti_strided {
    size_t size;
    size_t block;
    size_t stride;
} tutti_strided;
#define TUTTI_STRIDED_INIT TUTTI_DEFAULTS(tutti_strided)
/* TUTTI_STRIDED_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_strided_init(tutti_strided *strided, size_t size);

typedef struct tutti_call {
    size_t size;
    int64_t timeout_ns;        /* relative; 0: the group's, the world's, then 300 s; negative is an error, but for
                                  TUTTI_UNTIL_EVENT in a receive */
    void *stream;              /* a CUstream; not used for memory of the CPU */
    tutti_algorithm algorithm; /* forced, the same on all ranks; one that the operation does not have is an error */
    const void *factor; /* TUTTI_PREMUL_SUM: one element of the dtype, of its real part for complex; read before the
                           call returns */
    tutti_received *received; /* of a receive: filled when it is complete */
    tutti_work **work;        /* not NULL: the call only starts the operation and stores one reference here */
    tutti_batch *batch;       /* not NULL: the call is only noted, and runs with tutti_batch_end; `work` must be NULL */
    const char *executor; /* who runs it, the same on all ranks: "shm", "cuda" …; NULL: the first that serves it. One
                             that is not there is an error that lists those that are */
    tutti_device device;  /* where the buffers lie, so that nobody has to find out; 0: it is found out */
    const tutti_strided *strided_in;  /* of a send: how the elements of its input lie; NULL: one after the other */
    const tutti_strided *strided_out; /* of a receive: likewise its output */
    tutti_order order;                /* of a reduction, the same on all ranks */
} tutti_call;
#define TUTTI_CALL_INIT TUTTI_DEFAULTS(tutti_call)
/* TUTTI_CALL_INIT as a function: zeroes `size` bytes and sets the field. */
TUTTI_API void tutti_call_init(tutti_call *call, size_t size);

#ifdef __cplusplus
}
#endif
#endif
